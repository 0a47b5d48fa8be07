/*
Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. The tensors have the names
and shapes of the table in lora.h, so they are read as a source of weights (weight_source.h), in any supported type.
Other tensors are refused. Over a composite model that transformers loads whole, the names are its modules' names, and
PEFT leaves its other parts out (exclude_modules). Names of the text model alone are read, too.

adapter_config.json adds alpha, dropout, rsLoRA and the modules (adapter_targets.h). We write it so that any version of
PEFT takes it, and read it strictly: an active feature that lora.h lacks is refused by name, since ignoring it would
change the model. The tensors decide which modules have adapters; target_modules must agree.

The metadata of the safetensors file also identifies the base model: two keys, the same for every file format and build.
PEFT records no base. For such files only shapes are checked.
*/
#ifndef LLMC_ADAPTER_FILE_H
#define LLMC_ADAPTER_FILE_H
#include "adapter_targets.h"
#include "safetensors.h"
#include "storage_load.h"

#define ADAPTER_FILE_NAME   "adapter_model.safetensors"
#define ADAPTER_BASE_KEY    "streambp_base" // metadata: the keys' version, then both keys in hexadecimal
#define ADAPTER_BASE_VER    "2 "
#define ADAPTER_CONFIG_NAME "adapter_config.json"
#define ADAPTER_NOT_TEXT    "(?!model\\.language_model\\.|lm_head).*" // modules outside a composite model's text model
#define ADAPTER_CONFIG_TEXT ((size_t)1 << 18)                         // most bytes written
#define ADAPTER_CONFIG_MAX  ((size_t)16 << 20) // most bytes read: PEFT may list every module of every layer

// ---- adapter_config.json: writing -----------------------------------------------------------------------------------
static void adapter_write_copies(JsonOut *json, const Lora *lora) {
    static const ModelTensor tensors[] = {EMBEDDING, LM_HEAD};
    char name[64];
    if (!lora_copied(lora)) {
        json_null(json, "modules_to_save");
        return;
    }
    json_array(json, "modules_to_save");
    for (size_t i = 0; i < 2; i++) {
        if (!lora->saves[tensors[i]]) continue;
        lora_outer_name(lora->table.config.family, tensors[i], name);
        json_text(json, NULL, strrchr(name, '.') ? strrchr(name, '.') + 1 : name);
    }
    json_array_end(json);
}

// Writes adapter_config.json; returns the length. base: --model, or NULL. path: for messages
static size_t adapter_config_text(const Lora *lora, const char *base, char text[ADAPTER_CONFIG_TEXT],
                                  const char *path) {
    JsonOut json = json_open_text(text, ADAPTER_CONFIG_TEXT, JSON_LINE);
    adapter_write_key(&json, "alpha_pattern", lora, ADAPTER_ALPHA);
    json_null(&json, "auto_mapping");
    json_text(&json, "base_model_name_or_path", base);
    json_text(&json, "bias", "none");
    if (lora->modules_prefix) json_text(&json, "exclude_modules", ADAPTER_NOT_TEXT);
    json_bool(&json, "fan_in_fan_out", lora->table.config.family->conv1d);
    json_bool(&json, "inference_mode", 1);
    json_bool(&json, "init_lora_weights", 1);
    json_null(&json, "layers_pattern");
    json_null(&json, "layers_to_transform");
    json_number(&json, "lora_alpha", lora->alpha);
    json_number(&json, "lora_dropout", lora->dropout);
    adapter_write_copies(&json, lora);
    json_text(&json, "peft_type", "LORA");
    json_size(&json, "r", lora->rank);
    adapter_write_key(&json, "rank_pattern", lora, ADAPTER_RANK);
    json_null(&json, "revision");
    adapter_write_key(&json, "target_modules", lora, ADAPTER_PRESENT);
    if (lora->table.config.family->router && !lora->split)
        adapter_write_key(&json, "target_parameters", lora, ADAPTER_PARAMETERS);
    json_text(&json, "task_type", "CAUSAL_LM");
    json_bool(&json, "use_rslora", lora->rslora);
    const size_t length = json_text_end(&json);
    if (!length)
        die("%s: its text does not fit into %zu bytes; give --model a shorter path", path, ADAPTER_CONFIG_TEXT);
    return length;
}

