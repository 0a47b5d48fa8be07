/*
Sequence parallelism against one process. Every rank first runs alone, then the ranks share each stream: loss, every
gradient, and log-probabilities must be the same. The cases cover families, methods, chunks, lengths (also fewer tokens
than ranks), documents with any borders, windows, objectives, adapters with dropout. The bytes sent follow a formula
that chunks do not enter, and memory matches the plan. Run it under mpirun with 2, 3 or 4 processes; 4 processes also
run as two replicas of two.
*/
#include "llmc/ranks/dist.h"
#include "test/base/testing.h"
#include "test/streambp/rank_runs.h"

// muse_glimmer in fp32 may differ twice as much as other families, measured 1.1e-5: its norms without weights divide
// queries, keys and embeddings by lengths that are small for some tokens of the tiny model. So may Mamba-2, measured
// 1.3e-5: gradients of dt_bias and A_log are small sums over all tokens, and the scan over ranks adds in another order.
static double bound(const Case *c) {
    const Family *family = c->tiny.model.config.family;
    const double usual = family->qk_norm == QK_NORM_BARE || family->ssd ? 2e-5 : 1e-5;
    return ops_device->stored == DTYPE_FP64   ? 1e-12
           : ops_device->stored == DTYPE_FP32 ? (c->tiny.lora.rank ? 1e-4 : usual)
                                              : 0.05;
}

// ---- cases ----------------------------------------------------------------------------------------------------------
static const char *const models[] = {
    TINY_LLAMA,
    TINY_GPT2,
    TINY_TIED,
    // windows: within a range, across several, beyond the stream; in some layers or in all
    TINY_GEMMA ",sliding_window=3,layer_types=ssf",
    TINY_GEMMA ",sliding_window=22,layer_types=sfs",
    TINY_GEMMA ",sliding_window=90,layer_types=fsf",
    TINY_MISTRAL ",sliding_window=5",
    TINY_MISTRAL ",sliding_window=1",
    TINY_OLMO ",sliding_window=7",
    TINY_MIXED,
    TINY_SINKS,
    TINY_HEADS,
    TINY_BESIDE,
    TINY_OWN,
    TINY_ROTATED,
    TINY_BARE,
    TINY_LATENT,
    TINY_NARROW,
    // linear attention: beside attention, with more value heads than keys; alone, with a convolution longer than parts
    TINY_LLLF ",layer_types=llfl",
    TINY_LINEAR,
    TINY_SHARED,
    TINY_SHAPES,
    TINY_MAMBA,
    TINY_GRANITE,
    TINY_BAMBA,
};

