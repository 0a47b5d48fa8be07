/*
Cuts attention's spans into calls of a library of fused attention (cuDNN, cuda/attention_cudnn.cuh) and calls of our own
kernels. Op set "cuda" executes these calls; op set "dry" counts them.

The library compiles a kernel for each length (its kernels for any length gave wrong results on an H100, cuDNN 9.19). So
queries are cut into pieces of grid, 2 grid, .. block rows from the span's first query on.

Forward: one call per piece takes its last keys. Their number is a multiple of a step: grid / 2 keys, or, with many
keys, an eighth to a quarter of them. Earlier keys go to calls of powers of two, from grid on, the smallest first. Our
kernels take the rest. The results are merged. If keys have more elements than the library counts, a call is split into
ranges. With a sliding window the last keys are rounded up to a step while the document has keys: a call may read keys
that no query of the op sees. Such keys get weight 0. A library multiplies this weight with their values, so the values
must be finite.

Backward: dq, dk and dv are sums over blocks of keys once log-sum-exp is known. The keys before a piece are cut into
blocks of powers of two, backwards from its first query:

    document      keys -->                            span.begin                   span.end
    |  own  |  block  |  block  |       block        | causal |                    |
    |  own  |  block  |  block  |       block        | block  | causal |           |    <- queries
    |  own  |  block  |  block  |   block   |        [ padded |  tail  ] causal

own: the remaining keys, fewer than grid / 2, which our kernels take. The tail, fewer than grid queries, is padded in
front: the call has grid `rows`, and the padding rows get log-sum-exp +infinity, hence p = 0. Keys are never padded.

With a sliding window a piece of backward is one causal call with the window, or our kernels take it
(library_takes_window). The call covers the piece's own keys, and whole steps of the earlier keys that its first query
sees. Our kernels take the remaining keys.

A call has as many heads as the workspace allows, and as leave dS, a term for each pair and head, fewer than 2^31
elements, since the library may count them in 32 bits. Blocks of keys grow while a quarter of the heads fits: to 4
blocks, or to any length if sums may be added in any order.
*/
#ifndef LLMC_ATTENTION_CALLS_H
#define LLMC_ATTENTION_CALLS_H
#include "ops.h"

#ifndef CUDNN_GRID // tests define smaller values
#define CUDNN_GRID      512
#define CUDNN_BLOCK     4096
#define CUDNN_WORKSPACE ((size_t)512 << 20) // used if AttentionChoice.workspace is 0
#endif
#ifndef CUDNN_ELEMENTS
#define CUDNN_ELEMENTS INT32_MAX
#endif
#ifndef CUDNN_TERMS
#define CUDNN_TERMS INT32_MAX
#endif
#ifndef CUDNN_BACKWARD_WINDOW
#define CUDNN_BACKWARD_WINDOW 2048
#endif

// Tells whether the library takes calls with this window. The library's backward computes the whole rectangle of
// queries and keys. On an H200 it beat our kernels if the window was half of a call's queries or more and heads were at
// most 128 wide.
static int library_takes_window(size_t HD, size_t window, int backward) {
    return !window || !backward || (window >= CUDNN_BACKWARD_WINDOW && HD <= 128);
}

typedef struct {
    Span span;     // the queries [begin, end) of the call; `row` counts from the first requested row
    KeyRange keys; // keys that the call may read
    size_t rows;   // rows of the library call, the queries last; 0: our own kernels take the span
    size_t heads;  // key/value heads of one library call; NKV / heads calls cover all
    size_t window; // window of the library call
    int causal;    // 1: the last row sees all keys, each earlier row one key less than the next; 0: each row sees all
                   // keys
    int merged;    // forward: the results are merged with the results of earlier calls over other keys
} AttentionCall;

