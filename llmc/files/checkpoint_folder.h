/*
The folder of checkpoints, not their contents: which are complete, beginning and finishing one, removing old ones, the
lock. A complete one has its step in its name, checkpoint-00000100, and holds a manifest: the file DONE with the sizes
and checksums of the others. checkpoint-*.partial is being written and checkpoint-*.removed is being deleted; the next
run that opens the folder removes such leftovers. All ranks must see the same folder. Only rank 0 creates and removes
files; the others write into files that it made.
*/
#ifndef LLMC_CHECKPOINT_FOLDER_H
#define LLMC_CHECKPOINT_FOLDER_H
#include "llmc/base/output.h"
#include "llmc/ranks/dist.h"

#define CHECKPOINT_NONE SIZE_MAX    // no step
#define LOCK_TRIES      20          // 0.1 s apart: readers and ranks of an ended job soon let go
#define RECORDS_NAME    "log.jsonl" // written by log.h

typedef struct {
    char path[PATH_MAX];
    size_t keep;  // how many of the newest complete checkpoints are kept
    size_t best;  // step also kept: the best by validation; 0: none
    size_t good;  // step also kept: the last before a run may have diverged (llmc/train/log.h); 0: none
    size_t last;  // step of the newest complete one, or CHECKPOINT_NONE
    int replaces; // an earlier run exists, which checkpoint_replace removes
    int lock;     // descriptor, held until the process ends; -1: not rank 0
} CheckpointFolder;

static void checkpoint_path(char path[PATH_MAX], const char *folder, size_t step, const char *suffix) {
    char name[64];
    snprintf(name, sizeof(name), "checkpoint-%08zu%s", step, suffix);
    path_join(path, folder, name);
}

// Returns the step in "checkpoint-00000100", or CHECKPOINT_NONE.
static size_t checkpoint_step_of(const char *name) {
    static const char prefix[] = "checkpoint-";
    char same[64];
    size_t step;
    if (strncmp(name, prefix, sizeof(prefix) - 1) != 0 || !parse_size(name + sizeof(prefix) - 1, &step))
        return CHECKPOINT_NONE;
    snprintf(same, sizeof(same), "%s%08zu", prefix, step);
    return strcmp(name, same) == 0 ? step : CHECKPOINT_NONE;
}

// ---- the manifest ---------------------------------------------------------------------------------------------------
enum { MANIFEST_MODEL, MANIFEST_OPTIMIZER, MANIFEST_STATE, MANIFEST_CONFIG, MANIFEST_FILES = 5 };

#define MANIFEST_NAME  "DONE"
#define MANIFEST_FIRST "version 2\n" // first line; version 1 had none
#define MANIFEST_TEXT  512           // most bytes
#define MANIFEST_KINDS 4

// Files of a checkpoint of a whole model and of adapters; then the same with waiting completions
static const char *const manifest_names[MANIFEST_KINDS][MANIFEST_FILES] = {
    {"model.bin", "optimizer.bin", "state.json", NULL, NULL},
    {"adapter_model.safetensors", "optimizer.bin", "state.json", "adapter_config.json", NULL},
    {"model.bin", "optimizer.bin", "state.json", "rollout.bin", NULL},
    {"adapter_model.safetensors", "optimizer.bin", "state.json", "adapter_config.json", "rollout.bin"},
};

typedef struct {
    int adapters, waits; // the row of manifest_names
    uint64_t bytes[MANIFEST_FILES], checksum[MANIFEST_FILES];
} Manifest;

// Returns the i-th file name of a manifest, or NULL after the last.
static const char *manifest_file(const Manifest *manifest, size_t i) {
    return i < MANIFEST_FILES ? manifest_names[manifest->adapters + 2 * manifest->waits][i] : NULL;
}

// Returns the index of rollout.bin in a manifest with waiting completions.
static size_t manifest_rollout(const Manifest *manifest) { return MANIFEST_CONFIG + (size_t)manifest->adapters; }

