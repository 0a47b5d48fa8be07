/*
Op set "cuda" against op set "cpu", both linked into one program, at the sizes of real models: Qwen3-8B's and GPT-2's
widths, thousands of tokens, vocabularies of 50257 and 151936, 8192 keys, counts that are no multiple of anything, and
tensors of more than 2^31 elements. As everywhere (testing.h): guards around tensors, NaN in outputs, the same bits
twice. Part of `make test-gpu`.

Both op sets round their results to floatX, each within one rounding of the truth: two roundings between them (SLACK).
*/
#include "test/base/testing.h"

extern const Ops *const ops_cpu_device;

#define SLACK 2.0

static const Ops *gpu, *cpu;

// As guarded_normal; large ones by all threads: element i is of i, whoever draws it.
static Guarded *normal(GuardedRole role, const char *name, DType type, size_t count, double mean, double deviation) {
    const uint64_t seed = test_random();
    if (count < 1000000) return guarded_normal(role, name, type, count, mean, deviation);
    Guarded *t = guarded_poison(role, name, type, count);
#pragma omp parallel for
    for (size_t i = 0; i < count; i++)
        element_write(t->before + t->offset, type, i, mean + deviation * normal_of(random_mix(seed + i)));
    return t;
}

static Guarded *input(const char *name, size_t count) { return normal(INPUT, name, gpu->stored, count, 0.0, 1.0); }
static Guarded *output(const char *name, size_t count) { return guarded_poison(CHANGED, name, gpu->stored, count); }
static Guarded *sums(const char *name, size_t count) { return normal(CHANGED, name, gpu->summed, count, 0.0, 1.0); }
static Guarded *scratch_of(size_t count) { return guarded_poison(SCRATCH, "scratch", gpu->summed, count ? count : 1); }

// The tensor as it is laid out before the op, in memory of the host for op set "cpu".
static void *twin(const Guarded *t) {
    size_t bytes = t->count * dtype_size(t->type);
    void *memory = case_memory(bytes);
    memcpy(memory, t->before + t->offset, bytes);
    return memory;
}

// Holds what op set "cuda" left in t against what op set "cpu" left in its twin.
static void expect_twin(const Guarded *t, const void *memory, double scale) {
    double *expected = case_doubles(t->count);
    for (size_t i = 0; i < t->count; i++) expected[i] = element_to_double(memory, t->type, i);
    expect_within(t, expected, SLACK, scale);
}

static int32_t *random_indices(size_t n, size_t limit) {
    int32_t *index = (int32_t *)case_memory(n * sizeof(int32_t));
    for (size_t t = 0; t < n; t++) index[t] = (int32_t)test_random_below(limit);
    index[n / 2] = (int32_t)limit - 1;
    return index;
}

// ---- matrix products ------------------------------------------------------------------------------------------------
static void linear_case(size_t n, size_t C, size_t OC, int with_bias) {
    test_case("n=%zu C=%zu OC=%zu%s", n, C, OC, with_bias ? " with bias" : "");
    Guarded *x = input("x", n * C), *weight = input("weight", OC * C), *bias = with_bias ? input("bias", OC) : NULL;
    Guarded *residual = input("residual", n * OC), *out = output("out", n * OC);
    Guarded *dx = output("dx", n * C), *dweight = sums("dweight", OC * C),
            *dbias = with_bias ? sums("dbias", OC) : NULL;
    void *x2 = twin(x), *weight2 = twin(weight), *bias2 = bias ? twin(bias) : NULL, *residual2 = twin(residual);
    void *out2 = twin(out), *dx2 = twin(dx), *dweight2 = twin(dweight), *dbias2 = dbias ? twin(dbias) : NULL;
    CALL((gpu->linear_forward(out->data, x->data, weight->data, bias ? bias->data : NULL, residual->data, n, C, OC),
          gpu->linear_backward_input(dx->data, residual->data, weight->data, n, C, OC, 0),
          gpu->linear_backward_weight(dweight->data, dbias ? dbias->data : NULL, residual->data, x->data, n, C, OC)));
    cpu->linear_forward(out2, x2, weight2, bias2, residual2, n, C, OC);
    cpu->linear_backward_input(dx2, residual2, weight2, n, C, OC, 0);
    cpu->linear_backward_weight(dweight2, dbias2, residual2, x2, n, C, OC);
    expect_twin(out, out2, sqrt((double)C));
    expect_twin(dx, dx2, sqrt((double)OC));
    expect_twin(dweight, dweight2, sqrt((double)n));
    if (dbias) expect_twin(dbias, dbias2, sqrt((double)n));
}

