/*
The state of streamed backpropagation (StreamBP) and the helpers of every step: shapes, room on the arena, a layer's
weights and the sums of their gradients. streambp.h is the algorithm over this state. sequence.h says which tokens a
chunk has, attention_memory.h where a layer's keys and values are, residency.h where weights and gradients are, inputs.h
where layer inputs are.

Tensors with an element per token (inputs, activations, targets) are stored in rows. One process has a row for every
token of the sequence. Processes that share a sequence (llmc/orders/) own two ranges of its tokens each, stored one
after the other.

The steps of a layer take a Visit: the layer, the chunk, the layer's weights and the sums of their gradients.
*/
#ifndef LLMC_STATE_H
#define LLMC_STATE_H
#include "llmc/data/objective.h"
#include "llmc/ops/ops_dry.h"
#include "layer.h"
#include "residency.h"

typedef enum {
    METHOD_STREAM,
    METHOD_CHECKPOINT,
    METHOD_FULL,
    METHOD_MST,
    METHOD_SECO,
    METHOD_SPACO,
    METHOD_AUTO
} Method;

static const char *const method_names[METHOD_AUTO] = {"stream", "checkpoint", "full", "mst", "seco", "spaco"};

static int method_is_chunk_major(Method method) { return method == METHOD_SECO || method == METHOD_SPACO; }

static int method_has_chunks(Method method) { return method != METHOD_CHECKPOINT && method != METHOD_FULL; }

// Tells whether backward recomputes a layer's forward, layer by layer, from its input.
static int method_recomputes(Method method) { return method != METHOD_FULL && !method_is_chunk_major(method); }

// The current pass. FORWARD is followed by BACKWARD over the same sequence. FORWARD_ONLY saves nothing. FORWARD_FIRST
// is pass 1 of chunk-major methods and saves only K, V and states. RESTORE runs within backward and recomputes layer
// inputs that were not kept.
typedef enum { PASS_FORWARD_ONLY, PASS_FORWARD_FIRST, PASS_FORWARD, PASS_RESTORE, PASS_BACKWARD } Pass;

enum { INPUT_SLOTS = 16 };

typedef struct StreamBP StreamBP;
typedef struct Activations Activations; // layer/activations.h

typedef struct {
    size_t row, n;      // rows [row, row + n) of inputs and activations
    size_t token;       // tokens [token, token + n) of the sequence; in a single process token = row
    size_t index;       // position among the chunks of a loop
    double times;       // chunks that its visit counts for; 1 in a run
    const Spans *given; // spans of a generation pass (key_value_cache.h); NULL: spans of the documents
} Chunk;

// The layer and chunk that a step works on. w: the layer's weights; dw: in backward the sums of their gradients. dx
// lies where x_L was (gradient_at)
typedef struct {
    StreamBP *s;
    const Layer *layer; // NULL: the walk is over, or v is of the embedding or the head
    size_t l;           // number of the layer
    size_t index, end;  // numbers in the walk: this visit, and the end after the last visit
    double times;       // layers that this visit counts for; 1 in a run
    Chunk c;
    GroupWeights w;
    GroupSums dw;
} Visit;

// The loops over the chunks of one layer: StreamBP's are in streambp.h, others in llmc/orders/.
typedef struct {
    void (*forward)(Visit *v);
    void (*backward)(Visit *v);
} LayerLoops;

// Method spaco: which chunks have a backward (llmc/orders/chunk_major.h)
typedef struct {
    double keep;    // share of chunks that are drawn
    uint64_t seed;  // seed of the current sequence's draws
    uint8_t *drawn; // [chunks] 1: drawn, of the current sequence; NULL in the dry run
} Sparse;

// A call of attention over a range of an ancestor's keys (tree_spans.h)
typedef struct {
    Span span;     // its queries, as if they followed the keys; row: 0
    KeyRange keys; // rows of the ancestor before the fork
    size_t row;    // the first query's row within the chunk
} TreeCall;

