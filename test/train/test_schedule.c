// The learning rate: exact ends, closed forms, and the corners (no warm-up, only warm-up, a single step).
#include "test/base/testing.h"
#include "llmc/cli/options.h"
#include "llmc/train/optimizer.h"

__attribute__((weak)) const Ops *const ops_device = NULL; // no tensors here

static const double PI = 3.14159265358979323846;

static Schedule make(ScheduleKind kind, size_t warmup, size_t steps) {
    Schedule schedule = {3e-4, kind, 0.1, 0.2, warmup, steps};
    return schedule;
}

static void expect_rate(const Schedule *s, size_t step, double expected) {
    double found = schedule_learning_rate(s, step);
    if (!(fabs(found - expected) <= 1e-15 * s->peak))
        test_fail("step %zu of %zu: %.17g, expected %.17g", step, s->steps, found, expected);
}

static void expect_exact(const Schedule *s, size_t step, double expected) {
    double found = schedule_learning_rate(s, step);
    if (found != expected) test_fail("step %zu of %zu: %.17g, expected exactly %.17g", step, s->steps, found, expected);
}

TEST(ends_are_exact) {
    static const size_t warmups[] = {0, 1, 2, 7, 99}, lengths[] = {100, 101, 1000, 123457};
    for (int kind = 0; kind < SCHEDULES; kind++) {
        for (size_t w = 0; w < 5; w++) {
            for (size_t n = 0; n < 4; n++) {
                Schedule s = make((ScheduleKind)kind, warmups[w], lengths[n]);
                test_case("%s, %zu of warm-up, %zu steps", schedule_names[kind], s.warmup, s.steps);
                expect_exact(&s, max_size(s.warmup, 1), s.peak);
                expect_exact(&s, s.steps, kind == SCHEDULE_CONSTANT ? s.peak : s.peak * s.final_fraction);
                if (s.warmup > 1) expect_rate(&s, 1, s.peak / (double)s.warmup);
            }
        }
    }
}

TEST(closed_forms) {
    size_t warmup = 10, steps = 110; // 100 steps of decay
    for (size_t step = 1; step <= steps; step++) {
        Schedule cosine = make(SCHEDULE_COSINE, warmup, steps), linear = make(SCHEDULE_LINEAR, warmup, steps);
        Schedule constant = make(SCHEDULE_CONSTANT, warmup, steps), wsd = make(SCHEDULE_WSD, warmup, steps);
        double low = 3e-5, high = 3e-4, p = ((double)step - 10) / 100, q = ((double)step - 88) / 22; // 0.2 * 110 = 22
        double ramp = high * (double)step / 10;
        expect_rate(&cosine, step, step < 10 ? ramp : low + (high - low) * (1 + cos(PI * p)) / 2);
        expect_rate(&linear, step, step < 10 ? ramp : high + (low - high) * p);
        expect_rate(&constant, step, step < 10 ? ramp : high);
        expect_rate(&wsd, step, step < 10 ? ramp : step < 88 ? high : low + (high - low) * (1 - sqrt(q)));
    }
}

TEST(without_warmup_the_decay_begins_at_step_1) {
    Schedule s = make(SCHEDULE_LINEAR, 0, 11);
    for (size_t step = 1; step <= 11; step++) expect_rate(&s, step, 3e-4 + (3e-5 - 3e-4) * ((double)step - 1) / 10);
}

TEST(rises_then_falls) {
    for (int kind = 0; kind < SCHEDULES; kind++) {
        for (size_t warmup = 0; warmup < 12; warmup++) {
            for (size_t steps = 1; steps < 12; steps++) {
                Schedule s = make((ScheduleKind)kind, warmup, steps);
                double before = 0;
                test_case("%s, %zu of warm-up, %zu steps", schedule_names[kind], warmup, steps);
                for (size_t step = 1; step <= steps; step++) {
                    double rate = schedule_learning_rate(&s, step);
                    if (!(rate > 0 && rate <= s.peak)) test_fail("step %zu: %g is out of range", step, rate);
                    if (step <= warmup && !(rate > before)) test_fail("step %zu of the warm-up does not rise", step);
                    if (step > warmup && step > 1 && rate > before) test_fail("step %zu rises after warm-up", step);
                    before = rate;
                }
                if (warmup >= steps) expect_rate(&s, steps, s.peak * (double)steps / (double)max_size(warmup, 1));
            }
        }
    }
}

TEST(fractions_at_their_limits) {
    Schedule s = make(SCHEDULE_COSINE, 0, 10);
    s.final_fraction = 0;
    expect_exact(&s, 10, 0);
    s.final_fraction = 1;
    expect_rate(&s, 5, s.peak);
    s = make(SCHEDULE_WSD, 0, 10);
    s.decay_fraction = 0; // no decay
    expect_exact(&s, 10, s.peak);
    s.decay_fraction = 1; // nothing but decay: the first step is the last at the peak
    expect_exact(&s, 1, s.peak);
    expect_exact(&s, 10, s.peak * s.final_fraction);
    s.warmup = 6; // warm-up and decay overlap: the decay begins when the warm-up is over
    expect_exact(&s, 6, s.peak);
    expect_rate(&s, 7, s.peak * (0.1 + 0.9 * (1 - sqrt(0.25))));
}

// What --schedule offers is what there is.
TEST(names_are_those_of_the_option) {
    const char *names = option_rows[option_find("schedule")].value;
    size_t count = 0;
    for (size_t i = 0; i < SCHEDULES; i++) assert_non_null(strstr(names, schedule_names[i]));
    for (size_t i = 0; names[i]; i++) count += names[i] == '|';
    assert_int_equal(count + 1, SCHEDULES);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
