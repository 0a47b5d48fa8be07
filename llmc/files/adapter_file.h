/*
Adapters in PEFT's format: a folder with adapter_config.json (adapter_config.h) and adapter_model.safetensors, whose
tensors have the names and shapes of the table in lora.h; so reading them is reading a source of weights
(weight_source.h). Any of the types we read will do. Every layer must have the same modules, and there must be nothing
else.

What we write also says, in the metadata of the safetensors file, for which base model: two keys that are the same for
every file format and every build of one model. PEFT records none; then shapes have to do.
*/
#ifndef LLMC_ADAPTER_FILE_H
#define LLMC_ADAPTER_FILE_H
#include "adapter_config.h"
#include "table_parts.h"
#include "weights.h"

#define ADAPTER_FILE_NAME "adapter_model.safetensors"
#define ADAPTER_BASE_KEY  "streambp_base" // in the metadata: the version of keys, then both in hexadecimal
#define ADAPTER_BASE_VER  "2 "

// ---- which base -----------------------------------------------------------------------------------------------------
// weights 0: not known
typedef struct {
    uint64_t config, weights;
} BaseKey;

static BaseKey base_key_of(const Model *model, uint64_t weights) {
    char config[4096];
    BaseKey key;
    config_to_text(&model->config, config, sizeof(config));
    key.config = checksum_piece(0, config, strlen(config)), key.weights = weights ? weights : 1;
    return key;
}

// Of a model in device memory, by all ranks together. All values count as bf16, the least exact of the types that a
// base is run in, so that it does not matter which one it was.
static BaseKey base_key(const Model *model, Sharding memory, const Ops *ops, const void *device) {
    return base_key_of(model, table_checksum(1, model, memory, ops, device, DTYPE_BF16, "key of the base"));
}

// The same of one in a source of weights, by this process alone.
static BaseKey base_key_of_source(const WeightSource *source) {
    const Model *model = &source->model;
    Progress progress = progress_begin(stderr, "key of the base", 0, (double)model->elements);
    Checksum sum = {{0, 0}};
    size_t n, size = dtype_size(DTYPE_BF16);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        for (size_t begin = 0; begin < parameter_elements(p); begin += n) {
            n = min_size(parameter_elements(p) - begin, SLAB_ELEMENTS);
            weights_read(source, i, begin, n, DTYPE_BF16, staged.bytes);
            checksum_add(&sum, (uint64_t)(p->offset + begin) * size, staged.bytes, n * size);
            progress_update(&progress, (double)(p->offset + begin + n));
        }
    }
    progress_end(&progress);
    return base_key_of(model, checksum_value(1, &sum, (uint64_t)model->elements * size));
}

// What the file says of its base; weights 0 where it says nothing.
static BaseKey adapter_recorded_base(const InputFile *file) {
    uint64_t header_bytes;
    cJSON *header = safetensors_parse_header(file, &header_bytes);
    const cJSON *metadata = json_get(header, "__metadata__"), *item = json_get(metadata, ADAPTER_BASE_KEY);
    unsigned long long config = 0, weights = 0;
    BaseKey key = {0, 0};
    if (cJSON_IsString(item) && strlen(item->valuestring) == 33) // two keys and no version
        die("%s: says by keys of version 1 which base it is for, this program knows version " ADAPTER_BASE_VER
            "alone; take the entry " ADAPTER_BASE_KEY " out of its metadata (saving it with PEFT does), if you know "
            "the base",
            file->path);
    if (item && (!cJSON_IsString(item) ||
                 sscanf(item->valuestring, ADAPTER_BASE_VER "%16llx %16llx", &config, &weights) != 2 || !weights))
        die("%s: its " ADAPTER_BASE_KEY " is damaged", file->path);
    key.config = config, key.weights = weights;
    cJSON_Delete(header);
    return key;
}

// path: of the adapters; base: for people, the model at hand, or NULL
static void adapter_check_base(const char *path, const BaseKey *recorded, const BaseKey *found, const char *base) {
    const int config = recorded->config != found->config; // told first: it is what people can look up
    if (!recorded->weights || (!config && recorded->weights == found->weights)) return;
    die("%s: is an adapter for another base than %s: its %s are other ones (%016llx) than those it was trained on "
        "(%016llx); give that model with --model",
        path, base ? base : "that of --init", config ? "settings" : "weights",
        (unsigned long long)(config ? found->config : found->weights),
        (unsigned long long)(config ? recorded->config : recorded->weights));
}

// ---- writing --------------------------------------------------------------------------------------------------------
// The first bytes of adapter_model.safetensors, up to the data, which follow in the order of the table; returns how
// many.
static size_t adapter_header(const Model *table, DType type, const BaseKey *base, char *text, size_t room) {
    char keys[64];
    SafetensorsWriter writer;
    snprintf(keys, sizeof(keys), ADAPTER_BASE_VER "%016llx %016llx", (unsigned long long)base->config,
             (unsigned long long)base->weights);
    safetensors_write_begin(&writer, NULL, text, room, base->weights ? ADAPTER_BASE_KEY : NULL, keys);
    for (size_t i = 0; i < table->parameter_count; i++) safetensors_write_entry(&writer, &table->parameters[i], type);
    return (size_t)safetensors_write_end(&writer);
}

