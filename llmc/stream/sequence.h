/*
The sequence: its chunks, and its copies between host and device.

A chunk is a range of consecutive tokens, passed by value. Loops visit chunks by index, visit(s, chunk_at(s, i)) for i <
chunk_count(s), and layers by for (Visit v = first_layer(s); v.layer; next_layer(&v)). The dry run visits one chunk of
each length and one layer of each kind (walk.h). make_spans gives attention the documents' parts of a chunk.

Tokens, targets and their weights are copied to the device, log-probabilities and entropies to the host. An objective
needs the values of the whole sequence: ranks that share it copy their own tokens' values and all-gather them on the
host.

Documents that share prefixes (llmc/data/tree.h) are computed as the rows of their tree, s->now.batch; its documents are
chains. An objective sees s->now.texts, the documents: log-probabilities and entropies are spread from rows to texts,
weights are added from texts to rows.
*/
#ifndef LLMC_SEQUENCE_H
#define LLMC_SEQUENCE_H
#include "routes.h"

// ---- the rows of a rank ---------------------------------------------------------------------------------------------
// Returns this rank's number among the ranks that share the sequence; in the dry run a rank that owns the most tokens.
static size_t sequence_rank(const StreamBP *s) {
    if (s->now.ranks == 1) return 0;
    return s->memory.walk.dry ? sequence_largest_rank(s->now.N, s->now.ranks)
                              : rank_in(s->memory.world, RANKS_SEQUENCE);
}

// Makes `texts` the current sequence.
static void sequence_set(StreamBP *s, const Batch *texts) {
    s->now.texts = texts, s->now.tree = texts->tree, s->now.batch = batch_rows(texts);
}

// Splits the tokens of s->now.batch over `ranks` ranks.
static void sequence_split(StreamBP *s, size_t ranks) {
    s->now.N = s->now.batch->N, s->now.ranks = ranks;
    for (size_t half = 0; half < 2; half++) s->now.own[half] = sequence_part(s->now.N, ranks, sequence_rank(s), half);
    s->now.rows = s->now.own[0].count + s->now.own[1].count;
}

// Return the range (0 or 1) of an own token, and the token's row.
static size_t own_half(const StreamBP *s, size_t token) { return s->now.own[1].count && token >= s->now.own[1].begin; }

static size_t own_row(const StreamBP *s, size_t token) {
    const size_t half = own_half(s, token);
    return token - s->now.own[half].begin + (half ? s->now.own[0].count : 0);
}

// ---- query-key pairs ------------------------------------------------------------------------------------------------
static size_t document_of(const Batch *batch, size_t token) {
    const size_t *start = batch->document_start;
    return last_at_most(start, sizeof(*start), max_size(batch->documents, 1), token);
}

// Returns the query-key pairs of a range's queries in one layer. Queries of a chain see the rows before its fork, too.
static double range_pairs(const Batch *batch, Range range, size_t window) {
    const size_t *start = batch->document_start, end = range.begin + range.count;
    double pairs = 0;
    for (size_t d = 0; d < batch->documents; d++) {
        const size_t from = max_size(start[d], range.begin), to = min_size(start[d + 1], end);
        const size_t depth = batch->depth ? batch->depth[d] : 0;
        if (from < to) pairs += query_key_pairs(depth + from - start[d], depth + to - start[d], window);
    }
    return pairs;
}

// ---- latents that are expanded (layer/latent_attention.h) -----------------------------------------------------------
// Returns the tokens from the first to the last key that queries [token, token + n) see; in a tree from token 0 on.
static KeyRange keys_seen(const Batch *batch, size_t token, size_t n) {
    const KeyRange seen = {batch->depth ? 0 : batch->document_start[document_of(batch, token)], token + n};
    return seen;
}

// Returns the tokens that the chunks of a range expand, if each chunk expands what it sees from token `first` on.
static double latents_seen(const Batch *batch, Range range, size_t chunk, size_t first) {
    double tokens = 0;
    for (size_t done = 0; done < range.count; done += chunk) {
        const KeyRange keys = keys_seen(batch, range.begin + done, min_size(chunk, range.count - done));
        tokens += (double)(keys.end - max_size(keys.begin, first));
    }
    return tokens;
}

// ---- chunks ---------------------------------------------------------------------------------------------------------
// Returns the chunk of n own tokens from `token` on.
static Chunk chunk_of(const StreamBP *s, size_t token, size_t n) {
    const Chunk c = {own_row(s, token), n, token, 0, 1, NULL};
    return c;
}

