/*
The plan: its FLOPs and bytes equal those of the whole walk that it abbreviates; every tensor of every op is within a
region of the arena; memory per token follows the formula in streambp.h's method table; and planning is fast.
*/
#include "llmc/plan/plan.h"
#include "llmc/plan/flops.h"
#include "test/base/child.h"
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "test_attention_calls.h"

static Model planned_model(const char *text, DType dtype) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    return model_build(&config, dtype);
}

// Returns documents of these lengths, without tokens; valid for the next few calls.
static Batch shape_of(const size_t *length, size_t documents) {
    static size_t starts[4][8];
    static size_t next;
    Batch batch = {0};
    batch.documents = documents;
    batch.document_start = starts[next++ % COUNT_OF(starts)];
    for (size_t d = 0; d < documents; d++) batch.document_start[d + 1] = batch.document_start[d] + length[d];
    batch.N = batch.document_start[documents];
    return batch;
}

static const char *const models[] = {
    TINY_GPT2,
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=5,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=41",
    TINY_TIED,
    // with windows: in some layers, in all of them, of a single token, longer than the stream
    "gemma3,hidden_size=20,intermediate_size=24,num_hidden_layers=5,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,vocab_size=33,sliding_window=9,layer_types=ssf",
    TINY_MISTRAL ",sliding_window=20",
    "qwen3,hidden_size=12,intermediate_size=16,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=6,vocab_size=23,sliding_window=1,layer_types=fs",
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=1,vocab_"
    "size=31,sliding_window=1000000000,layer_types=s",
    TINY_OLMO ",sliding_window=5",
    TINY_BARE,
    TINY_HYBRID ",num_hidden_layers=5,linear_num_value_heads=6",
    TINY_SHAPES,
    "qwen3_moe,hidden_size=20,intermediate_size=24,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=8,vocab_size=31,num_experts=6,num_experts_per_tok=2,moe_intermediate_size=12,mlp_only_layers=1",
    "qwen3_5,hidden_size=12,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_"
    "dim=8,vocab_size=23,layer_types=l,linear_num_key_heads=1,linear_num_value_heads=1,linear_key_head_dim=4,linear_"
    "value_head_dim=8,linear_conv_kernel_dim=1",
    TINY_SINKS,
    TINY_HEADS,
    TINY_BESIDE,
    TINY_OWN,
    TINY_LATENT,
    TINY_NARROW,
};
#define MODELS COUNT_OF(models)

// Chunk-major orders have no keys that layers share.
static size_t methods_of(const Model *model) { return model->config.num_kv_shared_layers ? METHOD_SECO : METHOD_SPACO; }

static RunSettings pass_settings(const Model *model, size_t method, size_t chunk, int backward) {
    RunSettings settings = {0};
    settings.model = model, settings.method = (Method)method;
    settings.chunk = chunk, settings.logits_chunk = chunk ? 1 + chunk / 2 : 0, settings.latent_ranges = chunk % 2;
    settings.backward = backward, settings.gradient_type = model->dtype;
    return settings;
}

// Walks every layer and every chunk on op set "dry".
static void whole_walk(const RunSettings *settings, const Batch *batch, OpCounts *counts, size_t *peak) {
    Arena arena[PLACES];
    OptimizerState state;
    StreamBP s;
    const Shapes d = shapes_of(settings->model);
    arena_plan(arena);
    Ops ops = ops_dry(settings->model->dtype, arena, 0, 0);
    run_begin(&s, &state, settings, &ops, arena, batch);
    s.memory.walk.dry = 0;
    s.now.host_sums = checked_calloc(batch->N, sizeof(double), "values per token");
    if (batch->tree) {
        s.now.host_tree_rows = batch->tree->rows.N;
        s.now.host_rows = checked_calloc(batch->N, sizeof(double), "values per row");
        s.now.host_added = (double *)checked_calloc(batch->N, sizeof(double), "sums per row");
    }
    s.routes.host_sums = (double *)checked_calloc(1 + EXPERTS_MOST, sizeof(double), "sums of the routers");
    s.routes.host_count = (double *)checked_calloc(d.L * (1 + d.router.E), sizeof(double), "rows of each expert");
    forward_backward(&s, batch, 1, 1, NULL);
    gradient_squares(&s.memory);
    *counts = dry.counts, *peak = arena->peak;
    run_end(&s);
}

