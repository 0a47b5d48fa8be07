/*
The documents of a run: opens shards (shard.h, llmc_shard.h), checks that they fit the objective and the model, and
builds the index of training samples. documents_read.h reads documents, dataloader.h makes batches.

A document of n tokens has n-1 positions: it reads tokens[0..n-2] and predicts the targets among tokens[1..n-1]. A
document of more than T positions is split, truncated or refused. Splitting makes segments of T positions, each an
independent document with positions from 0. The last token of a segment is also the first of the next: target here,
input there. Segments without a target are left out. The documents of a preference pair or a group are one sample: they
are not split, lie in one sequence in their order, and are left out together. In other data every segment is a sample.
Samples are packed (packing.h) into sequences of at most B*T positions, for pairs and groups times the most documents of
a pair or group.

Documents may share prefixes (tree.h): the prompt of a pair or group is computed once. Then a sample has fewer rows than
positions, and with --samples, or --share-prefixes on, packing counts rows. Rows follow from the table: the prompt of a
sample is known without reading a token. PREFIX_MARGIN tokens at its end are not counted on, since a completion that
continues a word may change the word's tokens. Families of plain documents: families.h.

Opening reads headers and tables, and the masks of long documents. The index takes 16 bytes per segment, 16 per pair or
group, and the order of two epochs. llm.c's shards need no index: a document's place follows from its number. Nothing is
allocated after opening.
*/
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H
#include "llmc/tokenizer/tokenizer_pieces.h"
#include "llmc_shard.h"
#include "logprobs.h"
#include "teacher.h"
#include "objective.h"
#include "packing.h"
#include "prefixes.h"

#define OPEN_SHARDS      32                // most files open at a time
#define DOCUMENTS_BUFFER ((size_t)1 << 16) // least bytes of DataLoader.buffer
#define PREFIX_MARGIN    16                // tokens at the end of a prompt that may differ within a pair or group

typedef enum { SHUFFLE_AUTO, SHUFFLE_ON, SHUFFLE_OFF } Shuffle;
typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_REFUSE } LongDocuments;
// Documents whose common prefixes are computed once: none; those of a pair, a group or a rollout, up to the end of the
// prompt; all
typedef enum { PREFIXES_NONE, PREFIXES_OF_PROMPTS, PREFIXES_OF_ALL } Prefixes;
typedef enum {
    DATA_TRAINS, // packed sequences, for training with the objective
    DATA_READS,  // packed sequences of all documents of any kind, as independent documents
    DATA_PROMPTS // prompts, not packed
} DataUse;

typedef struct {
    size_t B, T, vocab_size;
    size_t step;     // exact number of samples of a step; 0: a step is a number of sequences
    int deals;       // 1: a step's samples are packed anew (step_deal.h)
    Shuffle shuffle; // auto: shuffles documents, but not llm.c's shards
    LongDocuments long_documents;
    Prefixes prefixes;
    uint64_t seed;
    const char *tokenizer_path; // the model's tokenizer, with which shards must have been made; NULL: unknown
    int any_template;           // 1: shards may have been rendered with different chat templates
    DataUse use;
    const Objective *objective;         // NULL: sft
    int scale_rewards;                  // 1: divide advantages by the standard deviation of the group's rewards
    const LogprobFile *reference, *old; // NULL: not used; may also be set after opening
    const LogprobFile *teacher;         // of objective distill; NULL: not used
} DataSettings;

// Bounds of the largest sequence, for plans
typedef struct {
    size_t N, documents, longest; // positions; documents; positions of the longest document
    size_t rows, forks;           // if documents share prefixes (Tree): rows that are computed, forks; else 0
} SequenceBound;

typedef struct {
    TokenShard header;
    size_t documents_before, tokens_before; // sums over all earlier shards
} DocumentShard;

// Positions [part * T, part * T + positions) of document number `document`
typedef struct {
    uint32_t document, part;
    uint32_t positions;
    uint32_t targets;
} Segment;

// A pair, a group or a family: segments [first, the next sample's first)
typedef struct {
    uint32_t first;
    uint32_t positions; // sum over the sample's segments
    uint32_t rows;      // most rows that are computed: positions, without what the sample's documents share
    uint32_t forks;     // most forks of the sample's tree
} Sample;

