// llm.c's shards: both kinds are read, places and epochs, every malformed file is refused; random batches; and the byte
// packer, included with its main.
#define main        pack_bytes_main
#define write_shard pack_write_shard
#include "data/pack_bytes.c"
#undef main
#undef write_shard
#include "document_files.h"
#include "test/base/damage.h"

static const char *const GOLDEN16 = "test/golden/tokens_uint16.bin", *const GOLDEN32 = "test/golden/tokens_uint32.bin";

// ---- writing shards -------------------------------------------------------------------------------------------------
typedef struct {
    uint32_t magic, version, tokens; // in the header
    size_t id_bytes;
    size_t written; // ids present
    uint32_t first; // id i is (first + i) % modulus
    uint32_t modulus;
} Made;

static Made shard16(size_t tokens) {
    Made made = {20240520, 1, (uint32_t)tokens, 2, tokens, 0, 50000};
    return made;
}

static Made shard32(size_t tokens) {
    Made made = {20240801, 7, (uint32_t)tokens, 4, tokens, 0, 120000};
    return made;
}

static uint32_t made_id(const Made *made, size_t i) { return (uint32_t)((made->first + i) % made->modulus); }

static const char *make_shard(const char *name, Made made) {
    size_t bytes = 1024 + made.written * made.id_bytes;
    unsigned char *image = (unsigned char *)case_memory(bytes);
    const char *path = scratch_path(name);
    memcpy(image, &made.magic, 4), memcpy(image + 4, &made.version, 4), memcpy(image + 8, &made.tokens, 4);
    for (size_t i = 0; i < made.written; i++) {
        uint32_t id = made_id(&made, i);
        memcpy(image + 1024 + i * made.id_bytes, &id, made.id_bytes); // machine and format are little-endian
    }
    write_file(path, image, bytes);
    return path;
}

static DataSettings settings_of(size_t B, size_t T, size_t vocab_size) {
    DataSettings settings = data_settings(B, T);
    settings.vocab_size = vocab_size;
    return settings;
}

static DataLoader open_one(const char *path, size_t B, size_t T, size_t vocab_size) {
    const DataSettings settings = settings_of(B, T, vocab_size);
    return open_data(path, &settings);
}

// The batch must be ids [first, first + B*T + 1) of the shard, as B documents of T.
static void expect_batch(const Batch *batch, const Made *made, size_t first, size_t B, size_t T) {
    assert_int_equal(batch->N, B * T);
    assert_int_equal(batch->documents, B);
    for (size_t t = 0; t < B; t++) assert_int_equal(batch->document_start[t], t * T);
    assert_int_equal(batch->document_start[B], B * T);
    for (size_t t = 0; t < B * T; t++) {
        uint32_t token = made_id(made, first + t), target = made_id(made, first + t + 1);
        if (batch->tokens[t] != (int32_t)token || batch->targets[t] != (int32_t)target)
            test_fail("token %zu: %d -> %d, expected %u -> %u", t, batch->tokens[t], batch->targets[t], token, target);
        if (batch->position[t] != (int32_t)(t % T) || batch->loss_weight[t] != 1.0f)
            test_fail("token %zu: position %d, weight %g", t, batch->position[t], (double)batch->loss_weight[t]);
    }
}

// ---- reading --------------------------------------------------------------------------------------------------------
TEST(llmc_shards_of_both_kinds) {
    const size_t B = 3, T = 50;
    SCOPED_LOADER a = open_one(GOLDEN16, B, T, 96), b = open_one(GOLDEN32, B, T, 96);
    SCOPED_BATCH x = batch_for(&a), y = batch_for(&b);
    const char *image = read_whole(GOLDEN32, NULL);
    assert_int_equal(dataloader_batches(&a), 4096 / 150);
    for (size_t k = 0; k < dataloader_batches(&a); k++) {
        dataloader_next(&a, &x), dataloader_next(&b, &y);
        expect_same_batch(&x, &y);
        assert_memory_equal(x.tokens, image + 1024 + 4 * k * B * T, 4 * B * T);
        assert_memory_equal(x.targets, image + 1024 + 4 * (k * B * T + 1), 4 * B * T);
    }
}

