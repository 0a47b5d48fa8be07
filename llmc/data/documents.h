/*
Shards of documents (shard.h) as the pieces and streams of a run: opening them, what there is to train on, places.
Reading them is documents_read.h's.

A document of n tokens is n-1 positions: it reads tokens[0..n-2] and predicts tokens[1..n-1], those that count. One of
more than T positions is split into pieces of T, each a document of its own whose positions begin at 0 (the last token
of one is the first of the next: target here, input there), or truncated, or refused. Pieces without a target that
counts are left out. A preference pair or a group of completions is a unit: its documents are not split, lie in one
stream in their order, and are left out together; else every piece is a unit. Units are packed (packing.h) into streams
of at most B*T positions, of pairs and groups B times as many documents as the largest has; what cannot be filled is not
there: a stream may be shorter.

A place is one number, epoch * units + stream: there are never more streams than units. Opening reads headers and
tables, and the counts of long documents with masks; going to a place reads nothing but repeats that epoch's packing. In
memory are 16 bytes a piece, 8 a pair or group, and the order of two epochs: this one, and the one that a step over its
end needs. Nothing is allocated after opening.
*/
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H
#include "logprobs.h"
#include "objective.h"
#include "packing.h"
#include "shard.h"
#include "llmc/tokenizer/tokenizer_file.h"

#define OPEN_SHARDS            32 // files kept open at a time
#define DOCUMENTS_BUFFER_BYTES ((size_t)1 << 18)
#define PLACES                 ((uint64_t)1 << 53) // whole numbers that JSON keeps

typedef enum { SHUFFLE_AUTO, SHUFFLE_ON, SHUFFLE_OFF } Shuffle;
typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_REFUSE } LongDocuments;
typedef enum {
    DATA_TRAINS, // streams of what the objective trains on
    DATA_READS,  // streams of all documents, of any kind, each by itself
    DATA_PROMPTS // no streams: prompts (prompts.h)
} DataUse;

// Of a data loader: what it shall make of its shards.
typedef struct {
    size_t B, T, vocab_size;
    Shuffle shuffle; // auto: documents are, llm.c's shards are not
    LongDocuments long_documents;
    uint64_t seed;
    const char *tokenizer_path; // the model's tokenizer, that shards must have been made with; NULL: not known
    DataUse use;
    const Objective *objective;         // NULL: sft
    int scale_rewards;                  // a group's advantages are divided by the standard deviation of its rewards
    const LogprobFile *reference, *old; // NULL: none; may also be put into a loader that is open
} DataSettings;

// The largest stream there will be: all that a plan needs to know.
typedef struct {
    size_t N, documents, longest; // positions, documents, positions of the longest document
} SequenceBound;

typedef struct {
    TokenShard header;
    size_t documents_before, tokens_before; // in the shards before it
} DocumentShard;

// A document, or a part of one: positions [part * T, part * T + positions) of document number `document`.
typedef struct {
    uint32_t document, part;
    uint32_t positions;
    uint32_t counted; // of its targets
} Piece;

// A pair or a group: pieces [first, the next one's first)
typedef struct {
    uint32_t first;
    uint32_t positions; // of all its pieces
} Unit;

typedef struct {
    DataSettings settings;
    DocumentShard *shard; // [shards], sorted by path
    size_t shards, documents;
    Piece *piece; // [pieces]
    size_t pieces;
    Unit *unit;                     // [units + 1], the last one begins behind all pieces; NULL: every piece is one
    size_t units, largest_unit;     // pairs or groups that are trained on; documents of the largest
    size_t long_documents;          // above T positions
    size_t left_out;                // pieces, or pairs and groups, without counted targets
    uint64_t positions_cut;         // by truncation
    uint32_t *prompt;               // [prompts] their documents; with DATA_PROMPTS
    size_t prompts, longest_prompt; // longest: in tokens
    unsigned char *checked;         // a bit for each document that is not one piece: its checksum was right. NULL: none
    Packing packing;
    EpochSequences epoch[2]; // of even and odd epochs
    SequenceBound bound;
    size_t first_epoch_sequences;
    uint64_t next; // the place
    InputFile file[OPEN_SHARDS];
    size_t file_shard[OPEN_SHARDS]; // whose file it is
    unsigned char *buffer;          // [DOCUMENTS_BUFFER_BYTES]
    double *advantage;              // [largest_unit] of the documents of a group
} Documents;