// Prints a manifest; returns the length.
static size_t manifest_text(const Manifest *manifest, char text[MANIFEST_TEXT]) {
    size_t used = sizeof(MANIFEST_FIRST) - 1;
    memcpy(text, MANIFEST_FIRST, used);
    for (size_t i = 0; manifest_file(manifest, i); i++)
        used += (size_t)snprintf(text + used, MANIFEST_TEXT - used, "%s %llu %016llx\n", manifest_file(manifest, i),
                                 (unsigned long long)manifest->bytes[i], (unsigned long long)manifest->checksum[i]);
    return used;
}

static const char manifest_is_older[] = "it has version 1, this program reads version 2";

// Reads the manifest of a checkpoint and compares the sizes of its files. Returns NULL, or what is wrong.
static const char *manifest_check(const char *checkpoint, Manifest *manifest) {
    static char fault[160];
    char path[PATH_MAX], text[MANIFEST_TEXT + 1], same[MANIFEST_TEXT];
    struct stat status;
    const char *name;
    memset(manifest, 0, sizeof(*manifest));
    path_join(path, checkpoint, MANIFEST_NAME);
    int fd = file_open(path, O_RDONLY);
    if (fd < 0) return "it has no " MANIFEST_NAME;
    ssize_t length = read(fd, text, MANIFEST_TEXT);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    for (size_t i = 0; i < 2; i++)
        if (!strncmp(text, manifest_names[i][0], strlen(manifest_names[i][0]))) return manifest_is_older;
    const char *cursor = text + strcspn(text, "\n"); // end of the line before
    manifest->adapters = *cursor && !strncmp(cursor + 1, manifest_names[1][0], strlen(manifest_names[1][0]));
    manifest->waits = strstr(text, "\nrollout.bin ") != NULL;
    for (size_t i = 0; *cursor && manifest_file(manifest, i); i++) {
        unsigned long long bytes = 0, checksum = 0;
        sscanf(cursor, "%*63s %20llu %16llx", &bytes, &checksum);
        manifest->bytes[i] = bytes, manifest->checksum[i] = checksum;
        cursor += 1 + strcspn(cursor + 1, "\n");
    }
    if (length < 0 || (size_t)length != manifest_text(manifest, same) || memcmp(text, same, (size_t)length) != 0)
        return "its " MANIFEST_NAME " is damaged"; // written back, it differs
    *fault = 0;
    for (size_t i = 0; !*fault && (name = manifest_file(manifest, i)) != NULL; i++) {
        path_join(path, checkpoint, name);
        if (stat(path, &status) != 0 || !S_ISREG(status.st_mode))
            snprintf(fault, sizeof(fault), "%s is missing", name);
        else if ((uint64_t)status.st_size != manifest->bytes[i])
            snprintf(fault, sizeof(fault), "%s has %llu bytes, not %llu", name, (unsigned long long)status.st_size,
                     (unsigned long long)manifest->bytes[i]);
    }
    return *fault ? fault : NULL;
}

// Computes the checksum of a file, a part on each rank and thread. Collective.
static uint64_t file_checksum(const InputFile *file) {
    enum { PIECE = 1 << 17 }; // bytes; fits in the cache between reading and summing
    const Range own = shard_range((size_t)file->bytes, 1, dist_ranks(), dist_rank());
    uint64_t first = 0, second = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) reduction(+ : first, second)
#endif
    for (size_t i = 0; i < (own.count + PIECE - 1) / PIECE; i++) {
        unsigned char piece[PIECE];
        const size_t at = own.begin + i * PIECE, bytes = min_size(own.begin + own.count - at, PIECE);
        Checksum sum = {{0, 0}};
        input_read(file, at, piece, bytes);
        checksum_add(&sum, at, piece, bytes);
        first += sum.sum[0], second += sum.sum[1];
    }
    Checksum sum = {{first, second}};
    checksum_join(&sum);
    return checksum_value(0, &sum, file->bytes);
}