// Latent attention: keys and values of all heads, which latents expand to, and in backward their gradients
typedef struct {
    Stored *k, *v;   // [tokens,NH*HD]
    Summed *dk, *dv; // [tokens,NH*HD]
} HeadKeys;

// Keys and values of a layer, or of every layer (attention_memory.h)
typedef struct {
    Stored *k, *v;    // [rows,NKV*HD]  keys after QK-norm and RoPE; values
    Stored *k_linear; // [rows,NKV*HD]  keys before QK-norm; NULL unless kept (layer/kept.h)
    Stored *v_linear; // [rows,NKV*HD]  values before their norm; NULL unless kept
    Summed *dk, *dv;  // [rows,NKV*HD]  their gradients, of one layer at a time
    size_t rows[2];   // rows of a full-attention layer, of a layer with a window
    size_t layers;    // layers stored at a time: 1, in generation all
    size_t first;     // token in row 0 of layers with a window; moves with the window
    size_t staged;    // generation: tokens from here on lie after all layers' keys, one layer at a time; 0: none
    TextSlots slots;  // generation: texts and most tokens of each
    Range halo[2];    // shared sequences, layers with a window: tokens stored for each range (window_range_of_rank)
    HeadKeys heads;   // latent attention: of all tokens of the layer; NULL: of a range at a time
    size_t expanded;  // chunks whose own latents `heads` holds expanded
} KeyValue;

// Keys and values that other layers read, and the sums of their gradients (attention_memory.h)
typedef struct {
    Stored *k, *v;
    Summed *dk, *dv;
} LentKeys;

// States that linear attention passes from chunk to chunk: one layer's, or all layers' (linear_memory.h)
typedef struct {
    Summed *state;                 // [layers,slots,HV,DK,DV] states of the delta rule
    Stored *columns;               // [layers,slots,taps-1,W] the convolution's last inputs
    size_t layers, slots;          // layers and documents with a state here; in training 1, 1
    size_t slot_tokens;            // DeltaShape.slot_tokens
    Summed *dstate, *dcolumns;     // gradient of the current state
    Summed *kept;                  // [states,HV,DK,DV] backward: states before chunks of the current layer
    Stored *kept_columns;          // [states,taps-1,W]
    size_t kept_half;              // number of the first range's states; the second range's states follow
    int one_state;                 // chunk-major orders: `kept` is one state, before the current chunk
    Summed *fork;                  // [forks,HV,DK,DV] states of the current layer at a tree's forks
    Stored *fork_columns;          // [forks,taps-1,W]
    Summed *dfork, *dfork_columns; // backward: gradients of these states through the branches
} LinearMemory;

// Shared sequences: states of a rank's ranges in linear attention (llmc/orders/scan.h), kept from forward to backward
typedef struct {
    Summed *before;     // [layers,2,HV,DK,DV] the state before a range
    Summed *transition; // [layers,2,HV,DK,DK] T in: state after = T * state before + U
    Stored *columns;    // [layers,2,taps-1,W] the convolution's inputs before a range
    size_t layers;      // layers stored at a time: 1 or all
} RangeStates;

// What stays from forward to backward (layer/kept.h). Home 0: on the device, 1: off-device
typedef struct {
    void *row[2][ACTIVATION_ROWS];   // activations of all layers that keep them
    Stored *keys[2][KEY_TENSORS];    // keys and values of all layers that keep them
    Summed *state;                   // states at intervals of all layers that keep them; on the device
    Stored *columns;                 // and the convolution's inputs
    Summed *fork;                    // states at a tree's forks of these layers
    Stored *fork_columns;            // and the convolution's inputs
    void *chunk[2][ACTIVATION_ROWS]; // off-device: two slots of a chunk, which take turns
    PageSlot slot[2], keys_slot;
} Kept;

