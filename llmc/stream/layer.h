/*
A layer is a list of residual branches, made once, at setup:

    x_{i+1} = x_i + post(sum_j post_j(f_j(pre(x_i))))        x_0: the layer's input, x_branches: its output

f_j is a part: a function that ends in a linear layer, or in the products of experts. Families differ in the list.
Llama's list is {attention}, {MLP}. Gemma 3 has a norm after each branch. Gemma 4 adds experts to the MLP, and a branch
with the layer's own input. Only the first branch, the mixer, may join tokens. A layer with an MLP alone has a mixer
without parts.

This file alone knows which layer of which family has which parts. The steps in llmc/layer/ walk the list.
*/
#ifndef LLMC_LAYER_H
#define LLMC_LAYER_H
#include "llmc/model/model.h"
#include "llmc/model/rope_frequency.h"

// ---- shapes ---------------------------------------------------------------------------------------------------------
// Linear attention: key and value heads, elements of a head, convolution channels, taps
typedef struct {
    size_t HK, HV, DK, DV, W, taps;
    size_t DVs, E;      // HV*DV; width of the projections q|k|v|z|b|a, or B|C|x of a convolution alone
    size_t out;         // width of the last product's input
    size_t S, columns;  // elements of a state: the rule's, the convolution's
    int gates;          // 1: a convolution alone, with gates around it
    size_t transfer;    // elements of a range's transfer (transfer_begin)
    int ssd;            // 1: Mamba-2
    size_t norms, norm; // the gated norm: rows of a token, and their width
    double least, most; // bounds of Mamba-2's time steps
} LinearShape;

typedef struct {
    size_t C, V, L;           // hidden, vocabulary, layers
    size_t NH, NKV, HD, Q, R; // Q = NH*HD; R: rotated elements of a head
    size_t VD, O;             // elements of a head's values, HD or less; O = NH*VD
    size_t KV, VV;            // elements of a token's keys and values as stored: NKV*HD, or latents and shared part
    size_t low, shared_key;   // latent attention: rank of queries (0: full), the part of keys that heads share; else 0
    size_t gate;              // width of the gate of attention's output: Q, NH for a gate a head, or 0
    size_t query_gate;        // columns of gates in the product of queries: Q, or 0
    size_t FF, H;             // H: width of the MLP's first product
    size_t I, shared;         // width of an expert, of the shared expert
    size_t P;                 // width of the layers' own inputs; 0: none
    size_t stored, summed;    // bytes of an element
    size_t logits_stride;     // elements from row to row of logits
    LinearShape linear;
    RouterShape router;
    Activation activation;
    QkNorm qk_norm;
    int values_are_keys, value_norm, rotary;
    double embedding_scale, router_scale; // factors on embeddings, on the router's logits
} Shapes;

static RouterShape router_of(const Config *c) {
    const RouterShape shape = {c->family->router, c->num_experts,           c->num_experts_per_tok,
                               c->norm_topk_prob, c->routed_scaling_factor, c->n_group,
                               c->topk_group,     c->family->router_epsilon};
    return shape;
}

static LinearShape linear_shape_of(const Config *c, unsigned form) {
    LinearShape s;
    s.HK = c->linear_num_key_heads, s.HV = c->linear_num_value_heads, s.taps = c->linear_conv_kernel_dim;
    s.DK = c->linear_key_head_dim, s.DV = c->linear_value_head_dim;
    s.W = linear_channels(c), s.DVs = s.HV * s.DV;
    s.gates = (form & FORM_CONVOLUTION) != 0;
    s.ssd = c->family->ssd, s.least = c->time_step_min, s.most = time_step_most(c);
    s.norms = s.ssd ? s.HK : s.HV, s.norm = s.norms ? s.DVs / s.norms : 0;
    s.E = s.gates ? 3 * s.W : s.W + s.DVs + (s.ssd ? 1 : 2) * s.HV, s.out = s.gates ? s.W : s.DVs;
    s.transfer = s.ssd ? s.HV : s.HV * s.DK * s.DK;
    s.S = s.DVs * s.DK, s.columns = s.taps ? (s.taps - 1) * s.W : 0;
    return s;
}

