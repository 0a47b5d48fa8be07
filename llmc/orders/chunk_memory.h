/*
K, V, windows and states of all layers, for chunk-major orders (chunk_major.h). keys_select points s->kv and s->linear
at the tensors of layer l.

    full-attention layer    K, V [N,KV] and their gradients
    layer with a window     K, V and gradients of the current window, which slides with the chunks; K, V of the w - 1
                            tokens before each chunk (its border), or of all N tokens if they are fewer
    linear attention        the current state and its gradient; the state before each chunk

Tensors that grow with N lie in the place of layer inputs (--inputs), which these orders lack. Off-device, K, V and
gradients of full-attention layers pass through two slots of [N,KV]: while one layer is computed, the next layer's rows
are loaded and the previous layer's rows stored. Windows and states are loaded one layer ahead.

    rows moved for a chunk [t0, t1) of a full-attention layer
    pass 1            K, V [0,t0) in, [t0,t1) out
    pass 2, forward   K, V [0,t0) in
    pass 2, backward  K, V [0,t1) in; dK, dV [0,t1) in (except for the chunk visited first) and [0,t0) out
*/
#ifndef LLMC_CHUNK_MEMORY_H
#define LLMC_CHUNK_MEMORY_H
#include "llmc/stream/held_gradients.h"
#include "streambp.h"

// Staging buffer for a layer's keys, values and their gradients
typedef struct {
    Stored *k, *v;   // [N,NKV*HD]
    Summed *dk, *dv; // [N,NKV*HD]
    PageSlot page;   // page: number of the layer
} KeySlot;

typedef struct {
    Stored *k[2], *v[2];           // [layers,rows,NKV*HD] 0: full-attention layers, at home; 1: layers with a window
    Summed *dk[2], *dv[2];         // their gradients
    KeySlot slot[2];               // off-device: the current full-attention layer and the next, in turn
    Stored *border[2];             // [window layers,border_stride,NKV*HD] K and V before each chunk, or of all tokens
    size_t border_rows;            // w - 1; 0: windows do not slide
    size_t border_stride;          // chunks * (w - 1), or N
    Stored *columns;               // [linear layers,taps-1,W] the convolution's current inputs
    Stored *before_columns;        // [linear layers,taps-1,W] off-device: inputs before the current chunk
    Stored *kept_columns;          // [linear layers,chunks,taps-1,W] inputs before each chunk, at home
    Summed *state, *before, *kept; // states of the delta rule: current, before the current chunk, before each chunk
    Summed *dstate, *dcolumns;     // [linear layers,...] gradients of the current state
    size_t chunks;                 // chunks of the sequence, in the dry run, too
    size_t first, slid;            // KeyValue.first of sliding layers: after the last chunk, after the current chunk
    PageSlot aside[2];             // windows and states: [0] stores; [1] loads, page: the layer loaded ahead
    int gradients_begin;           // 1: pass 2 has visited no chunk yet: dK = dV = 0
} ChunkMemory;

static int keys_off_device(const StreamBP *s) { return is_off_device(&s->memory, PLACED_INPUTS); }

// ---- room -----------------------------------------------------------------------------------------------------------
static void *push_kept(const StreamBP *s, const char *name, size_t count, size_t size) {
    return arena_push(memory_of(&s->memory, PLACED_INPUTS), SHARE_KV, name, count, size);
}

static void push_slots(const StreamBP *s, ChunkMemory *m) {
    const Shapes d = shapes_of(s->model);
    const size_t keys = s->now.N * d.KV, values = s->now.N * d.VV; // elements of a full-attention layer
    for (size_t i = 0; i < 2; i++) {
        KeySlot *slot = &m->slot[i];
        slot->k = push_stored(s, SHARE_KV, i ? "the next layer's keys" : "one layer's keys", keys);
        slot->v = push_stored(s, SHARE_KV, i ? "the next layer's values" : "one layer's values", values);
        slot->dk = push_summed(s, SHARE_KV, "gradient of these keys", keys);
        slot->dv = push_summed(s, SHARE_KV, "gradient of these values", values);
    }
}

