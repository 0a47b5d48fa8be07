/*
Objectives through the model: every objective's loss and gradients are the same by every method, chunk and logits chunk,
whole or cut into micro-batches, with pairs and groups in any order, for the model and for its adapters; and they are
the slope of the loss.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 1e-4 : 0.1;
}

typedef struct {
    const char *text;
    ObjectiveKind kind;
    DpoLoss dpo_loss;
    Normalisation normalisation;
    double beta, label_smoothing, temperature;
    int old; // old log-probabilities are known
} Tried;

static const Tried tried[] = {
    {"dpo", OBJECTIVE_DPO, DPO_SIGMOID, NORMALISE_GRPO, 0.3, 0, 1, 0},
    {"dpo, smoothed", OBJECTIVE_DPO, DPO_SIGMOID, NORMALISE_GRPO, 0.3, 0.2, 1, 0},
    {"dpo, ipo", OBJECTIVE_DPO, DPO_IPO, NORMALISE_GRPO, 0.5, 0, 1, 0},
    {"dpo, hinge", OBJECTIVE_DPO, DPO_HINGE, NORMALISE_GRPO, 0.05, 0, 1, 0},
    {"simpo", OBJECTIVE_SIMPO, DPO_SIGMOID, NORMALISE_GRPO, 2, 0, 1, 0},
    {"orpo", OBJECTIVE_ORPO, DPO_SIGMOID, NORMALISE_GRPO, 0.4, 0, 1, 0},
    {"grpo, old = current", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_GRPO, 0, 0, 1, 0},
    {"grpo, KL, warm", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_GRPO, 0.1, 0, 1.3, 1},
    {"grpo, bnpo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_BNPO, 0.1, 0, 1, 1},
    {"grpo, dr_grpo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_DR_GRPO, 0, 0, 0.7, 1},
    {"grpo, dapo", OBJECTIVE_GRPO, DPO_SIGMOID, NORMALISE_DAPO, 0, 0, 1, 1},
    {"gspo", OBJECTIVE_GSPO, DPO_SIGMOID, NORMALISE_GRPO, 0.1, 0, 1, 1},
    {"ppo", OBJECTIVE_PPO, DPO_SIGMOID, NORMALISE_BNPO, 0, 0, 1, 1},
};
#define TRIED        (sizeof(tried) / sizeof(tried[0]))
#define FOR_TRIED(i) for (i = 0; i < TRIED; i += EMULATED ? 3 : 1)

static const char text[] = "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,"
                           "num_key_value_heads=2,head_dim=8,vocab_size=43";

#define UNITS 4 // pairs or groups of two
static const size_t length[2 * UNITS] = {6, 9, 1, 7, 11, 3, 5, 8};

// All that objectives look at, of one stream. Every document keeps one target at least.
static Batch case_batch(const Tried *t, size_t V) {
    Batch batch = tiny_batch(length, 2 * UNITS, V, 1, 5);
    size_t d;
    batch_allocate_answers(&batch, 1, t->old);
    for (d = 0; d < batch.documents; d++) {
        const size_t last = batch.document_start[d + 1] - 1;
        batch.targets[last] = (int32_t)(d % V);
        batch.group[d] = d / 2, batch.reward[d] = (float)d;
    }
    for (size_t i = 0; i < batch.N; i++) {
        for (d = 0; batch.document_start[d + 1] <= i;) d++;
        batch.advantage[i] = (float)(t->kind == OBJECTIVE_PPO ? random_normal(3, 1, i) : random_normal(3, 2, d));
        batch.reference[i] = (float)(-4 + random_normal(3, 3, i));
        if (batch.old) batch.old[i] = (float)(-4 + random_normal(3, 4, i));
    }
    return batch;
}

static TinyCase case_make(const Tried *t, int lora) {
    TinyCase c = tiny_case(text, lora ? 3 : 0);
    Objective *o = &c.settings.objective;
    o->kind = t->kind, o->dpo_loss = t->dpo_loss, o->normalisation = t->normalisation;
    o->beta = t->beta, o->gamma = 0.5, o->label_smoothing = t->label_smoothing;
    o->clip_low = 0.2, o->clip_high = NAN, o->temperature = t->temperature, o->completion_tokens = 12;
    objective_resolve(o);
    c.settings.gradient_type = dtype_of_sums(c.model.dtype); // also of several micro-batches
    c.batch = case_batch(t, c.model.config.vocab_size);
    test_case("%s%s", t->text, lora ? ", LoRA" : "");
    return c;
}

static void expect_same(const TinyCase *c, TinyResult found, TinyResult expected) {
    tiny_expect_same(tiny_table(c), found, expected, bound(), 0.1, 0);
}

TEST(methods_agree) {
    static const size_t chunks[][2] = {{1, 1}, {7, 5}, {13, 50}, {60, 3}};
    size_t i, j;
    int lora;
    FOR_TRIED(i) {
        for (lora = 0; lora < 2; lora++) {
            TinyCase c = case_make(&tried[i], lora);
            TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
            TinyResult other = tiny_case_run(&c, METHOD_CHECKPOINT, 0, 0, &c.batch, 1);
            if (!isfinite(full.loss)) test_fail("the loss is %g", full.loss);
            expect_same(&c, other, full);
            free(other.gradient);
            for (j = 0; j < sizeof(chunks) / sizeof(chunks[0]); j++) {
                other = tiny_case_run(&c, METHOD_STREAM, chunks[j][0], chunks[j][1], &c.batch, 1);
                expect_same(&c, other, full);
                free(other.gradient);
            }
            free(full.gradient);
            tiny_case_free(&c);
        }
    }
}

// Units order[0 .. count) of a stream, in a stream of their own. values: whether they have been copied
static Batch batch_of_units(const Batch *whole, const size_t *order, size_t count) {
    size_t N = 0, u;
    for (u = 0; u < count; u++) N += whole->document_start[2 * order[u] + 2] - whole->document_start[2 * order[u]];
    Batch part = batch_allocate(N, 2 * count);
    batch_allocate_answers(&part, 1, whole->old != NULL);
    for (u = 0, N = 0; u < count; u++) {
        for (size_t side = 0; side < 2; side++) {
            const size_t d = 2 * order[u] + side;
            part.document_start[2 * u + side] = N;
            part.group[2 * u + side] = u, part.reward[2 * u + side] = whole->reward[d];
            for (size_t i = whole->document_start[d]; i < whole->document_start[d + 1]; i++, N++) {
                part.tokens[N] = whole->tokens[i], part.targets[N] = whole->targets[i];
                part.loss_weight[N] = whole->loss_weight[i], part.advantage[N] = whole->advantage[i];
                part.reference[N] = whole->reference[i];
                if (whole->old) part.old[N] = whole->old[i];
            }
        }
    }
    batch_set_positions(&part);
    return part;
}

// Micro-batches of whole units, and units in another order, are the same step.
TEST(accumulation_and_order) {
    static const size_t order[UNITS] = {2, 0, 3, 1};
    size_t i;
    FOR_TRIED(i) {
        TinyCase c = case_make(&tried[i], i % 2);
        TinyResult whole = tiny_case_run(&c, METHOD_STREAM, 7, 5, &c.batch, 1), found;
        Batch parts[3];
        parts[0] = batch_of_units(&c.batch, order, 1);
        parts[1] = batch_of_units(&c.batch, order + 1, 2);
        parts[2] = batch_of_units(&c.batch, order + 3, 1);
        found = tiny_case_run(&c, METHOD_STREAM, 4, 6, parts, 3);
        expect_same(&c, found, whole);
        free(found.gradient);
        batch_free(&parts[0]);
        parts[0] = batch_of_units(&c.batch, order, UNITS);
        found = tiny_case_run(&c, METHOD_STREAM, 10, 11, parts, 1);
        expect_same(&c, found, whole);
        free(found.gradient), free(whole.gradient);
        batch_free(&parts[0]), batch_free(&parts[1]), batch_free(&parts[2]);
        tiny_case_free(&c);
    }
}

// Along a random direction in all parameters, by central differences. Where old is the policy's own, the loss has
// another slope than what the gradient is of; that case is left to the next test.
TEST(gradient_is_the_slope) {
    size_t i;
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    FOR_TRIED(i) {
        TinyCase c = case_make(&tried[i], i % 2);
        if (!objective_is_of_policy(&c.settings.objective) || c.batch.old) {
            TinyResult found = tiny_case_run(&c, METHOD_STREAM, 7, 5, &c.batch, 1);
            tiny_expect_slope(&c, "the whole gradient", found.gradient, 0, found.elements, 1, 1e-5, 1e-6, METHOD_STREAM,
                              9, 4);
            free(found.gradient);
        }
        tiny_case_free(&c);
    }
}

// Old = the policy's own: the plain policy gradient, which is that of sft with advantages as weights.
TEST(plain_policy_gradient) {
    TinyCase c = case_make(&tried[6], 0), plain = case_make(&tried[6], 0);
    TinyResult found = tiny_case_run(&c, METHOD_STREAM, 7, 5, &c.batch, 1);
    batch_count(&plain.batch);
    for (size_t d = 0; d < plain.batch.documents; d++)
        for (size_t t = plain.batch.document_start[d]; t < plain.batch.document_start[d + 1]; t++)
            plain.batch.loss_weight[t] = (float)((double)plain.batch.advantage[t] / plain.batch.document_weight[d]);
    memset(&plain.settings.objective, 0, sizeof(plain.settings.objective));
    TinyResult expected = tiny_case_run(&plain, METHOD_STREAM, 7, 5, &plain.batch, 1);
    for (size_t t = 0; t < expected.elements; t++) // sft divides by the sum of the weights, grpo by the documents
        expected.gradient[t] *= batch_count(&plain.batch).tokens / (2 * UNITS);
    expected.loss = found.loss;
    if (ops_device->stored == DTYPE_FP64) { // weights are rounded to fp32 on the way
        for (size_t t = 0; t < c.model.parameter_count; t++)
            if (!(tiny_difference(&c.model.parameters[t], found.gradient, expected.gradient) <= 1e-6))
                test_fail("gradient of %s is not the plain policy gradient's", c.model.parameters[t].name);
    } else {
        expect_same(&c, found, expected);
    }
    free(found.gradient), free(expected.gradient);
    tiny_case_free(&c), tiny_case_free(&plain);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