// Limits of a library
typedef struct AttentionCut {
    size_t grid, block; // rows of a backward call: powers of two from grid to block
    size_t elements;    // most elements of a call's tensor, since the library may count them in 32 bits
    size_t terms;       // most elements of dS, for the same reason
    size_t NH, NKV, HD;
    size_t window, workspace; // workspace: bytes of a backward call besides the tensors, with staged results
    int any_order;
    int windows; // 1: the library takes backward calls with a window
    int (*takes)(const struct AttentionCut *cut, const AttentionCall *call, int backward); // tells whether the library
                                                                                           // takes a call; NULL: it
                                                                                           // takes every call
} AttentionCut;

// Widest heads of a multiple of 8 that cuDNN 9.19 has plans for, forward and backward (make dev-cudnn-plans). The
// support matrix of its documentation agrees (operations/Attention, 9.18.1).
static const struct {
    int architecture;
    size_t widest[2];
} cudnn_heads[] = {{80, {256, 128}}, {86, {256, 128}},  {89, {256, 128}},
                   {90, {256, 256}}, {100, {256, 128}}, {120, {256, 128}}};

// Bits of passes whose attention a library computes. LIBRARY_GLOBAL * LIBRARY_FORWARD (or BACKWARD): the same pass for
// heads of global_head_dim. ASKED: the device was asked, so the other bits are its answer
enum { LIBRARY_FORWARD = 1, LIBRARY_BACKWARD = 2, LIBRARY_ASKED = 4, LIBRARY_GLOBAL = 8 };

// Head sizes whose backward our kernels for Hopper take from cuDNN (cuda/attention_wgmma.cuh)
enum { WGMMA_HEADS = 3 };
static const size_t wgmma_heads[WGMMA_HEADS] = {64, 128, 256};

// Tells whether environment variable STREAMBP_WGMMA asks for kernels of Hopper's own instructions.
static int wgmma_wanted(void) {
    const char *const wanted = getenv("STREAMBP_WGMMA");
    return wanted && strcmp(wanted, "0") != 0;
}

// Tells whether our kernels take backward of such heads from cuDNN on Hopper.
static int wgmma_takes_head(size_t HD) {
    for (size_t i = 0; i < WGMMA_HEADS; i++)
        if (wgmma_heads[i] == HD) return wgmma_wanted();
    return 0;
}

// Tells whether Hopper's kernel for experts_activate, where it is on, takes this activation, with biases or without.
static int wgmma_activates(ActivationKind kind, int biased) {
    return kind == ACTIVATION_CLAMPED || (activation_gates(kind) && !biased);
}

// Tells whether cuDNN takes heads of this width on any card.
static int cudnn_has_head(size_t HD) { return HD % 8 == 0 && HD <= 256; }

// Returns the passes (LIBRARY_FORWARD, LIBRARY_BACKWARD) of bf16 attention that cuDNN takes on a GPU of this
// architecture.
static int cudnn_directions(int architecture, size_t HD) {
    for (size_t i = 0; i < sizeof(cudnn_heads) / sizeof(*cudnn_heads) && cudnn_has_head(HD); i++)
        if (cudnn_heads[i].architecture == architecture)
            return LIBRARY_FORWARD * (HD <= cudnn_heads[i].widest[0]) +
                   LIBRARY_BACKWARD * (HD <= cudnn_heads[i].widest[1] && !(architecture == 90 && wgmma_takes_head(HD)));
    return 0;
}

// Type of a function that receives the calls of a cut, one by one, in order of execution
typedef void AttentionTake(void *to, const AttentionCall *call);

// ---- memory of a call -----------------------------------------------------------------------------------------------
// Bounds the workspace bytes of backward for `heads` query heads: dS (not if sums may take any order), dk and dv for
// every query head, dq in fp32, sums for each row. cuDNN 9.19 asks for less (make dev-cudnn-plans).
static size_t attention_workspace(size_t rows, size_t keys, size_t heads, size_t HD, int any_order) {
    return heads * ((any_order ? 0 : rows * keys * 2) + keys * HD * 4 + rows * HD * 8 + rows * 8) + 4096;
}

// Returns the bytes of a backward call of `heads` key/value heads: the workspace, and dq, dk and dv in bf16.
static size_t attention_call_bytes(const AttentionCut *cut, size_t rows, size_t keys, size_t heads) {
    const size_t queries = heads * (cut->NH / cut->NKV);
    return attention_workspace(rows, keys, queries, cut->HD, cut->any_order) + 2 * cut->HD * rows * queries +
           4 * cut->HD * keys * heads + 4 * 256;
}

