/*
Trajectories: turns of many texts in any number of slots are the turns of each text alone; documents, masks, trees and
advantages are those of the turns; the loss is that of the same tokens and masks in one document; shared prefixes change
no gradient; routes of experts are recorded; recorded answers are repeated; environments that fail cost a trajectory, or end the run. This program is also environment and renderer:
`test_trajectory --environment HOW` and `--render`.
*/
#include "test/base/child.h"
#include "test/data/answer_files.h"
#include "test/data/tree_checks.h"
#include "rolling.h"

static char own_path[PATH_MAX]; // of this program
enum { PROMPTS = 5, LONGEST = 90, NEW = 9, P = 4, G = 5, TURNS = 6, S = 260, V = 64, STEP_TEXTS = P * G };

// ---- the other programs: what they answer follows from the line -----------------------------------------------------
static uint64_t line_hash(const cJSON *object, const char *key) {
    char *text = cJSON_PrintUnformatted(cJSON_GetObjectItem(object, key));
    const uint64_t hash = random_bits(checksum_of(0, text, strlen(text)), 1, 0);
    free(text);
    return hash;
}

// Answers turns. A conversation ends with 1 turn of 5; each third answer comes late.
__attribute__((noreturn)) static void environment(const char *how) {
    char *line = NULL;
    size_t capacity = 0, count = 0;
    const struct timespec late = {0, 3000000};
    while (getline(&line, &capacity, stdin) > 0) {
        cJSON *object = cJSON_ParseWithOpts(line, NULL, 1);
        if (!object) exit(4);
        const uint64_t h = line_hash(object, "messages");
        const int bad = ++count == 7;
        if (bad && !strcmp(how, "dies")) exit(9);
        if (bad && !strcmp(how, "hangs")) sleep(100);
        for (size_t i = 0; bad && !strcmp(how, "floods") && i < ENVIRONMENT_ANSWER + 2; i++) putchar('x');
        if (bad && !strcmp(how, "nonsense")) printf("{\"messages\": [{\"role\": \"assistant\", \"content\": \"\"}]}\n");
        if (bad && !strcmp(how, "nothing")) printf("{\"reward\": 1}\n");
        if (bad && !strcmp(how, "twice")) printf("{\"done\": true}\n");
        if (h % 3 == 0) nanosleep(&late, NULL);
        if (!strcmp(how, "recorded"))
            printf("{\"done\": true, \"reward\": 100}\n"); // a run that asks is another run
        else
            printf("{\"messages\": [{\"role\": \"tool\", \"content\": \"%llu\"}], \"reward\": %s, \"done\": %s, "
                   "\"error\": %s}\n",
                   (unsigned long long)(h % 1000),
                   h % 16 > 3 ? "0.25"
                   : h % 16   ? "-1"
                              : "null",
                   h % 5 ? "false" : "true", h % 7 ? "false" : "true");
        fflush(stdout);
        cJSON_Delete(object);
    }
    exit(0);
}

// Renders turns: each second one forks, at its beginning, its middle or its end.
__attribute__((noreturn)) static void render(void) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        cJSON *object = cJSON_ParseWithOpts(line, NULL, 1);
        const cJSON *ids = cJSON_GetObjectItem(object, "ids");
        if (!object) exit(4);
        if (!ids) {
            char *said = cJSON_PrintUnformatted(cJSON_GetObjectItem(object, "said"));
            printf("{\"message\": {\"role\": \"assistant\", \"content\": \"%s\", \"raw\": \"%s\"}}\n", said, said);
            free(said);
        } else {
            const uint64_t h = line_hash(object, "messages");
            const size_t count = (size_t)cJSON_GetArraySize(ids), added = 1 + h / 100 % 7;
            const size_t kept = h % 2   ? count
                                : h % 3 ? count - min_size(count, 1 + h % 5)
                                : h % 5 ? count / 2 + 1
                                : h % 7 ? 0
                                        : count - 1;
            printf("{\"keep\": %zu, \"ids\": [", kept);
            for (size_t i = 0; i < added; i++) printf("%s%d", i ? ", " : "", (int)(random_bits(h, 2, i) % V));
            printf("]}\n");
        }
        fflush(stdout);
        cJSON_Delete(object);
    }
    exit(0);
}