TEST(abbreviation_counts_the_same) {
    static const size_t length[] = {11, 1, 7, 30, 2, 13};
    static const size_t chunks[] = {1, 3, 7, 16, 21, 63, 64, 65, 1000};
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};
    for (size_t i = 0; i < MODELS; i++) {
        for (size_t t = 0; t < 3; t++) {
            SCOPED(model_free) Model model = planned_model(models[i], types[t]);
            Batch batch = tiny_batch(length, 6, 20, 0, 1);
            for (size_t method = 0; method < methods_of(&model); method++) {
                for (size_t j = 0; j < COUNT_OF(chunks); j++) {
                    OpCounts whole;
                    size_t peak;
                    RunSettings settings = pass_settings(&model, method, chunks[j], 1);
                    settings.logits_chunk = chunks[(j * 5 + 2) % 9];
                    test_case("model %zu, type %d, method %zu, chunk %zu", i, types[t], method, chunks[j]);
                    Plan plan = plan_make(&settings, &batch);
                    whole_walk(&settings, &batch, &whole, &peak);
                    const size_t rest = batch.N % chunks[j]; // a short one takes tokens of the one before
                    const int even = batch.N > chunks[j] && rest && rest < chunks[j] / 8;
                    if (plan.total_bytes < peak || (!even && plan.total_bytes > peak))
                        test_fail("plan %zu bytes, whole walk %zu", plan.total_bytes, peak);
                    const double allowed = even ? 0.05 : 1e-9; // blocks of the delta rule
                    if (!(fabs(plan.counts.flops - whole.flops) <= allowed * whole.flops))
                        test_fail("plan %.17g FLOP, whole walk %.17g", plan.counts.flops, whole.flops);
                    // the zeros of shared keys' gradients count as often as the chunk before them
                    if (!model.config.num_kv_shared_layers && !even &&
                        !(fabs(plan.counts.moved - whole.moved) <= allowed * whole.moved))
                        test_fail("plan moves %.17g bytes, whole walk %.17g", plan.counts.moved, whole.moved);
                }
            }
            batch_free(&batch);
        }
    }
}

// The same of adapters in a chunk-major order, which runs the products of the embedding's for each chunk.
TEST(abbreviation_counts_adapters) {
    static const size_t length[] = {30, 34};
    OpCounts whole;
    size_t peak;
    TinyCase c = tiny_case(TINY_TIED, 2);
    c.batch = tiny_batch(length, 2, c.model.config.vocab_size, 0, 1);
    c.settings.backward = 1;
    const RunSettings settings = tiny_settings(&c, METHOD_SECO, 7, 5);
    const Plan plan = plan_make(&settings, &c.batch);
    whole_walk(&settings, &c.batch, &whole, &peak);
    if (plan.total_bytes != peak) test_fail("plan %zu bytes, whole walk %zu", plan.total_bytes, peak);
    if (!(fabs(plan.counts.flops - whole.flops) <= 1e-9 * whole.flops))
        test_fail("plan %.17g FLOP, whole walk %.17g", plan.counts.flops, whole.flops);
    tiny_case_free(&c);
}

TEST(shares_add_up) {
    size_t length[] = {5000}, sum;
    SCOPED(model_free) Model model = planned_model("qwen3-8b", DTYPE_BF16);
    Batch batch = shape_of(length, 1);
    for (size_t method = 0; method < METHOD_AUTO; method++) {
        int share;
        RunSettings settings = pass_settings(&model, method, 0, 1);
        settings.optimizer = settings.master = 1, settings.sparse.keep = 1;
        Plan plan = plan_make(&settings, &batch);
        for (share = 0, sum = 0; share < SHARES; share++) sum += plan.share[share];
        if (sum != plan.total_bytes) test_fail("shares add up to %zu, total is %zu", sum, plan.total_bytes);
        if (plan.share[SHARE_WEIGHTS] < 2 * model.elements || plan.share[SHARE_WEIGHTS] > 2 * model.elements + 256)
            test_fail("weights take %zu bytes for %zu elements", plan.share[SHARE_WEIGHTS], model.elements);
        if (plan.share[SHARE_OPTIMIZER] < 12 * model.elements) test_fail("the optimizer takes too little");
        if (plan.model_flops > plan.counts.flops) test_fail("model FLOPs above executed FLOPs");
    }
}