// A document and where it lies.
typedef struct {
    const DocumentShard *shard;
    const InputFile *file;
    uint64_t number; // in its shard
    ShardDocument entry;
} DocumentAt;

// ---- opening: which data --------------------------------------------------------------------------------------------
static const struct {
    ShardKind kind;
    int values; // advantages
} objective_data[OBJECTIVES] = {{KIND_DOCUMENTS, 0}, {KIND_PAIRS, 0},  {KIND_PAIRS, 0},    {KIND_PAIRS, 0},
                                {KIND_GROUPS, 0},    {KIND_GROUPS, 0}, {KIND_DOCUMENTS, 1}}; // by ObjectiveKind

static ObjectiveKind data_objective(const DataSettings *s) { return s->objective ? s->objective->kind : OBJECTIVE_SFT; }

static const char *kind_name(ShardKind kind, int values) {
    static const char *const names[] = {"documents", "preference pairs", "groups of completions with rewards",
                                        "prompts alone"};
    return values ? "documents with an advantage for each token" : names[kind];
}

static const char *kind_objectives(ShardKind kind, int values) {
    static const char *const names[] = {"sft", "dpo, simpo or orpo", "grpo or gspo", "grpo or gspo with --rollout"};
    return values ? "ppo" : names[kind];
}

static void documents_check_kinds(const Documents *d) {
    const TokenShard *first = &d->shard[0].header;
    const ObjectiveKind objective = data_objective(&d->settings);
    const ShardKind wanted = objective_data[objective].kind;
    const int values = first->values != 0;
    for (size_t i = 1; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        if (s->kind != first->kind || (s->values != 0) != values)
            die("%s holds %s, %s %s; a run reads one kind, name them apart", first->path,
                kind_name(first->kind, values), s->path, kind_name(s->kind, s->values != 0));
    }
    if (d->settings.use == DATA_TRAINS && (first->kind != wanted || values != objective_data[objective].values))
        die("%s: holds %s, --objective %s trains on %s; give --objective %s, or other data", first->path,
            kind_name(first->kind, values), objective_names[objective],
            kind_name(wanted, objective_data[objective].values), kind_objectives(first->kind, values));
    if (d->settings.use == DATA_READS && first->kind == KIND_PROMPTS)
        die("%s: holds prompts alone, none of whose tokens is a target that counts; give data with answers",
            first->path);
    if (d->settings.use == DATA_PROMPTS && first->kind == KIND_PAIRS)
        die("%s: holds preference pairs, --rollout takes prompts alone, prompts with completions, or groups; prepare "
            "the prompts",
            first->path);
}

static void documents_check_tokenizers(const Documents *d) {
    const DataSettings *settings = &d->settings;
    const TokenShard *first = &d->shard[0].header;
    for (size_t i = 0; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        if (s->tokenizer != first->tokenizer)
            die("%s was made with tokenizer %s, %s with %s, another one; prepare both with the model's own",
                first->path, first->tokenizer_name, s->path, s->tokenizer_name);
        if (s->vocabulary > settings->vocab_size)
            die("%s: its tokenizer %s has %llu ids, the model's vocabulary only %zu; prepare the data with the model's "
                "own tokenizer",
                s->path, s->tokenizer_name, (unsigned long long)s->vocabulary, settings->vocab_size);
    }
    if (!settings->tokenizer_path) return;
    uint64_t wanted = tokenizer_fingerprint(settings->tokenizer_path);
    if (wanted != first->tokenizer)
        die("%s was made with tokenizer %s (%016llx), the model's is %s (%016llx); prepare the data with that, or give "
            "--any-tokenizer if the ids are meant for this model",
            first->path, first->tokenizer_name, (unsigned long long)first->tokenizer, settings->tokenizer_path,
            (unsigned long long)wanted);
}

