/*
The one wrapper around the matrix instructions: C[16,8] += A[16,16] B[16,8] by a warp (PTX mma.sync m16n8k16), floatX in
and fp32 sums. Also loads its operands from tiles in shared memory, as ldmatrix does: two operands of B at once. With g
= lane / 4 and q = lane % 4 a lane holds

    A   x[0..1] (g, 2q..)   x[2..3] (g + 8, 2q..)   x[4..5] (g, 8 + 2q..)   x[6..7] (g + 8, 8 + 2q..)
    B   x[0..1] (2q.., g)   x[2..3] (8 + 2q.., g)   and x[4..7] of the next eight columns
    C   [0..1]  (g, 2q..)   [2..3]  (g + 8, 2q..)

so two C of neighbouring columns, rounded, are an A: a result becomes an operand without leaving registers. fp32 has no
matrix instruction: lanes exchange operands by shuffles, which is slow and exact.

    mma_columns<N>(c, a, operand)    C[16, N] += A B[16, N], N / 8 instructions; operand(n) is B's columns n to n + 15
*/
#ifndef LLMC_CUDA_MMA_CUH
#define LLMC_CUDA_MMA_CUH
#include "platform.cuh"

struct alignas(16) OperandA {
    floatX x[8];
};
struct OperandB { // [16,16]
    floatX x[8];
};

#ifdef CUDA_ON_CPU
// A lane's operands for J products with one A. The last lane to arrive multiplies for the whole warp: it reads the
// other lanes' operands and stores their results in place.
template <int J> struct MmaLane { float a[8], b[J][4], (*c)[4]; };

// Emulates the instruction. Sanitizers need not watch it.
template <int J>
__attribute__((no_sanitize("address", "undefined"))) static void mma_warp(unsigned char (*set)[cuda_on_cpu::BROUGHT]) {
    float a[16][16], b[16][8], c[16][8];
    MmaLane<J> *lane[LANES];
    for (unsigned l = 0; l < LANES; l++) {
        __builtin_memcpy(&lane[l], set[l], sizeof(lane[l]));
        for (unsigned i = 0; i < 8; i++) a[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i % 2 + i / 4 * 8] = lane[l]->a[i];
    }
    for (int j = 0; j < J; j++) {
        for (unsigned l = 0; l < LANES; l++)
            for (unsigned i = 0; i < 4; i++) {
                b[l % 4 * 2 + i % 2 + i / 2 * 8][l / 4] = lane[l]->b[j][i];
                c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] = lane[l]->c[j][i];
            }
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
        for (unsigned l = 0; l < LANES; l++)
            for (unsigned i = 0; i < 4; i++) lane[l]->c[j][i] = c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
    }
}

template <int N, typename Operand>
static inline void mma_columns(float (*c)[4], const OperandA &a, Operand operand, int line = __builtin_LINE()) {
    MmaLane<N / 8> mine, *brought = &mine;
    for (int i = 0; i < 8; i++) mine.a[i] = load(a.x[i]);
    for (int n = 0; n < N; n += 16) {
        const OperandB b = operand(n);
        for (int i = 0; i < 8; i++) mine.b[n / 8 + i / 4][i % 4] = load(b.x[i]);
    }
    mine.c = c;
    cuda_on_cpu::warp_meet(ALL_LANES, &brought, sizeof(brought), line, mma_warp<N / 8>);
}
#elif defined(PRECISION_BF16)
__device__ inline void mma(float (*c)[4], const OperandA &a, const OperandB &b) {
    unsigned ra[4], rb[4];
    memcpy(ra, &a, sizeof(ra));
    memcpy(rb, &b, sizeof(rb));
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                     : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[2 * i]), "r"(rb[2 * i + 1]));
}
#else
__device__ inline void mma(float (*c)[4], const OperandA &a, const OperandB &b) {
    const unsigned lane = threadIdx.x % LANES, quad = lane & ~3u, columns = lane % 4 * 8;
#pragma unroll 1 // no unrolling keeps compile time down: attention has hundreds of these loops
    for (unsigned holder = 0; holder < 4; holder++)
#pragma unroll
        for (unsigned k = 0; k < 4; k++) { // row 8 * upper + 2 * holder + odd of B
            const unsigned upper = k / 2, odd = k % 2;
            const float a0 = __shfl_sync(ALL_LANES, a.x[upper * 4 + odd], quad + holder),
                        a1 = __shfl_sync(ALL_LANES, a.x[upper * 4 + 2 + odd], quad + holder);
#pragma unroll
            for (unsigned i = 0; i < 2; i++) {
                const float mine = b.x[4 * i + upper * 2 + odd], b0 = __shfl_sync(ALL_LANES, mine, columns + holder),
                            b1 = __shfl_sync(ALL_LANES, mine, columns + 4 + holder);
                c[i][0] += a0 * b0, c[i][1] += a0 * b1, c[i][2] += a1 * b0, c[i][3] += a1 * b1;
            }
        }
}
#endif

