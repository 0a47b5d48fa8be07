/*
The gated delta rule of op set "cuda", block after block of a span by matrix instructions: forward with the state of a
head, back with its gradient. A thread block has WALK_COLUMNS columns of it: in fp32 in registers, tiles of 16 rows
dealt to its warps, and as a split operand in shared memory. In the notation of delta_blocks.cuh, forward

    R = beta (v - exp(c) K S),  N = inverse R,  out = exp(c) Q S + scores N,  S = exp(c_L) S + K^T (decay(L) N)

and back, dS the gradient of the state after the block, with dN = scores^T dout + decay(L) K dS

    dR = inverse^T dN,  dS = exp(c_L) dS + Q^T (exp(c) dout) - K^T (beta exp(c) dR)

In products over tokens a warp has 16 of them. If shared memory has room for two stages, the next block's tiles of q and
k are prefetched while this one's are used.
*/
#ifndef LLMC_CUDA_DELTA_WALK_CUH
#define LLMC_CUDA_DELTA_WALK_CUH
#include "delta_tokens.cuh"

constexpr int WALK_COLUMNS = 32, WALK_MOST_K = 128;
constexpr size_t WALK_LEAST_K = 16;
constexpr unsigned WALK_THREADS = DELTA_THREADS_OF_BLOCK, WALK_WARPS = WALK_THREADS / LANES;
constexpr unsigned TOKENS_TILE = BLOCK * padded<WALK_COLUMNS>; // rows of tokens

// Results of delta_blocks_kernel
struct DeltaPairs {
    const float *inverse, *scores;
    const BlockGates *gates;
    const BlockLengths *lengths;
    const floatX *dout;
    bool packed_rows;
    unsigned stages; // 1 or 2
};

template <int KP> constexpr unsigned STAGE_TILES = 2 * BLOCK *padded<KP> + TOKENS_TILE; // k, q, then v or dout
template <int KP> constexpr size_t walk_bytes(unsigned stages) {
    return (stages * STAGE_TILES<KP> + TERMS * (KP * padded<WALK_COLUMNS> + 3 * TOKENS_TILE)) * sizeof(floatX);
}

// A warp's part of a state: tiles of 16 rows, every WALK_WARPS-th
template <int KP> constexpr unsigned WALK_TILES = (KP / 16 + WALK_WARPS - 1) / WALK_WARPS;
template <int KP> using WalkState = float[WALK_TILES<KP>][WALK_COLUMNS / 8][4];

// Calls f(row, column, element) for a warp's part.
template <int KP, typename F> __device__ inline void for_walk_state(WalkState<KP> &S, F f) {
#pragma unroll
    for (unsigned m = 0; m < WALK_TILES<KP>; m++) {
        const unsigned first = (threadIdx.x / LANES + m * WALK_WARPS) * 16;
        if (first < KP)
            for_results<WALK_COLUMNS>(S[m], [&](unsigned i, unsigned c, float &value) { f(first + i, c, value); });
    }
}

// Stores the state as a split operand and, unless NULL, to `states`, split too.
template <int KP>
__device__ inline void walk_state_store(WalkState<KP> &S, floatX *tile, floatX *states, size_t K, size_t columns,
                                        size_t width) {
#pragma unroll
    for (unsigned m = 0; m < WALK_TILES<KP>; m++) {
        const unsigned first = (threadIdx.x / LANES + m * WALK_WARPS) * 16;
        if (first >= KP) continue;
        for_pairs<WALK_COLUMNS>(S[m], [&](unsigned i, unsigned c, float a, float b) {
            const unsigned k = first + i;
            split_store_two(tile, KP * padded<WALK_COLUMNS>, k * padded<WALK_COLUMNS> + c, a, b);
            if (states && k < K && c < columns) split_store(states, K * width, k * width + c, a);
            if (states && k < K && c + 1 < columns) split_store(states, K * width, k * width + c + 1, b);
        });
    }
}

