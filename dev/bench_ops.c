/*
Ratios of speed of op set "cpu", one op at a time, within one process: each repeat times a large product and the op in
turn; medians of the repeats' ratios are printed. Built by dev/bench.sh.

    bench_ops attention [REPEATS [HD]]   forward and backward of T tokens in chunks of 1024: share of the product's rate
    bench_ops head [REPEATS [V]]         the loss of a logits chunk over the head's three products
    bench_ops products [REPEATS [ROWS]]  products of linear layers: rate over the better of oneDNN's two ways
    bench_ops decode [REPEATS [TEXTS]]   a token of each text: share of the rate at which weights can be read
    bench_ops delta [REPEATS [HV]]       linear attention of a chunk: the delta rule, share of the product's rate; the
                                         rest, and a token of each of 16 texts, share of the rate of reading memory
    bench_ops dequantise [REPEATS [ROWS]] matrices in 4 bits, bytes read and written: share of the rate of a copy
    bench_ops experts [REPEATS [ROWS]]   products of 16 experts of about ROWS rows: processor time of one product of as
                                         many rows over theirs; of 128 experts, time of all over that of 8
    bench_ops adamw [REPEATS [COUNT]]    a step of COUNT elements: time by the type of moments over that with fp32
*/
#include "product_rate.c"

#define MOST 64

// ---- attention ------------------------------------------------------------------------------------------------------

typedef struct {
    size_t T, NH, NKV, HD, window;
} AttentionCase;

typedef struct {
    AttentionCase c;
    floatX *q, *k, *v, *out, *dout, *dq;
    floatS *lse, *dk, *dv, *scratch;
    size_t chunk;
} AttentionBench;

static AttentionShape chunk_shape(const AttentionBench *b, Span *span, size_t begin) {
    *span = (Span){0, begin, min_size(begin + b->chunk, b->c.T), 0};
    return (AttentionShape){.spans = {.span = span, .count = 1, .window = b->c.window},
                            .NH = b->c.NH,
                            .NKV = b->c.NKV,
                            .HD = b->c.HD,
                            .scale = 1 / sqrt((double)b->c.HD),
                            .keys = all_keys};
}

static double attention_pass(const AttentionBench *b, int backward) {
    const double begin = seconds_now();
    Span span;
    for (size_t i = 0, n = b->c.T / b->chunk; i < n; i++) {
        const size_t at = (backward ? n - 1 - i : i) * b->chunk, row = at * b->c.NH * b->c.HD;
        const AttentionShape shape = chunk_shape(b, &span, at);
        Summed *lse = (Summed *)(b->lse + at * b->c.NH), *scratch = (Summed *)b->scratch;
        const Stored *q = (Stored *)(b->q + row), *k = (Stored *)b->k, *v = (Stored *)b->v;
        if (backward)
            cpu_attention_backward(b->dq + row, (Summed *)b->dk, (Summed *)b->dv, (Stored *)(b->dout + row),
                                   (Stored *)(b->out + row), q, k, v, lse, &shape, scratch);
        else
            cpu_attention_forward(b->out + row, lse, q, k, v, &shape, scratch);
    }
    return seconds_now() - begin;
}

static floatS *sums(size_t count) {
    floatS *x = (floatS *)cpu_allocate(count * sizeof(floatS));
    if (!x) die("no memory for %zu sums", count);
    memset(x, 0, count * sizeof(floatS));
    return x;
}