TEST(shards_follow_each_other_by_name) {
    // ordered by name: 1 + 4 + 0 + 3 batches of 2 x 10, begun at different ids
    static const size_t tokens[] = {21, 99, 20, 70}, batches[] = {1, 4, 0, 3};
    static const char *const names[] = {"a.bin", "b.bin", "c.bin", "d.bin"};
    const char *paths[3];
    Made made[4];
    DataSettings settings = settings_of(2, 10, 200000);
    for (size_t s = 0; s < 4; s++) {
        made[s] = s % 2 ? shard32(tokens[s]) : shard16(tokens[s]);
        made[s].first = (uint32_t)(1000 * s);
        make_shard(names[s], made[s]);
    }
    for (size_t form = 0; form < 2; form++) {
        paths[0] = form ? scratch_path("d.bin") : scratch_path("[a-d].bin");
        paths[1] = scratch_path("[bc].bin"), paths[2] = scratch_path("a.bin");
        SCOPED_LOADER loader = dataloader_open(paths, form ? 3 : 1, &settings);
        SCOPED_BATCH batch = batch_for(&loader);
        assert_int_equal(loader.shards, 4);
        assert_int_equal(dataloader_batches(&loader), 8);
        for (size_t s = 0; s < 8; s++) { // two epochs
            for (size_t k = 0; k < batches[s % 4]; k++) {
                dataloader_next(&loader, &batch);
                expect_batch(&batch, &made[s % 4], 20 * k, 2, 10);
            }
        }
    }
}

TEST(a_place_is_one_number) {
    static const size_t tokens[] = {35, 64, 8, 1000};
    const char *pattern = scratch_path("place-*.bin");
    const DataSettings settings = settings_of(1, 7, 50000);
    char name[32];
    for (size_t s = 0; s < 4; s++) {
        Made made = shard16(tokens[s]);
        snprintf(name, sizeof(name), "place-%zu.bin", s);
        made.first = (uint32_t)(2000 * s);
        make_shard(name, made);
    }
    expect_seeks(pattern, &settings, 400, NULL);
    SCOPED_LOADER loader = open_data(pattern, &settings);
    SCOPED_BATCH one = batch_for(&loader), later = batch_for(&loader);
    assert_int_equal(dataloader_batches(&loader), 4 + 9 + 1 + 142);
    for (size_t k = 0; k < 156; k++) {
        loader.next = k;
        assert_int_equal(loader.next, k);
        dataloader_next(&loader, &one);
        loader.next = k + 156 * (uint64_t)1000000000000; // the same place in a later epoch
        dataloader_next(&loader, &later);
        expect_same_batch(&one, &later);
    }
}

// Reads an epoch and keeps the order of its micro-batches; each comes once.
static void read_order(DataLoader *loader, int32_t order[50]) {
    SCOPED_BATCH batch = batch_for(loader);
    unsigned char seen[50] = {0};
    for (size_t i = 0; i < 50; i++) {
        dataloader_next(loader, &batch);
        order[i] = batch.tokens[0] / 10;
        assert_int_equal(batch.targets[9], batch.tokens[0] + 10);
        assert_int_equal(seen[order[i]]++, 0);
    }
}

TEST(llmc_shards_are_shuffled_by_micro_batches) {
    const char *path = make_shard("shuffled.bin", shard32(501));
    DataSettings settings = data_settings(1, 10);
    int32_t order[4][50], again[50];
    settings.shuffle = SHUFFLE_ON;
    SCOPED_LOADER loader = open_data(path, &settings);
    for (size_t epoch = 0; epoch < 4; epoch++) {
        SCOPED_LOADER resumed = open_data(path, &settings);
        read_order(&loader, order[epoch]);
        resumed.next = 50 * epoch;
        read_order(&resumed, again);
        assert_memory_equal(order[epoch], again, sizeof(again));
        for (size_t other = 0; other < epoch; other++) {
            size_t same = 0;
            for (size_t i = 0; i < 50; i++) same += order[epoch][i] == order[other][i];
            assert_true(same < 10);
        }
    }
}

