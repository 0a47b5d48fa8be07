/*
The products of experts for layer/experts.h, with adapters and matrices in 4 bits, and a router's logits. The adapter of
a stack of matrices has A [E,r,in] and B [E,out,r], so its products are grouped by expert, too. It has no dropout, as in
PEFT.
*/
#ifndef LLMC_EXPERT_MODULES_H
#define LLMC_EXPERT_MODULES_H
#include "modules.h"

// Rows sorted by expert
typedef struct {
    int32_t *first;  // [E + 1] rows first[e] .. first[e + 1] are expert e's
    int32_t *source; // [count] token * k + slot
    size_t count;
} ExpertRows;

// A stack of matrices [E,out,in] and its adapter; part, a, b NULL: no adapter
typedef struct {
    size_t in, out;
    const LoraPart *part;
    const Stored *a, *b;
} Stack;

static Stack stack_of(const Visit *v, LayerTensor tensor) {
    const Shapes *d = &v->layer->shape;
    const int down = tensor == EXPERTS_DOWN;
    Stack stack = {down ? d->I : d->C, down ? d->C : activation_width(d->activation.kind, d->I), NULL, NULL, NULL};
    const LoraPart *part = v->w.adapters ? lora_part(v->s->memory.lora, v->l, tensor) : NULL;
    if (!part || part->a == ABSENT) return stack;
    stack.part = part;
    stack.a = (const Stored *)at(v->w.adapters, part->a, d->stored);
    stack.b = (const Stored *)at(v->w.adapters, part->b, d->stored);
    return stack;
}

// out[R,r] = scale * x[R,in] A^T, pushed
static Stored *stack_narrow(const Visit *v, const Stack *stack, ExpertRows rows, const Stored *x) {
    const StreamBP *s = v->s;
    const size_t E = v->layer->shape.router.E, rank = stack->part->rank;
    Stored *h = push_stored(s, SHARE_WORKSPACE, "adapter", rows.count * rank);
    s->ops->experts_forward(h, x, stack->a, rows.first, rows.count, E, stack->in, rank, 0);
    multiply(s, h, s->model->dtype, stack->part->scale, rows.count * rank);
    return h;
}

static LayerTensor bias_of_stack(LayerTensor tensor) {
    return tensor == EXPERTS_DOWN ? EXPERTS_DOWN_BIAS : EXPERTS_GATE_UP_BIAS;
}

// out[R,out] = x[R,in] W[e]^T + bias[e], with the adapter. weight[n,k]: factors of the bias, or NULL
static void expert_forward(const Visit *v, LayerTensor tensor, ExpertRows rows, const Summed *weight, Stored *out,
                           const Stored *x) {
    const StreamBP *s = v->s;
    const size_t E = v->layer->shape.router.E, mark = arena_mark(s->arena);
    const Stack stack = stack_of(v, tensor);
    const CodedMatrix m = coded_matrix(&s->memory, v->w, v->w.offset[tensor]);
    if (m.record)
        s->ops->experts_forward_quantised(out, x, m.record, m.format, rows.first, rows.count, E, stack.in, stack.out);
    else
        s->ops->experts_forward(out, x, m.floats ? (const Stored *)m.floats : weight_of(v, tensor), rows.first,
                                rows.count, E, stack.in, stack.out, 0);
    if (stack.part)
        s->ops->experts_forward(out, stack_narrow(v, &stack, rows, x), stack.b, rows.first, rows.count, E,
                                stack.part->rank, stack.out, 1);
    const Stored *bias = weight_of(v, bias_of_stack(tensor));
    if (bias) s->ops->experts_bias_forward(out, bias, weight, rows.first, rows.source, rows.count, E, stack.out);
    arena_pop(s->arena, mark);
}

// Computes out[R,I] = act(gate_up), times factor[n,k] of each row unless NULL. gate_up[R,2I or I] = x[R,in] W[e]^T +
// bias[e], with the adapter. keep 0: gate_up does not matter afterwards
static void expert_activate(const Visit *v, ExpertRows rows, const Summed *factor, Stored *out, Stored *gate_up,
                            const Stored *x, int keep) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const CodedMatrix m = coded_matrix(&s->memory, v->w, v->w.offset[EXPERTS_GATE_UP]);
    if (!m.record && !stack_of(v, EXPERTS_GATE_UP).part) {
        s->ops->experts_activate(out, gate_up, x, m.floats ? (const Stored *)m.floats : weight_of(v, EXPERTS_GATE_UP),
                                 weight_of(v, EXPERTS_GATE_UP_BIAS), factor, rows.first, rows.source, rows.count,
                                 d->router.E, d->C, d->I, d->activation, keep);
        return;
    }
    expert_forward(v, EXPERTS_GATE_UP, rows, NULL, gate_up, x);
    s->ops->activation_forward(out, gate_up, d->activation, rows.count, d->I);
    if (factor) s->ops->route_weigh(out, out, factor, rows.source, rows.count, d->I);
}

