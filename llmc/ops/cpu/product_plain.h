/*
The plain-C matrix product: out[m,n] = (or +=) op(a) op(b), by vectors (vector.h). product.h says when it is used. A few
rows (decoding) always take product_streamed; with b in 4 bits, product_of_few.

Out is cut into items. One thread computes an item from beginning to end: threads synchronise once a product. For a
block of the depth an item packs its rows of op(a) into contiguous floatS panels. Then it packs op(b) panel by panel,
and multiplies each panel with all row panels in a register tile. Packing converts bf16 and transposes. Each step of a
tile prefetches a cache line of the next data. The terms of every element are added in a fixed order: the result does
not depend on the threads, nor on how out is cut.

Sizes. With 32 registers a tile is 14 rows x 2 vectors: 28 sums, 2 loaded vectors, a broadcast; 28 multiply-adds for 16
loads. A panel of b, 256 deep, is 32 KiB and stays in the L1 cache while the item's row panels (592 KiB, L2) pass.
*/
#ifndef LLMC_CPU_PRODUCT_PLAIN_H
#define LLMC_CPU_PRODUCT_PLAIN_H
#include "llmc/ops/ops.h"
#include "dequantise.h"
#include "elements.h"
#include "memory.h"
#include "vector.h"

#if VECTOR_BYTES == 64 || defined(__aarch64__) // 32 vector registers; else 16
#define PANEL_ROWS 14
#else
#define PANEL_ROWS 6
#endif
#define PANEL_HEIGHT    ((PANEL_ROWS + VECTOR_LANES - 1) / VECTOR_LANES * VECTOR_LANES) // rows of a panel, as packed
#define PANEL_COLUMNS   (2 * VECTOR_LANES)
#define PANEL_DEPTH     256
#define PANEL_A_SIZE    (PANEL_HEIGHT * PANEL_DEPTH + CACHE_LINE) // padded: panels start in different cache sets
#define PANEL_B_SIZE    (PANEL_COLUMNS * PANEL_DEPTH)
#define ITEM_PANELS     ((512 + PANEL_ROWS - 1) / PANEL_ROWS)  // row panels of an item
#define ITEM_TILES      (ITEM_PANELS * (1024 / PANEL_COLUMNS)) // tiles of an item: the fewer rows, the more columns
#define PACKING_COST    6.0                                    // cost of packing an element, in multiply-adds
#define PACKED_STEPS    4                                      // rows of a transposed `a` that are packed at a time
#define STREAMED_DEPTH  512                                    // elements of the streamed rows, in the L1 cache
#define STREAMED_LENGTH 4096
#if !defined(PRECISION_BF16) || (defined(__AVX512BF16__) && !defined(__AMX_BF16__))
#define MOST_STREAMED_ROWS 32 // most rows with which a transposed b is not packed
#else
#define MOST_STREAMED_ROWS 4
#endif
#define FEW_COLUMNS (PANEL_COLUMNS < 16 ? PANEL_COLUMNS : 16) // most columns with which a transposed a is not packed
#define MOST_ROWS   2                                         // most rows with which b is not packed

// A product: out[m,n] = (or += with accumulate) op(a)[m,k] op(b)[k,n] (+ bias[n]) (+ residual[m,n]), all row-major
typedef struct {
    const char *op; // name of the op, for messages
    size_t m, n, k;
    const floatX *a, *b;
    int a_transposed, b_transposed; // 1: a is stored as [k,m]; b is stored as [n,k]
    size_t a_stride, out_stride;    // elements from row to row of stored a, and of out and residual; 0: contiguous
    void *out;
    int out_summed;                // 1: out holds floatS, else floatX
    int accumulate;                // 1: adds to out; residual is then NULL
    const floatX *bias, *residual; // may be NULL
    const void *record;            // b in 4 bits (b is then NULL, and m at most FEW_MOST), or NULL
    const QuantFormat *format;
    size_t record_rows, record_first; // the record has [record_rows,k]; b is its rows from record_first on
} Product;

static inline Product product_of(const char *op, size_t m, size_t n, size_t k, const Stored *a, const Stored *b,
                                 void *out) {
    const Product p = {.op = op, .m = m, .n = n, .k = k, .a = (const floatX *)a, .b = (const floatX *)b, .out = out};
    return p;
}

static inline int product_is_small(const Product *p) { return p->m * p->n * p->k < PARALLEL_WORK; }
static inline size_t a_stride(const Product *p) { return p->a_stride ? p->a_stride : p->a_transposed ? p->m : p->k; }
static inline size_t b_stride(const Product *p) { return p->b_transposed ? p->k : p->n; }
static inline int out_is_summed(const Product *p) { return p->out_summed || sizeof(floatX) == sizeof(floatS); }
static inline size_t panels_of(size_t size, size_t panel) { return (size + panel - 1) / panel; }
static inline size_t out_stride(const Product *p) { return p->out_stride ? p->out_stride : p->n; }

// An item of work: rows [row, row + rows) x columns [column, column + columns) of out, over the whole depth, in blocks
// [from, from + depth). Its memory belongs to one thread.
typedef struct {
    size_t row, rows, column, columns, from, depth;
    int first, last; // 1: this is the first, the last block of the depth
    floatS *a;       // [row panels][depth][PANEL_HEIGHT] packed
    floatS *b;       // [depth][PANEL_COLUMNS] packed: one panel, in the L1 cache
    floatS *tiles;   // the sums of rows x columns so far, tile by tile
} ProductItem;

