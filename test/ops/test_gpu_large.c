/*
Op set "cuda" against op set "cpu", both linked into one program, at the sizes of real models: Qwen3-8B's and GPT-2's
widths, thousands of tokens, vocabularies of 50257 and 151936, 8192 keys, counts that are no multiple of anything, and
tensors of more than 2^31 elements. As everywhere (testing.h): guards around tensors, NaN in outputs, the same bits
twice. Part of `make test-gpu`.

Both op sets round their results to floatX, each within one rounding of the truth: two roundings between them (SLACK).
*/
#include "test/base/testing.h"
#include "llmc/ops/cuda/cudnn_attention.h"

extern const Ops OPS_TABLE(cpu);

#define REFERENCE(op)        OPS_TABLE(cpu).op
#define SCRATCH_FOR(op, ...) larger(ops->op##_scratch(__VA_ARGS__), OPS_TABLE(cpu).op##_scratch(__VA_ARGS__))
enum { TWINS_ARE_DOUBLE = 0, SLACK = 2 };
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
#include "cases.h"

static const Ops *gpu, *cpu;

// ---- matrix products ------------------------------------------------------------------------------------------------
TEST(linear) {
    static const size_t shapes[][4] = {
        {4096, 4096, 6144, 0},                          // Qwen3-8B: q, k, v together
        {1000, 4096, 12288, 0}, {2047, 12288, 4096, 0}, //
        {1023, 768, 50257, 0},                          // GPT-2's head
        {257, 1024, 151936, 0}, {4095, 1600, 4800, 1},  //
        {1, 4096, 32001, 0},                            // one token, as in sampling
        {3001, 1031, 509, 1},                           // primes
    };
    for (size_t s = 0; s < COUNT_OF(shapes); s++) {
        const size_t stride = (shapes[s][2] + 7) / 8 * 8;
        linear_forward_case(shapes[s][0], shapes[s][1], shapes[s][2], stride, (int)shapes[s][3], 1);
        linear_backward_case(shapes[s][0], shapes[s][1], shapes[s][2], stride, (int)shapes[s][3], 0);
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static void norm_case(NormKind kind, size_t n, size_t C, int variant) {
    norm_forward_case(kind, n, C, 0.0, 1.0, kind == NORM_RMS ? WITH_RESIDUAL : OUT_ALONE);
    norm_backward_case(kind, n, C, 0.0, 1.0, variant, 0);
}

TEST(norms) {
    norm_case(NORM_RMS, 4096, 4096, ACCUMULATE);
    norm_case(NORM_RMS, 1000, 5120, SEPARATE);
    norm_case(NORM_RMS, 2049 * 32, 128, SEPARATE); // QK-norm
    norm_case(NORM_RMS, 1023, 8191, SEPARATE);
    norm_case(NORM_LAYER, 4095, 1600, ACCUMULATE);
    norm_case(NORM_LAYER, 3001, 769, SEPARATE);
}

TEST(rope) {
    rope_case(4096, 32, 128, 128, 1e6, 131072, 0);
    rope_case(3001, 9, 80, 20, 1e6, 131072, 1);
}

TEST(embedding) {
    embedding_case(4096, 50257, 768, 0, ops->summed, 33.5);
    embedding_case(30001, 151936, 129, 0, ops->summed, 33.5);
    embedding_case(100003, 3, 1024, 0, ops->summed, 33.5); // long sums
}

// ---- elementwise ----------------------------------------------------------------------------------------------------
TEST(activations) {
    for (int kind = ACTIVATION_SWIGLU; kind <= ACTIVATION_GEGLU; kind++) {
        activation_case((ActivationKind)kind, NULL, 4096, 12288, 0);
        activation_case((ActivationKind)kind, NULL, 2047, 11009, 0);
    }
}

TEST(optimizer) {
    static const size_t counts[] = {4096 * 12288, 10000019};
    const AdamW step = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0, 0, NULL, NULL};
    for (size_t c = 0; c < 2; c++) {
        size_t count = counts[c];
        double found = 0.0, part[SQUARES_PARTS];
        case_of("", "count=%zu", count);
        Guarded *w = normal(CHANGED, "w", ops->stored, count, 0.0, 1.0), *g = input("g", count);
        Guarded *m = normal(CHANGED, "m", DTYPE_FP32, count, 0.0, 1.0);
        Guarded *v = normal(CHANGED, "v", DTYPE_FP32, count, 10.0, 1.0); // positive
        Guarded *sums = guarded_poison(CHANGED, "sums", DTYPE_FP64, SQUARES_PARTS);
        CALL((gpu->sum_of_squares(sums->data, SQUARES_PARTS, g->data, gpu->stored, count),
              gpu->copy_out(part, sums->data, sizeof(part)), found = squares_total(part, SQUARES_PARTS)));
        CHECK(adamw, of(w), NULL, of(g), gpu->stored, of(m), of(v), DTYPE_FP32, count, &step);
        cpu->sum_of_squares(part, SQUARES_PARTS, g->twin, cpu->stored, count);
        const double wanted = squares_total(part, SQUARES_PARTS);
        if (!(fabs(found - wanted) <= 2e-6 * wanted))
            test_fail("sum of squares %.17g, op set cpu %.17g", found, wanted);
        expect(w, 1.0, 0.0);
        expect(m, 1.0, 0.0);
        expect(v, 1.0, 0.0);
        const OpShape s = {.n = 1, .C = count, .type = gpu->stored};
        case_of("", "sums");
        case_gradient_add(&s);
        case_round_sums(&s);
    }
}

// ---- the loss head --------------------------------------------------------------------------------------------------
TEST(logprob) {
    static const size_t shapes[][2] = {{1031, 50257}, {1024, 50304}, {301, 151936}};
    for (size_t s = 0; s < 3; s++) logprob_case(NULL, NULL, RANDOM_WEIGHT, shapes[s][0], shapes[s][1], 0.9, 0.0, 0);
}

TEST(draw) {
    static const SamplingSettings settings[] = {
        {0, 0, 0, 1, 0}, {1, 0, 0, 1, 0}, {0.7, 0, 50, 0.9, 0}, {1, 0, 0, 0.95, 0}, {1.5, 0, 5000, 1, 0}};
    double uniform[64];
    for (size_t s = 0; s < 2 * COUNT_OF(settings); s++) {
        for (size_t t = 0; t < 64; t++) uniform[t] = test_uniform();
        draw_case(NULL, uniform, s % 2 ? 64 : 5, s % 2 ? 151936 : 50257, s % 3 ? 0.0 : 0.25, &settings[s / 2]);
    }
}

// ---- attention: by cuDNN if op set "cuda" has it (llmc/ops/cuda/attention_cudnn.cuh) --------------------------------
// Defined in an op set built with cuDNN
#pragma weak cudnn_attention_calls
int cudaDeviceGetAttribute(int *value, int attribute, int device) __attribute__((weak));

enum { UNALIGNED, ALIGNED }; // cuDNN wants all tensors aligned

static size_t cudnn_calls(int backward) { return cudnn_attention_calls ? cudnn_attention_calls(backward) : 0; }

static void attention_case(const Span *span, size_t count, size_t NH, size_t NKV, size_t HD, int aligned) {
    const size_t forward = cudnn_calls(0), backward = cudnn_calls(1), N = span[count - 1].end + 100;
    const Spans spans = {span, count, case_window, 0.0};
    const Heads heads = {NH, NKV, HD};
    case_of("", "%zu queries from %zu on of %zu tokens, %zu spans, NH=%zu NKV=%zu HD=%zu, window %zu%s",
            spans_rows(spans), span[0].begin, N, count, NH, NKV, HD, case_window, aligned ? "" : ", unaligned");
    testing.aligned = aligned;
    attention_spans_case(spans, N, heads, 1.0, 1.0);
    if (cudnn_attention_calls)
        printf("             %s: cuDNN took %zu calls forward, %zu backward\n", testing.about, cudnn_calls(0) - forward,
               cudnn_calls(1) - backward);
}

// Checks that a build with cuDNN calls it; backward only if cuDNN supports it.
static void expect_cudnn(void) {
    const char *setting = getenv("STREAMBP_CUDNN");
    int architecture = 9;
    printf("             cuDNN took %zu calls forward, %zu backward%s\n", cudnn_calls(0), cudnn_calls(1),
           cudnn_attention_calls ? "" : ": this op set was built without it");
    if (!cudnn_attention_calls || (setting && !strcmp(setting, "0"))) return;
    if (cudaDeviceGetAttribute) cudaDeviceGetAttribute(&architecture, 75, 0); // compute capability, major
    if (!cudnn_calls(0)) test_fail("cuDNN took no call forward; STREAMBP_CUDNN=0 allows that");
    if (architecture >= 9 && !cudnn_calls(1)) test_fail("cuDNN took no call backward; STREAMBP_CUDNN=0 allows that");
}

// The windows of Mistral and Gemma 3, and odd ones.
TEST(attention_windows_large) {
    static const Span end = {0, 7168, 8192, 0};
    static const Span documents[] = {
        {0, 3000, 3095, 0}, {3095, 3095, 3096, 95}, {3096, 3096, 5619, 96}, {5619, 5619, 6500, 2619}};
    static const size_t windows[] = {4096, 1024, 512, 333, 1};
    for (size_t w = 0; w < sizeof(windows) / sizeof(windows[0]); w++) {
        case_window = windows[w];
        attention_case(&end, 1, 8, 2, 128, ALIGNED);
        attention_case(&end, 1, 4, 1, 256, ALIGNED);
        attention_case(documents, 4, 4, 2, 96, UNALIGNED);
    }
    case_window = 0;
    expect_cudnn();
}

TEST(attention_large) {
    static const Span end = {0, 7168, 8192, 0}, off_the_grid = {0, 1000, 3001, 0}, square = {0, 5500, 10000, 0},
                      later = {64, 6064, 10160, 0};
    // on both sides of cuDNN's minimum of 512 queries
    static const Span documents[] = {{0, 3000, 3095, 0},
                                     {3095, 3095, 3096, 95},
                                     {3096, 3096, 3607, 96},
                                     {3607, 3607, 4119, 607},
                                     {4119, 4119, 6500, 1119}};
    static const size_t heads[][3] = {{16, 2, 64}, {3, 3, 64}, {4, 4, 80}, {6, 1, 96}, {8, 2, 128}, {2, 1, 256}};
    case_window = 0;                                       // a failed test leaves its own
    attention_case(&end, 1, 32, 8, 128, ALIGNED);          // Qwen3-8B: a chunk at the end of 8192 keys
    attention_case(&off_the_grid, 1, 32, 8, 128, ALIGNED); // the same kernels at another length
    attention_case(&square, 1, 16, 4, 128, ALIGNED); // 4096 queries, blocks of 4096, 1024 and 512 keys, heads in groups
    attention_case(&later, 1, 4, 2, 64, ALIGNED);    // a document that begins within the stream
    for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++)
        attention_case(documents, 5, heads[h][0], heads[h][1], heads[h][2], ALIGNED);
    attention_case(documents, 5, 4, 1, 128, UNALIGNED);
    expect_cudnn();
}

