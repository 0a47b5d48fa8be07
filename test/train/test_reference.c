/*
Log-probabilities computed with a model: keys that change exactly with what they name; packed and cut documents against
each document by itself; and a training run's reference: computed once, found again, never half of one. Its use by a run
is tested in test_logprobs.sh.
*/
#include "test/data/document_files.h"
#include "llmc/run/threads.h"
#include "llmc/run/allocate.h"
#include "llmc/train/reference.h"
#include <signal.h>

#define VOCABULARY 96
#define LAYERS(n)                                                                                                      \
    "llama,hidden_size=32,intermediate_size=48,num_hidden_layers=" n                                                   \
    ",num_attention_heads=4,num_key_value_heads=2,vocab_size=96"
#define TINY LAYERS("2")

// ---- a run without a first step -----------------------------------------------------------------------------------
typedef struct {
    Options options;
    Run run;
    DataLoader data;
    Batch batch;
    uint64_t key;
} Opened;

typedef struct {
    const char *init, *shards, *T, *B, *long_documents, *shuffle, *out, *seed, *method, *chunk;
    DataUse use;
    const Objective *objective;
} Opening;

static Opening some_setup(const char *shards) {
    Opening s = {TINY, shards, "200", "1", "split", "off", NULL, "5", "stream", "64", DATA_TRAINS, NULL};
    return s;
}

static uint64_t key_of(const Opened *o, uint64_t adapters) {
    return model_key(&o->run.model, NULL, sharding_whole(), ops_device, o->run.streambp.memory.weights, adapters);
}

// Opens a run; lasts until the next one, as options_parse keeps pointers to its arguments.
static Opened *opened(const Opening *s) {
    static char word[32][512];
    static char *argv[32];
    static Opened o;
    const char *given[] = {"train",     "train",    "--init",  s->init, "--data",   s->shards,
                           "--seq-len", s->T,       "--batch", s->B,    "--long",   s->long_documents,
                           "--shuffle", s->shuffle, "--seed",  s->seed, "--method", s->method,
                           "--chunk",   s->chunk,   "--quiet", "--out", s->out};
    const int argc = (int)COUNT_OF(given) - (s->out ? 0 : 2);
    for (int i = 0; i < argc; i++) {
        snprintf(word[i], sizeof(word[i]), "%s", given[i]);
        argv[i] = word[i];
    }
    argv[argc] = NULL;
    memset(&o, 0, sizeof(o));
    o.options = options_parse(argc, argv);
    progress_off = 1;
    run_open(&o.run, &o.options, NULL);
    DataSettings settings = data_settings(o.options.batch, o.options.seq_len);
    settings.vocab_size = VOCABULARY, settings.shuffle = shuffle_from_options(&o.options);
    if (!strcmp(s->long_documents, "truncate")) settings.long_documents = LONG_TRUNCATE;
    settings.use = s->use, settings.objective = s->objective;
    o.data = dataloader_open(o.options.data.path, o.options.data.count, &settings);
    run_allocate(&o.run, o.data.bound);
    o.batch = batch_for(&o.data);
    run_load_weights(&o.run);
    o.key = key_of(&o, 0);
    return &o;
}

static void closed(Opened *o) {
    batch_free(&o->batch);
    dataloader_close(&o->data);
    run_close(&o->run);
}

// Writes a shard of random documents; pairs and groups have four each.
static const char *random_shard(const char *name, ShardKind kind, const size_t *tokens, size_t documents) {
    MadeDocument *document = (MadeDocument *)case_memory(documents * sizeof(MadeDocument));
    MadeShard made = made_shard(2);
    made.vocabulary = VOCABULARY, made.kind = kind;
    for (size_t d = 0; d < documents; d++) {
        uint32_t *id = (uint32_t *)case_memory(tokens[d] * sizeof(uint32_t));
        document[d] = made_document(0, tokens[d], d % 3 * 3);
        for (size_t i = 0; i < tokens[d]; i++) id[i] = (uint32_t)test_random_below(VOCABULARY);
        document[d].id = id, document[d].group = d / 4, document[d].reward = (float)d;
    }
    return write_shard(name, &made, document, documents);
}

