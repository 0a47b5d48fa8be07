/*
The driver of the op cases (llmc/ops/op_cases.h) for the verb `doctor`: tensors in device memory, and a sample of their
rows and columns (Dim) that the reference computes. Inputs are random. Outputs and scratch start as NaN, and no NaN may
stay in an output. Guards around every tensor must not change, and inputs must not change.
*/
#ifndef LLMC_DOCTOR_CHECK_H
#define LLMC_DOCTOR_CHECK_H
#include "llmc/base/random.h"
#include "llmc/ops/op_dims.h"
#include "llmc/ops/ops.h"

// GUARD: bytes; RANDOM_ELEMENTS: a prime, so that rows of a tensor differ.
enum { GUARD = 4096, RANDOM_ELEMENTS = 1048573 };

typedef struct Tensor {
    const char *name;
    TensorUse use;
    DType type;
    Dim rows, cols;
    const void *given; // host [rows,cols] values; NULL: random elements, from number `first` of check.random on
    size_t first;
    int raw;       // 1: integers: the reference takes elements unconverted, and so does `found`
    char *memory;  // device: guard, elements, guard
    void *twin;    // [rows.count,cols.count] the reference's tensor, in double unless raw
    double *found; // [rows.count,cols.count] what the op left, in double unless raw
    struct Tensor *next;
} Tensor;

static struct {
    const Ops *ops;
    Tensor *tensors;
    void *blocks;               // host memory of the running case
    void *random[DTYPE_FLOATS]; // RANDOM_ELEMENTS elements each, standard normal
    uint64_t drawn;             // how many random numbers were drawn so far
    size_t terms;               // how many products the op's matrix instructions add up for an element
    int joins;                  // how many of bias, residual and old output a library adds to them
    int rounded;                // 1: operands are rounded to bf16
    double times, terms_size;   // result_rounds
    int on_reference;           // 1: the reference runs, 0: the op
    double worst;               // largest error as a share of the allowed error
    char about[160];            // shapes of the case so far
    char fault[256];            // the first fault; empty: none
} check;

static void *check_allocate(size_t bytes) {
    void **block = (void **)checked_calloc(1, bytes + 64, "a check");
    *block = check.blocks;
    check.blocks = block;
    return (char *)block + 64;
}

__attribute__((format(printf, 1, 2))) static void check_fail(const char *format, ...) {
    va_list arguments;
    if (*check.fault) return;
    va_start(arguments, format);
    vsnprintf(check.fault, sizeof(check.fault), format, arguments);
    va_end(arguments);
}

static uint64_t check_below(uint64_t below) { return random_below(5, 0, check.drawn++, below); }

// Samples at most `most` indices: the first two, the last two, both sides of multiples of 64, others at random.
static Dim some_of(size_t size, size_t most) {
    size_t *at = (size_t *)check_allocate(most * sizeof(size_t)), count = 0;
    if (size <= most) return all_of(size);
    for (size_t i = 0; count < most; i++) {
        const size_t ends[4] = {0, 1, size - 2, size - 1}, tile = 64 * check_below((size + 63) / 64),
                     kind = check_below(3);
        const size_t wanted = i < 4 ? ends[i] : kind == 0 ? tile : kind == 1 && tile ? tile - 1 : check_below(size);
        size_t place = 0;
        while (place < count && at[place] < wanted) place++;
        if (place < count && at[place] == wanted) continue;
        memmove(at + place + 1, at + place, (count - place) * sizeof(*at));
        at[place] = wanted, count++;
    }
    return dim_of(size, count, at);
}

// ---- tensors -------------------------------------------------------------------------------------------------------
static size_t tensor_count(const Tensor *t) { return t->rows.size * t->cols.size; }
static size_t tensor_bytes(const Tensor *t) { return tensor_count(t) * dtype_size(t->type); }
static size_t sample_count(const Tensor *t) { return t->rows.count * t->cols.count; }
static size_t sample_at(const Tensor *t, size_t i) {
    return dim_at(t->rows, i / t->cols.count) * t->cols.size + dim_at(t->cols, i % t->cols.count);
}

