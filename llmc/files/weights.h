/*
The one interface to weights in files, whatever their format: the rest of the program neither knows formats nor sees a model's
weights on the host. Between files and device memory everything passes through fixed host buffers of a few MiB
(weight_source.h), so a model may be larger than host memory; writing allocates nothing, and what is written is complete or
absent.
*/
#ifndef LLMC_WEIGHTS_H
#define LLMC_WEIGHTS_H
#include "llmc/ranks/dist.h"
#include "flat.h"
#include "hf_weights.h"
#include "llmc/model/initial_weights.h"
#include "llmc_gpt2.h"
#include "llmc/ops/ops.h"
#include "llmc/base/progress.h"
#include "safetensors.h"
#include "llmc/model/model.h"
#include "weight_source.h"
#include <fnmatch.h>

static Slab staged; // what goes to or comes from the device, in its type

// ---- opening -----------------------------------------------------------------------------------------------------------------------
// What a single file is shows in its first bytes.
static void weights_open_file(WeightSource *source, const char *path) {
    InputFile file = input_open(path);
    unsigned char begin[8] = {0};
    int32_t number;
    input_read(&file, 0, begin, (size_t)(file.bytes < 8 ? file.bytes : 8));
    input_close(&file);
    memcpy(&number, begin, sizeof(number));
    if (!memcmp(begin, FLAT_MAGIC, 8)) {
        flat_open(source, path);
    } else if (number == LLMC_MODEL_MAGIC || number == llmc_swap_bytes(LLMC_MODEL_MAGIC)) {
        llmc_gpt2_open(source, path);
    } else if (llmc_magic_name(number)) {
        die("%s: is %s", path, llmc_magic_name(number));
    } else {
        die("%s: is neither a flat .bin nor an llm.c GPT-2 .bin%s", path,
            text_ends_with(path, ".safetensors") || text_ends_with(path, ".json")
                ? "; give the directory it is in"
                : "; a Hugging Face model is given as its directory");
    }
}

// Opens a Hugging Face directory, a flat .bin or an llm.c GPT-2 .bin and checks everything but the weights' values.
static WeightSource *weights_open(const char *path) {
    WeightSource *source = (WeightSource *)checked_calloc(1, sizeof(*source), "a source of weights");
    source->path = checked_strdup(path);
    if (!path_exists(path))
        die("%s: %s; a model is a Hugging Face directory, a flat .bin or an llm.c GPT-2 .bin", path, strerror(errno));
    if (path_is_directory(path))
        hf_open(source, path);
    else
        weights_open_file(source, path);
    source->dtype = source_common_type(source);
    source->model.dtype = source->dtype;
    return source;
}

// Random initial weights as a source: nothing is read, any range is made when it is wanted.
static WeightSource *weights_random(const Config *config, DType dtype, uint64_t seed) {
    WeightSource *source = (WeightSource *)checked_calloc(1, sizeof(*source), "a source of weights");
    source->path = checked_strdup("--init");
    source->format = "random weights";
    source->config = *config;
    source->random = 1, source->seed = seed;
    source_build(source);
    for (size_t i = 0; i < source->model.parameter_count; i++) source->places[i].type = dtype;
    source->dtype = source->model.dtype = dtype;
    return source;
}

static void weights_close(WeightSource *source) {
    for (size_t i = 0; i < source->file_count; i++) input_close(&source->files[i]);
    free(source->files);
    free(source->places);
    free(source->path);
    model_free(&source->model);
    free(source);
}

enum { KEY_SAMPLES = 64, KEY_SAMPLE_BYTES = 4096 }; // of each file

// By which ranks know that they have the same model before them: its configuration, and samples all over its files.
static uint64_t weights_key(const WeightSource *source) {
    unsigned char sample[KEY_SAMPLE_BYTES];
    char config[4096];
    config_to_text(&source->config, config, sizeof(config));
    uint64_t key = checksum_piece((uint64_t)source->dtype, config, strlen(config));
    for (size_t i = 0; i < source->file_count; i++) {
        const InputFile *file = &source->files[i];
        const size_t n = (size_t)(file->bytes < sizeof(sample) ? file->bytes : sizeof(sample));
        key = random_mix(key ^ file->bytes);
        for (size_t k = 0; k < KEY_SAMPLES; k++) {
            input_read(file, (file->bytes - n) / (KEY_SAMPLES - 1) * k, sample, n);
            key = checksum_piece(key, sample, n);
        }
    }
    return key;
}

