/*
Shards of documents whose every token encodes its place: id = document * DOCUMENT_IDS + token. So a test can check any
position of any stream.
*/
#ifndef TEST_DOCUMENT_FILES_H
#define TEST_DOCUMENT_FILES_H
#include "test/base/child.h"
#include "llmc/data/dataloader.h"
#include "shard_writer.h"

#define SCOPED_LOADER SCOPED(dataloader_close) DataLoader
#define SCOPED_BATCH  SCOPED(batch_free) Batch

#define DOCUMENT_IDS 4096 // tokens of a document, at most

// mask: how many of 8 targets do not count, at random; the last target counts.
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

// Returns documents first, first + 1, ... of 2 to `most` tokens.
static MadeDocument *made_documents(size_t first, size_t count, size_t most, size_t mask) {
    MadeDocument *document = (MadeDocument *)case_memory(count * sizeof(MadeDocument));
    for (size_t i = 0; i < count; i++) document[i] = made_document(first + i, 2 + test_random_below(most - 1), mask);
    return document;
}

static MadeShard made_shard(size_t id_bytes) {
    MadeShard made = {id_bytes, id_bytes == 2 ? 65536 : 1u << 31, 0, KIND_DOCUMENTS, "some tokenizer", 0, 0};
    return made;
}

static const char *write_image(const char *name, ShardImage image) {
    const char *path = scratch_path(name);
    write_file(path, image.bytes, image.size);
    free(image.bytes);
    return path;
}

static const char *write_shard(const char *name, const MadeShard *made, const MadeDocument *document,
                               size_t documents) {
    return write_image(name, shard_image(made, document, documents));
}

static DataSettings data_settings(size_t B, size_t T) {
    DataSettings settings = {0};
    settings.B = B, settings.T = T, settings.vocab_size = (size_t)1 << 31, settings.seed = 11;
    return settings;
}

static DataLoader open_data(const char *path, const DataSettings *settings) {
    return dataloader_open(&path, 1, settings);
}

// Returns room for the loader's largest stream, filled with garbage.
static Batch batch_for(const DataLoader *loader) {
    SequenceBound bound = loader->bound;
    Batch batch = dataloader_batch(loader);
    memset(batch.tokens, 0xee, bound.N * 4), memset(batch.targets, 0xee, bound.N * 4);
    memset(batch.position, 0xee, bound.N * 4), memset(batch.loss_weight, 0xee, bound.N * 4);
    return batch;
}

// Compares the two; both or neither may be NULL.
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

// Reads an epoch from the loader's position. Checks the counts given in advance, the bound, and check(context, batch).
// Returns the number of positions.
static size_t expect_epoch(DataLoader *loader, Batch *batch, void (*check)(void *context, const Batch *batch),
                           void *context) {
    const uint64_t epoch = loader->next / loader->samples;
    size_t positions = 0, sequences = 0;
    for (; loader->next / loader->samples == epoch; sequences++, positions += batch->N) {
        const TargetCounts told = dataloader_targets(loader, loader->next, 1);
        dataloader_next(loader, batch);
        const TargetCounts counts = batch_count(batch);
        assert_true(told.tokens == counts.tokens && told.documents == counts.documents && told.groups == counts.groups);
        assert_true(counts.tokens > 0 && batch->N <= loader->bound.N && batch->documents <= loader->bound.documents);
        assert_int_equal(batch->document_start[0], 0);
        assert_int_equal(batch->document_start[batch->documents], batch->N);
        check(context, batch);
    }
    if (!epoch) assert_int_equal(sequences, dataloader_batches(loader));
    return positions;
}

// A position is one number: a loader that jumps there, from anywhere, gives the same micro-batch as one that walks.
// step(k, position, batch): a further check of the k-th, or NULL.
static void expect_seeks(const char *path, const DataSettings *settings, size_t steps,
                         void (*step)(size_t k, uint64_t position, const Batch *batch)) {
    SCOPED_LOADER walking = open_data(path, settings), jumping = open_data(path, settings);
    SCOPED_BATCH one = batch_for(&walking), other = batch_for(&jumping);
    uint64_t *position = (uint64_t *)case_memory(steps * sizeof(uint64_t));
    allocation_guard = 1; // shards are opened and closed in here without allocating
    for (size_t k = 0; k < steps; k++) {
        position[k] = walking.next;
        assert_true(position[k] < (uint64_t)1 << 53 && (k == 0 || position[k] > position[k - 1]));
        dataloader_next(&walking, &one);
        if (step) step(k, position[k], &one);
        if (k) jumping.next = position[test_random_below(k)], dataloader_next(&jumping, &other);
        jumping.next = position[k];
        dataloader_next(&jumping, &other);
        expect_same_batch(&one, &other);
        assert_int_equal(walking.next, jumping.next);
    }
    allocation_guard = 0;
}

// ---- refusals: bodies for a child -----------------------------------------------------------------------------------
static DataSettings refusal_settings;

// Opens the shard and reads all of it.
static void read_all(const void *context) {
    DataLoader loader = open_data((const char *)context, &refusal_settings);
    Batch batch = batch_for(&loader);
    for (size_t i = 0; i < dataloader_batches(&loader); i++) dataloader_next(&loader, &batch);
    batch_free(&batch);
    dataloader_close(&loader);
}

// Expects exit code 1 and one line of refusal; notes may precede it.
static void refused_by(ChildBody body, const void *context, const char *words) {
    const Child *child = run_child(body, context);
    const char *line = strstr(child->err, program_invocation_short_name);
    if (child->code != EXIT_RUNTIME) test_fail("exit code %d: %s", child->code, child->err);
    if (!line || count_lines(line) != 1) test_fail("not one line: %s", child->err);
    if (!strstr(line, words)) test_fail("stderr is: %s(expected: %s)", line, words);
}

static void refused(const char *path, const char *words) { refused_by(read_all, path, words); }

static void open_two(const void *paths) { dataloader_open((const char *const *)paths, 2, &refusal_settings); }

static void refused_together(const char *a, const char *b, const char *words) {
    const char *paths[2];
    paths[0] = a, paths[1] = b;
    refused_by(open_two, paths, words);
}

#endif
