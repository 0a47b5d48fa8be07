/*
The ops of ops.h in double, one element at a time, written only from the formulas of their comments. The verb `doctor`
and the tests compare op sets with it. Parameters, write contract and allowed aliases are the same as the op's; scratch
is not used. test_ops.c compares each backward with central differences of its forward.
*/
#ifndef LLMC_OPS_REFERENCE_H
#define LLMC_OPS_REFERENCE_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"
#include "ops.h"

// ---- embedding ------------------------------------------------------------------------------------------------------
static void reference_embedding_forward(double *out, const int32_t *tokens, const int32_t *position, const double *wte,
                                        const double *wpe, size_t n, size_t C, double scale) {
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < C; i++)
            out[t * C + i] = scale * wte[(size_t)tokens[t] * C + i] + (wpe ? wpe[(size_t)position[t] * C + i] : 0.0);
}

static void reference_embedding_backward(double *dw, DType dw_type, const double *dx, const int32_t *index, size_t N,
                                         size_t rows, size_t C, double scale, size_t skip, void *scratch) {
    (void)dw_type, (void)rows, (void)scratch;
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < C && (size_t)index[t] != skip; i++)
            dw[(size_t)index[t] * C + i] += scale * dx[t * C + i];
}

static void reference_scatter_rows(double *out, const double *in, const int32_t *row, size_t n, size_t width) {
    for (size_t t = 0; t < n; t++) memcpy(out + (size_t)row[t] * width, in + t * width, width * sizeof(double));
}

static void reference_gather_rows(double *out, const double *in, const int32_t *row, size_t n, size_t width) {
    for (size_t t = 0; t < n; t++)
        if (row[t]) memcpy(out + t * width, in + (size_t)row[t] * width, width * sizeof(double));
}

// ---- quantised weights: quantise.h's steps, each in double and rounded to fp32, which equals fp32 -------------------
static void reference_dequantise(double *out, const void *record, const QuantFormat *format, size_t n) {
    const QuantParts p = quant_parts(*format, n);
    const unsigned char *bytes = (const unsigned char *)record;
    float map[256], offset = 0, scale;
    quant_dynamic_map(map, 1);
    if (format->nested) memcpy(&offset, bytes + p.offset, sizeof(offset));
    for (size_t i = 0; i < n && format->type == QUANT_FP8; i++) {
        const QuantGrid g = format->grid;
        const size_t row = i / g.cols, high = (g.rows + g.block_rows - 1) / g.block_rows;
        const size_t block = row / g.rows * high + row % g.rows / g.block_rows;
        const int exponent = bytes[i] >> 3 & 15, mantissa = bytes[i] & 7;
        const double code = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
        memcpy(&scale, bytes + p.scales + (block * quant_columns(*format) + i % g.cols / format->block) * sizeof(float),
               sizeof(scale));
        out[i] = (double)quant_round(format->rounding, (float)((bytes[i] & 128 ? -code : code) * (double)scale));
    }
    for (size_t i = 0; i < n && format->type != QUANT_FP8; i++) {
        const size_t block = i / format->block, at = format->nested ? block / QUANT_NESTED_BLOCK : block;
        if (format->type == QUANT_MXFP4)
            scale = (float)ldexp(1, bytes[p.scale_codes + block] - 128);
        else
            memcpy(&scale, bytes + p.scales + at * sizeof(float), sizeof(scale));
        volatile float product = scale; // volatile: else a compiler may see that fp32 suffices, and round once
        if (format->nested) product = (float)((double)map[bytes[p.scale_codes + block]] * (double)scale);
        scale = (float)((double)product + (double)offset);
        const int low = (i % 2 != 0) != (format->type == QUANT_MXFP4);
        const double code = (double)quant_codes[format->type][low ? bytes[i / 2] & 15 : bytes[i / 2] >> 4];
        out[i] = (double)quant_round(format->rounding, (float)(code * (double)scale));
    }
}

