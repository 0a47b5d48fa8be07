/*
Op set "cuda" against op set "cpu", both linked into one program, at the sizes of real models: Qwen3-8B's and GPT-2's
widths, thousands of tokens, vocabularies of 50257 and 151936, 8192 keys, counts that are no multiple of anything, and
tensors of more than 2^31 elements. As everywhere (testing.h): guards around tensors, NaN in outputs, the same bits
twice. Part of `make test-gpu`.

Both op sets round their results to floatX, each within one rounding of the truth: two roundings between them (SLACK).
*/
#include "test/base/testing.h"
#include "llmc/ops/attention_calls.h"
#include "llmc/ops/cuda/cudnn_attention.h"

extern const Ops *const ops_cpu_device;

#define REFERENCE(op)        ops_cpu_device->op
#define SCRATCH_FOR(op, ...) larger(ops->op##_scratch(__VA_ARGS__), ops_cpu_device->op##_scratch(__VA_ARGS__))
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
#pragma weak cudnn_attention_start
#pragma weak cudnn_attention_refusal
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

// ---- sliding windows by cuDNN, each call beside our own kernels -----------------------------------------------------
#pragma weak cudnn_attention_has
#pragma weak cudnn_attention_forward
#pragma weak cudnn_attention_backward

// A call: as many keys as the queries see, rounded up to `step`, and `more` steps
typedef struct {
    size_t NH, NKV, HD, window, rows, step;
    int more;
} WindowCall;

// The largest difference of count elements, and where results are not finite: rows of `width` elements
typedef struct {
    double error, most;
    size_t unwritten, wrong, first, last; // elements: as before the call, not finite; rows of those
} WindowFault;

static WindowFault window_compare(const void *found, DType type, const void *expected, DType expected_type,
                                  size_t count, size_t width) {
    WindowFault f = {0, 0, 0, 0, SIZE_MAX, 0};
    for (size_t i = 0; i < count; i++) {
        const double a = element_to_double(found, type, i), b = element_to_double(expected, expected_type, i);
        const int same = type == DTYPE_BF16 ? ((const uint16_t *)found)[i] == 0x7fa5 : 0;
        f.most = fmax(f.most, fabs(b)), f.unwritten += (size_t)same;
        if (isfinite(a)) {
            f.error = fmax(f.error, fabs(a - b));
            continue;
        }
        f.wrong++, f.last = i / width;
        if (f.first == SIZE_MAX) f.first = i / width;
    }
    return f;
}

// Prints one result, returns whether it is right: finite, and within `allowed` of the largest expected.
static int window_result(const char *name, WindowFault f, double allowed) {
    const int right = !f.wrong && f.error <= allowed * f.most;
    printf("  %s %.1e of %.1e", name, f.error, f.most);
    if (f.wrong)
        printf(" NaN %zu (unwritten %zu) rows %zu to %zu", f.wrong, f.unwritten, f.first, f.last);
    else if (!right)
        printf(" WRONG");
    return right;
}

static const uint16_t *window_numbers(size_t count) { // random bf16 in [-1, 1), the same every time
    static uint16_t *numbers;
    static size_t have;
    if (have >= count) return numbers;
    free(numbers), numbers = (uint16_t *)malloc(count * sizeof(*numbers)), have = count;
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        numbers[i] = float_to_bf16((float)((double)(state >> 40) / (1 << 23) - 1));
    }
    return numbers;
}

// Milliseconds of the second of two calls
#define WINDOW_TIMED(milliseconds, call)                                                                               \
    do {                                                                                                               \
        call;                                                                                                          \
        gpu->finish();                                                                                                 \
        const double begin_ = seconds_now();                                                                           \
        call;                                                                                                          \
        gpu->finish();                                                                                                 \
        milliseconds = 1000 * (seconds_now() - begin_);                                                                \
    } while (0)