static void bench_attention(size_t repeats, size_t only) {
    static const AttentionCase cases[] = {{2048, 16, 8, 64, 0},   {2048, 32, 8, 64, 0},    {2048, 16, 8, 80, 0},
                                          {2048, 16, 8, 96, 0},   {2048, 16, 8, 128, 0},   {2048, 32, 8, 128, 0},
                                          {2048, 16, 16, 128, 0}, {2048, 8, 4, 256, 0},    {4096, 8, 4, 256, 512},
                                          {16384, 8, 4, 64, 0},   {16384, 4, 2, 128, 0},   {16384, 4, 1, 128, 0},
                                          {16384, 4, 2, 256, 0},  {16384, 4, 2, 128, 1024}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const AttentionCase c = cases[i];
        if (only && c.HD != only) continue;
        const size_t rows = c.T * c.NH * c.HD, keys = c.T * c.NKV * c.HD;
        AttentionBench b = {.c = c, .chunk = 1024};
        double share[2][MOST];
        floatX **stored[] = {&b.q, &b.out, &b.dout, &b.dq, &b.k, &b.v};
        for (size_t j = 0; j < 6; j++) *stored[j] = bench_tensor(j < 4 ? rows : keys);
        b.lse = sums(c.T * c.NH), b.dk = sums(keys), b.dv = sums(keys);
        b.scratch = sums(cpu_attention_scratch(b.chunk, c.NH, c.NKV, c.HD, no_slots));
        const double pairs = query_key_pairs(0, c.T, c.window) * (double)c.NH * (double)c.HD;
        attention_pass(&b, 0), attention_pass(&b, 1); // warms up
        for (size_t r = 0; r < repeats; r++) {
            const double forward = attention_pass(&b, 0), rate = product_rate(), backward = attention_pass(&b, 1);
            share[0][r] = 4 * pairs / forward / rate, share[1][r] = 10 * pairs / backward / rate;
        }
        printf(
            "attention: T %5zu, heads %2zu / %2zu of %3zu, window %4zu: forward %.3f, backward %.3f of the product's "
            "rate\n",
            c.T, c.NH, c.NKV, c.HD, c.window, median(share[0], repeats), median(share[1], repeats));
        fflush(stdout);
        for (size_t j = 0; j < 6; j++) cpu_release(*stored[j], (j < 4 ? rows : keys) * sizeof(floatX));
        floatS *summed[] = {b.lse, b.dk, b.dv, b.scratch};
        const size_t counts[] = {c.T * c.NH, keys, keys, cpu_attention_scratch(b.chunk, c.NH, c.NKV, c.HD, no_slots)};
        for (size_t j = 0; j < 4; j++) cpu_release(summed[j], counts[j] * sizeof(floatS));
    }
}

// ---- the head and the loss ------------------------------------------------------------------------------------------