TEST(linear) {
    linear_case(4096, 4096, 6144, 0); // Qwen3-8B: q, k, v together
    linear_case(1000, 4096, 12288, 0);
    linear_case(2047, 12288, 4096, 0);
    linear_case(1023, 768, 50257, 0); // GPT-2's head
    linear_case(257, 1024, 151936, 0);
    linear_case(4095, 1600, 4800, 1);
    linear_case(1, 4096, 32001, 0);  // one token, as when sampling
    linear_case(3001, 1031, 509, 1); // primes
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static void norm_case(int layernorm, size_t n, size_t C, int accumulate) {
    const double eps = 1e-6, offset = n % 2 ? 1.0 : 0.0; // as Gemma has it
    test_case("%s n=%zu C=%zu", layernorm ? "layernorm" : "rmsnorm", n, C);
    Guarded *x = input("x", n * C), *w = input("w", C), *b = layernorm ? input("b", C) : NULL,
            *out = output("out", n * C);
    Guarded *dout = input("dout", n * C), *dw = sums("dw", C), *db = layernorm ? sums("db", C) : NULL;
    Guarded *dx = normal(CHANGED, "dx", gpu->stored, n * C, 0.0, 1.0);
    Guarded *scratch = scratch_of(gpu->norm_backward_scratch(n, C));
    void *scratch2 = case_memory((cpu->norm_backward_scratch(n, C) + 1) * dtype_size(cpu->summed));
    void *x2 = twin(x), *w2 = twin(w), *b2 = b ? twin(b) : NULL, *out2 = twin(out), *dout2 = twin(dout),
         *dx2 = twin(dx);
    void *dw2 = twin(dw), *db2 = db ? twin(db) : NULL;
    const Norm norm = {eps, layernorm ? 0.0 : offset, layernorm ? NORM_LAYER : NORM_RMS};
    CALL((gpu->norm_forward(out->data, x->data, w->data, b ? b->data : NULL, b ? NULL : dout->data, n, C, norm),
          gpu->norm_backward(dx->data, dw->data, db ? db->data : NULL, dout->data, x->data, w->data, n, C, norm,
                             accumulate, scratch->data)));
    cpu->norm_forward(out2, x2, w2, b2, b ? NULL : dout2, n, C, norm);
    cpu->norm_backward(dx2, dw2, db2, dout2, x2, w2, n, C, norm, accumulate, scratch2);
    expect_twin(out, out2, 0.0);
    expect_twin(dx, dx2, 1.0);
    expect_twin(dw, dw2, sqrt((double)n));
    if (db) expect_twin(db, db2, sqrt((double)n));
}

TEST(norms) {
    norm_case(0, 4096, 4096, 1);
    norm_case(0, 1000, 5120, 0);
    norm_case(0, 2049 * 32, 128, 0); // QK-norm
    norm_case(0, 1023, 8191, 0);
    norm_case(1, 4095, 1600, 1);
    norm_case(1, 3001, 769, 0);
}

static void rope_case(size_t n, size_t heads, size_t HD) {
    float *frequencies;
    int32_t *positions;
    test_case("n=%zu heads=%zu HD=%zu", n, heads, HD);
    positions = random_indices(n, 131072), frequencies = (float *)case_memory(HD / 2 * sizeof(float));
    for (size_t i = 0; i < HD / 2; i++) frequencies[i] = (float)pow(1e6, -2.0 * (double)i / (double)HD);
    Guarded *position = guarded_bytes(INPUT, "position", positions, 4, n);
    Guarded *frequency = guarded_bytes(INPUT, "inverse_frequency", frequencies, 4, HD / 2);
    Guarded *x = normal(CHANGED, "x", gpu->stored, n * heads * HD, 0.0, 1.0);
    Guarded *dx = normal(CHANGED, "dx", gpu->stored, n * heads * HD, 0.0, 1.0);
    void *x2 = twin(x), *dx2 = twin(dx);
    CALL((gpu->rope(x->data, position->data, frequency->data, n, heads, HD, 0),
          gpu->rope(dx->data, position->data, frequency->data, n, heads, HD, 1)));
    cpu->rope(x2, positions, frequencies, n, heads, HD, 0);
    cpu->rope(dx2, positions, frequencies, n, heads, HD, 1);
    expect_twin(x, x2, 0.0);
    expect_twin(dx, dx2, 0.0);
}

TEST(rope) {
    rope_case(4096, 32, 128);
    rope_case(3001, 9, 80);
}

static void embedding_case(size_t n, size_t rows, size_t C) {
    test_case("n=%zu rows=%zu C=%zu", n, rows, C);
    int32_t *index = random_indices(n, rows);
    Guarded *tokens = guarded_bytes(INPUT, "tokens", index, 4, n), *wte = input("wte", rows * C),
            *out = output("out", n * C);
    Guarded *dx = input("dx", n * C), *dw = sums("dw", rows * C);
    Guarded *scratch = scratch_of(gpu->embedding_backward_scratch(n, rows, C));
    void *scratch2 = case_memory((cpu->embedding_backward_scratch(n, rows, C) + 1) * dtype_size(cpu->summed));
    void *wte2 = twin(wte), *out2 = twin(out), *dx2 = twin(dx), *dw2 = twin(dw);
    CALL((gpu->embedding_forward(out->data, tokens->data, NULL, wte->data, NULL, n, C, 33.5),
          gpu->embedding_backward(dw->data, gpu->summed, dx->data, tokens->data, n, rows, C, 33.5, scratch->data)));
    cpu->embedding_forward(out2, index, NULL, wte2, NULL, n, C, 33.5);
    cpu->embedding_backward(dw2, cpu->summed, dx2, index, n, rows, C, 33.5, scratch2);
    expect_twin(out, out2, 0.0);
    expect_twin(dw, dw2, 1.0);
}

TEST(embedding) {
    embedding_case(4096, 50257, 768);
    embedding_case(30001, 151936, 129);
    embedding_case(100003, 3, 1024); // long sums
}

// ---- elementwise ----------------------------------------------------------------------------------------------------
static void activation_case(const char *name, ActivationKind kind, size_t n, size_t FF) {
    const size_t width = kind == ACTIVATION_GELU ? FF : 2 * FF;
    test_case("%s n=%zu FF=%zu", name, n, FF);
    Guarded *in = input("in", n * width), *dout = input("dout", n * FF), *out = output("out", n * FF),
            *din = output("din", n * width);
    void *in2 = twin(in), *dout2 = twin(dout), *out2 = twin(out), *din2 = twin(din);
    CALL((gpu->activation_forward(out->data, in->data, kind, n, FF),
          gpu->activation_backward(din->data, dout->data, in->data, kind, n, FF)));
    cpu->activation_forward(out2, in2, kind, n, FF);
    cpu->activation_backward(din2, dout2, in2, kind, n, FF);
    expect_twin(out, out2, 0.0);
    expect_twin(din, din2, 0.0);
}

TEST(activations) {
    static const size_t shapes[][2] = {{4096, 12288}, {2047, 11009}};
    for (size_t s = 0; s < 2; s++) {
        activation_case("swiglu", ACTIVATION_SWIGLU, shapes[s][0], shapes[s][1]);
        activation_case("geglu", ACTIVATION_GEGLU, shapes[s][0], shapes[s][1]);
        activation_case("gelu", ACTIVATION_GELU, shapes[s][0], shapes[s][1]);
    }
}

TEST(optimizer) {
    static const size_t counts[] = {4096 * 12288, 10000019};
    const AdamW step = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 7, 42, 0};
    for (size_t c = 0; c < 2; c++) {
        size_t count = counts[c];
        double found = 0.0;
        test_case("count=%zu", count);
        Guarded *w = normal(CHANGED, "w", gpu->stored, count, 0.0, 1.0), *g = input("g", count);
        Guarded *m = normal(CHANGED, "m", DTYPE_FP32, count, 0.0, 1.0);
        Guarded *v = normal(CHANGED, "v", DTYPE_FP32, count, 10.0, 1.0); // positive
        Guarded *gradient = normal(CHANGED, "gradient", gpu->stored, count, 0.0, 1.0);
        Guarded *in = normal(INPUT, "in", gpu->summed, count, 0.0, 1.0), *rounded = output("rounded", count);
        void *w2 = twin(w), *m2 = twin(m), *v2 = twin(v), *g2 = twin(g), *gradient2 = twin(gradient), *in2 = twin(in);
        void *rounded2 = twin(rounded);
        CALL((found = gpu->sum_of_squares(g->data, gpu->stored, count),
              gpu->adamw(w->data, NULL, g->data, gpu->stored, m->data, v->data, DTYPE_FP32, count, &step),
              gpu->gradient_add(gradient->data, gpu->stored, in->data, count),
              gpu->round_sums(rounded->data, in->data, count)));
        double expected = cpu->sum_of_squares(g2, cpu->stored, count);
        cpu->adamw(w2, NULL, g2, cpu->stored, m2, v2, DTYPE_FP32, count, &step);
        cpu->gradient_add(gradient2, cpu->stored, in2, count);
        cpu->round_sums(rounded2, in2, count);
        if (!(fabs(found - expected) <= 2e-6 * expected))
            test_fail("sum of squares %.17g, op set cpu %.17g", found, expected);
        expect_twin(w, w2, 0.0);
        expect_twin(m, m2, 0.0);
        expect_twin(v, v2, 0.0);
        expect_twin(gradient, gradient2, 0.0);
        expect_twin(rounded, rounded2, 0.0);
    }
}

