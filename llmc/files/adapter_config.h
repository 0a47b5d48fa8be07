/*
adapter_config.json, which says of adapters in PEFT's format what their tensors (adapter_file.h) do not: alpha, dropout,
rsLoRA, and to which linear layers they belong. Written so that any version of PEFT takes it; read strictly: what is in
force there and is not the LoRA of lora.h is refused by its name, since leaving it out would make another model. Which
modules there are is up to the tensors; the list of names here must agree with them.
*/
#ifndef LLMC_ADAPTER_CONFIG_H
#define LLMC_ADAPTER_CONFIG_H
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/model/lora.h"

#define ADAPTER_CONFIG_NAME "adapter_config.json"
#define ADAPTER_CONFIG_TEXT 65536              // bytes that are written, at most
#define ADAPTER_CONFIG_MAX  ((size_t)16 << 20) // and read: PEFT may list every module of every layer

// ---- writing --------------------------------------------------------------------------------------------------------
// The shortest end of a module's name that no other module ends in: "q_proj", but "attn.c_proj" of GPT-2, which has two
// c_proj.
static void adapter_short_name(const Family *family, size_t module, char name[64]) {
    char whole[64];
    size_t i;
    int others;
    snprintf(whole, sizeof(whole), "%s", lora_module(family, module));
    size_t begin = strlen(whole);
    do {
        const char *other;
        while (begin && whole[--begin] != '.') continue;
        snprintf(name, 64, "%s", whole + begin + (whole[begin] == '.'));
        for (others = 0, i = 0; (other = lora_module(family, i)) != NULL; i++)
            others += i != module && lora_names_module(other, name, strlen(name));
    } while (others && begin);
}

static int adapter_compare_names(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

static void adapter_write_targets(JsonOut *json, const Lora *lora) {
    const Family *family = lora->table.config.family;
    char names[LORA_TENSORS][64];
    size_t count = 0;
    for (size_t i = 0; lora_module(family, i); i++)
        if (lora->modules >> i & 1) adapter_short_name(family, i, names[count++]);
    qsort(names, count, sizeof(names[0]), adapter_compare_names);
    json_array(json, "target_modules");
    for (size_t i = 0; i < count; i++) json_text(json, NULL, names[i]);
    json_array_end(json);
}

// base: --model, or NULL. Returns the length. path: for messages
static size_t adapter_config_text(const Lora *lora, const char *base, char text[ADAPTER_CONFIG_TEXT],
                                  const char *path) {
    JsonOut json = json_open_text(text, ADAPTER_CONFIG_TEXT, JSON_LINE);
    json_object(&json, NULL);
    json_object(&json, "alpha_pattern"), json_object_end(&json);
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
    json_object(&json, "rank_pattern"), json_object_end(&json);
    json_null(&json, "revision");
    adapter_write_targets(&json, lora);
    json_text(&json, "task_type", "CAUSAL_LM");
    json_bool(&json, "use_rslora", lora->rslora);
    json_object_end(&json);
    const size_t length = json_text_end(&json);
    if (!length) die("%s: does not fit into %d bytes; give --model a shorter path", path, ADAPTER_CONFIG_TEXT);
    return length;
}

// ---- reading: what is refused ---------------------------------------------------------------------------------------
// Whether a value says more than "no".
static int adapter_in_force(const cJSON *item) {
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item)) return 0;
    if (cJSON_IsArray(item) || cJSON_IsObject(item)) return item->child != NULL;
    return !cJSON_IsString(item) || (*item->valuestring && strcmp(item->valuestring, "none") != 0);
}

// What PEFT can do beyond lora.h.
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
static const char *const adapter_known[] = {
    "peft_type",      "task_type",         "r",
    "lora_alpha",     "lora_dropout",      "use_rslora",
    "target_modules", "exclude_modules",   "init_lora_weights",
    "fan_in_fan_out", "inference_mode",    "base_model_name_or_path",
    "revision",       "auto_mapping",      "layers_pattern",
    "peft_version",   "megatron_core",     "ensure_weight_tying",
    "loftq_config",   "eva_config",        "corda_config",
    "lora_ga_config", "qalora_group_size",
};

