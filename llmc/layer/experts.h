/*
An MLP of experts (a mixture): a router gives each token k of E experts with a weight each,

    out = sum_j w_j W_down[e_j] (silu(W_gate[e_j] x) W_up[e_j] x)    (+ s(g . x) times a shared expert, of every token)

A chunk's rows, one for each token and slot, are sorted by expert. Grouped products multiply each expert's rows by its
matrices. Weights w_j multiply the input of the last product, which is linear. In backward, with u = dout W_down,

    dw_j = u . activated,    dactivated = w_j u

so the last product is not recomputed. Routes are stored (stream/routes.h); backward recomputes the other activations.
One buffer [R,C], R = n k, holds in turn the rows of x, the experts' outputs, dout, x again and dx.
*/
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H
#include "branch.h"
#include "llmc/stream/expert_modules.h"

// A chunk's rows, sorted by expert
typedef struct {
    ExpertRows rows;
    uint16_t *route; // [n,k]
    Summed *chosen;  // [n,k] weights of each token's experts, by the router
    Summed *weight;  // [n,k] `chosen` times the experts' own factors; `chosen` itself without factors
    int32_t *place;  // [n,k] sorted row of each token's slot
    Stored *inner;   // [R,C] the buffer of rows (see above)
} Routed;

static const RouterShape scale_shape = {ROUTER_SIGMOID, 1, 1, 0, 1, 1, 1, 0}; // sigmoid of one logit

// Pushes a chunk's rows; none in a layer without experts.
static Routed push_routed(const Visit *v) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t R = v->c.n * d->router.k;
    Routed r = {{NULL, NULL, 0}, NULL, NULL, NULL, NULL, NULL};
    if (!has_part(v->layer, PART_EXPERTS)) return r;
    r.rows.count = R, r.route = routes_memory(s, v->l, v->c.row, v->c.n);
    r.chosen = r.weight = push_summed(s, SHARE_WORKSPACE, "weights of experts", R);
    if (weight_of(v, EXPERTS_SCALE)) r.weight = push_summed(s, SHARE_WORKSPACE, "weights of experts, scaled", R);
    r.rows.first =
        (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "first rows of experts", d->router.E + 1, sizeof(int32_t));
    r.rows.source = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "sources of rows", R, sizeof(int32_t));
    r.place = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "places of rows", R, sizeof(int32_t));
    r.inner = push_stored(s, SHARE_WORKSPACE, "experts' rows", R * d->C);
    return r;
}

static void rows_gather(const Visit *v, const Routed *r, const Stored *x) {
    const Shapes *d = &v->layer->shape;
    v->s->ops->route_gather(r->inner, x, r->rows.source, v->c.n, d->router.k, d->C);
}

static void rows_weigh(const Visit *v, const Routed *r, Stored *out, const Stored *activated) {
    v->s->ops->route_weigh(out, activated, r->weight, r->rows.source, r->rows.count, v->layer->shape.I);
}

// Runs the norms of experts and router that the layer has, and computes logits. Chooses the routes, unless they are
// stored already.
static void router_forward(const Visit *v, const Activations *a, uint16_t *route) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    make_norm(v, a, EXPERTS_PRE_NORM, LAYER_TENSORS, a->expert_norm, a->x[1], NULL);
    make_norm(v, a, ROUTER_NORM, LAYER_TENSORS, a->router_norm, a->x[1], NULL);
    if (!is_found(v, a, a->router_logits)) {
        logits_forward(v, ROUTER_WEIGHT, a->router_logits, a->router_norm, d->router.E);
        multiply(s, a->router_logits, dtype_of_sums(s->model->dtype), d->router_scale, v->c.n * d->router.E);
    }
    routes_choose(s, v->l, v->c.token, v->c.n, route, a->router_logits);
}

// Computes the experts' weights from logits and routes, and sorts the rows, if any, by expert.
static void rows_sort(const Visit *v, const Activations *a, const Routed *r) {
    const StreamBP *s = v->s;
    const RouterShape *router = &v->layer->shape.router;
    const size_t mark = arena_mark(s->arena), n = v->c.n;
    if (!r->rows.count) return;
    Summed *scratch =
        push_summed(s, SHARE_WORKSPACE, "sorting rows", s->ops->route_sort_scratch(n, router->k, router->E));
    s->ops->router_weights(r->chosen, a->router_logits, r->route, n, router);
    s->ops->route_sort(r->rows.first, r->rows.source, r->place, r->route, n, router->k, router->E, scratch);
    if (r->weight != r->chosen)
        s->ops->experts_scale_forward(r->weight, r->chosen, weight_of(v, EXPERTS_SCALE), r->rows.first, r->rows.source,
                                      r->rows.count, router->E);
    arena_pop(s->arena, mark);
}

