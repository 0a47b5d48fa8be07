/*
A training run: its state, and the functions that train_gpt.cu's train_step and loop call: micro-batches, sums over
ranks, checks, validation, samples, checkpoints, the report. trainer_setup.h begins and ends a run.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H
#include "checkpoint.h"
#include "evaluate.h"
#include "log.h"
#include "llmc/run/levels.h"
#include "llmc/run/threads.h"
#include "llmc/run/allocate.h"
#include "llmc/data/prefetch.h"
#include "llmc/generate/prompt.h"
#include "llmc/generate/sampler.h"
#include "llmc/plan/flops.h"
#include "llmc/optimizer/update.h"
#include "rollout.h"
#include "rollout_log.h"
#include "rollout_options.h"

#define TRAINER_SETTINGS 40

typedef struct {
    Options options; // options, with --lr auto resolved
    Run run;
    DataLoader data, validation;
    Prefetch train_batches, validation_batches;
    RunState state; // progress, and the settings that a resumed run must share
    RunSetting settings[TRAINER_SETTINGS];
    char setting_text[TRAINER_SETTINGS][1024];
    char data_files[1024];
    RunSource source;
    size_t next_batch;    // position after the current step's batches; copied to `state` when the step is finished
    const Options *given; // options as the user typed them
    int has_folder;       // 1: --out is not none
    CheckpointFolder folder;
    double saved_at;            // s, on rank 0: time of the last checkpoint, or of the run's start
    int asked;                  // signal that stops the run, equal on all ranks
    StepReport last;            // report of the last finished step
    TrainedTensors tensors;     // tensors of checkpoints
    Rollout rollout;            // with --rollout: makes the batches
    Rollout rollout_validation; // rollouts for the prompts of --val-data; has its own processes of the reward commands
    Prompt rollout_text;
    RolloutLog rollout_log;
    LogprobFile reference[2]; // reference of --data and of --val-data, if it is read from a file
    uint64_t reference_key;   // key of the reference model; 0: no reference, or the base model under new adapters
    Update update;            // --update forward: the deferred step
    RunLog log;
    Divergence divergence;
    Ending ending;
    Sampler sampler; // with --sample-every
    Prompt prompt;
    int32_t *sampled;       // [max_new_tokens]
    char *sampled_text;     // [prompt_token_bytes * max_new_tokens]
    double validation_loss; // last validation loss; NAN: unknown
    double peak_flops;      // FLOP/s of all ranks together; 0: unknown
    Traffic sent;           // traffic of the last step, average per rank
} Trainer;

// ---- checks and checkpoints -----------------------------------------------------------------------------------------
// Says from which checkpoint to continue after a bad step.
static const char *last_good(const Trainer *t) {
    static char text[PATH_MAX + 128];
    const int later = t->folder.good && t->folder.good < t->folder.last;
    if (!t->has_folder || t->folder.last == CHECKPOINT_NONE) return "no checkpoint was saved";
    snprintf(text, sizeof(text), "the last good checkpoint is step %zu in %s%s",
             later ? t->folder.good : t->folder.last, t->folder.path,
             later ? "; remove later ones to resume from it" : "");
    return text;
}

// Ends the run if `step` left NaN or infinite weights.
static void trainer_check_weights(const Trainer *t, size_t step) {
    char when[48];
    snprintf(when, sizeof(when), "after step %zu ", step);
    weights_check_finite_at(t->tensors.model, t->tensors.weights_sharding, ops_device,
                            t->run.streambp.memory.place[PLACED_WEIGHTS], t->tensors.weights, when, last_good(t));
}

// Makes the folder again if it was removed or moved, with all files except checkpoints. Collective.
static void trainer_remake(Trainer *t) {
    const int guard = allocation_guard;
    if (!checkpoint_remake(&t->folder)) return;
    allocation_guard = 0;
    t->folder.last = CHECKPOINT_NONE, t->folder.good = 0;
    if (t->state.best_step != t->state.step) t->state.best_step = 0; // the best checkpoint is gone
    if (t->log.records) fclose(t->log.records), t->log.records = records_open(t->log.path);
    runlog_options(&t->log, t->state.step, &t->run, &t->source);
    if (t->rollout_log.file) fclose(t->rollout_log.file), t->rollout_log.file = records_open(t->rollout_log.path);
    if (dist_rank() == 0) tokenizer_keep(&t->run, t->folder.path, 0);
    allocation_guard = guard;
}

// Saves the last finished step, with the waiting completions that were set aside at the step's end. Collective.
static void trainer_save(Trainer *t) {
    const double begin = seconds_now();
    weights_flush(&t->run.streambp.memory);
    trainer_check_weights(t, t->state.step); // checked before an older, good checkpoint is pruned
    trainer_remake(t);
    t->folder.best = t->run.options->keep_best ? t->state.best_step : 0;
    const uint64_t bytes = checkpoint_save(&t->folder, &t->tensors, &t->state);
    if (t->run.options->environment_command) record_forget(&t->rollout.agents);
    t->saved_at = seconds_now();
    if (!t->log.text || !bytes) return;
    progress_clear(&t->log.progress);
    fprintf(t->log.text, "step %*zu/%zu  checkpoint-%08zu saved, %s in %s\n", digits_of(t->log.steps), t->state.step,
            t->log.steps, t->state.step, human_bytes((double)bytes), human_seconds(t->saved_at - begin));
    fflush(t->log.text);
}

// ---- micro-batches --------------------------------------------------------------------------------------------------
// Computes a batch's log-probabilities under the reference, if the reference is the base model below new adapters or
// the model at the start; or the values of a teacher that runs with the student, valid until its next batch.
static void trainer_reference(Trainer *t, Batch *batch, StepReport *report) {
    run_reference(&t->run, batch);
    report->flops += flops_reference(&t->run, batch);
}

// Moves the progress bar within a step, over `layers` layers. With --rollout the first half of the step is for writing
// completions.
static void trainer_expect(Trainer *t, size_t step, int writes, double layers) {
    const double half = t->run.options->rollout ? 0.5 : 0;
    progress_expect(&t->log.progress, (double)(step - 1) + (writes ? 0 : half), writes ? half : 1 - half, layers);
}

// Gets completions for this step: new completions, or the completions of an earlier step (--updates). Returns the
// number of micro-batches. With --overlap also writes the next rollout's completions, with the weights before the
// updates of this rollout.
static size_t trainer_rollout(Trainer *t, size_t step, StepReport *report) {
    const Options *o = t->run.options;
    const size_t updates = o->updates, number = (step - 1) / updates + 1;
    Rollout *rollout = &t->rollout;
    weights_flush(&t->run.streambp.memory);
    if ((step - 1) % updates == 0) {
        const RolloutSettings *s = &rollout->settings;
        const size_t rounds = (s->prompts * s->group_size + s->slots - 1) / s->slots;
        const int written = rollout->waiting == number,
                  ahead = o->overlap && number * updates < t->state.schedule.steps;
        trainer_expect(
            t, step, 1,
            (double)((!written + ahead) * rounds * s->max_new_tokens * t->run.model.config.num_hidden_layers));
        rollout_step(rollout, &t->run.streambp, number);
        progress_clear(&t->log.progress);
        rollout_log_show(&t->rollout_log, rollout, t->log.text);
        rollout_log_write(&t->rollout_log, rollout, step, number - 1);
        for (size_t i = 0; i < rollout->sequences; i++) {
            Batch *batch = &rollout->sequence[i];
            if (!t->run.live) trainer_reference(t, batch, report);
            if (!batch->old || written) continue;
            forward_policy(&t->run.streambp, batch, 0, batch->old);
            report->flops += flops_forward(&t->run.settings, batch, 1);
        }
        const size_t computed = ahead ? rollout_ahead(rollout, &t->run.streambp, number + 1) : 0;
        for (size_t i = 0; i < computed; i++)
            report->flops += flops_forward(&t->run.settings, &rollout->ahead_sequence[i], 1);
        report->rollout_seconds = rollout->sampling_seconds;
        report->reward_seconds = rollout->reward_seconds;
    }
    if (once_per_sequence(t->run.settings.world, 1) > 0) report->metrics = rollout->metrics;
    return rollout->sequences;
}

// Takes the rank's i-th micro-batch of the step; *Z: the loss denominator of the whole step
static Batch *trainer_batch(Trainer *t, size_t step, size_t i, double *Z, StepReport *report) {
    const World world = t->run.settings.world;
    Batch *batch;
    TargetCounts counts;
    size_t number;
    stop_poll(1);
    if (t->run.options->rollout) {
        batch = &t->rollout.sequence[i];
        counts = t->rollout.counts;
        number = i * world_replicas(world) + world_replica(world);
    } else {
        MicroBatch *micro = prefetch_take(&t->train_batches);
        batch = &micro->batch;
        counts = micro->step_counts;
        number = micro->number;
        t->next_batch = micro->after;
        if (micro->sp) run_share(&t->run, micro->sp);
        report->deal = micro->deal;
    }
    if (!t->run.options->rollout || t->run.live) trainer_reference(t, batch, report);
    *Z = objective_normaliser(&t->run.streambp.setup->objective, counts);
    t->run.streambp.routes.micro_batches =
        counts.batches * (double)(t->run.options->rollout ? 1 : t->run.assignment.parts);
    t->run.streambp.now.dropout_seed =
        random_bits(t->run.options->seed, RANDOM_STREAM_DROPOUT, ((uint64_t)step << 32) + number);
    t->run.streambp.now.sparse.seed = t->run.streambp.now.dropout_seed;
    return batch;
}

// Runs a micro-batch. Of the ranks that share it, only one counts the loss, tokens and metrics.
static void trainer_pass(Trainer *t, const Batch *batch, double Z, int last, StepReport *report) {
    const World world = t->run.settings.world;
    Metrics *const metrics = once_per_sequence(world, 1) > 0 ? &report->metrics : NULL;
    report->loss += once_per_sequence(world, forward_backward(&t->run.streambp, batch, Z, last, metrics));
    report->tokens += once_per_sequence(world, batch_tokens(batch));
    report->computed += once_per_sequence(world, batch_tokens(batch_rows(batch)));
    report->flops += flops_forward_backward(&t->run.settings, batch);
}

// Adjusts the biases of routers (--router-bias-update).
static void trainer_update_biases(Trainer *t) {
    StreamBP *s = &t->run.streambp;
    const double rate = t->run.settings.router_bias_update;
    if (rate <= 0) return;
    sum_over_sequences(t->run.settings.world, s->routes.step_count, model_router_biases(&t->run.model));
    routes_bias_update(s, t->run.model.router_bias, rate);
}

// ---- after a step ---------------------------------------------------------------------------------------------------
// Reduces loss, tokens, FLOPs and metrics over ranks. Every rank gets identical bits, so either all ranks continue or
// none does.
static void trainer_all_reduce(Trainer *t, StepReport *report) {
    World each = t->run.settings.world; // groups may differ between passes: trainer_pass has counted each sequence once
    each.sp = 1;
    dist_sum(RANKS_ALL, &report->loss, 1);
    dist_sum(RANKS_ALL, &report->tokens, 1);
    dist_sum(RANKS_ALL, &report->computed, 1);
    dist_sum(RANKS_ALL, &report->flops, 1);
    metrics_over_sequences(each, &report->metrics);
    if (t->run.settings.deals) run_share(&t->run, t->run.home);
}

static double trainer_peak_bytes(const Trainer *t) {
    return (double)(ops_device->memory_peak() - t->run.memory_at_start);
}

// Reports signs of divergence, or ends the run at a sign with --stop-on-divergence. Keeps the last checkpoint before
// the first doubt. Ignores steps without rewards, and steps that repeat a rollout's rewards (--updates).
static void trainer_watch(Trainer *t) {
    const StepReport *report = &t->last;
    Divergence *d = &t->divergence;
    if (!report->micro_batches || (report->step - 1) % t->run.options->updates) return;
    const DivergenceSign sign = divergence_find(d, report, t->run.options->objective == OBJECTIVE_SFT);
    if (!divergence_doubts(d))
        t->folder.good = 0;
    else if (!t->folder.good && t->folder.last != CHECKPOINT_NONE)
        t->folder.good = t->folder.last;
    if (!sign) return;
    if (t->run.options->stop_on_divergence) die("step %zu: %s; %s", report->step, divergence_texts[sign], last_good(t));
    note("step %zu: %s; %s", report->step, divergence_texts[sign], last_good(t));
}

// Completes the report of a step and advances the run's state. sent: traffic before the step
static void trainer_count_step(Trainer *t, StepReport *report, const Traffic *sent) {
    const World world = t->run.settings.world;
    report->ranks = world_ranks(world);
    t->sent = sent_since(world, sent, &t->run.streambp.memory.sent, 1);
    report->sent_bytes = traffic_bytes(&t->sent);
    if (t->peak_flops > 0 && report->flops > t->peak_flops * report->seconds) // faster than the measured peak, so that
                                                                              // measurement was disturbed
        t->peak_flops = fmax((double)report->ranks * run_peak_flops(&t->run), report->flops / report->seconds);
    report->peak_flops = t->peak_flops;
    report->memory_bytes = trainer_peak_bytes(t);
    t->state.step = report->step, t->state.next_batch = t->next_batch;
    if (t->tensors.waiting) rollout_save(&t->rollout);
    t->state.tokens += (size_t)report->tokens;
    t->state.seconds += report->seconds;
}

// Validates by the rewards of completions to --val-data's prompts (--rollout).
static Evaluation trainer_validate_rollouts(Trainer *t, size_t step) {
    const size_t steps = t->run.options->val_steps;
    Evaluation found = {.loss = NAN};
    weights_flush(&t->run.streambp.memory);
    found.counts.groups = rollout_evaluate(&t->rollout_validation, &t->run.streambp, steps ? steps : SIZE_MAX, step);
    found.metrics = t->rollout_validation.metrics;
    return found;
}

static Evaluation trainer_validate_loss(Trainer *t, size_t step) {
    size_t steps = dataloader_batches(&t->validation);
    if (t->run.options->val_steps) steps = min_size(steps, t->run.options->val_steps);
    progress_clear(&t->log.progress);
    Evaluation found = evaluate(&t->run, &t->validation_batches, steps, NULL);
    t->validation_loss = found.loss;
    if (!isfinite(t->validation_loss))
        die("step %zu: the validation loss is %f; %s", step, t->validation_loss, last_good(t));
    return found;
}

// Tells whether the last finished step must be validated, and was not validated before the run was stopped.
static int trainer_validates(const Trainer *t) {
    const Options *o = t->run.options;
    const size_t step = t->state.step;
    if (!o->val_data.count || (step && t->state.validated == step)) return 0;
    return step == 0 || step == t->state.schedule.steps || (o->val_every && step % o->val_every == 0);
}

static void trainer_validate(Trainer *t) {
    const size_t step = t->state.step;
    const int rollout = t->run.options->rollout;
    const Evaluation found = rollout ? trainer_validate_rollouts(t, step) : trainer_validate_loss(t, step);
    const double value = rollout ? metric_named(&found.metrics, "reward") : found.loss;
    const int better = rollout ? value > t->state.best : value < t->state.best;
    runlog_validation(&t->log, step, &found);
    t->state.validated = step;
    if (isnan(t->state.first)) t->state.first = value;
    t->ending.last = value;
    const int savable = step && step % t->run.options->updates == 0; // 1: not in the middle of a rollout
    if (savable && isfinite(value) && (!t->state.best_step || better)) t->state.best_step = step, t->state.best = value;
}

static void trainer_sample(Trainer *t) {
    const Options *o = t->run.options;
    SamplingSettings settings = sampling_from_options(o);
    weights_flush(&t->run.streambp.memory);
    size_t drawn = generate(&t->sampler, &t->run.streambp, &t->prompt, &settings, t->sampled, o->max_new_tokens, NULL);
    runlog_sample(&t->log, t->state.step, t->sampled_text, prompt_text(&t->prompt, t->sampled, drawn, t->sampled_text));
}

// Prints the result of --json.
static void trainer_json(const Trainer *t) {
    const World world = t->run.settings.world;
    const double peak = max_over_ranks(world, trainer_peak_bytes(t));
    JsonOut json = json_open(stdout);
    json_size(&json, "steps", t->state.step);
    json_number(&json, "loss", t->state.step ? t->last.loss : NAN);
    if (t->asked) json_text(&json, "stopped", stop_name(t->asked));
    json_number(&json, "val_loss", t->validation_loss);
    json_size(&json, "tokens", t->state.tokens);
    json_number(&json, "seconds", t->state.seconds);
    json_size(&json, "plan_bytes", t->run.plan.total_bytes);
    report_method_json(&json, &t->run);
    report_places_json(&json, &t->run);
    json_size(&json, "peak_bytes", (size_t)peak);
    report_world_json(&json, world, &t->sent);
    json_finish(&json);
}

#endif
