/*
The gated delta rule of op set "cuda". Forward: a kernel for the parts of blocks of DELTA_BLOCK tokens that need no
state (delta_blocks.cuh), then a walk over each span's blocks that carries the state. Spans of a few tokens are walked
token by token (delta_tokens.cuh). Backward computes the same parts of blocks. Then a walk forward saves the state
before each block and each token's addition, and a walk back carries the gradient of the state. Then all blocks are
computed at once (delta_gradient.cuh). Scratch holds DELTA_SEGMENT blocks for any length of a call. Longer calls go
segment by segment, in backward from the last segment; a first walk saves the states at their borders.
*/
#ifndef LLMC_CUDA_DELTA_CUH
#define LLMC_CUDA_DELTA_CUH
#include "conv.cuh" // for without_window
#include "delta_gradient.cuh"
#include "delta_walk.cuh"

constexpr size_t DELTA_SEGMENT = GPU_DELTA_SEGMENT;
constexpr size_t SEGMENT_TOKENS = DELTA_SEGMENT * BLOCK;
constexpr size_t DELTA_FEW_TOKENS = 8; // spans of up to this many tokens are walked token by token

static DeltaCall delta_call(const Stored *x, const Stored *b, const Stored *a, const Stored *A_log,
                            const Stored *dt_bias, const DeltaShape *shape) {
    const size_t W = full_pack<floatX>, channels = delta_channels(shape);
    return DeltaCall{shape->HK,
                     shape->HV,
                     shape->K,
                     shape->V,
                     channels,
                     shape->stride,
                     shape->slot_tokens,
                     1.0f + (float)shape->doubled,
                     (const floatX *)x,
                     (const floatX *)b,
                     (const floatX *)a,
                     (const floatX *)A_log,
                     (const floatX *)dt_bias,
                     all_aligned(x) && shape->K % W == 0 && channels % W == 0,
                     NULL,
                     0.0f,
                     0.0f};
}

// ---- scratch --------------------------------------------------------------------------------------------------------
// Takes parts from a call's scratch; each begins at a multiple of 16 bytes.
struct ScratchParts {
    float *begin;
    size_t count; // elements of the parts so far
    explicit ScratchParts(Summed *scratch) : begin((float *)(((uintptr_t)scratch + 15) / 16 * 16)), count(0) {}
    float *take(size_t elements) {
        float *const at = begin + count;
        count += gpu_four(elements);
        return at;
    }
};

struct DeltaScratch {
    float *state; // copy of a state that the call overwrites before it is read
    BlockResults results;
    // backward
    float *borders; // states between segments of a span
    floatX *states, *back, *N, *dR;
    float *dq, *dk, *lines;
};

static DeltaScratch delta_lay_out(const DeltaShape *shape, bool backward, Summed *scratch) {
    const size_t n = delta_rows(shape), blocks = min_size(DELTA_SEGMENT, n), HV = shape->HV, K = shape->K;
    const size_t states = delta_state_elements(shape),
                 keys = shape->HK < HV ? blocks * shape->HK * BLOCK * ((K + 7) / 8 * 8) : 0;
    DeltaScratch s = {};
    const size_t triangle = blocks * HV * OPERANDS_OF_TRIANGLE * sizeof(OperandA) / sizeof(float);
    ScratchParts p(scratch);
    BlockResults &r = s.results;
    s.state = p.take(states);
    r.inverse = (OperandA *)p.take(triangle);
    if (!backward) r.scores = (OperandA *)p.take(triangle);
    r.gates = (BlockGates *)p.take(blocks * HV * sizeof(BlockGates) / sizeof(float));
    r.factors = (BlockFactors *)p.take(blocks * HV * sizeof(BlockFactors) / sizeof(float));
    r.lengths = (BlockLengths *)p.take(blocks * shape->HK * sizeof(BlockLengths) / sizeof(float));
    if (backward) {
        r.inverse_back = (OperandA *)p.take(triangle), r.scores_back = (OperandA *)p.take(triangle);
        s.borders = p.take(n ? (n - 1) / SEGMENT_TOKENS * states : 0);
        s.states = (floatX *)p.take(blocks * states), s.back = (floatX *)p.take(blocks * states);
        s.N = (floatX *)p.take(blocks * BLOCK * HV * shape->V), s.dR = (floatX *)p.take(blocks * BLOCK * HV * shape->V);
        s.dq = p.take(keys), s.dk = p.take(keys), s.lines = p.take(blocks * 2 * HV);
    }
    if (p.count + 4 != gpu_delta_scratch(shape, backward))
        die("internal: gpu_scratch.h has another size of the delta rule; please report it");
    return s;
}

