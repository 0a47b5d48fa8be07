/*
Output that is complete or absent: files, and folders of files. Both are written next to their destination under a
temporary name, locked, synced, and renamed by output_commit or folder_commit. If the program ends earlier, it removes
them; after kill -9 the next process that writes to the same path removes them. Only regular files are replaced, and
folders that hold only our files. Through a symbolic link the file to which it leads is replaced. Inputs are never
overwritten (output_refuse_input). Every failure ends the program with one line that names the file, the action and the
size. Writing a folder of at most FOLDER_FEW files allocates nothing.
*/
#ifndef LLMC_OUTPUT_H
#define LLMC_OUTPUT_H
#include "file.h"
#include "stop.h"
#include <sys/file.h>
#include <sys/statvfs.h>

typedef struct {
    int fd;
    char path[PATH_MAX], temporary[PATH_MAX];
    int stays; // 1: the unfinished file stays when the program ends
} OutputFile;

enum { FOLDER_FEW = 8 };

typedef struct {
    char path[PATH_MAX], temporary[PATH_MAX];
    int fd;             // descriptor of the temporary folder, which holds its lock
    char (*names)[256]; // [capacity] files in the folder
    size_t capacity;
    volatile size_t count;
    int (*ours)(const char *name); // tells whether a file of this name may be removed
    int replaces;                  // 1: an existing folder may be replaced
    char few[FOLDER_FEW][256];     // memory for `names` of small folders
} OutputFolder;

// ---- removal when the program ends early ----------------------------------------------------------------------------
static OutputFile *volatile output_pending; // the file that is being written
static OutputFolder *volatile folder_pending;
static struct {
    char folder[PATH_MAX], lock[PATH_MAX]; // folder and lock that this process made for a run not yet begun; or empty
    size_t there;                          // bytes of the folder's path that existed before
} run_pending;

static int (*run_put_back)(void); // puts a replaced run back, if this one has saved nothing; only system calls

// Keeps the run's folder from now on, however the program ends.
static void run_began(void) { *run_pending.folder = *run_pending.lock = 0; }

// Removes the folder of a run that has not begun. Uses only system calls, because signal handlers call it.
static void run_discard(void) {
    if (run_put_back) run_put_back();
    if (*run_pending.lock) unlink(run_pending.lock);
    for (size_t end = strlen(run_pending.folder); end > run_pending.there; end--) {
        if (run_pending.folder[end] && run_pending.folder[end] != '/') continue;
        run_pending.folder[end] = 0;
        rmdir(run_pending.folder); // fails harmlessly if the folder is not empty
    }
    run_began();
}

// Removes the unfinished file or folder, and the folder of a run that has not begun. Uses only system calls.
static void output_discard(void) {
    OutputFolder *folder = folder_pending;
    if (output_pending) unlink(output_pending->temporary);
    output_pending = NULL;
    folder_pending = NULL;
    for (size_t i = 0; folder && i < folder->count; i++) {
        char *slash = strchr(folder->names[i], '/');
        unlinkat(folder->fd, folder->names[i], 0);
        if (slash)
            // Removes a subfolder with the last file in it.
            *slash = 0, unlinkat(folder->fd, folder->names[i], AT_REMOVEDIR);
    }
    if (folder) rmdir(folder->temporary);
    run_discard();
}

// Handles Ctrl-C, a closed terminal, a batch system's signal: they request a stop (stop.h). If nothing listens, or at
// the second signal, it removes unfinished output and lets the signal take its default action.
static void end_by_signal(int number) {
    const int error = errno;
    const int broken = voice.others_died && voice.others_died(); // 1: the launcher ends the remaining ranks
    if (!broken && stop_ask(number)) {
        errno = error;
        return;
    }
    output_discard();
    if (voice.before_end) voice.before_end();
    signal(number, SIG_DFL);
    kill(getpid(), number);
}

// Installs the handlers; main calls it before anything is written. They run on a stack of their own: oneDNN's sgemm
// (until 3.12, uxlfoundation/oneDNN issue 4845) points the stack pointer into the heap, where a handler's frame would
// overwrite data. Only the main thread has this stack, so other threads block signals (use_threads).
static void signals_prepare(void) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    static char stack[1 << 17]; // a frame with AVX-512 and AMX registers takes 11 KiB
    static int prepared;
    struct sigaction before, action = {0};
    stack_t own = {0};
    if (prepared) return;
    prepared = 1;
    own.ss_sp = stack, own.ss_size = sizeof(stack);
    sigaltstack(&own, NULL);
    atexit(output_discard);
    signal(SIGXFSZ, SIG_IGN); // turns an exceeded limit on file sizes (ulimit -f) into an ordinary error of write
    action.sa_handler = end_by_signal;
    action.sa_flags = SA_RESTART | SA_NODEFER | SA_ONSTACK;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        sigaction(ends[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(ends[i], &action, NULL); // keeps nohup's setting
    }
}

