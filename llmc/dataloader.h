/*
Reads llm.c's token shards as they are: 256 int32 of header (magic, version, number of tokens, zeros), then the ids.

    magic 20240520, version 1   uint16 ids (llm.c's GPT-2 data, and what data/pack_bytes.c writes)
    magic 20240801, version 7   uint32 ids (its Llama 3 data)

A micro-batch is B documents of T tokens: document b is tokens [bT, bT+T) of B*T+1 read, its targets one further on; an
end-of-text token does not split it. The next micro-batch starts B*T tokens later. None crosses from one shard to the next.
Micro-batches are numbered for ever, epoch after epoch in the same order, so a place in the data is one 64-bit number, and
going there takes no reading. Every header is checked at opening, every id when it is read.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "batch.h"
#include "file.h"
#include <glob.h>

#define SHARD_HEADER_INTS  256
#define SHARD_HEADER_BYTES (SHARD_HEADER_INTS * sizeof(uint32_t))
#define SHARD_BUFFER_BYTES ((size_t)1 << 18)
#define SHARD_SAMPLE_BYTES ((size_t)8 << 10) // at each end of a shard: what a fingerprint looks at

// The kinds of shard: those of llm.c.
static const struct {
    uint32_t magic, version;
    size_t id_bytes;
} shard_kinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};
#define SHARD_KINDS (sizeof(shard_kinds) / sizeof(shard_kinds[0]))

typedef struct {
    char *path;
    size_t id_bytes;
    size_t tokens;
    size_t batches;        // micro-batches it holds
    size_t batches_before; // in the shards before it
} Shard;

typedef struct {
    size_t B, T, vocab_size;
    Shard *shard; // [shards], sorted by path
    size_t shards;
    size_t batches; // micro-batches of an epoch
    size_t skipped; // tokens of an epoch that are in none
    uint64_t next;  // number of the next micro-batch
    size_t open_shard;
    InputFile file;        // shard[open_shard]; fd is -1 before the first read
    unsigned char *buffer; // [SHARD_BUFFER_BYTES]
} DataLoader;

// ---- finding the shards --------------------------------------------------------------------------------------------------
static inline void shard_add(DataLoader *loader, const char *path) {
    Shard *grown = (Shard *)checked_calloc(loader->shards + 1, sizeof(Shard), "the list of shards");
    if (loader->shards) memcpy(grown, loader->shard, loader->shards * sizeof(Shard));
    free(loader->shard);
    loader->shard = grown;
    loader->shard[loader->shards++].path = checked_strdup(path);
}

static inline int shard_compare(const void *a, const void *b) {
    return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path);
}

// Each path is a file or, where no such file exists, a glob.
static inline void shards_find(DataLoader *loader, const char *const *paths, size_t count) {
    size_t i, j;
    for (i = 0; i < count; i++) {
        glob_t found;
        int failed;
        if (path_exists(paths[i]) || !strpbrk(paths[i], "*?[")) {
            shard_add(loader, paths[i]);
            continue;
        }
        failed = glob(paths[i], 0, NULL, &found);
        if (failed == GLOB_NOMATCH) die("no file matches '%s'; check the folder and the pattern", paths[i]);
        if (failed) die("cannot search for '%s': %s", paths[i], strerror(errno));
        for (j = 0; j < found.gl_pathc; j++) shard_add(loader, found.gl_pathv[j]);
        globfree(&found);
    }
    if (!loader->shards) die("no shards were given; name token files (.bin) or a quoted pattern");
    qsort(loader->shard, loader->shards, sizeof(Shard), shard_compare);
    for (i = 1; i < loader->shards; i++)
        if (!strcmp(loader->shard[i - 1].path, loader->shard[i].path))
            die("%s is named twice in the data; name it once", loader->shard[i].path);
}

// ---- one file ------------------------------------------------------------------------------------------------------------
// Ids are little-endian in files, whatever wrote them.
static inline uint32_t shard_uint32(const unsigned char *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static inline uint32_t shard_uint16(const unsigned char *bytes) { return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8; }

// Fills in id_bytes and tokens from the header.
static inline void shard_examine(Shard *shard) {
    unsigned char header[SHARD_HEADER_BYTES];
    const char *path = shard->path;
    size_t bytes, expected, i;
    uint32_t magic, version;
    InputFile file;
    if (path_is_directory(path)) die("%s: is a folder; name its shards, for example '%s/*.bin' (quoted)", path, path);
    file = input_open(path);
    bytes = (size_t)file.bytes;
    if (bytes < SHARD_HEADER_BYTES)
        die("%s: its %zu bytes are less than the header of a token shard (%zu)", path, bytes, SHARD_HEADER_BYTES);
    input_read(&file, 0, header, sizeof(header));
    input_close(&file);
    magic = shard_uint32(header), version = shard_uint32(header + 4);
    shard->tokens = shard_uint32(header + 8);
    for (i = 0; i < SHARD_KINDS && shard_kinds[i].magic != magic; i++) {
        if (__builtin_bswap32(shard_kinds[i].magic) == magic)
            die("%s: was written on a big-endian machine; swap its bytes or write it again", path);
    }
    if (i == SHARD_KINDS)
        die("%s: is not a token shard, its magic number is %u, expected %u (uint16 ids) or %u (uint32 ids)", path,
            magic, shard_kinds[0].magic, shard_kinds[1].magic);
    if (version != shard_kinds[i].version)
        die("%s: version %u of a token shard with magic number %u is not known, expected %u", path, version, magic,
            shard_kinds[i].version);
    shard->id_bytes = shard_kinds[i].id_bytes;
    expected = SHARD_HEADER_BYTES + shard->tokens * shard->id_bytes;
    if (expected != bytes)
        die("%s: the header says %zu tokens, so %zu bytes, but the file has %zu; it is %s", path, shard->tokens,
            expected, bytes, bytes < expected ? "truncated" : "not what its header says");
}

// ---- opening -------------------------------------------------------------------------------------------------------------
// The longest T of which one shard holds a micro-batch.
static inline size_t dataloader_longest(const DataLoader *loader, size_t *tokens) {
    size_t i;
    *tokens = 0;
    for (i = 0; i < loader->shards; i++) *tokens = max_size(*tokens, loader->shard[i].tokens);
    return *tokens ? (*tokens - 1) / loader->B : 0;
}

static inline void dataloader_refuse_short(const DataLoader *loader) {
    size_t tokens, T = dataloader_longest(loader, &tokens);
    const char *longest = loader->shards > 1 ? "the longest shard" : loader->shard[0].path;
    char advice[96];
    if (T)
        snprintf(advice, sizeof(advice), "--seq-len %zu would fit", T);
    else if (tokens > 1)
        snprintf(advice, sizeof(advice), "--batch %zu with --seq-len 1 would fit", tokens - 1);
    else
        snprintf(advice, sizeof(advice), "nothing can be learnt from it");
    die("%s holds %zu tokens, a micro-batch of --batch %zu x --seq-len %zu takes %zu; %s", longest, tokens, loader->B,
        loader->T, loader->B * loader->T + 1, advice);
}

static inline DataLoader dataloader_open(const char *const *paths, size_t count, size_t B, size_t T,
                                         size_t vocab_size) {
    DataLoader loader;
    size_t i, tokens = 0;
    memset(&loader, 0, sizeof(loader));
    loader.B = B, loader.T = T, loader.vocab_size = vocab_size;
    loader.file.fd = -1;
    shards_find(&loader, paths, count);
    for (i = 0; i < loader.shards; i++) {
        Shard *shard = &loader.shard[i];
        shard_examine(shard);
        shard->batches = shard->tokens ? (shard->tokens - 1) / (B * T) : 0; // the last target is one token further on
        shard->batches_before = loader.batches;
        loader.batches += shard->batches;
        tokens += shard->tokens;
        loader.skipped += shard->tokens - shard->batches * B * T - (shard->batches > 0);
    }
    if (!loader.batches) dataloader_refuse_short(&loader);
    if (loader.skipped)
        note("%s%s: %zu of %zu tokens are skipped, at the end of a shard they fill no micro-batch of %zu x %zu",
             loader.shard[0].path, loader.shards > 1 ? " and others" : "", loader.skipped, tokens, B, T);
    loader.buffer = (unsigned char *)checked_malloc(SHARD_BUFFER_BYTES, "the buffer of the data loader");
    return loader;
}

static inline void dataloader_close(DataLoader *loader) {
    size_t i;
    if (loader->file.fd >= 0) close(loader->file.fd);
    for (i = 0; i < loader->shards; i++) free(loader->shard[i].path);
    free(loader->shard);
    free(loader->buffer);
    memset(loader, 0, sizeof(*loader));
    loader->file.fd = -1;
}

// ---- place ---------------------------------------------------------------------------------------------------------------
// The state is the number of the next micro-batch; a resumed run seeks to it.
static inline uint64_t dataloader_place(const DataLoader *loader) { return loader->next; }
static inline void dataloader_seek(DataLoader *loader, uint64_t batch) { loader->next = batch; }

// Micro-batches of one epoch.
static inline size_t dataloader_batches(const DataLoader *loader) { return loader->batches; }

// Mixes bytes of the file into a hash, eight at a time; what is behind its end counts as zeros.
static inline uint64_t shard_mix(uint64_t mixed, const InputFile *file, uint64_t offset, size_t bytes) {
    uint64_t words[SHARD_SAMPLE_BYTES / sizeof(uint64_t)] = {0};
    size_t i;
    input_read(file, offset, words, bytes);
    for (i = 0; i < SHARD_SAMPLE_BYTES / sizeof(uint64_t); i++) mixed = random_mix(mixed ^ words[i]);
    return mixed;
}

// Changes when the shards do, by their lengths, their first and their last bytes, or their order, or when B and T do: the same
// place would be other tokens.
static inline uint64_t dataloader_fingerprint(const DataLoader *loader) {
    uint64_t mixed = random_mix(random_mix(loader->B) ^ loader->T);
    size_t i;
    for (i = 0; i < loader->shards; i++) {
        InputFile file = input_open(loader->shard[i].path);
        size_t sample = (size_t)(file.bytes < SHARD_SAMPLE_BYTES ? file.bytes : SHARD_SAMPLE_BYTES);
        mixed = random_mix(mixed ^ file.bytes);
        mixed = shard_mix(mixed, &file, 0, sample);
        mixed = shard_mix(mixed, &file, file.bytes - sample, sample);
        input_close(&file);
    }
    return mixed;
}

// ---- reading -------------------------------------------------------------------------------------------------------------
// Keeps one shard open at a time. Nothing is allocated here: this happens in the middle of training.
static inline const Shard *dataloader_open_shard(DataLoader *loader, size_t index) {
    Shard *shard = &loader->shard[index];
    if (loader->file.fd >= 0 && loader->open_shard == index) return shard;
    if (loader->file.fd >= 0) close(loader->file.fd);
    loader->file.fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    loader->file.path = shard->path;
    if (loader->file.fd < 0) die("%s: cannot be opened any more: %s", shard->path, strerror(errno));
    loader->open_shard = index;
    return shard;
}

// Stores id number i of the B*T+1 that make up a micro-batch: a token, the target of the one before it, or both.
static inline void batch_set_id(Batch *batch, size_t i, uint32_t id) {
    if (i < batch->N) batch->tokens[i] = (int32_t)id;
    if (i > 0) batch->targets[i - 1] = (int32_t)id;
}

// Fills a batch of B documents and B*T tokens with the next micro-batch.
static inline void dataloader_next(DataLoader *loader, Batch *batch) {
    size_t index = (size_t)(loader->next % loader->batches), low = 0, high = loader->shards;
    size_t ids = loader->B * loader->T + 1, first, done, i, count;
    const Shard *shard;
    while (high - low > 1) { // the last shard with batches_before <= index
        size_t middle = low + (high - low) / 2;
        if (loader->shard[middle].batches_before <= index)
            low = middle;
        else
            high = middle;
    }
    shard = dataloader_open_shard(loader, low);
    batch_set_regular(batch, loader->B, loader->T);
    first = (index - shard->batches_before) * loader->B * loader->T;
    for (done = 0; done < ids; done += count) {
        count = min_size(ids - done, SHARD_BUFFER_BYTES / shard->id_bytes);
        input_read(&loader->file, SHARD_HEADER_BYTES + (first + done) * shard->id_bytes, loader->buffer,
                   count * shard->id_bytes);
        for (i = 0; i < count; i++) {
            const unsigned char *bytes = loader->buffer + i * shard->id_bytes;
            uint32_t id = shard->id_bytes == 2 ? shard_uint16(bytes) : shard_uint32(bytes);
            if (id >= loader->vocab_size)
                die("%s: token %zu is %u, outside the model's vocabulary of %zu; the shard was made for another "
                    "tokenizer",
                    shard->path, first + done + i, id, loader->vocab_size);
            batch_set_id(batch, done + i, id);
        }
    }
    loader->next++;
}

#endif
