/*
What stays of a layer from forward to backward: activations by row of the table (activations.h), keys and values, and
the states of linear attention. From --keep products on, backward uses the keys and states that forward made. A layer
with a window then stores the keys of the whole sequence. Below that level backward projects its keys again, in other
chunks, and states of linear attention from other products, so gradients of these layers differ in rounding
(level_changes_bits). In other layers a kept tensor has the recomputed bits.

Kept tensors lie on the device or off-device. Off-device, forward stores a chunk's tensors when the chunk is done, while
the next chunk runs. Backward loads them one chunk ahead, across layers, too. Two slots of one chunk each take turns.
Keys lie in memory of one layer, and are loaded when the layer's backward begins. States stay on the device. A ring
(orders/ring.h) has a whole layer's tensors at once and loads them a layer at a time.
*/
#ifndef LLMC_KEPT_H
#define LLMC_KEPT_H
#include "activations.h"

// ---- keys and values ------------------------------------------------------------------------------------------------
static int layer_keeps_key(const Layer *layer, KeyTensor i) { return layer->key[i] <= layer->level; }

// Tells whether this pass finds the products of the layer's keys and values, which forward kept.
static int keys_found(const Visit *v) { return finds_kept(v) && keeps(v, LEVEL_PRODUCTS); }

// Returns the tokens that a layer's memory of keys is visited by: of a kept layer all tokens.
static size_t key_chunk(const Visit *v) { return keeps(v, LEVEL_PRODUCTS) ? v->s->now.N : layer_chunk(v->s); }

// Pushes the kept keys and values of all layers that keep them, at home.
static void push_kept_keys(StreamBP *s) {
    static const char *const names[KEY_TENSORS] = {"keys of all layers", "values of all layers",
                                                   "keys before QK-norm of all layers",
                                                   "values before their norm of all layers"};
    set_key_rows(s, 1, s->now.N, s->now.N);
    for (int i = 0; i < KEY_TENSORS; i++)
        for (int off = 0; off < 2; off++) {
            size_t count = 0;
            for (size_t l = 0; l < s->model->config.num_hidden_layers; l++)
                if (layer_of(s, l)->off == off && layer_keeps_key(layer_of(s, l), (KeyTensor)i))
                    count += keys_of_layer(s, (KeyTensor)i, l);
            s->kept.keys[off][i] = count ? (Stored *)arena_push(off ? memory_of(&s->memory, PLACED_KEPT) : s->arena,
                                                                SHARE_KV, names[i], count, dtype_size(s->model->dtype))
                                         : NULL;
        }
}

// Returns a layer's kept keys at home.
static Stored *kept_keys(const StreamBP *s, size_t l, KeyTensor i) {
    const int off = layer_of(s, l)->off;
    size_t elements = 0;
    for (size_t e = 0; e < l; e++)
        if (layer_of(s, e)->off == off && layer_keeps_key(layer_of(s, e), i)) elements += keys_of_layer(s, i, e);
    return stored_row(s, s->kept.keys[off][i], elements, 1);
}

// Points s->kv at the visited layer's keys and values: kept, lent, or memory of one layer, which it pushes.
static void push_keys(const Visit *v) {
    static const char *const names[KEY_TENSORS] = {"keys of one layer", "values of one layer",
                                                   "keys before QK-norm of one layer",
                                                   "values before their norm of one layer"};
    StreamBP *s = v->s;
    const int shares = shares_keys(v->layer), stays = keeps(v, LEVEL_PRODUCTS);
    const int moves = keeps_off_device(v) && s->now.pass != PASS_RESTORE;
    if (shares)
        select_lent_keys(s, v->l);
    else
        set_key_rows(s, 1, s->now.N, key_chunk(v));
    for (int i = 0; i < KEY_TENSORS; i++) {
        const int kept = stays && layer_keeps_key(v->layer, (KeyTensor)i);
        if (kept && !v->layer->off)
            *key_tensor(s, (KeyTensor)i) = kept_keys(s, v->l, (KeyTensor)i);
        else if ((kept && moves) || (i <= VALUES && !shares))
            *key_tensor(s, (KeyTensor)i) = push_stored(s, SHARE_KV, names[i], keys_of_layers(s, (KeyTensor)i, 0));
    }
    if (s->now.pass == PASS_BACKWARD && !shares) push_key_value_gradients(s);
    if (v->layer->shape.shared_key && !s->setup->latent_ranges) push_head_keys(s, &v->layer->shape);
}

