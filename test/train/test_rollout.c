/*
Rollouts: lines that are valid for the reward command, with any bytes in a text; sequences of whole groups with the
right targets, rewards and advantages; steps that depend on seed, number and weights alone; routes of experts that are
recorded, replayed or compared. A failing command costs its groups or ends the run. Learning is tested in
test_train_rollout.sh. This program is also the command: `test_rollout --answer HOW FILE` keeps the lines in FILE.
*/
#include "test/data/answer_files.h"
#include "test/data/tree_checks.h"
#include "rolling.h"

static char own_path[PATH_MAX]; // of this program

// ---- the command: a completion's reward is a number from its ids ----------------------------------------------------
static float reward_of(const int32_t *ids, size_t count) {
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += (size_t)ids[i] * (i + 1);
    return (float)(sum % 97) / 8;
}

static float reward_of_line(const cJSON *object) {
    const cJSON *id;
    int32_t ids[256];
    size_t count = 0;
    cJSON_ArrayForEach(id, cJSON_GetObjectItem(object, "completion_ids")) ids[count++] = (int32_t)id->valueint;
    return reward_of(ids, count);
}

// Answers lines; "dies": after ten answers. "nulls": each fourth, from the first, with null.
__attribute__((noreturn)) static void answer(const char *how, const char *path) {
    FILE *copy = fopen(path, "a");
    char *line = NULL;
    size_t capacity = 0, answers = 0;
    ssize_t got;
    if (!copy) exit(3);
    while ((got = getline(&line, &capacity, stdin)) > 0) {
        cJSON *object = cJSON_ParseWithOpts(line, NULL, 1); // all of it: one value
        if (!object || json_valid_until((const unsigned char *)line, (size_t)got) != (size_t)got) exit(4);
        fwrite(line, 1, (size_t)got, copy);
        if (!strcmp(how, "dies") && answers++ == 10) exit(9);
        if (!strcmp(how, "fails")) exit(8);
        if (!strcmp(how, "nulls") && answers++ % 4 == 0)
            printf("null\n");
        else
            printf("%.9g\n", (double)reward_of_line(object));
        fflush(stdout);
        cJSON_Delete(object);
    }
    fclose(copy);
    free(line);
    exit(0);
}

// ---- data: prompts with every kind of byte, each followed by a reference --------------------------------------------
static const char *const prompts[][2] = { // a prompt's bytes, and as text
    {"plain", "plain"},
    {"quotes \" and \\", "quotes \" and \\"},
    {"\x01\n\t\x7f", "\x01\n\t\x7f"},
    {"\xc3\xa9t\xc3\xa9 \xe2\x82\xac", "\xc3\xa9t\xc3\xa9 \xe2\x82\xac"},
    {"\xff\xc3(\xe2\x82", "\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd"},
    {"a", "a"},
    {"{\"prompt\": \"x\"}\r\n", "{\"prompt\": \"x\"}\r\n"}};
enum { PROMPTS = 7, LONGEST = 17, NEW = 6, P = 3, G = 4 };

// Returns the other columns of a prompt's row; some are longer than a piece of a line.
static const char *columns_of(size_t number) {
    char *text = (char *)case_memory(1000), filler[900];
    memset(filler, 'x', sizeof(filler));
    if (!number) return "{}";
    if (number == 6) return "{\"a\": \"answer\", \"b\": {\"answer\": 2}, \"answer\" : [\"7\"]}";
    snprintf(text, 1000, "{\"level\": %zu, \"tests\": [\"%.*s\\n\\\"{}\", null]}", number, (int)number * 140, filler);
    return text;
}

static size_t prompt_repeats = 1; // times that each prompt holds its bytes

static DataLoader open_prompts(void) {
    DataSettings settings = data_settings(1, 5);
    MadeShard made = made_kind(KIND_PROMPTS);
    MadeDocument document[PROMPTS] = {0};
    made.vocabulary = 256, made.columns = 1;
    for (size_t d = 0; d < PROMPTS; d++) {
        const size_t length = strlen(prompts[d][0]), prompt = length * prompt_repeats, tokens = prompt + 1 + d;
        uint32_t *id = (uint32_t *)case_memory(tokens * sizeof(uint32_t));
        unsigned char *counts = (unsigned char *)case_memory(tokens);
        for (size_t i = 0; i < tokens; i++) {
            id[i] = i < prompt ? (unsigned char)prompts[d][0][i % length] : (unsigned char)('A' + i - prompt);
            counts[i] = 0;
        }
        document[d].columns = columns_of(d);
        document[d].tokens = tokens, document[d].id = id, document[d].counts = counts, document[d].prompt = prompt;
    }
    settings.use = DATA_PROMPTS, settings.vocab_size = 256;
    return open_data(write_shard("prompts.bin", &made, document, PROMPTS), &settings);
}

