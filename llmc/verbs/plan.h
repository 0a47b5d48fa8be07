/*
The verb `plan`: memory and FLOPs of a run, before anything is allocated; the longest sequence within a limit; and, of
several processes, what a rank sends and how long a step is estimated to take on a given kind of machine.
*/
#ifndef LLMC_VERB_PLAN_H
#define LLMC_VERB_PLAN_H
#include "llmc/cli/report.h"
#include "llmc/generate/prompt.h"
#include "llmc/plan/estimate.h"
#include "llmc/train/rollout.h"

static SequenceBound plan_rollout(Run *run, const DataLoader *data) {
    Prompt text = {0};
    RolloutSettings settings = rollout_from_options(run, &text);
    free((uint32_t *)settings.end_ids);
    return rollout_plan(&settings, data, &run->settings, run->options->seq_len);
}

// ---- several processes ---------------------------------------------------------------------------------------------
// Why there is no estimate of a step; NULL where there is one.
static const char *estimate_missing(const Run *run) {
    if (run->model.dtype != DTYPE_BF16) return "machines are known by their rates in bf16; plan with --dtype bf16";
    return run->options->rollout ? "it depends on how long texts become" : NULL;
}

static void report_estimate(const Run *run, const Machine *machine, const Estimate *e) {
    const size_t ranks = world_ranks(run->settings.world);
    const char *missing = estimate_missing(run);
    FILE *out = run->text;
    if (run->options->quiet) return;
    if (ranks > 1) {
        fputs("sent     by a rank in a step: ", out);
        for (int kind = 0; kind < TRAFFIC_KINDS; kind++)
            fprintf(out, "%s%s %s", kind ? ", " : "", traffic_names[kind], human_bytes(e->sent.bytes[kind]));
        fputc('\n', out);
    }
    if (missing) {
        fprintf(out, "step     no estimate: %s\n", missing);
        return;
    }
    machine_print(out, machine);
    fprintf(out, "step     estimated on %zu %s: %.4g s, %.0f tokens/s, %.1f %% MFU (causal, recomputation not counted)",
            ranks, machine->gpu, e->seconds, e->tokens_per_second, 100 * e->mfu);
    if (e->communication > 1e-9 * e->seconds)
        fprintf(out, "; data only moves for %.1f %% of it", 100 * e->communication / e->seconds);
    fprintf(
        out,
        "\nwork     estimated: products %.4g s, attention forward %.4g s, backward %.4g s, bound by memory %.4g s\n",
        e->work.products, e->work.attention_forward, e->work.attention_backward, e->work.memory);
    if (run->plan.total_bytes > machine_usable_bytes(machine))
        fprintf(out, "step     but the plan does not fit into the %s that an %s leaves to it\n",
                human_bytes((double)machine_usable_bytes(machine)), machine->gpu);
}

// Into an open object; null where there is no estimate.
static void report_estimate_json(JsonOut *json, const Run *run, const Machine *machine, const Estimate *e) {
    const double known = estimate_missing(run) ? NAN : 1;
    report_world_json(json, run->settings.world, &e->sent);
    json_text(json, "machine", machine->name);
    json_number(json, "estimated_seconds", known * e->seconds);
    json_number(json, "estimated_tokens_per_second", known * e->tokens_per_second);
    json_number(json, "estimated_mfu", known * e->mfu);
    json_number(json, "communication_share", known * e->communication / e->seconds);
    json_object(json, "estimated_work");
    json_number(json, "products", known * e->work.products);
    json_number(json, "attention_forward", known * e->work.attention_forward);
    json_number(json, "attention_backward", known * e->work.attention_backward);
    json_number(json, "memory", known * e->work.memory);
    json_object_end(json);
}

// ---- the verb ------------------------------------------------------------------------------------------------------
typedef struct {
    SequenceBound whole; // the largest micro-batch
    SequenceBound part;  // and of micro-batches, what a rank takes
} PlanBound;

static PlanBound plan_bound(Run *run, DataLoader *data) {
    const Options *o = run->options;
    PlanBound bound;
    if (o->data.count) *data = run_open_data(run, &o->data, shuffle_from_options(o));
    bound.whole = o->data.count ? data->bound : regular_bound(o->batch * sample_documents(o), o->seq_len);
    bound.part = o->rollout ? plan_rollout(run, data) : run_bound(run, o->data.count ? data : NULL);
    if (o->val_data.count && o->plan_for == VERB_TRAIN) {
        DataLoader validation = run_open_data(run, &o->val_data, SHUFFLE_OFF);
        if (o->data.count) dataloader_check_pair(data, &validation);
        bound.part = larger_bound(bound.part, run_bound(run, &validation));
        dataloader_close(&validation);
    }
    return bound;
}

// A step of all ranks.
static StepShape plan_step(const Run *run, SequenceBound whole) {
    const double batches = (double)run->assignment.batches;
    Batch shape = batch_shape(whole);
    StepShape step;
    step.sequences = assigned_batches(run->assignment);
    step.tokens = batches * (double)shape.N;
    step.model_flops = batches * model_flops(&run->model, run->settings.lora, &shape, 1);
    free(shape.document_start);
    return step;
}

// limit: 0: none; machine: NULL where no time is estimated
static void plan_json(const Run *run, StepShape step, size_t limit, size_t longest, const Machine *machine,
                      const Estimate *estimate) {
    const double passes = (double)(step.sequences * world_ranks(run->settings.world));
    JsonOut json = json_open(stdout);
    json_object(&json, NULL);
    report_plan_json(&json, &run->plan.arena);
    json_size(&json, "host_bytes", run->plan.host_bytes);
    if (limit) json_size(&json, "max_seq_len", longest);
    if (limit || machine) json_size(&json, "usable_bytes", limit ? limit : machine_usable_bytes(machine));
    report_work_json(&json, run, passes * run->plan.counts.flops, step.model_flops);
    if (machine) report_estimate_json(&json, run, machine, estimate);
    json_object_end(&json);
    json_finish(&json);
}

static int verb_plan(const Options *options) {
    const int given = option_given(options, "machine");
    const Machine *machine = options->ranks > 1 || given ? &machines[options->machine] : NULL;
    const size_t limit = options->memory_limit || !given ? options->memory_limit : machine_usable_bytes(machine);
    Run run;
    Estimate estimate = {0};
    DataLoader data = {0};
    size_t longest = 0;
    run_open(&run, options, NULL);
    if (options->sample_every) {
        Prompt prompt = prompt_from_options(&run);
        run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
        prompt_free(&prompt);
    }
    PlanBound bound = plan_bound(&run, &data);
    StepShape step = plan_step(&run, bound.whole);
    Batch shape = batch_shape(bound.part);
    run_plan(&run, &shape, limit);
    if (limit) longest = run_longest(&run, bound_documents(bound.part, options->seq_len), limit);
    if (machine) estimate = estimate_step(machine, &run.settings, &shape, step);
    report_run(&run, &data, bound.part);
    if (limit && !options->quiet)
        fprintf(run.text, "longest  --seq-len %zu fits into %s%s\n", longest, human_bytes((double)limit),
                run.plan.total_bytes > limit ? "; the planned one does not" : "");
    if (machine) report_estimate(&run, machine, &estimate);
    if (options->json) plan_json(&run, step, limit, longest, machine, &estimate);
    free(shape.document_start);
    if (options->data.count) dataloader_close(&data);
    run_close(&run);
    return 0;
}

#endif
