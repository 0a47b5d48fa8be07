/*
Writes quantised matrices to a Hugging Face folder (hf_quantised.h reads them): their choice, their tensors, and the
quantization_config by which transformers loads them. Codes in the same format are copied. Other matrices are encoded
while they are written, one matrix in memory at a time. Merged into an FP8 folder, adapters change only the blocks in
which they change a value; all other models are written in FP8 as transformers quantises them, except that blocks at the
end of a side may be short. Tensors are sorted by type, so a matrix is encoded once for each type among its tensors.
*/
#ifndef LLMC_HF_WRITE_QUANTISED_H
#define LLMC_HF_WRITE_QUANTISED_H
#include "hf_config_write.h"
#include "hf_weights.h"

// Tensors of a 4-bit matrix. HF_VALUES: an ordinary tensor, not in 4 bits
typedef enum { HF_VALUES, HF_CODES, HF_ABSMAX, HF_MAP, HF_NESTED_ABSMAX, HF_NESTED_MAP, HF_STATE, HF_PARTS } HfPart;

static const char *const hf_part_names[HF_PARTS] = {
    "", "", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__"};
static const char *const hf_mxfp4_names[HF_PARTS] = {NULL, "_blocks", "_scales"}; // [HF_CODES], [HF_ABSMAX]
static const char *const hf_fp8_names[HF_PARTS] = {NULL, "", "_scale_inv"};

enum { HF_STATE_TEXT = 320 };

typedef struct {
    const WeightSource *source;
    QuantType type;
    int keeps_fp8;                // 1: an FP8 folder from an FP8 folder, with the same tensors
    QuantFormat *format;          // [parameters] formats to write; NULL: no matrix is in 4 bits
    char (*state)[HF_STATE_TEXT]; // [parameters] quant states of the 4-bit parameters
    size_t *copied;               // [parameters] 1: copy the source's codes
    uint8_t *record;              // the encoded record of parameter record_of; FP8: of its piece piece_of
    size_t record_of, piece_of;
    void *scales; // FP8: scales in the type of the files
} HfCodes;

static int hf_is_coded(const HfCodes *c, size_t parameter) {
    return c->format && c->format[parameter].type != QUANT_NONE;
}

// Returns the number of tensors of codes of a matrix.
static size_t hf_code_pieces(const HfCodes *c, size_t parameter) {
    if (c->keeps_fp8) return c->source->records[parameter].pieces;
    return c->format[parameter].type == QUANT_FP8
               ? parameter_pieces(c->source->config.family, &c->source->model.parameters[parameter])
               : 1;
}

// Returns the record of a parameter (FP8: of a piece), and holds it until another record is asked for. Copies the
// record, or encodes the (merged) values in the type to which decoding rounds; mxfp4 and FP8: in fp32.
static const uint8_t *hf_hold_record(HfCodes *c, size_t parameter, size_t piece) {
    const QuantFormat f = c->format[parameter];
    const size_t count = parameter_elements(&c->source->model.parameters[parameter]) / hf_code_pieces(c, parameter);
    const size_t bytes = quant_parts(f, count).bytes;
    uint8_t *was = NULL;
    if (c->record && c->record_of == parameter && c->piece_of == piece) return c->record;
    free(c->record);
    c->record_of = parameter, c->piece_of = piece;
    c->record = (uint8_t *)checked_calloc(bytes, 1, "a quantised matrix");
    if (c->copied[parameter]) {
        source_copy_record(c->source, parameter, c->record);
        return c->record;
    }
    if (c->keeps_fp8) {
        was = (uint8_t *)checked_malloc(bytes, "a quantised matrix");
        source_copy_fp8(c->source, parameter, piece, 1, was);
    }
    source_encode(c->source, parameter, piece * count, count, source_read_order,
                  f.type >= QUANT_MXFP4 ? DTYPE_FP32 : f.rounding, f, was, c->record);
    free(was);
    return c->record;
}

// Returns the scales of a record of a piece in FP8, in the type of the files.
static const void *hf_fp8_scales_out(HfCodes *c, QuantFormat f, const float *scales, size_t blocks) {
    free(c->scales);
    c->scales = checked_malloc(blocks * sizeof(float), "scales of a matrix");
    for (size_t i = 0; i < blocks && f.grid.scales == DTYPE_INT8; i++)
        ((uint8_t *)c->scales)[i] = (uint8_t)(ilogbf(scales[i]) + 127);
    if (f.grid.scales != DTYPE_INT8) elements_from_float(c->scales, f.grid.scales, scales, blocks);
    return c->scales;
}

// Prints the quant state as bitsandbytes does.
static void hf_state_text(HfCodes *c, size_t parameter) {
    const Parameter *p = &c->source->model.parameters[parameter];
    const QuantFormat f = c->format[parameter];
    JsonOut json = json_open_text(c->state[parameter], HF_STATE_TEXT, JSON_LINE);
    json_text(&json, "quant_type", quant_type_names[f.type]);
    json_size(&json, "blocksize", f.block);
    json_text(&json, "dtype", hf_dtype_name(f.rounding));
    json_array(&json, "shape");
    json_size(&json, NULL, p->rows), json_size(&json, NULL, p->cols);
    json_array_end(&json);
    if (f.nested) {
        float offset;
        memcpy(&offset, hf_hold_record(c, parameter, 0) + quant_parts(f, parameter_elements(p)).offset, sizeof(offset));
        json_size(&json, "nested_blocksize", QUANT_NESTED_BLOCK);
        json_text(&json, "nested_dtype", "float32");
        hf_put_real(&json, "nested_offset", (double)offset);
    }
    c->state[parameter][json_text_end(&json) - 1] = 0; // without the newline
}

// Chooses the quantised matrices: the matrices that the source has quantised, or all linear layers, except experts in
// nf4 and fp4; with `head` also lm_head. chosen: type of all tensors that are not quantised, NULL: unchanged. type
// QUANT_NONE: quantises no matrix
static void hf_codes_choose(HfCodes *c, const WeightSource *source, QuantType type, const DType *chosen, int head) {
    const Model *model = &source->model;
    int modules = 0; // 1: modules of the source are quantised
    memset(c, 0, sizeof(*c));
    c->source = source, c->type = type, c->keeps_fp8 = type == QUANT_FP8 && source->stored == QUANT_FP8;
    if (type == QUANT_NONE) return;
    for (size_t i = 0; i < model->parameter_count; i++)
        modules |= source->places[i].is_codes && source->quant[i].type != QUANT_MXFP4;
    c->format = (QuantFormat *)checked_calloc(model->parameter_count, sizeof(QuantFormat), "formats");
    c->state = (char(*)[HF_STATE_TEXT])checked_calloc(model->parameter_count, HF_STATE_TEXT, "quant states");
    c->copied = (size_t *)checked_calloc(model->parameter_count, sizeof(size_t), "what is copied");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const DType own = source->places[i].type, as = chosen ? *chosen : own;
        const QuantFormat format =
            parameter_file_format(quant_format(type, as), model->config.family, &model->parameters[i]);
        const QuantFormat was = source->places[i].is_codes ? source_file_format(source, i) : format;
        if (!hf_quantises(model, &model->parameters[i], type, head || source->places[i].is_codes)) continue;
        if (modules && type != QUANT_MXFP4 && !source->places[i].is_codes) continue;
        c->copied[i] =
            source->places[i].is_codes && !source->merge && was.type == type && was.rounding == format.rounding;
        c->format[i] = c->copied[i] || (type == QUANT_FP8 && was.type == type) ? was : format;
        if (type < QUANT_MXFP4) hf_state_text(c, i);
    }
}

