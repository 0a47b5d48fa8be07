/*
Hugging Face folders that are right, though they look unusual: other spellings, settings that are not in effect, a tied matrix
under its second name, tensors that carry no weights. They load, with the values of the usual one; what is only nearly like
them is refused. Everything that is plainly wrong is in test_weights_bad.c.
*/
#include "weight_files.h"

#define CONFIG "config.json"
#define MODEL  HF_SINGLE_FILE

// ---- config.json -------------------------------------------------------------------------------------------------------------
typedef struct {
    const char *golden, *file, *find, *replace;
} Edit;

// The windows of a model's layers, "5 0 5 ".
static void expect_windows(const char *folder, const char *expected) {
    char remark[256], found[256] = "";
    Config config = hf_directory_config(folder, remark, sizeof(remark));
    for (size_t l = 0; l < config.num_hidden_layers; l++)
        snprintf(found + strlen(found), sizeof(found) - strlen(found), "%zu ", layer_window(&config, l));
    if (strcmp(found, expected) != 0) test_fail("windows %s, expected %s", found, expected);
}

// Qwen's windows: in effect where use_sliding_window is true, for layers from max_window_layers on.
TEST(windows_in_effect) {
    const char *copy = copy_golden("qwen2");
    char path[PATH_MAX];
    path_join(path, copy, CONFIG);
    edit_file(path, "\"layer_types\"", "\"was\"");
    edit_file(path, "\"max_window_layers\": 28", "\"max_window_layers\": 1");
    edit_file(path, "\"sliding_window\": null", "\"sliding_window\": 64");
    expect_windows(copy, "0 0 0 "); // not in effect
    edit_file(path, "\"use_sliding_window\": false", "\"use_sliding_window\": true");
    expect_good(copy);
    expect_windows(copy, "0 64 64 ");
    edit_file(path, "\"max_window_layers\": 1", "\"max_window_layers\": 3");
    expect_windows(copy, "0 0 0 "); // no layer uses it
    edit_file(path, "\"max_window_layers\": 3", "\"max_window_layers\": 0");
    expect_windows(copy, "64 64 64 ");
    edit_file(path, "\"sliding_window\": 64", "\"sliding_window\": null");
    expect_windows(copy, "0 0 0 ");
    edit_file(path, "\"sliding_window\"", "\"was also\"");
    expect_windows(copy, "4096 4096 4096 "); // the class's default
}

TEST(windows_of_other_families) {
    const char *copy = copy_golden("mistral");
    char path[PATH_MAX];
    path_join(path, copy, CONFIG);
    expect_windows(copy, "7 7 7 ");
    edit_file(path, "\"sliding_window\": 7", "\"sliding_window\": null");
    expect_windows(copy, "0 0 0 ");
    edit_file(path, "\"sliding_window\"", "\"was\"");
    expect_windows(copy, "4096 4096 4096 ");
    copy = copy_golden("gemma3-linear");
    path_join(path, copy, CONFIG);
    expect_windows(copy, "5 0 5 ");
    edit_file(path, "\"sliding_window_pattern\": 2", "\"sliding_window_pattern\": 3");
    expect_windows(copy, "5 5 0 ");
    edit_file(path, "\"sliding_window_pattern\": 3", "\"sliding_window_pattern\": 1");
    expect_windows(copy, "0 0 0 ");
    edit_file(path, "\"sliding_window_pattern\": 1,", "");
    expect_windows(copy, "5 5 5 "); // every sixth would have none
    expect_windows("test/golden/gemma3", "8 8 8 8 8 0 8 ");
}

// What looks unusual and is right must not be refused.
TEST(right_texts) {
    static const Edit right[] = {
        {"llama", CONFIG, "\"architectures\"", "\"was\""},                    // model_type is enough
        {"llama", CONFIG, "\"model_type\": \"llama\",", ""},                  // and so are architectures
        {"llama", CONFIG, "\"rope_parameters\"", "\"was\""},                  // the default is 10000
        {"llama", CONFIG, "{", "{\"rope_theta\":10000,\"rope_scaling\":{},"}, // twice, but the same
        {"llama", CONFIG, "\"head_dim\": 10", "\"head_dim\": null"},          // follows
        {"gpt2", CONFIG, "\"tie_word_embeddings\": true,", ""},               // GPT-2's default
        {"gpt2", CONFIG, "\"n_embd\": 24", "\"hidden_size\": 24"},            // the common name
        {"gpt2", CONFIG, "\"n_inner\": null", "\"n_inner\": 96"},             //
        {"gpt2", CONFIG, "\"gelu_new\"", "\"gelu_pytorch_tanh\""},            //
        {"gpt2", CONFIG, "\"vocab_size\": 101", "\"vocab_size\": 101.0, \"x\": \"\\u00e9\""}, //
        {"llama", MODEL, "\"__metadata__\":{\"format\":\"pt\"},", ""},                        // and an odd length
        {"llama", MODEL, "{",
         "{\"layers.0.self_attn.rotary_emb.inv_freq\":{\"dtype\":\"F99\",\"shape\":[3],"
         "\"data_offsets\":[0,0]},"}, // carries no weights, so its type is of no interest
    };
    for (size_t i = 0; i < COUNT_OF(right); i++) {
        const char *copy = copy_golden(right[i].golden);
        char path[PATH_MAX];
        test_case("%s: \"%s\" for \"%s\"", right[i].file, right[i].replace, right[i].find);
        path_join(path, copy, right[i].file);
        edit_file(path, right[i].find, right[i].replace);
        expect_good(copy);
    }
}

// ---- names -------------------------------------------------------------------------------------------------------------------
static char *values_of(const char *path) {
    WeightSource *source = weights_open(path);
    float *values = (float *)case_memory(source->model.elements * sizeof(float));
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const Parameter *p = &source->model.parameters[i];
        weights_read(source, i, 0, parameter_elements(p), DTYPE_FP32, values + p->offset);
    }
    weights_close(source);
    return (char *)values;
}

// The copy must hold what the golden model does, to the bit.
static void expect_same_values(const char *copy, const char *golden) {
    WeightSource *source = weights_open(golden);
    size_t bytes = source->model.elements * sizeof(float);
    weights_close(source);
    expect_good(copy);
    assert_memory_equal(values_of(copy), values_of(golden), bytes);
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