// ---- more than 2^31 elements: the last of them are right ------------------------------------------------------------
enum { PATTERN = 1 << 20, TAIL = 4096 };

// Returns count elements of device memory, element i = pattern[i % PATTERN]; NULL if memory is short.
static void *repeated(const void *pattern, size_t count, size_t size) {
    void *memory = gpu->allocate(count * size);
    size_t done = PATTERN;
    if (!memory) return NULL;
    gpu->copy_in(memory, pattern, PATTERN * size);
    for (; done < count; done *= 2)
        gpu->copy((char *)memory + done * size, memory, (count - done < done ? count - done : done) * size);
    return memory;
}

static void *random_pattern(size_t size) {
    char *pattern = (char *)case_memory(PATTERN * size);
    for (size_t i = 0; i < PATTERN; i++) element_write(pattern, gpu->stored, i, test_normal());
    return pattern;
}

// Compares elements [count - TAIL, count) with `expected`, each within two roundings. terms: size of cancelling terms.
static void expect_tail(const char *what, const void *device, size_t count, const void *expected, double terms) {
    const size_t size = dtype_size(gpu->stored);
    char *found = (char *)case_memory(TAIL * size);
    gpu->copy_out(found, (const char *)device + (count - TAIL) * size, TAIL * size);
    for (size_t i = 0; i < TAIL; i++) {
        double a = element_to_double(found, gpu->stored, i), b = element_to_double(expected, gpu->stored, i);
        if (!(fabs(a - b) <= SLACK * (rounding_error(gpu->stored) + 1e-5) * (fabs(b) + 1e-6) + 1e-5 * terms))
            test_fail("%s: element %zu of %zu is %g, op set cpu has %g", what, count - TAIL + i, count, a, b);
    }
}

