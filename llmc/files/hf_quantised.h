/*
Quantised matrices in Hugging Face folders. In 4 bits as transformers saves them with bitsandbytes, each matrix is
several tensors:

    NAME                    U8 [ceil(n/2), 1]   codes of [rows, cols] in order, the first of two in the high half
    NAME.absmax             U8 [blocks] codes of nested scales, or F32 [blocks] scales
    NAME.quant_map          F32 [16]
    NAME.nested_absmax      F32 [blocks/256]    only with nested scales
    NAME.nested_quant_map   F32 [256]           only with nested scales
    NAME.quant_state.bitsandbytes__nf4 (or fp4)   U8: JSON with shape, block sizes, the type of the original model, and
                                                  the offset of nested scales

Opening a folder checks everything except the codes: all values of a code are valid.

A stack of experts [E, out, in] of gpt-oss in mxfp4 is two tensors. Their bytes are the bytes of a record (quantise.h):

    NAME_blocks   U8 [E, out, in/32, 16]   codes, the first of two in the low half
    NAME_scales   U8 [E, out, in/32]

A matrix in FP8 (quantise.h), also of an expert, or a stack of experts, is a tensor of codes and a tensor of scales. A
tensor is in FP8 if its dtype is F8_E4M3, whatever config.json lists; the size of blocks is config.json's.

    X.weight             F8_E4M3 [out, in]
    X.weight_scale_inv   F32, BF16, or exponents in U8 or F8_E8M0: [ceil(out/rows), ceil(in/columns)] of blocks,
                         [out, 1] of rows, one of the matrix. Also X.weight_scale, X.scale, X.qscale_weight
*/
#ifndef LLMC_HF_QUANTISED_H
#define LLMC_HF_QUANTISED_H
#include "hf_config.h"
#include "weight_source.h"

enum { QUANT_STATE_MOST = 4096 }; // most bytes of a state's JSON

typedef struct {
    const WeightSource *source;
    const SafeTensors *list;
    const char *name; // name of the matrix in the files
    const char *path; // file with the codes
} HfQuantised;

__attribute__((noreturn, format(printf, 3, 4))) static void hf_quantised_die(const HfQuantised *h, const char *tensor,
                                                                             const char *format, ...) {
    char why[256];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof(why), format, args);
    va_end(args);
    die("%s: tensor %s.%s %s, so the 4-bit matrix cannot be decoded; download the folder again, or take the original "
        "model and --base nf4",
        h->path, h->name, tensor, why);
}

// Returns a part of the matrix, checked to have the dtype and `count` elements.
static SafeTensor *hf_quantised_part(const HfQuantised *h, const char *part, const char *dtype, size_t count) {
    char name[HF_PART_NAME];
    uint64_t elements = 1;
    snprintf(name, sizeof(name), "%s.%s", h->name, part);
    SafeTensor *tensor = safetensors_find(h->list, name);
    if (!tensor) hf_quantised_die(h, part, "is missing");
    for (size_t i = 0; i < tensor->rank; i++) elements *= tensor->shape[i];
    if (strcmp(tensor->dtype, dtype) != 0 || tensor->rank != 1 || elements != count)
        hf_quantised_die(h, part, "is %s %s, not %s [%zu]", tensor->dtype, shape_text(tensor->shape, tensor->rank),
                         dtype, count);
    tensor->used = 1;
    return tensor;
}

static void hf_quantised_check_map(const HfQuantised *h, const char *part, const float *map, size_t count) {
    float found[256];
    const SafeTensor *tensor = hf_quantised_part(h, part, "F32", count);
    input_read(&h->source->files[tensor->file], tensor->begin, found, (size_t)(tensor->end - tensor->begin));
    for (size_t i = 0; i < count; i++)
        if (found[i] != map[i])
            hf_quantised_die(h, part, "has %g at [%zu], where bitsandbytes has %g", (double)found[i], i,
                             (double)map[i]);
}

