/*
An MLP of experts (a mixture): a router gives each token k of E experts with a weight each,

    out = sum_j w_j W_down[e_j] (silu(W_gate[e_j] x) W_up[e_j] x)    (+ s(g . x) times a shared expert, of every token)

A chunk's rows, one for each token and slot, are sorted by expert. Grouped products multiply each expert's rows by its
matrices. Weights go in before the last product, which is linear. In backward, with u = dout W_down,

    dw_j = u . activated,    dactivated = w_j u

so the last product is not recomputed. Routes are stored (stream/routes.h); all else is recomputed from the router's
logits. One room of [R,C] holds in turn the rows of x, the experts' outputs, dout, x again and dx.
*/
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H
#include "branch.h"
#include "llmc/stream/expert_modules.h"

// A chunk's rows in the order of experts
typedef struct {
    ExpertRows rows;
    uint16_t *route; // [n,k]
    Summed *chosen;  // [n,k] of each token's experts, by the router
    Summed *weight;  // [n,k] the same times the experts' own factors; `chosen` where the family has none
    int32_t *place;  // [n,k] the row of a token's slot
    Stored *inner;   // [R,C] see above
} Routed;

static const RouterShape scale_shape = {ROUTER_SIGMOID, 1, 1, 0, 1, 1, 1}; // of the shared expert

static Routed push_routed(const StreamBP *s, size_t l, Chunk c) {
    const Shapes d = shapes_of(s->model);
    const size_t R = c.n * d.router.k;
    Routed r = {{NULL, NULL, R}, routes_memory(s, l, c.row, c.n), NULL, NULL, NULL, NULL};
    r.chosen = r.weight = push_summed(s, SHARE_WORKSPACE, "weights of experts", R);
    if (d.beside) r.weight = push_summed(s, SHARE_WORKSPACE, "weights of experts, scaled", R);
    r.rows.first =
        (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "first rows of experts", d.router.E + 1, sizeof(int32_t));
    r.rows.source = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "sources of rows", R, sizeof(int32_t));
    r.place = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "places of rows", R, sizeof(int32_t));
    r.inner = push_stored(s, SHARE_WORKSPACE, "experts' rows", R * d.C);
    return r;
}

static void rows_gather(const StreamBP *s, Chunk c, const Routed *r, const Stored *x) {
    const Shapes d = shapes_of(s->model);
    s->ops->route_gather(r->inner, x, r->rows.source, c.n, d.router.k, d.C);
}

// Experts beside a dense MLP have norms of their own, and so has their router, whose logits are divided by sqrt(C).
static const Stored *experts_input(const Activations *a) { return a->expert_norm ? a->expert_norm : a->norm2; }
static const Stored *router_input(const Activations *a) { return a->router_norm ? a->router_norm : a->norm2; }
static double router_scale(const Activations *a, size_t C) { return a->router_norm ? 1 / sqrt((double)C) : 1; }

// norms, logits; the routes, unless they are stored already
static void router_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a,
                           uint16_t *route) {
    const Shapes d = layer_shapes(s, l);
    if (d.beside) {
        norm_forward(s, a->expert_norm, a->y, weight_of(s, w, EXPERTS_PRE_NORM), NULL, NULL, c.n);
        norm_forward(s, a->router_norm, a->y, weight_of(s, w, ROUTER_NORM), NULL, NULL, c.n);
    } else {
        branch_in(s, c, w, mlp_branch, a->norm2, a->y);
    }
    logits_forward(s, l, c, w, ROUTER_WEIGHT, a->router_logits, router_input(a), d.router.E);
    if (d.beside)
        s->ops->scale(a->router_logits, dtype_of_sums(s->model->dtype), router_scale(a, d.C), c.n * d.router.E);
    routes_choose(s, l, c.token, c.n, route, a->router_logits);
}

// logits, routes -> weights, sorted rows
static void rows_sort(const StreamBP *s, Chunk c, GroupWeights w, const Activations *a, const Routed *r) {
    const RouterShape router = shapes_of(s->model).router;
    const size_t mark = arena_mark(s->arena);
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "sorting rows", s->ops->route_sort_scratch(c.n, router.k, router.E));
    s->ops->router_weights(r->chosen, a->router_logits, r->route, c.n, &router);
    s->ops->route_sort(r->rows.first, r->rows.source, r->place, r->route, c.n, router.k, router.E, scratch);
    if (r->weight != r->chosen)
        s->ops->experts_scale_forward(r->weight, r->chosen, weight_of(s, w, EXPERTS_SCALE), r->rows.first,
                                      r->rows.source, r->rows.count, router.E);
    arena_pop(s->arena, mark);
}

