/*
Objectives: losses, weights and metrics match TRL (test/golden/objectives.json). Weights are the derivatives of losses.
Cutting a step into streams and chunks changes nothing.
*/
#include "objective_streams.h"
#include "test/base/child.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

// ---- any stream -----------------------------------------------------------------------------------------------------
TEST(weights_are_the_derivatives) {
    const double h = 1e-5;
    Evaluated e;
    for (size_t i = 0; evaluated_at(i, &e); i++) {
        const double size = rms(e.weight, e.N);
        assert_true(size > 0);
        if (e.o.kind == OBJECTIVE_CISPO) continue; // its ratio is a weight without a gradient: TRL's values check it
        for (size_t t = 0; t < e.N; t++) {
            double loss[2], was = e.s.logp[t];
            for (int up = 0; up < 2; up++) {
                e.s.logp[t] = was + (up ? h : -h);
                loss[up] = objective_loss(&e.o, &e.s.batch, e.Z, e.s.logp, NULL, DTYPE_FP64, NULL);
            }
            e.s.logp[t] = was;
            expect_close("weight", t, e.weight[t], (loss[1] - loss[0]) / (2 * h), size,
                         type == DTYPE_FP64 ? 1e-8 : 1e-6);
        }
    }
}

// ---- TRL's values ---------------------------------------------------------------------------------------------------
static cJSON *golden_read(void) {
    const char *path = "test/golden/objectives.json";
    size_t length;
    char *text = input_read_text(path, 1 << 20, &length);
    cJSON *golden = json_parse_object(text, length, path);
    free(text);
    return golden;
}

static double golden_number(const cJSON *object, const char *key, double otherwise) {
    const cJSON *item = json_get(object, key);
    if (item && !cJSON_IsNumber(item)) test_fail("\"%s\" is not a number", key);
    return item ? item->valuedouble : otherwise;
}

static double *golden_list(const cJSON *object, const char *key, size_t count) {
    const cJSON *list = json_get(object, key), *item;
    double *values = case_doubles(count);
    size_t i = 0;
    if (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) != count)
        test_fail("\"%s\" has not %zu values", key, count);
    cJSON_ArrayForEach(item, list) values[i++] = item->valuedouble;
    return values;
}

static void golden_floats(const cJSON *object, const char *key, size_t count, float *out) {
    double *values = golden_list(object, key, count);
    for (size_t i = 0; i < count; i++) out[i] = (float)values[i];
}

static Stream golden_stream(const cJSON *object) {
    size_t documents = (size_t)cJSON_GetArraySize(json_get(object, "group")), length[64];
    double *start = golden_list(object, "document_start", documents + 1);
    for (size_t d = 0; d < documents; d++) length[d] = (size_t)(start[d + 1] - start[d]);
    Stream s = stream_allocate(length, documents);
    double *counted = golden_list(object, "counted", s.batch.N), *group = golden_list(object, "group", documents);
    for (size_t t = 0; t < s.batch.N; t++) s.batch.targets[t] = counted[t] != 0 ? 1 : -1, s.batch.loss_weight[t] = 1;
    for (size_t d = 0; d < documents; d++) s.batch.group[d] = (size_t)group[d];
    s.logp = golden_list(object, "logp", s.batch.N), s.entropy = golden_list(object, "entropy", s.batch.N);
    golden_floats(object, "reference", s.batch.N, s.batch.reference);
    golden_floats(object, "old", s.batch.N, s.batch.old);
    return s;
}

static int golden_word(const cJSON *object, const char *key, const char *const *names, int count) {
    const cJSON *item = json_get(object, key);
    int i = 0;
    while (item && i < count && strcmp(names[i], item->valuestring) != 0) i++;
    return i;
}

