/*
Hugging Face folders that `convert` writes: every byte of every tensor, whole files if transformers wrote the original,
types, shards, config.json, files that are copied; in bounded memory. Reading by transformers is tested in
test_transformers.py, failures and the folder's fate in test_convert_folder.c.
*/
#include "convert_files.h"

// ---- round trips ----------------------------------------------------------------------------------------------------
// Every folder comes back as transformers' own file, also from several files and from older names.
TEST(round_trips_are_byte_exact) {
    static const char *const ways[] = {"hf -> hf", "flat -> hf, like", "flat -> hf", "llm.c -> hf, like"};
    for (size_t g = 0; g < GOLDEN_MODELS; g++) {
        const char *name = golden_models[g].name, *original = golden_path(name), *flat = scratch_path("flat.bin");
        const char *whole = golden_path(!strcmp(name, "gpt2-hub")        ? "gpt2"
                                        : !strcmp(name, "llama-sharded") ? "llama"
                                                                         : name);
        convert_flat(original, flat);
        for (size_t way = 0; way < 3 + !strcmp(name, "gpt2"); way++) {
            const char *out = fresh_place("folder");
            const char *from = way == 3 ? GOLDEN "gpt2/gpt2_llmc_fp32.bin" : way ? flat : original;
            test_case("%s, %s", name, ways[way]);
            convert(from, way % 2 ? original : NULL, out, NULL, NO_LIMIT);
            expect_same_file(whole, out, HF_SINGLE_FILE);
            assert_int_equal(count_names(out), 3);
            if (way != 2) expect_same_file(original, out, "config.json");
            convert_flat(out, scratch_path("again.bin"));
            expect_same_bytes(flat, scratch_path("again.bin"));
        }
    }
}

// Matrices of several slabs that are transposed.
TEST(large_matrices_are_turned) {
    static const DType fp32 = DTYPE_FP32;
    Model model = model_of(LARGE_GPT2, fp32);
    const char *folder = fresh_place("formula"), *flat = scratch_path("flat.bin"), *out = fresh_place("folder");
    FoundTensor found;
    write_formula_model(folder, &model, LARGE_GPT2_JSON, &fp32, 1);
    convert_flat(folder, flat);
    convert(flat, NULL, out, NULL, NO_LIMIT);
    const char *file = read_in(out, HF_SINGLE_FILE, NULL);
    for (size_t i = 0; i < model.parameter_count; i++) {
        assert_true(find_tensor(file, model.parameters[i].name, &found));
        expect_formula(&found, &model.parameters[i]);
    }
    convert(folder, NULL, fresh_place("other"), NULL, NO_LIMIT); // and without transposing
    expect_same_file(out, scratch_path("other"), HF_SINGLE_FILE);
    model_free(&model);
}

// ---- types ----------------------------------------------------------------------------------------------------------
TEST(mixed_types_are_kept) {
    static const DType mixes[][3] = {{DTYPE_BF16, DTYPE_FP32, DTYPE_FP16},
                                     {DTYPE_BF16, DTYPE_BF16, DTYPE_FP16},
                                     {DTYPE_FP64, DTYPE_BF16, DTYPE_FP16}};
    for (size_t m = 0; m < 3; m++) {
        const char *folder = fresh_place("mixed"), *out = fresh_place("folder"), *back = fresh_place("back");
        Model model = model_of(GOLDEN_LLAMA, DTYPE_FP32);
        test_case("mix %zu", m);
        write_formula_model(folder, &model, read_in(GOLDEN "llama", "config.json", NULL), mixes[m], 3);
        convert(folder, NULL, out, NULL, NO_LIMIT);
        expect_same_file(folder, out, "config.json");
        convert_flat(folder, scratch_path("flat.bin"));
        convert(scratch_path("flat.bin"), folder, back, NULL, NO_LIMIT);
        expect_same_weights(folder, out, DTYPE_FP64); // exact values
        expect_same_weights(folder, back, DTYPE_FP64);
        WeightSource *a = weights_open(out), *b = weights_open(back);
        for (size_t i = 0; i < model.parameter_count; i++) {
            assert_int_equal(a->places[i].type, mixes[m][i % 3]);
            assert_int_equal(b->places[i].type, m == 2 ? DTYPE_FP64 : DTYPE_FP32);
            for (size_t k = 0; k < i; k++) { // large types come first
                const size_t size = dtype_size(mixes[m][i % 3]), other = dtype_size(mixes[m][k % 3]);
                if (size != other) assert_int_equal(a->places[i].offset<a->places[k].offset, size> other);
            }
        }
        weights_close(a), weights_close(b);
        model_free(&model);
    }
}