static void adapter_check_key(const cJSON *item, const char *path) {
    const char *key = item->string;
    char value[64];
    for (size_t i = 0; i < sizeof(adapter_known) / sizeof(adapter_known[0]); i++)
        if (!strcmp(key, adapter_known[i])) return;
    if (!adapter_in_force(item)) return;
    json_scalar_text(item, value, sizeof(value));
    for (size_t i = 0; i < sizeof(adapter_refused) / sizeof(adapter_refused[0]); i++)
        if (!strcmp(key, adapter_refused[i].key))
            die("%s: %s is %s: %s, which is not supported; plain LoRA is", path, key, value, adapter_refused[i].what);
    if (!cJSON_IsNumber(item)) // a number may be the default of something that is off
        die("%s: %s is %s, which this program does not know and may not leave out; plain LoRA is supported", path, key,
            value);
}

// Some initialisations also change the weights below, so that the adapters belong to no model that was published.
static void adapter_check_initialisation(const cJSON *item, const char *path) {
    static const char *const harmless[] = {"gaussian", "eva", "orthogonal"};
    char value[64];
    if (!item || cJSON_IsBool(item)) return;
    for (size_t i = 0; i < sizeof(harmless) / sizeof(harmless[0]); i++)
        if (cJSON_IsString(item) && !strcmp(item->valuestring, harmless[i])) return;
    die("%s: init_lora_weights is %s, which has changed the base model as well; convert the adapters to plain LoRA "
        "when saving them (PEFT's path_initial_model_for_weight_conversion)",
        path, json_scalar_text(item, value, sizeof(value)));
}

static void adapter_check_word(const cJSON *root, const char *key, const char *wanted, const char *path) {
    const cJSON *item = json_get(root, key);
    char value[64];
    if (item && (!cJSON_IsString(item) || strcmp(item->valuestring, wanted) != 0))
        die("%s: %s is %s, only %s is supported", path, key, json_scalar_text(item, value, sizeof(value)), wanted);
}

// ---- reading: the numbers -------------------------------------------------------------------------------------------
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
    size_t length;
    char *text = input_read_text(path, ADAPTER_CONFIG_MAX, &length);
    cJSON *root = json_parse_object(text, length, path);
    const cJSON *item, *rslora = json_get(root, "use_rslora");
    free(text);
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

// ---- reading: the modules -------------------------------------------------------------------------------------------
// Whether target_modules means the module of this name ("model.layers.0.self_attn.q_proj"), by PEFT's rule.
static int adapter_targets(const cJSON *targets, const char *name, const char *path) {
    const cJSON *item;
    if (cJSON_IsString(targets)) return 1; // all-linear
    cJSON_ArrayForEach(item, targets) {
        if (!cJSON_IsString(item)) die("%s: target_modules has something that is no name", path);
        if (lora_names_module(name, item->valuestring, strlen(item->valuestring))) return 1;
    }
    return 0;
}

// The tensors have decided about lora->modules: a list of names must say the same. A regular expression is not looked
// at.
static void adapter_check_targets(const cJSON *root, const Lora *lora, const Config *c, const char *path) {
    const cJSON *targets = json_get(root, "target_modules");
    const char *module;
    char name[160];
    if (!targets || adapter_in_force(json_get(root, "exclude_modules"))) return;
    if (cJSON_IsString(targets) && strcmp(targets->valuestring, "all-linear") != 0) return;
    if (!cJSON_IsString(targets) && !cJSON_IsArray(targets))
        die("%s: target_modules is neither a list of names nor text", path);
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++) {
        const int prefix = snprintf(name, sizeof(name), c->family->layer_prefix, layer);
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++) {
            int is_there = (int)(lora->modules >> i & 1);
            snprintf(name + prefix, sizeof(name) - (size_t)prefix, "%s", module);
            if (adapter_targets(targets, name, path) == is_there) continue;
            if (is_there) die("%s: there are tensors of %s, which target_modules does not name", path, name);
            die("%s: target_modules names %s, of which there are no tensors", path, name);
        }
    }
}

#endif
