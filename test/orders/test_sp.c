/*
Sequence parallelism against one process. Every rank first makes the result of a process alone, then the ranks share
each stream: loss, every gradient (added up over all ranks), and log-probabilities must be the same; over families,
methods, chunks, lengths (also shorter than the ranks), documents with borders anywhere, windows, objectives, adapters
with dropout. What was sent follows a formula that knows nothing of chunks, and memory is as planned. Run under mpirun
with 2, 3 or 4 processes; 4 are also two replicas of two.
*/
#include "llmc/ranks/dist.h"
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(int adapters) {
    return ops_device->stored == DTYPE_FP64   ? 1e-12
           : ops_device->stored == DTYPE_FP32 ? (adapters ? 1e-4 : 1e-5)
                                              : 0.05;
}

enum { STREAMS_MOST = 2 };

typedef struct {
    TinyCase tiny;
    Batch batch[STREAMS_MOST]; // of the step
    size_t streams, parts;     // parts: the last sequences are parts of one micro-batch
    double Z;
} Case;

typedef struct {
    double loss;
    double *gradient;          // [elements of what is trained]
    float *logp[STREAMS_MOST]; // of the streams this rank was part of
    Traffic sent;              // by its streams' forward and backward passes
    size_t peak, planned;      // bytes of the arena
} Result;

static World world; // of the running test: all ranks, `sp` of them to a stream

static void share_streams(size_t sp) {
    world.ranks = dist_ranks(), world.rank = dist_rank(), world.zero = 0, world.sp = sp;
    dist_split(sp);
}

static World one_process(void) {
    World w = {0};
    return w;
}

// ---- cases ----------------------------------------------------------------------------------------------------------
static const char *const models[] = {
    "llama,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=23",
    "gpt2,hidden_size=12,num_hidden_layers=2,num_attention_heads=3,vocab_size=29,max_position_embeddings=64",
    "qwen3,hidden_size=12,intermediate_size=16,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=23,tie_word_embeddings=true",
    // windows: within a range, across several, beyond the stream; in some layers or in all
    "gemma3,hidden_size=12,intermediate_size=16,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=6,"
    "vocab_size=21,sliding_window=3,layer_types=ssf",
    "gemma3,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=21,sliding_window=22,layer_types=sf",
    "gemma3,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=6,"
    "vocab_size=21,sliding_window=90,layer_types=fs",
    "mistral,hidden_size=8,intermediate_size=12,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,vocab_"
    "size=19,"
    "sliding_window=5",
    "mistral,hidden_size=8,intermediate_size=12,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,vocab_"
    "size=19,"
    "sliding_window=1",
};
#define MODELS (sizeof(models) / sizeof(models[0]))

typedef struct {
    size_t documents, length[8];
} Lengths;

static const Lengths lengths[] = {
    {1, {1}},
    {1, {2}},
    {1, {5}},
    {1, {37}},
    {1, {64}},
    {3, {1, 1, 1}},
    {5, {3, 1, 20, 7, 6}},
    {2, {30, 34}},
    {7, {9, 9, 1, 8, 9, 11, 2}},
};
#define LENGTHS (sizeof(lengths) / sizeof(lengths[0]))

static Case case_make(const char *text, int lora) {
    Case c = {0};
    c.tiny = tiny_case(text, lora ? 3 : 0);
    c.tiny.lora.dropout = 0.3;
    c.tiny.settings.gradient_type = dtype_of_sums(c.tiny.model.dtype);
    return c;
}

static void case_add(Case *c, Batch batch) { c->batch[c->streams++] = batch; }

static void case_normalise(Case *c) {
    TargetCounts counts = {0, 0, 0};
    for (size_t i = 0; i < c->streams; i++) counts = target_counts_add(counts, batch_count(&c->batch[i]));
    c->Z = objective_normaliser(&c->tiny.settings.objective, counts);
}

static void case_free(Case *c) {
    while (c->streams) batch_free(&c->batch[--c->streams]);
    tiny_case_free(&c->tiny);
}

