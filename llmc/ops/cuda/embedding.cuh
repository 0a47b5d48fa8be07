/*
Token and learned position embeddings of op set "cuda": forward gathers rows of a table, backward scatters to them.

Backward sorts the stream by table row first. Equal rows then form a run. One block sums a run in stream order; if it is
longer than FREQUENT, several warps sum each strip of columns. There are no atomics. The sort is a stable radix sort,
RADIX_BITS at a time: tiles count their digits, one block turns the counts into places, tiles move their tokens there.
It moves a few integers per token, little compared with the rows of dx.
*/
#ifndef LLMC_CUDA_EMBEDDING_CUH
#define LLMC_CUDA_EMBEDDING_CUH
#include "platform.cuh"

// ---- forward: bytes moved per element of out: 2 s, 3 s with positions -----------------------------------------------
template <int W>
__global__ void embedding_forward_kernel(floatX *out, const int32_t *tokens, const int32_t *position, const floatX *wte,
                                         const floatX *wpe, size_t n, size_t C, float scale) {
    FOR_EACH_ROW(t, c, W, n, C) {
        Pack<floatX, W> row = pack_read<W>(wte + (size_t)tokens[t] * C + c);
        if (wpe) {
            const Pack<floatX, W> place = pack_read<W>(wpe + (size_t)position[t] * C + c);
            for (int j = 0; j < W; j++) row.x[j] = store(scale * load(row.x[j]) + load(place.x[j]));
        } else if (scale != 1.0f) {
            for (int j = 0; j < W; j++) row.x[j] = store(scale * load(row.x[j]));
        }
        pack_write(out + t * C + c, row);
    }
}

static void cuda_embedding_forward(Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte,
                                   const Stored *wpe, size_t n, size_t C, double scale) {
    with_width<floatX>(C % full_pack<floatX> == 0 && all_aligned(out, wte, wpe), [&](auto W) {
        LAUNCH((embedding_forward_kernel<W>), rows_grid(n, C / W), rows_threads(C / W), 0)
        ((floatX *)out, tokens, position, (const floatX *)wte, (const floatX *)wpe, n, C, (float)scale);
    });
}

// ---- sorting tokens by table row ------------------------------------------------------------------------------------
constexpr unsigned RADIX_BITS = 8, DIGITS = 1u << RADIX_BITS, TILE = GPU_SORT_TILE, SCAN_THREADS = 1024;

// Loads the tile's digits into shared memory; DIGITS after the stream's end.
__device__ inline void tile_digits(uint16_t *digit, const int32_t *order, const int32_t *index, size_t N,
                                   unsigned shift) {
    for (unsigned i = threadIdx.x; i < TILE; i += blockDim.x) {
        const size_t place = (size_t)blockIdx.x * TILE + i;
        const size_t token = place < N && order ? (size_t)order[place] : place;
        digit[i] = place < N ? (uint16_t)(((uint32_t)index[token] >> shift) % DIGITS) : (uint16_t)DIGITS;
    }
    __syncthreads();
}

// Counts digits into counts[DIGITS][tiles], with one thread per digit.
__global__ void radix_count_kernel(int32_t *counts, const int32_t *order, const int32_t *index, size_t N,
                                   unsigned shift) {
    SHARED(uint16_t, digit, TILE);
    int32_t count = 0;
    tile_digits(digit, order, index, N, shift);
    for (unsigned i = 0; i < TILE; i++) count += digit[i] == threadIdx.x;
    counts[(size_t)threadIdx.x * gridDim.x + blockIdx.x] = count;
}

