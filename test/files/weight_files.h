/*
Files for the tests of weights: the golden models, copies to be damaged, and models written from a formula. A second
reader of safetensors files shares no line with llmc/files/safetensors.h. It finds a tensor's entry in the header's text
as the reference implementation writes it.
*/
#ifndef TEST_WEIGHT_FILES_H
#define TEST_WEIGHT_FILES_H
#include "test/base/damage.h"
#include "llmc/files/weights.h"

#define GOLDEN "test/golden/"

// ---- the golden models ----------------------------------------------------------------------------------------------
typedef struct {
    const char *name; // the folder
    const char *text; // its config.json
    DType dtype;
    size_t files;
} GoldenModel;

#define GOLDEN_GPT2                                                                                                    \
    "gpt2,vocab_size=101,max_position_embeddings=64,hidden_size=24,num_hidden_layers=2,num_attention_heads=3"
#define GOLDEN_LLAMA                                                                                                   \
    "llama,vocab_size=131,hidden_size=40,intermediate_size=88,num_hidden_layers=2,num_attention_heads=4,"              \
    "num_key_value_heads=2,max_position_embeddings=128,rms_norm_eps=1e-5"
#define GOLDEN_QWEN2                                                                                                   \
    "qwen2,vocab_size=112,hidden_size=32,intermediate_size=60,num_hidden_layers=3,num_attention_heads=4,"              \
    "num_key_value_heads=2,max_position_embeddings=128,tie_word_embeddings=true,rope_theta=1000000"
#define GOLDEN_QWEN3                                                                                                   \
    "qwen3,vocab_size=107,hidden_size=40,intermediate_size=56,num_hidden_layers=2,num_attention_heads=4,"              \
    "num_key_value_heads=2,head_dim=16,max_position_embeddings=128,rope_theta=1000000"

static const GoldenModel golden_models[] = {
    {"gpt2", GOLDEN_GPT2, DTYPE_FP32, 1},
    {"gpt2-hub", GOLDEN_GPT2, DTYPE_FP32, 1},
    {"llama", GOLDEN_LLAMA, DTYPE_FP32, 1},
    {"llama-sharded", GOLDEN_LLAMA, DTYPE_FP32, 4},
    {"llama-tied",
     "llama,vocab_size=128,hidden_size=32,intermediate_size=56,num_hidden_layers=2,num_attention_heads=8,"
     "num_key_value_heads=2,head_dim=8,max_position_embeddings=128,rms_norm_eps=1e-5,tie_word_embeddings=true,"
     "rope_theta=500000",
     DTYPE_FP32, 1},
    {"qwen2", GOLDEN_QWEN2, DTYPE_FP32, 1},
    {"qwen2-fp16", GOLDEN_QWEN2, DTYPE_FP16, 1},
    {"qwen3", GOLDEN_QWEN3, DTYPE_FP32, 1},
    {"qwen3-bf16", GOLDEN_QWEN3, DTYPE_BF16, 1},
};
#define GOLDEN_MODELS (sizeof(golden_models) / sizeof(golden_models[0]))

// ---- tensors of a safetensors file, found by their text -------------------------------------------------------------
typedef struct {
    DType type;
    size_t rank, shape[2]; // joins the first two dimensions of three
    const unsigned char *data;
} FoundTensor;

