/*
Activations: the tensors that a chunk's forward leaves for its backward in one layer. `activation_rows` names each
tensor once: its field, its width, the least level at which it stays from forward to backward, its name on the arena.
The room of a chunk and the room of all layers follow from that table. A layer has a row if it has the row's weight.
For a tensor that a layer lacks another one may stand in (mixer_stand_ins, mlp_stand_ins): for a norm its input.

    LEVEL_NONE        no activation stays: backward recomputes all
    LEVEL_ATTENTION   attention's outputs stay
    LEVEL_PRODUCTS    outputs of matrix products stay, and what recurrences make: backward recomputes no product
    LEVEL_ALL         all activations stay: of all chunks (method full) or of one chunk (chunk-major orders)

A step computes a tensor unless it is found: kept by an earlier pass. So one forward serves all levels.
*/
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H
#include "llmc/stream/linear_memory.h"

struct Activations {
    // By branch
    Stored *norm[BRANCHES_MOST];  // [n,C]      norm of the branch's input; without a norm the input itself
    Stored *inner[BRANCHES_MOST]; // [n,C]      the branch before the norm after it; NULL without that norm
    Stored *x[BRANCHES_MOST + 1]; // [n,C]      x[0]: x_l. x[i + 1]: x[i] + branch i. The last one is x_{l+1}; in
                                  //            backward NULL
    Stored *q_linear;             // [n,NH*HD]  queries before QK-norm; without QK-norm q; latent attention: [n,rank]
    Stored *q;                    // [n,NH*HD]  queries after QK-norm and RoPE
    Stored *attention_out;        // [n,NH*HD]  softmax(scale q k^T) v
    Summed *lse;                  // [n,NH]     log-sum-exp of the scores
    Stored *gate;                 // [n,NH*HD]  gate of attention's output, or [n,NH]; NULL where the family has none
    Stored *gated;                // [n,NH*VD]  attention_out times the gate, or its first VD elements of each head;
                                  //            with neither attention_out
    Stored *projected;            // [n,E]      linear attention: q | k | v | z | b | a; a convolution alone: B | C | x
    Stored *mixed;                // [n,W]      q | k | v after the convolution
    Stored *delta_out;            // [n,HV*DV]  output of the delta rule
    Stored *delta_norm;           // [n,HV*DV]  delta_out after the gated norm; a convolution alone: mixed
    Stored *gate_up;              // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *activated;            // [n,FF]     the MLP after the activation
    Summed *router_logits;        // [n,E]      logits of the experts' router
    Stored *expert_gate_up;       // [n,k,2I]   the experts' gate and up, rows sorted by expert
    Stored *expert_activated;     // [n,k,I]    the experts after their activation
    Stored *shared_gate_up;       // [n,2S]     the shared expert's gate and up
    Stored *shared_activated;     // [n,S]      the shared expert after the activation
    Summed *shared_logit;         // [n]        sigmoid of it scales the shared expert; NULL without this scale
    Stored *expert_norm;          // [n,C]      the norm that the experts read, and the norm that their router
    Stored *router_norm;          // [n,C]      reads. Without norms of their own: norm[1]
    Stored *sum[PARTS_MOST];      // [n,C]      a part's output before its own norm; NULL without that norm
    Stored *input_product;        // [n,P]      the layer's own input: projection of x_0, before the norm
    Stored *input_gate;           // [n,2P]     gate and own input, side by side
    Stored *input_activated;      // [n,P]      gelu(gate) times own input
    Stored *dnorm;                // [n,C]      backward of the mixer: gradient of norm[0]
    int arrived;                  // a part of it is in dnorm
    const Stored *dsum[BRANCHES_MOST]; // [n,C] gradient of the sum of a branch's parts; NULL: not computed yet
    uint32_t found;                    // bit i: an earlier pass kept the tensor of row i
    size_t mark;                       // the arena's, before all of them
};

