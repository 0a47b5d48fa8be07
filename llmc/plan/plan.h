/*
A run and its plan. run_begin pushes what lives as long as the run; plan_make walks run_begin and a whole pass of
streambp.h on op set "dry" and an arena without memory, so a plan is the run's own code.
*/
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H
#include "llmc/optimizer/deferred_update.h"
#include "llmc/orders/key_value_cache.h"
#include "llmc/orders/orders.h"

// The model whose log-probabilities are computed beside a pass: without adapters, the pass's own, or as it was at the
// start, of which a second set of what is trained is kept.
typedef enum { REFERENCE_NOT_COMPUTED, REFERENCE_BASE, REFERENCE_MODEL, REFERENCE_START } ReferenceModel;

typedef struct {
    const Model *model;
    Method method;
    size_t chunk, logits_chunk; // tokens; 0 means what suits the op set
    int backward;               // gradients are kept
    DType gradient_type;        // of the stored gradients
    int accumulates;            // a step adds up those of several micro-batches; a plan is of one but the first
    int optimizer;              // moments (and master weights) are kept
    DType moment_type;
    int defers;                           // the optimizer's step waits for the next forward pass
    int master;                           // fp32 copy of the weights, where these are bf16
    Objective objective;                  // as zeros: sft
    const Lora *lora;                     // NULL: the model itself is trained
    const Storage *storage;               // Residency.storage
    size_t cache_tokens;                  // of the longest generated text with its prompt; 0: none
    size_t rollout_slots, rollout_tokens; // texts generated side by side, tokens of the longest; 0: none
    World world;                          // zeros: a process alone
    double ridge;                         // DryCount.ridge of the machine that an estimate is of; 0: none
    int library;                          // DryCount.library of that machine
    ReferenceModel reference;             // whose forward pass comes before each micro-batch
    int ring;                             // StreamBP.ring
    int keep;                             // attention's outputs are saved
    AttentionChoice attention;
    Sparse sparse;       // method spaco; drawn, seed: not looked at
    Place place[PLACED]; // AUTO counts as DEVICE
    size_t inputs_every; // Residency.every; 0: 1
} RunSettings;

// Tokens of a chunk where none are asked for. Method mst has as many chunks as its paper: of the MLP FF/C, of the head
// V/C, so that what exists of either at one time is of the size of a layer's input.
static size_t chunk_unasked(const RunSettings *settings, const Ops *ops, size_t N, int head) {
    const Config *c = &settings->model->config;
    const size_t width = head ? c->vocab_size : c->intermediate_size, C = c->hidden_size, count = (width + C - 1) / C;
    if (settings->method != METHOD_MST || !N) return head ? ops->logits_chunk : ops->chunk;
    return (N + count - 1) / count;
}

