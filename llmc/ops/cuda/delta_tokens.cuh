/*
The gated delta rule of op set "cuda" token by token: for spans of a few tokens (generation), bound by reading and
writing the state, and for heads that the tiled kernels do not take. A block has 32 columns of a head's state in
registers, a thread every DELTA_PARTS-th of its rows. One sum over the rows is enough for each token, as

    out = S'^T q = decay S^T q + (k . q) u,  u = beta (v - decay S^T k),  S' = decay S + k u^T

Backward, last to first, with dS the gradient of the state after a token: dS += q dout^T, du = dS^T k, dS = decay (dS -
beta k du^T). u and du of all tokens are N and dR of delta_gradient.cuh.
*/
#ifndef LLMC_CUDA_DELTA_TOKENS_CUH
#define LLMC_CUDA_DELTA_TOKENS_CUH
#include "delta_blocks.cuh"

constexpr unsigned DELTA_COLUMNS = LANES, DELTA_PARTS = 8, DELTA_TOKEN_THREADS = DELTA_COLUMNS * DELTA_PARTS;
constexpr size_t DELTA_MOST_K = DELTA_TOKEN_THREADS; // a thread loads one element of q and k

// A walk over the blocks of spans that carries a state. NULL: not wanted. Blocks are numbered within the launch
struct DeltaWalk {
    const float *state_in;      // states of slots, for spans that continue a document
    float *state_out;           // states of slots
    floatX *states;             // [blocks, HV, TERMS, K, width]: state before each block; backward: gradient of the
                                // state after it
    floatX *added;              // [blocks, HV, TERMS, BLOCK, V]: N; backward: dR
    floatX *out;                // [n, HV, V]
    const floatX *dout;         // [n, HV, V]
    unsigned first_in, last_in; // spans that read state_in; forward: only if they continue a document
    unsigned first_out;         // spans from this span on write state_out; backward: only the first span does
    unsigned width;             // columns of the state: V, or K for a transfer
    bool values;
    float *transfer; // Mamba-2: [HV], multiplied by the decays of the tokens; NULL: not wanted
};

// Returns the offset of a head's state.
__device__ inline size_t state_place(const DeltaCall &d, const DeltaWalk &w, const Span &span, size_t head) {
    const size_t slot = d.slot_tokens ? span.document / d.slot_tokens : 0;
    return (slot * d.HV + head) * d.K * w.width;
}
__device__ inline bool state_is_there(const DeltaWalk &w, const Span &span, unsigned number) {
    return number >= w.first_in && number < w.last_in && span.begin > span.document;
}

// q and k of a token in shared memory, and partial sums of their products. Two of these structs are used in turn.
struct DeltaToken {
    float q[DELTA_MOST_K], k[DELTA_MOST_K], parts[DELTA_PARTS][3];
};
struct DeltaProducts {
    float query, key, both; // 1 / length of q and of k; k . q after both divisions
};

// SSD: nothing is divided by a length
template <bool SSD = false>
__device__ inline DeltaProducts token_load(DeltaToken *token, const DeltaCall &d, size_t row, size_t key_head) {
    const unsigned i = threadIdx.y * LANES + threadIdx.x;
    float sums[3] = {};
    if (i < d.K) {
        const float q = load(queries_of<SSD>(d, row, key_head)[i]), k = load(keys_of<SSD>(d, row, key_head)[i]);
        token->q[i] = q, token->k[i] = k;
        sums[0] = q * q, sums[1] = k * k, sums[2] = q * k;
    }
    for (unsigned s = 0; s < 3; s++) {
        sums[s] = warp_sum(sums[s]);
        if (threadIdx.x == 0) token->parts[threadIdx.y][s] = sums[s];
    }
    __syncthreads();
    for (unsigned s = 0; s < 3; s++) {
        sums[s] = 0.0f;
        for (unsigned part = 0; part < DELTA_PARTS; part++) sums[s] += token->parts[part][s];
    }
    if (SSD) return DeltaProducts{1.0f, 1.0f, sums[2]};
    DeltaProducts p = {1.0f / sqrtf((sums[0] + DELTA_EPS) * (float)d.K), 1.0f / sqrtf(sums[1] + DELTA_EPS), 0.0f};
    p.both = sums[2] * p.query * p.key;
    return p;
}