// Returns the level of a tensor that is a product's output, unless the layer has the norm between product and tensor.
static KeepLevel of_product(const Layer *layer, const Config *c, LayerTensor norm) {
    return layer_tensor_shape(c, layer->form, norm).rows ? LEVEL_ALL : LEVEL_PRODUCTS;
}

// Fills a layer's table of activations, in the order of the arena, from the weights that the layer has. The tables of
// all layers have the same rows.
static void activation_rows(Layer *layer, const Config *c) {
    const Shapes *d = &layer->shape;
    const LinearShape *linear = &d->linear;
    const size_t C = d->C, k = d->router.k;
    const size_t after_mixer = layer->branch[0].parts && layer->branches > 1 ? C : 0; // else it is x_l or x_{l+1}
    const char *const up = d->activation.kind == ACTIVATION_GELU ? "before GELU" : "gate and up";
#define FIELD(name) offsetof(Activations, name)
#define MIXER(of, field, width, level, name)                                                                           \
    { SIDE_MIXER, of, FIELD(field), width, 0, level, {name, NULL, NULL}, 0 }
#define MLP(of, field, width, level, name)                                                                             \
    { SIDE_MLP, of, FIELD(field), width, 0, level, {name, NULL, NULL}, 0 }
#define KEPT(of, field, width, summed, name)                                                                           \
    {                                                                                                                  \
        SIDE_MIXER, of, FIELD(field), width, summed, LEVEL_ATTENTION,                                                  \
            {name, name " of all layers", name " on its way"}, 0                                                       \
    }
#define LOGITS(of, field, width, name)                                                                                 \
    { SIDE_MLP, of, FIELD(field), width, 1, LEVEL_PRODUCTS, {name, NULL, NULL}, 0 }
    const ActivationRow all[ACTIVATION_ROWS] = {
        MIXER(NORM1_WEIGHT, norm[0], C, LEVEL_ALL, "first norm"),
        MIXER(O_WEIGHT, q_linear,
              d->low       ? d->low
              : d->qk_norm ? d->Q
                           : 0,
              LEVEL_PRODUCTS, "queries before QK-norm"),
        MIXER(O_WEIGHT, q, d->Q, d->qk_norm ? LEVEL_ALL : LEVEL_PRODUCTS, "queries"),
        KEPT(O_WEIGHT, attention_out, d->Q, 0, "attention output"),
        KEPT(O_WEIGHT, lse, d->NH, 1, "log-sum-exp"),
        MIXER(O_WEIGHT, gate, d->gate, LEVEL_PRODUCTS, "gate of attention output"),
        MIXER(O_WEIGHT, gated, d->gate || d->O < d->Q ? d->O : 0, LEVEL_ALL,
              d->gate ? "attention output behind its gate" : "attention output without padding"),
        MIXER(OUT_WEIGHT, projected, linear->E, LEVEL_PRODUCTS, "inputs of linear attention"),
        MIXER(OUT_WEIGHT, mixed, linear->W, LEVEL_ALL, "after the convolution"),
        MIXER(GATED_NORM, delta_out, linear->DVs, LEVEL_PRODUCTS, "delta rule's output"),
        MIXER(GATED_NORM, delta_norm, linear->DVs, LEVEL_ALL, "delta rule's output behind its norm"),
        MIXER(POST_NORM1, inner[0], C, LEVEL_PRODUCTS, "attention before its norm"),
        MIXER(LAYER_TENSORS, x[1], after_mixer, of_product(layer, c, POST_NORM1), "after attention"),
        MLP(NORM2_WEIGHT, norm[1], C, LEVEL_ALL, "second norm"),
        MLP(DOWN_WEIGHT, gate_up, d->H, LEVEL_PRODUCTS, up),
        MLP(DOWN_WEIGHT, activated, d->FF, LEVEL_ALL, "after activation"),
        LOGITS(EXPERTS_DOWN, router_logits, d->router.E, "logits of the router"),
        MLP(EXPERTS_DOWN, expert_gate_up, k * activation_width(d->activation.kind, d->I), LEVEL_PRODUCTS,
            "experts' gate and up"),
        MLP(EXPERTS_DOWN, expert_activated, k * d->I, LEVEL_ALL, "experts after activation"),
        MLP(EXPERTS_DOWN, shared_gate_up, activation_width(d->activation.kind, d->shared), LEVEL_PRODUCTS,
            "the shared expert's gate and up"),
        MLP(EXPERTS_DOWN, shared_activated, d->shared, LEVEL_ALL, "the shared expert after activation"),
        LOGITS(SHARED_SCALE_WEIGHT, shared_logit, 1, "the shared expert's logit"),
        MLP(EXPERTS_PRE_NORM, expert_norm, C, LEVEL_ALL, "norm before experts"),
        MLP(ROUTER_NORM, router_norm, C, LEVEL_ALL, "norm before the router"),
        MLP(EXPERTS_POST_NORM, sum[1], C, LEVEL_PRODUCTS, "experts before their norm"),
        MLP(DENSE_POST_NORM, sum[0], C, LEVEL_PRODUCTS, "the dense MLP before its norm"),
        MLP(POST_NORM2, inner[1], C, of_product(layer, c, EXPERTS_POST_NORM), "MLP before its norm"),
        MLP(INPUT_OUT, x[2], C, of_product(layer, c, POST_NORM2), "after the MLP"),
        MLP(INPUT_OUT, input_product, d->P, LEVEL_PRODUCTS, "the layer's own input before its norm"),
        MLP(INPUT_OUT, input_gate, 2 * d->P, LEVEL_PRODUCTS, "gate and own input"),
        MLP(INPUT_OUT, input_activated, d->P, LEVEL_ALL, "own input, gated"),
        MLP(INPUT_OUT, inner[2], C, LEVEL_PRODUCTS, "own input before its last norm"),
    };
#undef FIELD
#undef KEPT
#undef LOGITS
#undef MIXER
#undef MLP
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        layer->row[i] = all[i];
        if (all[i].of < LAYER_TENSORS && !layer_tensor_shape(c, layer->form, all[i].of).rows) layer->row[i].width = 0;
    }
}

