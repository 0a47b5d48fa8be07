/*
The arithmetic of a block of at most DELTA_BLOCK tokens of the gated delta rule (delta.h), on blocks packed in a
thread's scratch memory: products on the register tile of tile.h, the triangular system, decays, and operations on rows.
A packed block's rows are padded to ROW_MULTIPLE, its columns to packed_width, with zeros.

c_i is the logarithm of the decay over tokens up to i of the block. Decays are exp(c_i - c_j), j <= i, never quotients,
and c is double: neither a decay of 0 nor the decay after a strong one loses a digit.
*/
#ifndef LLMC_CPU_DELTA_BLOCK_H
#define LLMC_CPU_DELTA_BLOCK_H
#include "llmc/ops/ops.h"
#include "simd_math.h"
#include "tile.h"

// Elements from row to row of a block's [tokens][tokens] and transposed [dimensions][tokens] matrices
#define DELTA_STRIDE (DELTA_BLOCK + CACHE_LINE)

static inline size_t padded_rows(size_t rows) { return round_up(rows, ROW_MULTIPLE); }

// ---- products -------------------------------------------------------------------------------------------------------

// Terms of a row's sums: all, terms 0 to the row, or terms from the row on. Triangles are multiplied in whole tiles,
// with a = 0 outside the triangle
typedef enum { TERMS_ALL, TERMS_TO_ROW, TERMS_FROM_ROW } ProductTerms;

// A product: c[rows][columns] = scale[row * scale_step] c + a[rows][length] b[length][columns]; scale NULL: without c
typedef struct {
    floatS *c;
    const floatS *a, *b;
    size_t c_stride, a_stride, b_stride;
    size_t rows, length, columns; // rows are padded
    int a_transposed;             // 1: a is stored as [length][rows]
    ProductTerms terms;
    int lower; // 1: only the tiles and vectors of c with an element j <= i
    const floatS *scale;
    size_t scale_step;
} BlockProduct;

static const floatS scale_one[1] = {1}; // scale that adds the product to c

VECTOR_INLINE void block_tile(const BlockProduct *p, size_t row, size_t column, int vectors, int transposed) {
    const size_t from = p->terms == TERMS_FROM_ROW ? row : 0;
    const size_t end = p->terms == TERMS_TO_ROW ? min_size(row + TILE_ROWS, p->length) : p->length;
    const size_t a_row = transposed ? 1 : p->a_stride, a_step = transposed ? p->a_stride : 1;
    Vector sum[TILE_ROWS][TILE_VECTORS];
    tile_sums(sum, p->a + row * a_row + from * a_step, a_row, a_step, p->b + from * p->b_stride + column, p->b_stride,
              end - from, vectors);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++) {
            floatS *to = p->c + (row + (size_t)r) * p->c_stride + column + (size_t)v * VECTOR_LANES;
            vector_store(to, p->scale ? p->scale[(row + (size_t)r) * p->scale_step] * vector_load(to) + sum[r][v]
                                      : sum[r][v]);
        }
}

VECTOR_INLINE void block_tile_of(const BlockProduct *p, size_t row, size_t column, size_t vectors, int transposed) {
    switch (vectors) {
    case 1: block_tile(p, row, column, 1, transposed); break;
    case 2: block_tile(p, row, column, 2, transposed); break;
    default: block_tile(p, row, column, TILE_VECTORS, transposed); break;
    }
}

static VECTOR_FUNCTION void block_product(const BlockProduct *p) {
    for (size_t column = 0, vectors; column < p->columns; column += vectors * VECTOR_LANES) {
        vectors = panel_vectors(p->columns - column);
        for (size_t row = 0; row < p->rows; row += TILE_ROWS) {
            const size_t end = p->lower ? row + TILE_ROWS : p->columns;
            if (end <= column) continue;
            const size_t some = min_size(vectors, (end - column + VECTOR_LANES - 1) / VECTOR_LANES);
            if (p->a_transposed)
                block_tile_of(p, row, column, some, 1);
            else
                block_tile_of(p, row, column, some, 0);
        }
    }
}

