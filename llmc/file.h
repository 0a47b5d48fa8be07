/*
Files. An InputFile is a regular file of known size, opened once and read at any offset with pread; it is not mapped, since
the pages of a mapped file would count as this process's memory. An OutputFile is complete or absent: it is written beside
its place as "<path>.tmp", synced, and renamed by output_commit; whatever ends the program before that removes it.
Every failure ends the program with one line that names the file, the place and the size. Writing allocates nothing.
*/
#ifndef LLMC_FILE_H
#define LLMC_FILE_H
#include "utils.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

// ---- input ------------------------------------------------------------------------------------------------------------
typedef struct {
    int fd;
    char *path;
    uint64_t bytes;
} InputFile;

static inline int path_exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0;
}

static inline int path_is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static inline void path_join(char path[PATH_MAX], const char *directory, const char *name) {
    if (snprintf(path, PATH_MAX, "%s/%s", directory, name) >= PATH_MAX)
        die("%s/%s: this path is longer than the %d bytes the system allows", directory, name, PATH_MAX);
}

static inline InputFile input_open(const char *path) {
    InputFile file;
    struct stat status;
    file.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe must not block before fstat says what it is
    if (file.fd < 0)
        die("%s: cannot be opened: %s%s", path, strerror(errno),
            errno == EMFILE ? "; raise the limit with ulimit -n" : "");
    if (fstat(file.fd, &status) != 0) die("%s: cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode)) die("%s: is not a regular file", path);
    if (status.st_size == 0) die("%s: is empty", path);
    file.path = checked_strdup(path);
    file.bytes = (uint64_t)status.st_size;
    return file;
}

static inline void input_close(InputFile *file) {
    close(file->fd);
    free(file->path);
    file->path = NULL;
}

static inline void input_read(const InputFile *file, uint64_t offset, void *out, size_t bytes) {
    char *cursor = (char *)out;
    while (bytes) {
        ssize_t got = pread(file->fd, cursor, min_size(bytes, (size_t)1 << 30), (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            die("%s: reading %zu bytes at byte %llu failed: %s", file->path, bytes, (unsigned long long)offset,
                strerror(errno));
        if (got == 0)
            die("%s: ends at byte %llu, %zu more bytes were expected; was it cut while being read?", file->path,
                (unsigned long long)offset, bytes);
        cursor += got, offset += (uint64_t)got, bytes -= (size_t)got;
    }
}

// A whole text file of at most `limit` bytes, with a zero behind it; the caller frees it.
static inline char *input_read_text(const char *path, size_t limit, size_t *length) {
    InputFile file = input_open(path);
    char *text;
    if (file.bytes > limit)
        die("%s: has %llu bytes, more than the %zu such a file may have", path, (unsigned long long)file.bytes, limit);
    *length = (size_t)file.bytes;
    text = (char *)checked_malloc(*length + 1, path);
    input_read(&file, 0, text, *length);
    text[*length] = 0;
    input_close(&file);
    return text;
}

// ---- output -----------------------------------------------------------------------------------------------------------
typedef struct {
    int fd;
    char path[PATH_MAX], temporary[PATH_MAX];
} OutputFile;

static OutputFile *output_pending; // the one that is being written, to be removed if the program ends now

static inline void output_discard(void) {
    if (output_pending) unlink(output_pending->temporary);
    output_pending = NULL;
}

__attribute__((noreturn)) static inline void output_fail(const OutputFile *file, const char *action, int error) {
    die("%s: %s failed: %s; free some space or choose another place (the unfinished file is removed)", file->path,
        action, strerror(error));
}

// `bytes` is the size the file will have: a disk that is too small says so now and not at the end.
static inline void output_open(OutputFile *file, const char *path, uint64_t bytes) {
    static int prepared;
    int length = snprintf(file->temporary, sizeof(file->temporary), "%s.tmp", path);
    if (output_pending) die("%s: cannot be written while %s is", path, output_pending->path);
    if (length < 0 || (size_t)length >= sizeof(file->temporary))
        die("%.200s...: this path is too long to write to", path);
    if (path_is_directory(path)) die("%s: is a directory, a file was to be written there; give a file name", path);
    snprintf(file->path, sizeof(file->path), "%.*s", length - 4, file->temporary);
    if (!prepared) {
        atexit(output_discard);
        signal(SIGXFSZ, SIG_IGN); // a limit on file sizes (ulimit -f) shall be an error of write like any other
        prepared = 1;
    }
    file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file->fd < 0) die("%s: cannot be created: %s; choose another place", file->temporary, strerror(errno));
    output_pending = file;
#ifdef __linux__
    // Not every file system can reserve space; those that cannot say so otherwise than by being full.
    if (fallocate(file->fd, 0, 0, (off_t)bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        char action[64];
        snprintf(action, sizeof(action), "reserving %s", human_bytes((double)bytes));
        output_fail(file, action, errno);
    }
#else
    (void)bytes;
#endif
}

static inline void output_write(const OutputFile *file, uint64_t offset, const void *data, size_t bytes) {
    const char *cursor = (const char *)data;
    while (bytes) {
        ssize_t put = pwrite(file->fd, cursor, min_size(bytes, (size_t)1 << 30), (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) {
            char action[80];
            int error = put < 0 ? errno : ENOSPC;
            snprintf(action, sizeof(action), "writing %zu bytes at byte %llu", bytes, (unsigned long long)offset);
            output_fail(file, action, error);
        }
        cursor += put, offset += (uint64_t)put, bytes -= (size_t)put;
    }
}

// After this the file is there under its name, whatever happens to the machine.
static inline void output_commit(OutputFile *file) {
    char *slash = strrchr(file->path, '/');
    int directory;
    if (fsync(file->fd) != 0) output_fail(file, "syncing", errno);
    if (close(file->fd) != 0) output_fail(file, "closing", errno);
    if (rename(file->temporary, file->path) != 0) output_fail(file, "renaming the finished file", errno);
    output_pending = NULL;
    if (slash) slash[slash == file->path] = 0; // the directory; "/" stays
    directory = open(slash ? file->path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0) {
        fsync(directory); // makes the rename durable; some file systems refuse, and then there is no more to be done
        close(directory);
    }
}

#endif