// Sets the levels at which a layer's keys and values stay. Keys that other layers read stay at every level.
static void layer_keeps_keys(Layer *layer) {
    const Shapes *d = &layer->shape;
    const int own = has_own_keys(layer), alone = own && !layer->lends, norm = own && (d->qk_norm || d->shared_key);
    const int apart = own && d->value_norm && !d->values_are_keys; // the product of values differs from the values
    layer->key[KEYS_LINEAR] = norm ? LEVEL_PRODUCTS : LEVEL_NEVER;
    layer->key[VALUES_LINEAR] = apart ? LEVEL_PRODUCTS : LEVEL_NEVER;
    layer->key[KEYS] = !alone ? LEVEL_NEVER : norm ? LEVEL_ALL : LEVEL_PRODUCTS;
    layer->key[VALUES] = !alone ? LEVEL_NEVER : apart || (d->values_are_keys && norm) ? LEVEL_ALL : LEVEL_PRODUCTS;
}

// Tells whether bits of a model's gradients depend on the level. Below LEVEL_PRODUCTS backward makes keys of windows,
// and states of linear attention, in another way than forward.
static int level_changes_bits(const Config *c) {
    return layers_of_kind(c, LAYER_WINDOW) > 0 || layers_with_state(c) > 0;
}

static int keeps_row(const Layer *layer, size_t i) {
    return layer->row[i].width && layer->row[i].level <= layer->level;
}

// Counts of the layers before a layer: of each kind, with a state; elements of a token that they keep, by place
typedef struct {
    size_t number[LAYER_KINDS], state, kept[2][ACTIVATION_ROWS];
} LayersBefore;