// ---- opening: tables ------------------------------------------------------------------------------------------------
static uint64_t documents_total_groups(const Documents *d) {
    uint64_t groups = 0;
    for (size_t i = 0; i < d->shards; i++) groups += d->shard[i].header.groups;
    return groups;
}

static void documents_check_tables(Documents *d) {
    unsigned char *table =
        (unsigned char *)checked_malloc((size_t)TABLE_ENTRIES * TOKEN_SHARD_ENTRY, "a part of a document table");
    for (size_t i = 0; i < d->shards; i++) {
        InputFile file = input_open(d->shard[i].header.path);
        shard_check_table(&d->shard[i].header, &file, table);
        input_close(&file);
        d->largest_unit = max_size(d->largest_unit, (size_t)d->shard[i].header.largest_group);
    }
    free(table);
    if (d->documents >= UINT32_MAX)
        die("%s and others: %zu documents are more than one run takes (%u); give fewer shards", d->shard[0].header.path,
            d->documents, UINT32_MAX);
}

// begins: the first document of a pair or group, or one that is in none
typedef void (*DocumentVisit)(Documents *d, const DocumentAt *document, int begins);

// Every document of every table, in order.
static void documents_walk(Documents *d, DocumentVisit visit) {
    unsigned char *table =
        (unsigned char *)checked_malloc((size_t)TABLE_ENTRIES * TOKEN_SHARD_ENTRY, "a part of a document table");
    uint64_t group = 0;
    size_t count;
    for (size_t shard = 0; shard < d->shards; shard++) {
        const TokenShard *s = &d->shard[shard].header;
        InputFile file = input_open(s->path);
        DocumentAt at;
        at.shard = &d->shard[shard], at.file = &file;
        for (uint64_t first = 0; first < s->documents; first += count) {
            count = (size_t)(s->documents - first < TABLE_ENTRIES ? s->documents - first : TABLE_ENTRIES);
            shard_read_entries(s, &file, first, count, table);
            for (size_t i = 0; i < count; i++) {
                at.number = first + i;
                at.entry = shard_document(table + i * TOKEN_SHARD_ENTRY);
                visit(d, &at, at.number == 0 || !kind_has_groups(s->kind) || at.entry.group != group);
                group = at.entry.group;
            }
        }
        input_close(&file);
    }
    free(table);
}

// ---- opening: pieces and units --------------------------------------------------------------------------------------
static size_t pieces_of_document(const DataSettings *s, uint64_t tokens) {
    return s->long_documents == LONG_SPLIT ? (size_t)((tokens - 1 + s->T - 1) / s->T) : 1;
}

// Into d->pieces, how many there may be.
static void documents_count_pieces(Documents *d, const DocumentAt *at, int begins) {
    const DataSettings *settings = &d->settings;
    const TokenShard *s = &at->shard->header;
    const int answers = kind_has_groups(s->kind);
    (void)begins;
    if (at->entry.tokens - 1 > settings->T &&
        (settings->long_documents == LONG_REFUSE || (answers && settings->long_documents == LONG_SPLIT)))
        die("%s: document %llu has %llu tokens, --seq-len %zu takes %zu%s; take a longer --seq-len or --long %s",
            s->path, (unsigned long long)at->number, (unsigned long long)at->entry.tokens, settings->T, settings->T + 1,
            answers ? ", and pairs and groups are not split" : "", answers ? "truncate" : "split or truncate");
    d->pieces += pieces_of_document(settings, at->entry.tokens);
}

