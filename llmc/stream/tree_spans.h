/*
Attention in a tree (llmc/data/tree.h): which keys a chunk's queries see.

A query sees its own chain up to itself, and of each ancestor chain the rows before the fork at which the path leaves
it. The chunk's spans (make_spans) are of its own chains. tree_calls lists the ranges of ancestors, each a call of
attention whose results are merged with the others'. A call's queries lie at their distance along the path behind the
fork, so masks and windows hold as in a document:

    chain 0 (a document)     0  1  2 | 3  4  5        chain 1 leaves chain 0 before row 3: rows 6, 7
    the call of rows 6, 7    keys 0, 1, 2; queries at 3, 4

Kernels own dK and dV of a span's keys. So two spans of one call must not read the same keys. Without a window all
queries behind a fork see the same keys, and their rows are contiguous: one span. With a window each chain has a call of
its own, of the queries that still see keys before the fork.
*/
#ifndef LLMC_TREE_SPANS_H
#define LLMC_TREE_SPANS_H
#include "sequence.h"

// Tells whether the current sequence's documents leave each other, so that attention takes several calls.
static int has_forks(const StreamBP *s) { return s->now.tree && s->now.tree->forks; }

// Adds a call, or its queries to the call over the same keys if `merges`. Returns the number of calls.
static size_t tree_call_add(TreeCall *call, size_t count, TreeCall added, int merges) {
    for (size_t i = count; merges && i-- > 0;)
        if (call[i].keys.begin == added.keys.begin && call[i].keys.end == added.keys.end) {
            call[i].span.end += added.span.end - added.span.begin;
            return count;
        }
    call[count] = added;
    return count + 1;
}

// Makes the calls of chunk c over ancestors' keys, in s->now.call. Returns their number. The dry run that visits one
// chunk for many has none: the chunk's spans count the pairs of all its calls.
static size_t tree_calls(const StreamBP *s, Chunk c, size_t window) {
    const Tree *tree = s->now.tree;
    const size_t *start = s->now.batch->document_start, end = c.token + c.n;
    size_t count = 0;
    if (!has_forks(s) || visits_shapes(s)) return 0;
    for (size_t i = document_of(s->now.batch, c.token); i < s->now.batch->documents && start[i] < end; i++) {
        const size_t begin = max_size(start[i], c.token), rows = min_size(start[i + 1], end) - begin;
        size_t behind = begin - start[i]; // rows along the path from the fork to the first query
        for (size_t of = i, parent; (parent = tree->parent[of]) != SIZE_MAX; of = parent) {
            const size_t fork = tree->fork[of],
                         sees = window ? min_size(rows, max_size(window - 1, behind) - behind) : rows;
            const TreeCall call = {
                {start[parent], fork + behind, fork + behind + sees, 0}, {start[parent], fork}, begin - c.token};
            if (!sees) break;
            count = tree_call_add(s->now.call, count, call, !window);
            behind += fork - start[parent];
        }
    }
    return count;
}

// Tells whether a chunk with so many calls merges results. The dry run that visits one chunk for many counts that for
// each chunk.
static int merges_calls(const StreamBP *s, size_t calls) { return calls || (has_forks(s) && visits_shapes(s)); }

// Returns the most calls of a chunk of texts' rows.
static size_t tree_most_calls(const Batch *texts) { return tree_most_pieces(texts->documents); }

#endif
