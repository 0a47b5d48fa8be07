/*
FLOPs that a pass executes, by formula, recomputation included: products (2 n in out), attention (4 forward, 10 backward
per query-key pair and element of a query) and the delta rule (delta_flops). A training step sums them over its batches.
The dry run of plan.h counts the same (test_plan.c). Of ranks that share a sequence, both count the one with most
tokens.
*/
#ifndef LLMC_FLOPS_H
#define LLMC_FLOPS_H
#include "plan.h"

// Counts model_flops as for an MFU of 6 N + 12 l h q t per token: T^2 query-key pairs in every layer of a document of T
// tokens, without causal mask and window.
static double model_flops_full_attention(const Model *model, const Lora *lora, const Batch *batch, int backward) {
    const Shapes d = shapes_of(model);
    const Range all = {0, batch->N};
    const double layers = (double)(d.L - layers_of_kind(&model->config, LAYER_LINEAR));
    double squares = 0;
    for (size_t i = 0; i < batch->documents; i++) {
        const double T = (double)(batch->document_start[i + 1] - batch->document_start[i]);
        squares += T * T;
    }
    return model_flops(model, lora, batch, backward) +
           (backward ? 12 : 4) * (double)d.Q * (layers * squares - layers_pairs(&model->config, batch, all));
}

// Per token of one linear layer: forward, and backward without recomputation.
typedef struct {
    double forward, backward;
} ProductFlops;

// Returns the mean rank of a tensor's adapters over the layers of a kind. Inexact only if layers of different ranks
// restore inputs.
static double mean_rank(const Lora *lora, int linear, int tensor) {
    const Config *c = &lora->table.config;
    double sum = 0, layers = 0;
    for (size_t l = 0; l < c->num_hidden_layers; l++)
        if (layer_is_linear(c, l) == linear) sum += (double)lora_part(lora, l, tensor)->rank, layers++;
    return layers > 0 ? sum / layers : 0;
}

// Counts the products of parts first .. last of a layer, with their adapters. lora: NULL: none
static ProductFlops product_flops(const Model *model, const Lora *lora, int linear, LayerTensor first,
                                  LayerTensor last) {
    ProductFlops sum = {0, 0};
    for (int t = first; t <= (int)last; t++) {
        const TensorShape shape = layer_tensor_shape(&model->config, linear, (LayerTensor)t);
        const double product = 2 * (double)shape.rows * (double)shape.cols;
        if (!is_product(shape.role)) continue;
        sum.forward += product;
        sum.backward += lora ? product : 2 * product; // dx, and dW of trained weights
        if (!lora) continue;
        const double rank = mean_rank(lora, linear, t);
        const double a = 2 * rank * (double)shape.cols, b = 2 * rank * (double)shape.rows;
        sum.forward += a + b;
        sum.backward += 3 * a + 2 * b; // h again, dA, dx; dh, dB
    }
    return sum;
}

// Counts the head, and the embedding's adapter, per token.
static ProductFlops outer_flops(const Model *model, const Lora *lora) {
    const double C = (double)model->config.hidden_size, V = (double)model->config.vocab_size;
    const double rank = lora ? 2 * (double)lora->outer[LM_HEAD].rank : 0;
    const double embedding = lora ? 2 * (double)lora->outer[EMBEDDING].rank * C : 0;
    const ProductFlops flops = {2 * C * V + rank * (C + V) + embedding,
                                (lora && !lora->saves[LM_HEAD] ? 2 : 4) * C * V + rank * (3 * C + 2 * V) +
                                    2 * embedding};
    return flops;
}

// One rank's share of a batch
typedef struct {
    double tokens, pairs, pairs_again; // query-key pairs of all layers, and of those that restore inputs
    double layers_again[2];            // that restore inputs (inputs.h): with attention, with linear attention
    double states_again;               // tokens of a linear layer whose states are recomputed (linear_memory.h)
    double states_below, tails; // shared sequences (scan.h): recomputed once more below level 0; last tokens of ranges
} PassSize;

