/*
Output that is complete or absent: files, and folders of files. Both are written beside their place under a name of this
process's own, synced, and renamed by output_commit or folder_commit. Whatever ends the program before that removes
them, short of a kill -9. What a killed process left of a folder is removed by the next one that writes there. Only
regular files are replaced, and folders that hold nothing but files of ours; where a symbolic link stands, the file it
leads to is. What is read is not written over (output_refuse_input). Every failure ends the program with one line that
names the file, the action and the size. Writing a file allocates nothing, nor does a folder of at most FOLDER_FEW
files.
*/
#ifndef LLMC_OUTPUT_H
#define LLMC_OUTPUT_H
#include "file.h"
#include "stop.h"
#include <dirent.h>
#include <sys/file.h>
#include <sys/statvfs.h>

typedef struct {
    int fd;
    char path[PATH_MAX], temporary[PATH_MAX];
} OutputFile;

enum { FOLDER_FEW = 8 };

typedef struct {
    char path[PATH_MAX], temporary[PATH_MAX];
    int fd;             // of the temporary folder; holds its lock
    char (*names)[256]; // [capacity] files in it
    size_t capacity;
    volatile size_t count;
    int (*ours)(const char *name); // a file of this name may be removed
    int replaces;                  // a folder that is there
    char few[FOLDER_FEW][256];     // the names, where they fit
} OutputFolder;

// ---- removal when the program ends early ----------------------------------------------------------------------------
static OutputFile *volatile output_pending; // being written
static OutputFolder *volatile folder_pending;
static struct {
    char folder[PATH_MAX], lock[PATH_MAX]; // of a run that has not begun, where this process made them; or empty
    size_t there;                          // bytes of the folder's path that were there before
} run_pending;

// From now on the run's folder stays, however the run ends.
static void run_began(void) { *run_pending.folder = *run_pending.lock = 0; }

// Only system calls: a signal handler comes here.
static void run_discard(void) {
    if (*run_pending.lock) unlink(run_pending.lock);
    for (size_t end = strlen(run_pending.folder); end > run_pending.there; end--) {
        if (run_pending.folder[end] && run_pending.folder[end] != '/') continue;
        run_pending.folder[end] = 0;
        rmdir(run_pending.folder); // of one that holds something nothing happens
    }
    run_began();
}

static void output_discard(void) {
    OutputFolder *folder = folder_pending;
    if (output_pending) unlink(output_pending->temporary);
    output_pending = NULL;
    folder_pending = NULL;
    for (size_t i = 0; folder && i < folder->count; i++) unlinkat(folder->fd, folder->names[i], 0);
    if (folder) rmdir(folder->temporary);
    run_discard();
}

// Ctrl-C, a closed terminal, a batch system: a request to stop (stop.h). Where nobody listens, or a second time,
// unfinished output is removed and the signal acts as by default.
static void end_by_signal(int number) {
    const int error = errno;
    const int broken = voice.others_died && voice.others_died(); // a launcher ends those that are left
    if (!broken && stop_ask(number)) {
        errno = error;
        return;
    }
    output_discard();
    if (voice.before_end) voice.before_end();
    signal(number, SIG_DFL);
    kill(getpid(), number);
}

// main calls this before anything is written. Handlers run on a stack of their own: oneDNN's sgemm (until 3.12,
// uxlfoundation/oneDNN issue 4845) lets the stack pointer lead into the heap, where a handler's frame would overwrite
// what is before it. Only the main thread has that stack, so other threads block signals (use_threads).
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
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes (ulimit -f) shall be an error of write like any other
    action.sa_handler = end_by_signal;
    action.sa_flags = SA_RESTART | SA_NODEFER | SA_ONSTACK;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        sigaction(ends[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(ends[i], &action, NULL); // nohup stays in force
    }
}

// ---- names of temporaries: NAME.PID-ATTEMPT.tmp ---------------------------------------------------------------------
static int is_temporary_suffix(const char *text) {
    int end = 0;
    sscanf(text, ".%*[0-9]-%*[0-9].tmp%n", &end);
    return end && !text[end];
}

// `name` is one that temporary_name gives to what will be `base`.
static int is_temporary_of(const char *name, const char *base) {
    return !strncmp(name, base, strlen(base)) && is_temporary_suffix(name + strlen(base));
}

