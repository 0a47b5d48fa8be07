/*
The base of every kernel of op set "cuda": floatX and its conversions, packed loads and stores, sums over a warp or a
block, and launches. nvcc builds the kernels for GPUs; in the tests the host's compiler builds the same lines over
test/emulate/cuda_on_cpu.h (-DCUDA_ON_CPU), which runs them thread by thread.

    LAUNCH((kernel<...>), grid, threads, shared bytes)(arguments)   on launch_stream; checks the launch
    SHARED(type, name, count)                                       shared memory of a size known at compile time
    DYNAMIC_SHARED(type, name)                                      the shared bytes of LAUNCH
    fetch<BYTES>(to, from, valid)                                   from global to shared memory, in the background;
                                                                    zeros where not valid. 4 or 16 bytes, so aligned
    fetch_commit(), fetch_wait<LEFT>()                              the fetches since the last commit are a group; waits
                                                                    for all of this thread's groups but the last LEFT

floatS is float: there is no double build for GPUs.
*/
#ifndef LLMC_CUDA_PLATFORM_CUH
#define LLMC_CUDA_PLATFORM_CUH
#include "llmc/ops/gpu_scratch.h"
#include "llmc/base/utils.h"
#include <type_traits>

#ifdef CUDA_ON_CPU
#include "test/emulate/cuda_on_cpu.h"

static size_t multiprocessors(void) { return 8; } // tests have few tiles
#else
#include "device.cuh"
#include <cuda_bf16.h>

static int device_attribute(cudaDeviceAttr attribute) {
    int number, value;
    CUDA_CHECK(cudaGetDevice(&number), "asking which device this is");
    CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, number), "asking for an attribute of the device");
    return value;
}
static size_t multiprocessors(void) { return (size_t)device_attribute(cudaDevAttrMultiProcessorCount); }

// Returns the bytes that a block may request: 99 KiB on architectures 86, 89, 120; 163 on 80; 227 on 90, 100.
static size_t shared_memory_limit(void) {
    static size_t limit;
    if (!limit) limit = (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return limit;
}

// Returns what a kernel's own arrays leave of shared_memory_limit(): the most shared bytes of its launches.
static size_t shared_memory_left(const void *kernel) {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel), "asking how much shared memory a kernel takes");
    return shared_memory_limit() - attributes.sharedSizeBytes;
}

// A launch of a kernel. It is checked at once; errors while the kernel runs show at the next copy.
template <typename Kernel> struct Launch {
    Kernel kernel;
    dim3 grid, threads;
    size_t shared, *granted; // granted: the most bytes that launches of this kernel have requested
    const char *name, *file;
    int line;
    template <typename... Arguments> void operator()(Arguments... arguments) const {
        if (shared > *granted) { // more than 48 KiB must be requested, and not every GPU has that much
            const size_t left = shared_memory_left((const void *)kernel);
            if (shared > left)
                die("%s:%d: %s needs %s of shared memory for a block, this GPU has %s: head_dim is too large for it in "
                    "this precision; use another GPU",
                    file, line, name, human_bytes((double)shared), human_bytes((double)left));
            cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), file,
                       line, name);
            *granted = shared;
        }
        kernel<<<grid, threads, shared, launch_stream>>>(arguments...);
        cuda_check(cudaGetLastError(), file, line, name);
        if (after_launch) after_launch();
    }
};
namespace {
template <auto kernel> struct Listed {
    static inline const bool done = (kernels.list[kernels.count++] = (const void *)kernel, true);
    static inline size_t granted;
};
} // namespace
#define LAUNCH(kernel, grid, threads, shared)                                                                          \
    ((void)Listed<kernel>::done,                                                                                       \
     Launch{kernel, grid, threads, shared, &Listed<kernel>::granted, #kernel, __FILE__, __LINE__})
#define SHARED(type, name, count) __shared__ type name[count]
#define ALIGNED(pointer, bytes)   (pointer)
#define DYNAMIC_SHARED(type, name)                                                                                     \
    extern __shared__ __align__(128) unsigned char dynamic_shared[];                                                   \
    type *const name = (type *)dynamic_shared

template <int BYTES> __device__ inline void fetch(void *to, const void *from, bool valid) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to), bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address), "l"(from), "r"(bytes), "n"(BYTES)
                     : "memory");
}
__device__ inline void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void fetch_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Return 2^x and 1 / x with one instruction each: within 2 and 1 units in the last place; subnormals are 0.
__device__ inline float fast_exp2(float x) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
__device__ inline float fast_reciprocal(float x) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
#endif

constexpr float LOG2_E = 1.4426950408889634f;