// ---- reading -----------------------------------------------------------------------------------------------------------------------
// out = elements [begin, begin + count) of a parameter, in memory order and converted to `as`.
static void weights_read(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                         void *out) {
    size_t elements = parameter_elements(&source->model.parameters[parameter]);
    if (begin > elements || count > elements - begin)
        die("%s: elements %zu to %zu of %s were wanted, it has %zu", source->path, begin, begin + count,
            source->model.parameters[parameter].name, elements);
    source_read(source, parameter, begin, count, as, out);
}

// The place of element `index` in a run of elements of `type` that begins at `base`.
static char *element_address(void *base, DType type, size_t index) { return (char *)base + index * dtype_size(type); }

static const char *element_address_const(const void *base, DType type, size_t index) {
    return (const char *)base + index * dtype_size(type);
}

// All weights that are held into device memory, in model->dtype. `model` is the source's own or has the same config.
static void weights_load(const WeightSource *source, const Model *model, Sharding sharding, const Ops *ops,
                         void *device_base) {
    Progress progress = progress_begin(stderr, "loading", 0, (double)sharding_elements(model, sharding));
    size_t n;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i], *stored = &source->model.parameters[i];
        if (model->parameter_count != source->model.parameter_count || p->rows != stored->rows ||
            p->cols != stored->cols)
            die("%s: holds another model than the one to be loaded", source->path);
        ParameterShard shard = parameter_shard(model, sharding, p);
        for (size_t done = 0; done < shard.count; done += n) {
            n = min_size(shard.count - done, SLAB_ELEMENTS);
            weights_read(source, i, shard.first + done, n, model->dtype, staged.bytes);
            ops->copy_in(element_address(device_base, model->dtype, shard.offset + done), staged.bytes,
                         n * dtype_size(model->dtype));
            progress_update(&progress, (double)(shard.offset + done + n));
        }
    }
    progress_end(&progress);
}

// Random initial weights, those that are held, into device memory, in model->dtype (initial_weights.h).
static void weights_init_random(const Model *model, Sharding sharding, const Ops *ops, void *device_base,
                                uint64_t seed) {
    Progress progress = progress_begin(stderr, "initialising", 0, (double)sharding_elements(model, sharding));
    size_t n;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const ParameterShard shard = parameter_shard(model, sharding, &model->parameters[i]);
        for (size_t done = 0; done < shard.count; done += n) {
            n = min_size(shard.count - done, SLAB_ELEMENTS);
            initial_weights(model, i, shard.first + done, n, seed, model->dtype, staged.bytes);
            ops->copy_in(element_address(device_base, model->dtype, shard.offset + done), staged.bytes,
                         n * dtype_size(model->dtype));
            progress_update(&progress, (double)(shard.offset + done + n));
        }
    }
    progress_end(&progress);
}

// ---- refusing NaN and Inf ------------------------------------------------------------------------------------------------------------
// Names the first bad element of what is held of a parameter. Only called when there is one.
__attribute__((noreturn)) static void weights_name_bad_element(const Model *model, const Parameter *p,
                                                               ParameterShard shard, const Ops *ops,
                                                               const void *device_base, const char *when,
                                                               const char *advice) {
    size_t n, cols = p->cols ? p->cols : 1;
    for (size_t done = 0; done < shard.count; done += n) {
        const float *values = (const float *)(const void *)staged_reformed.bytes;
        const size_t begin = shard.first + done;
        n = min_size(shard.count - done, SLAB_ELEMENTS);
        ops->copy_out(staged.bytes, element_address_const(device_base, model->dtype, shard.offset + done),
                      n * dtype_size(model->dtype));
        elements_convert(staged_reformed.bytes, DTYPE_FP32, staged.bytes, model->dtype, n);
        for (size_t i = 0; i < n; i++) {
            if (!isfinite(values[i]))
                die("%sthe weights hold %s: tensor %s at [%zu, %zu]; %s", when,
                    isnan(values[i]) ? "NaN" : "an infinity", p->name, (begin + i) / cols, (begin + i) % cols, advice);
        }
    }
    die("%sthe weights are too large to be squared and summed: tensor %s; %s", when, p->name, advice);
}

