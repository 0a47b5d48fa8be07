/*
Products of sorted rows with their expert's matrix by Hopper's instructions: forms "forward" and "input" of experts.cuh.

A block stays on its multiprocessor and computes tile after tile of the result, block + i * blocks: columns of the same
rows come first, then rows of the same expert. Warp group 0 loads: a warp fills the stages of a pipeline with
STAGE_DEPTH of the summed dimension each, and runs ahead into the next tile. Three groups multiply, 64 rows each. Groups
without rows in a tile wait.

Two blocks are a cluster and compute neighbouring tiles. If these have the same rows, each block loads half of A, for
both. So a stage is free when no warp of either block reads it. After the last tile a block may have one without rows.

    forward   A = x [192 rows, 64]       B = weight[e] [N rows, 64], sums along columns
    input     A = dout [192 rows, 64]    B = weight[e] [64 rows, N], sums along rows

The activated product is a forward product of gates and ups. Its tile has N / 2 columns of each, so that one thread has
both; where gates and ups alternate (CLAMPED) it is a tile of forward, with biases. It stores act(gate) up times the
row's factor, rounded where the single ops round: the same bits.

Rows of the next expert in a tile are computed and not stored. Every run adds in the same order.
*/
#ifndef LLMC_CUDA_EXPERTS_WGMMA_CUH
#define LLMC_CUDA_EXPERTS_WGMMA_CUH
#include "activation.cuh"
#include "attention_tiles.cuh"
#include "experts_rows.cuh"
#include "wgmma.cuh"
#ifdef PRECISION_BF16

// MULTIPLYING: groups that multiply
constexpr unsigned MULTIPLYING = 3, TILE_ROWS = MULTIPLYING * GROUP_ROWS,
                   TILE_THREADS = (1 + MULTIPLYING) * GROUP_THREADS,
                   STORING_WARPS = MULTIPLYING * GROUP_THREADS / LANES;
constexpr unsigned CLUSTER = 2, SHARE = GROUP_ROWS / CLUSTER; // blocks that share A; rows that one of them loads
constexpr size_t STAGES_BYTES = 192 << 10, STAGE_DEPTH = PRODUCT_DEPTH;
static_assert(STAGE_DEPTH == PANEL);

// A tile of the result: its rows, its first column, its matrix
struct ResultTile {
    unsigned begin, rows, column, expert;
};

// Parts of an expert's matrix from which an activated tile takes columns: gates and ups, unless they alternate
template <int KIND> constexpr int ACTIVATED_BOXES = KIND == ACTIVATION_CLAMPED ? 1 : 2;

// Sizes of what a block has in shared memory, in elements
template <int N> struct TileSizes {
    static constexpr unsigned A = TILE_ROWS * STAGE_DEPTH, B = N * STAGE_DEPTH; // a stage's tiles
    static constexpr unsigned STAGES = STAGES_BYTES / ((A + B) * sizeof(floatX)), OUT = 16 * PANEL;
    static size_t bytes(size_t E) {
        return (STAGES * (A + B) + STORING_WARPS * OUT) * sizeof(floatX) + STAGES * sizeof(ResultTile) +
               (E + 1) * sizeof(unsigned);
    }
};

#ifdef WGMMA_CODE
template <int N> struct TileMemory : TileSizes<N> {
    floatX *stages;     // [STAGES][A + B]
    floatX *out;        // [STORING_WARPS][OUT] a panel of 16 rows for each warp that stores
    ResultTile *tile;   // [STAGES] the tile that a stage belongs to
    unsigned *before;   // [E + 1] row tiles of all experts before each
    TileBarrier *full;  // [STAGES] a stage is loaded
    TileBarrier *empty; // [STAGES] no warp of the cluster reads the stage any more
};

template <int N> __device__ inline TileMemory<N> tile_memory() {
    typedef TileMemory<N> M;
    DYNAMIC_PANELS(floatX, panels);
    SHARED(TileBarrier, barriers, 2 * M::STAGES);
    floatX *const out = panels + M::STAGES * (M::A + M::B);
    ResultTile *const tile = (ResultTile *)(out + STORING_WARPS * M::OUT);
    return M{{}, panels, out, tile, (unsigned *)(tile + M::STAGES), barriers, barriers + M::STAGES};
}