static const void *random_elements(DType type) {
    float *values = NULL;
    if ((unsigned)type >= DTYPE_FLOATS) die("internal: random elements of %s; please report it", dtype_name(type));
    if (check.random[type]) return check.random[type];
    values = (float *)checked_malloc(RANDOM_ELEMENTS * sizeof(float), "random elements");
    for (size_t i = 0; i < RANDOM_ELEMENTS; i++) values[i] = (float)normal_of(random_mix(i));
    check.random[type] = checked_malloc(RANDOM_ELEMENTS * dtype_size(type), "random elements");
    elements_from_float(check.random[type], type, values, RANDOM_ELEMENTS);
    free(values);
    return check.random[type];
}

static Tensor *tensor_make(TensorUse use, const char *name, DType type, Dim rows, Dim cols) {
    Tensor *t = (Tensor *)check_allocate(sizeof(Tensor));
    t->name = name, t->use = use, t->type = type, t->rows = rows, t->cols = cols;
    t->first = check_below(RANDOM_ELEMENTS);
    t->memory = (char *)check.ops->allocate(tensor_bytes(t) + 2 * GUARD);
    if (!t->memory)
        die("%s of %s were refused; end other programs that use it, or take a smaller --init",
            human_bytes((double)tensor_bytes(t)), !strcmp(check.ops->name, "cuda") ? "device memory" : "memory");
    t->next = check.tensors;
    return check.tensors = t;
}

static Tensor *tensor_given(TensorUse use, const char *name, DType type, Dim rows, Dim cols, const void *elements) {
    Tensor *t = tensor_make(use, name, type, rows, cols);
    t->given = elements;
    return t;
}

// Makes a tensor whose elements the reference takes unconverted: integers, records, doubles. elements NULL: it is an
// output
static Tensor *tensor_raw(TensorUse use, const char *name, DType type, Dim n, const void *elements) {
    Tensor *t = tensor_given(use, name, type, n, all_of(1), elements);
    t->raw = 1;
    return t;
}

// Makes n indices below `limit`: the first is limit - 1, every fourth is 0 (many terms for one row) or, with masked,
// -1.
static Tensor *tensor_indices(const char *name, Dim n, size_t limit, int masked) {
    int32_t *index = (int32_t *)check_allocate(n.size * sizeof(int32_t));
    for (size_t i = 0; i < n.size; i++)
        index[i] = i == 0 ? (int32_t)limit - 1 : i % 4 == 1 ? (masked ? -1 : 0) : (int32_t)check_below(limit);
    return tensor_raw(TENSOR_READ, name, DTYPE_FP32, n, index);
}

// Returns an image of a tensor and its guards before the op. The caller frees it.
static char *tensor_image(const Tensor *t) {
    const size_t size = dtype_size(t->type), count = tensor_count(t);
    char *image = (char *)checked_malloc(tensor_bytes(t) + 2 * GUARD, "a check"), *to = image + GUARD;
    memset(image, 0xff, tensor_bytes(t) + 2 * GUARD); // NaN in every type
    if (t->use == TENSOR_WRITTEN || t->use == TENSOR_SCRATCH) return image;
    if (t->given) memcpy(to, t->given, tensor_bytes(t));
    const char *random = t->given ? NULL : (const char *)random_elements(t->type);
    for (size_t done = 0, n; done < count && !t->given; done += n) {
        const size_t from = (t->first + done) % RANDOM_ELEMENTS;
        n = min_size(count - done, RANDOM_ELEMENTS - from);
        memcpy(to + done * size, random + from * size, n * size);
    }
    return image;
}

#ifdef __cplusplus
struct AnyPointer { // Converts to any pointer, like void * in C
    void *memory;
    template <typename T> operator T *() const { return (T *)memory; }
};
#else
typedef void *AnyPointer;
#endif