// ---- the register tile -------------------------------------------------------------------------------------------

// Cache lines that are needed soon: a tile prefetches one with each step of its depth.
#define MOST_AHEAD 128
typedef struct {
    size_t count;
    const char *line[MOST_AHEAD];
} Ahead;

// Rows of a matrix that are prefetched little by little
typedef struct {
    const char *row;
    size_t stride, bytes, rows, at; // remaining rows; at: bytes of the first row prefetched already
} AheadRows;

VECTOR_INLINE void look_ahead(Ahead *ahead, AheadRows *rows, size_t lines) {
    lines = min_size(lines, MOST_AHEAD - ahead->count);
    while (lines && rows->rows) {
        const size_t count = min_size(lines, (rows->bytes - rows->at + 63) / 64);
        const char **line = ahead->line + ahead->count, *at = rows->row + rows->at;
        for (size_t i = 0; i < count; i++) line[i] = at + i * 64;
        ahead->count += count, lines -= count, rows->at += count * 64;
        if (rows->at < rows->bytes) break;
        rows->at = 0, rows->row += rows->stride, rows->rows--;
    }
}

VECTOR_INLINE void panel_step(int rows, int vectors, Vector sum[PANEL_ROWS][2], const floatS *a, const floatS *b) {
    Vector right[2];
    if (VECTOR_BYTES == 64) __builtin_prefetch(a + 128); // a is in the L2 cache: prefetch it
    for (int v = 0; v < vectors; v++) right[v] = vector_load(b + v * VECTOR_LANES);
    for (int r = 0; r < rows; r++) {
        const Vector left = vector_of(a[r]);
        for (int v = 0; v < vectors; v++) sum[r][v] += left * right[v];
    }
}

// Computes out[rows][1 or 2 vectors] = (or += with accumulate) sum over i < depth of a[i][PANEL_HEIGHT] *
// b[i][PANEL_COLUMNS]. A new sum is added to out at the end, so the rounding error grows with the number of blocks.
VECTOR_INLINE void panel_product(int rows, int vectors, floatS *out, size_t out_stride, int accumulate, const floatS *a,
                                 const floatS *b, size_t depth, const Ahead *ahead) {
    Vector sum[PANEL_ROWS][2];
    const size_t asked = min_size(ahead->count, depth);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = (Vector){0};
    for (size_t i = 0; i < asked; i++, a += PANEL_HEIGHT, b += PANEL_COLUMNS) {
        __builtin_prefetch(ahead->line[i], 0, 2);
        panel_step(rows, vectors, sum, a, b);
    }
    for (size_t i = asked; i < depth; i++, a += PANEL_HEIGHT, b += PANEL_COLUMNS) panel_step(rows, vectors, sum, a, b);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            floatS *to = out + (size_t)r * out_stride + v * VECTOR_LANES;
            vector_store(to, accumulate ? vector_load(to) + sum[r][v] : sum[r][v]);
        }
}

// rows and vectors must be constants, so that the sums live in registers
#define PANEL_CASE(rows)                                                                                               \
    case 2 * rows - 1: panel_product(rows, 1, out, out_stride, accumulate, a, b, depth, ahead); break;                 \
    case 2 * rows: panel_product(rows, 2, out, out_stride, accumulate, a, b, depth, ahead); break;
static VECTOR_FUNCTION void panel_product_of(size_t rows, size_t columns, floatS *out, size_t out_stride,
                                             int accumulate, const floatS *a, const floatS *b, size_t depth,
                                             const Ahead *ahead) {
    switch (2 * rows - (columns <= VECTOR_LANES)) {
        PANEL_CASE(1)
        PANEL_CASE(2)
        PANEL_CASE(3)
        PANEL_CASE(4)
        PANEL_CASE(5)
        PANEL_CASE(6)
#if PANEL_ROWS > 6
        PANEL_CASE(7)
        PANEL_CASE(8)
        PANEL_CASE(9)
        PANEL_CASE(10)
        PANEL_CASE(11)
        PANEL_CASE(12)
        PANEL_CASE(13)
        PANEL_CASE(14)
#endif
    }
}

// ---- packing -----------------------------------------------------------------------------------------------------

// Packs out[depth][width] = in[depth][used], followed by zeros. width is a multiple of VECTOR_LANES.
VECTOR_INLINE void pack_straight(floatS *out, size_t width, const floatX *in, size_t in_stride, size_t used,
                                 size_t depth) {
    for (size_t i = 0; i < depth; i++, out += width, in += in_stride) {
        size_t j = 0;
        for (; j + VECTOR_LANES <= used; j += VECTOR_LANES) vector_store(out + j, vector_load_stored(in + j));
        for (; j < used; j++) out[j] = load(in[j]);
        for (; j < width; j++) out[j] = 0;
    }
}

