/*
Every op of llmc/ops/ops.h in double, one element at a time, written from the formula in its comment and nothing else:
what the tests hold op sets against. Forward functions overwrite their output. Backward functions ADD to every gradient
they are given; the caller clears what the op overwrites. test_ops.c holds each backward against central differences of
its forward.
*/
#ifndef TEST_REFERENCE_H
#define TEST_REFERENCE_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include "llmc/ops/ops.h"

// ---- embedding ------------------------------------------------------------------------------------------------------
static void reference_embedding_forward(double *out, const int32_t *tokens, const int32_t *position, const double *wte,
                                        const double *wpe, size_t n, size_t C, double scale) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < C; i++)
            out[t * C + i] = scale * wte[(size_t)tokens[t] * C + i] + (wpe ? wpe[(size_t)position[t] * C + i] : 0.0);
}

static void reference_embedding_backward(double *dw, const double *dx, const int32_t *index, size_t N, size_t C,
                                         double scale) {
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < C; i++) dw[(size_t)index[t] * C + i] += scale * dx[t * C + i];
}

// ---- norms: normalised = (x - mean) / sqrt(variance + eps), with mean = 0 and variance = mean(x^2) for RMSNorm ------
static double norm_statistics(int layernorm, const double *x, size_t C, double eps, double *mean) {
    double variance = 0.0;
    *mean = 0.0;
    if (layernorm)
        for (size_t i = 0; i < C; i++) *mean += x[i] / (double)C;
    for (size_t i = 0; i < C; i++) variance += (x[i] - *mean) * (x[i] - *mean) / (double)C;
    return 1.0 / sqrt(variance + eps);
}

// b is NULL for RMSNorm, which alone may have a residual[n,C], and an offset of its weights.
static void reference_norm_forward(double *out, const double *x, const double *w, const double *b,
                                   const double *residual, size_t n, size_t C, double eps, double offset) {
    for (size_t t = 0; t < n; t++) {
        double mean, scale = norm_statistics(b != NULL, x + t * C, C, eps, &mean);
        for (size_t i = 0; i < C; i++)
            out[t * C + i] = (x[t * C + i] - mean) * scale * (w[i] + offset) + (b ? b[i] : 0.0) +
                             (residual ? residual[t * C + i] : 0.0);
    }
}

// db is NULL for RMSNorm. With u = normalised x and g = dout * (w + offset):
//     dx = (g - mean(g) [LayerNorm only] - u * mean(g * u)) / sqrt(variance + eps)
static void reference_norm_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                                    const double *w, size_t n, size_t C, double eps, double offset) {
    for (size_t t = 0; t < n; t++) {
        const double *xt = x + t * C, *dt = dout + t * C;
        double mean, scale = norm_statistics(db != NULL, xt, C, eps, &mean), mean_g = 0.0, mean_gu = 0.0;
        for (size_t i = 0; i < C; i++) {
            if (db) mean_g += dt[i] * (w[i] + offset) / (double)C;
            mean_gu += dt[i] * (w[i] + offset) * (xt[i] - mean) * scale / (double)C;
        }
        for (size_t i = 0; i < C; i++) {
            double u = (xt[i] - mean) * scale;
            dx[t * C + i] += (dt[i] * (w[i] + offset) - mean_g - u * mean_gu) * scale;
            dw[i] += dt[i] * u;
            if (db) db[i] += dt[i];
        }
    }
}

// ---- linear ---------------------------------------------------------------------------------------------------------
static void reference_linear_forward(double *out, const double *x, const double *weight, const double *bias,
                                     const double *residual, size_t n, size_t C, size_t OC) {
    for (size_t t = 0; t < n; t++)
        for (size_t o = 0; o < OC; o++) {
            double sum = (bias ? bias[o] : 0.0) + (residual ? residual[t * OC + o] : 0.0);
            for (size_t i = 0; i < C; i++) sum += x[t * C + i] * weight[o * C + i];
            out[t * OC + o] = sum;
        }
}

// dx, or dweight, or dbias may be NULL.
static void reference_linear_backward(double *dx, double *dweight, double *dbias, const double *dout, const double *x,
                                      const double *weight, size_t n, size_t C, size_t OC) {
    for (size_t t = 0; t < n; t++)
        for (size_t o = 0; o < OC; o++) {
            double d = dout[t * OC + o];
            if (dbias) dbias[o] += d;
            for (size_t i = 0; dx && i < C; i++) dx[t * C + i] += d * weight[o * C + i];
            for (size_t i = 0; dweight && i < C; i++) dweight[o * C + i] += d * x[t * C + i];
        }
}

// ---- rotary position embedding, in place; the angle is the fp32 product, its cosine and sine are rounded to fp32 ----
static void reference_rope(double *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                           size_t HD, int backward) {
    size_t half = HD / 2;
    for (size_t t = 0; t < n; t++)
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < half; i++) {
                float angle = (float)position[t] * inverse_frequency[i];
                double c = (float)cos((double)angle), s = (float)sin((double)angle);
                double *a = x + (t * heads + h) * HD + i, *b = a + half, before_a = *a, before_b = *b;
                if (backward) s = -s;
                *a = before_a * c - before_b * s;
                *b = before_b * c + before_a * s;
            }
}

