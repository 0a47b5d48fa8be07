/*
Trees: documents that begin alike are computed once, exactly.

A row is what the model computes: an input token with its target, at a position. Documents share a row if they agree up
to its position, in the input token and in the target: p common tokens give p - 1 common rows. The last common token is
computed once for each branch, so a row has one target. A batch stays as it is, documents next to each other; in this
file these are the texts. batch->tree adds the rows and the way from texts to rows:

    log-probability of text position v = log-probability of its row
    weight of row r                    = sum of the weights of the text positions on row r

so every loss of the documents' log-probabilities stays exact (stream/sequence.h).

Rows lie in depth-first order. A chain is a run of rows of growing position: what a document is in a batch without a
tree. A branch begins a chain where documents differ, the fork. The heaviest branch, with the most documents below it,
continues its chain instead. So a document's rows lie on at most 1 + log2(documents) chains. All rows of the branches of
a fork, and of their branches, are contiguous and follow the chain that they leave.

    documents      a b c d e    a b c x y    a b c d z      rows: the pairs ab, bc, ...
    rows           0 ab  1 bc  2 cd  3 de | 4 dz | 5 cx  6 xy
    chains         0: rows 0-3, a root; 1: row 4, parent 0, fork 3, depth 3; 2: rows 5-6, parent 0, fork 2, depth 2
*/
#ifndef LLMC_TREE_H
#define LLMC_TREE_H
#include "batch.h"
#include "llmc/ranks/world.h"

enum { PREFIX_LEAST = 64 }; // fewest rows that a fork must gain: below it, a further call costs more than the rows

// A node of the trie of documents, for tree_build: rows at positions [from, to) of `text`. Node 0 is the empty prefix.
typedef struct {
    size_t text, from, to;
    size_t parent, child, next; // indices; child: the first child, next: the next sibling. 0: none
    size_t documents;           // documents that end at this node or below it
    size_t row, chain;          // of the node's first row
} TreeNode;

struct Tree {
    Batch rows;     // what the model computes. N: rows. tokens, position [N]. targets [N]: the target if any document
                    // trains it, else -1. documents: chains. document_start [chains + 1]: their rows. depth [chains]:
                    // position of a chain's first row. loss_weight and all fields for answers are NULL
    size_t *parent; // [chains] the chain that it leaves; SIZE_MAX: a root
    size_t *fork;   // [chains] the chain sees rows [start of parent, fork) of its parent; a root: 0
    size_t *fork_row, forks; // the distinct `fork`s of all chains that have a parent, ascending. A fork lies within
                             // its chain: after the chain's first row, at most at its last
    size_t *first_piece;     // [texts + 1] index of a text's first piece
    Range *piece;            // rows of a text, in order of positions; pieces lie on different chains
    size_t *source;          // [N] first text position on the row
    int32_t *times;          // [N] texts that have the row, at least 1
    size_t most_rows, most_texts; // bounds of the memory
    // for the caller of tree_build, if it needs memory for `order` and `common`
    size_t *order, *common; // [texts]
    // scratch of tree_build
    TreeNode *node;      // [nodes]
    size_t *end;         // [texts] node at whose end a text ends
    size_t *walk, nodes; // [nodes] nodes in depth-first order
};

// ---- memory ---------------------------------------------------------------------------------------------------------
// Returns the most pieces of `texts` texts.
static size_t tree_most_pieces(size_t texts) {
    size_t chains = 1;
    while (texts >> chains) chains++;
    return texts * chains;
}

// Returns the bytes of a tree of at most `rows` rows and `texts` texts.
static size_t tree_bytes(size_t rows, size_t texts) {
    const size_t nodes = 2 * texts + 1, words = 9 * texts + 2 + nodes + rows;
    return sizeof(Tree) + nodes * sizeof(TreeNode) + tree_most_pieces(texts) * sizeof(Range) + words * sizeof(size_t) +
           4 * rows * sizeof(int32_t);
}

// Places a tree at memory[tree_bytes].
static Tree *tree_place(char *memory, size_t rows, size_t texts) {
    const size_t pieces = tree_most_pieces(texts), nodes = 2 * texts + 1;
    Tree *tree = (Tree *)(void *)memory;
    memset(tree, 0, sizeof(*tree));
    tree->most_rows = rows, tree->most_texts = texts;
    tree->node = (TreeNode *)(void *)(memory + sizeof(Tree));
    tree->piece = (Range *)(void *)(tree->node + nodes);
    tree->rows.document_start = (size_t *)(void *)(tree->piece + pieces);
    tree->rows.depth = tree->rows.document_start + texts + 1;
    tree->parent = tree->rows.depth + texts, tree->fork = tree->parent + texts, tree->fork_row = tree->fork + texts;
    tree->first_piece = tree->fork_row + texts, tree->end = tree->first_piece + texts + 1;
    tree->order = tree->end + texts, tree->common = tree->order + texts;
    tree->walk = tree->common + texts, tree->source = tree->walk + nodes;
    tree->rows.tokens = (int32_t *)(void *)(tree->source + rows);
    tree->rows.targets = tree->rows.tokens + rows, tree->rows.position = tree->rows.targets + rows;
    tree->times = tree->rows.position + rows;
    return tree;
}