// Ends the program where a weight in device memory is NaN or infinite; of portions on any rank, and the first rank that
// has it says so. when, advice: the message's first and last words
static void weights_check_finite_at(const Model *model, Sharding sharding, const Ops *ops, const void *device_base,
                                    const char *when, const char *advice) {
    size_t bad, whose = 0;
    for (bad = 0; bad < model->parameter_count; bad++) {
        const ParameterShard shard = parameter_shard(model, sharding, &model->parameters[bad]);
        const char *values = element_address_const(device_base, model->dtype, shard.offset);
        if (shard.count && !isfinite(ops->sum_of_squares(values, model->dtype, shard.count))) break;
    }
    if (sharding.ranks > 1) bad = dist_smallest(bad, &whose);
    if (bad == model->parameter_count) return;
    if (whose == sharding.rank)
        weights_name_bad_element(model, &model->parameters[bad],
                                 parameter_shard(model, sharding, &model->parameters[bad]), ops, device_base, when,
                                 advice);
    dist_barrier(); // that rank ends all
}

static void weights_check_finite(const Model *model, Sharding sharding, const Ops *ops, const void *device_base) {
    weights_check_finite_at(model, sharding, ops, device_base, "", "take another copy or an earlier checkpoint");
}

// ---- writing a flat .bin ---------------------------------------------------------------------------------------------------------------
// Ends the program where a model cannot become the file `path` of `dtype`.
static void weights_check_output(const WeightSource *source, const char *path, DType dtype) {
    for (size_t i = 0; i < source->file_count; i++)
        if (path_is_file(path, source->files[i].fd))
            die("%s: is a file of the model that is read; give --out another name", path);
    if (dtype == DTYPE_FP16 && source->dtype != DTYPE_FP16)
        die("%s: weights are not converted to fp16; choose fp32 or bf16", source->path);
}

// From any format to a flat .bin of `dtype`, never holding the model; source->dtype keeps what the files have.
static void weights_convert(const WeightSource *source, const char *path, DType dtype) {
    Progress progress = progress_begin(stderr, "converting", 0, (double)source->model.elements);
    FlatWriter writer;
    size_t n;
    weights_check_output(source, path, dtype);
    flat_begin(&writer, path, &source->model, dtype);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const Parameter *p = &source->model.parameters[i];
        for (size_t begin = 0; begin < parameter_elements(p); begin += n) {
            n = min_size(parameter_elements(p) - begin, SLAB_ELEMENTS);
            weights_read(source, i, begin, n, dtype, staged.bytes);
            flat_append(&writer, staged.bytes, n * dtype_size(dtype));
            progress_update(&progress, (double)(p->offset + begin + n));
        }
    }
    progress_end(&progress);
    output_commit(&writer.output);
}

// ---- writing gradients -------------------------------------------------------------------------------------------------------------------
// Elements begin .. begin + n of a matrix [rows, cols] in `values`, into a file that holds it transposed from byte `at` on:
// the reverse of tensor_read_transposed.
static void gradients_write_transposed(const OutputFile *output, uint64_t at, const Parameter *p, size_t begin,
                                       size_t n, const float *values) {
    float *column = (float *)(void *)staged_raw.bytes;
    for (size_t c = 0; c < p->cols; c++) {
        size_t first = begin > c ? (begin - c + p->cols - 1) / p->cols : 0;
        size_t last = begin + n > c ? (begin + n - c + p->cols - 1) / p->cols : 0;
        if (first >= last) continue;
        for (size_t i = first; i < last; i++) column[i - first] = values[i * p->cols + c - begin];
        output_write(output, at + ((uint64_t)c * p->rows + first) * sizeof(float), column,
                     (last - first) * sizeof(float));
    }
}

// Takes the next of some globs, which commas separate; 0 behind the last.
static int next_glob(const char **globs, char glob[256]) {
    const size_t length = strcspn(*globs, ",");
    if (!**globs) return 0;
    if (length >= 256) die_usage("--grads-of: a glob of %zu characters; it takes 255 at most", length);
    snprintf(glob, 256, "%.*s", (int)length, *globs);
    *globs += length + ((*globs)[length] == ',');
    return 1;
}

// Whether a name matches one of the globs; NULL: every name does.
static int globs_match(const char *globs, const char *name) {
    char glob[256];
    if (!globs) return 1;
    while (next_glob(&globs, glob))
        if (fnmatch(glob, name, 0) == 0) return 1;
    return 0;
}

// Refuses a glob that matches no parameter.
static void gradients_check_globs(const char *globs, const Model *model) {
    char glob[256];
    size_t i;
    while (globs && next_glob(&globs, glob)) {
        for (i = 0; i < model->parameter_count && fnmatch(glob, model->parameters[i].name, 0) != 0;) i++;
        if (i == model->parameter_count)
            die_usage("--grads-of: '%s' matches no parameter; they have names such as %s", glob,
                      model->parameters[i - 1].name);
    }
}

