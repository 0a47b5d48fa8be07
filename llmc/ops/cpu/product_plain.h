/*
The plain-C matrix product: out[m,n] = (or +=) op(a) op(b), by vectors (vector.h). It serves the double build, builds
without oneDNN and processors on which oneDNN's bf16 product is slow; one or a few rows (decoding) always come here, to
product_streamed.

Blocks of op(a) and op(b) are packed into contiguous floatS panels that a register tile reads in order; packing converts
bf16 and transposes b. All threads pack together, then share the tiles. Every element of out is one thread's work and
its terms are added in a fixed order: the result does not depend on the threads.

Sizes. With 32 registers a tile is 14 rows x 2 vectors: 28 sums, 2 loaded vectors, a broadcast; 28 multiply-adds for 16
loads. A panel of b, 256 deep, is 32 KiB and stays in the L1 cache while all row panels of the block (1 MiB, L2) pass.
*/
#ifndef LLMC_CPU_PRODUCT_PLAIN_H
#define LLMC_CPU_PRODUCT_PLAIN_H
#include "llmc/ops/ops.h"
#include "memory.h"
#include "vector.h"

#if VECTOR_BYTES == 64 || defined(__aarch64__) // 32 registers, else 16
#define PANEL_ROWS 14
#else
#define PANEL_ROWS 6
#endif
#define PANEL_COLUMNS (2 * VECTOR_LANES)
#define PANEL_DEPTH   256
// A packed row of a is an odd number of cache lines long: the rows of a panel spread over all sets of the cache.
#define PANEL_STRIDE       (PANEL_DEPTH + CACHE_LINE)
#define BLOCK_COLUMNS      1024                                   // of out, for one pass over the depth
#define BLOCK_PANELS       ((1024 + PANEL_ROWS - 1) / PANEL_ROWS) // row panels of out, likewise
#define PANEL_HEIGHT       ((PANEL_ROWS + VECTOR_LANES - 1) / VECTOR_LANES * VECTOR_LANES)
#define PANEL_A_SIZE       (PANEL_HEIGHT * PANEL_STRIDE) // elements of a packed panel
#define PANEL_B_SIZE       (PANEL_COLUMNS * PANEL_DEPTH)
#define MOST_STREAMED_ROWS 2 // of products that do not pack
#define GROUP_PANELS       8 // row panels in one thread's piece of work

// out[m,n] = (or += with accumulate) op(a)[m,k] op(b)[k,n] (+ bias[n]) (+ residual[m,n]); row-major
typedef struct {
    const char *op; // whose product it is, for messages
    size_t m, n, k;
    const floatX *a, *b;
    int a_transposed, b_transposed; // a is stored as [k,m]; b is stored as [n,k]
    size_t a_stride, out_stride;    // elements from row to row of a as stored, of out and residual; 0: as long as a row
    void *out;
    int out_summed;                // out holds floatS, else floatX
    int accumulate;                // out +=; residual is then NULL
    const floatX *bias, *residual; // may be NULL
} Product;

static inline Product product_of(const char *op, size_t m, size_t n, size_t k, const Stored *a, const Stored *b,
                                 void *out) {
    const Product p = {.op = op, .m = m, .n = n, .k = k, .a = (const floatX *)a, .b = (const floatX *)b, .out = out};
    return p;
}

static inline size_t a_stride(const Product *p) { return p->a_stride ? p->a_stride : p->a_transposed ? p->m : p->k; }
static inline size_t out_stride(const Product *p) { return p->out_stride ? p->out_stride : p->n; }

// One block of a product: rows [row, row + rows) x columns [column, column + columns) of out, from a depth on
typedef struct {
    size_t row, rows, column, columns, from, depth;
    int first, last; // of the blocks along the depth
    floatS *a, *b;   // packed panels
    floatS *tiles;   // the sums of rows x columns so far, tile by tile
} ProductBlock;

// ---- the register tile -------------------------------------------------------------------------------------------