// Returns memory for a tree of at most `rows` rows and `texts` texts, in one allocation that free() returns.
static Tree *tree_allocate(size_t rows, size_t texts) {
    return tree_place((char *)checked_calloc(1, tree_bytes(rows, texts), "the tree of a batch"), rows, texts);
}

// Gives a batch memory for trees of its documents. Call after batch_allocate.
static void batch_allocate_tree(Batch *batch, size_t rows) { batch->room = tree_allocate(rows, batch->documents); }

// ---- the trie -------------------------------------------------------------------------------------------------------
static size_t text_length(const Batch *texts, size_t d) {
    return texts->document_start[d + 1] - texts->document_start[d];
}

static int tree_has_branches(const Tree *tree, size_t n) {
    return tree->node[n].child && tree->node[tree->node[n].child].next;
}

// Adds a node in front of its parent's other children.
static size_t tree_add(Tree *tree, size_t parent, size_t text, size_t from, size_t to) {
    const TreeNode node = {text, from, to, parent, 0, tree->node[parent].child, 0, 0, 0};
    tree->node[tree->nodes] = node;
    return tree->node[parent].child = tree->nodes++;
}

// Splits node n, the first child of its parent, at position `at`. Returns the new node of its first part.
static size_t tree_split(Tree *tree, size_t n, size_t at) {
    TreeNode *const old = &tree->node[n];
    const size_t first = tree->nodes++;
    const TreeNode node = {old->text, old->from, at, old->parent, n, old->next, 0, 0, 0};
    tree->node[first] = node, tree->node[old->parent].child = first;
    old->from = at, old->parent = first, old->next = 0;
    return first;
}

// Adds text d. Its first `common` rows are those of the text added before, which ended at node `last`.
static void tree_insert(Tree *tree, const Batch *texts, size_t d, size_t last, size_t common) {
    const size_t length = text_length(texts, d);
    common = min_size(min_size(common, length), tree->node[last].to);
    while (last && tree->node[last].from >= common) last = tree->node[last].parent;
    if (tree->node[last].to > common) last = tree_split(tree, last, common);
    tree->end[d] = length > common ? tree_add(tree, last, d, common, length) : last;
}

// Returns the node after n in depth-first order; 0 at the end.
static size_t tree_next(const Tree *tree, size_t n) {
    if (tree->node[n].child) return tree->node[n].child;
    while (n && !tree->node[n].next) n = tree->node[n].parent;
    return tree->node[n].next;
}

// Moves the child with the most documents in front; of equals the first.
static void tree_heaviest_first(Tree *tree, size_t n) {
    size_t heaviest = tree->node[n].child, before = 0;
    if (!tree_has_branches(tree, n)) return;
    for (size_t c = heaviest; tree->node[c].next; c = tree->node[c].next)
        if (tree->node[tree->node[c].next].documents > tree->node[heaviest].documents)
            before = c, heaviest = tree->node[c].next;
    if (!before) return;
    tree->node[before].next = tree->node[heaviest].next;
    tree->node[heaviest].next = tree->node[n].child, tree->node[n].child = heaviest;
}

