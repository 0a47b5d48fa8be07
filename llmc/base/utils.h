/*
What every part needs and none owns: errors that end the program with one clear line, checked host allocation,
strict number parsing, UTF-8, sizes for people, time. Exit codes: 2 usage, 1 bad files and run-time failure, 0 success.
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
#define DIE_MESSAGE  9216 // bytes: two paths and what is wrong with them

#ifndef PROGRAM_NAME
#define PROGRAM_NAME "train"
#endif

// Called before a line goes to stderr: who draws there (the progress bar) makes room.
static void (*before_message)(void);

// Of a thread beside the main one: who takes its errors there, since only the main thread ends the program. Does not return.
static __thread void (*die_caught)(int code, const char *message);

// How a process speaks that runs together with others (dist.h sets it); all zeros: alone. One for the whole program,
// whichever translation units it has: hence weak.
typedef struct {
    char name[320]; // "rank 3 on HOST: ", before errors
    int silent;     // another process speaks to people
    int failed;     // the exit code that die chose
    // Before an error is printed: of processes that all fail, one says why. In the others it does not return.
    void (*before_error)(int code);
} Voice;
__attribute__((weak)) Voice voice;

// Whether this is the process that people read: of several, rank 0.
static int is_main_rank(void) { return !voice.silent; }

__attribute__((noreturn, format(printf, 2, 3))) static void die_with(int code, const char *format, ...) {
    char message[DIE_MESSAGE];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    if (die_caught) die_caught(code, message);
    fflush(stdout);
    if (voice.before_error) voice.before_error(code);
    if (before_message) before_message();
    fprintf(stderr, "%s: %s%s\n", PROGRAM_NAME, voice.name, message); // at once: a launcher writes there, too
    voice.failed = code;
    exit(code);
}
#define die(...)       die_with(EXIT_RUNTIME, __VA_ARGS__)
#define die_usage(...) die_with(EXIT_USAGE, __VA_ARGS__)

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    va_list args;
    if (!is_main_rank()) return;
    if (before_message) before_message();
    fputs("note: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

// What main calls last: results that a full disk did not take are a failure like any other.
static void stdout_finish(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    die("standard output is not complete: %s", errno ? strerror(errno) : "an earlier write to it failed");
}

// ---- host allocation ---------------------------------------------------------------------------------------------
// After the first step nothing of ours may allocate: tests set the guard, and an allocation then is fatal.
static int allocation_guard;

static void *checked_malloc(size_t bytes, const char *what) {
    if (allocation_guard) die("allocation of %zu bytes for %s after the first step (allocation guard)", bytes, what);
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory)
        die("out of host memory: %zu bytes wanted for %s; free some memory or use a smaller model", bytes, what);
    return memory;
}

static void *checked_calloc(size_t count, size_t size, const char *what) {
    if (allocation_guard)
        die("allocation of %zu x %zu bytes for %s after the first step (allocation guard)", count, size, what);
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

// ---- numbers: the whole text must be one number, or 0 is returned -------------------------------------------------
static int parse_size(const char *text, size_t *value) {
    char *end;
    if (*text < '0' || *text > '9') return 0;
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (errno || *end) return 0;
    *value = (size_t)parsed;
    return 1;
}

static int parse_double(const char *text, double *value) {
    char *end;
    if (!((*text >= '0' && *text <= '9') || *text == '-' || *text == '.')) return 0;
    if (strpbrk(text, "xX")) return 0;
    errno = 0;
    *value = strtod(text, &end);
    return *end == 0 && isfinite(*value);
}

static int parse_bool(const char *text, int *value) {
    if (!strcmp(text, "true") || !strcmp(text, "True") || !strcmp(text, "1")) return *value = 1, 1;
    if (!strcmp(text, "false") || !strcmp(text, "False") || !strcmp(text, "0")) return *value = 0, 1;
    return 0;
}

// "80GiB", "78.5GB", "900MiB", "1024": bytes
static int parse_bytes(const char *text, size_t *bytes) {
    static const struct {
        const char *unit;
        double factor;
    } units[] = {{"", 1},
                 {"B", 1},
                 {"KiB", 1024.0},
                 {"MiB", 1048576.0},
                 {"GiB", 1073741824.0},
                 {"TiB", 1099511627776.0},
                 {"kB", 1e3},
                 {"KB", 1e3},
                 {"MB", 1e6},
                 {"GB", 1e9},
                 {"TB", 1e12},
                 {"G", 1073741824.0},
                 {"M", 1048576.0},
                 {"K", 1024.0}};
    char *end;
    if (!((*text >= '0' && *text <= '9') || *text == '.') || strpbrk(text, "xX")) return 0;
    double number = strtod(text, &end);
    while (*end == ' ') end++;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (!strcmp(end, units[i].unit)) {
            number *= units[i].factor;
            if (!(number >= 0 && number < 9e18)) return 0;
            *bytes = (size_t)number;
            return 1;
        }
    }
    return 0;
}

// ---- text ---------------------------------------------------------------------------------------------------------
// Bytes of the well-formed UTF-8 character at text (Unicode's table 3-7), or 0.
static size_t utf8_length(const unsigned char *text, size_t left) {
    unsigned char c = text[0], least = 0x80, most = 0xbf;
    size_t length = c < 0x80 ? 1 : c >= 0xc2 && c <= 0xdf ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    if (length == 0 || length > left) return 0;
    if (c == 0xe0) least = 0xa0; // overlong forms, surrogates and what is above U+10FFFF are not UTF-8
    if (c == 0xed) most = 0x9f;
    if (c == 0xf0) least = 0x90;
    if (c == 0xf4) most = 0x8f;
    for (size_t i = 1; i < length; i++) {
        if (text[i] < least || text[i] > most) return 0;
        least = 0x80, most = 0xbf;
    }
    return length;
}

// Bytes for people: "1.25 GiB". The buffer is one of a few static ones, so that several fit in one printf.
static const char *human_bytes(double bytes) {
    static char buffers[16][24];
    static int next;
    static const char *units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    char *out = buffers[next++ % 16];
    int unit = 0;
    while (bytes >= 1024 && unit < 5) bytes /= 1024, unit++;
    snprintf(out, sizeof(buffers[0]), unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

// Of `count` > 0 ascending numbers, `stride` bytes apart (a field of an array of structs, say), the last that is at most `value`;
// the first where none is.
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