// Packs out[depth][width] = the transpose of in[used][depth], followed by zeros. Transposes squares in registers.
VECTOR_INLINE void pack_transposed(floatS *out, size_t width, const floatX *in, size_t in_stride, size_t used,
                                   size_t depth) {
    for (size_t first = 0; first < width; first += VECTOR_LANES, in += VECTOR_LANES * in_stride) {
        const size_t rows = first < used ? min_size(used - first, VECTOR_LANES) : 0;
        size_t i = 0;
        for (; i + VECTOR_LANES <= depth; i += VECTOR_LANES) {
            Vector square[VECTOR_LANES];
            for (size_t r = 0; r < VECTOR_LANES; r++)
                square[r] = r < rows ? vector_load_stored(in + r * in_stride + i) : (Vector){0};
            vector_transpose_square(square);
            for (size_t r = 0; r < VECTOR_LANES; r++) vector_store(out + (i + r) * width + first, square[r]);
        }
        for (; i < depth; i++)
            for (size_t r = 0; r < VECTOR_LANES; r++)
                out[i * width + first + r] = r < rows ? load(in[r * in_stride + i]) : 0;
    }
}

// Packs all row panels. A transposed a is read along its stored rows: a few rows at a time, for all panels.
static VECTOR_FUNCTION void pack_a(const Product *p, const ProductItem *item, size_t panels) {
    const size_t stride = a_stride(p);
    for (size_t i = 0; i < item->depth && p->a_transposed; i += PACKED_STEPS)
        for (size_t panel = 0; panel < panels; panel++) {
            const size_t row = item->row + panel * PANEL_ROWS;
            pack_straight(item->a + panel * PANEL_A_SIZE + i * PANEL_HEIGHT, PANEL_HEIGHT,
                          p->a + (item->from + i) * stride + row, stride,
                          row + PANEL_HEIGHT <= p->m ? PANEL_HEIGHT : min_size(PANEL_ROWS, p->m - row),
                          min_size(PACKED_STEPS, item->depth - i));
        }
    for (size_t panel = 0; panel < panels && !p->a_transposed; panel++) {
        const size_t row = item->row + panel * PANEL_ROWS;
        pack_transposed(item->a + panel * PANEL_A_SIZE, PANEL_HEIGHT, p->a + row * stride + item->from, stride,
                        min_size(PANEL_ROWS, p->m - row), item->depth);
    }
}

static VECTOR_FUNCTION void pack_panel_b(const Product *p, const ProductItem *item, size_t column, size_t columns) {
    if (p->b_transposed)
        pack_transposed(item->b, PANEL_COLUMNS, p->b + column * p->k + item->from, p->k, columns, item->depth);
    else
        pack_straight(item->b, PANEL_COLUMNS, p->b + item->from * p->n + column, p->n, columns, item->depth);
}

// ---- one item of work ----------------------------------------------------------------------------------------------

// Adds bias and residual to finished sums. Then stores the sums to a row of out, or adds them to it.
VECTOR_INLINE void finish_row(const Product *p, int finished, int accumulate, floatS *sum, size_t at, size_t column,
                              size_t columns) {
    if (p->bias && finished)
        for (size_t j = 0; j < columns; j++) sum[j] += load(p->bias[column + j]);
    if (p->residual && finished)
        for (size_t j = 0; j < columns; j++) sum[j] += load(p->residual[at + j]);
    if (out_is_summed(p)) {
        floatS *out = (floatS *)p->out + at;
        if (accumulate)
            for (size_t j = 0; j < columns; j++) sum[j] += out[j];
        for (size_t j = 0; j < columns; j++) out[j] = sum[j];
    } else {
        floatX *out = (floatX *)p->out + at;
        if (accumulate)
            for (size_t j = 0; j < columns; j++) sum[j] += load(out[j]);
        for (size_t j = 0; j < columns; j++) out[j] = store(sum[j]);
    }
}

// Finishes a tile's rows. `columns` is constant in the common case, so that loops have no remainders.
static VECTOR_FUNCTION void finish_tile(const Product *p, int finished, int accumulate, floatS *tile, size_t row,
                                        size_t rows, size_t column, size_t columns) {
    for (size_t r = 0; r < rows; r++, tile += PANEL_COLUMNS) {
        const size_t at = (row + r) * out_stride(p) + column;
        if (columns == PANEL_COLUMNS)
            finish_row(p, finished, accumulate, tile, at, column, PANEL_COLUMNS);
        else
            finish_row(p, finished, accumulate, tile, at, column, columns);
    }
}

// Returns the stored rows of `count` rows of op(a), or columns of op(b), from `first` on, `depth` deep.
VECTOR_INLINE AheadRows stored_rows(const floatX *x, size_t stride, int depth_by_row, size_t first, size_t count,
                                    size_t from, size_t depth) {
    const AheadRows along = {(const char *)(x + first * stride + from), stride * sizeof(floatX), depth * sizeof(floatX),
                             count, 0};
    const AheadRows across = {(const char *)(x + from * stride + first), stride * sizeof(floatX),
                              count * sizeof(floatX), depth, 0};
    return depth_by_row ? across : along;
}

static inline size_t lines_of(const AheadRows *rows) { return rows->rows * (rows->bytes / 64 + 1); }