// ---- floatX: the tensors' elements. Arithmetic is float. ------------------------------------------------------------
typedef float floatS;
#ifdef CUDA_ON_CPU
__device__ inline float bf16_value(uint16_t bits) { return bf16_to_float(bits); }
__device__ inline uint16_t bf16_nearest(float value) { return float_to_bf16(value); }
__device__ inline float rounded_product(float a, float b) { // a product that is never fused with an addition
    const volatile float product = a * b;
    return product;
}
#else
__device__ inline float bf16_value(uint16_t bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ inline uint16_t bf16_nearest(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
#endif

struct Bf16 {
    uint16_t bits;
};
__device__ inline float load(float x) { return x; }
__device__ inline float load(Bf16 x) { return bf16_value(x.bits); }
__device__ inline void set_value(float *x, float value) { *x = value; }
__device__ inline void set_value(Bf16 *x, float value) { x->bits = bf16_nearest(value); }

#if defined(PRECISION_BF16)
#define FLOATX_DTYPE DTYPE_BF16
typedef Bf16 floatX;
__device__ inline floatX store(float s) { return Bf16{bf16_nearest(s)}; }
#else
#define FLOATX_DTYPE DTYPE_FP32
typedef float floatX;
__device__ inline floatX store(float s) { return s; }
#endif

// ---- packs: W elements that one thread reads or writes at once ------------------------------------------------------
// Elements of a full pack: 16 bytes, the widest access. W is 1 if a row's length or a pointer does not allow full
// packs.
template <typename T> constexpr int full_pack = (int)(16 / sizeof(T));

template <typename T, int W> struct alignas(W * sizeof(T)) Pack { T x[W]; };

// Unsigned type that holds BYTES bytes, for one access
template <size_t BYTES>
using PackBits = std::conditional_t<BYTES == 16, uint4, std::conditional_t<BYTES == 8, uint2, uint32_t>>;

template <int W, typename T> __device__ inline Pack<T, W> pack_read(const T *from) {
    Pack<T, W> pack;
    if constexpr (sizeof(pack) >= 4) {
        const PackBits<sizeof(pack)> bits = *(const PackBits<sizeof(pack)> *)ALIGNED(from, sizeof(pack));
        memcpy(&pack, &bits, sizeof(pack));
    } else {
        for (int i = 0; i < W; i++) pack.x[i] = from[i];
    }
    return pack;
}

// Reads W elements as floats. Each element of a word of two bf16 takes one instruction.
template <int W> __device__ inline void read_wide(float (&to)[W], const floatX *from) {
    const Pack<floatX, W> pack = pack_read<W>(from);
#if defined(PRECISION_BF16)
    uint32_t words[W / 2];
    memcpy(words, &pack, sizeof(words));
    for (int i = 0; i < W; i++) {
        const uint32_t bits = i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16;
        memcpy(to + i, &bits, sizeof(bits));
    }
#else
    memcpy(to, &pack, sizeof(pack));
#endif
}

template <int W, typename T> __device__ inline void pack_write(T *to, const Pack<T, W> &pack) {
    if constexpr (sizeof(pack) >= 4) {
        PackBits<sizeof(pack)> bits;
        memcpy(&bits, &pack, sizeof(bits));
        *(PackBits<sizeof(pack)> *)ALIGNED(to, sizeof(pack)) = bits;
    } else {
        for (int i = 0; i < W; i++) to[i] = pack.x[i];
    }
}

// ---- reductions: the same order of additions every time -------------------------------------------------------------
constexpr unsigned LANES = 32, ALL_LANES = 0xffffffffu;

template <typename T> __device__ inline T warp_sum(T x) {
    for (unsigned step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
    for (unsigned step = LANES / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Sums over the threads of a row: blockDim.x, a multiple of LANES. partial[blockDim.x / LANES]: the row's own shared
// memory, reusable after the caller's next barrier
__device__ inline float row_sum(float x, float *partial) {
    x = warp_sum(x);
    if (blockDim.x == LANES) return x;
    if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES] = x;
    __syncthreads();
    x = threadIdx.x % LANES < blockDim.x / LANES ? partial[threadIdx.x % LANES] : 0.0f;
    return warp_sum(x);
}

// ---- shapes of launches ---------------------------------------------------------------------------------------------
static inline size_t blocks_for(size_t work, size_t per_block) { return (work + per_block - 1) / per_block; }

template <typename... Pointers> static inline bool all_aligned(Pointers... pointers) {
    return (((uintptr_t)pointers % 16 == 0) && ...);
}

// Calls launch(W) with the width of packs as a constant: full packs of T if `packed`, else 1.
template <int N> struct Width {
    constexpr operator int() const { return N; }
};
template <typename T, typename F> static void with_width(bool packed, F launch) {
    if (packed)
        launch(Width<full_pack<T>>());
    else
        launch(Width<1>());
}

// Calls launch(flag) with the flag as a constant.
template <typename F> static void with_flag(bool flag, F launch) {
    if (flag)
        launch(std::true_type());
    else
        launch(std::false_type());
}

// Calls launch with a null pointer to the element type, which is known only at run time.
template <typename F> static void with_type(DType type, const char *op, F launch) {
    if (type == DTYPE_FP32)
        launch((float *)NULL);
    else if (type == DTYPE_BF16)
        launch((Bf16 *)NULL);
    else
        die("%s: op set cuda has no arithmetic on %s tensors; use fp32 or bf16", op, dtype_name(type));
}

// Loops over any count: a thread takes every (gridDim.x * blockDim.x)-th pack.
constexpr unsigned LOOP_THREADS = 256, LOOP_BLOCKS = 2048;

static inline dim3 loop_grid(size_t packs) {
    size_t blocks = blocks_for(packs, LOOP_THREADS);
    return dim3((unsigned)(blocks < LOOP_BLOCKS ? (blocks ? blocks : 1) : LOOP_BLOCKS));
}

// Threads of loops over rows: a thread takes the pack at one column of every (gridDim.y * blockDim.y)-th row.
static inline dim3 rows_threads(size_t packs) { // packs: packs of a row
    unsigned x = 4;
    while (x < LOOP_THREADS && x < packs) x *= 2;
    return dim3(x, LOOP_THREADS / x);
}
static inline dim3 rows_grid(size_t rows, size_t packs) {
    const dim3 threads = rows_threads(packs);
    return dim3((unsigned)blocks_for(packs, threads.x), (unsigned)min_size(blocks_for(rows, threads.y), 65535));
}

#define FOR_EACH_PACK(i, packs)                                                                                        \
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (packs); i += (size_t)gridDim.x * blockDim.x)
#define FOR_EACH_ROW(t, c, W, rows, columns)                                                                           \
    if (const size_t c = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * (W); c < (columns))                         \
        for (size_t t = (size_t)blockIdx.y * blockDim.y + threadIdx.y; t < (rows); t += (size_t)gridDim.y * blockDim.y)

#endif
