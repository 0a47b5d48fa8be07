/*
Timed ops and their profile (llmc/estimate/profile.h): every op of a pass is timed and has a row. Results match the
other op set to the bit. Rows add up to the plan's counts; rows and the rest add up to the pass, in JSON, too.
*/
#include "test/base/testing.h"
#include "test/model/tiny.h"
#include "llmc/base/json.h"
#include "llmc/estimate/profile.h"

static const struct {
    const char *text;
    size_t lora_rank;
} models[] = {{TINY_GPT2, 0}, {TINY_QWEN3, 0}, {TINY_GEMMA ",sliding_window=9,layer_types=ssf", 0}, {TINY_LLAMA, 3}};

// Ops passed on untimed: those of no pass or without work
enum {
    PASSED_ON = 0
#define OP(...)
#define OP_HOST(...) +1
#define OP_SCRATCH   OP_HOST
#define OP_STEP      OP_HOST
#include "llmc/ops/op_list.h"
};

TEST(every_op_is_timed) {
    typedef void (*Function)(void);
    const Ops timed = ops_timed(ops_device, 0);
    size_t same = 0;
    for (size_t offset = offsetof(Ops, allocate); offset < sizeof(Ops); offset += sizeof(Function))
        same += !memcmp((const char *)&timed + offset, (const char *)ops_device + offset, sizeof(Function));
    assert_int_equal(same, PASSED_ON);
}

static void expect_close(const char *what, double found, double expected) {
    if (!(fabs(found - expected) <= 1e-12 * expected)) test_fail("%s: %.17g, not %.17g", what, found, expected);
}

// Compares the sum of the rows' counts with the plan's; exactly if the plan divides nothing.
static void expect_counts(const OpCounts *plan, int exactly) {
    enum { COUNTS = sizeof(OpCounts) / sizeof(double) };
    for (size_t k = 0; k < COUNTS; k++) {
        double sum = 0, planned = ((const double *)plan)[k];
        for (size_t i = 0; i < timing.count; i++) sum += ((const double *)&timing.row[i].counts)[k];
        expect_close("a count", sum, planned);
        if (exactly && k == 0 && sum != planned) test_fail("%.17g FLOP, not %.17g", sum, planned);
    }
}

static void expect_calls(const char *op, size_t calls) {
    size_t found = 0;
    for (size_t i = 0; i < timing.count; i++)
        if (!strcmp(timing.row[i].op, op)) found += timing.row[i].calls;
    if (found != calls) test_fail("%s: %zu calls, not %zu", op, found, calls);
}

static void check_pass(TinyCase *c, Method method, size_t chunk, size_t keep) {
    RunSettings settings = tiny_settings(c, method, chunk, chunk);
    tiny_keep(&settings, keep), settings.backward = 1;
    settings.ridge = 2; // FLOPs a byte: some of these products are bound by operands
    test_case("%s, method %d, chunk %zu, keep %zu", c->model.config.family->name, method, chunk, keep);
    const Plan plan = plan_make(&settings, &c->batch);
    const size_t visits = method == METHOD_MST ? 1 : (c->batch.N + plan.chunk - 1) / plan.chunk,
                 L = c->model.config.num_hidden_layers;
    const size_t transfers = keep == 2 ? 2 * L * visits : 0;
    const Ops timed = ops_timed(ops_device, settings.ridge);
    TinyResult plain = tiny_run_trained(ops_device, settings, c->weights, c->adapters, &c->batch, 1);
    if (timing.count) test_fail("ops that are not timed have rows");
    TinyResult found = tiny_run_trained(&timed, settings, c->weights, c->adapters, &c->batch, 1);
    if (found.loss != plain.loss) test_fail("the loss is another");
    if (memcmp(found.gradient, plain.gradient, found.elements * sizeof(double)) != 0) test_fail("gradients differ");
    expect_counts(&plan.counts, chunk == 0);
    expect_calls("attention_backward", L * visits);
    expect_calls("attention_forward", (method == METHOD_FULL || keep ? 1 : 2) * L * visits);
    expect_calls("store", transfers);
    expect_calls("load", transfers);
    free(plain.gradient), free(found.gradient);
}

