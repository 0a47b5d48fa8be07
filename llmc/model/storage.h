/*
Storage of a frozen model's weights: matrices in 4 or 8 bits, other parameters as floats of the model's type.
Storage.table is a second parameter table, of bytes, with the same groups. A quantised matrix is one record in it
(quantise.h); any other parameter is its elements. So code that moves or shards weights (residency.h,
slabs.h) works on stored groups with bytes as elements. A step decodes the groups it uses.

Layers of a kind may differ in which matrices are quantised.
*/
#ifndef LLMC_STORAGE_H
#define LLMC_STORAGE_H
#include "llmc/base/quantise.h"
#include "model.h"

typedef struct {
    QuantFormat *format; // [parameters of the model]
    QuantType type;      // type of the quantised matrices
    Model table;         // parameter i of the model is bytes [offset, offset + rows)
} Storage;

#define STORAGE_ALIGNMENT 64 // alignment of records and groups, in bytes

// Appends parameter i of the model. A record begins at an aligned byte. Elements follow without gaps, so that a step
// can use a group without records directly.
static void storage_add(Storage *storage, const Model *model, size_t i) {
    const QuantFormat format = storage->format[i];
    const size_t n = parameter_elements(&model->parameters[i]);
    const int floats = format.type == QUANT_NONE;
    Model *table = &storage->table;
    Parameter *p = &table->parameters[table->parameter_count++];
    *p = model->parameters[i];
    p->rows = floats ? n * dtype_size(model->dtype) : quant_parts(format, n).bytes, p->cols = 0;
    p->offset = floats ? table->elements : quant_align(table->elements, STORAGE_ALIGNMENT);
    table->elements = p->offset + p->rows;
}

// Builds the table. format: [parameters of the model], QUANT_NONE for floats. Free it with storage_free.
static void storage_build(Storage *storage, const Model *model, const QuantFormat *format) {
    const size_t L = model->config.num_hidden_layers;
    Model *table = &storage->table;
    memset(table, 0, sizeof(*table));
    storage->format = (QuantFormat *)checked_calloc(model->parameter_count, sizeof(QuantFormat), "formats of weights");
    memcpy(storage->format, format, model->parameter_count * sizeof(QuantFormat));
    storage->type = QUANT_NONE;
    table->config = model->config, table->dtype = DTYPE_INT8;
    table->parameters =
        (Parameter *)checked_calloc(model->parameter_count, sizeof(Parameter), "the table of stored weights");
    table->layer_starts = (size_t *)checked_calloc(L + 1, sizeof(size_t), "the table of stored weights");
    for (size_t i = 0; i < MODEL_TENSORS; i++) table->model_offset[i] = ABSENT;
    for (size_t i = 0, layer = 0; i < model->parameter_count; i++) {
        for (; layer <= L && model->parameters[i].offset >= model->layer_starts[layer]; layer++) {
            table->elements = quant_align(table->elements, STORAGE_ALIGNMENT);
            table->layer_starts[layer] = table->elements;
        }
        storage_add(storage, model, i);
        if (format[i].type != QUANT_NONE) storage->type = format[i].type;
        for (size_t t = 0; t < MODEL_TENSORS; t++)
            if (model->model_offset[t] == model->parameters[i].offset)
                table->model_offset[t] = table->parameters[i].offset;
    }
}

static void storage_free(Storage *storage) {
    free(storage->format);
    storage->format = NULL;
    model_free(&storage->table);
}

// Returns the number of tensors that make a parameter, in order; 1: it is not split. Files hold a stack of experts as
// one tensor, or as one tensor for each expert's gate (if any), up and down ("split").
static size_t parameter_pieces(const Family *family, const Parameter *p) {
    if (!p->experts) return 1;
    return text_ends_with(p->name, family->names.layer.EXPERTS_DOWN) ? p->experts : expert_parts(family) * p->experts;
}

// Returns a format for a parameter in files: blocks of fp8 end with each matrix.
static QuantFormat parameter_file_format(QuantFormat f, const Family *family, const Parameter *p) {
    return quant_on(f, p->rows / (family->names.expert[0] ? parameter_pieces(family, p) : max_size(p->experts, 1)),
                    p->cols);
}

// Returns the format in memory of a parameter with this format in files. Fused rows have another order: blocks of fp8
// are so low that each lies in one block of the files.
static QuantFormat parameter_memory_format(QuantFormat f, const Parameter *p) {
    for (size_t i = 0; f.type == QUANT_FP8 && p->fused.groups && i < FUSED_MOST; i++)
        f.grid.block_rows = greatest_common_divisor(f.grid.block_rows, p->fused.width[i]);
    return f;
}

static QuantFormat parameter_format(QuantFormat f, const Family *family, const Parameter *p) {
    return parameter_memory_format(parameter_file_format(f, family, p), p);
}

// Tells whether a matrix can be stored in bits of a type: the matrix of a linear layer, with `head` also lm_head; in
// mxfp4 only experts' matrices. A matrix that shares one tensor of the files with matrices of other layers cannot.
static int parameter_quantises(const Model *model, const Parameter *p, QuantType type, int head) {
    if (p->role != ROLE_LINEAR || !p->cols || p->joined || (type == QUANT_MXFP4 && !p->experts)) return 0;
    return head || p->offset != model->model_offset[LM_HEAD];
}

// Chooses `format` for every matrix that can have it.
static void storage_choose(Storage *storage, const Model *model, QuantFormat format, int head) {
    QuantFormat *formats =
        (QuantFormat *)checked_calloc(model->parameter_count, sizeof(QuantFormat), "formats of weights");
    for (size_t i = 0; i < model->parameter_count; i++)
        if (parameter_quantises(model, &model->parameters[i], format.type, head))
            formats[i] = parameter_format(format, model->config.family, &model->parameters[i]);
    storage_build(storage, model, formats);
    free(formats);
}

// Tells whether a group has a quantised matrix and so is decoded before use.
static int storage_decodes(const Storage *storage, const Model *model, size_t group) {
    const Range of = group_parameters(model, group);
    for (size_t i = of.begin; i < of.begin + of.count; i++)
        if (storage->format[i].type != QUANT_NONE) return 1;
    return 0;
}

#endif