static void hf_quantised_check_finite(const HfQuantised *h, const char *part, const SafeTensor *tensor) {
    const size_t count = (size_t)(tensor->end - tensor->begin) / sizeof(float);
    for (size_t begin = 0, n; begin < count; begin += n) {
        const float *values = (const float *)(const void *)staged_raw.bytes;
        n = min_size(count - begin, SLAB_ELEMENTS);
        input_read(&h->source->files[tensor->file], tensor->begin + begin * sizeof(float), staged_raw.bytes,
                   n * sizeof(float));
        for (size_t i = 0; i < n; i++)
            if (!isfinite(values[i]) || values[i] < 0)
                hf_quantised_die(h, part, "has %g at [%zu]; scales are finite and not negative", (double)values[i],
                                 begin + i);
    }
}

// ---- the quant state ------------------------------------------------------------------------------------------------
static double hf_state_number(const HfQuantised *h, const char *part, const cJSON *state, const char *key) {
    const cJSON *item = json_get(state, key);
    if (!cJSON_IsNumber(item)) hf_quantised_die(h, part, "has no number %s", key);
    return item->valuedouble;
}

// Checks that the state's shape is [rows, cols] of the parameter.
static void hf_state_check_shape(const HfQuantised *h, const char *part, const cJSON *state, const Parameter *p) {
    const cJSON *shape = json_get(state, "shape");
    const cJSON *rows = cJSON_IsArray(shape) ? shape->child : NULL, *cols = rows ? rows->next : NULL;
    if (!cols || cols->next || !cJSON_IsNumber(rows) || !cJSON_IsNumber(cols) || rows->valuedouble != (double)p->rows ||
        cols->valuedouble != (double)p->cols)
        hf_quantised_die(h, part, "has another shape than config.json's [%zu, %zu]", p->rows, p->cols);
}

static QuantFormat hf_state_read(const HfQuantised *h, const Parameter *p, QuantType type, float *offset) {
    char name[HF_PART_NAME], part[64], text[QUANT_STATE_MOST + 1];
    snprintf(part, sizeof(part), "quant_state.bitsandbytes__%s", quant_type_names[type]);
    snprintf(name, sizeof(name), "%s.%s", h->name, part);
    SafeTensor *tensor = safetensors_find(h->list, name);
    const size_t bytes = (size_t)(tensor->end - tensor->begin);
    if (strcmp(tensor->dtype, "U8") != 0 || bytes > QUANT_STATE_MOST)
        hf_quantised_die(h, part, "is not a text of at most %d bytes", QUANT_STATE_MOST);
    input_read(&h->source->files[tensor->file], tensor->begin, text, bytes);
    text[bytes] = 0, tensor->used = 1;
    cJSON *state = strlen(text) == bytes ? cJSON_Parse(text) : NULL;
    if (!cJSON_IsObject(state)) hf_quantised_die(h, part, "is not a JSON object");
    const cJSON *of = json_get(state, "quant_type");
    const double block = hf_state_number(h, part, state, "blocksize");
    QuantFormat format = {type,
                          json_get(state, "nested_blocksize") != NULL,
                          (size_t)fmax(block, 0),
                          hf_dtype_find(json_get(state, "dtype")),
                          {0}};
    if (format.rounding == DTYPE_COUNT)
        hf_quantised_die(h, part, "has a dtype other than float32, bfloat16 and float16");
    if (!json_is(of, quant_type_names[type])) hf_quantised_die(h, part, "has another quant_type than its name");
    if (format.block < QUANT_BLOCK_LEAST || format.block > QUANT_BLOCK_MOST || (double)format.block != block ||
        format.block & (format.block - 1))
        hf_quantised_die(h, part, "has blocksize %g; powers of 2 from %d to %d are supported", block, QUANT_BLOCK_LEAST,
                         QUANT_BLOCK_MOST);
    hf_state_check_shape(h, part, state, p);
    *offset = 0;
    if (format.nested) {
        if (hf_state_number(h, part, state, "nested_blocksize") != (double)QUANT_NESTED_BLOCK)
            hf_quantised_die(h, part, "has a nested_blocksize other than %d", QUANT_NESTED_BLOCK);
        if (!json_is(json_get(state, "nested_dtype"), "float32"))
            hf_quantised_die(h, part, "has a nested_dtype other than float32");
        *offset = (float)hf_state_number(h, part, state, "nested_offset");
        if (!isfinite(*offset)) hf_quantised_die(h, part, "has a nested_offset that is not finite");
    }
    cJSON_Delete(state);
    return format;
}

