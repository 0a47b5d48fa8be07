/*
Times every op of the linked op set at the shapes of Qwen3-8B; linear attention at Qwen3.5-9B's, Mamba-2 at
Nemotron-3 Nano's, heads of 512 at Gemma 4 26B-A4B's, sinks at gpt-oss'. `stream` calls them so for chunks of 4096
tokens of a stream of 32768 (the last chunk, which sees all keys) and logits chunks of 2048. Prints one JSON object on
stdout, the same as a table on stderr: median milliseconds with cold caches, the rate, and its share of a copy's rate or
of cuBLASLt's best square product, measured in the same run. Bytes are the least an op needs: every input read once,
every output written once; a sum that is added to is read and written. dev/bench_gpu.sh runs it.

    bench [REPEATS]

Built with -DCUDA_ON_CPU all rows run once at small shapes, with any op set: this tests their arguments and times
nothing.
*/
#define WITH_OP_SET
#include "playground.cuh"
#include "llmc/base/json.h"
#ifndef CUDA_ON_CPU
#include "product.cuh"
#endif
#include "llmc/ops/attention_calls.h"
#ifdef HAVE_CUDNN
#include "llmc/ops/cuda/cudnn_attention.h"
#endif

// Chunk, stream, logits chunk; then the model's, in design vocabulary; texts that are sampled side by side; then the
// elements of a layer's matrices
#ifdef CUDA_ON_CPU
constexpr size_t n = 32, T = 96, m = 8, C = 64, NH = 4, NKV = 2, HD = 16, FF = 96, V = 320, TEXTS = 3;
constexpr size_t HK = 1, HV = 2, DK = 16, DV = 16;                 // of linear attention, as in streambp.h
constexpr size_t GROUPS = 1, SSD_HEADS = 2, SSD_V = 8, SSD_K = 16; // of Mamba-2
constexpr size_t WIDE_NH = 2, WIDE_NKV = 1, WIDE_HD = 32;
#else
constexpr size_t n = 4096, T = 32768, m = 2048, C = 4096, NH = 32, NKV = 8, HD = 128, FF = 12288, V = 151936,
                 TEXTS = 64;
constexpr size_t HK = 16, HV = 32, DK = 128, DV = 128;
constexpr size_t GROUPS = 8, SSD_HEADS = 64, SSD_V = 64, SSD_K = 128;
constexpr size_t WIDE_NH = 16, WIDE_NKV = 2, WIDE_HD = 512;
#endif
constexpr size_t LAYER = 2 * C * NH * HD + 2 * C * NKV * HD + 3 * C * FF;
constexpr size_t CHANNELS = 2 * HK * DK + HV * DV, VALUES = HV * DV, PROJECTED = CHANNELS + VALUES + 2 * HV, TAPS = 4;
constexpr size_t SSD_VALUES = SSD_HEADS * SSD_V, SSD_CHANNELS = SSD_VALUES + 2 * GROUPS * SSD_K;
constexpr size_t SSD_PROJECTED = SSD_CHANNELS + SSD_VALUES + SSD_HEADS;
constexpr double STORED = sizeof(floatX), SUMMED = sizeof(float);
constexpr double PAIRS = (double)n * (double)(T - n) + 0.5 * (double)n * (double)(n + 1);

struct Tensors {
    Tensor<floatX> x, y, z, weight;     // [n, 2 FF] each, also a logits chunk; a matrix of [V, C], also a layer's
    Tensor<float> sums;                 // [V, C], positive; also what AdamW keeps of a layer
    Tensor<floatX> q, out, dout, dq;    // [n, NH, HD]
    Tensor<floatX> k, v;                // [T, NKV, HD]
    Tensor<float> dk, dv, lse, scratch; // [T, NKV, HD], [n, NH]
    Tensor<int32_t> tokens, position;   // [T], with words' frequencies
    Tensor<float> frequency, weights;   // [HD / 2] of RoPE; [n] of the loss
    Span span = {0, T - n, T, 0};
    Spans spans() const { return Spans{&span, 1, 0, PAIRS}; }
    Tensors();
};

