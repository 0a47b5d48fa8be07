/*
The sequence between host and device: tokens, targets and their weights go to the device, log-probabilities and
entropies come back. An objective looks at the whole sequence; where ranks share it, each moves its own tokens' values
and the host of every rank gets those of the others.
*/
#ifndef LLMC_SEQUENCE_H
#define LLMC_SEQUENCE_H
#include "chunks.h"
#include "llmc/ranks/dist.h"

// Elements of `size` bytes of the rank's own tokens: host [N] -> device [rows], or back
static void own_copy(const StreamBP *s, void *device, void *host, size_t size, int in) {
    for (size_t half = 0; half < 2; half++) {
        const Range own = s->own[half];
        void *rows = at(device, own_row(s, own.begin), size), *values = at(host, own.begin, size);
        if (own.count && in) s->ops->copy_in(rows, values, own.count * size);
        if (own.count && !in) s->ops->copy_out(values, rows, own.count * size);
    }
}

// All-gather of host[N] over the ranks that share the sequence, each of which has the values of its own tokens
static void host_gather(StreamBP *s, void *host) {
    const size_t size = dtype_size(dtype_of_sums(s->model->dtype)), S = s->ranks;
    const size_t most = sequence_share_max(s->N, S);
    if (S == 1) return;
    char *all = (char *)s->host_gathered, *own = all + S * most * size, *packed;
    size_t half;
    for (half = 0, packed = own; half < 2; packed += s->own[half++].count * size)
        memcpy(packed, at(host, s->own[half].begin, size), s->own[half].count * size);
    dist_gather(RANKS_SEQUENCE, own, most * size, all);
    for (size_t rank = 0; rank < S; rank++) {
        for (half = 0, packed = all + rank * most * size; half < 2; half++) {
            const Range part = sequence_part(s->N, S, rank, half);
            memcpy(at(host, part.begin, size), packed, part.count * size);
            packed += part.count * size;
        }
    }
}

// host[N] = device[rows] of all ranks
static void host_collect(StreamBP *s, void *host, Summed *device) {
    if (s->dry) return;
    own_copy(s, device, host, dtype_size(dtype_of_sums(s->model->dtype)), 0);
    host_gather(s, host);
}

// dL/dlogp of all targets, to the device. Weights that wait for log-probabilities find them in host_sums.
static void sequence_weights(StreamBP *s) {
    const DType type = dtype_of_sums(s->model->dtype);
    const int at_once = objective_weights_wait(&s->objective) == WEIGHTS_AT_ONCE;
    if (s->dry) return;
    objective_weights(&s->objective, s->batch, s->Z, 0, s->N, at_once ? NULL : s->host_sums, s->host_sums, type);
    own_copy(s, s->token_weight, s->host_sums, dtype_size(type), 1);
}

// Puts the sequence on the device. Z: loss denominator, objective_normaliser of the whole accumulated batch
static void sequence_begin(StreamBP *s, const Batch *batch, double Z, Pass pass) {
    s->batch = batch, s->Z = Z, s->pass = pass;
    sequence_split(s, world_sp(s->memory.world));
    size_t n = s->rows;
    s->tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", n, sizeof(int32_t));
    s->targets = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "targets", n, sizeof(int32_t));
    s->position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", n, sizeof(int32_t));
    s->token_weight = push_summed(s, SHARE_WORKSPACE, "token weights", n);
    s->logp = push_summed(s, SHARE_WORKSPACE, "log-probabilities", n);
    s->entropy = objective_is_of_policy(&s->objective) ? push_summed(s, SHARE_WORKSPACE, "entropies", n) : NULL;
    if (s->dry) return;
    if (batch->N > s->host_tokens || batch->documents > s->host_documents)
        die("a sequence of %zu tokens in %zu documents, but the run was set up for %zu in %zu", batch->N,
            batch->documents, s->host_tokens, s->host_documents);
    own_copy(s, s->tokens, batch->tokens, sizeof(int32_t), 1);
    own_copy(s, s->targets, batch->targets, sizeof(int32_t), 1);
    own_copy(s, s->position, batch->position, sizeof(int32_t), 1);
    if (objective_weights_wait(&s->objective) == WEIGHTS_AT_ONCE) sequence_weights(s);
}

// Log-probabilities and entropies of the whole sequence, to the host
static void sequence_end(StreamBP *s) {
    host_collect(s, s->host_sums, s->logp);
    if (s->entropy) host_collect(s, s->host_entropy, s->entropy);
}

// dL/dlogp of chunk c's targets, from the log-probabilities of these alone
static void sequence_chunk_weights(StreamBP *s, Chunk c) {
    const DType type = dtype_of_sums(s->model->dtype);
    const size_t size = dtype_size(type);
    void *values = at(s->host_sums, c.token, size);
    if (s->dry) return;
    s->ops->copy_out(values, summed_row(s, s->logp, c.row, 1), c.n * size);
    objective_weights(&s->objective, s->batch, s->Z, c.token, c.n, values, values, type);
    s->ops->copy_in(summed_row(s, s->token_weight, c.row, 1), values, c.n * size);
}

static double sequence_loss(const StreamBP *s, Metrics *metrics) {
    if (s->dry) return 0;
    return objective_loss(&s->objective, s->batch, s->Z, s->host_sums, s->entropy ? s->host_entropy : NULL,
                          dtype_of_sums(s->model->dtype), metrics);
}

#endif
