/*
The largest sequence of a run, for which its memory is planned, and a batch of its shape without tokens.
*/
#ifndef LLMC_BOUND_H
#define LLMC_BOUND_H
#include "run.h"

// Returns the bound of B documents of T tokens. B = 0: only generation
static SequenceBound regular_bound(size_t B, size_t T) {
    if (B && T > PLAN_LONGEST / B)
        die_usage("--batch %zu x --seq-len %zu must be at most %zu tokens", B, T, PLAN_LONGEST);
    const SequenceBound bound = {B * T, B, T, 0, 0};
    return bound;
}

// Returns the bound of B documents of random tokens, of --seq-len tokens each, in `parts` parts. The documents of a
// part begin with --shared-tokens tokens.
static SequenceBound random_bound(const Run *run, size_t B, size_t parts) {
    const size_t T = run->options->seq_len, shared = shared_tokens(run->options, run->settings.lora);
    SequenceBound bound = regular_bound(B, T);
    if (shared > 1 && T > 1 && B > parts)
        bound.rows = parts * rows_of_shared(B / parts, T, shared), bound.forks = parts;
    return bound;
}

// Returns how many rows are computed: positions that documents share count once.
static size_t bound_rows(SequenceBound bound) { return bound.rows ? bound.rows : bound.N; }

static SequenceBound larger_bound(SequenceBound a, SequenceBound b) {
    const size_t forks = max_size(a.forks, b.forks), rows = max_size(bound_rows(a), bound_rows(b));
    const SequenceBound bound = {max_size(a.N, b.N), max_size(a.documents, b.documents), max_size(a.longest, b.longest),
                                 a.rows || b.rows ? rows : 0, forks};
    return bound;
}

// Returns the largest sequence of this rank, of `data` or (NULL) of random documents. With --samples a step may have as
// many micro-batches as replicas; these micro-batches are not divided into parts.
static SequenceBound run_bound(const Run *run, const DataLoader *data) {
    const Options *o = run->options;
    const size_t parts = o->samples || run->settings.deals ? 1 : run->assignment.parts;
    if (!(data && !data->regular) && parts > 1) assign_check_regular(run->assignment, run->settings.world, o->batch);
    if (!data) return random_bound(run, o->batch / parts * sample_documents(o), 1);
    SequenceBound bound = dataloader_part_bound(data, parts);
    if (!data->regular && objective_needs_mismatched(&run->settings.objective))
        // Mismatched documents may be longer than any document of the data.
        bound.longest = min_size(bound.N, o->seq_len);
    return bound;
}

// Returns how many documents of T tokens fill the largest sequence, or share tokens there.
static size_t bound_documents(const Run *run, SequenceBound bound, size_t T) {
    return shared_tokens(run->options, run->settings.lora) ? bound.documents : (bound_rows(bound) + T - 1) / T;
}

// Returns a batch of this shape without tokens: all that a plan needs. Documents have the longest length; leftovers are
// empty. Free it with batch_free.
static Batch batch_shape(SequenceBound bound) {
    Batch batch = {0};
    batch.N = bound.N, batch.documents = bound.documents;
    if (bound.N) batch.documents = max_size(bound.documents, (bound.N + bound.longest - 1) / bound.longest);
    batch.documents = max_size(batch.documents, 2 * bound.forks); // a fork has two branches
    batch.document_start = (size_t *)checked_calloc(batch.documents + 1, sizeof(size_t), "the documents of a plan");
    for (size_t d = 0; d <= batch.documents; d++) batch.document_start[d] = min_size(d * bound.longest, bound.N);
    if (!bound.rows) return batch;
    batch.room = tree_allocate(0, batch.documents); // also if the largest sequence shares nothing: others may
    shape_share(&batch, min_size(bound.rows, bound.N), bound.forks, bound.longest);
    return batch;
}

#endif
