/*
Chunk-major orders: a chunk passes through all layers before the next chunk starts.

    seco    (SeCO)   pass 1 runs every chunk, first to last, through the whole model and keeps K, V of all layers.
                     Pass 2 visits the chunks last to first. It recomputes a chunk's activations of all layers from K, V
                     of earlier chunks, then runs backward through all layers. dK, dV of earlier chunks accumulate until
                     the visit of their chunk. The gradient is exact.
    spaco   (SpaCO)  pass 2 visits chunk c with probability q, drawn independently. The chunk's loss and its accumulated
                     dK, dV are scaled by 1/q. So, by induction from the last chunk, the expectation of each gradient is
                     the exact gradient: the estimate is unbiased.

Memory holds all layers' activations of one chunk, and K, V, dK, dV of all layers and tokens, but no layer inputs:

    memory  2 N L' KV (s + 4) + (N/n) (L_w 2 (w-1) KV s + L_s HV DK DV 4) + n ((L+1) C + L A) s + m (V + C) s, and
            sums of all gradients; L' layers have full attention, L_w a window w, L_s a state
    FLOPs   F (without the head) + F + B; spaco F + q (F + B)

Weights are read once per chunk, not once per pass. dW accumulates over chunks, in fp32 for all layers at the same time
(grads_hold). Memory of all layers, and its places: chunk_memory.h.
*/
#ifndef LLMC_CHUNK_MAJOR_H
#define LLMC_CHUNK_MAJOR_H
#include "chunk_memory.h"

// Makes the following ops count `visits` times in the dry run.
static void count_visits(StreamBP *s, double visits) {
    s->memory.walk.layers = visits;
    walk_count(&s->memory.walk, s->ops, 1);
}

// ---- a chunk through all layers -------------------------------------------------------------------------------------
// Runs chunk c forward through all layers. visits: chunks that it counts for in the dry run
static void chunk_forward(StreamBP *s, ChunkMemory *m, Chunk c, double visits) {
    const int again = s->now.pass == PASS_FORWARD;
    const Phase phase = again ? PHASE_BACKWARD : PHASE_FORWARD;
    count_visits(s, visits);
    s->memory.moved.phase = phase;
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, c, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    s->memory.moved.phase = phase;
    keys_await(s, m);
    m->slid = again ? first_key(0, c.token, m->border_rows + 1) : m->first;
    if (walk_is_in_order(&s->memory.walk)) keys_ask(s, m, next_full(s, SIZE_MAX, 1), c);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        count_visits(s, v.times * visits);
        v.c = c;
        v.w = weights_acquire(&s->memory, v.l);
        weights_prefetch(&s->memory, v.l);
        keys_select(s, m, v.l, c);
        keys_ask_ahead(s, m, v.l, c, 1);
        if (has_state(v.layer)) states_show(s, m, v.l, c);
        Activations a = forward_activations(&v);
        mixer_keys(&v, &a);
        if (!again) keys_keep(s, m, v.l, c);
        rest_forward(&v, &a);
        weights_release(&s->memory, v.l);
    }
    m->first = m->slid;
    layers_end(&s->memory);
}

// Runs the head on chunk c, in logits chunks. dw NULL: computes log-probabilities alone
static void chunk_head(StreamBP *s, Chunk c, double visits, const GroupSums *dw) {
    const size_t most = min_size(effective_chunk(s, s->setup->logits_chunk), c.n), whole = c.n / most;
    Visit v = {0};
    count_visits(s, visits);
    v.s = s, v.w = weights_acquire(&s->memory, GROUP_HEAD);
    if (dw) v.dw = *dw;
    for (size_t done = 0, n; done < c.n; done += n) {
        n = min_size(most, c.n - done);
        const double alike = visits_shapes(s) && n == most ? (double)whole : 1;
        v.c = chunk_of(s, c.token + done, n);
        walk_count(&s->memory.walk, s->ops, alike);
        if (dw)
            head_backward(&v);
        else
            head_forward(&v);
        n *= (size_t)alike;
    }
    weights_release(&s->memory, GROUP_HEAD);
    s->memory.walk.layers = 1;
}

// Scales the accumulated dK[c], dV[c] (or dstate, dcolumns) by `factor`.
static void arrived_scale(const Visit *v, double factor) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const DType type = dtype_of_sums(s->model->dtype);
    if (factor == 1) return;
    if (has_state(v->layer)) {
        s->ops->scale(s->linear.dstate, type, factor, d->linear.S);
        if (d->linear.columns) s->ops->scale(s->linear.dcolumns, type, factor, d->linear.columns);
    }
    if (!has_attention(v->layer)) return;
    s->ops->scale(key_gradient_at(s, KEYS, v->l, v->c.token), type, factor, v->c.n * d->KV);
    s->ops->scale(key_gradient_at(s, VALUES, v->l, v->c.token), type, factor, v->c.n * d->VV);
}

