/*
A tiny model for tests: random weights, a packed sequence of documents of given lengths with given masks, and one or
more passes of a method. The passes leave the loss and every gradient on the host in double.
*/
#ifndef TEST_TINY_H
#define TEST_TINY_H
#include "llmc/plan/plan.h"
#include "test/base/testing.h"
#include "lora_cases.h"

// Models, as --init takes them. TINY_GEMMA and TINY_MISTRAL need their windows appended.
#define TINY_GPT2                                                                                                      \
    "gpt2,hidden_size=24,num_hidden_layers=2,num_attention_heads=3,vocab_size=37,max_position_embeddings=64"
#define TINY_LLAMA                                                                                                     \
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"       \
    "vocab_size=41"
#define TINY_BIASED                                                                                                    \
    "llama,hidden_size=20,intermediate_size=33,num_hidden_layers=2,num_attention_heads=5,num_key_value_heads=1,"       \
    "head_dim=6,vocab_size=29,pad_token_id=5,tie_word_embeddings=true,attention_bias=true,mlp_bias=true"
#define TINY_QWEN3                                                                                                     \
    "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"       \
    "head_dim=8,vocab_size=43,pad_token_id=7"
// QK-norm after the rotation, whose base grows
#define TINY_ROTATED                                                                                                   \
    "hunyuan_v1_dense,hidden_size=20,intermediate_size=16,num_hidden_layers=2,num_attention_heads=4,"                  \
    "num_key_value_heads=2,head_dim=8,vocab_size=29,rope_type=dynamic,alpha=9"
// Bare QK-norm, a gate with a product of its own, norms of embeddings, layers without rotary positions, a cap
#define TINY_BARE                                                                                                      \
    "muse_glimmer,hidden_size=20,intermediate_size=16,num_hidden_layers=3,num_attention_heads=4,"                      \
    "num_key_value_heads=2,head_dim=8,vocab_size=29,sliding_window=6,layer_types=snf,rms_norm_eps=1e-3,"               \
    "post_norm_eps=1e-2,final_logit_softcapping=4,output_multiplier=0.7,pad_token_id=4"
// Short convolutions in most layers
#define TINY_SHORT                                                                                                     \
    "lfm2,hidden_size=20,intermediate_size=16,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"        \
    "head_dim=8,vocab_size=29,pad_token_id=3,layer_types=cfcc"
// The same with windows, norms after branches, a gate a head
#define TINY_SHORT3                                                                                                    \
    "lfm3,hidden_size=20,intermediate_size=16,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"        \
    "head_dim=8,vocab_size=29,pad_token_id=3,layer_types=scfc,sliding_window=6,linear_conv_kernel_dim=7"
#define TINY_TIED                                                                                                      \
    "qwen3,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=1,num_key_value_heads=1,"       \
    "head_dim=16,vocab_size=23,tie_word_embeddings=true"
#define TINY_GEMMA                                                                                                     \
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"      \
    "head_dim=8,vocab_size=33,query_pre_attn_scalar=5"
#define TINY_MISTRAL                                                                                                   \
    "mistral,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"     \
    "vocab_size=31"
// Without norms before attention and MLP; needs its window appended.
#define TINY_OLMO                                                                                                      \
    "olmo3,hidden_size=24,intermediate_size=20,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"       \
    "vocab_size=29,layer_types=sff"
// Layers of two kinds. Append their number, their types (or three of linear attention to one of full attention) and
// linear_num_value_heads.
#define TINY_HYBRID                                                                                                    \
    "qwen3_5,hidden_size=20,intermediate_size=24,num_attention_heads=4,num_key_value_heads=2,head_dim=8,"              \
    "vocab_size=19,pad_token_id=2,linear_num_key_heads=2,linear_key_head_dim=24,linear_value_head_dim=5,"              \
    "rms_norm_eps=1e-3"