// ---- names of temporaries: NAME.PID-ATTEMPT.tmp ---------------------------------------------------------------------
static int is_temporary_suffix(const char *text) {
    int end = 0;
    sscanf(text, ".%*[0-9]-%*[0-9].tmp%n", &end);
    return end && !text[end];
}

// Tells whether temporary_name made `name` for `base`.
static int is_temporary_of(const char *name, const char *base) {
    return !strncmp(name, base, strlen(base)) && is_temporary_suffix(name + strlen(base));
}

// Makes a temporary name that contains the process id. Two writers of one path do not collide, and a user's file X.tmp
// stays.
static void temporary_name(char temporary[PATH_MAX], const char *path, int attempt) {
    if (snprintf(temporary, PATH_MAX, "%s.%ld-%d.tmp", path, (long)getpid(), attempt) >= PATH_MAX)
        die("%.200s...: this path is too long; choose a shorter path", path);
}

// ---- inputs ---------------------------------------------------------------------------------------------------------
// Tells whether `path` is `folder` or lies in it. If `path` does not exist, its parent folder decides.
static int path_lies_in(const char *path, const struct stat *folder) {
    char place[PATH_MAX], above[PATH_MAX];
    struct stat status;
    snprintf(above, sizeof(above), "%s", path);
    while (!realpath(above, place) && strcmp(above, "/") != 0) {
        snprintf(place, sizeof(place), "%s", above);
        folder_above(above, place);
    }
    for (;; memcpy(place, above, sizeof(above))) {
        if (stat(place, &status) == 0 && same_file(&status, folder)) return 1;
        if (!strcmp(place, "/")) return 0;
        folder_above(above, place);
    }
}

// Tells whether a folder holds the file, at most `levels` folders deep. Follows links.
static int folder_holds(const char *folder, const struct stat *file, int levels) {
    struct stat status;
    const struct dirent *entry;
    int found = 0;
    DIR *directory = folder_list(folder);
    if (!directory && !error_is_absence(errno) && errno != EACCES)
        die("%s: cannot be listed: %s; check its permissions", folder, error_text(errno));
    while (directory && !found && (entry = readdir(directory))) {
        char path[PATH_MAX];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        path_join(path, folder, entry->d_name);
        if (stat(path, &status) != 0) continue;
        found = same_file(&status, file) || (levels && S_ISDIR(status.st_mode) && folder_holds(path, file, levels - 1));
    }
    if (directory) closedir(directory);
    return found;
}

// Refuses an output that is `input`, lies in it or contains it, by any path. option: the option that names the input
static void output_refuse_input(const char *path, const char *option, const char *input) {
    struct stat in, out;
    if (stat(input, &in) != 0) return; // reading the input will say why
    const int there = stat(path, &out) == 0, folder = S_ISDIR(in.st_mode);
    if ((folder && path_lies_in(path, &in)) ||
        (there && (same_file(&in, &out) || path_lies_in(input, &out) || (folder && folder_holds(input, &out, 2)))))
        die("%s: is the input --%s %s, lies in it or contains it; choose another place", path, option, input);
}

// ---- leftovers of killed processes ----------------------------------------------------------------------------------
// Removes the folder that is open as fd and its files that `ours` accepts, unfinished ones too; closes fd. within: "",
// or "NAME/" for a folder within the removed one. Returns 0 if the folder holds other files; it then stays.
static int folder_remove(const char *path, int fd, const char *within, int (*ours)(const char *name)) {
    DIR *directory = fdopendir(fd);
    const struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char name[512], inner[PATH_MAX];
        snprintf(name, sizeof(name), "%s%s", within, entry->d_name);
        for (char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.'))
            if (is_temporary_suffix(dot)) *dot = 0;
        if (!ours(name) || unlinkat(fd, entry->d_name, 0) == 0) continue;
        path_join(inner, path, entry->d_name);
        snprintf(name, sizeof(name), "%s/", entry->d_name);
        folder_remove(inner, openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), name, ours);
    }
    directory ? closedir(directory) : close(fd);
    return rmdir(path) == 0;
}