// Sets a layer's counts of earlier layers, and adds the layer to them.
static void layer_count_before(Layer *layer, LayersBefore *before, LayerKind kind) {
    size_t *kept = before->kept[layer->off];
    memcpy(layer->number, before->number, sizeof(layer->number));
    layer->state = before->state;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        layer->row[i].before = kept[i];
        if (keeps_row(layer, i)) kept[i] += layer->row[i].width;
    }
    before->number[kind]++, before->state += (size_t)has_state(layer);
}

// Returns the first layer that layer l is like.
static size_t layer_find_like(const Layer *layers, const Config *c, const Lora *lora, size_t l) {
    const Layer *layer = &layers[l];
    for (size_t i = 0; i < l; i++) {
        const Layer *first = &layers[i];
        if (layer_kind(c, i) == layer_kind(c, l) && first->form == layer->form && first->rotates == layer->rotates &&
            (!lora || lora->like[i] == lora->like[l]) && first->level == layer->level && first->off == layer->off)
            return i;
    }
    return l;
}

// Makes all layers of a run; the caller frees them. Layers of one form are copies. lora NULL: the model itself trains
static Layer *layers_make(const Model *model, const Lora *lora, Keeping keeping) {
    const Config *c = &model->config;
    const size_t L = c->num_hidden_layers;
    Layer *layer = (Layer *)checked_calloc(2 * L, sizeof(*layer), "the layers of a run"), *form = layer + L;
    LayersBefore before = {{0}, 0, {{0}}};
    for (size_t l = 0, forms = 0; l < L; l++) {
        size_t like = 0;
        while (like < forms && form[like].form != layer_form(c, l)) like++;
        if (like == forms) {
            form[forms] = layer_make(model, layer_form(c, l));
            activation_rows(&form[forms], c), layer_keeps_keys(&form[forms++]);
        }
        layer[l] = form[like];
        layer[l].rotates = layer_rotates(c, l);
        layer[l].level = keep_level(keeping, l, L), layer[l].off = keep_off(keeping, l, L);
        layer_count_before(&layer[l], &before, layer_kind(c, l));
        layer[l].like = layer_find_like(layer, c, lora, l);
    }
    return layer;
}

// ---- a chunk's set --------------------------------------------------------------------------------------------------
static void *activation_get(const Activations *a, const ActivationRow *row) {
    void *tensor;
    memcpy(&tensor, (const char *)a + row->field, sizeof(tensor));
    return tensor;
}

static void activation_set(Activations *a, const ActivationRow *row, void *tensor) {
    memcpy((char *)a + row->field, &tensor, sizeof(tensor));
}

static size_t row_size(const StreamBP *s, const ActivationRow *row) {
    return dtype_size(row->summed ? dtype_of_sums(s->model->dtype) : s->model->dtype);
}

// Pushes a tensor of chunk c, if the layer has it. Keeps a pointer that is set already.
static void activation_push(const Visit *v, Activations *a, const ActivationRow *row) {
    const StreamBP *s = v->s;
    if (row->width && !activation_get(a, row))
        activation_set(a, row,
                       arena_push(s->arena, SHARE_WORKSPACE, row->name[0], v->c.n * row->width, row_size(s, row)));
}

// Points a tensor that the layer lacks at the tensor that stands for it.
static void stand_in(Stored **tensor, Stored *other) {
    if (!*tensor) *tensor = other;
}

static void mixer_stand_ins(Activations *a) {
    stand_in(&a->norm[0], a->x[0]);
    stand_in(&a->q_linear, a->q);
    stand_in(&a->gated, a->attention_out);
    stand_in(&a->delta_norm, a->mixed);
}

static void mlp_stand_ins(Activations *a) {
    stand_in(&a->norm[1], a->x[1]);
    stand_in(&a->expert_norm, a->norm[1]);
    stand_in(&a->router_norm, a->norm[1]);
}

// Pushes chunk c's tensors of one side.
static void push_side(const Visit *v, Activations *a, Side side) {
    static void (*const stand_ins[])(Activations * a) = {mixer_stand_ins, mlp_stand_ins};
    for (size_t i = 0; i < ACTIVATION_ROWS; i++)
        if (v->layer->row[i].side == side) activation_push(v, a, &v->layer->row[i]);
    stand_ins[side](a);
}

