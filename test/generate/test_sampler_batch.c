/*
Texts side by side equal Sampler's own, for any number of slots, any prompts beside, any order of freed slots. Logits of
a step equal those of a text alone. A run keeps to its plan, allocates nothing, leaves the arena as it was and training
untouched; refusals.
*/
#include "sampler_run.h"
#include "test/base/child.h"

enum { TEXTS = 9, ROOM = 11, LONGEST_PROMPT = 5, TOKENS = LONGEST_PROMPT + ROOM - 1 }; // 15 of GPT-2's 16 positions

// ---- a run, and its texts ------------------------------------------------------------------------------------------
static Run *batch_run(size_t i, size_t chunk, size_t logits_chunk, size_t slots, const Batch *batch) {
    RunSettings settings = sampling_run(chunk, TOKENS);
    settings.logits_chunk = logits_chunk;
    settings.rollout_slots = slots, settings.rollout_tokens = TOKENS;
    settings.backward = batch != NULL;
    return run_of(i, settings, batch, 1);
}

typedef struct {
    int32_t prompt[4][LONGEST_PROMPT], ids[TEXTS][ROOM];
    Completion text[TEXTS];
} Texts;

// Fills nine texts of four prompts of one to five tokens; one prompt's texts are not all adjacent.
static Texts *some_texts(Texts *texts, size_t V) {
    static const size_t prompt_of[TEXTS] = {0, 0, 1, 1, 1, 2, 3, 3, 0}, tokens[4] = {5, 1, 3, 2};
    static const size_t room[TEXTS] = {ROOM, ROOM, 4, ROOM, 1, ROOM, 7, ROOM, ROOM};
    memset(texts, 0, sizeof(*texts));
    for (size_t i = 0; i < 4; i++)
        for (size_t t = 0; t < LONGEST_PROMPT; t++) texts->prompt[i][t] = (int32_t)random_below(11, i, t, V);
    for (size_t i = 0; i < TEXTS; i++) {
        Completion *text = &texts->text[i];
        text->prompt = texts->prompt[prompt_of[i]], text->prompt_tokens = tokens[prompt_of[i]];
        text->seed = random_bits(3, 4, i);
        text->ids = texts->ids[i], text->room = room[i];
    }
    return texts;
}

// Writes the texts with Sampler, one after the other.
static void write_alone(Run *run, Texts *texts, SamplingSettings settings, const uint32_t *end_ids, size_t end_count) {
    for (size_t i = 0; i < TEXTS; i++) {
        Completion *text = &texts->text[i];
        settings.seed = text->seed;
        text->tokens = 0, text->ended = 0;
        sampler_begin(&run->sampler, &run->tiny.s);
        sampler_feed(&run->sampler, text->prompt, text->prompt_tokens);
        while (text->tokens < text->room && !text->ended) {
            int32_t id = sampler_next(&run->sampler, &settings);
            text->ids[text->tokens++] = id;
            for (size_t e = 0; e < end_count; e++) text->ended |= (uint32_t)id == end_ids[e];
        }
        sampler_end(&run->sampler);
    }
}

static void write_together(Run *run, size_t slots, Texts *texts, SamplingSettings settings, const uint32_t *end_ids,
                           size_t end_count) {
    SamplerBatch sampler;
    size_t used = run->tiny.arena->used, regions = run->tiny.arena->regions;
    sampler_batch_allocate(&sampler, &run->model, slots, TOKENS);
    allocation_guard = 1;
    sampler_batch(&sampler, &run->tiny.s, texts->text, TEXTS, &settings, end_ids, end_count);
    allocation_guard = 0;
    sampler_batch_free(&sampler);
    assert_true(run->tiny.arena->used == used && run->tiny.arena->regions == regions);
}

static void expect_texts(const Texts *found, const Texts *expected) {
    for (size_t i = 0; i < TEXTS; i++) {
        const Completion *a = &found->text[i], *b = &expected->text[i];
        for (size_t t = 0; t < min_size(a->tokens, b->tokens); t++)
            if (a->ids[t] != b->ids[t]) test_fail("text %zu: token %zu is %d, alone %d", i, t, a->ids[t], b->ids[t]);
        if (a->tokens != b->tokens || a->ended != b->ended)
            test_fail("text %zu: %zu tokens, ended %d; alone %zu, %d", i, a->tokens, a->ended, b->tokens, b->ended);
    }
}

