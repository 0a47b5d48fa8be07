/*
A micro-batch: one packed sequence of N tokens, made of contiguous documents without padding. Attention never crosses a
document, positions restart in each document, and a masked target is -1. B x T is B documents of T tokens. A batch lies
in host memory; all code that fills one (the data loader, a test, `bp` without data) keeps this contract.
*/
#ifndef LLMC_BATCH_H
#define LLMC_BATCH_H
#include "llmc/base/random.h"
#include "llmc/base/utils.h"
#include "llmc/ranks/world.h"

#define RANDOM_STREAM_TOKENS 0x746f6b656e73ull // stream of random.h for batch_random ("tokens")

// The experts of each token, recorded in the pass that wrote it (llmc/stream/routes.h)
typedef struct {
    uint16_t *expert;         // [layers with experts,stride,k] from the batch's first token on; NULL: unknown
    size_t layers, stride, k; // stride: tokens of the memory that several batches share
    int replays;              // 1: the batch uses these experts; 0: the routers choose experts
} BatchRoutes;

// A teacher's likeliest tokens for each target, for objective distill (teacher_*, logprobs.h)
typedef struct {
    int32_t *id; // [N,k] ascending; NULL: no teacher
    float *logp; // [N,k] their log-probabilities
    float *tail; // [N] probability of all other tokens
    size_t k;
} BatchTeacher;

typedef struct Tree Tree; // tree.h

typedef struct {
    size_t N;
    size_t first;       // tokens of the micro-batch before this part (batch_part); 0 for a whole micro-batch
    int empty;          // 1: a part without documents: one token without a target
    int32_t *tokens;    // [N]
    int32_t *targets;   // [N] token to predict, or -1
    float *loss_weight; // [N] weight in the loss, ignored where the target is -1
    int32_t *position;  // [N] position within the document
    size_t documents;
    size_t *document_start; // [documents + 1], the last entry is N
    size_t *origin;         // [documents] index in the data of the document's first token, counted over all shards;
                            // NULL: unknown
    Tree *tree;             // documents that share prefixes, as rows that are computed once; NULL: every position is a
                            // row
    Tree *room;             // memory for `tree`, or NULL
    size_t *depth;          // [documents] position of the document's first token, in Tree.rows; NULL: 0; not owned
    size_t *common; // [documents] rows (tree.h) that a document of a sample shares with the one before it; 0: it is
                    // the first. NULL: documents share no rows
    // for objectives over answers (objective.h), else NULL; documents of a pair or a group are contiguous
    size_t *group;      // [documents] 0, 0, 1, 1, ...: index of its pair, group or family in the sequence; the chosen
                        // document of a pair comes first
    size_t *trajectory; // [documents] 0, 0, 1, ...: documents of a trajectory (train/trajectory.h) count as one; NULL:
                        // each document counts alone
    double *document_weight; // [documents] sum of the loss weights of the document's, or its trajectory's, targets
                             // (batch_count)
    float *reward;           // [documents] the document's reward, or label: 1 desirable, 0 not
    float *advantage;        // [N] advantage of each target
    float *reference, *old; // [N] log-probabilities of the targets under the reference, and under the policy that wrote
                            // them; NULL: unknown
    const double *document_reference; // [documents] sum of `reference` over a document's targets, in its place; NULL:
                                      // unknown; not owned
    double kl;                        // kl of objective kto (objective.h)
    BatchRoutes routes;
    BatchTeacher teacher;
} Batch;

// Normalisers of losses, over the whole accumulated batch
typedef struct {
    double tokens; // sum of the weights of the targets
    double documents;
    double groups;  // pairs, or groups of completions
    double batches; // micro-batches
} TargetCounts;

static Batch batch_allocate(size_t N, size_t documents) {
    Batch batch = {0};
    batch.N = N;
    batch.documents = documents;
    batch.tokens = (int32_t *)checked_calloc(N, sizeof(int32_t), "the tokens of a batch");
    batch.targets = (int32_t *)checked_calloc(N, sizeof(int32_t), "the targets of a batch");
    batch.loss_weight = (float *)checked_calloc(N, sizeof(float), "the loss weights of a batch");
    batch.position = (int32_t *)checked_calloc(N, sizeof(int32_t), "the positions of a batch");
    batch.document_start = (size_t *)checked_calloc(documents + 1, sizeof(size_t), "the documents of a batch");
    return batch;
}

// Allocates the fields for objectives over answers; log-probabilities only if requested.
static void batch_allocate_answers(Batch *batch, int reference, int old) {
    batch->group = (size_t *)checked_calloc(batch->documents, sizeof(size_t), "the groups of a batch");
    batch->document_weight = (double *)checked_calloc(batch->documents, sizeof(double), "the documents of a batch");
    batch->reward = (float *)checked_calloc(batch->documents, sizeof(float), "the rewards of a batch");
    batch->advantage = (float *)checked_calloc(batch->N, sizeof(float), "the advantages of a batch");
    if (reference) batch->reference = (float *)checked_calloc(batch->N, sizeof(float), "the reference of a batch");
    if (old) batch->old = (float *)checked_calloc(batch->N, sizeof(float), "the old log-probabilities of a batch");
}