// --dtype changes the type of all tensors, and in config.json nothing else.
TEST(types_that_are_chosen) {
    static const DType bf16 = DTYPE_BF16;
    static const struct {
        const char *golden, *find, *replace;
    } cases[] = {
        {"llama", "\"dtype\": \"float32\"", "\"dtype\": \"bfloat16\""},
        {"llama-sharded", "\"torch_dtype\": \"float32\"", "\"torch_dtype\": \"bfloat16\""},
        {"qwen2-fp16", "\"torch_dtype\": \"float16\"", "\"torch_dtype\": \"bfloat16\""},
        {"qwen3-bf16", "\"dtype\": \"bfloat16\"", "\"dtype\": \"bfloat16\""},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char *out = fresh_place("folder"), *original = golden_path(cases[i].golden);
        test_case("%s", cases[i].golden);
        convert(original, NULL, out, &bf16, NO_LIMIT);
        const char *expected = copy_golden(cases[i].golden);
        edit_file(expected, "config.json", cases[i].find, cases[i].replace);
        expect_same_file(expected, out, "config.json");
        WeightSource *source = weights_open(out);
        assert_int_equal(source->dtype, DTYPE_BF16);
        weights_close(source);
        convert_flat(original, scratch_path("flat.bin"));
        convert(scratch_path("flat.bin"), original, fresh_place("other"), &bf16, NO_LIMIT);
        expect_same_file(out, scratch_path("other"), "config.json");
        expect_same_file(out, scratch_path("other"), HF_SINGLE_FILE);
    }
}

// ---- shards ---------------------------------------------------------------------------------------------------------
TEST(shards) {
    static const struct {
        size_t most, shards;
    } cases[] = {{1, 21}, {20960, 0}, {50000, 4}, {165599, 2}, {165600, 1}, {NO_LIMIT, 1}}; // it has 165,600 bytes
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char *out = fresh_place("folder");
        size_t shards = cases[i].shards;
        test_case("at most %zu bytes", cases[i].most);
        convert(GOLDEN "llama", NULL, out, NULL, cases[i].most);
        if (!shards) shards = count_names(out) - 3;
        expect_shards(out, GOLDEN "llama", cases[i].most, shards);
        convert(out, NULL, fresh_place("other"), NULL, NO_LIMIT); // and joined again
        expect_same_file(GOLDEN "llama", scratch_path("other"), HF_SINGLE_FILE);
    }
}

