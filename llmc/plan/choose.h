/*
The planner's choices: where layer inputs, weights, gradients, optimizer state and kept attention lie, how many layer
inputs are kept, whether attention's outputs are, whether ranks gather keys and values or pass them around, and with
--method auto whether layers or chunks come first; taken so that a step is as fast as what fits allows.

    Search          what is named, what is open, and the limits of a rank's device, host memory and disk
    Choice          one for all that is open: its settings, its bytes in each place, its estimated seconds
    search_choices  the choices that fit, fastest first
    choices_thin    of these, each that takes less of some place than all faster ones
    search_longest  the longest sequence that some choice fits

A choice is a number whose digits are the places and the rest, so that all ranks mean the same by it. Each is walked dry
(plan.h), which takes some microseconds and gives its bytes and its transfers; the work of a pass is walked once for all
choices that share it (estimate.h). Keys and values are gathered first: the ring is looked at where that leaves the
device waiting for transfers, or does not fit. Sparser inputs are left out where forward again alone takes longer than
the best choice before.

Rates come from the machine's row and never from a clock: the same limits give the same choice, and what changes the
last bits (the ring) follows from tables and limits alone.
*/
#ifndef LLMC_CHOOSE_H
#define LLMC_CHOOSE_H
#include "estimate.h"
#include <assert.h>

// Ops.host_available, or NULL: all host memory that a plan wants
typedef size_t (*HostAvailable)(size_t planned);

// Limits of a rank; SIZE_MAX: none
typedef struct {
    size_t bytes[PLACES];
    HostAvailable host;
} Limits;

static Limits device_limit(size_t bytes) {
    const Limits limits = {{bytes, SIZE_MAX, SIZE_MAX}, NULL};
    return limits;
}

// The fullest place: bytes over limit. Above 1 they do not fit.
static double places_pressure(const size_t bytes[PLACES], const Limits *limits) {
    const size_t host = bytes[PLACE_HOST] && limits->host ? limits->host(bytes[PLACE_DEVICE]) : 0; // 0: not known
    double most = 0;
    for (int place = 0; place < PLACES; place++) {
        const size_t limit = place == PLACE_HOST && host ? min_size(host, limits->bytes[place]) : limits->bytes[place];
        if (bytes[place]) most = fmax(most, (double)bytes[place] / (double)limit);
    }
    return most;
}

static double plan_pressure(const Plan *plan, const Limits *limits) {
    const size_t bytes[PLACES] = {plan->total_bytes, plan->host_bytes, plan->disk_bytes};
    return places_pressure(bytes, limits);
}

// ---- the longest sequence of a choice ------------------------------------------------------------------------------
#define PLAN_LONGEST ((size_t)1 << 36) // tokens of all documents
#define LONGEST_SEQ  ((size_t)1 << 30) // tokens of one: positions are int32

static size_t plan_longest_seq_len(const Model *model) {
    const Config *config = &model->config;
    return config->family->learned_positions ? min_size(config->max_position_embeddings, LONGEST_SEQ) : LONGEST_SEQ;
}

static int plan_fits(const RunSettings *settings, Batch *batch, size_t T, const Limits *limits) {
    for (size_t b = 0; b <= batch->documents; b++) batch->document_start[b] = b * T;
    batch->N = batch->documents * T;
    if (!plan_countable(settings->model, batch->N)) return 0;
    const Plan plan = plan_make(settings, batch);
    return plan_pressure(&plan, limits) <= 1;
}

// The longest T above `least` such that B documents of T tokens fit; 0 if none does. A learned position table ends it,
// as does what --seq-len takes.
static size_t plan_longest(const RunSettings *settings, size_t B, size_t least, const Limits *limits) {
    size_t *start = (size_t *)checked_calloc(B + 1, sizeof(size_t), "the documents of a plan");
    size_t low = least, high = least + 1, end = 1 + plan_longest_seq_len(settings->model);
    Batch batch = {0};
    batch.documents = B, batch.document_start = start;
    while (high < end && plan_fits(settings, &batch, high, limits)) low = high, high *= 2;
    high = min_size(high, end);
    while (high - low > 1) { // low fits (or is `least`), high does not
        size_t middle = low + (high - low) / 2;
        if (plan_fits(settings, &batch, middle, limits))
            low = middle;
        else
            high = middle;
    }
    free(start);
    return low > least ? low : 0;
}