// Locks a new temporary file that is open as fd. Returns 0 if another process removes it as stale.
static int output_lock(const char *temporary, int fd) {
    return (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && path_is_file(temporary, fd);
}

// Removes temporaries of `path` that killed processes left. ours: accepts files of temporary folders; NULL: the
// temporaries are files. A locked temporary is being written, on this host or another. If the file system has no locks,
// all temporaries stay.
static void output_clear_stale(const char *path, int (*ours)(const char *name)) {
    const int flags = (ours ? O_RDONLY | O_DIRECTORY : O_WRONLY | O_NONBLOCK) | O_NOFOLLOW | O_CLOEXEC;
    char above[PATH_MAX], stale[PATH_MAX];
    const struct dirent *entry;
    folder_above(above, path);
    DIR *directory = opendir(above); // a folder may be writable but not readable
    while (directory && (entry = readdir(directory))) {
        if (!is_temporary_of(entry->d_name, path_last(path))) continue;
        path_join(stale, above, entry->d_name);
        int fd = open(stale, flags);
        if (fd < 0) continue;
        if (flock(fd, LOCK_EX | LOCK_NB) != 0 || !path_is_file(stale, fd))
            close(fd);
        else if (ours ? folder_remove(stale, fd, "", ours) : (unlink(stale) | close(fd)) == 0)
            note("removed %s, left by an interrupted process", stale);
        else
            note("%s was left by an interrupted process and holds other files; remove it", stale);
    }
    if (directory) closedir(directory);
}

// ---- files ----------------------------------------------------------------------------------------------------------
__attribute__((noreturn, format(printf, 3, 4))) static void output_fail(const OutputFile *file, int error,
                                                                        const char *action, ...) {
    char text[80];
    va_list args;
    va_start(args, action);
    vsnprintf(text, sizeof(text), action, args);
    va_end(args);
    const int full = error == ENOSPC || error == EDQUOT;
    if (file->stays)
        die("%s: %s failed: %s; %srepeat the command to continue", file->temporary, text, error_text(error),
            full ? "free some space and " : "");
    die("%s: %s failed: %s; %schoose another place (the unfinished file is removed)", file->path, text,
        error_text(error), full ? "free some space or " : "");
}

// Sets file->path to the target of `path`, following links. Refuses what is not a regular file.
static void output_resolve(OutputFile *file, const char *path) {
    struct stat link, status;
    if (snprintf(file->path, sizeof(file->path), "%s", path) >= (int)sizeof(file->path))
        die("%.200s...: this path is too long; choose a shorter path", path);
    if (lstat(path, &link) != 0) return; // a new file; if it cannot be made, open says why
    if (stat(path, &status) != 0)
        die("%s: is a symbolic link that leads nowhere: %s; remove it or choose another place", path, strerror(errno));
    if (S_ISDIR(status.st_mode)) die("%s: is a directory; give a file name to write to", path);
    if (!S_ISREG(status.st_mode))
        die("%s: is a device, a pipe or a socket, which is not replaced; give a file name", path);
    if (S_ISLNK(link.st_mode) && !realpath(path, file->path))
        die("%s: this symbolic link cannot be followed: %s; choose another place", path, error_text(errno));
}

// Opens an output of `bytes` bytes. Reserves the space, so that a full disk fails now and not at the end.
static void output_open(OutputFile *file, const char *path, uint64_t bytes) {
    if (output_pending)
        die("internal: %s: cannot be written while %s is being written; please report it", path, output_pending->path);
    signals_prepare();
    file->stays = 0;
    output_resolve(file, path);
    if (!folder_pending) output_clear_stale(file->path, NULL); // a folder's files are cleared together with the folder
    file->fd = -1;
    for (int attempt = 0; file->fd < 0 && attempt < 1000; attempt++) {
        temporary_name(file->temporary, file->path, attempt);
        output_pending = file; // set before the file exists, since a signal may come at once
        file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0 && errno != EEXIST) break;
        if (file->fd < 0 || output_lock(file->temporary, file->fd)) continue;
        close(file->fd); // another process removed it as stale; try again
        file->fd = -1;
    }
    if (file->fd < 0) {
        output_pending = NULL;
        die("%s: cannot be created: %s; choose another place", file->path, error_text(errno));
    }
    // any error but these three means that the file system cannot reserve space: continues without
    if (fallocate(file->fd, 0, 0, (off_t)bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        output_fail(file, errno, "reserving %s", human_bytes((double)bytes));
}

static void output_write(const OutputFile *file, uint64_t offset, const void *data, size_t bytes) {
    const char *cursor = (const char *)data;
    while (bytes) {
        ssize_t put = pwrite(file->fd, cursor, min_size(bytes, (size_t)1 << 30), (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0)
            output_fail(file, put < 0 ? errno : ENOSPC, "writing %zu bytes at byte %llu", bytes,
                        (unsigned long long)offset);
        cursor += put, offset += (uint64_t)put, bytes -= (size_t)put;
    }
}

// Opens the unfinished file of another process, to write a part of it. End with output_leave; the other process
// commits.
static void output_join(OutputFile *file, const char *path, const char *temporary) {
    snprintf(file->path, sizeof(file->path), "%s", path);
    snprintf(file->temporary, sizeof(file->temporary), "%s", temporary);
    file->stays = 0;
    file->fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (file->fd < 0)
        die("%s: cannot be opened, though rank 0 made it: %s; choose a place that all hosts see", temporary,
            error_text(errno));
}

static void output_leave(const OutputFile *file) {
    if (fsync(file->fd) != 0) output_fail(file, errno, "syncing");
    if (close(file->fd) != 0) output_fail(file, errno, "closing");
}

// Syncs the file and renames it to its path. Afterwards the file survives a power failure.
static void output_commit(OutputFile *file) {
    const int lock = fcntl(file->fd, F_DUPFD_CLOEXEC, 0); // keeps the lock until the file has its name
    output_leave(file);
    if (rename(file->temporary, file->path) != 0) output_fail(file, errno, "renaming the finished file");
    output_pending = NULL;
    close(lock);
    sync_folder_of(file->path);
}

// ---- folders --------------------------------------------------------------------------------------------------------
// Makes folder->temporary for `files` files; it becomes folder->path. Returns 0 if it cannot be made; errno says why.
static int folder_begin(OutputFolder *folder, size_t files) {
    folder->names = folder->few;
    folder->capacity = FOLDER_FEW;
    folder->count = 0;
    folder->fd = -1;
    signals_prepare();
    folder_pending = folder; // set before the folder exists, since a signal may come at once
    if (mkdir(folder->temporary, 0777) == 0) folder->fd = open(folder->temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder->fd < 0) {
        folder_pending = NULL;
        return 0;
    }
    if (files > FOLDER_FEW) {
        folder->names = (char(*)[256])checked_calloc(files, sizeof(*folder->names), "the names of files to be written");
        folder->capacity = files;
    }
    return 1;
}

// Opens a file in the folder, or in a folder within it. Close it with output_commit.
static void folder_open_file(OutputFolder *folder, OutputFile *file, const char *name, uint64_t bytes) {
    char path[PATH_MAX], above[PATH_MAX];
    if (folder->count == folder->capacity)
        die("internal: %s: more files than were announced; please report it", folder->path);
    snprintf(folder->names[folder->count], sizeof(folder->names[0]), "%s", name);
    folder->count = folder->count + 1; // only after its name is set, since a signal may come at once
    path_join(path, folder->temporary, name);
    folder_above(above, path);
    if (strchr(name, '/')) mkdir(above, 0777); // if this fails, opening the file says why
    output_open(file, path, bytes);
}

// Writes a whole small file; it is complete or absent.
static void output_write_file(const char *path, const void *bytes, size_t count) {
    OutputFile file;
    output_open(&file, path, count);
    output_write(&file, 0, bytes, count);
    output_commit(&file);
}

// Writes a whole small file in the folder.
static void folder_write_file(OutputFolder *folder, const char *name, const void *bytes, size_t count) {
    OutputFile file;
    folder_open_file(folder, &file, name, count);
    output_write(&file, 0, bytes, count);
    output_commit(&file);
}

// Commits a folder whose files are written and synced, by renaming it. First moves away a folder that it replaces.
static void folder_commit(OutputFolder *folder) {
    char old[PATH_MAX];
    int fd = folder->replaces ? open(folder->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    fsync(folder->fd);
    temporary_name(old, folder->path, 1000);
    if ((fd >= 0 && rename(folder->path, old) != 0) || rename(folder->temporary, folder->path) != 0) {
        const int error = errno;
        if (fd >= 0) rename(old, folder->path);
        die("%s: the finished folder cannot be renamed to this: %s; choose another --out", folder->path,
            error_text(error));
    }
    folder_pending = NULL;
    sync_folder_of(folder->path);
    if (fd >= 0 && !folder_remove(old, fd, "", folder->ours))
        note("%s is kept, because it holds other files; move them away and remove it", old);
    close(folder->fd);
    if (folder->names != folder->few) free(folder->names);
}

// ---- a folder at a place that a user chose: free, an empty folder, or one to replace --------------------------------
// Sets folder->path to the target of `path`, following links. Refuses what may not be replaced.
static void folder_resolve(OutputFolder *folder, const char *path) {
    struct stat status, here;
    const struct dirent *entry;
    if (snprintf(folder->path, sizeof(folder->path), "%s", path) >= PATH_MAX - 300)
        die("%.200s...: this path is too long; choose a shorter path", path);
    for (size_t length = strlen(path); length > 1 && folder->path[length - 1] == '/';) folder->path[--length] = 0;
    if (lstat(folder->path, &status) != 0) return; // a new folder; if it cannot be made, mkdir says why
    if (stat(folder->path, &status) != 0)
        die("%s: is a symbolic link that leads nowhere: %s; remove it or choose another place", path, strerror(errno));
    if (!S_ISDIR(status.st_mode))
        die("%s: is a file, not a folder; choose another --out (a flat file's name ends in .bin)", path);
    DIR *directory = opendir(folder->path);
    if (!directory) die("%s: cannot be listed: %s; choose another --out", path, error_text(errno));
    while ((entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!folder->replaces) die("%s: the folder is not empty; choose a new --out, or add --overwrite", path);
        if (!folder->ours(entry->d_name))
            die("%s: holds %s, which convert does not write; remove it, or choose a new --out", path, entry->d_name);
    }
    closedir(directory);
    if (stat(".", &here) == 0 && here.st_dev == status.st_dev && here.st_ino == status.st_ino)
        die("%s: is the current folder, which cannot be replaced; choose another --out", path);
    if (!realpath(path, folder->path) || strlen(folder->path) >= PATH_MAX - 300)
        die("%s: this symbolic link cannot be followed; choose another --out", path);
}

// Sets *bytes to the free space at `folder`. Returns 0 if the file system does not tell.
static int space_available(const char *folder, uint64_t *bytes) {
    struct statvfs status;
    if (statvfs(folder, &status) != 0 || status.f_blocks == 0) return 0;
    *bytes = (uint64_t)status.f_bavail * status.f_frsize;
    return 1;
}

// Opens a folder for `files` files of `bytes` bytes in all. ours: tells by name which files of a stale or replaced
// folder may be removed
static void folder_open(OutputFolder *folder, const char *path, uint64_t bytes, size_t files,
                        int (*ours)(const char *name), int replaces) {
    char above[PATH_MAX];
    uint64_t available;
    memset(folder, 0, sizeof(*folder));
    folder->ours = ours, folder->replaces = replaces;
    signals_prepare();
    folder_resolve(folder, path);
    folder_above(above, folder->path);
    output_clear_stale(folder->path, ours);
    if (space_available(above, &available) && available < bytes)
        die("%s: needs %s (%llu bytes), but only %s are free there; make room or choose another --out", path,
            human_bytes((double)bytes), (unsigned long long)bytes, human_bytes((double)available));
    for (int attempt = 0; attempt < 1000; attempt++) {
        temporary_name(folder->temporary, folder->path, attempt);
        if (!folder_begin(folder, files) && errno == EEXIST) continue;
        if (folder->fd < 0) break;
        if (output_lock(folder->temporary, folder->fd)) return;
        folder_pending = NULL; // another process removed it as stale; try again
        close(folder->fd);
    }
    die("%s: the folder cannot be created: %s; choose another --out", folder->path, error_text(errno));
}

// Makes a folder and its missing parents; syncs each into its parent to survive a power failure. Returns how many bytes
// of the path existed before.
static size_t make_folder(const char *path) {
    char part[PATH_MAX];
    size_t there = 0;
    int made = 0;
    for (size_t i = 1; path[i - 1]; i++) {
        if (path[i] && path[i] != '/') continue;
        if (snprintf(part, sizeof(part), "%.*s", (int)i, path) >= (int)sizeof(part))
            die("%.200s...: this path is too long; choose a shorter path", path);
        const int error = mkdir(part, 0777) ? errno : 0;
        errno = 0; // stat below may tell more
        if (!error)
            sync_folder_of(part);
        else if (!path_is_directory(part))
            die("%s: the folder cannot be created: %s; choose another --out", part, error_text(errno ? errno : error));
        else if (!made)
            there = i;
        made |= !error;
    }
    return there;
}

#endif
