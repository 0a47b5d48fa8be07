/*
Attention of op set "cuda" with cuDNN (cudnn_attention.h): executes the calls that attention_calls.h cuts spans into.
With STREAMBP_WGMMA our kernels for Hopper (attention_wgmma.cuh) compute all of backward instead, of wgmma_heads.
cuDNN executes the library calls. Our own kernels (attention.cuh) execute the other calls, and all that cuDNN refuses.
The choice depends only on shapes and the machine, so results are the same every time (with any_order except for the
last bits).

cuDNN stores results in bf16, overwriting. Backward's results are staged and added in fp32: dk and dv to the caller's
sums, dq to sums for up to a block of queries. Our kernels add to the same sums, which are rounded at the end. Results
of a range of keys (ring attention) are staged and merged in fp32, too. Backward treats a range like any other keys,
because out and log-sum-exp belong to all ranges together.
*/
#ifndef LLMC_CUDA_ATTENTION_CUDNN_CUH
#define LLMC_CUDA_ATTENTION_CUDNN_CUH
#include "attention.cuh"
#include "cudnn_attention.h"
#include "gradient.cuh"
#include "llmc/ops/attention_calls.h"

// ---- staged results -------------------------------------------------------------------------------------------------
// Stages cuDNN's staged[NH][rows] = our lse[n][NH], with +infinity in the rows before the last n.
__global__ void stage_lse_kernel(float *staged, const float *lse, size_t n, size_t NH, size_t rows) {
    FOR_EACH_PACK(i, rows * NH) {
        const size_t row = i % rows, padded = rows - n;
        staged[i] = row < padded ? INFINITY : lse[(row - padded) * NH + i / rows];
    }
}

// Copies the last n of cuDNN's staged[NH][rows] to our lse[n][NH].
__global__ void unstage_lse_kernel(float *lse, const float *staged, size_t n, size_t NH, size_t rows) {
    FOR_EACH_PACK(i, n * NH) lse[i] = staged[i % NH * rows + rows - n + i / NH];
}

__global__ void no_keys_kernel(float *lse, size_t count) { FOR_EACH_PACK(i, count) lse[i] = -INFINITY; }

// Adds staged[rows][width] to sums[rows][..], whose rows are `stride` elements apart; in packs of 8.
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

__device__ inline void put(float *to, float value) { *to = value; }
#ifndef PRECISION_FP32
__device__ inline void put(floatX *to, float value) { *to = store(value); }
#endif