// Runs a call by cuDNN and by our own kernels; returns whether out, log-sum-exp, dq, dk, dv agree.
static int window_call(WindowCall c) {
    const size_t exact = c.window - 1 + c.rows, rounded = (exact + c.step - 1) / c.step * c.step;
    const size_t keys = rounded + (size_t)((long)c.step * c.more), q = c.rows * c.NH * c.HD, kv = keys * c.NKV * c.HD;
    const CudnnAttention call = {c.rows, keys, c.NH, c.NKV, c.NH, c.NKV, c.HD, c.window, 3 / sqrt((double)c.HD), 1, 0};
    const size_t backward_bytes = attention_workspace(c.rows, keys, c.NH, c.HD, 0), lse = c.rows * c.NH;
    const int back = keys % 128 == 0;
    double ms[4] = {0};
    int right = 1;
    printf("%3zu %2zu %3zu window %4zu rows %4zu keys %5zu bound %5ld:", c.NH, c.NKV, c.HD, c.window, c.rows, keys,
           (long)c.window - (long)keys + (long)c.rows);
    if (!cudnn_attention_has(&call, 0, 64 << 10)) {
        printf(" forward refused: %s\n", cudnn_attention_refusal());
        return 0;
    }
    const Span span = {0, keys - c.rows, keys, 0};
    const AttentionShape shape = {{&span, 1, c.window, 0}, c.NH, c.NKV, c.HD, call.scale, all_keys, 0, 0};
    const size_t scratch = gpu->attention_scratch(c.rows, c.NH, c.NKV, c.HD) * sizeof(float);
    // q, k, v, dout; then of cuDNN: out, dq, dk, dv, lse, workspace; of our own: out (unaligned: not cuDNN's), dq, dk,
    // dv, lse, scratch
    enum { TENSORS = 16 };
    const size_t bytes[TENSORS] = {
        2 * q,      2 * kv,     2 * kv, 2 * q,  2 * q,   2 * q,  2 * kv, 2 * kv, 4 * lse, backward_bytes + (64 << 10),
        2 * q + 16, 2 * q + 16, 4 * kv, 4 * kv, 4 * lse, scratch};
    char *at[TENSORS];
    const uint16_t *numbers = window_numbers(2 * q + 2 * kv);
    for (int i = 0; i < TENSORS; i++) at[i] = (char *)gpu->allocate(bytes[i]);
    uint16_t *const host = (uint16_t *)malloc(4 * (q + kv) + 8 * lse);
    void *const other = malloc(4 * (q + kv) + 8 * lse);
    for (size_t i = 0; i < q + kv; i++) host[i] = 0x7fa5;
    gpu->copy_in(at[0], numbers, bytes[0]), gpu->copy_in(at[1], numbers + q, bytes[1]);
    gpu->copy_in(at[2], numbers + q + kv, bytes[2]), gpu->copy_in(at[3], numbers + q + 2 * kv, bytes[3]);
    for (int i = 4; i < 8; i++) gpu->copy_in(at[i], host, bytes[i]);
    Stored *const own_out = (Stored *)(at[10] + 2), *const own_dq = (Stored *)(at[11] + 2);
    WINDOW_TIMED(ms[0], cudnn_attention_forward(&call, at[4], (float *)at[8], at[0], at[1], at[2], at[9]));
    WINDOW_TIMED(ms[1], gpu->attention_forward(own_out, (Summed *)at[14], (Stored *)at[0], (Stored *)at[1],
                                               (Stored *)at[2], &shape, (Summed *)at[15]));
    gpu->copy_out(host, at[4], 2 * q), gpu->copy_out(other, own_out, 2 * q);
    right &= window_result("out", window_compare(host, DTYPE_BF16, other, DTYPE_BF16, q, c.NH * c.HD), 0.01);
    float *const lse_found = (float *)host, *const lse_own = (float *)other, *const lse_turned = lse_own + lse;
    gpu->copy_out(lse_found, at[8], 4 * lse), gpu->copy_out(lse_own, at[14], 4 * lse);
    for (size_t i = 0; i < lse; i++) lse_turned[i] = lse_own[i % c.rows * c.NH + i / c.rows];
    right &= window_result("lse", window_compare(lse_found, DTYPE_FP32, lse_turned, DTYPE_FP32, lse, 1), 1e-4);
    if (back && cudnn_attention_has(&call, 1, backward_bytes)) {
        gpu->copy_in(at[8], lse_turned, 4 * lse);
        gpu->copy(at[4], own_out, 2 * q);
        WINDOW_TIMED(ms[2], cudnn_attention_backward(&call, at[5], at[6], at[7], at[3], at[4], at[0], at[1], at[2],
                                                     (float *)at[8], at[9]));
        for (int i = 0; i < 2; i++) { // they add to dk and dv
            gpu->zero(at[12], bytes[12]), gpu->zero(at[13], bytes[13]), gpu->finish();
            const double begin = seconds_now();
            gpu->attention_backward(own_dq, (Summed *)at[12], (Summed *)at[13], (Stored *)at[3], own_out,
                                    (Stored *)at[0], (Stored *)at[1], (Stored *)at[2], (Summed *)at[14], &shape,
                                    (Summed *)at[15]);
            gpu->finish(), ms[3] = 1000 * (seconds_now() - begin);
        }
        gpu->copy_out(host, at[5], 2 * q), gpu->copy_out(other, own_dq, 2 * q);
        right &= window_result("dq", window_compare(host, DTYPE_BF16, other, DTYPE_BF16, q, c.NH * c.HD), 0.02);
        for (int i = 0; i < 2; i++) {
            gpu->copy_out(host, at[6 + i], 2 * kv), gpu->copy_out(other, at[12 + i], 4 * kv);
            right &= window_result(i ? "dv" : "dk",
                                   window_compare(host, DTYPE_BF16, other, DTYPE_FP32, kv, c.NKV * c.HD), 0.02);
        }
    } else
        printf("  no backward");
    printf("  %s; ms %.2f (own %.2f), %.2f (own %.2f)\n", right ? "ok" : "FAULT", ms[0], ms[1], ms[2], ms[3]);
    for (int i = 0; i < TENSORS; i++) gpu->release(at[i], bytes[i]);
    free(host), free(other);
    return right;
}

