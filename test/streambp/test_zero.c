/*
Several processes against one, in the same program: every rank first computes the step alone, then takes its own
documents of it beside the others (test/ranks/mpirun.sh P). Of four, two at a time share a stream. Loss and every
portion of the gradient are those of the process alone, for every stage of ZeRO, method, family and objective, with and
without adapters and accumulation; all stages give the same bits; steps of AdamW lead to the same weights; what is sent
is what the formula says, and memory what the plan says. All memory begins as NaN, so that what a rank does not hold
cannot be used unseen.
*/
#include "llmc/files/gradients.h"
#include "zero_runs.h"

// ---- the step alone, and beside others ------------------------------------------------------------------------------
typedef struct {
    double loss, norm;
    double *gradient; // [elements of what is trained], NaN what this rank does not own
    Traffic sent;
} Step;

static Step step_run(const Case *c, RunSettings settings) {
    const Model *table = case_table(c);
    const Parameter *bad;
    TinyRun b;
    Step step;
    case_begin(&b, c, settings);
    step.loss = case_gradient(&b, c);
    step.gradient = read_shard(table, sharding_of(settings.world, ZERO_NONE), gradients_sharding(&b.s.memory),
                               b.s.memory.gradients, settings.gradient_type);
    step.norm = gradient_norm(table, settings.world, ops_device, b.s.memory.gradients, settings.gradient_type, &bad);
    assert_null(bad);
    if (b.arena.peak > b.plan.total_bytes) test_fail("peak %zu, planned %zu", b.arena.peak, b.plan.total_bytes);
    step.sent = b.s.memory.sent;
    tiny_end(&b);
    return step;
}

static Step step_alone(const Case *c, RunSettings settings) {
    settings.world = world_alone();
    return step_run(c, settings);
}

// Over the portion that is there, relative to the whole parameter.
static double portion_difference(const Parameter *p, const double *found, const double *expected, size_t *compared) {
    double difference = 0, size = 0;
    for (size_t i = p->offset; i < p->offset + parameter_elements(p); i++) {
        size += expected[i] * expected[i];
        if (isnan(found[i])) continue;
        difference += (found[i] - expected[i]) * (found[i] - expected[i]), ++*compared;
    }
    return difference == 0 ? 0 : sqrt(difference / size);
}

static void expect_step(const Case *c, const Step *found, const Step *alone, double allowed) {
    const Model *table = case_table(c);
    double compared = 0;
    size_t own = 0;
    if (!(fabs(found->loss - alone->loss) <= allowed * (fabs(alone->loss) + 0.1)))
        test_fail("loss %.17g, alone %.17g", found->loss, alone->loss);
    if (!(fabs(found->norm - alone->norm) <= allowed * alone->norm))
        test_fail("gradient norm %.17g, alone %.17g", found->norm, alone->norm);
    for (size_t i = 0; i < table->parameter_count; i++) {
        double difference = portion_difference(&table->parameters[i], found->gradient, alone->gradient, &own);
        if (!(difference <= allowed))
            test_fail("gradient of %s differs by %.3g", table->parameters[i].name, difference);
        testing.worst = fmax(testing.worst, difference / allowed);
    }
    compared = (double)own;
    dist_sum(RANKS_ALL, &compared, 1);
    if (compared != (double)table->elements)
        test_fail("the ranks own %.0f finite elements, the table has %zu", compared, table->elements);
}

static void expect_bits(const char *what, const double *found, const double *expected, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (found[i] != expected[i] && !(isnan(found[i]) && isnan(expected[i])))
            test_fail("%s[%zu] is %.17g, in the stage before %.17g", what, i, found[i], expected[i]);
}

static void case_stage(size_t stage) {
    char about[sizeof(testing.about)];
    snprintf(about, sizeof(about), "%.180s", testing.about);
    about[strcspn(about, ";")] = 0;
    snprintf(testing.about, sizeof(testing.about), "%.180s; stage %zu", about, stage);
}