// Solves a tile of rows of the system: subtracts the rows solved before, then substitutes in registers.
VECTOR_INLINE void solve_tile(floatS *x, size_t stride, const floatS *A, size_t row, size_t rows, int vectors,
                              int transposed) {
    const size_t next = row + TILE_ROWS, a_row = transposed ? 1 : DELTA_STRIDE, a_step = transposed ? DELTA_STRIDE : 1;
    const floatS *corner = A + row * (DELTA_STRIDE + 1);
    Vector sum[TILE_ROWS][TILE_VECTORS];
    if (transposed)
        tile_sums(sum, corner + TILE_ROWS * DELTA_STRIDE, a_row, a_step, x + next * stride, stride, rows - next,
                  vectors);
    else
        tile_sums(sum, A + row * DELTA_STRIDE, a_row, a_step, x, stride, row, vectors);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vector_load(x + (row + (size_t)r) * stride + (size_t)v * VECTOR_LANES) - sum[r][v];
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < i; j++) {
            const int r = transposed ? TILE_ROWS - 1 - i : i, from = transposed ? TILE_ROWS - 1 - j : j;
            for (int v = 0; v < vectors; v++)
                sum[r][v] -= corner[(size_t)r * a_row + (size_t)from * a_step] * sum[from][v];
        }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++)
            vector_store(x + (row + (size_t)r) * stride + (size_t)v * VECTOR_LANES, sum[r][v]);
}

VECTOR_INLINE void solve_panel(floatS *x, size_t stride, const floatS *A, size_t rows, int vectors, int transposed) {
    for (size_t done = 0; done < rows; done += TILE_ROWS)
        solve_tile(x, stride, A, transposed ? rows - TILE_ROWS - done : done, rows, vectors, transposed);
}

// Computes x[rows][columns] = (I + A)^-1 x, or with transposed (I + A)^-T x, for a strictly lower triangle
// A[rows][DELTA_STRIDE].
static VECTOR_FUNCTION void block_solve(floatS *x, size_t stride, const floatS *A, size_t rows, size_t columns,
                                        int transposed) {
    for (size_t column = 0, vectors; column < columns; column += vectors * VECTOR_LANES) {
        vectors = panel_vectors(columns - column);
        switch (2 * vectors + (size_t)transposed) {
        case 2: solve_panel(x + column, stride, A, rows, 1, 0); break;
        case 3: solve_panel(x + column, stride, A, rows, 1, 1); break;
        case 4: solve_panel(x + column, stride, A, rows, 2, 0); break;
        case 5: solve_panel(x + column, stride, A, rows, 2, 1); break;
        case 6: solve_panel(x + column, stride, A, rows, TILE_VECTORS, 0); break;
        default: solve_panel(x + column, stride, A, rows, TILE_VECTORS, 1); break;
        }
    }
}

