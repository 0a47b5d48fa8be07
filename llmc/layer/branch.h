/*
A residual branch: x_{i+1} = x_i + post(sum_j post_j(f_j(pre(x_i)))) (stream/layer.h). This file has the norms and the
sums around the parts f_j. A part runs up to the input of its last product, asks part_target where the product goes, and
calls part_finish after the product. Without the norm `pre`, f reads x itself and adds its gradient to dx.
*/
#ifndef LLMC_BRANCH_H
#define LLMC_BRANCH_H
#include "kept.h"
#include "llmc/stream/modules.h"

static const Branch *branch_of(const Visit *v, size_t i) { return &v->layer->branch[i]; }

// ---- forward --------------------------------------------------------------------------------------------------------
// out[n,out] = x[n,in] W^T (+ residual) + adapters; out[n,C] = norm(x[n,C]) + residual. Unless out is found
static void make_product(const Visit *v, const Activations *a, LayerTensor tensor, Stored *out, const Stored *x,
                         const Stored *residual) {
    if (!is_found(v, a, out)) linear_forward(v, tensor, out, x, residual);
}

static void make_norm(const Visit *v, const Activations *a, LayerTensor weight, LayerTensor bias, Stored *out,
                      const Stored *x, const Stored *residual) {
    if (!is_found(v, a, out)) norm_forward(v, weight, bias, out, x, residual);
}

static void make_activation(const Visit *v, const Activations *a, Stored *out, const Stored *in, size_t rows,
                            size_t width) {
    if (!is_found(v, a, out)) v->s->ops->activation_forward(out, in, v->layer->shape.activation, rows, width);
}

// Runs the norm before the parts of branch i: a->norm[i] = pre(x_i).
static void branch_in(const Visit *v, size_t i, Activations *a) {
    const Branch *b = branch_of(v, i);
    make_norm(v, a, b->pre, b->pre_bias, a->norm[i], a->x[i], NULL);
}

// A product's output, and the tensor that is added to it. out NULL: nothing reads the product
typedef struct {
    Stored *out;
    const Stored *residual;
} ProductTarget;

// Returns the target of part j (or of its norm) in the branch's sum: the first part writes, a further part adds.
static ProductTarget branch_target(const Visit *v, size_t i, size_t j, const Activations *a) {
    const ProductTarget before_norm = {a->inner[i], NULL}, output = {a->x[i + 1], a->x[i]};
    ProductTarget sum = branch_of(v, i)->post == LAYER_TENSORS ? output : before_norm;
    if (j) sum.residual = sum.out;
    return sum;
}

// Returns the target of part j's last product.
static ProductTarget part_target(const Visit *v, size_t i, size_t j, const Activations *a) {
    const ProductTarget own = {a->sum[j], NULL};
    return branch_of(v, i)->part[j].post == LAYER_TENSORS ? branch_target(v, i, j, a) : own;
}

// Runs the norm after part j, and after the last part the norm of the branch.
static void part_finish(const Visit *v, size_t i, size_t j, const Activations *a) {
    const Branch *b = branch_of(v, i);
    const ProductTarget sum = branch_target(v, i, j, a);
    make_norm(v, a, b->part[j].post, LAYER_TENSORS, sum.out, a->sum[j], sum.residual);
    if (j + 1 == b->parts && a->x[i + 1]) make_norm(v, a, b->post, LAYER_TENSORS, a->x[i + 1], a->inner[i], a->x[i]);
}