// Returns the most key/value heads of one backward call by the elements of dS, which has all pairs of queries and keys
// unless sums may be added in any order. Results of a head do not depend on the other heads of a call.
static size_t attention_most_heads(const AttentionCut *cut, size_t rows, size_t keys) {
    const size_t pairs = rows * keys * (cut->NH / cut->NKV);
    return cut->any_order ? cut->NKV : min_size(cut->NKV, cut->terms / max_size(pairs, 1));
}

// Returns the most key/value heads that fit one backward call; 0: a call for one head does not fit.
static size_t attention_heads(const AttentionCut *cut, size_t rows, size_t keys) {
    size_t heads = attention_most_heads(cut, rows, keys);
    while (heads && (cut->NKV % heads || attention_call_bytes(cut, rows, keys, heads) > cut->workspace)) heads--;
    return heads;
}

// Returns the most keys that one call may have.
static size_t attention_most_keys(const AttentionCut *cut) { return cut->elements / (cut->NKV * cut->HD); }

// Returns the size of the largest block among `keys` keys; 0: none fits.
static size_t attention_key_block(const AttentionCut *cut, size_t rows, size_t keys) {
    const size_t step = cut->grid / 2, longest = cut->any_order ? keys : min_size(keys, 4 * cut->block);
    const size_t most = min_size(longest, attention_most_keys(cut));
    size_t largest = step, block;
    if (most < step) return 0;
    while (largest <= most / 2) largest *= 2;
    for (block = largest; block >= step && 4 * attention_heads(cut, rows, block) < cut->NKV;) block /= 2;
    if (block < step)
        for (block = largest; block >= step && !attention_heads(cut, rows, block);) block /= 2;
    return block < step ? 0 : block;
}

// Returns the rows of the next piece: the largest of block, block / 2, .. that n queries fill, at least grid.
static size_t attention_piece(const AttentionCut *cut, size_t n) {
    size_t rows = cut->block;
    while (rows > cut->grid && rows > n) rows /= 2;
    return rows;
}

// Returns the most bytes of a call for n queries; 0: n is too short for any call.
static size_t attention_most_bytes(const AttentionCut *cut, size_t n) {
    const size_t longest = cut->any_order ? (size_t)1 << 40 : 4 * cut->block;
    size_t most = 0;
    for (size_t rows = cut->grid; rows <= min_size(n, cut->block); rows *= 2)
        for (size_t heads, keys = attention_key_block(cut, rows, longest); keys >= cut->grid / 2; keys /= 2)
            if ((heads = attention_heads(cut, rows, keys)) != 0)
                most = max_size(most, attention_call_bytes(cut, rows, keys, heads));
    return most;
}

static AttentionCut attention_cut(size_t NH, size_t NKV, size_t HD, size_t window, AttentionChoice choice) {
    const AttentionCut cut = {CUDNN_GRID,
                              CUDNN_BLOCK,
                              CUDNN_ELEMENTS,
                              CUDNN_TERMS,
                              NH,
                              NKV,
                              HD,
                              window,
                              choice.workspace ? choice.workspace : CUDNN_WORKSPACE,
                              choice.any_order,
                              library_takes_window(HD, window, 1),
                              NULL};
    return cut;
}

// Returns the cut for a shape's spans, with no more workspace than calls for its rows need.
static AttentionCut attention_cut_of(const AttentionShape *shape, AttentionChoice choice) {
    AttentionCut cut = attention_cut(shape->NH, shape->NKV, shape->HD, shape->spans.window, choice);
    cut.workspace = attention_most_bytes(&cut, spans_rows(shape->spans));
    return cut;
}