typedef struct {
    DataSettings settings;
    DocumentShard *shard; // [shards], sorted by path
    size_t shards, documents;
    int regular;      // 1: llm.c's shards: documents of T positions, all tokens targets; B documents are one sample
    Segment *segment; // [segments]; NULL if regular
    size_t segments;
    // [samples + 1], the last entry begins after all segments; NULL: every segment is a sample. Regular: [1] for all
    // samples
    Sample *sample;
    uint32_t *common;                 // [segments] rows that a segment shares with the one before it; NULL: no families
    size_t samples, largest_sample;   // largest_sample: most documents of a sample
    size_t positions, rows;           // sums over all samples
    size_t families, families_cut;    // number of families; number of times that one was cut, to fit into a sequence
    Prefixes shares;                  // prefixes that documents share
    int packs_rows;                   // 1: packing counts rows, not positions
    size_t long_documents;            // number of documents with more than T positions
    size_t left_out;                  // number of segments, or of pairs and groups, without targets
    size_t positions_cut;             // positions lost by truncation
    size_t alike, single;             // number of pairs or groups without a preference; number of answers of one token
    size_t least_prompt, most_prompt; // tokens of the shortest and the longest prompt of the sample
    double rank;                      // reward (groups) or checksum (pairs) that all documents so far share; NAN: none
    uint32_t *prompt;                 // [prompts] documents of the prompts; only with DATA_PROMPTS
    size_t prompts, longest_prompt, longest_text; // in tokens: longest prompt; longest prompt plus reference answer
    size_t longest_alone;   // longest prompt with at most PREFIX_LEAST tokens, which is not shared; 0: none
    size_t longest_columns; // most bytes of a prompt's additional columns; 0: no prompt has any
    unsigned char *checked; // bit i: the checksum of document i, read in several segments, has been verified; or NULL
    Packing packing;
    EpochSequences epoch[2]; // sequences of even and odd epochs
    SequenceBound bound;
    size_t first_epoch_sequences;
    uint64_t next; // position of the next micro-batch; a resumed run sets it
    InputFile file[OPEN_SHARDS];
    size_t file_shard[OPEN_SHARDS]; // shard of each open file
    unsigned char *buffer;          // [buffer_bytes] a segment's ids, masks and values in the shard's format
    size_t buffer_bytes;
    double *advantage;  // [largest_sample] advantages of a group's documents
    PrefixText *prefix; // [documents of a sequence] scratch of prefixes_tree; or NULL
} DataLoader;

// A document and where it lies
typedef struct {
    const DocumentShard *shard;
    const InputFile *file;
    size_t number; // index in the shard
    ShardDocument entry;
} DocumentRef;

// ---- kinds of data --------------------------------------------------------------------------------------------------
// Kind of data that each ObjectiveKind needs
static const ShardKind objective_data[OBJECTIVES] = {KIND_DOCUMENTS, KIND_PAIRS,    KIND_PAIRS,  KIND_PAIRS,
                                                     KIND_GROUPS,    KIND_GROUPS,   KIND_VALUES, KIND_GROUPS,
                                                     KIND_LABELS,    KIND_DOCUMENTS};

// For each kind of shard: the content, the columns from which data/prepare.py makes the shard, and the objectives that
// use it
static const struct {
    const char *name, *columns, *objectives;
} data_kinds[] = {{"documents", "text; messages; prompt, completion", "sft or distill"},
                  {"preference pairs", "chosen, rejected, maybe prompt", "dpo, simpo or orpo"},
                  {"groups of completions with rewards", "prompt, completions, rewards", "grpo, gspo or cispo"},
                  {"prompts alone", "prompt, maybe answer", "grpo, gspo, cispo or distill with --rollout"},
                  {"documents with an advantage for each token", "ids, train, advantages", "ppo"},
                  {"labelled answers", "prompt, completion, label; or pairs prepared with --format unpaired", "kto"}};

static ObjectiveKind data_objective(const DataSettings *s) { return s->objective ? s->objective->kind : OBJECTIVE_SFT; }

