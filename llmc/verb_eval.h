/*
The verb `eval`, and the evaluation that training runs between its steps: the loss of a model on data.
*/
#ifndef LLMC_VERB_EVAL_H
#define LLMC_VERB_EVAL_H
#include "dataloader.h"
#include "json_out.h"
#include "progress.h"
#include "run.h"

// Mean nats over the counted targets of `steps` micro-batches from the loader's first one on.
static inline double evaluate(StreamBP *stream, DataLoader *loader, Batch *batch, size_t steps, double *tokens) {
    Progress progress = progress_begin(stderr, "evaluating", 0, (double)steps);
    double sum = 0;
    size_t i;
    *tokens = 0;
    dataloader_seek(loader, 0);
    for (i = 0; i < steps; i++) {
        dataloader_next(loader, batch);
        sum += forward_only(stream, batch, 1); // Z = 1: the sum of the losses
        *tokens += batch_counted(batch);
        progress_update(&progress, (double)(i + 1));
    }
    progress_end(&progress);
    return sum / *tokens;
}

static inline int verb_eval(const Options *options) {
    Run run;
    DataLoader loader;
    Batch batch;
    double tokens, loss, begin;
    size_t steps;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    loader = dataloader_open(options->data.path, options->data.count, options->batch, options->seq_len,
                             run.model.config.vocab_size);
    steps = dataloader_batches(&loader);
    if (options->val_steps) steps = min_size(steps, options->val_steps);
    run_allocate(&run, options->batch, options->seq_len);
    batch = batch_allocate(options->batch * options->seq_len, options->batch);
    run_load_weights(&run);
    report_header(&run);
    begin = seconds_now();
    loss = evaluate(&run.stream, &loader, &batch, steps, &tokens);
    if (!isfinite(loss)) die("the loss is %f: NaN or Inf in the forward pass", loss);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   perplexity %.4f   %.0f tokens\n", loss, exp(loss), tokens);
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", loss);
        json_number(&json, "perplexity", exp(loss));
        json_number(&json, "tokens", tokens);
        json_number(&json, "seconds", seconds_now() - begin);
        json_object_end(&json);
        json_finish(&json);
    }
    batch_free(&batch);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

#endif