TEST(passes_are_the_same_and_counted) {
    static const size_t chunks[] = {0, 8, 7}, length[] = {6, 1, 13, 12};
    for (size_t m = 0; m < COUNT_OF(models); m++) {
        SCOPED(tiny_case_free) TinyCase c = tiny_case(models[m].text, models[m].lora_rank);
        c.batch = tiny_batch(length, 4, c.model.config.vocab_size, 1, 11);
        check_pass(&c, METHOD_FULL, 0, 0);
        check_pass(&c, METHOD_CHECKPOINT, 0, 0);
        for (size_t k = 0; k < 9; k++) check_pass(&c, METHOD_STREAM, chunks[k / 3], k % 3);
        for (size_t k = 0; k < 3; k++)
            check_pass(&c, METHOD_MST, chunks[k], k), check_pass(&c, METHOD_SECO, chunks[k], 0);
    }
}

// Runs a product and a norm of known sizes, and an op that is not counted.
static double three_ops(const Ops *ops) {
    static float x[16 * 32], w[48 * 32], out[16 * 48];
    const Norm norm = {1e-6, 0, NORM_RMS};
    const double begin = seconds_now();
    ops->linear_forward((Stored *)out, (const Stored *)x, (const Stored *)w, NULL, NULL, 16, 32, 48, 48);
    ops->norm_forward((Stored *)out, (const Stored *)x, (const Stored *)w, NULL, NULL, 16, 32, norm);
    ops->linear_forward((Stored *)out, (const Stored *)x, (const Stored *)w, NULL, NULL, 16, 32, 48, 48);
    ops->zero(out, sizeof(out));
    return seconds_now() - begin;
}

TEST(rows_as_json) {
    Config config = config_from_text(
        "llama,hidden_size=32,intermediate_size=16,num_hidden_layers=1,num_attention_heads=4,vocab_size=48", "test",
        EXIT_USAGE);
    SCOPED(model_free) Model model = model_build(&config, DTYPE_FP32);
    const double bandwidth = 4.8e12 * 0.85, gap = 6e-6; // between two kernels
    const struct {
        const char *row; // its beginning
        double flops, floor_seconds;
    } expected[] = {
        {"{\"op\": \"linear_forward\", \"part\": \"head\", \"shape\": [48, 32], \"calls\": 2, ", 2.0 * 2 * 16 * 32 * 48,
         2 * 4 * (16 * 32 + 16 * 48 + 48 * 32) / bandwidth + 2 * gap},
        {"{\"op\": \"rmsnorm_forward\", \"shape\": [32], \"calls\": 1, ", 0, 2 * 16 * 32 * 4 / bandwidth + gap},
        {"{\"op\": \"zero\", \"calls\": 1, ", 0, 0},
        {"{\"op\": \"host\", ", 0, 0}};
    const Ops timed = ops_timed(ops_device, 0);
    const double pass = three_ops(&timed);
    double sum = 0, longest = INFINITY;
    char text[8192];
    JsonOut json = json_open_text(text, sizeof(text), JSON_LINE);
    StreamBP s = {0};
    s.model = &model;
    timing_sort();
    profile_json(&json, &s, &machines[MACHINE_H200], pass);
    assert_true(json_text_end(&json) > 0);
    for (size_t i = 0; i < COUNT_OF(expected); i++) {
        double seconds, flops, floor_seconds = 0;
        test_case("%s", expected[i].row);
        const char *row = strstr(text, expected[i].row);
        assert_non_null(row);
        assert_int_equal(sscanf(strstr(row, "\"seconds\""), "\"seconds\": %lf, \"flops\": %lf", &seconds, &flops), 2);
        sscanf(strstr(row, "\"floor_seconds\""), "\"floor_seconds\": %lf", &floor_seconds); // or null
        assert_true(flops == expected[i].flops);
        expect_close("floor", floor_seconds, expected[i].floor_seconds);
        sum += seconds;
    }
    for (size_t i = 0; i < timing.count; longest = timing.row[i++].seconds)
        if (timing.row[i].seconds > longest) test_fail("%s is not in its place", timing.row[i].op);
    assert_int_equal(timing.count, 3);
    if (!(fabs(sum - pass) <= 1e-9 * pass)) test_fail("rows add up to %g of %g seconds", sum, pass);
}

TEST(median_of_odd_and_even_counts) {
    for (size_t n = 1; n <= 4; n++) {
        double numbers[] = {8, 2, 1, 4};
        const double expected[] = {8, 5, 2, 3};
        if (median(numbers, n) != expected[n - 1]) test_fail("the median of %zu numbers is not %g", n, expected[n - 1]);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
