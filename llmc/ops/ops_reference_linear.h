/*
The ops of linear attention and of the gate of attention's output in double, one element at a time. Like ops_reference.h
they are written only from the formulas of op_list.h. The delta rule goes token by token.
*/
#ifndef LLMC_OPS_REFERENCE_LINEAR_H
#define LLMC_OPS_REFERENCE_LINEAR_H
#include "ops_reference.h"

// ---- the gate of attention's output ---------------------------------------------------------------------------------
static void reference_split_heads(double *joined, double *first, double *second, size_t n, size_t heads, size_t HD,
                                  int join) {
    for (size_t i = 0; i < n * heads * HD; i++) {
        double *const both = joined + i / HD * 2 * HD + i % HD;
        if (join)
            both[0] = first[i], both[HD] = second[i];
        else
            first[i] = both[0], second[i] = both[HD];
    }
}

static void reference_latent_expand(double *k, double *v, const double *kv, const double *shared, size_t n,
                                    size_t heads, size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R;
    for (size_t i = 0; i < n * heads; i++)
        for (size_t j = 0; j < HD; j++) {
            k[i * HD + j] = j < own ? kv[i * (own + VD) + j] : shared[i / heads * R + j - own];
            v[i * HD + j] = j < VD ? kv[i * (own + VD) + own + j] : 0;
        }
}

static void reference_latent_trim(double *wide, double *narrow, size_t n, size_t heads, size_t HD, size_t VD,
                                  int back) {
    for (size_t i = 0; i < n * heads; i++)
        for (size_t j = 0; j < HD; j++)
            if (back)
                wide[i * HD + j] = j < VD ? narrow[i * VD + j] : 0;
            else if (j < VD)
                narrow[i * VD + j] = wide[i * HD + j];
}

static void reference_latent_fold(double *dkv, double *dshared, const double *dk, const double *dv, size_t n,
                                  size_t heads, size_t HD, size_t VD, size_t R) {
    const size_t own = HD - R;
    for (size_t i = 0; i < n * heads; i++)
        for (size_t j = 0; j < HD; j++) {
            if (j < own) dkv[i * (own + VD) + j] = dk[i * HD + j];
            if (j >= own) dshared[i / heads * R + j - own] += dk[i * HD + j];
            if (j < VD) dkv[i * (own + VD) + own + j] = dv[i * HD + j];
        }
}

static void reference_sums_add(double *sums, const double *in, size_t count) {
    for (size_t i = 0; i < count; i++) sums[i] += in[i];
}

static void reference_gate_forward(double *out, const double *x, const double *gate, size_t count, size_t width) {
    for (size_t i = 0; i < count; i++) out[i] = x[i] * logistic(gate[i / width]);
}

static void reference_gate_backward(double *dx, double *dgate, const double *dout, const double *x, const double *gate,
                                    size_t count, size_t width) {
    for (size_t i = 0; i < count; i += width) {
        const double g = gate[i / width];
        double sum = 0.0;
        for (size_t j = i; j < i + width; j++) sum += dout[j] * x[j], dx[j] = dout[j] * logistic(g);
        dgate[i / width] = sum * logistic(g) * logistic(-g);
    }
}

// ---- linear attention: the convolution ------------------------------------------------------------------------------
// Returns x of token t, counted from the span's first token: a row of the call or of columns; NULL: before the document
static const double *conv_token(const double *x, const double *columns, const DeltaShape *shape, const Span *span,
                                ptrdiff_t t) {
    if (t < (ptrdiff_t)span->document - (ptrdiff_t)span->begin) return NULL;
    if (t >= 0) return x + (span->row + (size_t)t) * shape->stride;
    return columns + (size_t)(t + (ptrdiff_t)shape->taps - 1) * delta_channels(shape);
}

// Returns the convolution's input: an element of x, of B x in rows of B | C | x, or of columns.
static double conv_element(const double *row, const DeltaShape *shape, ptrdiff_t t, size_t c) {
    return row[c] * (shape->gates && t >= 0 ? row[2 * delta_channels(shape) + c] : 1.0);
}