#define TINY_LLLF TINY_HYBRID ",num_hidden_layers=4,linear_num_value_heads=4"
// Layers of two shapes: norms before the branches of linear layers, after those of attention; a beta of up to 2
#define TINY_SHAPES                                                                                                    \
    "olmo_hybrid,hidden_size=24,intermediate_size=16,num_hidden_layers=4,layer_types=llnl,num_attention_heads=4,"      \
    "num_key_value_heads=2,vocab_size=23,linear_num_key_heads=2,linear_num_value_heads=4,linear_key_head_dim=8,"       \
    "linear_value_head_dim=11,rms_norm_eps=1e-1"
#define TINY_LINEAR                                                                                                    \
    "qwen3_5,hidden_size=12,intermediate_size=16,num_hidden_layers=2,layer_types=l,num_attention_heads=2,"             \
    "num_key_value_heads=1,head_dim=8,vocab_size=23,tie_word_embeddings=true,linear_num_key_heads=3,"                  \
    "linear_num_value_heads=3,linear_key_head_dim=4,linear_value_head_dim=8,linear_conv_kernel_dim=8,"                 \
    "rms_norm_eps=1e-3"
// One branch a layer: Mamba-2 with steps at their lower bound, experts and a wider shared one, attention, an MLP
#define TINY_MAMBA                                                                                                     \
    "nemotron_h,hidden_size=20,intermediate_size=24,num_hidden_layers=5,layer_types=LeFpL,num_attention_heads=2,"      \
    "num_key_value_heads=1,head_dim=6,vocab_size=23,linear_num_key_heads=2,linear_num_value_heads=4,"                  \
    "linear_key_head_dim=6,linear_value_head_dim=5,num_experts=6,num_experts_per_tok=2,n_group=2,topk_group=1,"        \
    "moe_intermediate_size=12,shared_expert_intermediate_size=10,time_step_min=1.3,rms_norm_eps=1e-1"
// Mamba-2 with steps between two bounds, or attention; then experts and a wider MLP for all, or that MLP alone
#define GRANITE_SIZES                                                                                                  \
    "granitemoehybrid,hidden_size=20,intermediate_size=18,num_hidden_layers=3,num_attention_heads=2,"                  \
    "num_key_value_heads=1,head_dim=6,vocab_size=23,linear_num_key_heads=2,linear_num_value_heads=4,"                  \
    "linear_key_head_dim=6,linear_value_head_dim=5,time_step_min=0.5,time_step_max=1.5,num_experts_per_tok=2,"         \
    "moe_intermediate_size=12,embedding_multiplier=2,attention_multiplier=0.3,residual_multiplier=0.5,"                \
    "logits_scaling=0.7,rms_norm_eps=1e-1"
#define TINY_GRANITE       GRANITE_SIZES ",layer_types=lnl,num_experts=5"
#define TINY_GRANITE_DENSE GRANITE_SIZES ",layer_types=lf,num_experts=0,tie_word_embeddings=true"
#define TINY_BAMBA                                                                                                     \
    "bamba,hidden_size=24,intermediate_size=18,num_hidden_layers=3,layer_types=lfl,num_attention_heads=2,"             \
    "num_key_value_heads=1,head_dim=8,vocab_size=23,linear_num_key_heads=1,linear_num_value_heads=3,"                  \
    "linear_key_head_dim=7,linear_conv_kernel_dim=3,mlp_bias=true,attention_bias=true,rms_norm_eps=1e-1"
// Experts; append mlp_only_layers and num_experts_per_tok.
#define TINY_EXPERTS                                                                                                   \
    "qwen3_moe,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"   \
    "head_dim=8,vocab_size=31,num_experts=6,moe_intermediate_size=12"
#define TINY_MIXED TINY_EXPERTS ",num_experts_per_tok=2,mlp_only_layers=1"
// Experts with a shared one that is scaled, in layers of two kinds
#define TINY_SHARED                                                                                                    \
    "qwen3_5_moe,hidden_size=24,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,head_dim=8,"           \
    "vocab_size=31,num_experts=5,num_experts_per_tok=3,moe_intermediate_size=12,shared_expert_intermediate_size=10,"   \
    "linear_key_head_dim=6,linear_value_head_dim=10,linear_num_key_heads=2,linear_num_value_heads=4,"                  \
    "partial_rotary_factor=0.5,rms_norm_eps=1e-3"