// ---- segments -------------------------------------------------------------------------------------------------------
// A position in a call's spans. A segment takes whole spans that fit, or a part of a longer span as a span of its own.
struct DeltaPlace {
    size_t span, done; // done: tokens of the span that are done
};

struct DeltaSegment {
    Span span[MOST_SPANS];
    size_t count;
    bool cut; // 1: the last span continues in the next segment
    SpanBlocks blocks;
};

static void delta_segment(DeltaSegment *segment, Spans spans, DeltaPlace *place) {
    size_t room = DELTA_SEGMENT;
    segment->count = 0, segment->cut = false;
    while (place->span < spans.count && segment->count < MOST_SPANS && !segment->cut) {
        Span span = spans.span[place->span];
        span.begin += place->done, span.row += place->done;
        const size_t needed = blocks_for(span.end - span.begin, BLOCK);
        if (needed > room && segment->count) break;
        segment->cut = needed > room;
        if (segment->cut) span.end = span.begin + SEGMENT_TOKENS;
        room -= min_size(needed, room);
        place->done = segment->cut ? place->done + SEGMENT_TOKENS : 0, place->span += !segment->cut;
        segment->span[segment->count++] = span;
    }
    span_blocks(&segment->blocks, Spans{segment->span, segment->count, 0, 0}, all_keys, 0, BLOCK, false);
}

static void delta_blocks(const BlockResults &to, const DeltaCall &d, const SpanBlocks &blocks) {
    LAUNCH((delta_blocks_kernel), dim3(blocks.first[blocks.count], (unsigned)d.HV), DELTA_THREADS_OF_BLOCK,
           BLOCKS_BYTES)
    (to, d, blocks);
}

// Walks spans forward, from state_in to state_out, which may be the same for a single span. leaves: stores the last
// span's state, with slots every span's. tiled: uses the blocks that delta_blocks prepared in s
static void delta_walk(DeltaWalk w, const DeltaScratch &s, const DeltaCall &d, const SpanBlocks &blocks, bool leaves,
                       bool tiled) {
    w.first_in = 0, w.last_in = d.slot_tokens ? blocks.count : 1;
    w.first_out = d.slot_tokens ? 0 : leaves ? blocks.count - 1 : blocks.count;
    const bool packed =
        d.packed && d.V % full_pack<floatX> == 0 && all_aligned(w.out); // values and out are whole packs
    if (tiled)
        delta_tiled_walk(w, DeltaPairs{s.results.inverse, s.results.scores, s.results.factors, NULL, packed}, d, blocks,
                         false);
    else
        delta_tokens(w, d, blocks);
}

// Lets a walk read a copy of its first state if its last span may overwrite the state before the first span reads it.
static void copy_overwritten(DeltaWalk *w, float *copy, const DeltaCall &d, const SpanBlocks &blocks, bool leaves) {
    if (d.slot_tokens || !leaves || blocks.count == 1 || blocks.span[0].begin == blocks.span[0].document) return;
    cuda_copy(copy, w->state_in, d.HV * d.K * d.V * sizeof(float));
    w->state_in = copy;
}

// Calls walk(blocks, leaves) for a call's spans: as many as fit a launch, or with tiled a segment. leaves: the state
// after the last of these spans is wanted
template <typename F> static void spans_forward(Spans spans, bool tiled, F walk) {
    SpanBlocks blocks;
    for (size_t from = 0; from < spans.count && !tiled;) {
        from = span_blocks(&blocks, spans, all_keys, from, BLOCK, false);
        walk(blocks, from == spans.count);
    }
    DeltaSegment segment;
    for (DeltaPlace place = {}; place.span < spans.count && tiled;) {
        delta_segment(&segment, spans, &place);
        walk(segment.blocks, segment.cut || place.span == spans.count);
    }
}