// ---- a matrix -------------------------------------------------------------------------------------------------------
// Tells whether a Hugging Face folder holds this matrix in a type. bitsandbytes quantises only modules, so not a stack
// of experts; FP8 folders have each expert's matrices. Fused rows, whose codes memory has in another order, are not in
// 4 bits.
static int hf_quantises(const Model *model, const Parameter *p, QuantType type, int head) {
    return parameter_quantises(model, p, type, head) && (type >= QUANT_MXFP4 || !p->experts) &&
           (type == QUANT_FP8 || !p->fused.groups);
}

// Returns the 4-bit type of a matrix in the files; QUANT_NONE: an ordinary tensor.
static QuantType hf_quantised_type(const SafeTensors *list, const char *name) {
    char state[HF_PART_NAME];
    for (int type = QUANT_NF4; type <= QUANT_FP4; type++) {
        snprintf(state, sizeof(state), "%s.quant_state.bitsandbytes__%s", name, quant_type_names[type]);
        if (safetensors_find(list, state)) return (QuantType)type;
    }
    return QUANT_NONE;
}

// Records a parameter's format and the location of its codes and scales.
static void hf_set_record(WeightSource *source, size_t parameter, QuantFormat format, RecordLocation record) {
    const size_t count = source->model.parameter_count;
    if (!source->quant) source->quant = (QuantFormat *)checked_calloc(count, sizeof(QuantFormat), "formats");
    if (!source->records)
        source->records = (RecordLocation *)checked_calloc(count, sizeof(RecordLocation), "places of 4-bit matrices");
    const TensorLocation place = {record.file[0], record.at[0], format.rounding, 1};
    source->stored = format.type;
    source->quant[parameter] = format, source->records[parameter] = record, source->places[parameter] = place;
}

// Returns a part of a stack in mxfp4, checked to have this shape; NULL: absent
static SafeTensor *hf_mxfp4_part(const WeightSource *source, const SafeTensors *list, const char *name,
                                 const char *part, const uint64_t *shape, size_t rank) {
    char full[HF_PART_NAME];
    snprintf(full, sizeof(full), "%s%s", name, part);
    SafeTensor *tensor = safetensors_find(list, full);
    if (!tensor) return NULL;
    if (strcmp(tensor->dtype, "U8") != 0 || tensor->rank != rank ||
        memcmp(tensor->shape, shape, rank * sizeof(shape[0])) != 0)
        die("%s: tensor %s is %s %s, but config.json asks for U8 %s; download the folder again",
            source->files[tensor->file].path, full, tensor->dtype, shape_text(tensor->shape, tensor->rank),
            shape_text(shape, rank));
    tensor->used = 1;
    return tensor;
}

// Takes a stack of experts in mxfp4 as the parameter. Returns 0 if the files have no stack of this name.
static int hf_take_mxfp4(WeightSource *source, size_t parameter, const SafeTensors *list, const char *name) {
    const Parameter *p = &source->model.parameters[parameter];
    if (!p->experts) return 0;
    const uint64_t shape[] = {p->experts, p->rows / p->experts, p->cols / MXFP4_BLOCK, MXFP4_BLOCK / 2};
    const SafeTensor *codes = hf_mxfp4_part(source, list, name, "_blocks", shape, 4),
                     *scales = hf_mxfp4_part(source, list, name, "_scales", shape, 3);
    if (!codes && !scales) return 0;
    if (!codes || !scales)
        die("%s: tensor %s%s is missing; download the folder again", source->path, name, codes ? "_scales" : "_blocks");
    if (p->cols % MXFP4_BLOCK)
        die("%s: tensor %s_blocks: mxfp4 needs rows of a multiple of %d elements, not %zu; download the folder again",
            source->path, name, MXFP4_BLOCK, p->cols);
    const RecordLocation record = {
        {codes->file, scales->file, scales->file}, {codes->begin, scales->begin, scales->begin}, 0, NULL, 0};
    hf_set_record(source, parameter, quant_format(QUANT_MXFP4, DTYPE_BF16), record);
    return 1;
}

