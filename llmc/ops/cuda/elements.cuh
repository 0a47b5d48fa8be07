/*
Runs of elements whose type is known at run time only (stored gradients, AdamW's moments): a kernel is made for each
type, and with_type chooses. Element types of files that are not computed in (fp16) are refused.
*/
#ifndef LLMC_CUDA_ELEMENTS_CUH
#define LLMC_CUDA_ELEMENTS_CUH
#include "platform.cuh"

struct Bf16 { // an element of type bf16, whatever floatX is
    uint16_t bits;
};

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(Bf16 x) { return bf16_value(x.bits); }
__device__ inline void set_value(float *x, float value) { *x = value; }
__device__ inline void set_value(Bf16 *x, float value) { x->bits = bf16_nearest(value); }

// Calls launch with a null pointer to the element type.
template <typename F> static void with_type(DType type, const char *op, F launch) {
    if (type == DTYPE_FP32)
        launch((float *)NULL);
    else if (type == DTYPE_BF16)
        launch((Bf16 *)NULL);
    else
        die("%s: op set cuda has no arithmetic on %s tensors; use fp32 or bf16", op, dtype_name(type));
}

#endif