// Refuses llm.c's shards, which hold only running text, for objectives that need more.
static void documents_check_llmc(const DataLoader *d) {
    const ObjectiveKind objective = data_objective(&d->settings);
    const char *path = d->shard[0].header.path;
    if (d->settings.use == DATA_TRAINS && objective != OBJECTIVE_SFT)
        die("%s: is one of llm.c's shards, which hold text; --objective %s trains on %s (%s); prepare data of that "
            "kind",
            path, objective_names[objective], data_kinds[objective_data[objective]].name,
            data_kinds[objective_data[objective]].columns);
    if (d->settings.use != DATA_TRAINS)
        die("%s: is one of llm.c's shards, which have no %s; give shards of data/prepare.py", path,
            d->settings.use == DATA_PROMPTS ? "prompts" : "documents");
}

static void documents_check_kinds(const DataLoader *d) {
    const TokenShard *first = &d->shard[0].header;
    const ObjectiveKind objective = data_objective(&d->settings);
    for (size_t i = 1; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        if (s->kind != first->kind)
            die("%s holds %s, but %s holds %s; give shards of only one kind", first->path, data_kinds[first->kind].name,
                s->path, data_kinds[s->kind].name);
    }
    if (d->settings.use == DATA_TRAINS && first->kind != objective_data[objective])
        die("%s: holds %s (%s), but --objective %s trains on %s (%s); give --objective %s, or other data", first->path,
            data_kinds[first->kind].name, data_kinds[first->kind].columns, objective_names[objective],
            data_kinds[objective_data[objective]].name, data_kinds[objective_data[objective]].columns,
            data_kinds[first->kind].objectives);
    if (d->settings.use == DATA_READS && first->kind == KIND_PROMPTS)
        die("%s: holds prompts alone, without a target; give data with answers", first->path);
    if (d->settings.use == DATA_PROMPTS && (first->kind == KIND_PAIRS || first->kind == KIND_LABELS))
        die("%s: holds %s, but --rollout needs prompts alone, prompts with completions, or groups; prepare one of "
            "these kinds",
            first->path, data_kinds[first->kind].name);
}

// Refuses shards of one or two data sets that were rendered with different chat templates.
static void documents_check_templates(const DataLoader *d, const DataLoader *other) {
    const TokenShard *first = NULL, *s = NULL;
    for (size_t i = 0; i < d->shards + other->shards && !d->settings.any_template; i++) {
        s = i < d->shards ? &d->shard[i].header : &other->shard[i - d->shards].header;
        if (s->chat_template && !first) first = s;
        if (s->chat_template && s->chat_template != first->chat_template)
            die("%s was rendered with one chat template, %s with another; prepare both with one --chat-template, or "
                "give --any-tokenizer",
                first->path, s->path);
    }
}

// Says how a tokenizer's pieces differ from those of a shard, if they do; NULL: they are the same. Other files are
// compared with `own`, if that file made the shard, or with the file next to the shard.
static const char *shard_tokenizer_fault(const TokenShard *s, const char *path, const char *own) {
    char made[PATH_MAX];
    if (tokenizer_fingerprint(path) == s->tokenizer) return NULL;
    if (own && *own && tokenizer_fingerprint(own) == s->tokenizer)
        snprintf(made, sizeof(made), "%s", own);
    else if (!tokenizer_beside_shard(s->path, made) || tokenizer_fingerprint(made) != s->tokenizer)
        return "is not that of the data, whose own " TOKENIZER_NAME " is not next to them to compare pieces with";
    return pieces_same(made, path) ? NULL : "has other pieces than that of the data";
}