constexpr size_t WIDE = n * 2 * FF > m *V ? n * 2 * FF : m *V, MATRIX = V * C > 3 * LAYER ? V *C : 3 * LAYER;
static_assert(T * C <= MATRIX, "embedding_backward takes its dx from there");
constexpr size_t WIDE_OUT = n * WIDE_NH * WIDE_HD, SINK_NH = 2 * NH, SINK_HD = HD / 2;
static_assert(WIDE_NKV * WIDE_HD <= NKV * HD && WIDE_NH <= NH && WIDE_OUT <= WIDE && 2 * WIDE_OUT <= MATRIX);
static_assert(n * PROJECTED <= WIDE && n * PROJECTED <= MATRIX && VALUES <= NH * HD, "so do linear attention's ops");

static_assert(SSD_PROJECTED <= PROJECTED && SSD_VALUES <= VALUES);

// The whole chunk belongs to one document, which begins before it.
static DeltaShape delta_shape(const Span *span) {
    return {.spans = {span, 1, 0, 0}, .HK = HK, .HV = HV, .K = DK, .V = DV, .taps = TAPS, .stride = PROJECTED};
}
static DeltaShape ssd_shape(const Span *span) {
    return {.spans = {span, 1, 0, 0},
            .HK = GROUPS,
            .HV = SSD_HEADS,
            .K = SSD_K,
            .V = SSD_V,
            .taps = TAPS,
            .stride = SSD_PROJECTED,
            .ssd = 1,
            .least = 0.001,
            .most = INFINITY};
}

// Backward with sums in a fixed order and the smallest workspace, or the largest worth its bytes; then in any order
enum { ATTENTION_CHOICES = 3 };
static AttentionChoice attention_choice(size_t i) {
    AttentionChoice choice = {i == 2, 0};
    if (i) choice.workspace = attention_workspace_choice(attention_cut(NH, NKV, HD, 0, choice), T, 0);
    return choice;
}

static size_t scratch_of_all(void) {
    size_t attention = 0;
    for (size_t i = 0; i < ATTENTION_CHOICES; i++) {
        ops_device->attention_choose(attention_choice(i));
        attention = std::max(attention, ops_device->attention_scratch(n, NH, NKV, HD, no_slots));
    }
    const Span span = {0, T - n, T, 0};
    const DeltaShape delta = delta_shape(&span), ssd = ssd_shape(&span);
    return std::max({attention, ops_device->attention_scratch(n, WIDE_NH, WIDE_NKV, WIDE_HD, no_slots),
                     ops_device->sink_backward_scratch(n, SINK_NH), ops_device->embedding_backward_scratch(T, V, C),
                     ops_device->conv_backward_scratch(&delta, 1), ops_device->delta_forward_scratch(&delta),
                     ops_device->delta_backward_scratch(&delta), ops_device->ssd_forward_scratch(&ssd),
                     ops_device->ssd_backward_scratch(&ssd), ops_device->gated_norm_backward_scratch(n, HV, DV, 0),
                     ops_device->gated_norm_backward_scratch(n, GROUPS, SSD_VALUES / GROUPS, 1),
                     ops_device->norm_backward_scratch(n, C), ops_device->norm_backward_scratch(n * NH, HD)});
}

Tensors::Tensors()
    : x(WIDE, random_values(1)), y(WIDE, random_values(2)), z(WIDE, random_values(3)),
      weight(MATRIX, random_values(4, 0.02)), sums(MATRIX, [](size_t i) { return random_uniform(5, 0, i); }),
      q(n * NH * HD, random_values(6)), out(n * NH * HD, constant(0)), dout(n * NH * HD, random_values(7)),
      dq(n * NH * HD, constant(0)), k(T * NKV * HD, random_values(8)), v(T * NKV * HD, random_values(9)),
      dk(T * NKV * HD, constant(0)), dv(T * NKV * HD, constant(0)), lse(n * NH, constant(0)),
      scratch(scratch_of_all(), constant(0)),
      tokens(T, [](size_t t) { return exp(random_uniform(10, 0, t) * log((double)V)) - 1; }),
      position(T, [](size_t t) { return (double)t; }),
      frequency(HD / 2, [](size_t i) { return pow(1e6, -2.0 * (double)i / (double)HD); }),
      weights(n, random_values(11)) {}

// ---- measuring ------------------------------------------------------------------------------------------------------
struct Bench {
    JsonOut *json;
    const Tensors &t;

    // rows, in, wide: shape of the op, if it has one: rows, columns in, columns out. work: bytes or FLOPs. before:
    // called before each timed run
    template <typename Run, typename Before>
    void measure(const char *op, const char *of, size_t rows, size_t in, size_t wide, Work unit, double work, Run run,
                 Before before) const;
    template <typename Run>
    void bytes(const char *op, const char *of, size_t rows, size_t in, double work, Run run) const {
        measure(op, of, rows, in, 0, BYTES, work, run, [] {});
    }
    template <typename Run>
    void flops(const char *op, const char *of, size_t rows, size_t in, double work, Run run) const {
        measure(op, of, rows, in, 0, FLOPS, work, run, [] {});
    }
};

