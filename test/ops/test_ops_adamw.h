/*
The optimizer op against the reference: every pairing of gradient type, moment type and master copy, and the stochastic
rounding of bf16 weights without a master copy. Part of test_ops.c.
*/
#ifndef TEST_OPS_ADAMW_H
#define TEST_OPS_ADAMW_H
#include "cases.h"

enum { WEIGHTS = 20011 };

typedef struct {
    double w[WEIGHTS], m[WEIGHTS], v[WEIGHTS]; // w: the master copy if there is one
} State;

static AdamW adamw_step(int64_t step) {
    AdamW s = {0};
    s.learning_rate = 3e-3, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-8, s.weight_decay = 0.1;
    s.gradient_scale = 0.37, s.step = step, s.seed = 42;
    return s;
}

static double bf16_unit(double x) { // distance of the bf16 numbers around x
    int exponent;
    (void)frexp(x, &exponent);
    return ldexp(1.0, exponent - 8);
}

static void check_weight(const Guarded *w, const Guarded *master, size_t i, double target, double allowed) {
    double found = result(w, i);
    if (master) {
        double kept = result(master, i);
        if (!(fabs(kept - target) <= allowed))
            test_fail("master[%zu] is %.9g, expected %.9g (allowed %.2g)", i, kept, target, allowed);
        if (found != round_to(w->type, kept))
            test_fail("w[%zu] is %.9g, not the rounding of master %.9g", i, found, kept);
    } else {
        if (w->type == DTYPE_BF16) allowed += bf16_unit(target); // either neighbour
        if (!(fabs(found - target) <= allowed))
            test_fail("w[%zu] is %.9g, expected %.9g (allowed %.2g)", i, found, target, allowed);
    }
}

// Compares one step from *state with the reference's; *state becomes the op's result.
static void adamw_case(State *state, DType gradient_type, DType moment_type, int with_master, size_t count,
                       int64_t step) {
    AdamW s = adamw_step(step);
    double unit = ops->summed == DTYPE_FP64 && !with_master ? 1e-15 : 1.2e-7;
    double moment_unit = moment_type == DTYPE_BF16 ? 0x1p-7 : moment_type == DTYPE_FP32 ? 1.2e-7 : 1e-15;
    double arithmetic = ops->summed == DTYPE_FP64 ? 1e-14 : 2e-6;
    case_of("", "gradient %s, moments %s, %s master, count=%zu, step %d", dtype_name(gradient_type),
            dtype_name(moment_type), with_master ? "with" : "without", count, (int)step);
    Guarded *g = guarded_normal(INPUT, "gradient", gradient_type, count, 0.0, 2.0);
    Guarded *master = with_master ? guarded_values(CHANGED, "master", DTYPE_FP32, state->w, count) : NULL;
    Guarded *w = with_master ? output("w", count) : guarded_values(CHANGED, "w", ops->stored, state->w, count);
    Guarded *m = guarded_values(CHANGED, "m", moment_type, state->m, count);
    Guarded *v = guarded_values(CHANGED, "v", moment_type, state->v, count);
    CALL(ops->adamw(w->data, of(master), g->data, gradient_type, m->data, v->data, moment_type, count, &s));
    for (size_t i = 0; i < count; i++) {
        double from = master ? master->values[i] : w->values[i], m_new = m->values[i], v_new = v->values[i];
        double change = reference_adamw(from, &m_new, &v_new, g->values[i], &s);
        double near_m = arithmetic * (fabs(m->values[i]) + fabs(g->values[i])) + moment_unit * fabs(m_new);
        if (!(fabs(result(m, i) - m_new) <= near_m)) test_fail("m[%zu] is %.9g, expected %.9g", i, result(m, i), m_new);
        if (!(fabs(result(v, i) - v_new) <= (arithmetic + moment_unit) * v_new))
            test_fail("v[%zu] is %.9g, expected %.9g", i, result(v, i), v_new);
        // the change may use m and v before or after rounding: one moment_unit of m, half of one of sqrt(v)
        check_weight(w, master, i, from + change,
                     unit * fmax(fabs(from), fabs(from + change)) +
                         (10.0 * arithmetic + 2.0 * moment_unit) * s.learning_rate * 3.0);
        state->w[i] = master ? result(master, i) : result(w, i);
        state->m[i] = result(m, i), state->v[i] = result(v, i);
    }
}

