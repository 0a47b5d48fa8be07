/*
The parameter table: every tensor of a model with its Hugging Face name, shape, role and offset in one flat run of
elements; and how ranks shard it. Readers, writers, the optimizer and the driver all walk this table; nothing else knows
the tensors.

In memory and in flat .bin files the order is: token embedding, position embedding, layer 0, layer 1, ..., final norm,
lm_head; no padding anywhere. Linear weights are [out, in] (as in Hugging Face's Linear; GPT-2's Conv1D files are
transposed).
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H
#include "config_text.h"
#include "llmc/base/dtype.h"
#include "llmc/ranks/dist.h"
#include "llmc/ranks/world.h"

// ROLE_ROUTER: a linear layer that is never in 4 bits
typedef enum { ROLE_EMBEDDING, ROLE_LINEAR, ROLE_ROUTER, ROLE_BIAS, ROLE_NORM, ROLE_CONV, ROLE_DECAY } TensorRole;

static int is_product(TensorRole role) { return role == ROLE_LINEAR || role == ROLE_ROUTER; }

#define ABSENT SIZE_MAX

// Rows of tensors that files fuse group by group: for each group width[0] rows of the first tensor, then width[1] of
// the second, and so on. In memory each tensor has its rows of all groups together. groups 0: rows in one order
enum { FUSED_MOST = 4 };
typedef struct {
    size_t groups, width[FUSED_MOST];
} RowGroups;

typedef struct {
    char name[160]; // name in transformers' named_parameters()
    TensorRole role;
    size_t rows, cols; // [rows, cols] in memory; a vector has cols 0
    size_t experts;    // 0: one matrix; else a stack of `experts` matrices, [experts, rows / experts, cols]
    int transposed;    // 1: each matrix is [cols, rows] in files; a ROLE_CONV is [rows, 1, cols] there
    size_t file_rows;  // not 0: files show the elements as [file_rows, .] (B of experts: [out, r E] in files, [E, out,
                       // r] in memory)
    size_t joined, part; // joined > 0: a tensor of files holds the matrices of `joined` layers; this is number `part`
    RowGroups fused;     // order of the rows in files
    int ones;            // 1: initialised to 1 (norm weights without norm_offset; biases of time steps)
    double init_std;     // standard deviation at initialisation, 0 for constants; unused for ROLE_DECAY
    size_t offset;       // index of the first element in the model
} Parameter;

typedef struct {
    Config config;
    DType dtype; // type of weights and activations
    Parameter *parameters;
    size_t parameter_count;
    size_t elements; // elements of the whole model
    // offsets in elements; ABSENT if the family lacks the tensor
    size_t model_offset[MODEL_TENSORS];
    size_t (*layer_offset)[LAYER_TENSORS]; // [num_hidden_layers] offsets within each layer
    float *constants;     // host, fp32: numbers that are not weights, namely the next two arrays; NULL: none
    float *router_bias;   // [layers with experts, E]: added for the choice of experts; NULL: none
    float *layer_scalar;  // [num_hidden_layers]: factors of the layers' outputs; NULL: none
    size_t *layer_starts; // [num_hidden_layers + 1] first element of each layer, then the end of the last layer
} Model;

// Returns the offsets of a layer's tensors within the layer.
static const size_t *layer_offsets(const Model *table, size_t l) { return table->layer_offset[l]; }

static size_t elements_of_layer(const Model *table, size_t l) {
    return table->layer_starts[l + 1] - table->layer_starts[l];
}

// Returns the first layer with the most elements.
static size_t largest_layer(const Model *table) {
    size_t largest = 0;
    for (size_t l = 1; l < table->config.num_hidden_layers; l++)
        if (elements_of_layer(table, l) > elements_of_layer(table, largest)) largest = l;
    return largest;
}

static size_t parameter_elements(const Parameter *parameter) {
    return parameter->rows * (parameter->cols ? parameter->cols : 1);
}

// Elements [begin, begin + count) of one matrix of a stack. first: index of the matrix's first element in the parameter
typedef struct {
    size_t first, rows, begin, count;
} MatrixPart;

// Returns the part of a parameter's elements [begin, begin + count) that lies in one matrix.
static MatrixPart matrix_part(const Parameter *p, size_t begin, size_t count) {
    const size_t rows = p->rows / max_size(p->experts, 1), each = rows * p->cols;
    const MatrixPart part = {begin - begin % each, rows, begin % each, min_size(count, each - begin % each)};
    return part;
}

// Elements [at, at + count), which are neighbours in files and in memory
typedef struct {
    size_t at, count;
} ElementRun;

// Returns where memory (to_file: the file) has element `element` of the file (of memory), and the elements up to the
// end of the run: of the parameter, or of fused rows.
static ElementRun fused_run(const Parameter *p, size_t element, int to_file) {
    const RowGroups *f = &p->fused;
    const ElementRun whole = {element, parameter_elements(p) - element};
    if (!f->groups) return whole;
    size_t row = element / p->cols, all = 0, part = 0, before = 0; // before: rows of a group before this part
    for (size_t i = 0; i < FUSED_MOST; i++) all += f->width[i];
    size_t group = to_file ? 0 : row / all;
    row -= group * all;
    for (size_t n; row >= (n = f->width[part] * (to_file ? f->groups : 1)); part++) row -= n, before += f->width[part];
    const size_t width = f->width[part], within = row % width;
    if (to_file) group = row / width;
    const size_t to = to_file ? group * all + before + within : f->groups * before + group * width + within;
    const ElementRun run = {to * p->cols + element % p->cols, (width - within) * p->cols - element % p->cols};
    return run;
}

// Counts the elements of a parameter's tensor in files. It may also hold the matrices of other layers.
static size_t parameter_file_elements(const Parameter *p) {
    return parameter_elements(p) * (p->joined ? p->joined : 1);
}

// Contiguous elements of one layer in a tensor that joins layers: a row of a table, else all
static size_t joined_run(const Parameter *p) { return p->role == ROLE_EMBEDDING ? p->cols : parameter_elements(p); }

// Returns where the files' tensor has an element of a parameter that is not transposed, and the elements up to the end
// of the run.
static ElementRun file_run(const Parameter *p, size_t element) {
    if (!p->joined) return fused_run(p, element, 1);
    const size_t run = joined_run(p), within = element % run;
    const ElementRun joined = {(element / run * p->joined + p->part) * run + within, run - within};
    return joined;
}

// Counts the elements that a token uses: k of E experts, and all other parameters.
static double model_active(const Model *model) {
    double sum = 0;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const size_t E = max_size(p->experts, p->file_rows);
        const double of = E ? (double)model->config.num_experts_per_tok / (double)E : 1;
        sum += of * (double)parameter_elements(p);
    }
    return sum;
}

// Tells whether weight decay applies: to matrices, not to vectors (norms and biases).
static int parameter_decays(const Parameter *parameter) { return parameter->cols != 0; }

// ---- shapes of one layer's tensors ---------------------------------------------------------------------------------
typedef struct {
    TensorRole role;
    size_t rows, cols, experts; // as in Parameter
} TensorShape;

// Returns the channels of linear attention's convolution: queries, keys, values.
static size_t linear_channels(const Config *c) {
    return 2 * c->linear_num_key_heads * c->linear_key_head_dim + c->linear_num_value_heads * c->linear_value_head_dim;
}

// Returns the shape of a tensor in a layer of this form (layer_form); rows 0: the layer lacks it
static TensorShape layer_tensor_shape(const Config *c, unsigned form, LayerTensor tensor) {
    const Family *family = c->family;
    const size_t C = c->hidden_size, HD = head_dim_of(c, form), q = c->num_attention_heads * HD;
    const size_t FF = intermediate_size_of(c, form), low = c->q_lora_rank, latent = c->kv_lora_rank;
    const size_t kv = latent ? latent : form & FORM_BORROWS ? 0 : key_value_heads_of(c, form) * HD;
    const size_t values_too = latent ? c->qk_rope_head_dim : values_are_keys(c, form) ? 0 : kv;
    const size_t out = latent ? c->num_attention_heads * c->v_head_dim : q; // attention's output
    const int pre_norms = form & FORM_LINEAR && family->linear_pre_norms;   // and no norms after branches
    const size_t gated = activation_gates(family->activation) ? FF : 0;
    const size_t post_norm = family->post_norms && !pre_norms ? C : 0;
    const size_t layer_norm = family->norm == NORM_LAYER ? C : 0, pre_norm = family->no_pre_norms && !pre_norms ? 0 : C;
    const QkNorm qk_norm = config_qk_norm(c);
    const size_t head_norm = qk_norm && qk_norm != QK_NORM_BARE ? HD : 0, whole = qk_norm == QK_NORM_WHOLE;
    const size_t qkv_bias = family->biases || family->qkv_bias || c->attention_bias;
    const size_t o_bias = family->biases || (c->attention_bias && !family->no_output_bias);
    const size_t mlp_bias = family->biases || c->mlp_bias;
    const size_t W = linear_channels(c), HV = c->linear_num_value_heads, values = HV * c->linear_value_head_dim;
    const size_t apart = family->names.layer.IN_K_WEIGHT != NULL, keys = (W - values) / 2;
    const size_t E = c->num_experts, I = c->moe_intermediate_size, shared = c->shared_expert_intermediate_size;
    const size_t parts = expert_parts(family);
    const size_t biased = family->expert_biases, beside = family->experts_beside, P = c->hidden_size_per_layer_input;
    const int of_attention = tensor >= SINKS && tensor <= KEY_VALUE_UP; // after the MLP in memory
    const int of_linear = tensor == CONV_BIAS || tensor == SKIP, late = of_attention || of_linear;
    const int attention = (tensor >= Q_WEIGHT && tensor <= O_BIAS) || of_attention;
    const int linear = (tensor >= IN_GATE_WEIGHT && tensor <= OUT_WEIGHT) || of_linear, ssd = family->ssd;
    const int rule = linear && tensor > IN_V_WEIGHT && tensor != CONV_WEIGHT && tensor != OUT_WEIGHT;
    const int mixer = tensor <= POST_NORM1 || late, mlp = !mixer && tensor < INPUT_TABLE;
    const int dense = tensor >= GATE_WEIGHT && tensor <= DOWN_BIAS && !beside;
    const int experts =
        (tensor >= ROUTER_WEIGHT && tensor <= EXPERTS_DOWN) || (tensor >= ROUTER_BIAS && tensor <= EXPERTS_POST_NORM);
    if ((attention && (form & (FORM_LINEAR | FORM_BOTH)) == FORM_LINEAR) || (linear && !(form & FORM_LINEAR)) ||
        (rule && form & FORM_CONVOLUTION) || (form & FORM_EXPERTS ? dense : experts) ||
        (mixer && form & FORM_NO_MIXER) || (mlp && form & FORM_NO_MLP)) {
        const TensorShape none = {ROLE_LINEAR, 0, 0, 0};
        return none;
    }
    // clang-format off
    const TensorShape shapes[LAYER_TENSORS] = {
        {ROLE_NORM, pre_norm, 0, 0}, {ROLE_BIAS, layer_norm, 0, 0},
        {ROLE_LINEAR, family->gated_attention ? 2 * q : q, low ? low : C, 0}, {ROLE_LINEAR, kv, C, 0},
        {ROLE_LINEAR, values_too, C, 0},
        {ROLE_BIAS, (family->gated_attention ? 2 * q : q) * qkv_bias, 0, 0},
        {ROLE_BIAS, kv * qkv_bias, 0, 0}, {ROLE_BIAS, values_too * qkv_bias, 0, 0},
        {ROLE_NORM, low ? low : whole ? q : head_norm, 0, 0},
        {ROLE_NORM, latent || whole || !kv ? kv : head_norm, 0, 0},
        {ROLE_LINEAR, C, out, 0}, {ROLE_BIAS, C * o_bias, 0, 0},
        {ROLE_LINEAR, ssd ? values : 0, C, 0},
        {ROLE_LINEAR, form & FORM_CONVOLUTION ? 3 * W : apart ? keys : W, C, 0}, {ROLE_LINEAR, apart * keys, C, 0},
        {ROLE_LINEAR, apart * values, C, 0},
        {ROLE_LINEAR, ssd ? 0 : values, C, 0},
        {ROLE_LINEAR, ssd ? 0 : HV, C, 0},
        {ROLE_LINEAR, HV, C, 0},
        {ROLE_CONV, W, c->linear_conv_kernel_dim, 0}, {ROLE_BIAS, HV, 0, 0}, {ROLE_DECAY, HV, 0, 0},
        {ROLE_NORM, ssd ? values : c->linear_value_head_dim, 0, 0},
        {ROLE_LINEAR, C, form & FORM_CONVOLUTION ? W : values, 0},
        {ROLE_NORM, post_norm, 0, 0},
        {ROLE_NORM, pre_norm, 0, 0}, {ROLE_BIAS, layer_norm, 0, 0},
        {ROLE_LINEAR, FF, C, 0}, {ROLE_LINEAR, gated, C, 0},
        {ROLE_BIAS, FF * mlp_bias, 0, 0}, {ROLE_BIAS, gated * mlp_bias, 0, 0},
        {ROLE_LINEAR, C, FF, 0}, {ROLE_BIAS, C * mlp_bias, 0, 0},
        {ROLE_ROUTER, E, C, 0}, {ROLE_ROUTER, (size_t)(family->shared_scale && shared), C, 0},
        {ROLE_LINEAR, shared, C, 0}, {ROLE_LINEAR, (parts - 1) * shared, C, 0},
        {ROLE_LINEAR, shared ? C : 0, shared, 0}, {ROLE_LINEAR, parts * E * I, C, E}, {ROLE_LINEAR, E * C, I, E},
        {ROLE_NORM, post_norm, 0, 0},
        {ROLE_BIAS, family->sinks ? c->num_attention_heads : 0, 0, 0},
        {ROLE_LINEAR, family->head_gates ? c->num_attention_heads : family->names.layer.OUTPUT_GATE ? q : 0, C, 0},
        {ROLE_LINEAR, low, C, 0},
        {ROLE_LINEAR, latent ? q - c->num_attention_heads * c->qk_rope_head_dim + out : 0, latent, 0},
        {ROLE_BIAS, E * biased, 0, 0}, {ROLE_NORM, C * beside, 0, 0}, {ROLE_NORM, E * beside, 0, 0},
        {ROLE_BIAS, parts * E * I * biased, 0, E}, {ROLE_BIAS, E * C * biased, 0, E},
        {ROLE_NORM, C * beside, 0, 0}, {ROLE_NORM, C * beside, 0, 0}, {ROLE_NORM, C * beside, 0, 0},
        {ROLE_EMBEDDING, P ? c->vocab_size_per_layer_input : 0, P, 0}, {ROLE_LINEAR, P, C, 0},
        {ROLE_LINEAR, P, C, 0}, {ROLE_LINEAR, P ? C : 0, P, 0}, {ROLE_NORM, P ? C : 0, 0, 0},
        {ROLE_BIAS, ssd ? W : 0, 0, 0}, {ROLE_BIAS, ssd ? HV : 0, 0, 0},
    };
    // clang-format on
    return shapes[tensor];
}

// Returns the order in which files hold the rows of a tensor and the tensors fused with it.
static RowGroups fused_rows(const Config *c, LayerTensor tensor) {
    const size_t HK = max_size(c->linear_num_key_heads, 1), R = c->linear_num_value_heads / HK;
    const size_t DK = c->linear_key_head_dim, values = R * c->linear_value_head_dim;
    const RowGroups none = {0, {0}}, qkvz = {HK, {DK, DK, values, values}}, ba = {HK, {R, R}};
    if (!c->family->fused_heads) return none;
    return tensor == IN_QKV_WEIGHT ? qkvz : tensor == IN_B_WEIGHT ? ba : none;
}

static TensorShape model_tensor_shape(const Config *c, ModelTensor tensor) {
    const size_t C = c->hidden_size, V = c->vocab_size;
    const TensorShape shapes[MODEL_TENSORS] = {
        {ROLE_EMBEDDING, V, C, 0},
        {ROLE_EMBEDDING, c->family->learned_positions ? c->max_position_embeddings : 0, C, 0},
        {ROLE_NORM, c->hidden_size_per_layer_input, 0, 0},
        {ROLE_NORM, C, 0, 0},
        {ROLE_BIAS, c->family->norm == NORM_LAYER ? C : 0, 0, 0},
        {ROLE_LINEAR, c->tie_word_embeddings ? 0 : V, C, 0},
    };
    return shapes[tensor];
}

// ---- building the table ---------------------------------------------------------------------------------------------
// Adds a tensor of layer `layer`, or outside the layers. A tensor without a name extends the tensor before it (GPT-2's
// c_attn).
static void model_add(Model *model, const char *prefix, const char *name, TensorShape shape, int tensor, size_t layer) {
    const Config *c = &model->config;
    const int joined = tensor == INPUT_TABLE || tensor == INPUT_PROJECTION;
    if (!name) {
        if (!model->parameter_count)
            die("internal: the parameter table begins with a part of a tensor; please report it");
        model->parameters[model->parameter_count - 1].rows += shape.rows;
    } else {
        Parameter *parameter = &model->parameters[model->parameter_count++];
        memset(parameter, 0, sizeof(*parameter));
        snprintf(parameter->name, sizeof(parameter->name), "%.*s%s",
                 (int)(joined ? strcspn(prefix, ".") + 1 : strlen(prefix)), prefix, name);
        if (joined) parameter->joined = c->num_hidden_layers, parameter->part = layer;
        parameter->role = shape.role;
        parameter->rows = shape.rows, parameter->cols = shape.cols;
        parameter->transposed =
            (shape.experts ? c->family->expert_columns : c->family->conv1d) && shape.role == ROLE_LINEAR && *prefix;
        if (shape.cols)
            parameter->experts = shape.experts;
        else
            parameter->file_rows = shape.experts;
        parameter->fused = fused_rows(c, (LayerTensor)tensor);
        parameter->ones =
            tensor == DT_BIAS || tensor == GATED_NORM || tensor == SKIP ||
            (shape.role == ROLE_NORM && (!c->family->norm_offset || (c->family->outer_norms && !*prefix)));
        if (shape.cols) parameter->init_std = c->initializer_range;
        // GPT-2 scales weights whose product is added to the residual stream by 1/sqrt(2L)
        if ((tensor == O_WEIGHT || tensor == DOWN_WEIGHT) && c->family->conv1d)
            parameter->init_std /= sqrt(2.0 * (double)c->num_hidden_layers);
        parameter->offset = model->elements;
    }
    model->elements += shape.rows * (shape.cols ? shape.cols : 1);
}

static void model_add_outer(Model *model, ModelTensor tensor) {
    TensorShape shape = model_tensor_shape(&model->config, tensor);
    model->model_offset[tensor] = shape.rows ? model->elements : ABSENT;
    if (shape.rows) model_add(model, "", model->config.family->names.model[tensor], shape, LAYER_TENSORS, 0);
}

static void model_add_layer(Model *model, size_t layer) {
    char prefix[64];
    const size_t begin = model->layer_starts[layer] = model->elements;
    const unsigned form = layer_form(&model->config, layer);
    snprintf(prefix, sizeof(prefix), model->config.family->names.layer_prefix, layer);
    for (int tensor = 0; tensor < LAYER_TENSORS; tensor++) {
        TensorShape shape = layer_tensor_shape(&model->config, form, (LayerTensor)tensor);
        model->layer_offset[layer][tensor] = shape.rows ? model->elements - begin : ABSENT;
        if (shape.rows) model_add(model, prefix, layer_name(model->config.family, tensor), shape, tensor, layer);
    }
}

// Counts the elements of router_bias.
static size_t model_router_biases(const Model *model) {
    if (model->config.family->router != ROUTER_SIGMOID) return 0;
    return expert_layers_before(&model->config, model->config.num_hidden_layers) * model->config.num_experts;
}

// Counts the elements of `constants`.
static size_t model_constants(const Model *model) {
    return model_router_biases(model) + (model->config.family->layer_scalars ? model->config.num_hidden_layers : 0);
}

// Allocates `constants`: biases of 0, factors of 1.
static void model_add_constants(Model *model) {
    const size_t biases = model_router_biases(model), count = model_constants(model);
    model->constants = model->router_bias = model->layer_scalar = NULL;
    if (!count) return;
    model->constants = (float *)checked_calloc(count, sizeof(float), "constants of a model");
    if (biases) model->router_bias = model->constants;
    if (count > biases) model->layer_scalar = model->constants + biases;
    for (size_t i = biases; i < count; i++) model->constants[i] = 1;
}

// Builds the table. The caller frees it with model_free. Touches no weights.
static Model model_build(const Config *config, DType dtype) {
    const size_t L = config->num_hidden_layers;
    Model model = {0};
    model.config = *config;
    model.dtype = dtype;
    model.parameters =
        (Parameter *)checked_calloc(MODEL_TENSORS + L * LAYER_TENSORS, sizeof(Parameter), "the parameter table");
    model.layer_starts = (size_t *)checked_calloc(L + 1, sizeof(size_t), "the parameter table");
    model.layer_offset =
        (size_t(*)[LAYER_TENSORS])checked_calloc(L, sizeof(*model.layer_offset), "the parameter table");
    model_add_outer(&model, EMBEDDING);
    model_add_outer(&model, POSITION_EMBEDDING);
    model_add_outer(&model, INPUTS_NORM);
    for (size_t layer = 0; layer < L; layer++) model_add_layer(&model, layer);
    model.layer_starts[L] = model.elements;
    model_add_outer(&model, FINAL_NORM_WEIGHT);
    model_add_outer(&model, FINAL_NORM_BIAS);
    model_add_outer(&model, LM_HEAD);
    model_add_constants(&model);
    return model;
}

// Copies the constants from a model of the same configuration.
static void model_copy_constants(const Model *model, const Model *from) {
    if (model->constants) memcpy(model->constants, from->constants, model_constants(from) * sizeof(float));
}

static void model_free(Model *model) {
    free(model->parameters), free(model->layer_starts), free(model->layer_offset), free(model->constants);
    model->parameters = NULL, model->layer_starts = NULL, model->layer_offset = NULL;
    model->constants = model->router_bias = model->layer_scalar = NULL;
}

// Copies the table. The caller frees it.
static Model model_copy(const Model *model) {
    const size_t starts = model->config.num_hidden_layers + 1;
    Model copy = *model;
    copy.parameters =
        (Parameter *)checked_calloc(model->parameter_count, sizeof(Parameter), "a copy of the parameter table");
    if (model->parameter_count) memcpy(copy.parameters, model->parameters, model->parameter_count * sizeof(Parameter));
    copy.layer_starts = (size_t *)checked_calloc(starts, sizeof(size_t), "a copy of the parameter table");
    memcpy(copy.layer_starts, model->layer_starts, starts * sizeof(size_t));
    if (model->layer_offset) { // a table of adapters has none
        copy.layer_offset = (size_t(*)[LAYER_TENSORS])checked_calloc(starts, sizeof(*copy.layer_offset),
                                                                     "a copy of the parameter table");
        memcpy(copy.layer_offset, model->layer_offset, (starts - 1) * sizeof(*copy.layer_offset));
    }
    if (model->constants) model_add_constants(&copy);
    model_copy_constants(&copy, model);
    return copy;
}

// Returns the offset of the head's matrix: lm_head, or the token embedding if tied.
static size_t model_head_offset(const Model *model) {
    size_t own = model->model_offset[LM_HEAD];
    return own == ABSENT ? model->model_offset[EMBEDDING] : own;
}

static size_t model_head_elements(const Model *model) { return model->config.vocab_size * model->config.hidden_size; }

// ---- sharding over ranks (ZeRO) -------------------------------------------------------------------------------------
// A table is sharded in groups, the units of gathering and reduction: the embeddings, each layer, the head (the final
// norm, and lm_head if not tied). Every rank owns a range of every group (shard_range). Its memory holds these ranges
// one after another, in slots of the largest rank's size. Groups 0..L-1 are the layers.
#define GROUP_EMBEDDING (SIZE_MAX - 1)
#define GROUP_HEAD      (SIZE_MAX)

// Returns the first element of a group. A table of adapters has only layers.
static size_t group_begin(const Model *table, size_t group) {
    if (group == GROUP_EMBEDDING) return 0;
    return table->layer_starts[group == GROUP_HEAD ? table->config.num_hidden_layers : group];
}

static size_t group_elements(const Model *table, size_t group) {
    if (group == GROUP_EMBEDDING) return table->layer_starts[0];
    if (group == GROUP_HEAD) return table->elements - group_begin(table, GROUP_HEAD);
    return elements_of_layer(table, group);
}

// Returns the group of the element at an offset in the table.
static size_t group_of(const Model *table, size_t offset) {
    if (offset < table->layer_starts[0]) return GROUP_EMBEDDING;
    if (offset >= group_begin(table, GROUP_HEAD)) return GROUP_HEAD;
    return last_at_most(table->layer_starts, sizeof(size_t), table->config.num_hidden_layers, offset);
}

// Returns the parameters of a group: [begin, begin + count) of the table
static Range group_parameters(const Model *table, size_t group) {
    const size_t begin = group_begin(table, group), end = begin + group_elements(table, group);
    Range of = {0, 0};
    while (of.begin < table->parameter_count && table->parameters[of.begin].offset < begin) of.begin++;
    while (of.begin + of.count < table->parameter_count && table->parameters[of.begin + of.count].offset < end)
        of.count++;
    return of;
}

// Layout of a table in memory. ranks 1: the whole table in order; else the ranges that `rank` owns
typedef struct {
    size_t ranks, rank;
} Sharding;

static Sharding sharding_whole(void) {
    Sharding whole = {1, 0};
    return whole;
}

// Stages of ZeRO. Each stage also shards what the stages before it shard.
enum { ZERO_NONE, ZERO_OPTIMIZER, ZERO_GRADIENTS, ZERO_WEIGHTS };

static Sharding sharding_of(World world, size_t stage) {
    Sharding ranges = {world_ranks(world), world.rank};
    return world.zero >= stage ? ranges : sharding_whole();
}

static size_t sharding_room(const Model *table, Sharding s, size_t group) {
    return shard_range_max(group_elements(table, group), SHARD_ALIGNMENT, s.ranks);
}

// Returns the largest slot of a layer. A layer with fewer elements may have the largest slot, because the last rank
// gets the remainder.
static size_t sharding_room_of_layer(const Model *table, Sharding s) {
    size_t most = 0;
    for (size_t l = 0; l < table->config.num_hidden_layers; l++) most = max_size(most, sharding_room(table, s, l));
    return most;
}

// Returns the offset of a group's slot in sharded memory.
static size_t sharding_begin(const Model *table, Sharding s, size_t group) {
    size_t begin = sharding_room(table, s, GROUP_EMBEDDING);
    if (group == GROUP_EMBEDDING) return 0;
    for (size_t l = 0; l < min_size(group, table->config.num_hidden_layers); l++) begin += sharding_room(table, s, l);
    return begin;
}

// Counts the elements of sharded memory.
static size_t sharding_elements(const Model *table, Sharding s) {
    return sharding_begin(table, s, GROUP_HEAD) + sharding_room(table, s, GROUP_HEAD);
}

// Returns which elements of a group this rank owns.
static Range sharded_range(const Model *table, Sharding s, size_t group) {
    return shard_range(group_elements(table, group), SHARD_ALIGNMENT, s.ranks, s.rank);
}

// Elements [first, first + count) of a parameter, at element `offset` of sharded memory
typedef struct {
    size_t first, count, offset;
} ParameterShard;

static ParameterShard parameter_shard(const Model *table, Sharding s, const Parameter *p) {
    const size_t group = group_of(table, p->offset), begin = group_begin(table, group);
    const Range own = sharded_range(table, s, group);
    const size_t own_begin = begin + own.begin, own_end = own_begin + own.count;
    const size_t from = max_size(own_begin, p->offset), to = min_size(own_end, p->offset + parameter_elements(p));
    ParameterShard shard = {0, 0, 0};
    if (from >= to) return shard;
    shard.first = from - p->offset, shard.count = to - from;
    shard.offset = sharding_begin(table, s, group) + from - own_begin;
    return shard;
}

// Returns the offset in sharded memory of an element of the table. The element must be in this rank's shard.
static size_t element_offset(const Model *table, Sharding s, size_t element) {
    if (s.ranks <= 1) return element;
    const size_t group = group_of(table, element), begin = group_begin(table, group);
    return sharding_begin(table, s, group) + element - begin - sharded_range(table, s, group).begin;
}

#endif
