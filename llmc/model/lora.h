/*
LoRA (arXiv 2106.09685): the weights W of a linear layer are frozen, and an adapter of two thin matrices is trained
instead:

    y = x W^T + b + scale * (dropout(x) A^T) B^T      A [r, in], B [out, r]
    scale = alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)

B begins at zero, so a new adapter changes nothing. A begins normally distributed with the variance of PEFT's default,
1 / (3 in). Adapters have their own parameter table (Lora.table), with PEFT's names. Initialisation, gradients and their
norm, AdamW and checkpoints walk it like a model's.

A module is a tensor as files hold it. GPT-2's c_attn is one module: its A serves queries, keys and values, which have
their own rows of B. The gate and up projections are two modules in one product; each has its own columns of the result.
The matrices of all experts are one module, with A [E,r,in] and B [E,out,r]. Files hold such a B as [out,r,E], PEFT's
order.
*/
#ifndef LLMC_LORA_H
#define LLMC_LORA_H
#include "model.h"
#include "llmc/base/hash.h"

typedef struct {
    size_t a, b;    // offsets in the layer's adapters of A, and of this tensor's rows of B; a == ABSENT: no adapter
    size_t columns; // columns of the product to which the adapter adds
    size_t rank;
    double scale;
} LoraPart;

// The adapter of one module in one layer; rank 0: no adapter
typedef struct {
    size_t rank;
    double alpha;
} LoraModule;

typedef struct {
    size_t rank;
    double alpha, dropout;
    int rslora;
    int split;                       // 1: files have a tensor for each matrix of an expert (files/adapter_split.h)
    const char *modules_prefix;      // prefix of layers' names in files, "model.language_model."; NULL: the family's
    unsigned modules;                // bit i: lora_module(.., i) has adapters, in all layers
    int saves[MODEL_TENSORS];        // for EMBEDDING, LM_HEAD: 1: a full copy is trained (modules_to_save)
    LoraModule outer[MODEL_TENSORS]; // for EMBEDDING, LM_HEAD: their adapters
    LoraPart outer_part[MODEL_TENSORS];
    LoraModule *each; // [layers, LORA_TENSORS] in place of rank, alpha and modules; NULL: layers do not differ
    LoraPart *part;   // [layers, LAYER_TENSORS] adapters of Q_WEIGHT, K_WEIGHT, ...
    size_t *like;     // [layers] the first layer of the same kind with the same adapters
    Model table;      // the adapters' parameter table: per layer and module A, then B, between the full copies; config
                      // and dtype of the model
} Lora;

// ---- modules --------------------------------------------------------------------------------------------------------
// clang-format off
static const LayerTensor lora_tensors[] = {
    Q_WEIGHT, K_WEIGHT, V_WEIGHT, O_WEIGHT, IN_GATE_WEIGHT, IN_QKV_WEIGHT, IN_Z_WEIGHT, IN_B_WEIGHT, IN_A_WEIGHT,
    OUT_WEIGHT, GATE_WEIGHT, UP_WEIGHT, DOWN_WEIGHT,
    ROUTER_WEIGHT, SHARED_SCALE_WEIGHT, SHARED_GATE_WEIGHT, SHARED_UP_WEIGHT, SHARED_DOWN_WEIGHT, EXPERTS_GATE_UP,
    EXPERTS_DOWN, INPUT_GATE, INPUT_OUT, OUTPUT_GATE, IN_K_WEIGHT, IN_V_WEIGHT, QUERY_DOWN, KEY_VALUE_UP,
};
// clang-format on
#define LORA_TENSORS (sizeof(lora_tensors) / sizeof(lora_tensors[0]))
// How many of lora_tensors count in lora_key: in a family without experts, with experts, with own inputs of layers; all
// in a family that names IN_K_WEIGHT
enum { LORA_DENSE_TENSORS = 12, LORA_EXPERT_TENSORS = 19, LORA_INPUT_TENSORS = 21 };

