/*
The causal convolution of linear attention, then SiLU, in op set "cuda". A thread has a pack of channels and walks a
block of tokens of one span, the last taps - 1 inputs in registers. Backward recomputes the convolution's sums. A block
also reads the taps - 1 tokens after its own: their gradients reach its inputs. Its part of dweight is a line of
scratch. Bytes moved per element: forward 2 s; backward 3 s, taps - 1 more tokens a block, lines of dweight.
*/
#ifndef LLMC_CUDA_CONV_CUH
#define LLMC_CUDA_CONV_CUH
#include "activation.cuh"
#include "attention_tiles.cuh" // blocks of spans
#include "bias.cuh"

constexpr unsigned CONV_THREADS = 128, CONV_ROWS = 16, CONV_BACK_ROWS = 64;

struct ConvShape {
    size_t channels, stride, slot_tokens;
    unsigned taps;
};

static ConvShape conv_shape(const DeltaShape *shape) {
    return ConvShape{delta_channels(shape), shape->stride, shape->slot_tokens, (unsigned)shape->taps};
}

// Returns the pack of channels at c, `back` tokens before token t of a span; zeros before its document, beyond the
// taps.
template <int W>
__device__ inline Pack<floatX, W> conv_input(const floatX *x, const floatX *columns, const Span &span, size_t t,
                                             unsigned back, size_t c, const ConvShape &s) {
    if (back >= s.taps || t - span.document < back) {
        Pack<floatX, W> none;
        for (int j = 0; j < W; j++) none.x[j] = store(0.0f);
        return none;
    }
    if (t - span.begin >= back) return pack_read<W>(x + (span.row + (t - span.begin) - back) * s.stride + c);
    const size_t slot = s.slot_tokens ? span.document / s.slot_tokens : 0,
                 row = (slot + 1) * (s.taps - 1) - (back - (t - span.begin));
    return pack_read<W>(columns + row * s.channels + c);
}

// Loads weights[j], of the input TAPS - 1 - j tokens back.
template <int W, int TAPS>
__device__ inline void conv_weights(float (&weights)[TAPS][W], const floatX *weight, size_t c, unsigned taps) {
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        for (int i = 0; i < W; i++)
            weights[j][i] = (unsigned)(TAPS - j) > taps ? 0.0f : load(weight[(c + i) * taps + taps - (TAPS - j)]);
}

template <int W, int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_forward_kernel(floatX *out, const floatX *columns, const floatX *x, const floatX *weight, SpanBlocks blocks,
                        ConvShape s) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W;
    if (c >= s.channels) return;
    const SpanBlock block = span_block(blocks, CONV_ROWS, false);
    float weights[TAPS][W];
    Pack<floatX, W> in[TAPS]; // oldest first
    conv_weights<W>(weights, weight, c, s.taps);
#pragma unroll
    for (int j = 1; j < TAPS; j++) in[j] = conv_input<W>(x, columns, block.span, block.begin, TAPS - j, c, s);
#pragma unroll 4
    for (size_t t = block.begin; t < block.end; t++) {
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) in[j] = in[j + 1];
        in[TAPS - 1] = pack_read<W>(x + (t - block.origin) * s.stride + c);
        Pack<floatX, W> result;
        for (int i = 0; i < W; i++) {
            float y = 0.0f, one_minus_s;
#pragma unroll
            for (int j = 0; j < TAPS; j++) y += weights[j][i] * load(in[j].x[i]);
            result.x[i] = store(y * sigmoid(y, &one_minus_s));
        }
        pack_write(out + (t - block.origin) * s.channels + c, result);
    }
}

// columns of a span's slot = x of the tokens before its end: first to last, as some may move up
template <int W>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_columns_kernel(floatX *columns, const floatX *x, SpanBlocks blocks, ConvShape s) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W;
    if (c >= s.channels) return;
    const Span span = blocks.span[blockIdx.x];
    const size_t slot = s.slot_tokens ? span.document / s.slot_tokens : 0;
    for (unsigned j = 0; j + 1 < s.taps; j++)
        pack_write(columns + (slot * (s.taps - 1) + j) * s.channels + c,
                   conv_input<W>(x, columns, span, span.end - 1, s.taps - 2 - j, c, s));
}