// Latents in place of keys and values; experts by sigmoid in one of three layers, with a shared one
#define TINY_LATENT                                                                                                    \
    "glm4_moe_lite,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=3,vocab_size=31,"       \
    "q_lora_rank=7,kv_lora_rank=9,qk_nope_head_dim=6,qk_rope_head_dim=4,v_head_dim=10,num_experts=5,"                  \
    "num_experts_per_tok=2,moe_intermediate_size=12,shared_expert_intermediate_size=12,mlp_only_layers=0+2,"           \
    "rms_norm_eps=1e-1"
// Values narrower than keys, queries of full rank
#define TINY_NARROW                                                                                                    \
    "deepseek_v3,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=3,vocab_size=31,"         \
    "q_lora_rank=0,kv_lora_rank=9,qk_nope_head_dim=6,qk_rope_head_dim=4,v_head_dim=5,num_experts=6,n_group=3,"         \
    "topk_group=2,num_experts_per_tok=2,moe_intermediate_size=12,shared_expert_intermediate_size=12,"                  \
    "first_k_dense_replace=1,rms_norm_eps=1e-1,rope_type=yarn,factor=40,original_max_position_embeddings=16,mscale=1," \
    "mscale_all_dim=1"
// Windows and sinks; experts with biases and clamps within reach
#define TINY_SINKS                                                                                                     \
    "gpt_oss,hidden_size=20,intermediate_size=12,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"     \
    "head_dim=8,vocab_size=31,num_experts=5,num_experts_per_tok=2,sliding_window=7,swiglu_limit=1.5"
// Heads of two widths, values that are keys, a cap; without experts, or with experts beside the MLP
#define TINY_HEADS                                                                                                     \
    "gemma4,hidden_size=20,intermediate_size=16,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"      \
    "head_dim=8,global_head_dim=12,num_global_key_value_heads=1,attention_k_eq_v=true,hidden_size_per_layer_input=0,"  \
    "vocab_size=29,sliding_window=6,layer_types=sf,final_logit_softcapping=3"
#define TINY_BESIDE TINY_HEADS ",num_experts=5,num_experts_per_tok=2,moe_intermediate_size=10"
// Keys and values of earlier layers, wide MLPs, inputs of each layer's own
#define TINY_OWN                                                                                                       \
    "gemma4,hidden_size=20,intermediate_size=16,num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=2,"      \
    "head_dim=8,global_head_dim=12,num_kv_shared_layers=3,use_double_wide_mlp=true,hidden_size_per_layer_input=12,"    \
    "vocab_size=29,vocab_size_per_layer_input=31,sliding_window=6,layer_types=sf,pad_token_id=3"

typedef struct {
    double loss;      // with those of routers
    double *gradient; // [elements]
    size_t elements;
} TinyResult;

// Returns weights with no degenerate gradients: matrices ~ N(0, 1.5/cols), norms around 1, biases ~ 0.2 N(0, 1).
static double *tiny_weights(const Model *model, uint64_t seed) {
    double *w = (double *)checked_malloc(model->elements * sizeof(double), "weights");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        double deviation = p->role == ROLE_EMBEDDING ? 0.7 : p->cols ? sqrt(1.5 / (double)p->cols) : 0.2;
        const int queries = model->config.family->unscaled_attention && text_ends_with(p->name, "q_norm.weight");
        const double scale = queries ? 1 / sqrt((double)p->rows) : 1; // their norm scales the scores, as in Gemma 4
        for (size_t j = 0; j < parameter_elements(p); j++)
            w[p->offset + j] = scale * (p->ones + deviation * random_normal(seed, i, j));
    }
    return w;
}

