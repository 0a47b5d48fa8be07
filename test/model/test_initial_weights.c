/*
Weights at the start of a run: random ones follow the parameter table's distribution, and depend on the seed alone; NaN
and infinities among loaded ones are refused by name.
*/
#include "test/files/weight_files.h"
#include "test/ops/fence.h"

// ---- random initialisation ------------------------------------------------------------------------------------------
#define RANDOM_MODEL "gpt2,vocab_size=1500,hidden_size=768,num_hidden_layers=1,max_position_embeddings=32"

static void initial_values_of(const char *text) {
    const Ops *ops = ops_fenced();
    Model model = model_of(text, ops->stored);
    size_t size = dtype_size(model.dtype);
    void *device = ops->allocate(model.elements * size), *host = case_memory(model.elements * size);
    weights_init_random(&model, sharding_whole(), ops, device, 7);
    ops->copy_out(host, device, model.elements * size);
    for (size_t i = 0; i < model.parameter_count; i++) {
        const Parameter *p = &model.parameters[i];
        size_t count = parameter_elements(p);
        double mean = 0, square = 0;
        for (size_t j = 0; j < count; j++) {
            double x = element_to_double(host, model.dtype, p->offset + j);
            mean += x / (double)count, square += x * x / (double)count;
            if (p->role != ROLE_DECAY && !p->init_std && x != (p->ones ? 1 : 0))
                test_fail("%s[%zu] is %g", p->name, j, x);
        }
        if (!p->init_std) continue;
        // five standard errors
        if (fabs(mean) > 5 * p->init_std / sqrt((double)count)) test_fail("%s: mean %g", p->name, mean);
        if (fabs(square / (p->init_std * p->init_std) - 1) > 5 * sqrt(2 / (double)count))
            test_fail("%s: standard deviation %g, expected %g", p->name, sqrt(square), p->init_std);
    }
    ops->release(device, model.elements * size);
    model_free(&model);
}

TEST(initial_values_follow_the_table) {
    initial_values_of(RANDOM_MODEL);
    initial_values_of("qwen3_5,vocab_size=300,hidden_size=64,intermediate_size=80,num_hidden_layers=4");
}

// dt_bias and norms without an offset begin at 1; other vectors at 0, a convolution as a matrix.
TEST(what_a_hybrid_begins_with) {
    Model model = model_of("qwen3_5,hidden_size=8,num_hidden_layers=4", DTYPE_FP32);
    size_t ones = 0, decays = 0;
    for (const Parameter *p = model.parameters; p < model.parameters + model.parameter_count; p++) {
        const int one = text_ends_with(p->name, ".dt_bias") || text_ends_with(p->name, ".linear_attn.norm.weight");
        if (p->ones != one || (p->init_std != 0) != (p->cols != 0)) test_fail("%s", p->name);
        ones += (size_t)one, decays += p->role == ROLE_DECAY;
        assert_int_equal(p->role == ROLE_DECAY, text_ends_with(p->name, ".A_log"));
    }
    assert_true(ones == 6 && decays == 3);
    model_free(&model);
}

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

// Kolmogorov-Smirnov distance to the normal distribution, moments, tails, and independence of neighbours.
TEST(initial_values_are_normal) {
    Model model = model_of(RANDOM_MODEL, DTYPE_FP32);
    const size_t count = 1u << 20;
    float *values = (float *)case_memory(count * sizeof(float));
    double distance = 0, moment[5] = {0}, pairs = 0, squares = 0;
    size_t tail = 0;
    model.parameters[0].init_std = 1;
    initial_weights(&model, 0, 0, count, 1234, DTYPE_FP32, values);
    for (size_t i = 0; i < count; i++) {
        double x = values[i], power = 1;
        for (int k = 1; k <= 4; k++) power *= x, moment[k] += power / (double)count;
        tail += fabs(x) > 4;
    }
    for (size_t i = 0; i < count; i += 2) { // the two of a pair
        pairs += (double)values[i] * values[i + 1] / (double)(count / 2);
        squares +=
            ((double)values[i] * values[i] - 1) * ((double)values[i + 1] * values[i + 1] - 1) / (double)(count / 2);
    }
    qsort(values, count, sizeof(float), compare_floats);
    for (size_t i = 0; i < count; i++) {
        double expected = 0.5 * erfc(-values[i] * 0.70710678118654752);
        distance = fmax(distance, fmax(fabs(expected - (double)i / (double)count),
                                       fabs(expected - (double)(i + 1) / (double)count)));
    }
    if (distance * sqrt((double)count) > 1.63) test_fail("distance to the normal distribution %g", distance); // 1 %
    if (fabs(moment[1]) > 0.004 || fabs(moment[2] - 1) > 0.006 || fabs(moment[3]) > 0.012 || fabs(moment[4] - 3) > 0.05)
        test_fail("moments %g %g %g %g", moment[1], moment[2], moment[3], moment[4]);
    if (tail < 35 || tail > 105) test_fail("%zu values beyond 4, expected about 66", tail);
    if (fabs(pairs) > 0.007 || fabs(squares) > 0.014) test_fail("pairs are related: %g, %g", pairs, squares);
    model_free(&model);
}

