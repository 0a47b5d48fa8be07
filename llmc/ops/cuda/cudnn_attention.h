/*
cuDNN's fused attention, behind calls that op set "cuda" may or may not have (attention_cudnn.cuh asks). Only
cudnn_attention.cc sees cuDNN's graphs; the host's compiler builds it where cuDNN's headers and those of its front end
are found. The library is loaded when it is first asked for: a program built with it runs without it.

A call is one document's queries against one range of its keys. Tensors are slices of larger ones: rows lie NH * HD (q,
out, dout) or NKV * HD (k, v) elements apart. log-sum-exp lies as lse[heads][queries]; gradients are packed:
dq[queries][heads][HD], dk, dv[keys][key_heads][HD]. All are bf16 except lse. Device memory throughout.
*/
#ifndef LLMC_CUDA_CUDNN_ATTENTION_H
#define LLMC_CUDA_CUDNN_ATTENTION_H
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Compared byte by byte: no padding.
typedef struct {
    size_t queries, keys;    // of this call
    size_t heads, key_heads; // of this call
    size_t NH, NKV, HD;      // of the tensors
    size_t window;           // causal: keys that a query sees at most, the last its own; 0: all
    double scale;
    int causal;    // the last query sees all keys, every one before it one less; otherwise all see all
    int any_order; // backward may add in any order
} CudnnAttention;

// Starts cuDNN on the device at hand, which takes memory there. 0 where there is none, or it is too old.
int cudnn_attention_start(void);
// "cuDNN 9.19.0"; NULL where it does not start
const char *cudnn_attention_library(void);

// True if there is a plan for this shape that needs at most `workspace` bytes; it gives the same bits every time unless
// any_order is set. Plans are kept; a new length costs a compilation.
int cudnn_attention_has(const CudnnAttention *shape, int backward, size_t workspace);
// Why there was none when that was last answered with 0, in one line
const char *cudnn_attention_refusal(void);

// Calls taken in this process
size_t cudnn_attention_calls(int backward);

// These end the program where cuDNN fails. Only after cudnn_attention_has. Backward's lengths are multiples of 128:
// kernels of sm_90 up to cuDNN 9.30 give NaN in dq for 64 keys more (cudnn-frontend pull request 628).
void cudnn_attention_forward(const CudnnAttention *shape, void *out, float *lse, const void *q, const void *k,
                             const void *v, void *workspace);
void cudnn_attention_backward(const CudnnAttention *shape, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const void *q, const void *k, const void *v, const float *lse,
                              void *workspace);

#ifdef __cplusplus
}
#endif
#endif
