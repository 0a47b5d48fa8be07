/*
The planner's choices of everything that the options leave open: places, --inputs-every, --chunk, --latents, --keep,
--update, --kv and, with --method auto, stream or seco.

    candidates_make  all sensible combinations of the open values in the table of dimensions
    search_choices   the candidates that fit, fastest first
    choices_thin     keeps each choice that takes less of some place than all faster choices
    search_longest   the longest sequence that some candidate fits

A candidate's dry run (plan.h) gives its bytes and transfers; the machine's rates give its seconds (estimate.h). Nothing
is timed, so the same limits give the same choice. Two bounds avoid most dry runs: work without transfers, and the
tensors that a run holds outside its passes.
*/
#ifndef LLMC_CHOOSE_H
#define LLMC_CHOOSE_H
#include "estimate.h"
#include "llmc/plan/flops.h"
#include <stddef.h>

typedef struct {
    RunSettings open;        // settings that options name; place[] is AUTO where it is open
    unsigned places[PLACED]; // possible places of tensors with AUTO: bit p, if place p is possible
    int ring, keep, every;   // also open: the ring, keeping attention's outputs, keeping the inputs of one layer in K
    int method, defers;      // also open: seco in place of stream, --update forward
    int latent_ranges;       // also open: latents by ranges
    int chunk, logits_chunk; // also open: chunks smaller than the chunks of `open`, which are the largest; logits_chunk
                             // follows chunk
    Limits limits;
    double spare; // share of the limits that attention's outputs must leave free
    const Machine *machine;
    size_t sequences; // sequences of a rank in a step
    size_t shared;    // tokens that all documents share (--shared-tokens)
} Search;

// ---- candidates ----------------------------------------------------------------------------------------------------
// Values that the planner decides. All are ints, so that equal candidates have equal bytes.
typedef struct {
    int ring, method, keep, latent_ranges, chunk, inputs_every;
    int place[PLACED]; // place of each kind of tensor that is AUTO
    int defers;
} Candidate;

typedef struct {
    Candidate *candidate; // [count], equal on all ranks
    size_t count;
} Candidates;

// Dimensions of candidates, which come in lexicographic order of these rows. A candidate's work does not depend on its
// places, nor on the row after them. A chunk comes before smaller chunks, which take more work. A new dimension is a
// row, a field of Candidate, a flag of Search and an assignment in candidate_settings.
static const struct {
    size_t field, open; // offset of the field in Candidate; offset in Search of the flag that allows `value`
    int value[7];
} dimensions[] = {
    {offsetof(Candidate, ring), offsetof(Search, ring), {1}},
    {offsetof(Candidate, method), offsetof(Search, method), {METHOD_SECO}},
    {offsetof(Candidate, keep), offsetof(Search, keep), {1}},
    {offsetof(Candidate, latent_ranges), offsetof(Search, latent_ranges), {1}},
    {offsetof(Candidate, chunk), offsetof(Search, chunk), {16384, 8192, 4096, 2048, 1024, 512, 256}},
    {offsetof(Candidate, inputs_every), offsetof(Search, every), {2, 3, 4, 6, 8, 12}},
#define OF_PLACE(kind) offsetof(Candidate, place[kind]), offsetof(Search, places[kind])
    {OF_PLACE(PLACED_REFERENCE), {PLACE_HOST, PLACE_DISK}},
    {OF_PLACE(PLACED_KEPT), {PLACE_HOST, PLACE_DISK}},
    {OF_PLACE(PLACED_OPTIMIZER), {PLACE_HOST, PLACE_DISK}},
    {OF_PLACE(PLACED_GRADIENTS), {PLACE_HOST, PLACE_DISK}},
    {OF_PLACE(PLACED_WEIGHTS), {PLACE_HOST, PLACE_DISK}},
    {OF_PLACE(PLACED_INPUTS), {PLACE_HOST, PLACE_DISK}},
#undef OF_PLACE
    {offsetof(Candidate, defers), offsetof(Search, defers), {1}},
};

// Tells whether tensors of this kind exist.
static int is_placed(const RunSettings *s, int kind) {
    switch (kind) {
    case PLACED_INPUTS: return s->context.window || (s->backward && s->method != METHOD_FULL);
    case PLACED_GRADIENTS: return s->backward;
    case PLACED_OPTIMIZER: return s->optimizer;
    case PLACED_KEPT: return s->keep.level > LEVEL_NONE;
    case PLACED_REFERENCE: return s->reference == REFERENCE_START && !s->lora;
    default: return 1;
    }
}

static RunSettings candidate_settings(const Search *search, const Candidate *c) {
    RunSettings s = search->open;
    s.ring = c->ring, s.method = (Method)c->method, s.keep.level = (KeepLevel)c->keep,
    s.inputs_every = (size_t)c->inputs_every;
    s.chunk = (size_t)c->chunk, s.defers = c->defers, s.latent_ranges = c->latent_ranges;
    if (search->logits_chunk) s.logits_chunk = min_size(s.logits_chunk, s.chunk / 2);
    for (int kind = 0; kind < PLACED; kind++)
        if (!is_placed(&s, kind) || s.place[kind] == PLACE_AUTO) s.place[kind] = (Place)c->place[kind];
    return s;
}