// ---- norms: normalised = (x - mean) / sqrt(variance + eps), with mean = 0 and variance = mean(x^2) for RMSNorm ------
static double norm_statistics(Norm norm, const double *x, size_t C, double *mean) {
    double variance = 0.0;
    *mean = 0.0;
    for (size_t i = 0; i < C && norm.kind == NORM_LAYER; i++) *mean += x[i] / (double)C;
    for (size_t i = 0; i < C; i++) variance += (x[i] - *mean) * (x[i] - *mean) / (double)C;
    return 1.0 / sqrt(variance + norm.eps);
}

static double norm_factor_of(Norm norm, const double *w, size_t i) { return w ? w[i] + norm.offset : 1.0; }

static void reference_norm_forward(double *out, const double *x, const double *w, const double *b,
                                   const double *residual, size_t n, size_t C, Norm norm) {
    for (size_t t = 0; t < n; t++) {
        double mean, scale = norm_statistics(norm, x + t * C, C, &mean);
        for (size_t i = 0; i < C; i++)
            out[t * C + i] = (x[t * C + i] - mean) * scale * norm_factor_of(norm, w, i) + (b ? b[i] : 0.0) +
                             (residual ? residual[t * C + i] : 0.0);
    }
}

// Computes, with u = normalised x and g = dout * (w + offset):
//     dx = (g - mean(g) [LayerNorm only] - u * mean(g * u)) / sqrt(variance + eps)
static void reference_norm_backward(double *dx, double *dw, double *db, const double *dout, const double *x,
                                    const double *w, size_t n, size_t C, Norm norm, int accumulate, void *scratch) {
    (void)scratch;
    for (size_t t = 0; t < n; t++) {
        const double *xt = x + t * C, *dt = dout + t * C;
        double mean, scale = norm_statistics(norm, xt, C, &mean), mean_g = 0.0, mean_gu = 0.0;
        for (size_t i = 0; i < C; i++) {
            if (norm.kind == NORM_LAYER) mean_g += dt[i] * norm_factor_of(norm, w, i) / (double)C;
            mean_gu += dt[i] * norm_factor_of(norm, w, i) * (xt[i] - mean) * scale / (double)C;
        }
        for (size_t i = 0; i < C; i++) {
            const double u = (xt[i] - mean) * scale, d = dt[i];
            if (dw) dw[i] += d * u;
            if (db) db[i] += d;
            dx[t * C + i] =
                (accumulate ? dx[t * C + i] : 0.0) + (d * norm_factor_of(norm, w, i) - mean_g - u * mean_gu) * scale;
        }
    }
}

// ---- linear ---------------------------------------------------------------------------------------------------------
static void reference_linear_forward(double *out, const double *x, const double *weight, const double *bias,
                                     const double *residual, size_t n, size_t C, size_t OC, size_t stride) {
    for (size_t t = 0; t < n; t++)
        for (size_t o = 0; o < OC; o++) {
            double sum = (bias ? bias[o] : 0.0) + (residual ? residual[t * stride + o] : 0.0);
            for (size_t i = 0; i < C; i++) sum += x[t * C + i] * weight[o * C + i];
            out[t * stride + o] = sum;
        }
}

static void reference_linear_forward_quantised(double *out, const double *x, const void *record,
                                               const QuantFormat *format, size_t rows, size_t first, const double *bias,
                                               const double *residual, size_t n, size_t C, size_t OC, size_t stride) {
    double *weight = (double *)checked_calloc(rows * C, sizeof(double), "a matrix in 4 bits");
    reference_dequantise(weight, record, format, rows * C);
    reference_linear_forward(out, x, weight + first * C, bias, residual, n, C, OC, stride);
    free(weight);
}

static void reference_linear_backward_input(double *dx, const double *dout, const double *weight, size_t n, size_t C,
                                            size_t OC, size_t stride, int accumulate) {
    if (!accumulate) memset(dx, 0, n * C * sizeof(double));
    for (size_t t = 0; t < n; t++)
        for (size_t o = 0; o < OC; o++)
            for (size_t i = 0; i < C; i++) dx[t * C + i] += dout[t * stride + o] * weight[o * C + i];
}

