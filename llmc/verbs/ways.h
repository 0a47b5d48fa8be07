/*
Ways to train: all weights or adapters, with the device alone, with host memory, with a disk. A way is a run whose open
choices the planner takes (run_plan), with its bytes, longest sequence and estimated step. way_plan makes everything
that `plan` prints: the plan itself, other ways to train, and the table of presets.
*/
#ifndef LLMC_WAYS_H
#define LLMC_WAYS_H
#include "llmc/run/report.h"

#define RECOMMENDED_RANK "16"    // rank of adapters, unless --lora-rank gives another
#define PRESETS_LENGTH   "32768" // tokens of the step that the table of presets times, unless --seq-len is given

typedef struct {
    Options options;
    Run run;     // the run; its model is the planned run's
    Place uses;  // the last place that it may use; it may also use the places before
    int fits;    // 1: the planned length fits
    int is_plan; // 1: this is the plan itself
    size_t longest, bytes[PLACES];
    Estimate estimate;              // estimate of a step; seconds 0: none
    const struct WayBounds *bounds; // bounds of its --sp
} WayToTrain;

// What ways to train have in common
typedef struct WayBounds {
    SequenceBound whole, part;        // the largest micro-batch; a rank's part of it
    Batch shape;                      // shape of the part
    size_t documents, limit;          // documents of --seq-len tokens in `whole`; bytes of device memory, 0: no limit
    const Machine *machine;           // NULL: no time is estimated
    const char *no_estimate;          // why a machine has no estimate; NULL: it has one
    Assignment assignment;            // assignment of a step's micro-batches
    size_t sp;                        // ranks that share a sequence
    const struct WayBounds *division; // [divisions] bounds of each --sp to compare
    size_t divisions;                 // 0: --zero and --sp are fixed
    double teacher_seconds;           // of a step: passes of a teacher that runs with the student (plan_teacher.h)
} WayBounds;

// ---- making ways ---------------------------------------------------------------------------------------------------
// Sets an option as if the user had typed it.
static void option_type(Options *o, const char *typed, const char *value) {
    char name[64];
    const int i = option_find(option_name(typed, name));
    if (i < 0 || !option_set(&option_rows[i], o, value))
        die("internal: --%s %s is not allowed; please report it", typed, value);
    o->given[i] = 1;
}

static void option_type_size(Options *o, const char *typed, size_t value) {
    char text[32];
    snprintf(text, sizeof(text), "%zu", value);
    option_type(o, typed, text);
}

static void option_leave(Options *o, const char *name) { o->given[option_find(name)] = 0; }

// Returns the counts of a step of all ranks.
static StepShape way_step(const Run *run, SequenceBound whole) {
    const double batches = (double)run->assignment.batches;
    Batch shape = batch_shape(whole);
    StepShape step;
    step.sequences = assigned_batches(run->assignment);
    step.tokens = batches * (double)shape.N;
    step.model_flops = batches * pass_model_flops(model_flops, &run->settings, &shape);
    step.full_flops = batches * pass_model_flops(model_flops_full_attention, &run->settings, &shape);
    batch_free(&shape);
    return step;
}

// Adds seconds of other work to the estimate of a step.
static void estimate_add(Estimate *e, double seconds) {
    const double share = e->seconds / (e->seconds + seconds);
    e->seconds += seconds, e->on_device += seconds, e->tokens_per_second *= share;
    e->mfu *= share, e->mfu_full *= share, e->executed *= share;
}

// Takes the planner's choices for w->run within the places that it may use. Returns the pressure of the plan.
static double way_choose(WayToTrain *w, const WayBounds *b) {
    w->bounds = b, w->run.barred = ~((2u << w->uses) - 1);
    if (w->run.settings.deals)
        run_plan_levels(&w->run, &b->shape, b->part, b->limit);
    else
        run_plan(&w->run, &b->shape, b->limit);
    const Search search = run_search(&w->run, b->limit);
    const double pressure = plan_pressure(&w->run.plan, &search.limits);
    w->fits = pressure <= 1;
    plan_bytes(&w->run.plan, w->bytes);
    if (b->machine) w->estimate = estimate_step(b->machine, &w->run.settings, &b->shape, way_step(&w->run, b->whole));
    if (b->teacher_seconds > 0) estimate_add(&w->estimate, b->teacher_seconds);
    if (!w->fits || b->no_estimate || w->run.settings.deals) w->estimate.seconds = 0; // keeps the estimate's traffic
    return pressure;
}