// ---- a run with exactly its planned memory --------------------------------------------------------------------------
static Method rolling_method = METHOD_STREAM;

static RolloutSettings rollout_settings(void) {
    static const uint32_t end_ids[] = {7, 77, 177, 200, 201, 202, 203, 204, 205, 206, 207};
    RolloutSettings s = rolling_settings();
    s.prompts = s.most_prompts = s.step_prompts = P;
    s.group_size = G, s.max_new_tokens = NEW, s.slots = 5;
    s.end_ids = end_ids, s.end_count = COUNT_OF(end_ids);
    return s;
}

// how: of the reward command; NULL: completions have no rewards
static Rolling *rolling_open(RolloutSettings settings, const char *how, const char *tokens) {
    static const char experts[] =
        "qwen3_moe,hidden_size=16,intermediate_size=20,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1,"
        "head_dim=8,vocab_size=256,num_experts=5,num_experts_per_tok=2,moe_intermediate_size=12,mlp_only_layers=1";
    static const char config[] =
        "qwen3_5,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
        "head_dim=8,vocab_size=256,layer_types=lf,linear_num_key_heads=1,linear_num_value_heads=2,linear_key_head_dim="
        "12,linear_value_head_dim=4";
    Rolling *r = (Rolling *)checked_calloc(1, sizeof(*r), "a run");
    Objective objective = {0};
    objective.kind = OBJECTIVE_GRPO, objective.clip_low = objective.clip_high = 0.2;
    r->data = open_prompts();
    r->text.bytes = !strcmp(tokens, "bytes");
    snprintf(r->command, sizeof(r->command), "exec '%s' --answer '%s' '%s'", own_path, how ? how : "",
             scratch_path("lines"));
    remove(scratch_path("lines"));
    r->settings = settings;
    r->settings.rewards = how != NULL, r->settings.reward_weight[0] = 1;
    r->settings.reward_command[0] = r->command, snprintf(r->settings.reward_name[0], REWARD_NAME, "sum");
    rolling_begin(r, settings.records ? experts : config, objective, rolling_method);
    return r;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
// Checks that document d of a sequence is the completion, with its values.
static void expect_document(const Batch *b, size_t d, const Completion *text, float reward, double advantage,
                            size_t group) {
    size_t begin = b->document_start[d], n = b->document_start[d + 1] - begin;
    assert_int_equal(n, text->prompt_tokens + text->tokens - 1);
    assert_true(b->reward[d] == reward && b->group[d] == group && b->document_weight[d] == (double)text->tokens);
    for (size_t t = 0; t < n; t++) {
        int32_t whole[LONGEST + NEW + 1];
        memcpy(whole, text->prompt, text->prompt_tokens * sizeof(int32_t));
        memcpy(whole + text->prompt_tokens, text->ids, text->tokens * sizeof(int32_t));
        if (b->tokens[begin + t] != whole[t]) test_fail("document %zu, position %zu: token", d, t);
        if (b->targets[begin + t] != (t + 1 < text->prompt_tokens ? -1 : whole[t + 1]))
            test_fail("document %zu, position %zu: target %d", d, t, b->targets[begin + t]);
        if (b->position[begin + t] != (int32_t)t || b->loss_weight[begin + t] != 1)
            test_fail("document %zu, position %zu: position or weight", d, t);
        if (!(fabs((double)b->advantage[begin + t] - advantage) <= 1e-6))
            test_fail("document %zu: advantage %g, expected %g", d, (double)b->advantage[begin + t], advantage);
    }
}

// Checks that the sequences hold exactly the groups with known rewards, each whole; `known` completions have rewards.
static void expect_sequences(Rolling *r, size_t sequences, size_t known, size_t capacity) {
    const Rollout *o = &r->rollout;
    size_t seen = 0, tokens = 0, positions = 0;
    for (size_t i = 0; i < sequences; i++) {
        const Batch *b = &o->sequence[i];
        size_t d = 0;
        assert_true(b->N > 0 && b->N <= capacity && b->document_start[0] == 0);
        for (size_t p = 0; p < known / G; p++) {
            double mean = 0, squares = 0;
            if (o->group_sequence[p] != i) continue;
            for (size_t g = 0; g < G; g++) mean += (double)o->reward[p * G + g] / G;
            for (size_t g = 0; g < G; g++) squares += pow((double)o->reward[p * G + g] - mean, 2);
            for (size_t k = p * G; k < (p + 1) * G; k++, d++) {
                expect_document(b, d, &o->completion[k], o->reward[k],
                                ((double)o->reward[k] - mean) / (sqrt(squares / (G - 1)) + 1e-4), d / G);
                tokens += o->completion[k].tokens;
            }
            seen++;
        }
        assert_true(b->documents == d && b->document_start[d] == b->N);
        positions += b->N;
    }
    assert_int_equal(seen, known / G);
    assert_true(o->counts.tokens == (double)tokens && o->counts.documents == (double)(seen * G));
    assert_true(o->counts.groups == (double)seen);
    assert_true(sequences <= known / G && (!sequences || positions > (sequences - 1) * capacity / 2));
}

static double metric(const Rollout *r, const char *name) {
    for (size_t i = 0; i < r->metrics.count; i++)
        if (!strcmp(r->metrics.metric[i].name, name)) return metric_value(&r->metrics.metric[i]);
    test_fail("no metric %s", name);
    return 0;
}

// ---- the tests ------------------------------------------------------------------------------------------------------
static void expect_text_at(const cJSON *object, const char *key, const char *text) {
    const cJSON *item = cJSON_GetObjectItem(object, key);
    if (!text && cJSON_IsNull(item)) return;
    if (!text || !cJSON_IsString(item) || strcmp(item->valuestring, text) != 0)
        test_fail("%s is '%s', expected '%s'", key, item && item->valuestring ? item->valuestring : "?",
                  text ? text : "null");
}

static void expect_ids(const cJSON *object, const char *key, const int32_t *ids, size_t count) {
    const cJSON *array = cJSON_GetObjectItem(object, key);
    if (!cJSON_IsArray(array) || (size_t)cJSON_GetArraySize(array) != count) test_fail("%s: not %zu ids", key, count);
    for (size_t i = 0; i < count; i++)
        if (cJSON_GetArrayItem(array, (int)i)->valueint != ids[i]) test_fail("%s: id %zu", key, i);
}

// Checks that the line's object has `own` keys, followed by the columns of the prompt's row.
static void expect_columns(const cJSON *object, int own, size_t number) {
    cJSON *columns = cJSON_Parse(columns_of(number));
    const cJSON *item = object->child, *column;
    for (int i = 0; i < own; i++) item = item ? item->next : NULL;
    cJSON_ArrayForEach(column, columns) {
        if (!item || strcmp(item->string, column->string) || !cJSON_Compare(item, column, 1))
            test_fail("column %s of prompt %zu", column->string, number);
        item = item->next;
    }
    if (item) test_fail("%s behind the columns of prompt %zu", item->string, number);
    cJSON_Delete(columns);
}

// Checks that line i of a step is completion i's; the command parsed all lines as JSON.
static void expect_lines(const Rolling *r, char *lines) {
    const Rollout *o = &r->rollout;
    for (size_t i = 0; i < P * G; i++) {
        char *end = strchr(lines, '\n'), text[4 * NEW + 1], reference[PROMPTS + 1] = "ABCDEFG";
        size_t p = i / G, number = o->number[p];
        cJSON *object = end ? cJSON_Parse((*end = 0, lines)) : NULL;
        if (!object) test_fail("%zu lines, not %d", i, P * G);
        assert_int_equal(cJSON_GetObjectItem(object, "prompt_number")->valueint, number);
        assert_int_equal(cJSON_IsTrue(cJSON_GetObjectItem(object, "ended")), o->completion[i].ended);
        expect_ids(object, "completion_ids", o->completion[i].ids, o->completion[i].tokens);
        reference[number + 1] = 0;
        if (r->text.bytes) {
            text[prompt_text(&r->text, o->completion[i].ids, o->completion[i].tokens, text)] = 0;
            expect_text_at(object, "prompt", prompts[number][1]); // a completion may hold a zero, where C's texts end
            expect_text_at(object, "completion", text);
            expect_text_at(object, "reference", reference);
            if (number != 6) expect_text_at(object, "answer", reference); // unless another column has this name
            expect_columns(object, number == 6 ? 6 : 7, number);
        } else {
            expect_ids(object, "prompt_ids", o->completion[i].prompt, o->prompt_tokens[p]);
            expect_ids(object, "reference_ids", o->documents + p * o->room + o->prompt_tokens[p], number + 1);
            expect_columns(object, 5, number);
        }
        cJSON_Delete(object);
        lines = end + 1;
    }
    assert_int_equal(*lines, 0);
}

TEST(lines_and_sequences) {
    size_t ended = 0;
    for (size_t c = 0; c < 4; c++) { // sequences for one group's worst case, for two
        RolloutSettings settings = rollout_settings();
        test_case("case %zu", c);
        settings.sequence_tokens = c % 3 * G * (LONGEST + NEW);
        Rolling *r = rolling_open(settings, "numbers", c < 3 ? "bytes" : "none");
        for (size_t number = 1; number <= 6; number++) {
            size_t sequences = step(r, number);
            for (size_t i = 0; i < P * G; i++) {
                const Completion *text = &r->rollout.completion[i];
                if (r->rollout.reward[i] != reward_of(text->ids, text->tokens)) test_fail("reward %zu", i);
                ended += (size_t)text->ended;
                assert_true(text->tokens == NEW || text->ended);
            }
            expect_sequences(r, sequences, P * G, r->rollout.settings.sequence_tokens);
            assert_true(metric(&r->rollout, "left_out") == 0 && metric(&r->rollout, "frac_reward_zero_std") < 1);
            // the command buffers its file, which is whole once the command has ended
            reward_close(&r->rollout.command[0]);
            expect_lines(r, read_whole(scratch_path("lines"), NULL));
            remove(scratch_path("lines")); // before the next command creates it
            reward_open(&r->rollout.command[0], r->command, NULL, 100, r->rollout.piece);
        }
        rolling_close(r);
    }
    assert_true(ended > 15 && ended < 4 * 6 * P * G - 15);
}

static void expect_same_step(Rolling *a, Rolling *b, size_t sequences) {
    assert_memory_equal(a->rollout.number, b->rollout.number, P * sizeof(size_t));
    assert_memory_equal(a->rollout.reward, b->rollout.reward, P * G * sizeof(float));
    for (size_t i = 0; i < sequences; i++) {
        const Batch *x = &a->rollout.sequence[i], *y = &b->rollout.sequence[i];
        expect_same_batch(x, y);
        assert_memory_equal(x->advantage, y->advantage, x->N * sizeof(float));
        assert_memory_equal(x->reward, y->reward, x->documents * sizeof(float));
    }
}

// Checks that the completions of a sequence's groups share long prompts, and nothing else. Returns the sequence's rows.
static size_t expect_shared_prompts(const Rollout *r, size_t i) {
    const Batch *b = &r->sequence[i];
    size_t rows = b->N, forks = 0;
    for (size_t p = 0; p < P; p++) {
        const size_t shared = r->prompt_tokens[p] - 1;
        if (r->group_sequence[p] == i && shared >= PREFIX_LEAST) forks++, rows -= (G - 1) * shared;
    }
    assert_true(batch_rows(b)->N == rows && rows <= r->packing.capacity && (b->tree != NULL) == (forks > 0));
    if (b->tree) expect_tree(b, PREFIX_LEAST);
    assert_true(!b->tree || b->tree->forks == forks);
    return rows;
}

// Groups that share their prompts have the documents of groups that do not, in sequences of as many rows.
TEST(completions_share_their_prompt) {
    prompt_repeats = 8;
    for (size_t c = 0; c < 3; c++) {
        RolloutSettings settings = rollout_settings();
        size_t positions = 0, rows = 0, unshared = 0;
        test_case("case %zu", c);
        settings.sequence_tokens = c * G * (8 * LONGEST + NEW);
        Rolling *off = rolling_open(settings, "numbers", "none");
        settings.shares = 1;
        Rolling *on = rolling_open(settings, "numbers", "none");
        const SequenceBound bound = rollout_bound(&on->settings, &on->data);
        const size_t shared = 8 * LONGEST - 1, alone = G * (8 * strlen("plain") - 1); // the longest prompt below 65
        assert_int_equal(bound.rows, max_size(c, 1) * (max_size(shared, alone) + G * NEW));
        assert_int_equal(on->rollout.packing.capacity, bound.rows);
        for (size_t number = 1; number <= 5; number++) {
            const size_t sequences = step(on, number), others = step(off, number);
            for (size_t i = 0; i < others; i++) unshared += off->rollout.sequence[i].N;
            assert_memory_equal(on->rollout.reward, off->rollout.reward, P * G * sizeof(float));
            assert_true(on->rollout.counts.tokens == off->rollout.counts.tokens);
            for (size_t i = 0; i < sequences; i++) {
                const Batch *b = &on->rollout.sequence[i];
                positions += b->N, rows += expect_shared_prompts(&on->rollout, i);
                assert_true(b->N <= bound.N && b->documents <= bound.documents);
            }
        }
        assert_true(positions == unshared && rows < unshared / 2);
        rolling_close(on), rolling_close(off);
    }
    prompt_repeats = 1;
}

// A run from step 6 on, and one with other slots, repeat the steps; every epoch has every prompt once.
TEST(a_step_follows_from_its_number) {
    RolloutSettings settings = rollout_settings(), fewer = settings;
    int32_t ids[2][NEW] = {{0}};
    size_t sequences = 0, seen[PROMPTS] = {0}, orders = 0, order[PROMPTS];
    fewer.slots = 2;
    Rolling *first = rolling_open(settings, "numbers", "bytes"), *again = rolling_open(settings, "numbers", "bytes");
    Rolling *other = rolling_open(fewer, "numbers", "bytes");
    for (size_t number = 1; number <= 7; number++) { // three epochs of seven prompts, three a step
        sequences = step(first, number);
        for (size_t i = 0; i < P; i++) {
            const size_t k = (number - 1) * P + i, prompt = first->rollout.number[i];
            seen[prompt]++;
            if (k < PROMPTS) order[k] = prompt;
            orders += order[k % PROMPTS] != prompt;
            if (k < 2 * PROMPTS && prompt == 3)
                memcpy(ids[k / PROMPTS], first->rollout.completion[i * G].ids, sizeof(ids[0]));
            if (k % PROMPTS == PROMPTS - 1)
                for (size_t p = 0; p < PROMPTS; p++) assert_int_equal(seen[p], k / PROMPTS + 1);
        }
        if (number < 6) continue;
        assert_int_equal(step(again, number), sequences);
        expect_same_step(first, again, sequences);
        if (ops_device->stored != DTYPE_FP64) continue; // bf16 and fp32 may round differently
        assert_int_equal(step(other, number), sequences);
        expect_same_step(first, other, sequences);
    }
    assert_true(orders > 3);
    assert_true(memcmp(ids[0], ids[1], sizeof(ids[0])) != 0); // the same prompt in the next epoch
    rolling_close(first), rolling_close(again), rolling_close(other);
}

static void expect_old(Rolling *r, size_t sequences) {
    for (size_t i = 0; i < sequences; i++) {
        const Batch *b = &r->rollout.sequence[i];
        float *now = (float *)case_memory(b->N * sizeof(float));
        forward_policy(&r->run.s, b, 0, now);
        for (size_t t = 0; t < b->N; t++)
            if (b->targets[t] >= 0) assert_memory_equal(&b->old[t], &now[t], sizeof(float));
    }
}

// Completions written one step ahead: the current step's batches stay unchanged. Old log-probabilities are the
// weights', here and in a run resumed from a checkpoint.
TEST(a_step_written_ahead) {
    static const char *const how[] = {"numbers", "dies", "numbers"};
    for (size_t i = 0; i < COUNT_OF(how); i++) {
        RolloutSettings settings = rollout_settings();
        settings.stop = 0, settings.records = settings.replays = i == 2;
        Rolling *now = rolling_open(settings, how[i], "bytes");
        settings.overlap = settings.old = 1;
        Rolling *first = rolling_open(settings, how[i], "bytes"), *resumed = rolling_open(settings, how[i], "bytes");
        for (size_t number = 1; number <= 4; number++) {
            const size_t sequences = step(now, number);
            assert_int_equal(step(first, number), sequences);
            expect_same_step(now, first, sequences);
            if (number > 1) expect_old(first, sequences);
            if (number == 4) {
                assert_int_equal(step(resumed, number), sequences);
                expect_same_step(now, resumed, sequences);
                expect_old(resumed, sequences);
            }
            allocation_guard = 1;
            rollout_ahead(&first->rollout, &first->run.s, number + 1);
            allocation_guard = 0;
            assert_int_equal(first->rollout.sequences, sequences);
            for (size_t k = 0; k < sequences; k++)
                expect_same_batch(&now->rollout.sequence[k], &first->rollout.sequence[k]);
            if (number != 3) continue;
            rollout_save(&first->rollout);
            assert_int_equal(first->rollout.part.count, resumed->rollout.part.whole);
            memcpy(resumed->rollout.part.bytes, first->rollout.part.bytes, first->rollout.part.count);
            rollout_load(&resumed->rollout, number + 1, &resumed->model.config, "a checkpoint");
        }
        rolling_close(first), rolling_close(now), rolling_close(resumed);
    }
}

// ---- routes of experts ----------------------------------------------------------------------------------------------
// Checks that the routes of a text are those of feeding it alone, in chunks.
static void expect_fed_alone(Rolling *r, const Completion *text) {
    const size_t tokens = text->prompt_tokens + text->tokens - 1, routes = rollout_routes(&r->rollout, text);
    int32_t ids[LONGEST + NEW];
    Cache cache;
    memcpy(ids, text->prompt, text->prompt_tokens * sizeof(int32_t));
    memcpy(ids + text->prompt_tokens, text->ids, (text->tokens - 1) * sizeof(int32_t));
    cache_allocate(&cache, 1, rollout_capacity(&r->settings, &r->data));
    cache_record(&cache, &r->model.config);
    cache.route[0] = (uint16_t *)case_memory(routes * sizeof(uint16_t));
    cache_begin(&cache, &r->run.s);
    cache_feed(&cache, &r->run.s, 0, ids, tokens);
    cache_end(&cache, &r->run.s);
    assert_memory_equal(text->route, cache.route[0], routes * sizeof(uint16_t));
    cache_free(&cache);
}

TEST(routes_of_texts) {
    RolloutSettings settings = rollout_settings();
    settings.records = 1;
    Rolling *r = rolling_open(settings, "numbers", "bytes");
    for (size_t number = 1; number <= 2; number++) {
        const size_t sequences = step(r, number);
        for (size_t i = 0; i < P * G; i++) expect_fed_alone(r, &r->rollout.completion[i]);
        for (size_t i = 0; i < sequences; i++) {
            const Batch *b = &r->rollout.sequence[i];
            Metrics metrics = {0};
            size_t d = 0;
            for (size_t k = 0; k < P * G; k++) {
                if (r->rollout.group_sequence[k / G] != i) continue;
                const Completion *text = &r->rollout.completion[k];
                for (size_t t = 0; t < text->prompt_tokens + text->tokens - 1; t++)
                    for (size_t l = 0; l < 2; l++)
                        assert_memory_equal(batch_route(b, l, b->document_start[d] + t), text->route + (t * 2 + l) * 2,
                                            2 * sizeof(uint16_t));
                d++;
            }
            forward_backward(&r->run.s, b, 1, 1, &metrics);
            assert_true(metric_named(&metrics, "router_differs") == 0);
        }
    }
    rolling_close(r);
}

// Exchanges two experts of every layer: their matrices, if `matrices`; they have equal rows of the router.
static void exchange_experts(const Model *model, double *weights, int matrices) {
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const size_t count = p->experts ? parameter_elements(p) / p->experts : p->cols;
        double *a = weights + p->offset + count, *b = a + count; // experts 1 and 2
        for (size_t j = 0; p->role == ROLE_ROUTER && !matrices && j < count; j++) b[j] = a[j];
        for (size_t j = 0; p->experts && matrices && j < count; j++) {
            const double x = a[j];
            a[j] = b[j], b[j] = x;
        }
    }
}

