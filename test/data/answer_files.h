/*
Shards of answers for the tests: pairs, groups, prompts and documents with values. Each token encodes its place.
*/
#ifndef TEST_ANSWER_FILES_H
#define TEST_ANSWER_FILES_H
#include "document_files.h"

static Objective objective_of(ObjectiveKind kind) {
    Objective o = {0};
    o.kind = kind;
    return o;
}

static DataSettings answer_settings(size_t B, size_t T, const Objective *objective) {
    DataSettings settings = data_settings(B, T);
    settings.objective = objective;
    settings.scale_rewards = 1;
    return settings;
}

static MadeShard made_kind(ShardKind kind) {
    MadeShard made = made_shard(4);
    made.values = kind == KIND_VALUES;
    made.kind = made.values ? KIND_DOCUMENTS : kind;
    return made;
}

// Makes `groups` pairs (most 2) or groups of 2 to `most` completions. Documents have 2 to `longest` tokens and every
// field that a document can have. Returns the number of documents.
static size_t made_groups(const MadeShard *made, MadeDocument *document, size_t first, size_t groups, size_t most,
                          size_t longest) {
    size_t count = 0;
    for (size_t g = 0; g < groups; g++) {
        for (size_t left = 2 + test_random_below(most - 1); left > 0; left--) {
            MadeDocument *d = &document[count];
            *d = made_document(first + count++, 2 + test_random_below(longest - 1), 4);
            float *value = (float *)case_memory(d->tokens * sizeof(float));
            for (size_t t = 0; t < d->tokens; t++) value[t] = (float)test_normal();
            d->group = g, d->reward = made->kind == KIND_LABELS ? (float)(count % 2) : (float)test_normal();
            d->value = value;
            d->prompt = 1 + test_random_below(d->tokens - 1);
            if (made->kind == KIND_PROMPTS) memset((unsigned char *)(uintptr_t)d->counts, 0, d->tokens);
        }
    }
    return count;
}

// Writes two shards of these, with documents numbered across both.
static size_t write_two(const MadeShard *made, MadeDocument *document, size_t groups, size_t most, size_t longest,
                        const char *paths[2]) {
    const size_t first = made_groups(made, document, 0, groups, most, longest);
    const size_t second = made_groups(made, document + first, first, groups, most, longest);
    paths[0] = write_shard("a.bin", made, document, first);
    paths[1] = write_shard("b.bin", made, document + first, second);
    return first + second;
}

static const char *const kind_files[] = {"documents.bin", "pairs.bin",  "groups.bin",
                                         "prompts.bin",   "values.bin", "labels.bin"};

// Returns a shard of each kind, by ShardKind.
static void write_kinds(void) {
    for (size_t k = 0; k < COUNT_OF(kind_files); k++) {
        const MadeShard made = made_kind((ShardKind)k);
        MadeDocument document[4];
        write_shard(kind_files[k], &made, document, made_groups(&made, document, 0, 2, 2, 20));
    }
}

#endif
