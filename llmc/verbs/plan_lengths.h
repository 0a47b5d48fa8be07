/*
`plan --sp auto`: estimates, for the planned machine, how long deals (llmc/data/deal.h) take for steps of given lengths,
compared with the best fixed --sp, which is dealt and packed in the same way. Lengths come from --data, from a file or
from a distribution, or all are --seq-len.
*/
#ifndef LLMC_PLAN_LENGTHS_H
#define LLMC_PLAN_LENGTHS_H
#include "llmc/run/report.h"

#define LENGTHS_STEPS 20

typedef struct {
    uint32_t *length; // [count] length of each document
    size_t count, longest;
} Lengths;

// Means over steps; seconds and rank: for each level alone, then for --sp auto
typedef struct {
    size_t ranks, levels, best;                         // best: the level with the least seconds
    double sp[DEAL_LEVELS], fits[DEAL_LEVELS];          // ranks of a group, tokens of a sequence
    double sequences[DEAL_LEVELS], tokens[DEAL_LEVELS]; // sequences and tokens that --sp auto deals to each level
    double seconds[DEAL_LEVELS + 1];                    // s: time of a step; INFINITY: --seq-len does not fit
    double *rank;                                       // [2, levels, ranks] s: time in the first step's passes
    double all, bound; // tokens of a step; lower bound of all deals' time, as a share of --sp auto's
} LengthsPlan;

// Draws lengths from a distribution, or reads them, one per line.
static Lengths lengths_open(const Options *o) {
    Lengths all = {0};
    if (o->lengths && !strncmp(o->lengths, "lognormal,", 10)) {
        double median, sigma, most;
        float normal[2];
        int end = 0;
        sscanf(o->lengths, "lognormal,median=%lf,sigma=%lf,max=%lf%n", &median, &sigma, &most, &end);
        if (!end || o->lengths[end] || !(median >= 1 && median <= most && most <= MOST_TOKENS && sigma >= 0))
            die_usage("--lengths: '%.64s' must be lognormal,median=M,sigma=S,max=L with 1 <= M <= L and S >= 0",
                      o->lengths);
        all.count = 100000, all.longest = (size_t)most;
        all.length = (uint32_t *)checked_calloc(all.count, sizeof(uint32_t), o->lengths);
        for (size_t i = 0; i < all.count; i++) {
            normal_pair(random_bits(o->seed, 1, i), &normal[0], &normal[1]);
            all.length[i] = (uint32_t)fmin(fmax(median * exp(sigma * normal[0]), 1), most);
        }
    } else if (o->lengths) {
        size_t bytes, value;
        char *text = input_read_text(o->lengths, (size_t)1 << 30, &bytes), *word = text;
        all.length = (uint32_t *)checked_calloc(bytes / 2 + 1, sizeof(uint32_t), o->lengths);
        do {
            word[strcspn(word, "\n")] = 0;
            if (!parse_size(word, &value) || !value || value > (size_t)MOST_TOKENS)
                die("%s:%zu: '%.32s' is not a length; give one number per line", o->lengths, all.count + 1, word);
            all.length[all.count++] = (uint32_t)value, all.longest = max_size(all.longest, value);
        } while ((word += strlen(word) + 1) < text + bytes);
        free(text);
    }
    return all;
}

// Deals a step of `samples` lengths, each drawn from `all`.
static void lengths_deal(StepDeal *s, const Lengths *all, size_t samples, size_t seed, size_t step) {
    const size_t levels = s->table->levels.levels;
    for (size_t i = 0; i < samples; i++)
        s->item[i].positions = all->length[random_below(seed, 3, step * samples + i, all->count)];
    packing_sort(s->item, s->spare, s->deal.samples = samples);
    for (size_t i = 0; i < samples * levels; i++) {
        s->deal.positions[i / levels] = s->item[i / levels].positions;
        s->deal.seconds[i] = deal_table_seconds(s->table, s->item[i / levels].positions, i % levels);
    }
    deal_make(&s->deal);
}

// Adds step `step` of plan `way`: a fixed level, or, with way == levels, the deal of --sp auto.
static void lengths_add(LengthsPlan *p, const Deal *d, size_t way, size_t step) {
    const size_t dealt = way == p->levels;
    for (size_t q = 0; q < d->sequences; q++) {
        const size_t k = d->group[d->to[q]].level, S = d->levels.level[k].ranks;
        double *rank = p->rank + (dealt * p->levels + k) * p->ranks + (d->to[q] - d->levels.level[k].first) * S;
        for (size_t r = 0; !step && r < S; r++) rank[r] += deal_sequence_seconds(d, q);
        for (uint32_t i = d->begin[q]; dealt && i < d->begin[q + 1]; i++) p->tokens[k] += d->positions[d->order[i]];
        p->sequences[k] += (double)dealt;
    }
    p->seconds[way] += d->load / LENGTHS_STEPS;
}