static void batch_allocate_routes(Batch *batch, size_t layers, size_t k, int replays) {
    const BatchRoutes routes = {NULL, layers, batch->N, k, replays};
    batch->routes = routes;
    batch->routes.expert = (uint16_t *)checked_calloc(layers * batch->N * k, sizeof(uint16_t), "the routes of a batch");
}

// Allocates a teacher of k tokens for N targets. Until they are read they are tokens 0 to k - 1, all as likely as the
// tail.
static BatchTeacher teacher_allocate(size_t N, size_t k) {
    BatchTeacher teacher = {NULL, NULL, NULL, k};
    teacher.id = (int32_t *)checked_calloc(N * k, sizeof(int32_t), "a teacher's tokens");
    teacher.logp = (float *)checked_calloc(N * k, sizeof(float), "a teacher's log-probabilities");
    teacher.tail = (float *)checked_calloc(N, sizeof(float), "a teacher's tails");
    for (size_t i = 0; i < N * k; i++) {
        teacher.id[i] = (int32_t)(i % k), teacher.logp[i] = -logf((float)(k + 1));
        teacher.tail[i / k] = 1 / (float)(k + 1);
    }
    return teacher;
}

static void teacher_free(BatchTeacher *teacher) { free(teacher->id), free(teacher->logp), free(teacher->tail); }

// Returns the k experts of a token in a layer. `layer` counts only layers with experts.
static uint16_t *batch_route(const Batch *batch, size_t layer, size_t token) {
    return batch->routes.expert + (layer * batch->routes.stride + token) * batch->routes.k;
}

static void batch_free(Batch *batch) {
    free(batch->tokens);
    free(batch->targets);
    free(batch->loss_weight);
    free(batch->position);
    free(batch->document_start), free(batch->origin);
    free(batch->group), free(batch->trajectory), free(batch->document_weight), free(batch->reward),
        free(batch->advantage);
    free(batch->reference), free(batch->old), free(batch->routes.expert), free(batch->room);
    free(batch->common);
    teacher_free(&batch->teacher);
    memset(batch, 0, sizeof(*batch));
}

// Sets positions from document_start[1..documents-1], which the caller has set. Sets the first entry to 0 and the last
// to N.
static void batch_set_positions(Batch *batch) {
    batch->document_start[0] = 0;
    batch->document_start[batch->documents] = batch->N;
    for (size_t d = 0; d < batch->documents; d++)
        for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++)
            batch->position[t] = (int32_t)(t - batch->document_start[d]);
}

// Fills B documents with T+1 random ids below vocab_size each: documents first, first + 1, ... of one random sequence.
// Document b reads ids [b(T+1), b(T+1) + T); its targets are the ids one position later, with weight 1. All B documents
// begin with the first document's `shared` ids. The batch must be of exactly this size.
static void batch_random(Batch *batch, size_t B, size_t T, size_t first, size_t vocab_size, uint64_t seed,
                         size_t shared) {
    if (batch->N != B * T || batch->documents != B)
        die("internal: a batch of %zu tokens in %zu documents cannot hold %zu x %zu; please report it", batch->N,
            batch->documents, B, T);
    for (size_t b = 0; b < B; b++) {
        batch->document_start[b] = b * T;
        for (size_t t = 0; t <= T; t++) {
            const size_t number = (t < shared ? first : first + b) * (T + 1) + t;
            const int32_t id = (int32_t)random_below(seed, RANDOM_STREAM_TOKENS, number, vocab_size);
            if (t < T) batch->tokens[b * T + t] = id, batch->loss_weight[b * T + t] = 1;
            if (t > 0) batch->targets[b * T + t - 1] = id;
        }
    }
    batch_set_positions(batch);
}

// Returns the documents that count as one with document d: those of its trajectory, which are contiguous, or d alone.
static Range batch_whole(const Batch *batch, size_t d) {
    Range whole = {d, 1};
    const size_t *of = batch->trajectory;
    while (of && whole.begin && of[whole.begin - 1] == of[d]) whole.begin--, whole.count++;
    while (of && whole.begin + whole.count < batch->documents && of[whole.begin + whole.count] == of[d]) whole.count++;
    return whole;
}

// Returns the batch's share of the step's counts. Sets batch->document_weight unless it is NULL.
static TargetCounts batch_count(const Batch *batch) {
    TargetCounts counts = {0};
    if (batch->empty) return counts;
    counts.batches = 1;
    for (size_t d = 0, end; d < batch->documents; d = end) {
        double sum = 0;
        end = d + batch_whole(batch, d).count;
        for (size_t t = batch->document_start[d]; t < batch->document_start[end]; t++)
            if (batch->targets[t] >= 0) sum += (double)batch->loss_weight[t];
        for (size_t i = d; i < end && batch->document_weight; i++) batch->document_weight[i] = sum;
        counts.tokens += sum, counts.documents++;
        counts.groups += batch->group && (d == 0 || batch->group[d] != batch->group[d - 1]);
    }
    return counts;
}

