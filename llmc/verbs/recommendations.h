/*
What can be trained on a machine, for people who choose one: all weights or adapters, on the device alone, with host
memory, with a disk. Each has the planner's places (estimate/choose.h), memory, the estimated time of a step and the
longest sequence. One is recommended, with a command line that names every choice. Without a model: the longest sequence
of each preset.
*/
#ifndef LLMC_RECOMMENDATIONS_H
#define LLMC_RECOMMENDATIONS_H
#include "llmc/cli/report.h"

#define RECOMMENDED_RANK "16" // of adapters, unless --lora-rank says another

typedef struct {
    size_t longest;      // tokens
    Place uses;          // and the places before it
    int fits;            // the planned length; if not, what follows is empty
    Candidate candidate; // the fastest that fits
    RunSettings settings;
    size_t bytes[PLACES];
    Estimate estimate; // of a step
} Recommendation;

// All weights, or adapters
typedef struct {
    Options options;
    Run run; // its model is the planned run's
    StepShape step;
    Recommendation row[PLACES];
    size_t rows;
} Trained;

typedef struct {
    Trained trained[2];
    size_t count;
    const Trained *best; // recommended, and its row; NULL: none fits
    const Recommendation *best_row;
} Recommendations; // members point into each other

// ---- making them ---------------------------------------------------------------------------------------------------
// Sets an option as if it had been typed.
static void option_type(Options *o, const char *typed, const char *value) {
    char name[64];
    const int i = option_find(option_name(typed, name));
    if (i < 0 || !option_set(&option_rows[i], o, value)) die("internal: --%s %s is not allowed", typed, value);
    o->given[i] = 1;
}

static void option_type_size(Options *o, const char *typed, size_t value) {
    char text[32];
    snprintf(text, sizeof(text), "%zu", value);
    option_type(o, typed, text);
}

// Takes settings that fit and are faster by 1 % than the row's.
static void recommendation_take(const Trained *t, Recommendation *row, const Search *search, const Batch *shape,
                                RunSettings settings) {
    const Plan plan = plan_make(&settings, shape);
    const Estimate estimate = estimate_step(search->machine, &settings, shape, t->step);
    if (row->fits && (plan_pressure(&plan, &search->limits) > 1 || estimate.seconds > 0.99 * row->estimate.seconds))
        return;
    row->fits = 1, row->settings = settings, row->estimate = estimate;
    plan_bytes(&plan, row->bytes);
}

// Adds a row for the device, for host memory and for a disk, if it allows a faster step or a sequence longer by 1 %
// than the row before.
static void trained_search(Trained *t, const Batch *shape, size_t documents, size_t limit) {
    const Search search = run_search(&t->run, limit);
    for (int uses = 0; uses < PLACES; uses++) {
        const Recommendation *before = t->rows ? &t->row[t->rows - 1] : NULL;
        Search within = search;
        Recommendation row = {0};
        Choice *choices;
        size_t least;
        for (int kind = 0; kind < PLACED; kind++) within.places[kind] &= (2u << uses) - 1;
        const Candidates all = candidates_make(&within);
        const size_t count = search_choices(&within, &all, shape, &choices, &least);
        row.uses = (Place)uses;
        if (count) row.candidate = all.candidate[choices[0].candidate];
        free(choices), free(all.candidate);
        if (count && run_take(&t->run, &within, shape, &row.candidate)) {
            recommendation_take(t, &row, &within, shape, t->run.settings);
            RunSettings defers = row.settings;
            defers.defers = 1;
            if (!option_given(&t->options, "update")) recommendation_take(t, &row, &within, shape, defers);
        }
        if (within.keep) within.keep = within.open.keep = 0; // nothing is longer with it
        row.longest = search_longest(&within, documents);
        const int more = !before || memcmp(&row.candidate, &before->candidate, sizeof(row.candidate)) != 0 ||
                         0.99 * (double)row.longest > (double)before->longest;
        if (row.longest && more) t->row[t->rows++] = row;
    }
}

// Copies a run to train adapters, or all weights.
static void trained_open(Trained *t, const Run *run, int lora) {
    memset(t, 0, sizeof(*t));
    t->options = *run->options, t->run = *run, t->run.options = &t->options;
    if (lora && !run->settings.lora) option_type(&t->options, "lora-rank", RECOMMENDED_RANK), run_open_lora(&t->run);
    if (!lora) t->options.lora_rank = 0, t->options.given[option_find("lora-rank")] = 0;
    for (size_t i = 0; !lora && i < OF_OPTIONS; i++)
        if (!strcmp(of_options[i].needs, "lora-rank")) t->options.given[option_find(of_options[i].option)] = 0;
    if (!lora && run->settings.storage) { // trains what it decodes
        t->run.settings.storage = NULL;
        option_type(&t->options, "base", "none");
        t->options.quantise_head = 0, t->options.given[option_find("quantise-head")] = 0;
    }
    if (!option_given(run->options, "keep")) option_type(&t->options, "keep", "auto");
    t->run.attention = attention_library(&t->run);
    if (!lora) t->run.settings.lora = NULL;
    if (lora && !run->settings.lora) t->run.settings.lora = &t->run.lora;
    t->run.settings.reference = computed_reference(&t->options, &t->run.settings.objective, t->run.settings.lora);
}

