/*
The verb `plan`: memory and FLOPs of a run, before anything is allocated; the longest sequence within a limit; of
several processes, what a rank sends; on a named machine the estimated time of a step, and what can be trained there
(recommendations.h).
*/
#ifndef LLMC_VERB_PLAN_H
#define LLMC_VERB_PLAN_H
#include "llmc/cli/report.h"
#include "llmc/generate/prompt.h"
#include "llmc/plan/flops.h"
#include "llmc/train/rollout_options.h"
#include "recommendations.h"

static SequenceBound plan_rollout(Run *run, const DataLoader *data) {
    Prompt text = {0};
    RolloutSettings settings = rollout_from_options(run, &text);
    free((uint32_t *)settings.end_ids);
    return rollout_plan(&settings, data, &run->settings, run->options->seq_len);
}

// ---- several processes ---------------------------------------------------------------------------------------------
// Returns why there is no estimate of a step; NULL if there is one.
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
    fprintf(out,
            "step     estimated on %zu %s: %.4g s, %.0f tokens/s, %.4g TFLOP/s executed by each, %.1f %% MFU (causal, "
            "recomputation not counted; counting T^2 pairs, as others often do, %.1f %%)",
            ranks, machine->gpu, e->seconds, e->tokens_per_second, 1e-12 * e->executed, 100 * e->mfu,
            100 * e->mfu_full);
    if (e->communication > 1e-9 * e->seconds)
        fprintf(out, "; data only moves for %.1f %% of it", 100 * e->communication / e->seconds);
    fprintf(out, "\nwork     estimated: products %.4g s, attention forward %.4g s, backward %.4g s, ", e->work.products,
            e->work.attention_forward, e->work.attention_backward);
    if (e->work.delta > 0) fprintf(out, "delta rule %.4g s, ", e->work.delta);
    fprintf(out, "bound by memory %.4g s, gaps between kernels %.4g s\n", e->work.memory, e->work.gaps);
    if (e->counts.library_calls > 0)
        fprintf(out, "calls    of cuDNN %.0f a sequence, %s staged; %.2f %% of query-key pairs by our own kernels\n",
                e->counts.library_calls, human_bytes(e->counts.staged), 100 * own_share(&e->counts));
    if (run->plan.total_bytes > machine_usable_bytes(machine))
        fprintf(out, "step     but the plan does not fit into the %s that an %s leaves to it\n",
                human_bytes((double)machine_usable_bytes(machine)), machine->gpu);
}

// Writes into an open object; null without an estimate.
static void report_estimate_json(JsonOut *json, const Run *run, const Machine *machine, const Estimate *e) {
    const double known = estimate_missing(run) ? NAN : 1;
    report_world_json(json, run->settings.world, &e->sent);
    json_text(json, "machine", machine->name);
    json_number(json, "estimated_seconds", known * e->seconds);
    json_number(json, "estimated_tokens_per_second", known * e->tokens_per_second);
    json_number(json, "estimated_mfu", known * e->mfu);
    json_number(json, "communication_share", known * e->communication / e->seconds);
    json_number(json, "estimated_mfu_full_attention", known * e->mfu_full);
    json_number(json, "estimated_executed_tflops_per_s", known * 1e-12 * e->executed);
    json_number(json, "estimated_seconds_on_device", known * e->on_device);
    json_object(json, "estimated_work");
    json_number(json, "products", known * e->work.products);
    json_number(json, "attention_forward", known * e->work.attention_forward);
    json_number(json, "attention_backward", known * e->work.attention_backward);
    json_number(json, "delta", known * e->work.delta);
    json_number(json, "memory", known * e->work.memory);
    json_number(json, "gaps", known * e->work.gaps);
    json_object_end(json);
    json_number(json, "attention_calls", e->counts.library_calls);
    json_number(json, "attention_staged_bytes", e->counts.staged);
    json_number(json, "attention_own_share", own_share(&e->counts));
}

