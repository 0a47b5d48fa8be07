/*
llm.c's CPU trainer behind llmc_bp.h. -I<checkout> comes first; TESTING leaves its main() out, as in llm.c's own
tests.
*/
#define TESTING
#include "train_gpt2.c"
#include "llmc/ops/arena.h"
#include "llmc_bp.h"

const char *const peer_attention = "plain loops, T x T scores kept", *const peer_peak_of = "process",
                  *const peer_dtype = "fp32";
static GPT2 model;
static size_t batch, seq_len, peak_at_start;

size_t peer_peak_bytes(void) { return host_memory_peak() - peak_at_start; }

// Weights, their gradients, activations and theirs.
static size_t bytes_of_pass(void) {
    size_t sizes[NUM_ACTIVATION_TENSORS], elements = model.num_parameters;
    fill_in_activation_sizes(sizes, model.config, (int)batch, (int)seq_len);
    for (size_t i = 0; i < NUM_ACTIVATION_TENSORS; i++) elements += sizes[i];
    return 2 * elements * sizeof(float);
}

int peer_open(const char *checkpoint, const PeerSettings *settings) {
    peak_at_start = host_memory_peak();
    batch = settings->batch, seq_len = settings->seq_len;
    gpt2_build_from_checkpoint(&model, checkpoint);
    if (batch * seq_len * (size_t)model.config.padded_vocab_size > INT_MAX ||
        batch * seq_len * seq_len * (size_t)model.config.num_heads > INT_MAX)
        die("%zu x %zu tokens: llm.c counts logits and scores with 32 bits; give fewer", batch, seq_len);
    return bytes_of_pass() <= (settings->limit ? settings->limit : host_memory_available());
}

double peer_pass(const int *tokens, const int *targets, double *seconds) {
    struct timespec begin, end;
    gpt2_zero_grad(&model);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    gpt2_forward(&model, (int *)tokens, (int *)targets, batch, seq_len);
    gpt2_backward(&model);
    clock_gettime(CLOCK_MONOTONIC, &end);
    *seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return model.mean_loss;
}

void peer_gradients(size_t first, size_t count, float *out) {
    memcpy(out, model.grads_memory + first, count * sizeof(float));
}
