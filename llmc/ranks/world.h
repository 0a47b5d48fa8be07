/*
The processes of a run, and how work and memory are sharded over them. One process is one rank and one device.

    ranks = replicas x sp       `sp` consecutive ranks share a stream (sequence parallelism), replicas take different
                                streams (data parallelism)
    zero                        ZeRO stage (arXiv 1910.02054): what is sharded over all ranks: 1 optimizer state,
                                2 also gradients, 3 also weights

A World of zeros is a single process. Nothing here communicates. dist.h communicates on the host, the collectives of
ops.h move tensors.
*/
#ifndef LLMC_WORLD_H
#define LLMC_WORLD_H
#include "llmc/base/utils.h"
#include <stddef.h>

typedef struct {
    size_t ranks, rank; // ranks 0 counts as 1
    size_t zero;        // stage, 0 to 3
    size_t sp;          // ranks that share a stream; 0 counts as 1; divides ranks
} World;

// Ranks that take part in a collective. RANKS_SEQUENCE_REVERSED: the ranks of RANKS_SEQUENCE in reverse order
typedef enum { RANKS_ALL, RANKS_SEQUENCE, RANKS_SEQUENCE_REVERSED, RANK_GROUPS } RankGroup;

static World world_alone(void) {
    World alone = {0, 0, 0, 0};
    return alone;
}

static size_t world_ranks(World w) { return w.ranks ? w.ranks : 1; }
static size_t world_sp(World w) { return w.sp ? w.sp : 1; }
static size_t world_replicas(World w) { return world_ranks(w) / world_sp(w); }
static size_t world_replica(World w) { return w.rank / world_sp(w); }

// Returns the number of ranks in a group.
static size_t ranks_in(World w, RankGroup group) { return group == RANKS_ALL ? world_ranks(w) : world_sp(w); }

static size_t rank_in(World w, RankGroup group) {
    size_t place = w.rank % world_sp(w);
    return group == RANKS_ALL ? w.rank : group == RANKS_SEQUENCE ? place : world_sp(w) - 1 - place;
}

// ---- shares: `count` elements over ranks in whole units; the last rank gets the remainder ---------------------------
#define SHARD_ALIGNMENT 256 // elements of a block of 8-bit moments

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

// Returns the largest share; every rank plans memory for it.
static size_t shard_range_max(size_t count, size_t unit, size_t ranks) {
    return shard_range(count, unit, ranks, ranks - 1).count;
}

// ---- the tokens of a stream: each of its ranks owns two ranges, so that causal work is balanced ---------------------
// Returns the most tokens that a rank owns: an even share, rounded up. It never falls as N grows.
static size_t sequence_share_max(size_t N, size_t S) { return (N + S - 1) / S; }

// Returns the rows of a half: S portions of equal size, so that fewer than S rows follow the last token. With one rank
// the first half has all rows.
static Range sequence_half(size_t N, size_t S, size_t half) {
    const size_t most = sequence_share_max(N, S), second = S > 1 ? most / 2 : 0, first = most - second;
    const Range halves[2] = {{0, S * first}, {S * first, S * second}};
    return halves[half];
}

// Returns the rows of both halves.
static size_t sequence_rows(size_t N, size_t S) { return S * sequence_share_max(N, S); }

// Returns the range of a half that rank `rank` of S owns, cut at N. The first half follows the order of RANKS_SEQUENCE,
// the second the order of RANKS_SEQUENCE_REVERSED.
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

// Returns a rank with the most tokens and the longest ranges: the last rank, where the halves meet, or the first if N <
// S.
static size_t sequence_largest_rank(size_t N, size_t S) { return N < S ? 0 : S - 1; }

// ---- traffic --------------------------------------------------------------------------------------------------------
// Purposes of the bytes that a rank sends. Counts a bandwidth-optimal reduce-scatter or all-gather: of n bytes over P
// ranks each rank sends n (P - 1) / P.
typedef enum {
    TRAFFIC_GRADIENTS,           // gradients reduced over all ranks
    TRAFFIC_WEIGHTS,             // weights gathered after updates (stages 1, 2) or before a layer is used (stage 3)
    TRAFFIC_KEYS_VALUES,         // keys and values sent to the ranks that share a sequence
    TRAFFIC_KEY_VALUE_GRADIENTS, // gradients sent to the rank that owns the token
    TRAFFIC_STATES,              // states of linear attention and their gradients, sent to the rank of the next tokens
    TRAFFIC_KINDS
} TrafficKind;