// ---- the loss head --------------------------------------------------------------------------------------------------
TEST(logprob) {
    static const size_t shapes[][2] = {{1031, 50257}, {1024, 50304}, {301, 151936}};
    for (size_t s = 0; s < 3; s++) {
        size_t n = shapes[s][0], V = shapes[s][1];
        test_case("n=%zu V=%zu", n, V);
        int32_t *targets = random_indices(n, V);
        for (size_t t = 0; t < n; t += 5) targets[t] = -1;
        Guarded *logits = normal(CHANGED, "logits", gpu->stored, n * V, 0.0, 3.0);
        Guarded *g_targets = guarded_bytes(INPUT, "targets", targets, 4, n);
        Guarded *weight = normal(INPUT, "weight", gpu->summed, n, 0.0, 1.0),
                *logp = guarded_poison(CHANGED, "logp", gpu->summed, n);
        void *logits2 = twin(logits), *weight2 = twin(weight), *logp2 = twin(logp);
        CALL(gpu->logprob(logp->data, NULL, logits->data, g_targets->data, weight->data, n, V, 0.9));
        cpu->logprob(logp2, NULL, logits2, targets, weight2, n, V, 0.9);
        expect_twin(logp, logp2, 3.0);
        expect_twin(logits, logits2, 0.0);
    }
}