// ---- choices -------------------------------------------------------------------------------------------------------
typedef struct {
    RunSettings open;        // what is named; place[] is AUTO where it is open
    unsigned places[PLACED]; // of what is AUTO: bit p, if it may be in place p
    int ring, keep, every;   // open as well: the ring, keeping attention's outputs, inputs of one layer of K,
    int method;              // stream or seco
    Limits limits;
    const Machine *machine;
    size_t sequences; // of a rank in a step
} Search;

typedef struct {
    size_t number;
    RunSettings settings;
    size_t bytes[PLACES]; // of a rank
    Moved moved;          // Plan.moved
    double seconds;       // of a step, estimated
    double on_device;     // if nothing moved between places, and no input was computed again
} Choice;

static const size_t inputs_every[] = {1, 2, 3, 4, 6, 8, 12};
enum { EVERY = sizeof(inputs_every) / sizeof(inputs_every[0]), PLACEMENTS = 729, CHOICES = PLACEMENTS * EVERY * 8 };
static_assert(PLACED == 6 && PLACES == 3, "PLACEMENTS is PLACES to the power of PLACED");

// Something of this kind exists, so that it matters where.
static int is_placed(const RunSettings *s, int kind) {
    switch (kind) {
    case PLACED_INPUTS: return s->backward && s->method != METHOD_FULL;
    case PLACED_GRADIENTS: return s->backward;
    case PLACED_OPTIMIZER: return s->optimizer;
    case PLACED_KEPT: return s->keep;
    case PLACED_REFERENCE: return s->reference == REFERENCE_START && !s->lora;
    default: return 1;
    }
}

// The settings of a choice: digits of its number are each kind's place, K, keep, method and ring. 0: it is not open
static int search_at(const Search *c, size_t number, RunSettings *s) {
    const size_t every = number / PLACEMENTS % EVERY;
    const size_t rest = number / PLACEMENTS / EVERY;
    const int keep = rest % 2, seco = rest / 2 % 2, ring = rest / 4 != 0;
    *s = c->open;
    if ((every && !c->every) || (keep && !c->keep) || (ring && !c->ring) || (seco && !c->method)) return 0;
    if (seco) s->method = METHOD_SECO;
    if (seco && (every || keep || s->keep || s->inputs_every > 1)) return 0; // it has neither
    if (every) s->inputs_every = inputs_every[every];
    if (s->inputs_every > 1 && every && s->inputs_every >= s->model->config.num_hidden_layers) return 0;
    if (c->keep) s->keep = keep;
    if (c->ring) s->ring = ring;
    for (int kind = 0; kind < PLACED; kind++, number /= PLACES) {
        const Place place = (Place)(number % PLACES), named = c->open.place[kind];
        const unsigned open = !is_placed(s, kind) ? 1u : named == PLACE_AUTO ? c->places[kind] | 1u : 1u << named;
        if (!(open >> place & 1)) return 0;
        s->place[kind] = place;
    }
    return 1;
}

static Choice choice_of(const RunSettings *settings, size_t number, const Plan *plan) {
    Choice choice = {0};
    choice.number = number, choice.settings = *settings, choice.moved = plan->moved;
    choice.bytes[PLACE_DEVICE] = plan->total_bytes;
    choice.bytes[PLACE_HOST] = plan->host_bytes, choice.bytes[PLACE_DISK] = plan->disk_bytes;
    return choice;
}

// The choice to take before any other: nothing open lies elsewhere than on the device.
static size_t search_first(const Search *c) {
    RunSettings settings;
    size_t number = 0;
    while (number < CHOICES && !search_at(c, number, &settings)) number++;
    return number;
}