static const char *const traffic_names[TRAFFIC_KINDS] = {"gradients", "weights", "keys_values", "key_value_gradients",
                                                         "states"};

typedef struct {
    double bytes[TRAFFIC_KINDS], calls[TRAFFIC_KINDS];
    double hops[TRAFFIC_KINDS]; // sequential sends from rank to rank over all calls; an exchange counts as one
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
How the micro-batches of a step are distributed over the replicas. --batch, --seq-len and --grad-accum describe the
whole step for any number of processes, so that loss and gradients equal a single process's.

A micro-batches, D replicas: g = gcd(A, D) micro-batches run at a time. D / g replicas share one micro-batch; each takes
a part of its documents (batch_part). Replica d takes micro-batches i with i % g == d / parts, and of each part d %
parts.

    A 8, D 4    g 4, parts 1    whole micro-batches, two for each replica
    A 1, D 4    g 1, parts 4    a quarter of the micro-batch for each
    A 6, D 4    g 2, parts 2    half of three micro-batches for each

Every rank has the same number of micro-batches, since collectives need all ranks. A rank may have no documents: in an
incomplete last round of an evaluation or of --samples (assign_rounds), or in a part without documents. It takes a
stream of one token that does not count.
*/
typedef struct {
    size_t batches;       // micro-batches of a step
    size_t stride, first; // this rank's micro-batches: first, first + stride, ... below batches
    size_t parts, part;   // parts of each micro-batch, and this rank's part
} Assignment;

static size_t greatest_common_divisor(size_t a, size_t b) {
    while (b) {
        size_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

// Assigns `batches` micro-batches, `stride` at a time. `stride` divides the replicas and `batches`.
static Assignment assign_by(size_t replicas, size_t replica, size_t batches, size_t stride) {
    // NOLINTBEGIN(clang-analyzer-core.UndefinedBinaryOperatorResult): no part is 0, stride divides the replicas
    const size_t parts = replicas / stride;
    Assignment assignment = {batches, stride, replica / parts, parts, replica % parts};
    // NOLINTEND(clang-analyzer-core.UndefinedBinaryOperatorResult)
    return assignment;
}

static Assignment assign_step(World w, size_t batches) {
    const size_t replicas = world_replicas(w);
    return assign_by(replicas, world_replica(w), batches, greatest_common_divisor(batches, replicas));
}

// Assigns an evaluation's micro-batches, each in `parts` parts.
static Assignment assign_evaluation(World w, size_t parts) {
    const size_t together = world_replicas(w) / parts;
    return assign_by(world_replicas(w), world_replica(w), together, together);
}

// Assigns any number of micro-batches as `a` does, in rounds; in the last round a rank may have none.
static Assignment assign_rounds(Assignment a, size_t batches) {
    const size_t replicas = a.stride * a.parts, replica = a.first * a.parts + a.part;
    size_t stride = max_size(min_size(batches, replicas), 1);
    while (replicas % stride) stride++;
    return assign_by(replicas, replica, (batches + stride - 1) / stride * stride, stride);
}

// Returns the number of micro-batches in which this rank has a part.
static size_t assigned_batches(Assignment assignment) { return assignment.batches / assignment.stride; }

// Returns the index within the step of this rank's i-th micro-batch.
static size_t assigned_number(Assignment assignment, size_t i) { return assignment.first + i * assignment.stride; }

// Refuses documents of equal length that cannot be divided evenly. B: documents, pairs or groups of a micro-batch
static void assign_check_regular(Assignment assignment, World w, size_t B) {
    const size_t parts = assignment.parts, D = world_replicas(w);
    if (B % parts == 0) return;
    die_usage(
        "--batch %zu with --grad-accum %zu: over %zu replicas a micro-batch has %zu parts, which do not divide %zu "
        "documents; --sp %zu, --batch %zu or --grad-accum %zu would fit",
        B, assignment.batches, D, parts, B, world_ranks(w), (B / parts + 1) * parts, (assignment.batches / D + 1) * D);
}

#endif
