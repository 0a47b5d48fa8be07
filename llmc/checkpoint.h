/*
Checkpoints: everything a training run needs to go on, bit for bit. Each is a folder in --out,

    checkpoint-00000100/model.bin      the weights: a flat .bin (flat.h), good for --model
                        optimizer.bin  AdamW's moments, and the fp32 master weights where there are any
                        state.json     where the run stands, and what must be the same to go on (run_state.h)
                        DONE           written last: name, bytes and checksum of the others

With LoRA adapter_model.safetensors and adapter_config.json (adapter_file.h) take the place of model.bin: the folder is
an adapter as PEFT reads it, good for --adapter. Its values are the fp32 master weights where there are any, of which
those in use are the rounding; else those in use, in their type.

A checkpoint is complete or absent: it is written as checkpoint-00000100.partial, every file synced, then DONE, and then
the folder is renamed. Older ones beyond --keep go afterwards, by a rename first. So whatever ends a run at whatever
moment, the last complete one stays. Device memory is read through ops->copy_out and a static buffer; nothing is
allocated, and one run at a time may write to an --out (a lock on OUT/lock).
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "adapter_file.h"
#include "checkpoint_folder.h"
#include "checksum.h"
#include "residency.h"
#include "run_state.h"
#include "weights.h"
#include <assert.h>

// What a checkpoint holds, where it lies now. weights, and optimizer's m, v and master, are device memory.
typedef struct {
    const Model *model; // the table of what is trained: the model's or the adapters'
    const Ops *ops;
    char *weights;
    OptimizerState optimizer;
    DType moment_type;
    const Lora *lora; // NULL: the model itself is trained
    BaseKey base;     // with LoRA: what the adapters are for
    const char *base_path;
    const Model *base_model;
} Trained;

/*
optimizer.bin: this header, then m, v [elements of `moments`], then master [elements of fp32] if there is one. As in a
flat .bin numbers are in the byte order of the machine that wrote it.
*/
#define OPTIMIZER_MAGIC   "SBPADAMW"
#define OPTIMIZER_VERSION 1u

typedef struct {
    char magic[8];
    uint32_t version, byte_order;
    uint64_t header_bytes;
    uint32_t moments, master; // DType of the moments; 1 where there are master weights
    uint64_t elements, step;
    uint64_t zero[2];
} OptimizerHeader;

typedef struct {
    char *memory; // device
    size_t bytes;
} Section;

enum { SECTIONS = 3 };

// m, v and master in the order of the file; a section without bytes is not there.
static inline void optimizer_sections(const Trained *t, Section sections[SECTIONS]) {
    size_t moments = t->model->elements * dtype_size(t->moment_type);
    sections[0].memory = (char *)t->optimizer.m, sections[0].bytes = moments;
    sections[1].memory = (char *)t->optimizer.v, sections[1].bytes = moments;
    sections[2].memory = (char *)t->optimizer.master;
    sections[2].bytes = t->optimizer.master ? t->model->elements * sizeof(float) : 0;
}

static inline OptimizerHeader optimizer_header(const Trained *t, size_t step) {
    OptimizerHeader header;
    memset(&header, 0, sizeof(header));
    memcpy(header.magic, OPTIMIZER_MAGIC, sizeof(header.magic));
    header.version = OPTIMIZER_VERSION, header.byte_order = FLAT_BYTE_ORDER;
    header.header_bytes = sizeof(header);
    header.moments = (uint32_t)t->moment_type, header.master = t->optimizer.master != NULL;
    header.elements = t->model->elements, header.step = step;
    return header;
}

static inline size_t optimizer_bytes(const Trained *t) {
    Section sections[SECTIONS];
    optimizer_sections(t, sections);
    return sizeof(OptimizerHeader) + sections[0].bytes + sections[1].bytes + sections[2].bytes;
}

static inline size_t weights_bytes(const Trained *t) { return t->model->elements * dtype_size(t->model->dtype); }

static inline int saves_master(const Trained *t) { return t->lora && t->optimizer.master; }

// The type of the weights in the file, and the weights.
static inline DType saved_type(const Trained *t) { return saves_master(t) ? DTYPE_FP32 : t->model->dtype; }

