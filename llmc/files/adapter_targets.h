/*
Finds which modules of which layers have adapters, and their rank and alpha, by PEFT's rules for adapter_config.json.

    target_modules       a regular expression for whole names, "all-linear", or a list of names and ends of names
    exclude_modules      the same, for modules without an adapter
    target_parameters    names and ends of names of experts' matrices and routers, in any layer
    layers_to_transform  layer numbers, for names matched by their end; layers_pattern: the name part before the number
    rank_pattern         {pattern: r}, the first that matches a name or its end; alpha_pattern: the same for lora_alpha
    modules_to_save      the embedding and the head, trained as a whole

The command line uses the same keys (run/lora_options.h).
*/
#ifndef LLMC_ADAPTER_TARGETS_H
#define LLMC_ADAPTER_TARGETS_H
#include "llmc/base/json.h"
#include "llmc/base/pattern.h"
#include "llmc/model/lora.h"
#include "safetensors.h"

static const ModelTensor adapter_outer[] = {EMBEDDING, LM_HEAD}; // modules outside the layers have adapters or copies
                                                                 // only if they are named
#define ADAPTER_OUTER SIZE_MAX                                   // the layer number of modules outside the layers

// Returns the names of experts' projections, gate, up and down, in transformers 4; NULL: the family had none. PEFT 0.21
// applies these names to the matrices of all experts.
static const char *const *adapter_old_names(const Family *family) {
    static const char *const usual[] = {"gate_proj", "up_proj", "down_proj"}, *const mixtral[] = {"w1", "w3", "w2"};
    if (!strcmp(family->name, "mixtral")) return mixtral;
    return text_is_one_of(family->name, "qwen3_moe|glm4_moe|glm4_moe_lite|qwen3_next|deepseek_v3") ? usual : NULL;
}

typedef struct {
    const cJSON *root; // adapter_config.json, or an object of its keys made from options
    const char *where; // where the keys come from: begins error messages, which exit with `code`
    int code;
    const char *prefix; // "model.layers.%zu."; in a composite model "model.language_model.layers.%zu."
} AdapterTargets;

// Returns the full name of the i-th module of a layer, or NULL.
static const char *adapter_module_name(const AdapterTargets *t, const Family *family, size_t layer, size_t i,
                                       char name[160]) {
    const char *module = lora_module(family, i);
    if (!module) return NULL;
    const int used = snprintf(name, 160, t->prefix, layer);
    snprintf(name + used, 160 - (size_t)used, "%s", module);
    return name;
}

// Tells whether a list has this name or an end of this name. *whole: 1 if it has the whole name
static int adapter_lists(const AdapterTargets *t, const char *key, const cJSON *list, const char *name, int *whole) {
    const cJSON *item;
    int found = 0;
    *whole = 0;
    if (list && !cJSON_IsArray(list)) die_with(t->code, "%s: %s must be a list of names or text", t->where, key);
    cJSON_ArrayForEach(item, list) {
        if (!cJSON_IsString(item))
            die_with(t->code, "%s: %s must be a list of names, but has an entry that is not text", t->where, key);
        found |= lora_names_module(name, item->valuestring, strlen(item->valuestring));
        *whole |= !strcmp(name, item->valuestring);
    }
    return found;
}

// Tells whether layers_to_transform, a number or a list, contains the layer.
static int adapter_has_layer(const AdapterTargets *t, const cJSON *layers, size_t layer) {
    uint64_t number;
    int found = 0;
    JSON_EACH(item, layers) {
        if (!json_whole_number(item, &number))
            die_with(t->code, "%s: layers_to_transform must be a layer number or a list of layer numbers", t->where);
        found |= number == layer;
    }
    return found;
}

// Tells whether the name before the layer number ends in one of layers_pattern; without patterns: yes.
static int adapter_layer_named(const AdapterTargets *t, const cJSON *patterns) {
    const size_t length = (size_t)(strstr(t->prefix, ".%zu") - t->prefix);
    char before[64];
    snprintf(before, sizeof(before), "%.*s", (int)length, t->prefix);
    const cJSON *first = cJSON_IsArray(patterns) ? patterns->child : patterns;
    if (!first || (cJSON_IsString(first) && !*first->valuestring)) return 1;
    JSON_EACH(item, patterns) {
        if (!cJSON_IsString(item)) die_with(t->code, "%s: layers_pattern must be text or a list of text", t->where);
        if (pattern_matches(item->valuestring, before, 1, t->where, t->code)) return 1;
    }
    return 0;
}