// Stores out[columns][rows] = the transpose of in[rows][columns]; both sides in whole vectors.
static VECTOR_FUNCTION void delta_transpose(floatS *out, size_t out_stride, const floatS *in, size_t in_stride,
                                            size_t rows, size_t columns) {
    for (size_t c = 0; c < columns; c += VECTOR_LANES)
        for (size_t r = 0; r < rows; r += VECTOR_LANES)
            vector_transpose(out + c * out_stride + r, out_stride, in + r * in_stride + c, in_stride);
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Tokens prefetched ahead: rows of consecutive tokens are too far apart for the processor's own prefetching
enum { DELTA_AHEAD = 2 }; // tokens
VECTOR_INLINE void delta_look_ahead(const floatX *x, size_t t, size_t tokens, size_t stride, size_t width) {
    if (t + DELTA_AHEAD < tokens)
        for (size_t d = 0; d < width; d += 64 / sizeof(floatX)) __builtin_prefetch(x + (t + DELTA_AHEAD) * stride + d);
}

// Packs each token's normalised row: block[rows][packed_width(K)] = scale x / sqrt(sum of squares + 1e-6).
// inverse[token]: the factor without scale
static VECTOR_FUNCTION void delta_pack_unit(floatS *block, floatS *inverse, const floatX *x, size_t tokens, size_t rows,
                                            size_t stride, size_t K, double scale) {
    const size_t width = packed_width(K);
    for (size_t t = 0; t < rows; t++) {
        floatS *row = block + t * width;
        Vector squares = {0};
        delta_look_ahead(x, t, tokens, stride, K);
        for (size_t d = 0; d < width; d += VECTOR_LANES) {
            Vector y = {0};
            if (t < tokens && d < K) y = vector_load_first(x + t * stride + d, K - d, 0);
            vector_store(row + d, y);
            squares += y * y;
        }
        if (t >= tokens) continue;
        const double one = 1 / sqrt((double)vector_sum_across(squares) + 1e-6);
        inverse[t] = (floatS)one;
        for (size_t d = 0; d < K; d += VECTOR_LANES)
            vector_store(row + d, (floatS)(scale * one) * vector_load(row + d));
    }
}

// Packs block[rows][packed_width(V)] = x.
static VECTOR_FUNCTION void delta_pack(floatS *block, const floatX *x, size_t tokens, size_t rows, size_t stride,
                                       size_t V) {
    const size_t width = packed_width(V);
    for (size_t t = 0; t < rows; t++)
        for (size_t d = 0; d < width; d += VECTOR_LANES)
            vector_store(block + t * width + d,
                         t < tokens && d < V ? vector_load_first(x + t * stride + d, V - d, 0) : (Vector){0});
}

// Stores x[token][V] = block.
static VECTOR_FUNCTION void delta_unpack(floatX *x, size_t stride, const floatS *block, size_t tokens, size_t V) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t d = 0; d < V; d += VECTOR_LANES)
            vector_store_first(x + t * stride + d, vector_load(block + t * packed_width(V) + d), V - d);
}

// Computes dv = beta r and out[token] = r . v.
static VECTOR_FUNCTION void delta_values_back(floatX *dv, floatS *out, const floatS *r, const floatX *v,
                                              const floatS *beta, size_t tokens, size_t stride, size_t V) {
    for (size_t t = 0; t < tokens; t++) {
        Vector sum = {0};
        for (size_t d = 0; d < V; d += VECTOR_LANES) {
            const Vector x = vector_load(r + t * packed_width(V) + d);
            sum += x * vector_load_first(v + t * stride + d, V - d, 0);
            vector_store_first(dv + t * stride + d, beta[t] * x, V - d);
        }
        out[t] = vector_sum_across(sum);
    }
}

// Computes out[rows][width] = factor[row] in.
static VECTOR_FUNCTION void delta_scale_rows(floatS *out, const floatS *in, const floatS *factor, size_t rows,
                                             size_t width) {
    for (size_t t = 0; t < rows; t++)
        for (size_t d = 0; d < width; d += VECTOR_LANES)
            vector_store(out + t * width + d, factor[t] * vector_load(in + t * width + d));
}

// Computes d += factor[token] z and out[token] = z . y. Rows have K elements and are packed.
static VECTOR_FUNCTION void delta_add_rows(floatS *d, floatS *out, const floatS *z, const floatS *y,
                                           const floatS *factor, size_t rows, size_t K) {
    const size_t width = packed_width(K);
    for (size_t t = 0; t < rows; t++) {
        Vector sum = {0};
        for (size_t i = t * width; i < t * width + K; i += VECTOR_LANES) {
            const Vector x = vector_load(z + i);
            vector_store(d + i, vector_load(d + i) + factor[t] * x);
            sum += x * vector_load(y + i);
        }
        out[t] = vector_sum_across(sum);
    }
}

