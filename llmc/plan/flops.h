/*
FLOPs that a pass executes, by formula, recomputation included: products (2 n in out), attention (4 forward, 10 backward
per query-key pair and element of a query) and the delta rule (delta_flops). A training step sums them over its batches.
The dry run of plan.h counts the same (test_plan.c). If ranks share a sequence, both count the rank with the most
tokens.
*/
#ifndef LLMC_FLOPS_H
#define LLMC_FLOPS_H
#include "plan.h"

// Counts FLOPs for an MFU of 6 N + 12 l h q t per token: T^2 query-key pairs in every layer of a document of T tokens,
// without causal mask and window. Each row of a chain has as many pairs as the chain's last row.
static double model_flops_full_attention(const Model *model, const Lora *lora, const Batch *batch, int backward) {
    const Batch *rows = batch_rows(batch);
    const Range all = {0, rows->N};
    double squares = 0, width = 0; // width of queries, summed over all layers
    for (size_t i = 0; i < rows->documents; i++) {
        const double T = (double)(rows->document_start[i + 1] - rows->document_start[i]);
        squares += T * (T + (rows->depth ? (double)rows->depth[i] : 0));
    }
    for (size_t l = 0; l < model->config.num_hidden_layers; l++) width += (double)query_width(&model->config, l);
    return model_flops(model, lora, batch, backward) +
           (backward ? 12 : 4) * (width * squares - attention_elements(&model->config, rows, all));
}

// FLOPs per token: forward, and backward without recomputation
typedef struct {
    double forward, backward;
} ProductFlops;

// Tells whether a sum includes layer l.
typedef int (*LayerChosen)(const RunSettings *settings, size_t l);

// Tells whether layer l restores its input (inputs.h).
static int layer_restores(const RunSettings *settings, size_t l) {
    return l + 1 < settings->model->config.num_hidden_layers && (l + 1) % max_size(settings->inputs_every, 1) > 0;
}

// Tells whether a layer keeps a level from forward to backward.
static int layer_keeps(const RunSettings *settings, size_t l, KeepLevel level) {
    return keep_level(run_keeping(settings), l, settings->model->config.num_hidden_layers) >= level;
}

static int layer_keeps_off(const RunSettings *settings, size_t l) {
    return keep_off(run_keeping(settings), l, settings->model->config.num_hidden_layers);
}

// Tells whether a pass that restores inputs finds the layer's kept tensors: they are on the device.
static int layer_restores_by(const RunSettings *settings, size_t l, KeepLevel level) {
    return layer_restores(settings, l) && layer_keeps(settings, l, level) && !layer_keeps_off(settings, l);
}

// Tells whether backward recomputes layer l's products; whether it does so for keys that layer l lends; whether a pass
// that restores inputs computes all of layer l's products, or only its last.
static int layer_recomputes(const RunSettings *settings, size_t l) { return !layer_keeps(settings, l, LEVEL_PRODUCTS); }
static int layer_lends_again(const RunSettings *settings, size_t l) {
    return layer_lends(&settings->model->config, l) && layer_recomputes(settings, l);
}
static int layer_restores_all(const RunSettings *settings, size_t l) {
    return layer_restores(settings, l) && !layer_restores_by(settings, l, LEVEL_PRODUCTS);
}
static int layer_restores_last(const RunSettings *settings, size_t l) {
    return layer_restores_by(settings, l, LEVEL_PRODUCTS);
}

// Tells whether backward recomputes layer l's attention; whether a pass that restores inputs does so.
static int layer_attends_again(const RunSettings *settings, size_t l) {
    return !layer_keeps(settings, l, LEVEL_ATTENTION);
}
static int layer_restores_attention(const RunSettings *settings, size_t l) {
    return layer_restores(settings, l) && !layer_restores_by(settings, l, LEVEL_ATTENTION);
}

// Tells whether layer l's attention passes keys round a ring of ranks.
static int layer_in_ring(const RunSettings *settings, size_t l) {
    return settings->ring && !settings->model->config.kv_lora_rank && world_sp(settings->world) > 1 &&
           layer_kind(&settings->model->config, l) == LAYER_FULL;
}

