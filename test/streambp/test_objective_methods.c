/*
Objectives through the model. An objective's loss and gradients are the same by every method, chunk and logits chunk.
They are the same for a whole batch and for micro-batches, with pairs and groups in any order, for the model and for its
adapters. They match finite differences of the loss.
*/
#include "test/data/answer_files.h"
#include "test/model/tiny.h"

static double bound(void) {
    return ops_device->stored == DTYPE_FP64 ? 1e-12 : ops_device->stored == DTYPE_FP32 ? 2e-4 : 0.1;
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
    {"cispo, KL", OBJECTIVE_CISPO, DPO_SIGMOID, NORMALISE_BNPO, 0.1, 0, 1, 1},
    {"kto", OBJECTIVE_KTO, DPO_SIGMOID, NORMALISE_GRPO, 0.3, 0, 1, 0},
    {"distill, forward", OBJECTIVE_DISTILL, DPO_SIGMOID, NORMALISE_GRPO, 0, 0, 1.6, 0},
    {"distill, reverse", OBJECTIVE_DISTILL, DPO_SIGMOID, NORMALISE_GRPO, 0, 0, 1, 1},
};
#define FOR_TRIED(i) for (size_t i = 0; i < COUNT_OF(tried); i += EMULATED ? 3 : 1)

enum { UNITS = 4, TEACHER_K = 5 }; // pairs or groups of two; tokens of a teacher
static const size_t length[2 * UNITS] = {6, 9, 1, 7, 11, 3, 5, 8};

// Returns a teacher of TEACHER_K random tokens of each target, which hold 0.5 to 0.9 of the probability.
static BatchTeacher some_teacher(size_t N, size_t V) {
    BatchTeacher teacher = teacher_allocate(N, TEACHER_K);
    for (size_t t = 0; t < N; t++) {
        const float held = 0.5f + 0.4f * (float)random_uniform(9, 1, t);
        for (size_t j = 0; j < TEACHER_K; j++) {
            const size_t at = t * TEACHER_K + j, begin = j * V / TEACHER_K, end = (j + 1) * V / TEACHER_K;
            teacher.id[at] = (int32_t)(begin + random_below(9, 2, at, end - begin));
            teacher.logp[at] = logf(held * (float)(j + 1) / (TEACHER_K * (TEACHER_K + 1) / 2));
        }
        teacher.tail[t] = 1 - held;
    }
    return teacher;
}

static TinyCase case_make(const Tried *t, int lora) {
    TinyCase c = tiny_case((t - tried) % 3 == 1 ? TINY_LLLF : TINY_QWEN3, lora ? 3 : 0);
    Objective *o = &c.settings.objective;
    o->kind = t->kind, o->dpo_loss = t->dpo_loss, o->normalisation = t->normalisation;
    o->beta = t->beta, o->gamma = 0.5, o->label_smoothing = t->label_smoothing;
    o->desirable_weight = 1, o->undesirable_weight = 0.8;
    o->clip_low = 0.2, o->clip_high = NAN, o->kl_correction = (t - tried) % 2, o->temperature.divisor = t->temperature,
    o->completion_tokens = 12;
    o->distill_loss = t->old ? DISTILL_REVERSE : DISTILL_FORWARD;
    o->distill_share = 0.7, o->distill_temperature = t->temperature;
    if (t->kind == OBJECTIVE_DISTILL) o->temperature.divisor = 1;
    objective_resolve(o);
    c.settings.teacher_k = TEACHER_K;
    c.settings.gradient_type = dtype_of_sums(c.model.dtype); // also for several micro-batches
    c.batch = tiny_batch(length, 2 * UNITS, c.model.config.vocab_size, 1, 5);
    tiny_answers(&c.batch, t->kind, t->old, c.model.config.vocab_size, 3);
    if (objective_needs_top(o)) c.batch.teacher = some_teacher(c.batch.N, c.model.config.vocab_size);
    if (t->kind == OBJECTIVE_KTO) c.batch.kl = 0.4;
    for (size_t d = 0; d < c.batch.documents && t->kind == OBJECTIVE_KTO; d++) c.batch.reward[d] = d % 3 ? 1 : 0;
    test_case("%s%s", t->text, lora ? ", LoRA" : "");
    return c;
}