static int find_tensor(const char *file, const char *name, FoundTensor *tensor) {
    char key[400], dtype[8];
    size_t begin = 0, end = 0;
    uint64_t header;
    memcpy(&header, file, 8);
    snprintf(key, sizeof(key), "\"%s\":{\"dtype\":\"", name);
    const char *entry = (const char *)memmem(file + 8, (size_t)header, key, strlen(key));
    if (!entry) return 0;
    entry += strlen(key);
    memset(tensor, 0, sizeof(*tensor));
    tensor->rank = 2;
    if (sscanf(entry, "%7[A-Z0-9]\",\"shape\":[%zu,%zu],\"data_offsets\":[%zu,%zu]}", dtype, &tensor->shape[0],
               &tensor->shape[1], &begin, &end) != 5) {
        size_t stack;
        tensor->rank = 3;
        if (sscanf(entry, "%7[A-Z0-9]\",\"shape\":[%zu,%zu,%zu],\"data_offsets\":[%zu,%zu]}", dtype, &stack,
                   &tensor->shape[0], &tensor->shape[1], &begin, &end) == 6) {
            tensor->shape[0] *= stack;
        } else {
            tensor->rank = 1, tensor->shape[1] = 1;
            if (sscanf(entry, "%7[A-Z0-9]\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}", dtype, &tensor->shape[0],
                       &begin, &end) != 4)
                test_fail("the entry of %s is not understood: %.80s", name, entry);
        }
    }
    tensor->type = !strcmp(dtype, "F32")    ? DTYPE_FP32
                   : !strcmp(dtype, "BF16") ? DTYPE_BF16
                   : !strcmp(dtype, "F16")  ? DTYPE_FP16
                                            : DTYPE_FP64;
    assert_int_equal(end - begin, tensor->shape[0] * tensor->shape[1] * dtype_size(tensor->type));
    tensor->data = (const unsigned char *)file + 8 + header + begin;
    return 1;
}

static double half_to_double(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
}

static double found_value(const FoundTensor *tensor, size_t i) {
    unsigned char bytes[8] = {0};
    uint16_t half;
    memcpy(bytes, tensor->data + i * dtype_size(tensor->type), dtype_size(tensor->type));
    if (tensor->type != DTYPE_FP16) return element_to_double(bytes, tensor->type, 0);
    memcpy(&half, bytes, 2);
    return half_to_double(half);
}

// Returns where a file has element i of memory, in a matrix that the file may hold as [cols, rows], or with the rows of
// a group together.
static size_t file_element(const Parameter *p, size_t i) {
    const size_t *width = p->fused.width, row = p->cols ? i / p->cols : 0;
    size_t from = 0;
    if (p->transposed) return i % p->cols * p->rows + i / p->cols;
    for (size_t part = 0; part < FUSED_MOST; part++) // goes over memory's rows in order
        for (size_t g = 0; g < p->fused.groups; g++)
            for (size_t k = 0; k < width[part]; k++, from++) {
                size_t before = 0, all = 0;
                for (size_t n = 0; n < FUSED_MOST; n++) before += n < part ? width[n] : 0, all += width[n];
                if (from == row) return (g * all + before + k) * p->cols + i % p->cols;
            }
    return i;
}

// Returns element i, in memory order.
static double found_parameter_value(const FoundTensor *tensor, const Parameter *p, size_t i) {
    return found_value(tensor, file_element(p, i));
}

// Returns the parameter in the golden model's files, with `prefix` before its name.
static FoundTensor golden_tensor(const GoldenModel *golden, const char *const *files, const char *prefix,
                                 const Parameter *p) {
    FoundTensor tensor;
    char name[300];
    for (size_t i = 0; i < golden->files; i++) {
        const char *bare = strchr(p->name, '.') + 1; // as on the Hub
        snprintf(name, sizeof(name), "%s%s", prefix, p->name);
        if (find_tensor(files[i], name, &tensor)) return tensor;
        if (!*prefix && find_tensor(files[i], bare, &tensor)) return tensor;
    }
    test_fail("%s: %s%s is not in the golden files", golden->name, prefix, p->name);
    return tensor;
}

static void golden_files(const GoldenModel *golden, const char **files) {
    char path[300];
    for (size_t i = 0; i < golden->files; i++) {
        snprintf(path, sizeof(path), GOLDEN "%s/model.safetensors", golden->name);
        if (golden->files > 1)
            snprintf(path, sizeof(path), GOLDEN "%s/model-%05zu-of-%05zu.safetensors", golden->name, i + 1,
                     golden->files);
        files[i] = read_whole(path, NULL);
    }
}

static const char *golden_path(const char *name) {
    static char paths[4][300];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), GOLDEN "%s", name);
    return path;
}