static int adapter_excludes(const AdapterTargets *t, const char *name) {
    const cJSON *exclude = json_get(t->root, "exclude_modules");
    int whole;
    if (!cJSON_IsString(exclude)) return adapter_lists(t, "exclude_modules", exclude, name, &whole);
    return *exclude->valuestring && pattern_matches(exclude->valuestring, name, 0, t->where, t->code);
}

// Tells whether the keys ask for an adapter of this module in this layer. parameter: lora_is_parameter. The command
// line does not distinguish modules from parameters.
static int adapter_targets(const AdapterTargets *t, const char *name, size_t layer, int parameter) {
    const cJSON *targets = json_get(t->root, "target_modules"), *layers = json_get(t->root, "layers_to_transform");
    int whole;
    if (parameter && t->code != EXIT_USAGE)
        return adapter_lists(t, "target_parameters", json_get(t->root, "target_parameters"), name, &whole);
    if (adapter_excludes(t, name)) return 0;
    if (cJSON_IsString(targets))
        return (!strcasecmp(targets->valuestring, "all-linear") && layer != ADAPTER_OUTER) ||
               pattern_matches(targets->valuestring, name, 0, t->where, t->code);
    if (!adapter_lists(t, "target_modules", targets, name, &whole)) return 0;
    if (whole || !layers || (cJSON_IsArray(layers) && !layers->child)) return 1;
    return adapter_has_layer(t, layers, layer) && adapter_layer_named(t, json_get(t->root, "layers_pattern"));
}

// Returns the value of the first pattern that matches the name, or `otherwise`.
static double adapter_pattern_value(const AdapterTargets *t, const char *key, const char *name, double otherwise) {
    const cJSON *patterns = json_get(t->root, key), *item;
    if (patterns && !cJSON_IsObject(patterns))
        die_with(t->code, "%s: %s must be an object of names and numbers", t->where, key);
    cJSON_ArrayForEach(item, patterns) {
        if (!cJSON_IsNumber(item)) die_with(t->code, "%s: %s must have a number for each name", t->where, key);
        if (pattern_matches(item->string, name, 1, t->where, t->code)) return item->valuedouble;
    }
    return otherwise;
}

// Returns the rank and alpha of a module with an adapter.
static LoraModule adapter_module(const AdapterTargets *t, const char *name, const Lora *lora) {
    const double rank = adapter_pattern_value(t, "rank_pattern", name, (double)lora->rank);
    const double alpha = adapter_pattern_value(t, "alpha_pattern", name, lora->alpha);
    if (!(rank >= 1 && rank <= 65536) || rank != floor(rank))
        die_with(t->code, "%s: rank_pattern is %g for %s; it must be a whole number from 1 to 65536", t->where, rank,
                 name);
    if (!(fabs(alpha) <= 1e6))
        die_with(t->code, "%s: alpha_pattern is %g for %s; it must be a number from -1e6 to 1e6", t->where, alpha,
                 name);
    const LoraModule module = {(size_t)rank, alpha};
    return module;
}

// Reads modules_to_save: embedding and head, by names or ends of names. The model must have both as matrices.
static void adapter_choose_copies(const AdapterTargets *t, Lora *lora, const Config *c) {
    const ModelTensor *tensors = adapter_outer;
    const cJSON *list = json_get(t->root, "modules_to_save"), *item;
    if (list && !cJSON_IsArray(list)) die_with(t->code, "%s: modules_to_save must be a list of names", t->where);
    cJSON_ArrayForEach(item, list) {
        int found = 0;
        for (size_t i = 0; i < 2 && cJSON_IsString(item); i++) {
            char name[64];
            lora_outer_name(c->family, tensors[i], name);
            if (!lora_names_module(name, item->valuestring, strlen(item->valuestring))) continue;
            if (c->tie_word_embeddings)
                die_with(t->code,
                         "%s: modules_to_save has %s, but this model's head is its embedding, and a copy would untie "
                         "them; leave it out",
                         t->where, item->valuestring);
            lora->saves[tensors[i]] = found = 1;
        }
        if (!found)
            die_with(t->code,
                     "%s: modules_to_save has %.64s, which is not supported; name only embed_tokens and lm_head",
                     t->where, cJSON_IsString(item) ? item->valuestring : "an entry that is not text");
    }
}