static Objective golden_objective(const cJSON *object) {
    Objective o = make((ObjectiveKind)golden_word(object, "objective", objective_names, OBJECTIVES), 0);
    o.dpo_loss = (DpoLoss)golden_word(object, "dpo_loss", dpo_loss_names, DPO_LOSSES);
    o.normalisation = (Normalisation)golden_word(object, "normalisation", normalisation_names, NORMALISATIONS);
    o.beta = golden_number(object, "beta", NAN), o.gamma = golden_number(object, "gamma", NAN);
    o.clip_low = golden_number(object, "clip_low", NAN), o.clip_high = golden_number(object, "clip_high", NAN);
    o.label_smoothing = golden_number(object, "label_smoothing", 0);
    o.kto_loss = (KtoLoss)golden_word(object, "kto_loss", kto_loss_names, KTO_LOSSES);
    o.desirable_weight = golden_number(object, "desirable_weight", 1);
    o.undesirable_weight = golden_number(object, "undesirable_weight", 1);
    o.kl_correction = cJSON_IsTrue(json_get(object, "kl_correction"));
    o.completion_tokens = golden_number(object, "completion_tokens", NAN);
    return o;
}

// TRL has some metrics in fp32.
static void check_golden_metrics(const cJSON *expected, const Metrics *metrics) {
    const cJSON *item;
    assert_true(cJSON_GetArraySize(expected) > 0);
    cJSON_ArrayForEach(item, expected)
        expect_close(item->string, 0, metric_of(metrics, item->string), item->valuedouble, 0, 1e-6);
}

static void check_golden_case(const cJSON *expected, Stream *s) {
    Objective o = golden_objective(expected);
    double *weight = case_doubles(s->batch.N), *correct = golden_list(expected, "weight", s->batch.N), size = 0;
    Metrics metrics = {0};
    double loss = evaluate(&o, s, normaliser(&o, s, 1), weight, &metrics);
    expect_close("loss", 0, loss, golden_number(expected, "loss", NAN), 0.01, precision());
    for (size_t t = 0; t < s->batch.N; t++) size = fmax(size, fabs(correct[t]));
    for (size_t t = 0; t < s->batch.N; t++) expect_close("weight", t, weight[t], correct[t], size, precision());
    check_golden_metrics(json_get(expected, "metrics"), &metrics);
}

static void check_golden_cases(const char *list, const char *data, int count) {
    cJSON *golden = golden_read();
    const cJSON *expected, *documents = json_get(golden, data);
    cJSON_ArrayForEach(expected, json_get(golden, list)) {
        const Objective o = golden_objective(expected);
        const cJSON *advantage = json_get(expected, "advantage");
        test_case("%s %s %s beta=%g", objective_names[o.kind], dpo_loss_names[o.dpo_loss],
                  normalisation_names[o.normalisation], o.beta);
        Stream s = golden_stream(documents);
        if (advantage) {
            const char *key = !strcmp(advantage->valuestring, "token") ? "token_advantage" : "document_advantage";
            golden_floats(documents, key, s.batch.N, s.batch.advantage);
            if (!cJSON_IsTrue(json_get(expected, "old"))) s.batch.old = NULL;
            if (o.beta == 0) s.batch.reference = NULL; // must work without
            const cJSON *masked;
            cJSON_ArrayForEach(masked, json_get(expected, "masked")) {
                const size_t d = (size_t)masked->valueint, *start = s.batch.document_start;
                for (size_t i = start[d]; i < start[d + 1]; i++) s.batch.loss_weight[i] = 0;
            }
        }
        if (o.kind == OBJECTIVE_KTO) {
            golden_floats(documents, "label", s.batch.documents, s.batch.reward);
            s.batch.kl = golden_number(expected, "kl", NAN);
        }
        check_golden_case(expected, &s);
    }
    assert_int_equal(cJSON_GetArraySize(json_get(golden, list)), count);
    cJSON_Delete(golden);
}

TEST(trl_pairs) { check_golden_cases("pair_cases", "pairs", 17); }

TEST(trl_labels) { check_golden_cases("label_cases", "pairs", 6); }