// Computes dx[token][K], the gradient of x, from packed y = scale x inverse and its gradient dy.
static VECTOR_FUNCTION void delta_unpack_unit(floatX *dx, const floatS *dy, const floatS *y, const floatS *inverse,
                                              size_t tokens, size_t stride, size_t K, double scale) {
    const size_t width = packed_width(K);
    for (size_t t = 0; t < tokens; t++) {
        const floatS *d = dy + t * width, *unit = y + t * width;
        Vector sum = {0};
        for (size_t i = 0; i < K; i += VECTOR_LANES) sum += vector_load(d + i) * vector_load(unit + i);
        const floatS dot = vector_sum_across(sum) / (floatS)(scale * scale), factor = (floatS)scale * inverse[t];
        for (size_t i = 0; i < K; i += VECTOR_LANES)
            vector_store_first(dx + t * stride + i, factor * (vector_load(d + i) - dot * vector_load(unit + i)), K - i);
    }
}

// ---- states ---------------------------------------------------------------------------------------------------------

// Packs S[padded rows of K][packed_width(V)] = state[K][V].
static void delta_open_state(floatS *S, const floatS *state, size_t K, size_t V) {
    const size_t width = packed_width(V);
    memset(S, 0, padded_rows(K) * width * sizeof(floatS));
    for (size_t i = 0; i < K; i++) memcpy(S + i * width, state + i * V, V * sizeof(floatS));
}

static void delta_close_state(floatS *state, const floatS *S, size_t K, size_t V) {
    for (size_t i = 0; i < K; i++) memcpy(state + i * V, S + i * packed_width(V), V * sizeof(floatS));
}

// ---- decays ---------------------------------------------------------------------------------------------------------

// A value head's gates at a block's tokens; 0 after the last token
typedef struct {
    double c[DELTA_BLOCK];          // sum of log_decay up to the token
    double log_decay[DELTA_BLOCK];  // logarithm of the token's decay
    double beta_slope[DELTA_BLOCK]; // d beta / d b
    double slope[DELTA_BLOCK];      // 1 / (1 + exp(-(a + dt_bias)))
    floatS beta[DELTA_BLOCK];       // beta_most / (1 + exp(-b))
    floatS from_begin[DELTA_BLOCK]; // exp(c_i): decay since the block's start
    floatS to_end[DELTA_BLOCK];     // exp(c_last - c_i)
    floatS minus_both[DELTA_BLOCK]; // -beta exp(c_i)
    floatS whole;                   // exp(c_last)
    double rate;                    // exp(A_log)
} DeltaGates;

// Bounds the decay of a token to exp(-this), so that differences of sums stay finite.
#define MOST_LOG_DECAY 1e5

// Computes the decays to and from each token of a block from c.
static VECTOR_FUNCTION void gates_decays(DeltaGates *g, size_t tokens, size_t rows) {
    const double c = g->c[rows - 1];
    for (size_t i = 0; i < rows; i++) g->from_begin[i] = (floatS)g->c[i], g->to_end[i] = (floatS)(c - g->c[i]);
    for (size_t i = 0; i < rows; i += VECTOR_LANES) {
        const Vector begin = vector_exp(vector_load(g->from_begin + i)), end = vector_exp(vector_load(g->to_end + i));
        const VectorBits mask = vector_first_lanes(tokens > i ? tokens - i : 0);
        vector_store(g->from_begin + i, (Vector)((VectorBits)begin & mask));
        vector_store(g->to_end + i, (Vector)((VectorBits)end & mask));
    }
    g->whole = g->from_begin[tokens - 1];
}

static VECTOR_FUNCTION void delta_gates(DeltaGates *g, const floatX *b, const floatX *a, size_t stride, floatX A_log,
                                        floatX dt_bias, double beta_most, size_t tokens, size_t rows) {
    double c = 0;
    g->rate = exp((double)load(A_log));
    for (size_t i = 0; i < rows; i++) {
        g->beta[i] = 0;
        if (i < tokens) {
            const double z = (double)load(a[i * stride]) + (double)load(dt_bias), e = exp(-fabs(z));
            const double decay = -g->rate * (log1p(e) + (z > 0 ? z : 0));
            const double y = (double)load(b[i * stride]), f = exp(-fabs(y));
            g->beta[i] = (floatS)(beta_most * (y > 0 ? 1 : f) / (1 + f));
            g->beta_slope[i] = beta_most * f / ((1 + f) * (1 + f));
            g->slope[i] = (z > 0 ? 1 : e) / (1 + e);
            g->log_decay[i] = decay < -MOST_LOG_DECAY ? -MOST_LOG_DECAY : decay;
            c += g->log_decay[i];
        }
        g->c[i] = c;
    }
    gates_decays(g, tokens, rows);
    for (size_t i = 0; i < rows; i++) g->minus_both[i] = -g->beta[i] * g->from_begin[i];
}

