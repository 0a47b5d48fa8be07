/*
Documents that share prefixes, computed once (llmc/data/tree.h), against the same documents computed apart: loss, every
gradient, log-probabilities and metrics. In the double build they agree to 1e-12. Forests are drawn at random: forks
within forks, documents that are a prefix of another or equal to it, masks that differ.
*/
#include "llmc/files/weights.h"
#include "test/base/child.h"
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-4 : 0.1;
}

// ---- forests --------------------------------------------------------------------------------------------------------
typedef struct {
    Batch texts;   // with a tree, and without
    Batch apart;   // shares the memory of `texts`
    int32_t *next; // [N] targets before masks
} Forest;

static const Forest *sorted; // of order_texts

// Returns the leading rows that two documents share.
static size_t common_rows(const Forest *f, size_t a, size_t b) {
    const size_t *start = f->texts.document_start, n = min_size(text_length(&f->texts, a), text_length(&f->texts, b));
    size_t i = 0;
    while (i < n && f->texts.tokens[start[a] + i] == f->texts.tokens[start[b] + i] &&
           f->next[start[a] + i] == f->next[start[b] + i])
        i++;
    return i;
}

static int order_texts(const void *x, const void *y) {
    const size_t a = *(const size_t *)x, b = *(const size_t *)y, i = common_rows(sorted, a, b);
    const size_t *start = sorted->texts.document_start;
    const size_t length[2] = {text_length(&sorted->texts, a), text_length(&sorted->texts, b)};
    if (i == length[0] || i == length[1])
        return length[0] != length[1] ? (length[0] < length[1] ? -1 : 1) : (a > b) - (a < b);
    const int32_t s[2] = {sorted->texts.tokens[start[a] + i], sorted->texts.tokens[start[b] + i]};
    const int32_t t[2] = {sorted->next[start[a] + i], sorted->next[start[b] + i]};
    return s[0] != s[1] ? (s[0] > s[1]) - (s[0] < s[1]) : (t[0] > t[1]) - (t[0] < t[1]);
}

enum { LONGEST = 64 };

// Draws the tokens of a document: those of an earlier document up to a random place, then its own. Returns its rows.
static size_t draw_document(int32_t tokens[][LONGEST], const size_t *length, size_t d, size_t V, uint64_t seed) {
    size_t own = random_below(seed, 1, d, 14), from = 0;
    if (d && random_below(seed, 2, d, 5)) {
        const size_t other = random_below(seed, 3, d, d);
        from = min_size(random_below(seed, 4, d, length[other] + 2), LONGEST / 2);
        memcpy(tokens[d], tokens[other], from * sizeof(int32_t));
    }
    own = max_size(own, from < 2 ? 2 - from : 0);
    for (size_t t = 0; t < own; t++) tokens[d][from + t] = (int32_t)random_below(seed, 5, d * LONGEST + t, V);
    return from + own - 1;
}

// Draws a forest of documents with ids below V. pairs: the documents are pairs, or groups of two
static Forest forest_draw(uint64_t seed, size_t V, int pairs) {
    static int32_t tokens[16][LONGEST];
    size_t documents = 1 + random_below(seed, 6, 0, 9), length[16], N = 0;
    Forest f;
    if (pairs) documents += documents % 2;
    V = min_size(V, 2 + random_below(seed, 7, 0, 4));
    for (size_t d = 0; d < documents; d++) N += length[d] = draw_document(tokens, length, d, V, seed);
    f.texts = batch_allocate(N, documents), f.next = (int32_t *)case_memory(N * sizeof(int32_t));
    N = 0;
    for (size_t d = 0; d < documents; d++) {
        f.texts.document_start[d] = N;
        for (size_t t = 0; t < length[d]; t++, N++) {
            const int masked = t + 1 < length[d] && random_below(seed, 8, N, 3) == 0;
            f.texts.tokens[N] = tokens[d][t], f.next[N] = tokens[d][t + 1];
            f.texts.targets[N] = masked ? -1 : f.next[N];
            f.texts.loss_weight[N] = (float)(1 + random_below(seed, 9, N, 3));
        }
    }
    batch_set_positions(&f.texts);
    batch_allocate_tree(&f.texts, f.texts.N);
    Tree *tree = f.texts.room;
    for (size_t d = 0; d < documents; d++) tree->order[d] = d;
    sorted = &f;
    if (random_below(seed, 10, 0, 3)) qsort(tree->order, documents, sizeof(size_t), order_texts);
    for (size_t i = 1; i < documents; i++) tree->common[i] = common_rows(&f, tree->order[i - 1], tree->order[i]);
    f.apart = f.texts, f.texts.tree = tree_build(tree, &f.texts, tree->order, tree->common);
    return f;
}

