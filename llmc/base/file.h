/*
Paths and input. file_open opens regular files only: nothing waits for a pipe or a device. An InputFile has a known size
and is read at any offset with pread. It is not mapped: mapped pages would count as this process's memory. Every failure
ends the program with one line that names the file, the offset and the size. Output is in output.h.
*/
#ifndef LLMC_FILE_H
#define LLMC_FILE_H
#include "text.h"
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- paths ----------------------------------------------------------------------------------------------------------
static int same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

// Tells whether `path` names the file that is open as fd.
static int path_is_file(const char *path, int fd) {
    struct stat named, opened;
    return !stat(path, &named) && !fstat(fd, &opened) && same_file(&named, &opened);
}

// Tells whether an error means that nothing usable has this name. After other errors something may be there.
static int error_is_absence(int error) {
    return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENODEV || error == ENXIO;
}

// Examines a path; tries again after EINTR. Returns 0 if nothing is there or it may not be seen. Ends the program if an
// error does not tell.
static int path_stat(const char *path, struct stat *status) {
    int failed;
    while ((failed = stat(path, status)) != 0 && errno == EINTR) continue;
    if (failed && !error_is_absence(errno) && errno != EACCES && errno != ENAMETOOLONG)
        die("%s: cannot be examined: %s", path, error_text(errno));
    return !failed;
}

static int path_exists(const char *path) {
    struct stat status;
    return path_stat(path, &status);
}

static int path_is_directory(const char *path) {
    struct stat status;
    return path_stat(path, &status) && S_ISDIR(status.st_mode);
}

// Returns the last part of a path.
static const char *path_last(const char *path) { return strrchr(path, '/') ? strrchr(path, '/') + 1 : path; }

// Copies the folder that contains `path` to `above`.
static void folder_above(char above[PATH_MAX], const char *path) {
    const char *slash = strrchr(path, '/');
    snprintf(above, PATH_MAX, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    if (!*above) snprintf(above, PATH_MAX, "/");
}

// Syncs the folder of `path`, so that a name that was created, renamed or removed in it survives a power failure.
static void sync_folder_of(const char *path) {
    char above[PATH_MAX];
    folder_above(above, path);
    int fd = open(above, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd); // some file systems refuse; continue
    close(fd);
}

static void path_join(char path[PATH_MAX], const char *directory, const char *name) {
    if (snprintf(path, PATH_MAX, "%s/%s", directory, name) >= PATH_MAX)
        die("%s/%s: this path is longer than the %d bytes the system allows", directory, name, PATH_MAX);
}

// Joins a path and tells whether it is there.
static int path_found(char path[PATH_MAX], const char *folder, const char *name) {
    path_join(path, folder, name);
    return path_exists(path);
}

// Tells whether a folder has a file or folder of this name.
static int folder_has(const char *folder, const char *name) {
    char path[PATH_MAX];
    return path_found(path, folder, name);
}

// Lists at most three paths folder/pattern for messages: "a or b". If the pattern has a slash: the folders they are in
static const char *folder_matches(const char *folder, const char *pattern) {
    static TextLine line;
    char path[PATH_MAX];
    glob_t found;
    path_join(path, folder, pattern);
    *line.text = 0, line.used = 0;
    glob(path, GLOB_BRACE, NULL, &found);
    for (size_t i = 0; i < min_size(found.gl_pathc, 3); i++) {
        if (strchr(pattern, '/')) *strrchr(found.gl_pathv[i], '/') = 0;
        line_add(&line, "%s%s", i ? " or " : "", found.gl_pathv[i]);
    }
    globfree(&found);
    return line.text;
}

// ---- opening --------------------------------------------------------------------------------------------------------
// Opens a regular file; -1: file_fault says why it cannot. Never waits for a pipe. Pass O_NOFOLLOW to write in a folder
// where others may write: it refuses a symbolic link.
static int file_open(const char *path, int flags) {
    struct stat status;
    int fd, error = ENODEV;
    while ((fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666)) < 0 && errno == EINTR) continue;
    if (fd < 0) return fd;
    if (fstat(fd, &status) != 0)
        error = errno;
    else if (S_ISREG(status.st_mode))
        return fd;
    close(fd);
    errno = error;
    return -1;
}

static const char *file_fault(void) {
    static char text[160];
    if (errno == ENODEV || errno == ENXIO) return "is not a regular file";
    if (errno == ELOOP) return "is a symbolic link that is not followed; put the file itself there";
    snprintf(text, sizeof(text), "cannot be opened: %s", error_text(errno));
    return text;
}

// Opens a folder to list it; tries again after EINTR. NULL: errno says why it cannot
static DIR *folder_list(const char *path) {
    DIR *directory;
    while (!(directory = opendir(path)) && errno == EINTR) continue;
    return directory;
}

// Returns the next entry of an open folder. At its end returns NULL with errno 0, at an error NULL with the error's
// number in errno.
static const struct dirent *folder_next(DIR *directory) {
    const struct dirent *entry;
    do {
        errno = 0;
        entry = readdir(directory);
    } while (!entry && errno == EINTR);
    return entry;
}

// ---- input ----------------------------------------------------------------------------------------------------------
typedef struct {
    int fd;
    char *path;
    uint64_t bytes;
} InputFile;

static InputFile input_open(const char *path) {
    InputFile file;
    struct stat status;
    file.fd = file_open(path, O_RDONLY);
    if (file.fd < 0) die("%s: %s", path, file_fault());
    if (fstat(file.fd, &status) != 0) die("%s: cannot be examined: %s", path, error_text(errno));
    if (status.st_size == 0) die("%s: is empty; copy or write it again", path);
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
                error_text(errno));
        if (got == 0)
            die("%s: ends at byte %llu, but %zu more bytes were expected; leave the file alone while it is read",
                file->path, (unsigned long long)offset, bytes);
        cursor += got, offset += (uint64_t)got, bytes -= (size_t)got;
    }
}

