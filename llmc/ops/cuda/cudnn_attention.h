/*
cuDNN's fused attention, an optional part of op set "cuda" (used by attention_cudnn.cuh). Only cudnn_attention.cc sees
cuDNN's graphs; the host's compiler builds it if cuDNN's headers and those of its front end are found. The library is
loaded at first use: a program built with it runs without it.

A call is one document's queries against one range of its keys. Tensors are slices of larger ones: rows are NH * HD (q,
out, dout) or NKV * HD (k, v) elements apart. log-sum-exp is lse[heads][queries]; gradients are packed:
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
    size_t window;           // causal: most keys that a query sees, its own included; 0: all
    double scale;
    int causal;    // the last query sees all keys, each one before it one fewer; otherwise all see all
    int any_order; // backward may add in any order
} CudnnAttention;

// Starts cuDNN on the current device, which takes memory there. Returns 0 if there is none, or it is too old.
int cudnn_attention_start(void);
// Returns "cuDNN 9.19.0"; NULL if it does not start.
const char *cudnn_attention_library(void);

// Returns whether there is a plan for this shape with at most `workspace` bytes; its results are the same bits every
// time unless any_order is set. Plans are kept; a new length costs a compilation.
int cudnn_attention_has(const CudnnAttention *shape, int backward, size_t workspace);
// Returns why it last returned 0, in one line.
const char *cudnn_attention_refusal(void);

// Returns the calls made in this process.
size_t cudnn_attention_calls(int backward);

// These end the program if cuDNN fails. Call only after cudnn_attention_has. Backward's lengths are multiples of 128:
// sm_90 kernels up to cuDNN 9.30 give NaN in dq for 64 keys more (cudnn-frontend pull request 628).
void cudnn_attention_forward(const CudnnAttention *shape, void *out, float *lse, const void *q, const void *k,
                             const void *v, void *workspace);
void cudnn_attention_backward(const CudnnAttention *shape, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const void *q, const void *k, const void *v, const float *lse,
                              void *workspace);

#ifdef __cplusplus
}
#endif
#endif
