/*
The loss of a model on data, over all ranks, for the verb `eval` and for validation. The curve shows how much context
helps: the loss by position in the document, in buckets of powers of two (0, 1, 2-3, 4-7, ...) or of a fixed number of
tokens. Each part of a split document begins at 0.
*/
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H
#include "all_reduce.h"
#include "llmc/base/json.h"
#include "llmc/base/progress.h"
#include "llmc/run/run.h"
#include "llmc/data/prefetch.h"
#include "reference.h"

// ---- the curve ------------------------------------------------------------------------------------------------------
typedef struct {
    size_t width;         // positions per bucket; 0: powers of two
    size_t buckets;       // number of buckets for the longest document
    double *sum, *tokens; // [buckets] sums of losses and of loss weights, in one allocation
} Curve;

static size_t curve_bucket(const Curve *curve, size_t position) {
    size_t bucket = 0;
    if (curve->width) return position / curve->width;
    while (position) position /= 2, bucket++;
    return bucket;
}

// Returns the first position of a bucket. A bucket ends where the next begins.
static size_t curve_begin(const Curve *curve, size_t bucket) {
    if (curve->width) return bucket * curve->width;
    return bucket ? (size_t)1 << (bucket - 1) : 0;
}

static Curve curve_allocate(size_t width, size_t longest) {
    Curve curve = {width, 0, NULL, NULL};
    curve.buckets = curve_bucket(&curve, longest - 1) + 1;
    curve.sum = (double *)checked_calloc(2 * curve.buckets, sizeof(double), "the curve of the loss");
    curve.tokens = curve.sum + curve.buckets;
    return curve;
}

// Adds logp[N] of the batch's targets, which are fp32 or double.
static void curve_add(Curve *curve, const Batch *batch, const void *logp, DType type) {
    for (size_t t = 0; t < batch->N; t++) {
        size_t bucket = curve_bucket(curve, (size_t)batch->position[t]);
        if (batch->targets[t] < 0 || batch->loss_weight[t] == 0) continue;
        curve->sum[bucket] -= (double)batch->loss_weight[t] * value_at(logp, type, t);
        curve->tokens[bucket] += (double)batch->loss_weight[t];
    }
}

// Prints a line for each bucket with tokens.
static void curve_report(FILE *out, const Curve *curve) {
    fprintf(out, "%21s  %10s  %s\n", "position in document", "loss", "tokens");
    for (size_t i = 0; i < curve->buckets; i++) {
        char range[48];
        size_t begin = curve_begin(curve, i), last = curve_begin(curve, i + 1) - 1;
        if (curve->tokens[i] == 0) continue;
        snprintf(range, sizeof(range), last > begin ? "%zu-%zu" : "%zu", begin, last);
        fprintf(out, "%21s  %10.6f  %.0f\n", range, curve->sum[i] / curve->tokens[i], curve->tokens[i]);
    }
}

// Writes "curve": [{"begin", "end", "loss", "tokens"}, ...] into an open object; `end` is exclusive.
static void curve_json(JsonOut *json, const Curve *curve) {
    json_array(json, "curve");
    for (size_t i = 0; i < curve->buckets; i++) {
        if (curve->tokens[i] == 0) continue;
        json_object(json, NULL);
        json_size(json, "begin", curve_begin(curve, i));
        json_size(json, "end", curve_begin(curve, i + 1));
        json_number(json, "loss", curve->sum[i] / curve->tokens[i]);
        json_number(json, "tokens", curve->tokens[i]);
        json_object_end(json);
    }
    json_array_end(json);
}

// ---- the evaluation -------------------------------------------------------------------------------------------------
typedef struct {
    double loss; // loss of the objective; for sft the mean over the targets, in nats
    TargetCounts counts;
    Metrics metrics;
} Evaluation;

// Evaluates the first `steps` micro-batches, divided over the ranks. Adds log-probabilities to curve unless it is NULL.
static Evaluation evaluate(Run *run, Prefetch *data, size_t steps, Curve *curve) {
    const World world = run->settings.world;
    StreamBP *stream = &run->streambp;
    Progress progress = progress_begin(is_main_rank() ? stderr : NULL, "evaluating", 0, (double)steps);
    size_t step = data->assignment.stride;
    Evaluation found = {0};
    prefetch_start(data, 0);
    for (size_t done = 0; done < steps; done += step) {
        progress_expect(&progress, (double)done, (double)step, (double)run->model.config.num_hidden_layers);
        MicroBatch *micro = prefetch_take(data);
        Batch batch = done + micro->number % step < steps ? micro->batch : batch_empty(&micro->whole);
        run_reference(run, &batch);
        found.loss += forward_only(stream, &batch, 1, &found.metrics); // with Z = 1 the loss is a sum
        if (curve) curve_add(curve, &batch, stream->now.host_sums, dtype_of_sums(stream->model->dtype));
        found.counts = target_counts_add(found.counts, batch_count(&batch));
        progress_update(&progress, (double)min_size(done + step, steps));
    }
    prefetch_stop(data);
    progress_end(&progress);
    sum_over_sequences(world, &found.loss, 1);
    found.counts = target_counts_over_sequences(world, found.counts);
    metrics_over_sequences(world, &found.metrics);
    if (curve) sum_over_sequences(world, curve->sum, 2 * curve->buckets);
    found.loss /= objective_normaliser(&stream->setup->objective, found.counts);
    return found;
}

#endif