static int lora_is_stack(LayerTensor tensor) { return tensor == EXPERTS_GATE_UP || tensor == EXPERTS_DOWN; }

// Tells whether PEFT adapts the tensor as a parameter (target_parameters), not as a linear layer (target_modules). PEFT
// treats a router next to a dense MLP as a linear layer.
static int lora_is_parameter(const Family *family, LayerTensor tensor) {
    return lora_is_stack(tensor) || (tensor == ROUTER_WEIGHT && !family->experts_beside);
}

// Tells whether a module begins with the tensor. PEFT refuses out_proj of Nemotron, since fused kernels read its weight
// past an adapter.
static int lora_can_adapt(const Family *family, LayerTensor tensor) {
    return layer_name(family, tensor) && !(family->bare_attention && tensor == OUT_WEIGHT);
}

// Returns the index in lora_tensors of the i-th module's first tensor, or LORA_TENSORS.
static size_t lora_module_at(const Family *family, size_t i) {
    size_t t = 0;
    while (t < LORA_TENSORS && (!lora_can_adapt(family, lora_tensors[t]) || i-- > 0)) t++;
    return t;
}

static LayerTensor lora_tensor(const Family *family, size_t i) { return lora_tensors[lora_module_at(family, i)]; }

// Tells whether rows of experts' gate and up projections alternate, as they do in files.
static int lora_rows_alternate(const Family *family) { return family->activation == ACTIVATION_CLAMPED; }

// Returns the length of a name without ".weight".
static size_t lora_name_length(const char *name) {
    const size_t length = strlen(name), end = strlen(".weight");
    return length > end && !strcmp(name + length - end, ".weight") ? length - end : length;
}

// Returns PEFT's name of the i-th module within a layer, or NULL after the last. A linear layer's name lacks ".weight"
// ("self_attn.q_proj"), a parameter's name has it if the tensor's does ("mlp.gate.weight", "mlp.experts.down_proj").
static const char *lora_module(const Family *family, size_t i) {
    static char name[64];
    const size_t t = lora_module_at(family, i);
    if (t == LORA_TENSORS) return NULL;
    const char *whole = layer_name(family, lora_tensors[t]);
    snprintf(name, sizeof(name), "%.*s",
             (int)(lora_is_parameter(family, lora_tensors[t]) ? strlen(whole) : lora_name_length(whole)), whole);
    return name;
}

// Prints the name, within a layer, under which files hold A and B of the i-th module. PEFT wraps the experts' module
// once for each of its two parameters. inner: the first of the two
static void lora_tensor_prefix(const Family *family, size_t i, int inner, char name[64]) {
    const LayerTensor tensor = lora_tensor(family, i);
    const char *module = lora_module(family, i);
    const size_t length = lora_is_stack(tensor) ? (size_t)(strrchr(module, '.') - module) : lora_name_length(module);
    snprintf(name, 64, "%.*s%s", (int)length, module, inner ? ".base_layer" : "");
}

// Prints the name of the embedding or the head without ".weight": "model.embed_tokens".
static void lora_outer_name(const Family *family, ModelTensor tensor, char name[64]) {
    const char *whole = family->names.model[tensor];
    snprintf(name, 64, "%.*s", (int)(strlen(whole) - strlen(".weight")), whole);
}

// Prints the name, without ".weight", of an expert's gate, up or down projection (part 0, 1, 2) in files with a tensor
// per expert. For models that are never split like this, derives it from the stacks' name.
static void lora_expert_name(const Family *family, size_t layer, size_t expert, size_t part, char name[160]) {
    static const char *const ends[] = {"gate_proj", "up_proj", "down_proj"};
    const char *own = family->names.expert[part], *stack = family->names.layer.EXPERTS_DOWN;
    const int used = snprintf(name, 160, family->names.layer_prefix, layer);
    if (own)
        snprintf(name + used, 160 - (size_t)used, own, expert);
    else
        snprintf(name + used, 160 - (size_t)used, "%.*s.%zu.%s", (int)(strrchr(stack, '.') - stack), stack, expert,
                 ends[part]);
    name[lora_name_length(name)] = 0;
}