// Whether this rank takes part in a stream: they are dealt over replicas in turn.
static int takes(World w, size_t stream) { return stream % world_replicas(w) == world_replica(w); }

// ---- a step ---------------------------------------------------------------------------------------------------------
static void run_streams(const Case *c, StreamBP *s, World w, Result *r) {
    size_t last = 0;
    for (size_t i = 0; i < c->streams; i++)
        if (takes(w, i)) last = i;
    for (size_t i = 0; i < c->streams; i++) {
        if (!takes(w, i)) continue;
        s->dropout_seed = 5 + (c->parts ? 0 : i);
        r->loss += forward_backward(s, &c->batch[i], c->Z, i == last, NULL);
    }
    r->sent = s->memory.sent;
    for (size_t i = 0; i < c->streams; i++) {
        if (!takes(w, i)) continue;
        r->logp[i] = (float *)checked_calloc(c->batch[i].N, sizeof(float), "log-probabilities");
        forward_policy(s, &c->batch[i], 0, r->logp[i]);
    }
}

static Result run(Case *c, World w, Method method, size_t chunk, size_t logits_chunk) {
    const Model *trained = tiny_table(&c->tiny);
    Batch largest = c->batch[c->streams > 1 && c->batch[1].N > c->batch[0].N];
    const int fp64 = ops_device->stored == DTYPE_FP64;
    TinyRun t;
    Result r = {0};
    RunSettings settings = tiny_settings(&c->tiny, method, chunk, logits_chunk);
    settings.world = w, settings.backward = 1;
    c->tiny.settings = settings; // plans of what is sent are made from these
    size_t start[16];            // of as many documents as either batch has, the last ones empty
    for (size_t d = 0; d < 16; d++) start[d] = largest.document_start[min_size(d, largest.documents)];
    for (size_t i = 0; i < c->streams; i++) largest.documents = max_size(largest.documents, c->batch[i].documents);
    largest.document_start = start;
    tiny_begin(&t, ops_device, settings, c->tiny.weights, c->tiny.adapters, &largest);
    run_streams(c, &t.s, w, &r);
    r.gradient = device_read(ops_device, t.s.memory.gradients, settings.gradient_type, trained->elements);
    r.peak = t.arena.peak, r.planned = t.plan.total_bytes;
    tiny_end(&t);
    double loss = r.loss / (double)world_sp(w); // each rank of a sequence knows all of its loss
    if (world_ranks(w) > 1) dist_sum(RANKS_ALL, &loss, 1);
    r.loss = fp64 || world_ranks(w) > 1 ? loss : r.loss;
    return r;
}

static void result_free(Result *r) {
    for (size_t i = 0; i < STREAMS_MOST; i++) free(r->logp[i]);
    free(r->gradient);
}

// Some gradients are zero but for rounding: biases of keys, queries that see one key.
static void expect_same(const Case *c, const Result *found, const Result *expected) {
    const double allowed = bound(c->tiny.lora.rank > 0);
    const Model *table = tiny_table(&c->tiny);
    const double precision = fmax(allowed, 1e-6); // log-probabilities are handed out as fp32
    const TinyResult here = {found->loss, found->gradient, table->elements};
    const TinyResult alone = {expected->loss, expected->gradient, table->elements};
    tiny_expect_same(table, here, alone, allowed, 0.1, 0.03);
    for (size_t i = 0; i < c->streams; i++)
        for (size_t t = 0; found->logp[i] && t < c->batch[i].N; t++)
            if (!(fabs((double)found->logp[i][t] - (double)expected->logp[i][t]) <=
                  precision * (fabs((double)expected->logp[i][t]) + 1)))
                test_fail("log-probability of target %zu is %g, alone %g", t, (double)found->logp[i][t],
                          (double)expected->logp[i][t]);
}

// ---- what is sent, from the owner of every token --------------------------------------------------------------------
static size_t owner_of(size_t t, size_t N, size_t S) {
    const size_t each = (N + 2 * S - 1) / (2 * S), first = min_size(N, S * each);
    return t < first ? t / each : S - 1 - (t - first) / ((N - first + S - 1) / S);
}

