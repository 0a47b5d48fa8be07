/*
The verb `plan`: memory and FLOPs of a run, before anything is allocated; the longest sequence within a limit; on a
named machine also the estimated time of a step, other ways to train on it (ways.h), and the command. --verbose shows
all regions and rates.
*/
#ifndef LLMC_VERB_PLAN_H
#define LLMC_VERB_PLAN_H
#include "llmc/run/report.h"
#include "llmc/run/seq_len.h"
#include "llmc/generate/prompt.h"
#include "llmc/plan/flops.h"
#include "llmc/train/rollout_options.h"
#include "plan_lengths.h"
#include "plan_teacher.h"
#include "ways.h"

typedef struct {
    WayToTrain plan, ways[2 * PLACES], order[2];
    size_t ways_count;                 // ways in addition to the plan, for a training run on a named machine
    size_t orders;                     // plans that --method auto compares; 0: the method is named
    size_t train_bytes, train_longest; // bytes and longest sequence of training with the options of a pass
    WayBounds bounds;
    LengthsPlan lengths;  // lengths plan of --sp auto on a machine
    TeacherPlans teacher; // with --teacher
} PlanResult;

static SequenceBound plan_rollout(Run *run, const DataLoader *data) {
    Prompt text = {0};
    RolloutSettings settings = rollout_from_options(run, &text);
    free((uint32_t *)settings.end_ids);
    return rollout_plan(&settings, data, &run->settings, run->options->seq_len);
}

// Returns why there is no estimate of a step; NULL if there is one.
static const char *estimate_missing(const Run *run) {
    if (run->model.dtype != DTYPE_BF16) return "machines are known by their rates in bf16; plan with --dtype bf16";
    return run->options->rollout ? "it depends on how long texts become" : NULL;
}

// ---- as text -------------------------------------------------------------------------------------------------------
// Prints the machine's constants, and how a step's time divides among kinds of work.
static void plan_print_work(FILE *out, const Machine *m, const Estimate *e) {
    machine_print(out, m);
    fprintf(out, "work      estimated: products %.4g s, attention forward %.4g s, backward %.4g s, ", e->work.products,
            e->work.attention_forward, e->work.attention_backward);
    if (e->work.delta > 0) fprintf(out, "delta rule %.4g s, ", e->work.delta);
    fprintf(out, "bound by memory %.4g s, gaps between kernels %.4g s\n", e->work.memory, e->work.gaps);
    fprintf(out, "rates     %.4g TFLOP/s executed by each GPU; %.1f %% MFU counting T^2 pairs, as others often do\n",
            1e-12 * e->executed, 100 * e->mfu_full);
    if (e->communication > 1e-9 * e->seconds)
        fprintf(out, "moves     data alone for %.1f %% of the step\n", 100 * e->communication / e->seconds);
    if (e->counts.library_calls > 0)
        fprintf(out, "calls     of cuDNN %.0f a sequence, %s staged; %.2f %% of query-key pairs by our own kernels\n",
                e->counts.library_calls, human_bytes(e->counts.staged), 100 * own_share(&e->counts));
}

// Prints how much of each limit the plan takes.
static void plan_print_memory(FILE *out, const PlanResult *r) {
    const WayToTrain *w = &r->plan;
    const Options *o = w->run.options;
    const Machine *machine = option_given(o, "machine") ? machine_from_options(o) : NULL;
    const Search search = run_search(&w->run, r->bounds.limit);
    const size_t tables = page_table_bytes(w->bytes, &search.limits);
    if (!r->bounds.limit) {
        fprintf(out, "memory    %s%s", human_bytes((double)w->bytes[PLACE_DEVICE]),
                strcmp(ops_device->name, "cpu") || machine ? "" : " of the CPU (--machine CARD plans for a GPU)");
    } else {
        const int more = w->run.settings.keep.level > LEVEL_ATTENTION && w->run.needed < w->bytes[PLACE_DEVICE];
        fprintf(out, "fits      %s: %s of %s", w->fits ? "yes" : "no",
                human_bytes((double)(more ? w->run.needed : w->bytes[PLACE_DEVICE])),
                human_bytes((double)r->bounds.limit));
        if (more) fprintf(out, ", takes %s for speed (--keep none: less)", human_bytes((double)w->bytes[PLACE_DEVICE]));
        if (machine) fprintf(out, " (%s)", machine->gpu);
        if (!w->fits && tables) fprintf(out, " and %s of page tables", human_bytes((double)tables));
    }
    for (int place = PLACE_HOST; place < PLACES; place++) {
        if (!w->bytes[place]) continue;
        fprintf(out, ", %s %s", place_names[place], human_bytes((double)w->bytes[place]));
        if (search.limits.bytes[place] < SIZE_MAX)
            fprintf(out, " of %s", human_bytes((double)search.limits.bytes[place]));
        if (place == PLACE_HOST && !o->host_limit && machine && !machine->host_given)
            fprintf(out, " (%s)", machine_host_basis(machine));
    }
    if (w->run.settings.backward && !w->run.settings.optimizer) fputs(", for a pass without an optimizer update", out);
    fputc('\n', out);
    if (w->longest) fprintf(out, "longest   --seq-len %zu\n", w->longest);
}