// Returns the shapes of a layer of this form (layer_form).
static Shapes shapes_in(const Model *model, unsigned form) {
    const Config *c = &model->config;
    Shapes s;
    s.C = c->hidden_size, s.NH = c->num_attention_heads, s.NKV = key_value_heads_of(c, form);
    s.FF = intermediate_size_of(c, form), s.V = c->vocab_size, s.L = c->num_hidden_layers;
    s.HD = head_dim_of(c, form), s.Q = s.NH * s.HD, s.R = rotary_width_of(c, form);
    s.low = c->q_lora_rank, s.shared_key = c->qk_rope_head_dim;
    s.KV = s.shared_key ? c->kv_lora_rank : s.NKV * s.HD, s.VV = s.shared_key ? s.shared_key : s.KV;
    s.VD = s.shared_key ? c->v_head_dim : s.HD, s.O = s.NH * s.VD;
    s.value_norm = c->family->value_norm, s.values_are_keys = values_are_keys(c, form);
    s.P = c->hidden_size_per_layer_input, s.query_gate = c->family->gated_attention ? s.Q : 0;
    s.gate = c->family->head_gates ? s.NH : c->family->names.layer.OUTPUT_GATE ? s.Q : s.query_gate;
    s.linear = linear_shape_of(c, form);
    s.router_scale = c->family->experts_beside ? 1 / sqrt((double)s.C) : 1;
    s.router = router_of(c), s.I = c->moe_intermediate_size, s.shared = c->shared_expert_intermediate_size;
    s.logits_stride = (s.V + ops_device->row_multiple - 1) / ops_device->row_multiple * ops_device->row_multiple;
    const Activation activation = {c->family->activation, c->swiglu_alpha, c->swiglu_limit};
    s.activation = activation, s.H = activation_width(activation.kind, s.FF);
    s.qk_norm = config_qk_norm(c), s.rotary = !c->family->learned_positions;
    s.stored = dtype_size(model->dtype), s.summed = dtype_size(dtype_of_sums(model->dtype));
    s.embedding_scale = c->family->scaled_embeddings ? rounded_to(model->dtype, sqrt((double)s.C)) : 1;
    s.embedding_scale *= c->embedding_multiplier / c->residual_multiplier; // norm_of (modules.h) says why
    return s;
}

// Returns the shapes of a full-attention layer. Members that no form changes (C, V, L, ...) serve all layers.
static Shapes shapes_of(const Model *model) { return shapes_in(model, FORM_FULL); }

// ---- the list -------------------------------------------------------------------------------------------------------
// PART_LENDER: attention whose keys and values other layers read, too. PART_BORROWER: attention that reads them
typedef enum {
    PART_ATTENTION,
    PART_LENDER,
    PART_BORROWER,
    PART_LINEAR,
    PART_DENSE,
    PART_EXPERTS,
    PART_OWN_INPUT
} PartKind;

enum { BRANCHES_MOST = 3, PARTS_MOST = 2 };

typedef struct {
    PartKind kind;
    LayerTensor product; // the part's last linear layer
    LayerTensor post;    // the norm after the part, before the branch's sum; LAYER_TENSORS: none
} BranchPart;

typedef struct {
    LayerTensor pre, pre_bias, post; // the norms before and after the branch; LAYER_TENSORS: none
    BranchPart part[PARTS_MOST];
    size_t parts;
} Branch;

// A row of the table of activations (layer/activations.h): the tensor's side of the layer, its level, its size
typedef enum { SIDE_MIXER, SIDE_MLP } Side;
typedef enum { LEVEL_NONE, LEVEL_ATTENTION, LEVEL_PRODUCTS, LEVEL_ALL, LEVEL_NEVER } KeepLevel;

typedef struct {
    Side side;
    LayerTensor of;      // the layer has the tensor if it has this weight
    size_t field, width; // offset in Activations; elements of a token, 0: the layer has no such tensor
    int summed;
    KeepLevel level;     // least level at which the tensor stays until backward
    const char *name[3]; // on the arena: of a chunk; kept, in flight (NULL: name[0])
    size_t before;       // kept: elements of a token in earlier layers that keep this row in the same place
} ActivationRow;

enum { ROW_FIRST_NORM = 0, ACTIVATION_ROWS = 32 };

// Keys and values of a layer, and before their norms
typedef enum { KEYS, VALUES, KEYS_LINEAR, VALUES_LINEAR, KEY_TENSORS } KeyTensor;

// Which layers keep what: the last `layers` layers (0: all) keep `level`, layers before them at most attention's
// outputs. `off`: how many of the last `layers`, from the first on, keep it off-device; KEPT_OFF: all layers do
#define KEPT_OFF SIZE_MAX
typedef struct {
    KeepLevel level;
    size_t layers, off;
} Keeping;

// Returns the level that layer l of L keeps.
static KeepLevel keep_level(Keeping keeping, size_t l, size_t L) {
    const KeepLevel less = keeping.level > LEVEL_ATTENTION ? LEVEL_ATTENTION : LEVEL_NONE;
    return !keeping.layers || l + keeping.layers >= L ? keeping.level : less;
}

// Tells whether layer l of L keeps its tensors off-device.
static int keep_off(Keeping keeping, size_t l, size_t L) {
    const size_t first = keeping.layers && keeping.layers < L ? L - keeping.layers : 0;
    return keeping.off == KEPT_OFF || (l >= first && l - first < keeping.off);
}