// Runs experts and the shared expert up to their activations, from y. With kept activations only sorts.
static void experts_activate(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a,
                             const Routed *r, int kept) {
    const Shapes d = shapes_of(s->model);
    if (!kept) router_forward(s, l, c, w, a, r->route);
    rows_sort(s, c, w, a, r);
    if (kept) return;
    rows_gather(s, c, r, experts_input(a));
    expert_forward(s, l, w, EXPERTS_GATE_UP, r->rows, NULL, a->expert_gate_up, r->inner);
    s->ops->activation_forward(a->expert_activated, a->expert_gate_up, d.activation, r->rows.count, d.I);
    if (!d.shared) return;
    linear_forward(s, l, c, w, SHARED_GATE_WEIGHT, a->shared_gate_up, a->norm2, NULL);
    s->ops->activation_forward(a->shared_activated, a->shared_gate_up, d.activation, c.n, d.shared);
    if (a->shared_logit) logits_forward(s, l, c, w, SHARED_SCALE_WEIGHT, a->shared_logit, a->norm2, 1);
}

// Pushes the shared expert's activation times its scale; *scale: [n], pushed, NULL where the family has none
static Stored *shared_scaled(const StreamBP *s, Chunk c, const Activations *a, Summed **scale) {
    const Shapes d = shapes_of(s->model);
    *scale = NULL;
    if (!a->shared_logit) return a->shared_activated;
    *scale = push_summed(s, SHARE_WORKSPACE, "scale of the shared expert", c.n);
    Stored *scaled = push_stored(s, SHARE_WORKSPACE, "the shared expert, scaled", c.n * d.shared);
    s->ops->router_weights(*scale, a->shared_logit, NULL, c.n, &scale_shape);
    s->ops->route_weigh(scaled, a->shared_activated, *scale, NULL, c.n, d.shared);
    return scaled;
}

// out[n,C] = (residual +) the experts' sum and the shared expert, after experts_activate. spare: the activations are not
// needed any more
static void experts_sum(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, const Routed *r,
                        Stored *out, const Stored *residual, int spare) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), R = r->rows.count;
    Stored *weighed = a->expert_activated;
    Summed *scale;
    if (!spare) weighed = push_stored(s, SHARE_WORKSPACE, "experts, weighed", R * d.I);
    s->ops->route_weigh(weighed, a->expert_activated, r->weight, r->rows.source, R, d.I);
    expert_forward(s, l, w, EXPERTS_DOWN, r->rows, r->weight, r->inner, weighed);
    if (d.shared) {
        linear_forward(s, l, c, w, SHARED_DOWN_WEIGHT, out, shared_scaled(s, c, a, &scale), residual);
        residual = out;
    }
    s->ops->route_combine(out, r->inner, r->place, residual, c.n, d.router.k, d.C);
    arena_pop(s->arena, mark);
}

// y[c] -> out[n,C] = y + the experts; beside a dense MLP their sum alone
static void experts_forward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, const Activations *a, Stored *out) {
    const size_t mark = arena_mark(s->arena);
    const Routed r = push_routed(s, l, c);
    experts_activate(s, l, c, w, a, &r, 0);
    experts_sum(s, l, c, w, a, &r, out, out == a->expert_sum ? NULL : a->y, !keeps_activations(s));
    arena_pop(s->arena, mark);
}

// dnorm2[n,C] = the gradient through the experts; dweight[n,k]; dW +=
static void routed_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            const Routed *r, const Stored *dx, Stored *dnorm2, Summed *dweight) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena), R = r->rows.count;
    Stored *du = push_stored(s, SHARE_WORKSPACE, "gradient of experts' activations", R * d.I), *dh;
    rows_gather(s, c, r, dx);
    dh = expert_backward_input(s, l, w, EXPERTS_DOWN, r->rows, du, r->inner);
    s->ops->route_weigh_backward(dweight, du, a->expert_activated, du, r->weight, r->rows.source, R, d.I);
    expert_backward_bias(s, w, dw, EXPERTS_DOWN, r->rows, r->inner, r->weight, dweight);
    expert_backward_weight(s, l, w, dw, EXPERTS_DOWN, r->rows, r->inner, a->expert_activated, dh);
    s->ops->activation_backward(a->expert_gate_up, du, a->expert_gate_up, d.activation, R, d.I);
    expert_backward_bias(s, w, dw, EXPERTS_GATE_UP, r->rows, a->expert_gate_up, NULL, NULL);
    rows_gather(s, c, r, experts_input(a));
    dh = expert_backward_narrow(s, l, w, EXPERTS_GATE_UP, r->rows, a->expert_gate_up);
    expert_backward_weight(s, l, w, dw, EXPERTS_GATE_UP, r->rows, a->expert_gate_up, r->inner, dh);
    expert_backward_wide(s, l, w, EXPERTS_GATE_UP, r->rows, r->inner, a->expert_gate_up, dh);
    s->ops->route_combine(dnorm2, r->inner, r->place, NULL, c.n, d.router.k, d.C);
    arena_pop(s->arena, mark);
}