// Returns the convolution's sum: channel c at token t of a span.
static double conv_of(const double *x, const double *columns, const double *weight, const double *bias,
                      const DeltaShape *shape, const Span *span, size_t t, size_t c) {
    double sum = bias ? bias[c] : 0.0;
    for (size_t j = 0; j < shape->taps; j++) {
        const ptrdiff_t from = (ptrdiff_t)(t + j + 1) - (ptrdiff_t)shape->taps;
        const double *row = conv_token(x, columns, shape, span, from);
        if (row) sum += weight[c * shape->taps + j] * conv_element(row, shape, from, c);
    }
    return sum;
}

static void reference_conv_forward(double *out, double *columns, const double *x, const double *weight,
                                   const double *bias, const DeltaShape *shape) {
    const size_t W = delta_channels(shape), taps = shape->taps;
    for (size_t s = 0; s < shape->spans.count; s++) {
        const Span *span = &shape->spans.span[s];
        const size_t n = span->end - span->begin;
        double *const own = columns + delta_slot(shape, span) * (taps - 1) * W;
        for (size_t t = 0; t < n; t++)
            for (size_t c = 0; c < W; c++) {
                const double sum = conv_of(x, own, weight, bias, shape, span, t, c),
                             *row = x + (span->row + t) * shape->stride;
                out[(span->row + t) * W + c] = shape->gates ? row[W + c] * sum : silu_of(sum);
            }
        for (size_t j = 0; j + 1 < taps; j++) { // row j of columns is read before it is overwritten
            const ptrdiff_t from = (ptrdiff_t)(n + j + 1) - (ptrdiff_t)taps;
            const double *row = conv_token(x, own, shape, span, from);
            for (size_t c = 0; c < W; c++) own[j * W + c] = row ? conv_element(row, shape, from, c) : 0.0;
        }
    }
}

static void reference_conv_backward(double *dx, double *dweight, double *dbias, double *dcolumns, const double *dout,
                                    const double *x, const double *columns, const double *weight, const double *bias,
                                    const DeltaShape *shape, void *scratch) {
    const size_t W = delta_channels(shape), taps = shape->taps, n = delta_rows(shape);
    const Span *const first = shape->spans.span;
    // gradients of the taps - 1 tokens before the call, then of the call's own tokens
    double *d = (double *)checked_calloc((n + taps - 1) * W, sizeof(double), "gradients of a convolution");
    (void)scratch;
    for (size_t i = 0; i < (taps - 1) * W; i++) d[n * W + i] = dcolumns[i];
    for (size_t s = 0; s < shape->spans.count; s++)
        for (size_t t = 0; t < first[s].end - first[s].begin; t++)
            for (size_t c = 0; c < W; c++) {
                const double sum = conv_of(x, columns, weight, bias, shape, &first[s], t, c);
                const size_t own = first[s].row + t, gate = own * shape->stride + W + c;
                const double dsum = dout[own * W + c] * (shape->gates ? x[gate] : silu_slope(sum));
                if (shape->gates) dx[gate] = dout[own * W + c] * sum;
                if (dbias) dbias[c] += dsum;
                for (size_t j = 0; j < taps; j++) {
                    const ptrdiff_t from = (ptrdiff_t)(t + j + 1) - (ptrdiff_t)taps;
                    const double *row = conv_token(x, columns, shape, &first[s], from);
                    if (!row) continue;
                    d[(own + j) * W + c] += dsum * weight[c * taps + j];
                    if (dweight) dweight[c * taps + j] += dsum * conv_element(row, shape, from, c);
                }
            }
    for (size_t i = 0; i < (taps - 1) * W; i++) dcolumns[i] = first->begin > first->document ? d[i] : 0.0;
    for (size_t i = 0; i < n * W; i++) { // B and x of a token multiply each other's gradient
        const size_t b = i / W * shape->stride + i % W, value = b + 2 * W;
        const double du = d[(taps - 1) * W + i];
        dx[b] = du * (shape->gates ? x[value] : 1.0);
        if (shape->gates) dx[value] = du * x[b];
    }
    free(d);
}