static void documents_check_tokenizers(const DataLoader *d) {
    const DataSettings *settings = &d->settings;
    const TokenShard *first = &d->shard[0].header;
    for (size_t i = 0; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        if (s->tokenizer != first->tokenizer)
            die("%s was made with tokenizer %s, but %s with tokenizer %s; prepare both with the model's tokenizer",
                first->path, first->tokenizer_name, s->path, s->tokenizer_name);
        if (s->vocabulary > settings->vocab_size)
            die("%s: its tokenizer %s has %zu ids, the model's vocabulary only %zu; prepare the data with the model's "
                "tokenizer, or give --grow-vocabulary %zu",
                s->path, s->tokenizer_name, s->vocabulary, settings->vocab_size, s->vocabulary);
    }
    documents_check_templates(d, d);
    if (!settings->tokenizer_path) return;
    const uint64_t wanted = tokenizer_fingerprint(settings->tokenizer_path);
    const int reads = settings->use == DATA_READS; // maybe for a student: the same pieces will do
    if (reads ? shard_tokenizer_fault(first, settings->tokenizer_path, NULL) != NULL : wanted != first->tokenizer)
        die("%s was made with tokenizer %s (%016llx), but the model has %s (%016llx); use the model's tokenizer, or "
            "give --any-tokenizer",
            first->path, first->tokenizer_name, (unsigned long long)first->tokenizer, settings->tokenizer_path,
            (unsigned long long)wanted);
}

// ---- tables -------------------------------------------------------------------------------------------------------
static size_t documents_total_groups(const DataLoader *d) {
    size_t groups = 0;
    for (size_t i = 0; i < d->shards; i++) groups += d->shard[i].header.groups;
    return groups;
}

static const char *others(const DataLoader *d) { return d->shards > 1 ? " and others" : ""; }

// begins: 1 for the first document of a pair or group, or a document outside any
typedef void (*DocumentVisit)(DataLoader *d, const DocumentRef *document, int begins);

// Visits every document of every table in order, reading through entry[TABLE_ENTRIES].
static void documents_walk(DataLoader *d, ShardDocument *entry, DocumentVisit visit) {
    size_t group = 0;
    for (size_t shard = 0; shard < d->shards; shard++) {
        const TokenShard *s = &d->shard[shard].header;
        InputFile file = input_open(s->path);
        for (size_t first = 0, count; first < s->documents; first += count) {
            count = shard_read_entries(s, &file, first, entry);
            for (size_t i = 0; i < count; i++) {
                const DocumentRef at = {&d->shard[shard], &file, first + i, entry[i]};
                visit(d, &at, at.number == 0 || !kind_has_groups(s->kind) || at.entry.group != group);
                group = at.entry.group;
            }
        }
        input_close(&file);
    }
}

// ---- segments and samples -------------------------------------------------------------------------------------------
// Counts targets among tokens [first, first + n) of the shard.
static size_t documents_count_targets(DataLoader *d, const DocumentRef *at, size_t first, size_t n) {
    size_t sum = 0;
    for (size_t done = 0, count; done < n; done += count) {
        count = min_size(n - done, d->buffer_bytes);
        input_read(at->file, at->shard->header.masks + first + done, d->buffer, count);
        for (size_t i = 0; i < count; i++) sum += d->buffer[i] != 0;
    }
    return sum;
}

// Sets the rows of a pair or group whose documents share their prompt. p common tokens give p - 1 common rows.
static void documents_share_prompt(DataLoader *d, Sample *sample) {
    const size_t documents = d->segments - sample->first;
    size_t tokens = d->least_prompt;
    for (size_t i = sample->first; i < d->segments; i++) tokens = min_size(tokens, d->segment[i].positions + 1);
    sample->rows = sample->positions;
    if (d->settings.prefixes == PREFIXES_NONE || tokens <= PREFIX_LEAST) return;
    if (d->most_prompt > d->least_prompt + PREFIX_MARGIN) return; // not one prompt
    sample->rows -= (uint32_t)((documents - 1) * (tokens - 1 - PREFIX_MARGIN)), sample->forks = 1;
}

// Returns the rows that all documents of a pair or group share at least.
static size_t sample_shared(const Sample *s) { return (s->positions - s->rows) / (s[1].first - s->first - 1); }

// Completes the pair or group whose segments were added last. Drops it unless all of them have targets.
static void documents_end_sample(DataLoader *d) {
    Sample *sample = &d->sample[d->samples];
    size_t with_targets = 0;
    if (sample->first == d->segments) return; // no pair or group has begun
    d->alike += !isnan(d->rank);
    sample->positions = sample->forks = 0;
    for (size_t i = sample->first; i < d->segments; i++) {
        sample->positions += d->segment[i].positions;
        with_targets += d->segment[i].targets > 0;
    }
    documents_share_prompt(d, sample);
    if (with_targets == d->segments - sample->first)
        d->samples++;
    else
        d->segments = sample->first, d->left_out++;
    d->sample[d->samples].first = (uint32_t)d->segments;
}

