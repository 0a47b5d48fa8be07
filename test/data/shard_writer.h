/*
Writes shards of documents for the tests, as data/README.md describes them: from documents in memory to bytes. Renews
the checksums after a test has damaged something. Little-endian machines only.
*/
#ifndef TEST_SHARD_WRITER_H
#define TEST_SHARD_WRITER_H
#include "llmc/data/shard.h"

typedef struct {
    size_t tokens;
    const uint32_t *id;          // [tokens]
    const unsigned char *counts; // [tokens], the first 0
    const float *value;          // [tokens], for shards with values
    size_t prompt, group;        // group: of kind 2 only; other kinds derive it from the document's number
    float reward;
    const char *columns; // for shards with columns
} MadeDocument;

typedef struct {
    size_t id_bytes;
    uint64_t vocabulary, tokenizer;
    uint32_t kind;
    const char *name;
    int values, columns;
} MadeShard;

typedef struct {
    unsigned char *bytes;
    size_t size, table, ids, counts, values, columns; // offsets of the sections; values, columns 0: absent
} ShardImage;

static void put(unsigned char *at, uint64_t value, size_t bytes) { memcpy(at, &value, bytes); }

// Renews the checksums of the table and of the header.
static void shard_image_seal(ShardImage *image, size_t documents) {
    put(image->bytes + 120, crc32_of(0, image->bytes + image->table, documents * TOKEN_SHARD_ENTRY), 4);
    if (image->columns)
        put(image->bytes + 208, crc32_of(0, image->bytes + image->columns, documents * TOKEN_SHARD_COLUMNS), 4);
    put(image->bytes + 124, 0, 4);
    put(image->bytes + 124, crc32_of(0, image->bytes, TOKEN_SHARD_HEADER), 4);
}

static void shard_image_header(ShardImage *image, const MadeShard *made, size_t documents, size_t tokens,
                               size_t counted, size_t longest) {
    unsigned char *h = image->bytes;
    memcpy(h, TOKEN_SHARD_MAGIC, 8);
    put(h + 8, 1, 4), put(h + 12, 0x01020304, 4), put(h + 16, 256, 8), put(h + 24, image->size, 8);
    put(h + 32, documents, 8), put(h + 40, tokens, 8), put(h + 48, counted, 8), put(h + 56, longest, 8);
    put(h + 64, made->id_bytes, 4), put(h + 68, made->kind, 4);
    put(h + 72, made->vocabulary, 8), put(h + 80, made->tokenizer, 8);
    put(h + 88, image->table, 8), put(h + 96, image->ids, 8), put(h + 104, image->counts, 8);
    put(h + 112, image->values, 8);
    memcpy(h + 128, made->name, strlen(made->name));
    shard_image_seal(image, documents);
}

// Writes document `d`, which begins at token `first` of the shard; returns how many of its targets count.
static size_t shard_image_document(ShardImage *image, const MadeShard *made, const MadeDocument *document, size_t d,
                                   size_t first) {
    unsigned char *entry = image->bytes + image->table + d * TOKEN_SHARD_ENTRY;
    unsigned char *ids = image->bytes + image->ids + first * made->id_bytes,
                  *counts = image->bytes + image->counts + first;
    size_t n = document->tokens, counted = 0, group = made->kind == KIND_PAIRS ? d / 2 : d;
    for (size_t i = 0; i < n; i++) put(ids + i * made->id_bytes, document->id[i], made->id_bytes);
    for (size_t i = 0; i < n; i++) counts[i] = document->counts[i], counted += document->counts[i];
    uint32_t crc = crc32_of(crc32_of(0, ids, n * made->id_bytes), counts, n);
    if (image->values) {
        memcpy(image->bytes + image->values + first * sizeof(float), document->value, n * sizeof(float));
        crc = crc32_of(crc, document->value, n * sizeof(float));
    }
    put(entry, first, 8), put(entry + 8, n, 8), put(entry + 16, counted, 8);
    put(entry + 24, made->kind == KIND_GROUPS ? document->group : group, 8), put(entry + 32, document->prompt, 8);
    memcpy(entry + 40, &document->reward, 4);
    put(entry + 44, crc, 4);
    return counted;
}

// Writes the columns of document `d`, which begin at `first` of the text.
static void shard_image_columns(ShardImage *image, const MadeDocument *document, size_t d, size_t first, char *text) {
    unsigned char *entry = image->bytes + image->columns + d * TOKEN_SHARD_COLUMNS;
    const size_t bytes = strlen(document->columns);
    memcpy(text + first, document->columns, bytes);
    put(entry, first, 8), put(entry + 8, bytes, 4), put(entry + 12, crc32_of(0, document->columns, bytes), 4);
}

// Returns the shard's bytes; the caller frees image.bytes.
static ShardImage shard_image(const MadeShard *made, const MadeDocument *document, size_t documents) {
    size_t tokens = 0, counted = 0, longest = 0, first = 0, text = 0, longest_columns = 0;
    ShardImage image;
    crc32_prepare();
    for (size_t d = 0; d < documents; d++) {
        const size_t bytes = made->columns ? strlen(document[d].columns) : 0;
        tokens += document[d].tokens, longest = max_size(longest, document[d].tokens);
        text += bytes, longest_columns = max_size(longest_columns, bytes);
    }
    image.table = TOKEN_SHARD_HEADER;
    image.ids = (size_t)shard_align(image.table + documents * TOKEN_SHARD_ENTRY);
    image.counts = (size_t)shard_align(image.ids + tokens * made->id_bytes);
    image.values = made->values ? (size_t)shard_align(image.counts + tokens) : 0;
    image.columns = made->columns ? (size_t)shard_align(image.counts + tokens) : 0;
    image.size = made->values    ? image.values + tokens * sizeof(float)
                 : made->columns ? image.columns + documents * TOKEN_SHARD_COLUMNS + text
                                 : image.counts + tokens;
    image.bytes = (unsigned char *)calloc(image.size, 1);
    if (!image.bytes) die("no memory for a shard of %zu bytes", image.size);
    for (size_t d = 0; d < documents; d++) {
        counted += shard_image_document(&image, made, &document[d], d, first);
        first += document[d].tokens;
    }
    put(image.bytes + 192, image.columns, 8), put(image.bytes + 200, longest_columns, 8);
    for (size_t d = 0, at = 0; made->columns && d < documents; at += strlen(document[d++].columns))
        shard_image_columns(&image, &document[d], d, at,
                            (char *)image.bytes + image.columns + documents * TOKEN_SHARD_COLUMNS);
    shard_image_header(&image, made, documents, tokens, counted, longest);
    return image;
}

#endif
