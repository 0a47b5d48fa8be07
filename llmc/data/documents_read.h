/*
Reads segments of documents into a batch, and prompts; documents.h has indexed them. Each document's checksum is
verified when it is read (at the first of several segments); ids, masks and advantages are checked for their range. A
shard that changes during a run is detected, and so are documents that do not share what the index says. At most
OPEN_SHARDS files are open. Nothing is allocated, since this runs
during training.
*/
#ifndef LLMC_DOCUMENTS_READ_H
#define LLMC_DOCUMENTS_READ_H
#include "documents.h"

// ---- finding a document ---------------------------------------------------------------------------------------------
// Returns a shard's file, and opens it if needed. A shard has the slot shard % OPEN_SHARDS; the file there is closed.
static const InputFile *documents_file(DataLoader *d, size_t shard) {
    const size_t slot = shard % OPEN_SHARDS;
    const TokenShard *s = &d->shard[shard].header;
    InputFile *file = &d->file[slot];
    uint32_t crc; // checksum of the header (it covers the checksums of table and documents); 0 for llm.c's shards
    struct stat status;
    if (file->fd >= 0 && d->file_shard[slot] == shard) return file;
    if (file->fd >= 0) close(file->fd);
    file->path = s->path, file->bytes = s->begin.bytes;
    file->fd = file_open(file->path, O_RDONLY);
    if (file->fd < 0) die("%s: %s; leave the data alone while a run reads it", file->path, file_fault());
    if (fstat(file->fd, &status) != 0 || (size_t)status.st_size != s->begin.bytes)
        die("%s: has changed its size since it was opened; leave the data alone while a run reads it", file->path);
    input_read(file, offsetof(TokenShard, header_crc), &crc, sizeof(crc));
    if (crc != s->header_crc)
        die("%s: is another file than when it was opened; leave the data alone while a run reads it", file->path);
    d->file_shard[slot] = shard;
    return file;
}

static DocumentRef documents_find(DataLoader *d, size_t document) {
    const size_t shard = last_at_most(&d->shard[0].documents_before, sizeof(d->shard[0]), d->shards, document);
    const TokenShard *s = &d->shard[shard].header;
    DocumentRef at = {&d->shard[shard], documents_file(d, shard), document - d->shard[shard].documents_before, {0}};
    if (d->regular) { // the document's place follows from its number
        at.entry.first = at.number * s->regular, at.entry.tokens = s->regular + 1, at.entry.targets = s->regular;
        return at;
    }
    input_read(at.file, s->table + at.number * TOKEN_SHARD_ENTRY, &at.entry, TOKEN_SHARD_ENTRY);
    if (at.entry.first > s->tokens || at.entry.tokens > s->tokens - at.entry.first)
        die("%s: document %zu is not where it was when the file was opened; leave the data alone while a run reads it",
            s->path, at.number);
    return at;
}

// Finds the document of a token that is counted over all shards, as in files of log-probabilities. For messages
static DocumentRef documents_find_token(DataLoader *d, size_t token) {
    size_t low = 0, high = d->documents;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        const DocumentRef at = documents_find(d, middle);
        if (at.shard->tokens_before + at.entry.first <= token)
            low = middle;
        else
            high = middle;
    }
    return documents_find(d, low);
}

// ---- checks ---------------------------------------------------------------------------------------------------------
static void documents_check_crc(const DocumentRef *at, uint32_t crc) {
    if (crc != at->entry.crc)
        die("%s: the checksum of document %zu is wrong, the file is damaged; copy or write it again",
            at->shard->header.path, at->number);
}