// Returns the index-th useful workspace, largest first, for a sequence of `keys` tokens (AttentionChoice.workspace).
// Index 0 has all heads and the largest blocks of keys. Returns 0 once a workspace is no larger than the op set's
// default.
static size_t attention_workspace_choice(AttentionCut cut, size_t keys, size_t index) {
    size_t block = cut.block, heads = 0;
    while (block < keys && (cut.any_order || block < 4 * cut.block)) block *= 2;
    for (block *= 2; 4 * heads < cut.NKV && block;) // the longest block whose dS has few enough elements
        for (heads = cut.NKV, block /= 2; heads && heads > attention_most_heads(&cut, cut.block, block);) heads /= 2;
    for (; index; index--) {
        if (!cut.any_order && heads % 2 == 0 && 4 * (heads / 2) >= cut.NKV)
            heads /= 2;
        else
            block /= 2;
    }
    const size_t bytes = block ? attention_call_bytes(&cut, cut.block, block, heads) : 0;
    return bytes > cut.workspace ? bytes : 0;
}

// ---- spans ----------------------------------------------------------------------------------------------------------
// Returns whether a call is long enough for the library. For few queries or few query-key pairs our kernels are about
// as fast.
static int attention_is_long(const AttentionCut *cut, size_t queries, size_t keys) {
    return queries >= cut->grid / 8 && keys >= cut->grid && queries * keys >= cut->grid * cut->grid;
}

// A part of a span. All queries of the part see keys [keys.begin, keys.end); causal: query i sees keys [keys.begin, i].
typedef struct {
    Span span;
    KeyRange keys;
    int causal, partial; // partial: AttentionShape.partial
} AttentionPart;

static Span span_part(Span span, size_t begin, size_t end) {
    const Span part = {span.document, begin, end, span.row + begin - span.begin};
    return part;
}

// Splits a span's queries: [0] the queries among the keys, [1] the queries after the keys. Queries before the keys see
// no key.
static void attention_parts(const AttentionShape *shape, Span span, AttentionPart part[2]) {
    const KeyRange keys = {max_size(shape->keys.begin, span.document), min_size(shape->keys.end, span.end)};
    const size_t first = min_size(max_size(span.begin, keys.begin), span.end);
    const size_t middle = max_size(first, min_size(span.end, keys.end));
    const AttentionPart among = {span_part(span, first, middle), keys, 1, shape->partial},
                        behind = {span_part(span, middle, span.end), keys, 0, shape->partial};
    part[0] = among, part[1] = behind;
    if (keys.begin >= keys.end) part[0].span.end = first, part[1].span.begin = part[1].span.end;
}

static void own_call(Span span, KeyRange keys, AttentionTake *take, void *to) {
    const AttentionCall call = {span, keys, 0, 0, 0, 0, 0};
    if (span.begin < span.end && keys.begin < keys.end) take(to, &call);
}

// ---- forward --------------------------------------------------------------------------------------------------------
// Makes the calls for `call`; splits its keys into ranges if there are too many. Returns 0 if the library does not take
// one of the calls.
static int forward_calls_of(const AttentionCut *cut, AttentionCall call, AttentionTake *take, void *to) {
    const size_t most = attention_most_keys(cut), range = most / 2 / cut->block * cut->block;
    AttentionCall full = call;
    full.causal = 0;
    for (; call.keys.end - call.keys.begin > most; call.keys.begin = full.keys.end, call.merged = 1) {
        full.keys.begin = call.keys.begin, full.keys.end = call.keys.begin + range, full.merged = call.merged;
        if (!range || call.window || (cut->takes && !cut->takes(cut, &full, 0))) return 0;
        if (take) take(to, &full);
    }
    if (cut->takes && !cut->takes(cut, &call, 0)) return 0;
    if (take) take(to, &call);
    return 1;
}

// Returns the step in which a call's number of keys grows. Large numbers have 4 lengths between two powers of two,
// because each length is compiled. The results of each call before the last call are merged. From 2 blocks on merging
// costs 3 % of the last call's time.
static size_t attention_key_step(const AttentionCut *cut, size_t keys, size_t window, int causal) {
    size_t step = cut->grid / 2;
    while (!window && (!causal || keys >= 2 * cut->block) && 8 * step <= keys) step *= 2;
    return step;
}

