/*
Linear attention (Gated DeltaNet, arXiv 2412.06464). A state S, [DK,DV] for each head, joins the chunks of a layer: it
passes from token to token, and its gradient passes back. Backward needs S before each chunk. S is kept at intervals and
recomputed between them (stream/linear_memory.h).
*/
#ifndef LLMC_LINEAR_ATTENTION_H
#define LLMC_LINEAR_ATTENTION_H
#include "branch.h"

// Returns projected[n,E] from the first column of a part on.
static Stored *projected_part(const StreamBP *s, Stored *projected, LayerTensor part) {
    Shapes d = shapes_of(s->model);
    const size_t z = d.W, b = z + d.DVs, column = part == IN_Z_WEIGHT ? z : part == IN_B_WEIGHT ? b : b + d.HV;
    return stored_row(s, projected, part == IN_QKV_WEIGHT ? 0 : column, 1);
}

// mixed[n,W] = silu(causal convolution of q | k | v). Its last inputs pass from chunk to chunk in layer_columns.
static void convolution_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    const DeltaShape shape = delta_shape(s, c);
    s->ops->conv_forward(a->mixed, layer_columns(s, l), a->projected, weight_of(s, w, CONV_WEIGHT), &shape);
}

// Passes the state through chunk c. out[n,HV*DV]: the delta rule's output, or NULL. transfer: T of scan.h, or NULL
static void delta_step(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, Stored *out,
                       Summed *transfer) {
    const DeltaShape shape = delta_shape(s, c);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "delta rule's scratch", s->ops->delta_forward_scratch(&shape));
    s->ops->delta_forward(out, layer_state(s, l), transfer, a->mixed, projected_part(s, a->projected, IN_B_WEIGHT),
                          projected_part(s, a->projected, IN_A_WEIGHT), weight_of(s, w, A_LOG),
                          weight_of(s, w, DT_BIAS), &shape, scratch);
    arena_pop(s->arena, mark);
}

static void gated_norm_forward(const StreamBP *s, Chunk c, GroupWeights w, const Activations *a) {
    Shapes d = shapes_of(s->model);
    s->ops->gated_norm_forward(a->delta_norm, a->delta_out, projected_part(s, a->projected, IN_Z_WEIGHT),
                               weight_of(s, w, GATED_NORM), c.n, d.HV, d.DV, d.E, s->model->config.norm_eps);
}

// norm 1, S before chunk c -> y, S after chunk c
static void linear_attention_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a) {
    linear_forward(s, l, c, w, IN_QKV_WEIGHT, a->projected, a->norm1, NULL);
    convolution_forward(s, l, c, w, a);
    delta_step(s, l, c, w, a, a->delta_out, NULL);
    gated_norm_forward(s, c, w, a);
    branch_inner(s, l, c, w, linear_branch, a->attention_branch, a->delta_norm);
    branch_out(s, l, c, w, linear_branch, a->y, a->attention_branch, a->delta_norm, layer_input(s, l, c.row));
}

// dgated[n,HV*DV]: in, gradient of delta_norm; out, of delta_out. Writes z's part of dprojected[n,E].
static void gated_norm_backward(const StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                                Stored *dgated, Stored *dprojected) {
    Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "gated norm's scratch", s->ops->gated_norm_backward_scratch(c.n, d.HV, d.DV));
    s->ops->gated_norm_backward(dgated, projected_part(s, dprojected, IN_Z_WEIGHT), sum_of(s, dw, GATED_NORM), dgated,
                                a->delta_out, projected_part(s, a->projected, IN_Z_WEIGHT), weight_of(s, w, GATED_NORM),
                                c.n, d.HV, d.DV, d.E, s->model->config.norm_eps, scratch);
    arena_pop(s->arena, mark);
}

// ddelta_out[n,HV*DV] -> dprojected[n,E] except z's part; dW +=. dstate, dcolumns: in, gradients at the chunk's end;
// out, at its start. before: the state at its start
static void delta_backward(const StreamBP *s, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                           KeptState before, const Stored *ddelta_out, Stored *dprojected) {
    const DeltaShape shape = delta_shape(s, c);
    const size_t mark = arena_mark(s->arena);
    const size_t conv = s->ops->conv_backward_scratch(&shape), delta = s->ops->delta_backward_scratch(&shape);
    Stored *dmixed = push_stored(s, SHARE_WORKSPACE, "gradient behind the convolution", c.n * shapes_of(s->model).W);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "linear attention's scratch", max_size(conv, delta));
    s->ops->delta_backward(dmixed, projected_part(s, dprojected, IN_B_WEIGHT),
                           projected_part(s, dprojected, IN_A_WEIGHT), sum_of(s, dw, A_LOG), sum_of(s, dw, DT_BIAS),
                           s->linear.dstate, ddelta_out, a->mixed, projected_part(s, a->projected, IN_B_WEIGHT),
                           projected_part(s, a->projected, IN_A_WEIGHT), weight_of(s, w, A_LOG),
                           weight_of(s, w, DT_BIAS), before.state, &shape, scratch);
    s->ops->conv_backward(dprojected, sum_of(s, dw, CONV_WEIGHT), s->linear.dcolumns, dmixed, a->projected,
                          before.columns, weight_of(s, w, CONV_WEIGHT), &shape, scratch);
    arena_pop(s->arena, mark);
}

