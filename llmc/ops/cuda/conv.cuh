/*
The causal convolution of linear attention, then SiLU or gates, in op set "cuda". A thread has a pack of channels and
walks tokens of one span, with the last taps - 1 inputs in registers. It reads CONV_BATCH tokens before it computes the
first of them. Backward recomputes the convolution's sums. A warp also reads the taps - 1 tokens after its own: their
gradients reach its inputs. A block's part of dweight is a line of scratch. Bytes moved per element: forward 2 s;
backward 3 s, taps - 1 more tokens a warp, lines of dweight.
*/
#ifndef LLMC_CUDA_CONV_CUH
#define LLMC_CUDA_CONV_CUH
#include "activation.cuh"
#include "attention_tiles.cuh" // for blocks of spans
#include "bias.cuh"

constexpr unsigned CONV_THREADS = 128, CONV_ROWS = 16, CONV_BATCH = 4;
constexpr unsigned CONV_BACK_ROWS = 32, CONV_WARPS = 4; // backward: tokens of a warp, warps of a block

struct ConvShape {
    size_t channels, stride, slot_tokens;
    unsigned taps;
};

static ConvShape conv_shape(const DeltaShape *shape) {
    return ConvShape{delta_channels(shape), shape->stride, shape->slot_tokens, (unsigned)shape->taps};
}

// Stores a pack in global memory by one instruction. The compiler cuts ordinary stores of these loops into words.
template <int W> __device__ inline void pack_write_whole(floatX *to, const Pack<floatX, W> &pack) {
#ifdef CUDA_ON_CPU
    pack_write(cuda_on_cpu::in_global(to), pack);
#else
    if constexpr (sizeof(pack) == 16) {
        uint4 bits;
        memcpy(&bits, &pack, sizeof(bits));
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x),
                     "r"(bits.y), "r"(bits.z), "r"(bits.w)
                     : "memory");
        return;
    }
    if constexpr (sizeof(pack) == 8) {
        uint2 bits;
        memcpy(&bits, &pack, sizeof(bits));
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x), "r"(bits.y)
                     : "memory");
        return;
    }
    pack_write(to, pack);
#endif
}

// Returns the input from a token's row of x on: a pack of x, or with GATES of B x, rounded.
template <int W, int GATES> __device__ inline Pack<floatX, W> conv_read(const floatX *x, size_t channels) {
    Pack<floatX, W> in = pack_read<W>(x);
    if constexpr (GATES) {
        const Pack<floatX, W> value = pack_read<W>(x + 2 * channels);
        for (int i = 0; i < W; i++) in.x[i] = store(load(in.x[i]) * load(value.x[i]));
    }
    return in;
}

// Returns the pack of channels at c, `back` tokens before token t of a span. Zeros before its document, and beyond the
// taps.
template <int W, int GATES>
__device__ inline Pack<floatX, W> conv_input(const floatX *x, const floatX *columns, const Span &span, size_t t,
                                             unsigned back, size_t c, const ConvShape &s) {
    if (back >= s.taps || t - span.document < back) return Pack<floatX, W>{};
    if (t - span.begin >= back)
        return conv_read<W, GATES>(x + (span.row + (t - span.begin) - back) * s.stride + c, s.channels);
    const size_t slot = s.slot_tokens ? span.document / s.slot_tokens : 0,
                 row = (slot + 1) * (s.taps - 1) - (back - (t - span.begin));
    return pack_read<W>(columns + row * s.channels + c);
}

// The weights of a thread's channels: [j], of the input TAPS - 1 - j tokens back; [TAPS], the bias
template <int W, int TAPS> using ConvWeights = float[TAPS + 1][W];

