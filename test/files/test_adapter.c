/*
Adapters in files: checkpoints of adapters, there and back to the bit, damaged, for another base; what
adapter_config.json says and what is refused of it by name; tensors that are missing, over, or of another shape; the key
of a base, the same in every format; merged weights, in every order and piece those of a sum in double that is rounded
once. PEFT itself is in test_peft.py.
*/
#include "test/train/checkpoint_runs.h"
#include "weight_files.h"
#include "llmc/files/merge.h"
#include "llmc/files/checkpoint_folder.h"

// ---- checkpoints ----------------------------------------------------------------------------------------------------
static const char gpt2_model[] = "gpt2,hidden_size=12,num_hidden_layers=3,num_attention_heads=2,vocab_size=31";

static void round_trip_case(const char *model, DType dtype, DType moments, int master) {
    CheckpointFolder folder;
    RunState run = run_state(7);
    FoundTensor tensor;
    test_case("%.6s, %s, moments %s, %s master", model, dtype_name(dtype), dtype_name(moments),
              master ? "with" : "without");
    TrainedTensors a = trained_open_adapters(model, dtype, moments, master),
                   b = trained_open_adapters(model, dtype, moments, master);
    trained_fill(&a, 7), trained_fill(&b, 1);
    checkpoint_open(&folder, fresh_folder("out"), 2, 0);
    allocation_guard = 1;
    checkpoint_save(&folder, &a, &run);
    allocation_guard = 0;
    run = run_state(0);
    checkpoint_load(&folder, folder.last, &b, &run);
    checkpoint_close(&folder);
    expect_trained(&b, 7);
    assert_int_equal(run.step, 7);
    const char *file = read_whole(file_in("checkpoint-00000007", ADAPTER_FILE_NAME), NULL);
    for (size_t i = 0; i < a.model->parameter_count; i++) { // read in a second way; the master copy where there is one
        const Parameter *p = &a.model->parameters[i];
        const DType type = master ? DTYPE_FP32 : dtype;
        char *values = (char *)case_memory(parameter_elements(p) * dtype_size(type));
        assert_true(find_tensor(file, p->name, &tensor));
        assert_int_equal(tensor.type, type);
        for (size_t k = 0; k < 2; k++) assert_int_equal(tensor.shape[k], k ? p->cols : p->rows);
        a.ops->copy_out(values, (master ? (char *)a.optimizer.master : a.weights) + p->offset * dtype_size(type),
                        parameter_elements(p) * dtype_size(type));
        assert_memory_equal(values, tensor.data, parameter_elements(p) * dtype_size(type));
    }
    trained_close(&a), trained_close(&b);
}

TEST(round_trip) {
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};
    for (size_t i = 0; i < 3; i++)
        for (size_t moments = 0; moments < 2; moments++)
            for (int master = 0; master < (types[i] == DTYPE_FP64 ? 1 : 2); master++)
                round_trip_case(i == 1 ? gpt2_model : usual_model, types[i], types[moments], master);
}

// Resumes scratch "out" at its last step, as a run of adapters or of the whole model.
typedef struct {
    TrainedTensors (*open)(const char *, DType, DType, int);
    const char *model;
    DType dtype;
    int master;
    uint64_t base;
} Resumption;

static void resume_body(const void *context) {
    const Resumption *r = (const Resumption *)context;
    TrainedTensors t = r->open(r->model, r->dtype, DTYPE_FP32, r->master);
    RunState run = run_state(0);
    CheckpointFolder folder;
    if (r->base) t.base.weights = r->base;
    checkpoint_open(&folder, scratch_path("out"), 2, 1);
    if (folder.last == CHECKPOINT_NONE) die("nothing to resume from");
    checkpoint_load(&folder, folder.last, &t, &run);
}

static const Resumption usual = {trained_open_adapters, usual_model, DTYPE_FP32, 1, 0};