// Plans all weights and adapters, or the adapters of --adapter alone. run: not yet planned; shape, documents: of a
// rank's micro-batch; limit: of device memory; step: of a run whose micro-batch is `whole`
static void recommendations_make(Recommendations *all, const Run *run, const Batch *shape, size_t documents,
                                 size_t limit, StepShape (*step)(const Run *, SequenceBound), SequenceBound whole) {
    const int adapters = run->settings.lora != NULL;
    memset(all, 0, sizeof(*all));
    for (int lora = run->options->adapter != NULL; lora < 2; lora++) {
        Trained *t = &all->trained[all->count++];
        trained_open(t, run, lora);
        t->step = step(&t->run, whole);
        trained_search(t, shape, documents, limit);
    }
    for (size_t turn = 0; turn < all->count && !all->best; turn++) { // first what the options say
        const Trained *t = &all->trained[all->count > 1 && adapters ? 1 - turn : turn];
        for (size_t k = 0; k < t->rows; k++)
            if (t->row[k].fits && (!all->best || t->row[k].estimate.seconds < 0.99 * all->best_row->estimate.seconds))
                all->best = t, all->best_row = &t->row[k];
    }
}

static void recommendations_free(Recommendations *all, const Run *run) {
    for (size_t i = 0; i < all->count && !run->settings.lora; i++)
        if (all->trained[i].run.settings.lora) lora_free(&all->trained[i].run.lora);
}

// ---- the command line ----------------------------------------------------------------------------------------------
// Returns the command line of a training run that names what the planner chose. The caller frees it.
static char *recommendation_command(const Trained *t, const RunSettings *s) {
    Options o = t->options;
    char *text = NULL, *to;
    size_t length;
    static const char *const not_of_it[] = {"json", "quiet", "verbose", "machine"};
    for (size_t i = 0; i < 4; i++) o.given[option_find(not_of_it[i])] = 0;
    o.verb = VERB_TRAIN;
    option_type_size(&o, "seq-len", o.seq_len);
    for (int kind = 0; kind < PLACED; kind++)
        if (is_placed(s, kind)) option_type(&o, placed_names[kind], place_names[s->place[kind]]);
    if (s->inputs_every > 1) option_type_size(&o, "inputs-every", s->inputs_every);
    if (option_given(&o, "method")) option_type(&o, "method", method_names[s->method]);
    option_type(&o, "keep", s->keep ? "attention" : "none");
    if (s->defers) option_type(&o, "update", "forward");
    if (world_sp(s->world) > 1) option_type(&o, "kv", s->ring ? "ring" : "gather");
    FILE *file = open_memstream(&text, &length);
    if (!file) die("out of memory for a command line");
    if (world_ranks(s->world) > 1) fprintf(file, "mpirun -n %zu ", world_ranks(s->world));
    options_echo(file, &o);
    fclose(file);
    to = text;
    for (const char *from = text; *from; from++) // on one line
        if (!strncmp(from, " \\\n   ", 6))
            from += 5;
        else if (*from != '\n')
            *to++ = *from;
    *to = 0;
    return text;
}

// ---- printing them -------------------------------------------------------------------------------------------------
static void recommendation_print(FILE *out, const Trained *t, const Recommendation *row, int best) {
    const RunSettings *s = &row->settings;
    const Estimate *e = &row->estimate;
    char trained[16] = "full", inputs[16], optimizer[16];
    if (t->run.settings.lora)
        snprintf(trained, sizeof(trained), "%sLoRA %d", t->run.settings.storage ? "Q" : "", (int)t->run.lora.rank);
    fprintf(out, "%c %-8s %-6s", best ? '*' : ' ', trained, place_names[row->uses]);
    if (!row->fits) {
        fprintf(out, "  %-84s %10zu\n", "this length does not fit", row->longest);
        return;
    }
    const char *place = place_names[s->place[PLACED_INPUTS]];
    if (method_is_chunk_major(s->method))
        snprintf(inputs, sizeof(inputs), "%s/%.*s", method_names[s->method], *place == 'd' ? 3 : 4, place);
    else
        snprintf(inputs, sizeof(inputs), s->inputs_every > 1 ? "%s/%d" : "%s", place, (int)s->inputs_every);
    snprintf(optimizer, sizeof(optimizer), "%s%s", place_names[s->place[PLACED_OPTIMIZER]], s->defers ? "/fwd" : "");
    fprintf(out, "  %-9s %-7s %-9s %-9s %-6s %6.1f %6.1f %6.1f %*.*f %8.0f %3.0f %% %10zu\n", inputs,
            place_names[s->place[PLACED_WEIGHTS]], place_names[s->place[PLACED_GRADIENTS]], optimizer,
            s->keep ? place_names[s->place[PLACED_KEPT]] : "-", (double)row->bytes[PLACE_DEVICE] / GIBIBYTE,
            (double)row->bytes[PLACE_HOST] / GIBIBYTE, (double)row->bytes[PLACE_DISK] / GIBIBYTE, 8,
            e->seconds < 1     ? 4
            : e->seconds < 100 ? 2
                               : 0,
            e->seconds, e->tokens_per_second, 100 * e->mfu, row->longest);
}