// Plans a way. Compares each --sp with each stage of ZeRO and keeps the fastest plan that fits.
static void way_plan(WayToTrain *w, const WayBounds *b) {
    const WayToTrain open = *w;
    double least = b->divisions ? INFINITY : way_choose(w, b);
    for (size_t i = 0; i < 3 * b->divisions; i++) { // tries ZeRO's stages 1 to 3: stage 0 is never faster
        const WayBounds *division = &b->division[i / 3];
        WayToTrain trial = open;
        trial.run.options = &trial.options, trial.run.assignment = division->assignment;
        option_type_size(&trial.options, "zero", 1 + i % 3), option_type_size(&trial.options, "sp", division->sp);
        trial.run.settings.world = world_from_options(&trial.options);
        const double pressure = way_choose(&trial, division);
        if (pressure <= 1 && least <= 1 ? trial.estimate.seconds >= w->estimate.seconds : pressure >= least) continue;
        *w = trial, w->run.options = &w->options, least = pressure;
    }
    const int known = w->bounds->limit && !w->run.live; // a longer sequence needs more memory for a teacher, too
    w->longest = known ? run_longest(&w->run, w->bounds->documents, w->bounds->limit) : 0;
}

// Copies a run so that it trains adapters, or all weights.
static void way_open(WayToTrain *w, const Run *run, int lora) {
    memset(w, 0, sizeof(*w));
    w->uses = PLACE_DISK;
    w->options = *run->options, w->run = *run, w->run.options = &w->options;
    if (lora && !run->settings.lora) option_type(&w->options, "lora-rank", RECOMMENDED_RANK), run_open_lora(&w->run);
    if (!lora) w->options.lora_rank = 0, option_leave(&w->options, "lora-rank");
    for (size_t i = 0; !lora && i < OF_OPTIONS; i++)
        if (!strcmp(of_options[i].needs, "lora-rank")) option_leave(&w->options, of_options[i].option);
    if (!lora && run->settings.storage && run->settings.backward) { // full training trains decoded weights
        w->run.settings.storage = NULL;
        option_type(&w->options, "base", "none");
        w->options.quantise_head = 0, option_leave(&w->options, "quantise-head");
    }
    if (!lora) w->run.settings.lora = NULL;
    if (lora && !run->settings.lora) w->run.settings.lora = &w->run.lora;
    if (lora && run->storage.format) w->run.settings.storage = &run->storage;
    w->run.settings.reference = computed_reference(&w->options, &w->run.settings.objective, w->run.settings.lora);
}

static void way_close(WayToTrain *w, const Run *run) {
    if (w->run.settings.lora && !run->settings.lora) lora_free(&w->run.lora);
}

// Tells whether a way deserves a line after others of the same kind: its step is faster by 1 %, or its sequence longer
// by 1 %. A way does not if options force its tensors into a place beyond w->uses.
static int way_adds(const WayToTrain *w, const WayToTrain *before) {
    for (int place = w->uses + 1; place < PLACES; place++)
        if (w->bytes[place]) return 0;
    if (!w->longest && !w->fits) return 0;
    return !before || (w->fits && (!before->fits || w->estimate.seconds < 0.99 * before->estimate.seconds)) ||
           0.99 * (double)w->longest > (double)before->longest;
}

// Finds ways to train, in addition to the plan: with all weights and with adapters, or only the adapters of --adapter.
// Returns how many.
static size_t ways_find(WayToTrain *ways, const WayToTrain *plan, const Run *run, const WayBounds *b) {
    size_t count = 0;
    for (int lora = run->options->adapter != NULL; lora < 2; lora++) {
        const WayToTrain *before = NULL;
        const int same = (run->settings.lora != NULL) == lora;
        for (int uses = 0; uses < PLACES; uses++) {
            WayToTrain *w = &ways[count];
            way_open(w, run, lora);
            w->uses = (Place)uses;
            way_plan(w, b);
            w->is_plan = same && w->fits == plan->fits && !memcmp(w->bytes, plan->bytes, sizeof(w->bytes));
            if (way_adds(w, before))
                before = w, count++;
            else
                way_close(w, run);
        }
    }
    return count;
}

