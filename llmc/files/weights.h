/*
The interface to weights in files of any format: the rest of the program knows no formats, and holds no model's weights
on the host. Between files and device memory everything passes through fixed host buffers of a few MiB
(weight_source.h), so a model may be larger than host memory. Writing allocates nothing; files are complete or absent.
*/
#ifndef LLMC_WEIGHTS_H
#define LLMC_WEIGHTS_H
#include "flat.h"
#include "hf_weights.h"
#include "llmc/ops/arena.h"
#include "llmc_gpt2.h"
#include "weight_source.h"

// ---- opening --------------------------------------------------------------------------------------------------------
// Opens a single file; the file's first bytes tell the format.
static void weights_open_file(WeightSource *source, const char *path) {
    unsigned char begin[8] = {0};
    int32_t number;
    input_begin(path, begin, sizeof(begin));
    memcpy(&number, begin, sizeof(number));
    if (!memcmp(begin, FLAT_MAGIC, 8)) {
        flat_open(source);
    } else if (number == LLMC_MODEL_MAGIC || number == LLMC_MAGIC_SWAPPED) {
        llmc_gpt2_open(source);
    } else {
        if (text_ends_with(path, ".safetensors") || text_ends_with(path, ".json"))
            die("%s: is a file of a Hugging Face model; give its directory", path);
        file_refuse_kind(path, "a model");
        die("%s: is neither a flat .bin nor an llm.c GPT-2 .bin; for a Hugging Face model give its directory", path);
    }
}

// Opens a Hugging Face directory, a flat .bin or an llm.c GPT-2 .bin; checks everything except the weights' values.
static WeightSource *weights_open(const char *path) {
    WeightSource *source = source_new(path, NULL);
    if (!path_exists(path))
        die("%s: %s; a model is a Hugging Face directory, a flat .bin or an llm.c GPT-2 .bin", path, error_text(errno));
    if (path_is_directory(path))
        hf_open(source, path);
    else
        weights_open_file(source, path);
    source_finish(source);
    return source;
}

// Makes a source of random initial weights. It computes them when they are read.
static WeightSource *weights_random(const Config *config, DType dtype, uint64_t seed) {
    WeightSource *source = source_new("--init", "random weights");
    source->config = *config, source->random = 1, source->seed = seed;
    source_set_table(source, model_build(config, dtype));
    for (size_t i = 0; i < source->model.parameter_count; i++) source->places[i].type = dtype;
    source_finish(source);
    return source;
}

static void weights_close(WeightSource *source) {
    for (size_t i = 0; i < source->file_count; i++) input_close(&source->files[i]);
    free(source->files);
    free(source->mean[0]), free(source->mean[1]);
    for (size_t i = 0; source->pieces && i < source->model.parameter_count; i++) free(source->pieces[i].place);
    for (size_t i = 0; source->records && i < source->model.parameter_count; i++) {
        for (size_t k = 0; k < 2 * source->records[i].pieces; k++) free(source->records[i].pair[k].name);
        free(source->records[i].pair);
    }
    free(source->places), free(source->pieces), free(source->quant), free(source->records);
    free(source->held->record), free(source->held->matrix), free(source->held);
    safetensors_free(&source->others);
    free(source->path);
    model_free(&source->model);
    free(source);
}

enum { KEY_SAMPLES = 64, KEY_SAMPLE_BYTES = 4096 }; // samples of each file

// Returns a key of the model, made from its configuration and samples of its files. Ranks compare keys to check that
// they have the same model.
static uint64_t weights_key(const WeightSource *source) {
    unsigned char sample[KEY_SAMPLE_BYTES];
    uint64_t key = config_checksum((uint64_t)source->dtype, source->config);
    for (size_t i = 0; i < source->file_count; i++) {
        const InputFile *file = &source->files[i];
        const size_t n = (size_t)(file->bytes < sizeof(sample) ? file->bytes : sizeof(sample));
        key = random_mix(key ^ file->bytes);
        for (size_t k = 0; k < KEY_SAMPLES; k++) {
            input_read(file, (file->bytes - n) / (KEY_SAMPLES - 1) * k, sample, n);
            key = checksum_of(key, sample, n);
        }
    }
    return key;
}