// Returns the gradient of a rollout's only sequence; out: log-probabilities
static double *gradient_of(Rolling *r, const Batch *b, const double *weights, float *out, Metrics *metrics) {
    StreamBP *s = &r->run.s;
    device_write(ops_device, s->memory.weights, r->model.dtype, weights, r->model.elements);
    forward_policy(s, b, 0, out);
    grads_zero(&s->memory);
    forward_backward(s, b, 1, 1, metrics);
    return device_read(ops_device, s->memory.gradients, r->run.settings.gradient_type, r->model.elements);
}

static double distance(const double *a, const double *b, size_t count) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++) difference += pow(a[i] - b[i], 2), size += b[i] * b[i];
    return sqrt(difference / size);
}

// Experts 1 and 2 tie, and a router takes 1. The model whose experts 1 and 2 are exchanged writes texts: this one would
// have with 2, and by replay has that one's gradient. Chosen afresh, another function is differentiated; it is counted.
TEST(replayed_routes) {
    static const Method methods[] = {METHOD_STREAM, METHOD_SECO};
    const double near = ops_device->stored == DTYPE_FP64 ? 1e-12 : 1e-5;
    for (size_t m = 0; m < COUNT_OF(methods); m++) {
        RolloutSettings settings = rollout_settings();
        settings.records = settings.replays = 1, settings.sequence_tokens = P * G * (LONGEST + NEW);
        settings.slots = m ? 3 : 5;
        rolling_method = methods[m];
        Rolling *r = rolling_open(settings, "numbers", "bytes");
        rolling_method = METHOD_STREAM;
        double *weights = tiny_weights(&r->model, 8), counted = 0, flipped = 0, *gradient[3];
        float *logp[3];
        exchange_experts(&r->model, weights, 0);
        exchange_experts(&r->model, weights, 1);
        device_write(ops_device, r->run.s.memory.weights, r->model.dtype, weights, r->model.elements);
        exchange_experts(&r->model, weights, 1);
        assert_int_equal(step(r, 1), 1);
        Batch *b = &r->rollout.sequence[0];
        for (size_t i = 0; i < 2 * b->N; i++) {
            uint16_t *route = batch_route(b, i / b->N, i % b->N);
            const int first = route[0] == 1 || route[1] == 1, second = route[0] == 2 || route[1] == 2;
            counted += 2, flipped += i < b->N && first != second; // the second layer has other inputs, too
            for (size_t j = 0; j < 2; j++)
                if (route[j] == 1 || route[j] == 2) route[j] = 3 - route[j];
        }
        assert_true(flipped > 0);
        for (size_t i = 0; i < 3; i++) { // replayed; chosen afresh; of the exchanged model
            Metrics metrics = {0};
            logp[i] = (float *)case_memory(b->N * sizeof(float));
            if (i == 2) exchange_experts(&r->model, weights, 1);
            b->routes.replays = !i;
            gradient[i] = gradient_of(r, b, weights, logp[i], &metrics);
            if (i == 1) assert_true(metric_named(&metrics, "router_differs") >= flipped / counted);
            if (i == 0) assert_true(isnan(metric_named(&metrics, "router_differs")));
        }
        exchange_experts(&r->model, gradient[2], 1); // the routers' rows are not exchanged
        for (size_t i = 0; i < r->model.parameter_count; i++) {
            const Parameter *p = &r->model.parameters[i];
            const double *of = gradient[2] + p->offset;
            if (p->role == ROLE_ROUTER) continue;
            const double replayed = distance(gradient[0] + p->offset, of, parameter_elements(p));
            if (!(replayed <= near)) test_fail("parameter %zu: replayed, off by %g", i, replayed);
            const double afresh = distance(gradient[1] + p->offset, of, parameter_elements(p));
            if (p->experts && !(afresh > 0.1)) test_fail("parameter %zu: chosen afresh, off by only %g", i, afresh);
        }
        for (size_t t = 0; t < b->N; t++)
            if (b->targets[t] >= 0 && !(fabs((double)(logp[0][t] - logp[2][t])) <= 1e-4))
                test_fail("log-probability %zu is %g, not %g", t, (double)logp[0][t], (double)logp[2][t]);
        for (size_t i = 0; i < 3; i++) free(gradient[i]);
        free(weights);
        rolling_close(r);
    }
}