TEST(damage_is_found) {
    static const char *const files[] = {ADAPTER_FILE_NAME, ADAPTER_CONFIG_NAME, MANIFEST_NAME};
    save_usual_adapters();
    expect_checkpoint_damage_found(resume_body, &usual, files, COUNT_OF(files));
}

TEST(other_runs_are_refused) {
    static const struct {
        Resumption run;
        const char *words;
    } cases[] = {
        {{trained_open, usual_model, DTYPE_FP32, 1, 0},
         "checkpoint-00000007: holds adapters, but without --lora-rank or --adapter this run"},
        {{trained_open_adapters, usual_model, DTYPE_FP32, 1, 99},
         "is an adapter for another base than the/base: its weights are other ones (0000000000000063) than"},
        {{trained_open_adapters, usual_model, DTYPE_BF16, 0, 0}, "holds adapters in fp32, this run would in bf16"},
        {{trained_open_adapters,
          "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,vocab_size=33",
          DTYPE_FP32, 1, 0},
         "has shape [20, 3], but rank 3 and this base ask for [24, 3]"},
    };
    save_usual_adapters();
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_refused(resume_body, &cases[i].run, 1, cases[i].words);
    save_usual();
    expect_refused(resume_body, &usual, 1, "holds a whole model, but --lora-rank or --adapter trains adapters; resume");
}

TEST(file_size_limit) {
    Saving saving = {scratch_path("out"), 2, 8, 1, 4000, 1};
    save_usual_adapters();
    expect_refused(save_body, &saving, 1, "checkpoint-00000008.partial/adapter_model.safetensors: reserving");
    assert_false(is_there("checkpoint-00000008.partial") || is_there("checkpoint-00000008"));
    expect_found("7\n", NULL);
    assert_int_equal(run_child(resume_body, &usual)->code, 0);
}

// ---- adapter_config.json --------------------------------------------------------------------------------------------
static void targets_case(const char *model, const char *chosen, const char *expected) {
    static char text[ADAPTER_CONFIG_TEXT];
    Config config = config_from_text(model, "test", EXIT_USAGE);
    Model m = model_build(&config, DTYPE_FP32);
    test_case("%.5s, %s", model, chosen);
    Lora lora = {0};
    lora.rank = 4, lora.alpha = 8, lora.modules = lora_modules(config.family, chosen, "test", EXIT_USAGE);
    lora_build(&lora, &m);
    text[adapter_config_text(&lora, "a \"base\"", text, "test")] = 0;
    if (!strstr(text, expected)) test_fail("%s is not in %s", expected, text);
    if (!strstr(text, "\"base_model_name_or_path\": \"a \\\"base\\\"\"")) test_fail("no base in %s", text);
    if (!strstr(text, "\"lora_alpha\": 8,") || !strstr(text, "\"r\": 4,")) test_fail("no numbers in %s", text);
    if (!strstr(text, config.family->conv1d ? "\"fan_in_fan_out\": true" : "\"fan_in_fan_out\": false"))
        test_fail("fan_in_fan_out is wrong in %s", text);
    lora_free(&lora), model_free(&m);
}

#define ALL_TARGETS "[\"down_proj\", \"gate_proj\", \"k_proj\", \"o_proj\", \"q_proj\", \"up_proj\", \"v_proj\"]"

TEST(targets_are_named) {
    targets_case(usual_model, "all", "\"target_modules\": " ALL_TARGETS);
    targets_case(usual_model, "v_proj,q_proj", "\"target_modules\": [\"q_proj\", \"v_proj\"]");
    targets_case(gpt2_model, "all", "\"target_modules\": [\"attn.c_proj\", \"c_attn\", \"c_fc\", \"mlp.c_proj\"]");
    targets_case(gpt2_model, "mlp.c_proj", "\"target_modules\": [\"mlp.c_proj\"]");
}

