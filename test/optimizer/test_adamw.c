/*
The optimizer over the parameter table: the norm and the name of a bad gradient, clipping, the formula and the decayed
parameters, element by element for every pairing of types, separate random bits per parameter, initialisation. The op
itself is compared with its reference in test_ops.c; places are in test_places.c.
*/
#include "test/model/small_slices.h"
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "test/ops/fence.h"
#include "llmc/optimizer/update.h"

static const char *const models[] = {TINY_GPT2, TINY_LLAMA, TINY_TIED, TINY_QWEN3};

// ---- a run's tensors inside the fence, full of NaN ------------------------------------------------------------------
typedef struct {
    TinyCase tiny;
    TinyRun run;
} Bench;

// Opens a bench; lasts until the next one.
static Bench *bench_open(const char *text, DType gradient_type, DType moment_type, int master) {
    static const size_t length[] = {4};
    static Bench b;
    b.tiny = tiny_case(text, 0);
    b.tiny.batch = tiny_batch(length, 1, b.tiny.model.config.vocab_size, 0, 1);
    RunSettings settings = tiny_settings(&b.tiny, METHOD_STREAM, 4, 4);
    settings.backward = settings.optimizer = 1, settings.master = master;
    settings.gradient_type = gradient_type, settings.moment_type = moment_type;
    tiny_begin(&b.run, ops_fenced(), settings, NULL, NULL, &b.tiny.batch);
    return &b;
}

static void bench_close(Bench *b) { tiny_end(&b->run), tiny_case_free(&b->tiny); }

static void bench_write(Bench *b, void *memory, DType type, const double *values) {
    device_write(b->run.ops, memory, type, values, b->tiny.model.elements);
}

static double *bench_read(const Bench *b, const void *memory, DType type) {
    double *read = device_read(b->run.ops, memory, type, b->tiny.model.elements);
    double *values = case_copy(read, b->tiny.model.elements);
    free(read);
    return values;
}

static double *normal_values(size_t count, double mean, double deviation) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = mean + deviation * test_normal();
    return values;
}

// gradients: of the first step, or NULL
static void bench_begin(Bench *b, const double *weights, const double *gradients) {
    Residency *memory = &b->run.s.memory;
    bench_write(b, memory->weights, b->tiny.model.dtype, weights);
    if (gradients) bench_write(b, memory->gradients, memory->gradient_type, gradients);
    optimizer_step(memory, &b->run.state, NULL);
}

static AdamW usual_step(int64_t step) {
    AdamW s = {0};
    s.learning_rate = 3e-3, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-8, s.weight_decay = 0.1;
    s.gradient_scale = 0.37, s.step = step, s.seed = 42;
    return s;
}

static void bench_step(Bench *b, const AdamW *step) {
    const size_t regions = b->run.arena->regions;
    optimizer_step(&b->run.s.memory, &b->run.state, step);
    assert_int_equal(b->run.arena->regions, regions);
}

// ---- the gradient as a whole ----------------------------------------------------------------------------------------
TEST(norm) {
    for (size_t k = 0; k < 2 * COUNT_OF(models); k++) {
        const DType type = k % 2 ? ops_device->summed : ops_device->stored;
        const Parameter *bad = (const Parameter *)&bad;
        double sum = 0;
        test_case("%.8s, %s", models[k / 2], dtype_name(type));
        Bench *b = bench_open(models[k / 2], type, DTYPE_FP32, 0);
        const size_t n = b->tiny.model.elements;
        const double *gradients = normal_values(n, 0.1, 2.0);
        bench_write(b, b->run.s.memory.gradients, type, gradients);
        for (size_t i = 0; i < n; i++) sum += round_to(type, gradients[i]) * round_to(type, gradients[i]);
        const double found = gradient_norm(&b->run.s.memory, &bad);
        assert_null(bad);
        if (!(fabs(found - sqrt(sum)) <= 1e-12 * sqrt(sum))) test_fail("norm %.17g, expected %.17g", found, sqrt(sum));
        bench_close(b);
    }
}

static void gradient_write(Bench *b, size_t at, double value) {
    const Residency *m = &b->run.s.memory;
    device_write(b->run.ops, (char *)m->gradients + at * dtype_size(m->gradient_type), m->gradient_type, &value, 1);
}

