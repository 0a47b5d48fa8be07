/*
The verb `bp`: one forward and backward pass, measured, over the first micro-batches of --data or over random ids.
--grads-out writes the gradients, to compare with another program.
*/
#ifndef LLMC_BP_H
#define LLMC_BP_H
#include "llmc/files/gradients.h"
#include "llmc/run/report.h"
#include "llmc/run/seq_len.h"
#include "llmc/plan/flops.h"
#include "llmc/estimate/profile.h"
#include "llmc/optimizer/update.h"
#include "llmc/train/reference.h"
#include "llmc/train/all_reduce.h"

// Result of a pass: sums over all ranks, seconds of the slowest rank, peak bytes of the largest
typedef struct {
    double Z; // the loss denominator
    double loss, grad_norm;
    double *seconds_each;    // [repeats] seconds in order; the first of several is a warm-up
    double seconds;          // median of the seconds without the warm-up
    double profiled;         // seconds of the pass with timed ops
    double tokens, computed; // tokens of documents; of them the model computes so many
    double flops, model_flops, full_flops;
    double executed;      // TFLOP/s that a rank executes
    double mfu, mfu_full; // shares of a machine's peak in bf16: causal, and counting all T^2 pairs; NAN: no machine
    Metrics metrics;
    size_t peak_bytes;
    Traffic sent; // bytes that each rank sends
} PassResult;

// Fills groups, rewards and advantages of random tokens. Rewards alternate 1, 0, advantages 1, -1.
static void bp_answers(const Run *run, Batch *batch) {
    for (size_t d = 0; d < batch->documents; d++) {
        batch->group[d] = d / sample_documents(run->options);
        batch->reward[d] = d % 2 ? 0 : 1;
        for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++)
            batch->advantage[t] = d % 2 ? -1 : 1;
    }
}

// Reads this rank's i-th micro-batch of the pass, or its part, into *whole: from --data, or random ids.
static Batch bp_batch(Run *run, DataLoader *loader, size_t i, Batch *whole) {
    const Options *o = run->options;
    const size_t documents = o->batch * sample_documents(o), number = assigned_number(run->assignment, i);
    if (o->samples && number >= dataloader_step(loader, 0)) return batch_empty(whole);
    if (o->data.count)
        loader->next = number, dataloader_next(loader, whole);
    else
        batch_random(whole, documents, o->seq_len, number * documents, run->model.config.vocab_size, o->seed,
                     o->shared_tokens);
    if (!o->data.count && whole->group) bp_answers(run, whole);
    if (o->data.count) return dataloader_part(loader, whole, run->assignment.parts, run->assignment.part);
    Batch part = batch_part(whole, run->assignment.parts, run->assignment.part);
    if (part.room && !part.empty) part.tree = tree_of_prefix(&part, shared_tokens(o, run->settings.lora));
    return part;
}

// Counts loss denominator, tokens and FLOPs of a pass.
static PassResult bp_count(Run *run, DataLoader *loader, Batch *whole) {
    const World world = run->settings.world;
    TargetCounts counts = {0};
    PassResult result = {0};
    double once[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < assigned_batches(run->assignment); i++) {
        Batch batch = bp_batch(run, loader, i, whole);
        counts = target_counts_add(counts, batch_count(&batch));
        result.flops += flops_forward_backward(&run->settings, &batch);
        result.flops += flops_reference(run, &batch);
        once[0] += batch_tokens(&batch), once[3] += batch_computed(&batch);
        if (batch.empty) continue;
        once[1] += pass_model_flops(model_flops, &run->settings, &batch);
        once[2] += pass_model_flops(model_flops_full_attention, &run->settings, &batch);
    }
    sum_over_sequences(world, once, 4);
    dist_sum(RANKS_ALL, &result.flops, 1);
    result.tokens = once[0], result.computed = once[3], result.model_flops = once[1], result.full_flops = once[2];
    counts = target_counts_over_sequences(world, counts);
    run->streambp.routes.micro_batches = counts.batches;
    result.Z = objective_normaliser(&run->settings.objective, counts);
    return result;
}

// Computes a pass's loss and gradient; gradients must be zero before. Returns the seconds of the pass on this rank.
// guarded: allocating is fatal
static double bp_pass(Run *run, DataLoader *loader, Batch *whole, PassResult *result, int guarded) {
    const size_t own = assigned_batches(run->assignment);
    double seconds = 0;
    allocation_guard = guarded && getenv("STREAMBP_ALLOCATION_GUARD") != NULL;
    result->loss = 0, result->metrics.count = 0;
    for (size_t i = 0; i < own; i++) {
        Batch batch = bp_batch(run, loader, i, whole);
        double begin = seconds_now();
        run_reference(run, &batch);
        run->streambp.now.sparse.seed =
            random_bits(run->options->seed, RANDOM_STREAM_CHUNKS, run->assignment.first + i * run->assignment.stride);
        result->loss += forward_backward(&run->streambp, &batch, result->Z, i + 1 == own, &result->metrics);
        ops_device->finish();
        seconds += seconds_now() - begin;
    }
    allocation_guard = 0;
    return seconds;
}

