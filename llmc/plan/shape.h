/*
Shapes: batches without tokens, all that a plan needs. A shape has positions and documents; if documents share prefixes,
also a tree with rows, chains and forks (llmc/data/tree.h), but no pieces.
*/
#ifndef LLMC_SHAPE_H
#define LLMC_SHAPE_H
#include "llmc/data/tree.h"

// Returns the rows of B documents of T tokens that all begin with the same `shared` tokens: all but the last of them
// are common rows.
static size_t rows_of_shared(size_t B, size_t T, size_t shared) {
    const size_t common = max_size(min_size(shared, T), 1) - 1;
    return common + B * (T - common);
}

// Adds a chain of n rows at a depth. parent, fork: see Tree
static void shape_add_chain(Tree *tree, size_t n, size_t depth, size_t parent, size_t fork) {
    Batch *const rows = &tree->rows;
    const size_t c = rows->documents++;
    rows->document_start[c + 1] = rows->document_start[c] + n, rows->depth[c] = depth;
    tree->parent[c] = parent, tree->fork[c] = fork;
}

// Adds forks without branches, so that the tree has `forks`. They count as memory of states.
static void shape_add_forks(Tree *tree, size_t forks) {
    size_t real = tree->forks;
    const size_t more = forks - real, rows = tree->rows.N;
    for (size_t i = forks, j = more; i-- > 0;) // merges ascending rows, last to first
        if (j && (!real || tree->fork_row[real - 1] <= j * rows / (more + 1)))
            tree->fork_row[i] = j * rows / (more + 1), j--;
        else
            tree->fork_row[i] = tree->fork_row[--real];
    tree->forks = forks;
}

// Gives the shape a tree of `rows` rows and `forks` forks in its room, as if every document had the `longest` length:
// as many roots as fit, of equal length, each with a fork and branches of equal length. Without forks chains of the
// longest length. The shape has at least 2 documents a fork.
static void shape_share(Batch *shape, size_t rows, size_t forks, size_t longest) {
    Tree *const tree = shape->tree = shape->room;
    const size_t roots = forks ? max_size(min_size(forks, rows / longest), 1) : 0;
    const size_t wanted = shape->documents * roots / max_size(forks, 1), most = rows - min_size(roots, rows);
    const size_t chains = max_size(min_size(wanted, most), 2 * roots), all = chains * longest;
    const size_t room = roots ? (rows - min_size(chains, rows)) / roots : 0; // most rows of a root
    const size_t fits = roots && all > rows ? (all - rows) / (chains - roots) : 0;
    const size_t common = max_size(min_size(fits, room), 1), left = rows - roots * common;
    tree->rows.N = rows, tree->rows.documents = tree->forks = 0;
    for (size_t row = 0; !roots && row < rows; row += longest)
        shape_add_chain(tree, min_size(longest, rows - row), 0, SIZE_MAX, 0);
    for (size_t g = 0; g < roots; g++) {
        const size_t root = tree->rows.documents, end = chains * (g + 1) / roots;
        const size_t fork = tree->fork_row[tree->forks++] = tree->rows.document_start[root] + common;
        for (size_t c = root; c < end; c++) {
            const size_t own = left * (c + 1) / chains - left * c / chains;
            shape_add_chain(tree, c == root ? common + own : own, c == root ? 0 : common, c == root ? SIZE_MAX : root,
                            c == root ? 0 : fork);
        }
    }
    shape_add_forks(tree, forks);
}

#endif
