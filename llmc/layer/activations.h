/*
Activations: what a chunk's forward leaves for its backward in one layer. `activation_rows` names each tensor once: its
field, its part of the layer, its width, its name on the arena. Room for a chunk, and method full's room for all layers,
follow from that table.
*/
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H
#include "llmc/stream/linear_memory.h"

struct Activations {
    Stored *norm1;            // [n,C]      norm of x_l; x_l where the family has none
    Stored *q_linear;         // [n,NH*HD]  queries before QK-norm; NULL without QK-norm
    Stored *q;                // [n,NH*HD]  after QK-norm and RoPE
    Stored *attention_out;    // [n,NH*HD]  softmax(scale q k^T) v
    Summed *lse;              // [n,NH]     log-sum-exp of the scores
    Stored *gate;             // [n,NH*HD]  of attention's output; NULL where the family has none
    Stored *gated;            // [n,NH*HD]  attention_out times its gate; NULL where the family has none
    Stored *projected;        // [n,E]      linear attention, in place of the seven above: q | k | v | z | b | a
    Stored *mixed;            // [n,W]      q | k | v after the convolution
    Stored *delta_out;        // [n,HV*DV]  output of the delta rule
    Stored *delta_norm;       // [n,HV*DV]  after its gated norm
    Stored *attention_branch; // [n,C]      the mixer's output before its post norm; NULL where the family has none
    Stored *y;                // [n,C]      x_l + the mixer's output
    Stored *norm2;            // [n,C]      norm of y; y where the family has none
    Stored *gate_up;          // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *activated;        // [n,FF]     after the activation
    Summed *router_logits;    // [n,E]      experts, in place of the two above
    Stored *expert_gate_up;   // [n,k,2I]   sorted by expert
    Stored *expert_activated; // [n,k,I]
    Stored *shared_gate_up;   // [n,2S]     the shared expert's
    Stored *shared_activated; // [n,S]
    Summed *shared_logit;     // [n]        its scale is the logistic function of it; NULL where the family has none
    Stored *expert_norm;      // [n,C]      experts beside a dense MLP: norm of y that they read,
    Stored *router_norm;      // [n,C]      and the one that their router reads,
    Stored *expert_sum;       // [n,C]      their output, before its norm,
    Stored *dense_sum;        // [n,C]      and that of the dense MLP
    Stored *mlp_branch;       // [n,C]      the MLP's output before its post norm; NULL where the family has none
    Stored *mlp_out;          // [n,C]      y + the MLP's output, where a branch of the layer's own input follows
    Stored *input_product;    // [n,P]      of that branch: x_0's projection, before its norm,
    Stored *input_gate;       // [n,2P]     gate and up,
    Stored *input_activated;  // [n,P]      and their product
    Stored *input_branch;     // [n,C]      its output before its norm
    Stored *dnorm1;           // [n,C]      backward: gradient of norm1
    size_t mark;              // the arena's, before all of them
};

// The part of a layer that a tensor belongs to: all layers have MIXER and MLP, either ATTENTION or LINEAR, and either
// DENSE or EXPERTS.
typedef enum { PART_MIXER, PART_MLP, PART_ATTENTION, PART_LINEAR, PART_DENSE, PART_EXPERTS } LayerPart;

typedef struct {
    LayerPart part;
    size_t field, width; // offset in Activations; elements of a token, 0 if a layer of these shapes has no such tensor
    int summed;
    const char *name;
} ActivationRow;

enum { ACTIVATION_ROWS = 32 };