// Runs the last product of part j, from its input f.
static void part_product(const Visit *v, size_t i, size_t j, const Activations *a, const Stored *f) {
    const ProductTarget target = part_target(v, i, j, a);
    if (target.out) make_product(v, a, branch_of(v, i)->part[j].product, target.out, f, target.residual);
    part_finish(v, i, j, a);
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Returns the gradient of the parts' sum, from dx[n,C] of x_{i+1}. After a norm it overwrites a->inner[i]; the norm's
// dW +=. Without that norm it is dx, or for several parts, which add to dx, a pushed copy.
static const Stored *branch_out_backward(const Visit *v, size_t i, const Activations *a, const Stored *dx) {
    const Branch *b = branch_of(v, i);
    const size_t count = v->c.n * v->layer->shape.C;
    norm_backward(v, b->post, LAYER_TENSORS, a->inner[i], dx, a->inner[i], 0);
    if (b->post != LAYER_TENSORS) return a->inner[i];
    if (b->parts == 1) return dx;
    Stored *copy = push_stored(v->s, SHARE_WORKSPACE, "gradient of a branch", count);
    v->s->ops->copy(copy, dx, count * v->layer->shape.stored);
    return copy;
}

// Returns branch_out_backward, computed once for all parts of branch i. Call it before pushes that a part pops.
static const Stored *branch_sum_backward(const Visit *v, size_t i, Activations *a, const Stored *dx) {
    if (!a->dsum[i]) a->dsum[i] = branch_out_backward(v, i, a, dx);
    return a->dsum[i];
}

// Returns the gradient of part j's last product, from dx[n,C] of x_{i+1}: the gradient of the parts' sum, or after the
// part's norm a->sum[j]; the norm's dW +=
static const Stored *part_out_backward(const Visit *v, size_t i, size_t j, Activations *a, const Stored *dx) {
    const LayerTensor post = branch_of(v, i)->part[j].post;
    const Stored *dsum = branch_sum_backward(v, i, a, dx);
    if (post == LAYER_TENSORS) return dsum;
    norm_backward(v, post, LAYER_TENSORS, a->sum[j], dsum, a->sum[j], 0);
    return a->sum[j];
}

// Tells whether the parts of branch i add their gradient to dx, because no norm precedes them.
static int adds_to_dx(const Visit *v, size_t i) { return branch_of(v, i)->pre == LAYER_TENSORS; }

// dx[n,C] += the gradient dpre[n,C] of the norm before branch i; without a norm of x_i itself, unless dpre is dx
static void branch_in_backward(const Visit *v, size_t i, const Activations *a, Stored *dx, const Stored *dpre) {
    const Branch *b = branch_of(v, i);
    norm_backward(v, b->pre, b->pre_bias, dx, dpre, a->x[i], 1);
    if (adds_to_dx(v, i) && dpre != dx)
        v->s->ops->dropout(dx, dpre, v->c.n, v->layer->shape.C, 0, 0, 0, 1); // adds: a rate of 0 drops none
}

// ---- the mixer's norm, which its parts and projections share --------------------------------------------------------
// Begins dnorm, the gradient of the mixer's norm: a pushed tensor, or dx without a norm.
static void mixer_gradient_begin(const Visit *v, Activations *a, Stored *dx) {
    if (a->dnorm) return;
    a->arrived = adds_to_dx(v, 0);
    a->dnorm =
        a->arrived ? dx : push_stored(v->s, SHARE_WORKSPACE, "gradient of the first norm", v->c.n * v->layer->shape.C);
}

// Adds to dnorm the gradient through a linear layer that reads the mixer's norm; dW +=. dout: gradient of the linear
// layer's output
static void mixer_input_backward(const Visit *v, Activations *a, Linear linear, const Stored *dout) {
    linear_backward_part(v, linear, a->dnorm, dout, a->norm[0], a->arrived);
    a->arrived = 1;
}

// dx of x_1 -> dx of x_l
static void mixer_gradient_end(const Visit *v, const Activations *a, Stored *dx) {
    branch_in_backward(v, 0, a, dx, a->dnorm);
}

// Begins activations with the mixer's norm of chunk c, and what is kept of the chunk on the device.
static Activations mixer_norm(const Visit *v) {
    Activations a = activations_begin(v);
    if (!v->layer->off) kept_set(v, &a);
    activation_push(v, &a, &v->layer->row[ROW_FIRST_NORM]);
    mixer_stand_ins(&a);
    branch_in(v, 0, &a);
    return a;
}

#endif
