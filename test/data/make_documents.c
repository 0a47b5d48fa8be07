// Writes a shard for the tests of the program: make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED [KIND]]]
// A document walks through the ids: mostly one up, sometimes to a random one. MASKED: its first targets that do not
// count, its prompt. KIND: documents, advantages (documents with them), pairs, prompts, labels (desirable and
// undesirable in turn), families (each five documents begin alike, and end with 20 tokens of their own), or the size of
// groups with random rewards. A prompt of 64 tokens or more is that of all documents of its pair or group.
#include "llmc/base/random.h"
#include "shard_writer.h"

static size_t number(const char *text, const char *what) {
    size_t value;
    if (!parse_size(text, &value)) die_usage("%s '%s' is not a number", what, text);
    return value;
}

// prefix: the seed of the first `common` tokens
static MadeDocument make_document(size_t tokens, size_t vocabulary, size_t own, size_t prefix, size_t common,
                                  size_t masked, int prompt_only) {
    uint32_t *id = (uint32_t *)checked_calloc(tokens, sizeof(uint32_t), "ids");
    unsigned char *counts = (unsigned char *)checked_calloc(tokens, 1, "counts");
    float *value = (float *)checked_calloc(tokens, sizeof(float), "values");
    MadeDocument made = {tokens, id, counts, value, masked, 0, (float)random_uniform(own, 3, 0), NULL};
    for (size_t i = 0; i < tokens; i++) {
        const size_t seed = i < common ? prefix : own;
        int jump = i == 0 || random_below(seed, 1, i, 8) == 0;
        id[i] = jump ? (uint32_t)random_below(seed, 2, i, vocabulary) : (uint32_t)((id[i - 1] + 1) % vocabulary);
        counts[i] = !prompt_only && (i > masked || i == tokens - 1);
        value[i] = (float)random_uniform(seed, 4, i) - 0.5f;
    }
    if (masked) made.prompt = masked + 1 < tokens ? masked + 1 : tokens - 1; // in tokens; the first is no target
    if (prompt_only && !masked) made.prompt = tokens;
    return made;
}

int main(int argc, char **argv) {
    MadeShard made = {2, 0, 0, KIND_DOCUMENTS, "made for tests", 0, 0};
    const char *kind = argc > 6 ? argv[6] : "documents";
    MadeDocument document[1024];
    size_t documents = 0, members = 1;
    if (argc < 4) die_usage("make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED [KIND]]]");
    made.vocabulary = number(argv[2], "the vocabulary");
    size_t seed = argc > 4 ? number(argv[4], "the seed") : 1,
           masked = argc > 5 ? number(argv[5], "the masked targets") : 0;
    made.values = !strcmp(kind, "advantages");
    made.kind = !strcmp(kind, "pairs") ? KIND_PAIRS : !strcmp(kind, "prompts") ? KIND_PROMPTS : KIND_DOCUMENTS;
    if (!strcmp(kind, "labels")) made.kind = KIND_LABELS;
    if (*kind >= '0' && *kind <= '9') made.kind = KIND_GROUPS, members = number(kind, "a group's size");
    if (made.kind == KIND_PAIRS) members = 2;
    if (!strcmp(kind, "families")) members = 5;
    for (char *word = strtok(argv[3], ","); word && documents < 1024; word = strtok(NULL, ","), documents++) {
        const size_t tokens = number(word, "a length"), first = documents / members * members;
        const size_t common = made.kind == KIND_DOCUMENTS ? tokens - min_size(tokens, 20)
                              : masked >= 64              ? masked + 1
                                                          : 0;
        document[documents] =
            make_document(tokens, (size_t)made.vocabulary, random_mix(seed) + documents, random_mix(seed) + first,
                          members > 1 ? common : 0, masked, made.kind == KIND_PROMPTS);
        document[documents].group = documents / members;
        if (made.kind == KIND_LABELS) document[documents].reward = (float)(documents % 2);
    }
    ShardImage image = shard_image(&made, document, documents);
    FILE *file = fopen(argv[1], "wb");
    if (!file || fwrite(image.bytes, 1, image.size, file) != image.size || fclose(file))
        die("%s: cannot be written: %s", argv[1], strerror(errno));
    return 0;
}
