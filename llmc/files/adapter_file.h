/*
Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. The tensors have the names
and shapes of the table in lora.h, so reading them is reading a source of weights (weight_source.h), in any of the types
we read. Every layer of a kind must have the same modules, and there must be nothing else. Adapters that were trained in
a composite model have its names, which are read, too.

adapter_config.json says what tensors do not: alpha, dropout, rsLoRA, and the linear layers they belong to. It is
written so that any version of PEFT takes it, and read strictly: what is in force there and is not the LoRA of lora.h is
refused by its name, since leaving it out would make another model. The tensors decide which modules there are; the list
must agree.

The metadata of the safetensors file also says which base model the adapters are for: two keys that are the same for
every file format and every build of one model. PEFT records none; then shapes have to do.
*/
#ifndef LLMC_ADAPTER_FILE_H
#define LLMC_ADAPTER_FILE_H
#include "llmc/base/json.h"
#include "llmc/model/lora.h"
#include "safetensors.h"
#include "storage_load.h"

#define ADAPTER_FILE_NAME   "adapter_model.safetensors"
#define ADAPTER_BASE_KEY    "streambp_base" // in the metadata: the version of keys, then both in hexadecimal
#define ADAPTER_BASE_VER    "2 "
#define ADAPTER_CONFIG_NAME "adapter_config.json"
#define ADAPTER_CONFIG_TEXT 65536              // bytes that are written, at most
#define ADAPTER_CONFIG_MAX  ((size_t)16 << 20) // and read: PEFT may list every module of every layer

// ---- adapter_config.json: writing -----------------------------------------------------------------------------------
// The shortest end of a module's name that no other module ends in: "q_proj", but GPT-2's "attn.c_proj".
static void adapter_short_name(const Family *family, size_t module, char name[64]) {
    char whole[64];
    int named = 2; // modules
    snprintf(whole, sizeof(whole), "%s", lora_module(family, module));
    for (size_t begin = strlen(whole); named > 1 && begin > 0;) {
        const char *other;
        while (begin && whole[--begin] != '.') continue;
        snprintf(name, 64, "%s", whole + begin + (whole[begin] == '.'));
        named = 0;
        for (size_t i = 0; (other = lora_module(family, i)) != NULL; i++)
            named += lora_names_module(other, name, strlen(name));
    }
}

static void adapter_write_targets(JsonOut *json, const Lora *lora) {
    const Family *family = lora->table.config.family;
    char names[LORA_TENSORS][64];
    size_t count = 0;
    for (size_t i = 0; lora_module(family, i); i++)
        if (lora->modules >> i & 1) adapter_short_name(family, i, names[count++]);
    qsort(names, count, sizeof(names[0]), compare_texts);
    json_array(json, "target_modules");
    for (size_t i = 0; i < count; i++) json_text(json, NULL, names[i]);
    json_array_end(json);
}

// base: --model, or NULL. Returns the length. path: for messages
static size_t adapter_config_text(const Lora *lora, const char *base, char text[ADAPTER_CONFIG_TEXT],
                                  const char *path) {
    JsonOut json = json_open_text(text, ADAPTER_CONFIG_TEXT, JSON_LINE);
    json_object(&json, NULL);
    json_word(&json, "alpha_pattern", "{}");
    json_null(&json, "auto_mapping");
    json_text(&json, "base_model_name_or_path", base);
    json_text(&json, "bias", "none");
    json_bool(&json, "fan_in_fan_out", lora->table.config.family->conv1d);
    json_bool(&json, "inference_mode", 1);
    json_bool(&json, "init_lora_weights", 1);
    json_null(&json, "layers_pattern");
    json_null(&json, "layers_to_transform");
    json_number(&json, "lora_alpha", lora->alpha);
    json_number(&json, "lora_dropout", lora->dropout);
    json_null(&json, "modules_to_save");
    json_text(&json, "peft_type", "LORA");
    json_size(&json, "r", lora->rank);
    json_word(&json, "rank_pattern", "{}");
    json_null(&json, "revision");
    adapter_write_targets(&json, lora);
    json_text(&json, "task_type", "CAUSAL_LM");
    json_bool(&json, "use_rslora", lora->rslora);
    json_object_end(&json);
    const size_t length = json_text_end(&json);
    if (!length) die("%s: does not fit into %d bytes; give --model a shorter path", path, ADAPTER_CONFIG_TEXT);
    return length;
}

// ---- adapter_config.json: what is refused -------------------------------------------------------------------------
// The value says more than "no".
static int adapter_in_force(const cJSON *item) {
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item)) return 0;
    if (cJSON_IsArray(item) || cJSON_IsObject(item)) return item->child != NULL;
    return !cJSON_IsString(item) || (*item->valuestring && strcmp(item->valuestring, "none") != 0);
}

