/*
The places of weights and gradients (layer inputs: inputs.h). streambp.h brackets its work with a few calls and never
asks where a tensor is:

    weights_acquire / release, grads_acquire / release    around a group: a layer, the embedding or the head
    layers_begin / end, weights_prefetch                  around a walk over the layers, and within it
    grads_begin / end                                     around the pass of a micro-batch
    grads_hold, held_begin, held, release_held            in place of grads_acquire: all groups (held_gradients.h)

With LoRA the model's weights are frozen and have no gradient. The table of adapters (lora.h) has gradients and an
optimizer instead. A layer's adapters move together with its weights. The table may hold copies of the embedding and the
head, which are then used and trained in place of the model's. A frozen model may be stored in 4 bits (storage.h):
groups move as stored, and weights_acquire decodes a group into the type of the model. With few rows (generation)
products read the codes themselves.

Gradient precision: dW of a group is summed in type Summed. If the stored gradient has this type and is not sharded, the
sums are made in place. Else they are made in one group-sized buffer, which grads_release adds to the stored gradient.

Several processes (world.h): grads_release reduces a group's gradient over all ranks, once, whatever the number of
chunks. Sums in place are reduced at the step's last micro-batch. Sums in a buffer are reduced at every micro-batch, and
the rank adds its shard of them to the stored gradient. Stage 0 is stage 1, followed by a gather of all sums. Stage 3 is
stage 2, preceded by a gather of each group's weights. So stages 0 and 1, and stages 2 and 3, give the same bits. All
four do if all reduce from buffers, or a step has one micro-batch. Two buffers take turns: one layer's communication
runs during another's computation.
*/
#ifndef LLMC_RESIDENCY_H
#define LLMC_RESIDENCY_H
#include "llmc/base/progress.h"
#include "residency_state.h"

// ---- weights --------------------------------------------------------------------------------------------------------
typedef struct {
    char *weights;        // the group's weights, from its first element
    char *adapters;       // the group's adapters, from its first element; NULL: none, or a pass of the reference
    char *matrix;         // the head's matrix [V,C], tied: the embedding; NULL in other groups, and with `stored`
    const size_t *offset; // offsets of a layer's tensors (layer_offsets); else NULL
    const char *stored;   // the group as stored, if products read matrices in 4 bits (coded_matrix); else NULL
    size_t first;         // number of the group's first parameter, with `stored`
    char *base;           // the model's embedding or head, also if a trained copy replaces it
} GroupWeights;

// Switches from the trained weights to the reference's weights, or back.
static void reference_swap(Residency *r) {
    char **trained = r->lora ? &r->adapters : &r->weights, *now = *trained;
    const Place place = r->place[PLACED_WEIGHTS];
    if (!r->reference) {
        r->without_adapters = !r->without_adapters;
        return;
    }
    *trained = r->reference, r->reference = now;
    if (!r->lora) r->place[PLACED_WEIGHTS] = r->place[PLACED_REFERENCE], r->place[PLACED_REFERENCE] = place;
}

// Tells whether a group's weights are loaded or gathered into buffers before use.
static int weights_are_staged(const Residency *r) {
    return weights_sharding(r).ranks > 1 || is_off_device(r, PLACED_WEIGHTS);
}

static int has_adapters(const Residency *r) { return r->lora && !r->without_adapters; }

static void gather_shards(Residency *r, PageSlot *slot, const Model *table, size_t group, char *out) {
    if (weights_sharding(r).ranks == 1) return;
    slot->collective = ranks_gather(r, TRAFFIC_WEIGHTS, RANKS_ALL, out, group_elements(table, group), SHARD_ALIGNMENT,
                                    dtype_size(table->dtype));
}