// Calls launch(W, TAPS) with constants; with fewer taps the first weights are 0.
template <typename F> static void with_conv(const DeltaShape *shape, bool aligned, F launch) {
    const bool packed = delta_channels(shape) % full_pack<floatX> == 0 && shape->stride % full_pack<floatX> == 0;
    with_width<floatX>(aligned && packed, [&](auto W) {
        if (shape->taps <= 4)
            launch(W, Width<4>());
        else
            launch(W, Width<CONV_TAPS_MAX>());
    });
}

static dim3 conv_grid(unsigned blocks, size_t channels, int W) {
    return dim3(blocks, (unsigned)blocks_for(channels, CONV_THREADS * (size_t)W));
}

static Spans without_window(Spans spans) {
    spans.window = 0;
    return spans;
}

static void cuda_conv_forward(Stored *out, Stored *columns, const Stored *x, const Stored *weight,
                              const DeltaShape *shape) {
    const ConvShape s = conv_shape(shape);
    const Spans spans = without_window(shape->spans);
    with_conv(shape, all_aligned(out, columns, x), [&](auto W, auto TAPS) {
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_ROWS, false);
            LAUNCH((conv_forward_kernel<W, TAPS>), conv_grid(blocks.first[blocks.count], s.channels, W), CONV_THREADS,
                   0)
            ((floatX *)out, (const floatX *)columns, (const floatX *)x, (const floatX *)weight, blocks, s);
        }
        // without slots only the last span's are stored
        for (size_t from = shape->slot_tokens || !spans.count ? 0 : spans.count - 1;
             from < spans.count && shape->taps > 1;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_ROWS, false);
            LAUNCH((conv_columns_kernel<W>), conv_grid(blocks.count, s.channels, W), CONV_THREADS, 0)
            ((floatX *)columns, (const floatX *)x, blocks, s);
        }
    });
}

// ---- backward -------------------------------------------------------------------------------------------------------
// With y the convolution's sum of a token, d = dout silu'(y): dx[t] = sum over later taps of weight d, dweight[j] += d
// x. dcolumns: in, gradients of the last inputs from later calls; out, of the inputs before this call.
// Computes d of a token from its inputs `in`.
template <int W, int TAPS>
__device__ inline void conv_slope(float (&d)[W], const Pack<floatX, W> (&in)[TAPS], const float (&weights)[TAPS][W],
                                  const floatX *dout) {
    const Pack<floatX, W> gradient = pack_read<W>(dout);
    for (int i = 0; i < W; i++) {
        float y = 0.0f, one_minus_s;
#pragma unroll
        for (int j = 0; j < TAPS; j++) y += weights[j][i] * load(in[j].x[i]);
        const float s = sigmoid(y, &one_minus_s);
        d[i] = load(gradient.x[i]) * (s + y * s * one_minus_s);
    }
}

// lines NULL: only dx. last: the call's last span is among these
template <int W, int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_backward_kernel(floatX *dx, float *lines, const float *dcolumns, const floatX *dout, const floatX *x,
                         const floatX *columns, const floatX *weight, SpanBlocks blocks, ConvShape s, bool last) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W;
    if (c >= s.channels) return;
    float weights[TAPS][W], dweight[TAPS][W] = {};
    conv_weights<W>(weights, weight, c, s.taps);
    for (unsigned number = blockIdx.x; number < blocks.first[blocks.count]; number += gridDim.x) {
        const unsigned i_span = span_of(blocks, number);
        const Span span = blocks.span[i_span];
        const size_t begin = span.begin + (size_t)(number - blocks.first[i_span]) * CONV_BACK_ROWS;
        const size_t end = span.end - begin > CONV_BACK_ROWS ? begin + CONV_BACK_ROWS : span.end;
        const bool call_ends = last && i_span + 1 == blocks.count;
        Pack<floatX, W> in[TAPS];
        float sums[TAPS][W] = {}; // dx of tokens t - (TAPS - 1) to t
#pragma unroll
        for (int j = 1; j < TAPS; j++) in[j] = conv_input<W>(x, columns, span, begin, TAPS - j, c, s);
#pragma unroll 2
        for (size_t t = begin; t < end + TAPS - 1; t++) {
#pragma unroll
            for (int j = 0; j + 1 < TAPS; j++) {
                in[j] = in[j + 1];
                for (int i = 0; i < W; i++) sums[j][i] = sums[j + 1][i];
            }
            for (int i = 0; i < W; i++) sums[TAPS - 1][i] = 0.0f;
            if (t < span.end) {
                float d[W];
                in[TAPS - 1] = pack_read<W>(x + (span.row + t - span.begin) * s.stride + c);
                conv_slope<W, TAPS>(d, in, weights, dout + (span.row + t - span.begin) * s.channels + c);
#pragma unroll
                for (int j = 0; j < TAPS; j++)
                    for (int i = 0; i < W; i++) {
                        sums[j][i] += d[i] * weights[j][i];
                        if (t < end) dweight[j][i] += d[i] * load(in[j].x[i]);
                    }
            }
            if (t < begin + TAPS - 1) continue;
            const size_t found = t - (TAPS - 1), behind = span.end - found; // every token that reads `found` is done
            Pack<floatX, W> result;
            for (int i = 0; i < W; i++) {
                const float carried =
                    call_ends && behind < s.taps ? dcolumns[(s.taps - 1 - behind) * s.channels + c + i] : 0.0f;
                result.x[i] = store(sums[0][i] + carried);
            }
            pack_write(dx + (span.row + found - span.begin) * s.stride + c, result);
        }
    }
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        for (int i = 0; i < W && lines && (unsigned)(TAPS - j) <= s.taps; i++)
            lines[((size_t)blockIdx.x * s.channels + c + i) * s.taps + s.taps - (TAPS - j)] = dweight[j][i];
}

