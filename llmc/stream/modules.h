/*
The modules of a decoder block for the steps of streambp.h: linear layers with bias and adapters (lora.h), norms, and
QK-norm with rotary embedding. Forward overwrites its output. Backward adds dW to trained weights, or dA and dB to
adapters, and always computes the gradient of the input.

An adapter's activations are [n,rank] and live during one product; backward recomputes them. Its dropout is a function
of (seed, A, token) alone. So parts of one module drop the same elements, also recomputed and in other chunks.
*/
#ifndef LLMC_MODULES_H
#define LLMC_MODULES_H
#include "inputs.h"

#define RANDOM_STREAM_DROPOUT 0x64726f706f7574ull // stream of random.h ("dropout")

// ---- adapters -------------------------------------------------------------------------------------------------------
typedef struct {
    LayerTensor weight, bias; // bias LAYER_TENSORS: none
    size_t in, out;           // weight[out,in]
    LayerTensor last;         // tensors weight .. last have adapters, for adjacent columns of the output
    size_t stride;            // elements from row to row of the output
} Linear;

// Returns the first and the last of linear attention's adjacent projections. A convolution alone has one projection.
static LayerTensor first_of_inputs(const Layer *layer) {
    return layer->shape.linear.ssd ? IN_GATE_WEIGHT : IN_QKV_WEIGHT;
}
static LayerTensor last_of_inputs(const Layer *layer) { return has_rule(layer) ? IN_A_WEIGHT : IN_V_WEIGHT; }

static Linear linear_of(const Visit *v, LayerTensor tensor) {
    const Shapes *d = &v->layer->shape;
    Linear linear = {tensor, Q_BIAS, d->C, d->Q + d->query_gate, tensor, 0};
    switch (tensor) {
    case Q_WEIGHT: linear.in = d->low ? d->low : d->C; break;
    case K_WEIGHT: linear.bias = K_BIAS, linear.out = d->KV; break;
    case V_WEIGHT: linear.bias = V_BIAS, linear.out = d->VV; break;
    case O_WEIGHT: linear.bias = O_BIAS, linear.in = d->O, linear.out = d->C; break;
    case OUTPUT_GATE: linear.bias = LAYER_TENSORS, linear.out = d->gate; break;
    case QUERY_DOWN: linear.bias = LAYER_TENSORS, linear.out = d->low; break;
    case KEY_VALUE_UP:
        linear.bias = LAYER_TENSORS, linear.in = d->KV, linear.out = d->NH * (d->HD - d->shared_key) + d->O;
        break;
    case GATE_WEIGHT: linear.bias = GATE_BIAS, linear.out = d->H, linear.last = UP_WEIGHT; break; // gate and up
    case DOWN_WEIGHT: linear.bias = DOWN_BIAS, linear.in = d->FF, linear.out = d->C; break;
    case ROUTER_WEIGHT: linear.bias = ROUTER_BIAS, linear.out = d->router.E; break;
    case SHARED_SCALE_WEIGHT: linear.bias = LAYER_TENSORS, linear.out = 1; break;
    case SHARED_GATE_WEIGHT:
        linear.bias = LAYER_TENSORS, linear.out = activation_width(d->activation.kind, d->shared),
        linear.last = SHARED_UP_WEIGHT;
        break;
    case SHARED_DOWN_WEIGHT: linear.bias = LAYER_TENSORS, linear.in = d->shared, linear.out = d->C; break;
    case IN_QKV_WEIGHT:
        linear.weight = first_of_inputs(v->layer), linear.last = last_of_inputs(v->layer);
        linear.bias = LAYER_TENSORS, linear.out = d->linear.E;
        break;
    case OUT_WEIGHT: linear.bias = LAYER_TENSORS, linear.in = d->linear.out, linear.out = d->C; break;
    case INPUT_PROJECTION:
    case INPUT_GATE: linear.bias = LAYER_TENSORS, linear.out = d->P; break;
    case INPUT_OUT: linear.bias = LAYER_TENSORS, linear.in = d->P, linear.out = d->C; break;
    default: break;
    }
    linear.stride = linear.out;
    return linear;
}

