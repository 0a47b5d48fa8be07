/*
train: fine-tunes and trains GPT/Llama-style models on very long sequences with StreamBP.

C11 that is also C++20: `cc -x c` builds the CPU program from these lines, nvcc builds the GPU program. Everything done
to tensors goes through struct Ops; nothing here looks inside one.
*/
#include "llmc/cli/options.h"             // the command line: one table of options
#include "llmc/cli/options_out.h"         // the same written out
#include "llmc/model/config.h"            // configuration, families, presets
#include "llmc/ranks/dist.h"              // the other processes of the run
#include "llmc/model/model.h"             // the parameter table
#include "llmc/files/weights.h"           // reading and writing models and gradients; random initialisation
#include "llmc/model/lora.h"              // adapters: a table of parameters beside the model's
#include "llmc/data/batch.h"              // a packed stream of documents
#include "llmc/data/objective.h"          // what is minimised, as weights per token
#include "llmc/data/dataloader.h"         // token shards; packing of documents
#include "llmc/ranks/world.h"              // which micro-batches, or parts of them, are a rank's
#include "llmc/data/prefetch.h"           // the next micro-batch, read while this one is trained on
#include "llmc/ops/ops.h"                 // what can be done to tensors
#include "llmc/ops/arena.h"               // the one allocation
#include "streambp.h"                     // steps and methods: the algorithm
#include "llmc/orders/key_value_cache.h"   // keys and values of texts that are being written
#include "llmc/plan/plan.h"               // what a run needs, before it is allocated
#include "llmc/plan/flops.h"              // what a pass executes
#include "llmc/plan/estimate.h"           // how long a step would take
#include "llmc/cli/settings.h"            // what the options mean for a run
#include "llmc/cli/run.h"                 // what every verb begins with: model, settings, data, weights
#include "llmc/cli/memory.h"              // plan, choices that fit, the allocation
#include "llmc/cli/device.h"              // threads, measured peak
#include "llmc/generate/sampler.h"        // generation with a key/value cache
#include "llmc/generate/prompt.h"         // prompts from the command line, text from the sampler
#include "llmc/train/world_sums.h"        // what all ranks found together
#include "llmc/train/reference.h"         // log-probabilities under the model that training began with
#include "llmc/train/rollout.h"           // completions, rewards and advantages: the batches of online GRPO
#include "llmc/train/adamw.h"             // the optimizer over the parameter table
#include "llmc/train/checkpoint.h"        // complete or absent; resuming to the bit
#include "llmc/train/log.h"               // step line, log.jsonl, progress bar
#include "llmc/cli/report.h"              // plans for people and as JSON
#include "llmc/train/trainer.h"           // a training run, and what must stay the same in it
#include "llmc/plan/profile.h"            // where the time of a pass goes, by op
#include "llmc/verbs/bp.h"                // one pass, measured
#include "llmc/verbs/plan.h"              // memory and FLOPs before anything is allocated
#include "llmc/verbs/eval.h"              // the loss of a model on data
#include "llmc/verbs/sample.h"            // text from a model
#include "llmc/verbs/convert.h"           // convert, info

// ---- train ----------------------------------------------------------------------------------------------------------
static Trained trainer_trained(Trainer *t) {
    Trained trained = {0};
    trained.model = run_trained(&t->run), trained.ops = ops_device;
    trained.weights = trained_weights(&t->run.streambp.memory);
    trained.weights_sharding_of = weights_sharding(&t->run.streambp.memory);
    trained.optimizer_sharding = sharding_of(t->run.streambp.memory.world, ZERO_OPTIMIZER);
    trained.optimizer = t->run.optimizer;
    trained.moment_type = t->run.settings.moment_type;
    trained.lora = t->run.settings.lora;
    trained.base = t->run.base, trained.base_path = t->run.options->model, trained.base_model = &t->run.model;
    return trained;
}

// How to go on after a step that must not be taken.
static const char *last_good(const Trainer *t) {
    static char text[PATH_MAX + 64];
    if (!t->has_folder || t->folder.last == CHECKPOINT_NONE) return "no checkpoint was saved";
    snprintf(text, sizeof(text), "the last good checkpoint is step %zu in %s", t->folder.last, t->folder.path);
    return text;
}

// Ends the run where `step` left NaN or infinite weights.
static void trainer_check_weights(const Trainer *t, size_t step) {
    char when[48];
    snprintf(when, sizeof(when), "after step %zu ", step);
    weights_check_finite_at(run_trained(&t->run), weights_sharding(&t->run.streambp.memory), ops_device,
                            trained_weights(&t->run.streambp.memory), when, last_good(t));
}

