/*
Mamba-2's rule (ssd_forward) of op set "cuda", block after block of a span by matrix instructions. It is the gated delta
rule without its system, so it shares blocks, tiles, gates and walks with delta_walk.cuh. In the notation of
delta_blocks.cuh, with the step in place of beta and skip the op's D,

    P_ij = (q_i . k_j) decay(i, j) step_j for j <= i        scores
    out = exp(c) Q S + P v + skip v,  S = exp(c_L) S + K^T (decay(L) step v)

and back, dS the gradient of the state after the block,

    dv = P^T dout + step decay(L) K dS + skip dout,  dS = exp(c_L) dS + Q^T (exp(c) dout)

Queries and values, or keys and dout, arrive during the previous block's update of the state; the other tile arrives
during the products that need no update.
*/
#ifndef LLMC_CUDA_SSD_WALK_CUH
#define LLMC_CUDA_SSD_WALK_CUH
#include "delta_walk.cuh"

// Sets the factors of a block's tokens, one thread per token: step, exp(c), and decay(L) step.
__device__ inline void ssd_factors(BlockFactors *factors, const BlockGates &g) {
    const unsigned i = threadIdx.x;
    if (i >= BLOCK) return;
    const float decay = decay_to(g, i);
    factors->token[i] = TokenFactors{g.beta[i], 0.0f, decay, decay_between(g, BLOCK - 1, i) * g.beta[i]};
    if (i == BLOCK - 1) factors->keep = decay;
}

// Calls f(n, e, i, j, decay, step) for a lane's elements 2 e, 2 e + 1 of C[16,8] number n, of N / 8 from row `row` and
// column `column` on. Their pairs are (i, j) and (i, j + 1); decay is 0 where a key does not precede; step: of the keys
template <unsigned N, typename F>
__device__ inline void for_decays(const BlockGates &g, unsigned row, unsigned column, unsigned lane, F f) {
    float high[2], low[2];
    for (unsigned e = 0; e < 2; e++) high[e] = g.high[row + lane / 4 + 8 * e], low[e] = g.low[row + lane / 4 + 8 * e];
#pragma unroll
    for (unsigned n = 0; n < N / 8; n++) {
        const unsigned j = column + n * 8 + lane % 4 * 2;
        const auto high_j = pack_read<2>(g.high + j), low_j = pack_read<2>(g.low + j), step = pack_read<2>(g.beta + j);
#pragma unroll
        for (unsigned e = 0; e < 2; e++) {
            const unsigned i = row + lane / 4 + 8 * e;
            float decay[2];
#pragma unroll
            for (unsigned c = 0; c < 2; c++) {
                const float past = (high[e] - high_j.x[c]) + (low[e] - low_j.x[c]); // no decay grows
                decay[c] = j + c <= i ? natural_exp(fminf(past, 0.0f)) : 0.0f;
            }
            f(n, e, i, j, decay, step.x);
        }
    }
}

// Stores a head's scores, split, from q k^T of rows `row` on.
__device__ inline void ssd_scores(floatX *tile, const float (*qk)[4], const BlockGates &g, unsigned row) {
    const auto store_two = [&](unsigned n, unsigned e, unsigned i, unsigned j, const float *decay, const float *step) {
        split_store_two(tile, PAIR_TILE, i * padded<BLOCK> + j, qk[n][2 * e] * step[0] * decay[0],
                        qk[n][2 * e + 1] * step[1] * decay[1]);
    };
    for_decays<BLOCK>(g, row, 0, threadIdx.x % LANES, store_two);
}

