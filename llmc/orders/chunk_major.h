/*
Chunk-major orders: a chunk goes through all layers before the next one comes.

    seco    (SeCO)   pass 1 takes every chunk, first to last, through the whole model and keeps K, V of all layers.
                     Pass 2 takes them last to first: a chunk's activations of all layers are computed again from the
                     K, V of what is before it; then backward through all layers. What it adds to dK, dV of earlier
                     chunks waits there until their turn. Exact.
    spaco   (SpaCO)  pass 2 takes chunk c with probability q, by a draw of its own. Its loss, and the gradient that has
                     come to its K, V, count 1/q times. By induction from the last chunk the expectation of each
                     gradient is the exact one: unbiased.

A chunk's activations exist once for all layers, and no layer inputs: for each token there are K, V of all layers, and
their gradients.

    memory  2 N L KV (s + 4) + n ((L+1) C + L A) s + max(..., m (V + C) s), and sums of all gradients
    FLOPs   F (without the head) + F + B; spaco F + q (F + B)

A layer with a window keeps what the next chunk sees: the last w - 1 keys before each chunk, unless all keys are fewer;
their gradients slide with the chunks. A layer of linear attention keeps its state before each chunk.

Weights of layers are read once for each chunk, not once for each pass, and dW is summed over chunks: in fp32 for all
layers at one time (grads_hold).

Memory of all layers lies in ChunkMajor; the steps, which know one layer's, are shown a layer at a time (show_layer).
*/
#ifndef LLMC_CHUNK_MAJOR_H
#define LLMC_CHUNK_MAJOR_H
#include "streambp.h"

typedef struct {
    Stored *k, *v;              // of all layers with attention (push_key_value)
    Summed *dk, *dv;            // the same
    Stored *border[2];          // [windows' layers,chunks,w-1,NKV*HD] K and V before each chunk; NULL: all are kept
    size_t border_rows;         // w - 1
    Stored *columns;            // [linear layers,taps-1,W] at hand,
    Stored *kept_columns;       // [linear layers,chunks,taps-1,W] and before each chunk
    Summed *state, *kept_state; // likewise
    Summed *dstate, *dcolumns;  // [linear layers,...]
    size_t chunks;              // of the sequence, also in a plan
    size_t first;               // KeyValue.first, of all layers that slide
} ChunkMajor;

// ---- room -----------------------------------------------------------------------------------------------------------
// Rows of K, V of all layers
static size_t key_rows_of_all(const StreamBP *s) {
    const Config *c = &s->model->config;
    return layers_of_kind(c, LAYER_FULL) * s->kv.rows[0] + layers_of_kind(c, LAYER_WINDOW) * s->kv.rows[1];
}

static void push_keys_of_all(StreamBP *s, ChunkMajor *m) {
    const Config *config = &s->model->config;
    const Shapes d = shapes_of(s->model);
    const size_t window = window_of_model(config), windows = layers_of_kind(config, LAYER_WINDOW);
    const size_t chunk = layer_chunk(s), slides = m->chunks * (max_size(window, 1) - 1) + window + chunk < s->N;
    push_key_value(s, max_size(d.L, 2), s->N, slides ? chunk : s->N, 0); // 2: in one row each, if there is one layer
    const size_t rows = key_rows_of_all(s);
    m->k = s->kv.k, m->v = s->kv.v;
    m->dk = push_summed(s, SHARE_KV, "gradient of keys of all layers", rows * d.KV);
    m->dv = push_summed(s, SHARE_KV, "gradient of values of all layers", rows * d.KV);
    m->border_rows = slides && windows ? window - 1 : 0;
    for (size_t i = 0; i < 2 && m->border_rows; i++)
        m->border[i] = push_stored(s, SHARE_KV, i ? "values before chunks" : "keys before chunks",
                                   windows * m->chunks * m->border_rows * d.KV);
}

static void push_states_of_all(StreamBP *s, ChunkMajor *m) {
    const Shapes d = shapes_of(s->model);
    const size_t layers = layers_of_kind(&s->model->config, LAYER_LINEAR);
    if (!layers) return;
    push_states(s, layers, 1, 0);
    m->state = s->linear.state, m->columns = s->linear.columns;
    m->dstate = push_summed(s, SHARE_KV, "gradients of states", layers * d.S);
    m->dcolumns = push_summed(s, SHARE_KV, "gradients of the convolutions' earlier inputs", layers * d.columns);
    m->kept_state = push_summed(s, SHARE_KV, "states before chunks", layers * m->chunks * d.S);
    m->kept_columns = push_stored(s, SHARE_KV, "inputs before chunks' convolutions", layers * m->chunks * d.columns);
    s->linear.layers = 1, s->linear.every_chunk = 1;
}

