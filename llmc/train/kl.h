/*
Computes the reference of a micro-batch on the fly; for kto (objective.h) also the KL divergence from it, estimated from
mismatched documents (batch_mismatch). That takes two more passes over a sequence no longer than the micro-batch, of the
policy and of the reference, before the policy's own. A sequence of one document has no mismatched one and adds nothing
to the mean. Means are over the sequences of all replicas, so they depend on the number of ranks.
*/
#ifndef LLMC_KL_H
#define LLMC_KL_H
#include "all_reduce.h"
#include "llmc/cli/run.h"
#include "llmc/plan/flops.h"

// Allocates memory for micro-batches of at most `bound`.
static void kl_allocate(Run *run, SequenceBound bound) {
    if (!objective_needs_mismatched(&run->settings.objective)) return;
    run->mismatched = batch_allocate(bound.N, bound.documents);
    run->document_reference =
        (double *)checked_calloc(bound.documents, sizeof(double), "the reference of a batch's documents");
}

// Returns the mismatched documents of a batch, in the memory of run->mismatched; an empty sequence if there are none.
static Batch kl_mismatch(Run *run, const Batch *batch) {
    if (!batch->empty && batch->documents > 1) {
        batch_mismatch(batch, run->options->seq_len, &run->mismatched);
        return run->mismatched;
    }
    run->mismatched.tokens[0] = batch->tokens[0];
    return batch_empty(&run->mismatched);
}

// Returns sum_t m logp of document d after a forward pass.
static double kl_document(const StreamBP *s, const Batch *batch, size_t d) {
    const DType type = dtype_of_sums(s->model->dtype);
    double sum = 0;
    for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++) {
        const double m = target_weight(batch, t);
        if (m != 0) sum += m * logp_at(s->now.host_sums, type, t);
    }
    return sum;
}

// Estimates batch->kl. Collective.
static void kl_estimate(Run *run, Batch *batch) {
    StreamBP *s = &run->streambp;
    const Batch mismatched = kl_mismatch(run, batch);
    double sums[2] = {0, mismatched.empty ? 0 : (double)mismatched.documents};
    weights_flush(&s->memory);
    for (int reference = 0; reference < 2; reference++) {
        forward_logprobs(s, &mismatched, 1, reference && run->settings.reference != REFERENCE_MODEL);
        for (size_t d = 0; d < mismatched.documents && !mismatched.empty; d++)
            sums[0] += (reference ? -1 : 1) * kl_document(s, &mismatched, d);
    }
    sum_over_sequences(run->settings.world, sums, 2);
    batch->kl = sums[1] == 0 || sums[0] < 0 ? 0 : sums[0] / sums[1];
    if (sums[1] != 0 || run->kl_told || run->options->quiet) return;
    run->kl_told = 1;
    note("a micro-batch has only one document, so its KL divergence counts as 0; give a larger --batch, or "
         "--samples");
}

// Computes the reference of a micro-batch, and kto's divergence. Collective.
static void run_reference(Run *run, Batch *batch) {
    const ReferenceModel reference = run->settings.reference;
    StreamBP *s = &run->streambp;
    if (!objective_needs_mismatched(&run->settings.objective)) {
        if (reference) forward_policy(s, batch, reference != REFERENCE_MODEL, batch->reference);
        return;
    }
    kl_estimate(run, batch);
    forward_logprobs(s, batch, 1, reference != REFERENCE_MODEL);
    for (size_t d = 0; d < batch->documents; d++) run->document_reference[d] = kl_document(s, batch, d);
    batch->document_reference = run->document_reference;
}

// Returns the FLOPs of run_reference.
static double flops_reference(Run *run, const Batch *batch) {
    const RunSettings *settings = &run->settings;
    const int adapters = settings->reference != REFERENCE_BASE;
    if (!settings->reference) return 0;
    double flops = flops_forward(settings, batch, adapters);
    if (!objective_needs_mismatched(&settings->objective)) return flops;
    const Batch mismatched = kl_mismatch(run, batch);
    return flops + flops_forward(settings, &mismatched, 1) + flops_forward(settings, &mismatched, adapters);
}

#endif