static const struct {
    size_t documents, length[8];
} lengths[] = {
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
enum { MODELS = COUNT_OF(models), HYBRIDS_FROM = MODELS - 7, LENGTHS = COUNT_OF(lengths), STREAMS_MOST = 2 };

static Case case_of(Config config, int lora) {
    Case c = {0};
    c.tiny = tiny_case_of(config, lora ? 3 : 0);
    // a delta rule's output may nearly vanish; its norm then magnifies rounding
    if (layers_of_kind(&c.tiny.model.config, LAYER_LINEAR))
        c.tiny.model.config.norm_eps = fmax(c.tiny.model.config.norm_eps, 1e-2);
    c.tiny.lora.dropout = 0.3;
    tiny_router_losses(&c.tiny.model, &c.tiny.settings);
    c.tiny.settings.gradient_type = dtype_of_sums(c.tiny.model.dtype), c.tiny.settings.backward = 1;
    return c;
}

static Case case_make(const char *text, int lora) { return case_of(config_from_text(text, "test", EXIT_USAGE), lora); }

// ---- a step ---------------------------------------------------------------------------------------------------------
typedef struct {
    TinyResult step;
    float *logp[STREAMS_MOST]; // of this rank's streams; memory of the case
    RunSettings settings;
    Traffic sent;         // by its streams' forward and backward passes
    size_t peak, planned; // bytes of the arena
} Result;

static Result run(const Case *c, World w, RunSettings settings) {
    const Range own = case_own(c, w);
    Result r = {0};
    TinyRun t;
    settings.world = w;
    case_begin(&t, c, settings);
    r.step = case_result(&t, c, case_gradient(&t, c));
    r.settings = settings, r.sent = t.s.memory.sent;
    const size_t mark = arena_mark(t.arena);
    gradient_squares(&t.s.memory);
    arena_pop(t.arena, mark);
    for (size_t i = own.begin; i < own.begin + own.count; i++) {
        r.logp[i] = (float *)case_memory(c->batch[i].N * sizeof(float));
        forward_policy(&t.s, &c->batch[i], 0, r.logp[i]);
    }
    r.peak = t.arena->peak, r.planned = t.plan.total_bytes;
    tiny_end(&t);
    return r;
}

static Result run_alone(const Case *c, Method method, size_t chunk, size_t logits_chunk) {
    return run(c, world_alone(), tiny_settings(&c->tiny, method, chunk, logits_chunk));
}

// Some gradients are zero up to rounding: biases of keys, queries that see one key.
static void expect_same(const Case *c, const Result *found, const Result *expected) {
    const double allowed = bound(c), precision = fmax(allowed, 1e-6); // logp is returned as fp32
    tiny_expect_same(tiny_table(&c->tiny), found->step, expected->step, allowed, 0.1, 0.03);
    for (size_t i = 0; i < c->batches && i < STREAMS_MOST; i++)
        for (size_t t = 0; found->logp[i] && expected->logp[i] && t < c->batch[i].N; t++) {
            const double here = (double)found->logp[i][t], alone = (double)expected->logp[i][t];
            if (!(fabs(here - alone) <= precision * (fabs(alone) + 1)))
                test_fail("log-probability of target %zu is %g, alone %g", t, here, alone);
        }
}

// ---- bytes sent, from the owner of every token ----------------------------------------------------------------------
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

// Counts the tokens of `owner` that a token of `seer` sees within the window.
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

static void expect_bytes(TrafficKind kind, double sent, double expected, double allowed) {
    if (!(fabs(sent - expected) <= allowed * expected))
        test_fail("%.1f bytes of %s were sent, not %.1f", sent, traffic_names[kind], expected);
}

static void expect_sent(const Case *c, const Result *r) {
    const RunSettings *settings = &r->settings;
    const Shapes d = shapes_of(&c->tiny.model);
    const Range own = case_own(c, world);
    const Config *config = &c->tiny.model.config;
    const size_t S = world.sp, window = config->sliding_window, rank = world.rank % S;
    const size_t linear = layers_of_kind(config, LAYER_LINEAR);
    const double others = (double)(S - 1) / (double)S;
    const double passes = settings->method == METHOD_FULL ? 1 : 2;
    const double rounds = settings->method == METHOD_FULL || settings->keep.level ? 2 : 3; // of the ring
    double keys = 0, gradients = 0;
    for (const Batch *batch = c->batch + own.begin; batch < c->batch + own.begin + own.count; batch++) {
        const size_t N = batch->N, rows = (N + S - 1) / S * S; // gathered in equal shares
        for (size_t l = 0; l < d.L; l++) {
            const unsigned form = layer_form(config, l);
            const int lends = (form & FORM_LENDS) != 0, borrows = (form & FORM_BORROWS) != 0;
            const Shapes of = shapes_in(&c->tiny.model, form);
            const double row = (double)(of.KV + of.VV), again = lends ? 1 : passes; // lent keys stay
            if (layer_is_linear(config, l) || form & FORM_NO_MIXER || (borrows && !settings->ring)) continue;
            for (size_t peer = 0; layer_window(config, l) && !borrows && peer < S; peer++) {
                if (peer == rank) continue;
                keys += again * row * (double)(seen_tokens(batch, S, rank, peer, window) * d.stored);
                gradients += row * (double)(seen_tokens(batch, S, peer, rank, window) * d.summed);
            }
            if (layer_window(config, l)) continue;
            // Ranks gather latents. A ring forwards every block but the next rank's, and once more with its gradient
            if (settings->ring && !of.shared_key) {
                keys += rounds * row * (double)((N - owned_tokens(N, S, (rank + 1) % S)) * d.stored);
                gradients += row * (double)(N * d.summed);
            } else {
                keys += again * row * (double)(rows * d.stored) * others;
                gradients += row * (double)(rows * d.summed) * others;
            }
        }
    }
    const double states = (double)((rank > 0) + (rank + 1 < S)) * 2 * (double)(d.linear.S * d.summed); // there and back
    const double columns = 2 * (double)(S - 1) * (double)(d.linear.columns * (d.stored + d.summed));
    expect_bytes(TRAFFIC_STATES, r->sent.bytes[TRAFFIC_STATES], (double)(own.count * linear) * (states + columns),
                 1e-9);
    expect_bytes(TRAFFIC_KEYS_VALUES, r->sent.bytes[TRAFFIC_KEYS_VALUES], keys, 1e-9);
    expect_bytes(TRAFFIC_KEY_VALUE_GRADIENTS, r->sent.bytes[TRAFFIC_KEY_VALUE_GRADIENTS], gradients, 1e-9);
}

// Compares with the plan, which has the mean over the ranks: their sums must agree. The rank with the most tokens needs
// exactly the planned memory; the others at most that.
static void expect_planned(const Case *c, const Result *r) {
    const Range own = case_own(c, world);
    double sum[2 * TRAFFIC_KINDS] = {0}, most[4] = {0}, peak = 0; // sent, planned
    memcpy(sum, r->sent.bytes, sizeof(r->sent.bytes));
    for (size_t i = 0; i < own.count; i++) {
        const Traffic plan = plan_traffic(&r->settings, &c->batch[own.begin + i], 1);
        for (int kind = 0; kind < TRAFFIC_KINDS; kind++) sum[TRAFFIC_KINDS + kind] += plan.bytes[kind];
    }
    dist_sum(RANKS_ALL, sum, 2 * TRAFFIC_KINDS);
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++)
        expect_bytes((TrafficKind)kind, sum[kind], sum[TRAFFIC_KINDS + kind], 1e-12);
    most[world.rank] = (double)r->peak;
    dist_sum(RANKS_ALL, most, world.ranks);
    for (size_t i = 0; i < world.ranks; i++) peak = fmax(peak, most[i]);
    if (peak != (double)r->planned) test_fail("%.0f bytes of %zu planned were used", peak, r->planned);
}