// Computes one block of the depth: packs a, then each panel of b, and multiplies this panel with all row panels of a.
// Meanwhile prefetches the next panel of b and block of a. Sums over blocks accumulate in out if it holds floatS, else
// in tiles.
static VECTOR_FUNCTION void product_block(const Product *p, const ProductItem *item) {
    const size_t panels = panels_of(item->rows, PANEL_ROWS), column_panels = panels_of(item->columns, PANEL_COLUMNS);
    const size_t stride = out_stride(p), next = item->from + item->depth;
    const int in_out = out_is_summed(p);
    const size_t element = in_out ? sizeof(floatS) : sizeof(floatX);
    floatS only[PANEL_ROWS * PANEL_COLUMNS] __attribute__((aligned(64))); // a tile that is finished at once, in L1
    AheadRows a = stored_rows(p->a, a_stride(p), p->a_transposed, item->row, item->rows, next,
                              min_size(item->depth, p->k - next));
    const size_t a_share = lines_of(&a) / (panels * column_panels) + 1;
    pack_a(p, item, panels);
    for (size_t j = 0; j < column_panels; j++) {
        const size_t column = item->column + j * PANEL_COLUMNS, left = item->columns - j * PANEL_COLUMNS;
        const size_t columns = min_size(PANEL_COLUMNS, left);
        AheadRows b = stored_rows(p->b, b_stride(p), !p->b_transposed, column + columns,
                                  min_size(PANEL_COLUMNS, left - columns), item->from, item->depth);
        const size_t b_share = lines_of(&b) / panels + 1;
        pack_panel_b(p, item, column, columns);
        for (size_t i = 0; i < panels; i++) {
            const size_t row = item->row + i * PANEL_ROWS, rows = min_size(PANEL_ROWS, item->rows - i * PANEL_ROWS);
            const int accumulate = p->accumulate || (in_out && !item->first);
            const int alone = in_out || (item->first && item->last);
            const int direct = in_out && columns % VECTOR_LANES == 0 && !(item->last && (p->bias || p->residual));
            floatS *tile = alone ? only : item->tiles + (j * panels + i) * PANEL_ROWS * PANEL_COLUMNS;
            const char *out = (const char *)p->out + (row * stride + column) * element;
            Ahead ahead;
            ahead.count = 0;
            for (size_t r = 0; r < rows && (in_out || item->last); r++, out += stride * element) {
                ahead.line[ahead.count++] = out;
                if (VECTOR_BYTES == 64) ahead.line[ahead.count++] = out + columns * element - 1;
            }
            look_ahead(&ahead, &b, b_share), look_ahead(&ahead, &a, a_share);
            if (direct) {
                panel_product_of(rows, columns, (floatS *)p->out + row * stride + column, stride, accumulate,
                                 item->a + i * PANEL_A_SIZE, item->b, item->depth, &ahead);
                continue;
            }
            panel_product_of(rows, columns, tile, PANEL_COLUMNS, !alone && !item->first, item->a + i * PANEL_A_SIZE,
                             item->b, item->depth, &ahead);
            if (in_out || item->last) finish_tile(p, item->last, accumulate, tile, row, rows, column, columns);
        }
    }
}

// ---- scratch memory ------------------------------------------------------------------------------------------------

// Returns each thread's memory for packed panels and tiles, or for packed rows. Keeps it for later products.
#define ITEM_A    (ITEM_PANELS * PANEL_A_SIZE)
#define ITEM_SIZE (ITEM_A + PANEL_B_SIZE + (sizeof(floatX) < sizeof(floatS)) * ITEM_TILES * PANEL_ROWS * PANEL_COLUMNS)
static floatS *product_scratch(size_t elements) {
    static floatS *scratch;
    static size_t bytes;
    if (bytes < elements * sizeof(floatS)) {
        memory_unmap(scratch, bytes);
        bytes = elements * sizeof(floatS);
        scratch = (floatS *)cpu_allocate(bytes);
        if (!scratch)
            die("out of memory: %zu bytes wanted for packed panels of a matrix product; free some memory", bytes);
    }
    return scratch;
}

// ---- a few rows ----------------------------------------------------------------------------------------------------

// Dot products of a few rows with many rows, all of length k. The many are read from memory once, in the order in which
// they lie. A word is what a lane multiplies at once: one element, or two in bf16 (AVX512-BF16). A packed vector has
// consecutive words of each of FEW_LANES rows. It is multiplied with the same words of one of the many, repeated. A
// row's lanes are added at the end. A tile is FEW_VECTORS vectors x MANY_ROWS of the many, which stay in the L1 cache;
// the few stay in the L2 cache. Rows of zeros fill the last tile. The sums of a row do not depend on other rows.
#if defined(PRECISION_BF16) && !defined(__AVX512BF16__) // words are converted to floatS as they are loaded
#define FEW_WORD    1                                   // elements of a word
#define FEW_LANES   1
#define FEW_VECTORS (PANEL_ROWS > 6 ? 4 : 2)
#define MANY_ROWS   4
#else
#define FEW_WORD    (sizeof(floatS) / sizeof(floatX))
#define FEW_LANES   (VECTOR_LANES < 8 ? VECTOR_LANES : VECTOR_LANES / 2)
#define FEW_VECTORS 2
#define MANY_ROWS   (PANEL_ROWS > 6 ? 8 : 6)
#endif
#define FEW_ROWS   (FEW_VECTORS * FEW_LANES)
#define FEW_RUN    (VECTOR_LANES / FEW_LANES)   // words of a row in a vector
#define CODED_ROWS (VECTOR_BYTES == 64 ? 4 : 2) // most rows that are multiplied with 4-bit weights decoded in registers
#define FEW_MOST   32                           // at least FEW_COLUMNS and MOST_STREAMED_ROWS, in whole tiles
#if !defined(PICKED_VECTORS)                    // most rows with which this is faster than decoding 4-bit weights first
#define QUANTISED_ROWS 4
#elif defined(PRECISION_BF16)
#define QUANTISED_ROWS 8
#else
#define QUANTISED_ROWS FEW_MOST
#endif
#define STREAMED_ROWS (MANY_ROWS == 6 ? 24 : 16) // rows of the many in an item of work, read as whole vectors

