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
moment, the last complete one stays. Nothing is allocated, and one run at a time may write to an --out (a lock on
OUT/lock).

Ranks save and load together, each its parts (checkpoint_parts.h): any number of them reads what any other has written.
Rank 0 makes the folder and a large file at its full size; every rank writes and syncs its parts; once all have, which
adding up their checksums waits for, rank 0 gives the file its name, and in the end writes the rest.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "run_state.h"
#include "checkpoint_parts.h"

// ---- saving ---------------------------------------------------------------------------------------------------------
// A large file: rank 0 makes it at its full size, with its header, and all ranks write their parts.
static void save_large(OutputFolder *checkpoint, const Trained *t, size_t file, size_t step, Manifest *manifest,
                       CheckpointProgress *progress) {
    const size_t header = file_header(t, file, step, staged_reformed.bytes);
    Section sections[SECTIONS];
    const size_t count = file_sections(t, file, sections);
    char path[PATH_MAX], temporary[PATH_MAX] = "";
    Checksum sum = {{0, 0}};
    uint64_t at = header;
    OutputFile output = {0};
    manifest->bytes[file] = header + sections_bytes(t, file);
    if (dist_rank() == 0) {
        folder_open_file(checkpoint, &output, manifest_file(manifest, file), manifest->bytes[file]);
        output_write(&output, 0, staged_reformed.bytes, header);
        checksum_add(&sum, 0, staged_reformed.bytes, header);
        memcpy(temporary, output.temporary, sizeof(temporary));
    }
    dist_broadcast(RANKS_ALL, temporary, sizeof(temporary), 0);
    path_join(path, checkpoint->temporary, manifest_file(manifest, file));
    if (dist_rank() != 0) output_join(&output, path, temporary);
    for (size_t i = 0; i < count; i++) {
        section_write(&output, at, t, sections[i], &sum, progress);
        at += section_size(t, sections[i]);
    }
    if (dist_rank() != 0) output_leave(&output);
    checksum_join(&sum); // once every other rank's part is synced
    manifest->checksum[file] = checksum_value(0, &sum, manifest->bytes[file]);
    if (dist_rank() == 0) output_commit(&output);
}

// A small file of a checkpoint, and its line in the manifest.
static void save_small(OutputFolder *checkpoint, size_t file, const char *text, size_t length, Manifest *manifest) {
    manifest->bytes[file] = length, manifest->checksum[file] = checksum_piece(0, text, length);
    folder_write_file(checkpoint, manifest_file(manifest, file), text, length);
}

// Rank 0: the small files; then it counts.
static void save_finish(CheckpointFolder *folder, OutputFolder *checkpoint, const Trained *t, const RunState *run,
                        Manifest *manifest) {
    static char text[RUN_STATE_LIMIT > ADAPTER_CONFIG_TEXT ? RUN_STATE_LIMIT : ADAPTER_CONFIG_TEXT];
    save_small(checkpoint, MANIFEST_STATE, text, run_state_text(run, text, checkpoint->path), manifest);
    if (t->lora)
        save_small(checkpoint, MANIFEST_CONFIG, text,
                   adapter_config_text(t->lora, t->base_path, text, checkpoint->path), manifest);
    folder_write_file(checkpoint, MANIFEST_NAME, text, manifest_text(manifest, text));
    checkpoint_finish(folder, run->step, checkpoint);
}

// Refuses a disk that is too small before anything is written to it. `where` begins the line. For rank 0 to find out.
static void checkpoint_check_space(const CheckpointFolder *folder, const Trained *t, const char *where) {
    uint64_t wanted = checkpoint_bytes(t), available;
    char last[64] = "";
    if (dist_rank() != 0 || !space_available(folder->path, &available) || wanted <= available) return;
    if (folder->last != CHECKPOINT_NONE)
        snprintf(last, sizeof(last), ", then --resume from step %zu, which is safe", folder->last);
    die("%s: a checkpoint takes %s (%llu bytes) and %s are free there; free some space%s", where,
        human_bytes((double)wanted), (unsigned long long)wanted, human_bytes((double)available), last);
}