// ---- linear attention: the gated delta rule, token by token ---------------------------------------------------------
// A token's row for one value head, and the gradients of the head's gates at this token
typedef struct {
    const double *q, *k, *v; // rows of x
    double q_scale, k_scale; // factors of q and k
    double beta, decay, log_decay;
    double slope; // d log decay / d (a + dt_bias)
    double dbeta, dlog_decay;
    int begins; // 1: the token begins a document
} RuleRow;

static double inverse_length(const double *x, size_t K) {
    double squares = 0.0;
    for (size_t i = 0; i < K; i++) squares += x[i] * x[i];
    return 1.0 / sqrt(squares + 1e-6);
}

// Makes a value head's rows of a call. The caller frees them.
static RuleRow *rule_rows_of(const double *x, const double *b, const double *a, const double *A_log,
                             const double *dt_bias, const DeltaShape *shape, size_t head) {
    const size_t K = shape->K, HK = shape->HK, key = head / (shape->HV / HK);
    RuleRow *rows = (RuleRow *)checked_calloc(delta_rows(shape), sizeof(RuleRow), "rows of the delta rule");
    for (size_t s = 0; s < shape->spans.count; s++) {
        const Span *span = &shape->spans.span[s];
        for (size_t t = span->row; t < span->row + span->end - span->begin; t++) {
            RuleRow *row = &rows[t];
            const double input = a[t * shape->stride + head] + dt_bias[head], rate = exp(A_log[head]);
            row->q = x + t * delta_channels(shape) + key * K, row->k = row->q + HK * K;
            row->v = x + t * delta_channels(shape) + 2 * HK * K + head * shape->V;
            row->q_scale = inverse_length(row->q, K) / sqrt((double)K);
            row->k_scale = inverse_length(row->k, K);
            row->beta = (1.0 + shape->doubled) * logistic(b[t * shape->stride + head]);
            row->log_decay = -rate * (fmax(input, 0.0) + log1p(exp(-fabs(input))));
            row->decay = exp(row->log_decay);
            row->slope = -rate * logistic(input);
            row->begins = t == span->row && span->begin == span->document;
        }
    }
    return rows;
}

// Updates column S[K] of a state, elements `stride` apart, with value v: S = decay S, u = beta (v - S^T k), S += k u
static void rule_step(double *S, size_t stride, const RuleRow *row, double v, size_t K) {
    double product = 0.0;
    for (size_t i = 0; i < K; i++) S[i * stride] *= row->decay;
    for (size_t i = 0; i < K; i++) product += S[i * stride] * row->k[i] * row->k_scale;
    for (size_t i = 0; i < K; i++) S[i * stride] += row->k[i] * row->k_scale * row->beta * (v - product);
}

static void reference_delta_forward(double *out, double *state, double *transfer, const double *x, const double *b,
                                    const double *a, const double *A_log, const double *dt_bias,
                                    const DeltaShape *shape, void *scratch) {
    const size_t HV = shape->HV, K = shape->K, V = shape->V;
    (void)scratch;
    for (size_t head = 0; head < HV; head++) {
        RuleRow *rows = rule_rows_of(x, b, a, A_log, dt_bias, shape, head);
        for (size_t s = 0; s < shape->spans.count; s++) {
            const Span *span = &shape->spans.span[s];
            double *const S = state + (delta_slot(shape, span) * HV + head) * K * V;
            double *const T = transfer ? transfer + head * K * K : NULL;
            for (size_t t = span->row; t < span->row + span->end - span->begin; t++) {
                if (rows[t].begins) memset(S, 0, K * V * sizeof(double));
                if (rows[t].begins && T) memset(T, 0, K * K * sizeof(double));
                for (size_t j = 0; j < V; j++) rule_step(S + j, V, &rows[t], rows[t].v[j], K);
                for (size_t j = 0; j < K && T; j++) rule_step(T + j, K, &rows[t], 0.0, K);
                for (size_t j = 0; j < V && out; j++) {
                    double sum = 0.0;
                    for (size_t i = 0; i < K; i++) sum += S[i * V + j] * rows[t].q[i] * rows[t].q_scale;
                    out[(t * HV + head) * V + j] = sum;
                }
            }
        }
        free(rows);
    }
}