static void device_write(const Ops *ops, void *device, DType type, const double *values, size_t count) {
    void *host = checked_malloc(count * dtype_size(type), "a copy");
    for (size_t i = 0; i < count; i++) element_write(host, type, i, values[i]);
    ops->copy_in(device, host, count * dtype_size(type));
    free(host);
}

static double *device_read(const Ops *ops, const void *device, DType type, size_t count) {
    void *host = checked_malloc(count * dtype_size(type), "a copy");
    double *values = (double *)checked_malloc(count * sizeof(double), "values");
    ops->copy_out(host, device, count * dtype_size(type));
    for (size_t i = 0; i < count; i++) values[i] = element_to_double(host, type, i);
    free(host);
    return values;
}

// Returns a packed sequence of `documents` documents of length[d] tokens. masked: 0 nothing; 1 a third of the targets
// at random; 2 also all of odd documents; 3 all.
static Batch tiny_batch(const size_t *length, size_t documents, size_t V, int masked, uint64_t seed) {
    size_t N = 0, d;
    for (d = 0; d < documents; d++) N += length[d];
    Batch batch = batch_allocate(N, documents);
    for (d = 0, N = 0; d < documents; d++) batch.document_start[d] = N, N += length[d];
    batch_set_positions(&batch);
    for (d = 0; d < documents; d++) {
        for (size_t t = batch.document_start[d]; t < batch.document_start[d + 1]; t++) {
            int mask = masked == 3 || (masked && random_below(seed, 3, t, 3) == 0) || (masked == 2 && d % 2);
            batch.tokens[t] = (int32_t)random_below(seed, 1, t, V);
            batch.targets[t] = mask ? -1 : (int32_t)random_below(seed, 2, t, V);
            batch.loss_weight[t] = 1.0f;
        }
    }
    return batch;
}

// Adds inputs of objectives, for pairs or groups of two documents. Every document keeps at least a target.
static void tiny_answers(Batch *batch, ObjectiveKind kind, int old, size_t V, uint64_t seed) {
    batch_allocate_answers(batch, 1, old);
    for (size_t d = 0; d < batch->documents; d++) {
        batch->targets[batch->document_start[d + 1] - 1] = (int32_t)(d % V);
        batch->group[d] = d / 2, batch->reward[d] = (float)d;
        for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) {
            batch->advantage[t] = (float)random_normal(seed, 4, kind == OBJECTIVE_PPO ? t : d);
            batch->reference[t] = (float)(-4 + random_normal(seed, 5, t));
            if (old) batch->old[t] = (float)(-4 + random_normal(seed, 6, t));
        }
    }
}

static Objective tiny_objective(ObjectiveKind kind) {
    Objective o = {.kind = kind, .beta = 0.3, .gamma = NAN, .clip_low = 0.2, .clip_high = NAN, .temperature = {1, 0}};
    o.completion_tokens = 12;
    objective_resolve(&o);
    return o;
}

// Fills memory of any place with NaN.
static void *poisoned(const Ops *ops, void *memory, size_t bytes) {
    void *poison = checked_malloc(bytes, "poison");
    memset(poison, 0xff, bytes);
    ops->copy_in(memory, poison, bytes);
    free(poison);
    return memory;
}

// What stays from forward to backward: nothing (0), or in turn on the device and in host memory attention's outputs (1,
// 2), products (3, 4), all (5, 6), all of the last layer, attention's outputs of the others (7), products of the last
// two, of them the first layer's off-device (8)
enum { TINY_KEEPS = 9 };

static void tiny_keep(RunSettings *settings, size_t keep) {
    static const Keeping keeping[TINY_KEEPS] = {
        {LEVEL_NONE, 0, 0},     {LEVEL_ATTENTION, 0, 0}, {LEVEL_ATTENTION, 0, 0},
        {LEVEL_PRODUCTS, 0, 0}, {LEVEL_PRODUCTS, 0, 0},  {LEVEL_ALL, 0, 0},
        {LEVEL_ALL, 0, 0},      {LEVEL_ALL, 1, 0},       {LEVEL_PRODUCTS, 2, 1}};
    settings->keep = keeping[keep];
    settings->place[PLACED_KEPT] = keep && keep % 2 == 0 ? PLACE_HOST : PLACE_DEVICE;
}