template <int W, int TAPS>
__device__ inline void conv_weights(ConvWeights<W, TAPS> &weights, const floatX *weight, const floatX *bias, size_t c,
                                    unsigned taps) {
    for (int i = 0; i < W; i++) weights[TAPS][i] = bias ? load(bias[c + i]) : 0.0f;
    if (W > 1 && taps == TAPS) {
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
            const Pack<floatX, W> pack = pack_read<W>(weight + c * TAPS + i * W);
            for (int k = 0; k < W; k++) weights[(i * W + k) % TAPS][(i * W + k) / TAPS] = load(pack.x[k]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        for (int i = 0; i < W; i++)
            weights[j][i] = (unsigned)(TAPS - j) > taps ? 0.0f : load(weight[(c + i) * taps + taps - (TAPS - j)]);
}

// Returns the convolution's sum of channel i.
template <int W, int TAPS>
__device__ inline float conv_sum(const Pack<floatX, W> *in, const ConvWeights<W, TAPS> &weights, int i) {
    float y = weights[TAPS][i];
#pragma unroll
    for (int j = 0; j < TAPS; j++) y += weights[j][i] * load(in[j].x[i]);
    return y;
}

template <int W, int TAPS, int GATES>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_forward_kernel(floatX *out, const floatX *columns, const floatX *x, const floatX *weight, const floatX *bias,
                        SpanBlocks blocks, ConvShape s) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W;
    if (c >= s.channels) return;
    const SpanBlock block = span_block(blocks, CONV_ROWS, false);
    ConvWeights<W, TAPS> weights;
    Pack<floatX, W> in[TAPS - 1 + CONV_BATCH]; // oldest first
    conv_weights<W, TAPS>(weights, weight, bias, c, s.taps);
#pragma unroll
    for (int j = 0; j + 1 < TAPS; j++)
        in[j] = conv_input<W, GATES>(x, columns, block.span, block.begin, TAPS - 1 - j, c, s);
    for (size_t t = block.begin; t < block.end; t += CONV_BATCH) {
        const size_t row = t - block.origin, left = block.end - t;
#pragma unroll
        for (unsigned b = 0; b < CONV_BATCH; b++)
            in[TAPS - 1 + b] = conv_read<W, GATES>(x + (row + (b < left ? b : 0)) * s.stride + c, s.channels);
#pragma unroll
        for (unsigned b = 0; b < CONV_BATCH; b++) {
            Pack<floatX, W> result, gate;
            if (b >= left) break;
            if constexpr (GATES) gate = pack_read<W>(x + (row + b) * s.stride + s.channels + c);
            for (int i = 0; i < W; i++) {
                const float y = conv_sum<W, TAPS>(in + b, weights, i);
                if constexpr (GATES)
                    result.x[i] = store(y * load(gate.x[i]));
                else
                    result.x[i] = store(y * fast_reciprocal(1.0f + fast_exp2(-LOG2_E * y)));
            }
            pack_write_whole(out + (row + b) * s.channels + c, result);
        }
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) in[j] = in[j + CONV_BATCH];
    }
}

// Stores in the columns of a span's slot the inputs of the tokens before the span's end. Goes first to last, because
// columns may move up.
template <int W, int GATES>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_columns_kernel(floatX *columns, const floatX *x, SpanBlocks blocks, ConvShape s) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W;
    if (c >= s.channels) return;
    const Span span = span_at(blocks, blockIdx.x);
    const size_t slot = s.slot_tokens ? span.document / s.slot_tokens : 0;
    for (unsigned j = 0; j + 1 < s.taps; j++)
        pack_write_whole(columns + (slot * (s.taps - 1) + j) * s.channels + c,
                         conv_input<W, GATES>(x, columns, span, span.end - 1, s.taps - 2 - j, c, s));
}

// Calls launch(W, TAPS, GATES) with constants. With fewer taps than TAPS the first weights are 0. T: type whose full
// packs give W
template <typename T, typename F> static void with_conv(const DeltaShape *shape, bool aligned, F launch) {
    const bool packed = delta_channels(shape) % full_pack<floatX> == 0 && shape->stride % full_pack<floatX> == 0;
    with_width<T>(aligned && packed, [&](auto W) {
        const auto run = [&](auto TAPS) { shape->gates ? launch(W, TAPS, Width<1>()) : launch(W, TAPS, Width<0>()); };
        if (shape->taps <= 4)
            run(Width<4>());
        else
            run(Width<CONV_TAPS_MAX>());
    });
}

static dim3 conv_grid(unsigned blocks, size_t channels, int W, unsigned threads = CONV_THREADS) {
    return dim3(blocks, (unsigned)blocks_for(channels, threads * (size_t)W));
}

static Spans without_window(Spans spans) {
    spans.window = 0;
    return spans;
}