// Sum of the counts of tokens [first, first + n) of the shard; a count is 0 or 1.
static size_t documents_sum_counts(Documents *d, const TokenShard *s, const InputFile *file, uint64_t first, size_t n) {
    size_t sum = 0, part;
    for (size_t done = 0; done < n; done += part) {
        part = min_size(n - done, DOCUMENTS_BUFFER_BYTES);
        input_read(file, s->counts + first + done, d->buffer, part);
        for (size_t i = 0; i < part; i++) sum += d->buffer[i] != 0;
    }
    return sum;
}

static void documents_add_piece(Documents *d, size_t document, size_t part, size_t positions, size_t counted) {
    Piece *piece = &d->piece[d->pieces];
    if (!counted && !d->unit) { // of a pair or group, documents_end_unit decides
        d->left_out++;
        return;
    }
    piece->document = (uint32_t)document, piece->part = (uint32_t)part;
    piece->positions = (uint32_t)positions, piece->counted = (uint32_t)counted;
    d->pieces++;
}

// The pair or group whose pieces were added last is complete; it stays if all of them have targets that count.
static void documents_end_unit(Documents *d) {
    Unit *unit = &d->unit[d->units];
    size_t counted = 0;
    if (unit->first == d->pieces) return; // the first one has not begun
    unit->positions = 0;
    for (size_t i = unit->first; i < d->pieces; i++) {
        unit->positions += d->piece[i].positions;
        counted += d->piece[i].counted > 0;
    }
    if (counted == d->pieces - unit->first)
        d->units++;
    else
        d->pieces = unit->first, d->left_out++;
    d->unit[d->units].first = (uint32_t)d->pieces;
}

static void documents_add(Documents *d, const DocumentAt *at, int begins) {
    const size_t document = at->shard->documents_before + (size_t)at->number;
    const uint64_t positions = at->entry.tokens - 1, T = d->settings.T;
    size_t parts = pieces_of_document(&d->settings, at->entry.tokens);
    if (d->unit && begins) documents_end_unit(d);
    if (positions <= T) {
        documents_add_piece(d, document, 0, (size_t)positions, (size_t)at->entry.counted);
        return;
    }
    d->long_documents++;
    if (d->settings.long_documents == LONG_TRUNCATE) d->positions_cut += positions - T;
    for (size_t k = 0; k < parts; k++) { // position t's target is token t + 1
        size_t n = (size_t)(positions - k * T < T ? positions - k * T : T), counted = n;
        if (at->entry.counted != positions)
            counted = documents_sum_counts(d, &at->shard->header, at->file, at->entry.first + k * T + 1, n);
        documents_add_piece(d, document, k, n, counted);
    }
}

static void documents_tell(const Documents *d) {
    const char *path = d->shard[0].header.path, *others = d->shards > 1 ? " and others" : "";
    const size_t T = d->settings.T;
    if (d->long_documents && d->settings.long_documents == LONG_SPLIT)
        note("%s%s: %zu of %zu documents are longer than --seq-len %zu and are split; %zu pieces in all (--long "
             "truncate or refuse)",
             path, others, d->long_documents, d->documents, T, d->pieces);
    if (d->long_documents && d->settings.long_documents == LONG_TRUNCATE)
        note("%s%s: %zu of %zu documents are longer than --seq-len %zu and are truncated, by %llu tokens in all", path,
             others, d->long_documents, d->documents, T, (unsigned long long)d->positions_cut);
    if (d->left_out && d->unit)
        note("%s%s: %zu of %llu %s are left out, no target counts in what --seq-len %zu leaves of one of their "
             "documents",
             path, others, d->left_out, (unsigned long long)documents_total_groups(d),
             d->shard[0].header.kind == KIND_PAIRS ? "pairs" : "groups", T);
    else if (d->left_out)
        note("%s%s: %zu pieces of documents are left out, no target in them counts", path, others, d->left_out);
}