// ---- their tensors --------------------------------------------------------------------------------------------------
// Sets shape[4] and dtype of a part; returns the part's rank; 0: the matrix lacks this part
static size_t hf_part_shape(const HfCodes *c, size_t parameter, HfPart part, uint64_t shape[4], const char **dtype) {
    const QuantFormat f = c->format[parameter];
    const Parameter *of = &c->source->model.parameters[parameter];
    const size_t n = parameter_elements(of);
    const QuantParts p = quant_parts(f, n);
    if (f.type == QUANT_MXFP4) {
        *dtype = "U8";
        shape[0] = of->experts, shape[1] = of->rows / of->experts;
        shape[2] = of->cols / MXFP4_BLOCK, shape[3] = MXFP4_BLOCK / 2;
        return part == HF_CODES ? 4 : part == HF_ABSMAX ? 3 : 0;
    }
    if (f.type == QUANT_FP8) {
        *dtype = part == HF_CODES ? "F8_E4M3" : "F32";
        shape[0] = part == HF_CODES ? f.grid.rows : quant_grid_blocks(f) / quant_columns(f);
        shape[1] = part == HF_CODES ? f.grid.cols : quant_columns(f);
        return part == HF_CODES || part == HF_ABSMAX ? 2 : 0;
    }
    const size_t counts[HF_PARTS] = {0, (n + 1) / 2, p.blocks, 16, p.scale_count, 256, strlen(c->state[parameter])};
    *dtype = part == HF_CODES || part == HF_STATE || (part == HF_ABSMAX && f.nested) ? "U8" : "F32";
    shape[0] = counts[part], shape[1] = 1;
    if (!f.nested && (part == HF_NESTED_ABSMAX || part == HF_NESTED_MAP)) return 0;
    return part == HF_CODES ? 2 : 1;
}