// Makes the calls of a piece (the last `rows` rows) in part p. Returns 0 if the library does not take one of the calls.
static int forward_piece(const AttentionCut *cut, const AttentionPart *p, Span piece, size_t rows, AttentionTake *take,
                         void *to) {
    const size_t window = cut->window < piece.end - piece.document ? cut->window : 0;
    const size_t lowest = max_size(p->keys.begin, piece.document); // first key read
    const size_t seen = max_size(lowest, first_key(piece.document, piece.begin, window));
    const size_t end = p->causal ? piece.end : p->keys.end;
    const size_t step = attention_key_step(cut, end - seen, window, p->causal);
    const size_t keys = min_size((end - seen + step - 1) / step * step, (end - lowest) / step * step);
    const size_t first = end - keys;
    AttentionCall call = {piece, {first, first}, rows, cut->NKV, 0, 0, p->partial};
    if (!keys || (p->causal && keys < rows)) return 0;
    for (size_t block = cut->grid; block < step; block *= 2, call.keys.end = call.keys.begin) {
        if ((first - seen) / block % 2 == 0) continue;
        call.keys.begin -= block;
        if (!forward_calls_of(cut, call, take, to)) return 0;
        call.merged = 1;
    }
    const KeyRange rest = {seen, call.keys.begin};
    call.keys.begin = first, call.keys.end = end, call.window = window, call.causal = p->causal;
    if (!forward_calls_of(cut, call, take, to)) return 0;
    call.keys = rest, call.rows = call.heads = call.window = 0, call.causal = 0, call.merged = 1;
    if (take && rest.begin < rest.end) take(to, &call);
    return 1;
}

// ---- backward -------------------------------------------------------------------------------------------------------
// Sets the call's keys and heads. Returns whether the library takes the call.
static int library_call(const AttentionCut *cut, AttentionCall *call, size_t begin, size_t end) {
    call->keys.begin = begin, call->keys.end = end;
    call->heads = attention_heads(cut, call->rows, end - begin);
    return begin < end && end - begin <= attention_most_keys(cut) && call->heads &&
           (!cut->takes || cut->takes(cut, call, 1));
}

// Makes the calls of a piece (the last `rows` rows) in part p. Returns 0 if the library does not take one of the calls.
static int backward_piece(const AttentionCut *cut, const AttentionPart *p, Span piece, size_t rows, AttentionTake *take,
                          void *to) {
    const size_t window = p->causal && cut->window < piece.end - piece.document ? cut->window : 0;
    const size_t lowest = max_size(p->keys.begin, first_key(p->span.document, p->span.begin, window)); // first key read
    const size_t seen = max_size(p->keys.begin, first_key(piece.document, piece.begin, window));
    size_t key = p->causal ? piece.end : p->keys.end;
    AttentionCall call = {piece, p->keys, rows, 0, window, p->causal, 0};
    if (window && !cut->windows) return 0;
    if (p->causal) {
        if (key < lowest + rows) return 0;
        key -= rows;
        const size_t step = seen == piece.document ? cut->grid : cut->grid / 2; // a larger step, so that documents'
                                                                                // starts have fewer lengths
        if (window && key > seen) key -= (key - seen) / step * step;
        if (!library_call(cut, &call, key, piece.end)) return 0;
        if (take) take(to, &call);
    }
    call.causal = 0;
    while (!window && key >= seen + cut->grid / 2) { // cuts as many blocks of one length as the keys fill
        const size_t block = attention_key_block(cut, rows, key - seen);
        if (!block || !library_call(cut, &call, key - block, key)) return 0;
        key -= (key - seen) / block * block;
        for (; take && call.keys.end > key; call.keys.begin -= block, call.keys.end -= block) take(to, &call);
    }
    const KeyRange rest = {seen, key};
    if (take) own_call(piece, rest, take, to);
    return 1;
}

// ---- pieces ---------------------------------------------------------------------------------------------------------
typedef int PieceCalls(const AttentionCut *cut, const AttentionPart *p, Span piece, size_t rows, AttentionTake *take,
                       void *to);