// Draws forests from `seed` on until one has shared rows, and forks if `forks`.
static Forest forest_with(uint64_t seed, size_t V, int pairs, int forks) {
    for (;; seed += 1000) {
        Forest f = forest_draw(seed, V, pairs);
        if (f.texts.tree && (!forks || f.texts.tree->forks)) return f;
        batch_free(&f.texts);
    }
}

static void forest_free(Forest *f) { batch_free(&f->texts); }

// ---- the tree itself ------------------------------------------------------------------------------------------------
// Each document's pieces spell the document, on at most 1 + log2(documents) chains.
static void expect_texts(const Forest *f, const Tree *tree) {
    size_t most = 1, positions = 0;
    while (f->texts.documents >> most) most++;
    for (size_t d = 0; d < f->texts.documents; d++) {
        size_t t = f->texts.document_start[d];
        assert_true(tree->first_piece[d + 1] - tree->first_piece[d] <= most);
        for (size_t i = tree->first_piece[d]; i < tree->first_piece[d + 1]; i++)
            for (size_t j = 0; j < tree->piece[i].count; j++, t++) {
                const size_t row = tree->piece[i].begin + j;
                assert_int_equal(tree->rows.tokens[row], f->texts.tokens[t]);
                assert_int_equal(tree->rows.position[row], f->texts.position[t]);
                if (f->texts.targets[t] >= 0) assert_int_equal(tree->rows.targets[row], f->texts.targets[t]);
            }
        assert_int_equal(t, f->texts.document_start[d + 1]);
    }
    for (size_t r = 0; r < tree->rows.N; r++) positions += (size_t)tree->times[r];
    assert_int_equal(positions, f->texts.N);
}

// Tells whether a chain leaves a path at `fork`, or descends from a chain that does.
static int descends(const Tree *tree, size_t chain, size_t fork) {
    for (; tree->parent[chain] != SIZE_MAX; chain = tree->parent[chain])
        if (tree->fork[chain] == fork) return 1;
    return 0;
}

// Forks lie within chains, and their branches are contiguous.
static void expect_chains(const Tree *tree) {
    const size_t *start = tree->rows.document_start, *depth = tree->rows.depth;
    for (size_t c = 0; c < tree->rows.documents; c++) {
        const size_t p = tree->parent[c], fork = tree->fork[c];
        assert_true(start[c] < start[c + 1]);
        if (p == SIZE_MAX) {
            assert_int_equal(depth[c], 0);
            continue;
        }
        assert_true(p < c && fork > start[p] && fork < start[p + 1]);
        assert_int_equal(depth[c], depth[p] + fork - start[p]);
    }
    for (size_t i = 0, first, last, count; i < tree->forks; i++) {
        first = SIZE_MAX, last = count = 0;
        for (size_t c = 0; c < tree->rows.documents; c++)
            if (descends(tree, c, tree->fork_row[i])) first = min_size(first, c), last = c, count++;
        if (!count || last - first + 1 != count) test_fail("branches of fork %zu are not contiguous", i);
        assert_true(!i || tree->fork_row[i] > tree->fork_row[i - 1]);
    }
}

// Counts the distinct prefixes of a forest's documents: the fewest rows.
static size_t distinct_rows(const Forest *f) {
    size_t rows = 0;
    for (size_t d = 0; d < f->texts.documents; d++) {
        size_t seen = 0;
        for (size_t e = 0; e < d; e++) seen = max_size(seen, common_rows(f, d, e));
        rows += text_length(&f->texts, d) - seen;
    }
    return rows;
}

