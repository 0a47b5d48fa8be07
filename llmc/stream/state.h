/*
The state of streamed backpropagation (StreamBP), and what every step needs: shapes, room on the arena, a layer's
weights and the sums of their gradients. streambp.h is the algorithm over this; sequence.h says which tokens a chunk
has, attention_memory.h where a layer's keys and values are, residency.h where weights, gradients and layer inputs are.

What exists per token (inputs, activations, targets) is stored in rows. One process has a row for every token of the
sequence. Processes that share a sequence (llmc/orders/) own two ranges of its tokens each, stored one after the other.

A Visit is what the steps of a layer take: the layer, the chunk, the layer's weights and the sums of their gradients.
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

// The current pass. FORWARD is followed by BACKWARD over the same sequence; FORWARD_ONLY saves nothing. FORWARD_FIRST:
// pass 1 of chunk-major methods, saves only K, V and states. RESTORE: within backward, recomputes layer inputs that
// were not kept.
typedef enum { PASS_FORWARD_ONLY, PASS_FORWARD_FIRST, PASS_FORWARD, PASS_RESTORE, PASS_BACKWARD } Pass;

enum { INPUT_SLOTS = 16 };

typedef struct StreamBP StreamBP;
typedef struct Activations Activations; // layer/activations.h

typedef struct {
    size_t row, n;      // rows [row, row + n) of inputs and activations
    size_t token;       // tokens [token, token + n) of the sequence; a process alone: token = row
    size_t index;       // position among the chunks of a loop
    double times;       // chunks that a visit counts for; 1 in a run
    const Spans *given; // those of a generation pass (key_value_cache.h); NULL: those of the documents
} Chunk;

// The current layer and chunk. Backward: dw; its gradient dx lies where x_L was (layer_input)
typedef struct {
    StreamBP *s;
    const Layer *layer; // NULL: the walk is over, or v is of the embedding or the head
    size_t l;           // its number
    size_t index, end;  // the walk: this visit, and the one after the last
    double times;       // layers that it counts for; 1 in a run
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
    uint64_t seed;  // of the draws of the current sequence
    uint8_t *drawn; // [chunks] of the current sequence; NULL in a plan
} Sparse;

// Keys and values of a layer, or of every layer (attention_memory.h)
typedef struct {
    Stored *k, *v;    // [rows,NKV*HD]  after QK-norm and RoPE
    Stored *k_linear; // [rows,NKV*HD]  before QK-norm; method full only
    Summed *dk, *dv;  // [rows,NKV*HD]
    size_t rows[2];   // of a full-attention layer, of a layer with a window
    size_t layers;    // 1: one layer's at a time
    size_t first;     // token in row 0 of layers with a window; moves with the window
    size_t staged;    // generation: tokens from here on lie after all layers' keys, one layer at a time; 0: none
    Range halo[2];    // shared sequences, layers with a window: tokens stored for each range (window_range_of_rank)
} KeyValue;

// Keys and values that other layers read, and the sums of their gradients (attention_memory.h)
typedef struct {
    Stored *k, *v;
    Summed *dk, *dv;
} LentKeys;

// States that linear attention passes from chunk to chunk: one layer's, or all layers' (linear_memory.h)
typedef struct {
    Summed *state;             // [layers,slots,HV,DK,DV] of the delta rule
    Stored *columns;           // [layers,slots,taps-1,W] the convolution's last inputs
    size_t layers, slots;      // 1: one layer's at a time, one document's
    size_t slot_tokens;        // DeltaShape.slot_tokens
    Summed *dstate, *dcolumns; // of one state
    Summed *kept;              // [states,HV,DK,DV] backward: states before chunks of the current layer
    Stored *kept_columns;      // [states,taps-1,W]
    size_t kept_half;          // number of the first range's states, which precede the second's
    int one_state;             // chunk-major: `kept` is one state, that before the current chunk
} LinearMemory;

// Shared sequences: states of a rank's ranges in linear attention (llmc/orders/scan.h), kept from forward to backward
typedef struct {
    Summed *before;     // [layers,2,HV,DK,DV] the state before a range
    Summed *transition; // [layers,2,HV,DK,DK] T of: state after = T * state before + U
    Stored *columns;    // [layers,2,taps-1,W] the convolution's inputs before a range
    size_t layers;      // 1: one layer's at a time
} RangeStates;

// Activations that stay from forward to backward (layer/activations.h)
typedef struct {
    void *row[ACTIVATION_ROWS];      // of all layers, at home
    void *chunk[2][ACTIVATION_ROWS]; // off-device: of a chunk in flight, of even and of odd index
    PageSlot slot[2];
} Kept;

// Experts: the routes of tokens and what the losses of the routers need of them (routes.h)
typedef struct {
    uint16_t *route;                   // [layers with experts,rows,k] of the sequence; NULL: no layer has experts
    size_t rows;                       // tokens of a layer in it
    uint16_t *fed;                     // [layers with experts,n,k] generation: of the n tokens of a pass; NULL: none
    int64_t *count;                    // [layers with experts,E] rows of each expert
    double *sums;                      // [E + 1] of router_count, over all layers
    Summed *balance;                   // [E] of router_backward; NULL: no loss balances the experts
    double z;                          // of router_backward
    double coefficient, z_coefficient; // of the losses; 0: not computed
    double micro_batches;              // of a step, which the losses are divided by
    double *host_sums;                 // host [E + 1] of the last sequence, then room for two more [E]
    double *host_count;                // host [layers with experts,E], likewise
    double *step_count;                // host, likewise: of the step so far; NULL: no bias is updated
} Routes;

// Layer inputs (inputs.h)
typedef struct {
    Stored *kept;               // [kept layers + restored ones,rows,C] at home; NULL in FORWARD_ONLY
    Stored *x;                  // [rows,C] x_L, then dx; off-device inputs: every x_l in turn, overwritten in place
    Stored *layer;              // [rows,C] backward with off-device inputs: x_l of the current layer
    Stored *first, *dfirst;     // [rows,C] x_0 where layers have inputs of their own, and its gradient through these
    Stored *norm;               // [P] the norm of those inputs,
    Summed *dnorm;              // and its gradient
    size_t begin;               // first row in them: 0; orders that store one chunk at a time: its row
    PageSlot slot[INPUT_SLOTS]; // of x, by chunk; [0] also of `layer`, which backward loads
} Inputs;

// Fixed from run_begin to run_end
typedef struct {
    Method method;
    KeepLevel level;            // of the activations that stay from forward to backward
    size_t chunk, logits_chunk; // in tokens; longer ones are capped (effective_chunk)
    int ring;                   // shared sequences: full-attention layers run ring attention
    Objective objective;
    Layer *layer;                // [num_hidden_layers]
    float *inverse_frequency[2]; // [R/2] of full-attention layers, of those with a window; device
    float *router_bias;          // [layers with experts,E] device; NULL: none
} Setup;

// The current sequence
typedef struct {
    Pass pass;
    const Batch *batch;
    size_t N;                           // its tokens
    size_t rows;                        // tokens on this rank
    size_t ranks;                       // number that share the sequence
    Range own[2];                       // tokens on this rank, in rows 0, 1, ...; one process: {0, N}, {}
    Span *span;                         // [documents, or slots of a step] room for make_spans
    double Z;                           // loss denominator
    void *host_sums;                    // [N] Summed: dL/dlogp to the device, log-probabilities from it
    void *host_entropy;                 // [N] Summed; NULL unless the objective uses it
    void *host_gathered;                // [ranks + 1, most tokens of a rank] Summed; NULL for a process alone
    size_t host_tokens, host_documents; // room in these
    uint64_t dropout_seed;              // of the adapters' dropout
    Sparse sparse;
    // on the device, [rows] each
    int32_t *tokens, *targets, *position;
    Summed *token_weight; // dL/dlogp
    Summed *logp;
    Summed *entropy; // of the distributions over the vocabulary; NULL unless the objective uses it
} Sequence;

struct StreamBP {
    const Model *model;
    const Ops *ops;
    const LayerLoops *loops;
    const Setup *setup;
    Sequence now;
    // Memory, of a layer at a time or of all
    Arena *arena;
    Residency memory;
    KeyValue kv;
    LentKeys lent[2]; // of full-attention layers, of those with a window
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
    return 1 / sqrt(width);
}

// Returns the window of the layers that have one, else 0.
static size_t window_of_model(const Config *config) { return config->layer_types[0] ? config->sliding_window : 0; }

// Tells whether activations of a level stay from forward to backward, in this pass.
static int keeps(const StreamBP *s, KeepLevel level) { return s->setup->level >= level && s->now.pass >= PASS_FORWARD; }

static int keeps_activations(const StreamBP *s) { return keeps(s, LEVEL_ALL); }

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

// Returns a tensor of the visited layer; NULL if it has none, or for LAYER_TENSORS.
static const Stored *weight_of(const Visit *v, LayerTensor tensor) {
    const size_t offset = tensor == LAYER_TENSORS ? ABSENT : v->w.offset[tensor];
    return offset == ABSENT ? NULL : (const Stored *)at(v->w.weights, offset, dtype_size(v->s->model->dtype));
}

// Returns the sum of its dW; NULL if the layer has no such tensor, or it is frozen.
static Summed *sum_of(const Visit *v, LayerTensor tensor) {
    const size_t offset = tensor == LAYER_TENSORS ? ABSENT : v->dw.offset[tensor];
    return offset == ABSENT || v->s->memory.lora ? NULL : summed_row(v->s, v->dw.layer, offset, 1);
}

#endif