// Writes a folder of two shards; returns a pattern.
static const char *random_data(const char *folder) {
    static const size_t first[] = {40, 65, 51, 200, 45, 2, 130}, second[] = {5, 33, 64, 66, 129};
    char name[128];
    assert_int_equal(mkdir(scratch_path(folder), 0755), 0);
    snprintf(name, sizeof(name), "%s/b.bin", folder);
    random_shard(name, KIND_DOCUMENTS, second, 5);
    snprintf(name, sizeof(name), "%s/a.bin", folder);
    random_shard(name, KIND_DOCUMENTS, first, 7);
    snprintf(name, sizeof(name), "%s/*.bin", folder);
    return scratch_path(name);
}

// ---- keys ---------------------------------------------------------------------------------------------------------
// Returns the key after flipping one bit of one weight on the device.
static uint64_t key_with_a_flipped_bit(Opened *o, size_t element) {
    const size_t size = dtype_size(o->run.model.dtype);
    char *at = o->run.streambp.memory.weights + element * size;
    unsigned char value[8];
    uint64_t key = 0;
    for (int flip = 0; flip < 2; flip++) {
        key = flip ? key_of(o, 0) : 0;
        ops_device->copy_out(value, at, size);
        value[0] ^= 1;
        ops_device->copy_in(at, value, size);
    }
    return key;
}

TEST(key_of_the_model) {
    Opening s = some_setup(random_data("keys"));
    Opened *o = opened(&s);
    const uint64_t key = o->key;
    const size_t elements = o->run.model.elements;
    assert_true(key != 0);
    for (size_t i = 0; i < 40; i++)
        if (key_with_a_flipped_bit(o, i == 0 ? elements - 1 : i == 1 ? 0 : test_random_below(elements)) == key)
            test_fail("a changed weight has the same key");
    omp_set_num_threads(1);
    assert_true(key_of(o, 0) == key && key_of(o, 1) != key && key_of(o, 2) != key_of(o, 1));
    o->run.model.config.rope_theta *= 2; // the same weights in another model
    assert_true(key_of(o, 0) != key);
    closed(o);
    s.seed = "6";
    o = opened(&s);
    assert_true(o->key != key);
    closed(o);
    s.seed = "5", s.B = "3", s.T = "100"; // not part of the model
    o = opened(&s);
    assert_true(o->key == key);
    closed(o);
}

static uint64_t data_key_of(const Opening *s) {
    Opened *o = opened(s);
    uint64_t key = dataloader_content_key(&o->data);
    closed(o);
    return key;
}

TEST(key_of_the_data) {
    static const size_t lengths[] = {40, 30};
    Opening s = some_setup(random_data("content"));
    const uint64_t key = data_key_of(&s);
    s.B = "2", s.T = "100", s.shuffle = "on", s.long_documents = "truncate", s.seed = "6",
    s.init = TINY ",rope_theta=9";
    assert_true(data_key_of(&s) == key); // no part of it is the data
    assert_int_equal(rename(scratch_path("content/a.bin"), scratch_path("content/c.bin")), 0);
    assert_true(data_key_of(&s) != key); // the other one is first
    assert_int_equal(rename(scratch_path("content/c.bin"), scratch_path("content/a.bin")), 0);
    assert_true(data_key_of(&s) == key);
    random_shard("content/b.bin", KIND_DOCUMENTS, lengths, 2);
    assert_true(data_key_of(&s) != key);
}

// ---- packed and cut documents -------------------------------------------------------------------------------------
static float *computed(const Opening *s, const char *name, size_t *tokens, LogprobSum *sum) {
    Opened *o = opened(s);
    LogprobHeader header = logprobs_header(&o->run, &o->data, o->key);
    LogprobWriter w;
    LogprobFile f;
    logprobs_create(&w, scratch_path(name), &header);
    *sum = logprobs_compute(&w, &o->run.streambp, &o->data, &o->batch, assign_step(world_alone(), 1));
    logprobs_open(&f, scratch_path(name));
    logprobs_check(&f, &header, s->shards);
    *tokens = (size_t)f.header.tokens;
    assert_int_equal(f.header.targets, sum->counted);
    float *value = (float *)case_memory(*tokens * sizeof(float));
    logprobs_read(&f, 0, *tokens, value);
    logprobs_close(&f);
    closed(o);
    return value;
}