// Tells whether the search may try a candidate: the options leave its places open, and its settings fit together.
static int candidate_is_open(const Search *search, const Candidate *c) {
    const RunSettings s = candidate_settings(search, c);
    int open = !search->every || s.inputs_every < s.model->config.num_hidden_layers;
    if (method_is_chunk_major(s.method)) // chunk-major methods have none of these
        open &= !s.keep.level && s.inputs_every <= 1 && !(search->latent_ranges && s.latent_ranges);
    open &= s.chunk <= search->open.chunk && 16 * s.chunk >= search->open.chunk;
    if (search->defers && s.defers)
        open &= s.place[PLACED_OPTIMIZER] > PLACE_DEVICE; // only transfers of the optimizer overlap
    for (int kind = 0; kind < PLACED; kind++)
        if (c->place[kind] != PLACE_DEVICE)
            open &= is_placed(&s, kind) && search->open.place[kind] == PLACE_AUTO &&
                    (search->places[kind] >> c->place[kind] & 1);
    return open;
}

// Tells whether two candidates differ in chunk, in --update or in both, and in nothing else.
static int candidate_varies(const Candidate *a, const Candidate *b) {
    Candidate c = *a;
    c.chunk = b->chunk, c.defers = b->defers;
    return !memcmp(&c, b, sizeof(c)) && memcmp(a, b, sizeof(c)) != 0;
}

// Makes the candidates; the first candidate has all open places on the device. The caller frees them.
static Candidates candidates_make(const Search *search) {
    const RunSettings *open = &search->open;
    const Candidate named = {
        open->ring, open->method, open->keep.level, open->latent_ranges, (int)open->chunk, (int)open->inputs_every,
        {0},        open->defers};
    Candidates all = {(Candidate *)checked_calloc(1, sizeof(Candidate), "candidates of a plan"), 1};
    *all.candidate = named;
    for (size_t d = 0; d < sizeof(dimensions) / sizeof(dimensions[0]); d++) {
        const size_t values = sizeof(dimensions[d].value) / sizeof(int);
        Candidates next = {(Candidate *)checked_calloc((1 + values) * all.count, sizeof(named), "candidates of a plan"),
                           0};
        int is_open;
        memcpy(&is_open, (const char *)search + dimensions[d].open, sizeof(int));
        for (size_t i = 0; i < all.count; i++) {
            Candidate c = next.candidate[next.count++] = all.candidate[i];
            for (size_t v = 0; is_open && v < values && dimensions[d].value[v]; v++) {
                memcpy((char *)&c + dimensions[d].field, &dimensions[d].value[v], sizeof(int));
                if (candidate_is_open(search, &c) && memcmp(&c, &all.candidate[i], sizeof(c)) != 0)
                    next.candidate[next.count++] = c;
            }
        }
        free(all.candidate);
        all = next;
    }
    return all;
}

// ---- choices -------------------------------------------------------------------------------------------------------
typedef struct {
    size_t candidate; // index of the candidate
    RunSettings settings;
    size_t bytes[PLACES]; // bytes of a rank
    double seconds;       // estimated seconds of a step
    double on_device;     // seconds if nothing moved between places, and no input were recomputed
} Choice;