static inline Section saved_weights(const Trained *t) {
    Section section;
    section.memory = saves_master(t) ? (char *)t->optimizer.master : t->weights;
    section.bytes = t->model->elements * dtype_size(saved_type(t));
    return section;
}

// Of all of a checkpoint, at most.
static inline uint64_t checkpoint_bytes(const Trained *t) {
    uint64_t header = sizeof(FlatHeader);
    if (t->lora) header = adapter_header(t->model, saved_type(t), &t->base, NULL, 0) + ADAPTER_CONFIG_TEXT;
    return header + saved_weights(t).bytes + optimizer_bytes(t) + RUN_STATE_LIMIT;
}

// ---- between device and file, a piece at a time ---------------------------------------------------------------------
#define CHECKPOINT_PIECE ((size_t)4 << 20) // bytes; checksums go by it, so it is part of the format
static_assert(CHECKPOINT_PIECE <= sizeof(staged.bytes), "a piece passes through the staging buffer");

// How far a checkpoint is, for people.
typedef struct {
    Progress bar;
    size_t done; // bytes
} Passage;

static inline Passage passage_begin(const char *what, const Trained *t) {
    Passage passage;
    passage.bar = progress_begin(stderr, what, 0, (double)(saved_weights(t).bytes + optimizer_bytes(t)));
    passage.done = 0;
    return passage;
}

static inline void passage_advance(Passage *passage, size_t bytes) {
    passage->done += bytes;
    progress_update(&passage->bar, (double)passage->done);
}

// Appends a section at *at of the file; the checksum goes on from *checksum.
static inline void section_write(const OutputFile *file, uint64_t *at, const Ops *ops, Section section,
                                 uint64_t *checksum, Passage *passage) {
    size_t begin, n;
    for (begin = 0; begin < section.bytes; begin += n) {
        n = min_size(section.bytes - begin, CHECKPOINT_PIECE);
        ops->copy_out(staged.bytes, section.memory + begin, n);
        *checksum = checksum_piece(*checksum, staged.bytes, n);
        output_write(file, *at, staged.bytes, n);
        *at += n;
        passage_advance(passage, n);
    }
}

static inline void section_read(const InputFile *file, uint64_t *at, const Ops *ops, Section section,
                                uint64_t *checksum, Passage *passage) {
    size_t begin, n;
    for (begin = 0; begin < section.bytes; begin += n) {
        n = min_size(section.bytes - begin, CHECKPOINT_PIECE);
        input_read(file, *at, staged.bytes, n);
        *checksum = checksum_piece(*checksum, staged.bytes, n);
        ops->copy_in(section.memory + begin, staged.bytes, n);
        *at += n;
        passage_advance(passage, n);
    }
}

// ---- saving ---------------------------------------------------------------------------------------------------------
// The header of model.bin guards itself (flat.h); the checksum is that of the weights.
static inline void save_model(const char *path, const Trained *t, Passage *passage, uint64_t *bytes,
                              uint64_t *checksum) {
    FlatWriter writer;
    flat_begin(&writer, path, t->model, t->model->dtype);
    section_write(&writer.output, &writer.at, t->ops, saved_weights(t), checksum, passage);
    *bytes = writer.at;
    output_commit(&writer.output);
}

// The checksum is that of the header, as one piece, and then of the data.
static inline void save_adapters(const char *path, const Trained *t, Passage *passage, uint64_t *bytes,
                                 uint64_t *checksum) {
    const size_t header =
        adapter_header(t->model, saved_type(t), &t->base, (char *)staged_reformed.bytes, sizeof(staged_reformed.bytes));
    OutputFile file;
    output_open(&file, path, header + saved_weights(t).bytes);
    output_write(&file, 0, staged_reformed.bytes, header);
    *checksum = checksum_piece(*checksum, staged_reformed.bytes, header);
    *bytes = header;
    section_write(&file, bytes, t->ops, saved_weights(t), checksum, passage);
    output_commit(&file);
}

