/*
`plan --sp auto`: what deals (llmc/data/deal.h) make of steps of given lengths, by the estimate of the planned machine,
beside the best fixed --sp. Lengths are those of --data, of a file, drawn from a distribution, or all --seq-len.

A step ends with its slowest rank. Where every pass has collectives of all ranks (--zero 2, 3), passes begin together,
and each takes as long as the slowest rank's. A fixed --sp packs by first-fit, or into as many sequences as its groups
take in equal turns, the longest samples first; then it deals the sequences of most seconds first.
*/
#ifndef LLMC_PLAN_LENGTHS_H
#define LLMC_PLAN_LENGTHS_H
#include "llmc/cli/report.h"

#define LENGTHS_STEPS 20

typedef struct {
    uint32_t *length; // [count] of documents
    size_t count, longest;
} Lengths;

// Averages over steps
typedef struct {
    size_t steps, fixed;                  // fixed: the level of the best fixed --sp; of all levels: none holds all
    double tokens, load, mean, bound;     // s: the slowest rank, the average one, the deals' bound
    double seconds, fixed_seconds[DEAL_LEVELS]; // of a step, with `besides`; 0: does not hold the longest
    double besides;                       // s: of the optimizer, and what only the last pass sends
    double groups[DEAL_LEVELS], sequences[DEAL_LEVELS], share[DEAL_LEVELS]; // of each level; share: of tokens
    double *rank[2];                      // [ranks] s, of the first step: dealt, fixed
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

// Adds a deal's step. load: [ranks] of each
static void lengths_add(LengthsPlan *p, const StepDeal *s, double *load) {
    const Deal *d = &s->deal;
    const DealLevels *l = &d->levels;
    const DealSummary summary = deal_summary(d);
    double turns = 0, slowest = 1;
    for (size_t t = 0; slowest > 0; t++, turns += slowest) {
        slowest = 0;
        for (size_t r = 0; r < l->ranks; r++) {
            const DealtPass pass = step_deal_pass(s, r, t);
            size_t k = 0;
            if (pass.sequence == d->sequences) continue;
            while (l->level[k].ranks != pass.sp) k++;
            double seconds = l->level[k].begin;
            for (uint32_t i = d->begin[pass.sequence]; i < d->begin[pass.sequence + 1]; i++)
                seconds += deal_seconds(d, d->order[i], k);
            slowest = fmax(slowest, seconds), load[r] += seconds;
        }
    }
    p->seconds += s->table->in_step ? turns : d->load;
    p->load += d->load, p->mean += summary.mean, p->bound += d->bound;
    for (const DealGroup *g = d->group; g < d->group + l->groups; g++) {
        p->groups[g->level] += g->sequences > 0, p->sequences[g->level] += (double)g->sequences;
        p->share[g->level] += (double)g->positions;
    }
    for (size_t i = 0; i < d->samples; i++) p->tokens += d->positions[i];
}

// Packs the samples of a step for groups of level k: by first-fit, or (bins > 0) into that many sequences, each into
// the one of least seconds with room. Returns the sequences; 0: they are too few.
static size_t fixed_pack(const Deal *d, size_t k, size_t bins, double *seconds, size_t *room) {
    size_t sequences = bins;
    for (size_t s = 0; s < max_size(bins, d->samples); s++) seconds[s] = 0, room[s] = d->levels.level[k].capacity;
    for (size_t i = 0; i < d->samples; i++) {
        size_t found = SIZE_MAX;
        for (size_t s = 0; s < (bins ? bins : d->samples) && (bins || found == SIZE_MAX); s++)
            if (room[s] >= d->positions[i] && (found == SIZE_MAX || seconds[s] < seconds[found])) found = s;
        if (found == SIZE_MAX) return 0;
        seconds[found] += deal_seconds(d, i, k), room[found] -= d->positions[i];
        sequences = max_size(sequences, found + 1);
    }
    for (size_t s = 0; s < sequences; s++)
        if (seconds[s] > 0) seconds[s] += d->levels.level[k].begin;
    return sequences;
}

// Deals sequences to the groups of level k, those of most seconds first. Returns the step's seconds. load: of each
// group
static double fixed_deal(const StepDeal *s, size_t k, double *seconds, size_t sequences, double *load) {
    const size_t groups = s->deal.levels.ranks / s->deal.levels.level[k].ranks;
    double turns = 0, most = 0;
    qsort(seconds, sequences, sizeof(double), compare_doubles);
    memset(load, 0, groups * sizeof(double));
    for (size_t i = 0; i < sequences; i++) {
        const double next = seconds[sequences - 1 - i];
        size_t least = s->table->in_step ? i % groups : 0;
        for (size_t g = 1; g < groups && !s->table->in_step; g++)
            if (load[g] < load[least]) least = g;
        if (i % groups == 0) turns += next;
        load[least] += next, most = fmax(most, load[least]);
    }
    return s->table->in_step ? turns : most;
}

// Returns the seconds of a step on groups of level k alone. load: [ranks]
static double fixed_seconds(const StepDeal *s, size_t k, double *load) {
    const Deal *d = &s->deal;
    const size_t S = d->levels.level[k].ranks, groups = d->levels.ranks / S, most = d->samples + 2 * groups;
    double *seconds = (double *)checked_calloc(most + groups, sizeof(double), "lengths"), *other = seconds + most;
    size_t *room = (size_t *)checked_calloc(most, sizeof(size_t), "lengths"), sequences = fixed_pack(d, k, 0, seconds, room);
    double least = fixed_deal(s, k, seconds, sequences, load);
    size_t bins = (sequences + groups - 1) / groups * groups;
    if (!(sequences = fixed_pack(d, k, bins, seconds, room))) sequences = fixed_pack(d, k, bins += groups, seconds, room);
    const double even = sequences ? fixed_deal(s, k, seconds, sequences, other) : INFINITY;
    if (even < least) least = even, memcpy(load, other, groups * sizeof(double));
    for (size_t r = d->levels.ranks; r-- > 0;) load[r] = load[r / S];
    free(seconds), free(room);
    return least;
}

// Plans steps of the data, of lengths, or (none) of documents of --seq-len. Returns steps 0 where a length fits no group
static LengthsPlan lengths_plan(const Run *run, const Machine *m, DataLoader *data, Lengths *all, const Batch *shape) {
    const Options *o = run->options;
    const RunSettings *settings = &run->settings;
    const DealLevels *l = &run->table.levels;
    const Assignment a = run->assignment;
    StepDeal s = {0};
    LengthsPlan p = {.fixed = l->levels};
    uint32_t seq_len = (uint32_t)o->seq_len;
    if (!all->count && !o->data.count) all->length = &seq_len, all->count = 1, all->longest = seq_len;
    const size_t longest = o->data.count ? data->bound.longest : all->longest;
    const size_t samples = o->samples ? o->samples : o->batch * o->grad_accum;
    double *load = (double *)checked_calloc(4 * l->ranks, sizeof(double), "loads of ranks");
    const PassWork work = pass_work(m, settings, shape);
    p.besides = step_seconds(m, settings, &work, &run->plan.moved, 1) -
                sequence_seconds(m, settings, &work, &run->plan.moved, &work.other);
    p.rank[0] = load, p.rank[1] = load + l->ranks;
    step_deal_allocate(&s, &run->table, o->data.count ? max_size(samples, data->samples) : samples);
    for (uint64_t at = 0; p.steps < LENGTHS_STEPS; p.steps++) {
        const size_t count = o->data.count && data->packing.step ? dataloader_step(data, at) : a.batches;
        if (o->data.count)
            step_deal_make(&s, data, at, count, 0), at = dataloader_after(data, at, count);
        else
            lengths_deal(&s, all, samples, o->seed, p.steps);
        lengths_add(&p, &s, p.steps ? load + 2 * l->ranks : p.rank[0]);
        for (size_t k = 0; k < l->levels; k++)
            if (l->level[k].capacity >= longest)
                p.fixed_seconds[k] += fixed_seconds(&s, k, load + 3 * l->ranks);
    }
    step_deal_free(&s);
    for (size_t k = 0; k < l->levels; k++)
        if (p.fixed_seconds[k] > 0 && (p.fixed == l->levels || p.fixed_seconds[k] < p.fixed_seconds[p.fixed])) p.fixed = k;
    return p;
}

static void lengths_print(FILE *out, const LengthsPlan *p, const DealLevels *l) {
    const double n = (double)p->steps;
    fprintf(out, "step %.4g s (load %.4g bound %.4g mean %.4g besides %.4g) tokens %.0f\n", p->seconds / n, p->load / n, p->bound / n, p->mean / n, p->besides, p->tokens / n);
    for (size_t k = 0; k < l->levels; k++)
        fprintf(out, "%4zu cap %8zu begin %.4g fixed %.4g  groups %.2f seqs %.2f share %.3f\n", l->level[k].ranks, l->level[k].capacity, l->level[k].begin, p->fixed_seconds[k] / n, p->groups[k] / n, p->sequences[k] / n, p->share[k] / p->tokens);
}

#endif
