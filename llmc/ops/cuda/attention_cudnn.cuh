/*
Attention of op set "cuda" with cuDNN (cudnn_attention.h): long spans go to cuDNN, in pieces that it can do within a
fixed workspace and with few plans; the rest, and everything that cuDNN refuses, goes to our own kernels
(attention.cuh). Who does what depends on shapes and the machine alone, so results are the same every time.

Forward: a span of at least GRID queries is one call of its exact lengths. Backward: dq, dk and dv are sums over blocks
of keys once log-sum-exp is known, so a piece of 2^i GRID queries that begins on a multiple of GRID after its document
meets its earlier keys in full blocks of 2^j GRID, and itself in one causal square: a handful of plans for any length,
document or chunk. What lies off the grid is ours. cuDNN overwrites its results in bf16; they are staged and added in
fp32.
*/
#ifndef LLMC_CUDA_ATTENTION_CUDNN_CUH
#define LLMC_CUDA_ATTENTION_CUDNN_CUH
#include "attention.cuh"
#include "cudnn_attention.h"
#include "gradient.cuh"

#ifndef CUDNN_GRID // tests have smaller ones
#define CUDNN_GRID      512
#define CUDNN_BLOCK     4096                // most queries, and most keys, of a call in backward
#define CUDNN_WORKSPACE ((size_t)512 << 20) // bytes that such a call may need: fewer heads at a time where it is more
#endif
constexpr size_t CUDNN_FORWARD_WORKSPACE = 64 << 10; // bytes; cuDNN 9.19 asks for 256

// ---- staged results -------------------------------------------------------------------------------------------------
// out[columns][rows] = in[rows][columns]: log-sum-exp is [n][NH] with us, [NH][n] with cuDNN
__global__ void transpose_kernel(float *out, const float *in, size_t rows, size_t columns) {
    FOR_EACH_PACK(i, rows * columns) out[i % columns * rows + i / columns] = in[i];
}

static void transpose(float *out, const float *in, size_t rows, size_t columns) {
    LAUNCH((transpose_kernel), loop_grid(rows * columns), LOOP_THREADS, 0)(out, in, rows, columns);
}

// sums[rows][..] += staged[rows][width], rows of sums `stride` elements apart; packs of 8
__global__ void add_staged_kernel(float *sums, const floatX *staged, size_t rows, size_t width, size_t stride) {
    constexpr int W = full_pack<floatX>;
    const size_t packs = width / W;
    FOR_EACH_PACK(i, rows * packs) {
        const Pack<floatX, W> add = pack_read<W>(staged + i * W);
        float *const to = sums + i / packs * stride + i % packs * W;
        for (int j = 0; j < W; j += 4) {
            Pack<float, 4> sum = pack_read<4>(to + j);
            for (int k = 0; k < 4; k++) sum.x[k] += load(add.x[j + k]);
            pack_write(to + j, sum);
        }
    }
}

static void add_staged(float *sums, const floatX *staged, size_t rows, size_t width, size_t stride) {
    LAUNCH((add_staged_kernel), loop_grid(rows * width / full_pack<floatX>), LOOP_THREADS, 0)
    (sums, staged, rows, width, stride);
}

// ---- backward's blocks and their memory -----------------------------------------------------------------------------
// Most key/value heads of a call over `block` queries and keys; 0: not even one
static size_t cudnn_key_heads(size_t block, size_t NH, size_t NKV, size_t HD) {
    size_t heads = NKV;
    while (heads && (NKV % heads || cudnn_attention_workspace(block, block, heads * (NH / NKV), HD) > CUDNN_WORKSPACE))
        heads--;
    return heads;
}

// Largest block of a chunk of n queries, 0: none
static size_t cudnn_block(size_t n, size_t NH, size_t NKV, size_t HD) {
    size_t block = CUDNN_BLOCK;
    while (block >= CUDNN_GRID && (block > n || !cudnn_key_heads(block, NH, NKV, HD))) block /= 2;
    return block >= CUDNN_GRID ? block : 0;
}

// The largest 2^i GRID within `rows`, at most `block`
static size_t cudnn_piece(size_t rows, size_t block) {
    while (block > rows) block /= 2;
    return block;
}

struct CudnnStage {
    float *lse, *dq_sums; // [NH][block], [block][NH * HD]
    floatX *dq, *dk, *dv; // of one call
    void *workspace;
    size_t bytes; // of all of these
};

