/*
The shapes of a model with which the verb `doctor` runs the op cases (llmc/ops/op_cases.h): every op of a pass and of an
optimizer's step.
*/
#ifndef LLMC_DOCTOR_OPS_H
#define LLMC_DOCTOR_OPS_H
#include "doctor_check.h"
#include "llmc/model/rope_frequency.h"
#include "llmc/ops/op_cases.h"
#include "llmc/stream/state.h"

// Returns the shape of n tokens of a model. A model without linear attention gets a few small heads, a model without
// experts a few small experts.
static OpShape model_shape(const Config *c, size_t n) {
    const DeltaShape small = {.HK = 2, .HV = 4, .K = 32, .V = 32, .taps = 4};
    const RouterShape few = {ROUTER_SOFTMAX, 12, 3, 1, 1, 1, 1, 0};
    OpShape s = {0};
    s.n = n, s.C = c->hidden_size, s.V = c->vocab_size, s.FF = c->intermediate_size, s.stride = s.V / 8 * 8 + 8;
    s.NH = c->num_attention_heads, s.NKV = key_value_heads_of(c, 0), s.HD = head_dim_of(c, 0);
    s.VD = c->v_head_dim ? c->v_head_dim : s.HD;
    s.R = rotary_width(c) / 2 * 2, s.rotation = rotation_of(c, 0, 1), s.activation.kind = c->family->activation;
    s.activation.alpha = c->swiglu_alpha, s.activation.limit = c->swiglu_limit, s.cap = logits_cap(c);
    s.learned = c->family->learned_positions, s.type = check.ops->stored, s.delta = small;
    s.norm.eps = c->norm_eps, s.norm.offset = c->family->norm_offset ? 1.0 : 0.0, s.norm.kind = c->family->norm;
    s.count = min_size(n * s.C, 100003), s.first = 7, s.seed = 3;
    if (c->linear_num_value_heads) {
        s.delta.HK = c->linear_num_key_heads, s.delta.HV = c->linear_num_value_heads;
        s.delta.K = c->linear_key_head_dim, s.delta.V = c->linear_value_head_dim;
        s.delta.taps = c->linear_conv_kernel_dim, s.delta.doubled = c->linear_allow_neg_eigval,
        s.delta.ssd = c->family->ssd;
        s.delta.least = c->time_step_min, s.delta.most = time_step_most(c);
    }
    if (!s.delta.HK) s.delta = small; // short convolutions alone
    s.delta.stride = s.delta.HV * s.delta.V + 8;
    s.router = c->family->router && c->num_experts ? router_of(c) : few;
    return s;
}

// Sets product i: tokens, columns in and out, columns before the output's and of a whole row. The last two products are
// an adapter of rank 16 on the keys' columns, and the head, whose rows are padded. Bias and residual alternate.
static void product_shape(OpShape *s, size_t i) {
    const size_t n = s->n, C = s->C, FF = s->FF, V = s->V, few = min_size(n, 40),
                 up = activation_width(s->activation.kind, FF);
    const size_t q = s->NH * s->HD, kv = s->NKV * s->HD, all = q + 2 * kv;
    const size_t products[][5] = {{n, C, all, 0, all}, {n, q, C, 0, C},     {n, C, up, 0, up},
                                  {n, FF, C, 0, C},    {n, 16, kv, q, all}, {few, C, V, 0, s->stride}};
    s->n = products[i][0], s->C = products[i][1], s->OC = products[i][2];
    s->before = products[i][3], s->stride = products[i][4];
    s->bias = i % 2 == 0, s->joined = i % 2, s->accumulate = 1;
}

// Sets the experts' first (i = 0) or last product. Takes no more experts than fit next to the head's weights. A wide
// model without experts gets experts that are wide enough for every kernel.
static void experts_shape(OpShape *s, const Config *c, size_t i) {
    const size_t C = s->C, small = C < 512 ? 24 : 384, I = c->moe_intermediate_size ? c->moe_intermediate_size : small;
    s->router.E = min_size(s->router.E, 16);
    s->C = i ? I : C, s->OC = i ? C : activation_width(s->activation.kind, I);
}