// Replaces lora->each by one rank, alpha and set of modules if all layers agree.
static void adapter_simplify(Lora *lora, const Config *c) {
    unsigned modules = 0;
    for (size_t k = 0; k < c->num_hidden_layers * LORA_TENSORS; k++)
        if (lora->each[k].rank) modules |= 1u << k % LORA_TENSORS;
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++)
        for (size_t i = 0; lora_module(c->family, i); i++) {
            const LoraModule m = lora->each[layer * LORA_TENSORS + i];
            const int wanted = (modules >> i & 1) && lora_layer_has(c, layer, i);
            if (wanted ? m.rank != lora->rank || m.alpha != lora->alpha : m.rank != 0) return;
        }
    free(lora->each);
    lora->each = NULL, lora->modules = modules;
}

// Tells whether the keys name the modules. If not, the tensors alone decide.
static int adapter_targets_known(const AdapterTargets *t) {
    const cJSON *targets = json_get(t->root, "target_modules");
    if (targets && !cJSON_IsString(targets) && !cJSON_IsArray(targets))
        die_with(t->code, "%s: target_modules must be a list of names or text", t->where);
    return targets != NULL || cJSON_IsArray(json_get(t->root, "target_parameters"));
}

static const SafeTensor *adapter_find_tensor(const SafeTensors *list, const char *module, const char *tensor) {
    char name[256];
    snprintf(name, sizeof(name), "base_model.model.%s.%s", module, tensor);
    return safetensors_find(list, name);
}

// Tells whether a file has a tensor for each matrix of an expert.
static int adapter_is_split(const SafeTensors *list) {
    for (size_t i = 0; i < list->count; i++) {
        const char *at = strstr(list->tensors[i].name, ".experts.");
        if (at && strspn(at + strlen(".experts."), "0123456789")) return 1;
    }
    return 0;
}

// Tells whether a file has an adapter of stacked expert matrices [E,out,in]. experts: the names before ".lora_A". If
// the file has only one stack, the shapes of A and B tell whether it is gate-up or down.
static int adapter_has_stack(const SafeTensors *list, const char *experts, const Config *c, size_t layer, int down) {
    char inner[200];
    lora_expert_name(c->family, layer, 0, down ? 2 : 0, inner);
    if (adapter_find_tensor(list, inner, "lora_A.weight")) return 1;
    snprintf(inner, sizeof(inner), "%s.base_layer", experts);
    const SafeTensor *a = adapter_find_tensor(list, experts, "lora_A.weight"),
                     *b = adapter_find_tensor(list, experts, "lora_B.weight");
    if (adapter_find_tensor(list, inner, "lora_A.weight") || adapter_find_tensor(list, inner, "lora_B.weight"))
        return !down || a || b;
    if (!a && !b) return 0;
    const size_t first = expert_parts(c->family) * c->moe_intermediate_size; // rows of B of the first stack
    return down == ((a && a->shape[1] != c->hidden_size) || (b && b->shape[0] != first));
}

// Tells whether a module has an adapter. The keys decide; with a file, the file's tensors decide, and keys that name
// modules must agree with the tensors.
static int adapter_has(const AdapterTargets *t, const char *name, size_t layer, int parameter, const SafeTensors *list,
                       int found, int named) {
    const int wanted = !list || named ? adapter_targets(t, name, layer, parameter) : found;
    if (list && wanted != found)
        die_with(
            t->code,
            found
                ? "%s: has tensors of %s, which target_%ss does not name%s%s; save the adapter again with PEFT"
                : "%s: has no tensors of %s, which target_%ss names%s%s; give the base that the adapter was trained on",
            t->where, name, parameter ? "parameter" : "module", found ? "" : "; it has ",
            found ? "" : safetensors_unused(list));
    return wanted;
}

// Refuses parameters that belong neither to a router nor to experts, and dropout on parameters that do.
static void adapter_check_parameters(const AdapterTargets *t, const Lora *lora, const Config *c) {
    const cJSON *item;
    const char *module;
    int any = 0;
    cJSON_ArrayForEach(item, json_get(t->root, "target_parameters")) {
        int found = 0;
        char name[160];
        for (size_t l = 0; l < c->num_hidden_layers && cJSON_IsString(item); l++)
            for (size_t i = 0; adapter_module_name(t, c->family, l, i, name); i++)
                found |= lora_is_parameter(c->family, lora_tensor(c->family, i)) && lora_layer_has(c, l, i) &&
                         lora_names_module(name, item->valuestring, strlen(item->valuestring));
        if (!found)
            die_with(t->code,
                     "%s: target_parameters has %.64s, but this model can adapt only matrices of routers and experts "
                     "there; leave it out",
                     t->where, cJSON_IsString(item) ? item->valuestring : "an entry that is not text");
    }
    for (size_t l = 0; l < c->num_hidden_layers; l++)
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++)
            any |= lora_is_parameter(c->family, lora_tensor(c->family, i)) && lora_wanted(lora, c, l, i).rank;
    if (any && lora->dropout > 0)
        die_with(t->code,
                 "%s: adapters of experts and routers have no dropout, as in PEFT; set the dropout to 0, not %g",
                 t->where, lora->dropout);
}

