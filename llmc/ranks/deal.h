/*
How the micro-batches of a step are dealt over the replicas of a run. --batch, --seq-len and --grad-accum describe the
whole step, however many processes do it, so that loss and gradients are those of a process alone.

A micro-batches, D replicas: g = gcd(A, D) of them are worked on at a time, each by D / g replicas, which take a part of
its documents each (batch_part). Replica d takes micro-batches i with i % g == d / parts, and of each part d % parts.

    A 8, D 4    g 4, parts 1    whole micro-batches, two for each replica
    A 1, D 4    g 1, parts 4    a quarter of the micro-batch for each
    A 6, D 4    g 2, parts 2    half of three micro-batches for each

Every rank has the same number of them. Where the last round of an evaluation is not full, or no document falls to a
part, a rank takes a stream of one token that does not count: collectives need all ranks.
*/
#ifndef LLMC_DEAL_H
#define LLMC_DEAL_H
#include "llmc/base/utils.h"
#include "world.h"

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
    const size_t parts = world_replicas(w) / stride, replica = world_replica(w);
    // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): no part is 0, stride divides the replicas
    Assignment assignment = {batches, stride, replica / parts, parts, replica % parts};
    return assignment;
}

static Assignment assign_step(World w, size_t batches) {
    return assign_by(w, batches, greatest_common_divisor(batches, world_replicas(w)));
}

// Of an evaluation, which takes one micro-batch after the other: `parts` of each, and so many micro-batches at a time.
static Assignment assign_evaluation(World w, size_t parts) {
    const size_t together = world_replicas(w) / parts;
    return assign_by(w, together, together);
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