// Bytes per token: L d s + d s + 2 k s + 2 k 4 + 20, and no more.
TEST(slope_per_token) {
    static const char *const names[] = {"qwen3-0.6b",  "qwen3-8b",   "qwen3-14b",
                                        "llama3.1-8b", "qwen2.5-7b", "gpt2,n_positions=1000000"};
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        for (size_t t = 0; t < 2; t++) {
            SCOPED(model_free) Model model = planned_model(names[i], types[t]);
            const Config *c = &model.config;
            size_t s = dtype_size(types[t]), near[] = {65536}, far[] = {262144},
                   k = c->num_key_value_heads * c->head_dim;
            Batch first = shape_of(near, 1), second = shape_of(far, 1);
            double formula = (double)((c->num_hidden_layers + 1) * c->hidden_size * s + 2 * k * s + 2 * k * 4 + 20);
            const RunSettings settings = pass_settings(&model, METHOD_STREAM, 0, 1);
            double slope =
                (double)(plan_make(&settings, &second).total_bytes - plan_make(&settings, &first).total_bytes) /
                (double)(far[0] - near[0]);
            printf("             %s, %s: %.0f bytes per token, %.4f of the formula\n", names[i], dtype_name(types[t]),
                   slope, slope / formula);
            if (!(slope <= formula + 1)) test_fail("%s: %.1f bytes per token, formula %.1f", names[i], slope, formula);
        }
    }
}

static size_t longest_in(const char *name, size_t limit, Method method) {
    SCOPED(model_free) Model model = planned_model(name, DTYPE_BF16);
    const RunSettings settings = pass_settings(&model, method, 0, 1);
    const Limits limits = device_limit(limit);
    return plan_longest(&settings, 1, 0, 0, &limits);
}

TEST(longest_is_the_boundary) {
    static const size_t gib[] = {33, 40, 78};
    for (size_t i = 0; i < 3; i++) {
        for (size_t method = 0; method < 3; method++) {
            size_t limit = gib[i] << 30, longest = longest_in("qwen3-8b", limit, (Method)method), at[] = {longest},
                   over[] = {longest + 1};
            SCOPED(model_free) Model model = planned_model("qwen3-8b", DTYPE_BF16);
            Batch fits = shape_of(at, 1), does_not = shape_of(over, 1);
            const RunSettings settings = pass_settings(&model, method, 0, 1);
            if (longest && plan_make(&settings, &fits).total_bytes > limit) test_fail("%zu tokens do not fit", longest);
            if (plan_make(&settings, &does_not).total_bytes <= limit) test_fail("%zu tokens fit too", longest + 1);
        }
    }
    if (longest_in("qwen3-8b", (size_t)1 << 30, METHOD_STREAM) != 0) test_fail("8B in 1 GiB");
}

TEST(answers_at_once) {
    size_t length[] = {1000000};
    SCOPED(model_free) Model model = planned_model("qwen3-32b", DTYPE_BF16);
    Batch batch = shape_of(length, 1);
    const Limits limits = device_limit((size_t)1 << 42);
    for (size_t chunk = 1; chunk <= 4096; chunk *= 8) {
        const clock_t begin = clock(); // of the CPU: others may be at work
        RunSettings settings = pass_settings(&model, METHOD_STREAM, chunk, 1);
        settings.logits_chunk = chunk, settings.optimizer = 1;
        plan_make(&settings, &batch);
        plan_longest(&settings, 1, 0, 0, &limits);
        const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        if (seconds > 0.5) test_fail("%g seconds with chunks of %zu", seconds, chunk);
    }
}