// A run resumes at the same token with another micro-batch size, in any epoch.
TEST(a_place_in_other_micro_batches) {
    static const size_t tokens[] = {121, 241}; // 12 and 24 documents of 10, for B of 1, 2, 3, 4
    for (size_t s = 0; s < 2; s++) make_shard(s ? "split-1.bin" : "split-0.bin", shard32(tokens[s]));
    const char *pattern = scratch_path("split-*.bin");
    for (size_t i = 0; i < 16; i++) {
        const size_t B = 1 + i % 4, other = 1 + i / 4;
        DataSettings settings = data_settings(B, 10);
        SCOPED_LOADER from = open_data(pattern, &settings);
        settings.B = other;
        SCOPED_LOADER to = open_data(pattern, &settings);
        SCOPED_BATCH a = batch_for(&from), b = batch_for(&to);
        test_case("from B = %zu to %zu", B, other);
        for (size_t k = 0; k < 150; k++) {
            uint64_t position = from.next;
            const int found = dataloader_resplit(&to, B, 0, &position);
            assert_int_equal(found, from.next % from.samples * B % other == 0);
            dataloader_next(&from, &a);
            if (!found) continue;
            to.next = position;
            dataloader_next(&to, &b);
            assert_memory_equal(a.tokens, b.tokens, 10 * min_size(B, other) * sizeof(int32_t));
        }
        uint64_t position = 0;
        assert_int_equal(dataloader_resplit(&to, 5, 0, &position), 0); // leaves another remainder
        settings.shuffle = SHUFFLE_ON;
        SCOPED_LOADER shuffled = open_data(pattern, &settings);
        assert_int_equal(dataloader_resplit(&shuffled, B, 0, &position), 0);
    }
}

static uint64_t fingerprint_of(const char *path, size_t B, size_t T) {
    SCOPED_LOADER loader = open_one(path, B, T, 50000);
    return dataloader_fingerprint(&loader, loader.settings.B);
}

// Returns the fingerprint of the shard with one byte changed, `from_end` bytes from its end or else at `at`.
static uint64_t fingerprint_changed(const char *path, size_t at, size_t from_end) {
    size_t bytes;
    char *image = read_whole(path, &bytes);
    const char *changed = scratch_path("changed.bin");
    image[from_end ? bytes - from_end : at] ^= 1;
    write_file(changed, image, bytes);
    return fingerprint_of(changed, 2, 10);
}

TEST(fingerprint_tells_other_data_apart) {
    static const size_t tokens[] = {100, 1001, 5000, 50000}; // ends within, between and after sampled parts
    static const size_t changes[][2] = {{1024, 0}, {1024 + 100, 0}, {0, 2}, {0, 100}}; // {0, 2}: the last token
    for (size_t i = 0; i < 4; i++) {
        const char *path = make_shard("f.bin", shard16(tokens[i])), *copy = make_shard("copy.bin", shard16(tokens[i]));
        uint64_t fingerprint = fingerprint_of(path, 2, 10);
        test_case("%zu tokens", tokens[i]);
        assert_true(fingerprint_of(copy, 2, 10) == fingerprint);
        assert_true(fingerprint_of(path, 1, 20) != fingerprint);
        assert_true(fingerprint_of(make_shard("g.bin", shard16(tokens[i] + 1)), 2, 10) != fingerprint);
        for (size_t k = 0; k < 4; k++)
            assert_true(fingerprint_changed(path, changes[k][0], changes[k][1]) != fingerprint);
    }
}

// ---- skipped tokens, and sizes that do not fit ----------------------------------------------------------------------
typedef struct {
    const char *path;
    size_t B, T, vocab_size, batches; // batches to read
} Opening;

