/*
Which prefixes the documents of a sequence share, for the sequence's tree (tree.h).

The documents of a sample are neighbours; batch->common says which rows they share, from the index of the data. With
--share-prefixes on, samples share rows, too: their first documents are sorted by tokens, and each sample shares what
its first document has in common with the last document of the sample before it.

A fork costs memory and calls, so it must gain PREFIX_LEAST rows over the nearest fork above it, else its branches begin
there. If a sequence has more forks than its bound, the number of rows doubles until there are few enough.
*/
#ifndef LLMC_PREFIXES_H
#define LLMC_PREFIXES_H
#include "tree.h"

enum { PREFIX_FORKS = 8, PREFIX_FORK_ROWS = 1024 };

// Returns how many forks documents of this many rows may have, in addition to the forks of their samples.
static size_t prefix_budget(size_t rows) { return max_size(PREFIX_FORKS, rows / PREFIX_FORK_ROWS); }

// ---- forks ----------------------------------------------------------------------------------------------------------
// A text, in an order in which texts that share rows are neighbours and a prefix of another text precedes it
typedef struct {
    uint32_t length; // rows
    uint32_t common; // leading rows that it shares with the text before it; 0 of the first text
    uint32_t stays;  // 1: it shares these rows in any case
    // scratch of prefix_snap. A node is a prefix that texts leave; its index is that of the first text after which it
    // is left
    uint32_t node, parent; // the node at `common` rows; of a node the node above, 0: none
    uint32_t forks;        // of a node: 1: texts branch there; 2: and some of them stay
    uint32_t above;        // of a node: rows before the last fork at it or above; UINT32_MAX: not known yet
    uint32_t path;         // [k]: k-th node of a path
} PrefixText;

typedef struct {
    size_t rows, forks;
} PrefixSum;

// Tells whether a text branches off the one before it; else one of the two ends where the other goes on.
static int prefix_branches(const PrefixText *t) { return t->common < t->length && t->common < t[-1].length; }

// Finds the nodes of n texts and the nodes above them.
static void prefix_nodes(PrefixText *t, size_t n) {
    size_t depth = 0; // of the path of the text before
    for (size_t i = 1; i <= n; i++) {
        const uint32_t common = i < n ? t[i].common : 0;
        while (depth && t[t[depth - 1].path].common > common) {
            const uint32_t left = t[--depth].path, above = depth ? t[depth - 1].path : 0;
            t[left].parent = common > (above ? t[above].common : 0) ? (uint32_t)i : above;
        }
        if (!common) continue;
        if (!depth || t[t[depth - 1].path].common < common) {
            t[depth++].path = (uint32_t)i;
            t[i].forks = 0, t[i].above = UINT32_MAX;
        }
        t[i].node = t[depth - 1].path;
        if (prefix_branches(&t[i])) t[t[i].node].forks |= t[i].stays ? 3 : 1;
    }
}

// Moves branches up: a fork that gains fewer than `least` rows over the nearest fork above is not made; its texts share
// only the rows before that fork. Returns rows and forks of all texts.
static PrefixSum prefix_snap(PrefixText *t, size_t n, size_t least) {
    PrefixSum sum = {n ? t[0].length : 0, 0};
    prefix_nodes(t, n);
    for (size_t i = 1; i < n; i++) {
        uint32_t node = t[i].common ? t[i].node : 0;
        size_t depth = 0;
        for (; node && t[node].above == UINT32_MAX; node = t[node].parent) t[depth++].path = node;
        for (uint32_t above = node ? t[node].above : 0; depth > 0; t[node].above = above) {
            node = t[--depth].path;
            if (!t[node].forks || (t[node].forks == 1 && t[node].common - above < least)) continue;
            above = t[node].common, sum.forks++;
        }
    }
    for (size_t i = 1; i < n; i++) t[i].path = t[i].common && prefix_branches(&t[i]) ? t[t[i].node].above : t[i].common;
    for (size_t i = 1; i < n; i++) t[i].common = t[i].path, sum.rows += t[i].length - t[i].common;
    return sum;
}