static void cuda_conv_forward(Stored *out, Stored *columns, const Stored *x, const Stored *weight, const Stored *bias,
                              const DeltaShape *shape) {
    const ConvShape s = conv_shape(shape);
    const Spans spans = without_window(shape->spans);
    with_conv<floatX>(shape, all_aligned(out, columns, x, weight), [&](auto W, auto TAPS, auto GATES) {
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_ROWS, false);
            LAUNCH((conv_forward_kernel<W, TAPS, GATES>), conv_grid(blocks.first[blocks.count], s.channels, W),
                   CONV_THREADS, 0)
            ((floatX *)out, (const floatX *)columns, (const floatX *)x, (const floatX *)weight, (const floatX *)bias,
             blocks, s);
        }
        // without slots only the last span's columns are stored
        for (size_t from = shape->slot_tokens || !spans.count ? 0 : spans.count - 1;
             from < spans.count && shape->taps > 1;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_ROWS, false);
            LAUNCH((conv_columns_kernel<W, GATES>), conv_grid(blocks.count, s.channels, W), CONV_THREADS, 0)
            ((floatX *)columns, (const floatX *)x, blocks, s);
        }
    });
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Computes d of a token from its inputs `in`. With y the convolution's sum of a token, d = dout silu'(y), or with GATES
// d = dout C; dgate = dout y. Then dx[t] = sum over later taps of weight d, and dweight[j] += d x. dcolumns: in,
// gradients of the last inputs from later calls; out, gradients of the inputs before this call
template <int W, int TAPS, int GATES>
__device__ inline void conv_slope(float (&d)[W], Pack<floatX, W> &dgate, const Pack<floatX, W> *in,
                                  const ConvWeights<W, TAPS> &weights, const Pack<floatX, W> &dout,
                                  const Pack<floatX, W> &gate) {
    for (int i = 0; i < W; i++) {
        const float y = conv_sum<W, TAPS>(in, weights, i);
        if constexpr (GATES) {
            d[i] = load(dout.x[i]) * load(gate.x[i]), dgate.x[i] = store(load(dout.x[i]) * y);
        } else { // s: the logistic function of y; e / (1 + e) = 1 - s
            const float e = fast_exp2(fminf(-LOG2_E * y, 125.0f)), s = fast_reciprocal(1.0f + e);
            d[i] = load(dout.x[i]) * s * (1.0f + y * (e * s));
        }
    }
}

// B and x of a token, with GATES
template <int W> struct ConvFactors { Pack<floatX, W> b, value; };

// Stores the gradient of a token's input in the token's row of dx: as it is, or with GATES as dB and dx.
template <int W, int GATES>
__device__ inline void conv_write(floatX *dx, const ConvFactors<W> &x, const float (&sum)[W], size_t channels) {
    Pack<floatX, W> result;
    for (int i = 0; i < W; i++) result.x[i] = store(sum[i]);
    if constexpr (GATES) {
        for (int i = 0; i < W; i++) result.x[i] = store(sum[i] * load(x.b.x[i]));
        pack_write_whole(dx + 2 * channels, result);
        for (int i = 0; i < W; i++) result.x[i] = store(sum[i] * load(x.value.x[i]));
    }
    pack_write_whole(dx, result);
}