// Starts loading (`in`) or storing a layer's kept keys and values: of all tokens, or of chunk c.
static void kept_keys_move(const Visit *v, PageSlot *slot, int in) {
    StreamBP *s = v->s;
    const size_t size = dtype_size(s->model->dtype);
    const Range tokens = {in ? 0 : v->c.token, in ? s->now.N : v->c.n};
    const Pager pager = in ? layer_pager(&s->memory, PLACED_KEPT) : chunk_pager(&s->memory, PLACED_KEPT, 1);
    if (!keeps_off_device(v) || !keeps(v, LEVEL_PRODUCTS)) return;
    for (int i = 0; i < KEY_TENSORS; i++) {
        const size_t width = key_width(&v->layer->shape, (KeyTensor)i);
        if (layer_keeps_key(v->layer, (KeyTensor)i))
            page_move(pager, slot, in, stored_row(s, *key_tensor(s, (KeyTensor)i), tokens.begin, width),
                      stored_row(s, kept_keys(s, v->l, (KeyTensor)i), tokens.begin, width),
                      tokens.count * width * size);
    }
}

// Loads a layer's kept keys and values from off-device.
static void kept_keys_load(const Visit *v) {
    StreamBP *s = v->s;
    kept_keys_move(v, &s->kept.keys_slot, 1);
    page_await(s->ops, &s->kept.keys_slot);
}

// ---- states of linear attention -------------------------------------------------------------------------------------
static size_t states_of_layer(const StreamBP *s) {
    return states_kept(layer_chunk(s), chunks_of_range(s, 0)) + states_kept(layer_chunk(s), chunks_of_range(s, 1));
}

// Pushes the states at intervals and at forks of all layers that keep them.
static void push_kept_states(StreamBP *s) {
    const LinearShape d = shapes_of(s->model).linear;
    size_t layers = 0;
    for (size_t l = 0; l < s->model->config.num_hidden_layers; l++)
        layers += has_state(layer_of(s, l)) && layer_of(s, l)->level >= LEVEL_PRODUCTS;
    if (!layers) return;
    const size_t states = layers * states_of_layer(s);
    s->kept.state = push_summed(s, SHARE_KV, "states at intervals of all layers", states * d.S);
    s->kept.columns =
        push_stored(s, SHARE_KV, "the convolution's inputs at intervals of all layers", states * d.columns);
    if (!has_forks(s)) return;
    s->kept.fork = push_summed(s, SHARE_KV, "states at forks of all layers", layers * fork_count(s) * d.S);
    s->kept.fork_columns =
        push_stored(s, SHARE_KV, "the convolution's inputs at forks of all layers", layers * fork_count(s) * d.columns);
}

// Pushes the visited layer's states: the current state, in backward its gradient, and the states at intervals and at
// forks, unless they are kept.
static void push_layer_states(const Visit *v) {
    StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    size_t before = 0;
    push_states(s, 1, 1, 0);
    if (s->now.pass == PASS_FORWARD_ONLY) push_range_states(s, 1);
    if (s->now.pass == PASS_BACKWARD) push_state_gradients(s, !keeps(v, LEVEL_PRODUCTS));
    push_fork_states(s, !keeps(v, LEVEL_PRODUCTS));
    s->linear.kept_half = states_kept(layer_chunk(s), chunks_of_range(s, 0));
    for (size_t l = 0; l < v->l; l++) before += has_state(layer_of(s, l)) && layer_of(s, l)->level >= LEVEL_PRODUCTS;
    if (!keeps(v, LEVEL_PRODUCTS)) return;
    s->linear.kept = summed_row(s, s->kept.state, before * states_of_layer(s), d->S);
    s->linear.kept_columns = stored_row(s, s->kept.columns, before * states_of_layer(s), d->columns);
    if (!has_forks(s)) return;
    s->linear.fork = summed_row(s, s->kept.fork, before * fork_count(s), d->S);
    s->linear.fork_columns = stored_row(s, s->kept.fork_columns, before * fork_count(s), d->columns);
}

// ---- activations in flight ------------------------------------------------------------------------------------------
// Pushes the memory of a walk over the layers: slots through which kept tensors of chunks are transferred, and the
// keys and values that layers share.
static void kept_begin(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    if (s->now.pass == PASS_FORWARD_ONLY) push_lent_keys(s, 0);
    if (s->now.pass == PASS_BACKWARD) push_lent_keys(s, 1);
    for (size_t i = 0; i < 2 && s->now.pass >= PASS_FORWARD; i++)
        for (size_t j = 0; j < ACTIVATION_ROWS; j++) {
            const ActivationRow *row = &layer_of(s, 0)->row[j];
            size_t width = 0;
            for (size_t l = 0; l < L; l++)
                if (layer_of(s, l)->off && keeps_row(layer_of(s, l), j))
                    width = max_size(width, layer_of(s, l)->row[j].width);
            if (width)
                s->kept.chunk[i][j] = arena_push(s->arena, SHARE_WORKSPACE, row->name[2] ? row->name[2] : row->name[0],
                                                 layer_chunk(s) * width, row_size(s, row));
        }
}