// ---- copies to be damaged -------------------------------------------------------------------------------------------
static void run_command(const char *format, const char *a, const char *b) {
    char command[1200];
    snprintf(command, sizeof(command), format, a, b);
    if (system(command) != 0) test_fail("this command failed: %s", command);
}

// Makes fresh copies of golden folders, "llama gpt2", without their references, in scratch "golden".
static const char *copy_goldens(const char *names) {
    const char *folder = scratch_path("golden");
    run_command("rm -rf '%s' && mkdir '%s'", folder, folder);
    run_command("cd " GOLDEN " && cp -r --no-preserve=mode %s '%s'", names, folder);
    run_command("rm -f '%s'/*/reference.safetensors", folder, "");
    return folder;
}

// Makes a fresh copy of one. Returns its path.
static const char *copy_golden(const char *name) {
    char path[300];
    copy_goldens(name);
    snprintf(path, sizeof(path), "golden/%s", name);
    return scratch_path(path);
}

static char *read_in(const char *folder, const char *name, size_t *bytes) {
    char path[PATH_MAX];
    path_join(path, folder, name);
    return read_whole(path, bytes);
}

static void write_safetensors(const char *path, const char *header, size_t length, const char *data, size_t bytes) {
    char *file = (char *)case_memory(8 + length + bytes);
    uint64_t prefix = length;
    memcpy(file, &prefix, 8);
    memcpy(file + 8, header, length);
    memcpy(file + 8 + length, data, bytes);
    write_file(path, file, 8 + length + bytes);
}

// Repairs the length before a safetensors header after a change of the header's text.
static void mend_safetensors(const char *path, char *bytes, size_t count, size_t before) {
    uint64_t length;
    if (!text_ends_with(path, ".safetensors") || count <= 8) return;
    memcpy(&length, bytes, 8);
    length += count - before;
    memcpy(bytes, &length, 8);
}

// Replaces text in a file of a folder; the file stays valid.
static void edit_file(const char *folder, const char *name, const char *find, const char *replace) {
    const Damage change = CHANGED_TEXT(name, find, replace, NULL);
    char path[PATH_MAX];
    size_t before, count;
    path_join(path, folder, name);
    char *bytes = read_whole(path, &before);
    count = before;
    char *changed = damaged_copy(&change, bytes, &count);
    mend_safetensors(path, changed, count, before);
    write_file(path, changed, count);
    free(changed);
}

// ---- the same in two places -----------------------------------------------------------------------------------------
static void expect_same_config(const Config *found, const Config *expected) {
    char a[2048], b[2048];
    config_to_text(found, a, sizeof(a));
    config_to_text(expected, b, sizeof(b));
    if (strcmp(a, b) != 0) test_fail("the config is %s, expected %s", a, b);
}

// Reads the whole parameter with weights_read; lasts until the next case.
static void *read_parameter(const WeightSource *source, size_t i, DType as) {
    size_t count = parameter_elements(&source->model.parameters[i]);
    void *values = case_memory(count * dtype_size(as));
    weights_read(source, i, 0, count, as, values);
    return values;
}

// Checks that two files hold the same weights: bit for bit, or once rounded to bf16.
static void expect_same_weights(const char *one, const char *other, DType type) {
    WeightSource *a = weights_open(one), *b = weights_open(other);
    expect_same_config(&a->config, &b->config);
    for (size_t i = 0; i < a->model.parameter_count; i++) {
        size_t bytes = parameter_elements(&a->model.parameters[i]) * dtype_size(type);
        if (memcmp(read_parameter(a, i, type), read_parameter(b, i, type), bytes) != 0)
            test_fail("%s is another in %s", a->model.parameters[i].name, other);
    }
    weights_close(a);
    weights_close(b);
}

// ---- models in memory -----------------------------------------------------------------------------------------------
static Model model_of(const char *text, DType dtype) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    return model_build(&config, dtype);
}