// Returns the tokens of a chunk: `chunk` if the method has chunks, capped by the longer of the rank's ranges.
static size_t effective_chunk(const StreamBP *s, size_t chunk) {
    const size_t longest = max_size(max_size(s->now.own[0].count, s->now.own[1].count), 1);
    return method_has_chunks(s->setup->method) ? min_size(chunk, longest) : longest;
}

// Returns the tokens of a layer's chunk. With method mst only the MLP and the head have chunks.
static size_t layer_chunk(const StreamBP *s) {
    return effective_chunk(s, s->setup->method == METHOD_MST ? SIZE_MAX : s->setup->chunk);
}

// Tells whether one chunk of each length counts for all chunks of that length (the dry run).
static int visits_shapes(const StreamBP *s) { return walk_skips_chunks(&s->memory.walk); }

// Returns the number of chunks of `size` tokens in a range; in the dry run one chunk of each length. Empty range: 0
static size_t range_chunks(const StreamBP *s, size_t half, size_t size) {
    const size_t n = s->now.own[half].count;
    // NOLINTBEGIN(clang-analyzer-core.DivideZero)
    if (visits_shapes(s) && n) return n % size && n > size ? 2 : 1;
    return (n + size - 1) / size;
    // NOLINTEND(clang-analyzer-core.DivideZero)
}

// Returns where the index-th chunk of n tokens begins. A last chunk below an eighth of a full chunk takes tokens from
// the chunk before it: a product of few rows takes as long as a product of many rows.
static size_t chunk_begin(const StreamBP *s, size_t n, size_t index, size_t size) {
    const size_t whole = n / size, rest = n % size, eighth = size / 8;
    if (index != whole || !whole || !rest || rest >= eighth || size != layer_chunk(s)) return index * size;
    return (whole - 1) * size + ((size + rest + 1) / 2 + eighth - 1) / eighth * eighth;
}

// Returns the tokens of the index-th chunk of a range. Dry run: index 0 counts for all whole chunks, 1 is the last.
static Range range_chunk_tokens(const StreamBP *s, size_t half, size_t index, size_t size) {
    const Range range = s->now.own[half];
    const int shapes = visits_shapes(s);
    const size_t begin = shapes ? index * (range.count / size * size) : chunk_begin(s, range.count, index, size);
    const size_t end = min_size(shapes ? begin + size : chunk_begin(s, range.count, index + 1, size), range.count);
    const Range tokens = {range.begin + begin, end - begin};
    return tokens;
}

// Returns the index-th chunk of `size` tokens of a range.
static Chunk range_chunk(const StreamBP *s, size_t half, size_t index, size_t size) {
    const Range tokens = range_chunk_tokens(s, half, index, size);
    Chunk c = chunk_of(s, tokens.begin, tokens.count);
    c.index = index + (half ? range_chunks(s, 0, size) : 0);
    if (visits_shapes(s) && index == 0) c.times = (double)max_size(s->now.own[half].count / size, 1);
    return c;
}

// Return the number of chunks of `size` tokens in both ranges, and the index-th chunk.
static size_t chunks_of_size(const StreamBP *s, size_t size) {
    return range_chunks(s, 0, size) + range_chunks(s, 1, size);
}

static Chunk chunk_of_size(const StreamBP *s, size_t index, size_t size) {
    const size_t first = range_chunks(s, 0, size);
    return index < first ? range_chunk(s, 0, index, size) : range_chunk(s, 1, index - first, size);
}

// Return the number of a layer's chunks, the index-th chunk, and number and chunk of the head.
static size_t chunk_count(const StreamBP *s) { return chunks_of_size(s, layer_chunk(s)); }
static Chunk chunk_at(const StreamBP *s, size_t index) { return chunk_of_size(s, index, layer_chunk(s)); }
static size_t logits_chunk_count(const StreamBP *s) {
    return chunks_of_size(s, effective_chunk(s, s->setup->logits_chunk));
}
static Chunk logits_chunk_at(const StreamBP *s, size_t index) {
    return chunk_of_size(s, index, effective_chunk(s, s->setup->logits_chunk));
}

// Returns the tokens that the index-th chunk is the first of this rank's chunks to see. Dry run: that the chunks which
// it counts for are the first to see.
static Range tokens_first_seen(const StreamBP *s, size_t index) {
    const Chunk c = chunk_at(s, index), before = chunk_at(s, index ? index - 1 : 0);
    const size_t first = index ? before.token + (size_t)before.times * before.n : 0;
    Range part = {max_size(keys_seen(s->now.batch, c.token, c.n).begin, first), 0};
    part.count = c.token + (size_t)c.times * c.n - part.begin;
    return part;
}