static void reference_linear_backward_weight(double *dweight, double *dbias, const double *dout, const double *x,
                                             size_t n, size_t C, size_t OC, size_t stride) {
    for (size_t t = 0; t < n; t++)
        for (size_t o = 0; o < OC; o++) {
            if (dbias) dbias[o] += dout[t * stride + o];
            for (size_t i = 0; i < C; i++) dweight[o * C + i] += dout[t * stride + o] * x[t * C + i];
        }
}

// ---- scaling, dropout -----------------------------------------------------------------------------------------------
static void reference_scale(double *x, DType type, double factor, size_t count) {
    (void)type;
    for (size_t i = 0; i < count; i++) x[i] *= factor;
}

static int reference_keeps(uint64_t seed, double rate, uint64_t place) {
    return (double)random_bits(seed, 0, place) >= rate * 0x1p64;
}

static void reference_dropout(double *out, const double *in, size_t n, size_t width, size_t first_row, double rate,
                              uint64_t seed, int accumulate) {
    for (size_t i = 0; i < n * width; i++) {
        const double kept = reference_keeps(seed, rate, first_row * width + i) ? in[i] / (1.0 - rate) : 0.0;
        out[i] = (accumulate ? out[i] : 0.0) + kept;
    }
}

// ---- rotary position embedding, in place ----------------------------------------------------------------------------
// Rounds the angle, its cosine and sine, their products with factor, and the queries' scale to fp32.
static void reference_rope(double *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads,
                           size_t HD, size_t R, Rotation how, int back) {
    const size_t half = R / 2, step = how.interleaved ? 2 : 1, apart = how.interleaved ? 1 : half;
    for (size_t t = 0; t < n; t++)
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < half; i++) {
                float angle = (float)position[t] * inverse_frequency[i];
                const double later = floor((double)position[t] / (how.growth != 0 ? how.original : 1));
                const volatile float more = (float)how.growth * (float)log(1 + later);
                const double scale = 1 + more;
                const double c = scale * (double)(how.factor * (float)cos((double)angle));
                const double s = (back ? -scale : scale) * (double)(how.factor * (float)sin((double)angle));
                double *a = x + (t * heads + h) * HD + i * step, *b = a + apart, before_a = *a, before_b = *b;
                *a = before_a * c - before_b * s;
                *b = before_b * c + before_a * s;
            }
}

// ---- attention ------------------------------------------------------------------------------------------------------
// Returns the first key that query t of a span sees, by the window's definition.
static size_t attention_first_key(Spans spans, size_t s, size_t t) {
    size_t first = spans.span[s].document;
    while (spans.window && t - first >= spans.window) first++;
    return first;
}

// Computes a query's probabilities over keys [first, end) into p[end - first]. Returns log sum exp of the query's
// scores.
static double attention_row(double *p, const double *q, const double *k, size_t first, size_t end, size_t key_head,
                            const AttentionShape *a) {
    size_t count = end - first;
    double largest = -INFINITY, sum = 0.0;
    for (size_t j = 0; j < count; j++) {
        const double *key = k + ((first + j) * a->NKV + key_head) * a->HD;
        p[j] = 0.0;
        for (size_t i = 0; i < a->HD; i++) p[j] += q[i] * key[i];
        p[j] *= a->scale;
        if (p[j] > largest) largest = p[j];
    }
    for (size_t j = 0; j < count; j++) sum += p[j] = exp(p[j] - largest);
    for (size_t j = 0; j < count; j++) p[j] /= sum;
    return largest + log(sum);
}

// Allocates the probabilities of one row; the caller frees them.
static double *attention_memory(Spans spans) {
    size_t most = 0;
    for (size_t s = 0; s < spans.count; s++)
        if (spans.span[s].end > most) most = spans.span[s].end;
    return (double *)checked_malloc(most * sizeof(double), "the reference of attention");
}

