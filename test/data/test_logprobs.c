/*
The file of log-probabilities: reads back in any order and range. Refuses damaged and half-written files, and those of
another model, other data, another temperature or length.
*/
#include "test/base/damage.h"
#include "llmc/data/documents.h"

#define TOKENS    10000 // more than twice the read size
#define DOCUMENTS 40
#define VALUES    6606

static LogprobHeader some_header(void) {
    LogprobHeader h = {0};
    h.tokens = TOKENS, h.documents = DOCUMENTS;
    h.model_key = 0x0123456789abcdef, h.data_key = 0xfedcba9876543210;
    h.cut = DOCUMENTS_TRUNCATED, h.seq_len = 300;
    h.dtype = DTYPE_BF16, h.temperature = 0.75;
    logprobs_name(h.model, "some/model");
    return h;
}

// Counted tokens are those not divisible by 3; each has a value of its own. The first 90 are never written.
static float value_of(size_t token) { return token % 3 && token >= 90 ? -0.5f - (float)token / 8 : 0; }

// Writes ranges of all lengths, the later ones first; leaves the file unfinished.
static void write_half(LogprobWriter *w, const char *path) {
    const LogprobHeader h = some_header();
    float value[TOKENS];
    logprobs_create(w, path, &h);
    for (size_t i = 0; i < TOKENS; i++) value[i] = value_of(i);
    for (size_t end = TOKENS, n = 1; end > 90; end -= n, n++) {
        n = min_size(n, end - 90);
        logprobs_write(w, end - n, n, value + end - n);
    }
}

// Writes the whole file, replacing any old one.
static const char *written(const char *name) {
    LogprobWriter w;
    write_half(&w, scratch_path(name));
    logprobs_commit(&w, VALUES);
    return scratch_path(name);
}

static void open_body(const void *path) {
    SCOPED(logprobs_close) LogprobFile f;
    logprobs_open(&f, (const char *)path);
}

TEST(what_is_written_is_read) {
    const char *path = written("round.logprobs");
    LogprobHeader expected = some_header();
    float value[TOKENS];
    SCOPED(logprobs_close) LogprobFile f;
    written("round.logprobs"); // again, over the first
    logprobs_open(&f, path);
    memcpy(expected.begin.magic, "SBPLOGPS", 8);
    expected.begin.version = 2, expected.begin.byte_order = 0x01020304, expected.begin.header_bytes = 256;
    expected.begin.bytes = f.file.bytes, expected.targets = VALUES;
    expected.body_crc = f.header.body_crc, expected.header_crc = f.header.header_crc;
    assert_memory_equal(&f.header, &expected, sizeof(expected));
    assert_int_equal(f.file.bytes, 256 + 4 * TOKENS);
    allocation_guard = 1;
    for (size_t k = 0; k < 300; k++) {
        size_t first = test_random_below(TOKENS + 1), n = test_random_below(TOKENS + 1 - first);
        logprobs_read(&f, first, n, value);
        for (size_t i = 0; i < n; i++)
            if (value[i] != value_of(first + i)) test_fail("token %zu is %g", first + i, (double)value[i]);
    }
    allocation_guard = 0;
}

static void read_beyond(const void *path) {
    LogprobFile f;
    float value[8];
    logprobs_open(&f, (const char *)path);
    logprobs_read(&f, TOKENS - 7, 8, value);
}

TEST(ranges_end_with_the_data) {
    expect_refused(read_beyond, written("beyond.logprobs"), 1, "has no log-probabilities of tokens 9993 to 10001");
}

// ---- damage -------------------------------------------------------------------------------------------------------
static void reseal(char *bytes) {
    LogprobHeader *h = (LogprobHeader *)(void *)bytes;
    h->header_crc = logprobs_header_crc(h);
}

static void mend_header(const char *path, char *bytes, size_t count, size_t before) {
    (void)path, (void)count, (void)before;
    reseal(bytes);
}

static void mend_all(const char *path, char *bytes, size_t count, size_t before) {
    ((LogprobHeader *)(void *)bytes)->body_crc = crc32_of(0, bytes + 256, count - 256);
    mend_header(path, bytes, count, before);
}

#define BAD "bad.logprobs"
static DamageSuite damage_suite(void (*mend)(const char *, char *, size_t, size_t)) {
    const DamageSuite suite = {scratch_folder(), open_body, written(BAD), mend, 0};
    return suite;
}

TEST(every_byte_of_the_header_counts) {
    const DamageSuite suite = damage_suite(NULL);
    expect_bits_found(&suite, BAD, 0, 256, -1, BAD ": ");
    expect_flips_found(&suite, BAD, 80, BAD ": ");
}