// Opens scratch "out"'s checkpoint, whose DONE is gone, so that it is a folder as PEFT's.
static void open_body(const void *context) {
    Config config = config_from_text((const char *)context, "test", EXIT_USAGE);
    Model model = model_build(&config, DTYPE_FP32);
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
        CHANGED("\"LORA\"", "\"IA3\"", "peft_type is IA3, only LORA is supported"),
        CHANGED("\"peft_type\"", "\"type\"", "has no peft_type"),
        CHANGED("\"CAUSAL_LM\"", "\"SEQ_CLS\"", "task_type is SEQ_CLS"),
        CHANGED("\"CAUSAL_LM\"", "null", NULL),
        KEY("r", "3", "0", "r is 0, a number from 1 to 65536 was expected"),
        KEY("r", "3", "2.5", "r is 2.5, a whole number was expected"),
        CHANGED("\"r\": 3", "\"q\": 3", "has no r"),
        KEY("r", "3", "4", "has shape [3, 16], but rank 4 and this base ask for [4, 16]"),
        KEY("lora_alpha", "6", "\"6\"", "lora_alpha is 6, a number"),
        KEY("lora_dropout", "0", "1", "lora_dropout is 1, a number from 0 to 0.99"),
        KEY("use_rslora", "false", "1", "use_rslora is neither true nor false"),
        CHANGED("\"use_rslora\": false", "\"use_dora\": true", "use_dora is true: DoRA, which is not supported"),
        CHANGED("\"use_rslora\": false", "\"use_dora\": false", NULL),
        KEY("bias", "\"none\"", "\"all\"", "bias is all: biases that are trained"),
        KEY("modules_to_save", "null", "[\"lm_head\"]", "modules_to_save is a list: modules"),
        KEY("modules_to_save", "null", "[]", NULL),
        KEY("rank_pattern", "{}", "{\"q_proj\": 4}", "rank_pattern is an object: another rank"),
        KEY("alpha_pattern", "{}", "{\"q_proj\": 4}", "alpha_pattern is an object: another alpha"),
        KEY("layers_to_transform", "null", "[0]", "layers_to_transform is a list: adapters in"),
        KEY("layers_to_transform", "null", "1", "layers_to_transform is 1: adapters in"),
        CHANGED("\"revision\": null", "\"trainable_token_indices\": [1]", "trainable_token_indices is a list"),
        CHANGED("\"revision\": null", "\"use_qalora\": true", "use_qalora is true, which this program does not know"),
        CHANGED("\"revision\": null", "\"some_number\": 16", NULL),
        KEY("init_lora_weights", "true", "\"pissa\"", "init_lora_weights is pissa, which has"),
        KEY("init_lora_weights", "true", "\"gaussian\"", NULL),
        CHANGED("\"q_proj\", ", "",
                "there are tensors of model.layers.0.self_attn.q_proj, which target_modules does not"),
        CHANGED("\"q_proj\"", "\"model.layers.0.self_attn.q_proj\"",
                "there are tensors of model.layers.1.self_attn.q_proj"),
        CHANGED("\"q_proj\"", "\"q_proj\", \"query\"", NULL),
        CHANGED("\"q_proj\"", "7", "target_modules has something that is no name"),
        CHANGED(ALL_TARGETS, "\"all-linear\"", NULL),
        CHANGED(ALL_TARGETS, "\".*_proj\"", NULL),
        CHANGED(ALL_TARGETS, "3", "target_modules is neither a list of names nor text"),
        CHANGED("{\"alpha_pattern\"", "[\"alpha_pattern\"", "is not valid JSON"),
    };
    const DamageSuite suite = save_peft_folder();
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

