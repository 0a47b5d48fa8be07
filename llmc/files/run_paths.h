/*
--model and --adapter also take the folder of a run (--out of train), meaning its last complete checkpoint, or a
checkpoint, meaning its model.bin or adapters. The checkpoint is held until checkpoint_release. A folder with a
config.json is a Hugging Face model, even if it also holds other files. A hub name means its snapshot (hub.h).
*/
#ifndef LLMC_RUN_PATHS_H
#define LLMC_RUN_PATHS_H
#include "checkpoint_folder.h"
#include "hub.h"

// ---- checkpoints ----------------------------------------------------------------------------------------------------
// Descriptor of the checkpoint folder that this reader holds, so that the run does not remove the folder. A reader
// holds at most one checkpoint.
static int checkpoint_held = -1;

static void checkpoint_release(void) {
    if (checkpoint_held >= 0) close(checkpoint_held);
    checkpoint_held = -1;
}

// Holds a checkpoint for reading. Returns 0 if the run is removing the checkpoint.
static int checkpoint_hold(const char *checkpoint) {
    checkpoint_release();
    checkpoint_held = open(checkpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (checkpoint_held < 0) return errno != ENOENT;
    return (flock(checkpoint_held, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) &&
           path_is_file(checkpoint, checkpoint_held);
}

// Lets a reader finish an interrupted --overwrite (replaced_settle). Returns 1 if a new run is active there that has no
// checkpoint yet.
static int replaced_settle_free(const char *folder) {
    char path[PATH_MAX];
    const char *name;
    path_join(path, folder, LOCK_NAME);
    for (int tries = 0; replaced_is_there(folder, &name); tries++) {
        if (!strcmp(name, REPLACED_NAME) && checkpoint_before(folder, CHECKPOINT_NONE) != CHECKPOINT_NONE) return 0;
        const int fd = file_open(path, O_RDWR | O_NOFOLLOW);
        const int held = fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0;
        if (!held) replaced_settle(folder);
        if (fd >= 0) close(fd);
        if (held && tries == LOCK_TRIES) return 1;
        if (held) usleep(100000);
    }
    return 0;
}

// Finds the complete checkpoint in a run's folder, or takes `path` as a checkpoint; reads the manifest. Returns 0 if
// `path` is neither a run's folder nor a checkpoint.
static int checkpoint_at_path(const char *path, char checkpoint[PATH_MAX], Manifest *manifest) {
    const char *fault;
    int tries = 0;
    if (folder_has(path, manifest_names[0][MANIFEST_MODEL]) || folder_has(path, MANIFEST_NAME)) {
        fault = manifest_read(path, manifest);
        if (fault)
            die("%s: is not a complete checkpoint: %s; give another checkpoint, or the run's folder", path, fault);
        snprintf(checkpoint, PATH_MAX, "%s", path);
        checkpoint_hold(checkpoint);
        return 1;
    }
    const int waits = replaced_settle_free(path);
    if (checkpoint_before(path, CHECKPOINT_NONE) == CHECKPOINT_NONE) {
        if (waits)
            die("%s: holds no checkpoint yet of the run that replaces another; wait for it, or give %s/" REPLACED_NAME,
                path, path);
        return 0;
    }
    do {
        size_t last = checkpoint_find(path, CHECKPOINT_NONE, 0);
        if (last == CHECKPOINT_NONE)
            die("%s: is the folder of a run, but none of its checkpoints is complete; restore one from a copy, or give "
                "another run",
                path);
        checkpoint_path(checkpoint, path, last, "");
        if (tries == LOCK_TRIES)
            die("%s: is locked by another process, perhaps a run that removes it; end that process, or give another "
                "checkpoint",
                checkpoint);
        if (tries++) usleep(100000);
    } while (!checkpoint_hold(checkpoint) || manifest_read(checkpoint, manifest));
    return 1;
}

// Ends the program if a file that readers of the checkpoint need differs from its checksum. Collective.
static void checkpoint_verify(const char *checkpoint, const Manifest *manifest) {
    dist_check("checkpoint", manifest->checksum[MANIFEST_STATE]); // the run may have saved a newer checkpoint meanwhile
    const char *damaged = manifest_compare(checkpoint, manifest, 0);
    if (damaged)
        die("%s/%s: is damaged: its checksum is not that of " MANIFEST_NAME
            "; give an earlier checkpoint, or continue with --resume auto, which skips this checkpoint",
            checkpoint, damaged);
}

// Returns `path`, or the model that it means, stored in `found`. Prints a note unless `quiet`. verify: compares
// checksums, collective
static const char *model_path_find(const char *path, char found[PATH_MAX], int quiet, int verify) {
    char checkpoint[PATH_MAX];
    Manifest manifest;
    if (!path_is_directory(path)) {
        folder_above(checkpoint, path);
        const int named = !strcmp(path_last(path), manifest_names[0][MANIFEST_MODEL]); // 1: the path names a
                                                                                       // checkpoint's model.bin
        if (verify && named && !manifest_read(checkpoint, &manifest)) checkpoint_verify(checkpoint, &manifest);
        return path;
    }
    if (folder_has(path, "config.json")) return path;
    if (!checkpoint_at_path(path, checkpoint, &manifest)) return path;
    if (manifest.adapters)
        die("%s: holds adapters, not a model; give it with --adapter, or merge it: convert --model %s --out FOLDER",
            path, path);
    if (verify) checkpoint_verify(checkpoint, &manifest);
    path_join(found, checkpoint, manifest_names[0][MANIFEST_MODEL]);
    if (!quiet) note("--model %s: using %s", path, found);
    return found;
}

// Finds the folder of adapters that --adapter names.
static const char *adapter_path_find(const char *path, char found[PATH_MAX], int quiet) {
    Manifest manifest;
    if (!path_is_directory(path))
        die("--adapter %s: %s; give the folder that adapter_config.json is in", path,
            path_exists(path) ? "is a file" : strerror(errno));
    if (!checkpoint_at_path(path, found, &manifest)) {
        if (folder_has(path, manifest_names[1][MANIFEST_CONFIG])) return path;
        const char *within = folder_matches(path, "*/adapter_config.json");
        die("--adapter %s: holds neither adapter_config.json nor the checkpoints of a run%s%s", path,
            *within ? "; type: --adapter " : "", within);
    }
    if (!manifest.adapters) die("--adapter %s: holds a whole model, not adapters; give it with --model", path);
    checkpoint_verify(found, &manifest);
    if (!quiet && strcmp(found, path) != 0) note("--adapter %s: using %s", path, found);
    return found;
}

#endif