// ---- what is there --------------------------------------------------------------------------------------------------
// Returns the largest step below `limit` of a checkpoint, complete or not, or CHECKPOINT_NONE.
static size_t checkpoint_before(const char *folder, size_t limit) {
    size_t best = CHECKPOINT_NONE;
    const struct dirent *entry;
    DIR *directory = opendir(folder);
    if (!directory) return CHECKPOINT_NONE;
    while ((entry = readdir(directory))) {
        size_t step = checkpoint_step_of(entry->d_name);
        if (step < limit && (best == CHECKPOINT_NONE || step > best)) best = step;
    }
    closedir(directory);
    return best;
}

static int checkpoint_quiet; // no notes: the folder is searched again, with notes

// Returns the newest complete checkpoint, or CHECKPOINT_NONE. Skips incomplete ones, with a note.
static size_t checkpoint_find_last(const char *folder) {
    size_t step = CHECKPOINT_NONE;
    while ((step = checkpoint_before(folder, step)) != CHECKPOINT_NONE) {
        char path[PATH_MAX];
        struct stat status;
        Manifest manifest;
        checkpoint_path(path, folder, step, "");
        const char *fault = manifest_check(path, &manifest);
        if (!fault) return step;
        if (fault == manifest_is_older)
            die("%s: %s; go on with the program that wrote it, or choose another --out", path, fault + strlen("it "));
        if (lstat(path, &status) != 0) // not stat: a dangling link exists
            step = CHECKPOINT_NONE;    // its run has removed it and saved a newer one
        else if (!checkpoint_quiet)
            note("%s is skipped: %s", path, fault);
    }
    return CHECKPOINT_NONE;
}

// Descriptor of the checkpoint folder held by this reader, so that its run does not remove it. One at a time.
static int checkpoint_held = -1;

static void checkpoint_release(void) {
    if (checkpoint_held >= 0) close(checkpoint_held);
    checkpoint_held = -1;
}