static void bench_head(size_t repeats, size_t only) {
    static const size_t words[] = {32000, 151936, 262144}, C = 1024;
    enum { CHUNK = 512, FORWARD = 0, LOSS, WEIGHT, INPUT, STEPS };
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        const size_t V = words[i];
        if (only && V != only) continue;
        floatX *matrix = bench_tensor(V * C), *x = bench_tensor(CHUNK * C), *logits = bench_tensor(CHUNK * V);
        floatS *dmatrix = sums(V * C), *logp = sums(CHUNK), *weight = sums(CHUNK);
        int32_t target[CHUNK];
        double loss[MOST], share[MOST];
        const Temperature one = {1, 0};
        for (size_t t = 0; t < CHUNK; t++) target[t] = (int32_t)(t * 7919 % V), weight[t] = (floatS)1e-3;
        for (size_t r = 0; r <= repeats; r++) { // the first warms up
            double at[STEPS + 1];
            at[FORWARD] = seconds_now();
            cpu_linear_forward((Stored *)logits, (Stored *)x, (Stored *)matrix, NULL, NULL, CHUNK, C, V, V);
            at[LOSS] = seconds_now();
            cpu_logprob((Summed *)logp, NULL, (Stored *)logits, target, (Summed *)weight, CHUNK, V, V, one);
            at[WEIGHT] = seconds_now();
            cpu_linear_backward_weight((Summed *)dmatrix, NULL, (Stored *)logits, (Stored *)x, CHUNK, C, V, V);
            at[INPUT] = seconds_now();
            cpu_linear_backward_input((Stored *)x, (Stored *)logits, (Stored *)matrix, CHUNK, C, V, V, 0);
            at[STEPS] = seconds_now();
            const double all = at[STEPS] - at[FORWARD], of_loss = at[WEIGHT] - at[LOSS];
            if (r) loss[r - 1] = of_loss / (all - of_loss);
            if (r) share[r - 1] = 6.0 * (double)(CHUNK * C * V) / all / product_rate();
        }
        printf("head: %6zu words: loss %.3f of its products' time, all together %.3f of the product's rate\n", V,
               median(loss, repeats), median(share, repeats));
        cpu_release(matrix, V * C * sizeof(floatX)), cpu_release(logits, CHUNK * V * sizeof(floatX));
        cpu_release(x, CHUNK * C * sizeof(floatX)), cpu_release(dmatrix, V * C * sizeof(floatS));
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

#ifdef PRODUCT_ONEDNN
typedef enum { BY_OP, BY_US, BY_MATMUL, BY_SGEMM, WAYS } Way;

static double product_seconds(const Product *p, Way way) {
    const double begin = seconds_now();
    switch (way) {
    case BY_OP: matrix_product(p); break;
    case BY_US: product_plain(p); break;
    case BY_MATMUL:
        if (!onednn_matmul(p)) return INFINITY;
        break;
    default:
        if (sizeof(floatX) != sizeof(float)) return INFINITY;
        dnnl_sgemm(p->a_transposed ? 'T' : 'N', p->b_transposed ? 'T' : 'N', (dnnl_dim_t)p->m, (dnnl_dim_t)p->n,
                   (dnnl_dim_t)p->k, 1, (const float *)p->a, (dnnl_dim_t)a_stride(p), (const float *)p->b,
                   (dnnl_dim_t)(p->b_transposed ? p->k : p->n), (float)p->accumulate, (float *)p->out,
                   (dnnl_dim_t)p->n);
    }
    return seconds_now() - begin;
}

static void bench_products(size_t repeats, size_t only) {
    static const size_t rows[] = {64, 256, 1024, 2048},
                        widths[][2] = {{1024, 2048},  {1024, 3072}, {3072, 1024}, {4096, 4096},
                                       {4096, 12288}, {768, 3072},  {1024, 16},   {16, 2048}};
    static const char *const names[] = {"forward", "backward input", "backward weight"};
    onednn_serves();
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]) * (sizeof(widths) / sizeof(widths[0])); i++) {
        const size_t n = rows[i % 4], C = widths[i / 4][0], OC = widths[i / 4][1];
        if (only && n != only) continue;
        floatX *x = bench_tensor(n * C), *weight = bench_tensor(C * OC), *dout = bench_tensor(n * OC);
        floatS *out = sums(n * max_size(C, OC)), *dweight = sums(C * OC);
        Product p[] = {product_of("bench", n, OC, C, (Stored *)x, (Stored *)weight, out),
                       product_of("bench", n, C, OC, (Stored *)dout, (Stored *)weight, out),
                       product_of("bench", OC, C, n, (Stored *)dout, (Stored *)x, dweight)};
        p[0].b_transposed = 1, p[2].a_transposed = p[2].out_summed = p[2].accumulate = 1;
        printf("products: %4zu rows, %5zu to %5zu:", n, C, OC);
        for (size_t kind = 0; kind < 3; kind++) {
            double served[MOST], ours[MOST];
            for (size_t r = 0; r <= repeats; r++) { // the first warms up
                double seconds[WAYS];
                for (Way way = BY_OP; way < WAYS; way++) seconds[way] = product_seconds(&p[kind], way);
                const double best = fmin(seconds[BY_MATMUL], seconds[BY_SGEMM]);
                if (r) served[r - 1] = best / seconds[BY_OP], ours[r - 1] = best / seconds[BY_US];
            }
            printf("%s %s %.2f (plain C %.2f)", kind ? "," : "", names[kind], median(served, repeats),
                   median(ours, repeats));
        }
        printf("\n");
        fflush(stdout);
        cpu_release(x, n * C * sizeof(floatX)), cpu_release(weight, C * OC * sizeof(floatX));
        cpu_release(dout, n * OC * sizeof(floatX)), cpu_release(dweight, C * OC * sizeof(floatS));
        cpu_release(out, n * max_size(C, OC) * sizeof(floatS));
    }
}
#else
static void bench_products(size_t repeats, size_t only) {
    (void)repeats, (void)only;
    die_usage("products are held against oneDNN, which this build has not");
}
#endif

// Seconds to read `count` elements, by all threads, and to add them.
static double reading_seconds(const floatX *x, size_t count) {
    enum { PIECE = 1 << 16 };
    static volatile floatS total_seen; // so that no compiler leaves the reading out
    const double begin = seconds_now();
    floatS total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (size_t i = 0; i < count / PIECE; i++) {
        Vector sum[8] = {{0}};
        for (size_t j = 0; j < PIECE; j += 8 * VECTOR_LANES)
            for (size_t v = 0; v < 8; v++) sum[v] += vector_load_stored(x + i * PIECE + j + v * VECTOR_LANES);
        for (size_t v = 1; v < 8; v++) sum[0] += sum[v];
        total += vector_sum_across(sum[0]);
    }
    total_seen = total;
    (void)total_seen;
    return seconds_now() - begin;
}