// Computes the gates, factors and scores of blocks: one thread block per block of tokens and key head, whose product q
// k^T serves all its value heads. TRANSPOSED: stores scores_back. scores NULL: not wanted
template <bool TRANSPOSED>
__global__ void __launch_bounds__(DELTA_THREADS_OF_BLOCK)
    ssd_blocks_kernel(BlockResults to, DeltaCall d, SpanBlocks blocks) {
    DYNAMIC_SHARED(floatX, memory); // BLOCKS_BYTES: tiles of q and k; later a head's scores
    SHARED(BlockGates, gates, ROW_WARPS);
    SHARED(BlockFactors, factors, 1);
    const unsigned warp = threadIdx.x / LANES, group = (unsigned)(d.HV / d.HK);
    const unsigned first = blockIdx.y * group, end = first + group;
    const DeltaBlock block = delta_block(blocks, span_of(blocks, blockIdx.x), blockIdx.x);
    OperandA *const scores = TRANSPOSED ? to.scores_back : to.scores;
    float qk[BLOCK / 8][4] = {};
    if (scores) block_pairs<DELTA_THREADS_OF_BLOCK, true>(NULL, qk, NULL, memory, d, block, blockIdx.y);
    for (unsigned head = first; head < end; head++) {
        const size_t place = blockIdx.x * d.HV + head;
        const unsigned i = (head - first) % ROW_WARPS;
        const BlockGates &g = gates[i];
        __syncthreads(); // tiles, gates and scores of earlier heads are free
        if (i == 0 && head + warp < end) block_gates<true>(gates + warp, d, block, head + warp); // a head for each warp
        if (i == 0) __syncthreads();
        ssd_factors(factors, g);
        if (scores) ssd_scores(memory, qk, g, warp * 16);
        __syncthreads();
        if (to.gates) floats_store(to.gates + place, &g);
        floats_store(to.factors + place, factors);
        if (scores) triangle_store<TRANSPOSED>(scores + place * OPERANDS_OF_TRIANGLE, memory);
    }
}

// ---- the walks ------------------------------------------------------------------------------------------------------
constexpr size_t SSD_MOST_BYTES = WalkTiles<GPU_MOST_SSD_STATE, WARP_COLUMNS, true>::BYTES;
static_assert(2 * WALK_MOST_K == GPU_MOST_SSD_STATE && WalkTiles<WALK_MOST_K, WARP_COLUMNS, true>::BYTES <= 99 << 10);
static_assert(TERMS == 1 || SSD_MOST_BYTES <= 99 << 10); // fp32: cards with more