TEST(trees_spell_their_documents) {
    size_t forked = 0, fewest = 0;
    for (uint64_t seed = 0; seed < 10000; seed++) {
        test_case("forest %zu", (size_t)seed);
        Forest f = forest_draw(seed, 5, 0);
        const Tree *tree = f.texts.room;
        expect_texts(&f, tree), expect_chains(tree);
        if ((f.texts.tree == NULL) != (tree->rows.N == f.texts.N)) test_fail("%zu rows", tree->rows.N);
        int in_order = 1;
        sorted = &f;
        for (size_t i = 1; i < f.texts.documents; i++)
            in_order &= order_texts(&tree->order[i - 1], &tree->order[i]) < 0;
        const size_t least = distinct_rows(&f);
        if (tree->rows.N < least) test_fail("%zu rows for %zu distinct prefixes", tree->rows.N, least);
        if (in_order) assert_int_equal(tree->rows.N, least), fewest++;
        forked += tree->forks > 0;
        forest_free(&f);
    }
    if (forked < 4000 || fewest < 5000) test_fail("%zu forests have forks, %zu the fewest rows", forked, fewest);
}

// ---- runs -----------------------------------------------------------------------------------------------------------
typedef struct {
    TinyResult result;
    Metrics metrics;
    float *logp; // [N]
} Outcome;

static Outcome outcome_of(const TinyCase *c, RunSettings settings, const Batch *batch) {
    const Model *trained = tiny_table(c);
    Outcome out;
    memset(&out, 0, sizeof(out));
    out.result.elements = trained->elements;
    const TargetCounts counts = batch_count(batch);
    TinyRun r;
    settings.backward = 1, settings.reference = REFERENCE_MODEL;
    tiny_router_losses(&c->model, &settings);
    tiny_begin(&r, ops_device, settings, c->weights, c->adapters, batch);
    r.s.routes.micro_batches = 1;
    out.logp = (float *)case_memory(batch->N * sizeof(float));
    forward_policy(&r.s, batch, 0, out.logp);
    out.result.loss = forward_backward(&r.s, batch, objective_normaliser(&settings.objective, counts), 1, &out.metrics);
    out.result.gradient = device_read(ops_device, r.s.memory.gradients, settings.gradient_type, trained->elements);
    tiny_end(&r);
    return out;
}

static void expect_same(const TinyCase *c, const Forest *f, Outcome found, Outcome apart) {
    tiny_expect_same(tiny_table(c), found.result, apart.result, bound(), 0.1, 1e-2);
    for (size_t i = 0; i < apart.metrics.count; i++) {
        const Metric *m = &apart.metrics.metric[i];
        const double value = metric_value(m), other = metric_named(&found.metrics, m->name);
        if (isnan(value) && isnan(other)) continue;
        if (!(fabs(value - other) <= bound() * (fabs(value) + 1)))
            test_fail("%s is %.17g, apart %.17g", m->name, other, value);
    }
    for (size_t t = 0; t < f->texts.N; t++) // a masked position of a row that another document trains has a value
        if (f->texts.targets[t] >= 0 &&
            !(fabs((double)found.logp[t] - (double)apart.logp[t]) <= fmax(bound(), 1e-6) * fabs((double)apart.logp[t])))
            test_fail("log-probability %zu is %.9g, apart %.9g", t, (double)found.logp[t], (double)apart.logp[t]);
    free(found.result.gradient), free(apart.result.gradient);
}

// The dry run checks ranges of every call if it visits every chunk. It counts as many pairs as the dry run that visits
// one chunk of each length, which counts memory for merging calls in any chunk.
static void expect_plans(const RunSettings *settings, const Batch *batch) {
    RunSettings every = *settings;
    every.backward = 1, every.ridge = 1;
    RunSettings some = every;
    some.ridge = 0;
    const Plan a = plan_make(&every, batch), b = plan_make(&some, batch);
    const double pairs = a.counts.attention_forward + a.counts.attention_backward;
    const double counted = b.counts.attention_forward + b.counts.attention_backward;
    if (a.total_bytes > b.total_bytes || !(fabs(pairs - counted) <= 1e-12 * counted) ||
        !(fabs(a.counts.delta - b.counts.delta) <= 1e-12 * b.counts.delta))
        test_fail("plans of %zu and %zu bytes, %.17g and %.17g FLOPs of attention, %.17g and %.17g of states",
                  a.total_bytes, b.total_bytes, pairs, counted, a.counts.delta, b.counts.delta);
}