// Fills lora->modules or lora->each from the keys, and from the tensors of a file if `list` is not NULL. Returns the
// number of modules with adapters.
static size_t adapter_choose(const AdapterTargets *t, Lora *lora, const Config *c, const SafeTensors *list) {
    char name[160], own[160], prefix[64];
    const int named = list && adapter_targets_known(t) && !adapter_is_split(list);
    size_t count = 0;
    lora->each = (LoraModule *)checked_calloc(c->num_hidden_layers * LORA_TENSORS, sizeof(LoraModule),
                                              "the adapters of each layer");
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++)
        for (size_t i = 0; adapter_module_name(t, c->family, layer, i, name); i++) {
            const LayerTensor tensor = lora_tensor(c->family, i);
            if (!lora_layer_has(c, layer, i)) continue;
            const int used = snprintf(own, sizeof(own), c->family->names.layer_prefix, layer);
            lora_tensor_prefix(c->family, i, 0, prefix);
            snprintf(own + used, sizeof(own) - (size_t)used, "%s", prefix);
            const int found =
                list && (lora_is_stack(tensor) ? adapter_has_stack(list, own, c, layer, tensor == EXPERTS_DOWN)
                                               : adapter_find_tensor(list, own, "lora_A.weight") ||
                                                     adapter_find_tensor(list, own, "lora_B.weight"));
            if (adapter_has(t, name, layer, lora_is_parameter(c->family, tensor), list, found, named))
                lora->each[layer * LORA_TENSORS + i] = adapter_module(t, name, lora), count++;
        }
    for (size_t i = 0; i < 2; i++) {
        const ModelTensor outer = adapter_outer[i];
        const char *a = outer == EMBEDDING ? "lora_embedding_A" : "lora_A.weight";
        lora_outer_name(c->family, outer, name);
        const int found = list && adapter_find_tensor(list, name, a);
        if (lora->saves[outer] && found)
            die_with(t->code, "%s: has %s in modules_to_save and also an adapter of it; keep one of the two", t->where,
                     name);
        if (!lora->saves[outer] && adapter_has(t, name, ADAPTER_OUTER, 0, list, found, named))
            lora->outer[outer] = adapter_module(t, name, lora), count++;
    }
    adapter_check_parameters(t, lora, c);
    adapter_simplify(lora, c);
    return count;
}

// ---- writing --------------------------------------------------------------------------------------------------------
// Finds the shortest unique end of a module's name: "q_proj", but GPT-2's "attn.c_proj".
static void adapter_short_name(const Family *family, size_t module, char name[64]) {
    char whole[64];
    int named = 2; // how many modules have this end
    snprintf(whole, sizeof(whole), "%s", lora_module(family, module));
    for (size_t begin = lora_name_length(whole); named > 1 && begin > 0;) {
        const char *other;
        while (begin && whole[--begin] != '.') continue;
        snprintf(name, 64, "%s", whole + begin + (whole[begin] == '.'));
        named = 0;
        for (size_t i = 0; (other = lora_module(family, i)) != NULL; i++) // two kinds of layers may share the name
            named += i == module || (strcmp(other, whole) && lora_names_module(other, name, strlen(name)));
    }
}

// ADAPTER_PRESENT writes target_modules, ADAPTER_PARAMETERS target_parameters
typedef enum { ADAPTER_PRESENT, ADAPTER_PARAMETERS, ADAPTER_RANK, ADAPTER_ALPHA } AdapterKey;

// Returns a key's value for a module; NAN: the module needs no entry
static double adapter_module_value(const Lora *lora, AdapterKey key, LoraModule m) {
    if (!m.rank) return NAN;
    if (key <= ADAPTER_PARAMETERS) return 1;
    if (key == ADAPTER_RANK) return m.rank == lora->rank ? NAN : (double)m.rank;
    return m.alpha == lora->alpha ? NAN : m.alpha;
}

static double adapter_key_value(const Lora *lora, AdapterKey key, size_t layer, size_t i) {
    const Family *family = lora->table.config.family;
    const int parameter = lora_is_parameter(family, lora_tensor(family, i));
    if (key <= ADAPTER_PARAMETERS && parameter != (key == ADAPTER_PARAMETERS)) return NAN;
    return adapter_module_value(lora, key, lora_wanted(lora, &lora->table.config, layer, i));
}