// ---- attention ------------------------------------------------------------------------------------------------------
// The first key that query t of a span sees, by the window's definition.
static size_t attention_first_key(Spans spans, size_t s, size_t t) {
    size_t first = spans.span[s].document;
    while (spans.window && t - first >= spans.window) first++;
    return first;
}

// The row of query t.
static size_t attention_place(Span span, size_t t) { return span.row + t - span.begin; }

// Probabilities of a query over keys [first, end) into p[end - first]; returns log sum exp.
static double attention_row(double *p, const double *q, const double *k, size_t first, size_t end, size_t NKV,
                            size_t key_head, size_t HD, double scale) {
    size_t count = end - first;
    double largest = -INFINITY, sum = 0.0;
    for (size_t j = 0; j < count; j++) {
        const double *key = k + ((first + j) * NKV + key_head) * HD;
        p[j] = 0.0;
        for (size_t i = 0; i < HD; i++) p[j] += q[i] * key[i];
        p[j] *= scale;
        if (p[j] > largest) largest = p[j];
    }
    for (size_t j = 0; j < count; j++) sum += p[j] = exp(p[j] - largest);
    for (size_t j = 0; j < count; j++) p[j] /= sum;
    return largest + log(sum);
}

// p is memory for one row: as many doubles as the longest document has tokens.
static void reference_attention_forward_part(double *out, double *lse, const double *q, const double *k,
                                             const double *v, Spans spans, KeyRange keys, size_t NH, size_t NKV,
                                             size_t HD, double scale, double *p) {
    for (size_t s = 0; s < spans.count; s++)
        for (size_t t = spans.span[s].begin; t < spans.span[s].end; t++)
            for (size_t h = 0; h < NH; h++) {
                size_t row = attention_place(spans.span[s], t) * NH + h, key_head = h / (NH / NKV),
                       from = attention_first_key(spans, s, t), end = t + 1;
                double *o = out + row * HD;
                if (from < keys.begin) from = keys.begin;
                if (end > keys.end) end = keys.end;
                for (size_t i = 0; i < HD; i++) o[i] = 0.0;
                lse[row] = -INFINITY;
                if (from >= end) continue;
                lse[row] = attention_row(p, q + row * HD, k, from, end, NKV, key_head, HD, scale);
                for (size_t j = from; j < end; j++)
                    for (size_t i = 0; i < HD; i++) o[i] += p[j - from] * v[(j * NKV + key_head) * HD + i];
            }
}

static void reference_attention_forward(double *out, double *lse, const double *q, const double *k, const double *v,
                                        Spans spans, size_t NH, size_t NKV, size_t HD, double scale, double *p) {
    reference_attention_forward_part(out, lse, q, k, v, spans, all_keys, NH, NKV, HD, scale, p);
}

// With s = scale q k, p = softmax(s), out = p v:   dv += p dout,   ds = p (dout v - dout out),   dq, dk += scale ds k,
// q. out is an input, as it is of the op, so that the rounding it has been through counts on both sides.
static void reference_attention_backward(double *dq, double *dk, double *dv, const double *dout, const double *out,
                                         const double *q, const double *k, const double *v, Spans spans, size_t NH,
                                         size_t NKV, size_t HD, double scale, double *p) {
    for (size_t s = 0; s < spans.count; s++)
        for (size_t t = spans.span[s].begin; t < spans.span[s].end; t++)
            for (size_t h = 0; h < NH; h++) {
                size_t row = attention_place(spans.span[s], t) * NH + h, key_head = h / (NH / NKV),
                       from = attention_first_key(spans, s, t);
                const double *d = dout + row * HD;
                double mean = 0.0;
                attention_row(p, q + row * HD, k, from, t + 1, NKV, key_head, HD, scale);
                for (size_t i = 0; i < HD; i++) mean += d[i] * out[row * HD + i];
                for (size_t j = from; j <= t; j++) {
                    size_t key = (j * NKV + key_head) * HD;
                    double dp = 0.0;
                    for (size_t i = 0; i < HD; i++) dp += d[i] * v[key + i];
                    double ds = p[j - from] * (dp - mean) * scale;
                    for (size_t i = 0; i < HD; i++) {
                        dv[key + i] += p[j - from] * d[i];
                        dk[key + i] += ds * q[row * HD + i];
                        dq[row * HD + i] += ds * k[key + i];
                    }
                }
            }
}

// ---- activations ----------------------------------------------------------------------------------------------------
static double sigmoid(double x) { return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x)); }

static void reference_swiglu_forward(double *out, const double *gate_up, size_t n, size_t FF) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < FF; i++) {
            double gate = gate_up[t * 2 * FF + i], up = gate_up[t * 2 * FF + FF + i];
            out[t * FF + i] = gate * sigmoid(gate) * up;
        }
}