// ---- methods and levels ---------------------------------------------------------------------------------------------
// Compares a forest in a method, with what stays (tiny_keep) and chunks of this size.
static void forest_agrees(TinyCase *c, const char *text, Method method, size_t keep, size_t chunk, uint64_t seed) {
    Forest f = forest_with(seed, c->model.config.vocab_size, 0, seed % 8 > 0);
    const size_t logits[] = {1, 4, 9, 1000};
    RunSettings settings = tiny_settings(c, method, chunk, logits[seed % 4]);
    tiny_keep(&settings, keep);
    if (seed % 3 == 0) settings.inputs_every = 2;
    if (seed % 5 == 0) settings.place[PLACED_INPUTS] = PLACE_HOST;
    if (!method_recomputes(method)) settings.inputs_every = 1;
    if (!method_recomputes(method) || (method == METHOD_MST && strpbrk(c->model.config.layer_types, "BCFLp")))
        settings.place[PLACED_INPUTS] = PLACE_DEVICE; // mst off-device: only if each layer has an MLP, or none has
    test_case("%.60s, method %s, keep %zu, chunks %zu, seed %zu: %zu tokens, %zu rows, %zu forks", text,
              method_names[method], keep, chunk, (size_t)seed, f.texts.N, f.texts.tree->rows.N, f.texts.tree->forks);
    const Outcome apart = outcome_of(c, tiny_settings(c, METHOD_FULL, 0, 0), &f.apart);
    expect_same(c, &f, outcome_of(c, settings, &f.texts), apart);
    expect_plans(&settings, &f.texts);
    forest_free(&f);
}

// Runs methods x levels x chunks, under ALL_CASES all, else a tenth. number: of the model
static void model_agrees(TinyCase *c, const char *text, size_t number) {
    static const struct {
        Method method;
        size_t chunk;
    } runs[] = {{METHOD_STREAM, 1}, {METHOD_STREAM, 3},     {METHOD_STREAM, 7}, {METHOD_STREAM, 1000},
                {METHOD_MST, 3},    {METHOD_CHECKPOINT, 0}, {METHOD_FULL, 0}};
    for (size_t i = 0, at = 0; i < COUNT_OF(runs); i++)
        for (size_t keep = 0; keep < (runs[i].method == METHOD_FULL ? 1 : TINY_KEEPS); keep++, at++)
            if (all_cases() || (at * 7 + number * 3) % (EMULATED ? 40 : 10) == 0)
                forest_agrees(c, text, runs[i].method, keep, runs[i].chunk, 100 * number + at);
}

static void golden_agrees(const char *name, size_t number) {
    char path[64];
    TinyCase c = {0};
    snprintf(path, sizeof(path), "test/golden/%s", name);
    WeightSource *source = weights_open(path);
    c.model = model_build(&source->config, ops_device->stored);
    model_copy_constants(&c.model, &source->model);
    c.weights = (double *)checked_malloc(c.model.elements * sizeof(double), "weights");
    for (size_t i = 0; i < c.model.parameter_count; i++) {
        const Parameter *p = &c.model.parameters[i];
        weights_read(source, i, 0, parameter_elements(p), DTYPE_FP64, c.weights + p->offset);
    }
    c.settings.gradient_type = c.model.dtype;
    weights_close(source);
    model_agrees(&c, name, number);
    tiny_case_free(&c);
}

