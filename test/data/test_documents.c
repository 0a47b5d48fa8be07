// Shards of documents: the use of every token, positions and epochs, bounds; every field, section and checksum is
// damaged in turn, each refused in one line.
#include "test/base/damage.h"
#include "document_files.h"

// ---- the use of every token -----------------------------------------------------------------------------------------
typedef struct {
    const MadeDocument *document;
    size_t documents, T;
    unsigned char *trained; // [documents * DOCUMENT_IDS] targets seen
} Expected;

// Each document of a stream must be a whole piece of one document of the file.
static void check_piece(Expected *x, const Batch *batch, size_t begin, size_t end) {
    size_t number = (size_t)batch->tokens[begin] / DOCUMENT_IDS, first = (size_t)batch->tokens[begin] % DOCUMENT_IDS;
    const MadeDocument *made = &x->document[number];
    if (number >= x->documents || first % x->T) test_fail("a document begins with token %zu of %zu", first, number);
    if (end - begin != min_size(x->T, made->tokens - 1 - first))
        test_fail("%zu positions of document %zu from %zu on", end - begin, number, first);
    for (size_t t = begin; t < end; t++) {
        size_t token = first + t - begin;
        int counts = made->counts[token + 1];
        if ((uint32_t)batch->tokens[t] != made->id[token]) test_fail("token %zu is %d", t, batch->tokens[t]);
        if (batch->targets[t] != (counts ? (int32_t)made->id[token + 1] : -1))
            test_fail("target %zu: %d", t, batch->targets[t]);
        if (batch->loss_weight[t] != (float)counts) test_fail("weight %zu: %g", t, (double)batch->loss_weight[t]);
        if (batch->position[t] != (int32_t)(t - begin)) test_fail("position %zu: %d", t, batch->position[t]);
        if (counts && x->trained[number * DOCUMENT_IDS + token + 1]++)
            test_fail("target %zu of %zu again", token + 1, number);
    }
}

static void check_pieces(void *expected, const Batch *batch) {
    for (size_t d = 0; d < batch->documents; d++)
        check_piece((Expected *)expected, batch, batch->document_start[d], batch->document_start[d + 1]);
}

// Every counted target is trained on once; with truncation only those up to T.
static void check_all_trained(const Expected *x, LongDocuments treatment) {
    for (size_t d = 0; d < x->documents; d++)
        for (size_t i = 1; i < x->document[d].tokens; i++) {
            int wanted = x->document[d].counts[i] && (treatment == LONG_SPLIT || i <= x->T);
            if (x->trained[d * DOCUMENT_IDS + i] != wanted) test_fail("target %zu of document %zu", i, d);
        }
}

TEST(every_target_once_in_an_epoch) {
    static const struct {
        size_t documents, most, B, T, mask;
        LongDocuments treatment;
        Shuffle shuffle;
    } cases[] = {{300, 60, 1, 64, 0, LONG_SPLIT, SHUFFLE_AUTO},   {300, 60, 3, 64, 4, LONG_REFUSE, SHUFFLE_ON},
                 {200, 900, 2, 50, 3, LONG_SPLIT, SHUFFLE_ON},    {200, 900, 1, 50, 7, LONG_SPLIT, SHUFFLE_OFF},
                 {200, 900, 4, 33, 7, LONG_TRUNCATE, SHUFFLE_ON}, {1, 4000, 2, 64, 8, LONG_SPLIT, SHUFFLE_ON},
                 {90, 4000, 1, 1, 2, LONG_SPLIT, SHUFFLE_OFF},    {40, 3, 5, 1000, 0, LONG_SPLIT, SHUFFLE_AUTO}};
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        DataSettings settings = data_settings(cases[c].B, cases[c].T);
        MadeShard made = made_shard(4);
        const char *const names[] = {"a.bin", "b.bin", "c.bin"}, *paths[3];
        Expected x;
        size_t first = 0;
        test_case("case %zu", c);
        x.documents = cases[c].documents, x.T = cases[c].T;
        x.document = made_documents(0, x.documents, cases[c].most, cases[c].mask);
        x.trained = (unsigned char *)case_memory(x.documents * DOCUMENT_IDS);
        for (size_t s = 0; s < 3; s++) { // three shards, one of them empty
            size_t end = s == 1 ? first : s == 0 ? x.documents / 3 : x.documents;
            paths[s] = write_shard(names[s], &made, x.document + first, end - first);
            first = end;
        }
        settings.long_documents = cases[c].treatment, settings.shuffle = cases[c].shuffle;
        SCOPED_LOADER loader = dataloader_open(paths, 3, &settings);
        assert_int_equal(loader.packing.shuffle, cases[c].shuffle != SHUFFLE_OFF);
        SCOPED_BATCH batch = batch_for(&loader);
        allocation_guard = 1;
        for (size_t epoch = 0; epoch < 3; epoch++) {
            memset(x.trained, 0, x.documents * DOCUMENT_IDS);
            assert_int_equal(expect_epoch(&loader, &batch, check_pieces, &x), loader.packing.positions);
            check_all_trained(&x, cases[c].treatment);
            assert_int_equal(loader.next, (epoch + 1) * loader.segments);
        }
        allocation_guard = 0;
    }
}

