/*
Linear layers of op set "cuda" by cuBLASLt: floatX in, fp32 accumulation, rounded once after adding bias, residual or
the accumulated gradient; dweight accumulates into fp32 (beta = 1). cuBLASLt is column-major, so our row-major [rows,
columns] is its [columns, rows]. For every shape the first algorithm of its heuristics is kept.
*/
#ifndef LLMC_CUDA_LINEAR_CUH
#define LLMC_CUDA_LINEAR_CUH
#include "memory.cuh"
#include "bias.cuh"
#include "library.h"
#include <cublasLt.h>

#define CUBLASLT_CALLS(CALL)                                                                                           \
    CALL(Create)                                                                                                       \
    CALL(GetStatusString)                                                                                              \
    CALL(GetVersion)                                                                                                   \
    CALL(Matmul)                                                                                                       \
    CALL(MatmulAlgoGetHeuristic)                                                                                       \
    CALL(MatmulDescCreate)                                                                                             \
    CALL(MatmulDescDestroy)                                                                                            \
    CALL(MatmulDescSetAttribute)                                                                                       \
    CALL(MatmulPreferenceCreate)                                                                                       \
    CALL(MatmulPreferenceDestroy)                                                                                      \
    CALL(MatmulPreferenceSetAttribute)                                                                                 \
    CALL(MatrixLayoutCreate)                                                                                           \
    CALL(MatrixLayoutDestroy)

static struct {
#define CALL(name) decltype(&cublasLt##name) name;
    CUBLASLT_CALLS(CALL)
#undef CALL
} cublaslt;

static void cublaslt_load(void) {
    char error[500];
    void *library = library_open(&LIBRARY_CUBLASLT, error);
    if (!library) die("%s", error);
#define CALL(name)                                                                                                     \
    cublaslt.name = (decltype(cublaslt.name))library_function(library, &LIBRARY_CUBLASLT, "cublasLt" #name);
    CUBLASLT_CALLS(CALL)
#undef CALL
}

static void cublas_check(cublasStatus_t status, const char *file, int line, const char *doing) {
    if (status != CUBLAS_STATUS_SUCCESS)
        die("%s:%d: %s: cuBLASLt returned %s; %s", file_name(file), line, doing, cublaslt.GetStatusString(status),
            advice_on(status == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorUnknown));
}
#define CUBLAS_CHECK(call, doing) cublas_check(call, __FILE__, __LINE__, doing)

constexpr size_t CUBLAS_WORKSPACE = (size_t)64 << 20; // in addition to the plan; cuBLAS wants 32 MiB on Hopper
constexpr size_t KEPT_MATMULS = 256;                  // if there are more, the oldest is dropped
#ifndef MATMUL_ELEMENTS
#define MATMUL_ELEMENTS (size_t)0x7fffffff // most elements of a call's matrix
#endif
constexpr unsigned MOST_ALIGNMENT = 16; // bytes: no kernel needs more, and more must not change the choice

// A product: out[n, m] (row-major) = a b (+ bias) (+ beta * in). cuBLASLt sees column-major [m, n] = op(A)[m, k]
// op(B)[k, n]. Compared byte by byte, so it has no padding.
struct Matmul {
    size_t m, n, k;
    size_t stride_b, stride_out; // elements from row to row of stored B and out; 0: contiguous
    int transposed_a, transposed_b, summed_out, bias;
    size_t alignment; // bytes; it divides all addresses
};
static_assert(std::has_unique_object_representations_v<Matmul>);

struct KeptMatmul {
    Matmul shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
    int possible; // 1: cuBLASLt has an algorithm
};

static struct {
    cublasLtHandle_t handle;
    void *workspace;
    KeptMatmul kept[KEPT_MATMULS];
    size_t used, oldest;
} cublas;

static void cublas_require(void) {
    if (cublas.handle) return;
    device_require();
    cublaslt_load();
    CUBLAS_CHECK(cublaslt.Create(&cublas.handle), "starting cuBLASLt");
    cublas.workspace = memory_allocate(CUBLAS_WORKSPACE);
    if (!cublas.workspace)
        die("no device memory for cuBLASLt's workspace of %s; lower --memory-limit",
            human_bytes((double)CUBLAS_WORKSPACE));
}

// Makes a layout. stride: elements from column to column; 0: rows
static cublasLtMatrixLayout_t cublas_layout(cudaDataType_t type, size_t rows, size_t columns, size_t stride) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublaslt.MatrixLayoutCreate(&layout, type, rows, columns, (int64_t)(stride ? stride : rows)),
                 "describing a matrix");
    return layout;
}

