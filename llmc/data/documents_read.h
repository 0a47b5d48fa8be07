/*
Reading what documents.h has found: streams into batches. Every document's checksum is checked when it is read, of one
that is read in parts the first time; ids, counts and advantages are held to what they may be. A shard that changes
under a run is noticed. At most OPEN_SHARDS files are open; nothing is allocated.

Of pairs and groups a batch gets their numbers within the stream, of groups rewards and the advantages that follow from
them, of documents with values these as advantages, and the log-probabilities of its targets from the files that the
settings name: all that objectives over answers (objective.h) need.
*/
#ifndef LLMC_DOCUMENTS_READ_H
#define LLMC_DOCUMENTS_READ_H
#include "documents.h"

// ---- reading --------------------------------------------------------------------------------------------------------
// A shard's file: kept open, or opened again. Nothing is allocated here: this happens in the middle of training.
static const InputFile *documents_file(Documents *d, size_t shard) {
    const size_t slot = shard % OPEN_SHARDS;
    InputFile *file = &d->file[slot];
    unsigned char crc[4];
    struct stat status;
    if (file->fd >= 0 && d->file_shard[slot] == shard) return file;
    if (file->fd >= 0) close(file->fd);
    file->path = d->shard[shard].header.path, file->bytes = d->shard[shard].header.bytes;
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (file->fd < 0)
        die("%s: cannot be opened any more: %s%s", file->path, strerror(errno),
            errno == EMFILE ? "; raise the limit with ulimit -n" : "");
    if (fstat(file->fd, &status) != 0 || (uint64_t)status.st_size != file->bytes)
        die("%s: has changed its size since it was opened; leave the data alone while a run reads it", file->path);
    input_read(file, 124, crc, sizeof(crc)); // of the header, which holds the table's, which holds the documents'
    if (shard_uint32(crc) != d->shard[shard].header.header_crc)
        die("%s: is another file than when it was opened; leave the data alone while a run reads it", file->path);
    d->file_shard[slot] = shard;
    return file;
}

static DocumentAt documents_find(Documents *d, size_t document) {
    unsigned char entry[TOKEN_SHARD_ENTRY];
    size_t shard = last_at_most(&d->shard[0].documents_before, sizeof(d->shard[0]), d->shards, document);
    DocumentAt at;
    at.shard = &d->shard[shard];
    at.file = documents_file(d, shard);
    at.number = document - d->shard[shard].documents_before;
    shard_read_entries(&at.shard->header, at.file, at.number, 1, entry);
    at.entry = shard_document(entry);
    if (at.entry.first > at.shard->header.tokens || at.entry.tokens > at.shard->header.tokens - at.entry.first)
        die("%s: document %llu is not where it was when the file was opened; leave the data alone while a run reads it",
            at.shard->header.path, (unsigned long long)at.number);
    return at;
}

// The number of a document's first token, counted over all shards: as files of log-probabilities count.
static size_t documents_token_offset(Documents *d, size_t document) {
    DocumentAt at = documents_find(d, document);
    return at.shard->tokens_before + (size_t)at.entry.first;
}

// The document that a token counted like this is in, for messages.
static DocumentAt documents_find_token(Documents *d, size_t token) {
    const DocumentShard *shard =
        &d->shard[last_at_most(&d->shard[0].tokens_before, sizeof(d->shard[0]), d->shards, token)];
    size_t low = 0, high = (size_t)shard->header.documents;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (documents_token_offset(d, shard->documents_before + middle) <= token)
            low = middle;
        else
            high = middle;
    }
    return documents_find(d, shard->documents_before + low);
}

static void documents_check_crc(const DocumentAt *at, uint32_t crc) {
    if (crc != at->entry.crc)
        die("%s: the checksum of document %llu is wrong, the file is damaged; copy or write it again",
            at->shard->header.path, (unsigned long long)at->number);
}