// Computes one range of keys. The reference ignores shape->accumulate.
static void reference_attention_forward(double *out, double *lse, const double *q, const double *k, const double *v,
                                        const AttentionShape *a, void *scratch) {
    const Spans spans = a->spans;
    const size_t HD = a->HD;
    double *p = attention_memory(spans);
    (void)scratch;
    for (size_t s = 0; s < spans.count; s++)
        for (size_t t = spans.span[s].begin; t < spans.span[s].end; t++)
            for (size_t h = 0; h < a->NH; h++) {
                size_t row = (spans.span[s].row + t - spans.span[s].begin) * a->NH + h, key_head = h / (a->NH / a->NKV),
                       from = attention_first_key(spans, s, t), end = t + 1;
                double *o = out + row * HD;
                if (from < a->keys.begin) from = a->keys.begin;
                if (end > a->keys.end) end = a->keys.end;
                memset(o, 0, HD * sizeof(double));
                lse[row] = -INFINITY;
                if (from >= end) continue;
                lse[row] = attention_row(p, q + row * HD, k, from, end, key_head, a);
                for (size_t j = from; j < end; j++)
                    for (size_t i = 0; i < HD; i++) o[i] += p[j - from] * v[(j * a->NKV + key_head) * HD + i];
            }
    free(p);
}

// Computes, with s = scale q k, p = exp(s - lse), out = p v: dv += p dout, ds = p (dout v - dout out), dq += scale ds
// k, dk += scale ds q. out and lse are inputs, as in the op, so that their rounding affects the op and the reference
// equally. lse NULL: without sinks
static void reference_attention_backward(double *dq, double *dk, double *dv, const double *dout, const double *out,
                                         const double *q, const double *k, const double *v, const double *lse,
                                         const AttentionShape *a, void *scratch) {
    const Spans spans = a->spans;
    const size_t HD = a->HD;
    double *p = attention_memory(spans);
    (void)scratch;
    memset(dq, 0, spans_rows(spans) * a->NH * HD * sizeof(double));
    for (size_t s = 0; s < spans.count; s++)
        for (size_t t = spans.span[s].begin; t < spans.span[s].end; t++)
            for (size_t h = 0; h < a->NH; h++) {
                size_t row = (spans.span[s].row + t - spans.span[s].begin) * a->NH + h, key_head = h / (a->NH / a->NKV),
                       from = attention_first_key(spans, s, t);
                const double *d = dout + row * HD;
                double mean = 0.0;
                const double own = attention_row(p, q + row * HD, k, from, t + 1, key_head, a);
                for (size_t j = from; lse && j <= t; j++) p[j - from] *= exp(own - lse[row]);
                for (size_t i = 0; i < HD; i++) mean += d[i] * out[row * HD + i];
                for (size_t j = from; j <= t; j++) {
                    size_t key = (j * a->NKV + key_head) * HD;
                    double dp = 0.0;
                    for (size_t i = 0; i < HD; i++) dp += d[i] * v[key + i];
                    double ds = p[j - from] * (dp - mean) * a->scale;
                    for (size_t i = 0; i < HD; i++) {
                        dv[key + i] += p[j - from] * d[i];
                        dk[key + i] += ds * q[row * HD + i];
                        dq[row * HD + i] += ds * k[key + i];
                    }
                }
            }
    free(p);
}

static void reference_attention_received(double *received, const double *q, const double *k, const double *lse,
                                         size_t n, size_t keys, size_t NH, size_t NKV, size_t HD, double scale,
                                         void *scratch) {
    (void)scratch;
    for (size_t t = 0; t < n; t++)
        for (size_t h = 0; h < NH; h++)
            for (size_t j = 0; j <= keys - n + t; j++) {
                const double *key = k + (j * NKV + h / (NH / NKV)) * HD;
                double score = 0;
                for (size_t i = 0; i < HD; i++) score += q[(t * NH + h) * HD + i] * key[i];
                received[j] += exp(scale * score - lse[t * NH + h]);
            }
}

