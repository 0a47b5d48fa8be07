/*
Turns the options of new adapters into equivalent keys of adapter_config.json (files/adapter_targets.h):

    --lora-targets q_proj,layers.3.mlp.up_proj    target_modules; a regular expression unless all are names
    --lora-layers 0-7,12                          layers_to_transform
    --lora-rank-pattern q_proj=16                 rank_pattern
    --lora-alpha-pattern q_proj=32                alpha_pattern
    --lora-modules-to-save embed_tokens,lm_head   modules_to_save

Experts' matrices and routers are named like modules. They become target_parameters when adapters are written.
*/
#ifndef LLMC_LORA_OPTIONS_H
#define LLMC_LORA_OPTIONS_H
#include "llmc/files/adapter_targets.h"
#include "llmc/cli/options.h"

// Calls add(to, entry) for each part of a list "a,b"; add may change the entry.
static void lora_each_entry(const char *list, void (*add)(cJSON *to, char *entry), cJSON *to) {
    char *copy = checked_strdup(list), *entry = copy, *next;
    for (; entry; entry = next) {
        next = strchr(entry, ',');
        if (next) *next++ = 0;
        add(to, entry);
    }
    free(copy);
}

// Adds a name; "experts" stands for both matrices of experts.
static void lora_add_name(cJSON *names, char *entry) {
    static const char *const ends[] = {".gate_up_proj", ".down_proj"};
    char name[256];
    const int experts = lora_names_module(entry, "experts", strlen("experts"));
    for (int i = 0; i <= experts; i++) {
        snprintf(name, sizeof(name), "%.200s%s", entry, experts ? ends[i] : "");
        cJSON_AddItemToArray(names, cJSON_CreateString(name));
    }
}

// Replaces transformers 4 names of experts' projections as PEFT 0.21 does, and names that a dense MLP next to experts
// shares with them. Returns 1 if gates and up projections now share A, so that their rank doubles.
static int lora_rename(const cJSON *names, const Family *family) {
    const char *const *old = adapter_old_names(family);
    int found[3] = {0, 0, 0};
    cJSON *item;
    cJSON_ArrayForEach(item, names) {
        if (family->experts_beside && !strcmp(item->valuestring, "down_proj"))
            cJSON_SetValuestring(item, "mlp.down_proj");
        for (int i = 0; old && i < 3; i++) {
            if (strcmp(item->valuestring, old[i]) != 0) continue;
            cJSON_SetValuestring(item, i < 2 ? "experts.gate_up_proj" : "experts.down_proj");
            found[i] = 1;
            break;
        }
    }
    if (found[0] != found[1])
        die_usage("--lora-targets: %s alone is half of experts.gate_up_proj, which has one adapter in %s; name "
                  "experts.gate_up_proj",
                  old[found[1]], family->name);
    return found[0];
}

static void lora_add_layers(cJSON *layers, char *entry) {
    char *end;
    const unsigned long first = strtoul(entry, &end, 10);
    const unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
    if (!strspn(entry, "0123456789") || *end || last < first || last > 9999)
        die_usage("--lora-layers: '%s' is neither a layer nor a range; give layers such as 0-7,12", entry);
    for (unsigned long l = first; l <= last; l++) cJSON_AddItemToArray(layers, cJSON_CreateNumber((double)l));
}

static void lora_add_pattern(cJSON *patterns, char *entry) {
    char *value = strrchr(entry, '='), *end = NULL;
    const double number = value ? strtod(value + 1, &end) : 0;
    if (!value || value == entry || !value[1] || *end || !isfinite(number))
        die_usage("--lora-rank-pattern and --lora-alpha-pattern take NAME=NUMBER,..., not '%s'", entry);
    *value = 0;
    cJSON_AddNumberToObject(patterns, entry, number);
}

// Returns the modules that a word stands for; 0: not a word. all: as in PEFT 0.21, attention and, by family, either
// experts and routers or the other linear layers.
static unsigned lora_word(const char *targets, const Config *c) {
    const int experts = expert_layers_before(c, c->num_hidden_layers) != 0,
              renamed = adapter_old_names(c->family) != NULL;
    unsigned chosen = 0;
    if (!strcmp(targets, "auto")) return lora_usual_modules(c);
    if (!text_is_one_of(targets, "all|all-linear")) return 0;
    for (size_t i = 0; lora_module_at(c->family, i) < LORA_TENSORS; i++) {
        const LayerTensor tensor = lora_tensor(c->family, i);
        if (!experts || tensor < GATE_WEIGHT || renamed == lora_is_parameter(c->family, tensor)) chosen |= 1u << i;
    }
    return chosen;
}