static PassSize pass_size(const RunSettings *settings, const Batch *batch) {
    const Config *config = &settings->model->config;
    const size_t S = world_sp(settings->world), rank = S > 1 ? sequence_largest_rank(batch->N, S) : 0;
    double again[LAYER_KINDS] = {0}; // layers that restore inputs
    PassSize size = {0};
    for (size_t l = 0; l + 1 < config->num_hidden_layers; l++)
        again[layer_kind(config, l)] += (l + 1) % max_size(settings->inputs_every, 1) > 0;
    size.layers_again[0] = again[LAYER_FULL] + again[LAYER_WINDOW], size.layers_again[1] = again[LAYER_LINEAR];
    for (size_t half = 0; half < 2; half++) {
        const Range own = sequence_part(batch->N, S, rank, half);
        const size_t longest = sequence_part(batch->N, S, rank, 0).count; // the first is no shorter
        const size_t chunk = min_size(settings->chunk ? settings->chunk : ops_device->chunk, max_size(longest, 1));
        size.tokens += (double)own.count;
        size.pairs += layers_pairs(config, batch, own);
        size.pairs_again += again[LAYER_FULL] * range_pairs(batch, own, 0);
        if (again[LAYER_WINDOW] > 0)
            size.pairs_again += again[LAYER_WINDOW] * range_pairs(batch, own, config->sliding_window);
        if (settings->method == METHOD_STREAM)
            size.states_again += (double)(chunk * chunks_visited_again(chunk, 0, (own.count + chunk - 1) / chunk));
        if (settings->method == METHOD_STREAM && S > 1)
            size.states_below += (double)(chunk * chunks_visited_below(chunk, (own.count + chunk - 1) / chunk));
        if (S > 1) size.tails += (double)min_size(own.count, max_size(config->linear_conv_kernel_dim, 1) - 1);
    }
    return size;
}

// Counts the products of the layers whose inputs are restored, once more forward.
static double flops_restored(const RunSettings *settings, const Batch *batch) {
    const PassSize size = pass_size(settings, batch);
    double flops = 0;
    for (int linear = 0; linear < 2; linear++)
        flops += size.layers_again[linear] *
                 product_flops(settings->model, settings->lora, linear, Q_WEIGHT, DOWN_WEIGHT).forward;
    return size.tokens * flops;
}

// Counts linear attention's extra FLOPs of a shared sequence (scan.h), forward or backward.
static double flops_scan(const RunSettings *settings, const Lora *lora, const PassSize *size, int backward) {
    const Model *model = settings->model;
    const Shapes d = shapes_of(model);
    const double layers = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    if (layers == 0 || world_sp(settings->world) == 1) return 0;
    const ProductFlops z = product_flops(model, lora, 1, IN_Z_WEIGHT, IN_Z_WEIGHT);
    const ProductFlops in = product_flops(model, lora, 1, IN_QKV_WEIGHT, IN_A_WEIGHT);
    const ProductFlops qkv = product_flops(model, lora, 1, IN_QKV_WEIGHT, IN_QKV_WEIGHT);
    const double inputs = in.forward - z.forward, state = delta_token_flops(model, DELTA_STATE);
    double flops = 2 * 2 * (double)(d.DK * d.S); // the state, or its gradient, through both ranges
    if (!backward) {
        flops += size->tokens * (inputs + state + delta_token_flops(model, DELTA_TRANSFER));
        return layers * (flops + size->tails * qkv.forward);
    }
    flops += size->tokens * delta_token_flops(model, DELTA_STATE_BACKWARD) + size->tails * qkv.backward;
    if (method_recomputes(settings->method)) flops += size->tokens * inputs + size->states_below * (inputs + state);
    return layers * flops;
}

// Counts a forward pass for log-probabilities, of the model with or without its adapters.
static double flops_forward(const RunSettings *settings, const Batch *batch, int adapters) {
    const Model *model = settings->model;
    const Shapes d = shapes_of(model);
    const Lora *lora = adapters ? settings->lora : NULL;
    const PassSize size = pass_size(settings, batch);
    const double linear = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    double layers = ((double)d.L - linear) * product_flops(model, lora, 0, Q_WEIGHT, DOWN_WEIGHT).forward;
    if (linear > 0)
        layers += linear * (product_flops(model, lora, 1, Q_WEIGHT, DOWN_WEIGHT).forward +
                            delta_token_flops(model, DELTA_FORWARD));
    return size.tokens * (layers + outer_flops(model, lora).forward) + 4 * (double)d.Q * size.pairs +
           flops_scan(settings, lora, &size, 0);
}

