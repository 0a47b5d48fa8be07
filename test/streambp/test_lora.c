/*
LoRA in the steps of streambp.h. Every method and chunk size gives the adapter gradients of method full. These gradients
follow from the merged weights' gradients (dB = scale dW A^T, dA = scale B^T dW). They match finite differences, also
with dropout. A new adapter changes no bit of the model. Merged weights give the adapter's loss within rounding. Frozen
weights have no gradient anywhere.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 5e-5 : 0.1;
}

// Experts beside a dense layer
#define EXPERTS                                                                                                        \
    "qwen3_moe,hidden_size=20,intermediate_size=24,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,"   \
    "head_dim=8,vocab_size=31,num_experts=6,num_experts_per_tok=2,moe_intermediate_size=10,mlp_only_layers=1"
// Inputs of linear attention that share an adapter's A, and a dense layer
#define FUSED                                                                                                          \
    "qwen3_next,hidden_size=16,intermediate_size=12,num_hidden_layers=2,layer_types=l,num_attention_heads=2,"          \
    "num_key_value_heads=1,head_dim=8,vocab_size=23,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=8,"      \
    "shared_expert_intermediate_size=6,mlp_only_layers=1,linear_key_head_dim=3,linear_value_head_dim=5,"               \
    "linear_num_key_heads=2,linear_num_value_heads=4,rms_norm_eps=1e-2"
static const char *const models[] = {TINY_GPT2,
                                     TINY_BIASED,
                                     TINY_QWEN3,
                                     TINY_GEMMA ",sliding_window=9,layer_types=ssf",
                                     TINY_LLLF,
                                     EXPERTS,
                                     FUSED,
                                     TINY_BARE,
                                     TINY_SHORT,
                                     TINY_SHAPES,
                                     TINY_SHARED,
                                     TINY_MAMBA,
                                     TINY_GRANITE,
                                     TINY_BAMBA,
                                     TINY_SINKS,
                                     TINY_BESIDE,
                                     TINY_OWN ",tie_word_embeddings=false",
                                     TINY_LATENT,
                                     TINY_NARROW};
enum { MODELS = COUNT_OF(models) };

static const struct {
    size_t rank;
    double alpha, dropout;
    int rslora;
    const char *gpt2_targets, *targets, *hybrid_targets, *expert_targets; // exist in some kinds of layers, alternately
    const char *stack_targets;                                            // where experts have no names of their own
} adapters[] = {
    {3, 6, 0, 0, "all", "all", "all", "all", "all"},
    {1, 1, 0, 0, "c_attn", "q_proj,v_proj", "q_proj", "experts.gate_up_proj", "experts.gate_up_proj,k_proj"},
    {4, 3, 0, 1, "mlp.c_proj,c_fc", "up_proj,down_proj,o_proj", "in_proj_z", "experts.down_proj,gate",
     "experts.down_proj,o_proj"},
    {3, 6, 0, 1, "all", "all", "all", "all", "all"},     // layers that differ (lora_vary)
    {2, 6, 0, 0, "c_fc", "k_proj", "all", "all", "all"}, // with copies of embedding and head if untied
    {2, 2, 0.3, 0, "all", "all", "all", "all", "all"},
};
enum { ADAPTERS = COUNT_OF(adapters) };

static TinyCase case_make(size_t m, size_t a) {
    static const size_t length[] = {6, 1, 13, 9};
    TinyCase c = tiny_case(models[m], 0);
    if (c.model.config.family->sinks) c.model.config.swiglu_limit = 1.4; // at 1.5 an activation lies on the clamp
    c.lora.rank = adapters[a].rank, c.lora.alpha = adapters[a].alpha, c.lora.dropout = adapters[a].dropout;
    c.lora.rslora = adapters[a].rslora;
    const char *targets = !m ? adapters[a].gpt2_targets : adapters[a].targets;
    if (family_has_linear(c.model.config.family)) targets = adapters[a].hybrid_targets;
    const Family *family = c.model.config.family;
    if (family_has_convolution(family)) targets = a == 1 ? "in_proj,q_proj" : a == 2 ? "out_proj,w3" : "all";
    if (a == 2 && family->names.layer.IN_K_WEIGHT) targets = "linear_attn.v_proj,g_proj";
    if (family->router) targets = family->names.expert[0] ? adapters[a].expert_targets : adapters[a].stack_targets;
    const char *of_mamba = family->bare_attention ? "in_proj,experts.up_proj,k_proj"
                           : family->router       ? "in_proj,experts.down_proj,input_linear,router,k_proj"
                                                  : "in_proj,out_proj,up_proj,k_proj";
    if (family->ssd) targets = a % 2 ? of_mamba : "all";
    c.lora.modules = lora_modules(c.model.config.family, targets, "test", EXIT_USAGE);
    c.lora.saves[EMBEDDING] = c.lora.saves[LM_HEAD] = a >= ADAPTERS - 2 && !c.model.config.tie_word_embeddings;
    if (c.model.config.tie_word_embeddings ? a == ADAPTERS - 1 : a == ADAPTERS - 3) lora_give_outer(&c.lora);
    if (a == ADAPTERS - 3) lora_vary(&c.lora, &c.model.config);
    lora_build(&c.lora, &c.model);
    c.adapters = tiny_weights(&c.lora.table, 19);
    c.batch = tiny_batch(length, 4, c.model.config.vocab_size, 1, 11);
    test_case("model %zu, %.8s..., rank %zu, %s", m, models[m], adapters[a].rank, targets);
    return c;
}

static TinyResult case_run(const TinyCase *c, Method method, size_t chunk, size_t logits_chunk) {
    return tiny_case_run(c, method, chunk, logits_chunk, &c->batch, 1);
}

static void expect_same(const TinyCase *c, TinyResult found, TinyResult expected, double allowed) {
    const int routed = c->model.config.family->router && c->model.dtype == DTYPE_FP32; // small gradients of routers
    tiny_expect_same(&c->lora.table, found, expected, routed ? 4 * allowed : allowed, 0, 0);
}

// One product term of W + scale B A: elements of W, A and B
typedef struct {
    size_t w, a, b;
    double scale;
} Term;

// Returns all terms of all products, in case_memory.
static const Term *case_terms(const TinyCase *c, size_t *count) {
    Term *terms = NULL;
    for (int round = 0; round < 2; round++) { // counts, then writes
        *count = 0;
        for (size_t i = 0; i < c->model.config.num_hidden_layers * LORA_TENSORS; i++) {
            const size_t l = i / LORA_TENSORS, layer = group_begin(&c->lora.table, l);
            const unsigned form = layer_form(&c->model.config, l);
            const LayerTensor tensor = lora_tensors[i % LORA_TENSORS];
            const LoraPart *part = lora_part(&c->lora, l, tensor);
            const size_t r = part->rank;
            const TensorShape shape = layer_tensor_shape(&c->model.config, form, tensor);
            const size_t w = group_begin(&c->model, l) + c->model.layer_offset[l][tensor];
            const size_t out = shape.rows / max_size(shape.experts, 1); // of an expert
            for (size_t j = 0; part->a != ABSENT && j < shape.rows * shape.cols * r; j++, ++*count) {
                const size_t row = j / r / shape.cols, col = j / r % shape.cols, k = j % r;
                const Term term = {w + j / r, layer + part->a + (row / out * r + k) * shape.cols + col,
                                   layer + part->b + row * r + k, part->scale};
                if (terms) terms[*count] = term;
            }
        }
        for (size_t t = 0; t < MODEL_TENSORS; t++) { // of both if untied
            const LoraPart *part = &c->lora.outer_part[t];
            const size_t C = c->model.config.hidden_size, V = c->model.config.vocab_size, r = part->rank;
            const size_t group = t == EMBEDDING ? 0 : group_begin(&c->lora.table, GROUP_HEAD);
            for (size_t j = 0; j < V * C * r; j++, ++*count) {
                const size_t row = j / r / C, col = j / r % C, k = j % r;
                const Term of_embedding = {j / r, row * r + k, part->b + col * r + k, part->scale};
                const Term of_head = {c->model.model_offset[LM_HEAD] + j / r, group + k * C + col,
                                      group + part->b + row * r + k, part->scale};
                if (terms) terms[*count] = t == EMBEDDING ? of_embedding : of_head;
            }
        }
        if (!round) terms = (Term *)case_memory(*count * sizeof(Term));
    }
    return terms;
}

TEST(methods_agree) {
    const size_t sizes[] = {1, 7, 10, 28, 30};
    const int few = !all_cases() && ops_device->stored == DTYPE_BF16; // all in the double build
    for (size_t m = 0; m < MODELS; m++) {
        for (size_t a = 0; a < ADAPTERS; a++) {
            TinyCase c = case_make(m, a);
            TinyResult full = case_run(&c, METHOD_FULL, 0, 0), other = case_run(&c, METHOD_CHECKPOINT, 0, 0);
            expect_same(&c, other, full, bound());
            free(other.gradient);
            for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                if (EMULATED && i != (m + a) % 5) continue;
                if (few && (i + m + a) % 2) continue;
                static const Method methods[] = {METHOD_STREAM, METHOD_SECO, METHOD_MST};
                for (size_t k = 0; k < 1 + (i + a) % 3; k++) {
                    if (EMULATED && k != i % 3) continue;
                    if (few && k != (i + a) % 3) continue;
                    if (methods[k] == METHOD_SECO && c.model.config.num_kv_shared_layers) continue; // refused
                    other = case_run(&c, methods[k], sizes[i], sizes[(i + a) % 5]);
                    expect_same(&c, other, full, bound());
                    free(other.gradient);
                }
            }
            free(full.gradient);
            tiny_case_free(&c);
        }
    }
}

// Merged weights give the loss of the adapters, and their dW gives dA and dB.
TEST(merged_weights) {
    for (size_t m = 0; m < MODELS; m++) {
        for (size_t a = 0; a + 1 < ADAPTERS; a++) { // the last has dropout
            TinyCase c = case_make(m, a);
            size_t count;
            const Family *family = c.model.config.family;
            if ((family_has_linear(family) || family_has_convolution(family) || family->router ||
                 family->outer_norms) &&
                c.model.dtype == DTYPE_BF16) { // merging changes the weights there, routes, or norms of embeddings
                tiny_case_free(&c);
                continue;
            }
            const Term *terms = case_terms(&c, &count);
            double *merged = case_copy(c.weights, c.model.elements);
            for (const Term *t = terms; t < terms + count; t++)
                merged[t->w] += t->scale * c.adapters[t->b] * c.adapters[t->a];
            for (int t = 0; t < MODEL_TENSORS; t++)
                if (c.lora.saves[t])
                    memcpy(merged + c.model.model_offset[t], c.adapters + c.lora.table.model_offset[t],
                           model_head_elements(&c.model) * sizeof(double));
            TinyResult found = case_run(&c, METHOD_STREAM, 7, 5);
            TinyResult full = tiny_run(&c.model, merged, METHOD_FULL, 0, 0, &c.batch);
            const TinyResult expected = {full.loss, case_doubles(found.elements), found.elements};
            for (const Term *t = terms; t < terms + count; t++) {
                expected.gradient[t->a] += t->scale * c.adapters[t->b] * full.gradient[t->w];
                expected.gradient[t->b] += t->scale * c.adapters[t->a] * full.gradient[t->w];
            }
            for (int t = 0; t < MODEL_TENSORS; t++)
                if (c.lora.saves[t])
                    memcpy(expected.gradient + c.lora.table.model_offset[t], full.gradient + c.model.model_offset[t],
                           model_head_elements(&c.model) * sizeof(double));
            expect_same(&c, found, expected, 10 * bound());
            free(found.gradient), free(full.gradient);
            tiny_case_free(&c);
        }
    }
}

// Central differences along a random direction in each adapter; the dropout mask is the same in every pass.
TEST(finite_differences) {
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    for (size_t m = 0; m < MODELS; m++) {
        TinyCase c = case_make(m, ADAPTERS - 1);
        c.model.config.pad_token_id = NO_ROW; // with one the gradient is not the slope
        TinyResult full = case_run(&c, METHOD_STREAM, 7, 7);
        const int routed = c.model.config.family->router != ROUTER_NONE; // a step may change a route
        const int curved = c.model.config.family->outer_norms;           // the norm of small embeddings
        const double h = layers_of_kind(&c.model.config, LAYER_LINEAR) || routed || curved ? 3e-6 : 1e-4;
        for (size_t i = 0; i < c.lora.table.parameter_count; i++) {
            const Parameter *p = &c.lora.table.parameters[i];
            tiny_expect_slope(&c, p->name, full.gradient, p->offset, parameter_elements(p), i, h, 1e-7, METHOD_STREAM,
                              9, 4);
        }
        free(full.gradient);
        tiny_case_free(&c);
    }
}

// Runs forward passes alone: log-probabilities with and without adapters.
static void forwards(const TinyCase *c, int with_lora, int reference, float *out) {
    RunSettings settings = tiny_settings(c, METHOD_STREAM, 7, 5);
    TinyRun r;
    if (!with_lora) settings.lora = NULL;
    tiny_begin(&r, ops_device, settings, c->weights, with_lora ? c->adapters : NULL, &c->batch);
    forward_policy(&r.s, &c->batch, reference, out);
    tiny_end(&r);
}

// B = 0, as initialised, changes no bit; nor does leaving it out, which lasts for one pass only.
TEST(without_adapters) {
    for (size_t m = 0; m < MODELS; m++) {
        for (size_t a = 0; a < ADAPTERS; a++) {
            TinyCase c = case_make(m, a);
            float *base = (float *)checked_calloc(3 * c.batch.N, sizeof(float), "log-probabilities");
            float *found = base + c.batch.N, *with = found + c.batch.N;
            forwards(&c, 0, 0, base);
            forwards(&c, 1, 1, found);
            assert_memory_equal(found, base, c.batch.N * sizeof(float));
            forwards(&c, 1, 0, with);
            if (!memcmp(with, base, c.batch.N * sizeof(float))) test_fail("the adapters make no difference");
            for (size_t i = 0; i < c.lora.table.parameter_count; i++) {
                const Parameter *p = &c.lora.table.parameters[i];
                if (p->init_std == 0) memset(c.adapters + p->offset, 0, parameter_elements(p) * sizeof(double));
                for (int t = 0; t < MODEL_TENSORS; t++)
                    if (c.lora.saves[t] && p->offset == c.lora.table.model_offset[t])
                        memcpy(c.adapters + p->offset, c.weights + c.model.model_offset[t],
                               parameter_elements(p) * sizeof(double));
            }
            forwards(&c, 1, 0, found);
            assert_memory_equal(found, base, c.batch.N * sizeof(float));
            free(base);
            tiny_case_free(&c);
        }
    }
}

// Frozen weights have no gradient, optimizer state or sum of dW: the plan holds the adapters' alone.
TEST(plan_of_adapters) {
    for (size_t m = 0; m < MODELS; m++) {
        TinyCase c = case_make(m, 0);
        const size_t n = c.lora.table.elements, stored = dtype_size(c.model.dtype);
        RunSettings settings = {0};
        settings.model = &c.model, settings.lora = &c.lora, settings.chunk = 7, settings.logits_chunk = 5;
        settings.backward = settings.optimizer = 1;
        settings.gradient_type = c.model.dtype, settings.moment_type = DTYPE_FP32;
        Plan plan = plan_make(&settings, &c.batch);
        const size_t biases = c.model.router_bias ? 256 : 0; // of routers, in a region of their own
        if (plan.share[SHARE_WEIGHTS] > (c.model.elements + n) * stored + 512 + biases)
            test_fail("weights take too much");
        if (plan.share[SHARE_OPTIMIZER] > 2 * n * 4 + 512) test_fail("the optimizer takes too much");
        if (plan.share[SHARE_GRADIENTS] >
            n * stored + group_elements(&c.lora.table, largest_layer(&c.lora.table)) * 4 + 512)
            test_fail("gradients take %zu bytes for %zu elements", plan.share[SHARE_GRADIENTS], n);
        for (size_t i = 0; i < plan.arena->regions_at_peak; i++)
            if (strstr(plan.arena->at_peak[i].name, "head's gradient")) test_fail("the head's dW is summed");
        tiny_case_free(&c);
    }
}

// The mask belongs to A: queries, keys and values of GPT-2's c_attn share one. Separate modules, layers and steps have
// different masks.
TEST(dropout_follows_a) {
    static const LayerTensor tensors[] = {Q_WEIGHT, K_WEIGHT, V_WEIGHT};
    for (size_t m = 0; m < 2; m++) {
        TinyCase c = case_make(m, ADAPTERS - 1);
        uint64_t seed[3], other_layer, other_step;
        Adapter adapter[ADAPTERS_MOST];
        const Keeping nothing = {LEVEL_NONE, 0, 0};
        Layer *layers = layers_make(&c.model, NULL, nothing);
        StreamBP s = {0};
        Visit v = {0}, next = {0};
        v.s = next.s = &s, v.layer = next.layer = layers, next.l = 1;
        v.w.adapters = next.w.adapters = (char *)c.adapters;
        s.model = &c.model, s.memory.lora = &c.lora, s.now.dropout_seed = 5;
        for (size_t i = 0; i < 3; i++) {
            assert_int_equal(adapters_of(&v, linear_of(&v, tensors[i]), adapter), 1);
            seed[i] = adapter[0].seed;
        }
        adapters_of(&next, linear_of(&next, V_WEIGHT), adapter), other_layer = adapter[0].seed;
        s.now.dropout_seed = 6;
        adapters_of(&v, linear_of(&v, V_WEIGHT), adapter), other_step = adapter[0].seed;
        assert_int_equal(seed[0] == seed[1] && seed[1] == seed[2], m == 0);
        assert_int_equal(seed[0] == seed[1] || seed[1] == seed[2], m == 0);
        assert_true(other_layer != seed[2] && other_step != seed[2]);
        free(layers);
        tiny_case_free(&c);
    }
}

// ---- a base in 4 bits -----------------------------------------------------------------------------------------------
static size_t decoded; // matrices

static void counting_dequantise(Stored *out, const void *record, const QuantFormat *format, size_t n) {
    decoded++;
    ops_device->dequantise(out, record, format, n);
}

// A layer is decoded once in forward and once in backward, whatever the chunks. A single token reads codes where they
// are.
TEST(a_visit_of_a_layer_decodes_it_once) {
    static const size_t length[] = {23}, chunks[] = {1000, 5};
    static const int32_t token[] = {3};
    const QuantFormat nf4 = {QUANT_NF4, 1, QUANT_BLOCK, DTYPE_FP32, {0}};
    TinyCase c = tiny_case(TINY_SHARED, 3);
    Storage storage;
    Ops ops = *ops_device;
    ops.dequantise = counting_dequantise;
    c.batch = tiny_batch(length, 1, c.model.config.vocab_size, 0, 3);
    storage_choose(&storage, &c.model, nf4, 0);
    size_t matrices = 0;
    for (size_t i = 0; i < c.model.parameter_count; i++) matrices += storage.format[i].type != QUANT_NONE;
    for (size_t i = 0; i < COUNT_OF(chunks); i++) {
        RunSettings settings = tiny_settings(&c, METHOD_STREAM, chunks[i], chunks[i]);
        TinyRun r;
        Cache cache;
        settings.storage = &storage, settings.backward = 1, settings.cache_tokens = 2;
        tiny_begin(&r, &ops, settings, NULL, c.adapters, &c.batch);
        ops.zero(r.s.memory.weights, storage.table.elements);
        decoded = 0;
        forward_backward(&r.s, &c.batch, 1, 1, NULL);
        if (decoded != 2 * matrices) test_fail("%zu times, not twice each of %zu matrices", decoded, matrices);
        cache_allocate(&cache, 1, 2), cache_begin(&cache, &r.s);
        decoded = 0;
        cache_feed(&cache, &r.s, 0, token, 1);
        if (decoded && ops.quantised_rows) test_fail("%zu matrices for one token", decoded);
        cache_end(&cache, &r.s), cache_free(&cache);
        tiny_end(&r);
    }
    storage_free(&storage);
    tiny_case_free(&c);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