// ---- a run ----------------------------------------------------------------------------------------------------------
static DataLoader open_prompts(void) {
    static const size_t lengths[PROMPTS] = {1, 20, 64, 66, LONGEST};
    DataSettings settings = data_settings(1, 5);
    MadeShard made = made_kind(KIND_PROMPTS);
    MadeDocument document[PROMPTS] = {0};
    made.vocabulary = V, made.columns = 1;
    for (size_t d = 0; d < PROMPTS; d++) {
        uint32_t *id = (uint32_t *)case_memory(lengths[d] * sizeof(uint32_t));
        unsigned char *counts = (unsigned char *)case_memory(lengths[d]);
        memset(counts, 0, lengths[d]);
        for (size_t i = 0; i < lengths[d]; i++) id[i] = (uint32_t)(random_bits(d, 3, i) % V);
        document[d].id = id, document[d].counts = counts;
        document[d].columns =
            d % 2 ? "{}" : "{\"a\": [\"]}\"], \"messages\": [{\"role\": \"user\", \"content\": \"\\\"[\"}]}";
        document[d].tokens = document[d].prompt = lengths[d];
    }
    settings.use = DATA_PROMPTS, settings.vocab_size = V;
    return open_data(write_shard("prompts.bin", &made, document, PROMPTS), &settings);
}

static const char *const configs[] = {
    "llama,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,"
    "vocab_size=64",
    "qwen3_5,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "head_dim=8,vocab_size=64,layer_types=lf,linear_num_key_heads=1,linear_num_value_heads=2,linear_key_head_dim="
    "12,linear_value_head_dim=4",
    "mistral,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,"
    "vocab_size=64,sliding_window=7",
    "qwen3_moe,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,vocab_size=64,num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12"};

static RolloutSettings settings_of(size_t slots) {
    static const uint32_t end_ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    RolloutSettings s = rolling_settings();
    s.prompts = s.most_prompts = s.step_prompts = P;
    s.group_size = G, s.max_new_tokens = NEW, s.slots = slots, s.shares = 1;
    s.end_ids = end_ids, s.end_count = COUNT_OF(end_ids);
    s.environment.workers = 3, s.environment.max_turns = TURNS, s.environment.tokens = S;
    return s;
}

static Rolling *rolling_open(RolloutSettings settings, const char *config, const char *how, ObjectiveKind kind) {
    Rolling *r = (Rolling *)checked_calloc(1, sizeof(*r), "a run");
    Objective objective = tiny_objective(kind);
    objective.beta = 0;
    r->data = open_prompts(), r->settings = settings;
    snprintf(r->command, sizeof(r->command), "exec '%s' --environment %s", own_path, how);
    snprintf(r->render, sizeof(r->render), "exec '%s' --render", own_path);
    r->settings.environment.command = r->command, r->settings.environment.render = r->render;
    r->settings.environment.timeout = strcmp(how, "hangs") ? 100 : 0.5;
    rolling_begin(r, config, objective, METHOD_STREAM);
    return r;
}

// ---- turns ----------------------------------------------------------------------------------------------------------
// Fills ids with path p of a trajectory. Returns its length.
static size_t path_of(const Trajectory *t, size_t p, int32_t ids[S + 1]) {
    if (p == t->paths) {
        memcpy(ids, t->ids, t->tokens * sizeof(int32_t));
        return t->tokens;
    }
    const OldPath *old = &t->path[p];
    path_of(t, p + 1, ids);
    memcpy(ids + old->kept, t->old + old->begin, old->tokens * sizeof(int32_t));
    return old->kept + old->tokens;
}