// Counts backward of the linear layers, recomputation included.
static double flops_linear_layers(const RunSettings *settings, const PassSize *size) {
    const Model *model = settings->model;
    const Lora *lora = settings->lora;
    const double layers = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    if (layers == 0) return 0;
    const ProductFlops all = product_flops(model, lora, 1, Q_WEIGHT, DOWN_WEIGHT);
    const ProductFlops down = product_flops(model, lora, 1, DOWN_WEIGHT, DOWN_WEIGHT);
    const ProductFlops z = product_flops(model, lora, 1, IN_Z_WEIGHT, IN_Z_WEIGHT);
    const ProductFlops in = product_flops(model, lora, 1, IN_QKV_WEIGHT, IN_A_WEIGHT);
    const double rule = delta_token_flops(model, DELTA_FORWARD);
    double flops = layers * size->tokens * (all.backward + delta_token_flops(model, DELTA_BACKWARD));
    if (!method_recomputes(settings->method)) return flops;
    flops += layers * size->tokens * (all.forward - down.forward + rule);
    flops += size->layers_again[1] * size->tokens * (all.forward + rule);
    return flops + layers * size->states_again * (in.forward - z.forward + delta_token_flops(model, DELTA_STATE));
}

// Counts forward and backward. Recomputation follows each method's steps in streambp.h.
static double flops_forward_backward(const RunSettings *settings, const Batch *batch) {
    const Model *model = settings->model;
    const Lora *lora = settings->lora;
    const Shapes d = shapes_of(model);
    const PassSize size = pass_size(settings, batch);
    const ProductFlops q = product_flops(model, lora, 0, Q_WEIGHT, Q_WEIGHT),
                       k = product_flops(model, lora, 0, K_WEIGHT, K_WEIGHT);
    const ProductFlops all = product_flops(model, lora, 0, Q_WEIGHT, DOWN_WEIGHT);
    const ProductFlops down = product_flops(model, lora, 0, DOWN_WEIGHT, DOWN_WEIGHT);
    const int ring = settings->ring && world_sp(settings->world) > 1;
    const double L = (double)(d.L - layers_of_kind(&model->config, LAYER_LINEAR)); // with attention
    const double rings = ring ? (double)layers_of_kind(&model->config, LAYER_FULL) : 0;
    ProductFlops head = outer_flops(model, lora);
    const double attention = (double)d.Q * size.pairs;
    double layers = L * all.backward, flops = 10 * attention + flops_linear_layers(settings, &size);
    flops += flops_scan(settings, lora, &size, 1);
    if (method_recomputes(settings->method)) {
        layers += L * (all.forward - (d.post_norms ? 0 : down.forward)); // its output is the next layer's input
        if (d.qk_norm) layers += L * k.forward + rings * q.forward;      // before QK-norm
        if (!settings->keep) flops += 4 * attention;
        layers += size.layers_again[0] * all.forward;
        if (!settings->keep || settings->place[PLACED_KEPT] > PLACE_DEVICE) flops += 4 * (double)d.Q * size.pairs_again;
    }
    layers += head.backward;
    if (lora) head.forward -= 2 * (double)(lora->outer[EMBEDDING].rank * d.C);
    const double forward = flops_forward(settings, batch, 1);
    const int waits = objective_weights_wait(&settings->objective) == WEIGHTS_BY_SEQUENCE;
    if (method_is_chunk_major(settings->method)) { // forward twice, the head's first one only if objectives need it
        const int sparse = settings->method == METHOD_SPACO;
        if (d.qk_norm) layers += L * k.forward;
        return forward - (waits || sparse ? 0 : size.tokens * head.forward) +
               (sparse ? settings->sparse.keep : 1) * (forward + size.tokens * layers + flops);
    }
    if (waits) layers += head.forward;
    return forward + size.tokens * layers + flops;
}

#endif