// Runs backward. lines, bias_lines: parts of dweight and dbias; NULL: not wanted. last: these spans include the call's
// last span. A warp takes pieces of CONV_BACK_ROWS tokens.
template <int W, int TAPS, int GATES, bool BIASED>
__global__ void __launch_bounds__(CONV_WARPS *LANES, TAPS == 4 ? 4 : 1)
    conv_backward_kernel(floatX *dx, float *lines, float *bias_lines, const float *dcolumns, const floatX *dout,
                         const floatX *x, const floatX *columns, const floatX *weight, const floatX *bias,
                         SpanBlocks blocks, ConvShape s, bool last) {
    constexpr unsigned BATCH = GATES ? 2 : CONV_BATCH; // registers hold three packs of a token with gates
    SHARED(float, parts, CONV_WARPS *(TAPS + BIASED) * W * LANES);
    const size_t c = ((size_t)blockIdx.y * LANES + threadIdx.x) * W;
    const unsigned pieces = c < s.channels ? blocks.first[blocks.count] : 0;
    ConvWeights<W, TAPS> weights, dweight = {};
    if (pieces) conv_weights<W, TAPS>(weights, weight, BIASED ? bias : NULL, c, s.taps);
    for (unsigned piece = blockIdx.x * CONV_WARPS + threadIdx.y; piece < pieces; piece += gridDim.x * CONV_WARPS) {
        const unsigned i_span = span_of(blocks, piece);
        const Span span = blocks.span[i_span];
        const size_t begin = span.begin + (size_t)(piece - blocks.first[i_span]) * CONV_BACK_ROWS;
        const size_t row = span.row + (begin - span.begin), left = span.end - begin;
        // From here on tokens count from `begin`.
        const unsigned end = left < CONV_BACK_ROWS ? (unsigned)left : CONV_BACK_ROWS;
        const unsigned span_end = left < CONV_BACK_ROWS + TAPS ? (unsigned)left : CONV_BACK_ROWS + TAPS;
        const bool call_ends = last && i_span + 1 == blocks.count;
        Pack<floatX, W> in[TAPS - 1 + BATCH];
        float sums[TAPS - 1 + BATCH][W] = {}; // dx of tokens from t - (TAPS - 1) on
        size_t x_at = row * s.stride + c, dout_at = row * s.channels + c, dx_at = x_at - (TAPS - 1) * s.stride;
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) in[j] = conv_input<W, GATES>(x, columns, span, begin, TAPS - 1 - j, c, s);
        for (unsigned t = 0; t < end + TAPS - 1; t += BATCH) {
            Pack<floatX, W> gradient[BATCH], gate[BATCH], value[BATCH]; // 0 after the span, so d is 0 there, too
            const size_t first_at = x_at;
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++, x_at += s.stride, dout_at += s.channels) {
                in[TAPS - 1 + b] = gradient[b] = gate[b] = value[b] = Pack<floatX, W>{};
                if (t + b >= span_end) continue;
                in[TAPS - 1 + b] = pack_read<W>(x + x_at);
                if constexpr (GATES) gate[b] = pack_read<W>(x + x_at + s.channels);
                if constexpr (GATES) value[b] = pack_read<W>(x + x_at + 2 * s.channels);
                gradient[b] = pack_read<W>(dout + dout_at);
            }
#pragma unroll
            for (unsigned b = 0; b < BATCH && GATES; b++)
                for (int i = 0; i < W; i++)
                    in[TAPS - 1 + b].x[i] = store(load(in[TAPS - 1 + b].x[i]) * load(value[b].x[i]));
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                float d[W];
                Pack<floatX, W> dgate;
                conv_slope<W, TAPS, GATES>(d, dgate, in + b, weights, gradient[b], gate[b]);
                if (GATES && t + b < end) pack_write_whole(dx + first_at + b * s.stride + s.channels, dgate);
#pragma unroll
                for (int j = 0; j < TAPS; j++)
                    for (int i = 0; i < W; i++) {
                        sums[b + j][i] += d[i] * weights[j][i];
                        if (t + b < end) dweight[j][i] += d[i] * load(in[b + j].x[i]);
                    }
                for (int i = 0; i < W && BIASED && t + b < end; i++) dweight[TAPS][i] += d[i];
            }
            if (call_ends && t + BATCH > span_end) { // the last batch at the end of a span
#pragma unroll
                for (unsigned b = 0; b < BATCH; b++)
                    if (const unsigned gap = span_end - (t + b - (TAPS - 1)); gap - 1 < s.taps - 1)
                        for (int i = 0; i < W; i++) sums[b][i] += dcolumns[(s.taps - 1 - gap) * s.channels + c + i];
            }
            const auto is_done = [&](unsigned b) { return t + b >= TAPS - 1 && t + b < end + TAPS - 1; };
            ConvFactors<W> factors[BATCH];
#pragma unroll
            for (unsigned b = 0; b < BATCH && GATES; b++)
                if (const floatX *const from = x + dx_at + b * s.stride; is_done(b))
                    factors[b] = ConvFactors<W>{pack_read<W>(from), pack_read<W>(from + 2 * s.channels)};
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++, dx_at += s.stride) // stores dx of tokens whose readers are done
                if (is_done(b)) conv_write<W, GATES>(dx + dx_at, factors[b], sums[b], s.channels);
#pragma unroll
            for (int j = 0; j < TAPS - 1 + (int)BATCH; j++)
                for (int i = 0; i < W; i++) sums[j][i] = j + 1 < TAPS ? sums[j + BATCH][i] : 0.0f;
#pragma unroll
            for (int j = 0; j + 1 < TAPS; j++) in[j] = in[j + BATCH];
        }
    }
    float *const own = parts + (threadIdx.y * LANES + threadIdx.x);
#pragma unroll
    for (int j = 0; j < TAPS + BIASED; j++)
        for (int i = 0; i < W; i++) own[(j * W + i) * CONV_WARPS * LANES] = dweight[j][i];
    __syncthreads();
    for (int k = threadIdx.y; k < (TAPS + BIASED) * W && pieces; k += CONV_WARPS) {
        const int back = TAPS - 1 - k / W; // tokens from the weight's input to its output
        const float *const part = parts + k * CONV_WARPS * LANES + threadIdx.x;
        float sum = 0.0f;
        for (unsigned warp = 0; warp < CONV_WARPS; warp++) sum += part[warp * LANES];
        if (BIASED && k / W == TAPS && bias_lines) bias_lines[(size_t)blockIdx.x * s.channels + c + k % W] = sum;
        if ((unsigned)back < s.taps && lines)
            lines[((size_t)blockIdx.x * s.channels + c + k % W) * s.taps + s.taps - 1 - back] = sum;
    }
}