// The dry op set checks ranges: a walk must die if its arena is too small for one op's tensor.
static void too_far(const void *context) {
    const char *name = (const char *)context;
    const Norm norm = {1e-6, 0, NORM_RMS};
    Arena arena[PLACES];
    arena_plan(arena);
    char *x = (char *)arena_push(arena, SHARE_WORKSPACE, "x", 100 * 64, 4);
    char *w = (char *)arena_push(arena, SHARE_WORKSPACE, "w", 64, 4);
    Ops ops = ops_dry(DTYPE_FP32, arena, 0, 0);
    ops.norm_forward((Stored *)x, (Stored *)x, (Stored *)w, NULL, NULL, 100, 64, norm); // fits
    if (!strcmp(name, "one row too many"))
        ops.norm_forward((Stored *)x, (Stored *)x, (Stored *)w, NULL, NULL, 101, 64, norm);
    if (!strcmp(name, "popped")) {
        arena_pop(arena, 1);
        ops.norm_forward((Stored *)x, (Stored *)x, (Stored *)w, NULL, NULL, 100, 64, norm);
    }
}

// The last two chunks share their tokens if the last would be short.
TEST(chunks_are_even) {
    // tokens, chunks of the CPU's 1024, tokens of the last two of them
    static const size_t cases[][4] = {{1025, 2, 640, 385},     {1100, 2, 640, 460},   {1151, 2, 640, 511},
                                      {1152, 2, 1024, 128},    {2048, 2, 1024, 1024}, {2049, 3, 640, 385},
                                      {131100, 129, 640, 412}, {5121, 6, 640, 385},   {2176, 3, 1024, 128}};
    const Setup setup = {.method = METHOD_STREAM, .chunk = ops_device->chunk};
    StreamBP s = {.setup = &setup};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const size_t *c = cases[i];
        test_case("%zu tokens", c[0]);
        s.now.own[0].count = c[0];
        assert_int_equal(range_chunks(&s, 0, setup.chunk), c[1]);
        for (size_t index = 0, begin = 0; index < c[1]; index++) {
            const Range tokens = range_chunk_tokens(&s, 0, index, setup.chunk);
            assert_int_equal(tokens.begin, begin);
            assert_int_equal(tokens.count, index + 2 < c[1] ? setup.chunk : c[2 + (index + 1 == c[1])]);
            begin += tokens.count;
        }
    }
    // and a run uses them
    const size_t length[] = {1025};
    SCOPED(tiny_case_free) TinyCase c = tiny_case(models[1], 0);
    c.batch = tiny_batch(length, 1, c.model.config.vocab_size, 1, 11);
    TinyResult even = tiny_case_run(&c, METHOD_STREAM, 1024, 512, &c.batch, 1);
    TinyResult same = tiny_case_run(&c, METHOD_STREAM, 640, 512, &c.batch, 1);
    const size_t bytes = even.elements * sizeof(double);
    if (memcmp(even.gradient, same.gradient, bytes) != 0) test_fail("the last chunks are not of 640 and 385 tokens");
    free(even.gradient), free(same.gradient);
}

// A run is planned for the largest stream of its data. Anything shorter, in any number of documents, must fit into the
// plan.
TEST(shorter_streams_need_no_more) {
    const size_t sparse = all_cases() ? 1 : 5;
    static const char *const wide[] = {"qwen3-0.6b,num_hidden_layers=2", "gpt2,num_hidden_layers=1",
                                       ("llama,hidden_size=128,intermediate_size=352,num_hidden_layers=2,num_attention_"
                                        "heads=16,num_key_value_heads=1,head_dim=16,vocab_size=300")};
    static const size_t longest[] = {300, 1024, 1023, 6000}, chunks[] = {0, 64, 100, 513};
    size_t plans = 0;
    for (size_t m = 0; m < MODELS + 3; m++) {
        if (!all_cases() && m % 2 != (ops_device->stored == DTYPE_BF16)) continue; // the other build's
        SCOPED(model_free)
        Model model = planned_model(m < MODELS ? models[m] : wide[m - MODELS], m % 2 ? DTYPE_BF16 : DTYPE_FP32);
        for (size_t method = 0; method < methods_of(&model); method++) {
            for (size_t c = 0; c < (method_has_chunks((Method)method) ? 4u : 1u); c++) {
                for (size_t l = 0; l < 4; l++) {
                    RunSettings settings = pass_settings(&model, method, chunks[c], l != 2);
                    if (method == METHOD_SECO && (m + l) % 3) continue;
                    size_t whole = longest[l];
                    Batch batch = shape_of(&whole, 1);
                    size_t most = plan_make(&settings, &batch).total_bytes;
                    test_case("model %zu, method %zu, chunk %zu, up to %zu", m, method, chunks[c], whole);
                    for (size_t N = whole; N > 0;
                         N -= 1 + min_size(test_random_below(whole > 1100 ? 60 : sparse), N - 1)) {
                        size_t length[2];
                        length[0] = 1 + test_random_below(N), length[1] = N - length[0];
                        batch = shape_of(length, 2);
                        size_t bytes = plan_make(&settings, &batch).total_bytes;
                        if (bytes > most) test_fail("%zu positions need %zu bytes, the longest %zu", N, bytes, most);
                        plans++;
                    }
                }
            }
        }
    }
    printf("             %zu plans\n", plans);
}