// Of a document that is read in parts: the whole checksum, of its ids, counts and values.
static void documents_check_whole(Documents *d, const DocumentAt *at) {
    const TokenShard *s = &at->shard->header;
    const uint64_t first = at->entry.first, tokens = at->entry.tokens;
    const uint64_t begin[3] = {s->ids + first * s->id_bytes, s->counts + first, s->values + first * sizeof(float)};
    const uint64_t bytes[3] = {tokens * s->id_bytes, tokens, s->values ? tokens * sizeof(float) : 0};
    uint32_t crc = 0;
    size_t part;
    for (int i = 0; i < 3; i++) {
        for (uint64_t done = 0; done < bytes[i]; done += part) {
            part = (size_t)(bytes[i] - done < DOCUMENTS_BUFFER_BYTES ? bytes[i] - done : DOCUMENTS_BUFFER_BYTES);
            input_read(at->file, begin[i] + done, d->buffer, part);
            crc = crc32_of(crc, d->buffer, part);
        }
    }
    documents_check_crc(at, crc);
}

typedef struct {
    int found;
    size_t place;
    uint32_t value;
} Misfit; // the first id outside of the vocabulary, the first count that is none

// The n + 1 ids from token `first` of the document on, into the n positions behind `at`; returns their checksum.
static uint32_t documents_read_ids(Documents *d, const DocumentAt *document, uint64_t first, size_t n, Batch *batch,
                                   size_t at, Misfit *bad) {
    const TokenShard *s = &document->shard->header;
    size_t part;
    uint32_t crc = 0;
    memset(bad, 0, sizeof(*bad));
    for (size_t done = 0; done <= n; done += part) {
        part = min_size(n + 1 - done, DOCUMENTS_BUFFER_BYTES / s->id_bytes);
        input_read(document->file, s->ids + (document->entry.first + first + done) * s->id_bytes, d->buffer,
                   part * s->id_bytes);
        crc = crc32_of(crc, d->buffer, part * s->id_bytes);
        for (size_t i = 0; i < part; i++) {
            uint32_t id = shard_id(s, d->buffer, i);
            if (id >= s->vocabulary && !bad->found) bad->found = 1, bad->place = done + i, bad->value = id;
            if (done + i < n) batch->tokens[at + done + i] = (int32_t)id;
            if (done + i > 0) batch->targets[at + done + i - 1] = (int32_t)id;
        }
    }
    return crc;
}

// Masks the targets that do not count; returns how many do.
static size_t documents_read_counts(Documents *d, const DocumentAt *document, uint64_t first, size_t n, Batch *batch,
                                    size_t at, uint32_t *crc, Misfit *bad) {
    size_t part, counted = 0;
    memset(bad, 0, sizeof(*bad));
    for (size_t done = 0; done <= n; done += part) {
        part = min_size(n + 1 - done, DOCUMENTS_BUFFER_BYTES);
        input_read(document->file, document->shard->header.counts + document->entry.first + first + done, d->buffer,
                   part);
        *crc = crc32_of(*crc, d->buffer, part);
        for (size_t i = 0; i < part; i++) {
            int counts = d->buffer[i] != 0;
            if (d->buffer[i] > (first + done + i > 0) && !bad->found)
                bad->found = 1, bad->place = done + i, bad->value = d->buffer[i];
            if (done + i == 0) continue; // the first token is nobody's target here
            batch->loss_weight[at + done + i - 1] = (float)counts;
            if (!counts) batch->targets[at + done + i - 1] = -1;
            counted += (size_t)counts;
        }
    }
    return counted;
}

// The advantage of each of the n targets, into batch->advantage where there is one.
static void documents_read_values(Documents *d, const DocumentAt *document, uint64_t first, size_t n, Batch *batch,
                                  size_t at, uint32_t *crc) {
    const TokenShard *s = &document->shard->header;
    size_t part;
    for (size_t done = 0; done <= n; done += part) {
        part = min_size(n + 1 - done, DOCUMENTS_BUFFER_BYTES / sizeof(float));
        input_read(document->file, s->values + (document->entry.first + first + done) * sizeof(float), d->buffer,
                   part * sizeof(float));
        *crc = crc32_of(*crc, d->buffer, part * sizeof(float));
        if (!batch->advantage) continue;
        for (size_t i = done == 0; i < part; i++) // the first token is nobody's target here
            batch->advantage[at + done + i - 1] = shard_float32(d->buffer + i * sizeof(float));
    }
}