// One bad element, the first or last of each parameter in turn; then a second one in a later parameter.
TEST(bad_gradient_is_named) {
    static const double wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        Bench *b = bench_open(models[k], ops_device->stored, DTYPE_FP32, 0);
        const Model *model = &b->tiny.model;
        const size_t n = model->elements;
        bench_write(b, b->run.s.memory.gradients, ops_device->stored, normal_values(n, 0.0, 1.0));
        for (size_t i = 0; i < 3 * model->parameter_count; i++) {
            const Parameter *p = &model->parameters[i / 3], *bad = NULL;
            const size_t at = p->offset + (i % 3 == 1 ? 0 : parameter_elements(p) - 1);
            for (size_t second = 0; second < 2; second++) {
                gradient_write(b, second ? n - 1 : at, wrong[i % 3]);
                double found = gradient_norm(&b->run.s.memory, &bad);
                if (bad != p) test_fail("%s named, %s is not finite", bad ? bad->name : "nothing", p->name);
                if (isfinite(found)) test_fail("the norm is %g", found);
            }
            gradient_write(b, at, 1.0), gradient_write(b, n - 1, 1.0);
        }
        bench_close(b);
    }
}

TEST(clipping) {
    assert_true(gradient_clip(0.5, 1.0) == 1.0);
    assert_true(gradient_clip(1.0, 1.0) == 1.0);
    assert_true(gradient_clip(8.0, 2.0) == 0.25);
    assert_true(gradient_clip(1e30, 0.0) == 1.0);
    assert_true(gradient_clip(0.0, 1.0) == 1.0);
}

// ---- a step ---------------------------------------------------------------------------------------------------------
// Steps w, m, v of every element. Matrices decay, including embeddings, and nothing else.
static void reference_step(double *const values[3], const Model *model, const double *gradients, const AdamW *s) {
    double *w = values[0], *m = values[1], *v = values[2];
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const double decay = p->role == ROLE_LINEAR || p->role == ROLE_EMBEDDING ? s->weight_decay : 0;
        for (size_t j = p->offset; j < p->offset + parameter_elements(p); j++) {
            const double g = s->gradient_scale * gradients[j];
            m[j] = s->beta1 * m[j] + (1 - s->beta1) * g;
            v[j] = s->beta2 * v[j] + (1 - s->beta2) * g * g;
            const double mean = m[j] / (1 - pow(s->beta1, (double)s->step));
            const double square = v[j] / (1 - pow(s->beta2, (double)s->step));
            w[j] -= s->learning_rate * (mean / (sqrt(square) + s->epsilon) + decay * w[j]);
        }
    }
}

// Compares elements; bf16 may be rounded to either neighbour.
static void expect_elements(const char *name, const double *found, const double *expected, size_t count, DType type,
                            double scale) {
    for (size_t i = 0; i < count; i++) {
        double allowed = (type == DTYPE_BF16 ? 0x1p-7 : 0) * fabs(expected[i]) + 3e-6 * fmax(scale, fabs(expected[i]));
        if (!(fabs(found[i] - expected[i]) <= allowed))
            test_fail("%s[%zu] is %.9g, expected %.9g (allowed %.2g)", name, i, found[i], expected[i], allowed);
    }
}