// Runs the backward pass of rule_step and out = S^T q for column j. dS[K]: in, the gradient of the column after a
// token; out, before the token. before: the column before the token (NULL: computes only dS). d = dout[j]; dq, dk:
// gradients of the scaled q and k. With S the column after the token, D = decay before, u = beta (v - D^T k):
//         dS += q d;   du = dS^T k;   dD = dS - beta du k
//         dq += S d;   dk += u dS - beta du D;   dv = beta du;   dbeta += du (v - D^T k);   dlog_decay += dD^T D
static double rule_step_back(double *dS, RuleRow *row, const double *before, double *dq, double *dk, double v, double d,
                             size_t K) {
    double du = 0.0, product = 0.0;
    for (size_t i = 0; i < K; i++) dS[i] += row->q[i] * row->q_scale * d;
    for (size_t i = 0; i < K; i++) du += dS[i] * row->k[i] * row->k_scale;
    for (size_t i = 0; i < K && before; i++) product += row->decay * before[i] * row->k[i] * row->k_scale;
    const double u = row->beta * (v - product);
    for (size_t i = 0; i < K; i++) {
        const double k = row->k[i] * row->k_scale, D = before ? row->decay * before[i] : 0.0, from = dS[i];
        dS[i] -= row->beta * du * k;
        if (before) {
            dq[i] += (D + k * u) * d;
            dk[i] += u * from - row->beta * du * D;
            row->dlog_decay += dS[i] * D;
        }
        dS[i] *= row->begins ? 0.0 : row->decay;
    }
    row->dbeta += du * (v - product);
    return row->beta * du;
}

// Adds to dx[K] the gradient of x for y = scale x, with scale proportional to 1 / sqrt(sum of squares + 1e-6).
static void rule_scale_back(double *dx, const double *dy, const double *x, double scale, size_t K) {
    double product = 0.0;
    const double inverse = inverse_length(x, K);
    for (size_t i = 0; i < K; i++) product += dy[i] * x[i];
    for (size_t i = 0; i < K; i++) dx[i] += scale * (dy[i] - x[i] * product * inverse * inverse);
}

// Computes the gradients of a head's gates. Also computes the gradients of q and k from dqk[n,2K], the gradients of the
// scaled q and k.
static void rule_rows_back(double *dx, double *db, double *da, double *dA_log, double *ddt_bias, const RuleRow *rows,
                           const double *dqk, const double *x, const DeltaShape *shape, size_t head) {
    const size_t K = shape->K;
    for (size_t t = 0; t < delta_rows(shape); t++) {
        const RuleRow *row = &rows[t];
        rule_scale_back(dx + (row->q - x), dqk + t * 2 * K, row->q, row->q_scale, K);
        rule_scale_back(dx + (row->k - x), dqk + t * 2 * K + K, row->k, row->k_scale, K);
        db[t * shape->stride + head] = row->dbeta * row->beta * (1.0 - row->beta / (1.0 + shape->doubled));
        da[t * shape->stride + head] = row->dlog_decay * row->slope;
        if (dA_log) dA_log[head] += row->dlog_decay * row->log_decay;
        if (ddt_bias) ddt_bias[head] += row->dlog_decay * row->slope;
    }
}