static size_t tensor_rows(const Visit *v, int tensor) {
    return layer_tensor_shape(&v->s->model->config, v->layer->form, (LayerTensor)tensor).rows;
}

// Returns the part of a product that computes the columns of tensors first .. last alone.
static Linear linear_part(const Visit *v, LayerTensor product, LayerTensor first, LayerTensor last) {
    Linear linear = linear_of(v, product);
    linear.weight = first, linear.last = last, linear.out = 0;
    for (int t = first; t <= (int)last; t++) linear.out += tensor_rows(v, t);
    return linear;
}

typedef struct {
    const LoraPart *part;
    const Stored *a, *b; // [rank,in], [columns,rank]
    size_t column;       // first column of the product's output that it adds to
    uint64_t seed;       // seed of the adapter's dropout
} Adapter;

enum { ADAPTERS_MOST = 6 };

// Finds the adapters of a product; returns their number.
static size_t adapters_of(const Visit *v, Linear linear, Adapter adapter[ADAPTERS_MOST]) {
    const StreamBP *s = v->s;
    const size_t size = dtype_size(s->model->dtype);
    size_t count = 0, column = 0;
    if (!v->w.adapters) return 0;
    for (int tensor = linear.weight; tensor <= (int)linear.last; tensor++) {
        const LoraPart *part = lora_part(s->memory.lora, v->l, tensor);
        if (part->a != ABSENT) {
            adapter[count].part = part;
            adapter[count].a = (const Stored *)at(v->w.adapters, part->a, size);
            adapter[count].b = (const Stored *)at(v->w.adapters, part->b, size);
            adapter[count].column = column;
            adapter[count++].seed = random_bits(s->now.dropout_seed, RANDOM_STREAM_DROPOUT,
                                                group_begin(&s->memory.lora->table, v->l) + part->a);
        }
        column += tensor_rows(v, tensor);
    }
    return count;
}

// Finds the adapter of the embedding or the head in the weights of its group. Returns 0 if there is none.
static int outer_adapter(const StreamBP *s, GroupWeights w, ModelTensor tensor, Adapter *adapter) {
    const size_t size = dtype_size(s->model->dtype);
    if (!w.adapters) return 0;
    adapter->part = &s->memory.lora->outer_part[tensor], adapter->column = 0;
    adapter->a = (const Stored *)at(w.adapters, adapter->part->a, size);
    adapter->b = (const Stored *)at(w.adapters, adapter->part->b, size);
    adapter->seed = random_bits(s->now.dropout_seed, RANDOM_STREAM_DROPOUT,
                                tensor == LM_HEAD ? group_begin(&s->memory.lora->table, GROUP_HEAD) : 0);
    return 1;
}

// Returns the rate of the adapters' dropout: 0 in a pass without gradients.
static double dropout_rate(const StreamBP *s) { return s->now.pass == PASS_FORWARD_ONLY ? 0 : s->memory.lora->dropout; }

// Returns an adapter's input: x[n,in], or with dropout a dropped copy, pushed.
static const Stored *adapter_input(const Visit *v, const Adapter *adapter, const Stored *x, size_t in) {
    const StreamBP *s = v->s;
    const double rate = dropout_rate(s);
    if (rate == 0) return x;
    Stored *dropped = push_stored(s, SHARE_WORKSPACE, "adapter input after dropout", v->c.n * in);
    s->ops->dropout(dropped, x, v->c.n, in, s->now.batch->first + v->c.token, rate, adapter->seed, 0);
    return dropped;
}

// x *= factor
static void multiply(const StreamBP *s, void *x, DType type, double factor, size_t count) {
    if (factor != 1) s->ops->scale(x, type, factor, count);
}

// h[n,rank] = scale * input A^T, pushed
static Stored *adapter_narrow(const Visit *v, const Adapter *adapter, const Stored *input, size_t in) {
    const StreamBP *s = v->s;
    const size_t rank = adapter->part->rank, n = v->c.n;
    Stored *h = push_stored(s, SHARE_WORKSPACE, "adapter", n * rank);
    s->ops->linear_forward(h, input, adapter->a, NULL, NULL, n, in, rank, rank);
    multiply(s, h, s->model->dtype, adapter->part->scale, n * rank);
    return h;
}