// ring: keys and values are passed around instead of gathered.
static void expect_shared(const Case *c, const Result *expected, int ring, Method method, size_t chunk,
                          size_t logits_chunk) {
    static int call; // attention's outputs are recomputed, kept on the device, in host memory
    RunSettings settings = tiny_settings(&c->tiny, method, chunk, logits_chunk);
    settings.ring = ring, tiny_keep(&settings, (size_t)call++ % 3);
    Result found = run(c, world, settings);
    expect_same(c, &found, expected);
    expect_sent(c, &found);
    expect_planned(c, &found);
    free(found.step.gradient);
}

// ---- tests ----------------------------------------------------------------------------------------------------------
// Runs a family, the i-th, and a part of the lengths, by some methods and chunks.
static void family_agrees(Config config, const char *text, size_t sp, size_t i) {
    static const size_t chunks[] = {1, 3, 7, 100};
    const size_t ranks = dist_ranks(), step = all_cases() ? 1 : ranks == 4 ? 4 : 2;
    for (size_t j = (i + ranks + sp / 2) % step; j < LENGTHS; j += step) {
        Case c = case_of(config, 0);
        test_case("%zu ranks, sp %zu, %.30s..., lengths %zu", ranks, sp, text, j);
        for (size_t replica = 0; replica < world_replicas(world); replica++) {
            const size_t k = (j + replica * 4) % LENGTHS, documents = lengths[k].documents;
            case_add(&c, tiny_batch(lengths[k].length, documents, config.vocab_size, documents > 3, 11));
        }
        Result expected = run_alone(&c, METHOD_FULL, 0, 0);
        expect_shared(&c, &expected, i / 2 % 2, j % 3 ? METHOD_CHECKPOINT : METHOD_FULL, 0, 0);
        for (size_t k = i % 2; k < 4; k += 2)
            expect_shared(&c, &expected, (i + j + k / 2) % 2, METHOD_STREAM, chunks[k], chunks[(k + j) % 4]);
        free(expected.step.gradient);
        case_free(&c);
    }
}

// Runs every family; all numbers of ranks together cover all lengths.
static void families_agree(size_t sp, size_t first, size_t end) {
    world_begin(sp);
    for (size_t i = first; i < end; i++)
        family_agrees(config_from_text(models[i], "test", EXIT_USAGE), models[i], sp, i);
}