TEST(trl_groups) { check_golden_cases("group_cases", "groups", 44); }

TEST(trl_corrected_groups) { check_golden_cases("corrected_cases", "groups", 16); }

TEST(trl_advantages) {
    static const char *const keys[] = {"centred", "scaled"};
    cJSON *golden = golden_read();
    const cJSON *groups = json_get(golden, "groups");
    double found[4];
    float reward[8];
    golden_floats(groups, "reward", 8, reward);
    for (int scale = 0; scale < 2; scale++) {
        const double *expected = golden_list(groups, keys[scale], 8);
        for (size_t i = 0; i < 8; i++) {
            group_advantages(reward + i / 4 * 4, 4, scale, found);
            expect_close(keys[scale], i, found[i % 4], expected[i], 1, 1e-14);
        }
    }
    cJSON_Delete(golden);
}

// ---- cutting a step changes nothing ---------------------------------------------------------------------------------
TEST(ranges_give_the_weights_of_the_whole) {
    const size_t size = dtype_size(type);
    Evaluated e;
    for (size_t i = 0; evaluated_at(i, &e); i++) {
        void *whole = typed(e.s.logp, e.N, type), *parts = typed(e.s.logp, e.N, type);
        objective_weights(&e.o, &e.s.batch, e.Z, 0, e.N, whole, whole, type); // in place
        assert_memory_equal(whole, typed(e.weight, e.N, type), e.N * size);
        if (objective_weights_wait(&e.o) == WEIGHTS_BY_SEQUENCE) continue;
        for (size_t begin = 0, n; begin < e.N; begin += n) {
            n = 1 + test_random_below(min_size(9, e.N - begin));
            void *part = case_memory(n * size); // no larger
            memcpy(part, (char *)parts + begin * size, n * size);
            objective_weights(&e.o, &e.s.batch, e.Z, begin, n, part, part, type);
            memcpy((char *)parts + begin * size, part, n * size);
        }
        assert_memory_equal(whole, parts, e.N * size);
    }
}

// Six groups as streams of three, one and two, in another order: the same loss, metrics and bits of weights.
TEST(streams_and_their_order_do_not_matter) {
    static const size_t order[] = {5, 3, 4, 0, 2, 1}, first[] = {0, 3, 4}, groups[] = {3, 1, 2};
    Evaluated e;
    for (size_t i = 0; evaluated_at(i, &e); i++) {
        const size_t members = e.s.batch.documents / 6, *start = e.s.batch.document_start;
        size_t document[64];
        double *found = case_doubles(e.N), sum = 0;
        Stream part[3];
        Metrics parts = {0};
        for (size_t d = 0; d < e.s.batch.documents; d++) document[d] = order[d / members] * members + d % members;
        for (size_t k = 0; k < 3; k++) part[k] = stream_of(&e.s, document + first[k] * members, groups[k] * members);
        double Z = normaliser(&e.o, part, 3);
        expect_close("Z", 0, Z, e.Z, 0, 1e-15);
        for (size_t k = 0; k < 3; k++) {
            const size_t *begin = part[k].batch.document_start, *of = document + first[k] * members;
            sum += evaluate(&e.o, &part[k], Z, found, &parts);
            for (size_t d = 0; d < part[k].batch.documents; d++)
                for (size_t t = begin[d]; t < begin[d + 1]; t++)
                    expect_close("weight", t, found[t], e.weight[start[of[d]] + t - begin[d]], 0, 0);
        }
        expect_close("loss", 0, sum, e.loss, 0.1, 1e-14);
        assert_int_equal(parts.count, e.metrics.count);
        for (size_t k = 0; k < parts.count; k++) {
            const Metric *a = &parts.metric[k], *b = &e.metrics.metric[k];
            assert_string_equal(a->name, b->name);
            expect_close(a->name, 0, a->sum, b->sum, 1, 1e-13);
            expect_close(a->name, 1, a->count, b->count, 0, 1e-14);
        }
    }
}

