/*
Where weights and gradients live (layer inputs: inputs.h). streambp.h brackets its work with a few calls and never asks:

    weights_acquire / release, grads_acquire / release    around a group: a layer, the embedding or the head
    layers_begin / end, weights_prefetch                  around a walk over the layers, and within it
    grads_begin / end                                     around the pass of a micro-batch

With LoRA the model's weights are frozen: they have no gradient anywhere, and the table of adapters (lora.h) is what has
gradients and an optimizer. Adapters live beside the weights and come and go with their layer.

Gradient precision: within a group dW is summed in Summed. The stored gradient itself is handed out where it has that
type and is not sharded; else one group-sized buffer is, and grads_release adds it once to the stored gradient.

Several processes (world.h): a group's gradient is reduced over all ranks when it is released, once, whatever the number
of chunks: in place at the step's last micro-batch, from a buffer at every micro-batch, after which the rank adds its
shard to what it stores. Stage 0 is stage 1 whose sums all ranks gather afterwards, and stages 1 and 2 differ in what is
stored only: all stages give the same bits. In stage 3 a layer's weights are gathered before they are used, once per
walk. Two buffers then take turns, so that communication of one layer runs beside the computation of another.
*/
#ifndef LLMC_RESIDENCY_H
#define LLMC_RESIDENCY_H
#include "llmc/base/progress.h"
#include "llmc/ops/arena.h"
#include "llmc/model/lora.h"
#include "llmc/ops/ops.h"
#include "llmc/model/model.h"
#include "places.h"

// Buffer that a layer's weights come to, from another place or from all ranks, or its gradient is reduced in
typedef struct {
    char *weights, *adapters; // [elements of a layer] of model->dtype, of either table
    Summed *sums;             // [elements of a layer of what is trained]
    size_t layer;             // the layer, where busy
    int busy;                 // until the ticket is awaited
    int64_t ticket;           // of a collective, or of a transfer from another place
} LayerBuffer;

typedef struct {
    const Model *model;
    const Ops *ops;
    Arena *arena;         // [PLACES]
    Place place[PLACED];  // where each lies
    Moved moved;          // between the device and other places so far
    char *weights;        // of model->dtype: all, or this rank's shards (model.h)
    const Lora *lora;     // NULL: the model itself is trained
    char *adapters;       // likewise, of lora->table
    int without_adapters; // in a pass of the reference: the model before adapters,
    char *reference;      // or with this in place of what is trained, as that was at the start; NULL: there is none
    char *gradients;      // of what is trained, in gradient_type; all or shards; NULL in a run without backward
    DType gradient_type;  // model->dtype, or the type of sums
    size_t weights_mark, sums_mark, layers_mark; // of the arena, before what was pushed for these

    World world;
    int last;                           // micro-batch of the step: sums in place are reduced over all ranks in its pass
    Traffic sent;                       // by this rank so far
    int plan;                           // a walk visits one layer of each kind (sequence.h)
    double layers_repeat;               // layers that the one being visited stands for; 1 in a run
    double chunk_repeat;                // layers times chunks that the chunk being visited stands for; 1 in a run
    int step;                           // direction of the walk over layers: 1 first to last, -1 last to first
    size_t every;                       // of so many layers the input of one is kept (inputs.h)
    LayerBuffer gathered[2];            // for the layer at hand and the next one, by turns
    size_t at_hand;                     // which of these
    LayerBuffer summed[2];              // for layers of even and odd index
    Summed *embedding_sums;             // [elements of the group] of a tied matrix, from the head to the embedding
    int64_t last_ticket;                // of reductions in place; 0: none
    struct Update *update;              // the optimizer's step, where it waits for this pass (update.h); NULL: none
    size_t visits;                      // to chunks of layers, of a pass over the largest sequence
} Residency;

static void *at(void *base, size_t element, size_t size) {
    return (void *)((uintptr_t)base + element * size); // NOLINT(performance-no-int-to-ptr): in a plan base may be NULL
}

// The table of what is trained, and its memory
static const Model *trained_table(const Residency *r) { return r->lora ? &r->lora->table : r->model; }
static char *trained_weights(const Residency *r) { return r->lora ? r->adapters : r->weights; }