TEST(families_agree_with_one_process) { families_agree(dist_ranks(), 0, HYBRIDS_FROM); }
TEST(hybrids_agree_with_one_process) { families_agree(dist_ranks(), HYBRIDS_FROM, MODELS); }

static void skip_without_replicas(void) {
    if (dist_ranks() != 4) test_skip("two streams of two ranks each need four processes");
}

TEST(families_in_replicas) {
    skip_without_replicas();
    families_agree(2, 0, MODELS);
}

// ---- objectives and adapters ----------------------------------------------------------------------------------------
static const struct {
    ObjectiveKind kind;
    Normalisation normalisation;
    double beta, temperature;
} tried[] = {
    {OBJECTIVE_SFT, NORMALISE_GRPO, 0, 1},      {OBJECTIVE_DPO, NORMALISE_GRPO, 0.3, 1},
    {OBJECTIVE_GRPO, NORMALISE_GRPO, 0.1, 1.3}, {OBJECTIVE_GRPO, NORMALISE_BNPO, 0, 1},
    {OBJECTIVE_GSPO, NORMALISE_GRPO, 0.1, 1},   {OBJECTIVE_PPO, NORMALISE_BNPO, 0, 1},
};

static void case_objective(Case *c, size_t i) {
    Objective *o = &c->tiny.settings.objective;
    o->kind = tried[i].kind, o->normalisation = tried[i].normalisation;
    o->beta = tried[i].beta, o->temperature.divisor = tried[i].temperature;
    o->gamma = 0.5, o->clip_low = 0.2, o->clip_high = NAN, o->completion_tokens = 12;
    objective_resolve(o);
}

static const size_t answers[2][6] = {{6, 9, 1, 17, 11, 3}, {5, 2, 13, 8, 1, 1}};

static Batch answers_batch(const Case *c, size_t replica) {
    const size_t V = c->tiny.model.config.vocab_size;
    Batch batch = tiny_batch(answers[replica], 6, V, 1, 5 + replica);
    tiny_answers(&batch, c->tiny.settings.objective.kind, 1, V, 3 + replica);
    return batch;
}

// Runs each objective with a full model and with adapters, by two thirds of the methods each.
static void objectives_agree(size_t sp) {
    static const struct {
        int ring;
        Method method;
        size_t chunk, logits_chunk;
    } runs[] = {{0, METHOD_FULL, 0, 0}, {0, METHOD_STREAM, 7, 5}, {1, METHOD_STREAM, 3, 100}};
    world_begin(sp);
    for (size_t i = 0; i < COUNT_OF(tried); i++) {
        for (int lora = 0; lora < 2; lora++) {
            Case c = case_make(models[lora ? 2 : 3], lora);
            test_case("%zu ranks, sp %zu, %s%s", world.ranks, sp, objective_names[tried[i].kind], lora ? ", LoRA" : "");
            case_objective(&c, i);
            for (size_t replica = 0; replica < world_replicas(world); replica++)
                case_add(&c, answers_batch(&c, replica));
            Result expected = run_alone(&c, METHOD_STREAM, 4, 9);
            for (size_t k = 0; k < COUNT_OF(runs); k++) {
                const int ring = k ? runs[k].ring : (int)i % 2;
                if (!all_cases() && (i + k + (size_t)lora + world.ranks) % 3 == 0) continue;
                expect_shared(&c, &expected, ring, runs[k].method, runs[k].chunk, runs[k].logits_chunk);
            }
            free(expected.step.gradient);
            case_free(&c);
        }
    }
}

TEST(objectives_agree_with_one_process) { objectives_agree(dist_ranks()); }

TEST(objectives_in_replicas) {
    skip_without_replicas();
    objectives_agree(2);
}

// Returns documents [begin, end) of a batch as a part of it.
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

