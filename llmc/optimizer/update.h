/*
The optimizer's step, for weights, gradients and AdamW's state in any place. The arithmetic is in ops->adamw. This file
decides which parameters decay (matrices do; norms and biases do not), and the random bits of each parameter.

If all tensors are on the device, the op runs over each parameter. Otherwise the elements that this rank steps pass
through the device in slices: ranges of the table, so that a norm moves together with the neighbouring matrices. Three
slots take turns: while a slice is stepped, the next slice is loaded and the previous slice stored. Only tensors that
are read are loaded.

Tensors stored in bf16 are rounded stochastically. Their random bits are a function of (seed, step, parameter, element)
only. So a resumed run repeats them, and a step depends neither on sharding nor on places.
*/
#ifndef LLMC_UPDATE_H
#define LLMC_UPDATE_H
#include "llmc/base/random.h"
#include "llmc/files/slabs.h"
#include "llmc/ranks/dist.h"
#include "llmc/stream/residency.h"
#include "moments.h"

#define RANDOM_STREAM_ADAMW 0x6164616d77ull // stream of random.h ("adamw")
#ifndef UPDATE_SLICE
#define UPDATE_SLICE ((size_t)8 << 20) // most elements of a slice
#endif
enum { UPDATE_SLOTS = 3 };

// AdamW's state: of all parameters, or of this rank's shards
typedef struct {
    void *m, *v; // elements of moment_type
    DType moment_type;
    float *master;              // fp32 weights, or NULL
    float *m_scales, *v_scales; // scales of moments in 8 bits (moments.h), or NULL
} OptimizerState;

typedef enum {
    UPDATE_WEIGHTS,
    UPDATE_GRADIENT,
    UPDATE_M,
    UPDATE_V,
    UPDATE_MASTER,
    UPDATE_M_SCALES,
    UPDATE_V_SCALES,
    UPDATE_TENSORS
} UpdateTensor;

typedef struct {
    char *memory; // the tensor's memory in its place; NULL: the tensor is absent
    size_t size;  // bytes of an element
    Place place;
    Sharding sharding;
    int loaded, stored;
    char *slots;  // device memory for UPDATE_SLOTS slices; NULL: the tensor itself is on the device
    size_t slice; // elements of a slot
    int floats;   // 1: the tensor holds the fp32 scales of 8-bit moments (moments.h), not one element for each
                  // parameter element
} UpdateMemory;

// Elements [first, first + count) of the table; the dry run counts them `repeat` times
typedef struct {
    size_t first, count, slot;
    double repeat;
} UpdateSlice;

typedef struct {
    Residency *r;
    const OptimizerState *state;
    AdamW step;
    int begins; // 1: initialises the state in place of a step
    UpdateMemory tensor[UPDATE_TENSORS];
    PageSlot slot[UPDATE_SLOTS];
    size_t slice;  // most elements of the table in a slot; 0: the step has not begun
    size_t each;   // slices per visit of a chunk
    size_t groups; // number of the table's groups to step
    Slabs walk;
    UpdateSlice next; // slice in flight; count 0 after the last slice
    size_t parameter; // the table's parameter that the walk has reached
} Update;

// ---- a slice --------------------------------------------------------------------------------------------------------
// Returns the address of an element of the table in the tensor's place.
static void *update_home(const Update *u, const UpdateMemory *t, size_t element) {
    const Model *table = trained_table(u->r);
    return at(t->memory,
              t->floats ? moment_float_offset(table, t->sharding, element)
                        : element_offset(table, t->sharding, element),
              t->size);
}

// Returns how many of a tensor's elements belong to elements [first, first + count) of the table, within a group.
static size_t update_span(const Update *u, const UpdateMemory *t, size_t first, size_t count) {
    const Model *table = trained_table(u->r);
    const size_t group = group_of(table, first);
    const Range elements = {first - group_begin(table, group), count};
    return t->floats ? moment_floats(table, group, elements).count : count;
}

// Returns the address of an element on the device while its slice is there; NULL if the tensor is absent.
static void *update_at(const Update *u, UpdateTensor tensor, UpdateSlice s, size_t element) {
    const UpdateMemory *t = &u->tensor[tensor];
    if (!t->memory) return NULL;
    return t->slots ? at(t->slots, s.slot * t->slice + update_span(u, t, s.first, element - s.first), t->size)
                    : update_home(u, t, element);
}

