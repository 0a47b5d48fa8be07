/*
Places against an all-device run, to the bit: losses, norms, weights, moments and master weights after two steps. Layer
inputs, weights, gradients, optimizer state and kept attention are on the device, in host memory and on a disk. The
cases also vary --inputs-every, methods, chunks, families, objectives, adapters, accumulation, stored types, stages of
ZeRO and shared sequences. They cover every pair of two settings; with ALL_CASES every combination of places. All memory
begins as NaN, each place takes its planned bytes, and the planned bytes move.

A single process runs inside the fence (fence.h), which ends it if an op runs before its transfer is awaited. Then waits
are left out one by one, and the fence must notice it. Under mpirun with 2 processes, transfers to disk run in threads.
*/
#include "test/model/small_slices.h"
#include "test/base/testing.h"
#include "test/ops/fence.h"
#include "test/streambp/rank_runs.h"

// ---- factors of a case ----------------------------------------------------------------------------------------------
enum {
    INPUTS,
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    KEPT, // 0: recomputed; 1 to 3: attention's outputs, 1 + place; 4: products on the device; 5: all in host memory;
          // 6: products of the last two layers, of them the first layer's on disk
    EVERY,
    METHOD,
    CHUNK,
    MODEL,
    OBJECTIVE,
    ADAPTERS,
    MICRO_BATCHES,
    GRADIENT_TYPE, // 0: the sums' type, 1: the weights'
    STATE,         // 0: moments in the type of sums, a master copy of bf16 weights; 1: bf16 moments alone;
                   // 2: int8 moments alone
    STAGE,
    SHARED, // 0: every rank has its own sequences; 1: ranks share one and gather; 2: as a ring
    DEFERS, // 1: defers the step to the next pass
    FACTORS
};
enum { MOST_LEVELS = 7, MOST_CASES = 96, TRAINED_STEPS = 2 };

typedef struct {
    size_t of[FACTORS];
} Levels;

static const char *const factor_names[FACTORS] = {"inputs", "weights", "gradients", "optimizer", "kept",  "every",
                                                  "method", "chunk",   "model",     "objective", "LoRA",  "batches",
                                                  "type",   "state",   "stage",     "shared",    "defers"};
static const char *const models[] = {
    "qwen3,hidden_size=16,intermediate_size=20,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=6,vocab_size=23,tie_word_embeddings=true",
    "gemma3,hidden_size=12,intermediate_size=16,num_hidden_layers=5,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,vocab_size=19,query_pre_attn_scalar=5,sliding_window=6,layer_types=ssf",
    "gpt2,hidden_size=12,num_hidden_layers=3,num_attention_heads=2,vocab_size=21,max_position_embeddings=64",
    "qwen3_5,hidden_size=12,intermediate_size=20,num_hidden_layers=5,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,vocab_size=25,layer_types=llf,linear_num_key_heads=1,linear_num_value_heads=2,linear_key_head_dim=10,"
    "linear_value_head_dim=4",
    "qwen3_moe,hidden_size=12,intermediate_size=16,moe_intermediate_size=8,num_hidden_layers=5,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=8,vocab_size=23,num_experts=5,num_experts_per_tok=2,decoder_sparse_step=2",
    TINY_SINKS,
    TINY_OWN ",num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12",
};
enum { SHARED_KEYS = COUNT_OF(models) - 1, FEWER = SHARED_KEYS - 1 }; // layers share keys; models of the bf16 build
static const Method methods[] = {METHOD_STREAM, METHOD_CHECKPOINT, METHOD_FULL, METHOD_MST, METHOD_SECO};
static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_GRPO};
static const size_t everies[] = {1, 2, 3, 9};
static const struct { size_t chunk, logits_chunk; } chunks[] = {{5, 1000}, {9, 4}, {1000, 7}};