// Returns the way that `plan` recommends: the plan itself if it fits, else the fastest way that fits. NULL: none fits
static const WayToTrain *ways_best(const WayToTrain *ways, size_t count, const WayToTrain *plan) {
    const WayToTrain *best = plan->fits ? plan : NULL;
    for (size_t i = 0; i < count && !plan->fits; i++)
        if (ways[i].fits && (!best || ways[i].estimate.seconds < best->estimate.seconds)) best = &ways[i];
    return best;
}

// ---- the command line ----------------------------------------------------------------------------------------------
// Returns the hub's name of a preset; NULL: this is none.
static const char *preset_hub_name(const char *preset) {
    for (size_t i = 0; preset && i < PRESETS; i++)
        if (!strcmp(presets[i].name, preset)) return presets[i].hub;
    return NULL;
}

// Prints the command line of a training run that names what the planner chose.
static void way_echo(FILE *out, const WayToTrain *w, int wrap) {
    static const char *const not_of_it[] = {"json", "quiet", "verbose", "machine", "memory-limit", "ranks", "lengths"};
    static const char *const shards[] = {"shards/train-*.bin"};
    const RunSettings *s = &w->run.settings;
    const char *hub = preset_hub_name(w->options.init), *teacher = preset_hub_name(w->options.teacher);
    const Config *c = &w->run.model.config;
    char scaling[32];
    Options o = w->options;
    for (size_t i = 0; i < sizeof(not_of_it) / sizeof(*not_of_it); i++) option_leave(&o, not_of_it[i]);
    o.verb = VERB_TRAIN;
    if (hub) option_leave(&o, "init"), option_type(&o, "model", hub);
    if (teacher) option_type(&o, "teacher", teacher);
    if (!o.data.count) o.data.path = shards, o.data.count = 1, o.given[option_find("data")] = 1;
    if (!option_given(&o, "out")) option_type(&o, "out", "run");
    if ((w->bytes[PLACE_DISK] || o.teacher_on == PLACE_DISK) && !o.disk) option_type(&o, "disk", ".");
    option_type_size(&o, "seq-len", o.seq_len);
    if (o.seq_len > c->max_position_embeddings && config_can_scale(c))
        option_type(&o, "rope-scaling", scaling_text(c, o.seq_len, scaling));
    for (int kind = 0; kind < PLACED; kind++)
        if (is_placed(s, kind))
            option_type(&o, placed_names[kind], kind == PLACED_KEPT ? keep_on_text(s) : place_names[s->place[kind]]);
    option_type_size(&o, "inputs-every", max_size(s->inputs_every, 1));
    if (method_is_chunk_major(s->method)) option_leave(&o, "inputs-every");
    if (option_given(&o, "method")) option_type(&o, "method", method_names[s->method]);
    if (method_has_chunks(s->method)) {
        // chunks as planned, not cut to the sequence, since slices of an update and attention's workspace depend on
        // them
        option_type_size(&o, "chunk", s->chunk ? s->chunk : w->run.plan.chunk);
        option_type_size(&o, "logits-chunk", s->logits_chunk ? s->logits_chunk : w->run.plan.logits_chunk);
    }
    if (c->kv_lora_rank) option_type(&o, "latents", latents_text(s));
    option_type(&o, "keep", keep_text(s));
    option_type(&o, "update", s->defers ? "forward" : "now");
    if (world_sp(s->world) > 1) option_type(&o, "kv", s->ring ? "ring" : "gather");
    if (world_ranks(s->world) > 1) fprintf(out, "mpirun -n %zu ", world_ranks(s->world));
    options_echo(out, &o, wrap);
}

// Returns way_echo's command on one line. The caller frees it.
static char *way_command(const WayToTrain *w) {
    char *text = NULL;
    size_t length;
    FILE *file = open_memstream(&text, &length);
    if (!file) die("out of memory for a command line; free some memory");
    way_echo(file, w, 0);
    if (ferror(file) | fclose(file) || !text) die("out of memory for a command line; free some memory");
    text[length - 1] = 0; // drops the line end
    return text;
}

// ---- printing ways -------------------------------------------------------------------------------------------------
#define WAY_NAME 96