TEST(beyond_2_to_the_31) {
    const size_t size = dtype_size(gpu->stored), rows = ((size_t)1 << 31) / TAIL + 3,
                 count = rows * TAIL; // rows of TAIL elements
    void *x, *out = NULL;
    float logp;
    int32_t target = 5;
    float weight = 1.0f;
    case_of("", "%zu elements", count);
    char *pattern = (char *)random_pattern(size), *expected = (char *)case_memory(TAIL * size);
    char *row = pattern + (count - TAIL) % PATTERN * size; // PATTERN is a multiple of TAIL: the last row is whole
    x = repeated(pattern, count, size), out = x ? gpu->allocate(count * size) : NULL;
    if (!out) {
        if (x) gpu->release(x, count * size);
        test_skip("the device has not enough memory");
        return;
    }
    const Activation gelu = {ACTIVATION_GELU, 0, 0}, swiglu = {ACTIVATION_SWIGLU, 0, 0};
    const Temperature one = {1.0, 0.0};
    gpu->activation_forward((Stored *)out, (const Stored *)x, gelu, 1, count);
    cpu->activation_forward((Stored *)expected, (const Stored *)row, gelu, 1, TAIL);
    expect_tail("gelu", out, count, expected, 0.0);
    gpu->activation_forward((Stored *)out, (const Stored *)x, swiglu, rows, TAIL / 2); // two last rows
    cpu->activation_forward((Stored *)expected, (const Stored *)(row - TAIL * size), swiglu, 2, TAIL / 2);
    expect_tail("swiglu", out, count / 2, expected, 0.0);

    void *w = repeated(pattern, PATTERN, size);
    const Norm norm = {1e-6, 0.0, NORM_RMS};
    gpu->norm_forward((Stored *)out, (const Stored *)x, (const Stored *)w, NULL, NULL, rows, TAIL, norm);
    cpu->norm_forward((Stored *)expected, (const Stored *)row, (const Stored *)pattern, NULL, NULL, 1, TAIL, norm);
    expect_tail("rmsnorm", out, count, expected, 0.0);
    gpu->release(w, PATTERN * size);

    // the matrix [TAIL, TAIL] is the beginning of x
    Stored *const matrix = (Stored *)case_memory(TAIL * TAIL * size);
    gpu->copy_out(matrix, x, TAIL * TAIL * size);
    gpu->linear_forward((Stored *)out, (const Stored *)x, (const Stored *)x, NULL, NULL, rows, TAIL, TAIL, TAIL);
    cpu->linear_forward((Stored *)expected, (const Stored *)row, matrix, NULL, NULL, 1, TAIL, TAIL, TAIL);
    expect_tail("product", out, count, expected, sqrt(TAIL));
    gpu->release(out, count * size);

    int32_t *targets = (int32_t *)case_memory(rows * sizeof(int32_t));
    for (size_t t = 0; t < rows; t++) targets[t] = target;
    int32_t *device_targets = (int32_t *)gpu->allocate(rows * sizeof(int32_t));
    float *device_weight = (float *)gpu->allocate(rows * sizeof(float));
    float *device_logp = (float *)gpu->allocate(rows * sizeof(float));
    gpu->copy_in(device_targets, targets, rows * sizeof(int32_t));
    for (size_t t = 0; t < rows; t++) ((float *)targets)[t] = weight;
    gpu->copy_in(device_weight, targets, rows * sizeof(float));
    gpu->logprob((Summed *)device_logp, NULL, (Stored *)x, device_targets, (const Summed *)device_weight, rows, TAIL,
                 TAIL, one);
    memcpy(expected, row, TAIL * size);
    cpu->logprob((Summed *)&logp, NULL, (Stored *)expected, &target, (const Summed *)&weight, 1, TAIL, TAIL, one);
    expect_tail("logprob", x, count, expected, 0.0);
    gpu->release(device_targets, rows * sizeof(int32_t));
    gpu->release(device_weight, rows * sizeof(float));
    gpu->release(device_logp, rows * sizeof(float));
    gpu->release(x, count * size);
}

int main(int argc, char **argv) {
    check.ops = ops = gpu = ops_device, cpu = &OPS_TABLE(cpu);
    if (strcmp(gpu->name, "cuda") != 0 || gpu->stored != cpu->stored) return 1;
    RUN_LISTED(argc, argv, NULL);
}