TEST(metrics_of_completions) {
    static const size_t length[] = {3, 2, 1};
    Objective o = make_policy(OBJECTIVE_GRPO, NORMALISE_GRPO, 0);
    Stream s = stream_allocate(length, 3);
    Metrics m = {0};
    for (size_t t = 0; t < 6; t++)
        s.batch.targets[t] = t != 2 && t != 5 ? 1 : -1, s.batch.loss_weight[t] = 1, s.entropy[t] = (double)t;
    s.batch.old[0] = -1.0f, s.batch.advantage[0] = 1;  // ratio e: above the upper bound
    s.batch.old[1] = -1.0f, s.batch.advantage[1] = -1; // counted as clipped all the same
    s.batch.old[3] = 1.0f, s.batch.advantage[3] = -1;  // ratio 1/e: below the lower bound
    s.batch.advantage[4] = 1;
    s.batch.reference[4] = -1, s.batch.reward[0] = 3, s.batch.reward[1] = -4, s.batch.reward[2] = 4;
    evaluate(&o, &s, normaliser(&o, &s, 1), NULL, &m);
    assert_true(metric_of(&m, "clip_ratio/region_mean") == 0.5 && metric_of(&m, "clip_ratio/low_mean") == 0.25);
    assert_true(metric_of(&m, "clip_ratio/high_mean") == 0.25 && metric_of(&m, "completions/mean_length") == 4.0 / 3);
    assert_true(metric_of(&m, "reward") == 1 && metric_of(&m, "entropy") == 2); // (0 + 1 + 3 + 4) / 4
    expect_close("ratio", 0, metric_of(&m, "ratio"), (2 * exp(1) + exp(-1) + 1) / 4, 0, 1e-14);
    expect_close("kl", 0, metric_of(&m, "kl"), exp(-1) / 4, 0, 1e-14); // k3(-1) = 1/e
}

// ---- masked targets, and values that are not finite -----------------------------------------------------------------
TEST(masked_targets_are_not_looked_at) {
    Evaluated e;
    for (size_t i = 0; evaluated_at(i, &e); i++) {
        Batch *b = &e.s.batch;
        double *weight = case_doubles(e.N);
        for (size_t t = 0; t < e.N; t++) {
            if (plain_weight(b, t) != 0) continue;
            e.s.logp[t] = e.s.entropy[t] = b->reference[t] = b->old[t] = b->advantage[t] = NAN;
            if (b->targets[t] < 0) b->loss_weight[t] = NAN;
        }
        assert_true(evaluate(&e.o, &e.s, e.Z, weight, NULL) == e.loss);
        for (size_t t = 0; t < e.N; t++)
            if (!(weight[t] == e.weight[t] && (plain_weight(b, t) != 0 || weight[t] == 0)))
                test_fail("weight[%zu] is %g, was %g", t, weight[t], e.weight[t]);
    }
}

TEST(documents_without_counted_targets) {
    Evaluated e;
    for (size_t i = 0; evaluated_at(i, &e); i++) {
        const size_t *start = e.s.batch.document_start;
        for (size_t d = 1; d < e.s.batch.documents; d += 3) // any member of a pair or group
            for (size_t t = start[d]; t < start[d + 1]; t++) e.s.batch.targets[t] = -1;
        assert_true(isfinite(evaluate(&e.o, &e.s, normaliser(&e.o, &e.s, 1), e.weight, NULL)));
        for (size_t t = 0; t < e.N; t++) assert_true(isfinite(e.weight[t]));
        for (size_t t = 0; t < e.N; t++) e.s.batch.targets[t] = -1;
        double loss = evaluate(&e.o, &e.s, normaliser(&e.o, &e.s, 1), e.weight, NULL);
        assert_true(isfinite(loss) && (loss == 0 || objective_is_of_pairs(&e.o) || e.o.kind == OBJECTIVE_KTO));
        for (size_t t = 0; t < e.N; t++) assert_true(e.weight[t] == 0);
    }
}