static inline void save_optimizer(const char *path, const Trained *t, size_t step, Passage *passage, uint64_t *bytes,
                                  uint64_t *checksum) {
    OptimizerHeader header = optimizer_header(t, step);
    Section sections[SECTIONS];
    OutputFile file;
    size_t i;
    optimizer_sections(t, sections);
    output_open(&file, path, optimizer_bytes(t));
    output_write(&file, 0, &header, sizeof(header));
    *checksum = checksum_piece(*checksum, &header, sizeof(header));
    *bytes = sizeof(header);
    for (i = 0; i < SECTIONS; i++) section_write(&file, bytes, t->ops, sections[i], checksum, passage);
    output_commit(&file);
}

static inline void save_text(const char *path, const char *text, size_t length) {
    OutputFile file;
    output_open(&file, path, length);
    output_write(&file, 0, text, length);
    output_commit(&file);
}

static inline void save_config(const char *path, const Trained *t, uint64_t *bytes, uint64_t *checksum) {
    static char text[ADAPTER_CONFIG_TEXT];
    *bytes = adapter_config_text(t->lora, t->base_path, text, path);
    *checksum = checksum_piece(*checksum, text, (size_t)*bytes);
    save_text(path, text, (size_t)*bytes);
}

static inline void save_state(const char *path, const RunState *run, uint64_t *bytes, uint64_t *checksum) {
    static char text[RUN_STATE_LIMIT];
    *bytes = run_state_text(run, text, path);
    *checksum = checksum_piece(*checksum, text, (size_t)*bytes);
    save_text(path, text, (size_t)*bytes);
}

// Refuses a disk that is too small before anything is written to it. `where` begins the line.
static inline void checkpoint_check_space(const CheckpointFolder *folder, const Trained *t, const char *where) {
    uint64_t wanted = checkpoint_bytes(t), available;
    char last[64] = "";
    if (!space_available(folder->path, &available) || wanted <= available) return;
    if (folder->last != CHECKPOINT_NONE)
        snprintf(last, sizeof(last), ", then --resume from step %zu, which is safe", folder->last);
    die("%s: a checkpoint takes %s (%llu bytes) and %s are free there; free some space%s", where,
        human_bytes((double)wanted), (unsigned long long)wanted, human_bytes((double)available), last);
}

static inline void checkpoint_save(CheckpointFolder *folder, const Trained *t, const RunState *run) {
    char partial[PATH_MAX], path[PATH_MAX], done[SEAL_TEXT];
    Passage passage;
    Seal seal;
    if (folder->last == run->step) return; // it is there
    passage = passage_begin("saving", t);
    memset(&seal, 0, sizeof(seal));
    seal.adapters = t->lora != NULL;
    checkpoint_path(path, folder->path, run->step, "");
    checkpoint_check_space(folder, t, path);
    checkpoint_begin(folder, run->step, partial);
    path_join(path, partial, seal_file(&seal, SEAL_MODEL));
    (t->lora ? save_adapters : save_model)(path, t, &passage, &seal.bytes[SEAL_MODEL], &seal.checksum[SEAL_MODEL]);
    path_join(path, partial, seal_file(&seal, SEAL_OPTIMIZER));
    save_optimizer(path, t, run->step, &passage, &seal.bytes[SEAL_OPTIMIZER], &seal.checksum[SEAL_OPTIMIZER]);
    path_join(path, partial, seal_file(&seal, SEAL_STATE));
    save_state(path, run, &seal.bytes[SEAL_STATE], &seal.checksum[SEAL_STATE]);
    if (t->lora) {
        path_join(path, partial, seal_file(&seal, SEAL_CONFIG));
        save_config(path, t, &seal.bytes[SEAL_CONFIG], &seal.checksum[SEAL_CONFIG]);
    }
    path_join(path, partial, SEAL_NAME);
    save_text(path, done, seal_text(&seal, done));
    checkpoint_finish(folder, run->step, partial);
    progress_end(&passage.bar);
}

// ---- loading --------------------------------------------------------------------------------------------------------
static inline void load_check_sum(const char *path, uint64_t found, uint64_t expected) {
    if (found != expected)
        die("%s: is damaged: its checksum is %016llx, not %016llx; remove its folder, and --resume takes the one "
            "before",
            path, (unsigned long long)found, (unsigned long long)expected);
}