// ---- adapter_config.json: refusals --------------------------------------------------------------------------------
// Tells whether a value is active: not null, false, empty or equivalent to these.
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
    {"bias", "trained biases"},
    {"lora_bias", "biases of B"},
    {"layer_replication", "repeated layers"},
    {"trainable_token_indices", "trained embeddings of single tokens"},
    {"alora_invocation_tokens", "adapters switched on by tokens"},
};

// Keys that do not affect the model, or are read by another function of this file.
static const char adapter_known[] =
    "peft_type|task_type|r|lora_alpha|lora_dropout|use_rslora|target_modules|target_parameters|exclude_modules|"
    "layers_to_transform|modules_to_save|layers_pattern|rank_pattern|alpha_pattern|init_lora_weights|fan_in_fan_out|"
    "inference_mode|"
    "base_model_name_or_path|revision|auto_mapping|peft_version|megatron_core|ensure_weight_tying|loftq_config|eva_"
    "config|corda_config|lora_ga_config|qalora_group_size";

static void adapter_check_key(const cJSON *item, const char *path) {
    const char *key = item->string;
    char value[64];
    if (text_is_one_of(key, adapter_known) || !adapter_in_force(item)) return;
    json_scalar_text(item, value, sizeof(value));
    for (size_t i = 0; i < sizeof(adapter_refused) / sizeof(adapter_refused[0]); i++)
        if (!strcmp(key, adapter_refused[i].key))
            die("%s: %s is %s: %s, which is not supported; train plain LoRA", path, key, value,
                adapter_refused[i].what);
    if (!cJSON_IsNumber(item)) // a number may be the default of a feature that is off; skip it
        die("%s: %.64s is %s, which this program does not know; train plain LoRA, the only supported kind", path, key,
            value);
}

// Refuses initialisations that also change the base weights, so that the adapters fit no published model.
static void adapter_check_initialisation(const cJSON *item, const char *path) {
    char value[64];
    if (!item || cJSON_IsBool(item)) return;
    if (cJSON_IsString(item) && text_is_one_of(item->valuestring, "gaussian|eva|orthogonal")) return;
    die("%s: init_lora_weights is %s, which also changes the base model; save plain LoRA, by PEFT's "
        "path_initial_model_for_weight_conversion",
        path, json_scalar_text(item, value, sizeof(value)));
}

static void adapter_check_word(const cJSON *root, const char *key, const char *wanted, const char *path) {
    const cJSON *item = json_get(root, key);
    char value[64];
    if (item && !json_is(item, wanted))
        die("%s: %s is %s; only %s is supported", path, key, json_scalar_text(item, value, sizeof(value)), wanted);
}

// ---- adapter_config.json: the numbers -----------------------------------------------------------------------------
// Reads a number from `least` to `most`; absent: `otherwise`, or an error if that is NAN.
static double adapter_number(const cJSON *root, const char *key, double otherwise, double least, double most,
                             const char *path) {
    const cJSON *item = json_get(root, key);
    char value[64];
    if (!item && !isnan(otherwise)) return otherwise;
    if (!item) die("%s: has no %s; save the adapter again with PEFT", path, key);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= least && item->valuedouble <= most))
        die("%s: %s is %s; it must be a number from %g to %g", path, key, json_scalar_text(item, value, sizeof(value)),
            least, most);
    return item->valuedouble;
}