// Computes the gates of Mamba-2's rule: beta is a token's step, slope its derivative by dt.
static VECTOR_FUNCTION void ssd_gates(DeltaGates *g, const floatX *dt, size_t stride, floatX A_log, floatX dt_bias,
                                      double least, double most, size_t tokens, size_t rows) {
    double c = 0;
    g->rate = exp((double)load(A_log));
    for (size_t i = 0; i < rows; i++) {
        g->beta[i] = 0;
        if (i < tokens) {
            const double z = (double)load(dt[i * stride]) + (double)load(dt_bias), e = exp(-fabs(z));
            const double open = log1p(e) + (z > 0 ? z : 0), step = open < least ? least : open > most ? most : open;
            g->beta[i] = (floatS)step, g->slope[i] = step < open || step > open ? 0 : (z > 0 ? 1 : e) / (1 + e);
            g->log_decay[i] = -fmin(g->rate * step, MOST_LOG_DECAY);
            c += g->log_decay[i];
        }
        g->c[i] = c;
    }
    gates_decays(g, tokens, rows);
}

VECTOR_INLINE VectorBits lanes_to(size_t end, size_t j) { return vector_first_lanes(end > j ? end - j : 0); }
VECTOR_INLINE Vector masked(Vector x, VectorBits mask) { return (Vector)((VectorBits)x & mask); }

// Computes the decays D_ij = exp(c_i - c_j) for j <= i, A = beta_i D_ij gram_ij for j < i, and P = D_ij scores_ij.
// A, P, D: NULL if not wanted. All are 0 above the diagonal, up to where tiles read.
static VECTOR_FUNCTION void delta_decays(floatS *A, floatS *P, floatS *D, const floatS *gram, const floatS *scores,
                                         const DeltaGates *g, size_t tokens, size_t rows) {
    floatS past[DELTA_BLOCK];
    for (size_t i = 0; i < rows; i++) {
        const size_t extent = padded_rows(i + 1), at = i * DELTA_STRIDE;
        const double c = g->c[i];
        for (size_t j = 0; j < extent; j++) past[j] = (floatS)(c - g->c[j]);
        for (size_t j = 0; j < extent; j += VECTOR_LANES) {
            const VectorBits before = lanes_to(i, j), seen = i < tokens ? lanes_to(i + 1, j) : (VectorBits){0};
            const Vector decay = masked(vector_exp(vector_load(past + j)), seen);
            if (A) vector_store(A + at + j, masked(g->beta[i] * decay * vector_load(gram + at + j), before));
            if (P) vector_store(P + at + j, masked(decay * vector_load(scores + at + j), seen));
            if (D) vector_store(D + at + j, decay);
        }
    }
}

// Computes u = beta (v - exp(c) u); v NULL: 0. fresh: the state before the block is 0, so u = beta v
static VECTOR_FUNCTION void delta_values(floatS *u, const floatX *v, size_t stride, const DeltaGates *g, size_t tokens,
                                         size_t rows, size_t V, int fresh) {
    const size_t width = packed_width(V);
    for (size_t t = 0; t < rows; t++) {
        if (v) delta_look_ahead(v, t, tokens, stride, V);
        for (size_t d = 0; d < width; d += VECTOR_LANES) {
            Vector y = {0};
            if (v && t < tokens && d < V) y = vector_load_first(v + t * stride + d, V - d, 0);
            if (!fresh && t < tokens && d < V) y -= g->from_begin[t] * vector_load(u + t * width + d);
            vector_store(u + t * width + d, g->beta[t] * y);
        }
    }
}

// ---- the gradient of a block's matrices -----------------------------------------------------------------------------