TEST(adamw_every_pairing) {
    static const size_t counts[] = {1, 7, 16, 33, 1025, WEIGHTS};
    static State state;
    const DType gradients[] = {ops->stored, ops->summed, DTYPE_FP32};
    const DType moments[] = {ops->summed, DTYPE_FP32, DTYPE_BF16};
    for (size_t pairing = 0; pairing < 3 * 3 * 2 * 6; pairing++) {
        DType gradient = gradients[pairing % 3], moment = moments[pairing / 3 % 3];
        int with_master = (int)(pairing / 9 % 2);
        size_t c = pairing / 18;
        memset(&state, 0, sizeof(state));
        for (size_t i = 0; i < counts[c]; i++) state.w[i] = test_normal();
        for (int64_t step = 1; step <= (counts[c] > 2000 ? 2 : 6); step++)
            adamw_case(&state, gradient, moment, with_master, counts[c], step);
    }
}

// A parameter stepped in parts has the bits of one stepped as a whole, random bits included.
static void adamw_in_parts(Guarded *const *t, const size_t *cut, size_t parts) {
    for (size_t i = 0; i < parts; i++) {
        const size_t first = cut[i];
        AdamW s = adamw_step(3);
        void *part[5];
        for (int k = 0; k < 5; k++) part[k] = t[k] ? (char *)t[k]->data + first * dtype_size(t[k]->type) : NULL;
        s.first = first;
        ops->adamw(part[0], part[1], part[2], t[2]->type, part[3], part[4], t[3]->type, cut[i + 1] - first, &s);
    }
}

TEST(adamw_parts) {
    enum { COUNT = 5200, PARTS = 10 };
    static const size_t cut[PARTS + 1] = {0, 1, 32, 1020, 1024, 1031, 1500, 3072, 4100, 4104, COUNT};
    static const size_t uncut[] = {0, COUNT};
    for (int pairing = 0; pairing < 8; pairing++) {
        DType moment = pairing & 1 ? DTYPE_BF16 : DTYPE_FP32, gradient = pairing & 2 ? DTYPE_BF16 : ops->summed;
        Guarded *t[5];
        unsigned char *parts[5];
        case_of("", "gradient %s, moments %s, %s master", dtype_name(gradient), dtype_name(moment),
                pairing & 4 ? "with" : "without");
        double *squares = case_doubles(COUNT);
        for (int i = 0; i < COUNT; i++) squares[i] = 0.1 + test_uniform();
        t[0] = guarded_normal(CHANGED, "w", ops->stored, COUNT, 0.0, 1.0);
        t[1] = pairing & 4 ? guarded_normal(CHANGED, "master", DTYPE_FP32, COUNT, 0.0, 1.0) : NULL;
        t[2] = guarded_normal(INPUT, "gradient", gradient, COUNT, 0.0, 2.0);
        t[3] = guarded_normal(CHANGED, "m", moment, COUNT, 0.0, 1.0);
        t[4] = guarded_values(CHANGED, "v", moment, squares, COUNT);
        CALL(adamw_in_parts(t, cut, PARTS));
        for (int k = 0; k < 5; k++) {
            if (!t[k]) continue;
            parts[k] = (unsigned char *)case_memory(t[k]->bytes);
            memcpy(parts[k], t[k]->after, t[k]->bytes);
        }
        CALL(adamw_in_parts(t, uncut, 1));
        for (int k = 0; k < 5; k++)
            if (t[k] && memcmp(parts[k], t[k]->after, t[k]->bytes) != 0)
                test_fail("%s in parts has other bits than as a whole", t[k]->name);
    }
}

// bf16 moments must follow small changes on average. Rounded to nearest they would stop once a step is below half a
// unit: v with beta2 = 0.999 at a quarter of its value.
TEST(adamw_bf16_moments_follow) {
    enum { STEPS = 1500, COUNT = 400 };
    double path_m = 0.0, path_v = 0.0, mean_m = 0.0, mean_v = 0.0;
    case_of("", "%d steps", STEPS);
    double *zeros = case_doubles(COUNT);
    Guarded *w = guarded_values(CHANGED, "w", ops->stored, zeros, COUNT);
    Guarded *g = guarded_values(INPUT, "gradient", ops->stored, zeros, COUNT);
    Guarded *m = guarded_values(CHANGED, "m", DTYPE_BF16, zeros, COUNT),
            *v = guarded_values(CHANGED, "v", DTYPE_BF16, zeros, COUNT);
    for (int i = 0; i < COUNT; i++) element_write(g->before + g->offset, g->type, (size_t)i, 1.0);
    tensors_load();
    for (int step = 1; step <= STEPS; step++) {
        AdamW s = adamw_step(step);
        s.beta1 = 0.99, s.beta2 = 0.999, s.gradient_scale = 1.0;
        ops->adamw(w->data, NULL, g->data, g->type, m->data, v->data, DTYPE_BF16, COUNT, &s);
        (void)reference_adamw(0.0, &path_m, &path_v, 1.0, &s);
    }
    tensors_check(0);
    for (int i = 0; i < COUNT; i++) mean_m += result(m, (size_t)i) / COUNT, mean_v += result(v, (size_t)i) / COUNT;
    if (fabs(mean_m - path_m) > 0.01 * path_m) test_fail("the mean of m is %g, expected %g", mean_m, path_m);
    if (fabs(mean_v - path_v) > 0.01 * path_v) test_fail("the mean of v is %g, expected %g", mean_v, path_v);
}

