/*
Streams from shards of documents (shard.h). A document of n tokens is n-1 positions: it reads tokens[0..n-2] and predicts
tokens[1..n-1], those that count. One of more than T positions is split into pieces of T, each a document of its own whose positions
begin at 0 (the last token of one is the first of the next: target here, input there), or truncated, or refused. Pieces without a
target that counts are left out. Pieces are packed into streams of at most B*T positions (packing.h); what cannot be filled is not
there: a stream may be shorter.

A place is one number, epoch * pieces + stream: there are never more streams than pieces. Opening reads headers and tables, and the
counts of long documents with masks; going to a place reads nothing but repeats that epoch's packing. In memory are 16 bytes a piece,
and the order of two epochs: this one, and the one that a step over its end needs. Nothing is allocated after opening.
*/
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H
#include "batch.h"
#include "packing.h"
#include "shard.h"

#define OPEN_SHARDS            32 // files kept open at a time
#define DOCUMENTS_BUFFER_BYTES ((size_t)1 << 18)
#define PLACES                 ((uint64_t)1 << 53) // whole numbers that JSON keeps

typedef enum { SHUFFLE_AUTO, SHUFFLE_ON, SHUFFLE_OFF } Shuffle;
typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_REFUSE } LongDocuments;

// Of a data loader: what it shall make of its shards.
typedef struct {
    size_t B, T, vocab_size;
    Shuffle shuffle; // auto: documents are, llm.c's shards are not
    LongDocuments long_documents;
    uint64_t seed;
    const char *tokenizer_path; // the model's tokenizer, that shards must have been made with; NULL: not known
} DataSettings;

// The largest stream there will be: all that a plan needs to know.
typedef struct {
    size_t N, documents, longest; // positions, documents, positions of the longest document
} StreamBound;

typedef struct {
    TokenShard header;
    size_t documents_before; // in the shards before it
} DocumentShard;

typedef struct {
    DataSettings settings;
    DocumentShard *shard; // [shards], sorted by path
    size_t shards, documents;
    Piece *piece; // [pieces]
    size_t pieces;
    size_t long_documents, left_out; // documents above T positions; pieces without a counted target
    uint64_t positions_cut;          // by truncation
    unsigned char *checked; // a bit for each document that is not one piece: its checksum was right. NULL: none
    Packing packing;
    EpochStreams epoch[2]; // of even and odd epochs
    StreamBound bound;
    size_t first_epoch_streams;
    uint64_t next; // the place
    InputFile file[OPEN_SHARDS];
    size_t file_shard[OPEN_SHARDS]; // whose file it is
    unsigned char *buffer;          // [DOCUMENTS_BUFFER_BYTES]
} Documents;

// ---- opening: pieces ---------------------------------------------------------------------------------------------------------
static inline size_t pieces_of_document(const DataSettings *s, uint64_t tokens) {
    return s->long_documents == LONG_SPLIT ? (size_t)((tokens - 1 + s->T - 1) / s->T) : 1;
}

// Sum of the counts of tokens [first, first + n) of the shard; a count is 0 or 1.
static inline size_t documents_sum_counts(Documents *d, const TokenShard *s, const InputFile *file, uint64_t first,
                                          size_t n) {
    size_t sum = 0, done, part, i;
    for (done = 0; done < n; done += part) {
        part = min_size(n - done, DOCUMENTS_BUFFER_BYTES);
        input_read(file, s->counts + first + done, d->buffer, part);
        for (i = 0; i < part; i++) sum += d->buffer[i] != 0;
    }
    return sum;
}

static inline void documents_add_piece(Documents *d, size_t document, size_t part, size_t positions, size_t counted) {
    Piece *piece = &d->piece[d->pieces];
    if (!counted) {
        d->left_out++;
        return;
    }
    piece->document = (uint32_t)document, piece->part = (uint32_t)part;
    piece->positions = (uint32_t)positions, piece->counted = (uint32_t)counted;
    d->pieces++;
}

