/*
Common base of the test programs, a thin layer over cmocka: a table of named tests (`program SUBSTRING` runs the tests
whose name contains it, `program --list` names all), a closing line `N passed, N failed, N skipped`, seeded random
numbers, and guarded tensors.

A guarded tensor lives in device memory between two guards. Nothing here dereferences device memory: tensors are laid
out on the host in double, converted to their element type, copied in, and copied out again. CALL runs an op and checks
what must hold for every op: guards intact, inputs untouched, and the same bits in a second run.
*/
#ifndef TEST_TESTING_H
#define TEST_TESTING_H
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "llmc/ops/ops.h"
#include "llmc/base/random.h"

// SCOPED(end) Type name = ...; calls end(&name) at the end of name's block.
#define SCOPED(end)     __attribute__((cleanup(end)))
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

// Returns 1 with ALL_CASES=1 in the environment: tests then run full products of cases instead of pairwise covers.
static int all_cases(void) {
    const char *all = getenv("ALL_CASES");
    return all && *all && *all != '0';
}

// An op may write only tensors marked CHANGED (outputs, sums, in place) and SCRATCH.
typedef enum { INPUT, CHANGED, SCRATCH } GuardedRole;

typedef struct Guarded {
    const char *name;
    GuardedRole role;
    DType type;
    size_t count;
    void *data;                    // device: element 0, which is passed to the op
    const double *values;          // [count] values before the op, rounded to type; NULL for bytes
    int raw;                       // 1: integers: the twin has the same elements, not their values
    void *allocation;              // device: guard, elements, guard
    size_t offset, bytes;          // offset of element 0 in the allocation; bytes of the whole allocation
    unsigned char *before, *after; // host images of the allocation: before and after the op
    void *twin;                    // the reference's counterpart (test/ops/cases.h)
    size_t stride, first, own;     // the op has columns [first, first + own) of rows of `stride`; own 0: all
    const Ops *ops;                // op set of the tensor; a test program without tensors need not link one
    struct Guarded *next;
} Guarded;

enum { GUARD_BYTES = 256 };

static struct {
    const char *test;
    char about[200]; // the case within the test, for messages
    uint64_t random;
    int begun, skipped;
    int aligned;     // 1: in this case element 0 of every tensor is aligned to 256 bytes; else some are one element off
    int all_aligned; // 1: every case is aligned, else a random half of the cases
    size_t terms;    // number of products that an op's matrix products add up for an element
    int joins;       // how many of bias, residual and old output are added to such a sum
    double operands; // relative error of operands that an op rounds: attention's weights, to bf16
    double times, terms_size; // as in doctor_check.h: roundings inside an op, of the result and of terms of a size
    double worst;             // largest error of the running test as a share of the allowed error
    Guarded *tensors;
    void *blocks;
} testing;

// ---- random numbers, seeded by the test's name: a test does the same alone and among others ------------
static uint64_t test_random(void) {
    const uint64_t before = testing.random;
    testing.random += 0x9e3779b97f4a7c15u;
    return random_mix(before);
}

static size_t test_random_below(size_t limit) { return (size_t)(test_random() % limit); }

static double test_uniform(void) { return ((double)(test_random() >> 11) + 0.5) * 0x1p-53; }

static double test_normal(void) { return normal_of(test_random()); }

// Returns a standard normal number by Box-Muller, addressed as in llmc/base/random.h: one index gives one number.
static double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    double u = 1.0 - random_uniform(seed, stream, 2 * index), v = random_uniform(seed, stream, 2 * index + 1);
    return sqrt(-2.0 * log(u)) * cos(2.0 * 3.14159265358979323846 * v);
}

// ---- a case: its name for messages, and memory until the next case --------------------------------------------------
static void *case_memory(size_t bytes) {
    void **block = (void **)calloc(1, bytes + 64); // 64 bytes: link to the previous block, and padding that keeps the
                                                   // block aligned
    if (!block) {
        fprintf(stderr, "test: no host memory for %zu bytes\n", bytes);
        exit(1);
    }
    *block = testing.blocks;
    testing.blocks = block;
    return (char *)block + 64;
}