// Computes dcolumns of the call's first span. only: it is the last span, too
template <int W, int TAPS, int GATES>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_dcolumns_kernel(float *dcolumns, const floatX *dout, const floatX *x, const floatX *columns,
                         const floatX *weight, const floatX *bias, Span span, ConvShape s, bool only) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W, tokens = span.end - span.begin;
    if (c >= s.channels) return;
    ConvWeights<W, TAPS> weights;
    float sums[TAPS][W] = {}; // sums[back]: gradient of the token `back` before the span's first
    Pack<floatX, W> in[TAPS];
    conv_weights<W, TAPS>(weights, weight, bias, c, s.taps);
#pragma unroll
    for (int back = 1; back < TAPS; back++) { // adds the incoming dcolumns of the token `gap` before span.end
        const size_t gap = back + tokens;
        for (int i = 0; i < W && only && gap < s.taps; i++)
            sums[back][i] = dcolumns[(s.taps - 1 - gap) * s.channels + c + i];
    }
#pragma unroll
    for (int j = 1; j < TAPS; j++) in[j] = conv_input<W, GATES>(x, columns, span, span.begin, TAPS - j, c, s);
#pragma unroll
    for (int t = 0; t + 1 < TAPS; t++) {
        if ((size_t)t >= tokens) break;
        float d[W];
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) in[j] = in[j + 1];
        const floatX *const own = x + (span.row + t) * s.stride + c;
        Pack<floatX, W> gate, dgate;
        in[TAPS - 1] = conv_read<W, GATES>(own, s.channels);
        if constexpr (GATES) gate = pack_read<W>(own + s.channels);
        conv_slope<W, TAPS, GATES>(d, dgate, in, weights, pack_read<W>(dout + (span.row + t) * s.channels + c), gate);
#pragma unroll
        for (int back = 1; back + t < TAPS; back++)
            for (int i = 0; i < W; i++) sums[back][i] += d[i] * weights[TAPS - 1 - back - t][i];
    }
#pragma unroll
    for (int back = 1; back < TAPS; back++)
        for (int i = 0; i < W && (unsigned)back < s.taps; i++)
            dcolumns[(s.taps - 1 - back) * s.channels + c + i] =
                span.begin - span.document >= (size_t)back ? sums[back][i] : 0.0f;
}

static void cuda_conv_backward(Stored *dx, Summed *dweight, Summed *dbias, Summed *dcolumns, const Stored *dout,
                               const Stored *x, const Stored *columns, const Stored *weight, const Stored *bias,
                               const DeltaShape *shape, Summed *scratch) {
    const ConvShape s = conv_shape(shape);
    const Spans spans = without_window(shape->spans);
    const size_t sums = s.channels * s.taps;
    float *const lines = dweight ? (float *)scratch : NULL;
    with_conv<float>(shape, all_aligned(dx, dout, x, columns, weight), [&](auto W, auto TAPS, auto GATES) {
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_BACK_ROWS, false);
            const unsigned count =
                (unsigned)min_size(blocks_for(blocks.first[blocks.count], CONV_WARPS), GPU_CONV_LINES);
            float *const bias_lines = dbias ? (float *)scratch + count * sums : NULL;
            const auto run = [&](auto BIASED) {
                LAUNCH((conv_backward_kernel<W, TAPS, GATES, BIASED>), conv_grid(count, s.channels, W, LANES),
                       dim3(LANES, CONV_WARPS), 0)
                ((floatX *)dx, lines, bias_lines, (const float *)dcolumns, (const floatX *)dout, (const floatX *)x,
                 (const floatX *)columns, (const floatX *)weight, (const floatX *)bias, blocks, s, from == spans.count);
            };
            if (bias)
                run(std::true_type());
            else
                run(std::false_type());
            if (dweight) column_sums(dweight, (const float *)lines, count, sums, sums);
            if (dbias) column_sums(dbias, (const float *)bias_lines, count, s.channels, s.channels);
        }
        if (spans.count && s.taps > 1)
            LAUNCH((conv_dcolumns_kernel<W, TAPS, GATES>), conv_grid(1, s.channels, W), CONV_THREADS, 0)
        ((float *)dcolumns, (const floatX *)dout, (const floatX *)x, (const floatX *)columns, (const floatX *)weight,
         (const floatX *)bias, spans.span[0], s, spans.count == 1);
    });
}

#endif