static inline void documents_add(Documents *d, const TokenShard *s, const InputFile *file, size_t document,
                                 const ShardDocument *entry) {
    const uint64_t positions = entry->tokens - 1, T = d->settings.T;
    size_t parts = pieces_of_document(&d->settings, entry->tokens), k;
    if (positions <= T) {
        documents_add_piece(d, document, 0, (size_t)positions, (size_t)entry->counted);
        return;
    }
    d->long_documents++;
    if (d->settings.long_documents == LONG_TRUNCATE) d->positions_cut += positions - T;
    for (k = 0; k < parts; k++) { // position t's target is token t + 1
        size_t n = (size_t)(positions - k * T < T ? positions - k * T : T);
        size_t counted =
            entry->counted == positions ? n : documents_sum_counts(d, s, file, entry->first + k * T + 1, n);
        documents_add_piece(d, document, k, n, counted);
    }
}

// Every entry of the table of one shard: how many pieces there may be, or, with `add`, the pieces themselves.
static inline uint64_t documents_walk_table(Documents *d, size_t index, const InputFile *file, unsigned char *table,
                                            int add) {
    const TokenShard *s = &d->shard[index].header;
    uint64_t first, pieces = 0;
    size_t count, i;
    for (first = 0; first < s->documents; first += count) {
        count = (size_t)(s->documents - first < TABLE_ENTRIES ? s->documents - first : TABLE_ENTRIES);
        shard_read_entries(s, file, first, count, table);
        for (i = 0; i < count; i++) {
            ShardDocument entry = shard_document(table + i * TOKEN_SHARD_ENTRY);
            if (d->settings.long_documents == LONG_REFUSE && entry.tokens - 1 > d->settings.T)
                die("%s: document %llu has %llu tokens, --seq-len %zu takes %zu; take a longer --seq-len or --long "
                    "split or truncate",
                    s->path, (unsigned long long)(first + i), (unsigned long long)entry.tokens, d->settings.T,
                    d->settings.T + 1);
            pieces += pieces_of_document(&d->settings, entry.tokens);
            if (add) documents_add(d, s, file, d->shard[index].documents_before + (size_t)(first + i), &entry);
        }
    }
    return pieces;
}

static inline void documents_check_tokenizers(const Documents *d) {
    const DataSettings *settings = &d->settings;
    const TokenShard *first = &d->shard[0].header;
    uint64_t wanted;
    size_t i;
    for (i = 0; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        if (s->tokenizer != first->tokenizer)
            die("%s was made with tokenizer %s, %s with %s, another one; prepare both with the model's own",
                first->path, first->tokenizer_name, s->path, s->tokenizer_name);
        if (s->vocabulary > settings->vocab_size)
            die("%s: its tokenizer %s has %llu ids, the model's vocabulary only %zu; prepare the data with the model's "
                "own "
                "tokenizer",
                s->path, s->tokenizer_name, (unsigned long long)s->vocabulary, settings->vocab_size);
    }
    if (!settings->tokenizer_path) return;
    wanted = tokenizer_fingerprint(settings->tokenizer_path);
    if (wanted != first->tokenizer)
        die("%s was made with tokenizer %s (%016llx), the model's is %s (%016llx); prepare the data with that, or give "
            "--any-tokenizer if the ids are meant for this model",
            first->path, first->tokenizer_name, (unsigned long long)first->tokenizer, settings->tokenizer_path,
            (unsigned long long)wanted);
}

static inline void documents_tell(const Documents *d) {
    const char *path = d->shard[0].header.path, *others = d->shards > 1 ? " and others" : "";
    const size_t T = d->settings.T;
    if (d->long_documents && d->settings.long_documents == LONG_SPLIT)
        note("%s%s: %zu of %zu documents are longer than --seq-len %zu and are split; %zu pieces in all (--long "
             "truncate or "
             "refuse)",
             path, others, d->long_documents, d->documents, T, d->pieces);
    if (d->long_documents && d->settings.long_documents == LONG_TRUNCATE)
        note("%s%s: %zu of %zu documents are longer than --seq-len %zu and are truncated, by %llu tokens in all", path,
             others, d->long_documents, d->documents, T, (unsigned long long)d->positions_cut);
    if (d->left_out)
        note("%s%s: %zu pieces of documents are left out, no target in them counts", path, others, d->left_out);
}

