/*
Checkpoints: everything that a training run needs to continue bit for bit. Each is a folder in --out,

    checkpoint-00000100/model.bin      the weights: a flat .bin (flat.h), good for --model
                        optimizer.bin  AdamW's moments, and the fp32 master weights if there are any
                        state.json     progress of the run, and settings that a resumed run must share (run_state.h)
                        rollout.bin    with --overlap, if completions wait for their step: the completions (rollout.h)
                        DONE           written last: name, bytes and checksum of the other files

With LoRA, adapter_model.safetensors and adapter_config.json (adapter_file.h) replace model.bin: PEFT can read the
folder, and --adapter takes it. Its values are the fp32 master weights if there are any, else the model's own weights.

A checkpoint is complete or absent: it is written as checkpoint-00000100.partial, every file synced, then DONE, then the
folder is renamed. After that, older ones beyond --keep-checkpoints are renamed and removed. So the last complete
checkpoint survives, whenever the run ends. Nothing is allocated.

A large file is a header and sections: a value for every trained element, in the table's order; for 8-bit moments also
their scales, group by group. Rank 0 makes the file at its full size, and all ranks write and sync a part each. After
the reduction of their checksums rank 0 renames the file. Each rank reads the elements that its memory holds. So the
bytes depend neither on the number of ranks nor on ZeRO's stage.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "llmc/files/adapter_file.h"
#include "llmc/files/checkpoint_folder.h"
#include "llmc/files/slabs.h"
#include "llmc/optimizer/update.h"
#include "run_state.h"

// This rank's part of rollout.bin: bytes [begin, begin + count) of `whole`
typedef struct {
    char *bytes;
    uint64_t begin, count, whole;
    int writes; // 1: this rank writes the part; 0: another rank that also holds the part writes it
    int is_there;
} WaitingPart;

// The tensors of a checkpoint. Weights and optimizer state may be in any place
typedef struct {
    const Model *model; // the trained table: the model's or the adapters'
    const Ops *ops;
    char *weights;
    Sharding weights_sharding, optimizer_sharding;
    OptimizerState optimizer;
    const Lora *lora; // NULL: the model itself is trained
    BaseKey base;     // with LoRA: key of the base model
    const char *base_path;
    const Model *base_model;
    WaitingPart *waiting; // NULL: no completions wait (--overlap is off)
} TrainedTensors;

// ---- large files ----------------------------------------------------------------------------------------------------
typedef struct {
    char *memory; // memory in any place
    DType type;
    Sharding sharding; // layout of that memory
    int floats;        // 1: scales of 8-bit moments (moments.h); 0: a value for every element
} Section;

typedef struct {
    Section section[5];
    size_t count;
    uint64_t bytes; // bytes of the section in the file
    int transpose;  // 1: the file holds some matrices transposed, or their rows in another order
} Sections;

// Counts the values of a section in the file.
static size_t section_count(const Model *table, const Section *s) {
    return s->floats ? moment_floats_all(table, sharding_whole()) : table->elements;
}

static void sections_add(Sections *s, const TrainedTensors *t, void *memory, DType type, Sharding sharding,
                         int floats) {
    if (!memory) return;
    const Section section = {(char *)memory, type, sharding, floats};
    s->section[s->count++] = section;
    s->bytes += section_count(t->model, &section) * dtype_size(type);
}

// Tells whether the adapters are saved from fp32 master weights.
static int saves_master(const TrainedTensors *t) { return t->lora && t->optimizer.master; }
static DType saved_type(const TrainedTensors *t) { return saves_master(t) ? DTYPE_FP32 : t->model->dtype; }

// Returns the sections of MANIFEST_MODEL or MANIFEST_OPTIMIZER.
static Sections file_sections(const TrainedTensors *t, size_t file) {
    Sections s = {0};
    if (file == MANIFEST_OPTIMIZER) {
        sections_add(&s, t, t->optimizer.m, t->optimizer.moment_type, t->optimizer_sharding, 0);
        sections_add(&s, t, t->optimizer.v, t->optimizer.moment_type, t->optimizer_sharding, 0);
        sections_add(&s, t, t->optimizer.m_scales, DTYPE_FP32, t->optimizer_sharding, 1);
        sections_add(&s, t, t->optimizer.v_scales, DTYPE_FP32, t->optimizer_sharding, 1);
    }
    for (size_t i = 0; file == MANIFEST_MODEL && t->lora && i < t->model->parameter_count; i++)
        s.transpose |= t->model->parameters[i].transposed || t->model->parameters[i].fused.groups;
    if (file == MANIFEST_OPTIMIZER || saves_master(t))
        sections_add(&s, t, t->optimizer.master, DTYPE_FP32, t->optimizer_sharding, 0);
    else
        sections_add(&s, t, t->weights, t->model->dtype, t->weights_sharding, 0);
    return s;
}

static uint64_t sections_bytes(const TrainedTensors *t) {
    return file_sections(t, MANIFEST_MODEL).bytes + file_sections(t, MANIFEST_OPTIMIZER).bytes;
}

// Header of optimizer.bin. Numbers are in the writer's byte order, as in a flat .bin.
#define OPTIMIZER_MAGIC   "SBPADAMW"
#define OPTIMIZER_VERSION 1u

typedef struct {
    char magic[8];
    uint32_t version, byte_order;
    uint64_t header_bytes;
    uint32_t moments, master; // DType of the moments; master: 1 with master weights
    uint64_t elements, step;
    uint64_t zero[2];
} OptimizerHeader;

static OptimizerHeader optimizer_header(const TrainedTensors *t, size_t step) {
    OptimizerHeader header = {0};
    memcpy(header.magic, OPTIMIZER_MAGIC, sizeof(header.magic));
    header.version = OPTIMIZER_VERSION, header.byte_order = FLAT_BYTE_ORDER;
    header.header_bytes = sizeof(header);
    header.moments = (uint32_t)t->optimizer.moment_type, header.master = t->optimizer.master != NULL;
    header.elements = t->model->elements, header.step = step;
    return header;
}

// Writes the bytes that precede a file's sections to staged_reformed. Returns how many.
static size_t file_header(const TrainedTensors *t, size_t file, size_t step) {
    if (file == MANIFEST_OPTIMIZER) {
        const OptimizerHeader header = optimizer_header(t, step);
        memcpy(staged_reformed.bytes, &header, sizeof(header));
        return sizeof(header);
    }
    if (t->lora)
        return adapter_header(t->lora, saved_type(t), &t->base, (char *)staged_reformed.bytes,
                              sizeof(staged_reformed.bytes));
    return flat_header(staged_reformed.bytes, t->model, t->model->dtype);
}

// Returns the most bytes of a checkpoint.
static uint64_t checkpoint_bytes(const TrainedTensors *t) {
    uint64_t headers = flat_header_bytes(t->model) + sizeof(OptimizerHeader);
    if (t->lora) headers += adapter_header(t->lora, saved_type(t), &t->base, NULL, 0) + ADAPTER_CONFIG_TEXT;
    return headers + sections_bytes(t) + RUN_STATE_LIMIT + (t->waiting ? t->waiting->whole : 0);
}

// ---- one save or load -----------------------------------------------------------------------------------------------
typedef struct {
    const TrainedTensors *t;
    OutputFolder folder; // when loading, only folder.path is used
    Manifest manifest;
    Progress progress;
    size_t done; // bytes done, for the progress bar
} CheckpointPass;

// Begins a save or a load. ranks: how many ranks share the bytes
static void pass_begin(CheckpointPass *p, const TrainedTensors *t, const char *what, size_t ranks) {
    memset(&p->manifest, 0, sizeof(p->manifest));
    p->t = t;
    p->progress = progress_begin(stderr, what, 0, (double)sections_bytes(t) / (double)ranks);
    p->done = 0;
}

static void pass_advance(CheckpointPass *p, size_t bytes) {
    p->done += bytes;
    progress_update(&p->progress, (double)p->done);
}

typedef struct {
    size_t first, count; // range of the section's values in the file
    size_t offset;       // offset in memory of the first value
} SectionSlab;

static SectionSlab section_slab(const Model *model, const Section *s, const Slabs *b) {
    SectionSlab slab = {b->first, b->count, b->offset};
    if (!s->floats) return slab;
    const size_t group = group_of(model, b->first);
    const Range elements = {b->first - group_begin(model, group), b->count};
    slab.count = moment_floats(model, group, elements).count;
    slab.first = moment_float_offset(model, sharding_whole(), b->first);
    slab.offset = moment_float_offset(model, s->sharding, b->first);
    return slab;
}

// Moves values between staging memory and byte `offset` of the file.
static void section_move(const OutputFile *out, const InputFile *in, Checksum *sum, uint64_t offset, void *values,
                         size_t bytes) {
    if (in) input_read(in, offset, values, bytes);
    checksum_add(sum, offset, values, bytes);
    if (out) output_write(out, offset, values, bytes);
}

// Writes the staged elements of a slab of a table, one parameter at a time. at: byte at which the table begins. stacks:
// also writes the B of stacked experts
static void section_write_parameters(const OutputFile *out, Checksum *sum, uint64_t at, const Model *table,
                                     const SectionSlab *slab, size_t size, int stacks) {
    size_t first = slab->first, count = slab->count;
    unsigned char *values = staged.bytes;
    for (const Parameter *p = table->parameters; count; p++) {
        const size_t end = p->offset + parameter_elements(p), n = first < end ? min_size(count, end - first) : 0;
        const MatrixPart part = {0, p->rows, first - p->offset, n};
        if (n && p->transposed && (stacks || !p->file_rows))
            matrix_write_transposed(out, sum, at + (uint64_t)p->offset * size, part, p->cols, size, values);
        for (size_t done = 0, run; !p->transposed && done < n; done += run) {
            const ElementRun to = fused_run(p, part.begin + done, 1);
            run = min_size(n - done, to.count);
            section_move(out, NULL, sum, at + (uint64_t)(p->offset + to.at) * size, values + done * size, run * size);
        }
        first += n, count -= n, values += n * size;
    }
}

// Writes a B of experts that this rank has whole. It takes some columns of all rows at a time, which are contiguous in
// the file.
static void section_write_stack(const Ops *ops, const OutputFile *out, Checksum *sum, uint64_t at, const Parameter *p,
                                const char *memory, size_t size) {
    size_t n;
    for (size_t c = 0; c < p->cols; c += n) {
        n = min_size(p->cols - c, SLAB_ELEMENTS / p->rows);
        for (size_t r = 0; r < p->rows; r++)
            ops->copy_out(staged.bytes + r * n * size, memory + (p->offset + r * p->cols + c) * size, n * size);
        for (size_t k = 0; k < n; k++)
            for (size_t r = 0; r < p->rows; r++)
                memcpy(staged_reformed.bytes + (k * p->rows + r) * size, staged.bytes + (r * n + k) * size, size);
        section_move(out, NULL, sum, at + (uint64_t)(p->offset + c * p->rows) * size, staged_reformed.bytes,
                     n * p->rows * size);
    }
}

// Writes this rank's part of the sections at byte `at` of a file to `out`; if `out` is NULL, reads it from `in`.
static void sections_transfer(CheckpointPass *p, const Sections *sections, uint64_t at, const OutputFile *out,
                              const InputFile *in, Checksum *sum) {
    const Model *model = p->t->model;
    for (size_t i = 0; i < sections->count; i++) {
        const Section *s = &sections->section[i];
        const size_t size = dtype_size(s->type);
        const int whole = sections->transpose && holds_whole(s->sharding) && dist_ranks() == 1;
        for (Slabs b = slabs_of(model, SLABS_OF_GROUPS, out ? parts_of_ranks() : s->sharding, s->sharding, NULL);
             slabs_next(&b);) {
            const SectionSlab slab = section_slab(model, s, &b);
            const uint64_t offset = at + (uint64_t)slab.first * size;
            const size_t bytes = slab.count * size;
            char *memory = s->memory + slab.offset * size;
            if (out) p->t->ops->copy_out(staged.bytes, memory, bytes);
            if (sections->transpose)
                section_write_parameters(out, sum, at, model, &slab, size, !whole);
            else
                section_move(out, in, sum, offset, staged.bytes, bytes);
            if (in) p->t->ops->copy_in(memory, staged.bytes, bytes);
            pass_advance(p, bytes);
        }
        for (const Parameter *m = model->parameters; whole && m < model->parameters + model->parameter_count; m++)
            if (m->file_rows) section_write_stack(p->t->ops, out, sum, at, m, s->memory, size);
        at += section_count(model, s) * size;
    }
}

// ---- saving ---------------------------------------------------------------------------------------------------------
// Begins a large file of `bytes` bytes. Rank 0 makes the file at full size; all ranks write to the file.
static void save_begin(CheckpointPass *p, size_t file, uint64_t bytes, OutputFile *output) {
    const char *name = manifest_file(&p->manifest, file);
    char path[PATH_MAX];
    memset(output, 0, sizeof(*output));
    p->manifest.bytes[file] = bytes;
    if (dist_rank() == 0) folder_open_file(&p->folder, output, name, bytes);
    path_join(path, p->folder.temporary, name);
    output_share(output, path);
}

// Ends a large file once every rank's part is synced. sum: checksum of this rank's part
static void save_end(CheckpointPass *p, size_t file, OutputFile *output, Checksum *sum) {
    if (dist_rank() != 0) output_leave(output);
    checksum_join(sum); // also waits for the other ranks
    p->manifest.checksum[file] = checksum_value(0, sum, p->manifest.bytes[file]);
    if (dist_rank() == 0) output_commit(output);
}

// Saves MANIFEST_MODEL or MANIFEST_OPTIMIZER. Collective.
static void save_large(CheckpointPass *p, size_t file, size_t step) {
    const Sections sections = file_sections(p->t, file);
    const size_t header = file_header(p->t, file, step);
    Checksum sum = {{0, 0}};
    OutputFile output;
    save_begin(p, file, header + sections.bytes, &output);
    if (dist_rank() == 0) section_move(&output, NULL, &sum, 0, staged_reformed.bytes, header);
    sections_transfer(p, &sections, header, &output, NULL, &sum);
    save_end(p, file, &output, &sum);
}

// Saves the waiting completions. Collective.
static void save_waiting(CheckpointPass *p) {
    const WaitingPart *part = p->t->waiting;
    const size_t file = manifest_rollout(&p->manifest);
    Checksum sum = {{0, 0}};
    OutputFile output;
    save_begin(p, file, part->whole, &output);
    if (part->writes) section_move(&output, NULL, &sum, part->begin, part->bytes, part->count);
    save_end(p, file, &output, &sum);
}

static void save_small(CheckpointPass *p, size_t file, const char *text, size_t length) {
    p->manifest.bytes[file] = length;
    p->manifest.checksum[file] = checksum_of(0, text, length);
    folder_write_file(&p->folder, manifest_file(&p->manifest, file), text, length);
}

// Saves the small files, then DONE. Call on rank 0.
static void save_finish(CheckpointPass *p, CheckpointFolder *folder, const RunState *run) {
    // NOLINTNEXTLINE(bugprone-branch-clone): the larger of two constants
    static char text[RUN_STATE_LIMIT > ADAPTER_CONFIG_TEXT ? RUN_STATE_LIMIT : ADAPTER_CONFIG_TEXT];
    const char *path = p->folder.path;
    save_small(p, MANIFEST_STATE, text, run_state_text(run, text, path));
    if (p->t->lora) save_small(p, MANIFEST_CONFIG, text, adapter_config_text(p->t->lora, p->t->base_path, text, path));
    folder_write_file(&p->folder, MANIFEST_NAME, text, manifest_text(&p->manifest, text));
    checkpoint_finish(folder, run->step, &p->folder);
}

// Refuses a disk that is too small for `count` checkpoints, before anything is written. A replaced run's bytes become
// free after the first checkpoint. where: begins the message. Returns the free bytes; 0: unknown. Call on rank 0
static uint64_t checkpoint_check_space(const CheckpointFolder *folder, const TrainedTensors *t, const char *where,
                                       size_t count) {
    const uint64_t each = checkpoint_bytes(t), later = each * (count - 1);
    const uint64_t wanted = each + (later > folder->old ? later - folder->old : 0);
    uint64_t available;
    char last[128] = "";
    if (dist_rank() != 0 || !space_available(folder->path, &available)) return 0;
    if (wanted <= available) return available;
    if (folder->last != CHECKPOINT_NONE)
        snprintf(last, sizeof(last), ", then --resume from step %zu, which is safe", folder->last);
    if (folder->old)
        snprintf(last, sizeof(last), "; the replaced run has %s, until the first checkpoint is complete",
                 human_bytes((double)folder->old));
    if (wanted > each)
        die("%s: %zu checkpoints of %s take %s, but only %s are free; make room, or give --keep-checkpoints 1 or "
            "--save-every off%s",
            where, count, human_bytes((double)each), human_bytes((double)(each * count)),
            human_bytes((double)available), last);
    die("%s: a checkpoint takes %s (%llu bytes), but only %s are free; free some space%s", where,
        human_bytes((double)each), (unsigned long long)each, human_bytes((double)available), last);
}

// Saves a checkpoint unless that step is saved already. Returns the bytes written. Collective.
static uint64_t checkpoint_save(CheckpointFolder *folder, const TrainedTensors *t, const RunState *run) {
    static CheckpointPass pass;
    if (folder->last == run->step) return 0;
    pass_begin(&pass, t, "saving", dist_ranks());
    pass.manifest.adapters = t->lora != NULL, pass.manifest.waits = t->waiting && t->waiting->is_there;
    checkpoint_path(pass.folder.path, folder->path, run->step, "");
    checkpoint_check_space(folder, t, pass.folder.path, 1);
    checkpoint_path(pass.folder.temporary, folder->path, run->step, ".partial");
    if (dist_rank() == 0) checkpoint_begin(&pass.folder);
    save_large(&pass, MANIFEST_MODEL, run->step);
    save_large(&pass, MANIFEST_OPTIMIZER, run->step);
    if (pass.manifest.waits) save_waiting(&pass);
    if (dist_rank() == 0) save_finish(&pass, folder, run);
    folder->last = run->step;
    progress_end(&pass.progress);
    return pass.manifest.bytes[MANIFEST_MODEL] + pass.manifest.bytes[MANIFEST_OPTIMIZER];
}

// ---- loading --------------------------------------------------------------------------------------------------------
static void load_check_sum(const CheckpointPass *p, size_t file, const char *path, uint64_t found) {
    const uint64_t expected = p->manifest.checksum[file];
    if (found != expected)
        die("%s: is damaged: its checksum is %016llx, not %016llx; restore it, or give --resume auto, which takes the "
            "checkpoint before it",
            path, (unsigned long long)found, (unsigned long long)expected);
}

static const char *load_path(const CheckpointPass *p, size_t file, char path[PATH_MAX]) {
    path_join(path, p->folder.path, manifest_file(&p->manifest, file));
    return path;
}

// Returns the text of a small file. The caller frees it.
static char *load_small(const CheckpointPass *p, size_t file, size_t limit, size_t *length, char path[PATH_MAX]) {
    char *text = input_read_text(load_path(p, file, path), limit, length);
    load_check_sum(p, file, path, checksum_of(0, text, *length));
    return text;
}

// Reads the part of the sections, which follow `header` bytes, that memory holds. A rank that holds everything verifies
// the checksum itself; otherwise the ranks do so together.
static void load_sections(CheckpointPass *p, size_t file, const InputFile *input, size_t header) {
    const Sections sections = file_sections(p->t, file);
    const int whole = holds_whole(sections.section[0].sharding);
    Checksum sum = {{0, 0}};
    if (whole || dist_rank() == 0) section_move(NULL, input, &sum, 0, staged_reformed.bytes, header);
    sections_transfer(p, &sections, header, NULL, input, &sum);
    if (!whole) checksum_join(&sum);
    load_check_sum(p, file, input->path, checksum_value(0, &sum, input->bytes));
}

static void load_weights(CheckpointPass *p) {
    const Model *model = p->t->model;
    char path[PATH_MAX], saved[4096], wanted[4096];
    WeightSource *source = weights_open(load_path(p, MANIFEST_MODEL, path));
    source->config.pad_token_id = model->config.pad_token_id; // older checkpoints lack the key
    config_to_text(&source->config, saved, sizeof(saved));
    config_to_text(&model->config, wanted, sizeof(wanted));
    if (strcmp(saved, wanted) != 0) {
        size_t i = first_difference(saved, wanted);
        die("%s: holds another model: %.*s, not %.*s; resume with the model that the run began with", path,
            (int)strcspn(saved + i, ","), saved + i, (int)strcspn(wanted + i, ","), wanted + i);
    }
    if (source->dtype != model->dtype)
        die("%s: holds %s weights, this run trains in %s; resume with --dtype %s", path, dtype_name(source->dtype),
            dtype_name(model->dtype), dtype_name(source->dtype));
    load_sections(p, MANIFEST_MODEL, &source->files[0], flat_header_bytes(model));
    model_copy_constants(model, &source->model);
    weights_close(source);
}

static void load_adapters(CheckpointPass *p) {
    const TrainedTensors *t = p->t;
    char path[PATH_MAX], config[PATH_MAX];
    size_t length;
    InputFile file = input_open(load_path(p, MANIFEST_MODEL, path));
    load_check_sum(p, MANIFEST_MODEL, path, file_checksum(&file)); // reports damage before the parser fails
    input_close(&file);
    Lora lora = *t->lora; // a copy, because opening the adapters changes it
    WeightSource *source = adapter_open_tensors(path, &lora, t->base_model, NULL, NULL);
    BaseKey base = adapter_recorded_base(&source->files[0]);
    adapter_check_base(path, &base, &t->base, t->base_path);
    if (source->dtype != saved_type(t))
        die("%s: holds adapters in %s, this run uses %s; resume with the same --dtype and --master", path,
            dtype_name(source->dtype), dtype_name(saved_type(t)));
    weights_load(source, t->model, t->weights_sharding, t->ops, t->weights); // rounds the master weights
    pass_advance(p, file_sections(t, MANIFEST_MODEL).bytes / t->weights_sharding.ranks);
    weights_close(source);
    free(load_small(p, MANIFEST_CONFIG, ADAPTER_CONFIG_TEXT, &length, config));
}

// Refuses to resume adapters as a whole model, or a whole model as adapters. lora: this run trains adapters
static void checkpoint_check_kind(const char *checkpoint, const Manifest *manifest, int lora) {
    if (manifest->adapters && !lora)
        die("%s: holds adapters, but without --lora-rank or --adapter this run trains the whole model; resume with the "
            "options that the run began with",
            checkpoint);
    if (!manifest->adapters && lora)
        die("%s: holds a whole model, but --lora-rank or --adapter trains adapters; resume without these options, or "
            "begin a new run with --model %s and another --out",
            checkpoint, checkpoint);
}

static void load_check_optimizer(const char *path, const OptimizerHeader *found, const OptimizerHeader *wanted) {
    if (memcmp(found->magic, wanted->magic, sizeof(found->magic)) != 0)
        die("%s: does not begin with " OPTIMIZER_MAGIC
            ", so it is not an optimizer state; resume an earlier checkpoint",
            path);
    if (found->byte_order != wanted->byte_order)
        die("%s: was written on a machine of the other byte order; resume on a machine of its byte order", path);
    if (found->version != wanted->version || found->header_bytes != wanted->header_bytes)
        die("%s: is of version %u, but this program reads version %u; resume with the program that wrote it", path,
            found->version, wanted->version);
    if (found->elements != wanted->elements)
        die("%s: is for a model of %llu elements, but this model has %llu; resume with the model that the run began "
            "with",
            path, (unsigned long long)found->elements, (unsigned long long)wanted->elements);
    if (found->moments != wanted->moments)
        die("%s: holds moments in %s, this run has %s; resume with the same --moments", path,
            dtype_name((DType)found->moments), dtype_name((DType)wanted->moments));
    if (found->master != wanted->master)
        die("%s: was saved %s master weights; resume with --master %s", path, found->master ? "with" : "without",
            found->master ? "fp32" : "none");
    if (found->step != wanted->step)
        die("%s: is of step %llu, but state.json is of step %llu; resume an earlier checkpoint", path,
            (unsigned long long)found->step, (unsigned long long)wanted->step);
}

static void load_optimizer(CheckpointPass *p, size_t step) {
    const uint64_t expected = sizeof(OptimizerHeader) + file_sections(p->t, MANIFEST_OPTIMIZER).bytes;
    OptimizerHeader header, wanted = optimizer_header(p->t, step);
    char path[PATH_MAX];
    InputFile file = input_open(load_path(p, MANIFEST_OPTIMIZER, path));
    if (file.bytes < sizeof(header))
        die("%s: is truncated to %llu bytes; resume an earlier checkpoint", path, (unsigned long long)file.bytes);
    input_read(&file, 0, &header, sizeof(header));
    load_check_optimizer(path, &header, &wanted);
    if (file.bytes != expected)
        die("%s: has %llu bytes, but %llu were expected; resume an earlier checkpoint", path,
            (unsigned long long)file.bytes, (unsigned long long)expected);
    load_sections(p, MANIFEST_OPTIMIZER, &file, sizeof(header));
    input_close(&file);
}

// Loads the waiting completions. Collective.
static void load_waiting(CheckpointPass *p) {
    WaitingPart *part = p->t->waiting;
    const size_t file = manifest_rollout(&p->manifest);
    char path[PATH_MAX];
    InputFile input = input_open(load_path(p, file, path));
    load_check_sum(p, file, path, file_checksum(&input));
    if (!part || input.bytes != part->whole)
        die("%s: has %llu bytes, but completions of this run take %llu; resume with the options that it began with",
            path, (unsigned long long)input.bytes, (unsigned long long)(part ? part->whole : 0));
    input_read(&input, part->begin, part->bytes, part->count);
    part->is_there = 1;
    input_close(&input);
}

// Loads weights and optimizer from a step's checkpoint, and the run's progress into *run. The checkpoint's schedule and
// settings must agree with the ones in *run (run_state.h); otherwise ends the program with one line. Collective.
static void checkpoint_load(const CheckpointFolder *folder, size_t step, const TrainedTensors *t, RunState *run) {
    static CheckpointPass pass;
    char path[PATH_MAX];
    size_t length;
    pass_begin(&pass, t, "resuming", t->optimizer_sharding.ranks);
    checkpoint_path(pass.folder.path, folder->path, step, "");
    const char *fault = manifest_read(pass.folder.path, &pass.manifest);
    if (fault)
        die("%s: is not a complete checkpoint: %s; type --resume auto, which takes an earlier checkpoint",
            pass.folder.path, fault);
    checkpoint_check_kind(pass.folder.path, &pass.manifest, t->lora != NULL);
    char *state = load_small(&pass, MANIFEST_STATE, RUN_STATE_LIMIT, &length, path);
    run_state_resume(run, state, length, pass.folder.path, path);
    free(state);
    if (run->step != step)
        die("%s: is of step %zu, but its folder's name says %zu; give the folder its old name", path, run->step, step);
    if (t->lora)
        load_adapters(&pass);
    else
        load_weights(&pass);
    load_optimizer(&pass, step);
    if (pass.manifest.waits) load_waiting(&pass);
    progress_end(&pass.progress);
}

#endif