// Tells whether all layers with the i-th module (or its adapter) have the same value of the key.
static int adapter_key_alike(const Lora *lora, AdapterKey key, size_t i, double *value) {
    const Config *c = &lora->table.config;
    int first = 1;
    *value = NAN;
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++) {
        if (!lora_layer_has(c, layer, i)) continue;
        if (key > ADAPTER_PARAMETERS && !lora_wanted(lora, c, layer, i).rank) continue;
        const double other = adapter_key_value(lora, key, layer, i);
        if (!first && other != *value && !(isnan(other) && isnan(*value))) return 0;
        *value = other, first = 0;
    }
    return 1;
}

// Prints the i-th name that stands for experts and routers in target_modules of files with a tensor per matrix of an
// expert, without its module's name. Prints "" if that module has no adapter. Returns 0 after the last name.
static int adapter_split_name(const Lora *lora, size_t i, char name[64]) {
    static const LayerTensor tensors[] = {EXPERTS_GATE_UP, EXPERTS_GATE_UP, EXPERTS_DOWN, ROUTER_WEIGHT};
    const Family *family = lora->table.config.family;
    if (!lora->split || i == 4) return 0;
    char whole[160];
    if (i < 3)
        lora_expert_name(family, 0, 0, i, whole);
    else
        snprintf(whole, sizeof(whole), "%s", family->names.layer.ROUTER_WEIGHT);
    size_t end = lora_name_length(whole), begin = end, any = 0;
    while (begin && whole[begin - 1] != '.') begin--;
    for (size_t l = 0; l < lora->table.config.num_hidden_layers; l++)
        any |= lora->part[l * LAYER_TENSORS + tensors[i]].a != ABSENT;
    snprintf(name, 64, "%.*s", any ? (int)(end - begin) : 0, whole + begin);
    return 1;
}

// Writes an entry of a key's list or object.
static void adapter_write_entry(JsonOut *json, const char *name, double value, AdapterKey key) {
    if (key <= ADAPTER_PARAMETERS)
        json_text(json, NULL, name);
    else
        json_number(json, name, value);
}

// Writes a key's entries, sorted. A module whose value is equal in all layers is written by its short name, else by its
// full name in each layer.
static void adapter_write_key(JsonOut *json, const char *title, const Lora *lora, AdapterKey key) {
    const Config *c = &lora->table.config;
    char prefix[64];
    const AdapterTargets names = {NULL, NULL, 0, prefix};
    const char *own = c->family->names.layer_prefix, *whole = lora->modules_prefix;
    struct {
        char name[64];
        double value;
    } alike[LORA_TENSORS + 6];
    size_t count = 0;
    char name[160];
    double value;
    snprintf(prefix, sizeof(prefix), "%s%s", whole ? whole : "", whole ? strchr(own, '.') + 1 : own);
    if (key <= ADAPTER_PARAMETERS)
        json_array(json, title);
    else
        json_object(json, title);
    for (size_t i = 0; lora_module(c->family, i); i++)
        if (adapter_key_alike(lora, key, i, &value) && !isnan(value))
            adapter_short_name(c->family, i, alike[count].name), alike[count++].value = value;
    for (size_t i = 0; i < 2 && key != ADAPTER_PARAMETERS; i++) {
        value = adapter_module_value(lora, key, lora->outer[adapter_outer[i]]);
        if (isnan(value)) continue;
        lora_outer_name(c->family, adapter_outer[i], alike[count].name);
        const char *end = strrchr(alike[count].name, '.');
        if (end) memmove(alike[count].name, end + 1, strlen(end));
        alike[count++].value = value;
    }
    for (size_t i = 0; key == ADAPTER_PRESENT && adapter_split_name(lora, i, alike[count].name); i++)
        alike[count].value = 1, count += *alike[count].name != 0;
    qsort(alike, count, sizeof(alike[0]), compare_texts);
    for (size_t k = 0; k < count; k++)
        if (!k || strcmp(alike[k].name, alike[k - 1].name) != 0)
            adapter_write_entry(json, alike[k].name, alike[k].value, key);
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++)
        for (size_t i = 0; adapter_module_name(&names, c->family, layer, i, name); i++) {
            if (adapter_key_alike(lora, key, i, &value)) continue;
            value = adapter_key_value(lora, key, layer, i);
            if (!isnan(value)) adapter_write_entry(json, name, value, key);
        }
    if (key <= ADAPTER_PARAMETERS)
        json_array_end(json);
    else
        json_object_end(json);
}

#endif