static void update_move(Update *u, UpdateSlice s, int in) {
    Residency *r = u->r;
    const Phase phase = r->moved.phase;
    r->moved.phase = PHASE_UPDATE;
    for (int i = 0; i < UPDATE_TENSORS; i++) {
        const UpdateMemory *t = &u->tensor[i];
        if (!t->slots || !(in ? t->loaded : t->stored)) continue;
        const Pager pager = {r->ops, &r->moved, t->place, s.repeat};
        page_move(pager, &u->slot[s.slot], in, update_at(u, (UpdateTensor)i, s, s.first), update_home(u, t, s.first),
                  update_span(u, t, s.first, s.count) * t->size);
    }
    r->moved.phase = phase;
}

// Tells whether layers a and b have the same elements in the table.
static int update_alike(const Model *table, size_t a, size_t b) {
    return layer_form(&table->config, a) == layer_form(&table->config, b) &&
           elements_of_layer(table, a) == elements_of_layer(table, b);
}

// Returns how many groups a visit of group i counts for: 1 in a run. In the dry run the first of equal layers counts
// for all of them, the other layers for 0.
static size_t update_repeat(const Update *u, size_t i) {
    const Model *table = trained_table(u->r);
    size_t alike = 0;
    if (!u->r->walk.dry || i == 0 || i > table->config.num_hidden_layers) return 1;
    for (size_t l = 0; l < table->config.num_hidden_layers; l++) {
        if (!update_alike(table, i - 1, l)) continue;
        if (l < i - 1) return 0;
        alike++;
    }
    return alike;
}

// Starts loading the next slice, into the slot that was stored longest ago.
static void update_ask(Update *u) {
    while (!u->walk.left && !update_repeat(u, u->walk.next)) u->walk.next++;
    u->next.slot = (u->next.slot + 1) % UPDATE_SLOTS;
    u->next.count = slabs_next(&u->walk) ? u->walk.count : 0, u->next.first = u->walk.first;
    if (!u->next.count) return;
    u->next.repeat = (double)update_repeat(u, u->walk.next - 1);
    page_finish(u->r->ops, &u->slot[u->next.slot]);
    update_move(u, u->next, 1);
}

// Initialises a slice of the state: m = v = 0, master = weights.
static void update_initialise(const Update *u, UpdateSlice s) {
    const Ops *ops = u->r->ops;
    static const UpdateTensor zeros[] = {UPDATE_M, UPDATE_V, UPDATE_M_SCALES, UPDATE_V_SCALES};
    for (size_t i = 0; i < 4; i++) {
        const UpdateMemory *t = &u->tensor[zeros[i]];
        if (t->memory) ops->zero(update_at(u, zeros[i], s, s.first), update_span(u, t, s.first, s.count) * t->size);
    }
    if (u->state->master)
        ops->widen((float *)update_at(u, UPDATE_MASTER, s, s.first),
                   (const Stored *)update_at(u, UPDATE_WEIGHTS, s, s.first), s.count);
}

static void update_compute(Update *u, UpdateSlice s) {
    const Model *table = trained_table(u->r);
    const Parameter *p = table->parameters;
    for (size_t first = s.first, n; first < s.first + s.count; first += n) {
        while (p[u->parameter].offset + parameter_elements(&p[u->parameter]) <= first) u->parameter++;
        const size_t i = u->parameter;
        AdamW step = u->step;
        n = min_size(p[i].offset + parameter_elements(&p[i]), s.first + s.count) - first;
        if (!parameter_decays(&p[i])) step.weight_decay = 0;
        step.seed = random_bits(u->step.seed, RANDOM_STREAM_ADAMW + i, (uint64_t)u->step.step);
        step.first = first - p[i].offset;
        void *of[UPDATE_TENSORS];
        for (int t = 0; t < UPDATE_TENSORS; t++) of[t] = update_at(u, (UpdateTensor)t, s, first);
        DType moments = u->state->moment_type;
        if (moments == DTYPE_INT8 && moment_is_small(&p[i]))
            moments = DTYPE_FP32, of[UPDATE_M] = of[UPDATE_M_SCALES], of[UPDATE_V] = of[UPDATE_V_SCALES];
        step.block_first = (first - group_begin(table, group_of(table, first))) % MOMENT_BLOCK;
        step.m_scales = (float *)of[UPDATE_M_SCALES], step.v_scales = (float *)of[UPDATE_V_SCALES];
        u->r->ops->adamw((Stored *)of[UPDATE_WEIGHTS], (float *)of[UPDATE_MASTER], of[UPDATE_GRADIENT],
                         u->r->gradient_type, of[UPDATE_M], of[UPDATE_V], moments, n, &step);
    }
}

