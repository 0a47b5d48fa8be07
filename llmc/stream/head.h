/*
The head: x_L -> logits -> log-probabilities, and back, a chunk of tokens at a time (head_step of streambp.h).

The head knows an objective (llmc/data/objective.h) as a weight per token: dlogits = weight / temperature * (onehot -
softmax). What the weights wait for decides how often a chunk's logits are made. Of sft they are there before the head
runs. Of grpo and ppo they follow from the chunk's own log-probabilities, in the same visit. Of pairs and of gspo they
need those of the whole stream, so that a pass for log-probabilities alone comes first.
*/
#ifndef LLMC_HEAD_H
#define LLMC_HEAD_H
#include "stream_host.h"

typedef struct {
    const Stored *norm, *norm_bias; // [C] the final norm; norm_bias NULL with RMSNorm
    const Stored *matrix;           // [V,C]
    Stored *norm_out;               // [n,C]
    Stored *logits;                 // [n,V]
} HeadStep;

// x_L of chunk c -> its logits, pushed.
static HeadStep head_forward(StreamBP *s, Chunk c, GroupWeights w) {
    Shapes d = shapes_of(s->model);
    HeadStep h;
    h.norm = (const Stored *)w.weights;
    h.norm_bias =
        s->model->model_offset[FINAL_NORM_BIAS] == ABSENT ? NULL : (const Stored *)at(w.weights, d.C, d.stored);
    h.matrix = (const Stored *)w.matrix;
    h.norm_out = push_stored(s, SHARE_LOGITS, "final norm", c.n * d.C);
    h.logits = push_stored(s, SHARE_LOGITS, "logits", c.n * d.V);
    norm_forward(s, h.norm_out, input_load(&s->memory, d.L, c.begin), h.norm, h.norm_bias, c.n);
    s->ops->linear_forward(h.logits, h.norm_out, h.matrix, NULL, NULL, c.n, d.C, d.V);
    return h;
}

// Weights of chunk c's targets, from their log-probabilities.
static void head_weights(StreamBP *s, Chunk c) {
    const size_t size = dtype_size(dtype_of_sums(s->model->dtype));
    void *values = at(s->host_sums, c.place, size);
    if (s->dry) return;
    s->ops->copy_out(values, at(s->logp, c.begin, size), c.n * size);
    objective_weights(&s->objective, s->batch, s->Z, c.place, c.n, values, values, dtype_of_sums(s->model->dtype));
    s->ops->copy_in(at(s->token_weight, c.begin, size), values, c.n * size);
}

// Log-probabilities of chunk c's targets; with sums also dW, and the gradient of x_L[c] over x_L[c].
static void head_step(StreamBP *s, Chunk c, GroupWeights w, const GroupSums *sums) {
    Shapes d = shapes_of(s->model);
    size_t mark = arena_mark(s->arena);
    HeadStep h = head_forward(s, c, w);
    const int by_token = objective_weights_wait(&s->objective) == WEIGHTS_BY_TOKEN;
    Summed *logp = (Summed *)at(s->logp, c.begin, d.summed);
    Summed *entropy = s->entropy ? (Summed *)at(s->entropy, c.begin, d.summed) : NULL;
    if (!sums || by_token)
        s->ops->logprob(logp, entropy, h.logits, s->targets + c.begin, NULL, c.n, d.V, s->objective.temperature);
    if (sums) {
        Stored *x = input_load(&s->memory, d.L, c.begin), *dlogits = h.logits, *dnorm_out = h.norm_out;
        Summed *dnorm_bias = sums->norm && h.norm_bias ? (Summed *)at(sums->norm, d.C, d.summed) : NULL;
        if (by_token) head_weights(s, c);
        s->ops->logprob(logp, NULL, dlogits, s->targets + c.begin, (Summed *)at(s->token_weight, c.begin, d.summed),
                        c.n, d.V, s->objective.temperature);
        if (sums->head) s->ops->linear_backward_weight(sums->head, NULL, dlogits, h.norm_out, c.n, d.C, d.V);
        s->ops->linear_backward_input(dnorm_out, dlogits, h.matrix, c.n, d.C, d.V, 0);
        norm_backward(s, x, sums->norm, dnorm_bias, dnorm_out, x, h.norm, c.n, 0);
    }
    arena_pop(s->arena, mark);
}

static void head_pass(StreamBP *s, GroupWeights w, const GroupSums *sums) {
    size_t size = effective_chunk(s, s->logits_chunk);
    for (size_t i = 0; i < chunk_visits(s, size); i++) head_step(s, chunk_visit(s, i, size), w, sums);
}

// Where weights wait for the log-probabilities of the whole stream, these come first, in a pass of their own.
static void head(StreamBP *s, int backward) {
    GroupWeights w = weights_acquire(&s->memory, GROUP_HEAD);
    if (!backward) {
        head_pass(s, w, NULL);
    } else {
        GroupSums sums = grads_acquire(&s->memory, GROUP_HEAD);
        if (objective_weights_wait(&s->objective) == WEIGHTS_BY_STREAM) {
            head_pass(s, w, NULL);
            host_collect(s, s->host_sums, s->logp);
            sequence_weights(s);
        }
        head_pass(s, w, &sums);
        grads_release(&s->memory, GROUP_HEAD, sums);
    }
    weights_release(&s->memory, GROUP_HEAD);
}

#endif