// Fills `rows` in the order of the arena, with the widths of a layer.
static void activation_rows(Shapes d, ActivationRow rows[ACTIVATION_ROWS]) {
    const size_t pre = d.pre_norms ? d.C : 0, post = d.post_norms ? d.C : 0, gate = d.gated_attention ? d.Q : 0;
    const size_t k = d.router.k, beside = d.beside ? d.C : 0, own = d.P ? d.C : 0, scale = d.shared && d.shared_scale;
    const ActivationRow all[ACTIVATION_ROWS] = {
        {PART_MIXER, offsetof(Activations, norm1), pre, 0, "first norm"},
        {PART_ATTENTION, offsetof(Activations, q_linear), d.qk_norm ? d.Q : 0, 0, "queries before QK-norm"},
        {PART_ATTENTION, offsetof(Activations, q), d.Q, 0, "queries"},
        {PART_ATTENTION, offsetof(Activations, attention_out), d.Q, 0, "attention output"},
        {PART_ATTENTION, offsetof(Activations, lse), d.NH, 1, "log-sum-exp"},
        {PART_ATTENTION, offsetof(Activations, gate), gate, 0, "gate of attention output"},
        {PART_ATTENTION, offsetof(Activations, gated), gate, 0, "attention output behind its gate"},
        {PART_LINEAR, offsetof(Activations, projected), d.E, 0, "inputs of linear attention"},
        {PART_LINEAR, offsetof(Activations, mixed), d.W, 0, "after the convolution"},
        {PART_LINEAR, offsetof(Activations, delta_out), d.DVs, 0, "delta rule's output"},
        {PART_LINEAR, offsetof(Activations, delta_norm), d.DVs, 0, "delta rule's output behind its norm"},
        {PART_MIXER, offsetof(Activations, attention_branch), post, 0, "attention before its norm"},
        {PART_MIXER, offsetof(Activations, y), d.C, 0, "after attention"},
        {PART_MLP, offsetof(Activations, norm2), pre, 0, "second norm"},
        {PART_DENSE, offsetof(Activations, gate_up), d.H, 0, d.gated ? "gate and up" : "before GELU"},
        {PART_DENSE, offsetof(Activations, activated), d.FF, 0, "after activation"},
        {PART_EXPERTS, offsetof(Activations, router_logits), d.router.E, 1, "logits of the router"},
        {PART_EXPERTS, offsetof(Activations, expert_gate_up), k * 2 * d.I, 0, "experts' gate and up"},
        {PART_EXPERTS, offsetof(Activations, expert_activated), k * d.I, 0, "experts after activation"},
        {PART_EXPERTS, offsetof(Activations, shared_gate_up), 2 * d.shared, 0, "the shared expert's gate and up"},
        {PART_EXPERTS, offsetof(Activations, shared_activated), d.shared, 0, "the shared expert after activation"},
        {PART_EXPERTS, offsetof(Activations, shared_logit), scale, 1, "the shared expert's logit"},
        {PART_EXPERTS, offsetof(Activations, expert_norm), beside, 0, "norm before experts"},
        {PART_EXPERTS, offsetof(Activations, router_norm), beside, 0, "norm before the router"},
        {PART_EXPERTS, offsetof(Activations, expert_sum), beside, 0, "experts before their norm"},
        {PART_EXPERTS, offsetof(Activations, dense_sum), beside, 0, "the dense MLP before its norm"},
        {PART_MLP, offsetof(Activations, mlp_branch), post, 0, "MLP before its norm"},
        {PART_MLP, offsetof(Activations, mlp_out), own, 0, "after the MLP"},
        {PART_MLP, offsetof(Activations, input_product), d.P, 0, "the layer's own input before its norm"},
        {PART_MLP, offsetof(Activations, input_gate), 2 * d.P, 0, "gate and own input"},
        {PART_MLP, offsetof(Activations, input_activated), d.P, 0, "own input, gated"},
        {PART_MLP, offsetof(Activations, input_branch), own, 0, "own input before its last norm"},
    };
    memcpy(rows, all, sizeof(all));
}

static void *activation_get(const Activations *a, const ActivationRow *row) {
    void *tensor;
    memcpy(&tensor, (const char *)a + row->field, sizeof(tensor));
    return tensor;
}

static void activation_set(Activations *a, const ActivationRow *row, void *tensor) {
    memcpy((char *)a + row->field, &tensor, sizeof(tensor));
}

static int is_linear(const StreamBP *s, size_t l) { return layer_is_linear(&s->model->config, l); }

