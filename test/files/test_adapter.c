/*
Adapters in files: checkpoints of adapters, round trips to the bit, damage, other bases; adapter_config.json, read or
refused by name; tensors that are missing, extra, or of another shape; the key of a base, equal in every format. Merged
weights, in every order and piece, are those of a sum in double that is rounded once. PEFT itself is in test_peft.py,
paths of adapters and NaN in them are in test_adapter_cli.sh.
*/
#include "test/train/checkpoint_runs.h"
#include "weight_files.h"
#include "test/model/lora_cases.h"
#include "llmc/files/merge.h"

// ---- checkpoints ----------------------------------------------------------------------------------------------------
static const char gpt2_model[] = "gpt2,hidden_size=12,num_hidden_layers=3,num_attention_heads=2,vocab_size=31";

// Compares the file's tensors, read in a second way, with those in memory: the master copy if there is one.
static void round_trip_case(const char *model, DType dtype, DType moments, int master) {
    const DType type = master ? DTYPE_FP32 : dtype;
    test_case("%.6s, %s, moments %s, %s master", model, dtype_name(dtype), dtype_name(moments),
              master ? "with" : "without");
    TrainedTensors a = trained_open_adapters(model, dtype, moments, master);
    TrainedTensors b = trained_open_adapters(model, dtype, moments, master);
    save_step(&a, fresh_folder("out"), 7, 0);
    assert_int_equal(load_last(&b, scratch_path("out")).step, 7);
    const char *file = read_whole(file_in("checkpoint-00000007", ADAPTER_FILE_NAME), NULL);
    for (size_t i = 0; i < a.model->parameter_count; i++) {
        const Parameter *p = &a.model->parameters[i];
        const size_t bytes = parameter_elements(p) * dtype_size(type);
        char *values = (char *)case_memory(bytes);
        FoundTensor tensor;
        assert_true(find_tensor(file, p->name, &tensor));
        assert_true(tensor.type == type && tensor.shape[0] == p->rows && tensor.shape[1] == p->cols);
        a.ops->copy_out(values, (master ? (char *)a.optimizer.master : a.weights) + p->offset * dtype_size(type),
                        bytes);
        assert_memory_equal(values, tensor.data, bytes);
    }
    trained_close(&a), trained_close(&b);
}

TEST(round_trip_of_two_kinds_of_layers) { round_trip_case(hybrid_model, DTYPE_FP32, DTYPE_FP32, 1); }

TEST(round_trip) {
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};
    for (size_t i = 0; i < 3; i++)
        for (size_t moments = 0; moments < 2; moments++)
            round_trip_case(i == 1 ? gpt2_model : usual_model, types[i], types[moments],
                            i < 2 && (i + moments) % 2 == 0);
}

TEST(damage_is_found) {
    static const char *const files[] = {ADAPTER_FILE_NAME, ADAPTER_CONFIG_NAME, MANIFEST_NAME};
    const Resumption r = usual_resumption(1);
    save_usual_adapters();
    expect_checkpoint_damage_found(resume_body, &r, files, COUNT_OF(files));
}

TEST(other_runs_are_refused) { // more of them in test_adapter_cli.sh
    Resumption r = usual_resumption(1);
    save_usual_adapters();
    r.dtype = DTYPE_BF16, r.master = 0;
    expect_refused(resume_body, &r, 1, "holds adapters in fp32, this run uses bf16");
    r = usual_resumption(1);
    r.model = "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,vocab_size=33";
    expect_refused(resume_body, &r, 1, "has shape [20, 3], but rank 3 and this base ask for [24, 3]");
}

// ---- adapter_config.json --------------------------------------------------------------------------------------------
#define ALL_TARGETS "[\"down_proj\", \"gate_proj\", \"k_proj\", \"o_proj\", \"q_proj\", \"up_proj\", \"v_proj\"]"