// Runs experts and the shared expert up to their activations, from x. spare: nothing else reads the activations, so
// those of experts are weighed
static void experts_activate(const Visit *v, const Activations *a, const Routed *r, int spare) {
    const Shapes *d = &v->layer->shape;
    router_forward(v, a, r->route);
    rows_sort(v, a, r);
    if (!is_found(v, a, a->expert_gate_up)) {
        rows_gather(v, r, a->expert_norm);
        expert_activate(v, r->rows, spare ? r->weight : NULL, a->expert_activated, a->expert_gate_up, r->inner,
                        !spare || keeps(v, LEVEL_PRODUCTS));
    } else {
        make_activation(v, a, a->expert_activated, a->expert_gate_up, r->rows.count, d->I);
        if (spare) rows_weigh(v, r, a->expert_activated, a->expert_activated);
    }
    if (!d->shared) return;
    make_product(v, a, SHARED_GATE_WEIGHT, a->shared_gate_up, a->norm[1], NULL);
    make_activation(v, a, a->shared_activated, a->shared_gate_up, v->c.n, d->shared);
    if (!is_found(v, a, a->shared_logit)) logits_forward(v, SHARED_SCALE_WEIGHT, a->shared_logit, a->norm[1], 1);
}

// Returns the shared expert's activation times its scale, pushed. *scale: [n], pushed; NULL if the family has no scale
static Stored *shared_scaled(const Visit *v, const Activations *a, Summed **scale) {
    const StreamBP *s = v->s;
    const size_t width = v->layer->shape.shared, n = v->c.n;
    *scale = NULL;
    if (!a->shared_logit) return a->shared_activated;
    *scale = push_summed(s, SHARE_WORKSPACE, "scale of the shared expert", n);
    Stored *scaled = push_stored(s, SHARE_WORKSPACE, "the shared expert, scaled", n * width);
    s->ops->router_weights(*scale, a->shared_logit, NULL, n, &scale_shape);
    s->ops->route_weigh(scaled, a->shared_activated, *scale, NULL, n, width);
    return scaled;
}

// Runs the last products of the experts and the shared expert, and sums them into part j of branch i. spare: as in
// experts_activate
static void experts_sum(const Visit *v, size_t i, size_t j, const Activations *a, const Routed *r, int spare) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena), R = r->rows.count;
    ProductTarget target = part_target(v, i, j, a);
    Stored *weighed = a->expert_activated;
    Summed *scale;
    if (!target.out || is_found(v, a, target.out)) {
        part_finish(v, i, j, a);
        return;
    }
    if (!spare) {
        weighed = push_stored(s, SHARE_WORKSPACE, "experts, weighed", R * d->I);
        rows_weigh(v, r, weighed, a->expert_activated);
    }
    expert_forward(v, EXPERTS_DOWN, r->rows, r->weight, r->inner, weighed);
    if (d->shared) {
        linear_forward(v, SHARED_DOWN_WEIGHT, target.out, shared_scaled(v, a, &scale), target.residual);
        target.residual = target.out;
    }
    s->ops->route_combine(target.out, r->inner, r->place, target.residual, v->c.n, d->router.k, d->C);
    arena_pop(s->arena, mark);
    part_finish(v, i, j, a);
}

// Runs experts and the shared expert, part j of branch i. r NULL (forward): pushes the rows, and may overwrite
// activations unless they are kept
static void experts_part_forward(const Visit *v, size_t i, size_t j, const Activations *a, const Routed *r) {
    const int spare = !r && !keeps(v, LEVEL_ALL);
    const Routed rows = r ? *r : push_routed(v);
    experts_activate(v, a, &rows, spare);
    experts_sum(v, i, j, a, &rows, spare);
}

// dnorm[n,C] = the gradient through the experts; dweight[n,k] = the gradient of their weights; dW +=
static void routed_backward(const Visit *v, const Activations *a, const Routed *r, const Stored *dout, Stored *dnorm,
                            Summed *dweight) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena), R = r->rows.count;
    Stored *du = push_stored(s, SHARE_WORKSPACE, "gradient of experts' activations", R * d->I), *dh;
    rows_gather(v, r, dout);
    dh = expert_backward_input(v, EXPERTS_DOWN, r->rows, du, r->inner);
    s->ops->route_weigh_backward(dweight, du, a->expert_activated, du, r->weight, r->rows.source, R, d->I);
    expert_backward_bias(v, EXPERTS_DOWN, r->rows, r->inner, r->weight, dweight);
    expert_backward_weight(v, EXPERTS_DOWN, r->rows, r->inner, a->expert_activated, dh);
    s->ops->activation_backward(a->expert_gate_up, du, a->expert_gate_up, d->activation, R, d->I);
    expert_backward_bias(v, EXPERTS_GATE_UP, r->rows, a->expert_gate_up, NULL, NULL);
    rows_gather(v, r, a->expert_norm);
    dh = expert_backward_narrow(v, EXPERTS_GATE_UP, r->rows, a->expert_gate_up);
    expert_backward_weight(v, EXPERTS_GATE_UP, r->rows, a->expert_gate_up, r->inner, dh);
    expert_backward_wide(v, EXPERTS_GATE_UP, r->rows, r->inner, a->expert_gate_up, dh);
    s->ops->route_combine(dnorm, r->inner, r->place, NULL, v->c.n, d->router.k, d->C);
    arena_pop(s->arena, mark);
}

