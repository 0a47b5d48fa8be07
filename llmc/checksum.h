/*
A checksum of 64 bits, of files too large for crc32.h's 32 and as a key of models and data: against damage and chance, not
against intent. Four lanes take eight bytes in turn. Each step of a lane is a bijection of its value, so that a change
within eight bytes is always noticed, and others with all but certainty.
*/
#ifndef LLMC_CHECKSUM_H
#define LLMC_CHECKSUM_H
#include "random.h"
#include <string.h>

// Of a piece, going on from `before`: the same bytes in other pieces have another checksum.
static inline uint64_t checksum_piece(uint64_t before, const void *data, size_t bytes) {
    const unsigned char *cursor = (const unsigned char *)data;
    uint64_t lane[4] = {1, 2, 3, 4}, word[4];
    size_t left = bytes, i;
    while (left >= sizeof(word)) {
        memcpy(word, cursor, sizeof(word));
        for (i = 0; i < 4; i++) lane[i] = ((lane[i] ^ word[i]) * 0x9e3779b97f4a7c15u) ^ (lane[i] >> 29);
        cursor += sizeof(word), left -= sizeof(word);
    }
    memset(word, 0, sizeof(word));
    memcpy(word, cursor, left);
    for (i = 0; i < 4; i++) before = random_mix(before ^ random_mix(lane[i] ^ random_mix(word[i] + i)));
    return random_mix(before ^ bytes);
}

#endif