TEST(ids_of_two_bytes_and_many_shards) { // more shards than stay open
    DataSettings settings = data_settings(2, 40);
    MadeShard made = made_shard(2);
    size_t tokens = 0;
    unsigned char seen[100] = {0};
    char name[32];
    for (size_t s = 0; s < 100; s++) { // one document each: 600 s, 600 s + 1, ... for 10 tokens
        uint32_t id[10];
        const unsigned char counts[10] = {0, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        const MadeDocument document = {10, id, counts, NULL, 0, 0, 0, NULL};
        for (size_t n = 0; n < 10; n++) id[n] = (uint32_t)(600 * s + n);
        snprintf(name, sizeof(name), "many-%zu.bin", s);
        write_shard(name, &made, &document, 1);
    }
    SCOPED_LOADER loader = open_data(scratch_path("many-*.bin"), &settings);
    SCOPED_BATCH batch = batch_for(&loader);
    assert_int_equal(dataloader_batches(&loader), (100 + 7) / 8); // eight pieces of 9 in a stream of 80
    for (size_t s = 0; s < dataloader_batches(&loader); s++, tokens += batch.N) {
        dataloader_next(&loader, &batch);
        for (size_t n = 0; n < batch.N; n++) assert_int_equal(batch.targets[n], batch.tokens[n] + 1);
        for (size_t n = 0; n < batch.documents; n++) seen[batch.tokens[batch.document_start[n]] / 600]++;
    }
    assert_int_equal(tokens, 900);
    for (size_t s = 0; s < 100; s++) assert_int_equal(seen[s], 1);
}

TEST(documents_larger_than_the_buffer) {
    enum { TOKENS = 600000 };
    uint32_t *id = (uint32_t *)case_memory(TOKENS * sizeof(uint32_t));
    unsigned char *counts = (unsigned char *)case_memory(TOKENS);
    const MadeDocument document = {TOKENS, id, counts, NULL, 0, 0, 0, NULL};
    MadeShard made = made_shard(4);
    for (size_t i = 0; i < TOKENS; i++) id[i] = (uint32_t)i, counts[i] = i % 3 == 1;
    const char *path = write_shard("large.bin", &made, &document, 1);
    for (size_t T = TOKENS - 1; T > 200000; T /= 2) { // whole, then in pieces
        const DataSettings settings = data_settings(1, T);
        SCOPED_LOADER loader = open_data(path, &settings);
        SCOPED_BATCH batch = batch_for(&loader);
        double counted = 0;
        for (size_t s = 0; s < dataloader_batches(&loader); s++) {
            dataloader_next(&loader, &batch);
            for (size_t t = 0; t < batch.N; t++) {
                const int32_t target = batch.tokens[t] + 1;
                if (batch.targets[t] != (target % 3 == 1 ? target : -1)) test_fail("%d: %d", target, batch.targets[t]);
            }
            counted += batch_count(&batch).tokens;
        }
        assert_true(counted == TOKENS / 3);
    }
}

// ---- positions ------------------------------------------------------------------------------------------------------
static double counted[400];
static uint64_t positions[400];

static void keep_targets(size_t k, uint64_t position, const Batch *batch) {
    positions[k] = position, counted[k] = batch_count(batch).tokens;
}

TEST(a_place_of_documents_is_one_number) {
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        DataSettings settings = data_settings(2, 30);
        MadeShard made = made_shard(4);
        const char *path = write_shard("places.bin", &made, made_documents(0, 150, 100, 2), 150);
        settings.shuffle = shuffle ? SHUFFLE_ON : SHUFFLE_OFF;
        expect_seeks(path, &settings, 400, keep_targets);
        SCOPED_LOADER loader = open_data(path, &settings);
        assert_true(positions[399] / loader.segments >= 2);
        for (size_t k = 0; k < 300; k += 7) { // targets of a step that crosses the ends of epochs
            const size_t n = 1 + test_random_below(99);
            double sum = 0;
            for (size_t i = k; i < k + n; i++) sum += counted[i];
            assert_true(dataloader_targets(&loader, positions[k], n).tokens == sum);
        }
    }
}