static inline void documents_find_pieces(Documents *d) {
    unsigned char *table =
        (unsigned char *)checked_malloc((size_t)TABLE_ENTRIES * TOKEN_SHARD_ENTRY, "a part of a document table");
    uint64_t most = 0;
    size_t i;
    int pass;
    for (pass = 0; pass < 2; pass++) {
        for (i = 0; i < d->shards; i++) {
            const TokenShard *s = &d->shard[i].header;
            InputFile file = input_open(s->path);
            if (!pass) shard_check_table(s, &file, table);
            most += documents_walk_table(d, i, &file, table, pass) * !pass;
            input_close(&file);
        }
        if (pass) break;
        if (most >= UINT32_MAX || d->documents >= UINT32_MAX)
            die("%s and others: %zu documents in %llu pieces are more than one run takes (%u); give fewer shards",
                d->shard[0].header.path, d->documents, (unsigned long long)most, UINT32_MAX);
        d->piece = (Piece *)checked_calloc((size_t)most, sizeof(Piece), "the index of the documents");
    }
    free(table);
    documents_tell(d);
    if (!d->pieces)
        die("%s%s: holds nothing that can be learnt: no target counts within %s", d->shard[0].header.path,
            d->shards > 1 ? " and others" : "", d->documents ? "--seq-len" : "its 0 documents");
    if (d->long_documents)
        d->checked = (unsigned char *)checked_calloc(d->documents / 8 + 1, 1, "the checked documents");
}

// ---- opening: the largest stream ----------------------------------------------------------------------------------------------
// Of what is not shuffled: the largest that there is. Else of all that any epoch may have: no more positions than fit, and no more
// documents than of the shortest fit.
static inline StreamBound documents_bound(const Documents *d) {
    const EpochStreams *e = &d->epoch[0];
    StreamBound bound = {0, 0, 0};
    size_t s, i, N;
    for (i = 0; i < d->pieces; i++) bound.longest = max_size(bound.longest, d->piece[i].positions);
    if (d->packing.shuffle) {
        PackingItem *item =
            (PackingItem *)checked_calloc(2 * d->pieces, sizeof(PackingItem), "the lengths of all pieces");
        bound.N = (size_t)(d->packing.positions < d->packing.capacity ? d->packing.positions : d->packing.capacity);
        for (i = 0; i < d->pieces; i++) item[i].positions = d->piece[i].positions;
        packing_sort(item, item + d->pieces, d->pieces);
        for (i = d->pieces, N = 0; i-- > 0 && N + item[i].positions <= bound.N;)
            N += item[i].positions, bound.documents++;
        free(item);
        return bound;
    }
    for (s = 0; s < e->streams; s++) {
        for (i = e->begin[s], N = 0; i < e->begin[s + 1]; i++) N += d->piece[e->order[i]].positions;
        bound.N = max_size(bound.N, N);
        bound.documents = max_size(bound.documents, e->begin[s + 1] - e->begin[s]);
    }
    return bound;
}

// paths: taken over.
static inline Documents documents_open(ShardPaths *paths, const DataSettings *settings) {
    Documents d;
    size_t i;
    memset(&d, 0, sizeof(d));
    if (settings->B * settings->T > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one stream, at most %d can be indexed; use --grad-accum",
                  settings->B * settings->T, INT32_MAX);
    crc32_prepare();
    d.settings = *settings;
    for (i = 0; i < OPEN_SHARDS; i++) d.file[i].fd = -1;
    d.shards = paths->count;
    d.shard = (DocumentShard *)checked_calloc(d.shards, sizeof(DocumentShard), "the list of shards");
    d.buffer = (unsigned char *)checked_malloc(DOCUMENTS_BUFFER_BYTES, "the buffer of the data loader");
    for (i = 0; i < d.shards; i++) {
        InputFile file = input_open(paths->path[i]);
        d.shard[i].header = shard_read_header(&file, paths->path[i]);
        d.shard[i].documents_before = d.documents;
        d.documents += (size_t)d.shard[i].header.documents;
        input_close(&file);
    }
    shard_paths_free(paths);
    documents_check_tokenizers(&d);
    documents_find_pieces(&d);
    d.packing = packing_allocate(d.piece, d.pieces, settings->B * settings->T, settings->shuffle != SHUFFLE_OFF,
                                 settings->seed);
    d.epoch[0] = epoch_streams_allocate(&d.packing);
    if (d.packing.shuffle) d.epoch[1] = epoch_streams_allocate(&d.packing);
    packing_epoch(&d.packing, &d.epoch[0], 0);
    d.first_epoch_streams = d.epoch[0].streams;
    d.bound = documents_bound(&d);
    return d;
}