// Runs columns of a state one by one, since they are independent: forward, keeping column[n,K] before every token, then
// backward.
static void reference_delta_backward(double *dx, double *db, double *da, double *dA_log, double *ddt_bias,
                                     double *dstate, const double *dout, const double *x, const double *b,
                                     const double *a, const double *A_log, const double *dt_bias, const double *state,
                                     const DeltaShape *shape, void *scratch) {
    const size_t HV = shape->HV, K = shape->K, V = shape->V, W = delta_channels(shape), n = delta_rows(shape);
    double *before = (double *)checked_malloc((n + 1) * K * sizeof(double), "columns of states");
    double *dqk = (double *)checked_malloc(n * 2 * K * sizeof(double), "gradients of q and k");
    double *dS = (double *)checked_malloc(K * sizeof(double), "gradients of a column");
    (void)scratch;
    if (dx) memset(dx, 0, n * W * sizeof(double));
    for (size_t head = 0; head < HV; head++) {
        RuleRow *rows = rule_rows_of(x, b, a, A_log, dt_bias, shape, head);
        memset(dqk, 0, n * 2 * K * sizeof(double));
        for (size_t j = 0; j < V; j++) {
            double *const passed = dstate + head * K * V + j;
            for (size_t i = 0; i < K && dx; i++) before[i] = state[(head * K + i) * V + j];
            for (size_t t = 0; t < n && dx; t++) {
                double *const column = before + t * K;
                if (rows[t].begins) memset(column, 0, K * sizeof(double));
                memcpy(column + K, column, K * sizeof(double));
                rule_step(column + K, 1, &rows[t], rows[t].v[j], K);
            }
            for (size_t i = 0; i < K; i++) dS[i] = passed[i * V];
            for (size_t t = n; t-- > 0;) {
                double *const d = dqk + t * 2 * K;
                const double dv = rule_step_back(dS, &rows[t], dx ? before + t * K : NULL, d, d + K, rows[t].v[j],
                                                 dout[(t * HV + head) * V + j], K);
                if (dx) dx[t * W + 2 * shape->HK * K + head * V + j] = dv;
            }
            for (size_t i = 0; i < K; i++) passed[i * V] = dS[i];
        }
        if (dx) rule_rows_back(dx, db, da, dA_log, ddt_bias, rows, dqk, x, shape, head);
        free(rows);
    }
    free(before), free(dqk), free(dS);
}

// ---- linear attention: Mamba-2's rule, token by token ---------------------------------------------------------------
// A token's row for one value head
typedef struct {
    size_t q, k, v;           // the row's first elements in x
    double step, decay, rate; // rate: exp(A_log)
    double slope;             // d step / d (dt + dt_bias)
    int begins;               // 1: the token begins a document
} SsdRow;

// Makes a value head's rows of a call. The caller frees them.
static SsdRow *ssd_rows_of(const double *dt, double A_log, double dt_bias, const DeltaShape *shape, size_t head) {
    const size_t K = shape->K, key = head / (shape->HV / shape->HK), k = shape->HV * shape->V + key * K;
    SsdRow *rows = (SsdRow *)checked_calloc(delta_rows(shape), sizeof(SsdRow), "rows of Mamba-2's rule");
    for (size_t s = 0; s < shape->spans.count; s++) {
        const Span *span = &shape->spans.span[s];
        for (size_t t = span->row; t < span->row + span->end - span->begin; t++) {
            const double input = dt[t * shape->stride + head] + dt_bias;
            const double free = fmax(input, 0.0) + log1p(exp(-fabs(input)));
            const size_t row = t * delta_channels(shape);
            const SsdRow made = {row + k + shape->HK * K,
                                 row + k,
                                 row + head * shape->V,
                                 fmin(fmax(free, shape->least), shape->most),
                                 0.0,
                                 exp(A_log),
                                 free < shape->least || free > shape->most ? 0.0 : logistic(input),
                                 t == span->row && span->begin == span->document};
            rows[t] = made, rows[t].decay = exp(-made.rate * made.step);
        }
    }
    return rows;
}