// Makes the i-th of an op's shapes. Returns 0 if the op has fewer shapes.
static int op_shape(const char *op, const Config *c, size_t n, size_t i, OpShape *s) {
    static const QuantFormat formats[] = {
        {QUANT_FP4, 1, QUANT_BLOCK, DTYPE_FP32, {0}},
        {QUANT_NF4, 0, QUANT_BLOCK, DTYPE_BF16, {0}},
        {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_FP16, {0}},
        {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_BF16, {0}},
        {QUANT_MXFP4, 0, MXFP4_BLOCK, DTYPE_BF16, {0}},
        {QUANT_FP8, 0, FP8_BLOCK, DTYPE_BF16, {0, 0, FP8_BLOCK, DTYPE_FP32, FP8_BLOCK}}};
    static const SamplingSettings settings[] = {{0, 0, 0, 1, 0}, {1, 0, 0, 1, 0}, {0.7, 0, 50, 0.95, 0}};
    static const struct {
        const char *op; // beginning of the op's name
        size_t shapes, tokens;
        double factor;
    } special[] = {{"embedding", 1, SIZE_MAX, 1.5},
                   {"dequantise", 4, SIZE_MAX, 0},
                   {"norm", 2, SIZE_MAX, 0},
                   {"linear_forward_quantised", 2, 9, 0},
                   {"linear", 6, SIZE_MAX, 0},
                   {"router", 2, 150, 0.1},
                   {"route", 2, 150, 0},
                   {"experts_forward_quantised", 3, 24, 0},
                   {"experts", 2, 400, 0},
                   {"scale", 1, SIZE_MAX, 0.3},
                   {"dropout", 1, SIZE_MAX, 0.1},
                   {"rope", 1, SIZE_MAX, 1e6},
                   {"split_heads", 2, SIZE_MAX, 0},
                   {"latent_trim", 2, SIZE_MAX, 0},
                   {"conv", 2, SIZE_MAX, 0},
                   {"delta", 2, SIZE_MAX, 0},
                   {"ssd", 2, SIZE_MAX, 0},
                   {"gated_norm", 2, SIZE_MAX, 0},
                   {"state_combine", 2, SIZE_MAX, 0},
                   {"attention_received", 1, 256, 1},
                   {"attention", 3, SIZE_MAX, 1},
                   {"logprob", 1, 40, 0.9},
                   {"draw", 3, 3, 0},
                   {"likeliest", 2, 6, 0.9},
                   {"distill", 2, 6, 0.9},
                   {"", 1, SIZE_MAX, 0}};
    size_t row = 0, shapes;
    while (strncmp(op, special[row].op, strlen(special[row].op)) != 0) row++;
    const char *const kind = special[row].op;
    *s = model_shape(c, min_size(n, special[row].tokens));
    s->factor = special[row].factor, shapes = special[row].shapes;
    s->accumulate = i == 0, s->back = s->documents = s->in_ranges = i == 1, s->bias = s->joined = s->times = i == 0;
    s->format = formats[i % 3], s->sampling = settings[i % 3], s->sampling.cap = s->cap;
    if (!strcmp(kind, "embedding")) s->positions = min_size(n, c->max_position_embeddings), s->type = check.ops->summed;
    if (!strcmp(kind, "dequantise") && i == 3) s->format = formats[5];
    if (!strcmp(kind, "rope")) s->positions = 131072;
    if (!strncmp(op, "latent", strlen("latent")) && c->qk_rope_head_dim) s->R = c->qk_rope_head_dim;
    if (!strcmp(kind, "draw")) s->seed = i;
    if (!strcmp(kind, "likeliest") || !strcmp(kind, "distill"))
        s->count = min_size(s->V, 64), s->softness = i ? 2 : 1, s->share = i ? 0.6 : 1;
    if (!strcmp(op, "scatter_rows") || !strcmp(op, "gather_rows")) s->V = 2 * n;
    if (!strcmp(op, "blocks_choose")) s->positions = n, s->count = min_size(n, 16);
    if (!strcmp(kind, "attention_received")) s->positions = 2 * s->n;
    if (!strcmp(kind, "norm")) { // the second shape: of heads; the third: of values
        shapes = c->family->value_norm ? 3 : config_qk_norm(c) ? 2 : 1, s->bare = i == 2;
        if (i) s->n = n * s->NH, s->C = s->HD;
    }
    if (!strcmp(kind, "conv") && c->linear_num_value_heads && !c->linear_num_key_heads) {
        const DeltaShape gated = {.HV = s->C, .V = 1, .taps = c->linear_conv_kernel_dim, .gates = 1};
        s->delta = gated;
    }
    if (!strcmp(kind, "linear") && i < shapes) product_shape(s, i);
    if (!strncmp(kind, "experts", strlen("experts"))) experts_shape(s, c, i), s->format = formats[3 + i % 3];
    if (!strncmp(op, "experts_bias", strlen("experts_bias")))
        s->C = s->OC, s->joined = i == 1;          // biases of both products
    if (!strcmp(kind, "linear_forward_quantised")) // few output columns, since a whole record is decoded
        s->OC = s->stride = min_size(s->FF, 100), s->first = 1, s->format = formats[i ? 5 : 3];
    if (!strcmp(kind, "attention")) { // like most passes; keys in two ranges; in the model's window, if it has one
        shapes = c->sliding_window ? 3 : 2;
        s->spans.window = i == 2 ? min_size(c->sliding_window, 2 * n) : 0;
        s->positions = n + max_size(n, s->spans.window), s->sinks = c->family->sinks;
        if (i == 2) s->HD = head_dim_of(c, FORM_WINDOW), s->NKV = key_value_heads_of(c, FORM_WINDOW);
    }
    return i < shapes;
}

#endif