// ---- a teacher in place of rewards ----------------------------------------------------------------------------------
// The gradient of distill, reverse, on the policy's texts is grpo's with advantages log p_teacher - logp. Advantages are
// fp32, and the gradient is linear in them, so three parts of each are fed.
TEST(a_teacher_is_grpo_with_its_advantages) {
    RolloutSettings settings = rollout_settings();
    settings.reference = 1, settings.group_size = 1, settings.sequence_tokens = P * (LONGEST + NEW);
    Rolling *r = rolling_open(settings, NULL, "bytes");
    StreamBP *s = &r->run.s;
    Objective *objective = (Objective *)(uintptr_t)&s->setup->objective;
    const DType type = dtype_of_sums(r->model.dtype);
    double *weights = tiny_weights(&r->model, 5), *teacher = tiny_weights(&r->model, 6);
    assert_int_equal(step(r, 1), 1);
    Batch *b = &r->rollout.sequence[0];
    assert_true(b->documents == P && isnan(r->rollout.reward[0]));
    assert_true(isnan(metric_named(&r->rollout.metrics, "frac_reward_zero_std")) &&
                metric(&r->rollout, "left_out") == 0);
    assert_true(metric(&r->rollout, "completions/mean_length") * P == r->rollout.counts.tokens);

    device_write(ops_device, s->memory.weights, r->model.dtype, teacher, r->model.elements);
    forward_policy(s, b, 0, b->reference);
    device_write(ops_device, s->memory.weights, r->model.dtype, weights, r->model.elements);
    forward_logprobs(s, b, 1, 0);
    double *advantage = (double *)case_memory(b->N * sizeof(double));
    for (size_t t = 0; t < b->N; t++) advantage[t] = (double)b->reference[t] - value_at(s->now.host_sums, type, t);
    objective->normalisation = NORMALISE_BNPO;
    grads_zero(&s->memory);
    for (size_t part = 0; part < 3; part++) {
        for (size_t t = 0; t < b->N; t++)
            b->advantage[t] = (float)advantage[t], advantage[t] -= (double)b->advantage[t];
        forward_backward(s, b, 1, part == 2, NULL);
    }
    double *wanted = device_read(ops_device, s->memory.gradients, r->run.settings.gradient_type, r->model.elements);
    objective->kind = OBJECTIVE_DISTILL, objective->distill_loss = DISTILL_REVERSE;
    float *logp = (float *)case_memory(b->N * sizeof(float));
    double *found = gradient_of(r, b, weights, logp, NULL);
    const double off = distance(found, wanted, r->model.elements);
    if (!(off <= (ops_device->stored == DTYPE_FP64 ? 1e-12 : 1e-5))) test_fail("gradients differ by %g", off);
    free(weights), free(teacher), free(wanted), free(found);
    rolling_close(r);
}

