/*
Shards of documents whose every token says where it is from: id = document * DOCUMENT_IDS + token. So a test can tell of any position
of any stream whether it belongs there.
*/
#ifndef TEST_DOCUMENT_FILES_H
#define TEST_DOCUMENT_FILES_H
#include "test/base/child.h"
#include "llmc/data/dataloader.h"
#include "shard_writer.h"

#define DOCUMENT_IDS 4096 // tokens of a document, at most

// mask: of 8 targets so many do not count, at random; the last one does.
static MadeDocument made_document(size_t number, size_t tokens, size_t mask) {
    uint32_t *id = (uint32_t *)case_memory(tokens * sizeof(uint32_t));
    unsigned char *counts = (unsigned char *)case_memory(tokens);
    MadeDocument made = {0};
    for (size_t i = 0; i < tokens; i++) {
        id[i] = (uint32_t)(number * DOCUMENT_IDS + i);
        counts[i] = i && (i + 1 == tokens || test_random_below(8) >= mask);
    }
    made.tokens = tokens, made.id = id, made.counts = counts;
    return made;
}

// Documents first, first + 1, ... of 2 to `most` tokens
static MadeDocument *made_documents(size_t first, size_t count, size_t most, size_t mask) {
    MadeDocument *document = (MadeDocument *)case_memory(count * sizeof(MadeDocument));
    for (size_t i = 0; i < count; i++) document[i] = made_document(first + i, 2 + test_random_below(most - 1), mask);
    return document;
}

static MadeShard made_shard(size_t id_bytes) {
    MadeShard made = {id_bytes, id_bytes == 2 ? 65536 : 1u << 31, 0, KIND_DOCUMENTS, "some tokenizer", 0};
    return made;
}

static const char *write_shard(const char *name, const MadeShard *made, const MadeDocument *document,
                               size_t documents) {
    ShardImage image = shard_image(made, document, documents);
    const char *path = scratch_path(name);
    write_file(path, image.bytes, image.size);
    free(image.bytes);
    return path;
}

static DataSettings data_settings(size_t B, size_t T) {
    DataSettings settings = {0};
    settings.B = B, settings.T = T, settings.vocab_size = (size_t)1 << 31, settings.seed = 11;
    return settings;
}

static DataLoader open_data(const char *path, const DataSettings *settings) {
    return dataloader_open(&path, 1, settings);
}

// Room for the loader's largest stream, full of what must be overwritten.
static Batch batch_for(const DataLoader *loader) {
    SequenceBound bound = loader->bound;
    Batch batch = dataloader_batch(loader);
    memset(batch.tokens, 0xee, bound.N * 4), memset(batch.targets, 0xee, bound.N * 4);
    memset(batch.position, 0xee, bound.N * 4), memset(batch.loss_weight, 0xee, bound.N * 4);
    return batch;
}

// Both have it, and it is the same, or neither has.
static void expect_same(const void *a, const void *b, size_t bytes) {
    assert_true(!a == !b);
    if (a) assert_memory_equal(a, b, bytes);
}

static void expect_same_batch(const Batch *a, const Batch *b) {
    assert_int_equal(a->N, b->N);
    assert_int_equal(a->documents, b->documents);
    assert_memory_equal(a->tokens, b->tokens, a->N * 4);
    assert_memory_equal(a->targets, b->targets, a->N * 4);
    assert_memory_equal(a->position, b->position, a->N * 4);
    assert_memory_equal(a->loss_weight, b->loss_weight, a->N * 4);
    assert_memory_equal(a->document_start, b->document_start, (a->documents + 1) * sizeof(size_t));
    expect_same(a->origin, b->origin, a->documents * sizeof(size_t));
    expect_same(a->group, b->group, a->documents * sizeof(size_t));
    expect_same(a->document_weight, b->document_weight, a->documents * sizeof(double));
    expect_same(a->reward, b->reward, a->documents * sizeof(float));
    expect_same(a->advantage, b->advantage, a->N * sizeof(float));
}

// ---- refusals: what a child of the test does ------------------------------------------------------------------------
static DataSettings refusal_settings;

// Opens the shard and reads all of it.
static void read_all(const void *context) {
    DataLoader loader = open_data((const char *)context, &refusal_settings);
    Batch batch = batch_for(&loader);
    for (size_t i = 0; i < dataloader_batches(&loader); i++) dataloader_next(&loader, &batch);
    batch_free(&batch);
    dataloader_close(&loader);
}

#endif
