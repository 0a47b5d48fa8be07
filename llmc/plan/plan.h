/*
A run, its plan, and what fits. Everything here is exact; estimate/ has the assumptions.

    run_begin      pushes all tensors that live as long as the run
    plan_make      walks run_begin and a whole pass of streambp.h on op set "dry" and an arena without memory: a plan
                   is the run's own code
    plan_traffic   the bytes that a rank sends in a step, by the same walk
    plan_longest   the longest sequence whose plan fits into Limits
*/
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H
#include "llmc/optimizer/deferred_update.h"
#include "llmc/orders/context_memory.h"
#include "llmc/orders/orders.h"
#include "shape.h"

// Which model is the reference: the base below adapters, the model itself, or a second set of the trained weights as
// they were at the start
typedef enum { REFERENCE_NOT_COMPUTED, REFERENCE_BASE, REFERENCE_MODEL, REFERENCE_START } ReferenceModel;

typedef struct {
    const Model *model;
    Method method;
    size_t chunk, logits_chunk; // tokens; 0: what suits the op set
    int backward;               // 1: keep gradients
    DType gradient_type;        // type of the stored gradients
    int accumulates;            // 1: a step sums several micro-batches; the plan is of a micro-batch after the first
    int optimizer;              // 1: keep moments (and master weights)
    DType moment_type;
    int defers;                            // 1: the optimizer's step waits for the next forward pass
    int master;                            // 1: keep an fp32 copy of bf16 weights
    Objective objective;                   // zeros: sft
    size_t teacher_k, top_k, vocabulary;   // as in Setup
    const Lora *lora;                      // NULL: the model itself is trained
    const Storage *storage;                // see Residency.storage
    size_t cache_tokens;                   // tokens of the longest generated text and its prompt; 0: no text
    ContextSettings context;               // long memory of that text
    size_t rollout_slots, rollout_tokens;  // texts generated in a batch, tokens of the longest; 0: none
    size_t rollout_mean;                   // tokens of such a text halfway through its generation; 0: not known
    int rollout_grows;                     // 1: such a text may have as many tokens as a document
    World world;                           // zeros: a single process
    int deals;                             // 1: world.sp changes from pass to pass (--sp auto)
    double router_aux_loss, router_z_loss; // coefficients of the routers' losses (routes.h); 0: not used
    double router_bias_update;             // routes_bias_update's rate; 0: never
    double ridge;                          // DryCount.ridge of the estimated machine; 0: there is none
    KernelRates rates;                     // of the estimated machine's kernels
    int library;              // LIBRARY_ASKED: attention is computed by a library, for estimates; else this machine's
    int gpu;                  // 1: plan for a GPU, with any linked op set
    ReferenceModel reference; // reference whose forward pass precedes each micro-batch
    int ring;                 // see StreamBP.ring
    int latent_ranges;        // see Setup.latent_ranges; chunk-major methods count as 1
    Keeping keep;             // what each layer keeps; zeros: nothing. off 0 with a place off-device: all layers
    AttentionChoice attention;
    Sparse sparse;       // for method spaco; a plan ignores drawn and seed
    Place place[PLACED]; // AUTO counts as DEVICE
    size_t inputs_every; // see Residency.every; 0 counts as 1
} RunSettings;

// Returns the tokens of a chunk if --chunk is not given. Method mst has its paper's number of chunks, FF/C for the MLP
// and V/C for the head: their live tensors then have the size of a layer's input.
static size_t chunk_unasked(const RunSettings *settings, const Ops *ops, size_t N, int head) {
    const Config *c = &settings->model->config;
    const size_t routed = c->num_experts_per_tok * c->moe_intermediate_size;
    const size_t experts = c->num_experts ? routed + c->shared_expert_intermediate_size : 0;
    const size_t width = head ? c->vocab_size : max_size(c->intermediate_size, experts);
    const size_t C = c->hidden_size, count = (width + C - 1) / C;
    if (settings->method != METHOD_MST || !N) return head ? ops->logits_chunk : ops->chunk;
    return (N + count - 1) / count;
}

// Returns what stays from forward to backward: methods that recompute nothing keep all of each layer, on the device.
static Keeping run_keeping(const RunSettings *settings) {
    const Keeping all = {LEVEL_ALL, 0, 0};
    Keeping keep = settings->keep;
    if (!method_recomputes(settings->method)) return all;
    if (settings->place[PLACED_KEPT] <= PLACE_DEVICE) keep.off = 0;
    if (settings->place[PLACED_KEPT] > PLACE_DEVICE && !keep.off) keep.off = KEPT_OFF;
    return keep;
}

