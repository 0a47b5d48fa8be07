/*
Says what a plan holds. Refuses a plan that does not fit, with the options that would fit.
*/
#ifndef LLMC_ADVICE_H
#define LLMC_ADVICE_H
#include "keep_plan.h"

// Prints one line per region alive at the peak: its bytes, a bar of its share of the total, its name.
static void report_regions(FILE *out, const Arena *plan) {
    size_t smaller = 0; // bytes of regions below 1 %
    for (size_t i = 0; i < plan->regions_at_peak; i++) {
        const Region *region = &plan->at_peak[i];
        const double part = (double)region->bytes / (double)max_size(plan->peak, 1);
        const int width = (int)(part * 32 + 0.5);
        if (part < 0.01)
            smaller += region->bytes;
        else
            fprintf(out, "  %11s  %5.1f %%  %-*.*s%*s  %s\n", human_bytes((double)region->bytes), 100 * part, width,
                    width, "################################", 32 - width, "", region->name);
    }
    if (smaller)
        fprintf(out, "  %11s  %5.1f %%  %32s  smaller ones together\n", human_bytes((double)smaller),
                100 * (double)smaller / (double)plan->peak, "");
}

// The plan's tensors in a place, in words
static const char *placed_text(const Run *run, int place, char *text, size_t size) {
    const int keys = method_is_chunk_major(run->settings.method) || run->settings.context.window;
    const struct {
        Share share;
        const char *word;
    } kinds[PLACED] = {{keys ? SHARE_KV : SHARE_LAYER_INPUTS, keys ? "keys and values" : "inputs"},
                       {SHARE_WEIGHTS, "weights"},
                       {SHARE_GRADIENTS, "gradients"},
                       {SHARE_OPTIMIZER, "optimizer"},
                       {SHARE_KEPT, "kept activations"},
                       {SHARE_WEIGHTS, "reference"}};
    *text = 0;
    for (int kind = 0; kind < PLACED; kind++) {
        const size_t used = strlen(text), bytes = arena_share(&run->plan.arena[place], kinds[kind].share);
        const int again = kind == PLACED_REFERENCE && run->settings.place[PLACED_WEIGHTS] == (Place)place;
        if (run->settings.place[kind] == (Place)place && bytes && !again)
            snprintf(text + used, size - used, "%s%s %s", used ? ", " : "", kinds[kind].word,
                     human_bytes((double)bytes));
    }
    if (place == PLACE_HOST && run->plan.disk_bytes)
        snprintf(text + strlen(text), size - strlen(text), "%stransfers with the disk %s", *text ? ", " : "",
                 human_bytes((double)DISK_PIECES));
    return text;
}

// ---- where no length fits ------------------------------------------------------------------------------------------
#define RECOMMENDED_BYTES 1024 // bytes of the text

// Adds a line to `text` if some length of `trial` fits: the options to type, the longest length, and whether it is
// shorter than --seq-len.
static size_t recommend(const Run *trial, size_t B, size_t limit, const char *options, char *text) {
    const size_t longest = run_longest(trial, B, limit), used = strlen(text), wished = trial->options->seq_len;
    if (longest)
        snprintf(text + used, RECOMMENDED_BYTES - used,
                 longest < wished ? "\n  %-34s gives --seq-len %zu%s, not %zu" : "\n  %-34s gives --seq-len %zu%s",
                 options, longest, world_ranks(trial->settings.world) > 1 ? ", with as much memory for each rank" : "",
                 wished);
    return longest;
}

// Returns the GiB per node of `place` with which the length fits; 0: no amount suffices. Sets `o` to a command line
// with that amount.
static size_t place_needed(const Run *run, const Batch *shape, size_t limit, Place place, Options *o) {
    size_t *given = place == PLACE_HOST ? &o->host_limit : &o->disk_limit, least, most = 0;
    Run trial = *run;
    Choice *choices;
    *o = *run->options, *given = (size_t)1 << 62;
    trial.options = o;
    const Search search = run_search(&trial, limit);
    const Candidates all = candidates_make(&search);
    const double sharing = (double)*given / (double)search.limits.bytes[place];
    const size_t count = search_choices(&search, &all, shape, &choices, &least);
    for (size_t i = 0; i < count; i++)
        if (!most || choices[i].bytes[place] < most) most = choices[i].bytes[place];
    free(choices), free(all.candidate);
    most = (size_t)(sharing * (double)most / GIBIBYTE) + 1;
    *given = most << 30;
    return count ? most : 0;
}

