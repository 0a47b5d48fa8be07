/*
Op set "cuda"'s library calls, from op set "cpu" (linked, too): memory, matrix products and
collectives. Biases use our own kernels (llmc/ops/cuda/bias.cuh). With HAVE_CUDNN also cuDNN's attention, in plain loops
that round and overwrite as cuDNN does; it refuses head sizes of 8 modulo 16.
*/
#ifndef TEST_CUDA_LIBRARY_ON_CPU_H
#define TEST_CUDA_LIBRARY_ON_CPU_H
#include "llmc/ops/cuda/bias.cuh"

extern "C" const Ops OPS_TABLE(cpu);

// For CALL of testing.h
extern "C" void cuda_on_cpu_turn_order(void);
extern "C" void cuda_on_cpu_turn_order(void) { cuda_on_cpu::turn_order(); }
// For tests: the products of warp groups so far (wgmma_on_cpu.h)
extern "C" size_t cuda_on_cpu_group_products(void);
extern "C" size_t cuda_on_cpu_group_products(void) { return cuda_on_cpu::group_products; }

// Runs a library's work, or records it; ends the program if that is impossible.
template <typename Work> static auto library_call(const char *op, Work work) -> decltype(work()) {
    if (!launch_stream) return work();
    if (strcmp(op, "copy") && strcmp(op, "zero")) die("op %s was called while a step is recorded", op);
    cuda_on_cpu::submit(launch_stream, work);
    return decltype(work())();
}

#define OP_HOST(type, op, parameters, arguments)                                                                       \
    static type cuda_##op parameters { return OPS_TABLE(cpu).op arguments; }
#define OP_MEMORY(type, op, parameters, arguments, tensors)                                                            \
    static type cuda_##op parameters {                                                                                 \
        return library_call(#op, [=] { return OPS_TABLE(cpu).op arguments; });                                         \
    }
#define OP_GRAPH(...)
#define OP(...)
#define OP_SCRATCH(...)
#define OP_STEP(...)
#include "llmc/ops/op_list.h"
static void *memory_allocate(size_t bytes) { return cuda_allocate(bytes); }

static void cuda_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                                const Stored *residual, size_t n, size_t C, size_t OC, size_t stride) {
    const bool apart = bias && sizeof(floatX) == 4; // as if cuBLASLt took no bias; in bf16 that rounds twice
    cuda_on_cpu::submit(launch_stream, [=] {
        OPS_TABLE(cpu).linear_forward(out, x, weight, apart ? NULL : bias, residual, n, C, OC, stride);
    });
    if (apart) bias_add((floatX *)out, bias, n, OC, stride);
}
static void cuda_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                       size_t OC, size_t stride, int accumulate) {
    OPS_TABLE(cpu).linear_backward_input(dx, dout, weight, n, C, OC, stride, accumulate);
}
static void cuda_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                        size_t C, size_t OC, size_t stride) {
    OPS_TABLE(cpu).linear_backward_weight(dweight, NULL, dout, x, n, C, OC, stride);
    if (dbias) bias_backward(dbias, dout, n, OC, stride);
}
static void cuda_router_logits(Summed *logits, const Stored *x, const Stored *weight, const Stored *bias, size_t n,
                               size_t C, size_t E, int accumulate) {
    cuda_on_cpu::submit(launch_stream,
                        [=] { OPS_TABLE(cpu).router_logits(logits, x, weight, NULL, n, C, E, accumulate); });
    if (bias) bias_add((float *)logits, bias, n, E, E);
}

#ifdef HAVE_CUDNN
#include "llmc/ops/attention_calls.h"
#include "llmc/ops/cuda/cudnn_attention.h"
#include <vector>

static size_t cudnn_calls[2];
extern "C" size_t cudnn_attention_calls(int backward) { return cudnn_calls[backward]; }

// Returns the largest workspace that a plan may hold; all of it is overwritten.
static size_t cudnn_wants(const CudnnAttention *s, int backward) {
    return backward ? attention_workspace(s->queries, s->keys, s->heads, s->HD, s->any_order) : 64 << 10;
}
extern "C" int cudnn_attention_has(const CudnnAttention *shape, int backward, size_t workspace) {
    return shape->HD % 16 == 0 && (!shape->causal || shape->keys >= shape->queries) &&
           (shape->causal || !shape->window) && cudnn_wants(shape, backward) <= workspace;
}
extern "C" int cudnn_attention_start(void) { return 1; }
extern "C" const char *cudnn_attention_library(void) { return "cuDNN in plain loops"; }
extern "C" const char *cudnn_attention_refusal(void) { return "this one takes head sizes of 16, 32, ..."; }