// Counts the documents of each node; puts the heaviest branch of each fork first.
static void tree_weigh(Tree *tree, size_t texts) {
    size_t count = 0;
    for (size_t n = 0; n < tree->nodes; n++) tree->node[n].documents = 0;
    for (size_t d = 0; d < texts; d++) tree->node[tree->end[d]].documents++;
    for (size_t n = tree_next(tree, 0); n; n = tree_next(tree, n)) tree->walk[count++] = n;
    for (size_t i = count; i-- > 0;) {
        tree->node[tree->node[tree->walk[i]].parent].documents += tree->node[tree->walk[i]].documents;
        tree_heaviest_first(tree, tree->walk[i]);
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------
static size_t node_end(const TreeNode *node) { return node->row + node->to - node->from; }

// Lays out a node's rows; a node that does not continue its parent's chain begins a chain.
static void tree_lay(Tree *tree, const Batch *texts, size_t n) {
    TreeNode *const node = &tree->node[n], *const parent = &tree->node[node->parent];
    Batch *const rows = &tree->rows;
    const size_t start = texts->document_start[node->text];
    node->row = rows->N, node->chain = parent->chain;
    if (!node->parent || parent->child != n) {
        node->chain = rows->documents++;
        rows->document_start[node->chain] = node->row, rows->depth[node->chain] = node->from;
        tree->parent[node->chain] = node->parent ? parent->chain : SIZE_MAX;
        tree->fork[node->chain] = node->parent ? node_end(parent) : 0;
    }
    if (node_end(node) > tree->most_rows)
        die("internal: a tree of more than %zu rows, which it was set up for; please report it", tree->most_rows);
    if (tree_has_branches(tree, n)) tree->fork_row[tree->forks++] = node_end(node);
    for (size_t t = node->from; t < node->to; t++, rows->N++) {
        rows->tokens[rows->N] = texts->tokens[start + t], rows->targets[rows->N] = -1;
        rows->position[rows->N] = (int32_t)t, tree->times[rows->N] = 0;
    }
}

// Adds text d to a piece of its rows. begin: the text position of the piece's first row
static void piece_count(Tree *tree, const Batch *texts, Range piece, size_t begin) {
    for (size_t i = 0; i < piece.count; i++) {
        const size_t row = piece.begin + i, t = begin + i;
        int32_t *target = &tree->rows.targets[row];
        if (tree->rows.tokens[row] != texts->tokens[t] ||
            (*target >= 0 && texts->targets[t] >= 0 && *target != texts->targets[t]))
            die("internal: documents of a batch share a row that differs; please report it");
        if (!tree->times[row]++) tree->source[row] = t;
        if (texts->targets[t] >= 0) *target = texts->targets[t];
    }
}

// Makes the pieces of text d: the chains from its end up to a root, in reverse.
static void tree_trace(Tree *tree, const Batch *texts, size_t d) {
    Range *const piece = tree->piece + tree->first_piece[d];
    size_t count = 0, t = texts->document_start[d];
    if (tree->end[d]) {
        const TreeNode *last = &tree->node[tree->end[d]];
        size_t end = node_end(last);
        for (size_t c = last->chain; c != SIZE_MAX; end = tree->fork[c], c = tree->parent[c]) {
            const Range found = {tree->rows.document_start[c], end - tree->rows.document_start[c]};
            memmove(piece + 1, piece, count++ * sizeof(*piece));
            piece[0] = found;
        }
    }
    tree->first_piece[d + 1] = tree->first_piece[d] + count;
    for (size_t i = 0; i < count; t += piece[i++].count) piece_count(tree, texts, piece[i], t);
}

// Builds the tree of a batch's documents in `tree`. order: the documents, so that documents that share are neighbours.
// common[i]: leading rows (equal input and target) that order[i] shares with order[i - 1]; common[0] is not read.
// A document that ends within another has no branch; equal documents share all rows.
// Returns `tree`, for texts->tree; NULL if no row is shared: then the batch is computed as it is.
static Tree *tree_build(Tree *tree, const Batch *texts, const size_t *order, const size_t *common) {
    const TreeNode root = {0};
    Batch *const rows = &tree->rows;
    if (texts->documents > tree->most_texts)
        die("internal: a tree of %zu documents, but it was set up for %zu; please report it", texts->documents,
            tree->most_texts);
    tree->node[0] = root, tree->nodes = 1;
    for (size_t i = texts->documents; i-- > 0;) // backwards, as each node is added in front of its siblings
        tree_insert(tree, texts, order[i], i + 1 < texts->documents ? tree->end[order[i + 1]] : 0,
                    i + 1 < texts->documents ? common[i + 1] : 0);
    tree_weigh(tree, texts->documents);
    rows->N = rows->documents = tree->forks = 0, rows->first = texts->first, rows->empty = texts->empty;
    for (size_t n = tree_next(tree, 0); n; n = tree_next(tree, n)) tree_lay(tree, texts, n);
    rows->document_start[rows->documents] = rows->N;
    tree->first_piece[0] = 0;
    for (size_t d = 0; d < texts->documents; d++) tree_trace(tree, texts, d);
    return rows->N < texts->N ? tree : NULL;
}

// Builds the tree of documents that all begin with the same `tokens` tokens. Returns NULL if they share no row.
static Tree *tree_of_prefix(const Batch *texts, size_t tokens) {
    Tree *const tree = texts->room;
    for (size_t d = 0; d < texts->documents; d++) tree->order[d] = d, tree->common[d] = tokens ? tokens - 1 : 0;
    return tree_build(tree, texts, tree->order, tree->common);
}

// ---- what the model computes ----------------------------------------------------------------------------------------
// Returns a batch's rows: its tree's, or the batch itself.
static const Batch *batch_rows(const Batch *batch) { return batch->tree ? &batch->tree->rows : batch; }

// Returns how many tokens the model computes.
static double batch_computed(const Batch *batch) { return batch->empty ? 0 : (double)batch_rows(batch)->N; }

// Text positions [text, text + n) lie on rows [row, row + n).
typedef struct {
    size_t text, row, n;
} TextPart;

enum { TEXT_PARTS = 64 }; // most parts of a text: 1 + log2(documents)

// Finds the parts of text d on rows of a range, in order. Returns their number.
static size_t text_parts(const Batch *texts, size_t d, Range rows, TextPart part[TEXT_PARTS]) {
    const Tree *tree = texts->tree;
    const Range whole = {texts->document_start[d], text_length(texts, d)};
    const Range *piece = tree ? tree->piece + tree->first_piece[d] : &whole;
    size_t text = texts->document_start[d], count = 0;
    for (size_t i = tree ? tree->first_piece[d + 1] - tree->first_piece[d] : 1; i > 0; i--, text += piece++->count) {
        const size_t begin = max_size(piece->begin, rows.begin);
        const size_t end = min_size(piece->begin + piece->count, rows.begin + rows.count);
        const TextPart found = {text + begin - piece->begin, begin, end - begin};
        if (begin < end) part[count++] = found;
    }
    return count;
}

#endif