// Returns the FLOPs that expand and fold latents, relative to attention's.
static double plan_latent_share(const PlanResult *r) {
    const OpCounts *c = &r->plan.run.plan.counts;
    return flops_expansion(&r->plan.run.settings, &r->bounds.shape) / (c->attention_forward + c->attention_backward);
}

// Returns the most tokens that a rollout's text draws.
static size_t plan_drawn(const Run *run) {
    const Options *o = run->options;
    return min_size(o->max_new_tokens * (o->environment_command ? o->max_turns : 1), run->settings.rollout_tokens);
}

// Returns the seconds of a token that a rollout draws for all slots, with texts of half their length; NAN: not known.
static double plan_token_seconds(const PlanResult *r) {
    const RunSettings *s = &r->plan.run.settings;
    const OpCounts *token = &r->plan.run.plan.token;
    const int known = r->bounds.machine && s->rollout_slots && token->launches > 0 &&
                      s->place[PLACED_WEIGHTS] == PLACE_DEVICE && s->model->dtype == DTYPE_BF16;
    return known ? token_seconds(r->bounds.machine, token) : NAN;
}

// Returns the seconds of drawing all tokens of a rollout, at their most; NAN: not known.
static double plan_sampling_seconds(const PlanResult *r) {
    const Run *run = &r->plan.run;
    const size_t replicas = world_replicas(run->settings.world), slots = max_size(run->settings.rollout_slots, 1);
    const size_t texts = (run->options->batch + replicas - 1) / replicas * run->options->group_size;
    return plan_token_seconds(r) * (double)plan_drawn(run) * (double)((texts + slots - 1) / slots);
}

static void plan_print_sampling(FILE *out, const PlanResult *r) {
    const Run *run = &r->plan.run;
    const double token = plan_token_seconds(r);
    if (isnan(token)) return;
    fprintf(out, "sampling  at most %.4g s a step, estimated: %zu tokens a text, %.3g ms for one of each of %zu texts",
            plan_sampling_seconds(r), plan_drawn(run), 1e3 * token, run->settings.rollout_slots);
    if (run->options->environment_command)
        fprintf(out, ", %.3g s a turn", token * (double)run->options->max_new_tokens);
    fputc('\n', out);
}

// Prints time, speed and the planner's choices.
static void plan_print_step(FILE *out, const PlanResult *r) {
    const Run *run = &r->plan.run;
    const RunSettings *s = &run->settings;
    const Estimate *e = &r->plan.estimate;
    const double tokens = (double)r->bounds.whole.N * (double)run->assignment.batches;
    const Machine *const m = machine_from_options(run->options);
    const char *const basis = m ? machine_basis(m, &run->model.config) : "";
    char seconds[32];
    if (r->lengths.levels)
        lengths_print(out, &r->lengths, basis);
    else if (e->seconds > 0)
        fprintf(out, "step      %s for %.0f tokens, estimated%s: %.0f tokens/s, %.0f %% MFU\n",
                way_seconds(&r->plan, seconds), tokens, basis, e->tokens_per_second, 100 * e->mfu);
    else
        fprintf(out, "step      %s a pass%s%s\n", human_flops(run->plan.counts.flops),
                r->bounds.no_estimate ? "; no time: " : "", r->bounds.no_estimate ? r->bounds.no_estimate : "");
    fprintf(out, "chosen    %s, %s", dtype_name(run->model.dtype), method_text(run));
    report_chunk(out, run);
    if (run->model.config.kv_lora_rank)
        fprintf(out, ", latents by %s (%.2g %% of attention's FLOPs)", latents_text(s), 100 * plan_latent_share(r));
    if (s->inputs_every > 1) fprintf(out, ", inputs of one layer in %zu", s->inputs_every);
    if (s->keep.level) fprintf(out, ", %s kept", keep_text(s));
    if (s->defers) fputs(", update in the next forward pass", out);
    if (s->rollout_slots) fprintf(out, ", %zu texts at a time", s->rollout_slots);
    if (r->bounds.divisions) fprintf(out, ", --zero %zu --sp %zu", s->world.zero, s->world.sp);
    fputc('\n', out);
    plan_print_sampling(out, r);
    if (world_ranks(s->world) <= 1 || !r->bounds.machine || s->deals) return;
    fputs("sent      by a rank in a step: ", out);
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++)
        fprintf(out, "%s%s %s", kind ? ", " : "", traffic_names[kind], human_bytes(e->sent.bytes[kind]));
    fputc('\n', out);
}