// OUT: computes out. Else saves the state before each block in w.states, unless NULL.
template <int KP, int COLUMNS, bool OUT>
__global__ void __launch_bounds__(WALK_THREADS<COLUMNS>, WALK_BLOCKS<COLUMNS>)
    ssd_walk_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    constexpr unsigned THREADS = WALK_THREADS<COLUMNS>;
    DYNAMIC_SHARED(floatX, memory);
    constexpr unsigned STEP = WalkTiles<KP, COLUMNS, true>::STEP;
    const WalkTiles<KP, COLUMNS, true> tiles = walk_tiles<KP, COLUMNS, true>(memory);
    const WalkPlace at = walk_place<true>(d, blocks, COLUMNS, false);
    const size_t place = state_place(d, w, at.span, at.head) + at.first;
    const unsigned columns = w.width - at.first;
    const float skip = OUT ? load(d.D[at.head]) : 0.0f;
    float whole = 1.0f;
    WalkState<KP> S = {};
    if (state_is_there(w, at.span, at.number)) walk_state_read<KP>(S, w.state_in + place, d.K, columns, w.width);
    walk_state_store<KP, COLUMNS>(S, tiles.S);
    const auto rows_of = [&](unsigned b) { return (unsigned)(at.span.end - at.span.begin) - b * BLOCK; };
    const auto x_of = [&](unsigned b) { return d.x + (at.span.row + (size_t)b * BLOCK) * d.channels; };
    const auto index_of = [&](unsigned b) { return at.index + b * (unsigned)d.HV; };
    const auto fetch_rows = [&](unsigned b) {
        if (OUT) rows_fetch<KP, THREADS>(tiles.queries, x_of(b) + at.query, d.channels, rows_of(b), d.K, d.packed);
        rows_fetch<COLUMNS, THREADS>(tiles.rows, x_of(b) + at.value, d.channels, rows_of(b), columns, p.packed_rows);
        factors_fetch<STEP>(tiles.factors, p.factors + index_of(b));
        fetch_commit();
    };
    fetch_rows(0);
    for (unsigned b = 0; b < at.count; b++) {
        TriangleRow scores;
        TokenFactors factors[2];
        WalkRows out = {};
        if (OUT) triangle_load<false>(scores, p.scores, index_of(b));
        fetch_wait<0>();
        __syncthreads(); // rows have arrived, S is stored, keys are free
        rows_fetch<KP, THREADS>(tiles.keys, x_of(b) + at.key, d.channels, rows_of(b), d.K, d.packed);
        fetch_commit();
        if (!OUT && w.states)
            walk_save<KP, COLUMNS>(w.states + index_of(b) * TERMS * d.K * w.width + at.first, tiles.S, (unsigned)d.K,
                                   (unsigned)d.K, columns, w.width);
        factors_read<STEP>(factors, tiles.factors);
        const float keep = tiles.factors[BLOCK * STEP].beta; // BlockFactors.keep
        if (OUT) walk_read<KP, COLUMNS>(out, tiles.queries, NULL, NULL, tiles.S);
        for_tokens<COLUMNS>(out, factors, [&](unsigned, unsigned to, const TokenFactors &f, float &a, float &b) {
            const Two two = *(const Two *)(tiles.rows + to);
            const float v[2] = {load(two.x[0]), load(two.x[1])};
            split_store_two(tiles.added, TOKENS_TILE<COLUMNS>, to, f.add * v[0], f.add * v[1]);
            a = a * f.read_q + skip * v[0], b = b * f.read_q + skip * v[1];
        });
        if (OUT) triangle_product<false, COLUMNS, true>(out, scores, tiles.rows);
        fetch_wait<0>();
        __syncthreads(); // keys have arrived, what is added is stored; queries and rows are free
        if (b + 1 < at.count) fetch_rows(b + 1);
        if (OUT)
            walk_out(w.out + ((at.span.row + (size_t)b * BLOCK) * d.HV + at.head) * d.V + at.first, out, rows_of(b),
                     columns, (unsigned)(d.HV * d.V), p.packed_rows);
        for_walk_state<KP>(S, [&](unsigned, unsigned, float &a, float &b) { a *= keep, b *= keep; });
        walk_state_add<KP, COLUMNS>(S, tiles.keys, tiles.added);
        walk_state_store<KP, COLUMNS>(S, tiles.S);
        whole *= keep;
    }
    if (w.transfer && !blockIdx.x && !threadIdx.x) w.transfer[at.head] *= whole;
    if (w.state_out && at.number >= w.first_out) walk_state_write<KP>(w.state_out + place, S, d.K, columns, w.width);
}