// ---- tensors --------------------------------------------------------------------------------------------------------
TEST(tensors_are_refused_by_name) {
#define LAST                          "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
#define RENAMED(find, replace, words) CHANGED_TEXT(ADAPTER_FILE_NAME, find, replace, words)
// An empty tensor in front of the others.
#define ADDED(name, words)                                                                                             \
    RENAMED("},\"base",                                                                                                \
            "},\"base_model.model." name "\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"base", words)
    static const Damage rows[] = {
        RENAMED(LAST, "base_model.model.model.layers.1.mlp.down_proj.lora_B.bias", "is missing; every layer must have"),
        RENAMED(LAST, "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight",
                "layers.1.mlp.down_proj.lora_B.weight is missing"),
        RENAMED("\"shape\":[16,3]", "\"shape\":[3,16]", "has shape [3, 16], but rank 3 and this base ask for [16, 3]"),
        RENAMED("\"F32\"", "\"I32\"", "has dtype I32, which is not supported"),
        RENAMED("{\"format\":\"pt\"", "{\"format\":3", "__metadata__ has something that is not text"),
        RENAMED("0000000000001234", "qqqq000000001234", "its streambp_base is damaged"),
        RENAMED("\"2 0000000000001234 0", "\"0000000000001234 0", "says by keys of version 1 which base it is for"),
        ADDED("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "belongs to DoRA"),
        ADDED("model.layers.0.self_attn.q_proj.lora_B.bias", "is a bias of B"),
        ADDED("model.embed_tokens.lora_embedding_A", "belongs to the embedding or the head"),
        ADDED("lm_head.lora_A.weight", "belongs to the embedding or the head"),
        ADDED("model.norm.weight", "is trained as a whole, which is not supported"),
        ADDED("model.layers.2.self_attn.q_proj.lora_A.weight", "belongs to no linear layer of this base"),
        CUT_TO(ADAPTER_FILE_NAME, -4, "is the file truncated?"),
        REMOVED(ADAPTER_FILE_NAME, "holds no adapter_model.safetensors"),
        REMOVED(ADAPTER_CONFIG_NAME, "holds neither adapter_config.json nor the checkpoints of a run"),
    };
    const DamageSuite suite = save_peft_folder();
    expect_damage_found(&suite, rows, COUNT_OF(rows));
    expect_refused(open_body, gpt2_model, 1, "holds no adapters for the linear layers of a gpt2 model");
}

// ---- what paths stand for -------------------------------------------------------------------------------------------
typedef struct {
    const char *path;
    int adapter;
} Finding;

static void path_body(const void *context) {
    const Finding *finding = (const Finding *)context;
    char found[PATH_MAX];
    puts((finding->adapter ? adapter_path_find : model_path_find)(finding->path, found, 1));
}

TEST(paths) {
    static const struct {
        const char *path; // in "out"
        int adapter;
        const char *words; // NULL: the checkpoint is found
    } cases[] = {
        {"", 1, NULL},
        {"checkpoint-00000007", 1, NULL},
        {"checkpoint-00000007/DONE", 1, "DONE: is a file; give the folder"},
        {"nowhere", 1, "nowhere: No such file"},
        {"", 0, "holds adapters, not a model; give the model they were trained on with --model"},
        {"checkpoint-00000007", 0, "and this folder with --adapter"},
    };
    Finding f = {scratch_path("out"), 1};
    save_usual_adapters();
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        f.path = *cases[i].path ? file_in(".", cases[i].path) : scratch_path("out"), f.adapter = cases[i].adapter;
        test_case("%s", cases[i].path);
        if (cases[i].words) {
            expect_refused(path_body, &f, 1, cases[i].words);
            continue;
        }
        const Child *child = run_child(path_body, &f);
        if (child->code || !strstr(child->out, "checkpoint-00000007\n")) test_fail("%s%s", child->out, child->err);
    }
    assert_int_equal(unlink(file_in("checkpoint-00000007", "DONE")), 0);
    expect_refused(path_body, &f, 1, "holds adapters, not a model");
    save_usual();
    f.path = scratch_path("out"), f.adapter = 1;
    expect_refused(path_body, &f, 1, "holds a whole model, not adapters; give it with --model");
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
// A folder with adapters of random values for the model; what they are goes to `values` [table.elements].
static WeightSource *random_adapters(const Model *model, Lora *lora, float **values, const char *targets) {
    static char header[1 << 20];
    static char config[ADAPTER_CONFIG_TEXT];
    const char *folder = fresh_folder("adapters");
    BaseKey base = {0, 0};
    char path[PATH_MAX];
    memset(lora, 0, sizeof(*lora));
    lora->rank = 5, lora->alpha = 3, lora->rslora = 1;
    lora->modules = lora_modules(model->config.family, targets, "test", EXIT_USAGE);
    lora_build(lora, model);
    *values = (float *)malloc(lora->table.elements * sizeof(float));
    assert_non_null(*values);
    for (size_t i = 0; i < lora->table.elements; i++) (*values)[i] = (float)random_normal(3, 1, i);
    size_t bytes = adapter_header(&lora->table, DTYPE_FP32, &base, header, sizeof(header));
    char *file = (char *)case_memory(bytes + lora->table.elements * sizeof(float));
    memcpy(file, header, bytes);
    memcpy(file + bytes, *values, lora->table.elements * sizeof(float));
    path_join(path, folder, ADAPTER_FILE_NAME);
    write_file(path, file, bytes + lora->table.elements * sizeof(float));
    path_join(path, folder, ADAPTER_CONFIG_NAME);
    bytes = adapter_config_text(lora, NULL, config, path);
    write_file(path, config, bytes);
    lora_free(lora);
    return adapter_open(folder, model, lora, &base);
}

// W + scale B A of one element, by the parts of lora.h; W where there is no adapter.
static double merged_value(const Model *model, const Lora *lora, const float *values, double w, size_t element) {
    const size_t in_layers = element - model->layer_begin, layer = in_layers / model->layer_elements;
    if (element < model->layer_begin || layer >= model->config.num_hidden_layers) return w;
    for (size_t t = 0; t < LORA_TENSORS; t++) {
        const TensorShape shape = layer_tensor_shape(&model->config, lora_tensors[t]);
        const LoraPart *part = &lora->part[lora_tensors[t]];
        const size_t begin = layer * model->layer_elements + model->layer_offset[lora_tensors[t]];
        const float *of_layer = values + layer * lora->table.layer_elements;
        double sum = 0;
        if (part->a == ABSENT || in_layers < begin || in_layers >= begin + shape.rows * shape.cols) continue;
        size_t i = (in_layers - begin) / shape.cols, j = (in_layers - begin) % shape.cols;
        for (size_t k = 0; k < lora->rank; k++)
            sum += (double)of_layer[part->b + i * lora->rank + k] * (double)of_layer[part->a + k * shape.cols + j];
        return w + lora->scale * sum;
    }
    return w;
}

// The two values of the type on either side of x are no nearer than `found`.
static void expect_nearest(double found, double x, DType type) {
    const double step = type == DTYPE_BF16 ? 0x1p-8 : type == DTYPE_FP32 ? 0x1p-24 : 0x1p-52;
    const double half = step * ldexp(1, ilogb(x == 0 ? 1 : x)); // half of the distance between neighbours
    if (!(fabs(found - x) <= half * (1 + 1e-9)))
        test_fail("%.17g is not %.17g rounded to %s", found, x, dtype_name(type));
}

// The elements of all parameters of at least so many, in both orders and in pieces.
static void merge_case(WeightSource *source, const char *name, const char *targets, size_t piece, size_t least) {
    const Model *model = &source->model;
    Lora lora;
    float *values;
    WeightSource *adapter = random_adapters(model, &lora, &values, targets);
    Merge merge;
    size_t n, adapted = 0;
    test_case("%s, %s, pieces of %zu", name, targets, piece);
    merge_begin(&merge, source, adapter, &lora);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const size_t count = parameter_elements(p);
        adapted += merge.first[i] != ABSENT;
        if (count < least) continue;
        double *w = (double *)malloc(count * sizeof(double));
        void *found = malloc(count * sizeof(double));
        assert_true(w && found);
        source->merge = NULL;
        weights_read(source, i, 0, count, DTYPE_FP64, w);
        source->merge = &merge;
        for (size_t type = 0; type < 3; type++) {
            const DType as = (DType)type;
            for (int transposed = 0; transposed <= p->transposed; transposed++) {
                for (size_t e = 0; e < count; e += n) {
                    n = min_size(piece, count - e);
                    source_read_order(source, i, e, n, as, transposed, (char *)found + e * dtype_size(as));
                }
                for (size_t e = 0; e < count; e += 1 + (count > 20000) * test_random_below(50)) {
                    const size_t at = transposed ? e % p->cols * p->rows + e / p->cols : e;
                    expect_nearest(element_read(found, as, at), merged_value(model, &lora, values, w[e], p->offset + e),
                                   as);
                }
            }
        }
        free(w), free(found);
    }
    assert_int_equal(adapted, lora.table.parameter_count / 2);
    merge_end(&merge);
    source->merge = NULL;
    weights_close(adapter), lora_free(&lora), free(values);
}

TEST(merged_weights) {
    static const char *const models[] = {"gpt2", "llama", "qwen2", "gemma3", "qwen3-bf16"};
    static const char *const targets[] = {"mlp.c_proj,c_attn", "all", "q_proj,up_proj", "all", "k_proj,down_proj"};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        WeightSource *source = weights_open(golden_path(models[i]));
        merge_case(source, models[i], targets[i], SLAB_ELEMENTS, 0);
        if (i < 2 || all_cases()) merge_case(source, models[i], "all", 211, 0);
        weights_close(source);
    }
}