// Starts the barriers and counts the row tiles. All threads of the block.
template <int N> __device__ inline void tiles_begin(const TileMemory<N> &m, const GroupedProduct &p) {
    if (threadIdx.x == 0) {
        for (unsigned s = 0; s < m.STAGES; s++)
            barrier_start(m.full + s, 1), barrier_start(m.empty + s, CLUSTER * STORING_WARPS);
        barriers_started();
        m.before[0] = 0;
    }
    each_expert(p.first, p.E, TILE_ROWS,
                [&](unsigned e, unsigned tiles, unsigned before) { m.before[e + 1] = before + tiles; });
    cluster_sync();
}

// Returns tile `number`, of `columns` columns, without rows after the last one.
template <int N>
__device__ inline ResultTile tile_find(const TileMemory<N> &m, const GroupedProduct &p, unsigned number,
                                       unsigned columns) {
    const unsigned row = number / p.column_tiles;
    unsigned low = 0, high = p.E; // before[low] <= row < before[high]
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        (m.before[middle] <= row ? low : high) = middle;
    }
    if (row >= m.before[p.E]) return ResultTile{};
    const RowTile rows = tile_of(p.first, low, TILE_ROWS, row - m.before[low]);
    return ResultTile{rows.begin, rows.rows, number % p.column_tiles * columns, low};
}

// Calls each(number of the first tile) for all pairs of tiles of the cluster.
template <int N, typename F> __device__ inline void each_pair(const TileMemory<N> &m, const GroupedProduct &p, F each) {
    const unsigned count = m.before[p.E] * p.column_tiles;
    for (unsigned pair = blockIdx.x / CLUSTER * CLUSTER; pair < count; pair += gridDim.x) each(pair);
}

// Loads the stages of all tiles of the block. One thread. BOXES: equal parts of the matrix from which form "forward"
// takes columns
template <ProductForm FORM, int N, int BOXES>
__device__ inline void tiles_load(const TileMemory<N> &m, const GroupedProduct &p, const TensorMap *a_map,
                                  const TensorMap *b_map) {
    const size_t depth = FORM == PRODUCT_FORWARD ? p.C : p.OC;
    const unsigned rank = cluster_rank();
    Turn turn = {};
    each_pair(m, p, [&](unsigned pair) {
        const ResultTile tile = tile_find(m, p, pair + rank, N / BOXES);
        const bool common = pair % p.column_tiles + 1 < p.column_tiles;
        const unsigned rows = (tile.rows + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS,
                       step = common ? GROUP_ROWS : SHARE, set = common ? (1 << CLUSTER) - 1 : 1 << rank;
        for (size_t k = 0; k < depth; k += STAGE_DEPTH, turn_next<TileSizes<N>::STAGES>(turn)) {
            floatX *const a = m.stages + turn.stage * (m.A + m.B), *const b = a + m.A;
            TileBarrier *const full = m.full + turn.stage;
            barrier_wait(m.empty + turn.stage, turn.phase ^ 1);
            m.tile[turn.stage] = tile;
            barrier_expect(full, (unsigned)((rows * STAGE_DEPTH + (rows ? m.B : 0)) * sizeof(floatX)));
            if (!rows) continue;
            for (unsigned row = common ? rank * SHARE : 0; row < rows; row += step)
                panel_multicast(a + row * PANEL, a_map, full, k, tile.begin + row, 0, set);
            if (FORM == PRODUCT_FORWARD)
                for (unsigned box = 0; box < BOXES; box++)
                    panel_load(b + box * (N / BOXES) * PANEL, b_map, full, k, tile.column + box * (p.OC / BOXES),
                               tile.expert);
            else
                for (unsigned column = 0; column < N; column += PANEL)
                    panel_load(b + column * STAGE_DEPTH, b_map, full, tile.column + column, k, tile.expert);
        }
    });
}

// Adds a stage's product to c, 64 rows of the tile; first: begins with it.
template <ProductForm FORM, int N>
__device__ inline void stage_multiply(float (*c)[4], const floatX *a, const floatX *b, unsigned row, bool first) {
    wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < STAGE_DEPTH; k += 16) {
        const RowsOperand rows = operand_rows<TILE_ROWS>(a, row, k);
        if constexpr (FORM == PRODUCT_FORWARD)
            wgmma<N>(c, rows, operand_rows<N>(b, 0, k), !first || k);
        else
            wgmma<N>(c, rows, operand_columns<STAGE_DEPTH>(b, k, 0), !first || k);
    }
    wgmma_commit();
}