// ---- the verb ------------------------------------------------------------------------------------------------------
typedef struct {
    SequenceBound whole; // the largest micro-batch
    SequenceBound part;  // a rank's part of one
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
        if (o->rollout)
            plan_rollout(run, &validation); // of its longer texts
        else
            bound.part = larger_bound(bound.part, run_bound(run, &validation));
        dataloader_close(&validation);
    }
    return bound;
}

// Counts a step of all ranks.
static StepShape plan_step(const Run *run, SequenceBound whole) {
    const double batches = (double)run->assignment.batches;
    Batch shape = batch_shape(whole);
    StepShape step;
    step.sequences = assigned_batches(run->assignment);
    step.tokens = batches * (double)shape.N;
    step.model_flops = batches * pass_model_flops(model_flops, &run->settings, &shape);
    step.full_flops = batches * pass_model_flops(model_flops_full_attention, &run->settings, &shape);
    free(shape.document_start);
    return step;
}

// ---- both orders, of which --method auto picks one -----------------------------------------------------------------
// Plans with one of them. longest: 0 without a limit; there is an estimate where there is a machine
static Recommendation plan_order(const Run *run, const char *method, const Batch *shape, size_t documents, size_t limit,
                                 const Machine *machine, StepShape step) {
    Recommendation order = {0};
    Options o = *run->options;
    Run alone = *run;
    option_type(&o, "method", method);
    alone.options = &o, alone.settings.method = o.method;
    run_plan(&alone, shape, limit);
    const Search search = run_search(&alone, limit);
    order.settings = alone.settings, order.fits = plan_pressure(&alone.plan, &search.limits) <= 1;
    plan_bytes(&alone.plan, order.bytes);
    if (limit) order.longest = run_longest(&alone, documents, limit);
    if (machine) order.estimate = estimate_step(machine, &alone.settings, shape, step);
    return order;
}

static void orders_print(FILE *out, const Run *run, const Recommendation *order, size_t orders, int estimated) {
    for (size_t i = 0; i < orders; i++) {
        const Recommendation *o = &order[i];
        fprintf(out, "%s %c %-6s  %s", i ? "        " : "orders  ",
                o->settings.method == run->settings.method ? '*' : ' ', method_names[o->settings.method],
                human_bytes((double)o->bytes[PLACE_DEVICE]));
        if (o->bytes[PLACE_HOST]) fprintf(out, ", host %s", human_bytes((double)o->bytes[PLACE_HOST]));
        if (o->bytes[PLACE_DISK]) fprintf(out, ", disk %s", human_bytes((double)o->bytes[PLACE_DISK]));
        if (!o->fits) fputs(", does not fit", out);
        if (o->longest) fprintf(out, "; longest --seq-len %zu", o->longest);
        if (estimated) fprintf(out, "; estimated %.4g s a step", o->estimate.seconds);
        fputc('\n', out);
    }
}

static void orders_json(JsonOut *json, const Recommendation *order, size_t orders, int estimated, int limited) {
    json_array(json, "orders");
    for (size_t i = 0; i < orders; i++) {
        json_object(json, NULL);
        json_text(json, "method", method_names[order[i].settings.method]);
        json_size(json, "total_bytes", order[i].bytes[PLACE_DEVICE]);
        json_size(json, "host_bytes", order[i].bytes[PLACE_HOST]);
        json_size(json, "disk_bytes", order[i].bytes[PLACE_DISK]);
        json_bool(json, "fits", order[i].fits);
        if (limited) json_size(json, "max_seq_len", order[i].longest);
        if (estimated) json_number(json, "estimated_seconds", order[i].estimate.seconds);
        json_object_end(json);
    }
    json_array_end(json);
}

