/*
Checks of a tree (llmc/data/tree.h) against the texts of its batch: paths spell the texts, a row has the texts that the
texts' pieces name, chains and forks have the order that a pass relies on.
*/
#ifndef TEST_TREE_CHECKS_H
#define TEST_TREE_CHECKS_H
#include "test/base/testing.h"
#include "llmc/data/tree.h"

// Returns the chain that begins at a row; SIZE_MAX: none does.
static size_t chain_at(const Tree *t, size_t row) {
    for (size_t c = 0; c < t->rows.documents; c++)
        if (t->rows.document_start[c] == row) return c;
    return SIZE_MAX;
}

// Checks the pieces of text d, and counts the text on its rows.
static void expect_path(const Batch *b, size_t d, int32_t *times) {
    const Tree *t = b->tree;
    size_t at = b->document_start[d], before = SIZE_MAX, end = 0, most = 0;
    while (b->documents >> (most + 1)) most++; // floor of log2
    const size_t first = t->first_piece[d], last = t->first_piece[d + 1];
    if (last - first > most + 1) test_fail("text %zu of %zu has %zu pieces", d, b->documents, last - first);
    for (size_t p = first; p < last; p++) {
        const Range piece = t->piece[p];
        const size_t c = chain_at(t, piece.begin);
        if (c == SIZE_MAX || t->parent[c] != before) test_fail("piece %zu of text %zu does not begin a chain", p, d);
        if (p > first && t->fork[c] != end) test_fail("text %zu leaves chain %zu at %zu", d, before, t->fork[c]);
        if (t->rows.depth[c] != at - b->document_start[d]) test_fail("depth of chain %zu", c);
        for (size_t row = piece.begin; row < piece.begin + piece.count; row++, at++) {
            const int32_t target = t->rows.targets[row];
            times[row]++;
            if (t->rows.tokens[row] != b->tokens[at]) test_fail("text %zu: token of row %zu", d, row);
            if (t->rows.position[row] != b->position[at]) test_fail("text %zu: position of row %zu", d, row);
            if (b->targets[at] >= 0 && target != b->targets[at]) test_fail("text %zu: target of row %zu", d, row);
        }
        before = c, end = piece.begin + piece.count;
    }
    assert_int_equal(at, b->document_start[d + 1]);
}

// Tells whether chain c hangs below a fork.
static int hangs_below(const Tree *t, size_t c, size_t fork) {
    for (; t->parent[c] != SIZE_MAX; c = t->parent[c])
        if (t->fork[c] == fork) return 1;
    return 0;
}

// Checks that what hangs below a fork is contiguous, and that the fork gains `least` rows over the one above.
static void expect_fork(const Tree *t, size_t f, size_t least) {
    const size_t row = t->fork_row[f];
    size_t begin = SIZE_MAX, end = 0, rows = 0, chain = 0, above = 0;
    for (size_t c = 0; c < t->rows.documents; c++) {
        const size_t first = t->rows.document_start[c], next = t->rows.document_start[c + 1];
        if (t->parent[c] != SIZE_MAX && t->fork[c] == row) chain = t->parent[c];
        if (!hangs_below(t, c, row)) continue;
        begin = min_size(begin, first), end = max_size(end, next), rows += next - first;
    }
    if (!rows || end - begin != rows) test_fail("rows below fork %zu are not contiguous", row);
    const size_t start = t->rows.document_start[chain], depth = t->rows.depth[chain] + row - start;
    if (row <= start || row >= t->rows.document_start[chain + 1]) test_fail("fork %zu is not within its chain", row);
    if (begin < t->rows.document_start[chain + 1]) test_fail("fork %zu: branches lie before their chain's end", row);
    if (t->parent[chain] != SIZE_MAX) above = t->rows.depth[chain];
    for (size_t g = 0; g < f; g++)
        if (t->fork_row[g] > start) above = t->rows.depth[chain] + t->fork_row[g] - start;
    if (depth - above < least) test_fail("fork %zu gains %zu rows", row, depth - above);
}

// Checks a batch's tree. least: rows that each fork gains
static void expect_tree(const Batch *b, size_t least) {
    const Tree *t = b->tree;
    int32_t *times = (int32_t *)case_memory(t->rows.N * sizeof(int32_t));
    char *trained = (char *)case_memory(t->rows.N), *forks = (char *)case_memory(t->rows.N + 1);
    size_t sum = 0, distinct = 0;
    assert_true(t->rows.N < b->N && t->rows.document_start[0] == 0);
    assert_int_equal(t->rows.document_start[t->rows.documents], t->rows.N);
    for (size_t d = 0; d < b->documents; d++) expect_path(b, d, times);
    for (size_t d = 0; d < b->documents; d++)
        for (size_t p = t->first_piece[d], at = b->document_start[d]; p < t->first_piece[d + 1]; p++)
            for (size_t i = 0; i < t->piece[p].count; i++, at++) trained[t->piece[p].begin + i] |= b->targets[at] >= 0;
    for (size_t row = 0; row < t->rows.N; row++) {
        sum += (size_t)times[row];
        if (!times[row] || times[row] != t->times[row]) test_fail("row %zu has %d texts", row, t->times[row]);
        if ((t->rows.targets[row] >= 0) != trained[row]) test_fail("row %zu: target %d", row, t->rows.targets[row]);
    }
    assert_int_equal(sum, b->N);
    for (size_t c = 0; c < t->rows.documents; c++)
        if (t->parent[c] != SIZE_MAX) distinct += !forks[t->fork[c]], forks[t->fork[c]] = 1;
    assert_int_equal(distinct, t->forks);
    for (size_t f = 0; f < t->forks; f++) {
        if (!forks[t->fork_row[f]] || (f && t->fork_row[f] <= t->fork_row[f - 1])) test_fail("fork %zu", f);
        expect_fork(t, f, least);
    }
}

#endif