static size_t levels_of(int factor) {
    static const size_t levels[FACTORS] = {3, 3, 3, 3, 7, 4, COUNT_OF(methods), 3, COUNT_OF(models), 3, 2,
                                           2, 2, 3, 4, 3, 2};
    const int ranks = factor == STAGE || factor == SHARED, only_one = ranks && world.ranks == 1;
    if (factor == MODEL && ops_device->stored == DTYPE_BF16 && !all_cases()) return FEWER; // all in fp32, double
    if (factor == GRADIENT_TYPE && ops_device->stored != DTYPE_BF16) return 1;
    return only_one ? 1 : levels[factor];
}

// Whether two levels combine. Methods full and seco keep every activation. Chunk-major methods run in a process alone;
// stage 3 cannot gather weights for ranks with different chunks. Their layers cannot share keys.
static int possible(int a, size_t x, int b, size_t y) {
    if (a == SHARED && b == KEPT) return possible(b, y, a, x);
    if (a == KEPT && b == SHARED) return x < 4 || !y;
    if (b == METHOD) return possible(b, y, a, x);
    if (a != METHOD || y == 0) return 1;
    if (b == MODEL) return y != SHARED_KEYS || methods[x] != METHOD_SECO;
    const Method method = methods[x];
    if (b == KEPT && y > 3) return method <= METHOD_CHECKPOINT;
    if (b == KEPT || b == EVERY) return method_recomputes(method);
    if (b == SHARED) return method < METHOD_MST;
    return b != STAGE || y < ZERO_WEIGHTS || method != METHOD_SECO;
}

// ---- cases that cover all pairs -------------------------------------------------------------------------------------
static struct { char met[FACTORS][MOST_LEVELS][FACTORS][MOST_LEVELS]; } pairs;

static size_t pairs_new(const Levels *levels, int factor, int known) {
    size_t found = 0;
    for (int other = 0; other < FACTORS; other++)
        found += (known >> other & 1) && !pairs.met[factor][levels->of[factor]][other][levels->of[other]];
    return found;
}

// Completes a case from two levels; the others, in random order, are those that cover the most new pairs.
static size_t case_fill(Levels *levels, int first, int second, uint64_t seed) {
    int known = 1 << first | 1 << second;
    size_t meet = pairs_new(levels, first, 1 << second);
    for (uint64_t draw = 0; known != (1 << FACTORS) - 1; draw++) {
        const int factor = (int)random_below(seed, 1, draw, FACTORS);
        size_t best = 0, most = 0, from = (size_t)random_below(seed, 2, draw, levels_of(factor));
        if (known >> factor & 1) continue;
        for (size_t i = 0; i < levels_of(factor); i++) {
            int fits = 1;
            levels->of[factor] = (from + i) % levels_of(factor);
            for (int other = 0; other < FACTORS; other++)
                fits &= !(known >> other & 1) || possible(factor, levels->of[factor], other, levels->of[other]);
            const size_t new_ones = pairs_new(levels, factor, known);
            if (fits && new_ones >= most) most = new_ones + 1, best = levels->of[factor];
        }
        levels->of[factor] = best, known |= 1 << factor;
        meet += pairs_new(levels, factor, known & ~(1 << factor));
    }
    return meet;
}

static void case_met(const Levels *levels) {
    for (int a = 0; a < FACTORS; a++)
        for (int b = 0; b < FACTORS; b++) pairs.met[a][levels->of[a]][b][levels->of[b]] = 1;
}

// Finds two levels that no case combines; 0: none.
static int pair_missing(Levels *levels, int *a, int *b) {
    for (*a = 0; *a < FACTORS; ++*a)
        for (*b = *a + 1; *b < FACTORS; ++*b)
            for (size_t x = 0; x < levels_of(*a); x++)
                for (size_t y = 0; y < levels_of(*b); y++) {
                    levels->of[*a] = x, levels->of[*b] = y;
                    if (!pairs.met[*a][x][*b][y] && possible(*a, x, *b, y)) return 1;
                }
    return 0;
}

static size_t cases_make(Levels cases[MOST_CASES]) {
    Levels begin = {{0}};
    size_t count = 0;
    int a, b;
    memset(&pairs, 0, sizeof(pairs));
    for (; pair_missing(&begin, &a, &b); count++) {
        size_t most = 0;
        assert_true(count < MOST_CASES);
        for (uint64_t seed = 0; seed < 40; seed++) {
            Levels levels = begin;
            const size_t meet = case_fill(&levels, a, b, 100 * count + seed);
            if (meet > most) most = meet, cases[count] = levels;
        }
        case_met(&cases[count]);
    }
    return count;
}

