/*
The model card that `convert` writes: README.md in the Hugging Face folder. It names the base model. For one of our runs
it describes the training, from state.json and log.jsonl. The hub reads the part between the lines of dashes.
*/
#ifndef LLMC_MODEL_CARD_H
#define LLMC_MODEL_CARD_H
#include "checkpoint_folder.h"
#include "hf_config.h"
#include "merge.h"
#include "run_source.h"
#include <time.h>

#define CARD_TEXT 65536 // most bytes read of a file

// Reads the beginning of a file in a folder; "" if it is absent
static const char *card_read(const char *folder, const char *name, char text[CARD_TEXT]) {
    char path[PATH_MAX];
    struct stat status;
    path_join(path, folder, name);
    const int there = stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size;
    text[there ? input_begin(path, text, CARD_TEXT - 1) : 0] = 0;
    return text;
}

// Parses a file's first line as JSON.
static cJSON *card_json(const char *folder, const char *name) {
    static char text[CARD_TEXT];
    return cJSON_ParseWithLength(text, strcspn(card_read(folder, name, text), "\n"));
}

static const char *card_word(const cJSON *object, const char *key, const char *otherwise) {
    const cJSON *item = json_get(object, key);
    return cJSON_IsString(item) && json_printable(item->valuestring) ? item->valuestring : otherwise;
}

// Finds a model's name: the hub name, from the path of the snapshot or as typed; else the name of the model's file or
// folder. *hub: 1 for a hub name
static const char *card_name(const char *path, char name[PATH_MAX], int *hub) {
    const char *cached = strstr(path, "/models--"), *slash = strchr(path, '/');
    snprintf(name, PATH_MAX, "%s", cached ? cached + strlen("/models--") : path);
    char *dashes = cached ? strstr(name, "--") : NULL;
    *hub = dashes || (slash && *path != '.' && slash != path && !strchr(slash + 1, '/') && !path_exists(path));
    if (dashes) {
        memmove(dashes + 1, dashes + 2, strlen(dashes + 1));
        *dashes = '/', name[strcspn(name, "/") + 1 + strcspn(dashes + 1, "/")] = 0;
    } else if (!*hub && slash) {
        snprintf(name, PATH_MAX, "%s", path_last(path));
    }
    return name;
}

// Finds the licence that a folder's card or LICENSE names; "" if neither does
static const char *card_licence(const char *folder, char licence[64]) {
    static char text[CARD_TEXT];
    const char *line = folder ? card_read(folder, "README.md", text) : "";
    *licence = 0;
    while (!strncmp(text, "---\n", 4) && !*licence && (line = strchr(line, '\n')) != NULL &&
           strncmp(++line, "---", 3) != 0)
        sscanf(line, "license: %63[0-9a-zA-Z.-]", licence);
    if (*licence || !folder || !*card_read(folder, "LICENSE", text)) return licence;
    return strcpy(licence, strstr(text, "Apache License") ? "apache-2.0"
                           : strstr(text, "MIT License")  ? "mit"
                                                          : "other");
}

// Writes the data sets. files: from state.json, one file or "FIRST to LAST (N files)"
static void card_datasets(FILE *file, const char *files) {
    char name[2][1024] = {"", ""};
    const int count = sscanf(files, "%1023s to %1023s", name[0], name[1]);
    for (int i = 0; i < count; i++) {
        const char *last = path_last(name[i]);
        if (*last && !last[strspn(last, hub_letters)]) fprintf(file, "%s- %s\n", i ? "" : "datasets:\n", last);
    }
}

// Writes the card. kept: the folder that config.json came from, or NULL; type: type of the weights. The caller frees
// the text.
static char *model_card(const WeightSource *source, const char *kept, DType type, const char *out, size_t *length) {
    static RunSource began;
    char folder[PATH_MAX], run[PATH_MAX], name[PATH_MAX], licence[64], date[32], *text = NULL;
    const char *path = source->merge ? source->merge->adapter->path : source->path;
    int hub = 0;
    folder_above(folder, path);
    path_join(run, folder, "..");
    cJSON *state = path_is_directory(path) ? NULL : card_json(folder, "state.json");
    cJSON *log = state ? card_json(run, RECORDS_NAME) : NULL;
    const cJSON *options = json_get(log, "options"), *settings = json_get(state, "settings"), *item;
    const char *base = source->merge || !state ? source->path : card_word(options, "model", NULL);
    if (state) run_source_read(folder, &began);
    if (state && *began.text[SOURCE_FOLDER]) base = began.text[SOURCE_FOLDER];
    const int is_folder = base && path_is_directory(base);
    const char *objective = card_word(options, "objective", "sft"), *lora = card_word(settings, "LoRA", NULL);
    FILE *file = open_memstream(&text, length);
    if (!file) die("%s: out of memory for its README.md; free some memory", out);
    base = source->random || !base ? NULL : card_name(base, name, &hub);
    fputs("---\nlibrary_name: transformers\npipeline_tag: text-generation\n", file);
    if (base && (hub || (is_folder && !base[strspn(base, hub_letters)]))) fprintf(file, "base_model: %s\n", base);
    if (*card_licence(kept, licence)) fprintf(file, "license: %s\n", licence);
    card_datasets(file, card_word(state, "data_files", ""));
    fprintf(file, "tags:\n- streambp\n");
    if (state) fprintf(file, "- %s\n%s", objective, lora ? "- lora\n" : "");
    fprintf(file, "---\n\n# %s\n\n", path_last(out));
    fprintf(file, "%s %s by streambp.c; weights in %s.\n", base ? base : "A randomly initialised model",
            state           ? "trained"
            : source->merge ? "with adapters merged"
                            : "converted",
            hf_dtype_name(type));
    const time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y-%m-%d", gmtime(&now));
    fprintf(file, "Written on %s by commit %s.\n", date, program_commit());
    if (state) {
        const cJSON *schedule = json_get(state, "schedule"), *data = json_get(options, "data");
        fprintf(file, "\n| | |\n|---|---|\n| objective | %s |\n", objective);
        if (lora) fprintf(file, "| LoRA, merged | %s |\n", lora);
        cJSON_ArrayForEach(item, data) if (cJSON_IsString(item) && json_printable(item->valuestring))
            fprintf(file, "| data | %s |\n", path_last(item->valuestring));
        fprintf(file, "| steps | %.0f |\n", cJSON_GetNumberValue(json_get(state, "step")));
        fprintf(file, "| tokens | %.0f |\n", cJSON_GetNumberValue(json_get(state, "tokens")));
        fprintf(file, "| tokens of a document, at most | %s |\n", card_word(settings, "--seq-len", "?"));
        fprintf(file, "| peak learning rate | %g, %s |\n", cJSON_GetNumberValue(json_get(schedule, "peak")),
                card_word(schedule, "kind", "?"));
    }
    if (ferror(file) | fclose(file) || !text) die("%s: out of memory for its README.md; free some memory", out);
    cJSON_Delete(state);
    cJSON_Delete(log);
    return text;
}

#endif