// Begins the work on chunk c: the following ops count c.times times.
static Chunk visit(StreamBP *s, Chunk c) {
    walk_count(&s->memory.walk, s->ops, c.times);
    stop_poll(0);
    return c;
}

// Returns the mean query-key pairs of the c.times chunks that c counts for, in a tree over all keys of their paths.
static double mean_pairs(const StreamBP *s, Chunk c, size_t window) {
    const Range range = {c.token, (size_t)c.times * c.n};
    return range_pairs(s->now.batch, range, window) / c.times;
}

static void spans_add(Spans *spans, Span *room, Span span, size_t first) {
    spans->pairs += query_key_pairs(span.begin - span.document, span.end - span.document, spans->window);
    span.document = max_size(span.document, first) - first, span.begin -= first, span.end -= first;
    room[spans->count++] = span;
}

// Makes the spans of documents in chunk c, for attention with a window (0: none) over keys that begin at token `first`.
// Cuts documents at `first`, as no query of the chunk sees earlier keys. In a tree the spans are of chains, without the
// keys before their forks (tree_spans.h). The spans are valid until the next call.
static Spans make_spans(const StreamBP *s, Chunk c, size_t window, size_t first) {
    const size_t *start = s->now.batch->document_start, end = c.token + c.n, documents = s->now.batch->documents;
    Spans spans = {s->now.span, 0, window, 0};
    for (size_t i = 0; c.given && i < c.given->count; i++) spans_add(&spans, s->now.span, c.given->span[i], first);
    for (size_t i = document_of(s->now.batch, c.token); !c.given && i < documents && start[i] < end; i++) {
        const size_t begin = max_size(start[i], c.token);
        const Span span = {start[i], begin, min_size(start[i + 1], end), begin - c.token};
        if (begin < span.end) spans_add(&spans, s->now.span, span, first); // skips an empty document
    }
    if (c.times > 1 || (visits_shapes(s) && s->now.tree)) spans.pairs = mean_pairs(s, c, window);
    return spans;
}

// ---- layers ---------------------------------------------------------------------------------------------------------
// Tells whether the dry run visits layer l, for all layers like it.
static int layer_is_listed(const StreamBP *s, size_t l) { return layer_of(s, l)->like == l; }

// Returns the number of layers that the dry run visits.
static size_t layers_listed(const StreamBP *s) {
    size_t distinct = 0;
    for (size_t l = 0; l < s->model->config.num_hidden_layers; l++) distinct += (size_t)layer_is_listed(s, l);
    return distinct;
}

// Returns the layer of the dry run's index-th visit. Layers of one kind come together.
static size_t layer_listed(const StreamBP *s, size_t index) {
    const Config *c = &s->model->config;
    for (int kind = 0; kind < LAYER_KINDS; kind++)
        for (size_t l = 0; l < c->num_hidden_layers; l++)
            if (layer_kind(c, l) == (LayerKind)kind && layer_is_listed(s, l) && index-- == 0) return l;
    return index;
}

// Makes v the visit of layer l. The dry run counts the visit for all layers like l.
static void layer_visit(Visit *v, size_t l) {
    StreamBP *s = v->s;
    Walk *walk = &s->memory.walk;
    size_t alike = 0;
    for (size_t i = l; i < s->model->config.num_hidden_layers && walk->dry; i++) alike += layer_of(s, i)->like == l;
    v->l = l, v->layer = layer_of(s, l), v->times = walk->layers = (double)max_size(alike, 1);
}

// Goes to visit number v->index of v->end, in the walk's direction.
static void layer_goto(Visit *v) {
    const Walk *walk = &v->s->memory.walk;
    const size_t i = walk->step > 0 ? v->index : v->end - 1 - v->index;
    layer_visit(v, walk->dry ? layer_listed(v->s, i) : i);
}

// Returns the first visit of a walk over the layers, in the direction that layers_begin set.
static Visit first_layer(StreamBP *s) {
    Visit v = {0};
    v.s = s, v.end = s->memory.walk.dry ? layers_listed(s) : s->model->config.num_hidden_layers;
    layer_goto(&v);
    return v;
}

static void next_layer(Visit *v) {
    v->layer = NULL;
    if (++v->index < v->end) layer_goto(v);
}

// ---- between host and device ---------------------------------------------------------------------------------------
// Copies elements of `size` bytes of own tokens. in: host [N] -> device [rows], else device -> host
static void own_copy(const StreamBP *s, void *device, void *host, size_t size, int in) {
    for (size_t half = 0; half < 2; half++) {
        const Range own = s->now.own[half];
        void *rows = at(device, own_row(s, own.begin), size), *values = at(host, own.begin, size);
        if (own.count && in) s->ops->copy_in(rows, values, own.count * size);
        if (own.count && !in) s->ops->copy_out(values, rows, own.count * size);
    }
}