static void open_and_read(const void *context) {
    const Opening *o = (const Opening *)context;
    SCOPED_LOADER loader = open_one(o->path, o->B, o->T, o->vocab_size);
    SCOPED_BATCH batch = batch_for(&loader);
    for (size_t i = 0; i < o->batches; i++) dataloader_next(&loader, &batch);
}

static Opening opening(const char *path) {
    Opening o = {path, 2, 8, 50000, 1};
    return o;
}

TEST(the_skipped_end_is_said_once) {
    for (size_t rest = 0; rest < 16; rest += 15) {
        Opening o = opening(make_shard("rest.bin", shard16(2 * 16 + 1 + rest)));
        o.batches = 5;
        const Child *child = run_child(open_and_read, &o);
        assert_int_equal(child->code, 0);
        assert_int_equal(count_lines(child->err), rest > 0);
        if (rest && !strstr(child->err, "skips 15 of 48 tokens")) test_fail("%s", child->err);
    }
}

static void refused_opening(Opening o, const char *words) { expect_refused(open_and_read, &o, EXIT_RUNTIME, words); }

static void refused_tokens(size_t tokens, size_t B, size_t T, const char *words) {
    const Opening o = {make_shard("short.bin", shard16(tokens)), B, T, 50000, 1};
    refused_opening(o, words);
}

TEST(what_is_too_short_is_refused_with_what_fits) {
    Opening fits = opening(make_shard("fits.bin", shard16(16)));
    fits.T = 7;
    open_and_read(&fits);
    fits = (Opening){make_shard("fits.bin", shard16(2)), 1, 1, 50000, 1};
    open_and_read(&fits);
    refused_tokens(16, 2, 8,
                   "short.bin holds 16 tokens, a micro-batch of --batch 2 x --seq-len 8 takes 17; --seq-len 7 would "
                   "fit");
    refused_tokens(2, 2, 8, "--batch 1 with --seq-len 1 would fit");
    refused_tokens(1, 2, 8, "holds 1 tokens");
    refused_tokens(0, 2, 8, "holds 0 tokens");
    refused_tokens(100, 1048576, 1073741824, "--batch 99 with --seq-len 1 would fit"); // the largest the options allow
}

// ---- malformed files ------------------------------------------------------------------------------------------------
static Opening of_bytes(size_t count, int byte) {
    unsigned char *bytes = (unsigned char *)case_memory(count + 1);
    const char *path = scratch_path("bad.bin");
    memset(bytes, byte, count);
    write_file(path, bytes, count);
    return opening(path);
}

TEST(malformed_files_are_refused) {
    static const struct {
        Made made;
        const char *words;
    } rows[] = {
        {{20240520, 2, 100, 2, 100, 0, 50000},
         "bad.bin: version 2 of a token shard with magic number 20240520 is unknown, expected 1"},
        {{20240520, 7, 100, 2, 100, 0, 50000}, "version 7"},
        {{20240801, 1, 100, 2, 100, 0, 50000},
         "version 1 of a token shard with magic number 20240801 is unknown, expected 7"},
        {{20240521, 1, 100, 2, 100, 0, 50000},
         "bad.bin: is not a token shard: its magic number is 20240521, not 20240520"},
        {{0x88d83401, 0x01000000, 100, 2, 100, 0, 50000}, "bad.bin: was written on a big-endian machine"},
        {{0xa1d93401, 0x07000000, 100, 2, 100, 0, 50000}, "bad.bin: was written on a big-endian machine"},
        {{20240520, 1, 100, 2, 99, 0, 50000},
         "the header says 100 tokens, so 1224 bytes, but the file has 1222; it is truncated"},
        {{20240801, 7, 100, 4, 101, 0, 120000}, "so 1424 bytes, but the file has 1428; it is not what its header says"},
        {{20240520, 1, 0xffffffffu, 2, 100, 0, 50000}, "the header says 4294967295 tokens"}};
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        refused_opening(opening(make_shard("bad.bin", rows[i].made)), rows[i].words);
    refused_opening(of_bytes(0, 0), "bad.bin: is empty");
    refused_opening(of_bytes(1023, 0), "its 1023 bytes are less than the header");
    refused_opening(of_bytes(5000, 0), "is not a token shard");
    refused_opening(opening("README"), "README: cannot be opened: No such file");
    refused_opening(opening("nowhere/[ab]*.bin"), "no file matches 'nowhere/[ab]*.bin'");
    refused_opening(opening("test/golden"), "is a folder; name its shards");
    refused_opening(opening("/dev/null"), "is not a regular file");
}