// S += tile[BLOCK, KP]^T added[BLOCK, WALK_COLUMNS], which is split
template <int KP> __device__ inline void walk_state_add(WalkState<KP> &S, const floatX *tile, const floatX *added) {
#pragma unroll
    for (unsigned m = 0; m < WALK_TILES<KP>; m++) {
        const unsigned first = (threadIdx.x / LANES + m * WALK_WARPS) * 16;
        if (first >= KP) continue;
#pragma unroll
        for (unsigned j = 0; j < BLOCK; j += 16)
            split_product<WALK_COLUMNS>(S[m], load_a_columns(tile, padded<KP>, j, first), [&](int n, unsigned t) {
                return load_b_rows(added + t * TOKENS_TILE, padded<WALK_COLUMNS>, j, n);
            });
    }
}

// c[16 tokens of this warp] += tile[tokens, KP] S[KP, WALK_COLUMNS]; d likewise of another tile, or NULL
template <int KP>
__device__ inline void walk_read(float (*c)[4], const floatX *tile, float (*d)[4], const floatX *other, unsigned row,
                                 const floatX *S) {
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const OperandA a = load_a(tile, padded<KP>, row, k);
        OperandA b;
        if (d) b = load_a(other, padded<KP>, row, k);
#pragma unroll
        for (unsigned t = 0; t < TERMS; t++) {
            const floatX *const from = S + t * KP * padded<WALK_COLUMNS>;
            const auto right = [&](int n) { return load_b_rows(from, padded<WALK_COLUMNS>, k, n); };
            OperandB of[WALK_COLUMNS / 16];
#pragma unroll
            for (int n = 0; n < WALK_COLUMNS; n += 16) of[n / 16] = right(n);
            mma_columns<WALK_COLUMNS>(c, a, [&](int n) { return of[n / 16]; });
            if (d) mma_columns<WALK_COLUMNS>(d, b, [&](int n) { return of[n / 16]; });
        }
    }
}

// A row of operands A[16,16] of a triangle in global memory: of rows `row` on, or of its transpose
using TriangleRow = float[BLOCK / 16][8];
template <bool TRANSPOSED> __device__ inline void triangle_load(TriangleRow &a, const float *triangle, unsigned row) {
    const unsigned lane = threadIdx.x % LANES;
#pragma unroll
    for (unsigned j = 0; j < BLOCK; j += 16)
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            const unsigned m = row + lane / 4 + i / 2 % 2 * 8, k = j + lane % 4 * 2 + i % 2 + i / 4 * 8;
            a[j / 16][i] =
                (TRANSPOSED ? j >= row : j <= row) ? triangle[TRANSPOSED ? k * BLOCK + m : m * BLOCK + k] : 0.0f;
        }
}
__device__ inline SplitA triangle_operand(const float (&values)[8]) {
    SplitA a;
#pragma unroll
    for (unsigned i = 0; i < 8; i += 2) {
        Two term[TERMS];
        split_two(term, values[i], values[i + 1]);
        for (unsigned t = 0; t < TERMS; t++) memcpy(&a.term[t].x[i], &term[t], sizeof(Two));
    }
    return a;
}

// A lane's two tokens
struct WalkRows {
    float beta[2], read_k[2], read_q[2], add[2]; // exp(c) and decay(L), times 1 / the length of k or q
    float keep;                                  // exp(c_L)
};
__device__ inline WalkRows walk_rows(const BlockGates &g, const BlockLengths &length, unsigned row) {
    WalkRows rows;
#pragma unroll
    for (unsigned i = 0; i < 2; i++) {
        const unsigned token = row + threadIdx.x % LANES / 4 + 8 * i;
        const float decay = decay_to(g, token);
        rows.beta[i] = g.beta[token], rows.read_k[i] = decay * length.key[token];
        rows.read_q[i] = decay * length.query[token];
        rows.add[i] = decay_between(g, BLOCK - 1, token) * length.key[token];
    }
    rows.keep = decay_to(g, BLOCK - 1);
    return rows;
}

