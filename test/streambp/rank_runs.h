/*
A step of a tiny model that several ranks share: its case (model, adapters, every replica's micro-batches), and this
rank's run of the case. Memory begins as NaN.
*/
#ifndef TEST_RANK_RUNS_H
#define TEST_RANK_RUNS_H
#include "llmc/optimizer/update.h"
#include "test/model/tiny.h"

static World world;        // this process among the others, stage 0
static const Ops *run_ops; // of the runs; set by world_begin

static void world_begin(size_t sp) {
    world.ranks = dist_ranks(), world.rank = dist_rank(), world.sp = sp;
    if (!run_ops) run_ops = ops_device;
    dist_split(sp);
}

typedef struct {
    TinyCase tiny;       // settings: of the process alone
    Batch batch[12];     // of all replicas, one after the other
    size_t batches;      // of all replicas
    Batch largest;       // the planned shape: the most tokens, and documents, of which the last may be empty
    size_t start[16];    // its documents' starts
    TargetCounts counts; // the step's
} Case;

static void case_add(Case *c, Batch batch) {
    const size_t documents = max_size(batch.documents, c->largest.documents);
    c->batch[c->batches++] = batch;
    c->counts = target_counts_add(c->counts, batch_count(&c->batch[c->batches - 1]));
    if (batch.N > c->largest.N) {
        c->largest = batch;
        for (size_t d = 0; d < 16; d++) c->start[d] = batch.document_start[min_size(d, batch.documents)];
    }
    c->largest.documents = documents;
}

// Returns a batch of up to 4 documents of 1 to `most` tokens. Lengths, hence the work of ranks, differ from batch to
// batch. Every document has a target that counts.
static Batch case_batch(ObjectiveKind kind, size_t documents, size_t most, size_t V, uint64_t seed) {
    size_t length[4];
    for (size_t d = 0; d < documents; d++) length[d] = 1 + (size_t)random_below(seed, 9, d, most);
    Batch b = tiny_batch(length, documents, V, 1, seed);
    if (kind != OBJECTIVE_SFT) tiny_answers(&b, kind, 1, V, seed);
    for (size_t d = 0; d < documents; d++) b.targets[b.document_start[d + 1] - 1] = (int32_t)(d % V);
    return b;
}

static AdamW case_adamw(void) {
    const AdamW step = {
        .learning_rate = 0.02, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 0.03, .weight_decay = 0.1, .seed = 5};
    return step;
}

static void case_free(Case *c) {
    while (c->batches) batch_free(&c->batch[--c->batches]);
    tiny_case_free(&c->tiny);
}

// ---- this rank's run ------------------------------------------------------------------------------------------------
// Returns the rank's micro-batches: [begin, begin + count). A process alone takes all.
static Range case_own(const Case *c, World w) {
    const size_t count = c->batches / world_replicas(w);
    const Range own = {world_replica(w) * count, count};
    return own;
}

// Writes this rank's shard of a table into sharded memory.
static void write_rank_shard(const Model *table, Sharding sharding, void *memory, const double *values) {
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard own = parameter_shard(table, sharding, p);
        if (own.count)
            device_write(run_ops, at(memory, own.offset, dtype_size(table->dtype)), table->dtype,
                         values + p->offset + own.first, own.count);
    }
}

// Reads this rank's shard, laid out by `layout`, into values[elements of the table]; the rest is `others`.
static double *read_shard(const Model *table, World w, Sharding layout, const void *memory, DType type, double others) {
    double *values = (double *)checked_malloc(table->elements * sizeof(double), "values");
    for (size_t i = 0; i < table->elements; i++) values[i] = others;
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const ParameterShard own = parameter_shard(table, sharding_of(w, ZERO_NONE), p);
        if (!own.count) continue;
        const size_t offset = element_offset(table, layout, p->offset + own.first);
        double *part = device_read(run_ops, (const char *)memory + offset * dtype_size(type), type, own.count);
        memcpy(values + p->offset + own.first, part, own.count * sizeof(double));
        free(part);
    }
    return values;
}

// Gathers the shards of all ranks on every rank.
static double *read_shards(const Model *table, World w, Sharding layout, const void *memory, DType type) {
    double *values = read_shard(table, w, layout, memory, type, 0);
    if (world_ranks(w) > 1) dist_sum(RANKS_ALL, values, table->elements);
    return values;
}

static void case_begin(TinyRun *r, const Case *c, RunSettings settings) {
    Batch largest = c->largest;
    largest.document_start = (size_t *)c->start;
    tiny_begin(r, run_ops, settings, NULL, NULL, &largest);
    r->s.now.dropout_seed = 5;
    r->s.routes.micro_batches = c->counts.batches;
    write_rank_shard(&c->tiny.model, weights_sharding(&r->s.memory), r->s.memory.weights, c->tiny.weights);
    if (c->tiny.adapters)
        write_rank_shard(&c->tiny.lora.table, weights_sharding(&r->s.memory), r->s.memory.adapters, c->tiny.adapters);
}

// Returns the loss over all ranks; leaves the gradient where it is stored.
static double case_gradient(TinyRun *r, const Case *c) {
    const World w = r->settings.world;
    const Range own = case_own(c, w);
    const double Z = objective_normaliser(&r->settings.objective, c->counts);
    double loss = 0;
    grads_zero(&r->s.memory);
    for (size_t i = 0; i < own.count; i++)
        loss += forward_backward(&r->s, &c->batch[own.begin + i], Z, i + 1 == own.count, NULL);
    if (world_ranks(w) > 1) dist_sum(RANKS_ALL, &loss, 1);
    return loss / (double)world_sp(w); // all ranks of a sequence know its loss
}

// Returns the whole gradient on every rank: from shards, except in stage 0.
static TinyResult case_result(const TinyRun *r, const Case *c, double loss) {
    const Model *table = tiny_table(&c->tiny);
    const Residency *m = &r->s.memory;
    const TinyResult result = {
        loss,
        r->settings.world.zero
            ? read_shards(table, r->settings.world, gradients_sharding(m), m->gradients, r->settings.gradient_type)
            : device_read(run_ops, m->gradients, r->settings.gradient_type, table->elements),
        table->elements};
    return result;
}

#endif