typedef struct {
    const floatS *few; // packed: few_at(), [FEW_ROWS][FEW_RUN words]
    const floatX *x, *many;
    const Product *coded; // a product whose record holds the many, in place of `many`; else NULL
    QuantParts parts;     // parts of that record
    size_t x_stride, stride;
    size_t count, tiles, rows; // count, tiles: number of the few and of their tiles; rows: number of the many
    size_t whole, k;           // elements of a row that fill whole vectors of words; all elements
    int codes; // 1: few enough rows for dots_of_codes, packed as [whole / VECTOR_LANES][CODED_ROWS][VECTOR_LANES]
} FewRows;

// Computes total[MANY_ROWS][FEW_VECTORS] = (or += with accumulate) the products of `depth` elements, by lanes, for a
// tile of `vectors` vectors. Prefetches from `ahead` on as many bytes as it reads from the many; ahead NULL: none
VECTOR_INLINE void dot_products(int vectors, Vector total[MANY_ROWS][FEW_VECTORS], int accumulate, const floatS *few,
                                const floatX *const *many, const char *ahead, size_t depth) {
    enum { LINE = 64 / sizeof(floatX) };
    Vector sum[MANY_ROWS][FEW_VECTORS], left[FEW_VECTORS];
    for (int c = 0; c < MANY_ROWS; c++)
        for (int v = 0; v < vectors; v++) sum[c][v] = accumulate ? total[c][v] : (Vector){0};
    for (size_t i = 0; i < depth;) {
        for (int c = 0; c < MANY_ROWS && ahead; c++, ahead += 64) __builtin_prefetch(ahead);
        for (const size_t stop = min_size(i + LINE, depth); i < stop; i += FEW_RUN * FEW_WORD) {
            for (int v = 0; v < vectors; v++) {
                left[v] = vector_load(few + v * VECTOR_LANES);
                VECTOR_KEEP(left[v]);
            }
            for (int c = 0; c < MANY_ROWS; c++) {
                Vector right = FEW_LANES == 1 ? vector_load_stored(many[c] + i) : vector_repeat(many[c] + i);
                VECTOR_KEEP(right);
                for (int v = 0; v < vectors; v++) sum[c][v] = multiply_words(sum[c][v], left[v], right);
            }
            few += FEW_VECTORS * VECTOR_LANES;
        }
    }
    for (int c = 0; c < MANY_ROWS; c++)
        for (int v = 0; v < FEW_VECTORS; v++) total[c][v] = v < vectors ? sum[c][v] : (Vector){0};
}

// Returns the offset of element i, a multiple of FEW_RUN words, of tile t. A piece of STREAMED_DEPTH elements has all
// tiles.
static inline size_t few_at(const FewRows *f, size_t t, size_t i) {
    const size_t from = i / STREAMED_DEPTH * STREAMED_DEPTH, depth = min_size(STREAMED_DEPTH, f->whole - from);
    return (from * f->tiles + t * depth + i - from) / FEW_WORD * FEW_ROWS;
}

// Decodes out[count] = elements of the 4-bit many, from element `begin` on.
static void decode_many(floatX *out, const FewRows *f, size_t begin, size_t count) {
    const Product *p = f->coded;
    decode_elements(out, p->record, *p->format, &f->parts, p->record_first * f->k + begin, count);
}

// Decodes elements [from, from + depth) of the rows from `first` on into row[MANY_ROWS]. Prefetches the following
// elements up to `end`, or the next rows' from `begin` on.
static void decode_rows(const floatX *row[MANY_ROWS], floatX decoded[MANY_ROWS][STREAMED_DEPTH], const FewRows *f,
                        size_t first, size_t begin, size_t from, size_t end) {
    const size_t depth = min_size(STREAMED_DEPTH, end - from), next = first + (from + depth < end ? 0 : MANY_ROWS);
    const size_t bits = (size_t)quant_bits(f->coded->format->type);
    for (size_t c = 0; c < MANY_ROWS; c++) {
        const size_t then = min_size(next + c, f->rows - 1) * f->k + (from + depth < end ? from + depth : begin);
        const char *ahead = (const char *)f->coded->record + (f->coded->record_first * f->k + then) * bits / 8;
        for (size_t i = 0; i < depth * bits / 8; i += 64) __builtin_prefetch(ahead + i);
        decode_many(decoded[c], f, min_size(first + c, f->rows - 1) * f->k + from, depth);
        row[c] = decoded[c];
    }
}