TEST(configs_that_are_written) {
    static const struct {
        const char *model, *chosen, *targets;
    } cases[] = {
        {usual_model, "all", ALL_TARGETS},
        {usual_model, "v_proj,q_proj", "[\"q_proj\", \"v_proj\"]"},
        {gpt2_model, "all", "[\"attn.c_proj\", \"c_attn\", \"c_fc\", \"mlp.c_proj\"]"},
        {hybrid_model, "all-linear",
         "[\"down_proj\", \"gate_proj\", \"in_proj_a\", \"in_proj_b\", \"in_proj_qkv\", \"in_proj_z\", \"k_proj\", "
         "\"o_proj\", \"out_proj\", \"q_proj\", \"up_proj\", \"v_proj\"]"},
        {gpt2_model, "mlp.c_proj", "[\"mlp.c_proj\"]"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[ADAPTER_CONFIG_TEXT], expected[1000];
        Model m = model_of(cases[i].model, DTYPE_FP32);
        Lora lora = {0};
        lora.rank = 4, lora.alpha = 8;
        lora.modules = lora_modules(m.config.family, cases[i].chosen, "test", EXIT_USAGE);
        lora_build(&lora, &m);
        text[adapter_config_text(&lora, "a \"base\"", text, "test")] = 0;
        snprintf(expected, sizeof(expected),
                 "{\"alpha_pattern\": {}, \"auto_mapping\": null, \"base_model_name_or_path\": \"a \\\"base\\\"\", "
                 "\"bias\": \"none\", \"fan_in_fan_out\": %s, \"inference_mode\": true, \"init_lora_weights\": true, "
                 "\"layers_pattern\": null, \"layers_to_transform\": null, \"lora_alpha\": 8, \"lora_dropout\": 0, "
                 "\"modules_to_save\": null, \"peft_type\": \"LORA\", \"r\": 4, \"rank_pattern\": {}, "
                 "\"revision\": null, \"target_modules\": %s, \"task_type\": \"CAUSAL_LM\", \"use_rslora\": false}\n",
                 m.config.family->conv1d ? "true" : "false", cases[i].targets);
        assert_string_equal(text, expected);
        lora_free(&lora), model_free(&m);
    }
}

// Opens scratch "out"'s checkpoint without its DONE, so that it looks like PEFT's folder.
static void open_body(const void *context) {
    Model model = model_of((const char *)context, DTYPE_FP32);
    char found[PATH_MAX];
    Lora lora;
    BaseKey base;
    WeightSource *source =
        adapter_open(adapter_path_find(scratch_path("out/checkpoint-00000007"), found, 0), &model, &lora, &base);
    weights_close(source), lora_free(&lora), model_free(&model);
}

static DamageSuite save_peft_folder(void) {
    const DamageSuite suite = {scratch_path("out/checkpoint-00000007"), open_body, usual_model, mend_safetensors, 0};
    save_usual_adapters();
    assert_int_equal(unlink(file_in("checkpoint-00000007", MANIFEST_NAME)), 0);
    return suite;
}

TEST(configs_are_refused_by_name) {
#define CHANGED(find, replace, words) CHANGED_TEXT(ADAPTER_CONFIG_NAME, find, replace, words)
#define KEY(key, was, is, words)      CHANGED("\"" key "\": " was, "\"" key "\": " is, words)
    static const Damage rows[] = {
        CHANGED("\"LORA\"", "\"IA3\"", "peft_type is IA3; only LORA is supported"),
        CHANGED("\"peft_type\"", "\"type\"", "has no peft_type"),
        CHANGED("\"CAUSAL_LM\"", "\"SEQ_CLS\"", "task_type is SEQ_CLS"),
        CHANGED("\"CAUSAL_LM\"", "null", NULL),
        KEY("r", "3", "0", "r is 0; it must be a number from 1 to 65536"),
        KEY("r", "3", "2.5", "r is 2.5; it must be a whole number"),
        CHANGED("\"r\": 3", "\"q\": 3", "has no r"),
        KEY("r", "3", "4", "has shape [3, 16], but rank 4 and this base ask for [4, 16]"),
        KEY("lora_alpha", "6", "\"6\"", "lora_alpha is 6; it must be a number"),
        KEY("lora_dropout", "0", "1", "lora_dropout is 1; it must be a number from 0 to 0.99"),
        KEY("use_rslora", "false", "1", "use_rslora must be true or false"),
        CHANGED("\"use_rslora\": false", "\"use_dora\": true", "use_dora is true: DoRA, which is not supported"),
        CHANGED("\"use_rslora\": false", "\"use_dora\": false", NULL),
        KEY("bias", "\"none\"", "\"all\"", "bias is all: trained biases"),
        KEY("modules_to_save", "null", "[\"lm_head\"]", "lm_head.weight is missing; modules_to_save names its module"),
        KEY("modules_to_save", "null", "[\"norm\"]",
            "modules_to_save has norm, which is not supported; name only embed_tokens"),
        KEY("modules_to_save", "null", "[1]", "modules_to_save has an entry that is not text, which is"),
        KEY("modules_to_save", "null", "\"lm_head\"", "modules_to_save must be a list of names"),
        KEY("modules_to_save", "null", "[]", NULL),
        KEY("rank_pattern", "{}", "{\"q_proj\": 4}", "q_proj.lora_A.weight has shape [3, 16], but rank 4 and this"),
        KEY("rank_pattern", "{}", "{\"q_proj\": 3, \"layers.0\": 7}", NULL),
        KEY("rank_pattern", "{}", "{\"model.layers.1.self_attn.q_proj\": 0}",
            "rank_pattern is 0 for model.layers.1.self"),
        KEY("rank_pattern", "{}", "[3]", "rank_pattern must be an object"),
        KEY("rank_pattern", "{}", "{\"q_proj\": \"3\"}", "rank_pattern must have a number for each name"),
        KEY("alpha_pattern", "{}", "{\"q_proj\": 1e7}", "alpha_pattern is 1e+07 for model.layers.0.self_attn.q_proj"),
        KEY("alpha_pattern", "{}", "{\"q_proj\": 1}", NULL),
        KEY("layers_to_transform", "null", "1", "has tensors of model.layers.0.self_attn.q_proj, which"),
        KEY("layers_to_transform", "null", "[0, 1, 7]", NULL),
        KEY("layers_to_transform", "null", "[true]", "layers_to_transform must be a layer number"),
        KEY("layers_to_transform", "null", "[0, 1], \"exclude_modules\": [\"q_proj\"]",
            "which target_modules does not"),
        KEY("layers_pattern", "null", "\"h\"", NULL),
        KEY("layers_to_transform", "null", "[0, 1, 2]", NULL),
        CHANGED("\"revision\": null", "\"trainable_token_indices\": [1]", "trainable_token_indices is a list"),
        CHANGED("\"revision\": null", "\"use_qalora\": true", "use_qalora is true, which this program does not know"),
        CHANGED("\"revision\": null", "\"some_number\": 16", NULL),
        KEY("init_lora_weights", "true", "\"pissa\"", "init_lora_weights is pissa, which also"),
        KEY("init_lora_weights", "true", "\"gaussian\"", NULL),
        CHANGED("\"q_proj\", ", "", "has tensors of model.layers.0.self_attn.q_proj, which target_modules does"),
        CHANGED("\"q_proj\"", "\"model.layers.0.self_attn.q_proj\"", "has tensors of model.layers.1.self_attn.q_proj"),
        CHANGED("\"q_proj\"", "\"q_proj\", \"query\"", NULL),
        CHANGED("\"q_proj\"", "7", "target_modules must be a list of names, but has an entry that is not text"),
        CHANGED(ALL_TARGETS, "\"all-linear\"", NULL),
        CHANGED(ALL_TARGETS, "\".*_proj\"", NULL),
        CHANGED(ALL_TARGETS, "\"(?:.*?\\\\.)?layers\\\\.\\\\d{1,}\\\\.(?!x).*_proj\"", NULL),
        CHANGED(ALL_TARGETS, "\".*\\\\.0\\\\..*_proj\"", "has tensors of model.layers.1.self_attn.q_proj, which"),
        CHANGED(ALL_TARGETS, "\"(\"", "'(' is not a regular expression: missing closing parenthesis"),
        KEY("rank_pattern", "{}", "{\"layers.[1-9].*\": 4}",
            "layers.1.self_attn.q_proj.lora_A.weight has shape [3, 16]"),
        CHANGED(ALL_TARGETS, "3", "target_modules must be a list of names or text"),
        CHANGED("{\"alpha_pattern\"", "[\"alpha_pattern\"", "is not valid JSON"),
    };
    const DamageSuite suite = save_peft_folder();
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

// ---- tensors --------------------------------------------------------------------------------------------------------
TEST(tensors_are_refused_by_name) {
#define LAST                          "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
#define RENAMED(find, replace, words) CHANGED_TEXT(ADAPTER_FILE_NAME, find, replace, words)
// An empty tensor before the others.
#define ADDED(name, words)                                                                                             \
    RENAMED("},\"base",                                                                                                \
            "},\"base_model.model." name "\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"base", words)
    static const Damage rows[] = {
        RENAMED(LAST, "base_model.model.model.layers.1.mlp.down_proj.lora_B.bias",
                "is missing; an adapter needs both A and B"),
        RENAMED(LAST, "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight", "lora_B.weight is missing; an"),
        RENAMED("\"shape\":[16,3]", "\"shape\":[3,16]", "has shape [3, 16], but rank 3 and this base ask for [16, 3]"),
        RENAMED("\"F32\"", "\"I32\"", "has dtype I32; F32, F16"),
        RENAMED("{\"format\":\"pt\"", "{\"format\":3", "__metadata__ has a value that is not text"),
        RENAMED("0000000000001234", "qqqq000000001234", "its streambp_base is damaged"),
        RENAMED("\"2 0000000000001234 0", "\"0000000000001234 0", "names its base by keys of version 1"),
        ADDED("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "belongs to DoRA"),
        ADDED("model.layers.0.self_attn.q_proj.lora_B.bias", "is a bias of B"),
        ADDED("model.embed_tokens.lora_embedding_A", "has tensors of model.embed_tokens, which target_modules"),
        ADDED("lm_head.lora_A.weight", "has tensors of lm_head, which target_modules does not name"),
        ADDED("lm_head.weight", "is a fully trained weight; only"),
        ADDED("model.norm.weight", "is a fully trained weight; only embed_tokens"),
        ADDED("model.layers.2.self_attn.q_proj.lora_A.weight", "belongs to no linear layer of this base"),
        CUT_TO(ADAPTER_FILE_NAME, -4, "download it again"),
        REMOVED(ADAPTER_FILE_NAME, "holds no adapter_model.safetensors"),
        REMOVED(ADAPTER_CONFIG_NAME, "holds neither adapter_config.json nor the checkpoints of a run"),
    };
    const DamageSuite suite = save_peft_folder();
    expect_damage_found(&suite, rows, COUNT_OF(rows));
    expect_refused(open_body, gpt2_model, 1, "holds no adapters for the linear layers of a gpt2 model");
    const char *why =
        adapter_why_refused(family_find("gemma4"), "base_model.model.model.per_layer_model_projection.lora_A.weight");
    assert_non_null(strstr(why, "exclude_modules=['per_layer_model_projection'], or merge it"));
}

static void rename_all(const char *find, const char *replace) {
    const char *folder = scratch_path("out/checkpoint-00000007"), *file;
    size_t bytes;
    while (file = read_in(folder, ADAPTER_FILE_NAME, &bytes), memmem(file, bytes, find, strlen(find)))
        edit_file(folder, ADAPTER_FILE_NAME, find, replace);
}

// lora_A.NAME.weight, as in a state dict: read if all have the same name. Other names: told as they are.
TEST(names_of_their_own) {
    Model model = model_of(usual_model, DTYPE_FP32);
    save_peft_folder();
    for (int named = 0; named < 2; named++) {
        static char *values[2];
        Lora lora;
        BaseKey base;
        if (named) rename_all("_A.weight", "_A.policy.weight"), rename_all("_B.weight", "_B.policy.weight");
        WeightSource *source = adapter_open(scratch_path("out/checkpoint-00000007"), &model, &lora, &base);
        values[named] = (char *)case_memory(lora.table.elements * sizeof(float));
        for (size_t i = 0; i < source->model.parameter_count; i++)
            memcpy(values[named] + source->model.parameters[i].offset * sizeof(float),
                   read_parameter(source, i, DTYPE_FP32),
                   parameter_elements(&source->model.parameters[i]) * sizeof(float));
        if (named) assert_memory_equal(values[0], values[1], lora.table.elements * sizeof(float));
        weights_close(source), lora_free(&lora);
    }
    edit_file(scratch_path("out/checkpoint-00000007"), ADAPTER_FILE_NAME, "q_proj.lora_B.policy.",
              "q_proj.lora_B.ref.");
    expect_refused(open_body, usual_model, 1,
                   "q_proj.lora_B.ref.weight is of a second adapter; save each adapter alone");
    save_peft_folder();
    rename_all("base_model.model.", "");
    expect_refused(open_body, usual_model, 1,
                   "q_proj, which target_modules names; it has model.layers.0.mlp.down_proj.lora_A.weight, "
                   "model.layers.0.mlp.down_proj.lora_B.weight, model.layers.0.mlp.gate_proj.lora_A.weight and "
                   "25 more, all beginning with model.layers.");
    model_free(&model);
}

static void open_default(const void *context) {
    Model model = model_of((const char *)context, DTYPE_FP32);
    Lora lora;
    BaseKey base;
    adapter_open(scratch_path("out/default"), &model, &lora, &base);
}

static void find_adapter(const void *path) {
    char found[PATH_MAX];
    adapter_path_find((const char *)path, found, 0);
}

TEST(folders_within_are_named) {
    save_peft_folder();
    run_command("cd '%s' && mv checkpoint-00000007 default && cp -r default second%s", scratch_path("out"), "");
    expect_refused(find_adapter, scratch_path("out"), 1, "nor the checkpoints of a run; type: --adapter ");
    expect_refused(find_adapter, scratch_path("out"), 1, "/out/second\n");
    expect_refused(open_model, scratch_path("out"), 1, "out: holds no config.json; give ");
    expect_refused(open_model, scratch_path("out"), 1, "/out/default or ");
    run_command("cd '%s/default' && mv adapter_model.safetensors adapter_model.bin%s", scratch_path("out"), "");
    expect_refused(open_default, usual_model, 1, "/default/adapter_model.bin, which is not read; save the adapters");
}

// ---- the key of a base ----------------------------------------------------------------------------------------------
static BaseKey device_key_of(const WeightSource *source, DType dtype) {
    const Ops *ops = ops_fenced();
    Model model = model_build(&source->config, dtype);
    void *device = load_model(ops, source, &model);
    BaseKey key = base_key(&model, sharding_whole(), ops, device);
    ops->release(device, model.elements * dtype_size(dtype));
    model_free(&model);
    return key;
}

static BaseKey file_key(const char *path) {
    WeightSource *source = weights_open(path);
    const BaseKey key = base_key_of_source(source);
    weights_close(source);
    return key;
}

static int same_key(BaseKey a, BaseKey b) { return a.config == b.config && a.weights == b.weights; }

TEST(base_key_is_of_the_model_alone) {
    static const char *const models[] = {"gpt2", "llama", "qwen3-bf16", "qwen2-fp16"};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        WeightSource *source = weights_open(golden_path(models[i]));
        const BaseKey key = base_key_of_source(source);
        const char *path = scratch_path("flat.bin");
        size_t count;
        test_case("%s", models[i]);
        for (size_t dtype = 0; dtype < 3; dtype++) assert_true(same_key(device_key_of(source, (DType)dtype), key));
        weights_convert(source, path, i % 2 ? DTYPE_BF16 : DTYPE_FP32);
        assert_true(same_key(file_key(path), key));
        char *bytes = read_whole(path, &count);
        bytes[count - 1] ^= 1; // a high bit of the last weight
        write_file(path, bytes, count);
        assert_true(file_key(path).config == key.config && file_key(path).weights != key.weights);
        weights_close(source);
    }
}

// ---- merging --------------------------------------------------------------------------------------------------------
// Writes a folder with random adapters for the model; their values go to `values` [table.elements].
static const char *modules_prefix; // of the next random_adapters: a composite model's

static WeightSource *random_adapters(const Model *model, Lora *lora, float **values, const char *targets) {
    const char *folder = fresh_folder("adapters");
    char header[1 << 16], config[ADAPTER_CONFIG_TEXT], path[PATH_MAX];
    BaseKey base = {0, 0};
    memset(lora, 0, sizeof(*lora));
    lora->rank = 5, lora->alpha = 3, lora->rslora = 1, lora->modules_prefix = modules_prefix;
    lora->modules = lora_modules(model->config.family, targets, "test", EXIT_USAGE);
    if (!strcmp(targets, "all")) lora_vary(lora, &model->config); // then the folder uses patterns
    lora_build(lora, model);
    const size_t bytes = lora->table.elements * sizeof(float);
    *values = (float *)case_memory(bytes);
    for (size_t i = 0; i < lora->table.elements; i++) (*values)[i] = (float)random_normal(3, 1, i);
    const size_t length = adapter_header(lora, DTYPE_FP32, &base, header, sizeof(header));
    path_join(path, folder, ADAPTER_FILE_NAME);
    write_safetensors(path, header + 8, length - 8, (char *)*values, bytes);
    path_join(path, folder, ADAPTER_CONFIG_NAME);
    write_file(path, config, adapter_config_text(lora, NULL, config, path));
    lora_free(lora);
    return adapter_open(folder, model, lora, &base);
}

// Returns A of the model's parameter, followed by B; NULL: none.
static const Parameter *adapter_of(const Lora *lora, const Parameter *p) {
    char name[200];
    snprintf(name, sizeof(name), "base_model.model.%.*s.lora_A.weight", (int)(strrchr(p->name, '.') - p->name),
             p->name);
    for (size_t i = 0; p->cols && i < lora->table.parameter_count; i++)
        if (!strcmp(lora->table.parameters[i].name, name)) return &lora->table.parameters[i];
    return NULL;
}

// Checks that found is x rounded to the type: within half the distance between neighbours.
static void expect_nearest(double found, double x, DType type) {
    const double step = type == DTYPE_BF16 ? 0x1p-8 : type == DTYPE_FP32 ? 0x1p-24 : 0x1p-52;
    if (!(fabs(found - x) <= step * ldexp(1, ilogb(x == 0 ? 1 : x)) * (1 + 1e-9)))
        test_fail("%.17g is not %.17g rounded to %s", found, x, dtype_name(type));
}

// Checks parameters of at least `least` elements, in both orders and in pieces: W + scale B A, or W without adapter.
static void merge_case(WeightSource *source, const char *name, const char *targets, size_t piece, size_t least) {
    const Model *model = &source->model;
    Lora lora;
    float *values;
    Merge merge;
    size_t n, adapted = 0;
    test_case("%s, %s, pieces of %zu", name, targets, piece);
    WeightSource *adapter = random_adapters(model, &lora, &values, targets);
    merge_begin(&merge, source, adapter, &lora);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const Parameter *of_a = adapter_of(&lora, p);
        const float *a = of_a ? values + of_a->offset : NULL, *b = a ? a + of_a->rows * p->cols : NULL;
        const double scale = of_a ? lora_part_of(&lora, of_a)->scale : 0;
        const size_t count = parameter_elements(p), stride = count > 20000 ? 50 : 1;
        adapted += a != NULL;
        if (count < least) continue;
        source->merge = NULL;
        double *w = (double *)read_parameter(source, i, DTYPE_FP64);
        void *found = case_memory(count * sizeof(double));
        source->merge = &merge;
        for (size_t e = 0; a && e < count; e++) {
            double sum = 0;
            for (size_t r = 0; r < of_a->rows; r++)
                sum += (double)b[e / p->cols * of_a->rows + r] * (double)a[r * p->cols + e % p->cols];
            w[e] += scale * sum;
        }
        for (size_t type = 0; type < 3; type++) {
            const DType as = (DType)type;
            for (int transposed = 0; transposed <= p->transposed; transposed++) {
                for (size_t e = 0; e < count; e += n) {
                    n = min_size(piece, count - e);
                    source_read_order(source, i, e, n, as, transposed, (char *)found + e * dtype_size(as));
                }
                for (size_t e = 0; e < count; e += 1 + test_random_below(stride))
                    expect_nearest(element_to_double(found, as, transposed ? e % p->cols * p->rows + e / p->cols : e),
                                   w[e], as);
            }
        }
    }
    assert_int_equal(adapted, lora.table.parameter_count / 2);
    merge_end(&merge);
    source->merge = NULL;
    weights_close(adapter), lora_free(&lora);
}

static void open_adapters(const void *model) {
    Lora lora;
    BaseKey base;
    weights_close(adapter_open(scratch_path("adapters"), (const Model *)model, &lora, &base));
    lora_free(&lora);
}

// Modules of one kind of layers alone; target_modules that lists single layers; the names of a composite model.
TEST(layers_of_two_kinds) {
    Model model = model_of(hybrid_model, DTYPE_FP32);
    static const struct {
        const char *targets;
        size_t parameters;
    } cases[] = {
        {"all-linear", 2 * (4 * 8 + 7)}, {"q_proj", 2}, {"in_proj_b,out_proj", 16}, {"o_proj,in_proj_z,up_proj", 20}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Lora lora;
        float *values;
        test_case("%s", cases[i].targets);
        WeightSource *adapter = random_adapters(&model, &lora, &values, cases[i].targets);
        assert_int_equal(adapter->model.parameter_count, cases[i].parameters);
        for (size_t p = 0; p < cases[i].parameters; p++) {
            const Parameter *parameter = &adapter->model.parameters[p];
            const size_t bytes = parameter_elements(parameter) * sizeof(float);
            assert_memory_equal(read_parameter(adapter, p, DTYPE_FP32), values + parameter->offset, bytes);
        }
        weights_close(adapter), lora_free(&lora);
    }
    Lora lora;
    float *values;
    test_case("all, by the names of a composite model"); // with patterns for single layers
    modules_prefix = "model.language_model.";
    WeightSource *adapter = random_adapters(&model, &lora, &values, "all");
    modules_prefix = NULL;
    for (size_t p = 0; p < adapter->model.parameter_count; p++) {
        const Parameter *parameter = &adapter->model.parameters[p];
        assert_memory_equal(read_parameter(adapter, p, DTYPE_FP32), values + parameter->offset,
                            parameter_elements(parameter) * sizeof(float));
    }
    weights_close(adapter), lora_free(&lora);
    char config[PATH_MAX];
    path_join(config, scratch_path("adapters"), ADAPTER_CONFIG_NAME);
    cJSON *root = json_read_object(config, ADAPTER_CONFIG_MAX);
    assert_string_equal(cJSON_GetStringValue(json_get(root, "exclude_modules")), ADAPTER_NOT_TEXT);
    cJSON_Delete(root);
    weights_close(random_adapters(&model, &lora, &values, "q_proj")), lora_free(&lora);
    const char *folder = scratch_path("adapters");
    edit_file(folder, ADAPTER_CONFIG_NAME, "\"q_proj\"", "\"model.layers.3.self_attn.q_proj\"");
    open_adapters(&model);
    for (char which = 'A'; which <= 'B'; which++) {
        char old[64], new[80];
        snprintf(old, sizeof(old), "model.model.layers.3.self_attn.q_proj.lora_%c", which);
        snprintf(new, sizeof(new), "model.model.language_model.layers.3.self_attn.q_proj.lora_%c", which);
        edit_file(folder, ADAPTER_FILE_NAME, old, new);
    }
    edit_file(folder, ADAPTER_CONFIG_NAME, "model.layers.3", "model.language_model.layers.3");
    open_adapters(&model);
    edit_file(folder, ADAPTER_FILE_NAME, "language_model.layers.3", "visual.layers.3");
    expect_refused(open_adapters, &model, 1, "model.layers.3.self_attn.q_proj.lora_A.weight is missing");
    model_free(&model);
}

// Golden models, and tensors of more than a slab in memory order and in that of Conv1D files.
TEST(merged_weights) {
    static const struct {
        const char *model, *targets;
        size_t piece, least;
    } cases[] = {
        {"gpt2", "mlp.c_proj,c_attn", SLAB_ELEMENTS, 0},
        {"gpt2", "all", 211, 0},
        {"llama", "all", 211, 0},
        {"qwen2", "q_proj,up_proj", SLAB_ELEMENTS, 0},
        {"gemma3", "all", SLAB_ELEMENTS, 0},
        {"qwen3-bf16", "k_proj,down_proj", SLAB_ELEMENTS, 0},
        {hybrid_model, "all", 211, 0},
        {hybrid_model, "in_proj_b,q_proj", SLAB_ELEMENTS, 0},
        {"gpt2,hidden_size=528,num_hidden_layers=1,num_attention_heads=4,vocab_size=9,max_position_embeddings=5",
         "c_fc", (size_t)1 << 30, SLAB_ELEMENTS},
        {"llama,hidden_size=1040,intermediate_size=1100,num_hidden_layers=1,num_attention_heads=4,vocab_size=9",
         "up_proj", (size_t)1 << 30, SLAB_ELEMENTS},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        WeightSource *source;
        if (strchr(cases[i].model, ',')) {
            const Config config = config_from_text(cases[i].model, "test", EXIT_USAGE);
            source = weights_random(&config, DTYPE_FP32, 1);
        } else {
            source = weights_open(golden_path(cases[i].model));
        }
        merge_case(source, cases[i].model, cases[i].targets, cases[i].piece, cases[i].least);
        weights_close(source);
    }
}

// Rounds once from double to bf16, where rounding twice would be wrong: next to the middle of two neighbours.
TEST(rounded_once) {
    double x[4] = {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-8 - 0x1p-40, -(1 + 3 * 0x1p-8 - 0x1p-40), 1 + 0x1p-8};
    const double expected[4] = {1 + 0x1p-7, 1, -(1 + 0x1p-7), 1};
    uint16_t out[4];
    merge_round(out, DTYPE_BF16, x, 4);
    for (size_t i = 0; i < 4; i++) assert_true((double)bf16_to_float(out[i]) == expected[i]);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