// Verifies the checksum of a document of any length: ids, masks and values.
static void documents_check_whole(DataLoader *d, const DocumentRef *at) {
    const TokenShard *s = &at->shard->header;
    const size_t first = at->entry.first, tokens = at->entry.tokens;
    const size_t begin[3] = {s->ids + first * s->id_bytes, s->masks + first, s->values + first * sizeof(float)};
    const size_t bytes[3] = {tokens * s->id_bytes, tokens, s->values ? tokens * sizeof(float) : 0};
    uint32_t crc = 0;
    for (int i = 0; i < 3; i++) {
        for (size_t done = 0, count; done < bytes[i]; done += count) {
            count = min_size(bytes[i] - done, d->buffer_bytes);
            input_read(at->file, begin[i] + done, d->buffer, count);
            crc = crc32_of(crc, d->buffer, count);
        }
    }
    documents_check_crc(at, crc);
}

// Returns a token's id after checking its range. token: index in the document
static int32_t documents_checked_id(const DocumentRef *at, size_t token, uint32_t id) {
    const TokenShard *s = &at->shard->header;
    if (id < s->vocabulary) return (int32_t)id;
    if (s->regular)
        die("%s: token %zu is %u, outside the model's vocabulary of %zu; prepare the data again with this model's "
            "tokenizer",
            s->path, at->entry.first + token, id, s->vocabulary);
    die("%s: document %zu, token %zu is %u, outside the vocabulary of %zu ids that the shard was made with; write it "
        "again",
        s->path, at->number, token, id, s->vocabulary);
}

// ---- segments into a batch ------------------------------------------------------------------------------------------
// Tokens [first, first + tokens) of a document, in the loader's buffer; masks and values may be NULL
typedef struct {
    size_t first;
    const unsigned char *ids, *masks, *values;
} SegmentBytes;

static SegmentBytes documents_read_bytes(DataLoader *d, const DocumentRef *at, size_t first, size_t tokens) {
    const TokenShard *s = &at->shard->header;
    const size_t section[3] = {s->ids, s->masks, s->values}, width[3] = {s->id_bytes, 1, sizeof(float)};
    const unsigned char *found[3] = {NULL, NULL, NULL};
    unsigned char *end = d->buffer;
    for (int i = 0; i < 3; i++) {
        if (!section[i]) continue;
        input_read(at->file, section[i] + (at->entry.first + first) * width[i], end, tokens * width[i]);
        found[i] = end, end += tokens * width[i];
    }
    if (!d->regular && tokens == at->entry.tokens)
        documents_check_crc(at, crc32_of(0, d->buffer, (size_t)(end - d->buffer)));
    const SegmentBytes bytes = {first, found[0], found[1], found[2]};
    return bytes;
}

// Copies tokens and targets of a segment to positions [to, to + n) of the batch. Target -1: none
static void documents_fill(const DocumentRef *at, const SegmentBytes *bytes, const Segment *segment, Batch *batch,
                           size_t to) {
    const TokenShard *s = &at->shard->header;
    const size_t n = segment->positions;
    size_t targets = 0;
    for (size_t i = 0; i <= n; i++) {
        const size_t token = bytes->first + i;
        const int32_t id = documents_checked_id(at, token, shard_id(s, bytes->ids, i));
        const unsigned mask = bytes->masks ? bytes->masks[i] : token > 0;
        if (mask > (token > 0))
            die("%s: document %zu, token %zu has the mask %u; a mask is 0 or 1, and 0 for the first token; write the "
                "shard again",
                s->path, at->number, token, mask);
        if (i < n) batch->tokens[to + i] = id;
        if (i == 0) continue; // the first token is not predicted in this segment
        batch->targets[to + i - 1] = mask ? id : -1;
        batch->loss_weight[to + i - 1] = (float)mask;
        targets += mask;
    }
    if (targets != segment->targets)
        die("%s: document %zu has %zu targets, but the document table says %u; prepare the shard again", s->path,
            at->number, targets, segment->targets);
}

