/*
Method mst (Mini-Sequence, arXiv 2407.15892): gradient checkpointing in which attention takes the whole sequence at
once, the MLP and the head a chunk at a time. A layer needs memory for attention over N tokens, for the MLP over n:

    mst   N (L+1) C s  +  max(N A1 s + 2 N KV (s + 4) + n A2 s, m (V + C) s)

A1 and A2 are attention's and the MLP's part of a token's activations A (streambp.h). FLOPs equal checkpoint's. The
default number of chunks is the Mini-Sequence paper's: FF/C for the MLP, V/C for the head (plan/plan.h).
*/
#ifndef LLMC_MINI_SEQUENCE_H
#define LLMC_MINI_SEQUENCE_H
#include "streambp.h"

// Return the number of the MLP's chunks, and the index-th chunk.
static size_t mlp_chunk_count(const StreamBP *s) { return range_chunks(s, 0, effective_chunk(s, s->setup->chunk)); }
static Chunk mlp_chunk_at(const StreamBP *s, size_t index) {
    return range_chunk(s, 0, index, effective_chunk(s, s->setup->chunk));
}

// Begins the MLP's activations of v's chunk. The input is the chunk's rows of the mixer's output.
static Activations mlp_part(const Visit *v, const Activations *all) {
    Activations a = activations_begin(v);
    a.x[1] = stored_row(v->s, all->x[1], v->c.row, v->layer->shape.C);
    return a;
}

static void mst_layer_forward(Visit *v) {
    StreamBP *s = v->s;
    weights_prefetch(&s->memory, v->l);
    v->c = visit(s, chunk_at(s, 0));
    Activations a = chunk_activations(v);
    if (v->layer->branches == 1) inputs_await(s); // the mixer overwrites x_l, which the MLP's chunks are storing
    output_begin(v, &a, 1);
    branch_in(v, 0, &a);
    mixer_keys(v, &a);
    mixer_forward(v, &a);
    kept_store(v, &a);
    for (size_t i = 0; i < mlp_chunk_count(s); i++) {
        v->c = visit(s, mlp_chunk_at(s, i));
        Activations part = mlp_part(v, &a);
        push_side(v, &part, SIDE_MLP);
        mlp_forward(v, &part);
        drop(v, &part);
    }
    drop(v, &a);
}

static void mst_layer_backward(Visit *v) {
    StreamBP *s = v->s;
    mixer_begin(v);
    weights_prefetch(&s->memory, v->l);
    mixer_restore(v, 0);
    const Chunk all = v->c = visit(s, chunk_at(s, 0));
    Activations a = recompute(v);
    for (size_t i = mlp_chunk_count(s); i-- > 0;) {
        v->c = visit(s, mlp_chunk_at(s, i));
        Activations part = mlp_part(v, &a);
        mlp_backward(v, &part, gradient_at(s, v->c.row));
        drop(v, &part);
    }
    v->c = visit(s, all);
    mixer_backward(v, &a, gradient_at(s, all.row));
    input_done(s, v->l, all);
    drop(v, &a);
}

static const LayerLoops mst_loops = {mst_layer_forward, mst_layer_backward};

#endif