// Sums a column over the parts of a block. sums[DELTA_PARTS][LANES] must not be the previous token's array
__device__ inline float column_total(const float *sums) {
    float sum = 0.0f;
    for (unsigned part = 0; part < DELTA_PARTS; part++) sum += sums[part * LANES + threadIdx.x];
    return sum;
}

// SSD: Mamba-2's rule, with u = step v and D v in out
template <unsigned ROWS, bool SSD>
__global__ void __launch_bounds__(DELTA_TOKEN_THREADS)
    delta_tokens_kernel(DeltaWalk w, DeltaCall d, SpanBlocks blocks) {
    SHARED(DeltaToken, tokens, 2);
    SHARED(float, sums, 2 * 2 * DELTA_TOKEN_THREADS);
    const unsigned number = blockIdx.z, self = threadIdx.y * LANES + threadIdx.x;
    const Span span = span_at(blocks, number);
    const size_t head = blockIdx.y, key_head = head / (d.HV / d.HK), n = span.end - span.begin;
    const size_t column = (size_t)blockIdx.x * DELTA_COLUMNS + threadIdx.x, place = state_place(d, w, span, head);
    const bool inside = column < w.width, goes_on = state_is_there(w, span, number);
    float S[ROWS] = {}, whole = 1.0f;
    // calls f(row of the state, its element) for this thread's rows
    const auto for_state = [&](auto f) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            const size_t k = threadIdx.y + i * DELTA_PARTS;
            if (k < d.K && inside) f(k, S[i]);
        }
    };
    if (goes_on) for_state([&](size_t k, float &s) { s = w.state_in[place + k * w.width + column]; });
    for (size_t t = 0; t < n; t++) {
        const size_t row = span.row + t, block = blocks.first[number] + t / BLOCK;
        if (w.states && t % BLOCK == 0)
            for_state([&](size_t k, float s) {
                split_store(w.states + (block * d.HV + head) * TERMS * d.K * w.width, d.K * w.width,
                            k * w.width + column, s);
            });
        DeltaToken *const token = tokens + t % 2;
        float *const with_k = sums + t % 2 * 2 * DELTA_TOKEN_THREADS, *const with_q = with_k + DELTA_TOKEN_THREADS;
        const DeltaProducts p = token_load<SSD>(token, d, row, key_head);
        const Gate gate = gate_of<SSD>(d, row, head);
        const float decay = natural_exp(gate.log_decay);
        float along_k = 0.0f, along_q = 0.0f;
        whole *= decay;
        for_state([&](size_t k, float &s) {
            s *= decay;
            if (!SSD) along_k += s * token->k[k];
            along_q += s * token->q[k];
        });
        with_k[self] = along_k, with_q[self] = along_q;
        __syncthreads();
        const float v = w.values && inside ? load(values_of<SSD>(d, row, head)[column]) : 0.0f;
        const float u = gate.beta * (SSD ? v : v - p.key * column_total(with_k));
        for_state([&](size_t k, float &s) { s += p.key * token->k[k] * u; });
        if (threadIdx.y || !inside) continue;
        if (w.added)
            split_store(w.added + (block * d.HV + head) * TERMS * BLOCK * d.V, BLOCK * d.V, t % BLOCK * d.V + column,
                        u);
        if (!w.out) continue;
        const float skipped = SSD ? load(d.D[head]) * v : 0.0f;
        w.out[(row * d.HV + head) * d.V + column] = store(p.query * column_total(with_q) + p.both * u + skipped);
    }
    if (SSD && w.transfer && !self && !blockIdx.x) w.transfer[head] *= whole;
    if (w.state_out && number >= w.first_out)
        for_state([&](size_t k, float s) { w.state_out[place + k * w.width + column] = s; });
}