template <typename Run, typename Before> static double seconds_of(Run run, Before before) {
#ifdef CUDA_ON_CPU
    before();
    run();
    return NAN;
#else
    std::vector<double> seconds(playground.repeats);
    for (size_t repeat = 0; repeat <= playground.repeats; repeat++) {
        before();
        const double s = cold_seconds(run);
        if (repeat) seconds[repeat - 1] = s; // the first loads kernels and chooses products
    }
    return median(seconds);
#endif
}

template <typename Run, typename Before>
void Bench::measure(const char *op, const char *of, size_t rows, size_t in, size_t wide, Work unit, double work,
                    Run run, Before before) const {
    const double seconds = seconds_of(run, before), rate = work / seconds,
                 share = rate / (unit == BYTES ? playground.copy_rate : playground.product_rate);
    fprintf(stderr, "%-24s %-24s %10.3f ms %9.1f %-7s %6.1f %% of %s\n", op, of, seconds * 1e3,
            rate * (unit == BYTES ? 1e-9 : 1e-12), unit == BYTES ? "GB/s" : "TFLOP/s", 100 * share,
            unit == BYTES ? "copy" : "product");
    json_object(json, NULL);
    json_text(json, "op", op);
    json_text(json, "of", of);
    json_size(json, "rows", rows);
    json_size(json, "in", in);
    if (wide) json_size(json, "out", wide);
    json_number(json, "ms", seconds * 1e3);
    json_number(json, unit == BYTES ? "gb_per_s" : "tflop_per_s", rate * (unit == BYTES ? 1e-9 : 1e-12));
    json_number(json, unit == BYTES ? "share_of_copy" : "share_of_product", share);
    json_object_end(json);
}

// ---- the ops --------------------------------------------------------------------------------------------------------
constexpr Norm RMS = {1e-6, 0.0, NORM_RMS}, LAYER_NORM = {1e-5, 0.0, NORM_LAYER};
constexpr Activation SWIGLU = {ACTIVATION_SWIGLU, 0, 0}, GELU = {ACTIVATION_GELU, 0, 0},
                     CLAMPED = {ACTIVATION_CLAMPED, 1.702, 7};