typedef struct {
    size_t limit, longest;             // 0: none
    int fits;                          // the plan, into that and into the host's memory and disk
    size_t train_bytes, train_longest; // of training with the options of a pass
    const Machine *machine;            // NULL: no time is estimated
    Estimate estimate;
    Recommendations *recommended; // NULL: without --machine
    Recommendation order[2];
    size_t orders; // 0: the method is named
} PlanResult;

static void plan_result_json(const Run *run, StepShape step, const PlanResult *r) {
    const double passes = (double)(step.sequences * world_ranks(run->settings.world));
    JsonOut json = json_open(stdout);
    if (r->recommended) recommendations_json(&json, r->recommended);
    if (r->orders) orders_json(&json, r->order, r->orders, r->machine && !estimate_missing(run), r->limit > 0);
    report_places_json(&json, run);
    report_plan_json(&json, run->plan.arena);
    if (r->limit) {
        json_size(&json, "max_seq_len", r->longest);
        json_bool(&json, "fits", r->fits);
    }
    json_bool(&json, "optimizer_update", run->settings.optimizer);
    if (!run->settings.optimizer) json_size(&json, "train_total_bytes", r->train_bytes);
    if (!run->settings.optimizer && r->limit) json_size(&json, "train_max_seq_len", r->train_longest);
    if (r->limit || r->machine)
        json_size(&json, "usable_bytes", r->limit ? r->limit : machine_usable_bytes(r->machine));
    report_work_json(&json, run, passes * run->plan.counts.flops, step.model_flops);
    if (r->machine) report_estimate_json(&json, run, r->machine, &r->estimate);
    json_finish(&json);
}

static void plan_result_text(const Run *run, const PlanResult *r) {
    const Options *o = run->options;
    const char *limit = human_bytes((double)r->limit), *bytes = human_bytes((double)run->plan.total_bytes);
    FILE *out = run->text;
    if (o->quiet && o->json) return;
    if (o->quiet) fprintf(out, "memory   %s planned\n", bytes);
    if (r->limit && r->longest)
        fprintf(out, "longest  --seq-len %zu fits into %s%s", r->longest, limit,
                run->settings.optimizer ? "" : ", for a pass without an optimizer update");
    if (r->longest && !r->fits) {
        fprintf(out, "; the planned --seq-len %zu needs %s", o->seq_len, bytes);
        if (run->plan.host_bytes) fprintf(out, ", %s of host memory", human_bytes((double)run->plan.host_bytes));
        if (run->plan.disk_bytes) fprintf(out, ", %s of disk", human_bytes((double)run->plan.disk_bytes));
        fputs(" and does not", out);
    }
    if (r->longest) fputc('\n', out);
    if (!run->settings.optimizer) {
        fprintf(out, "train    the same options with an optimizer need %s", human_bytes((double)r->train_bytes));
        if (r->train_longest) fprintf(out, "; --seq-len %zu fits into %s", r->train_longest, limit);
        fputs(r->limit && !r->train_longest ? "; no length fits\n" : "\n", out);
    }
    if (!o->quiet && ops_device->stored != run->model.dtype && run->model.dtype == DTYPE_BF16)
        fprintf(
            out,
            "cuda     is not in this plan of a CPU build: %sworkspaces take 0.4 to 1 GiB more there, attention up to 5 "
            "GiB more where they are free\n",
            run->settings.chunk ? "" : "larger chunks and ");
    if (r->machine) report_estimate(run, r->machine, &r->estimate);
    if (!o->quiet) orders_print(out, run, r->order, r->orders, r->machine && !estimate_missing(run));
}

// Sets a GPU build's element type and chunks, unless others are named.
static void options_of_gpu(Options *o) {
    if (o->dtype == DTYPE_AUTO) option_type(o, "dtype", "bf16");
    if (!method_has_chunks(o->method) || o->method == METHOD_MST) return;
    if (!o->chunk) option_type_size(o, "chunk", CUDA_CHUNK);
    if (!o->logits_chunk) option_type_size(o, "logits-chunk", CUDA_LOGITS_CHUNK);
}