// dx of y, dS after chunk c -> dx of x_l, dS before it
static void linear_attention_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw,
                                      Activations *a, Stored *dx) {
    Shapes d = shapes_of(s->model);
    a->dnorm1 = push_norm1_gradient(s, c, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dgated = push_stored(s, SHARE_WORKSPACE, "gradient of the delta rule's output", c.n * d.DVs);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", c.n * d.E);
    branch_out_backward(s, l, c, w, dw, linear_branch, dgated, dx, a->attention_branch, a->delta_norm);
    gated_norm_backward(s, c, w, dw, a, dgated, dprojected);
    delta_backward(s, c, w, dw, a, state_before(s, c), dgated, dprojected);
    linear_backward(s, l, c, w, dw, IN_QKV_WEIGHT, a->dnorm1, dprojected, a->norm1, adds_to_dx(s));
    norm1_backward(s, l, c, w, dw, a, dx);
    arena_pop(s->arena, mark);
}

// Recomputes the delta rule's inputs of chunk c, q, k, v, b and a, or in backward returns what was kept (method full).
static Activations state_activations(const StreamBP *s, size_t l, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    Activations a = norm1_activations(s, l, c, w);
    if (a.mixed) return a;
    a.projected = push_stored(s, SHARE_WORKSPACE, "inputs of linear attention", c.n * d.E);
    a.mixed = push_stored(s, SHARE_WORKSPACE, "after the convolution", c.n * d.W);
    linear_forward_part(s, l, c, w, linear_part(s, l, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT), a.projected,
                        a.norm1, NULL);
    linear_forward_part(s, l, c, w, linear_part(s, l, IN_QKV_WEIGHT, IN_B_WEIGHT, IN_A_WEIGHT),
                        projected_part(s, a.projected, IN_B_WEIGHT), a.norm1, NULL);
    convolution_forward(s, l, c, w, &a);
    return a;
}

// Passes the state through chunk c; computes nothing else of the layer. transfer: T of scan.h, or NULL
static void chunk_state(const StreamBP *s, size_t l, Chunk c, GroupWeights w, Summed *transfer) {
    Activations a = state_activations(s, l, c, w);
    delta_step(s, l, c, w, &a, NULL, transfer);
    drop(s, &a);
}

// Walks the state through `chunks` of a range, from the one saved before the first. Saves it every `spacing` chunks.
static void states_walk(StreamBP *s, size_t l, GroupWeights w, size_t half, Range chunks, size_t spacing) {
    if (chunks.count) state_copy(s, kept_state(s, half, chunks.begin), 0);
    for (size_t i = 0; i < chunks.count; i++) {
        chunk_state(s, l, visit(s, range_chunk(s, half, chunks.begin + i, layer_chunk(s))), w, NULL);
        if ((i + 1) % spacing == 0) state_copy(s, kept_state(s, half, chunks.begin + i + 1), 1);
    }
}

// Dry run: one chunk of a range counts for `visits` of them.
static void states_count(StreamBP *s, size_t l, GroupWeights w, size_t half, size_t visits) {
    if (!visits) return;
    const Chunk c = visit(s, range_chunk(s, half, 0, layer_chunk(s)));
    s->ops->repeat(s->memory.layers_repeat * (double)visits);
    chunk_state(s, l, c, w, NULL);
}

// Saves states at intervals; their gradient at the end of the sequence = 0. The dry run counts all walks of the layer.
static void states_begin(StreamBP *s, size_t l, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    s->ops->zero(s->linear.dstate, d.S * d.summed);
    if (d.columns) s->ops->zero(s->linear.dcolumns, d.columns * d.summed);
    for (size_t half = 0; half < 2 && !keeps_activations(s); half++) {
        const size_t chunks = chunks_of_range(s, half), spacing = state_spacing(layer_chunk(s), 0);
        const Range all = {0, chunks ? (chunks - 1) / spacing * spacing : 0};
        if (visits_shapes(s))
            states_count(s, l, w, half, chunks_visited_again(layer_chunk(s), 0, chunks));
        else
            states_walk(s, l, w, half, all, spacing);
    }
}

// Recomputes the states of the block that ends at chunk `index` of a range, from the nearest saved state. No-op for
// other chunks.
static void states_restore(StreamBP *s, size_t l, GroupWeights w, size_t half, size_t index) {
    Range block = {0, chunks_of_range(s, half)}; // the level's block that has the chunk
    for (size_t level = 0; !visits_shapes(s) && !keeps_activations(s); level++) {
        const size_t spacing = state_spacing(layer_chunk(s), level), end = block.begin + block.count;
        const Range chunks = {block.begin, (block.count - 1) / spacing * spacing};
        if (level && index + 1 == end) states_walk(s, l, w, half, chunks, spacing);
        block.begin += (index - block.begin) / spacing * spacing;
        block.count = min_size(spacing, end - block.begin);
        if (spacing == 1) break;
    }
}

#endif