// Reads the first bytes of a file, at most begin[room]. Returns how many.
static size_t input_begin(const char *path, void *begin, size_t room) {
    InputFile file = input_open(path);
    const size_t bytes = min_size(file.bytes, room);
    input_read(&file, 0, begin, bytes);
    input_close(&file);
    return bytes;
}

// Reads a whole text file of at most `limit` bytes and ends it with a zero. The caller frees it.
static char *input_read_text(const char *path, size_t limit, size_t *length) {
    InputFile file = input_open(path);
    if (file.bytes > limit)
        die("%s: has %llu bytes, but a file of this kind may have at most %zu", path, (unsigned long long)file.bytes,
            limit);
    *length = (size_t)file.bytes;
    char *text = (char *)checked_malloc(*length + 1, path);
    input_read(&file, 0, text, *length);
    text[*length] = 0;
    input_close(&file);
    return text;
}

// ---- other files ----------------------------------------------------------------------------------------------------
#define MAKE_SHARDS "make shards for --data of it: %s --tokenizer MODEL --out shards %s"

// Returns the command that makes shards. The command of a wheel sets the variable.
static const char *prepare_command(void) {
    const char *command = getenv("STREAMBP_PREPARE");
    return command ? command : "python3 data/prepare.py";
}

// Kinds of files by their first bytes, and the option that takes each; NULL: shards can be made of the file
static const struct {
    const char *magic;
    size_t bytes;
    const char *name, *advice;
} file_kinds[] = {
    {"SBPSHARD", 8, "a token shard", "it belongs to --data"},
    {"\x88\xd8\x34\x01", 4, "a token shard of llm.c", "it belongs to --data"},
    {"\xa1\xd9\x34\x01", 4, "a token shard of llm.c (Llama 3)", "it belongs to --data"},
    {"\x8a\xd8\x34\x01", 4, "an evaluation file of llm.c", "nothing here reads it"},
    {"\x8f\xd8\x34\x01", 4, "an optimizer state of llm.c", "nothing here reads it"},
    {"\xa3\xd9\x34\x01", 4, "a Llama 3 checkpoint of llm.c", "take the Hugging Face directory"},
    {"\xc6\xd7\x34\x01", 4, "an llm.c GPT-2 .bin", "it belongs to --model"},
    {"STREAMBP", 8, "a flat .bin of a model", "it belongs to --model"},
    {"SBPTOKEN", 8, "a tokenizer", "it belongs to --tokenizer"},
    {"SBPLOGPS", 8, "a file of log-probabilities", "it belongs to --reference-logprobs or --teacher-logprobs"},
    {"SBPADAMW", 8, "the optimizer of a checkpoint", "give the folder of its run"},
    {"GGUF", 4, "a GGUF model", "take the Hugging Face directory that it was made from"},
    {"PAR1", 4, "a Parquet table", NULL},
    {"\x1f\x8b", 2, "compressed by gzip", "unpack it"},
    {"\x28\xb5\x2f\xfd", 4, "compressed by zstd", "unpack it"},
    {"PK\3\4", 4, "a zip archive (as PyTorch's .bin and .pt are)", "unpack it, or take safetensors"}};

// Ends the program if the file is of a known kind other than `wanted`.
static void file_refuse_kind(const char *path, const char *wanted) {
    unsigned char begin[512] = {0};
    const size_t bytes = input_begin(path, begin, sizeof(begin));
    const char *name = NULL, *advice = NULL;
    size_t printed = 0, blank;
    for (size_t i = 0; i < sizeof(file_kinds) / sizeof(file_kinds[0]) && !name; i++)
        if (!memcmp(begin, file_kinds[i].magic, file_kinds[i].bytes))
            name = file_kinds[i].name, advice = file_kinds[i].advice;
    if (!name && begin[7] == 0 && begin[8] == '{')
        name = "a safetensors file", advice = "give the directory it is in with --model or --adapter";
    while (printed < bytes && (begin[printed] >= ' ' || (begin[printed] >= '\t' && begin[printed] <= '\r'))) printed++;
    if (!name && printed == bytes) {
        blank = memcmp(begin, "\xef\xbb\xbf", 3) ? 0 : 3; // a byte order mark
        while (blank < bytes && begin[blank] <= ' ') blank++;
        name = blank < bytes && (begin[blank] == '{' || begin[blank] == '[') ? "JSON" : "text";
    }
    if (name && advice) die("%s: is %s, not %s; %s", path, name, wanted, advice);
    if (name) die("%s: is %s, not %s; " MAKE_SHARDS, path, name, wanted, prepare_command(), path);
}

// Reads the rest of a FILE, at most `limit` bytes, and ends it with a zero. The caller frees it.
static char *stream_read_text(FILE *stream, const char *name, size_t limit, size_t *length) {
    size_t capacity = 65536, got;
    char *text = (char *)checked_malloc(capacity, name);
    *length = 0;
    while ((got = fread(text + *length, 1, capacity - *length - 1, stream)) > 0) {
        *length += got;
        if (*length > limit) die("%s: has more than the %zu bytes that are read; shorten it", name, limit);
        if (capacity - *length > 1) continue;
        text = (char *)checked_realloc(text, capacity *= 2, name);
    }
    if (ferror(stream)) die("%s: reading failed: %s", name, error_text(errno));
    text[*length] = 0;
    return text;
}

#endif
