/*
Internals of residency.h: staging buffers, shard ranges, counted collectives. Others call residency.h.
*/
#ifndef LLMC_RESIDENCY_STATE_H
#define LLMC_RESIDENCY_STATE_H
#include "llmc/ops/arena.h"
#include "llmc/model/lora.h"
#include "llmc/ops/ops.h"
#include "llmc/model/storage.h"
#include "pager.h"
#include "walk.h"

// Staging buffer of a layer's weights, which are loaded from off-device or gathered from all ranks
typedef struct {
    char *weights, *adapters; // of a layer: stored weights, and the table of adapters'
    PageSlot page;            // the layer
} LayerBuffer;

// Elements [begin, begin + count) of the stored gradient, on the device: in place, or in a staging buffer
typedef struct {
    char *memory;
    size_t begin, count;
    PageSlot page; // the group; its collective reduces the sums, or gathers the gradient
} StoredGradient;

// Buffers of a layer's gradient
typedef struct {
    Summed *sums;          // [elements of a layer of what is trained], where they are not in place
    StoredGradient stored; // what they are added to
    int busy;              // the layer is released, and its gradient not returned yet
} GradientBuffer;

enum { GRADIENT_BUFFERS = 4 };

typedef struct Residency Residency;

// What a pass calls for a step of the optimizer that waits for it (llmc/optimizer/update.h)
typedef struct {
    void (*begin)(Residency *r);               // the sequence is set, its room not pushed yet
    void (*group)(Residency *r, size_t group); // before the group's weights are used
    void (*chunk)(Residency *r);               // between chunks
    void *context;                             // NULL: no step waits
} PassHook;

struct Residency {
    const Model *model;
    const Ops *ops;
    Arena *arena;           // [PLACES]
    Place place[PLACED];    // where each lies
    Moved moved;            // between the device and other places so far
    const Storage *storage; // NULL: weights are stored as they are used
    char *weights;          // of stored_table: all, or this rank's shards (model.h)
    char *decoded;          // [elements of a layer] of model->dtype, where storage decodes
    const Lora *lora;       // NULL: the model itself is trained
    char *adapters;         // all, or shards, of lora->table
    int without_adapters;   // in a pass of the reference: the model before adapters,
    char *reference;        // or with this in place of what is trained, as that was at the start; NULL: there is none
    char *gradients;        // of what is trained, in gradient_type; all or shards; NULL in a run without backward
    DType gradient_type;    // model->dtype, or the type of sums
    int accumulates;        // gradients of several micro-batches of a step are added up
    double *host_squares;   // host [parameters,parameter_parts] of the gradient
    double *squares; // [parameters,parameter_parts] of this rank's shards of off-device gradients, before the store
    size_t weights_mark, sums_mark, layers_mark; // of the arena, before what was pushed for these

    World world;
    int first;                               // micro-batch of the step: off-device gradients hold nothing yet
    int last;                                // sums in place are reduced over all ranks in its pass
    Traffic sent;                            // by this rank so far
    Walk walk;                               // of the current pass
    size_t every;                            // keep every `every`-th layer input (inputs.h)
    LayerBuffer gathered[2];                 // for the current layer and the next one, in turn
    size_t current;                          // which of these
    GradientBuffer summed[GRADIENT_BUFFERS]; // layer l is in the one of index l % buffers
    size_t buffers;
    Summed *held;           // sums of all that is trained, in the order of its table (grads_hold); else NULL
    int holds;              // they are (in a plan the pointer may be NULL)
    int head_is_stored;     // in this pass a tied head has added to the stored gradient of the embedding
    Summed *embedding_sums; // [elements of the group] of a tied matrix, from the head to the embedding
    int64_t last_ticket;    // of reductions in place; 0: none
    PassHook hook;
    size_t visits; // to chunks of layers, of a pass over the largest sequence
};

static void *at(void *base, size_t element, size_t size) {
    return (void *)((uintptr_t)base + element * size); // NOLINT(performance-no-int-to-ptr): in a plan base may be NULL
}

// The table of what is trained, and its memory
static const Model *trained_table(const Residency *r) { return r->lora ? &r->lora->table : r->model; }
static char *trained_weights(const Residency *r) { return r->lora ? r->adapters : r->weights; }

// The table by which weights are stored, moved and sharded
static const Model *stored_table(const Residency *r) { return r->storage ? &r->storage->table : r->model; }

static int group_is_trained(const Residency *r, size_t group) { return group_elements(trained_table(r), group) > 0; }