// Shared memory of a walk
struct WalkTiles {
    floatX *stages, *S, *R, *N, *added;
};
template <int KP> __device__ inline WalkTiles walk_tiles(floatX *memory, unsigned stages) {
    WalkTiles tiles = {memory, memory + stages * STAGE_TILES<KP>};
    tiles.R = tiles.S + TERMS * KP * padded<WALK_COLUMNS>;
    tiles.N = tiles.R + TERMS * TOKENS_TILE, tiles.added = tiles.N + TERMS * TOKENS_TILE;
    return tiles;
}
template <int KP> __device__ inline floatX *stage_keys(const WalkTiles &tiles, unsigned stage) {
    return tiles.stages + stage * STAGE_TILES<KP>;
}
template <int KP> __device__ inline floatX *stage_queries(const WalkTiles &tiles, unsigned stage) {
    return stage_keys<KP>(tiles, stage) + BLOCK * padded<KP>;
}
template <int KP> __device__ inline floatX *stage_rows(const WalkTiles &tiles, unsigned stage) {
    return stage_queries<KP>(tiles, stage) + BLOCK * padded<KP>;
}

// Calls use(b, stage) for blocks 0 to count - 1 with the tiles that bring(b, stage) has fetched
template <typename Bring, typename Use>
__device__ inline void walk_blocks(unsigned count, unsigned stages, Bring bring, Use use) {
    for (unsigned b = 0; b < count; b++) {
        const unsigned stage = stages == 2 ? b % 2 : 0;
        if (b == 0 || stages == 1) {
            __syncthreads();
            bring(b, stage);
            fetch_commit();
        }
        fetch_wait<0>();
        __syncthreads();
        if (stages == 2 && b + 1 < count) {
            bring(b + 1, 1 - stage);
            fetch_commit();
        }
        use(b, stage);
    }
}