// Pushes what lives as long as the run, each in its place. Allocates values per token on the host, too, unless this is
// a plan. largest: the run's largest micro-batch
static void run_begin(StreamBP *s, OptimizerState *state, const RunSettings *settings, const Ops *ops,
                      Arena arena[PLACES], const Batch *largest) {
    const Model *model = settings->model;
    const Model *trained = settings->lora ? &settings->lora->table : model;
    const Sharding sharding = sharding_of(settings->world, ZERO_WEIGHTS);
    const size_t n = sharding_elements(trained, sharding_of(settings->world, ZERO_OPTIMIZER));
    int kinds = layers_of_kind(&model->config, LAYER_WINDOW) ? 2 : 1;
    memset(s, 0, sizeof(*s));
    memset(state, 0, sizeof(*state));
    s->model = model, s->ops = ops, s->arena = arena, s->loops = loops_of(settings->method, settings->world);
    s->method = settings->method, s->sparse = settings->sparse;
    s->objective = settings->objective;
    if (s->objective.temperature == 0) s->objective.temperature = 1; // not set
    s->chunk = settings->chunk ? settings->chunk : chunk_unasked(settings, ops, largest->N, 0);
    s->logits_chunk = settings->logits_chunk ? settings->logits_chunk : chunk_unasked(settings, ops, largest->N, 1);
    s->even_chunks = !settings->chunk;
    s->dry = ops->repeat == dry_repeat;
    s->memory.visits = model->config.num_hidden_layers;
    if (s->method == METHOD_STREAM || method_is_chunk_major(s->method))
        s->memory.visits *= largest->N / world_sp(settings->world) / s->chunk + 1;
    s->memory.model = model, s->memory.ops = ops, s->memory.arena = arena;
    s->memory.gradient_type = settings->gradient_type;
    s->memory.accumulates = settings->accumulates, s->memory.first = !settings->accumulates;
    s->memory.lora = settings->lora, s->memory.storage = settings->storage;
    s->memory.world = settings->world;
    s->ring = settings->ring, s->keep = settings->keep;
    s->memory.every = max_size(settings->inputs_every, 1);
    memcpy(s->memory.place, settings->place, sizeof(s->memory.place));
    ops->attention_choose(settings->attention);
    s->every_chunk = settings->ridge > 0;
    s->memory.plan = s->dry;
    s->memory.layers_repeat = s->memory.chunk_repeat = 1;
    Arena *const weights = memory_of(&s->memory, PLACED_WEIGHTS);
    Arena *const moments = memory_of(&s->memory, PLACED_OPTIMIZER);
    const size_t stored = dtype_size(model->dtype);
    const Model *table = stored_table(&s->memory);
    s->memory.weights = (char *)arena_push(weights, SHARE_WEIGHTS, "weights", sharding_elements(table, sharding),
                                           dtype_size(table->dtype));
    if (settings->lora)
        s->memory.adapters =
            (char *)arena_push(weights, SHARE_WEIGHTS, "adapters", sharding_elements(trained, sharding), stored);
    if (settings->reference == REFERENCE_START) // adapters lie where the model's weights do
        s->memory.reference =
            (char *)arena_push(settings->lora ? weights : memory_of(&s->memory, PLACED_REFERENCE), SHARE_WEIGHTS,
                               "weights of the reference", sharding_elements(trained, sharding), stored);
    if (settings->backward)
        s->memory.gradients =
            (char *)arena_push(memory_of(&s->memory, PLACED_GRADIENTS), SHARE_GRADIENTS, "gradients",
                               sharding_elements(trained, sharding_of(settings->world, ZERO_GRADIENTS)),
                               dtype_size(settings->gradient_type));
    if (settings->optimizer) {
        state->moment_type = settings->moment_type;
        state->m = arena_push(moments, SHARE_OPTIMIZER, "first moments", n, dtype_size(settings->moment_type));
        state->v = arena_push(moments, SHARE_OPTIMIZER, "second moments", n, dtype_size(settings->moment_type));
        if (settings->moment_type == DTYPE_INT8) {
            const size_t floats = moment_floats_all(trained, sharding_of(settings->world, ZERO_OPTIMIZER));
            state->m_scales =
                (float *)arena_push(moments, SHARE_OPTIMIZER, "scales of first moments", floats, sizeof(float));
            state->v_scales =
                (float *)arena_push(moments, SHARE_OPTIMIZER, "scales of second moments", floats, sizeof(float));
        }
        if (settings->master)
            state->master = (float *)arena_push(moments, SHARE_OPTIMIZER, "master weights", n, sizeof(float));
    }
    for (int kind = 0; kind < kinds; kind++)
        s->inverse_frequency[kind] = (float *)arena_push(
            arena, SHARE_WORKSPACE, kind ? "rotary frequencies of layers with a window" : "rotary frequencies",
            rotary_width(&model->config) / 2, sizeof(float));
    s->host_tokens = largest->N, s->host_documents = largest->documents;
    s->span = (Span *)checked_calloc(2 * max_size(max_size(largest->documents, settings->rollout_slots), 1),
                                     sizeof(Span), "spans");
    if (s->dry) return;
    if (settings->backward)
        s->memory.squares = (double *)checked_calloc(trained->parameter_count, sizeof(double), "squares of gradients");
    s->host_sums = checked_calloc(largest->N, dtype_size(dtype_of_sums(model->dtype)), "values per token");
    if (s->method == METHOD_SPACO)
        s->sparse.drawn = (uint8_t *)checked_calloc(largest->N / s->chunk + 1, 1, "draws of chunks");
    if (objective_has_entropy(&s->objective))
        s->host_entropy = checked_calloc(largest->N, dtype_size(dtype_of_sums(model->dtype)), "entropies");
    if (world_sp(settings->world) > 1) {
        const size_t S = world_sp(settings->world), most = sequence_share_max(largest->N, S);
        s->host_gathered = checked_calloc((S + 1) * most, dtype_size(dtype_of_sums(model->dtype)), "gathered values");
    }
    if (shapes_of(model).rotary) {
        float *frequency =
            (float *)checked_calloc(rotary_width(&model->config) / 2, sizeof(float), "rotary frequencies");
        for (int kind = 0; kind < kinds; kind++) {
            rope_frequencies(&model->config, kind, frequency);
            ops->copy_in(s->inverse_frequency[kind], frequency, rotary_width(&model->config) / 2 * sizeof(float));
        }
        free(frequency);
    }
}