static int choice_compare(const void *left, const void *right) {
    const Choice *a = (const Choice *)left, *b = (const Choice *)right;
    if (a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    for (int place = PLACES - 1; place >= 0; place--)
        if (a->bytes[place] != b->bytes[place]) return a->bytes[place] < b->bytes[place] ? -1 : 1;
    return a->candidate < b->candidate ? -1 : a->candidate > b->candidate;
}

// Returns a lower bound of the work of a candidate that keeps fewer inputs than `base`.
static PassWork sparse_work(const Machine *m, const RunSettings *s, const Batch *shape, const PassWork *base) {
    PassWork work = *base;
    work.counts.flops += flops_restored(s, shape);
    work.backward = work_seconds(m, work.counts) - work.forward;
    return work;
}

// Finds the candidates that fit, fastest first, for micro-batches of `shape`. The caller frees them. *least: the
// candidate nearest to fitting
static size_t search_choices(const Search *search, const Candidates *all, const Batch *shape, Choice **choices,
                             size_t *least) {
    const Moved still = {PHASE_FORWARD, {{0}}};
    const Machine *m = search->machine;
    size_t count = 0;
    double best = INFINITY, best_on_device = 0, lowest = INFINITY;
    // base: work with everything on the device and every input kept; if it is only a bound, with a larger chunk. works:
    // work of this candidate, or lower bounds
    PassWork none = {0}, base = none, works[2] = {none, none};
    int has_base = 0, bounds = 0, has_work[2] = {0, 0};
    *choices = (Choice *)checked_calloc(all->count, sizeof(Choice), "choices of a plan");
    *least = 0;
    for (size_t i = 0; i < all->count; i++) {
        const Candidate *c = &all->candidate[i], *before = &all->candidate[i ? i - 1 : 0];
        if (memcmp(c, before, offsetof(Candidate, place)) != 0) { // else both have the same work, except for `again`
            if (search->ring && c->ring && best <= 1.001 * best_on_device)
                break; // gathering overlaps with nothing, so
                       // it is not faster
            bounds = (bounds || has_base) && !memcmp(c, before, offsetof(Candidate, chunk));
            has_base = has_base && !memcmp(c, before, offsetof(Candidate, inputs_every));
            const RunSettings s = candidate_settings(search, c);
            works[0] = works[1] = (has_base || bounds) && shape->N ? sparse_work(m, &s, shape, &base) : none;
            has_work[0] = has_work[1] = 0;
        }
        if (c->chunk < all->candidate->chunk && (size_t)c->chunk >= batch_rows(shape)->N)
            continue; // equals the candidate with the
                      // largest chunk
        Choice *choice = &(*choices)[count];
        choice->candidate = i, choice->settings = candidate_settings(search, c);
        const RunSettings *s = &choice->settings;
        const int again = s->inputs_every > 1 && s->keep.level && s->place[PLACED_KEPT] > PLACE_DEVICE; // see inputs.h
        PassWork *work = &works[again];
        // 1. Leave out a candidate that takes longer than the best, or does not fit by the tensors it holds outside
        // passes.
        if (step_seconds(m, s, work, &still, search->sequences) > best) continue;
        const double held = held_pressure(s, shape, &search->limits);
        if (held > 1 && held >= lowest) continue;
        // 2. Count bytes and transfers.
        const Plan plan = plan_make(s, shape);
        const double pressure = plan_pressure(&plan, &search->limits);
        if (pressure < lowest) lowest = pressure, *least = i;
        if (pressure > 1 - (s->keep.level && search->keep ? search->spare : 0)) continue;
        plan_bytes(&plan, choice->bytes);
        // 3. Estimate seconds. Candidates that differ only in places share their work.
        RunSettings device = *s;
        device.inputs_every = 1;
        for (int kind = 0; kind < PLACED; kind++) device.place[kind] = PLACE_DEVICE;
        if (!has_base) base = shape->N ? pass_work(m, &device, shape) : none; // without tokens the run only generates
        if (!has_work[again]) *work = s->inputs_every > 1 && shape->N ? pass_work(m, s, shape) : base;
        has_base = has_work[again] = 1;
        if (step_seconds(m, s, work, &still, search->sequences) > best) continue;
        choice->seconds = step_seconds(m, s, work, &plan.moved, search->sequences);
        choice->on_device = step_seconds(m, s, &base, &still, search->sequences);
        if (choice->seconds < best) best = choice->seconds, best_on_device = choice->on_device;
        count++;
    }
    qsort(*choices, count, sizeof(Choice), choice_compare);
    return count;
}

// Keeps each of the sorted choices that takes less of some place than all faster choices. Returns the number of kept
// choices.
static size_t choices_thin(Choice *choices, size_t count) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        int worse = 0;
        for (size_t k = 0; k < kept && !worse; k++) {
            worse = 1;
            for (int place = 0; place < PLACES; place++) worse &= choices[k].bytes[place] <= choices[i].bytes[place];
        }
        if (!worse) choices[kept++] = choices[i];
    }
    return kept;
}

// Returns the longest documents, B per sequence, that some candidate fits. Kept attention outputs, --update forward or
// latents expanded by layers never make longer documents fit. Nor does a larger chunk, except where each chunk keeps
// states of linear attention.
static size_t search_longest(const Search *search, size_t B) {
    Search least = *search;
    Candidates all = candidates_make(&least);
    size_t longest = 0;
    if (least.keep) least.keep = 0, least.open.keep.level = LEVEL_NONE;
    if (least.defers) least.defers = least.open.defers = 0;
    if (least.latent_ranges) least.latent_ranges = 0, least.open.latent_ranges = 1;
    const int states = layers_of_kind(&search->open.model->config, LAYER_LINEAR) > 0;
    for (size_t i = 0; i < all.count && least.chunk && !states; i++)
        least.open.chunk = min_size(least.open.chunk, (size_t)all.candidate[i].chunk);
    least.chunk = states && least.chunk;
    free(all.candidate);
    all = candidates_make(&least);
    for (size_t i = all.count; i-- > 0;) { // candidates that leave most of the device free come first
        const RunSettings s = candidate_settings(&least, &all.candidate[i]);
        longest = max_size(longest, plan_longest(&s, B, search->shared, longest, &search->limits));
    }
    free(all.candidate);
    return longest;
}

#endif