// Tells whether the layer has the i-th module. Layers of another kind may lack it.
static int lora_layer_has(const Config *c, size_t layer, size_t i) {
    return layer_tensor_shape(c, layer_form(c, layer), lora_tensor(c->family, i)).rows != 0;
}

// Tells whether target[length] names the module: its whole name, or an end of it that follows a dot. A router's
// ".weight" may be omitted.
static int lora_names_module(const char *module, const char *target, size_t length) {
    size_t all = strlen(module);
    const size_t shorter = lora_name_length(module);
    if (length <= shorter && !strncmp(module + shorter - length, target, length)) all = shorter;
    if (length > all || strncmp(module + all - length, target, length) != 0) return 0;
    return length == all || (length > 0 && module[all - length - 1] == '.');
}

// Returns the modules that get adapters by default: all modules; in a model with experts only the modules of the
// mixer.
static unsigned lora_usual_modules(const Config *c) {
    const int experts = expert_layers_before(c, c->num_hidden_layers) != 0;
    unsigned usual = 0;
    for (size_t i = 0; lora_module_at(c->family, i) < LORA_TENSORS; i++) {
        const LayerTensor tensor = lora_tensor(c->family, i);
        if (!experts || tensor < GATE_WEIGHT || tensor == QUERY_DOWN || tensor == KEY_VALUE_UP) usual |= 1u << i;
    }
    return usual;
}

// Returns the modules (one bit each) in a list "q_proj,v_proj" or "all". Error messages begin with `what`
// ("--lora-targets"); the exit code is `code`.
static unsigned lora_modules(const Family *family, const char *targets, const char *what, int code) {
    unsigned all = 0, chosen = 0;
    const char *module;
    char known[384] = "";
    for (size_t i = 0; (module = lora_module(family, i)) != NULL; i++) {
        const LayerTensor tensor = lora_tensor(family, i);
        const int gate = family->names.layer.OUTPUT_GATE && (tensor == GATE_WEIGHT || tensor == OUTPUT_GATE);
        const int mixer = family->names.layer.IN_K_WEIGHT && tensor <= OUT_WEIGHT;
        // the model has two modules with this end
        const int twice = family->bare_attention && tensor >= GATE_WEIGHT; // experts and dense layers
        const int whole =
            family->conv1d || (family->experts_beside && tensor >= ROUTER_WEIGHT) || gate || mixer || twice;
        const char *end = whole ? NULL : lora_is_parameter(family, tensor) ? strchr(module, '.') : strrchr(module, '.');
        all |= 1u << i;
        if (family->shared_dense && tensor >= SHARED_GATE_WEIGHT && tensor <= SHARED_DOWN_WEIGHT) continue; // the MLP's
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", end ? end + 1 : module);
    }
    if (!strcmp(targets, "all") || !strcmp(targets, "all-linear")) return all;
    for (const char *begin = targets;; begin++) {
        const size_t length = strcspn(begin, ",");
        unsigned found = 0;
        for (size_t i = 0; (module = lora_module(family, i)) != NULL; i++)
            if (lora_names_module(module, begin, length)) found |= 1u << i;
        if (!found)
            die_with(code, "%s: '%.*s' is not a linear layer that can have an adapter in a %s model; choose from %s",
                     what, (int)length, begin, family->name, known);
        chosen |= found;
        begin += length;
        if (!*begin) return chosen;
    }
}

// ---- the table ------------------------------------------------------------------------------------------------------
static LoraPart *lora_part(const Lora *lora, size_t layer, int tensor) {
    return &lora->part[layer * LAYER_TENSORS + (size_t)tensor];
}

