/*
Runs a function in a child process and captures its exit code and output. Tests use it to check that every refusal has
one line and the right exit code, and to read printed text.
*/
#ifndef TEST_CHILD_H
#define TEST_CHILD_H
#include "testing.h"
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// 1 in a child, which lacks the parent's other threads: OpenMP and the leak sanitizer cannot handle that.
static int is_child;
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return is_child; }

typedef struct {
    int code; // exit code, or 1000 + the signal that ended it
    char out[32768], err[8192];
} Child;

typedef void (*ChildBody)(const void *context);

static void child_slurp(FILE *file, char *text, size_t size) {
    rewind(file);
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
}

// Runs body in a child. The result is static and lasts until the next child.
static const Child *run_child(ChildBody body, const void *context) {
    static Child child;
    FILE *out = tmpfile(), *err = tmpfile();
    int status;
    assert_true(out && err);
    fflush(NULL);
    pid_t process = fork();
    assert_true(process >= 0);
    if (process == 0) {
        dup2(fileno(out), STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        is_child = 1;
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        signal(SIGSEGV, SIG_DFL); // a crash ends the child, without cmocka's report
        signal(SIGABRT, SIG_DFL);
        body(context);
        exit(0);
    }
    assert_int_equal(waitpid(process, &status, 0), process);
    child.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    child_slurp(out, child.out, sizeof(child.out));
    child_slurp(err, child.err, sizeof(child.err));
    return &child;
}

static size_t count_lines(const char *text) {
    size_t lines = 0;
    for (; *text; text++) lines += *text == '\n';
    return lines;
}

// Expects the body to exit with this code, nothing on stdout, and one line on stderr that contains `words`.
static void expect_refused(ChildBody body, const void *context, int code, const char *words) {
    const Child *child = run_child(body, context);
    size_t length = strlen(child->err);
    if (child->code != code) test_fail("exit code %d, expected %d; stderr: %s", child->code, code, child->err);
    if (child->out[0]) test_fail("printed on stdout: %s", child->out);
    if (count_lines(child->err) != 1 || child->err[length - 1] != '\n') test_fail("not one line: %s", child->err);
    if (!strstr(child->err, words)) test_fail("stderr is: %s(expected: %s)", child->err, words);
}

// ---- a folder for the files of a test -------------------------------------------------------------------------------
// Returns the scratch folder, which is created once per test program and removed at its end.
static const char *scratch_folder(void) {
    static char folder[256];
    const char *base = getenv("TMPDIR");
    if (*folder) return folder;
    snprintf(folder, sizeof(folder), "%s/streambp-test-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) test_fail("cannot create the folder %s", folder);
    return folder;
}

// Returns a path in the scratch folder. A few static buffers rotate, so that several paths fit in one call.
static const char *scratch_path(const char *name) {
    static char paths[16][512];
    static int next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof(paths[0]), "%s/%s", scratch_folder(), name);
    return path;
}

// Makes a new folder in the scratch folder.
static const char *fresh_folder(const char *name) {
    const char *path = scratch_path(name);
    char command[600];
    snprintf(command, sizeof(command), "rm -rf '%s' && mkdir '%s'", path, path);
    assert_int_equal(system(command), 0);
    return path;
}

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

// Returns the whole file, zero-terminated. It lasts until the next case.
static char *read_whole(const char *path, size_t *count) {
    struct stat status;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &status)) test_fail("cannot open %s", path);
    char *bytes = (char *)case_memory((size_t)status.st_size + 1);
    assert_int_equal(fread(bytes, 1, (size_t)status.st_size, file), status.st_size);
    fclose(file);
    if (count) *count = (size_t)status.st_size;
    return bytes;
}

static void expect_text(const char *path, const char *text) { assert_string_equal(read_whole(path, NULL), text); }

// Removes the scratch folder and its contents, as group teardown.
static int scratch_remove(void **state) {
    char command[320];
    (void)state;
    snprintf(command, sizeof(command), "rm -rf '%s'", scratch_folder());
    return system(command);
}

#endif