// tile[rows][PANEL_COLUMNS] = (or += with accumulate) sum over i < depth of a[r * a_row + i * a_step] *
// b[i][PANEL_COLUMNS]. A fresh sum is added to the tile at the end: the rounding error grows with the number of blocks.
VECTOR_INLINE void panel_product(int rows, floatS *tile, int accumulate, const floatS *a, size_t a_row, size_t a_step,
                                 const floatS *b, size_t depth) {
    Vector sum[PANEL_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (Vector){0};
    for (size_t i = 0; i < depth; i++, a += a_step, b += PANEL_COLUMNS) {
        const Vector right0 = vector_load(b), right1 = vector_load(b + VECTOR_LANES);
        for (int r = 0; r < rows; r++) {
            const Vector left = vector_of(a[(size_t)r * a_row]);
            sum[r][0] += left * right0;
            sum[r][1] += left * right1;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            floatS *out = tile + r * PANEL_COLUMNS + v * VECTOR_LANES;
            vector_store(out, accumulate ? vector_load(out) + sum[r][v] : sum[r][v]);
        }
}

// The number of rows must be a constant for the sums to live in registers; an odd last panel computes one row too many.
#define PANEL_CASE(rows)                                                                                               \
    case (rows) / 2: panel_product(rows, tile, accumulate, a, a_row, a_step, b, depth); break;
VECTOR_INLINE void panel_product_of(size_t rows, floatS *tile, int accumulate, const floatS *a, size_t a_row,
                                    size_t a_step, const floatS *b, size_t depth) {
    switch ((rows + 1) / 2) {
        PANEL_CASE(2)
        PANEL_CASE(4)
        PANEL_CASE(6)
#if PANEL_ROWS > 6
        PANEL_CASE(8)
        PANEL_CASE(10)
        PANEL_CASE(12)
        PANEL_CASE(14)
#endif
    }
}

// ---- packing -----------------------------------------------------------------------------------------------------

// out[rows][width] = in, with zeros beyond `used` columns.
VECTOR_INLINE void pack_rows(floatS *out, size_t out_stride, size_t width, const floatX *in, size_t in_stride,
                             size_t rows, size_t used) {
    for (size_t r = 0; r < rows; r++, out += out_stride, in += in_stride) {
        size_t i = 0;
        for (; i + VECTOR_LANES <= used; i += VECTOR_LANES) vector_store(out + i, vector_load_stored(in + i));
        for (; i < used; i++) out[i] = load(in[i]);
        for (; i < width; i++) out[i] = 0;
    }
}

// out[depth][PANEL_COLUMNS] = the transpose of in[rows][depth], with zeros beyond `rows`. Squares go through registers.
static VECTOR_FUNCTION void pack_transposed(floatS *out, const floatX *in, size_t in_stride, size_t rows,
                                            size_t depth) {
    floatS square[VECTOR_LANES * VECTOR_LANES];
    for (size_t first = 0; first < PANEL_COLUMNS; first += VECTOR_LANES) {
        size_t used = first < rows ? min_size(rows - first, VECTOR_LANES) : 0, i = 0;
        for (; i + VECTOR_LANES <= depth; i += VECTOR_LANES) {
            pack_rows(square, VECTOR_LANES, VECTOR_LANES, in + first * in_stride + i, in_stride, used, VECTOR_LANES);
            for (size_t z = used * VECTOR_LANES; z < VECTOR_LANES * VECTOR_LANES; z++) square[z] = 0;
            vector_transpose(out + i * PANEL_COLUMNS + first, PANEL_COLUMNS, square, VECTOR_LANES);
        }
        for (; i < depth; i++)
            for (size_t r = 0; r < VECTOR_LANES; r++)
                out[i * PANEL_COLUMNS + first + r] = r < used ? load(in[(first + r) * in_stride + i]) : 0;
    }
}

// A panel of transposed a is copied in whole vectors where they do not reach beyond the matrix.
static VECTOR_FUNCTION void pack_panel_a(const Product *p, const ProductBlock *block, size_t panel) {
    floatS *out = block->a + panel * PANEL_A_SIZE;
    size_t row = block->row + panel * PANEL_ROWS;
    size_t rows = min_size(PANEL_ROWS, block->rows - panel * PANEL_ROWS);
    if (p->a_transposed) {
        const floatX *in = p->a + block->from * a_stride(p) + row;
        if (row + PANEL_HEIGHT <= p->m) rows = PANEL_HEIGHT;
        pack_rows(out, PANEL_HEIGHT, PANEL_HEIGHT, in, a_stride(p), block->depth, rows);
    } else {
        const floatX *in = p->a + row * a_stride(p) + block->from;
        pack_rows(out, PANEL_STRIDE, block->depth, in, a_stride(p), rows, block->depth);
        if (rows % 2) memset(out + rows * PANEL_STRIDE, 0, block->depth * sizeof(floatS));
    }
}

static VECTOR_FUNCTION void pack_panel_b(const Product *p, const ProductBlock *block, size_t panel) {
    floatS *out = block->b + panel * PANEL_B_SIZE;
    size_t column = block->column + panel * PANEL_COLUMNS;
    size_t columns = min_size(PANEL_COLUMNS, block->columns - panel * PANEL_COLUMNS);
    if (p->b_transposed)
        pack_transposed(out, p->b + column * p->k + block->from, p->k, columns, block->depth);
    else
        pack_rows(out, PANEL_COLUMNS, PANEL_COLUMNS, p->b + block->from * p->n + column, p->n, block->depth, columns);
}

// ---- one block ---------------------------------------------------------------------------------------------------

// Bias and residual join the finished sums, which then become, or are added to, a row of out.
VECTOR_INLINE void finish_row(const Product *p, floatS *sum, size_t at, size_t column, size_t columns) {
    if (p->bias)
        for (size_t j = 0; j < columns; j++) sum[j] += load(p->bias[column + j]);
    if (p->residual)
        for (size_t j = 0; j < columns; j++) sum[j] += load(p->residual[at + j]);
    if (p->out_summed) {
        floatS *out = (floatS *)p->out + at;
        if (p->accumulate)
            for (size_t j = 0; j < columns; j++) sum[j] += out[j];
        for (size_t j = 0; j < columns; j++) out[j] = sum[j];
    } else {
        floatX *out = (floatX *)p->out + at;
        if (p->accumulate)
            for (size_t j = 0; j < columns; j++) sum[j] += load(out[j]);
        for (size_t j = 0; j < columns; j++) out[j] = store(sum[j]);
    }
}

// `columns` is a constant in the common case, for loops without remainders.
static VECTOR_FUNCTION void finish_tile(const Product *p, floatS *tile, size_t row, size_t rows, size_t column,
                                        size_t columns) {
    for (size_t r = 0; r < rows; r++, tile += PANEL_COLUMNS) {
        const size_t at = (row + r) * out_stride(p) + column;
        if (columns == PANEL_COLUMNS)
            finish_row(p, tile, at, column, PANEL_COLUMNS);
        else
            finish_row(p, tile, at, column, columns);
    }
}

// A tile of out is far apart rows: asked for before the last product, it is there after it.
static void prefetch_tile(const Product *p, size_t row, size_t rows, size_t column, size_t columns) {
    const size_t element = p->out_summed ? sizeof(floatS) : sizeof(floatX);
    for (size_t r = 0; r < rows; r++) {
        const char *out = (const char *)p->out + ((row + r) * out_stride(p) + column) * element;
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + columns * element - 1, 1);
    }
}

// Row panels [panel, end) against one column panel.
static VECTOR_FUNCTION void product_tiles(const Product *p, const ProductBlock *block, size_t column_panel,
                                          size_t panel, size_t end) {
    size_t column = column_panel * PANEL_COLUMNS, columns = min_size(PANEL_COLUMNS, block->columns - column);
    const floatS *b = block->b + column_panel * PANEL_B_SIZE;
    floatS only[PANEL_ROWS * PANEL_COLUMNS] __attribute__((aligned(64))); // need not wait: stays in the L1 cache
    for (; panel < end; panel++) {
        size_t row = panel * PANEL_ROWS, rows = min_size(PANEL_ROWS, block->rows - row);
        const floatS *a = block->a + panel * PANEL_A_SIZE;
        floatS *tile = block->first && block->last
                           ? only
                           : block->tiles + (column_panel * BLOCK_PANELS + panel) * PANEL_ROWS * PANEL_COLUMNS;
        if (block->last) prefetch_tile(p, block->row + row, rows, block->column + column, columns);
        if (p->a_transposed)
            panel_product_of(rows, tile, !block->first, a, 1, PANEL_HEIGHT, b, block->depth);
        else
            panel_product_of(rows, tile, !block->first, a, PANEL_STRIDE, 1, b, block->depth);
        if (block->last) finish_tile(p, tile, block->row + row, rows, block->column + column, columns);
    }
}

// Called by all threads of a parallel region.
static VECTOR_FUNCTION void product_block(const Product *p, const ProductBlock *block) {
    size_t row_panels = (block->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    size_t column_panels = (block->columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    size_t groups = (row_panels + GROUP_PANELS - 1) / GROUP_PANELS;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < row_panels + column_panels; i++) {
        if (i < row_panels)
            pack_panel_a(p, block, i);
        else
            pack_panel_b(p, block, i - row_panels);
    }
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < column_panels * groups; i++) {
        size_t panel = i % groups * GROUP_PANELS;
        product_tiles(p, block, i / groups, panel, min_size(panel + GROUP_PANELS, row_panels));
    }
}

// ---- a few rows ----------------------------------------------------------------------------------------------------

// The dot product of `length` elements: four sums hide the latency of the additions.
VECTOR_INLINE floatS dot_product(const floatX *a, const floatX *b, size_t length) {
    Vector sum[4] = {{0}, {0}, {0}, {0}};
    floatS rest = 0;
    size_t i = 0;
    for (; i + 4 * VECTOR_LANES <= length; i += 4 * VECTOR_LANES)
        for (size_t v = 0; v < 4; v++)
            sum[v] += vector_load_stored(a + i + v * VECTOR_LANES) * vector_load_stored(b + i + v * VECTOR_LANES);
    for (; i < length; i++) rest += load(a[i]) * load(b[i]);
    return vector_sum_across((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

// out[columns] += a[depth] b[depth,n] for `columns` columns of b
VECTOR_INLINE void row_times_matrix(floatS *out, const floatX *a, const floatX *b, size_t depth, size_t n,
                                    size_t columns) {
    if (columns == PANEL_COLUMNS) {
        Vector sum[2] = {{0}, {0}};
        for (size_t i = 0; i < depth; i++, b += n)
            for (size_t v = 0; v < 2; v++) sum[v] += vector_of(load(a[i])) * vector_load_stored(b + v * VECTOR_LANES);
        for (size_t v = 0; v < 2; v++)
            vector_store(out + v * VECTOR_LANES, vector_load(out + v * VECTOR_LANES) + sum[v]);
    } else {
        floatS sum[PANEL_COLUMNS] = {0};
        for (size_t i = 0; i < depth; i++, b += n)
            for (size_t j = 0; j < columns; j++) sum[j] += load(a[i]) * load(b[j]);
        for (size_t j = 0; j < columns; j++) out[j] += sum[j];
    }
}

// With one or two rows (decoding) packing b would cost more than the product: b is streamed from memory once, as it
// lies. a is not transposed. Sums are in blocks of PANEL_DEPTH, as those of the panels are.
static VECTOR_FUNCTION void product_streamed(const Product *p) {
#pragma omp parallel for schedule(dynamic)
    for (size_t column = 0; column < p->n; column += PANEL_COLUMNS) {
        floatS tile[MOST_STREAMED_ROWS * PANEL_COLUMNS] = {0};
        size_t columns = min_size(PANEL_COLUMNS, p->n - column);
        for (size_t r = 0; r < p->m; r++) {
            floatS *out = tile + r * PANEL_COLUMNS;
            if (!p->b_transposed)
                for (size_t from = 0; from < p->k; from += PANEL_DEPTH)
                    row_times_matrix(out, p->a + r * a_stride(p) + from, p->b + from * p->n + column,
                                     min_size(PANEL_DEPTH, p->k - from), p->n, columns);
            else
                for (size_t j = 0; j < columns; j++)
                    out[j] = dot_product(p->a + r * a_stride(p), p->b + (column + j) * p->k, p->k);
        }
        finish_tile(p, tile, 0, p->m, column, columns);
    }
}

// ---- the whole product -------------------------------------------------------------------------------------------

// The blocks' size when `size` is cut into equal blocks of at most `limit`, in whole panels.
static size_t block_size(size_t size, size_t limit, size_t panel) {
    size_t blocks = (size + limit - 1) / limit;
    return round_up((size + blocks - 1) / blocks, panel);
}

// Packed panels and tiles: 6.4 MiB (twice that in the double build). Made by the first product, kept for all others.
#define TILES_SIZE (BLOCK_PANELS * PANEL_ROWS * BLOCK_COLUMNS)
static floatS *product_scratch(void) {
    static floatS *scratch;
    const size_t count = BLOCK_PANELS * PANEL_A_SIZE + BLOCK_COLUMNS * PANEL_DEPTH + TILES_SIZE;
    if (!scratch && !(scratch = (floatS *)cpu_allocate(count * sizeof(floatS))))
        die("out of memory: %zu bytes wanted for packed panels of a matrix product", count * sizeof(floatS));
    return scratch;
}

static void product_plain(const Product *p) {
    size_t rows = block_size(p->m, BLOCK_PANELS * PANEL_ROWS, PANEL_ROWS);
    size_t columns = block_size(p->n, BLOCK_COLUMNS, PANEL_COLUMNS);
    size_t depth = block_size(p->k, PANEL_DEPTH, VECTOR_LANES);
    floatS *scratch = product_scratch();
#pragma omp parallel
    {
        ProductBlock block;
        block.a = scratch;
        block.b = block.a + BLOCK_PANELS * PANEL_A_SIZE;
        block.tiles = block.b + BLOCK_COLUMNS * PANEL_DEPTH;
        for (block.row = 0; block.row < p->m; block.row += rows)
            for (block.column = 0; block.column < p->n; block.column += columns)
                for (block.from = 0; block.from < p->k; block.from += depth) {
                    block.rows = min_size(rows, p->m - block.row);
                    block.columns = min_size(columns, p->n - block.column);
                    block.depth = min_size(depth, p->k - block.from);
                    block.first = block.from == 0;
                    block.last = block.from + block.depth == p->k;
                    product_block(p, &block);
                }
    }
}

#endif