// Products of n rows with weights that fit no cache: as floats, and in 4 bits
static void bench_decode(size_t repeats, size_t only) {
    enum { C = 2048, OC = 6144, MATRICES = 8, TEXTS = 64, ELEMENTS = C * OC };
    static const QuantFormat f = {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_BF16, {0}};
    const size_t bytes = quant_parts(f, ELEMENTS).bytes;
    floatX *weights = bench_tensor((size_t)ELEMENTS * MATRICES), *x = bench_tensor(TEXTS * C);
    floatX *out = bench_tensor(TEXTS * OC), *decoded = bench_tensor(ELEMENTS);
    uint8_t *records = (uint8_t *)cpu_allocate(bytes * MATRICES);
    float *values = (float *)checked_malloc(ELEMENTS * sizeof(float), "a matrix");
    for (size_t i = 0; i < MATRICES; i++) {
        for (size_t j = 0; j < ELEMENTS; j++) values[j] = (float)load(weights[i * ELEMENTS + j]);
        quant_encode(records + i * bytes, f, values, ELEMENTS);
    }
    for (size_t n = 1; n <= TEXTS; n *= 2) {
        double share[MOST], bound[MOST], decoding[MOST], fused[MOST];
        if (only && n != only) continue;
        for (size_t r = 0; r < repeats; r++) {
            const double reading = reading_seconds(weights, (size_t)ELEMENTS * MATRICES), begin = seconds_now();
            for (size_t i = 0; i < MATRICES; i++)
                cpu_linear_forward((Stored *)out, (Stored *)x, (Stored *)(weights + i * ELEMENTS), NULL, NULL, n, C, OC,
                                   OC);
            const double floats = seconds_now();
            for (size_t i = 0; i < MATRICES; i++) {
                cpu_dequantise((Stored *)decoded, records + i * bytes, &f, ELEMENTS);
                cpu_linear_forward((Stored *)out, (Stored *)x, (Stored *)decoded, NULL, NULL, n, C, OC, OC);
            }
            const double both = seconds_now();
            for (size_t i = 0; i < MATRICES; i++)
                cpu_linear_forward_quantised((Stored *)out, (Stored *)x, records + i * bytes, &f, OC, 0, NULL, NULL, n,
                                             C, OC, OC);
            const double end = seconds_now();
            const double multiplying = 2.0 * (double)n * ELEMENTS * MATRICES / product_rate();
            share[r] = reading / (floats - begin), bound[r] = fmax(reading, multiplying) / (floats - begin);
            decoding[r] = (both - floats) / (floats - begin), fused[r] = (end - both) / (floats - begin);
        }
        printf("decode: %2zu texts: %.2f of the rate at which weights can be read, %.2f of what binds (reading, or the "
               "product's rate); weights in 4 bits: decoded first %.2f times as long, by linear_forward_quantised %.2f "
               "times\n",
               n, median(share, repeats), median(bound, repeats), median(decoding, repeats), median(fused, repeats));
        fflush(stdout);
    }
    free(values);
}

// ---- linear attention -----------------------------------------------------------------------------------------------

enum { DELTA_CHUNK = 1024, DELTA_TEXTS = 16 };

typedef struct {
    DeltaShape shape;
    Span span, texts[DELTA_TEXTS];
    floatX *x, *projected, *out, *dout, *dx, *dprojected, *gates, *columns;
    floatS *state, *dstate, *parameters, *scratch;
    size_t scratch_size;
} DeltaBench;

typedef enum {
    RULE,
    RULE_STATE,
    RULE_BACK,
    RULE_STATE_BACK,
    STEPS_OF_TEXTS,
    CONV,
    CONV_BACK,
    NORM,
    NORM_BACK,
    DELTA_OPS
} DeltaOp;

