/*
The matrix product of the linear layers: picks between oneDNN (product_onednn.h) and plain C (product_plain.h).
Deterministic for a given build, machine and thread count. Call it outside of parallel regions.

Measured rates (AVX-512 server core with AVX512-BF16 but no AMX; one thread; oneDNN 2.6), as shares of oneDNN's own fp32
product of 2048 x 2048 x 2048, for 256 to 1024 rows of widths 256 to 6144:

    fp32  forward         matmul primitive 0.97 - 1.14, also with bias and residual fused; dnnl_sgemm 0.9 - 1.1
          backward input  dnnl_sgemm 1.00 - 1.17; matmul primitive 0.44 - 1.1: it copies b only at some row lengths
          backward weight dnnl_sgemm 1.02 - 1.15; matmul primitive 0.46 - 1.1, likewise
          plain C         (2 threads) of the faster of the two: 256 to 1024 rows 0.94 - 1.0; 64 rows forward 1.06,
                          backward input 1.28, backward weight 1.0; rank 16 0.55 - 1.0. Held to AVX2: 256 rows 0.93 -
                          1.1, 1024 rows 0.90 - 0.99, 64 rows 0.85 - 0.95, rank 16 0.5 - 0.7. On a processor that has
                          only AVX2, an older, slower plain product had 1.03 - 1.6; today's was not timed there.
    bf16  matmul primitive 0.57: this core's AVX512-BF16 dot product has half the rate of fp32; plain C, which converts
          while it packs, 0.85 - 1.0. With AMX, or AVX512-BF16 on other makes of processors, oneDNN serves: by AMX
          forward about 5 times its fp32 rate, backward input 4, backward weight 3 (separate runs).

Rejected: inner product primitives (copies as large as the result in bf16), swapped roles (a transposed destination is
left to reference code), explicit transposition first (no faster than packing).
*/
#ifndef LLMC_CPU_PRODUCT_H
#define LLMC_CPU_PRODUCT_H
#include "product_plain.h"
#if defined(HAVE_ONEDNN) && !defined(PRECISION_DOUBLE) // oneDNN's CPU engine has no float64
#define PRODUCT_ONEDNN
#include "product_onednn.h"
#endif

// Returns whether oneDNN takes the product. Chooses by vectors and shape, not by timing, which would change digits from
// run to run.
static int onednn_is_better(const Product *p) {
    if (product_is_small(p)) return 0; // oneDNN's call takes longer than the product
#if defined(PRECISION_BF16)
    return 1;
#elif VECTOR_BYTES == 64
    return p->m > 64 || p->a_transposed;
#elif VECTOR_BYTES == 32
    return p->n <= FEW_COLUMNS || p->k <= FEW_COLUMNS || p->m <= FEW_COLUMNS;
#else
    return 1;
#endif
}

static void matrix_product(const Product *p) {
    if (!p->m || !p->n || (!p->k && p->accumulate)) return;
    if (product_streamed(p)) return;
#if defined(PRODUCT_ONEDNN)
    if (onednn_is_better(p) && product_onednn(p)) return;
#endif
    product_plain(p);
}

#endif