#define FIELD(at, value, bytes, words) OTHER_NUMBER(BAD, at, bytes, value, words)
TEST(every_field_is_checked_with_a_right_checksum) {
    static const Damage fields[] = {
        FIELD(0, 'X', 1, "does not begin with SBPLOGPS, so it is not a file of log-probabilities"),
        FIELD(8, 1, 4, "version 1 of a file of log-probabilities is unknown, expected 2"),
        FIELD(12, 0x04030201, 4, "was written on a big-endian machine"),
        FIELD(12, 0x01020305, 4, "its byte order mark is 01020305, expected 01020304"),
        FIELD(16, 128, 8, "its header says that it has 128 bytes, expected 256"),
        FIELD(24, 256 + 4 * TOKENS + 4, 8, "its header says 40260 bytes, but the file has 40256; it is truncated"),
        FIELD(24, 1, 8, "it is not what its header says"),
        FIELD(32, TOKENS + 1, 8, "the number of tokens"),
        FIELD(32, (1ull << 62) + TOKENS, 8, "the number of tokens"),
        FIELD(40, 0, 8, "the number of documents"),
        FIELD(40, TOKENS / 2 + 1, 8, "the number of documents"),
        FIELD(48, TOKENS - DOCUMENTS + 1, 8, "the number of log-probabilities"),
        FIELD(48, VALUES - 1, 8, "holds 6606 log-probabilities, its header says 6605"),
        FIELD(72, 0, 8, "the length of cut documents"),
        FIELD(80, 0, 4, "the length of cut documents"),
        FIELD(80, 3, 4, "the kind of cut of documents"),
        FIELD(84, 3, 4, "the element type"),
        FIELD(88, 0, 8, "the temperature"),
        FIELD(88, 0x7ff0000000000000, 8, "the temperature"),
        FIELD(88, 0xbff0000000000000, 8, "the temperature"),
        FIELD(88, 0x7ff8000000000000, 8, "the temperature"),
        FIELD(96, 0, 4, "its checksum is wrong, the file is damaged"),
        FIELD(168, 1, 1, "number of tokens"),
        FIELD(172, 1, 1, "the rest, which must be zeros,"),
        FIELD(176, 1, 1, "the rest, which must be zeros,"),
        FIELD(207, 1, 1, "the rest, which must be zeros,"),
        FIELD(208, 1, 1, "the rest, which must be zeros,"),
        FIELD(255, 1, 1, "the rest, which must be zeros,")};
    const DamageSuite suite = damage_suite(mend_header);
    expect_damage_found(&suite, fields, COUNT_OF(fields));
}

static void open_named(const char *name, LogprobFile *f) {
    const char *path = written("name.logprobs");
    size_t size;
    char *bytes = read_whole(path, &size);
    memcpy(bytes + 104, name, 64);
    reseal(bytes);
    write_file(path, bytes, size);
    logprobs_open(f, path);
}

static void open_without_end(const void *context) {
    LogprobFile f;
    char name[64];
    (void)context;
    memset(name, 'x', 64);
    open_named(name, &f);
}

TEST(names_are_safe) {
    static const char *const names[][2] = {
        {"short", "short"},
        {"0123456789012345678901234567890123456789012345678901234567890123456789/end",
         "1234567890123456789012345678901234567890123456789"
         "0123456789/end"},
        {"\303\24401234567890123456789012345678901234567890123456789012345678901", // "ä" and 62 more
         "01234567890123456789012345678901234567890123456789012345678901"}};
    char name[64] = "a\nb\033[1m";
    SCOPED(logprobs_close) LogprobFile f;
    expect_refused(open_without_end, NULL, 1, "the name of the model in its header is invalid");
    open_named(name, &f);
    assert_string_equal(f.header.model, "a?b?[1m");
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        logprobs_name(name, names[i][0]);
        assert_string_equal(name, names[i][1]);
    }
}

TEST(every_value_is_checked) {
#define VALUE(bits, words) FIELD(256 + 4 * 4444, bits, 4, words)
    static const Damage values[] = {
        VALUE(0x7fc00000, "the log-probability of token 4444 is "), // NaN
        VALUE(0x7f800000, "the log-probability of token 4444 is inf"),
        VALUE(0xff800000, "the log-probability of token 4444 is -inf; it must be finite and at most 0"),
        VALUE(0x3a902de0, "the log-probability of token 4444 is 0.0011"),
        VALUE(0x3a6bedfa, NULL),  // 0.0009
        VALUE(0xf149f2ca, NULL)}; // -1e30
    const DamageSuite unmended = damage_suite(NULL), suite = damage_suite(mend_all);
    expect_damage_found(&suite, values, COUNT_OF(values));
    for (size_t i = 0; i < COUNT_OF(values); i++) { // the checksum is checked first
        Damage value = values[i];
        value.words = BAD ": its checksum is wrong";
        expect_damage_found(&unmended, &value, 1);
    }
}

