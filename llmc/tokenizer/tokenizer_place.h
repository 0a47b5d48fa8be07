/*
Where a model's tokenizer file (tokenizer_file.h) lies: beside the model, beside the checkpoints of a run, or beside the shards that
data/prepare.py made for this model. Training and `convert` copy it, so that `sample` finds it beside what they write.
*/
#ifndef LLMC_TOKENIZER_PLACE_H
#define LLMC_TOKENIZER_PLACE_H
#include "llmc/data/shard.h"

#define TOKENIZER_NAME "tokenizer.tok"

// tokenizer.tok in the model's folder, or in the one above (of checkpoint-00000100/model.bin the run's folder).
static int tokenizer_beside(const char *model, char path[PATH_MAX]) {
    char folder[PATH_MAX];
    const char *slash = strrchr(model, '/');
    if (path_is_directory(model))
        snprintf(folder, sizeof(folder), "%s", model);
    else
        snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash - model) : 1, slash ? model : ".");
    if (!*folder) snprintf(folder, sizeof(folder), "/");
    for (size_t up = 0; up < 2; up++) {
        path_join(path, folder, up ? "../" TOKENIZER_NAME : TOKENIZER_NAME);
        if (path_exists(path)) return 1;
        if (path_is_directory(model)) break;
    }
    return 0;
}

// tokenizer.tok in the folder of `shard`, a name or a pattern.
static int tokenizer_beside_shard(const char *shard, char path[PATH_MAX]) {
    const char *slash = strrchr(shard, '/');
    char folder[PATH_MAX];
    snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash - shard + 1) : 1, slash ? shard : ".");
    path_join(path, folder, TOKENIZER_NAME);
    return path_exists(path);
}

// Whether the file `path` was made of this tokenizer.json, by the fingerprint in its header.
static int tokenizer_is_of(const char *path, const char *tokenizer_json) {
    return tokenizer_fingerprint(path) == tokenizer_fingerprint(tokenizer_json);
}

#endif
