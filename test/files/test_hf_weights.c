/*
Hugging Face folders that are right, though they look unusual: other spellings, settings that are not in effect, a tied
matrix under its second name, tensors that carry no weights. They load, with the values of the usual one; what is only
nearly like them is refused. Everything that is plainly wrong is in test_weights_bad.c.
*/
#include "weight_files.h"

#define CONFIG "config.json"
#define MODEL  HF_SINGLE_FILE

// ---- config.json ----------------------------------------------------------------------------------------------------
// The windows of a model's layers, "5 0 5 ".
static void expect_windows(const char *folder, const char *expected) {
    char remark[256], found[256] = "";
    Config config = hf_directory_config(folder, remark, sizeof(remark));
    for (size_t l = 0; l < config.num_hidden_layers; l++)
        snprintf(found + strlen(found), sizeof(found) - strlen(found), "%zu ", layer_window(&config, l));
    if (strcmp(found, expected) != 0) test_fail("windows %s, expected %s", found, expected);
}

// Each row changes the config.json of the row before it, or of a fresh copy. Qwen's windows are in effect where
// use_sliding_window is true, for layers from max_window_layers on.
TEST(windows) {
    static const struct {
        const char *golden, *find, *replace, *windows; // windows NULL: not looked at
    } cases[] = {
        {"qwen2", "\"layer_types\"", "\"was\"", NULL},
        {NULL, "\"max_window_layers\": 28", "\"max_window_layers\": 1", NULL},
        {NULL, "\"sliding_window\": null", "\"sliding_window\": 64", "0 0 0 "},
        {NULL, "\"use_sliding_window\": false", "\"use_sliding_window\": true", "0 64 64 "},
        {NULL, "\"max_window_layers\": 1", "\"max_window_layers\": 3", "0 0 0 "}, // no layer uses it
        {NULL, "\"max_window_layers\": 3", "\"max_window_layers\": 0", "64 64 64 "},
        {NULL, "\"sliding_window\": 64", "\"sliding_window\": null", "0 0 0 "},
        {NULL, "\"sliding_window\"", "\"was also\"", "4096 4096 4096 "}, // the class's default
        {"mistral", NULL, NULL, "7 7 7 "},
        {NULL, "\"sliding_window\": 7", "\"sliding_window\": null", "0 0 0 "},
        {NULL, "\"sliding_window\"", "\"was\"", "4096 4096 4096 "},
        {"gemma3-linear", NULL, NULL, "5 0 5 "},
        {NULL, "\"sliding_window_pattern\": 2", "\"sliding_window_pattern\": 3", "5 5 0 "},
        {NULL, "\"sliding_window_pattern\": 3", "\"sliding_window_pattern\": 1", "0 0 0 "},
        {NULL, "\"sliding_window_pattern\": 1,", "", "5 5 5 "}, // every sixth would have none
        {"gemma3", NULL, NULL, "8 8 8 8 8 0 8 "},
    };
    char path[PATH_MAX];
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("row %zu", i);
        if (cases[i].golden) copy_golden(cases[i].golden);
        path_join(path, scratch_path("model"), CONFIG);
        if (cases[i].find) edit_file(path, cases[i].find, cases[i].replace);
        if (!cases[i].windows) continue;
        expect_good(scratch_path("model"));
        expect_windows(scratch_path("model"), cases[i].windows);
    }
}

// ---- names ----------------------------------------------------------------------------------------------------------
// The copy must hold what the golden model does, to the bit.
static void expect_same_values(const char *copy, const char *golden) {
    expect_good(copy);
    expect_same_weights(golden, copy, DTYPE_FP32);
}

// Puts a tensor of zeros into the copy, behind the others.
static void add_tensor(const char *copy, const char *name, size_t rows, size_t cols) {
    char path[PATH_MAX];
    size_t bytes;
    uint64_t prefix;
    path_join(path, copy, MODEL);
    char *file = read_whole(path, &bytes);
    memcpy(&prefix, file, 8);
    size_t length = (size_t)prefix, data = bytes - 8 - length;
    char *header = (char *)case_memory(length + 500);
    memcpy(header, file + 8, length);
    while (header[length - 1] != '}') length--;
    length += (size_t)sprintf(header + length - 1,
                              ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%zu,%zu],\"data_offsets\":[%zu,%zu]}}", name, rows,
                              cols, data, data + rows * cols * 4) -
              1;
    file = (char *)memcpy(case_memory(data + rows * cols * 4), file + 8 + prefix, data);
    write_safetensors(path, header, length, file, data + rows * cols * 4);
}