// Features of PEFT that lora.h lacks.
static const struct {
    const char *key, *what;
} adapter_refused[] = {
    {"use_dora", "DoRA"},
    {"bias", "biases that are trained"},
    {"lora_bias", "biases of B"},
    {"modules_to_save", "modules that are trained as a whole"},
    {"rank_pattern", "another rank in some modules"},
    {"alpha_pattern", "another alpha in some modules"},
    {"layers_to_transform", "adapters in some layers only"},
    {"layer_replication", "layers that are repeated"},
    {"target_parameters", "adapters of single parameters"},
    {"trainable_token_indices", "embeddings that are trained"},
    {"alora_invocation_tokens", "adapters that tokens switch on"},
};

// Keys that say nothing about the model, or are looked at elsewhere here.
static const char adapter_known[] =
    "peft_type|task_type|r|lora_alpha|lora_dropout|use_rslora|target_modules|exclude_modules|init_lora_weights|"
    "fan_in_fan_out|inference_mode|base_model_name_or_path|revision|auto_mapping|layers_pattern|peft_version|"
    "megatron_core|ensure_weight_tying|loftq_config|eva_config|corda_config|lora_ga_config|qalora_group_size";

static void adapter_check_key(const cJSON *item, const char *path) {
    const char *key = item->string;
    char value[64];
    if (text_is_one_of(key, adapter_known) || !adapter_in_force(item)) return;
    json_scalar_text(item, value, sizeof(value));
    for (size_t i = 0; i < sizeof(adapter_refused) / sizeof(adapter_refused[0]); i++)
        if (!strcmp(key, adapter_refused[i].key))
            die("%s: %s is %s: %s, which is not supported; plain LoRA is", path, key, value, adapter_refused[i].what);
    if (!cJSON_IsNumber(item)) // a number may be the default of something that is off
        die("%s: %.64s is %s, which this program does not know and may not leave out; plain LoRA is supported", path,
            key, value);
}

// Some initialisations also change the weights below, so that the adapters belong to no model that was published.
static void adapter_check_initialisation(const cJSON *item, const char *path) {
    char value[64];
    if (!item || cJSON_IsBool(item)) return;
    if (cJSON_IsString(item) && text_is_one_of(item->valuestring, "gaussian|eva|orthogonal")) return;
    die("%s: init_lora_weights is %s, which has changed the base model as well; save plain LoRA, by PEFT's "
        "path_initial_model_for_weight_conversion",
        path, json_scalar_text(item, value, sizeof(value)));
}

static void adapter_check_word(const cJSON *root, const char *key, const char *wanted, const char *path) {
    const cJSON *item = json_get(root, key);
    char value[64];
    if (item && (!cJSON_IsString(item) || strcmp(item->valuestring, wanted) != 0))
        die("%s: %s is %s, only %s is supported", path, key, json_scalar_text(item, value, sizeof(value)), wanted);
}

// ---- adapter_config.json: the numbers -----------------------------------------------------------------------------
// A number from `least` to `most`; its default where that is not NAN.
static double adapter_number(const cJSON *root, const char *key, double otherwise, double least, double most,
                             const char *path) {
    const cJSON *item = json_get(root, key);
    char value[64];
    if (!item && !isnan(otherwise)) return otherwise;
    if (!item) die("%s: has no %s", path, key);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= least && item->valuedouble <= most))
        die("%s: %s is %s, a number from %g to %g was expected", path, key,
            json_scalar_text(item, value, sizeof(value)), least, most);
    return item->valuedouble;
}

// Fills rank, alpha, dropout and rslora of *lora. The caller frees the tree with cJSON_Delete.
static cJSON *adapter_config_read(const char *path, Lora *lora) {
    cJSON *root = json_read_object(path, ADAPTER_CONFIG_MAX);
    const cJSON *item, *rslora = json_get(root, "use_rslora");
    if (!json_get(root, "peft_type")) die("%s: has no peft_type, so it is none of PEFT's", path);
    adapter_check_word(root, "peft_type", "LORA", path);
    adapter_check_word(root, "task_type", "CAUSAL_LM", path);
    cJSON_ArrayForEach(item, root) adapter_check_key(item, path);
    adapter_check_initialisation(json_get(root, "init_lora_weights"), path);
    double rank = adapter_number(root, "r", NAN, 1, 65536, path);
    if (rank != floor(rank)) die("%s: r is %g, a whole number was expected", path, rank);
    if (rslora && !cJSON_IsBool(rslora)) die("%s: use_rslora is neither true nor false", path);
    lora->rank = (size_t)rank;
    lora->alpha = adapter_number(root, "lora_alpha", NAN, -1e6, 1e6, path);
    lora->dropout = adapter_number(root, "lora_dropout", 0, 0, 0.99, path);
    lora->rslora = rslora && cJSON_IsTrue(rslora);
    return root;
}

