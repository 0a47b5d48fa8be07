/*
Hopper's own instructions (sm_90a): matrix products of a warp group (wgmma), loads of tiles by the tensor memory
accelerator (TMA), and barriers in shared memory that count bytes (mbarrier). Only bf16. Kernels put their bodies inside
#ifdef WGMMA_CODE; elsewhere the bodies are empty and wgmma_on() is 0. In the tests test/emulate/wgmma_on_cpu.h takes
the place of the instructions.

A panel tile [ROWS, COLUMNS] lies in shared memory as TMA writes it and as products read it: COLUMNS / 64 panels, each
[ROWS, 64], where the 16-byte unit u of row r is stored at unit u ^ (r % 8). It begins at a multiple of 1024 bytes.

A product is C[64,N] += A[64,16] B[16,N]. Warp w of the group has rows 16 w to 16 w + 15 of C, in the layout of mma.cuh.
A comes from registers (OperandA) or from a panel tile, B from a panel tile:

    operand_rows<ROWS>(tile, row, column)       the tile's rows are rows of A, or columns of B; the sum runs over 16
                                                columns. row: a multiple of 8; column: of 16
    operand_columns<ROWS>(tile, row, column)    the tile's columns are rows of A, or columns of B; the sum runs over 16
                                                rows. row: a multiple of 8; column: of 64
    wgmma_fence()                               before the first product after registers of C or A were written
    wgmma<N>(c, a, b, add)                      float c[N / 8][4]; add = false: C = A B
    wgmma_commit()                              the products since the last commit are a group
    wgmma_wait<LEFT>(c...)                      waits for all groups but the last LEFT; names what is read afterwards

Barriers of a pipeline, and its loads:

    barrier_start(b, arrivals)                  one thread starts a barrier, calls barriers_started(), then the block
                                                synchronizes
    barrier_arrive(b)                           one arrival
    barrier_expect(b, bytes)                    one arrival; the phase also waits for this many bytes of loads
    barrier_wait(b, phase)                      waits for the end of the phase of parity `phase`. Phases of a new
                                                barrier have parity 0, 1, 0, ..; waiting for 1 returns at once
    tensor_map(x, dims, strides, box)           describes a tensor for loads, on the host
    panel_load(to, map, b, x, y, z)             one thread loads one panel; elements outside the tensor are 0. Always
                                                adds the whole panel's bytes to the barrier

A cluster is a few blocks that run at the same time on neighbouring multiprocessors, CLUSTER_OF(size) of its kernel:

    LAUNCH_CLUSTERS(kernel, size, grid, ..)     LAUNCH; the grid is a multiple of the size
    cluster_rank()                              this block's number in its cluster
    cluster_sync()                              waits for all threads of the cluster: after barriers are started, and
                                                after the last write to another block
    barrier_arrive_at(b, rank)                  one arrival at barrier b of that block, which orders no ordinary stores
    panel_multicast(to, map, b, x, y, z, set)   panel_load into all blocks whose bits are set, at the same place; each
                                                block's barrier counts the bytes

What the emulator cannot see is listed in test/README.md.
*/
#ifndef LLMC_CUDA_WGMMA_CUH
#define LLMC_CUDA_WGMMA_CUH
#include "mma.cuh"
#ifdef PRECISION_BF16

constexpr unsigned GROUP_THREADS = 128; // threads of a warp group
constexpr unsigned GROUP_ROWS = 64;     // rows of its products
constexpr int PANEL = 64;               // columns of a panel: 128 bytes

// A tensor's sizes in elements, and the elements between neighbours in y and z. Elements of x are adjacent.
struct TensorDims {
    size_t x, y, z, stride_y, stride_z;
};

// A stage of a pipeline, and the parity of its phase
struct Turn {
    unsigned stage, phase;
};
template <unsigned STAGES> __device__ inline void turn_next(Turn &t) {
    if (++t.stage == STAGES) t.stage = 0, t.phase ^= 1;
}

#ifdef CUDA_ON_CPU
#define WGMMA_CODE
#include "test/emulate/wgmma_on_cpu.h"
static inline bool wgmma_on(void) { return wgmma_wanted(); }
#else
#include <cuda.h>
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_CODE
#endif

// ---- on the host ----------------------------------------------------------------------------------------------------
static bool wgmma_on(void) {
    static int hopper = -1;
    if (hopper < 0)
        hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                 device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    return hopper && wgmma_wanted();
}

