/*
The optimizer over the parameter table: the norm and the name of a gradient that is not finite, clipping, the formula
and who decays, element by element for every pairing of types, random bits of each parameter's own, initialisation. The
op itself is held against its reference in test_ops.c, places in test_places.c.
*/
#define MOMENT_SMALL 300 // so that small models have moments in 8 bits, too
#include "test/base/testing.h"
#include "test/ops/fence.h"
#include "llmc/train/optimizer.h"

static const char *const models[] = {
    "gpt2,hidden_size=24,num_hidden_layers=2,num_attention_heads=3,vocab_size=37,max_position_embeddings=16",
    "llama,hidden_size=24,intermediate_size=28,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_"
    "size=41",
    "qwen2,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=1,"
    "vocab_size=31,tie_word_embeddings=true",
    "qwen3,hidden_size=20,intermediate_size=24,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,head_"
    "dim=8,"
    "vocab_size=43",
};

// ---- a model's tensors, each memory of its own, fenced where it is the device's -------------------------------------
typedef struct {
    const Ops *ops;
    Model model;
    DType gradient_type, moment_type;
    void *weights, *gradients;
    OptimizerState state;
    Arena arena[PLACES];
} Bench;

static Residency bench_residency(Bench *b) {
    Residency r = {0};
    r.model = &b->model, r.ops = b->ops, r.arena = b->arena;
    r.weights = (char *)b->weights, r.gradients = (char *)b->gradients, r.gradient_type = b->gradient_type;
    return r;
}

static void device_fill(const Ops *ops, void *device, DType type, const double *values, size_t count) {
    void *host = case_memory(count * dtype_size(type));
    for (size_t i = 0; i < count; i++) element_write(host, type, i, values ? values[i] : NAN);
    ops->copy_in(device, host, count * dtype_size(type));
}

// Full of NaN
static void *bench_elements(const Bench *b, DType type, size_t count) {
    const size_t bytes = count * dtype_size(type);
    void *memory = b->ops->allocate(bytes);
    assert_non_null(memory);
    b->ops->copy_in(memory, memset(case_memory(bytes), 0xff, bytes), bytes);
    return memory;
}

static void bench_release(const Bench *b, void *memory, DType type, size_t count) {
    if (memory) b->ops->release(memory, count * dtype_size(type));
}

// Of int8 the codes
static double *host_values(const Ops *ops, const void *device, DType type, size_t count) {
    void *host = case_memory(count * dtype_size(type));
    double *values = case_doubles(count);
    ops->copy_out(host, device, count * dtype_size(type));
    for (size_t i = 0; i < count; i++)
        values[i] = type == DTYPE_INT8 ? ((const uint8_t *)host)[i] : element_to_double(host, type, i);
    return values;
}

static double *normal_values(size_t count, double mean, double deviation) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = mean + deviation * test_normal();
    return values;
}

static Bench bench_open(const char *text, DType dtype, DType gradient_type, DType moment_type, int master) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    Bench b = {0};
    b.ops = ops_fenced(), b.model = model_build(&config, dtype);
    b.gradient_type = gradient_type, b.moment_type = b.state.moment_type = moment_type;
    const size_t n = b.model.elements, floats = moment_floats_all(&b.model, sharding_whole());
    b.weights = bench_elements(&b, dtype, n), b.gradients = bench_elements(&b, gradient_type, n);
    b.state.m = bench_elements(&b, moment_type, n), b.state.v = bench_elements(&b, moment_type, n);
    if (master) b.state.master = (float *)bench_elements(&b, DTYPE_FP32, n);
    if (moment_type == DTYPE_INT8) {
        b.state.m_scales = (float *)bench_elements(&b, DTYPE_FP32, floats);
        b.state.v_scales = (float *)bench_elements(&b, DTYPE_FP32, floats);
    }
    arena_plan(b.arena);
    return b;
}