// Checks that each turn of text i is what the model writes after the ids before it, alone in a cache.
static void expect_turns_alone(Rolling *r, size_t i) {
    const Rollout *o = &r->rollout;
    const RolloutSettings *s = &r->settings;
    const Trajectory *t = &o->agents.text[i];
    const size_t p = i / G, k = (o->agents.step - 1) * P + p;
    uint64_t seed = random_bits(s->sampling.seed, RANDOM_STREAM_TEXTS, k * G + i % G);
    size_t all = 0;
    SamplerBatch alone;
    sampler_batch_allocate(&alone, &r->model, s->slots, S);
    for (size_t n = 0, path = 0; n < t->turns; n++) {
        const AgentTurn *turn = &t->turn[n];
        int32_t ids[S + 1], drawn[NEW];
        path_of(t, turn->path, ids);
        for (; path < turn->path; path++) seed = random_bits(seed, RANDOM_STREAM_FORKS, path + 1);
        Completion text = {.prompt = ids, .prompt_tokens = turn->begin, .seed = seed, .ids = drawn, .room = NEW};
        for (size_t q = all = 0; q < path; q++)
            all += t->path[q].tokens + (t->path[q].kept <= PREFIX_LEAST ? t->path[q].kept : 0);
        text.room = min_size(NEW, S + 1 - all - turn->begin);
        sampler_batch(&alone, &r->run.s, &text, 1, &s->sampling, s->end_ids, s->end_count);
        if (text.tokens != turn->tokens || memcmp(drawn, ids + turn->begin, turn->tokens * sizeof(int32_t)) != 0)
            test_fail("text %zu, turn %zu of %zu, path %zu: drawn alone it differs", i, n, t->turns, path);
    }
    sampler_batch_free(&alone);
}

// Checks a step's sequences against its trajectories.
static void expect_documents(Rolling *r, size_t sequences) {
    const Rollout *o = &r->rollout;
    size_t seen = 0, targets = 0, trained = 0;
    for (size_t q = 0; q < sequences; q++) {
        const Batch *b = &o->sequence[q];
        const SequenceBound bound = rollout_bound(&r->settings, &r->data);
        size_t d = 0, forks = 0;
        assert_true(b->N <= bound.N && b->documents <= bound.documents && batch_rows(b)->N <= bound.rows);
        if (b->tree) expect_tree(b, 1), forks = b->tree->forks;
        assert_true(forks <= bound.forks);
        for (size_t i = 0; i < STEP_TEXTS; i++) {
            const Trajectory *t = &o->agents.text[i];
            double weight = 0;
            if (o->agents.sequence[i] != q) continue;
            for (size_t k = 0; k < t->turns; k++) weight += (double)t->turn[k].tokens;
            for (size_t p = t->paths + 1; p-- > 0; d++) {
                int32_t ids[S + 1];
                const size_t n = path_of(t, p, ids), start = b->document_start[d];
                assert_int_equal(b->document_start[d + 1] - start, n - 1);
                assert_true(b->trajectory[d] == i && b->document_weight[d] == weight && b->reward[d] == o->reward[i]);
                for (size_t at = 0; at + 1 < n; at++) {
                    const AgentTurn *turn = NULL;
                    for (size_t k = 0; k < t->turns; k++)
                        if (t->turn[k].path == p && at + 1 >= t->turn[k].begin &&
                            at + 1 < t->turn[k].begin + t->turn[k].tokens)
                            turn = &t->turn[k];
                    if (b->tokens[start + at] != ids[at] || b->targets[start + at] != (turn ? ids[at + 1] : -1) ||
                        b->position[start + at] != (int32_t)at)
                        test_fail("text %zu, path %zu, position %zu", i, p, at);
                    if (turn && b->advantage[start + at] != (float)turn->advantage) test_fail("advantage");
                    targets += turn != NULL;
                }
            }
            for (size_t k = 0; k < t->turns; k++) trained += t->turn[k].tokens;
            seen++;
        }
        assert_true(d == b->documents && b->document_start[d] == b->N);
    }
    assert_true(targets == trained && o->counts.tokens == (double)targets && o->counts.documents == (double)seen);
}

