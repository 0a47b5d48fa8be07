/*
Op set "cpu": attention of one chunk's queries over their documents' keys, forward and backward (contract in op_list.h).
Keys are taken in blocks with a running softmax, so nothing of size T x T exists. A key/value head's block is packed
once for all query heads that read it. The arithmetic is in attention_block.h, for AMX in attention_amx.h; this file
pairs blocks and fixes the order of sums.

Threads take the tasks of attention_tasks.h; sums over tasks have a fixed order. So no result depends on which thread
ran a task. Forward depends neither on the chunk nor on the number of threads.

Backward needs the last digits of a row's output, a sum over keys: delta = dout . out is subtracted from every dout . v.
So out is summed in three steps: over a block's keys, over FOLD_BLOCKS blocks, over all groups of FOLD_BLOCKS. No step
has more than 128 additions up to 10^6 keys (with AMX 128 FOLD_BLOCKS; its weights are bf16). The sum of the weights is
double.
*/
#ifndef LLMC_CPU_ATTENTION_H
#define LLMC_CPU_ATTENTION_H
#include <sched.h>
#include "llmc/ops/ops.h"
#include "attention_amx.h"
#include "attention_block.h"
#include "attention_tasks.h"
#include "elements.h"

#define FOLD_BLOCKS 64
#define LOG2_E      1.4426950408889634074
#define LN_2        0.69314718055994530942

// One thread's packed blocks
typedef struct {
    floatS *q;                // [rows][width]
    floatS *dout;             // [rows][width] forward: the folded part of the unfinished output
    floatS *out;              // [rows][width] forward: the part that is not folded yet; backward: out, then dq
    floatS *keys;             // [BLOCK_KEYS][width]  k or v
    floatS *kt, *vt;          // [width][SCORE_STRIDE]  their transposes
    floatS *dk, *dv;          // [BLOCK_KEYS][width]
    floatS *scores, *dscores; // [BLOCK_ROWS][SCORE_STRIDE]
    floatS *largest;          // [rows]  forward: the largest score so far
    double *sum;              // [rows]  forward: the sum of weights
    floatS *lse, *delta;      // [rows]  backward: log2 sum 2^scores, dout . out
} AttentionScratch;

// ---- scratch --------------------------------------------------------------------------------------------------------

// Cuts a thread's share from `base` and returns its size in elements. base NULL: only the size is meaningful.
static size_t attention_cut(AttentionScratch *s, floatS *base, size_t rows, size_t HD) {
    const size_t width = packed_width(HD);
    size_t used = 0;
#define CUT(field, elements) s->field = (void *)(base ? base + used : NULL), used += round_up(elements, CACHE_LINE)
    CUT(q, rows * width);
    CUT(dout, rows * width);
    CUT(out, rows * width);
    CUT(keys, BLOCK_KEYS * width);
    CUT(kt, SCORE_STRIDE * width);
    CUT(vt, SCORE_STRIDE * width);
    CUT(dk, BLOCK_KEYS * width);
    CUT(dv, BLOCK_KEYS * width);
    CUT(scores, BLOCK_ROWS * SCORE_STRIDE);
    CUT(dscores, BLOCK_ROWS * SCORE_STRIDE);
    CUT(largest, rows);
    CUT(sum, rows * sizeof(double) / sizeof(floatS));
    CUT(lse, rows);
    CUT(delta, rows);
#undef CUT
    return used;
}

// Returns the size of the progress counters of backward's phases.
static size_t progress_size(size_t tasks) { return round_up((2 * tasks + 2) * sizeof(unsigned), 64) / sizeof(floatS); }

