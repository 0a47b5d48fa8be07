/*
What every room needs: errors that end the program with one clear line, checked host allocation, time. Exit codes: 2
usage, 1 bad files and run-time failure, 0 success.
*/
#ifndef LLMC_UTILS_H
#define LLMC_UTILS_H
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXIT_RUNTIME 1
#define EXIT_USAGE   2
#define DIE_MESSAGE  9216 // bytes: enough for two paths and a fault

// ---- text for a terminal -------------------------------------------------------------------------------------------
// Returns the length of the well-formed UTF-8 character at text (Unicode's table 3-7), or 0.
static size_t utf8_length(const unsigned char *text, size_t left) {
    unsigned char c = text[0], least = 0x80, most = 0xbf;
    size_t length = c < 0x80 ? 1 : c >= 0xc2 && c <= 0xdf ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    if (length == 0 || length > left) return 0;
    if (c == 0xe0) least = 0xa0; // excludes overlong forms, surrogates and code points above U+10FFFF
    if (c == 0xed) most = 0x9f;
    if (c == 0xf0) least = 0x90;
    if (c == 0xf4) most = 0x8f;
    for (size_t i = 1; i < length; i++) {
        if (text[i] < least || text[i] > most) return 0;
        least = 0x80, most = 0xbf;
    }
    return length;
}

// Returns the offset of the first byte of text[bytes] that is not UTF-8, or bytes.
static size_t utf8_valid_until(const char *text, size_t bytes) {
    size_t i = 0, length = 1;
    for (; i < bytes && length; i += length) length = utf8_length((const unsigned char *)text + i, bytes - i);
    return i;
}

// Replaces control characters and invalid UTF-8 by '?', in place.
static char *make_printable(char *text) {
    for (size_t i = 0, n; text[i]; i += n) {
        const unsigned char *c = (const unsigned char *)text + i;
        n = utf8_length(c, strnlen(text + i, 4));
        const int shown = n && *c >= 0x20 && *c != 0x7f && !(*c == 0xc2 && c[1] < 0xa0);
        if (!n) n = 1;
        if (!shown) memset(text + i, '?', n);
    }
    return text;
}

// ---- errors and notes ----------------------------------------------------------------------------------------------
// Hook that is called before a line goes to stderr, so that the progress bar can clear itself
static void (*before_message)(void);

// All translation units of a program share these variables. An op set's object (OP_SET) refers to the program's.
#ifdef OP_SET
#define PROGRAM_WIDE extern
#else
#define PROGRAM_WIDE __attribute__((weak))
#endif

// Handles this thread's errors in place of ending the program; does not return. For threads other than the main thread,
// and for failures that the program survives.
PROGRAM_WIDE __thread void (*die_caught)(int code, const char *message);

// How one of several processes reports (dist.h sets it); zeros: there is one process
typedef struct {
    char name[320]; // "rank 3 on HOST: ", printed before errors
    int silent;     // 1: another process prints
    int failed;     // the exit code that die chose
    // called before an error is printed: if several processes fail, it returns in one process and ends the rest
    void (*before_error)(int code);
    void (*before_end)(void); // called before a signal ends the process; uses only system calls
    int (*others_died)(void); // returns 1 if another process of the job was killed; uses only system calls
} Voice;
PROGRAM_WIDE Voice voice;

// Commit of the checkout, and the version in the file VERSION; make writes them
extern const char build_commit[] __attribute__((weak)), build_version[] __attribute__((weak));
static const char *program_commit(void) { return build_commit ? build_commit : "unknown"; }
static const char *program_version(void) { return build_version ? build_version : "unknown"; }

static const char *program_called(void) { return program_invocation_name; }

// Tells whether this process prints: it does if it is rank 0 or alone.
static int is_main_rank(void) { return !voice.silent; }

__attribute__((noreturn, format(printf, 2, 3))) static void die_with(int code, const char *format, ...) {
    char message[DIE_MESSAGE];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    make_printable(message);
    if (die_caught) die_caught(code, message);
    fflush(stdout);
    if (voice.before_error) voice.before_error(code);
    if (before_message) before_message();
    // in one piece, since a launcher writes to stderr, too
    fprintf(stderr, "%s: %s%s\n", program_invocation_short_name, voice.name, message);
    voice.failed = code;
    exit(code);
}
#define die(...)       die_with(EXIT_RUNTIME, __VA_ARGS__)
#define die_usage(...) die_with(EXIT_USAGE, __VA_ARGS__)

// Notes of this run. A resumed run does not repeat the first notes_known notes, which are in the run's log.
static char *note_texts[32];
static size_t notes_kept, notes_known;

// Keeps a copy of a note. Without memory for it the note is forgotten.
static void note_keep(const char *text) {
    if (notes_kept < 32 && (note_texts[notes_kept] = strdup(text)) != NULL) notes_kept++;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    char message[DIE_MESSAGE];
    va_list args;
    if (!is_main_rank()) return;
    if (before_message) before_message();
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    make_printable(message);
    for (size_t i = 0; i < notes_known; i++)
        if (!strcmp(note_texts[i], message)) return;
    note_keep(message);
    fprintf(stderr, "note: %s\n", message);
}

// Names an error of the system, with its remedy unless the remedy is another path.
static const char *error_text(int error) {
    if (error == EMFILE) return "Too many open files (raise ulimit -n)";
    if (error == EFBIG) return "File too large (raise ulimit -f, or change the file system)";
    if (error == ENOMEM) return "Cannot allocate memory (free some memory)";
    return strerror(error);
}

// Fails if standard output is incomplete (for example on a full disk). main calls it last.
static void stdout_finish(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    die("standard output is not complete: %s", errno ? error_text(errno) : "an earlier write to it failed");
}

// ---- host allocation ---------------------------------------------------------------------------------------------
// Set by tests after the first step: any later allocation of ours then ends the program
static int allocation_guard;

// Changes the size of `memory`, or allocates it if it is NULL.
static void *checked_realloc(void *memory, size_t bytes, const char *what) {
    if (allocation_guard)
        die("allocation of %zu bytes for %s after the first step (allocation guard); please report it", bytes, what);
    memory = realloc(memory, bytes ? bytes : 1);
    if (!memory)
        die("out of host memory: %zu bytes wanted for %s; free some memory or use a smaller model", bytes, what);
    return memory;
}

static void *checked_malloc(size_t bytes, const char *what) { return checked_realloc(NULL, bytes, what); }

static void *checked_calloc(size_t count, size_t size, const char *what) {
    if (allocation_guard)
        die("allocation of %zu x %zu bytes for %s after the first step (allocation guard); please report it", count,
            size, what);
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory)
        die("out of host memory: %zu x %zu bytes wanted for %s; free some memory or use a smaller model", count, size,
            what);
    return memory;
}

static char *checked_strdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = (char *)checked_malloc(bytes, "a string");
    memcpy(copy, text, bytes);
    return copy;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Returns the median of numbers[count], count > 0. Sorts them.
static double median(double *numbers, size_t count) {
    qsort(numbers, count, sizeof(double), compare_doubles);
    return (numbers[(count - 1) / 2] + numbers[count / 2]) / 2;
}

// Returns the index of the last of `count` > 0 ascending numbers that is at most `value`; 0 if there is none. The
// numbers lie `stride` bytes apart (for example a field in an array of structs).
static size_t last_at_most(const size_t *numbers, size_t stride, size_t count, size_t value) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (*(const size_t *)(const void *)((const char *)numbers + middle * stride) <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#endif
