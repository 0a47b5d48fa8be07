/*
The cuBLASLt calls of llmc/ops/cuda/linear.cuh, in fp32, on the host and in plain loops; part of ops_nccl.cc. Matrices
are column-major, as there.

What a wrong caller does here:

    layouts that do not fit each other or the operation    refused
    addresses that the algorithm was not chosen for        refused
    a product before its tensors are awaited               as a kernel on the default stream (nccl_on_mpi.h)

Like the real library, it lacks some products: a bias at addresses that are no multiples of 16.
*/
#ifndef TEST_CUBLAS_ON_CPU_H
#define TEST_CUBLAS_ON_CPU_H
#include <cublasLt.h>

namespace cublas_on_cpu {
struct Layout {
    uint64_t rows, columns;
    int64_t stride; // from column to column
};
struct Operation {
    std::map<int, uint64_t> attribute; // by cublasLtMatmulDescAttributes_t
};

static float at(const void *matrix, const Layout *layout, bool transposed, uint64_t row, uint64_t column) {
    const uint64_t place =
        transposed ? row * (uint64_t)layout->stride + column : column * (uint64_t)layout->stride + row;
    return ((const float *)matrix)[place];
}

template <typename T, typename U> static cublasStatus_t made(T *handle, U *object) {
    *handle = (T)(void *)object;
    return CUBLAS_STATUS_SUCCESS;
}
} // namespace cublas_on_cpu

#define CUBLAS_CALL                                                                                                    \
    if (nccl_on_mpi::cuda_fault() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED

extern "C" {
const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : "another status";
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    static int one;
    CUBLAS_CALL;
    return cublas_on_cpu::made(handle, &one);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
    CUBLAS_CALL;
    if (type != CUDA_R_32F || stride < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    return cublas_on_cpu::made(layout, new cublas_on_cpu::Layout{rows, columns, stride});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    CUBLAS_CALL;
    delete (cublas_on_cpu::Layout *)(void *)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation, cublasComputeType_t, cudaDataType_t) {
    CUBLAS_CALL;
    return cublas_on_cpu::made(operation, new cublas_on_cpu::Operation);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    CUBLAS_CALL;
    delete (cublas_on_cpu::Operation *)(void *)operation;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    CUBLAS_CALL;
    uint64_t held = 0;
    memcpy(&held, value, bytes);
    ((cublas_on_cpu::Operation *)(void *)operation)->attribute[attribute] = held;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    CUBLAS_CALL;
    return cublas_on_cpu::made(preference, new cublas_on_cpu::Operation);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return cublasLtMatmulDescDestroy((cublasLtMatmulDesc_t)(void *)preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
    return cublasLtMatmulDescSetAttribute((cublasLtMatmulDesc_t)(void *)preference,
                                          (cublasLtMatmulDescAttributes_t)attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int,
                                              cublasLtMatmulHeuristicResult_t *found, int *count) {
    CUBLAS_CALL;
    auto &op = ((cublas_on_cpu::Operation *)(void *)operation)->attribute;
    const uint64_t alignment =
        ((cublas_on_cpu::Operation *)(void *)preference)->attribute[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES];
    if (op[CUBLASLT_MATMUL_DESC_EPILOGUE] == CUBLASLT_EPILOGUE_BIAS && alignment < 16)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    found->algo.data[0] = alignment;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// Computes d = op(a) op(b) + beta c, plus a bias for each row of d.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void *, const void *a,
                              cublasLtMatrixLayout_t of_a, const void *b, cublasLtMatrixLayout_t of_b, const void *beta,
                              const void *c, cublasLtMatrixLayout_t of_c, void *d, cublasLtMatrixLayout_t of_d,
                              const cublasLtMatmulAlgo_t *algorithm, void *, size_t, cudaStream_t) {
    CUBLAS_CALL;
    using cublas_on_cpu::Layout;
    auto &op = ((cublas_on_cpu::Operation *)(void *)operation)->attribute;
    const bool ta = op[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T, tb = op[CUBLASLT_MATMUL_DESC_TRANSB] == CUBLAS_OP_T;
    const Layout *A = (const Layout *)(void *)of_a, *B = (const Layout *)(void *)of_b,
                 *D = (const Layout *)(void *)of_d;
    const uint64_t m = D->rows, n = D->columns, k = ta ? A->rows : A->columns;
    const float *bias = op[CUBLASLT_MATMUL_DESC_EPILOGUE] == CUBLASLT_EPILOGUE_BIAS
                            ? (const float *)op[CUBLASLT_MATMUL_DESC_BIAS_POINTER]
                            : NULL;
    if ((ta ? A->columns : A->rows) != m || (tb ? B->columns : B->rows) != k || (tb ? B->rows : B->columns) != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (of_c != of_d || ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) % algorithm->data[0])
        return CUBLAS_STATUS_INVALID_VALUE;
    nccl_on_mpi::default_stream_turn();
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = 0; i < m; i++) {
            const uint64_t place = j * (uint64_t)D->stride + i;
            double sum = bias ? bias[i] : 0;
            for (uint64_t l = 0; l < k; l++)
                sum += (double)cublas_on_cpu::at(a, A, ta, i, l) * (double)cublas_on_cpu::at(b, B, tb, l, j);
            if (*(const float *)beta != 0) sum += (double)(*(const float *)beta * ((const float *)c)[place]);
            ((float *)d)[place] = (float)sum;
        }
    return CUBLAS_STATUS_SUCCESS;
}
}

#endif