// Elements of the final norm; the head's matrix follows in the sums of its group
static size_t head_norm_elements(const Model *model) {
    size_t C = model->config.hidden_size;
    return model->model_offset[FINAL_NORM_BIAS] == ABSENT ? C : 2 * C;
}

static int head_is_tied(const Model *model) { return model->model_offset[LM_HEAD] == ABSENT; }

static int is_layer(size_t group) { return group < GROUP_EMBEDDING; }

static int is_elsewhere(const Residency *r, Placed placed) { return r->place[placed] > PLACE_DEVICE; }

static Arena *memory_of(const Residency *r, Placed placed) {
    return &r->arena[is_elsewhere(r, placed) ? r->place[placed] : PLACE_DEVICE];
}

// The layer that backward visits after `layer`, or from which it restores inputs; before layer 0 no number of a layer
static size_t layer_before(const Residency *r, size_t layer) {
    return layer - (layer % r->every ? 1 : r->every);
}

// ---- collectives, counted: a rank sends n (P - 1) / P of n bytes (world.h). A group of one has nothing to send ------
static void count_sent(Residency *r, TrafficKind kind, double bytes, double hops) {
    r->sent.bytes[kind] += r->layers_repeat * bytes;
    r->sent.calls[kind] += r->layers_repeat;
    r->sent.hops[kind] += r->layers_repeat * hops;
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

// mean: bytes that a rank sends on average. A plan counts these: it knows one rank's messages, others may send more or
// less.
static int64_t ranks_exchange(Residency *r, TrafficKind kind, RankGroup group, const Message *messages, size_t n,
                              double mean) {
    double bytes = 0;
    if (ranks_in(r->world, group) == 1) return 0;
    for (size_t i = 0; i < n; i++) bytes += (double)messages[i].out_bytes;
    count_sent(r, kind, r->plan ? mean : bytes, 1);
    return r->ops->exchange(group, messages, n);
}

static int alone(const Residency *r) { return world_ranks(r->world) == 1; }
static Sharding weights_sharding(const Residency *r) { return sharding_of(r->world, ZERO_WEIGHTS); }
static Sharding gradients_sharding(const Residency *r) { return sharding_of(r->world, ZERO_GRADIENTS); }

// Elements of a group that this rank has of what is sharded so
static Range sharded_range(const Model *table, Sharding s, size_t group) {
    return shard_range(group_elements(table, group), SHARD_ALIGNMENT, s.ranks, s.rank);
}

static Range own_range(const Residency *r, const Model *table, size_t group) {
    return sharded_range(table, sharding_of(r->world, ZERO_NONE), group);
}

// ---- weights --------------------------------------------------------------------------------------------------------
typedef struct {
    char *weights;  // of the group, from its first element
    char *adapters; // of a layer, from its first element; NULL: none, or a pass of the reference
    char *matrix;   // of the head: [V,C], the embedding where they are tied; else NULL
} GroupWeights;

// To the weights of the reference, and back
static void reference_swap(Residency *r) {
    char **trained = r->lora ? &r->adapters : &r->weights, *at_hand = *trained;
    const Place place = r->place[PLACED_WEIGHTS];
    if (!r->reference) {
        r->without_adapters = !r->without_adapters;
        return;
    }
    *trained = r->reference, r->reference = at_hand;
    if (!r->lora) r->place[PLACED_WEIGHTS] = r->place[PLACED_REFERENCE], r->place[PLACED_REFERENCE] = place;
}

// A group's weights come to buffers before they are used.
static int weights_come(const Residency *r) {
    return weights_sharding(r).ranks > 1 || is_elsewhere(r, PLACED_WEIGHTS);
}

static int has_adapters(const Residency *r) { return r->lora && !r->without_adapters; }

static int64_t gather_shards(Residency *r, const Model *table, size_t group, char *out) {
    if (weights_sharding(r).ranks == 1) return 0;
    return ranks_gather(r, TRAFFIC_WEIGHTS, RANKS_ALL, out, group_elements(table, group), SHARD_ALIGNMENT,
                        dtype_size(table->dtype));
}

// Asks for out = all elements of a group: what this rank has of them, which may be elsewhere, and then other ranks'
// shards, where they are elsewhere only behind group_await.
static int64_t group_ask(Residency *r, const Model *table, char *held, size_t group, char *out) {
    const size_t size = dtype_size(table->dtype);
    const Range own = sharded_range(table, weights_sharding(r), group);
    const char *from = (const char *)at(held, sharding_begin(table, weights_sharding(r), group), size);
    void *to = at(out, own.begin, size);
    if (is_elsewhere(r, PLACED_WEIGHTS))
        return place_load(r->ops, &r->moved, r->place[PLACED_WEIGHTS], to, from, own.count * size, r->layers_repeat);
    if (own.count) r->ops->copy(to, from, own.count * size);
    return gather_shards(r, table, group, out);
}

static void group_await(Residency *r, const Model *table, size_t group, char *out, int64_t ticket) {
    if (is_elsewhere(r, PLACED_WEIGHTS)) {
        r->ops->await_transfer(ticket);
        ticket = gather_shards(r, table, group, out);
    }
    r->ops->await(ticket);
}

static void layer_await(Residency *r, LayerBuffer *b) {
    group_await(r, r->model, b->layer, b->weights, b->ticket);
    if (has_adapters(r)) group_await(r, &r->lora->table, b->layer, b->adapters, b->ticket);
    b->busy = 0;
}

// Asks for a layer, in the buffer that the layer at hand is not in.
static LayerBuffer *layer_ask(Residency *r, size_t layer) {
    LayerBuffer *b = &r->gathered[r->model->config.num_hidden_layers > 1 && !r->at_hand];
    if (b->busy && b->layer == layer) return b; // the visit before has asked for it
    if (b->busy) layer_await(r, b);
    b->layer = layer, b->busy = 1;
    b->ticket = group_ask(r, r->model, r->weights, layer, b->weights);
    if (has_adapters(r)) b->ticket = group_ask(r, &r->lora->table, r->adapters, layer, b->adapters);
    return b;
}

static GroupWeights acquire_layer(Residency *r, size_t layer) {
    LayerBuffer *b = layer_ask(r, layer);
    GroupWeights w = {b->weights, has_adapters(r) ? b->adapters : NULL, NULL};
    layer_await(r, b);
    r->at_hand = (size_t)(b - r->gathered);
    return w;
}

// The embedding or the head, for as long as it is used
static GroupWeights acquire_table(Residency *r, size_t group) {
    const Model *model = r->model;
    const size_t size = dtype_size(model->dtype), elements = group_elements(model, group);
    const int tied = group == GROUP_HEAD && head_is_tied(model);
    GroupWeights w = {NULL, NULL, NULL};
    r->weights_mark = arena_mark(r->arena);
    w.weights = (char *)arena_push(r->arena, SHARE_WEIGHTS,
                                   group == GROUP_HEAD ? "the head's weights" : "the embedding", elements, size);
    int64_t ticket = group_ask(r, model, r->weights, group, w.weights);
    if (tied) {
        w.matrix = (char *)arena_push(r->arena, SHARE_WEIGHTS, "the embedding", group_elements(model, GROUP_EMBEDDING),
                                      size);
        ticket = group_ask(r, model, r->weights, GROUP_EMBEDDING, w.matrix);
    } else if (group == GROUP_HEAD) {
        w.matrix = (char *)at(w.weights, model_head_offset(model) - group_begin(model, group), size);
    }
    group_await(r, model, group, w.weights, ticket);
    if (tied) group_await(r, model, GROUP_EMBEDDING, w.matrix, ticket);
    return w;
}

// Takes the optimizer's step through `group`, where that waits for this pass (update.h).
static void update_group(Residency *r, size_t group);

static GroupWeights weights_acquire(Residency *r, size_t group) {
    const size_t size = dtype_size(r->model->dtype);
    GroupWeights w = {NULL, NULL, NULL};
    update_group(r, group);
    if (weights_come(r)) return is_layer(group) ? acquire_layer(r, group) : acquire_table(r, group);
    w.weights = (char *)at(r->weights, group_begin(r->model, group), size);
    if (group == GROUP_HEAD) w.matrix = (char *)at(r->weights, model_head_offset(r->model), size);
    if (has_adapters(r) && is_layer(group))
        w.adapters = (char *)at(r->adapters, group_begin(&r->lora->table, group), size);
    return w;
}

// Asks for the weights of the walk's next layer, to be called when all that `layer` itself waits for has been asked
// for. A plan's next visit may be of any layer, so there each asks for its own.
static void weights_prefetch(Residency *r, size_t layer) {
    const size_t next = r->step > 0 ? layer + 1 : layer_before(r, layer);
    if (!weights_come(r) || r->plan || next >= r->model->config.num_hidden_layers) return;
    update_group(r, next);
    layer_ask(r, next);
}

// For the progress bar: a layer forward is a part of the pass, backward with its recomputation is as much as these.
#define LAYER_BACKWARD_PARTS 3

static void weights_release(Residency *r, size_t group) {
    if (is_layer(group) && !r->plan) progress_part(r->step > 0 ? 1 : LAYER_BACKWARD_PARTS);
    if (weights_come(r) && !is_layer(group)) arena_pop(r->arena, r->weights_mark);
}

// All-gather of a group of which every rank has stepped its shard, there where it lies
static void group_updated(Residency *r, const Model *table, char *weights, size_t group) {
    const size_t size = dtype_size(table->dtype), count = group_elements(table, group), mark = arena_mark(r->arena);
    const Place place = r->place[PLACED_WEIGHTS];
    const Range own = own_range(r, table, group);
    const Phase phase = r->moved.phase;
    char *here = (char *)at(weights, group_begin(table, group), size), *there = here;
    r->moved.phase = PHASE_UPDATE;
    if (is_elsewhere(r, PLACED_WEIGHTS)) {
        here = (char *)arena_push(r->arena, SHARE_WEIGHTS, "updated weights", count, size);
        r->ops->await_transfer(place_load(r->ops, &r->moved, place, at(here, own.begin, size),
                                          at(there, own.begin, size), own.count * size, 1));
    }
    r->ops->await(ranks_gather(r, TRAFFIC_WEIGHTS, RANKS_ALL, here, count, SHARD_ALIGNMENT, size));
    if (is_elsewhere(r, PLACED_WEIGHTS))
        r->ops->await_transfer(place_store(r->ops, &r->moved, place, there, here, count * size, 1));
    r->moved.phase = phase;
    arena_pop(r->arena, mark);
}

// After the optimizer's step in stages 1 and 2
static int weights_gather(const Residency *r) {
    return !alone(r) && r->world.zero >= ZERO_OPTIMIZER && r->world.zero < ZERO_WEIGHTS;
}

static void weights_updated(Residency *r) {
    const Model *table = trained_table(r);
    const size_t L = table->config.num_hidden_layers;
    if (!weights_gather(r)) return;
    for (size_t i = 0; i < L + 2; i++) {
        const size_t group = i < L ? i : i == L ? GROUP_EMBEDDING : GROUP_HEAD;
        if (group_elements(table, group)) group_updated(r, table, trained_weights(r), group);
    }
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// dW is summed in the stored gradient itself.
static int sums_in_place(const Residency *r) {
    return r->gradient_type == dtype_of_sums(r->model->dtype) && gradients_sharding(r).ranks == 1;
}

static Summed *sums_at(void *base, size_t element, const Residency *r) {
    return (Summed *)at(base, element, dtype_size(dtype_of_sums(r->model->dtype)));
}

// Before a step's first micro-batch; behind a step of the optimizer that waits for its forward pass
static void grads_zero(Residency *r) {
    if (r->update) return;
    r->ops->zero(r->gradients,
                 sharding_elements(trained_table(r), gradients_sharding(r)) * dtype_size(r->gradient_type));
}

static Summed *push_sums(Residency *r, const char *name, size_t count) {
    const size_t size = dtype_size(dtype_of_sums(r->model->dtype));
    Summed *sums = (Summed *)arena_push(r->arena, SHARE_GRADIENTS, name, count, size);
    r->ops->zero(sums, count * size);
    return sums;
}

// Stage 0: all ranks get the whole gradient of the step.
static void gather_gradient(Residency *r, size_t group) {
    const Model *table = trained_table(r);
    const size_t size = dtype_size(r->gradient_type);
    if (r->last && r->world.zero < ZERO_OPTIMIZER)
        r->last_ticket =
            ranks_gather(r, TRAFFIC_GRADIENTS, RANKS_ALL, at(r->gradients, group_begin(table, group), size),
                         group_elements(table, group), SHARD_ALIGNMENT, size);
}

// Asks for the reduction of a group's buffer over all ranks ...
static int64_t reduce_sums(Residency *r, size_t group, Summed *sums) {
    return ranks_sum(r, TRAFFIC_GRADIENTS, RANKS_ALL, sums, group_elements(trained_table(r), group), SHARD_ALIGNMENT);
}

// ... after which this rank's shard is added to the stored gradient.
static void add_range(Residency *r, size_t group, Summed *sums) {
    const Model *table = trained_table(r);
    const Sharding sharding = gradients_sharding(r);
    const Range own = own_range(r, table, group);
    const size_t offset = sharding_begin(table, sharding, group) + (sharding.ranks > 1 ? 0 : own.begin);
    if (own.count)
        r->ops->gradient_add(at(r->gradients, offset, dtype_size(r->gradient_type)), r->gradient_type,
                             sums_at(sums, own.begin, r), own.count);
    gather_gradient(r, group);
}

static void finish_layer(Residency *r, LayerBuffer *b) {
    if (!b->busy) return;
    b->busy = 0;
    r->ops->await(b->ticket);
    add_range(r, b->layer, b->sums);
}

typedef struct {
    Summed *layer;       // a layer's dW in the order of its tensors, or with LoRA of its adapters; NULL of the others
    Summed *norm, *head; // of the head: the final norm's (weight, bias), and the matrix
    void *tables;        // of the embedding group: its op adds to them directly,
    DType tables_type;   // in this type
} GroupSums;

static Summed *layer_sums(Residency *r, size_t layer) {
    const Model *table = trained_table(r);
    LayerBuffer *b = &r->summed[alone(r) ? 0 : layer % 2];
    if (sums_in_place(r)) return sums_at(r->gradients, group_begin(table, layer), r);
    finish_layer(r, b);
    r->ops->zero(b->sums, table->layer_elements * dtype_size(dtype_of_sums(table->dtype)));
    return b->sums;
}

static void head_sums(Residency *r, GroupSums *sums) {
    const Model *model = r->model;
    const size_t norm = head_norm_elements(model);
    if (sums_in_place(r)) {
        sums->norm = sums_at(r->gradients, group_begin(model, GROUP_HEAD), r);
        sums->head = sums_at(r->gradients, model_head_offset(model), r);
    } else if (r->embedding_sums) {
        sums->norm = push_sums(r, "sums of the final norm's gradient", norm);
        sums->head = r->embedding_sums;
    } else {
        sums->norm = push_sums(r, "sums of the head's gradient", norm + model_head_elements(model));
        sums->head = sums_at(sums->norm, norm, r);
    }
}

static void embedding_sums(Residency *r, GroupSums *sums) {
    const int stored = alone(r) || sums_in_place(r);
    sums->tables_type = stored ? r->gradient_type : dtype_of_sums(r->model->dtype);
    if (stored)
        sums->tables = r->gradients;
    else if (r->embedding_sums)
        sums->tables = r->embedding_sums;
    else
        sums->tables = push_sums(r, "sums of the embedding's gradient", group_elements(r->model, GROUP_EMBEDDING));
}

static GroupSums grads_acquire(Residency *r, size_t group) {
    GroupSums sums = {NULL, NULL, NULL, NULL, DTYPE_FP32};
    r->sums_mark = arena_mark(r->arena);
    if (is_layer(group))
        sums.layer = layer_sums(r, group);
    else if (!r->lora && group == GROUP_HEAD)
        head_sums(r, &sums);
    else if (!r->lora)
        embedding_sums(r, &sums);
    return sums;
}

// A process alone adds its sums to the stored gradient.
static void add_sums(Residency *r, size_t group, GroupSums sums) {
    const Model *table = trained_table(r);
    const size_t size = dtype_size(r->gradient_type), begin = group_begin(table, group);
    if (is_layer(group)) {
        r->ops->gradient_add(at(r->gradients, begin, size), r->gradient_type, sums.layer, table->layer_elements);
    } else if (group == GROUP_HEAD) {
        r->ops->gradient_add(at(r->gradients, begin, size), r->gradient_type, sums.norm, head_norm_elements(table));
        r->ops->gradient_add(at(r->gradients, model_head_offset(table), size), r->gradient_type, sums.head,
                             model_head_elements(table));
    }
}

static void grads_release(Residency *r, size_t group, GroupSums sums) {
    if (r->lora && !is_layer(group)) return;
    if (alone(r)) {
        if (!sums_in_place(r)) add_sums(r, group, sums);
    } else if (sums_in_place(r)) { // awaited at the end of the pass
        Summed *own = sums_at(r->gradients, group_begin(trained_table(r), group), r);
        if (r->last) r->last_ticket = reduce_sums(r, group, own);
        gather_gradient(r, group);
    } else if (is_layer(group)) {
        LayerBuffer *b = &r->summed[group % 2];
        b->layer = group, b->busy = 1;
        b->ticket = reduce_sums(r, group, b->sums);
        if (r->plan) finish_layer(r, b); // counted for all the layers it stands for
    } else {
        Summed *all = group == GROUP_HEAD ? sums.norm : (Summed *)sums.tables;
        r->ops->await(reduce_sums(r, group, all));
        add_range(r, group, all);
    }
    arena_pop(r->arena, r->sums_mark);
}

// Around the forward and backward pass of a micro-batch. Beside other processes a tied matrix has one sum, from the
// head to the embedding, so that it is sent once. last: of the step's micro-batches
static void grads_begin(Residency *r, int last) {
    r->last = last;
    const int wanted = !alone(r) && !r->lora && !sums_in_place(r) && head_is_tied(r->model);
    r->embedding_sums =
        wanted ? push_sums(r, "sums of the tied embedding's gradient", group_elements(r->model, GROUP_EMBEDDING))
               : NULL;
    r->last_ticket = 0;
}

static void grads_end(Residency *r) {
    if (r->last_ticket) r->ops->await(r->last_ticket);
}

// ---- a walk over layers ---------------------------------------------------------------------------------------------
static void push_layer(Residency *r, LayerBuffer *b, int first) {
    const size_t size = dtype_size(r->model->dtype);
    b->busy = 0;
    b->weights = (char *)arena_push(r->arena, SHARE_WEIGHTS, first ? "one layer's weights" : "the next layer's weights",
                                    r->model->layer_elements, size);
    if (r->lora)
        b->adapters =
            (char *)arena_push(r->arena, SHARE_WEIGHTS, first ? "one layer's adapters" : "the next layer's adapters",
                               r->lora->table.layer_elements, size);
}

// step 1: first to last; -1: last to first, with gradients. Pushes buffers for one layer, or for two by turns.
static void layers_begin(Residency *r, int step) {
    const size_t size = dtype_size(dtype_of_sums(r->model->dtype));
    const size_t two = min_size(2, r->model->config.num_hidden_layers);
    r->step = step, r->moved.phase = step > 0 ? PHASE_FORWARD : PHASE_BACKWARD;
    r->layers_mark = arena_mark(r->arena);
    for (size_t i = 0; i < two && weights_come(r); i++) push_layer(r, &r->gathered[i], i == 0);
    for (size_t i = 0; i < (alone(r) ? 1 : two) && step < 0 && !sums_in_place(r); i++) {
        r->summed[i].busy = 0;
        r->summed[i].sums = (Summed *)arena_push(
            r->arena, SHARE_GRADIENTS, i ? "sums of the layer before, on their way" : "sums of one layer's gradient",
            trained_table(r)->layer_elements, size);
    }
}

static void layers_end(Residency *r) {
    for (size_t i = 0; i < 2 && r->step < 0; i++) finish_layer(r, &r->summed[i]);
    r->layers_repeat = 1;
    arena_pop(r->arena, r->layers_mark);
}

#endif