// Stages 0 and 1 add sums in place up once a step, the others once a stream.
static int reduced_alike(const Case *c, size_t stage) {
    return stage != 2 || c->micro_batches == 1 || c->tiny.settings.gradient_type != dtype_of_sums(c->tiny.model.dtype);
}

// All stages against the process alone, and each against the one before it.
static void stages_agree(Case *c) {
    Step alone = step_alone(c, case_settings(c, 0)), before = alone;
    for (size_t stage = 0; stage < STAGES; stage++) {
        case_stage(stage);
        Step step = step_run(c, case_settings(c, stage));
        expect_step(c, &step, &alone, bound());
        if (stage && reduced_alike(c, stage))
            expect_bits("gradient", step.gradient, before.gradient, case_table(c)->elements);
        if (stage) free(before.gradient);
        before = step;
    }
    free(before.gradient);
    free(alone.gradient);
    case_free(c);
}

// Every family with every objective, with adapters and without; methods and accumulation by turns. Three or four ranks
// take a third or a quarter of the cases.
TEST(families_and_objectives) {
    size_t turn = 0;
    for (size_t m = 0; m < MODELS; m++)
        for (size_t k = 0; k < KINDS; k++)
            for (int lora = 0; lora < 2; lora++, turn++) {
                if (world.ranks > 2 && (m + k + (size_t)lora) % world.ranks) continue;
                Case c = case_make(m, kinds[k], lora, (Method)((turn + m) % 3), (turn / 2 + m) % 2 ? 3 : 1);
                stages_agree(&c);
            }
}

TEST(methods_and_accumulation) {
    for (size_t m = 0; m < (world.ranks > 2 ? 1 : 2); m++)
        for (size_t method = 0; method < 3; method++)
            for (size_t streams = 1; streams <= 3; streams += 2) {
                Case c = case_make(m, OBJECTIVE_SFT, 0, (Method)method, streams);
                stages_agree(&c);
            }
}

// Stored in the type of weights, which in bf16 is not that of sums: then every stream is reduced, in all stages. In
// other builds this is nothing new.
TEST(gradients_of_the_type_of_weights) {
    const size_t cases = ops_device->stored == DTYPE_BF16 ? MODELS : 1;
    for (size_t m = 0; m < cases; m++)
        for (size_t streams = 1; streams <= 3; streams += 2) {
            Case c = case_make(m, OBJECTIVE_SFT, m == 3, METHOD_STREAM, streams);
            c.tiny.settings.gradient_type = c.tiny.model.dtype;
            stages_agree(&c);
        }
}

// ---- steps of the optimizer -----------------------------------------------------------------------------------------
// What this rank does not own of memory that holds all: nobody may look at it.
static void poison_others(const Model *table, void *memory, DType type) {
    double *values = device_read(ops_device, memory, type, table->elements);
    double *own = read_shard(table, sharding_of(world, ZERO_NONE), sharding_whole(), memory, type);
    device_write(ops_device, memory, type, own, table->elements);
    free(values), free(own);
}

// In bf16 two runs that differ in the rounding of one gradient come apart as they go on: there, a few steps say it all.
static int64_t steps(void) { return ops_device->stored == DTYPE_BF16 ? 2 : 5; }

