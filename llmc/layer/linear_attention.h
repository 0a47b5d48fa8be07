/*
Linear attention: Gated DeltaNet (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060). They differ in the rule that passes a
state on, and in the order of the projection's columns. A state S, [DK,DV] for each head, joins the chunks of a layer. It
passes from token to token, and its gradient passes back. Backward needs S before each chunk. S is kept at intervals and
recomputed between them (stream/linear_memory.h). In a mixer that is a convolution alone, its last inputs are the state.
*/
#ifndef LLMC_LINEAR_ATTENTION_H
#define LLMC_LINEAR_ATTENTION_H
#include "branch.h"

// Returns projected[n,E] from the first column of a part on.
static Stored *projected_part(const Visit *v, Stored *projected, LayerTensor part) {
    size_t column = 0;
    for (int t = first_of_inputs(v->layer); t < (int)part; t++) column += tensor_rows(v, t);
    return stored_row(v->s, projected, column, 1);
}

// Returns the product of the rule's inputs that skip the convolution: b and a, or Mamba-2's dt.
static Linear rule_inputs(const Visit *v) {
    return linear_part(v, IN_QKV_WEIGHT, v->layer->shape.linear.ssd ? IN_A_WEIGHT : IN_B_WEIGHT, IN_A_WEIGHT);
}

// Returns the part that gates the rule's output.
static LayerTensor gate_of_inputs(const Layer *layer) { return layer->shape.linear.ssd ? IN_GATE_WEIGHT : IN_Z_WEIGHT; }

static DeltaShape visit_delta_shape(const Visit *v) { return delta_shape(v->s, v->c, v->layer->shape.linear); }

// mixed[n,W] = silu(causal convolution of q | k | v). The convolution's last inputs pass on in layer_columns.
static void convolution_forward(const Visit *v, const Activations *a) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    Stored *columns = layer_columns(s, v->l);
    for (StatePiece p = first_piece(s, v->c); p.c.n; p = piece_after(s, v->c, p)) {
        const DeltaShape shape = delta_shape(s, p.c, *d);
        const size_t bytes = d->columns * v->layer->shape.stored;
        if (p.branches && bytes) s->ops->copy(columns, fork_state(s, p.before).columns, bytes);
        s->ops->conv_forward(stored_row(s, a->mixed, p.skipped, d->W), columns,
                             projected_part(v, stored_row(s, a->projected, p.skipped, d->E), IN_QKV_WEIGHT),
                             weight_of(v, CONV_WEIGHT), weight_of(v, CONV_BIAS), &shape);
        if (p.fork != SIZE_MAX && bytes) s->ops->copy(fork_state(s, p.fork).columns, columns, bytes);
    }
}

// Passes the delta rule's state through a piece of chunk c. Arguments: as of delta_step
static void delta_piece(const Visit *v, StatePiece p, const Activations *a, Stored *out, Summed *transfer,
                        Summed *scratch) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    const size_t bytes = d->S * v->layer->shape.summed;
    const DeltaShape shape = delta_shape(s, p.c, *d);
    Summed *state = layer_state(s, v->l);
    Stored *projected = stored_row(s, a->projected, p.skipped, d->E), *to = projected_part(v, projected, IN_A_WEIGHT);
    Stored *x = stored_row(s, a->mixed, p.skipped, d->W);
    out = out ? stored_row(s, out, p.skipped, d->DVs) : NULL;
    if (p.branches) s->ops->copy(state, fork_state(s, p.before).state, bytes);
    if (d->ssd)
        s->ops->ssd_forward(out, state, transfer, x, to, weight_of(v, A_LOG), weight_of(v, SKIP), weight_of(v, DT_BIAS),
                            &shape, scratch);
    else
        s->ops->delta_forward(out, state, transfer, x, projected_part(v, projected, IN_B_WEIGHT), to,
                              weight_of(v, A_LOG), weight_of(v, DT_BIAS), &shape, scratch);
    if (p.fork != SIZE_MAX) s->ops->copy(fork_state(s, p.fork).state, state, bytes);
}