// gradients: NULL, or those of the first step
static void bench_begin(Bench *b, const double *weights, const double *gradients) {
    device_fill(b->ops, b->weights, b->model.dtype, weights, b->model.elements);
    device_fill(b->ops, b->gradients, b->gradient_type, gradients, b->model.elements);
    Residency r = bench_residency(b);
    optimizer_step(&r, &b->state, NULL);
}

static void bench_close(Bench *b) {
    const size_t n = b->model.elements, floats = moment_floats_all(&b->model, sharding_whole());
    bench_release(b, b->weights, b->model.dtype, n), bench_release(b, b->gradients, b->gradient_type, n);
    bench_release(b, b->state.m, b->moment_type, n), bench_release(b, b->state.v, b->moment_type, n);
    bench_release(b, b->state.master, DTYPE_FP32, n);
    bench_release(b, b->state.m_scales, DTYPE_FP32, floats), bench_release(b, b->state.v_scales, DTYPE_FP32, floats);
    model_free(&b->model);
}

static AdamW usual_step(int64_t step) {
    AdamW s = {0};
    s.learning_rate = 3e-3, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-8, s.weight_decay = 0.1;
    s.gradient_scale = 0.37, s.step = step, s.seed = 42;
    return s;
}

static void bench_step(Bench *b, const AdamW *step) {
    Residency r = bench_residency(b);
    optimizer_step(&r, &b->state, step);
    assert_int_equal(b->arena->regions, 0);
}

// ---- the gradient as a whole ----------------------------------------------------------------------------------------
TEST(norm) {
    for (size_t k = 0; k < 2 * COUNT_OF(models); k++) {
        const DType type = k % 2 ? ops_device->summed : ops_device->stored;
        const Parameter *bad = (const Parameter *)&bad;
        double sum = 0;
        test_case("%.8s, %s", models[k / 2], dtype_name(type));
        Bench b = bench_open(models[k / 2], ops_device->stored, type, DTYPE_FP32, 0);
        const size_t n = b.model.elements;
        const double *gradients = normal_values(n, 0.1, 2.0);
        device_fill(b.ops, b.gradients, type, gradients, n);
        for (size_t i = 0; i < n; i++) sum += round_to(type, gradients[i]) * round_to(type, gradients[i]);
        const Residency r = bench_residency(&b);
        const double found = gradient_norm(&r, &bad);
        assert_null(bad);
        if (!(fabs(found - sqrt(sum)) <= 1e-12 * sqrt(sum))) test_fail("norm %.17g, expected %.17g", found, sqrt(sum));
        bench_close(&b);
    }
}

static void gradient_write(Bench *b, size_t at, double value) {
    double element = 0;
    element_write(&element, b->gradient_type, 0, value);
    b->ops->copy_in((char *)b->gradients + at * dtype_size(b->gradient_type), &element, dtype_size(b->gradient_type));
}

