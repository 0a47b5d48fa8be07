/*
Several processes against one process, in the same program: every rank first computes the step alone, then its own
documents together with the other ranks (test/ranks/mpirun.sh P). Of four ranks, two at a time share a stream. Loss and
gradient equal the single process's, for every stage of ZeRO, method, family and objective, with and without adapters
and accumulation. All stages give the same bits. Steps of AdamW lead to the same weights. Traffic follows its formula,
memory the plan. All memory begins as NaN, so that a rank's use of elements that it does not hold shows.
*/
#include "test/model/small_slices.h"
#include "llmc/files/gradients.h"
#include "rank_runs.h"
#include "test/base/child.h"

static const char *const models[] = {
    TINY_LLAMA,
    TINY_TIED,
    "gpt2,hidden_size=24,num_hidden_layers=1,num_attention_heads=3,vocab_size=37,max_position_embeddings=64",
    TINY_GEMMA ",sliding_window=9,layer_types=ssf",
    TINY_HYBRID ",num_hidden_layers=3,layer_types=lf,linear_num_value_heads=4,tie_word_embeddings=true",
    TINY_SHARED,
    TINY_BARE,
    TINY_SHAPES,
    TINY_MAMBA,
    TINY_GRANITE,
};
enum { MODELS = COUNT_OF(models), STAGES = 4 };

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-5 : 0.03;
}

static Case case_make(size_t m, ObjectiveKind kind, int lora, Method method, size_t micro_batches) {
    Case c = {0};
    if (world.sp > 1 && method_is_chunk_major(method)) method = METHOD_STREAM; // ranks that share a sequence
    c.tiny = tiny_case(models[m], lora ? 3 : 0);
    c.tiny.settings.objective = tiny_objective(kind);
    c.tiny.settings.method = method, c.tiny.settings.backward = 1;
    tiny_router_losses(&c.tiny.model, &c.tiny.settings);
    c.tiny.settings.gradient_type = dtype_of_sums(c.tiny.model.dtype);
    for (size_t i = 0; i < micro_batches * world_replicas(world); i++)
        case_add(&c, case_batch(kind, kind == OBJECTIVE_SFT ? 3 : 4, 11, c.tiny.model.config.vocab_size, 100 + i));
    test_case("%.6s, %s, method %d, %zu micro-batches%s", models[m], objective_names[kind], (int)method, micro_batches,
              lora ? ", LoRA" : "");
    return c;
}

// Weights and gradients are on the device, in host memory or on a disk, in turn.
static RunSettings case_settings(const Case *c, size_t stage) {
    static size_t call;
    RunSettings settings = tiny_settings(&c->tiny, c->tiny.settings.method, 5, 7);
    settings.world = world, settings.world.zero = stage;
    settings.place[PLACED_WEIGHTS] = (Place)(call % PLACES),
    settings.place[PLACED_GRADIENTS] = (Place)(call / 2 % PLACES);
    settings.accumulates = c->batches > world_replicas(world);
    call++;
    return settings;
}

static RunSettings case_settings_alone(const Case *c) {
    RunSettings settings = tiny_settings(&c->tiny, c->tiny.settings.method, 5, 7);
    settings.world = world_alone();
    return settings;
}

static void case_stage(size_t stage) {
    const size_t about = strcspn(testing.about, ";");
    snprintf(testing.about + about, sizeof(testing.about) - about, "; stage %zu", stage);
}

// ---- the step alone, and beside others ------------------------------------------------------------------------------
static TinyResult step_run(const Case *c, RunSettings settings, double *norm) {
    const Parameter *bad;
    TinyRun r;
    case_begin(&r, c, settings);
    const double loss = case_gradient(&r, c);
    const TinyResult step = case_result(&r, c, loss);
    *norm = gradient_norm(&r.s.memory, &bad);
    assert_null(bad);
    if (r.arena->peak > r.plan.total_bytes) test_fail("peak %zu, planned %zu", r.arena->peak, r.plan.total_bytes);
    tiny_end(&r);
    return step;
}

static void expect_norm(size_t step, double found, double alone, double allowed) {
    if (!(fabs(found - alone) <= allowed * alone)) test_fail("step %zu: norm %.17g, alone %.17g", step, found, alone);
}

// Stages 0 and 1 sum in place and reduce once a step, the others once a stream.
static int reduced_alike(const Case *c, size_t stage) {
    return stage != 2 || c->batches == world_replicas(world) ||
           c->tiny.settings.gradient_type != dtype_of_sums(c->tiny.model.dtype);
}