// Checks the advantages of group p.
static void expect_advantages(const Rolling *r, size_t p) {
    const Rollout *o = &r->rollout;
    const int own = r->settings.environment.own;
    double sum = 0, squares = 0, count = 0, value[G * TURNS];
    for (size_t i = p * G; i < (p + 1) * G; i++) {
        const Trajectory *t = &o->agents.text[i];
        double all = 0;
        for (size_t k = 0; k < t->turns; k++) {
            const double reward = isnan(t->turn[k].reward) ? 0 : (double)t->turn[k].reward;
            all += reward;
            if (own) value[(size_t)count++] = reward;
        }
        if (!own) value[(size_t)count++] = all;
        assert_true(o->reward[i] == (float)all);
    }
    for (size_t k = 0; k < (size_t)count; k++) sum += value[k];
    for (size_t k = 0; k < (size_t)count; k++) squares += pow(value[k] - sum / count, 2);
    for (size_t i = p * G, k = 0; i < (p + 1) * G; i++, k += !own)
        for (size_t n = 0; n < o->agents.text[i].turns; n++, k += (size_t)own) {
            const double wanted = (value[k] - sum / count) / (sqrt(squares / (count - 1)) + 1e-4);
            if (!(fabs(o->agents.text[i].turn[n].advantage - wanted) <= 1e-6)) test_fail("group %zu: advantage", p);
        }
}

TEST(turns_of_texts_alone) {
    static const size_t slots[] = {16, 1, 3, 7};
    size_t turns = 0, forks = 0, again = 0, truncated = 0, texts = 0;
    for (size_t c = 0; c < COUNT_OF(slots) * COUNT_OF(configs); c++) {
        const size_t m = c / COUNT_OF(slots), n = slots[c % COUNT_OF(slots)];
        test_case("model %zu, %zu slots", m, n);
        RolloutSettings settings = settings_of(n);
        settings.environment.own = c % 2;
        Rolling *r = rolling_open(settings, configs[m], "turns", OBJECTIVE_GRPO);
        for (size_t number = 1; number <= (m ? 1 : 10); number++) {
            const size_t sequences = step(r, number);
            expect_documents(r, sequences);
            for (size_t p = 0; p < P; p++)
                if (r->rollout.group_sequence[p] != SIZE_MAX) expect_advantages(r, p);
            for (size_t i = 0; i < STEP_TEXTS; i++, texts++) {
                const Trajectory *t = &r->rollout.agents.text[i];
                turns += t->turns, forks += t->paths, truncated += (size_t)t->truncated;
                assert_true(t->all <= S + 1 && t->turns <= TURNS && t->tokens <= S + 1);
                for (size_t k = 0; k < t->paths; k++) again += t->path[k].kept <= PREFIX_LEAST;
                if (ops_device->stored == DTYPE_FP64 || n == 1) expect_turns_alone(r, i);
            }
        }
        rolling_close(r);
    }
    print_message("%zu texts, %zu turns, %zu forks (%zu of them below %d tokens), %zu truncated\n", texts, turns, forks,
                  again, PREFIX_LEAST, truncated);
    assert_true(turns > 2 * texts && forks > texts / 2 && again > 10 && truncated > 10 && truncated < texts);
}