static size_t owned_tokens(size_t N, size_t S, size_t rank) {
    size_t owned = 0;
    for (size_t t = 0; t < N; t++) owned += owner_of(t, N, S) == rank;
    return owned;
}

static size_t document_at(const Batch *batch, size_t t) {
    size_t d = 0;
    while (batch->document_start[d + 1] <= t) d++;
    return d;
}

// Tokens of `owner` that one of `seer` sees within the window, each counted once; reversed: of any seer.
static size_t seen_tokens(const Batch *batch, size_t S, size_t owner, size_t seer, size_t window) {
    size_t seen = 0;
    for (size_t key = 0; key < batch->N; key++) {
        int found = 0;
        if (owner_of(key, batch->N, S) != owner) continue;
        for (size_t t = key; t < batch->N && t < key + window && !found; t++)
            found = owner_of(t, batch->N, S) == seer && document_at(batch, t) == document_at(batch, key);
        seen += (size_t)found;
    }
    return seen;
}

static void expect_sent(const Case *c, const Result *r, Method method) {
    const Shapes d = shapes_of(&c->tiny.model);
    const size_t S = world.sp, windows = layers_with_window(&c->tiny.model.config), rank = world.rank % S;
    const double row = 2 * (double)d.KV, layers = (double)(d.L - windows), others = (double)(S - 1) / (double)S;
    const double passes = method == METHOD_FULL ? 1 : 2;
    const double rounds = method == METHOD_FULL || c->tiny.settings.keep ? 2 : 3; // of the ring
    double keys = 0, gradients = 0;
    for (size_t i = 0; i < c->streams; i++) {
        const size_t N = c->batch[i].N, rows = (N + S - 1) / S * S; // gathered in equal portions
        if (!takes(world, i)) continue;
        if (c->tiny.settings.ring) { // every block but the next rank's goes on, once more with its gradient
            keys += rounds * layers * row * (double)((N - owned_tokens(N, S, (rank + 1) % S)) * d.stored);
            gradients += layers * row * (double)(N * d.summed);
        } else {
            keys += passes * layers * row * (double)(rows * d.stored) * others;
            gradients += layers * row * (double)(rows * d.summed) * others;
        }
        for (size_t peer = 0; windows && peer < S; peer++) {
            const size_t window = c->tiny.model.config.sliding_window;
            if (peer == rank) continue;
            keys +=
                passes * (double)windows * row * (double)(seen_tokens(&c->batch[i], S, rank, peer, window) * d.stored);
            gradients += (double)windows * row * (double)(seen_tokens(&c->batch[i], S, peer, rank, window) * d.summed);
        }
    }
    if (!(fabs(r->sent.bytes[TRAFFIC_KEYS_VALUES] - keys) <= 1e-9 * keys))
        test_fail("%.1f bytes of keys and values were sent, not %.1f", r->sent.bytes[TRAFFIC_KEYS_VALUES], keys);
    if (!(fabs(r->sent.bytes[TRAFFIC_KEY_VALUE_GRADIENTS] - gradients) <= 1e-9 * gradients))
        test_fail("%.1f bytes of their gradients were sent, not %.1f", r->sent.bytes[TRAFFIC_KEY_VALUE_GRADIENTS],
                  gradients);
}

// A plan counts the mean over the ranks: together they send as much as they planned together.
static void expect_sent_as_planned(const Case *c, const Result *r) {
    double sent[TRAFFIC_KINDS], plans[TRAFFIC_KINDS] = {0};
    for (size_t i = 0; i < c->streams; i++) {
        const Traffic plan = plan_traffic(&c->tiny.settings, &c->batch[i], 1);
        for (int kind = 0; kind < TRAFFIC_KINDS && takes(world, i); kind++) plans[kind] += plan.bytes[kind];
    }
    memcpy(sent, r->sent.bytes, sizeof(sent));
    dist_sum(RANKS_ALL, sent, TRAFFIC_KINDS), dist_sum(RANKS_ALL, plans, TRAFFIC_KINDS);
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++)
        if (!(fabs(sent[kind] - plans[kind]) <= 1e-12 * sent[kind]))
            test_fail("%.1f bytes of %s were sent, not %.1f", sent[kind], traffic_names[kind], plans[kind]);
}