typedef struct {
    Shapes shape;
    unsigned form;                // layer_form
    Branch branch[BRANCHES_MOST]; // branch 0 is the mixer, of 0 parts in a layer without one. The rest join no tokens
    size_t branches;
    unsigned has;       // bit k: a part of PartKind k
    int borrows, lends; // 1: reads another layer's keys and values; 1: another layer reads this layer's keys and values
    size_t window;      // keys that a query sees; 0: all earlier keys
    int rotates;        // 1: rotary embedding of queries and keys
    size_t number[LAYER_KINDS]; // earlier layers of each kind
    size_t state;               // earlier layers with a state
    KeepLevel level;            // activations up to this level stay from forward to backward
    int off;                    // 1: they stay off-device
    size_t like;                // the first layer of this kind with equal adapters and equal kept tensors
    ActivationRow row[ACTIVATION_ROWS];
    KeepLevel key[KEY_TENSORS]; // least level that keeps this tensor of the layer
} Layer;

static int has_part(const Layer *layer, PartKind kind) { return layer->has >> kind & 1; }
static int has_attention(const Layer *layer) {
    return has_part(layer, PART_ATTENTION) || has_part(layer, PART_LENDER) || has_part(layer, PART_BORROWER);
}
static int has_state(const Layer *layer) { return has_part(layer, PART_LINEAR); }
static int has_rule(const Layer *layer) { return !(layer->form & FORM_CONVOLUTION); } // the delta rule
static int has_own_keys(const Layer *layer) { return has_attention(layer) && !layer->borrows; }

// Returns the tensor if a layer of this form has it, else LAYER_TENSORS.
static LayerTensor tensor_of_form(const Config *c, unsigned form, LayerTensor tensor) {
    return tensor == LAYER_TENSORS || layer_tensor_shape(c, form, tensor).rows ? tensor : LAYER_TENSORS;
}

static Branch *layer_branch(Layer *layer, const Config *c, LayerTensor pre, LayerTensor pre_bias, LayerTensor post) {
    Branch *b = &layer->branch[layer->branches++];
    b->pre = tensor_of_form(c, layer->form, pre), b->pre_bias = tensor_of_form(c, layer->form, pre_bias);
    b->post = tensor_of_form(c, layer->form, post);
    return b;
}

// Adds a part to a branch, if a layer of this form has the part's last product.
static void layer_part(Layer *layer, const Config *c, Branch *b, PartKind kind, LayerTensor product, LayerTensor post) {
    const BranchPart part = {kind, product, tensor_of_form(c, layer->form, post)};
    if (tensor_of_form(c, layer->form, product) == LAYER_TENSORS) return;
    b->part[b->parts++] = part;
    layer->has |= 1u << kind;
}

// Makes a layer of this form: its branches in order. Skips a branch without parts, except the mixer's.
static Layer layer_make(const Model *model, unsigned form) {
    const Config *c = &model->config;
    Layer layer = {0};
    layer.form = form, layer.shape = shapes_in(model, form);
    layer.borrows = (form & FORM_BORROWS) != 0, layer.lends = (form & FORM_LENDS) != 0;
    layer.window = form & FORM_WINDOW ? c->sliding_window : 0;
    Branch *b = layer_branch(&layer, c, NORM1_WEIGHT, NORM1_BIAS, POST_NORM1);
    const PartKind attention = layer.borrows ? PART_BORROWER : layer.lends ? PART_LENDER : PART_ATTENTION;
    layer_part(&layer, c, b, attention, O_WEIGHT, LAYER_TENSORS);
    layer_part(&layer, c, b, PART_LINEAR, OUT_WEIGHT, LAYER_TENSORS);
    const int in_place = layer.form & FORM_NO_MLP && b->pre == LAYER_TENSORS; // the output may overwrite the input
    if (in_place && b->parts > 1)
        die("internal: two summed mixers read the layer's input in place without a norm; please report it");
    b = layer_branch(&layer, c, NORM2_WEIGHT, NORM2_BIAS, POST_NORM2);
    layer_part(&layer, c, b, PART_DENSE, DOWN_WEIGHT, DENSE_POST_NORM);
    layer_part(&layer, c, b, PART_EXPERTS, EXPERTS_DOWN, EXPERTS_POST_NORM);
    if (!b->parts) layer.branches--;
    b = layer_branch(&layer, c, LAYER_TENSORS, LAYER_TENSORS, INPUT_NORM);
    layer_part(&layer, c, b, PART_OWN_INPUT, INPUT_OUT, LAYER_TENSORS);
    if (!b->parts) layer.branches--;
    return layer;
}

#endif