// ---- losses ---------------------------------------------------------------------------------------------------------
// Returns the step's loss from log-probabilities of all sequences, as TRL computes it with a mask of tool tokens: a
// trajectory is one completion, its mask has the drawn tokens. The ratio is exp(logp - old), old = 0.9 logp.
static double loss_of_completions(const Rolling *r, float *const *logp, ObjectiveKind kind, double low, double high) {
    const Rollout *o = &r->rollout;
    double loss = 0, texts = 0;
    for (size_t i = 0; i < STEP_TEXTS; i++) {
        const size_t q = o->agents.sequence[i];
        double sum = 0, count = 0, mean = 0;
        if (q == SIZE_MAX) continue;
        const Batch *b = &o->sequence[q];
        for (int pass = 0; pass < 2; pass++)
            for (size_t d = 0; d < b->documents; d++)
                for (size_t t = b->document_start[d]; b->trajectory[d] == i && t < b->document_start[d + 1]; t++) {
                    if (b->targets[t] < 0) continue;
                    const double log_ratio = (double)logp[q][t] - (double)b->old[t], A = (double)b->advantage[t];
                    if (!pass) mean += log_ratio, count++;
                    const double ratio = exp(kind == OBJECTIVE_GSPO ? mean / count : log_ratio);
                    if (pass) sum -= fmin(ratio * A, fmin(fmax(ratio, 1 - low), 1 + high) * A);
                }
        loss += sum / count, texts++;
    }
    return loss / texts;
}

TEST(losses_are_those_of_completions) {
    static const ObjectiveKind kinds[] = {OBJECTIVE_GRPO, OBJECTIVE_GSPO};
    for (size_t c = 0; c < 4; c++) {
        test_case("case %zu", c);
        Rolling *r = rolling_open(settings_of(5), configs[c / 2], "turns", kinds[c % 2]);
        Rollout *o = &r->rollout;
        const double near = ops_device->stored == DTYPE_FP64 ? 1e-6 : 1e-2; // logp and old are fp32 there
        const size_t sequences = step(r, 1);
        float *logp[STEP_TEXTS];
        double loss = 0, alone = 0, forked = 0;
        const double Z = objective_normaliser(&r->run.s.setup->objective, o->counts);
        assert_true(Z == o->counts.documents);
        for (size_t q = 0; q < sequences; q++) {
            Batch *b = &o->sequence[q];
            logp[q] = (float *)case_memory(b->N * sizeof(float));
            b->old = (float *)case_memory(b->N * sizeof(float));
            forward_policy(&r->run.s, b, 0, logp[q]);
            for (size_t t = 0; t < b->N; t++) b->old[t] = b->targets[t] < 0 ? 0 : logp[q][t] * 0.9f;
            loss += forward_only(&r->run.s, b, Z, NULL);
            for (size_t d = 1; d < b->documents; d++) forked += b->trajectory[d] == b->trajectory[d - 1];
        }
        const Objective *objective = &r->run.s.setup->objective;
        alone = loss_of_completions(r, logp, kinds[c % 2], objective->clip_low, objective->clip_high);
        if (!(fabs(loss - alone) <= near * fmax(1, fabs(alone)))) test_fail("loss %.10g, expected %.10g", loss, alone);
        assert_true(forked > 3 && fabs(loss) > 1e-3);
        rolling_close(r);
    }
}