// Returns the requested rank and alpha of the i-th module of a layer.
static LoraModule lora_wanted(const Lora *lora, const Config *c, size_t layer, size_t i) {
    const LoraModule none = {0, 0}, alike = {lora->rank, lora->alpha};
    if (!lora_layer_has(c, layer, i)) return none;
    if (lora->each) return lora->each[layer * LORA_TENSORS + i];
    return lora->modules >> i & 1 ? alike : none;
}

static double lora_scale(const Lora *lora, LoraModule m) {
    return m.alpha / (lora->rslora ? sqrt((double)m.rank) : (double)m.rank);
}

static void lora_add_matrix(Lora *lora, const char *prefix, const char *module, char which, size_t rows, size_t cols) {
    Model *table = &lora->table;
    Parameter *p = &table->parameters[table->parameter_count++];
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "base_model.model.%s%s.lora_%c.weight", prefix, module, which);
    p->role = ROLE_LINEAR;
    p->rows = rows, p->cols = cols;
    p->init_std = which == 'A' ? 1 / sqrt(3.0 * (double)cols) : 0;
    p->offset = table->elements;
    table->elements += rows * cols;
}

// Adds A and B of a layer's module whose first tensor is lora_tensors[t]. begin: the layer's offset in the table
static void lora_add_module(Lora *lora, size_t layer, const char *module, LoraModule m, size_t t, size_t begin) {
    const Config *c = &lora->table.config;
    const unsigned form = layer_form(c, layer);
    const LayerTensor first = lora_tensors[t];
    const TensorShape shape = layer_tensor_shape(c, form, first);
    const size_t in = shape.cols, E = max_size(shape.experts, 1);
    const size_t a = lora->table.elements - begin, b = a + E * m.rank * in;
    size_t rows = 0;
    char prefix[64];
    snprintf(prefix, sizeof(prefix), c->family->names.layer_prefix, layer);
    do {
        LoraPart *part = lora_part(lora, layer, lora_tensors[t]);
        const size_t columns = layer_tensor_shape(c, form, lora_tensors[t]).rows;
        if (!columns) continue;
        part->a = a, part->b = b + rows * m.rank, part->columns = columns;
        part->rank = m.rank, part->scale = lora_scale(lora, m);
        rows += part->columns;
    } while (++t < LORA_TENSORS && !layer_name(c->family, lora_tensors[t]));
    lora_add_matrix(lora, prefix, module, 'A', E * m.rank, in);
    lora_add_matrix(lora, prefix, module, 'B', rows, m.rank);
    Parameter *p = &lora->table.parameters[lora->table.parameter_count - 1];
    p->fused = fused_rows(c, first);
    if (!shape.experts) return;
    p->rows = E, p->cols = rows / E * m.rank, p->transposed = 1, p->file_rows = rows / E;
}

// Adds a full copy of the embedding or head, which replaces the original.
static void lora_add_copy(Lora *lora, ModelTensor tensor) {
    Model *table = &lora->table;
    const TensorShape shape = model_tensor_shape(&table->config, tensor);
    Parameter *p = &table->parameters[table->parameter_count];
    if (!lora->saves[tensor]) return;
    table->parameter_count++;
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "base_model.model.%s", table->config.family->names.model[tensor]);
    p->role = shape.role, p->rows = shape.rows, p->cols = shape.cols;
    p->offset = table->model_offset[tensor] = table->elements;
    table->elements += p->rows * p->cols;
}