// Takes a 4-bit matrix as the parameter. codes: the tensor of its codes
static void hf_take_quantised(WeightSource *source, size_t parameter, const SafeTensors *list, SafeTensor *codes,
                              QuantType type) {
    const Parameter *p = &source->model.parameters[parameter];
    const HfQuantised h = {source, list, codes->name, source->files[codes->file].path};
    const size_t n = parameter_elements(p);
    float offset;
    if (p->fused.groups)
        die("%s: tensor %s is in 4 bits, which is not supported for fused inputs of linear attention; take the "
            "original model and --base nf4",
            h.path, codes->name);
    if (!is_product(p->role) || p->experts || p->joined)
        die("%s: tensor %s is in 4 bits, but is not a matrix of a linear layer; take the original model and --base nf4",
            h.path, codes->name);
    const QuantFormat format = hf_state_read(&h, p, type, &offset);
    const QuantParts parts = quant_parts(format, n);
    if (codes->end - codes->begin != (n + 1) / 2)
        die("%s: tensor %s has %llu bytes, but 4-bit codes of [%zu, %zu] are %zu; download the folder again", h.path,
            codes->name, (unsigned long long)(codes->end - codes->begin), p->rows, p->cols, (n + 1) / 2);
    const SafeTensor *absmax = hf_quantised_part(&h, "absmax", format.nested ? "U8" : "F32", parts.blocks);
    const SafeTensor *scales = absmax;
    hf_quantised_check_map(&h, "quant_map", quant_codes[type], 16);
    if (format.nested) {
        scales = hf_quantised_part(&h, "nested_absmax", "F32", parts.scale_count);
        hf_quantised_check_map(&h, "nested_quant_map", quant_scales()->map, 256);
    }
    hf_quantised_check_finite(&h, format.nested ? "nested_absmax" : "absmax", scales);
    const RecordLocation record = {
        {codes->file, absmax->file, scales->file}, {codes->begin, absmax->begin, scales->begin}, offset, NULL, 0};
    hf_set_record(source, parameter, format, record);
    codes->used = 1;
}

// ---- FP8 ------------------------------------------------------------------------------------------------------------
static int hf_is_fp8(const SafeTensor *tensor) { return tensor && !strcmp(tensor->dtype, "F8_E4M3"); }

// Finds the scales of a tensor of codes.
static SafeTensor *hf_fp8_scales(const WeightSource *source, const SafeTensors *list, const SafeTensor *codes) {
    static const char *const ends[] = {"_scale_inv", "_scale", ".scale", ".qscale_weight"}; // the last two of "X"
    const size_t length = strlen(codes->name), whole = length - strlen(".weight");
    const int is_weight = text_ends_with(codes->name, ".weight");
    char name[HF_PART_NAME];
    for (size_t i = 0; i < (is_weight ? 4 : 2); i++) {
        snprintf(name, sizeof(name), "%.*s%s", (int)(i < 2 ? length : whole), codes->name, ends[i]);
        SafeTensor *scales = safetensors_find(list, name);
        if (scales) return scales;
    }
    die("%s: tensor %s is in F8_E4M3, but %s_scale_inv, its scales, is missing; download the folder again",
        source->files[codes->file].path, codes->name, codes->name);
}

// Tells whether a tensor has the last dimensions of shape[3], or all three.
static int hf_has_shape(const SafeTensor *t, const uint64_t shape[3], size_t rank) {
    return t->rank == rank && !memcmp(t->shape, shape + 3 - rank, rank * sizeof(shape[0]));
}