// Merges cuDNN's results over one range of keys, staged[n][NH * HD] and the last n of staged_lse[NH][rows], into out
// and lse of n queries. One warp per query and head
template <typename Out>
__global__ void merge_staged_kernel(Out *out, float *lse, const floatX *staged, const float *staged_lse, size_t n,
                                    size_t NH, size_t HD, size_t rows) {
    const size_t i = (size_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const bool valid = i < n * NH;
    const float before = valid ? lse[i] : 0.0f, add = valid ? staged_lse[i % NH * rows + rows - n + i / NH] : 0.0f;
    const float largest = fmaxf(before, add), sum = largest + logf(expf(before - largest) + expf(add - largest));
    __syncthreads(); // wait until every lane has read lse
    if (!valid) return;
    for (size_t d = threadIdx.x % LANES; d < HD; d += LANES)
        put(out + i * HD + d, load(out[i * HD + d]) * expf(before - sum) + load(staged[i * HD + d]) * expf(add - sum));
    if (threadIdx.x % LANES == 0) lse[i] = sum;
}

template <typename Out>
static void merge_staged(Out *out, float *lse, const floatX *staged, const float *staged_lse, size_t n, size_t NH,
                         size_t HD, size_t rows) {
    LAUNCH((merge_staged_kernel<Out>), dim3((unsigned)blocks_for(n * NH, DELTA_THREADS / LANES)), DELTA_THREADS, 0)
    (out, lse, staged, staged_lse, n, NH, HD, rows);
}

// ---- memory in addition to the tensors ------------------------------------------------------------------------------
struct CudnnStage {
    float *lse, *dq_sums;   // lse [NH][rows], dq_sums [block][NH * HD]
    floatX *q, *out, *dout; // [grid][NH * HD] padded queries
    char *call;             // dq, dk, dv and workspace of one call
};

static char *take(uintptr_t *end, size_t bytes) {
    *end += aligned_256(bytes);
    return (char *)(*end - aligned_256(bytes));
}

static CudnnStage cudnn_stage(char *memory, size_t n, const AttentionCut &cut) {
    uintptr_t end = aligned_256((uintptr_t)memory);
    const size_t row = cut.NH * cut.HD, rows = min_size(n, cut.block);
    CudnnStage stage;
    stage.lse = (float *)take(&end, rows * cut.NH * sizeof(float));
    stage.dq_sums = (float *)take(&end, rows * row * sizeof(float));
    stage.q = (floatX *)take(&end, cut.grid * row * sizeof(floatX));
    stage.out = (floatX *)take(&end, cut.grid * row * sizeof(floatX));
    stage.dout = (floatX *)take(&end, cut.grid * row * sizeof(floatX));
    stage.call = take(&end, cut.workspace);
    return stage;
}

struct ForwardStage {
    float *lse;      // [NH][rows]
    floatX *q, *out; // [grid][NH * HD] of padded queries, [rows][NH * HD]
    void *workspace;
};

static ForwardStage forward_stage(char *memory, size_t n, const AttentionCut &cut) {
    uintptr_t end = aligned_256((uintptr_t)memory);
    const size_t row = cut.NH * cut.HD, rows = max_size(cut.grid, min_size(n, cut.block));
    ForwardStage stage;
    stage.lse = (float *)take(&end, rows * cut.NH * sizeof(float));
    stage.q = (floatX *)take(&end, cut.grid * row * sizeof(floatX));
    stage.out = (floatX *)take(&end, rows * row * sizeof(floatX));
    stage.workspace = take(&end, GPU_FORWARD_WORKSPACE);
    return stage;
}

// Returns a call's queries with `padded` zeros before them: a copy in `staged`, or x itself if `padded` is 0.
static const floatX *padded_rows(const floatX *x, floatX *staged, size_t padded, size_t elements) {
    if (!padded) return x;
    cuda_zero(staged, padded * sizeof(floatX));
    cuda_copy(staged + padded, x, elements * sizeof(floatX));
    return staged;
}

// ---- our kernels' part of a call: parts of its spans, in order ------------------------------------------------------
template <typename Run> struct OwnSpans {
    Run run;              // takes calls for our kernels, on spans with gaps between their rows
    AttentionShape whole; // shape of all spans
    Span span[MOST_SPANS] = {};
    size_t count = 0;

    void flush() {
        AttentionShape shape = whole;
        shape.spans.span = span, shape.spans.count = count;
        if (count) run(&shape);
        count = 0;
    }
    // Adds a part. Parts of one document need separate calls, because a key has one owner in a call.
    void add(Span part, KeyRange keys) {
        const bool same = count && span[count - 1].document == part.document;
        const bool others = keys.begin != whole.keys.begin || keys.end != whole.keys.end;
        if (same && !others && span[count - 1].end == part.begin) {
            span[count - 1].end = part.end;
            return;
        }
        if (same || others || count == MOST_SPANS) flush();
        whole.keys = keys;
        span[count++] = part;
    }
};
template <typename Run> OwnSpans(Run, AttentionShape) -> OwnSpans<Run>;

// ---- calls ----------------------------------------------------------------------------------------------------------
static AttentionChoice attention_choice;

static void cudnn_or_own_choose(AttentionChoice choice) { attention_choice = choice; }

// Tells whether our kernels for Hopper compute all of backward.
static bool hopper_backward_replaces(size_t HD) { return wgmma_on() && wgmma_takes_head(HD); }

static bool cudnn_takes(size_t HD, bool aligned) { return sizeof(floatX) == 2 && cudnn_has_head(HD) && aligned; }

struct CudnnCut : AttentionCut {
    double scale;
};

static CudnnAttention cudnn_call(const AttentionCut *cut, const AttentionCall *call, int backward) {
    return CudnnAttention{call->rows,
                          call->keys.end - call->keys.begin,
                          call->heads * (cut->NH / cut->NKV),
                          call->heads,
                          cut->NH,
                          cut->NKV,
                          cut->HD,
                          call->causal ? call->window : 0,
                          static_cast<const CudnnCut *>(cut)->scale,
                          call->causal,
                          backward && cut->any_order};
}

static int cudnn_has(const AttentionCut *cut, const AttentionCall *call, int backward) {
    static bool told[2];
    const CudnnAttention asked = cudnn_call(cut, call, backward);
    const size_t workspace = backward
                                 ? attention_workspace(asked.queries, asked.keys, asked.heads, asked.HD, cut->any_order)
                                 : (size_t)GPU_FORWARD_WORKSPACE;
    if (cudnn_attention_has(&asked, backward, workspace)) return 1;
    if (!told[backward])
        note("attention %s of %zu queries and %zu keys by our own kernels: %s", backward ? "backward" : "forward",
             asked.queries, asked.keys, cudnn_attention_refusal());
    told[backward] = true;
    return 0;
}

static CudnnCut cudnn_cut(const AttentionShape *shape) {
    CudnnCut cut = {attention_cut_of(shape, attention_choice), shape->scale};
    cut.takes = cudnn_has;
    return cut;
}

template <typename F> static void take_with(void *f, const AttentionCall *call) { (*(F *)f)(*call); }

template <typename F> static void forward_calls(const CudnnCut &cut, const AttentionShape *shape, F each) {
    attention_forward_calls(&cut, shape, take_with<F>, &each);
}
template <typename F>
static void backward_calls(const CudnnCut &cut, const AttentionShape *shape, size_t row, size_t rows, F each) {
    attention_backward_calls(&cut, shape, row, rows, take_with<F>, &each);
}

// ---- the ops --------------------------------------------------------------------------------------------------------
static size_t cudnn_or_own_scratch(size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots) {
    return gpu_attention_scratch(attention_choice, hopper_backward_replaces(HD), sizeof(floatX), n, NH, NKV, HD, slots);
}

static void cudnn_or_own_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                 const AttentionShape *shape, Summed *scratch) {
    const size_t NH = shape->NH, NKV = shape->NKV, HD = shape->HD, n = spans_rows(shape->spans);
    const CudnnCut cut = cudnn_cut(shape);
    size_t library = 0;
    if (cudnn_takes(HD, all_aligned(out, q, k, v)))
        forward_calls(cut, shape, [&](const AttentionCall &call) { library += call.rows; });
    if (!library) return cuda_attention_forward(out, lse, q, k, v, shape, scratch);
    graph_spans(shape->spans, 0); // a step that is recorded as a graph has no long spans
    AttentionShape left = *shape;
    if (shape->partial && !shape->accumulate) {
        cuda_zero(out, n * NH * HD * sizeof(float));
        LAUNCH((no_keys_kernel), loop_grid(n * NH), LOOP_THREADS, 0)((float *)lse, n * NH);
        left.accumulate = 1;
    }
    AttentionShape joining = left;
    joining.accumulate = 1;
    const auto run = [&](const AttentionShape *some) { cuda_attention_forward(out, lse, q, k, v, some, scratch); };
    OwnSpans own = {run, left}, rest = {run, joining};
    const ForwardStage stage = forward_stage((char *)scratch, n, cut);
    forward_calls(cut, shape, [&](const AttentionCall &call) {
        if (!call.rows) return call.merged ? rest.add(call.span, call.keys) : own.add(call.span, call.keys);
        const size_t row = call.span.row * NH, keys = call.keys.begin * NKV * HD,
                     count = call.span.end - call.span.begin;
        const size_t padded = (call.rows - count) * NH * HD, elements = count * NH * HD;
        const CudnnAttention asked = cudnn_call(&cut, &call, 0);
        float *const lse_of = (float *)lse + row;
        floatX *const given = call.merged || padded ? stage.out : (floatX *)out + row * HD;
        cudnn_attention_forward(&asked, given, stage.lse,
                                padded_rows((const floatX *)q + row * HD, stage.q, padded, elements),
                                (const floatX *)k + keys, (const floatX *)v + keys, stage.workspace);
        if (shape->partial)
            return merge_staged((float *)out + row * HD, lse_of, given + padded, stage.lse, count, NH, HD, call.rows);
        if (call.merged)
            return merge_staged((floatX *)out + row * HD, lse_of, given + padded, stage.lse, count, NH, HD, call.rows);
        if (padded) cuda_copy((floatX *)out + row * HD, given + padded, elements * sizeof(floatX));
        LAUNCH((unstage_lse_kernel), loop_grid(count * NH), LOOP_THREADS, 0)
        (lse_of, stage.lse, count, NH, call.rows);
    });
    own.flush(), rest.flush();
}