// Tells whether latents are expanded by ranges: chunk-major methods have the latents of all layers at a time.
static int expands_ranges_of(const RunSettings *settings) {
    return settings->latent_ranges || method_is_chunk_major(settings->method);
}

// Decides what is fixed for the run. The caller frees the result. Device memory: frequency, [2] for the kinds of
// layers; router_bias
static const Setup *setup_make(const RunSettings *settings, const Ops *ops, float *const frequency[2],
                               float *router_bias, size_t longest) {
    Setup *setup = (Setup *)checked_calloc(1, sizeof(*setup), "the setup of a run");
    setup->method = settings->method, setup->ring = settings->ring && !settings->model->config.kv_lora_rank;
    setup->latent_ranges = expands_ranges_of(settings);
    setup->objective = settings->objective;
    setup->teacher_k = settings->teacher_k, setup->top_k = settings->top_k, setup->vocabulary = settings->vocabulary;
    if (setup->objective.temperature.divisor == 0) setup->objective.temperature.divisor = 1; // no temperature was set
    setup->objective.temperature.divisor *= logits_divisor(&settings->model->config);
    setup->objective.temperature.cap = logits_cap(&settings->model->config);
    setup->chunk = settings->chunk ? settings->chunk : chunk_unasked(settings, ops, longest, 0);
    setup->logits_chunk = settings->logits_chunk ? settings->logits_chunk : chunk_unasked(settings, ops, longest, 1);
    memcpy(setup->inverse_frequency, frequency, sizeof(setup->inverse_frequency));
    setup->router_bias = router_bias;
    setup->layer = layers_make(settings->model, settings->lora, run_keeping(settings));
    for (size_t l = 0; l < settings->model->config.num_hidden_layers && world_sp(settings->world) > 1; l++)
        if (!layer_is_shareable(&setup->layer[l]))
            die("ranks cannot share a sequence if a layer (here %zu) has only a convolution or sums two mixers; give "
                "--sp 1",
                l);
    return setup;
}

// Sets what the memory of weights and gradients needs to know about the run.
static void residency_configure(Residency *r, const RunSettings *settings, const Ops *ops, Arena arena[PLACES]) {
    r->model = settings->model, r->ops = ops, r->arena = arena;
    r->walk.dry = ops->repeat == dry_repeat, r->walk.every_chunk = settings->ridge > 0;
    r->gradient_type = settings->gradient_type;
    r->accumulates = settings->accumulates, r->first = !settings->accumulates;
    r->lora = settings->lora, r->storage = settings->storage;
    r->world = settings->world;
    r->every = max_size(settings->inputs_every, 1);
    memcpy(r->place, settings->place, sizeof(r->place));
    r->walk.layers = r->walk.chunks = 1;
}

// Pushes trained and kept tensors. Adapters, and the reference's adapters, lie where the weights lie.
static void push_trained(Residency *memory, OptimizerState *state, const RunSettings *settings) {
    const Model *table = stored_table(memory), *trained = trained_table(memory);
    const Sharding sharding = sharding_of(settings->world, ZERO_WEIGHTS);
    const Sharding updated = sharding_of(settings->world, ZERO_OPTIMIZER);
    const size_t own = sharding_elements(trained, sharding), stored = dtype_size(settings->model->dtype);
    const size_t gradients = sharding_elements(trained, sharding_of(settings->world, ZERO_GRADIENTS));
    const size_t n = sharding_elements(trained, updated), moment = dtype_size(settings->moment_type);
    Arena *const weights = memory_of(memory, PLACED_WEIGHTS), *const moments = memory_of(memory, PLACED_OPTIMIZER);
    Arena *const reference = settings->lora ? weights : memory_of(memory, PLACED_REFERENCE);
    memory->weights = (char *)arena_push(weights, SHARE_WEIGHTS, "weights", sharding_elements(table, sharding),
                                         dtype_size(table->dtype));
    if (settings->lora) memory->adapters = (char *)arena_push(weights, SHARE_WEIGHTS, "adapters", own, stored);
    if (settings->reference == REFERENCE_START)
        memory->reference = (char *)arena_push(reference, SHARE_WEIGHTS, "weights of the reference", own, stored);
    if (settings->backward && is_off_device(memory, PLACED_GRADIENTS)) memory->squares = push_squares(memory);
    if (settings->backward)
        memory->gradients = (char *)arena_push(memory_of(memory, PLACED_GRADIENTS), SHARE_GRADIENTS, "gradients",
                                               gradients, dtype_size(settings->gradient_type));
    if (!settings->optimizer) return;
    state->moment_type = settings->moment_type;
    state->m = arena_push(moments, SHARE_OPTIMIZER, "first moments", n, moment);
    state->v = arena_push(moments, SHARE_OPTIMIZER, "second moments", n, moment);
    for (int second = 0; second < 2 && settings->moment_type == DTYPE_INT8; second++)
        *(second ? &state->v_scales : &state->m_scales) = (float *)arena_push(
            moments, SHARE_OPTIMIZER, second ? "scales of second moments" : "scales of first moments",
            moment_floats_all(trained, updated), sizeof(float));
    if (settings->master)
        state->master = (float *)arena_push(moments, SHARE_OPTIMIZER, "master weights", n, sizeof(float));
}