// Returns t's memory for the op from element `column` on; while the reference runs, its copy from `in_sample` on.
static AnyPointer columns(const Tensor *t, size_t column, size_t in_sample) {
    const AnyPointer memory = {!t                   ? NULL
                               : check.on_reference ? (void *)((char *)t->twin + in_sample * sizeof(double))
                                                    : (void *)(t->memory + GUARD + column * dtype_size(t->type))};
    return memory;
}
static AnyPointer of(const Tensor *t) { return columns(t, 0, 0); }

// Loads a tensor. Lays out the reference's tensor: its values in double, or its elements.
static void tensor_load(Tensor *t) {
    char *image = tensor_image(t);
    const size_t samples = t->use == TENSOR_SCRATCH ? 0 : sample_count(t), size = dtype_size(t->type);
    check.ops->copy_in(t->memory, image, tensor_bytes(t) + 2 * GUARD);
    t->twin = check_allocate(samples * 8), t->found = (double *)check_allocate(samples * 8);
    for (size_t i = 0; i < samples; i++)
        if (t->raw)
            memcpy((char *)t->twin + size * i, image + GUARD + size * sample_at(t, i), size);
        else
            ((double *)t->twin)[i] = element_to_double(image + GUARD, t->type, sample_at(t, i));
    free(image);
}

// Returns the first of n elements that is NaN or infinite; n: there is none
static size_t first_not_finite(const char *block, DType type, size_t n) {
    size_t i = 0;
    if (type == DTYPE_BF16)
        while (i < n && (((const uint16_t *)(const void *)block)[i] & 0x7f80) != 0x7f80) i++;
    else
        while (i < n && isfinite(element_to_double(block, type, i))) i++;
    return i;
}

// Reads a tensor's sample back. Checks what must hold for every tensor.
static void tensor_read(Tensor *t) {
    const int output = t->use == TENSOR_CHANGED || t->use == TENSOR_WRITTEN;
    const size_t bytes = tensor_bytes(t), count = tensor_count(t), size = dtype_size(t->type);
    char *before = tensor_image(t), *now = (char *)checked_malloc(bytes + 2 * GUARD, "a check");
    check.ops->copy_out(now, t->memory, bytes + 2 * GUARD);
    if (memcmp(now, before, GUARD) != 0) check_fail("writes before the beginning of %s", t->name);
    if (memcmp(now + GUARD + bytes, before + GUARD + bytes, GUARD) != 0)
        check_fail("writes after the end of %s", t->name);
    if (t->use == TENSOR_READ && memcmp(now, before, bytes + GUARD) != 0) check_fail("changes its input %s", t->name);
    const size_t bad = output ? first_not_finite(now + GUARD, t->type, count) : count;
    if (bad < count) check_fail("%s[%zu] of %zu is NaN, infinite or not written", t->name, bad, count);
    for (size_t i = 0; i < sample_count(t) && output; i++)
        if (t->raw)
            memcpy((char *)t->found + size * i, now + GUARD + size * sample_at(t, i), size);
        else
            t->found[i] = element_to_double(now + GUARD, t->type, sample_at(t, i));
    free(before), free(now);
}

// Ends a case: frees its tensors and its memory.
static void check_end(void) {
    for (Tensor *t = check.tensors; t; t = t->next) check.ops->release(t->memory, tensor_bytes(t) + 2 * GUARD);
    check.tensors = NULL, check.terms = 0, check.joins = 0, check.rounded = 0;
    check.times = check.terms_size = 0;
    while (check.blocks) {
        void *next = *(void **)check.blocks;
        free(check.blocks);
        check.blocks = next;
    }
}

__attribute__((format(printf, 1, 2))) static void check_begin(const char *format, ...) {
    const size_t used = strlen(check.about);
    va_list arguments;
    check_end();
    va_start(arguments, format);
    snprintf(check.about + used, sizeof(check.about) - used, used ? ", " : "");
    vsnprintf(check.about + strlen(check.about), sizeof(check.about) - strlen(check.about), format, arguments);
    va_end(arguments);
}