// All-gathers host[N] over the ranks that share the sequence, from the values of each rank's own tokens.
static void host_gather(const StreamBP *s, void *host) {
    const size_t size = dtype_size(dtype_of_sums(s->model->dtype)), S = s->now.ranks;
    const size_t most = sequence_share_max(s->now.N, S);
    if (S == 1) return;
    char *all = (char *)s->now.host_gathered, *own = all + S * most * size, *packed;
    size_t half;
    for (half = 0, packed = own; half < 2; packed += s->now.own[half++].count * size)
        memcpy(packed, at(host, s->now.own[half].begin, size), s->now.own[half].count * size);
    dist_gather(RANKS_SEQUENCE, own, most * size, all);
    for (size_t rank = 0; rank < S; rank++) {
        for (half = 0, packed = all + rank * most * size; half < 2; half++) {
            const Range part = sequence_part(s->now.N, S, rank, half);
            memcpy(at(host, part.begin, size), packed, part.count * size);
            packed += part.count * size;
        }
    }
}

// Tells whether the host holds values of tokens: not in the dry run.
static int has_values(const StreamBP *s) { return s->now.host_sums != NULL; }

// of_texts[positions] = the values of_rows[rows] of the texts' rows, `size` bytes each, for the rows of a range
static void texts_spread(const Batch *texts, Range rows, void *of_texts, void *of_rows, size_t size) {
    TextPart part[TEXT_PARTS];
    for (size_t d = 0; d < texts->documents; d++)
        for (size_t i = text_parts(texts, d, rows, part); i-- > 0;)
            memcpy(at(of_texts, part[i].text, size), at(of_rows, part[i].row, size), part[i].n * size);
}

// of_rows[rows] = the sums of the weights of_texts[positions] on each row of a range, added in double in the order of
// documents. added[rows]: scratch
static void texts_gather(const Batch *texts, Range rows, void *of_rows, const void *of_texts, DType type,
                         double *added) {
    TextPart part[TEXT_PARTS];
    for (size_t r = rows.begin; r < rows.begin + rows.count; r++) added[r] = 0;
    for (size_t d = 0; d < texts->documents; d++)
        for (size_t i = text_parts(texts, d, rows, part); i-- > 0;)
            for (size_t j = 0; j < part[i].n; j++) added[part[i].row + j] += value_at(of_texts, type, part[i].text + j);
    for (size_t r = rows.begin; r < rows.begin + rows.count; r++) value_set(of_rows, type, r, added[r]);
}

// Collects device[rows] of all ranks in host[positions of texts].
static void host_collect(const StreamBP *s, void *host, Summed *device) {
    const size_t size = dtype_size(dtype_of_sums(s->model->dtype));
    const Range all = {0, s->now.N};
    void *rows = s->now.tree ? s->now.host_rows : host;
    if (!has_values(s)) return;
    own_copy(s, device, rows, size, 0);
    host_gather(s, rows);
    if (s->now.tree) texts_spread(s->now.texts, all, host, rows, size);
}

// Computes dL/dlogp of all targets, from log-probabilities in host_sums if the objective needs them. Copies it to the
// device.
static void sequence_weights(const StreamBP *s) {
    const DType type = dtype_of_sums(s->model->dtype);
    const int at_once = objective_weights_wait(&s->setup->objective) == WEIGHTS_AT_ONCE;
    const Range all = {0, s->now.N};
    void *const weights = s->now.host_sums, *const rows = s->now.tree ? s->now.host_rows : weights;
    if (!has_values(s)) return;
    objective_weights(&s->setup->objective, s->now.texts, s->now.Z, 0, s->now.texts->N, at_once ? NULL : weights,
                      weights, type);
    if (s->now.tree) texts_gather(s->now.texts, all, rows, weights, type, s->now.host_added);
    own_copy(s, s->now.token_weight, rows, dtype_size(type), 1);
}

// Checks that the run has memory for the sequence on the host, and that its method can compute a tree.
static void sequence_check(const StreamBP *s) {
    const Batch *texts = s->now.texts;
    const Lora *lora = s->memory.lora;
    const int drops = lora && lora->dropout > 0 && s->now.pass != PASS_FORWARD_ONLY;
    if (s->now.tree && (s->now.ranks > 1 || method_is_chunk_major(s->setup->method) || drops))
        die("documents that share prefixes are not computed once with --sp above 1, --method seco or spaco, or "
            "--lora-dropout; give --share-prefixes off");
    if (!has_values(s)) return;
    if (texts->N > s->now.host_tokens || texts->documents > s->now.host_documents)
        die("internal: a sequence of %zu tokens in %zu documents, but the run was set up for %zu in %zu; please report "
            "it",
            texts->N, texts->documents, s->now.host_tokens, s->now.host_documents);
    if (s->now.tree && s->now.N > s->now.host_tree_rows)
        die("internal: a tree of %zu rows, but the run was set up for %zu; please report it", s->now.N,
            s->now.host_tree_rows);
}