// Prints bytes and time of five points between recomputing all of a layer and nothing, on the device.
static void plan_print_scale(FILE *out, const PlanResult *r) {
    static const struct {
        KeepLevel level;
        size_t of; // 1 / the share of the layers
    } points[] = {{LEVEL_NONE, 1}, {LEVEL_ATTENTION, 1}, {LEVEL_PRODUCTS, 2}, {LEVEL_PRODUCTS, 1}, {LEVEL_ALL, 1}};
    const Run *run = &r->plan.run;
    RunSettings s = run->settings;
    if (!r->bounds.machine || r->bounds.no_estimate || s.method > METHOD_CHECKPOINT || world_sp(s.world) > 1 || s.deals)
        return;
    s.place[PLACED_KEPT] = PLACE_DEVICE;
    for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++) {
        const size_t L = run->model.config.num_hidden_layers;
        const Keeping keep = {points[i].level, points[i].of > 1 ? max_size(L / points[i].of, 1) : 0, 0};
        s.keep = keep;
        const Plan plan = plan_make(&s, &r->bounds.shape);
        const Estimate e = estimate_step(r->bounds.machine, &s, &r->bounds.shape, way_step(run, r->bounds.whole));
        fprintf(out, "%s %-12s %10s  %.3g s\n", i ? "        " : "--keep  ", keep_text(&s),
                human_bytes((double)plan.total_bytes), e.seconds);
    }
}

// Prints by how much the planned length exceeds the model's positions.
static void plan_print_positions(FILE *out, const Run *run) {
    const Config *c = &run->model.config;
    const size_t own = c->max_position_embeddings, most = run->options->seq_len;
    char scaling[32];
    if (most <= own || c->family->learned_positions) return;
    fprintf(out, "positions the model has seen %zu%s", own, config_can_scale(c) ? "; " : "\n");
    if (config_can_scale(c)) fprintf(out, "for %zu add --rope-scaling %s\n", most, scaling_text(c, most, scaling));
}

static void plan_print(const PlanResult *r, const DataLoader *data) {
    const Run *run = &r->plan.run;
    const Options *o = run->options;
    const WayToTrain *best = ways_best(r->ways, r->ways_count, &r->plan);
    char helps[RECOMMENDED_BYTES] = "";
    FILE *out = run->text;
    if (o->quiet && o->json) return;
    if (o->verbose) report_run(run, data, r->bounds.part, "");
    if (o->verbose && r->plan.estimate.seconds > 0) plan_print_work(out, r->bounds.machine, &r->plan.estimate);
    plan_print_memory(out, r);
    if (o->quiet) return;
    if (best && best != &r->plan) way_print(out, "instead", best);
    if (!o->verbose) report_places(out, run);
    if (!o->verbose) report_prefixes(out, run, data->shards ? data : NULL);
    if (!o->verbose) report_shared(out, run, &r->bounds.shape);
    plan_print_step(out, r);
    if (run->live) teacher_print(out, run, &r->teacher, (double)r->bounds.whole.N * (double)run->assignment.batches);
    if (o->verbose) plan_print_scale(out, r);
    if (run->settings.backward && !run->settings.optimizer) {
        fprintf(out, "train     the same options with an optimizer need %s", human_bytes((double)r->train_bytes));
        if (r->train_longest) fprintf(out, "; longest --seq-len %zu", r->train_longest);
        fputs(r->bounds.limit && !r->train_longest && !run->live ? "; no length fits\n" : "\n", out);
    }
    for (size_t i = 0, said = 0; i < r->orders + r->ways_count; i++) {
        const WayToTrain *w = i < r->orders ? &r->order[i] : &r->ways[i - r->orders];
        if (!w->is_plan && w != best) way_print(out, said++ ? "" : "also", w);
    }
    plan_print_positions(out, run);
    if (r->bounds.limit && r->plan.longest && !r->plan.fits)
        recommendations(run, r->bounds.documents, r->bounds.limit, helps);
    if (*helps) fprintf(out, "helps%s\n", helps);
    if (!best || !run->settings.optimizer || !option_given(o, "machine")) return;
    fputs("command   ", out);
    way_echo(out, best, 1);
}

