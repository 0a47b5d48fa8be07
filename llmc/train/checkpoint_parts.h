/*
The large files of a checkpoint, model.bin or adapter_model.safetensors, and optimizer.bin: a header, then sections, each a
value for every element of what is trained, in the order of its table. Ranks write and read them in parts (table_parts.h),
a piece at a time through a static buffer: writing is dealt over all ranks, whoever holds what; reading takes what memory
holds. So the bytes of a file do not depend on the number of ranks or the stage of ZeRO. Nothing is allocated.
*/
#ifndef LLMC_CHECKPOINT_PARTS_H
#define LLMC_CHECKPOINT_PARTS_H
#include "llmc/files/adapter_file.h"
#include "llmc/files/checkpoint_folder.h"
#include "llmc/stream/residency.h"
#include "llmc/files/table_parts.h"
#include <assert.h>

// What a checkpoint holds, where it lies now. weights, and optimizer's m, v and master, are device memory.
typedef struct {
    const Model *model; // the table of what is trained: the model's or the adapters'
    const Ops *ops;
    char *weights;
    Sharding weights_sharding_of, optimizer_sharding; // whole, or this rank's portions
    OptimizerState optimizer;
    DType moment_type;
    const Lora *lora; // NULL: the model itself is trained
    BaseKey base;     // with LoRA: what the adapters are for
    const char *base_path;
    const Model *base_model;
} Trained;

// ---- sections -------------------------------------------------------------------------------------------------------
typedef struct {
    char *memory; // device; NULL: the section is not there
    DType type;
    Sharding held;
} Section;

enum { SECTIONS = 3 }; // of a file, at most

// Bytes of it in the file.
static size_t section_size(const Trained *t, Section s) {
    return s.memory ? t->model->elements * dtype_size(s.type) : 0;
}

// m, v and master in the order of the file.
static void optimizer_sections(const Trained *t, Section sections[SECTIONS]) {
    for (size_t i = 0; i < SECTIONS; i++) sections[i].type = t->moment_type, sections[i].held = t->optimizer_sharding;
    sections[0].memory = (char *)t->optimizer.m, sections[1].memory = (char *)t->optimizer.v;
    sections[2].memory = (char *)t->optimizer.master, sections[2].type = DTYPE_FP32;
}

static Section weights_section(const Trained *t) {
    Section section = {t->weights, t->model->dtype, t->weights_sharding_of};
    return section;
}

static int saves_master(const Trained *t) { return t->lora && t->optimizer.master; }

// The type of the weights in the file, and those weights.
static DType saved_type(const Trained *t) { return saves_master(t) ? DTYPE_FP32 : t->model->dtype; }

static Section saved_weights(const Trained *t) {
    Section sections[SECTIONS];
    optimizer_sections(t, sections);
    return saves_master(t) ? sections[2] : weights_section(t);
}

// The sections of a file, MANIFEST_MODEL or MANIFEST_OPTIMIZER; returns how many.
static size_t file_sections(const Trained *t, size_t file, Section sections[SECTIONS]) {
    optimizer_sections(t, sections);
    if (file == MANIFEST_OPTIMIZER) return SECTIONS;
    sections[0] = saved_weights(t);
    return 1;
}

static uint64_t sections_bytes(const Trained *t, size_t file) {
    Section sections[SECTIONS];
    const size_t count = file_sections(t, file, sections);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) bytes += section_size(t, sections[i]);
    return bytes;
}

// ---- headers --------------------------------------------------------------------------------------------------------
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

static OptimizerHeader optimizer_header(const Trained *t, size_t step) {
    OptimizerHeader header = {0};
    memcpy(header.magic, OPTIMIZER_MAGIC, sizeof(header.magic));
    header.version = OPTIMIZER_VERSION, header.byte_order = FLAT_BYTE_ORDER;
    header.header_bytes = sizeof(header);
    header.moments = (uint32_t)t->moment_type, header.master = t->optimizer.master != NULL;
    header.elements = t->model->elements, header.step = step;
    return header;
}

#define CHECKPOINT_HEADER sizeof(staged_reformed.bytes) // bytes at most

