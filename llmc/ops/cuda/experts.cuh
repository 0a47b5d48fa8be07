/*
Products of sorted rows with their expert's matrix, in op set "cuda": one kernel for all experts, for any distribution
of rows. A launch has as many blocks as there can be tiles. Each finds its expert and rows from first[E + 1], so the
host never waits for counts; blocks beyond the last tile end at once.

    forward   out[rows,OC] = x[rows,C] weight[e][OC,C]^T
    input     dx[rows,C] = dout[rows,OC] weight[e][OC,C]
    weight    dweight[e][OC,C] += dout[rows of e,OC]^T x[rows of e,C]

A block has a tile of the result. Tiles of both operands pass through shared memory, PRODUCT_DEPTH of the summed
dimension at a time, by cp.async; sums are fp32 in registers, added to an old result and rounded once. Blocks of
neighbouring columns come first, then rows of the same expert, so its matrix is read from the L2 cache.
*/
#ifndef LLMC_CUDA_EXPERTS_CUH
#define LLMC_CUDA_EXPERTS_CUH
#include "delta_blocks.cuh"
#include "dequantise.cuh"
#include "experts_bias.cuh"
#include "experts_wgmma.cuh"
#include "routes.cuh"

// ---- the grouped product --------------------------------------------------------------------------------------------
struct ProductTile {
    int rows, columns, warp_rows, warp_columns; // size of a block's result, and of each warp's part
    int stages;
};

// WIDE: the usual tile. WIDE_OF_TWO: one stage fewer, if shared memory does not hold two blocks of WIDE. NARROW: few
// columns (adapters). SMALL: few rows per expert; unaligned operands, copied element by element; fp32
constexpr ProductTile WIDE = {128, 128, 64, 64, 3}, WIDE_OF_TWO = {128, 128, 64, 64, 2}, NARROW = {128, 64, 32, 64, 3},
                      SMALL = {64, 64, 32, 32, 3};
constexpr int PRODUCT_THREADS = 128;
#ifdef CUDA_ON_CPU
constexpr size_t FEW_ROWS = 4;      // mean rows of an expert below which SMALL is taken; tests have few rows
static size_t product_limit(void) { // alternates, so that tests run WIDE and WIDE_OF_TWO, which give the same bits
    static unsigned calls;
    return calls++ % 2 ? SIZE_MAX : 0;
}
#else
constexpr size_t FEW_ROWS = 64;
static size_t product_limit(void) { return shared_memory_limit(); }
#endif

static bool few_rows(size_t rows, size_t E) { return rows <= FEW_ROWS * E; }

// Elements of a stage's tiles: [rows, depth], or [depth, rows] where memory has the summed dimension as rows
template <ProductForm FORM, ProductTile T> struct StageTiles {
    static constexpr int A_ROWS = FORM == PRODUCT_WEIGHT ? PRODUCT_DEPTH : T.rows;
    static constexpr int A_WIDTH = FORM == PRODUCT_WEIGHT ? T.rows : PRODUCT_DEPTH;
    static constexpr int B_ROWS = FORM == PRODUCT_FORWARD ? T.columns : PRODUCT_DEPTH;
    static constexpr int B_WIDTH = FORM == PRODUCT_FORWARD ? PRODUCT_DEPTH : T.columns;
    static constexpr unsigned A = A_ROWS * padded<A_WIDTH>, B = B_ROWS * padded<B_WIDTH>;
    static constexpr size_t BYTES = T.stages * (A + B) * sizeof(floatX);
};

// A warp's operands for 16 elements of the summed dimension
template <ProductTile T> struct ProductOperands {
    OperandA a[T.warp_rows / 16];
    OperandB b[T.warp_columns / 16];
};

template <ProductForm FORM, ProductTile T>
__device__ inline void operands_load(ProductOperands<T> &x, const floatX *a, const floatX *b, unsigned row,
                                     unsigned column, unsigned k) {
    constexpr unsigned A_STRIDE = padded<StageTiles<FORM, T>::A_WIDTH>, B_STRIDE = padded<StageTiles<FORM, T>::B_WIDTH>;
#pragma unroll
    for (int n = 0; n < T.warp_columns; n += 16)
        x.b[n / 16] =
            FORM == PRODUCT_FORWARD ? load_b(b, B_STRIDE, column + n, k) : load_b_rows(b, B_STRIDE, k, column + n);
#pragma unroll
    for (int m = 0; m < T.warp_rows; m += 16)
        x.a[m / 16] =
            FORM == PRODUCT_WEIGHT ? load_a_columns(a, A_STRIDE, k, row + m) : load_a(a, A_STRIDE, row + m, k);
}

