/*
What a test checks. A check that does not hold tells file, line and values, and ends its test; in a child process it
ends the process.
*/
#ifndef TEST_CHECK_H
#define TEST_CHECK_H
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    jmp_buf out; // of the test that runs
    int failed;
    int in_child;
} checks;

__attribute__((noreturn)) static void check_leave(int failed) {
    if (checks.in_child) exit(99);
    checks.failed = failed;
    longjmp(checks.out, 1);
}

__attribute__((noreturn, format(printf, 3, 4))) static void check_failed(const char *file, int line, const char *format,
                                                                         ...) {
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "%s:%d: error: ", file, line);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    check_leave(1);
}

static void holds_true(int holds, const char *text, const char *file, int line) {
    if (!holds) check_failed(file, line, "%s does not hold", text);
}
static void holds_integers(uintmax_t a, uintmax_t b, int equal, const char *text, const char *file, int line) {
    if ((a == b) != equal) check_failed(file, line, "%s: %jd and %jd", text, (intmax_t)a, (intmax_t)b);
}
static void holds_range(uintmax_t x, uintmax_t least, uintmax_t most, const char *text, const char *file, int line) {
    if (x < least || x > most) check_failed(file, line, "%s is %ju, not of [%ju, %ju]", text, x, least, most);
}
static void holds_texts(const char *a, const char *b, const char *text, const char *file, int line) {
    if (strcmp(a, b)) check_failed(file, line, "%s: \"%s\" and \"%s\"", text, a, b);
}
static void holds_bytes(const void *a, const void *b, size_t n, int equal, const char *text, const char *file,
                        int line) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    size_t i = 0;
    while (i < n && x[i] == y[i]) i++;
    if ((i == n) != equal) check_failed(file, line, "%s: byte %zu of %zu is the first that differs", text, i, n);
}

#define assert_true(c)             holds_true(!!(c), #c, __FILE__, __LINE__)
#define assert_false(c)            holds_true(!(c), "!(" #c ")", __FILE__, __LINE__)
#define assert_null(p)             holds_true(!(p), #p " == NULL", __FILE__, __LINE__)
#define assert_non_null(p)         holds_true(!!(p), #p " != NULL", __FILE__, __LINE__)
#define assert_int_equal(a, b)     holds_integers((uintmax_t)(a), (uintmax_t)(b), 1, #a " == " #b, __FILE__, __LINE__)
#define assert_int_not_equal(a, b) holds_integers((uintmax_t)(a), (uintmax_t)(b), 0, #a " != " #b, __FILE__, __LINE__)
#define assert_in_range(x, least, most)                                                                                \
    holds_range((uintmax_t)(x), (uintmax_t)(least), (uintmax_t)(most), #x, __FILE__, __LINE__)
#define assert_string_equal(a, b)        holds_texts(a, b, #a, __FILE__, __LINE__)
#define assert_memory_equal(a, b, n)     holds_bytes(a, b, n, 1, #a, __FILE__, __LINE__)
#define assert_memory_not_equal(a, b, n) holds_bytes(a, b, n, 0, #a, __FILE__, __LINE__)

#endif