// Adds to sum[MANY_ROWS][FEW_MOST] the dot products of elements [begin, end) with MANY_ROWS rows from `first` on. If
// there are fewer rows, repeats the last row. Meanwhile prefetches the next rows, in the order in which they lie.
VECTOR_INLINE void dots_of_group(int coded, floatS *sum, const FewRows *f, size_t first, size_t begin, size_t end) {
    Vector total[FEW_MOST / FEW_ROWS][MANY_ROWS][FEW_VECTORS];
    floatX decoded[MANY_ROWS][STREAMED_DEPTH] __attribute__((aligned(64))); // in the L1 cache
    const size_t length = end - begin, next = first + MANY_ROWS;
    for (size_t from = begin; from < end; from += STREAMED_DEPTH) {
        const size_t depth = min_size(STREAMED_DEPTH, end - from), at = (from - begin) * MANY_ROWS;
        const floatX *row[MANY_ROWS];
        const char *ahead = NULL;
        if (coded)
            decode_rows(row, decoded, f, first, begin, from, end);
        else
            ahead =
                (const char *)(f->many + min_size(next + at / length, f->rows - 1) * f->stride + begin + at % length);
        for (size_t c = 0; c < MANY_ROWS && !coded; c++)
            row[c] = f->many + min_size(first + c, f->rows - 1) * f->stride + from;
        for (size_t t = 0; t < f->tiles; t++, ahead = NULL) {
            const floatS *few = f->few + few_at(f, t, from);
            if (f->count - t * FEW_ROWS > FEW_ROWS / 2)
                dot_products(FEW_VECTORS, total[t], from > begin, few, row, ahead, depth);
            else
                dot_products(FEW_VECTORS / 2, total[t], from > begin, few, row, ahead, depth);
        }
    }
    for (size_t t = 0; t < f->tiles; t++) {
        Vector *tile = total[t][0];
        floatS each[MANY_ROWS * FEW_ROWS + VECTOR_LANES];
        size_t vectors = MANY_ROWS * FEW_VECTORS;
        for (size_t i = 1; i < FEW_RUN; i *= 2, vectors /= 2)
            for (size_t v = 0; v < vectors / 2; v++) tile[v] = vector_sums_of_pairs(tile[2 * v], tile[2 * v + 1]);
        for (size_t v = 0; v < vectors; v++) vector_store(each + v * VECTOR_LANES, tile[v]);
        for (size_t c = 0; c < MANY_ROWS; c++)
            for (size_t r = 0; r < FEW_ROWS; r++) sum[c * FEW_MOST + t * FEW_ROWS + r] += each[c * FEW_ROWS + r];
    }
}

static VECTOR_FUNCTION void dots_of_floats(floatS *sum, const FewRows *f, size_t first, size_t begin, size_t end) {
    dots_of_group(0, sum, f, first, begin, end);
}
static VECTOR_FUNCTION void dots_of_decoded(floatS *sum, const FewRows *f, size_t first, size_t begin, size_t end) {
    dots_of_group(1, sum, f, first, begin, end);
}

#if defined(PICKED_VECTORS)
// Computes dot[rows] = dot products of a few rows with row `row` of the many, over whole blocks of 4 bits.
VECTOR_INLINE void dots_of_codes(int rows, floatS *dot, const FewRows *f, size_t row) {
    enum { SCALES = 64 }; // blocks whose scales are decoded at once
    const Product *p = f->coded;
    const QuantFormat q = *p->format;
    const int shift = block_shift(q);
    const size_t begin = (p->record_first + row) * f->k, blocks = f->k >> shift;
    const uint8_t *record = (const uint8_t *)p->record, *codes = record + begin / 2;
    const floatS *few = f->few;
    Vector sum[CODED_ROWS][PICKED_VECTORS] = {{{0}}}, w[PICKED_VECTORS];
    float scale[SCALES], value[16] __attribute__((aligned(64)));
    for (size_t b = 0; b < blocks; b++) {
        if (b % SCALES == 0)
            quant_scales_of(scale, q, record, &f->parts, (begin >> shift) + b, min_size(SCALES, blocks - b));
        block_floats(value, quant_codes[q.type], q.rounding, scale[b % SCALES]);
        __builtin_prefetch(codes + 1024); // prefetches 2048 elements ahead
        const ValueTable table = value_table(value);
        for (size_t i = 0; i < q.block; i += PICKED, codes += PICKED / 2, few += PICKED * CODED_ROWS) {
            pick_vectors(w, codes, table, quant_first_shift(q.type));
            for (int r = 0; r < rows; r++)
                for (size_t v = 0; v < PICKED_VECTORS; v++)
                    sum[r][v] += w[v] * vector_load(few + (v * CODED_ROWS + (size_t)r) * VECTOR_LANES);
        }
    }
    for (int r = 0; r < rows; r++) {
        for (size_t v = 1; v < PICKED_VECTORS; v++) sum[r][0] += sum[r][v];
        dot[r] = vector_sum_across(sum[r][0]);
    }
}

static VECTOR_FUNCTION void dots_of_codes_of(floatS *dot, const FewRows *f, size_t row) {
    if (f->count == 1)
        dots_of_codes(1, dot, f, row);
    else if (f->count == 2)
        dots_of_codes(2, dot, f, row);
    else // a third and a fourth row of zeros: their sums are not used
        dots_of_codes(CODED_ROWS, dot, f, row);
}
#else
static void dots_of_codes_of(floatS *dot, const FewRows *f, size_t row) { (void)dot, (void)f, (void)row; }
#endif