// Tensors of more than a slab, in the order of memory and of Conv1D files.
TEST(merged_weights_of_many_slabs) {
    static const char *const models[] = {
        "gpt2,hidden_size=528,num_hidden_layers=1,num_attention_heads=4,vocab_size=9,max_position_embeddings=5",
        "llama,hidden_size=1040,intermediate_size=1100,num_hidden_layers=1,num_attention_heads=4,vocab_size=9"};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        Config config = config_from_text(models[i], "test", EXIT_USAGE);
        WeightSource *source = weights_random(&config, DTYPE_FP32, 1);
        merge_case(source, models[i], i ? "up_proj" : "c_fc", (size_t)1 << 30, SLAB_ELEMENTS);
        weights_close(source);
    }
}

// One rounding from double to bf16, where two would go astray: just beside the middle between two neighbours.
TEST(rounded_once) {
    double x[4] = {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-8 - 0x1p-40, -(1 + 3 * 0x1p-8 - 0x1p-40), 1 + 0x1p-8};
    const double expected[4] = {1 + 0x1p-7, 1, -(1 + 0x1p-7), 1};
    uint16_t out[4];
    merge_round(out, DTYPE_BF16, x, 4);
    for (size_t i = 0; i < 4; i++) assert_true((double)bf16_to_float(out[i]) == expected[i]);
}

