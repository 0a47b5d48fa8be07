/*
What every benchmark of the CPU is held against: the rate of one large product, by oneDNN or by us, whichever is faster
in the same run. This is op set "cpu" and one function more; bench.c links it, bench_ops.c includes it, so that it
can call what the table of ops does not name.
*/
#include "llmc/ops/cpu/ops_cpu.c"

#define PRODUCT_SIZE ((size_t)2048)

// Elements of a tensor, in [-0.5, 0.5); the caller releases them.
static floatX *bench_tensor(size_t count) {
    floatX *x = (floatX *)cpu_allocate(count * sizeof(floatX));
    if (!x) die("no memory for %zu elements", count);
    for (size_t i = 0; i < count; i++) x[i] = store((floatS)(i * 7919 % 1000) * (floatS)1e-3 - (floatS)0.5);
    return x;
}

// FLOP/s of [2048,2048] x [2048,2048] by `product`.
static double rate_of(void (*product)(void)) {
    const double begin = seconds_now();
    product();
    return 2.0 * (double)(PRODUCT_SIZE * PRODUCT_SIZE * PRODUCT_SIZE) / (seconds_now() - begin);
}

static void own_product(void) {
    static floatX *a, *b;
    static floatS *out;
    const size_t n = PRODUCT_SIZE;
    if (!out) {
        a = bench_tensor(n * n), b = bench_tensor(n * n);
        out = (floatS *)cpu_allocate(n * n * sizeof(floatS));
    }
    Product p = product_of("a benchmark", n, n, n, (Stored *)a, (Stored *)b, out);
    p.out_summed = 1;
    product_plain(&p);
}

#ifdef HAVE_ONEDNN
#include <dnnl.h>
static void onednn_product(void) {
    static float *x[3];
    const dnnl_dim_t n = (dnnl_dim_t)PRODUCT_SIZE;
    for (size_t i = 0; i < 3 && !x[2]; i++) {
        x[i] = (float *)cpu_allocate(PRODUCT_SIZE * PRODUCT_SIZE * sizeof(float));
        for (size_t j = 0; j < PRODUCT_SIZE * PRODUCT_SIZE; j++) x[i][j] = (float)(j % 1000) * 1e-3f - 0.5f;
    }
    if (dnnl_sgemm('N', 'N', n, n, n, 1, x[0], n, x[1], n, 0, x[2], n) != dnnl_success) die("oneDNN's product failed");
}
#endif

// The faster one's rate.
double product_rate(void);
double product_rate(void) {
    const double own = rate_of(own_product);
#if defined(HAVE_ONEDNN) && !defined(PRECISION_DOUBLE)
    const double theirs = rate_of(onednn_product);
    if (theirs > own) return theirs;
#endif
    return own;
}
