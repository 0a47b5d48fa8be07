/*
crc32 as zlib, PNG and Ethernet have it: the polynomial 0xEDB88320 over reflected bits, eight bytes at a time by eight tables
("slicing by 8"). A checksum goes on where the last one ended: crc32_of(crc32_of(0, a, n), b, m) is that of a and then b.

crc32_prepare makes the tables. A program calls it before it has threads that check anything.
*/
#ifndef LLMC_CRC32_H
#define LLMC_CRC32_H
#include <stddef.h>
#include <stdint.h>

static uint32_t crc32_table[8][256]; // [k][byte]: of the byte and k zeros behind it

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

#endif