// Writes a way's name: "all weights, device alone", "QLoRA of rank 16, with host memory". Adds the method if it is not
// the default.
static const char *way_name(const WayToTrain *w, char text[WAY_NAME]) {
    static const char *const with[PLACES] = {"device alone", "with host memory", "with a disk"};
    const RunSettings *s = &w->run.settings;
    const int other = s->method != METHOD_STREAM;
    char trained[32] = "all weights";
    if (s->lora)
        snprintf(trained, sizeof(trained), "%sLoRA of rank %zu", s->storage ? "Q" : "", (size_t)w->run.lora.rank);
    snprintf(text, WAY_NAME, w->bounds->sp ? "%s, %s%s%s, --zero %zu --sp %zu" : "%s, %s%s%s", trained, with[w->uses],
             other ? ", " : "", other ? method_names[s->method] : "", s->world.zero, s->world.sp);
    return text;
}

// Writes the bytes of a way: "19.2 GiB, host 56.7 GiB"
static const char *way_bytes(const WayToTrain *w, char text[96]) {
    snprintf(text, 96, "%s", human_bytes((double)w->bytes[PLACE_DEVICE]));
    for (int place = PLACE_HOST; place < PLACES; place++)
        if (w->bytes[place])
            snprintf(text + strlen(text), 96 - strlen(text), ", %s %s", place_names[place],
                     human_bytes((double)w->bytes[place]));
    return text;
}

// Writes seconds with three digits, for a table.
static const char *way_seconds(const WayToTrain *w, char text[32]) {
    snprintf(text, 32, w->estimate.seconds < 1000 ? "%.3g s" : "%.0f s", w->estimate.seconds);
    return text;
}

static void way_print(FILE *out, const char *head, const WayToTrain *w) {
    char name[WAY_NAME], bytes[96], seconds[32];
    fprintf(out, "%-9s %s: ", head, way_name(w, name));
    if (w->fits && w->estimate.seconds > 0)
        fprintf(out, "%s, %.0f tokens/s, ", way_seconds(w, seconds), w->estimate.tokens_per_second);
    fputs(w->fits ? way_bytes(w, bytes) : "does not fit", out);
    if (w->longest) fprintf(out, "; longest %zu", w->longest);
    fputc('\n', out);
}

static void ways_json(JsonOut *json, const char *key, const WayToTrain *ways, size_t count, const WayToTrain *best) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) {
        const WayToTrain *w = &ways[i];
        const RunSettings *s = &w->run.settings;
        json_object(json, NULL);
        json_text(json, "trained", s->lora ? "lora" : "full");
        json_size(json, "lora_rank", s->lora ? w->run.lora.rank : 0);
        json_bool(json, "base_in_4_bits", s->storage && quant_bits(s->storage->type) == 4);
        json_text(json, "with", place_names[w->uses]);
        json_size(json, "max_seq_len", w->longest);
        json_bool(json, "fits", w->fits);
        json_bool(json, "recommended", w == best || (w->is_plan && best && best->is_plan));
        json_text(json, "method", method_names[s->method]);
        json_size(json, "total_bytes", w->bytes[PLACE_DEVICE]);
        json_size(json, "host_bytes", w->bytes[PLACE_HOST]);
        json_size(json, "disk_bytes", w->bytes[PLACE_DISK]);
        json_number(json, "estimated_seconds", w->estimate.seconds > 0 ? w->estimate.seconds : NAN);
        if (w->fits && s->optimizer) {
            char *command = way_command(w);
            json_object(json, "placed");
            for (int kind = 0; kind < PLACED; kind++)
                if (is_placed(s, kind)) json_text(json, placed_names[kind], place_names[s->place[kind]]);
            json_object_end(json);
            json_size(json, "chunk", w->run.plan.chunk);
            json_size(json, "inputs_every", max_size(s->inputs_every, 1));
            json_text(json, "keep", keep_text(s));
            json_text(json, "keep_on", keep_on_text(s));
            json_text(json, "update", s->defers ? "forward" : "now");
            json_number(json, "estimated_tokens_per_second", w->estimate.tokens_per_second);
            json_number(json, "estimated_mfu", w->estimate.mfu);
            json_text(json, "command", command);
            free(command);
        }
        json_object_end(json);
    }
    json_array_end(json);
}