// Checks each step from the bench's previous state, so that rounding errors do not add up.
static void formula_case(const char *model, DType gradient_type, DType moment_type, int master) {
    const DType stored = ops_device->stored, kept_type = master ? DTYPE_FP32 : stored;
    test_case("%.8s, gradients %s, moments %s, %s master", model, dtype_name(gradient_type), dtype_name(moment_type),
              master ? "with" : "without");
    Bench *b = bench_open(model, gradient_type, moment_type, master);
    const OptimizerState *state = &b->run.state;
    const size_t n = b->tiny.model.elements;
    const void *weights_now = b->run.s.memory.weights, *kept = master ? state->master : weights_now;
    double *weights = normal_values(n, 0.3, 1.0), *gradients = normal_values(n, 0.0, 2.0);
    for (size_t i = 0; i < n; i++) gradients[i] = round_to(gradient_type, gradients[i]);
    bench_begin(b, weights, gradients);
    for (int64_t step = 1; step <= 4; step++) {
        const AdamW s = usual_step(step);
        double *const expected[3] = {bench_read(b, kept, kept_type), bench_read(b, state->m, moment_type),
                                     bench_read(b, state->v, moment_type)};
        reference_step(expected, &b->tiny.model, gradients, &s);
        bench_step(b, &s);
        const double *found = bench_read(b, kept, kept_type), *w = bench_read(b, weights_now, stored);
        for (size_t i = 0; i < n; i++)
            if (w[i] != round_to(stored, found[i])) test_fail("w[%zu] is not the rounding of its master", i);
        expect_elements(master ? "master" : "w", found, expected[0], n, kept_type, 1.0);
        expect_elements("m", bench_read(b, state->m, moment_type), expected[1], n, moment_type, 0.1);
        expect_elements("v", bench_read(b, state->v, moment_type), expected[2], n, moment_type, 0.1);
    }
    bench_close(b);
}

TEST(formula) {
    for (size_t k = 0; k < COUNT_OF(models); k++)
        for (int types = 0; types < 8; types++)
            if (all_cases() || __builtin_parity((unsigned)types) == (int)(k % 2))
                formula_case(models[k], types & 1 ? ops_device->summed : ops_device->stored,
                             types & 2 ? DTYPE_BF16 : DTYPE_FP32, types & 4 ? 1 : 0);
}

// ---- moments in 8 bits ----------------------------------------------------------------------------------------------
// Returns a moment after storage in 8 bits, in a block with largest magnitude `scale`.
static double through_8_bits(double value, float scale, int with_sign) {
    const QuantScales *const s = quant_dynamic(with_sign);
    if (scale == 0) return 0;
    const float share = (float)value * (1 / scale);
    return (double)s->map[s->nearest[(int)((share + 1) * 32767.5f + 0.5f)]] * (double)scale;
}

// Quantises all blocks of a tensor: each parameter's own, cut every 256 elements of its group. Small ones stay in fp32.
static void tensor_through_8_bits(const Model *table, double *x, int with_sign) {
    for (size_t i = 0; i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const size_t group = group_begin(table, group_of(table, p->offset)), end = p->offset + parameter_elements(p);
        for (size_t at = p->offset, next; at < end; at = next) {
            float scale = 0;
            next = min_size(group + ((at - group) / 256 + 1) * 256, end);
            for (size_t j = at; j < next; j++) scale = fmaxf(scale, (float)fabs(x[j]));
            for (size_t j = at; j < next; j++)
                x[j] =
                    parameter_elements(p) < MOMENT_SMALL ? (double)(float)x[j] : through_8_bits(x[j], scale, with_sign);
        }
    }
}

// The last bit of a sum can change a code, so that a few values differ.
TEST(moments_in_8_bits) {
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        const DType stored = ops_device->stored;
        test_case("%.8s", models[k]);
        Bench *b = bench_open(models[k], DTYPE_FP32, DTYPE_INT8, stored == DTYPE_BF16);
        Residency *memory = &b->run.s.memory;
        const Model *model = &b->tiny.model;
        const size_t n = model->elements;
        const void *master = b->run.state.master, *kept = master ? master : memory->weights;
        size_t apart = 0;
        double *weights = normal_values(n, 0.3, 1.0), *gradients = normal_values(n, 0.0, 2.0);
        double *const expected[3] = {case_doubles(n), case_doubles(n), case_doubles(n)};
        for (size_t i = 0; i < n; i++) gradients[i] = (double)(float)(gradients[i] * exp2(-8 * test_uniform()));
        for (size_t i = 0; i < n; i++) expected[0][i] = weights[i] = round_to(stored, weights[i]);
        bench_begin(b, weights, gradients);
        for (int64_t step = 1; step <= 3; step++) {
            const AdamW s = usual_step(step);
            for (size_t i = 0; i < n; i++) gradients[i] = round_to(DTYPE_FP32, -0.7 * gradients[i]);
            bench_write(b, memory->gradients, DTYPE_FP32, gradients);
            reference_step(expected, model, gradients, &s);
            tensor_through_8_bits(model, expected[1], 1), tensor_through_8_bits(model, expected[2], 0);
            bench_step(b, &s);
        }
        const double *found = bench_read(b, kept, stored == DTYPE_BF16 ? DTYPE_FP32 : stored);
        for (size_t i = 0; i < n; i++) apart += !(fabs(found[i] - expected[0][i]) <= 4e-6 * fmax(1, fabs(found[i])));
        if (apart > n / 500) test_fail("%zu of %zu weights are others", apart, n);
        bench_close(b);
    }
}