// ---- the embedding's adapter: x += scale * A[token] B^T, with the factor of the embedding itself; no dropout --------
// h[n,rank] = scale * A[token], pushed
static Stored *embedding_narrow(const StreamBP *s, const Adapter *adapter, size_t row, size_t n) {
    const size_t rank = adapter->part->rank;
    Stored *h = push_stored(s, SHARE_WORKSPACE, "adapter", n * rank);
    s->ops->embedding_forward(h, s->now.tokens + row, s->now.position + row, adapter->a, NULL, n, rank,
                              adapter->part->scale * shapes_of(s->model).embedding_scale);
    return h;
}

// Adds the embedding's adapter to x[n,C], rows [row, row + n). Keeps x_0 for the layers' own inputs.
static void embedding_adapter_forward(const StreamBP *s, Stored *x, size_t row, size_t n, GroupWeights w) {
    const size_t C = s->model->config.hidden_size, mark = arena_mark(s->arena);
    Adapter adapter;
    if (outer_adapter(s, w, EMBEDDING, &adapter)) {
        const Stored *h = embedding_narrow(s, &adapter, row, n);
        s->ops->linear_forward(x, h, adapter.b, NULL, x, n, adapter.part->rank, C, C);
    }
    first_input_keep(s, x, row, n, w);
    arena_pop(s->arena, mark);
}

// dA, dB of the embedding's adapter += from dx[n,C]. Collective: ranks gather the weights even with n = 0
static void embedding_adapter_backward(StreamBP *s, const Stored *dx, size_t row, size_t n, GroupSums dw) {
    const Shapes d = shapes_of(s->model);
    const DType type = dtype_of_sums(s->model->dtype);
    Adapter adapter;
    first_input_backward(s, row, n, dw);
    if (!s->memory.lora || !s->memory.lora->outer[EMBEDDING].rank) return;
    const GroupWeights w = weights_acquire(&s->memory, GROUP_EMBEDDING);
    if (n && outer_adapter(s, w, EMBEDDING, &adapter)) {
        const size_t rank = adapter.part->rank, mark = arena_mark(s->arena);
        const Stored *h = embedding_narrow(s, &adapter, row, n);
        Stored *dh = push_stored(s, SHARE_WORKSPACE, "gradient of adapter", n * rank);
        Summed *scratch =
            push_summed(s, SHARE_WORKSPACE, "token order", s->ops->embedding_backward_scratch(n, d.V, rank));
        s->ops->linear_backward_weight((Summed *)at(dw.layer, adapter.part->b, dtype_size(type)), NULL, dx, h, n, rank,
                                       d.C, d.C);
        s->ops->linear_backward_input(dh, dx, adapter.b, n, rank, d.C, d.C, 0);
        s->ops->embedding_backward(at(dw.layer, adapter.part->a, dtype_size(type)), type, dh, s->now.tokens + row, n,
                                   d.V, rank, adapter.part->scale * d.embedding_scale, s->model->config.pad_token_id,
                                   scratch);
        arena_pop(s->arena, mark);
    }
    weights_release(&s->memory, GROUP_EMBEDDING);
}

// ---- linear layers --------------------------------------------------------------------------------------------------
// out[n,rows] = x[n,in] W^T (+ bias) (+ residual, which may be out), rows of out `stride` apart. W[rows,in]: `weight`,
// or a matrix in 4 bits at `offset` of its group
static void matrix_forward(const Visit *v, size_t offset, const Stored *weight, Stored *out, const Stored *x,
                           const Stored *bias, const Stored *residual, size_t in, size_t rows, size_t stride) {
    const StreamBP *s = v->s;
    const CodedMatrix m = coded_matrix(&s->memory, v->w, offset);
    if (m.record)
        s->ops->linear_forward_quantised(out, x, m.record, m.format, m.rows, m.first, bias, residual, v->c.n, in, rows,
                                         stride);
    else
        s->ops->linear_forward(out, x, weight, bias, residual, v->c.n, in, rows, stride);
}