static int group_decodes(const Residency *r, size_t group) {
    return r->storage && storage_decodes(r->storage, r->model, group);
}

// Elements of the final norm; the head's matrix follows in the sums of its group
static size_t head_norm_elements(const Model *model) {
    size_t C = model->config.hidden_size;
    return model->model_offset[FINAL_NORM_BIAS] == ABSENT ? C : 2 * C;
}

static int head_is_tied(const Model *model) { return model->model_offset[LM_HEAD] == ABSENT; }

static int is_layer(size_t group) { return group < GROUP_EMBEDDING; }

static int is_off_device(const Residency *r, Placed placed) { return r->place[placed] > PLACE_DEVICE; }

// Returns the pager of what moves once for each visited layer.
static Pager layer_pager(Residency *r, Placed placed) {
    const Pager pager = {r->ops, &r->moved, r->place[placed], r->walk.layers};
    return pager;
}

// Returns the pager of what moves once for each visited chunk. mean: in the dry run, times a visit on average
static Pager chunk_pager(Residency *r, Placed placed, double mean) {
    const Pager pager = {r->ops, &r->moved, r->place[placed], r->walk.chunks * (r->walk.dry ? mean : 1)};
    return pager;
}

static Arena *memory_of(const Residency *r, Placed placed) {
    return &r->arena[is_off_device(r, placed) ? r->place[placed] : PLACE_DEVICE];
}

// The first layer of the same kind with the same adapters: the dry run visits it for all of these.
static size_t layer_like(const Residency *r, size_t l) {
    const Config *c = &r->model->config;
    size_t first = 0;
    if (r->lora) return r->lora->like[l];
    while (layer_kind(c, first) != layer_kind(c, l) || layer_form(c, first) != layer_form(c, l)) first++;
    return first;
}

// The layer that backward visits after `layer`, or from which it restores inputs; before layer 0 no number of a layer
static size_t layer_before(const Residency *r, size_t layer) { return layer - (layer % r->every ? 1 : r->every); }

// ---- collectives, counted: a rank sends n (P - 1) / P of n bytes (world.h). A group of one has nothing to send ------
static void count_sent(Residency *r, TrafficKind kind, double bytes, double hops) {
    const double times = r->walk.layers;
    r->sent.bytes[kind] += times * bytes, r->sent.calls[kind] += times, r->sent.hops[kind] += times * hops;
}

static void count_collective(Residency *r, TrafficKind kind, RankGroup group, size_t count, size_t size) {
    const double ranks = (double)ranks_in(r->world, group);
    count_sent(r, kind, (double)count * (double)size * (ranks - 1) / ranks, ranks - 1);
}

static int64_t ranks_sum(Residency *r, TrafficKind kind, RankGroup group, Summed *x, size_t count, size_t unit) {
    if (ranks_in(r->world, group) == 1) return 0;
    count_collective(r, kind, group, count, dtype_size(dtype_of_sums(r->model->dtype)));
    return r->ops->reduce_scatter(group, x, count, unit);
}

static int64_t ranks_gather(Residency *r, TrafficKind kind, RankGroup group, void *x, size_t count, size_t unit,
                            size_t size) {
    if (ranks_in(r->world, group) == 1) return 0;
    count_collective(r, kind, group, count, size);
    return r->ops->all_gather(group, x, count, unit, size);
}

// mean: bytes that a rank sends on average. The dry run counts these: it knows one rank's messages, others' may differ.
static int64_t ranks_exchange(Residency *r, TrafficKind kind, RankGroup group, const Message *messages, size_t n,
                              double mean) {
    double bytes = 0;
    if (ranks_in(r->world, group) == 1) return 0;
    for (size_t i = 0; i < n; i++) bytes += (double)messages[i].out_bytes;
    count_sent(r, kind, r->walk.dry ? mean : bytes, 1);
    return r->ops->exchange(group, messages, n);
}

static int alone(const Residency *r) { return world_ranks(r->world) == 1; }
static Sharding weights_sharding(const Residency *r) { return sharding_of(r->world, ZERO_WEIGHTS); }
static Sharding gradients_sharding(const Residency *r) { return sharding_of(r->world, ZERO_GRADIENTS); }

static Sharding own_sharding(const Residency *r) { return sharding_of(r->world, ZERO_NONE); }

static Range own_range(const Residency *r, const Model *table, size_t group) {
    return sharded_range(table, own_sharding(r), group);
}

#endif