static void reference_ssd_forward(double *out, double *state, double *transfer, const double *x, const double *dt,
                                  const double *A_log, const double *D, const double *dt_bias, const DeltaShape *shape,
                                  void *scratch) {
    const size_t HV = shape->HV, K = shape->K, V = shape->V;
    (void)scratch;
    for (size_t head = 0; head < HV; head++) {
        SsdRow *rows = ssd_rows_of(dt, A_log[head], dt_bias[head], shape, head);
        for (size_t s = 0; s < shape->spans.count; s++) {
            const Span *span = &shape->spans.span[s];
            double *const S = state + (delta_slot(shape, span) * HV + head) * K * V;
            for (size_t t = span->row; t < span->row + span->end - span->begin; t++) {
                const double decay = rows[t].begins ? 0.0 : rows[t].decay, *v = x + rows[t].v;
                if (rows[t].begins) memset(S, 0, K * V * sizeof(double));
                for (size_t i = 0; i < K * V; i++) S[i] = decay * S[i] + x[rows[t].k + i / V] * rows[t].step * v[i % V];
                if (transfer) transfer[head] *= decay;
                for (size_t j = 0; j < V && out; j++) {
                    double sum = D[head] * v[j];
                    for (size_t i = 0; i < K; i++) sum += S[i * V + j] * x[rows[t].q + i];
                    out[(t * HV + head) * V + j] = sum;
                }
            }
        }
        free(rows);
    }
}

// Runs column j of a head's state backward. before[n,K]: the column before each token; dS[K]: in and out; dstep[n],
// dlog[n]: gradients of steps and of log decays, added to
static void ssd_column_back(double *dx, double *dstep, double *dlog, double *dS, const SsdRow *rows,
                            const double *before, const double *x, const double *d, size_t step, double D, size_t n,
                            size_t K, size_t j) {
    for (size_t t = n; t-- > 0;) {
        const SsdRow *row = &rows[t];
        const double decay = row->begins ? 0.0 : row->decay, v = x[row->v + j], out = d[t * step];
        double du = 0.0;
        for (size_t i = 0; i < K; i++) {
            const double S = decay * before[t * K + i] + x[row->k + i] * row->step * v;
            dS[i] += x[row->q + i] * out;
            du += dS[i] * x[row->k + i];
            if (dx) dx[row->q + i] += S * out, dx[row->k + i] += dS[i] * row->step * v;
            dlog[t] += decay * dS[i] * before[t * K + i];
            dS[i] *= decay;
        }
        if (dx) dx[row->v + j] = du * row->step + D * out;
        dstep[t] += du * v;
    }
}

// Runs columns of a state one by one, as the delta rule's reference does.
static void reference_ssd_backward(double *dx, double *ddt, double *dA_log, double *dD, double *ddt_bias,
                                   double *dstate, const double *dout, const double *x, const double *dt,
                                   const double *A_log, const double *D, const double *dt_bias, const double *state,
                                   const DeltaShape *shape, void *scratch) {
    const size_t HV = shape->HV, K = shape->K, V = shape->V, n = delta_rows(shape);
    double *before = (double *)checked_calloc((n + 1) * K, sizeof(double), "columns of states");
    double *dstep = (double *)checked_malloc(2 * n * sizeof(double), "gradients of steps"), *dlog = dstep + n;
    double *dS = (double *)checked_malloc(K * sizeof(double), "gradients of a column");
    (void)scratch;
    if (dx) memset(dx, 0, n * delta_channels(shape) * sizeof(double));
    for (size_t head = 0; head < HV; head++) {
        SsdRow *rows = ssd_rows_of(dt, A_log[head], dt_bias[head], shape, head);
        memset(dstep, 0, 2 * n * sizeof(double));
        for (size_t j = 0; j < V; j++) {
            double *const passed = dstate + head * K * V + j;
            for (size_t i = 0; i < K && dx; i++) before[i] = state[(head * K + i) * V + j];
            for (size_t t = 0; t < n && dx; t++)
                for (size_t i = 0; i < K; i++) {
                    if (rows[t].begins) before[t * K + i] = 0.0;
                    before[(t + 1) * K + i] =
                        rows[t].decay * before[t * K + i] + x[rows[t].k + i] * rows[t].step * x[rows[t].v + j];
                }
            for (size_t i = 0; i < K; i++) dS[i] = passed[i * V];
            ssd_column_back(dx, dstep, dlog, dS, rows, before, x, dout + head * V + j, HV * V, D[head], n, K, j);
            for (size_t i = 0; i < K; i++) passed[i * V] = dS[i];
        }
        for (size_t t = 0; t < n && dx; t++) {
            const double to_dt = (dstep[t] - rows[t].rate * dlog[t]) * rows[t].slope;
            ddt[t * shape->stride + head] = to_dt;
            if (ddt_bias) ddt_bias[head] += to_dt;
            if (dA_log) dA_log[head] -= dlog[t] * rows[t].rate * rows[t].step;
            for (size_t j = 0; j < V && dD; j++) dD[head] += dout[(t * HV + head) * V + j] * x[rows[t].v + j];
        }
        free(rows);
    }
    free(before), free(dstep), free(dS);
}