// Holds a checkpoint for reading. 0: its run is removing it.
static int checkpoint_hold(const char *checkpoint) {
    checkpoint_release();
    checkpoint_held = open(checkpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (checkpoint_held < 0) return errno != ENOENT;
    return (flock(checkpoint_held, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) &&
           path_is_file(checkpoint, checkpoint_held);
}

// ---- removing -------------------------------------------------------------------------------------------------------
// Tells whether checkpoints consist of files of this name. Other files stay, and so does their folder.
static int checkpoint_is_written_name(const char *name) {
    for (size_t i = 0; i < MANIFEST_KINDS * MANIFEST_FILES; i++) {
        const char *file = manifest_names[i / MANIFEST_FILES][i % MANIFEST_FILES];
        if (file && !strcmp(name, file)) return 1;
    }
    return !strcmp(name, MANIFEST_NAME);
}

// Removes a checkpoint, renaming it first: a kill leaves nothing under a valid name. Returns 0 if the name stays taken.
static int checkpoint_remove(const char *folder, size_t step) {
    char path[PATH_MAX], removed[PATH_MAX];
    checkpoint_path(path, folder, step, "");
    checkpoint_path(removed, folder, step, ".removed");
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const int held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (held || rename(path, removed) != 0) {
        if (!held) note("%s is no longer needed, but cannot be removed: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return 0;
    }
    if (!folder_remove(removed, fd, "", checkpoint_is_written_name))
        note("%s is no longer needed, but holds other files; remove it", removed);
    return 1;
}

// Counts complete checkpoints. prune: removes those not kept
static size_t checkpoint_count(const CheckpointFolder *folder, int prune) {
    size_t step = CHECKPOINT_NONE, complete = 0;
    while ((step = checkpoint_before(folder->path, step)) != CHECKPOINT_NONE) {
        char path[PATH_MAX];
        Manifest manifest;
        checkpoint_path(path, folder->path, step, "");
        if (manifest_check(path, &manifest)) continue;
        const int stays = ++complete <= folder->keep || step == folder->best || step == folder->good;
        if (prune && !stays) checkpoint_remove(folder->path, step);
    }
    return complete;
}

// Removes an earlier run's checkpoints, after waiting two seconds at most for a reader.
static void checkpoint_replace(const CheckpointFolder *folder) {
    size_t step = CHECKPOINT_NONE, tries = 0;
    while ((step = checkpoint_before(folder->path, CHECKPOINT_NONE)) != CHECKPOINT_NONE) {
        if (checkpoint_remove(folder->path, step)) continue;
        if (tries++ == LOCK_TRIES)
            die("%s: checkpoint %zu is in use or cannot be removed; end its reader, or choose another --out",
                folder->path, step);
        usleep(100000);
    }
}

// Deletes checkpoints that an interrupted run left half written or half removed.
static void checkpoint_clear(const char *folder) {
    const struct dirent *entry;
    DIR *directory = opendir(folder);
    if (!directory) die("%s: cannot be listed: %s", folder, strerror(errno));
    while ((entry = readdir(directory))) {
        char name[64], path[PATH_MAX];
        if ((size_t)snprintf(name, sizeof(name), "%s", entry->d_name) >= sizeof(name)) continue;
        char *suffix = strrchr(name, '.');
        if (!suffix || (strcmp(suffix, ".partial") != 0 && strcmp(suffix, ".removed") != 0)) continue;
        *suffix = 0;
        if (checkpoint_step_of(name) == CHECKPOINT_NONE) continue;
        path_join(path, folder, entry->d_name);
        const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (!folder_remove(path, fd, "", checkpoint_is_written_name))
            note("%s was left by an interrupted run and holds other files; remove it", path);
    }
    closedir(directory);
}

// ---- one at a time --------------------------------------------------------------------------------------------------
// Makes the folder to write a checkpoint into, on rank 0. *checkpoint has both of its paths.
static void checkpoint_begin(OutputFolder *checkpoint) {
    if (!folder_begin(checkpoint, MANIFEST_FILES + 1))
        die("%s: cannot be created: %s; make room or choose another --out", checkpoint->temporary, strerror(errno));
}

static void checkpoint_finish(CheckpointFolder *folder, size_t step, OutputFolder *checkpoint) {
    if (path_exists(checkpoint->path))
        checkpoint_remove(folder->path, step); // incomplete: complete ones are not written again
    folder_commit(checkpoint);
    folder->last = step;
    checkpoint_count(folder, 1);
}

// ---- opening --------------------------------------------------------------------------------------------------------
#define LOCK_NAME "lock"
#define LOCK_TEXT 64 // most bytes of the lock's file

// What a run does with its folder's contents; the first three are those of Resume (option_rows.h)
typedef enum { FOLDER_NEW, FOLDER_RESUME, FOLDER_RESUME_AUTO, FOLDER_REPLACE } FolderUse;

// Takes the lock, held until the process ends. text: what the lock's file then says: process and time, by which other
// ranks recognise the same file.
static int folder_lock(const char *folder, char text[LOCK_TEXT]) {
    char path[PATH_MAX], owner[32] = "";
    struct timespec now;
    int fd, refused, tries = 0;
    path_join(path, folder, LOCK_NAME);
    do { // again if another run removed the lock file while this one waited
        fd = file_open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
        if (fd >= 0)
            memcpy(run_pending.lock, path, sizeof(path));
        else if (errno == EEXIST)
            fd = file_open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
        if (fd < 0) die("%s: %s; choose another --out", path, file_fault());
        while ((refused = flock(fd, LOCK_EX | LOCK_NB) != 0) && errno == EWOULDBLOCK && tries++ < LOCK_TRIES)
            usleep(100000);
    } while (!refused && !path_is_file(path, fd) && !close(fd));
    if (refused) {
        ssize_t length = errno == EWOULDBLOCK ? read(fd, owner, sizeof(owner) - 1) : -1;
        owner[strspn(owner, "0123456789")] = 0;
        if (length >= 0)
            die("%s: another run (process %s) is writing there; wait for it or choose another --out", folder,
                *owner ? owner : "unknown");
        note("%s: cannot be locked: %s; make sure that no other run writes there", path, strerror(errno));
    }
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(text, LOCK_TEXT, "%ld %lld.%09ld\n", (long)getpid(), (long long)now.tv_sec, now.tv_nsec);
    if ((ftruncate(fd, 0) != 0 || pwrite(fd, text, strlen(text), 0) < (ssize_t)strlen(text) || fsync(fd) != 0) &&
        dist_ranks() > 1) // one process needs it only for the message above
        die("%s: cannot be written: %s; free some space or choose another --out", path, strerror(errno));
    return fd;
}

// Ends the program if a rank's folder is not that of rank 0, whose lock says `text`.
static void folder_check_shared(const char *folder, const char *text) {
    char path[PATH_MAX], found[LOCK_TEXT] = "";
    path_join(path, folder, LOCK_NAME);
    int fd = file_open(path, O_RDONLY);
    if (fd < 0 || read(fd, found, sizeof(found) - 1) < 0 || strcmp(found, text) != 0)
        die("%s: is another folder here than on rank 0 on %s; all ranks write to --out, so give one on a file "
            "system that all machines share",
            folder, dist_host(0));
    close(fd);
}

// Refuses --resume of a folder that holds no run, so that a mistyped name begins none.
static void checkpoint_check_run(const char *folder) {
    static const char *const names[] = {RECORDS_NAME, LOCK_NAME};
    char path[PATH_MAX];
    for (size_t i = 0; i < 2; i++) {
        path_join(path, folder, names[i]);
        if (path_exists(path)) return;
    }
    if (checkpoint_before(folder, CHECKPOINT_NONE) == CHECKPOINT_NONE)
        die("--resume: %s %s; check --out, or leave --resume out to begin a run there", folder,
            path_exists(folder) ? "is not the folder of a run" : "does not exist");
}

// Tells whether a log holds a finished step.
static int records_have_step(const char *path) {
    int found = 0;
    char *line = NULL;
    size_t room = 0;
    const int fd = file_open(path, O_RDONLY);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    while (file && !found && getline(&line, &room, file) > 0)
        found = !strncmp(line, "{\"step\": ", 9) && strstr(line, "\"loss\": ") != NULL;
    free(line);
    if (file) fclose(file);
    return found;
}

// Makes the folder, takes the lock, removes leftovers of an interrupted run. A new run needs it free of checkpoints and
// of finished steps in the log. Then folder->last is the step to resume from. If the program ends before run_began, it
// removes the folder and the lock that this made. Collective.
static void checkpoint_open(CheckpointFolder *folder, const char *path, size_t keep, FolderUse use) {
    char lock[LOCK_TEXT] = "", records[PATH_MAX];
    memset(folder, 0, sizeof(*folder));
    signals_prepare();
    folder->keep = keep, folder->lock = -1;
    if (snprintf(folder->path, sizeof(folder->path), "%s", path) >= PATH_MAX - 64)
        die("%.200s...: this path is too long for --out", path);
    if (dist_rank() == 0) {
        if (use == FOLDER_RESUME) checkpoint_check_run(path);
        run_pending.there = make_folder(path);
        memcpy(run_pending.folder, folder->path, sizeof(folder->path));
        folder->lock = folder_lock(path, lock);
        checkpoint_clear(path);
        folder->last = checkpoint_find_last(path);
        if (use == FOLDER_NEW && folder->last != CHECKPOINT_NONE)
            die("%s: holds a run at step %zu; go on with --resume, replace it with --overwrite, or choose another "
                "--out",
                path, folder->last);
        path_join(records, path, RECORDS_NAME);
        if (use == FOLDER_NEW && records_have_step(records))
            die("%s: holds an earlier run without a checkpoint; replace it with --overwrite, or choose another --out",
                records);
        if (use == FOLDER_REPLACE) folder->replaces = 1, folder->last = CHECKPOINT_NONE;
    }
    dist_broadcast(RANKS_ALL, lock, sizeof(lock), 0);
    dist_broadcast(RANKS_ALL, &folder->last, sizeof(folder->last), 0);
    if (dist_rank() != 0) folder_check_shared(path, lock);
}

// Makes the folder again if it was removed; rank 0. Returns 1 if it did.
static int checkpoint_remake(CheckpointFolder *folder) {
    char path[PATH_MAX], text[LOCK_TEXT];
    path_join(path, folder->path, LOCK_NAME);
    if (folder->lock < 0 || path_is_file(path, folder->lock)) return 0;
    note("%s: was removed; it is made again", folder->path);
    make_folder(folder->path);
    close(folder->lock);
    folder->lock = folder_lock(folder->path, text);
    run_began();
    return 1;
}

static void checkpoint_close(CheckpointFolder *folder) {
    if (folder->lock >= 0) close(folder->lock);
    folder->lock = -1;
}

// ---- paths of users -------------------------------------------------------------------------------------------------
/*
--model and --adapter also take the folder of a run (--out of train), meaning its last complete checkpoint, or a
checkpoint, meaning its model.bin or adapters; it is held until checkpoint_release. A folder with a config.json is a
Hugging Face model, whatever else it holds. A hub name such as Qwen/Qwen3-0.6B means its snapshot in Hugging Face's
cache, unless a path of that name exists.
*/
// Finds Hugging Face's model cache: $HF_HUB_CACHE, or else hub/ in $HF_HOME.
static void hub_cache(char cache[PATH_MAX]) {
    static const char *const places[][2] = {{"HF_HUB_CACHE", ""},
                                            {"HUGGINGFACE_HUB_CACHE", ""},
                                            {"HF_HOME", "/hub"},
                                            {"XDG_CACHE_HOME", "/huggingface/hub"},
                                            {"HOME", "/.cache/huggingface/hub"}};
    *cache = 0;
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !*cache; i++) {
        const char *place = getenv(places[i][0]);
        if (place && *place) snprintf(cache, PATH_MAX, "%s%s", place, places[i][1]);
    }
}

static const char hub_letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";

static int hub_is_name(const char *path) {
    const size_t owner = strspn(path, hub_letters), name = path[owner] ? strspn(path + owner + 1, hub_letters) : 0;
    return owner && name && *path != '.' && path[owner] == '/' && !path[owner + 1 + name] &&
           !text_ends_with(path, ".bin");
}

// Finds the cached snapshot of a hub name. 0: there is none.
static int hub_snapshot(const char *path, char found[PATH_MAX]) {
    char cache[PATH_MAX], reference[PATH_MAX], commit[65] = "";
    if (!hub_is_name(path)) return 0;
    const size_t owner = strcspn(path, "/");
    hub_cache(cache);
    snprintf(found, PATH_MAX, "%.1024s/models--%.*s--%s", cache, (int)owner, path, path + owner + 1);
    snprintf(reference, PATH_MAX, "%.2048s/refs/main", found);
    const int fd = file_open(reference, O_RDONLY), known = fd >= 0 && read(fd, commit, sizeof(commit) - 1) > 0;
    if (fd >= 0) close(fd);
    commit[strspn(commit, hub_letters)] = 0;
    snprintf(found + strlen(found), PATH_MAX - strlen(found), "/snapshots/%s", commit);
    return known && path_is_directory(found);
}

// Returns `path`, or the snapshot that it names, in `found`; notes it unless `quiet`. option: "--model"
static const char *hub_path_find(const char *option, const char *path, char found[PATH_MAX], int quiet) {
    if (!path || path_exists(path) || !hub_is_name(path)) return path;
    if (!hub_snapshot(path, found))
        die("%s %s: %s, nor is it in Hugging Face's cache; type: hf download %s --local-dir %s", option, path,
            strerror(ENOENT), path, strchr(path, '/') + 1);
    if (!quiet) note("%s %s: using %s", option, path, found);
    return found;
}

// Finds the complete checkpoint of a run's folder, or a checkpoint, and its manifest. 0: `path` is neither.
static int checkpoint_at_path(const char *path, char checkpoint[PATH_MAX], Manifest *manifest) {
    char model[PATH_MAX], done[PATH_MAX];
    const char *fault;
    int tries = 0;
    path_join(model, path, manifest_names[0][MANIFEST_MODEL]);
    path_join(done, path, MANIFEST_NAME);
    if (path_exists(model) || path_exists(done)) {
        fault = manifest_check(path, manifest);
        if (fault) die("%s: is not a complete checkpoint: %s; give another one, or the run's folder", path, fault);
        snprintf(checkpoint, PATH_MAX, "%s", path);
        checkpoint_hold(checkpoint);
        return 1;
    }
    if (checkpoint_before(path, CHECKPOINT_NONE) == CHECKPOINT_NONE) return 0;
    do {
        size_t last = checkpoint_find_last(path);
        if (last == CHECKPOINT_NONE)
            die("%s: is the folder of a run, but none of its checkpoints is complete; go on with --resume", path);
        checkpoint_path(checkpoint, path, last, "");
        if (tries == LOCK_TRIES)
            die("%s: is locked by another process, perhaps a run that removes it; end it, or give another checkpoint",
                checkpoint);
        if (tries++) usleep(100000);
    } while (!checkpoint_hold(checkpoint) || manifest_check(checkpoint, manifest));
    return 1;
}

// Ends the program if a file of the checkpoint differs from its checksum in the manifest; skips the optimizer and
// rollout.bin. Collective.
static void checkpoint_verify(const char *checkpoint, const Manifest *manifest) {
    static const size_t read[] = {MANIFEST_MODEL, MANIFEST_STATE, MANIFEST_CONFIG};
    dist_check("checkpoint", manifest->checksum[MANIFEST_STATE]); // its run may have saved a newer one meanwhile
    for (size_t i = 0; i < 2 + (size_t)manifest->adapters; i++) {
        char path[PATH_MAX];
        path_join(path, checkpoint, manifest_file(manifest, read[i]));
        InputFile file = input_open(path);
        const uint64_t found = file_checksum(&file), wanted = manifest->checksum[read[i]];
        input_close(&file);
        if (found != wanted)
            die("%s: is damaged: its checksum is %016llx, " MANIFEST_NAME " says %016llx; give an earlier checkpoint, "
                "or remove %s and go on with --resume",
                path, (unsigned long long)found, (unsigned long long)wanted, checkpoint);
    }
}

// Returns `path`, or the model that it means, in `found`; notes it unless `quiet`. verify: compares checksums,
// collective
static const char *model_path_find(const char *path, char found[PATH_MAX], int quiet, int verify) {
    char checkpoint[PATH_MAX], part[PATH_MAX];
    Manifest manifest;
    if (!path_is_directory(path)) {
        folder_above(checkpoint, path);
        const int named = !strcmp(path_last(path), manifest_names[0][MANIFEST_MODEL]); // a checkpoint's
        if (verify && named && !manifest_check(checkpoint, &manifest)) checkpoint_verify(checkpoint, &manifest);
        return path;
    }
    path_join(part, path, "config.json");
    if (path_exists(part)) return path;
    if (!checkpoint_at_path(path, checkpoint, &manifest)) return path;
    if (manifest.adapters) die("--model %s: holds adapters, not a model; give it with --adapter", path);
    if (verify) checkpoint_verify(checkpoint, &manifest);
    path_join(found, checkpoint, manifest_names[0][MANIFEST_MODEL]);
    if (!quiet) note("--model %s: using %s", path, found);
    return found;
}

// Finds the folder of adapters that --adapter names.
static const char *adapter_path_find(const char *path, char found[PATH_MAX], int quiet) {
    char part[PATH_MAX];
    Manifest manifest;
    if (!path_is_directory(path))
        die("--adapter %s: %s; give the folder that adapter_config.json is in", path,
            path_exists(path) ? "is a file" : strerror(errno));
    path_join(part, path, manifest_names[1][MANIFEST_CONFIG]);
    if (!checkpoint_at_path(path, found, &manifest)) {
        if (path_exists(part)) return path;
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