// ---- as JSON -------------------------------------------------------------------------------------------------------
// Writes the estimate into an open object; null if there is none.
static void report_estimate_json(JsonOut *json, const Run *run, const Machine *machine, const Estimate *e) {
    static const char *const works[] = {"products", "attention_forward", "attention_backward", "delta", "memory",
                                        "gaps"};
    const double known = e->seconds > 0 ? 1 : NAN;
    report_world_json(json, run->settings.world, run->settings.deals ? NULL : &e->sent);
    json_text(json, "machine", machine->name);
    if (*machine_basis(machine, &run->model.config)) json_bool(json, "simulated_kernels", 1);
    json_number(json, "estimated_seconds", known * e->seconds);
    json_number(json, "estimated_tokens_per_second", known * e->tokens_per_second);
    json_number(json, "estimated_mfu", known * e->mfu);
    json_number(json, "communication_share", known * e->communication / e->seconds);
    json_number(json, "estimated_mfu_full_attention", known * e->mfu_full);
    json_number(json, "estimated_executed_tflops_per_s", known * 1e-12 * e->executed);
    json_number(json, "estimated_seconds_on_device", known * e->on_device);
    json_object(json, "estimated_work");
    for (size_t i = 0; i < 6; i++) json_number(json, works[i], known * ((const double *)&e->work)[i]);
    json_object_end(json);
    json_number(json, "attention_calls", e->counts.library_calls);
    json_number(json, "attention_staged_bytes", e->counts.staged);
    json_number(json, "attention_own_share", own_share(&e->counts));
}

static void plan_result_json(const PlanResult *r, const DataLoader *data) {
    const Run *run = &r->plan.run;
    const Machine *machine = machine_from_options(run->options);
    const StepShape step = way_step(run, r->bounds.whole);
    const double passes = (double)(step.sequences * world_ranks(run->settings.world));
    const size_t limit = r->bounds.limit;
    JsonOut json = json_open(stdout);
    if (r->ways_count) ways_json(&json, "ways", r->ways, r->ways_count, ways_best(r->ways, r->ways_count, &r->plan));
    if (r->orders) ways_json(&json, "orders", r->order, r->orders, NULL);
    report_places_json(&json, run);
    report_plan_json(&json, run->plan.arena);
    if (limit) {
        if (!run->live) json_size(&json, "max_seq_len", r->plan.longest);
        json_bool(&json, "fits", r->plan.fits);
    }
    if (run->live) teacher_json(&json, run, &r->teacher);
    json_bool(&json, "optimizer_update", run->settings.optimizer);
    if (run->settings.backward && !run->settings.optimizer) json_size(&json, "train_total_bytes", r->train_bytes);
    if (run->settings.backward && !run->settings.optimizer && limit && !run->live)
        json_size(&json, "train_max_seq_len", r->train_longest);
    if (limit || machine) json_size(&json, "usable_bytes", limit ? limit : machine_usable_bytes(machine));
    const size_t host = run_search(run, limit).limits.bytes[PLACE_HOST];
    if (host < SIZE_MAX) json_size(&json, "usable_host_bytes", host);
    report_work_json(&json, run, passes * run->plan.counts.flops, step.model_flops);
    if (run->model.config.kv_lora_rank) json_number(&json, "latent_share", plan_latent_share(r));
    if (r->bounds.shape.tree) report_shared_json(&json, data, &r->bounds.shape);
    if (machine) report_estimate_json(&json, run, machine, &r->plan.estimate);
    if (machine && run->settings.rollout_slots)
        json_number(&json, "estimated_sampling_seconds", plan_sampling_seconds(r));
    if (r->lengths.levels) lengths_json(&json, &r->lengths);
    json_finish(&json);
}