// ---- linear attention: the gated norm -------------------------------------------------------------------------------
// z: the gate of x, or NULL
static double gated_norm_scale(const double *x, const double *z, size_t V, double eps) {
    double mean = 0.0;
    for (size_t i = 0; i < V; i++) {
        const double gated = z ? x[i] * silu_of(z[i]) : x[i];
        mean += gated * gated / (double)V;
    }
    return 1.0 / sqrt(mean + eps);
}

static void reference_gated_norm_forward(double *out, const double *x, const double *z, const double *w, size_t n,
                                         size_t heads, size_t V, size_t stride, int gate_first, double eps) {
    for (size_t i = 0; i < n * heads; i++) {
        const double *const gate = z + i / heads * stride + i % heads * V, *const own =
                                                                               w + gate_first * (i % heads * V);
        const double scale = gated_norm_scale(x + i * V, gate_first ? gate : NULL, V, eps);
        for (size_t j = 0; j < V; j++) out[i * V + j] = own[j] * x[i * V + j] * scale * silu_of(gate[j]);
    }
}

// With g = dout w silu(z):   dx = (g - xhat mean(g xhat)) / sqrt(mean(x^2) + eps). gate_first: with a = x silu(z) and g
// = dout w,   da = (g - ahat mean(g ahat)) / sqrt(mean(a^2) + eps),   dx = da silu(z),   dz = da x silu'(z)
static void reference_gated_norm_backward(double *dx, double *dz, double *dw, const double *dout, const double *x,
                                          const double *z, const double *w, size_t n, size_t heads, size_t V,
                                          size_t stride, int gate_first, double eps, void *scratch) {
    (void)scratch;
    for (size_t i = 0; i < n * heads; i++) {
        const size_t column = i / heads * stride + i % heads * V, first = gate_first ? i % heads * V : 0;
        const double *const gate = z + column, *const own = w + first;
        const double scale = gated_norm_scale(x + i * V, gate_first ? gate : NULL, V, eps);
        double mean = 0.0;
        for (size_t j = 0; j < V; j++)
            mean += dout[i * V + j] * own[j] * silu_of(gate[j]) * x[i * V + j] * scale / (double)V;
        for (size_t j = 0; j < V; j++) {
            const double d = dout[i * V + j], in = x[i * V + j], xhat = in * scale, share = silu_of(gate[j]);
            const double da = (d * own[j] - xhat * share * mean) * scale; // gate_first
            if (dw) dw[first + j] += d * xhat * share;
            if (dz) dz[column + j] = (gate_first ? da * in : d * own[j] * xhat) * silu_slope(gate[j]);
            dx[i * V + j] = gate_first ? da * share : (d * own[j] * share - xhat * mean) * scale;
        }
    }
}

#endif
