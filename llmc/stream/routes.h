/*
Routes: the experts of each token. The first forward pass chooses the routes and stores them for all layers, 2 k bytes
a token and layer. So backward recomputes the same function, even if other chunks or kernels change a logit's last bits.
A batch may bring the routes of the pass that wrote its texts. Then the model uses these (--router-replay), with weights
from its own logits, or counts how many of its own routes differ.

Two losses of the routers may be added to the objective's loss. Let p = softmax(z) of a token's logits. Let f_e be the
share of rows of expert e times k, and P_e the mean of p_e. Both are taken over all tokens and layers of the micro-batch
(and the ranks that share its sequence). The losses are

    balance   coefficient E sum_e f_e P_e     its gradient: dz_e = coefficient E / N p_e (f_e - sum_j p_j f_j)
    z         coefficient mean of log(sum_e exp z_e)^2

each divided by the micro-batches of the step, as TRL does. N is tokens times layers with experts, as in transformers'
load_balancing_loss_func. Forward counts rows; backward needs f alone. A row that documents share counts once for each
of them (tree.h), so both losses are those of separate documents.
*/
#ifndef LLMC_ROUTES_H
#define LLMC_ROUTES_H
#include "llmc/ranks/dist.h"
#include "state.h"

static size_t expert_layers(const StreamBP *s) {
    return expert_layers_before(&s->model->config, s->model->config.num_hidden_layers);
}

// Tell whether routes are chosen in this pass, and whether they are stored.
static int routes_are_chosen(const StreamBP *s) {
    const Pass pass = s->now.pass;
    return pass <= PASS_FORWARD_FIRST || (pass == PASS_FORWARD && !method_is_chunk_major(s->setup->method));
}
static int routes_are_stored(const StreamBP *s) { return s->now.pass != PASS_FORWARD_ONLY; }

// Pushes the routes of `rows` tokens, and the sums of the losses, set to 0.
static void routes_push(StreamBP *s, size_t rows) {
    const Shapes d = shapes_of(s->model);
    const size_t layers = expert_layers(s), E = d.router.E;
    Routes *r = &s->routes;
    if (!layers) return;
    r->rows = rows;
    r->route = (uint16_t *)arena_push(s->arena, SHARE_KEPT, "routes of all layers", layers * rows * d.router.k,
                                      sizeof(uint16_t));
    r->times = s->now.tree
                   ? (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "documents of each row", rows, sizeof(int32_t))
                   : NULL;
    if (r->times && r->host_sums) s->ops->copy_in(r->times, s->now.tree->times, rows * sizeof(int32_t));
    r->count = (int64_t *)arena_push(s->arena, SHARE_WORKSPACE, "rows of each expert", layers * E, sizeof(int64_t));
    r->sums = (double *)arena_push(s->arena, SHARE_WORKSPACE, "sums of the routers", E + 1, sizeof(double));
    r->balance = push_summed(s, SHARE_WORKSPACE, "balance of the experts", E);
    s->ops->zero(r->count, layers * E * sizeof(int64_t));
    s->ops->zero(r->sums, (E + 1) * sizeof(double));
}

// Returns the stored routes of layer l, from row `row` on.
static uint16_t *stored_routes(const StreamBP *s, size_t l, size_t row) {
    const size_t layer = expert_layers_before(&s->model->config, l);
    return (uint16_t *)at(s->routes.route, (layer * s->routes.rows + row) * shapes_of(s->model).router.k,
                          sizeof(uint16_t));
}

// Returns memory for the routes of n tokens of layer l, from row `row` on: the stored routes' memory, else pushed.
static uint16_t *routes_memory(const StreamBP *s, size_t l, size_t row, size_t n) {
    const size_t k = shapes_of(s->model).router.k;
    if (routes_are_stored(s)) return stored_routes(s, l, row);
    if (s->routes.fed) return s->routes.fed + expert_layers_before(&s->model->config, l) * n * k;
    return (uint16_t *)arena_push(s->arena, SHARE_WORKSPACE, "routes", n * k, sizeof(uint16_t));
}

