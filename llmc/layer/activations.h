/*
Activations: the tensors that a chunk's forward leaves for its backward in one layer. `activation_rows` names each
tensor once: its field, its width, the least level at which it stays from forward to backward, its name on the arena.
The room of a chunk and the room of all layers follow from that table. A layer has a row if it has the row's weight.
For a tensor that a layer lacks another one may stand in (mixer_stand_ins, mlp_stand_ins): for a norm its input.

    LEVEL_NONE        no activation stays: backward recomputes all
    LEVEL_ATTENTION   --keep attention: attention's outputs stay (kept_attention.h)
    LEVEL_ALL         all activations stay: of all chunks (method full) or of one chunk (chunk-major orders)
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
    Stored *q_linear;             // [n,NH*HD]  queries before QK-norm; without QK-norm q
    Stored *q;                    // [n,NH*HD]  queries after QK-norm and RoPE
    Stored *attention_out;        // [n,NH*HD]  softmax(scale q k^T) v
    Summed *lse;                  // [n,NH]     log-sum-exp of the scores
    Stored *gate;                 // [n,NH*HD]  gate of attention's output; NULL where the family has no gate
    Stored *gated;                // [n,NH*HD]  attention_out times the gate; without a gate attention_out
    Stored *projected;            // [n,E]      linear attention: q | k | v | z | b | a; a convolution alone: its input
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
    size_t mark;                       // the arena's, before all of them
};

// Fills a layer's table of activations, in the order of the arena, from the weights that the layer has. The tables of
// all layers have the same rows.
static void activation_rows(Layer *layer, const Config *c) {
    const Shapes *d = &layer->shape;
    const LinearShape *linear = &d->linear;
    const size_t C = d->C, k = d->router.k;
    const size_t after_mixer = layer->branch[0].parts && layer->branches > 1 ? C : 0; // else it is x_l or x_{l+1}
    const char *const up = d->activation.kind == ACTIVATION_GELU ? "before GELU" : "gate and up";
#define FIELD(name) offsetof(Activations, name)
#define MIXER(of, field, width, name)                                                                                  \
    { SIDE_MIXER, of, FIELD(field), width, 0, LEVEL_ALL, {name, NULL, NULL}, 0 }
#define MLP(of, field, width, name)                                                                                    \
    { SIDE_MLP, of, FIELD(field), width, 0, LEVEL_ALL, {name, NULL, NULL}, 0 }
#define KEPT(of, field, width, summed, name)                                                                           \
    {                                                                                                                  \
        SIDE_MIXER, of, FIELD(field), width, summed, LEVEL_ATTENTION,                                                  \
            {name, name " of all layers", name " on its way"}, 0                                                       \
    }
#define LOGITS(of, field, width, name)                                                                                 \
    { SIDE_MLP, of, FIELD(field), width, 1, LEVEL_ALL, {name, NULL, NULL}, 0 }
    const ActivationRow all[ACTIVATION_ROWS] = {
        MIXER(NORM1_WEIGHT, norm[0], C, "first norm"),
        MIXER(Q_NORM, q_linear, d->Q, "queries before QK-norm"),
        MIXER(O_WEIGHT, q, d->Q, "queries"),
        KEPT(O_WEIGHT, attention_out, d->Q, 0, "attention output"),
        KEPT(O_WEIGHT, lse, d->NH, 1, "log-sum-exp"),
        MIXER(O_WEIGHT, gate, d->gate, "gate of attention output"),
        MIXER(O_WEIGHT, gated, d->gate, "attention output behind its gate"),
        MIXER(OUT_WEIGHT, projected, linear->E, "inputs of linear attention"),
        MIXER(OUT_WEIGHT, mixed, linear->W, "after the convolution"),
        MIXER(GATED_NORM, delta_out, linear->DVs, "delta rule's output"),
        MIXER(GATED_NORM, delta_norm, linear->DVs, "delta rule's output behind its norm"),
        MIXER(POST_NORM1, inner[0], C, "attention before its norm"),
        MIXER(LAYER_TENSORS, x[1], after_mixer, "after attention"),
        MLP(NORM2_WEIGHT, norm[1], C, "second norm"),
        MLP(DOWN_WEIGHT, gate_up, d->H, up),
        MLP(DOWN_WEIGHT, activated, d->FF, "after activation"),
        LOGITS(EXPERTS_DOWN, router_logits, d->router.E, "logits of the router"),
        MLP(EXPERTS_DOWN, expert_gate_up, k * 2 * d->I, "experts' gate and up"),
        MLP(EXPERTS_DOWN, expert_activated, k * d->I, "experts after activation"),
        MLP(EXPERTS_DOWN, shared_gate_up, 2 * d->shared, "the shared expert's gate and up"),
        MLP(EXPERTS_DOWN, shared_activated, d->shared, "the shared expert after activation"),
        LOGITS(SHARED_SCALE_WEIGHT, shared_logit, 1, "the shared expert's logit"),
        MLP(EXPERTS_PRE_NORM, expert_norm, C, "norm before experts"),
        MLP(ROUTER_NORM, router_norm, C, "norm before the router"),
        MLP(EXPERTS_POST_NORM, sum[1], C, "experts before their norm"),
        MLP(DENSE_POST_NORM, sum[0], C, "the dense MLP before its norm"),
        MLP(POST_NORM2, inner[1], C, "MLP before its norm"),
        MLP(INPUT_OUT, x[2], C, "after the MLP"),
        MLP(INPUT_OUT, input_product, d->P, "the layer's own input before its norm"),
        MLP(INPUT_OUT, input_gate, 2 * d->P, "gate and own input"),
        MLP(INPUT_OUT, input_activated, d->P, "own input, gated"),
        MLP(INPUT_OUT, inner[2], C, "own input before its last norm"),
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

// Sets the counts of earlier layers in *layer, the layer after l: the counts of layer l plus layer l itself.
static void layer_count_before(Layer *layer, const Config *c, size_t l, const Layer *before) {
    memcpy(layer->number, before->number, sizeof(before->number));
    layer->number[layer_kind(c, l)]++;
    layer->state = before->state + (size_t)has_state(before);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) layer->row[i].before = before->row[i].before + before->row[i].width;
}

// Makes all layers of a run; the caller frees them. Layers of one form are copies.
static Layer *layers_make(const Model *model) {
    const Config *c = &model->config;
    Layer *layer = (Layer *)checked_calloc(c->num_hidden_layers, sizeof(*layer), "the layers of a run");
    for (size_t l = 0; l < c->num_hidden_layers; l++) {
        const unsigned form = layer_form(c, l);
        size_t like = 0;
        while (like < l && layer[like].form != form) like++;
        if (like < l)
            layer[l] = layer[like];
        else
            layer[l] = layer_make(model, form), activation_rows(&layer[l], c);
        if (l) layer_count_before(&layer[l], c, l - 1, &layer[l - 1]);
        layer[l].rotates = layer_rotates(c, l);
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
// Pushes the activations that stay: for each row of the table one tensor, [s->now.rows,width] of each layer in turn.
static void push_kept_activations(StreamBP *s) {
    const size_t L = s->model->config.num_hidden_layers;
    const int all = s->setup->level == LEVEL_ALL;
    Arena *memory = all ? s->arena : memory_of(&s->memory, PLACED_KEPT);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &layer_of(s, L - 1)->row[i];
        const size_t width = row->before + row->width;
        s->kept.row[i] = NULL;
        if (width && row->level <= s->setup->level)
            s->kept.row[i] = arena_push(memory, all ? SHARE_WORKSPACE : SHARE_KEPT, row->name[!all],
                                        width * s->now.rows, row_size(s, row));
    }
}

// Returns layer l's kept tensor for row i of the table, from row `row` of the tokens on.
static void *kept_row(const StreamBP *s, size_t l, size_t i, size_t row) {
    const ActivationRow *r = &layer_of(s, l)->row[i];
    return at(s->kept.row[i], r->before * s->now.rows + (row - s->inputs.begin) * r->width, row_size(s, r));
}

// Points chunk c's tensors of levels up to `level` at the kept tensors.
static void kept_set(const Visit *v, Activations *a, KeepLevel level) {
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *row = &v->layer->row[i];
        if (row->width && row->level <= level) activation_set(a, row, kept_row(v->s, v->l, i, v->c.row));
    }
}

// Begins chunk c's activations with x_l and the arena's mark.
static Activations activations_begin(const Visit *v) {
    Activations a = {0};
    a.mark = arena_mark(v->s->arena);
    a.x[0] = layer_input(v->s, v->l, v->c.row);
    if (!v->layer->branch[0].parts) a.x[1] = a.x[0];
    return a;
}

// Returns chunk c's activations at LEVEL_ALL, all of them kept tensors.
static Activations kept_activations(const Visit *v) {
    Activations a = activations_begin(v);
    kept_set(v, &a, LEVEL_ALL);
    mixer_stand_ins(&a);
    mlp_stand_ins(&a);
    return a;
}

#endif