static inline void load_state(const char *path, const char *checkpoint, RunState *run, const Seal *seal) {
    size_t length;
    char *text = input_read_text(path, RUN_STATE_LIMIT, &length);
    load_check_sum(path, checksum_piece(0, text, length), seal->checksum[SEAL_STATE]);
    run_state_resume(run, text, length, checkpoint, path);
    free(text);
}

static inline void load_weights(const char *path, const Trained *t, Passage *passage, const Seal *seal) {
    WeightSource *source = weights_open(path);
    char saved[4096], wanted[4096];
    uint64_t at = sizeof(FlatHeader), checksum = 0;
    config_to_text(&source->config, saved, sizeof(saved));
    config_to_text(&t->model->config, wanted, sizeof(wanted));
    if (strcmp(saved, wanted) != 0) {
        size_t i = first_difference(saved, wanted);
        die("%s: holds another model: %.*s, not %.*s", path, (int)strcspn(saved + i, ","), saved + i,
            (int)strcspn(wanted + i, ","), wanted + i);
    }
    if (source->dtype != t->model->dtype)
        die("%s: holds %s weights, this program trains in %s; resume with one built by make PRECISION=%s", path,
            dtype_name(source->dtype), dtype_name(t->model->dtype), dtype_name(source->dtype));
    section_read(&source->files[0], &at, t->ops, saved_weights(t), &checksum, passage);
    load_check_sum(path, checksum, seal->checksum[SEAL_MODEL]);
    weights_close(source);
}

// The checksum of a file as save_adapters takes it; its parser shall not be the one to find damage.
static inline uint64_t adapters_checksum(const InputFile *file) {
    uint64_t header = safetensors_header_bytes(file), checksum, at;
    size_t n;
    header = header < sizeof(staged_reformed.bytes) - 8 ? header + 8 : sizeof(staged_reformed.bytes);
    if (header > file->bytes) header = file->bytes; // damaged: any number of bytes will do
    input_read(file, 0, staged_reformed.bytes, (size_t)header);
    checksum = checksum_piece(0, staged_reformed.bytes, (size_t)header);
    for (at = header; at < file->bytes; at += n) {
        n = (size_t)(file->bytes - at < CHECKPOINT_PIECE ? file->bytes - at : CHECKPOINT_PIECE);
        input_read(file, at, staged.bytes, n);
        checksum = checksum_piece(checksum, staged.bytes, n);
    }
    return checksum;
}

static inline void load_adapters(const char *path, const Trained *t, Passage *passage, const Seal *seal) {
    InputFile file = input_open(path);
    WeightSource *source;
    SafeTensors list;
    BaseKey base;
    load_check_sum(path, adapters_checksum(&file), seal->checksum[SEAL_MODEL]);
    input_close(&file);
    list = adapter_list(path);
    source = adapter_open_tensors(path, &list, t->lora, t->base_model);
    base = adapter_recorded_base(&source->files[0]);
    adapter_check_base(path, &base, &t->base, t->base_path);
    if (source->dtype != saved_type(t))
        die("%s: holds adapters in %s, this run would in %s; resume with the same PRECISION and --master", path,
            dtype_name(source->dtype), dtype_name(saved_type(t)));
    weights_load(source, t->model, sharding_whole(), t->ops, t->weights); // rounds the master weights
    passage_advance(passage, saved_weights(t).bytes);
    safetensors_free(&list);
    weights_close(source);
}

static inline void load_config(const char *path, const Seal *seal) {
    size_t length;
    char *text = input_read_text(path, ADAPTER_CONFIG_TEXT, &length);
    load_check_sum(path, checksum_piece(0, text, length), seal->checksum[SEAL_CONFIG]);
    free(text);
}

// A run goes on with what it began with. lora: whether this run trains adapters
static inline void checkpoint_check_kind(const char *checkpoint, const Seal *seal, int lora) {
    if (seal->adapters && !lora)
        die("%s: holds adapters, but without --lora-rank or --adapter this run trains the whole model; resume with the "
            "options that the run began with",
            checkpoint);
    if (!seal->adapters && lora)
        die("%s: holds a whole model, but --lora-rank or --adapter trains adapters; resume without, or begin a new run "
            "with --model %s and another --out",
            checkpoint, checkpoint);
}