static void run_end(StreamBP *s) {
    free(s->span), free(s->memory.squares);
    free(s->host_sums);
    free(s->host_entropy);
    free(s->host_gathered);
    free(s->sparse.drawn);
}

typedef struct {
    size_t total_bytes, share[SHARES];
    size_t host_bytes, disk_bytes; // beside these, in host memory that the device reaches, and on a disk
    Moved moved;                   // of one micro-batch, its step's last, and of an optimizer's step
    OpCounts counts;               // of one micro-batch's forward and backward
    double model_flops; // 6 * parameters in products * N + 12 * NH * HD * pairs of all layers + 3 * the delta rule's of
                        // a forward pass: no recomputation, and 4 for 6 where parameters are frozen
    size_t chunk, logits_chunk; // effective
    Arena arena[PLACES];        // regions alive at the peak
} Plan;

// Query-key pairs of all layers with attention, of a range of the batch's tokens
static double layers_pairs(const Config *c, const Batch *batch, Range range) {
    const double full = (double)layers_of_kind(c, LAYER_FULL), windows = (double)layers_of_kind(c, LAYER_WINDOW);
    return full * range_pairs(batch, range, 0) +
           (windows > 0 ? windows * range_pairs(batch, range, c->sliding_window) : 0);
}

// FLOPs of the delta rule for each token, in one layer
static double delta_token_flops(const Model *model, DeltaWork work) {
    const Shapes d = shapes_of(model);
    const DeltaShape shape = {{0}, d.HK, d.HV, d.DK, d.DV, d.taps, d.E, 0};
    return delta_flops(&shape, work);
}

static double model_flops(const Model *model, const Lora *lora, const Batch *batch, int backward) {
    const Shapes d = shapes_of(model);
    const Range all = {0, batch->N};
    const double linear = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    double parameters = (double)(d.V * d.C), adapters = lora ? (double)(lora->table.elements - lora_copied(lora)) : 0;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        if (p->role == ROLE_LINEAR && p->offset != model_head_offset(model)) parameters += (double)(p->rows * p->cols);
    }
    if (lora) adapters -= (double)(d.V * lora->outer[EMBEDDING].rank); // a token reads one row of A
    parameters = (backward ? lora ? 2 : 3 : 1) * parameters + (backward ? 3 : 1) * adapters;
    if (backward && lora && lora->saves[LM_HEAD]) parameters += (double)(d.V * d.C); // its dW
    const double delta = linear > 0 ? linear * delta_token_flops(model, DELTA_FORWARD) : 0;
    return (2 * parameters + (backward ? 3 : 1) * delta) * (double)batch->N +
           (backward ? 3 : 1) * 4 * (double)d.Q * layers_pairs(&model->config, batch, all);
}

// ... of a run's pass, by model_flops or model_flops_full_attention: spaco's has the backward of some chunks alone.
static double pass_model_flops(double (*count)(const Model *, const Lora *, const Batch *, int),
                               const RunSettings *settings, const Batch *batch) {
    const double all = count(settings->model, settings->lora, batch, settings->backward);
    const double forward = count(settings->model, settings->lora, batch, 0);
    return settings->method == METHOD_SPACO ? forward + settings->sparse.keep * (all - forward) : all;
}