TEST(any_length_but_the_right_one) {
    static const Damage lengths[] = {
        CUT_TO(BAD, 0, BAD ": is empty"),
        CUT_TO(BAD, 255, "bytes are less than the header of a file of log-probabilities (256)"),
        CUT_TO(BAD, 256, "it is truncated"),
        CUT_TO(BAD, 40255, "it is truncated"),
        EXTENDED_BY(BAD, 1, "it is not what its header says"),
        EXTENDED_BY(BAD, 39744, "it is not what its header says")};
    const DamageSuite suite = damage_suite(NULL);
    expect_damage_found(&suite, lengths, COUNT_OF(lengths));
    expect_refused(open_body, scratch_folder(), 1, "is not a regular file");
    expect_refused(open_body, scratch_path("nowhere"), 1, "nowhere: cannot be opened: No such file");
}

// ---- half written -------------------------------------------------------------------------------------------------
static void killed_half_way(const void *path) {
    LogprobWriter w;
    write_half(&w, (const char *)path);
    kill(getpid(), SIGKILL);
}

TEST(a_killed_writer_leaves_nothing_under_the_name) {
    const char *path = scratch_path("killed.logprobs");
    size_t size, again;
    assert_int_equal(run_child(killed_half_way, path)->code, 1000 + SIGKILL);
    assert_false(path_exists(path));
    char *before = read_whole(written("killed.logprobs"), &size);
    assert_int_equal(run_child(killed_half_way, path)->code, 1000 + SIGKILL);
    assert_memory_equal(read_whole(path, &again), before, size); // the old file is unchanged
}

static void write_there(const void *path) {
    LogprobWriter w;
    write_half(&w, (const char *)path);
}

TEST(folders_are_not_replaced) { expect_refused(write_there, scratch_folder(), 1, "is a directory"); }

// ---- other models and data ----------------------------------------------------------------------------------------
typedef struct {
    const char *path;
    LogprobHeader wanted;
} Wanted;

static void check_body(const void *context) {
    const Wanted *w = (const Wanted *)context;
    SCOPED(logprobs_close) LogprobFile f;
    logprobs_open(&f, w->path);
    logprobs_check(&f, &w->wanted, "train-00000.bin");
}

TEST(another_model_or_data_is_refused) {
#define WANTED(field, value) offsetof(LogprobHeader, field), sizeof(((LogprobHeader *)0)->field), value
    static const struct {
        size_t at, bytes;
        uint64_t value;
        const char *words; // NULL: the file is accepted
    } rows[] = {
        {WANTED(temperature, 0x3fe8000000000000), NULL}, // 0.75, as written
        {WANTED(model_key, 0), NULL},                    // any
        {WANTED(model_key, 0x1111),
         "whose.logprobs: is by another model, some/model (bf16, 0123456789abcdef); the run's reference is other/model "
         "(bf16, 0000000000001111); run logprobs again"},
        {WANTED(data_key, 0xfedcba9876543211),
         "whose.logprobs: was computed from other data or tokens: 10000 tokens in 40 documents (fedcba9876543210), "
         "train-00000.bin has 10000 in 40 (fedcba9876543211); run logprobs on"},
        {WANTED(tokens, TOKENS + 1), "train-00000.bin has 10001 in 40"},
        {WANTED(documents, DOCUMENTS - 1), "train-00000.bin has 10000 in 39"},
        {WANTED(temperature, 0x3ff0000000000000),
         "at temperature 0.75, this run has temperature 1; compute them again with --temperature 1"},
        {WANTED(cut, DOCUMENTS_SPLIT),
         "of documents that are truncated to 300 positions, this run has them split into 300 positions"},
        {WANTED(cut, DOCUMENTS_WHOLE), "truncated to 300 positions, this run has them whole"}};
    const char *path = written("whose.logprobs");
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        Wanted w = {path, some_header()};
        logprobs_name(w.wanted.model, "other/model");
        memcpy((char *)&w.wanted + rows[i].at, &rows[i].value, rows[i].bytes);
        if (rows[i].words)
            expect_refused(check_body, &w, 1, rows[i].words);
        else
            check_body(&w);
    }
}