// Sets --seq-len to the longest sequence on a machine; to that of adapters if no length of all weights fits.
static void plan_longest_of_machine(Run *run, Options *o, size_t limit) {
    const size_t documents = run_bound(run, NULL).documents;
    size_t longest = run_longest(run, documents, limit);
    if (!longest && !run->settings.lora) {
        Trained adapters;
        trained_open(&adapters, run, 1);
        longest = run_longest(&adapters.run, documents, limit);
        lora_free(&adapters.run.lora);
    }
    if (longest) option_type_size(o, "seq-len", longest);
}

static int verb_plan(const Options *given) {
    PlanResult r = {0};
    Run run, train;
    DataLoader data = {0};
    Recommendations recommended;
    static PassWorks works;
    Options planned = *given, *const options = &planned;
    const int named = option_given(given, "machine");
    r.machine = machine_from_options(options);
    r.limit = options->memory_limit || !named ? options->memory_limit : machine_usable_bytes(r.machine);
    if (named) options_of_gpu(&planned);
    if (!options->model && !options->init) return plan_presets(options, r.machine, r.limit);
    run_open(&run, options, NULL);
    if (named && !option_given(given, "seq-len") && !options->data.count)
        plan_longest_of_machine(&run, &planned, r.limit);
    if (options->sample_every) {
        Prompt prompt = prompt_from_options(&run);
        run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
        prompt_free(&prompt);
    }
    run_choose_length(&run, &planned, r.limit);
    PlanBound bound = plan_bound(&run, &data);
    pass_works = &works; // while `run` and `recommended` stay
    StepShape step = plan_step(&run, bound.whole);
    Batch shape = batch_shape(bound.part);
    const size_t documents = bound_documents(bound.part, options->seq_len);
    if (named && run.settings.optimizer && !estimate_missing(&run))
        recommendations_make(r.recommended = &recommended, &run, &shape, documents, r.limit, plan_step, bound.whole);
    train = run;
    settings_add_optimizer(&train.settings, options);
    if (!run.settings.optimizer) run_plan(&train, &shape, r.limit);
    r.train_bytes = train.plan.total_bytes;
    run_plan(&run, &shape, r.limit);
    note_attention(&run);
    const Search search = run_search(&run, r.limit);
    r.fits = plan_pressure(&run.plan, &search.limits) <= 1;
    if (r.limit) r.longest = run_longest(&run, documents, r.limit);
    for (; search.method && r.orders < 2; r.orders++)
        r.order[r.orders] = plan_order(&run, method_names[r.orders ? METHOD_SECO : METHOD_STREAM], &shape, documents,
                                       r.limit, r.machine, step);
    if (r.limit && !run.settings.optimizer) r.train_longest = run_longest(&train, documents, r.limit);
    if (r.machine) r.estimate = estimate_step(r.machine, &run.settings, &shape, step);
    pass_works = NULL;
    if (r.machine && !options->quiet)
        fputs("status   the GPU build has not run on hardware yet: seconds and tokens/s are estimates\n", run.text);
    report_run(&run, &data, bound.part, "");
    plan_result_text(&run, &r);
    if (r.recommended && !options->quiet) recommendations_print(run.text, r.recommended, r.machine);
    if (options->json) plan_result_json(&run, step, &r);
    if (options->seq_len <= run.model.config.max_position_embeddings) // else it was checked before
        check_positions(&run, r.longest, "the longest --seq-len");
    const int nothing = r.limit && !r.longest;
    if (nothing && !(options->json && options->quiet)) // the object says it
        die_no_length(&run, documents, r.limit, options->memory_limit ? "--memory-limit" : "what the card leaves");
    free(shape.document_start);
    if (options->data.count) dataloader_close(&data);
    if (r.recommended) recommendations_free(r.recommended, &run);
    run_close(&run);
    return nothing ? EXIT_RUNTIME : 0;
}

#endif