// dx[n,C] = (accumulate: +=) the gradient through a router's logits, from that of the weights; its dW +=
static void router_input_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw,
                                  LayerTensor tensor, const Summed *dweight, const Summed *logits,
                                  const uint16_t *route, const RouterShape *shape, const Activations *a, Stored *dx,
                                  int accumulate) {
    const size_t mark = arena_mark(s->arena);
    const int losses = tensor == ROUTER_WEIGHT;
    const Summed *balance = losses && s->routes.coefficient > 0 ? s->routes.balance : NULL;
    Stored *dlogits = push_stored(s, SHARE_WORKSPACE, "gradient of the router's logits", c.n * shape->E);
    s->ops->router_backward(dlogits, dweight, logits, route, balance, losses ? s->routes.z : 0, c.n, shape);
    const double scale = losses ? router_scale(a, s->model->config.hidden_size) : 1;
    if (scale != 1) s->ops->scale(dlogits, s->model->dtype, scale, c.n * shape->E);
    linear_backward(s, l, c, w, dw, tensor, dx, dlogits, losses ? router_input(a) : a->norm2, accumulate);
    arena_pop(s->arena, mark);
}

// dnorm2[n,C] += the gradient through the shared expert; its dW +=
static void shared_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                            const Stored *dx, Stored *dnorm2) {
    const Shapes d = shapes_of(s->model);
    const size_t mark = arena_mark(s->arena);
    Summed *scale;
    Stored *scaled = shared_scaled(s, c, a, &scale);
    Stored *du = push_stored(s, SHARE_WORKSPACE, "gradient of the shared expert", c.n * d.shared);
    linear_backward(s, l, c, w, dw, SHARED_DOWN_WEIGHT, du, dx, scaled, 0);
    if (scale) {
        Summed *dscale = push_summed(s, SHARE_WORKSPACE, "gradient of the shared expert's scale", c.n);
        s->ops->route_weigh_backward(dscale, du, a->shared_activated, du, scale, NULL, c.n, d.shared);
        router_input_backward(s, l, c, w, dw, SHARED_SCALE_WEIGHT, dscale, a->shared_logit, NULL, &scale_shape, a,
                              dnorm2, 1);
    }
    s->ops->activation_backward(a->shared_gate_up, du, a->shared_gate_up, d.activation, c.n, d.shared);
    linear_backward(s, l, c, w, dw, SHARED_GATE_WEIGHT, dnorm2, a->shared_gate_up, a->norm2, 1);
    arena_pop(s->arena, mark);
}

// The gradient of the weights -> that of those by the router, in place; the experts' own factors' +=
static void experts_scale_backward(const StreamBP *s, GroupWeights w, GroupSums dw, const Routed *r, Summed *dweight) {
    const size_t E = shapes_of(s->model).router.E;
    s->ops->experts_scale_backward(sum_of(s, dw, EXPERTS_SCALE), dweight, r->chosen, weight_of(s, w, EXPERTS_SCALE),
                                   r->rows.first, r->rows.source, r->rows.count, E);
}

// dout[n,C], gradient of the experts' sum -> dx[n,C] += that of y; dW +=. Norms before experts add theirs, too.
static void experts_backward(const StreamBP *s, size_t l, Chunk c, GroupWeights w, GroupSums dw, const Activations *a,
                             const Routed *r, const Stored *dout, Stored *dx) {
    const Shapes d = layer_shapes(s, l);
    const size_t mark = arena_mark(s->arena);
    Stored *dnorm = push_stored(s, SHARE_WORKSPACE, "gradient of the second norm", c.n * d.C);
    Summed *dweight = push_summed(s, SHARE_WORKSPACE, "gradient of experts' weights", c.n * d.router.k);
    routed_backward(s, l, c, w, dw, a, r, dout, dnorm, dweight);
    if (d.shared) shared_backward(s, l, c, w, dw, a, dout, dnorm);
    if (d.beside) {
        norm_backward(s, dx, sum_of(s, dw, EXPERTS_PRE_NORM), NULL, dnorm, a->y, weight_of(s, w, EXPERTS_PRE_NORM), c.n,
                      d.C, 1);
        experts_scale_backward(s, w, dw, r, dweight);
    }
    router_input_backward(s, l, c, w, dw, ROUTER_WEIGHT, dweight, a->router_logits, r->route, &d.router, a, dnorm,
                          !d.beside);
    if (d.beside)
        norm_backward(s, dx, sum_of(s, dw, ROUTER_NORM), NULL, dnorm, a->y, weight_of(s, w, ROUTER_NORM), c.n, d.C, 1);
    else
        branch_in_backward(s, c, w, dw, mlp_branch, dx, dnorm, a->y);
    arena_pop(s->arena, mark);
}

#endif