// Starts loading a group into `out`: this rank's shard, then an all-gather. If the shard is off-device, group_await
// starts the gather.
static void group_ask(Residency *r, PageSlot *slot, const Model *table, char *held, size_t group, char *out) {
    const size_t size = dtype_size(table->dtype);
    const Range own = sharded_range(table, weights_sharding(r), group);
    char *from = (char *)at(held, sharding_begin(table, weights_sharding(r), group), size);
    void *to = at(out, own.begin, size);
    if (is_off_device(r, PLACED_WEIGHTS)) {
        page_load(layer_pager(r, PLACED_WEIGHTS), slot, to, from, own.count * size);
        return;
    }
    if (own.count) r->ops->copy(to, from, own.count * size);
    gather_shards(r, slot, table, group, out);
}

static void group_await(Residency *r, PageSlot *slot, const Model *table, size_t group, char *out) {
    page_await(r->ops, slot);
    if (is_off_device(r, PLACED_WEIGHTS)) gather_shards(r, slot, table, group, out);
    r->ops->await(slot->collective);
}

static void layer_await(Residency *r, LayerBuffer *b) {
    group_await(r, &b->page, stored_table(r), b->page.page, b->weights);
    if (has_adapters(r)) group_await(r, &b->page, &r->lora->table, b->page.page, b->adapters);
    b->page.asked = 0;
}

// Starts loading a layer into the buffer that does not hold the current layer.
static LayerBuffer *layer_ask(Residency *r, size_t layer) {
    LayerBuffer *b = &r->gathered[r->model->config.num_hidden_layers > 1 && !r->current];
    if (b->page.asked && b->page.page != layer) layer_await(r, b);
    if (!page_ask(r->ops, &b->page, layer)) return b;
    group_ask(r, &b->page, stored_table(r), r->weights, layer, b->weights);
    if (has_adapters(r)) group_ask(r, &b->page, &r->lora->table, r->adapters, layer, b->adapters);
    return b;
}

// Tells whether products of `rows` rows read a group's matrices in 4 bits undecoded, as this is fast for few rows.
static int codes_serve(const Residency *r, size_t group, size_t rows) {
    return rows <= r->ops->quantised_rows && group_decodes(r, group);
}

// Decodes a group's weights from `stored` to `out` and sets *w, for products of `rows` rows. With few rows skips
// experts and linear layers in 4 bits, which products read from `stored`.
static void group_decode(Residency *r, size_t group, size_t rows, const char *stored, char *out, GroupWeights *w) {
    const size_t size = dtype_size(r->model->dtype), begin = group_begin(r->model, group);
    const Model *table = stored_table(r);
    const Range of = group_parameters(r->model, group);
    const int codes = codes_serve(r, group, rows);
    w->weights = out, w->first = of.begin;
    if (codes) w->stored = stored;
    for (size_t i = of.begin; i < of.begin + of.count; i++) {
        const Parameter *p = &r->model->parameters[i];
        const QuantFormat *format = &r->storage->format[i];
        const char *from = stored + table->parameters[i].offset - group_begin(table, group);
        void *to = at(out, p->offset - begin, size);
        if (codes && (p->experts || (format->type != QUANT_NONE && p->role == ROLE_LINEAR))) continue;
        if (format->type == QUANT_NONE)
            r->ops->copy(to, from, parameter_elements(p) * size);
        else
            r->ops->dequantise((Stored *)to, from, format, parameter_elements(p));
    }
}

// A matrix in 4 bits, or a matrix's rows from `first` on (GPT-2's c_attn holds q, k and v)
typedef struct {
    const void *record; // codes of [rows,.]; NULL: the matrix is decoded, or in `floats`
    const void *floats; // experts that are stored without codes
    const QuantFormat *format;
    size_t rows, first;
} CodedMatrix;

// Finds the stored matrix at an element offset of a group. All members 0: products read decoded weights.
static CodedMatrix coded_matrix(const Residency *r, GroupWeights w, size_t offset) {
    CodedMatrix m = {0};
    if (!w.stored) return m;
    const Parameter *p = r->model->parameters + w.first, *stored = stored_table(r)->parameters + w.first;
    size_t i = 0;
    while (p[i].offset - p->offset + parameter_elements(&p[i]) <= offset) i++;
    m.format = &r->storage->format[w.first + i];
    const char *from = w.stored + (stored[i].offset - stored->offset);
    if (m.format->type == QUANT_NONE && p[i].experts) m.floats = from;
    if (m.format->type == QUANT_NONE) return m;
    m.record = from;
    m.rows = p[i].rows, m.first = (offset - (p[i].offset - p->offset)) / p[i].cols;
    return m;
}