// ---- a text --------------------------------------------------------------------------------------------------------
// Plans `sample`: weights, and what a text of --max-context tokens keeps.
static int plan_sample(Run *run, size_t limit, const Machine *machine) {
    const Options *o = run->options;
    PlanResult r = {0};
    Batch shape = batch_shape(regular_bound(0, 0));
    char text[160];
    run->settings.cache_tokens = chat_tokens(run);
    run_plan(run, &shape, limit);
    batch_free(&shape);
    r.bounds.limit = limit, r.plan.run = *run;
    plan_bytes(&run->plan, r.plan.bytes);
    const Search search = run_search(run, limit);
    const OpCounts *const token = &run->plan.token;
    const int known = machine && token->launches > 0 && run->settings.place[PLACED_WEIGHTS] == PLACE_DEVICE;
    r.plan.fits = plan_pressure(&run->plan, &search.limits) <= 1;
    if (!o->quiet || !o->json) {
        plan_print_memory(run->text, &r);
        for (int place = PLACE_HOST; place < PLACES; place++)
            if (*placed_text(run, place, text, sizeof(text)))
                fprintf(run->text, "placed    %s: %s\n", place == PLACE_HOST ? "in host memory" : "on disk", text);
        fprintf(run->text, "text      %zu tokens\n", run->settings.cache_tokens);
        if (known)
            fprintf(run->text, "token     %.3g ms, the last one, estimated: %s read and written, %.0f kernels\n",
                    1e3 * token_seconds(machine, token), human_bytes(token->operands + token->moved), token->launches);
        if (o->verbose) report_regions(run->text, run->plan.arena);
    }
    if (!o->json) return 0;
    JsonOut json = json_open(stdout);
    report_places_json(&json, run);
    report_plan_json(&json, run->plan.arena);
    if (limit) json_bool(&json, "fits", r.plan.fits);
    json_size(&json, "max_context", run->settings.cache_tokens);
    if (known) json_number(&json, "token_seconds", token_seconds(machine, token));
    json_text(&json, "dtype", dtype_name(run->model.dtype));
    json_finish(&json);
    return 0;
}

// ---- the verb ------------------------------------------------------------------------------------------------------
// Tells whether shards exist. If they do not, documents of --seq-len are planned, so that a printed command can be
// planned.
static int plan_has_shards(const Options *o, const PathList *list) {
    glob_t found = {0};
    const int missing = !path_exists(list->path[0]) && glob(list->path[0], 0, NULL, &found);
    globfree(&found);
    if (missing && !o->quiet)
        note("no file matches '%s' yet: planned with documents of %zu tokens", list->path[0], o->seq_len);
    return !missing;
}

// Finds the largest micro-batch, and a rank's part of it.
static WayBounds plan_bounds(Run *run, DataLoader *data, size_t limit) {
    const Options *o = run->options;
    WayBounds bound = {.limit = limit};
    const int here = o->data.count && (o->rollout || plan_has_shards(o, &o->data));
    if (here) *data = run_open_data(run, &o->data, shuffle_from_options(o));
    bound.whole =
        here ? data->bound : random_bound(run, o->batch * sample_documents(o), o->samples ? 1 : run->assignment.parts);
    bound.part = o->rollout ? plan_rollout(run, data) : run_bound(run, here ? data : NULL);
    if (o->val_data.count && o->plan_for == VERB_TRAIN && plan_has_shards(o, &o->val_data)) {
        DataLoader validation = run_open_data(run, &o->val_data, SHUFFLE_OFF);
        if (here) dataloader_check_pair(data, &validation);
        if (o->rollout)
            plan_rollout(run, &validation); // validation may have longer texts
        else
            bound.part = larger_bound(bound.part, run_bound(run, &validation));
        dataloader_close(&validation);
    }
    if (here && data->rows < data->positions) // tokens of as many rows on average, for tokens/s
        bound.whole.N = (size_t)((double)bound_rows(bound.whole) * (double)data->positions / (double)data->rows);
    bound.shape = batch_shape(bound.part), bound.documents = bound_documents(run, bound.part, o->seq_len);
    bound.no_estimate = machine_from_options(o) ? estimate_missing(run) : NULL;
    bound.machine = machine_from_options(o);
    return bound;
}