// Sums the origins of a step's documents, their squares, and its counted targets.
static void step_sums(DataLoader *loader, Batch *batch, double sums[3]) {
    memset(sums, 0, 3 * sizeof(double));
    for (size_t k = dataloader_step(loader, loader->next); k > 0; k--) {
        dataloader_next(loader, batch);
        sums[2] += batch_count(batch).tokens;
        for (size_t d = 0; d < batch->documents; d++)
            sums[0] += (double)batch->origin[d], sums[1] += (double)batch->origin[d] * (double)batch->origin[d];
    }
}

// Steps of a fixed number of documents can switch the micro-batch size at any step.
TEST(a_step_in_other_micro_batches) {
    for (size_t i = 0; i < 8; i++) {
        DataSettings settings = data_settings(i & 1 ? 3 : 1, 30);
        MadeShard made = made_shard(4);
        const char *path = write_shard("steps.bin", &made, made_documents(0, 61, 100, 2), 61);
        double sums[2][3];
        settings.shuffle = i & 2 ? SHUFFLE_ON : SHUFFLE_OFF, settings.step = i & 4 ? 7 : 1000000;
        SCOPED_LOADER from = open_data(path, &settings);
        settings.B = 5;
        SCOPED_LOADER to = open_data(path, &settings);
        SCOPED_BATCH a = batch_for(&from), b = batch_for(&to);
        test_case("case %zu", i);
        for (size_t step = 0; step < 90; step++) {
            uint64_t position = from.next, same = from.next;
            assert_true(dataloader_resplit(&to, from.settings.B, step, &position));
            assert_true(dataloader_resplit(&from, to.settings.B, step, &same) && same == from.next);
            to.next = position;
            step_sums(&from, &a, sums[0]), step_sums(&to, &b, sums[1]);
            assert_memory_equal(sums[0], sums[1], sizeof(sums[0]));
        }
        settings.step = 0;
        SCOPED_LOADER packed = open_data(path, &settings);
        uint64_t position = 0;
        assert_int_equal(dataloader_resplit(&packed, 1, 0, &position), 0);
    }
}

static void seek_nowhere(const void *context) {
    DataSettings settings = data_settings(4, 100);
    DataLoader loader = open_data((const char *)context, &settings);
    Batch batch = batch_for(&loader);
    loader.next = loader.segments - 1; // needs fewer streams
    dataloader_next(&loader, &batch);
}

static uint64_t fingerprint_with(const char *path, DataSettings settings) {
    SCOPED_LOADER loader = open_data(path, &settings);
    return dataloader_fingerprint(&loader, loader.settings.B);
}

TEST(fingerprint_covers_documents_and_order) {
    MadeShard made = made_shard(4);
    MadeDocument *document = made_documents(0, 50, 90, 2);
    const char *path = write_shard("f.bin", &made, document, 50), *copy = write_shard("copy.bin", &made, document, 50);
    const DataSettings base = data_settings(2, 100);
    DataSettings other[6] = {base, base, base, base, base, base};
    const uint64_t fingerprint = fingerprint_with(path, base);
    expect_refused(seek_nowhere, path, EXIT_RUNTIME, "is not in this data: epoch 0 has");
    assert_true(fingerprint_with(copy, base) == fingerprint);
    other[0].seed = 12, other[1].long_documents = LONG_TRUNCATE;
    other[2].B = 1, other[2].T = 200;
    for (size_t i = 3; i < 6; i++) other[i].shuffle = SHUFFLE_OFF, other[i].seed += i - 3; // the seed has no effect
    for (size_t i = 0; i < 6; i++) assert_true(fingerprint_with(path, other[i]) != fingerprint);
    assert_true(fingerprint_with(path, other[4]) == fingerprint_with(path, other[5]));
    ((uint32_t *)(uintptr_t)document[49].id)[0]++;
    for (size_t count = 49; count <= 50; count++)
        assert_true(fingerprint_with(write_shard("g.bin", &made, document, count), base) != fingerprint);
}