// Stores N columns of the warp's 16 rows, clipped to rows x left, through a panel: eight lanes write 128 bytes.
// A lane has W of every 4 W columns. make(to, j, half): makes its results in columns 4 W j to 4 W (j + 1) - 1 of its
// first or second row
template <int N, int W, typename Make>
__device__ inline void rows_store(floatX *out, size_t width, floatX *panel, unsigned rows, size_t left, Make make) {
    const unsigned lane = threadIdx.x % LANES, column = lane % 8 * 8;
    const auto unit = [&](unsigned row, unsigned u) { return panel + row * PANEL + (u ^ row % 8) * 8; };
#pragma unroll
    for (unsigned n = 0; n < N; n += PANEL) {
#pragma unroll
        for (unsigned i = 0; i < PANEL / (2 * W) && n + i / 2 * 4 * W < N; i++) {
            const unsigned to = (i / 2 * 4 + lane % 4) * W;
            float result[W];
            Pack<floatX, W> rounded;
            make(result, n / (4 * W) + i / 2, i % 2);
            for (int w = 0; w < W; w++) set_value(rounded.x + w, result[w]);
            pack_write(unit(lane / 4 + i % 2 * 8, to / 8) + to % 8, rounded);
        }
        __syncwarp();
#pragma unroll
        for (unsigned row = lane / 8; row < 16; row += 4)
            if (row < rows && n + column < left && n + column < N)
                *(uint4 *)ALIGNED(out + row * width + n + column, 16) = *(const uint4 *)unit(row, lane % 8);
        __syncwarp();
    }
}

// Stores N columns of the warp's sums.
template <int N>
__device__ inline void sums_store(floatX *out, size_t width, const float (*c)[4], floatX *panel, unsigned rows,
                                  size_t left) {
    rows_store<N, 2>(out, width, panel, rows, left,
                     [&](float *to, unsigned j, unsigned half) { to[0] = c[j][half * 2], to[1] = c[j][half * 2 + 1]; });
}

// Frees a stage of this block and its loads in the other blocks, once all lanes of the warp came here.
__device__ inline void stage_free(TileBarrier *empty) {
    __syncwarp();
    if (threadIdx.x % LANES < CLUSTER) barrier_arrive_at(empty, threadIdx.x % LANES);
}

// Multiplies the stages of all tiles of the block, and calls store(tile, its row, c, panel) for each warp's 16 rows.
template <ProductForm FORM, int N, typename Store>
__device__ inline void tiles_multiply(const TileMemory<N> &m, const GroupedProduct &p, unsigned group_row,
                                      Store store) {
    const unsigned stages = tiles_in<STAGE_DEPTH>(FORM == PRODUCT_FORWARD ? p.C : p.OC),
                   warp = threadIdx.x / LANES - GROUP_THREADS / LANES;
    Turn turn = {};
    float c[N / 8][4];
    each_pair(m, p, [&](unsigned) {
        ResultTile tile = {};
        unsigned last = 0;
        for (unsigned i = 0; i < stages; i++, last = turn.stage, turn_next<TileSizes<N>::STAGES>(turn)) {
            const floatX *const a = m.stages + turn.stage * (m.A + m.B);
            barrier_wait(m.full + turn.stage, turn.phase);
            if (i == 0) tile = m.tile[turn.stage];
            if (group_row < tile.rows) {
                stage_multiply<FORM, N>(c, a, a + m.A, group_row, i == 0);
                wgmma_wait<1>();
            }
            if (i) stage_free(m.empty + last);
        }
        wgmma_wait<0>(c);
        stage_free(m.empty + last);
        if (warp * 16 < tile.rows) store(tile, warp * 16, c, m.out + warp * m.OUT);
    });
}

// Rounds from[2] to floatX. Two at once take one instruction, and each of them one to become a float again.
__device__ inline void pair_round(float *to, const float *from) {
    Pack<floatX, 2> pair;
    uint32_t word;
    set_value(pair.x, from[0]), set_value(pair.x + 1, from[1]);
    memcpy(&word, &pair, sizeof(word));
    const uint32_t bits[2] = {word << 16, word & 0xffff0000u};
    memcpy(to, bits, sizeof(bits));
}

// Rounds sums, and adds the biases of their columns. `left` columns exist.
template <int N> __device__ inline void sums_bias(float (*c)[4], const floatX *bias, size_t left) {
    const unsigned column = threadIdx.x % 4 * 2;
#pragma unroll
    for (unsigned j = 0; j < N / 8; j++) {
        if (j * 8 + column >= left) continue;
        const Pack<floatX, 2> add = pack_read<2>(bias + j * 8 + column);
        pair_round(c[j], c[j]), pair_round(c[j] + 2, c[j] + 2);
        for (int i = 0; i < 4; i++) c[j][i] += load(add.x[i % 2]);
    }
}