// ---- the text of a tokenizer ----------------------------------------------------------------------------------------
// Checks the line of a prompt and a completion: their texts together equal the decoded ids of both, without special
// tokens.
static void expect_tokenizer_line(const char *style, const char *prompt, const char *answer_text) {
    static char line[1 << 16], whole[1 << 16], texts[1 << 16];
    char path[128];
    size_t number = 0, bytes = 0, made;
    TokenIds ids = {0};
    Completion completion = {0};
    Prompt text = {0};
    Rollout r = {0};
    test_case("%s: %s|%s", style, prompt, answer_text);
    snprintf(path, sizeof(path), "test/golden/tokenizers/%s.tok", style);
    text.tokenizer = tokenizer_open(path);
    tokenizer_prompt(text.tokenizer, prompt, strlen(prompt), &ids);
    completion.prompt_tokens = ids.count;
    tokenizer_encode(text.tokenizer, answer_text, strlen(answer_text), 1, &ids);
    token_ids_add(&ids, text.tokenizer->end_ids[0]);
    completion.prompt = ids.id, completion.ids = ids.id + completion.prompt_tokens;
    completion.tokens = ids.count - completion.prompt_tokens, completion.ended = 1;
    r.settings.prompts = r.settings.most_prompts = r.settings.step_prompts = r.settings.group_size = 1;
    r.completion = &completion, r.tokens = &completion.prompt_tokens, r.number = &number;
    rollout_allocate_text(&r, &text);
    while ((made = rollout_lines(&r, 0, line + bytes, r.piece)) > 0) bytes += made;
    line[bytes] = 0;
    cJSON *object = cJSON_Parse(line);
    if (!object) test_fail("not JSON: %s", line);
    whole[prompt_text(&text, ids.id, ids.count, whole)] = 0;
    snprintf(texts, sizeof(texts), "%s%s", cJSON_GetObjectItem(object, "prompt")->valuestring,
             cJSON_GetObjectItem(object, "completion")->valuestring);
    if (strcmp(texts, whole) != 0) test_fail("%s together are '%s', not '%s'", line, texts, whole);
    expect_text_at(object, "prompt", prompt);
    expect_text_at(object, "reference", NULL);
    expect_ids(object, "completion_ids", completion.ids, completion.tokens);
    cJSON_Delete(object);
    tokenizer_close(text.tokenizer);
    free(ids.id), free(r.scratch);
}