// Sets w->weights to a layer's weights: `stored`, or decoded from it.
static void layer_decode(Residency *r, size_t layer, size_t rows, char *stored, GroupWeights *w) {
    w->weights = stored;
    if (group_decodes(r, layer)) group_decode(r, layer, rows, stored, r->decoded, w);
}

static GroupWeights acquire_layer(Residency *r, size_t layer, size_t rows) {
    LayerBuffer *b = layer_ask(r, layer);
    GroupWeights w = {NULL, has_adapters(r) ? b->adapters : NULL, NULL, layer_offsets(r->model, layer), NULL, 0, NULL};
    layer_await(r, b);
    r->current = (size_t)(b - r->gathered);
    layer_decode(r, layer, rows, b->weights, &w);
    return w;
}

static char *push_table(Residency *r, const Model *table, size_t group, const char *name) {
    return (char *)arena_push(r->arena, SHARE_WEIGHTS, name, group_elements(table, group), dtype_size(table->dtype));
}

// Sets w->weights to the embedding or the head: `stored`, or decoded from it. Only lm_head, the last tensor of its
// group, can be in 4 bits.
static void table_decode(Residency *r, size_t group, size_t rows, char *stored, GroupWeights *w) {
    w->weights = stored;
    if (!group_decodes(r, group)) return;
    const size_t count = codes_serve(r, group, rows) ? head_norm_elements(r->model) : group_elements(r->model, group);
    char *decoded =
        (char *)arena_push(r->arena, SHARE_WEIGHTS, "the head's decoded weights", count, dtype_size(r->model->dtype));
    group_decode(r, group, rows, stored, decoded, w);
}

// Replaces the embedding or the head by its trained copy (lora.h), or sets its adapter.
static void acquire_outer(Residency *r, size_t group, GroupWeights *w) {
    const Model *table = &r->lora->table;
    char *copy = (char *)at(r->adapters, group_begin(table, group), dtype_size(table->dtype));
    PageSlot slot = {0};
    if (weights_are_staged(r)) {
        copy = push_table(r, table, group, group == GROUP_HEAD ? "the head's adapters" : "the embedding's adapters");
        group_ask(r, &slot, table, r->adapters, group, copy);
        group_await(r, &slot, table, group, copy);
    }
    if (r->lora->outer[group == GROUP_HEAD ? LM_HEAD : EMBEDDING].rank)
        w->adapters = copy;
    else if (group == GROUP_HEAD)
        w->matrix = copy;
    else
        w->weights = copy;
}

// Returns the weights of the embedding or the head, loaded, gathered and decoded on the arena until weights_release.
// rows: rows of the following products; with few rows, matrices in 4 bits are not decoded
static GroupWeights acquire_table(Residency *r, size_t group, size_t rows) {
    const Model *model = r->model, *table = stored_table(r);
    const size_t size = dtype_size(model->dtype);
    const int tied = group == GROUP_HEAD && head_is_tied(model), staged = weights_are_staged(r);
    char *stored = (char *)at(r->weights, group_begin(table, group), dtype_size(table->dtype));
    GroupWeights w = {0};
    PageSlot slot = {0};
    r->weights_mark = arena_mark(r->arena);
    if (staged) stored = push_table(r, table, group, group == GROUP_HEAD ? "the head's weights" : "the embedding");
    if (staged) group_ask(r, &slot, table, r->weights, group, stored);
    if (tied && staged) {
        w.matrix = push_table(r, table, GROUP_EMBEDDING, "the embedding");
        group_ask(r, &slot, table, r->weights, GROUP_EMBEDDING, w.matrix);
    }
    if (staged) group_await(r, &slot, table, group, stored);
    if (tied && staged) group_await(r, &slot, table, GROUP_EMBEDDING, w.matrix);
    table_decode(r, group, rows, stored, &w);
    if (tied && !staged) w.matrix = r->weights; // the model's first tensor
    if (group == GROUP_HEAD && !tied && !w.stored)
        w.matrix = (char *)at(w.weights, model_head_offset(model) - group_begin(model, group), size);
    w.base = w.weights;
    if (has_adapters(r) && group_is_trained(r, group)) acquire_outer(r, group, &w);
    return w;
}