// Weights are the derivatives of the loss also where a trajectory has several documents.
TEST(weights_are_derivatives) {
    static const size_t lengths[] = {7, 4, 6, 5, 3}, of[] = {0, 0, 1, 2, 2};
    for (size_t c = 0; c < 8; c++) {
        const ObjectiveKind kind = c % 2 ? OBJECTIVE_GSPO : OBJECTIVE_GRPO;
        Batch b = tiny_batch(lengths, 5, 20, 1, c + 1);
        tiny_answers(&b, kind, 1, 20, c + 2);
        size_t trajectory[5];
        memcpy(trajectory, of, sizeof(of));
        b.trajectory = c < 4 ? trajectory : NULL;
        Objective o = tiny_objective(kind);
        o.normalisation = c / 2 % 2 ? NORMALISE_BNPO : NORMALISE_GRPO, o.beta = 0.1, o.kl_correction = c % 3 == 0;
        o.clip_low = o.clip_high = 0.5;
        const TargetCounts counts = batch_count(&b);
        assert_true(counts.documents == (c < 4 ? 3 : 5));
        const double Z = objective_normaliser(&o, counts), step = 1e-5;
        double *logp = case_doubles(b.N), *weight = case_doubles(b.N);
        for (size_t t = 0; t < b.N; t++) logp[t] = (double)b.old[t] + 0.1 * test_normal();
        memcpy(weight, logp, b.N * sizeof(double)); // weights take the place of log-probabilities
        objective_weights(&o, &b, Z, 0, b.N, weight, weight, DTYPE_FP64);
        for (size_t t = 0; t < b.N; t++) {
            double loss[2];
            for (int side = 0; side < 2; side++) {
                const double before = logp[t];
                logp[t] += side ? step : -step;
                loss[side] = objective_loss(&o, &b, Z, logp, NULL, DTYPE_FP64, NULL);
                logp[t] = before;
            }
            const double slope = (loss[1] - loss[0]) / (2 * step);
            if (!(fabs(slope - weight[t]) <= 1e-8)) test_fail("case %zu, target %zu: %g, %g", c, t, weight[t], slope);
        }
        b.trajectory = NULL;
        batch_free(&b);
    }
}

// ---- shared prefixes, routes of experts -----------------------------------------------------------------------------
// Returns the loss and gradient of a step's sequences.
static TinyResult step_result(Rolling *r, size_t sequences, Metrics *metrics) {
    TinyResult result = {0, NULL, r->model.elements};
    StreamBP *s = &r->run.s;
    const double Z = objective_normaliser(&s->setup->objective, r->rollout.counts);
    for (size_t q = 0; q < sequences; q++)
        result.loss += forward_backward(s, &r->rollout.sequence[q], Z, q + 1 == sequences, metrics);
    result.gradient = device_read(ops_device, s->memory.gradients, r->run.settings.gradient_type, r->model.elements);
    return result;
}

// Shared prefixes change no loss and no gradient; routes that were recorded are those of training.
TEST(shared_prefixes) {
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("rounding errors choose other experts; the double build tells");
        return;
    }
    for (size_t c = 0; c < 3; c++) {
        test_case("case %zu", c);
        TinyResult result[2];
        Rolling *r[2];
        for (int shares = 0; shares < 2; shares++) {
            RolloutSettings settings = settings_of(5);
            Metrics metrics = {0};
            settings.shares = shares, settings.environment.tokens = 1500; // no trajectory reaches it
            settings.records = c > 0, settings.replays = c == 2;
            r[shares] = rolling_open(settings, configs[c ? 3 : 0], "turns", OBJECTIVE_GRPO);
            const size_t sequences = step(r[shares], 1);
            result[shares] = step_result(r[shares], sequences, &metrics);
            if (c == 1) assert_true(metric_named(&metrics, "router_differs") == 0);
            size_t trees = 0;
            for (size_t q = 0; q < sequences; q++) trees += r[shares]->rollout.sequence[q].tree != NULL;
            assert_true(!trees == !shares);
        }
        assert_memory_equal(r[0]->rollout.reward, r[1]->rollout.reward, STEP_TEXTS * sizeof(float));
        tiny_expect_same(&r[0]->model, result[1], result[0], 1e-9, 1e-3, 1e-3);
        for (int shares = 0; shares < 2; shares++) free(result[shares].gradient), rolling_close(r[shares]);
    }
}