TEST(documents_cut_elsewhere_are_refused) {
    enum { WHOLE = DOCUMENTS_WHOLE, SPLIT = DOCUMENTS_SPLIT, TRUNCATED = DOCUMENTS_TRUNCATED };
    static const struct {
        uint32_t have, wanted;
        size_t wanted_length; // had is 9
        int serves;
    } pair[] = {{WHOLE, WHOLE, 0, 1},     {WHOLE, TRUNCATED, 9, 1},     {WHOLE, SPLIT, 9, 0},
                {SPLIT, SPLIT, 9, 1},     {SPLIT, SPLIT, 8, 0},         {SPLIT, TRUNCATED, 9, 0},
                {SPLIT, WHOLE, 0, 0},     {TRUNCATED, TRUNCATED, 9, 1}, {TRUNCATED, TRUNCATED, 8, 1},
                {TRUNCATED, SPLIT, 9, 0}, {TRUNCATED, WHOLE, 0, 0},     {TRUNCATED, TRUNCATED, 10, 0}};
    for (size_t i = 0; i < COUNT_OF(pair); i++) {
        LogprobHeader have = some_header(), wanted = some_header();
        have.cut = pair[i].have, have.seq_len = have.cut == WHOLE ? 0 : 9;
        wanted.cut = pair[i].wanted, wanted.seq_len = pair[i].wanted_length;
        if (logprobs_cut_serves(&have, &wanted) != pair[i].serves) test_fail("pair %zu", i);
    }
}

// ---- a teacher's likeliest tokens -----------------------------------------------------------------------------------
enum { TEACHER_TOKENS = 500, TEACHER_K = 3, TEACHER_SEQUENCES = 5 };

static LogprobHeader teacher_header(void) {
    LogprobHeader h = some_header();
    h.tokens = TEACHER_TOKENS, h.k = TEACHER_K, h.vocabulary = 96, h.order = 7;
    return h;
}

static int32_t teacher_id(size_t token, size_t j) { return (int32_t)(token % 30 + 20 * j); }

// Writes sequences of 100 tokens up to `end`; every third token is no target.
static void teacher_write_until(const char *path, size_t end, int commits) {
    TeacherWriter w = {0};
    const LogprobHeader h = teacher_header();
    teacher_create(&w, path, &h);
    while (w.header.done < end) {
        for (size_t t = w.header.done * 100; t < (w.header.done + 1) * 100; t++) {
            int32_t id[TEACHER_K];
            float logp[TEACHER_K];
            for (size_t j = 0; j < TEACHER_K; j++) id[j] = teacher_id(t, j), logp[j] = -1 - (float)(t + j) / 512;
            if (t % 3) teacher_write(&w, t, -0.5f - (float)t / 64, (float)t / 1000, id, logp);
        }
        teacher_advance(&w, -2, 66);
        teacher_note(&w);
    }
    if (commits) {
        teacher_commit(&w);
        return;
    }
    kill(getpid(), SIGKILL);
}

static void teacher_killed(const void *path) { teacher_write_until((const char *)path, 3, 0); }
static void teacher_begun_otherwise(const void *path) {
    TeacherWriter w = {0};
    LogprobHeader h = teacher_header();
    h.data_key++;
    teacher_create(&w, (const char *)path, &h);
}

static const char *teacher_written(const char *name) {
    teacher_write_until(scratch_path(name), TEACHER_SEQUENCES, 1);
    return scratch_path(name);
}

static void teacher_open_path(const void *path) {
    LogprobFile f = {0};
    teacher_open(&f, (const char *)path);
    logprobs_close(&f);
}

// Reads all targets, as a batch of one document.
static void teacher_read_all(const void *path) {
    LogprobFile f = {0};
    Batch batch = batch_allocate(TEACHER_TOKENS, 1);
    teacher_open(&f, (const char *)path);
    batch.teacher = teacher_allocate(batch.N, f.header.k);
    batch.reference = (float *)checked_calloc(batch.N, sizeof(float), "a reference");
    for (size_t t = 0; t < batch.N; t++) batch.targets[t] = t % 3 ? 1 : -1;
    teacher_read(&f, 0, &batch, 0, batch.N);
    for (size_t t = 0; t < batch.N; t++)
        for (size_t j = 0; j < TEACHER_K && t % 3; j++)
            if (batch.teacher.id[t * TEACHER_K + j] != teacher_id(t, j) || batch.teacher.tail[t] != (float)t / 1000 ||
                batch.teacher.logp[t * TEACHER_K + j] != -1 - (float)(t + j) / 512 ||
                batch.reference[t] != -0.5f - (float)t / 64)
                test_fail("token %zu was read otherwise", t);
    batch_free(&batch), logprobs_close(&f);
}