static TargetCounts target_counts_add(TargetCounts a, TargetCounts b) {
    a.tokens += b.tokens, a.documents += b.documents, a.groups += b.groups, a.batches += b.batches;
    return a;
}

// Returns the tokens of the batch's documents. batch_computed (tree.h): how many tokens the model computes
static double batch_tokens(const Batch *batch) { return batch->empty ? 0 : (double)batch->N; }

// ---- mismatched documents -------------------------------------------------------------------------------------------
// Returns the position at which document d's completion begins: the document's first target, or its last position if it
// has no target.
static size_t batch_completion(const Batch *batch, size_t d) {
    size_t t = batch->document_start[d];
    while (t + 1 < batch->document_start[d + 1] && batch->targets[t] < 0) t++;
    return t;
}

// Pairs each prompt of the batch with the completion of the document before it, the first prompt with the last
// document's completion; cuts each pair to `longest` positions. The result is as long as the batch; `out` must have
// room for it.
static void batch_mismatch(const Batch *batch, size_t longest, Batch *out) {
    out->N = 0, out->documents = batch->documents, out->empty = 0;
    for (size_t d = 0; d < batch->documents; d++) {
        const size_t other = (d ? d : batch->documents) - 1, begin = batch_completion(batch, other);
        const size_t start = batch->document_start[d], prompt = batch_completion(batch, d) - start;
        const size_t n = min_size(prompt + batch->document_start[other + 1] - begin, longest);
        out->document_start[d] = out->N;
        for (size_t i = 0; i < n; i++) {
            const size_t from = i < prompt ? start + i : begin + i - prompt, to = out->N + i;
            out->tokens[to] = batch->tokens[i <= prompt ? start + i : from];
            out->targets[to] = i < prompt ? -1 : batch->targets[from];
            out->loss_weight[to] = batch->loss_weight[from];
        }
        out->N += n;
    }
    batch_set_positions(out);
}

// ---- parts ----------------------------------------------------------------------------------------------------------
// Returns the batch's arrays advanced by `positions` and `documents`.
static Batch batch_behind(Batch b, size_t positions, size_t documents) {
    b.tokens += positions, b.targets += positions, b.loss_weight += positions, b.position += positions;
    b.document_start += documents;
    if (b.origin) b.origin += documents;
    if (b.common) b.common += documents;
    if (b.group) b.group += documents;
    if (b.trajectory) b.trajectory += documents;
    if (b.document_weight) b.document_weight += documents;
    if (b.reward) b.reward += documents;
    if (b.advantage) b.advantage += positions;
    if (b.reference) b.reference += positions;
    if (b.old) b.old += positions;
    if (b.routes.expert) b.routes.expert += positions * b.routes.k;
    if (b.teacher.id) b.teacher.id += positions * b.teacher.k, b.teacher.logp += positions * b.teacher.k;
    if (b.teacher.id) b.teacher.tail += positions;
    return b;
}

// Cuts documents [begin, end) out of a batch, in the batch's memory. This invalidates the whole batch.
static Batch batch_slice(Batch *whole, size_t begin, size_t end) {
    const size_t first = whole->document_start[begin];
    Batch part = batch_behind(*whole, first, begin);
    part.N = whole->document_start[end] - first, part.first = first;
    part.documents = end - begin, part.tree = NULL;
    for (size_t d = begin; d <= end; d++) whole->document_start[d] -= first;
    return part;
}

// Returns a sequence without effect in the memory of a batch: the batch's first token, without a target.
static Batch batch_empty(Batch *whole) {
    Batch empty = *whole;
    empty.N = empty.documents = 1, empty.empty = 1, empty.first = 0, empty.tree = NULL;
    empty.targets[0] = -1, empty.position[0] = 0;
    empty.document_start[0] = 0, empty.document_start[1] = 1;
    if (empty.document_weight) empty.document_weight[0] = 0;
    return empty;
}

// Returns one of `parts` contiguous runs of documents of about equal length. Invalidates *whole. A document, pair or
// group belongs to the part that contains its middle, so a part has at most N / parts positions plus the positions of
// the longest document, pair or group.
static Batch batch_part(Batch *whole, size_t parts, size_t part) {
    const size_t documents = whole->documents, *group = whole->group;
    size_t begin = documents, end = 0, next;
    if (parts == 1) return *whole;
    for (size_t d = 0; d < documents; d = next) {
        for (next = d + 1; group && next < documents && group[next] == group[d];) next++;
        if ((whole->document_start[d] + whole->document_start[next]) * parts / (2 * whole->N) != part) continue;
        begin = min_size(begin, d), end = next;
    }
    return begin < end ? batch_slice(whole, begin, end) : batch_empty(whole);
}

#endif