// Returns w after one step without master from m = v = 0, gradients all 1, no decay: start - learning_rate before
// rounding.
static Guarded *rounded_step(size_t count, double start, double learning_rate, int64_t step, uint64_t seed) {
    double *starts = case_doubles(count), *ones = case_doubles(count), *m_start = case_doubles(count);
    double *v_start = case_doubles(count);
    AdamW s = adamw_step(step);
    s.learning_rate = learning_rate, s.epsilon = 0.0, s.weight_decay = 0.0, s.gradient_scale = 1.0, s.seed = seed;
    for (size_t i = 0; i < count; i++) { // the moments after earlier gradients of 1: their corrected values are 1
        starts[i] = start, ones[i] = 1.0;
        m_start[i] = 1.0 - pow(s.beta1, (double)(step - 1)), v_start[i] = 1.0 - pow(s.beta2, (double)(step - 1));
    }
    Guarded *w = guarded_values(CHANGED, "w", ops->stored, starts, count);
    Guarded *g = guarded_values(INPUT, "gradient", ops->stored, ones, count);
    Guarded *m = guarded_values(CHANGED, "m", ops->summed, m_start, count);
    Guarded *v = guarded_values(CHANGED, "v", ops->summed, v_start, count);
    CALL(ops->adamw(w->data, NULL, g->data, ops->stored, m->data, v->data, ops->summed, count, &s));
    return w;
}

static size_t count_of(const Guarded *w, double value) {
    size_t count = 0;
    for (size_t i = 0; i < w->count; i++) count += result(w, i) == value;
    return count;
}

// The mean must be the unrounded value. The lower neighbour's share is binomial, within 5 standard deviations in each
// of 60 draws (one false alarm per 30,000 choices of the fixed seeds).
TEST(adamw_stochastic_rounding) {
    enum { COUNT = 40000 };
    static const double fractions[] = {0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.003, 0.5, 0.3};
    const double unit = 0x1p-7, start = 1.5; // the bf16 numbers around 1.5 are 2^-7 apart
    size_t same;
    for (uint64_t seed = 0; seed < 6; seed++)
        for (size_t f = 0; f < 10; f++) {
            double p = fractions[f], deviation = sqrt((double)COUNT * p * (1.0 - p));
            case_of("", "fraction %g, seed %d", p, (int)seed);
            Guarded *w = rounded_step(COUNT, start, p * unit, 1 + (int64_t)f, seed * 1000003u);
            if (ops->stored != DTYPE_BF16) { // no rounding at random: equal for all seeds
                for (size_t i = 0; i < COUNT; i++)
                    if (fabs(result(w, i) - (start - p * unit)) > 2e-7) test_fail("w[%zu] is %.9g", i, result(w, i));
                continue;
            }
            size_t lower = count_of(w, start - unit);
            if (lower + count_of(w, start) != COUNT) test_fail("a weight is neither of the two neighbours");
            if (fabs((double)lower - p * COUNT) > 5.0 * deviation)
                test_fail("%zu of %d went to the lower neighbour, expected %.0f +- %.0f", lower, COUNT, p * COUNT,
                          deviation);
        }
    if (ops->stored != DTYPE_BF16) return;

    // Other steps and seeds must make other choices; neighbouring elements must agree only by chance.
    for (size_t f = 0; f < 3; f++) {
        static unsigned char first[COUNT];
        case_of("", "independence of %s", f == 0 ? "steps" : f == 1 ? "seeds" : "elements");
        Guarded *w = rounded_step(COUNT, start, 0.5 * unit, 5, 7);
        for (size_t i = 0; i < COUNT; i++) first[i] = result(w, i) == start;
        if (f < 2) w = rounded_step(COUNT, start, 0.5 * unit, f == 0 ? 6 : 5, f == 1 ? 8 : 7);
        for (size_t i = same = 0; i < COUNT; i++) same += first[i] == (result(w, f < 2 ? i : (i + 1) % COUNT) == start);
        if (fabs((double)same - 0.5 * COUNT) > 5.0 * 0.5 * sqrt((double)COUNT))
            test_fail("%zu of %d choices agree, expected half", same, COUNT);
    }
    case_of("", "weights that do not move");
    if (count_of(rounded_step(COUNT, start, 0.0, 1, 1), start) != COUNT) test_fail("a weight moved at learning rate 0");
}

#endif