// Prints a finished pass (--json-lines).
static void bp_json_line(size_t pass, double seconds) {
    if (!is_main_rank()) return;
    JsonOut json = json_open(stdout);
    json_size(&json, "pass", pass);
    json_number(&json, "seconds", seconds);
    json_finish(&json);
}

// Measures --repeat passes. The first of several does not count: kernels load, cuBLASLt chooses, cuDNN compiles shapes.
static PassResult bp_measure(Run *run, DataLoader *loader, Batch *whole) {
    const World world = run->settings.world;
    const size_t repeats = run->options->repeat, warmup = repeats > 1;
    double *counted = (double *)checked_calloc(repeats, sizeof(double), "timings");
    const Traffic before = run->streambp.memory.sent;
    const Parameter *bad = NULL;
    const double layers = layer_passes(run, assigned_batches(run->assignment));
    Progress progress = progress_begin(stderr, "pass", 0, (double)repeats);
    PassResult result = bp_count(run, loader, whole);
    result.seconds_each = (double *)checked_calloc(repeats, sizeof(double), "timings");
    for (size_t repeat = 0; repeat < repeats; repeat++) {
        grads_zero(&run->streambp.memory);
        ops_device->finish();
        progress_expect(&progress, (double)repeat, 1, layers);
        counted[repeat] = max_over_ranks(world, bp_pass(run, loader, whole, &result, repeat > 0));
        if (run->options->json_lines) bp_json_line(repeat + 1, counted[repeat]);
    }
    progress_end(&progress);
    result.sent = sent_since(world, &before, &run->streambp.memory.sent, (double)repeats);
    memcpy(result.seconds_each, counted, repeats * sizeof(double));
    result.seconds = median(counted + warmup, repeats - warmup);
    free(counted);
    sum_over_sequences(world, &result.loss, 1);
    metrics_over_sequences(world, &result.metrics);
    if (!isfinite(result.loss))
        die("the loss is %f: NaN or Inf in the forward pass; check the model's weights, or run doctor", result.loss);
    result.grad_norm = gradient_norm(&run->streambp.memory, &bad);
    if (bad)
        die("the gradient of %s is not finite: NaN or Inf in the backward pass; check the model's weights, or run "
            "doctor",
            bad->name);
    const Machine *machine = machine_from_options(run->options);
    const double each = result.seconds * (double)world_ranks(world), peak = machine ? machine->value[PEAK_FLOPS] : NAN;
    result.executed = 1e-12 * result.flops / each;
    result.mfu = result.model_flops / each / peak, result.mfu_full = result.full_flops / each / peak;
    result.peak_bytes = (size_t)max_over_ranks(world, (double)(ops_device->memory_peak() - run->memory_at_start));
    return result;
}

// Runs one more pass with timed ops, for profile.h. Returns the seconds of the pass. The gradients equal the gradients
// of the earlier passes.
static double bp_profile(Run *run, DataLoader *loader, Batch *whole) {
    const Machine *machine = machine_from_options(run->options);
    Ops timed = ops_timed(ops_device, machine ? machine_ridge(machine) : 0);
    timing.blank.library = machine ? estimated_library(machine, &run->settings) : 0;
    timing.blank.head_dim = run->model.config.head_dim;
    timing.blank.attention = run->settings.attention;
    PassResult again = bp_count(run, loader, whole);
    grads_zero(&run->streambp.memory);
    ops_device->finish();
    run->streambp.ops = run->streambp.memory.ops = &timed;
    double seconds = bp_pass(run, loader, whole, &again, 1);
    run->streambp.ops = run->streambp.memory.ops = ops_device;
    timing_sort();
    return seconds;
}

// Opens --data. A pass reads each micro-batch at most once.
static DataLoader bp_open_data(Run *run) {
    const Options *o = run->options;
    DataLoader loader = run_open_data(run, &o->data, SHUFFLE_OFF);
    if (!o->samples && o->grad_accum > dataloader_batches(&loader))
        die("--grad-accum %zu: the data has %zu micro-batches, and a pass reads each at most once; give more data or "
            "a smaller --grad-accum",
            o->grad_accum, dataloader_batches(&loader));
    return loader;
}