template <int KP>
__global__ void __launch_bounds__(WALK_THREADS)
    delta_walk_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory);
    const WalkTiles tiles = walk_tiles<KP>(memory, p.stages);
    const unsigned number = blockIdx.z, count = blocks.first[number + 1] - blocks.first[number];
    const Span span = blocks.span[number];
    const size_t head = blockIdx.y, key_head = head / (d.HV / d.HK), first = (size_t)blockIdx.x * WALK_COLUMNS;
    const size_t place = state_place(d, w, span, head) + first, columns = w.width - first;
    const unsigned row = threadIdx.x / LANES * 16;
    WalkState<KP> S = {};
    if (state_is_there(w, span, number))
        for_walk_state<KP>(S, [&](unsigned k, unsigned c, float &value) {
            if (k < d.K && c < columns) value = w.state_in[place + k * w.width + c];
        });
    const auto states_of = [&](unsigned at) {
        return w.states ? w.states + (at * d.HV + head) * TERMS * d.K * w.width + first : NULL;
    };
    walk_state_store<KP>(S, tiles.S, states_of(blocks.first[number]), d.K, columns, w.width);
    const auto bring = [&](unsigned b, unsigned stage) {
        const DeltaBlock block = delta_block(blocks, number, blocks.first[number] + b);
        rows_fetch<KP, WALK_THREADS>(stage_keys<KP>(tiles, stage), keys_of(d, block.row, key_head), d.channels,
                                     block.rows, d.K, d.packed);
        rows_fetch<KP, WALK_THREADS>(stage_queries<KP>(tiles, stage), queries_of(d, block.row, key_head), d.channels,
                                     block.rows, d.K, d.packed);
        rows_fetch<WALK_COLUMNS, WALK_THREADS>(stage_rows<KP>(tiles, stage), values_of(d, block.row, head) + first,
                                               d.channels, w.values ? block.rows : 0, columns, p.packed_rows);
    };
    const auto use = [&](unsigned b, unsigned stage) {
        const unsigned at = blocks.first[number] + b;
        const DeltaBlock block = delta_block(blocks, number, at);
        const size_t pairs = (at * d.HV + head) * PAIRS_OF_BLOCK;
        const WalkRows rows = walk_rows(p.gates[at * d.HV + head], p.lengths[at * d.HK + key_head], row);
        TriangleRow inverse, scores;
        triangle_load<false>(inverse, p.inverse + pairs, row);
        if (w.out) triangle_load<false>(scores, p.scores + pairs, row);
        float of_k[WALK_COLUMNS / 8][4] = {}, of_q[WALK_COLUMNS / 8][4] = {}, N[WALK_COLUMNS / 8][4] = {};
        if (w.out)
            walk_read<KP>(of_k, stage_keys<KP>(tiles, stage), of_q, stage_queries<KP>(tiles, stage), row, tiles.S);
        else
            walk_read<KP>(of_k, stage_keys<KP>(tiles, stage), NULL, NULL, row, tiles.S);
        const floatX *const values = stage_rows<KP>(tiles, stage);
        for_pairs<WALK_COLUMNS>(of_k, [&](unsigned i, unsigned c, float a, float b) {
            const unsigned to = (row + i) * padded<WALK_COLUMNS> + c;
            const Two v = *(const Two *)(values + to);
            split_store_two(tiles.R, TOKENS_TILE, to, rows.beta[i / 8] * (load(v.x[0]) - rows.read_k[i / 8] * a),
                            rows.beta[i / 8] * (load(v.x[1]) - rows.read_k[i / 8] * b));
        });
        __syncthreads();
#pragma unroll
        for (unsigned j = 0; j < BLOCK; j += 16)
            if (j <= row)
                split_product<WALK_COLUMNS>(N, triangle_operand(inverse[j / 16]), [&](int n, unsigned t) {
                    return load_b_rows(tiles.R + t * TOKENS_TILE, padded<WALK_COLUMNS>, j, n);
                });
        floatX *const added = w.added ? w.added + ((at * d.HV + head) * TERMS * BLOCK + row) * d.V + first : NULL;
        for_pairs<WALK_COLUMNS>(N, [&](unsigned i, unsigned c, float a, float b) {
            const unsigned to = (row + i) * padded<WALK_COLUMNS> + c;
            split_store_two(tiles.N, TOKENS_TILE, to, a, b);
            split_store_two(tiles.added, TOKENS_TILE, to, rows.add[i / 8] * a, rows.add[i / 8] * b);
            if (added && row + i < block.rows && c < columns) split_store(added, BLOCK * d.V, i * d.V + c, a);
            if (added && row + i < block.rows && c + 1 < columns) split_store(added, BLOCK * d.V, i * d.V + c + 1, b);
        });
        __syncthreads();
        if (w.out) {
            for_results<WALK_COLUMNS>(of_q, [&](unsigned i, unsigned, float &value) { value *= rows.read_q[i / 8]; });
#pragma unroll
            for (unsigned j = 0; j < BLOCK; j += 16)
                if (j <= row)
                    split_product<WALK_COLUMNS>(of_q, triangle_operand(scores[j / 16]), [&](int n, unsigned t) {
                        return load_b_rows(tiles.N + t * TOKENS_TILE, padded<WALK_COLUMNS>, j, n);
                    });
            floatX *const out = w.out + ((block.row + row) * d.HV + head) * d.V + first;
            for_pairs<WALK_COLUMNS>(of_q, [&](unsigned i, unsigned c, float a, float b) {
                const Two two = two_of(a, b);
                floatX *const to = out + i * d.HV * d.V + c;
                if (row + i >= block.rows || c >= columns) return;
                if (p.packed_rows) {
                    *(Two *)to = two;
                } else {
                    to[0] = two.x[0];
                    if (c + 1 < columns) to[1] = two.x[1];
                }
            });
        }
        for_walk_state<KP>(S, [&](unsigned, unsigned, float &value) { value *= rows.keep; });
        walk_state_add<KP>(S, stage_keys<KP>(tiles, stage), tiles.added);
        walk_state_store<KP>(S, tiles.S, b + 1 < count ? states_of(at + 1) : NULL, d.K, columns, w.width);
    };
    walk_blocks(count, p.stages, bring, use);
    if (w.state_out && number >= w.first_out)
        for_walk_state<KP>(S, [&](unsigned k, unsigned c, float value) {
            if (k < d.K && c < columns) w.state_out[place + k * w.width + c] = value;
        });
}