// ---- all slices -----------------------------------------------------------------------------------------------------
static const struct {
    const char *slots;
    Share share;
    Placed placed;
    size_t stage;
} update_tensors[UPDATE_TENSORS] = {
    {"slices of weights", SHARE_WEIGHTS, PLACED_WEIGHTS, ZERO_WEIGHTS},
    {"slices of gradients", SHARE_GRADIENTS, PLACED_GRADIENTS, ZERO_GRADIENTS},
    {"slices of first moments", SHARE_OPTIMIZER, PLACED_OPTIMIZER, ZERO_OPTIMIZER},
    {"slices of second moments", SHARE_OPTIMIZER, PLACED_OPTIMIZER, ZERO_OPTIMIZER},
    {"slices of master weights", SHARE_OPTIMIZER, PLACED_OPTIMIZER, ZERO_OPTIMIZER},
    {"slices of scales of m", SHARE_OPTIMIZER, PLACED_OPTIMIZER, ZERO_OPTIMIZER},
    {"slices of scales of v", SHARE_OPTIMIZER, PLACED_OPTIMIZER, ZERO_OPTIMIZER},
};

// Pushes the slots and starts loading the first slice. visits: number of calls of PassHook.chunk; SIZE_MAX: none
static void update_begin(Update *u, size_t visits) {
    const Model *table = trained_table(u->r);
    const Sharding own = sharding_of(u->r->world, ZERO_OPTIMIZER);
    const size_t all = sharding_elements(table, own), visit = all / visits + 1;
    const size_t largest =
        max_size(sharding_room_of_layer(table, own),
                 max_size(sharding_room(table, own, GROUP_EMBEDDING), sharding_room(table, own, GROUP_HEAD)));
    u->slice = SIZE_MAX;
    for (int i = 0; i < UPDATE_TENSORS; i++) {
        UpdateMemory *t = &u->tensor[i];
        if (!t->memory || t->place <= PLACE_DEVICE) continue;
        u->slice = min_size(min_size(max_size(UPDATE_SLICE, visit), 4 * UPDATE_SLICE), largest);
        if (u->state->moment_type == DTYPE_INT8) // a slice ends at the end of a block
            u->slice = (u->slice + MOMENT_BLOCK - 1) / MOMENT_BLOCK * MOMENT_BLOCK;
        t->slice = t->floats ? 0 : u->slice;
        for (size_t k = 0; t->floats && k < group_count(table); k++)
            t->slice = max_size(t->slice, moment_floats_most(table, group_at(table, k), u->slice));
        t->slots = (char *)arena_push(u->r->arena, update_tensors[i].share, update_tensors[i].slots,
                                      UPDATE_SLOTS * t->slice, t->size);
    }
    u->each = (visit - 1) / u->slice + 1;
    u->walk = slabs_of(table, SLABS_OF_GROUPS, own, own, NULL), u->walk.most = u->slice;
    update_ask(u);
}

static void update_set(Update *u, Residency *r, const OptimizerState *state, const AdamW *step) {
    const Model *table = trained_table(r);
    const int steps = step != NULL, master = state->master != NULL;
    const DType moments = state->moment_type;
    void *const memory[UPDATE_TENSORS] = {trained_weights(r), r->gradients,    state->m,       state->v,
                                          state->master,      state->m_scales, state->v_scales};
    const DType type[UPDATE_TENSORS] = {table->dtype, r->gradient_type, moments,   moments,
                                        DTYPE_FP32,   DTYPE_FP32,       DTYPE_FP32};
    memset(u, 0, sizeof(*u));
    u->r = r, u->state = state, u->begins = !steps;
    if (steps) u->step = *step;
    for (int i = 0; i < UPDATE_TENSORS; i++) {
        UpdateMemory *t = &u->tensor[i];
        // weights are read for a step without master, and to initialise the master
        t->loaded = i == UPDATE_WEIGHTS ? steps != master : steps;
        t->stored = i == UPDATE_WEIGHTS ? steps : i != UPDATE_GRADIENT;
        t->memory = t->loaded || t->stored ? (char *)memory[i] : NULL;
        t->size = dtype_size(type[i]), t->place = r->place[update_tensors[i].placed];
        t->sharding = sharding_of(r->world, update_tensors[i].stage);
        t->floats = i == UPDATE_M_SCALES || i == UPDATE_V_SCALES;
    }
}

// Steps the next slice, if there is one.
static void update_slice(Update *u) {
    const UpdateSlice s = u->next;
    if (!s.count) return;
    update_ask(u);
    page_await(u->r->ops, &u->slot[s.slot]);
    if (u->begins)
        update_initialise(u, s);
    else
        update_compute(u, s);
    update_move(u, s, 0);
}

