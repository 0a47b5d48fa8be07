/*
Cuts a call of attention on op set "cpu" into tasks, which threads take in order. Tasks depend only on shapes and the
number of threads, so the threads' shares can be counted without computing (test/ops does).

A query block is up to 2^17 elements: tokens x the query heads of one key/value head x HD. Forward, each query block is
an independent task. Backward, a task owns dK and dV of one key/value head of a document. If that would leave threads
idle, each query block of a document is a phase. Its keys are cut into segments with about equal numbers of query-key
pairs; a task adds to dK and dV of its segment and leaves a partial dQ. Closing tasks then add up the partial dQ in the
order of the segments. A task of phase p waits for the tasks of phase p - 1 that add to the same keys. It also waits for
the closing of phase p - 2, whose memory for partial dQ it reuses. A task waits only for earlier tasks, so some task
always runs; the only barrier is at the end.
*/
#ifndef LLMC_CPU_ATTENTION_TASKS_H
#define LLMC_CPU_ATTENTION_TASKS_H
#include "llmc/ops/ops.h"
#include "attention_block.h"

// Scratch memory is three query blocks per thread and the partial dQ of two phases. To bound it, blocks are smaller
// above 16 threads; keys are then packed more often. Blocks of 2^16 elements cost 1 - 3 % of the time of 2^17, blocks
// of 2^15 cost 4 - 11 %. (NH = 32, NKV = 8, HD = 128, chunks of 1024: 4.3 MiB with 2 threads, 70 with 16, 91 with 64.)
#define QUERY_ELEMENTS_MOST  ((size_t)1 << 17)
#define QUERY_ELEMENTS_LEAST ((size_t)1 << 15)
#define QUERY_ELEMENTS_ALL   ((size_t)1 << 21) // elements of all threads' query blocks, within the two limits above
#define TASKS_PER_THREAD     ((size_t)4)       // enough to balance causal blocks of different work
#define PHASE_TASKS          ((size_t)2)       // tasks per thread in a phase of backward
#define WHOLE_TASKS          ((size_t)10)      // tasks per thread where documents are not cut, or phases are few
#define SEGMENT_KEYS         32                // segments end at multiples of this many keys

// Arguments of a call, shared by its blocks. op_list.h describes the tensors.
typedef struct {
    const floatX *q, *k, *v;
    const floatX *dout, *out; // used in backward only, like the tensors of the next two lines
    const floatS *lse;
    floatS *dk, *dv;
    size_t NH, NKV, HD, window;
    KeyRange keys;                // keys that may be read
    size_t group;                 // query heads per key/value head
    size_t threads, tokens, rows; // threads that share the work; tokens and rows of the largest query block
    double scale;
    int amx; // 1: attention_amx.h computes the blocks
} Attention;

// Queries [begin, end) of a document, for the query heads that read key/value head `head`. place: row of the first
// query in q, out, ... Row r of the block is query head r % group of token begin + r / group.
typedef struct {
    size_t head, document, begin, end, place;
} QueryBlock;

// Returns the most tokens of a query block in a chunk of n tokens.
static size_t query_block_tokens(size_t n, size_t group, size_t HD, size_t threads) {
    const size_t share = max_size(QUERY_ELEMENTS_ALL / threads, QUERY_ELEMENTS_LEAST);
    return min_size(n, max_size(1, min_size(share, QUERY_ELEMENTS_MOST) / HD / group));
}

static size_t query_block_rows(size_t tokens, size_t group) { return round_up(tokens * group, BLOCK_ROWS); }

// Returns the keys that some query of the block sees; no keys if begin >= end.
static KeyRange keys_of(const Attention *a, QueryBlock b) {
    const KeyRange keys = {max_size(first_key(b.document, b.begin, a->window), a->keys.begin),
                           min_size(b.end, a->keys.end)};
    return keys;
}

// Returns the block of queries [begin, begin + most) of a span, cut at its end.
static QueryBlock block_of(Span span, size_t head, size_t begin, size_t most) {
    const QueryBlock b = {head, span.document, begin, min_size(begin + most, span.end), span.row + begin - span.begin};
    return b;
}

// Cuts a span into equal blocks of at most `most` tokens; returns their size.
static size_t even_tokens(Span span, size_t most) {
    const size_t n = span.end - span.begin, blocks = (n + most - 1) / most;
    return (n + blocks - 1) / blocks;
}