// The rank with the most tokens needs what was planned, no rank more.
static void expect_planned(const Result *r) {
    double most[8] = {0};
    size_t peak = 0;
    most[world.rank] = (double)r->peak;
    dist_sum(RANKS_ALL, most, world.ranks);
    for (size_t i = 0; i < world.ranks; i++) peak = max_size(peak, (size_t)most[i]);
    if (peak != r->planned) test_fail("%zu bytes of %zu planned were used", peak, r->planned);
}

// ring: keys and values are passed around, instead of being gathered.
static void expect_shared(Case *c, const Result *expected, int ring, Method method, size_t chunk, size_t logits_chunk) {
    static int call; // attention's outputs are computed again, kept on the device, in host memory
    c->tiny.settings.ring = ring, c->tiny.settings.keep = (Keep)(call++ % 3);
    Result found = run(c, world, method, chunk, logits_chunk);
    expect_same(c, &found, expected);
    expect_sent(c, &found, method);
    expect_sent_as_planned(c, &found);
    expect_planned(&found);
    result_free(&found);
}

// ---- tests ----------------------------------------------------------------------------------------------------------
// Every family, half of the lengths, by some methods and chunks: the numbers of ranks together meet all.
static void families_agree(size_t sp) {
    static const size_t chunks[] = {1, 3, 7, 100};
    share_streams(sp);
    for (size_t i = 0; i < MODELS; i++) {
        for (size_t j = (i + dist_ranks()) % 2; j < LENGTHS; j += 2) { // other ones with other ranks
            Case c = case_make(models[i], 0);
            for (size_t replica = 0; replica < world_replicas(world); replica++) {
                const Lengths *l = &lengths[(j + replica * 4) % LENGTHS];
                case_add(&c, tiny_batch(l->length, l->documents, c.tiny.model.config.vocab_size, l->documents > 3, 11));
            }
            case_normalise(&c);
            test_case("%zu ranks, sp %zu, %.30s..., %zu tokens in %zu documents", world.ranks, sp, models[i],
                      c.batch[0].N, c.batch[0].documents);
            Result expected = run(&c, one_process(), METHOD_FULL, 0, 0);
            expect_shared(&c, &expected, i / 2 % 2, j % 3 ? METHOD_CHECKPOINT : METHOD_FULL, 0, 0);
            for (size_t k = i % 2; k < 4; k += 2)
                expect_shared(&c, &expected, (i + j + k / 2) % 2, METHOD_STREAM, chunks[k], chunks[(k + j) % 4]);
            result_free(&expected);
            case_free(&c);
        }
    }
}

TEST(families_agree_with_one_process) { families_agree(dist_ranks()); }

TEST(families_in_replicas) {
    if (dist_ranks() != 4) {
        test_skip("two streams of two ranks each need four processes");
        return;
    }
    families_agree(2);
}

// ---- objectives and adapters ----------------------------------------------------------------------------------------
typedef struct {
    ObjectiveKind kind;
    Normalisation normalisation;
    double beta, temperature;
} Tried;

static const Tried tried[] = {
    {OBJECTIVE_SFT, NORMALISE_GRPO, 0, 1},      {OBJECTIVE_DPO, NORMALISE_GRPO, 0.3, 1},
    {OBJECTIVE_GRPO, NORMALISE_GRPO, 0.1, 1.3}, {OBJECTIVE_GRPO, NORMALISE_BNPO, 0, 1},
    {OBJECTIVE_GSPO, NORMALISE_GRPO, 0.1, 1},   {OBJECTIVE_PPO, NORMALISE_BNPO, 0, 1},
};
#define TRIED (sizeof(tried) / sizeof(tried[0]))

