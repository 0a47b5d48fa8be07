/*
Activations: what a chunk's forward leaves for its backward in one layer. `activation_rows` describes each tensor once: its field,
its name on the arena, its width and the kind of layer that has it. Room for a chunk and method full's sets of all
layers follow from that table.
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
    Stored *projected;        // [n,E]      linear attention in place of q .. gate: q | k | v | z | b | a
    Stored *mixed;            // [n,W]      q | k | v after the convolution
    Stored *delta_out;        // [n,HV*DV]  output of the delta rule
    Stored *delta_norm;       // [n,HV*DV]  after its gated norm
    Stored *gated;            // [n,NH*HD]  attention's output times its gate; NULL where the family has none
    Stored *attention_branch; // [n,C]      attention branch before its post norm; NULL where the family has none
    Stored *y;                // [n,C]      x_l + attention branch
    Stored *norm2;            // [n,C]      norm of y; y where the family has none
    Stored *gate_up;          // [n,H]      gate and up (H = 2FF), or GELU's input (H = FF)
    Stored *activated;        // [n,FF]     after the activation
    Stored *mlp_branch;       // [n,C]      MLP branch before its post norm; NULL where the family has none
    Stored *dnorm1;           // [n,C]      backward: gradient of norm 1, from queries, keys and values
    size_t mark;              // of the arena, before all of them
};

// The parts of a layer: what all layers have of the mixer, what attention or linear attention adds, the MLP
typedef enum { PART_MIXER, PART_MLP, PART_ATTENTION, PART_LINEAR } LayerPart;

typedef struct {
    LayerPart part;
    size_t offset, width; // in Activations; elements of a token, 0: the family has none
    int summed;
    const char *name;
} ActivationRow;

enum { ACTIVATION_ROWS = 20 };

// In the order of the arena
static size_t activation_rows(Shapes d, ActivationRow rows[ACTIVATION_ROWS]) {
#define ROW(part, field, ...)                                                                                          \
    { part, offsetof(Activations, field), __VA_ARGS__ }
    const ActivationRow all[] = {
        ROW(PART_MIXER, norm1, d.pre_norms ? d.C : 0, 0, "first norm"),
        ROW(PART_ATTENTION, q_linear, d.qk_norm ? d.Q : 0, 0, "queries before QK-norm"),
        ROW(PART_ATTENTION, q, d.Q, 0, "queries"),
        ROW(PART_ATTENTION, attention_out, d.Q, 0, "attention output"),
        ROW(PART_ATTENTION, lse, d.NH, 1, "log-sum-exp"),
        ROW(PART_ATTENTION, gate, d.hybrid ? d.Q : 0, 0, "gate of attention output"),
        ROW(PART_ATTENTION, gated, d.hybrid ? d.Q : 0, 0, "attention output behind its gate"),
        ROW(PART_LINEAR, projected, d.E, 0, "inputs of linear attention"),
        ROW(PART_LINEAR, mixed, d.W, 0, "after the convolution"),
        ROW(PART_LINEAR, delta_out, d.DVs, 0, "delta rule's output"),
        ROW(PART_LINEAR, delta_norm, d.DVs, 0, "delta rule's output behind its norm"),
        ROW(PART_MIXER, attention_branch, d.post_norms ? d.C : 0, 0, "attention before its norm"),
        ROW(PART_MIXER, y, d.C, 0, "after attention"),
        ROW(PART_MLP, norm2, d.pre_norms ? d.C : 0, 0, "second norm"),
        ROW(PART_MLP, gate_up, d.H, 0, d.gated ? "gate and up" : "before GELU"),
        ROW(PART_MLP, activated, d.FF, 0, "after activation"),
        ROW(PART_MLP, mlp_branch, d.post_norms ? d.C : 0, 0, "MLP before its norm"),
    };
#undef ROW
    memcpy(rows, all, sizeof(all));
    return sizeof(all) / sizeof(all[0]);
}

static void *activation_get(const Activations *a, const ActivationRow *row) {
    void *tensor;
    memcpy(&tensor, (const char *)a + row->offset, sizeof(tensor));
    return tensor;
}

static void activation_set(Activations *a, const ActivationRow *row, void *tensor) {
    memcpy((char *)a + row->offset, &tensor, sizeof(tensor));
}

// Pushes n tokens of the parts in the bit set; a tensor that a has already is left alone.
static void push_activations(StreamBP *s, Activations *a, unsigned parts, size_t n) {
    ActivationRow row[ACTIVATION_ROWS];
    const size_t rows = activation_rows(shapes_of(s->model), row);
    for (size_t i = 0; i < rows; i++) {
        if (!(parts >> row[i].part & 1) || !row[i].width || activation_get(a, &row[i])) continue;
        activation_set(a, &row[i],
                       row[i].summed ? (void *)push_summed(s, SHARE_WORKSPACE, row[i].name, n * row[i].width)
                                     : (void *)push_stored(s, SHARE_WORKSPACE, row[i].name, n * row[i].width));
    }
}

static unsigned mixer_parts(const StreamBP *s, size_t l) {
    return 1u << PART_MIXER | 1u << (layer_is_linear(&s->model->config, l) ? PART_LINEAR : PART_ATTENTION);
}

static void push_mlp_activations(StreamBP *s, Activations *a, size_t n) {
    push_activations(s, a, 1u << PART_MLP, n);
    if (!shapes_of(s->model).pre_norms) a->norm2 = a->y;
}

static void drop(StreamBP *s, const Activations *a) { arena_pop(s->arena, a->mark); }

// ---- method full and chunk-major orders: one set for each layer --------------------------------------------------
static void push_kept_activations(StreamBP *s, Activations *kept) {
    const size_t L = s->model->config.num_hidden_layers, attention = attention_layers_before(s, L);
    push_activations(s, kept, 1u << PART_MIXER | 1u << PART_MLP, L * s->rows);
    push_activations(s, kept, 1u << PART_ATTENTION, attention * s->rows);
    push_activations(s, kept, 1u << PART_LINEAR, (L - attention) * s->rows);
}

// The set of layer l, from row `row` on
static Activations kept_activations(StreamBP *s, size_t l, size_t row) {
    ActivationRow table[ACTIVATION_ROWS];
    const Shapes d = shapes_of(s->model);
    const size_t rows = activation_rows(d, table), attention = attention_layers_before(s, l);
    const int linear = layer_is_linear(&s->model->config, l);
    Activations a = *s->kept;
    for (size_t i = 0; i < rows; i++) {
        const ActivationRow *r = &table[i];
        const int of_all = r->part == PART_MIXER || r->part == PART_MLP,
                  other = !of_all && (r->part == PART_LINEAR) != linear;
        const size_t first = (of_all ? l : linear ? l - attention : attention) * s->rows + row - s->inputs.begin;
        if (!r->width) continue;
        activation_set(&a, r,
                       other ? NULL : at(activation_get(&a, r), first * r->width, r->summed ? d.summed : d.stored));
    }
    if (!d.pre_norms) a.norm1 = layer_input(s, l, row), a.norm2 = a.y;
    a.mark = arena_mark(s->arena);
    return a;
}

#endif