#ifndef CUDA_ON_CPU
template <int N, typename Operand>
__device__ inline void mma_columns(float (*c)[4], const OperandA &a, Operand operand) {
#pragma unroll
    for (int n = 0; n < N; n += 16) mma(c + n / 8, a, operand(n));
}
#endif

// ---- operands from row-major tiles in shared memory, rows `stride` elements apart (a multiple of 8, for ldmatrix) ---
#if defined(PRECISION_BF16) && !defined(CUDA_ON_CPU)
// Loads four matrices of eight rows of eight elements, one register each; every lane gives one row's address.
#define LOAD_MATRIX(operand, form, row)                                                                                \
    unsigned r[4];                                                                                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0,%1,%2,%3}, [%4];"                               \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                      \
                 : "r"((unsigned)__cvta_generic_to_shared(row)));                                                      \
    memcpy(&operand, r, sizeof(operand))
#endif

// Loads A[16,16] = tile rows `row` on, columns `column` on.
__device__ inline OperandA load_a(const floatX *tile, unsigned stride, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandA a;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(a, "", tile + (row + lane % 16) * stride + column + lane / 16 * 8);
#else
    for (unsigned i = 0; i < 8; i++)
        a.x[i] = tile[(row + lane / 4 + i / 2 % 2 * 8) * stride + column + lane % 4 * 2 + i % 2 + i / 4 * 8];
#endif
    return a;
}

// Loads A[16,16] = the transpose of 16 tile rows from `row` on, 16 columns from `column` on.
__device__ inline OperandA load_a_columns(const floatX *tile, unsigned stride, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandA a;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(a, ".trans", tile + (row + lane % 8 + lane / 16 * 8) * stride + column + lane / 8 % 2 * 8);
#else
    for (unsigned i = 0; i < 8; i++)
        a.x[i] = tile[(row + lane % 4 * 2 + i % 2 + i / 4 * 8) * stride + column + lane / 4 + i / 2 % 2 * 8];
#endif
    return a;
}

// Loads B[16,16] = the transpose of 16 tile rows from `row` on, 16 columns from `column` on.
__device__ inline OperandB load_b(const floatX *tile, unsigned stride, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandB b;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(b, "", tile + (row + lane / 16 * 8 + lane % 8) * stride + column + lane / 8 % 2 * 8);
#else
    for (unsigned i = 0; i < 8; i++)
        b.x[i] = tile[(row + lane / 4 + i / 4 * 8) * stride + column + lane % 4 * 2 + i % 2 + i / 2 % 2 * 8];
#endif
    return b;
}

// Loads B[16,16] = 16 tile rows from `row` on, 16 columns from `column` on.
__device__ inline OperandB load_b_rows(const floatX *tile, unsigned stride, unsigned row, unsigned column) {
    const unsigned lane = threadIdx.x % LANES;
    OperandB b;
#ifdef LOAD_MATRIX
    LOAD_MATRIX(b, ".trans", tile + (row + lane % 16) * stride + column + lane / 16 * 8);
#else
    for (unsigned i = 0; i < 8; i++)
        b.x[i] = tile[(row + lane % 4 * 2 + i % 2 + i / 2 % 2 * 8) * stride + column + lane / 4 + i / 4 * 8];
#endif
    return b;
}

// Makes A[16,16] from two neighbouring results C[16,8].
__device__ inline OperandA operand_of(const float *left, const float *right) {
    OperandA a;
    for (int i = 0; i < 4; i++) a.x[i] = store(left[i]), a.x[4 + i] = store(right[i]);
    return a;
}

#endif