// Counts the products of tensors first .. last of the layers `chosen` (NULL: all), with their adapters. A token uses k
// of a layer's experts. lora: may be NULL. unless: leaves out layers with this tensor; LAYER_TENSORS: none
static ProductFlops products_unless(const RunSettings *settings, const Lora *lora, LayerChosen chosen,
                                    LayerTensor first, LayerTensor last, LayerTensor unless) {
    const Config *c = &settings->model->config;
    ProductFlops sum = {0, 0};
    for (size_t l = 0; l < c->num_hidden_layers; l++) {
        const unsigned form = layer_form(c, l);
        if (unless != LAYER_TENSORS && layer_tensor_shape(c, form, unless).rows) continue;
        for (int t = first; t <= (int)last && (!chosen || chosen(settings, l)); t++) {
            const TensorShape of = layer_tensor_shape(c, form, (LayerTensor)t);
            const double times = of.experts ? (double)c->num_experts_per_tok : 1;
            const double in = (double)of.cols, out = (double)(of.rows / max_size(of.experts, 1));
            const double rank = times * (lora ? (double)lora_part(lora, l, t)->rank : 0);
            if (!is_product(of.role) || (t == KEY_VALUE_UP && first != last)) continue; // latents_flops counts it
            sum.forward += times * 2 * in * out + 2 * rank * (in + out);
            if (t == INPUT_PROJECTION && lora && !lora_trains_embedding(lora)) continue; // frozen embeddings need no dx
            sum.backward += times * (lora ? 2 : 4) * in * out; // dx, and dW of trained weights
            sum.backward += 2 * rank * (3 * in + 2 * out);     // h again, dA, dx; dh, dB
        }
    }
    return sum;
}

static ProductFlops product_flops(const RunSettings *settings, const Lora *lora, LayerChosen chosen, LayerTensor first,
                                  LayerTensor last) {
    return products_unless(settings, lora, chosen, first, last, LAYER_TENSORS);
}

static ProductFlops all_products_flops(const RunSettings *settings, const Lora *lora, LayerChosen chosen) {
    return product_flops(settings, lora, chosen, NORM1_WEIGHT, INPUT_NORM);
}

// Counts, per token, the last products of MLPs of the layers `chosen`. Their outputs are the next layers' inputs, so
// backward does not recompute them, unless a norm after the MLP needs its input.
static double last_products_flops(const RunSettings *settings, const Lora *lora, LayerChosen chosen) {
    static const LayerTensor last[] = {EXPERTS_DOWN, SHARED_DOWN_WEIGHT, DOWN_WEIGHT};
    double flops = 0;
    for (size_t i = 0; i < sizeof(last) / sizeof(last[0]); i++)
        flops += products_unless(settings, lora, chosen, last[i], last[i], POST_NORM2).forward;
    return flops;
}