// ---- the tests -----------------------------------------------------------------------------------------------------
// In bf16 one rounding can change a token, so single-token steps are compared with single-token steps.
TEST(texts_as_if_alone) {
    static const size_t slots[] = {1, 2, 7, TEXTS, 20}, chunks[] = {1, 3, 100};
    static const uint32_t end_ids[] = {3, 9};
    static const SamplingSettings settings[] = {{0, 0, 0, 1, 0}, {1.5, 0, 0, 1, 0}, {1, 0, 5, 0.9, 0}};
    static Texts texts[2];
    const int bf16 = ops_device->stored == DTYPE_BF16;
    size_t ended = 0;
    for (size_t i = 0; i < MODELS; i += EMULATED ? 3 : 1) {
        for (size_t g = 0; g < (EMULATED ? 2 : 3); g++) {
            Texts *alone = some_texts(&texts[0], vocabulary(i));
            Run *run = batch_run(i, bf16 ? 1 : 4, 2, 1, NULL);
            write_alone(run, alone, settings[g], end_ids, 2);
            run_close(run);
            for (size_t k = 0; k < TEXTS; k++) ended += (size_t)alone->text[k].ended;
            for (size_t k = 0; k < (bf16 ? 1 : sizeof(slots) / sizeof(slots[0])); k++) {
                const size_t c = bf16 || EMULATED ? 0 : (k + g) % 3;
                Texts *together = some_texts(&texts[1], vocabulary(i));
                test_case("%.30s..., %zu slots, chunks of %zu, temperature %g", models[i], slots[k], chunks[c],
                          settings[g].temperature);
                run = batch_run(i, chunks[c], 1 + c, slots[k], NULL);
                write_together(run, slots[k], together, settings[g], end_ids, 2);
                expect_texts(together, alone);
                run_close(run);
            }
        }
    }
    if (EMULATED) return;
    assert_true(ended > MODELS && ended < 3 * MODELS * TEXTS - MODELS); // some texts end early, some do not
}

// Compares logits with those of a text alone; in bf16 too, where tokens may differ. The texts grow by random packings
// of several tokens each, and by steps of one token.
static void compare_logits(size_t i, size_t chunk, size_t slots, size_t packings) {
    Run *run = batch_run(i, chunk, 2, slots, NULL);
    size_t V = vocabulary(i), row = V * dtype_size(ops_device->stored), t, b, count, left;
    double *alone = case_doubles(slots * TOKENS * V);
    char *stored = (char *)case_memory(slots * row);
    int32_t *text = (int32_t *)case_memory(slots * TOKENS * sizeof(int32_t)), next[8];
    size_t listed[8];
    Append append[8];
    Cache cache;
    for (b = 0; b < slots; b++) {
        sampler_begin(&run->sampler, &run->tiny.s);
        for (t = 0; t < TOKENS; t++) {
            text[b * TOKENS + t] = (int32_t)random_below(21, b, t, V);
            sampler_feed(&run->sampler, &text[b * TOKENS + t], 1);
            memcpy(alone + (b * TOKENS + t) * V, sampler_logits(&run->sampler), V * sizeof(double));
        }
        sampler_end(&run->sampler);
    }
    cache_allocate(&cache, slots, TOKENS);
    for (size_t packing = 0; packing < packings; packing++) {
        cache_begin(&cache, &run->tiny.s);
        for (left = slots * TOKENS; left;) {
            const int step = test_random_below(2) && slots > 1;
            for (b = 0, count = 0; b < slots; b++) { // some of the unfinished texts, in any order
                const size_t slot = (2 * slots + packing - b) % slots, used = cache.used[slot], room = TOKENS - used;
                if (!room || test_random_below(4) == 0) continue;
                const size_t n = step ? 1 : min_size(room, test_random_below(7));
                append[count].slot = listed[count] = slot;
                append[count].tokens = text + slot * TOKENS + used, next[count] = text[slot * TOKENS + used];
                append[count++].n = n, left -= n;
            }
            if (count && step) cache_step(&cache, &run->tiny.s, listed, next, count);
            if (!step) cache_append(&cache, &run->tiny.s, append, count);
            while (count && !append[count - 1].n) count--;
            if (!count) continue;
            cache_logits(&cache, &run->tiny.s, stored);
            for (b = step ? 0 : count - 1; b < count; b++) {
                const size_t at = cache.used[append[b].slot] - 1;
                const double *expected = alone + (append[b].slot * TOKENS + at) * V;
                for (size_t v = 0; v < V; v++)
                    expect_logit(element_to_double(stored, ops_device->stored, (step ? b : 0) * V + v), expected[v], v,
                                 at);
            }
        }
        cache_end(&cache, &run->tiny.s);
    }
    cache_free(&cache);
    run_close(run);
}