static void checkpoint_save(CheckpointFolder *folder, const Trained *t, const RunState *run) {
    static OutputFolder checkpoint;
    if (folder->last == run->step) return; // it is there
    CheckpointProgress progress = checkpoint_progress_begin("saving", t, dist_ranks());
    Manifest manifest = {0};
    manifest.adapters = t->lora != NULL;
    checkpoint_path(checkpoint.path, folder->path, run->step, "");
    checkpoint_check_space(folder, t, checkpoint.path);
    checkpoint_path(checkpoint.temporary, folder->path, run->step, ".partial");
    if (dist_rank() == 0) checkpoint_begin(&checkpoint);
    save_large(&checkpoint, t, MANIFEST_MODEL, run->step, &manifest, &progress);
    save_large(&checkpoint, t, MANIFEST_OPTIMIZER, run->step, &manifest, &progress);
    if (dist_rank() == 0) save_finish(folder, &checkpoint, t, run, &manifest);
    folder->last = run->step;
    progress_end(&progress.bar);
}

// ---- loading --------------------------------------------------------------------------------------------------------
static void load_check_sum(const char *path, uint64_t found, uint64_t expected) {
    if (found != expected)
        die("%s: is damaged: its checksum is %016llx, not %016llx; remove its folder, and --resume takes the one "
            "before",
            path, (unsigned long long)found, (unsigned long long)expected);
}

static void load_state(const char *path, const char *checkpoint, RunState *run, const Manifest *manifest) {
    size_t length;
    char *text = input_read_text(path, RUN_STATE_LIMIT, &length);
    load_check_sum(path, checksum_piece(0, text, length), manifest->checksum[MANIFEST_STATE]);
    run_state_resume(run, text, length, checkpoint, path);
    free(text);
}

// What memory holds of sections behind `header` bytes of a file. Who holds all of it verifies all of it; else the ranks
// do so together.
static void load_sections(const InputFile *file, size_t header, const Trained *t, const Section *sections, size_t count,
                          CheckpointProgress *progress, uint64_t expected) {
    const int whole = holds_whole(sections[0].held);
    Checksum sum = {{0, 0}};
    uint64_t at = header;
    if (whole || dist_rank() == 0) {
        input_read(file, 0, staged_reformed.bytes, header);
        checksum_add(&sum, 0, staged_reformed.bytes, header);
    }
    for (size_t i = 0; i < count; i++) {
        section_read(file, at, t, sections[i], &sum, progress);
        at += section_size(t, sections[i]);
    }
    if (!whole) checksum_join(&sum);
    load_check_sum(file->path, checksum_value(0, &sum, file->bytes), expected);
}

static void load_weights(const char *path, const Trained *t, CheckpointProgress *progress, const Manifest *manifest) {
    WeightSource *source = weights_open(path);
    const Section section = weights_section(t);
    char saved[4096], wanted[4096];
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
    load_sections(&source->files[0], sizeof(FlatHeader), t, &section, 1, progress, manifest->checksum[MANIFEST_MODEL]);
    weights_close(source);
}

// Of any file, each rank a part of it: the parser of adapters shall not be the one to find damage. Collective.
static uint64_t file_checksum(const InputFile *file) {
    const Range own = shard_range((size_t)file->bytes, 1, dist_ranks(), dist_rank());
    Checksum sum = {{0, 0}};
    size_t n;
    for (size_t at = own.begin; at < own.begin + own.count; at += n) {
        n = min_size(own.begin + own.count - at, CHECKPOINT_PIECE);
        input_read(file, at, staged.bytes, n);
        checksum_add(&sum, at, staged.bytes, n);
    }
    checksum_join(&sum);
    return checksum_value(0, &sum, file->bytes);
}