template <int KP>
__global__ void __launch_bounds__(WALK_THREADS)
    delta_walk_back_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory);
    const WalkTiles tiles = walk_tiles<KP>(memory, p.stages);
    const unsigned number = blockIdx.z, count = blocks.first[number + 1] - blocks.first[number];
    const Span span = blocks.span[number];
    const size_t head = blockIdx.y, key_head = head / (d.HV / d.HK), first = (size_t)blockIdx.x * WALK_COLUMNS;
    const size_t place = head * d.K * w.width + first, columns = w.width - first;
    const unsigned row = threadIdx.x / LANES * 16, last = blocks.first[number] + count - 1;
    WalkState<KP> dS = {};
    if (number >= w.first_in && number < w.last_in)
        for_walk_state<KP>(dS, [&](unsigned k, unsigned c, float &value) {
            if (k < d.K && c < columns) value = w.state_in[place + k * w.width + c];
        });
    const auto states_of = [&](unsigned at) {
        return w.states ? w.states + (at * d.HV + head) * TERMS * d.K * w.width + first : NULL;
    };
    walk_state_store<KP>(dS, tiles.S, states_of(last), d.K, columns, w.width);
    const auto bring = [&](unsigned b, unsigned stage) {
        const DeltaBlock block = delta_block(blocks, number, last - b);
        rows_fetch<KP, WALK_THREADS>(stage_keys<KP>(tiles, stage), keys_of(d, block.row, key_head), d.channels,
                                     block.rows, d.K, d.packed);
        rows_fetch<KP, WALK_THREADS>(stage_queries<KP>(tiles, stage), queries_of(d, block.row, key_head), d.channels,
                                     block.rows, d.K, d.packed);
        rows_fetch<WALK_COLUMNS, WALK_THREADS>(stage_rows<KP>(tiles, stage),
                                               p.dout + (block.row * d.HV + head) * d.V + first, d.HV * d.V, block.rows,
                                               columns, p.packed_rows);
    };
    const auto use = [&](unsigned b, unsigned stage) {
        const unsigned at = last - b;
        const DeltaBlock block = delta_block(blocks, number, at);
        const size_t pairs = (at * d.HV + head) * PAIRS_OF_BLOCK;
        const WalkRows rows = walk_rows(p.gates[at * d.HV + head], p.lengths[at * d.HK + key_head], row);
        TriangleRow inverse, scores;
        triangle_load<true>(inverse, p.inverse + pairs, row);
        triangle_load<true>(scores, p.scores + pairs, row);
        float dN[WALK_COLUMNS / 8][4] = {}, dR[WALK_COLUMNS / 8][4] = {};
        walk_read<KP>(dN, stage_keys<KP>(tiles, stage), NULL, NULL, row, tiles.S);
        for_pairs<WALK_COLUMNS>(dN, [&](unsigned i, unsigned c, float &a, float &b) {
            const unsigned to = (row + i) * padded<WALK_COLUMNS> + c;
            const Two dout = *(const Two *)(stage_rows<KP>(tiles, stage) + to);
            a *= rows.add[i / 8], b *= rows.add[i / 8];
            split_store_two(tiles.added, TOKENS_TILE, to, rows.read_q[i / 8] * load(dout.x[0]),
                            rows.read_q[i / 8] * load(dout.x[1]));
        });
#pragma unroll
        for (unsigned j = 0; j < BLOCK; j += 16)
            if (j >= row)
                split_by_exact<WALK_COLUMNS>(dN, triangle_operand(scores[j / 16]), [&](int n) {
                    return load_b_rows(stage_rows<KP>(tiles, stage), padded<WALK_COLUMNS>, j, n);
                });
        for_pairs<WALK_COLUMNS>(dN, [&](unsigned i, unsigned c, float a, float b) {
            split_store_two(tiles.N, TOKENS_TILE, (row + i) * padded<WALK_COLUMNS> + c, a, b);
        });
        __syncthreads();
#pragma unroll
        for (unsigned j = 0; j < BLOCK; j += 16)
            if (j >= row)
                split_product<WALK_COLUMNS>(dR, triangle_operand(inverse[j / 16]), [&](int n, unsigned t) {
                    return load_b_rows(tiles.N + t * TOKENS_TILE, padded<WALK_COLUMNS>, j, n);
                });
        floatX *const added = w.added ? w.added + ((at * d.HV + head) * TERMS * BLOCK + row) * d.V + first : NULL;
        for_pairs<WALK_COLUMNS>(dR, [&](unsigned i, unsigned c, float a, float b) {
            const float scale = -rows.beta[i / 8] * rows.read_k[i / 8];
            split_store_two(tiles.R, TOKENS_TILE, (row + i) * padded<WALK_COLUMNS> + c, scale * a, scale * b);
            if (added && row + i < block.rows && c < columns) split_store(added, BLOCK * d.V, i * d.V + c, a);
            if (added && row + i < block.rows && c + 1 < columns) split_store(added, BLOCK * d.V, i * d.V + c + 1, b);
        });
        __syncthreads();
        for_walk_state<KP>(dS, [&](unsigned, unsigned, float &value) { value *= rows.keep; });
        walk_state_add<KP>(dS, stage_queries<KP>(tiles, stage), tiles.added);
        walk_state_add<KP>(dS, stage_keys<KP>(tiles, stage), tiles.R);
        walk_state_store<KP>(dS, tiles.S, b + 1 < count ? states_of(at - 1) : NULL, d.K, columns, w.width);
    };
    walk_blocks(count, p.stages, bring, use);
    if (w.state_out && number == 0)
        for_walk_state<KP>(dS, [&](unsigned k, unsigned c, float value) {
            if (k < d.K && c < columns)
                w.state_out[place + k * w.width + c] = span.begin > span.document ? value : 0.0f;
        });
}