// ---- adapter_config.json: the modules -----------------------------------------------------------------------------
// target_modules means the module of this name ("model.layers.0.self_attn.q_proj"), by PEFT's rule.
static int adapter_targets(const cJSON *targets, const char *name, const char *path) {
    const cJSON *item;
    if (cJSON_IsString(targets)) return 1; // all-linear
    cJSON_ArrayForEach(item, targets) {
        if (!cJSON_IsString(item)) die("%s: target_modules has something that is no name", path);
        if (lora_names_module(name, item->valuestring, strlen(item->valuestring))) return 1;
    }
    return 0;
}

// The tensors have decided about lora->modules: a list of names must agree. A regular expression is not checked.
static void adapter_check_targets(const cJSON *root, const Lora *lora, const Config *c, const char *path) {
    const cJSON *targets = json_get(root, "target_modules");
    const char *module;
    char layer_name[64], name[160];
    if (!targets || adapter_in_force(json_get(root, "exclude_modules"))) return;
    if (cJSON_IsString(targets) && strcmp(targets->valuestring, "all-linear") != 0) return;
    if (!cJSON_IsString(targets) && !cJSON_IsArray(targets))
        die("%s: target_modules is neither a list of names nor text", path);
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++) {
        snprintf(layer_name, sizeof(layer_name), c->family->layer_prefix, layer);
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++) {
            int is_there = (int)(lora->modules >> i & 1);
            if (!lora_layer_has(c, layer, i)) continue;
            snprintf(name, sizeof(name), "%s%s", layer_name, module);
            if (adapter_targets(targets, name, path) == is_there) continue;
            if (is_there) die("%s: there are tensors of %s, which target_modules does not name", path, name);
            die("%s: target_modules names %s, of which there are no tensors", path, name);
        }
    }
}

// ---- which base -----------------------------------------------------------------------------------------------------
// weights 0: not known
typedef struct {
    uint64_t config, weights;
} BaseKey;

static BaseKey base_key_of(const Model *model, uint64_t weights) {
    char config[4096];
    config_to_text(&model->config, config, sizeof(config));
    const BaseKey key = {checksum_of(0, config, strlen(config)), weights ? weights : 1};
    return key;
}

// The key of a model in device memory, by all ranks together. All values count as bf16, the least exact of the types
// that a base is run in, so that it does not matter which one it was.
static BaseKey base_key(const Model *model, Sharding memory, const Ops *ops, const void *device) {
    return base_key_of(model, table_checksum(1, model, memory, ops, device, DTYPE_BF16, "key of the base"));
}

// The same of one in a source of weights, by this process alone.
static BaseKey base_key_of_source(WeightSource *source) {
    const Model *model = &source->model;
    if (source->quant) return base_key_of(model, storage_key_of_source(source));
    Checksum sum = {{0, 0}};
    const size_t size = dtype_size(DTYPE_BF16);
    for (Slabs s = slabs_of_all(model, "key of the base"); slabs_next(&s);) {
        weights_read(source, s.parameter, s.begin, s.count, DTYPE_BF16, staged.bytes);
        checksum_add(&sum, (uint64_t)s.first * size, staged.bytes, s.count * size);
    }
    return base_key_of(model, checksum_value(1, &sum, (uint64_t)model->elements * size));
}

// The base that the file names; weights 0 where it names none.
static BaseKey adapter_recorded_base(const InputFile *file) {
    uint64_t header_bytes;
    cJSON *header = safetensors_parse_header(file, &header_bytes);
    const cJSON *metadata = json_get(header, "__metadata__"), *item = json_get(metadata, ADAPTER_BASE_KEY);
    unsigned long long config = 0, weights = 0;
    if (cJSON_IsString(item) && strlen(item->valuestring) == 33) // two keys and no version
        die("%s: says by keys of version 1 which base it is for, this program knows version " ADAPTER_BASE_VER
            "alone; take the entry " ADAPTER_BASE_KEY " out of its metadata (saving it with PEFT does), if you know "
            "the base",
            file->path);
    if (item && (!cJSON_IsString(item) ||
                 sscanf(item->valuestring, ADAPTER_BASE_VER "%16llx %16llx", &config, &weights) != 2 || !weights))
        die("%s: its " ADAPTER_BASE_KEY " is damaged", file->path);
    const BaseKey key = {config, weights};
    cJSON_Delete(header);
    return key;
}