// Recommends adapters, or a base in 4 bits for adapters.
static void recommend_adapters(const Run *run, size_t B, size_t limit, char *text) {
    const QuantFormat nf4_format = quant_format(QUANT_NF4, DTYPE_FP32);
    const int adapters = run->settings.lora != NULL;
    Run trial = *run;
    Lora lora = {0};
    Storage nf4;
    lora.rank = 32, lora.modules = lora_usual_modules(&run->model.config);
    lora_build(&lora, &run->model);
    if (!adapters) trial.settings.lora = &lora;
    trial.settings.reference = computed_reference(run->options, &trial.settings.objective, trial.settings.lora);
    if (run->storage.format) trial.settings.storage = &run->storage; // of an FP8 folder, which is not quantised again
    if (!adapters) recommend(&trial, B, limit, "--lora-rank 32", text);
    if (run->storage.format) {
        lora_free(&lora);
        return;
    }
    storage_choose(&nf4, &run->model, nf4_format, 0);
    trial.settings.storage = &nf4;
    recommend(&trial, B, limit, adapters ? "--base nf4" : "--lora-rank 32 --base nf4", text);
    storage_free(&nf4), lora_free(&lora);
}

// Recommends the fewest ranks that reach --seq-len when they share a sequence, or the most.
static void recommend_ranks(const Run *run, size_t B, size_t limit, char *text) {
    const Options *o = run->options;
    const World world = run->settings.world;
    const size_t ranks = world_ranks(world);
    char options[96];
    Run trial = *run;
    Options more;
    const int alone = o->method >= METHOD_MST && o->method <= METHOD_SPACO; // whose sequences ranks cannot share
    if (alone) more = *o, more.method = trial.settings.method = METHOD_STREAM, trial.options = &more;
    const int gpu = run_search(run, limit).limits.tables, deals = run->settings.deals;
    char *const end = text + strlen(text); // fewer ranks, if they do not reach --seq-len, leave no line
    for (size_t P = ranks; P <= 64 * ranks; P *= 2) {
        World *w = &trial.settings.world;
        w->ranks = P, w->rank = P - 1, w->zero = ZERO_WEIGHTS, w->sp = world_sp(world) * (P / ranks);
        snprintf(options, sizeof(options), "%s%zu%s --zero 3", o->verb == VERB_PLAN ? "--ranks " : "mpirun -n ", P,
                 o->verb == VERB_PLAN ? "" : " ...");
        if (w->sp > 1) snprintf(options + strlen(options), 32, " --sp %zu", w->sp);
        if (alone) strcat(options, " --method stream");
        const size_t more = gpu ? collectives_bytes(*w, deals) - collectives_bytes(world, deals) : 0;
        if (P == 1 || (P == ranks && world.zero == ZERO_WEIGHTS) || more >= limit) continue;
        *end = 0;
        if (recommend(&trial, B, limit - more, options, text) >= o->seq_len) return;
    }
}

// Lists what makes some length fit: bf16, host memory, a disk, adapters, a smaller optimizer, the fewest ranks that
// share a sequence.
static void recommendations(const Run *run, size_t B, size_t limit, char *text) {
    const Options *o = run->options;
    const RunSettings *s = &run->settings;
    char options[96];
    Run trial = *run;
    Options more;
    if (o->verb == VERB_PLAN && o->dtype == DTYPE_AUTO && run->model.dtype == DTYPE_FP32) {
        Run half;
        more = *o, more.dtype = DTYPE_BF16, more.quiet = 1;
        run_open(&half, &more, NULL);
        recommend(&half, B, limit, "--dtype bf16", text);
        run_close(&half);
    }
    Batch shape = batch_shape(random_bound(run, B, 1));
    for (int place = PLACE_HOST; place < PLACES && s->backward; place++) {
        const size_t gib = place_needed(run, &shape, limit, (Place)place, &more);
        if (!gib || (place == PLACE_DISK && o->verb != VERB_PLAN)) continue;
        snprintf(options, sizeof(options), "--%s-limit %zuGiB", place_names[place], gib);
        trial.options = &more;
        recommend(&trial, B, limit, options, text);
        trial = *run;
    }
    batch_free(&shape);
    if (s->backward && !s->storage) recommend_adapters(run, B, limit, text);
    if (s->optimizer && run->model.dtype != DTYPE_FP64 && (s->moment_type == DTYPE_FP32 || s->master)) {
        const int fewer = s->moment_type == DTYPE_INT8;
        trial.settings.moment_type = fewer ? DTYPE_INT8 : DTYPE_BF16, trial.settings.master = 0;
        recommend(&trial, B, limit, fewer ? "--master none" : "--moments bf16 --master none", text);
    }
    if (!o->rollout && option_accepted(&option_rows[option_find("zero")], o->verb))
        recommend_ranks(run, B, limit, text);
}

