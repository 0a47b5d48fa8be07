/*
The folder of checkpoints, not their contents: which checkpoints are complete, how a checkpoint is begun and finished,
which old ones are removed, the lock, the run that a new run replaces. A complete checkpoint has its step in its name,
checkpoint-00000100, and holds a manifest: the file DONE with the sizes and checksums of the other files.
checkpoint-*.partial is being written and checkpoint-*.removed is being deleted; the next run that opens the folder
removes both. All ranks must see the same folder. Only rank 0 creates and removes files; the other ranks write into
files that rank 0 made.

An error that hides whether a checkpoint is there or complete (EIO, EACCES, EMFILE) ends the program. It never counts as
"there is none".
*/
#ifndef LLMC_CHECKPOINT_FOLDER_H
#define LLMC_CHECKPOINT_FOLDER_H
#include "llmc/base/output.h"
#include "llmc/ranks/dist.h"
#include "llmc/tokenizer/tokenizer_file.h"

#define CHECKPOINT_NONE SIZE_MAX    // step that stands for "no checkpoint"
#define LOCK_TRIES      20          // 0.1 s apart: readers, and ranks of an ended job, soon release the lock
#define RECORDS_NAME    "log.jsonl" // written by log.h

typedef struct {
    char path[PATH_MAX];
    size_t keep;  // how many of the newest complete checkpoints are kept
    size_t best;  // step of the best checkpoint by validation, also kept; 0: none
    size_t good;  // step of the last checkpoint before the run may have diverged (llmc/train/log.h), also kept; 0: none
    size_t last;  // step of the newest complete checkpoint, or CHECKPOINT_NONE
    int replaces; // 1: an earlier run exists, which checkpoint_replace sets aside
    uint64_t old; // bytes of the replaced run's checkpoints, until the first checkpoint of the new run is complete
    int lock;     // descriptor of the lock file, held until the process ends; -1: no lock
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
#define MANIFEST_FIRST "version 2\n" // first line; version 1 had no such line
#define MANIFEST_TEXT  512           // most bytes of a manifest
#define MANIFEST_KINDS 4

// Rows: a whole model, adapters, and both again with waiting completions (rollout.bin)
static const char *const manifest_names[MANIFEST_KINDS][MANIFEST_FILES] = {
    {"model.bin", "optimizer.bin", "state.json", NULL, NULL},
    {"adapter_model.safetensors", "optimizer.bin", "state.json", "adapter_config.json", NULL},
    {"model.bin", "optimizer.bin", "state.json", "rollout.bin", NULL},
    {"adapter_model.safetensors", "optimizer.bin", "state.json", "adapter_config.json", "rollout.bin"},
};

typedef enum {
    MANIFEST_WHOLE,
    MANIFEST_INCOMPLETE, // DONE is absent, empty or torn
    MANIFEST_DAMAGED,    // a file is missing or has another size
    MANIFEST_OLDER,      // written by version 1
    MANIFEST_UNKNOWN     // an error hides the manifest
} ManifestState;

typedef struct {
    int adapters, waits; // choose the row of manifest_names
    uint64_t bytes[MANIFEST_FILES], checksum[MANIFEST_FILES];
    ManifestState state;
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

// Sets the state of a manifest and returns what is wrong, as text.
__attribute__((format(printf, 3, 4))) static const char *manifest_fault(Manifest *manifest, ManifestState state,
                                                                        const char *format, ...) {
    static char fault[160];
    va_list args;
    va_start(args, format);
    vsnprintf(fault, sizeof(fault), format, args);
    va_end(args);
    manifest->state = state;
    return fault;
}

// Reads the manifest of a checkpoint and compares the sizes of its files. Returns NULL, or what is wrong as text;
// manifest->state tells which kind of fault.
static const char *manifest_check(const char *checkpoint, Manifest *manifest) {
    char path[PATH_MAX], text[MANIFEST_TEXT + 1], same[MANIFEST_TEXT];
    struct stat status;
    const char *name;
    ssize_t length = -1;
    memset(manifest, 0, sizeof(*manifest));
    path_join(path, checkpoint, MANIFEST_NAME);
    int fd = file_open(path, O_RDONLY);
    if (fd < 0 && error_is_absence(errno))
        return manifest_fault(manifest, MANIFEST_INCOMPLETE, "it has no " MANIFEST_NAME);
    while (fd >= 0 && (length = read(fd, text, MANIFEST_TEXT)) < 0 && errno == EINTR) continue;
    const int error = errno;
    if (fd >= 0) close(fd);
    if (length < 0) return manifest_fault(manifest, MANIFEST_UNKNOWN, MANIFEST_NAME ": %s", error_text(error));
    text[length] = 0;
    for (size_t i = 0; i < 2; i++)
        if (!strncmp(text, manifest_names[i][0], strlen(manifest_names[i][0])))
            return manifest_fault(manifest, MANIFEST_OLDER, "it has version 1, but this program reads version 2");
    const char *cursor = text + strcspn(text, "\n"); // at the end of the previous line
    manifest->adapters = *cursor && !strncmp(cursor + 1, manifest_names[1][0], strlen(manifest_names[1][0]));
    manifest->waits = strstr(text, "\nrollout.bin ") != NULL;
    for (size_t i = 0; *cursor && manifest_file(manifest, i); i++) {
        unsigned long long bytes = 0, checksum = 0;
        sscanf(cursor, "%*63s %20llu %16llx", &bytes, &checksum);
        manifest->bytes[i] = bytes, manifest->checksum[i] = checksum;
        cursor += 1 + strcspn(cursor + 1, "\n");
    }
    // The file must equal the text that manifest_text prints from the parsed values.
    if ((size_t)length != manifest_text(manifest, same) || memcmp(text, same, (size_t)length) != 0)
        return manifest_fault(manifest, MANIFEST_INCOMPLETE, "its " MANIFEST_NAME " is damaged");
    for (size_t i = 0; (name = manifest_file(manifest, i)) != NULL; i++) {
        int failed;
        path_join(path, checkpoint, name);
        while ((failed = stat(path, &status)) != 0 && errno == EINTR) continue;
        if (failed && !error_is_absence(errno))
            return manifest_fault(manifest, MANIFEST_UNKNOWN, "%s: %s", name, error_text(errno));
        if (failed || !S_ISREG(status.st_mode))
            return manifest_fault(manifest, MANIFEST_DAMAGED, "%s is missing", name);
        if ((uint64_t)status.st_size != manifest->bytes[i])
            return manifest_fault(manifest, MANIFEST_DAMAGED, "%s has %llu bytes, but should have %llu", name,
                                  (unsigned long long)status.st_size, (unsigned long long)manifest->bytes[i]);
    }
    return NULL;
}

// Reads and checks a manifest like manifest_check, but ends the program if an error hides its state.
static const char *manifest_read(const char *checkpoint, Manifest *manifest) {
    const char *fault = manifest_check(checkpoint, manifest);
    if (fault && manifest->state == MANIFEST_UNKNOWN)
        die("%s: cannot be read: %s; nothing was changed; check its permissions and try again", checkpoint, fault);
    return fault;
}

// Computes the checksum of a file, one part on each rank and thread. Collective.
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

// Returns the name of a file whose checksum differs from the manifest's, or NULL. all: compares every file; else skips
// the optimizer and rollout.bin. Collective.
static const char *manifest_compare(const char *checkpoint, const Manifest *manifest, int all) {
    for (size_t i = 0; manifest_file(manifest, i); i++) {
        char path[PATH_MAX];
        if (!all && (i == MANIFEST_OPTIMIZER || (manifest->waits && i == manifest_rollout(manifest)))) continue;
        path_join(path, checkpoint, manifest_file(manifest, i));
        InputFile file = input_open(path);
        const uint64_t found = file_checksum(&file);
        input_close(&file);
        if (found != manifest->checksum[i]) return manifest_file(manifest, i);
    }
    return NULL;
}

// ---- which checkpoints there are ------------------------------------------------------------------------------------
// Returns the largest step below `limit` of a checkpoint, complete or not, or CHECKPOINT_NONE.
static size_t checkpoint_before(const char *folder, size_t limit) {
    size_t best = CHECKPOINT_NONE;
    const struct dirent *entry;
    DIR *directory = folder_list(folder);
    if (!directory && error_is_absence(errno)) return CHECKPOINT_NONE;
    while (directory && (entry = folder_next(directory))) {
        size_t step = checkpoint_step_of(entry->d_name);
        if (step < limit && (best == CHECKPOINT_NONE || step > best)) best = step;
    }
    if (errno)
        die("%s: its checkpoints cannot be listed: %s; check the folder's permissions", folder, error_text(errno));
    closedir(directory);
    return best;
}

static int checkpoint_quiet; // 1: prints no notes; the folder is searched again, with notes

// Returns the newest complete checkpoint below step `limit`, or CHECKPOINT_NONE. Skips incomplete checkpoints with a
// note. Skips damaged ones too, unless refuses is 1.
static size_t checkpoint_find(const char *folder, size_t limit, int refuses) {
    size_t step = limit;
    while ((step = checkpoint_before(folder, step)) != CHECKPOINT_NONE) {
        char path[PATH_MAX];
        struct stat status;
        Manifest manifest;
        checkpoint_path(path, folder, step, "");
        const char *fault = manifest_read(path, &manifest);
        if (!fault) return step;
        if (lstat(path, &status) != 0 && errno == ENOENT) { // not stat: a dangling link exists too
            step = limit; // the run has removed this checkpoint and saved a newer checkpoint
            continue;
        }
        if (manifest.state == MANIFEST_OLDER)
            die("%s: %s; continue with the version that wrote it, or choose another --out", path,
                fault + strlen("it "));
        if (manifest.state == MANIFEST_DAMAGED && refuses)
            die("%s: is damaged: %s; restore it, or give --resume auto, which takes the checkpoint before it", path,
                fault);
        if (!checkpoint_quiet)
            note("%s is skipped: %s%s", path, manifest.state == MANIFEST_DAMAGED ? "it is damaged: " : "", fault);
    }
    return CHECKPOINT_NONE;
}

// ---- removing -------------------------------------------------------------------------------------------------------
// Tells whether a checkpoint may contain a file of this name. Files of other names, and a folder that holds them, are
// never removed.
static int checkpoint_is_written_name(const char *name) {
    for (size_t i = 0; i < MANIFEST_KINDS * MANIFEST_FILES; i++) {
        const char *file = manifest_names[i / MANIFEST_FILES][i % MANIFEST_FILES];
        if (file && !strcmp(name, file)) return 1;
    }
    return !strcmp(name, MANIFEST_NAME);
}

// Removes a checkpoint. Renames it to *.removed in `folder` first, so that a kill leaves no half-removed checkpoint
// under a valid name. Returns 0 if the name stays taken.
static int checkpoint_remove_from(const char *from, const char *folder, size_t step) {
    char path[PATH_MAX], removed[PATH_MAX];
    checkpoint_path(path, from, step, "");
    checkpoint_path(removed, folder, step, ".removed");
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    const int held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (held || rename(path, removed) != 0) {
        if (!held) note("%s is no longer needed, but cannot be removed: %s; remove it", path, error_text(errno));
        if (fd >= 0) close(fd);
        return 0;
    }
    if (!folder_remove(removed, fd, "", checkpoint_is_written_name))
        note("%s is no longer needed, but holds other files; remove it", removed);
    return 1;
}

static int checkpoint_remove(const char *folder, size_t step) { return checkpoint_remove_from(folder, folder, step); }

// Returns the number of checkpoints up to folder->last; damaged checkpoints may follow it.
static size_t checkpoint_count(const CheckpointFolder *folder) {
    size_t step = folder->last == CHECKPOINT_NONE ? CHECKPOINT_NONE : folder->last + 1, count = 0;
    while ((step = checkpoint_before(folder->path, step)) != CHECKPOINT_NONE) count++;
    return count;
}

// Returns the bytes of all checkpoints in a folder.
static uint64_t checkpoints_bytes(const char *folder) {
    size_t step = CHECKPOINT_NONE;
    uint64_t bytes = 0;
    while ((step = checkpoint_before(folder, step)) != CHECKPOINT_NONE) {
        char path[PATH_MAX];
        Manifest manifest;
        checkpoint_path(path, folder, step, "");
        manifest_check(path, &manifest);
        for (size_t i = 0; i < MANIFEST_FILES; i++) bytes += manifest.bytes[i];
    }
    return bytes;
}

// Removes the complete checkpoints before the last one, except the kept ones.
static void checkpoint_prune(const CheckpointFolder *folder) {
    size_t step = folder->last + 1, complete = 0;
    while ((step = checkpoint_before(folder->path, step)) != CHECKPOINT_NONE) {
        char path[PATH_MAX];
        Manifest manifest;
        checkpoint_path(path, folder->path, step, "");
        if (manifest_check(path, &manifest)) continue;
        const int stays = ++complete <= folder->keep || step == folder->best || step == folder->good;
        if (!stays) checkpoint_remove(folder->path, step);
    }
}

// Deletes checkpoints that an interrupted run left half written or half removed.
static void checkpoint_clear(const char *folder) {
    const struct dirent *entry;
    DIR *directory = folder_list(folder);
    if (!directory) die("%s: cannot be listed: %s; check its permissions", folder, error_text(errno));
    while ((entry = folder_next(directory))) {
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

// ---- a run that another one replaces --------------------------------------------------------------------------------
/*
--overwrite moves the run in --out into a folder within it. The old run is put back if the new run ends before its first
checkpoint is complete; after kill -9 the next command that opens --out puts it back. The name of the folder tells what
a killed process was doing:

    REPLACED_MOVES   moving the old run, in either direction: the old run is put back
    REPLACED_NAME    the new run has begun: if it has a complete checkpoint, the old run is removed, else put back
*/
#define REPLACED_NAME  "replaced-by-overwrite"
#define REPLACED_MOVES REPLACED_NAME ".partial"

static struct {
    DIR *out, *files; // --out, and the old run's folder in it; NULL: not opened
    int there, begun; // 1: `files` holds the old run; 1: its name is REPLACED_NAME, not REPLACED_MOVES
    pid_t process;    // the process that opened it
} replaced;

// Tells whether runs write a file of this name next to their checkpoints: log.jsonl, tokenizer.tok, rollouts-3.1.jsonl,
// environment-3.jsonl
static int is_run_file(const char *name) {
    size_t used = strspn(name, "abcdefghijklmnopqrstuvwxyz");
    if (text_is_one_of(name, RECORDS_NAME "|" TOKENIZER_NAME "|" TEMPLATE_NAME)) return 1;
    if (strncmp(name, "rollouts", max_size(used, 8)) != 0 && strncmp(name, "environment", max_size(used, 11)) != 0)
        return 0;
    if (name[used] == '-') used += 1 + strspn(name + used + 1, "0123456789");
    return text_is_one_of(name + used, ".jsonl|.1.jsonl");
}

// Moves a run's files between two open folders; to NULL: deletes them, except checkpoints. Returns 0 if a file cannot
// be moved; errno is EBUSY if a reader holds it. Uses only system calls, because signal handlers call it: readdir
// allocates nothing.
static int replaced_move(DIR *from, DIR *to, int asks_readers) {
    const struct dirent *entry;
    for (int moved = 1; moved;) { // a folder that changes may be listed in part, so list it again
        moved = 0;
        rewinddir(from);
        while ((entry = folder_next(from))) {
            const char *name = entry->d_name;
            const int checkpoint = to && checkpoint_step_of(name) != CHECKPOINT_NONE;
            if (!checkpoint && !is_run_file(name)) continue;
            int fd = checkpoint && asks_readers ? openat(dirfd(from), name, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
            int failed = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK ? EBUSY : 0;
            if (!failed && (to ? renameat(dirfd(from), name, dirfd(to), name) : unlinkat(dirfd(from), name, 0)))
                failed = errno;
            if (fd >= 0) close(fd);
            errno = failed;
            if (failed) return 0;
            moved = 1;
        }
        if (errno) return 0;
    }
    return 1;
}

// Puts the old run back, unless the new run has a checkpoint. Uses only system calls. Returns 0 if the old run is not
// put back; the next command decides again.
static int replaced_restore(void) {
    const struct dirent *entry;
    if (!replaced.there || replaced.process != getpid()) return 1; // a forked child leaves the folder alone
    const int out = dirfd(replaced.out);
    replaced.there = 0;
    rewinddir(replaced.out);
    while (replaced.begun && (entry = folder_next(replaced.out)))
        if (checkpoint_step_of(entry->d_name) != CHECKPOINT_NONE) return errno = EBUSY, 0;
    if (replaced.begun && (!replaced_move(replaced.out, NULL, 0) || // delete the new run's files first
                           renameat(out, REPLACED_NAME, out, REPLACED_MOVES) != 0))
        return 0;
    if (!replaced_move(replaced.files, replaced.out, 0)) return 0;
    fsync(out);
    return unlinkat(out, REPLACED_MOVES, AT_REMOVEDIR) == 0;
}

// Opens the folder of a replaced run. If the program ends after this, the replaced run is put back.
static void replaced_open(const char *folder, const char *name) {
    char path[PATH_MAX];
    path_join(path, folder, name);
    if (replaced.out) closedir(replaced.out);
    if (replaced.files) closedir(replaced.files);
    replaced.out = folder_list(folder), replaced.files = folder_list(path);
    if (!replaced.out || !replaced.files)
        die("%s: cannot be listed: %s; check its permissions and try again", path, error_text(errno));
    replaced.there = 1, replaced.begun = !strcmp(name, REPLACED_NAME), replaced.process = getpid();
    run_put_back = replaced_restore;
}

// Removes the old run; each checkpoint is first renamed to checkpoint-*.removed. Files that a reader holds stay until
// the next save or command.
static void replaced_remove(const char *folder) {
    char from[PATH_MAX];
    size_t step = CHECKPOINT_NONE;
    if (!replaced.there) return;
    path_join(from, folder, REPLACED_NAME);
    run_put_back = NULL;
    while ((step = checkpoint_before(from, step)) != CHECKPOINT_NONE) checkpoint_remove_from(from, folder, step);
    replaced.there = !replaced_move(replaced.files, NULL, 0) || rmdir(from) != 0;
}

// Tells whether a folder holds a replaced run. *name: name of the subfolder that holds the replaced run
static int replaced_is_there(const char *folder, const char **name) {
    static const char *const names[] = {REPLACED_MOVES, REPLACED_NAME};
    char path[PATH_MAX];
    for (size_t i = 0; i < 2; i++) {
        path_join(path, folder, *name = names[i]);
        if (path_is_directory(path)) return 1;
    }
    return 0;
}

// Ends what an interrupted --overwrite began: removes the old run or puts it back. The caller holds the lock.
static void replaced_settle(const char *folder) {
    const char *name;
    size_t step = CHECKPOINT_NONE;
    if (!replaced_is_there(folder, &name)) return;
    const int begun = !strcmp(name, REPLACED_NAME);
    const int whole = begun && checkpoint_find(folder, CHECKPOINT_NONE, 0) != CHECKPOINT_NONE;
    while (begun && !whole && (step = checkpoint_before(folder, step)) != CHECKPOINT_NONE)
        checkpoint_remove(folder, step); // incomplete checkpoints of the new run
    replaced_open(folder, name);
    if (whole) {
        replaced_remove(folder);
        return;
    }
    if (!replaced_restore())
        die("%s/%s: the run in it cannot be put back: %s; check the folder's permissions and try again", folder, name,
            error_text(errno));
    note("%s: the run that an interrupted --overwrite had set aside is put back", folder);
}

// Moves the old run's files aside (--overwrite), so that a new run can begin. Waits at most two seconds for readers of
// its checkpoints. Call on rank 0.
static void checkpoint_replace(CheckpointFolder *folder) {
    char moves[PATH_MAX], path[PATH_MAX];
    int tries = 0;
    path_join(moves, folder->path, REPLACED_MOVES);
    if (path_found(path, folder->path, REPLACED_NAME))
        die("%s: holds files of an earlier run; remove it, or choose another --out", path);
    if (mkdir(moves, 0777) != 0)
        die("%s: cannot be created: %s; make room or choose another --out", moves, error_text(errno));
    replaced_open(folder->path, REPLACED_MOVES);
    while (!replaced_move(replaced.out, replaced.files, 1)) {
        if (errno != EBUSY || tries++ == LOCK_TRIES)
            die("%s: the run in it cannot be set aside: %s; end what reads it, or choose another --out", folder->path,
                error_text(errno));
        usleep(100000);
    }
    if (rename(moves, path) != 0)
        die("%s: cannot be renamed to %s: %s; check the permissions of the folder", moves, path, error_text(errno));
    replaced.begun = 1;
    sync_folder_of(path);
}

// ---- one at a time --------------------------------------------------------------------------------------------------
// Makes the folder of a new checkpoint, on rank 0. Fills *checkpoint with the temporary path and the final path.
static void checkpoint_begin(OutputFolder *checkpoint) {
    if (!folder_begin(checkpoint, MANIFEST_FILES + 1))
        die("%s: cannot be created: %s; make room or choose another --out", checkpoint->temporary, error_text(errno));
}

static void checkpoint_finish(CheckpointFolder *folder, size_t step, OutputFolder *checkpoint) {
    if (path_exists(checkpoint->path))
        checkpoint_remove(folder->path, step); // an incomplete checkpoint; complete ones are not written again
    folder_commit(checkpoint);
    folder->last = step;
    checkpoint_prune(folder);
    replaced_remove(folder->path);
    folder->old = 0;
}

// ---- opening --------------------------------------------------------------------------------------------------------
#define LOCK_NAME "lock"
#define LOCK_TEXT 320 // most bytes of the lock file

// Use that a run makes of the contents of its folder. The first three values equal the values of Resume
// (option_rows.h).
typedef enum { FOLDER_NEW, FOLDER_RESUME, FOLDER_RESUME_AUTO, FOLDER_REPLACE } FolderUse;

// Refuses a folder whose lock another run holds. fd: the open lock file, which names the other run; closed here
__attribute__((noreturn)) static void folder_refuse(const char *folder, int fd) {
    char owner[LOCK_TEXT] = "", host[256] = "", here[256] = "";
    long process = 0;
    const ssize_t length = pread(fd, owner, sizeof(owner) - 1, 0);
    close(fd);
    if (length > 0) sscanf(owner, "%ld %*s %255s", &process, host);
    gethostname(here, sizeof(here) - 1);
    const int ended = process && !strcmp(host, here) && kill((pid_t)process, 0) != 0 && errno == ESRCH;
    if (ended)
        die("%s: ranks of process %ld, which has ended, are still writing there; end them (ps shows them)", folder,
            process);
    die("%s: another run (process %ld%s%s) is writing there; wait for it or choose another --out", folder, process,
        strcmp(host, here) ? " on " : "", strcmp(host, here) ? host : "");
}

// Takes the lock until the process ends; the other ranks share it (folder_share_lock). text: what the lock file then
// contains: process, time and host. Other ranks recognise the file by this text.
static int folder_lock(const char *folder, char text[LOCK_TEXT]) {
    char path[PATH_MAX], host[256] = "";
    struct timespec now;
    int fd, refused, tries = 0;
    path_join(path, folder, LOCK_NAME);
    do { // try again if another run removed the lock file while this run waited
        fd = file_open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
        if (fd >= 0)
            memcpy(run_pending.lock, path, sizeof(path));
        else if (errno == EEXIST)
            fd = file_open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
        if (fd < 0) die("%s: %s; choose another --out", path, file_fault());
        while ((refused = flock(fd, LOCK_EX | LOCK_NB) != 0) &&
               (errno == EINTR || (errno == EWOULDBLOCK && tries++ < LOCK_TRIES)))
            usleep(100000);
    } while (!refused && !path_is_file(path, fd) && tries++ < LOCK_TRIES && !close(fd));
    if (refused && errno == EWOULDBLOCK) folder_refuse(folder, fd);
    if (refused) note("%s: cannot be locked: %s; make sure that no other run writes there", path, error_text(errno));
    clock_gettime(CLOCK_REALTIME, &now);
    gethostname(host, sizeof(host) - 1);
    snprintf(text, LOCK_TEXT, "%ld %lld.%09ld %s\n", (long)getpid(), (long long)now.tv_sec, now.tv_nsec, host);
    if ((ftruncate(fd, 0) != 0 || pwrite(fd, text, strlen(text), 0) < (ssize_t)strlen(text) || fsync(fd) != 0) &&
        dist_ranks() > 1) // a single process needs the text only for the message of folder_refuse
        die("%s: cannot be written: %s; free some space or choose another --out", path, error_text(errno));
    // If other ranks outlive this rank, their share of the lock keeps the next run away.
    if (dist_ranks() > 1 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) folder_refuse(folder, fd);
    return fd;
}

// Takes a rank's share of the lock. text: what rank 0 wrote into the lock file; the program ends if the file now holds
// another text
static int folder_share_lock(const char *folder, const char *text) {
    char path[PATH_MAX], found[LOCK_TEXT] = "";
    path_join(path, folder, LOCK_NAME);
    const int fd = file_open(path, O_RDONLY);
    if (fd < 0 && !error_is_absence(errno)) die("%s: %s", path, file_fault());
    if (fd < 0 || read(fd, found, sizeof(found) - 1) < 0 || strcmp(found, text) != 0)
        die("%s: is another folder here than on rank 0 on %s; all ranks write to --out, so give one on a file "
            "system that all machines share",
            folder, dist_host(0));
    flock(fd, LOCK_SH | LOCK_NB); // a file system without locks refuses; continue
    return fd;
}

// Refuses --resume of a folder that holds no run, so that a mistyped name begins no new run.
static void checkpoint_check_run(const char *folder) {
    static const char *const names[] = {RECORDS_NAME, LOCK_NAME};
    for (size_t i = 0; i < 2; i++)
        if (folder_has(folder, names[i])) return;
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
    if (!file && errno != ENOENT) die("%s: %s", path, file_fault());
    while (file && !found && getline(&line, &room, file) > 0)
        found = !strncmp(line, "{\"step\": ", 9) && strstr(line, "\"loss\": ") != NULL;
    if (file && !found && !feof(file)) die("%s: cannot be read: %s; check its permissions", path, error_text(errno));
    free(line);
    if (file) fclose(file);
    return found;
}

// Refuses a new run in a folder that holds a run.
static void checkpoint_refuse_run(const char *folder) {
    char records[PATH_MAX];
    const size_t newest = checkpoint_before(folder, CHECKPOINT_NONE);
    if (newest != CHECKPOINT_NONE)
        die("%s: holds a run at step %zu; continue it with --resume, replace it with --overwrite, or choose another "
            "--out",
            folder, newest);
    path_join(records, folder, RECORDS_NAME);
    if (records_have_step(records))
        die("%s: holds an earlier run without a checkpoint; replace it with --overwrite, or choose another --out",
            records);
}

// Sets folder->last to the checkpoint to resume from, or CHECKPOINT_NONE if the folder has none. Refuses a damaged
// checkpoint; loading compares its checksums. FOLDER_RESUME_AUTO skips damaged checkpoints, so it compares checksums
// here and reads a checkpoint twice. Collective.
static void checkpoint_search(CheckpointFolder *folder, FolderUse use) {
    char path[PATH_MAX];
    const char *damaged;
    size_t limit = CHECKPOINT_NONE;
    do {
        Manifest manifest;
        if (dist_rank() == 0) folder->last = checkpoint_find(folder->path, limit, use == FOLDER_RESUME);
        dist_broadcast(RANKS_ALL, &folder->last, sizeof(folder->last), 0);
        limit = folder->last, damaged = NULL;
        if (use != FOLDER_RESUME_AUTO || limit == CHECKPOINT_NONE) break;
        checkpoint_path(path, folder->path, limit, "");
        if ((damaged = manifest_read(path, &manifest)) == NULL) damaged = manifest_compare(path, &manifest, 1);
        if (damaged) note("%s is skipped: it is damaged: %s has another checksum", path, damaged);
    } while (damaged);
    if (dist_rank() == 0 && limit == CHECKPOINT_NONE && checkpoint_before(folder->path, limit) != CHECKPOINT_NONE)
        die("%s: none of its checkpoints is complete; restore one, or remove them to begin anew", folder->path);
}

// Makes the folder, takes the lock, and removes leftovers of an interrupted run. A new run needs a folder without
// checkpoints and without finished steps in the log. Sets folder->last to the step to resume from. If the program ends
// before run_began, it removes the folder and the lock that this function made. Collective.
static void checkpoint_open(CheckpointFolder *folder, const char *path, size_t keep, FolderUse use) {
    char lock[LOCK_TEXT] = "";
    memset(folder, 0, sizeof(*folder));
    signals_prepare();
    folder->keep = keep, folder->lock = -1, folder->last = CHECKPOINT_NONE;
    if (snprintf(folder->path, sizeof(folder->path), "%s", path) >= PATH_MAX - 64)
        die("%.200s...: this path is too long; choose a shorter --out", path);
    if (dist_rank() == 0) {
        if (use == FOLDER_RESUME) checkpoint_check_run(path);
        run_pending.there = make_folder(path);
        memcpy(run_pending.folder, folder->path, sizeof(folder->path));
        folder->lock = folder_lock(path, lock);
        replaced_settle(path);
        checkpoint_clear(path);
        if (use == FOLDER_NEW) checkpoint_refuse_run(path);
        if (use == FOLDER_REPLACE) folder->replaces = 1, folder->old = checkpoints_bytes(path);
    }
    dist_broadcast(RANKS_ALL, lock, sizeof(lock), 0);
    if (dist_rank() != 0) folder->lock = folder_share_lock(path, lock);
    if (use == FOLDER_RESUME || use == FOLDER_RESUME_AUTO) checkpoint_search(folder, use);
}

// Makes the folder again if it was removed or moved, and takes its lock. Refuses if another run is there now. Returns 1
// if it made the folder. Collective.
static int checkpoint_remake(CheckpointFolder *folder) {
    char path[PATH_MAX], text[LOCK_TEXT] = "";
    path_join(path, folder->path, LOCK_NAME);
    if (dist_rank() == 0 && folder->lock >= 0 && !path_is_file(path, folder->lock)) {
        note("%s: was removed or moved; it is made again", folder->path);
        make_folder(folder->path);
        close(folder->lock);
        folder->lock = folder_lock(folder->path, text);
        run_began();
        replaced.there = 0; // the replaced run stays in the folder that was moved; the next command there settles it
        const size_t newest = checkpoint_before(folder->path, CHECKPOINT_NONE);
        if (newest != CHECKPOINT_NONE && newest != folder->last) checkpoint_refuse_run(folder->path);
    }
    dist_broadcast(RANKS_ALL, text, sizeof(text), 0);
    if (!*text) return 0;
    if (dist_rank() != 0) close(folder->lock), folder->lock = folder_share_lock(folder->path, text);
    return 1;
}

static void checkpoint_close(CheckpointFolder *folder) {
    if (folder->lock >= 0) close(folder->lock);
    folder->lock = -1;
}

#endif