#define ON_DEVICE(call)                                                                                                \
    do {                                                                                                               \
        for (Tensor *t = check.tensors; t; t = t->next) tensor_load(t);                                                \
        call;                                                                                                          \
        check.ops->finish();                                                                                           \
        for (Tensor *t = check.tensors; t; t = t->next) tensor_read(t);                                                \
    } while (0)
#define ON_REFERENCE(call)                                                                                             \
    do {                                                                                                               \
        check.on_reference = 1;                                                                                        \
        call;                                                                                                          \
        check.on_reference = 0;                                                                                        \
    } while (0)
#define REFERENCE(op)        reference_##op
#define SCRATCH_FOR(op, ...) check.ops->op##_scratch(__VA_ARGS__)

// Keeps what the op has written, as an input of the next call.
static void tensor_keep(Tensor *t) {
    void *elements = check_allocate(tensor_bytes(t));
    check.ops->copy_out(elements, t->memory + GUARD, tensor_bytes(t));
    t->given = elements, t->use = TENSOR_READ;
}

// ---- comparison ----------------------------------------------------------------------------------------------------
static void sums_of(size_t terms, int joins) { check.terms = terms, check.joins = joins; }

// check_arithmetic returns the relative error of arithmetic inside an op. A GPU's matrix instructions truncate sums of
// bf16 products, at most 2^-24 for each eight of them (Fasi et al. 2021). A GPU and a CPU's AMX take attention's
// weights rounded to bf16.
static int check_gpu(void) { return check.ops->stored == DTYPE_BF16 && !strcmp(check.ops->name, "cuda"); }
static double check_arithmetic(void) {
    return (check.ops->summed == DTYPE_FP64 ? 1e-13 : 2e-6) + (check_gpu() ? (double)check.terms / 8 * 0x1p-24 : 0) +
           (check.rounded ? 0x1p-9 : 0);
}
static int rounds_operands(void) { return check.rounded = check.ops->stored == DTYPE_BF16; }
// Says that an op in bf16 rounds intermediate values: `times` roundings of the result, and one of terms of this size.
static void result_rounds(double times, double size) { check.times = times, check.terms_size = size; }

// Compares t with the reference: |found - expected| <= (r + a) |expected| + (10 a + e) size. r: a rounding to t's type;
// a: slack times check_arithmetic(). size: the sample's root mean square, or `scale` if larger, the size of terms that
// cancel. e: cuBLASLt may round a bf16 product before it adds to the old output (seen on an H100). In bf16
// result_rounds adds its roundings.
static void expect(const Tensor *t, double slack, double scale) {
    const double *expected = t ? (const double *)t->twin : NULL, relative = slack * check_arithmetic();
    const double rounding = t && t->type == DTYPE_BF16 ? 1.001 * 0x1p-8 : 0;
    const double early = rounding > 0 && check_gpu() ? 4 * 0x1p-9 * check.joins : 0;
    double size = 0;
    if (!t) return;
    for (size_t i = 0; i < sample_count(t); i++) size += expected[i] * expected[i] / (double)sample_count(t);
    size = fmax(sqrt(size), fmax(scale, 1e-30));
    for (size_t i = 0; i < sample_count(t); i++) {
        const double rounds = rounding > 0 ? 0x1p-9 * (check.times * fabs(expected[i]) + check.terms_size) : 0;
        const double allowed = (rounding + relative) * fabs(expected[i]) + (10 * relative + early) * size + rounds;
        const double error = fabs(t->found[i] - expected[i]);
        if (!(error <= allowed))
            check_fail("%s[%zu,%zu] is %.6g, expected %.6g within %.2g", t->name, sample_at(t, i) / t->cols.size,
                       sample_at(t, i) % t->cols.size, t->found[i], expected[i], allowed);
        check.worst = fmax(check.worst, error / allowed);
    }
}

static void expect_integers(const Tensor *t) {
    for (size_t i = 0; i < sample_count(t); i++) {
        const int64_t found = integer_at(t->found, t->type, i), expected = integer_at(t->twin, t->type, i);
        if (found != expected)
            check_fail("%s[%zu] is %lld, not %lld", t->name, i, (long long)found, (long long)expected);
    }
}

#endif