static void push_keys_of_all(StreamBP *s, ChunkMemory *m) {
    const Config *config = &s->model->config;
    const Shapes d = shapes_of(s->model);
    const size_t full = layers_of_kind(config, LAYER_FULL), windows = layers_of_kind(config, LAYER_WINDOW);
    const size_t window = max_size(window_of_model(config), 1), chunk = layer_chunk(s);
    const size_t stride = min_size(m->chunks * (window - 1), s->now.N), each = 2 * (d.stored + d.summed);
    const size_t sliding = (window - 1 + chunk) * each + (keys_off_device(s) ? 0 : stride * 2 * d.stored);
    const int slides = windows && sliding < s->now.N * each;
    const KeyValue none = {0};
    s->kv = none, s->kv.layers = 1;
    s->kv.rows[0] = s->now.N, s->kv.rows[1] = slides ? window - 1 + chunk : s->now.N;
    if (full) {
        m->k[0] = (Stored *)push_kept(s, "keys of all layers", full * s->now.N * d.KV, d.stored);
        m->v[0] = (Stored *)push_kept(s, "values of all layers", full * s->now.N * d.VV, d.stored);
        m->dk[0] = (Summed *)push_kept(s, "gradient of keys of all layers", full * s->now.N * d.KV, d.summed);
        m->dv[0] = (Summed *)push_kept(s, "gradient of values of all layers", full * s->now.N * d.VV, d.summed);
        if (keys_off_device(s)) push_slots(s, m);
    }
    if (!windows) return;
    const size_t KV = shapes_in(s->model, FORM_WINDOW).KV, count = windows * s->kv.rows[1] * KV;
    m->k[1] = push_stored(s, SHARE_KV, "keys in windows", count);
    m->v[1] = push_stored(s, SHARE_KV, "values in windows", count);
    m->dk[1] = push_summed(s, SHARE_KV, "gradient of keys in windows", count);
    m->dv[1] = push_summed(s, SHARE_KV, "gradient of values in windows", count);
    m->border_rows = slides ? window - 1 : 0, m->border_stride = stride;
    for (size_t i = 0; i < 2 && m->border_rows; i++)
        m->border[i] = (Stored *)push_kept(s, i ? "values before chunks" : "keys before chunks",
                                           windows * m->border_stride * KV, d.stored);
}

static void push_states_of_all(StreamBP *s, ChunkMemory *m) {
    const Shapes d = shapes_of(s->model);
    const size_t layers = layers_with_state(&s->model->config);
    if (!layers) return;
    push_states(s, layers, 1, 0);
    m->state = s->linear.state, m->columns = s->linear.columns;
    m->dstate = push_summed(s, SHARE_KV, "gradients of states", layers * d.linear.S);
    m->dcolumns = push_summed(s, SHARE_KV, "gradients of the convolutions' earlier inputs", layers * d.linear.columns);
    m->kept = (Summed *)push_kept(s, "states before chunks", layers * m->chunks * d.linear.S, d.summed);
    m->kept_columns =
        (Stored *)push_kept(s, "inputs before chunks' convolutions", layers * m->chunks * d.linear.columns, d.stored);
    if (keys_off_device(s)) {
        m->before = push_summed(s, SHARE_KV, "states before a chunk", layers * d.linear.S);
        m->before_columns = push_stored(s, SHARE_KV, "inputs before a chunk's convolutions", layers * d.linear.columns);
    }
    s->linear.layers = 1, s->linear.one_state = 1;
}

static void state_gradients_zero(const StreamBP *s, const ChunkMemory *m) {
    const Shapes d = shapes_of(s->model);
    const size_t linear = layers_with_state(&s->model->config);
    if (linear) s->ops->zero(m->dstate, linear * d.linear.S * d.summed);
    if (linear && d.linear.columns) s->ops->zero(m->dcolumns, linear * d.linear.columns * d.summed);
}

// Sets dK, dV and the states' gradients of all layers to 0, before pass 2.
static void gradients_of_all_zero(const StreamBP *s, ChunkMemory *m) {
    const Shapes d = shapes_of(s->model);
    const Config *config = &s->model->config;
    const size_t rows[2] = {layers_of_kind(config, LAYER_FULL) * s->now.N,
                            layers_of_kind(config, LAYER_WINDOW) * s->kv.rows[1]};
    for (size_t i = 0; i < 2; i++) {
        const Shapes of = shapes_in(s->model, i ? FORM_WINDOW : FORM_FULL);
        if (!rows[i] || (i == 0 && keys_off_device(s))) continue; // off-device: keys_ask zeroes the slots
        s->ops->zero(m->dk[i], rows[i] * of.KV * d.summed);
        s->ops->zero(m->dv[i], rows[i] * of.VV * d.summed);
    }
    state_gradients_zero(s, m);
}