static double *case_doubles(size_t count) { return (double *)case_memory(count * sizeof(double)); }

static double *case_copy(const double *values, size_t count) {
    double *copy = case_doubles(count);
    memcpy(copy, values, count * sizeof(double));
    return copy;
}

static void case_end(void) {
    for (Guarded *t = testing.tensors; t; t = t->next) t->ops->release(t->allocation, t->bytes);
    testing.tensors = NULL;
    while (testing.blocks) {
        void *next = *(void **)testing.blocks;
        free(testing.blocks);
        testing.blocks = next;
    }
    testing.about[0] = 0, testing.terms = 0, testing.joins = 0, testing.times = testing.terms_size = 0;
}

__attribute__((format(printf, 1, 2))) static void test_case(const char *format, ...) {
    va_list arguments;
    case_end();
    va_start(arguments, format);
    vsnprintf(testing.about, sizeof(testing.about), format, arguments);
    va_end(arguments);
    testing.aligned = testing.all_aligned || test_random_below(2);
}

__attribute__((format(printf, 1, 2))) static void test_fail(const char *format, ...) {
    char message[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    fail_msg("%s%s%s: %s", testing.test, testing.about[0] ? ", " : "", testing.about, message);
}

static void test_skip(const char *reason) {
    printf("[  SKIPPED ] %s: NOT TESTED, because %s\n", testing.test, reason);
    testing.skipped++;
    skip();
}

// ---- elements -------------------------------------------------------------------------------------------------------
// Rounds to the nearest bf16, ties to even, directly from double, so without double rounding.
static double round_to_bf16(double x) {
    const uint64_t half = (uint64_t)1 << 44; // drops 45 of a double's 52 bits
    uint64_t bits;
    if (!isfinite(x)) return x;
    if (fabs(x) < 0x1p-126) return nearbyint(x * 0x1p133) * 0x1p-133; // subnormals share one unit
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + half - 1 + (bits >> 45 & 1)) & ~(2 * half - 1);
    memcpy(&x, &bits, sizeof(bits));
    return fabs(x) >= 0x1p128 ? copysign(INFINITY, x) : x;
}

static double round_to(DType type, double x) {
    return type == DTYPE_FP64 ? x : type == DTYPE_FP32 ? (double)(float)x : round_to_bf16(x);
}

static void element_write(void *elements, DType type, size_t i, double x) {
    if (type == DTYPE_FP64)
        ((double *)elements)[i] = x;
    else if (type == DTYPE_FP32)
        ((float *)elements)[i] = (float)x;
    else
        ((uint16_t *)elements)[i] = float_to_bf16((float)round_to_bf16(x));
}

// ---- guarded tensors ------------------------------------------------------------------------------------------------
// Fills guards and poison: every 16 bits start with 0xffc0, so an element read there is NaN (or a wild index). The
// other bits differ from place to place, so a guard that its neighbour overwrites is noticed.
static void poison(void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)memory)[i] = (i & 1) ? 0xff : (unsigned char)(0xc1 + (i / 2 * 37 + i / 126) % 63);
}

static Guarded *guarded_poison(GuardedRole role, const char *name, DType type, size_t count) {
    Guarded *t = (Guarded *)case_memory(sizeof(*t));
    size_t size = dtype_size(type);
    t->name = name, t->role = role, t->type = type, t->count = count, t->ops = ops_device;
    t->offset = GUARD_BYTES + (testing.aligned ? 0 : test_random_below(2) * size);
    t->bytes = t->offset + count * size + GUARD_BYTES;
    t->allocation = ops_device->allocate(t->bytes);
    if (!t->allocation) test_fail("no device memory for %s: %zu bytes", name, t->bytes);
    t->data = (char *)t->allocation + t->offset;
    t->before = (unsigned char *)case_memory(t->bytes);
    t->after = (unsigned char *)case_memory(t->bytes);
    poison(t->before, t->bytes);
    t->next = testing.tensors;
    testing.tensors = t;
    return t;
}