#ifdef CUDA_ON_CPU
static size_t walk_limit(void) { return SIZE_MAX; }
#else
static size_t walk_limit(void) { return shared_memory_limit(); }
#endif

// Calls launch(KP) with the tiles' columns of q and k as a constant: the fewest that hold K.
template <typename F> static void with_walk_size(size_t K, F launch) {
    if (K <= 32)
        launch(Width<32>());
    else if (K <= 64)
        launch(Width<64>());
    else
        launch(Width<WALK_MOST_K>());
}

// Returns whether the tiled kernels take heads with K columns of q and k on this device. With few columns a state is
// almost forgotten within a block: a difference of products would lose it.
static bool walk_takes(size_t K) {
    bool fits = false;
    if (K >= WALK_LEAST_K && K <= WALK_MOST_K)
        with_walk_size(K, [&](auto KP) { fits = walk_bytes<KP>(1) <= walk_limit(); });
    return fits;
}

static void delta_tiled_walk(const DeltaWalk &w, DeltaPairs p, const DeltaCall &d, const SpanBlocks &blocks,
                             bool back) {
    const dim3 grid((unsigned)blocks_for(w.width, WALK_COLUMNS), (unsigned)d.HV, blocks.count);
    with_walk_size(d.K, [&](auto KP) {
        p.stages = walk_bytes<KP>(2) <= walk_limit() ? 2 : 1;
        const size_t bytes = walk_bytes<KP>(p.stages);
        if (back)
            LAUNCH((delta_walk_back_kernel<KP>), grid, WALK_THREADS, bytes)(w, p, d, blocks);
        else
            LAUNCH((delta_walk_kernel<KP>), grid, WALK_THREADS, bytes)(w, p, d, blocks);
    });
}

#endif