// Runs a linear layer without its adapters: one product, or with matrices in 4 bits one product for each tensor.
static void product_forward(const Visit *v, Linear linear, Stored *out, const Stored *x, const Stored *residual) {
    const StreamBP *s = v->s;
    const Stored *bias = weight_of(v, linear.bias);
    size_t rows = linear.out;
    for (size_t t = linear.weight, column = 0; column < linear.out; t++, column += rows) {
        if (v->w.stored) rows = tensor_rows(v, (int)t);
        if (!rows) continue; // the layer lacks this tensor
        matrix_forward(v, v->w.offset[t], weight_of(v, (LayerTensor)t), stored_row(s, out, column, 1), x,
                       bias ? stored_row(s, (Stored *)bias, column, 1) : NULL,
                       residual ? stored_row(s, (Stored *)residual, column, 1) : NULL, linear.in, rows, linear.stride);
    }
}

// out[n,.] = adapter(x[n,in]) (+ residual, which may be out), rows of both `stride` apart
static void adapter_forward(const Visit *v, const Adapter *adapter, size_t in, size_t stride, Stored *out,
                            const Stored *x, const Stored *residual) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena);
    const Stored *h = adapter_narrow(v, adapter, adapter_input(v, adapter, x, in), in);
    s->ops->linear_forward(stored_row(s, out, adapter->column, 1), h, adapter->b, NULL,
                           residual ? stored_row(s, (Stored *)residual, adapter->column, 1) : NULL, v->c.n,
                           adapter->part->rank, adapter->part->columns, stride);
    arena_pop(s->arena, mark);
}

// out[n,out] = x[n,in] W^T + bias (+ residual, which may be out) + adapters. Adapters that write all columns come
// first: an adapter's product takes as long as its output's transfer, and the larger product adds in the same time.
static void linear_forward_part(const Visit *v, Linear linear, Stored *out, const Stored *x, const Stored *residual) {
    Adapter adapter[ADAPTERS_MOST];
    const size_t count = adapters_of(v, linear, adapter);
    size_t columns = 0;
    for (size_t i = 0; i < count; i++) columns += adapter[i].part->columns;
    const int first = columns == linear.out;
    if (!first) product_forward(v, linear, out, x, residual);
    for (size_t i = 0; i < count; i++)
        adapter_forward(v, &adapter[i], linear.in, linear.stride, out, x, first ? residual : out);
    if (first) product_forward(v, linear, out, x, out);
}

// Runs a linear layer. Does nothing if the visited layer lacks it.
static void linear_forward(const Visit *v, LayerTensor tensor, Stored *out, const Stored *x, const Stored *residual) {
    if (has_tensor(v, tensor)) linear_forward_part(v, linear_of(v, tensor), out, x, residual);
}

// dA, dB of one adapter +=. Returns dh[n,rank], the gradient of input A^T, pushed.
static Stored *adapter_backward(const Visit *v, const Adapter *adapter, Linear linear, const Stored *dout,
                                const Stored *x) {
    const StreamBP *s = v->s;
    const LoraPart *part = adapter->part;
    const size_t size = dtype_size(dtype_of_sums(s->model->dtype)), n = v->c.n;
    Stored *dh = push_stored(s, SHARE_WORKSPACE, "gradient of adapter", n * part->rank);
    size_t mark = arena_mark(s->arena);
    const Stored *input = adapter_input(v, adapter, x, linear.in);
    const Stored *h = adapter_narrow(v, adapter, input, linear.in);
    const Stored *columns = (const Stored *)((const char *)dout + adapter->column * dtype_size(s->model->dtype));
    s->ops->linear_backward_input(dh, columns, adapter->b, n, part->rank, part->columns, linear.stride, 0);
    s->ops->linear_backward_weight((Summed *)at(v->dw.layer, part->b, size), NULL, columns, h, n, part->rank,
                                   part->columns, linear.stride);
    multiply(s, dh, s->model->dtype, part->scale, n * part->rank);
    s->ops->linear_backward_weight((Summed *)at(v->dw.layer, part->a, size), NULL, dh, input, n, linear.in, part->rank,
                                   part->rank);
    arena_pop(s->arena, mark);
    return dh;
}

