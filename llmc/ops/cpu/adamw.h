/*
AdamW (Loshchilov & Hutter), with the order of steps and epsilon of PyTorch:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w -= rate * weight_decay * w  +  rate * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)

In bf16 (8 significant bits) rounding to nearest would lose most updates of w and nearly all of v: they are below half a
step. So w (without master copy), m and v in bf16 are rounded stochastically: up or down so that the expected value is
exact. The random bits are a hash of (seed, step, tensor role, element index): reproducible, and the same for any number
of threads. The caller gives every tensor its own seed. m and v in 8 bits are rounded to nearest: their blocks have
scales, and codes are denser near 0.
*/
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H
#include "llmc/ops/ops.h"
#include "elements.h"
#include "simd_math.h"
#include "llmc/ops/formulas.h"
#include "llmc/base/quantise.h"

static void adamw_block(floatS *w, const floatS *gradient, floatS *m, floatS *v, size_t count,
                        const AdamWFactors *step) {
    const AdamWFactors f = *step;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        floatS g = f.gradient_scale * gradient[i];
        floatS new_m = f.beta1 * m[i] + f.one_minus_beta1 * g;
        floatS new_v = f.beta2 * v[i] + f.one_minus_beta2 * g * g;
        // Subtracts one small update, because a factor 1 - decay would be rounded: an error of several percent at usual
        // rates.
        w[i] -= f.decay * w[i] + f.rate * new_m / (square_root(new_v) * f.root_correction + f.epsilon);
        m[i] = new_m;
        v[i] = new_v;
    }
}

// ---- stochastic rounding to bf16 ------------------------------------------------------------------------------------

// Adds 16 random bits below the last kept bit, then truncates. Infinities and NaN are rounded to nearest. first: index
// of out[0] among the elements that share the key
static void round_stochastically(uint16_t *out, const floatS *in, size_t count, uint64_t key, uint32_t first) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float value = (float)in[i];
        uint32_t bits, noise = adamw_noise(key, first + (uint32_t)i);
        memcpy(&bits, &value, sizeof(bits));
        out[i] = (bits & 0x7f800000u) == 0x7f800000u ? float_to_bf16(value) : (uint16_t)((bits + noise) >> 16);
    }
}

// Writes a changed block back to memory like block_close, but rounds bf16 stochastically.
static void adamw_close(void *memory, DType type, size_t begin, size_t count, const floatS *values,
                        const AdamWFactors *f, int role) {
    const size_t place = f->first + begin;
    if (type == DTYPE_BF16)
        round_stochastically((uint16_t *)memory + begin, values, count, adamw_key(f, role, place),
                             (uint32_t)(place % ADAMW_BLOCK));
    else
        block_close(memory, type, begin, count, values);
}

// ---- moments in 8 bits ----------------------------------------------------------------------------------------------
/*
Moments in 8 bits, as in bitsandbytes' AdamW8bit on a CPU (arXiv 2110.02861). A moment is a code of the dynamic map
times its block's scale, the largest magnitude; m's codes have a sign, v's have none. The step above uses decoded
moments. The new moments get new scales and are encoded to nearest; the weights are updated from the moments before this
rounding.
*/
static void moments_decode(floatS *out, const QuantScales *s, const uint8_t *codes, float scale, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = (floatS)(s->map[codes[i]] * scale);
}

// Encodes a block of moments; returns the block's scale.
static float moments_encode(uint8_t *codes, const QuantScales *s, const floatS *in, size_t count) {
    float value[MOMENT_BLOCK], most = 0;
    int32_t point[MOMENT_BLOCK];
#pragma omp simd reduction(max : most)
    for (size_t i = 0; i < count; i++) {
        const float magnitude = fabsf((float)in[i]);
        most = magnitude > most ? magnitude : most;
    }
    if (most == 0) {
        memset(codes, 0, count);
        return most;
    }
    const float inverse = 1 / most;
#pragma omp simd
    for (size_t i = 0; i < count; i++) value[i] = (float)in[i] * inverse;
#pragma omp simd // a separate loop: the product is rounded before 1 is added
    for (size_t i = 0; i < count; i++) {
        const float at = (value[i] + 1) * 32767.5f + 0.5f;
        point[i] = at > 0 ? (at < QUANT_GRID - 1 ? (int32_t)at : QUANT_GRID - 1) : 0; // NaN becomes 0
    }
    for (size_t i = 0; i < count; i++) codes[i] = s->nearest[point[i]];
    return most;
}

static void adamw_in_8_bits(void *weights, DType weights_type, const void *gradient, DType gradient_type, uint8_t *m,
                            uint8_t *v, size_t count, const AdamW *step, floatX *rounded) {
    const AdamWFactors factors = adamw_factors(step);
    const QuantScales *const map_m = quant_dynamic(1), *const map_v = quant_dynamic(0);
    const size_t before = step->block_first, blocks = moment_blocks(DTYPE_INT8, step, count);
#pragma omp parallel for schedule(static) if (count >= PARALLEL_MIN)
    for (size_t b = 0; b < blocks; b++) {
        const size_t begin = b ? b * MOMENT_BLOCK - before : 0;
        const size_t length = min_size((b + 1) * MOMENT_BLOCK - before, count) - begin;
        floatS buffer[2][MOMENT_BLOCK], bm[MOMENT_BLOCK], bv[MOMENT_BLOCK];
        const floatS *g = block_read(gradient, gradient_type, begin, length, buffer[0]);
        floatS *w = block_open(weights, weights_type, begin, length, buffer[1]);
        moments_decode(bm, map_m, m + begin, step->m_scales[b], length);
        moments_decode(bv, map_v, v + begin, step->v_scales[b], length);
        adamw_block(w, g, bm, bv, length, &factors);
        adamw_close(weights, weights_type, begin, length, w, &factors, ADAMW_W);
        step->m_scales[b] = moments_encode(m + begin, map_m, bm, length);
        step->v_scales[b] = moments_encode(v + begin, map_v, bv, length);
        if (rounded)
            elements_convert(rounded + begin, FLOATX_DTYPE, (const float *)weights + begin, DTYPE_FP32, length);
    }
}

static void cpu_adamw(Stored *w_, float *master, const void *gradient, DType gradient_type, void *m, void *v,
                      DType moment_type, size_t count, const AdamW *step) {
    const AdamWFactors factors = adamw_factors(step);
    void *weights = master ? (void *)master : (void *)w_;    // the weights to update
    DType weights_type = master ? DTYPE_FP32 : FLOATX_DTYPE; // NOLINT(bugprone-branch-clone): equal in fp32 builds
    if (moment_type == DTYPE_INT8) {
        adamw_in_8_bits(weights, weights_type, gradient, gradient_type, (uint8_t *)m, (uint8_t *)v, count, step,
                        master ? (floatX *)w_ : NULL);
        return;
    }
    const size_t before = step->first % BLOCK_ELEMENTS; // blocks are counted from the parameter's first element, not
                                                        // from this part's
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