TEST(logits_of_packings) {
    for (size_t i = 0; i < MODELS; i++) {
        for (size_t k = 0; k < 5; k++) {
            const size_t slots = 2 + (i + 3 * k) % 6, chunk = 1 + (7 * i + 5 * k) % 23;
            test_case("%.30s..., %zu slots, chunks of %zu", models[i], slots, chunk);
            compare_logits(i, chunk, slots, EMULATED ? 1 : 4);
        }
    }
}

// ---- graphs --------------------------------------------------------------------------------------------------------
static size_t graph_replays, graph_calls;
static int counted_begin(const GraphKey *key) {
    const int calls = ops_device->graph_begin(key);
    graph_replays += !calls, graph_calls += calls != 0;
    return calls;
}

// Returns the bits of the logits of nine steps, of some texts or one fewer, of slots that differ in length. The caller
// frees them: they outlive a case.
static char *logits_bits(Run *run, size_t slots, size_t V, size_t *bytes) {
    const size_t row = V * dtype_size(ops_device->stored), steps = 9;
    char *bits = (char *)checked_calloc(steps * slots, row, "bits of logits");
    Cache cache;
    *bytes = 0;
    cache_allocate(&cache, slots, TOKENS);
    cache_begin(&cache, &run->tiny.s);
    for (size_t b = 0; b < slots; b++) {
        int32_t prompt[LONGEST_PROMPT];
        for (size_t t = 0; t < LONGEST_PROMPT; t++) prompt[t] = (int32_t)random_below(31, b, t, V);
        cache_feed(&cache, &run->tiny.s, b, prompt, 1 + b);
    }
    for (size_t step = 0; step < steps; step++) {
        size_t listed[8], active = 0;
        int32_t next[8];
        for (size_t i = 0; i < slots; i++) {
            const size_t b = (i + step) % slots;
            if (step % 3 == 2 && i == 1) continue;
            listed[active] = b, next[active++] = (int32_t)random_below(32, step, b, V);
        }
        cache_step(&cache, &run->tiny.s, listed, next, active);
        cache_logits(&cache, &run->tiny.s, bits + *bytes);
        *bytes += active * row;
    }
    cache_end(&cache, &run->tiny.s);
    cache_free(&cache);
    return bits;
}