// Marks the best block that has no mark, one after another, then gives marked blocks to slots.
static void reference_blocks_choose(int32_t *slot, int32_t *taken, const double *score, size_t blocks, size_t slots,
                                    void *scratch) {
    char *marked = (char *)checked_calloc(blocks + 1, 1, "marks of blocks");
    (void)scratch;
    for (size_t i = 0; i < slots; i++) {
        size_t best = 0;
        double highest = -INFINITY;
        for (size_t b = 1; b <= blocks; b++) {
            const double own = score && !isnan(score[b - 1]) ? score[b - 1] : -INFINITY;
            if (!marked[b] && (!best || own > highest)) best = b, highest = own;
        }
        marked[best] = 1;
    }
    for (size_t i = 0; i < slots; i++) {
        taken[i] = !slot[i] || !marked[slot[i]];
        if (!taken[i]) marked[slot[i]] = 2;
    }
    for (size_t i = 0, next = 1; i < slots; i++) {
        if (!taken[i]) continue;
        while (marked[next] != 1) next++;
        slot[i] = taken[i] = (int32_t)next++;
    }
    free(marked);
}

// ---- sinks ----------------------------------------------------------------------------------------------------------
static void reference_sink_forward(double *out, double *lse, const double *sinks, size_t n, size_t NH, size_t HD) {
    for (size_t i = 0; i < n * NH; i++) {
        const double l = lse[i], s = sinks[i % NH], most = fmax(l, s);
        lse[i] = most + log(exp(l - most) + exp(s - most));
        for (size_t c = i * HD; c < (i + 1) * HD; c++) out[c] *= exp(l - lse[i]);
    }
}

static void reference_sink_backward(double *dsinks, const double *dout, const double *out, const double *lse,
                                    const double *sinks, size_t n, size_t NH, size_t HD, void *scratch) {
    (void)scratch;
    for (size_t i = 0; i < n * NH; i++)
        for (size_t c = i * HD; c < (i + 1) * HD; c++) dsinks[i % NH] -= exp(sinks[i % NH] - lse[i]) * dout[c] * out[c];
}

// ---- activations ----------------------------------------------------------------------------------------------------
static double logistic(double x) { return x >= 0.0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x)); }

// Returns z, the argument of GELU's tanh. With the sigmoid s: (1 + tanh z) / 2 = s(2z) and (1 - tanh^2 z) / 2 = 2 s(2z)
// s(-2z). These do not cancel if tanh z is near -1 or 1.
static double gelu_inner(double x) { return sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x); }

static double gelu_of(double x) { return x * logistic(2.0 * gelu_inner(x)); }
static double silu_of(double x) { return x * logistic(x); }

static double gelu_slope(double x) {
    const double z = gelu_inner(x), dz = sqrt(2.0 / 3.14159265358979323846) * (1.0 + 3.0 * 0.044715 * x * x);
    return logistic(2.0 * z) + x * 2.0 * logistic(2.0 * z) * logistic(-2.0 * z) * dz;
}
static double silu_slope(double x) { return logistic(x) + silu_of(x) * (1.0 - logistic(x)); }

// Inputs of one output element: gate, up (1 without gate) and their indices
typedef struct {
    size_t gate_at, up_at;
    double gate, up;
} ReferenceGated;

static ReferenceGated reference_gated(const double *in, Activation a, size_t i, size_t FF) {
    ReferenceGated x = {i, i, 0.0, 1.0};
    if (a.kind == ACTIVATION_CLAMPED) x.gate_at = 2 * i, x.up_at = 2 * i + 1;
    if (a.kind == ACTIVATION_SWIGLU || a.kind == ACTIVATION_GEGLU)
        x.gate_at = i + i / FF * FF, x.up_at = x.gate_at + FF;
    x.gate = in[x.gate_at];
    if (activation_gates(a.kind)) x.up = in[x.up_at];
    return x;
}

static double clamped_to(double x, double least, double most) { return x > most ? most : x < least ? least : x; }

static void reference_activation_forward(double *out, const double *in, Activation a, size_t n, size_t FF) {
    for (size_t i = 0; i < n * FF; i++) {
        const ReferenceGated x = reference_gated(in, a, i, FF);
        const double g = clamped_to(x.gate, -INFINITY, a.limit), u = clamped_to(x.up, -a.limit, a.limit);
        out[i] = a.kind == ACTIVATION_CLAMPED  ? g * logistic(a.alpha * g) * (u + 1.0)
                 : a.kind == ACTIVATION_SWIGLU ? silu_of(x.gate) * x.up
                 : a.kind == ACTIVATION_RELU2  ? fmax(x.gate, 0.0) * fmax(x.gate, 0.0)
                                               : gelu_of(x.gate) * x.up;
    }
}

