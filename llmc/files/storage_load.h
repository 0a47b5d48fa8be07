/*
Loads weights in storage format (storage.h): matrices as 4-bit records, other tensors in the model's type. Also measures
the quantisation error, and computes the key of stored weights by which adapters know their base.
*/
#ifndef LLMC_STORAGE_LOAD_H
#define LLMC_STORAGE_LOAD_H
#include "weights.h"

// Sums of squares over the layers' matrices of one name: of the errors (decoded - original), and of the original values
typedef struct {
    char name[64];
    double error, squares;
} StorageError;

enum { STORAGE_ERRORS = 24 };

typedef struct {
    StorageError kind[STORAGE_ERRORS];
    size_t kinds;
} StorageErrors;

static StorageError *storage_error_of(StorageErrors *errors, const Parameter *p) {
    const char *name = p->name, *digit = strpbrk(name, "0123456789"), *end;
    size_t i = 0;
    if (digit && (end = strchr(digit, '.')) != NULL) name = end + 1; // the name after "model.layers.7."
    const int length = (int)(strlen(name) - (text_ends_with(name, ".weight") ? strlen(".weight") : 0));
    while (i < errors->kinds &&
           (strncmp(errors->kind[i].name, name, (size_t)length) != 0 || errors->kind[i].name[length]))
        i++;
    if (i == STORAGE_ERRORS) die("internal: more than %d kinds of matrices; please report it", STORAGE_ERRORS);
    if (i == errors->kinds) {
        snprintf(errors->kind[i].name, sizeof(errors->kind[i].name), "%.*s", length, name);
        errors->kinds++;
    }
    return &errors->kind[i];
}

static void storage_compare(StorageErrors *errors, const WeightSource *source, size_t parameter,
                            const uint8_t *record) {
    const Parameter *p = &source->model.parameters[parameter];
    StorageError *e = storage_error_of(errors, p);
    float *was = (float *)(void *)staged.bytes, *is = (float *)(void *)staged_reformed.bytes;
    for (size_t begin = 0, count = parameter_elements(p), n; begin < count; begin += n) {
        n = min_size(count - begin, SLAB_ELEMENTS);
        source_read_stored(source, parameter, begin, n, DTYPE_FP32, 0, was);
        quant_decode_range(is, source->quant[parameter], record, count, begin, n);
        for (size_t i = 0; i < n; i++) {
            const double x = (double)was[i], d = (double)is[i] - x;
            e->error += d * d, e->squares += x * x;
        }
    }
}

// Loads the part of the model that this rank stores. errors: sums over ranks for matrices quantised at load, or NULL
static void storage_load(WeightSource *source, const Model *model, const Storage *storage, Sharding held,
                         const Ops *ops, char *device, StorageErrors *errors) {
    const Model *table = &storage->table;
    const size_t size = dtype_size(model->dtype);
    for (size_t i = 0; i < model->parameter_count; i++)
        if (errors && storage->format[i].type != QUANT_NONE) storage_error_of(errors, &model->parameters[i]);
    Slabs s = slabs_of(table, SLABS_OF_PARAMETERS, held, held, source->random ? "initialising" : "loading");
    for (size_t last = ABSENT; slabs_next(&s); last = s.parameter) {
        const size_t i = s.parameter, first = table->parameters[i].offset, begin = s.begin / size;
        if (storage->format[i].type == QUANT_NONE) {
            const Parameter *p = &model->parameters[i];
            char at[PLACE_TEXT];
            weights_read(source, i, begin, s.count / size, model->dtype, staged.bytes);
            const char *bad = elements_bad_text(staged.bytes, model->dtype, p->cols, begin, s.count / size, at);
            if (bad)
                die("the weights hold %s: tensor %s at %s; take another copy or an earlier checkpoint", bad, p->name,
                    at);
            ops->copy_in(device + s.offset, staged.bytes, s.count);
            continue;
        }
        const uint8_t *record = source_hold_record(source, i);
        ops->copy_in(device + s.offset, record + s.begin, s.count);
        const Sharding mine = parts_of_ranks(); // if all ranks hold a matrix, only one of them compares it
        const Range own = sharded_range(table, mine, group_of(table, first));
        const size_t at = first - group_begin(table, group_of(table, first));
        if (errors && i != last && !source->places[i].is_codes && at >= own.begin && at < own.begin + own.count)
            storage_compare(errors, source, i, record);
    }
    for (size_t k = 0; errors && dist_ranks() > 1 && k < errors->kinds; k++) {
        dist_sum(RANKS_ALL, &errors->kind[k].error, 1);
        dist_sum(RANKS_ALL, &errors->kind[k].squares, 1);
    }
}

// ---- keys -----------------------------------------------------------------------------------------------------------
// Makes the model and storage tables from which a key is computed. Values outside records count as bf16, so that all
// builds give the same key (base_key in adapter_file.h).
static void storage_key_model(Storage *storage, Model *model, const Model *of, const QuantFormat *format) {
    *model = *of, model->dtype = DTYPE_BF16;
    storage_build(storage, model, format);
}

// Adds `count` bytes of a parameter, from the parameter's byte `begin` on, stored in `type`.
static void storage_key_add(Checksum *sum, const Storage *as, size_t parameter, size_t begin, size_t count, DType type,
                            const void *bytes) {
    const size_t offset = as->table.parameters[parameter].offset, size = dtype_size(type);
    if (as->format[parameter].type != QUANT_NONE) {
        checksum_add(sum, offset + begin, bytes, count);
        return;
    }
    elements_convert(staged_reformed.bytes, DTYPE_BF16, bytes, type, count / size);
    checksum_add(sum, offset + begin / size * 2, staged_reformed.bytes, count / size * 2);
}

// Computes the key of stored weights in device memory. Collective.
static uint64_t storage_key(const Model *model, const Storage *storage, Sharding held, const Ops *ops,
                            const void *device) {
    Checksum sum = {{0, 0}};
    Storage as;
    Model in_bf16;
    storage_key_model(&as, &in_bf16, model, storage->format);
    for (Slabs s = slabs_of(&storage->table, SLABS_OF_PARAMETERS, parts_of_ranks(), held, "key of the base");
         slabs_next(&s);)
        storage_key_add(&sum, &as, s.parameter, s.begin, s.count, model->dtype,
                        slab_from_device(&s, ops, device, DTYPE_INT8, DTYPE_INT8));
    checksum_join(&sum);
    const uint64_t key = checksum_value(2, &sum, as.table.elements);
    storage_free(&as);
    return key;
}

// Computes the model's key, equal to the key from device memory, from a source read in 4 bits; not collective.
static uint64_t storage_key_of_source(const WeightSource *source) {
    Checksum sum = {{0, 0}};
    Storage as;
    Model model;
    storage_key_model(&as, &model, &source->model, source->quant);
    for (Slabs s = slabs_of_all(&as.table, "key of the base"); slabs_next(&s);) {
        const void *bytes = staged.bytes;
        if (as.format[s.parameter].type != QUANT_NONE)
            bytes = source_hold_record(source, s.parameter) + s.begin;
        else
            weights_read(source, s.parameter, s.begin / 2, s.count / 2, DTYPE_BF16, staged.bytes);
        storage_key_add(&sum, &as, s.parameter, s.begin, s.count, DTYPE_BF16, bytes);
    }
    const uint64_t key = checksum_value(2, &sum, as.table.elements);
    storage_free(&as);
    return key;
}

#endif
