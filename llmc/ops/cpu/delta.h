/*
Op set "cpu": the gated delta rule of linear attention (arXiv 2412.06464), forward and backward (contract in op_list.h),
in blocks of DELTA_BLOCK tokens from a span's first on. With c_i the logarithm of the decay over tokens up to i of the
block, S the state before the block and D_ij = exp(c_i - c_j), j <= i, a block is

    A_ij = beta_i k_i . k_j D_ij, j < i        (I + A) u = beta (v - exp(c) k S)
    P_ij = q_i . k_j D_ij, j <= i              out = exp(c) q S + P u
                                               S' = exp(c_last) S + (exp(c_last - c) k)^T u

and its gradient, with dS' the gradient of S' (for decays see delta_decays_back),

    (I + A)^T r = P^T dout + exp(c_last - c) k dS'        dv = beta r        dA = -r u^T        dP = dout u^T
    dq = exp(c) dout S^T + (dP D) k
    dk = (dP D)^T q + (dA beta D) k + (dA beta D)^T k - beta exp(c) r S^T + exp(c_last - c) u dS'^T
    dS = exp(c_last) dS' + (exp(c) q)^T dout - (beta exp(c) k)^T r

The system is solved for the block's values directly; no matrix from states to values is made. The arithmetic is in
delta_block.h.

A thread takes a key head with all of its value heads: they share k k^T and q k^T and add up their gradients of q and k.
Forward, if there are more threads than key heads, a thread takes one value head. Backward first walks a span's blocks
forward and saves the transposed state before each block, and the block's u. A head's arithmetic is the same in any
thread: no result depends on the number of threads.
*/
#ifndef LLMC_CPU_DELTA_H
#define LLMC_CPU_DELTA_H
#include "llmc/ops/ops.h"
#include "delta_block.h"
#include "elements.h"

enum { DELTA_STEPS = 2 }; // spans of at most this many tokens go forward token by token

// A thread's work: the call's inputs, its scratch memory, the current block
typedef struct {
    const DeltaShape *shape;
    const floatX *x, *b, *a, *A_log, *dt_bias;
    size_t group, K, V, W;         // value heads of a key head; elements of a key head, a value head and a row of x
    size_t wide_k, wide_v, rows_k; // elements of a packed row of K, of V; packed rows of K
    floatS *q, *k, *k_end;         // [rows][wide_k] k_end: exp(c_last - c) k
    floatS *kt;                    // [wide_k][DELTA_STRIDE]
    floatS *gram, *scores, *A, *P; // [rows][DELTA_STRIDE]  gram: k k^T; scores: q k^T
    floatS *u, *out, *u_transfer;  // [rows][wide_v]; for transfers [rows][wide_k]
    floatS *states, *transfers;    // [group][rows_k][wide_v or wide_k]
    floatS *D, *dP, *dA, *dscores, *dgram; // [rows][DELTA_STRIDE]
    floatS *dq, *dk, *z;                   // [rows][wide_k]
    floatS *dout, *r;                      // [rows][wide_v]
    floatS *ut;                            // [wide_v][DELTA_STRIDE]
    floatS *dS, *dS_transposed;            // [group][rows_k][wide_v], [wide_v][wide_k]
    floatS *history;                       // [blocks][group]: a transposed state [wide_v][wide_k], u[rows][wide_v]
    size_t row, tokens, rows;              // the block's first row in the call; its tokens; its padded rows
    floatS q_inverse[DELTA_BLOCK], k_inverse[DELTA_BLOCK]; // 1 / length of each q and k
    DeltaGates gates;
} Delta;