// Splits the sequence over ranks, pushes its tensors and copies it to the device. Z: the loss denominator
// (objective_normaliser) of the whole accumulated batch
static void sequence_begin(StreamBP *s, const Batch *texts, double Z, Pass pass) {
    s->now.Z = Z, s->now.pass = pass;
    s->memory.moved.phase = PHASE_FORWARD;
    sequence_set(s, texts);
    sequence_split(s, world_sp(s->memory.world));
    sequence_check(s);
    size_t n = s->now.rows;
    if (s->memory.hook.context) s->memory.hook.begin(&s->memory);
    s->now.tokens = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "tokens", n, sizeof(int32_t));
    s->now.targets = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "targets", n, sizeof(int32_t));
    s->now.position = (int32_t *)arena_push(s->arena, SHARE_WORKSPACE, "positions", n, sizeof(int32_t));
    s->now.token_weight = push_summed(s, SHARE_WORKSPACE, "token weights", n);
    s->now.logp = push_summed(s, SHARE_WORKSPACE, "log-probabilities", n);
    s->now.entropy =
        objective_has_entropy(&s->setup->objective) ? push_summed(s, SHARE_WORKSPACE, "entropies", n) : NULL;
    if (!has_values(s)) return;
    own_copy(s, s->now.tokens, s->now.batch->tokens, sizeof(int32_t), 1);
    own_copy(s, s->now.targets, s->now.batch->targets, sizeof(int32_t), 1);
    own_copy(s, s->now.position, s->now.batch->position, sizeof(int32_t), 1);
    if (objective_weights_wait(&s->setup->objective) == WEIGHTS_AT_ONCE) sequence_weights(s);
}

// Collects the whole sequence's log-probabilities and entropies on the host. Prepares the routers' losses for backward.
static void sequence_end(StreamBP *s) {
    host_collect(s, s->now.host_sums, s->now.logp);
    if (s->now.entropy) host_collect(s, s->now.host_entropy, s->now.entropy);
    if (s->now.pass == PASS_FORWARD) routes_balance(s);
}

// Computes the weights host_rows of a range of a tree's rows from the log-probabilities there, part by part of the
// texts.
static void tree_weights(const StreamBP *s, Range rows, DType type) {
    const Batch *texts = s->now.texts;
    const size_t size = dtype_size(type);
    TextPart part[TEXT_PARTS];
    texts_spread(texts, rows, s->now.host_sums, s->now.host_rows, size);
    for (size_t d = 0; d < texts->documents; d++)
        for (size_t i = text_parts(texts, d, rows, part); i-- > 0;) {
            void *values = at(s->now.host_sums, part[i].text, size);
            objective_weights(&s->setup->objective, texts, s->now.Z, part[i].text, part[i].n, values, values, type);
        }
    texts_gather(texts, rows, s->now.host_rows, s->now.host_sums, type, s->now.host_added);
}

// Computes dL/dlogp of chunk c's targets from their log-probabilities alone.
static void sequence_chunk_weights(const StreamBP *s, Chunk c) {
    const DType type = dtype_of_sums(s->model->dtype);
    const size_t size = dtype_size(type);
    const Range rows = {c.token, c.n};
    void *values = at(s->now.tree ? s->now.host_rows : s->now.host_sums, c.token, size);
    if (!has_values(s)) return;
    s->ops->copy_out(values, summed_row(s, s->now.logp, c.row, 1), c.n * size);
    if (s->now.tree)
        tree_weights(s, rows, type);
    else
        objective_weights(&s->setup->objective, s->now.texts, s->now.Z, c.token, c.n, values, values, type);
    s->ops->copy_in(summed_row(s, s->now.token_weight, c.row, 1), values, c.n * size);
}

static double sequence_loss(const StreamBP *s, Metrics *metrics) {
    if (!has_values(s)) return 0;
    routes_metrics(s, metrics);
    return objective_loss(&s->setup->objective, s->now.texts, s->now.Z, s->now.host_sums,
                          s->now.entropy ? s->now.host_entropy : NULL, dtype_of_sums(s->model->dtype), metrics);
}

#endif