template <typename T> static void matmul_set(KeptMatmul *kept, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublaslt.MatmulDescSetAttribute(kept->operation, attribute, &value, sizeof(value)),
                 "describing a product");
}

template <typename T>
static void preference_set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                           T value) {
    CUBLAS_CHECK(cublaslt.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
                 "choosing a product");
}

// Fills found[most] with the results of cuBLASLt's heuristics, best first; returns how many.
static int matmul_algorithms(const KeptMatmul *kept, cublasLtMatmulHeuristicResult_t *found, int most) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t preference;
    int count = 0;
    CUBLAS_CHECK(cublaslt.MatmulPreferenceCreate(&preference), "choosing a product");
    preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLAS_WORKSPACE);
    // Parts of a sum over k are added in fp32, not in out's type.
    preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    for (cublasLtMatmulPreferenceAttributes_t attribute : alignments)
        preference_set(preference, attribute, (uint32_t)kept->shape.alignment);
    // on an error found is empty: the caller reports for which product
    if (cublaslt.MatmulAlgoGetHeuristic(cublas.handle, kept->operation, kept->a, kept->b, kept->out, kept->out,
                                        preference, most, found, &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    CUBLAS_CHECK(cublaslt.MatmulPreferenceDestroy(preference), "choosing a product");
    return count;
}

static void matmul_make(KeptMatmul *kept, const Matmul *p, const void *bias) {
    const cudaDataType_t stored = sizeof(floatX) == 2 ? CUDA_R_16BF : CUDA_R_32F;
    const cublasOperation_t op_a = p->transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                            op_b = p->transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulHeuristicResult_t found = {};
    kept->shape = *p;
    CUBLAS_CHECK(cublaslt.MatmulDescCreate(&kept->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    matmul_set(kept, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    matmul_set(kept, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    if (p->bias) {
        matmul_set(kept, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        matmul_set(kept, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, stored);
        matmul_set(kept, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    kept->a = cublas_layout(stored, p->transposed_a ? p->k : p->m, p->transposed_a ? p->m : p->k, 0);
    kept->b = cublas_layout(stored, p->transposed_b ? p->n : p->k, p->transposed_b ? p->k : p->n, p->stride_b);
    kept->out = cublas_layout(p->summed_out ? CUDA_R_32F : stored, p->m, p->n, p->stride_out);
    kept->possible = matmul_algorithms(kept, &found, 1) > 0;
    kept->algorithm = found.algo;
}

static void matmul_drop(KeptMatmul *kept) {
    CUBLAS_CHECK(cublaslt.MatmulDescDestroy(kept->operation), "forgetting a product");
    for (cublasLtMatrixLayout_t layout : {kept->a, kept->b, kept->out})
        CUBLAS_CHECK(cublaslt.MatrixLayoutDestroy(layout), "forgetting a product");
}

static KeptMatmul *matmul_of(const Matmul *p, const void *bias) {
    KeptMatmul *kept;
    cublas_require();
    for (size_t i = 0; i < cublas.used; i++)
        if (!memcmp(&cublas.kept[i].shape, p, sizeof(*p))) return &cublas.kept[i];
    if (cublas.used < KEPT_MATMULS) {
        kept = &cublas.kept[cublas.used++];
    } else {
        kept = &cublas.kept[cublas.oldest++ % KEPT_MATMULS];
        matmul_drop(kept);
    }
    matmul_make(kept, p, bias);
    return kept;
}

// Runs a product. in: added with beta = 1, or NULL
static void multiply(Matmul p, void *out, const void *a, const void *b, const void *bias, const void *in) {
    const uintptr_t addresses =
        (uintptr_t)out | (uintptr_t)a | (uintptr_t)b | (uintptr_t)bias | (uintptr_t)in | MOST_ALIGNMENT;
    const float one = 1.0f, beta = in ? 1.0f : 0.0f;
    p.bias = bias != NULL;
    p.alignment = addresses & -addresses;
    KeptMatmul *kept = matmul_of(&p, bias);
    if (!kept->possible && bias) { // impossible only with this bias: add it after the product is rounded
        multiply(p, out, a, b, NULL, in);
        bias_add((floatX *)out, (const Stored *)bias, p.n, p.m, p.stride_out);
        return;
    }
    if (!kept->possible)
        die("cuBLASLt has no algorithm for a product of [%zu, %zu] x [%zu, %zu], with addresses that are multiples of "
            "%zu bytes; please report it",
            p.n, p.k, p.k, p.m, p.alignment);
    if (bias) matmul_set(kept, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    CUBLAS_CHECK(cublaslt.Matmul(cublas.handle, kept->operation, &one, a, kept->a, b, kept->b, &beta, in ? in : out,
                                 kept->out, out, kept->out, &kept->algorithm, cublas.workspace, CUBLAS_WORKSPACE,
                                 launch_stream),
                 "multiplying matrices");
}

// Multiplies in parts of the tokens, so that no matrix of a call has 2^31 elements. Tokens are the rows of b and out,
// or, if the product sums over them (k), the rows of b and a.
static void matmul(Matmul p, void *out, const void *a, const void *b, const void *bias, const void *in) {
    const bool summed = p.transposed_b;
    const size_t size = p.summed_out ? sizeof(float) : sizeof(floatX);
    const size_t b_row = p.stride_b ? p.stride_b : summed ? p.n : p.k, row = p.stride_out ? p.stride_out : p.m;
    const size_t tokens = summed ? p.k : p.n, most = 128 * max_size(1, MATMUL_ELEMENTS / 128 / max_size(b_row, row));
    for (size_t first = 0; first < tokens;) {
        const size_t count = tokens - first <= most ? tokens - first : most, skipped = first * row;
        const floatX *b_part = (const floatX *)b + first * b_row;
        (summed ? p.k : p.n) = count;
        if (summed)
            multiply(p, out, (const floatX *)a + skipped, b_part, NULL, first ? out : in);
        else
            multiply(p, (char *)out + skipped * size, a, b_part, bias, in ? (const char *)in + skipped * size : NULL);
        first += count;
    }
}

static Matmul matmul_shape(size_t m, size_t n, size_t k, int transposed_a, int transposed_b, int summed_out) {
    return Matmul{m, n, k, 0, 0, transposed_a, transposed_b, summed_out, 0, 0};
}

static void cuda_linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                                const Stored *residual, size_t n, size_t C, size_t OC, size_t stride) {
    Matmul p = matmul_shape(OC, n, C, 1, 0, 0);
    p.stride_out = stride;
    matmul(p, out, weight, x, bias, residual);
}

static void cuda_linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C,
                                       size_t OC, size_t stride, int accumulate) {
    Matmul p = matmul_shape(C, n, OC, 0, 0, 0);
    p.stride_b = stride;
    matmul(p, dx, weight, dout, NULL, accumulate ? dx : NULL);
}

static void cuda_linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                        size_t C, size_t OC, size_t stride) {
    Matmul p = matmul_shape(C, OC, n, 0, 1, 1);
    p.stride_b = stride;
    matmul(p, dweight, x, dout, NULL, dweight);
    if (dbias) bias_backward(dbias, dout, n, OC, stride);
}

static void cuda_router_logits(Summed *logits, const Stored *x, const Stored *weight, const Stored *bias, size_t n,
                               size_t C, size_t E, int accumulate) {
    matmul(matmul_shape(E, n, C, 1, 0, 1), logits, weight, x, NULL, accumulate ? logits : NULL);
    if (bias) bias_add((float *)logits, bias, n, E, E);
}

#endif