// ---- recorded answers -----------------------------------------------------------------------------------------------
// A run that was killed in a step repeats the recorded answers, as many as there are, in whatever order they came.
TEST(recorded_answers_are_repeated) {
    char path[PATH_MAX];
    char folder[PATH_MAX];
    snprintf(folder, sizeof(folder), "%s", fresh_folder("recorded"));
    path_join(path, folder, "environment.jsonl");
    Rolling *r = rolling_open(settings_of(5), configs[0], "turns", OBJECTIVE_GRPO);
    record_open(&r->rollout.agents, folder, 0, 0);
    step(r, 1);
    size_t length;
    char *kept = read_whole(path, &length);
    Rolling *again = rolling_open(settings_of(5), configs[0], "recorded", OBJECTIVE_GRPO);
    record_open(&again->rollout.agents, folder, 0, 0);
    const size_t sequences = step(again, 1);
    assert_int_equal(sequences, r->rollout.sequences);
    assert_memory_equal(r->rollout.reward, again->rollout.reward, STEP_TEXTS * sizeof(float));
    for (size_t i = 0; i < sequences; i++) expect_same_batch(&r->rollout.sequence[i], &again->rollout.sequence[i]);
    rolling_close(again);
    for (size_t cut = 1; cut < 8; cut++) { // part of the answers, the last one torn
        FILE *file = fopen(path, "w");
        fwrite(kept, 1, length * cut / 8, file), fclose(file);
        again = rolling_open(settings_of(cut), configs[0], "turns", OBJECTIVE_GRPO);
        record_open(&again->rollout.agents, folder, 0, 0);
        step(again, 1);
        assert_true(again->rollout.agents.recorded_count > 0);
        assert_memory_equal(r->rollout.reward, again->rollout.reward, STEP_TEXTS * sizeof(float));
        rolling_close(again);
    }
    again = rolling_open(settings_of(5), configs[0], "turns", OBJECTIVE_GRPO); // steps that a checkpoint has
    record_open(&again->rollout.agents, folder, 0, 1);
    assert_true(again->rollout.agents.recorded_count == 0 && !*read_whole(path, NULL));
    rolling_close(again), rolling_close(r);
}

// ---- failures -------------------------------------------------------------------------------------------------------
static const struct {
    const char *how, *message;
} failures[] = {{"dies", "the environment ended after 0 of 1 answers, with exit code 9"},
                {"hangs", "the environment gave 0 of 1 answers within 0.5 seconds; --reward-timeout allows more"},
                {"floods", "the environment answered line 1 of 1 with more than 1048576 bytes"},
                {"nonsense", "a message whose role is neither tool nor user"},
                {"nothing", "neither messages nor \"done\": true"},
                {"twice", "the environment gave more answers than lines"}};

static void fails(const void *how) {
    Rolling *r = rolling_open(settings_of(5), configs[0], (const char *)how, OBJECTIVE_GRPO);
    rollout_step(&r->rollout, &r->run.s, 1);
    exit(0);
}

TEST(failing_environments) {
    for (size_t c = 0; c < COUNT_OF(failures); c++) {
        test_case("%s", failures[c].how);
        expect_refused(fails, failures[c].how, EXIT_RUNTIME, failures[c].message);
        RolloutSettings settings = settings_of(5);
        settings.stop = 0;
        Rolling *r = rolling_open(settings, configs[0], failures[c].how, OBJECTIVE_GRPO);
        size_t failed = 0, left_out = 0;
        const size_t sequences = step(r, 1);
        for (size_t i = 0; i < STEP_TEXTS; i++) failed += (size_t)r->rollout.agents.text[i].failed;
        for (size_t p = 0; p < P; p++) left_out += r->rollout.group_sequence[p] == SIZE_MAX;
        assert_true(failed > 0 && failed <= 12 && left_out > 0 &&
                    strstr(r->rollout.agents.failed.message, failures[c].message));
        if (left_out < P) expect_documents(r, sequences);
        rolling_close(r);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--environment")) environment(argv[2]);
    if (argc == 2 && !strcmp(argv[1], "--render")) render();
    if (!realpath(argv[0], own_path)) return 1;
    RUN_LISTED(argc, argv, scratch_remove);
}