static void bench_elements(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const size_t heads = n * NH;
    b.bytes("copy", "layer inputs", n, C, 2.0 * n * C * STORED,
            [&] { ops->copy(t.x.data, t.y.data, n * C * sizeof(floatX)); });
    b.bytes("zero", "a layer's sums", 1, LAYER, LAYER * SUMMED, [&] { ops->zero(t.sums.data, LAYER * sizeof(float)); });
    b.bytes("embedding_forward", "", n, C, 2.0 * n * C * STORED, [&] {
        ops->embedding_forward(t.x.stored(), t.tokens.data, t.position.data, t.weight.stored(), NULL, n, C, 1.0);
    });
    b.bytes("rmsnorm_forward", "hidden", n, C, 2.0 * n * C * STORED,
            [&] { ops->norm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), NULL, NULL, n, C, RMS); });
    b.bytes("rmsnorm_forward", "query heads", heads, HD, 2.0 * heads * HD * STORED,
            [&] { ops->norm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), NULL, NULL, heads, HD, RMS); });
    for (int accumulate = 0; accumulate < 2; accumulate++)
        b.bytes("rmsnorm_backward", accumulate ? "hidden, accumulating" : "hidden", n, C,
                (3.0 + accumulate) * n * C * STORED, [&] {
                    ops->norm_backward(t.x.stored(), t.sums.summed(), NULL, t.y.stored(), t.z.stored(),
                                       t.weight.stored(), n, C, RMS, accumulate, t.scratch.summed());
                });
    b.bytes("rmsnorm_backward", "query heads", heads, HD, 3.0 * heads * HD * STORED, [&] {
        ops->norm_backward(t.x.stored(), t.sums.summed(), NULL, t.y.stored(), t.z.stored(), t.weight.stored(), heads,
                           HD, RMS, 0, t.scratch.summed());
    });
    b.bytes("layernorm_forward", "hidden", n, C, 2.0 * n * C * STORED, [&] {
        ops->norm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), t.z.stored(), NULL, n, C, LAYER_NORM);
    });
    b.bytes("layernorm_backward", "hidden", n, C, 3.0 * n * C * STORED, [&] {
        ops->norm_backward(t.x.stored(), t.sums.summed(), (Summed *)(t.sums.data + C), t.y.stored(), t.z.stored(),
                           t.weight.stored(), n, C, LAYER_NORM, 0, t.scratch.summed());
    });
    b.bytes("rope_forward", "queries", n, NH * HD, 2.0 * heads * HD * STORED, [&] {
        ops->rope(t.q.stored(), t.position.data, t.frequency.data, n, NH, HD, HD, Rotation{1, 0, 0, 1}, 0);
    });
    b.bytes("rope_backward", "queries", n, NH * HD, 2.0 * heads * HD * STORED, [&] {
        ops->rope(t.q.stored(), t.position.data, t.frequency.data, n, NH, HD, HD, Rotation{1, 0, 0, 1}, 1);
    });
    b.bytes("swiglu_forward", "", n, FF, 3.0 * n * FF * STORED,
            [&] { ops->activation_forward(t.y.stored(), t.x.stored(), SWIGLU, n, FF); });
    b.bytes("swiglu_backward", "", n, FF, 5.0 * n * FF * STORED,
            [&] { ops->activation_backward(t.z.stored(), t.y.stored(), t.x.stored(), SWIGLU, n, FF); });
    b.bytes("gelu_forward", "", n, FF, 2.0 * n * FF * STORED,
            [&] { ops->activation_forward(t.y.stored(), t.x.stored(), GELU, n, FF); });
    b.bytes("gelu_backward", "", n, FF, 3.0 * n * FF * STORED,
            [&] { ops->activation_backward(t.z.stored(), t.y.stored(), t.x.stored(), GELU, n, FF); });
    b.bytes("clamped_forward", "", n, FF, 3.0 * n * FF * STORED,
            [&] { ops->activation_forward(t.y.stored(), t.x.stored(), CLAMPED, n, FF); });
    b.bytes("clamped_backward", "", n, FF, 5.0 * n * FF * STORED,
            [&] { ops->activation_backward(t.z.stored(), t.y.stored(), t.x.stored(), CLAMPED, n, FF); });
    static const struct {
        const char *of;
        bool gradient;
        double cap;
    } logprobs[] = {{"with its gradient", true, 0}, {"alone", false, 0}, {"with its gradient, capped", true, 30}};
    for (const auto &which : logprobs)
        b.measure(
            "logprob", which.of, m, V, 0, BYTES, (which.gradient ? 2.0 : 1.0) * m * V * STORED,
            [&] {
                ops->logprob(t.lse.summed(), NULL, t.x.stored(), t.tokens.data,
                             which.gradient ? t.weights.summed() : NULL, m, V, V, Temperature{1, which.cap});
            },
            [&] { ops->copy(t.x.data, t.y.data, m * V * sizeof(floatX)); }); // restores the logits
    static const struct {
        const char *of;
        SamplingSettings settings;
    } draws[] = {
        {"the likeliest", {0, 0, 0, 1, 0}}, {"temperature", {1, 0, 0, 1, 0}}, {"top-k and top-p", {1, 0, 50, 0.9, 0}}};
    ops->zero(t.lse.data, TEXTS * sizeof(double)); // instead of uniform numbers, which cost the same
    for (const auto &draw : draws)
        b.bytes("draw", draw.of, TEXTS, V, 1.0 * TEXTS * V * STORED, [&] {
            ops->draw((int32_t *)t.dk.data, t.y.stored(), (const double *)t.lse.data, TEXTS, V, V, &draw.settings,
                      t.scratch.summed());
        });
}

#if defined(HAVE_CUDNN) && !defined(CUDA_ON_CPU)
// The distinct calls of a chunk's backward: the op's rate is compared with theirs
static size_t keys_of(const AttentionCall &call) { return call.keys.end - call.keys.begin; }

struct DifferentCalls {
    AttentionCall call[64];
    size_t count;
};

static void different_call(void *to, const AttentionCall *call) {
    DifferentCalls *calls = (DifferentCalls *)to;
    size_t i = 0;
    while (i < calls->count && (calls->call[i].rows != call->rows || calls->call[i].causal != call->causal ||
                                keys_of(calls->call[i]) != keys_of(*call)))
        i++;
    if (call->rows && i == calls->count && i < 64) calls->call[calls->count++] = *call; // rows 0: our own kernels'
}

