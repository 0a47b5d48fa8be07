/*
Log-probabilities of data under the current model: the keys that identify them, the pass over the data that computes
them (the verb `logprobs`), and the reference of a training run. The reference is the model before the first step, with
the adapters of --adapter. Its values are computed once and kept next to the first shard as reference-KEY.logprobs
(logprobs.h), or in --out if the shard's folder is not writable. A resumed run has another model, so its state holds the
key of the reference, by which the file is found.
*/
#ifndef LLMC_REFERENCE_H
#define LLMC_REFERENCE_H
#include "llmc/data/logprobs.h"
#include "llmc/data/teacher.h"
#include "llmc/base/progress.h"
#include "llmc/run/allocate.h"
#include "llmc/run/run.h"
#include "llmc/plan/flops.h"
#include "run_state.h"
#include "llmc/files/slabs.h"
#include "all_reduce.h"

// ---- keys ---------------------------------------------------------------------------------------------------------
// Returns the key of a configuration and all weights in device memory. It is the same for any op set and any number of
// threads and ranks, and never 0. adapter: key of the adapters, or 0. Collective.
static uint64_t model_key(const Model *model, const Storage *storage, Sharding memory, const Ops *ops,
                          const void *weights, uint64_t adapter) {
    const Model *table = storage ? &storage->table : model;
    uint64_t key = config_checksum((uint64_t)model->dtype, model->config);
    key = table_checksum(key, table, memory, ops, weights, table->dtype, "key of the model");
    if (adapter) key = random_mix(key ^ adapter);
    return key ? key : 1;
}

// Returns the key of a run's model. with_adapters: the key covers the run's adapters, if it has any
static uint64_t run_model_key(const Run *run, int with_adapters) {
    const Residency *memory = &run->streambp.memory;
    const Sharding held = sharding_of(memory->world, ZERO_WEIGHTS);
    uint64_t adapter = 0;
    if (with_adapters && run->lora.rank)
        adapter = table_checksum(lora_key(&run->lora), &run->lora.table, held, ops_device, memory->adapters,
                                 run->lora.table.dtype, "key of the adapters");
    return model_key(&run->model, memory->storage, held, ops_device, memory->weights, adapter);
}

// Returns the header of a file with log-probabilities of this data under the model with this key.
static LogprobHeader logprobs_header(const Run *run, const DataLoader *d, uint64_t key) {
    const Options *o = run->options;
    LogprobHeader h = {0};
    h.documents = d->documents;
    h.tokens = d->shard[d->shards - 1].tokens_before + d->shard[d->shards - 1].header.tokens;
    h.model_key = key, h.data_key = dataloader_content_key(d);
    if (d->long_documents) {
        h.seq_len = d->settings.T;
        h.cut = d->settings.long_documents == LONG_SPLIT ? DOCUMENTS_SPLIT : DOCUMENTS_TRUNCATED;
    }
    const Objective *objective = &run->settings.objective;
    h.dtype = run->model.dtype;
    h.temperature = objective_needs_top(objective) ? objective->distill_temperature : objective->temperature.divisor;
    h.k = (uint32_t)run->settings.top_k, h.vocabulary = run->settings.vocabulary;
    if (h.k) h.order = dataloader_fingerprint(d, o->batch);
    logprobs_name(h.model, o->model ? o->model : o->init ? "--init" : "the model of a resumed run");
    if (o->init) snprintf(h.model, sizeof(h.model), "%.63s", o->init);
    return h;
}

// ---- the walk -----------------------------------------------------------------------------------------------------
typedef struct {
    double sum, counted; // sum and number of log-probabilities
} LogprobSum;

static int logprobs_possible(double value) { return isfinite(value) && value <= (double)LOGPROBS_ROUNDING; }

// Ends the program: the log-probability of a token cannot be one. token: counts over all shards
static void logprobs_refuse(DataLoader *d, size_t token, double value) {
    const DocumentRef document = documents_find_token(d, token);
    die("%s: document %llu: the log-probability of its token %llu is %f: NaN or Inf in the forward pass; check the "
        "model's weights, or run doctor",
        document.shard->header.path, (unsigned long long)document.number,
        (unsigned long long)(token - document.shard->tokens_before - document.entry.first), value);
}