// Makes the keys of adapter_config.json. Words become the names of their modules, so that --lora-layers applies.
static cJSON *lora_keys(const Lora *lora, const Options *o, const Config *c) {
    const char *targets = o->lora_targets, *module;
    cJSON *root = cJSON_CreateObject();
    const unsigned word = lora_word(targets, c);
    const int experts = expert_layers_before(c, c->num_hidden_layers) != 0;
    int doubled = experts && !strncmp(targets, "all", 3) && word && adapter_old_names(c->family);
    if (word) {
        cJSON *names = cJSON_AddArrayToObject(root, "target_modules");
        for (size_t i = 0; (module = lora_module(c->family, i)) != NULL; i++)
            if (word >> i & 1) cJSON_AddItemToArray(names, cJSON_CreateString(module));
    } else if (pattern_is_plain(targets)) {
        cJSON *names = cJSON_AddArrayToObject(root, "target_modules");
        lora_each_entry(targets, lora_add_name, names);
        if (experts) doubled = lora_rename(names, c->family);
    } else {
        cJSON_AddStringToObject(root, "target_modules", targets);
        if (o->lora_layers)
            die_usage("--lora-layers needs names in --lora-targets; name the layers in the regular expression");
    }
    if (o->lora_layers)
        lora_each_entry(o->lora_layers, lora_add_layers, cJSON_AddArrayToObject(root, "layers_to_transform"));
    if (o->lora_rank_pattern)
        lora_each_entry(o->lora_rank_pattern, lora_add_pattern, cJSON_AddObjectToObject(root, "rank_pattern"));
    if (o->lora_alpha_pattern)
        lora_each_entry(o->lora_alpha_pattern, lora_add_pattern, cJSON_AddObjectToObject(root, "alpha_pattern"));
    if (doubled) { // follows the user's own patterns: the first match counts
        static const char *const keys[] = {"rank_pattern", "alpha_pattern"};
        for (int i = 0; i < 2; i++) {
            if (!cJSON_HasObjectItem(root, keys[i])) cJSON_AddObjectToObject(root, keys[i]);
            cJSON_AddNumberToObject(cJSON_GetObjectItem(root, keys[i]), "experts.gate_up_proj",
                                    2 * (i ? lora->alpha : (double)lora->rank));
        }
    }
    if (o->lora_modules_to_save)
        lora_each_entry(o->lora_modules_to_save, lora_add_name, cJSON_AddArrayToObject(root, "modules_to_save"));
    return root;
}

// Returns 1 if a module with an adapter has this name, or matches it as a pattern.
static int lora_names_some(const AdapterTargets *t, const Lora *lora, const Config *c, const char *text, int pattern) {
    char name[160];
    for (size_t layer = 0; layer < c->num_hidden_layers; layer++)
        for (size_t i = 0; adapter_module_name(t, c->family, layer, i, name); i++)
            if (lora_wanted(lora, c, layer, i).rank && (pattern ? pattern_matches(text, name, 1, t->where, t->code)
                                                                : lora_names_module(name, text, strlen(text))))
                return 1;
    for (size_t i = 0; i < 2; i++) {
        lora_outer_name(c->family, adapter_outer[i], name);
        if (lora->outer[adapter_outer[i]].rank &&
            (pattern ? pattern_matches(text, name, 1, t->where, t->code) : lora_names_module(name, text, strlen(text))))
            return 1;
    }
    return 0;
}

// Refuses an entry that matches no module.
static void lora_check_entries(const AdapterTargets *t, const Lora *lora, const Config *c, const char *key) {
    const cJSON *list = json_get(t->root, key), *item;
    const int names = cJSON_IsArray(list);
    if (cJSON_IsString(list)) return;
    cJSON_ArrayForEach(item, list) {
        const char *text = names ? item->valuestring : item->string;
        if (lora_names_some(t, lora, c, text, !names)) continue;
        if (names) lora_modules(c->family, text, "--lora-targets", EXIT_USAGE);
        if (names)
            die_usage("--lora-targets %s: this model has no linear layer of that name; name its layers, such as "
                      "q_proj,v_proj",
                      text);
        die_usage("--lora-%s-pattern: '%s' matches no module that has an adapter; name a module of --lora-targets",
                  *key == 'r' ? "rank" : "alpha", text);
    }
}

// Chooses the modules that have adapters, with their rank and alpha. Replaces the choice in *lora.
static void lora_from_options(Lora *lora, const Options *o, const Config *c) {
    cJSON *root = lora_keys(lora, o, c);
    const AdapterTargets targets = {root, "--lora-targets", EXIT_USAGE, c->family->names.layer_prefix};
    const cJSON *layers = json_get(root, "layers_to_transform"), *layer;
    cJSON_ArrayForEach(layer, layers) {
        if (layer->valuedouble >= (double)c->num_hidden_layers)
            die_usage("--lora-layers: there is no layer %g; give layers from 0 to %zu", layer->valuedouble,
                      c->num_hidden_layers - 1);
    }
    adapter_choose_copies(&targets, lora, c);
    const size_t chosen = adapter_choose(&targets, lora, c, NULL);
    if (!lora_word(o->lora_targets, c)) lora_check_entries(&targets, lora, c, "target_modules");
    if (!chosen)
        die_usage(
            "--lora-targets %s: this model has no linear layer of that name; name its layers, such as q_proj,v_proj",
            o->lora_targets);
    lora_check_entries(&targets, lora, c, "rank_pattern"), lora_check_entries(&targets, lora, c, "alpha_pattern");
    cJSON_Delete(root);
    const char *joint = c->family->names.layer.INPUT_PROJECTION;
    if (!o->quiet && c->hidden_size_per_layer_input && text_is_one_of(o->lora_targets, "all|all-linear"))
        note("--lora-targets %s leaves out %.*s, which is one matrix for all layers", o->lora_targets,
             (int)lora_name_length(joint), joint);
    for (size_t i = 0; !o->quiet && adapter_old_names(c->family) && lora_module_at(c->family, i) < LORA_TENSORS; i++)
        for (size_t l = 0; l < c->num_hidden_layers; l++) {
            const LayerTensor tensor = lora_tensor(c->family, i);
            if (tensor < GATE_WEIGHT || lora_is_parameter(c->family, tensor) || !lora_wanted(lora, c, l, i).rank)
                continue;
            note("--lora-targets: PEFT 0.21 takes %s for experts in %s, so it will not load these adapters; merge them",
                 lora_module(c->family, i), c->family->name);
            return;
        }
}

#endif
