/*
--keep attention: each layer's attention output and log-sum-exp stay from a stream's forward pass to its backward pass,
where attention's forward is then not run again; queries, keys and values are projected again as ever. What stays is what
would be computed again: to the bit, but in layers with a window, whose keys are projected in other pieces backward.

It is on the device, or in host memory. Then a chunk's goes out behind its attention, beside the rest of its layer, and
comes back one visit before it is needed, through two chunks' worth of device memory by turns. Behind a ring (ring.h),
which has these of a whole layer at once, it is a layer's at a time.
*/
#ifndef LLMC_KEPT_ATTENTION_H
#define LLMC_KEPT_ATTENTION_H
#include "stream.h"

static int saves_attention(const StreamBP *s) { return s->kept_attention.attention_out != NULL; }

static int saves_in_host_memory(const StreamBP *s) { return saves_attention(s) && s->keep == KEEP_IN_HOST_MEMORY; }

// Whether attention's forward is behind us.
static int attention_saved(const StreamBP *s) { return saves_attention(s) && s->kept_attention.backward; }

// From the own token in row `begin` of layer l on, wherever it is kept.
static Stored *kept_attention_out(const StreamBP *s, size_t l, size_t begin) {
    Shapes d = shapes_of(s->model);
    return (Stored *)at(s->kept_attention.attention_out, (l * s->own_tokens + begin) * d.Q, d.stored);
}

static Summed *kept_lse(const StreamBP *s, size_t l, size_t begin) {
    Shapes d = shapes_of(s->model);
    return (Summed *)at(s->kept_attention.lse, (l * s->own_tokens + begin) * d.NH, d.summed);
}

// ---- of a pass --------------------------------------------------------------------------------------------------------
// Room for all layers' (method full keeps them anyway).
static void push_kept_attention(StreamBP *s) {
    Shapes d = shapes_of(s->model);
    Arena *place = s->keep == KEEP_IN_HOST_MEMORY ? &s->host : s->arena;
    const size_t rows = d.L * s->own_tokens;
    KeptAttention *kept = &s->kept_attention;
    memset(kept, 0, sizeof(*kept));
    if (s->keep == KEEP_NOTHING || s->method == METHOD_FULL) return;
    kept->attention_out =
        (Stored *)arena_push(place, SHARE_KEPT, "attention output of all layers", rows * d.Q, d.stored);
    kept->lse = (Summed *)arena_push(place, SHARE_KEPT, "log-sum-exp of all layers", rows * d.NH, d.summed);
}

static void pop_kept_attention(StreamBP *s, size_t host_mark) {
    memset(&s->kept_attention, 0, sizeof(s->kept_attention));
    arena_pop(&s->host, host_mark);
}

// ---- of a walk over the layers, in chunks of `chunk` tokens ------------------------------------------------------------
static void kept_attention_begin(StreamBP *s, size_t chunk, int backward) {
    Shapes d = shapes_of(s->model);
    KeptAttention *kept = &s->kept_attention;
    const size_t turns = s->own_tokens > chunk ? 2 : 1;
    kept->backward = backward, kept->chunk = chunk;
    for (size_t i = 0; i < turns && saves_in_host_memory(s); i++) {
        kept->chunk_attention_out[i] =
            push_stored(s, SHARE_WORKSPACE, "attention output between host and device", chunk * d.Q);
        kept->chunk_lse[i] = push_summed(s, SHARE_WORKSPACE, "log-sum-exp between host and device", chunk * d.NH);
        kept->ticket[i] = 0;
    }
}

// All transfers of what is about to be popped are done.
static void kept_attention_finish(StreamBP *s) {
    KeptAttention *kept = &s->kept_attention;
    for (size_t i = 0; i < 2 && saves_in_host_memory(s); i++) {
        s->ops->await_transfer(kept->ticket[i]);
        kept->ticket[i] = 0;
    }
}

// ---- transfers of n rows from `begin` on; turn: 0 or 1, whose ticket it is -------------------------------------------
static void kept_attention_store(StreamBP *s, size_t l, Range rows, size_t turn, const Stored *attention_out,
                                 const Summed *lse) {
    Shapes d = shapes_of(s->model);
    if (!saves_in_host_memory(s) || !rows.count) return;
    s->ops->store(kept_attention_out(s, l, rows.begin), attention_out, rows.count * d.Q * d.stored);
    s->kept_attention.ticket[turn] = s->ops->store(kept_lse(s, l, rows.begin), lse, rows.count * d.NH * d.summed);
}

static void kept_attention_load(StreamBP *s, size_t l, Range rows, size_t turn, Stored *attention_out, Summed *lse) {
    Shapes d = shapes_of(s->model);
    if (!saves_in_host_memory(s) || !rows.count) return;
    s->ops->load(attention_out, kept_attention_out(s, l, rows.begin), rows.count * d.Q * d.stored);
    s->kept_attention.ticket[turn] = s->ops->load(lse, kept_lse(s, l, rows.begin), rows.count * d.NH * d.summed);
}

static void chunk_attention_store(StreamBP *s, size_t l, Chunk c, const Activations *a) {
    const Range rows = {c.begin, c.n};
    kept_attention_store(s, l, rows, c.visit % 2, a->attention_out, a->lse);
}

// Asks for the chunk of a visit. Its memory is that of the visit before the last one.
static void chunk_attention_load(StreamBP *s, size_t l, size_t visit) {
    KeptAttention *kept = &s->kept_attention;
    const size_t first = range_visits(s, 0, kept->chunk), half = visit >= first;
    const Range tokens = visited_tokens(s, half, half ? visit - first : visit, kept->chunk);
    const Range rows = {own_row(s, tokens.begin), tokens.count};
    kept_attention_load(s, l, rows, visit % 2, kept->chunk_attention_out[visit % 2], kept->chunk_lse[visit % 2]);
}

// ---- activations ------------------------------------------------------------------------------------------------------
// Of chunk c up to its MLP: kept, or pushed, or where the ring or --keep attention has some of them its rows.
static Activations attention_activations(StreamBP *s, size_t l, Chunk c) {
    Shapes d = shapes_of(s->model);
    Activations a;
    if (s->kept.norm1) return kept_activations(s, l, c.begin);
    push_attention_activations(s, &a, c.n);
    if (s->ring_layer.q) {
        a.q = (Stored *)at(s->ring_layer.q, c.begin * d.Q, d.stored);
        a.attention_out = (Stored *)at(s->ring_layer.attention_out, c.begin * d.Q, d.stored);
        a.lse = (Summed *)at(s->ring_layer.lse, c.begin * d.NH, d.summed);
    } else if (saves_in_host_memory(s)) {
        s->ops->await_transfer(s->kept_attention.ticket[c.visit % 2]); // its memory is free, or its contents are there
        a.attention_out = s->kept_attention.chunk_attention_out[c.visit % 2],
        a.lse = s->kept_attention.chunk_lse[c.visit % 2];
    } else if (saves_attention(s)) {
        a.attention_out = kept_attention_out(s, l, c.begin), a.lse = kept_lse(s, l, c.begin);
    }
    return a;
}

#endif
