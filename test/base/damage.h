/*
One driver for damaged files. A row of a table damages one file of a folder and says how the program must refuse it. The
driver damages the file, opens it, compares the refusal, and restores the file. All rows share one child process: a
refusal (die) returns to the driver. test_fuzz.c damages files at random.
*/
#ifndef TEST_DAMAGE_H
#define TEST_DAMAGE_H
#include "child.h"
#include "llmc/base/file.h"
#include <sys/resource.h>

// clang-format off
typedef enum {
    DAMAGE_TEXT, DAMAGE_WHOLE, DAMAGE_FLIP, DAMAGE_PUT, DAMAGE_CUT, DAMAGE_EXTEND, DAMAGE_REMOVE
} DamageKind;
// clang-format on

typedef struct {
    const char *file; // file in the folder of the suite
    DamageKind kind;
    const char *find, *replace; // TEXT: the first `find` becomes `replace`; WHOLE: the file is `replace`
    long long at; // FLIP, PUT: index of a byte; CUT: bytes to keep; EXTEND: bytes to add. Negative: from the end
    size_t bytes; // PUT: the number's bytes, little-endian; FLIP: bit of the byte
    uint64_t value;
    const char *words; // words of the refusal, alternatives separated by "|"; NULL: the file is accepted
} Damage;

#define CHANGED_TEXT(file, find, replace, words)                                                                       \
    { file, DAMAGE_TEXT, find, replace, 0, 0, 0, words }
#define WHOLE_TEXT(file, text, words)                                                                                  \
    { file, DAMAGE_WHOLE, NULL, text, 0, 0, 0, words }
#define FLIPPED_BIT(file, at, bit, words)                                                                              \
    { file, DAMAGE_FLIP, NULL, NULL, at, bit, 0, words }
#define OTHER_NUMBER(file, at, bytes, value, words)                                                                    \
    { file, DAMAGE_PUT, NULL, NULL, at, bytes, (uint64_t)(value), words }
#define CUT_TO(file, at, words)                                                                                        \
    { file, DAMAGE_CUT, NULL, NULL, at, 0, 0, words }
#define EXTENDED_BY(file, by, words)                                                                                   \
    { file, DAMAGE_EXTEND, NULL, NULL, by, 0, 0, words }
#define REMOVED(file, words)                                                                                           \
    { file, DAMAGE_REMOVE, NULL, NULL, 0, 0, 0, words }

typedef struct {
    const char *folder;
    ChildBody body;      // opens the damaged file
    const void *context; // argument of the body; NULL: the path of the damaged file's folder
    // NULL, or repairs values that a format derives from the bytes (checksum, length), so that damage is found later.
    // before: size of the undamaged file. Called only for TEXT, WHOLE and PUT
    void (*mend)(const char *path, char *bytes, size_t count, size_t before);
    int notes; // 1: the words may be in a note before the refusal
} DamageSuite;

// ---- damage ---------------------------------------------------------------------------------------------------------
// Returns a damaged copy of bytes[*count]. *count becomes its size.
static char *damaged_copy(const Damage *d, const char *bytes, size_t *count) {
    const size_t at = d->at < 0 ? *count - (size_t)-d->at : (size_t)d->at;
    const size_t room = *count + (d->replace ? strlen(d->replace) : 0) + (d->kind == DAMAGE_EXTEND ? at : 0) + 1;
    char *copy = (char *)checked_calloc(1, room, "a damaged copy");
    memcpy(copy, bytes, *count);
    if (d->kind == DAMAGE_TEXT) {
        const char *found = (const char *)memmem(bytes, *count, d->find, strlen(d->find));
        if (!found) die("test: \"%s\" is not there to be replaced", d->find);
        const size_t begin = (size_t)(found - bytes), end = begin + strlen(d->find), length = strlen(d->replace);
        memcpy(copy + begin, d->replace, length);
        memcpy(copy + begin + length, bytes + end, *count - end);
        *count = begin + length + *count - end;
    } else if (d->kind == DAMAGE_WHOLE) {
        *count = strlen(d->replace);
        memcpy(copy, d->replace, *count);
    } else if (d->kind == DAMAGE_FLIP) {
        copy[at] = (char)(copy[at] ^ (1 << d->bytes));
    } else if (d->kind == DAMAGE_PUT) {
        for (size_t i = 0; i < d->bytes; i++) copy[at + i] = (char)(d->value >> 8 * (i % 8));
    } else {
        *count = d->kind == DAMAGE_EXTEND ? *count + at : at;
    }
    return copy;
}

