/*
What --model and --adapter may name besides a model and PEFT's folder of adapters: the folder of a run (--out of train) stands for its
last complete checkpoint, and a checkpoint for the model.bin or the adapters in it. A folder with a config.json is a Hugging Face
model, whatever else is in it.
*/
#ifndef LLMC_MODEL_PATH_H
#define LLMC_MODEL_PATH_H
#include "adapter_config.h"
#include "checkpoint_folder.h"

// Whether a folder is a checkpoint or a run's; then which complete checkpoint it stands for, and what that holds.
static int checkpoint_at_path(const char *path, char checkpoint[PATH_MAX], Manifest *manifest) {
    char model[PATH_MAX], done[PATH_MAX];
    const char *fault;
    path_join(model, path, manifest_names[0][MANIFEST_MODEL]);
    path_join(done, path, MANIFEST_NAME);
    if (path_exists(model) || path_exists(done)) {
        fault = manifest_check(path, manifest);
        if (fault) die("%s: is no complete checkpoint: %s; give another checkpoint, or the run's folder", path, fault);
        snprintf(checkpoint, PATH_MAX, "%s", path);
        return 1;
    }
    if (checkpoint_before(path, CHECKPOINT_NONE) == CHECKPOINT_NONE) return 0;
    size_t last = checkpoint_find_last(path);
    if (last == CHECKPOINT_NONE)
        die("%s: is the folder of a run, but none of its checkpoints is complete; go on with --resume", path);
    checkpoint_path(checkpoint, path, last, "");
    fault = manifest_check(checkpoint, manifest);
    if (fault) die("%s: %s", checkpoint, fault);
    return 1;
}

__attribute__((noreturn)) static void model_path_refuse_adapters(const char *path) {
    die("--model %s: holds adapters, not a model; give the model they were trained on with --model, and this folder "
        "with --adapter",
        path);
}

// `path` itself, or what it stands for, in `found`; with a note of what was taken unless `quiet`.
static const char *model_path_find(const char *path, char found[PATH_MAX], int quiet) {
    char checkpoint[PATH_MAX], part[PATH_MAX];
    Manifest manifest;
    if (!path_is_directory(path)) return path;
    path_join(part, path, "config.json");
    if (path_exists(part)) return path;
    if (!checkpoint_at_path(path, checkpoint, &manifest)) {
        path_join(part, path, ADAPTER_CONFIG_NAME);
        if (path_exists(part)) model_path_refuse_adapters(path);
        return path;
    }
    if (manifest.adapters) model_path_refuse_adapters(path);
    path_join(found, checkpoint, manifest_names[0][MANIFEST_MODEL]);
    if (!quiet) note("--model %s: %s is taken", path, found);
    return found;
}

// The folder of adapters that --adapter names.
static const char *adapter_path_find(const char *path, char found[PATH_MAX], int quiet) {
    char part[PATH_MAX];
    Manifest manifest;
    if (!path_is_directory(path))
        die("--adapter %s: %s; give the folder that " ADAPTER_CONFIG_NAME " is in", path,
            path_exists(path) ? "is a file" : strerror(errno));
    path_join(part, path, ADAPTER_CONFIG_NAME);
    if (!checkpoint_at_path(path, found, &manifest)) {
        if (!path_exists(part))
            die("--adapter %s: holds neither " ADAPTER_CONFIG_NAME " nor the checkpoints of a run", path);
        return path;
    }
    if (!manifest.adapters) die("--adapter %s: holds a whole model, not adapters; give it with --model", path);
    if (!quiet && strcmp(found, path) != 0) note("--adapter %s: %s is taken", path, found);
    return found;
}

#endif
