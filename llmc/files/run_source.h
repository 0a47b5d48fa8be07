/*
What a run began from: the object "source" in state.json. It does not hold the settings that a resumed run must share. A
run's adapters find their base through it, and `convert` finds the tokenizer. Older runs lack this object; it is then
derived from their other files.
*/
#ifndef LLMC_RUN_SOURCE_H
#define LLMC_RUN_SOURCE_H
#include "run_paths.h"
#include "llmc/base/json.h"

enum {
    SOURCE_MODEL,   // --model as typed; empty with --init
    SOURCE_PATH,    // absolute path of the file or folder that --model meant
    SOURCE_FOLDER,  // the Hugging Face folder of the tokenizer and config.json, absolute; empty: none
    SOURCE_DTYPE,   // type of the weights in that folder or file
    SOURCE_INIT,    // --init
    SOURCE_SEED,    // --seed of --init
    SOURCE_SCALING, // --rope-scaling
    SOURCE_GROWN,   // --grow-vocabulary
    SOURCE_BASE,    // --base
    SOURCE_HEAD,    // --quantise-head: "yes"
    SOURCE_TEXTS
};

static const char *const source_keys[SOURCE_TEXTS] = {"model", "path",         "folder",     "dtype", "init",
                                                      "seed",  "rope_scaling", "vocabulary", "base",  "quantise_head"};

typedef struct {
    char text[SOURCE_TEXTS][PATH_MAX]; // empty: unset
} RunSource;

static void run_source_write(JsonOut *json, const RunSource *source) {
    json_object(json, "source");
    for (size_t i = 0; i < SOURCE_TEXTS; i++)
        if (*source->text[i]) json_text(json, source_keys[i], source->text[i]);
    json_object_end(json);
}

// Sets an empty text to the value of the key in `object`, if present.
static void run_source_take(RunSource *source, size_t i, const cJSON *object, const char *key) {
    const char *text = cJSON_GetStringValue(json_get(object, key));
    if (text && !*source->text[i]) snprintf(source->text[i], PATH_MAX, "%s", text);
}

// Reads the source of a checkpoint, or of any folder of adapters.
static void run_source_read(const char *folder, RunSource *source) {
    char path[PATH_MAX];
    memset(source, 0, sizeof(*source));
    const int has_state = path_found(path, folder, manifest_names[0][MANIFEST_STATE]);
    cJSON *state = has_state ? json_read_object(path, (size_t)1 << 20) : NULL;
    const cJSON *known = json_get(state, "source"), *settings = json_get(state, "settings");
    for (size_t i = 0; i < SOURCE_TEXTS; i++) run_source_take(source, i, known, source_keys[i]);
    path_join(path, folder, manifest_names[1][MANIFEST_CONFIG]);
    cJSON *adapters = !known && path_exists(path) ? json_read_object(path, (size_t)16 << 20) : NULL;
    run_source_take(source, SOURCE_MODEL, adapters, "base_model_name_or_path");
    if (!known) run_source_take(source, SOURCE_BASE, settings, "--base");
    if (!*source->text[SOURCE_MODEL]) run_source_take(source, SOURCE_INIT, settings, "model");
    run_source_take(source, SOURCE_SEED, settings, "--seed");
    source->text[SOURCE_BASE][strcspn(source->text[SOURCE_BASE], ",")] = 0; // "nf4,block=64,..."
    cJSON_Delete(state), cJSON_Delete(adapters);
}

// Returns the path to give with --model: the typed path if it still leads to the run's model, else the absolute path;
// NULL: the model is gone.
static const char *run_source_find(const RunSource *source) {
    const char *typed = source->text[SOURCE_MODEL], *path = source->text[SOURCE_PATH];
    char hub[PATH_MAX], absolute[PATH_MAX];
    const char *named = path_exists(typed) ? typed : hub_snapshot(typed, hub) ? hub : NULL;
    if (named && (!path_exists(path) || (realpath(named, absolute) && !strcmp(absolute, path)))) return typed;
    return path_exists(path) ? path : NULL;
}

#endif
