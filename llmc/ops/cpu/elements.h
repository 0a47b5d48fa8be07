/*
Runs of elements whose type is known at run time only: stored gradients, AdamW's moments, a file's tensors. An op walks
them in blocks of BLOCK_ELEMENTS, as floatS: in place if the memory holds floatS, else in a small buffer in the L1
cache.
*/
#ifndef LLMC_CPU_ELEMENTS_H
#define LLMC_CPU_ELEMENTS_H
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
#endif
#include "llmc/base/utils.h"
#include "precision.h"

enum {
    BLOCK_ELEMENTS = 1024,  // equals ADAMW_BLOCK
    PARALLEL_MIN = 1 << 14, // with fewer elements, waking the other threads costs more than they save
};

#ifndef PARALLEL_WORK                   // tests set 1, so that small shapes take the path of large ones
#define PARALLEL_WORK ((size_t)1 << 17) // the same limit for matrix products and attention, in multiply-adds
#endif

// Tokens of a group: sums over tokens are made in groups, so rounding errors grow with the number of groups plus their
// length.
enum { TOKEN_GROUP = 64 };

#define FLOATS_DTYPE dtype_of_sums(FLOATX_DTYPE)

static inline size_t block_count(size_t count) { return (count + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS; }

// Returns elements [begin, begin + count) of memory as floatS, in `buffer` if the stored type differs.
static floatS *block_open(void *memory, DType type, size_t begin, size_t count, floatS *buffer) {
    void *block = (char *)memory + begin * dtype_size(type);
    if (type == DTYPE_FP16)
        die("op set cpu: no arithmetic on %s tensors; convert them to fp32 or bf16", dtype_name(type));
    if (type == FLOATS_DTYPE) return (floatS *)block;
    elements_convert(buffer, FLOATS_DTYPE, block, type, count);
    return buffer;
}

static const floatS *block_read(const void *memory, DType type, size_t begin, size_t count, floatS *buffer) {
    return block_open((void *)memory, type, begin, count, buffer);
}

// Stores a changed block from block_open back to memory, rounded to the stored type.
static void block_close(void *memory, DType type, size_t begin, size_t count, const floatS *block) {
    if (type != FLOATS_DTYPE)
        elements_convert((char *)memory + begin * dtype_size(type), type, block, FLOATS_DTYPE, count);
}

#endif