// ---- transfers ------------------------------------------------------------------------------------------------------
// Returns the index of chunk c's border and saved state; in the dry run 0.
static size_t border_of(const StreamBP *s, Chunk c) { return visits_shapes(s) ? 0 : c.index; }

// Tells whether layer l has attention without a window. Its K, V may lie off-device.
static int is_full(const StreamBP *s, size_t l) { return has_attention(layer_of(s, l)) && !layer_of(s, l)->window; }

// Returns how many layers before layer l have attention of the same kind as layer l: full, or with a window.
static size_t number_of_keys(const StreamBP *s, size_t l) {
    const Layer *layer = layer_of(s, l);
    return layer->number[layer->window ? LAYER_WINDOW : LAYER_FULL];
}

static KeySlot *key_slot(const StreamBP *s, ChunkMemory *m, size_t l) { return &m->slot[number_of_keys(s, l) % 2]; }

// Rows that move for a chunk: rows before the chunk; its own rows; both (SEEN); rows with dK or dV so far (ARRIVED);
// its border, out of and into the window
typedef enum { ROWS_BEFORE, ROWS_OWN, ROWS_SEEN, ROWS_ARRIVED, ROWS_BORDER_OUT, ROWS_BORDER_IN } MovedRows;

// Returns the rows that move for the chunk of n tokens from `token` on.
static Range moved_rows(const StreamBP *s, const ChunkMemory *m, MovedRows what, size_t token, size_t n) {
    const size_t end = token + n, begin = first_key(0, token, m->border_rows + 1);
    const size_t next =
        end < s->now.N ? first_key(0, end, m->border_rows + 1) : s->now.N; // KeyValue.first after this chunk
    const Range before = {0, token}, own = {token, n}, seen = {0, end}, none = {0, 0};
    const int by_token = m->border_stride == s->now.N;
    Range border = {by_token ? token : next, by_token ? n : end - next};
    switch (what) {
    case ROWS_BEFORE: return before;
    case ROWS_OWN: return own;
    case ROWS_SEEN: return seen;
    case ROWS_ARRIVED: return end < s->now.N ? seen : none;
    case ROWS_BORDER_OUT: return end < s->now.N ? border : none;
    case ROWS_BORDER_IN: break;
    }
    border.begin = begin, border.count = min_size(next, token) - begin;
    return border;
}

// Returns the mean number of these rows over the chunks that c counts for.
static double moved_mean(const StreamBP *s, const ChunkMemory *m, MovedRows what, Chunk c) {
    const size_t whole = visits_shapes(s) && !c.index ? max_size(s->now.N / max_size(layer_chunk(s), 1), 1) : 1;
    double rows = 0;
    for (size_t i = 0; i < whole; i++) rows += (double)moved_rows(s, m, what, c.token + i * c.n, c.n).count;
    return rows / (double)whole;
}

// Moves rows of `bytes` each between device and home. The dry run counts `mean` rows.
static void rows_move(StreamBP *s, PageSlot *slot, int in, void *device, void *home, Range rows, double mean,
                      size_t bytes) {
    Residency *r = &s->memory;
    const Pager pager = chunk_pager(r, PLACED_INPUTS, mean);
    const size_t count = r->walk.dry ? mean > 0 : rows.count;
    if (count) page_move(pager, slot, in, device, home, count * bytes);
}

// Moves layer l's state before chunk c, and the convolution's inputs, between device and home.
static void state_move(StreamBP *s, ChunkMemory *m, size_t l, Chunk c, int in, Summed *state, Stored *columns) {
    const Shapes d = shapes_of(s->model);
    const size_t kept = layer_of(s, l)->state * m->chunks + border_of(s, c);
    const Range one = {0, 1};
    rows_move(s, &m->aside[in], in, state, summed_row(s, m->kept, kept, d.linear.S), one, 1, d.linear.S * d.summed);
    if (d.linear.columns)
        rows_move(s, &m->aside[in], in, columns, stored_row(s, m->kept_columns, kept, d.linear.columns), one, 1,
                  d.linear.columns * d.stored);
}

