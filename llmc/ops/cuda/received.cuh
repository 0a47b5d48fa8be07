/*
The attention that each key receives, in op set "cuda": sums of exp(scale q k - lse) over queries and heads. A block has
RECEIVED_TILE keys. It passes all queries, RECEIVED_TILE at a time, in slices of RECEIVED_TILE elements of a head. A
thread has one key and RECEIVED_ROWS queries. Each sum has one order. FLOPs: 2 HD for each pair and head, in fp32.
*/
#ifndef LLMC_CUDA_RECEIVED_CUH
#define LLMC_CUDA_RECEIVED_CUH
#include "platform.cuh"

constexpr unsigned RECEIVED_TILE = 32, RECEIVED_ROWS = 4, RECEIVED_THREADS = RECEIVED_TILE / RECEIVED_ROWS;

// Loads tile[RECEIVED_TILE][RECEIVED_TILE + 1] = elements [c, HD) of rows [first, rows) of a head, followed by zeros.
__device__ inline void received_load(float *tile, const floatX *x, size_t first, size_t rows, size_t stride, size_t c,
                                     size_t HD) {
    for (unsigned r = threadIdx.y; r < RECEIVED_TILE; r += RECEIVED_THREADS) {
        const bool valid = first + r < rows && c + threadIdx.x < HD;
        tile[r * (RECEIVED_TILE + 1) + threadIdx.x] = valid ? load(x[(first + r) * stride + c + threadIdx.x]) : 0.0f;
    }
}

__global__ void attention_received_kernel(float *received, const floatX *q, const floatX *k, const float *lse, size_t n,
                                          size_t keys, size_t NH, size_t NKV, size_t HD, float scale) {
    SHARED(float, queries, RECEIVED_TILE *(RECEIVED_TILE + 1));
    SHARED(float, own, RECEIVED_TILE *(RECEIVED_TILE + 1));
    SHARED(float, sums, RECEIVED_THREADS *RECEIVED_TILE);
    const size_t first = (size_t)blockIdx.x * RECEIVED_TILE, key = first + threadIdx.x, before = keys - n;
    float sum = 0.0f;
    for (size_t h = 0; h < NH; h++)
        for (size_t t = first > before ? first - before : 0; t < n; t += RECEIVED_TILE) {
            float dot[RECEIVED_ROWS] = {};
            for (size_t c = 0; c < HD; c += RECEIVED_TILE) {
                received_load(queries, q + h * HD, t, n, NH * HD, c, HD);
                received_load(own, k + h / (NH / NKV) * HD, first, keys, NKV * HD, c, HD);
                __syncthreads();
                for (unsigned i = 0; i < RECEIVED_TILE; i++)
                    for (unsigned r = 0; r < RECEIVED_ROWS; r++)
                        dot[r] += queries[(threadIdx.y + r * RECEIVED_THREADS) * (RECEIVED_TILE + 1) + i] *
                                  own[threadIdx.x * (RECEIVED_TILE + 1) + i];
                __syncthreads();
            }
            for (unsigned r = 0; r < RECEIVED_ROWS; r++) {
                const size_t query = t + threadIdx.y + r * RECEIVED_THREADS;
                if (query < n && key <= before + query) sum += expf(scale * dot[r] - lse[query * NH + h]);
            }
        }
    sums[threadIdx.y * RECEIVED_TILE + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || key >= keys) return;
    for (unsigned y = 1; y < RECEIVED_THREADS; y++) sum += sums[y * RECEIVED_TILE + threadIdx.x];
    received[key] += sum;
}

static void cuda_attention_received(Summed *received, const Stored *q, const Stored *k, const Summed *lse, size_t n,
                                    size_t keys, size_t NH, size_t NKV, size_t HD, double scale) {
    LAUNCH(attention_received_kernel, (unsigned)blocks_for(keys, RECEIVED_TILE), dim3(RECEIVED_TILE, RECEIVED_THREADS),
           0)
    ((float *)received, (const floatX *)q, (const floatX *)k, (const float *)lse, n, keys, NH, NKV, HD, (float)scale);
}

#endif
