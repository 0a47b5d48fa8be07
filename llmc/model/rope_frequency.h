/*
The frequencies of rotary positions, as transformers computes them: in fp32, by any of the ways to stretch them over
longer contexts. YaRN (arXiv 2309.00071) multiplies cosine and sine by a factor besides; queries and keys having it
both, it is taken into the scale of attention here, by its square.
*/
#ifndef LLMC_ROPE_FREQUENCY_H
#define LLMC_ROPE_FREQUENCY_H
#include "config.h"

#define TWO_PI 6.283185307179586

// Low frequencies by 1 / factor, high ones as they are, in between a mixture by wavelength.
static float rope_llama3(const Config *c, float frequency) {
    const float length = (float)c->original_max_position_embeddings, factor = (float)c->factor;
    const float low = (float)c->low_freq_factor, high = (float)c->high_freq_factor;
    const float wavelength = (float)TWO_PI / frequency;
    if (wavelength > length / low) return frequency / factor;
    if (wavelength < length / high) return frequency;
    float smooth = (length / wavelength - low) / (high - low);
    return (1 - smooth) * frequency / factor + smooth * frequency;
}

// The pair that turns `rotations` times over the original length.
static double rope_yarn_pair(const Config *c, double rotations) {
    return (double)c->head_dim * log((double)c->original_max_position_embeddings / (rotations * TWO_PI)) /
           (2 * log(c->rope_theta));
}

// Fast pairs as they are, slow ones by 1 / factor, a ramp in between.
static float rope_yarn(const Config *c, size_t i, float power) {
    double low = rope_yarn_pair(c, c->beta_fast), high = rope_yarn_pair(c, c->beta_slow);
    float as_is = 1.0f / power, stretched = 1.0f / ((float)c->factor * power);
    if (c->truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, (double)c->head_dim - 1);
    if (low == high) high += 0.001;
    float ramp = ((float)i - (float)low) / (float)(high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return stretched * ramp + as_is * (1 - ramp);
}

// inverse_frequency[HD/2]; local: of layers with a window, where these have a base of their own
static void rope_frequencies(const Config *c, int local, float *inverse_frequency) {
    const int own = local && c->rope_local_base_freq > 0;
    const float theta = (float)(own ? c->rope_local_base_freq : c->rope_theta);
    for (size_t i = 0; i < c->head_dim / 2; i++) {
        const float power = (float)pow((double)theta, (double)((float)(2 * i) / (float)c->head_dim));
        switch (own ? ROPE_DEFAULT : c->rope_type) {
        case ROPE_LINEAR: inverse_frequency[i] = 1.0f / power / (float)c->factor; break;
        case ROPE_LLAMA3: inverse_frequency[i] = rope_llama3(c, 1.0f / power); break;
        case ROPE_YARN: inverse_frequency[i] = rope_yarn(c, i, power); break;
        default: inverse_frequency[i] = 1.0f / power;
        }
    }
}

static double rope_mscale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1; }

// The factor of YaRN for rotated queries and keys; 1 otherwise
static double rope_attention_factor(const Config *c, int local) {
    if (c->rope_type != ROPE_YARN || (local && c->rope_local_base_freq > 0)) return 1;
    if (c->attention_factor > 0) return c->attention_factor;
    if (c->mscale > 0 && c->mscale_all_dim > 0)
        return rope_mscale(c->factor, c->mscale) / rope_mscale(c->factor, c->mscale_all_dim);
    return rope_mscale(c->factor, 1);
}

#endif