static void reference_activation_backward(double *din, const double *dout, const double *in, Activation a, size_t n,
                                          size_t FF) {
    for (size_t i = 0; i < n * FF; i++) {
        const ReferenceGated x = reference_gated(in, a, i, FF);
        const double g = clamped_to(x.gate, -INFINITY, a.limit), u = clamped_to(x.up, -a.limit, a.limit);
        const double s = logistic(a.alpha * g);
        if (a.kind == ACTIVATION_CLAMPED) {
            din[x.gate_at] = x.gate > a.limit ? 0.0 : dout[i] * (u + 1.0) * (s + a.alpha * g * s * (1.0 - s));
            din[x.up_at] = fabs(x.up) > a.limit ? 0.0 : dout[i] * g * s;
            continue;
        }
        const int silu = a.kind == ACTIVATION_SWIGLU;
        din[x.gate_at] = a.kind == ACTIVATION_RELU2 ? dout[i] * 2.0 * fmax(x.gate, 0.0)
                                                    : dout[i] * x.up * (silu ? silu_slope(x.gate) : gelu_slope(x.gate));
        if (activation_gates(a.kind)) din[x.up_at] = dout[i] * (silu ? silu_of(x.gate) : gelu_of(x.gate));
    }
}

// ---- loss head ------------------------------------------------------------------------------------------------------
// Returns log sum exp((logit - *largest) / temperature). *largest is returned separately, because adding it would lose
// digits.
static double row_logsumexp(const double *logits, size_t V, double temperature, double *largest) {
    double sum = 0.0;
    *largest = -INFINITY;
    for (size_t i = 0; i < V; i++) *largest = fmax(*largest, logits[i]);
    for (size_t i = 0; i < V; i++) sum += exp((logits[i] - *largest) / temperature);
    return log(sum);
}

// Returns the capped logit. Infinite logits stay infinite.
static double capped_to(double logit, double cap) {
    return cap > 0.0 && isfinite(logit) ? cap * tanh(logit / cap) : logit;
}

// Computes log-probabilities and gradients. A row without a target has gradient 0, whatever its weight.
static void reference_logprob(double *logp, double *entropy, double *logits, const int32_t *targets,
                              const double *weight, size_t n, size_t V, size_t stride, Temperature temperature) {
    const double T = temperature.divisor, cap = temperature.cap;
    double *row = (double *)checked_malloc(V * sizeof(*row), "a row of logits");
    for (size_t t = 0; t < n; t++) {
        double largest;
        for (size_t i = 0; i < V; i++) row[i] = capped_to(logits[t * stride + i], cap);
        const double lse = row_logsumexp(row, V, T, &largest);
        const size_t target = targets[t] < 0 ? V : (size_t)targets[t];
        logp[t] = target < V ? (row[target] - largest) / T - lse : 0.0;
        if (entropy) entropy[t] = 0.0;
        for (size_t i = 0; i < V; i++) {
            const double log_p = (row[i] - largest) / T - lse, p = exp(log_p);
            const double slope = cap > 0.0 ? pow(cosh(logits[t * stride + i] / cap), -2.0) : 1.0;
            if (entropy && target < V && p > 0.0) entropy[t] -= p * log_p;
            if (weight)
                logits[t * stride + i] = target < V ? weight[t] / T * ((i == target ? 1.0 : 0.0) - p) * slope : 0.0;
        }
    }
    free(row);
}