// A value that is not finite at one counted target makes the loss and that target's weight not finite.
static void check_not_finite(const Objective *o, size_t which, double bad) {
    int read = which == 0 || (which == 1 && objective_needs_reference(o)) || (which > 1 && objective_is_of_policy(o));
    Stream s = stream_for(o);
    double *weight = case_doubles(s.batch.N), Z = normaliser(o, &s, 1);
    size_t t;
    do t = test_random_below(s.batch.N);
    while (plain_weight(&s.batch, t) == 0);
    if (which == 0) s.logp[t] = bad;
    if (which == 1) s.batch.reference[t] = (float)bad;
    if (which == 2) s.batch.old[t] = (float)bad;
    if (which == 3) s.batch.advantage[t] = (float)bad;
    double loss = evaluate(o, &s, Z, weight, NULL);
    if (isnan(loss) != read || isnan(weight[t]) != read)
        test_fail("value %zu, %g: loss %g, weight %g", which, bad, loss, weight[t]);
    for (size_t u = 0; u < s.batch.N; u++)
        if (plain_weight(&s.batch, u) == 0) assert_true(weight[u] == 0);
}

TEST(what_is_not_finite_is_not_lost) {
    Objective o;
    for (size_t i = 1; objective_at(i, &o); i++) {
        for (size_t which = 0; which < 4; which++) {
            check_not_finite(&o, which, (double)NAN);
            check_not_finite(&o, which, (double)INFINITY);
            check_not_finite(&o, which, -(double)INFINITY);
        }
    }
}

// One pair of one target each; both log-probabilities are given.
static double one_pair(const Objective *o, double chosen, double rejected, double weight[2]) {
    static const size_t length[] = {1, 1};
    Stream s = stream_allocate(length, 2);
    s.batch.loss_weight[0] = s.batch.loss_weight[1] = 1;
    s.logp[0] = chosen, s.logp[1] = rejected;
    return evaluate(o, &s, normaliser(o, &s, 1), weight, NULL);
}

TEST(extremes_of_pairs) {
    static const struct {
        ObjectiveKind kind;
        DpoLoss dpo_loss;
        double beta, smoothing, chosen, rejected, loss, weight[2];
    } rows[] = {{OBJECTIVE_DPO, DPO_SIGMOID, 0.5, 0, -1e4, 0, 5000, {-0.5, 0.5}},
                {OBJECTIVE_DPO, DPO_SIGMOID, 0.5, 0, 0, -1e4, 0, {0, 0}},
                {OBJECTIVE_DPO, DPO_SIGMOID, 0.5, 0.25, 0, -1e4, 1250, {0.125, -0.125}},
                {OBJECTIVE_DPO, DPO_ROBUST, 0.5, 0.25, -1e4, 0, 7500, {-0.75, 0.75}},
                {OBJECTIVE_DPO, DPO_ROBUST, 0.5, 0.25, 0, -1e4, -2500, {-0.25, 0.25}},
                {OBJECTIVE_DPO, DPO_IPO, 0.5, 0, -1e4, 0, 10001.0 * 10001.0, {-20002, 20002}},
                {OBJECTIVE_DPO, DPO_HINGE, 0.5, 0, -1e4, 0, 5001, {-0.5, 0.5}},
                {OBJECTIVE_DPO, DPO_HINGE, 0.5, 0, 0, -1e4, 0, {0, 0}},
                {OBJECTIVE_DPO, DPO_HINGE, 0.5, 0, 2, 0, 0, {0, 0}}, // the corner, as in torch
                {OBJECTIVE_SIMPO, DPO_SIGMOID, 2, 0, -1e4, 0, 20001, {-2, 2}},
                {OBJECTIVE_ORPO, DPO_SIGMOID, 0.5, 0, 0, -1e4, 0, {-1, 0}}};
    double w[2];
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        Objective o = make(rows[i].kind, rows[i].beta);
        o.dpo_loss = rows[i].dpo_loss, o.label_smoothing = rows[i].smoothing;
        const double loss = one_pair(&o, rows[i].chosen, rows[i].rejected, w);
        if (fabs(loss - rows[i].loss) > 1e-300 || w[0] != rows[i].weight[0] || w[1] != rows[i].weight[1])
            test_fail("row %zu: loss %g, weights %g and %g", i, loss, w[0], w[1]);
    }
    // odds of probability 1: finite, and still decreasing in the rejected one's
    Objective orpo = make(OBJECTIVE_ORPO, 0.5);
    expect_close("orpo", 0, one_pair(&orpo, -1e4, 0, w), 1e4 + 0.5 * (1e4 + 24 * log(2)), 0, 1e-14);
    expect_close("orpo's weight", 0, w[0], -1.5, 0, 0);
    expect_close("orpo's weight", 1, w[1], 0.5 * 0x1p24, 0, 1e-7);
    assert_true(isfinite(one_pair(&orpo, 1e-6, 1e-6, w)) && isfinite(w[0]) && isfinite(w[1])); // rounding errors
}