static const void *hf_part_bytes(HfCodes *c, size_t parameter, HfPart part, size_t piece) {
    static float map[16];
    const QuantFormat f = c->format[parameter];
    const uint8_t *record = hf_hold_record(c, parameter, piece);
    const QuantParts p =
        quant_parts(f, parameter_elements(&c->source->model.parameters[parameter]) / hf_code_pieces(c, parameter));
    if (f.type == QUANT_FP8 && part == HF_ABSMAX)
        return hf_fp8_scales_out(c, f, (const float *)(const void *)(record + p.scales), p.blocks);
    switch (part) {
    case HF_CODES: return record + p.codes;
    case HF_ABSMAX: return record + (f.nested || f.type == QUANT_MXFP4 ? p.scale_codes : p.scales);
    case HF_NESTED_ABSMAX: return record + p.scales;
    case HF_NESTED_MAP: return quant_scales()->map;
    case HF_STATE: return c->state[parameter];
    default:
        for (size_t i = 0; i < 16; i++) map[i] = quant_codes[f.type][i] + 0.0f; // + 0.0f turns -0 to 0
        return map;
    }
}

// Prints a list of the linear layers that are not quantised.
static void hf_list_unquantised(const HfCodes *c, JsonOut *json, const char *key) {
    const Model *model = &c->source->model;
    json_array(json, key);
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        char name[HF_NAME];
        if (!is_product(p->role) || p->experts || p->part || hf_is_coded(c, i)) continue;
        snprintf(name, sizeof(name), "%.*s", (int)(strlen(p->name) - strlen(".weight")), p->name);
        json_text(json, NULL, name);
    }
    json_array_end(json);
}

// Writes the quantization_config of mxfp4, with the list of gpt-oss's own config.json, or of FP8.
static void hf_put_method(const HfCodes *c, JsonOut *json) {
    static const char *const kept[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"};
    if (c->type == QUANT_FP8) {
        json_text(json, "activation_scheme", "dynamic"), json_text(json, "fmt", "e4m3");
        hf_list_unquantised(c, json, "modules_to_not_convert");
        json_text(json, "quant_method", "fp8");
        json_array(json, "weight_block_size");
        json_size(json, NULL, FP8_BLOCK), json_size(json, NULL, FP8_BLOCK);
        json_array_end(json);
        return;
    }
    json_array(json, "modules_to_not_convert");
    for (size_t i = 0; i < 4; i++) json_text(json, NULL, kept[i]);
    json_array_end(json);
    json_text(json, "quant_method", "mxfp4");
}

// Prints the value of quantization_config. Lists modules not in 4 bits if they differ from transformers' default. The
// caller frees it.
static char *hf_quantisation_text(const HfCodes *c) {
    const Model *model = &c->source->model;
    const size_t room = 1024 + model->parameter_count * HF_NAME;
    char *text = (char *)checked_malloc(room, "quantization_config");
    QuantFormat f = {QUANT_NONE, 0, 0, DTYPE_FP32, {0}};
    int listed = 0;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const int head = p->offset == model->model_offset[LM_HEAD];
        if (hf_is_coded(c, i)) f = c->format[i];
        if (is_product(p->role) && !p->experts) listed |= hf_is_coded(c, i) == head;
    }
    JsonOut json = json_open_text(text, room, JSON_LINE);
    if (c->type >= QUANT_MXFP4) {
        hf_put_method(c, &json);
        text[json_text_end(&json) - 1] = 0;
        return text;
    }
    json_text(&json, "quant_method", "bitsandbytes");
    json_bool(&json, "load_in_4bit", 1), json_bool(&json, "load_in_8bit", 0);
    json_text(&json, "bnb_4bit_quant_type", quant_type_names[f.type]);
    json_bool(&json, "bnb_4bit_use_double_quant", f.nested);
    json_text(&json, "bnb_4bit_compute_dtype", f.rounding == DTYPE_BF16 ? "bfloat16" : "float32");
    json_text(&json, "bnb_4bit_quant_storage", "uint8");
    if (listed)
        hf_list_unquantised(c, &json, "llm_int8_skip_modules");
    else
        json_null(&json, "llm_int8_skip_modules");
    text[json_text_end(&json) - 1] = 0;
    return text;
}

#endif