static void documents_check_values(const DocumentAt *document, uint64_t first, size_t n, const float *advantage) {
    for (size_t i = 0; i < n; i++)
        if (!isfinite(advantage[i]))
            die("%s: document %llu, token %llu has the advantage %f; prepare it with finite numbers",
                document->shard->header.path, (unsigned long long)document->number, (unsigned long long)(first + i + 1),
                (double)advantage[i]);
}

__attribute__((noreturn)) static void documents_refuse_id(const DocumentAt *document, uint64_t token, uint32_t id) {
    die("%s: document %llu, token %llu is %u, outside the vocabulary of %llu ids that the shard was made with; write "
        "it again",
        document->shard->header.path, (unsigned long long)document->number, (unsigned long long)token, id,
        (unsigned long long)document->shard->header.vocabulary);
}

static void documents_check_found(const DocumentAt *document, const Piece *piece, uint64_t first, Misfit id,
                                  Misfit count, size_t counted) {
    const TokenShard *s = &document->shard->header;
    const unsigned long long number = document->number;
    if (id.found) documents_refuse_id(document, first + id.place, id.value);
    if (count.found)
        die("%s: document %llu, token %llu has the count %u, which is 0 or 1, and 0 for the first token; write it "
            "again",
            s->path, number, (unsigned long long)(first + count.place), count.value);
    if (counted != piece->counted)
        die("%s: document %llu has %zu counted targets where its table says %u; write it again", s->path, number,
            counted, piece->counted);
}

// token: the first of the document's n + 1, counted over all shards
static void documents_read_logprobs(const Documents *d, size_t token, size_t n, Batch *batch) {
    const DataSettings *s = &d->settings;
    if (batch->origin) batch->origin[batch->documents] = token;
    if (batch->reference && s->reference) logprobs_read(s->reference, token + 1, n, batch->reference + batch->N);
    if (batch->old && s->old) logprobs_read(s->old, token + 1, n, batch->old + batch->N);
}

// Behind the documents that the batch has; their reward, too.
static void documents_read_piece(Documents *d, const Piece *piece, Batch *batch) {
    DocumentAt document = documents_find(d, piece->document);
    const uint64_t first = (uint64_t)piece->part * d->settings.T;
    const size_t n = piece->positions, at = batch->N;
    const int whole = first == 0 && document.entry.tokens == (uint64_t)n + 1;
    unsigned char *checked = d->checked ? &d->checked[piece->document / 8] : NULL,
                  bit = (unsigned char)(1u << piece->document % 8);
    Misfit bad_id, bad_count;
    if (first + n + 1 > document.entry.tokens || (!whole && !checked))
        die("%s: document %llu is not as long as it was when the file was opened; leave the data alone while a run "
            "reads it",
            document.shard->header.path, (unsigned long long)document.number);
    if (!whole && !(*checked & bit)) documents_check_whole(d, &document), *checked |= bit;
    uint32_t crc = documents_read_ids(d, &document, first, n, batch, at, &bad_id);
    size_t counted = documents_read_counts(d, &document, first, n, batch, at, &crc, &bad_count);
    if (document.shard->header.values) documents_read_values(d, &document, first, n, batch, at, &crc);
    if (whole) documents_check_crc(&document, crc);
    documents_check_found(&document, piece, first, bad_id, bad_count, counted);
    if (document.shard->header.values && batch->advantage)
        documents_check_values(&document, first, n, batch->advantage + at);
    if (batch->reward) batch->reward[batch->documents] = document.entry.reward;
    documents_read_logprobs(d, document.shard->tokens_before + (size_t)(document.entry.first + first), n, batch);
    batch->document_start[batch->documents++] = at;
    batch->N += n;
    batch->document_start[batch->documents] = batch->N;
}

