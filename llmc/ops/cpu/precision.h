/*
floatX, the storage type of weights and activations, and floatS, the type of sums over tokens and of all arithmetic
inside an op. A build has one pair: -DPRECISION_BF16, -DPRECISION_DOUBLE, or fp32 without either.
Only op set "cpu" includes this; the driver sees Stored and Summed (ops.h), which it cannot dereference.
*/
#ifndef LLMC_CPU_PRECISION_H
#define LLMC_CPU_PRECISION_H
#include "llmc/base/dtype.h"

#if defined(PRECISION_BF16)
typedef struct {
    uint16_t bits;
} floatX;
typedef float floatS;
#define FLOATX_DTYPE DTYPE_BF16
static inline floatS load(floatX x) { return bf16_to_float(x.bits); }
static inline floatX store(floatS s) { return (floatX){float_to_bf16(s)}; }
#else
#if defined(PRECISION_DOUBLE)
typedef double floatX;
#define FLOATX_DTYPE DTYPE_FP64
#else
typedef float floatX;
#define FLOATX_DTYPE DTYPE_FP32
#endif
typedef floatX floatS;
static inline floatS load(floatX x) { return x; }
static inline floatX store(floatS s) { return s; }
#endif

#endif
