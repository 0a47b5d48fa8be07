// The learning rate: exact ends, closed forms, and the corners (no warm-up, only warm-up, a single step).
#include "test/base/testing.h"
#include "llmc/optimizer/schedule.h"
#include <math.h>

static const double PI = 3.14159265358979323846;

static Schedule make(ScheduleKind kind, size_t warmup, size_t steps) {
    Schedule schedule = {3e-4, kind, 0.1, 0.2, warmup, steps, 0, 0, 0};
    return schedule;
}

// rounding: allowed error, as a share of the peak
static void expect_rate(const Schedule *s, size_t step, double expected, double rounding) {
    double found = schedule_learning_rate(s, step);
    if (!(fabs(found - expected) <= rounding * s->peak))
        test_fail("step %zu of %zu: %.17g, expected %.17g", step, s->steps, found, expected);
}

TEST(ends_are_exact) {
    static const size_t warmups[] = {0, 1, 2, 7, 99}, lengths[] = {100, 101, 1000, 123457};
    for (size_t i = 0; i < SCHEDULES * 5 * 4; i++) {
        Schedule s = make((ScheduleKind)(i / 20), warmups[i / 4 % 5], lengths[i % 4]);
        for (s.version_1 = 0; s.version_1 < 2; s.version_1++) {
            const size_t end = s.version_1 ? s.steps : s.steps + 1; // a step that never runs
            test_case("%s, %zu of warm-up, %zu steps", schedule_names[s.kind], s.warmup, s.steps);
            expect_rate(&s, max_size(s.warmup, 1), s.peak, 0);
            expect_rate(&s, end, s.kind == SCHEDULE_CONSTANT ? s.peak : s.peak * s.final_fraction, 0);
            if (s.warmup > 1) expect_rate(&s, 1, s.peak / (double)s.warmup, 1e-15);
        }
    }
}

// 100 steps of decay after a warm-up, or from step 1 on: equal get_cosine_schedule_with_warmup and
// get_linear_schedule_with_warmup of transformers at the previous step.
TEST(closed_forms) {
    static const double low = 3e-5, high = 3e-4;
    for (size_t warmup = 0; warmup <= 10; warmup += 10) {
        const size_t steps = warmup + 100, stable = steps - (warmup ? 22 : 20);
        Schedule cosine = make(SCHEDULE_COSINE, warmup, steps), linear = make(SCHEDULE_LINEAR, warmup, steps);
        Schedule constant = make(SCHEDULE_CONSTANT, warmup, steps), wsd = make(SCHEDULE_WSD, warmup, steps);
        for (size_t step = 1; step <= steps; step++) {
            const double made = (double)step - 1, p = (made - (double)warmup) / 100, ramp = high * (double)step / 10;
            const double q = (made - (double)stable) / (double)(steps - stable); // a fifth of the steps
            const int rising = step <= warmup;
            expect_rate(&cosine, step, rising ? ramp : low + (high - low) * (1 + cos(PI * p)) / 2, 1e-15);
            expect_rate(&linear, step, rising ? ramp : high + (low - high) * p, 1e-15);
            expect_rate(&constant, step, rising ? ramp : high, 1e-15);
            expect_rate(&wsd, step, rising ? ramp : q < 0 ? high : low + (high - low) * (1 - sqrt(q)), 1e-15);
        }
    }
}

// --extend: keeps the last rate, or warms up from it and then follows a schedule over the remaining steps.
TEST(an_extended_run) {
    Schedule kept = make(SCHEDULE_CONSTANT, 0, 150), own = make(SCHEDULE_COSINE, 10, 200);
    kept.begin = own.begin = 100, kept.from = own.from = 4e-5, kept.peak = 4e-5;
    Schedule alone = make(SCHEDULE_COSINE, 10, 100);
    for (size_t step = 101; step <= 150; step++) expect_rate(&kept, step, 4e-5, 0);
    for (size_t step = 101; step < 110; step++)
        expect_rate(&own, step, 4e-5 + (3e-4 - 4e-5) * (double)(step - 100) / 10, 1e-15);
    for (size_t step = 110; step <= 200; step++) expect_rate(&own, step, schedule_learning_rate(&alone, step - 100), 0);
    own.warmup = alone.warmup = 0;
    for (size_t step = 101; step <= 200; step++) expect_rate(&own, step, schedule_learning_rate(&alone, step - 100), 0);
}

TEST(rises_then_falls) {
    for (size_t i = 0; i < SCHEDULES * 12 * 11; i++) {
        Schedule s = make((ScheduleKind)(i / 132), i / 11 % 12, 1 + i % 11);
        double before = 0;
        test_case("%s, %zu of warm-up, %zu steps", schedule_names[s.kind], s.warmup, s.steps);
        for (size_t step = 1; step <= s.steps; step++) {
            double rate = schedule_learning_rate(&s, step);
            if (!(rate > 0 && rate <= s.peak)) test_fail("step %zu: %g is out of range", step, rate);
            if (step <= s.warmup && !(rate > before)) test_fail("step %zu of the warm-up does not rise", step);
            if (step > s.warmup && step > 1 && rate > before) test_fail("step %zu rises after warm-up", step);
            before = rate;
        }
        if (s.warmup >= s.steps) expect_rate(&s, s.steps, s.peak * (double)s.steps / (double)s.warmup, 1e-15);
    }
}

TEST(fractions_at_their_limits) {
    Schedule s = make(SCHEDULE_LINEAR, 0, 10);
    s.final_fraction = 0;
    expect_rate(&s, 10, s.peak / 10, 1e-15); // the last step does something
    s.final_fraction = 1;
    expect_rate(&s, 5, s.peak, 1e-15);
    s = make(SCHEDULE_WSD, 0, 10);
    s.decay_fraction = 0; // no decay
    expect_rate(&s, 10, s.peak, 0);
    s.decay_fraction = 1; // nothing but decay
    expect_rate(&s, 1, s.peak, 0);
    expect_rate(&s, 2, s.peak * (0.1 + 0.9 * (1 - sqrt(0.1))), 1e-15);
    s.warmup = 6; // warm-up and decay overlap: the decay begins after the warm-up
    expect_rate(&s, 7, s.peak, 0);
    expect_rate(&s, 8, s.peak * (0.1 + 0.9 * (1 - sqrt(0.25))), 1e-15);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
