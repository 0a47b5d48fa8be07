/*
The processes of a run, and how work and memory are sharded over them. One process is one rank and one device.

    ranks = replicas x sp       `sp` ranks that follow each other share a stream (sequence parallelism), the others take
                                other streams (data parallelism)
    zero                        ZeRO stage (arXiv 1910.02054): shard 1 optimizer state, 2 and gradients, 3 and weights
                                over all ranks

A World of zeros is a process alone. Nothing here communicates: dist.h does, on the host, and the collectives of ops.h,
on tensors.
*/
#ifndef LLMC_WORLD_H
#define LLMC_WORLD_H
#include "llmc/base/utils.h"
#include <stddef.h>

typedef struct {
    size_t ranks, rank; // 0 ranks count as 1
    size_t zero;        // stage, 0 to 3
    size_t sp;          // ranks of a stream, 0 counts as 1; divides ranks
} World;

// Ranks that take part in a collective together. Reversed: the same, counted from the last one.
typedef enum { RANKS_ALL, RANKS_SEQUENCE, RANKS_SEQUENCE_REVERSED, RANK_GROUPS } RankGroup;

static World world_alone(void) {
    World alone = {0, 0, 0, 0};
    return alone;
}

static size_t world_ranks(World w) { return w.ranks ? w.ranks : 1; }
static size_t world_sp(World w) { return w.sp ? w.sp : 1; }
static size_t world_replicas(World w) { return world_ranks(w) / world_sp(w); }
static size_t world_replica(World w) { return w.rank / world_sp(w); }

// Number of ranks in a group, and this rank's index in it.
static size_t ranks_in(World w, RankGroup group) { return group == RANKS_ALL ? world_ranks(w) : world_sp(w); }

static size_t rank_in(World w, RankGroup group) {
    size_t place = w.rank % world_sp(w);
    return group == RANKS_ALL ? w.rank : group == RANKS_SEQUENCE ? place : world_sp(w) - 1 - place;
}

// ---- shares: `count` elements dealt over ranks in whole units; the last rank has what is left over ------------------
#define SHARD_ALIGNMENT 256 // elements of weights and gradients: a block of moments in 8 bits

typedef struct {
    size_t begin, count;
} Range;

static Range shard_range(size_t count, size_t unit, size_t ranks, size_t rank) {
    Range share;
    size_t each = count / unit / ranks * unit;
    share.begin = rank * each;
    share.count = rank + 1 == ranks ? count - share.begin : each;
    return share;
}

// The largest share: what memory is planned for on every rank.
static size_t shard_range_max(size_t count, size_t unit, size_t ranks) {
    return shard_range(count, unit, ranks, ranks - 1).count;
}

// ---- the tokens of a stream: each of its ranks owns two ranges, so that causal work is balanced ---------------------
// Tokens that a rank owns at most: an even share, rounded up. It never falls as streams grow.
static size_t sequence_share_max(size_t N, size_t S) { return (N + S - 1) / S; }

// The rows of a half: where several ranks share the stream S portions of one size, so that fewer rows than ranks are
// behind the last token; else all rows are in the first.
static Range sequence_half(size_t N, size_t S, size_t half) {
    const size_t most = sequence_share_max(N, S), second = S > 1 ? most / 2 : 0, first = most - second;
    const Range halves[2] = {{0, S * first}, {S * first, S * second}};
    return halves[half];
}

// Rows of both halves.
static size_t sequence_rows(size_t N, size_t S) { return S * sequence_share_max(N, S); }

// The range of a half that rank `rank` of S owns: the first half in the order of RANKS_SEQUENCE, the second in that of
// RANKS_SEQUENCE_REVERSED; as far as there are tokens.
static Range sequence_part(size_t N, size_t S, size_t rank, size_t half) {
    const Range all = sequence_half(N, S, half);
    const size_t each = all.count / S, begin = all.begin + (half ? S - 1 - rank : rank) * each, end = begin + each;
    Range part;
    part.begin = begin < N ? begin : N;
    part.count = (end < N ? end : N) - part.begin;
    return part;
}

static size_t sequence_tokens(size_t N, size_t S, size_t rank) {
    return sequence_part(N, S, rank, 0).count + sequence_part(N, S, rank, 1).count;
}

// A rank that owns the most, and the longest ranges: the last one, where the halves meet, or the first of too many.
static size_t sequence_largest_rank(size_t N, size_t S) { return N < S ? 0 : S - 1; }