// The formula of flops.h equals the dry walk's count to the bit; within rounding with spaco's share.
TEST(formula_counts_what_the_walk_counts) {
    static const size_t lengths[4][5] = {{300, 0, 0, 0, 0}, {1, 100, 64, 33, 2}, {1, 1, 1, 1, 1}, {64, 64, 64, 0, 0}};
    static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_GRPO, OBJECTIVE_DPO, OBJECTIVE_KTO};
    static const size_t chunks[] = {0, 64, 7};
    const size_t step = all_cases() ? 1 : 5; // coprime to the factors below
    size_t walks = 0;
    for (size_t m = 0; m < MODELS; m++) {
        SCOPED(model_free) Model model = planned_model(models[m], DTYPE_FP32);
        const int lends = model.config.num_kv_shared_layers > 0;
        Lora lora = {0};
        lora.rank = 3, lora.alpha = 6, lora.modules = lora_modules(model.config.family, "all", "test", EXIT_USAGE);
        if (m % 2) lora_vary(&lora, &model.config);
        lora_build(&lora, &model);
        for (size_t i = 0; i < 3 * 3 * 3 * 4 * 2 * 3; i += step) { // method, keep, chunk, lengths, adapters, ranks
            const Method method = i / 216 || lends ? (Method)(i % 3) : (Method)(i % 3 + i / 27 % 2 * 3);
            RunSettings settings = pass_settings(&model, method, chunks[i / 9 % 3], 1);
            Batch batch = shape_of(lengths[i / 27 % 4], 5);
            settings.sparse.keep = 0.25;
            const size_t keeps = method > METHOD_CHECKPOINT || i / 216 ? 3 : TINY_KEEPS; // sp takes attention alone
            tiny_keep(&settings, method_is_chunk_major(method) ? 0 : (i / 3 + i / 27 * 2 + m) % keeps);
            settings.inputs_every = method_recomputes(method) ? 1 + i % 4 : 1;
            settings.lora = i / 108 % 2 ? &lora : NULL;
            settings.objective.kind = kinds[i % 7 % 4];
            const int mismatched = objective_needs_mismatched(&settings.objective);
            settings.reference = i % 5 && !mismatched ? REFERENCE_NOT_COMPUTED : REFERENCE_BASE;
            settings.world.ranks = settings.world.sp = i / 216 ? 3 : 1;
            settings.ring = i / 216 == 2 && !lora.each;
            test_case("model %zu, case %zu", m, i);
            const double walked = plan_make(&settings, &batch).counts.flops;
            const double found = flops_forward_backward(&settings, &batch) +
                                 (settings.reference ? (1 + mismatched) * flops_forward(&settings, &batch, 0) : 0) +
                                 (mismatched ? flops_forward(&settings, &batch, 1) : 0);
            if (!(fabs(found - walked) <= (method == METHOD_SPACO ? 1e-14 * walked : 0)))
                test_fail("%.17g FLOP by the formula, the walk counts %.17g", found, walked);
            settings.backward = 0, settings.reference = REFERENCE_NOT_COMPUTED, settings.objective.kind = OBJECTIVE_SFT;
            const double forward = plan_make(&settings, &batch).counts.flops;
            if (!(fabs(flops_forward(&settings, &batch, 1) - forward) <= 0))
                test_fail("%.17g FLOP forward by the formula", flops_forward(&settings, &batch, 1));
            walks++;
        }
        lora_free(&lora);
    }
    printf("             %zu walks\n", walks);
}