// Reads rank, alpha, dropout and rslora into *lora. Returns the parsed file; the caller frees it with cJSON_Delete.
static cJSON *adapter_config_read(const char *path, Lora *lora) {
    cJSON *root = json_read_object(path, ADAPTER_CONFIG_MAX);
    const cJSON *item, *rslora = json_get(root, "use_rslora");
    if (!json_get(root, "peft_type"))
        die("%s: has no peft_type, so PEFT did not write it; save the adapter with PEFT", path);
    adapter_check_word(root, "peft_type", "LORA", path);
    adapter_check_word(root, "task_type", "CAUSAL_LM", path);
    cJSON_ArrayForEach(item, root) adapter_check_key(item, path);
    adapter_check_initialisation(json_get(root, "init_lora_weights"), path);
    double rank = adapter_number(root, "r", NAN, 1, 65536, path);
    if (rank != floor(rank)) die("%s: r is %g; it must be a whole number from 1 to 65536", path, rank);
    if (rslora && !cJSON_IsBool(rslora)) die("%s: use_rslora must be true or false", path);
    lora->rank = (size_t)rank;
    lora->alpha = adapter_number(root, "lora_alpha", NAN, -1e6, 1e6, path);
    lora->dropout = adapter_number(root, "lora_dropout", 0, 0, 0.99, path);
    lora->rslora = rslora && cJSON_IsTrue(rslora);
    return root;
}

// ---- which base -----------------------------------------------------------------------------------------------------
// Checksums that identify a base model. weights: 0 if the file names no base
typedef struct {
    uint64_t config, weights;
} BaseKey;

static BaseKey base_key_of(const Model *model, uint64_t weights) {
    const BaseKey key = {config_checksum(0, model->config), weights ? weights : 1};
    return key;
}

// Returns the key of a model in device memory; collective. Values count as bf16, the least exact type of a base, so
// that the key does not depend on the type.
static BaseKey base_key(const Model *model, Sharding memory, const Ops *ops, const void *device) {
    return base_key_of(model, table_checksum(1, model, memory, ops, device, DTYPE_BF16, "key of the base"));
}

