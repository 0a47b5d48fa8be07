/*
Common parts of the conversion tests: a conversion to a Hugging Face folder, as by `convert`, also in a child process;
checks of what was written and what was left behind.
*/
#ifndef TEST_CONVERT_FILES_H
#define TEST_CONVERT_FILES_H
#include "weight_files.h"
#include <glob.h>
#include "llmc/files/hf_write.h"

#define NO_LIMIT ((size_t)9e18)

static const char *fresh_place(const char *name) {
    run_command("rm -rf '%s'", scratch_path(name), "");
    return scratch_path(name);
}

typedef struct {
    const char *from, *like, *to;
    const DType *dtype;
    size_t max_shard_size;
    int text_only;
} Conversion;

static void convert_body(const void *context) {
    const Conversion *c = (const Conversion *)context;
    WeightSource *source = weights_open(c->from);
    HfWrite write = hf_write_prepare(source, c->dtype, c->like, c->max_shard_size, c->text_only, QUANT_NONE, 0);
    hf_write(&write, c->to, 0);
    hf_write_free(&write);
    weights_close(source);
}

static void convert(const char *from, const char *like, const char *to, const DType *dtype, size_t max_shard_size) {
    Conversion c = {from, like, to, dtype, max_shard_size, 0};
    convert_body(&c);
}

static void convert_flat(const char *from, const char *to) {
    WeightSource *source = weights_open(from);
    weights_convert(source, to, source->dtype);
    weights_close(source);
}

static void expect_same_bytes(const char *a, const char *b) {
    size_t a_bytes, b_bytes;
    const char *first = read_whole(a, &a_bytes), *second = read_whole(b, &b_bytes);
    if (a_bytes != b_bytes || memcmp(first, second, a_bytes) != 0) test_fail("%s and %s differ", a, b);
}

static void expect_same_file(const char *a, const char *b, const char *name) {
    char first[PATH_MAX], second[PATH_MAX];
    path_join(first, a, name), path_join(second, b, name);
    expect_same_bytes(first, second);
}

static size_t count_paths(const char *format, const char *path) {
    char pattern[PATH_MAX + 8];
    glob_t found;
    snprintf(pattern, sizeof(pattern), format, path);
    const size_t count = glob(pattern, 0, NULL, &found) == 0 ? found.gl_pathc : 0;
    globfree(&found);
    return count;
}

static size_t count_names(const char *folder) { return count_paths("%s/*", folder); }

// Counts files that an interrupted conversion left beside the path.
static size_t count_temporaries(const char *path) { return count_paths("%s.*", path); }

static void expect_nothing_at(const char *path) {
    struct stat status;
    if (lstat(path, &status) == 0) test_fail("%s was left behind", path);
    if (count_temporaries(path)) test_fail("something was left beside %s", path);
}

// Checks that the files hold every tensor once, in the file that the index names. A file exceeds the size limit only if
// it holds one tensor.
static void expect_shards(const char *folder, const char *golden, size_t most, size_t shards) {
    WeightSource *source = weights_open(folder), *original = weights_open(golden);
    char line[300];
    assert_int_equal(source->file_count, shards);
    if (shards > 1) {
        char *index = read_in(folder, HF_INDEX_FILE, NULL);
        snprintf(line, sizeof(line), "\"total_size\": %zu\n", original->model.elements * 4);
        if (!strstr(index, line)) test_fail("no %s", line);
        snprintf(line, sizeof(line), "model-%05zu-of-%05zu.safetensors", shards, shards);
        assert_non_null(strstr(index, line));
    }
    assert_int_equal(count_names(folder), shards + 2 + (shards > 1));
    for (size_t i = 0; i < shards; i++) {
        SafeTensors list = {NULL, 0};
        safetensors_read_header(&list, &source->files[i], i);
        if (list.count > 1 && list.tensors[list.count - 1].end - list.tensors[0].begin > most)
            test_fail("file %zu has %zu tensors and more than %zu bytes", i, list.count, most);
        safetensors_free(&list);
    }
    expect_same_weights(golden, folder, DTYPE_FP32);
    weights_close(source);
    weights_close(original);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
static long memory_peak(void) { // KiB
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

#endif
