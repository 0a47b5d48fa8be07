/*
A step of a tiny model that several ranks take together, for tests: its case (model, adapters, every replica's streams)
and this rank's run of it, planned first, in memory that begins as NaN.
*/
#ifndef TEST_ZERO_RUNS_H
#define TEST_ZERO_RUNS_H
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "llmc/train/optimizer.h"
#include "llmc/files/weights.h"

static World world; // of this process among the others, stage 0

static const char *const models[] = {
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=41",
    "qwen3,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=16,vocab_size=23,tie_word_embeddings=true",
    "gpt2,hidden_size=24,num_hidden_layers=1,num_attention_heads=3,vocab_size=37,max_position_embeddings=64",
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=5,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,vocab_size=33,sliding_window=9,layer_types=ssfsf,query_pre_attn_scalar=5",
};
enum { MODELS = sizeof(models) / sizeof(models[0]), STAGES = 4, MOST_STREAMS = 12 };

static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_GRPO};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 1e-5 : 0.03;
}

// ---- a step: `streams` micro-batches for every rank -----------------------------------------------------------------
typedef struct {
    Model model;
    Lora lora;
    RunSettings settings; // of the process alone
    double *weights, *adapters;
    size_t streams;            // of each replica
    Batch batch[MOST_STREAMS]; // of all replicas, one's after the other's
    Batch largest;
    TargetCounts counts;
} Case;

// Lengths differ from stream to stream, and with them what ranks have to do. Every document has a target that counts.
static Batch case_batch(const Objective *objective, size_t V, uint64_t seed) {
    size_t length[8], documents = objective->kind == OBJECTIVE_SFT ? 3 : 4;
    for (size_t d = 0; d < documents; d++) length[d] = 1 + (size_t)random_below(seed, 9, d, 11);
    Batch b = tiny_batch(length, documents, V, 1, seed);
    if (objective->kind != OBJECTIVE_SFT) batch_allocate_answers(&b, 1, 1);
    for (size_t d = 0; d < documents; d++) {
        b.targets[b.document_start[d + 1] - 1] = (int32_t)(d % V);
        if (!b.group) continue;
        b.group[d] = d / 2, b.reward[d] = (float)d;
        for (size_t t = b.document_start[d]; t < b.document_start[d + 1]; t++) {
            b.advantage[t] = (float)random_normal(seed, 4, d);
            b.reference[t] = (float)(-4 + random_normal(seed, 5, t));
            b.old[t] = (float)(-4 + random_normal(seed, 6, t));
        }
    }
    return b;
}

static Case case_make(size_t m, ObjectiveKind kind, int lora, Method method, size_t streams) {
    Config config = config_from_text(models[m], "test", EXIT_USAGE);
    Case c = {0};
    c.model = model_build(&config, ops_device->stored);
    c.weights = tiny_weights(&c.model, 7);
    if (lora) {
        c.lora.rank = 3, c.lora.alpha = 5;
        c.lora.modules = lora_modules(config.family, "all", "test", EXIT_USAGE);
        lora_build(&c.lora, &c.model);
        c.adapters = tiny_weights(&c.lora.table, 19);
    }
    Objective *o = &c.settings.objective;
    o->kind = kind, o->beta = 0.3, o->gamma = NAN, o->clip_low = 0.2, o->clip_high = NAN;
    o->temperature = 1, o->completion_tokens = 12;
    objective_resolve(o);
    c.settings.method = method, c.settings.chunk = 5, c.settings.logits_chunk = 7, c.settings.backward = 1;
    c.settings.gradient_type = dtype_of_sums(c.model.dtype);
    c.streams = streams;
    for (size_t i = 0; i < streams * world_replicas(world); i++) {
        c.batch[i] = case_batch(o, config.vocab_size, 100 + i);
        c.counts = target_counts_add(c.counts, batch_count(&c.batch[i]));
        if (c.batch[i].N > c.largest.N) c.largest = c.batch[i];
    }
    test_case("%.6s, %s, method %d, %zu streams%s", models[m], objective_names[kind], (int)method, streams,
              lora ? ", LoRA" : "");
    return c;
}

