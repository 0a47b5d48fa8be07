/*
Formulas that both op sets use. They are in floatS, which the including file defines.
*/
#ifndef LLMC_FORMULAS_H
#define LLMC_FORMULAS_H
#include <math.h>
#include "llmc/base/random.h"
#include "ops.h"

// ---- activations: g s(z), s the logistic function; silu: z = g, gelu: z = 2 sqrt(2/pi) (g + 0.044715 g^3) -----------
#define GELU_SCALE 1.5957691216057308 // 2 sqrt(2/pi)
#define GELU_CUBIC 0.044715

// g: a number or a vector
#define GELU_Z(g)     ((g) * ((floatS)GELU_SCALE + (floatS)(GELU_SCALE * GELU_CUBIC) * (g) * (g)))
#define GELU_SLOPE(g) ((floatS)GELU_SCALE + 3 * (floatS)(GELU_SCALE * GELU_CUBIC) * (g) * (g))

// ---- rotary positions -----------------------------------------------------------------------------------------------
// Returns the factor of queries at a position in fp32, as transformers computes it: the product is rounded before 1 is
// added.
DEVICE_TOO static inline float rotation_scale(Rotation r, int32_t position) {
    if (r.growth == 0) return 1;
    const volatile float more = (float)r.growth * (float)log(1 + floor((double)position / r.original));
    return 1 + more;
}

// ---- log-probabilities ----------------------------------------------------------------------------------------------
// Sums of exponentials over words, with z = (x - top) / temperature. top starts at the lowest finite number, not at
// -inf. So logits of -inf (masked words) count as probability 0 even if a block has no other logits, and +inf and NaN
// make the sum NaN.
typedef struct {
    floatS top;
    double sum, weighted; // sums of exp z and, for entropy, of z exp z
} Exponentials;

// Rescales the sums to a new `top`, no less than before. Both terms of `weighted` have one sign, so nothing cancels.
DEVICE_TOO static inline void raise_top(Exponentials *e, floatS top, double inverse_temperature) {
    const double fall = ((double)top - (double)e->top) * inverse_temperature, shrink = exp(-fall);
    if (e->sum > 0) e->weighted = shrink * (e->weighted - fall * e->sum);
    e->sum *= shrink;
    e->top = top;
}

// Below this z, z exp z is 0 in fp32; at z = -inf the product would be NaN.
#define LEAST_Z ((floatS)-1e4)

// ---- AdamW ----------------------------------------------------------------------------------------------------------
enum { ADAMW_W, ADAMW_M, ADAMW_V, ADAMW_ROLES };
#define ADAMW_BLOCK 1024 // elements of a parameter that share a key of the random numbers

// Factors of one step, equal for all elements and computed in double
typedef struct {
    floatS gradient_scale, beta1, beta2, one_minus_beta1, one_minus_beta2;
    floatS decay;           // learning_rate * weight_decay
    floatS rate;            // learning_rate / (1 - beta1^step)
    floatS root_correction; // 1 / sqrt(1 - beta2^step)
    floatS epsilon;
    uint64_t seed, stream; // choose the random bits
    size_t first;          // index of element 0 in its parameter
} AdamWFactors;

static AdamWFactors adamw_factors(const AdamW *step) {
    AdamWFactors f;
    f.gradient_scale = (floatS)step->gradient_scale;
    f.beta1 = (floatS)step->beta1;
    f.beta2 = (floatS)step->beta2;
    f.one_minus_beta1 = (floatS)(1 - step->beta1);
    f.one_minus_beta2 = (floatS)(1 - step->beta2);
    f.decay = (floatS)(step->learning_rate * step->weight_decay);
    f.rate = (floatS)(step->learning_rate / (1 - pow(step->beta1, (double)step->step)));
    f.root_correction = (floatS)(1 / sqrt(1 - pow(step->beta2, (double)step->step)));
    f.epsilon = (floatS)step->epsilon;
    f.seed = step->seed;
    f.stream = (uint64_t)step->step * ADAMW_ROLES;
    f.first = step->first;
    return f;
}

// Returns the random key of the block of ADAMW_BLOCK elements that contains element `place` of a parameter.
DEVICE_TOO static inline uint64_t adamw_key(const AdamWFactors *f, int role, size_t place) {
    return random_bits(f->seed, f->stream + (uint64_t)role, place / ADAMW_BLOCK);
}

// Hashes 32 bits with the finaliser of MurmurHash3. Unlike random_mix it vectorises everywhere.
DEVICE_TOO static inline uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Returns 16 random bits. index: among the elements that share the key
DEVICE_TOO static inline uint32_t adamw_noise(uint64_t key, uint32_t index) {
    return mix32(mix32(index ^ (uint32_t)key) ^ (uint32_t)(key >> 32)) >> 16;
}

#endif
