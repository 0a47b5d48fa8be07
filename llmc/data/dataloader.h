/*
The data of a run, micro-batch by micro-batch: opens it, counts and bounds micro-batches, seeks, reads the next one.

A position in the data is one number, epoch * samples + sequence: there are never more sequences than samples. With one
sample per sequence (llm.c's shards) a position simply counts micro-batches. Seeking reads no documents; it repeats the
packing of the epoch. Headers and tables are checked at opening, documents when read. Nothing is allocated after
opening.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "documents_pack.h"

#define POSITIONS_MAX ((uint64_t)1 << 53) // largest exact whole number in JSON

// ---- opening --------------------------------------------------------------------------------------------------------
static DataLoader dataloader_open(const char *const *paths, size_t count, const DataSettings *settings) {
    ShardPaths found = shard_paths_find(paths, count);
    DataLoader d = {0};
    crc32_prepare();
    d.settings = *settings;
    for (size_t i = 0; i < OPEN_SHARDS; i++) d.file[i].fd = -1;
    documents_read_headers(&d, &found);
    shard_paths_free(&found);
    if (d.regular)
        documents_index_llmc(&d);
    else
        documents_read_tables(&d);
    families_find(&d);
    if (settings->use != DATA_PROMPTS) documents_pack(&d);
    return d;
}

static void dataloader_close(DataLoader *d) {
    for (size_t i = 0; i < OPEN_SHARDS; i++)
        if (d->file[i].fd >= 0) close(d->file[i].fd);
    for (size_t i = 0; i < d->shards; i++) free(d->shard[i].header.path);
    free(d->shard), free(d->segment), free(d->sample), free(d->prompt), free(d->checked), free(d->buffer);
    free(d->advantage), free(d->common), free(d->prefix);
    packing_free(&d->packing);
    epoch_sequences_free(&d->epoch[0]), epoch_sequences_free(&d->epoch[1]);
    memset(d, 0, sizeof(*d));
    for (size_t i = 0; i < OPEN_SHARDS; i++) d->file[i].fd = -1;
}

// Refuses training and validation data of different kinds, tokenizers or chat templates.
static void dataloader_check_pair(const DataLoader *data, const DataLoader *validation) {
    const TokenShard *a = &data->shard[0].header, *b = &validation->shard[0].header;
    if (data->regular != validation->regular)
        die("--data and --val-data: %s is a shard of documents, but %s is an llm.c shard; prepare both with "
            "data/prepare.py",
            data->regular ? b->path : a->path, data->regular ? a->path : b->path);
    if (a->tokenizer != b->tokenizer)
        die("%s was made with tokenizer %s, but %s with tokenizer %s; prepare both with the model's tokenizer", a->path,
            a->tokenizer_name, b->path, b->tokenizer_name);
    documents_check_templates(data, validation);
}

// Returns a validation file that is also a training file, or NULL.
static const char *dataloader_find_shared(const DataLoader *data, const DataLoader *validation) {
    for (size_t i = 0; i < data->shards; i++)
        for (size_t k = 0; k < validation->shards; k++)
            if (!strcmp(data->shard[i].header.path, validation->shard[k].header.path))
                return data->shard[i].header.path;
    return NULL;
}

// ---- identity -------------------------------------------------------------------------------------------------------
static uint64_t dataloader_mix_shards(const DataLoader *d, uint64_t mixed) {
    for (size_t i = 0; i < d->shards; i++) {
        const TokenShard *header = &d->shard[i].header;
        if (d->regular) {
            mixed = llmc_shard_mix(mixed, header->path);
            continue;
        }
        mixed = random_mix(mixed ^ ((uint64_t)header->header_crc << 32 | header->table_crc));
        mixed = random_mix(mixed ^ header->begin.bytes);
    }
    return mixed;
}

// Returns a key of the documents in the order of the shards, independent of packing.
static uint64_t dataloader_content_key(const DataLoader *d) { return dataloader_mix_shards(d, random_mix(d->shards)); }

// Returns a key of the documents, their order, and everything else that determines which documents are at a position,
// for micro-batches of B documents.
static uint64_t dataloader_fingerprint(const DataLoader *d, size_t B) {
    const DataSettings *s = &d->settings;
    uint64_t mixed = random_mix(random_mix(B) ^ s->T);
    if (d->regular && d->packing.shuffle) mixed = random_mix(mixed ^ RANDOM_STREAM_SEQUENCES);
    if (!d->regular) mixed = random_mix(random_mix(mixed ^ s->long_documents) ^ (uint64_t)d->packing.shuffle);
    if (d->packing.shuffle) mixed = random_mix(mixed ^ s->seed);
    if (d->packs_rows) mixed = random_mix(random_mix(random_mix(mixed ^ d->shares) ^ PREFIX_LEAST) ^ PREFIX_MARGIN);
    return dataloader_mix_shards(d, mixed);
}

// ---- positions ------------------------------------------------------------------------------------------------------
// Returns the sequences of a position's epoch, packed again if needed.
static const EpochSequences *dataloader_epoch(DataLoader *d, uint64_t position) {
    uint64_t epoch = d->packing.shuffle ? position / d->samples : 0;
    EpochSequences *e = &d->epoch[epoch & 1];
    if (e->epoch != epoch) packing_epoch(&d->packing, e, epoch);
    if (position % d->samples >= e->sequences)
        die("position %llu is not in this data: epoch %llu has %zu sequences; resume with the --data that the run "
            "began with",
            (unsigned long long)position, (unsigned long long)epoch, e->sequences);
    return e;
}

// Finds the samples of the sequence at a position: order[*begin .. the returned end)
static size_t dataloader_samples(DataLoader *d, uint64_t position, const EpochSequences **e, size_t *begin) {
    *e = dataloader_epoch(d, position);
    size_t sequence = (*e)->permutation[position % d->samples];
    *begin = (*e)->begin[sequence];
    return (*e)->begin[sequence + 1];
}

// Returns the position that follows `count` micro-batches.
static uint64_t dataloader_after(DataLoader *d, uint64_t position, size_t count) {
    for (; count > 0; count--) {
        const EpochSequences *e = dataloader_epoch(d, position);
        const uint64_t epoch = position / d->samples;
        position = position % d->samples + 1 < e->sequences ? position + 1 : (epoch + 1) * d->samples;
        if (position >= POSITIONS_MAX)
            die("epoch %llu of %zu samples is beyond the last position that can be counted; give fewer --steps or "
                "--epochs",
                (unsigned long long)(epoch + 1), d->samples);
    }
    return position;
}

// Counts the micro-batches of the step at a position, for data packed by steps.
static size_t dataloader_step(DataLoader *d, uint64_t position) {
    const EpochSequences *e = dataloader_epoch(d, position);
    const size_t first = position % d->samples, step = d->packing.step, number = e->begin[first] / step;
    size_t end = first;
    while (end < e->sequences && e->begin[end] / step == number) end++;
    return end - first;
}

// Converts *position, reached after `steps` steps in micro-batches of B documents, to this data's micro-batch size.
// Returns 0 if the steps would then hold different documents.
static int dataloader_resplit(DataLoader *d, size_t B, size_t steps, uint64_t *position) {
    const size_t T = d->settings.T, windows = d->packing.windows;
    if (d->regular) {
        if (d->packing.shuffle) return 0;
        for (size_t i = 0; i < d->shards; i++) {
            const TokenShard *s = &d->shard[i].header;
            if ((s->tokens - 1) / (B * T) * B != s->documents) return 0; // other tokens would be skipped
        }
        const size_t before = d->documents / B, document = (size_t)(*position % before) * B;
        if (document % d->settings.B) return 0;
        *position = *position / before * d->samples + document / d->settings.B;
        return 1;
    }
    if (!d->packing.step || d->common) return 0; // families are cut by the size of a micro-batch
    const uint64_t epoch = steps / windows;
    const EpochSequences *e = dataloader_epoch(d, epoch * d->samples);
    size_t sequence = 0;
    while (e->begin[sequence] / d->packing.step < steps % windows) sequence++;
    *position = epoch * d->samples + sequence;
    return 1;
}

// Counts targets, documents and groups of `count` micro-batches from a position on, using only the index.
static TargetCounts dataloader_targets(DataLoader *d, uint64_t position, size_t count) {
    TargetCounts counts = {0};
    for (size_t k = 0; k < count; k++) {
        const EpochSequences *e;
        if (k) position = dataloader_after(d, position, 1);
        counts.batches++;
        size_t begin, end = dataloader_samples(d, position, &e, &begin), first;
        for (; begin < end; begin++) {
            size_t last = documents_sample(d, e->order[begin], &first);
            for (size_t i = first; i < last; i++) counts.tokens += (double)documents_segment(d, i).targets;
            counts.documents += (double)(last - first), counts.groups += d->sample && !d->regular;
        }
    }
    return counts;
}

// ---- sizes ----------------------------------------------------------------------------------------------------------
// Returns the number of micro-batches in the first epoch. With shuffling, other epochs may have more or fewer.
static size_t dataloader_batches(const DataLoader *d) { return d->first_epoch_sequences; }

// Bounds one of `parts` parts of a micro-batch (batch_part). If documents are regular, B is a multiple of parts.
static SequenceBound dataloader_part_bound(const DataLoader *d, size_t parts) {
    SequenceBound bound = d->bound;
    size_t longest = bound.longest;
    if (d->regular) {
        bound.N /= parts, bound.documents /= parts;
        return bound;
    }
    for (size_t i = 0; d->sample && i < d->samples; i++) longest = max_size(longest, d->sample[i].positions);
    if (parts > 1) bound.N = min_size(bound.N, bound.N / parts + longest);
    bound.rows = min_size(bound.rows, bound.N);
    return bound;
}

// Allocates a batch for the largest micro-batch. For objectives other than sft it has their fields (groups, rewards).
// It has old log-probabilities only if the settings name a file of them. The reference's log-probabilities are NAN
// until set.
static Batch dataloader_batch(const DataLoader *d) {
    const DataSettings *s = &d->settings;
    const ObjectiveKind objective = data_objective(s);
    Batch batch = batch_allocate(d->bound.N, d->bound.documents);
    if (!d->regular)
        batch.origin = (size_t *)checked_calloc(d->bound.documents, sizeof(size_t), "the documents of a batch");
    if (d->shares)
        batch.common = (size_t *)checked_calloc(d->bound.documents, sizeof(size_t), "the documents of a batch");
    if (d->shares) batch_allocate_tree(&batch, d->bound.rows);
    if (s->use != DATA_TRAINS || objective == OBJECTIVE_SFT) {
        if (d->common)
            batch.group = (size_t *)checked_calloc(d->bound.documents, sizeof(size_t), "the families of a batch");
        return batch;
    }
    if (objective == OBJECTIVE_DISTILL) {
        if (objective_is_reverse(s->objective))
            batch.reference = (float *)checked_calloc(d->bound.N, sizeof(float), "the teacher of a batch");
        else if (s->teacher)
            batch.teacher = teacher_allocate(d->bound.N, s->teacher->header.k);
        return batch;
    }
    const int reference = objective_needs_reference(s->objective) && !objective_needs_mismatched(s->objective);
    batch_allocate_answers(&batch, reference, s->old != NULL);
    if (batch.reference)
        for (size_t t = 0; t < d->bound.N; t++) batch.reference[t] = NAN;
    const ShardKind kind = objective_data[objective];
    if (kind != KIND_GROUPS && kind != KIND_LABELS) free(batch.reward), batch.reward = NULL;
    if (!kind_has_groups(kind) && !d->common) free(batch.group), batch.group = NULL;
    if (kind == KIND_PAIRS || kind == KIND_LABELS) free(batch.advantage), batch.advantage = NULL;
    return batch;
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Fills a batch from dataloader_batch with the next micro-batch.
static void dataloader_next(DataLoader *d, Batch *batch) {
    const EpochSequences *e;
    size_t begin, end = dataloader_samples(d, d->next, &e, &begin);
    uint64_t after = dataloader_after(d, d->next, 1);
    batch->N = 0, batch->documents = 0;
    for (size_t i = begin; i < end; i++) documents_read_sample(d, e->order[i], i - begin, batch);
    batch_set_positions(batch);
    if (batch->document_weight) batch_count(batch);
    d->next = after;
}

// Returns a part of a micro-batch (batch_part), with the tree of its documents. Invalidates *whole, which must be from
// dataloader_batch.
static Batch dataloader_part(const DataLoader *d, Batch *whole, size_t parts, size_t part) {
    Batch batch = batch_part(whole, parts, part);
    if (d->shares == PREFIXES_NONE || batch.empty) return batch;
    batch.tree = d->shares == PREFIXES_OF_ALL ? prefixes_tree(&batch, PREFIX_LEAST, d->bound.forks, d->prefix)
                                              : samples_tree(&batch);
    return batch;
}

// ---- for people -----------------------------------------------------------------------------------------------------
// Returns what samples are called: "documents", "segments" of long documents, "pairs", "groups", or "families" of
// documents.
static const char *dataloader_samples_name(const DataLoader *d) {
    if (d->common) return "families";
    if (d->sample) return d->shard[0].header.kind == KIND_PAIRS ? "pairs" : "groups";
    return d->long_documents ? "segments" : "documents";
}

static void dataloader_report(FILE *out, const DataLoader *d) {
    const char *samples = dataloader_samples_name(d);
    const size_t last = d->samples - (d->packing.windows - 1) * d->packing.step;
    fprintf(out, "packing  %zu %s in %zu sequence%s of %zu, documents of at most %zu positions, %s; tokenizer %s\n",
            d->samples, samples, d->first_epoch_sequences, d->first_epoch_sequences > 1 ? "s" : "", d->packing.capacity,
            d->bound.longest, d->packing.shuffle ? "shuffled every epoch" : "in the order of the files",
            d->shard[0].header.tokenizer_name);
    if (d->families)
        fprintf(out, "families %zu of documents that begin alike, and %zu documents alone\n", d->families,
                d->samples - d->families);
    if (!d->packing.step) return;
    fprintf(out, "steps    %zu an epoch, of %zu %s", d->packing.windows, d->packing.step, samples);
    fprintf(out, last < d->packing.step ? ", the last of %zu\n" : "\n", last);
}

#endif
