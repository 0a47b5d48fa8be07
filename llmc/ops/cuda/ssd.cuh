/*
Mamba-2's rule of op set "cuda": forward, a kernel for the blocks' gates and scores, then a walk over each span's blocks
that carries the state (ssd_walk.cuh); spans of a few tokens token by token (delta_tokens.cuh). Backward, a walk forward
that saves the state before each block, a walk back that carries the state's gradient and computes dv, then all blocks
at once (ssd_gradient.cuh). Segments, and the states at their borders, are the gated delta rule's (delta.cuh).
*/
#ifndef LLMC_CUDA_SSD_CUH
#define LLMC_CUDA_SSD_CUH
#include "delta.cuh"
#include "ssd_gradient.cuh"

static DeltaCall ssd_call(const Stored *x, const Stored *dt, const Stored *A_log, const Stored *D,
                          const Stored *dt_bias, const DeltaShape *shape) {
    DeltaCall d = delta_call(x, NULL, dt, A_log, dt_bias, shape);
    if (d.K > WALK_MOST_K && SSD_MOST_BYTES > walk_limit())
        die("ssm_state_size is %zu, but in fp32 this GPU has shared memory for at most %d; use the bf16 build", d.K,
            WALK_MOST_K);
    d.D = (const floatX *)D, d.least = (float)shape->least, d.most = (float)shape->most;
    d.packed = d.packed && d.V % full_pack<floatX> == 0;
    return d;
}

struct SsdScratch {
    float *state; // copy of a state that the call overwrites before it is read
    BlockResults results;
    // backward
    float *borders, *lines, *steps;
    floatX *states, *back;
};

static SsdScratch ssd_lay_out(const DeltaShape *shape, bool backward, Summed *scratch) {
    const size_t n = delta_rows(shape), blocks = min_size(DELTA_SEGMENT, n), each = blocks * shape->HV;
    const size_t states = delta_state_elements(shape), F = sizeof(float);
    SsdScratch s = {};
    ScratchParts p(scratch);
    s.state = p.take(states);
    s.results.scores = (OperandA *)p.take(each * OPERANDS_OF_TRIANGLE * sizeof(OperandA) / F);
    s.results.scores_back = s.results.scores;
    s.results.factors = (BlockFactors *)p.take(each * sizeof(BlockFactors) / F);
    if (backward) {
        s.results.gates = (BlockGates *)p.take(each * sizeof(BlockGates) / F);
        s.borders = p.take(n ? (n - 1) / SEGMENT_TOKENS * states : 0);
        s.states = (floatX *)p.take(blocks * states), s.back = (floatX *)p.take(blocks * states);
        s.lines = p.take(3 * each), s.steps = p.take(shape->K > WALK_MOST_K ? each * BLOCK * 2 : 0);
    }
    if (p.count + 4 != gpu_ssd_scratch(shape, backward))
        die("internal: gpu_scratch.h has another size of Mamba-2's rule; please report it");
    return s;
}

// Computes the gates, factors and, if wanted, scores of blocks.
static void ssd_blocks(BlockResults to, const DeltaCall &d, const SpanBlocks &blocks, bool scores, bool back) {
    const dim3 grid(blocks.first[blocks.count], (unsigned)d.HK);
    if (!scores) to.scores = to.scores_back = NULL;
    if (back)
        LAUNCH((ssd_blocks_kernel<true>), grid, DELTA_THREADS_OF_BLOCK, BLOCKS_BYTES)(to, d, blocks);
    else
        LAUNCH((ssd_blocks_kernel<false>), grid, DELTA_THREADS_OF_BLOCK, BLOCKS_BYTES)(to, d, blocks);
}

// Walks spans forward like delta_walk.
static void ssd_walk(DeltaWalk w, const SsdScratch &s, const DeltaCall &d, const SpanBlocks &blocks, bool leaves,
                     bool tiled) {
    w.first_in = 0, w.last_in = d.slot_tokens ? blocks.count : 1;
    w.first_out = d.slot_tokens ? 0 : leaves ? blocks.count - 1 : blocks.count;
    w.width = (unsigned)d.V, w.values = true;
    if (tiled) {
        ssd_blocks(s.results, d, blocks, w.out != NULL, false);
        ssd_tiled_walk(w, DeltaPairs{NULL, s.results.scores, s.results.factors, NULL, d.packed && all_aligned(w.out)},
                       d, blocks, false);
    } else {
        delta_tokens<true>(w, d, blocks);
    }
}