static void expect_same_result(const TinyCase *c, TinyResult found, TinyResult expected) {
    tiny_expect_same(tiny_table(c), found, expected, bound(), 0.1, 0);
}

TEST(methods_agree) {
    static const struct {
        Method method;
        size_t chunk, logits_chunk;
    } runs[] = {{METHOD_CHECKPOINT, 0, 0}, {METHOD_STREAM, 1, 1}, {METHOD_STREAM, 7, 5}, {METHOD_STREAM, 13, 50},
                {METHOD_STREAM, 60, 3},    {METHOD_MST, 9, 11},   {METHOD_SECO, 7, 5},   {METHOD_SECO, 13, 50}};
    FOR_TRIED(i) {
        for (int lora = 0; lora < 2; lora++) {
            TinyCase c = case_make(&tried[i], lora);
            TinyResult full = tiny_case_run(&c, METHOD_FULL, 0, 0, &c.batch, 1);
            if (!isfinite(full.loss)) test_fail("the loss is %g", full.loss);
            for (size_t j = 0; j < COUNT_OF(runs); j++) {
                if (!all_cases() && (i + j + (size_t)lora) % 2) continue;
                TinyResult other = tiny_case_run(&c, runs[j].method, runs[j].chunk, runs[j].logits_chunk, &c.batch, 1);
                expect_same_result(&c, other, full);
                free(other.gradient);
            }
            free(full.gradient);
            tiny_case_free(&c);
        }
    }
}

// Returns units order[0 .. count) of a stream as a stream of their own.
static Batch batch_of_units(const Batch *whole, const size_t *order, size_t count) {
    size_t N = 0;
    Batch part = batch_allocate(whole->N, 2 * count);
    batch_allocate_answers(&part, 1, whole->old != NULL);
    if (whole->teacher.id) part.teacher = teacher_allocate(whole->N, TEACHER_K);
    for (size_t d = 0; d < 2 * count; d++) {
        const size_t from = 2 * order[d / 2] + d % 2;
        part.document_start[d] = N;
        part.group[d] = d / 2, part.reward[d] = whole->reward[from];
        for (size_t i = whole->document_start[from]; i < whole->document_start[from + 1]; i++, N++) {
            part.tokens[N] = whole->tokens[i], part.targets[N] = whole->targets[i];
            part.loss_weight[N] = whole->loss_weight[i], part.advantage[N] = whole->advantage[i];
            part.reference[N] = whole->reference[i];
            if (whole->old) part.old[N] = whole->old[i];
            if (!whole->teacher.id) continue;
            memcpy(part.teacher.id + N * TEACHER_K, whole->teacher.id + i * TEACHER_K, TEACHER_K * sizeof(int32_t));
            memcpy(part.teacher.logp + N * TEACHER_K, whole->teacher.logp + i * TEACHER_K, TEACHER_K * sizeof(float));
            part.teacher.tail[N] = whole->teacher.tail[i];
        }
    }
    part.N = part.document_start[2 * count] = N, part.kl = whole->kl;
    batch_set_positions(&part);
    return part;
}

// Micro-batches of whole units, and units in another order, give the same step.
TEST(accumulation_and_order) {
    static const size_t order[UNITS] = {2, 0, 3, 1}, begin[] = {0, 1, 3, UNITS};
    FOR_TRIED(i) {
        TinyCase c = case_make(&tried[i], i % 2);
        TinyResult whole = tiny_case_run(&c, METHOD_STREAM, 7, 5, &c.batch, 1);
        Batch parts[4] = {batch_of_units(&c.batch, order, UNITS)};
        for (size_t k = 0; k < 3; k++)
            parts[k + 1] = batch_of_units(&c.batch, order + begin[k], begin[k + 1] - begin[k]);
        TinyResult turned = tiny_case_run(&c, METHOD_STREAM, 10, 11, parts, 1);
        TinyResult summed = tiny_case_run(&c, METHOD_STREAM, 4, 6, parts + 1, 3);
        expect_same_result(&c, turned, whole);
        expect_same_result(&c, summed, whole);
        free(turned.gradient), free(summed.gradient), free(whole.gradient);
        for (size_t k = 0; k < 4; k++) batch_free(&parts[k]);
        tiny_case_free(&c);
    }
}