// Copies the batch's routes of tokens [token, token + n) in a layer with experts. A row of a tree takes the routes of
// its first document.
static void routes_replay(const StreamBP *s, size_t layer, size_t token, size_t n, uint16_t *route) {
    const size_t k = shapes_of(s->model).router.k, *source = s->now.tree ? s->now.tree->source + token : NULL;
    for (size_t done = 0, count; done < n; done += count) {
        const size_t from = source ? source[done] : token + done;
        for (count = source ? 1 : n; done + count < n && source[done + count] == from + count;) count++;
        s->ops->copy_in(route + done * k, batch_route(s->now.texts, layer, from), count * k * sizeof(uint16_t));
    }
}

// Chooses the routes of tokens [token, token + n) from their logits, or copies the batch's routes. Counts the routes.
static void routes_choose(const StreamBP *s, size_t l, size_t token, size_t n, uint16_t *route, const Summed *logits) {
    const RouterShape router = shapes_of(s->model).router;
    const int replays = s->now.texts->routes.replays;
    const size_t layer = expert_layers_before(&s->model->config, l), mark = arena_mark(s->arena);
    const float *bias = s->setup->router_bias ? s->setup->router_bias + layer * router.E : NULL;
    if (!routes_are_chosen(s)) return;
    if (replays) routes_replay(s, layer, token, n, route);
    s->ops->router_choose(route, logits, bias, n, &router, replays);
    if (!routes_are_stored(s)) return;
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "router's scratch", s->ops->router_count_scratch(n, router.E));
    double *sums = router.kind == ROUTER_SOFTMAX ? s->routes.sums : NULL; // other routers have no losses
    s->ops->router_count((int64_t *)at(s->routes.count, layer * router.E, sizeof(int64_t)), sums, logits, route,
                         s->routes.times ? s->routes.times + token : NULL, n, &router, scratch);
    arena_pop(s->arena, mark);
}

// Computes the factors of the losses' gradient for backward, once the rows of all layers are counted. Collective among
// ranks that share the sequence.
static void routes_balance(StreamBP *s) {
    const Shapes d = shapes_of(s->model);
    const size_t layers = expert_layers(s), E = d.router.E;
    const DType type = dtype_of_sums(s->model->dtype);
    Routes *r = &s->routes;
    if (!layers || !s->routes.host_sums) return; // NULL in the dry run
    const double N = (double)s->now.texts->N * (double)layers;
    const double share = s->now.texts->empty ? 0 : 1 / fmax(r->micro_batches, 1); // an empty batch has no loss
    double *f = r->host_sums + E + 1, *values = f + E;
    s->ops->copy_out(r->host_count, r->count, layers * E * sizeof(int64_t));
    s->ops->copy_out(r->host_sums, r->sums, (E + 1) * sizeof(double));
    for (size_t i = 0; i < layers * E; i++) { // converts integers in place
        int64_t rows;
        memcpy(&rows, &r->host_count[i], sizeof(rows));
        r->host_count[i] = (double)rows;
    }
    if (s->now.ranks > 1) dist_sum(RANKS_SEQUENCE, r->host_count, layers * E);
    if (s->now.ranks > 1) dist_sum(RANKS_SEQUENCE, r->host_sums, E + 1);
    for (size_t i = 0; r->step_count && share > 0 && i < layers * E; i++) r->step_count[i] += r->host_count[i];
    memset(f, 0, E * sizeof(*f));
    for (size_t i = 0; i < layers * E; i++) f[i % E] += r->host_count[i] / N;
    for (size_t e = 0; e < E; e++) f[e] *= r->coefficient * share * (double)E / N;
    elements_convert(values, type, f, DTYPE_FP64, E);
    s->ops->copy_in(r->balance, values, E * dtype_size(type));
    r->z = r->z_coefficient * share / N;
}

static int route_has(const uint16_t *route, size_t k, uint16_t expert) {
    for (size_t i = 0; i < k; i++)
        if (route[i] == expert) return 1;
    return 0;
}