// Backward's tensors, from the first row of a block of queries on
struct CudnnQueries {
    const floatX *q, *out, *dout;
    const float *lse;
    float *dq;
};

// Returns a piece's queries as cuDNN reads them: padding rows first, then log-sum-exp of all rows.
static CudnnQueries cudnn_piece(const CudnnQueries &from, const CudnnStage &stage, const AttentionCall &call, size_t NH,
                                size_t HD) {
    const size_t n = call.span.end - call.span.begin, padded = (call.rows - n) * NH * HD, row = call.span.row * NH;
    const auto rows = [&](const floatX *x, floatX *staged) {
        return padded_rows(x + row * HD, staged, padded, n * NH * HD);
    };
    LAUNCH((stage_lse_kernel), loop_grid(call.rows * NH), LOOP_THREADS, 0)
    (stage.lse, from.lse + row, n, NH, call.rows);
    return CudnnQueries{rows(from.q, stage.q), rows(from.out, stage.out), rows(from.dout, stage.dout), stage.lse,
                        from.dq + row * HD};
}

// Makes one call per group of heads. Adds its results to piece.dq, dk and dv.
static void cudnn_backward(const CudnnCut &cut, const AttentionCall &call, const CudnnQueries &piece, float *dk,
                           float *dv, const floatX *k, const floatX *v, const CudnnStage &stage) {
    const CudnnAttention asked = cudnn_call(&cut, &call, 1);
    const size_t HD = cut.HD, n = call.span.end - call.span.begin, heads = asked.heads, keys = asked.keys;
    floatX *const dq_of = (floatX *)stage.call;
    floatX *const dk_of = (floatX *)aligned_256((uintptr_t)(dq_of + call.rows * heads * HD));
    floatX *const dv_of = (floatX *)aligned_256((uintptr_t)(dk_of + keys * call.heads * HD));
    void *const workspace = (void *)aligned_256((uintptr_t)(dv_of + keys * call.heads * HD));
    for (size_t group = 0; group < cut.NKV / call.heads; group++) {
        const size_t at = group * heads * HD, keys_at = (call.keys.begin * cut.NKV + group * call.heads) * HD;
        cudnn_attention_backward(&asked, dq_of, dk_of, dv_of, piece.dout + at, piece.out + at, piece.q + at,
                                 k + keys_at, v + keys_at, piece.lse + group * heads * call.rows, workspace);
        add_staged(piece.dq + at, dq_of + (call.rows - n) * heads * HD, n, heads * HD, cut.NH * HD);
        add_staged(dk + keys_at, dk_of, keys, call.heads * HD, cut.NKV * HD);
        add_staged(dv + keys_at, dv_of, keys, call.heads * HD, cut.NKV * HD);
    }
}