// dx[n,in] = (accumulate: +=) the gradient through one adapter
static void adapter_backward_input(const Visit *v, const Adapter *adapter, size_t in, Stored *dx, const Stored *dh,
                                   int accumulate) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena), rank = adapter->part->rank, n = v->c.n;
    const double rate = dropout_rate(s);
    if (rate > 0) {
        Stored *dinput = push_stored(s, SHARE_WORKSPACE, "adapter input after dropout", n * in);
        s->ops->linear_backward_input(dinput, dh, adapter->a, n, in, rank, rank, 0);
        s->ops->dropout(dx, dinput, n, in, s->now.batch->first + v->c.token, rate, adapter->seed, accumulate);
    } else {
        s->ops->linear_backward_input(dx, dh, adapter->a, n, in, rank, rank, accumulate);
    }
    arena_pop(s->arena, mark);
}

// dW, dbias or dA, dB += from dout[n,out] and x[n,in]; dx[n,in] = (accumulate: +=) the gradient of x. Without
// accumulate dx may be x.
static void linear_backward_part(const Visit *v, Linear linear, Stored *dx, const Stored *dout, const Stored *x,
                                 int accumulate) {
    const StreamBP *s = v->s;
    const size_t mark = arena_mark(s->arena);
    Adapter adapter[ADAPTERS_MOST];
    Stored *dh[ADAPTERS_MOST];
    size_t count = adapters_of(v, linear, adapter);
    if (!s->memory.lora)
        s->ops->linear_backward_weight(sum_of(v, linear.weight), sum_of(v, linear.bias), dout, x, v->c.n, linear.in,
                                       linear.out, linear.stride);
    for (size_t i = 0; i < count; i++) dh[i] = adapter_backward(v, &adapter[i], linear, dout, x);
    for (size_t i = 0; i < count; i++)
        adapter_backward_input(v, &adapter[i], linear.in, dx, dh[i], accumulate || i > 0);
    s->ops->linear_backward_input(dx, dout, weight_of(v, linear.weight), v->c.n, linear.in, linear.out, linear.stride,
                                  accumulate || count > 0);
    arena_pop(s->arena, mark);
}

static void linear_backward(const Visit *v, LayerTensor tensor, Stored *dx, const Stored *dout, const Stored *x,
                            int accumulate) {
    linear_backward_part(v, linear_of(v, tensor), dx, dout, x, accumulate);
}

// ---- norms ----------------------------------------------------------------------------------------------------------
// Returns the model's norm. The residual stream x = x + m f(norm(x)), m = residual_multiplier, is stored as x / m: so
// embeddings are divided by m, and no branch is multiplied. An RMSNorm of x / m with eps / m^2 equals the norm of x.
static Norm norm_of(const StreamBP *s) {
    const Config *config = &s->model->config;
    const double m = config->residual_multiplier;
    const int offset = config->family->norm_offset && !config->family->outer_norms;
    const Norm norm = {config->norm_eps / (m * m), (double)offset, config->family->norm};
    return norm;
}

// Returns the norm of a layer before or after a branch.
static Norm layer_norm_of(const StreamBP *s, LayerTensor weight) {
    const Config *config = &s->model->config;
    Norm norm = norm_of(s);
    if (weight == POST_NORM1 || weight == POST_NORM2) norm.eps = config->post_norm_eps;
    norm.offset = (double)config->family->norm_offset;
    return norm;
}

// out[n,C] = norm(x[n,C]) + residual, by the layer's tensors. bias LAYER_TENSORS, residual NULL: absent. Does nothing
// if the layer lacks the norm: then x stands for out.
static void norm_forward(const Visit *v, LayerTensor weight, LayerTensor bias, Stored *out, const Stored *x,
                         const Stored *residual) {
    if (!has_tensor(v, weight)) return;
    v->s->ops->norm_forward(out, x, weight_of(v, weight), weight_of(v, bias), residual, v->c.n, v->layer->shape.C,
                            layer_norm_of(v->s, weight));
}

// dx[rows,width] = (accumulate: +=) the gradient of x; dw, db += the gradients of weight and bias
static void norm_kind_backward(const StreamBP *s, Norm norm, Stored *dx, Summed *dw, Summed *db, const Stored *dout,
                               const Stored *x, const Stored *w, size_t rows, size_t width, int accumulate) {
    const size_t mark = arena_mark(s->arena);
    Summed *scratch = push_summed(s, SHARE_WORKSPACE, "norm scratch", s->ops->norm_backward_scratch(rows, width));
    s->ops->norm_backward(dx, dw, db, dout, x, w, rows, width, norm, accumulate, scratch);
    arena_pop(s->arena, mark);
}

