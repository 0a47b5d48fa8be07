/*
Op set "cpu": Mamba-2's rule (arXiv 2405.21060), forward and backward (contract in op_list.h), in blocks of DELTA_BLOCK
tokens from a span's first on. It is the delta rule (delta.h) without the system: u = step v. With c, D and S of
delta.h,

    P_ij = q_i . k_j D_ij, j <= i              out = exp(c) q S + P u + skip v        (skip: the op's D)
                                               S' = exp(c_last) S + (exp(c_last - c) k)^T u

and its gradient, with dS' the gradient of S',

    du = P^T dout + exp(c_last - c) k dS'      dv = step du + skip dout               dP = dout u^T
    dq = exp(c) dout S^T + (dP D) k            dk = (dP D)^T q + exp(c_last - c) u dS'^T
    dS = exp(c_last) dS' + (exp(c) q)^T dout   dstep = du . v - exp(A_log) dlog

The gradient of a log decay (dlog) sums the terms that the token's decay scales: no difference of larger sums. Buffers,
threads and history are the delta rule's.
*/
#ifndef LLMC_CPU_SSD_H
#define LLMC_CPU_SSD_H
#include "delta.h"

static size_t cpu_ssd_forward_scratch(const DeltaShape *shape) { return cpu_delta_forward_scratch(shape); }
static size_t cpu_ssd_backward_scratch(const DeltaShape *shape) { return cpu_delta_backward_scratch(shape); }

// Returns where a key head's row of k begins in x; the row of q is HK*K after it.
static size_t ssd_key_at(const Delta *d, size_t key) { return d->row * d->W + d->shape->HV * d->V + key * d->K; }
static const floatX *ssd_value_row(const Delta *d, size_t head) { return d->x + d->row * d->W + head * d->V; }

// Packs a key head's keys and, if queries is 1, its queries; computes q k^T.
static void ssd_open_keys(Delta *d, size_t key, size_t row, size_t tokens, int queries) {
    d->row = row, d->tokens = tokens, d->rows = padded_rows(tokens);
    const floatX *k = d->x + ssd_key_at(d, key);
    delta_pack(d->k, k, tokens, d->rows, d->W, d->K);
    if (!queries) return;
    delta_transpose(d->kt, DELTA_STRIDE, d->k, d->wide_k, d->rows, d->K);
    delta_pack(d->q, k + d->shape->HK * d->K, tokens, d->rows, d->W, d->K);
    BlockProduct p = {.c = d->scores, .a = d->q, .b = d->kt, .rows = d->rows, .length = d->K, .columns = d->rows};
    p.c_stride = p.b_stride = DELTA_STRIDE, p.a_stride = d->wide_k, p.lower = 1;
    block_product(&p);
}

// Computes a head's steps and decays and, unless P is NULL, the block's pairs.
static void ssd_open_head(Delta *d, size_t head, floatS *P, floatS *D) {
    const DeltaShape *s = d->shape;
    ssd_gates(&d->gates, d->a + d->row * s->stride + head, s->stride, d->A_log[head], d->dt_bias[head], s->least,
              s->most, d->tokens, d->rows);
    if (P) delta_decays(NULL, P, D, NULL, d->scores, &d->gates, d->tokens, d->rows);
    delta_scale_rows(d->k_end, d->k, d->gates.to_end, d->rows, d->wide_k);
}

// ---- forward --------------------------------------------------------------------------------------------------------

static void ssd_forward_block(Delta *d, const DeltaForward *f, size_t first, int fresh) {
    for (size_t i = 0; i < f->heads; i++) {
        const size_t head = first + i, row = d->shape->HV * d->V;
        const floatX *v = ssd_value_row(d, head);
        floatS *S = d->states + i * d->rows_k * d->wide_v;
        ssd_open_head(d, head, f->out ? d->P : NULL, NULL);
        delta_values(d->u, v, d->W, &d->gates, d->tokens, d->rows, d->V, 1);
        if (f->out) {
            if (!fresh) delta_times_state(d->out, d->q, S, d->K, d->V, d->rows, NULL);
            delta_triangle(d->out, d->P, d->u, d->V, d->rows, 0, fresh ? NULL : d->gates.from_begin, 1);
            ssd_unpack(f->out + d->row * row + head * d->V, row, d->out, v, d->W, load(f->skip[head]), d->tokens, d->V);
        }
        delta_block_state(d, S, d->u, d->V, fresh);
        if (f->transfer) f->transfer[head] *= d->gates.whole;
    }
}

// Walks a span token by token and updates the stored state in place.
static void ssd_forward_steps(Delta *d, const DeltaForward *f, const Span *span, size_t first) {
    const size_t K = d->K, V = d->V;
    for (size_t t = 0; t < span->end - span->begin; t++) {
        ssd_open_keys(d, first / d->group, span->row + t, 1, 1);
        for (size_t head = first; head < first + f->heads; head++) {
            ssd_open_head(d, head, NULL, NULL);
            ssd_step(f->state + (delta_slot(d->shape, span) * d->shape->HV + head) * K * V,
                     f->out ? f->out + (d->row * d->shape->HV + head) * V : NULL, d->k, d->q, ssd_value_row(d, head),
                     d->gates.beta[0], d->gates.whole, load(f->skip[head]), K, V);
            if (f->transfer) f->transfer[head] *= d->gates.whole;
        }
    }
}

