/*
FLOPs that a pass executes, by formula: products (2 n in out) and attention (4 forward, 10 backward for each query-key
pair and element of the queries), recomputation counted. A training step adds them up over its batches. The dry walk of
plan.h counts the same (test_plan.c); of ranks that share a sequence both mean the one with the most tokens.
*/
#ifndef LLMC_FLOPS_H
#define LLMC_FLOPS_H
#include "plan.h"

// model_flops as others count it who print an MFU of 6 N + 12 l h q t a token: a document of T tokens has T^2 query-key
// pairs in every layer, as if there were no causal mask and no window.
static double model_flops_full_attention(const Model *model, const Lora *lora, const Batch *batch, int backward) {
    const Shapes d = shapes_of(model);
    const double windows = (double)layers_with_window(&model->config), L = (double)d.L;
    double squares = 0, pairs = (L - windows) * batch_pairs(batch, 0);
    if (windows > 0) pairs += windows * batch_pairs(batch, window_of_model(&model->config));
    for (size_t i = 0; i < batch->documents; i++) {
        const double T = (double)(batch->document_start[i + 1] - batch->document_start[i]);
        squares += T * T;
    }
    return model_flops(model, lora, batch, backward) + (backward ? 12 : 4) * (double)d.Q * (L * squares - pairs);
}

// Per token of one linear layer: forward, and backward without recomputation.
typedef struct {
    double forward, backward;
} ProductFlops;

// The products of the parts first .. last of a layer, with the adapters that they have. lora: NULL: none
static ProductFlops product_flops(const Model *model, const Lora *lora, LayerTensor first, LayerTensor last) {
    ProductFlops sum = {0, 0};
    for (int t = first; t <= (int)last; t++) {
        const TensorShape shape = layer_tensor_shape(&model->config, (LayerTensor)t);
        const double product = 2 * (double)shape.rows * (double)shape.cols;
        sum.forward += product;
        sum.backward += lora ? product : 2 * product; // dx; and dW, where the weights are trained
        if (!lora || lora->part[t].a == ABSENT) continue;
        const double a = 2 * (double)lora->rank * (double)shape.cols, b = 2 * (double)lora->rank * (double)shape.rows;
        sum.forward += a + b;
        sum.backward += 3 * a + 2 * b; // h again, dA, dx; dh, dB
    }
    return sum;
}

// One rank's share of a batch: tokens, and query-key pairs of all layers together, of those that restore inputs too.
typedef struct {
    double tokens, pairs, pairs_again;
} PassSize;

static PassSize pass_size(const RunSettings *settings, const Batch *batch) {
    const Config *config = &settings->model->config;
    const size_t S = world_sp(settings->world), rank = S > 1 ? sequence_largest_rank(batch->N, S) : 0;
    const size_t L = config->num_hidden_layers, windows = layers_with_window(config);
    size_t again[2] = {0, 0}; // layers that restore inputs (inputs.h): without a window, with one
    PassSize size = {0, 0, 0};
    for (size_t l = 0; l + 1 < L; l++)
        again[layer_window(config, l) > 0] += (l + 1) % max_size(settings->inputs_every, 1) > 0;
    for (size_t half = 0; half < 2; half++) {
        const Range own = sequence_part(batch->N, S, rank, half);
        size.tokens += (double)own.count;
        const double all = range_pairs(batch, own, 0);
        const double near = windows ? range_pairs(batch, own, window_of_model(config)) : 0;
        size.pairs += (double)(L - windows) * all + (double)windows * near;
        size.pairs_again += (double)again[0] * all + (double)again[1] * near;
    }
    return size;
}

// One forward pass for log-probabilities; without adapters that of the model below them.
static double flops_forward(const RunSettings *settings, const Batch *batch, int adapters) {
    const Shapes d = shapes_of(settings->model);
    const Lora *lora = adapters ? settings->lora : NULL;
    const PassSize size = pass_size(settings, batch);
    const double layer = product_flops(settings->model, lora, Q_WEIGHT, DOWN_WEIGHT).forward;
    return size.tokens * ((double)d.L * layer + 2 * (double)(d.C * d.V)) + 4 * (double)d.Q * size.pairs;
}

// Forward and backward. What each method computes again is what its steps in streambp.h do.
static double flops_forward_backward(const RunSettings *settings, const Batch *batch) {
    const Model *model = settings->model;
    const Lora *lora = settings->lora;
    const Shapes d = shapes_of(model);
    const PassSize size = pass_size(settings, batch);
    const ProductFlops q = product_flops(model, lora, Q_WEIGHT, Q_WEIGHT),
                       k = product_flops(model, lora, K_WEIGHT, K_WEIGHT);
    const ProductFlops all = product_flops(model, lora, Q_WEIGHT, DOWN_WEIGHT);
    const ProductFlops down = product_flops(model, lora, DOWN_WEIGHT, DOWN_WEIGHT);
    const int ring = settings->ring && world_sp(settings->world) > 1;
    const double L = (double)d.L, rings = ring ? L - (double)layers_with_window(&model->config) : 0;
    const double head = 2 * (double)(d.C * d.V), attention = (double)d.Q * size.pairs;
    double layers = L * all.backward, flops = 10 * attention;
    if (settings->method != METHOD_FULL) {
        layers += L * (all.forward - (d.post_norms ? 0 : down.forward)); // its output is the next layer's input
        if (d.qk_norm) layers += L * k.forward + rings * q.forward;      // before QK-norm
        if (!settings->keep) flops += 4 * attention;
        const size_t every = max_size(settings->inputs_every, 1);
        const double again = L - (double)((d.L + every - 1) / every); // layers that restore inputs
        layers += again * all.forward;
        if (!settings->keep || settings->place[PLACED_KEPT] > PLACE_DEVICE) flops += 4 * (double)d.Q * size.pairs_again;
    }
    layers += (lora ? head : 2 * head);
    if (objective_weights_wait(&settings->objective) == WEIGHTS_BY_SEQUENCE) layers += head;
    return flops_forward(settings, batch, 1) + size.tokens * layers + flops;
}

#endif