// ---- reading --------------------------------------------------------------------------------------------------------
// The modules that the file has any tensor of, in any layer.
static unsigned adapter_modules(const SafeTensors *list, const Config *c, const char *path) {
    unsigned modules = 0;
    char name[200];
    const char *module;
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++) {
        int prefix = snprintf(name, sizeof(name), "base_model.model.");
        prefix += snprintf(name + prefix, sizeof(name) - (size_t)prefix, c->family->layer_prefix, layer);
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++) {
            const int length = snprintf(name + prefix, sizeof(name) - (size_t)prefix, "%s.lora_A.weight", module);
            if (safetensors_find(list, name)) modules |= 1u << i;
            name[prefix + length - (int)strlen("A.weight")] = 'B';
            if (safetensors_find(list, name)) modules |= 1u << i;
        }
    }
    if (!modules)
        die("%s: holds no adapters for the linear layers of a %s model; is it for another base?", path,
            c->family->name);
    return modules;
}

static void adapter_place_tensor(WeightSource *source, const SafeTensors *list, size_t parameter, size_t rank) {
    const Parameter *p = &source->model.parameters[parameter];
    SafeTensor *tensor = safetensors_find(list, p->name);
    TensorLocation *place = &source->places[parameter];
    const uint64_t wanted[2] = {p->rows, p->cols};
    if (!tensor)
        die("%s: tensor %s is missing; every layer must have the same adapters, each with A and B", source->path,
            p->name);
    if (tensor->rank != 2 || memcmp(tensor->shape, wanted, sizeof(wanted)) != 0)
        die("%s: tensor %s has shape %s, but rank %zu and this base ask for %s; is it an adapter for another base?",
            source->path, p->name, shape_text(tensor->shape, tensor->rank), rank, shape_text(wanted, 2));
    place->type = safetensors_dtype(tensor->dtype);
    if (place->type == DTYPE_COUNT)
        die("%s: tensor %s has dtype %s, which is not supported; supported are F32, F16, BF16, F64", source->path,
            p->name, tensor->dtype);
    place->offset = tensor->begin;
    tensor->used = 1;
}

// What is wrong with a tensor that is none of the table's.
static const char *adapter_why_refused(const char *name) {
    if (strstr(name, "lora_magnitude_vector")) return "belongs to DoRA, which is not supported";
    if (strstr(name, ".lora_B.bias")) return "is a bias of B, which is not supported";
    if (strstr(name, "lora_embedding_") || strstr(name, "lm_head."))
        return "belongs to the embedding or the head, whose adapters are not supported";
    if (!strstr(name, ".lora_A.") && !strstr(name, ".lora_B."))
        return "is trained as a whole, which is not supported; plain LoRA is";
    return "belongs to no linear layer of this base; is it an adapter for another one?";
}

// The tensors of one file, held against adapters whose table is built.
static WeightSource *adapter_open_tensors(const char *path, SafeTensors *list, const Lora *lora, const Model *model) {
    WeightSource *source = (WeightSource *)checked_calloc(1, sizeof(*source), "a source of adapters");
    Lora copy = *lora;
    lora_build(&copy, model); // a table of its own
    source->format = "adapters", source->path = checked_strdup(path);
    source->config = model->config, source->model = copy.table;
    source_open_file(source, path);
    source->places = (TensorLocation *)checked_calloc(copy.table.parameter_count, sizeof(TensorLocation),
                                                      "the places of the adapters");
    for (size_t i = 0; i < copy.table.parameter_count; i++) adapter_place_tensor(source, list, i, lora->rank);
    for (size_t i = 0; i < list->count; i++)
        if (!list->tensors[i].used)
            die("%s: tensor %.200s %s", path, list->tensors[i].name, adapter_why_refused(list->tensors[i].name));
    source->dtype = source->model.dtype = source_common_type(source);
    return source;
}

// The header of a file alone, in the order of names.
static SafeTensors adapter_list(const char *path) {
    SafeTensors list = {NULL, 0};
    InputFile file = input_open(path);
    safetensors_read_header(&list, &file, 0);
    safetensors_sort(&list);
    input_close(&file);
    return list;
}

// Opens a folder of PEFT's and checks everything but the values; *lora becomes what it holds, for `model`, and the
// caller frees it.
static WeightSource *adapter_open(const char *folder, const Model *model, Lora *lora, BaseKey *base) {
    char config[PATH_MAX], path[PATH_MAX], other[PATH_MAX];
    path_join(config, folder, ADAPTER_CONFIG_NAME);
    path_join(path, folder, ADAPTER_FILE_NAME);
    path_join(other, folder, "adapter_model.bin");
    if (!path_exists(path))
        die("%s: holds no " ADAPTER_FILE_NAME "%s", folder,
            path_exists(other) ? "; save the adapters as safetensors (adapter_model.bin is not read)" : "");
    memset(lora, 0, sizeof(*lora));
    cJSON *root = adapter_config_read(config, lora);
    SafeTensors list = adapter_list(path);
    lora->modules = adapter_modules(&list, &model->config, path);
    lora_build(lora, model);
    WeightSource *source = adapter_open_tensors(path, &list, lora, model);
    adapter_check_targets(root, lora, &model->config, config);
    *base = adapter_recorded_base(&source->files[0]);
    safetensors_free(&list);
    cJSON_Delete(root);
    return source;
}

#endif
