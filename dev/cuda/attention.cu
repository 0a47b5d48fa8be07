/*
Playground of llmc/cuda/attention.cuh, forward, at head_dim 128. The real kernel has four warps of 16 queries, and waits for a tile of
keys and values before it computes with it. The candidates fetch the next tile by cp.async while they compute with this one; take more
queries or other tiles of keys a block; mask only the tiles that reach the diagonal; and skip those beyond it. cuDNN is not among
them: how far these are from it has to be seen against its own figures.
*/
#include "playground.cuh"
#include "llmc/cuda/attention.cuh"
#ifndef CUDA_ON_CPU
#include "product.cuh"
#endif

constexpr int HEAD = 128;

// ---- cp.async: 16 bytes from global to shared memory behind the kernel's back; zeros where they are not valid ------------------------
#ifdef CUDA_ON_CPU // at once: the CPU does not show a missing wait
static void fetch(floatX *to, const floatX *from, bool valid) {
    Pack<floatX, full_pack<floatX>> pack;
    for (floatX &x : pack.x) x = store(0.0f);
    pack_write(to, valid ? pack_read<full_pack<floatX>>(from) : pack);
}
static void fetch_commit(void) {}
template <int LEFT> static void fetch_wait(void) {}
#else
__device__ inline void fetch(floatX *to, const floatX *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void fetch_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last LEFT groups that this thread committed have arrived
template <int LEFT> __device__ inline void fetch_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#endif

template <int HD>
__device__ inline void tile_fetch(floatX *tile, const floatX *x, size_t heads, size_t head, size_t begin, size_t end,
                                  unsigned rows) {
    constexpr unsigned W = full_pack<floatX>, PACKS = HD / W;
    for (unsigned i = threadIdx.x; i < rows * PACKS; i += blockDim.x) {
        const size_t row = begin + i / PACKS < end ? begin + i / PACKS : begin; // an address that exists
        fetch(tile + i / PACKS * tile_stride<HD> + i % PACKS * W, x + (row * heads + head) * HD + i % PACKS * W,
              begin + i / PACKS < end);
    }
}

// ---- the candidate: WARPS * 16 queries a block, TK keys a tile, two tiles of keys and values ----------------------------------------
template <int HD, int WARPS, int TK>
__global__ void __launch_bounds__(WARPS *LANES)
    attention_fetched_kernel(floatX *out, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             SpanBlocks blocks, AttentionShape shape) {
    constexpr unsigned TQ = WARPS * 16, KEY_TILE = TK * tile_stride<HD>;
    DYNAMIC_SHARED(floatX, tiles);
    floatX *tq = tiles, *stages = tq + TQ * tile_stride<HD>; // then keys, values; keys, values
    const SpanBlock block = span_block(blocks, TQ, false);
    const size_t head = blockIdx.y, key_head = head / (shape.NH / shape.NKV),
                 end = block.begin + TQ < block.span.end ? block.begin + TQ : block.span.end;
    const unsigned lane = threadIdx.x % LANES, warp_row = threadIdx.x / LANES * 16;
    const size_t warp_first = block.begin + warp_row, row = warp_first + lane / 4; // and row + 8
    const float scale = shape.scale * LOG2_E;
    float o[HD / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    const auto fetch_keys = [&](size_t key, unsigned stage) {
        tile_fetch<HD>(stages + stage * 2 * KEY_TILE, k, shape.NKV, key_head, key, end, TK);
        tile_fetch<HD>(stages + (stage * 2 + 1) * KEY_TILE, v, shape.NKV, key_head, key, end, TK);
    };
    tile_fetch<HD>(tq, q, shape.NH, head, block.begin - blocks.origin, end - blocks.origin, TQ);
    fetch_keys(block.span.document, 0);
    fetch_commit();
    unsigned stage = 0;
    for (size_t key = block.span.document; key < end; key += TK, stage ^= 1) {
        const floatX *tk = stages + stage * 2 * KEY_TILE, *tv = tk + KEY_TILE;
        if (key + TK < end) fetch_keys(key + TK, stage ^ 1);
        fetch_commit(); // of nothing, at the end: the count of groups stays right
        fetch_wait<1>();
        __syncthreads();
        if (key <= warp_first + 15) { // otherwise no query of this warp sees a key of the tile
            float s[TK / 8][4] = {};
            product_of_rows<HD, TK>(s, tq, warp_row, tk);
            for (int i = 0; i < 2; i++) {
                float most = largest[i];
                if (key + TK > warp_first + 1)
                    for (int j = 0; j < TK / 8; j++)
                        for (int e = 2 * i; e < 2 * i + 2; e++)
                            if (key + j * 8 + lane % 4 * 2 + e % 2 > row + 8 * i) s[j][e] = -INFINITY;
                for (int j = 0; j < TK / 8; j++) most = fmaxf(most, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
                most = quad_max(most);
                const float shrink = exp2f((largest[i] - most) * scale);
                largest[i] = most;
                sum[i] *= shrink;
                for (int j = 0; j < TK / 8; j++)
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        s[j][e] = exp2f((s[j][e] - most) * scale);
                        sum[i] += s[j][e];
                    }
                for (int d = 0; d < HD / 8; d++) o[d][2 * i] *= shrink, o[d][2 * i + 1] *= shrink;
            }
            product_with_rows<HD, TK>(o, s, tv);
        }
        __syncthreads(); // everybody is done with this stage: the next but one tile may come
    }
    for (int i = 0; i < 2; i++) {
        const size_t place = (row + 8 * i - blocks.origin) * shape.NH + head;
        const float total = quad_sum(sum[i]);
        if (row + 8 * i >= end) continue;
        if (lane % 4 == 0) lse[place] = largest[i] * shape.scale + logf(total);
        for (int d = 0; d < HD / 8; d++)
            for (int e = 0; e < 2; e++) out[place * HD + d * 8 + lane % 4 * 2 + e] = store(o[d][2 * i + e] / total);
    }
}

// ---- cases --------------------------------------------------------------------------------------------------------------------
struct Attention {
    struct Shape {
        size_t cut, begin, end, NH, NKV; // queries [begin, end); a second document begins at `cut` unless that is 0
    } shape;
    double tolerance =
        sizeof(floatX) == 2 ? 1.0 / 150 : 1e-5; // the weights are rounded before they are multiplied, too
    size_t n;
    double scale = 1 / sqrt((double)HEAD);
    Span spans[2];
    size_t span_count = 0;
    Tensor<floatX> out, q, k, v;
    Tensor<float> lse;
    Attention(Shape s)
        : shape(s), n(s.end - s.begin), out(n * s.NH * HEAD, constant(0)), q(n * s.NH * HEAD, random_values(1, 2)),
          k(s.end * s.NKV * HEAD, random_values(2)), v(s.end * s.NKV * HEAD, random_values(3)),
          lse(n * s.NH, constant(0)) {
        if (s.cut) spans[span_count++] = Span{0, s.begin, s.cut};
        spans[span_count++] = Span{s.cut, std::max(s.begin, s.cut), s.end};
    }
    size_t document(size_t t) const { return t < shape.cut ? 0 : shape.cut; }
    Spans all() const { return Spans{spans, span_count, 0}; }
    double work() const {
        double pairs = 0;
        for (size_t t = shape.begin; t < shape.end; t++) pairs += (double)(t + 1 - document(t));
        return 4 * (double)(shape.NH * HEAD) * pairs;
    }
    void reset() { zero(out.data, out.count * sizeof(floatX)), zero(lse.data, lse.count * sizeof(float)); }
    double error() const {
        std::vector<double> expected(out.count), logs(lse.count), weight(shape.end);
        for (size_t r = 0; r < n * shape.NH; r++) {
            const size_t t = shape.begin + r / shape.NH, group = shape.NH / shape.NKV;
            const size_t key_head = r % shape.NH / group, first = document(t);
            double top = -INFINITY, sum = 0;
            for (size_t u = first; u <= t; u++) {
                weight[u] = 0;
                for (size_t d = 0; d < HEAD; d++)
                    weight[u] += scale * q.at(r * HEAD + d) * k.at((u * shape.NKV + key_head) * HEAD + d);
                top = std::max(top, weight[u]);
            }
            for (size_t u = first; u <= t; u++) sum += exp(weight[u] - top);
            logs[r] = top + log(sum);
            for (size_t u = first; u <= t; u++)
                for (size_t d = 0; d < HEAD; d++)
                    expected[r * HEAD + d] += exp(weight[u] - logs[r]) * v.at((u * shape.NKV + key_head) * HEAD + d);
        }
        return std::max(out.error([&](size_t i) { return expected[i]; }), lse.error([&](size_t i) { return logs[i]; }));
    }
};

static void real(Attention &c) {
    attention_forward(c.out.stored(), c.lse.summed(), c.q.stored(), c.k.stored(), c.v.stored(), c.all(), c.shape.NH,
                      c.shape.NKV, HEAD, c.scale, NULL);
}

template <int WARPS, int TK>
constexpr size_t fetched_bytes = (WARPS * 16 + 4 * TK) * tile_stride<HEAD> * sizeof(floatX);

template <int WARPS, int TK> static void fetched(Attention &c) {
    SpanBlocks blocks;
    span_blocks(&blocks, c.all(), 0, WARPS * 16, false);
    LAUNCH((attention_fetched_kernel<HEAD, WARPS, TK>), dim3(blocks.first[blocks.count], (unsigned)c.shape.NH),
           WARPS * LANES, (fetched_bytes<WARPS, TK>))
    (c.out.data, c.lse.data, c.q.data, c.k.data, c.v.data, blocks,
     attention_shape(c.shape.NH, c.shape.NKV, HEAD, c.scale));
}

template <int WARPS, int TK> static bool fetched_fits(const Attention &) {
#ifdef CUDA_ON_CPU
    return true;
#else
    int most;
    CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
               "asking for the shared memory of a block");
    return fetched_bytes<WARPS, TK> <= (size_t)most;
#endif
}

int main(int argc, char **argv) {
    const bool bf16 = sizeof(floatX) == 2; // without matrix instructions a shorter sequence takes long enough
    playground_begin(argc, argv);
#ifndef CUDA_ON_CPU
    playground.product_rate = best_square_product();
    printf("best square product: %.1f TFLOP/s\n", playground.product_rate * 1e-12);
#endif
    compare<Attention>(bf16 ? "attention_forward, the last 4096 queries of 32768, 32/8 heads of 128"
                            : "attention_forward, the last 1024 queries of 4096, 32/8 heads of 128",
                       FLOPS, {190, 133, 331, 4, 2},
                       bf16 ? Attention::Shape{0, 28672, 32768, 32, 8} : Attention::Shape{0, 3072, 4096, 32, 8},
                       {{"llmc/cuda/attention.cuh", real},
                        {"cp.async, 64 queries, tiles of 64 keys", fetched<4, 64>, fetched_fits<4, 64>},
                        {"cp.async, 64 queries, tiles of 32 keys", fetched<4, 32>, fetched_fits<4, 32>},
                        {"cp.async, 128 queries, tiles of 64 keys", fetched<8, 64>, fetched_fits<8, 64>},
                        {"cp.async, 128 queries, tiles of 32 keys", fetched<8, 32>, fetched_fits<8, 32>}});
    return playground_end();
}