// ---- a case ---------------------------------------------------------------------------------------------------------
static void case_name(const Levels *levels) {
    size_t used = 0;
    test_case("%s", "");
    for (int i = 0; i < FACTORS; i++)
        used += (size_t)snprintf(testing.about + used, sizeof(testing.about) - used, "%s%s %zu", i ? ", " : "",
                                 factor_names[i], levels->of[i]);
}

static Case case_make(const Levels *levels) {
    const size_t *const of = levels->of;
    const ObjectiveKind kind = kinds[of[OBJECTIVE]];
    Case c = {0};
    case_name(levels);
    world_begin(of[SHARED] ? world.ranks : 1);
    c.tiny = tiny_case(models[of[MODEL]], of[ADAPTERS] ? 3 : 0);
    c.tiny.lora.dropout = of[ADAPTERS] ? 0.2 : 0;
    RunSettings *s = &c.tiny.settings;
    const DType sums = dtype_of_sums(c.tiny.model.dtype);
    s->objective = tiny_objective(kind);
    s->backward = s->optimizer = 1;
    s->gradient_type = of[GRADIENT_TYPE] ? c.tiny.model.dtype : sums;
    s->moment_type = of[STATE] == 2 ? DTYPE_INT8 : of[STATE] ? DTYPE_BF16 : sums;
    s->master = !of[STATE] && c.tiny.model.dtype == DTYPE_BF16;
    for (size_t i = 0; i < (of[MICRO_BATCHES] ? 3 : 1) * world_replicas(world); i++)
        case_add(&c, case_batch(kind, 4, 8, c.tiny.model.config.vocab_size, 100 + i));
    return c;
}

// Returns the case's settings; placed 0: all on the device, inputs of all layers kept.
static RunSettings case_settings(const Case *c, const Levels *levels, int placed) {
    const size_t *const of = levels->of;
    RunSettings s =
        tiny_settings(&c->tiny, methods[of[METHOD]], chunks[of[CHUNK]].chunk, chunks[of[CHUNK]].logits_chunk);
    s.world = world, s.world.zero = of[STAGE], s.ring = of[SHARED] == 2;
    static const Keeping keeping[] = {{LEVEL_NONE, 0, 0},      {LEVEL_ATTENTION, 0, 0}, {LEVEL_ATTENTION, 0, 0},
                                      {LEVEL_ATTENTION, 0, 0}, {LEVEL_PRODUCTS, 0, 0},  {LEVEL_ALL, 0, 0},
                                      {LEVEL_PRODUCTS, 2, 1}};
    static const Place kept_on[] = {PLACE_DEVICE, PLACE_DEVICE, PLACE_HOST, PLACE_DISK,
                                    PLACE_DEVICE, PLACE_HOST,   PLACE_DISK};
    s.keep = keeping[of[KEPT]], s.accumulates = of[MICRO_BATCHES] > 0;
    s.inputs_every = 1;
    if (!placed) return s;
    s.inputs_every = everies[of[EVERY]], s.defers = (int)of[DEFERS];
    s.place[PLACED_INPUTS] = (Place)of[INPUTS], s.place[PLACED_WEIGHTS] = (Place)of[WEIGHTS];
    s.place[PLACED_GRADIENTS] = (Place)of[GRADIENTS], s.place[PLACED_OPTIMIZER] = (Place)of[OPTIMIZER];
    s.place[PLACED_KEPT] = kept_on[of[KEPT]];
    return s;
}

// ---- its steps ------------------------------------------------------------------------------------------------------
enum { STATES = 6 };
static const char *const state_names[STATES] = {"weights",        "first moments",   "second moments",
                                                "master weights", "scales of first", "scales of second"};