static void documents_add(DataLoader *d, const DocumentRef *at, int begins) {
    const DataSettings *settings = &d->settings;
    const size_t document = at->shard->documents_before + at->number, T = settings->T;
    const size_t positions = at->entry.tokens - 1, whole = settings->long_documents == LONG_SPLIT ? positions : T;
    const int answers = kind_is_whole(at->shard->header.kind);
    if (positions > T && (settings->long_documents == LONG_REFUSE || (answers && whole > T)))
        die("%s: document %zu has %zu tokens, --seq-len %zu takes %zu%s; give a longer --seq-len or --long %s",
            at->shard->header.path, at->number, at->entry.tokens, T, T + 1,
            answers ? ", and answers are not split" : "", answers ? "truncate" : "split or truncate");
    if (d->sample && begins) documents_end_sample(d);
    const double rank = at->shard->header.kind == KIND_GROUPS ? (double)at->entry.reward : (double)at->entry.crc;
    d->rank = begins || rank == d->rank ? rank : NAN;
    d->least_prompt = begins ? at->entry.prompt : min_size(d->least_prompt, at->entry.prompt);
    d->most_prompt = begins ? at->entry.prompt : max_size(d->most_prompt, at->entry.prompt);
    d->single += at->entry.prompt && at->entry.targets == 1;
    d->long_documents += positions > T;
    if (positions > whole) d->positions_cut += positions - T;
    for (size_t k = 0; k * T < min_size(positions, whole); k++) { // position t's target is token t + 1
        size_t n = min_size(positions - k * T, T), targets = min_size(n, at->entry.targets);
        if (positions > T && at->entry.targets != positions)
            targets = documents_count_targets(d, at, at->entry.first + k * T + 1, n);
        const Segment segment = {(uint32_t)document, (uint32_t)k, (uint32_t)n, (uint32_t)targets};
        if (targets || d->sample) // documents_end_sample may drop pairs and groups later
            d->segment[d->segments++] = segment;
        else
            d->left_out++;
    }
}

static void documents_note(const DataLoader *d) {
    const char *path = d->shard[0].header.path;
    const size_t T = d->settings.T;
    const int split = d->settings.long_documents == LONG_SPLIT, pairs = d->shard[0].header.kind == KIND_PAIRS;
    if (d->alike)
        note("%s%s: %zu of %zu %s, so they give no gradient", path, others(d), d->alike, documents_total_groups(d),
             pairs ? "pairs have two equal answers" : "groups have equal rewards");
    if (d->single)
        note("%s%s: %zu of %zu documents have an answer of one token (an empty answer is only its end); check the "
             "answers in the data",
             path, others(d), d->single, d->documents);
    if (d->long_documents)
        note("%s%s: %zu of %zu documents are longer than --seq-len %zu and are %s %zu %s", path, others(d),
             d->long_documents, d->documents, T, split ? "split;" : "truncated, by",
             split ? d->segments : d->positions_cut,
             split ? "segments in all; --long truncate or refuse avoids this" : "tokens in all");
    if (d->left_out && d->sample)
        note("%s%s: %zu of %zu %s are left out: one of their documents has no target within --seq-len %zu; a longer "
             "--seq-len keeps them",
             path, others(d), d->left_out, documents_total_groups(d), pairs ? "pairs" : "groups", T);
    else if (d->left_out)
        note("%s%s: %zu segments of documents are left out: none of their tokens is trained on", path, others(d),
             d->left_out);
}