// Writes the log-probabilities of the batch's document i after the forward pass. logp[N]: elements of `type`
static void logprobs_write_document(LogprobWriter *w, DataLoader *d, const Batch *batch, size_t i, const void *logp,
                                    DType type, LogprobSum *sum) {
    const size_t begin = batch->document_start[i], end = batch->document_start[i + 1];
    float value[LOGPROBS_AT_ONCE];
    size_t n;
    for (size_t first = begin; first < end; first += n) {
        const size_t token = batch->origin[i] + 1 + first - begin; // index of the first position's target
        n = min_size(end - first, LOGPROBS_AT_ONCE);
        for (size_t k = 0; k < n; k++) {
            const double found = batch->targets[first + k] >= 0 ? value_at(logp, type, first + k) : 0;
            value[k] = (float)found;
            sum->sum += found, sum->counted += batch->targets[first + k] >= 0;
            if (!logprobs_possible(found)) logprobs_refuse(d, token + k, found);
        }
        logprobs_write(w, token, n, value);
    }
}

// Computes the values of a file that has been created: one forward pass over all documents, divided over the ranks.
// batch: made by dataloader_batch, or a batch at least as large. Moves the loader's position.
static LogprobSum logprobs_compute(LogprobWriter *writer, StreamBP *stream, DataLoader *data, Batch *batch,
                                   Assignment assignment) {
    const DType type = dtype_of_sums(stream->model->dtype);
    const World world = stream->memory.world;
    Progress progress = progress_begin(stderr, "log-probabilities", 0, (double)data->positions);
    LogprobSum sum = {0, 0};
    double positions = 0;
    size_t streams = dataloader_batches(data);
    for (size_t done = 0; done < streams; done += assignment.stride) {
        const int any = done + assignment.first < streams;
        data->next = any ? done + assignment.first : 0;
        dataloader_next(data, batch);
        Batch part = any ? dataloader_part(data, batch, assignment.parts, assignment.part) : batch_empty(batch);
        const double advance = (double)(assignment.stride * assignment.parts) * batch_tokens(&part);
        progress_expect(&progress, positions, advance, (double)stream->model->config.num_hidden_layers);
        forward_logprobs(stream, &part, 1, 0);
        for (size_t i = 0; i < part.documents && !part.empty && world.rank % world_sp(world) == 0; i++)
            logprobs_write_document(writer, data, &part, i, stream->now.host_sums, type, &sum);
        progress_update(&progress, positions += advance);
    }
    sum_over_sequences(world, &sum.sum, 1);
    sum_over_sequences(world, &sum.counted, 1);
    if (dist_rank() != 0) output_leave(&writer->output);
    dist_barrier();
    if (dist_rank() == 0) logprobs_commit(writer, (uint64_t)sum.counted);
    dist_barrier();
    progress_end(&progress);
    return sum;
}

// ---- a teacher's likeliest tokens ---------------------------------------------------------------------------------
// Writes the likeliest tokens of the batch's targets after the forward pass (StreamBP.now.found).
static LogprobSum teacher_write_batch(TeacherWriter *w, DataLoader *d, const Batch *batch, const StreamBP *s) {
    const DType type = dtype_of_sums(s->model->dtype);
    const BatchTeacher *found = &s->now.found;
    LogprobSum sum = {0, 0};
    for (size_t i = 0; i < batch->documents; i++) {
        const size_t begin = batch->document_start[i];
        for (size_t t = begin; t < batch->document_start[i + 1]; t++) {
            const size_t token = batch->origin[i] + 1 + t - begin;
            if (batch->targets[t] < 0) continue;
            const double target = value_at(s->now.host_sums, type, t);
            if (!logprobs_possible(target)) logprobs_refuse(d, token, target);
            teacher_write(w, token, (float)target, found->tail[t], found->id + t * found->k,
                          found->logp + t * found->k);
            sum.sum += target, sum.counted++;
        }
    }
    return sum;
}

// Computes the likeliest tokens of all documents that the file does not have yet, by forward passes in one process.
static LogprobSum teacher_compute(TeacherWriter *w, StreamBP *stream, DataLoader *data, Batch *batch) {
    const size_t streams = dataloader_batches(data);
    Progress progress = progress_begin(stderr, "likeliest tokens", (double)w->header.done, (double)streams);
    while (w->header.done < streams) {
        data->next = w->header.done;
        dataloader_next(data, batch);
        progress_expect(&progress, (double)w->header.done, 1, (double)stream->model->config.num_hidden_layers);
        forward_logprobs(stream, batch, 1, 0);
        const LogprobSum sum = teacher_write_batch(w, data, batch, stream);
        teacher_advance(w, sum.sum, sum.counted);
        progress_update(&progress, (double)w->header.done);
    }
    teacher_commit(w);
    progress_end(&progress);
    const LogprobSum all = {w->header.sum, (double)w->header.targets};
    return all;
}