static void chunk_backward(StreamBP *s, ChunkMemory *m, Chunk c, double visits, double factor) {
    Stored *dx = gradient_at(s, c.row);
    layers_begin(&s->memory, -1);
    for (Visit v = first_layer(s); v.layer; next_layer(&v)) {
        count_visits(s, v.times * visits);
        v.c = c;
        v.w = weights_acquire(&s->memory, v.l), v.dw = grads_held(&s->memory, v.l);
        weights_prefetch(&s->memory, v.l);
        Activations a = chunk_activations(&v);
        branch_in(&v, 0, &a);
        mlp_backward(&v, &a, dx);
        keys_select(s, m, v.l, c);
        keys_ask_ahead(s, m, v.l, c, -1);
        arrived_scale(&v, factor);
        mixer_backward(&v, &a, dx);
        gradients_keep(s, m, v.l, c);
        drop(&v, &a);
        weights_release(&s->memory, v.l);
    }
    m->gradients_begin = 0;
    layers_end(&s->memory);
    count_visits(s, visits);
    tables_backward(s, c.row, c.n, grads_held(&s->memory, GROUP_EMBEDDING));
    s->memory.walk.layers = 1;
}

#define RANDOM_STREAM_CHUNKS 0x6368756e6b73ull // stream of random.h ("chunks")

// ---- draws (method spaco) -------------------------------------------------------------------------------------------
// Draws the chunks of pass 2, each with probability keep, from the seed alone: a resumed run draws the same chunks.
static void chunks_draw(Sparse *sparse, size_t chunks) {
    for (size_t i = 0; i < chunks; i++)
        sparse->drawn[i] = random_uniform(sparse->seed, RANDOM_STREAM_CHUNKS, i) < sparse->keep;
}

// ---- a sequence -----------------------------------------------------------------------------------------------------
// Runs pass 1, first to last: keeps K, V, windows and states. Computes log-probabilities for spaco, whose pass 2 skips
// chunks, and for objectives that need them for the whole sequence.
static void chunk_major_forward(StreamBP *s, ChunkMemory *m) {
    const int waits = objective_weights_wait(&s->setup->objective) == WEIGHTS_BY_SEQUENCE;
    s->now.pass = PASS_FORWARD_FIRST;
    for (size_t i = 0; i < chunk_count(s); i++) {
        const Chunk c = visit(s, chunk_at(s, i));
        s->inputs.begin = c.row;
        chunk_forward(s, m, c, c.times);
        if (waits || s->setup->method == METHOD_SPACO) chunk_head(s, c, c.times, NULL);
    }
    if (!waits) return;
    host_collect(s, s->now.host_sums, s->now.logp);
    sequence_weights(s);
}

// Runs pass 2, last to first: each chunk forward again, then backward. factor: 1/q with method spaco, else 1
static void chunk_major_backward(StreamBP *s, ChunkMemory *m, double factor) {
    const int sparse = s->setup->method == METHOD_SPACO;
    const uint8_t *drawn = sparse ? s->now.sparse.drawn : NULL;
    m->first = s->now.N;
    for (size_t i = chunk_count(s); i-- > 0;) {
        if (drawn && !drawn[i]) {
            state_gradients_zero(s, m);
            continue;
        }
        const Chunk c = visit(s, chunk_at(s, i));
        const double visits = c.times * (sparse && !drawn ? s->now.sparse.keep : 1);
        const GroupSums head = grads_held(&s->memory, GROUP_HEAD);
        s->inputs.begin = c.row;
        s->now.pass = PASS_FORWARD;
        chunk_forward(s, m, c, visits);
        chunk_head(s, c, visits, &head);
        s->now.pass = PASS_BACKWARD;
        chunk_backward(s, m, c, visits, factor);
    }
}

// Runs both passes over a sequence. With method spaco pass 2 visits only the chunks drawn in s->now.sparse.
static double chunk_major_walk(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    const Marks mark = marks_of(s->arena);
    const double factor = s->setup->method == METHOD_SPACO ? 1 / s->now.sparse.keep : 1;
    ChunkMemory m = {0};
    m.gradients_begin = 1;
    sequence_begin(s, batch, Z / factor, PASS_FORWARD);
    grads_hold(&s->memory, last);
    m.chunks = chunks_of_range(s, 0);
    routes_push(s, s->now.N);
    push_keys_of_all(s, &m);
    push_states_of_all(s, &m);
    s->now.rows = layer_chunk(s);
    push_inputs(s);
    const size_t chunk_mark = arena_mark(s->arena);
    chunk_major_forward(s, &m);
    routes_balance(s);

    s->now.pass = PASS_FORWARD;
    push_kept_activations(s);
    count_visits(s, 1);
    weights_step(&s->memory, GROUP_HEAD); // a deferred step reads the last step's gradients
    grads_held_begin(&s->memory);
    gradients_of_all_zero(s, &m);
    chunk_major_backward(s, &m, factor);

    count_visits(s, 1);
    keys_await(s, &m);
    arena_pop(s->arena, chunk_mark);
    s->inputs.begin = 0, s->now.rows = s->now.N;
    sequence_end(s);
    s->now.Z = Z;
    const double loss = sequence_loss(s, metrics);
    grads_release_held(&s->memory);
    grads_end(&s->memory);
    marks_pop(s->arena, mark);
    return loss;
}

static double chunk_major_pass(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    if (s->setup->method == METHOD_SPACO && s->now.sparse.drawn)
        chunks_draw(&s->now.sparse, batch->N / s->setup->chunk + 1);
    return chunk_major_walk(s, batch, Z, last, metrics);
}

#endif