static Guarded *guarded_bytes(GuardedRole role, const char *name, const void *elements, size_t size, size_t count) {
    Guarded *t = guarded_poison(role, name, size == 8 ? DTYPE_FP64 : size == 4 ? DTYPE_FP32 : DTYPE_BF16, count);
    memcpy(t->before + t->offset, elements, count * size);
    return t;
}

static Guarded *guarded_values(GuardedRole role, const char *name, DType type, const double *values, size_t count) {
    Guarded *t = guarded_poison(role, name, type, count);
    double *rounded = case_doubles(count);
    for (size_t i = 0; i < count; i++) {
        rounded[i] = round_to(type, values[i]);
        element_write(t->before + t->offset, type, i, values[i]);
    }
    t->values = rounded;
    return t;
}

static Guarded *guarded_normal(GuardedRole role, const char *name, DType type, size_t count, double mean,
                               double deviation) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = mean + deviation * test_normal();
    return guarded_values(role, name, type, values, count);
}

// Returns the op's value of element i.
static double result(const Guarded *t, size_t i) { return element_to_double(t->after + t->offset, t->type, i); }

static void tensors_load(void) {
    for (Guarded *t = testing.tensors; t; t = t->next) ops_device->copy_in(t->allocation, t->before, t->bytes);
}

static void tensors_check(int second) {
    for (Guarded *t = testing.tensors; t; t = t->next) {
        unsigned char *now = (unsigned char *)malloc(t->bytes), *expected = t->before;
        size_t elements = t->count * dtype_size(t->type), bad = t->bytes;
        assert_non_null(now);
        ops_device->copy_out(now, t->allocation, t->bytes);
        for (size_t i = 0; i < t->bytes; i++) {
            int guard = i < t->offset || i >= t->offset + elements;
            if ((guard || t->role == INPUT) && now[i] != expected[i]) bad = i < bad ? i : bad;
        }
        int differs = second && t->role == CHANGED && memcmp(now, t->after, t->bytes) != 0;
        memcpy(t->after, now, t->bytes);
        free(now);
        if (bad < t->offset) test_fail("%s: the op wrote before it, up to %zu bytes away", t->name, t->offset - bad);
        if (bad < t->offset + elements)
            test_fail("%s is an input, but element %zu was changed", t->name, (bad - t->offset) / dtype_size(t->type));
        if (bad < t->bytes)
            test_fail("%s: the op wrote behind it, %zu bytes after its end", t->name, bad - t->offset - elements);
        if (differs) test_fail("%s: a second run gave other bits", t->name);
    }
}

// Emulated kernels are slow: with them tests run only some cases; a GPU runs all. The second run reverses blocks and
// their threads, so that a race shows.
#ifdef CUDA_ON_CPU
enum { EMULATED = 1 };
#ifdef __cplusplus
extern "C" void cuda_on_cpu_turn_order(void);
#else
void cuda_on_cpu_turn_order(void);
#endif
#else
enum { EMULATED = 0 };
static void cuda_on_cpu_turn_order(void) {}
#endif

// Lays out every tensor of the case anew, so compare the results of an earlier CALL before the next.
#define CALL(call)                                                                                                     \
    for (int again = 0; again < 2; again++) {                                                                          \
        tensors_load();                                                                                                \
        if (again) cuda_on_cpu_turn_order();                                                                           \
        call;                                                                                                          \
        if (again) cuda_on_cpu_turn_order();                                                                           \
        tensors_check(again);                                                                                          \
    }

// ---- comparison -----------------------------------------------------------------------------------------------------
static double rms(const double *x, size_t count) {
    double sum = 0.0;
    for (size_t i = 0; i < count; i++) sum += x[i] * x[i];
    return count ? sqrt(sum / (double)count) : 0.0;
}

static int on_gpu_in_bf16(void) {
    return !EMULATED && !strcmp(ops_device->name, "cuda") && ops_device->stored == DTYPE_BF16;
}