// Counts the products of keys and values before their norms, which backward recomputes in addition, in the layers
// `chosen`.
static double norm_inputs_flops(const RunSettings *settings, const Lora *lora, LayerChosen chosen) {
    const Model *model = settings->model;
    double flops = 0;
    if (config_qk_norm(&model->config) || model->config.kv_lora_rank)
        flops += product_flops(settings, lora, chosen, K_WEIGHT, K_WEIGHT).forward;
    if (model->config.family->value_norm) flops += product_flops(settings, lora, chosen, V_WEIGHT, V_WEIGHT).forward;
    return flops;
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

// One rank's share of a batch, in sums over layers and chunks
typedef struct {
    double tokens, elements; // elements: attention_elements of all layers
    double elements_again;   // and of the layers that recompute attention, counted each time
    double linear;           // linear-attention layers that recompute the delta rule, counted each time
    double states_again;     // tokens of a linear layer whose states are recomputed (linear_memory.h)
    double states_below;     // and those below level 0 alone
    double tails;            // shared sequences (scan.h): last tokens of ranges
    double latents;          // latent attention: tokens that a pass over a layer expands, counted each time
} PassSize;

static PassSize pass_size(const RunSettings *settings, const Batch *texts) {
    const Batch *batch = batch_rows(texts);
    const Config *config = &settings->model->config;
    const size_t S = world_sp(settings->world), rank = S > 1 ? sequence_largest_rank(batch->N, S) : 0;
    double again[LAYER_KINDS] = {0}; // of layers that recompute: widths of queries, number of linear layers
    PassSize size = {0};
    for (size_t l = 0; l < config->num_hidden_layers; l++) {
        const int linear = layer_is_linear(config, l);
        const KeepLevel level = linear ? LEVEL_PRODUCTS : LEVEL_ATTENTION; // that keeps the output
        const int times =
            !layer_keeps(settings, l, level) + (layer_restores(settings, l) && !layer_restores_by(settings, l, level));
        again[layer_kind(config, l)] += times * (linear ? 1 : (double)query_width(config, l));
    }
    size.linear = again[LAYER_LINEAR];
    size_t end = 0; // of the rank's earlier range
    for (size_t half = 0; half < 2; half++) {
        const Range own = sequence_part(batch->N, S, rank, half);
        const size_t longest = sequence_part(batch->N, S, rank, 0).count; // the first half is not shorter
        const size_t chunk = min_size(settings->chunk ? settings->chunk : ops_device->chunk, max_size(longest, 1));
        size.tokens += (double)own.count;
        const int cut = method_has_chunks(settings->method) && settings->method != METHOD_MST;
        const int by_ranges = expands_ranges_of(settings);
        if (config->kv_lora_rank)
            size.latents +=
                latents_seen(batch, own, by_ranges && cut ? chunk : max_size(longest, 1), by_ranges ? 0 : end);
        end = own.begin + own.count;
        size.elements += attention_elements(config, batch, own);
        size.elements_again += again[LAYER_FULL] * range_pairs(batch, own, 0);
        if (again[LAYER_WINDOW] > 0)
            size.elements_again += again[LAYER_WINDOW] * range_pairs(batch, own, config->sliding_window);
        if (settings->method == METHOD_STREAM)
            size.states_again += (double)(chunk * chunks_visited_again(chunk, 0, (own.count + chunk - 1) / chunk));
        if (settings->method == METHOD_STREAM)
            size.states_below += (double)(chunk * chunks_visited_below(chunk, (own.count + chunk - 1) / chunk));
        if (S > 1) size.tails += (double)min_size(own.count, max_size(config->linear_conv_kernel_dim, 1) - 1);
    }
    return size;
}

// Counts, per token, the products of the layers whose inputs are restored, once more forward.
static double restored_flops(const RunSettings *settings) {
    return all_products_flops(settings, settings->lora, layer_restores_all).forward +
           last_products_flops(settings, settings->lora, layer_restores_last);
}

static double flops_restored(const RunSettings *settings, const Batch *batch) {
    const PassSize size = pass_size(settings, batch);
    return size.tokens * restored_flops(settings) +
           size.latents *
               product_flops(settings, settings->lora, layer_restores_attention, KEY_VALUE_UP, KEY_VALUE_UP).forward;
}

// Counts the products that expand latents: of each token once, or once for each chunk that sees it. In backward they
// are computed again, and folded.
static double flops_latents(const RunSettings *settings, const Lora *lora, const PassSize *size, int backward) {
    const ProductFlops each = product_flops(settings, lora, NULL, KEY_VALUE_UP, KEY_VALUE_UP);
    double flops = each.forward;
    if (backward) flops += each.backward;
    if (backward && method_recomputes(settings->method) && expands_ranges_of(settings))
        flops += product_flops(settings, lora, layer_attends_again, KEY_VALUE_UP, KEY_VALUE_UP).forward;
    if (backward && method_recomputes(settings->method))
        flops += product_flops(settings, lora, layer_restores_attention, KEY_VALUE_UP, KEY_VALUE_UP).forward;
    return size->latents * flops;
}

// Counts the FLOPs of a pass that expand latents and fold their gradients.
static double flops_expansion(const RunSettings *settings, const Batch *batch) {
    const PassSize size = pass_size(settings, batch);
    const double forward = flops_latents(settings, settings->lora, &size, 0);
    const double again = method_is_chunk_major(settings->method) ? forward : 0; // in pass 2
    const double share = settings->method == METHOD_SPACO ? settings->sparse.keep : 1;
    return forward + (settings->backward ? share * (again + flops_latents(settings, settings->lora, &size, 1)) : 0);
}

// Counts, per token, the products from which linear attention's states follow, in the layers `chosen`.
static double state_inputs_flops(const RunSettings *settings, const Lora *lora, LayerChosen chosen) {
    return product_flops(settings, lora, chosen, IN_QKV_WEIGHT, IN_A_WEIGHT).forward -
           product_flops(settings, lora, chosen, IN_Z_WEIGHT, IN_Z_WEIGHT).forward; // Mamba-2's z comes before
}

// Counts linear attention's additional FLOPs for a shared sequence (scan.h), forward or backward.
static double flops_scan(const RunSettings *settings, const Lora *lora, const PassSize *size, int backward) {
    const Model *model = settings->model;
    const LinearShape d = shapes_of(model).linear;
    const double layers = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    if (layers == 0 || world_sp(settings->world) == 1) return 0;
    const ProductFlops qkv = product_flops(settings, lora, NULL, IN_QKV_WEIGHT, IN_V_WEIGHT);
    const double inputs = state_inputs_flops(settings, lora, NULL),
                 state = layers * delta_token_flops(model, DELTA_STATE);
    double flops = 2 * 2 * layers *
                   (double)(d.transfer / d.HV * d.S /
                            (d.ssd ? 1 : d.DK)); // the state, or its gradient, passes through both ranges
    if (!backward)
        return flops + size->tokens * (inputs + state + layers * delta_token_flops(model, DELTA_TRANSFER)) +
               size->tails * qkv.forward;
    flops += size->tokens * layers * delta_token_flops(model, DELTA_STATE_BACKWARD) + size->tails * qkv.backward;
    if (method_recomputes(settings->method)) flops += size->tokens * inputs + size->states_below * (inputs + state);
    return flops;
}

// Counts a forward pass for log-probabilities. adapters: 1: of the model with adapters
static double flops_forward(const RunSettings *settings, const Batch *batch, int adapters) {
    const Model *model = settings->model;
    const Lora *lora = adapters ? settings->lora : NULL;
    const PassSize size = pass_size(settings, batch);
    const double linear = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    double layers = all_products_flops(settings, lora, NULL).forward;
    if (linear > 0) layers += linear * delta_token_flops(model, DELTA_FORWARD);
    return size.tokens * (layers + outer_flops(model, lora).forward) + 4 * size.elements +
           flops_scan(settings, lora, &size, 0) + flops_latents(settings, lora, &size, 0);
}

// Tells whether layer l's inputs of linear attention are kept off-device. Then states below level 0 are recomputed from
// the layer's input.
static int layer_loads_inputs(const RunSettings *settings, size_t l) {
    return layer_keeps(settings, l, LEVEL_PRODUCTS) && layer_keeps_off(settings, l);
}

// Counts the delta rule's backward, including recomputation, and the products that restore its states.
static double flops_rule(const RunSettings *settings, const PassSize *size) {
    const Model *model = settings->model;
    const double layers = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    if (layers == 0) return 0;
    const double rule = delta_token_flops(model, DELTA_FORWARD);
    double flops = layers * size->tokens * delta_token_flops(model, DELTA_BACKWARD);
    if (!method_recomputes(settings->method)) return flops;
    double recompute = 0; // linear layers whose states at intervals are not kept
    for (size_t l = 0; l < model->config.num_hidden_layers; l++)
        recompute += layer_is_linear(&model->config, l) && layer_recomputes(settings, l);
    const double state = delta_token_flops(model, DELTA_STATE);
    flops += size->linear * size->tokens * rule;
    flops += size->states_again * (state_inputs_flops(settings, settings->lora, layer_recomputes) + recompute * state);
    const ProductFlops loaded =
        product_flops(settings, settings->lora, layer_loads_inputs, IN_GATE_WEIGHT, IN_A_WEIGHT);
    return flops + size->states_below * (loaded.forward + (layers - recompute) * state);
}

// Counts forward and backward. Recomputation follows each method's steps in streambp.h.
static double flops_forward_backward(const RunSettings *settings, const Batch *batch) {
    const Model *model = settings->model;
    const Lora *lora = settings->lora;
    const PassSize size = pass_size(settings, batch);
    const ProductFlops all = all_products_flops(settings, lora, NULL);
    ProductFlops head = outer_flops(model, lora);
    double layers = all.backward, flops = 10 * size.elements + flops_rule(settings, &size);
    flops += flops_scan(settings, lora, &size, 1) + flops_latents(settings, lora, &size, 1);
    // Chunk-major orders keep neither keys nor values before their norms.
    layers += norm_inputs_flops(settings, lora, method_is_chunk_major(settings->method) ? NULL : layer_recomputes);
    if (method_recomputes(settings->method)) {
        layers += all_products_flops(settings, lora, layer_recomputes).forward -
                  last_products_flops(settings, lora, layer_recomputes);
        layers -= product_flops(settings, lora, layer_lends_again, K_WEIGHT, V_WEIGHT).forward;
        if (config_qk_norm(&model->config)) // a ring's queries before their norm, with their gates
            layers += product_flops(settings, lora, layer_in_ring, Q_WEIGHT, Q_WEIGHT).forward +
                      product_flops(settings, lora, layer_in_ring, OUTPUT_GATE, OUTPUT_GATE).forward;
        layers += restored_flops(settings), flops += 4 * size.elements_again;
    }
    layers += head.backward;
    if (lora) head.forward -= 2 * (double)(lora->outer[EMBEDDING].rank * model->config.hidden_size);
    const double forward = flops_forward(settings, batch, 1);
    const int waits = objective_weights_wait(&settings->objective) == WEIGHTS_BY_SEQUENCE;
    if (method_is_chunk_major(settings->method)) { // forward twice; the head's first forward only if objectives need it
        const int sparse = settings->method == METHOD_SPACO;
        return forward - (waits || sparse ? 0 : size.tokens * head.forward) +
               (sparse ? settings->sparse.keep : 1) * (forward + size.tokens * layers + flops);
    }
    if (waits) layers += head.forward;
    return forward + size.tokens * layers + flops;
}

#endif