// Adds a stage's product to c[warp_rows, warp_columns]. The tile of c begins at the warp's first row and column. Loads
// the next operands before the instructions that use the current ones; the compiler keeps this order.
template <ProductForm FORM, ProductTile T>
__device__ inline void stage_product(float (*c)[T.warp_columns / 8][4], const floatX *a, const floatX *b, unsigned row,
                                     unsigned column) {
    ProductOperands<T> x[2];
    operands_load<FORM, T>(x[0], a, b, row, column, 0);
#pragma unroll
    for (int k = 0; k < PRODUCT_DEPTH; k += 16) {
        if (k + 16 < PRODUCT_DEPTH) operands_load<FORM, T>(x[(k / 16 + 1) % 2], a, b, row, column, k + 16);
        const ProductOperands<T> &now = x[k / 16 % 2];
#pragma unroll
        for (int m = 0; m < T.warp_rows / 16; m++)
            mma_columns<T.warp_columns>(c[m], now.a[m], [&](int n) { return now.b[n / 16]; });
    }
}

// pair_add: x, y += from[0..1]; pair_write: stores them. both = 0: only the first exists
template <bool PACKED, typename T> __device__ inline void pair_add(const T *from, float &x, float &y, bool both) {
    if constexpr (PACKED) {
        const Pack<T, 2> pair = pack_read<2>(from);
        x += load(pair.x[0]), y += load(pair.x[1]);
    } else {
        x += load(from[0]);
        if (both) y += load(from[1]);
    }
}
template <bool PACKED, typename T> __device__ inline void pair_write(T *to, float x, float y, bool both) {
    if constexpr (PACKED) {
        Pack<T, 2> pair;
        set_value(pair.x, x), set_value(pair.x + 1, y);
        pack_write(to, pair);
    } else {
        set_value(to, x);
        if (both) set_value(to + 1, y);
    }
}

// Stores the warp's 16-row tile, clipped to rows x left (FULL: unclipped). accumulate: adds to `to`; all loads precede
// stores
template <int N, bool PACKED, bool FULL, typename T>
__device__ inline void results_write(T *to, float (*c)[4], size_t stride, int rows, int left, bool accumulate) {
    const int row = threadIdx.x % LANES / 4, column = threadIdx.x % 4 * 2;
    T *const at[2] = {to + row * stride + column, to + (row + 8) * stride + column};
    const auto each = [&](auto f) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < N; n += 8)
                if (FULL || (row + half * 8 < rows && column + n < left))
                    f(at[half] + n, c[n / 8][half * 2], c[n / 8][half * 2 + 1], FULL || column + n + 1 < left);
    };
    if (accumulate) each([](const T *from, float &x, float &y, bool both) { pair_add<PACKED>(from, x, y, both); });
    each([](T *place, float x, float y, bool both) { pair_write<PACKED>(place, x, y, both); });
}