#define DYNAMIC_PANELS(type, name)                                                                                     \
    extern __shared__ __align__(1024) unsigned char dynamic_panels[];                                                  \
    type *const name = (type *)dynamic_panels
#define TENSOR_MAP                                          const __grid_constant__ TensorMap
#define LAUNCH_CLUSTERS(kernel, size, grid, threads, bytes) LAUNCH(kernel, grid, threads, bytes)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER_OF(size) __cluster_dims__(size, 1, 1)
#else
#define CLUSTER_OF(size)
#endif

typedef CUtensorMap TensorMap;

// Returns the driver's function that makes tensor maps.
static decltype(&cuTensorMapEncodeTiled) tensor_map_encoder(void) {
    static void *encoder;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (encoder) return (decltype(&cuTensorMapEncodeTiled))encoder;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encoder, 12000, cudaEnableDefault, &found),
               "asking the driver for cuTensorMapEncodeTiled");
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encoder, cudaEnableDefault, &found),
               "asking the driver for cuTensorMapEncodeTiled");
#endif
    if (found != cudaDriverEntryPointSuccess || !encoder)
        die("the driver has no cuTensorMapEncodeTiled: update it to one of CUDA 12, or unset STREAMBP_WGMMA");
    return (decltype(&cuTensorMapEncodeTiled))encoder;
}

// Describes tensor x[z, y, x] for loads of panels of box_y * box_z rows, at most 256 each. x is 16-byte aligned, and
// strides are multiples of 8 elements.
static TensorMap tensor_map(const floatX *x, TensorDims d, unsigned box_y, unsigned box_z) {
    TensorMap map;
    const cuuint64_t dims[3] = {d.x, d.y, d.z}, strides[2] = {d.stride_y * sizeof(floatX), d.stride_z * sizeof(floatX)};
    const cuuint32_t box[3] = {PANEL, box_y, box_z}, steps[3] = {1, 1, 1};
    const CUresult error = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)x, dims, strides,
                                                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS)
        die("cuTensorMapEncodeTiled refuses a tensor of %zu x %zu x %zu elements (error %d); unset STREAMBP_WGMMA", d.z,
            d.y, d.x, (int)error);
    return map;
}
#endif

#if defined(WGMMA_CODE) && !defined(CUDA_ON_CPU)
// ---- operands in shared memory: descriptors -------------------------------------------------------------------------
struct RowsOperand {
    static constexpr int TRANSPOSED = 0;
    uint64_t bits;
};
struct ColumnsOperand {
    static constexpr int TRANSPOSED = 1;
    uint64_t bits;
};

__device__ inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Returns a descriptor of a place in a tile: 16-byte units of the address, of the step between panels and of the step
// between 8 rows; the 128-byte swizzle. The place is added last, which takes one instruction; it carries into no field.
__device__ inline uint64_t descriptor(const floatX *tile, unsigned place, unsigned panel_bytes) {
    const unsigned low = (shared_address(tile) >> 4 | panel_bytes >> 4 << 16) + place * sizeof(floatX) / 16;
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | low;
}
template <int ROWS> __device__ inline RowsOperand operand_rows(const floatX *tile, unsigned row, unsigned column) {
    return RowsOperand{descriptor(tile, (column / PANEL * ROWS + row) * PANEL + column % PANEL, 16)};
}
template <int ROWS>
__device__ inline ColumnsOperand operand_columns(const floatX *tile, unsigned row, unsigned column) {
    return ColumnsOperand{descriptor(tile, (column / PANEL * ROWS + row) * PANEL, ROWS * 128)};
}

// ---- products -------------------------------------------------------------------------------------------------------
template <int N> struct Instruction;

// Numbers of the first N / 2 operands of an instruction, and the sums in that order
#define REGISTERS_8   "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGISTERS_16  REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_32  REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_40  REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS_48  REGISTERS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64  REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_80  REGISTERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_96  REGISTERS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_112 REGISTERS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_128 REGISTERS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_4(j)     "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SUMS_8(j)     SUMS_4(j), SUMS_4(j + 1)
#define SUMS_16(j)    SUMS_8(j), SUMS_8(j + 2)
#define SUMS_32(j)    SUMS_16(j), SUMS_16(j + 4)
#define SUMS_40(j)    SUMS_32(j), SUMS_8(j + 8)
#define SUMS_48(j)    SUMS_32(j), SUMS_16(j + 8)
#define SUMS_64(j)    SUMS_32(j), SUMS_32(j + 8)
#define SUMS_80(j)    SUMS_64(j), SUMS_16(j + 16)
#define SUMS_96(j)    SUMS_64(j), SUMS_32(j + 16)
#define SUMS_128(j)   SUMS_64(j), SUMS_64(j + 16)