typedef struct {
    uint64_t data, bytes; // where the tensors begin, and the whole file
} GradientFile;

// The header of a file of gradients, of parameters that match. file NULL: only the sizes.
static GradientFile gradients_write_header(const OutputFile *file, const char *globs, const Model *model) {
    SafetensorsWriter writer;
    safetensors_write_begin(&writer, file, NULL, 0, NULL, NULL);
    GradientFile sizes;
    for (size_t i = 0; i < model->parameter_count; i++)
        if (globs_match(globs, model->parameters[i].name))
            safetensors_write_entry(&writer, &model->parameters[i], DTYPE_FP32);
    sizes.data = safetensors_write_end(&writer);
    sizes.bytes = sizes.data + writer.data;
    return sizes;
}

// Ends the program where gradients_write would: to be called before the work is done.
static void gradients_check_place(const char *path, const char *globs, World world, const Model *model) {
    OutputFile output;
    if (world.rank) return; // rank 0 makes the file
    output_open(&output, path, gradients_write_header(NULL, globs, model).bytes);
    close(output.fd);
    output_discard();
}

// Rank 0 makes the file with its header, the others find it.
static void gradients_open(OutputFile *output, const char *path, const char *globs, World world, const Model *model,
                           uint64_t bytes) {
    char temporary[PATH_MAX] = "";
    if (world.rank == 0) {
        output_open(output, path, bytes);
        gradients_write_header(output, globs, model);
        memcpy(temporary, output->temporary, sizeof(temporary));
    }
    if (world_ranks(world) == 1) return;
    dist_broadcast(RANKS_ALL, temporary, sizeof(temporary), 0);
    if (world.rank) output_join(output, path, temporary);
}

static void gradients_close(OutputFile *output, World world) {
    if (world.rank) output_leave(output);
    if (world_ranks(world) > 1) dist_barrier(); // all parts are there
    if (world.rank == 0) output_commit(output);
    if (world_ranks(world) > 1) dist_barrier(); // and so is the file
}

// What is held of one parameter, from `shard.first` on, into a file whose tensor begins at byte `at`; in memory it lies
// from element `place` on.
static void gradients_write_parameter(const OutputFile *output, uint64_t at, const Parameter *p, ParameterShard shard,
                                      const Ops *ops, const void *device_gradients, DType stored, size_t place) {
    const float *values = (const float *)(const void *)staged_reformed.bytes;
    size_t n;
    for (size_t done = 0; done < shard.count; done += n) {
        const size_t begin = shard.first + done;
        n = min_size(shard.count - done, SLAB_ELEMENTS);
        ops->copy_out(staged.bytes, element_address_const(device_gradients, stored, place + done),
                      n * dtype_size(stored));
        elements_convert(staged_reformed.bytes, DTYPE_FP32, staged.bytes, stored, n);
        if (p->transposed)
            gradients_write_transposed(output, at, p, begin, n, values);
        else
            output_write(output, at + (uint64_t)begin * sizeof(float), values, n * sizeof(float));
    }
}

// Gradients in fp32 as safetensors, under the names and in the shapes of transformers' named_parameters(): of the
// parameters that match (globs_match). They lie in device memory, in `stored`, as the stage of ZeRO has it; every rank
// writes its portions.
static void gradients_write(const char *path, const char *globs, const Model *model, World world, const Ops *ops,
                            const void *device_gradients, DType stored) {
    const Sharding own = sharding_of(world, ZERO_NONE), memory = sharding_of(world, ZERO_GRADIENTS);
    const GradientFile sizes = gradients_write_header(NULL, globs, model);
    Progress progress = progress_begin(stderr, "writing gradients", 0, (double)sizes.bytes);
    OutputFile output;
    uint64_t at = sizes.data;
    gradients_open(&output, path, globs, world, model, sizes.bytes);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const ParameterShard shard = parameter_shard(model, own, p);
        if (!globs_match(globs, p->name)) continue;
        gradients_write_parameter(&output, at, p, shard, ops, device_gradients, stored,
                                  shard.count ? shard_offset(model, memory, p, shard.first) : 0);
        at += (uint64_t)parameter_elements(p) * sizeof(float);
        progress_update(&progress, (double)at);
    }
    progress_end(&progress);
    gradients_close(&output, world);
}

#endif