// Experts: the routes of tokens, and their sums for the routers' losses (routes.h)
typedef struct {
    uint16_t *route;                   // [layers with experts,rows,k] of the sequence; NULL without experts
    size_t rows;                       // tokens of a layer in `route`
    uint16_t *fed;                     // [layers with experts,n,k] generation: routes of a pass of n tokens
    int32_t *times;                    // [rows] documents that share a row; NULL: one each
    int64_t *count;                    // [layers with experts,E] rows of each expert
    double *sums;                      // [E + 1] sums of router_count, over all layers
    Summed *balance;                   // [E] factors of the balance loss, for router_backward
    double z;                          // factor of the z loss, for router_backward
    double coefficient, z_coefficient; // coefficients of the losses; 0: the loss is not computed
    double micro_batches;              // micro-batches of a step; the losses are divided by it
    double *host_sums;                 // host [E + 1] `sums` of the last sequence, then scratch [2,E]
    double *host_count;                // host [layers with experts,E] `count` of the last sequence
    double *step_count;                // host [layers with experts,E] of the step so far; NULL: no bias is updated
} Routes;

// Layer inputs (inputs.h)
typedef struct {
    Stored *kept;               // [kept + restored inputs,rows,C] at home; NULL in FORWARD_ONLY
    Stored *x;                  // [rows,C] x_L, then dx; off-device inputs: every x_l in turn, overwritten in place
    Stored *layer;              // [rows,C] backward with off-device inputs: x_l of the current layer
    Stored *first, *dfirst;     // [rows,C] x_0 for the layers' own inputs; its gradient through them
    Stored *norm;               // [P] norm of the layers' own inputs
    Summed *dnorm;              // [P] gradient of this norm
    size_t begin;               // first row in these tensors: 0, or the row of the only chunk that they hold
    PageSlot slot[INPUT_SLOTS]; // transfers of x, by chunk; [0]: also loads of `layer` in backward
} Inputs;

// Fixed from run_begin to run_end
typedef struct {
    Method method;
    size_t chunk, logits_chunk; // in tokens; capped by effective_chunk
    int ring;                   // shared sequences: full-attention layers run ring attention
    int latent_ranges;          // 1: latents are expanded for a range of tokens at a time, again for each chunk
    Objective objective;
    size_t teacher_k;            // objective distill: tokens of a teacher for each target
    size_t top_k, vocabulary; // likeliest tokens to find in forward passes, 0: none; ids of their softmax, 0: all
    Layer *layer;                // [num_hidden_layers]
    float *inverse_frequency[2]; // [R/2] of full-attention layers, of layers with a window; device
    float *router_bias;          // [layers with experts,E] device; NULL: none
} Setup;

// The current sequence
typedef struct {
    Pass pass;
    const Batch *texts;                 // the documents, as objectives see them
    const Batch *batch;                 // what the model computes: texts, or the rows of their tree
    const Tree *tree;                   // NULL: every position of texts is a row
    size_t N;                           // tokens of `batch`
    size_t rows;                        // tokens on this rank
    size_t ranks;                       // ranks that share the sequence
    Range own[2];                       // tokens on this rank, in rows 0, 1, ...; one process: {0, N}, {}
    Span *span;                         // [documents, or slots of a step] room for make_spans
    TreeCall *call;                     // room for tree_calls (tree_spans.h)
    double Z;                           // loss denominator
    void *host_sums;                    // [positions of texts] Summed: dL/dlogp, or log-probabilities
    void *host_entropy;                 // [positions of texts] Summed; NULL unless the objective uses it
    void *host_teacher;                 // [N,k] Summed: room for a teacher's values of a chunk; NULL without a teacher
    BatchTeacher found;                 // of N targets: the likeliest tokens (Setup.top_k)
    void *host_rows;                    // [N] Summed: values of a tree's rows; NULL: sequences have no tree
    double *host_added;                 // [N] sums of texts' weights on a tree's rows
    void *host_gathered;                // [ranks + 1, most tokens of a rank] Summed; NULL in a single process
    size_t host_tokens, host_documents; // most positions and documents of texts
    size_t host_tree_rows;              // most rows of a tree
    uint64_t dropout_seed;              // seed of the adapters' dropout
    Sparse sparse;
    // Tensors [rows] on the device
    int32_t *tokens, *targets, *position;
    Summed *token_weight; // dL/dlogp
    Summed *logp;
    Summed *entropy; // entropies over the vocabulary, or divergences from a teacher; NULL unless the objective uses
                     // them
} Sequence;

