/*
Writes gradients to a safetensors file (--grads-out), in fp32, with the names and shapes of transformers'
AutoModelForCausalLM.named_parameters(): all gradients, or the ones that globs choose. Rank 0 makes the file; every rank
writes its part of every tensor. The file is complete or absent.
*/
#ifndef LLMC_GRADIENTS_H
#define LLMC_GRADIENTS_H
#include "safetensors.h"
#include "weight_source.h"
#include <fnmatch.h>

// Writes elements [begin, begin + n) of a parameter that a file holds transposed from byte `at` on.
static void gradients_write_transposed(const OutputFile *output, uint64_t at, const Parameter *p, size_t begin,
                                       size_t n, const float *values) {
    for (size_t done = 0; done < n;) {
        const MatrixPart m = matrix_part(p, begin + done, n - done);
        matrix_write_transposed(output, NULL, at + (uint64_t)m.first * sizeof(float), m, p->cols, sizeof(float),
                                values + done);
        done += m.count;
    }
}

// Writes elements [begin, begin + n) of a parameter that is not transposed, whose tensor begins at byte `at`.
static void gradients_write_runs(const OutputFile *output, uint64_t at, const Parameter *p, size_t begin, size_t n,
                                 const float *values) {
    for (size_t done = 0, part; done < n; done += part) {
        const ElementRun run = file_run(p, begin + done);
        part = min_size(n - done, run.count);
        output_write(output, at + (uint64_t)run.at * sizeof(float), values + done, part * sizeof(float));
    }
}

// Copies the next of the comma-separated globs; returns 0 after the last.
static int next_glob(const char **globs, char glob[256]) {
    const size_t length = strcspn(*globs, ",");
    if (!**globs) return 0;
    if (length >= 256) die_usage("--grads-of: a glob of %zu characters is above the limit of 255; shorten it", length);
    snprintf(glob, 256, "%.*s", (int)length, *globs);
    *globs += length + ((*globs)[length] == ',');
    return 1;
}

// Tells whether a name matches one of the globs; NULL matches every name.
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
    uint64_t data, bytes; // offset of the tensors, and size of the file
} GradientFile;

// Writes the header of a gradient file for the parameters that match; file NULL: only computes the sizes.
static GradientFile gradients_write_header(const OutputFile *file, const char *globs, const Model *model) {
    SafetensorsWriter writer;
    safetensors_write_begin(&writer, file, NULL, 0, NULL, NULL);
    GradientFile sizes;
    for (const Parameter *p = model->parameters; p < model->parameters + model->parameter_count; p++)
        if (globs_match(globs, p->name) && !p->part) safetensors_write_named(&writer, p->name, p, DTYPE_FP32);
    sizes.data = safetensors_write_end(&writer);
    sizes.bytes = sizes.data + writer.data;
    return sizes;
}

// Ends the program if gradients_write could not write this path or these globs; call before training begins.
static void gradients_check_path(const char *path, const char *globs, World world, const Model *model) {
    OutputFile output;
    if (world.rank) return; // rank 0 makes the file
    output_open(&output, path, gradients_write_header(NULL, globs, model).bytes);
    close(output.fd);
    output_discard();
}

// Writes the gradients of parameters that match (globs_match) from `stored`, in device memory, sharded by ZeRO's stage.
// Every rank writes its part.
static void gradients_write(const char *path, const char *globs, const Model *model, World world, const Ops *ops,
                            const void *device_gradients, DType stored) {
    const Sharding own = sharding_of(world, ZERO_NONE), memory = sharding_of(world, ZERO_GRADIENTS);
    const GradientFile sizes = gradients_write_header(NULL, globs, model);
    OutputFile output;
    uint64_t at = sizes.data, joined[2] = {0, 0}; // offset in the file of the parameter's tensor, and of joined tensors
    size_t written = 0;                           // number of parameters before offset `at`
    if (world.rank == 0) {
        output_open(&output, path, sizes.bytes);
        gradients_write_header(&output, globs, model);
    }
    if (world_ranks(world) > 1) output_share(&output, path); // all ranks but rank 0 open the file that rank 0 made
    for (Slabs s = slabs_of(model, SLABS_OF_PARAMETERS, own, memory, "writing gradients"); slabs_next(&s);) {
        const Parameter *p = &model->parameters[s.parameter];
        for (; written < s.parameter; written++) {
            const Parameter *before = &model->parameters[written];
            if (!globs_match(globs, before->name) || before->part) continue;
            if (before->joined) joined[before->role == ROLE_EMBEDDING] = at;
            at += (uint64_t)parameter_file_elements(before) * sizeof(float);
        }
        if (!globs_match(globs, p->name)) continue;
        const float *values = (const float *)slab_from_device(&s, ops, device_gradients, stored, DTYPE_FP32);
        if (p->transposed)
            gradients_write_transposed(&output, at, p, s.begin, s.count, values);
        else
            gradients_write_runs(&output, p->part ? joined[p->role == ROLE_EMBEDDING] : at, p, s.begin, s.count,
                                 values);
    }
    if (world.rank) output_leave(&output);
    if (world_ranks(world) > 1) dist_barrier(); // all parts are written
    if (world.rank == 0) output_commit(&output);
    if (world_ranks(world) > 1) dist_barrier(); // from here on the file has its final name
}

#endif
