/*
`plan --sp auto`: what deals (llmc/data/deal.h) make of steps of given lengths, by the estimate of the planned machine,
beside the best fixed --sp. Lengths are those of --data, of a file, drawn from a distribution, or all --seq-len.

A step ends with its slowest rank. Where every pass has collectives of all ranks (--zero 2, 3), passes begin together,
and each takes as long as the slowest rank's. A fixed --sp is dealt and packed in the same way, but to groups of one
size.
*/
#ifndef LLMC_PLAN_LENGTHS_H
#define LLMC_PLAN_LENGTHS_H
#include "llmc/cli/report.h"

#define LENGTHS_STEPS 20

typedef struct {
    uint32_t *length; // [count] of documents
    size_t count, longest;
} Lengths;

// Sums over steps, of --sp auto or of one level
typedef struct {
    double seconds, mean, bound;                     // s: of steps, of the average rank, no deal takes less
    double groups[DEAL_LEVELS], tokens[DEAL_LEVELS]; // of each level: sequences, their tokens
    double *rank;                                    // [ranks] s, of the first step
} LengthsSum;

typedef struct {
    LengthsSum dealt, fixed[DEAL_LEVELS + 1]; // fixed: no rank where a level does not hold the longest
    size_t best;                              // the fixed level of least seconds; of all levels: none has any
    double besides, tokens;                   // s of a step besides its passes; tokens of all steps
} LengthsPlan;

// ---- lengths --------------------------------------------------------------------------------------------------------
// Draws from "lognormal,median=M,sigma=S,max=L[,count=N]".
static void lengths_draw(Lengths *all, const Options *o) {
    static const char *const keys[] = {"median", "sigma", "max", "count"};
    double value[4] = {0, 0, 0, 100000};
    for (const char *text = strchr(o->lengths, ','); text; text = strchr(text, ',')) {
        char number[32];
        size_t k = 0, name = strcspn(++text, "=,");
        while (k < 4 && (strlen(keys[k]) != name || strncmp(keys[k], text, name) != 0)) k++;
        snprintf(number, sizeof(number), "%.*s", (int)strcspn(text + name, ",") - 1, text + name + 1);
        if (k == 4 || !parse_double(number, &value[k]) || !(value[k] >= (k == 1 ? 0 : 1) && value[k] <= INT32_MAX))
            die_usage("--lengths: '%.32s' is not median=M, sigma=S, max=L or count=N", text);
    }
    if (value[0] == 0 || value[2] == 0) die_usage("--lengths lognormal: give its median=M, sigma=S and max=L");
    all->count = (size_t)value[3];
    all->length = (uint32_t *)checked_calloc(all->count, sizeof(uint32_t), "lengths");
    for (size_t i = 0; i < all->count; i++) {
        const double radius = sqrt(-2 * log(1 - random_uniform(o->seed, 1, i)));
        const double normal = radius * cos(6.283185307179586 * random_uniform(o->seed, 2, i));
        all->length[i] = (uint32_t)fmin(fmax(value[0] * exp(value[1] * normal), 1), value[2]);
    }
}

// Reads a length a line.
static void lengths_read(Lengths *all, const Options *o) {
    size_t bytes, value;
    char *text = input_read_text(o->lengths, (size_t)1 << 30, &bytes), *rest = text, *word;
    all->length = (uint32_t *)checked_calloc(bytes / 2 + 1, sizeof(uint32_t), o->lengths);
    while ((word = strsep(&rest, "\n")) && (*word || rest)) {
        if (!parse_size(word, &value) || !value || value > INT32_MAX)
            die("%s:%zu: '%.32s' is not a length; give one number of tokens a line", o->lengths, all->count + 1, word);
        all->length[all->count++] = (uint32_t)value;
    }
    if (!all->count) die("%s: has no lengths; give one number of tokens a line", o->lengths);
    free(text);
}