struct StreamBP {
    const Model *model;
    const Ops *ops;
    const LayerLoops *loops;
    const Setup *setup;
    Sequence now;
    // Memory: of one layer at a time, or of all layers
    Arena *arena;
    Residency memory;
    KeyValue kv;
    LentKeys lent[2]; // of full-attention layers, of layers with a window
    LinearMemory linear;
    RangeStates ranges;
    Inputs inputs;
    Kept kept;
    Routes routes;
};

static const Layer *layer_of(const StreamBP *s, size_t l) { return &s->setup->layer[l]; }

// Returns the factor on attention scores.
static double attention_scale(const Model *model) {
    const Config *c = &model->config;
    if (c->family->unscaled_attention) return 1;
    if (c->attention_multiplier > 0) return c->attention_multiplier;
    double width = c->query_pre_attn_scalar > 0 ? c->query_pre_attn_scalar : (double)c->head_dim;
    const double grown = c->kv_lora_rank && c->rope.type == ROPE_YARN && c->rope.mscale_all_dim > 0
                             ? rope_mscale(c->rope.factor, c->rope.mscale_all_dim)
                             : 1; // latent attention under YaRN
    return c->qk_scale_factor * grown * grown / sqrt(width);
}

// Returns the window of the layers that have one, else 0.
static size_t window_of_model(const Config *config) { return config->layer_types[0] ? config->sliding_window : 0; }

// ---- room on the arena, weights and sums ----------------------------------------------------------------------------
static Stored *push_stored(const StreamBP *s, Share share, const char *name, size_t count) {
    return (Stored *)arena_push(s->arena, share, name, count, dtype_size(s->model->dtype));
}

static Summed *push_summed(const StreamBP *s, Share share, const char *name, size_t count) {
    return (Summed *)arena_push(s->arena, share, name, count, dtype_size(dtype_of_sums(s->model->dtype)));
}

// Returns row `row` of x[.,width].
static Stored *stored_row(const StreamBP *s, Stored *x, size_t row, size_t width) {
    return (Stored *)at(x, row * width, dtype_size(s->model->dtype));
}

static Summed *summed_row(const StreamBP *s, Summed *x, size_t row, size_t width) {
    return (Summed *)at(x, row * width, dtype_size(dtype_of_sums(s->model->dtype)));
}

// Tells whether the visited layer has a tensor.
static int has_tensor(const Visit *v, LayerTensor tensor) {
    return tensor != LAYER_TENSORS && v->w.offset[tensor] != ABSENT;
}

// Returns a tensor of the visited layer; NULL if the layer lacks it.
static const Stored *weight_of(const Visit *v, LayerTensor tensor) {
    if (!has_tensor(v, tensor)) return NULL;
    return (const Stored *)at(v->w.weights, v->w.offset[tensor], dtype_size(v->s->model->dtype));
}

// Returns the sum of a tensor's dW; NULL if the layer lacks the tensor, or the tensor is frozen.
static Summed *sum_of(const Visit *v, LayerTensor tensor) {
    const size_t offset = tensor == LAYER_TENSORS ? ABSENT : v->dw.offset[tensor];
    return offset == ABSENT || v->s->memory.lora ? NULL : summed_row(v->s, v->dw.layer, offset, 1);
}

#endif