// Moves K and V, or with `gradient` dK and dV, of full-attention layer l between its slot and home.
static void slot_move(StreamBP *s, ChunkMemory *m, size_t l, Chunk c, MovedRows what, int gradient, int in) {
    const Shapes d = shapes_of(s->model);
    const size_t row = number_of_keys(s, l) * s->now.N;
    const Range rows = moved_rows(s, m, what, c.token, c.n);
    KeySlot *slot = key_slot(s, m, l);
    void *device[2] = {gradient ? (void *)slot->dk : slot->k, gradient ? (void *)slot->dv : slot->v};
    void *home[2] = {gradient ? (void *)m->dk[0] : m->k[0], gradient ? (void *)m->dv[0] : m->v[0]};
    for (int i = KEYS; i <= VALUES; i++) {
        const size_t bytes = key_width(&d, (KeyTensor)i) * (gradient ? d.summed : d.stored);
        rows_move(s, &slot->page, in, at(device[i], rows.begin, bytes), at(home[i], row + rows.begin, bytes), rows,
                  moved_mean(s, m, what, c), bytes);
    }
}

// Moves the border of chunk `index`, in a layer that slides: keys and values out of the window, or back into it.
static void border_move(StreamBP *s, ChunkMemory *m, size_t l, Chunk c, size_t index, MovedRows what) {
    const Shapes *d = &layer_of(s, l)->shape;
    const int in = what == ROWS_BORDER_IN, in_order = walk_is_in_order(&s->memory.walk);
    const size_t bytes = d->KV * d->stored;
    Range rows = moved_rows(s, m, what, c.token, c.n);
    const size_t row =
        number_of_keys(s, l) * m->border_stride + (m->border_stride == s->now.N ? rows.begin : index * m->border_rows);
    if (!m->border_rows) return; // a window of one key
    // spaco: the chunk visited last may be far away
    if (in && in_order) rows.count = min_size(m->first, c.token) - rows.begin;
    for (size_t i = 0; i < 2 && (rows.count || (!in_order && keys_off_device(s))); i++) {
        Stored *kept = stored_row(s, m->border[i], row, d->KV);
        Stored *here = key_value_at(s, i ? VALUES : KEYS, l, rows.begin);
        if (keys_off_device(s))
            rows_move(s, &m->aside[in], in, here, kept, rows, moved_mean(s, m, what, c), bytes);
        else
            s->ops->copy(in ? here : kept, in ? kept : here, rows.count * bytes);
    }
}

// ---- a layer at a time ----------------------------------------------------------------------------------------------
// Starts loading layer l's K, V into the free slot; in backward also dK, dV so far. Does nothing if no layer has number
// l.
static void keys_ask(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    const Shapes d = shapes_of(s->model);
    if (l >= d.L || !is_full(s, l) || !keys_off_device(s)) return;
    const int backward = s->now.pass == PASS_BACKWARD;
    KeySlot *slot = key_slot(s, m, l);
    if (!page_ask(s->ops, &slot->page, l)) return;
    slot_move(s, m, l, c, backward ? ROWS_SEEN : ROWS_BEFORE, 0, 1);
    if (!backward) return;
    if (m->gradients_begin && walk_is_in_order(&s->memory.walk)) {
        s->ops->zero(slot->dk, (c.token + c.n) * d.KV * d.summed);
        s->ops->zero(slot->dv, (c.token + c.n) * d.VV * d.summed);
    } else {
        slot_move(s, m, l, c, ROWS_ARRIVED, 1, 1);
    }
}

// Returns the next full-attention layer in direction `step`; num_hidden_layers or more if no such layer follows.
static size_t next_full(const StreamBP *s, size_t l, int step) {
    for (l += (size_t)step; l < s->model->config.num_hidden_layers && !is_full(s, l);) l += (size_t)step;
    return l;
}

// Points s->kv at layer l's rows on the device.
static void rows_select(StreamBP *s, const ChunkMemory *m, size_t l) {
    const Shapes *d = &layer_of(s, l)->shape;
    const size_t kind = layer_of(s, l)->window != 0, row = number_of_keys(s, l) * s->kv.rows[kind];
    s->kv.k = stored_row(s, m->k[kind], row, d->KV), s->kv.v = stored_row(s, m->v[kind], row, d->VV);
    s->kv.dk = summed_row(s, m->dk[kind], row, d->KV), s->kv.dv = summed_row(s, m->dv[kind], row, d->VV);
}

