/*
Dimensions of the tensors of op cases (op_cases.h): their sizes, and the indices that the reference computes. A driver
that computes every element samples nothing.
*/
#ifndef LLMC_OP_DIMS_H
#define LLMC_OP_DIMS_H
#include <stddef.h>
#include "llmc/base/dtype.h"

typedef struct {
    size_t size, count;
    const size_t *at;             // [count] indices of the sample, ascending; NULL: all indices
    size_t own, first, in_sample; // number of columns that the op takes (0: all), and the first of these columns in a
                                  // row and in a sampled row
} Dim;

// CHANGED: read and written. WRITTEN: contents before the op do not matter. SCRATCH: contents never matter
typedef enum { TENSOR_READ, TENSOR_CHANGED, TENSOR_WRITTEN, TENSOR_SCRATCH } TensorUse;

static Dim dim_of(size_t size, size_t count, const size_t *at) {
    const Dim dim = {size, count, at, 0, 0, 0};
    return dim;
}
static Dim all_of(size_t size) { return dim_of(size, size, NULL); }

static size_t dim_at(Dim d, size_t i) { return d.at ? d.at[i] : i; }

// Returns element i of integers that are as wide as a type: uint16_t, int32_t, int64_t.
static int64_t integer_at(const void *elements, DType type, size_t i) {
    const size_t size = dtype_size(type);
    return size == 2   ? (int64_t)((const uint16_t *)elements)[i]
           : size == 4 ? (int64_t)((const int32_t *)elements)[i]
                       : ((const int64_t *)elements)[i];
}

#endif
