/*
The mixer: the branch of a layer that joins its tokens, by attention, by linear attention, or by the sum of both. A
layer may lack a mixer. The loops of an order call these steps, for the layer and chunk c of a visit:

    mixer_keys         projects K[c], V[c] from the mixer's norm (a state passes on in mixer_forward)
    mixer_forward      computes y[c] from the mixer's norm
    mixer_begin        before the layer's backward: projects K, V of all tokens, or saves states; sets gradients to 0
    mixer_restore      before the backward of the i-th chunk: recomputes the states before it
    recompute          recomputes chunk c's activations up to the MLP
    mixer_backward     turns dx of y[c] into dx of x_l[c]
*/
#ifndef LLMC_MIXER_H
#define LLMC_MIXER_H
#include "attention.h"
#include "linear_attention.h"
#include "mlp.h"

// ---- the parts of a mixer -------------------------------------------------------------------------------------------
// The calls of a part. Chunks are joined by K, V (attention), or by a state (linear attention).
typedef struct {
    void (*push)(const Visit *v);              // the K, V or states of one layer that its chunks share
    void (*begin)(const Visit *v);             // before the layer's backward
    void (*restore)(const Visit *v, size_t i); // before the backward of the i-th chunk
    void (*go_back)(const Visit *v);           // to the start of chunk c: slides the window or resets the state
    void (*keys)(const Visit *v, const Activations *a); // K, V of chunk c
    void (*forward)(const Visit *v, size_t j, const Activations *a);
    void (*backward)(const Visit *v, size_t j, Activations *a, Stored *dx); // last to first; part 0 ends with dx of x_l
} MixerPart;

static void keys_restore(const Visit *v, size_t i) { (void)v, (void)i; } // K, V of all tokens are stored

static void attention_part_forward(const Visit *v, size_t j, const Activations *a) {
    (void)j; // attention is part 0
    attention_forward(v, a);
}

static void attention_part_backward(const Visit *v, size_t j, Activations *a, Stored *dx) {
    (void)j;
    attention_backward(v, a, dx); // dQ[c]; dK, dV of all chunks up to c
    kv_backward(v, a, dx);        // dK[c], dV[c] are complete now
}

static void borrower_backward(const Visit *v, size_t j, Activations *a, Stored *dx) {
    (void)j;
    attention_backward(v, a, dx); // dQ[c]; dK, dV of the lender's chunks up to c
    mixer_gradient_end(v, a, dx);
}

static void no_keys(const Visit *v, const Activations *a) { (void)v, (void)a; }

static void states_restore_alone(const Visit *v, size_t i) { states_restore(v, 0, i); }

static void state_go_back(const Visit *v) { state_copy(v->s, state_before(v->s, v->c), 0); }

static const MixerPart mixer_part[] = {
    {push_keys, keys_begin, keys_restore, window_project, kv_project, attention_part_forward, attention_part_backward},
    {push_keys, lent_keys_begin, keys_restore, window_project, kv_project, attention_part_forward,
     attention_part_backward},
    {push_keys, lent_keys_begin, keys_restore, window_project, no_keys, attention_part_forward, borrower_backward},
    {push_layer_states, states_begin, states_restore_alone, state_go_back, no_keys, linear_attention_forward,
     linear_attention_backward}};

// Returns the number of the mixer's parts: 0 in a layer without a mixer.
static size_t mixer_parts(const Visit *v) { return v->layer->branch[0].parts; }

static const MixerPart *mixer_part_of(const Visit *v, size_t j) {
    return &mixer_part[v->layer->branch[0].part[j].kind];
}

// ---- steps ----------------------------------------------------------------------------------------------------------
// Pushes the K, V or states that a layer's chunks share, unless they are kept, in a pass that walks layer by layer.
// Returns the arena's mark before them.
static size_t push_layer_memory(const Visit *v) {
    const size_t mark = arena_mark(v->s->arena);
    for (size_t j = mixer_parts(v); j-- > 0;) mixer_part_of(v, j)->push(v);
    return mark;
}

// Pops this memory, in forward once the layer's keys are stored off-device.
static void pop_layer_memory(const Visit *v, size_t mark) {
    const StreamBP *s = v->s;
    const int stores = s->now.pass == PASS_FORWARD && keeps_off_device(v) && keeps(v, LEVEL_PRODUCTS);
    for (size_t i = 0; i < 2 && stores; i++) page_finish(s->ops, &s->kept.slot[i]);
    arena_pop(s->arena, mark);
}

// Begins a walk over the layers: step 1 goes first to last, -1 last to first. Returns the arena's mark before the walk.
static size_t walk_begin(StreamBP *s, int step) {
    const size_t mark = arena_mark(s->arena);
    walk_count(&s->memory.walk, s->ops, 1);
    kept_begin(s);
    layers_begin(&s->memory, step);
    return mark;
}

static void walk_end(StreamBP *s, size_t mark) {
    layers_end(&s->memory);
    kept_finish(s);
    if (s->now.pass != PASS_BACKWARD) inputs_await(s);
    arena_pop(s->arena, mark);
}

// Pushes the tensors of all layers that stay until backward: routes, keys, activations, states.
static void push_saved(StreamBP *s) {
    routes_push(s, s->now.rows);
    push_lent_keys(s, 0);
    push_kept_keys(s);
    push_kept_activations(s);
    push_kept_states(s);
    push_range_states(s, layers_with_state(&s->model->config));
}

// Returns chunk c's activations up to the MLP: kept, or pushed.
static Activations chunk_activations(const Visit *v) {
    Activations a = activations_begin(v);
    kept_await(v, &a);
    push_side(v, &a, SIDE_MIXER);
    return a;
}

// Pushes all of chunk c's activations for forward, and runs the mixer's norm.
static Activations forward_activations(const Visit *v) {
    Activations a = chunk_activations(v);
    push_side(v, &a, SIDE_MLP);
    output_begin(v, &a, 1);
    branch_in(v, 0, &a);
    return a;
}

static void mixer_keys(const Visit *v, const Activations *a) {
    for (size_t j = 0; j < mixer_parts(v); j++) mixer_part_of(v, j)->keys(v, a);
}

static void mixer_forward(const Visit *v, const Activations *a) {
    for (size_t j = 0; j < mixer_parts(v); j++) mixer_part_of(v, j)->forward(v, j, a);
}

static void mixer_begin(const Visit *v) {
    kept_prefetch(v, chunk_count(v->s));
    for (size_t j = mixer_parts(v); j-- > 0;) mixer_part_of(v, j)->begin(v);
}

static void mixer_restore(const Visit *v, size_t i) {
    for (size_t j = 0; j < mixer_parts(v); j++) mixer_part_of(v, j)->restore(v, i);
}

// Goes back to chunk c (the window slides, the state is reset). Recomputes c's activations up to the MLP that are not
// kept.
static Activations recompute(const Visit *v) {
    for (size_t j = 0; j < mixer_parts(v); j++) mixer_part_of(v, j)->go_back(v);
    Activations a = chunk_activations(v);
    kept_prefetch(v, v->c.index);
    branch_in(v, 0, &a);
    mixer_forward(v, &a);
    return a;
}

static void mixer_backward(const Visit *v, Activations *a, Stored *dx) {
    const size_t mark = arena_mark(v->s->arena);
    if (mixer_parts(v) > 1) mixer_gradient_begin(v, a, dx), branch_sum_backward(v, 0, a, dx); // for all parts
    for (size_t j = mixer_parts(v); j-- > 0;) mixer_part_of(v, j)->backward(v, j, a, dx);
    arena_pop(v->s->arena, mark);
}

#endif