// A file that is no shard is named, with a remedy.
TEST(other_files_are_named) {
#define PREPARE "make shards for --data of it: python3 data/prepare.py --tokenizer MODEL --out shards "
    static const struct {
        const char *begin, *words;
    } rows[] = {
        {" {\"messages\": []}", "other: is JSON, not a token shard; " PREPARE},
        {"\xef\xbb\xbf[1]", "is JSON, not"},
        {"# Title\r\n\ttext \xc3\xa4", "is text, not a token shard; " PREPARE},
        {"PAR1", "is a Parquet table, not a token shard; " PREPARE},
        {"\x1f\x8b\b", "is compressed by gzip, not a token shard; unpack it"},
        {"STREAMBP\1", "is a flat .bin of a model, not a token shard; it belongs to --model"},
        {"\xc6\xd7\x34\x01", "is an llm.c GPT-2 .bin, not a token shard; it belongs to --model"},
        {"SBPTOKEN\1", "is a tokenizer, not a token shard; it belongs to --tokenizer"},
        {"SBPLOGPS\1", "is a file of log-probabilities, not a token shard; it belongs to --reference-logprobs"}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        write_file(scratch_path("other"), rows[i].begin, strlen(rows[i].begin));
        refused_opening(opening(scratch_path("other")), rows[i].words);
    }
    refused_opening(opening("test/golden/llama/model.safetensors"),
                    "is a safetensors file, not a token shard; give the");
    refused_opening(opening("test/golden/llama"), "llama: is the folder of a model; it belongs to --model");
    refused_opening(opening("test/data"), "a folder without shards (*.bin); " PREPARE "test/data/*");
}

TEST(ids_outside_the_vocabulary_are_refused) {
    Made made = shard32(97);
    Opening o = opening(make_shard("ids.bin", shard16(97)));
    o.vocab_size = 17; // the target of the last of 16 tokens is the 17th id, 16
    open_and_read(&o);
    o.batches = 2;
    refused_opening(o, "ids.bin: token 17 is 17, outside the model's vocabulary of 17");
    made.first = 0xfffffff0u, made.modulus = 0xffffffffu;
    refused_opening(opening(make_shard("ids.bin", made)),
                    "token 0 is 4294967280, outside the model's vocabulary of 50000");
}

static void opened_twice(const void *context) {
    const DataSettings settings = settings_of(1, 16, 50000);
    dataloader_open((const char *const *)context, 2, &settings);
}

TEST(files_named_twice) {
    const char *paths[2];
    paths[0] = make_shard("twice.bin", shard16(33)), paths[1] = scratch_path("[t]wice.bin");
    expect_refused(opened_twice, paths, EXIT_RUNTIME, "twice.bin is named twice");
    paths[1] = scratch_path("link.bin");
    assert_int_equal(symlink(paths[0], paths[1]), 0);
    expect_refused(opened_twice, paths, EXIT_RUNTIME, "twice.bin are the same file, which would count twice");
}