// ---- into device memory ---------------------------------------------------------------------------------------------
// Loads the weights that this rank holds, in model->dtype. `model` is source->model, or a model with an equal config.
static void weights_load(const WeightSource *source, const Model *model, Sharding sharding, const Ops *ops,
                         void *device_base) {
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i], *stored = &source->model.parameters[i];
        if (model->parameter_count != source->model.parameter_count || p->rows != stored->rows ||
            p->cols != stored->cols)
            die("internal: %s: holds another model than the one to be loaded; please report it", source->path);
    }
    const size_t size = dtype_size(model->dtype);
    const char *label = source->random ? "initialising" : "loading";
    for (Slabs s = slabs_of(model, SLABS_OF_PARAMETERS, sharding, sharding, label); slabs_next(&s);) {
        weights_read(source, s.parameter, s.begin, s.count, model->dtype, staged.bytes);
        ops->copy_in(element_address(device_base, model->dtype, s.offset), staged.bytes, s.count * size);
    }
}

// Initialises the weights that this rank holds, in model->dtype (initial_weights.h).
static void weights_init_random(const Model *model, Sharding sharding, const Ops *ops, void *device_base,
                                uint64_t seed) {
    WeightSource source = {0};
    source.model = *model, source.random = 1, source.seed = seed;
    weights_load(&source, model, sharding, ops, device_base);
}

// ---- refusing NaN and Inf -------------------------------------------------------------------------------------------
// Ends the program with the name of the first element on this rank that is not finite. Some rank must have such an
// element.
__attribute__((noreturn)) static void weights_name_bad_element(const Model *model, size_t bad, Sharding sharding,
                                                               const Ops *ops, const void *device_base,
                                                               const char *when, const char *advice) {
    const Parameter *p = &model->parameters[bad];
    char at[PLACE_TEXT];
    for (Slabs s = slabs_of(model, SLABS_OF_PARAMETERS, sharding, sharding, NULL); slabs_next(&s);) {
        if (s.parameter != bad) continue;
        const void *values = slab_from_device(&s, ops, device_base, model->dtype, DTYPE_FP32);
        const char *what = elements_bad_text(values, DTYPE_FP32, p->cols, s.begin, s.count, at);
        if (what) die("%sthe weights hold %s: tensor %s at %s; %s", when, what, p->name, at, advice);
    }
    die("%sthe sum of the weights' squares overflows: tensor %s; %s", when, p->name, advice);
}

// Finds the first parameter with an element that is not finite, for weights that are off-device.
static size_t weights_find_bad(const Model *model, Sharding sharding, const Ops *ops, const void *weights) {
    for (Slabs s = slabs_of(model, SLABS_OF_PARAMETERS, sharding, sharding, NULL); slabs_next(&s);) {
        const void *values = slab_from_device(&s, ops, weights, model->dtype, DTYPE_FP32);
        if (elements_find_bad(values, DTYPE_FP32, s.count) < s.count) return s.parameter;
    }
    return model->parameter_count;
}

// Ends the program if a weight on any rank is NaN or infinite; the first rank with such a weight reports it. when,
// advice: first and last words of the message
static void weights_check_finite_at(const Model *model, Sharding sharding, const Ops *ops, Place place,
                                    const void *weights, const char *when, const char *advice) {
    const int off_device = place > PLACE_DEVICE;
    size_t bad = off_device ? weights_find_bad(model, sharding, ops, weights) : 0, whose = 0;
    double parts[SQUARES_PARTS], *const sums = (double *)ops->allocate(sizeof(parts));
    if (!sums) die("no device memory for the %d partial sums of a norm; lower --memory-limit", SQUARES_PARTS);
    for (; !off_device && bad < model->parameter_count; bad++) {
        const ParameterShard held = parameter_shard(model, sharding, &model->parameters[bad]);
        if (!held.count) continue;
        ops->sum_of_squares(sums, SQUARES_PARTS, element_address_const(weights, model->dtype, held.offset),
                            model->dtype, held.count);
        ops->copy_out(parts, sums, sizeof(parts));
        if (!isfinite(squares_total(parts, SQUARES_PARTS))) break;
    }
    ops->release(sums, sizeof(parts));
    if (sharding.ranks > 1) bad = dist_smallest(bad, &whose);
    if (bad == model->parameter_count) return;
    if (whose == sharding.rank) weights_name_bad_element(model, bad, sharding, ops, weights, when, advice);
    dist_barrier(); // waits for the reporting rank to end the job
}

static void weights_check_finite(const Model *model, Sharding sharding, const Ops *ops, Place place,
                                 const void *weights) {
    weights_check_finite_at(model, sharding, ops, place, weights, "", "take another copy or an earlier checkpoint");
}

#endif