// Two parts of one micro-batch drop the same elements as the whole.
TEST(parts_drop_the_same) {
    Case whole = case_make(models[1], 1), parts = case_make(models[1], 1);
    world_begin(dist_ranks() == 4 ? 2 : dist_ranks());
    case_objective(&whole, 1), case_objective(&parts, 1);
    case_add(&whole, answers_batch(&whole, 0));
    case_add(&parts, part_of(&whole.batch[0], 0, 2));
    case_add(&parts, part_of(&whole.batch[0], 2, 6));
    Result expected = run_alone(&whole, METHOD_STREAM, 5, 7);
    Result found = run(&parts, world, tiny_settings(&parts.tiny, METHOD_STREAM, 4, 9));
    memset(found.logp, 0, sizeof(found.logp)); // of other streams
    expect_same(&whole, &found, &expected);
    free(expected.step.gradient), free(found.step.gradient);
    case_free(&whole), case_free(&parts);
}

// ---- memory and determinism -----------------------------------------------------------------------------------------
// The same step twice gives the same bits on every rank.
TEST(deterministic) {
    Case c = case_make(models[4], 0);
    world_begin(dist_ranks());
    case_add(&c, tiny_batch(lengths[8].length, lengths[8].documents, 33, 1, 3));
    const RunSettings settings = tiny_settings(&c.tiny, METHOD_STREAM, 4, 5);
    Result first = run(&c, world, settings), second = run(&c, world, settings);
    tiny_expect_bits(second.step, first.step, "a second run");
    free(first.step.gradient), free(second.step.gradient);
    case_free(&c);
}

static size_t planned(const Model *model, World w, size_t N) {
    size_t start[] = {0, N};
    RunSettings settings = {0};
    Batch batch = {0};
    settings.model = model, settings.backward = 1, settings.gradient_type = model->dtype, settings.world = w;
    batch.N = N, batch.documents = 1, batch.document_start = start;
    return plan_make(&settings, &batch).total_bytes;
}

// With layer inputs the largest part, two ranks need at most 0.6 of one rank's memory each.
TEST(two_ranks_need_little_more_than_half) {
    static const char *const deep[] = {
        "qwen3,hidden_size=512,intermediate_size=1024,num_hidden_layers=28,num_attention_heads=8,num_key_value_heads=4,"
        "head_dim=64,vocab_size=1000",
        "mistral,hidden_size=512,intermediate_size=1024,num_hidden_layers=28,num_attention_heads=8,"
        "num_key_value_heads=4,vocab_size=1000,sliding_window=4096"};
    World two = {2, 0, 0, 2};
    for (size_t i = 0; i < 2; i++) {
        Config config = config_from_text(deep[i], "test", EXIT_USAGE);
        Model model = model_build(&config, ops_device->stored);
        const double one = (double)planned(&model, world_alone(), (size_t)1 << 20);
        const double half = (double)planned(&model, two, (size_t)1 << 20);
        test_case("%.20s...", deep[i]);
        if (!(half <= 0.6 * one)) test_fail("%.3f of one rank's memory", half / one);
        model_free(&model);
    }
}

// A plan for the longest of many streams fits all of them.
TEST(plans_never_fall) {
    static const size_t planned_models[] = {0, 3, 6};
    for (size_t m = 0; m < 3; m++) {
        Config config = config_from_text(models[planned_models[m]], "test", EXIT_USAGE);
        Model model = model_build(&config, ops_device->stored);
        for (size_t S = 2; S <= 9; S++) {
            World w = {S, 0, 0, S};
            size_t before = 0;
            for (size_t N = 1; N <= 64; N++) {
                const size_t needs = planned(&model, w, N);
                test_case("%.20s..., %zu ranks, %zu tokens", models[planned_models[m]], S, N);
                if (needs < before) test_fail("%zu bytes, but one token less takes %zu", needs, before);
                before = needs;
            }
        }
        model_free(&model);
    }
}

// Attention alone, an MLP alone, linear attention alone
TEST(layers_of_one_branch_agree) {
    Config config = config_from_text(TINY_HYBRID ",num_hidden_layers=3,linear_num_value_heads=2", "test", EXIT_USAGE);
    snprintf(config.layer_types, sizeof(config.layer_types), "FpL");
    world_begin(dist_ranks());
    family_agrees(config, "layers FpL", dist_ranks(), 0);
}

int main(int argc, char **argv) {
    dist_start();
    if (dist_ranks() < 2 || dist_ranks() > 4) die_usage("takes 2 to 4 processes: test/ranks/mpirun.sh 3 %s", argv[0]);
    RUN_LISTED(argc, argv, NULL);
}