// The first bytes of a file, up to its sections; returns how many.
static size_t file_header(const Trained *t, size_t file, size_t step, void *room) {
    if (file == MANIFEST_OPTIMIZER) {
        const OptimizerHeader header = optimizer_header(t, step);
        memcpy(room, &header, sizeof(header));
        return sizeof(header);
    }
    if (t->lora) return adapter_header(t->model, saved_type(t), &t->base, (char *)room, CHECKPOINT_HEADER);
    flat_header((FlatHeader *)room, t->model, t->model->dtype);
    return sizeof(FlatHeader);
}

// Bytes of all of a checkpoint, at most.
static uint64_t checkpoint_bytes(const Trained *t) {
    uint64_t headers = sizeof(FlatHeader) + sizeof(OptimizerHeader);
    if (t->lora) headers += adapter_header(t->model, saved_type(t), &t->base, NULL, 0) + ADAPTER_CONFIG_TEXT;
    return headers + sections_bytes(t, MANIFEST_MODEL) + sections_bytes(t, MANIFEST_OPTIMIZER) + RUN_STATE_LIMIT;
}

// ---- how far a checkpoint is, for people ----------------------------------------------------------------------------
typedef struct {
    Progress bar;
    size_t done; // bytes
} CheckpointProgress;

// ranks: over how many the bytes are dealt
static CheckpointProgress checkpoint_progress_begin(const char *what, const Trained *t, size_t ranks) {
    const uint64_t bytes = sections_bytes(t, MANIFEST_MODEL) + sections_bytes(t, MANIFEST_OPTIMIZER);
    CheckpointProgress progress;
    progress.bar = progress_begin(stderr, what, 0, (double)bytes / (double)ranks);
    progress.done = 0;
    return progress;
}

static void checkpoint_progress_advance(CheckpointProgress *progress, size_t bytes) {
    progress->done += bytes;
    progress_update(&progress->bar, (double)progress->done);
}

// ---- between device and file, a piece at a time ---------------------------------------------------------------------
#define CHECKPOINT_PIECE ((size_t)4 << 20) // bytes
static_assert(CHECKPOINT_PIECE <= sizeof(staged.bytes), "a piece passes through the staging buffer");

// This rank's part of a section that begins at byte `at` of the file.
static void section_write(const OutputFile *file, uint64_t at, const Trained *t, Section s, Checksum *sum,
                          CheckpointProgress *progress) {
    const size_t size = dtype_size(s.type);
    size_t n;
    for (size_t i = 0; i < group_count(t->model) && s.memory; i++) {
        const TablePart part = table_part(t->model, parts_of_ranks(), s.held, group_at(t->model, i));
        for (size_t begin = 0; begin < part.count; begin += n) {
            const uint64_t place = at + (uint64_t)(part.first + begin) * size;
            n = min_size(part.count - begin, CHECKPOINT_PIECE / size);
            t->ops->copy_out(staged.bytes, s.memory + (part.place + begin) * size, n * size);
            checksum_add(sum, place, staged.bytes, n * size);
            output_write(file, place, staged.bytes, n * size);
            checkpoint_progress_advance(progress, n * size);
        }
    }
}

// What memory holds of a section that begins at byte `at` of the file.
static void section_read(const InputFile *file, uint64_t at, const Trained *t, Section s, Checksum *sum,
                         CheckpointProgress *progress) {
    const size_t size = dtype_size(s.type);
    size_t n;
    for (size_t i = 0; i < group_count(t->model) && s.memory; i++) {
        const TablePart part = table_part(t->model, s.held, s.held, group_at(t->model, i));
        for (size_t begin = 0; begin < part.count; begin += n) {
            const uint64_t place = at + (uint64_t)(part.first + begin) * size;
            n = min_size(part.count - begin, CHECKPOINT_PIECE / size);
            input_read(file, place, staged.bytes, n * size);
            checksum_add(sum, place, staged.bytes, n * size);
            t->ops->copy_in(s.memory + (part.place + begin) * size, staged.bytes, n * size);
            checkpoint_progress_advance(progress, n * size);
        }
    }
}

#endif