static void cuda_ssd_forward(Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *dt,
                             const Stored *A_log, const Stored *D, const Stored *dt_bias, const DeltaShape *shape,
                             Summed *scratch) {
    const DeltaCall d = ssd_call(x, dt, A_log, D, dt_bias, shape);
    const SsdScratch s = ssd_lay_out(shape, false, scratch);
    const Spans spans = without_window(shape->spans);
    const bool goes_on = spans.count == 1 && spans.span[0].begin > spans.span[0].document;
    if (transfer && !goes_on) { // a new document begins
        cuda_zero(transfer, d.HV * sizeof(float));
        transfer = NULL;
    }
    const bool tiled = has_long_span(spans);
    spans_forward(spans, tiled, [&](const SpanBlocks &blocks, bool leaves) {
        DeltaWalk w = {(const float *)state, (float *)state, NULL, NULL, (floatX *)out};
        w.transfer = (float *)transfer;
        copy_overwritten(&w, s.state, d, blocks, leaves);
        ssd_walk(w, s, d, blocks, leaves, tiled);
    });
}

// ---- backward -------------------------------------------------------------------------------------------------------
struct SsdBack {
    floatX *dx, *ddt;
    Summed *dA_log, *dD, *ddt_bias;
    float *dstate;
    const floatX *dout;
};

// Runs a segment backward like delta_segment_back.
static void ssd_segment_back(const SsdBack &to, const SsdScratch &s, const DeltaCall &d, const SpanBlocks &blocks,
                             const float *state, bool after) {
    const size_t lines = blocks.first[blocks.count], width = 3 * d.HV;
    const bool packed = all_aligned(to.dx, to.dout) && d.V % full_pack<floatX> == 0;
    if (to.dx) ssd_walk(DeltaWalk{state, NULL, s.states}, s, d, blocks, false, true);
    DeltaWalk back = {NULL, NULL, s.back, NULL, to.dx, to.dout};
    back_from(&back, to.dstate, s.state, d, blocks.count, after);
    ssd_blocks(s.results, d, blocks, to.dx != NULL, true);
    ssd_tiled_walk(back, DeltaPairs{NULL, s.results.scores_back, s.results.factors, to.dout, packed}, d, blocks, true);
    if (!to.dx) return;
    ssd_gradient(SsdGradient{to.dx, to.ddt, s.lines, s.steps, s.states, s.back, s.results.gates, d.x, to.dout, packed},
                 d, blocks);
    if (to.dA_log) column_sums(to.dA_log, s.lines, lines, d.HV, width);
    if (to.dD) column_sums(to.dD, s.lines + d.HV, lines, d.HV, width);
    if (to.ddt_bias) column_sums(to.ddt_bias, s.lines + 2 * d.HV, lines, d.HV, width);
}

static void cuda_ssd_backward(Stored *dx, Stored *ddt, Summed *dA_log, Summed *dD, Summed *ddt_bias, Summed *dstate,
                              const Stored *dout, const Stored *x, const Stored *dt, const Stored *A_log,
                              const Stored *D, const Stored *dt_bias, const Summed *state, const DeltaShape *shape,
                              Summed *scratch) {
    const DeltaCall d = ssd_call(x, dt, A_log, D, dt_bias, shape);
    const SsdScratch s = ssd_lay_out(shape, true, scratch);
    const Spans spans = without_window(shape->spans);
    const SsdBack to = {(floatX *)dx, (floatX *)ddt, dA_log, dD, ddt_bias, (float *)dstate, (const floatX *)dout};
    if (dx)
        segment_borders(s.borders, spans, state, delta_state_elements(shape),
                        [&](const SpanBlocks &blocks, const float *from, float *end) {
                            ssd_walk(DeltaWalk{from, end}, s, d, blocks, true, true);
                        });
    segments_back(s.borders, spans, state, shape, [&](const DeltaSegment &segment, const float *before, bool after) {
        ssd_segment_back(to, s, d, segment.blocks, before, after);
    });
}

#endif