// Returns the parts of layer l's mixer, as bits.
static unsigned mixer_parts(const StreamBP *s, size_t l) {
    return 1u << PART_MIXER | 1u << (is_linear(s, l) ? PART_LINEAR : PART_ATTENTION);
}

// Returns the parts of layer l's MLP, as bits.
static unsigned mlp_parts(const StreamBP *s, size_t l) {
    const unsigned experts = layer_has_experts(&s->model->config, l), beside = s->model->config.family->experts_beside;
    return 1u << PART_MLP | experts << PART_EXPERTS | (unsigned)(!experts || beside) << PART_DENSE;
}

static void *push_activation(const StreamBP *s, const ActivationRow *row, size_t count) {
    const DType type = row->summed ? dtype_of_sums(s->model->dtype) : s->model->dtype;
    return arena_push(s->arena, SHARE_WORKSPACE, row->name, count, dtype_size(type));
}

// Pushes n tokens of the tensors of `parts` of layer l. A pointer that is already set is left alone.
static void push_activations(const StreamBP *s, size_t l, Activations *a, unsigned parts, size_t n) {
    ActivationRow rows[ACTIVATION_ROWS];
    activation_rows(layer_shapes(s, l), rows);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++)
        if (parts >> rows[i].part & 1 && rows[i].width && !activation_get(a, &rows[i]))
            activation_set(a, &rows[i], push_activation(s, &rows[i], n * rows[i].width));
}

static void push_mlp_activations(const StreamBP *s, size_t l, Activations *a, size_t n) {
    push_activations(s, l, a, mlp_parts(s, l), n);
    if (!shapes_of(s->model).pre_norms) a->norm2 = a->y;
}

static void drop(const StreamBP *s, const Activations *a) { arena_pop(s->arena, a->mark); }

// ---- one set for each layer: method full; chunk-major orders, for one chunk -----------------------------------------
// Adds the widths of layer l's tensors to those of the layers before it.
static void widths_add(const StreamBP *s, size_t l, size_t width[ACTIVATION_ROWS]) {
    const unsigned parts = mixer_parts(s, l) | mlp_parts(s, l);
    ActivationRow rows[ACTIVATION_ROWS];
    activation_rows(layer_shapes(s, l), rows);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) width[i] += parts >> rows[i].part & 1 ? rows[i].width : 0;
}

// Pushes the sets of all layers, s->now.rows tokens each: a tensor's widths of all layers, layer by layer.
static void push_kept_activations(const StreamBP *s, Activations *kept) {
    ActivationRow rows[ACTIVATION_ROWS];
    size_t width[ACTIVATION_ROWS] = {0};
    for (size_t l = 0; l < s->model->config.num_hidden_layers; l++) widths_add(s, l, width);
    activation_rows(shapes_of(s->model), rows);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++)
        if (width[i]) activation_set(kept, &rows[i], push_activation(s, &rows[i], width[i] * s->now.rows));
}

// Returns layer l's set from row `row` on. Tensors that the layer has not are NULL.
static Activations kept_activations(const StreamBP *s, size_t l, size_t row) {
    ActivationRow rows[ACTIVATION_ROWS];
    size_t before[ACTIVATION_ROWS] = {0};
    const Shapes d = layer_shapes(s, l);
    const unsigned parts = mixer_parts(s, l) | mlp_parts(s, l);
    Activations a = {0};
    for (size_t i = 0; i < l; i++) widths_add(s, i, before);
    activation_rows(d, rows);
    for (size_t i = 0; i < ACTIVATION_ROWS; i++) {
        const ActivationRow *r = &rows[i];
        const size_t first = before[i] * s->now.rows + (row - s->inputs.begin) * r->width;
        if (r->width && parts >> r->part & 1)
            activation_set(&a, r, at(activation_get(s->kept, r), first, r->summed ? d.summed : d.stored));
    }
    if (!d.pre_norms) a.norm1 = layer_input(s, l, row), a.norm2 = a.y;
    a.mark = arena_mark(s->arena);
    return a;
}

#endif