// INPUTS: computes dv in w.out = dx, and saves the gradient of the state after each block in w.states.
template <int KP, int COLUMNS, bool INPUTS>
__global__ void __launch_bounds__(WALK_THREADS<COLUMNS>, WALK_BLOCKS<COLUMNS>)
    ssd_walk_back_kernel(DeltaWalk w, DeltaPairs p, DeltaCall d, SpanBlocks blocks) {
    constexpr unsigned THREADS = WALK_THREADS<COLUMNS>;
    DYNAMIC_SHARED(floatX, memory);
    constexpr unsigned STEP = WalkTiles<KP, COLUMNS, true>::STEP;
    const WalkTiles<KP, COLUMNS, true> tiles = walk_tiles<KP, COLUMNS, true>(memory);
    const WalkPlace at = walk_place<true>(d, blocks, COLUMNS, true);
    const auto place = [&] { return at.head * d.K * w.width + at.first; }; // computed twice, not kept
    const unsigned columns = w.width - at.first;
    const float skip = INPUTS ? load(d.D[at.head]) : 0.0f;
    WalkState<KP> dS = {};
    if (at.number >= w.first_in && at.number < w.last_in)
        walk_state_read<KP>(dS, w.state_in + place(), d.K, columns, w.width);
    walk_state_store<KP, COLUMNS>(dS, tiles.S);
    const size_t tokens = at.span.end - at.span.begin;
    // block b counts from the end
    const auto row_of = [&](unsigned b) { return at.span.row + (size_t)(at.count - 1 - b) * BLOCK; };
    const auto rows_of = [&](unsigned b) { return (unsigned)(at.span.row + tokens - row_of(b)); };
    const auto index_of = [&](unsigned b) { return at.index - b * (unsigned)d.HV; };
    const auto fetch_rows = [&](unsigned b) {
        if (INPUTS)
            rows_fetch<KP, THREADS>(tiles.keys, d.x + row_of(b) * d.channels + at.key, d.channels, rows_of(b), d.K,
                                    d.packed);
        rows_fetch<COLUMNS, THREADS>(tiles.rows, p.dout + (row_of(b) * d.HV + at.head) * d.V + at.first, d.HV * d.V,
                                     rows_of(b), columns, p.packed_rows);
        factors_fetch<STEP>(tiles.factors, p.factors + index_of(b));
        fetch_commit();
    };
    fetch_rows(0);
    for (unsigned b = 0; b < at.count; b++) {
        TriangleRow scores;
        TokenFactors factors[2];
        WalkRows dv = {};
        if (INPUTS) triangle_load<true>(scores, p.scores, index_of(b));
        fetch_wait<0>();
        __syncthreads(); // dout has arrived, dS is stored, queries are free
        rows_fetch<KP, THREADS>(tiles.queries, d.x + row_of(b) * d.channels + at.query, d.channels, rows_of(b), d.K,
                                d.packed);
        fetch_commit();
        if (INPUTS)
            walk_save<KP, COLUMNS>(w.states + index_of(b) * TERMS * d.K * w.width + at.first, tiles.S, (unsigned)d.K,
                                   (unsigned)d.K, columns, w.width);
        factors_read<STEP>(factors, tiles.factors);
        const float keep = tiles.factors[BLOCK * STEP].beta; // BlockFactors.keep
        if (INPUTS) walk_read<KP, COLUMNS>(dv, tiles.keys, NULL, NULL, tiles.S);
        for_tokens<COLUMNS>(dv, factors, [&](unsigned, unsigned to, const TokenFactors &f, float &a, float &b) {
            const Two two = *(const Two *)(tiles.rows + to);
            const float dout[2] = {load(two.x[0]), load(two.x[1])};
            split_store_two(tiles.added, TOKENS_TILE<COLUMNS>, to, f.read_q * dout[0], f.read_q * dout[1]);
            a = a * f.add + skip * dout[0], b = b * f.add + skip * dout[1];
        });
        if (INPUTS) triangle_product<true, COLUMNS, true>(dv, scores, tiles.rows);
        fetch_wait<0>();
        __syncthreads(); // queries have arrived, what is added is stored; keys and dout are free
        if (b + 1 < at.count) fetch_rows(b + 1);
        if (INPUTS)
            walk_out(w.out + row_of(b) * d.channels + at.value, dv, rows_of(b), columns, (unsigned)d.channels,
                     p.packed_rows && d.packed);
        for_walk_state<KP>(dS, [&](unsigned, unsigned, float &a, float &b) { a *= keep, b *= keep; });
        walk_state_add<KP, COLUMNS>(dS, tiles.queries, tiles.added);
        walk_state_store<KP, COLUMNS>(dS, tiles.S);
    }
    if (!w.state_out || at.number) return;
    if (at.span.begin == at.span.document) // a document's first state is zero, so its gradient is not needed
        for_walk_state<KP>(dS, [](unsigned, unsigned, float &a, float &b) { a = b = 0.0f; });
    walk_state_write<KP>(w.state_out + place(), dS, d.K, columns, w.width);
}

// w.out: wanted are out, or back dv
static void ssd_tiled_walk(const DeltaWalk &w, const DeltaPairs &p, const DeltaCall &d, const SpanBlocks &blocks,
                           bool back) {
    with_walk<true>(w, d, blocks, [&](auto KP, auto COLUMNS, dim3 grid) {
        const auto run = [&](auto OUT) {
            constexpr size_t BYTES = WalkTiles<KP, COLUMNS, true>::BYTES;
            if (back)
                LAUNCH((ssd_walk_back_kernel<KP, COLUMNS, OUT>), grid, WALK_THREADS<COLUMNS>, BYTES)(w, p, d, blocks);
            else
                LAUNCH((ssd_walk_kernel<KP, COLUMNS, OUT>), grid, WALK_THREADS<COLUMNS>, BYTES)(w, p, d, blocks);
        };
        if (w.out)
            run(std::true_type());
        else
            run(std::false_type());
    });
}

#endif