// ---- bounds ---------------------------------------------------------------------------------------------------------
TEST(the_bound_is_that_of_the_data) {
    static const size_t lengths[] = {41, 31, 21, 11, 6, 6, 6}; // 40 + 30 + 20 + 10 + 3 x 5 positions
    static const struct {
        size_t B, batches, N, documents; // batches 0: any
        Shuffle shuffle;
    } cases[] = {{1, 0, 50, 5, SHUFFLE_AUTO},    // 3 x 5 + 10 + 20
                 {100, 0, 115, 7, SHUFFLE_AUTO}, // all
                 {1, 3, 50, 4, SHUFFLE_OFF}};    // 40 | 30 + 20 | 10 + 3 x 5
    MadeDocument document[7];
    MadeShard made = made_shard(4);
    for (size_t i = 0; i < 7; i++) document[i] = made_document(i, lengths[i], 0);
    const char *path = write_shard("bound.bin", &made, document, 7);
    for (size_t c = 0; c < 3; c++) {
        DataSettings settings = data_settings(cases[c].B, 50);
        settings.shuffle = cases[c].shuffle;
        SCOPED_LOADER loader = open_data(path, &settings);
        assert_int_equal(loader.bound.N, cases[c].N);
        assert_int_equal(loader.bound.documents, cases[c].documents);
        assert_int_equal(loader.bound.longest, 40);
        if (cases[c].batches) assert_int_equal(dataloader_batches(&loader), cases[c].batches);
    }
}

// ---- refusals -------------------------------------------------------------------------------------------------------
static ShardImage small_image(void) { // documents of 5, 9, 3 and 20 tokens
    static const size_t lengths[] = {5, 9, 3, 20};
    MadeDocument document[4];
    MadeShard made = made_shard(4);
    for (size_t i = 0; i < 4; i++) document[i] = made_document(i, lengths[i], 2);
    refusal_settings = data_settings(1, 16);
    refusal_settings.shuffle = SHUFFLE_OFF;
    return shard_image(&made, document, 4);
}

// Renews the checksums as a faulty writer would: of the header, and of the table of 4 documents if `seal_table`.
static int seal_table;

static void mend_shard(const char *path, char *bytes, size_t count, size_t before) {
    unsigned char *shard = (unsigned char *)bytes;
    (void)path, (void)count, (void)before;
    if (seal_table) put(shard + 120, crc32_of(0, shard + TOKEN_SHARD_HEADER, 4 * TOKEN_SHARD_ENTRY), 4);
    put(shard + 124, 0, 4);
    put(shard + 124, crc32_of(0, shard, TOKEN_SHARD_HEADER), 4);
}

static void read_bad(const void *folder) {
    char path[1024];
    snprintf(path, sizeof(path), "%s/bad.bin", (const char *)folder);
    read_all(path);
}

static DamageSuite damage_suite(void) {
    DamageSuite suite = {scratch_folder(), read_bad, NULL, mend_shard, 1};
    ShardImage image = small_image();
    write_image("bad.bin", image);
    return suite;
}

#define FIELD(at, bytes, value, words) OTHER_NUMBER("bad.bin", at, bytes, value, words)
TEST(every_field_of_the_header) {
    static const Damage fields[] = {
        FIELD(0, 1, 'X', "bad.bin: its 677 bytes are less than the header of a token shard"),
        FIELD(8, 4, 2, "bad.bin: version 2 of a token shard is unknown, expected 1"),
        FIELD(12, 4, 0x04030201, "bad.bin: was written on a big-endian machine"),
        FIELD(12, 4, 7, "its byte order mark is 00000007, expected 01020304"),
        FIELD(16, 8, 128, "its header says that it has 128 bytes, expected 256"),
        FIELD(24, 8, 1000000, "its header says 1000000 bytes, but the file has"),
        FIELD(24, 8, 300, "is not what its header says"),
        FIELD(32, 8, 5, "its ids are at byte"),
        FIELD(32, 8, (uint64_t)1 << 60, "documents and 37 tokens do not fit"),
        FIELD(40, 8, 36, "its end is at byte"),
        FIELD(40, 8, (uint64_t)1 << 62, "do not fit"),
        FIELD(48, 8, 1, "its documents have 37 tokens"),
        FIELD(56, 8, 21, "20 tokens at most, but the header says 37"),
        FIELD(64, 4, 3, "has ids of 3 bytes, expected 2 or 4"),
        FIELD(64, 4, 2, "a vocabulary of 2147483648 does not fit ids of 2 bytes"),
        FIELD(68, 4, 4, "kind 4 of a token shard is unknown; kinds are 0 to 3, and 5"),
        FIELD(72, 8, 0, "a vocabulary of 0 does not fit"),
        FIELD(72, 8, (uint64_t)1 << 31 | 1, "a vocabulary of 2147483649 does not fit"),
        FIELD(72, 8, 4096, "document 1, token 0 is 4096, outside the vocabulary of 4096"),
        FIELD(88, 8, 320, "its document table is at byte 320"),
        FIELD(96, 8, 64, "its ids are at byte 64"),
        FIELD(104, 8, 1 << 20, "its masks are at byte 1048576"),
        FIELD(112, 8, 640, "its values are at byte 640, with 4 documents and 37 tokens it should be 704"),
        FIELD(120, 4, 1, "the checksum of its document table is wrong"),
        FIELD(128, 64, 0x6e6e6e6e6e6e6e6e, "the name of its tokenizer has no end")};
    const DamageSuite suite = damage_suite();
    seal_table = 0;
    expect_damage_found(&suite, fields, sizeof(fields) / sizeof(fields[0]));
    expect_bits_found(&suite, "bad.bin", 8, 256, -1, "bad.bin: ");
}

