/*
Memory of linear attention: in place of keys and values the current document's state, which passes from chunk to chunk.
The state is S [HV,DK,DV] of the delta rule and the last taps - 1 inputs of the convolution.

Backward visits the chunks last to first and needs the state before each chunk. A first walk over the layer saves the
state at intervals of at least STATE_INTERVAL tokens. At the last chunk of an interval, backward recomputes the states
within the interval: before every chunk if it has at most STATE_FAN chunks, else at smaller intervals, and so on. Memory
is N / STATE_INTERVAL states, and at most STATE_FAN - 1 states for each level below, for any chunk size. As with K and
V, the states of one layer exist at a time.

    level        0                        1                  ...   last
    every        STATE_INTERVAL tokens    1/STATE_FAN of it        chunk

In a tree (llmc/data/tree.h) a state passes along a chain, and from a fork into each branch. Chunks are cut into pieces
where a fork lies or a branch begins. The state at each fork is saved until the layer is done: branches come after the
whole chain. In backward a fork's state also collects the gradients of its branches' first states. Every chunk before
the current one has been walked, so backward finds the states at forks, too.
*/
#ifndef LLMC_LINEAR_MEMORY_H
#define LLMC_LINEAR_MEMORY_H
#include "attention_memory.h"

enum { STATE_INTERVAL = 1024, STATE_FAN = 16 };

// ---- which chunks have a state -------------------------------------------------------------------------------------
// Returns the chunks (of `chunk` tokens) from one state of a level to the next.
static size_t state_spacing(size_t chunk, size_t level) {
    size_t spacing = (STATE_INTERVAL + chunk - 1) / chunk;
    for (; level > 0; level--) spacing = (spacing + STATE_FAN - 1) / STATE_FAN;
    return spacing;
}

// Returns the number of live states of a level. Level 0 has one state per interval. A level below has the states within
// one interval of the level above, which holds the first of them.
static size_t states_of_level(size_t chunk, size_t level, size_t chunks) {
    if (!chunks) return 0;
    if (!level) return (chunks - 1) / state_spacing(chunk, 0) + 1;
    return (min_size(state_spacing(chunk, level - 1), chunks) - 1) / state_spacing(chunk, level);
}

static size_t states_kept(size_t chunk, size_t chunks) {
    size_t count = 0;
    for (size_t level = 0;; level++) {
        count += states_of_level(chunk, level, chunks);
        if (state_spacing(chunk, level) == 1) return count;
    }
}

// Returns the slot of the state before chunk `index` of a range: on the highest level that holds it.
static size_t state_slot(size_t chunk, size_t index, size_t chunks) {
    size_t first = 0, level = 0;
    for (; index % state_spacing(chunk, level); level++) {
        first += states_of_level(chunk, level, chunks);
        index %= state_spacing(chunk, level);
    }
    return first + index / state_spacing(chunk, level) - (level > 0);
}

// Returns how many chunk visits compute the states of `chunks` chunks, on this level and all levels below.
static size_t chunks_visited_again(size_t chunk, size_t level, size_t chunks) {
    const size_t spacing = state_spacing(chunk, level);
    if (!chunks) return 0;
    const size_t here = (chunks - 1) / spacing * spacing;
    if (spacing == 1) return here;
    return here + chunks / spacing * chunks_visited_again(chunk, level + 1, spacing) +
           chunks_visited_again(chunk, level + 1, chunks % spacing);
}

// Returns how many of these chunk visits fall on the levels below level 0.
static size_t chunks_visited_below(size_t chunk, size_t chunks) {
    const size_t spacing = state_spacing(chunk, 0);
    return chunks ? chunks_visited_again(chunk, 0, chunks) - (chunks - 1) / spacing * spacing : 0;
}

// Returns the number of chunks of a range; the dry run, too, counts all of them.
static size_t chunks_of_range(const StreamBP *s, size_t half) {
    return (s->now.own[half].count + layer_chunk(s) - 1) / layer_chunk(s);
}

// ---- room -----------------------------------------------------------------------------------------------------------
// Pushes the states of `layers` layers of linear attention, of `slots` documents each.
static void push_states(StreamBP *s, size_t layers, size_t slots, size_t slot_tokens) {
    const Shapes d = shapes_of(s->model);
    const LinearMemory none = {0};
    s->linear = none;
    s->linear.layers = layers, s->linear.slots = slots, s->linear.slot_tokens = slot_tokens;
    s->linear.state = push_summed(s, SHARE_KV, "states of linear attention", layers * slots * d.linear.S);
    s->linear.columns =
        push_stored(s, SHARE_KV, "inputs before a chunk's convolution", layers * slots * d.linear.columns);
}