// Steps that op set "cuda" records and launches again give the bits of steps that it makes call by call: logits and
// texts; also where a graph cannot be made. Other op sets make every call.
static void compare_graphs(size_t i, size_t slots) {
    enum { LAUNCHED, OFF, FAILING, WAYS };
    static const SamplingSettings settings = {1.5, 0, 0, 1, 0};
    static Texts texts[WAYS];
    char *bits[WAYS];
    size_t bytes[WAYS], calls[WAYS];
    const int moves = slots == 1 && (i == 5 || i == 6); // windows slide: no part has a key
    for (size_t way = 0; way < (EMULATED && i == 8 && slots > 1 ? WAYS : FAILING); way++) {
        Run *run = batch_run(i, moves ? 4 : 0, 2, slots, NULL);
        Ops counted = *run->tiny.ops;
        test_case("%.30s..., %zu slots, way %zu", models[i], slots, way);
        counted.graph_begin = counted_begin;
        run->tiny.s.ops = &counted;
        graph_replays = graph_calls = 0;
        setenv("STREAMBP_GRAPHS", way == OFF ? "0" : "1", 1);
        if (way == FAILING) setenv("GRAPH_FAULT", "1", 1);
        bits[way] = logits_bits(run, slots, vocabulary(i), &bytes[way]);
        some_texts(&texts[way], vocabulary(i));
        if (slots > 1) write_together(run, slots, &texts[way], settings, NULL, 0); // one text takes many steps
        calls[way] = graph_replays + graph_calls;
        if (ops_device->graphs && (calls[way] == 0) != moves) test_fail("%zu parts of steps have a key", calls[way]);
        if (way == LAUNCHED ? ops_device->graphs && graph_replays < calls[way] / 2 : graph_replays)
            test_fail("%zu of %zu parts of steps were launched as graphs", graph_replays, calls[way]);
        run->tiny.s.ops = run->tiny.ops;
        run_close(run);
        assert_true(bytes[way] == bytes[LAUNCHED] && calls[way] == calls[LAUNCHED]);
        assert_memory_equal(bits[way], bits[LAUNCHED], bytes[way]);
        expect_texts(&texts[way], &texts[LAUNCHED]);
        if (way != LAUNCHED) free(bits[way]);
    }
    free(bits[LAUNCHED]);
    unsetenv("STREAMBP_GRAPHS"), unsetenv("GRAPH_FAULT");
}

TEST(graphs_keep_the_bits) {
    for (size_t i = 0; i < MODELS; i++) {
        if (EMULATED && i != 0 && i != 5 && i != 7 && i != 8) continue; // biases, windows, experts, states
        compare_graphs(i, 4);                                           // three texts are padded to four
        if (!EMULATED || i == 5 || i == 8) compare_graphs(i, 1);
    }
}

// Greedy texts after long prompts are the same whether keys are split into parts or not (op set "cuda").
TEST(graphs_of_split_keys) {
    enum { PROMPT = 270, NEW = 5, SLOTS = 3 };
    static const SamplingSettings greedy = {0, 0, 0, 1, 0};
    static const size_t slots[] = {1, SLOTS};
    int32_t prompt[SLOTS][PROMPT], ids[2][SLOTS][NEW];
    for (size_t i = 1; i < 6; i++)
        for (size_t k = 0; k < COUNT_OF(slots); k++) {
            if (EMULATED && i != (k ? 2 : 5)) continue; // 5: windows
            for (size_t way = 0; way < 2; way++) {
                Completion text[SLOTS];
                SamplerBatch sampler;
                RunSettings settings = sampling_run(64, PROMPT + NEW);
                settings.logits_chunk = 2, settings.rollout_slots = slots[k], settings.rollout_tokens = PROMPT + NEW;
                test_case("%.30s..., %zu texts", models[i], slots[k]);
                setenv("STREAMBP_SPLIT_KEYS", way ? "0" : "1", 1);
                Run *run = run_of(i, settings, NULL, 1);
                for (size_t b = 0; b < slots[k]; b++) {
                    const size_t n = PROMPT - 61 * b;
                    const Completion of = {.prompt = prompt[b], .prompt_tokens = n, .ids = ids[way][b], .room = NEW};
                    for (size_t t = 0; t < n; t++) prompt[b][t] = (int32_t)random_below(41, b, t, vocabulary(i));
                    text[b] = of;
                }
                sampler_batch_allocate(&sampler, &run->model, slots[k], PROMPT + NEW);
                sampler_batch(&sampler, &run->tiny.s, text, slots[k], &greedy, NULL, 0);
                sampler_batch_free(&sampler);
                run_close(run);
                for (size_t b = 0; b < slots[k]; b++)
                    if (way) assert_memory_equal(ids[1][b], ids[0][b], sizeof(ids[0][b]));
            }
        }
    unsetenv("STREAMBP_SPLIT_KEYS");
}