// ---- a run: planned first, in memory that begins as NaN -------------------------------------------------------------
typedef struct {
    const Ops *ops;
    RunSettings settings;
    Plan plan;
    void *memory, *host, *disk;
    Arena arena[PLACES];
    StreamBP s;
    OptimizerState state;
} TinyRun;

// Begins a run; largest: its largest micro-batch. The run points into *r, so *r must not move. weights NULL: the caller
// writes its shard.
static void tiny_begin(TinyRun *r, const Ops *ops, RunSettings settings, const double *weights, const double *adapters,
                       const Batch *largest) {
    memset(r, 0, sizeof(*r));
    r->ops = ops, r->settings = settings, r->plan = plan_make(&settings, largest);
    r->memory = poisoned(ops, ops->allocate(r->plan.total_bytes), r->plan.total_bytes);
    if (r->plan.arena[PLACE_HOST].peak)
        r->host = poisoned(ops, ops->host_allocate(r->plan.arena[PLACE_HOST].peak), r->plan.arena[PLACE_HOST].peak);
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/tmp";
    if (r->plan.disk_bytes) r->disk = poisoned(ops, ops->disk_allocate(folder, r->plan.disk_bytes), r->plan.disk_bytes);
    arena_init(&r->arena[PLACE_DEVICE], r->memory, r->plan.total_bytes);
    arena_init(&r->arena[PLACE_HOST], r->host, r->plan.arena[PLACE_HOST].peak);
    arena_init(&r->arena[PLACE_DISK], r->disk, r->plan.disk_bytes);
    arena_watch(r->arena, ops->copy_in, ops->copy_out);
    run_begin(&r->s, &r->state, &r->settings, ops, r->arena, largest);
    const Model *model = settings.model, *trained = settings.lora ? &settings.lora->table : model;
    if (weights) device_write(ops, r->s.memory.weights, model->dtype, weights, model->elements);
    if (adapters) device_write(ops, r->s.memory.adapters, model->dtype, adapters, trained->elements);
    if (settings.backward) grads_zero(&r->s.memory);
}

static void tiny_end(TinyRun *r) {
    run_end(&r->s);
    r->ops->release(r->memory, r->plan.total_bytes);
    if (r->host) r->ops->host_release(r->host, r->plan.arena[PLACE_HOST].peak);
    if (r->disk) r->ops->disk_release(r->disk, r->plan.disk_bytes);
}

// Accumulates loss and gradients of `count` micro-batches; adapters: with LoRA, the adapters' gradients.
static TinyResult tiny_run_trained(const Ops *ops, RunSettings settings, const double *weights, const double *adapters,
                                   const Batch *batches, size_t count) {
    const Model *trained = settings.lora ? &settings.lora->table : settings.model;
    Batch largest = batches[0];
    TinyResult result = {0, NULL, trained->elements};
    TargetCounts counts = {0};
    TinyRun r;
    for (size_t i = 0; i < count; i++) {
        counts = target_counts_add(counts, batch_count(&batches[i]));
        if (batches[i].N > largest.N) largest = batches[i];
    }
    const double Z = objective_normaliser(&settings.objective, counts);
    Metrics metrics = {0};
    settings.backward = 1;
    tiny_begin(&r, ops, settings, weights, adapters, &largest);
    r.s.routes.micro_batches = counts.batches;
    for (size_t i = 0; i < count; i++) result.loss += forward_backward(&r.s, &batches[i], Z, i + 1 == count, &metrics);
    if (settings.router_aux_loss > 0) result.loss += settings.router_aux_loss * metric_named(&metrics, "aux_loss");
    if (settings.router_z_loss > 0) result.loss += settings.router_z_loss * metric_named(&metrics, "z_loss");
    result.gradient = device_read(ops, r.s.memory.gradients, settings.gradient_type, trained->elements);
    tiny_end(&r);
    return result;
}

