/*
Method mst (Mini-Sequence, arXiv 2407.15892): gradient checkpointing whose attention takes the whole sequence at once,
its MLP and its head a chunk at a time. The memory of a layer is that of attention over N tokens, and of the MLP over n:

    mst   N (L+1) C s  +  max(N A1 s + 2 N KV (s + 4) + n A2 s, m (V + C) s)

A1 and A2 are attention's and the MLP's part of a token's activations A (streambp.h). FLOPs are those of checkpoint.
The default number of chunks is that paper's: FF/C for the MLP, V/C for the head (plan/plan.h).
*/
#ifndef LLMC_MINI_SEQUENCE_H
#define LLMC_MINI_SEQUENCE_H
#include "streambp.h"

// Number of the MLP's chunks, and the index-th one
static size_t mlp_chunk_count(const StreamBP *s) { return range_chunks(s, 0, effective_chunk(s, s->setup->chunk)); }
static Chunk mlp_chunk_at(const StreamBP *s, size_t index) {
    return range_chunk(s, 0, index, effective_chunk(s, s->setup->chunk));
}

// Begins chunk c's MLP activations: y is its rows of all tokens' y.
static Activations mlp_part(const StreamBP *s, Chunk c, const Activations *all) {
    Activations a = {0};
    a.mark = arena_mark(s->arena);
    a.y = stored_row(s, all->y, c.row, s->model->config.hidden_size);
    return a;
}

static void mst_layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    weights_prefetch(&s->memory, l);
    const Chunk all = visit(s, chunk_at(s, 0));
    Activations a = chunk_activations(s, l, all);
    norm1_forward(s, l, all, w, &a);
    mixer_keys(s, l, all, w, &a);
    mixer_forward(s, l, all, w, &a);
    for (size_t i = 0; i < mlp_chunk_count(s); i++) {
        const Chunk c = visit(s, mlp_chunk_at(s, i));
        Activations part = mlp_part(s, c, &a);
        push_mlp_activations(s, l, &part, c.n);
        mlp_forward(s, l, c, w, &part);
        drop(s, &part);
    }
    drop(s, &a);
}

static void mst_layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    const size_t L = s->model->config.num_hidden_layers;
    mixer_begin(s, l, w);
    weights_prefetch(&s->memory, l);
    mixer_restore(s, l, w, 0);
    const Chunk all = visit(s, chunk_at(s, 0));
    Activations a = recompute(s, l, all, w);
    for (size_t i = mlp_chunk_count(s); i-- > 0;) {
        const Chunk c = visit(s, mlp_chunk_at(s, i));
        Activations part = mlp_part(s, c, &a);
        mlp_backward(s, l, c, w, dw, &part, layer_input(s, L, c.row));
        drop(s, &part);
    }
    visit(s, all);
    mixer_backward(s, l, all, w, dw, &a, layer_input(s, L, all.row));
    input_done(s, l, all);
    drop(s, &a);
}

static const LayerLoops mst_loops = {mst_layer_forward, mst_layer_backward};

#endif