static void bench_cudnn(const Bench &b, const AttentionShape &shape, AttentionChoice choice) {
    const Tensors &t = b.t;
    const AttentionCut cut = attention_cut_of(&shape, choice);
    DifferentCalls calls;
    calls.count = 0;
    attention_backward_calls(&cut, &shape, 0, n, different_call, &calls);
    for (size_t i = 0; i < calls.count; i++) {
        const AttentionCall c = calls.call[i];
        const size_t heads = c.heads * (NH / NKV), rows = c.rows, keys = keys_of(c);
        const size_t bytes = attention_workspace(rows, keys, heads, HD, choice.any_order);
        const CudnnAttention call = {rows, keys,        heads,    c.heads,         NH, NKV, HD,
                                     0,    shape.scale, c.causal, choice.any_order};
        const double hidden = c.causal ? 0.5 * (double)rows * (double)(rows - 1) : 0;
        void *const workspace = ops_device->allocate(bytes);
        char of[96];
        floatX *const dq = t.weight.data, *const dk = dq + rows * heads * HD, *const dv = dk + keys * c.heads * HD;
        snprintf(of, sizeof(of), "%zu keys%s, %zu heads%s", keys, c.causal ? ", causal" : "", heads,
                 choice.any_order ? ", any order" : "");
        if (workspace && cudnn_attention_has(&call, 1, bytes))
            b.flops("cudnn backward", of, rows, heads * HD, 10.0 * heads * HD * ((double)rows * keys - hidden), [&] {
                cudnn_attention_backward(&call, dq, dk, dv, t.dout.data, t.out.data, t.q.data, t.k.data, t.v.data,
                                         t.lse.data, workspace);
            });
        if (workspace) ops_device->release(workspace, bytes);
    }
}
#endif

static void bench_attention(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const AttentionShape shape = {t.spans(), NH, NKV, HD, 1 / sqrt((double)HD), all_keys, 0, 0, {0, 0}};
    b.flops("attention_forward", "the last chunk", n, NH * HD, 4.0 * NH * HD * PAIRS, [&] {
        ops->attention_forward(t.out.stored(), t.lse.summed(), t.q.stored(), t.k.stored(), t.v.stored(), &shape,
                               t.scratch.summed());
    });
    for (size_t i = 0; i < ATTENTION_CHOICES; i++) {
        const AttentionChoice choice = attention_choice(i);
        char of[96];
        ops->attention_choose(choice);
        snprintf(of, sizeof(of), "the last chunk%s%s", choice.workspace ? ", large workspace" : "",
                 choice.any_order ? ", any order" : "");
        b.flops("attention_backward", of, n, NH * HD, 10.0 * NH * HD * PAIRS, [&] {
            ops->attention_backward(t.dq.stored(), t.dk.summed(), t.dv.summed(), t.dout.stored(), t.out.stored(),
                                    t.q.stored(), t.k.stored(), t.v.stored(), t.lse.summed(), &shape,
                                    t.scratch.summed());
        });
#if defined(HAVE_CUDNN) && !defined(CUDA_ON_CPU)
        bench_cudnn(b, shape, choice);
#endif
    }
    ops->attention_choose(attention_choice(0));
}

// Results go where weights are; lse of sinks, and their sums, are positive numbers
static void bench_wide_heads_and_sinks(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const double scale = 1 / sqrt((double)WIDE_HD);
    const AttentionShape shape = {t.spans(), WIDE_NH, WIDE_NKV, WIDE_HD, scale, all_keys, 0, 0, {0, 0}};
    Stored *const out = t.weight.stored(), *const dq = (Stored *)(t.weight.data + WIDE_OUT);
    const double flops = 2.0 * WIDE_NH * WIDE_HD * PAIRS;
    b.flops("attention_forward", "heads of 512", n, WIDE_NH * WIDE_HD, 2 * flops, [&] {
        ops->attention_forward(out, t.lse.summed(), t.x.stored(), t.k.stored(), t.v.stored(), &shape,
                               t.scratch.summed());
    });
    b.flops("attention_backward", "heads of 512", n, WIDE_NH * WIDE_HD, 5 * flops, [&] {
        ops->attention_backward(dq, t.dk.summed(), t.dv.summed(), t.y.stored(), out, t.x.stored(), t.k.stored(),
                                t.v.stored(), t.lse.summed(), &shape, t.scratch.summed());
    });
    const size_t width = SINK_NH * SINK_HD;
    b.bytes("sink_forward", "heads of 64", n, width, 2.0 * n * width * STORED,
            [&] { ops->sink_forward(t.out.stored(), t.sums.summed(), t.q.stored(), n, SINK_NH, SINK_HD); });
    b.bytes("sink_backward", "heads of 64", n, width, 2.0 * n * width * STORED, [&] {
        ops->sink_backward(t.dk.summed(), t.dout.stored(), t.out.stored(), t.sums.summed(), t.q.stored(), n, SINK_NH,
                           SINK_HD, t.scratch.summed());
    });
}