// A linear layer whose logits give weights: the router (of experts), or the shared expert's scale
typedef struct {
    LayerTensor tensor;
    const Summed *logits;
    const uint16_t *route; // the router's routes; NULL for the scale
    const RouterShape *shape;
    const Stored *x; // input of the linear layer
    double scale;    // factor on the logits
} Weigher;

// dx[n,C] = (accumulate: +=) the gradient through the logits, from dweight, the gradient of the weights; dW +=
static void weigher_backward(const Visit *v, Weigher of, const Summed *dweight, Stored *dx, int accumulate) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), count = v->c.n * of.shape->E;
    const Summed *balance = of.route && s->routes.coefficient > 0 ? s->routes.balance : NULL;
    const int32_t *times = of.route && s->routes.times ? s->routes.times + v->c.row : NULL;
    Stored *dlogits = push_stored(s, SHARE_WORKSPACE, "gradient of the router's logits", count);
    s->ops->router_backward(dlogits, dweight, of.logits, of.route, balance, of.route ? s->routes.z : 0, times, v->c.n,
                            of.shape);
    multiply(s, dlogits, s->model->dtype, of.scale, count);
    linear_backward(v, of.tensor, dx, dlogits, of.x, accumulate);
    arena_pop(s->arena, mark);
}

// dnorm[n,C] += the gradient through the shared expert and its scale; dW +=
static void shared_backward(const Visit *v, const Activations *a, const Stored *dout, Stored *dnorm) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const size_t mark = arena_mark(s->arena), n = v->c.n;
    Summed *scale;
    Stored *scaled = shared_scaled(v, a, &scale);
    Stored *du = push_stored(s, SHARE_WORKSPACE, "gradient of the shared expert", n * d->shared);
    linear_backward(v, SHARED_DOWN_WEIGHT, du, dout, scaled, 0);
    if (scale) {
        const Weigher of = {SHARED_SCALE_WEIGHT, a->shared_logit, NULL, &scale_shape, a->norm[1], 1};
        Summed *dscale = push_summed(s, SHARE_WORKSPACE, "gradient of the shared expert's scale", n);
        s->ops->route_weigh_backward(dscale, du, a->shared_activated, du, scale, NULL, n, d->shared);
        weigher_backward(v, of, dscale, dnorm, 1);
    }
    s->ops->activation_backward(a->shared_gate_up, du, a->shared_gate_up, d->activation, n, d->shared);
    linear_backward(v, SHARED_GATE_WEIGHT, dnorm, a->shared_gate_up, a->norm[1], 1);
    arena_pop(s->arena, mark);
}

// Turns the gradient of `weight` into the gradient of `chosen`, in place; gradient of the experts' own factors +=
static void experts_scale_backward(const Visit *v, const Routed *r, Summed *dweight) {
    const size_t E = v->layer->shape.router.E;
    if (r->weight != r->chosen)
        v->s->ops->experts_scale_backward(sum_of(v, EXPERTS_SCALE), dweight, r->chosen, weight_of(v, EXPERTS_SCALE),
                                          r->rows.first, r->rows.source, r->rows.count, E);
}

// dx[n,C] += the gradient through experts, router and their norms, from dx of x_{i+1}; dW +=
static void experts_part_backward(const Visit *v, size_t i, size_t j, Activations *a, const Routed *r, Stored *dx) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const Stored *dout = part_out_backward(v, i, j, a, dx);
    const size_t mark = arena_mark(s->arena);
    const int own_norm = has_tensor(v, ROUTER_NORM);
    const Weigher router = {ROUTER_WEIGHT, a->router_logits, r->route, &d->router, a->router_norm, d->router_scale};
    Stored *dnorm = push_stored(s, SHARE_WORKSPACE, "gradient of the second norm", v->c.n * d->C);
    Summed *dweight = push_summed(s, SHARE_WORKSPACE, "gradient of experts' weights", v->c.n * d->router.k);
    routed_backward(v, a, r, dout, dnorm, dweight);
    if (d->shared) shared_backward(v, a, dout, dnorm);
    norm_backward(v, EXPERTS_PRE_NORM, LAYER_TENSORS, dx, dnorm, a->x[i], 1);
    experts_scale_backward(v, r, dweight);
    weigher_backward(v, router, dweight, dnorm, !own_norm);
    norm_backward(v, ROUTER_NORM, LAYER_TENSORS, dx, dnorm, a->x[i], 1);
    if (!own_norm) branch_in_backward(v, i, a, dx, dnorm);
    arena_pop(s->arena, mark);
}

#endif