TEST(golden_models) {
    static const char *const names[] = {"gpt2",           "llama",
                                        "llama-tied",     "llama-linear",
                                        "llama3",         "qwen2",
                                        "qwen2-yarn",     "qwen2-sliding",
                                        "qwen3",          "qwen3-yarn",
                                        "mistral",        "mistral-full",
                                        "ministral3",     "mixtral",
                                        "gemma3",         "gemma3-linear",
                                        "gemma4",         "gemma4-e",
                                        "olmo2",          "olmo3",
                                        "glm4",           "glm4_moe",
                                        "glm4_moe_lite",  "granite",
                                        "phi3",           "smollm3",
                                        "gpt_oss",        "qwen3_moe",
                                        "qwen3_5",        "qwen3_5-yarn",
                                        "qwen3_5-heads",  "qwen3_5-one",
                                        "qwen3_5-linear", "qwen3_5-full",
                                        "qwen3_5_moe",    "seed_oss",
                                        "ernie4_5",       "hunyuan_v1_dense",
                                        "qwen3_next",     "nemotron_h",
                                        "muse_glimmer",   "lfm2",
                                        "lfm3",           "lfm2_moe",
                                        "olmo_hybrid",    "granitemoehybrid",
                                        "bamba",          "deepseek_v3",
                                        "mistral4"};
    for (size_t i = 0; i < COUNT_OF(names); i++) golden_agrees(names[i], i);
}

TEST(windows_and_states) {
    static const char *const models[] = {
        TINY_GEMMA ",sliding_window=9,layer_types=ssf",
        TINY_GEMMA ",sliding_window=2,layer_types=sfs",
        TINY_MISTRAL ",sliding_window=5",
        TINY_MISTRAL ",sliding_window=1",
        TINY_OLMO ",sliding_window=6",
        TINY_LLLF,
        TINY_LINEAR,
        TINY_MAMBA,
        TINY_GRANITE,
        TINY_HYBRID ",num_hidden_layers=2,layer_types=l,linear_num_value_heads=2,linear_conv_kernel_dim=2",
        TINY_SHORT ",linear_conv_kernel_dim=7",
        TINY_SHORT3,
        TINY_MIXED,
        TINY_SHARED,
        TINY_SINKS,
        TINY_BESIDE,
        TINY_OWN,
    };
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        TinyCase c = tiny_case(models[i], 0);
        model_agrees(&c, models[i], 50 + i);
        tiny_case_free(&c);
    }
}

// Mixers of families that are in no table (test_methods.c): one branch a block, two mixers summed, a convolution alone.
TEST(mixers_beyond_the_table) {
    static const char *const layers[] = {"FpL", "fbB", "lb", "Bp", "cfC", "Clc"};
    for (size_t i = 0; i < COUNT_OF(layers); i++) {
        Config config =
            config_from_text(TINY_HYBRID ",num_hidden_layers=3,linear_num_value_heads=2", "test", EXIT_USAGE);
        config.num_hidden_layers = strlen(layers[i]);
        snprintf(config.layer_types, sizeof(config.layer_types), "%s", layers[i]);
        TinyCase c = tiny_case_of(config, 0);
        model_agrees(&c, layers[i], 80 + i);
        tiny_case_free(&c);
    }
}

TEST(adapters) {
    static const char *const models[] = {TINY_QWEN3, TINY_LLLF, TINY_TIED, TINY_OWN};
    for (size_t i = 0; i < COUNT_OF(models); i++) {
        TinyCase c = tiny_case(models[i], 3);
        model_agrees(&c, models[i], 70 + i);
        tiny_case_free(&c);
    }
}

// ---- objectives -----------------------------------------------------------------------------------------------------
typedef struct {
    const char *text;
    ObjectiveKind kind;
    DpoLoss dpo_loss;
    Normalisation normalisation;
    double beta, temperature;
    int old;
} Tried;