static Delta delta_call(const Stored *x, const Stored *b, const Stored *a, const Stored *A_log, const Stored *dt_bias,
                        const DeltaShape *shape) {
    Delta d = {.shape = shape, .x = (const floatX *)x, .b = (const floatX *)b, .a = (const floatX *)a};
    d.A_log = (const floatX *)A_log, d.dt_bias = (const floatX *)dt_bias;
    d.group = shape->HV / shape->HK, d.K = shape->K, d.V = shape->V, d.W = delta_channels(shape);
    d.wide_k = packed_width(d.K), d.wide_v = packed_width(d.V), d.rows_k = padded_rows(d.K);
    return d;
}

// ---- scratch --------------------------------------------------------------------------------------------------------

// Returns the elements that history holds for one block and value head.
static size_t delta_history(const Delta *d) { return d->wide_v * d->wide_k + DELTA_BLOCK * d->wide_v; }

// Cuts a thread's share from `base` and returns its size in elements. base NULL: only the size is meaningful. blocks:
// blocks in the history; 0: forward
static size_t delta_cut(Delta *d, floatS *base, size_t blocks) {
    const size_t square = DELTA_BLOCK * DELTA_STRIDE, keys = DELTA_BLOCK * d->wide_k, values = DELTA_BLOCK * d->wide_v;
    size_t used = 0;
#define CUT(field, elements) d->field = base ? base + used : NULL, used += round_up(elements, CACHE_LINE)
    CUT(q, keys);
    CUT(k, keys);
    CUT(k_end, keys);
    CUT(kt, d->wide_k * DELTA_STRIDE);
    CUT(gram, square);
    CUT(scores, square);
    CUT(A, square);
    CUT(P, square);
    CUT(states, d->group * d->rows_k * d->wide_v);
    if (!blocks) {
        CUT(u, values);
        CUT(out, values);
        CUT(u_transfer, keys);
        CUT(transfers, d->group * d->rows_k * d->wide_k);
        return used;
    }
    CUT(D, square);
    CUT(dP, square);
    CUT(dA, square);
    CUT(dscores, square);
    CUT(dgram, square);
    CUT(dq, keys);
    CUT(dk, keys);
    CUT(z, keys);
    CUT(dout, values);
    CUT(r, values);
    CUT(ut, d->wide_v * DELTA_STRIDE);
    CUT(dS, d->group * d->rows_k * d->wide_v);
    CUT(dS_transposed, d->wide_v * d->wide_k);
    CUT(history, blocks * d->group * delta_history(d));
#undef CUT
    return used;
}

static size_t delta_threads(size_t tasks) { return min_size((size_t)omp_get_max_threads(), tasks); }
static size_t delta_blocks(size_t tokens) { return (tokens + DELTA_BLOCK - 1) / DELTA_BLOCK; }

static size_t cpu_delta_forward_scratch(const DeltaShape *shape) {
    Delta d = delta_call(NULL, NULL, NULL, NULL, NULL, shape);
    return CACHE_LINE + delta_threads(shape->HV) * delta_cut(&d, NULL, 0);
}

static size_t cpu_delta_backward_scratch(const DeltaShape *shape) {
    Delta d = delta_call(NULL, NULL, NULL, NULL, NULL, shape);
    return CACHE_LINE + delta_threads(shape->HK) * delta_cut(&d, NULL, max_size(delta_blocks(delta_rows(shape)), 1));
}

// Returns whether the call is large enough for several threads.
static int delta_is_large(const DeltaShape *shape) {
    return delta_rows(shape) * delta_state_elements(shape) >= PARALLEL_WORK;
}

// ---- a block --------------------------------------------------------------------------------------------------------

static const floatX *delta_value_row(const Delta *d, size_t head) {
    return d->x + d->row * d->W + 2 * d->shape->HK * d->K + head * d->V;
}