// Cost per token between two lengths: bytes of keys and values in evaluation, FLOPs of a pass in training.
typedef struct {
    double kv, flops;
} Growth;

static Growth growth(const char *text, size_t near, size_t far) {
    SCOPED(model_free) Model model = planned_model(text, DTYPE_BF16);
    RunSettings settings = pass_settings(&model, METHOD_STREAM, 256, 1);
    Batch first = shape_of(&near, 1), second = shape_of(&far, 1);
    Plan a = plan_make(&settings, &first), b = plan_make(&settings, &second);
    const double tokens = (double)(far - near);
    Growth g;
    g.flops = (b.counts.flops - a.counts.flops) / tokens;
    settings.backward = 0;
    a = plan_make(&settings, &first), b = plan_make(&settings, &second);
    g.kv = ((double)b.share[SHARE_KV] - (double)a.share[SHARE_KV]) / tokens;
    return g;
}

// With windows in all layers, keys and values of the stream's length disappear, and a token's attention costs the
// window's pairs.
TEST(windows_bound_memory_and_flops) {
#define WIDE                                                                                                           \
    ",hidden_size=128,intermediate_size=256,num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=2,head_dim=" \
    "32,vocab_size=128"
    const double heads = 4 * 32, near = 65536, far = 131072, window = 512, pairs = (near + far + 1) / 2;
    const double seen[] = {6 * pairs, 6 * window, 2 * window + 4 * pairs, 5 * window + pairs};
    const Growth full = growth("qwen3" WIDE, 65536, 131072);
    const Growth some[] = {full, growth("qwen3" WIDE ",sliding_window=512,layer_types=s", 65536, 131072),
                           growth("qwen3" WIDE ",sliding_window=512,layer_types=sff", 65536, 131072),
                           growth("qwen3" WIDE ",sliding_window=512,layer_types=sssssf", 65536, 131072)};
    assert_true(full.kv == 2 * 2 * 32 * 2); // keys and values of one layer in bf16
    for (size_t i = 0; i < 4; i++) {
        const double expected = full.flops - 18 * heads * (seen[0] - seen[i]); // 4 forward, 4 again, 10 backward
        test_case("model %zu", i);
        if (some[i].kv != (i == 1 ? 0 : full.kv)) test_fail("keys and values grow by %g bytes a token", some[i].kv);
        if (!(fabs(some[i].flops - expected) <= 1e-9 * full.flops))
            test_fail("%.17g FLOP a token, expected %.17g", some[i].flops, expected);
    }
#undef WIDE
}

// Bytes per token of a hybrid: layer inputs and dx; the larger of one full-attention layer's K, V with gradients and
// one linear layer's states; 20 of the batch.
TEST(hybrids_grow_by_the_formula) {
    static const char *const texts[] = {"qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-9b,layer_types=l",
                                        "qwen3.5-9b,num_key_value_heads=1,head_dim=32"};
    static const size_t chunks[] = {256, 1000, 1024, 4096};
    for (size_t i = 0; i < COUNT_OF(texts) * COUNT_OF(chunks); i++) {
        const size_t near = 1 << 20, far = 1 << 21, chunk = chunks[i % 4];
        SCOPED(model_free) Model model = planned_model(texts[i / 4], DTYPE_BF16);
        RunSettings settings = pass_settings(&model, METHOD_STREAM, chunk, 1);
        const Shapes d = shapes_of(&model);
        const Batch first = shape_of(&near, 1), second = shape_of(&far, 1);
        const double interval = (double)((1024 + chunk - 1) / chunk * chunk),
                     state = (double)(4 * d.linear.S + 2 * d.linear.columns);
        const double kv = i / 4 == 2 ? 0 : (double)(2 * d.KV * (2 + 4)), states = state / interval;
        const double expected = (double)((d.L + 1) * d.C * 2 + 20) + fmax(kv, states);
        const Plan a = plan_make(&settings, &first), b = plan_make(&settings, &second);
        const double found = ((double)b.total_bytes - (double)a.total_bytes) / (double)(far - near);
        test_case("%s, chunk %zu", texts[i / 4], chunk);
        if (!(fabs(found - expected) <= 5e-3 * expected)) test_fail("%.17g bytes, not %.17g", found, expected);
        const double linear =
            (b.counts.flops - a.counts.flops) / (a.counts.flops / (double)near) / (double)(far - near);
        if (i / 4 == 2 && !(fabs(linear - 1) <= 1e-3)) test_fail("FLOPs grow by %g of the mean", linear);
    }
}