// ---- config.json ----------------------------------------------------------------------------------------------------
TEST(only_the_type_is_changed) {
    static const struct {
        const char *before, *after;
    } cases[] = {
        {"{}", "{}"},
        {"{\"dtype\":\"float32\"}", "{\"dtype\":\"bfloat16\"}"},
        {"{ \"dtype\" :\n\tnull , \"x\":1}", "{ \"dtype\" :\n\t\"bfloat16\" , \"x\":1}"},
        {"{\"torch_dtype\": \"float16\",\"dtype\":\"auto\"}", "{\"torch_dtype\": \"bfloat16\",\"dtype\":\"bfloat16\"}"},
        {"{\"a\":{\"dtype\":\"float32\"},\"dtype\":\"float32\"}",
         "{\"a\":{\"dtype\":\"float32\"},\"dtype\":\"bfloat16\"}"},
        {"{\"a\":[\"dtype\",{\"b\":\"}\"}],\"dtype\":\"float32\"}",
         "{\"a\":[\"dtype\",{\"b\":\"}\"}],\"dtype\":\"bfloat16\"}"},
        {"{\"a\":\"dtype\",\"b\":\"\\\"dtype\\\":1\",\"dtype\":\"float64\"}\n",
         "{\"a\":\"dtype\",\"b\":\"\\\"dtype\\\":1\",\"dtype\":\"bfloat16\"}\n"},
        {"{\"a\\\\\":\"{\",\"dtype\":\"float32\"}", "{\"a\\\\\":\"{\",\"dtype\":\"bfloat16\"}"},
        {"{\"a\":{\"b\":{\"dtype\":1}}}", "{\"a\":{\"b\":{\"dtype\":1}}}"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char out[200];
        size_t length = strlen(cases[i].before);
        assert_true(strlen(cases[i].before) + 64 <= sizeof(out));
        length = hf_config_with_type(strcpy(out, cases[i].before), length, DTYPE_BF16);
        assert_string_equal(out, cases[i].after);
        assert_int_equal(length, strlen(cases[i].after));
    }
}

// Scaled positions written into a kept config.json, of transformers 4 or 5, read back as the scaled model's.
TEST(config_json_gets_the_scaling_of_positions) {
    static const char *const folders[] = {"llama",  "llama-sharded", "qwen2",      "qwen2-fp16",
                                          "llama3", "llama-linear",  "qwen3-yarn", "qwen2-yarn",
                                          "gemma3", "gemma3-linear", "mistral"};
    static const char *const scalings[] = {"yarn,factor=4", "linear,factor=2.5",
                                           "llama3,factor=8,low_freq_factor=1,high_freq_factor=4",
                                           "yarn,factor=2,original_max_position_embeddings=64,beta_fast=16"};
    for (size_t i = 0; i < COUNT_OF(folders) * COUNT_OF(scalings); i++) {
        const char *path = golden_path(folders[i % COUNT_OF(folders)]);
        char json[HF_CONFIG_TEXT], remark[256], from[PATH_MAX], wanted[4096], found[4096];
        size_t length;
        path_join(from, path, "config.json");
        Config config = hf_config_read(from, remark, sizeof(remark));
        config = config_scale(&config, scalings[i / COUNT_OF(folders)], "test", EXIT_USAGE);
        char *text = input_read_text(from, HF_CONFIG_MAX, &length);
        memcpy(json, text, length + 1);
        length = hf_config_with_rope(json, length, &config);
        free(text);
        assert_int_equal(length, strlen(json));
        write_file(scratch_path("scaled.json"), json, length);
        Config back = hf_config_read(scratch_path("scaled.json"), remark, sizeof(remark));
        config_to_text(&config, wanted, sizeof(wanted)), config_to_text(&back, found, sizeof(found));
        assert_string_equal(found, wanted);
        back = config_scale(&back, scalings[i / COUNT_OF(folders)], "test", EXIT_USAGE); // scaled already
        config_to_text(&back, found, sizeof(found));
        assert_string_equal(found, wanted);
    }
}

// Checks that a configuration reads back as it was written. Returns the text of config.json.
static const char *expect_read_back(const char *of) {
    static char json[HF_CONFIG_TEXT];
    Config config = config_from_text(of, "test", EXIT_USAGE);
    char remark[256], a[8192], b[8192];
    test_case("%s", of);
    write_file(scratch_path("config.json"), json, hf_config_write(&config, DTYPE_BF16, json));
    Config back = hf_config_read(scratch_path("config.json"), remark, sizeof(remark));
    config_to_text(&config, a, sizeof(a)), config_to_text(&back, b, sizeof(b));
    assert_string_equal(a, b);
    assert_string_equal(remark, ""); // no dropout
    assert_non_null(strstr(json, "\"dtype\": \"bfloat16\""));
    if (!family_has_key(config.family, "rope_theta")) return json;
    if (!config.family->proportional) assert_non_null(strstr(json, "\n  \"rope_theta\": ")); // for classic readers
    if (!family_has_key(config.family, "rope_local_base_freq")) assert_non_null(strstr(json, "\n    \"rope_theta\": "));
    return json;
}

TEST(configurations_that_are_written) {
    static const char *const texts[] = {
        "llama,rope_theta=123456.789,rms_norm_eps=3.3333333333333335e-7,attention_bias=true,mlp_bias=true,head_dim=6",
        "qwen3,rope_theta=1,initializer_range=0,attention_bias=true",
        "gpt2,n_inner=17,layer_norm_epsilon=0",
        "llama,rope_type=linear,factor=2.718281828459045",
        "llama,rope_type=llama3,factor=1e6,low_freq_factor=1e-3,high_freq_factor=3.5",
        "mistral,sliding_window=1,rope_type=yarn,factor=4,truncate=false",
        "mistral,num_hidden_layers=4096,sliding_window=17",
        ("qwen2,rope_type=yarn,factor=4,original_max_position_embeddings=100,attention_factor=1.5,"
         "beta_fast=16,beta_slow=0.1"),
        "qwen3,rope_type=yarn,factor=40,mscale=0.707,mscale_all_dim=0.1",
        "qwen3,rope_type=yarn,factor=40,mscale_all_dim=0.1",
        "qwen3,num_hidden_layers=1024,layer_types=f",
        "qwen3,num_hidden_layers=4096",
        "qwen2,num_hidden_layers=5,sliding_window=3,layer_types=ffsss",
        "qwen2,num_hidden_layers=5,sliding_window=3,layer_types=s",
        "qwen3,num_hidden_layers=7,sliding_window=3,layer_types=sfs",
        "gemma3,num_hidden_layers=1024,layer_types=sf",
        "gemma3,num_hidden_layers=3,layer_types=f",
        "gemma3,num_hidden_layers=3,layer_types=fs,rope_local_base_freq=12.5,query_pre_attn_scalar=0.3",
        "gemma3,rope_type=llama3,factor=3,low_freq_factor=1,high_freq_factor=2,attention_bias=true",
        "gemma3,rope_type=yarn,factor=3,tie_word_embeddings=false",
        "qwen3_5,num_hidden_layers=7,layer_types=lf,partial_rotary_factor=0.5,attention_bias=true",
        "qwen3_5,num_hidden_layers=3,layer_types=l,rope_type=yarn,factor=3,linear_conv_kernel_dim=2",
        "qwen3_5,num_hidden_layers=3,layer_types=f,linear_num_value_heads=64,linear_value_head_dim=32",
        "ministral3,factor=3,llama_4_scaling_beta=0.25,mscale=0,mscale_all_dim=0,sliding_window=6",
        "ministral3,rope_type=default",
        "ministral3,rope_type=linear,factor=2",
        "ministral3,llama_4_scaling_beta=0",
        "smollm3,num_hidden_layers=5,layer_types=fnn",
        "smollm3,num_hidden_layers=3,layer_types=f,rope_type=yarn,factor=4,mlp_bias=true",
        "olmo2,rope_type=linear,factor=3,num_key_value_heads=8",
        "olmo3,num_hidden_layers=3,layer_types=f",
        "olmo3,rope_type=yarn,factor=8,rope_local_base_freq=1000",
        "phi3,sliding_window=2047,partial_rotary_factor=0.75",
        "glm4,attention_bias=false,partial_rotary_factor=1",
        "granite,embedding_multiplier=12,attention_multiplier=0.015625,residual_multiplier=0.22,logits_scaling=8",
        "seed_oss,attention_bias=false,mlp_bias=true,rope_type=yarn,factor=4",
        "hunyuan_v1_dense,head_dim=96,rope_type=dynamic,alpha=1000,attention_bias=true",
        "hunyuan_v1_dense,rope_type=linear,factor=3",
        "ernie4_5,attention_bias=true,rope_type=llama3,factor=3,low_freq_factor=1,high_freq_factor=2",
        "qwen3_moe,num_experts=6,num_experts_per_tok=2,decoder_sparse_step=2,mlp_only_layers=0+3,attention_bias=true,"
        "rope_type=yarn,factor=2",
        "qwen3_moe,num_experts=0",
        "qwen3_5_moe,num_hidden_layers=7,layer_types=lf,shared_expert_intermediate_size=0,router_aux_loss_coef=0",
        "deepseek_v3,num_experts=8,n_group=4,topk_group=2,num_experts_per_tok=3,q_lora_rank=0,first_k_dense_replace=1,"
        "rope_type=yarn,factor=40,mscale=0.707,mscale_all_dim=0.707",
        "mistral4,num_experts=6,num_experts_per_tok=2,llama_4_scaling_beta=0.25,q_lora_rank=0,v_head_dim=96",
        "mistral4,llama_4_scaling_beta=0,factor=3,qk_nope_head_dim=192",
        "lfm2,num_hidden_layers=5,layer_types=ccf,linear_conv_kernel_dim=4,rope_type=yarn,factor=4,head_dim=64",
        "lfm3,num_hidden_layers=9",
        "lfm3,num_hidden_layers=5,layer_types=cf,partial_rotary_factor=0.25,attention_bias=true",
        "lfm2_moe,num_experts=6,num_experts_per_tok=2,first_k_dense_replace=1,norm_topk_prob=false,routed_scaling_"
        "factor=2."
        "5",
        "lfm2,num_hidden_layers=2,layer_types=c,tie_word_embeddings=false",
        "muse_glimmer,num_hidden_layers=6",
        "muse_glimmer,num_hidden_layers=3,layer_types=sfn,rope_theta=500000,attention_bias=true,post_norm_eps=0.25",
        "muse_glimmer,num_hidden_layers=2,layer_types=nf,rope_type=yarn,factor=4",
        "olmo_hybrid,num_hidden_layers=3,layer_types=lnn,linear_allow_neg_eigval=false,linear_key_head_dim=40",
        "olmo_hybrid,num_hidden_layers=2,rope_type=yarn,factor=4,attention_bias=true,linear_conv_kernel_dim=2",
        "qwen3_next,num_experts=6,num_experts_per_tok=2,mlp_only_layers=0+3,norm_topk_prob=false,layer_types=lf",
        "nemotron_h,num_hidden_layers=5,layer_types=LeLFp,num_experts=6,n_group=3,topk_group=2,norm_topk_prob=false,"
        "shared_expert_intermediate_size=100,time_step_min=0.25,linear_conv_kernel_dim=2",
        "granitemoehybrid,num_hidden_layers=4,layer_types=lnl,time_step_min=0.25,linear_value_head_dim=96,num_experts="
        "6",
        "granitemoehybrid,num_hidden_layers=3,layer_types=lf,time_step_max=0.5,num_experts=0,num_experts_per_tok=0,"
        "rope_type=yarn,factor=4,attention_bias=true,attention_multiplier=0.2,logits_scaling=3",
        "bamba,num_hidden_layers=5,layer_types=lf,partial_rotary_factor=0.25,time_step_min=0.1,time_step_max=0.5,"
        "linear_num_value_heads=256,attention_bias=true,mlp_bias=true,rope_type=linear,factor=2",
        "mixtral,sliding_window=9,intermediate_size=20",
        "gpt_oss,num_hidden_layers=3,layer_types=f,attention_bias=false,swiglu_limit=2.5",
        "gpt_oss,rope_type=default,num_experts=4,num_experts_per_tok=1",
        "glm4_moe,moe_intermediate_size=8,shared_expert_intermediate_size=24,n_group=4,topk_group=2,norm_topk_prob="
        "false",
        "gemma4,num_hidden_layers=5,layer_types=sf,num_kv_shared_layers=2,partial_rotary_factor=0.5",
        "gemma4,num_hidden_layers=3,layer_types=f,hidden_size_per_layer_input=0,num_experts=5,num_experts_per_tok=2,"
        "moe_intermediate_size=9,final_logit_softcapping=2.5,num_global_key_value_heads=2,attention_k_eq_v=true"};
    for (size_t i = 0; i < FAMILIES; i++) expect_read_back(families[i].name);
    for (size_t i = 0; i < PRESETS; i++) expect_read_back(presets[i].name);
    for (size_t i = 0; i < COUNT_OF(texts); i++) expect_read_back(texts[i]);
}

// The format that transformers has chosen among several.
TEST(how_windows_and_rope_are_written) {
    static const struct {
        const char *config, *words;
    } cases[] = {
        {"mistral", ",\n  \"sliding_window\": 4096,\n"},
        {"mistral-7b-v0.3", ",\n  \"sliding_window\": null,\n"},
        {"qwen2,num_hidden_layers=2",
         "\"sliding_window\": null,\n  \"use_sliding_window\": false,\n  \"max_window_layers\": 2,\n"
         "  \"layer_types\": [\n    \"full_attention\",\n    \"full_attention\"\n  ],\n"},
        {"qwen3,num_hidden_layers=2,sliding_window=9,layer_types=fs",
         "\"sliding_window\": 9,\n  \"use_sliding_window\": true,\n  \"max_window_layers\": 1,\n"
         "  \"layer_types\": [\n    \"full_attention\",\n    \"sliding_attention\"\n  ],\n"},
        {"gemma3-1b", "\"sliding_window_pattern\": 6,\n"},
        {"gemma3-1b", "\"query_pre_attn_scalar\": 256,\n"},
        {"gemma3-1b", "\"hidden_activation\": \"gelu_pytorch_tanh\""},
        {"gemma3-1b", "\"model_type\": \"gemma3_text\""},
        {"gemma4-31b", "\"num_experts\": null,\n  \"top_k_experts\": null,\n  \"moe_intermediate_size\": null"},
        {"gemma4-26b-a4b", "\"enable_moe_block\": true"},
        {"qwen3_5,num_hidden_layers=3,layer_types=lf",
         "\"layer_types\": [\n    \"linear_attention\",\n    \"full_attention\",\n    \"linear_attention\"\n  ],\n"},
        {"qwen3.5-0.8b", "\"rope_parameters\": {\n    \"rope_type\": \"default\",\n    \"rope_theta\": 10000000.0,\n"
                         "    \"partial_rotary_factor\": 0.25\n  },\n"},
        {"qwen3.5-0.8b", "\"model_type\": \"qwen3_5_text\",\n"},
        {"qwen3.5-0.8b", ",\n  \"partial_rotary_factor\": 0.25,\n"},
        {"gemma3,layer_types=f", "\"sliding_window\": 4096,\n  \"layer_types\": [\n    \"full_attention\""},
        {"gpt-oss-20b", "\"num_local_experts\": 32,\n"},
        {"ernie4.5-0.3b", "\"use_bias\": false,\n"},
        {"seed-oss-36b", "\"residual_dropout\": 0.0,\n"},
        {"lfm2,num_hidden_layers=2,layer_types=cf",
         "\"layer_types\": [\n    \"conv\",\n    \"full_attention\"\n  ],\n"},
        {"lfm2", "\"norm_eps\": 1e-05,\n"},
        {"lfm2", "\"conv_L_cache\": 3,\n"},
        {"lfm2_moe", "\"num_dense_layers\": 2,\n"},
        {"lfm3,num_hidden_layers=5", "    \"conv\",\n    \"sliding_attention\"\n  ]"},
        {"lfm2", "\"block_auto_adjust_ff_dim\": false"},
        {"hunyuan_v1_dense,head_dim=64,rope_type=dynamic,alpha=1000",
         "\"rope_scaling\": {\n    \"rope_type\": \"dynamic\",\n    \"alpha\": 1000.0,\n    \"factor\": 1.0\n  },\n"},
        {"gpt-oss-20b", "\"truncate\": false\n"},
        {"gemma3-4b", "\"rope_scaling\": {\n    \"rope_type\": \"linear\",\n    \"factor\": 8.0\n  },\n"},
        {"gemma3-4b", "\"rope_parameters\": {\n    \"full_attention\": {\n      \"rope_type\": \"linear\",\n"
                      "      \"rope_theta\": 1000000.0,\n      \"factor\": 8.0\n    },\n"
                      "    \"sliding_attention\": {\n      \"rope_type\": \"default\",\n"
                      "      \"rope_theta\": 10000.0\n    }\n  }"},
        {"llama3.2-1b", "\"rope_scaling\": {\n    \"rope_type\": \"llama3\",\n    \"factor\": 32.0,\n"
                        "    \"original_max_position_embeddings\": 8192,\n    \"low_freq_factor\": 1.0,\n"
                        "    \"high_freq_factor\": 4.0\n  }"},
        {"llama,rope_type=yarn,factor=4,original_max_position_embeddings=512",
         "\"rope_parameters\": {\n    \"rope_type\": \"yarn\",\n    \"rope_theta\": 10000.0,\n    \"factor\": 4.0,\n"
         "    \"original_max_position_embeddings\": 512,\n    \"beta_fast\": 32.0,\n    \"beta_slow\": 1.0,\n"
         "    \"truncate\": true\n  }"}, // no factor unless given
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        if (!strstr(expect_read_back(cases[i].config), cases[i].words)) test_fail("no %s", cases[i].words);
    assert_null(strstr(expect_read_back("mistral"), "layer_types"));
    assert_non_null(strstr(expect_read_back("olmo2,pad_token_id=7"), "\"pad_token_id\": 7"));
    assert_non_null(strstr(expect_read_back("olmo2"), "\"pad_token_id\": null")); // not the class's default
    assert_null(strstr(expect_read_back("gpt2"), "rope"));
    assert_non_null(strstr(expect_read_back("gpt2"), "\"activation_function\": \"gelu_new\""));
    assert_non_null(strstr(expect_read_back("gpt2,activation_function=gelu_pytorch_tanh"), "\"gelu_pytorch_tanh\""));
    assert_null(strstr(expect_read_back("llama"), "sliding"));
    assert_null(strstr(expect_read_back("gemma3,layer_types=fs"), "sliding_window_pattern"));
}

static void convert_like(const void *folder) {
    WeightSource *source = weights_open(scratch_path("flat.bin"));
    HfWrite write = hf_write_prepare(source, NULL, (const char *)folder, NO_LIMIT, 0, QUANT_NONE, 0);
    hf_write_free(&write);
    weights_close(source);
}

TEST(like_must_be_the_same_model) {
#define CONFIG(find, replace, words) CHANGED_TEXT("llama/config.json", find, replace, words)
    static const Damage rows[] = {
        CONFIG("\"hidden_size\": 40", "\"hidden_size\": 48", "llama/config.json: is of another model: its"),
        CONFIG("\"rope_theta\": 10000.0", "\"rope_theta\": 10000.5", "its rope_theta is 10000.5, but in "),
        CONFIG("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", "its tie_word_embeddings is true"),
        CONFIG("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06", "its rms_norm_eps is "),
        CONFIG("\"default\"", "\"linear\", \"factor\": 2", "its rope_type is linear, "),
        CONFIG("\"initializer_range\": 0.02", "\"initializer_range\": 0.03", NULL), // no longer compared
        REMOVED("llama/" HF_SINGLE_FILE, NULL),                                     // nor are weights
        REMOVED("llama/config.json", "llama: holds no config.json"),
    };
    const DamageSuite suite = {copy_goldens("llama qwen2-fp16"), convert_like, NULL, NULL, 0};
    convert_flat(GOLDEN "llama", scratch_path("flat.bin"));
    expect_damage_found(&suite, rows, COUNT_OF(rows));
    expect_refused(convert_like, GOLDEN "qwen3", 1, "config.json: is of another model: its model_type is qwen3, but ");
    convert_flat(GOLDEN "qwen2-fp16", scratch_path("flat.bin")); // its window is turned off
    edit_file(suite.folder, "qwen2-fp16/config.json", "\"use_sliding_window\": false", "\"use_sliding_window\": true");
    edit_file(suite.folder, "qwen2-fp16/config.json", "\"max_window_layers\": 28", "\"max_window_layers\": 0");
    expect_refused(convert_like, scratch_path("golden/qwen2-fp16"), 1, "model: its sliding_window is 8, ");
}

// A model of one expert has its matrices as transformers writes them, [H, I] and not [1, H, I].
TEST(one_expert) {
    static const char *const cases[][3] = {
        {"qwen3_moe", "num_hidden_layers=1,moe_intermediate_size=24", "mlp.experts.0.down_proj"},
        {"mixtral", "num_hidden_layers=1,intermediate_size=24", "block_sparse_moe.experts.0.w2"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[300];
        FoundTensor down;
        snprintf(text, sizeof(text),
                 "%s,%s,hidden_size=32,num_attention_heads=4,num_key_value_heads=2,head_dim=8,vocab_size=40,"
                 "num_experts=1,num_experts_per_tok=1",
                 cases[i][0], cases[i][1]);
        const Config config = config_from_text(text, "test", EXIT_USAGE);
        WeightSource *source = weights_random(&config, DTYPE_FP32, 1);
        weights_convert(source, scratch_path("flat.bin"), DTYPE_FP32);
        weights_close(source);
        convert(scratch_path("flat.bin"), NULL, fresh_place("folder"), NULL, NO_LIMIT);
        snprintf(text, sizeof(text), "model.layers.0.%s.weight", cases[i][2]);
        assert_true(find_tensor(read_in(scratch_path("folder"), HF_SINGLE_FILE, NULL), text, &down));
        assert_true(down.rank == 2 && down.shape[0] == 32 && down.shape[1] == 24);
        expect_same_weights(scratch_path("flat.bin"), scratch_path("folder"), DTYPE_FP32);
    }
}

// ---- copied files ---------------------------------------------------------------------------------------------------
#define WITHIN "additional_chat_templates/"
static void replace_body(const void *context) {
    const Conversion *c = (const Conversion *)context;
    WeightSource *source = weights_open(c->from);
    HfWrite write = hf_write_prepare(source, NULL, NULL, NO_LIMIT, 0, QUANT_NONE, 0);
    hf_write(&write, c->to, 1);
    hf_write_free(&write);
    weights_close(source);
}

TEST(small_files_come_along) {
    static const char *const kept[] = {
        "tokenizer.json",   "tokenizer_config.json", "merges.txt", "tokenizer.model",     "generation_config.json",
        "LICENSE",          "LICENSE.txt",           "NOTICE",     "chat_template.jinja", "added_tokens.json",
        WITHIN "rag.jinja", WITHIN "tool_use.jinja"};
    static const char *const left[] = {"README.txt",         "optimizer.pt", "pytorch_model.bin",
                                       "model.gguf",         "license",      "xtokenizer.json",
                                       "tokenizer.json.bak", "rag.jinja",    WITHIN "rag.txt"};
    const char *copy = copy_golden("llama"), *out = fresh_place("folder");
    const size_t large = sizeof(staged_raw) + 12345; // more than the buffer holds
    char path[PATH_MAX], *bytes = (char *)case_memory(large);
    for (size_t i = 0; i < large; i++) bytes[i] = (char)(i * 31 >> 3);
    run_command("mkdir '%s/" WITHIN "'%s", copy, "");
    for (size_t i = 0; i < COUNT_OF(kept); i++) {
        path_join(path, copy, kept[i]);
        write_file(path, bytes, i == 0 ? large : i == 9 ? 0 : 100 + i);
    }
    for (size_t i = 0; i < COUNT_OF(left); i++) {
        path_join(path, copy, left[i]);
        write_file(path, bytes, 10);
    }
    run_command("mkdir '%s/LICENSES' && ln -s merges.txt '%s/vocab.json'", copy, copy);
    convert(copy, NULL, out, NULL, NO_LIMIT);
    for (size_t i = 0; i < COUNT_OF(kept); i++) expect_same_file(copy, out, kept[i]);
    expect_same_file(copy, out, "vocab.json");
    assert_int_equal(count_names(out), 3 + COUNT_OF(kept) + 1 - 1); // two in one folder
    assert_int_equal(count_paths("%s/" WITHIN "*", out), 2);
    Conversion again = {copy, NULL, out, NULL, NO_LIMIT, 0};
    replace_body(&again);
    assert_int_equal(count_paths("%s/" WITHIN "*", out), 2);
    assert_int_equal(count_temporaries(out), 0);
    run_command("touch '%s/" WITHIN "mine.txt'%s", out, "");
    assert_non_null(strstr(run_child(replace_body, &again)->err, " is kept, because it holds other files"));
    assert_int_equal(count_paths("%s.*/" WITHIN "*", out), 1);
    run_command("rm -r '%s'.*%s", out, "");
    convert_flat(copy, scratch_path("flat.bin"));
    convert(scratch_path("flat.bin"), copy, fresh_place("other"), NULL, NO_LIMIT);
    assert_int_equal(count_names(scratch_path("other")), count_names(out));
    convert(scratch_path("flat.bin"), NULL, fresh_place("other"), NULL, NO_LIMIT); // no folder to copy from
    assert_int_equal(count_names(scratch_path("other")), 3);
}

TEST(links_that_lead_nowhere) {
    const char *copy = copy_golden("llama");
    Conversion c = {copy, NULL, fresh_place("folder"), NULL, NO_LIMIT, 0};
    run_command("ln -s nowhere '%s/tokenizer.json'", copy, "");
    expect_refused(convert_body, &c, 1,
                   "llama/tokenizer.json: this file of the model cannot be read: No such file or directory");
    expect_nothing_at(c.to);
    write_file(scratch_path("golden/nowhere"), "{}", 2); // outside the folder
    run_command("ln -sf ../nowhere '%s/tokenizer.json'", copy, "");
    expect_refused(convert_body, &c, 1, "llama/tokenizer.json: is a link that leads out of ");
    expect_nothing_at(c.to);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// Converts 84 MiB of weights, mostly one matrix, some transposed, to a folder, and 64 MiB to a flat file. Prints the
// growth of the process's peak in KiB: the staging buffers and a little more.
static void convert_large(const void *folder) {
    Model gpt2 =
        model_of("gpt2,vocab_size=32768,hidden_size=512,num_hidden_layers=8,num_attention_heads=8", DTYPE_BF16);
    Model llama = model_of("llama,vocab_size=32768,hidden_size=1024,intermediate_size=16,num_hidden_layers=1,"
                           "num_attention_heads=1,num_key_value_heads=1,head_dim=2,tie_word_embeddings=true",
                           DTYPE_BF16);
    write_zeros(scratch_path("gpt2.bin"), &gpt2, DTYPE_BF16);
    write_zeros(scratch_path("llama.bin"), &llama, DTYPE_BF16);
    const long before = memory_peak();
    convert(scratch_path("gpt2.bin"), NULL, (const char *)folder, NULL, 20000000);
    WeightSource *source = weights_open(scratch_path("llama.bin"));
    weights_convert(source, scratch_path("flat.bin"), DTYPE_FP32);
    weights_close(source);
    printf("%ld\n", memory_peak() - before);
}

TEST(memory_is_bounded) {
    const Child *child = run_child(convert_large, fresh_place("large"));
    assert_int_equal(child->code, 0);
    if (*child->err || atol(child->out) > 26 * 1024) test_fail("%sit took %s KiB of memory", child->err, child->out);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
