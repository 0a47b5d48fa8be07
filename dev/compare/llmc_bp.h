/*
What llmc_bp.c asks of a build of llm.c: llmc_bp_cpu.c and llmc_bp_cuda.cu answer, each around the training program of
the user's own checkout (a translation unit by itself: both sides call things by the same names). Gradients are
counted in elements of llm.c's one run of parameters, which lie there as in its checkpoints.
*/
#ifndef COMPARE_LLMC_BP_H
#define COMPARE_LLMC_BP_H
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t batch, seq_len;
    size_t limit;  // bytes that it may take, 0: what is free
    int recompute; // 0 nothing, 1 GELU, 2 norms, too (GPU; the CPU's trainer keeps all)
} PeerSettings;

// Loads a checkpoint. Returns 0, with nothing allocated, where a pass would take more than the limit.
int peer_open(const char *checkpoint, const PeerSettings *settings);

// Forward, loss and backward of tokens [B, T] with targets [B, T]; the mean loss. Gradients begin at zero.
double peer_pass(const int *tokens, const int *targets, double *seconds);

// Gradients first .. first + count of the last pass.
void peer_gradients(size_t first, size_t count, float *out);

// Bytes it has taken at most since peer_open was called.
size_t peer_peak_bytes(void);

extern const char *const peer_attention, *const peer_peak_of, *const peer_dtype;

#ifdef __cplusplus
}
#endif

#endif