// Computes every document in a stream of its own, with all targets, in the order of the shards.
static float *one_by_one(const Opening *s, size_t *tokens) {
    Opened *o = opened(s);
    const size_t documents = o->data.documents;
    float *value = (float *)case_memory(2000 * sizeof(float));
    size_t first = 1;
    assert_int_equal(dataloader_batches(&o->data), documents);
    for (size_t i = 0; i < documents; i++, first++) { // a document's first token is no target
        dataloader_next(&o->data, &o->batch);
        forward_logprobs(&o->run.streambp, &o->batch, 1, 0);
        for (size_t t = 0; t < o->batch.N; t++, first++)
            if (o->batch.targets[t] >= 0)
                value[first] = (float)value_at(o->run.streambp.now.host_sums, dtype_of_sums(o->run.model.dtype), t);
    }
    *tokens = first - 1;
    closed(o);
    return value;
}

static void expect_same_values(const float *a, const float *b, size_t count, const char *what) {
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(a[i] - b[i]) < 2e-5f) || (a[i] == 0) != (b[i] == 0))
            test_fail("%s: token %zu is %g, expected %g", what, i, (double)a[i], (double)b[i]);
}

TEST(packed_documents_have_their_own_log_probabilities) {
    static const size_t apart[] = {150, 120, 199, 101, 160}; // no two fit into one stream of 200
    Opening s = some_setup(random_data("walk"));
    size_t tokens, count, set = 0;
    LogprobSum sum;
    double total = 0;
    random_shard("walk/a.bin", KIND_DOCUMENTS, apart, 5);
    random_shard("walk/b.bin", KIND_DOCUMENTS, apart, 4);
    float *expected = one_by_one(&s, &count);
    float *value = computed(&s, "alone.logprobs", &tokens, &sum);
    assert_int_equal(tokens, count);
    expect_same_values(value, expected, tokens, "one document in a stream");
    for (size_t i = 0; i < tokens; i++) total += (double)value[i], set += value[i] != 0;
    assert_int_equal(set, sum.counted);
    assert_true(fabs(total - sum.sum) < 1e-4 * fabs(sum.sum));
    s.B = "4";
    expect_same_values(computed(&s, "packed.logprobs", &tokens, &sum), expected, count, "four in a stream");
    s.shuffle = "on";
    expect_same_values(computed(&s, "shuffled.logprobs", &tokens, &sum), expected, count, "in another order");
}

TEST(cut_documents_have_those_of_their_pieces) {
    Opening s = some_setup(random_data("cut"));
    size_t tokens, same = 0, zero = 0;
    LogprobSum sum;
    float *whole = computed(&s, "whole.logprobs", &tokens, &sum);
    s.T = "64", s.B = "2", s.shuffle = "on";
    float *split = computed(&s, "split.logprobs", &tokens, &sum);
    s.long_documents = "truncate";
    float *truncated = computed(&s, "truncated.logprobs", &tokens, &sum);
    for (size_t i = 0; i < tokens; i++) {
        assert_true((whole[i] == 0) == (split[i] == 0)); // the same targets
        if (truncated[i] == 0) continue;
        assert_true(fabsf(truncated[i] - whole[i]) < 2e-5f && fabsf(truncated[i] - split[i]) < 2e-5f);
    }
    for (size_t i = 0; i < tokens; i++)
        same += fabsf(whole[i] - split[i]) < 2e-5f, zero += truncated[i] == 0 && whole[i] != 0;
    assert_true(same < tokens && zero > 100); // after a cut, tokens see less or nothing
}

// The last document of every four has more than 64 positions.
static const char *shard_of_kind(const char *name, ShardKind kind) {
    static const size_t tokens[] = {40, 65, 51, 70, 45, 12, 30, 90, 65, 33, 64, 66};
    return random_shard(name, kind, tokens, COUNT_OF(tokens));
}

TEST(pairs_and_groups_are_documents) {
    static const ShardKind kinds[] = {KIND_PAIRS, KIND_GROUPS};
    static const ObjectiveKind objectives[] = {OBJECTIVE_DPO, OBJECTIVE_GRPO};
    size_t tokens;
    for (size_t k = 0; k < 2; k++) {
        Opening s = some_setup(shard_of_kind("kind.bin", kinds[k]));
        LogprobSum sum, units;
        s.use = DATA_READS, s.long_documents = "truncate", s.T = "64", s.B = "3";
        float *expected = computed(&s, "kind.logprobs", &tokens, &sum);
        Objective objective = {0};
        objective.kind = objectives[k], objective.beta = 0.1;
        s.use = DATA_TRAINS, s.objective = &objective, s.shuffle = "on", s.B = "2"; // two pairs or groups
        float *value = computed(&s, "units.logprobs", &tokens, &units);
        expect_same_values(value, expected, tokens, "units");
        assert_true(units.counted == sum.counted && units.counted > 200);
    }
}

