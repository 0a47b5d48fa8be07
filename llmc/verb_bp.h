/*
The verb `bp`: one forward and backward pass, measured. With --data its first micro-batches, else random ids; --grads-out writes what it
computed for anybody to hold against another program.
*/
#ifndef LLMC_VERB_BP_H
#define LLMC_VERB_BP_H
#include "adamw.h"
#include "dataloader.h"
#include "json_out.h"
#include "run.h"

typedef struct {
    double loss, seconds, grad_norm;
    double tokens, flops, model_flops;
} PassResult;

static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Micro-batch i of the pass: from --data, or random ids.
static inline void bp_batch(const Run *run, DataLoader *loader, size_t i, Batch *batch) {
    const Options *o = run->options;
    if (o->data.count)
        dataloader_seek(loader, i), dataloader_next(loader, batch);
    else
        batch_random(batch, o->batch, o->seq_len, i * o->batch, run->model.config.vocab_size, o->seed);
}

static inline PassResult bp_measure(Run *run, DataLoader *loader, Batch *batch) {
    const Options *o = run->options;
    double *seconds = (double *)checked_calloc(o->repeat, sizeof(double), "timings"), Z = 0;
    PassResult result = {0, 0, 0, 0, 0, 0};
    const Parameter *bad = NULL;
    size_t repeat, i;
    for (i = 0; i < o->grad_accum; i++) {
        bp_batch(run, loader, i, batch);
        Z += batch_counted(batch);
        result.tokens += (double)batch->N;
        result.flops += flops_of(&run->flop_count, batch);
        result.model_flops += model_flops(&run->model, batch, 1);
    }
    for (repeat = 0; repeat < o->repeat; repeat++) {
        ops_device->zero(run->stream.memory.gradients, gradient_bytes(run));
        result.loss = 0;
        for (i = 0; i < o->grad_accum; i++) {
            double begin;
            if (o->grad_accum > 1) bp_batch(run, loader, i, batch);
            begin = seconds_now();
            result.loss += forward_backward(&run->stream, batch, Z);
            ops_device->finish();
            seconds[repeat] += seconds_now() - begin;
        }
        allocation_guard = getenv("STREAMBP_ALLOCATION_GUARD") != NULL;
    }
    allocation_guard = 0;
    qsort(seconds, o->repeat, sizeof(double), compare_doubles);
    result.seconds = seconds[o->repeat / 2];
    free(seconds);
    if (!isfinite(result.loss)) die("the loss is %f: NaN or Inf in the forward pass", result.loss);
    result.grad_norm =
        gradient_norm(&run->model, ops_device, run->stream.memory.gradients, run->settings.gradient_type, &bad);
    if (bad) die("the gradient of %s is not finite", bad->name);
    return result;
}

// The data that a pass reads, all of it once at most.
static inline DataLoader bp_open_data(Run *run) {
    const Options *o = run->options;
    DataLoader loader = run_open_data(run, &o->data, SHUFFLE_OFF);
    if (o->grad_accum > dataloader_batches(&loader))
        die("--grad-accum %zu: the data has %zu micro-batches, and a pass reads none twice; give more data or "
            "accumulate fewer",
            o->grad_accum, dataloader_batches(&loader));
    return loader;
}

static inline int verb_bp(const Options *options) {
    Run run;
    DataLoader loader;
    Batch batch;
    PassResult result;
    StreamBound bound = regular_bound(options->batch, options->seq_len);
    size_t peak;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    memset(&loader, 0, sizeof(loader));
    if (options->data.count) loader = bp_open_data(&run), bound = dataloader_bound(&loader);
    if (options->grads_out) gradients_check_place(options->grads_out, &run.model);
    run_allocate(&run, bound);
    batch = batch_allocate(bound.N, bound.documents);
    run_load_weights(&run);
    report_header(&run);
    report_data(&run, &loader, bound);
    result = bp_measure(&run, &loader, &batch);
    peak = ops_device->memory_peak() - run.memory_at_start;
    if (options->grads_out)
        gradients_write(options->grads_out, &run.model, ops_device, run.stream.memory.gradients,
                        run.settings.gradient_type);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   gradient norm %.6g   %.3f s   %.1f tokens/s   measured peak %s\n", result.loss,
                result.grad_norm, result.seconds, result.tokens / result.seconds, human_bytes((double)peak));
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", result.loss);
        json_size(&json, "tokens", (size_t)result.tokens);
        json_number(&json, "seconds", result.seconds);
        json_number(&json, "grad_norm", result.grad_norm);
        json_size(&json, "plan_bytes", run.plan.total_bytes);
        json_size(&json, "peak_bytes", peak);
        report_work_json(&json, &run, result.flops, result.model_flops);
        json_object_end(&json);
        json_finish(&json);
    }
    if (options->data.count) dataloader_close(&loader);
    batch_free(&batch);
    run_close(&run);
    return 0;
}

#endif