// ---- without a model -----------------------------------------------------------------------------------------------
// Writes tokens in a form that --seq-len reads, "728k", "1.18M", rounded down.
static const char *tokens_text(size_t tokens, char text[32]) {
    const int mega = tokens >= 1 << 20;
    const double value = floor(100 * (double)tokens / (mega ? 1 << 20 : 1024)) / 100;
    if (tokens < 1024)
        snprintf(text, 32, tokens ? "%zu" : "-", tokens);
    else
        snprintf(text, 32, mega ? "%.2fM" : "%.0fk", mega ? value : floor(value));
    return text;
}

// Writes a preset's row. ways: of all weights, of adapters
static void presets_row(JsonOut *json, const char *name, const Run *run, const WayToTrain ways[2]) {
    const size_t positions = run->model.config.max_position_embeddings;
    char text[4][32];
    if (run->options->json) {
        json_object(json, NULL);
        json_text(json, "name", name);
        json_size(json, "parameters", run->model.elements);
        json_size(json, "positions", positions);
        json_size(json, "max_seq_len", ways[0].longest);
        json_number(json, "estimated_seconds", ways[0].fits ? ways[0].estimate.seconds : NAN);
        json_size(json, "lora_max_seq_len", ways[1].longest);
        json_number(json, "lora_estimated_seconds", ways[1].fits ? ways[1].estimate.seconds : NAN);
        json_object_end(json);
        return;
    }
    for (int lora = 0; lora < 2; lora++)
        snprintf(text[lora], 32, ways[lora].fits ? "%.3g" : "-", ways[lora].estimate.seconds);
    printf("  %-16s %10s %10zu | %12s %9s | %12s %8s\n", name, human_count((double)run->model.elements), positions,
           tokens_text(ways[0].longest, text[2]), text[0], tokens_text(ways[1].longest, text[3]), text[1]);
}

// Prints each preset's longest sequence on a machine and the time of a step, of all weights and of adapters.
static int plan_presets(const Options *options, const Machine *m, size_t limit) {
    JsonOut json = {0};
    char memory[80] = "";
    Options named = *options;
    if (!options->quiet) note("planning %zu presets takes about half a minute", (size_t)PRESETS);
    if (m->host_gib > 0 && !options->host_limit)
        snprintf(memory, sizeof(memory), ", host %s (%s)", human_bytes(machine_host_gib(m, 1) * GIBIBYTE),
                 machine_host_basis(m));
    if (!option_given(options, "seq-len")) option_type(&named, "seq-len", PRESETS_LENGTH);
    option_leave(&named, "lora-rank"), option_leave(&named, "lora-alpha");
    named.lora_rank = 0, named.rope_scaling = NULL; // options that belong to one model
    named.samples = 0, named.batch = 1, named.grad_accum = 1;
    if (options->json) {
        json = json_open(stdout);
        json_text(&json, "machine", m->name);
        json_size(&json, "usable_bytes", limit);
        json_size(&json, "seq_len", named.seq_len);
        json_array(&json, "presets");
    } else {
        printf("presets   longest --seq-len on %zu x %s%s; estimated s of %zu tokens%s\n", options->ranks, m->gpu,
               memory, named.seq_len, machine_simulated(m) ? ", by simulated kernels" : "");
        printf("  %-16s %10s %10s | %12s %9s | %-12s %8s\n", "--init", "parameters", "positions", "all weights", "s",
               "LoRA rank " RECOMMENDED_RANK, "s");
    }
    for (size_t i = 0; i < PRESETS; i++) {
        Options o = named;
        Run run;
        WayToTrain ways[2];
        option_type(&o, "init", presets[i].name);
        o.seq_len = 1;
        run_open(&run, &o, NULL);
        const size_t positions = run.model.config.max_position_embeddings;
        o.seq_len = run.model.config.family->learned_positions ? min_size(named.seq_len, positions) : named.seq_len;
        WayBounds b = {.limit = limit, .machine = m};
        b.whole = b.part = run_bound(&run, NULL);
        b.documents = bound_documents(&run, b.part, o.seq_len), b.shape = batch_shape(b.part);
        for (int lora = 0; lora < 2; lora++) {
            way_open(&ways[lora], &run, lora);
            way_plan(&ways[lora], &b);
            way_close(&ways[lora], &run);
        }
        batch_free(&b.shape);
        presets_row(&json, presets[i].name, &run, ways);
        run_close(&run);
    }
    if (options->json) {
        json_array_end(&json);
        json_finish(&json);
    }
    return 0;
}

#endif