static inline void documents_close(Documents *d) {
    size_t i;
    for (i = 0; i < OPEN_SHARDS; i++)
        if (d->file[i].fd >= 0) close(d->file[i].fd);
    for (i = 0; i < d->shards; i++) free(d->shard[i].header.path);
    free(d->shard), free(d->piece), free(d->checked), free(d->buffer);
    packing_free(&d->packing);
    epoch_streams_free(&d->epoch[0]), epoch_streams_free(&d->epoch[1]);
    memset(d, 0, sizeof(*d));
}

// Changes with the documents (a header's checksum covers its table's, the table holds the documents'), their order, and everything
// that decides which of them a place is.
static inline uint64_t documents_fingerprint(const Documents *d) {
    const DataSettings *s = &d->settings;
    uint64_t mixed = random_mix(random_mix(s->B) ^ s->T);
    size_t i;
    mixed = random_mix(mixed ^ (uint64_t)s->long_documents);
    mixed = random_mix(mixed ^ (uint64_t)d->packing.shuffle);
    if (d->packing.shuffle) mixed = random_mix(mixed ^ s->seed);
    for (i = 0; i < d->shards; i++) {
        const TokenShard *header = &d->shard[i].header;
        mixed = random_mix(mixed ^ ((uint64_t)header->header_crc << 32 | header->table_crc));
        mixed = random_mix(mixed ^ header->bytes);
    }
    return mixed;
}

// ---- places ------------------------------------------------------------------------------------------------------------------
// The streams of the epoch that a place is in, packed again if they are not at hand.
static inline const EpochStreams *documents_epoch(Documents *d, uint64_t place) {
    uint64_t epoch = d->packing.shuffle ? place / d->pieces : 0;
    EpochStreams *e = &d->epoch[epoch & 1];
    if (e->epoch != epoch) packing_epoch(&d->packing, e, epoch);
    if (place % d->pieces >= e->streams)
        die("the place %llu is not in this data, whose epoch %llu has %zu streams; was it another run's?",
            (unsigned long long)place, (unsigned long long)epoch, e->streams);
    return e;
}

static inline uint64_t documents_after(Documents *d, uint64_t place) {
    const EpochStreams *e = documents_epoch(d, place);
    uint64_t after = place % d->pieces + 1 < e->streams ? place + 1 : (place / d->pieces + 1) * d->pieces;
    if (after >= PLACES)
        die("epoch %llu of %zu pieces is beyond what a place can number", (unsigned long long)(after / d->pieces),
            d->pieces);
    return after;
}

// The pieces of the stream at a place: piece[order[*begin .. end)].
static inline size_t documents_stream(Documents *d, uint64_t place, const EpochStreams **e, size_t *begin) {
    size_t stream;
    *e = documents_epoch(d, place);
    stream = (*e)->stream[place % d->pieces];
    *begin = (*e)->begin[stream];
    return (*e)->begin[stream + 1];
}

// Targets that count in the stream at a place; the index knows.
static inline double documents_counted(Documents *d, uint64_t place) {
    const EpochStreams *e;
    size_t begin, end = documents_stream(d, place, &e, &begin);
    double sum = 0;
    for (; begin < end; begin++) sum += (double)d->piece[e->order[begin]].counted;
    return sum;
}