// i0 to i6: the numbers of the operands after the sums
#define WGMMA_INSTRUCTION(N, HALF, i0, i1, i2, i3, i4, i5, i6)                                                         \
    template <> struct Instruction<N> {                                                                                \
        template <int TA, int TB> __device__ static void tiles(float (*c)[4], uint64_t a, uint64_t b, int add) {       \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N             \
                         "k16.f32.bf16.bf16 {" REGISTERS_##HALF "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";}" \
                         : SUMS_##HALF(0)                                                                              \
                         : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));                                                \
        }                                                                                                              \
        template <int TB> __device__ static void registers(float (*c)[4], const unsigned *a, uint64_t b, int add) {    \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N             \
                         "k16.f32.bf16.bf16 {" REGISTERS_##HALF "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4   \
                                                                ", p, 1, 1, %" #i6 ";}"                                \
                         : SUMS_##HALF(0)                                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));                     \
        }                                                                                                              \
    };
WGMMA_INSTRUCTION(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA_INSTRUCTION(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_INSTRUCTION(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_INSTRUCTION(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_INSTRUCTION(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_INSTRUCTION(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_INSTRUCTION(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_INSTRUCTION(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_INSTRUCTION(256, 128, 128, 129, 130, 131, 132, 133, 134)

template <int N, typename A, typename B> __device__ inline void wgmma(float (*c)[4], A a, B b, bool add) {
    Instruction<N>::template tiles<A::TRANSPOSED, B::TRANSPOSED>(c, a.bits, b.bits, add);
}
template <int N, typename B> __device__ inline void wgmma(float (*c)[4], const OperandA &a, B b, bool add) {
    unsigned registers[4];
    memcpy(registers, &a, sizeof(registers));
    Instruction<N>::template registers<B::TRANSPOSED>(c, registers, b.bits, add);
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from reading sums before this place.
template <int N> __device__ inline void sums_final(float (&c)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : SUMS_4(j)::"memory");
}
template <int LEFT, typename... Sums> __device__ inline void wgmma_wait(Sums &...c) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    (sums_final(c), ...);
}

// ---- barriers and loads ---------------------------------------------------------------------------------------------
typedef uint64_t TileBarrier;

__device__ inline void barrier_start(TileBarrier *b, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ inline void barriers_started() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void barrier_arrive(TileBarrier *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ inline void barrier_expect(TileBarrier *b, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
__device__ inline void barrier_wait(TileBarrier *b, unsigned phase) {
    unsigned over;
    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(over)
                     : "r"(shared_address(b)), "r"(phase)
                     : "memory");
    while (!over);
}
__device__ inline void panel_load(floatX *to, const TensorMap *map, TileBarrier *b, size_t x, size_t y, size_t z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(shared_address(to)),
                 "l"(map), "r"((int)x), "r"((int)y), "r"((int)z), "r"(shared_address(b))
                 : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------
__device__ inline unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ inline void barrier_arrive_at(TileBarrier *b, unsigned rank) {
    asm volatile(
        "{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(
            shared_address(b)),
        "r"(rank)
        : "memory");
}
__device__ inline void panel_multicast(floatX *to, const TensorMap *map, TileBarrier *b, size_t x, size_t y, size_t z,
                                       unsigned set) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"((int)x), "r"((int)y), "r"((int)z), "r"(shared_address(b)), "h"((unsigned short)set)
                 : "memory");
}

// ---- warp groups ----------------------------------------------------------------------------------------------------
// Returns the number of this thread's warp group, as one value for the warp.
__device__ inline unsigned group_number() { return __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0); }

// Returns true in one lane of a warp, always the same. ptxas then knows that one thread loads, and loops over none.
__device__ inline bool one_lane() {
    unsigned chosen;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
    return chosen;
}

// Waits for all threads of this warp group. id: 1 to 15, the group's own
__device__ inline void group_sync(unsigned id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// Registers of each thread of this warp group from here on: a multiple of 8
template <int N> __device__ inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
#endif
#endif
#endif