// Runs decays backward. In: dP = dout u^T and r u^T = -dA, lower triangles. Computes dscores += dP D, dgram += dA beta
// D and dbeta[i] = sum over j of dA_ij D_ij gram_ij. dlog[i] is the sum of dP P + dA A over pairs (r, j), r >= i > j,
// which the decay of token i scales: no difference of larger sums. A NULL: A, dA, dgram and dbeta are absent.
static VECTOR_FUNCTION void delta_decays_back(floatS *dscores, floatS *dgram, double *dbeta, double *dlog,
                                              const floatS *dP, const floatS *minus_dA, const floatS *A,
                                              const floatS *P, const floatS *D, const floatS *gram, const DeltaGates *g,
                                              size_t tokens) {
    Vector across[DELTA_BLOCK / VECTOR_LANES] = {{0}}; // for each j, sums over rows from i on
    for (size_t i = tokens; i-- > 0;) {
        Vector to_beta = {0}, to_log = {0};
        for (size_t j = 0; j <= i; j += VECTOR_LANES) {
            const size_t at = i * DELTA_STRIDE + j;
            const VectorBits before = lanes_to(i, j);
            const Vector dp = masked(vector_load(dP + at), lanes_to(i + 1, j)), decay = vector_load(D + at);
            Vector decayed = dp * vector_load(P + at);
            vector_store(dscores + at, vector_load(dscores + at) + dp * decay);
            if (A) {
                const Vector da = masked(-vector_load(minus_dA + at), before), slope = da * decay;
                vector_store(dgram + at, vector_load(dgram + at) + g->beta[i] * slope);
                to_beta += masked(slope * vector_load(gram + at), before);
                decayed += da * vector_load(A + at);
            }
            across[j / VECTOR_LANES] += masked(decayed, before);
            to_log += masked(across[j / VECTOR_LANES], before);
        }
        if (A) dbeta[i] = (double)vector_sum_across(to_beta);
        dlog[i] = (double)vector_sum_across(to_log);
    }
}

// ---- Mamba-2 --------------------------------------------------------------------------------------------------------

// Stores out[token][V] = block + skip v.
static VECTOR_FUNCTION void ssd_unpack(floatX *out, size_t row, const floatS *block, const floatX *v, size_t stride,
                                       floatS skip, size_t tokens, size_t V) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t d = 0; d < V; d += VECTOR_LANES) {
            const Vector value = vector_load_first(v + t * stride + d, V - d, 0);
            vector_store_first(out + t * row + d, vector_load(block + t * packed_width(V) + d) + skip * value, V - d);
        }
}

// Computes dv = step r + skip dout and dstep[token] = r . v. Returns the sum of dout . v.
static VECTOR_FUNCTION double ssd_values_back(floatX *dv, floatS *dstep, const floatS *r, const floatS *dout,
                                              const floatX *v, const floatS *step, floatS skip, size_t tokens,
                                              size_t stride, size_t V) {
    double total = 0;
    for (size_t t = 0; t < tokens; t++) {
        Vector sum = {0}, direct = {0};
        for (size_t d = 0; d < V; d += VECTOR_LANES) {
            const size_t at = t * packed_width(V) + d;
            const Vector x = vector_load(r + at), y = vector_load(dout + at);
            const Vector value = vector_load_first(v + t * stride + d, V - d, 0);
            sum += x * value, direct += y * value;
            vector_store_first(dv + t * stride + d, step[t] * x + skip * y, V - d);
        }
        dstep[t] = vector_sum_across(sum), total += (double)vector_sum_across(direct);
    }
    return total;
}