static TinyResult tiny_run_on(const Ops *ops, RunSettings settings, const double *weights, const Batch *batches,
                              size_t count) {
    return tiny_run_trained(ops, settings, weights, NULL, batches, count);
}

static TinyResult tiny_run(const Model *model, const double *weights, Method method, size_t chunk, size_t logits_chunk,
                           const Batch *batch) {
    RunSettings settings = {0};
    settings.model = model, settings.method = method;
    settings.chunk = chunk, settings.logits_chunk = logits_chunk;
    settings.gradient_type = model->dtype;
    return tiny_run_on(ops_device, settings, weights, batch, 1);
}

// Returns the relative L2 difference of one parameter's gradient.
static double tiny_difference(const Parameter *p, const double *found, const double *expected) {
    double difference = 0, size = 0;
    for (size_t i = p->offset; i < p->offset + parameter_elements(p); i++) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    if (difference == 0) return 0;
    return size > 0 ? sqrt(difference / size) : INFINITY;
}

// ---- a case: a model, or its adapters, and a batch ------------------------------------------------------------------
typedef struct {
    Model model;
    Lora lora;            // rank 0: none
    RunSettings settings; // the run sets its pointers
    double *weights, *adapters;
    Batch batch;
} TinyCase;

// rank: of adapters on all linear layers, with copies of embedding and head if untied, else with adapters of both; 0:
// trains the model itself
// A delta rule's output may nearly vanish. Its norm then magnifies rounding, unless it has the epsilon of other norms.
static TinyCase tiny_case_of(Config config, size_t rank) {
    static Family calm;
    TinyCase c = {0};
    if (config.family->gated_norm_eps > 0) calm = *config.family, calm.gated_norm_eps = 0, config.family = &calm;
    c.model = model_build(&config, ops_device->stored);
    for (size_t l = 0; c.model.layer_scalar && l < config.num_hidden_layers; l++)
        c.model.layer_scalar[l] = 0.75f + 0.25f * (float)l;
    c.weights = tiny_weights(&c.model, 7);
    c.settings.gradient_type = c.model.dtype;
    if (rank) {
        c.lora.rank = rank, c.lora.alpha = 5;
        c.lora.modules = lora_modules(config.family, "all", "test", EXIT_USAGE);
        c.lora.saves[EMBEDDING] = c.lora.saves[LM_HEAD] = !config.tie_word_embeddings;
        if (config.tie_word_embeddings) lora_give_outer(&c.lora);
        lora_build(&c.lora, &c.model);
        c.adapters = tiny_weights(&c.lora.table, 19);
    }
    return c;
}

// Adds the losses of a router by softmax; other routers have none.
static void tiny_router_losses(const Model *model, RunSettings *settings) {
    if (model->config.family->router != ROUTER_SOFTMAX || !model->config.num_experts) return;
    settings->router_aux_loss = 0.7, settings->router_z_loss = 0.2;
}

static TinyCase tiny_case(const char *config_text, size_t rank) {
    return tiny_case_of(config_from_text(config_text, "test", EXIT_USAGE), rank);
}

static void tiny_case_free(TinyCase *c) {
    free(c->weights), free(c->adapters);
    batch_free(&c->batch);
    if (c->lora.rank) lora_free(&c->lora);
    model_free(&c->model);
}

static const Model *tiny_table(const TinyCase *c) { return c->lora.rank ? &c->lora.table : &c->model; }

static RunSettings tiny_settings(const TinyCase *c, Method method, size_t chunk, size_t logits_chunk) {
    RunSettings settings = c->settings;
    settings.model = &c->model, settings.lora = c->lora.rank ? &c->lora : NULL;
    settings.method = method, settings.chunk = chunk, settings.logits_chunk = logits_chunk;
    settings.latent_ranges = chunk % 2; // both ways, in tests of several chunk sizes
    return settings;
}