// Pushes the state's memory for backward: the gradient of the current state; with `states` the states at intervals.
static void push_state_gradients(StreamBP *s, int states) {
    const Shapes d = shapes_of(s->model);
    const size_t half = states_kept(layer_chunk(s), chunks_of_range(s, 0)),
                 kept = half + states_kept(layer_chunk(s), chunks_of_range(s, 1));
    s->linear.dstate = push_summed(s, SHARE_KV, "gradient of the state", d.linear.S);
    s->linear.dcolumns = push_summed(s, SHARE_KV, "gradient of the convolution's earlier inputs", d.linear.columns);
    s->linear.kept_half = half;
    if (!states) return;
    s->linear.kept = push_summed(s, SHARE_KV, "states at intervals", kept * d.linear.S);
    s->linear.kept_columns = push_stored(s, SHARE_KV, "the convolution's inputs at intervals", kept * d.linear.columns);
}

static size_t fork_count(const StreamBP *s) { return s->now.tree ? s->now.tree->forks : 0; }

// Pushes the states at forks of one layer, if `states`, and in backward their gradients, set to 0.
static void push_fork_states(StreamBP *s, int states) {
    const Shapes d = shapes_of(s->model);
    const size_t forks = fork_count(s);
    if (!forks) return;
    if (states) {
        s->linear.fork = push_summed(s, SHARE_KV, "states at forks", forks * d.linear.S);
        s->linear.fork_columns =
            push_stored(s, SHARE_KV, "the convolution's inputs at forks", forks * d.linear.columns);
    }
    if (s->now.pass != PASS_BACKWARD) return;
    s->linear.dfork = push_summed(s, SHARE_KV, "gradients of states at forks", forks * d.linear.S);
    s->linear.dfork_columns =
        push_summed(s, SHARE_KV, "gradients of the convolution's inputs at forks", forks * d.linear.columns);
    s->ops->zero(s->linear.dfork, forks * d.linear.S * d.summed);
    s->ops->zero(s->linear.dfork_columns, forks * d.linear.columns * d.summed);
}

// Pushes the states before the rank's ranges, and T of the ranges (scan.h), of `layers` layers, for shared sequences.
static void push_range_states(StreamBP *s, size_t layers) {
    const Shapes d = shapes_of(s->model);
    const size_t ranges = 2 * layers;
    if (s->now.ranks == 1 || !layers) return;
    s->ranges.layers = layers;
    s->ranges.before = push_summed(s, SHARE_KV, "states before a rank's tokens", ranges * d.linear.S);
    s->ranges.transition =
        push_summed(s, SHARE_KV, "transfers by a rank's tokens", ranges * d.linear.HV * d.linear.DK * d.linear.DK);
    s->ranges.columns =
        push_stored(s, SHARE_KV, "convolution's inputs before a rank's tokens", ranges * d.linear.columns);
}

// ---- the current state ---------------------------------------------------------------------------------------------
// Returns the number of layer l among the layers whose states are stored.
static size_t linear_layer(const StreamBP *s, size_t l) { return s->linear.layers > 1 ? layer_of(s, l)->state : 0; }

static Summed *layer_state(const StreamBP *s, size_t l) {
    return summed_row(s, s->linear.state, linear_layer(s, l) * s->linear.slots, shapes_of(s->model).linear.S);
}

static Stored *layer_columns(const StreamBP *s, size_t l) {
    return stored_row(s, s->linear.columns, linear_layer(s, l) * s->linear.slots, shapes_of(s->model).linear.columns);
}

// Returns the delta rule's shape for chunk c, or a piece of it. It is valid until the next make_spans. A branch's rows
// continue a document that began as many tokens before as their position says.
static DeltaShape delta_shape(const StreamBP *s, Chunk c, LinearShape d) {
    const DeltaShape shape = {make_spans(s, c, 0, 0),
                              d.HK,
                              d.HV,
                              d.DK,
                              d.DV,
                              d.taps,
                              d.E,
                              s->linear.slot_tokens,
                              s->model->config.linear_allow_neg_eigval};
    if (s->now.tree && shape.spans.count)
        s->now.span[0].document -= s->now.batch->depth[document_of(s->now.batch, c.token)];
    return shape;
}

// ---- states at intervals -------------------------------------------------------------------------------------------
// A saved state: the state before a chunk
typedef struct {
    Summed *state;
    Stored *columns;
} KeptState;

// Returns the saved state before the index-th chunk of a range.
static KeptState kept_state(const StreamBP *s, size_t half, size_t index) {
    const Shapes d = shapes_of(s->model);
    const size_t slot = s->linear.one_state
                            ? 0
                            : half * s->linear.kept_half + state_slot(layer_chunk(s), index, chunks_of_range(s, half));
    const KeptState kept = {summed_row(s, s->linear.kept, slot, d.linear.S),
                            stored_row(s, s->linear.kept_columns, slot, d.linear.columns)};
    return kept;
}

// Returns the saved state before chunk c.
static KeptState state_before(const StreamBP *s, Chunk c) {
    const size_t half = own_half(s, c.token);
    return kept_state(s, half, visits_shapes(s) ? 0 : c.index - (half ? range_chunks(s, 0, layer_chunk(s)) : 0));
}

