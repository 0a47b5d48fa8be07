/*
A step of a tiny model that several ranks take together: its case (model, adapters, every replica's micro-batches) and
this rank's run of it.
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
enum { MODELS = sizeof(models) / sizeof(models[0]), STAGES = 4, MOST_MICRO_BATCHES = 12 };

static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_DPO, OBJECTIVE_GRPO};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 1e-5 : 0.03;
}

// ---- a step: `micro_batches` for every rank ------------------------------------------------------------------------
typedef struct {
    TinyCase tiny;                   // settings: of the process alone
    size_t micro_batches;            // of each replica
    Batch batch[MOST_MICRO_BATCHES]; // of all replicas, one's after the other's
    Batch largest;
    TargetCounts counts;
} Case;

// Lengths differ from batch to batch, and with them the work of ranks. Every document has a target that counts.
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

static Case case_make(size_t m, ObjectiveKind kind, int lora, Method method, size_t micro_batches) {
    Case c = {0};
    c.tiny = tiny_case(models[m], lora ? 3 : 0);
    Objective *o = &c.tiny.settings.objective;
    o->kind = kind, o->beta = 0.3, o->gamma = NAN, o->clip_low = 0.2, o->clip_high = NAN;
    o->temperature = 1, o->completion_tokens = 12;
    objective_resolve(o);
    c.tiny.settings.method = method, c.tiny.settings.backward = 1;
    c.tiny.settings.gradient_type = dtype_of_sums(c.tiny.model.dtype);
    c.micro_batches = micro_batches;
    for (size_t i = 0; i < micro_batches * world_replicas(world); i++) {
        c.batch[i] = case_batch(o, c.tiny.model.config.vocab_size, 100 + i);
        c.counts = target_counts_add(c.counts, batch_count(&c.batch[i]));
        if (c.batch[i].N > c.largest.N) c.largest = c.batch[i];
    }
    test_case("%.6s, %s, method %d, %zu micro-batches%s", models[m], objective_names[kind], (int)method, micro_batches,
              lora ? ", LoRA" : "");
    return c;
}

static RunSettings case_settings(const Case *c, size_t stage) {
    RunSettings settings = tiny_settings(&c->tiny, c->tiny.settings.method, 5, 7);
    settings.world = world, settings.world.zero = stage;
    return settings;
}

static const Model *case_table(const Case *c) { return tiny_table(&c->tiny); }

static void case_free(Case *c) {
    for (size_t i = 0; i < c->micro_batches * world_replicas(world); i++) batch_free(&c->batch[i]);
    tiny_case_free(&c->tiny);
}

// ---- this rank's run ------------------------------------------------------------------------------------------------
// This rank's shard of a table, into memory that is sharded so
static void write_shard(const Model *table, Sharding sharding, void *memory, const double *values) {
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard own = parameter_shard(table, sharding, p);
        if (own.count)
            device_write(ops_device, at(memory, own.offset, dtype_size(table->dtype)), table->dtype,
                         values + p->offset + own.first, own.count);
    }
}

// values[elements of the table] = the shard of `sharding` in memory that is laid out by `layout`, NaN elsewhere
static double *read_shard(const Model *table, Sharding sharding, Sharding layout, const void *memory, DType type) {
    double *values = (double *)checked_malloc(table->elements * sizeof(double), "values");
    for (size_t i = 0; i < table->elements; i++) values[i] = NAN;
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard own = parameter_shard(table, sharding, p);
        if (!own.count) continue;
        const size_t offset = shard_offset(table, layout, p, own.first);
        double *part = device_read(ops_device, (const char *)memory + offset * dtype_size(type), type, own.count);
        memcpy(values + p->offset + own.first, part, own.count * sizeof(double));
        free(part);
    }
    return values;
}

static void case_begin(TinyRun *r, const Case *c, RunSettings settings) {
    tiny_begin(r, ops_device, settings, NULL, NULL, &c->largest);
    write_shard(&c->tiny.model, weights_sharding(&r->s.memory), r->s.memory.weights, c->tiny.weights);
    if (c->tiny.adapters)
        write_shard(&c->tiny.lora.table, weights_sharding(&r->s.memory), r->s.memory.adapters, c->tiny.adapters);
}

// Loss over all ranks; the gradient is left where it is stored.
static double case_gradient(TinyRun *r, const Case *c) {
    const World w = r->settings.world;
    const size_t count = c->micro_batches * world_replicas(world) / world_replicas(w); // a process alone takes all
    const double Z = objective_normaliser(&r->settings.objective, c->counts);
    double loss = 0;
    grads_zero(&r->s.memory);
    for (size_t i = 0; i < count; i++)
        loss += forward_backward(&r->s, &c->batch[world_replica(w) * count + i], Z, i + 1 == count, NULL);
    if (world_ranks(w) > 1) dist_sum(RANKS_ALL, &loss, 1);
    return loss / (double)world_sp(w); // all ranks of a sequence know its loss
}

#endif