// Stores the activated rows, N / 2 columns, from the gates and ups in c. `first`: number of the first row
template <int N, int KIND>
__device__ inline void activated_store(const GroupedProduct &p, const ActivatedRows &to, const float (*c)[4],
                                       floatX *panel, size_t first, unsigned rows, unsigned column) {
    float factor[2];
    for (unsigned half = 0; half < 2; half++) {
        const unsigned row = threadIdx.x % LANES / 4 + half * 8;
        factor[half] = to.factor && row < rows ? to.factor[to.source[first + row]] : 1.0f;
    }
    const auto make = [&](float *x, unsigned j, unsigned half) {
        float both[2], up[2];
        pair_round(both, c[j] + half * 2);
        if constexpr (KIND == ACTIVATION_CLAMPED) {
            x[0] = load(store(clamped(both[0], both[1], to.clamp))) * factor[half];
        } else {
            pair_round(up, c[N / 16 + j] + half * 2);
            for (int i = 0; i < 2; i++) x[i] = activated<KIND>(both[i]) * up[i];
            pair_round(x, x);
            for (int i = 0; i < 2; i++) x[i] *= factor[half];
        }
    };
    const size_t I = p.OC / 2;
    rows_store<N / 2, KIND == ACTIVATION_CLAMPED ? 1 : 2>(p.out + first * I + column, I, panel, rows, I - column, make);
}

// Runs the roles of the block's warp groups.
template <ProductForm FORM, int N, int BOXES, typename Store>
__device__ inline void tiles_run(const GroupedProduct &p, const TensorMap *a_map, const TensorMap *b_map, Store store) {
    const TileMemory<N> m = tile_memory<N>();
    const unsigned group = group_number();
    tiles_begin(m, p);
    if (group == 0) {
        registers_give<32>();
        if (threadIdx.x < LANES && one_lane()) tiles_load<FORM, N, BOXES>(m, p, a_map, b_map);
    } else {
        registers_take<160>();
        tiles_multiply<FORM>(m, p, (group - 1) * GROUP_ROWS, store);
    }
    __syncwarp();
    cluster_sync(); // the other block may still free stages here
}
#endif

template <ProductForm FORM, int N>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(TILE_THREADS, 1)
    experts_wgmma_kernel(GroupedProduct p, TENSOR_MAP a_map, TENSOR_MAP b_map) {
#ifdef WGMMA_CODE
    const size_t width = FORM == PRODUCT_FORWARD ? p.OC : p.C;
    tiles_run<FORM, N, 1>(p, &a_map, &b_map, [&](const ResultTile &tile, unsigned row, float(*c)[4], floatX *panel) {
        sums_store<N>(p.out + (tile.begin + (size_t)row) * width + tile.column, width, c, panel, tile.rows - row,
                      width - tile.column);
    });
#endif
}

template <int N, int KIND>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(TILE_THREADS, 1)
    experts_activate_kernel(GroupedProduct p, ActivatedRows to, TENSOR_MAP a_map, TENSOR_MAP b_map) {
#ifdef WGMMA_CODE
    constexpr int BOXES = ACTIVATED_BOXES<KIND>;
    const size_t I = p.OC / 2;
    const auto store = [&](const ResultTile &tile, unsigned row, float(*c)[4], floatX *panel) {
        const size_t first = tile.begin + (size_t)row, left = p.OC / BOXES - tile.column;
        const unsigned rows = tile.rows - row;
        floatX *const gate = to.gate_up + first * p.OC + tile.column;
        if (BOXES == 1 && to.bias) sums_bias<N>(c, to.bias + tile.expert * p.OC + tile.column, left);
        if (to.gate_up) sums_store<N / BOXES>(gate, p.OC, c, panel, rows, left);
        if (BOXES == 2 && to.gate_up) sums_store<N / 2>(gate + I, p.OC, c + N / 16, panel, rows, left);
        activated_store<N, KIND>(p, to, c, panel, first, rows, tile.column * BOXES / 2);
    };
    tiles_run<PRODUCT_FORWARD, N, BOXES>(p, &a_map, &b_map, store);
#endif
}

#ifdef CUDA_ON_CPU
constexpr size_t LEAST_DEPTH = 1;
static size_t block_limit(void) { return SIZE_MAX; }
#else
constexpr size_t LEAST_DEPTH = 256; // shorter sums are bound by memory: two blocks of the other kernel wait less
static size_t block_limit(void) { return shared_memory_limit() - 1024; }
#endif