static void documents_find_pieces(Documents *d) {
    const int in_units = d->settings.use == DATA_TRAINS && kind_has_groups(d->shard[0].header.kind);
    documents_walk(d, documents_count_pieces);
    size_t most = d->pieces;
    if (most >= UINT32_MAX)
        die("%s and others: %zu documents in %zu pieces are more than one run takes (%u); give fewer shards",
            d->shard[0].header.path, d->documents, most, UINT32_MAX);
    d->piece = (Piece *)checked_calloc(most, sizeof(Piece), "the index of the documents");
    if (in_units)
        d->unit = (Unit *)checked_calloc((size_t)documents_total_groups(d) + 1, sizeof(Unit), "the pairs and groups");
    d->pieces = 0;
    documents_walk(d, documents_add);
    if (d->unit) documents_end_unit(d);
    if (!d->unit) d->units = d->pieces, d->largest_unit = 1;
    documents_tell(d);
    if (!d->pieces)
        die("%s%s: holds nothing that can be learnt: no target counts within %s", d->shard[0].header.path,
            d->shards > 1 ? " and others" : "", d->documents ? "--seq-len" : "its 0 documents");
    if (d->long_documents)
        d->checked = (unsigned char *)checked_calloc(d->documents / 8 + 1, 1, "the checked documents");
}

// Pieces [*begin, the result) of a unit
static size_t documents_unit(const Documents *d, size_t unit, size_t *begin) {
    *begin = d->unit ? d->unit[unit].first : unit;
    return d->unit ? d->unit[unit + 1].first : unit + 1;
}

// ---- opening: the largest stream ------------------------------------------------------------------------------------
// Of what is not shuffled: the largest that there is. Else of all that any epoch may have: no more positions than fit,
// and no more documents than of the shortest fit.
static SequenceBound documents_bound(const Documents *d) {
    const EpochSequences *e = &d->epoch[0];
    SequenceBound bound = {0, 0, 0};
    size_t i, N;
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
    for (size_t s = 0; s < e->streams; s++) {
        size_t first, documents = 0;
        for (i = e->begin[s], N = 0; i < e->begin[s + 1]; i++) {
            size_t end = documents_unit(d, e->order[i], &first);
            N += packing_length(&d->packing, e->order[i]), documents += end - first;
        }
        bound.N = max_size(bound.N, N), bound.documents = max_size(bound.documents, documents);
    }
    return bound;
}

// Of one of `parts` of a stream (batch_part).
static SequenceBound documents_part_bound(const Documents *d, size_t parts) {
    SequenceBound bound = d->bound;
    size_t longest = bound.longest;
    for (size_t u = 0; d->unit && u < d->units; u++) longest = max_size(longest, d->unit[u].positions);
    if (parts > 1) bound.N = min_size(bound.N, bound.N / parts + longest);
    return bound;
}

// Positions of a stream, at most: B x T, of pairs and groups for as many documents as the largest has.
static size_t documents_capacity(const Documents *d, size_t unit_documents) {
    const size_t B = d->settings.B, T = d->settings.T;
    if (T > INT32_MAX / (B * unit_documents) && unit_documents > 1)
        die_usage(
            "--batch %zu x --seq-len %zu x %zu documents of a pair or group: at most %d tokens of one stream can be "
            "indexed; use --grad-accum",
            B, T, unit_documents, INT32_MAX);
    if (T > INT32_MAX / B)
        die_usage("--batch x --seq-len: %zu tokens in one stream, at most %d can be indexed; use --grad-accum", B * T,
                  INT32_MAX);
    return B * T * unit_documents;
}