// Allocates values per token on the host, and computes rotary frequencies.
static void run_begin_host(StreamBP *s, const RunSettings *settings, const Batch *largest) {
    const Config *config = &settings->model->config;
    const size_t S = world_sp(settings->world), sum = dtype_size(dtype_of_sums(settings->model->dtype));
    const size_t N = largest->N;
    const Model *trained = trained_table(&s->memory);
    Sequence *now = &s->now;
    if (settings->backward)
        s->memory.host_squares = (double *)checked_calloc(
            trained->parameter_count, parameter_parts(trained) * sizeof(double), "squares of the gradient");
    now->host_sums = checked_calloc(N, sum, "values per token");
    if (settings->method == METHOD_SPACO)
        now->sparse.drawn = (uint8_t *)checked_calloc(N / s->setup->chunk + 1, 1, "draws of chunks");
    if (objective_has_entropy(&s->setup->objective)) now->host_entropy = checked_calloc(N, sum, "entropies");
    const size_t k = max_size(settings->top_k, objective_needs_top(&settings->objective) ? settings->teacher_k : 0);
    if (k) now->host_teacher = checked_calloc(N * k, sum, "a teacher's values");
    if (settings->top_k) now->found = teacher_allocate(N, settings->top_k);
    if (largest->tree) {
        now->host_tree_rows = largest->tree->rows.N;
        now->host_rows = checked_calloc(now->host_tree_rows, sum, "values per row");
        now->host_added = (double *)checked_calloc(now->host_tree_rows, sizeof(double), "sums per row");
    }
    if (S > 1 || settings->deals) // a rank's own values and its group's: at most (S + 1) sequence_share_max(N, S)
        now->host_gathered = checked_calloc(N + N / 2 + world_ranks(settings->world), sum, "gathered values");
    const Shapes d = shapes_of(settings->model);
    const size_t layers = expert_layers(s);
    if (layers) {
        s->routes.host_sums = (double *)checked_calloc(3 * d.router.E + 1, sizeof(double), "sums of the routers");
        s->routes.host_count = (double *)checked_calloc(layers * d.router.E, sizeof(double), "rows of each expert");
        if (settings->router_bias_update > 0)
            s->routes.step_count = (double *)checked_calloc(layers * d.router.E, sizeof(double), "rows of a step");
    }
    if (s->setup->router_bias)
        s->ops->copy_in(s->setup->router_bias, settings->model->router_bias,
                        model_router_biases(settings->model) * sizeof(float));
    if (!d.rotary) return;
    for (int kind = 0; kind < 2 && s->setup->inverse_frequency[kind]; kind++) {
        const size_t pairs = rope_pairs(config, kind);
        float *frequency = (float *)checked_calloc(pairs, sizeof(float), "rotary frequencies");
        rope_frequencies(config, kind, frequency);
        s->ops->copy_in(s->setup->inverse_frequency[kind], frequency, pairs * sizeof(float));
        free(frequency);
    }
}