template <unsigned ROWS>
__global__ void __launch_bounds__(DELTA_TOKEN_THREADS)
    delta_tokens_back_kernel(DeltaWalk w, DeltaCall d, SpanBlocks blocks) {
    SHARED(DeltaToken, tokens, 2);
    SHARED(float, sums, 2 * DELTA_TOKEN_THREADS);
    const unsigned number = blockIdx.z, self = threadIdx.y * LANES + threadIdx.x;
    const Span span = blocks.span[number];
    const size_t head = blockIdx.y, key_head = head / (d.HV / d.HK), n = span.end - span.begin;
    const size_t column = (size_t)blockIdx.x * DELTA_COLUMNS + threadIdx.x, place = head * d.K * w.width;
    const bool inside = column < w.width;
    float dS[ROWS] = {};
    const auto for_state = [&](auto f) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            const size_t k = threadIdx.y + i * DELTA_PARTS;
            if (k < d.K && inside) f(k, dS[i]);
        }
    };
    if (number >= w.first_in && number < w.last_in)
        for_state([&](size_t k, float &s) { s = w.state_in[place + k * w.width + column]; });
    for (size_t t = n; t-- > 0;) {
        const size_t row = span.row + t, block = blocks.first[number] + t / BLOCK;
        if (w.states && (t + 1 == n || t % BLOCK == BLOCK - 1))
            for_state([&](size_t k, float s) {
                split_store(w.states + (block * d.HV + head) * TERMS * d.K * w.width, d.K * w.width,
                            k * w.width + column, s);
            });
        DeltaToken *const token = tokens + t % 2;
        float *const with_k = sums + t % 2 * DELTA_TOKEN_THREADS;
        const DeltaProducts p = token_load(token, d, row, key_head);
        const Gate gate = gate_of(d, row, head);
        const float decay = natural_exp(gate.log_decay);
        const float o = inside ? p.query * load(w.dout[(row * d.HV + head) * d.V + column]) : 0.0f;
        float along_k = 0.0f;
        for_state([&](size_t k, float &s) {
            s += token->q[k] * o;
            along_k += s * token->k[k];
        });
        with_k[self] = along_k;
        __syncthreads();
        const float du = p.key * column_total(with_k), taken = gate.beta * p.key * du;
        for_state([&](size_t k, float &s) { s = decay * (s - token->k[k] * taken); });
        if (w.added && threadIdx.y == 0 && inside)
            split_store(w.added + (block * d.HV + head) * TERMS * BLOCK * d.V, BLOCK * d.V, t % BLOCK * d.V + column,
                        du);
    }
    if (w.state_out && number == 0)
        for_state([&](size_t k, float s) {
            w.state_out[place + k * w.width + column] = span.begin > span.document ? s : 0.0f;
        });
}

// Calls launch(ROWS) with a thread's number of rows as a constant.
template <typename F> static void with_delta_rows(size_t K, F launch) {
    const size_t rows = blocks_for(K, DELTA_PARTS);
    if (K > DELTA_MOST_K)
        die("op set cuda: linear attention has keys of %zu elements, but at most %zu are possible", K, DELTA_MOST_K);
    if (rows <= 4)
        launch(Width<4>());
    else if (rows <= 16)
        launch(Width<16>());
    else
        launch(Width<32>());
}

static dim3 delta_tokens_grid(const DeltaWalk &w, const DeltaCall &d, const SpanBlocks &blocks) {
    return dim3((unsigned)blocks_for(w.width, DELTA_COLUMNS), (unsigned)d.HV, blocks.count);
}

template <bool SSD = false> static void delta_tokens(const DeltaWalk &w, const DeltaCall &d, const SpanBlocks &blocks) {
    with_delta_rows(d.K, [&](auto ROWS) {
        LAUNCH((delta_tokens_kernel<ROWS, SSD>), delta_tokens_grid(w, d, blocks), dim3(LANES, DELTA_PARTS), 0)
        (w, d, blocks);
    });
}

static void delta_tokens_back(const DeltaWalk &w, const DeltaCall &d, const SpanBlocks &blocks) {
    with_delta_rows(d.K, [&](auto ROWS) {
        LAUNCH((delta_tokens_back_kernel<ROWS>), delta_tokens_grid(w, d, blocks), dim3(LANES, DELTA_PARTS), 0)
        (w, d, blocks);
    });
}

#endif