static void documents_pack(Documents *d) {
    const uint32_t *length = d->unit ? &d->unit[0].positions : &d->piece[0].positions;
    d->packing =
        packing_allocate(length, d->unit ? sizeof(Unit) : sizeof(Piece), d->units,
                         documents_capacity(d, d->largest_unit), d->settings.shuffle != SHUFFLE_OFF, d->settings.seed);
    d->epoch[0] = epoch_sequences_allocate(&d->packing);
    if (d->packing.shuffle) d->epoch[1] = epoch_sequences_allocate(&d->packing);
    packing_epoch(&d->packing, &d->epoch[0], 0);
    d->first_epoch_sequences = d->epoch[0].streams;
    d->bound = documents_bound(d);
    d->advantage = (double *)checked_calloc(d->largest_unit, sizeof(double), "the advantages of a group");
}

// A document of which prompts are wanted: of a group, whose prompt is one, only the first counts.
static void documents_add_prompt(Documents *d, const DocumentAt *at, int begins) {
    if (!begins) return;
    if (!at->entry.prompt)
        die("%s: document %llu does not say where its prompt ends, and --rollout needs prompts; prepare samples of "
            "prompt and completion, or of prompts alone",
            at->shard->header.path, (unsigned long long)at->number);
    d->longest_prompt = max_size(d->longest_prompt, (size_t)at->entry.prompt);
    d->prompt[d->prompts++] = (uint32_t)(at->shard->documents_before + at->number);
}

static void documents_find_prompts(Documents *d) {
    d->prompt = (uint32_t *)checked_calloc(d->documents, sizeof(uint32_t), "the index of the prompts");
    documents_walk(d, documents_add_prompt);
    if (!d->prompts) die("%s%s: holds no prompts", d->shard[0].header.path, d->shards > 1 ? " and others" : "");
}

// paths: taken over.
static Documents documents_open(ShardPaths *paths, const DataSettings *settings) {
    size_t tokens = 0;
    Documents d = {0};
    crc32_prepare();
    d.settings = *settings;
    if (settings->use != DATA_PROMPTS) documents_capacity(&d, 1);
    for (size_t i = 0; i < OPEN_SHARDS; i++) d.file[i].fd = -1;
    d.shards = paths->count;
    d.shard = (DocumentShard *)checked_calloc(d.shards, sizeof(DocumentShard), "the list of shards");
    d.buffer = (unsigned char *)checked_malloc(DOCUMENTS_BUFFER_BYTES, "the buffer of the data loader");
    for (size_t i = 0; i < d.shards; i++) {
        InputFile file = input_open(paths->path[i]);
        d.shard[i].header = shard_read_header(&file, paths->path[i]);
        d.shard[i].documents_before = d.documents, d.shard[i].tokens_before = tokens;
        d.documents += (size_t)d.shard[i].header.documents, tokens += (size_t)d.shard[i].header.tokens;
        input_close(&file);
    }
    shard_paths_free(paths);
    documents_check_kinds(&d);
    documents_check_tokenizers(&d);
    documents_check_tables(&d);
    if (settings->use == DATA_PROMPTS) {
        documents_find_prompts(&d);
    } else {
        documents_find_pieces(&d);
        documents_pack(&d);
    }
    return d;
}

static void documents_close(Documents *d) {
    for (size_t i = 0; i < OPEN_SHARDS; i++)
        if (d->file[i].fd >= 0) close(d->file[i].fd);
    for (size_t i = 0; i < d->shards; i++) free(d->shard[i].header.path);
    free(d->shard), free(d->piece), free(d->unit), free(d->prompt), free(d->checked), free(d->buffer);
    free(d->advantage);
    packing_free(&d->packing);
    epoch_sequences_free(&d->epoch[0]), epoch_sequences_free(&d->epoch[1]);
    memset(d, 0, sizeof(*d));
}

// Changes with the documents: a header's checksum covers its table's, the table holds the documents'.
static uint64_t documents_mix_shards(const Documents *d, uint64_t mixed) {
    for (size_t i = 0; i < d->shards; i++) {
        const TokenShard *header = &d->shard[i].header;
        mixed = random_mix(mixed ^ ((uint64_t)header->header_crc << 32 | header->table_crc));
        mixed = random_mix(mixed ^ header->bytes);
    }
    return mixed;
}

