/*
llm.c's GPU trainer behind llmc_bp.h: bf16, or fp32 with -DENABLE_FP32; with -DENABLE_CUDNN and its llmc/cudnn_att.cpp
the attention is cuDNN's. -I<checkout> comes first; TESTING leaves its main() out, as in llm.c's own tests. One
process, no optimizer state.
*/
#define TESTING
#include <cuda_runtime.h>
#if CUDART_VERSION >= 13000
// The call of CUDA 12, a number for the place, which llm.c makes; 13 wants a description of it.
static inline cudaError_t cudaMemAdvise(const void *memory, size_t bytes, cudaMemoryAdvise advice, int device) {
    cudaMemLocation place = {};
    place.type = device == cudaCpuDeviceId ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
    place.id = device == cudaCpuDeviceId ? 0 : device;
    return cudaMemAdvise(memory, bytes, advice, place);
}
#endif
#include "train_gpt2.cu"
#include "llmc_bp.h"
#include <vector>

#ifdef ENABLE_CUDNN
extern const char *const peer_attention = "cudnn";
#else
extern const char *const peer_attention = "llm.c's own kernels, T x T scores kept";
#endif
extern const char *const peer_peak_of = "device";
extern const char *const peer_dtype = PRECISION_MODE == PRECISION_BF16 ? "bf16" : "fp32";
static GPT2 model;
static size_t batch, seq_len, free_at_start;

static size_t device_free() {
    size_t free_bytes, total;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

// It gives nothing back between passes: what is in use now is the most.
size_t peer_peak_bytes(void) { return free_at_start - device_free(); }

// Beside the weights: gradients, activations, inputs and targets.
static size_t bytes_of_pass() {
    ActivationTensors acts;
    TensorSpec specs[NUM_ACTIVATION_TENSORS];
    size_t bytes = model.num_parameters_bytes + 2 * batch * seq_len * sizeof(int);
    fill_in_activation_sizes(&acts, specs, batch, seq_len, model.config, model.recompute);
    for (const TensorSpec &spec : specs) bytes += spec.size * sizeof_dtype(spec.type);
    return bytes;
}

int peer_open(const char *checkpoint, const PeerSettings *settings) {
    char none[] = "", mpi[] = "mpi";
    batch = settings->batch, seq_len = settings->seq_len;
    cudaCheck(cudaFree(nullptr)); // creates the context, which no contender counts
    free_at_start = device_free();
    multi_gpu_config = multi_gpu_config_init(1, 0, 1, none, none, mpi);
    common_start(false, false); // without TF32
    gpt2_init_common(&model);
    model.use_master_weights = 0;
    model.recompute = settings->recompute;
    gpt2_build_from_checkpoint(&model, checkpoint);
    const size_t wanted = bytes_of_pass();
    if (wanted > device_free() || (settings->limit && wanted + peer_peak_bytes() > settings->limit)) return 0;
    set_zero_configs(&multi_gpu_config, 0, model.num_parameters);
    multi_gpu_config.shard_num_parameters = 1; // the optimizer's moments, which a pass has no use for
    gpt2_allocate_state(&model, (int)batch, (int)seq_len);
    return 1;
}

// Both functions of llm.c wait for the device before they return; backward sets its gradients to zero at first.
double peer_pass(const int *tokens, const int *targets, double *seconds) {
    struct timespec begin, end;
    cudaCheck(cudaDeviceSynchronize());
    clock_gettime(CLOCK_MONOTONIC, &begin);
    gpt2_forward(&model, tokens, batch, seq_len);
    gpt2_backward_and_reduce(&model, const_cast<int *>(tokens), targets, 1, 0);
    cudaCheck(cudaDeviceSynchronize());
    clock_gettime(CLOCK_MONOTONIC, &end);
    *seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return model.mean_loss;
}

void peer_gradients(size_t first, size_t count, float *out) {
    std::vector<floatX> values(count);
    cudaCheck(cudaMemcpy(values.data(), (const floatX *)model.grads_memory + first, count * sizeof(floatX),
                         cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) out[i] = (float)values[i];
}