static void reference_swiglu_backward(double *dgate_up, const double *dout, const double *gate_up, size_t n,
                                      size_t FF) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < FF; i++) {
            size_t g = t * 2 * FF + i, u = g + FF;
            double s = sigmoid(gate_up[g]), d = dout[t * FF + i];
            dgate_up[g] += d * gate_up[u] * (s + gate_up[g] * s * (1.0 - s));
            dgate_up[u] += d * gate_up[g] * s;
        }
}

// The tanh of GELU is of this. In terms of the sigmoid s(2z): (1 + tanh z) / 2 = s(2z) and (1 - tanh^2 z) / 2 =
// 2 s(2z) s(-2z), which do not cancel where tanh z is near -1 or 1.
static double gelu_inner(double x) { return sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x); }

static void reference_gelu_forward(double *out, const double *x, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = x[i] * sigmoid(2.0 * gelu_inner(x[i]));
}

static void reference_gelu_backward(double *dx, const double *dout, const double *x, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double z = gelu_inner(x[i]), slope = sqrt(2.0 / 3.14159265358979323846) * (1.0 + 3.0 * 0.044715 * x[i] * x[i]);
        dx[i] += dout[i] * (sigmoid(2.0 * z) + x[i] * 2.0 * sigmoid(2.0 * z) * sigmoid(-2.0 * z) * slope);
    }
}

// A gated GELU: gelu(gate) * up, from GELU itself.
static void reference_geglu_forward(double *out, const double *gate_up, size_t n, size_t FF) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < FF; i++) {
            reference_gelu_forward(&out[t * FF + i], &gate_up[t * 2 * FF + i], 1);
            out[t * FF + i] *= gate_up[t * 2 * FF + FF + i];
        }
}

static void reference_geglu_backward(double *dgate_up, const double *dout, const double *gate_up, size_t n, size_t FF) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < FF; i++) {
            size_t g = t * 2 * FF + i, u = g + FF;
            double d = dout[t * FF + i], through = d * gate_up[u], gelu;
            reference_gelu_forward(&gelu, &gate_up[g], 1);
            reference_gelu_backward(&dgate_up[g], &through, &gate_up[g], 1);
            dgate_up[u] += d * gelu;
        }
}

// ---- loss head ------------------------------------------------------------------------------------------------------
// log of the sum of exp((logit - *largest) / temperature). The largest is kept apart: added in, it would cost digits.
static double row_logsumexp(const double *logits, size_t V, double temperature, double *largest) {
    double sum = 0.0;
    *largest = -INFINITY;
    for (size_t i = 0; i < V; i++) *largest = fmax(*largest, logits[i]);
    for (size_t i = 0; i < V; i++) sum += exp((logits[i] - *largest) / temperature);
    return log(sum);
}

static void reference_logprob_forward(double *logp, const double *logits, const int32_t *targets, size_t n, size_t V,
                                      double temperature) {
    for (size_t t = 0; t < n; t++) {
        const double *row = logits + t * V;
        double largest, lse = row_logsumexp(row, V, temperature, &largest);
        logp[t] = targets[t] < 0 ? 0.0 : (row[targets[t]] - largest) / temperature - lse;
    }
}

// -sum p log p, as it is written
static void reference_entropy(double *entropy, const double *logits, const int32_t *targets, size_t n, size_t V,
                              double temperature) {
    for (size_t t = 0; t < n; t++) {
        const double *row = logits + t * V;
        double largest, lse = row_logsumexp(row, V, temperature, &largest);
        entropy[t] = 0.0;
        for (size_t i = 0; i < V && targets[t] >= 0; i++) {
            double log_p = (row[i] - largest) / temperature - lse, p = exp(log_p);
            if (p > 0.0) entropy[t] -= p * log_p;
        }
    }
}

// A row without a target does not depend on its logits: its gradient is 0 whatever its weight.
static void reference_logprob_backward(double *dlogits, const double *logits, const int32_t *targets,
                                       const double *weight, size_t n, size_t V, double temperature) {
    for (size_t t = 0; t < n; t++) {
        const double *row = logits + t * V;
        double largest, lse = row_logsumexp(row, V, temperature, &largest);
        for (size_t i = 0; i < V && targets[t] >= 0; i++) {
            double onehot = (int32_t)i == targets[t] ? 1.0 : 0.0;
            dlogits[t * V + i] += weight[t] / temperature * (onehot - exp((row[i] - largest) / temperature - lse));
        }
    }
}

// ---- AdamW (Loshchilov and Hutter 2019, algorithm 2, with the decay scaled by the learning rate) --------------------
// Steps *m and *v; returns by how much w changes.
static double reference_adamw(double w, double *m, double *v, double gradient, const AdamW *step) {
    double g = gradient * step->gradient_scale;
    *m = step->beta1 * *m + (1.0 - step->beta1) * g;
    *v = step->beta2 * *v + (1.0 - step->beta2) * g * g;
    double m_hat = *m / (1.0 - pow(step->beta1, (double)step->step));
    double v_hat = *v / (1.0 - pow(step->beta2, (double)step->step));
    return -step->learning_rate * (m_hat / (sqrt(v_hat) + step->epsilon) + step->weight_decay * w);
}

#endif
