// Writes a shard for the tests of the program:
// make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED [KIND [ALIKE]]]]
// A document walks through the ids: mostly one up, sometimes to a random one. MASKED: its first targets that do not
// count, its prompt. KIND: documents, advantages (documents with them), pairs, prompts, labels (desirable and
// undesirable in turn), or the size of groups with random rewards. ALIKE: as many documents in turn have one prompt.
#include "llmc/base/random.h"
#include "shard_writer.h"

static size_t number(const char *text, const char *what) {
    size_t value;
    if (!parse_size(text, &value)) die_usage("%s '%s' is not a number", what, text);
    return value;
}

// prompt_seed: of the first masked + 1 tokens
static MadeDocument make_document(size_t tokens, size_t vocabulary, size_t seed, size_t prompt_seed, size_t masked,
                                  int prompt_only) {
    uint32_t *id = (uint32_t *)checked_calloc(tokens, sizeof(uint32_t), "ids");
    unsigned char *counts = (unsigned char *)checked_calloc(tokens, 1, "counts");
    float *value = (float *)checked_calloc(tokens, sizeof(float), "values");
    MadeDocument made = {tokens, id, counts, value, masked, 0, (float)random_uniform(seed, 3, 0), NULL};
    for (size_t i = 0; i < tokens; i++) {
        const size_t own = i <= masked ? prompt_seed : seed;
        int jump = i == 0 || random_below(own, 1, i, 8) == 0;
        id[i] = jump ? (uint32_t)random_below(own, 2, i, vocabulary) : (uint32_t)((id[i - 1] + 1) % vocabulary);
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
    size_t documents = 0, members = 1, alike = argc > 7 ? number(argv[7], "the documents with one prompt") : 1;
    if (argc < 4) die_usage("make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED [KIND [ALIKE]]]]");
    made.vocabulary = number(argv[2], "the vocabulary");
    size_t seed = argc > 4 ? number(argv[4], "the seed") : 1,
           masked = argc > 5 ? number(argv[5], "the masked targets") : 0;
    made.values = !strcmp(kind, "advantages");
    made.kind = !strcmp(kind, "pairs") ? KIND_PAIRS : !strcmp(kind, "prompts") ? KIND_PROMPTS : KIND_DOCUMENTS;
    if (!strcmp(kind, "labels")) made.kind = KIND_LABELS;
    if (*kind >= '0' && *kind <= '9') made.kind = KIND_GROUPS, members = number(kind, "a group's size");
    for (char *word = strtok(argv[3], ","); word && documents < 1024; word = strtok(NULL, ","), documents++) {
        const size_t first = random_mix(seed);
        document[documents] = make_document(number(word, "a length"), (size_t)made.vocabulary, first + documents,
                                            first + documents / alike * alike, masked, made.kind == KIND_PROMPTS);
        document[documents].group = documents / members;
        if (made.kind == KIND_LABELS) document[documents].reward = (float)(documents % 2);
    }
    ShardImage image = shard_image(&made, document, documents);
    FILE *file = fopen(argv[1], "wb");
    if (!file || fwrite(image.bytes, 1, image.size, file) != image.size || fclose(file))
        die("%s: cannot be written: %s", argv[1], strerror(errno));
    return 0;
}
