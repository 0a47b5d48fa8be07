/*
--keep attention: each layer's attention output and log-sum-exp are saved from forward to backward, which then skips
attention's forward; queries, keys and values are projected again. The saved values are what would be computed again: to
the bit, but in layers with a window, whose keys are projected in other chunks backward.

They lie on the device, or in host memory. In host memory a chunk's values leave behind its attention, beside the rest
of its layer, and come back one chunk before they are needed, through two chunks' worth of device memory by turns. A
ring (llmc/orders/ring.h), which has those of a whole layer at once, moves a layer at a time.
*/
#ifndef LLMC_SAVED_ATTENTION_H
#define LLMC_SAVED_ATTENTION_H
#include "chunks.h"

static int saves_attention(const StreamBP *s) { return s->saved.attention_out != NULL; }
static int saves_in_host_memory(const StreamBP *s) { return saves_attention(s) && s->keep == KEEP_IN_HOST_MEMORY; }

// Attention output was saved: skip recomputation.
static int attention_saved(const StreamBP *s) { return saves_attention(s) && s->pass == PASS_BACKWARD; }

// Saved values of layer l from row `row` on
static Stored *saved_attention_out(const StreamBP *s, size_t l, size_t row) {
    Shapes d = shapes_of(s->model);
    return stored_row(s, s->saved.attention_out, l * s->rows + row, d.Q);
}

static Summed *saved_lse(const StreamBP *s, size_t l, size_t row) {
    return summed_row(s, s->saved.lse, l * s->rows + row, shapes_of(s->model).NH);
}

// ---- room -----------------------------------------------------------------------------------------------------------
// Room for all layers' values in a forward and backward pass; method full keeps them anyway.
static void saved_attention_push(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    Arena *memory = s->keep == KEEP_IN_HOST_MEMORY ? &s->host : s->arena;
    const size_t rows = d.L * s->rows;
    if (s->keep == KEEP_NOTHING || s->method == METHOD_FULL) return;
    s->saved.attention_out =
        (Stored *)arena_push(memory, SHARE_KEPT, "attention output of all layers", rows * d.Q, d.stored);
    s->saved.lse = (Summed *)arena_push(memory, SHARE_KEPT, "log-sum-exp of all layers", rows * d.NH, d.summed);
}

static void saved_attention_pop(StreamBP *s, size_t host_mark) {
    memset(&s->saved, 0, sizeof(s->saved));
    arena_pop(&s->host, host_mark);
}

// Room for the chunks in transfer during a walk over the layers
static void saved_attention_begin(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    const size_t chunk = effective_chunk(s, s->chunk), slots = s->rows > chunk ? 2 : 1;
    SavedAttention *saved = &s->saved;
    for (size_t i = 0; i < slots && saves_in_host_memory(s); i++) {
        saved->chunk_attention_out[i] =
            push_stored(s, SHARE_WORKSPACE, "attention output between host and device", chunk * d.Q);
        saved->chunk_lse[i] = push_summed(s, SHARE_WORKSPACE, "log-sum-exp between host and device", chunk * d.NH);
        saved->ticket[i] = 0;
    }
}

// Waits for all transfers, before their memory is popped.
static void saved_attention_finish(StreamBP *s) {
    for (size_t i = 0; i < 2 && saves_in_host_memory(s); i++) {
        s->ops->await_transfer(s->saved.ticket[i]);
        s->saved.ticket[i] = 0;
    }
}

// ---- transfers of rows of a layer; slot: 0 or 1, whose ticket it is -------------------------------------------------
static void saved_attention_store(StreamBP *s, size_t l, Range rows, size_t slot, const Stored *attention_out,
                                  const Summed *lse) {
    Shapes d = shapes_of(s->model);
    if (!saves_in_host_memory(s) || !rows.count) return;
    s->ops->store(saved_attention_out(s, l, rows.begin), attention_out, rows.count * d.Q * d.stored);
    s->saved.ticket[slot] = s->ops->store(saved_lse(s, l, rows.begin), lse, rows.count * d.NH * d.summed);
}

static void saved_attention_load(StreamBP *s, size_t l, Range rows, size_t slot, Stored *attention_out, Summed *lse) {
    Shapes d = shapes_of(s->model);
    if (!saves_in_host_memory(s) || !rows.count) return;
    s->ops->load(attention_out, saved_attention_out(s, l, rows.begin), rows.count * d.Q * d.stored);
    s->saved.ticket[slot] = s->ops->load(lse, saved_lse(s, l, rows.begin), rows.count * d.NH * d.summed);
}

static void saved_attention_store_chunk(StreamBP *s, size_t l, Chunk c, const Stored *attention_out,
                                        const Summed *lse) {
    const Range rows = {c.row, c.n};
    saved_attention_store(s, l, rows, c.index % 2, attention_out, lse);
}

// Asks for the values of the chunk before chunk `index` of a layer (the last one: chunk_count): backward visits it
// next.
static void saved_attention_prefetch(StreamBP *s, size_t l, size_t index) {
    const size_t chunk = effective_chunk(s, s->chunk), first = range_chunks(s, 0, chunk);
    if (!index || !saves_in_host_memory(s)) return;
    const size_t i = index - 1, half = i >= first;
    const Range tokens = range_chunk_tokens(s, half, half ? i - first : i, chunk);
    const Range rows = {own_row(s, tokens.begin), tokens.count};
    saved_attention_load(s, l, rows, i % 2, s->saved.chunk_attention_out[i % 2], s->saved.chunk_lse[i % 2]);
}

// The memory of chunk c's attention output and log-sum-exp, where they are saved: free in forward, filled in backward
static void saved_attention_chunk(StreamBP *s, size_t l, Chunk c, Stored **attention_out, Summed **lse) {
    if (saves_in_host_memory(s)) {
        s->ops->await_transfer(s->saved.ticket[c.index % 2]);
        *attention_out = s->saved.chunk_attention_out[c.index % 2], *lse = s->saved.chunk_lse[c.index % 2];
    } else if (saves_attention(s)) {
        *attention_out = saved_attention_out(s, l, c.row), *lse = saved_lse(s, l, c.row);
    }
}

#endif
