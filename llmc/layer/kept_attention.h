/*
--keep attention: each layer's attention output and log-sum-exp stay from forward to backward, which then skips
attention's forward; queries, keys and values are projected again. The kept tensors equal the recomputed ones to the
bit, except in layers with a window: backward projects their keys in other chunks.

The kept tensors lie on the device or off-device. Off-device, forward stores a chunk's tensors after its attention,
while the rest of the layer runs. Backward loads them one chunk ahead. Two slots of one chunk each take turns. A ring
(orders/ring.h) has a whole layer's tensors at once and moves them a layer at a time.
*/
#ifndef LLMC_KEPT_ATTENTION_H
#define LLMC_KEPT_ATTENTION_H
#include "activations.h"

static int saves_attention(const StreamBP *s) { return keeps(s, LEVEL_ATTENTION) && !keeps_activations(s); }
static int saves_off_device(const StreamBP *s) { return saves_attention(s) && is_off_device(&s->memory, PLACED_KEPT); }

// Tells whether the current pass reads attention's output in place of computing it.
static int attention_saved(const StreamBP *s) {
    return saves_attention(s) &&
           (s->now.pass == PASS_BACKWARD || (s->now.pass == PASS_RESTORE && !saves_off_device(s)));
}

// Pushes the memory of a walk over the layers: slots through which kept tensors of chunks are transferred, and the
// keys and values that layers share.
static void kept_begin(StreamBP *s) {
    const size_t chunk = layer_chunk(s), slots = s->now.rows > chunk ? 2 : 1;
    if (s->now.pass == PASS_FORWARD_ONLY) push_lent_keys(s, 0);
    if (s->now.pass == PASS_BACKWARD) push_lent_keys(s, 1);
    for (size_t i = 0; i < slots && saves_off_device(s); i++)
        for (size_t j = 0; j < ACTIVATION_ROWS; j++) {
            const ActivationRow *row = &layer_of(s, 0)->row[j];
            size_t width = 0;
            for (size_t l = 0; l < s->model->config.num_hidden_layers; l++)
                width = max_size(width, layer_of(s, l)->row[j].width);
            if (row->level == LEVEL_ATTENTION && width)
                s->kept.chunk[i][j] =
                    arena_push(s->arena, SHARE_WORKSPACE, row->name[2], chunk * width, row_size(s, row));
        }
}

// Waits for all transfers, before their memory is popped.
static void kept_finish(const StreamBP *s) {
    for (size_t i = 0; i < 2; i++) page_finish(s->ops, &s->kept.slot[i]), page_await(s->ops, &s->kept.slot[i]);
}

// ---- transfers of rows of a layer, through slot 0 or 1 --------------------------------------------------------------
// Starts loading (`in`) or storing token rows `rows` of a layer's kept tensors. device[i]: tensor of table row i
static void kept_move(StreamBP *s, size_t l, Range rows, size_t slot, int in, void *const device[ACTIVATION_ROWS]) {
    Residency *r = &s->memory;
    const Pager pager = rows.count == s->now.rows ? layer_pager(r, PLACED_KEPT) : chunk_pager(r, PLACED_KEPT, 1);
    if (!saves_off_device(s) || !rows.count) return;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &layer_of(s, l)->row[i];
        if (row->width && row->level == LEVEL_ATTENTION)
            page_move(pager, &s->kept.slot[slot], in, device[i], kept_row(s, l, i, rows.begin),
                      rows.count * row->width * row_size(s, row));
    }
}

// Calls kept_move with the tensors of a set of activations.
static void kept_move_set(const Visit *v, const Activations *a, Range rows, size_t slot, int in) {
    void *device[ACTIVATION_ROWS];
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) device[i] = activation_get(a, &v->layer->row[i]);
    kept_move(v->s, v->l, rows, slot, in, device);
}

// Starts storing attention's output of rows `rows`, in a forward pass.
static void kept_store(const Visit *v, const Activations *a, Range rows, size_t slot) {
    if (v->s->now.pass == PASS_FORWARD) kept_move_set(v, a, rows, slot, 0);
}

// Starts loading the kept tensors of chunk index - 1, which backward visits next. Before the last chunk `index` is
// chunk_count. In the dry run each visit of a chunk loads the chunk's tensors, as the next visit may be of any chunk.
static void kept_prefetch(const Visit *v, size_t index) {
    StreamBP *s = v->s;
    const size_t chunk = layer_chunk(s), first = range_chunks(s, 0, chunk);
    if (!index || !saves_off_device(s) || !walk_is_in_order(&s->memory.walk)) return;
    const size_t i = index - 1, half = i >= first;
    const Range tokens = range_chunk_tokens(s, half, half ? i - first : i, chunk);
    const Range rows = {own_row(s, tokens.begin), tokens.count};
    kept_move(s, v->l, rows, i % 2, 1, s->kept.chunk[i % 2]);
}

// Points chunk c's attention output and log-sum-exp at the kept tensors or a slot. Waits for the slot's transfers.
static void kept_attention_set(const Visit *v, Activations *a) {
    StreamBP *s = v->s;
    const size_t slot = v->c.index % 2;
    const Range rows = {v->c.row, v->c.n};
    if (!saves_off_device(s)) {
        if (saves_attention(s)) kept_set(v, a, LEVEL_ATTENTION);
        return;
    }
    int any = 0;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &v->layer->row[i];
        if (!row->width || row->level != LEVEL_ATTENTION) continue;
        activation_set(a, row, s->kept.chunk[slot][i]), any = 1;
    }
    if (!any) return;
    if (!walk_is_in_order(&s->memory.walk) && s->now.pass == PASS_BACKWARD)
        kept_move(s, v->l, rows, slot, 1, s->kept.chunk[slot]);
    page_finish(s->ops, &s->kept.slot[slot]), page_await(s->ops, &s->kept.slot[slot]);
}

#endif