TEST(advantages_of_a_group) {
    static const float equal[] = {0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.1f}, pair[] = {1, 0};
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    double found[7];
    for (int scale = 0; scale < 2; scale++) {
        for (size_t k = 1; k <= 7; k++) {
            group_advantages(equal, k, scale, found);
            for (size_t i = 0; i < k; i++) assert_true(found[i] == 0);
        }
        for (size_t k = 0; k < 3; k++) {
            float reward[] = {0.5f, (float)bad[k], -2, 1}, all[] = {(float)bad[k], (float)bad[k]};
            group_advantages(reward, 4, scale, found);
            for (size_t i = 0; i < 4; i++) assert_true(isnan(found[i]));
            group_advantages(all, 2, scale, found);
            assert_true(isnan(found[0]) && isnan(found[1]));
        }
    }
    group_advantages(pair, 2, 0, found);
    assert_true(found[0] == 0.5 && found[1] == -0.5);
    group_advantages(pair, 2, 1, found);
    expect_close("advantage", 0, found[0], 0.5 / (sqrt(0.5) + 1e-4), 0, 1e-15);
}

// ---- defaults -------------------------------------------------------------------------------------------------------
TEST(defaults) {
    static const struct {
        ObjectiveKind kind;
        double given, beta, low, high;
    } rows[] = {{OBJECTIVE_DPO, NAN, 0.1, NAN, NAN}, {OBJECTIVE_ORPO, NAN, 0.1, NAN, NAN},
                {OBJECTIVE_KTO, NAN, 0.1, NAN, NAN}, {OBJECTIVE_SIMPO, NAN, 2, NAN, NAN},
                {OBJECTIVE_PPO, NAN, 0, 0.2, 0.2},   {OBJECTIVE_GSPO, NAN, 0, 3e-4, 4e-4},
                {OBJECTIVE_GRPO, 0.5, 0.5, 0.2, 0.2}};
    Objective o;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        o = make(rows[i].kind, rows[i].given);
        assert_true(o.beta == rows[i].beta && (o.kind != OBJECTIVE_SIMPO || o.gamma == 1));
        assert_true(isnan(rows[i].low) || (o.clip_low == rows[i].low && o.clip_high == rows[i].high));
    }
    o.normalisation = NORMALISE_DAPO, o.clip_high = NAN;
    objective_resolve(&o);
    assert_true(o.clip_low == 0.2 && o.clip_high == 0.28);
    o.normalisation = NORMALISE_GRPO, o.clip_low = 0.1, o.clip_high = NAN;
    objective_resolve(&o);
    assert_true(o.clip_low == 0.1 && o.clip_high == 0.1);
}

static void pairs_loss_of(const void *stream) {
    Objective o = make(OBJECTIVE_SIMPO, 2);
    evaluate(&o, (const Stream *)stream, 1, NULL, NULL);
}

