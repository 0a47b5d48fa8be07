// Writes a shard of documents for the tests of the program: make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED]]
// A document walks through the ids: mostly one up, sometimes anywhere. MASKED: so many of its first targets do not count.
#define PROGRAM_NAME "make_documents"
#include "llmc/random.h"
#include "shard_writer.h"

static size_t number(const char *text, const char *what) {
    size_t value;
    if (!parse_size(text, &value)) die_usage("%s '%s' is not a number", what, text);
    return value;
}

static MadeDocument make_document(size_t tokens, size_t vocabulary, size_t seed, size_t masked) {
    uint32_t *id = (uint32_t *)checked_calloc(tokens, sizeof(uint32_t), "ids");
    unsigned char *counts = (unsigned char *)checked_calloc(tokens, 1, "counts");
    MadeDocument made = {tokens, id, counts};
    size_t i;
    for (i = 0; i < tokens; i++) {
        int jump = i == 0 || random_below(seed, 1, i, 8) == 0;
        id[i] = jump ? (uint32_t)random_below(seed, 2, i, vocabulary) : (uint32_t)((id[i - 1] + 1) % vocabulary);
        counts[i] = i > masked || i == tokens - 1;
    }
    return made;
}

int main(int argc, char **argv) {
    MadeShard made = {2, 0, 0, 0, "made for tests"};
    MadeDocument document[1024];
    size_t documents = 0, seed, masked;
    ShardImage image;
    FILE *file;
    char *word;
    if (argc < 4) die_usage("make_documents FILE VOCABULARY LENGTH,LENGTH,... [SEED [MASKED]]");
    made.vocabulary = number(argv[2], "the vocabulary");
    seed = argc > 4 ? number(argv[4], "the seed") : 1, masked = argc > 5 ? number(argv[5], "the masked targets") : 0;
    for (word = strtok(argv[3], ","); word && documents < 1024; word = strtok(NULL, ","), documents++)
        document[documents] =
            make_document(number(word, "a length"), (size_t)made.vocabulary, random_mix(seed) + documents, masked);
    image = shard_image(&made, document, documents);
    file = fopen(argv[1], "wb");
    if (!file || fwrite(image.bytes, 1, image.size, file) != image.size || fclose(file))
        die("%s: cannot be written: %s", argv[1], strerror(errno));
    return 0;
}