// Returns the format of matrices [rows, cols] of a tensor, `count` of them in a stack, by the shape of their scales. f:
// config.json's
static QuantFormat hf_fp8_format(const WeightSource *source, QuantFormat f, const SafeTensor *scales, size_t count,
                                 size_t rows, size_t cols) {
    const QuantFormat blocks = quant_on(f, rows, cols);
    const size_t across = quant_columns(blocks), rank = count > 1 ? 3 : 2;
    const uint64_t of_blocks[3] = {count, quant_grid_blocks(blocks) / across, across}, of_rows[3] = {count, rows, 1};
    const int has_rows =
        hf_has_shape(scales, of_rows, rank) || (rank == 2 && scales->rank == 1 && scales->shape[0] == rows);
    const char *path = source->files[scales->file].path;
    uint64_t elements = 1;
    for (size_t i = 0; i < scales->rank; i++) elements *= scales->shape[i];
    if (!hf_has_shape(scales, of_blocks, rank)) {
        if (elements != count && !has_rows)
            die("%s: tensor %s has shape %s, but blocks of %zu x %zu have %s; take config.json of the same folder",
                path, scales->name, shape_text(scales->shape, scales->rank), blocks.grid.block_rows, blocks.block,
                shape_text(of_blocks + 3 - rank, rank));
        f.block = 0, f.grid.block_rows = elements != count;
    }
    f.grid.scales = scales->type == DTYPE_COUNT ? DTYPE_INT8 : scales->type;
    if (scales->type != DTYPE_FP32 && scales->type != DTYPE_BF16 && strcmp(scales->dtype, "U8") &&
        strcmp(scales->dtype, "F8_E8M0"))
        die("%s: tensor %s has dtype %s; scales in F32, BF16, U8 and F8_E8M0 are supported; take the bf16 model", path,
            scales->name, scales->dtype);
    return quant_on(f, rows, cols);
}

// Takes a tensor in FP8 as piece `piece` of `pieces` of a parameter. f: config.json's format
static void hf_take_fp8(WeightSource *source, size_t parameter, const SafeTensors *list, QuantFormat f,
                        SafeTensor *codes, size_t piece, size_t pieces) {
    const Parameter *p = &source->model.parameters[parameter];
    const char *path = source->files[codes->file].path;
    const size_t stack = pieces > 1 ? 1 : max_size(p->experts, 1);
    SafeTensor *scales = hf_fp8_scales(source, list, codes);
    if (p->role != ROLE_LINEAR || p->transposed || p->joined || !p->cols)
        die("%s: tensor %s is in FP8, but is not a matrix of a linear layer; take the bf16 model", path, codes->name);
    if (f.type == QUANT_NONE) f.type = QUANT_FP8, f.block = 0, f.rounding = DTYPE_BF16;
    f = hf_fp8_format(source, f, scales, stack, p->rows / pieces / stack, p->cols);
    if (!piece) {
        RecordLocation record = {{codes->file, 0, 0}, {codes->begin, 0, 0}, 0, NULL, pieces};
        record.pair = (SafeTensor *)checked_calloc(2 * pieces, sizeof(SafeTensor), "places of matrices in FP8");
        hf_set_record(source, parameter, parameter_memory_format(f, p), record);
    } else if (!source_is_quantised(source, parameter) || source->quant[parameter].block != f.block ||
               source->quant[parameter].grid.block_rows != f.grid.block_rows) {
        die("%s: tensor %s is in FP8 with other blocks than the experts before it, or they are not in FP8; take the "
            "bf16 model",
            path, codes->name);
    }
    SafeTensor *pair = source->records[parameter].pair + 2 * piece;
    codes->used = scales->used = 1;
    pair[0] = *codes, pair[0].name = checked_strdup(codes->name);
    pair[1] = *scales, pair[1].name = checked_strdup(scales->name);
}

#endif