// Computes dcolumns, of the call's first span; only: it is the last, too.
template <int W, int TAPS>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_dcolumns_kernel(float *dcolumns, const floatX *dout, const floatX *x, const floatX *columns,
                         const floatX *weight, Span span, ConvShape s, bool only) {
    const size_t c = ((size_t)blockIdx.y * CONV_THREADS + threadIdx.x) * W, tokens = span.end - span.begin;
    if (c >= s.channels) return;
    float weights[TAPS][W], sums[TAPS][W] = {}; // sums[back]: of the token `back` before the span's first
    Pack<floatX, W> in[TAPS];
    conv_weights<W>(weights, weight, c, s.taps);
#pragma unroll
    for (int back = 1; back < TAPS; back++) { // incoming dcolumns of token span.end - behind, before the span
        const size_t behind = back + tokens;
        for (int i = 0; i < W && only && behind < s.taps; i++)
            sums[back][i] = dcolumns[(s.taps - 1 - behind) * s.channels + c + i];
    }
#pragma unroll
    for (int j = 1; j < TAPS; j++) in[j] = conv_input<W>(x, columns, span, span.begin, TAPS - j, c, s);
#pragma unroll
    for (int t = 0; t + 1 < TAPS; t++) {
        if ((size_t)t >= tokens) break;
        float d[W];
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) in[j] = in[j + 1];
        in[TAPS - 1] = pack_read<W>(x + (span.row + t) * s.stride + c);
        conv_slope<W, TAPS>(d, in, weights, dout + (span.row + t) * s.channels + c);
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

static void cuda_conv_backward(Stored *dx, Summed *dweight, Summed *dcolumns, const Stored *dout, const Stored *x,
                               const Stored *columns, const Stored *weight, const DeltaShape *shape, Summed *scratch) {
    const ConvShape s = conv_shape(shape);
    const Spans spans = without_window(shape->spans);
    const size_t sums = s.channels * s.taps;
    float *const lines = dweight ? (float *)scratch : NULL;
    with_conv(shape, all_aligned(dx, dout, x, columns), [&](auto W, auto TAPS) {
        SpanBlocks blocks;
        for (size_t from = 0; from < spans.count;) {
            from = span_blocks(&blocks, spans, all_keys, from, CONV_BACK_ROWS, false);
            const unsigned count = (unsigned)min_size(blocks.first[blocks.count], GPU_CONV_LINES);
            LAUNCH((conv_backward_kernel<W, TAPS>), conv_grid(count, s.channels, W), CONV_THREADS, 0)
            ((floatX *)dx, lines, (const float *)dcolumns, (const floatX *)dout, (const floatX *)x,
             (const floatX *)columns, (const floatX *)weight, blocks, s, from == spans.count);
            if (dweight) column_sums(dweight, (const float *)lines, count, sums, sums);
        }
        if (spans.count && s.taps > 1)
            LAUNCH((conv_dcolumns_kernel<W, TAPS>), conv_grid(1, s.channels, W), CONV_THREADS, 0)
        ((float *)dcolumns, (const floatX *)dout, (const floatX *)x, (const floatX *)columns, (const floatX *)weight,
         spans.span[0], s, spans.count == 1);
    });
}

#endif