// Compares all stages with the process alone, and each with the one before it.
static void stages_agree(Case *c) {
    const Model *table = tiny_table(&c->tiny);
    double norm[2];
    TinyResult alone = step_run(c, case_settings_alone(c), &norm[0]), before = {0, NULL, 0};
    const int chunks_first = method_is_chunk_major(c->tiny.settings.method); // not in stage 3
    for (size_t stage = 0; stage < STAGES - (chunks_first != 0); stage++) {
        case_stage(stage);
        TinyResult step = step_run(c, case_settings(c, stage), &norm[1]);
        tiny_expect_same(table, step, alone, bound(), 0.1, 0);
        expect_norm(1, norm[1], norm[0], bound());
        if (stage && reduced_alike(c, stage)) tiny_expect_bits(step, before, "the stage before");
        free(before.gradient);
        before = step;
    }
    free(before.gradient), free(alone.gradient);
    case_free(c);
}

// Every family with every objective; adapters, methods and accumulation in turn, so that all pairs occur. Three or four
// ranks run a third of the cases, bf16 one family's: the next test has the others.
TEST(families_and_objectives) {
    static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_GRPO};
    for (size_t m = 0; m < MODELS; m++)
        for (size_t k = 0; k < COUNT_OF(kinds); k++)
            for (size_t lora = 0; lora < 2; lora++) {
                if (!all_cases() && (lora != (m + k) % 2 || (world.ranks > 2 && (2 * m + k) % 3))) continue;
                if (!all_cases() && ops_device->stored == DTYPE_BF16 && m != 1) continue;
                static const Method methods[] = {METHOD_STREAM, METHOD_SECO, METHOD_FULL, METHOD_MST,
                                                 METHOD_CHECKPOINT};
                Case c = case_make(m, kinds[k], (int)lora, methods[(m + 2 * k + lora) % 5], (m / 2 + k) % 2 ? 3 : 1);
                stages_agree(&c);
            }
}

// Gradients stored in the type of weights: in bf16 not the type of sums, so every stream is reduced in all stages. In
// other builds this is nothing new.
TEST(gradients_of_the_type_of_weights) {
    for (size_t m = 0; m < (ops_device->stored == DTYPE_BF16 ? MODELS : 0); m++) {
        Case c = case_make(m, OBJECTIVE_SFT, m == 3, METHOD_STREAM, m % 2 ? 1 : 3);
        c.tiny.settings.gradient_type = c.tiny.model.dtype;
        stages_agree(&c);
    }
}

// ---- steps of the optimizer -----------------------------------------------------------------------------------------
// Parts of memory that this rank does not own, hence never reads
static void poison_others(const Model *table, void *memory, DType type) {
    double *own = read_shard(table, world, sharding_whole(), memory, type, NAN);
    device_write(ops_device, memory, type, own, table->elements);
    free(own);
}

// In bf16 a rounding difference in one gradient grows with the steps: few steps suffice there.
enum { MOST_STEPS = 3 };
static size_t steps(void) { return ops_device->stored == DTYPE_BF16 ? 2 : MOST_STEPS; }

// Runs some steps; returns all weights on every rank. norms[steps()]
static TinyResult train(const Case *c, RunSettings settings, double *norms) {
    const Model *table = tiny_table(&c->tiny);
    TinyRun r;
    Update update;
    AdamW step = case_adamw();
    settings.optimizer = 1;
    case_begin(&r, c, settings);
    Residency *memory = &r.s.memory;
    optimizer_step(memory, &r.state, NULL);
    for (step.step = 1; step.step <= (int64_t)steps(); step.step++) {
        const Parameter *bad;
        case_gradient(&r, c);
        if (settings.world.zero == 1) poison_others(table, memory->gradients, settings.gradient_type);
        norms[step.step - 1] = gradient_norm(memory, &bad);
        step.gradient_scale = gradient_clip(norms[step.step - 1], 0.7);
        if (settings.defers)
            update_defer(&update, memory, &r.state, &step);
        else
            optimizer_step(memory, &r.state, &step);
        if (settings.world.zero == 1 || settings.world.zero == 2)
            poison_others(table, trained_weights(memory), table->dtype);
        if (!settings.defers) weights_updated(memory);
    }
    weights_flush(memory);
    TinyResult result = {0, NULL, table->elements};
    result.gradient =
        read_shards(table, settings.world, weights_sharding(memory), trained_weights(memory), table->dtype);
    tiny_end(&r);
    return result;
}