TEST(streams_that_are_none_of_pairs) {
    Stream s = random_stream(2, 2);
    s.batch.group[2] = 2; // 0 0 2 1
    expect_refused(pairs_loss_of, &s, 1, "document 2 of a sequence of pairs has no partner");
    s.batch.group = NULL;
    expect_refused(pairs_loss_of, &s, 1, "a batch of simpo without groups");
}

// ---- distillation ---------------------------------------------------------------------------------------------------
static Objective make_distill(DistillLoss loss, double share, double T) {
    Objective o = make(OBJECTIVE_DISTILL, 0);
    o.distill_loss = loss, o.distill_share = share, o.distill_temperature = T;
    return o;
}

// forward: weights are sft's, the loss mixes cross-entropy and divergence (here the stream's entropies) by T^2.
TEST(distill_forward_weighs_targets_as_sft) {
    test_case("forward");
    Stream s = random_stream(3, 2);
    const Objective sft = make(OBJECTIVE_SFT, 0), o = make_distill(DISTILL_FORWARD, 0.3, 2);
    double *wanted = case_doubles(s.batch.N), *found = case_doubles(s.batch.N), cross = 0, apart = 0, all = 0;
    Metrics metrics = {0};
    s.batch.teacher = teacher_allocate(s.batch.N, 1);
    const double Z = normaliser(&o, &s, 1);
    evaluate(&sft, &s, Z, wanted, NULL);
    const double loss = evaluate(&o, &s, Z, found, &metrics);
    for (size_t t = 0; t < s.batch.N; t++) {
        const double m = plain_weight(&s.batch, t);
        cross -= m * s.logp[t], apart += m * s.entropy[t], all += m;
        if (found[t] != wanted[t]) test_fail("weight[%zu] is %g, sft's is %g", t, found[t], wanted[t]);
    }
    expect_close("Z", 0, Z, all, 1, 1e-15);
    expect_close("loss", 0, loss, (0.7 * cross + 0.3 * 4 * apart) / Z, 0, precision());
    expect_close("kl", 0, metric_of(&metrics, "kl"), apart / Z, 0, precision());
    expect_close("cross_entropy", 0, metric_of(&metrics, "cross_entropy"), cross / Z, 0, precision());
    teacher_free(&s.batch.teacher);
}

// reverse: grpo's weights, over all tokens and without a clip, from advantages log p_teacher - logp.
TEST(distill_reverse_is_grpo_with_these_advantages) {
    test_case("reverse");
    Stream s = random_stream(3, 2);
    Objective grpo = make_policy(OBJECTIVE_GRPO, NORMALISE_BNPO, 0);
    const Objective o = make_distill(DISTILL_REVERSE, 1, 1);
    double *wanted = case_doubles(s.batch.N), *found = case_doubles(s.batch.N), apart = 0;
    for (size_t t = 0; t < s.batch.N; t++) { // advantages are fp32, so these differences are exact
        s.logp[t] = -(double)(1 + test_random_below(4096)) / 1024;
        s.batch.reference[t] = (float)(-(double)(1 + test_random_below(4096)) / 1024);
        s.batch.advantage[t] = (float)((double)s.batch.reference[t] - s.logp[t]);
        apart -= plain_weight(&s.batch, t) * (double)s.batch.advantage[t];
    }
    const double Z = normaliser(&o, &s, 1);
    s.batch.old = NULL;
    evaluate(&grpo, &s, Z, wanted, NULL);
    const double loss = evaluate(&o, &s, Z, found, NULL);
    for (size_t t = 0; t < s.batch.N; t++) expect_close("weight", t, found[t], wanted[t], 0, precision());
    expect_close("loss", 0, loss, apart / Z, 0.1, precision());
}

int main(int argc, char **argv) {
    type = ops_device->summed;
    RUN_LISTED(argc, argv, NULL);
}
