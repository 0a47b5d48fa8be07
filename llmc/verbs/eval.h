/*
Forward passes over data: the verbs `eval` (train/evaluate.h) and `logprobs`. `logprobs` writes log-probabilities to a
file, for objectives that need them of a reference or of an old policy (data/logprobs.h).
*/
#ifndef LLMC_EVAL_H
#define LLMC_EVAL_H
#include "llmc/run/seq_len.h"
#include "llmc/train/evaluate.h"
#include "llmc/base/json.h"
#include "llmc/data/prefetch.h"
#include "llmc/train/reference.h"
#include "llmc/train/all_reduce.h"

// ---- eval ----------------------------------------------------------------------------------------------------------
static void eval_report(const Run *run, const Evaluation *found, const Curve *curve) {
    fprintf(run->text, "loss %.6f", found->loss);
    if (run->settings.objective.kind == OBJECTIVE_SFT) fprintf(run->text, "  perplexity %.4f", exp(found->loss));
    fprintf(run->text, "  %.0f tokens\n", found->counts.tokens);
    metrics_print(run->text, &found->metrics);
    if (curve) curve_report(run->text, curve);
}

static void eval_json(const Run *run, const Evaluation *found, const Curve *curve, double seconds,
                      const Traffic *sent) {
    JsonOut json = json_open(stdout);
    json_number(&json, "loss", found->loss);
    if (run->settings.objective.kind == OBJECTIVE_SFT) json_number(&json, "perplexity", exp(found->loss));
    metrics_json(&json, &found->metrics, "");
    json_number(&json, "tokens", found->counts.tokens);
    json_number(&json, "seconds", seconds);
    report_world_json(&json, run->settings.world, sent);
    if (curve) curve_json(&json, curve);
    json_finish(&json);
}

// Opens the reference for the data that the run of this model, or of these adapters, kept. Without a run, adapters have
// the base model as reference, and a model needs --reference-logprobs.
static void eval_open_reference(Run *run, DataLoader *data, Options *o) {
    static RunSource began;
    static char folder[PATH_MAX]; // folder of the run
    const Objective *objective = &run->settings.objective;
    const char *file = run->adapter ? run->adapter->path : run->model_path;
    char checkpoint[PATH_MAX];
    if (!objective_needs_reference(objective) || o->reference_logprobs) return;
    folder_above(checkpoint, file);
    const int known = *file && folder_has(checkpoint, manifest_names[0][MANIFEST_STATE]);
    const uint64_t key = known ? reference_key_of(checkpoint) : 0;
    if (!key && run->settings.reference) return;
    if (objective_needs_mismatched(objective))
        options_refuse(o->verb,
                       "--objective %s needs --adapter, whose base model is the reference; evaluate %s while it is "
                       "trained: train --val-data",
                       objective_names[objective->kind], key ? "this run" : "a whole model");
    if (!key)
        options_refuse(o->verb,
                       "--objective %s needs --model RUN, whose reference is found, or --reference-logprobs FILE: "
                       "logprobs of the model that training began with",
                       objective_names[objective->kind]);
    folder_above(folder, checkpoint);
    run_source_read(checkpoint, &began);
    o->out = folder, run->settings.reference = REFERENCE_NOT_COMPUTED;
    reference_prepare(&run->reference, run, data, NULL, key, &began);
    data->settings.reference = &run->reference;
}