TEST(lines_of_a_tokenizer) {
    static const char *const styles[] = {"gpt2", "llama3", "qwen2", "gemma", "llama2", "mistral"};
    static const char *const texts[][2] = {
        {"Hello", " world"}, {"say \"\\\" \n\tto", "\xf0\x9f\x98\x80 \xd1\x8f \x01"}, {"x = 1;\n", "  y"}};
    for (size_t i = 0; i < COUNT_OF(styles); i++)
        for (size_t k = 0; k < 3; k++) expect_tokenizer_line(styles[i], texts[k][0], texts[k][1]);
}

// ---- a command that fails -------------------------------------------------------------------------------------------
static void skip_failures(const void *how) {
    RolloutSettings settings = rollout_settings();
    settings.stop = 0;
    const int later = !strcmp(how, "fails later");
    Rolling *r = rolling_open(settings, later ? "fails" : (const char *)how, "bytes");
    for (size_t number = later ? 2 : 1; number <= 12; number++) { // later: of a resumed run
        size_t sequences = step(r, number), known = strcmp(how, "dies") ? 0 : 10 / G * G;
        expect_sequences(r, sequences, known, r->rollout.settings.sequence_tokens);
        if (metric(&r->rollout, "left_out") != (double)(P - known / G) / P) exit(4);
    }
    rolling_close(r);
}