static int choice_compare(const void *left, const void *right) {
    const Choice *a = (const Choice *)left, *b = (const Choice *)right;
    if (a->seconds != b->seconds) return a->seconds < b->seconds ? -1 : 1;
    for (int place = PLACES - 1; place >= 0; place--)
        if (a->bytes[place] != b->bytes[place]) return a->bytes[place] < b->bytes[place] ? -1 : 1;
    return a->number < b->number ? -1 : a->number > b->number;
}

// The choices that fit, fastest first, for micro-batches of `shape`; the caller frees them. least: the number of that
// which comes nearest to fitting
static size_t search_choices(const Search *c, const Batch *shape, Choice **choices, size_t *least) {
    const Moved still = {PHASE_FORWARD, {{0}}};
    size_t count = 0;
    double best = INFINITY, best_on_device = 0, lowest = INFINITY;
    PassWork base, works[2]; // of choices whose inputs are all kept, and of a group's: attention kept there, elsewhere
    int worked = 0;
    *choices = (Choice *)checked_calloc(CHOICES, sizeof(Choice), "choices of a plan");
    *least = search_first(c);
    for (size_t group = 0; group < CHOICES / PLACEMENTS; group++) { // of one K, keep, method and ring
        int fitting[2] = {0, 0};
        if (group % EVERY == 0) worked = 0;
        if (best <= 1.001 * best_on_device && group / EVERY / 4) break; // a ring is not needed
        for (size_t number = group * PLACEMENTS; number < (group + 1) * PLACEMENTS; number++) {
            RunSettings s;
            if (!search_at(c, number, &s)) continue;
            const Plan plan = plan_make(&s, shape);
            const double pressure = plan_pressure(&plan, &c->limits);
            if (pressure < lowest) lowest = pressure, *least = number;
            if (pressure > 1) continue;
            if (!worked++) {
                RunSettings all = s;
                all.inputs_every = 1;
                for (int kind = 0; kind < PLACED; kind++) all.place[kind] = PLACE_DEVICE;
                memset(&base, 0, sizeof(base)); // without tokens there is only generation
                if (shape->N) base = pass_work(c->machine, &all, shape);
            }
            const int again = s.inputs_every > 1 && s.keep && s.place[PLACED_KEPT] > PLACE_DEVICE; // (inputs.h)
            PassWork *work = &works[again];
            if (!fitting[again]++) *work = s.inputs_every > 1 && shape->N ? pass_work(c->machine, &s, shape) : base;
            Choice choice = choice_of(&s, number, &plan);
            choice.seconds = step_seconds(c->machine, &s, work, &choice.moved, c->sequences);
            choice.on_device = step_seconds(c->machine, &s, &base, &still, c->sequences);
            if (step_seconds(c->machine, &s, work, &still, c->sequences) > best) continue; // and will not be chosen
            if (choice.seconds < best) best = choice.seconds, best_on_device = choice.on_device;
            (*choices)[count++] = choice;
        }
    }
    qsort(*choices, count, sizeof(Choice), choice_compare);
    return count;
}

// Leaves of choices in order of time those that take less of some place than each faster one. Returns how many
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

// Seconds of a choice's step if the optimizer's step went on beside the next forward pass (--update forward); INFINITY
// where that does not fit.
static double choice_deferred(const Search *c, const Batch *shape, const Choice *choice) {
    RunSettings later = choice->settings;
    later.defers = 1;
    const Plan plan = plan_make(&later, shape);
    if (plan_pressure(&plan, &c->limits) > 1) return INFINITY;
    const PassWork work = pass_work(c->machine, &later, shape);
    return step_seconds(c->machine, &later, &work, &plan.moved, c->sequences);
}

// The longest documents, B to a sequence, that some choice fits.
static size_t search_longest(const Search *c, size_t B) {
    size_t longest = 0;
    for (size_t number = CHOICES; number-- > 0;) { // the choices that leave most of the device free first
        RunSettings s;
        if (search_at(c, number, &s)) longest = max_size(longest, plan_longest(&s, B, longest, &c->limits));
    }
    return longest;
}

#endif