static void delta_op(const DeltaBench *b, DeltaOp op) {
    const DeltaShape *s = &b->shape;
    DeltaShape texts = *s;
    texts.spans = (Spans){.span = b->texts, .count = DELTA_TEXTS}, texts.slot_tokens = 2;
    Stored *out = (Stored *)b->out, *dx = (Stored *)b->dx, *x = (Stored *)b->x, *dout = (Stored *)b->dout;
    Stored *beta = (Stored *)(b->projected + delta_channels(s) + s->HV * s->V), *a = (Stored *)((floatX *)beta + s->HV);
    Stored *dbeta = (Stored *)(b->dprojected + delta_channels(s)), *da = (Stored *)((floatX *)dbeta + s->HV);
    Stored *A = (Stored *)b->gates, *weight = (Stored *)b->gates, *z = (Stored *)(b->projected + delta_channels(s));
    Summed *state = (Summed *)b->state, *dstate = (Summed *)b->dstate, *sums = (Summed *)b->parameters;
    Summed *scratch = (Summed *)b->scratch;
    const size_t n = delta_rows(s);
    switch (op) {
    case RULE: cpu_delta_forward(out, state, NULL, x, beta, a, A, A, s, scratch); break;
    case RULE_STATE: cpu_delta_forward(NULL, state, NULL, x, beta, a, A, A, s, scratch); break;
    case RULE_BACK:
        cpu_delta_backward(dx, dbeta, da, sums, sums, dstate, dout, x, beta, a, A, A, state, s, scratch);
        break;
    case RULE_STATE_BACK:
        cpu_delta_backward(NULL, NULL, NULL, NULL, NULL, dstate, dout, x, beta, a, A, A, NULL, s, scratch);
        break;
    case STEPS_OF_TEXTS: cpu_delta_forward(out, state, NULL, x, beta, a, A, A, &texts, scratch); break;
    case CONV: cpu_conv_forward(x, (Stored *)b->columns, (Stored *)b->projected, weight, NULL, s); break;
    case CONV_BACK:
        cpu_conv_backward((Stored *)b->dprojected, sums, NULL, dstate, dx, (Stored *)b->projected, (Stored *)b->columns,
                          weight, NULL, s, scratch);
        break;
    case NORM: cpu_gated_norm_forward(dout, out, z, weight, n, s->HV, s->V, s->stride, 0, 1e-6); break;
    default:
        cpu_gated_norm_backward(dout, (Stored *)b->dprojected, sums, dout, out, z, weight, n, s->HV, s->V, s->stride, 0,
                                1e-6, scratch);
    }
}

// Of an op: its FLOPs, or the bytes that it reads and writes where these are what it costs
static double delta_work(const DeltaBench *b, DeltaOp op, int *moves) {
    static const DeltaWork work[] = {DELTA_FORWARD, DELTA_STATE, DELTA_BACKWARD, DELTA_STATE_BACKWARD};
    const DeltaShape *s = &b->shape;
    const double n = (double)delta_rows(s), W = (double)delta_channels(s), V = (double)(s->HV * s->V);
    *moves = op >= STEPS_OF_TEXTS;
    switch (op) {
    case STEPS_OF_TEXTS: return 2.0 * DELTA_TEXTS * (double)(delta_state_elements(s) * sizeof(floatS));
    case CONV: return 2 * n * W * sizeof(floatX);
    case CONV_BACK: return 3 * n * W * sizeof(floatX);
    case NORM: return 3 * n * V * sizeof(floatX);
    case NORM_BACK: return 5 * n * V * sizeof(floatX);
    default: return n * delta_flops(s, work[op]);
    }
}