// exp(A_log) is uniform over (0.01, 16); any piece, also from an odd element on, equals that of the whole.
TEST(decay_rates_are_uniform) {
    Model model = model_of("qwen3_5,hidden_size=8,num_hidden_layers=1,layer_types=l", DTYPE_FP32);
    const size_t count = 1u << 18;
    float *values = (float *)case_memory(count * sizeof(float)), *piece = (float *)case_memory(count * sizeof(float));
    size_t a = 0;
    double distance = 0;
    while (model.parameters[a].role != ROLE_DECAY) a++;
    initial_weights(&model, a, 0, count, 9, DTYPE_FP32, values);
    for (size_t k = 0; k < 20; k++) {
        const size_t begin = test_random_below(count), n = test_random_below(count - begin + 1);
        initial_weights(&model, a, begin, n, 9, DTYPE_FP32, piece);
        assert_memory_equal(piece, values + begin, n * sizeof(float));
    }
    qsort(values, count, sizeof(*values), compare_floats);
    for (size_t i = 0; i < count; i++)
        distance = fmax(distance, fabs((exp(values[i]) - 0.01) / 15.99 - ((double)i + 0.5) / (double)count));
    assert_true(distance < 1.95 / sqrt((double)count)); // holds by chance 999 times of 1000; the seed is fixed
    assert_true(exp(values[0]) > 0.0099 && exp(values[count - 1]) < 16.001);
    model_free(&model);
}

TEST(initial_values_depend_on_the_seed_alone) {
    Model model = model_of(RANDOM_MODEL, DTYPE_FP32);
    const size_t count = parameter_elements(&model.parameters[0]) - 1; // odd
    float *whole = (float *)case_memory(count * sizeof(float)), *piece = (float *)case_memory(count * sizeof(float));
    uint16_t *rounded = (uint16_t *)case_memory(count * 2);
    double *wide = (double *)case_memory(count * 8);
    size_t i, same[2] = {0, 0};
    uint64_t hash = 0;
    initial_weights(&model, 0, 0, count, 5, DTYPE_FP32, whole);
    for (size_t k = 0; k < 30; k++) { // any piece that begins at an even number
        size_t begin = test_random_below(count) & ~(size_t)1, n = test_random_below(count - begin + 1);
        initial_weights(&model, 0, begin, n, 5, DTYPE_FP32, piece);
        if (memcmp(piece, whole + begin, n * sizeof(float)) != 0) test_fail("elements %zu to %zu", begin, begin + n);
    }
    initial_weights(&model, 0, 0, count, 5, DTYPE_BF16, rounded);
    initial_weights(&model, 0, 0, count, 5, DTYPE_FP64, wide);
    for (i = 0; i < count; i++) {
        if (rounded[i] != float_to_bf16(whole[i]) || wide[i] != (double)whole[i])
            test_fail("element %zu in another type", i);
    }
    initial_weights(&model, 0, 0, count, 6, DTYPE_FP32, piece); // another seed
    for (i = 0; i < count; i++) same[0] += piece[i] == whole[i];
    initial_weights(&model, 1, 0, 1000, 5, DTYPE_FP32, piece); // another parameter
    for (i = 0; i < 1000; i++) same[1] += piece[i] == whole[i];
    assert_true(same[0] < 10 && same[1] < 10);
    for (i = 0; i < 100000; i++) { // the same on every machine
        uint32_t bits;
        memcpy(&bits, &whole[i], 4);
        hash = hash * 31 + bits;
    }
    if (hash != 0x08fd8861e5e9f9f8u)
        test_fail("seed 5 means other weights than it used to: hash %016llx", (unsigned long long)hash);
    model_free(&model);
}

// ---- NaN and Inf ----------------------------------------------------------------------------------------------------
typedef struct {
    size_t parameter, element;
    double value;
} Poison;

static void check_poisoned(const void *context) {
    const Poison *poisoned = (const Poison *)context;
    WeightSource *source = weights_open(GOLDEN "gpt2");
    Model model = model_of(GOLDEN_GPT2, ops_device->stored);
    void *device = load_model(ops_device, source, &model);
    char bytes[8];
    element_write(bytes, model.dtype, 0, poisoned->value);
    ops_device->copy_in(
        element_address(device, model.dtype, model.parameters[poisoned->parameter].offset + poisoned->element), bytes,
        dtype_size(model.dtype));
    weights_check_finite(&model, sharding_whole(), ops_device, PLACE_DEVICE, device);
}

TEST(nan_is_refused_by_name) {
    Poison poisoned[] = {{4, 72 * 24 - 1, NAN}, {0, 0, INFINITY}, {27, 3, -INFINITY}};
    expect_refused(check_poisoned, &poisoned[0], 1, "NaN: tensor transformer.h.0.attn.c_attn.weight at [71, 23]");
    expect_refused(check_poisoned, &poisoned[1], 1, "an infinity: tensor transformer.wte.weight at [0, 0]");
    expect_refused(check_poisoned, &poisoned[2], 1, "an infinity: tensor transformer.ln_f.bias at [3, 0]");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