// Adds the adapter of the head, or of the embedding: A [V,r], transposed in files, and B [C,r].
static void lora_add_outer(Lora *lora, ModelTensor tensor) {
    const TensorShape shape = model_tensor_shape(&lora->table.config, EMBEDDING); // equals the head's shape
    const int embedding = tensor == EMBEDDING;
    const size_t in = embedding ? shape.rows : shape.cols, out = embedding ? shape.cols : shape.rows;
    const LoraModule m = lora->outer[tensor];
    const LoraPart part = {0, m.rank * in, out, m.rank, m.rank ? lora_scale(lora, m) : 0};
    Parameter *p = &lora->table.parameters[lora->table.parameter_count];
    char name[64];
    lora->outer_part[tensor] = part;
    if (!m.rank) return;
    lora_outer_name(lora->table.config.family, tensor, name);
    lora_add_matrix(lora, "", name, 'A', m.rank, in);
    lora_add_matrix(lora, "", name, 'B', out, m.rank);
    if (!embedding) return;
    for (size_t i = 0; i < 2; i++)
        snprintf(p[i].name, sizeof(p[i].name), "base_model.model.%s.lora_embedding_%c", name, i ? 'B' : 'A');
    p[0].rows = in, p[0].cols = m.rank, p[0].transposed = 1, p[0].init_std = 0, p[1].init_std = 1; // as PEFT does
}

// Returns the first layer of the same kind with the same adapters as layer l.
static size_t lora_first_like(const Lora *lora, size_t l) {
    const Config *c = &lora->table.config;
    size_t first = 0;
    while (
        layer_kind(c, first) != layer_kind(c, l) || layer_form(c, first) != layer_form(c, l) ||
        (lora->each && memcmp(lora_part(lora, first, 0), lora_part(lora, l, 0), LAYER_TENSORS * sizeof(LoraPart)) != 0))
        first++;
    return first;
}

// Builds the table and parts of *lora from rank, alpha, dropout and rslora, and from modules or each. Free it with
// lora_free.
static void lora_build(Lora *lora, const Model *model) {
    const Config *c = &model->config;
    const size_t L = c->num_hidden_layers;
    Model *table = &lora->table;
    char module[64];
    memset(table, 0, sizeof(*table));
    table->config = *c, table->dtype = model->dtype;
    for (size_t t = 0; t < MODEL_TENSORS; t++) table->model_offset[t] = ABSENT;
    table->parameters =
        (Parameter *)checked_calloc(2 * LORA_TENSORS * L + 4, sizeof(Parameter), "the table of adapters");
    lora->part = (LoraPart *)checked_calloc(L * LAYER_TENSORS, sizeof(LoraPart), "the table of adapters");
    lora->like = (size_t *)checked_calloc(L, sizeof(size_t), "the table of adapters");
    table->layer_starts = (size_t *)checked_calloc(L + 1, sizeof(size_t), "the table of adapters");
    for (size_t t = 0; t < L * LAYER_TENSORS; t++) lora->part[t].a = ABSENT;
    lora_add_copy(lora, EMBEDDING), lora_add_outer(lora, EMBEDDING);
    for (size_t layer = 0; layer < L; layer++) {
        const size_t begin = table->layer_starts[layer] = table->elements;
        for (size_t i = 0; lora_module_at(c->family, i) < LORA_TENSORS; i++) {
            const LoraModule m = lora_wanted(lora, c, layer, i);
            if (!m.rank) continue;
            lora_tensor_prefix(c->family, i,
                               lora_tensor(c->family, i) == EXPERTS_GATE_UP && lora_wanted(lora, c, layer, i + 1).rank,
                               module);
            lora_add_module(lora, layer, module, m, lora_module_at(c->family, i), begin);
        }
        lora->like[layer] = lora_first_like(lora, layer);
    }
    table->layer_starts[L] = table->elements;
    lora_add_copy(lora, LM_HEAD), lora_add_outer(lora, LM_HEAD);
}

// Returns the first part of the module to which a parameter belongs; NULL: it is a full copy
static const LoraPart *lora_part_of(const Lora *lora, const Parameter *p) {
    const size_t layer = group_of(&lora->table, p->offset), offset = p->offset - group_begin(&lora->table, layer);
    const ModelTensor outer = layer == GROUP_EMBEDDING ? EMBEDDING : LM_HEAD;
    if (layer >= GROUP_EMBEDDING) return lora->outer[outer].rank ? &lora->outer_part[outer] : NULL;
    const LoraPart *part = lora_part(lora, layer, 0);
    while (part->a == ABSENT || (part->a != offset && part->b != offset)) part++;
    return part;
}

