/*
The data of a run, micro-batch by micro-batch: from shards of documents (documents.h, documents_read.h), or from llm.c's
token shards as they are, 256 int32 of header (magic, version, number of tokens, zeros), then the ids.

    magic 20240520, version 1   uint16 ids (llm.c's GPT-2 data, and what data/pack_bytes.c writes)
    magic 20240801, version 7   uint32 ids (its Llama 3 data)

Of llm.c's a micro-batch is B documents of T tokens: document b is tokens [bT, bT+T) of B*T+1 read, its targets one
further on; an end-of-text token does not split it. The next micro-batch starts B*T tokens later. None crosses from one
shard to the next. Micro-batches are numbered for ever, epoch after epoch in the same order, or, shuffled, permuted in
each. Either way a place in the data is one 64-bit number, and going there takes no reading. Every header is checked at
opening, every id when it is read.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H
#include "documents_read.h"

#define SHARD_HEADER_INTS  256
#define SHARD_HEADER_BYTES (SHARD_HEADER_INTS * sizeof(uint32_t))
#define SHARD_BUFFER_BYTES ((size_t)1 << 18)
#define SHARD_SAMPLE_BYTES ((size_t)8 << 10) // at each end of a shard: what a fingerprint looks at

// The kinds of shard: those of llm.c.
static const struct {
    uint32_t magic, version;
    size_t id_bytes;
} shard_kinds[] = {{20240520, 1, 2}, {20240801, 7, 4}};
#define SHARD_KINDS (sizeof(shard_kinds) / sizeof(shard_kinds[0]))

typedef struct {
    char *path;
    size_t id_bytes;
    size_t tokens;
    size_t batches;        // micro-batches it holds
    size_t batches_before; // in the shards before it
} Shard;

typedef struct {
    int of_documents; // then only these two count
    Documents documents;
    DataSettings settings;

    size_t B, T, vocab_size;
    Shard *shard; // [shards], sorted by path
    size_t shards;
    size_t batches;  // micro-batches of an epoch
    size_t skipped;  // tokens of an epoch that are in none
    uint64_t next;   // number of the next micro-batch
    uint32_t *order; // [batches] of epoch `order_epoch`; NULL: not shuffled
    uint64_t order_epoch;
    size_t open_shard;
    InputFile file;        // shard[open_shard]; fd is -1 before the first read
    unsigned char *buffer; // [SHARD_BUFFER_BYTES]
} DataLoader;

// ---- one file -------------------------------------------------------------------------------------------------------
// Fills in id_bytes and tokens from the header.
static void shard_examine(Shard *shard) {
    unsigned char header[SHARD_HEADER_BYTES];
    const char *path = shard->path;
    size_t i;
    InputFile file = input_open(path);
    size_t bytes = (size_t)file.bytes;
    if (bytes < SHARD_HEADER_BYTES)
        die("%s: its %zu bytes are less than the header of a token shard (%zu)", path, bytes, SHARD_HEADER_BYTES);
    input_read(&file, 0, header, sizeof(header));
    input_close(&file);
    uint32_t magic = shard_uint32(header), version = shard_uint32(header + 4);
    shard->tokens = shard_uint32(header + 8);
    for (i = 0; i < SHARD_KINDS && shard_kinds[i].magic != magic; i++) {
        if (__builtin_bswap32(shard_kinds[i].magic) == magic)
            die("%s: was written on a big-endian machine; swap its bytes or write it again", path);
    }
    if (i == SHARD_KINDS)
        die("%s: is not a token shard, its magic number is %u, expected %u (uint16 ids) or %u (uint32 ids), or one "
            "that data/prepare.py wrote",
            path, magic, shard_kinds[0].magic, shard_kinds[1].magic);
    if (version != shard_kinds[i].version)
        die("%s: version %u of a token shard with magic number %u is not known, expected %u", path, version, magic,
            shard_kinds[i].version);
    shard->id_bytes = shard_kinds[i].id_bytes;
    size_t expected = SHARD_HEADER_BYTES + shard->tokens * shard->id_bytes;
    if (expected != bytes)
        die("%s: the header says %zu tokens, so %zu bytes, but the file has %zu; it is %s", path, shard->tokens,
            expected, bytes, bytes < expected ? "truncated" : "not what its header says");
}

// ---- opening --------------------------------------------------------------------------------------------------------
// The longest T of which one shard holds a micro-batch.
static size_t dataloader_longest(const DataLoader *loader, size_t *tokens) {
    *tokens = 0;
    for (size_t i = 0; i < loader->shards; i++) *tokens = max_size(*tokens, loader->shard[i].tokens);
    return *tokens ? (*tokens - 1) / loader->B : 0;
}

static void dataloader_refuse_short(const DataLoader *loader) {
    size_t tokens, T = dataloader_longest(loader, &tokens);
    const char *longest = loader->shards > 1 ? "the longest shard" : loader->shard[0].path;
    char advice[96];
    if (T)
        snprintf(advice, sizeof(advice), "--seq-len %zu would fit", T);
    else if (tokens > 1)
        snprintf(advice, sizeof(advice), "--batch %zu with --seq-len 1 would fit", tokens - 1);
    else
        snprintf(advice, sizeof(advice), "nothing can be learnt from it");
    die("%s holds %zu tokens, a micro-batch of --batch %zu x --seq-len %zu takes %zu; %s", longest, tokens, loader->B,
        loader->T, loader->B * loader->T + 1, advice);
}

// llm.c's shards hold running text and nothing else.
static void dataloader_check_use(const DataLoader *loader, const char *path) {
    const ObjectiveKind objective = data_objective(&loader->settings);
    if (loader->settings.use == DATA_TRAINS && objective != OBJECTIVE_SFT)
        die("%s: is one of llm.c's shards, which hold text, --objective %s trains on %s; prepare these", path,
            objective_names[objective], kind_name(objective_data[objective].kind, objective_data[objective].values));
    if (loader->settings.use != DATA_TRAINS)
        die("%s: is one of llm.c's shards, which have no %s; give shards of data/prepare.py", path,
            loader->settings.use == DATA_PROMPTS ? "prompts" : "documents");
}

// paths: taken over
static void dataloader_open_llmc(DataLoader *loader, ShardPaths *paths) {
    size_t tokens = 0, B = loader->B, T = loader->T;
    dataloader_check_use(loader, paths->path[0]);
    loader->file.fd = -1;
    loader->shards = paths->count;
    loader->shard = (Shard *)checked_calloc(loader->shards, sizeof(Shard), "the list of shards");
    for (size_t i = 0; i < loader->shards; i++) {
        Shard *shard = &loader->shard[i];
        shard->path = checked_strdup(paths->path[i]);
        shard_examine(shard);
        shard->batches = shard->tokens ? (shard->tokens - 1) / (B * T) : 0; // the last target is one token further on
        shard->batches_before = loader->batches;
        loader->batches += shard->batches;
        tokens += shard->tokens;
        loader->skipped += shard->tokens - shard->batches * B * T - (shard->batches > 0);
    }
    shard_paths_free(paths);
    if (!loader->batches) dataloader_refuse_short(loader);
    if (loader->skipped)
        note("%s%s: %zu of %zu tokens are skipped, at the end of a shard they fill no micro-batch of %zu x %zu",
             loader->shard[0].path, loader->shards > 1 ? " and others" : "", loader->skipped, tokens, B, T);
    loader->buffer = (unsigned char *)checked_malloc(SHARD_BUFFER_BYTES, "the buffer of the data loader");
    if (loader->settings.shuffle != SHUFFLE_ON) return;
    if (loader->batches >= UINT32_MAX) die("%zu micro-batches are more than can be shuffled", loader->batches);
    loader->order = (uint32_t *)checked_calloc(loader->batches, sizeof(uint32_t), "the order of the micro-batches");
    loader->order_epoch = PACKING_NO_EPOCH;
}

static DataLoader dataloader_open(const char *const *paths, size_t count, const DataSettings *settings) {
    ShardPaths found = shard_paths_find(paths, count);
    DataLoader loader = {0};
    loader.settings = *settings;
    loader.B = settings->B, loader.T = settings->T, loader.vocab_size = settings->vocab_size;
    loader.of_documents = is_token_shard(found.path[0]);
    for (size_t i = 1; i < found.count; i++)
        if (is_token_shard(found.path[i]) != loader.of_documents)
            die("%s is a shard of documents, %s is not; a run reads one kind, name them apart",
                found.path[loader.of_documents ? 0 : i], found.path[loader.of_documents ? i : 0]);
    if (loader.of_documents)
        loader.documents = documents_open(&found, settings);
    else
        dataloader_open_llmc(&loader, &found);
    return loader;
}

// The first of its shards, for messages.
static const char *dataloader_path(const DataLoader *loader) {
    return loader->shards ? loader->shard[0].path : loader->documents.shard[0].header.path;
}

// Training and validation data of one run: of one kind, made with one tokenizer.
static void dataloader_check_pair(const DataLoader *data, const DataLoader *validation) {
    if (data->of_documents != validation->of_documents)
        die("--data and --val-data: %s is a shard of documents, %s one of llm.c's; prepare both alike",
            dataloader_path(data->of_documents ? data : validation),
            dataloader_path(data->of_documents ? validation : data));
    if (!data->of_documents) return;
    const TokenShard *a = &data->documents.shard[0].header, *b = &validation->documents.shard[0].header;
    if (a->tokenizer != b->tokenizer)
        die("%s was made with tokenizer %s, %s with %s, another one; prepare both with the model's own", a->path,
            a->tokenizer_name, b->path, b->tokenizer_name);
}

static void dataloader_close(DataLoader *loader) {
    if (loader->of_documents) documents_close(&loader->documents);
    if (!loader->of_documents && loader->file.fd >= 0) close(loader->file.fd);
    for (size_t i = 0; i < loader->shards; i++) free(loader->shard[i].path);
    free(loader->shard), free(loader->buffer), free(loader->order);
    memset(loader, 0, sizeof(*loader));
    loader->file.fd = -1;
}

// ---- place ----------------------------------------------------------------------------------------------------------
// The state is the place of the next micro-batch; a resumed run seeks to it.
static uint64_t dataloader_place(const DataLoader *loader) {
    return loader->of_documents ? loader->documents.next : loader->next;
}

static void dataloader_seek(DataLoader *loader, uint64_t place) {
    *(loader->of_documents ? &loader->documents.next : &loader->next) = place;
}

// Micro-batches of one epoch: of the first one, where they differ.
static size_t dataloader_batches(const DataLoader *loader) {
    return loader->of_documents ? loader->documents.first_epoch_sequences : loader->batches;
}

static int dataloader_shuffled(const DataLoader *loader) {
    return loader->of_documents ? loader->documents.packing.shuffle : loader->order != NULL;
}

static SequenceBound dataloader_bound(const DataLoader *loader) {
    SequenceBound bound = {loader->B * loader->T, loader->B, loader->T};
    return loader->of_documents ? loader->documents.bound : bound;
}

// Of one of `parts` of a micro-batch; B is a multiple of them where documents are of equal length.
static SequenceBound dataloader_part_bound(const DataLoader *loader, size_t parts) {
    SequenceBound bound = dataloader_bound(loader);
    if (loader->of_documents) return documents_part_bound(&loader->documents, parts);
    bound.N /= parts, bound.documents /= parts;
    return bound;
}

// A batch with room for the largest micro-batch, and for what objectives over answers know of one; old
// log-probabilities only where the settings name them by now. The reference's are NAN until somebody knows them.
static Batch dataloader_batch(const DataLoader *loader) {
    const DataSettings *s = loader->of_documents ? &loader->documents.settings : &loader->settings;
    const ObjectiveKind objective = data_objective(s);
    const SequenceBound bound = dataloader_bound(loader);
    Batch batch = batch_allocate(bound.N, bound.documents);
    if (loader->of_documents)
        batch.origin = (size_t *)checked_calloc(bound.documents, sizeof(size_t), "the documents of a batch");
    if (s->use != DATA_TRAINS || objective == OBJECTIVE_SFT) return batch;
    batch_allocate_answers(&batch, objective_needs_reference(s->objective), s->old != NULL);
    if (batch.reference)
        for (size_t t = 0; t < bound.N; t++) batch.reference[t] = NAN;
    if (objective_data[objective].kind != KIND_GROUPS) free(batch.reward), batch.reward = NULL;
    if (!kind_has_groups(objective_data[objective].kind)) free(batch.group), batch.group = NULL;
    if (objective_data[objective].kind == KIND_PAIRS) free(batch.advantage), batch.advantage = NULL;
    return batch;
}

// The place behind the `count` micro-batches from a place on.
static uint64_t dataloader_after(DataLoader *loader, uint64_t place, size_t count) {
    if (!loader->of_documents) return place + count;
    for (; count > 0; count--) place = documents_after(&loader->documents, place);
    return place;
}

// What the `count` micro-batches from a place on add up to, without reading them.
static TargetCounts dataloader_counted(DataLoader *loader, uint64_t place, size_t count) {
    TargetCounts sum = {0, 0, 0};
    if (!loader->of_documents) {
        sum.tokens = (double)count * (double)(loader->B * loader->T);
        sum.documents = (double)count * (double)loader->B;
        return sum;
    }
    for (; count > 0; count--) {
        sum = target_counts_add(sum, documents_counted(&loader->documents, place));
        if (count > 1) place = documents_after(&loader->documents, place);
    }
    return sum;
}

// Mixes bytes of the file into a hash, eight at a time; what is behind its end counts as zeros.
static uint64_t shard_mix(uint64_t mixed, const InputFile *file, uint64_t offset, size_t bytes) {
    uint64_t words[SHARD_SAMPLE_BYTES / sizeof(uint64_t)] = {0};
    input_read(file, offset, words, bytes);
    for (size_t i = 0; i < SHARD_SAMPLE_BYTES / sizeof(uint64_t); i++) mixed = random_mix(mixed ^ words[i]);
    return mixed;
}

// Changes when the shards do (llm.c's, that have no checksum: by their lengths, their first and their last bytes), or
// their order, or when B and T do, or what shuffles them: the same place would be other tokens.
static uint64_t dataloader_fingerprint(const DataLoader *loader) {
    uint64_t mixed = random_mix(random_mix(loader->B) ^ loader->T);
    if (loader->of_documents) return documents_fingerprint(&loader->documents);
    if (loader->order) mixed = random_mix(random_mix(mixed ^ RANDOM_STREAM_STREAMS) ^ loader->settings.seed);
    for (size_t i = 0; i < loader->shards; i++) {
        InputFile file = input_open(loader->shard[i].path);
        size_t sample = (size_t)(file.bytes < SHARD_SAMPLE_BYTES ? file.bytes : SHARD_SAMPLE_BYTES);
        mixed = random_mix(mixed ^ file.bytes);
        mixed = shard_mix(mixed, &file, 0, sample);
        mixed = shard_mix(mixed, &file, file.bytes - sample, sample);
        input_close(&file);
    }
    return mixed;
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Keeps one shard open at a time. Nothing is allocated here: this happens in the middle of training.
static const Shard *dataloader_open_shard(DataLoader *loader, size_t index) {
    Shard *shard = &loader->shard[index];
    if (loader->file.fd >= 0 && loader->open_shard == index) return shard;
    if (loader->file.fd >= 0) close(loader->file.fd);
    loader->file.fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    loader->file.path = shard->path;
    if (loader->file.fd < 0) die("%s: cannot be opened any more: %s", shard->path, strerror(errno));
    loader->open_shard = index;
    return shard;
}

// Stores id number i of the B*T+1 that make up a micro-batch: a token, the target of the one before it, or both.
static void batch_set_id(Batch *batch, size_t i, uint32_t id) {
    if (i < batch->N) batch->tokens[i] = (int32_t)id;
    if (i > 0) batch->targets[i - 1] = (int32_t)id;
}

// Which micro-batch of its epoch comes at a place.
static size_t dataloader_index(DataLoader *loader, uint64_t place) {
    const uint64_t epoch = place / loader->batches;
    const size_t index = (size_t)(place % loader->batches);
    if (!loader->order) return index;
    if (loader->order_epoch != epoch)
        random_permutation(loader->order, loader->batches, loader->settings.seed,
                           packing_random_stream(RANDOM_STREAM_STREAMS, epoch));
    loader->order_epoch = epoch;
    return loader->order[index];
}

// Fills a batch of B documents and B*T tokens with the next micro-batch.
static void dataloader_next_llmc(DataLoader *loader, Batch *batch) {
    size_t index = dataloader_index(loader, loader->next);
    size_t ids = loader->B * loader->T + 1, count;
    const Shard *shard = dataloader_open_shard(
        loader, last_at_most(&loader->shard[0].batches_before, sizeof(loader->shard[0]), loader->shards, index));
    batch_set_regular(batch, loader->B, loader->T);
    size_t first = (index - shard->batches_before) * loader->B * loader->T;
    for (size_t done = 0; done < ids; done += count) {
        count = min_size(ids - done, SHARD_BUFFER_BYTES / shard->id_bytes);
        input_read(&loader->file, SHARD_HEADER_BYTES + (first + done) * shard->id_bytes, loader->buffer,
                   count * shard->id_bytes);
        for (size_t i = 0; i < count; i++) {
            const unsigned char *bytes = loader->buffer + i * shard->id_bytes;
            uint32_t id = shard->id_bytes == 2 ? shard_uint16(bytes) : shard_uint32(bytes);
            if (id >= loader->vocab_size)
                die("%s: token %zu is %u, outside the model's vocabulary of %zu; the shard was made for another "
                    "tokenizer",
                    shard->path, first + done + i, id, loader->vocab_size);
            batch_set_id(batch, done + i, id);
        }
    }
    loader->next++;
}

// Fills a batch that was allocated for the loader's bound with the next micro-batch.
static void dataloader_next(DataLoader *loader, Batch *batch) {
    if (loader->of_documents)
        documents_next(&loader->documents, batch);
    else
        dataloader_next_llmc(loader, batch);
}

#endif