// Counts how often a pass over N positions visits a chunk of a layer.
static size_t pass_visits(const StreamBP *s, size_t N) {
    const int chunks = s->setup->method == METHOD_STREAM || method_is_chunk_major(s->setup->method);
    return s->model->config.num_hidden_layers * (chunks ? N / world_sp(s->memory.world) / s->setup->chunk + 1 : 1);
}

// Pushes the tensors that live as long as the run, each in its place. A run also allocates host arrays, which its plan
// does not. largest: the run's largest micro-batch
static void run_begin(StreamBP *s, OptimizerState *state, const RunSettings *settings, const Ops *ops,
                      Arena arena[PLACES], const Batch *largest) {
    const Config *config = &settings->model->config;
    const int kinds = layers_of_kind(config, LAYER_WINDOW) ? 2 : 1;
    float *frequency[2] = {NULL, NULL}, *router_bias = NULL;
    memset(s, 0, sizeof(*s));
    memset(state, 0, sizeof(*state));
    s->model = settings->model, s->ops = ops, s->arena = arena, s->loops = loops_of(settings->method, settings->world);
    residency_configure(&s->memory, settings, ops, arena);
    ops->attention_choose(settings->attention);
    push_trained(&s->memory, state, settings);
    for (int kind = 0; kind < kinds; kind++)
        frequency[kind] = (float *)arena_push(
            arena, SHARE_WORKSPACE, kind ? "rotary frequencies of layers with a window" : "rotary frequencies",
            rope_pairs(config, kind), sizeof(float));
    if (settings->model->router_bias)
        router_bias = (float *)arena_push(arena, SHARE_WEIGHTS, "biases of routers",
                                          model_router_biases(settings->model), sizeof(float));
    s->setup = setup_make(settings, ops, frequency, router_bias, batch_rows(largest)->N);
    s->routes.coefficient = settings->router_aux_loss, s->routes.z_coefficient = settings->router_z_loss;
    s->memory.visits = pass_visits(s, batch_rows(largest)->N);
    s->now.host_tokens = largest->N, s->now.host_documents = largest->documents;
    s->now.sparse = settings->sparse;
    s->now.span = (Span *)checked_calloc(max_size(max_size(largest->documents, settings->rollout_slots), 1),
                                         sizeof(Span), "spans");
    if (largest->tree)
        s->now.call = (TreeCall *)checked_calloc(tree_most_calls(largest), sizeof(TreeCall), "calls of attention");
    if (!s->memory.walk.dry) run_begin_host(s, settings, largest);
}

static void run_end(StreamBP *s) {
    free(s->now.span), free(s->memory.host_squares), free(s->now.sparse.drawn);
    free(s->routes.host_sums), free(s->routes.host_count), free(s->routes.step_count);
    free(s->now.host_sums), free(s->now.host_entropy), free(s->now.host_gathered);
    free(s->now.host_rows), free(s->now.host_added), free(s->now.call), free(s->now.host_teacher);
    teacher_free(&s->now.found);
    if (s->setup) free(s->setup->layer); // NULL: the run did not begin
    free((void *)s->setup);
}

typedef struct {
    size_t total_bytes, share[SHARES];
    size_t host_bytes, disk_bytes; // in addition to total_bytes: host memory that the device reaches, and a disk
    Moved moved;                   // moved by a step's last micro-batch and by the optimizer's step
    OpCounts counts;               // counts of one micro-batch's forward and backward
    OpCounts token;                // generation: counts of a text's last token; of a rollout: of a token of all slots
    double model_flops; // 6 * parameters in products * N + 12 * NH * HD * pairs of all layers + 3 * the delta rule's
                        // forward, without recomputation; 4 in place of 6 for frozen parameters
    size_t chunk, logits_chunk; // the sizes in effect
    Arena arena[PLACES];        // regions alive at the peak
} Plan;

// Returns the width of layer l's queries; 0 for linear attention
static size_t query_width(const Config *c, size_t l) {
    return layer_is_linear(c, l) ? 0 : c->num_attention_heads * head_dim_of(c, layer_form(c, l));
}

// Returns (query-key pairs of a range of the computed tokens) * (width of queries), summed over the layers. batch: of
// batch_rows
static double attention_elements(const Config *c, const Batch *batch, Range range) {
    double width[LAYER_KINDS] = {0};
    for (size_t l = 0; l < c->num_hidden_layers; l++) width[layer_kind(c, l)] += (double)query_width(c, l);
    return width[LAYER_FULL] * range_pairs(batch, range, 0) +
           (width[LAYER_WINDOW] > 0 ? width[LAYER_WINDOW] * range_pairs(batch, range, c->sliding_window) : 0);
}