TEST(a_tied_matrix_has_two_names) {
    const char *golden = GOLDEN "llama-tied", *copy = copy_golden("llama-tied"); // vocabulary 128, hidden size 32
    char path[PATH_MAX];
    path_join(path, copy, MODEL);
    expect_same_values(copy, golden);
    add_tensor(copy, "lm_head.weight", 128, 32); // both, but not the same
    expect_bad(copy, "ties lm_head.weight to model.embed_tokens.weight, but the files hold two different matrices");
    copy = copy_golden("llama-tied");
    add_tensor(copy, "lm_head.weight", 128, 64);
    expect_bad(copy, "tensor lm_head.weight has shape [128, 64], but config.json ties it to model.embed_tokens.weight, "
                     "which has [128, 32]");
    copy = copy_golden("llama-tied");
    edit_file(path, "model.embed_tokens.weight", "lm_head.weight");
    expect_same_values(copy, golden);
    edit_file(path, "lm_head.weight", "lm_head.w");
    expect_bad(copy, "tensor model.embed_tokens.weight is missing");
    copy = copy_golden("llama-tied");
    edit_file(path, "model.embed_tokens.weight", "lm_head.weight");
    path_join(path, copy, CONFIG);
    edit_file(path, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    expect_bad(copy, "tensor model.embed_tokens.weight is missing"); // not tied: two matrices
    copy = copy_golden("llama-tied");
    path_join(path, copy, CONFIG);
    edit_file(path, "\"vocab_size\": 128", "\"vocab_size\": 100");
    path_join(path, copy, MODEL);
    edit_file(path, "model.embed_tokens.weight", "lm_head.weight");
    expect_bad(copy, "tensor lm_head.weight has shape [128, 32], but config.json asks for [100, 32]");
}

// Frequencies of rotary positions, which older versions saved: in the layers, in the model, in a base model.
TEST(frequencies_are_no_weights) {
    static const char *const names[] = {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
                                        "rotary_emb.inv_freq"};
    const char *copy;
    for (size_t i = 0; i < 3; i++) {
        test_case("%s", names[i]);
        copy = copy_golden("llama-tied");
        add_tensor(copy, names[i], 1, 4);
        expect_same_values(copy, GOLDEN "llama-tied");
    }
    copy = copy_golden("llama-tied");
    add_tensor(copy, "my_rotary_emb.inv_freq", 1, 4);
    expect_bad(copy, "tensor my_rotary_emb.inv_freq is not one of LlamaForCausalLM");
    copy = copy_golden("gpt2");
    add_tensor(copy, "rotary_emb.inv_freq", 1, 4);
    expect_bad(copy, "tensor rotary_emb.inv_freq is not one of GPT2LMHeadModel");
}

// Names without "model.", as a base model is saved.
TEST(base_models) {
    const char *copy = copy_golden("llama-tied");
    char path[PATH_MAX], *file;
    size_t bytes;
    path_join(path, copy, MODEL);
    while (file = read_whole(path, &bytes), memmem(file, bytes, "\"model.", 7)) edit_file(path, "\"model.", "\"");
    add_tensor(copy, "rotary_emb.inv_freq", 1, 4);
    expect_same_values(copy, GOLDEN "llama-tied");
}

// Both a file and an index: the file is taken, as transformers does, and nobody looks at the other.
TEST(the_single_file_comes_first) {
    const char *copy = copy_golden("llama");
    run_command("printf nonsense > '%s/" HF_INDEX_FILE "'", copy, "");
    expect_good(copy);
    run_command("cp " GOLDEN "llama-sharded/model-* '%s' && printf nonsense > '%s/model.safetensors'", copy, copy);
    run_command("cp " GOLDEN "llama-sharded/" HF_INDEX_FILE " '%s'", copy, "");
    expect_bad(copy, "model.safetensors: claims a header of ");
    run_command("rm '%s/model.safetensors'", copy, "");
    expect_good(copy);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