// Passes the delta rule's state through chunk c, if the layer has the rule. out[n,HV*DV]: the rule's output, which the
// gated norm reads, or NULL. transfer: T of scan.h, or NULL
static void delta_step(const Visit *v, const Activations *a, Stored *out, Summed *transfer) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    const DeltaShape shape = visit_delta_shape(v); // a piece needs no more scratch than the chunk
    const size_t mark = arena_mark(s->arena);
    if (!has_rule(v->layer)) return;
    const size_t size = d->ssd ? s->ops->ssd_forward_scratch(&shape) : s->ops->delta_forward_scratch(&shape);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "delta rule's scratch", size);
    for (StatePiece p = first_piece(s, v->c); p.c.n && !is_found(v, a, out); p = piece_after(s, v->c, p))
        delta_piece(v, p, a, out, transfer, scratch);
    if (out && !is_found(v, a, a->delta_norm))
        s->ops->gated_norm_forward(a->delta_norm, out, projected_part(v, a->projected, gate_of_inputs(v->layer)),
                                   weight_of(v, GATED_NORM), v->c.n, d->norms, d->norm, d->E, d->ssd,
                                   s->model->config.norm_eps);
    arena_pop(s->arena, mark);
}

// Saves the state before chunk c at intervals, in a forward pass of a layer that keeps states.
static void state_save(const Visit *v) {
    const StreamBP *s = v->s;
    const size_t first = own_half(s, v->c.token) ? range_chunks(s, 0, layer_chunk(s)) : 0;
    if (s->now.pass != PASS_FORWARD || !keeps(v, LEVEL_PRODUCTS) || s->linear.one_state) return;
    if ((v->c.index - first) % state_spacing(layer_chunk(s), 0) == 0) state_copy(s, state_before(s, v->c), 1);
}

// Runs linear attention: the mixer's norm, S before chunk c -> x_1, S after chunk c.
static void linear_attention_forward(const Visit *v, size_t j, const Activations *a) {
    state_save(v);
    make_product(v, a, IN_QKV_WEIGHT, a->projected, a->norm[0], NULL);
    if (!is_found(v, a, a->mixed)) convolution_forward(v, a);
    delta_step(v, a, a->delta_out, NULL);
    part_product(v, 0, j, a, a->delta_norm);
}

// Turns dgated[n,HV*DV], the gradient of delta_norm, into the gradient of delta_out. Writes z's columns of
// dprojected[n,E]; dW +=
static void gated_norm_backward(const Visit *v, const Activations *a, Stored *dgated, Stored *dprojected) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    const size_t mark = arena_mark(s->arena), n = v->c.n;
    const LayerTensor z = gate_of_inputs(v->layer);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "gated norm's scratch",
                                  s->ops->gated_norm_backward_scratch(n, d->norms, d->norm, d->ssd));
    s->ops->gated_norm_backward(dgated, projected_part(v, dprojected, z), sum_of(v, GATED_NORM), dgated, a->delta_out,
                                projected_part(v, a->projected, z), weight_of(v, GATED_NORM), n, d->norms, d->norm,
                                d->E, d->ssd, s->model->config.norm_eps, scratch);
    arena_pop(s->arena, mark);
}

// Returns the scratch of the rule's backward pass over chunk c.
static size_t rule_backward_scratch(const Visit *v) {
    const DeltaShape shape = visit_delta_shape(v); // a piece needs no more scratch than the chunk
    return shape.ssd ? v->s->ops->ssd_backward_scratch(&shape) : v->s->ops->delta_backward_scratch(&shape);
}

// Runs the rule backward over the spans of `shape`. dx NULL: computes only the state's gradient. dx, dprojected, dout,
// x, projected: rows of these spans
static void rule_backward(const Visit *v, const DeltaShape *shape, Stored *dx, Stored *dprojected, const Stored *dout,
                          const Stored *x, Stored *projected, const Summed *state, Summed *scratch) {
    const StreamBP *s = v->s;
    Summed *const dA = dx ? sum_of(v, A_LOG) : NULL, *const dbias = dx ? sum_of(v, DT_BIAS) : NULL;
    Stored *da = dx ? projected_part(v, dprojected, IN_A_WEIGHT) : NULL, *a = projected_part(v, projected, IN_A_WEIGHT);
    if (shape->ssd)
        s->ops->ssd_backward(dx, da, dA, dx ? sum_of(v, SKIP) : NULL, dbias, s->linear.dstate, dout, x, a,
                             weight_of(v, A_LOG), weight_of(v, SKIP), weight_of(v, DT_BIAS), state, shape, scratch);
    else
        s->ops->delta_backward(dx, dx ? projected_part(v, dprojected, IN_B_WEIGHT) : NULL, da, dA, dbias,
                               s->linear.dstate, dout, x, projected_part(v, projected, IN_B_WEIGHT), a,
                               weight_of(v, A_LOG), weight_of(v, DT_BIAS), state, shape, scratch);
}

