/*
Metrics of a step, by TRL's names: means, minima, maxima and standard deviations, merged over sequences and ranks.
*/
#ifndef LLMC_METRICS_H
#define LLMC_METRICS_H
#include "llmc/base/utils.h"
#include <math.h>

// A mean (sum and count, which add up), a minimum or maximum (count 1), or a standard deviation (over count - 1, from
// the sum of squared differences to the mean)
#define METRICS_MOST 48
typedef enum { METRIC_MEAN, METRIC_MIN, METRIC_MAX, METRIC_DEVIATION } MetricKind;
typedef struct {
    const char *name; // name in log.jsonl
    double sum, count, squares;
    MetricKind kind;
} Metric;

typedef struct {
    Metric metric[METRICS_MOST];
    size_t count;
} Metrics;

// Merges a metric. `m` may be NULL; count 0 adds only the name. Deviations merge as in Chan, Golub and LeVeque 1979.
static void metric_merge(Metrics *m, const Metric *more) {
    size_t i;
    if (!m) return;
    for (i = 0; i < m->count && strcmp(m->metric[i].name, more->name) != 0; i++) continue;
    if (i == METRICS_MOST) die("internal: more than %d metrics; please report it", METRICS_MOST);
    Metric *x = &m->metric[i];
    if (i == m->count) memset(x, 0, sizeof(*x)), x->name = more->name, x->kind = more->kind, m->count++;
    if (more->kind == METRIC_MIN || more->kind == METRIC_MAX) {
        if (more->count > 0 && (x->count == 0 || (more->kind == METRIC_MIN) == (more->sum < x->sum)))
            x->sum = more->sum, x->count = 1;
        return;
    }
    if (more->kind == METRIC_DEVIATION && x->count > 0 && more->count > 0) {
        const double apart = more->sum / more->count - x->sum / x->count;
        x->squares += apart * apart * x->count * more->count / (x->count + more->count);
    }
    x->sum += more->sum, x->count += more->count, x->squares += more->squares;
}

// Returns the metric's value; NAN: it has none
static double metric_value(const Metric *x) {
    if (x->kind == METRIC_DEVIATION) return x->count > 1 ? sqrt(x->squares / (x->count - 1)) : NAN;
    return x->count > 0 ? x->sum / x->count : NAN;
}

// Returns the value of the metric with this name; NAN: there is none
static double metric_named(const Metrics *m, const char *name) {
    for (size_t i = 0; i < m->count; i++)
        if (!strcmp(m->metric[i].name, name)) return metric_value(&m->metric[i]);
    return NAN;
}

static void metric_add_kind(Metrics *m, const char *name, MetricKind kind, double sum, double count) {
    const Metric more = {name, sum, count, 0, kind};
    metric_merge(m, &more);
}

static void metric_add(Metrics *m, const char *name, double sum, double count) {
    metric_add_kind(m, name, METRIC_MEAN, sum, count);
}

static void metric_deviation(Metrics *m, const char *name, double value) {
    metric_add_kind(m, name, METRIC_DEVIATION, value, 1);
}

// Mean, minimum and maximum number of tokens of a completion
static const char *const completion_lengths[] = {"completions/mean_length", "completions/min_length",
                                                 "completions/max_length"};
static void metric_length(Metrics *m, const char *const names[3], double tokens) {
    metric_add(m, names[0], tokens, 1);
    metric_add_kind(m, names[1], METRIC_MIN, tokens, 1);
    metric_add_kind(m, names[2], METRIC_MAX, tokens, 1);
}

#endif