static size_t cpu_attention_scratch(size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots) {
    (void)slots;
    const size_t threads = (size_t)omp_get_max_threads(), segments = key_segments(1, NKV, threads), group = NH / NKV;
    const size_t rows = query_block_rows(query_block_tokens(n, group, HD, threads), group);
    AttentionScratch s;
    return CACHE_LINE + threads * attention_cut(&s, NULL, rows, HD) +
           (segments > 1 ? progress_size(segments * NKV) + 2 * segments * NKV * rows * packed_width(HD) : 0);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Per row of a query block: which of keys [key, key + keys) it sees, as seen[r] and hidden[r] (attention_block.h)
typedef struct {
    size_t seen[BLOCK_ROWS], hidden[BLOCK_ROWS];
} Sight;

static void see_keys(Sight *sight, const Attention *a, QueryBlock b, size_t row, size_t rows, size_t key, size_t keys) {
    size_t position = b.begin + row / a->group, head = row % a->group;
    for (size_t r = 0; r < rows; r++) {
        const size_t first = first_key(b.document, position, a->window);
        sight->seen[r] = position < key ? 0 : min_size(position - key + 1, keys);
        sight->hidden[r] = first > key ? min_size(first - key, sight->seen[r]) : 0;
        if (++head == a->group) head = 0, position++;
    }
}

// Returns the number of keys in a block. Blocks are aligned to the document's start, so sums hardly depend on where the
// query block begins.
static size_t block_keys(QueryBlock b, KeyRange keys, size_t key) {
    return min_size(BLOCK_KEYS - (key - b.document) % BLOCK_KEYS, keys.end - key);
}

// Returns the end of the rows of a query block that see one of keys [key, key + keys).
static size_t end_row(const Attention *a, QueryBlock b, size_t key, size_t keys) {
    const size_t end = a->window ? min_size(b.end, key + keys - 1 + a->window) : b.end;
    return end > b.begin ? (end - b.begin) * a->group : 0;
}

// Returns the first row that sees `key`, rounded down to a tile.
static size_t first_row(QueryBlock b, size_t key, size_t group) {
    const size_t row = key > b.begin ? (key - b.begin) * group : 0;
    return row - row % TILE_ROWS;
}

// Returns the index of row r of a block among all rows [n][NH] of q, out, dout, dq and lse.
static size_t row_place(const Attention *a, QueryBlock b, size_t r) {
    return (b.place + r / a->group) * a->NH + b.head * a->group + r % a->group;
}

static void pack_queries(floatS *block, const floatX *x, const Attention *a, QueryBlock b, double scale) {
    block_pack(block, x + row_place(a, b, 0) * a->HD, b.end - b.begin, a->group, a->NH * a->HD, a->HD, (floatS)scale);
}

static void pack_keys(floatS *block, const floatX *x, const Attention *a, size_t head, size_t key, size_t keys) {
    block_pack(block, x + (key * a->NKV + head) * a->HD, keys, 1, a->NKV * a->HD, a->HD, 1);
}

static void forward_keys(floatS *folded, const Attention *a, QueryBlock b, size_t key, size_t keys,
                         const AttentionScratch *s) {
    const size_t group = a->group, HD = a->HD, width = packed_width(HD), last = end_row(a, b, key, keys);
    Sight sight;
    pack_keys(s->keys, a->k, a, b.head, key, keys);
    block_transpose(s->kt, s->keys, keys, HD);
    pack_keys(s->keys, a->v, a, b.head, key, keys);
    for (size_t row = first_row(b, key, group); row < last; row += BLOCK_ROWS) {
        const size_t count = min_size(BLOCK_ROWS, round_up(last - row, TILE_ROWS));
        see_keys(&sight, a, b, row, count, key, keys);
        block_scores(s->scores, s->q + row * width, s->kt, sight.seen, count, HD);
        block_largest(s->scores, s->out + row * width, folded ? folded + row * width : NULL, s->largest + row,
                      s->sum + row, sight.seen, sight.hidden, count, HD);
        block_weights(s->scores, s->largest + row, s->sum + row, sight.seen, sight.hidden, count);
        block_apply(s->out + row * width, s->scores, s->keys, sight.seen, count, HD);
    }
}

// Adds scale * a packed block to dk or dv.
static void add_keys(floatS *dk, const floatS *block, const Attention *a, size_t head, size_t key, size_t keys,
                     double scale) {
    for (size_t j = 0; j < keys; j++) {
        floatS *to = dk + ((key + j) * a->NKV + head) * a->HD;
        const floatS *from = block + j * packed_width(a->HD);
        for (size_t d = 0; d < a->HD; d++) to[d] += (floatS)scale * from[d];
    }
}

// Packs a query block for backward: q (scores to base 2), dout, lse (to base 2) and delta = dout . out
static void open_queries(const Attention *a, QueryBlock b, const AttentionScratch *s) {
    const size_t width = packed_width(a->HD), rows = (b.end - b.begin) * a->group;
    pack_queries(s->q, a->q, a, b, a->scale * LOG2_E);
    pack_queries(s->dout, a->dout, a, b, 1);
    pack_queries(s->out, a->out, a, b, 1);
    for (size_t r = 0; r < rows; r++) {
        s->lse[r] = (floatS)(LOG2_E * (double)a->lse[row_place(a, b, r)]);
        s->delta[r] = row_dot(s->dout + r * width, s->out + r * width, a->HD);
    }
    for (size_t r = rows; r < round_up(rows, TILE_ROWS); r++) s->lse[r] = s->delta[r] = 0;
}

// Runs a query block backward against keys [key, key + keys): adds to dK, dV, and to dq[rows][width], unscaled.
static void backward_keys(floatS *dq, const Attention *a, QueryBlock b, size_t key, size_t keys,
                          const AttentionScratch *s) {
    const size_t HD = a->HD, width = packed_width(HD), last = end_row(a, b, key, keys);
    Sight sight;
    pack_keys(s->keys, a->v, a, b.head, key, keys);
    block_transpose(s->vt, s->keys, keys, HD);
    pack_keys(s->keys, a->k, a, b.head, key, keys);
    block_transpose(s->kt, s->keys, keys, HD);
    memset(s->dk, 0, round_up(keys, TILE_ROWS) * width * sizeof(floatS));
    memset(s->dv, 0, round_up(keys, TILE_ROWS) * width * sizeof(floatS));
    for (size_t row = first_row(b, key, a->group); row < last; row += BLOCK_ROWS) {
        const size_t exact = min_size(BLOCK_ROWS, last - row), count = round_up(exact, TILE_ROWS);
        const floatS *q = s->q + row * width, *dout = s->dout + row * width;
        see_keys(&sight, a, b, row, count, key, keys);
        block_scores(s->scores, q, s->kt, sight.seen, count, HD);
        block_scores(s->dscores, dout, s->vt, sight.seen, count, HD);
        block_softmax_backward(s->scores, s->dscores, s->lse + row, s->delta + row, sight.seen, sight.hidden, count);
        block_apply(dq + row * width, s->dscores, s->keys, sight.seen, count, HD);
        block_apply_transposed(s->dv, s->scores, dout, sight.seen, exact, HD);
        block_apply_transposed(s->dk, s->dscores, q, sight.seen, exact, HD);
    }
    add_keys(a->dk, s->dk, a, b.head, key, keys, LN_2); // q was scaled by scale * log2 e
    add_keys(a->dv, s->dv, a, b.head, key, keys, 1);
}

// ---- the same by AMX ------------------------------------------------------------------------------------------------

#if defined(ATTENTION_AMX)
static void pack_queries_amx(floatS *block, const floatX *x, const Attention *a, QueryBlock b, double scale) {
    (void)scale; // scale is applied to the scores
    amx_pack((floatX *)block, x + row_place(a, b, 0) * a->HD, b.end - b.begin, a->group, a->NH * a->HD, a->HD);
}

static floatX *pack_keys_amx(floatS *block, const floatX *x, const Attention *a, size_t head, size_t key, size_t keys) {
    amx_pack((floatX *)block, x + (key * a->NKV + head) * a->HD, keys, 1, a->NKV * a->HD, a->HD);
    return (floatX *)block;
}

static void forward_keys_amx(floatS *folded, const Attention *a, QueryBlock b, size_t key, size_t keys,
                             const AttentionScratch *s) {
    const size_t group = a->group, HD = a->HD, width = packed_width(HD), padded = round_up(keys, AMX_SIDE);
    const size_t last = end_row(a, b, key, keys), first = first_row(b, key, group);
    Sight sight;
    amx_transpose(s->kt, pack_keys_amx(s->keys, a->k, a, b.head, key, keys), padded, HD);
    amx_pair_rows(s->vt, pack_keys_amx(s->keys, a->v, a, b.head, key, keys), padded, HD);
    amx_begin();
    for (size_t row = first - first % AMX_SIDE; row < last; row += BLOCK_ROWS) {
        const size_t count = min_size(BLOCK_ROWS, round_up(last - row, AMX_SIDE));
        floatS *out = s->out + row * width;
        see_keys(&sight, a, b, row, count, key, keys);
        amx_scores(s->scores, (floatX *)s->q + row * HD, s->kt, sight.seen, count, HD);
        amx_weights(s->scores, out, folded ? folded + row * width : NULL, s->largest + row, s->sum + row, sight.seen,
                    sight.hidden, count, HD, (floatS)(a->scale * LOG2_E));
        amx_apply(out, s->scores, SCORE_STRIDE * sizeof(floatS), s->vt, sight.seen, count, HD);
    }
    amx_end();
}

// Adds scale * the transpose of block[HD][BLOCK_KEYS] to dk or dv.
static void add_keys_amx(floatS *dk, const floatS *block, const Attention *a, size_t head, size_t key, size_t keys,
                         double scale) {
    floatS square[VECTOR_LANES * VECTOR_LANES];
    for (size_t j = 0; j < keys; j += VECTOR_LANES)
        for (size_t d = 0; d < a->HD; d += VECTOR_LANES) {
            vector_transpose(square, VECTOR_LANES, block + d * BLOCK_KEYS + j, BLOCK_KEYS);
            for (size_t i = 0; i < min_size(VECTOR_LANES, keys - j); i++) {
                floatS *to = dk + ((key + j + i) * a->NKV + head) * a->HD + d;
                vector_store(to, vector_load(to) + (floatS)scale * vector_load(square + i * VECTOR_LANES));
            }
        }
}

// Packs rows of q and dout, then the same rows again, transposed in groups of AMX_SIDE rows; also lse (to base 2) and
// delta.
static void open_queries_amx(const Attention *a, QueryBlock b, const AttentionScratch *s) {
    const size_t HD = a->HD, rows = (b.end - b.begin) * a->group, all = round_up(rows, AMX_SIDE);
    floatX *q = (floatX *)s->q, *dout = (floatX *)s->dout;
    pack_queries_amx(s->q, a->q, a, b, 1);
    pack_queries_amx(s->dout, a->dout, a, b, 1);
    amx_transpose_rows(q + all * HD, q, all, HD);
    amx_transpose_rows(dout + all * HD, dout, all, HD);
    for (size_t r = 0; r < rows; r++) {
        s->lse[r] = (floatS)(LOG2_E * (double)a->lse[row_place(a, b, r)]);
        s->delta[r] = amx_row_dot(dout + r * HD, a->out + row_place(a, b, r) * HD, HD);
    }
    for (size_t r = rows; r < all; r++) s->lse[r] = s->delta[r] = 0;
}

static void backward_keys_amx(floatS *dq, const Attention *a, QueryBlock b, size_t key, size_t keys,
                              const AttentionScratch *s) {
    const size_t HD = a->HD, width = packed_width(HD), last = end_row(a, b, key, keys);
    const size_t rows = round_up((b.end - b.begin) * a->group, AMX_SIDE), padded = round_up(keys, AMX_SIDE);
    const size_t first = first_row(b, key, a->group);
    floatX *packed = (floatX *)s->keys, *q = (floatX *)s->q, *dout = (floatX *)s->dout;
    floatS *pairs = s->keys + BLOCK_KEYS * width - BLOCK_KEYS / 2 * HD; // k, its rows interleaved in pairs
    Sight sight;
    amx_transpose(s->vt, pack_keys_amx(s->keys, a->v, a, b.head, key, keys), padded, HD);
    amx_transpose(s->kt, pack_keys_amx(s->keys, a->k, a, b.head, key, keys), padded, HD);
    amx_pair_rows(pairs, packed, padded, HD);
    memset(s->dk, 0, BLOCK_KEYS * HD * sizeof(floatS));
    memset(s->dv, 0, BLOCK_KEYS * HD * sizeof(floatS));
    amx_begin();
    for (size_t row = first - first % AMX_SIDE; row < last; row += BLOCK_ROWS) {
        const size_t count = min_size(BLOCK_ROWS, round_up(last - row, AMX_SIDE));
        see_keys(&sight, a, b, row, count, key, keys);
        amx_scores(s->scores, q + row * HD, s->kt, sight.seen, count, HD);
        amx_scores(s->dscores, dout + row * HD, s->vt, sight.seen, count, HD);
        amx_softmax_backward(s->scores, s->dscores, packed, s->lse + row, s->delta + row, sight.seen, sight.hidden,
                             count, (floatS)(a->scale * LOG2_E));
        amx_apply(dq + row * width, packed, BLOCK_KEYS * sizeof(floatX), pairs, sight.seen, count, HD);
        amx_apply_transposed(s->dv, s->scores, dout + (rows + row) * HD, sight.seen, count, HD);
        amx_apply_transposed(s->dk, s->dscores, q + (rows + row) * HD, sight.seen, count, HD);
    }
    amx_end();
    add_keys_amx(a->dk, s->dk, a, b.head, key, keys, a->scale);
    add_keys_amx(a->dv, s->dv, a, b.head, key, keys, 1);
}
#define BLOCKS(a, function) ((a)->amx ? function##_amx : function)
#else
#define BLOCKS(a, function) function
#endif

// ---- a query block and all its keys ---------------------------------------------------------------------------------

// Starts the rows of a query block from `out` and lse if out.accumulate, else from zeros. Returns the folded part, or
// NULL.
static floatS *open_rows(RowResult out, const floatS *lse, const Attention *a, QueryBlock b,
                         const AttentionScratch *s) {
    const size_t width = packed_width(a->HD), rows = (b.end - b.begin) * a->group, all = round_up(rows, BLOCK_ROWS);
    memset(s->out, 0, all * width * sizeof(floatS));
    for (size_t r = 0; r < all; r++) s->largest[r] = -(floatS)INFINITY, s->sum[r] = 0;
    if (!out.accumulate) return NULL;
    memset(s->dout, 0, all * width * sizeof(floatS));
    for (size_t r = 0; r < rows; r++) {
        const size_t place = row_place(a, b, r);
        memcpy(s->dout + r * width, out.sums + place * a->HD, a->HD * sizeof(floatS));
        s->largest[r] = (floatS)(LOG2_E * (double)lse[place]);
        s->sum[r] = lse[place] == -(floatS)INFINITY ? 0 : 1;
    }
    return s->dout;
}

// Stores out and lse from the folded part, if any, and the unfolded part. A row that has seen no key has sum 0.
static void close_rows(RowResult out, floatS *lse, const floatS *folded, const Attention *a, QueryBlock b,
                       const AttentionScratch *s) {
    const floatS *parts = folded ? folded : s->out;
    out.accumulate = 0; // the rows include the old result already
    for (size_t r = 0; r < (b.end - b.begin) * a->group; r++) {
        const size_t place = row_place(a, b, r);
        block_unpack(out, place, parts + r * packed_width(a->HD), (size_t)(s->out - parts), folded ? 2 : 1, a->HD,
                     s->sum[r] == 0 ? 0 : 1 / s->sum[r]);
        lse[place] = (floatS)(LN_2 * ((double)s->largest[r] + log2(s->sum[r])));
    }
}

static void forward_block(RowResult out, floatS *lse, const Attention *a, QueryBlock b, const AttentionScratch *s) {
    const size_t rows = (b.end - b.begin) * a->group;
    const KeyRange range = keys_of(a, b);
    size_t blocks = 0;
    floatS *folded = open_rows(out, lse, a, b, s);
    BLOCKS(a, pack_queries)(s->q, a->q, a, b, a->scale * LOG2_E);
    for (size_t key = range.begin, keys; key < range.end; key += keys, blocks++) {
        keys = block_keys(b, range, key);
        if (blocks == FOLD_BLOCKS) {
            block_fold(s->dout, s->out, round_up(rows, TILE_ROWS), a->HD, folded != NULL);
            folded = s->dout, blocks = 0;
        }
        BLOCKS(a, forward_keys)(folded, a, b, key, keys, s);
    }
    close_rows(out, lse, folded, a, b, s);
}

// Runs a query block backward against a range of its keys.
static void backward_block(floatS *dq, const Attention *a, QueryBlock b, KeyRange range, const AttentionScratch *s) {
    const size_t rows = round_up((b.end - b.begin) * a->group, BLOCK_ROWS);
    BLOCKS(a, open_queries)(a, b, s);
    memset(dq, 0, rows * packed_width(a->HD) * sizeof(floatS));
    for (size_t key = range.begin, keys; key < range.end; key += keys) {
        keys = block_keys(b, range, key);
        BLOCKS(a, backward_keys)(dq, a, b, key, keys, s);
    }
}

// Stores dq = scale * the sum of the segments' partial sums, which are `stride` elements apart.
static void close_queries(RowResult dq, const floatS *part, size_t stride, size_t segments, const Attention *a,
                          QueryBlock b) {
    for (size_t r = 0; r < (b.end - b.begin) * a->group; r++)
        block_unpack(dq, row_place(a, b, r), part + r * packed_width(a->HD), stride, segments, a->HD, a->scale);
}

// ---- the ops --------------------------------------------------------------------------------------------------------

static RowResult result_rows(void *rows, const AttentionShape *shape) {
    const RowResult stored = {(floatX *)rows, NULL, 0}, sums = {NULL, (floatS *)rows, shape->accumulate};
    return shape->partial ? sums : stored;
}

// Returns the number of query-key pairs of all spans.
static double call_pairs(const AttentionShape *shape) {
    double pairs = 0;
    for (size_t i = 0; i < shape->spans.count; i++)
        pairs += span_pairs(shape->spans.span[i], shape->keys, shape->spans.window);
    return pairs;
}

// Returns whether a call is too small for several threads.
static int attention_is_small(const AttentionShape *shape) {
    return 2 * call_pairs(shape) * (double)(shape->NH * shape->HD) < (double)PARALLEL_WORK;
}

static Attention attention_call(const Stored *q, const Stored *k, const Stored *v, const AttentionShape *shape) {
    Attention a = attention_of(shape, (size_t)omp_get_max_threads());
    a.q = (const floatX *)q, a.k = (const floatX *)k, a.v = (const floatX *)v;
#if defined(ATTENTION_AMX)
    a.amx = a.HD % AMX_SIDE == 0 && amx_allowed();
#endif
    return a;
}

static void cpu_attention_forward(void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v,
                                  const AttentionShape *shape, Summed *scratch) {
    const Attention a = attention_call(q, k, v, shape);
    const RowResult rows = result_rows(out, shape);
    const Spans spans = shape->spans;
    const size_t NKV = a.NKV, HD = a.HD;
    if (spans.count == 0) return;
    const size_t most = forward_tokens(&a, spans), tasks = span_blocks(spans, most) * NKV;
    floatS *memory = cache_line_aligned(scratch);
#pragma omp parallel num_threads(a.threads) if (!attention_is_small(shape))
    {
        AttentionScratch s;
        const size_t share = attention_cut(&s, NULL, a.rows, HD);
        size_t span = spans.count - 1, before = 0;
        attention_cut(&s, memory + (size_t)omp_get_thread_num() * share, a.rows, HD);
#pragma omp for schedule(monotonic : dynamic)
        for (size_t task = 0; task < tasks; task++)
            forward_block(rows, (floatS *)lse, &a, forward_task(&a, spans, most, task, &span, &before), &s);
    }
}

// Runs a whole document backward for one key/value head. No other thread adds to its dk and dv.
static void backward_document(RowResult dq, const Attention *a, Span span, size_t head, size_t size,
                              const AttentionScratch *s) {
    for (size_t begin = span.begin; begin < span.end; begin += size) {
        const QueryBlock b = block_of(span, head, begin, size);
        backward_block(s->out, a, b, keys_of(a, b), s);
        close_queries(dq, s->out, 0, 1, a, b);
    }
}

// Progress of the phases, on which tasks wait. done[parity][task]: 1 + the number of the last phase of this parity that
// finished this task. closed[parity]: closing tasks finished in phases of this parity
typedef struct {
    floatS *parts[2]; // [segments][NKV][part] partial sums of dQ
    size_t part;
    unsigned *done[2], *closed;
} Progress;

// Waits until another thread's *count reaches `least`. Waits are rare and short.
static void wait_for(const unsigned *count, size_t least) {
    for (size_t spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; spins++)
        if (spins > 1000) sched_yield();
}

// Runs a segment's task; attention_tasks.h says which tasks it waits for.
static void backward_segment(const Attention *a, const Phases *p, size_t task, const Progress *progress,
                             const AttentionScratch *s) {
    const size_t parity = p->number % 2;
    QueryBlock b = p->now.block;
    b.head = task % a->NKV;
    const KeyRange keys = segment_keys(a, b, task / a->NKV, p->now.segments);
    if (p->number && keys.begin < keys.end)
        for (size_t i = segment_behind(a, p->last.block, keys.begin, p->last.segments); i < p->last.segments; i++) {
            if (segment_keys(a, p->last.block, i, p->last.segments).begin >= keys.end) break;
            wait_for(&progress->done[!parity][i * a->NKV + b.head], p->number);
        }
    wait_for(&progress->closed[parity], p->closed[parity]);
    backward_block(progress->parts[parity] + task * progress->part, a, b, keys, s);
    __atomic_store_n(&progress->done[parity][task], (unsigned)p->number + 1, __ATOMIC_RELEASE);
}

// Closes the previous phase for some tokens of a head: adds up its partial dQ.
static void backward_close(RowResult dq, const Attention *a, const Phases *p, size_t task, const Progress *progress) {
    const size_t parity = (p->number - 1) % 2, head = task % a->NKV, slice = task / a->NKV, part = progress->part;
    const size_t tokens = p->last.block.end - p->last.block.begin;
    const size_t first = tokens * slice / p->last.slices, end = tokens * (slice + 1) / p->last.slices;
    const QueryBlock b = {head, p->last.block.document, p->last.block.begin + first, p->last.block.begin + end,
                          p->last.block.place + first};
    for (size_t i = 0; i < p->last.segments; i++) wait_for(&progress->done[parity][i * a->NKV + head], p->number);
    close_queries(dq, progress->parts[parity] + head * part + first * a->group * packed_width(a->HD), a->NKV * part,
                  p->last.segments, a, b);
    __atomic_fetch_add(&progress->closed[parity], 1, __ATOMIC_RELEASE);
}

static void cpu_attention_backward(void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out,
                                   const Stored *q, const Stored *k, const Stored *v, const Summed *lse,
                                   const AttentionShape *shape, Summed *scratch) {
    const RowResult rows = result_rows(dq, shape);
    const Spans spans = shape->spans;
    const size_t NKV = shape->NKV;
    Attention a = attention_call(q, k, v, shape);
    a.dout = (const floatX *)dout, a.out = (const floatX *)out, a.lse = (const floatS *)lse;
    a.dk = (floatS *)dk, a.dv = (floatS *)dv;
    floatS *memory = cache_line_aligned(scratch);
    const double pairs = call_pairs(shape);
    if (spans.count == 0) return;
    AttentionScratch whole;
    const size_t most = key_segments(1, NKV, a.threads) * NKV, phase_tasks = phases_tasks(&a, spans, pairs);
    floatS *behind = memory + a.threads * attention_cut(&whole, NULL, a.rows, a.HD);
    Progress progress = {.part = a.rows * packed_width(a.HD)};
    if (phase_tasks) {
        progress.closed = (unsigned *)behind;
        memset(progress.closed, 0, progress_size(most) * sizeof(floatS));
        for (size_t i = 0; i < 2; i++) {
            progress.done[i] = progress.closed + 2 + i * most;
            progress.parts[i] = behind + progress_size(most) + i * most * progress.part;
        }
    }
#pragma omp parallel num_threads(a.threads) if (!attention_is_small(shape))
    {
        AttentionScratch s;
        const size_t share = attention_cut(&s, NULL, a.rows, a.HD);
        attention_cut(&s, memory + (size_t)omp_get_thread_num() * share, a.rows, a.HD);
        Phases p = phases_begin(&a, spans, pairs);
        size_t before = 0;
#pragma omp for schedule(monotonic : dynamic) nowait
        for (size_t task = 0; task < phase_tasks; task++) {
            for (size_t own; task - before >= (own = segment_tasks(&a, &p) + closing_tasks(&a, &p)); before += own)
                phase_next(&p, &a, spans, pairs);
            if (task - before < segment_tasks(&a, &p))
                backward_segment(&a, &p, task - before, &progress, &s);
            else
                backward_close(rows, &a, &p, task - before - segment_tasks(&a, &p), &progress);
        }
#pragma omp for schedule(dynamic)
        for (size_t task = 0; task < spans.count * NKV; task++) {
            const Span span = spans.span[spans.count - 1 - task / NKV];
            if (document_segments(&a, span, pairs) > 1) continue;
            backward_document(rows, &a, span, task % NKV, even_tokens(span, a.tokens), &s);
        }
    }
}

#endif
