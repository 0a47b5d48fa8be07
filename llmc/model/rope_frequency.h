/*
Frequencies of rotary positions, bit for bit as transformers computes them with torch on a CPU: in fp32, with all
supported scalings to longer contexts (test/golden/rotary.txt). YaRN (arXiv 2309.00071) also multiplies cosine and sine
by a factor; Ministral 3 scales queries by a factor that grows with their position.
*/
#ifndef LLMC_ROPE_FREQUENCY_H
#define LLMC_ROPE_FREQUENCY_H
#include "config.h"

#define TWO_PI 6.283185307179586

// Rounds to fp32. Keeps the compiler from fusing the next operation.
static float rope_rounded(double x) {
    volatile float rounded = (float)x;
    return rounded;
}

// Computes theta^y as torch's vector code does: with the polynomials of SLEEF's powf, to match the last bit.
static float rope_power(float theta, float y) {
    int exponent;
    float m = frexpf(theta, &exponent);
    if (m < 0.75f) m *= 2, exponent--;
    const double x = ((double)m - 1) / ((double)m + 1), x2 = x * x;
    float p = fmaf(0.240320354700088500976562f, (float)x2, 0.285112679004669189453125f);
    p = fmaf(p, (float)x2, 0.400007992982864379882812f);
    const double cubic = x2 * (double)p + (0.66666662693023681640625 + 3.69183861259614332084311e-9);
    const double ln2 = 0.69314718246459960938 - 1.904654323148236017e-9;
    const double power = (double)y * (exponent * ln2 + 2 * x + x2 * x * cubic); // y log(theta)
    const double q = (double)rintf(rope_rounded(power) * 1.442695040888963407f);
    const double r = power - q * 0.693145751953125 - (double)rope_rounded(q * (double)1.428606765330187045e-6f);
    float e = fmaf(0.00136324646882712841033936f, (float)r, 0.00836596917361021041870117f);
    e = fmaf(e, (float)r, 0.0416710823774337768554688f);
    e = fmaf(e, (float)r, 0.166665524244308471679688f);
    e = fmaf(e, (float)r, 0.499999850988388061523438f);
    return ldexpf((float)(1 + (r + r * r * (double)e)), (int)q);
}

// Scales low frequencies by 1 / factor, keeps high frequencies, and blends between the two by wavelength. Torch divides
// a number by a tensor as number * (1 / tensor).
static float rope_llama3(const Config *c, float frequency) {
    const double length = (double)c->rope.original_max_position_embeddings;
    const float factor = (float)c->rope.factor, wavelength = rope_rounded(1.0f / frequency) * (float)TWO_PI;
    if (wavelength > (float)(length / c->rope.low_freq_factor)) return frequency / factor;
    if (wavelength < (float)(length / c->rope.high_freq_factor)) return frequency;
    const float turns = rope_rounded((double)(1.0f / wavelength) * length);
    const float smooth =
        (turns - (float)c->rope.low_freq_factor) / (float)(c->rope.high_freq_factor - c->rope.low_freq_factor);
    return rope_rounded((double)((1 - smooth) * frequency / factor)) + rope_rounded((double)(smooth * frequency));
}

// Returns the elements of a head that frequencies spread over: of latent attention the last ones.
static size_t rope_width(const Config *c) { return c->qk_rope_head_dim ? c->qk_rope_head_dim : rotary_width(c); }

// Returns the index of the pair that turns `rotations` times over the original length.
static double rope_yarn_pair(const Config *c, double rotations) {
    return (double)rope_width(c) * log((double)c->rope.original_max_position_embeddings / (rotations * TWO_PI)) /
           (2 * log(c->rope_theta));
}

// Keeps fast pairs and scales slow pairs by 1 / factor, with a linear ramp between the two.
static float rope_yarn(const Config *c, size_t i, float power) {
    double low = rope_yarn_pair(c, c->rope.beta_fast), high = rope_yarn_pair(c, c->rope.beta_slow);
    if (c->rope.truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, (double)rope_width(c) - 1);
    if (low == high) high += 0.001;
    const float ramp = ((float)i - (float)low) / (float)(high - low);
    const float as_is = 1 - (ramp < 0 ? 0 : ramp > 1 ? 1 : ramp);
    return rope_rounded((double)(1.0f / ((float)c->rope.factor * power) * (1 - as_is))) +
           rope_rounded((double)(1.0f / power * as_is));
}

enum { ROPE_VECTOR = 32 }; // powers that torch computes at a time with SLEEF (AVX-512); the remaining ones use powf

// Returns the number of floats in rope_frequencies: pairs of a layer's heads.
static size_t rope_pairs(const Config *c, int local) { return rotary_width_of(c, local ? FORM_WINDOW : FORM_FULL) / 2; }

// Fills inverse_frequency[rope_pairs]. local: for layers with a window, which may have a base of their own. With
// proportional positions, full attention's pairs after the rotated share get frequency 0; with latent attention the
// pairs before it
static void rope_frequencies(const Config *c, int local, float *inverse_frequency) {
    const int own = local && c->rope_local_base_freq > 0;
    const double d = (double)c->head_dim, grown = c->rope.type == ROPE_DYNAMIC ? pow(c->rope.alpha, d / (d - 2)) : 1;
    const float theta = (float)(own ? c->rope_local_base_freq : c->rope_theta * grown);
    size_t pairs = rope_pairs(c, local), width = 2 * pairs;
    if (c->family->proportional && !local) {
        memset(inverse_frequency, 0, pairs * sizeof(float));
        pairs = (size_t)(c->partial_rotary_factor * (double)width) / 2;
    }
    if (c->qk_rope_head_dim) {
        memset(inverse_frequency, 0, pairs * sizeof(float));
        inverse_frequency += c->qk_nope_head_dim / 2, width = rope_width(c), pairs = width / 2;
    }
    for (size_t i = 0; i < pairs; i++) {
        const float exponent = (float)(2 * i) / (float)width;
        const float power = i < pairs / ROPE_VECTOR * ROPE_VECTOR ? rope_power(theta, exponent) : powf(theta, exponent);
        switch (own ? ROPE_DEFAULT : c->rope.type) {
        case ROPE_LINEAR: inverse_frequency[i] = 1.0f / power / (float)c->rope.factor; break;
        case ROPE_LLAMA3: inverse_frequency[i] = rope_llama3(c, 1.0f / power); break;
        case ROPE_YARN: inverse_frequency[i] = rope_yarn(c, i, power); break;
        default: inverse_frequency[i] = 1.0f / power;
        }
    }
}

static double rope_mscale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1; }

// Returns YaRN's factor for rotated queries and keys; else 1.
static double rope_attention_factor(const Config *c, int local) {
    if (c->rope.type != ROPE_YARN || (local && c->rope_local_base_freq > 0)) return 1;
    if (c->rope.attention_factor > 0) return c->rope.attention_factor;
    if (c->rope.mscale > 0 && c->rope.mscale_all_dim > 0)
        return rope_mscale(c->rope.factor, c->rope.mscale) / rope_mscale(c->rope.factor, c->rope.mscale_all_dim);
    return rope_mscale(c->rope.factor, 1);
}

// Returns how the queries or keys of a layer are rotated.
static Rotation rotation_of(const Config *c, int local, int queries) {
    const Rotation r = {(float)rope_attention_factor(c, local), c->family->interleaved,
                        queries ? rotation_growth(c) : 0, (double)c->rope.original_max_position_embeddings};
    return r;
}

#endif