// ---- batches without data -------------------------------------------------------------------------------------------
TEST(random_batches) {
    enum { B = 4, T = 1000, V = 50 };
    size_t seen[V] = {0};
    SCOPED_BATCH a = batch_allocate(B * T, B), other = batch_allocate(B * T, B), longer = batch_allocate(2 * T, 1);
    batch_random(&a, B, T, 0, V, 42, 0), batch_random(&other, B, T, 0, V, 43, 0),
        batch_random(&longer, 1, 2 * T, 0, V, 42, 0);
    for (size_t t = 0; t < B * T; t++) { // any part of the program would draw the same
        const size_t index = t / T * (T + 1) + t % T;
        assert_int_equal(a.tokens[t], random_below(42, RANDOM_STREAM_TOKENS, index, V));
        assert_int_equal(a.targets[t], random_below(42, RANDOM_STREAM_TOKENS, index + 1, V));
        assert_int_equal(a.position[t], t % T);
        seen[a.tokens[t]]++;
    }
    for (size_t t = 0; t < V; t++) assert_in_range(seen[t], 40, 130); // 80 expected of each, deviation 8.9
    assert_true(batch_count(&a).tokens == (double)(B * T));
    assert_memory_not_equal(a.tokens, other.tokens, B * T * 4);
    assert_memory_equal(a.tokens, longer.tokens, T * 4); // the first document does not depend on T
}

TEST(counted_targets) {
    SCOPED_BATCH batch = batch_allocate(6, 3);
    static const float weights[] = {1, 1, 0.5f, 2, 7, 0};
    static const int32_t targets[] = {3, -1, 0, 4, -1, 9}, positions[] = {0, 1, 2, 0, 0, 1};
    memcpy(batch.loss_weight, weights, sizeof(weights)), memcpy(batch.targets, targets, sizeof(targets));
    batch.document_start[1] = 3, batch.document_start[2] = 4;
    batch_set_positions(&batch);
    assert_memory_equal(batch.position, positions, sizeof(positions));
    assert_int_equal(batch.document_start[3], 6);
    batch_allocate_answers(&batch, 0, 0);
    batch.group[2] = 1;
    TargetCounts counts = batch_count(&batch);
    assert_true(counts.tokens == 3.5 && counts.documents == 3 && counts.groups == 2); // counts the one of weight 0
    assert_true(batch.document_weight[0] == 1.5 && batch.document_weight[1] == 2 && batch.document_weight[2] == 0);
}

// ---- packing bytes --------------------------------------------------------------------------------------------------
static void pack(const void *context) {
    char *copy = strdup((const char *)context), *argv[16];
    int argc = 1;
    argv[0] = copy;
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    argv[argc] = NULL;
    if (pack_bytes_main(argc, argv)) exit(99);
    free(copy);
}

static const char *pack_line(const char *format, ...) {
    char *line = (char *)case_memory(4096);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, 4096, format, arguments);
    va_end(arguments);
    return line;
}

static void packed(const char *line, const char *words) {
    const Child *child = run_child(pack, line);
    if (child->code || !strstr(child->out, words)) test_fail("%s%s", child->err, child->out);
}

static unsigned char *shard_ids(const char *path, size_t *count) {
    size_t bytes;
    const unsigned char *image = (const unsigned char *)read_whole(path, &bytes);
    unsigned char *ids = (unsigned char *)case_memory(bytes);
    uint32_t header[3];
    memcpy(header, image, 12);
    assert_true(header[0] == 20240520 && header[1] == 1 && 1024 + 2 * (size_t)header[2] == bytes);
    for (size_t i = 12; i < 1024; i++) assert_int_equal(image[i], 0);
    for (size_t i = 0; i < header[2]; i++) {
        ids[i] = image[1024 + 2 * i];
        assert_int_equal(image[1024 + 2 * i + 1], 0);
    }
    *count = header[2];
    return ids;
}