// Returns how far the steps have come apart, relative to how far they went.
static double drift(const double *found, const double *alone, const double *start, size_t n) {
    double apart = 0, went = 0;
    for (size_t i = 0; i < n; i++) {
        apart += (found[i] - alone[i]) * (found[i] - alone[i]);
        went += (alone[i] - start[i]) * (alone[i] - start[i]);
    }
    return sqrt(apart / went);
}

// Rounding at random moves a bf16 weight by one unit or none, decided by the same bits for gradients that differ in
// rounding. Each stage has its weights and state in other places, and defers the step.
TEST(steps_of_adamw) {
    const int bf16 = ops_device->stored == DTYPE_BF16;
    for (size_t m = 0; m<MODELS; m += world.ranks> 2 ? 3 : 1) {
        Case c = case_make(m, OBJECTIVE_SFT, m == 3, (Method)(m % 3), 1);
        const int small = m % 2, int8 = m >= 2; // moments, gradients and master weights
        if (small) c.tiny.settings.gradient_type = c.tiny.model.dtype;
        c.tiny.settings.master = bf16 && small;
        c.tiny.settings.moment_type = int8 ? DTYPE_INT8 : small ? DTYPE_BF16 : dtype_of_sums(ops_device->stored);
        const double allowed = bf16 ? 0.2 : small || int8 ? 0.05 : ops_device->stored == DTYPE_FP64 ? 1e-11 : 1e-4;
        double norms[2][MOST_STEPS];
        TinyResult alone = train(&c, case_settings_alone(&c), norms[0]), before = {0, NULL, 0};
        for (size_t stage = 0; stage < STAGES; stage++) {
            RunSettings placed = case_settings(&c, stage);
            placed.place[PLACED_OPTIMIZER] = (Place)((stage + m) % PLACES);
            placed.place[PLACED_WEIGHTS] = (Place)((stage + 2 * m + 1) % PLACES), placed.defers = stage % 2;
            case_stage(stage);
            TinyResult found = train(&c, placed, norms[1]);
            const double apart = drift(found.gradient, alone.gradient,
                                       c.tiny.adapters ? c.tiny.adapters : c.tiny.weights, found.elements);
            if (!(apart <= allowed)) test_fail("after these steps weights differ by %.3g of what they moved", apart);
            testing.worst = fmax(testing.worst, apart / allowed);
            for (size_t i = 0; i < steps(); i++) expect_norm(i + 1, norms[1][i], norms[0][i], 10 * allowed);
            if (stage) tiny_expect_bits(found, before, "the stage before");
            free(before.gradient);
            before = found;
        }
        free(before.gradient), free(alone.gradient);
        case_free(&c);
    }
}

// ---- traffic and memory ---------------------------------------------------------------------------------------------
// Returns a stage's least traffic in a step, and the part due to accumulation.
static Traffic formula(const Case *c, RunSettings settings) {
    const Model *m = &c->tiny.model, *table = tiny_table(&c->tiny);
    const double share = (double)(world.ranks - 1) / (double)world.ranks;
    const double streams = (double)(c->batches / world_replicas(world)), elements = (double)table->elements;
    const double summed = (double)dtype_size(dtype_of_sums(m->dtype)), stored = (double)dtype_size(m->dtype);
    const double gradient = (double)dtype_size(settings.gradient_type);
    const double layers = (double)(group_begin(m, GROUP_HEAD) - group_begin(m, 0));
    const double embedding = (double)group_elements(m, GROUP_EMBEDDING), head = (double)group_elements(m, GROUP_HEAD);
    const int in_place = settings.world.zero < 2 && gradient == summed;
    const Model *of = &c->tiny.lora.table; // adapters of layers are gathered twice, of the head and copies once
    const double adapters =
        c->tiny.adapters
            ? (double)of->elements - (double)(group_elements(of, GROUP_EMBEDDING) + group_elements(of, GROUP_HEAD)) / 2
            : 0;
    const int twice = c->tiny.adapters && c->tiny.lora.outer[EMBEDDING].rank; // in backward with its adapter
    const int trains = !c->tiny.adapters || lora_trains_embedding(&c->tiny.lora);
    const int normed = m->config.family->outer_norms && trains; // backward of the norm of embeddings reads them
    const double own = c->tiny.adapters ? (double)group_elements(of, GROUP_EMBEDDING) : 0;
    const double again = (twice + normed) * (embedding + own);
    const double gathered = 2 * layers + embedding + head + (head_is_tied(m) ? embedding : 0) + 2 * adapters + again;
    Traffic t = {0};
    t.bytes[TRAFFIC_GRADIENTS] =
        share * elements * ((in_place ? 1 : streams) * summed + (settings.world.zero ? 0 : gradient));
    if (settings.world.zero)
        t.bytes[TRAFFIC_WEIGHTS] = share * stored * (settings.world.zero == 3 ? streams * gathered : elements);
    return t;
}