static TinyResult tiny_case_run(const TinyCase *c, Method method, size_t chunk, size_t logits_chunk,
                                const Batch *batches, size_t count) {
    return tiny_run_trained(ops_device, tiny_settings(c, method, chunk, logits_chunk), c->weights, c->adapters, batches,
                            count);
}

// Compares loss and every parameter's gradient by relative L2 difference. Near zero: relative to loss_floor, and to the
// share `floor` of the whole gradient's length.
static void tiny_expect_same(const Model *table, TinyResult found, TinyResult expected, double allowed,
                             double loss_floor, double floor) {
    double whole = 0;
    if (!(fabs(found.loss - expected.loss) <= allowed * (fabs(expected.loss) + loss_floor)))
        test_fail("loss %.17g, expected %.17g", found.loss, expected.loss);
    for (size_t j = 0; j < table->elements; j++) whole += expected.gradient[j] * expected.gradient[j];
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        double difference = 0, size = 0;
        for (size_t j = p->offset; j < p->offset + parameter_elements(p); j++) {
            difference += (found.gradient[j] - expected.gradient[j]) * (found.gradient[j] - expected.gradient[j]);
            size += expected.gradient[j] * expected.gradient[j];
        }
        const double bound = allowed * (sqrt(size) + floor * sqrt(whole));
        if (!(sqrt(difference) <= bound))
            test_fail("gradient of %s differs by %.3g, allowed %.3g", p->name, sqrt(difference), bound);
        if (difference > 0) testing.worst = fmax(testing.worst, sqrt(difference) / bound);
    }
}

static void tiny_expect_bits(TinyResult found, TinyResult expected, const char *what) {
    if (found.loss != expected.loss || memcmp(found.gradient, expected.gradient, found.elements * sizeof(double)) != 0)
        test_fail("%s gave other bits", what);
}

// Compares d loss along a random direction in values[begin .. begin + count), by central differences at -2h, -h, h, 2h,
// with the gradient's. Changes the trained values. Double build.
static void tiny_expect_slope(TinyCase *c, const char *name, const double *gradient, size_t begin, size_t count,
                              uint64_t direction, double h, double allowed, Method method, size_t chunk,
                              size_t logits_chunk) {
    double *values = c->adapters ? c->adapters : c->weights, slope = 0, size = 0, loss[4];
    for (int side = 0; side < 4; side++) {
        const double step = (side < 2 ? side - 2 : side - 1) * h;
        for (size_t k = 0; k < count; k++) values[begin + k] += step * random_normal(17, direction, k);
        TinyResult at_step = tiny_case_run(c, method, chunk, logits_chunk, &c->batch, 1);
        for (size_t k = 0; k < count; k++) values[begin + k] -= step * random_normal(17, direction, k);
        loss[side] = at_step.loss;
        free(at_step.gradient);
    }
    for (size_t k = 0; k < count; k++) {
        slope += gradient[begin + k] * random_normal(17, direction, k);
        size += gradient[begin + k] * gradient[begin + k];
    }
    const double numeric = (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / (12 * h);
    if (!(fabs(numeric - slope) <= allowed * (sqrt(size) + 1e-3)))
        test_fail("%s: slope %.12g, by differences %.12g", name, slope, numeric);
}

// Computes logits[n,V] (host, stored type) of the last tokens fed, as cache_draw of key_value_cache.h does.
static void cache_logits(Cache *cache, StreamBP *s, void *logits) {
    const Shapes d = shapes_of(s->model);
    Visit v = {0};
    v.s = s, v.w = weights_acquire(&s->memory, GROUP_HEAD), v.c = cache->last;
    v.c.n = 1;
    for (size_t i = 0; i < cache->texts; i++, v.c.row++, v.c.token++) {
        size_t mark = arena_mark(s->arena);
        s->ops->copy_out((char *)logits + i * d.V * d.stored, head_logits(&v).logits, d.V * d.stored);
        arena_pop(s->arena, mark);
    }
    weights_release(&s->memory, GROUP_HEAD);
}

#endif