// ---- documents of a batch -------------------------------------------------------------------------------------------
// Returns how many tokens two documents of a batch have in common, at most `most`. *a, *c: the tokens after these; of a
// document that ends there its last target, or -1 if that is not trained on and so unknown
static size_t texts_common(const Batch *b, size_t first, size_t second, size_t most, int32_t *a, int32_t *c) {
    const size_t x = b->document_start[first], y = b->document_start[second];
    const size_t of_x = text_length(b, first), of_y = text_length(b, second);
    size_t i = 0;
    most = min_size(most, min_size(of_x, of_y));
    while (i < most && b->tokens[x + i] == b->tokens[y + i]) i++;
    *a = i < of_x ? b->tokens[x + i] : b->targets[x + i - 1];
    *c = i < of_y ? b->tokens[y + i] : b->targets[y + i - 1];
    return i;
}

// Counts the leading rows, at most `most`, that two documents of a batch can share: equal tokens followed by equal
// tokens. A last target that is not trained on is equal to any.
static size_t batch_common(const Batch *b, size_t first, size_t second, size_t most) {
    int32_t x, y;
    const size_t tokens = texts_common(b, first, second, most, &x, &y);
    return tokens - (tokens && x != y && x >= 0 && y >= 0);
}

// Compares two documents by their tokens; a prefix comes first.
static int texts_compare(const Batch *b, size_t first, size_t second) {
    int32_t x, y;
    texts_common(b, first, second, SIZE_MAX, &x, &y);
    if (x != y) return x < y ? -1 : 1;
    return text_length(b, first) < text_length(b, second) ? -1 : 1;
}

static int sample_begins(const Batch *b, size_t d) { return !d || !b->group || b->group[d] != b->group[d - 1]; }

// Fills order with the documents, sample by sample; samples are sorted by their first documents. spare: [documents]
static void prefixes_order(const Batch *b, size_t *order, size_t *spare) {
    size_t samples = 0, count = 0;
    for (size_t d = 0; d < b->documents; d++) {
        size_t low = 0, high = samples; // binary insertion
        if (!sample_begins(b, d)) continue;
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (texts_compare(b, d, spare[middle]) < 0)
                high = middle;
            else
                low = middle + 1;
        }
        memmove(spare + low + 1, spare + low, (samples++ - low) * sizeof(*spare));
        spare[low] = d;
    }
    for (size_t i = 0; i < samples; i++) {
        size_t d = spare[i];
        do order[count++] = d++;
        while (d < b->documents && !sample_begins(b, d));
    }
}

// Builds the tree of a batch of samples that share rows. A fork of two samples gains at least `least` rows, or more if
// the tree then has more than `forks` forks. scratch: [documents]
static Tree *prefixes_tree(const Batch *b, size_t least, size_t forks, PrefixText *scratch) {
    Tree *const room = b->room, *tree;
    const size_t n = b->documents;
    prefixes_order(b, room->order, room->common);
    do {
        for (size_t i = 0; i < n; i++) {
            const size_t d = room->order[i];
            const int begins = sample_begins(b, d);
            const size_t common = !begins ? b->common[d] : i ? batch_common(b, room->order[i - 1], d, SIZE_MAX) : 0;
            const PrefixText text = {(uint32_t)text_length(b, d), (uint32_t)common, !begins, 0, 0, 0, 0, 0};
            scratch[i] = text;
        }
        prefix_snap(scratch, n, least);
        for (size_t i = 0; i < n; i++) room->common[i] = scratch[i].common;
        tree = tree_build(room, b, room->order, room->common);
        least *= 2;
    } while (tree && tree->forks > forks && least);
    return tree;
}

// Builds the tree of a batch in which only documents of a sample share rows.
static Tree *samples_tree(const Batch *b) {
    for (size_t d = 0; d < b->documents; d++) b->room->order[d] = d;
    return tree_build(b->room, b, b->room->order, b->common);
}

#endif