// Returns the number of blocks that even_tokens cuts.
static size_t even_blocks(Span span, size_t most) {
    const size_t size = even_tokens(span, most);
    return (span.end - span.begin + size - 1) / size;
}

// Returns the arguments on which a call's tasks depend.
static Attention attention_of(const AttentionShape *shape, size_t threads) {
    Attention a = {.NH = shape->NH, .NKV = shape->NKV, .HD = shape->HD, .window = shape->spans.window};
    a.keys = shape->keys, a.scale = shape->scale, a.group = a.NH / a.NKV, a.threads = threads;
    a.tokens = query_block_tokens(spans_rows(shape->spans), a.group, a.HD, a.threads);
    a.rows = query_block_rows(a.tokens, a.group);
    return a;
}

// ---- forward --------------------------------------------------------------------------------------------------------

static size_t span_blocks(Spans spans, size_t most) {
    size_t blocks = 0;
    for (size_t i = 0; i < spans.count; i++) blocks += even_blocks(spans.span[i], most);
    return blocks;
}

// Returns the most tokens of a query block: fewer if there would be too few blocks, or if threads would idle at the
// end.
static size_t forward_tokens(const Attention *a, Spans spans) {
    const size_t rows = spans_rows(spans), least = max_size(BLOCK_ROWS / a->group / 2, 1);
    const size_t most =
        min_size(a->tokens, max_size(BLOCK_ROWS / a->group + 1, rows * a->NKV / (TASKS_PER_THREAD * a->threads)));
    const size_t blocks = span_blocks(spans, most);
    size_t best = most;
    double lowest = INFINITY;
    if (a->threads == 1 || blocks * a->NKV > 16 * a->threads) return most;
    for (size_t tokens = most, last = 0; tokens >= least; tokens--) {
        const size_t now = span_blocks(spans, tokens), tasks = now * a->NKV;
        if (now == last) continue;
        if (now > 2 * blocks) break;
        const size_t turns = (tasks + a->threads - 1) / a->threads;
        // (largest share of a thread / mean share) * (cost of smaller blocks)
        const double cost =
            (double)(turns * a->threads) / (double)tasks * (1 + 0.02 * ((double)now / (double)blocks - 1));
        if (cost < lowest) lowest = cost, best = tokens;
        last = now;
    }
    return best;
}