// Waits for all transfers, before their memory is popped.
static void kept_finish(const StreamBP *s) {
    for (size_t i = 0; i < 2; i++) page_finish(s->ops, &s->kept.slot[i]), page_await(s->ops, &s->kept.slot[i]);
}

// Starts loading (`in`) or storing token rows `rows` of a layer's kept tensors. device[i]: tensor of table row i
static void kept_move(StreamBP *s, size_t l, Range rows, size_t slot, int in, void *const device[ACTIVATION_ROWS]) {
    Residency *r = &s->memory;
    const Pager pager = rows.count == s->now.rows ? layer_pager(r, PLACED_KEPT) : chunk_pager(r, PLACED_KEPT, 1);
    if (!layer_of(s, l)->off || !rows.count) return;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &layer_of(s, l)->row[i];
        if (keeps_row(layer_of(s, l), i))
            page_move(pager, &s->kept.slot[slot], in, device[i], kept_row(s, l, i, rows.begin),
                      rows.count * row->width * row_size(s, row));
    }
}

// Starts loading a whole layer's kept tensors into a's.
static void kept_load_layer(const Visit *v, const Activations *a) {
    const Range all = {0, v->s->now.rows};
    void *device[ACTIVATION_ROWS];
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) device[i] = activation_get(a, &v->layer->row[i]);
    kept_move(v->s, v->l, all, 0, 1, device);
}

// Starts storing chunk c's kept tensors, in a forward pass.
static void kept_store(const Visit *v, const Activations *a) {
    const Range rows = {v->c.row, v->c.n};
    void *device[ACTIVATION_ROWS];
    if (v->s->now.pass != PASS_FORWARD || !keeps_off_device(v)) return;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) device[i] = activation_get(a, &v->layer->row[i]);
    kept_move(v->s, v->l, rows, kept_slot(v->s, v->l, v->c.index), 0, device);
    kept_keys_move(v, &v->s->kept.slot[kept_slot(v->s, v->l, v->c.index)], 0);
}

// Starts loading a layer's kept tensors of chunk `index`.
static void kept_load(StreamBP *s, size_t l, size_t index) {
    const size_t chunk = layer_chunk(s), first = range_chunks(s, 0, chunk), half = index >= first;
    const Range tokens = range_chunk_tokens(s, half, half ? index - first : index, chunk);
    const Range rows = {own_row(s, tokens.begin), tokens.count};
    const size_t slot = kept_slot(s, l, index);
    kept_move(s, l, rows, slot, 1, s->kept.chunk[slot]);
}

// Tells whether the visit before the visited layer's last chunk loads that chunk: a layer after this one did so.
static int loads_ahead(const StreamBP *s, size_t l) {
    return s->now.ranks == 1 && l + 1 < s->model->config.num_hidden_layers && layer_of(s, l + 1)->off;
}

// Starts loading the kept tensors that backward visits next: of chunk index - 1, or after chunk 0 of the last chunk of
// the layer before. Before the last chunk `index` is chunk_count. In the dry run each visit of a chunk loads the
// chunk's tensors, as the next visit may be of any chunk.
static void kept_prefetch(const Visit *v, size_t index) {
    StreamBP *s = v->s;
    if (!walk_is_in_order(&s->memory.walk) || !keeps_off_device(v)) return;
    if (index ? index < chunk_count(s) || !loads_ahead(s, v->l) : v->l > 0 && loads_ahead(s, v->l - 1))
        kept_load(s, index ? v->l : v->l - 1, (index ? index : chunk_count(s)) - 1);
}

// Points chunk c's kept tensors at their memory. Off-device, waits for the transfers of their slot.
static void kept_await(const Visit *v, Activations *a) {
    StreamBP *s = v->s;
    const size_t slot = kept_slot(s, v->l, v->c.index);
    kept_set(v, a);
    if (!keeps_off_device(v) || s->now.pass == PASS_RESTORE) return;
    if (!walk_is_in_order(&s->memory.walk) && s->now.pass == PASS_BACKWARD) {
        const Range rows = {v->c.row, v->c.n};
        kept_move(s, v->l, rows, slot, 1, s->kept.chunk[slot]);
    }
    page_finish(s->ops, &s->kept.slot[slot]), page_await(s->ops, &s->kept.slot[slot]);
}

#endif