// Returns m after one step of gradient halfway between two bf16 numbers: each element's choice is one random bit.
static const char square_model[] =
    "llama,hidden_size=64,intermediate_size=64,num_hidden_layers=1,num_attention_heads=1,vocab_size=64";

static double *random_choices(uint64_t seed, int64_t number) {
    Bench *b = bench_open(square_model, ops_device->summed, DTYPE_BF16, 0);
    const size_t n = b->tiny.model.elements;
    double *gradients = case_doubles(n);
    AdamW step = usual_step(number);
    for (size_t i = 0; i < n; i++) gradients[i] = 1.0 + 0x1p-8;
    step.beta1 = 0.0, step.gradient_scale = 1.0, step.seed = seed;
    bench_begin(b, case_doubles(n), gradients);
    bench_step(b, &step);
    double *m = bench_read(b, b->run.state.m, DTYPE_BF16);
    bench_close(b);
    return m;
}

static void expect_independent(const char *what, const double *a, const double *b, size_t count) {
    size_t same = 0;
    for (size_t i = 0; i < count; i++) same += a[i] == b[i];
    if (fabs((double)same - 0.5 * (double)count) > 5.0 * 0.5 * sqrt((double)count))
        test_fail("%s: %zu of %zu random bits agree, expected half", what, same, count);
}

TEST(every_parameter_has_its_own_random_bits) {
    const Config config = config_from_text(square_model, "test", EXIT_USAGE);
    Model model = model_build(&config, ops_device->stored);
    const double *m = random_choices(7, 3);
    size_t n = model.elements, compared = 0;
    assert_memory_equal(m, random_choices(7, 3), n * sizeof(double));
    expect_independent("another step", m, random_choices(7, 4), n);
    expect_independent("another seed", m, random_choices(8, 3), n);
    for (size_t i = 0; i < model.parameter_count; i++)
        for (size_t j = i + 1; j < model.parameter_count; j++) {
            const Parameter *p = &model.parameters[i], *q = &model.parameters[j];
            if (parameter_elements(p) != parameter_elements(q) || !p->cols) continue;
            expect_independent(q->name, m + p->offset, m + q->offset, parameter_elements(p));
            compared++;
        }
    assert_true(compared >= 10);
    model_free(&model);
}

// ---- initialisation -------------------------------------------------------------------------------------------------
TEST(initialisation) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const DType type = ops_device->stored, moment_type = bf16 ? DTYPE_BF16 : DTYPE_FP32;
        test_case("moments %s", dtype_name(moment_type));
        Bench *b = bench_open("llama,hidden_size=64,intermediate_size=8,num_hidden_layers=1,num_attention_heads=1,"
                              "tie_word_embeddings=true,vocab_size=1077",
                              type, moment_type, 1);
        const size_t n = b->tiny.model.elements;
        double *weights = case_doubles(n);
        for (size_t i = 0; i < n; i++) weights[i] = round_to(type, test_uniform() - 0.5);
        bench_begin(b, weights, NULL);
        const double *master = bench_read(b, b->run.state.master, DTYPE_FP32);
        const double *m = bench_read(b, b->run.state.m, moment_type), *v = bench_read(b, b->run.state.v, moment_type);
        for (size_t i = 0; i < n; i++) {
            if (master[i] != (double)(float)weights[i])
                test_fail("master[%zu] is %.17g of %.17g", i, master[i], weights[i]);
            if (m[i] != 0 || v[i] != 0) test_fail("moments %g, %g of element %zu are not zero", m[i], v[i], i);
        }
        bench_close(b);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