// Runs a deferred step of the optimizer for the groups up to `group`, before its weights are used.
static void weights_step(Residency *r, size_t group) {
    if (r->hook.context) r->hook.group(r, group);
}

// Acquires a group's weights for forward products of `rows` rows.
static GroupWeights weights_acquire_for(Residency *r, size_t group, size_t rows) {
    const Model *table = stored_table(r);
    GroupWeights w = {0};
    weights_step(r, group);
    if (!is_layer(group)) return acquire_table(r, group, rows);
    if (weights_are_staged(r)) return acquire_layer(r, group, rows);
    layer_decode(r, group, rows, (char *)at(r->weights, group_begin(table, group), dtype_size(table->dtype)), &w);
    w.offset = layer_offsets(r->model, group);
    if (has_adapters(r))
        w.adapters = (char *)at(r->adapters, group_begin(&r->lora->table, group), dtype_size(r->model->dtype));
    return w;
}

static GroupWeights weights_acquire(Residency *r, size_t group) { return weights_acquire_for(r, group, SIZE_MAX); }

// Starts loading the walk's next layer. Call it after all loads that `layer` itself waits for. In the dry run each
// visit loads its own layer, as the next visit may be of any layer.
static void weights_prefetch(Residency *r, size_t layer) {
    const size_t next = r->walk.step > 0 ? layer + 1 : layer_before(r, layer);
    if (!weights_are_staged(r) || !walk_is_in_order(&r->walk) || next >= r->model->config.num_hidden_layers) return;
    weights_step(r, next);
    layer_ask(r, next);
}

// Parts of the progress bar for a layer's recomputation and backward; its forward is one part
#define LAYER_BACKWARD_PARTS 3