// No product of sizes in a plan exceeds size_t. Such plans are far beyond any memory, but --init takes any config.
static int plan_countable(const Model *model, size_t N) {
    Shapes d = shapes_of(model);
    const size_t width = 2 * d.C + 5 * d.Q + 3 * d.KV + d.H + d.FF + d.V + 2 * d.E + d.S / STATE_INTERVAL;
    return (double)N * (double)(d.L + 1) * (double)width * 8 < 4e18;
}

// The passes of a run over one micro-batch, the step's last one or an earlier one
static void plan_walk(StreamBP *s, const RunSettings *settings, const Batch *batch, int last) {
    const int reference = settings->reference != REFERENCE_MODEL;
    if (objective_needs_mismatched(&s->objective)) {
        forward_logprobs(s, batch, 1, 0);
        forward_logprobs(s, batch, 1, reference);
    }
    if (settings->reference) forward_logprobs(s, batch, 1, reference);
    if (settings->backward)
        forward_backward(s, batch, 1, last, NULL);
    else
        forward_only(s, batch, 1, NULL);
}

// A step of the optimizer
static void plan_update(StreamBP *s, const OptimizerState *state) {
    const AdamW step = {0};
    optimizer_step(&s->memory, state, &step);
    weights_updated(&s->memory);
}

// The plan of a run with these settings for micro-batches of `batch`'s shape. Token arrays are not read; without tokens
// the run only generates.
static Plan plan_make(const RunSettings *settings, const Batch *batch) {
    StreamBP s;
    OptimizerState state;
    size_t longest =
        max_size(max_size(batch->N, settings->cache_tokens), settings->rollout_slots * settings->rollout_tokens);
    if (!plan_countable(settings->model, longest))
        die("a plan of %zu tokens through %zu layers of this width is beyond 64 bits; take fewer tokens", longest,
            settings->model->config.num_hidden_layers);
    Plan plan = {0};
    const AdamW step = {0};
    Update update;
    arena_plan(plan.arena);
    Ops ops = ops_dry(settings->model->dtype, plan.arena, settings->ridge);
    dry.library = settings->library;
    run_begin(&s, &state, settings, &ops, plan.arena, batch);
    if (settings->optimizer && settings->defers) update_defer(&update, &s.memory, &state, &step);
    if (batch->N) plan_walk(&s, settings, batch, 1);
    plan.chunk = effective_chunk(&s, s.chunk), plan.logits_chunk = effective_chunk(&s, s.logits_chunk);
    plan.counts = dry.counts;
    if (settings->optimizer && !settings->defers) plan_update(&s, &state);
    if (settings->cache_tokens) cache_walk(&s, 1, settings->cache_tokens);
    if (settings->rollout_slots) cache_walk(&s, settings->rollout_slots, settings->rollout_tokens);
    plan.model_flops = pass_model_flops(model_flops, settings, batch);
    plan.total_bytes = plan.arena[PLACE_DEVICE].peak, plan.moved = s.memory.moved;
    plan.disk_bytes = plan.arena[PLACE_DISK].peak;
    plan.host_bytes = plan.arena[PLACE_HOST].peak + (plan.disk_bytes ? DISK_PIECES : 0);
    for (int share = 0; share < SHARES; share++) plan.share[share] = arena_share(plan.arena, (Share)share);
    run_end(&s);
    return plan;
}

// Bytes that each rank sends in a step of `streams` micro-batches of `batch`'s shape, by the walk that makes its plan:
// gradients summed in place are sent at the last one.
static Traffic plan_traffic(const RunSettings *settings, const Batch *batch, size_t micro_batches) {
    Arena arena[PLACES];
    OptimizerState state;
    StreamBP s;
    arena_plan(arena);
    Ops ops = ops_dry(settings->model->dtype, arena, 0);
    run_begin(&s, &state, settings, &ops, arena, batch);
    plan_walk(&s, settings, batch, 0);
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
        s.memory.sent.bytes[kind] *= (double)(micro_batches - 1);
        s.memory.sent.calls[kind] *= (double)(micro_batches - 1);
        s.memory.sent.hops[kind] *= (double)(micro_batches - 1);
    }
    plan_walk(&s, settings, batch, 1);
    if (settings->optimizer) weights_updated(&s.memory);
    run_end(&s);
    return s.memory.sent;
}

#endif