static void ssd_forward_span(Delta *d, const DeltaForward *f, const Span *span, size_t first) {
    const size_t K = d->K, V = d->V, tokens = span->end - span->begin, size = d->rows_k * d->wide_v;
    floatS *state = f->state + (delta_slot(d->shape, span) * d->shape->HV + first) * K * V;
    const int fresh = span->begin == span->document;
    for (size_t i = 0; i < f->heads && fresh && f->transfer; i++) f->transfer[first + i] = 0;
    if (tokens <= DELTA_STEPS) {
        if (fresh) memset(state, 0, f->heads * K * V * sizeof(floatS));
        ssd_forward_steps(d, f, span, first);
        return;
    }
    for (size_t i = 0; i < f->heads && !fresh; i++) delta_open_state(d->states + i * size, state + i * K * V, K, V);
    for (size_t at = 0; at < tokens; at += DELTA_BLOCK) {
        ssd_open_keys(d, first / d->group, span->row + at, min_size(DELTA_BLOCK, tokens - at), f->out != NULL);
        ssd_forward_block(d, f, first, fresh && !at);
    }
    for (size_t i = 0; i < f->heads; i++) delta_close_state(state + i * K * V, d->states + i * size, K, V);
}

static void cpu_ssd_forward(Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *dt,
                            const Stored *A_log, const Stored *D, const Stored *dt_bias, const DeltaShape *shape,
                            Summed *scratch) {
    Delta call = delta_call(x, NULL, dt, A_log, dt_bias, shape);
    const size_t threads = delta_threads(shape->HV), share = delta_cut(&call, NULL, 0);
    floatS *memory = cache_line_aligned(scratch);
    const DeltaForward f = {(floatX *)out, (floatS *)state, (floatS *)transfer, threads > shape->HK ? 1 : call.group,
                            (const floatX *)D};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (delta_is_large(shape))
    for (size_t first = 0; first < shape->HV; first += f.heads) {
        Delta d = call;
        delta_cut(&d, memory + (size_t)omp_get_thread_num() * share, 0);
        for (size_t i = 0; i < shape->spans.count; i++) ssd_forward_span(&d, &f, &shape->spans.span[i], first);
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Saves the transposed state before each block of a span, and the block's u.
static void ssd_record(Delta *d, const DeltaBackward *g, const Span *span, size_t key) {
    const size_t tokens = span->end - span->begin, size = d->rows_k * d->wide_v;
    const int fresh = span->begin == span->document;
    for (size_t i = 0; i < d->group && !fresh; i++)
        delta_open_state(d->states + i * size, g->state + (key * d->group + i) * d->K * d->V, d->K, d->V);
    for (size_t at = 0; at < tokens; at += DELTA_BLOCK) {
        const size_t block = at / DELTA_BLOCK;
        ssd_open_keys(d, key, span->row + at, min_size(DELTA_BLOCK, tokens - at), 0);
        for (size_t i = 0; i < d->group; i++) {
            floatS *S = d->states + i * size, *u = history_values(d, block, i);
            if (!fresh || at) delta_transpose(history_state(d, block, i), d->wide_k, S, d->wide_v, d->rows_k, d->V);
            ssd_open_head(d, key * d->group + i, NULL, NULL);
            delta_values(u, ssd_value_row(d, key * d->group + i), d->W, &d->gates, d->tokens, d->rows, d->V, 1);
            if (at + DELTA_BLOCK < tokens) delta_block_state(d, S, u, d->V, fresh && !at);
        }
    }
}

// Stores a head's gradients of dt in a block, from dstep without the decays' part, and dlog.
static void ssd_store_steps(const Delta *d, const DeltaBackward *g, size_t head, const floatS *dstep,
                            const double *dlog, double dskip) {
    double dA_log = 0, ddt_bias = 0;
    for (size_t t = 0; t < d->tokens; t++) {
        const double to_dt = ((double)dstep[t] - dlog[t] * d->gates.rate) * d->gates.slope[t];
        g->da[(d->row + t) * d->shape->stride + head] = store((floatS)to_dt);
        dA_log += dlog[t] * d->gates.log_decay[t], ddt_bias += to_dt;
    }
    if (g->dA_log) g->dA_log[head] += (floatS)dA_log;
    if (g->ddt_bias) g->ddt_bias[head] += (floatS)ddt_bias;
    if (g->dD) g->dD[head] += (floatS)dskip;
}

// Adds a value head's share to dq, dk and dscores. Computes its dv, and the gradients of its steps. u, S, dS: as of
// delta_block_inputs
static void ssd_block_inputs(Delta *d, const DeltaBackward *g, size_t head, const floatS *u, const floatS *S,
                             const floatS *dS) {
    const DeltaGates *gates = &d->gates;
    const floatX *v = ssd_value_row(d, head);
    double dlog[DELTA_BLOCK], read = 0, written = 0; // as of delta_block_inputs
    floatS by_q[DELTA_BLOCK] = {0}, to_state[DELTA_BLOCK] = {0}, dstep[DELTA_BLOCK];
    // 1. the block's own pairs
    delta_transpose(d->ut, DELTA_STRIDE, u, d->wide_v, d->rows, d->V);
    delta_pairs(d, d->dP, d->dout);
    delta_decays_back(d->dscores, NULL, NULL, dlog, d->dP, NULL, NULL, d->P, d->D, NULL, gates, d->tokens);
    // 2. the states before and after the block
    if (S) {
        delta_times_state(d->z, d->dout, S, d->V, d->K, d->rows, NULL);
        delta_add_rows(d->dq, by_q, d->z, d->q, gates->from_begin, d->rows, d->K);
    }
    if (dS) {
        delta_transpose(d->dS_transposed, d->wide_k, dS, d->wide_v, d->rows_k, d->V);
        delta_times_state(d->z, u, d->dS_transposed, d->V, d->K, d->rows, NULL);
        delta_add_rows(d->dk, to_state, d->z, d->k, gates->to_end, d->rows, d->K);
        if (S) written = (double)gates->whole * delta_state_dot(d, S, d->dS_transposed);
    }
    // 3. values and steps
    const double dskip = ssd_values_back(g->dx + (v - d->x), dstep, d->r, d->dout, v, gates->beta, load(g->D[head]),
                                         d->tokens, d->W, d->V);
    for (size_t t = 0; t < d->tokens; t++)
        dlog[t] += written, written += (double)gates->to_end[t] * (double)to_state[t];
    for (size_t t = d->tokens; t-- > 0;) read += (double)gates->from_begin[t] * (double)by_q[t], dlog[t] += read;
    ssd_store_steps(d, g, head, dstep, dlog, dskip);
}

// Finishes the gradients of a key head's queries and keys, from all value heads.
static void ssd_close_keys(Delta *d, const DeltaBackward *g, size_t key) {
    floatX *dk = g->dx + ssd_key_at(d, key);
    delta_triangle(d->dq, d->dscores, d->k, d->K, d->rows, 0, scale_one, 0);
    delta_triangle(d->dk, d->dscores, d->q, d->K, d->rows, 1, scale_one, 0);
    delta_unpack(dk, d->W, d->dk, d->tokens, d->K);
    delta_unpack(dk + d->shape->HK * d->K, d->W, d->dq, d->tokens, d->K);
}

// Runs a block backward. dS becomes the gradient of the state before it. fresh: that state is 0; last: dS is 0
static void ssd_backward_block(Delta *d, const DeltaBackward *g, size_t key, size_t block, int fresh, int last) {
    const size_t row = d->shape->HV * d->V, keys = d->rows * d->wide_k * sizeof(floatS);
    if (g->dx) memset(d->dq, 0, keys), memset(d->dk, 0, keys);
    if (g->dx) memset(d->dscores, 0, d->rows * DELTA_STRIDE * sizeof(floatS));
    for (size_t i = 0; i < d->group; i++) {
        const size_t head = key * d->group + i;
        floatS *dS = d->dS + i * d->rows_k * d->wide_v;
        ssd_open_head(d, head, g->dx ? d->P : NULL, d->D);
        delta_pack(d->dout, g->dout + d->row * row + head * d->V, d->tokens, d->rows, row, d->V);
        if (g->dx) {
            delta_triangle(d->r, d->P, d->dout, d->V, d->rows, 1, NULL, 0);
            if (!last) delta_times_state(d->r, d->k_end, dS, d->K, d->V, d->rows, scale_one);
            ssd_block_inputs(d, g, head, history_values(d, block, i), fresh ? NULL : history_state(d, block, i),
                             last ? NULL : dS);
        }
        if (fresh) continue;
        delta_scale_rows(d->dout, d->dout, d->gates.from_begin, d->rows, d->wide_v);
        delta_add_to_state(dS, d->q, d->dout, d->K, d->V, d->rows, last ? NULL : &d->gates.whole);
    }
    if (g->dx) ssd_close_keys(d, g, key);
}

static void cpu_ssd_backward(Stored *dx, Stored *ddt, Summed *dA_log, Summed *dD, Summed *ddt_bias, Summed *dstate,
                             const Stored *dout, const Stored *x, const Stored *dt, const Stored *A_log,
                             const Stored *D, const Stored *dt_bias, const Summed *state, const DeltaShape *shape,
                             Summed *scratch) {
    static const DeltaRule rule = {ssd_record, ssd_open_keys, ssd_backward_block};
    const DeltaBackward g = {(floatX *)dx,       NULL,
                             (floatX *)ddt,      (floatS *)dA_log,
                             (floatS *)ddt_bias, (floatS *)dD,
                             (floatS *)dstate,   (const floatX *)dout,
                             (const floatX *)D,  (const floatS *)state};
    delta_backward_call(delta_call(x, NULL, dt, A_log, dt_bias, shape), &g, &rule, scratch);
}

#endif