// ---- a layer at a time ----------------------------------------------------------------------------------------------
// Ops that follow stand for so many visits in a plan.
static void count_visits(StreamBP *s, double visits) {
    s->memory.layers_repeat = s->memory.chunk_repeat = visits;
    s->ops->repeat(visits);
}

// The steps find layer l's keys and values, or states, and their gradients.
static void show_layer(StreamBP *s, const ChunkMajor *m, size_t l) {
    const Shapes d = shapes_of(s->model);
    if (layer_is_linear(&s->model->config, l)) {
        const size_t i = layers_before(&s->model->config, LAYER_LINEAR, l);
        s->linear.state = summed_row(s, m->state, i, d.S), s->linear.columns = stored_row(s, m->columns, i, d.columns);
        s->linear.dstate = summed_row(s, m->dstate, i, d.S);
        s->linear.dcolumns = summed_row(s, m->dcolumns, i, d.columns);
        s->linear.kept = summed_row(s, m->kept_state, i * m->chunks, d.S);
        s->linear.kept_columns = stored_row(s, m->kept_columns, i * m->chunks, d.columns);
        return;
    }
    s->kv.layers = 2; // key_value_begin is that of all layers
    const size_t begin = key_value_begin(s, l);
    s->kv.layers = 1;
    s->kv.k = stored_row(s, m->k, begin, d.KV), s->kv.v = stored_row(s, m->v, begin, d.KV);
    s->kv.dk = summed_row(s, m->dk, begin, d.KV), s->kv.dv = summed_row(s, m->dv, begin, d.KV);
    if (layer_slides(s, l)) s->kv.first = m->first;
}

// Chunks before which something is kept have an index, in a plan the first.
static size_t border_of(const StreamBP *s, Chunk c) { return visits_shapes(s) ? 0 : c.index; }

// Keys and values before chunk `index` of a layer that slides: out of the window, or back into it from its row 0 on
static void border_copy(StreamBP *s, const ChunkMajor *m, size_t l, size_t index, Range tokens, int keep) {
    const Shapes d = shapes_of(s->model);
    const size_t layer = layers_before(&s->model->config, LAYER_WINDOW, l) * m->chunks + index;
    for (size_t i = 0; i < 2 && tokens.count; i++) {
        Stored *kept = stored_row(s, m->border[i], layer * m->border_rows, d.KV);
        Stored *here = key_value_at(s, i ? s->kv.v : s->kv.k, l, tokens.begin);
        s->ops->copy(keep ? kept : here, keep ? here : kept, tokens.count * d.KV * d.stored);
    }
}

// Pass 1, behind chunk c's keys: what the next chunk sees of a layer that slides
static void border_keep(StreamBP *s, ChunkMajor *m, size_t l, Chunk c) {
    const size_t end = c.token + c.n, begin = first_key(0, end, m->border_rows + 1);
    const Range tokens = {begin, end - begin};
    if (!layer_slides(s, l)) return;
    m->first = s->kv.first;
    if (border_of(s, c) + 1 < m->chunks) border_copy(s, m, l, border_of(s, c) + 1, tokens, 1);
}

// Pass 2, before chunk c's: the window slides back to it.
static void border_restore(StreamBP *s, ChunkMajor *m, size_t l, Chunk c) {
    if (!layer_slides(s, l)) return;
    const Range missing = window_slide_back(s, l, c);
    const size_t end = min_size(missing.begin + missing.count, c.token);
    const Range before = {missing.begin, end > missing.begin ? end - missing.begin : 0};
    border_copy(s, m, l, border_of(s, c), before, 0);
}