// ---- attention: by cuDNN where op set "cuda" has it (llmc/ops/cuda/attention_cudnn.cuh) -----------------------------
size_t cudnn_attention_calls(int backward) __attribute__((weak)); // comes with an op set that was built with cuDNN
int cudaDeviceGetAttribute(int *value, int attribute, int device) __attribute__((weak));

enum { UNALIGNED, ALIGNED }; // as cuDNN wants all tensors

static size_t cudnn_calls(int backward) { return cudnn_attention_calls ? cudnn_attention_calls(backward) : 0; }

static size_t case_window; // 0: none

static void attention_case(const Span *span, size_t count, size_t NH, size_t NKV, size_t HD, int aligned) {
    const size_t t0 = span[0].begin, n = span[count - 1].row + span[count - 1].end - span[count - 1].begin;
    const size_t N = span[count - 1].end + 100, rows = n * NH, most = rows * HD;
    const size_t forward = cudnn_calls(0), backward = cudnn_calls(1);
    const double scale = 1.0 / sqrt((double)HD);
    Spans spans = {0};
    spans.span = span, spans.count = count, spans.window = case_window;
    test_case("%zu queries from %zu on of %zu tokens, %zu spans, NH=%zu NKV=%zu HD=%zu, window %zu%s", n, t0, N, count,
              NH, NKV, HD, case_window, aligned ? "" : ", unaligned");
    testing.aligned = aligned;
    Guarded *q = input("q", most), *k = input("k", N * NKV * HD), *v = input("v", N * NKV * HD),
            *dout = input("dout", most);
    Guarded *out = output("out", most), *lse = guarded_poison(CHANGED, "lse", gpu->summed, rows);
    Guarded *scratch = scratch_of(gpu->attention_scratch(n, NH, NKV, HD));
    void *scratch2 = case_memory((cpu->attention_scratch(n, NH, NKV, HD) + 1) * dtype_size(cpu->summed));
    void *q2 = twin(q), *k2 = twin(k), *v2 = twin(v), *dout2 = twin(dout), *out2 = twin(out), *lse2 = twin(lse);
    const AttentionShape shape = {spans, NH, NKV, HD, scale, all_keys, 0, 0};
    CALL(gpu->attention_forward(out->data, lse->data, q->data, k->data, v->data, &shape, scratch->data));
    cpu->attention_forward(out2, lse2, q2, k2, v2, &shape, scratch2);
    expect_twin(out, out2, 0.0);
    expect_twin(lse, lse2, 1.0);
    // both backwards from the same out and lse
    Guarded *given_out = guarded_bytes(INPUT, "given out", out2, dtype_size(gpu->stored), most);
    Guarded *given_lse = guarded_bytes(INPUT, "given lse", lse2, dtype_size(gpu->summed), rows);
    Guarded *dq = output("dq", most), *dk = sums("dk", N * NKV * HD), *dv = sums("dv", N * NKV * HD);
    void *dq2 = twin(dq), *dk2 = twin(dk), *dv2 = twin(dv);
    CALL(gpu->attention_backward(dq->data, dk->data, dv->data, dout->data, given_out->data, q->data, k->data, v->data,
                                 given_lse->data, &shape, scratch->data));
    cpu->attention_backward(dq2, dk2, dv2, dout2, out2, q2, k2, v2, lse2, &shape, scratch2);
    expect_twin(dq, dq2, 0.3);
    expect_twin(dk, dk2, 0.3);
    expect_twin(dv, dv2, 0.3);
    if (cudnn_attention_calls)
        printf("             %s: cuDNN took %zu calls forward, %zu backward\n", testing.about, cudnn_calls(0) - forward,
               cudnn_calls(1) - backward);
}