static void trainer_save(Trainer *t) {
    Trained trained = trainer_trained(t);
    trainer_check_weights(t, t->state.step); // before an older, good checkpoint is pruned
    checkpoint_save(&t->folder, &trained, &t->state);
}

// The model that a run goes on with that names none: of a whole model's checkpoint. Adapters need theirs again.
static void trainer_find_model(const Options *o, const char *last, char path[PATH_MAX]) {
    Manifest manifest;
    const char *fault = manifest_check(last, &manifest);
    if (fault) die("%s: %s", last, fault);
    checkpoint_check_kind(last, &manifest, o->lora_rank || o->adapter);
    if (!manifest.adapters)
        path_join(path, last, manifest_file(&manifest, MANIFEST_MODEL));
    else if (!o->model && !o->init)
        die("%s: holds adapters alone; give the model they were trained on with --model", last);
}

static SequenceBound trainer_plan_rollout(Trainer *t) {
    prompt_choose_tokenizer(&t->rollout_text, &t->run);
    t->rollout_text.ignore_end = t->run.options->ignore_eos;
    t->end_ids = (uint32_t *)checked_calloc(rollout_ends(t->run.options, &t->rollout_text, NULL) + 1, sizeof(uint32_t),
                                            "what ends a completion");
    rollout_ends(t->run.options, &t->rollout_text, t->end_ids);
    RolloutSettings settings = rollout_from_options(&t->run, &t->rollout_text, t->end_ids);
    return rollout_plan(&settings, &t->data, &t->run.settings, t->run.options->seq_len);
}

static void trainer_open_rollout(Trainer *t) {
    RolloutSettings settings = rollout_from_options(&t->run, &t->rollout_text, t->end_ids);
    rollout_allocate(&t->rollout, &settings, &t->run.model, &t->data);
}

// The folder of checkpoints. Where there is one to go on with, `last` becomes its path and `model` that of its model.
static void trainer_open_folder(Trainer *t, const Options *o, char last[PATH_MAX], char model[PATH_MAX]) {
    char config[PATH_MAX];
    path_join(config, o->out, "config.json");
    if (path_exists(config))
        die("--out %s: is the folder of a model, which would hide the run's checkpoints from --model; choose another",
            o->out);
    path_join(config, o->out, "adapter_config.json");
    if (path_exists(config))
        die("--out %s: is the folder of an adapter, which the run's checkpoints would hide from --adapter; choose "
            "another",
            o->out);
    checkpoint_open(&t->folder, o->out, o->keep_checkpoints, o->resume);
    if (t->folder.last != CHECKPOINT_NONE) {
        checkpoint_path(last, t->folder.path, t->folder.last, "");
        trainer_find_model(o, last, model);
    } else if (o->resume) {
        if (!o->model && !o->init)
            die("%s holds no complete checkpoint to resume from; give --model or --init to begin", o->out);
        note("%s holds no complete checkpoint: beginning at step 1", o->out);
    }
}

// Data, plan and memory; returns the largest stream that is planned for.
static SequenceBound trainer_allocate(Trainer *t) {
    const Options *o = t->run.options;
    t->data = run_open_data(&t->run, &o->data, shuffle_from_options(o));
    SequenceBound bound = o->rollout ? trainer_plan_rollout(t) : run_bound(&t->run, &t->data);
    if (o->val_data.count) {
        t->validation = run_open_data(&t->run, &o->val_data, SHUFFLE_OFF);
        dataloader_check_pair(&t->data, &t->validation);
        bound = larger_bound(bound, run_bound(&t->run, &t->validation));
    }
    if (o->sample_every) {
        t->prompt = prompt_from_options(&t->run);
        t->run.settings.cache_tokens = prompt_cache_tokens(&t->prompt, o);
    }
    run_allocate(&t->run, bound);
    if (o->rollout)
        trainer_open_rollout(t);
    else
        prefetch_allocate(&t->train_batches, &t->data, t->run.assignment);
    if (o->val_data.count)
        prefetch_allocate(&t->validation_batches, &t->validation,
                          assign_evaluation(t->run.settings.world, t->run.assignment.parts));
    if (o->sample_every) {
        sampler_allocate(&t->sampler, &t->run.model, t->run.settings.cache_tokens);
        t->sampled = (int32_t *)checked_calloc(o->max_new_tokens, sizeof(int32_t), "the sampled tokens");
        t->sampled_text = (char *)checked_calloc(o->max_new_tokens, prompt_token_bytes(&t->prompt), "the sampled text");
    }
    return bound;
}