static void documents_index(DataLoader *d, ShardDocument *entry) {
    const DocumentShard *last = &d->shard[d->shards - 1];
    const size_t tokens = last->tokens_before + last->header.tokens;
    // Upper bound of segments.
    const size_t split = d->settings.long_documents == LONG_SPLIT ? tokens / d->settings.T : 0;
    d->segment = (Segment *)checked_calloc(d->documents + split, sizeof(Segment), "the index of the documents");
    if (d->settings.use == DATA_TRAINS && kind_has_groups(last->header.kind))
        d->sample = (Sample *)checked_calloc(documents_total_groups(d) + 1, sizeof(Sample), "the pairs and groups");
    documents_walk(d, entry, documents_add);
    if (d->segments >= UINT32_MAX)
        die("%s and the other shards: %zu documents in %zu segments are above the limit of %u; give fewer shards",
            last->header.path, d->documents, d->segments, UINT32_MAX);
    if (d->sample) documents_end_sample(d);
    if (!d->sample) d->samples = d->segments, d->largest_sample = 1;
    documents_note(d);
    if (!d->segments)
        die("%s%s: holds nothing to train on: %s", d->shard[0].header.path, others(d),
            d->documents ? "no document has a target within --seq-len; raise --seq-len"
                         : "it has 0 documents; prepare it again");
    if (d->long_documents)
        d->checked = (unsigned char *)checked_calloc(d->documents / 8 + 1, 1, "the checked documents");
}

// Counts the tokens of a prompt and its reference answer. A group has only a prompt.
static size_t prompts_text_tokens(const DocumentRef *at) {
    return at->shard->header.kind == KIND_GROUPS ? at->entry.prompt : at->entry.tokens;
}

// Adds a document's prompt. A group has one prompt, so adds only the prompt of the group's first document.
static void documents_add_prompt(DataLoader *d, const DocumentRef *at, int begins) {
    if (!begins) return;
    if (!at->entry.prompt)
        die("%s: document %zu does not mark the end of its prompt, which --rollout needs; prepare the data from "
            "prompts with completions, or from prompts alone",
            at->shard->header.path, at->number);
    d->longest_prompt = max_size(d->longest_prompt, at->entry.prompt);
    if (at->entry.prompt <= PREFIX_LEAST) d->longest_alone = max_size(d->longest_alone, at->entry.prompt);
    d->longest_text = max_size(d->longest_text, prompts_text_tokens(at));
    d->prompt[d->prompts++] = (uint32_t)(at->shard->documents_before + at->number);
}

// Returns the segments [*begin, the returned end) of a sample.
static size_t documents_sample(const DataLoader *d, size_t sample, size_t *begin) {
    if (d->regular) {
        *begin = sample * d->settings.B;
        return *begin + d->settings.B;
    }
    *begin = d->sample ? d->sample[sample].first : sample;
    return d->sample ? d->sample[sample + 1].first : sample + 1;
}

static Segment documents_segment(const DataLoader *d, size_t i) {
    const uint32_t T = (uint32_t)d->settings.T;
    const Segment whole = {(uint32_t)i, 0, T, T};
    return d->regular ? whole : d->segment[i];
}

// ---- opening --------------------------------------------------------------------------------------------------------
static void documents_refuse_short(const DataLoader *d) {
    const size_t B = d->settings.B, T = d->settings.T;
    const char *longest = d->shards > 1 ? "the longest shard" : d->shard[0].header.path;
    size_t tokens = 0;
    char advice[96];
    for (size_t i = 0; i < d->shards; i++) tokens = max_size(tokens, d->shard[i].header.tokens);
    if (tokens > B)
        snprintf(advice, sizeof(advice), "--seq-len %zu would fit", (tokens - 1) / B);
    else if (tokens > 1)
        snprintf(advice, sizeof(advice), "--batch %zu with --seq-len 1 would fit", tokens - 1);
    else
        snprintf(advice, sizeof(advice), "give a longer shard");
    die("%s holds %zu tokens, a micro-batch of --batch %zu x --seq-len %zu takes %zu; %s", longest, tokens, B, T,
        B * T + 1, advice);
}