// Of the documents in the order of the shards, whatever is made of them.
static uint64_t documents_content_key(const Documents *d) { return documents_mix_shards(d, random_mix(d->shards)); }

// Of the documents, their order, and everything that decides which of them a place is.
static uint64_t documents_fingerprint(const Documents *d) {
    const DataSettings *s = &d->settings;
    uint64_t mixed = random_mix(random_mix(s->B) ^ s->T);
    mixed = random_mix(mixed ^ (uint64_t)s->long_documents);
    mixed = random_mix(mixed ^ (uint64_t)d->packing.shuffle);
    if (d->packing.shuffle) mixed = random_mix(mixed ^ s->seed);
    return documents_mix_shards(d, mixed);
}

// ---- places ---------------------------------------------------------------------------------------------------------
// The streams of the epoch that a place is in, packed again if they are not at hand.
static const EpochSequences *documents_epoch(Documents *d, uint64_t place) {
    uint64_t epoch = d->packing.shuffle ? place / d->units : 0;
    EpochSequences *e = &d->epoch[epoch & 1];
    if (e->epoch != epoch) packing_epoch(&d->packing, e, epoch);
    if (place % d->units >= e->streams)
        die("the place %llu is not in this data, whose epoch %llu has %zu streams; was it another run's?",
            (unsigned long long)place, (unsigned long long)epoch, e->streams);
    return e;
}

static uint64_t documents_after(Documents *d, uint64_t place) {
    const EpochSequences *e = documents_epoch(d, place);
    uint64_t after = place % d->units + 1 < e->streams ? place + 1 : (place / d->units + 1) * d->units;
    if (after >= PLACES)
        die("epoch %llu of %zu units is beyond what a place can number", (unsigned long long)(after / d->units),
            d->units);
    return after;
}

// The units of the stream at a place: order[*begin .. the result)
static size_t documents_stream(Documents *d, uint64_t place, const EpochSequences **e, size_t *begin) {
    *e = documents_epoch(d, place);
    size_t stream = (*e)->stream[place % d->units];
    *begin = (*e)->begin[stream];
    return (*e)->begin[stream + 1];
}

// What the stream at a place adds to the counts of its step; the index knows.
static TargetCounts documents_counted(Documents *d, uint64_t place) {
    const EpochSequences *e;
    size_t begin, end = documents_stream(d, place, &e, &begin), first;
    TargetCounts counts = {0, 0, 0};
    for (; begin < end; begin++) {
        size_t last = documents_unit(d, e->order[begin], &first);
        for (size_t i = first; i < last; i++) counts.tokens += (double)d->piece[i].counted;
        counts.documents += (double)(last - first), counts.groups += d->unit != NULL;
    }
    return counts;
}

// ---- for people -----------------------------------------------------------------------------------------------------
static void documents_report(FILE *out, const Documents *d) {
    fprintf(out, "data     %zu documents in %zu shard%s, tokenizer %s; ", d->documents, d->shards,
            d->shards > 1 ? "s" : "", d->shard[0].header.tokenizer_name);
    if (!d->unit) fprintf(out, "%zu pieces of at most %zu positions\n", d->pieces, d->bound.longest);
    if (d->unit)
        fprintf(out, "%zu %s, documents of at most %zu positions\n", d->units,
                d->shard[0].header.kind == KIND_PAIRS ? "preference pairs" : "groups of completions", d->bound.longest);
    fprintf(out, "packing  %zu streams of at most %zu positions, %.1f %% full, %s\n", d->first_epoch_sequences,
            d->packing.capacity, 100 * packing_fill(&d->packing, d->first_epoch_sequences),
            d->packing.shuffle ? "shuffled every epoch" : "in the order of the files");
}

#endif