// Those of a group, documents [first, batch->documents) of the batch: one for all positions of a document.
static void documents_set_advantages(Documents *d, Batch *batch, size_t first) {
    group_advantages(batch->reward + first, batch->documents - first, d->settings.scale_rewards, d->advantage);
    for (size_t i = first; i < batch->documents; i++)
        for (size_t t = batch->document_start[i]; t < batch->document_start[i + 1]; t++)
            batch->advantage[t] = (float)d->advantage[i - first];
}

static void documents_read_unit(Documents *d, size_t unit, size_t group, Batch *batch) {
    const size_t first = batch->documents;
    size_t i, end = documents_unit(d, unit, &i);
    for (; i < end; i++) {
        if (batch->documents == d->bound.documents) die("internal: a stream of more documents than were planned for");
        if (d->piece[i].positions > d->bound.N - batch->N)
            die("internal: a stream that is longer than was planned for");
        if (batch->group) batch->group[batch->documents] = group;
        documents_read_piece(d, &d->piece[i], batch);
    }
    if (batch->reward) documents_set_advantages(d, batch, first);
}

// Fills a batch that has room for the largest stream with the next one.
static void documents_next(Documents *d, Batch *batch) {
    const EpochSequences *e;
    size_t begin, end = documents_stream(d, d->next, &e, &begin);
    uint64_t after = documents_after(d, d->next);
    batch->N = 0, batch->documents = 0;
    for (size_t i = begin; i < end; i++) documents_read_unit(d, e->order[i], i - begin, batch);
    batch_set_positions(batch);
    if (batch->counted) batch_count(batch);
    d->next = after;
}

/*
Prompts of shards, for rollouts (rollout.h): of documents that know where their prompt ends, of groups (one prompt
each), or of shards of prompts alone. Opened with DATA_PROMPTS; nothing is packed. What lies behind a prompt is the
reference answer, which is not trained on; the completions of a group are none. Nothing is allocated after opening.
*/
static size_t prompts_count(const Documents *d) { return d->prompts; }

// Tokens of the longest prompt, and of the longest prompt with what lies behind it, at most.
static size_t prompts_longest(const Documents *d) { return d->longest_prompt; }

static size_t prompts_longest_document(const Documents *d) {
    size_t longest = 0;
    for (size_t i = 0; i < d->shards; i++) longest = max_size(longest, (size_t)d->shard[i].header.longest);
    return d->shard[0].header.kind == KIND_GROUPS ? d->longest_prompt : longest;
}

// Of prompt number `prompt`: its ids and those of the reference answer, as many as there is room for. *prompt_tokens:
// of the prompt; *tokens: of both, which may be more than there is room for.
static void prompts_read(Documents *d, size_t prompt, int32_t *ids, size_t room, size_t *prompt_tokens,
                         size_t *tokens) {
    DocumentAt at = documents_find(d, d->prompt[prompt]);
    const TokenShard *s = &at.shard->header;
    size_t part;
    *prompt_tokens = (size_t)at.entry.prompt;
    *tokens = s->kind == KIND_GROUPS ? *prompt_tokens : (size_t)at.entry.tokens;
    documents_check_whole(d, &at);
    size_t n = min_size(*tokens, room);
    for (size_t done = 0; done < n; done += part) {
        part = min_size(n - done, DOCUMENTS_BUFFER_BYTES / s->id_bytes);
        input_read(at.file, s->ids + (at.entry.first + done) * s->id_bytes, d->buffer, part * s->id_bytes);
        for (size_t i = 0; i < part; i++) {
            uint32_t id = shard_id(s, d->buffer, i);
            if (id >= s->vocabulary) documents_refuse_id(&at, done + i, id);
            ids[done + i] = (int32_t)id;
        }
    }
}

#endif