// A build with cuDNN that never asks it would pass all the same; backward is only asked for where cuDNN has it.
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

// As Mistral and Gemma 3 have them, and odd ones.
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
    // on both sides of the 512 queries that are cuDNN's least
    static const Span documents[] = {{0, 3000, 3095, 0},
                                     {3095, 3095, 3096, 95},
                                     {3096, 3096, 3607, 96},
                                     {3607, 3607, 4119, 607},
                                     {4119, 4119, 6500, 1119}};
    static const size_t heads[][3] = {{16, 2, 64}, {3, 3, 64}, {4, 4, 80}, {6, 1, 96}, {8, 2, 128}, {2, 1, 256}};
    attention_case(&end, 1, 32, 8, 128, ALIGNED);          // Qwen3-8B: a chunk at the end of 8192 keys
    attention_case(&off_the_grid, 1, 32, 8, 128, ALIGNED); // the same kernels for another length
    attention_case(&square, 1, 16, 4, 128, ALIGNED); // 4096 queries, blocks of 4096, 1024 and 512 keys, heads in groups
    attention_case(&later, 1, 4, 2, 64, ALIGNED);    // a document that does not begin with the stream
    for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++)
        attention_case(documents, 5, heads[h][0], heads[h][1], heads[h][2], ALIGNED);
    attention_case(documents, 5, 4, 1, 128, UNALIGNED);
    expect_cudnn();
}

