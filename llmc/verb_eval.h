/*
The verb `eval`, and the evaluation that training runs between its steps: the loss of a model on data.
*/
#ifndef LLMC_VERB_EVAL_H
#define LLMC_VERB_EVAL_H
#include "curve.h"
#include "json_out.h"
#include "prefetch.h"
#include "progress.h"
#include "run.h"

// Mean nats over the counted targets of the first `steps` micro-batches. curve: NULL, or what they are added to
static inline double evaluate(StreamBP *stream, Prefetch *data, size_t steps, Curve *curve, double *tokens) {
    Progress progress = progress_begin(stderr, "evaluating", 0, (double)steps);
    double sum = 0;
    size_t i;
    *tokens = 0;
    prefetch_start(data, 0);
    for (i = 0; i < steps; i++) {
        const Batch *batch = &prefetch_take(data)->batch;
        sum += forward_only(stream, batch, 1); // Z = 1: the sum of the losses
        if (curve) curve_add(curve, batch, stream->host_sums, dtype_of_sums(stream->model->dtype));
        *tokens += batch_counted(batch);
        progress_update(&progress, (double)(i + 1));
    }
    prefetch_stop(data);
    progress_end(&progress);
    return sum / *tokens;
}

static inline int verb_eval(const Options *options) {
    Run run;
    DataLoader loader;
    Prefetch data;
    Curve curve;
    int with_curve = options->curve || options->curve_tokens;
    double tokens, loss, begin;
    size_t steps;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    loader = run_open_data(&run, &options->data, SHUFFLE_OFF);
    steps = dataloader_batches(&loader);
    if (options->val_steps) steps = min_size(steps, options->val_steps);
    run_allocate(&run, dataloader_bound(&loader));
    prefetch_allocate(&data, &loader, 1);
    curve = curve_allocate(options->curve_tokens, dataloader_bound(&loader).longest);
    run_load_weights(&run);
    report_header(&run);
    report_data(&run, &loader, dataloader_bound(&loader));
    begin = seconds_now();
    loss = evaluate(&run.stream, &data, steps, with_curve ? &curve : NULL, &tokens);
    if (!isfinite(loss)) die("the loss is %f: NaN or Inf in the forward pass", loss);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   perplexity %.4f   %.0f tokens\n", loss, exp(loss), tokens);
    if (with_curve && (!options->quiet || !options->json)) curve_report(run.text, &curve);
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", loss);
        json_number(&json, "perplexity", exp(loss));
        json_number(&json, "tokens", tokens);
        json_number(&json, "seconds", seconds_now() - begin);
        if (with_curve) curve_json(&json, &curve);
        json_object_end(&json);
        json_finish(&json);
    }
    curve_free(&curve);
    prefetch_free(&data);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

#endif
