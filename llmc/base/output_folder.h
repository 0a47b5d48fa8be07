/*
A folder that is complete or absent, as an OutputFile is: it is written beside its place under a name of this process's own,
NAME.123-0.tmp, and renamed by folder_commit. Whatever ends the program before that removes it, short of a kill -9; what that
leaves is recognised, by its name and by the lock that nobody holds any more, and cleared away by the next one that writes
there. Nothing is ever written into a folder that holds something: the place must be free, or an empty folder.
*/
#ifndef LLMC_OUTPUT_FOLDER_H
#define LLMC_OUTPUT_FOLDER_H
#include "llmc/files/checkpoint_folder.h"

typedef struct {
    char path[PATH_MAX], temporary[PATH_MAX];
    int fd;             // of the temporary folder, and holds its lock
    char (*names)[256]; // [capacity] what is in it
    size_t capacity;
    volatile size_t count;
} OutputFolder;

static OutputFolder *volatile folder_pending;

// Nothing but system calls: a signal handler may come here. Runs after the file that was being written is gone.
static void folder_discard(void) {
    OutputFolder *folder = folder_pending;
    if (!folder) return;
    folder_pending = NULL;
    for (size_t i = 0; i < folder->count; i++) unlinkat(folder->fd, folder->names[i], 0);
    rmdir(folder->temporary);
}

// ---- the place -----------------------------------------------------------------------------------------------------------
static int folder_is_empty(const char *path) {
    const struct dirent *entry;
    DIR *directory = opendir(path);
    int empty = 1;
    if (!directory) die("%s: cannot be looked through: %s; choose another --out", path, strerror(errno));
    while (empty && (entry = readdir(directory))) empty = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
    closedir(directory);
    return empty;
}

// folder->path = where a folder that is to be written to `path` has to go.
static void folder_find_place(OutputFolder *folder, const char *path) {
    struct stat status, here;
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
    if (!folder_is_empty(folder->path))
        die("%s: is a folder that holds something; nothing is mixed into it: choose a new --out", path);
    if (stat(".", &here) == 0 && here.st_dev == status.st_dev && here.st_ino == status.st_ino)
        die("%s: is the folder this program runs in, which cannot be replaced; give a new name", path);
    if (!realpath(path, folder->path) || strlen(folder->path) >= PATH_MAX - 300)
        die("%s: cannot be followed to its end; choose another --out", path);
}

// The folder that `path` is in; base points at its last part.
static void folder_above(char above[PATH_MAX], const char *path, const char **base) {
    const char *slash = strrchr(path, '/');
    *base = slash ? slash + 1 : path;
    snprintf(above, PATH_MAX, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    if (!*above) snprintf(above, PATH_MAX, "/");
}

// ---- what was left by others --------------------------------------------------------------------------------------------
// Cuts off what output_create_temporary adds to a name.
static void name_without_temporary(char name[256]) {
    char base[256];
    for (char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.')) {
        snprintf(base, sizeof(base), "%.*s", (int)(dot - name), name);
        if (!is_temporary_of(name, base)) continue;
        *dot = 0;
        return;
    }
}

// Removes what a process that was killed left of a folder; only files whose names `ours` knows.
static void folder_clear_stale(const char *path, int (*ours)(const char *name)) {
    const struct dirent *entry;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) { // somebody is at it, or it cannot be told
        close(fd);
        return;
    }
    DIR *directory = fdopendir(fd);
    while (directory && (entry = readdir(directory))) {
        char name[256];
        snprintf(name, sizeof(name), "%s", entry->d_name);
        name_without_temporary(name);
        if (ours(name)) unlinkat(fd, entry->d_name, 0);
    }
    if (rmdir(path) == 0)
        note("%s, which a conversion that was cut off had left, is removed", path);
    else
        note("%s was left by a conversion that was cut off; look through it and remove it", path);
    if (directory)
        closedir(directory);
    else
        close(fd);
}

static void folder_clear_others(const OutputFolder *folder, int (*ours)(const char *name)) {
    char above[PATH_MAX], path[PATH_MAX];
    const char *base;
    const struct dirent *entry;
    folder_above(above, folder->path, &base);
    DIR *directory = opendir(above);
    if (!directory) return; // it need not be readable to be written to
    while ((entry = readdir(directory))) {
        if (!is_temporary_of(entry->d_name, base)) continue;
        path_join(path, above, entry->d_name);
        folder_clear_stale(path, ours);
    }
    closedir(directory);
}

// ---- writing ---------------------------------------------------------------------------------------------------------------
static void folder_create_temporary(OutputFolder *folder) {
    for (int attempt = 0; attempt < 1000; attempt++) {
        snprintf(folder->temporary, sizeof(folder->temporary), "%.*s.%ld-%d.tmp", PATH_MAX - 40, folder->path,
                 (long)getpid(), attempt);
        if (mkdir(folder->temporary, 0777) != 0) {
            if (errno == EEXIST) continue;
            break;
        }
        folder->fd = open(folder->temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder->fd < 0) break;
        flock(folder->fd, LOCK_EX | LOCK_NB); // where it is refused, nobody else gets it either
        if (path_is_file(folder->temporary, folder->fd)) return;
        close(folder->fd); // somebody took it for an old one
    }
    die("%s: the folder cannot be created: %s; choose another --out", folder->path, strerror(errno));
}

// bytes, files: what will be in it. ours: whether a file of this name, found in one that was left over, may be removed.
static void folder_open(OutputFolder *folder, const char *path, uint64_t bytes, size_t files,
                        int (*ours)(const char *name)) {
    char above[PATH_MAX];
    const char *base;
    uint64_t available;
    memset(folder, 0, sizeof(*folder));
    signals_prepare();
    folder_find_place(folder, path);
    folder_clear_others(folder, ours);
    folder_above(above, folder->path, &base);
    if (space_available(above, &available) && available < bytes)
        die("%s: %s (%llu bytes) are to be written, but only %s are free there; make room or choose another --out",
            path, human_bytes((double)bytes), (unsigned long long)bytes, human_bytes((double)available));
    folder->names = (char(*)[256])checked_calloc(files, sizeof(*folder->names), "the names of the files to be written");
    folder->capacity = files;
    folder_create_temporary(folder);
    folder_pending = folder;
    discard_more = folder_discard;
}

// A file in it, which is closed with output_commit.
static void folder_open_file(OutputFolder *folder, OutputFile *file, const char *name, uint64_t bytes) {
    char path[PATH_MAX];
    if (folder->count == folder->capacity) die("internal: %s: more files than were announced", folder->path);
    snprintf(folder->names[folder->count], sizeof(folder->names[0]), "%s", name);
    folder->count = folder->count + 1;
    path_join(path, folder->temporary, name);
    output_open(file, path, bytes);
}

// Everything in it is written and synced: the rename makes it count.
static void folder_commit(OutputFolder *folder) {
    fsync(folder->fd);
    if (rename(folder->temporary, folder->path) != 0)
        die("%s: the finished folder cannot be given its name: %s; choose another --out", folder->path,
            strerror(errno));
    folder_pending = NULL;
    sync_folder_of(folder->path);
    close(folder->fd);
    free(folder->names);
}

#endif