#define ENTRY(document, at, value, words)                                                                              \
    FIELD(TOKEN_SHARD_HEADER + TOKEN_SHARD_ENTRY * (document) + (at), 8, value, words)
TEST(every_field_of_the_table) {
    static const Damage fields[] = {
        ENTRY(1, 0, 4, "document 1 does not begin where the one before it ends"),
        ENTRY(0, 0, 1, "document 0 does not begin where"),
        ENTRY(1, 8, 1, "document 1 has fewer than 2 tokens"),
        ENTRY(3, 8, 21, "document 3 goes beyond the last token"),
        ENTRY(3, 8, 19, "its documents have 36 tokens"),
        ENTRY(2, 16, 0, "document 2 has no target"),
        ENTRY(2, 16, 3, "document 2 has more targets than tokens"),
        ENTRY(2, 32, 4, "document 2 has a prompt longer than the document"),
        FIELD(TOKEN_SHARD_HEADER + TOKEN_SHARD_ENTRY * 2 + 44, 4, 1, "the checksum of document 2 is wrong")};
    const DamageSuite suite = damage_suite();
    seal_table = 1;
    expect_damage_found(&suite, fields, sizeof(fields) / sizeof(fields[0]));
    expect_bits_found(&suite, "bad.bin", TOKEN_SHARD_HEADER, TOKEN_SHARD_HEADER + 4 * TOKEN_SHARD_ENTRY, 2,
                      "the checksum of its document table is wrong");
}

TEST(every_section_truncated_or_flipped) {
    const DamageSuite suite = damage_suite();
    ShardImage whole = small_image();
    const size_t cuts[] = {8, 255, 256, whole.table + 60, whole.ids, whole.ids + 33, whole.counts, whole.size - 1};
    for (size_t i = 0; i < COUNT_OF(cuts); i++) {
        const Damage cut = CUT_TO("bad.bin", (long long)cuts[i], "truncated");
        expect_damage_found(&suite, &cut, 1);
    }
    // the long document is read in segments, the others whole
    expect_bits_found(&suite, "bad.bin", whole.ids, whole.ids + 37 * 4, 0, "the checksum of document ");
    expect_bits_found(&suite, "bad.bin", whole.counts, whole.size, 0, "the checksum of document ");
    expect_bits_found(&suite, "bad.bin", whole.ids + 37 * 4, whole.counts, -1, "bytes 596 to 639 are not zero");
    free(whole.bytes);
}

TEST(counts_that_the_table_does_not_know) { // with a right checksum: a faulty writer
    ShardImage image = small_image();
    unsigned char *entry = image.bytes + image.table + TOKEN_SHARD_ENTRY, *counts = image.bytes + image.counts;
    entry[16]--, image.bytes[48]--;
    put(entry + 44, crc32_of(crc32_of(0, image.bytes + image.ids + 20, 36), counts + 5, 9), 4);
    shard_image_seal(&image, 4);
    refused(write_image("bad.bin", image), "targets, but the document table says");
    image = small_image(), entry = image.bytes + image.table, counts = image.bytes + image.counts;
    counts[4] = 2; // of the last token
    put(entry + 44, crc32_of(crc32_of(0, image.bytes + image.ids, 20), counts, 5), 4);
    shard_image_seal(&image, 4);
    refused(write_image("bad.bin", image), "document 0, token 4 has the mask 2; a mask is 0 or 1");
}