static void bench_delta(size_t repeats, size_t only) {
    static const size_t heads[][2] = {{16, 16}, {16, 32}, {16, 48}};
    static const char *const names[] = {
        "forward",     "state alone",  "backward",   "dstate alone", "a token of each of 16 texts",
        "convolution", "its backward", "gated norm", "its backward"};
    enum { READ = 1 << 26 };
    floatX *memory = bench_tensor(READ);
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        DeltaBench b = {.shape = {.HK = heads[i][0], .HV = heads[i][1], .K = 128, .V = 128, .taps = 4},
                        .span = {0, DELTA_CHUNK, 2 * DELTA_CHUNK, 0}};
        if (only && b.shape.HV != only) continue;
        const size_t n = DELTA_CHUNK, W = delta_channels(&b.shape), V = b.shape.HV * b.shape.V;
        b.shape.spans = (Spans){.span = &b.span, .count = 1};
        b.shape.stride = W + V + 2 * b.shape.HV;
        for (size_t j = 0; j < DELTA_TEXTS; j++) b.texts[j] = (Span){2 * j, 2 * j + 1, 2 * j + 2, j};
        b.scratch_size = max_size(cpu_delta_backward_scratch(&b.shape), cpu_conv_backward_scratch(&b.shape, 0));
        b.scratch_size = max_size(b.scratch_size, cpu_delta_forward_scratch(&b.shape));
        b.scratch_size = max_size(b.scratch_size, cpu_gated_norm_backward_scratch(n, b.shape.HV, b.shape.V, 0));
        floatX **const tensors[] = {&b.x, &b.projected, &b.out, &b.dout, &b.dx, &b.dprojected, &b.gates, &b.columns};
        const size_t sizes[] = {n * W, n * b.shape.stride, n * V, n * V, n * W, n * b.shape.stride, 4 * W, 3 * W};
        for (size_t j = 0; j < 8; j++) *tensors[j] = bench_tensor(sizes[j]);
        floatS **const summed[] = {&b.state, &b.dstate, &b.parameters, &b.scratch};
        const size_t state = delta_state_elements(&b.shape),
                     counts[] = {DELTA_TEXTS * state, state, 4 * W, b.scratch_size};
        for (size_t j = 0; j < 4; j++) *summed[j] = sums(counts[j]);
        double share[DELTA_OPS][MOST];
        for (size_t r = 0; r <= repeats; r++) { // the first warms up
            const double rate = product_rate(), bytes = READ * sizeof(floatX) / reading_seconds(memory, READ);
            for (DeltaOp op = RULE; op < DELTA_OPS; op++) {
                int moves;
                const double work = delta_work(&b, op, &moves), begin = seconds_now();
                delta_op(&b, op);
                if (r) share[op][r - 1] = work / (seconds_now() - begin) / (moves ? bytes : rate);
            }
        }
        printf("delta: heads %zu / %zu of 128:", b.shape.HK, b.shape.HV);
        for (DeltaOp op = RULE; op < DELTA_OPS; op++)
            printf("%s %s %.3f%s", op ? "," : "", names[op], median(share[op], repeats),
                   op + 1 == STEPS_OF_TEXTS ? " of the product's rate"
                   : op + 1 == DELTA_OPS    ? " of memory's\n"
                                            : "");
        fflush(stdout);
        for (size_t j = 0; j < 8; j++) cpu_release(*tensors[j], sizes[j] * sizeof(floatX));
        for (size_t j = 0; j < 4; j++) cpu_release(*summed[j], counts[j] * sizeof(floatS));
    }
    cpu_release(memory, READ * sizeof(floatX));
}

// ---- matrices in 4 bits ---------------------------------------------------------------------------------------------

// Seconds to copy `bytes` by all threads, as the C library copies.
static double copying_seconds(void *out, const void *in, size_t bytes) {
    enum { PIECE = 1 << 18 };
    const double begin = seconds_now();
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < bytes; i += PIECE) memcpy((char *)out + i, (const char *)in + i, min_size(PIECE, bytes - i));
    return seconds_now() - begin;
}

static void bench_dequantise(size_t repeats, size_t only) {
    static const size_t shapes[][2] = {{1024, 1024}, {3072, 1024}, {4096, 4096}, {12288, 4096}};
    static const QuantFormat formats[] = {{QUANT_NF4, 1, 64, DTYPE_BF16, {0}},
                                          {QUANT_NF4, 1, 64, DTYPE_FP16, {0}},
                                          {QUANT_FP4, 0, 64, DTYPE_FP32, {0}},
                                          {QUANT_NF4, 0, 32, DTYPE_BF16, {0}},
                                          {QUANT_MXFP4, 0, 32, DTYPE_BF16, {0}}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) * 5; i++) {
        const size_t rows = shapes[i / 5][0], n = rows * shapes[i / 5][1];
        const QuantFormat f = formats[i % 5];
        const QuantParts p = quant_parts(f, n);
        if (only && rows != only) continue;
        floatX *out = bench_tensor(n), *in = bench_tensor(n);
        uint8_t *record = (uint8_t *)cpu_allocate(p.bytes);
        float *x = (float *)checked_malloc(n * sizeof(float), "a matrix");
        double share[MOST], encoding = INFINITY, decoding = INFINITY;
        for (size_t j = 0; j < n; j++) x[j] = (float)load(in[j]);
        for (size_t r = 0; r <= repeats; r++) { // the first warms up
            const double copying = copying_seconds(out, in, n * sizeof(floatX)), begin = seconds_now();
            cpu_dequantise((Stored *)out, record, &f, n);
            const double seconds = seconds_now() - begin, encode = seconds_now();
            if (r < 2) quant_encode(record, f, x, n);
            if (r < 2) encoding = fmin(encoding, seconds_now() - encode);
            if (r)
                share[r - 1] =
                    (double)(n * sizeof(floatX) + p.bytes) / seconds * copying / (double)(2 * n * sizeof(floatX));
            if (r) decoding = fmin(decoding, seconds);
        }
        printf("dequantise: %5zu x %4zu, %s%s, blocks of %zu, rounded to %s: %.2f of a copy's rate (%.2f G/s, encoded "
               "%.2f G/s)\n",
               rows, n / rows, quant_type_names[f.type], f.nested ? " nested" : "", f.block, dtype_name(f.rounding),
               median(share, repeats), (double)n / decoding * 1e-9, (double)n / encoding * 1e-9);
        fflush(stdout);
        free(x);
        cpu_release(out, n * sizeof(floatX)), cpu_release(in, n * sizeof(floatX)), cpu_release(record, p.bytes);
    }
}