// Steps all elements before `end`. Afterwards their stored weights can be loaded, and at the table's end all tensors.
static void update_until(Update *u, size_t end) {
    if (!u->slice) die("internal: weights are used before a step that waits for a pass; please report it");
    while (u->next.count && u->next.first < end) update_slice(u);
    for (size_t slot = 0; slot < UPDATE_SLOTS; slot++)
        if (u->tensor[UPDATE_WEIGHTS].slots || !u->next.count) page_finish(u->r->ops, &u->slot[slot]);
}

// All-gathers a group in place after each rank has updated its shard.
static void group_updated(Residency *r, const Model *table, Place place, char *weights, size_t group) {
    const size_t size = dtype_size(table->dtype), count = group_elements(table, group), mark = arena_mark(r->arena);
    const Range own = own_range(r, table, group);
    const Phase phase = r->moved.phase;
    const Pager pager = {r->ops, &r->moved, place, 1};
    PageSlot slot = {0};
    char *here = (char *)at(weights, group_begin(table, group), size), *there = here;
    r->moved.phase = PHASE_UPDATE;
    if (place > PLACE_DEVICE) {
        here = (char *)arena_push(r->arena, SHARE_WEIGHTS, "updated weights", count, size);
        page_load(pager, &slot, at(here, own.begin, size), at(there, own.begin, size), own.count * size);
        page_await(r->ops, &slot);
    }
    r->ops->await(ranks_gather(r, TRAFFIC_WEIGHTS, RANKS_ALL, here, count, SHARD_ALIGNMENT, size));
    if (place > PLACE_DEVICE) page_store(pager, &slot, there, here, count * size);
    page_finish(r->ops, &slot);
    r->moved.phase = phase;
    arena_pop(r->arena, mark);
}

// Tells whether weights are gathered after the optimizer's step: in stages 1 and 2.
static int weights_gather(const Residency *r) {
    return !alone(r) && r->world.zero >= ZERO_OPTIMIZER && r->world.zero < ZERO_WEIGHTS;
}

static void weights_updated(Residency *r) {
    const Model *table = trained_table(r);
    const size_t L = table->config.num_hidden_layers;
    if (!weights_gather(r)) return;
    for (size_t i = 0; i < L + 2; i++) {
        const size_t group = i < L ? i : i == L ? GROUP_EMBEDDING : GROUP_HEAD;
        if (group_elements(table, group)) group_updated(r, table, r->place[PLACED_WEIGHTS], trained_weights(r), group);
    }
}

// Steps this rank's shard of weights and optimizer state. step->weight_decay: for matrices alone. step NULL:
// initialises the state before the first step, after the weights are loaded. The caller then calls weights_updated.
static void optimizer_step(Residency *r, const OptimizerState *state, const AdamW *step) {
    const size_t mark = arena_mark(r->arena);
    Update u;
    update_set(&u, r, state, step);
    update_begin(&u, SIZE_MAX);
    update_until(&u, trained_table(r)->elements);
    arena_pop(r->arena, mark);
}

// ---- the whole gradient: norm and clipping --------------------------------------------------------------------------
// Returns the gradient's L2 norm. At every ZeRO stage each rank sums its shard in double, in the order of the table;
// the sums of ranks are added in the order of ranks. *bad: the first parameter with NaN or an infinity (or squares that
// overflow a double), or NULL; equal on all ranks
static double gradient_norm(const Residency *r, const Parameter **bad) {
    const Model *table = trained_table(r);
    const size_t ranks = world_ranks(r->world), mark = arena_mark(r->arena);
    size_t first_bad = table->parameter_count, whose;
    double sum = 0;
    const size_t parts = parameter_parts(table);
    r->ops->copy_out(r->host_squares, gradient_squares(r), table->parameter_count * parts * sizeof(double));
    arena_pop(r->arena, mark);
    for (size_t i = 0; i < table->parameter_count; i++) {
        const double squares = squares_total(r->host_squares + i * parts, parts);
        if (!isfinite(squares) && first_bad > i) first_bad = i;
        sum += squares;
    }
    if (ranks > 1) dist_sum(RANKS_ALL, &sum, 1);
    if (ranks > 1 && !isfinite(sum)) first_bad = dist_smallest(first_bad, &whose); // all ranks have the same sum
    *bad = first_bad < table->parameter_count ? &table->parameters[first_bad] : NULL;
    return sqrt(sum);
}

// Returns the scale that limits the gradient's norm to `limit` (0: no limit).
static double gradient_clip(double norm, double limit) { return limit > 0 && norm > limit ? limit / norm : 1; }

#endif
