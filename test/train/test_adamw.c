/*
The optimizer over the parameter table: the norm and the name of a gradient that is not finite, clipping, who decays,
the formula element by element for every pairing of types, independence of neighbours, random bits of each parameter's
own, initialisation. The op itself is held against its reference in test_ops.c.
*/
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

// ---- a model's tensors, each fenced device memory of its own --------------------------------------------------------
typedef struct {
    const Ops *ops;
    Model model;
    DType gradient_type, moment_type;
    void *weights, *gradients;
    OptimizerState state;
} Bench;

static void *device_values(const Ops *ops, DType type, const double *values, size_t count) {
    void *host = case_memory(count * dtype_size(type)), *device = ops->allocate(count * dtype_size(type));
    assert_non_null(device);
    for (size_t i = 0; i < count; i++) element_write(host, type, i, values ? values[i] : NAN);
    ops->copy_in(device, host, count * dtype_size(type));
    return device;
}

static double *host_values(const Ops *ops, const void *device, DType type, size_t count) {
    void *host = case_memory(count * dtype_size(type));
    double *values = case_doubles(count);
    ops->copy_out(host, device, count * dtype_size(type));
    for (size_t i = 0; i < count; i++) values[i] = element_read(host, type, i);
    return values;
}

static double *normal_values(size_t count, double mean, double deviation) {
    double *values = case_doubles(count);
    for (size_t i = 0; i < count; i++) values[i] = mean + deviation * test_normal();
    return values;
}

// Everything but weights and gradients is NaN before optimizer_init.
static Bench bench_open(const char *text, DType dtype, DType gradient_type, DType moment_type, int master,
                        const double *weights, const double *gradients) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    Bench b = {0};
    b.ops = ops_fenced();
    b.model = model_build(&config, dtype);
    b.gradient_type = gradient_type, b.moment_type = moment_type;
    if (weights) b.weights = device_values(b.ops, dtype, weights, b.model.elements);
    if (gradients) b.gradients = device_values(b.ops, gradient_type, gradients, b.model.elements);
    b.state.m = device_values(b.ops, moment_type, NULL, b.model.elements);
    b.state.v = device_values(b.ops, moment_type, NULL, b.model.elements);
    if (master) b.state.master = (float *)device_values(b.ops, DTYPE_FP32, NULL, b.model.elements);
    return b;
}

static void bench_close(Bench *b) {
    size_t n = b->model.elements, moments = n * dtype_size(b->moment_type);
    if (b->weights) b->ops->release(b->weights, n * dtype_size(b->model.dtype));
    if (b->gradients) b->ops->release(b->gradients, n * dtype_size(b->gradient_type));
    b->ops->release(b->state.m, moments);
    b->ops->release(b->state.v, moments);
    if (b->state.master) b->ops->release(b->state.master, n * sizeof(float));
    model_free(&b->model);
}

static size_t model_size(const char *text) {
    Config config = config_from_text(text, "test", EXIT_USAGE);
    Model model = model_build(&config, DTYPE_FP32);
    size_t elements = model.elements;
    model_free(&model);
    return elements;
}

static AdamW usual_step(int64_t step) {
    AdamW s = {0};
    s.learning_rate = 3e-3, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-8, s.weight_decay = 0.1;
    s.gradient_scale = 0.37, s.step = step, s.seed = 42;
    return s;
}

static void bench_step(Bench *b, const AdamW *step) {
    optimizer_step(&b->model, world_alone(), b->ops, b->weights, b->gradients, b->gradient_type, &b->state,
                   b->moment_type, step);
}

// ---- the gradient as a whole ----------------------------------------------------------------------------------------
TEST(norm) {
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        for (size_t t = 0; t < 2; t++) {
            DType type = t ? ops_device->summed : ops_device->stored;
            size_t n = model_size(models[k]);
            double sum = 0;
            const Parameter *bad = (const Parameter *)&bad;
            test_case("%.8s, %s", models[k], dtype_name(type));
            double *gradients = normal_values(n, 0.1, 2.0);
            Bench b = bench_open(models[k], ops_device->stored, type, DTYPE_FP32, 0, NULL, gradients);
            for (size_t i = 0; i < n; i++) sum += round_to(type, gradients[i]) * round_to(type, gradients[i]);
            double found = gradient_norm(&b.model, world_alone(), b.ops, b.gradients, type, &bad);
            assert_null(bad);
            if (!(fabs(found - sqrt(sum)) <= 1e-12 * sqrt(sum)))
                test_fail("norm %.17g, expected %.17g", found, sqrt(sum));
            bench_close(&b);
        }
    }
}