// Documents of pairs or groups of two, with all that objectives look at; the first pair is number `pair`.
static Batch answers_batch(const Tried *t, const size_t *length, size_t documents, size_t V, size_t pair) {
    Batch batch = tiny_batch(length, documents, V, 1, 5 + pair);
    batch_allocate_answers(&batch, 1, 1);
    for (size_t d = 0; d < documents; d++) {
        batch.targets[batch.document_start[d + 1] - 1] = (int32_t)(d % V); // one that counts in each
        batch.group[d] = pair + d / 2, batch.reward[d] = (float)d;
        for (size_t i = batch.document_start[d]; i < batch.document_start[d + 1]; i++) {
            batch.advantage[i] =
                (float)(t->kind == OBJECTIVE_PPO ? random_normal(3, pair, i) : random_normal(4, pair, d));
            batch.reference[i] = (float)(-4 + random_normal(5, pair, i));
            batch.old[i] = (float)(-4 + random_normal(6, pair, i));
        }
    }
    return batch;
}

// Documents [begin, end) of a batch, as a part of it.
static Batch part_of(const Batch *whole, size_t begin, size_t end) {
    const size_t first = whole->document_start[begin], N = whole->document_start[end] - first;
    Batch part = batch_allocate(N, end - begin);
    batch_allocate_answers(&part, 1, 1);
    part.first = first;
    for (size_t d = begin; d < end; d++) {
        part.document_start[d - begin] = whole->document_start[d] - first;
        part.group[d - begin] = whole->group[d], part.reward[d - begin] = whole->reward[d];
    }
    batch_set_positions(&part);
    memcpy(part.tokens, whole->tokens + first, N * sizeof(int32_t));
    memcpy(part.targets, whole->targets + first, N * sizeof(int32_t));
    memcpy(part.loss_weight, whole->loss_weight + first, N * sizeof(float));
    memcpy(part.reference, whole->reference + first, N * sizeof(float));
    return part;
}

static void case_objective(Case *c, const Tried *t) {
    Objective *o = &c->tiny.settings.objective;
    o->kind = t->kind, o->normalisation = t->normalisation, o->beta = t->beta, o->temperature = t->temperature;
    o->gamma = 0.5, o->clip_low = 0.2, o->clip_high = NAN, o->completion_tokens = 12;
    objective_resolve(o);
}

static void objectives_agree(size_t sp) {
    static const size_t length[2][6] = {{6, 9, 1, 17, 11, 3}, {5, 2, 13, 8, 1, 1}};
    share_streams(sp);
    for (size_t i = 0; i < TRIED; i++) {
        for (int lora = 0; lora < 2; lora++) {
            Case c = case_make(models[lora ? 2 : 3], lora);
            case_objective(&c, &tried[i]);
            for (size_t replica = 0; replica < world_replicas(world); replica++)
                case_add(&c, answers_batch(&tried[i], length[replica], 6, c.tiny.model.config.vocab_size, 3 * replica));
            case_normalise(&c);
            test_case("%zu ranks, sp %zu, %s%s", world.ranks, sp, objective_names[tried[i].kind], lora ? ", LoRA" : "");
            Result expected = run(&c, one_process(), METHOD_STREAM, 4, 9);
            expect_shared(&c, &expected, (int)i % 2, METHOD_FULL, 0, 0);
            expect_shared(&c, &expected, 0, METHOD_STREAM, 7, 5);
            expect_shared(&c, &expected, 1, METHOD_STREAM, 3, 100);
            result_free(&expected);
            case_free(&c);
        }
    }
}

TEST(objectives_agree_with_one_process) { objectives_agree(dist_ranks()); }

TEST(objectives_in_replicas) {
    if (dist_ranks() != 4) {
        test_skip("two streams of two ranks each need four processes");
        return;
    }
    objectives_agree(2);
}