// Returns the bytes of device memory that a rank may take; 0: no limit.
static size_t plan_limit(const Options *o) {
    const World world = {o->ranks, 0, 0, o->sp ? o->sp : o->ranks};
    const int named = option_given(o, "machine");
    const size_t limit = o->memory_limit || !named ? o->memory_limit : machine_usable_bytes(machine_from_options(o));
    return limit && (o->card || !o->memory_limit) ? limit - collectives_bytes(world, !o->sp) : limit;
}

// Finds the bounds of each --sp whose replicas can divide a batch, the largest first. Returns how many.
static size_t plan_divisions(const Options *o, WayBounds *division) {
    size_t count = 0;
    for (size_t sp = o->ranks; sp; sp = sp > 1 && sp % 2 ? 1 : sp / 2) {
        Options trial = *o;
        Run run;
        DataLoader data = {0};
        trial.sp = sp, trial.quiet = 1;
        run_open(&run, &trial, NULL);
        if (o->samples || o->batch % run.assignment.parts == 0) {
            division[count] = plan_bounds(&run, &data, plan_limit(&trial));
            division[count].assignment = run.assignment, division[count++].sp = sp;
        }
        if (data.shards) dataloader_close(&data);
        run_close(&run);
    }
    return count;
}

// Plans one of the two methods that --method auto compares.
static void plan_order(PlanResult *r, const char *method) {
    WayToTrain *w = &r->order[r->orders++];
    way_open(w, &r->plan.run, r->plan.run.settings.lora != NULL);
    option_type(&w->options, "method", method);
    w->run.settings.method = w->options.method;
    way_plan(w, &r->bounds);
    w->is_plan = w->run.settings.method == r->plan.run.settings.method;
}

// Sets --seq-len to the longest that fits; if full training never fits, to LoRA's.
static void plan_longest_of_machine(const Run *run, Options *o, size_t limit) {
    const size_t documents = run_bound(run, NULL).documents;
    size_t longest = run_longest(run, documents, limit);
    if (!longest && !run->settings.lora) {
        WayToTrain adapters;
        way_open(&adapters, run, 1);
        longest = run_longest(&adapters.run, documents, limit);
        way_close(&adapters, run);
    }
    if (longest) option_type_size(o, "seq-len", longest);
}

// Adapts the options of a plan. A card in --memory-limit is a machine without host memory; a machine computes in bf16;
// a preset's name is in small letters.
static void options_of_plan(Options *o) {
    static char machine[32], init[1024];
    for (size_t i = 0; o->init && strlen(o->init) < sizeof(init) && i < PRESETS; i++) {
        const size_t length = strlen(presets[i].name);
        if (strcspn(o->init, ",") == length && !strncasecmp(o->init, presets[i].name, length) && o->init != init)
            snprintf(init, sizeof(init), "%s%s", presets[i].name, o->init + length), o->init = init;
    }
    snprintf(machine, sizeof(machine), "%s,host=0", o->card ? machines[o->card - 1].name : "");
    if (o->card && !option_given(o, "machine")) option_type(o, "machine", machine);
    if (option_given(o, "machine") && o->dtype == DTYPE_AUTO) option_type(o, "dtype", "bf16");
}

// Chooses --seq-len. Refuses --lengths that no step deals, or that are longer.
static void plan_choose_length(Run *run, Options *o, const Lengths *lengths, size_t limit) {
    const int named = option_given(o, "machine");
    if (lengths->count && !option_given(o, "seq-len")) option_type_size(o, "seq-len", lengths->longest);
    if (named && !option_given(o, "seq-len") && !o->data.count && !o->teacher)
        plan_longest_of_machine(run, o, limit); // a teacher's memory would depend on the length
    if (o->sample_every) {
        Prompt prompt = prompt_from_options(run);
        run->settings.cache_tokens = prompt_cache_tokens(&prompt, o);
        prompt_free(&prompt);
    }
    run_choose_length(run, o, limit);
    if (lengths->count && !(run->settings.deals && machine_from_options(o) && !estimate_missing(run) && !o->data.count))
        die_usage("--lengths needs --sp auto, --ranks 2 or more and --machine, and excludes --data");
    if (lengths->longest > o->seq_len)
        die_usage("--lengths: a document has %zu tokens, but --seq-len is %zu; give a longer --seq-len",
                  lengths->longest, o->seq_len);
}