// Sets up llm.c's shards, which need no index.
static void documents_index_llmc(DataLoader *d) {
    const size_t B = d->settings.B, T = d->settings.T;
    size_t tokens = 0, skipped = 0;
    documents_check_llmc(d);
    for (size_t i = 0; i < d->shards; i++) {
        const TokenShard *s = &d->shard[i].header;
        tokens += s->tokens, skipped += s->tokens - s->documents * T - (s->documents > 0);
    }
    d->segments = d->documents, d->samples = d->documents / B, d->largest_sample = B;
    if (!d->samples) documents_refuse_short(d);
    if (skipped)
        note("%s%s: skips %zu of %zu tokens, which fill no micro-batch of %zu x %zu at the end of a shard",
             d->shard[0].header.path, others(d), skipped, tokens, B, T);
    d->sample = (Sample *)checked_calloc(1, sizeof(Sample), "the samples");
    d->sample[0].positions = (uint32_t)(B * T);
}

// Raises *longest to the tokens of the longest document of these shards, and adds to *tokens. llm.c's shards count as
// 0.
static void documents_measure(const char *const *paths, size_t count, size_t *longest, size_t *tokens) {
    ShardPaths found = shard_paths_find(paths, count);
    crc32_prepare();
    for (size_t i = 0; i < found.count && is_token_shard(found.at[i].path); i++) {
        InputFile file = input_open(found.at[i].path);
        const TokenShard s = shard_read_header(&file);
        *longest = max_size(*longest, s.longest), *tokens += s.tokens;
        input_close(&file), free(s.path);
    }
    shard_paths_free(&found);
}

static void documents_read_headers(DataLoader *d, const ShardPaths *paths) {
    const ShardPath *path = paths->at;
    size_t tokens = 0, longest = 0;
    d->shards = paths->count;
    d->shard = (DocumentShard *)checked_calloc(d->shards, sizeof(DocumentShard), "the list of shards");
    d->regular = !is_token_shard(path[0].path);
    for (size_t i = 1; i < d->shards; i++)
        if (is_token_shard(path[i].path) == d->regular)
            die("%s is a shard of documents, but %s is not; give shards of only one kind",
                path[d->regular ? i : 0].path, path[d->regular ? 0 : i].path);
    for (size_t i = 0; i < d->shards; i++) {
        DocumentShard *shard = &d->shard[i];
        InputFile file = input_open(path[i].path);
        shard->header = d->regular ? llmc_shard_header(&file, d->settings.B, d->settings.T, d->settings.vocab_size)
                                   : shard_read_header(&file);
        shard->documents_before = d->documents, shard->tokens_before = tokens;
        d->documents += shard->header.documents, tokens += shard->header.tokens;
        longest = max_size(longest, shard->header.longest);
        d->longest_columns = max_size(d->longest_columns, shard->header.longest_columns);
        input_close(&file);
    }
    d->buffer_bytes = max_size(min_size(d->settings.T + 1, longest) * SHARD_TOKEN_BYTES, DOCUMENTS_BUFFER);
    d->buffer = (unsigned char *)checked_malloc(d->buffer_bytes, "the buffer of the data loader");
    if (d->documents >= UINT32_MAX)
        die("%s and the other shards: %zu documents are above the limit of %u; give fewer shards",
            d->shard[0].header.path, d->documents, UINT32_MAX);
}

// Builds the index of samples, or of prompts, from the tables.
static void documents_read_tables(DataLoader *d) {
    ShardDocument *entry =
        (ShardDocument *)checked_calloc(TABLE_ENTRIES, sizeof(ShardDocument), "a part of a document table");
    documents_check_kinds(d);
    documents_check_tokenizers(d);
    for (size_t i = 0; i < d->shards; i++) {
        InputFile file = input_open(d->shard[i].header.path);
        shard_check_table(&d->shard[i].header, &file, entry);
        input_close(&file);
        d->largest_sample = max_size(d->largest_sample, d->shard[i].header.largest_group);
    }
    if (d->settings.use == DATA_PROMPTS) {
        d->prompt = (uint32_t *)checked_calloc(d->documents, sizeof(uint32_t), "the index of the prompts");
        documents_walk(d, entry, documents_add_prompt);
        if (!d->prompts)
            die("%s%s: holds no prompts; give shards that data/prepare.py made from prompts", d->shard[0].header.path,
                others(d));
    } else {
        documents_index(d, entry);
    }
    free(entry);
}

#endif