// Copies the advantages of a segment's n targets.
static void documents_fill_advantages(const DocumentRef *at, const SegmentBytes *bytes, size_t n, float *advantage) {
    memcpy(advantage, bytes->values + sizeof(float), n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        if (!isfinite(advantage[i]))
            die("%s: document %zu, token %zu has the advantage %f; prepare the data again with finite advantages",
                at->shard->header.path, at->number, bytes->first + i + 1, (double)advantage[i]);
}

// Appends a segment to the batch, with the values that objectives need.
static void documents_read_segment(DataLoader *d, const Segment *segment, Batch *batch) {
    const DataSettings *settings = &d->settings;
    DocumentRef at = documents_find(d, segment->document);
    const size_t first = segment->part * settings->T, n = segment->positions, to = batch->N;
    const size_t token = at.shard->tokens_before + at.entry.first + first;
    const int whole = first == 0 && at.entry.tokens == n + 1;
    unsigned char *checked = d->checked ? &d->checked[segment->document / 8] : NULL;
    const unsigned char bit = (unsigned char)(1u << segment->document % 8);
    if (first + n + 1 > at.entry.tokens || (!whole && !checked))
        die("%s: document %zu is not as long as it was when the file was opened; leave the data alone while a run "
            "reads it",
            at.shard->header.path, at.number);
    if (!whole && !(*checked & bit)) {
        documents_check_whole(d, &at);
        *checked |= bit;
    }
    SegmentBytes bytes = documents_read_bytes(d, &at, first, n + 1);
    documents_fill(&at, &bytes, segment, batch, to);
    if (bytes.values && batch->advantage) documents_fill_advantages(&at, &bytes, n, batch->advantage + to);
    if (batch->reward) batch->reward[batch->documents] = at.entry.reward;
    if (batch->origin) batch->origin[batch->documents] = token;
    if (batch->reference && settings->reference)
        logprobs_read(settings->reference, token + 1, n, batch->reference + to);
    if (batch->old && settings->old) logprobs_read(settings->old, token + 1, n, batch->old + to);
    if (settings->teacher && (batch->reference || batch->teacher.id))
        teacher_read(settings->teacher, token + 1, batch, to, n);
    batch->document_start[batch->documents++] = to;
    batch->N += n;
    batch->document_start[batch->documents] = batch->N;
}

// Sets the rows that the documents of a pair or group share, which are the batch's documents from `first` on.
static void documents_share_rows(DataLoader *d, size_t sample, size_t first, Batch *batch) {
    const size_t least = sample_shared(&d->sample[sample]);
    size_t shared = least + PREFIX_MARGIN;
    for (size_t i = first + 1; i < batch->documents; i++) {
        shared = batch_common(batch, first, i, shared);
        if (shared >= least) continue;
        const DocumentRef at = documents_find(d, d->segment[d->sample[sample].first + i - first].document);
        die("%s: document %zu marks a prompt of %zu tokens that its %s does not share; prepare the data again, or "
            "give --share-prefixes off",
            at.shard->header.path, at.number, at.entry.prompt, at.shard->header.kind == KIND_PAIRS ? "pair" : "group");
    }
    for (size_t i = first + 1; i < batch->documents; i++) batch->common[i] = shared;
}

// Checks that a document shares rows with the one before it, as when the family was found.
static void documents_check_family(DataLoader *d, const Segment *segment, const Batch *batch) {
    const size_t i = batch->documents - 1;
    if (!batch->common[i] || batch_common(batch, i - 1, i, batch->common[i]) == batch->common[i]) return;
    const DocumentRef at = documents_find(d, segment->document);
    die("%s: document %zu begins otherwise than when the file was opened; leave the data alone while a run reads it",
        at.shard->header.path, at.number);
}

// Appends a sample. Computes advantages from the group's rewards: one advantage for all positions of a document.
static void documents_read_sample(DataLoader *d, size_t sample, size_t group, Batch *batch) {
    const size_t first = batch->documents;
    size_t i, end = documents_sample(d, sample, &i);
    for (; i < end; i++) {
        const Segment segment = documents_segment(d, i);
        if (batch->documents == d->bound.documents || segment.positions > d->bound.N - batch->N)
            die("internal: a sequence is larger than the bound of its data; please report it");
        if (batch->group) batch->group[batch->documents] = group;
        documents_read_segment(d, &segment, batch);
        if (batch->common) batch->common[batch->documents - 1] = d->common ? d->common[i] : 0;
        if (batch->common && d->common) documents_check_family(d, &segment, batch);
    }
    if (d->shares == PREFIXES_OF_PROMPTS && d->sample[sample].forks) documents_share_rows(d, sample, first, batch);
    if (!batch->reward || !batch->advantage) return;
    group_advantages(batch->reward + first, batch->documents - first, d->settings.scale_rewards, d->advantage);
    for (i = first; i < batch->documents; i++)
        for (size_t t = batch->document_start[i]; t < batch->document_start[i + 1]; t++)
            batch->advantage[t] = (float)d->advantage[i - first];
}

// ---- prompts --------------------------------------------------------------------------------------------------------
// Reads a prompt for rollouts (rollout.h) from a loader that was opened with DATA_PROMPTS. Prompts come from documents
// that mark their prompt's end, from groups (one prompt each), or from shards of prompts. The reference answer, which
// is not trained on, follows the prompt; a group has none. ids: [room] prompt and answer, cut at `room`.
// *prompt_tokens: tokens of the prompt; *tokens: tokens of prompt and answer, uncut
static void prompts_read(DataLoader *d, size_t prompt, int32_t *ids, size_t room, size_t *prompt_tokens,
                         size_t *tokens) {
    DocumentRef at = documents_find(d, d->prompt[prompt]);
    const TokenShard *s = &at.shard->header;
    *prompt_tokens = at.entry.prompt, *tokens = prompts_text_tokens(&at);
    documents_check_whole(d, &at);
    const size_t n = min_size(*tokens, room);
    for (size_t done = 0, count; done < n; done += count) {
        count = min_size(n - done, d->buffer_bytes / s->id_bytes);
        input_read(at.file, s->ids + (at.entry.first + done) * s->id_bytes, d->buffer, count * s->id_bytes);
        for (size_t i = 0; i < count; i++)
            ids[done + i] = documents_checked_id(&at, done + i, shard_id(s, d->buffer, i));
    }
}

// Reads the additional columns of a prompt's row into text[longest_columns], as a JSON object on one line. Returns the
// bytes of the object; 0: the shard has no additional columns
static size_t prompts_columns(DataLoader *d, size_t prompt, char *text) {
    const DocumentRef at = documents_find(d, d->prompt[prompt]);
    const TokenShard *s = &at.shard->header;
    ShardColumns entry;
    if (!s->columns) return 0;
    input_read(at.file, s->columns + at.number * TOKEN_SHARD_COLUMNS, &entry, TOKEN_SHARD_COLUMNS);
    if (entry.bytes > d->longest_columns || entry.first > s->begin.bytes - shard_columns_text(s))
        die("%s: the columns of document %zu are not where they were when the file was opened; leave the data alone "
            "while a run reads it",
            s->path, at.number);
    input_read(at.file, shard_columns_text(s) + entry.first, text, entry.bytes);
    if (crc32_of(0, text, entry.bytes) != entry.crc)
        die("%s: the checksum of the columns of document %zu is wrong, the file is damaged; copy or write it again",
            s->path, at.number);
    int good = entry.bytes >= 2 && text[0] == '{' && text[entry.bytes - 1] == '}';
    for (size_t i = 0; i < entry.bytes; i++)
        good &= (unsigned char)text[i] >= 0x20; // no line breaks: a command reads
                                                // it as one line
    if (!good)
        die("%s: the columns of document %zu are not a JSON object on one line; write it again", s->path, at.number);
    return entry.bytes;
}

#endif