// ---- the reference of a training run ------------------------------------------------------------------------------
// Returns the key of the reference in a checkpoint's state. 0: the state has no key; comparing settings then reports
// this
static uint64_t reference_key_of(const char *checkpoint) {
    char path[PATH_MAX], *end;
    uint64_t key = 0;
    path_join(path, checkpoint, "state.json");
    cJSON *root = json_read_object(path, RUN_STATE_LIMIT);
    const cJSON *settings = state_get(root, "settings", path);
    if (json_get(settings, "reference")) {
        const char *word = state_string(settings, "reference", path);
        key = strtoull(word, &end, 16);
        if (strlen(word) != 16 || *end || !key)
            die("%s: \"reference\" is '%.40s', which is not the key of a model; resume an earlier checkpoint", path,
                word);
    }
    cJSON_Delete(root);
    return key;
}

// Sets the two candidate paths: next to the first shard, and in --out (or ""). Their name contains a key of everything
// on which the values depend.
static void reference_places(const Run *run, const DataLoader *data, const LogprobHeader *h, char path[2][PATH_MAX]) {
    char name[64], folder[PATH_MAX];
    uint64_t key = random_mix(random_mix(h->model_key) ^ h->data_key), temperature;
    memcpy(&temperature, &h->temperature, sizeof(temperature));
    key = random_mix(random_mix(random_mix(key ^ h->cut) ^ h->seq_len) ^ temperature);
    snprintf(name, sizeof(name), "reference-%016llx.logprobs", (unsigned long long)key);
    folder_above(folder, data->shard[0].header.path);
    path_join(path[0], folder, name);
    *path[1] = 0;
    if (run->options->out) path_join(path[1], run->options->out, name);
}

static int folder_is_writable(const char *path) {
    char folder[PATH_MAX];
    folder_above(folder, path);
    return access(folder, W_OK | X_OK) == 0;
}

// Returns, on all ranks, the index of the first path that `will_do` accepts on rank 0; -1: it accepts none
static int reference_place(char path[2][PATH_MAX], int (*will_do)(const char *path)) {
    int place = -1;
    for (int i = 0; i < 2 && place < 0; i++)
        if (*path[i] && will_do(path[i])) place = i;
    int error = errno;
    dist_broadcast(RANKS_ALL, &place, sizeof(place), 0);
    errno = error;
    return place;
}

static void reference_compute(Run *run, DataLoader *data, Batch *batch, const LogprobHeader *wanted, const char *path) {
    LogprobWriter writer;
    if (!run->options->quiet) fprintf(run->text, "reference  computing %s\n", path);
    fflush(run->text);
    if (dist_rank() == 0) logprobs_create(&writer, path, wanted);
    output_share(&writer.output, path);
    dist_broadcast(RANKS_ALL, &writer.header, sizeof(writer.header), 0);
    logprobs_compute(&writer, &run->streambp, data, batch,
                     assign_evaluation(run->settings.world, run->assignment.parts));
}

// Opens the log-probabilities of the data under the reference. Finds a file or, if the current weights are the
// reference's, computes it. Call before the first step. key: model_key, or reference_key_of when resuming. began: NULL:
// the current weights are the reference's; else the start of their run, for a refusal. batch: see logprobs_compute;
// moves the loader's position
static void reference_prepare(LogprobFile *file, Run *run, DataLoader *data, Batch *batch, uint64_t key,
                              const RunSource *began) {
    char path[2][PATH_MAX];
    LogprobHeader wanted = logprobs_header(run, data, key);
    reference_places(run, data, &wanted, path);
    int place = reference_place(path, path_exists);
    if (place >= 0 && !run->options->quiet) fprintf(run->text, "reference  reused %s\n", path[place]);
    if (place < 0) {
        if (began) {
            const char *model = began->text[SOURCE_MODEL], *init = began->text[SOURCE_INIT];
            die("%s is missing: the reference of this run for this data; put it back, or type %s logprobs --%s %s%s "
                "--data ... --seq-len %zu --out FILE, and give --reference-logprobs FILE",
                path[0], program_called(), *model ? "model" : "init", *model ? model : init,
                run->lora.rank ? " --adapter START" : "", run->options->seq_len);
        }
        place = reference_place(path, folder_is_writable);
        if (place < 0)
            die("%s: the reference's log-probabilities cannot be written there: %s; give --out, or "
                "compute them with the verb logprobs and give --reference-logprobs",
                path[0], error_text(errno));
        reference_compute(run, data, batch, &wanted, path[place]);
    }
    logprobs_open(file, path[place]);
    logprobs_check(file, &wanted, data->shard[0].header.path);
}