// Refuses a run that does not fit with one token per document.
__attribute__((noreturn)) static void die_no_length(const Run *run, size_t B, size_t limit, const char *whose) {
    char recommended[RECOMMENDED_BYTES] = "", parts[128] = "";
    Batch shape = batch_shape(regular_bound(B, 1));
    const Plan least = plan_make(&run->settings, &shape);
    batch_free(&shape);
    for (int share = SHARE_WEIGHTS; share <= SHARE_OPTIMIZER; share++)
        if (least.share[share])
            snprintf(parts + strlen(parts), sizeof(parts) - strlen(parts), "%s%s %s", *parts ? ", " : "",
                     share_names[share], human_bytes((double)least.share[share]));
    recommendations(run, B, limit, recommended);
    if (*recommended && is_main_rank()) fprintf(stderr, "what would fit%s\n", recommended);
    die("no length fits: %s is %s, and one token already needs %s (%s); take %s", whose, human_bytes((double)limit),
        human_bytes((double)least.total_bytes), parts,
        *recommended ? "one of the above" : "a smaller model or more memory");
}

// ---- the refusal ---------------------------------------------------------------------------------------------------
// Refuses a run that does not fit, before anything is allocated, and names options that would fit. B: documents of a
// sequence; 0: only generation
static void check_memory(const Run *run, size_t B, size_t limit, const char *whose) {
    static const char *const words[PLACES] = {"", "host memory", "disk space"};
    const Plan *plan = &run->plan;
    const Search search = run_search(run, limit);
    const size_t available = plan->host_bytes && search.limits.host ? search.limits.host(plan->total_bytes) : 0;
    size_t bytes[PLACES];
    plan_bytes(plan, bytes);
    const size_t longest = B && plan_pressure(plan, &search.limits) > 1 ? run_longest(run, B, limit) : 0;
    char text[160], length[48] = "no --seq-len fits";
    bytes[PLACE_DEVICE] += page_table_bytes(bytes, &search.limits);
    if (bytes[PLACE_DEVICE] > search.limits.bytes[PLACE_DEVICE]) {
        if (is_main_rank() && !run->options->quiet) report_regions(stderr, plan->arena);
        const char *needed = human_bytes((double)bytes[PLACE_DEVICE]), *most = human_bytes((double)limit);
        const size_t texts = run->settings.rollout_slots;
        if (!B)
            die("weights and key/value caches of %zu text%s of up to %zu tokens need %s, but %s is %s; shorten the "
                "prompt "
                "or --max-new-tokens%s",
                max_size(texts, 1), texts > 1 ? "s" : "",
                texts ? run->settings.rollout_tokens : run->settings.cache_tokens, needed, whose, most,
                texts > 1 ? ", or give fewer --slots" : "");
        if (!longest) die_no_length(run, B, limit, whose);
        Options more;
        Batch shape = batch_shape(random_bound(run, B, 1));
        const int hosted = search.places[PLACED_INPUTS] >> PLACE_HOST & 1; // 0: host memory was not asked for
        const size_t gib = hosted ? 0 : place_needed(run, &shape, limit, PLACE_HOST, &more);
        if (gib) snprintf(text, sizeof(text), ", and this one with --host-limit %zuGiB", gib);
        die("the plan needs %s, but %s is %s; with these options --seq-len %zu would fit%s", needed, whose, most,
            longest, gib ? text : "");
    }
    if (longest) snprintf(length, sizeof(length), "--seq-len %zu would fit", longest);
    for (int place = PLACE_HOST; place < PLACES; place++) {
        const size_t allowed = search.limits.bytes[place];
        const int taken = place == PLACE_HOST && available && available < allowed;
        const int kept = run->settings.place[PLACED_KEPT] == (Place)place && run->settings.keep.level;
        if (bytes[place] <= (taken ? available : allowed)) continue;
        die("the plan has %s in %s, but only %s are %s; %s%s%s", placed_text(run, place, text, sizeof(text)),
            words[place], human_bytes((double)(taken ? available : allowed)), taken ? "available" : "allowed", length,
            !kept                                      ? ""
            : run->options->keep_on.word == PLACE_AUTO ? ", or"
                                                       : ", or --keep-on device or",
            kept ? " --keep none" : "");
    }
}

#endif