// Plans training with the options of a pass.
static void plan_training(PlanResult *r, const Run *run, size_t limit) {
    Run train = *run;
    Options trains = *run->options;
    trains.plan_for = VERB_TRAIN, train.options = &trains;
    settings_add_optimizer(&train.settings, run->options);
    run_plan(&train, &r->bounds.shape, limit);
    r->train_bytes = train.plan.total_bytes;
    if (limit && !run->live) r->train_longest = run_longest(&train, r->bounds.documents, limit);
}

static int verb_plan(const Options *given) {
    static PlanResult r;
    static PassWorks works;
    WayBounds division[DEAL_LEVELS];
    Run run;
    DataLoader data = {0};
    Options planned = *given, *const o = &planned;
    options_of_plan(o);
    const int named = option_given(o, "machine");
    const Machine *machine = machine_from_options(o);
    const int divides = named && o->ranks > 1 && !option_given(o, "zero") && !option_given(o, "sp") && !o->rollout &&
                        o->plan_for == VERB_TRAIN && o->dtype == DTYPE_BF16 && o->method < METHOD_MST && !o->teacher;
    if (divides)
        o->zero = ZERO_WEIGHTS, o->sp = o->ranks; // takes the division with the longest sequences; way_plan
                                                  // compares the others
    Lengths lengths = lengths_open(o);
    size_t limit = plan_limit(o);
    memset(&r, 0, sizeof(r)), works.count = 0;
    if (o->teacher && ((!o->model && !o->init) || (o->plan_for != VERB_TRAIN && o->plan_for != VERB_BP)))
        die_usage("--teacher: plans a student's training; give the student with --model or --init, and no --for");
    if (!o->model && !o->init) return plan_presets(o, machine, limit);
    run_open(&run, o, NULL);
    if (o->plan_for == VERB_SAMPLE) {
        const int status = plan_sample(&run, limit, machine);
        run_close(&run);
        return status;
    }
    if (limit && !o->quiet && o->dtype == DTYPE_AUTO && run.model.dtype != DTYPE_BF16)
        note("planned in %s; to plan for a GPU, give --machine CARD or --dtype bf16", dtype_name(run.model.dtype));
    plan_choose_length(&run, o, &lengths, limit);
    r.bounds = plan_bounds(&run, &data, limit);
    pass_works = &works; // valid while `run` and the ways exist
    if (o->teacher) plan_teachers(&r.teacher, &run, o, data.shards ? &data : NULL, &r.bounds);
    limit = r.bounds.limit;
    if (divides) r.bounds.division = division, r.bounds.divisions = plan_divisions(o, division);
    way_open(&r.plan, &run, run.settings.lora != NULL);
    way_plan(&r.plan, &r.bounds);
    r.plan.is_plan = 1, r.bounds.limit = r.plan.bounds->limit;
    note_attention(&r.plan.run);
    for (int seco = 0; run_search(&run, limit).method && seco < 2; seco++)
        plan_order(&r, method_names[seco ? METHOD_SECO : METHOD_STREAM]);
    if (r.plan.run.table.lengths && machine && !r.bounds.no_estimate)
        r.lengths = lengths_plan(&r.plan.run, machine, &data, lengths, &r.bounds.shape);
    if (named && run.settings.optimizer && !r.bounds.no_estimate && !run.settings.deals)
        r.ways_count = ways_find(r.ways, &r.plan, &run, &r.bounds);
    if (!run.settings.optimizer && run.settings.backward) plan_training(&r, &run, limit);
    pass_works = NULL;
    free(lengths.length);
    plan_print(&r, &data);
    if (o->json) plan_result_json(&r, data.segments ? &data : NULL);
    const int nothing =
        limit && !r.plan.longest && !(o->teacher && run_longest(&r.plan.run, r.bounds.documents, limit));
    if (nothing && !(o->json && o->quiet)) // with --json the object says it
        die_no_length(&r.plan.run, r.bounds.documents, limit,
                      o->memory_limit ? "--memory-limit" : "what the card leaves");
    batch_free(&r.bounds.shape);
    for (size_t i = 0; i < r.bounds.divisions; i++) batch_free(&division[i].shape);
    if (data.shards) dataloader_close(&data);
    for (size_t i = 0; i < r.ways_count; i++) way_close(&r.ways[i], &run);
    run_close(&run);
    return nothing ? EXIT_RUNTIME : 0;
}

#endif