static void cudnn_or_own_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                  const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                  const AttentionShape *shape, Summed *scratch) {
    const size_t n = spans_rows(shape->spans), NH = shape->NH, NKV = shape->NKV, HD = shape->HD;
    const CudnnCut cut = cudnn_cut(shape);
    size_t library = 0;
    if (cudnn_takes(HD, all_aligned(dq, dk, dv, dout, out, q, k, v)) && !hopper_backward_replaces(HD))
        for (size_t row = 0; row < n; row += cut.block)
            backward_calls(cut, shape, row, cut.block, [&](const AttentionCall &call) { library += call.rows; });
    if (!library) return cuda_attention_backward(dq, dk, dv, dout, out, q, k, v, lse, shape, scratch);
    float *const staged = (float *)scratch + cuda_attention_scratch(n, NH, NKV, HD, shape->slots);
    const CudnnStage stage = cudnn_stage((char *)staged, n, cut);
    for (size_t row = 0; row < n; row += cut.block) {
        const size_t rows = min_size(cut.block, n - row), at = row * NH * HD;
        float *const sums = shape->partial ? (float *)dq + at : stage.dq_sums;
        const CudnnQueries block = {(const floatX *)q + at, (const floatX *)out + at, (const floatX *)dout + at,
                                    (const float *)lse + row * NH, sums};
        if (!shape->accumulate) cuda_zero(sums, rows * NH * HD * sizeof(float));
        AttentionShape left = *shape;
        left.partial = left.accumulate = 1;
        OwnSpans own = {[&](const AttentionShape *some) {
                            cuda_attention_backward(sums, dk, dv, (const Stored *)block.dout, (const Stored *)block.out,
                                                    (const Stored *)block.q, k, v, (const Summed *)block.lse, some,
                                                    scratch);
                        },
                        left};
        CudnnQueries piece;
        size_t staged = SIZE_MAX; // first row of the staged piece
        backward_calls(cut, shape, row, cut.block, [&](const AttentionCall &call) {
            if (!call.rows) return own.add(call.span, call.keys);
            if (staged != call.span.row) piece = cudnn_piece(block, stage, call, NH, HD), staged = call.span.row;
            cudnn_backward(cut, call, piece, (float *)dk, (float *)dv, (const floatX *)k, (const floatX *)v, stage);
        });
        own.flush();
        if (!shape->partial) cuda_round_sums((Stored *)((floatX *)dq + at), (const Summed *)sums, rows * NH * HD);
    }
}

#endif
