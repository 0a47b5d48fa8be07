/*
Token and learned position embeddings: forward gathers rows of a table, backward scatters to them. Backward first sorts
the stream by row (counting sort); one thread adds up a row's tokens in stream order. So there are no atomics, the bits
are the same for any number of threads, and a bf16 gradient is rounded once per row and call.
*/
#ifndef LLMC_CPU_EMBEDDING_H
#define LLMC_CPU_EMBEDDING_H
#include "llmc/ops/ops.h"
#include "elements.h"

static void cpu_embedding_forward(Stored *out_, const int32_t *tokens, const int32_t *position, const Stored *wte_,
                                  const Stored *wpe_, size_t n, size_t C, double scale_) {
    const floatS scale = (floatS)scale_;
    floatX *out = (floatX *)out_;
    const floatX *wte = (const floatX *)wte_, *wpe = (const floatX *)wpe_;
#pragma omp parallel for schedule(static) if (n * C >= PARALLEL_MIN)
    for (size_t t = 0; t < n; t++) {
        floatX *row = out + t * C;
        const floatX *token_row = wte + (size_t)tokens[t] * C;
        if (wpe) {
            const floatX *position_row = wpe + (size_t)position[t] * C;
#pragma omp simd
            for (size_t c = 0; c < C; c++) row[c] = store(scale * load(token_row[c]) + load(position_row[c]));
        } else if (scale != 1) {
#pragma omp simd
            for (size_t c = 0; c < C; c++) row[c] = store(scale * load(token_row[c]));
        } else {
            memcpy(row, token_row, C * sizeof(*row));
        }
    }
}

// Columns of a row summed at a time. They are few, so that several threads share a frequent token's row.
enum { EMBEDDING_COLUMNS = 256 };

// Sizes scratch, as int32: end[rows], then order[N]
static size_t cpu_embedding_backward_scratch(size_t N, size_t rows, size_t C) {
    (void)C;
    return ((rows + N) * sizeof(int32_t) + sizeof(floatS) - 1) / sizeof(floatS);
}

// Sorts the tokens by row into order[], each row's tokens in stream order. Row r has order[end[r - 1] .. end[r]).
static void sort_by_row(int32_t *end, int32_t *order, const int32_t *index, size_t N, size_t rows) {
    int32_t before = 0;
    memset(end, 0, rows * sizeof(*end));
    for (size_t t = 0; t < N; t++) end[index[t]]++;
    for (size_t r = 0; r < rows; r++) {
        int32_t count = end[r];
        end[r] = before; // the row's beginning for now; placing its tokens moves it to the end
        before += count;
    }
    for (size_t t = 0; t < N; t++) order[end[index[t]]++] = (int32_t)t;
}

// Adds to dw[begin .. begin + count) scale * the sum of dx[t * C .. + count) over the tokens t in order[0..tokens).
static void add_token_rows(void *dw, DType dw_type, size_t begin, const floatX *dx, const int32_t *order, size_t tokens,
                           size_t count, size_t C, floatS scale) {
    floatS sum[EMBEDDING_COLUMNS] = {0}, buffer[EMBEDDING_COLUMNS];
    for (size_t first = 0; first < tokens; first += TOKEN_GROUP) {
        floatS group[EMBEDDING_COLUMNS] = {0};
        for (size_t i = first; i < min_size(first + TOKEN_GROUP, tokens); i++) {
            const floatX *row = dx + (size_t)order[i] * C;
#pragma omp simd
            for (size_t c = 0; c < count; c++) group[c] += load(row[c]);
        }
        for (size_t c = 0; c < count; c++) sum[c] += group[c];
    }
    floatS *block = block_open(dw, dw_type, begin, count, buffer);
#pragma omp simd
    for (size_t c = 0; c < count; c++) block[c] += scale * sum[c];
    block_close(dw, dw_type, begin, count, block);
}

static void cpu_embedding_backward(void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N,
                                   size_t rows, size_t C, double scale, size_t skip, Summed *scratch) {
    int32_t *end = (int32_t *)scratch, *order = end + rows;
    size_t blocks = (C + EMBEDDING_COLUMNS - 1) / EMBEDDING_COLUMNS;
    sort_by_row(end, order, index, N, rows);
    // a row's tokens are one run of order[]: the iteration of its first token does the work
#pragma omp parallel for collapse(2) schedule(dynamic, 16) if (N * C >= PARALLEL_MIN)
    for (size_t i = 0; i < N; i++) {
        for (size_t b = 0; b < blocks; b++) {
            const int32_t row = index[order[i]];
            const size_t c = b * EMBEDDING_COLUMNS;
            if ((size_t)row != skip && (!i || index[order[i - 1]] != row))
                add_token_rows(dw, dw_type, (size_t)row * C + c, (const floatX *)dx + c, order + i,
                               (size_t)end[row] - i, min_size(EMBEDDING_COLUMNS, C - c), C, (floatS)scale);
        }
    }
}

// ---- scattered and gathered rows ------------------------------------------------------------------------------------
static void cpu_scatter_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
#pragma omp parallel for schedule(static) if (n * width >= PARALLEL_MIN)
    for (size_t i = 0; i < n; i++)
        memcpy((floatX *)out + (size_t)row[i] * width, (const floatX *)in + i * width, width * sizeof(floatX));
}

static void cpu_gather_rows(Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width) {
#pragma omp parallel for schedule(static) if (n * width >= PARALLEL_MIN)
    for (size_t i = 0; i < n; i++)
        if (row[i])
            memcpy((floatX *)out + i * width, (const floatX *)in + (size_t)row[i] * width, width * sizeof(floatX));
}

#endif