typedef struct {
    double forward, loss[TRAINED_STEPS], norm[TRAINED_STEPS]; // forward: the loss of a forward pass alone
    unsigned char *values[STATES];                            // of this rank, memory of the case; NULL: none
    size_t bytes[STATES];
    size_t reads; // by the host in the passes; in the fence alone
    Moved moved;
    size_t peak[PLACES], planned[PLACES];
    Moved plan; // for one micro-batch and an optimizer step
} Trained;

static void read_state(Trained *t, size_t i, const Model *table, Sharding sharding, const void *memory, DType type) {
    if (!memory) return;
    t->bytes[i] = (i > 3 ? moment_floats_all(table, sharding) : sharding_elements(table, sharding)) * dtype_size(type);
    t->values[i] = (unsigned char *)case_memory(t->bytes[i]);
    run_ops->copy_out(t->values[i], memory, t->bytes[i]);
}

// Trains two steps. The caller ends *r.
static Trained train_begun(TinyRun *r, const Case *c, RunSettings settings) {
    const Model *table = tiny_table(&c->tiny);
    const Sharding states = sharding_of(settings.world, ZERO_OPTIMIZER);
    const DType moments = settings.moment_type;
    Residency *memory = &r->s.memory;
    Trained t = {0};
    Update update;
    AdamW step = case_adamw();
    optimizer_step(memory, &r->state, NULL);
    memset(&memory->moved, 0, sizeof(memory->moved));
    for (size_t i = 0; i < TRAINED_STEPS; i++) {
        const Parameter *bad;
        const size_t before = fence.reads;
        t.loss[i] = case_gradient(r, c);
        const size_t pass = fence.reads - before;
        t.norm[i] = gradient_norm(memory, &bad);
        if (fence.reads > before + pass + 1) test_fail("the norm waits for the device more than once");
        t.reads += pass;
        step.gradient_scale = gradient_clip(t.norm[i], 0.7), step.step = (int64_t)i + 1;
        if (settings.defers) {
            update_defer(&update, memory, &r->state, &step);
        } else {
            optimizer_step(memory, &r->state, &step);
            weights_updated(memory);
        }
    }
    weights_flush(memory);
    read_state(&t, 0, table, weights_sharding(memory), trained_weights(memory), table->dtype);
    read_state(&t, 1, table, states, r->state.m, moments);
    read_state(&t, 2, table, states, r->state.v, moments);
    read_state(&t, 3, table, states, r->state.master, DTYPE_FP32);
    read_state(&t, 4, table, states, r->state.m_scales, DTYPE_FP32);
    read_state(&t, 5, table, states, r->state.v_scales, DTYPE_FP32);
    t.moved = memory->moved, t.plan = r->plan.moved;
    t.planned[PLACE_DEVICE] = r->plan.total_bytes;
    t.planned[PLACE_HOST] = r->plan.arena[PLACE_HOST].peak, t.planned[PLACE_DISK] = r->plan.disk_bytes;
    for (int place = 0; place < PLACES; place++) t.peak[place] = r->arena[place].peak;
    return t;
}

static Trained train(const Case *c, RunSettings settings) {
    static TinyRun r;
    case_begin(&r, c, settings);
    const double forward = forward_only(&r.s, &c->batch[case_own(c, settings.world).begin], 40, NULL);
    Trained t = train_begun(&r, c, settings);
    t.forward = forward;
    tiny_end(&r);
    return t;
}

// Returns what differs first; NULL: the same bits.
static const char *difference(const Trained *found, const Trained *expected) {
    if (memcmp(found->loss, expected->loss, sizeof(found->loss)) != 0) return "losses";
    if (memcmp(found->norm, expected->norm, sizeof(found->norm)) != 0) return "norms";
    for (size_t i = 0; i < STATES; i++)
        if (found->values[i] && memcmp(found->values[i], expected->values[i], found->bytes[i]) != 0)
            return state_names[i];
    return NULL;
}