// Returns the truncation error of a GPU's matrix instructions: fp32 sums of bf16 products lose up to 2^-23 at every
// step, always towards zero. The error grows with the length, not its root (Fasi et al. 2021, "Numerical behavior of
// NVIDIA tensor cores"). A step adds 8 products or more and loses half on average: at most (K / 8) 2^-24 of a sum of K.
static double truncation_error(void) { return on_gpu_in_bf16() ? (double)testing.terms / 8.0 * 0x1p-24 : 0.0; }

// Returns the error of early rounding. Some cuBLASLt kernels, and bias_add, round before they add each of bias,
// residual and old output (seen on an H100): half a unit each time. A product alone is rounded once.
static double early_rounding(const Guarded *t) {
    return on_gpu_in_bf16() && t->type == DTYPE_BF16 ? testing.joins * 0x1p-9 : 0.0;
}

// Returns the relative L2 error of ops' arithmetic, or the largest relative error of one rounding to `type`.
static double arithmetic_error(void) {
    return testing.operands + truncation_error() + (ops_device->summed == DTYPE_FP64 ? 1e-14 : 2e-6);
}
// Returns the error of roundings inside an op of a result of this size.
static double inner_rounding(const Guarded *t, double size) {
    return t->type == DTYPE_BF16 ? 0x1p-9 * (testing.times * size + testing.terms_size) : 0.0;
}
static double rounding_error(DType type) { return type == DTYPE_BF16 ? 0x1p-8 : 0.0; }

// Compares the op's t with `expected`. Each element must be within one rounding of its type plus arithmetic error
// relative to the tensor's RMS (or to `scale`, the size of cancelled terms, if larger). The relative L2 error must be
// within the same bounds, with a tenth of the arithmetic error. slack widens both. fp32 may underflow below 1e-34.
static void expect_within(const Guarded *t, const double *expected, double slack, double scale) {
    double size = fmax(rms(expected, t->count), fmax(scale, 1e-34)), sum = 0.0, worst = 0.0;
    double relative = slack * arithmetic_error();
    double rounding = slack * rounding_error(t->type) * 1.001, arithmetic = relative * size;
    double early = slack * early_rounding(t) * size;
    for (size_t i = 0; i < t->count; i++) {
        double found = result(t, i), error = fabs(found - expected[i]);
        double allowed = (rounding + relative) * fabs(expected[i]) + 10.0 * arithmetic + 4.0 * early;
        allowed += inner_rounding(t, fabs(expected[i]));
        if (!(error <= allowed))
            test_fail("%s[%zu] of %zu is %.9g, expected %.9g (error %.2g, allowed %.2g)", t->name, i, t->count, found,
                      expected[i], error, allowed);
        sum += error * error;
        if (error > worst * allowed) worst = error / allowed;
    }
    if (!t->count) return;
    double limit = rounding * size + arithmetic + early + inner_rounding(t, size);
    sum = sqrt(sum / (double)t->count);
    if (!(sum <= limit)) test_fail("%s: relative L2 error %.3g, allowed %.3g", t->name, sum / size, limit / size);
    if (limit > 0.0) testing.worst = fmax(testing.worst, fmax(worst, sum / limit));
}

static void expect_near(const Guarded *t, const double *expected) { expect_within(t, expected, 1.0, 0.0); }

static void expect_exactly(const Guarded *t, const double *expected) {
    for (size_t i = 0; i < t->count; i++) {
        double found = result(t, i);
        if (found != expected[i] && !(isnan(found) && isnan(expected[i])))
            test_fail("%s[%zu] of %zu is %.17g, expected exactly %.17g", t->name, i, t->count, found, expected[i]);
    }
}