// Computes a tile of the result. PACKED: rows of all tensors are whole packs
template <ProductForm FORM, ProductTile T, bool PACKED>
__global__ void __launch_bounds__(PRODUCT_THREADS, 2) experts_product_kernel(GroupedProduct p) {
    typedef StageTiles<FORM, T> Tiles;
    static_assert(T.rows / T.warp_rows * (T.columns / T.warp_columns) * LANES == PRODUCT_THREADS);
    DYNAMIC_SHARED(floatX, memory);
    const unsigned column = blockIdx.x % p.column_tiles * T.columns, number = blockIdx.x / p.column_tiles;
    const size_t columns = FORM == PRODUCT_FORWARD ? p.OC : p.C, left = columns - column;
    RowTile tile = {};
    size_t depth = FORM == PRODUCT_FORWARD ? p.C : p.OC;
    const floatX *a = p.a, *b = p.b;
    if constexpr (FORM == PRODUCT_WEIGHT) { // from here on the tile's rows are rows of the expert's matrix
        const unsigned row_tiles = (unsigned)((p.OC + T.rows - 1) / T.rows), e = number / row_tiles;
        const unsigned begin = number % row_tiles * T.rows;
        const size_t from = (size_t)p.first[e];
        tile = RowTile{e, begin, p.OC - begin < T.rows ? (unsigned)(p.OC - begin) : T.rows};
        depth = (size_t)p.first[e + 1] - from;
        a += from * p.OC + begin, b += from * p.C + column;
        if (!depth) return;
    } else {
        tile = row_tile(p.first, p.E, T.rows, number);
        if (!tile.rows) return;
        a += tile.begin * depth;
        b += tile.expert * p.OC * p.C + (FORM == PRODUCT_FORWARD ? column * p.C : column);
    }
    const auto bring = [&](unsigned i, unsigned stage) {
        floatX *const to = memory + stage * (Tiles::A + Tiles::B);
        const size_t k = (size_t)i * PRODUCT_DEPTH, deep = depth - k;
        const unsigned rows = deep < PRODUCT_DEPTH ? (unsigned)deep : PRODUCT_DEPTH;
        const unsigned right = left < T.columns ? (unsigned)left : T.columns;
        if (FORM == PRODUCT_WEIGHT)
            rows_fetch<Tiles::A_WIDTH, PRODUCT_THREADS, Tiles::A_ROWS>(to, a + k * p.OC, p.OC, rows, tile.rows, PACKED);
        else
            rows_fetch<Tiles::A_WIDTH, PRODUCT_THREADS, Tiles::A_ROWS>(to, a + k, depth, tile.rows, deep, PACKED);
        if (FORM == PRODUCT_FORWARD)
            rows_fetch<Tiles::B_WIDTH, PRODUCT_THREADS, Tiles::B_ROWS>(to + Tiles::A, b + k, p.C, right, deep, PACKED);
        else
            rows_fetch<Tiles::B_WIDTH, PRODUCT_THREADS, Tiles::B_ROWS>(to + Tiles::A, b + k * p.C, p.C, rows, left,
                                                                       PACKED);
    };
    constexpr unsigned ACROSS = T.columns / T.warp_columns;
    const unsigned warp = threadIdx.x / LANES, row = warp / ACROSS * T.warp_rows,
                   warp_column = warp % ACROSS * T.warp_columns;
    float c[T.warp_rows / 16][T.warp_columns / 8][4] = {};
    pass_tiles<T.stages>(tiles_in<PRODUCT_DEPTH>(depth), bring, [&](unsigned, unsigned stage) {
        const floatX *const from = memory + stage * (Tiles::A + Tiles::B);
        if (row < tile.rows) stage_product<FORM, T>(c, from, from + Tiles::A, row, warp_column);
    });
    const size_t first_row = (FORM == PRODUCT_WEIGHT ? tile.expert * p.OC : 0) + tile.begin + row;
    const size_t place = first_row * columns + column + warp_column;
    const int rows_left = (int)tile.rows - (int)row,
              columns_left = left < T.columns ? (int)left - (int)warp_column : T.columns;
    const auto write = [&](auto *out, auto FULL, bool accumulate) {
#pragma unroll
        for (int m = 0; m < T.warp_rows; m += 16)
            results_write<T.warp_columns, PACKED, FULL>(out + place + m * columns, c[m / 16], columns, rows_left - m,
                                                        columns_left, accumulate);
    };
    const auto write_all = [&](auto FULL) {
        if constexpr (FORM == PRODUCT_WEIGHT)
            write(p.sums, FULL, true);
        else
            write(p.out, FULL, p.accumulate);
    };
    if (PACKED && rows_left >= T.warp_rows && columns_left >= T.warp_columns)
        write_all(std::true_type());
    else
        write_all(std::false_type());
}

template <ProductForm FORM, ProductTile T, bool PACKED> static void product_launch(GroupedProduct p, size_t rows) {
    const size_t columns = FORM == PRODUCT_FORWARD ? p.OC : p.C;
    p.column_tiles = (unsigned)blocks_for(columns, T.columns);
    const size_t row_tiles =
        FORM == PRODUCT_WEIGHT ? p.E * blocks_for(p.OC, T.rows) : most_row_tiles(rows, p.E, T.rows);
    LAUNCH((experts_product_kernel<FORM, T, PACKED>), dim3((unsigned)(row_tiles * p.column_tiles)), PRODUCT_THREADS,
           (StageTiles<FORM, T>::BYTES))
    (p);
}

template <ProductForm FORM> static void grouped_product(const GroupedProduct &p, size_t rows) {
    const size_t columns = FORM == PRODUCT_FORWARD ? p.OC : p.C, W = full_pack<floatX>;
    const bool packed = p.C % W == 0 && p.OC % W == 0 && all_aligned(p.out, p.sums, p.a, p.b);
    const bool few = FORM == PRODUCT_WEIGHT ? p.OC <= (size_t)SMALL.rows : few_rows(rows, p.E);
    if (!rows) return;
    if (!packed) return product_launch<FORM, SMALL, false>(p, rows);
    if constexpr (sizeof(floatX) == 2) {
        if (!few && columns <= (size_t)NARROW.columns) return product_launch<FORM, NARROW, true>(p, rows);
        if (!few && wgmma_product<FORM>(p, rows)) return;
        const bool two = product_limit() < 2 * StageTiles<FORM, WIDE>::BYTES;
        if (!few && two) return product_launch<FORM, WIDE_OF_TWO, true>(p, rows);
        if (!few) return product_launch<FORM, WIDE, true>(p, rows);
    }
    product_launch<FORM, SMALL, true>(p, rows);
}