// dbias += from dout[R,out]; with the factors weight[n,k] of the bias also their gradient, dweight[n,k] +=
static void expert_backward_bias(const Visit *v, LayerTensor tensor, ExpertRows rows, const Stored *dout,
                                 const Summed *weight, Summed *dweight) {
    const Shapes *d = &v->layer->shape;
    const Stored *bias = weight_of(v, bias_of_stack(tensor));
    Summed *dbias = sum_of(v, bias_of_stack(tensor));
    if (bias && (dbias || weight))
        v->s->ops->experts_bias_backward(dbias, dweight, dout, bias, weight, rows.first, rows.source, rows.count,
                                         d->router.E, stack_of(v, tensor).out);
}

// Returns dh[R,r] = scale * dout[R,out] B, pushed; NULL without an adapter
static Stored *expert_backward_narrow(const Visit *v, LayerTensor tensor, ExpertRows rows, const Stored *dout) {
    const StreamBP *s = v->s;
    const Stack stack = stack_of(v, tensor);
    if (!stack.part) return NULL;
    const size_t E = v->layer->shape.router.E, rank = stack.part->rank;
    Stored *dh = push_stored(s, SHARE_WORKSPACE, "gradient of adapter", rows.count * rank);
    s->ops->experts_backward_input(dh, dout, stack.b, rows.first, rows.count, E, rank, stack.out, 0);
    if (stack.part->scale != 1) s->ops->scale(dh, s->model->dtype, stack.part->scale, rows.count * rank);
    return dh;
}

// dx[R,in] = dout[R,out] W[e], with the adapter's part from dh
static void expert_backward_wide(const Visit *v, LayerTensor tensor, ExpertRows rows, Stored *dx, const Stored *dout,
                                 const Stored *dh) {
    const StreamBP *s = v->s;
    const size_t E = v->layer->shape.router.E;
    const Stack stack = stack_of(v, tensor);
    s->ops->experts_backward_input(dx, dout, weight_of(v, tensor), rows.first, rows.count, E, stack.in, stack.out, 0);
    if (dh) s->ops->experts_backward_input(dx, dh, stack.a, rows.first, rows.count, E, stack.in, stack.part->rank, 1);
}

// Runs expert_backward_narrow and expert_backward_wide. Returns dh.
static Stored *expert_backward_input(const Visit *v, LayerTensor tensor, ExpertRows rows, Stored *dx,
                                     const Stored *dout) {
    Stored *dh = expert_backward_narrow(v, tensor, rows, dout);
    expert_backward_wide(v, tensor, rows, dx, dout, dh);
    return dh;
}

// dW, or dA and dB, += from dout[R,out] and x[R,in]. dh: result of expert_backward_narrow
static void expert_backward_weight(const Visit *v, LayerTensor tensor, ExpertRows rows, const Stored *dout,
                                   const Stored *x, const Stored *dh) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena), E = d->router.E;
    const Stack stack = stack_of(v, tensor);
    if (!s->memory.lora)
        s->ops->experts_backward_weight(sum_of(v, tensor), dout, x, rows.first, rows.count, E, stack.in, stack.out);
    if (dh) {
        const Stored *h = stack_narrow(v, &stack, rows, x);
        s->ops->experts_backward_weight((Summed *)at(v->dw.layer, stack.part->b, d->summed), dout, h, rows.first,
                                        rows.count, E, stack.part->rank, stack.out);
        s->ops->experts_backward_weight((Summed *)at(v->dw.layer, stack.part->a, d->summed), dh, x, rows.first,
                                        rows.count, E, stack.in, stack.part->rank);
    }
    arena_pop(s->arena, mark);
}

// logits[n,E] = x[n,C] W^T + bias, in the type of sums, with the router's adapters
static void logits_forward(const Visit *v, LayerTensor tensor, Summed *logits, const Stored *x, size_t E) {
    const StreamBP *s = v->s;
    const size_t C = v->layer->shape.C, mark = arena_mark(s->arena), n = v->c.n;
    const Linear linear = linear_of(v, tensor);
    Adapter adapter[ADAPTERS_MOST];
    if (!has_tensor(v, tensor)) return;
    const size_t count = adapters_of(v, linear, adapter);
    s->ops->router_logits(logits, x, weight_of(v, tensor), weight_of(v, linear.bias), n, C, E, 0);
    for (size_t i = 0; i < count; i++) {
        const Stored *h = adapter_narrow(v, &adapter[i], adapter_input(v, &adapter[i], x, C), C);
        s->ops->router_logits(logits, h, adapter[i].b, NULL, n, adapter[i].part->rank, E, 1);
    }
    arena_pop(s->arena, mark);
}

#endif