// Linear attention; bytes and FLOPs of the chunked form as delta_flops counts them, not what the kernels move and issue
// (dev/gpu_log.md)
static void bench_linear_attention(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const DeltaShape shape = delta_shape(&t.span);
    const size_t state = HV * DK * DV;
    Stored *const gates = (Stored *)(t.x.data + CHANNELS + VALUES), *const rates =
                                                                        (Stored *)(t.x.data + PROJECTED - HV);
    Stored *const A_log = t.q.stored(), *const dt_bias = (Stored *)(t.q.data + HV); // 0 on average
    floatX *const dprojected = t.weight.data;
    Summed *const before = t.sums.summed(), *const behind = (Summed *)(t.sums.data + state),
                  *const sums = (Summed *)(t.sums.data + 2 * state);
    b.bytes("conv_forward", "query, key, value", n, CHANNELS, 2.0 * n * CHANNELS * STORED,
            [&] { ops->conv_forward(t.y.stored(), t.k.stored(), t.x.stored(), t.v.stored(), NULL, &shape); });
    b.bytes("conv_backward", "query, key, value", n, CHANNELS, 3.0 * n * CHANNELS * STORED, [&] {
        ops->conv_backward((Stored *)dprojected, sums, NULL, behind, t.z.stored(), t.x.stored(), t.k.stored(),
                           t.v.stored(), NULL, &shape, t.scratch.summed());
    });
    b.flops("delta_forward", "the last chunk", n, VALUES, n * delta_flops(&shape, DELTA_FORWARD), [&] {
        ops->delta_forward(t.out.stored(), before, NULL, t.y.stored(), gates, rates, A_log, dt_bias, &shape,
                           t.scratch.summed());
    });
    b.flops("delta_forward", "the state alone", n, VALUES, n * delta_flops(&shape, DELTA_STATE), [&] {
        ops->delta_forward(NULL, before, NULL, t.y.stored(), gates, rates, A_log, dt_bias, &shape, t.scratch.summed());
    });
    b.flops("delta_backward", "the last chunk", n, VALUES, n * delta_flops(&shape, DELTA_BACKWARD), [&] {
        ops->delta_backward(t.z.stored(), (Stored *)(dprojected + CHANNELS + VALUES),
                            (Stored *)(dprojected + PROJECTED - HV), sums, (Summed *)(t.sums.data + 2 * state + HV),
                            behind, t.dout.stored(), t.y.stored(), gates, rates, A_log, dt_bias, before, &shape,
                            t.scratch.summed());
    });
    b.bytes("gated_norm_forward", "value heads", n, VALUES, 3.0 * n * VALUES * STORED, [&] {
        ops->gated_norm_forward(t.out.stored(), t.dout.stored(), (Stored *)(t.x.data + CHANNELS), t.k.stored(), n, HV,
                                DV, PROJECTED, 0, 1e-6);
    });
    b.bytes("gated_norm_backward", "value heads", n, VALUES, 5.0 * n * VALUES * STORED, [&] {
        ops->gated_norm_backward(t.dq.stored(), (Stored *)(dprojected + CHANNELS), sums, t.dout.stored(), t.q.stored(),
                                 (Stored *)(t.x.data + CHANNELS), t.k.stored(), n, HV, DV, PROJECTED, 0, 1e-6,
                                 t.scratch.summed());
    });
}