// A deferred step meets the largest sequence, the planned peak, only if that comes first in the next step.
static void expect_planned(const Levels *levels, const Trained *t) {
    const double passes = (levels->of[MICRO_BATCHES] ? 3 : 1) * TRAINED_STEPS;
    for (int place = 0; place < PLACES; place++)
        if (world.ranks > 1 || levels->of[DEFERS] ? t->peak[place] > t->planned[place]
                                                  : t->peak[place] != t->planned[place])
            test_fail("%s: peak %zu, planned %zu", place_names[place], t->peak[place], t->planned[place]);
    for (int phase = 0; phase < PHASES; phase++)
        for (int way = 0; way < WAYS && world.ranks == 1 && passes == TRAINED_STEPS; way++) {
            const double moved = t->moved.bytes[phase][way], planned = TRAINED_STEPS * t->plan.bytes[phase][way];
            if (fabs(moved - planned) > 1e-9 * planned)
                test_fail("phase %d, way %d: %.1f bytes moved, planned %.1f", phase, way, moved, planned);
        }
}

static void expect_learned(const Trained *t) {
    if (!(t->loss[0] != t->loss[1] && isfinite(t->loss[1]) && t->norm[0] > 0 && isfinite(t->norm[1])))
        test_fail("losses %g, %g, norms %g, %g", t->loss[0], t->loss[1], t->norm[0], t->norm[1]);
}

static void expect_same(const Case *c, const Levels *levels, const Trained *expected) {
    const Trained found = train(c, case_settings(c, levels, 1));
    const char *differs = difference(&found, expected);
    if (differs) test_fail("%s have other bits than with all on the device", differs);
    if (found.reads != expected->reads) test_fail("the host reads %zu times, not %zu", found.reads, expected->reads);
    if (found.forward != expected->forward) test_fail("loss %g of a forward pass alone", found.forward);
    expect_planned(levels, &found);
}

TEST(every_pair_of_settings) {
    static Levels cases[MOST_CASES];
    const size_t count = cases_make(cases);
    printf("             %zu cases\n", count);
    for (size_t i = 0; i < count; i++) {
        Case c = case_make(&cases[i]);
        const Trained expected = train(&c, case_settings(&c, &cases[i], 0));
        expect_learned(&expected);
        expect_same(&c, &cases[i], &expected);
        case_free(&c);
    }
}

// All products of five places, spread over the cases
TEST(every_product_of_places) {
    static Levels cases[MOST_CASES];
    const size_t count = cases_make(cases);
    for (size_t i = 0; i < count && all_cases(); i++) {
        Case c = case_make(&cases[i]);
        const Trained expected = train(&c, case_settings(&c, &cases[i], 0));
        for (size_t product = i; product < 3 * 3 * 3 * 3 * 3; product += count) {
            Levels levels = cases[i];
            for (size_t k = 0, rest = product; k < KEPT; k++, rest /= 3) levels.of[k] = rest % levels_of((int)k);
            if (levels.of[KEPT]) levels.of[KEPT] = 1 + product / 81;
            expect_same(&c, &levels, &expected);
        }
        case_free(&c);
    }
}

// Only the first rank has some of a layer's few adapters, and layers of one kind have none: all ranks still wait for
// the layer's weights.
TEST(adapters_of_some_layers) {
    static const char *const targets[PLACES] = {"", "k_proj", "in_proj_z"}; // then different ones per layer
    Levels levels = {{0}};
    levels.of[MODEL] = 3, levels.of[ADAPTERS] = 1, levels.of[STAGE] = world.ranks > 1 ? ZERO_WEIGHTS : 0;
    for (int place = PLACE_HOST; place < PLACES; place++) {
        levels.of[WEIGHTS] = levels.of[GRADIENTS] = levels.of[OPTIMIZER] = (size_t)place;
        Case c = case_make(&levels);
        Lora *lora = &c.tiny.lora;
        lora_free(lora), free(c.tiny.adapters);
        lora->rank = 1, lora->modules = lora_modules(c.tiny.model.config.family, targets[place], "test", EXIT_USAGE);
        if (place == PLACE_DISK) lora->modules = ~0u, lora_vary(lora, &c.tiny.model.config);
        lora_build(lora, &c.tiny.model);
        c.tiny.adapters = tiny_weights(&lora->table, 19);
        const Trained expected = train(&c, case_settings(&c, &levels, 0));
        expect_learned(&expected);
        expect_same(&c, &levels, &expected);
        case_free(&c);
    }
}