// Runs a piece of chunk c backward. dout, dmixed, dprojected: of the piece; else as of delta_backward
static void piece_backward(const Visit *v, StatePiece p, const Activations *a, KeptState before, const Stored *dout,
                           Stored *dmixed, Stored *dprojected, Summed *scratch) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    const DeltaShape shape = delta_shape(s, p.c, *d);
    Stored *projected = stored_row(s, a->projected, p.skipped, d->E);
    fork_gradient_take(s, p);
    if (p.before != SIZE_MAX) before = fork_state(s, p.before);
    if (has_rule(v->layer))
        rule_backward(v, &shape, dmixed, dprojected, dout, stored_row(s, a->mixed, p.skipped, d->W), projected,
                      before.state, scratch);
    s->ops->conv_backward(projected_part(v, dprojected, IN_QKV_WEIGHT), sum_of(v, CONV_WEIGHT), sum_of(v, CONV_BIAS),
                          s->linear.dcolumns, dmixed, projected_part(v, projected, IN_QKV_WEIGHT), before.columns,
                          weight_of(v, CONV_WEIGHT), weight_of(v, CONV_BIAS), &shape, scratch);
    fork_gradient_give(s, p);
}

// Writes dprojected[n,E], except z's columns, from dout[n,out]; dW +=. dout: the gradient of the rule's output, or of
// `mixed` in a mixer that is a convolution alone. dstate, dcolumns: gradients at the chunk's end become gradients at
// its start. before: the state at the chunk's start
static void delta_backward(const Visit *v, const Activations *a, KeptState before, Stored *dout, Stored *dprojected) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    const int rule = has_rule(v->layer);
    const DeltaShape shape = visit_delta_shape(v); // a piece needs no more scratch than the chunk
    const size_t mark = arena_mark(s->arena), conv = s->ops->conv_backward_scratch(&shape, has_tensor(v, CONV_BIAS));
    const size_t delta = rule ? rule_backward_scratch(v) : 0;
    Stored *dmixed = rule ? push_stored(s, SHARE_WORKSPACE, "gradient behind the convolution", v->c.n * d->W) : dout;
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "linear attention's scratch", max_size(conv, delta));
    for (size_t end = v->c.token + v->c.n; end > v->c.token;) {
        const StatePiece p = piece_at(s, v->c, end - 1);
        piece_backward(v, p, a, before, stored_row(s, dout, p.skipped, d->out), stored_row(s, dmixed, p.skipped, d->W),
                       stored_row(s, dprojected, p.skipped, d->E), scratch);
        end = p.c.token;
    }
    arena_pop(s->arena, mark);
}

// dx of x_1, dS after chunk c -> its part of dnorm, dS before chunk c; dx of x_l, unless attention follows
static void linear_attention_backward(const Visit *v, size_t j, Activations *a, Stored *dx) {
    const StreamBP *s = v->s;
    const LinearShape *d = &v->layer->shape.linear;
    mixer_gradient_begin(v, a, dx);
    const size_t mark = arena_mark(s->arena);
    Stored *dgated = push_stored(s, SHARE_WORKSPACE, "gradient of the delta rule's output", v->c.n * d->out);
    Stored *dprojected = push_stored(s, SHARE_WORKSPACE, "gradient of linear attention's inputs", v->c.n * d->E);
    linear_backward(v, OUT_WEIGHT, dgated, branch_sum_backward(v, 0, a, dx), a->delta_norm, 0);
    if (has_rule(v->layer)) gated_norm_backward(v, a, dgated, dprojected);
    delta_backward(v, a, state_before(s, v->c), dgated, dprojected);
    mixer_input_backward(v, a, linear_of(v, IN_QKV_WEIGHT), dprojected);
    if (j == 0) mixer_gradient_end(v, a, dx);
    arena_pop(s->arena, mark);
}