// ---- the optimizer --------------------------------------------------------------------------------------------------
static void bench_adamw(size_t repeats, size_t only) {
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_INT8};
    const size_t n = only ? only : (size_t)1 << 24, blocks = (n + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    floatX *w = bench_tensor(n), *gradient = bench_tensor(n);
    float *master = sizeof(floatX) < sizeof(float) ? (float *)(void *)sums(n) : NULL;
    floatS *m = sums(n), *v = sums(n), *m_scales = sums(blocks), *v_scales = sums(blocks);
    AdamW step = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 1, 1, 0, 0, (float *)(void *)m_scales, (float *)(void *)v_scales};
    double seconds[3], share[3][MOST];
    for (int type = 0; type < 3; type++) {
        memset(m, 0, n * sizeof(floatS)), memset(v, 0, n * sizeof(floatS));
        memset(m_scales, 0, blocks * sizeof(floatS)), memset(v_scales, 0, blocks * sizeof(floatS));
        for (size_t r = 0; r <= repeats; r++, step.step++) { // the first warms up
            const double begin = seconds_now();
            cpu_adamw((Stored *)w, master, gradient, FLOATX_DTYPE, m, v, types[type], n, &step);
            if (r) share[type][r - 1] = seconds_now() - begin;
        }
        seconds[type] = median(share[type], repeats);
    }
    printf("adamw: %zu elements, moments in fp32 %.2f ns an element; time with bf16 %.3f, int8 %.3f of that\n", n,
           1e9 * seconds[0] / (double)n, seconds[1] / seconds[0], seconds[2] / seconds[0]);
    cpu_release(w, n * sizeof(floatX)), cpu_release(gradient, n * sizeof(floatX));
    if (master) cpu_release(master, n * sizeof(floatS));
    cpu_release(m, n * sizeof(floatS)), cpu_release(v, n * sizeof(floatS));
    cpu_release(m_scales, blocks * sizeof(floatS)), cpu_release(v_scales, blocks * sizeof(floatS));
}

// ---- experts --------------------------------------------------------------------------------------------------------
static double processor_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct {
    size_t E, C, OC;
    floatX *x, *weight, *out; // [rows,C], [E,OC,C], [rows,OC]
    floatS *dweight;          // [E,OC,C]
    uint8_t *record;          // of weight
} ExpertsBench;

typedef enum { EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT, EXPERTS_QUANTISED } ExpertsOp;
static const QuantFormat experts_format = {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_BF16, {0}};

static double experts_seconds(const ExpertsBench *b, ExpertsOp op, const int32_t *first, size_t E) {
    const size_t rows = (size_t)first[E];
    const double begin = processor_seconds();
    Stored *x = (Stored *)b->x, *weight = (Stored *)b->weight, *out = (Stored *)b->out;
    if (op == EXPERTS_FORWARD) cpu_experts_forward(out, x, weight, first, rows, E, b->C, b->OC, 0);
    if (op == EXPERTS_INPUT) cpu_experts_backward_input(x, out, weight, first, rows, E, b->C, b->OC, 0);
    if (op == EXPERTS_WEIGHT) cpu_experts_backward_weight((Summed *)b->dweight, out, x, first, rows, E, b->C, b->OC);
    if (op == EXPERTS_QUANTISED)
        cpu_experts_forward_quantised(out, x, b->record, &experts_format, first, rows, E, b->C, b->OC);
    return processor_seconds() - begin;
}

// One product of as many rows, by the op of a linear layer
static double dense_seconds(const ExpertsBench *b, ExpertsOp op, size_t rows) {
    const double begin = processor_seconds();
    Stored *x = (Stored *)b->x, *weight = (Stored *)b->weight, *out = (Stored *)b->out;
    if (op == EXPERTS_FORWARD) cpu_linear_forward(out, x, weight, NULL, NULL, rows, b->C, b->OC, b->OC);
    if (op == EXPERTS_INPUT) cpu_linear_backward_input(x, out, weight, rows, b->C, b->OC, b->OC, 0);
    if (op == EXPERTS_WEIGHT) cpu_linear_backward_weight((Summed *)b->dweight, NULL, out, x, rows, b->C, b->OC, b->OC);
    return processor_seconds() - begin;
}

