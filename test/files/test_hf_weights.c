/*
Unusual but valid Hugging Face folders: other spellings, settings without effect, a tied matrix under its second name,
tensors that carry no weights. They load with the usual values; near misses are refused. Everything that is plainly
wrong is in test_weights_bad.c.
*/
#include "weight_files.h"

// ---- config.json ----------------------------------------------------------------------------------------------------
// Each row changes the config.json of the previous row, or of a fresh copy, and gives the layers' windows. Qwen's need
// use_sliding_window, and begin at layer max_window_layers.
TEST(windows) {
    static const struct {
        const char *golden, *find, *replace, *windows; // windows NULL: not checked
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
        {NULL, "\"sliding_window_pattern\": 1,", "", "5 5 5 "}, // the default period is 6
        {"gemma3", NULL, NULL, "8 8 8 8 8 0 8 "},
    };
    const char *copy = NULL;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char found[256] = "";
        test_case("row %zu", i);
        if (cases[i].golden) copy = copy_golden(cases[i].golden);
        if (cases[i].find) edit_file(copy, "config.json", cases[i].find, cases[i].replace);
        if (!cases[i].windows) continue;
        WeightSource *source = weights_open(copy);
        for (size_t l = 0; l < source->config.num_hidden_layers; l++)
            snprintf(found + strlen(found), sizeof(found) - strlen(found), "%zu ", layer_window(&source->config, l));
        assert_string_equal(found, cases[i].windows);
        weights_close(source);
    }
}

// A changed config.json as transformers 5 reads it. Rows as above; value NULL: the key has no effect.
TEST(keys_as_transformers_reads_them) {
    static const struct {
        const char *golden, *find, *replace, *key, *value;
    } cases[] = {
        // the pad token: counted from the end, the class's default, no effect on GPT-2's embedding
        {"llama", "\"pad_token_id\": null", "\"pad_token_id\": -1", "pad_token_id", "130"},
        {NULL, "\"pad_token_id\"", "\"was\"", "pad_token_id", NULL},
        {"olmo2", "\"pad_token_id\"", "\"was\"", "pad_token_id", "1"},
        {"gemma3", "\"pad_token_id\"", "\"was\"", "pad_token_id", "0"},
        {"ministral3", "\"pad_token_id\"", "\"was\"", "pad_token_id", "11"},
        {"mistral4", "\"pad_token_id\"", "\"was\"", "pad_token_id", "11"},
        {"deepseek_v3", "\"deepseek_v3\"", "\"kimi_k2\"", "q_lora_rank", "8"},
        // Mistral 4: the share of a head that its class sets, its default object
        {"mistral4", "\"partial_rotary_factor\": 0.4,", "", "factor", "16"},
        {NULL, "\"rope_parameters\"", "\"rope_parameters\": null, \"was also\"", "factor", "128"},
        {"gpt2", "\"pad_token_id\": null", "\"pad_token_id\": 5", "pad_token_id", NULL},
        // rope_scaling beside rope_parameters
        {"llama", "{", "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0},", "rope_type", "linear"},
        {"glm4", "{", "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0},", "rope_type", "linear"},
        {"olmo2", "{", "{\"rope_theta\":500000,\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0},", "rope_theta",
         "500000"},
        // rope_parameters without rope_theta: not Ministral 3's, which is in a default object of its own
        {"ministral3", "\"rope_theta\": 10000.0,", "", "rope_theta", "10000"},
        {NULL, "\"rope_parameters\"", "\"was also\"", "rope_theta", "1000000"},
        // GPT-2's key names work only in GPT-2
        {"llama", "\"rms_norm_eps\": 1e-05", "\"layer_norm_epsilon\": 0.25", "rms_norm_eps", "9.9999999999999995e-07"},
    };
    const char *copy = NULL;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char remark[256], found[LAYER_TYPES_MAX + 1];
        const ConfigKey *key = &config_keys[config_key_find(cases[i].key)];
        test_case("row %zu", i);
        if (cases[i].golden) copy = copy_golden(cases[i].golden);
        edit_file(copy, "config.json", cases[i].find, cases[i].replace);
        const Config config = hf_directory_config(copy, remark, sizeof(remark));
        config_key_text(&config, key, found);
        if (cases[i].value) assert_string_equal(found, cases[i].value);
        assert_int_equal(config_uses_key(&config, key), cases[i].value != NULL);
    }
    copy = copy_golden("gemma3");
    edit_file(copy, "config.json", "\"eos_token_id\": null", "\"eos_token_id\": [3, 11], \"attention_dropout\": 0.5");
    edit_file(copy, "config.json", "\"attention_dropout\": 0.0,", "");
    char remark[256];
    hf_directory_config(copy, remark, sizeof(remark));
    assert_non_null(strstr(remark, "; pad_token_id is eos_token_id (11): its inputs give the embedding no gradient"));
}