// Some steps; returns the weights, all of them, on every rank. norms[steps()]
static double *train(const Case *c, RunSettings settings, double *norms) {
    const Model *table = case_table(c);
    const Sharding own = sharding_of(settings.world, ZERO_NONE);
    TinyRun b;
    AdamW step = {0};
    step.learning_rate = 0.02, step.beta1 = 0.9, step.beta2 = 0.95, step.epsilon = 0.03, step.weight_decay = 0.1;
    step.seed = 5;
    settings.optimizer = 1;
    case_begin(&b, c, settings);
    optimizer_init(table, settings.world, ops_device, trained_weights(&b.s.memory), &b.state, settings.moment_type);
    for (step.step = 1; step.step <= steps(); step.step++) {
        const Parameter *bad;
        case_gradient(&b, c);
        if (settings.world.zero == 1) poison_others(table, b.s.memory.gradients, settings.gradient_type);
        norms[step.step - 1] =
            gradient_norm(table, settings.world, ops_device, b.s.memory.gradients, settings.gradient_type, &bad);
        step.gradient_scale = gradient_clip(norms[step.step - 1], 0.7);
        optimizer_step(table, settings.world, ops_device, trained_weights(&b.s.memory), b.s.memory.gradients,
                       settings.gradient_type, &b.state, settings.moment_type, &step);
        if (settings.world.zero == 1 || settings.world.zero == 2)
            poison_others(table, trained_weights(&b.s.memory), table->dtype);
        weights_updated(&b.s.memory);
    }
    double *weights = read_shard(table, own, weights_sharding(&b.s.memory), trained_weights(&b.s.memory), table->dtype);
    double *all = (double *)checked_malloc(table->elements * sizeof(double), "weights");
    for (size_t i = 0; i < table->elements; i++) all[i] = isnan(weights[i]) ? 0 : weights[i];
    if (own.ranks > 1) dist_sum(RANKS_ALL, all, table->elements);
    tiny_end(&b);
    free(weights);
    return all;
}

// How far the steps have come apart, relative to how far they went.
static double drift(const double *found, const double *alone, const double *start, size_t n) {
    double apart = 0, went = 0;
    for (size_t i = 0; i < n; i++) {
        apart += (found[i] - alone[i]) * (found[i] - alone[i]);
        went += (alone[i] - start[i]) * (alone[i] - start[i]);
    }
    return sqrt(apart / went);
}

// Rounding at random makes a bf16 weight's step one unit or none: which one, the same bits decide, of gradients that
// differ in their rounding.
static void train_case(Case *c, int master, DType moments, double allowed) {
    const Model *table = case_table(c);
    const double *start = c->tiny.adapters ? c->tiny.adapters : c->tiny.weights;
    double norms[2][5], *before = NULL;
    RunSettings settings;
    c->tiny.settings.master = master, c->tiny.settings.moment_type = moments;
    settings = case_settings(c, 0), settings.world = world_alone();
    double *alone = train(c, settings, norms[0]);
    for (size_t stage = 0; stage < STAGES; stage++) {
        case_stage(stage);
        double *found = train(c, case_settings(c, stage), norms[1]);
        double apart = drift(found, alone, start, table->elements);
        if (!(apart <= allowed)) test_fail("after these steps weights differ by %.3g of what they moved", apart);
        for (size_t i = 0; i < (size_t)steps(); i++)
            if (!(fabs(norms[1][i] - norms[0][i]) <= 10 * allowed * norms[0][i]))
                test_fail("step %zu: norm %.17g, alone %.17g", i + 1, norms[1][i], norms[0][i]);
        if (before) expect_bits("weights", found, before, table->elements);
        free(before);
        before = found;
        testing.worst = fmax(testing.worst, apart / allowed);
    }
    free(before), free(alone);
    case_free(c);
}

TEST(steps_of_adamw) {
    const int bf16 = ops_device->stored == DTYPE_BF16;
    const double allowed = ops_device->stored == DTYPE_FP64 ? 1e-11 : bf16 ? 0.2 : 1e-4;
    for (size_t m = 0; m<MODELS; m += world.ranks> 2 ? 3 : 1) {
        Case c = case_make(m, OBJECTIVE_SFT, m == 3, (Method)(m % 3), 1);
        train_case(&c, bf16 && m % 2, dtype_of_sums(ops_device->stored), allowed);
        c = case_make(m, OBJECTIVE_SFT, m == 0, METHOD_STREAM, 1);
        c.tiny.settings.gradient_type = c.tiny.model.dtype;
        train_case(&c, bf16, DTYPE_BF16, bf16 ? allowed : 0.05);
    }
}

