/*
The matrix product below the linear layers (and nothing else: attention has its own, small ones): one entry, which picks
between oneDNN (product_onednn.h) and plain C (product_plain.h). Deterministic for a given build, machine and thread count.
Call it outside of parallel regions.
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
#if defined(PRODUCT_ONEDNN)
    if (product_onednn(p)) return;
#endif
    product_plain(p);
}

#endif