static void *load_model(const Ops *ops, const WeightSource *source, const Model *model) {
    void *device = ops->allocate(model->elements * dtype_size(model->dtype));
    assert_non_null(device);
    weights_load(source, model, sharding_whole(), ops, device);
    return device;
}

// Writes a flat .bin of zeros as a sparse file.
static void write_zeros(const char *path, const Model *model, DType dtype) {
    OutputFile output;
    flat_begin(&output, path, model, dtype);
    assert_int_equal(ftruncate(output.fd, (off_t)(4096 + model->elements * dtype_size(dtype))), 0);
    output_commit(&output);
}

// ---- models by formula ----------------------------------------------------------------------------------------------
// Returns the value of element i of the model, in memory order: distinguishes elements, and is exact in fp32.
static double formula(size_t i) { return (double)((i * 2654435761u) % 16777213) / 8388608.0 - 1.0; }

static void expect_formula(const FoundTensor *found, const Parameter *p) {
    for (size_t j = 0; j < parameter_elements(p); j++)
        if (found_parameter_value(found, p, j) != (double)(float)formula(p->offset + j))
            test_fail("%s[%zu] is %.9g", p->name, j, found_parameter_value(found, p, j));
}

// Matrices of several slabs; those as wide as GPT-2's are transposed.
#define LARGE_GPT2 "gpt2,vocab_size=1700,max_position_embeddings=16,num_hidden_layers=1"
#define LARGE_GPT2_JSON                                                                                                \
    "{\"model_type\":\"gpt2\",\"vocab_size\":1700,\"n_positions\":16,\"n_layer\":1,\"n_embd\":768,\"n_head\":12}"

// Writes a Hugging Face folder for the config: every element by the formula, the tensors' types in turn. With several
// types, fp16 takes any bits that are numbers, double also values that fp32 lacks. `json` needs only keys that differ
// from the defaults.
static void write_formula_model(const char *folder, const Model *model, const char *json, const DType *types,
                                size_t type_count) {
    const size_t room = model->parameter_count * 512 + 128;
    char path[PATH_MAX], *header = (char *)case_memory(room), *data = (char *)case_memory(model->elements * 8);
    SafetensorsWriter writer;
    mkdir(folder, 0777);
    path_join(path, folder, "config.json");
    write_file(path, json, strlen(json));
    safetensors_write_begin(&writer, NULL, header, room, NULL, NULL);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const DType type = types[i % type_count];
        char *tensor = data + writer.data;
        safetensors_write_named(&writer, p->name, p, type);
        for (size_t j = 0; j < parameter_elements(p); j++) {
            const size_t to = file_element(p, j);
            const double value = formula(p->offset + j);
            const uint16_t half = (uint16_t)((j * 2654435761u) >> 7 & 0xbfff);
            if (type == DTYPE_FP16)
                memcpy(tensor + 2 * to, &half, 2);
            else
                element_write(tensor, type, to, type == DTYPE_FP64 && type_count > 1 ? value / 3 : value);
        }
    }
    const size_t length = (size_t)safetensors_write_end(&writer);
    path_join(path, folder, HF_SINGLE_FILE);
    write_safetensors(path, header + 8, length - 8, data, (size_t)writer.data);
}

// ---- opening, in a child process ------------------------------------------------------------------------------------
// Also reads the end of each parameter.
static void open_and_read(const void *path) {
    WeightSource *source = weights_open((const char *)path);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const size_t elements = parameter_elements(&source->model.parameters[i]), count = min_size(elements, 4096);
        float values[4096];
        weights_read(source, i, elements - count, count, DTYPE_FP32, values);
    }
    weights_close(source);
}

static void open_model(const void *path) { weights_close(weights_open((const char *)path)); }

static void expect_bad(const char *path, const char *words) { expect_refused(open_model, path, 1, words); }

static void expect_good(const char *path) {
    const Child *child = run_child(open_model, path);
    if (child->code != 0 || *child->err) test_fail("exit code %d: %s", child->code, child->err);
}

#endif
