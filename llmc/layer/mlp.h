/*
The branches after the mixer (section 3.2.2): no chunk of tokens depends on another chunk. A branch's part is a dense
MLP, experts (experts.h) or the layer's own input (own_input.h).
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H
#include "experts.h"
#include "own_input.h"

// ---- a dense MLP ----------------------------------------------------------------------------------------------------
static void dense_forward(const Visit *v, size_t i, size_t j, const Activations *a) {
    const Shapes *d = &v->layer->shape;
    linear_forward(v, GATE_WEIGHT, a->gate_up, a->norm[i], NULL);
    v->s->ops->activation_forward(a->activated, a->gate_up, d->activation, v->c.n, d->FF);
    part_product(v, i, j, a, a->activated);
}

// Runs a dense MLP backward: dx[n,C] += the gradient of x_i, from dout[n,C]; dW +=. Gradients overwrite activations.
static void dense_backward(const Visit *v, size_t i, const Activations *a, const Stored *dout, Stored *dx) {
    const Shapes *d = &v->layer->shape;
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm = adds_to_dx(v, i) ? dx : a->norm[i];
    linear_backward(v, DOWN_WEIGHT, dactivated, dout, a->activated, 0);
    v->s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d->activation, v->c.n, d->FF);
    linear_backward(v, GATE_WEIGHT, dnorm, dgate_up, a->norm[i], adds_to_dx(v, i));
    branch_in_backward(v, i, a, dx, dnorm);
}

// ---- any branch after the mixer -------------------------------------------------------------------------------------
// Runs branch i: x_i[c] -> x_{i+1}[c]. r: the experts' rows in backward. NULL (forward): pushes them, and may overwrite
// activations unless they are kept
static void branch_run(const Visit *v, size_t i, Activations *a, const Routed *r) {
    const Branch *b = branch_of(v, i);
    branch_in(v, i, a);
    for (size_t j = 0; j < b->parts; j++) {
        const size_t mark = arena_mark(v->s->arena);
        const int spare = !r && !keeps_activations(v->s);
        if (b->part[j].kind == PART_DENSE) dense_forward(v, i, j, a);
        if (b->part[j].kind == PART_OWN_INPUT) own_input_forward(v, i, a);
        if (b->part[j].kind == PART_EXPERTS) {
            const Routed rows = r ? *r : push_routed(v);
            experts_activate(v, a, &rows);
            experts_sum(v, j, a, &rows, spare);
        }
        arena_pop(v->s->arena, mark);
    }
}

// Runs branch i backward: dx of x_{i+1}[c] -> dx of x_i[c], in place; dW +=. Gradients overwrite activations.
static void branch_backward(const Visit *v, size_t i, const Activations *a, const Routed *r, Stored *dx) {
    const Branch *b = branch_of(v, i);
    if (b->part[0].kind == PART_OWN_INPUT) {
        own_input_backward(v, i, a, dx);
        return;
    }
    const Stored *dsum = branch_out_backward(v, i, a, dx);
    for (size_t j = b->parts; j-- > 0;) {
        const Stored *dout = part_out_backward(v, i, j, a, dsum);
        if (b->part[j].kind == PART_DENSE) dense_backward(v, i, a, dout, dx);
        if (b->part[j].kind == PART_EXPERTS) experts_backward(v, a, r, dout, dx);
    }
}

// Points x[branch] at the layer's output x_{l+1}[c], if the layer has only `branch` branches.
static void output_begin(const Visit *v, Activations *a, size_t branch) {
    if (branch == v->layer->branches) a->x[branch] = layer_output(v->s, v->l + 1, v->c);
}

// Runs the branches after the mixer: y[c] (without a mixer x_l[c]) -> x_{l+1}[c]. Stores x_{l+1}[c] if off-device.
static void mlp_forward(const Visit *v, Activations *a) {
    StreamBP *s = v->s;
    const Layer *layer = v->layer;
    const size_t count = v->c.n * layer->shape.C, last = layer->branches;
    output_begin(v, a, last);
    for (size_t i = layer->first_mlp; i < last; i++) branch_run(v, i, a, NULL);
    if (s->model->layer_scalar) s->ops->scale(a->x[last], s->model->dtype, (double)s->model->layer_scalar[v->l], count);
    input_save(s, v->l + 1, v->c);
}

// Runs the branches after the mixer backward: dx of x_{l+1}[c] -> dx of y[c] (without a mixer of x_l[c]), in place; dW
// +=. Recomputes their activations, unless they are kept. Skips a last product whose output nothing reads.
static void mlp_backward(const Visit *v, Activations *a, Stored *dx) {
    const StreamBP *s = v->s;
    const Layer *layer = v->layer;
    const size_t mark = arena_mark(s->arena);
    const int kept = keeps_activations(s), experts = has_part(layer, PART_EXPERTS);
    Routed r = {{NULL, NULL, 0}, NULL, NULL, NULL, NULL, NULL};
    if (!kept) push_side(v, a, SIDE_MLP);
    if (experts) r = push_routed(v);
    if (s->model->layer_scalar)
        s->ops->scale(dx, s->model->dtype, (double)s->model->layer_scalar[v->l], v->c.n * layer->shape.C);
    for (size_t i = layer->first_mlp; i < layer->branches && !kept; i++) branch_run(v, i, a, &r);
    if (kept && experts) rows_sort(v, a, &r);
    for (size_t i = layer->branches; i-- > layer->first_mlp;) branch_backward(v, i, a, &r, dx);
    arena_pop(s->arena, mark);
}

#endif