// Computes the likeliest tokens of each row, by repeated search.
static void reference_likeliest(int32_t *top, double *top_logp, double *tail, const double *logits,
                                const int32_t *targets, size_t n, size_t V, size_t k, size_t stride,
                                Temperature temperature) {
    double *row = (double *)checked_malloc(V * sizeof(*row), "a row of logits");
    for (size_t t = 0; t < n; t++) {
        const double *x = logits + t * stride;
        double largest, rest = 0.0;
        for (size_t i = 0; i < V; i++) row[i] = capped_to(x[i], temperature.cap);
        const double lse = row_logsumexp(row, V, temperature.divisor, &largest);
        size_t found = 0;
        for (size_t i = 0; i < V; i++) {
            size_t before = 0; // tokens that are likelier
            for (size_t j = 0; j < V && before < k; j++) before += x[j] > x[i] || (x[j] == x[i] && j < i);
            const double logp = (row[i] - largest) / temperature.divisor - lse;
            if (before < k)
                top[t * k + found] = (int32_t)i, top_logp[t * k + found++] = logp;
            else
                rest += exp(logp);
        }
        tail[t] = rest;
        for (size_t j = 0; j < k && targets[t] < 0; j++) top[t * k + j] = 0, top_logp[t * k + j] = 0.0;
        if (targets[t] < 0) tail[t] = 0.0;
    }
    free(row);
}

// Computes a student's divergence from a teacher's k tokens and their tail, log-probabilities, and gradients.
static void reference_distill(double *logp, double *divergence, double *logits, const int32_t *targets,
                              const int32_t *top, const double *top_logp, const double *tail, const double *weight,
                              size_t n, size_t V, size_t k, size_t stride, Distillation how, double *scratch) {
    const double D = how.temperature.divisor, cap = how.temperature.cap, T = how.softness;
    double *row = (double *)checked_malloc(2 * V * sizeof(*row), "a row of logits"), *p = row + V;
    (void)scratch;
    for (size_t t = 0; t < n; t++) {
        double *x = logits + t * stride, largest, others = 0.0, all = tail[t];
        const size_t target = targets[t] < 0 ? V : (size_t)targets[t];
        for (size_t i = 0; i < V; i++) row[i] = capped_to(x[i], cap), p[i] = -1.0;
        for (size_t j = 0; j < k; j++) p[top[t * k + j]] = exp(top_logp[t * k + j]), all += p[top[t * k + j]];
        const double hard = row_logsumexp(row, V, D, &largest), soft = row_logsumexp(row, V, D * T, &largest);
        for (size_t i = 0; i < V; i++) others += p[i] < 0.0 ? exp((row[i] - largest) / (D * T) - soft) : 0.0;
        divergence[t] = tail[t] > 0.0 ? tail[t] * log(tail[t] / others) : 0.0;
        for (size_t i = 0; i < V; i++)
            if (p[i] > 0.0) divergence[t] += p[i] * (log(p[i]) - ((row[i] - largest) / (D * T) - soft));
        logp[t] = target < V ? (row[target] - largest) / D - hard : 0.0;
        if (target == V) divergence[t] = 0.0;
        for (size_t i = 0; i < V && weight; i++) {
            const double q = exp((row[i] - largest) / (D * T) - soft), one = i == target ? 1.0 : 0.0;
            const double by_soft = p[i] < 0.0 ? q * (all - tail[t] / others) : all * q - p[i];
            const double by_hard = one - exp((row[i] - largest) / D - hard);
            const double slope = cap > 0.0 ? pow(cosh(x[i] / cap), -2.0) : 1.0;
            const double of_z = (1.0 - how.share) * by_hard - how.share * T * by_soft;
            x[i] = target < V ? weight[t] * of_z / D * slope : 0.0;
        }
    }
    free(row);
}

// ---- sampling ------------------------------------------------------------------------------------------------------
typedef struct {
    double logit;
    int32_t id;
} ReferenceToken;

static int reference_likelier(const void *a, const void *b) {
    const ReferenceToken *x = (const ReferenceToken *)a, *y = (const ReferenceToken *)b;
    return x->logit > y->logit ? -1 : x->logit < y->logit ? 1 : x->id < y->id ? -1 : 1;
}