static Lengths lengths_open(const Options *o) {
    Lengths all = {0};
    if (o->lengths && !strncmp(o->lengths, "lognormal", 9) && (!o->lengths[9] || o->lengths[9] == ','))
        lengths_draw(&all, o);
    else if (o->lengths)
        lengths_read(&all, o);
    for (size_t i = 0; i < all.count; i++) all.longest = max_size(all.longest, all.length[i]);
    return all;
}

// ---- steps ----------------------------------------------------------------------------------------------------------
// Deals a step of lengths, each drawn from all.
static void lengths_deal(StepDeal *s, const Lengths *all, size_t samples, size_t seed, size_t step) {
    const size_t levels = s->table->levels.levels;
    Deal *d = &s->deal;
    d->samples = samples;
    for (size_t j = 0; j < samples; j++)
        s->item[j].positions = all->length[random_below(seed, 3, step * samples + j, all->count)];
    packing_sort(s->item, s->spare, samples);
    for (size_t j = 0; j < samples; j++) {
        d->positions[j] = s->item[j].positions;
        for (size_t k = 0; k < levels; k++)
            d->seconds[j * levels + k] = deal_table_seconds(s->table, d->positions[j], k);
    }
    deal_make(d);
}

// Adds a step that is dealt, and in the first the seconds of each rank.
static void lengths_add(LengthsSum *sum, const StepDeal *s, int first) {
    const Deal *d = &s->deal;
    const DealLevels *l = &d->levels;
    const DealSummary summary = deal_summary(d);
    for (size_t q = 0; q < d->sequences; q++) {
        const DealGroup *g = &d->group[d->to[q]];
        const size_t S = l->level[g->level].ranks, rank = (d->to[q] - l->level[g->level].first) * S;
        for (size_t r = rank; first && r < rank + S; r++) sum->rank[r] += deal_sequence_seconds(d, q);
        sum->groups[g->level]++;
        for (uint32_t i = d->begin[q]; i < d->begin[q + 1]; i++) sum->tokens[g->level] += d->positions[d->order[i]];
    }
    sum->seconds += d->load, sum->mean += summary.mean, sum->bound += d->bound;
}

// Plans steps of the data, of lengths, or (none) of documents of --seq-len.
static LengthsPlan lengths_plan(const Run *run, const Machine *m, DataLoader *data, Lengths all, const Batch *shape) {
    const Options *o = run->options;
    const DealLevels *l = &run->table.levels;
    const PassWork work = pass_work(m, &run->settings, shape);
    uint32_t seq_len = (uint32_t)o->seq_len;
    const Lengths equal = {&seq_len, 1, seq_len};
    const size_t samples = o->samples ? o->samples : o->batch * o->grad_accum;
    double *rank = (double *)checked_calloc((l->levels + 1) * l->ranks, sizeof(double), "loads of ranks");
    StepDeal s = {0};
    LengthsPlan p = {.best = l->levels};
    if (!all.count) all = equal;
    if (o->data.count) all.longest = dataloader_part_bound(data, 1).longest;
    p.besides = step_seconds(m, &run->settings, &work, &run->plan.moved, 1) -
                sequence_seconds(m, &run->settings, &work, &run->plan.moved, &work.other);
    p.dealt.rank = rank + l->levels * l->ranks;
    step_deal_allocate(&s, &run->table, o->data.count ? max_size(samples, data->samples) : samples);
    uint64_t at = 0;
    for (size_t step = 0; step < LENGTHS_STEPS; step++) {
        const size_t count = o->data.count && data->packing.step ? dataloader_step(data, at) : run->assignment.batches;
        if (o->data.count)
            step_deal_make(&s, data, at, count, 0), at = dataloader_after(data, at, count);
        else
            lengths_deal(&s, &all, samples, o->seed, step);
        lengths_add(&p.dealt, &s, !step);
        for (size_t i = 0; i < s.deal.samples; i++) p.tokens += s.deal.positions[i];
        for (size_t k = 0; k < l->levels; k++) {
            if (l->level[k].capacity < all.longest) continue;
            for (size_t j = 0; j < l->levels; j++) s.deal.levels.level[j].capacity = j == k ? l->level[j].capacity : 0;
            p.fixed[k].rank = rank + k * l->ranks;
            deal_make(&s.deal);
            lengths_add(&p.fixed[k], &s, !step);
        }
        s.deal.levels = *l;
    }
    step_deal_free(&s);
    for (size_t k = l->levels; k-- > 0;)
        if (p.fixed[k].rank && (p.best == l->levels || p.fixed[k].seconds <= p.fixed[p.best].seconds)) p.best = k;
    return p;
}