// Returns the query block of task `task`, last block first. A document's last queries see the most keys, and long tasks
// go first. `task` grows from call to call; span and before belong to the previous call (at first spans.count - 1 and
// 0).
static QueryBlock forward_task(const Attention *a, Spans spans, size_t most, size_t task, size_t *span,
                               size_t *before) {
    const size_t block = task / a->NKV;
    for (size_t own; block - *before >= (own = even_blocks(spans.span[*span], most)); --*span) *before += own;
    const Span s = spans.span[*span];
    const size_t size = even_tokens(s, most), later = block - *before;
    return block_of(s, task % a->NKV, s.begin + (even_blocks(s, most) - 1 - later) * size, size);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Returns into how many segments backward cuts the keys of a query block; 1: uncut. The document has `share` of the
// call's work. If it is most of the call, takes the number whose tasks fill the threads' turns best.
static size_t key_segments(double share, size_t NKV, size_t threads) {
    if (NKV % threads == 0 || share * (double)(WHOLE_TASKS * threads) <= (double)NKV) return 1;
    if (share > 0.5) share = 1;
    const size_t least = max_size(2, (size_t)ceil(share * (double)(PHASE_TASKS * threads) / (double)NKV));
    size_t best = least;
    for (size_t now = least; share == 1 && now < 2 * least; now++) // compares turns(now) / now, the time of a phase
        if ((now * NKV + threads - 1) / threads * best < (best * NKV + threads - 1) / threads * now) best = now;
    return best;
}

// Returns into how many segments a document's keys are cut in backward.
static size_t document_segments(const Attention *a, Span span, double all_pairs) {
    const double pairs = span_pairs(span, a->keys, a->window);
    return pairs > 0 ? key_segments(pairs / all_pairs, a->NKV, a->threads) : 1;
}

// Returns the keys of segment `segment` of a query block.
static KeyRange segment_keys(const Attention *a, QueryBlock b, size_t segment, size_t segments) {
    const Span span = {b.document, b.begin, b.end, 0};
    const KeyRange keys = keys_of(a, b);
    const double pairs = span_pairs(span, keys, a->window);
    size_t ends[2];
    for (size_t i = 0; i < 2; i++) {
        const double before = pairs * (double)(segment + i) / (double)segments;
        size_t low = keys.begin, high = max_size(keys.end, keys.begin);
        if (segment + i == 0) high = low;
        if (segment + i == segments) low = high;
        while (low < high) { // finds the first key with this many pairs before it
            const KeyRange part = {keys.begin, (low + high) / 2};
            if (span_pairs(span, part, a->window) < before)
                low = part.end + 1;
            else
                high = part.end;
        }
        ends[i] = low;
        if (low > keys.begin && low < keys.end)
            ends[i] = max_size(keys.begin, min_size(keys.end, b.document + round_up(low - b.document, SEGMENT_KEYS)));
    }
    const KeyRange part = {ends[0], ends[1]};
    return part;
}

// Returns the first segment of a query block with keys after `key`.
static size_t segment_behind(const Attention *a, QueryBlock b, size_t key, size_t segments) {
    size_t low = 0, high = segments;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (segment_keys(a, b, middle, segments).end <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// A query block of all heads: tasks [segments][NKV] of its segments, and tasks [slices][NKV] that close it
typedef struct {
    QueryBlock block;
    size_t segments, slices;
} Phase;

// A walk through the phases of a call: tasks of phase `number`, then tasks that close the phase before, `last`. ended:
// only closing remains. closed: closing tasks of all even and of all odd phases before `last`
typedef struct {
    Phase now, last;
    size_t number, span, token, closed[2];
    int ended;
} Phases;

static size_t segment_tasks(const Attention *a, const Phases *p) { return p->ended ? 0 : p->now.segments * a->NKV; }
static size_t closing_tasks(const Attention *a, const Phases *p) { return p->number ? p->last.slices * a->NKV : 0; }

// Returns the tokens of a document's query blocks in backward: fewer if threads would idle in the last turn.
static size_t phase_tokens(const Attention *a, Span span, size_t segments) {
    const size_t size = even_tokens(span, a->tokens), tasks = even_blocks(span, size) * segments * a->NKV;
    const size_t turns = (tasks + a->threads - 1) / a->threads;
    if (10 * turns * a->threads <= 11 * tasks) return size;
    return even_tokens(span, max_size(1, size * tasks / (WHOLE_TASKS * a->threads)));
}

// Sets p->now to the query block at token p->token of span p->span - 1, or to the first block of the next document.
static void phase_find(Phases *p, const Attention *a, Spans spans, double pairs) {
    for (; p->span > 0; p->span--, p->token = 0) {
        const Span span = spans.span[p->span - 1];
        const size_t cuts = document_segments(a, span, pairs);
        if (cuts == 1 || span.begin + p->token >= span.end) continue;
        const QueryBlock b = block_of(span, 0, span.begin + p->token, phase_tokens(a, span, cuts));
        const KeyRange keys = keys_of(a, b);
        const size_t most = keys.begin < keys.end ? (keys.end - keys.begin + SEGMENT_KEYS - 1) / SEGMENT_KEYS : 1;
        p->now.block = b, p->now.segments = min_size(cuts, most);
        p->now.slices = min_size(b.end - b.begin, (a->threads + a->NKV - 1) / a->NKV);
        p->token += b.end - b.begin;
        return;
    }
    p->ended = 1;
}

static Phases phases_begin(const Attention *a, Spans spans, double pairs) {
    Phases p = {0};
    p.span = spans.count;
    phase_find(&p, a, spans, pairs);
    return p;
}

static void phase_next(Phases *p, const Attention *a, Spans spans, double pairs) {
    if (p->number) p->closed[(p->number - 1) % 2] += p->last.slices * a->NKV;
    p->last = p->now, p->number++;
    phase_find(p, a, spans, pairs);
}

// Returns the number of tasks of all phases.
static size_t phases_tasks(const Attention *a, Spans spans, double pairs) {
    size_t tasks = 0;
    for (Phases p = phases_begin(a, spans, pairs);; phase_next(&p, a, spans, pairs)) {
        tasks += segment_tasks(a, &p) + closing_tasks(a, &p);
        if (p.ended) return tasks;
    }
}

#endif