static void cuda_experts_forward(Stored *out, const Stored *x, const Stored *weight, const int32_t *first, size_t rows,
                                 size_t E, size_t C, size_t OC, int accumulate) {
    grouped_product<PRODUCT_FORWARD>(
        {(floatX *)out, NULL, (const floatX *)x, (const floatX *)weight, first, (unsigned)E, 0, C, OC, accumulate != 0},
        rows);
}

static void cuda_experts_activate(Stored *out, Stored *gate_up, const Stored *x, const Stored *weight,
                                  const Stored *bias, const Summed *factor, const int32_t *first, const int32_t *source,
                                  size_t rows, size_t E, size_t C, size_t I, Activation activation, int keep) {
    const size_t H = activation_width(activation.kind, I), W = full_pack<floatX>;
    const bool packed = C % W == 0 && I % W == 0 && all_aligned(out, gate_up, x, weight);
    const GroupedProduct p = {
        (floatX *)out, NULL, (const floatX *)x, (const floatX *)weight, first, (unsigned)E, 0, C, H, false};
    const ActivatedRows to = {keep ? (floatX *)gate_up : NULL, (const floatX *)bias, (const float *)factor, source};
    if (packed && !few_rows(rows, E) && wgmma_activated(p, to, activation, rows)) return;
    cuda_experts_forward(gate_up, x, weight, first, rows, E, C, H, 0);
    if (bias) cuda_experts_bias_forward(gate_up, bias, NULL, first, source, rows, E, H);
    cuda_activation_forward(out, gate_up, activation, rows, I);
    if (factor) cuda_route_weigh(out, out, factor, source, rows, I);
}

static void cuda_experts_backward_input(Stored *dx, const Stored *dout, const Stored *weight, const int32_t *first,
                                        size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    grouped_product<PRODUCT_INPUT>({(floatX *)dx, NULL, (const floatX *)dout, (const floatX *)weight, first,
                                    (unsigned)E, 0, C, OC, accumulate != 0},
                                   rows);
}

static void cuda_experts_backward_weight(Summed *dweight, const Stored *dout, const Stored *x, const int32_t *first,
                                         size_t rows, size_t E, size_t C, size_t OC) {
    grouped_product<PRODUCT_WEIGHT>(
        {NULL, (float *)dweight, (const floatX *)dout, (const floatX *)x, first, (unsigned)E, 0, C, OC, true}, rows);
}

// ---- few rows with matrices in 4 bits -------------------------------------------------------------------------------
// Computes out from 4-bit weights. A block has LOOP_THREADS / LANES columns of a tile of up to QUANTISED_ROWS rows.
template <DType ROUNDING, PartScales SCALES>
__global__ void experts_forward_quantised_kernel(floatX *out, const floatX *x, const uint8_t *record,
                                                 QuantFormat format, QuantParts parts, unsigned shift,
                                                 DequantiseTables tables, const int32_t *first, unsigned E,
                                                 unsigned column_blocks, size_t C, size_t OC) {
    SHARED(float, code, 16);
    SHARED(float, map, 256);
    load_tables(code, map, tables);
    const RowTile tile = row_tile(first, E, QUANTISED_ROWS, blockIdx.x / column_blocks);
    const size_t o = (size_t)(blockIdx.x % column_blocks) * (LOOP_THREADS / LANES) + threadIdx.x / LANES;
    if (!tile.rows || o >= OC) return;
    const QuantisedMatrix matrix = {record, format, parts, shift, code, map, (tile.expert * OC + o) * C};
    const auto sums = [&](auto ROWS) {
        quantised_row<ROUNDING, SCALES, ROWS>(matrix, x + tile.begin * C, tile.rows, C,
                                              [&](int r, float sum) { out[(tile.begin + r) * OC + o] = store(sum); });
    };
    if (tile.rows == 1)
        sums(Width<1>());
    else if (tile.rows <= 4)
        sums(Width<4>());
    else
        sums(Width<(int)QUANTISED_ROWS>());
}

static void cuda_experts_forward_quantised(Stored *out, const Stored *x, const void *record, const QuantFormat *format,
                                           const int32_t *first, size_t rows, size_t E, size_t C, size_t OC) {
    unsigned shift;
    const DequantiseTables tables = dequantise_tables(format, &shift);
    const size_t columns = blocks_for(OC, LOOP_THREADS / LANES);
    const dim3 grid((unsigned)(most_row_tiles(rows, E, QUANTISED_ROWS) * columns));
    if (!rows) return;
    with_parts(format, C, x, [&](auto ROUNDING, auto SCALES) {
        LAUNCH((experts_forward_quantised_kernel<ROUNDING, SCALES>), grid, LOOP_THREADS, 0)
        ((floatX *)out, (const floatX *)x, (const uint8_t *)record, *format, quant_parts(*format, E * OC * C), shift,
         tables, first, (unsigned)E, (unsigned)columns, C, OC);
    });
}

#endif