static void overflow(const void *setup) {
    Opened *o = opened((const Opening *)setup);
    LogprobHeader header = logprobs_header(&o->run, &o->data, o->key);
    const size_t head = o->run.model.elements - model_head_offset(&o->run.model);
    float *huge = (float *)case_memory(head * sizeof(float));
    LogprobWriter w;
    for (size_t i = 0; i < head; i++) huge[i] = i % 2 ? 3e38f : -3e38f; // finite, but the logits are not
    ops_device->copy_in(o->run.streambp.memory.weights + model_head_offset(&o->run.model) * sizeof(float), huge,
                        head * sizeof(float));
    logprobs_create(&w, scratch_path("overflow.logprobs"), &header);
    logprobs_compute(&w, &o->run.streambp, &o->data, &o->batch, assign_step(world_alone(), 1));
}

TEST(values_that_are_none_are_refused) {
    Opening s = some_setup(random_data("overflow"));
    expect_refused(overflow, &s, 1, "overflow/a.bin: document 0: the log-probability of its token 1 is ");
    assert_false(path_exists(scratch_path("overflow.logprobs")));
}

// ---- the reference of a run ---------------------------------------------------------------------------------------
static char reference_path[PATH_MAX];

// Prepares the reference, and returns its path in reference_path.
static void prepare(const Opening *s, int at_hand) {
    Opened *o = opened(s);
    LogprobFile f;
    float value[3];
    const Objective before = o->run.streambp.setup->objective;
    static const RunSource began = {{"start"}};
    reference_prepare(&f, &o->run, &o->data, &o->batch, o->key, at_hand ? NULL : &began);
    assert_memory_equal(&before, &o->run.streambp.setup->objective, sizeof(before));
    logprobs_read(&f, 0, 3, value);
    assert_true(value[0] == 0 && value[1] < 0 && value[2] < 0);
    snprintf(reference_path, sizeof(reference_path), "%s", f.file.path);
    logprobs_close(&f);
    closed(o);
}

// Prepares as a user without write access to the data's folder.
static void prepare_as_a_guest(const void *setup) {
    if (geteuid() == 0 && setuid(65534) != 0) exit(77);
    prepare((const Opening *)setup, 1);
    printf("%s\n", reference_path);
}

static void prepare_killed(const void *setup) {
    Opened *o = opened((const Opening *)setup);
    LogprobHeader header = logprobs_header(&o->run, &o->data, o->key);
    char path[2][PATH_MAX];
    LogprobWriter w;
    reference_places(&o->run, &o->data, &header, path);
    logprobs_create(&w, path[0], &header);
    kill(getpid(), SIGKILL);
}

TEST(a_reference_is_computed_once) {
    Opening s = some_setup(random_data("once"));
    char first[PATH_MAX], command[700];
    struct stat before, after;
    assert_int_equal(run_child(prepare_killed, &s)->code, 1000 + SIGKILL); // a killed run's leftovers are not used
    prepare(&s, 1);
    snprintf(first, sizeof(first), "%s", reference_path);
    assert_non_null(strstr(first, "/once/reference-"));
    assert_string_equal(first + strlen(first) - 9, ".logprobs");
    assert_int_equal(stat(first, &before), 0);
    prepare(&s, 1);
    assert_string_equal(reference_path, first);
    s.shuffle = "on", s.B = "2";
    prepare(&s, 0); // resumed, and packed differently
    assert_string_equal(reference_path, first);
    assert_int_equal(stat(first, &after), 0);
    assert_true(before.st_ino == after.st_ino);
    s.T = "64"; // cut into pieces
    prepare(&s, 1);
    s.long_documents = "truncate";
    prepare(&s, 1);
    s = some_setup(s.shards), s.seed = "6"; // another model
    prepare(&s, 1);
    snprintf(command, sizeof(command), "test $(ls '%s'/reference-*.logprobs | wc -l) = 4", scratch_path("once"));
    assert_int_equal(system(command), 0);
}

