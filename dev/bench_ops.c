/*
Ratios of speed of op set "cpu", one op at a time, within one process: each repeat times a large product and the op in
turn; medians of the repeats' ratios are printed. Built by dev/bench.sh.

    bench_ops attention [REPEATS [HD]]   forward and backward of T tokens in chunks of 1024: share of the product's rate
    bench_ops head [REPEATS [V]]         the loss of a logits chunk over the head's three products
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
        b.scratch = sums(cpu_attention_scratch(b.chunk, c.NH, c.NKV, c.HD));
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
        const size_t counts[] = {c.T * c.NH, keys, keys, cpu_attention_scratch(b.chunk, c.NH, c.NKV, c.HD)};
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
        for (size_t t = 0; t < CHUNK; t++) target[t] = (int32_t)(t * 7919 % V), weight[t] = (floatS)1e-3;
        for (size_t r = 0; r <= repeats; r++) { // the first warms up
            double at[STEPS + 1];
            at[FORWARD] = seconds_now();
            cpu_linear_forward((Stored *)logits, (Stored *)x, (Stored *)matrix, NULL, NULL, CHUNK, C, V, V);
            at[LOSS] = seconds_now();
            cpu_logprob((Summed *)logp, NULL, (Stored *)logits, target, (Summed *)weight, CHUNK, V, V, 1);
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

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(size_t repeats, size_t only);
    } modes[] = {{"attention", bench_attention}, {"head", bench_head}};
    size_t repeats = 5, only = 0;
    if (argc > 2 && (!parse_size(argv[2], &repeats) || !repeats || repeats > MOST))
        die_usage("repeats are 1 to %d", MOST);
    if (argc > 3 && !parse_size(argv[3], &only)) die_usage("%s is not a number", argv[3]);
    for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++)
        if (!strcmp(argv[1], modes[i].name)) {
            modes[i].run(repeats, only);
            return 0;
        }
    die_usage("usage: bench_ops attention [REPEATS [HD]], bench_ops head [REPEATS [V]]");
}