static void load_adapters(const char *path, const Trained *t, CheckpointProgress *progress, const Manifest *manifest) {
    InputFile file = input_open(path);
    load_check_sum(path, file_checksum(&file), manifest->checksum[MANIFEST_MODEL]);
    input_close(&file);
    SafeTensors list = adapter_list(path);
    WeightSource *source = adapter_open_tensors(path, &list, t->lora, t->base_model);
    BaseKey base = adapter_recorded_base(&source->files[0]);
    adapter_check_base(path, &base, &t->base, t->base_path);
    if (source->dtype != saved_type(t))
        die("%s: holds adapters in %s, this run would in %s; resume with the same PRECISION and --master", path,
            dtype_name(source->dtype), dtype_name(saved_type(t)));
    weights_load(source, t->model, t->weights_sharding_of, t->ops, t->weights); // rounds the master weights
    checkpoint_progress_advance(progress, sections_bytes(t, MANIFEST_MODEL) / t->weights_sharding_of.ranks);
    safetensors_free(&list);
    weights_close(source);
}

static void load_config(const char *path, const Manifest *manifest) {
    size_t length;
    char *text = input_read_text(path, ADAPTER_CONFIG_TEXT, &length);
    load_check_sum(path, checksum_piece(0, text, length), manifest->checksum[MANIFEST_CONFIG]);
    free(text);
}

// A run goes on with what it began with. lora: whether this run trains adapters
static void checkpoint_check_kind(const char *checkpoint, const Manifest *manifest, int lora) {
    if (manifest->adapters && !lora)
        die("%s: holds adapters, but without --lora-rank or --adapter this run trains the whole model; resume with the "
            "options that the run began with",
            checkpoint);
    if (!manifest->adapters && lora)
        die("%s: holds a whole model, but --lora-rank or --adapter trains adapters; resume without, or begin a new run "
            "with --model %s and another --out",
            checkpoint, checkpoint);
}

static void load_check_optimizer(const char *path, const OptimizerHeader *found, const OptimizerHeader *wanted) {
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

static void load_optimizer(const char *path, const Trained *t, size_t step, CheckpointProgress *progress,
                           const Manifest *manifest) {
    const uint64_t expected = sizeof(OptimizerHeader) + sections_bytes(t, MANIFEST_OPTIMIZER);
    OptimizerHeader header, wanted = optimizer_header(t, step);
    Section sections[SECTIONS];
    InputFile file = input_open(path);
    optimizer_sections(t, sections);
    if (file.bytes < sizeof(header)) die("%s: is truncated: %llu bytes", path, (unsigned long long)file.bytes);
    input_read(&file, 0, &header, sizeof(header));
    load_check_optimizer(path, &header, &wanted);
    if (file.bytes != expected)
        die("%s: has %llu bytes, %llu were expected", path, (unsigned long long)file.bytes,
            (unsigned long long)expected);
    load_sections(&file, sizeof(header), t, sections, SECTIONS, progress, manifest->checksum[MANIFEST_OPTIMIZER]);
    input_close(&file);
}

// Fills weights and optimizer from the checkpoint of that step, and *run with where it stood; schedule and settings of
// *run are this run's and must agree (run_state.h). Whatever is not as it should be ends the program with one line.
// Collective.
static void checkpoint_load(const CheckpointFolder *folder, size_t step, const Trained *t, RunState *run) {
    char checkpoint[PATH_MAX], path[PATH_MAX];
    CheckpointProgress progress = checkpoint_progress_begin("resuming", t, t->optimizer_sharding.ranks);
    Manifest manifest;
    checkpoint_path(checkpoint, folder->path, step, "");
    const char *fault = manifest_check(checkpoint, &manifest);
    if (fault) die("%s: is not a complete checkpoint: %s", checkpoint, fault);
    checkpoint_check_kind(checkpoint, &manifest, t->lora != NULL);
    path_join(path, checkpoint, manifest_file(&manifest, MANIFEST_STATE));
    load_state(path, checkpoint, run, &manifest);
    if (run->step != step) die("%s: is of step %zu, its folder's name says %zu", path, run->step, step);
    path_join(path, checkpoint, manifest_file(&manifest, MANIFEST_MODEL));
    (t->lora ? load_adapters : load_weights)(path, t, &progress, &manifest);
    if (t->lora) {
        path_join(path, checkpoint, manifest_file(&manifest, MANIFEST_CONFIG));
        load_config(path, &manifest);
    }
    path_join(path, checkpoint, manifest_file(&manifest, MANIFEST_OPTIMIZER));
    load_optimizer(path, t, step, &progress, &manifest);
    progress_end(&progress.bar);
}

#endif
