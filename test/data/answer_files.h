/*
Shards of answers for the tests: pairs, groups, prompts and documents with values, whose tokens say where they are from.
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

// Pairs (most 2) or groups of 2 to `most` completions; documents of 2 to `longest` tokens. Returns how many documents
// there are.
static size_t made_groups(MadeDocument *document, size_t first, size_t groups, size_t most, size_t longest) {
    size_t count = 0;
    for (size_t g = 0; g < groups; g++) {
        size_t members = 2 + test_random_below(most - 1);
        for (size_t i = 0; i < members; i++, count++) {
            document[count] = made_document(first + count, 2 + test_random_below(longest - 1), 4);
            document[count].group = g;
            document[count].reward = (float)test_normal();
        }
    }
    return count;
}

static const char *const kind_files[] = {"documents.bin", "pairs.bin", "groups.bin", "prompts.bin", "values.bin"};

// A shard of each kind, and one of documents with values.
static void write_kinds(void) {
    static const float value[DOCUMENT_IDS];
    for (size_t k = 0; k < 5; k++) {
        MadeShard made = made_kind(k < 4 ? (ShardKind)k : KIND_DOCUMENTS);
        MadeDocument document[4];
        made_groups(document, 0, 2, 2, 20);
        for (size_t i = 0; i < 4; i++) {
            document[i].value = value, document[i].prompt = 1;
            if (k == 3) memset((unsigned char *)(uintptr_t)document[i].counts, 0, document[i].tokens);
        }
        made.values = k == 4;
        write_shard(kind_files[k], &made, document, 4);
    }
}

#endif