// ---- what is sent ---------------------------------------------------------------------------------------------------
// Bytes that a rank sends, by what for. A bandwidth-optimal reduce-scatter or all-gather of n bytes over P ranks sends
// n (P - 1) / P from each, and that is what is counted.
typedef enum {
    TRAFFIC_GRADIENTS,           // summed over all ranks
    TRAFFIC_WEIGHTS,             // gathered: updated ones (stages 1, 2), a layer's before it is used (stage 3)
    TRAFFIC_KEYS_VALUES,         // of a stream's other ranks
    TRAFFIC_KEY_VALUE_GRADIENTS, // to the rank that owns the token
    TRAFFIC_STATES,              // of linear attention, and their gradients, to the rank that owns the tokens behind
    TRAFFIC_KINDS
} TrafficKind;

static const char *const traffic_names[TRAFFIC_KINDS] = {"gradients", "weights", "keys_values", "key_value_gradients",
                                                         "states"};

typedef struct {
    double bytes[TRAFFIC_KINDS], calls[TRAFFIC_KINDS];
    double hops[TRAFFIC_KINDS]; // of all calls: from rank to rank, one after the other; an exchange has one
} Traffic;

static Traffic traffic_less(Traffic a, Traffic b) {
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) {
        a.bytes[kind] -= b.bytes[kind];
        a.calls[kind] -= b.calls[kind];
        a.hops[kind] -= b.hops[kind];
    }
    return a;
}

/*
How the micro-batches of a step are dealt over the replicas of a run. --batch, --seq-len and --grad-accum describe the
whole step, however many processes do it, so that loss and gradients are those of a process alone.

A micro-batches, D replicas: g = gcd(A, D) of them are worked on at a time, each by D / g replicas, which take a part of
its documents each (batch_part). Replica d takes micro-batches i with i % g == d / parts, and of each part d % parts.

    A 8, D 4    g 4, parts 1    whole micro-batches, two for each replica
    A 1, D 4    g 1, parts 4    a quarter of the micro-batch for each
    A 6, D 4    g 2, parts 2    half of three micro-batches for each

Every rank has the same number of them. Where the last round of an evaluation or of a step of so many samples
(assign_rounds) is not full, or no document falls to a part, a rank takes a stream of one token that does not count:
collectives need all ranks.
*/
typedef struct {
    size_t batches;       // of a step
    size_t stride, first; // this rank's: first, first + stride, ... below batches
    size_t parts, part;   // and of each of them this one of so many parts
} Assignment;

static size_t greatest_common_divisor(size_t a, size_t b) {
    while (b) {
        size_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

// `stride` divides the replicas, and `batches`.
static Assignment assign_by(World w, size_t batches, size_t stride) {
    // NOLINTBEGIN(clang-analyzer-core.UndefinedBinaryOperatorResult): no part is 0, stride divides the replicas
    const size_t parts = world_replicas(w) / stride, replica = world_replica(w);
    Assignment assignment = {batches, stride, replica / parts, parts, replica % parts};
    // NOLINTEND(clang-analyzer-core.UndefinedBinaryOperatorResult)
    return assignment;
}

static Assignment assign_step(World w, size_t batches) {
    return assign_by(w, batches, greatest_common_divisor(batches, world_replicas(w)));
}

// An evaluation takes one micro-batch after the other, each in `parts`.
static Assignment assign_evaluation(World w, size_t parts) {
    const size_t together = world_replicas(w) / parts;
    return assign_by(w, together, together);
}

// The same ranks' assignment of a step of `batches` micro-batches, however many: rounds of one for each replica, or of
// parts where the replicas are more. In the last round a rank may take nothing.
static Assignment assign_rounds(Assignment a, size_t batches) {
    const size_t replicas = a.stride * a.parts, replica = a.first * a.parts + a.part;
    size_t stride = max_size(min_size(batches, replicas), 1);
    while (replicas % stride) stride++;
    const size_t parts = replicas / stride;
    const Assignment rounds = {(batches + stride - 1) / stride * stride, stride, replica / parts, parts,
                               replica % parts};
    return rounds;
}

// All micro-batches for one process.
static Assignment assign_alone(size_t batches) {
    Assignment assignment = {batches, 1, 0, 1, 0};
    return assignment;
}

// Micro-batches of a step that this rank has a part of.
static size_t assigned_batches(Assignment assignment) { return assignment.batches / assignment.stride; }

// The number within the step of this rank's i-th.
static size_t assigned_number(Assignment assignment, size_t i) { return assignment.first + i * assignment.stride; }

// Refuses documents of equal length that do not come out even. B: those of a micro-batch, or its pairs or groups
static void assign_check_regular(Assignment assignment, World w, size_t B) {
    const size_t parts = assignment.parts, D = world_replicas(w);
    if (B % parts == 0) return;
    die_usage("--batch %zu with --grad-accum %zu: over %zu replicas every micro-batch is dealt in %zu parts, which %zu "
              "documents cannot be; --batch %zu or --grad-accum %zu would fit",
              B, assignment.batches, D, parts, B, (B / parts + 1) * parts, (assignment.batches / D + 1) * D);
}

#endif