TEST(tokenizers_kinds_and_lengths) {
    MadeShard made = made_shard(4), other = made_shard(4), right = made_shard(4);
    MadeDocument *document = made_documents(0, 4, 60, 0);
    const uint32_t llmc[256 + 50] = {20240520, 1, 100};
    const char *tokenizer = scratch_path("tokenizer.json"), *z = scratch_path("z.bin");
    const char *path = write_shard("one.bin", &made, document, 4);
    char words[600];
    refusal_settings = data_settings(1, 100);
    other.tokenizer = 77, other.name = "another";
    refused_together(path, write_shard("two.bin", &other, document, 4),
                     "two.bin with tokenizer another; prepare both with the model's tokenizer");
    write_file(z, llmc, 1024 + 200);
    refused_together(path, z, "one.bin is a shard of documents, ");
    refused_together(z, path, "z.bin is not; give shards of only one kind");
    snprintf(words, sizeof(words), "is a folder; name its shards, for example '%s/train-*.bin'", scratch_folder());
    refused(scratch_folder(), words);
    refusal_settings.vocab_size = 50000;
    refused(path, "its tokenizer some tokenizer has 2147483648 ids, the model's vocabulary only 50000");
    refusal_settings = data_settings(1, 100);
    write_file(tokenizer, "{\"a\": 1}", 8);
    refusal_settings.tokenizer_path = tokenizer;
    refused(path, "--any-tokenizer");
    right.tokenizer = (uint64_t)8 << 32 | crc32_of(0, "{\"a\": 1}", 8);
    read_all(write_shard("right.bin", &right, document, 4));
    refusal_settings = data_settings(1, 7), refusal_settings.long_documents = LONG_REFUSE;
    document[0] = made_document(0, 8, 0), document[1] = made_document(1, 9, 0);
    refused(write_shard("long.bin", &made, document, 2),
            "long.bin: document 1 has 9 tokens, --seq-len 7 takes 8; give a longer --seq-len or --long split or");
    read_all(write_shard("long.bin", &made, document, 1));
    refused(write_shard("none.bin", &made, document, 0), "holds nothing to train on");
}

TEST(what_was_done_is_said_once) {
    static const struct {
        size_t T;
        LongDocuments treatment;
        const char *notes[3]; // then NULL
    } rows[] = {{40,
                 LONG_SPLIT,
                 {"2 of 3 documents are longer than --seq-len 40 and are split; 5 segments in all",
                  "2 segments of documents are left out: none of their tokens is trained on"}},
                {40,
                 LONG_TRUNCATE,
                 {"2 of 3 documents are longer than --seq-len 40 and are truncated, by 120 tokens in all",
                  "1 segments of documents are left out"}},
                {100, LONG_SPLIT, {NULL}}};
    MadeShard made = made_shard(4);
    MadeDocument document[3];
    for (size_t i = 0; i < 3; i++) document[i] = made_document(i, i ? 101 : 20, 0);
    memset((unsigned char *)(uintptr_t)document[1].counts, 0, 100); // only its last target counts
    const char *path = write_shard("note.bin", &made, document, 3);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        size_t lines = 0;
        refusal_settings = data_settings(2, rows[i].T), refusal_settings.long_documents = rows[i].treatment;
        const Child *child = run_child(read_all, path);
        for (; rows[i].notes[lines]; lines++)
            if (!strstr(child->err, rows[i].notes[lines])) test_fail("%s", child->err);
        assert_int_equal(child->code, 0);
        assert_int_equal(count_lines(child->err), lines);
    }
}

// The file is cut short before it is read, or removed.
static void read_cut(const void *path) {
    SCOPED_LOADER loader = open_data((const char *)path, &refusal_settings);
    SCOPED_BATCH batch = batch_for(&loader);
    if (!truncate((const char *)path, 700)) dataloader_next(&loader, &batch);
}

static void read_removed(const void *path) {
    SCOPED_LOADER loader = open_data((const char *)path, &refusal_settings);
    SCOPED_BATCH batch = batch_for(&loader);
    if (!unlink((const char *)path)) dataloader_next(&loader, &batch);
}

TEST(files_that_change) {
    refused_by(read_cut, write_image("bad.bin", small_image()), "has changed its size since it was opened");
    refused_by(read_removed, write_image("bad.bin", small_image()),
               "cannot be opened: No such file or directory; leave the data alone");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