static void weights_release(Residency *r, size_t group) {
    if (is_layer(group) && !r->walk.dry) progress_part(r->walk.step > 0 ? 1 : LAYER_BACKWARD_PARTS);
    stop_poll(0);
    if (!is_layer(group)) arena_pop(r->arena, r->weights_mark);
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// Tells whether dW is summed in the stored gradient itself.
static int sums_in_place(const Residency *r) {
    return r->gradient_type == dtype_of_sums(r->model->dtype) && gradients_sharding(r).ranks == 1;
}

static Summed *sums_at(void *base, size_t element, const Residency *r) {
    return (Summed *)at(base, element, dtype_size(dtype_of_sums(r->model->dtype)));
}

// Sets a step's gradient to 0. Call it before the first micro-batch; with --update forward, after the deferred step.
static void grads_zero(Residency *r) {
    const Model *table = trained_table(r);
    if (r->hook.context) return;
    if (!r->walk.dry) r->first = 1;
    if (!is_off_device(r, PLACED_GRADIENTS))
        r->ops->zero(r->gradients, sharding_elements(table, gradients_sharding(r)) * dtype_size(r->gradient_type));
}

static Summed *push_sums(Residency *r, const char *name, size_t count) {
    const size_t size = dtype_size(dtype_of_sums(r->model->dtype));
    Summed *sums = (Summed *)arena_push(r->arena, SHARE_GRADIENTS, name, count, size);
    r->ops->zero(sums, count * size);
    return sums;
}

// ---- the stored gradient of a group ---------------------------------------------------------------------------------
// Tells whether this rank works on all of a group's gradient: with sums in place, and in stage 0, where all ranks get
// it. Else it works on its shard.
static int group_is_whole(const Residency *r) { return sums_in_place(r) || r->world.zero < ZERO_OPTIMIZER; }

static char *push_stored_gradient(Residency *r, const char *name, size_t group) {
    const Model *table = trained_table(r);
    const Sharding s = group_is_whole(r) ? sharding_whole() : own_sharding(r);
    const int of_layer = group < table->config.num_hidden_layers;
    return (char *)arena_push(r->arena, SHARE_GRADIENTS, name,
                              of_layer ? sharding_room_of_layer(table, s) : sharding_room(table, s, group),
                              dtype_size(r->gradient_type));
}

// Starts loading a group's stored gradient. A step's first micro-batch sets it to 0, except for an embedding whose
// gradient a tied head has added to.
static void stored_ask(Residency *r, StoredGradient *g, size_t group) {
    const Model *table = trained_table(r);
    const Sharding s = gradients_sharding(r), shards = group_is_whole(r) ? sharding_whole() : own_sharding(r);
    const Range range = sharded_range(table, shards, group);
    const size_t size = dtype_size(r->gradient_type);
    if (!page_ask(r->ops, &g->page, group)) return;
    g->count = range.count;
    g->begin = sharding_begin(table, s, group) + (s.ranks > 1 ? 0 : range.begin);
    void *home = at(r->gradients, g->begin, size);
    if (!is_off_device(r, PLACED_GRADIENTS))
        g->memory = (char *)home;
    else if (r->holds && sums_in_place(r)) // was loaded with all groups' gradients
        g->memory = (char *)sums_at(r->held, g->begin, r);
    else if (r->first && !(group == GROUP_EMBEDDING && r->head_is_stored))
        r->ops->zero(g->memory, g->count * size);
    else
        page_load(layer_pager(r, PLACED_GRADIENTS), &g->page, g->memory, home, g->count * size);
}

// Returns how many partial sums of squares each parameter has: as many as the largest parameter needs.
static size_t parameter_parts(const Model *table) {
    size_t most = 1;
    for (size_t i = 0; i < table->parameter_count; i++)
        most = max_size(most, squares_parts(parameter_elements(&table->parameters[i])));
    return most;
}

// Sums the squares of this rank's shard of a parameter's gradient. parts: of each parameter. memory: the stored
// gradient from element `begin` on
static void parameter_squares(const Residency *r, size_t parameter, size_t parts, const char *memory, size_t begin,
                              double *squares) {
    const Model *table = trained_table(r);
    const Parameter *p = &table->parameters[parameter];
    const ParameterShard own = parameter_shard(table, own_sharding(r), p);
    const size_t element = element_offset(table, gradients_sharding(r), p->offset + own.first) - begin;
    squares += parameter * parts;
    if (own.count)
        r->ops->sum_of_squares(squares, parts, memory + element * dtype_size(r->gradient_type), r->gradient_type,
                               own.count);
    else
        r->ops->zero(squares, parts * sizeof(*squares));
}

static double *push_squares(const Residency *r) {
    return (double *)arena_push(r->arena, SHARE_WORKSPACE, "squares of the gradient",
                                trained_table(r)->parameter_count * parameter_parts(trained_table(r)), sizeof(double));
}

// Returns the sum of squares of each parameter's gradient. Off-device: backward has computed the sums; else this
// function pushes and computes them.
static const double *gradient_squares(const Residency *r) {
    double *squares = r->squares ? r->squares : push_squares(r);
    const size_t parts = parameter_parts(trained_table(r));
    for (size_t i = 0; i < trained_table(r)->parameter_count && !r->squares; i++)
        parameter_squares(r, i, parts, r->gradients, 0, squares);
    return squares;
}

// Ends a micro-batch's work on a group's stored gradient. Off-device: awaits its collective and starts storing it.
static void stored_return(Residency *r, StoredGradient *g) {
    const Model *table = trained_table(r);
    const size_t size = dtype_size(r->gradient_type);
    const size_t parts = r->last && !r->walk.dry ? parameter_parts(table) : 0;
    g->page.asked = 0;
    if (!is_off_device(r, PLACED_GRADIENTS)) {
        if (g->page.collective) r->last_ticket = g->page.collective;
        return;
    }
    r->ops->await(g->page.collective);
    for (size_t i = 0; i < table->parameter_count && parts; i++)
        if (group_of(table, table->parameters[i].offset) == g->page.page)
            parameter_squares(r, i, parts, g->memory, g->begin, r->squares);
    page_store(layer_pager(r, PLACED_GRADIENTS), &g->page, at(r->gradients, g->begin, size), g->memory,
               g->count * size);
}

// All-gathers a group's gradient after the step's reduction, in stage 0.
static void gather_gradient(Residency *r, StoredGradient *g) {
    if (!r->last || r->world.zero >= ZERO_OPTIMIZER || alone(r)) return;
    g->page.collective = ranks_gather(r, TRAFFIC_GRADIENTS, RANKS_ALL, g->memory, g->count, SHARD_ALIGNMENT,
                                      dtype_size(r->gradient_type));
}

// Starts reducing a group's sums over all ranks. Sums in place are reduced at the step's last micro-batch alone.
static int64_t reduce_sums(Residency *r, size_t group, Summed *sums) {
    if (sums_in_place(r) && !r->last) return 0;
    return ranks_sum(r, TRAFFIC_GRADIENTS, RANKS_ALL, sums, group_elements(trained_table(r), group), SHARD_ALIGNMENT);
}

// Adds this rank's shard of the reduced sums to the stored gradient.
static void add_sums(Residency *r, StoredGradient *g, Summed *sums) {
    const Range own = own_range(r, trained_table(r), g->page.page);
    page_await(r->ops, &g->page);
    if (own.count)
        r->ops->gradient_add(at(g->memory, group_is_whole(r) ? own.begin : 0, dtype_size(r->gradient_type)),
                             r->gradient_type, sums_at(sums, own.begin, r), own.count);
}

// ---- sums of a group ------------------------------------------------------------------------------------------------
typedef struct {
    Summed *layer;            // dW of a layer's tensors, in their order; with LoRA dW of the group's adapters
    Summed *norm, *head;      // the head: dW of the final norm (weight, bias), dW of the matrix
    void *tables;             // the embedding group: dW of its tables, to which its op adds
    DType tables_type;        // type of `tables`
    StoredGradient stored[2]; // of the head or the embedding; of the embedding that the head is tied to
    const size_t *offset;     // offsets of a layer's tensors (layer_offsets); else NULL
} GroupSums;

static GradientBuffer *gradient_buffer(Residency *r, size_t layer) { return &r->summed[layer % r->buffers]; }

static Summed *layer_sums(Residency *r, size_t layer) {
    GradientBuffer *b = gradient_buffer(r, layer);
    if (sums_in_place(r) || alone(r)) stored_ask(r, &b->stored, layer);
    if (!sums_in_place(r)) {
        r->ops->zero(b->sums, group_elements(trained_table(r), layer) * dtype_size(dtype_of_sums(r->model->dtype)));
        return b->sums;
    }
    page_await(r->ops, &b->stored.page);
    if (r->accumulates && r->buffers > 1 && layer && walk_is_in_order(&r->walk))
        stored_ask(r, &gradient_buffer(r, layer - 1)->stored, layer - 1);
    return (Summed *)(void *)b->stored.memory;
}

static void finish_layer(Residency *r, GradientBuffer *b) {
    if (!b->busy) return;
    b->busy = 0;
    if (!sums_in_place(r)) {
        r->ops->await(b->stored.page.collective);
        add_sums(r, &b->stored, b->sums);
        b->stored.page.collective = 0;
    }
    gather_gradient(r, &b->stored);
    stored_return(r, &b->stored);
}

// Starts the reduction of the layer's sums, which runs while the next layer is computed.
static void release_layer(Residency *r, size_t layer, Summed *sums) {
    const int at_once =
        alone(r) || !walk_is_in_order(&r->walk) || (sums_in_place(r) && !is_off_device(r, PLACED_GRADIENTS));
    GradientBuffer *b = gradient_buffer(r, layer);
    b->busy = 1;
    b->stored.page.collective = reduce_sums(r, layer, sums);
    stored_ask(r, &b->stored, layer);
    finish_layer(r, at_once ? b : gradient_buffer(r, layer + 1));
}

// Loads the stored gradient of the head or the embedding, until the group is released.
static char *stored_open(Residency *r, StoredGradient *g, size_t group) {
    if (is_off_device(r, PLACED_GRADIENTS))
        g->memory =
            push_stored_gradient(r, group == GROUP_HEAD ? "the head's gradient" : "the embedding's gradient", group);
    stored_ask(r, g, group);
    page_await(r->ops, &g->page);
    return g->memory;
}

static void head_sums(Residency *r, GroupSums *sums) {
    const size_t norm = r->lora ? 0 : head_norm_elements(r->model);
    const size_t matrix = r->lora ? group_elements(trained_table(r), GROUP_HEAD) : model_head_elements(r->model);
    const int tied = head_is_tied(r->model) && !r->lora;
    if (sums_in_place(r))
        sums->norm = (Summed *)(void *)stored_open(r, &sums->stored[0], GROUP_HEAD);
    else
        sums->norm = push_sums(r, "sums of the head's gradient", norm + (r->embedding_sums ? 0 : matrix));
    if (r->embedding_sums)
        sums->head = r->embedding_sums;
    else if (tied && sums_in_place(r))
        sums->head = (Summed *)(void *)stored_open(r, &sums->stored[1], GROUP_EMBEDDING);
    else
        sums->head = sums_at(sums->norm, norm, r);
    if (!r->lora) return;
    sums->layer = sums->head, sums->norm = NULL; // the norm is frozen
    if (!r->lora->saves[LM_HEAD]) sums->head = NULL;
}

// Tells whether the embedding's op adds to the stored gradient directly. An adapter's gradient is summed first.
static int embedding_is_direct(const Residency *r) {
    return alone(r) && !r->holds && (!r->lora || r->lora->saves[EMBEDDING]);
}

static void embedding_sums(Residency *r, GroupSums *sums) {
    const int stored = embedding_is_direct(r) || sums_in_place(r);
    sums->tables_type = stored ? r->gradient_type : dtype_of_sums(r->model->dtype);
    if (stored)
        sums->tables = stored_open(r, &sums->stored[0], GROUP_EMBEDDING);
    else if (r->embedding_sums)
        sums->tables = r->embedding_sums;
    else
        sums->tables =
            push_sums(r, "sums of the embedding's gradient", group_elements(trained_table(r), GROUP_EMBEDDING));
    if (!r->lora || r->lora->saves[EMBEDDING]) return;
    sums->layer = (Summed *)sums->tables, sums->tables = NULL;
}

static GroupSums grads_acquire(Residency *r, size_t group) {
    GroupSums sums = {0};
    r->sums_mark = arena_mark(r->arena);
    if (is_layer(group))
        sums.layer = layer_sums(r, group), sums.offset = layer_offsets(r->model, group);
    else if (group_is_trained(r, group) && group == GROUP_HEAD)
        head_sums(r, &sums);
    else if (group_is_trained(r, group))
        embedding_sums(r, &sums);
    return sums;
}

static void release_table(Residency *r, size_t group, GroupSums *sums) {
    const int head = group == GROUP_HEAD, tied = head && head_is_tied(r->model) && !r->embedding_sums && !r->lora;
    Summed *all = sums->layer ? sums->layer : head ? sums->norm : (Summed *)sums->tables;
    StoredGradient *g = sums->stored;
    g[0].page.collective = reduce_sums(r, group, all);
    if (!sums_in_place(r) && (head || !embedding_is_direct(r))) {
        r->ops->await(g[0].page.collective), g[0].page.collective = 0;
        stored_open(r, &g[0], group);
        add_sums(r, &g[0], all);
        if (tied) {
            stored_open(r, &g[1], GROUP_EMBEDDING);
            r->ops->gradient_add(g[1].memory, r->gradient_type, sums->head, model_head_elements(r->model));
        }
    }
    gather_gradient(r, &g[0]);
    stored_return(r, &g[0]);
    if (tied) stored_return(r, &g[1]);
    r->head_is_stored = tied;
    for (size_t i = 0; i < 2; i++) page_finish(r->ops, &g[i].page);
}

static void grads_release(Residency *r, size_t group, GroupSums sums) {
    if (is_layer(group))
        release_layer(r, group, sums.layer);
    else if (group_is_trained(r, group))
        release_table(r, group, &sums);
    arena_pop(r->arena, r->sums_mark);
}

// Begins the forward and backward pass of a micro-batch; grads_end ends it. With several processes a tied matrix has
// one sum, from the head to the embedding, so that it is reduced once. last: the micro-batch is the step's last
static void grads_begin(Residency *r, int last) {
    r->last = last;
    const int wanted = !alone(r) && !r->lora && !r->holds && !sums_in_place(r) && head_is_tied(r->model);
    r->embedding_sums =
        wanted ? push_sums(r, "sums of the tied embedding's gradient", group_elements(r->model, GROUP_EMBEDDING))
               : NULL;
    r->last_ticket = 0;
}

static void grads_end(Residency *r) {
    if (r->last_ticket) r->ops->await(r->last_ticket);
    r->first = 0;
}

// ---- a walk over layers ---------------------------------------------------------------------------------------------
static void push_layer(Residency *r, LayerBuffer *b, int first) {
    const Model *table = stored_table(r);
    b->page.asked = 0;
    b->weights = push_table(r, table, largest_layer(table), first ? "one layer's weights" : "the next layer's weights");
    if (r->lora)
        b->adapters = push_table(r, &r->lora->table, largest_layer(&r->lora->table),
                                 first ? "one layer's adapters" : "the next layer's adapters");
}

// Pushes the gradient buffers that layers use in turn: one layer is computed while another's sums are reduced over
// ranks and a third's gradient is stored. Sums in place over several micro-batches also load the next layer's gradient.
static void push_gradients(Residency *r) {
    const size_t L = r->model->config.num_hidden_layers;
    const int in_place = sums_in_place(r), off_device = is_off_device(r, PLACED_GRADIENTS), ranks = !alone(r);
    const size_t wanted = in_place ? 2 + (size_t)ranks + (size_t)(r->accumulates != 0) : 2;
    r->buffers = off_device || (ranks && !in_place) ? min_size(wanted, L) : 1;
    memset(r->summed, 0, sizeof(r->summed));
    for (size_t i = 0; i < r->buffers; i++) {
        GradientBuffer *b = &r->summed[i];
        b->sums = r->summed[0].sums;
        if (!in_place && (i == 0 || ranks))
            b->sums =
                (Summed *)arena_push(r->arena, SHARE_GRADIENTS,
                                     i ? "sums of the layer before, on their way" : "sums of one layer's gradient",
                                     group_elements(trained_table(r), largest_layer(trained_table(r))),
                                     dtype_size(dtype_of_sums(r->model->dtype)));
        if (off_device)
            b->stored.memory =
                push_stored_gradient(r, i ? "the gradient of a layer, on its way" : "one layer's gradient", 0);
    }
}

// Begins a walk over the layers: pushes buffers of weights, which layers use in turn. step 1: first to last; -1: last
// to first, with buffers of gradients
static void layers_begin(Residency *r, int step) {
    const size_t two = min_size(2, r->model->config.num_hidden_layers);
    r->walk.step = step, r->moved.phase = step > 0 ? PHASE_FORWARD : PHASE_BACKWARD;
    r->layers_mark = arena_mark(r->arena);
    for (size_t i = 0; i < two && weights_are_staged(r); i++) push_layer(r, &r->gathered[i], i == 0);
    if (r->storage) r->decoded = push_table(r, r->model, largest_layer(r->model), "one layer's decoded weights");
    if (step < 0 && !r->holds) push_gradients(r);
}

static void layers_end(Residency *r) {
    r->walk.layers = 1;
    const size_t buffers = r->walk.step < 0 && !r->holds ? r->buffers : 0;
    for (size_t i = 0; i < buffers; i++) finish_layer(r, &r->summed[i]);
    for (size_t i = 0; i < buffers; i++) page_finish(r->ops, &r->summed[i].stored.page);
    walk_count(&r->walk, r->ops, 1);
    arena_pop(r->arena, r->layers_mark);
}

#endif