// One bad element, the first or the last of each parameter in turn; then a second one in a later parameter.
TEST(bad_gradient_is_named) {
    static const double wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        Bench b = bench_open(models[k], ops_device->stored, ops_device->stored, DTYPE_FP32, 0);
        const size_t n = b.model.elements;
        device_fill(b.ops, b.gradients, b.gradient_type, normal_values(n, 0.0, 1.0), n);
        for (size_t i = 0; i < 3 * b.model.parameter_count; i++) {
            const Parameter *p = &b.model.parameters[i / 3], *bad = NULL;
            const size_t at = p->offset + (i % 3 == 1 ? 0 : parameter_elements(p) - 1);
            for (size_t second = 0; second < 2; second++) {
                gradient_write(&b, second ? n - 1 : at, wrong[i % 3]);
                const Residency r = bench_residency(&b);
                double found = gradient_norm(&r, &bad);
                if (bad != p) test_fail("%s named, %s is not finite", bad ? bad->name : "nothing", p->name);
                if (isfinite(found)) test_fail("the norm is %g", found);
            }
            gradient_write(&b, at, 1.0), gradient_write(&b, n - 1, 1.0);
        }
        bench_close(&b);
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
// w, m, v of every element after the step. Matrices decay, embeddings among them, and nothing else.
static void reference_step(double *const values[3], const Bench *b, const double *gradients, const AdamW *s) {
    double *w = values[0], *m = values[1], *v = values[2];
    for (size_t i = 0; i < b->model.parameter_count; i++) {
        const Parameter *p = &b->model.parameters[i];
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

// Rounded to either neighbour in bf16
static void expect_elements(const char *name, const double *found, const double *expected, size_t count, DType type,
                            double scale) {
    for (size_t i = 0; i < count; i++) {
        double allowed = (type == DTYPE_BF16 ? 0x1p-7 : 0) * fabs(expected[i]) + 3e-6 * fmax(scale, fabs(expected[i]));
        if (!(fabs(found[i] - expected[i]) <= allowed))
            test_fail("%s[%zu] is %.9g, expected %.9g (allowed %.2g)", name, i, found[i], expected[i], allowed);
    }
}

// Each step from what the run left in the bench: where it rounds, errors shall not add up.
static void formula_case(const char *model, DType gradient_type, DType moment_type, int master) {
    const DType stored = ops_device->stored, kept_type = master ? DTYPE_FP32 : stored;
    test_case("%.8s, gradients %s, moments %s, %s master", model, dtype_name(gradient_type), dtype_name(moment_type),
              master ? "with" : "without");
    Bench b = bench_open(model, stored, gradient_type, moment_type, master);
    const size_t n = b.model.elements;
    const void *kept = master ? b.state.master : b.weights;
    double *weights = normal_values(n, 0.3, 1.0), *gradients = normal_values(n, 0.0, 2.0);
    for (size_t i = 0; i < n; i++) gradients[i] = round_to(gradient_type, gradients[i]);
    bench_begin(&b, weights, gradients);
    for (int64_t step = 1; step <= 4; step++) {
        const AdamW s = usual_step(step);
        double *const expected[3] = {host_values(b.ops, kept, kept_type, n),
                                     host_values(b.ops, b.state.m, moment_type, n),
                                     host_values(b.ops, b.state.v, moment_type, n)};
        reference_step(expected, &b, gradients, &s);
        bench_step(&b, &s);
        const double *found = host_values(b.ops, kept, kept_type, n), *w = host_values(b.ops, b.weights, stored, n);
        for (size_t i = 0; i < n; i++)
            if (w[i] != round_to(stored, found[i])) test_fail("w[%zu] is not the rounding of its master", i);
        expect_elements(master ? "master" : "w", found, expected[0], n, kept_type, 1.0);
        expect_elements("m", host_values(b.ops, b.state.m, moment_type, n), expected[1], n, moment_type, 0.1);
        expect_elements("v", host_values(b.ops, b.state.v, moment_type, n), expected[2], n, moment_type, 0.1);
    }
    bench_close(&b);
}

TEST(formula) {
    for (size_t k = 0; k < COUNT_OF(models); k++)
        for (int types = 0; types < 8; types++)
            if (all_cases() || __builtin_parity((unsigned)types) == (int)(k % 2))
                formula_case(models[k], types & 1 ? ops_device->summed : ops_device->stored,
                             types & 2 ? DTYPE_BF16 : DTYPE_FP32, types & 4 ? 1 : 0);
}

// ---- moments in 8 bits ----------------------------------------------------------------------------------------------
// A moment as it is after it was in 8 bits, in a block whose largest magnitude is `scale`.
static double through_8_bits(double value, float scale, int with_sign) {
    const QuantScales *const s = quant_dynamic(with_sign);
    if (scale == 0) return 0;
    const float share = (float)value * (1 / scale);
    return (double)s->map[s->nearest[(int)((share + 1) * 32767.5f + 0.5f)]] * (double)scale;
}

// All blocks of a tensor: each parameter's own, cut every 256 elements of its group. Small ones are in fp32.
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

// A value that is rounded to the other code by the last bit of its sum comes apart: few do.
TEST(moments_in_8_bits) {
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        const DType stored = ops_device->stored;
        test_case("%.8s", models[k]);
        Bench b = bench_open(models[k], stored, DTYPE_FP32, DTYPE_INT8, stored == DTYPE_BF16);
        const size_t n = b.model.elements;
        const void *kept = b.state.master ? b.state.master : b.weights;
        size_t apart = 0;
        double *weights = normal_values(n, 0.3, 1.0), *gradients = normal_values(n, 0.0, 2.0);
        double *const expected[3] = {case_doubles(n), case_doubles(n), case_doubles(n)};
        for (size_t i = 0; i < n; i++) gradients[i] = (double)(float)(gradients[i] * exp2(-8 * test_uniform()));
        for (size_t i = 0; i < n; i++) expected[0][i] = weights[i] = round_to(stored, weights[i]);
        bench_begin(&b, weights, gradients);
        for (int64_t step = 1; step <= 3; step++) {
            const AdamW s = usual_step(step);
            for (size_t i = 0; i < n; i++) gradients[i] = round_to(DTYPE_FP32, -0.7 * gradients[i]);
            device_fill(b.ops, b.gradients, DTYPE_FP32, gradients, n);
            reference_step(expected, &b, gradients, &s);
            tensor_through_8_bits(&b.model, expected[1], 1), tensor_through_8_bits(&b.model, expected[2], 0);
            bench_step(&b, &s);
        }
        const double *found = host_values(b.ops, kept, stored == DTYPE_BF16 ? DTYPE_FP32 : stored, n);
        for (size_t i = 0; i < n; i++) apart += !(fabs(found[i] - expected[0][i]) <= 4e-6 * fmax(1, fabs(found[i])));
        if (apart > n / 500) test_fail("%zu of %zu weights are others", apart, n);
        bench_close(&b);
    }
}

// m after one step of gradient halfway between two bf16 numbers: each element's choice is one random bit.
static const char square_model[] =
    "llama,hidden_size=64,intermediate_size=64,num_hidden_layers=1,num_attention_heads=1,vocab_size=64";

static double *random_choices(uint64_t seed, int64_t number) {
    Bench b = bench_open(square_model, ops_device->stored, ops_device->summed, DTYPE_BF16, 0);
    const size_t n = b.model.elements;
    double *gradients = case_doubles(n);
    AdamW step = usual_step(number);
    for (size_t i = 0; i < n; i++) gradients[i] = 1.0 + 0x1p-8;
    step.beta1 = 0.0, step.gradient_scale = 1.0, step.seed = seed;
    bench_begin(&b, case_doubles(n), gradients);
    bench_step(&b, &step);
    double *m = host_values(b.ops, b.state.m, DTYPE_BF16, n);
    bench_close(&b);
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
        Bench b = bench_open("llama,hidden_size=64,intermediate_size=8,num_hidden_layers=1,num_attention_heads=1,"
                             "tie_word_embeddings=true,vocab_size=1077",
                             type, type, moment_type, 1);
        const size_t n = b.model.elements;
        double *weights = case_doubles(n);
        for (size_t i = 0; i < n; i++) weights[i] = round_to(type, test_uniform() - 0.5);
        bench_begin(&b, weights, NULL);
        const double *master = host_values(b.ops, b.state.master, DTYPE_FP32, n);
        const double *m = host_values(b.ops, b.state.m, b.moment_type, n);
        const double *v = host_values(b.ops, b.state.v, b.moment_type, n);
        for (size_t i = 0; i < n; i++) {
            if (master[i] != (double)(float)weights[i])
                test_fail("master[%zu] is %.17g of %.17g", i, master[i], weights[i]);
            if (m[i] != 0 || v[i] != 0) test_fail("moments %g, %g of element %zu are not zero", m[i], v[i], i);
        }
        bench_close(&b);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