// ---- names ----------------------------------------------------------------------------------------------------------
// Appends a tensor of zeros to the copy.
static void add_tensor(const char *copy, const char *name, size_t rows, size_t cols) {
    char path[PATH_MAX];
    size_t bytes;
    uint64_t length;
    path_join(path, copy, HF_SINGLE_FILE);
    const char *file = read_whole(path, &bytes);
    memcpy(&length, file, 8);
    const size_t data = bytes - 8 - (size_t)length, more = rows * cols * sizeof(float);
    char *header = (char *)case_memory((size_t)length + 500), *all = (char *)case_memory(data + more);
    const char *brace = (const char *)memrchr(file + 8, '}', (size_t)length);
    const int written = snprintf(header, (size_t)length + 500,
                                 "%.*s,\"%s\":{\"dtype\":\"F32\",\"shape\":[%zu,%zu],\"data_offsets\":[%zu,%zu]}}",
                                 (int)(brace - file - 8), file + 8, name, rows, cols, data, data + more);
    memcpy(all, file + 8 + length, data);
    write_safetensors(path, header, (size_t)written, all, data + more);
}

// The tied matrix under one of its names or both; rotary frequencies, which older versions saved in the layers, in the
// model or in a base model.
TEST(tensors_beside_the_usual_ones) {
#define MISSING "tensor model.embed_tokens.weight is missing"
    static const struct {
        const char *golden, *find, *replace; // in config.json
        const char *embedding;               // its new name
        const char *added;                   // a tensor [rows, cols]
        size_t rows, cols;
        const char *words; // of the refusal; NULL: loads the golden values
    } cases[] = {
        {"llama-tied", NULL, NULL, "lm_head.weight", NULL, 0, 0, NULL},
        {"llama-tied", NULL, NULL, "lm_head.w", NULL, 0, 0, MISSING},
        {"llama-tied", NULL, NULL, NULL, "lm_head.weight", 128, 32,
         "ties lm_head.weight to model.embed_tokens.weight, but the files hold two different matrices"},
        {"llama-tied", NULL, NULL, NULL, "lm_head.weight", 128, 64,
         "lm_head.weight has shape [128, 64], but config.json ties it to model.embed_tokens.weight, which has [128, "
         "32]"},
        {"llama-tied", "embeddings\": true", "embeddings\": false", "lm_head.weight", NULL, 0, 0,
         MISSING}, // two matrices
        {"llama-tied", "\"vocab_size\": 128", "\"vocab_size\": 100", "lm_head.weight", NULL, 0, 0,
         "tensor lm_head.weight has shape [128, 32], but config.json asks for [100, 32]"},
        {"llama-tied", NULL, NULL, NULL, "model.layers.0.self_attn.rotary_emb.inv_freq", 1, 4, NULL},
        {"llama-tied", NULL, NULL, NULL, "model.rotary_emb.inv_freq", 1, 4, NULL},
        {"llama-tied", NULL, NULL, NULL, "rotary_emb.inv_freq", 1, 4, NULL},
        {"llama-tied", NULL, NULL, NULL, "my_rotary_emb.inv_freq", 1, 4,
         "LlamaForCausalLM does not have these tensors with this config.json: my_rotary_emb.inv_freq"},
        {"gpt2", NULL, NULL, NULL, "rotary_emb.inv_freq", 1, 4,
         "GPT2LMHeadModel does not have these tensors with this config.json: rotary_emb.inv_freq"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("row %zu", i);
        const char *copy = copy_golden(cases[i].golden);
        if (cases[i].find) edit_file(copy, "config.json", cases[i].find, cases[i].replace);
        if (cases[i].embedding) edit_file(copy, HF_SINGLE_FILE, "model.embed_tokens.weight", cases[i].embedding);
        if (cases[i].added) add_tensor(copy, cases[i].added, cases[i].rows, cases[i].cols);
        if (cases[i].words)
            expect_bad(copy, cases[i].words);
        else
            expect_same_weights(golden_path(cases[i].golden), copy, DTYPE_FP32);
    }
}

// Names without "model.", as a base model is saved.
TEST(base_models) {
    const char *copy = copy_golden("llama-tied"), *file;
    size_t bytes;
    while (file = read_in(copy, HF_SINGLE_FILE, &bytes), memmem(file, bytes, "\"model.", 7))
        edit_file(copy, HF_SINGLE_FILE, "\"model.", "\"");
    add_tensor(copy, "rotary_emb.inv_freq", 1, 4);
    expect_same_weights(GOLDEN "llama-tied", copy, DTYPE_FP32);
}

// Names with a prefix: the first ones, what all begin with, and what to save instead.
TEST(names_with_a_prefix) {
#define WITHIN "; save the model within the wrapper: model."
    static const struct {
        const char *golden, *prefix, *first, *more, *advice;
        size_t files;
    } cases[] = {
        {"llama", "_orig_mod.", "lm_head.weight", "18", WITHIN "_orig_mod\n", 0},
        {"llama-sharded", "module.", "lm_head.weight", "18", WITHIN "module\n", 4},
        {"llama-tied", "base_model.model.", "model.embed_tokens.weight", "17", WITHIN "merge_and_unload()\n", 0},
        {"qwen3-nf4", "net.", "lm_head.weight", "77", WITHIN "net\n", 0},
        {"mixtral", "_orig_mod.", "lm_head.weight", "38", WITHIN "_orig_mod\n", 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char words[300], name[64];
        const char *copy = copy_golden(cases[i].golden);
        test_case("%s", cases[i].golden);
        for (size_t file = 0; file <= cases[i].files; file++) {
            size_t bytes;
            snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", file, cases[i].files);
            if (!file) snprintf(name, sizeof(name), "%s", cases[i].files ? HF_INDEX_FILE : HF_SINGLE_FILE);
            for (size_t k = 0; k < 2; k++) {
                const char *begin = k ? "\"lm_head." : "\"model.", *text;
                snprintf(words, sizeof(words), "\"%s%s", cases[i].prefix, begin + 1);
                while (text = read_in(copy, name, &bytes), memmem(text, bytes, begin, strlen(begin)))
                    edit_file(copy, name, begin, words);
            }
        }
        snprintf(words, sizeof(words), "tensor model.embed_tokens.weight is missing; there are %s%s, ", cases[i].prefix,
                 cases[i].first);
        expect_bad(copy, words);
        snprintf(words, sizeof(words), " and %s more, all beginning with %s", cases[i].more, cases[i].prefix);
        expect_bad(copy, words);
        expect_bad(copy, cases[i].advice);
    }
}

// With both a file and an index, only the file is read, as in transformers.
TEST(the_single_file_comes_first) {
    const char *copy = copy_golden("llama");
    run_command("printf nonsense > '%s/" HF_INDEX_FILE "'", copy, "");
    expect_good(copy);
    run_command("cp " GOLDEN "llama-sharded/model* '%s' && printf nonsense > '%s/model.safetensors'", copy, copy);
    expect_bad(copy, "model.safetensors: claims a header of ");
    run_command("rm '%s/model.safetensors'", copy, "");
    expect_good(copy);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