static size_t aligned_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

static CudnnStage cudnn_stage(char *memory, size_t block, size_t heads, size_t key_heads, size_t NH, size_t HD) {
    uintptr_t end = aligned_256((uintptr_t)memory);
    const auto take = [&](size_t bytes) {
        end += aligned_256(bytes);
        return (void *)(end - aligned_256(bytes));
    };
    CudnnStage stage;
    stage.lse = (float *)take(block * NH * 4);
    stage.dq_sums = (float *)take(block * NH * HD * 4);
    stage.dq = (floatX *)take(block * heads * HD * 2);
    stage.dk = (floatX *)take(block * key_heads * HD * 2);
    stage.dv = (floatX *)take(block * key_heads * HD * 2);
    stage.workspace = take(cudnn_attention_workspace(block, block, heads, HD));
    stage.bytes = end - (uintptr_t)memory + 256;
    return stage;
}

// Stage of the largest call of a chunk of n queries; smaller ones fit, whose heads may be more.
static size_t cudnn_stage_bytes(size_t n, size_t NH, size_t NKV, size_t HD) {
    size_t most = 0;
    for (size_t block = cudnn_block(n, NH, NKV, HD); block >= CUDNN_GRID; block /= 2) {
        const size_t key_heads = cudnn_key_heads(block, NH, NKV, HD);
        const size_t bytes = cudnn_stage(NULL, block, key_heads * (NH / NKV), key_heads, NH, HD).bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

// ---- spans that stay ours: any of the chunk's, in order -------------------------------------------------------------
template <typename Run> struct OwnSpans {
    Run run;              // of our kernels, on spans with gaps between their rows
    AttentionShape whole; // of all spans
    Span span[MOST_SPANS] = {};
    size_t count = 0;

    void flush() {
        AttentionShape shape = whole;
        shape.spans.span = span, shape.spans.count = count;
        if (count) run(&shape);
        count = 0;
    }
    // Queries [begin, end) of a span. Parts of one document need calls of their own: a key has one owner in a call.
    void add(Span from, size_t begin, size_t end) {
        const bool same = count && span[count - 1].document == from.document;
        if (begin >= end) return;
        if (same && span[count - 1].end == begin) {
            span[count - 1].end = end;
            return;
        }
        if (same || count == MOST_SPANS) flush();
        span[count++] = Span{from.document, begin, end, from.row + begin - from.begin};
    }
};
template <typename Run> OwnSpans(Run, AttentionShape) -> OwnSpans<Run>;

static bool cudnn_takes(size_t HD, bool aligned) { return sizeof(floatX) == 2 && HD % 8 == 0 && aligned; }

static bool cudnn_has(const CudnnAttention *shape, int backward, size_t workspace) {
    static bool told[2];
    if (cudnn_attention_has(shape, backward, workspace)) return true;
    if (!told[backward])
        note("attention %s of %zu queries and %zu keys by our own kernels: %s", backward ? "backward" : "forward",
             shape->queries, shape->keys, cudnn_attention_refusal());
    told[backward] = true;
    return false;
}

static AttentionChoice attention_choice;

static void cudnn_or_own_choose(AttentionChoice choice) { attention_choice = choice; }

// ---- the ops --------------------------------------------------------------------------------------------------------
static size_t cudnn_or_own_scratch(size_t n, size_t NH, size_t NKV, size_t HD) {
    const size_t own = cuda_attention_scratch(n, NH, NKV, HD), forward = n * NH * 4 + CUDNN_FORWARD_WORKSPACE + 512;
    if (!cudnn_takes(HD, true)) return own;
    size_t backward = own * 4 + cudnn_stage_bytes(n, NH, NKV, HD);
    return ((forward > backward ? forward : backward) + 3) / 4;
}

static void cudnn_or_own_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                 const AttentionShape *shape, Summed *scratch) {
    const size_t NH = shape->NH, NKV = shape->NKV, HD = shape->HD;
    const bool takes = !shape->partial && !shape->spans.window && cudnn_takes(HD, all_aligned(out, q, k, v));
    OwnSpans own = {[&](const AttentionShape *left) { cuda_attention_forward(out, lse, q, k, v, left, scratch); },
                    *shape};
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span span = shape->spans.span[i];
        const CudnnAttention call = {
            span.end - span.begin, span.end - span.document, NH, NKV, NH, NKV, HD, (float)shape->scale, 1};
        const size_t row = span.row * NH, key = span.document * NKV * HD;
        if (!takes || call.queries < CUDNN_GRID || !cudnn_has(&call, 0, CUDNN_FORWARD_WORKSPACE)) {
            own.add(span, span.begin, span.end);
            continue;
        }
        float *const staged = (float *)scratch;
        char *const workspace = (char *)(staged + call.queries * NH);
        cudnn_attention_forward(&call, (floatX *)out + row * HD, staged, (const floatX *)q + row * HD,
                                (const floatX *)k + key, (const floatX *)v + key,
                                (void *)aligned_256((uintptr_t)workspace));
        transpose((float *)lse + row, staged, NH, call.queries);
    }
    own.flush();
}

