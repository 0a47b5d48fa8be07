/*
The verb `bp`: one forward and backward pass, measured. With --data its first micro-batches, else random ids; --grads-out writes what it
computed for anybody to hold against another program.
*/
#ifndef LLMC_VERB_BP_H
#define LLMC_VERB_BP_H
#include "adamw.h"
#include "dataloader.h"
#include "json_out.h"
#include "reference.h"

typedef struct {
    double loss, seconds, grad_norm;
    double tokens, flops, model_flops;
    Metrics metrics;
} PassResult;

static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Of random tokens, what objectives want to know: advantages of 1 and -1 by turns.
static inline void bp_answers(const Run *run, Batch *batch) {
    size_t d, t;
    for (d = 0; d < batch->documents; d++) {
        batch->group[d] = d / unit_documents(run->options);
        batch->reward[d] = d % 2 ? 0 : 1;
        for (t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) batch->advantage[t] = d % 2 ? -1 : 1;
    }
}

// Micro-batch i of the pass: from --data, or random ids.
static inline void bp_batch(Run *run, DataLoader *loader, size_t i, Batch *batch) {
    const Options *o = run->options;
    const size_t documents = o->batch * unit_documents(o);
    if (o->data.count)
        dataloader_seek(loader, i), dataloader_next(loader, batch);
    else
        batch_random(batch, documents, o->seq_len, i * documents, run->model.config.vocab_size, o->seed);
    if (!o->data.count && batch->group) bp_answers(run, batch);
}

static inline PassResult bp_measure(Run *run, DataLoader *loader, Batch *batch) {
    const Options *o = run->options;
    double *seconds = (double *)checked_calloc(o->repeat, sizeof(double), "timings"), Z;
    Counts counts = {0, 0, 0};
    PassResult result;
    const Parameter *bad = NULL;
    size_t repeat, i;
    memset(&result, 0, sizeof(result));
    for (i = 0; i < o->grad_accum; i++) {
        bp_batch(run, loader, i, batch);
        counts = counts_add(counts, batch_count(batch));
        result.tokens += (double)batch->N;
        result.flops += flops_of(&run->flop_count, batch, 1);
        result.model_flops += model_flops(&run->model, run->settings.lora, batch, 1);
    }
    Z = objective_normaliser(&run->settings.objective, counts);
    for (repeat = 0; repeat < o->repeat; repeat++) {
        grads_zero(&run->stream.memory);
        result.loss = 0, result.metrics.count = 0;
        for (i = 0; i < o->grad_accum; i++) {
            double begin;
            if (o->grad_accum > 1) bp_batch(run, loader, i, batch);
            begin = seconds_now();
            run_reference(run, batch);
            result.loss += forward_backward(&run->stream, batch, Z, &result.metrics);
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
        gradient_norm(run_trained(run), ops_device, run->stream.memory.gradients, run->settings.gradient_type, &bad);
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
    StreamBound bound = regular_bound(options->batch * unit_documents(options), options->seq_len);
    size_t peak;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    memset(&loader, 0, sizeof(loader));
    if (options->data.count) loader = bp_open_data(&run), bound = dataloader_bound(&loader);
    if (options->grads_out) gradients_check_place(options->grads_out, run.lora.rank ? &run.lora.table : &run.model);
    run_allocate(&run, bound);
    reference_check(&run, &loader, 0, 0);
    batch = options->data.count ? dataloader_batch(&loader) : batch_allocate(bound.N, bound.documents);
    if (!options->data.count && run.settings.objective.kind != OBJECTIVE_SFT)
        batch_allocate_answers(&batch, objective_needs_reference(&run.settings.objective), 0);
    run_load_weights(&run);
    report_header(&run);
    report_data(&run, &loader, bound);
    result = bp_measure(&run, &loader, &batch);
    peak = ops_device->memory_peak() - run.memory_at_start;
    if (options->grads_out)
        gradients_write(options->grads_out, run_trained(&run), ops_device, run.stream.memory.gradients,
                        run.settings.gradient_type);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   gradient norm %.6g   %.3f s   %.1f tokens/s   measured peak %s", result.loss,
                result.grad_norm, result.seconds, result.tokens / result.seconds, human_bytes((double)peak));
    if (!options->quiet || !options->json) metrics_print(run.text, &result.metrics, "   "), fputc('\n', run.text);
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", result.loss);
        metrics_json(&json, &result.metrics, "");
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