// Pointers that must not be of the caller's copy.
static RunSettings case_settings(const Case *c, size_t stage) {
    RunSettings settings = c->settings;
    settings.model = &c->model, settings.lora = c->adapters ? &c->lora : NULL;
    settings.world = world, settings.world.zero = stage;
    return settings;
}

static const Model *case_table(const Case *c) { return c->adapters ? &c->lora.table : &c->model; }

static void case_free(Case *c) {
    free(c->weights), free(c->adapters);
    for (size_t i = 0; i < c->streams * world_replicas(world); i++) batch_free(&c->batch[i]);
    if (c->adapters) lora_free(&c->lora);
    model_free(&c->model);
}

// ---- this rank's run ------------------------------------------------------------------------------------------------
typedef struct {
    RunSettings settings;
    Plan plan;
    void *memory;
    Arena arena;
    StreamBP s;
    OptimizerState state;
    double Z;
} Beside;

// What is held of a table, into memory that holds it so.
static void write_held(const Model *table, Sharding sharding, void *memory, const double *values) {
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard shard = parameter_shard(table, sharding, p);
        if (shard.count)
            device_write(ops_device, at(memory, shard.offset, dtype_size(table->dtype)), table->dtype,
                         values + p->offset + shard.first, shard.count);
    }
}

// values[elements of the table] = what is held in `memory`, NaN elsewhere.
static double *read_held(const Model *table, Sharding held_by, Sharding layout, const void *memory, DType type) {
    double *values = (double *)checked_malloc(table->elements * sizeof(double), "values");
    for (size_t i = 0; i < table->elements; i++) values[i] = NAN;
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard shard = parameter_shard(table, held_by, p);
        if (!shard.count) continue;
        double *part = device_read(ops_device,
                                   (const char *)memory + shard_offset(table, layout, p, shard.first) * dtype_size(type),
                                   type, shard.count);
        memcpy(values + p->offset + shard.first, part, shard.count * sizeof(double));
        free(part);
    }
    return values;
}

static void beside_begin(Beside *b, const Case *c, RunSettings settings) {
    memset(b, 0, sizeof(*b));
    b->settings = settings;
    b->plan = plan_make(&settings, &c->largest);
    b->memory = ops_device->allocate(b->plan.total_bytes);
    void *poison = checked_malloc(b->plan.total_bytes, "poison");
    memset(poison, 0xff, b->plan.total_bytes);
    ops_device->copy_in(b->memory, poison, b->plan.total_bytes);
    free(poison);
    arena_init(&b->arena, b->memory, b->plan.total_bytes);
    run_begin(&b->s, &b->state, &b->settings, ops_device, &b->arena, &c->largest);
    write_held(&c->model, weights_sharding(&b->s.memory), b->s.memory.weights, c->weights);
    if (c->adapters) write_held(&c->lora.table, weights_sharding(&b->s.memory), b->s.memory.adapters, c->adapters);
    b->Z = objective_normaliser(&settings.objective, c->counts);
}

// Loss over all ranks; the gradient is left where it is stored.
static double beside_gradient(Beside *b, const Case *c) {
    const size_t replica = world_replica(b->settings.world), replicas = world_replicas(b->settings.world);
    const size_t streams = c->streams * world_replicas(world) / replicas; // a process alone takes all
    double loss = 0;
    grads_zero(&b->s.memory);
    for (size_t i = 0; i < streams; i++) {
        loss += forward_backward(&b->s, &c->batch[replica * streams + i], b->Z, i + 1 == streams, NULL);
    }
    if (world_ranks(b->settings.world) > 1) dist_sum(RANKS_ALL, &loss, 1);
    return loss / (double)world_sp(b->settings.world); // all ranks of a stream know its loss
}

static void beside_end(Beside *b) {
    run_end(&b->s);
    ops_device->release(b->memory, b->plan.total_bytes);
}

#endif