// ---- refusals without a process of their own ------------------------------------------------------------------------
static struct {
    jmp_buf back;
    int code;
    char message[DIE_MESSAGE];
} caught;

static void catch_refusal(int code, const char *message) {
    caught.code = code;
    snprintf(caught.message, sizeof(caught.message), "%s", message);
    longjmp(caught.back, 1);
}

// Runs the body. Returns 0, or the exit code of its refusal. Closes files that the body left open.
static int run_caught(ChildBody body, const void *context) {
    const int first = dup(STDIN_FILENO);
    close(first);
    caught.code = 0, caught.message[0] = 0;
    die_caught = catch_refusal;
    if (!setjmp(caught.back)) body(context);
    die_caught = NULL;
    for (int fd = first; fd < first + 16; fd++) close(fd);
    return caught.code;
}

// ---- a table --------------------------------------------------------------------------------------------------------
typedef struct {
    const DamageSuite *suite;
    const Damage *rows;
    size_t count;
} DamageTable;

static int says_one_of(const char *text, const char *words) {
    char all[1000];
    snprintf(all, sizeof(all), "%s", words);
    for (char *one = strtok(all, "|"); one; one = strtok(NULL, "|"))
        if (strstr(text, one)) return 1;
    return 0;
}

// Compares a row's outcome with the row. Ends the child on a difference.
static void check_damage(const DamageSuite *s, const Damage *d, size_t row, int code, char *said) {
    const char *wrong = NULL;
    if (strchr(caught.message, '\n')) wrong = "more than one line";
    if (*said && !s->notes) wrong = "something before the refusal";
    if (lseek(STDOUT_FILENO, 0, SEEK_END) > 0) wrong = "something on stdout";
    if (code != (d->words ? EXIT_RUNTIME : 0)) wrong = "another exit code";
    if (d->words && !says_one_of(caught.message, d->words) && !(s->notes && says_one_of(said, d->words)))
        wrong = "other words";
    if (!wrong) return;
    printf("row %zu (%s, kind %d, byte %lld, \"%.60s\"): %s: exit code %d, %s%s (expected: %s)\n", row, d->file,
           (int)d->kind, d->at, d->replace ? d->replace : "", wrong, code, said, caught.message,
           d->words ? d->words : "it is taken");
    exit(1);
}

static void damage_rows(const void *context) {
    const DamageTable *t = (const DamageTable *)context;
    const DamageSuite *s = t->suite;
    char top[512];
    snprintf(top, sizeof(top), "%s", s->folder); // copied, as scratch_path reuses its buffers
    for (size_t row = 0; row < t->count; row++) {
        const Damage *d = &t->rows[row];
        char path[1024], folder[1024], said[4096] = "";
        size_t before, count;
        snprintf(path, sizeof(path), "%s/%s", top, d->file);
        snprintf(folder, sizeof(folder), "%.*s", (int)(strrchr(path, '/') - path), path);
        char *bytes = input_read_text(path, SIZE_MAX, &before);
        count = before;
        char *copy = damaged_copy(d, bytes, &count);
        if (s->mend && (d->kind == DAMAGE_TEXT || d->kind == DAMAGE_WHOLE || d->kind == DAMAGE_PUT))
            s->mend(path, copy, count, before);
        write_file(path, copy, count);
        if (d->kind == DAMAGE_REMOVE) unlink(path);
        const off_t at = lseek(STDERR_FILENO, 0, SEEK_END);
        const int code = run_caught(s->body, s->context ? s->context : folder);
        if (pread(STDERR_FILENO, said, sizeof(said) - 1, at) < 0) exit(3);
        write_file(path, bytes, before);
        check_damage(s, d, row, code, said);
        free(bytes), free(copy);
    }
}