// The plan holds a rollout's cache, and the run uses all of it. A step's loss and gradients keep their bits after a
// rollout.
TEST(plan_and_training) {
    static const size_t length[] = {9, 4}, slots[] = {1, 2, 7, 40};
    static const SamplingSettings settings = {1, 0, 0, 1, 0};
    static Texts texts;
    for (size_t i = 1; i < MODELS; i++) {
        Batch batch = tiny_batch(length, 2, vocabulary(i), 0, 3);
        for (size_t k = i % 2; k < 4; k += 2) {
            Run *run = batch_run(i, 5, 3, slots[k], &batch);
            const size_t elements = run->model.elements;
            double loss[2], *gradient[2];
            test_case("%.30s..., %zu slots", models[i], slots[k]);
            for (size_t round = 0; round < 2; round++) {
                run->tiny.s.ops->zero(run->tiny.s.memory.gradients, elements * dtype_size(ops_device->stored));
                loss[round] = forward_backward(&run->tiny.s, &batch, 13, 1, NULL);
                gradient[round] =
                    device_read(run->tiny.ops, run->tiny.s.memory.gradients, ops_device->stored, elements);
                if (!round) write_together(run, slots[k], some_texts(&texts, vocabulary(i)), settings, NULL, 0);
            }
            if (loss[0] != loss[1]) test_fail("loss %.17g, then %.17g", loss[0], loss[1]);
            assert_memory_equal(gradient[0], gradient[1], elements * sizeof(double));
            if (run->tiny.arena->peak > run->tiny.plan.total_bytes ||
                (slots[k] == 7 && run->tiny.arena->peak != run->tiny.plan.total_bytes))
                test_fail("used %zu bytes at most, planned %zu", run->tiny.arena->peak, run->tiny.plan.total_bytes);
            free(gradient[0]), free(gradient[1]);
            run_close(run);
        }
        batch_free(&batch);
    }
}

// ---- refusals ------------------------------------------------------------------------------------------------------
typedef struct {
    size_t prompt_tokens, room, capacity;
    int32_t id;    // at the end of the prompt
    double factor; // of the first element of the final norm
    int code;      // 0: accepted
    const char *message;
} Refused;

static void complete_two(const void *context) {
    static const SamplingSettings greedy = {0, 0, 0, 1, 0};
    const Refused *refused = (const Refused *)context;
    int32_t prompt[64] = {0}, ids[2][64];
    Completion text[2] = {
        {.prompt = prompt, .prompt_tokens = 1, .ids = ids[0], .room = 1},
        {.prompt = prompt + 1, .prompt_tokens = refused->prompt_tokens, .ids = ids[1], .room = refused->room}};
    SamplerBatch sampler;
    RunSettings settings = sampling_run(3, TOKENS);
    settings.logits_chunk = 2, settings.rollout_slots = 3, settings.rollout_tokens = TOKENS;
    Run *run = run_of(0, settings, NULL, refused->factor);
    sampler_batch_allocate(&sampler, &run->model, 3, refused->capacity);
    prompt[refused->prompt_tokens] = refused->id;
    sampler_batch(&sampler, &run->tiny.s, text, 2, &greedy, NULL, 0);
    sampler_batch_free(&sampler);
    run_close(run);
}

TEST(refusals) {
    static const Refused cases[] = {
        {5, 11, 15, 18, 1, 0, ""},
        {5, 2, 17, 0, 1, EXIT_USAGE, "17 tokens, but the position table of this gpt2 model has 16"},
        {5, 12, 15, 0, 1, EXIT_RUNTIME, "text 1: a prompt of 5 tokens and 12 new ones do not fit"},
        {0, 2, 15, 0, 1, EXIT_RUNTIME, "text 1: the prompt is empty"},
        {5, 0, 15, 0, 1, EXIT_RUNTIME, "text 1: the prompt is empty, or no new token is asked for"},
        {5, 5, 15, 19, 1, EXIT_RUNTIME, "text 1: token 4 of the prompt is 19; an id must be from 0 to 18"},
        {5, 5, 15, 0, NAN, EXIT_RUNTIME, "the weights are damaged or training has diverged"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_end(complete_two, &cases[i], cases[i].code, cases[i].message);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