// Returns the FLOPs of the delta rule per token of one layer.
static double delta_token_flops(const Model *model, DeltaWork work) {
    const LinearShape d = shapes_of(model).linear;
    const DeltaShape shape = {
        .HK = d.HK, .HV = d.HV, .K = d.DK, .V = d.DV, .taps = d.taps, .stride = d.E, .gates = d.gates, .ssd = d.ssd};
    return d.DK ? delta_flops(&shape, work) : 0; // 0: convolutions alone
}

static double model_flops(const Model *model, const Lora *lora, const Batch *batch, int backward) {
    const Shapes d = shapes_of(model);
    const Batch *rows = batch_rows(batch);
    const Range all = {0, rows->N};
    const double linear = (double)layers_of_kind(&model->config, LAYER_LINEAR);
    double parameters = (double)(d.V * d.C), adapters = lora ? (double)(lora->table.elements - lora_copied(lora)) : 0;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const double share =
            p->experts ? (double)d.router.k / (double)p->experts : 1; // share of the rows that a token uses
        if (is_product(p->role) && p->offset != model_head_offset(model))
            parameters += share * (double)(p->rows * p->cols);
    }
    if (lora) adapters -= (double)(d.V * lora->outer[EMBEDDING].rank); // a token reads one row of A
    parameters = (backward ? lora ? 2 : 3 : 1) * parameters + (backward ? 3 : 1) * adapters;
    if (backward && lora && lora->saves[LM_HEAD]) parameters += (double)(d.V * d.C); // dW of the head's copy
    if (backward && lora && !lora_trains_embedding(lora)) parameters -= (double)(d.L * d.P * d.C); // x_0 needs no dx
    const double delta = linear > 0 ? linear * delta_token_flops(model, DELTA_FORWARD) : 0;
    return (2 * parameters + (backward ? 3 : 1) * delta) * (double)rows->N +
           (backward ? 3 : 1) * 4 * attention_elements(&model->config, rows, all);
}

// Counts a run's pass by model_flops or model_flops_full_attention. spaco runs backward only for some chunks.
static double pass_model_flops(double (*count)(const Model *, const Lora *, const Batch *, int),
                               const RunSettings *settings, const Batch *batch) {
    const double all = count(settings->model, settings->lora, batch, settings->backward);
    const double forward = count(settings->model, settings->lora, batch, 0);
    return settings->method == METHOD_SPACO ? forward + settings->sparse.keep * (all - forward) : all;
}

// Tells whether no product of sizes in a plan exceeds size_t; --init takes any config.
static int plan_countable(const Model *model, size_t N) {
    size_t most = 0;
    for (unsigned form = 0; form < LAYER_FORMS; form++) {
        const Shapes d = shapes_in(model, form);
        const size_t beside = model->config.family->experts_beside && d.router.E ? 4 * d.C : 0;
        const size_t experts = d.router.k * (d.C + 6 * d.I) + 2 * d.router.E + 5 * d.shared + beside;
        const size_t width =
            2 * d.C + 5 * d.Q + 3 * d.KV + d.H + d.FF + d.V + 2 * d.linear.E + d.linear.S / STATE_INTERVAL + experts;
        most = max_size(most, width + (d.P ? 2 * d.C + 5 * d.P : 0));
    }
    return (double)N * (double)(model->config.num_hidden_layers + 1) * (double)most * 8 < 4e18;
}

// Walks a run's passes over one micro-batch. last: it is the step's last micro-batch
static void plan_walk(StreamBP *s, const RunSettings *settings, const Batch *batch, int last) {
    const int reference = settings->reference != REFERENCE_MODEL;
    Batch apart = *batch;
    apart.tree = NULL;
    if (objective_needs_mismatched(&s->setup->objective)) {
        forward_logprobs(s, &apart, 1, 0);
        forward_logprobs(s, &apart, 1, reference);
    }
    if (settings->reference) forward_logprobs(s, batch, 1, reference);
    if (settings->backward)
        forward_backward(s, batch, 1, last, NULL);
    else
        forward_only(s, batch, 1, NULL);
}

