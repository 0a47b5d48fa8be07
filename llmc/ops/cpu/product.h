/*
The matrix product of the linear layers: picks between oneDNN (product_onednn.h) and plain C (product_plain.h).
Deterministic for a given build, machine and thread count. Call it outside of parallel regions.

Measured rates (AVX-512 server core with AVX512-BF16 but no AMX; one thread; oneDNN 2.6), as shares of oneDNN's own fp32
product of 2048 x 2048 x 2048, for 256 to 1024 rows of widths 256 to 6144:

    fp32  forward         matmul primitive 0.97 - 1.14, also with bias and residual fused; dnnl_sgemm 0.9 - 1.1
          backward input  dnnl_sgemm 1.00 - 1.17; matmul primitive 0.44 - 1.1: it copies b only at some row lengths
          backward weight dnnl_sgemm 1.02 - 1.15; matmul primitive 0.46 - 1.1, likewise
          plain C         0.8 - 1.05 in all three
    bf16  matmul primitive 0.57: this core's AVX512-BF16 dot product has half the rate of fp32; plain C, which converts
          while it packs, 0.85 - 1.0. With AMX, or AVX512-BF16 on other makes of processors, oneDNN serves: by AMX
          forward 5.0 - 5.8 times its fp32 rate, backward input 3.7 - 4.7, backward weight 2.9 - 3.3.

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

static void matrix_product(const Product *p) {
    if (!p->m || !p->n) return;
    if (p->m <= MOST_STREAMED_ROWS && !p->a_transposed) {
        product_streamed(p);
        return;
    }
#if defined(PRODUCT_ONEDNN) // whose call takes longer than a small product
    if (!product_is_small(p) && product_onednn(p)) return;
#endif
    product_plain(p);
}

#endif