// Calls each(first key, keys) for the blocks of keys before a piece, then for the piece itself.
template <typename F> static void cudnn_key_blocks(size_t before, size_t queries, size_t block, F each) {
    for (size_t key = 0, keys; key < before; key += keys) each(key, keys = cudnn_piece(before - key, block));
    each(before, queries);
}

static void cudnn_or_own_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                  const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                  const AttentionShape *shape, Summed *scratch) {
    const size_t n = spans_rows(shape->spans), NH = shape->NH, NKV = shape->NKV, HD = shape->HD;
    const bool takes = !shape->partial && !shape->spans.window &&
                       cudnn_takes(HD, all_aligned(dq, dk, dv, dout, out, q, k, v)); // windows are ours
    const size_t block = takes ? cudnn_block(n, NH, NKV, HD) : 0;
    const size_t key_heads = block ? cudnn_key_heads(block, NH, NKV, HD) : 0, heads = key_heads * (NH / NKV);
    const CudnnStage stage = cudnn_stage((char *)((float *)scratch + cuda_attention_scratch(n, NH, NKV, HD)), block,
                                         heads, key_heads, NH, HD);
    OwnSpans own = {[&](const AttentionShape *left) {
                        cuda_attention_backward(dq, dk, dv, dout, out, q, k, v, lse, left, scratch);
                    },
                    *shape};
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span span = shape->spans.span[i];
        size_t t = span.document + blocks_for(span.begin - span.document, CUDNN_GRID) * CUDNN_GRID, queries;
        own.add(span, span.begin, t < span.end ? t : span.end);
        for (; block && t + CUDNN_GRID <= span.end; t += queries) {
            const size_t place = (span.row + t - span.begin) * NH, row = place * HD, before = t - span.document;
            bool has = true;
            queries = cudnn_piece(span.end - t, block);
            const auto call_of = [&](size_t key, size_t keys) {
                return CudnnAttention{queries, keys, heads, key_heads, NH, NKV, HD, (float)shape->scale, key == before};
            };
            cudnn_key_blocks(before, queries, block, [&](size_t key, size_t keys) {
                const CudnnAttention call = call_of(key, keys);
                has = has && cudnn_has(&call, 1, cudnn_attention_workspace(queries, keys, heads, HD));
            });
            if (!has) {
                own.add(span, t, t + queries);
                continue;
            }
            transpose(stage.lse, (const float *)lse + place, queries, NH);
            cuda_zero(stage.dq_sums, queries * NH * HD * sizeof(float));
            cudnn_key_blocks(before, queries, block, [&](size_t key, size_t keys) {
                const CudnnAttention call = call_of(key, keys);
                for (size_t group = 0; group < NKV / key_heads; group++) {
                    const size_t head = group * heads * HD, at = row + head;
                    const size_t keys_at = ((span.document + key) * NKV + group * key_heads) * HD;
                    cudnn_attention_backward(&call, stage.dq, stage.dk, stage.dv, (const floatX *)dout + at,
                                             (const floatX *)out + at, (const floatX *)q + at,
                                             (const floatX *)k + keys_at, (const floatX *)v + keys_at,
                                             stage.lse + group * heads * queries, stage.workspace);
                    add_staged(stage.dq_sums + head, stage.dq, queries, heads * HD, NH * HD);
                    add_staged((float *)dk + keys_at, stage.dk, keys, key_heads * HD, NKV * HD);
                    add_staged((float *)dv + keys_at, stage.dv, keys, key_heads * HD, NKV * HD);
                }
            });
            cuda_round_sums((Stored *)((floatX *)dq + row), (const Summed *)stage.dq_sums, queries * NH * HD);
        }
        own.add(span, t, span.end);
    }
    own.flush();
}

#endif