// Makes the calls for the next queries of a part, from t on. Returns the first query that is left.
static size_t next_piece(const AttentionCut *cut, const AttentionShape *shape, const AttentionPart *p, size_t t,
                         PieceCalls *calls, AttentionTake *take, void *to) {
    for (size_t rows = attention_piece(cut, p->span.end - t);; rows /= 2) {
        const size_t end = min_size(p->span.end, t + rows);
        const Span piece = span_part(p->span, t, end);
        const size_t keys = (p->causal ? end : p->keys.end) - p->keys.begin;
        if (attention_is_long(cut, end - t, keys) && !(cut->window && shape->partial) &&
            calls(cut, p, piece, rows, NULL, NULL))
            calls(cut, p, piece, rows, take, to);
        else if (rows > cut->grid)
            continue;
        else
            own_call(piece, shape->keys, take, to);
        return end;
    }
}

static void attention_forward_calls(const AttentionCut *cut, const AttentionShape *shape, AttentionTake *take,
                                    void *to) {
    for (size_t i = 0; i < 2 * shape->spans.count; i++) {
        AttentionPart part[2];
        attention_parts(shape, shape->spans.span[i / 2], part);
        const AttentionPart *p = &part[i % 2];
        for (size_t t = p->span.begin; t < p->span.end;) t = next_piece(cut, shape, p, t, forward_piece, take, to);
    }
}

// Hands the backward calls of query rows [row, row + rows) to take(to, call), in order. Their rows count from `row`.
static void attention_backward_calls(const AttentionCut *cut, const AttentionShape *shape, size_t row, size_t rows,
                                     AttentionTake *take, void *to) {
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span whole = shape->spans.span[i];
        const size_t before = whole.begin - whole.row; // token minus row, may wrap below 0
        const size_t begin = max_size(whole.row, row), end = min_size(whole.end - before, row + rows);
        AttentionPart part[2];
        if (begin >= end) continue;
        Span span = span_part(whole, begin + before, end + before);
        span.row -= row;
        attention_parts(shape, span, part);
        for (size_t half = 0; half < 2; half++)
            for (size_t t = part[half].span.begin; t < part[half].span.end;)
                t = next_piece(cut, shape, &part[half], t, backward_piece, take, to);
    }
}

// ---- counts ---------------------------------------------------------------------------------------------------------
typedef struct {
    const AttentionCut *cut;
    int backward;
    double own, library; // query-key pairs of our kernels; of the library
    double masked;       // the share of `library` in masked calls: causal squares of queries and their own keys, or
                         // calls with a window
    double unseen;       // pairs outside the window that the library's backward calls compute in addition
    double calls;        // number of library calls
    double staged;       // bytes read and written around the library calls
} AttentionCounts;

// Counts a call (an AttentionTake). Backward reads staged results that the library wrote; forward merges.
static void attention_count(void *to, const AttentionCall *call) {
    AttentionCounts *c = (AttentionCounts *)to;
    const size_t length = call->keys.end - call->keys.begin;
    const int block = call->rows && !call->causal && !c->cut->window; // 1: each row sees all keys
    const double pairs = block ? (double)(call->span.end - call->span.begin) * (double)length
                               : span_pairs(call->span, call->keys, c->cut->window);
    const double keys = (double)(c->cut->NKV * length);
    if (!call->rows) {
        c->own += pairs;
        return;
    }
    const size_t calls = c->cut->NKV / call->heads;
    c->library += pairs, c->calls += (double)calls;
    if (call->window) c->masked += pairs;
    if (call->window && c->backward) c->unseen += (double)call->rows * (double)length - pairs;
    for (size_t t = call->span.begin; call->causal && !call->window && t < call->span.end; t += c->cut->block)
        c->masked += query_key_pairs(0, min_size(c->cut->block, call->span.end - t), 0);
    const double queries = (double)(c->cut->NH * call->rows);
    c->staged += (double)c->cut->HD * (c->backward ? 10 * (queries + 2 * keys) : call->merged ? 6 * queries : 0);
}

#endif