// first[E + 1]: E experts of half to one and a half times `rows`, other ones in each repeat
static void uneven_rows(int32_t *first, size_t rows, size_t E, size_t repeat) {
    first[0] = 0;
    for (size_t e = 0; e < E; e++) {
        const size_t share =
            e % 2 ? 2 * rows - (size_t)(first[e] - first[e - 1]) : rows / 2 + random_below(1, repeat, e, rows + 1);
        first[e + 1] = first[e] + (int32_t)share;
    }
}

static void bench_experts(size_t repeats, size_t only) {
    static const char *const names[] = {"forward", "backward input", "backward weight", "forward in nf4"};
    static const size_t sizes[][2] = {{2048, 1536}, {768, 2048}}, means[] = {16, 64, 256};
    enum { E = 16, ALL = 128, USED = 8 };
    for (size_t i = 0; i < 2; i++) {
        ExpertsBench b = {.E = ALL, .C = sizes[i][0], .OC = sizes[i][1]};
        const size_t count = b.E * b.C * b.OC, most = E * 256;
        b.x = bench_tensor(most * b.C), b.out = bench_tensor(most * b.OC), b.weight = bench_tensor(count);
        b.dweight = sums(E * b.C * b.OC);
        for (size_t m = 0; m < 3; m++)
            for (ExpertsOp op = EXPERTS_FORWARD; op <= EXPERTS_WEIGHT && (!only || only == means[m]); op++) {
                double ratio[MOST];
                for (size_t r = 0; r <= repeats; r++) {
                    int32_t first[E + 1];
                    uneven_rows(first, means[m], E, r);
                    const double dense = dense_seconds(&b, op, (size_t)first[E]);
                    ratio[r ? r - 1 : 0] = dense / experts_seconds(&b, op, first, E);
                }
                printf("%4zu x %4zu %-16s %3zu rows of each of 16: %.2f\n", b.C, b.OC, names[op], means[m],
                       median(ratio, repeats));
            }
        b.record = (uint8_t *)cpu_allocate(quant_parts(experts_format, count).bytes);
        memset(b.record, 0x3c, quant_parts(experts_format, count).bytes);
        for (ExpertsOp op = EXPERTS_FORWARD; op <= EXPERTS_QUANTISED && !only; op += EXPERTS_QUANTISED) {
            double ratio[MOST];
            for (size_t r = 0; r <= repeats; r++) {
                int32_t few[ALL + 1] = {0}, all[ALL + 1] = {0};
                for (size_t e = 0; e < ALL; e++)
                    all[e + 1] = (int32_t)e + 1, few[e + 1] = few[e] + (e % (ALL / USED) == r % 16);
                const double used = experts_seconds(&b, op, few, ALL);
                ratio[r ? r - 1 : 0] = experts_seconds(&b, op, all, ALL) / used;
            }
            printf("%4zu x %4zu %-16s a row of each of 8 of 128: %.1f times as fast as of 128\n", b.C, b.OC, names[op],
                   median(ratio, repeats));
        }
        cpu_release(b.x, most * b.C * sizeof(floatX)), cpu_release(b.out, most * b.OC * sizeof(floatX));
        cpu_release(b.weight, count * sizeof(floatX)), cpu_release(b.dweight, E * b.C * b.OC * sizeof(floatS));
        cpu_release(b.record, quant_parts(experts_format, count).bytes);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(size_t repeats, size_t only);
    } modes[] = {{"attention", bench_attention}, {"head", bench_head},   {"products", bench_products},
                 {"decode", bench_decode},       {"delta", bench_delta}, {"dequantise", bench_dequantise},
                 {"experts", bench_experts},     {"adamw", bench_adamw}};
    size_t repeats = 5, only = 0;
    if (argc > 2 && (!parse_size(argv[2], &repeats) || !repeats || repeats > MOST))
        die_usage("repeats are 1 to %d", MOST);
    if (argc > 3 && !parse_size(argv[3], &only)) die_usage("%s is not a number", argv[3]);
    for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++)
        if (!strcmp(argv[1], modes[i].name)) {
            modes[i].run(repeats, only);
            return 0;
        }
    die_usage("usage: bench_ops attention|head|products|decode|delta|dequantise|experts|adamw [REPEATS "
              "[HD|V|ROWS|TEXTS|HV|COUNT]]");
}