static inline void load_check_optimizer(const char *path, const OptimizerHeader *found, const OptimizerHeader *wanted) {
    if (memcmp(found->magic, wanted->magic, sizeof(found->magic)) != 0)
        die("%s: does not begin with " OPTIMIZER_MAGIC ", so it is no state of an optimizer", path);
    if (found->byte_order != wanted->byte_order) die("%s: was written on a machine of the other byte order", path);
    if (found->version != wanted->version || found->header_bytes != wanted->header_bytes)
        die("%s: is of version %u, this program reads version %u", path, found->version, wanted->version);
    if (found->elements != wanted->elements)
        die("%s: is for a model of %llu elements, this one has %llu", path, (unsigned long long)found->elements,
            (unsigned long long)wanted->elements);
    if (found->moments != wanted->moments)
        die("%s: holds moments in %s, this run has %s; resume with the same --moments", path,
            dtype_name((DType)found->moments), dtype_name((DType)wanted->moments));
    if (found->master != wanted->master)
        die("%s: was saved %s master weights; resume with --master %s", path, found->master ? "with" : "without",
            found->master ? "fp32" : "none");
    if (found->step != wanted->step)
        die("%s: is of step %llu, state.json of step %llu", path, (unsigned long long)found->step,
            (unsigned long long)wanted->step);
}

static inline void load_optimizer(const char *path, const Trained *t, size_t step, Passage *passage, const Seal *seal) {
    OptimizerHeader header, wanted = optimizer_header(t, step);
    uint64_t at = sizeof(header), checksum, i;
    Section sections[SECTIONS];
    InputFile file = input_open(path);
    optimizer_sections(t, sections);
    if (file.bytes < sizeof(header)) die("%s: is truncated: %llu bytes", path, (unsigned long long)file.bytes);
    input_read(&file, 0, &header, sizeof(header));
    load_check_optimizer(path, &header, &wanted);
    if (file.bytes != optimizer_bytes(t))
        die("%s: has %llu bytes, %zu were expected", path, (unsigned long long)file.bytes, optimizer_bytes(t));
    checksum = checksum_piece(0, &header, sizeof(header));
    for (i = 0; i < SECTIONS; i++) section_read(&file, &at, t->ops, sections[i], &checksum, passage);
    load_check_sum(path, checksum, seal->checksum[SEAL_OPTIMIZER]);
    input_close(&file);
}

// Fills weights and optimizer from the checkpoint of that step, and *run with where it stood; schedule and settings of
// *run are this run's and must agree (run_state.h). Whatever is not as it should be ends the program with one line.
static inline void checkpoint_load(const CheckpointFolder *folder, size_t step, const Trained *t, RunState *run) {
    char checkpoint[PATH_MAX], path[PATH_MAX];
    Passage passage = passage_begin("resuming", t);
    const char *fault;
    Seal seal;
    checkpoint_path(checkpoint, folder->path, step, "");
    fault = seal_check(checkpoint, &seal);
    if (fault) die("%s: is not a complete checkpoint: %s", checkpoint, fault);
    checkpoint_check_kind(checkpoint, &seal, t->lora != NULL);
    path_join(path, checkpoint, seal_file(&seal, SEAL_STATE));
    load_state(path, checkpoint, run, &seal);
    if (run->step != step) die("%s: is of step %zu, its folder's name says %zu", path, run->step, step);
    path_join(path, checkpoint, seal_file(&seal, SEAL_MODEL));
    (t->lora ? load_adapters : load_weights)(path, t, &passage, &seal);
    if (t->lora) {
        path_join(path, checkpoint, seal_file(&seal, SEAL_CONFIG));
        load_config(path, &seal);
    }
    path_join(path, checkpoint, seal_file(&seal, SEAL_OPTIMIZER));
    load_optimizer(path, t, step, &passage, &seal);
    progress_end(&passage.bar);
}

#endif