// ---- reports -------------------------------------------------------------------------------------------------------
static void bp_report(const Run *run, const PassResult *result) {
    fprintf(run->text, "loss %.6f  norm %.6g  %.3f s  %.1f tok/s", result->loss, result->grad_norm, result->seconds,
            result->tokens / result->seconds);
    if (result->computed < result->tokens)
        fprintf(run->text, "  %.0f of %.0f tokens computed", result->computed, result->tokens);
    if (run->options->repeat > 1)
        fprintf(run->text, "  median of %zu after a warm-up of %.3f s", run->options->repeat - 1,
                result->seconds_each[0]);
    if (world_ranks(run->settings.world) > 1)
        fprintf(run->text, "  %s sent by a rank", human_bytes(traffic_bytes(&result->sent)));
    fputc('\n', run->text);
    fprintf(run->text, "rate     %.4g TFLOP/s executed", result->executed);
    if (!isnan(result->mfu))
        fprintf(run->text, ", MFU of an %s in bf16 %.1f %% (causal; counting T^2 pairs, as others often do, %.1f %%)",
                machine_from_options(run->options)->gpu, 100 * result->mfu, 100 * result->mfu_full);
    fputc('\n', run->text);
    metrics_print(run->text, &result->metrics);
    report_memory(run, (double)result->peak_bytes);
}

static void bp_json(const Run *run, const PassResult *result) {
    JsonOut json = json_open(stdout);
    json_number(&json, "loss", result->loss);
    metrics_json(&json, &result->metrics, "");
    json_size(&json, "tokens", (size_t)result->tokens);
    if (result->computed < result->tokens) json_size(&json, "computed", (size_t)result->computed);
    json_number(&json, "seconds", result->seconds);
    json_number(&json, "warmup_seconds", run->options->repeat > 1 ? result->seconds_each[0] : NAN);
    json_numbers(&json, "seconds_each", result->seconds_each, run->options->repeat);
    json_number(&json, "grad_norm", result->grad_norm);
    json_size(&json, "plan_bytes", run->plan.total_bytes);
    report_places_json(&json, run);
    json_size(&json, "peak_bytes", result->peak_bytes);
    report_work_json(&json, run, result->flops, result->model_flops);
    json_number(&json, "executed_tflops_per_s", result->executed);
    json_number(&json, "mfu_causal", result->mfu);
    json_number(&json, "mfu_full_attention", result->mfu_full);
    report_world_json(&json, run->settings.world, &result->sent);
    if (run->options->profile)
        profile_json(&json, &run->streambp, machine_from_options(run->options), result->profiled);
    json_finish(&json);
}

static int verb_bp(const Options *given) {
    Options chosen = *given, *const options = &chosen;
    const size_t documents = options->batch * sample_documents(options);
    Run run;
    const Objective *objective = &run.settings.objective;
    run_open(&run, options, NULL);
    run_choose_length(&run, options, 0);
    DataLoader loader = {0};
    if (options->data.count) loader = bp_open_data(&run);
    SequenceBound bound = run_bound(&run, options->data.count ? &loader : NULL);
    if (options->grads_out) {
        const Model *table = run.lora.rank ? &run.lora.table : &run.model;
        gradients_check_globs(options->grads_of, table);
        gradients_check_path(options->grads_out, options->grads_of, run.settings.world, table);
    }
    live_begin(&run, options, options->data.count ? &loader : NULL, bound);
    run_allocate(&run, bound);
    reference_check(&run, &loader, 0);
    Batch batch =
        options->data.count ? dataloader_batch(&loader) : batch_allocate(documents * options->seq_len, documents);
    if (!options->data.count && run.settings.objective.kind != OBJECTIVE_SFT)
        batch_allocate_answers(&batch, objective_reads_reference(objective) && !objective_needs_mismatched(objective),
                               0);
    if (!options->data.count && objective_needs_top(objective) && !options->teacher)
        batch.teacher = teacher_allocate(batch.N, run.settings.teacher_k);
    if (!options->data.count && shared_tokens(options, run.settings.lora))
        batch_allocate_tree(&batch, bound_rows(bound));
    kl_allocate(&run, bound);
    run_load_weights(&run);
    report_run(&run, options->data.count ? &loader : NULL, bound, "");
    PassResult result = bp_measure(&run, &loader, &batch);
    if (options->profile) result.profiled = bp_profile(&run, &loader, &batch);
    if (options->grads_out)
        gradients_write(options->grads_out, options->grads_of, run_trained(&run), run.settings.world, ops_device,
                        run.streambp.memory.gradients, run.settings.gradient_type);
    if (!options->quiet || !options->json) bp_report(&run, &result);
    if (options->profile && (!options->quiet || !options->json))
        profile_report(run.text, &run.streambp, machine_from_options(options), result.profiled, result.seconds);
    if (options->json) bp_json(&run, &result);
    if (options->data.count) dataloader_close(&loader);
    free(result.seconds_each);
    batch_free(&batch);
    run_close(&run);
    return 0;
}

#endif