TEST(bytes_become_a_shard) {
    unsigned char every[256], pairs[3000];
    const char *out = scratch_path("bytes.bin"), *a = scratch_path("a.txt"), *b = scratch_path("b.txt");
    const char *copy = scratch_path("copy.txt"), *none = scratch_path("none.txt"), *list = scratch_path("list");
    const char *names = pack_line("%s\n%s", b, none);
    size_t count;
    for (size_t i = 0; i < 256; i++) every[i] = (unsigned char)i;
    write_file(a, every, 256), write_file(copy, every, 256), write_file(b, "text\n", 5), write_file(none, "", 0);
    write_file(list, names, strlen(names));
    packed(pack_line("--out %s %s %s --list %s", out, a, copy, list), "files: 2, copies left out: 1");
    unsigned char *ids = shard_ids(out, &count);
    assert_int_equal(count, 261);
    assert_memory_equal(ids, every, 256);
    assert_memory_equal(ids + 256, "text\n", 5);
    assert_int_equal(system(pack_line("test -z \"$(ls '%s' | grep tmp)\"", scratch_folder())), 0); // no temporary
    for (size_t i = 0; i < sizeof(pairs); i++) pairs[i] = i % 3 < 2 ? 'a' : 'b'; // 2000 of 2999 follow an a: log 2
    write_file(a, pairs, sizeof(pairs));
    packed(pack_line("--out %s %s", out, a), "unigram entropy 0.6365 nats per byte, bigram 0.4623");
    packed(pack_line("--out %s --seq-len 64 %s", out, a), "bytes.bin: 2945 bytes"); // 46 x 64, and a last target
}

TEST(validation_is_cut_out_of_the_text) {
    size_t length = 100003, train, val, t = 0, v = 0;
    unsigned char *text = (unsigned char *)case_memory(length);
    const char *source = scratch_path("long.txt"), *out = scratch_path("t.bin"), *val_out = scratch_path("v.bin");
    for (size_t i = 0; i < length; i++) text[i] = (unsigned char)test_random_below(4); // entropy log 4
    write_file(source, text, length);
    packed(pack_line("--out %s --val-out %s --val-fraction 0.1 %s", out, val_out, source),
           "t.bin: 90003 bytes, unigram entropy 1.386");
    unsigned char *train_ids = shard_ids(out, &train), *val_ids = shard_ids(val_out, &val);
    assert_int_equal(train + val, length);
    assert_in_range(val, 9990, 10000);
    for (size_t i = 0; i < 8; i++) { // each eighth: its first nine tenths train, the rest validates
        size_t piece = i < 7 ? 12500 : 12503, held = 1250;
        assert_memory_equal(train_ids + t, text + 12500 * i, piece - held);
        assert_memory_equal(val_ids + v, text + 12500 * i + piece - held, held);
        t += piece - held, v += held;
    }
    packed(pack_line("--out %s --val-out %s --val-fraction 0.1 --seq-len 1000 %s", out, val_out, source),
           "v.bin: 8001 bytes"); // a sequence in each eighth, and a last target
}

TEST(packing_is_refused_in_one_line) {
    const char *text = scratch_path("some.txt"), *out = scratch_path("packed.bin");
    const struct {
        const char *line;
        int code;
        const char *words;
    } rows[] = {{"", EXIT_USAGE, "no --out"},
                {"--out x", EXIT_USAGE, "no text"},
                {"--out", EXIT_USAGE, "--out has no value"},
                {"--in x", EXIT_USAGE, "unknown option --in"},
                {"--out x --val-out x y", EXIT_USAGE, "the same file"},
                {"--out x --val-fraction 1 y", EXIT_USAGE, "between 0 and 1"},
                {pack_line("--out %s /nowhere/at/all", out), EXIT_RUNTIME, "/nowhere/at/all: cannot be opened"},
                {pack_line("--out %s --list /nowhere", out), EXIT_RUNTIME, "/nowhere: cannot be opened"},
                {pack_line("--out /nowhere/x.bin %s", text), EXIT_RUNTIME, "/nowhere/x.bin: cannot be created"},
                {pack_line("--out %s %s", out, scratch_folder()), EXIT_RUNTIME, "is not a regular file"}};
    write_file(text, "abc", 3);
    for (size_t i = 0; i < COUNT_OF(rows); i++) expect_refused(pack, rows[i].line, rows[i].code, rows[i].words);
    assert_true(access(out, F_OK) != 0);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