// Returns the product, after the whole vectors, of row r of the few and row `row` of the many.
static floatS dot_of_rest(const FewRows *f, size_t r, size_t row) {
    floatS sum = 0;
    for (size_t i = f->whole; i < f->k; i++) {
        floatX element;
        if (f->coded)
            decode_many(&element, f, row * f->k + i, 1);
        else
            element = f->many[row * f->stride + i];
        sum += load(f->x[r * f->x_stride + i]) * load(element);
    }
    return sum;
}

// Computes rows [first, first + count) of the many, at most STREAMED_ROWS. columns: they are columns of out; else rows
// of out
static VECTOR_FUNCTION void item_of_few(const Product *p, const FewRows *f, int columns, size_t first, size_t count) {
    floatS sums[STREAMED_ROWS * FEW_MOST] = {0}, out[FEW_MOST * STREAMED_ROWS];
    for (size_t c = 0; c < count && f->codes; c++) dots_of_codes_of(sums + c * FEW_MOST, f, first + c);
    for (size_t from = 0; from < f->whole && !f->codes; from += STREAMED_LENGTH)
        for (size_t c = 0; c < count; c += MANY_ROWS)
            (f->coded ? dots_of_decoded : dots_of_floats)(sums + c * FEW_MOST, f, first + c, from,
                                                          min_size(from + STREAMED_LENGTH, f->whole));
    for (size_t r = 0; r < f->count && f->whole < f->k; r++)
        for (size_t c = 0; c < count; c++) sums[c * FEW_MOST + r] += dot_of_rest(f, r, first + c);
    for (size_t c = 0; c < count && !columns; c++)
        finish_row(p, 1, p->accumulate, sums + c * FEW_MOST, (first + c) * out_stride(p), 0, f->count);
    for (size_t r = 0; r < f->count && columns; r += VECTOR_LANES)
        for (size_t c = 0; c < STREAMED_ROWS; c += VECTOR_LANES)
            vector_transpose(out + r * STREAMED_ROWS + c, STREAMED_ROWS, sums + c * FEW_MOST + r, FEW_MOST);
    for (size_t r = 0; r < f->count && columns; r++)
        finish_row(p, 1, p->accumulate, out + r * STREAMED_ROWS, r * out_stride(p) + first, first, count);
}

// Packs a vector of words of each of the few rows, from element `from` on.
static VECTOR_FUNCTION void pack_few(floatS *packed, const FewRows *f, size_t from) {
    for (size_t r = 0; r < f->tiles * FEW_ROWS && !f->codes; r++) {
        floatS *out = packed + few_at(f, r / FEW_ROWS, from) + r % FEW_ROWS * FEW_RUN;
        const floatX *x = f->x + r * f->x_stride + from;
        for (size_t i = 0; i < FEW_LANES; i++, out += FEW_ROWS * FEW_RUN, x += FEW_RUN * FEW_WORD)
            if (r >= f->count)
                memset(out, 0, FEW_RUN * sizeof(*out));
            else if (FEW_LANES == 1)
                vector_store(out, vector_load_stored(x));
            else
                memcpy(out, x, FEW_RUN * sizeof(*out));
    }
    for (size_t r = 0; r < CODED_ROWS && f->codes; r++)
        vector_store(packed + from * CODED_ROWS + r * VECTOR_LANES,
                     r < f->count ? vector_load_stored(f->x + r * f->x_stride + from) : (Vector){0});
}

// Items of work that a thread begins with. Another thread may take these items after finishing all items that it began
// with.
typedef struct {
    size_t next, end;
    char unshared[64 - 2 * sizeof(size_t)];
} Items;

// Returns the first row of an item of thread `own`, or of another thread if it has none left; `none` if all are taken.
static size_t items_take(Items *items, size_t threads, size_t own, size_t none) {
    for (size_t i = 0; i < threads; i++) {
        Items *from = items + (own + i) % threads;
        size_t taken;
#pragma omp atomic capture
        {
            taken = from->next;
            from->next += STREAMED_ROWS;
        }
        if (taken < from->end) return taken;
    }
    return none;
}

// Computes a skinny product: one operand has few rows. Each thread reads its share of the other operand once, unpacked,
// from first row to last.
static void product_of_few(const Product *p) {
    const int columns = p->record || p->m <= MOST_STREAMED_ROWS; // 1: the few rows are a's
    const size_t threads = product_is_small(p) ? 1 : (size_t)omp_get_max_threads();
    FewRows f = {.k = p->k, .coded = p->record ? p : NULL};
    f.x = columns ? p->a : p->b, f.x_stride = columns ? a_stride(p) : p->k, f.count = columns ? p->m : p->n;
    f.many = columns ? p->b : p->a, f.stride = columns ? p->k : a_stride(p), f.rows = columns ? p->n : p->m;
#if defined(PICKED_VECTORS)
    f.codes = p->record && p->format->type != QUANT_FP8 && f.count <= CODED_ROWS && p->k % p->format->block == 0;
#endif
    const size_t unit = f.codes ? VECTOR_LANES : VECTOR_LANES * FEW_WORD;
    f.tiles = panels_of(f.count, FEW_ROWS), f.whole = p->k / unit * unit;
    if (p->record) f.parts = quant_parts(*p->format, p->record_rows * p->k);
    const size_t size = round_up(max_size(f.tiles * FEW_ROWS, CODED_ROWS) * f.whole, CACHE_LINE);
    floatS *packed = product_scratch(max_size(threads * ITEM_SIZE, size + threads * sizeof(Items) / sizeof(floatS)));
    Items *items = (Items *)(packed + size);
    const size_t share = round_up(panels_of(f.rows, threads), STREAMED_ROWS);
    for (size_t i = 0; i < threads; i++) items[i].next = i * share, items[i].end = min_size((i + 1) * share, f.rows);
    f.few = packed;
#pragma omp parallel num_threads(threads)
    {
        const size_t own = (size_t)omp_get_thread_num();
        size_t first;
#pragma omp for schedule(static)
        for (size_t from = 0; from < f.whole; from += unit) pack_few(packed, &f, from);
        while ((first = items_take(items, threads, own, f.rows)) < f.rows)
            item_of_few(p, &f, columns, first, min_size(STREAMED_ROWS, f.rows - first));
    }
}