// ---- results --------------------------------------------------------------------------------------------------------
// Returns the seconds of an average step; NAN: a level does not hold the longest.
static double lengths_seconds(const LengthsPlan *p, const LengthsSum *sum) {
    return sum->rank ? sum->seconds / LENGTHS_STEPS + p->besides : NAN;
}

static void lengths_print(FILE *out, const LengthsPlan *p, const DealLevels *l, size_t longest) {
    const LengthsSum *d = &p->dealt, *best = &p->fixed[p->best];
    const double seconds = lengths_seconds(p, d), tokens = p->tokens / LENGTHS_STEPS, fixed = lengths_seconds(p, best);
    if (!l->levels && longest)
        fprintf(out, "groups    none holds the longest document; %zu tokens would fit\n", longest);
    for (size_t k = 0; k < l->levels; k++)
        fprintf(out, "%-9s of %zu rank%s: %zu tokens fit", k ? "" : "groups", l->level[k].ranks, k ? "s" : "",
                l->level[k].capacity),
            fprintf(out, tokens > 0 ? "; a step has %.3g, with %.0f %% of the tokens\n" : "\n",
                    d->groups[k] / LENGTHS_STEPS, 100 * d->tokens[k] / p->tokens);
    if (tokens == 0) return;
    fprintf(out,
            "step      %.3g s for %.0f tokens, estimated: %.0f tokens/s; %.0f %% of the bound, ranks %.0f %% loaded\n",
            seconds, tokens, tokens / seconds, 100 * d->bound / d->seconds, 100 * d->mean / d->seconds);
    if (best->rank)
        fprintf(out, "fixed     --sp %zu, the best: %.3g s, %.0f tokens/s; auto is %.3g times as fast\n",
                l->level[p->best].ranks, fixed, tokens / fixed, fixed / seconds);
}

static void lengths_json(JsonOut *json, const LengthsPlan *p, const DealLevels *l) {
    const LengthsSum *d = &p->dealt, *best = &p->fixed[p->best];
    const double seconds = lengths_seconds(p, d), tokens = p->tokens / LENGTHS_STEPS, fixed = lengths_seconds(p, best);
    json_array(json, "levels");
    for (size_t k = 0; k < l->levels; k++) {
        json_object(json, NULL);
        json_size(json, "sp", l->level[k].ranks);
        json_size(json, "max_tokens", l->level[k].capacity);
        json_number(json, "begin_seconds", l->level[k].begin);
        json_number(json, "sequences", d->groups[k] / LENGTHS_STEPS);
        json_number(json, "token_share", d->tokens[k] / p->tokens);
        json_number(json, "fixed_seconds", lengths_seconds(p, &p->fixed[k]));
        json_object_end(json);
    }
    json_array_end(json);
    if (tokens == 0) return;
    json_size(json, "step_tokens", (size_t)tokens);
    json_number(json, "step_seconds", seconds);
    json_number(json, "step_tokens_per_second", tokens / seconds);
    json_number(json, "deal_balance", d->mean / d->seconds);
    json_number(json, "deal_bound", d->bound / d->seconds);
    json_numbers(json, "rank_seconds", d->rank, l->ranks);
    if (!best->rank) return;
    json_size(json, "fixed_sp", l->level[p->best].ranks);
    json_number(json, "fixed_seconds", fixed);
    json_number(json, "fixed_tokens_per_second", tokens / fixed);
    json_numbers(json, "fixed_rank_seconds", best->rank, l->ranks);
    json_number(json, "gain", fixed / seconds);
}

#endif
