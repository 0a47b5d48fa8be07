/*
Files. An InputFile is a regular file of known size, opened once and read at any offset with pread; it is not mapped, since
the pages of a mapped file would count as this process's memory. An OutputFile is complete or absent: it is written beside
its place under a name of this process's own, synced, and renamed by output_commit; whatever ends the program before that
removes it, short of a kill -9. Only regular files are replaced; where a symbolic link stands, the file it leads to is.
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

// Whether `path` names the file that is open as fd.
static int path_is_file(const char *path, int fd) {
    struct stat named, opened;
    return !stat(path, &named) && !fstat(fd, &opened) && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

static int path_exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0;
}

static int path_is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

// Makes what was created, renamed or removed in a folder survive a power failure.
static void sync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd); // some file systems refuse, and then there is no more to be done
    close(fd);
}

// The same for the folder that `path` is in.
static void sync_folder_of(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof(folder), "%.*s", slash ? (int)(slash - path) : 0, path);
    sync_folder(*folder ? folder : slash ? "/" : ".");
}

static void path_join(char path[PATH_MAX], const char *directory, const char *name) {
    if (snprintf(path, PATH_MAX, "%s/%s", directory, name) >= PATH_MAX)
        die("%s/%s: this path is longer than the %d bytes the system allows", directory, name, PATH_MAX);
}

static InputFile input_open(const char *path) {
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

static void input_close(InputFile *file) {
    close(file->fd);
    free(file->path);
    file->path = NULL;
}

static void input_read(const InputFile *file, uint64_t offset, void *out, size_t bytes) {
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
static char *input_read_text(const char *path, size_t limit, size_t *length) {
    InputFile file = input_open(path);
    if (file.bytes > limit)
        die("%s: has %llu bytes, more than the %zu such a file may have", path, (unsigned long long)file.bytes, limit);
    *length = (size_t)file.bytes;
    char *text = (char *)checked_malloc(*length + 1, path);
    input_read(&file, 0, text, *length);
    text[*length] = 0;
    input_close(&file);
    return text;
}

// What is still to come from a stream, of at most `limit` bytes, with a zero behind it; the caller frees it.
static char *stream_read_text(FILE *stream, const char *name, size_t limit, size_t *length) {
    size_t capacity = 65536, got;
    char *text = (char *)checked_malloc(capacity, name);
    *length = 0;
    while ((got = fread(text + *length, 1, capacity - *length - 1, stream)) > 0) {
        *length += got;
        if (*length > limit) die("%s: has more than %zu bytes", name, limit);
        if (capacity - *length > 1) continue;
        char *grown = (char *)checked_malloc(2 * capacity, name);
        memcpy(grown, text, *length);
        free(text);
        text = grown, capacity *= 2;
    }
    if (ferror(stream)) die("%s: reading failed: %s", name, strerror(errno));
    text[*length] = 0;
    return text;
}

// ---- what is half written when the program ends -------------------------------------------------------------------------
typedef struct {
    int fd;
    char path[PATH_MAX], temporary[PATH_MAX];
} OutputFile;

static OutputFile *volatile output_pending; // the one that is being written
static void (*volatile discard_more)(
    void); // who has more than that to remove sets this; it runs in a signal handler, too

static void output_discard(void) {
    if (output_pending) unlink(output_pending->temporary);
    output_pending = NULL;
    if (discard_more) discard_more();
}

// Ctrl-C, a closed terminal, a batch system: what is half written goes, then the signal does what it always does.
static void end_by_signal(int number) {
    output_discard();
    kill(getpid(), number); // its action is the default one again (SA_RESETHAND)
}

// What main calls before anything is written.
static void signals_prepare(void) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    static int prepared;
    struct sigaction before;
    if (prepared) return;
    prepared = 1;
    atexit(output_discard);
    signal(SIGXFSZ, SIG_IGN); // a limit on file sizes (ulimit -f) shall be an error of write like any other
    struct sigaction action = {0};
    action.sa_handler = end_by_signal;
    action.sa_flags = (int)SA_RESETHAND | SA_NODEFER;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        sigaction(ends[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(ends[i], &action, NULL); // nohup stays in force
    }
}

// ---- output -----------------------------------------------------------------------------------------------------------
__attribute__((noreturn)) static void output_fail(const OutputFile *file, const char *action, int error) {
    die("%s: %s failed: %s; free some space or choose another place (the unfinished file is removed)", file->path,
        action, strerror(error));
}

// file->path = where a file that is to be written to `path` has to go.
static void output_find_place(OutputFile *file, const char *path) {
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

// Names of the process's own: two that write to one place do not mix, and what a user calls X.tmp stays.
static void output_create_temporary(OutputFile *file) {
    file->fd = -1;
    for (int attempt = 0; file->fd < 0 && attempt < 1000; attempt++) {
        if (snprintf(file->temporary, sizeof(file->temporary), "%s.%ld-%d.tmp", file->path, (long)getpid(), attempt) >=
            (int)sizeof(file->temporary))
            die("%.200s...: this path is too long to write to", file->path);
        file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0 && errno != EEXIST) break;
    }
    if (file->fd < 0) die("%s: cannot be created: %s; choose another place", file->path, strerror(errno));
    output_pending = file;
}

// Whether `name` is one that output_create_temporary gives to what will be `base`.
static int is_temporary_of(const char *name, const char *base) {
    size_t length = strlen(base);
    if (strncmp(name, base, length) != 0 || name[length] != '.') return 0;
    name += length + 1;
    size_t digits = strspn(name, "0123456789");
    if (!digits || name[digits] != '-') return 0;
    name += digits + 1;
    digits = strspn(name, "0123456789");
    return digits && !strcmp(name + digits, ".tmp");
}

// `bytes` is the size the file will have: a disk that is too small says so now and not at the end.
static void output_open(OutputFile *file, const char *path, uint64_t bytes) {
    if (output_pending) die("%s: cannot be written while %s is", path, output_pending->path);
    signals_prepare();
    output_find_place(file, path);
    output_create_temporary(file);
#ifdef __linux__
    // Not every file system can reserve space; those that cannot say so otherwise than by being full.
    if (fallocate(file->fd, 0, 0, (off_t)bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        char action[64];
        int error = errno;
        snprintf(action, sizeof(action), "reserving %s", human_bytes((double)bytes));
        output_fail(file, action, error);
    }
#else
    (void)bytes;
#endif
}

static void output_write(const OutputFile *file, uint64_t offset, const void *data, size_t bytes) {
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

// Another process's unfinished file, of which this one writes a part, and then leaves it to be committed there.
static void output_join(OutputFile *file, const char *path, const char *temporary) {
    snprintf(file->path, sizeof(file->path), "%s", path);
    snprintf(file->temporary, sizeof(file->temporary), "%s", temporary);
    file->fd = open(temporary, O_WRONLY | O_CLOEXEC);
    if (file->fd < 0)
        die("%s: cannot be opened, where rank 0 has begun to write: %s; choose a place that all hosts see", temporary,
            strerror(errno));
}

static void output_leave(const OutputFile *file) {
    if (fsync(file->fd) != 0) output_fail(file, "syncing", errno);
    if (close(file->fd) != 0) output_fail(file, "closing", errno);
}

// After this the file is there under its name, whatever happens to the machine.
static void output_commit(OutputFile *file) {
    if (fsync(file->fd) != 0) output_fail(file, "syncing", errno);
    if (close(file->fd) != 0) output_fail(file, "closing", errno);
    if (rename(file->temporary, file->path) != 0) output_fail(file, "renaming the finished file", errno);
    output_pending = NULL;
    sync_folder_of(file->path);
}

#endif