static void norm_rows_backward(const StreamBP *s, Stored *dx, Summed *dw, Summed *db, const Stored *dout,
                               const Stored *x, const Stored *w, size_t rows, size_t width, int accumulate) {
    norm_kind_backward(s, norm_of(s), dx, dw, db, dout, x, w, rows, width, accumulate);
}

// Runs norm_forward backward: dx[n,C] = (accumulate: +=) the gradient of x; dW +=. If it does not accumulate, dx may be
// dout or x. Does nothing if the layer lacks the norm.
static void norm_backward(const Visit *v, LayerTensor weight, LayerTensor bias, Stored *dx, const Stored *dout,
                          const Stored *x, int accumulate) {
    if (!has_tensor(v, weight)) return;
    norm_kind_backward(v->s, layer_norm_of(v->s, weight), dx, sum_of(v, weight), sum_of(v, bias), dout, x,
                       weight_of(v, weight), v->c.n, v->layer->shape.C, accumulate);
}

// ---- QK-norm and rotary embedding -----------------------------------------------------------------------------------
// The rows that QK-norm takes of chunk c's queries (Q_NORM) or keys (K_NORM): a head each, or all heads of a token
typedef struct {
    size_t heads, rows, width;
} HeadRows;

static HeadRows head_rows(const Visit *v, LayerTensor norm) {
    const Shapes *d = &v->layer->shape;
    const size_t heads = norm == Q_NORM ? d->NH : d->NKV, whole = d->qk_norm == QK_NORM_WHOLE;
    const HeadRows rows = {heads, whole ? v->c.n : v->c.n * heads, whole ? heads * d->HD : d->HD};
    return rows;
}

// Rotates x[n,heads,HD] by position, in place; backward: rotates it back.
static void rotate(const Visit *v, LayerTensor norm, Stored *x, int backward) {
    const StreamBP *s = v->s;
    const Shapes *d = &v->layer->shape;
    const int local = v->layer->window != 0;
    if (v->layer->rotates)
        s->ops->rope(x, s->now.position + v->c.row, s->setup->inverse_frequency[local], v->c.n,
                     head_rows(v, norm).heads, d->HD, d->R, rotation_of(&s->model->config, local, norm == Q_NORM),
                     backward);
}

// Turns the product of queries (Q_NORM) or keys (K_NORM) into what QK-norm reads. Rotates it if the rotation comes
// first.
static void rotate_product(const Visit *v, LayerTensor norm, Stored *product) {
    if (v->layer->shape.qk_norm == QK_NORM_ROTATED) rotate(v, norm, product, 0);
}

// out[n,heads,HD] = QK-norm and rotary embedding of `linear`, the queries or keys before QK-norm. Without QK-norm
// `linear` is out
static void rotary_forward(const Visit *v, LayerTensor norm, Stored *out, const Stored *linear) {
    const HeadRows of = head_rows(v, norm);
    const QkNorm kind = v->layer->shape.qk_norm;
    if (kind) v->s->ops->norm_forward(out, linear, weight_of(v, norm), NULL, NULL, of.rows, of.width, norm_of(v->s));
    if (kind != QK_NORM_ROTATED) rotate(v, norm, out, 0);
}

// Runs rotary_forward backward on dx, in place; dW of QK-norm +=. dx becomes the gradient of the product.
static void rotary_backward(const Visit *v, LayerTensor norm, Stored *dx, const Stored *linear) {
    const HeadRows of = head_rows(v, norm);
    const QkNorm kind = v->layer->shape.qk_norm;
    if (kind != QK_NORM_ROTATED) rotate(v, norm, dx, 1);
    if (kind) norm_rows_backward(v->s, dx, sum_of(v, norm), NULL, dx, linear, weight_of(v, norm), of.rows, of.width, 0);
    if (kind == QK_NORM_ROTATED) rotate(v, norm, dx, 1);
}

#endif
