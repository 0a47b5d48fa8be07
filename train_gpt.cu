/*
train: fine-tunes and trains GPT/Llama-style models on very long sequences with StreamBP.

A step of training (train_step), the loop around it (verb_train) and main. C11 that is also C++20. The driver knows no
type and no device: all work on tensors goes through struct Ops, and nothing here looks inside a tensor. The includes
are the map: one block per room, and a room includes only rooms above it (llmc/README.md).
*/
// base: errors, files, JSON, random numbers, progress; knows nothing of models
#include "llmc/base/json.h"
#include "llmc/base/progress.h"
#include "llmc/base/random.h"
// ranks: the other processes of the run, and each process's share of work
#include "llmc/ranks/dist.h"
#include "llmc/ranks/world.h"
// ops: the table of operations on tensors, and the one allocation that holds all tensors
#include "llmc/ops/ops.h"
#include "llmc/ops/arena.h"
// model: configuration, parameter table, adapters
#include "llmc/model/config.h"
#include "llmc/model/model.h"
#include "llmc/model/lora.h"
// tokenizer: text to ids and back
#include "llmc/tokenizer/tokenizer.h"
// files: every format that weights are read from and written to
#include "llmc/files/weights.h"
// data: shards, documents, packed sequences, objectives
#include "llmc/data/batch.h"
#include "llmc/data/objective.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/prefetch.h"
// the algorithm: steps forward and backward, and their loops over layers and chunks
#include "streambp.h"
// orders: other orders of the same steps; the key/value cache of generation
#include "llmc/orders/key_value_cache.h"
// plan: computes memory and FLOPs before anything is allocated. llmc/estimate computes times from assumed rates; only
// cli, run and verbs include it.
#include "llmc/plan/plan.h"
#include "llmc/plan/flops.h"
// cli: the command line
#include "llmc/cli/options.h"
// run: the start that all verbs share: settings, model, data, the plan that fits, the one allocation; reports
#include "llmc/run/settings.h"
#include "llmc/run/run.h"
#include "llmc/run/allocate.h"
#include "llmc/run/choose_ops.h"
#include "llmc/run/threads.h"
#include "llmc/run/report.h"
// generate: sampler, prompts
#include "llmc/generate/sampler.h"
#include "llmc/generate/prompt.h"
// train: checkpoints, log, references, rollouts, signals
#include "llmc/train/all_reduce.h"
#include "llmc/train/checkpoint.h"
#include "llmc/train/log.h"
#include "llmc/train/trainer.h"
#include "llmc/train/trainer_setup.h"
#include "llmc/train/trainer_stop.h"
// verbs: bp, plan, eval and logprobs, sample, convert and info, doctor
#include "llmc/verbs/bp.h"
#include "llmc/verbs/plan.h"
#include "llmc/verbs/eval.h"
#include "llmc/verbs/sample.h"
#include "llmc/verbs/convert.h"
#include "llmc/verbs/doctor.h"

// ---- one step -------------------------------------------------------------------------------------------------------
static StepReport train_step(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    StreamBP *s = &t->run.streambp;
    const double begin = seconds_now(), waited = t->train_batches.waited;
    const Traffic sent = s->memory.sent;
    StepReport report = {0};
    report.step = step;
    report.learning_rate = schedule_learning_rate(&t->state.schedule, step);

    // 1. This rank's micro-batches: from the data, or from completions that the model generates now.
    report.micro_batches =
        o->rollout ? trainer_rollout(t, step, &report) : prefetch_wait(&t->train_batches)->step_batches;
    trainer_expect(t, step, 0, layer_passes(&t->run, report.micro_batches));

    // 2. Forward and backward of each micro-batch: gradients accumulate; the last micro-batch reduces them over ranks.
    grads_zero(&s->memory);
    for (size_t i = 0; i < report.micro_batches; i++) {
        double Z; // the loss denominator: target tokens, documents or groups of the whole step
        const Batch *batch = trainer_batch(t, step, i, &Z, &report);
        const int last = i + 1 == report.micro_batches;
        trainer_pass(t, batch, Z, last, &report);
    }

    // 3. Loss and gradient norm over all ranks. NaN or Inf ends the run before any weight is changed.
    const Parameter *bad = NULL;
    trainer_all_reduce(t, &report);
    if (!isfinite(report.loss)) {
        trainer_check_weights(t, step - 1);
        die("step %zu: the loss is %f, but all weights are finite; %s", step, report.loss, last_good(t));
    }
    report.grad_norm = gradient_norm(&s->memory, &bad);
    if (bad) die("step %zu: the gradient of %s holds NaN or Inf; %s", step, bad->name, last_good(t));

    // 4. AdamW with the clipped gradient. A step without any reward has no gradient, so the weights stay.
    if (report.micro_batches) {
        AdamW adamw = {0};
        adamw.learning_rate = report.learning_rate;
        adamw.beta1 = o->beta1;
        adamw.beta2 = o->beta2;
        adamw.epsilon = o->epsilon;
        adamw.weight_decay = o->weight_decay;
        adamw.gradient_scale = gradient_clip(report.grad_norm, o->grad_clip);
        adamw.step = (int64_t)step;
        adamw.seed = o->seed;
        if (t->run.settings.defers) {
            update_defer(&t->update, &s->memory, &t->run.optimizer, &adamw);
        } else {
            optimizer_step(&s->memory, &t->run.optimizer, &adamw);
            weights_updated(&s->memory);
        }
        trainer_update_biases(t);
    }

    // 5. Time and traffic of the step.
    ops_device->finish();
    report.seconds = seconds_now() - begin;
    report.data_seconds = t->train_batches.waited - waited;
    trainer_count_step(t, &report, &sent);
    return report;
}