// Recomputes the delta rule's inputs q, k, v, b, a of chunk c, unless they are found. Backward of a layer that keeps
// products runs forward's product, z included: its parts may round differently.
static Activations state_activations(const Visit *v) {
    const LinearShape *d = &v->layer->shape.linear;
    Activations a = mixer_norm(v);
    if (!a.projected) a.projected = push_stored(v->s, SHARE_WORKSPACE, "inputs of linear attention", v->c.n * d->E);
    if (!a.mixed) a.mixed = push_stored(v->s, SHARE_WORKSPACE, "after the convolution", v->c.n * d->W);
    if (v->s->now.pass == PASS_BACKWARD && keeps(v, LEVEL_PRODUCTS)) {
        make_product(v, &a, IN_QKV_WEIGHT, a.projected, a.norm[0], NULL);
    } else {
        linear_forward_part(v, linear_part(v, IN_QKV_WEIGHT, IN_QKV_WEIGHT, IN_QKV_WEIGHT),
                            projected_part(v, a.projected, IN_QKV_WEIGHT), a.norm[0], NULL);
        linear_forward_part(v, rule_inputs(v), projected_part(v, a.projected, IN_B_WEIGHT), a.norm[0],
                            NULL); // none without the rule
    }
    convolution_forward(v, &a); // in any case: its last inputs pass on
    return a;
}

// Passes the state through chunk c; computes nothing else of the layer. transfer: T of scan.h, or NULL
static void chunk_state(const Visit *v, Summed *transfer) {
    Activations a = state_activations(v);
    delta_step(v, &a, NULL, transfer);
    drop(v, &a);
}

// Passes the state through `chunks` of a range, from the state saved before the first. Saves it every `spacing` chunks.
static void states_walk(const Visit *v, size_t half, Range chunks, size_t spacing) {
    StreamBP *s = v->s;
    Visit of = *v;
    if (chunks.count) state_copy(s, kept_state(s, half, chunks.begin), 0);
    for (size_t i = 0; i < chunks.count; i++) {
        of.c = visit(s, range_chunk(s, half, chunks.begin + i, layer_chunk(s)));
        chunk_state(&of, NULL);
        if ((i + 1) % spacing == 0) state_copy(s, kept_state(s, half, chunks.begin + i + 1), 1);
    }
}

// Passes the state through one chunk of a range, in the dry run, and counts it `visits` times.
static void states_count(const Visit *v, size_t half, size_t visits) {
    StreamBP *s = v->s;
    Visit of = *v;
    if (!visits) return;
    of.c = visit(s, range_chunk(s, half, 0, layer_chunk(s)));
    walk_count(&s->memory.walk, s->ops, (double)visits);
    chunk_state(&of, NULL);
}

// Saves the layer's states at intervals, unless forward did; gradient of the last state = 0. The dry run counts
// states_restore here, too.
static void states_begin(const Visit *v) {
    StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const int kept = keeps(v, LEVEL_PRODUCTS);
    s->ops->zero(s->linear.dstate, d->linear.S * d->summed);
    if (d->linear.columns) s->ops->zero(s->linear.dcolumns, d->linear.columns * d->summed);
    for (size_t half = 0; half < 2; half++) {
        const size_t chunk = layer_chunk(s), chunks = chunks_of_range(s, half), spacing = state_spacing(chunk, 0);
        const Range all = {0, chunks ? (chunks - 1) / spacing * spacing : 0};
        if (visits_shapes(s))
            states_count(v, half, kept ? chunks_visited_below(chunk, chunks) : chunks_visited_again(chunk, 0, chunks));
        else if (!kept)
            states_walk(v, half, all, spacing);
    }
}

// Recomputes states from the nearest saved state, for the block of chunks that ends at chunk `index` of a range. Does
// nothing at a chunk that ends no block.
static void states_restore(const Visit *v, size_t half, size_t index) {
    StreamBP *s = v->s;
    Range block = {0, chunks_of_range(s, half)}; // the level's block that contains chunk `index`
    for (size_t level = 0; !visits_shapes(s); level++) {
        const size_t spacing = state_spacing(layer_chunk(s), level), end = block.begin + block.count;
        const Range chunks = {block.begin, (block.count - 1) / spacing * spacing};
        if (level && index + 1 == end) states_walk(v, half, chunks, spacing);
        block.begin += (index - block.begin) / spacing * spacing;
        block.count = min_size(spacing, end - block.begin);
        if (spacing == 1) break;
    }
}

#endif