static void expect_traffic(const char *what, const Traffic *found, const Traffic *expected, int calls) {
    for (int kind = 0; kind <= TRAFFIC_WEIGHTS; kind++) {
        if (fabs(found->bytes[kind] - expected->bytes[kind]) > 1e-9 * expected->bytes[kind])
            test_fail("%s: %.1f bytes of %s are sent, expected %.1f", what, found->bytes[kind], traffic_names[kind],
                      expected->bytes[kind]);
        if (calls && found->calls[kind] != expected->calls[kind])
            test_fail("%s: %g collectives of %s, expected %g", what, found->calls[kind], traffic_names[kind],
                      expected->calls[kind]);
    }
}

// In a step with its optimizer the arena's peak equals the plan to the byte: all streams have the planned shape. Of
// ranks that share one, the last has the most tokens.
static Traffic sent_by(const Case *c, RunSettings settings) {
    TinyRun r;
    case_begin(&r, c, settings);
    case_gradient(&r, c);
    weights_updated(&r.s.memory);
    if (r.arena->peak != r.plan.total_bytes && world.sp == 1)
        test_fail("peak %zu, planned %zu", r.arena->peak, r.plan.total_bytes);
    tiny_end(&r);
    return r.s.memory.sent;
}

TEST(traffic_and_memory) {
    static const size_t chunks[] = {3, 1000};
    for (size_t m = 0; m < MODELS; m++) {
        const size_t streams = m % 3 ? 1 : 3;
        Case c = case_make(m, OBJECTIVE_SFT, m == 3, METHOD_STREAM, 0);
        for (size_t i = 0; i < streams * world_replicas(world); i++) // all equal
            case_add(&c, case_batch(OBJECTIVE_SFT, 3, 11, c.tiny.model.config.vocab_size, 100));
        c.tiny.settings.moment_type = DTYPE_FP32, c.tiny.settings.optimizer = 1;
        if (m == 2) c.tiny.settings.gradient_type = c.tiny.model.dtype;
        for (size_t stage = 0; stage < STAGES; stage++) {
            RunSettings settings = case_settings(&c, stage);
            const Traffic expected = formula(&c, settings);
            Traffic sent[2];
            case_stage(stage);
            for (size_t i = 0; i < (m == 0 || all_cases() ? 2 : 1); i++) {
                settings.chunk = chunks[i], settings.logits_chunk = chunks[1 - i];
                sent[i] = sent_by(&c, settings);
                const Traffic planned = plan_traffic(&settings, &c.largest, streams);
                expect_traffic("the plan", &planned, &sent[i], 1);
                expect_traffic("the formula", &sent[i], &expected, 0);
                expect_traffic("other chunks", &sent[i], &sent[0], 1);
            }
        }
        case_free(&c);
    }
}

// ---- passes without gradients ---------------------------------------------------------------------------------------
enum { PROMPT = 9 };

// Returns [2 N + 2 V]: a stream's log-probabilities with and without adapters; logits after a prompt, one token later.
static double *passes(const Case *c, RunSettings settings) {
    const size_t N = c->batch[0].N, V = c->tiny.model.config.vocab_size;
    const int32_t tokens[PROMPT] = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    float *logp = (float *)case_memory(N * sizeof(float));
    void *logits = case_memory(V * dtype_size(c->tiny.model.dtype));
    double *values = case_doubles(2 * N + 2 * V);
    Cache cache;
    TinyRun r;
    settings.cache_tokens = PROMPT + 1, settings.backward = 0;
    case_begin(&r, c, settings);
    for (size_t round = 0; round < 2; round++) {
        forward_policy(&r.s, &c->batch[0], (int)round, logp);
        for (size_t i = 0; i < N; i++) values[round * N + i] = (double)logp[i];
    }
    cache_allocate(&cache, 1, PROMPT + 1);
    cache_begin(&cache, &r.s);
    for (size_t done = 0, count; done <= PROMPT; done += count) {
        count = done < PROMPT ? min_size(cache.rows, PROMPT - done) : 1;
        cache_feed(&cache, &r.s, 0, tokens + done % PROMPT, count);
        if (done + count < PROMPT) continue;
        cache_logits(&cache, &r.s, logits);
        for (size_t i = 0; i < V; i++)
            values[2 * N + (done == PROMPT) * V + i] = element_to_double(logits, c->tiny.model.dtype, i);
    }
    cache_end(&cache, &r.s);
    cache_free(&cache);
    tiny_end(&r);
    return values;
}