// Checks that the files named in options, which run_open_data opened, belong to this data and to the model with this
// key (0: any model).
static void reference_check(const Run *run, const DataLoader *data, uint64_t key) {
    const LogprobFile *reference = data->settings.reference, *old = data->settings.old;
    const LogprobFile *teacher = data->settings.teacher;
    if (data->regular || (!reference && !old && !teacher)) return;
    LogprobHeader wanted = logprobs_header(run, data, teacher ? 0 : key);
    if (teacher) logprobs_check(teacher, &wanted, data->shard[0].header.path);
    if (reference) logprobs_check(reference, &wanted, data->shard[0].header.path);
    if (old) logprobs_check(old, &wanted, data->shard[0].header.path);
}

// ---- a teacher that runs with its student (--teacher) --------------------------------------------------------------
// A second run with options, plan and memory of its own: the verb logprobs, of the student's micro-batches.
typedef struct {
    Run run; // first, because run_close frees the teacher by it
    Options options;
} LiveTeacher;

// Returns the teacher's options: the student's, with the teacher's model, storage and place.
static Options live_options(const Options *student, size_t ids) {
    Options o = *student;
    o.verb = VERB_LOGPROBS, o.objective = OBJECTIVE_SFT, o.method = METHOD_STREAM, o.chunk = o.logits_chunk = 0;
    o.model = student->teacher, o.base = student->teacher_base, o.weights = student->teacher_on;
    o.init = o.adapter = o.teacher = o.rope_scaling = NULL, o.rollout = 0;
    o.lora_rank = o.grow_vocabulary = 0, o.quantise_head = 0, o.inputs_every = 1;
    o.latents = LATENTS_AUTO;
    o.inputs = o.gradients = o.optimizer = o.reference_on = PLACE_AUTO;
    o.keep.word = KEEP_NONE, o.keep.layers = 0, o.keep_on.word = PLACE_AUTO, o.keep_on.layers = 0;
    o.router_aux_loss = NAN, o.router_z_loss = o.router_bias_update = 0;
    o.share_prefixes = SHARE_PREFIXES_OFF, o.given[option_find("keep-chunks")] = 0;
    o.top_k = student->distill_loss == DISTILL_FORWARD ? min_size(student->teacher_top_k, ids) : 0, o.vocabulary = ids;
    return o;
}

// Refuses a teacher whose vocabulary lacks ids of the texts. data: NULL for random tokens. The student's own texts may
// have any of its ids
static void live_check(const Run *teacher, const Run *student, const DataLoader *data) {
    size_t ids = data && !student->options->rollout ? 0 : student->model.config.vocab_size;
    for (size_t i = 0; data && i < data->shards; i++) ids = max_size(ids, data->shard[i].header.vocabulary);
    if (teacher->model.config.vocab_size < ids)
        die_usage("--teacher %s: its vocabulary has %zu ids, but the texts have up to %zu; give a teacher with the "
                  "student's tokenizer",
                  teacher->options->model, teacher->model.config.vocab_size, ids);
}

// Opens, allocates and loads the teacher, if there is one. Call before run_allocate of the student, which plans with
// the memory that is left. data: NULL for random tokens
static void live_begin(Run *run, const Options *o, const DataLoader *data, SequenceBound bound) {
    if (!o->teacher) return;
    LiveTeacher *live = (LiveTeacher *)checked_calloc(1, sizeof(*live), "a teacher");
    live->options = live_options(o, run->model.config.vocab_size);
    run_open(&live->run, &live->options, NULL);
    live_check(&live->run, run, data);
    run_find_tokenizer(&live->run);
    const char *path = live->run.tokenizer_path, *fault = NULL;
    if (data && *path && !o->any_tokenizer)
        fault = shard_tokenizer_fault(&data->shard[0].header, path, run->tokenizer_path);
    if (fault)
        die_usage("--teacher %s: its tokenizer %s %s; give a teacher with the student's tokenizer, or --any-tokenizer "
                  "if its pieces are the same",
                  o->teacher, path_last(path), fault);
    run_allocate(&live->run, bound);
    run_load_weights(&live->run);
    if (o->verb == VERB_TRAIN) run->teacher.header.model_key = run_model_key(&live->run, 0);
    run->live = &live->run;
}

