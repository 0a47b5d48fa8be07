/*
Latent attention: keys and values of heads from one product of the latents and the part of the keys that all heads
share, and the gradients back.
*/
#ifndef LLMC_CPU_LATENT_H
#define LLMC_CPU_LATENT_H
#include "llmc/ops/ops.h"
#include "elements.h"

static void cpu_latent_trim(Stored *wide, Stored *narrow, size_t n, size_t heads, size_t HD, size_t VD, int back) {
    const size_t bytes = VD * sizeof(floatX);
#pragma omp parallel for schedule(static) if (n * heads * HD >= PARALLEL_MIN)
    for (size_t i = 0; i < n * heads; i++) {
        floatX *padded = (floatX *)wide + i * HD, *own = (floatX *)narrow + i * VD;
        memcpy(back ? padded : own, back ? own : padded, bytes);
        if (back) memset(padded + VD, 0, (HD - VD) * sizeof(floatX));
    }
}

static void cpu_latent_expand(Stored *k, Stored *v, const Stored *kv, const Stored *shared, size_t n, size_t heads,
                              size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R, row = own + VD, size = sizeof(floatX);
#pragma omp parallel for schedule(static) if (n * heads * HD >= PARALLEL_MIN)
    for (size_t i = 0; i < n * heads; i++) {
        floatX *key = (floatX *)k + i * HD;
        const floatX *both = (const floatX *)kv + i * row;
        memcpy(key, both, own * size);
        memcpy(key + own, (const floatX *)shared + i / heads * R, R * size);
        memcpy((floatX *)v + i * HD, both + own, VD * size);
        memset((floatX *)v + i * HD + VD, 0, (HD - VD) * size);
    }
}

static void cpu_latent_fold(Stored *dkv, Summed *dshared, const Summed *dk, const Summed *dv, size_t n, size_t heads,
                            size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R, row = own + VD;
#pragma omp parallel for schedule(static) if (n * heads * HD >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatS *sum = (floatS *)dshared + t * R;
        for (size_t i = t * heads; i < (t + 1) * heads; i++) {
            floatX *both = (floatX *)dkv + i * row;
            const floatS *key = (const floatS *)dk + i * HD, *value = (const floatS *)dv + i * HD;
            for (size_t j = 0; j < own; j++) both[j] = store(key[j]);
            for (size_t j = 0; j < R; j++) sum[j] += key[own + j];
            for (size_t j = 0; j < VD; j++) both[own + j] = store(value[j]);
        }
    }
}

static void cpu_sums_add(Summed *sums_, const Stored *in_, size_t count) {
    floatS *sums = (floatS *)sums_;
    const floatX *in = (const floatX *)in_;
#pragma omp parallel for simd schedule(static) if (parallel : count >= PARALLEL_MIN)
    for (size_t i = 0; i < count; i++) sums[i] += load(in[i]);
}

#endif