static void bench_mamba(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const DeltaShape shape = ssd_shape(&t.span);
    const size_t state = delta_state_elements(&shape), size = SSD_VALUES / GROUPS;
    Stored *const dt = (Stored *)(t.x.data + SSD_PROJECTED - SSD_HEADS), *const gate =
                                                                             (Stored *)(t.x.data + SSD_VALUES);
    Stored *const A_log = t.q.stored(), *const D = (Stored *)(t.q.data + SSD_HEADS), *const dt_bias = A_log;
    floatX *const dprojected = t.weight.data;
    Summed *const before = t.sums.summed(), *const behind = (Summed *)(t.sums.data + state);
    float *const sums = t.sums.data + 2 * state;
    b.flops("ssd_forward", "the last chunk", n, SSD_VALUES, n * delta_flops(&shape, DELTA_FORWARD), [&] {
        ops->ssd_forward(t.out.stored(), before, NULL, t.y.stored(), dt, A_log, D, dt_bias, &shape, t.scratch.summed());
    });
    b.flops("ssd_forward", "the state alone", n, SSD_VALUES, n * delta_flops(&shape, DELTA_STATE), [&] {
        ops->ssd_forward(NULL, before, NULL, t.y.stored(), dt, A_log, D, dt_bias, &shape, t.scratch.summed());
    });
    b.flops("ssd_backward", "the last chunk", n, SSD_VALUES, n * delta_flops(&shape, DELTA_BACKWARD), [&] {
        ops->ssd_backward(t.z.stored(), (Stored *)(dprojected + SSD_PROJECTED - SSD_HEADS), (Summed *)sums,
                          (Summed *)(sums + SSD_HEADS), (Summed *)(sums + 2 * SSD_HEADS), behind, t.dout.stored(),
                          t.y.stored(), dt, A_log, D, dt_bias, before, &shape, t.scratch.summed());
    });
    b.bytes("gated_norm_forward", "gate first", n, SSD_VALUES, 3.0 * n * SSD_VALUES * STORED, [&] {
        ops->gated_norm_forward(t.out.stored(), t.dout.stored(), gate, t.k.stored(), n, GROUPS, size, SSD_PROJECTED, 1,
                                1e-6);
    });
    b.bytes("gated_norm_backward", "gate first", n, SSD_VALUES, 5.0 * n * SSD_VALUES * STORED, [&] {
        ops->gated_norm_backward(t.dq.stored(), (Stored *)dprojected, (Summed *)sums, t.dout.stored(), t.q.stored(),
                                 gate, t.k.stored(), n, GROUPS, size, SSD_PROJECTED, 1, 1e-6, t.scratch.summed());
    });
}

static void bench_layer(const Bench &b) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    b.bytes("round_sums", "a layer", 1, LAYER, LAYER * (SUMMED + STORED),
            [&] { ops->round_sums(t.weight.stored(), t.sums.summed(), LAYER); });
    b.bytes("gradient_add", "a layer", 1, LAYER, LAYER * (SUMMED + 2 * STORED),
            [&] { ops->gradient_add(t.weight.data, FLOATX_DTYPE, t.sums.summed(), LAYER); });
    static const struct {
        const char *of;
        QuantFormat format;
    } quantised[] = {{"a layer in nf4, nested", {QUANT_NF4, 1, QUANT_BLOCK, FLOATX_DTYPE}},
                     {"a layer in mxfp4", {QUANT_MXFP4, 0, MXFP4_BLOCK, FLOATX_DTYPE}}};
    for (const auto &which : quantised)
        b.bytes("dequantise", which.of, 1, LAYER, LAYER * STORED + (double)quant_parts(which.format, LAYER).bytes,
                [&] { ops->dequantise(t.weight.stored(), t.sums.data, &which.format, LAYER); });
    b.bytes("sum_of_squares", "a layer", 1, LAYER, LAYER * STORED, [&] {
        ops->sum_of_squares((double *)(void *)t.sums.data, SQUARES_PARTS, t.weight.data, FLOATX_DTYPE, LAYER);
    });
    b.bytes("adamw", "a layer, fp32 master", 1, LAYER, LAYER * (6 * SUMMED + 2 * STORED), [&] {
        const AdamW step = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 10, 1, 0};
        ops->adamw(t.weight.stored(), t.sums.data, t.weight.data + LAYER, FLOATX_DTYPE, t.sums.data + LAYER,
                   t.sums.data + 2 * LAYER, DTYPE_FP32, LAYER, &step);
    });
    b.bytes("adamw", "a layer, fp32 master, int8 moments", 1, LAYER, LAYER * (2 * SUMMED + 2 * STORED + 4), [&] {
        AdamW step = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 10, 1, 0};
        step.m_scales = t.sums.data + 2 * LAYER, step.v_scales = step.m_scales + LAYER / MOMENT_BLOCK + 1;
        ops->adamw(t.weight.stored(), t.sums.data, t.weight.data + LAYER, FLOATX_DTYPE, t.sums.data + LAYER,
                   (char *)(t.sums.data + LAYER) + LAYER, DTYPE_INT8, LAYER, &step);
    });
    // after AdamW: this may make sums negative, but second moments never are
    b.bytes("embedding_backward", "the stream, into fp32", T, C, (double)T * C * STORED, [&] {
        ops->embedding_backward(t.sums.data, DTYPE_FP32, t.weight.stored(), t.tokens.data, T, V, C, 1.0, NO_ROW,
                                t.scratch.summed());
    });
}