// Returns the key of a model in a source of weights; not collective.
static BaseKey base_key_of_source(const WeightSource *source) {
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

// Returns the base that the file names; weights is 0 if the file names no base.
static BaseKey adapter_recorded_base(const InputFile *file) {
    uint64_t header_bytes;
    cJSON *header = safetensors_parse_header(file, &header_bytes);
    const cJSON *metadata = json_get(header, "__metadata__"), *item = json_get(metadata, ADAPTER_BASE_KEY);
    unsigned long long config = 0, weights = 0;
    if (cJSON_IsString(item) && strlen(item->valuestring) == 33) // an older file: two keys without a version
        die("%s: names its base by keys of version 1, this program reads version " ADAPTER_BASE_VER
            "; remove the entry " ADAPTER_BASE_KEY " from its metadata (saving it with PEFT does), if you know "
            "the base",
            file->path);
    if (item && (!cJSON_IsString(item) ||
                 sscanf(item->valuestring, ADAPTER_BASE_VER "%16llx %16llx", &config, &weights) != 2 || !weights))
        die("%s: its " ADAPTER_BASE_KEY " is damaged; take another copy, or save the adapter again with PEFT",
            file->path);
    const BaseKey key = {config, weights};
    cJSON_Delete(header);
    return key;
}

// Refuses adapters that were trained on another base. path: folder of the adapters; base: name of the given model for
// the message, or NULL
static void adapter_check_base(const char *path, const BaseKey *recorded, const BaseKey *found, const char *base) {
    const int config = recorded->config != found->config; // reported first, because users can look up a configuration
    if (!recorded->weights || (!config && recorded->weights == found->weights)) return;
    die("%s: was trained on another base than %s: its %s differ; give that model%s", path,
        base ? base : "that of --init", config ? "settings" : "weights",
        config ? " with its --rope-scaling and --grow-vocabulary" : ", and --base as in its training");
}

// ---- writing --------------------------------------------------------------------------------------------------------
// Returns the name of a tensor in the file. Over a composite model the name contains the module's name in the composite
// model.
static const char *adapter_name_in_file(const Lora *lora, const char *tensor, char name[256]) {
    static const char begin[] = "base_model.model.";
    const char *own = lora->table.config.family->names.layer_prefix, *rest = tensor + strlen(begin);
    const size_t cut = strcspn(own, ".") + 1; // "model."
    if (!lora->modules_prefix || strncmp(rest, own, cut) != 0) return tensor;
    snprintf(name, 256, "%s%s%s", begin, lora->modules_prefix, rest + cut);
    return name;
}

// Begins the header of adapter_model.safetensors. file, text, room: as in SafetensorsWriter
static void adapter_write_begin(SafetensorsWriter *writer, const OutputFile *file, char *text, size_t room,
                                const BaseKey *base) {
    char keys[64];
    snprintf(keys, sizeof(keys), ADAPTER_BASE_VER "%016llx %016llx", (unsigned long long)base->config,
             (unsigned long long)base->weights);
    safetensors_write_begin(writer, file, text, room, base->weights ? ADAPTER_BASE_KEY : NULL, keys);
}

// Writes the header of adapter_model.safetensors; data follow in the table's order. Returns the length of the header.
static size_t adapter_header(const Lora *lora, DType type, const BaseKey *base, char *text, size_t room) {
    const Model *table = &lora->table;
    char name[256];
    SafetensorsWriter writer;
    adapter_write_begin(&writer, NULL, text, room, base);
    for (const Parameter *p = table->parameters; p < table->parameters + table->parameter_count; p++)
        safetensors_write_named(&writer, adapter_name_in_file(lora, p->name, name), p, type);
    return (size_t)safetensors_write_end(&writer);
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Returns the tensor of a layer that a parameter of adapters belongs to.
static LayerTensor adapter_tensor_of(const Lora *lora, const Parameter *p) {
    const size_t l = group_of(&lora->table, p->offset);
    if (l >= GROUP_EMBEDDING) return LAYER_TENSORS;
    return (LayerTensor)(lora_part_of(lora, p) - lora_part(lora, l, 0));
}

// Reads A or B of the stacked experts from one tensor per expert: A [E,r,in] or B [E,out,r], experts in order.
static void adapter_take_pieces(WeightSource *source, size_t parameter, const SafeTensors *list, const Lora *lora,
                                const char *asks) {
    Parameter *p = &source->model.parameters[parameter];
    const size_t layer = group_of(&lora->table, p->offset), E = lora->table.config.num_experts;
    const size_t rank = lora_part_of(lora, p)->rank;
    const int down = adapter_tensor_of(lora, p) == EXPERTS_DOWN, of_b = p->file_rows != 0;
    const int gated = expert_parts(lora->table.config.family) == 2, two = of_b && !down && gated;
    const size_t count = two ? 2 * E : E, each = parameter_elements(p) / count;
    const uint64_t wanted[2] = {of_b ? each / rank : rank, of_b ? rank : each / rank};
    char name[160], whole[256];
    TensorPieces *pieces = source_set_pieces(source, parameter, count);
    pieces->run = two && lora_rows_alternate(lora->table.config.family) ? rank : 0;
    for (size_t i = 0; i < count; i++) {
        const size_t part = down ? 2 : two ? i % 2 : 0;
        lora_expert_name(lora->table.config.family, layer, two ? i / 2 : i, part, name);
        snprintf(whole, sizeof(whole), "base_model.model.%s.lora_%c.weight", name, of_b ? 'B' : 'A');
        SafeTensor *tensor = safetensors_find(list, whole);
        if (!tensor)
            die("%s: tensor %s is missing, but every expert of an adapter needs A and B; save the adapter again with "
                "PEFT",
                source->path, whole);
        const TensorLocation place =
            source_take_shape(source, tensor, wanted, 2, asks, "; give the base that the adapter was trained on");
        if (!i) source->places[parameter] = place;
        if (place.type != source->places[parameter].type)
            die("%s: tensor %s is in %s, but tensors of other experts are in %s; save all experts in one type",
                source->path, whole, dtype_name(place.type), dtype_name(source->places[parameter].type));
        pieces->place[i] = place;
        if (of_b || down || !gated) continue;
        lora_expert_name(lora->table.config.family, layer, i, 1, name);
        snprintf(whole, sizeof(whole), "base_model.model.%s.lora_A.weight", name);
        SafeTensor *up = safetensors_find(list, whole);
        if (!up || !hf_same_bytes(source, tensor, up)) // gate and up are one matrix here, with one A
            die("%s: tensor %s differs from the up projection's; gate and up of experts must share one A; save the "
                "adapter with PEFT 0.21",
                source->path, tensor->name);
        up->used = 1;
    }
    p->transposed = 0;
}

// Renames a router as files with fused experts call it, if files with a tensor per expert call it differently.
static void adapter_rename_router(const SafeTensors *list, const Family *family) {
    char from[64], to[64];
    if (!family->names.router) return;
    snprintf(from, sizeof(from), ".%.*s.lora_", (int)lora_name_length(family->names.router), family->names.router);
    snprintf(to, sizeof(to), ".%.*s.lora_", (int)lora_name_length(family->names.layer.ROUTER_WEIGHT),
             family->names.layer.ROUTER_WEIGHT);
    for (SafeTensor *t = list->tensors; t < list->tensors + list->count; t++) {
        char *at = strstr(t->name, from);
        if (!at) continue;
        memmove(at + strlen(to), at + strlen(from), strlen(at + strlen(from)) + 1);
        memcpy(at, to, strlen(to));
    }
}

// Lists a file's tensors as lora_A.NAME.weight and lora_embedding_A.NAME. Leaves out the adapter's name, which all
// tensors share.
static void adapter_read_header(SafeTensors *list, const InputFile *file) {
    char name[64], first[64];
    size_t count = 0;
    safetensors_read_header(list, file, 0);
    for (const SafeTensor *t = list->tensors; t < list->tensors + list->count; t++) {
        char *at = strstr(t->name, ".lora_");
        if (!at) continue;
        at += 1 + strcspn(at + 1, ".");
        const size_t n = !*at || !strncmp(at, ".weight", 7) || !strncmp(at, ".bias", 5) ? 0 : 1 + strcspn(at + 1, ".");
        snprintf(name, sizeof(name), "%.*s", (int)n, at);
        if (!count++) memcpy(first, name, sizeof(first));
        if (strcmp(name, first) != 0)
            die("%s: tensor %.200s is of a second adapter; save each adapter alone, by selected_adapters of "
                "save_pretrained",
                file->path, t->name);
        memmove(at, at + n, strlen(at + n) + 1);
    }
}

// Renames tensors of a composite model: gives them their names in the text model alone. Returns how many tensors it
// renamed.
static size_t adapter_rename_text(const SafeTensors *list, const Family *family) {
    const HfComposite *composite = hf_composite_of(family);
    size_t renamed = 0;
    char whole[128];
    snprintf(whole, sizeof(whole), "base_model.model.%s", composite ? composite->modules : "");
    for (SafeTensor *t = list->tensors; composite && t < list->tensors + list->count; t++) {
        if (strncmp(t->name, whole, strlen(whole)) != 0) continue;
        char *rest = t->name + strlen("base_model.model.");
        const size_t own = strcspn(family->names.layer_prefix, ".") + 1, cut = strlen(composite->modules);
        memcpy(rest, family->names.layer_prefix, own);
        memmove(rest + own, rest + cut, strlen(rest + cut) + 1);
        renamed++;
    }
    return renamed;
}

// Returns why a tensor that is not in the table is refused.
static const char *adapter_why_refused(const Family *family, const char *name) {
    const char *projection = family->names.layer.INPUT_PROJECTION;
    char joint[64];
    snprintf(joint, sizeof(joint), ".%s", projection ? projection : "");
    joint[lora_name_length(joint)] = 0;
    if (projection && strstr(name, joint))
        return "adapts one matrix for all layers, which is not supported; train with PEFT's exclude_modules=["
               "'per_layer_model_projection'], or merge it into the model (merge_and_unload)";
    if (strstr(name, "lora_magnitude_vector")) return "belongs to DoRA, which is not supported; train plain LoRA";
    if (strstr(name, ".lora_B.bias"))
        return "is a bias of B, which is not supported; train with PEFT's lora_bias=False";
    if (!strstr(name, ".lora_A.") && !strstr(name, ".lora_B."))
        return "is a fully trained weight; only embed_tokens and lm_head are supported, in modules_to_save";
    return "belongs to no linear layer of this base; give the base that the adapter was trained on";
}

// Opens the tensors of one file and checks them against *lora. Builds *lora from `root` (adapter_config.json); root
// NULL: *lora is already built. The caller frees *lora.
static WeightSource *adapter_open_tensors(const char *path, Lora *lora, const Model *model, const cJSON *root,
                                          const char *config) {
    const Family *family = model->config.family;
    WeightSource *source = source_new(path, "adapters");
    SafeTensors list = {NULL, 0};
    char prefix[128];
    source_open_file(source, path);
    adapter_read_header(&list, &source->files[0]);
    snprintf(prefix, sizeof(prefix), "%s", family->names.layer_prefix);
    if (adapter_rename_text(&list, family))
        snprintf(prefix, sizeof(prefix), "%s%s", hf_composite_of(family)->modules,
                 family->names.layer_prefix + strcspn(family->names.layer_prefix, ".") + 1);
    adapter_rename_router(&list, family);
    safetensors_sort(&list);
    const int split = adapter_is_split(&list);
    const AdapterTargets targets = {root, config, EXIT_RUNTIME, prefix};
    if (root) {
        adapter_choose_copies(&targets, lora, &model->config);
        if (!adapter_choose(&targets, lora, &model->config, &list))
            die("%s: holds no adapters for the linear layers of a %s model; it has %s; give the base that it was "
                "trained on",
                path, family->name, safetensors_unused(&list));
        lora_build(lora, model);
    }
    source->config = model->config, source->transposed = 1; // the embedding's A and the experts' B are transposed
    source_set_table(source, model_copy(&lora->table));
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const Parameter *p = &source->model.parameters[i];
        SafeTensor *tensor = safetensors_find(&list, p->name);
        char asks[64];
        const LoraPart *part = lora_part_of(lora, p);
        if (split && lora_is_stack(adapter_tensor_of(lora, p))) {
            snprintf(asks, sizeof(asks), "rank %zu and this base ask", part->rank);
            adapter_take_pieces(source, i, &list, lora, asks);
            continue;
        }
        if (!tensor)
            die("%s: tensor %s is missing; %s", path, p->name,
                part ? "an adapter needs both A and B; save it again with PEFT"
                     : "modules_to_save names its module; save the adapter again with PEFT");
        snprintf(asks, sizeof(asks), part ? "rank %zu and this base ask" : "this base asks", part ? part->rank : 0);
        source_take_tensor(
            source, i, tensor, asks,
            part && group_of(&lora->table, p->offset) < GROUP_EMBEDDING
                ? "; give the base that the adapter was trained on"
                : "; give the base that the adapter was trained on, or the --grow-vocabulary of its training");
    }
    for (size_t i = 0; i < list.count; i++)
        if (lora_has_outer(lora) && text_ends_with(list.tensors[i].name, ".base_layer.weight"))
            snprintf(source->remark, sizeof(source->remark), "%.200s",
                     list.tensors[i].name); // PEFT saves the base weight next to a trained copy
        else if (!list.tensors[i].used)
            die("%s: tensor %.200s %s", path, list.tensors[i].name, adapter_why_refused(family, list.tensors[i].name));
    safetensors_free(&list);
    source_finish(source);
    return source;
}

// Opens a PEFT folder, checks everything except the values, and builds *lora; the caller frees it.
static WeightSource *adapter_open(const char *folder, const Model *model, Lora *lora, BaseKey *base) {
    char config[PATH_MAX], path[PATH_MAX];
    path_join(config, folder, ADAPTER_CONFIG_NAME);
    if (!path_found(path, folder, ADAPTER_FILE_NAME)) {
        const char *found = folder_matches(folder, "*{adapter,lora}*.{bin,gguf,pt,safetensors}");
        die("%s: holds no " ADAPTER_FILE_NAME "%s%s%s", folder, *found ? "; it holds " : "", found,
            *found ? ", which is not read; save the adapters by PEFT's save_pretrained"
                   : "; save the adapters by PEFT's save_pretrained");
    }
    memset(lora, 0, sizeof(*lora));
    cJSON *root = adapter_config_read(config, lora);
    WeightSource *source = adapter_open_tensors(path, lora, model, root, config);
    *base = adapter_recorded_base(&source->files[0]);
    cJSON_Delete(root);
    return source;
}

#endif