// Returns the offset in the model of the tensor to which a parameter belongs.
static size_t lora_offset_in_model(const Lora *lora, const Model *model, const Parameter *p) {
    const size_t l = group_of(&lora->table, p->offset);
    if (l >= GROUP_EMBEDDING) return model->model_offset[l == GROUP_EMBEDDING ? EMBEDDING : LM_HEAD];
    return model->layer_starts[l] + layer_offsets(model, l)[lora_part_of(lora, p) - lora_part(lora, l, 0)];
}

// Counts the elements of adapters of the experts' matrices.
static size_t lora_of_experts(const Lora *lora) {
    size_t elements = 0;
    for (size_t i = 1; i < lora->table.parameter_count; i++)
        if (lora->table.parameters[i].file_rows)
            elements +=
                parameter_elements(&lora->table.parameters[i - 1]) + parameter_elements(&lora->table.parameters[i]);
    return elements;
}

// Finds the smallest and largest rank.
static void lora_ranks(const Lora *lora, size_t *least, size_t *most) {
    *least = SIZE_MAX, *most = 0;
    for (size_t i = 0; i < lora->table.config.num_hidden_layers * LAYER_TENSORS; i++) {
        if (lora->part[i].a == ABSENT) continue;
        *least = min_size(*least, lora->part[i].rank), *most = max_size(*most, lora->part[i].rank);
    }
    for (int t = 0; t < MODEL_TENSORS; t++)
        if (lora->outer[t].rank)
            *least = min_size(*least, lora->outer[t].rank), *most = max_size(*most, lora->outer[t].rank);
}

// Tells whether an adapter or a full copy of the embedding is trained.
static int lora_trains_embedding(const Lora *lora) { return lora->saves[EMBEDDING] || lora->outer[EMBEDDING].rank; }

static int lora_has_outer(const Lora *lora) { return lora->outer[EMBEDDING].rank || lora->outer[LM_HEAD].rank; }

// Counts the elements of full copies.
static size_t lora_copied(const Lora *lora) {
    return (size_t)(lora->saves[EMBEDDING] + lora->saves[LM_HEAD]) * model_head_elements(&lora->table);
}

// Returns a checksum of the adapters' scales, and of rank and alpha by module if layers differ.
static uint64_t lora_key(const Lora *lora) {
    const LoraModule usual = {lora->rank, lora->alpha};
    const double scale = lora_scale(lora, usual);
    const uint64_t key = checksum_of(1, &scale, sizeof(scale));
    const size_t L = lora->table.config.num_hidden_layers;
    const Family *family = lora->table.config.family;
    const size_t row = sizeof(LoraModule) * (family->names.layer.IN_K_WEIGHT    ? LORA_TENSORS
                                             : family->names.layer.KEY_VALUE_UP ? LORA_TENSORS
                                             : family->names.layer.INPUT_GATE   ? (size_t)LORA_INPUT_TENSORS
                                             : family->router                   ? (size_t)LORA_EXPERT_TENSORS
                                                                                : (size_t)LORA_DENSE_TENSORS);
    Checksum sum = {{0, 0}};
    for (size_t l = 0; lora->each && l < L; l++) checksum_add(&sum, l * row, &lora->each[l * LORA_TENSORS], row);
    const uint64_t layers = lora->each ? checksum_value(key, &sum, L * row) : key;
    const uint64_t head =
        lora->outer[LM_HEAD].rank ? checksum_of(layers, &lora->outer[LM_HEAD], sizeof(LoraModule)) : layers;
    return lora->outer[EMBEDDING].rank ? checksum_of(~head, &lora->outer[EMBEDDING], sizeof(LoraModule)) : head;
}

static void lora_free(Lora *lora) {
    model_free(&lora->table);
    free(lora->each), free(lora->part), free(lora->like);
    lora->each = NULL, lora->part = NULL, lora->like = NULL;
}

#endif
