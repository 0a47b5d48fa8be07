/*
The branches after the mixer (section 3.2.2): no chunk of tokens depends on another chunk. A branch's part is a dense
MLP, experts (experts.h) or the layer's own input (own_input.h).
*/
#ifndef LLMC_MLP_H
#define LLMC_MLP_H
#include "own_input.h"

// ---- a dense MLP ----------------------------------------------------------------------------------------------------
static void dense_forward(const Visit *v, size_t i, size_t j, const Activations *a, const Routed *r) {
    const Shapes *d = &v->layer->shape;
    (void)r;
    make_product(v, a, GATE_WEIGHT, a->gate_up, a->norm[i], NULL);
    make_activation(v, a, a->activated, a->gate_up, v->c.n, d->FF);
    part_product(v, i, j, a, a->activated);
}

// Runs a dense MLP backward: dx[n,C] += the gradient of x_i, from dx of x_{i+1}; dW +=. Gradients overwrite
// activations.
static void dense_backward(const Visit *v, size_t i, size_t j, Activations *a, const Routed *r, Stored *dx) {
    const Shapes *d = &v->layer->shape;
    const int adds = adds_to_dx(v, i);
    Stored *dactivated = a->activated, *dgate_up = a->gate_up, *dnorm = adds ? dx : a->norm[i];
    (void)r;
    linear_backward(v, DOWN_WEIGHT, dactivated, part_out_backward(v, i, j, a, dx), a->activated, 0);
    v->s->ops->activation_backward(dgate_up, dactivated, a->gate_up, d->activation, v->c.n, d->FF);
    linear_backward(v, GATE_WEIGHT, dnorm, dgate_up, a->norm[i], adds);
    branch_in_backward(v, i, a, dx, dnorm);
}

// ---- any branch after the mixer -------------------------------------------------------------------------------------
// The calls of part j of branch i. r: the experts' rows. forward, r NULL: not in backward, nothing reads activations
// again unless they are kept
typedef struct {
    void (*forward)(const Visit *v, size_t i, size_t j, const Activations *a, const Routed *r);
    void (*backward)(const Visit *v, size_t i, size_t j, Activations *a, const Routed *r, Stored *dx);
} TokenPart;

static const TokenPart token_part[] = {{dense_forward, dense_backward},
                                       {experts_part_forward, experts_part_backward},
                                       {own_input_forward, own_input_backward}};

static const TokenPart *token_part_of(const Branch *b, size_t j) { return &token_part[b->part[j].kind - PART_DENSE]; }

// Runs branch i: x_i[c] -> x_{i+1}[c]. r: the experts' rows in backward; NULL: forward
static void branch_run(const Visit *v, size_t i, Activations *a, const Routed *r) {
    const Branch *b = branch_of(v, i);
    branch_in(v, i, a);
    for (size_t j = 0; j < b->parts; j++) {
        const size_t mark = arena_mark(v->s->arena);
        token_part_of(b, j)->forward(v, i, j, a, r);
        arena_pop(v->s->arena, mark);
    }
}

// Runs branch i backward: dx of x_{i+1}[c] -> dx of x_i[c], in place; dW +=. Gradients overwrite activations.
static void branch_backward(const Visit *v, size_t i, Activations *a, const Routed *r, Stored *dx) {
    const Branch *b = branch_of(v, i);
    for (size_t j = b->parts; j-- > 0;) token_part_of(b, j)->backward(v, i, j, a, r, dx);
}

// Points x[branch] at the layer's output x_{l+1}[c], if the layer has only `branch` branches.
static void output_begin(const Visit *v, Activations *a, size_t branch) {
    if (branch == v->layer->branches) a->x[branch] = layer_output(v->s, v->l + 1, v->c);
}

// x[n,C] *= the factor of the layer's output, if the model has factors.
static void output_scale(const Visit *v, Stored *x) {
    const float *factor = v->s->model->layer_scalar;
    if (factor) v->s->ops->scale(x, v->s->model->dtype, (double)factor[v->l], v->c.n * v->layer->shape.C);
}

// Runs the branches after the mixer: y[c] (without a mixer x_l[c]) -> x_{l+1}[c]. Stores x_{l+1}[c] if off-device.
static void mlp_forward(const Visit *v, Activations *a) {
    const size_t last = v->layer->branches;
    output_begin(v, a, last);
    for (size_t i = 1; i < last; i++) branch_run(v, i, a, NULL);
    output_scale(v, a->x[last]);
    input_save(v->s, v->l + 1, v->c);
}

// Runs the branches after the mixer backward: dx of x_{l+1}[c] -> dx of y[c] (without a mixer of x_l[c]), in place; dW
// +=. Recomputes their activations that are not kept. Skips a last product whose output nothing reads.
static void mlp_backward(const Visit *v, Activations *a, Stored *dx) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), last = v->layer->branches;
    push_side(v, a, SIDE_MLP);
    const Routed r = push_routed(v);
    output_scale(v, dx);
    for (size_t i = 1; i < last; i++) branch_run(v, i, a, &r);
    for (size_t i = last; i-- > 1;) branch_backward(v, i, a, &r, dx);
    arena_pop(s->arena, mark);
}

#endif