// ---- the runner -----------------------------------------------------------------------------------------------------
// Returns the relative error of rounded operands. Matrix instructions (GPU, AMX) take attention's weights and score
// gradients rounded to bf16. A GPU's take the delta rule's results as two bf16 numbers
// (llmc/ops/cuda/delta_blocks.cuh).
static double operand_error(const char *test) {
    const int on_gpu = ops_device && !strcmp(ops_device->name, "cuda");
#if defined(__AMX_BF16__)
    const int rounds = 1;
#else
    const int rounds = on_gpu;
#endif
    if (!ops_device || ops_device->stored != DTYPE_BF16) return 0.0;
    if (on_gpu && !strncmp(test, "delta", 5)) return 0x1p-17;
    return rounds && !strncmp(test, "attention", 9) ? 0x1p-9 : 0.0;
}

static int test_begin(void **state) {
    testing.test = (const char *)*state;
    testing.operands = operand_error(testing.test);
    testing.random = 1234;
    for (const char *c = testing.test; *c; c++) testing.random = testing.random * 31 + (unsigned char)*c;
    testing.begun++;
    testing.worst = 0.0;
    return 0;
}

static int test_end(void **state) {
    (void)state;
    if (testing.worst > 0.0) printf("             largest error: %.2f of what is allowed\n", testing.worst);
    case_end();
    return 0;
}

// Several programs that are compiled as one file (test/build.sh) are told apart by TEST_PROGRAM, which begins the names
// of their tests. The name by which it is started says which of the programs runs.
#ifdef JOINED
#define TEST_PASTE(program, name)  program##_##name
#define TEST_OWN_OF(program, name) TEST_PASTE(program, name)
#define TEST_OWN(name)             TEST_OWN_OF(TEST_PROGRAM, name)
#define TEST_STARTED(program)      (!strcmp(program_invocation_short_name, program))
#define TEST_TEXT(program)         #program
#define TEST_RUNS_OF(program)      TEST_STARTED(TEST_TEXT(program))
#define TEST_RUNS                  TEST_RUNS_OF(TEST_PROGRAM)
#else
#define TEST_OWN(name) name
#define TEST_RUNS      1
#endif

// The tests of a program in order of definition: TEST registers its test before main.
static struct CMUnitTest listed_tests[96];
static size_t listed_count;

static void test_list(const struct CMUnitTest *test) {
    if (listed_count == COUNT_OF(listed_tests)) abort();
    listed_tests[listed_count++] = *test;
}

#define TEST(name)                                                                                                     \
    static void TEST_OWN(name)(void **cmocka_state);                                                                   \
    __attribute__((constructor)) static void TEST_OWN(name##_is_listed)(void) {                                        \
        const struct CMUnitTest test = {#name, TEST_OWN(name), test_begin, test_end, (void *)(uintptr_t) #name};       \
        if (TEST_RUNS) test_list(&test);                                                                               \
    }                                                                                                                  \
    static void TEST_OWN(name)(void **cmocka_state __attribute__((unused)))

// Runs the body of main: `program`, `program SUBSTRING`, `program --list`. teardown: of the group, or NULL
static int tests_run(int argc, char **argv, CMFixtureFunction teardown) {
    static char pattern[200];
    const char *part = argc == 2 ? argv[1] : "";
    size_t matching = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < listed_count; i++) {
        matching += strstr(listed_tests[i].name, part) != NULL;
        if (!strcmp(part, "--list")) puts(listed_tests[i].name);
    }
    if (!strcmp(part, "--list")) return 0;
    if (argc > 2 || !matching) {
        fprintf(stderr, "usage: %s [SUBSTRING of the tests to run | --list]; \"%s\" is in no name\n", argv[0], part);
        return 2;
    }
    snprintf(pattern, sizeof(pattern), "*%s*", part); // cmocka wants a pattern, and keeps the pointer
    if (*part) cmocka_set_test_filter(pattern);
    int failed = _cmocka_run_group_tests(argv[0], listed_tests, listed_count, NULL, teardown);
    printf("%d passed, %d failed, %d skipped\n", testing.begun - failed - testing.skipped, failed, testing.skipped);
    fflush(stdout);
    return failed ? 1 : 0;
}

#define RUN_LISTED(argc, argv, teardown) return tests_run(argc, argv, teardown)

#endif