TEST(a_teacher_is_read_as_written) {
    const char *path = teacher_written("teacher.logprobs");
    struct stat status;
    teacher_read_all(path);
    assert_true(stat(path, &status) == 0 && status.st_size == 256 + TEACHER_TOKENS * (12 + 8 * TEACHER_K));
    assert_false(path_exists(scratch_path("teacher.logprobs.part")));
    expect_refused(open_body, path, 1, "holds the 3 likeliest tokens of a teacher; it belongs to --teacher-logprobs");
    teacher_open_path(written("plain.logprobs"));
}

// A killed writer continues where it was, to the same bytes; another one is refused.
TEST(a_teacher_is_resumed) {
    size_t size, again;
    const char *path = scratch_path("resumed.logprobs");
    char *whole = read_whole(teacher_written("teacher.logprobs"), &size);
    assert_int_equal(run_child(teacher_killed, path)->code, 1000 + SIGKILL);
    assert_false(path_exists(path));
    expect_refused(teacher_open_path, scratch_path("resumed.logprobs.part"), 1,
                   "is not finished: 3 sequences are done; repeat its command");
    expect_refused(teacher_begun_otherwise, path, 1, "was begun with another model, other data or other options");
    teacher_write_until(path, TEACHER_SEQUENCES, 1);
    assert_memory_equal(read_whole(path, &again), whole, size);
    assert_int_equal(again, size);
}

TEST(a_damaged_record_is_found) {
    const char *path = teacher_written("damaged.logprobs");
    size_t size;
    char *bytes = read_whole(path, &size);
    const size_t record = 256 + 100 * (12 + 8 * TEACHER_K);
    bytes[record + 20] ^= 1;
    output_write_file(path, bytes, size);
    expect_refused(teacher_read_all, path, 1, "the checksum of token 100 is wrong, the file is damaged");
    memset(bytes + record, 0, 12 + 8 * TEACHER_K);
    output_write_file(path, bytes, size);
    expect_refused(teacher_read_all, path, 1, "token 100 is a target here, but not there");
    bytes[56] ^= 1;
    output_write_file(path, bytes, size);
    expect_refused(teacher_open_path, path, 1, "checksum of its header is wrong");
}

// ---- the teacher's tokenizer ----------------------------------------------------------------------------------------
// Copies a tokenizer of test/golden with another fingerprint, as if its template or special tokens differed.
static const char *tokenizer_with(const char *style, const char *name, uint64_t fingerprint) {
    char from[128];
    size_t size;
    snprintf(from, sizeof(from), "test/golden/tokenizers/%s.tok", style);
    char *bytes = read_whole(from, &size);
    crc32_prepare();
    memcpy(bytes + 24, &fingerprint, 8);
    const uint32_t crc = crc32_of(0, bytes + 16, size - 16);
    memcpy(bytes + 12, &crc, 4);
    write_file(scratch_path(name), bytes, size);
    return scratch_path(name);
}

// A tokenizer with the pieces of the one that made a shard passes, wherever that one is known from.
TEST(a_tokenizer_with_the_same_pieces) {
    char path[PATH_MAX], *made, *same, *other;
    snprintf(path, sizeof(path), "%s", scratch_path("shard.bin"));
    TokenShard shard = {0};
    shard.path = path, shard.tokenizer = 7;
    made = checked_strdup(tokenizer_with("qwen2", "made.tok", 7));
    same = checked_strdup(tokenizer_with("qwen2", "same.tok", 8));
    other = checked_strdup(tokenizer_with("gpt2", "other.tok", 9));
    assert_null(shard_tokenizer_fault(&shard, made, NULL));
    assert_null(shard_tokenizer_fault(&shard, same, made));
    assert_string_equal(shard_tokenizer_fault(&shard, other, made), "has other pieces than that of the data");
    assert_non_null(strstr(shard_tokenizer_fault(&shard, same, NULL), "is not that of the data, whose own"));
    assert_non_null(strstr(shard_tokenizer_fault(&shard, same, other), "is not that of the data, whose own"));
    tokenizer_with("qwen2", TOKENIZER_NAME, 7); // next to the shard
    assert_null(shard_tokenizer_fault(&shard, same, NULL));
    assert_string_equal(shard_tokenizer_fault(&shard, other, ""), "has other pieces than that of the data");
    free(made), free(same), free(other);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