static int verb_eval(const Options *given) {
    Options chosen = *given, *const options = &chosen;
    Run run;
    Prefetch data;
    int with_curve = options->curve || options->curve_tokens;
    run_open(&run, options, NULL);
    run_choose_length(&run, options, 0);
    DataLoader loader = run_open_data(&run, &options->data, SHUFFLE_OFF);
    SequenceBound bound = run_bound(&run, &loader);
    size_t steps = dataloader_batches(&loader);
    if (options->val_steps) steps = min_size(steps, options->val_steps);
    eval_open_reference(&run, &loader, options);
    reference_check(&run, &loader, 0);
    live_begin(&run, options, &loader, bound);
    run_allocate(&run, bound);
    kl_allocate(&run, bound);
    prefetch_allocate(&data, &loader, run.assignment);
    Curve curve = curve_allocate(options->curve_tokens, bound.longest);
    run_load_weights(&run);
    report_run(&run, &loader, bound, "");
    double begin = seconds_now();
    Evaluation found = evaluate(&run, &data, steps, with_curve ? &curve : NULL);
    if (!isfinite(found.loss))
        die("the loss is %f: NaN or Inf in the forward pass; check the model's weights, or run doctor", found.loss);
    Traffic sent = {0};
    sent = sent_since(run.settings.world, &sent, &run.streambp.memory.sent, 1);
    if (!options->quiet || !options->json) eval_report(&run, &found, with_curve ? &curve : NULL);
    if (options->json) eval_json(&run, &found, with_curve ? &curve : NULL, seconds_now() - begin, &sent);
    free(curve.sum);
    prefetch_free(&data);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

// ---- logprobs ------------------------------------------------------------------------------------------------------
static void logprobs_report_json(const char *path, const LogprobHeader *h, LogprobSum sum, double seconds) {
    JsonOut json = json_open(stdout);
    char key[2][24];
    snprintf(key[0], sizeof(key[0]), "%016llx", (unsigned long long)h->model_key); // JSON's numbers have 53 bits
    snprintf(key[1], sizeof(key[1]), "%016llx", (unsigned long long)h->data_key);
    json_text(&json, "path", path);
    json_size(&json, "tokens", (size_t)h->tokens);
    json_size(&json, "documents", (size_t)h->documents);
    json_number(&json, "counted", sum.counted);
    json_number(&json, "loss", -sum.sum / sum.counted);
    json_text(&json, "model_key", key[0]);
    json_text(&json, "data_key", key[1]);
    json_number(&json, "seconds", seconds);
    json_finish(&json);
}

static int verb_logprobs(const Options *given) {
    Options chosen = *given, *const options = &chosen;
    Run run;
    LogprobWriter writer = {0};
    TeacherWriter teacher = {0};
    run_open(&run, options, NULL);
    run_choose_length(&run, options, 0);
    DataLoader loader = run_open_data(&run, &options->data, SHUFFLE_OFF);
    SequenceBound bound = loader.bound;
    run_allocate(&run, bound);
    Batch batch = dataloader_batch(&loader);
    LogprobHeader header = logprobs_header(&run, &loader, 0);
    const int top = header.k > 0;
    if (top && !folder_is_writable(options->out))
        die("%s: cannot be created: %s; choose another place", options->out, error_text(errno));
    if (!top) logprobs_create(&writer, options->out, &header); // refuses a bad output before the work begins
    run_load_weights(&run);
    report_run(&run, &loader, bound, "");
    double begin = seconds_now();
    header.model_key = writer.header.model_key = run_model_key(&run, 1);
    if (top) teacher_create(&teacher, options->out, &header);
    if (top && teacher.header.done && !options->quiet)
        fprintf(run.text, "teacher  continues %s: %llu of %zu sequences are done\n", teacher.output.temporary,
                (unsigned long long)teacher.header.done, dataloader_batches(&loader));
    const LogprobSum sum =
        top ? teacher_compute(&teacher, &run.streambp, &loader, &batch)
            : logprobs_compute(&writer, &run.streambp, &loader, &batch, assign_step(world_alone(), 1));
    const char *const what = top ? "targets with their likeliest tokens" : "log-probabilities";
    if (!options->quiet || !options->json)
        fprintf(run.text, "%s: %.0f %s of %llu documents, on average %.6f\n", options->out, sum.counted, what,
                (unsigned long long)header.documents, sum.sum / sum.counted);
    if (options->json) logprobs_report_json(options->out, &header, sum, seconds_now() - begin);
    batch_free(&batch);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

#endif
