/*
Runs of elements whose type is known at run time only: stored gradients, AdamW's moments, a file's tensors. An op walks
them in blocks of BLOCK_ELEMENTS, each of which it sees as floatS: in place where the memory holds floatS already,
otherwise by way of a small buffer that stays in the first-level cache.
*/
#ifndef LLMC_CPU_ELEMENTS_H
#define LLMC_CPU_ELEMENTS_H
#include "llmc/base/utils.h"
#include "precision.h"

enum {
    BLOCK_ELEMENTS = 1024,  // also ADAMW_BLOCK
    PARALLEL_MIN = 1 << 14, // elements below which waking the other threads costs more than they save
};

// Sums over tokens are made in groups of so many: rounding errors of a long sum then grow with the number of groups and
// the length of one, not with their product.
enum { TOKEN_GROUP = 64 };

static inline size_t block_count(size_t count) { return (count + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS; }

static inline int is_floatS(DType type) { return type == dtype_of_sums(FLOATX_DTYPE); }

// Elements [begin, begin + count) of memory as floatS. `buffer` is used only where the type differs.
static floatS *block_open(void *memory, DType type, size_t begin, size_t count, floatS *buffer) {
    const float *fp32 = (const float *)memory + begin;
    const double *fp64 = (const double *)memory + begin;
    const uint16_t *bf16 = (const uint16_t *)memory + begin;
    if (is_floatS(type)) return (floatS *)memory + begin;
    switch (type) {
    case DTYPE_FP32:
        for (size_t i = 0; i < count; i++) buffer[i] = (floatS)fp32[i];
        break;
    case DTYPE_FP64:
        for (size_t i = 0; i < count; i++) buffer[i] = (floatS)fp64[i];
        break;
    case DTYPE_BF16:
        for (size_t i = 0; i < count; i++) buffer[i] = bf16_to_float(bf16[i]);
        break;
    default: die("op set cpu: no arithmetic on %s tensors; convert them to fp32 or bf16", dtype_name(type));
    }
    return buffer;
}

static const floatS *block_read(const void *memory, DType type, size_t begin, size_t count, floatS *buffer) {
    return block_open((void *)memory, type, begin, count, buffer);
}

// Rounds a block that block_open gave, and that was changed since, to its place in memory.
static void block_close(void *memory, DType type, size_t begin, size_t count, const floatS *block) {
    float *fp32 = (float *)memory + begin;
    double *fp64 = (double *)memory + begin;
    uint16_t *bf16 = (uint16_t *)memory + begin;
    if (is_floatS(type)) return; // was changed in place
    switch (type) {
    case DTYPE_FP32:
        for (size_t i = 0; i < count; i++) fp32[i] = (float)block[i];
        break;
    case DTYPE_FP64:
        for (size_t i = 0; i < count; i++) fp64[i] = (double)block[i];
        break;
    default:
        for (size_t i = 0; i < count; i++) bf16[i] = float_to_bf16((float)block[i]);
        break;
    }
}

#endif