// ---- the loop -------------------------------------------------------------------------------------------------------
static int verb_train(const Options *o) {
    static Trainer trainer;
    Trainer *t = &trainer;
    int code = 0;
    trainer_begin(t, o);
    trainer_listen(t); // from now on a signal ends the run after its current step
    if (trainer_validates(t)) trainer_validate(t);
    while (t->state.step < t->state.schedule.steps && !trainer_stops(t)) {
        t->last = train_step(t, t->state.step + 1);
        runlog_step(&t->log, &t->last);
        trainer_watch(t);
        allocation_guard = getenv("STREAMBP_ALLOCATION_GUARD") != NULL; // in tests allocating is fatal from now on
        if (trainer_stops(t)) break;
        if (trainer_validates(t)) trainer_validate(t);
        if (o->sample_every && t->state.step % o->sample_every == 0) trainer_sample(t);
        if (trainer_saves(t)) trainer_save(t);
    }
    if (t->asked) code = trainer_stop(t, t->asked, "");
    allocation_guard = 0;
    runlog_close(&t->log);
    if (o->json) trainer_json(t);
    trainer_end(t);
    return code;
}

// ---- main -----------------------------------------------------------------------------------------------------------
typedef int (*VerbMain)(const Options *options); // returns the exit code

// Refuses several processes for single-process verbs. In other verbs forms the groups that share a sequence.
static void join_ranks(const Options *o) {
    const int shared = o->verb == VERB_TRAIN || o->verb == VERB_BP || o->verb == VERB_EVAL || o->verb == VERB_DOCTOR;
    if (dist_ranks() > 1 && !shared && o->verb != VERB_PLAN)
        die_usage("%s runs in one process, but %zu were started; run it without mpirun or srun",
                  verb_rows[o->verb].name, dist_ranks());
    if (!shared) return;
    if (dist_ranks() > 1 && o->rollout && o->reward_timeout >= o->timeout)
        die_usage("--reward-timeout %g s: ranks wait for each other's rewards, but stop after --timeout %g s; raise "
                  "--timeout above it",
                  o->reward_timeout, o->timeout);
    dist_timeout(o->timeout);
    const DealLevels levels = deal_levels(dist_ranks());
    for (size_t k = 0; !o->sp && k < levels.levels; k++) dist_split(levels.level[k].ranks);
    dist_split(world_from_options(o).sp);
}

int main(int argc, char **argv) {
    static const VerbMain verbs[VERBS] = {verb_train, verb_bp,      verb_sample, verb_logprobs, verb_plan,
                                          verb_eval,  verb_convert, verb_info,   verb_doctor};
    stack_check(stack_bytes(), (size_t)4 << 20, "ulimit -s 8192");
    threads_wait_briefly(argv); // before anything else, because it may execute the program again
    dist_start();
    signals_prepare();
    // Before options are read, because --help on one rank would leave the others waiting.
    dist_check_program(argc, argv);
    Options options = options_parse(argc, argv);
    join_ranks(&options);
    choose_ops(&options);
    options_check_output(&options);
    progress_off = options.quiet;
    if (options.verb != VERB_CONVERT && options.verb != VERB_INFO) denormals_off(); // these keep every bit of a file
    use_threads(options.threads);
    int status = verbs[options.verb](&options);
    options_free(&options);
    if (!stop_asked()) stdout_finish(); // after a stop the terminal or the pipe may be gone
    dist_stop();
    return status;
}