// Packs a key head's keys and, if queries is 1, its queries; computes k k^T and q k^T.
static void delta_open_keys(Delta *d, size_t key, size_t row, size_t tokens, int queries) {
    const floatX *q = d->x + row * d->W + key * d->K, *k = q + d->shape->HK * d->K;
    d->row = row, d->tokens = tokens, d->rows = padded_rows(tokens);
    delta_pack_unit(d->k, d->k_inverse, k, tokens, d->rows, d->W, d->K, 1);
    delta_transpose(d->kt, DELTA_STRIDE, d->k, d->wide_k, d->rows, d->K);
    BlockProduct p = {.c = d->gram, .a = d->k, .b = d->kt, .rows = d->rows, .length = d->K, .columns = d->rows};
    p.c_stride = p.b_stride = DELTA_STRIDE, p.a_stride = d->wide_k, p.lower = 1;
    block_product(&p);
    if (!queries) return;
    delta_pack_unit(d->q, d->q_inverse, q, tokens, d->rows, d->W, d->K, 1 / sqrt((double)d->K));
    p.c = d->scores, p.a = d->q;
    block_product(&p);
}

static void delta_open_head(Delta *d, size_t head, floatS *P, floatS *D) {
    const size_t at = d->row * d->shape->stride + head;
    delta_gates(&d->gates, d->b + at, d->a + at, d->shape->stride, d->A_log[head], d->dt_bias[head],
                1 + d->shape->doubled, d->tokens, d->rows);
    delta_decays(d->A, P, D, d->gram, d->scores, &d->gates, d->tokens, d->rows);
    delta_scale_rows(d->k_end, d->k, d->gates.to_end, d->rows, d->wide_k);
}

// Computes c[rows][V] = scale c + a[rows][K] S[K][V]; scale NULL: without c
static void delta_times_state(floatS *c, const floatS *a, const floatS *S, size_t K, size_t V, size_t rows,
                              const floatS *scale) {
    const BlockProduct p = {.c = c,
                            .a = a,
                            .b = S,
                            .c_stride = packed_width(V),
                            .a_stride = packed_width(K),
                            .b_stride = packed_width(V),
                            .rows = rows,
                            .length = K,
                            .columns = V,
                            .scale = scale};
    block_product(&p);
}

// Computes S[K][V] = scale S + a[rows][K]^T b[rows][V]; scale NULL: without S
static void delta_add_to_state(floatS *S, const floatS *a, const floatS *b, size_t K, size_t V, size_t rows,
                               const floatS *scale) {
    const BlockProduct p = {.c = S,
                            .a = a,
                            .b = b,
                            .c_stride = packed_width(V),
                            .a_stride = packed_width(K),
                            .b_stride = packed_width(V),
                            .rows = padded_rows(K),
                            .length = rows,
                            .columns = V,
                            .a_transposed = 1,
                            .scale = scale};
    block_product(&p);
}

// Computes c[rows][V] = scale[row] c + a b[rows][V], or a^T b, with a lower triangle a[rows][DELTA_STRIDE]; scale NULL:
// without c
static void delta_triangle(floatS *c, const floatS *a, const floatS *b, size_t V, size_t rows, int transposed,
                           const floatS *scale, size_t scale_step) {
    const BlockProduct p = {.c = c,
                            .a = a,
                            .b = b,
                            .c_stride = packed_width(V),
                            .a_stride = DELTA_STRIDE,
                            .b_stride = packed_width(V),
                            .rows = rows,
                            .length = rows,
                            .columns = V,
                            .a_transposed = transposed,
                            .terms = transposed ? TERMS_FROM_ROW : TERMS_TO_ROW,
                            .scale = scale,
                            .scale_step = scale_step};
    block_product(&p);
}

// Computes u from the state S[K][V] before the block. fresh: S is 0; v NULL: values are 0
static void delta_block_values(const Delta *d, floatS *u, const floatS *S, const floatX *v, size_t V, int fresh) {
    if (!fresh) delta_times_state(u, d->k, S, d->K, V, d->rows, NULL);
    delta_values(u, v, d->W, &d->gates, d->tokens, d->rows, V, fresh);
    block_solve(u, packed_width(V), d->A, d->rows, V, 0);
}