// ---- what is sent, and what is held ---------------------------------------------------------------------------------
// The least that a stage has to send in a step, and what is due to accumulation.
static Traffic formula(const Case *c, RunSettings settings) {
    const Model *m = &c->tiny.model, *table = case_table(c);
    const double share = (double)(world.ranks - 1) / (double)world.ranks, streams = (double)c->micro_batches;
    const double summed = (double)dtype_size(dtype_of_sums(m->dtype)), stored = (double)dtype_size(m->dtype);
    const double gradient = (double)dtype_size(settings.gradient_type);
    const double layers = (double)(m->config.num_hidden_layers * m->layer_elements);
    const double embedding = (double)group_elements(m, GROUP_EMBEDDING), head = (double)group_elements(m, GROUP_HEAD);
    const int in_place = settings.world.zero < 2 && gradient == summed;
    Traffic t = {0};
    t.bytes[TRAFFIC_GRADIENTS] = (in_place ? 1 : streams) * summed * (double)table->elements;
    if (settings.world.zero == 0) t.bytes[TRAFFIC_GRADIENTS] += gradient * (double)table->elements;
    if (settings.world.zero == 1 || settings.world.zero == 2)
        t.bytes[TRAFFIC_WEIGHTS] = stored * (double)table->elements;
    if (settings.world.zero == 3)
        t.bytes[TRAFFIC_WEIGHTS] = streams * stored *
                                   (2 * layers + embedding + head + (head_is_tied(m) ? embedding : 0) +
                                    (c->tiny.adapters ? 2 * (double)c->tiny.lora.table.elements : 0));
    t.bytes[TRAFFIC_GRADIENTS] *= share, t.bytes[TRAFFIC_WEIGHTS] *= share;
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

// By a step with its optimizer. The arena's peak is the plan's to the byte: all streams are of the planned shape; of
// ranks that share one, the last has the most tokens.
static Traffic sent_by(const Case *c, RunSettings settings) {
    TinyRun b;
    case_begin(&b, c, settings);
    case_gradient(&b, c);
    weights_updated(&b.s.memory);
    Traffic sent = b.s.memory.sent;
    if (b.arena.peak != b.plan.total_bytes && world.sp == 1)
        test_fail("peak %zu, planned %zu", b.arena.peak, b.plan.total_bytes);
    tiny_end(&b);
    return sent;
}

static void traffic_case(Case *c) {
    static const size_t chunks[] = {3, 1000};
    for (size_t stage = 0; stage < STAGES; stage++) {
        RunSettings settings = case_settings(c, stage);
        Traffic expected = formula(c, settings), sent[2];
        case_stage(stage);
        settings.optimizer = 1;
        for (size_t i = 0; i < 2; i++) {
            settings.chunk = chunks[i], settings.logits_chunk = chunks[1 - i];
            sent[i] = sent_by(c, settings);
            Traffic planned = plan_traffic(&settings, &c->largest, c->micro_batches);
            expect_traffic("the plan", &planned, &sent[i], 1);
        }
        expect_traffic("the formula", &sent[0], &expected, 0);
        expect_traffic("other chunks", &sent[1], &sent[0], 1);
    }
    case_free(c);
}

TEST(traffic_and_memory) {
    for (size_t m = 0; m < MODELS; m++)
        for (size_t streams = 1; streams <= 3; streams += 2) {
            Case c = case_make(m, OBJECTIVE_SFT, m % 2 && streams == 1, METHOD_STREAM, streams);
            c.tiny.settings.moment_type = DTYPE_FP32;
            if (m == 2) c.tiny.settings.gradient_type = c.tiny.model.dtype;
            for (size_t i = 0; i < streams * world_replicas(world); i++) { // all alike
                batch_free(&c.batch[i]);
                c.batch[i] = case_batch(&c.tiny.settings.objective, c.tiny.model.config.vocab_size, 100);
            }
            c.largest = c.batch[0];
            traffic_case(&c);
        }
}

// ---- passes without gradients ---------------------------------------------------------------------------------------
enum { PROMPT = 9 };

// Log-probabilities of a stream, with adapters and without, and logits after a prompt and one token more.
static double *passes(const Case *c, RunSettings settings, size_t *n) {
    const size_t N = c->batch[0].N, V = c->tiny.model.config.vocab_size;
    const int32_t tokens[PROMPT] = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    float *logp = (float *)checked_malloc(N * sizeof(float), "log-probabilities");
    void *logits = checked_malloc(V * dtype_size(c->tiny.model.dtype), "logits");
    double *values = (double *)checked_malloc((2 * N + 2 * V) * sizeof(double), "values");
    Cache cache;
    TinyRun b;
    settings.cache_tokens = PROMPT + 1, settings.backward = 0;
    case_begin(&b, c, settings);
    for (size_t round = 0; round < 2; round++) {
        forward_policy(&b.s, &c->batch[0], (int)round, logp);
        for (size_t i = 0; i < N; i++) values[round * N + i] = (double)logp[i];
    }
    cache_allocate(&cache, 1, PROMPT + 1);
    cache_begin(&cache, &b.s);
    for (size_t round = 0; round < 2; round++) {
        size_t begin = round ? PROMPT : 0, end = round ? PROMPT + 1 : PROMPT, count;
        for (; begin < end; begin += count) {
            count = min_size(cache.chunk, end - begin);
            cache_feed(&cache, &b.s, 0, round ? tokens : tokens + begin, count);
        }
        cache_logits(&cache, &b.s, logits);
        for (size_t i = 0; i < V; i++) values[2 * N + round * V + i] = host_read(logits, c->tiny.model.dtype, i);
    }
    cache_end(&cache, &b.s);
    cache_free(&cache);
    tiny_end(&b);
    free(logp), free(logits);
    *n = 2 * N + 2 * V;
    return values;
}

TEST(passes_without_gradients) {
    size_t n;
    for (size_t m = 0; m < MODELS; m++) {
        Case c = case_make(m, OBJECTIVE_SFT, m % 2 == 0, METHOD_STREAM, 1);
        RunSettings settings = case_settings(&c, 0);
        settings.world = world_alone();
        double *alone = passes(&c, settings, &n);
        settings.world = world, settings.world.zero = 3, settings.world.sp = 1;
        double *found = passes(&c, settings, &n);
        for (size_t i = 0; i < n; i++)
            if (!(found[i] == alone[i])) test_fail("value %zu is %.9g, alone %.9g", i, found[i], alone[i]);
        free(alone), free(found);
        case_free(&c);
    }
}

// ---- weights come, gradients go -------------------------------------------------------------------------------------
TEST(initial_weights_by_portions) {
    for (size_t m = 0; m < MODELS; m++) {
        Case c = case_make(m, OBJECTIVE_SFT, 0, METHOD_STREAM, 1);
        const Sharding own = sharding_of(world, ZERO_NONE);
        const size_t bytes = c.tiny.model.elements * dtype_size(c.tiny.model.dtype);
        void *memory = ops_device->allocate(bytes);
        weights_init_random(&c.tiny.model, sharding_whole(), ops_device, memory, 3);
        double *whole = device_read(ops_device, memory, c.tiny.model.dtype, c.tiny.model.elements);
        ops_device->zero(memory, bytes);
        weights_init_random(&c.tiny.model, own, ops_device, memory, 3);
        weights_check_finite(&c.tiny.model, own, ops_device, memory);
        double *ranges = read_shard(&c.tiny.model, own, own, memory, c.tiny.model.dtype);
        for (size_t i = 0; i < c.tiny.model.elements; i++)
            if (!isnan(ranges[i]) && ranges[i] != whole[i])
                test_fail("element %zu is %.9g, of the whole %.9g", i, ranges[i], whole[i]);
        free(whole), free(ranges);
        ops_device->release(memory, bytes);
        case_free(&c);
    }
}

// Whichever rank has it, all name the same parameter.
TEST(bad_gradients_are_named) {
    Case c = case_make(0, OBJECTIVE_SFT, 0, METHOD_STREAM, 1);
    for (size_t stage = 0; stage < STAGES; stage++) {
        const RunSettings settings = case_settings(&c, stage);
        const Sharding own = sharding_of(world, ZERO_NONE);
        const size_t last = c.tiny.model.parameter_count - 1; // the last rank's, or a portion of it
        const double nan = NAN;
        const Parameter *bad;
        TinyRun b;
        case_stage(stage);
        case_begin(&b, &c, settings);
        case_gradient(&b, &c);
        for (size_t i = last - 1; i <= last && world.rank + 1 == world.ranks; i++) {
            const Parameter *p = &c.tiny.model.parameters[i];
            const ParameterShard held = parameter_shard(&c.tiny.model, own, p);
            if (!held.count) continue;
            size_t place = shard_offset(&c.tiny.model, gradients_sharding(&b.s.memory), p, held.first + held.count - 1);
            device_write(ops_device, at(b.s.memory.gradients, place, dtype_size(settings.gradient_type)),
                         settings.gradient_type, &nan, 1);
        }
        gradient_norm(&c.tiny.model, settings.world, ops_device, b.s.memory.gradients, settings.gradient_type, &bad);
        if (!bad || bad < &c.tiny.model.parameters[last - 1])
            test_fail("the bad gradient is %s", bad ? bad->name : "none");
        tiny_end(&b);
    }
    case_free(&c);
}

static char *file_bytes(const char *path, size_t *bytes) {
    InputFile file = input_open(path);
    char *text = (char *)checked_malloc((size_t)file.bytes, "a file");
    *bytes = (size_t)file.bytes;
    input_read(&file, 0, text, *bytes);
    input_close(&file);
    return text;
}

// gpt2's matrices lie transposed in the file. All parameters, or some.
TEST(gradients_are_written_together) {
    static const char *const globs[STAGES] = {NULL, "*.0.*,*ln_f*,*model.norm*", NULL, "*.1.*"};
    char path[2][64];
    size_t bytes[2];
    snprintf(path[0], sizeof(path[0]), "build/test_zero-alone-%zu.safetensors", world.rank);
    snprintf(path[1], sizeof(path[1]), "build/test_zero-%zu.safetensors", world.ranks);
    for (size_t m = 0; m < MODELS; m += 2)
        for (size_t stage = 0; stage < STAGES; stage++) {
            Case c = case_make(m, OBJECTIVE_SFT, 0, METHOD_STREAM, 1);
            const RunSettings settings = case_settings(&c, stage);
            char *text[2];
            TinyRun b;
            case_stage(stage);
            case_begin(&b, &c, settings);
            case_gradient(&b, &c);
            gradients_write(path[1], globs[stage], &c.tiny.model, settings.world, ops_device, b.s.memory.gradients,
                            settings.gradient_type);
            double *gradient = read_shard(&c.tiny.model, sharding_of(world, ZERO_NONE), gradients_sharding(&b.s.memory),
                                          b.s.memory.gradients, settings.gradient_type);
            for (size_t i = 0; i < c.tiny.model.elements; i++) gradient[i] = isnan(gradient[i]) ? 0 : gradient[i];
            dist_sum(RANKS_ALL, gradient, c.tiny.model.elements);
            void *whole = ops_device->allocate(c.tiny.model.elements * sizeof(double));
            device_write(ops_device, whole, settings.gradient_type, gradient, c.tiny.model.elements);
            gradients_write(path[0], globs[stage], &c.tiny.model, world_alone(), ops_device, whole,
                            settings.gradient_type);
            text[0] = file_bytes(path[0], &bytes[0]), text[1] = file_bytes(path[1], &bytes[1]);
            if (bytes[0] != bytes[1] || memcmp(text[0], text[1], bytes[0]) != 0)
                test_fail("the file of all ranks is not that of one");
            ops_device->release(whole, c.tiny.model.elements * sizeof(double));
            free(text[0]), free(text[1]), free(gradient);
            tiny_end(&b);
            case_free(&c);
            dist_barrier();
            unlink(path[0]);
            if (world.rank == 0) unlink(path[1]);
        }
}

int main(int argc, char **argv) {
    dist_start();
    if (dist_ranks() < 2 || dist_ranks() > 4) die_usage("takes 2 to 4 processes: test/ranks/mpirun.sh 3 %s", argv[0]);
    world.ranks = dist_ranks(), world.rank = dist_rank(), world.sp = world.ranks == 4 ? 2 : 1;
    dist_split(world.sp);
    RUN_LISTED(argc, argv, NULL);
}