// ---- a chunk through all layers -------------------------------------------------------------------------------------
// visits: chunks that this one stands for
static void chunk_forward(StreamBP *s, ChunkMajor *m, Chunk c, double visits) {
    const int again = s->pass == PASS_FORWARD;
    const size_t first = m->first;
    size_t slid = first;
    count_visits(s, visits);
    GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    embedding_step(s, c, w);
    weights_release(&s->memory, GROUP_EMBEDDING);
    layers_begin(&s->memory, 1);
    for (size_t i = 0; i < layer_count(s); i++) {
        const size_t l = layer_at(s, i);
        const int linear = layer_is_linear(&s->model->config, l);
        count_visits(s, s->memory.layers_repeat * visits);
        w = weights_acquire(&s->memory, l);
        weights_prefetch(&s->memory, l);
        m->first = first;
        show_layer(s, m, l);
        if (linear) state_copy(s, kept_state(s, 0, border_of(s, c)), !again);
        if (!linear && again) border_restore(s, m, l, c);
        Activations a = chunk_activations(s, l, c);
        if (!again) push_mlp_activations(s, &a, c.n);
        norm1_forward(s, l, c, w, &a);
        mixer_forward(s, l, c, w, &a);
        if (!linear && !again) border_keep(s, m, l, c);
        mlp_forward(s, l, c, w, &a);
        drop(s, &a);
        weights_release(&s->memory, l);
        if (!linear && layer_slides(s, l)) slid = s->kv.first;
    }
    m->first = slid;
    layers_end(&s->memory);
}

// The head of chunk c, in its own chunks. dw: NULL: log-probabilities alone
static void chunk_head(StreamBP *s, Chunk c, double visits, const GroupSums *dw) {
    const size_t most = min_size(effective_chunk(s, s->logits_chunk), c.n), whole = c.n / most;
    count_visits(s, visits);
    GroupWeights w = weights_acquire(&s->memory, GROUP_HEAD);
    for (size_t done = 0, n; done < c.n; done += n) {
        n = min_size(most, c.n - done);
        const double alike = visits_shapes(s) && n == most ? (double)whole : 1;
        Chunk part = chunk_of(s, c.token + done, n);
        s->ops->repeat(visits * alike);
        head_step(s, part, w, dw);
        n *= (size_t)alike;
    }
    weights_release(&s->memory, GROUP_HEAD);
    s->memory.layers_repeat = 1;
}

// The gradient that has come to chunk c's keys and values, or to the state behind it, counts so many times.
static void arrived_scale(StreamBP *s, size_t l, Chunk c, double factor) {
    const Shapes d = shapes_of(s->model);
    const DType type = dtype_of_sums(s->model->dtype);
    if (factor == 1) return;
    if (layer_is_linear(&s->model->config, l)) {
        s->ops->scale(s->linear.dstate, type, factor, d.S);
        if (d.columns) s->ops->scale(s->linear.dcolumns, type, factor, d.columns);
        return;
    }
    s->ops->scale(key_gradient_at(s, s->kv.dk, l, c.token), type, factor, c.n * d.KV);
    s->ops->scale(key_gradient_at(s, s->kv.dv, l, c.token), type, factor, c.n * d.KV);
}

static void chunk_backward(StreamBP *s, ChunkMajor *m, Chunk c, double visits, double factor) {
    Stored *dx = layer_input(s, s->model->config.num_hidden_layers, c.row);
    layers_begin(&s->memory, -1);
    for (size_t i = layer_count(s); i-- > 0;) {
        const size_t l = layer_at(s, i);
        count_visits(s, s->memory.layers_repeat * visits);
        GroupWeights w = weights_acquire(&s->memory, l);
        GroupSums dw = grads_held(&s->memory, l);
        weights_prefetch(&s->memory, l);
        show_layer(s, m, l);
        arrived_scale(s, l, c, factor);
        Activations a = kept_activations(s, l, c.row);
        mlp_backward(s, l, c, w, dw, &a, dx);
        if (layer_is_linear(&s->model->config, l)) {
            linear_attention_backward(s, l, c, w, dw, &a, dx);
        } else {
            attention_backward(s, l, c, w, dw, &a, dx);
            kv_backward(s, l, c, w, dw, &a, dx);
        }
        drop(s, &a);
        weights_release(&s->memory, l);
    }
    layers_end(&s->memory);
    count_visits(s, visits);
    tables_backward(s, c.row, c.n, grads_held(&s->memory, GROUP_EMBEDDING));
    s->memory.layers_repeat = 1;
}

#define RANDOM_STREAM_CHUNKS 0x6368756e6b73ull // of random.h: chunks that have a backward ("chunks")

// ---- draws (method spaco) -------------------------------------------------------------------------------------------
// Chunks that pass 2 takes, of `chunks`: each with probability keep; or of a fixed number, at least one, all choices
// alike. By the seed alone, so that a resumed run draws the same.
static void chunks_draw(Sparse *sparse, size_t chunks) {
    size_t wanted = max_size((size_t)(sparse->keep * (double)chunks + 0.5), 1);
    for (size_t i = 0; i < chunks; i++) {
        const double u = random_uniform(sparse->seed, RANDOM_STREAM_CHUNKS, i);
        sparse->drawn[i] = sparse->fixed ? u * (double)(chunks - i) < (double)wanted : u < sparse->keep;
        wanted -= sparse->fixed && sparse->drawn[i];
    }
}