// Adds a[depth] b[depth,n] to out[columns], for `columns` columns of b.
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

// Multiplies one or two rows of a with an unpacked b: packing would cost more than the product. Sums are made in blocks
// of PANEL_DEPTH, like the panels' sums.
static VECTOR_FUNCTION void product_of_rows(const Product *p) {
#pragma omp parallel for schedule(dynamic) if (!product_is_small(p))
    for (size_t column = 0; column < p->n; column += PANEL_COLUMNS) {
        floatS tile[MOST_ROWS * PANEL_COLUMNS] = {0};
        const size_t columns = min_size(PANEL_COLUMNS, p->n - column);
        for (size_t r = 0; r < p->m; r++)
            for (size_t from = 0; from < p->k; from += PANEL_DEPTH)
                row_times_matrix(tile + r * PANEL_COLUMNS, p->a + r * a_stride(p) + from, p->b + from * p->n + column,
                                 min_size(PANEL_DEPTH, p->k - from), p->n, columns);
        finish_tile(p, 1, p->accumulate, tile, 0, p->m, column, columns);
    }
}

// Computes a product with few rows; b is read once and not packed. Returns 0 if there are too many rows.
static int product_streamed(const Product *p) {
    if (p->a_transposed || p->m > (p->b_transposed ? MOST_STREAMED_ROWS : MOST_ROWS)) return 0;
    if (p->b_transposed)
        product_of_few(p);
    else
        product_of_rows(p);
    return 1;
}

// ---- the whole product -------------------------------------------------------------------------------------------

// Returns the size of equal blocks, in whole panels and at most `limit`, into which `size` is cut.
static size_t block_size(size_t size, size_t limit, size_t panel) {
    return round_up(panels_of(size, panels_of(size, limit)), panel);
}

typedef struct {
    size_t rows, columns; // rows and columns of an item
    size_t row_items, items;
} ProductGrid;

// Cuts out into items so that the busiest thread has the least work: multiply-adds of whole tiles, plus packing.
static ProductGrid product_grid(const Product *p, size_t threads) {
    const size_t row_panels = panels_of(p->m, PANEL_ROWS), column_panels = panels_of(p->n, PANEL_COLUMNS);
    const size_t least = panels_of(row_panels, ITEM_PANELS);
    ProductGrid best = {0};
    double least_cost = 0;
    for (size_t r = least; r < least + threads && r <= row_panels; r++) {
        const size_t high = panels_of(row_panels, r), row_items = panels_of(row_panels, high);
        const size_t few = panels_of(column_panels, ITEM_TILES / high), rounds = panels_of(row_items * few, threads);
        const size_t wide = panels_of(column_panels, max_size(few, rounds * threads / row_items));
        const size_t items = row_items * panels_of(column_panels, wide);
        const size_t rows = high * PANEL_ROWS, columns = wide * PANEL_COLUMNS;
        const double cost =
            (double)panels_of(items, threads) * ((double)(rows * columns) + PACKING_COST * (double)(rows + columns));
        if (best.items && cost >= least_cost) continue;
        least_cost = cost;
        best.rows = rows, best.columns = columns, best.row_items = row_items, best.items = items;
    }
    return best;
}

static VECTOR_FUNCTION void product_item(const Product *p, const ProductGrid *grid, size_t i, floatS *memory) {
    const size_t depth = block_size(p->k, PANEL_DEPTH, VECTOR_LANES);
    ProductItem item;
    item.row = i % grid->row_items * grid->rows, item.rows = min_size(grid->rows, p->m - item.row);
    item.column = i / grid->row_items * grid->columns, item.columns = min_size(grid->columns, p->n - item.column);
    item.a = memory, item.b = memory + ITEM_A, item.tiles = item.b + PANEL_B_SIZE;
    for (item.from = 0; item.from < p->k; item.from += depth) {
        item.depth = min_size(depth, p->k - item.from);
        item.first = item.from == 0, item.last = item.from + item.depth == p->k;
        product_block(p, &item);
    }
}

static void product_plain(const Product *p) {
    if (!p->a_transposed && p->b_transposed && p->n <= FEW_COLUMNS) {
        product_of_few(p);
        return;
    }
    const size_t threads = product_is_small(p) ? 1 : (size_t)omp_get_max_threads();
    const ProductGrid grid = product_grid(p, threads);
    floatS *scratch = product_scratch(threads * ITEM_SIZE);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (size_t i = 0; i < grid.items; i++)
        product_item(p, &grid, i, scratch + (size_t)omp_get_thread_num() * ITEM_SIZE);
}

#endif
