/*
What --model may name besides a model: the folder of a run (--out of train) stands for its last complete checkpoint, and a
checkpoint for the model.bin in it. A folder with a config.json is a Hugging Face model, whatever else is in it.
*/
#ifndef LLMC_MODEL_PATH_H
#define LLMC_MODEL_PATH_H
#include "checkpoint_folder.h"

// `path` itself, or what it stands for, in `found`; with a note of what was taken unless `quiet`.
static inline const char *model_path_find(const char *path, char found[PATH_MAX], int quiet) {
    char checkpoint[PATH_MAX], part[PATH_MAX];
    Seal seal;
    if (!path_is_directory(path)) return path;
    path_join(part, path, "config.json");
    if (path_exists(part)) return path;
    path_join(part, path, seal_names[SEAL_MODEL]);
    if (path_exists(part)) {
        const char *fault = seal_check(path, &seal);
        if (fault) die("%s: is no complete checkpoint: %s; give another checkpoint, or the run's folder", path, fault);
        snprintf(checkpoint, sizeof(checkpoint), "%s", path);
    } else {
        size_t last;
        if (checkpoint_before(path, CHECKPOINT_NONE) == CHECKPOINT_NONE) return path;
        last = checkpoint_find_last(path);
        if (last == CHECKPOINT_NONE)
            die("%s: is the folder of a run, but none of its checkpoints is complete; go on with --resume", path);
        checkpoint_path(checkpoint, path, last, "");
    }
    path_join(found, checkpoint, seal_names[SEAL_MODEL]);
    if (!quiet) note("--model %s: %s is taken", path, found);
    return found;
}

#endif