// ---- more than 2^31 elements: the last of them are right ------------------------------------------------------------
enum { PATTERN = 1 << 20, TAIL = 4096 };

// count elements of device memory, of which element i is pattern[i % PATTERN]; NULL where there is not enough.
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

// Elements [count - TAIL, count) of device memory against `expected`, each within two roundings.
static void expect_tail(const char *what, const void *device, size_t count, const void *expected) {
    const size_t size = dtype_size(gpu->stored);
    char *found = (char *)case_memory(TAIL * size);
    gpu->copy_out(found, (const char *)device + (count - TAIL) * size, TAIL * size);
    for (size_t i = 0; i < TAIL; i++) {
        double a = element_to_double(found, gpu->stored, i), b = element_to_double(expected, gpu->stored, i);
        if (!(fabs(a - b) <= SLACK * (rounding_error(gpu->stored) + 1e-5) * (fabs(b) + 1e-6)))
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
    test_case("%zu elements", count);
    char *pattern = (char *)random_pattern(size), *expected = (char *)case_memory(TAIL * size);
    char *row = pattern + (count - TAIL) % PATTERN * size; // PATTERN is a multiple of TAIL: the last row is whole
    x = repeated(pattern, count, size), out = x ? gpu->allocate(count * size) : NULL;
    if (!out) {
        if (x) gpu->release(x, count * size);
        test_skip("the device has not enough memory");
        return;
    }
    gpu->activation_forward((Stored *)out, (const Stored *)x, ACTIVATION_GELU, 1, count);
    cpu->activation_forward((Stored *)expected, (const Stored *)row, ACTIVATION_GELU, 1, TAIL);
    expect_tail("gelu", out, count, expected);

    void *w = repeated(pattern, PATTERN, size);
    const Norm norm = {1e-6, 0.0, NORM_RMS};
    gpu->norm_forward((Stored *)out, (const Stored *)x, (const Stored *)w, NULL, NULL, rows, TAIL, norm);
    cpu->norm_forward((Stored *)expected, (const Stored *)row, (const Stored *)pattern, NULL, NULL, 1, TAIL, norm);
    expect_tail("rmsnorm", out, count, expected);
    gpu->release(w, PATTERN * size);
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
                 1.0);
    memcpy(expected, row, TAIL * size);
    cpu->logprob((Summed *)&logp, NULL, (Stored *)expected, &target, (const Summed *)&weight, 1, TAIL, 1.0);
    expect_tail("logprob", x, count, expected);
    gpu->release(device_targets, rows * sizeof(int32_t));
    gpu->release(device_weight, rows * sizeof(float));
    gpu->release(device_logp, rows * sizeof(float));
    gpu->release(x, count * size);
}

int main(int argc, char **argv) {
    gpu = ops_device, cpu = ops_cpu_device;
    if (strcmp(gpu->name, "cuda") != 0 || gpu->stored != cpu->stored) return 1;
    RUN_LISTED(argc, argv, NULL);
}