static void recommendations_print(FILE *out, const Recommendations *all, const Machine *m) {
    fprintf(out, "ways     to train with an %s, host memory and a disk; times are estimated, longest is --seq-len\n",
            m->gpu);
    fputs(
        "  trained  with    inputs    weights gradients optimizer kept   device   host   disk GiB s/step tokens/s   MFU"
        "    longest\n",
        out);
    for (size_t i = 0; i < all->count; i++) {
        const Trained *t = &all->trained[i];
        for (size_t k = 0; k < t->rows; k++) recommendation_print(out, t, &t->row[k], &t->row[k] == all->best_row);
        if (!t->rows) fprintf(out, "  %-8s no length fits\n", t->run.settings.lora ? "LoRA" : "full");
    }
    if (!all->best) return;
    char *command = recommendation_command(all->best, &all->best_row->settings);
    fprintf(out, "train    * with --data, --out%s: %s\n",
            all->best_row->bytes[PLACE_DISK] && !all->best->options.disk ? ", --disk" : "", command);
    free(command);
}

static void recommendations_json(JsonOut *json, const Recommendations *all) {
    json_array(json, "ways");
    for (size_t i = 0; i < all->count; i++)
        for (size_t k = 0; k < all->trained[i].rows; k++) {
            const Trained *t = &all->trained[i];
            const Recommendation *row = &t->row[k];
            const RunSettings *s = &row->settings;
            json_object(json, NULL);
            json_text(json, "trained", t->run.settings.lora ? "lora" : "full");
            json_size(json, "lora_rank", t->run.settings.lora ? t->run.lora.rank : 0);
            json_bool(json, "base_in_4_bits", t->run.settings.storage != NULL);
            json_text(json, "with", place_names[row->uses]);
            json_size(json, "max_seq_len", row->longest);
            json_bool(json, "fits", row->fits);
            json_bool(json, "recommended", row == all->best_row);
            if (row->fits) {
                char *command = recommendation_command(t, s);
                json_object(json, "placed");
                for (int kind = 0; kind < PLACED; kind++)
                    if (is_placed(s, kind)) json_text(json, placed_names[kind], place_names[s->place[kind]]);
                json_object_end(json);
                json_text(json, "method", method_names[s->method]);
                json_size(json, "inputs_every", max_size(s->inputs_every, 1));
                json_text(json, "keep", s->keep ? "attention" : "none");
                json_text(json, "update", s->defers ? "forward" : "now");
                json_size(json, "total_bytes", row->bytes[PLACE_DEVICE]);
                json_size(json, "host_bytes", row->bytes[PLACE_HOST]);
                json_size(json, "disk_bytes", row->bytes[PLACE_DISK]);
                json_number(json, "estimated_seconds", row->estimate.seconds);
                json_number(json, "estimated_tokens_per_second", row->estimate.tokens_per_second);
                json_number(json, "estimated_mfu", row->estimate.mfu);
                json_text(json, "command", command);
                free(command);
            }
            json_object_end(json);
        }
    json_array_end(json);
}

// ---- without a model -----------------------------------------------------------------------------------------------
// Prints each preset's longest sequence on a machine, of all weights and of adapters.
static int plan_presets(const Options *options, const Machine *m, size_t limit) {
    JsonOut json = {0};
    if (options->json) {
        json = json_open(stdout);
        json_text(&json, "machine", m->name);
        json_size(&json, "usable_bytes", limit);
        json_array(&json, "presets");
    } else {
        machine_print(stdout, m);
        printf("presets  longest sequence on an %s, in tokens\n%-20s %12s %12s %16s\n", m->gpu, "  --init",
               "parameters", "all weights", "LoRA of rank " RECOMMENDED_RANK);
    }
    for (size_t i = 0; i < PRESETS; i++) {
        Options o = *options;
        Run run;
        Trained trained;
        size_t longest[2];
        option_type(&o, "init", presets[i].name);
        if (!o.inputs_every) option_type(&o, "inputs-every", "1"); // sparser ones are for those who ask
        run_open(&run, &o, NULL);
        for (int lora = 0; lora < 2; lora++) {
            trained_open(&trained, &run, lora);
            longest[lora] = run_longest(&trained.run, o.batch * sample_documents(&o), limit);
            if (lora && !run.settings.lora) lora_free(&trained.run.lora);
        }
        if (options->json) {
            json_object(&json, NULL);
            json_text(&json, "name", presets[i].name);
            json_size(&json, "parameters", run.model.elements);
            json_size(&json, "max_seq_len", longest[0]);
            json_size(&json, "lora_max_seq_len", longest[1]);
            json_object_end(&json);
        } else {
            printf("  %-18s %12s %12zu %16zu\n", presets[i].name, human_count((double)run.model.elements), longest[0],
                   longest[1]);
        }
        run_close(&run);
    }
    if (options->json) {
        json_array_end(&json);
        json_finish(&json);
    }
    return 0;
}

#endif