// Plans a run for micro-batches of `batch`'s shape. Reads no token arrays. Without tokens the run only generates.
static Plan plan_make(const RunSettings *settings, const Batch *batch) {
    StreamBP s;
    OptimizerState state;
    size_t longest =
        max_size(max_size(batch->N, settings->cache_tokens), settings->rollout_slots * settings->rollout_tokens);
    if (!plan_countable(settings->model, longest))
        die("a plan of %zu tokens through %zu layers of this width needs numbers beyond 64 bits; give fewer tokens",
            longest, settings->model->config.num_hidden_layers);
    Plan plan = {0};
    const AdamW step = {0};
    Update update;
    arena_plan(plan.arena);
    Ops ops = ops_dry(settings->model->dtype, plan.arena, settings->ridge, settings->gpu);
    dry.library = settings->ridge > 0 ? settings->library : 0, dry.rates = settings->rates;
    dry.head_dim = settings->model->config.head_dim;
    run_begin(&s, &state, settings, &ops, plan.arena, batch);
    if (settings->optimizer && settings->defers) update_defer(&update, &s.memory, &state, &step);
    if (batch->N) plan_walk(&s, settings, batch, 1);
    plan.chunk = effective_chunk(&s, s.setup->chunk);
    plan.logits_chunk = effective_chunk(&s, s.setup->logits_chunk);
    plan.counts = dry.counts;
    const size_t mark = arena_mark(plan.arena);
    if (settings->backward) gradient_squares(&s.memory);
    arena_pop(plan.arena, mark);
    if (settings->optimizer && !settings->defers) optimizer_step(&s.memory, &state, &step), weights_updated(&s.memory);
    if (settings->cache_tokens && settings->context.window)
        context_walk(&s, settings->context, settings->cache_tokens);
    else if (settings->cache_tokens) {
        const OpCounts none = {0};
        cache_walk(&s, 1, settings->cache_tokens);
        dry.counts = none;
        cache_walk_token(&s, 1, settings->cache_tokens);
        plan.token = dry.counts;
    }
    if (settings->rollout_slots) cache_walk(&s, settings->rollout_slots, settings->rollout_tokens);
    if (settings->rollout_mean) {
        const OpCounts none = {0};
        dry.counts = none;
        cache_walk_token(&s, settings->rollout_slots, settings->rollout_mean);
        plan.token = dry.counts;
    }
    plan.model_flops = pass_model_flops(model_flops, settings, batch);
    plan.total_bytes = plan.arena[PLACE_DEVICE].peak, plan.moved = s.memory.moved;
    plan.disk_bytes = plan.arena[PLACE_DISK].peak;
    plan.host_bytes = plan.arena[PLACE_HOST].peak + (plan.disk_bytes ? DISK_PIECES : 0);
    for (int share = 0; share < SHARES; share++) plan.share[share] = arena_share(plan.arena, (Share)share);
    run_end(&s);
    return plan;
}