// Slides layer l's window back to chunk c, and starts loading the state before c, in pass 2.
static void window_ask(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    const Shapes d = shapes_of(s->model);
    const KeyValue current = s->kv;
    if (s->now.pass != PASS_FORWARD || l >= d.L) return;
    const Layer *layer = layer_of(s, l);
    const int state = has_state(layer) && keys_off_device(s), slides = layer_slides(s, l);
    if ((!state && !slides) || !page_ask(s->ops, &m->aside[1], l)) return;
    if (state)
        state_move(s, m, l, c, 1, summed_row(s, m->before, layer->state, d.linear.S),
                   stored_row(s, m->before_columns, layer->state, d.linear.columns));
    if (slides) {
        rows_select(s, m, l);
        s->kv.first = m->first;
        window_slide_back(s, l, c);
        border_move(s, m, l, c, border_of(s, c), ROWS_BORDER_IN);
        s->kv = current;
    }
}

// Points s->kv and s->linear at layer l's tensors, after the loads that chunk c needs.
static void keys_select(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    const Shapes d = shapes_of(s->model);
    const Layer *layer = layer_of(s, l);
    const size_t i = layer->state;
    keys_ask(s, m, l, c);
    window_ask(s, m, l, c);
    if (m->aside[1].asked && m->aside[1].page == l) {
        page_await(s->ops, &m->aside[1]);
        m->aside[1].asked = 0;
    }
    if (has_state(layer)) {
        const size_t kept = i * m->chunks + border_of(s, c);
        s->linear.state = summed_row(s, m->state, i, d.linear.S),
        s->linear.columns = stored_row(s, m->columns, i, d.linear.columns);
        s->linear.dstate = summed_row(s, m->dstate, i, d.linear.S);
        s->linear.dcolumns = summed_row(s, m->dcolumns, i, d.linear.columns);
        s->linear.kept = m->before ? summed_row(s, m->before, i, d.linear.S) : summed_row(s, m->kept, kept, d.linear.S);
        s->linear.kept_columns = m->before ? stored_row(s, m->before_columns, i, d.linear.columns)
                                           : stored_row(s, m->kept_columns, kept, d.linear.columns);
    }
    if (is_full(s, l) && keys_off_device(s)) {
        KeySlot *slot = key_slot(s, m, l);
        page_await(s->ops, &slot->page);
        s->kv.k = slot->k, s->kv.v = slot->v, s->kv.dk = slot->dk, s->kv.dv = slot->dv;
        slot->page.asked = 0;
    } else if (has_attention(layer)) {
        rows_select(s, m, l);
        if (layer_slides(s, l))
            s->kv.first = s->now.pass < PASS_FORWARD ? m->first : first_key(0, c.token, m->border_rows + 1);
    }
}

// Starts loading the next layers' tensors while layer l is computed. In the dry run each visit of a layer loads the
// layer's tensors.
static void keys_ask_ahead(StreamBP *s, ChunkMemory *m, size_t l, Chunk c, int step) {
    if (!walk_is_in_order(&s->memory.walk)) return;
    if (is_full(s, l)) keys_ask(s, m, next_full(s, l, step), c);
    window_ask(s, m, l + (size_t)step, c);
}

// Waits for the last chunk's stores, before a chunk's walk over the layers.
static void keys_await(const StreamBP *s, ChunkMemory *m) {
    page_finish(s->ops, &m->aside[0]);
    for (size_t i = 0; i < 2; i++) page_finish(s->ops, &m->slot[i].page);
}

// Stores chunk c's K, V, or the next chunk's border, for later chunks and pass 2. Call it in pass 1, after layer l.
static void keys_keep(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    if (layer_slides(s, l)) {
        m->slid = s->kv.first;
        if (border_of(s, c) + 1 < m->chunks) border_move(s, m, l, c, border_of(s, c) + 1, ROWS_BORDER_OUT);
    } else if (is_full(s, l) && keys_off_device(s)) {
        slot_move(s, m, l, c, ROWS_OWN, 0, 0);
    }
}

// Saves the state of linear attention before chunk c in pass 1, restores it in pass 2.
static void states_show(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    const int keep = s->now.pass < PASS_FORWARD;
    state_copy(s, kept_state(s, 0, 0), keep);
    if (keep && keys_off_device(s)) state_move(s, m, l, c, 0, s->linear.kept, s->linear.kept_columns);
}

// Stores dK, dV of earlier chunks after layer l's backward of chunk c.
static void gradients_keep(StreamBP *s, ChunkMemory *m, size_t l, Chunk c) {
    if (is_full(s, l) && keys_off_device(s)) slot_move(s, m, l, c, ROWS_BEFORE, 1, 0);
}

#endif