// Calls launch(p, grid, map of a, map of b, shared bytes), with p.column_tiles set. boxes: as in tiles_load
template <ProductForm FORM, int N, typename F>
static void wgmma_launch(GroupedProduct p, size_t rows, size_t boxes, F launch) {
    const size_t columns = (FORM == PRODUCT_FORWARD ? p.OC : p.C) / boxes, depth = FORM == PRODUCT_FORWARD ? p.C : p.OC;
    p.column_tiles = (unsigned)blocks_for(columns, N / boxes);
    const size_t tiles = most_row_tiles(rows, p.E, TILE_ROWS) * p.column_tiles;
    const TensorMap a = tensor_map(p.a, TensorDims{depth, rows, 1, depth, depth}, SHARE, 1),
                    b = tensor_map(p.b, TensorDims{p.C, p.OC, p.E, p.C, p.OC * p.C},
                                   FORM == PRODUCT_FORWARD ? N / (unsigned)boxes : STAGE_DEPTH, 1);
    const size_t clusters = min_size(blocks_for(tiles, CLUSTER), max_size(multiprocessors() / CLUSTER, 1));
    launch(p, dim3((unsigned)clusters * CLUSTER), a, b, TileSizes<N>::bytes(p.E));
}

template <ProductForm FORM, int N> static void wgmma_product_launch(const GroupedProduct &p, size_t rows) {
    wgmma_launch<FORM, N>(p, rows, 1, [](GroupedProduct q, dim3 grid, TensorMap a, TensorMap b, size_t bytes) {
        LAUNCH_CLUSTERS((experts_wgmma_kernel<FORM, N>), CLUSTER, grid, TILE_THREADS, bytes)(q, a, b);
    });
}

// Returns how many columns a tile has: of 128 and 192, what loads fewer elements. Loads bind as much as products.
static int tile_columns(size_t columns) {
    const auto loaded = [=](size_t N) { return blocks_for(columns, N) * (TILE_ROWS / CLUSTER + N); };
    return loaded(128) < loaded(192) ? 128 : 192;
}

// Tells whether these kernels are on and suit a product of many rows in whole packs.
static bool wgmma_suits(const GroupedProduct &p, size_t depth) {
    return wgmma_on() && !p.accumulate && depth >= LEAST_DEPTH && TileSizes<192>::bytes(p.E) <= block_limit();
}
#endif

// Computes the product if these kernels are on and suit it. Returns whether they do.
template <ProductForm FORM> static bool wgmma_product(const GroupedProduct &p, size_t rows) {
#ifdef PRECISION_BF16
    if constexpr (FORM != PRODUCT_WEIGHT) {
        const int N = tile_columns(FORM == PRODUCT_FORWARD ? p.OC : p.C);
        if (!wgmma_suits(p, FORM == PRODUCT_FORWARD ? p.C : p.OC)) return false;
        if (N == 128) wgmma_product_launch<FORM, 128>(p, rows);
        if (N == 192) wgmma_product_launch<FORM, 192>(p, rows);
        return true;
    }
#endif
    return (void)p, (void)rows, false;
}

// Computes the activated product if these kernels are on and suit it. Returns whether they do.
static bool wgmma_activated(const GroupedProduct &p, ActivatedRows to, Activation activation, size_t rows) {
#ifdef PRECISION_BF16
    if (!wgmma_suits(p, p.C) || !wgmma_activates(activation.kind, to.bias != NULL)) return false;
    to.clamp = clamp_of(activation);
    const auto run = [&](auto KIND) {
        wgmma_launch<PRODUCT_FORWARD, 192>(
            p, rows, ACTIVATED_BOXES<KIND>, [&](GroupedProduct q, dim3 grid, TensorMap a, TensorMap b, size_t bytes) {
                LAUNCH_CLUSTERS((experts_activate_kernel<192, KIND>), CLUSTER, grid, TILE_THREADS, bytes)(q, to, a, b);
            });
    };
    if (activation.kind == ACTIVATION_SWIGLU) run(Width<ACTIVATION_SWIGLU>());
    if (activation.kind == ACTIVATION_GEGLU) run(Width<ACTIVATION_GEGLU>());
    if (activation.kind == ACTIVATION_CLAMPED) run(Width<ACTIVATION_CLAMPED>());
    return true;
#else
    return (void)p, (void)to, (void)activation, (void)rows, false;
#endif
}

#endif
