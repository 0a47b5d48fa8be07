/*
Checksums and hashes. They detect damage, not forgery.

    crc32_of        crc32 of zlib, PNG and Ethernet: polynomial 0xEDB88320 over reflected bits. For shards, tokenizer
                    files and log-probabilities. It can be continued: crc32_of(crc32_of(0, a, n), b, m) is the crc32 of
                    a followed by b.
    Checksum        64 bits, for files too large for crc32, and as a key of models and data. Any number of writers may
                    add bytes in any order and in any pieces.
    fnv1a           64 bits, for hash tables and small headers
*/
#ifndef LLMC_HASH_H
#define LLMC_HASH_H
#include "random.h"
#include "utils.h"

// ---- crc32: eight bytes at a time by eight tables ("slicing by 8") --------------------------------------------------
static uint32_t crc32_table[8][256]; // [k][byte]: crc of the byte followed by k zeros

// Fills the tables. Call before any thread computes a checksum.
static void crc32_prepare(void) {
    if (crc32_table[0][1]) return;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (uint32_t bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1u ? 0xedb88320u : 0);
        crc32_table[0][i] = crc;
    }
    for (uint32_t k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc32_table[k][i] = crc32_table[k - 1][i] >> 8 ^ crc32_table[0][crc32_table[k - 1][i] & 0xff];
}

static uint32_t crc32_of(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = crc32_table[7][low & 0xff] ^ crc32_table[6][low >> 8 & 0xff] ^ crc32_table[5][low >> 16 & 0xff] ^
              crc32_table[4][low >> 24] ^ crc32_table[3][p[4]] ^ crc32_table[2][p[5]] ^ crc32_table[1][p[6]] ^
              crc32_table[0][p[7]];
    }
    for (; bytes; bytes--, p++) crc = crc >> 8 ^ crc32_table[0][(crc ^ *p) & 0xff];
    return ~crc;
}

// ---- FNV-1a ---------------------------------------------------------------------------------------------------------
#define FNV_BEGIN 0xcbf29ce484222325ull

static uint64_t fnv1a(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (; bytes; bytes--, p++) hash = (hash ^ *p) * 0x100000001b3ull;
    return hash;
}

// ---- Checksum -------------------------------------------------------------------------------------------------------
/*
Sums over all bytes, each with its offset in the whole, so that order and cuts do not matter. Bytes count as words w of
32 bits, in blocks of 256:

    sum[s] = sum over blocks b of scale_s(b) * sum over i of key_s(i) * w(b, i)  mod 2^64,  s = 0, 1

with random odd keys of 32 bits and scales of 64. A word is the sum of its bytes, each at its offset, so a word may be
cut, too. A change within one word changes both sums, since w < 2^32 and keys and scales are odd; other changes leave
both unchanged with a chance of about 2^-64. Zeros add nothing, so checksum_value mixes in the number of bytes.
*/
enum { CHECKSUM_WORDS = 256, CHECKSUM_BLOCK = 4 * CHECKSUM_WORDS }; // words and bytes of a block

typedef struct {
    uint64_t sum[2];
} Checksum;

// Adds bytes [at, at + bytes) of the data.
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
        for (size_t i = 0; i < CHECKSUM_WORDS; i++) { // two widening products per word, which vectorise
            first += (uint64_t)key[0][i] * word[i];
            second += (uint64_t)key[1][i] * word[i];
        }
        c->sum[0] += (random_mix(~(2 * block)) | 1) * first;
        c->sum[1] += (random_mix(~(2 * block + 1)) | 1) * second;
    }
}

// Returns the checksum of the `bytes` bytes added; `before` is a seed or an earlier checksum.
static uint64_t checksum_value(uint64_t before, const Checksum *c, uint64_t bytes) {
    return random_mix(random_mix(random_mix(before ^ bytes) ^ c->sum[0]) ^ c->sum[1]);
}

// Returns the checksum of one piece of memory, chained to `before`. The checksum depends on how the bytes are cut into
// pieces.
static uint64_t checksum_of(uint64_t before, const void *data, size_t bytes) {
    Checksum c = {{0, 0}};
    checksum_add(&c, 0, data, bytes);
    return checksum_value(before, &c, bytes);
}

#endif