// Writes a shard of `kind` with the model's ids: 9 samples of documents of at most 12 tokens.
static const char *samples_shard(ShardKind kind, size_t vocabulary) {
    const MadeShard made = made_kind(kind);
    MadeDocument document[36];
    const size_t count = kind_has_groups(kind) ? made_groups(&made, document, 0, 9, kind == KIND_PAIRS ? 2 : 4, 12) : 9;
    if (!kind_has_groups(kind)) memcpy(document, made_documents(0, 9, 12, 3), 9 * sizeof(MadeDocument));
    for (size_t d = 0; d < count; d++)
        for (size_t t = 0; t < document[d].tokens; t++) ((uint32_t *)(uintptr_t)document[d].id)[t] %= vocabulary;
    return write_shard("samples.bin", &made, document, count);
}

// Reads the second step of 4 samples, in sequences of at most B x 12 tokens; returns their number.
static size_t second_step(const char *path, const Objective *objective, size_t B, Batch batch[4]) {
    DataSettings settings = answer_settings(B, 12, objective);
    settings.step = 4;
    SCOPED_LOADER loader = open_data(path, &settings);
    loader.next = dataloader_after(&loader, 0, dataloader_step(&loader, 0));
    const size_t count = dataloader_step(&loader, loader.next);
    for (size_t i = 0; i < count; i++) batch[i] = dataloader_batch(&loader), dataloader_next(&loader, &batch[i]);
    return count;
}

TEST(a_step_of_samples_is_one_batch_of_them) {
    static const ObjectiveKind kinds[] = {OBJECTIVE_SFT, OBJECTIVE_SIMPO, OBJECTIVE_GRPO};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        TinyCase c = tiny_case(TINY_QWEN3, 0);
        c.settings.objective = objective_of(kinds[k]);
        objective_resolve(&c.settings.objective);
        c.settings.gradient_type = dtype_of_sums(c.model.dtype);
        const char *path = samples_shard(objective_data[kinds[k]], c.model.config.vocab_size);
        Batch one[4], several[4];
        assert_int_equal(second_step(path, &c.settings.objective, 9, one), 1);
        const size_t count = second_step(path, &c.settings.objective, 1, several);
        assert_true(count > 1);
        TinyResult whole = tiny_case_run(&c, METHOD_STREAM, 7, 5, one, 1);
        TinyResult summed = tiny_case_run(&c, METHOD_STREAM, 4, 6, several, count);
        expect_same_result(&c, summed, whole);
        free(whole.gradient), free(summed.gradient);
        for (size_t i = 0; i < count; i++) batch_free(&several[i]);
        batch_free(&one[0]), tiny_case_free(&c);
    }
}

// Finite differences along a random direction in all parameters. If old is the policy's own, the loss has another slope
// than the gradient: the next test takes that case. So does cispo's.
TEST(gradient_is_the_slope) {
    if (ops_device->stored != DTYPE_FP64) {
        test_skip("finite differences need the double build");
        return;
    }
    FOR_TRIED(i) {
        TinyCase c = case_make(&tried[i], i % 2);
        c.model.config.pad_token_id = NO_ROW; // with one the gradient is not the slope
        const int reverse = tried[i].kind == OBJECTIVE_DISTILL && tried[i].old; // its advantages have no gradient
        const int own =
            objective_is_of_policy(&c.settings.objective) && (!c.batch.old || tried[i].kind == OBJECTIVE_CISPO);
        if (!own && !reverse) {
            TinyResult found = tiny_case_run(&c, METHOD_STREAM, 7, 5, &c.batch, 1);
            tiny_expect_slope(&c, "the whole gradient", found.gradient, 0, found.elements, 1, 1e-5, 1e-6, METHOD_STREAM,
                              9, 4);
            free(found.gradient);
        }
        tiny_case_free(&c);
    }
}

// Old = the policy's own: the plain policy gradient, equal to sft with advantages as weights.
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
    if (ops_device->stored == DTYPE_FP64) { // weights are rounded to fp32 in between
        for (size_t t = 0; t < c.model.parameter_count; t++)
            if (!(tiny_difference(&c.model.parameters[t], found.gradient, expected.gradient) <= 1e-6))
                test_fail("gradient of %s is not the plain policy gradient's", c.model.parameters[t].name);
    } else {
        expect_same_result(&c, found, expected);
    }
    free(found.gradient), free(expected.gradient);
    tiny_case_free(&c), tiny_case_free(&plain);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