// Weights, optimizer and place: as a run begins, or those of its last checkpoint, where `last` names one.
static void trainer_load(Trainer *t, const char *last) {
    if (!*last) {
        run_load_weights(&t->run);
        optimizer_init(run_trained(&t->run), t->run.settings.world, ops_device,
                       trained_weights(&t->run.streambp.memory), &t->run.optimizer, t->run.settings.moment_type);
        trainer_find_reference(t, last);
        trainer_settings(t);
        return;
    }
    if (t->run.lora.rank) run_load_base(&t->run);
    Trained trained = trainer_trained(t);
    trainer_find_reference(t, last);
    trainer_settings(t);
    checkpoint_load(&t->folder, t->folder.last, &trained, &t->state);
    if (!t->run.options->quiet)
        fprintf(t->run.text, "resumed  %s, step %zu of %zu\n", last, t->state.step, t->state.schedule.steps);
    weights_check_finite(trained.model, weights_sharding(&t->run.streambp.memory), ops_device, trained.weights);
    run_close_source(&t->run);
}

// Everything before the first step.
static void trainer_begin(Trainer *t, const Options *o) {
    char last[PATH_MAX] = "", model[PATH_MAX] = "";
    memset(t, 0, sizeof(*t));
    t->validation_loss = NAN;
    t->has_folder = o->out != NULL;
    if (t->has_folder) trainer_open_folder(t, o, last, model);
    run_open(&t->run, o, o->model ? NULL : model);
    SequenceBound bound = trainer_allocate(t);
    trainer_schedule(t);
    report_run(&t->run, &t->data, bound);
    if (!o->quiet && is_main_rank()) t->peak_flops = (double)dist_ranks() * run_peak_flops(&t->run);
    trainer_load(t, last);
    trainer_open_reference(t, &t->data, &t->train_batches, &t->reference[0]);
    if (o->val_data.count) trainer_open_reference(t, &t->validation, &t->validation_batches, &t->reference[1]);
    if (t->has_folder) {
        Trained trained = trainer_trained(t);
        if (dist_rank() == 0) tokenizer_keep(&t->run, o->out);
        checkpoint_check_space(&t->folder, &trained, o->out);
    }
    t->log = runlog_open(o->quiet || !is_main_rank() ? NULL : t->run.text, is_main_rank() ? o->out : NULL, o->resume,
                         t->state.step, t->state.schedule.steps);
    runlog_options(&t->log, t->state.step, o);
    if (t->state.step < t->state.schedule.steps && !o->rollout) prefetch_start(&t->train_batches, t->state.next_batch);
}

static void trainer_validate(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    size_t steps = dataloader_batches(&t->validation);
    if (o->val_steps) steps = min_size(steps, o->val_steps);
    progress_clear(&t->log.progress);
    Evaluation found = evaluate(&t->run, &t->validation_batches, steps, NULL);
    t->validation_loss = found.loss;
    if (!isfinite(t->validation_loss))
        die("step %zu: the validation loss is %f; %s", step, t->validation_loss, last_good(t));
    runlog_validation(&t->log, step, &found);
}

static void trainer_sample(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    SamplingSettings settings = sampling_from_options(o);
    size_t drawn = generate(&t->sampler, &t->run.streambp, &t->prompt, &settings, t->sampled, o->max_new_tokens, NULL);
    runlog_sample(&t->log, step, t->sampled_text, prompt_text(&t->prompt, t->sampled, drawn, t->sampled_text));
}

// ---- one step -------------------------------------------------------------------------------------------------------
// Completions for this step, or those that the steps before have used already; returns how many streams they are.
static size_t trainer_rollout(Trainer *t, size_t step, StepReport *report) {
    const size_t updates = t->run.options->updates;
    Rollout *rollout = &t->rollout;
    if ((step - 1) % updates == 0) {
        rollout_step(rollout, &t->run.streambp, (step - 1) / updates + 1);
        report->rollout_seconds = rollout->sampling_seconds, report->reward_seconds = rollout->reward_seconds;
        for (size_t i = 0; i < rollout->streams; i++) {
            Batch *batch = rollout_batch(rollout, i);
            trainer_reference(t, batch, report);
            if (!batch->old) continue;
            forward_policy(&t->run.streambp, batch, 0, batch->old);
            report->flops += flops_forward(&t->run.settings, batch, 1);
        }
    }
    for (size_t i = 0; i < rollout->metrics.count; i++)
        metric_add(&report->metrics, rollout->metrics.metric[i].name, rollout->metrics.metric[i].sum,
                   rollout->metrics.metric[i].count);
    return rollout->streams;
}