// Cuts off what temporary_name adds to a name.
static void strip_temporary(char *name) {
    for (char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.'))
        if (is_temporary_suffix(dot)) *dot = 0;
}

// With the process's number: two that write to one place do not mix, and what a user calls X.tmp stays.
static void temporary_name(char temporary[PATH_MAX], const char *path, int attempt) {
    if (snprintf(temporary, PATH_MAX, "%s.%ld-%d.tmp", path, (long)getpid(), attempt) >= PATH_MAX)
        die("%.200s...: this path is too long to write to", path);
}

// ---- inputs ---------------------------------------------------------------------------------------------------------
// `path`, or where it is not there yet the folder it would be in, is `folder` or lies in it.
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

// A folder holds the file, or one of the folders in it does, so many levels deep; links are followed.
static int folder_holds(const char *folder, const struct stat *file, int levels) {
    struct stat status;
    const struct dirent *entry;
    int found = 0;
    DIR *directory = opendir(folder);
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

// Refuses an output that is `input`, in it, or around it, under whatever names. option: how the input was given
static void output_refuse_input(const char *path, const char *option, const char *input) {
    struct stat in, out;
    if (stat(input, &in) != 0) return; // reading it says why
    const int there = stat(path, &out) == 0, folder = S_ISDIR(in.st_mode);
    if ((folder && path_lies_in(path, &in)) ||
        (there && (same_file(&in, &out) || path_lies_in(input, &out) || (folder && folder_holds(input, &out, 2)))))
        die("%s: is read, or lies in what is read: --%s %s; choose another place", path, option, input);
}

// ---- files ----------------------------------------------------------------------------------------------------------
__attribute__((noreturn, format(printf, 3, 4))) static void output_fail(const OutputFile *file, int error,
                                                                        const char *action, ...) {
    char text[80];
    va_list args;
    va_start(args, action);
    vsnprintf(text, sizeof(text), action, args);
    va_end(args);
    die("%s: %s failed: %s; free some space or choose another place (the unfinished file is removed)", file->path, text,
        strerror(error));
}

// file->path = where a file that is to be written to `path` has to go.
static void output_resolve(OutputFile *file, const char *path) {
    struct stat link, status;
    if (snprintf(file->path, sizeof(file->path), "%s", path) >= (int)sizeof(file->path))
        die("%.200s...: this path is too long to write to", path);
    if (lstat(path, &link) != 0) return; // a new file; where it cannot be, open says why
    if (stat(path, &status) != 0)
        die("%s: is a symbolic link that leads nowhere: %s; remove it or choose another place", path, strerror(errno));
    if (S_ISDIR(status.st_mode)) die("%s: is a directory, a file was to be written there; give a file name", path);
    if (!S_ISREG(status.st_mode))
        die("%s: is no regular file but a device, a pipe or a socket, which is not replaced; give a file name", path);
    if (S_ISLNK(link.st_mode) && !realpath(path, file->path))
        die("%s: this symbolic link cannot be followed: %s; choose another place", path, strerror(errno));
}

// `bytes` is the size the file will have: a disk that is too small says so now and not at the end.
static void output_open(OutputFile *file, const char *path, uint64_t bytes) {
    if (output_pending) die("%s: cannot be written while %s is", path, output_pending->path);
    signals_prepare();
    output_resolve(file, path);
    file->fd = -1;
    for (int attempt = 0; file->fd < 0 && attempt < 1000; attempt++) {
        temporary_name(file->temporary, file->path, attempt);
        output_pending = file; // before it exists: a signal may come at once
        file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0 && errno != EEXIST) break;
    }
    if (file->fd < 0) {
        output_pending = NULL;
        die("%s: cannot be created: %s; choose another place", file->path, strerror(errno));
    }
#ifdef __linux__
    // Not every file system can reserve space; those that cannot say so otherwise than by being full.
    if (fallocate(file->fd, 0, 0, (off_t)bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        output_fail(file, errno, "reserving %s", human_bytes((double)bytes));
#else
    (void)bytes;
#endif
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

// Another process's unfinished file, of which this one writes a part; output_leave, and it is committed there.
static void output_join(OutputFile *file, const char *path, const char *temporary) {
    snprintf(file->path, sizeof(file->path), "%s", path);
    snprintf(file->temporary, sizeof(file->temporary), "%s", temporary);
    file->fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (file->fd < 0)
        die("%s: cannot be opened, where rank 0 has begun to write: %s; choose a place that all hosts see", temporary,
            strerror(errno));
}

static void output_leave(const OutputFile *file) {
    if (fsync(file->fd) != 0) output_fail(file, errno, "syncing");
    if (close(file->fd) != 0) output_fail(file, errno, "closing");
}

// After this the file is there under its name, whatever happens to the machine.
static void output_commit(OutputFile *file) {
    output_leave(file);
    if (rename(file->temporary, file->path) != 0) output_fail(file, errno, "renaming the finished file");
    output_pending = NULL;
    sync_folder_of(file->path);
}

// ---- folders --------------------------------------------------------------------------------------------------------
// Makes folder->temporary, to hold so many files and to become folder->path. 0: it cannot be made, errno says why.
static int folder_begin(OutputFolder *folder, size_t files) {
    folder->names = folder->few;
    folder->capacity = FOLDER_FEW;
    folder->count = 0;
    folder->fd = -1;
    signals_prepare();
    folder_pending = folder; // before it exists: a signal may come at once
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

// A file in it, which is closed with output_commit.
static void folder_open_file(OutputFolder *folder, OutputFile *file, const char *name, uint64_t bytes) {
    char path[PATH_MAX];
    if (folder->count == folder->capacity) die("internal: %s: more files than were announced", folder->path);
    snprintf(folder->names[folder->count], sizeof(folder->names[0]), "%s", name);
    folder->count = folder->count + 1; // not before its name: a signal may come at once
    path_join(path, folder->temporary, name);
    output_open(file, path, bytes);
}

// A small file in it, whole.
static void folder_write_file(OutputFolder *folder, const char *name, const void *bytes, size_t count) {
    OutputFile file;
    folder_open_file(folder, &file, name, count);
    output_write(&file, 0, bytes, count);
    output_commit(&file);
}

// Removes the folder open as fd, which is closed, and of its files those whose names `ours` knows, unfinished ones too.
// 0: it holds other files and stays.
static int folder_remove(const char *path, int fd, int (*ours)(const char *name)) {
    DIR *directory = fdopendir(fd);
    const struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        char name[256];
        snprintf(name, sizeof(name), "%s", entry->d_name);
        strip_temporary(name);
        if (ours(name)) unlinkat(fd, entry->d_name, 0);
    }
    if (directory)
        closedir(directory);
    else
        close(fd);
    return rmdir(path) == 0;
}

// Everything in it is written and synced: the rename makes it count. What is replaced makes way just before.
static void folder_commit(OutputFolder *folder) {
    char old[PATH_MAX];
    int fd = folder->replaces ? open(folder->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    fsync(folder->fd);
    temporary_name(old, folder->path, 1000);
    if ((fd >= 0 && rename(folder->path, old) != 0) || rename(folder->temporary, folder->path) != 0) {
        const int error = errno;
        if (fd >= 0) rename(old, folder->path);
        die("%s: the finished folder cannot be given its name: %s; choose another --out", folder->path,
            strerror(error));
    }
    folder_pending = NULL;
    sync_folder_of(folder->path);
    if (fd >= 0 && !folder_remove(old, fd, folder->ours)) note("%s holds other files and stays", old);
    close(folder->fd);
    if (folder->names != folder->few) free(folder->names);
}

// ---- a folder at a place that a user chose: free, an empty folder, or one to replace --------------------------------
// folder->path = where a folder that is to be written to `path` has to go.
static void folder_resolve(OutputFolder *folder, const char *path) {
    struct stat status, here;
    const struct dirent *entry;
    if (snprintf(folder->path, sizeof(folder->path), "%s", path) >= PATH_MAX - 300)
        die("%.200s...: this path is too long to write to", path);
    for (size_t length = strlen(path); length > 1 && folder->path[length - 1] == '/';) folder->path[--length] = 0;
    if (lstat(folder->path, &status) != 0) return; // a new one; where it cannot be, mkdir says why
    if (stat(folder->path, &status) != 0)
        die("%s: is a symbolic link that leads nowhere: %s; remove it or choose another place", path, strerror(errno));
    if (!S_ISDIR(status.st_mode))
        die("%s: is a file, a folder was to be written there; choose another --out (one that ends in .bin is a flat "
            "file)",
            path);
    DIR *directory = opendir(folder->path);
    if (!directory) die("%s: cannot be looked through: %s; choose another --out", path, strerror(errno));
    while ((entry = readdir(directory))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!folder->replaces) die("%s: the folder is not empty; choose a new --out, or say --overwrite", path);
        if (!folder->ours(entry->d_name))
            die("%s: holds %s, which convert does not write; look through it, or choose a new --out", path,
                entry->d_name);
    }
    closedir(directory);
    if (stat(".", &here) == 0 && here.st_dev == status.st_dev && here.st_ino == status.st_ino)
        die("%s: is the folder this program runs in, which cannot be replaced; give a new name", path);
    if (!realpath(path, folder->path) || strlen(folder->path) >= PATH_MAX - 300)
        die("%s: cannot be followed to its end; choose another --out", path);
}

// Removes what a process that was killed left of the folder; one that is locked is being written.
static void folder_clear_stale(const char *path, int (*ours)(const char *name)) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0)
        close(fd);
    else if (folder_remove(path, fd, ours))
        note("%s, which a conversion that was cut off had left, is removed", path);
    else
        note("%s was left by a conversion that was cut off; look through it and remove it", path);
}

// Bytes that can be written there; 0 is returned where the file system does not say.
static int space_available(const char *folder, uint64_t *bytes) {
    struct statvfs status;
    if (statvfs(folder, &status) != 0 || status.f_blocks == 0) return 0;
    *bytes = (uint64_t)status.f_bavail * status.f_frsize;
    return 1;
}

// bytes, files: what will be in it. ours: a file of this name, found in a folder that was left over or is replaced, may
// be removed.
static void folder_open(OutputFolder *folder, const char *path, uint64_t bytes, size_t files,
                        int (*ours)(const char *name), int replaces) {
    char above[PATH_MAX], stale[PATH_MAX];
    const struct dirent *entry;
    uint64_t available;
    memset(folder, 0, sizeof(*folder));
    folder->ours = ours, folder->replaces = replaces;
    signals_prepare();
    folder_resolve(folder, path);
    folder_above(above, folder->path);
    const char *base = strrchr(folder->path, '/') ? strrchr(folder->path, '/') + 1 : folder->path;
    DIR *directory = opendir(above); // need not be readable to be written to
    while (directory && (entry = readdir(directory))) {
        if (!is_temporary_of(entry->d_name, base)) continue;
        path_join(stale, above, entry->d_name);
        folder_clear_stale(stale, ours);
    }
    if (directory) closedir(directory);
    if (space_available(above, &available) && available < bytes)
        die("%s: %s (%llu bytes) are to be written, but only %s are free there; make room or choose another --out",
            path, human_bytes((double)bytes), (unsigned long long)bytes, human_bytes((double)available));
    for (int attempt = 0; attempt < 1000; attempt++) {
        temporary_name(folder->temporary, folder->path, attempt);
        if (!folder_begin(folder, files) && errno == EEXIST) continue;
        if (folder->fd < 0) break;
        flock(folder->fd, LOCK_EX | LOCK_NB); // where it is refused, nobody else gets it either
        if (path_is_file(folder->temporary, folder->fd)) return;
        folder_pending = NULL; // somebody took it for an old one
        close(folder->fd);
    }
    die("%s: the folder cannot be created: %s; choose another --out", folder->path, strerror(errno));
}

// Makes a folder and those above it. A new one is synced into the one above, so that it outlives a power failure as its
// files do. Returns how many bytes of the path were there.
static size_t make_folder(const char *path) {
    char part[PATH_MAX];
    size_t there = 0;
    int made = 0;
    for (size_t i = 1; path[i - 1]; i++) {
        if (path[i] && path[i] != '/') continue;
        if (snprintf(part, sizeof(part), "%.*s", (int)i, path) >= (int)sizeof(part))
            die("%.200s...: this path is too long", path);
        const int error = mkdir(part, 0777) ? errno : 0; // stat has one of its own
        if (!error)
            sync_folder_of(part);
        else if (!path_is_directory(part))
            die("%s: the folder cannot be created: %s; choose another --out", part, strerror(error));
        else if (!made)
            there = i;
        made |= !error;
    }
    return there;
}

#endif
