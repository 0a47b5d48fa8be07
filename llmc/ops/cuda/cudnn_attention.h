/*
cuDNN's fused attention, an optional part of op set "cuda" (used by attention_cudnn.cuh). Only cudnn_attention.cc sees
cuDNN's graphs; the host's compiler builds it if the headers of cuDNN and of its front end are found. The library is
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

// A call's shape. Compared byte by byte, so it has no padding.
typedef struct {
    size_t queries, keys;    // queries and keys of the call
    size_t heads, key_heads; // heads of the call
    size_t NH, NKV, HD;      // heads of the whole tensors
    size_t window;           // causal: most keys that a query sees, including its own; 0: all keys
    double scale;
    int causal;    // 1: the last query sees all keys, each earlier query one key less than the next; 0: each query sees
                   // all keys
    int any_order; // 1: backward may add in any order
} CudnnAttention;

// Starts cuDNN on the current device, which takes memory there. Returns 0 if there is no cuDNN, or it is too old.
int cudnn_attention_start(void);
// Returns cuDNN's name, "cuDNN 9.19.0"; NULL if it does not start.
const char *cudnn_attention_library(void);

// Returns whether there is a plan for this shape with at most `workspace` bytes. Its results are the same bits every
// time unless any_order is set. Plans are kept; a new length costs a compilation.
int cudnn_attention_has(const CudnnAttention *shape, int backward, size_t workspace);
// Returns in one line why cudnn_attention_has last returned 0.
const char *cudnn_attention_refusal(void);

// Returns how many calls this process has made.
size_t cudnn_attention_calls(int backward);

// Run one call, and end the program if cuDNN fails. Call them only if cudnn_attention_has has returned 1. Backward's
// lengths are multiples of 128, because sm_90 kernels up to cuDNN 9.30 give NaN in dq for 64 keys more (cudnn-frontend
// pull request 628).
void cudnn_attention_forward(const CudnnAttention *shape, void *out, float *lse, const void *q, const void *k,
                             const void *v, void *workspace);
void cudnn_attention_backward(const CudnnAttention *shape, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const void *q, const void *k, const void *v, const float *lse,
                              void *workspace);

#ifdef __cplusplus
}
#endif
#endif