// Prints which calls with a window cuDNN gets right. bound: what the front end passes on, window + rows - keys; 0 where
// keys are rounded up to a step and the window is a multiple of it. Fails if it takes windows and one of its calls is
// wrong. The last calls are on no grid.
TEST(windows_by_cudnn) {
    static const WindowCall calls[] = {
        {8, 2, 128, 4096, 1024, 256, 0},   {8, 2, 128, 4096, 1024, 256, -1},   {8, 2, 128, 4096, 1024, 256, 1},
        {64, 8, 64, 128, 4096, 256, 0},    {64, 8, 64, 128, 4096, 256, -1},    {8, 4, 256, 1024, 4096, 256, 0},
        {8, 4, 256, 1024, 4096, 256, -1},  {8, 4, 256, 1024, 4096, 256, 1},    {32, 8, 128, 4096, 4096, 256, 0},
        {32, 8, 128, 4096, 4096, 256, -1}, {32, 16, 256, 1024, 4096, 256, -1}, {8, 2, 128, 4096, 4096, 256, 0},
        {8, 2, 128, 4096, 4096, 256, -1},  {8, 2, 128, 4096, 4096, 256, 1},    {8, 2, 128, 4096, 512, 256, 0},
        {8, 2, 128, 4096, 512, 256, -1},   {8, 2, 128, 4096, 512, 256, 1},     {8, 2, 128, 1024, 1024, 256, 0},
        {8, 2, 128, 1024, 1024, 256, -1},  {8, 2, 128, 1024, 1024, 256, 1},    {8, 2, 128, 1024, 4096, 256, 0},
        {8, 2, 128, 1024, 4096, 256, -1},  {8, 2, 128, 1024, 4096, 256, 1},    {8, 2, 128, 512, 1024, 256, 0},
        {8, 2, 128, 512, 1024, 256, -1},   {8, 2, 128, 512, 1024, 256, 1},     {8, 2, 128, 333, 1024, 256, 0},
        {8, 2, 128, 333, 1024, 256, -1},   {8, 2, 128, 128, 4096, 256, 0},     {8, 2, 128, 128, 4096, 256, -1},
        {8, 2, 128, 1, 512, 256, 0},       {8, 2, 128, 1, 512, 256, 1},        {8, 8, 128, 4096, 1024, 256, 0},
        {8, 8, 128, 4096, 1024, 256, -1},  {8, 8, 128, 4096, 1024, 256, 1},    {4, 1, 256, 512, 4096, 256, 0},
        {4, 1, 256, 512, 4096, 256, -1},   {4, 1, 256, 512, 4096, 256, 1},     {8, 2, 64, 4096, 1024, 256, 0},
        {8, 2, 64, 4096, 1024, 256, -1},   {8, 2, 64, 4096, 1024, 256, 1},     {64, 8, 64, 128, 4096, 128, 0},
        {8, 2, 128, 128, 4096, 128, 0},    {8, 2, 128, 4096, 1024, 1, 0},      {8, 2, 128, 333, 1024, 1, 0},
    };
    size_t right = 0, taken_wrong = 0;
    if (!cudnn_attention_has || !cudnn_attention_start()) {
        test_skip("there is no cuDNN");
        return;
    }
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        const WindowCall c = calls[i];
        const int made = CUDNN_WINDOWS && c.step == CUDNN_GRID / 2 && c.more <= 0 && c.window % c.step * c.more == 0 &&
                         (c.window % c.step != 0 || c.more < 0);
        const int is_right = window_call(c);
        right += (size_t)is_right, taken_wrong += (size_t)(made && !is_right);
    }
    printf("             %zu of %zu calls are right\n", right, COUNT_OF(calls));
    if (taken_wrong) test_fail("%zu of the calls that attention_calls.h makes are wrong", taken_wrong);
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
    check.ops = ops = gpu = ops_device, cpu = ops_cpu_device;
    if (strcmp(gpu->name, "cuda") != 0 || gpu->stored != cpu->stored) return 1;
    RUN_LISTED(argc, argv, NULL);
}
