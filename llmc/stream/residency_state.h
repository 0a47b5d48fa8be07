/*
Internals of residency.h: staging buffers, shard ranges, counted collectives. Other files call residency.h.
*/
#ifndef LLMC_RESIDENCY_STATE_H
#define LLMC_RESIDENCY_STATE_H
#include "llmc/ops/arena.h"
#include "llmc/model/lora.h"
#include "llmc/ops/ops.h"
#include "llmc/model/storage.h"
#include "pager.h"
#include "walk.h"

// Staging buffer for a layer's weights, which are loaded from off-device or gathered from all ranks
typedef struct {
    char *weights, *adapters; // a layer's stored weights; its adapters
    PageSlot page;            // page: number of the layer
} LayerBuffer;

// Elements [begin, begin + count) of the stored gradient, on the device: at home, or in a staging buffer
typedef struct {
    char *memory;
    size_t begin, count;
    PageSlot page; // page: the group; collective: reduces its sums, or gathers its gradient
} StoredGradient;

// Buffers of a layer's gradient
typedef struct {
    Summed *sums;          // [elements of a layer in the trained table], unless sums are in place
    StoredGradient stored; // the stored gradient, to which the sums are added
    int busy;              // 1: the layer is released, and its gradient not returned yet
} GradientBuffer;

enum { GRADIENT_BUFFERS = 4 };

typedef struct Residency Residency;

// Calls that a pass makes for a deferred step of the optimizer (llmc/optimizer/update.h)
typedef struct {
    void (*begin)(Residency *r);               // once the sequence is set, before its tensors are pushed
    void (*group)(Residency *r, size_t group); // before the group's weights are used
    void (*chunk)(Residency *r);               // between two chunks: steps some slices
    void *context;                             // NULL: no step is deferred
} PassHook;

struct Residency {
    const Model *model;
    const Ops *ops;
    Arena *arena;           // [PLACES]
    Place place[PLACED];    // place of each kind of tensor
    Moved moved;            // bytes moved between the device and other places so far
    const Storage *storage; // NULL: weights are stored in the model's type
    char *weights;          // stored_table's weights: all, or this rank's shards (model.h)
    char *decoded;          // [elements of a layer] a layer's weights decoded to model->dtype
    const Lora *lora;       // NULL: the model itself is trained
    char *adapters;         // weights of lora->table: all, or this rank's shards
    int without_adapters;   // 1: a pass of the reference, which is the model without adapters
    char *reference;        // copy of the initial trained weights, which a pass of the reference uses; NULL: none
    char *gradients;        // the trained table's, in gradient_type: all, or shards; NULL in a run without backward
    DType gradient_type;    // model->dtype, or the type of sums
    int accumulates;        // 1: a step adds up the gradients of several micro-batches
    double *host_squares;   // host [parameters,parameter_parts] sums of squares of the gradient
    double *squares; // [parameters,parameter_parts] sums of squares of this rank's shards, if gradients are off-device
    size_t weights_mark, sums_mark, layers_mark; // the arena's marks before weights, sums, layer buffers were pushed

    World world;
    int first;                               // 1: first micro-batch of the step; off-device gradients hold nothing yet
    int last;                                // 1: last micro-batch of the step; reduces sums in place over all ranks
    Traffic sent;                            // bytes and calls sent by this rank so far
    Walk walk;                               // walk of the current pass
    size_t every;                            // keep every `every`-th layer input (inputs.h)
    LayerBuffer gathered[2];                 // weights of the current layer and the next layer, in turn
    size_t current;                          // index of the current layer's buffer
    GradientBuffer summed[GRADIENT_BUFFERS]; // layer l uses buffer l % buffers
    size_t buffers;
    Summed *held;           // sums of all gradients, in the order of the trained table (grads_hold); else NULL
    int holds;              // 1: sums of all gradients are held (in the dry run `held` may be NULL)
    int head_is_stored;     // 1: a tied head has added to the embedding's stored gradient in this pass
    Summed *embedding_sums; // [elements of the group] sums of a tied matrix, from the head to the embedding
    int64_t last_ticket;    // last reduction in place; 0: none
    PassHook hook;
    size_t visits; // visits of a layer's chunk in a pass over the largest sequence
};

static void *at(void *base, size_t element, size_t size) {
    return (void *)((uintptr_t)base + element * size); // NOLINT(performance-no-int-to-ptr): in a plan base may be NULL
}

// Return the table of the trained parameters, and their weights.
static const Model *trained_table(const Residency *r) { return r->lora ? &r->lora->table : r->model; }
static char *trained_weights(const Residency *r) { return r->lora ? r->adapters : r->weights; }

// Returns the table by which weights are stored, moved and sharded.
static const Model *stored_table(const Residency *r) { return r->storage ? &r->storage->table : r->model; }

static int group_is_trained(const Residency *r, size_t group) { return group_elements(trained_table(r), group) > 0; }

static int group_decodes(const Residency *r, size_t group) {
    return r->storage && storage_decodes(r->storage, r->model, group);
}

// Returns the elements of the final norm. In the sums of the head's group the matrix follows them.
static size_t head_norm_elements(const Model *model) {
    size_t C = model->config.hidden_size;
    return model->model_offset[FINAL_NORM_BIAS] == ABSENT ? C : 2 * C;
}

static int head_is_tied(const Model *model) { return model->model_offset[LM_HEAD] == ABSENT; }

static int is_layer(size_t group) { return group < GROUP_EMBEDDING; }

static int is_off_device(const Residency *r, Placed placed) { return r->place[placed] > PLACE_DEVICE; }

// Returns the pager of transfers that happen once for each visited layer.
static Pager layer_pager(Residency *r, Placed placed) {
    const Pager pager = {r->ops, &r->moved, r->place[placed], r->walk.layers};
    return pager;
}

// Returns the pager of transfers that happen once for each visited chunk. mean: in the dry run, transfers a visit
static Pager chunk_pager(Residency *r, Placed placed, double mean) {
    const Pager pager = {r->ops, &r->moved, r->place[placed], r->walk.chunks * (r->walk.dry ? mean : 1)};
    return pager;
}

static Arena *memory_of(const Residency *r, Placed placed) {
    return &r->arena[is_off_device(r, placed) ? r->place[placed] : PLACE_DEVICE];
}

// Returns the layer that backward loads after `layer`: layer - 1, or after a kept input the layer of the kept input
// before it. Before layer 0 the result is no layer's number.
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

// Exchanges messages with other ranks. mean: bytes that a rank sends on average, which the dry run counts, as it knows
// only one rank's messages
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