static void expect_damage_found(const DamageSuite *suite, const Damage *rows, size_t count) {
    const DamageTable table = {suite, rows, count};
    const Child *child = run_child(damage_rows, &table);
    if (child->code) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
}

// Flips a bit of each byte in [first, end): bit number `bit`, or a random one if it is negative.
static void expect_bits_found(const DamageSuite *suite, const char *file, size_t first, size_t end, int bit,
                              const char *words) {
    Damage *rows = (Damage *)case_memory((end - first) * sizeof(Damage));
    for (size_t at = first; at < end; at++) {
        const Damage row = FLIPPED_BIT(file, (long long)at, bit < 0 ? test_random_below(8) : (size_t)bit, words);
        rows[at - first] = row;
    }
    expect_damage_found(suite, rows, end - first);
}

// Flips single bits: of the first and last bytes of the file, and of `tries` random bytes.
static void expect_flips_found(const DamageSuite *suite, const char *file, size_t tries, const char *words) {
    enum { ENDS = 10 };
    char path[1024];
    size_t count;
    snprintf(path, sizeof(path), "%s/%s", suite->folder, file);
    free(input_read_text(path, SIZE_MAX, &count));
    Damage *rows = (Damage *)case_memory((2 * ENDS + tries) * sizeof(Damage));
    for (size_t i = 0; i < 2 * ENDS + tries; i++) {
        const size_t at = i < ENDS       ? i % count
                          : i < 2 * ENDS ? count - 1 - (i - ENDS) % count
                                         : test_random_below(count);
        const Damage row = FLIPPED_BIT(file, (long long)at, test_random_below(8), words);
        rows[i] = row;
    }
    expect_damage_found(suite, rows, 2 * ENDS + tries);
}

// ---- at random ------------------------------------------------------------------------------------------------------
// Makes one or two changes: flips a bit, sets a byte, cuts a piece out, doubles a piece, truncates, or replaces a
// number.
static size_t damage_at_random(char *file, size_t bytes, size_t limit) {
    static const char *const numbers[] = {"-1", "0",    "1e999", "18446744073709551616", "0.5", "[]",
                                          "{}", "\"\"", "null"};
    for (size_t changes = 1 + test_random_below(2); changes > 0 && bytes > 16; changes--) {
        if (limit > bytes) limit = bytes;
        size_t at = test_random_below(limit), n = 1 + test_random_below(40), length;
        if (n > bytes - at) n = bytes - at;
        switch (test_random_below(8)) {
        case 0: file[at] ^= (char)(1 << test_random_below(8)); break;
        case 1: file[at] = (char)test_random(); break;
        case 2: file[at] = "{}[],:\"\\0-e. "[test_random_below(13)]; break;
        case 3: memmove(file + at, file + at + n, bytes - at - n), bytes -= n; break;
        case 4: memmove(file + at + n, file + at, bytes - at), bytes += n; break; // there is room for 4 x 40 bytes
        case 5: bytes = 1 + at; break;
        case 6: // a number in the text
            while (at < limit && !(file[at] >= '0' && file[at] <= '9')) at++;
            length = strlen(numbers[n % COUNT_OF(numbers)]);
            memmove(file + at + length, file + at, bytes - at);
            memcpy(file + at, numbers[n % COUNT_OF(numbers)], length), bytes += length;
            break;
        default: memset(file + at, (int)test_random_below(256), n);
        }
    }
    return bytes;
}

#endif