// Walks a call's blocks. Updates `state` in place to the state after the last span, and `transfer` in the same way.
static void delta_forward_walk(floatX *out, Summed *state, Summed *transfer, const DeltaScratch &s, const DeltaCall &d,
                               const SpanBlocks &blocks, bool leaves, bool tiled) {
    DeltaWalk w = {(const float *)state, (float *)state, NULL, NULL, out};
    w.width = (unsigned)d.V, w.values = true;
    copy_overwritten(&w, s.state, d, blocks, leaves);
    delta_walk(w, s, d, blocks, leaves, tiled);
    if (!transfer) return;
    DeltaWalk t = {(const float *)transfer, (float *)transfer};
    t.width = (unsigned)d.K;
    delta_walk(t, s, d, blocks, true, tiled);
}

static bool has_long_span(Spans spans) {
    for (size_t i = 0; i < spans.count; i++)
        if (spans.span[i].end - spans.span[i].begin > DELTA_FEW_TOKENS) return true;
    return false;
}

static void cuda_delta_forward(Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *b,
                               const Stored *a, const Stored *A_log, const Stored *dt_bias, const DeltaShape *shape,
                               Summed *scratch) {
    const DeltaCall d = delta_call(x, b, a, A_log, dt_bias, shape);
    const DeltaScratch s = delta_lay_out(shape, false, scratch);
    const Spans spans = without_window(shape->spans);
    const bool goes_on = spans.count == 1 && spans.span[0].begin > spans.span[0].document;
    const bool tiled = walk_takes(d.K) && has_long_span(spans);
    if (transfer && !goes_on) { // a new document begins
        cuda_zero(transfer, d.HV * d.K * d.K * sizeof(float));
        transfer = NULL;
    }
    spans_forward(spans, tiled, [&](const SpanBlocks &blocks, bool leaves) {
        if (tiled) delta_blocks(s.results, d, blocks);
        delta_forward_walk((floatX *)out, state, transfer, s, d, blocks, leaves, tiled);
    });
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Computes the states between the segments of long spans, each from the previous one: walk(blocks, from, to).
template <typename F>
static void segment_borders(float *borders, Spans spans, const Summed *state, size_t states, F walk) {
    DeltaSegment segment;
    size_t border = 0;
    for (DeltaPlace place = {}; place.span < spans.count;) {
        const bool goes_on = place.done > 0;
        delta_segment(&segment, spans, &place);
        if (!segment.cut) continue;
        walk(segment.blocks, goes_on ? borders + (border - 1) * states : (const float *)state,
             borders + border * states);
        border++;
    }
}

// Calls back(segment, state before it, whether dstate is the gradient of the state after it), last segment to first.
template <typename F>
static void segments_back(const float *borders, Spans spans, const Summed *state, const DeltaShape *shape, F back) {
    const size_t most = spans.count + delta_rows(shape) / SEGMENT_TOKENS + 1, states = delta_state_elements(shape);
    DeltaPlace *const begins = (DeltaPlace *)checked_malloc(most * sizeof(DeltaPlace), "the segments of a call");
    DeltaSegment segment;
    size_t count = 0, passed = 0;
    for (DeltaPlace place = {}; place.span < spans.count; passed += segment.cut) {
        begins[count++] = place;
        delta_segment(&segment, spans, &place);
    }
    for (size_t i = count; i-- > 0;) {
        DeltaPlace place = begins[i];
        const bool goes_on = place.done > 0;
        delta_segment(&segment, spans, &place);
        passed -= segment.cut;
        back(segment, goes_on ? borders + (passed - 1) * states : (const float *)state, segment.cut || i + 1 == count);
    }
    free(begins);
}

// Prepares a walk back over a segment's spans, from dstate to dstate. after: dstate holds the gradient of the state
// after the last span
static void back_from(DeltaWalk *w, float *dstate, float *copy, const DeltaCall &d, unsigned spans, bool after) {
    w->state_in = w->state_out = dstate, w->width = (unsigned)d.V;
    w->first_in = after ? spans - 1 : spans, w->last_in = spans;
    if (!after || spans == 1) return;
    cuda_copy(copy, dstate, d.HV * d.K * d.V * sizeof(float)); // because the first span overwrites it
    w->state_in = copy;
}

struct DeltaBack {
    floatX *dx, *db, *da;
    Summed *dA_log, *ddt_bias;
    float *dstate;
    const floatX *dout;
};

// Runs a segment backward. state: the state before the segment's first span. after: dstate holds the gradient of the
// state after the segment's last span
static void delta_segment_back(const DeltaBack &to, const DeltaScratch &s, const DeltaCall &d,
                               const DeltaSegment &segment, const float *state, bool after) {
    const SpanBlocks &blocks = segment.blocks;
    const bool tiled = walk_takes(d.K), packed = all_aligned(to.dout) && d.V % full_pack<floatX> == 0;
    BlockResults results = s.results;
    if (!tiled) results.inverse_back = results.scores_back = NULL;
    if (!tiled || !to.dx) results.inverse = NULL;
    if (to.dx || tiled) delta_blocks(results, d, blocks);
    if (to.dx) {
        DeltaWalk w = {state, NULL, s.states, s.N};
        w.width = (unsigned)d.V, w.values = true;
        delta_walk(w, s, d, blocks, false, tiled);
    }
    DeltaWalk back = {NULL, NULL, to.dx ? s.back : NULL, to.dx ? s.dR : NULL, NULL, to.dout};
    back_from(&back, to.dstate, s.state, d, blocks.count, after);
    if (tiled)
        delta_tiled_walk(back, DeltaPairs{results.inverse_back, results.scores_back, results.factors, to.dout, packed},
                         d, blocks, true);
    else
        delta_tokens_back(back, d, blocks);
    if (!to.dx) return;
    const DeltaGradient gradient = {to.dx, to.db, to.da,         s.lines,         s.dq,    s.dk,  s.states, s.back,
                                    s.N,   s.dR,  results.gates, results.lengths, to.dout, packed};
    delta_gradient(gradient, d, blocks);
    const size_t lines = blocks.first[blocks.count];
    if (to.dA_log) column_sums(to.dA_log, s.lines, lines, d.HV, 2 * d.HV);
    if (to.ddt_bias) column_sums(to.ddt_bias, s.lines + d.HV, lines, d.HV, 2 * d.HV);
}

static void cuda_delta_backward(Stored *dx, Stored *db, Stored *da, Summed *dA_log, Summed *ddt_bias, Summed *dstate,
                                const Stored *dout, const Stored *x, const Stored *b, const Stored *a,
                                const Stored *A_log, const Stored *dt_bias, const Summed *state,
                                const DeltaShape *shape, Summed *scratch) {
    const DeltaCall d = delta_call(x, b, a, A_log, dt_bias, shape);
    const DeltaScratch s = delta_lay_out(shape, true, scratch);
    const Spans spans = without_window(shape->spans);
    const DeltaBack to = {(floatX *)dx, (floatX *)db,    (floatX *)da,        dA_log,
                          ddt_bias,     (float *)dstate, (const floatX *)dout};
    const auto borders = [&](const SpanBlocks &blocks, const float *from, float *to) {
        BlockResults results = s.results;
        results.inverse_back = results.scores_back = NULL;
        if (walk_takes(d.K)) delta_blocks(results, d, blocks);
        DeltaWalk w = {from, to};
        w.width = (unsigned)d.V, w.values = true;
        delta_walk(w, s, d, blocks, true, walk_takes(d.K));
    };
    if (dx) segment_borders(s.borders, spans, state, delta_state_elements(shape), borders);
    segments_back(s.borders, spans, state, shape, [&](const DeltaSegment &segment, const float *before, bool after) {
        delta_segment_back(to, s, d, segment, before, after);
    });
}

#endif