// The rank's i-th micro-batch of the step, and what the step's losses are divided by.
static Batch *trainer_batch(Trainer *t, size_t step, size_t i, double *Z, StepReport *report) {
    const Objective *objective = &t->run.streambp.objective;
    const World world = t->run.settings.world;
    Batch *batch;
    TargetCounts counts;
    size_t number;
    if (t->run.options->rollout) {
        batch = rollout_batch(&t->rollout, i), counts = t->rollout.counts;
        number = i * world_replicas(world) + world_replica(world);
    } else {
        MicroBatch *micro = prefetch_take(&t->train_batches);
        batch = &micro->batch, counts = micro->step_counts, number = micro->number;
        t->state.next_batch = micro->after;
        trainer_reference(t, batch, report);
    }
    *Z = objective_normaliser(objective, counts);
    t->run.streambp.dropout_seed =
        random_bits(t->run.options->seed, RANDOM_STREAM_DROPOUT, ((uint64_t)step << 32) + number);
    return batch;
}

// What all ranks did in a step together. The same bits on every rank: all go on, or none does.
static void trainer_sum_up(Trainer *t, StepReport *report) {
    const World world = t->run.settings.world;
    double of_streams[2] = {report->loss, report->tokens};
    sum_over_sequences(world, of_streams, 2);
    report->loss = of_streams[0], report->tokens = of_streams[1];
    dist_sum(RANKS_ALL, &report->flops, 1);
    metrics_over_sequences(world, &report->metrics);
}

// Loss and gradient of all micro-batches. What is not finite ends the run before anything is changed.
static void trainer_gradient(Trainer *t, size_t step, StepReport *report) {
    StreamBP *stream = &t->run.streambp;
    size_t streams = t->run.options->rollout ? trainer_rollout(t, step, report) : assigned_batches(t->run.assignment);
    const Parameter *bad = NULL;
    grads_zero(&stream->memory);
    for (size_t i = 0; i < streams; i++) {
        double Z;
        const Batch *batch = trainer_batch(t, step, i, &Z, report);
        report->loss += forward_backward(stream, batch, Z, i + 1 == streams, &report->metrics);
        report->tokens += batch_tokens(batch);
        report->flops += flops_forward_backward(&t->run.settings, batch);
    }
    trainer_sum_up(t, report);
    if (!isfinite(report->loss)) {
        trainer_check_weights(t, step - 1);
        die("step %zu: the loss is %f, but all weights are finite; %s", step, report->loss, last_good(t));
    }
    report->grad_norm = gradient_norm(run_trained(&t->run), t->run.settings.world, ops_device, stream->memory.gradients,
                                      t->run.settings.gradient_type, &bad);
    if (bad) die("step %zu: the gradient of %s holds NaN or Inf; %s", step, bad->name, last_good(t));
    report->streams = streams;
}

// The optimizer's step from the gradient.
static void trainer_update(Trainer *t, size_t step, const StepReport *report) {
    const Options *o = t->run.options;
    AdamW adamw = {0};
    adamw.learning_rate = report->learning_rate;
    adamw.beta1 = o->beta1, adamw.beta2 = o->beta2, adamw.epsilon = o->epsilon;
    adamw.weight_decay = o->weight_decay;
    adamw.gradient_scale = gradient_clip(report->grad_norm, o->grad_clip);
    adamw.step = (int64_t)step, adamw.seed = o->seed;
    optimizer_step(run_trained(&t->run), t->run.settings.world, ops_device, trained_weights(&t->run.streambp.memory),
                   t->run.streambp.memory.gradients, t->run.settings.gradient_type, &t->run.optimizer,
                   t->run.settings.moment_type, &adamw);
    weights_updated(&t->run.streambp.memory);
}

// Forward, backward and optimizer over the micro-batches of one step. Where none has a reward the weights stay as they
// are.
static StepReport trainer_step(Trainer *t, size_t step) {
    double begin = seconds_now(), waited = t->train_batches.waited;
    const World world = t->run.settings.world;
    const Traffic sent = t->run.streambp.memory.sent;
    StepReport report = {0};
    report.step = step;
    report.learning_rate = schedule_learning_rate(&t->state.schedule, step);
    trainer_gradient(t, step, &report);
    if (report.streams) trainer_update(t, step, &report);
    ops_device->finish();
    report.seconds = seconds_now() - begin;
    report.data_seconds = t->train_batches.waited - waited;
    report.ranks = world_ranks(world);
    t->sent = sent_since(world, &sent, &t->run.streambp.memory.sent, 1);
    report.sent_bytes = traffic_bytes(&t->sent);
    if (t->peak_flops > 0 && report.flops > t->peak_flops * report.seconds) // other programs were in the way before
        t->peak_flops = fmax((double)report.ranks * run_peak_flops(&t->run), report.flops / report.seconds);
    report.peak_flops = t->peak_flops;
    report.memory_bytes = (double)(ops_device->memory_peak() - t->run.memory_at_start);
    t->state.step = step;
    t->state.tokens += (size_t)report.tokens;
    t->state.seconds += report.seconds;
    return report;
}

