/*
The verb `eval`, and the evaluation that training runs between its steps: the loss of a model on data.
*/
#ifndef LLMC_VERB_EVAL_H
#define LLMC_VERB_EVAL_H
#include "curve.h"
#include "json_out.h"
#include "log.h"
#include "prefetch.h"
#include "progress.h"
#include "reference.h"

// The first `steps` micro-batches. curve: NULL, or what their log-probabilities are added to
static inline Evaluation evaluate(Run *run, Prefetch *data, size_t steps, Curve *curve) {
    StreamBP *stream = &run->stream;
    Progress progress = progress_begin(stderr, "evaluating", 0, (double)steps);
    Evaluation found;
    size_t i;
    memset(&found, 0, sizeof(found));
    prefetch_start(data, 0);
    for (i = 0; i < steps; i++) {
        Batch *batch = &prefetch_take(data)->batch;
        run_reference(run, batch);
        found.loss += forward_only(stream, batch, 1, &found.metrics); // Z = 1: the sum of the losses
        if (curve) curve_add(curve, batch, stream->host_sums, dtype_of_sums(stream->model->dtype));
        found.counts = counts_add(found.counts, batch_count(batch));
        progress_update(&progress, (double)(i + 1));
    }
    prefetch_stop(data);
    progress_end(&progress);
    found.loss /= objective_normaliser(&stream->objective, found.counts);
    return found;
}

static inline int verb_eval(const Options *options) {
    Run run;
    DataLoader loader;
    Prefetch data;
    Curve curve;
    int with_curve = options->curve || options->curve_tokens, is_sft = !strcmp(options->objective, "sft");
    Evaluation found;
    double begin;
    size_t steps;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    loader = run_open_data(&run, &options->data, SHUFFLE_OFF);
    steps = dataloader_batches(&loader);
    if (options->val_steps) steps = min_size(steps, options->val_steps);
    if (objective_needs_reference(&run.settings.objective) && !run_computes_reference(&run) &&
        !options->reference_logprobs)
        options_refuse(options->verb,
                       "--objective %s needs --reference-logprobs, those of the model that training began with",
                       options->objective);
    reference_check(&run, &loader, 0, 0);
    run_allocate(&run, dataloader_bound(&loader));
    prefetch_allocate(&data, &loader, 1);
    curve = curve_allocate(options->curve_tokens, dataloader_bound(&loader).longest);
    run_load_weights(&run);
    report_header(&run);
    report_data(&run, &loader, dataloader_bound(&loader));
    begin = seconds_now();
    found = evaluate(&run, &data, steps, with_curve ? &curve : NULL);
    if (!isfinite(found.loss)) die("the loss is %f: NaN or Inf in the forward pass", found.loss);
    if (!options->quiet || !options->json) {
        fprintf(run.text, "loss %.6f", found.loss);
        if (is_sft) fprintf(run.text, "   perplexity %.4f", exp(found.loss));
        metrics_print(run.text, &found.metrics, "   ");
        fprintf(run.text, "   %.0f tokens\n", found.counts.tokens);
    }
    if (with_curve && (!options->quiet || !options->json)) curve_report(run.text, &curve);
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", found.loss);
        if (is_sft) json_number(&json, "perplexity", exp(found.loss));
        metrics_json(&json, &found.metrics, "");
        json_number(&json, "tokens", found.counts.tokens);
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