// Counts the chosen experts of rows [row, row + n) that differ from the batch's routes in a layer with experts, for
// each document of a row. chosen[n,k]. sums: choices that differ, all choices
static void routes_count_differing(const Batch *texts, size_t layer, size_t row, size_t n, const uint16_t *chosen,
                                   double sums[2]) {
    const size_t k = texts->routes.k;
    const Range rows = {row, n};
    TextPart part[TEXT_PARTS];
    for (size_t d = 0; d < texts->documents; d++)
        for (size_t i = text_parts(texts, d, rows, part); i-- > 0;)
            for (size_t j = 0; j < part[i].n * k; j++) {
                const uint16_t *route = batch_route(texts, layer, part[i].text + j / k);
                if (route[0] == NO_EXPERT) continue;
                sums[0] += !route_has(route, k, chosen[(part[i].row - row) * k + j]), sums[1]++;
            }
}

// Adds the share of chosen experts that differ from the batch's routes (of the pass that wrote its text). Collective
// among ranks that share the sequence. metrics: NULL on ranks that count none
static void routes_compare(const StreamBP *s, Metrics *metrics) {
    enum { MOST = 8192 };
    uint16_t chosen[MOST];
    const size_t k = shapes_of(s->model).router.k, piece = MOST / k;
    double sums[2] = {0, 0}; // choices that differ, all choices
    if (!s->now.texts->routes.expert || s->now.texts->routes.replays) return;
    for (size_t i = 0, n; i < expert_layers(s) * s->routes.rows; i += n) {
        const size_t layer = i / s->routes.rows, row = i % s->routes.rows, second = row >= s->now.own[0].count;
        const Range own = s->now.own[second];
        const size_t done = row - (second ? s->now.own[0].count : 0);
        n = min_size(own.count - done, piece);
        s->ops->copy_out(chosen, s->routes.route + i * k, n * k * sizeof(uint16_t));
        routes_count_differing(s->now.texts, layer, own.begin + done, n, chosen, sums);
    }
    dist_sum(RANKS_SEQUENCE, sums, 2);
    if (metrics) metric_add(metrics, "router_differs", sums[0], sums[1]);
}

// Adds metrics of the last sequence's routes: the use of experts and the losses. Collective among ranks that share the
// sequence. metrics: NULL on ranks that count none
static void routes_metrics(const StreamBP *s, Metrics *metrics) {
    const size_t layers = expert_layers(s), E = shapes_of(s->model).router.E;
    const Routes *r = &s->routes;
    double busiest = 0, unused = 0, rows = 0;
    if (!layers || s->now.texts->empty || s->now.pass == PASS_FORWARD_ONLY) return;
    routes_compare(s, metrics);
    if (!metrics) return;
    for (size_t l = 0; l < layers; l++) {
        double most = 0, all = 0;
        for (size_t e = 0; e < E; e++) {
            const double count = r->host_count[l * E + e];
            most = fmax(most, count), all += count, unused += count == 0;
        }
        busiest += all > 0 ? most * (double)E / all : 0, rows += all;
    }
    metric_add(metrics, "expert_imbalance", busiest / (double)layers, 1);
    metric_add(metrics, "experts_unused", unused, 1);
    if (rows == 0 || s->model->config.family->router != ROUTER_SOFTMAX) return;
    double aux = 0;
    const double N = (double)s->now.texts->N * (double)layers;
    for (size_t i = 0; i < layers * E; i++) aux += r->host_count[i] / N * r->host_sums[i % E] / N;
    metric_add(metrics, "aux_loss", aux * (double)E, 1);
    if (r->z_coefficient > 0) metric_add(metrics, "z_loss", r->host_sums[E] / N, 1);
}

// Moves the routers' biases by `rate`: up if an expert had fewer rows than the mean in the step, down if more (arXiv
// 2408.15664). bias: host [layers with experts,E]. Every rank has the counts of the whole step.
static void routes_bias_update(StreamBP *s, float *bias, double rate) {
    const size_t layers = expert_layers(s), E = shapes_of(s->model).router.E;
    for (size_t l = 0; l < layers; l++) {
        double *count = s->routes.step_count + l * E, mean = 0;
        for (size_t e = 0; e < E; e++) mean += count[e] / (double)E;
        for (size_t e = 0; e < E; e++) bias[l * E + e] += (float)(rate * ((count[e] < mean) - (count[e] > mean)));
        memset(count, 0, E * sizeof(*count));
    }
    s->ops->copy_in(s->setup->router_bias, bias, layers * E * sizeof(float));
}

#endif