// Two parts of one micro-batch drop what the whole drops.
TEST(parts_drop_the_same) {
    static const size_t length[] = {6, 9, 1, 17, 11, 3};
    const size_t sp = dist_ranks() == 4 ? 2 : dist_ranks();
    Case whole = case_make(models[1], 1), parts = case_make(models[1], 1);
    share_streams(sp);
    case_objective(&whole, &tried[1]), case_objective(&parts, &tried[1]);
    case_add(&whole, answers_batch(&tried[1], length, 6, 29, 0));
    case_add(&parts, part_of(&whole.batch[0], 0, 2));
    case_add(&parts, part_of(&whole.batch[0], 2, 6));
    parts.parts = 2;
    case_normalise(&whole), case_normalise(&parts);
    Result expected = run(&whole, one_process(), METHOD_STREAM, 5, 7);
    Result found = run(&parts, world, METHOD_STREAM, 4, 9);
    for (size_t i = 0; i < STREAMS_MOST; i++) free(found.logp[i]), found.logp[i] = NULL; // of other streams
    expect_same(&whole, &found, &expected);
    result_free(&expected), result_free(&found);
    case_free(&whole), case_free(&parts);
}

// ---- memory and determinism -----------------------------------------------------------------------------------------
// The same step twice: the same bits, whichever rank.
TEST(deterministic) {
    Case c = case_make(models[4], 0);
    share_streams(dist_ranks());
    case_add(&c, tiny_batch(lengths[8].length, lengths[8].documents, 21, 1, 3));
    case_normalise(&c);
    Result first = run(&c, world, METHOD_STREAM, 4, 5), second = run(&c, world, METHOD_STREAM, 4, 5);
    assert_memory_equal(first.gradient, second.gradient, c.tiny.model.elements * sizeof(double));
    assert_true(first.loss == second.loss);
    result_free(&first), result_free(&second);
    case_free(&c);
}

static size_t planned(const Model *model, World w, size_t N) {
    RunSettings settings;
    Batch batch;
    size_t start[] = {0, N};
    memset(&settings, 0, sizeof(settings)), memset(&batch, 0, sizeof(batch));
    settings.model = model, settings.backward = 1, settings.gradient_type = model->dtype, settings.world = w;
    batch.N = N, batch.documents = 1, batch.document_start = start;
    return plan_make(&settings, &batch).total_bytes;
}

// Where layer inputs dominate, two ranks need at most 0.6 of one's memory each.
TEST(two_ranks_need_little_more_than_half) {
    static const char *const deep[] = {
        "qwen3,hidden_size=512,intermediate_size=1024,num_hidden_layers=28,num_attention_heads=8,num_key_value_heads=4,"
        "head_dim=64,vocab_size=1000",
        "mistral,hidden_size=512,intermediate_size=1024,num_hidden_layers=28,num_attention_heads=8,num_key_value_heads="
        "4,"
        "vocab_size=1000,sliding_window=4096"};
    World two = {2, 0, 0, 2};
    for (size_t i = 0; i < 2; i++) {
        Config config = config_from_text(deep[i], "test", EXIT_USAGE);
        Model model = model_build(&config, ops_device->stored);
        const double one = (double)planned(&model, one_process(), (size_t)1 << 20);
        const double half = (double)planned(&model, two, (size_t)1 << 20);
        test_case("%.20s...", deep[i]);
        if (!(half <= 0.6 * one)) test_fail("%.3f of one rank's memory", half / one);
        model_free(&model);
    }
}

// A plan for the longest of many streams holds every one of them.
TEST(plans_never_fall) {
    static const size_t tried[] = {0, 3, 6};
    for (size_t m = 0; m < 3; m++) {
        Config config = config_from_text(models[tried[m]], "test", EXIT_USAGE);
        Model model = model_build(&config, ops_device->stored);
        for (size_t S = 2; S <= 9; S++) {
            World w = {S, 0, 0, S};
            size_t before = 0;
            for (size_t N = 1; N <= 64; N++) {
                const size_t needs = planned(&model, w, N);
                test_case("%.20s..., %zu ranks, %zu tokens", models[tried[m]], S, N);
                if (needs < before) test_fail("%zu bytes, but one token less takes %zu", needs, before);
                before = needs;
            }
        }
        model_free(&model);
    }
}

int main(int argc, char **argv) {
    dist_start();
    if (dist_ranks() < 2 || dist_ranks() > 4) die_usage("takes 2 to 4 processes: test/ranks/mpirun.sh 3 %s", argv[0]);
    RUN_LISTED(argc, argv, NULL);
}