// Replaces counts[i] by the sum of the counts before i, in one block, one stretch per thread.
__global__ void scan_kernel(int32_t *counts, size_t length) {
    SHARED(int32_t, sums, SCAN_THREADS);
    const size_t stretch = (length + blockDim.x - 1) / blockDim.x;
    const size_t begin = threadIdx.x * stretch < length ? threadIdx.x * stretch : length;
    const size_t end = begin + stretch < length ? begin + stretch : length;
    int32_t sum = 0;
    for (size_t i = begin; i < end; i++) sum += counts[i];
    sums[threadIdx.x] = sum;
    sum = -sum;
    __syncthreads();
    for (unsigned step = 1; step < blockDim.x; step *= 2) { // sums[t]: sum of the 2 step threads up to t
        const int32_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    sum += sums[threadIdx.x];
    for (size_t i = begin; i < end; i++) {
        const int32_t own = counts[i];
        counts[i] = sum;
        sum += own;
    }
}

// Moves tokens to the places of their digits, with one thread per digit, so equal digits keep their order.
__global__ void radix_move_kernel(int32_t *out, const int32_t *counts, const int32_t *order, const int32_t *index,
                                  size_t N, unsigned shift) {
    SHARED(uint16_t, digit, TILE);
    int32_t place = counts[(size_t)threadIdx.x * gridDim.x + blockIdx.x];
    tile_digits(digit, order, index, N, shift);
    for (unsigned i = 0; i < TILE; i++) {
        const size_t from = (size_t)blockIdx.x * TILE + i;
        if (digit[i] == threadIdx.x) out[place++] = order ? order[from] : (int32_t)from;
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Sorts the stream by table row. scratch, as int32: two orders [N], counts [DIGITS, tiles]

static const int32_t *sort_by_row(int32_t *scratch, const int32_t *index, size_t N, size_t rows) {
    int32_t *orders[2] = {scratch, scratch + N}, *counts = scratch + 2 * N;
    const int32_t *order = NULL; // NULL: stream order
    const unsigned tiles = (unsigned)blocks_for(N, TILE);
    unsigned shift = 0, pass = 0;
    do {
        LAUNCH((radix_count_kernel), tiles, DIGITS, 0)(counts, order, index, N, shift);
        LAUNCH((scan_kernel), 1, SCAN_THREADS, 0)(counts, (size_t)DIGITS * tiles);
        LAUNCH((radix_move_kernel), tiles, DIGITS, 0)(orders[pass % 2], counts, order, index, N, shift);
        order = orders[pass++ % 2];
        shift += RADIX_BITS;
    } while ((rows - 1) >> shift);
    return order;
}

constexpr unsigned FREQUENT = 256, FREQUENT_WARPS = 16;

// Adds the sum of a run to its table row, at the columns of thread x and of part blockIdx.y. Block x takes the run that
// begins at place x, if it has at most `frequent` (a power of two, or N) tokens. LONG: block x takes the longer run
// whose first multiple of `frequent` is x * frequent; warp y sums every blockDim.y-th batch. A batch is read at once
// and summed separately.
template <typename T, int W, bool LONG>
__global__ void embedding_backward_kernel(T *dw, const floatX *dx, const int32_t *order, const int32_t *index, size_t N,
                                          size_t C, float scale, size_t skip, size_t frequent) {
    constexpr int BATCH = 4;
    const size_t place = LONG ? blockIdx.x * frequent : blockIdx.x;
    const size_t c = ((size_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    const int32_t row = index[order[place]];
    const auto in_run = [&](size_t i) { return i < N && index[order[i]] == row; };
    size_t begin = place;
    if ((size_t)row == skip) return;
    if (LONG) {
        if (!in_run(place + frequent / 2) && !(place && in_run(place - frequent / 2))) return; // most blocks end here
        if (place && in_run(place - frequent)) return;
        for (size_t step = frequent / 2; step && place; step /= 2)
            if (in_run(begin - step)) begin -= step;
    } else if (place && in_run(place - 1)) {
        return;
    }
    if (in_run(begin + frequent) != LONG) return;
    float sum[W] = {};
    for (size_t i = begin + threadIdx.y * BATCH; c < C && i < N; i += blockDim.y * BATCH) {
        Pack<floatX, W> pack[BATCH];
        size_t token[BATCH];
        bool same[BATCH];
        for (int b = 0; b < BATCH; b++) token[b] = order[i + b < N ? i + b : i];
        for (int b = 0; b < BATCH; b++) same[b] = (i + b < N) & (index[token[b]] == row);
        if (!same[0]) break;
        for (int b = 0; b < BATCH; b++)
            if (same[b]) pack[b] = pack_read<W>(dx + token[b] * C + c);
        for (int j = 0; j < W; j++) {
            float group = 0.0f;
            for (int b = 0; b < BATCH; b++) group += same[b] ? load(pack[b].x[j]) : 0.0f;
            sum[j] += group;
        }
    }
    if (LONG) {
        SHARED(float, parts, FREQUENT_WARPS *LANES *W);
        for (int j = 0; j < W; j++) parts[(threadIdx.y * W + j) * LANES + threadIdx.x] = sum[j];
        __syncthreads();
        for (unsigned warp = 1; threadIdx.y == 0 && warp < blockDim.y; warp++)
            for (int j = 0; j < W; j++) sum[j] += parts[(warp * W + j) * LANES + threadIdx.x];
    }
    for (int j = 0; j < W && threadIdx.y == 0 && c < C; j++) {
        T *to = dw + (size_t)row * C + c + j;
        set_value(to, load(*to) + scale * sum[j]);
    }
}

// Adds the sums of all runs. frequent: the longest run that one block takes
template <typename T>
static void embedding_add(T *dw, const floatX *dx, const int32_t *order, const int32_t *index, size_t N, size_t C,
                          double scale, size_t skip, size_t frequent) {
    with_width<floatX>(C % full_pack<floatX> == 0 && all_aligned(dx), [&](auto W) {
        const unsigned packs = (unsigned)(C / W), threads = packs < 128 ? (packs + LANES - 1) / LANES * LANES : 128;
        LAUNCH((embedding_backward_kernel<T, W, false>), dim3((unsigned)N, (unsigned)blocks_for(packs, threads)),
               threads, 0)
        (dw, dx, order, index, N, C, (float)scale, skip, frequent);
        LAUNCH((embedding_backward_kernel<T, W, true>),
               dim3((unsigned)blocks_for(N, frequent), (unsigned)blocks_for(packs, LANES)), dim3(LANES, FREQUENT_WARPS),
               0)
        (dw, dx, order, index, N, C, (float)scale, skip, frequent);
    });
}

static void cuda_embedding_backward(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N,
                                    size_t rows, size_t C, double scale, size_t skip, Summed *scratch) {
    const int32_t *order = sort_by_row((int32_t *)scratch, index, N, rows);
    with_type(dw_type, "embedding_backward", [&]<typename T>(T *) {
        embedding_add((T *)dw, (const floatX *)dx, order, index, N, C, scale, skip, FREQUENT);
    });
}

// ---- scattered and gathered rows ------------------------------------------------------------------------------------
template <int W>
__global__ void scatter_rows_kernel(floatX *out, const floatX *in, const int32_t *row, size_t n, size_t width) {
    FOR_EACH_ROW(t, c, W, n, width)
    pack_write(out + (size_t)row[t] * width + c, pack_read<W>(in + t * width + c));
}

static void cuda_scatter_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(out, in), [&](auto W) {
        LAUNCH((scatter_rows_kernel<W>), rows_grid(n, width / W), rows_threads(width / W), 0)
        ((floatX *)out, (const floatX *)in, row, n, width);
    });
}

// `in` may be pinned host memory, which has the same address on the device.
template <int W>
__global__ void gather_rows_kernel(floatX *out, const floatX *in, const int32_t *row, size_t n, size_t width) {
    FOR_EACH_ROW(t, c, W, n, width)
    if (row[t]) pack_write(out + t * width + c, pack_read<W>(in + (size_t)row[t] * width + c));
}

static void cuda_gather_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
    with_width<floatX>(width % full_pack<floatX> == 0 && all_aligned(out, in), [&](auto W) {
        LAUNCH((gather_rows_kernel<W>), rows_grid(n, width / W), rows_threads(width / W), 0)
        ((floatX *)out, (const floatX *)in, row, n, width);
    });
}

#endif