// Runs one step with a failing command; NULL: with sequences that are too small for a group.
static void stop_at_failure(const void *how) {
    RolloutSettings settings = rollout_settings();
    settings.sequence_tokens = how ? 0 : 20;
    Rolling *r = rolling_open(settings, how ? (const char *)how : "numbers", "bytes");
    step(r, 1);
    rolling_close(r);
}

TEST(failures) {
    const Child *child = run_child(skip_failures, "dies");
    if (child->code || count_lines(child->err) != 12 ||
        !strstr(child->err, "note: step 12: the reward command ended after 10 of 12 answers, with exit code 9; it is "
                            "restarted; 1 of 3 groups are left out"))
        test_fail("exit code %d: %.300s", child->code, child->err);
    expect_refused(skip_failures, "fails", EXIT_RUNTIME, "exit code 8; no completion got a reward in the first step");
    expect_refused(skip_failures, "nulls", EXIT_RUNTIME,
                   "step 1: reward commands answered null; 9 of 12 completions got a reward in the first step, but no "
                   "group got one for all of its 4; answer each line with a number");
    child = run_child(skip_failures, "fails later");
    if (child->code != EXIT_RUNTIME ||
        !strstr(child->err, "step 11: the reward command ended after 0 of 12 answers, "
                            "with exit code 8; no group got a reward for each completion in 10 steps"))
        test_fail("exit code %d: %s", child->code, child->err);
    expect_refused(stop_at_failure, "dies", EXIT_RUNTIME,
                   "step 1: the reward command ended after 10 of 12 answers, with exit code 9; --reward-failure skip");
    expect_refused(stop_at_failure, NULL, EXIT_RUNTIME, "a group of 4 completions may have 88 positions");
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "--answer")) answer(argv[2], argv[3]);
    if (!realpath(argv[0], own_path)) return 1;
    RUN_LISTED(argc, argv, scratch_remove);
}
