/*
Where weights, gradients and layer inputs live. streambp.h brackets its work with six calls and never asks where things
are: weights_acquire/release and grads_acquire/release around a group (a layer, the embedding or the head), input_save
and input_load around a chunk of a layer's input. Here everything is on the device, so they return pointers; offloading,
sharding and recomputation are other implementations of these six.

With LoRA the model's weights are frozen: no gradient of theirs exists anywhere, and what is trained, has gradients and
an optimizer is the table of adapters (lora.h). They live beside the weights and come and go with their layer.

Gradient precision: within a group dW is summed in Summed. Where stored gradients have that type the stored gradient
itself is handed out; otherwise one group-sized buffer is, and grads_release adds it once to the stored gradient.
*/
#ifndef LLMC_RESIDENCY_H
#define LLMC_RESIDENCY_H
#include "arena.h"
#include "lora.h"
#include "ops.h"
#include "sharding.h"

typedef struct {
    const Model *model;
    const Ops *ops;
    Arena *arena;
    char *weights;       // [elements] of model->dtype
    const Lora *lora;    // NULL: the model itself is trained
    char *adapters;      // [elements of lora->table] of model->dtype
    int without;         // adapters are left out for now: the model as it was before
    char *gradients;     // [elements of what is trained] of gradient_type, NULL in a run without backward
    DType gradient_type; // model->dtype, or the type of sums
    char *inputs;        // [L+1, N, C] layer inputs x_0..x_L, or [N, C] where a forward alone runs in place
    size_t input_stride; // N*C elements, or 0 in place
    size_t input_begin;  // the first token that `inputs` holds: 0, but generation holds one chunk at a time
    size_t mark;         // of the sums handed out
    World world;         // whose processes share in all this
    int reduce;          // the stream at hand is the step's last: gradients are then added up over all ranks
    Traffic sent;        // so far, by this rank
} Residency;

// What AdamW keeps; nothing but the optimizer and checkpoints touch it.
typedef struct {
    void *m, *v;   // [elements] of moment_type
    float *master; // [elements] or NULL
} OptimizerState;

static inline void *at(void *base, size_t element, size_t size) { return (char *)base + element * size; }

// The table of what is trained, and where that is.
static inline const Model *trained_table(const Residency *r) { return r->lora ? &r->lora->table : r->model; }
static inline char *trained_weights(const Residency *r) { return r->lora ? r->adapters : r->weights; }

// Elements of the norm alone: the matrix of the head follows, in Summed, where dW is handed out.
static inline size_t head_norm_elements(const Model *model) {
    size_t C = model->config.hidden_size;
    return model->model_offset[FINAL_NORM_BIAS] == ABSENT ? C : 2 * C;
}

// ---- weights --------------------------------------------------------------------------------------------------------
typedef struct {
    char *weights;  // of the group, from its first element
    char *adapters; // of a layer, from its first element; NULL: none, or left out for now
} GroupWeights;

static inline GroupWeights weights_acquire(Residency *r, size_t group) {
    size_t size = dtype_size(r->model->dtype);
    GroupWeights w = {(char *)at(r->weights, group_begin(r->model, group), size), NULL};
    if (r->lora && !r->without && group < GROUP_EMBEDDING)
        w.adapters = (char *)at(r->adapters, group_begin(&r->lora->table, group), size);
    return w;
}

static inline void weights_release(Residency *r, size_t group) { (void)r, (void)group; }

// ---- gradients ------------------------------------------------------------------------------------------------------
static inline int grads_are_sums(const Residency *r) { return r->gradient_type == dtype_of_sums(r->model->dtype); }

typedef struct {
    Summed *layer;       // a layer's dW in the order of its tensors, or with LoRA of its adapters; NULL of the head
    Summed *norm, *head; // of the head: the final norm's (weight, bias), and the matrix
} GroupSums;

static inline GroupSums grads_acquire(Residency *r, size_t group) {
    const Model *model = trained_table(r);
    size_t size = dtype_size(dtype_of_sums(model->dtype));
    size_t norm = head_norm_elements(r->model), head = model_head_elements(r->model);
    GroupSums sums = {NULL, NULL, NULL};
    r->mark = arena_mark(r->arena);
    if (r->lora && group == GROUP_HEAD) return sums;
    if (grads_are_sums(r)) {
        if (group == GROUP_HEAD) {
            sums.norm = (Summed *)at(r->gradients, group_begin(model, group), size);
            sums.head = (Summed *)at(r->gradients, model_head_offset(model), size);
        } else {
            sums.layer = (Summed *)at(r->gradients, group_begin(model, group), size);
        }
    } else if (group == GROUP_HEAD) {
        sums.norm = (Summed *)arena_push(r->arena, SHARE_GRADIENTS, "sums of the head's gradient", norm + head, size);
        sums.head = (Summed *)at(sums.norm, norm, size);
        r->ops->zero(sums.norm, (norm + head) * size);
    } else {
        sums.layer = (Summed *)arena_push(r->arena, SHARE_GRADIENTS, "sums of one layer's gradient",
                                          model->layer_elements, size);
        r->ops->zero(sums.layer, model->layer_elements * size);
    }
    return sums;
}

static inline void grads_release(Residency *r, size_t group, GroupSums sums) {
    const Model *model = trained_table(r);
    size_t size = dtype_size(r->gradient_type), begin = group_begin(model, group);
    if (!grads_are_sums(r)) {
        if (group == GROUP_HEAD && !r->lora) {
            r->ops->gradient_add(at(r->gradients, begin, size), r->gradient_type, sums.norm, head_norm_elements(model));
            r->ops->gradient_add(at(r->gradients, model_head_offset(model), size), r->gradient_type, sums.head,
                                 model_head_elements(model));
        } else if (group != GROUP_HEAD) {
            r->ops->gradient_add(at(r->gradients, begin, size), r->gradient_type, sums.layer, model->layer_elements);
        }
    }
    arena_pop(r->arena, r->mark);
}

// The stored gradient of a table that is looked up (embeddings): its op adds to it directly.
static inline void *gradient_of_table(Residency *r, ModelTensor table) {
    return at(r->gradients, r->model->model_offset[table], dtype_size(r->gradient_type));
}

// ---- layer inputs ---------------------------------------------------------------------------------------------------
// Where x_l of tokens from `begin` on is to be written, and where it can be read.
static inline Stored *input_save(Residency *r, size_t layer, size_t begin) {
    size_t row = begin - r->input_begin;
    return (Stored *)at(r->inputs, layer * r->input_stride + row * r->model->config.hidden_size,
                        dtype_size(r->model->dtype));
}

static inline Stored *input_load(Residency *r, size_t layer, size_t begin) { return input_save(r, layer, begin); }

#endif