// ---- a sequence -----------------------------------------------------------------------------------------------------
// Pass 1 and pass 2. drawn: [chunks] those of pass 2; NULL: all. factor: on the loss of these; most: Sparse.most
static double chunk_major_walk(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics,
                               const uint8_t *drawn, double factor) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), linear = layers_of_kind(&s->model->config, LAYER_LINEAR);
    const int sparse = s->method == METHOD_SPACO;
    const int waits = objective_weights_wait(&s->objective) == WEIGHTS_BY_SEQUENCE;
    const double arrived = s->sparse.most > 0 ? fmin(factor, s->sparse.most) : factor;
    Activations kept[2] = {{0}, {0}};
    ChunkMajor m = {0};
    sequence_begin(s, batch, Z / factor, PASS_FORWARD);
    grads_hold(&s->memory, last);
    m.chunks = chunks_of_range(s, 0);
    push_keys_of_all(s, &m);
    push_states_of_all(s, &m);
    s->rows = layer_chunk(s);
    push_inputs(s);
    const size_t chunk_mark = arena_mark(s->arena);

    s->pass = PASS_FORWARD_FIRST; // pass 1
    for (size_t i = 0; i < chunk_count(s); i++) {
        Chunk c = chunk_at(s, i);
        const double visits = s->memory.chunk_repeat;
        s->inputs.begin = c.row;
        chunk_forward(s, &m, c, visits);
        if (waits || sparse) chunk_head(s, c, visits, NULL);
    }
    if (waits) {
        host_collect(s, s->host_sums, s->logp);
        sequence_weights(s);
    }

    s->pass = PASS_FORWARD; // pass 2
    push_kept_activations(s, kept);
    s->kept = kept;
    s->ops->repeat(1);
    s->ops->zero(m.dk, key_rows_of_all(s) * d.KV * d.summed);
    s->ops->zero(m.dv, key_rows_of_all(s) * d.KV * d.summed);
    if (linear) s->ops->zero(m.dstate, linear * d.S * d.summed);
    if (linear && d.columns) s->ops->zero(m.dcolumns, linear * d.columns * d.summed);
    m.first = s->N;
    for (size_t i = chunk_count(s); i-- > 0;) {
        if (drawn && !s->dry && !drawn[i]) {
            if (linear) s->ops->zero(m.dstate, linear * d.S * d.summed);
            if (linear && d.columns) s->ops->zero(m.dcolumns, linear * d.columns * d.summed);
            continue;
        }
        Chunk c = chunk_at(s, i);
        const double visits = s->memory.chunk_repeat * (sparse && s->dry ? s->sparse.keep : 1);
        const GroupSums head = grads_held(&s->memory, GROUP_HEAD);
        s->inputs.begin = c.row;
        s->pass = PASS_FORWARD;
        chunk_forward(s, &m, c, visits);
        chunk_head(s, c, visits, &head);
        c = chunk_at(s, i); // the head's chunks have taken the memory of its spans
        s->pass = PASS_BACKWARD;
        chunk_backward(s, &m, c, visits, arrived);
    }
    s->ops->repeat(1);
    s->kept = NULL;
    arena_pop(s->arena, chunk_mark);
    s->inputs.begin = 0, s->rows = s->N;
    sequence_end(s);
    s->Z = Z;
    const double loss = sequence_loss(s, metrics);
    grads_release_held(&s->memory);
    grads_end(&s->memory);
    arena_pop(s->arena, mark);
    return loss;
}

static double chunk_major_pass(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    Sparse *sparse = &s->sparse;
    double factor = 1;
    size_t drawn = 0;
    if (s->method == METHOD_SECO) return chunk_major_walk(s, batch, Z, last, metrics, NULL, 1);
    s->batch = batch;
    sequence_split(s, 1);
    const size_t chunks = chunks_of_range(s, 0);
    if (!s->dry) chunks_draw(sparse, chunks);
    for (size_t i = 0; i < chunks && !s->dry; i++) drawn += sparse->drawn[i];
    factor = !sparse->fixed ? 1 / sparse->keep : drawn ? (double)chunks / (double)drawn : 1;
    return chunk_major_walk(s, batch, Z, last, metrics, sparse->drawn, factor);
}

static const Order order_chunk_major = {layer_forward, layer_backward, chunk_major_pass};

#endif