// ---- omitted waits --------------------------------------------------------------------------------------------------
// Consecutive waits of one kind without an op between them count as one.
static struct {
    const Ops *fenced;
    size_t waits, skip; // of a run so far; number of the omitted one, from 1
    int64_t last;       // ticket of the previous wait
    size_t ops;         // before it
} planted;

static void planted_await(int64_t ticket) {
    const int same = planted.last && planted.ops == fence.count && ticket % 4 == planted.last % 4;
    if (!fence_pending(ticket) && !same) {
        planted.fenced->await_transfer(ticket);
        return;
    }
    planted.waits += !same;
    if (planted.waits != planted.skip) planted.fenced->await_transfer(ticket);
    planted.last = ticket, planted.ops = fence.count;
}

// Trains with one wait omitted; 0: the omission was caught.
static int trains_without(const Case *c, RunSettings settings, size_t skip, const Trained *expected) {
    static TinyRun r;
    static jmp_buf caught;
    case_begin(&r, c, settings);
    planted.waits = planted.ops = 0, planted.last = 0, planted.skip = skip;
    under_way.caught = &caught;
    const int found = setjmp(caught);
    if (!found) {
        const Trained t = train_begun(&r, c, settings);
        if (difference(&t, expected)) test_fail("without wait %zu %s change unseen", skip, difference(&t, expected));
    }
    under_way.caught = NULL;
    tiny_end(&r);
    return !found;
}

// An op comes too early, whether or not bits change. A wait is harmless if another of its kind follows in time, as
// transfers of a kind run in order: at the optimizer's beginning, which loads nothing, for a slot's stores two slices
// before its next write; for a layer's input or gradient that was asked for before weights; in chunk-major methods for
// stores that the next layer's slot, or the next chunk, awaits.
TEST(every_wait_is_needed) {
    static const struct {
        Levels levels;
        size_t harmless;
    } cases[] = {
        {{{PLACE_HOST, PLACE_HOST, PLACE_HOST, PLACE_HOST, 1 + PLACE_HOST}}, 20},
        {{{PLACE_DISK, PLACE_DISK, PLACE_DISK, PLACE_DISK, 1 + PLACE_DISK}}, 20},
        {{{[KEPT] = 5, [CHUNK] = 1}}, 8},
        {{{[KEPT] = 6, [MODEL] = 3}}, 8},
        {{{[INPUTS] = PLACE_HOST, [METHOD] = 4, [CHUNK] = 1}}, 8},
        {{{[INPUTS] = PLACE_HOST, [METHOD] = 4, [MODEL] = 1}}, 4},
        {{{[INPUTS] = PLACE_DISK, [METHOD] = 4, [MODEL] = 3, [CHUNK] = 1}}, 2},
    };
    Ops ops = *ops_fenced();
    planted.fenced = run_ops, run_ops = &ops;
    ops.await_transfer = planted_await;
    for (size_t i = 0; i < COUNT_OF(cases) && world.ranks == 1; i++) {
        const Levels *levels = &cases[i].levels;
        Case c = case_make(levels);
        const RunSettings settings = case_settings(&c, levels, 1);
        const Trained expected = train(&c, case_settings(&c, levels, 0));
        if (!trains_without(&c, settings, 0, &expected)) test_fail("an op comes too early");
        size_t waits = planted.waits, harmless = 0;
        for (size_t skip = 1; skip <= waits; skip++) harmless += (size_t)trains_without(&c, settings, skip, &expected);
        printf("             %zu waits, %zu harmless\n", waits, harmless);
        if (harmless > cases[i].harmless) test_fail("%zu of %zu waits guard nothing", harmless, waits);
        case_free(&c);
    }
    run_ops = planted.fenced;
}

int main(int argc, char **argv) {
    dist_start();
    world_begin(1);
    if (world.ranks == 1 && !EMULATED) run_ops = ops_fenced();
    RUN_LISTED(argc, argv, NULL);
}