// One bad element, the first or the last of each parameter in turn; then a second one in a later parameter.
TEST(bad_gradient_is_named) {
    static const double wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        size_t n = model_size(models[k]);
        double *gradients = normal_values(n, 0.0, 1.0);
        Bench b = bench_open(models[k], ops_device->stored, ops_device->stored, DTYPE_FP32, 0, NULL, gradients);
        for (size_t i = 0; i < b.model.parameter_count; i++) {
            for (size_t w = 0; w < 3; w++) {
                const Parameter *p = &b.model.parameters[i], *bad = NULL;
                size_t size = dtype_size(b.gradient_type), at = p->offset + (w == 1 ? 0 : parameter_elements(p) - 1);
                double element = 0;
                element_write(&element, b.gradient_type, 0, wrong[w]);
                b.ops->copy_in((char *)b.gradients + at * size, &element, size);
                for (size_t second = 0; second < 2; second++) {
                    if (second) b.ops->copy_in((char *)b.gradients + (n - 1) * size, &element, size);
                    double found = gradient_norm(&b.model, world_alone(), b.ops, b.gradients, b.gradient_type, &bad);
                    if (bad != p) test_fail("%s named, %s is not finite", bad ? bad->name : "nothing", p->name);
                    if (isfinite(found)) test_fail("the norm is %g", found);
                }
                element_write(&element, b.gradient_type, 0, 1.0);
                b.ops->copy_in((char *)b.gradients + at * size, &element, size);
                b.ops->copy_in((char *)b.gradients + (n - 1) * size, &element, size);
            }
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
// Without gradient and moments a step is weight decay alone: of matrices, embeddings among them, and of nothing else.
TEST(matrices_decay) {
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        size_t n = model_size(models[k]), matrices = 0;
        AdamW step = usual_step(1);
        test_case("%.8s", models[k]);
        double *weights = case_doubles(n), *gradients = case_doubles(n);
        for (size_t i = 0; i < n; i++) weights[i] = 1.5;
        Bench b = bench_open(models[k], ops_device->stored, ops_device->stored, DTYPE_FP32, 1, weights, gradients);
        step.learning_rate = 0.5, step.weight_decay = 0.25;
        optimizer_init(&b.model, world_alone(), b.ops, b.weights, &b.state, b.moment_type);
        bench_step(&b, &step);
        double *found = host_values(b.ops, b.state.master, DTYPE_FP32, n);
        for (size_t i = 0; i < b.model.parameter_count; i++) {
            const Parameter *p = &b.model.parameters[i];
            int matrix = p->role == ROLE_LINEAR || p->role == ROLE_EMBEDDING;
            matrices += (size_t)matrix;
            for (size_t j = p->offset; j < p->offset + parameter_elements(p); j++)
                if (found[j] != (matrix ? 1.5 - 0.125 * 1.5 : 1.5))
                    test_fail("%s[%zu] of 1.5 became %.9g", p->name, j - p->offset, found[j]);
        }
        assert_true(matrices > 4 && matrices < b.model.parameter_count);
        bench_close(&b);
    }
}

typedef struct {
    double *w, *m, *v; // [elements]
} Reference;

// From what the run left in the bench: where it rounds, errors shall not add up.
static void reference_step(Reference *r, const Bench *b, const double *gradients, const AdamW *s) {
    for (size_t i = 0; i < b->model.parameter_count; i++) {
        const Parameter *p = &b->model.parameters[i];
        double decay = p->cols ? s->weight_decay : 0;
        for (size_t j = p->offset; j < p->offset + parameter_elements(p); j++) {
            double g = s->gradient_scale * gradients[j];
            r->m[j] = s->beta1 * r->m[j] + (1 - s->beta1) * g;
            r->v[j] = s->beta2 * r->v[j] + (1 - s->beta2) * g * g;
            double m = r->m[j] / (1 - pow(s->beta1, (double)s->step)),
                   v = r->v[j] / (1 - pow(s->beta2, (double)s->step));
            r->w[j] -= s->learning_rate * (m / (sqrt(v) + s->epsilon) + decay * r->w[j]);
        }
    }
}

static void expect_elements(const char *name, const double *found, const double *expected, size_t count, DType type,
                            double scale) {
    double rounding = type == DTYPE_BF16 ? 0x1p-7 : 0; // to either neighbour
    for (size_t i = 0; i < count; i++) {
        double allowed = rounding * fabs(expected[i]) + 3e-6 * fmax(scale, fabs(expected[i]));
        if (!(fabs(found[i] - expected[i]) <= allowed))
            test_fail("%s[%zu] is %.9g, expected %.9g (allowed %.2g)", name, i, found[i], expected[i], allowed);
    }
}

static void formula_case(const char *model, DType gradient_type, DType moment_type, int master) {
    size_t n = model_size(model);
    DType stored = ops_device->stored;
    Reference r;
    test_case("%.8s, gradients %s, moments %s, %s master", model, dtype_name(gradient_type), dtype_name(moment_type),
              master ? "with" : "without");
    double *weights = normal_values(n, 0.3, 1.0), *gradients = normal_values(n, 0.0, 2.0);
    for (size_t i = 0; i < n; i++)
        weights[i] = round_to(stored, weights[i]), gradients[i] = round_to(gradient_type, gradients[i]);
    Bench b = bench_open(model, stored, gradient_type, moment_type, master, weights, gradients);
    optimizer_init(&b.model, world_alone(), b.ops, b.weights, &b.state, b.moment_type);
    for (int64_t step = 1; step <= 4; step++) {
        AdamW s = usual_step(step);
        r.w = master ? host_values(b.ops, b.state.master, DTYPE_FP32, n) : host_values(b.ops, b.weights, stored, n);
        r.m = host_values(b.ops, b.state.m, moment_type, n), r.v = host_values(b.ops, b.state.v, moment_type, n);
        reference_step(&r, &b, gradients, &s);
        bench_step(&b, &s);
        double *w = host_values(b.ops, b.weights, stored, n);
        if (master) {
            double *kept = host_values(b.ops, b.state.master, DTYPE_FP32, n);
            expect_elements("master", kept, r.w, n, DTYPE_FP32, 1.0);
            for (size_t i = 0; i < n; i++)
                if (w[i] != round_to(stored, kept[i])) test_fail("w[%zu] is not the rounding of its master", i);
        } else {
            expect_elements("w", w, r.w, n, stored, 1.0);
        }
        expect_elements("m", host_values(b.ops, b.state.m, moment_type, n), r.m, n, moment_type, 0.1);
        expect_elements("v", host_values(b.ops, b.state.v, moment_type, n), r.v, n, moment_type, 0.1);
    }
    bench_close(&b);
}

TEST(formula) {
    for (size_t k = 0; k < COUNT_OF(models); k++)
        for (int sums = 0; sums < 2; sums++)
            for (size_t moments = 0; moments < 2; moments++)
                for (int master = 0; master < 2; master++)
                    formula_case(models[k], sums ? ops_device->summed : ops_device->stored,
                                 moments ? DTYPE_BF16 : DTYPE_FP32, master);
}

// Where nothing is rounded at random, one call over neighbours that decay alike gives the same bits as the walk.
TEST(neighbours_do_not_matter) {
    int master = ops_device->stored == DTYPE_BF16;
    for (size_t k = 0; k < COUNT_OF(models); k++) {
        size_t n = model_size(models[k]), size = dtype_size(ops_device->stored);
        AdamW step = usual_step(1);
        test_case("%.8s", models[k]);
        double *weights = normal_values(n, 0.0, 1.0), *gradients = normal_values(n, 0.0, 1.0);
        Bench a = bench_open(models[k], ops_device->stored, ops_device->stored, DTYPE_FP32, master, weights, gradients);
        Bench b = bench_open(models[k], ops_device->stored, ops_device->stored, DTYPE_FP32, master, weights, gradients);
        optimizer_init(&a.model, world_alone(), a.ops, a.weights, &a.state, a.moment_type);
        optimizer_init(&b.model, world_alone(), b.ops, b.weights, &b.state, b.moment_type);
        bench_step(&a, &step);
        for (size_t i = 0; i < b.model.parameter_count;) {
            const Parameter *p = &b.model.parameters[i];
            size_t count = 0;
            AdamW own = step;
            for (; i < b.model.parameter_count && !b.model.parameters[i].cols == !p->cols; i++)
                count += parameter_elements(&b.model.parameters[i]);
            if (!p->cols) own.weight_decay = 0;
            b.ops->adamw((Stored *)((char *)b.weights + p->offset * size), master ? b.state.master + p->offset : NULL,
                         (char *)b.gradients + p->offset * size, b.gradient_type, (float *)b.state.m + p->offset,
                         (float *)b.state.v + p->offset, DTYPE_FP32, count, &own);
        }
        assert_memory_equal(host_values(a.ops, a.weights, ops_device->stored, n),
                            host_values(b.ops, b.weights, ops_device->stored, n), n * sizeof(double));
        assert_memory_equal(host_values(a.ops, a.state.v, DTYPE_FP32, n), host_values(b.ops, b.state.v, DTYPE_FP32, n),
                            n * sizeof(double));
        bench_close(&a);
        bench_close(&b);
    }
}

// m after one step of gradient halfway between two bf16 numbers: each element's choice is one random bit.
static double *random_choices(uint64_t seed, int64_t number, Model *model) {
    const char *text =
        "llama,hidden_size=64,intermediate_size=64,num_hidden_layers=1,num_attention_heads=1,vocab_size=64";
    size_t n = model_size(text);
    double *weights = case_doubles(n), *gradients = case_doubles(n);
    AdamW step = usual_step(number);
    for (size_t i = 0; i < n; i++) gradients[i] = 1.0 + 0x1p-8;
    Bench b = bench_open(text, ops_device->stored, ops_device->summed, DTYPE_BF16, 0, weights, gradients);
    step.beta1 = 0.0, step.gradient_scale = 1.0, step.seed = seed;
    optimizer_init(&b.model, world_alone(), b.ops, b.weights, &b.state, b.moment_type);
    bench_step(&b, &step);
    double *m = host_values(b.ops, b.state.m, DTYPE_BF16, n);
    *model = b.model;
    b.model.parameters = NULL;
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
    Model model, other;
    double *m = random_choices(7, 3, &model);
    size_t n = model.elements, compared = 0;
    assert_memory_equal(m, random_choices(7, 3, &other), n * sizeof(double));
    model_free(&other);
    expect_independent("another step", m, random_choices(7, 4, &other), n);
    model_free(&other);
    expect_independent("another seed", m, random_choices(8, 3, &other), n);
    model_free(&other);
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
// More elements than one staging slab holds, in every type a model can have.
TEST(initialisation) {
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};
    char text[160];
    snprintf(text, sizeof(text),
             "llama,hidden_size=64,intermediate_size=8,num_hidden_layers=1,num_attention_heads=1,"
             "tie_word_embeddings=true,vocab_size=%zu",
             SLAB_ELEMENTS / 64 + 77);
    size_t n = model_size(text);
    assert_true(n > SLAB_ELEMENTS);
    for (size_t t = 0; t < 3; t++) {
        test_case("%s", dtype_name(types[t]));
        double *weights = case_doubles(n);
        for (size_t i = 0; i < n; i++) weights[i] = round_to(types[t], test_uniform() - 0.5);
        Bench b = bench_open(text, types[t], types[t], t == 1 ? DTYPE_BF16 : DTYPE_FP32, 1, weights, NULL);
        optimizer_init(&b.model, world_alone(), b.ops, b.weights, &b.state, b.moment_type);
        double *master = host_values(b.ops, b.state.master, DTYPE_FP32, n);
        double *m = host_values(b.ops, b.state.m, b.moment_type, n),
               *v = host_values(b.ops, b.state.v, b.moment_type, n);
        for (size_t i = 0; i < n; i++) {
            if (master[i] != (double)(float)weights[i])
                test_fail("master[%zu] is %.17g of %.17g", i, master[i], weights[i]);
            if (m[i] != 0 || v[i] != 0) test_fail("moments %g, %g of element %zu are not zero", m[i], v[i], i);
        }
        bench_close(&b);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