// Saves the current state to `kept` (keep = 1), or restores it from `kept`.
static void state_copy(const StreamBP *s, KeptState kept, int keep) {
    const Shapes d = shapes_of(s->model);
    void *state[2] = {s->linear.state, kept.state}, *columns[2] = {s->linear.columns, kept.columns};
    s->ops->copy(state[keep], state[!keep], d.linear.S * d.summed);
    if (d.linear.columns) s->ops->copy(columns[keep], columns[!keep], d.linear.columns * d.stored);
}

// ---- states at forks ------------------------------------------------------------------------------------------------
// Rows of a chunk through which one state passes, and that begin at a branch or after a fork. Roots within them begin
// anew. Without forks: the whole chunk
typedef struct {
    Chunk c;
    size_t skipped;      // rows of the chunk before it
    size_t before, fork; // indices of the forks with the state before its first row, and after its last row; SIZE_MAX:
                         // the state passes on
    int branches;        // 1: a branch begins; `before` is its fork
} StatePiece;

// Returns the index of the fork before row `row`; SIZE_MAX: there is none.
static size_t fork_index(const StreamBP *s, size_t row) {
    const Tree *tree = s->now.tree;
    const size_t i = last_at_most(tree->fork_row, sizeof(size_t), tree->forks, row);
    return tree->fork_row[i] == row ? i : SIZE_MAX;
}

// Returns the piece of chunk c that contains `token`. The dry run that visits one chunk for many cuts none.
static StatePiece piece_at(const StreamBP *s, Chunk c, size_t token) {
    StatePiece p = {c, 0, SIZE_MAX, SIZE_MAX, 0};
    const Tree *tree = s->now.tree;
    if (!has_forks(s) || visits_shapes(s)) return p;
    const size_t *start = s->now.batch->document_start, chains = s->now.batch->documents;
    const size_t near = last_at_most(tree->fork_row, sizeof(size_t), tree->forks, token);
    size_t first = document_of(s->now.batch, token), next = first + 1;
    const size_t forked = tree->fork_row[near] <= token ? near + 1 : near; // the first fork after `token`
    while (first > 0 && tree->parent[first] == SIZE_MAX) first--;
    while (next < chains && tree->parent[next] == SIZE_MAX) next++;
    size_t begin = max_size(c.token, tree->parent[first] == SIZE_MAX ? 0 : start[first]);
    size_t end = min_size(c.token + c.n, next < chains ? start[next] : SIZE_MAX);
    if (tree->fork_row[near] <= token) begin = max_size(begin, tree->fork_row[near]);
    if (forked < tree->forks) end = min_size(end, tree->fork_row[forked]);
    p.skipped = begin - c.token, p.c.token = begin, p.c.row += p.skipped, p.c.n = end - begin;
    p.branches = begin == start[first] && tree->parent[first] != SIZE_MAX;
    p.before = fork_index(s, p.branches ? tree->fork[first] : begin), p.fork = fork_index(s, end);
    return p;
}

// Returns the first piece of a chunk, and the piece after p; c.n = 0: there is none.
static StatePiece first_piece(const StreamBP *s, Chunk c) { return piece_at(s, c, c.token); }

static StatePiece piece_after(const StreamBP *s, Chunk c, StatePiece p) {
    const size_t end = p.c.token + p.c.n;
    if (end < c.token + c.n) return piece_at(s, c, end);
    p.c.n = 0;
    return p;
}

// Returns the state at a fork.
static KeptState fork_state(const StreamBP *s, size_t fork) {
    const Shapes d = shapes_of(s->model);
    const KeptState kept = {summed_row(s, s->linear.fork, fork, d.linear.S),
                            stored_row(s, s->linear.fork_columns, fork, d.linear.columns)};
    return kept;
}

// Adds to the current state's gradient at the end of a piece: the branches' part, if the piece ends at a fork.
static void fork_gradient_take(const StreamBP *s, StatePiece p) {
    const Shapes d = shapes_of(s->model);
    const DType type = dtype_of_sums(s->model->dtype);
    const LinearMemory *m = &s->linear;
    if (p.fork == SIZE_MAX) return;
    s->ops->gradient_add(m->dstate, type, summed_row(s, m->dfork, p.fork, d.linear.S), d.linear.S);
    if (d.linear.columns)
        s->ops->gradient_add(m->dcolumns, type, summed_row(s, m->dfork_columns, p.fork, d.linear.columns),
                             d.linear.columns);
}

// Hands the current state's gradient at the start of a branch to its fork; the row before belongs to another chain.
static void fork_gradient_give(const StreamBP *s, StatePiece p) {
    const Shapes d = shapes_of(s->model);
    const DType type = dtype_of_sums(s->model->dtype);
    const LinearMemory *m = &s->linear;
    if (!p.branches) return;
    s->ops->gradient_add(summed_row(s, m->dfork, p.before, d.linear.S), type, m->dstate, d.linear.S);
    s->ops->zero(m->dstate, d.linear.S * d.summed);
    if (!d.linear.columns) return;
    s->ops->gradient_add(summed_row(s, m->dfork_columns, p.before, d.linear.columns), type, m->dcolumns,
                         d.linear.columns);
    s->ops->zero(m->dcolumns, d.linear.columns * d.summed);
}

#endif