static void merge_nan_body(const void *context) {
    Config config = config_from_text(usual_model, "test", EXIT_USAGE);
    WeightSource *source = weights_random(&config, DTYPE_FP32, 1);
    Lora lora;
    Merge merge;
    BaseKey base;
    float out[4];
    WeightSource *adapter = adapter_open((const char *)context, &source->model, &lora, &base);
    merge_begin(&merge, source, adapter, &lora);
    weights_read(source, source->model.parameter_count - 3, 0, 4, DTYPE_FP32, out); // before the final norm and lm_head
}

TEST(merged_nan_is_refused) {
    size_t count;
    uint64_t header;
    const float nan_value = NAN;
    save_peft_folder();
    const char *path = file_in("checkpoint-00000007", ADAPTER_FILE_NAME);
    char *bytes = read_whole(path, &count);
    memcpy(&header, bytes, sizeof(header));
    memset(bytes + 8 + header, 0, count - 8 - (size_t)header); // any bits at all were there
    memcpy(bytes + count - sizeof(float), &nan_value, sizeof(float));
    write_file(path, bytes, count);
    expect_refused(merge_nan_body, scratch_path("out/checkpoint-00000007"), 1,
                   "layers.1.mlp.down_proj.lora_B.weight holds NaN at [15, 2]");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