static const Tried tried[] = {
    {"sft", OBJECTIVE_SFT, DPO_SIGMOID, NORMALISE_GRPO, 0, 1, 0},
    {"dpo", OBJECTIVE_DPO, DPO_SIGMOID, NORMALISE_GRPO, 0.3, 1, 0},
    {"dpo, ipo", OBJECTIVE_DPO, DPO_IPO, NORMALISE_GRPO, 0.5, 1, 0},
    {"dpo, hinge", OBJECTIVE_DPO, DPO_HINGE, NORMALISE_GRPO, 0.05, 1, 0},
    {"simpo", OBJECTIVE_SIMPO, DPO_SIGMOID, NORMALISE_GRPO, 2, 1, 0},
    {"orpo", OBJECTIVE_ORPO, DPO_SIGMOID, NORMALISE_GRPO, 0.4, 1, 0},
    {"kto", OBJECTIVE_KTO, DPO_SIGMOID, NORMALISE_GRPO, 0.3, 1, 0},
    {"grpo, old = current", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_GRPO, 0, 1, 0},
    {"grpo, KL, warm", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_GRPO, 0.1, 1.3, 1},
    {"grpo, bnpo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_BNPO, 0.1, 1, 1},
    {"grpo, dr_grpo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_DR_GRPO, 0, 0.7, 1},
    {"grpo, dapo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_DAPO, 0, 1, 1},
    {"gspo", OBJECTIVE_GSPO, DPO_SIGMOID, NORMALISE_GRPO, 0.1, 1, 1},
    {"gspo, bnpo", OBJECTIVE_GSPO, DPO_SIGMOID, NORMALISE_BNPO, 0, 1, 1},
    {"ppo", OBJECTIVE_PPO, DPO_SIGMOID, NORMALISE_BNPO, 0, 1, 1},
    {"cispo, KL", OBJECTIVE_CISPO, DPO_SIGMOID, NORMALISE_BNPO, 0.1, 1, 1},
};

static void set_objective(TinyCase *c, const Tried *t, int correction) {
    Objective *o = &c->settings.objective;
    o->kind = t->kind, o->dpo_loss = t->dpo_loss, o->normalisation = t->normalisation, o->beta = t->beta;
    o->gamma = 0.5, o->label_smoothing = 0.1, o->desirable_weight = 1, o->undesirable_weight = 0.8;
    o->clip_low = 0.2, o->clip_high = NAN, o->kl_correction = correction, o->temperature.divisor = t->temperature;
    o->completion_tokens = 12;
    objective_resolve(o);
}

// Adds what objectives over answers read; documents that share rows have values of their own there.
static void set_answers(Forest *f, const Tried *t, uint64_t seed) {
    Batch *b = &f->texts;
    if (t->kind == OBJECTIVE_SFT) return;
    batch_allocate_answers(b, 1, t->old);
    for (size_t d = 0; d < b->documents; d++) {
        b->group[d] = d / 2, b->reward[d] = (float)random_below(seed, 12, d, 2);
        for (size_t i = b->document_start[d]; i < b->document_start[d + 1]; i++) {
            b->advantage[i] = (float)random_normal(seed, 13, t->kind == OBJECTIVE_PPO ? i : d);
            b->reference[i] = (float)(-2 + random_normal(seed, 14, i));
            if (t->old) b->old[i] = (float)(-2 + random_normal(seed, 15, i));
        }
    }
    b->kl = t->kind == OBJECTIVE_KTO ? 0.4 : 0;
    f->apart = *b, f->apart.tree = NULL;
}

TEST(objectives) {
    static const char *const models[] = {TINY_QWEN3, TINY_LLLF, TINY_GEMMA ",sliding_window=4,layer_types=ssf"};
    static const Method methods[] = {METHOD_STREAM, METHOD_CHECKPOINT, METHOD_FULL, METHOD_MST};
    static const size_t chunks[] = {1, 3, 7, 1000};
    for (size_t i = 0; i < COUNT_OF(tried); i += EMULATED ? 5 : 1) {
        TinyCase c = tiny_case(models[i % 3], i % 4 == 1 ? 3 : 0);
        set_objective(&c, &tried[i], i % 2);
        for (size_t j = 0; j < 16; j++) {
            if (!all_cases() && (i + j) % 6) continue;
            Forest f = forest_with(300 + 16 * i + j, c.model.config.vocab_size, 1, 1);
            set_answers(&f, &tried[i], 300 + 16 * i + j);
            test_case("%s, method %s, chunks %zu: %zu tokens, %zu rows, %zu forks", tried[i].text,
                      method_names[methods[j / 4]], chunks[j % 4], f.texts.N, f.texts.tree->rows.N,
                      f.texts.tree->forks);
            const Outcome apart = outcome_of(&c, tiny_settings(&c, METHOD_FULL, 0, 0), &f.apart);
            const RunSettings settings = tiny_settings(&c, methods[j / 4], chunks[j % 4], chunks[(i + j) % 4]);
            expect_same(&c, &f, outcome_of(&c, settings, &f.texts), apart);
            forest_free(&f);
        }
        tiny_case_free(&c);
    }
}

// ---- routes ---------------------------------------------------------------------------------------------------------
// A row takes the routes of its first document: replayed they give the documents' gradients, else the share of routes
// that differ is counted for each document.
TEST(routes_of_the_batch) {
    for (uint64_t seed = 0; seed < 6; seed++) {
        TinyCase c = tiny_case(TINY_MIXED, 0);
        Forest f = forest_with(700 + seed, c.model.config.vocab_size, 0, 1);
        TextPart part[TEXT_PARTS];
        const Range all = {0, f.texts.tree->rows.N};
        batch_allocate_routes(&f.texts, 2, 2, seed % 2 == 0);
        for (size_t d = 0; d < f.texts.documents; d++)
            for (size_t i = text_parts(&f.texts, d, all, part); i-- > 0;)
                for (size_t j = 0; j < 2 * part[i].n; j++) {
                    uint16_t *route = batch_route(&f.texts, j % 2, part[i].text + j / 2);
                    route[0] = (uint16_t)random_below(seed, 16, 2 * part[i].row + j, 6);
                    route[1] = (uint16_t)((route[0] + 1 + random_below(seed, 17, 2 * part[i].row + j, 5)) % 6);
                }
        f.apart = f.texts, f.apart.tree = NULL;
        test_case("forest %zu, %s", (size_t)seed, seed % 2 == 0 ? "replayed" : "compared");
        const Outcome apart = outcome_of(&c, tiny_settings(&c, METHOD_FULL, 0, 0), &f.apart);
        expect_same(&c, &f, outcome_of(&c, tiny_settings(&c, METHOD_STREAM, 7, 5), &f.texts), apart);
        forest_free(&f), tiny_case_free(&c);
    }
}

// ---- refusals -------------------------------------------------------------------------------------------------------
typedef struct {
    TinyCase *c;
    Batch *batch;
    Method method;
} Refused;

static void run_refused(const void *context) {
    const Refused *r = (const Refused *)context;
    outcome_of(r->c, tiny_settings(r->c, r->method, 7, 5), r->batch);
}

// A method, or dropout, that would compute another loss than the documents' refuses a tree.
TEST(what_refuses_trees) {
    for (int drops = 0; drops < 2; drops++) {
        TinyCase c = tiny_case(TINY_QWEN3, drops ? 3 : 0);
        Forest f = forest_with(800, c.model.config.vocab_size, 0, 1);
        Refused refused = {&c, &f.texts, drops ? METHOD_STREAM : METHOD_SECO};
        c.lora.dropout = drops ? 0.1 : 0;
        const Child *child = run_child(run_refused, &refused);
        if (child->code != 1 || !strstr(child->err, "give --share-prefixes off"))
            test_fail("%d: %s", child->code, child->err);
        forest_free(&f), tiny_case_free(&c);
    }
}

// Runs a call of two spans in the dry run. context: first key of the second span
static void call_two_spans(const void *context) {
    Ops ops = ops_dry(DTYPE_FP32, NULL, 0, 0);
    const size_t first = *(const size_t *)context;
    const Span span[] = {{0, 4, 6, 0}, {first, 10, 12, 2}};
    const AttentionShape shape = {{span, 2, 0, 20}, 1, 1, 8, 1, all_keys, 0, 0, {0, 0}};
    ops.attention_forward(NULL, NULL, NULL, NULL, NULL, &shape, NULL);
}

TEST(spans_of_a_call_read_other_keys) {
    size_t apart = 6, same = 5;
    const Child *child = run_child(call_two_spans, &apart);
    if (child->code) test_fail("%s", child->err);
    child = run_child(call_two_spans, &same);
    if (child->code != 1 || !strstr(child->err, "read the same keys")) test_fail("%d: %s", child->code, child->err);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