// Draws a token of a row. token[V] is scratch
static int32_t reference_draw_row(ReferenceToken *token, const double *logits, double uniform, size_t V,
                                  const SamplingSettings *s) {
    const double T = s->temperature;
    size_t count = s->top_k && s->top_k < V ? s->top_k : V, i;
    double largest, whole = 0.0, held = 0.0;
    for (i = 0; i < V; i++) {
        if (!isfinite(logits[i])) return -1 - (int32_t)i;
        token[i].logit = logits[i], token[i].id = (int32_t)i;
    }
    qsort(token, V, sizeof(*token), reference_likelier); // sorts logits without the cap, which keeps their order
    if (T == 0.0) return token[0].id;
    for (i = 0; i < V; i++) token[i].logit = capped_to(token[i].logit, s->cap);
    largest = token[0].logit;
    for (i = 0; i < count; i++) whole += exp((token[i].logit - largest) / T);
    for (i = 0; s->top_p < 1.0 && i < count; i++) {
        held += exp((token[i].logit - largest) / T);
        if (held >= s->top_p * whole) count = i + 1, whole = held;
    }
    for (i = 0; s->top_p >= 1.0 && count == V && i < V; i++) // without limits: all tokens, by falling ids
        token[i].id = (int32_t)(V - 1 - i), token[i].logit = capped_to(logits[V - 1 - i], s->cap);
    for (i = 0, held = 0.0; i + 1 < count; i++)
        if ((held += exp((token[i].logit - largest) / T)) > uniform * whole) break;
    return token[i].id;
}

static void reference_draw(int32_t *token, const double *logits, const double *uniform, size_t n, size_t V,
                           size_t stride, const SamplingSettings *settings, void *scratch) {
    ReferenceToken *row = (ReferenceToken *)checked_malloc(V * sizeof(*row), "tokens in order");
    (void)scratch;
    for (size_t t = 0; t < n; t++) token[t] = reference_draw_row(row, logits + t * stride, uniform[t], V, settings);
    free(row);
}

// ---- gradients ------------------------------------------------------------------------------------------------------
static void reference_round_sums(double *out, const double *in, size_t count) {
    memcpy(out, in, count * sizeof(double)); // does not round here; the comparison does
}

static void reference_widen(double *out, const double *in, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = (double)(float)in[i];
}

// ---- states of linear attention between ranks -----------------------------------------------------------------------
static void reference_transfer_begin(double *transfer, const DeltaShape *shape) {
    const size_t K = shape->ssd ? 1 : shape->K;
    for (size_t i = 0; i < shape->HV * K * K; i++) transfer[i] = i % K == i / K % K;
}

static void reference_state_combine(double *state, const double *transfer, const double *before, int back,
                                    const DeltaShape *shape) {
    const size_t K = shape->K, V = shape->V;
    for (size_t head = 0; head < shape->HV; head++)
        for (size_t i = 0; i < K * V; i++)
            for (size_t k = 0; k < K; k++)
                if (shape->ssd)
                    state[head * K * V + i] += k ? 0.0 : transfer[head] * before[head * K * V + i];
                else
                    state[head * K * V + i] += transfer[(head * K + (back ? k : i / V)) * K + (back ? i / V : k)] *
                                               before[(head * K + k) * V + i % V];
}

static void reference_gradient_add(double *gradient, DType type, const double *in, size_t count) {
    (void)type;
    for (size_t i = 0; i < count; i++) gradient[i] += in[i];
}

// ---- AdamW (Loshchilov and Hutter 2019, algorithm 2, with the decay scaled by the learning rate) --------------------
// Updates *m and *v. Returns the change of w.
static double reference_adamw(double w, double *m, double *v, double gradient, const AdamW *step) {
    double g = gradient * step->gradient_scale;
    *m = step->beta1 * *m + (1.0 - step->beta1) * g;
    *v = step->beta2 * *v + (1.0 - step->beta2) * g * g;
    double m_hat = *m / (1.0 - pow(step->beta1, (double)step->step));
    double v_hat = *v / (1.0 - pow(step->beta2, (double)step->step));
    return -step->learning_rate * (m_hat / (sqrt(v_hat) + step->epsilon) + step->weight_decay * w);
}

#endif