TEST(where_the_data_cannot_be_written_to) {
    Opening s = some_setup(random_data("closed"));
    chmod(scratch_folder(), 0755), chmod(scratch_path("closed"), 0555);
    mkdir(scratch_path("out"), 0777), chmod(scratch_path("out"), 0777);
    expect_refused(prepare_as_a_guest, &s, 1, "cannot be written there: Permission denied; give --out, or");
    s.out = scratch_path("out");
    const Child *child = run_child(prepare_as_a_guest, &s);
    if (child->code) test_fail("%s", child->err);
    assert_non_null(strstr(child->out, "/out/reference-"));
    prepare(&s, 0); // found there again
    assert_non_null(strstr(reference_path, "/out/reference-"));
}

// The run's one allocation is planned for training; every method leaves room.
TEST(a_reference_fits_into_the_plan_of_training) {
    static const char *const methods[] = {"stream", "checkpoint", "full"};
    Opening s = some_setup(random_data("methods"));
    s.B = "3";
    for (size_t i = 0; i < 6; i++) {
        s.method = methods[i % 3], s.chunk = i < 3 ? "16" : "100000";
        s.init = i % 2 ? LAYERS("1") : TINY;
        prepare(&s, 1);
        assert_int_equal(unlink(reference_path), 0); // to compute it again
    }
}

// ---- the progress bar ---------------------------------------------------------------------------------------------
// Layers count as layer_passes says, so that the bar ends with the pass.
TEST(a_pass_moves_the_bar_to_its_end) {
    Opening s = some_setup(random_data("bar"));
    Opened *o = opened(&s);
    Progress progress = progress_begin(NULL, "pass", 0, 1);
    progress.file = tmpfile();
    progress_expect(&progress, 0, 1, 2 * layer_passes(&o->run, 1));
    dataloader_next(&o->data, &o->batch);
    forward_backward(&o->run.streambp, &o->batch, 1, 1, NULL);
    assert_true(progress.parts == layer_passes(&o->run, 1));
    fclose(progress.file);
    progress_end(&progress);
    closed(o);
}

// ---- the state of a run -------------------------------------------------------------------------------------------
static const char *state_with(const char *settings) {
    char text[256];
    const char *folder = scratch_path("checkpoint");
    mkdir(folder, 0777);
    snprintf(text, sizeof(text), "{\"settings\": {%s}}", settings);
    write_file(scratch_path("checkpoint/state.json"), text, strlen(text));
    return folder;
}

static void key_body(const void *folder) { reference_key_of((const char *)folder); }

TEST(a_resumed_run_knows_its_reference) {
    static const char *const refused[][2] = {
        {"\"reference\": 5", "\"reference\" must be text"},
        {"\"reference\": \"0123\"", "\"reference\" is '0123', which is not the key of a model"},
        {"\"reference\": \"0123456789abcdeg\"", "which is not the key of a model"},
        {"\"reference\": \"0000000000000000\"", "which is not the key of a model"}};
    assert_true(reference_key_of(state_with("\"reference\": \"0123456789abcdef\"")) == 0x0123456789abcdef);
    assert_true(reference_key_of(state_with("\"a\": \"b\"")) == 0);
    for (size_t i = 0; i < COUNT_OF(refused); i++)
        expect_refused(key_body, state_with(refused[i][0]), 1, refused[i][1]);
}

// Memory for products of 1024 x 1024 and no larger ones; the operands survive the last product.
TEST(the_peak_is_measured_on_random_numbers) {
    enum { SIDE = 1024, ROW = SIDE * sizeof(float) };
    const size_t bytes = 3 * (SIDE * ROW + ARENA_ALIGNMENT);
    float *memory = (float *)ops_device->allocate(bytes);
    Run run = {0};
    run.model.dtype = DTYPE_FP32;
    arena_init(run.arena, memory, bytes);
    assert_true(run_peak_flops(&run) > 0 && run.arena->used == 0);
    for (size_t row = SIDE; row < 3 * SIDE; row++) { // the first rows hold the product
        const float *x = memory + row * SIDE;
        if (row % SIDE && !memcmp(x - SIDE, x, ROW)) test_fail("row %zu of the operands is that before it", row);
        if (x[0] == x[1] && x[1] == x[2]) test_fail("row %zu of the operands begins with %g three times", row, x[0]);
    }
    ops_device->release(memory, bytes);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