// Counts what a rank sends in a step of `micro_batches`. Gradients that are summed in place are sent with the last
// micro-batch.
static Traffic plan_traffic(const RunSettings *settings, const Batch *batch, size_t micro_batches) {
    Arena arena[PLACES];
    OptimizerState state;
    StreamBP s;
    arena_plan(arena);
    Ops ops = ops_dry(settings->model->dtype, arena, 0, settings->gpu);
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

// ---- what fits -----------------------------------------------------------------------------------------------------
// Limits of a rank; SIZE_MAX: no limit
typedef struct {
    size_t bytes[PLACES];
    size_t (*host)(size_t planned); // Ops.host_available; NULL: no limit
    int tables;                     // 1: limits of a GPU, which keeps page tables of host memory in its own
} Limits;

static Limits device_limit(size_t bytes) {
    const Limits limits = {{bytes, SIZE_MAX, SIZE_MAX}, NULL, 0};
    return limits;
}

static void plan_bytes(const Plan *plan, size_t bytes[PLACES]) {
    bytes[PLACE_DEVICE] = plan->total_bytes, bytes[PLACE_HOST] = plan->host_bytes, bytes[PLACE_DISK] = plan->disk_bytes;
}

// Returns the bytes of the device's page tables for a plan's host memory. The plan does not include them.
static size_t page_table_bytes(const size_t bytes[PLACES], const Limits *limits) {
    return limits->tables ? bytes[PLACE_HOST] / PINNED_PER_TABLE : 0;
}

// Returns bytes / limit of the fullest place. Above 1 the bytes do not fit.
static double places_pressure(const size_t bytes[PLACES], const Limits *limits) {
    const size_t host = bytes[PLACE_HOST] && limits->host ? limits->host(bytes[PLACE_DEVICE]) : 0; // 0: unknown
    const size_t device = bytes[PLACE_DEVICE] + page_table_bytes(bytes, limits);
    double most = (double)device / (double)limits->bytes[PLACE_DEVICE];
    for (int place = PLACE_HOST; place < PLACES; place++) {
        const size_t limit = place == PLACE_HOST && host ? min_size(host, limits->bytes[place]) : limits->bytes[place];
        if (bytes[place]) most = fmax(most, (double)bytes[place] / (double)limit);
    }
    return most;
}

static double plan_pressure(const Plan *plan, const Limits *limits) {
    size_t bytes[PLACES];
    plan_bytes(plan, bytes);
    return places_pressure(bytes, limits);
}

// Returns a lower bound of plan_pressure without planning a pass: from tensors that live as long as the run, and from
// layer inputs.
static double held_pressure(const RunSettings *settings, const Batch *batch, const Limits *limits) {
    const Config *config = &settings->model->config;
    const size_t kept = config->num_hidden_layers / max_size(settings->inputs_every, 1) * config->hidden_size;
    Arena arena[PLACES];
    OptimizerState state;
    StreamBP s;
    arena_plan(arena);
    Ops ops = ops_dry(settings->model->dtype, arena, settings->ridge, settings->gpu);
    run_begin(&s, &state, settings, &ops, arena, batch);
    run_end(&s);
    size_t bytes[PLACES] = {arena[PLACE_DEVICE].peak, arena[PLACE_HOST].peak, arena[PLACE_DISK].peak};
    if (settings->backward && method_recomputes(settings->method))
        bytes[settings->place[PLACED_INPUTS] > PLACE_DEVICE ? settings->place[PLACED_INPUTS] : PLACE_DEVICE] +=
            batch_rows(batch)->N / world_sp(settings->world) * kept * dtype_size(settings->model->dtype);
    return places_pressure(bytes, limits);
}

#define PLAN_LONGEST ((size_t)1 << 36) // most tokens of all documents
#define LONGEST_SEQ  ((size_t)1 << 30) // most tokens of a document, since positions are int32

static int plan_fits(const RunSettings *settings, Batch *batch, size_t T, size_t shared, const Limits *limits) {
    const size_t rows = rows_of_shared(batch->documents, T, shared);
    for (size_t b = 0; b <= batch->documents; b++) batch->document_start[b] = b * T;
    batch->N = batch->documents * T, batch->tree = NULL;
    if (rows < batch->N) shape_share(batch, rows, 1, T);
    if (!plan_countable(settings->model, batch->N) || held_pressure(settings, batch, limits) > 1) return 0;
    RunSettings grown = *settings;
    if (grown.rollout_grows) grown.rollout_tokens = T, grown.rollout_mean = 0;
    const Plan plan = plan_make(&grown, batch);
    return plan_pressure(&plan, limits) <= 1;
}

// Returns the longest T above `least` with which B documents of T tokens fit, or 0. All begin with the same `shared`
// tokens. T stays within a learned position table and the range of --seq-len.
static size_t plan_longest(const RunSettings *settings, size_t B, size_t shared, size_t least, const Limits *limits) {
    const Config *config = &settings->model->config;
    const size_t positions = config->family->learned_positions ? config->max_position_embeddings : LONGEST_SEQ;
    size_t low = least, high = least + 1, end = 1 + min_size(positions, LONGEST_SEQ);
    Batch batch = {0};
    batch.documents = B;
    batch.document_start = (size_t *)checked_calloc(B + 1, sizeof(size_t), "the documents of a plan");
    if (shared) batch.room = tree_allocate(0, max_size(B, 2));
    while (high < end && plan_fits(settings, &batch, high, shared, limits)) low = high, high *= 2;
    high = min_size(high, end);
    while (high - low > 1) { // low fits (or equals `least`), high does not
        const size_t middle = low + (high - low) / 2;
        *(plan_fits(settings, &batch, middle, shared, limits) ? &low : &high) = middle;
    }
    batch_free(&batch);
    return low > least ? low : 0;
}

#endif
