/*
AdamW (Loshchilov & Hutter), with the steps and the place of epsilon as in PyTorch:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w -= rate * weight_decay * w  +  rate * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)

Rounding to nearest would stall what is held in bf16 (8 bits): most updates of w without a master copy, and nearly all
of v, are below half a step of the grid. So w (without master), m and v in bf16 are rounded stochastically: up or down
with the probabilities that make the expected value right. The random bits are a hash of (seed, step, tensor role,
element index): reproducible, and the same for any number of threads. The caller gives every tensor another seed.
*/
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"

static void adamw_block(floatS *w, const floatS *gradient, floatS *m, floatS *v, size_t count,
                        const AdamWFactors *step) {
    const AdamWFactors f = *step;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        floatS g = f.gradient_scale * gradient[i];
        floatS new_m = f.beta1 * m[i] + f.one_minus_beta1 * g;
        floatS new_v = f.beta2 * v[i] + f.one_minus_beta2 * g * g;
        // One small update is taken from w: 1 - decay would itself be rounded, at usual rates by several percent.
        w[i] -= f.decay * w[i] + f.rate * new_m / (square_root(new_v) * f.root_correction + f.epsilon);
        m[i] = new_m;
        v[i] = new_v;
    }
}

// ---- stochastic rounding to bf16 ------------------------------------------------------------------------------------

// Adds 16 random bits below the last bit that stays, then cuts; infinities and NaN are kept by rounding to nearest.
// first: of the elements that share the key, the one at out[0].
static void round_stochastically(uint16_t *out, const floatS *in, size_t count, uint64_t key, uint32_t first) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float value = (float)in[i];
        uint32_t bits, noise = adamw_noise(key, first + (uint32_t)i);
        memcpy(&bits, &value, sizeof(bits));
        out[i] = (bits & 0x7f800000u) == 0x7f800000u ? float_to_bf16(value) : (uint16_t)((bits + noise) >> 16);
    }
}

// block_close for what AdamW keeps: bf16 stochastically, everything else as usual.
static void adamw_close(void *memory, DType type, size_t begin, size_t count, const floatS *values,
                        const AdamWFactors *f, int role) {
    const size_t place = f->first + begin;
    if (type == DTYPE_BF16)
        round_stochastically((uint16_t *)memory + begin, values, count, adamw_key(f, role, place),
                             (uint32_t)(place % ADAMW_BLOCK));
    else
        block_close(memory, type, begin, count, values);
}

static void cpu_adamw(Stored *w_, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                      DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors factors = adamw_factors(step);
    void *weights = master ? (void *)master : (void *)w_;    // what the step is applied to
    DType weights_type = master ? DTYPE_FP32 : FLOATX_DTYPE; // NOLINT(bugprone-branch-clone): equal in fp32 builds
    const size_t before = step->first % BLOCK_ELEMENTS; // blocks are the parameter's own, whatever part of it this is
    size_t blocks = block_count(before + count);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t b = 0; b < blocks; b++) {
        size_t begin = b ? b * BLOCK_ELEMENTS - before : 0;
        size_t length = min_size((b + 1) * BLOCK_ELEMENTS - before, count) - begin;
        floatS buffer[4][BLOCK_ELEMENTS];
        const floatS *g = block_read(gradient, gradient_type, begin, length, buffer[0]);
        floatS *w = block_open(weights, weights_type, begin, length, buffer[1]);
        floatS *bm = block_open(m, moment_type, begin, length, buffer[2]);
        floatS *bv = block_open(v, moment_type, begin, length, buffer[3]);
        adamw_block(w, g, bm, bv, length, &factors);
        adamw_close(weights, weights_type, begin, length, w, &factors, ADAMW_W);
        adamw_close(m, moment_type, begin, length, bm, &factors, ADAMW_M);
        adamw_close(v, moment_type, begin, length, bv, &factors, ADAMW_V);
        if (master) elements_convert((floatX *)w_ + begin, FLOATX_DTYPE, master + begin, DTYPE_FP32, length);
    }
}

#endif