// Computes the teacher's values of a batch. A batch's likeliest tokens are valid until the next call. Collective.
static void live_answer(Run *run, Batch *batch) {
    StreamBP *s = &run->live->streambp;
    Batch texts = *batch;
    memset(&texts.routes, 0, sizeof(texts.routes)); // the teacher chooses its own experts
    forward_logprobs(s, &texts, 1, 0);
    if (objective_needs_top(&run->settings.objective)) {
        batch->teacher = s->now.found;
        return;
    }
    const DType type = dtype_of_sums(s->model->dtype);
    for (size_t t = 0; t < batch->N; t++) batch->reference[t] = (float)value_at(s->now.host_sums, type, t);
}

// ---- the reference of a micro-batch, on the fly -------------------------------------------------------------------
// For kto (objective.h) the reference also gives a KL divergence, estimated from mismatched documents (batch_mismatch).
// The policy and the reference each take one more pass, over a sequence no longer than the micro-batch, before the pass
// over the micro-batch. A sequence of one document has no mismatched document and adds nothing to the mean. Means are
// over the sequences of all replicas, so they depend on the number of ranks.

// Allocates memory for micro-batches of at most `bound`.
static void kl_allocate(Run *run, SequenceBound bound) {
    if (!objective_needs_mismatched(&run->settings.objective)) return;
    run->mismatched = batch_allocate(bound.N, bound.documents);
    run->document_reference =
        (double *)checked_calloc(bound.documents, sizeof(double), "the reference of a batch's documents");
}

// Fills run->mismatched with the mismatched documents of a batch, and returns it; an empty sequence if there are none
static Batch kl_mismatch(Run *run, const Batch *batch) {
    if (!batch->empty && batch->documents > 1) {
        batch_mismatch(batch, run->options->seq_len, &run->mismatched);
        return run->mismatched;
    }
    run->mismatched.tokens[0] = batch->tokens[0];
    return batch_empty(&run->mismatched);
}

// Returns sum_t m logp of document d after a forward pass.
static double kl_document(const StreamBP *s, const Batch *batch, size_t d) {
    const Objective alone = {0}; // an objective without a reference
    return document_sums(&alone, batch, d, s->now.host_sums, dtype_of_sums(s->model->dtype)).logp;
}

// Estimates batch->kl. Collective.
static void kl_estimate(Run *run, Batch *batch) {
    StreamBP *s = &run->streambp;
    const Batch mismatched = kl_mismatch(run, batch);
    double sums[2] = {0, mismatched.empty ? 0 : (double)mismatched.documents};
    weights_flush(&s->memory);
    for (int reference = 0; reference < 2; reference++) {
        forward_logprobs(s, &mismatched, 1, reference && run->settings.reference != REFERENCE_MODEL);
        for (size_t d = 0; d < mismatched.documents && !mismatched.empty; d++)
            sums[0] += (reference ? -1 : 1) * kl_document(s, &mismatched, d);
    }
    sum_over_sequences(run->settings.world, sums, 2);
    batch->kl = sums[1] == 0 || sums[0] < 0 ? 0 : sums[0] / sums[1];
    if (sums[1] != 0 || run->kl_told || run->options->quiet) return;
    run->kl_told = 1;
    note("a micro-batch has only one document, so its KL divergence counts as 0; give a larger --batch, or "
         "--samples");
}

// Computes the reference of a micro-batch, and kto's divergence. Collective.
static void run_reference(Run *run, Batch *batch) {
    const ReferenceModel reference = run->settings.reference;
    StreamBP *s = &run->streambp;
    if (run->live) {
        live_answer(run, batch);
        return;
    }
    if (!objective_needs_mismatched(&run->settings.objective)) {
        Batch chooses = *batch; // the reference chooses its own routes
        chooses.routes.replays = 0;
        if (reference) forward_policy(s, &chooses, reference != REFERENCE_MODEL, batch->reference);
        return;
    }
    kl_estimate(run, batch);
    forward_logprobs(s, batch, 1, reference != REFERENCE_MODEL);
    for (size_t d = 0; d < batch->documents; d++) run->document_reference[d] = kl_document(s, batch, d);
    batch->document_reference = run->document_reference;
}

// Returns the FLOPs of run_reference.
static double flops_reference(Run *run, const Batch *batch) {
    const RunSettings *settings = &run->settings;
    const int adapters = settings->reference != REFERENCE_BASE;
    if (run->live) return flops_forward(&run->live->settings, batch, 0);
    if (!settings->reference) return 0;
    double flops = flops_forward(settings, batch, adapters);
    if (!objective_needs_mismatched(&settings->objective)) return flops;
    const Batch mismatched = kl_mismatch(run, batch);
    return flops + flops_forward(settings, &mismatched, 1) + flops_forward(settings, &mismatched, adapters);
}

#endif