// Plans steps of the data, of lengths, or (without either) of documents of --seq-len tokens.
static LengthsPlan lengths_plan(const Run *run, const Machine *m, DataLoader *data, Lengths all, const Batch *shape) {
    const Options *o = run->options;
    const DealLevels *l = &run->table.levels;
    const PassWork work = pass_work(m, &run->settings, shape);
    const double besides = step_seconds(m, &run->settings, &work, &run->plan.moved, 1) -
                           sequence_seconds(m, &run->settings, &work, &run->plan.moved, &work.other);
    const size_t samples = o->samples ? o->samples : o->batch * o->grad_accum;
    uint32_t seq_len = (uint32_t)o->seq_len;
    uint64_t at = 0;
    StepDeal s = {0};
    LengthsPlan p = {.ranks = l->ranks, .levels = l->levels, .best = l->levels - 1};
    if (!all.count) all.length = &seq_len, all.count = 1;
    p.rank = (double *)checked_calloc(2 * p.levels * p.ranks, sizeof(double), "loads of ranks");
    step_deal_allocate(&s, &run->table,
                       max_size(samples, run->assignment.batches * min_size(data->bound.documents, data->samples)));
    for (size_t step = 0; step < LENGTHS_STEPS; step++, s.deal.levels = *l) {
        const size_t count = data->packing.step ? dataloader_step(data, at) : run->assignment.batches;
        if (data->shards)
            step_deal_make(&s, data, at, count, 0), at = dataloader_after(data, at, count);
        else
            lengths_deal(&s, &all, samples, o->seed, step);
        p.bound += s.deal.bound / LENGTHS_STEPS;
        lengths_add(&p, &s.deal, p.levels, step);
        for (size_t k = 0; k < p.levels; k++) {
            const int fits = l->level[k].capacity >= max_size(shape->document_start[1], s.deal.positions[0]);
            for (size_t j = 0; j < p.levels; j++) s.deal.levels.level[j].capacity = j == k ? l->level[j].capacity : 0;
            if (fits) deal_make(&s.deal), lengths_add(&p, &s.deal, k, step);
            if (!fits) p.seconds[k] = INFINITY;
        }
    }
    p.bound /= p.seconds[p.levels], p.seconds[p.levels] += besides;
    for (size_t k = p.levels; k-- > 0;) {
        p.sp[k] = (double)l->level[k].ranks, p.fits[k] = (double)l->level[k].capacity, p.seconds[k] += besides;
        p.sequences[k] /= LENGTHS_STEPS, p.tokens[k] /= LENGTHS_STEPS, p.all += p.tokens[k];
        if (p.seconds[k] <= p.seconds[p.best]) p.best = k;
    }
    step_deal_free(&s);
    return p;
}

// basis: see machine_basis
static void lengths_print(FILE *out, const LengthsPlan *p, const char *basis) {
    const double seconds = p->seconds[p->levels], fixed = p->seconds[p->best];
    for (size_t k = 0; k < p->levels; k++)
        fprintf(out, "%-9s of %.0f rank%s: %.0f tokens fit; a step has %.3g sequences, %.0f %% of the tokens\n",
                k ? "" : "groups", p->sp[k], k ? "s" : "", p->fits[k], p->sequences[k], 100 * p->tokens[k] / p->all);
    fprintf(out, "step      %.3g s for %.0f tokens, estimated%s: %.0f tokens/s; passes %.0f %% of the bound\n", seconds,
            p->all, basis, p->all / seconds, 100 * p->bound);
    fprintf(out, "fixed     --sp %.0f, the best: %.3g s; auto is %.3g times as fast\n", p->sp[p->best], fixed,
            fixed / seconds);
}

static void lengths_json(JsonOut *json, const LengthsPlan *p) {
    json_numbers(json, "level_sp", p->sp, p->levels);
    json_numbers(json, "level_max_tokens", p->fits, p->levels);
    json_numbers(json, "level_sequences", p->sequences, p->levels);
    json_numbers(json, "level_tokens", p->tokens, p->levels);
    json_numbers(json, "level_seconds", p->seconds, p->levels);
    json_number(json, "step_tokens", p->all);
    json_number(json, "step_seconds", p->seconds[p->levels]);
    json_number(json, "deal_bound", p->bound);
    json_number(json, "fixed_sp", p->sp[p->best]);
    json_array(json, "rank_seconds");
    for (size_t k = p->levels; k < 2 * p->levels; k++) json_numbers(json, NULL, p->rank + k * p->ranks, p->ranks);
    json_array_end(json);
    json_numbers(json, "fixed_rank_seconds", p->rank + p->best * p->ranks, p->ranks);
}

#endif
