/*
A checksum of 64 bits, of files too large for crc32.h's 32 and as a key of models and data: against damage and chance, not
against intent.

Ranks make it together: it comes from sums over all bytes, each with its place in the whole, so that it does not matter who
adds which bytes, in which order, and where they are cut. The bytes count as words w of 32 bits, in blocks of 256:

    sum[s] = sum over blocks b of scale_s(b) * sum over i of key_s(i) * w(b, i)  mod 2^64,  s = 0, 1

with odd keys of 32 bits and odd scales of 64, both random. A word is the sum of its bytes, each in its place, so a word may
be cut, too. A change within one word changes both sums, since w < 2^32 and keys and scales are odd; other changes pass both
with a chance of about 2^-64. Zeros add nothing: the number of bytes goes into the checksum when it is made from the sums.
*/
#ifndef LLMC_CHECKSUM_H
#define LLMC_CHECKSUM_H
#include "dist.h"
#include "llmc/base/random.h"

enum { CHECKSUM_WORDS = 256, CHECKSUM_BLOCK = 4 * CHECKSUM_WORDS }; // of a block: words, bytes

typedef struct {
    uint64_t sum[2];
} Checksum;

// Adds bytes [at, at + bytes) of the whole.
static void checksum_add(Checksum *c, uint64_t at, const void *data, size_t bytes) {
    const unsigned char *cursor = (const unsigned char *)data;
    uint32_t key[2][CHECKSUM_WORDS], word[CHECKSUM_WORDS];
    size_t n;
    for (size_t i = 0; i < CHECKSUM_WORDS; i++) {
        const uint64_t bits = random_mix(i);
        key[0][i] = (uint32_t)bits | 1, key[1][i] = (uint32_t)(bits >> 32) | 1;
    }
    for (; bytes; cursor += n, at += n, bytes -= n) {
        const uint64_t block = at / CHECKSUM_BLOCK;
        uint64_t first = 0, second = 0;
        n = min_size(CHECKSUM_BLOCK - (size_t)(at % CHECKSUM_BLOCK), bytes);
        if (n < CHECKSUM_BLOCK) memset(word, 0, sizeof(word));
        memcpy((char *)word + at % CHECKSUM_BLOCK, cursor, n);
        for (size_t i = 0; i < CHECKSUM_WORDS; i++) { // two widening products a word: vectorised
            first += (uint64_t)key[0][i] * word[i];
            second += (uint64_t)key[1][i] * word[i];
        }
        c->sum[0] += (random_mix(~(2 * block)) | 1) * first;
        c->sum[1] += (random_mix(~(2 * block + 1)) | 1) * second;
    }
}

// Makes the sums of all ranks' bytes of every rank's own. Collective.
static void checksum_join(Checksum *c) {
    double part[8]; // 16 bits each: their sums over ranks are exact
    for (size_t i = 0; i < 8; i++) part[i] = (double)(c->sum[i / 4] >> 16 * (i % 4) & 0xffff);
    dist_sum(RANKS_ALL, part, 8);
    memset(c, 0, sizeof(*c));
    for (size_t i = 0; i < 8; i++) c->sum[i / 4] += (uint64_t)part[i] << 16 * (i % 4);
}

// Of a whole of `bytes` bytes that has been added up, going on from `before`.
static uint64_t checksum_value(uint64_t before, const Checksum *c, uint64_t bytes) {
    return random_mix(random_mix(random_mix(before ^ bytes) ^ c->sum[0]) ^ c->sum[1]);
}

// Of a piece that lies here, going on from `before`: the same bytes in other pieces have another checksum.
static uint64_t checksum_piece(uint64_t before, const void *data, size_t bytes) {
    Checksum c = {{0, 0}};
    checksum_add(&c, 0, data, bytes);
    return checksum_value(before, &c, bytes);
}

#endif
