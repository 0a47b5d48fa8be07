/*
Counter-based random numbers (splitmix64's finaliser over seed, stream and index): any element of a sequence is computed
without the elements before it. Initial weights, random tokens, sampling and the data order use it. Resuming needs only
the index.
*/
#ifndef LLMC_RANDOM_H
#define LLMC_RANDOM_H
#include <stdint.h>

#ifdef __CUDACC__
#define DEVICE_TOO __host__ __device__ // kernels call these functions, too
#else
#define DEVICE_TOO
#endif

DEVICE_TOO static uint64_t random_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

DEVICE_TOO static uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return random_mix(random_mix(random_mix(seed) ^ stream) ^ index);
}

// Tells whether dropout keeps element `index`, with probability 1 - rate. threshold: dropout_threshold(rate)
DEVICE_TOO static int dropout_keeps(uint64_t seed, uint64_t index, uint64_t threshold) {
    return random_bits(seed, 0, index) >= threshold;
}

static uint64_t dropout_threshold(double rate) { return (uint64_t)(rate * 0x1p64); } // rate < 1

// Draws uniformly from [0, 1), with 53 bits.
static double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Draws uniformly from [0, bound), with a bias below bound / 2^64.
static uint64_t random_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound) {
    return (uint64_t)(((unsigned __int128)random_bits(seed, stream, index) * bound) >> 64);
}

// Approximates a standard normal number cheaply: a sum of four uniform 16-bit numbers.
static double normal_of(uint64_t bits) {
    const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return ((double)sum - 2.0 * 0xffff) * (1.7320508075688772 / 0x10000);
}

#endif