static void drop(const Visit *v, const Activations *a) { arena_pop(v->s->arena, a->mark); }

// ---- what stays from forward to backward ----------------------------------------------------------------------------
// Tells whether activations of a level stay from forward to backward, in this pass and layer.
static int keeps(const Visit *v, KeepLevel level) { return v->layer->level >= level && v->s->now.pass >= PASS_FORWARD; }

// Tells whether the layer's kept tensors move between the device and another place, in this pass.
static int keeps_off_device(const Visit *v) { return v->layer->off && keeps(v, LEVEL_ATTENTION); }

// Tells whether this pass finds the layer's kept tensors: backward, and on the device a pass that restores inputs.
static int finds_kept(const Visit *v) {
    return v->s->now.pass == PASS_BACKWARD || (v->s->now.pass == PASS_RESTORE && !v->layer->off);
}

// Pushes the activations that stay: for each row of the table and each place a tensor, [s->now.rows,width] of each
// layer that keeps it in turn. Chunk-major orders keep one chunk.
static void push_kept_activations(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    const int chunk = method_is_chunk_major(s->setup->method);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &layer_of(s, 0)->row[i];
        const char *name = row->name[!chunk] ? row->name[!chunk] : row->name[0];
        size_t width[2] = {0, 0};
        for (size_t l = 0; l < L; l++)
            if (keeps_row(layer_of(s, l), i)) width[layer_of(s, l)->off] += layer_of(s, l)->row[i].width;
        for (int off = 0; off < 2; off++)
            s->kept.row[off][i] = width[off] ? arena_push(off ? memory_of(&s->memory, PLACED_KEPT) : s->arena,
                                                          chunk ? SHARE_WORKSPACE : SHARE_KEPT, name,
                                                          width[off] * s->now.rows, row_size(s, row))
                                             : NULL;
    }
}

// Returns layer l's kept tensor for row i of the table, from row `row` of the tokens on.
static void *kept_row(const StreamBP *s, size_t l, size_t i, size_t row) {
    const Layer *layer = layer_of(s, l);
    const ActivationRow *r = &layer->row[i];
    return at(s->kept.row[layer->off][i], r->before * s->now.rows + (row - s->inputs.begin) * r->width, row_size(s, r));
}

// Returns the slot of a chunk's kept tensors off-device. Visits that follow each other take turns.
static size_t kept_slot(const StreamBP *s, size_t l, size_t index) { return (l * chunk_count(s) + index) % 2; }

// Points chunk c's kept tensors at their memory: at home, or off-device a slot.
static void kept_set(const Visit *v, Activations *a) {
    const StreamBP *s = v->s;
    const int off = keeps_off_device(v);
    if (!keeps(v, LEVEL_ATTENTION) || (off && s->now.pass == PASS_RESTORE)) return;
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        if (!keeps_row(v->layer, i)) continue;
        activation_set(a, &v->layer->row[i],
                       off ? s->kept.chunk[kept_slot(s, v->l, v->c.index)][i] : kept_row(s, v->l, i, v->c.row));
        if (finds_kept(v)) a->found |= (uint32_t)1 << i;
    }
}

// Tells whether an earlier pass kept this tensor of the activations, so that it is not computed again.
static int is_found(const Visit *v, const Activations *a, const void *tensor) {
    for (size_t i = 0; i < ACTIVATION_ROWS && tensor; i++)
        if (a->found >> i & 1 && activation_get(a, &v->layer->row[i]) == tensor) return 1;
    return 0;
}

// Begins chunk c's activations with x_l and the arena's mark.
static Activations activations_begin(const Visit *v) {
    Activations a = {0};
    a.mark = arena_mark(v->s->arena);
    a.x[0] = layer_input(v->s, v->l, v->c.row);
    if (!v->layer->branch[0].parts) a.x[1] = a.x[0];
    return a;
}

#endif