// Bytes per token of seco: K, V and gradients of full-attention layers; windowed K, V before each chunk (of all tokens
// if windows exceed chunks); the states before each chunk; 20 of the batch.
TEST(chunk_major_grows_by_the_formula) {
    static const char *const texts[] = {"qwen3-8b", "qwen2.5-7b", "qwen3.5-9b", "gemma3-12b"};
    static const size_t chunks[] = {256, 1024, 4096};
    for (size_t i = 0; i < COUNT_OF(texts) * COUNT_OF(chunks); i++) {
        const size_t near = 1 << 18, far = 1 << 19, chunk = chunks[i % 3];
        SCOPED(model_free) Model model = planned_model(texts[i / 3], DTYPE_BF16);
        const RunSettings settings = pass_settings(&model, METHOD_SECO, chunk, 1);
        const Config *c = &model.config;
        const Shapes d = shapes_of(&model);
        const Batch first = shape_of(&near, 1), second = shape_of(&far, 1);
        const double full = (double)layers_of_kind(c, LAYER_FULL), linear = (double)layers_of_kind(c, LAYER_LINEAR);
        const double windows = (double)layers_of_kind(c, LAYER_WINDOW);
        const double borders = fmin(((double)c->sliding_window - 1) / (double)chunk, 1);
        const double expected = full * (double)(2 * d.KV * (2 + 4)) + windows * borders * (double)(2 * d.KV * 2) +
                                linear * (double)(4 * d.linear.S + 2 * d.linear.columns) / (double)chunk + 20;
        const Plan a = plan_make(&settings, &first), b = plan_make(&settings, &second);
        const double found = ((double)b.total_bytes - (double)a.total_bytes) / (double)(far - near);
        test_case("%s, chunk %zu", texts[i / 3], chunk);
        if (!(fabs(found - expected) <= 5e-3 * expected)) test_fail("%.17g bytes, not %.17g", found, expected);
    }
}

// A process alone shards nothing in any stage.
TEST(stages_are_nothing_alone) {
    static const size_t length[] = {11, 30};
    for (size_t i = 0; i < MODELS; i++) {
        SCOPED(model_free) Model model = planned_model(models[i], DTYPE_BF16);
        Batch batch = shape_of(length, 2);
        RunSettings settings = {0};
        settings.model = &model, settings.method = METHOD_STREAM, settings.chunk = 7, settings.logits_chunk = 7;
        settings.backward = settings.optimizer = 1, settings.gradient_type = i % 2 ? DTYPE_BF16 : DTYPE_FP32;
        settings.moment_type = DTYPE_FP32;
        Plan alone = plan_make(&settings, &batch);
        for (size_t zero = 1; zero < 4; zero++) {
            settings.world.ranks = 1, settings.world.zero = zero;
            assert_int_equal(plan_make(&settings, &batch).total_bytes, alone.total_bytes);
            Traffic sent = plan_traffic(&settings, &batch, 2);
            for (int kind = 0; kind < TRAFFIC_KINDS; kind++)
                assert_true(sent.bytes[kind] == 0 && sent.calls[kind] == 0);
        }
    }
}

TEST(ranges_are_checked) {
    assert_int_equal(run_child(too_far, "nothing")->code, 0);
    assert_int_equal(run_child(too_far, "one row too many")->code, EXIT_RUNTIME); // it ends in the next region
    assert_int_equal(run_child(too_far, "popped")->code, EXIT_RUNTIME);           // in a dead region
}

#include "test_plan_tree.h"

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