// path: of the adapters; base: for people, the model at hand, or NULL
static void adapter_check_base(const char *path, const BaseKey *recorded, const BaseKey *found, const char *base) {
    const int config = recorded->config != found->config; // told first: it is what people can look up
    if (!recorded->weights || (!config && recorded->weights == found->weights)) return;
    die("%s: is an adapter for another base than %s: its %s are other ones; give that model%s", path,
        base ? base : "that of --init", config ? "settings" : "weights",
        config ? " and its --rope-scaling" : ", and --base as in its training");
}

// ---- writing --------------------------------------------------------------------------------------------------------
// The bytes of adapter_model.safetensors before the data, which follow in the order of the table; returns their number.
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
    char layer_name[64], name[200];
    const char *module;
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++) {
        snprintf(layer_name, sizeof(layer_name), c->family->layer_prefix, layer);
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++)
            for (int which = 'A'; which <= 'B'; which++) {
                snprintf(name, sizeof(name), "base_model.model.%s%s.lora_%c.weight", layer_name, module, which);
                if (safetensors_find(list, name)) modules |= 1u << i;
            }
    }
    if (!modules)
        die("%s: holds no adapters for the linear layers of a %s model; is it for another base?", path,
            c->family->name);
    return modules;
}

// Names of the composite model's text model become those of the text model alone.
static void adapter_rename_text(const SafeTensors *list, const Family *family) {
    const HfComposite *composite = hf_composite_of(family);
    char whole[128];
    snprintf(whole, sizeof(whole), "base_model.model.%s", composite ? composite->modules : "");
    for (SafeTensor *t = list->tensors; composite && t < list->tensors + list->count; t++) {
        if (strncmp(t->name, whole, strlen(whole)) != 0) continue;
        char *rest = t->name + strlen("base_model.model.");
        const size_t own = strcspn(family->layer_prefix, ".") + 1, cut = strlen(composite->modules);
        memcpy(rest, family->layer_prefix, own);
        memmove(rest + own, rest + cut, strlen(rest + cut) + 1);
    }
}

// The reason to refuse a tensor that is none of the table's.
static const char *adapter_why_refused(const char *name) {
    if (strstr(name, "lora_magnitude_vector")) return "belongs to DoRA, which is not supported";
    if (strstr(name, ".lora_B.bias")) return "is a bias of B, which is not supported";
    if (strstr(name, "lora_embedding_") || strstr(name, "lm_head."))
        return "belongs to the embedding or the head, whose adapters are not supported";
    if (!strstr(name, ".lora_A.") && !strstr(name, ".lora_B."))
        return "is trained as a whole, which is not supported; plain LoRA is";
    return "belongs to no linear layer of this base; is it an adapter for another one?";
}

// The tensors of one file, held against *lora; modules 0: those of the file. lora->table becomes that of the source.
static WeightSource *adapter_open_tensors(const char *path, Lora *lora, const Model *model) {
    WeightSource *source = source_new(path, "adapters");
    SafeTensors list = {NULL, 0};
    char asks[64];
    source_open_file(source, path);
    safetensors_read_header(&list, &source->files[0], 0);
    adapter_rename_text(&list, model->config.family);
    safetensors_sort(&list);
    if (!lora->modules) lora->modules = adapter_modules(&list, &model->config, path);
    lora_build(lora, model);
    source->config = model->config;
    source_set_table(source, lora->table);
    snprintf(asks, sizeof(asks), "rank %zu and this base ask", lora->rank);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const char *name = source->model.parameters[i].name;
        SafeTensor *tensor = safetensors_find(&list, name);
        if (!tensor)
            die("%s: tensor %s is missing; every layer must have the same adapters, each with A and B", path, name);
        source_take_tensor(source, i, tensor, asks, "; is it an adapter for another base?");
    }
    for (size_t i = 0; i < list.count; i++)
        if (!list.tensors[i].used)
            die("%s: tensor %.200s %s", path, list.tensors[i].name, adapter_why_refused(list.tensors[i].name));
    safetensors_free(&list);
    source_finish(source);
    return source;
}

// Opens a folder of PEFT's and checks everything but the values. *lora becomes what it holds; the caller frees it.
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
    WeightSource *source = adapter_open_tensors(path, lora, model);
    lora_build(lora, model); // a table of its own
    adapter_check_targets(root, lora, &model->config, config);
    *base = adapter_recorded_base(&source->files[0]);
    cJSON_Delete(root);
    return source;
}

#endif