// ---- reading -----------------------------------------------------------------------------------------------------------------
// A shard's file: kept open, or opened again. Nothing is allocated here: this happens in the middle of training.
static inline const InputFile *documents_file(Documents *d, size_t shard) {
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

typedef struct {
    const TokenShard *shard;
    const InputFile *file;
    uint64_t number; // in its shard
    ShardDocument entry;
} DocumentAt;

static inline DocumentAt documents_find(Documents *d, size_t document) {
    unsigned char entry[TOKEN_SHARD_ENTRY];
    size_t shard = last_at_most(&d->shard[0].documents_before, sizeof(d->shard[0]), d->shards, document);
    DocumentAt at;
    at.shard = &d->shard[shard].header;
    at.file = documents_file(d, shard);
    at.number = document - d->shard[shard].documents_before;
    shard_read_entries(at.shard, at.file, at.number, 1, entry);
    at.entry = shard_document(entry);
    if (at.entry.first > at.shard->tokens || at.entry.tokens > at.shard->tokens - at.entry.first)
        die("%s: document %llu is not where it was when the file was opened; leave the data alone while a run reads it",
            at.shard->path, (unsigned long long)at.number);
    return at;
}

static inline void documents_check_crc(const DocumentAt *at, uint32_t crc) {
    if (crc != at->entry.crc)
        die("%s: the checksum of document %llu is wrong, the file is damaged; copy or write it again", at->shard->path,
            (unsigned long long)at->number);
}

// Of a document that is read in parts: its whole checksum, the first time.
static inline void documents_check_whole(Documents *d, size_t document, const DocumentAt *at) {
    const uint64_t begin[2] = {at->shard->ids + at->entry.first * at->shard->id_bytes,
                               at->shard->counts + at->entry.first};
    const uint64_t bytes[2] = {at->entry.tokens * at->shard->id_bytes, at->entry.tokens};
    uint32_t crc = 0;
    size_t part;
    int i;
    if (d->checked[document / 8] >> document % 8 & 1) return;
    for (i = 0; i < 2; i++) {
        uint64_t done;
        for (done = 0; done < bytes[i]; done += part) {
            part = (size_t)(bytes[i] - done < DOCUMENTS_BUFFER_BYTES ? bytes[i] - done : DOCUMENTS_BUFFER_BYTES);
            input_read(at->file, begin[i] + done, d->buffer, part);
            crc = crc32_of(crc, d->buffer, part);
        }
    }
    documents_check_crc(at, crc);
    d->checked[document / 8] |= (unsigned char)(1u << document % 8);
}

typedef struct {
    int found;
    size_t place;
    uint32_t value;
} Misfit; // the first id outside of the vocabulary, the first count that is none

// The n + 1 ids from token `first` of the document on, into the n positions behind `at`; returns their checksum.
static inline uint32_t documents_read_ids(Documents *d, const DocumentAt *document, uint64_t first, size_t n,
                                          Batch *batch, size_t at, Misfit *bad) {
    const TokenShard *s = document->shard;
    size_t done, part, i;
    uint32_t crc = 0;
    memset(bad, 0, sizeof(*bad));
    for (done = 0; done <= n; done += part) {
        part = min_size(n + 1 - done, DOCUMENTS_BUFFER_BYTES / s->id_bytes);
        input_read(document->file, s->ids + (document->entry.first + first + done) * s->id_bytes, d->buffer,
                   part * s->id_bytes);
        crc = crc32_of(crc, d->buffer, part * s->id_bytes);
        for (i = 0; i < part; i++) {
            const unsigned char *bytes = d->buffer + i * s->id_bytes;
            uint32_t id = s->id_bytes == 2 ? shard_uint16(bytes) : shard_uint32(bytes);
            if (id >= s->vocabulary && !bad->found) bad->found = 1, bad->place = done + i, bad->value = id;
            if (done + i < n) batch->tokens[at + done + i] = (int32_t)id;
            if (done + i > 0) batch->targets[at + done + i - 1] = (int32_t)id;
        }
    }
    return crc;
}

// Masks the targets that do not count; returns how many do.
static inline size_t documents_read_counts(Documents *d, const DocumentAt *document, uint64_t first, size_t n,
                                           Batch *batch, size_t at, uint32_t *crc, Misfit *bad) {
    size_t done, part, i, counted = 0;
    memset(bad, 0, sizeof(*bad));
    for (done = 0; done <= n; done += part) {
        part = min_size(n + 1 - done, DOCUMENTS_BUFFER_BYTES);
        input_read(document->file, document->shard->counts + document->entry.first + first + done, d->buffer, part);
        *crc = crc32_of(*crc, d->buffer, part);
        for (i = 0; i < part; i++) {
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

static inline void documents_read_piece(Documents *d, const Piece *piece, Batch *batch, size_t at) {
    DocumentAt document = documents_find(d, piece->document);
    const uint64_t first = (uint64_t)piece->part * d->settings.T;
    const size_t n = piece->positions;
    const int whole = first == 0 && document.entry.tokens == (uint64_t)n + 1;
    Misfit bad_id, bad_count;
    size_t counted;
    uint32_t crc;
    if (first + n + 1 > document.entry.tokens || (!whole && !d->checked))
        die("%s: document %llu is not as long as it was when the file was opened; leave the data alone while a run "
            "reads it",
            document.shard->path, (unsigned long long)document.number);
    if (!whole) documents_check_whole(d, piece->document, &document);
    crc = documents_read_ids(d, &document, first, n, batch, at, &bad_id);
    counted = documents_read_counts(d, &document, first, n, batch, at, &crc, &bad_count);
    if (whole) documents_check_crc(&document, crc);
    if (bad_id.found)
        die("%s: document %llu, token %llu is %u, outside the vocabulary of %llu ids that the shard was made with; "
            "write it again",
            document.shard->path, (unsigned long long)document.number, (unsigned long long)(first + bad_id.place),
            bad_id.value, (unsigned long long)document.shard->vocabulary);
    if (bad_count.found)
        die("%s: document %llu, token %llu has the count %u, which is 0 or 1, and 0 for the first token; write it "
            "again",
            document.shard->path, (unsigned long long)document.number, (unsigned long long)(first + bad_count.place),
            bad_count.value);
    if (counted != piece->counted)
        die("%s: document %llu has %zu counted targets where its table says %u; write it again", document.shard->path,
            (unsigned long long)document.number, counted, piece->counted);
}

// Fills a batch that has room for the largest stream with the next one.
static inline void documents_next(Documents *d, Batch *batch) {
    const EpochStreams *e;
    size_t begin, end = documents_stream(d, d->next, &e, &begin), i;
    uint64_t after = documents_after(d, d->next);
    if (end - begin > d->bound.documents) die("internal: a stream of more documents than were planned for");
    batch->N = 0, batch->documents = end - begin;
    for (i = begin; i < end; i++) {
        const Piece *piece = &d->piece[e->order[i]];
        if (piece->positions > d->bound.N - batch->N) die("internal: a stream that is longer than was planned for");
        batch->document_start[i - begin] = batch->N;
        documents_read_piece(d, piece, batch, batch->N);
        batch->N += piece->positions;
    }
    batch_set_positions(batch);
    d->next = after;
}

// ---- for people ------------------------------------------------------------------------------------------------------------------
static inline void documents_report(FILE *out, const Documents *d) {
    fprintf(out, "data     %zu documents in %zu shard%s, tokenizer %s; %zu pieces of at most %zu positions\n",
            d->documents, d->shards, d->shards > 1 ? "s" : "", d->shard[0].header.tokenizer_name, d->pieces,
            d->bound.longest);
    fprintf(out, "packing  %zu streams of at most %zu positions, %.1f %% full, %s\n", d->first_epoch_streams,
            d->packing.capacity, 100 * packing_fill(&d->packing, d->first_epoch_streams),
            d->packing.shuffle ? "shuffled every epoch" : "in the order of the files");
}

#endif