// Linear layers: [rows, in] x weight[out, in]^T and its two gradients
static void bench_linear(const Bench &b, const char *of, size_t rows, size_t in, size_t out) {
    const Ops *ops = ops_device;
    const Tensors &t = b.t;
    const double flops = 2.0 * (double)rows * (double)in * (double)out;
    const auto nothing = [] {};
    b.measure(
        "linear_forward", of, rows, in, out, FLOPS, flops,
        [&] { ops->linear_forward(t.x.stored(), t.y.stored(), t.weight.stored(), NULL, NULL, rows, in, out, out); },
        nothing);
    b.measure(
        "linear_backward_input", of, rows, in, out, FLOPS, flops,
        [&] { ops->linear_backward_input(t.x.stored(), t.y.stored(), t.weight.stored(), rows, in, out, out, 0); },
        nothing);
    b.measure(
        "linear_backward_weight", of, rows, in, out, FLOPS, flops,
        [&] { ops->linear_backward_weight(t.sums.summed(), NULL, t.x.stored(), t.y.stored(), rows, in, out, out); },
        nothing);
}

static void bench_all(const Bench &b) {
    bench_elements(b);
    bench_attention(b);
    bench_wide_heads_and_sinks(b);
    bench_linear_attention(b);
    bench_mamba(b);
    bench_layer(b);
    bench_linear(b, "query", n, C, NH * HD);
    bench_linear(b, "key, value", n, C, NKV * HD);
    bench_linear(b, "output", n, NH * HD, C);
    bench_linear(b, "gate and up", n, C, 2 * FF);
    bench_linear(b, "down", n, FF, C);
    bench_linear(b, "head", m, C, V);
}

// ---- output ---------------------------------------------------------------------------------------------------------
static void report_machine(JsonOut *json) {
    json_text(json, "dtype", dtype_name(FLOATX_DTYPE));
    json_size(json, "repeats", playground.repeats);
#ifndef CUDA_ON_CPU
    const cudaDeviceProp properties = device_properties();
    int runtime, driver;
    char text[32];
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime), "asking for CUDA's version");
    CUDA_CHECK(cudaDriverGetVersion(&driver), "asking for the driver's version");
    json_text(json, "device", properties.name);
    snprintf(text, sizeof(text), "%d.%d", properties.major, properties.minor);
    json_text(json, "compute_capability", text);
    snprintf(text, sizeof(text), "%d.%d", runtime / 1000, runtime % 1000 / 10);
    json_text(json, "cuda", text);
    snprintf(text, sizeof(text), "%d.%d", driver / 1000, driver % 1000 / 10);
    json_text(json, "cuda_of_driver", text);
    json_size(json, "cublaslt", cublaslt.GetVersion());
    json_size(json, "memory_bytes", properties.totalGlobalMem);
#endif
    json_number(json, "copy_gb_per_s", playground.copy_rate * 1e-9);
    json_number(json, "product_tflop_per_s", playground.product_rate * 1e-12);
}

int main(int argc, char **argv) {
    size_t repeats = 21;
    if (argc > 2 || (argc > 1 && (!parse_size(argv[1], &repeats) || !repeats || repeats > 1000)))
        die_usage("usage: %s [REPEATS], 1 to 1000 [21]", argv[0]);
#ifndef CUDA_ON_CPU
    playground_clock(repeats);
    cublas_require();
    playground.product_rate = best_square_product();
#endif
    JsonOut json = json_open(stdout);
    report_machine(&json);
    fprintf(stderr, "copy %.1f GB/s, best square product %.1f TFLOP/s, medians of %zu runs with cold caches\n",
            playground.copy_rate * 1e-9, playground.product_rate * 1e-12, repeats);
    {
        const Tensors t;
        json_array(&json, "ops");
        bench_all(Bench{&json, t});
        json_array_end(&json);
    }
    json_finish(&json);
    return 0;
}