static void train_json(const Trainer *t, const StepReport *last) {
    const World world = t->run.settings.world;
    const double peak = max_over_ranks(world, (double)(ops_device->memory_peak() - t->run.memory_at_start));
    JsonOut json = json_open(stdout);
    json_object(&json, NULL);
    json_size(&json, "steps", t->state.step);
    json_number(&json, "loss", last->loss);
    json_number(&json, "val_loss", t->validation_loss);
    json_size(&json, "tokens", t->state.tokens);
    json_number(&json, "seconds", t->state.seconds);
    json_size(&json, "plan_bytes", t->run.plan.total_bytes);
    json_size(&json, "host_bytes", t->run.plan.host_bytes);
    json_size(&json, "peak_bytes", (size_t)peak);
    report_world_json(&json, world, &t->sent);
    json_object_end(&json);
    json_finish(&json);
}

static int every(size_t step, size_t interval) { return interval && step % interval == 0; }

static int verb_train(const Options *options) {
    static Trainer trainer;
    Trainer *t = &trainer;
    StepReport report = {0};
    report.loss = NAN;
    trainer_begin(t, options);
    size_t steps = t->state.schedule.steps;
    if (options->val_data.count && t->state.step == 0) trainer_validate(t, 0);
    for (size_t step = t->state.step + 1; step <= steps; step++) {
        report = trainer_step(t, step);
        runlog_step(&t->log, &report);
        allocation_guard = getenv("STREAMBP_ALLOCATION_GUARD") != NULL; // tests: from now on allocating is fatal
        if (options->val_data.count && (every(step, options->val_every) || step == steps)) trainer_validate(t, step);
        if (every(step, options->sample_every)) trainer_sample(t, step);
        if (t->has_folder && (every(step, options->save_every) || step == steps)) trainer_save(t);
    }
    allocation_guard = 0;
    runlog_close(&t->log);
    if (options->json) train_json(t, &report);
    if (t->has_folder) checkpoint_close(&t->folder);
    if (options->rollout) rollout_free(&t->rollout), prompt_free(&t->rollout_text), free(t->end_ids);
    prefetch_free(&t->train_batches), prefetch_free(&t->validation_batches);
    logprobs_close(&t->reference[0]), logprobs_close(&t->reference[1]);
    dataloader_close(&t->data);
    if (options->val_data.count) dataloader_close(&t->validation);
    if (options->sample_every) sampler_free(&t->sampler), prompt_free(&t->prompt);
    free(t->sampled), free(t->sampled_text);
    run_close(&t->run);
    return 0;
}

// ---- main -----------------------------------------------------------------------------------------------------------
typedef int (*VerbMain)(const Options *options); // returns the exit code

// Several processes: only for what they can do together, and in the groups that share a stream.
static void join_ranks(const Options *o) {
    const int together = o->verb == VERB_TRAIN || o->verb == VERB_BP || o->verb == VERB_EVAL;
    if (dist_ranks() > 1 && !together && o->verb != VERB_PLAN)
        die_usage("%s is work for one process, %zu were started; run it without mpirun or srun",
                  verb_rows[o->verb].name, dist_ranks());
    if (!together) return;
    if (dist_ranks() > 1 && o->rollout && o->reward_timeout >= o->timeout)
        die_usage("--reward-timeout %g s: ranks wait for each other's rewards, and give the job up after --timeout %g "
                  "s; raise --timeout above it",
                  o->reward_timeout, o->timeout);
    dist_timeout(o->timeout);
    dist_split(world_from_options(o).sp);
}

int main(int argc, char **argv) {
    static const VerbMain verbs[VERBS] = {verb_train,    verb_bp,     verb_plan,    verb_eval,
                                          verb_logprobs, verb_sample, verb_convert, verb_info};
    dist_start();
    signals_prepare();
    dist_check_program(argc, argv); // before options are read: --help of one rank would leave the others waiting
    Options options = options_parse(argc, argv);
    join_ranks(&options);
    progress_off = options.quiet;
    use_threads(options.threads);
    int status = verbs[options.verb](&options);
    options_free(&options);
    stdout_finish();
    dist_stop();
    return status;
}