// Updates a stored state[K][V] by one token: S = decay S + k (step v)^T, and out = S^T q + skip v. out may be NULL
static VECTOR_FUNCTION void ssd_step(floatS *S, floatX *out, const floatS *k, const floatS *q, const floatX *v,
                                     floatS step, floatS decay, floatS skip, size_t K, size_t V) {
    size_t c = 0;
    for (; c + VECTOR_LANES <= V; c += VECTOR_LANES) {
        const Vector value = vector_load_stored(v + c), u = step * value;
        Vector sum = skip * value;
        for (size_t d = 0; d < K; d++) {
            const Vector now = decay * vector_load(S + d * V + c) + k[d] * u;
            vector_store(S + d * V + c, now);
            sum += q[d] * now;
        }
        if (out) vector_store_stored(out + c, sum);
    }
    for (; c < V; c++) {
        const floatS value = load(v[c]), u = step * value;
        floatS sum = skip * value;
        for (size_t d = 0; d < K; d++) {
            S[d * V + c] = decay * S[d * V + c] + k[d] * u;
            sum += q[d] * S[d * V + c];
        }
        if (out) out[c] = store(sum);
    }
}

// ---- one token ------------------------------------------------------------------------------------------------------

// Updates columns [0, vectors) of a state with rows of `stride` elements: S = decay S + k u^T, u = beta (v - decay S^T
// k), and out = S^T q. v NULL: 0; out may be NULL
VECTOR_INLINE void step_panel(floatS *S, size_t stride, floatX *out, const floatS *k, const floatS *q, const floatX *v,
                              floatS beta, floatS decay, floatS kq, size_t K, int vectors) {
    Vector by_k[TILE_ROWS], by_q[TILE_ROWS];
    for (int i = 0; i < vectors; i++) by_k[i] = by_q[i] = (Vector){0};
    for (size_t d = 0; d < K; d++)
        for (int i = 0; i < vectors; i++) {
            const Vector s = vector_load(S + d * stride + (size_t)i * VECTOR_LANES);
            by_k[i] += k[d] * s;
            by_q[i] += q[d] * s;
        }
    for (int i = 0; i < vectors; i++) {
        const Vector value = v ? vector_load_stored(v + (size_t)i * VECTOR_LANES) : (Vector){0};
        by_k[i] = beta * (value - decay * by_k[i]);
        if (out) vector_store_stored(out + (size_t)i * VECTOR_LANES, decay * by_q[i] + kq * by_k[i]);
    }
    for (size_t d = 0; d < K; d++)
        for (int i = 0; i < vectors; i++) {
            floatS *s = S + d * stride + (size_t)i * VECTOR_LANES;
            vector_store(s, decay * vector_load(s) + k[d] * by_k[i]);
        }
}

static void step_column(floatS *S, size_t stride, floatX *out, const floatS *k, const floatS *q, const floatX *v,
                        floatS beta, floatS decay, floatS kq, size_t K) {
    floatS by_k = 0, by_q = 0;
    for (size_t d = 0; d < K; d++) by_k += k[d] * S[d * stride], by_q += q[d] * S[d * stride];
    by_k = beta * ((v ? load(*v) : 0) - decay * by_k);
    if (out) *out = store(decay * by_q + kq * by_k);
    for (size_t d = 0; d < K; d++) S[d * stride] = decay * S[d * stride] + k[d] * by_k;
}

// Updates all columns of a stored state[K][V] by one token.
static VECTOR_FUNCTION void delta_step(floatS *S, floatX *out, const floatS *k, const floatS *q, const floatX *v,
                                       floatS beta, floatS decay, size_t K, size_t V) {
    enum { PANEL = TILE_ROWS * VECTOR_LANES };
    size_t c = 0;
    Vector sum = {0};
    for (size_t d = 0; d < K; d += VECTOR_LANES) sum += vector_load(k + d) * vector_load(q + d);
    const floatS kq = vector_sum_across(sum);
    for (; c + PANEL <= V; c += PANEL)
        step_panel(S + c, V, out ? out + c : NULL, k, q, v ? v + c : NULL, beta, decay, kq, K, TILE_ROWS);
    for (; c + VECTOR_LANES <= V; c += VECTOR_LANES)
        step_panel(S + c, V, out ? out + c : NULL, k, q, v ? v + c : NULL, beta, decay, kq, K, 1);
    for (; c < V; c++) step_column(S + c, V, out ? out + c : NULL, k, q, v ? v + c : NULL, beta, decay, kq, K);
}

#endif