TEST(passes_without_gradients) {
    for (size_t m = 0; m < MODELS; m++) {
        Case c = case_make(m, OBJECTIVE_SFT, m % 2 == 0, METHOD_STREAM, 1);
        RunSettings settings = case_settings(&c, 3);
        settings.world.sp = 1;
        double *found = passes(&c, settings);
        settings = case_settings_alone(&c);
        const size_t bytes = 2 * (c.batch[0].N + c.tiny.model.config.vocab_size) * sizeof(double);
        assert_memory_equal(found, passes(&c, settings), bytes);
        case_free(&c);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// Whichever rank holds it, all name the same bad parameter.
TEST(bad_gradients_are_named) {
    Case c = case_make(0, OBJECTIVE_SFT, 0, METHOD_STREAM, 1);
    const Model *model = &c.tiny.model;
    const double nan = NAN;
    for (size_t stage = 0; stage < STAGES; stage++) {
        RunSettings settings = case_settings(&c, stage);
        settings.place[PLACED_GRADIENTS] = PLACE_DEVICE; // otherwise its norm is known before
        const Parameter *last = &model->parameters[model->parameter_count - 1],
                        *bad; // the last rank's, or a part of it
        TinyRun r;
        case_stage(stage);
        case_begin(&r, &c, settings);
        case_gradient(&r, &c);
        for (const Parameter *p = last - 1; p <= last && world.rank + 1 == world.ranks; p++) {
            const ParameterShard held = parameter_shard(model, sharding_of(world, ZERO_NONE), p);
            if (!held.count) continue;
            const size_t element = p->offset + held.first + held.count - 1;
            const size_t place = element_offset(model, gradients_sharding(&r.s.memory), element);
            device_write(ops_device, at(r.s.memory.gradients, place, dtype_size(settings.gradient_type)),
                         settings.gradient_type, &nan, 1);
        }
        gradient_norm(&r.s.memory, &bad);
        if (!bad || bad < last - 1) test_fail("the bad gradient is %s", bad ? bad->name : "none");
        tiny_end(&r);
    }
    case_free(&c);
}

// gpt2's matrices are transposed in the file. All parameters, or some.
TEST(gradients_are_written_together) {
    static const char *const globs[STAGES] = {NULL, "*.0.*,*ln_f*,*model.norm*", NULL, "*.1.*"};
    char path[2][512]; // this rank's, and rank 0's, which all write
    size_t bytes[2];
    snprintf(path[0], sizeof(path[0]), "%s", scratch_path("alone.safetensors"));
    snprintf(path[1], sizeof(path[1]), "%s", scratch_path("together.safetensors"));
    dist_broadcast(RANKS_ALL, path[1], sizeof(path[1]), 0);
    for (size_t m = 0; m < MODELS; m += 2)
        for (size_t stage = m / 2; stage < STAGES; stage += 2) {
            Case c = case_make(m, OBJECTIVE_SFT, 0, METHOD_STREAM, 1);
            const Model *model = &c.tiny.model;
            const RunSettings settings = case_settings(&c, stage);
            const DType type = settings.gradient_type;
            TinyRun r;
            case_stage(stage);
            case_begin(&r, &c, settings);
            TinyResult whole = case_result(&r, &c, case_gradient(&r, &c));
            gradients_write(path[1], globs[stage], model, settings.world, ops_device, r.s.memory.gradients, type);
            void *memory = ops_device->allocate(model->elements * sizeof(double));
            device_write(ops_device, memory, type, whole.gradient, model->elements);
            gradients_write(path[0], globs[stage], model, world_alone(), ops_device, memory, type);
            const char *alone = read_whole(path[0], &bytes[0]), *together = read_whole(path[1], &bytes[1]);
            if (bytes[0] != bytes[1] || memcmp(alone, together, bytes[0]) != 0)
                test_fail("the file of all ranks is not that of one");
            ops_device->release(memory, model->elements * sizeof(double));
            free(whole.gradient);
            tiny_end(&r);
            case_free(&c);
            dist_barrier();
        }
}

int main(int argc, char **argv) {
    dist_start();
    if (dist_ranks() < 2 || dist_ranks() > 4) die_usage("takes 2 to 4 processes: test/ranks/mpirun.sh 3 %s", argv[0]);
    world_begin(dist_ranks() == 4 ? 2 : 1);
    RUN_LISTED(argc, argv, scratch_remove);
}