// Returns row `row` of head `head`, as doubles.
static std::vector<double> cudnn_row(const void *x, size_t row, size_t heads, size_t head, size_t HD) {
    const floatX *from = (const floatX *)x + (row * heads + head) * HD;
    std::vector<double> values(HD);
    for (size_t d = 0; d < HD; d++) values[d] = load(from[d]);
    return values;
}
static double cudnn_dot(const std::vector<double> &a, const std::vector<double> &b) {
    double sum = 0.0;
    for (size_t d = 0; d < a.size(); d++) sum += a[d] * b[d];
    return sum;
}
// Returns the keys that a query sees.
static KeyRange cudnn_seen(const CudnnAttention *s, size_t query) {
    const size_t end = s->causal ? s->keys - s->queries + query + 1 : s->keys;
    return KeyRange{s->window && s->window < end ? end - s->window : 0, end};
}
// Checks that tensors are aligned to 16 bytes, sizes fit 32 bits, lengths are multiples of 128 (a fourth of the grid).
static void cudnn_demands(const CudnnAttention *s, int backward, bool aligned) {
    constexpr size_t multiple = CUDNN_GRID / 4;
    if (s->keys * s->NKV * s->HD > CUDNN_ELEMENTS) die("attention of %zu keys of %zu", s->keys, s->NKV * s->HD);
    if (!aligned || s->queries % multiple || s->keys % multiple)
        die("attention %s of %zu queries and %zu keys, %s: not for cuDNN", backward ? "backward" : "forward",
            s->queries, s->keys, aligned ? "aligned" : "not aligned");
}

extern "C" void cudnn_attention_forward(const CudnnAttention *s, void *out, float *lse, const void *q, const void *k,
                                        const void *v, void *workspace) {
    const size_t group = s->heads / s->key_heads;
    cudnn_demands(s, 0, all_aligned(out, q, k, v, workspace));
    memset(workspace, 0xa5, cudnn_wants(s, 0));
    cudnn_calls[0]++;
    for (size_t head = 0; head < s->heads; head++)
        for (size_t i = 0; i < s->queries; i++) {
            const std::vector<double> query = cudnn_row(q, i, s->NH, head, s->HD);
            const KeyRange seen = cudnn_seen(s, i);
            std::vector<double> scores(seen.end), sum(s->HD, 0.0);
            double most = -INFINITY, total = 0.0;
            for (size_t j = seen.begin; j < seen.end; j++) {
                scores[j] = s->scale * cudnn_dot(query, cudnn_row(k, j, s->NKV, head / group, s->HD));
                most = fmax(most, scores[j]);
            }
            for (size_t j = 0; j < seen.end; j++) { // keys before the window have p = 0, times their values
                const std::vector<double> value = cudnn_row(v, j, s->NKV, head / group, s->HD);
                const double p = j < seen.begin ? 0.0 : exp(scores[j] - most);
                total += p;
                for (size_t d = 0; d < s->HD; d++) sum[d] += p * value[d];
            }
            for (size_t d = 0; d < s->HD; d++)
                ((floatX *)out)[(i * s->NH + head) * s->HD + d] = store((float)(sum[d] / total));
            lse[head * s->queries + i] = (float)(most + log(total));
        }
}

extern "C" void cudnn_attention_backward(const CudnnAttention *s, void *dq, void *dk, void *dv, const void *dout,
                                         const void *out, const void *q, const void *k, const void *v, const float *lse,
                                         void *workspace) {
    const size_t group = s->heads / s->key_heads;
    std::vector<double> sum_q(s->queries * s->heads * s->HD, 0.0), sum_k(s->keys * s->key_heads * s->HD, 0.0),
        sum_v = sum_k;
    cudnn_demands(s, 1, all_aligned(dq, dk, dv, dout, out, q, k, v, workspace));
    memset(workspace, 0xa5, cudnn_wants(s, 1));
    cudnn_calls[1]++;
    for (size_t head = 0; head < s->heads; head++)
        for (size_t i = 0; i < s->queries; i++) {
            const std::vector<double> query = cudnn_row(q, i, s->NH, head, s->HD),
                                      given = cudnn_row(dout, i, s->NH, head, s->HD);
            const double delta = cudnn_dot(given, cudnn_row(out, i, s->NH, head, s->HD));
            for (size_t j = cudnn_seen(s, i).begin; j < cudnn_seen(s, i).end; j++) {
                const std::vector<double> key = cudnn_row(k, j, s->NKV, head / group, s->HD),
                                          value = cudnn_row(v, j, s->NKV, head / group, s->HD);
                const double p = exp(s->scale * cudnn_dot(query, key) - lse[head * s->queries + i]);
                const double ds = s->scale * p * (cudnn_dot(given, value) - delta);
                for (size_t d = 0; d < s->HD; d++) {
                    sum_q[(i * s->heads + head) * s->HD + d] += ds * key[d];
                    sum_k[(j * s->key_heads + head / group) * s->HD + d] += ds * query[d];
                    sum_v[(j * s->key_heads + head / group) * s->HD + d] += p * given[d];
                }
            }
        }
    for (size_t i = 0; i < sum_q.size(); i++) ((floatX *)dq)[i] = store((float)sum_q[i]);
    for (size_t i = 0; i < sum_k.size(); i++) ((floatX *)dk)[i] = store((float)sum_k[i]);
    for (size_t i = 0; i < sum_v.size(); i++) ((floatX *)dv)[i] = store((float)sum_v[i]);
}
#endif
#endif