static void delta_block_state(const Delta *d, floatS *S, const floatS *u, size_t V, int fresh) {
    delta_add_to_state(S, d->k_end, u, d->K, V, d->rows, fresh ? NULL : &d->gates.whole);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// The tensors of a call, and how many value heads of a key head a task takes
typedef struct {
    floatX *out;
    floatS *state, *transfer;
    size_t heads;
    const floatX *skip; // Mamba-2's D (ssd.h)
} DeltaForward;

static void delta_forward_block(Delta *d, const DeltaForward *f, size_t first, int fresh, int transfer) {
    for (size_t i = 0; i < f->heads; i++) {
        const size_t head = first + i, row = d->shape->HV * d->V;
        floatS *S = d->states + i * d->rows_k * d->wide_v, *T = d->transfers + i * d->rows_k * d->wide_k;
        delta_open_head(d, head, f->out ? d->P : NULL, NULL);
        delta_block_values(d, d->u, S, delta_value_row(d, head), d->V, fresh);
        if (f->out) {
            if (!fresh) delta_times_state(d->out, d->q, S, d->K, d->V, d->rows, NULL);
            delta_triangle(d->out, d->P, d->u, d->V, d->rows, 0, fresh ? NULL : d->gates.from_begin, 1);
            delta_unpack(f->out + d->row * row + head * d->V, row, d->out, d->tokens, d->V);
        }
        delta_block_state(d, S, d->u, d->V, fresh);
        if (!transfer) continue;
        delta_block_values(d, d->u_transfer, T, NULL, d->K, 0);
        delta_block_state(d, T, d->u_transfer, d->K, 0);
    }
}

// Walks a span token by token and updates the stored state in place.
static void delta_forward_steps(Delta *d, const DeltaForward *f, const Span *span, size_t first, int transfer) {
    const size_t K = d->K, V = d->V, key = first / d->group;
    for (size_t t = 0; t < span->end - span->begin; t++) {
        const floatX *q = d->x + (span->row + t) * d->W + key * K;
        d->row = span->row + t;
        delta_pack_unit(d->q, d->q_inverse, q, 1, 1, d->W, K, 1 / sqrt((double)K));
        delta_pack_unit(d->k, d->k_inverse, q + d->shape->HK * K, 1, 1, d->W, K, 1);
        for (size_t head = first; head < first + f->heads; head++) {
            const size_t at = d->row * d->shape->stride + head;
            floatX *out = f->out ? f->out + (d->row * d->shape->HV + head) * V : NULL;
            delta_gates(&d->gates, d->b + at, d->a + at, d->shape->stride, d->A_log[head], d->dt_bias[head],
                        1 + d->shape->doubled, 1, padded_rows(1));
            delta_step(f->state + (delta_slot(d->shape, span) * d->shape->HV + head) * K * V, out, d->k, d->q,
                       delta_value_row(d, head), d->gates.beta[0], d->gates.whole, K, V);
            if (transfer)
                delta_step(f->transfer + head * K * K, NULL, d->k, d->q, NULL, d->gates.beta[0], d->gates.whole, K, K);
        }
    }
}

static void delta_forward_span(Delta *d, const DeltaForward *f, const Span *span, size_t first, int transfer) {
    const size_t K = d->K, V = d->V, tokens = span->end - span->begin;
    floatS *state = f->state + (delta_slot(d->shape, span) * d->shape->HV + first) * K * V;
    floatS *maps = f->transfer ? f->transfer + first * K * K : NULL;
    const int fresh = span->begin == span->document;
    if (tokens <= DELTA_STEPS) {
        if (fresh) memset(state, 0, f->heads * K * V * sizeof(floatS));
        delta_forward_steps(d, f, span, first, transfer);
        return;
    }
    for (size_t i = 0; i < f->heads; i++) {
        if (!fresh) delta_open_state(d->states + i * d->rows_k * d->wide_v, state + i * K * V, K, V);
        if (transfer) delta_open_state(d->transfers + i * d->rows_k * d->wide_k, maps + i * K * K, K, K);
    }
    for (size_t at = 0; at < tokens; at += DELTA_BLOCK) {
        delta_open_keys(d, first / d->group, span->row + at, min_size(DELTA_BLOCK, tokens - at), f->out != NULL);
        delta_forward_block(d, f, first, fresh && !at, transfer);
    }
    for (size_t i = 0; i < f->heads; i++) {
        delta_close_state(state + i * K * V, d->states + i * d->rows_k * d->wide_v, K, V);
        if (transfer) delta_close_state(maps + i * K * K, d->transfers + i * d->rows_k * d->wide_k, K, K);
    }
}

// Runs value heads [first, first + heads) over all spans.
static void delta_forward_heads(Delta *d, const DeltaForward *f, size_t first) {
    const size_t K = d->K;
    int transfer = f->transfer != NULL; // cleared once the transfer is 0 for the rest of the call
    for (size_t i = 0; i < d->shape->spans.count; i++) {
        const Span *span = &d->shape->spans.span[i];
        if (transfer && span->begin == span->document) {
            memset(f->transfer + first * K * K, 0, f->heads * K * K * sizeof(floatS));
            transfer = 0;
        }
        delta_forward_span(d, f, span, first, transfer);
    }
}

static void cpu_delta_forward(Stored *out, Summed *state, Summed *transfer, const Stored *x, const Stored *b,
                              const Stored *a, const Stored *A_log, const Stored *dt_bias, const DeltaShape *shape,
                              Summed *scratch) {
    Delta call = delta_call(x, b, a, A_log, dt_bias, shape);
    const size_t threads = delta_threads(shape->HV), share = delta_cut(&call, NULL, 0);
    floatS *memory = cache_line_aligned(scratch);
    const DeltaForward f = {(floatX *)out, (floatS *)state, (floatS *)transfer, threads > shape->HK ? 1 : call.group,
                            NULL};
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (delta_is_large(shape))
    for (size_t first = 0; first < shape->HV; first += f.heads) {
        Delta d = call;
        delta_cut(&d, memory + (size_t)omp_get_thread_num() * share, 0);
        delta_forward_heads(&d, &f, first);
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The tensors of a call; dx NULL: only dstate is computed. Mamba-2 (ssd.h) has dD and D, but no db; its da is ddt.
typedef struct {
    floatX *dx, *db, *da;
    floatS *dA_log, *ddt_bias, *dD, *dstate;
    const floatX *dout, *D;
    const floatS *state;
} DeltaBackward;

// A rule's part of the walk backward: saves what the blocks of a span read; begins a block; runs a block.
typedef struct {
    void (*record)(Delta *d, const DeltaBackward *g, const Span *span, size_t key);
    void (*open)(Delta *d, size_t key, size_t row, size_t rows, int back);
    void (*block)(Delta *d, const DeltaBackward *g, size_t key, size_t block, int fresh, int last);
} DeltaRule;

static floatS *history_state(const Delta *d, size_t block, size_t i) {
    return d->history + (block * d->group + i) * delta_history(d);
}
static floatS *history_values(const Delta *d, size_t block, size_t i) {
    return history_state(d, block, i) + d->wide_v * d->wide_k;
}

// Saves the transposed state before each block of a span, and the block's u.
static void delta_record(Delta *d, const DeltaBackward *g, const Span *span, size_t key) {
    const size_t tokens = span->end - span->begin, size = d->rows_k * d->wide_v;
    const int fresh = span->begin == span->document;
    for (size_t i = 0; i < d->group && !fresh; i++)
        delta_open_state(d->states + i * size, g->state + (key * d->group + i) * d->K * d->V, d->K, d->V);
    for (size_t at = 0; at < tokens; at += DELTA_BLOCK) {
        const size_t block = at / DELTA_BLOCK;
        delta_open_keys(d, key, span->row + at, min_size(DELTA_BLOCK, tokens - at), 0);
        for (size_t i = 0; i < d->group; i++) {
            const size_t head = key * d->group + i;
            floatS *S = d->states + i * size, *u = history_values(d, block, i);
            if (!fresh || at) delta_transpose(history_state(d, block, i), d->wide_k, S, d->wide_v, d->rows_k, d->V);
            delta_open_head(d, head, NULL, NULL);
            delta_block_values(d, u, S, delta_value_row(d, head), d->V, fresh && !at);
            if (at + DELTA_BLOCK < tokens) delta_block_state(d, S, u, d->V, fresh && !at);
        }
    }
}

// Computes r[rows][V], the gradient of beta (v - exp(c) k S), from dout and dS (NULL: 0).
static void delta_block_r(const Delta *d, const floatS *dS) {
    delta_triangle(d->r, d->P, d->dout, d->V, d->rows, 1, NULL, 0);
    if (dS) delta_times_state(d->r, d->k_end, dS, d->K, d->V, d->rows, scale_one);
    block_solve(d->r, d->wide_v, d->A, d->rows, d->V, 1);
}

// Computes c[rows][rows] = a[rows][V] u^T, only the lower triangle.
static void delta_pairs(const Delta *d, floatS *c, const floatS *a) {
    const BlockProduct p = {.c = c,
                            .a = a,
                            .b = d->ut,
                            .c_stride = DELTA_STRIDE,
                            .a_stride = d->wide_v,
                            .b_stride = DELTA_STRIDE,
                            .rows = d->rows,
                            .length = d->V,
                            .columns = d->rows,
                            .lower = 1};
    block_product(&p);
}

// Returns the sum over all elements of S dS; both are stored transposed.
static VECTOR_FUNCTION double delta_state_dot(const Delta *d, const floatS *S, const floatS *dS) {
    double total = 0;
    for (size_t i = 0; i < d->V; i++) {
        Vector sum = {0};
        for (size_t j = 0; j < d->K; j += VECTOR_LANES)
            sum += vector_load(S + i * d->wide_k + j) * vector_load(dS + i * d->wide_k + j);
        total += (double)vector_sum_across(sum);
    }
    return total;
}

// Computes a head's gradients of b, a, A_log and dt_bias in a block from those of beta and of the log decays.
static void delta_store_gates(const Delta *d, const DeltaBackward *g, size_t head, const double *dbeta,
                              const double *dlog) {
    double dA_log = 0, ddt_bias = 0;
    for (size_t t = 0; t < d->tokens; t++) {
        const size_t at = (d->row + t) * d->shape->stride + head;
        const double da = -dlog[t] * d->gates.rate * d->gates.slope[t];
        g->db[at] = store((floatS)(dbeta[t] * d->gates.beta_slope[t]));
        g->da[at] = store((floatS)da);
        dA_log += dlog[t] * d->gates.log_decay[t], ddt_bias += da;
    }
    if (g->dA_log) g->dA_log[head] += (floatS)dA_log;
    if (g->ddt_bias) g->ddt_bias[head] += (floatS)ddt_bias;
}

// Adds a value head's share to dq, dk, dscores and dgram. Computes its dv and the gradients of its gates' inputs. u: of
// the block; S: state before the block (transposed; NULL: 0); dS: gradient of the state after it (NULL: 0)
static void delta_block_inputs(Delta *d, const DeltaBackward *g, size_t head, const floatS *u, const floatS *S,
                               const floatS *dS) {
    const DeltaGates *gates = &d->gates;
    const floatX *v = delta_value_row(d, head);
    double dbeta[DELTA_BLOCK], dlog[DELTA_BLOCK];
    floatS by_q[DELTA_BLOCK] = {0}, by_k[DELTA_BLOCK] = {0}, to_state[DELTA_BLOCK] = {0}, by_v[DELTA_BLOCK];
    // 1. the block's own matrices
    delta_transpose(d->ut, DELTA_STRIDE, u, d->wide_v, d->rows, d->V);
    delta_pairs(d, d->dP, d->dout);
    delta_pairs(d, d->dA, d->r);
    delta_decays_back(d->dscores, d->dgram, dbeta, dlog, d->dP, d->dA, d->A, d->P, d->D, d->gram, gates, d->tokens);
    // 2. the state before the block
    if (S) {
        delta_times_state(d->z, d->dout, S, d->V, d->K, d->rows, NULL);
        delta_add_rows(d->dq, by_q, d->z, d->q, gates->from_begin, d->rows, d->K);
        delta_times_state(d->z, d->r, S, d->V, d->K, d->rows, NULL);
        delta_add_rows(d->dk, by_k, d->z, d->k, gates->minus_both, d->rows, d->K);
    }
    // 3. the state after the block
    double written = 0,
           read = 0; // terms scaled by a token's decay. written: earlier writes to the state; read: later reads of the
                     // state before the token
    if (dS) {
        delta_transpose(d->dS_transposed, d->wide_k, dS, d->wide_v, d->rows_k, d->V);
        delta_times_state(d->z, u, d->dS_transposed, d->V, d->K, d->rows, NULL);
        delta_add_rows(d->dk, to_state, d->z, d->k, gates->to_end, d->rows, d->K);
        if (S) written = (double)gates->whole * delta_state_dot(d, S, d->dS_transposed);
    }
    // 4. values and gates
    delta_values_back(g->dx + (v - d->x), by_v, d->r, v, gates->beta, d->tokens, d->W, d->V);
    for (size_t t = 0; t < d->tokens; t++) {
        dbeta[t] += (double)by_v[t] - (double)gates->from_begin[t] * (double)by_k[t];
        dlog[t] += written;
        written += (double)gates->to_end[t] * (double)to_state[t];
    }
    for (size_t t = d->tokens; t-- > 0;) {
        read += (double)gates->from_begin[t] * (double)by_q[t] + (double)gates->minus_both[t] * (double)by_k[t];
        dlog[t] += read;
    }
    delta_store_gates(d, g, head, dbeta, dlog);
}

// Finishes the gradients of a key head's queries and keys, from all value heads.
static void delta_close_keys(Delta *d, const DeltaBackward *g, size_t key) {
    const size_t K = d->K, at = d->row * d->W + key * K;
    delta_triangle(d->dq, d->dscores, d->k, K, d->rows, 0, scale_one, 0);
    delta_triangle(d->dk, d->dscores, d->q, K, d->rows, 1, scale_one, 0);
    delta_triangle(d->dk, d->dgram, d->k, K, d->rows, 0, scale_one, 0);
    delta_triangle(d->dk, d->dgram, d->k, K, d->rows, 1, scale_one, 0);
    delta_unpack_unit(g->dx + at, d->dq, d->q, d->q_inverse, d->tokens, d->W, K, 1 / sqrt((double)K));
    delta_unpack_unit(g->dx + at + d->shape->HK * K, d->dk, d->k, d->k_inverse, d->tokens, d->W, K, 1);
}

// Runs a block backward. dS becomes the gradient of the state before it. fresh: that state is 0; last: dS is 0
static void delta_backward_block(Delta *d, const DeltaBackward *g, size_t key, size_t block, int fresh, int last) {
    const size_t row = d->shape->HV * d->V, keys = d->rows * d->wide_k * sizeof(floatS);
    const size_t square = d->rows * DELTA_STRIDE * sizeof(floatS);
    if (g->dx) memset(d->dq, 0, keys), memset(d->dk, 0, keys);
    if (g->dx) memset(d->dscores, 0, square), memset(d->dgram, 0, square);
    for (size_t i = 0; i < d->group; i++) {
        const size_t head = key * d->group + i;
        floatS *dS = d->dS + i * d->rows_k * d->wide_v;
        delta_open_head(d, head, d->P, g->dx ? d->D : NULL);
        delta_pack(d->dout, g->dout + d->row * row + head * d->V, d->tokens, d->rows, row, d->V);
        delta_block_r(d, last ? NULL : dS);
        if (g->dx)
            delta_block_inputs(d, g, head, history_values(d, block, i), fresh ? NULL : history_state(d, block, i),
                               last ? NULL : dS);
        if (fresh) continue;
        delta_scale_rows(d->dout, d->dout, d->gates.from_begin, d->rows, d->wide_v);
        delta_scale_rows(d->r, d->r, d->gates.minus_both, d->rows, d->wide_v);
        delta_add_to_state(dS, d->q, d->dout, d->K, d->V, d->rows, last ? NULL : &d->gates.whole);
        delta_add_to_state(dS, d->k, d->r, d->K, d->V, d->rows, scale_one);
    }
    if (g->dx) delta_close_keys(d, g, key);
}

// Runs a key head backward over all spans, last to first.
static void delta_backward_heads(Delta *d, const DeltaBackward *g, const DeltaRule *rule, size_t key) {
    const size_t size = d->rows_k * d->wide_v, elements = d->K * d->V;
    floatS *dstate = g->dstate + key * d->group * elements;
    int last = 0; // 1: dS is still 0
    for (size_t i = 0; i < d->group; i++) delta_open_state(d->dS + i * size, dstate + i * elements, d->K, d->V);
    for (size_t i = d->shape->spans.count; i-- > 0;) {
        const Span *span = &d->shape->spans.span[i];
        const size_t tokens = span->end - span->begin;
        if (g->dx) rule->record(d, g, span, key);
        for (size_t block = delta_blocks(tokens); block-- > 0;) {
            const size_t at = block * DELTA_BLOCK;
            const int fresh = !block && span->begin == span->document;
            rule->open(d, key, span->row + at, min_size(DELTA_BLOCK, tokens - at), 1);
            rule->block(d, g, key, block, fresh, last);
            last = fresh;
        }
    }
    for (size_t i = 0; i < d->group; i++) {
        if (last)
            memset(dstate + i * elements, 0, elements * sizeof(floatS));
        else
            delta_close_state(dstate + i * elements, d->dS + i * size, d->K, d->V);
    }
}

// Runs a call backward, by the key heads.
static void delta_backward_call(Delta call, const DeltaBackward *g, const DeltaRule *rule, Summed *scratch) {
    const DeltaShape *shape = call.shape;
    const size_t blocks = max_size(delta_blocks(delta_rows(shape)), 1);
    const size_t share = delta_cut(&call, NULL, blocks);
    floatS *memory = cache_line_aligned(scratch);
#pragma omp parallel for schedule(dynamic) num_threads(delta_threads(shape->HK)) if (delta_is_large(shape))
    for (size_t key = 0; key < shape->HK; key++) {
        Delta d = call;
        delta_cut(&d, memory + (size_t)omp_get_thread_num() * share, blocks);
        delta_backward_heads(&d, g, rule, key);
    }
}

static void cpu_delta_backward(Stored *dx, Stored *db, Stored *da, Summed *dA_log, Summed *ddt_bias, Summed *dstate,
                               const Stored *dout, const Stored *x, const Stored *b, const Stored *a,
                               const Stored *A_log, const Stored *dt_bias, const Summed *state, const DeltaShape *shape,
                               Summed *scratch) {
    static const DeltaRule rule = {delta_record, delta_open_keys, delta_backward_block};
    const DeltaBackward g = {
        (floatX *)dx,     (floatX *)db,         (floatX *)da, (floatS *)dA_log,     (floatS *)ddt_bias, NULL,
        (floatS *)dstate, (const floatX *)dout, NULL,         (const floatS *)state};
    delta_backward_call(delta_call(x, b, a, A_log, dt_bias, shape), &g, &rule, scratch);
}

#endif
