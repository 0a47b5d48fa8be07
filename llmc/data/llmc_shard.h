/*
llm.c's token shards, presented as shards of documents: a header of 256 int32 (magic, version, number of tokens, zeros),
then the ids.

    magic 20240520, version 1   uint16 ids (llm.c's GPT-2 data, and what data/pack_bytes.c writes)
    magic 20240801, version 7   uint32 ids (its Llama 3 data)

A micro-batch is B consecutive documents of T positions, all tokens targets: document d is tokens [dT, dT + T]; its last
token is the first of the next document. An end-of-text token does not end a document. Tokens at a shard's end that fill
no micro-batch are skipped. There is no table, mask, checksum or tokenizer: a document's place is computed from its
number.
*/
#ifndef LLMC_LLMC_SHARD_H
#define LLMC_LLMC_SHARD_H
#include "llmc/base/random.h"
#include "shard.h"

#define LLMC_SHARD_HEADER 1024
#define LLMC_SHARD_SAMPLE ((size_t)8 << 10) // bytes at each end of a shard that enter its fingerprint

static const struct {
    uint32_t magic, version;
    uint32_t id_bytes;
} llmc_shard_kinds[] = {{LLMC_SHARD_16, 1, 2}, {LLMC_SHARD_32, 7, 4}};
#define LLMC_SHARD_KINDS (sizeof(llmc_shard_kinds) / sizeof(llmc_shard_kinds[0]))

// Reads the header. The shard is divided into micro-batches of B documents of T positions, with ids below `vocabulary`.
static TokenShard llmc_shard_header(const InputFile *file, size_t B, size_t T, size_t vocabulary) {
    uint32_t header[LLMC_SHARD_HEADER / sizeof(uint32_t)];
    const char *path = file->path;
    TokenShard s = {0};
    size_t i;
    if (file->bytes < sizeof(header))
        die("%s: its %zu bytes are less than the header of a token shard (%zu); write it again", path,
            (size_t)file->bytes, sizeof(header));
    input_read(file, 0, header, sizeof(header));
    const uint32_t magic = header[0], version = header[1];
    for (i = 0; i < LLMC_SHARD_KINDS && llmc_shard_kinds[i].magic != magic; i++)
        if (__builtin_bswap32(llmc_shard_kinds[i].magic) == magic)
            die("%s: was written on a big-endian machine; swap its bytes or write it again", path);
    if (i == LLMC_SHARD_KINDS)
        die("%s: is not a token shard: its magic number is %u, not %u (uint16 ids) or %u (uint32 ids); write the file "
            "with data/prepare.py",
            path, magic, llmc_shard_kinds[0].magic, llmc_shard_kinds[1].magic);
    if (version != llmc_shard_kinds[i].version)
        die("%s: version %u of a token shard with magic number %u is unknown, expected %u; write the file with "
            "data/prepare.py",
            path, version, magic, llmc_shard_kinds[i].version);
    s.path = checked_strdup(path);
    s.begin.bytes = file->bytes, s.id_bytes = llmc_shard_kinds[i].id_bytes, s.tokens = header[2];
    s.ids = sizeof(header), s.header_crc = header[31];
    s.vocabulary = vocabulary, s.regular = T, s.longest = T + 1;
    s.documents = s.tokens ? (s.tokens - 1) / (B * T) * B : 0; // a target is one token after its input
    const size_t expected = s.ids + s.tokens * s.id_bytes;
    if (expected != s.begin.bytes)
        die("%s: the header says %zu tokens, so %zu bytes, but the file has %zu; it is %s; copy or write it again",
            path, s.tokens, expected, s.begin.bytes,
            s.begin.bytes < expected ? "truncated" : "not what its header says");
    return s;
}

// Mixes the file's length, first bytes and last bytes into a hash, since the file has no checksum.
static uint64_t llmc_shard_mix(uint64_t mixed, const char *path) {
    InputFile file = input_open(path);
    const size_t sample = min_size(file.bytes, LLMC_SHARD_SAMPLE);
    const uint64_t offset[2] = {0, file.bytes - sample};
    mixed = random_mix(mixed ^ file.bytes);
    for (size_t k = 0; k < 2; k++) {
        uint64_t words[LLMC_SHARD_SAMPLE / sizeof(uint64_t)] = {0};
        input_read(&file, offset[k], words, sample);
        for (size_t i = 0; i < LLMC_SHARD_SAMPLE / sizeof(uint64_t); i++) mixed = random_mix(mixed ^ words[i]);
    }
    input_close(&file);
    return mixed;
}

#endif
