/*
Weights in files. Opening a file of any format fills one table: for each parameter of the model (model.h) its file, byte
and type, and whether it is transposed. source_read then returns any range of elements in the order and type wanted. The
formats (flat.h, llmc_gpt2.h, hf_weights.h) fill and check the table; weights.h chooses among them. Memory is bounded
for any model size: the static staging buffers, and one matrix that a file holds transposed.
*/
#ifndef LLMC_WEIGHT_SOURCE_H
#define LLMC_WEIGHT_SOURCE_H
#include "llmc/model/initial_weights.h"
#include "llmc/model/storage.h"
#include "safetensors.h"
#include "slabs.h"

typedef struct {
    size_t file;     // index in the source's files
    uint64_t offset; // first byte of the tensor in the file
    DType type;      // type of the elements in the file; for a quantised matrix, the type in the original model
    int is_codes;    // 1: stored in 4 bits or FP8
} TensorLocation;

// Equally large tensors that make one parameter, in the parameter's order: the matrices of experts
typedef struct {
    TensorLocation *place; // [count]
    size_t count;          // 0: the parameter is one tensor
    size_t run;            // not 0: two tensors are interleaved, in turns of `run` elements
} TensorPieces;

// Files and offsets of a 4-bit matrix's parts: codes, codes of its scales, scales
typedef struct {
    size_t file[3];
    uint64_t at[3];
    float offset;
    SafeTensor *pair; // [2 * pieces] FP8: the codes and the scales of each piece
    size_t pieces;
} RecordLocation;

// Cache of the record and of the matrix that were read last
typedef struct {
    uint8_t *record; // record decoded last: a piece of parameter record_of
    size_t record_of, piece_of, pieces;
    char *matrix; // the transposed matrix read last: elements of matrix_of in the table, as matrix_type
    size_t matrix_of;
    DType matrix_type;
} SourceHeld;

typedef struct Merge Merge; // merge.h

typedef struct WeightSource {
    const char *format; // name of the format, for messages
    char *path;         // path as given
    Config config;
    int transposed;         // 1: files hold linear weights as [in, out] (Conv1D families)
    DType dtype;            // type in the files; fp32 (or double) if tensors differ
    Model model;            // the parameter table, with that dtype
    TensorLocation *places; // [model.parameter_count] place of each parameter in the files
    TensorPieces *pieces;   // [model.parameter_count] tensors of split parameters, or NULL
    InputFile *files;       // [file_count]
    size_t file_count;
    SafeTensors others; // tensors outside the text model, for example of a vision tower or of further heads
    int random;         // no files: initial weights from the seed
    size_t grown_from;  // rows of the embedding and the head in the files; 0: all of them
    float *mean[2];     // mean of these rows, for the embedding and for an untied head: the value of each added row
    uint64_t seed;
    DType constants_type;    // type of Model.constants in a Hugging Face folder
    char remark[256];        // a line for users who train this model, or empty
    char missing[HF_NAME];   // first tensor that the files lack, while they are opened; or empty
    QuantFormat *quant;      // [parameters] format from which values are decoded; NULL: no value is decoded
    RecordLocation *records; // [parameters] records of the parameters with is_codes
    QuantType stored;        // type of matrices with is_codes
    SourceHeld *held;        // cache that reading changes
    Merge *merge;            // adapters added to what is read, or NULL
    int (*read_merged)(const struct WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                       int transposed, void *out);
} WeightSource;

// ---- reading --------------------------------------------------------------------------------------------------------
static Slab staged_raw; // bytes as in a file

static int source_is_in_pieces(const WeightSource *source, size_t parameter) {
    return source->pieces && source->pieces[parameter].count;
}

// Reads elements unconverted, in the file's type and order.
static void tensor_read_raw(const WeightSource *source, size_t parameter, size_t begin, size_t count, char *out) {
    const TensorLocation *place = &source->places[parameter];
    const size_t size = dtype_size(place->type);
    const Parameter *p = &source->model.parameters[parameter];
    if (p->joined && source->transposed) {
        for (size_t done = 0, n; done < count; done += n) {
            const ElementRun run = file_run(p, begin + done);
            n = min_size(count - done, run.count);
            input_read(&source->files[place->file], place->offset + (uint64_t)run.at * size, out + done * size,
                       n * size);
        }
        return;
    }
    if (!source_is_in_pieces(source, parameter)) {
        input_read(&source->files[place->file], place->offset + (uint64_t)begin * size, out, count * size);
        return;
    }
    const TensorPieces *pieces = &source->pieces[parameter];
    const size_t each = parameter_elements(p) / pieces->count, turns = pieces->run ? 2 : 1;
    const size_t run = pieces->run ? pieces->run : each;
    for (size_t done = 0, n; done < count; done += n) {
        const size_t element = (begin + done) % (turns * each), row = element / run;
        const size_t piece = (begin + done) / (turns * each) * turns + row % turns;
        const size_t at = row / turns * run + element % run;
        n = min_size(count - done, run - element % run);
        const TensorLocation *of = &pieces->place[piece];
        input_read(&source->files[of->file], of->offset + (uint64_t)at * size, out + done * size, n * size);
    }
}

// Reads at most SLAB_ELEMENTS elements in the file's order, followed by added rows.
static void tensor_read_range(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                              void *out) {
    if (source->random) {
        initial_weights(&source->model, parameter, begin, count, source->seed, as, out);
        return;
    }
    const TensorLocation *place = &source->places[parameter];
    const size_t cols = source->config.hidden_size;
    const size_t offset = source->model.parameters[parameter].offset, *at = source->model.model_offset;
    const int grown = source->grown_from && (offset == at[EMBEDDING] || offset == at[LM_HEAD]);
    const float *added = source->mean[offset == at[LM_HEAD]]; // the value of each added row
    if (grown && begin + count > source->grown_from * cols) {
        const size_t end = source->grown_from * cols, held = begin < end ? end - begin : 0;
        if (held) tensor_read_range(source, parameter, begin, held, as, out);
        for (size_t i = held, n; i < count; i += n) {
            const size_t column = (begin + i) % cols;
            n = min_size(count - i, cols - column);
            elements_convert((char *)out + i * dtype_size(as), as, added + column, DTYPE_FP32, n);
        }
        return;
    }
    void *raw = as == place->type ? out : staged_raw.bytes;
    tensor_read_raw(source, parameter, begin, count, (char *)raw);
    if (as != place->type) elements_convert(out, as, raw, place->type, count);
}

// Reads a matrix of `count` elements in the file's order, from element `at` of the parameter on, and holds it until
// another matrix is asked for.
static const char *source_hold_matrix(const WeightSource *source, size_t parameter, size_t at, size_t count, DType as) {
    const size_t size = dtype_size(as), matrix_of = source->model.parameters[parameter].offset + at;
    SourceHeld *held = source->held;
    if (held->matrix && held->matrix_of == matrix_of && held->matrix_type == as) return held->matrix;
    free(held->matrix);
    held->matrix_of = matrix_of, held->matrix_type = as;
    held->matrix = (char *)checked_malloc(count * size, "a transposed matrix");
    for (size_t done = 0, n; done < count; done += n) {
        n = min_size(count - done, SLAB_ELEMENTS);
        tensor_read_range(source, parameter, at + done, n, as, held->matrix + done * size);
    }
    return held->matrix;
}

// Transposes a part: out[count] = elements [begin, begin + count) of a matrix [rows, cols] whose element (r, c) is in[c
// * rows + r]. Takes a few columns at a time, so that whole cache lines are written. size: bytes of an element
static void transpose_range(char *out, const char *in, size_t rows, size_t cols, size_t begin, size_t count,
                            const size_t size) {
    for (size_t c = 0; c < cols; c += 32) {
        for (size_t r = begin / cols; r * cols < begin + count; r++) {
            for (size_t k = c; k < min_size(cols, c + 32); k++) {
                const size_t i = r * cols + k - begin; // an index before begin wraps to a large number
                if (i < count) memcpy(out + i * size, in + (k * rows + r) * size, size);
            }
        }
    }
}

// Reads a part of a matrix of a parameter that the file holds transposed to the order wanted.
static void tensor_read_transposed(const WeightSource *source, size_t parameter, MatrixPart m, DType as, int transposed,
                                   char *out) {
    const size_t width = source->model.parameters[parameter].cols;
    const size_t rows = transposed ? width : m.rows, cols = transposed ? m.rows : width;
    const char *in = source_hold_matrix(source, parameter, m.first, rows * cols, as);
    switch (dtype_size(as)) { // a constant size makes the copy one instruction
    case 2: transpose_range(out, in, rows, cols, m.begin, m.count, 2); break;
    case 4: transpose_range(out, in, rows, cols, m.begin, m.count, 4); break;
    default: transpose_range(out, in, rows, cols, m.begin, m.count, 8);
    }
}

// Writes a part of a matrix [m.rows, cols] to a file that holds it transposed from byte `at` on, as
// tensor_read_transposed reads it. sum: checksum of the bytes written, or NULL. size: bytes of an element
static void matrix_write_transposed(const OutputFile *output, Checksum *sum, uint64_t at, MatrixPart m, size_t cols,
                                    size_t size, const void *values) {
    unsigned char *column = staged_raw.bytes;
    for (size_t c = 0; c < cols; c++) {
        const size_t from = (c + cols - m.begin % cols) % cols;
        const size_t n = from < m.count ? (m.count - from + cols - 1) / cols : 0;
        const uint64_t offset = at + (uint64_t)(c * m.rows + (m.begin + from) / cols) * size;
        if (!n) continue;
        for (size_t i = 0; i < n; i++) memcpy(column + i * size, (const char *)values + (from + i * cols) * size, size);
        if (sum) checksum_add(sum, offset, column, n * size);
        output_write(output, offset, column, n * size);
    }
}

// Reads at most SLAB_ELEMENTS elements of a parameter that is not quantised, in the requested order.
static void source_read_stored(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                               int transposed, void *out) {
    const Parameter *p = &source->model.parameters[parameter];
    if ((!p->transposed && !p->fused.groups) || source->transposed == transposed) {
        tensor_read_range(source, parameter, begin, count, as, out);
        return;
    }
    for (size_t done = 0, n; p->fused.groups && done < count; done += n) {
        const ElementRun run = fused_run(p, begin + done, !transposed);
        n = min_size(count - done, run.count);
        tensor_read_range(source, parameter, run.at, n, as, (char *)out + done * dtype_size(as));
    }
    if (p->fused.groups) return;
    for (size_t done = 0; done < count;) {
        const MatrixPart m = matrix_part(p, begin + done, count - done);
        tensor_read_transposed(source, parameter, m, as, transposed, (char *)out + done * dtype_size(as));
        done += m.count;
    }
}

// ---- matrices in 4 or 8 bits ----------------------------------------------------------------------------------------
static int source_is_quantised(const WeightSource *source, size_t parameter) {
    return source->quant && source->quant[parameter].type != QUANT_NONE;
}

// Reads the codes of a tensor in FP8. Refuses codes that are NaN.
static void source_fp8_codes(const InputFile *file, const SafeTensor *codes, uint8_t *out, size_t count) {
    size_t i = 0;
    input_read(file, codes->begin, out, count);
    while (i < count && (out[i] & 0x7f) != 0x7f) i++;
    if (i < count)
        die("%s: tensor %s has the code 0x%02x, which is NaN, at [%zu]; download the folder again", file->path,
            codes->name, out[i], i);
}

// Reads the scales of a tensor in FP8 as fp32. Refuses scales that are not finite, 0 or negative.
static void source_fp8_scales(const InputFile *file, const SafeTensor *scales, float *out, size_t count) {
    const size_t bytes = (size_t)(scales->end - scales->begin);
    uint8_t *raw = (uint8_t *)checked_malloc(bytes, "scales of a matrix");
    input_read(file, scales->begin, raw, bytes);
    for (size_t i = 0; i < count; i++) {
        if (scales->type != DTYPE_COUNT)
            out[i] = (float)element_to_double(raw, scales->type, i);
        else
            out[i] = raw[i] < 255 ? ldexpf(1, raw[i] - 127) : NAN;
        if (!isfinite(out[i]) || out[i] <= 0)
            die("%s: tensor %s has %g at [%zu]; scales are finite and above 0; download the folder again", file->path,
                scales->name, (double)out[i], i);
    }
    free(raw);
}

// Returns the format of a parameter's record in the order of files.
static QuantFormat source_file_format(const WeightSource *source, size_t parameter) {
    QuantFormat f = source->quant[parameter];
    f.grid.block_rows = f.grid.file_rows;
    return f;
}

// Copies a record in FP8 to the order of memory. format: of the copy; file_format: of `in`
static void source_unfuse(const Parameter *p, QuantFormat format, QuantFormat file_format, const uint8_t *in,
                          uint8_t *record) {
    const size_t n = parameter_elements(p), across = quant_columns(format) * sizeof(float);
    const QuantParts of = quant_parts(file_format, n), to = quant_parts(format, n);
    memset(record, 0, to.bytes);
    for (size_t row = 0; row < p->rows; row++) {
        const size_t at = fused_run(p, row * p->cols, 1).at / p->cols;
        memcpy(record + row * p->cols, in + at * p->cols, p->cols);
        memcpy(record + to.scales + quant_row_scale(format, row) * sizeof(float),
               in + of.scales + quant_row_scale(file_format, at) * sizeof(float), across);
    }
}

// Copies pieces [first, first + count) of a matrix in FP8 to a record of these pieces.
static void source_copy_fp8(const WeightSource *source, size_t parameter, size_t first, size_t count, uint8_t *record) {
    const RecordLocation *r = &source->records[parameter];
    const size_t each = parameter_elements(&source->model.parameters[parameter]) / r->pieces;
    const QuantParts p = quant_parts(source_file_format(source, parameter), count * each);
    float *scales = (float *)(void *)(record + p.scales);
    memset(record + count * each, 0, p.bytes - count * each);
    for (size_t i = 0; i < count; i++) {
        const SafeTensor *pair = r->pair + 2 * (first + i);
        source_fp8_codes(&source->files[pair[0].file], &pair[0], record + i * each, each);
        source_fp8_scales(&source->files[pair[1].file], &pair[1], scales + i * (p.blocks / count), p.blocks / count);
    }
}

// Copies a record from the files. Refuses mxfp4 scales that are NaN or allow infinite values.
static void source_copy_record(const WeightSource *source, size_t parameter, uint8_t *record) {
    const size_t n = parameter_elements(&source->model.parameters[parameter]);
    const QuantFormat format = source->quant[parameter];
    const RecordLocation *r = &source->records[parameter];
    const QuantParts p = quant_parts(format, n);
    if (format.type == QUANT_FP8) {
        source_copy_fp8(source, parameter, 0, r->pieces, record);
        return;
    }
    memset(record, 0, p.bytes);
    input_read(&source->files[r->file[0]], r->at[0], record + p.codes, (n + 1) / 2);
    if (p.scales > p.scale_codes) input_read(&source->files[r->file[1]], r->at[1], record + p.scale_codes, p.blocks);
    for (size_t b = 0; b < p.blocks && format.type == QUANT_MXFP4; b++)
        if (record[p.scale_codes + b] > MXFP4_SCALE_MOST)
            die("%s: tensor %s_scales has %d at [%zu], so its block is not finite; download the folder again",
                source->path, source->model.parameters[parameter].name, record[p.scale_codes + b], b);
    input_read(&source->files[r->file[2]], r->at[2], record + p.scales, p.scale_count * sizeof(float));
    if (format.nested) memcpy(record + p.offset, &r->offset, sizeof(r->offset));
}

typedef void (*SourceReader)(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                             int transposed, void *out);

// Encodes elements [begin, begin + count) of a matrix as a record, a slab at a time; `read` reads them in type `as`.
// Fused rows in FP8 are encoded in the order of files. Refuses values that are not finite. was: see QuantEncoder
static void source_encode(const WeightSource *source, size_t parameter, size_t begin, size_t count, SourceReader read,
                          DType as, QuantFormat format, const uint8_t *was, uint8_t *record) {
    const Parameter *p = &source->model.parameters[parameter];
    QuantEncoder encoder = quant_encode_begin(record, format, count);
    encoder.was = was;
    if (was) encoder.changed = (uint8_t *)checked_calloc(encoder.parts.blocks, 1, "blocks that change");
    float *values = (float *)checked_calloc(min_size(count, SLAB_ELEMENTS), sizeof(float), "a part of a matrix");
    char at[PLACE_TEXT];
    const int in_files = format.type == QUANT_FP8 && p->fused.groups;
    for (int pass = 0; pass < quant_passes(format.type); pass++) {
        if (pass) quant_fp8_turn(&encoder);
        for (size_t done = 0, n; done < count; done += n) { // encode whole blocks
            n = min_size(count - done, SLAB_ELEMENTS);
            read(source, parameter, begin + done, n, as, in_files, staged.bytes);
            elements_to_float(values, staged.bytes, as, n);
            const char *bad = elements_bad_text(values, DTYPE_FP32, p->cols, begin + done, n, at);
            if (bad) die("%s: the weights hold %s: tensor %s at %s; take another copy", source->path, bad, p->name, at);
            quant_encode_part(&encoder, values, done, n);
        }
    }
    quant_encode_end(&encoder);
    free(values), free(encoder.changed);
}

// Fills a record in format source->quant[parameter]: encodes the matrix, or copies the codes of a matrix stored in 4
// bits or FP8.
static void source_read_record(const WeightSource *source, size_t parameter, uint8_t *record) {
    const Parameter *p = &source->model.parameters[parameter];
    const QuantFormat format = source->quant[parameter], file_format = source_file_format(source, parameter);
    const int fused = format.type == QUANT_FP8 && p->fused.groups;
    const size_t bytes = quant_parts(file_format, parameter_elements(p)).bytes;
    uint8_t *out = fused ? (uint8_t *)checked_calloc(bytes, 1, "a coded matrix") : record;
    if (source->places[parameter].is_codes)
        source_copy_record(source, parameter, out);
    else
        source_encode(source, parameter, 0, parameter_elements(p), source_read_stored, DTYPE_FP32, file_format, NULL,
                      out);
    if (!fused) return;
    source_unfuse(p, format, file_format, out, record);
    free(out);
}

// Reads the record of piece `piece` of `pieces` of a parameter, and holds it until another record is asked for. pieces:
// 1, or as in the files of FP8
static const uint8_t *source_hold_piece(const WeightSource *source, size_t parameter, size_t piece, size_t pieces) {
    const size_t count = parameter_elements(&source->model.parameters[parameter]) / pieces;
    SourceHeld *held = source->held;
    if (held->record && held->record_of == parameter && held->piece_of == piece && held->pieces == pieces)
        return held->record;
    free(held->record);
    held->record_of = parameter, held->piece_of = piece, held->pieces = pieces;
    held->record = (uint8_t *)checked_calloc(quant_parts(source->quant[parameter], count).bytes, 1, "a coded matrix");
    if (pieces > 1)
        source_copy_fp8(source, parameter, piece, 1, held->record);
    else
        source_read_record(source, parameter, held->record);
    return held->record;
}

static const uint8_t *source_hold_record(const WeightSource *source, size_t parameter) {
    return source_hold_piece(source, parameter, 0, 1);
}

static void source_read_decoded(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                                int transposed, void *out) {
    const Parameter *p = &source->model.parameters[parameter];
    const QuantFormat format = source->quant[parameter];
    const size_t n = parameter_elements(p);
    float *values = (float *)(void *)staged_raw.bytes;
    if (!p->transposed || !transposed) {
        const size_t pieces = source->places[parameter].is_codes ? max_size(source->records[parameter].pieces, 1) : 1;
        for (size_t done = 0, k, each = n / pieces; done < count; done += k) {
            const ElementRun all = {begin + done, count - done}, run = transposed ? fused_run(p, begin + done, 0) : all;
            const size_t at = run.at % each;
            k = min_size(min_size(count - done, run.count), each - at);
            quant_decode_range(values + done, format, source_hold_piece(source, parameter, run.at / each, pieces), each,
                               at, k);
        }
        elements_convert(out, as, values, DTYPE_FP32, count);
        return;
    }
    const uint8_t *record = source_hold_record(source, parameter);
    quant_scales(); // fills the table before threads need it
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (size_t i = 0; i < count; i++) { // to order [cols, rows]
        const MatrixPart m = matrix_part(p, begin + i, 1);
        const size_t c = m.begin / m.rows, r = m.begin % m.rows;
        quant_decode_range(values + i, format, record, n, m.first + r * p->cols + c, 1);
    }
    elements_convert(out, as, values, DTYPE_FP32, count);
}

// Reads at most SLAB_ELEMENTS elements of a parameter, in the requested order.
static void source_read_slab(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                             int transposed, void *out) {
    if (source_is_quantised(source, parameter)) // decodes values instead of reading them from the files
        source_read_decoded(source, parameter, begin, count, as, transposed, out);
    else
        source_read_stored(source, parameter, begin, count, as, transposed, out);
}

// Sets the format in which matrices that are not yet in 4 bits are quantised when they are read. Decoding rounds to
// their type in the file. head: lm_head, too
static void source_quantise(WeightSource *source, QuantFormat format, int head) {
    const Model *model = &source->model;
    if (!source->quant)
        source->quant = (QuantFormat *)checked_calloc(model->parameter_count, sizeof(QuantFormat), "formats");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const DType type = source->places[i].type;
        const Parameter *p = &model->parameters[i];
        if (source_is_quantised(source, i) || !parameter_quantises(model, p, format.type, head)) continue;
        source->quant[i] = parameter_format(format, model->config.family, p);
        if (format.type < QUANT_MXFP4) source->quant[i].rounding = type == DTYPE_FP64 ? DTYPE_FP32 : type;
    }
}

// Reads elements [begin, begin + count) of a parameter, converted to `as` (fp16 only if the file has it). transposed:
// in the order [cols, rows] of Hugging Face's Conv1D files, else in memory order
static void source_read_order(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                              int transposed, void *out) {
    size_t n;
    for (size_t done = 0; done < count; done += n) {
        char *to = (char *)out + done * dtype_size(as);
        n = min_size(count - done, SLAB_ELEMENTS);
        if (source->merge && source->read_merged(source, parameter, begin + done, n, as, transposed, to)) continue;
        source_read_slab(source, parameter, begin + done, n, as, transposed, to);
    }
}

// Reads elements in memory order.
static void weights_read(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                         void *out) {
    const size_t elements = parameter_elements(&source->model.parameters[parameter]);
    if (begin > elements || count > elements - begin)
        die("internal: %s: elements %zu to %zu of %s, which has %zu; please report it", source->path, begin,
            begin + count, source->model.parameters[parameter].name, elements);
    source_read_order(source, parameter, begin, count, as, 0, out);
}

// Ends the program if a value to write is not finite. values: elements [begin, begin + count) of a tensor [., cols];
// cols 0: a tensor of one dimension
static void source_refuse_bad(const char *path, const char *tensor, size_t cols, size_t begin, size_t count, DType type,
                              const void *values) {
    char at[PLACE_TEXT];
    const char *bad = elements_bad_text(values, type, cols, begin, count, at);
    if (bad)
        die("%s: tensor %s holds %s in %s at %s, so it is not converted; take another copy or an earlier checkpoint",
            path, tensor, bad, dtype_name(type), at);
}

// Reads like source_read_order, for writing to a file: refuses values that are not finite.
static void source_read_finite(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                               int transposed, void *out) {
    const Parameter *p = &source->model.parameters[parameter];
    source_read_order(source, parameter, begin, count, as, transposed, out);
    const size_t cols = p->transposed && transposed ? p->rows / max_size(p->experts, 1) : p->cols;
    source_refuse_bad(source->path, p->name, cols, begin, count, as, out);
}

// ---- opening and closing --------------------------------------------------------------------------------------------
static WeightSource *source_new(const char *path, const char *format) {
    WeightSource *source = (WeightSource *)checked_calloc(1, sizeof(*source), "a source of weights");
    source->held = (SourceHeld *)checked_calloc(1, sizeof(SourceHeld), "a source of weights");
    source->path = checked_strdup(path), source->format = format;
    return source;
}

// Sets the parameter table; the places of the parameters are still empty.
static void source_set_table(WeightSource *source, Model table) {
    source->model = table;
    source->places =
        (TensorLocation *)checked_calloc(table.parameter_count, sizeof(TensorLocation), "the places of the weights");
}

// Splits the parameter into `count` tensors, whose places are still empty.
static TensorPieces *source_set_pieces(WeightSource *source, size_t parameter, size_t count) {
    const size_t entries = source->model.parameter_count;
    if (!source->pieces)
        source->pieces = (TensorPieces *)checked_calloc(entries, sizeof(TensorPieces), "the places of experts");
    TensorPieces *pieces = &source->pieces[parameter];
    pieces->count = count;
    pieces->place = (TensorLocation *)checked_calloc(count, sizeof(TensorLocation), "the places of experts");
    return pieces;
}

static void source_open_file(WeightSource *source, const char *path) {
    source->files = (InputFile *)checked_calloc(1, sizeof(InputFile), "an open file");
    source->files[0] = input_open(path);
    source->file_count = 1;
}

// Opens a file and reads the header of `bytes` bytes.
static void source_open_header(WeightSource *source, const char *format, void *header, size_t bytes) {
    source->format = format;
    source_open_file(source, source->path);
    if (source->files[0].bytes < bytes)
        die("%s: is truncated: it has %llu bytes, but the header alone needs %zu; copy or convert it again",
            source->path, (unsigned long long)source->files[0].bytes, bytes);
    input_read(&source->files[0], 0, header, bytes);
}

// Checks that the weights end where the file ends.
static void source_check_end(const WeightSource *source, uint64_t wanted) {
    const uint64_t bytes = source->files[0].bytes;
    if (bytes != wanted)
        die("%s: has %llu bytes, %s; %llu were expected; copy or convert it again", source->path,
            (unsigned long long)bytes, bytes < wanted ? "so it is truncated" : "too many", (unsigned long long)wanted);
}

// Sets the source's type: the type of all tensors, or a type that can hold every tensor's values.
static void source_finish(WeightSource *source) {
    DType type = source->places[0].type;
    for (size_t i = 1; i < source->model.parameter_count; i++) {
        DType other = source->places[i].type;
        if (other != type) type = other == DTYPE_FP64 || type == DTYPE_FP64 ? DTYPE_FP64 : DTYPE_FP32;
    }
    source->dtype = source->model.dtype = type;
}

// Adds rows for new tokens to the embedding and the head, up to `rows`: the mean of the old rows, rounded to their
// type. transformers' resize_token_embeddings draws rows around that mean.
static void source_grow(WeightSource *source, size_t rows) {
    const size_t old = source->config.vocab_size, cols = source->config.hidden_size;
    if (source->model.model_offset[INPUTS_NORM] != ABSENT)
        die("%s: rows for new tokens cannot be added, since its layers have tables of their own; add the rows in "
            "transformers",
            source->path);
    double *sum = (double *)checked_calloc(cols, sizeof(double), "sums of the rows of the embedding");
    const float *values = (const float *)(const void *)staged_reformed.bytes;
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const DType type = source->places[i].type;
        const int head = source->model.parameters[i].offset == source->model.model_offset[LM_HEAD];
        if (!head && i != 0) continue;
        if (source->places[i].is_codes || type == DTYPE_FP16)
            die("%s: %s is in %s, so no rows can be added; convert the model with --%s first", source->path,
                source->model.parameters[i].name, type == DTYPE_FP16 ? "fp16" : "4 bits",
                type == DTYPE_FP16 ? "dtype bf16" : "base none");
        memset(sum, 0, cols * sizeof(double));
        for (size_t row = 0, n; row < old; row += n) {
            n = min_size(old - row, SLAB_ELEMENTS / cols);
            tensor_read_range(source, i, row * cols, n * cols, DTYPE_FP32, staged_reformed.bytes);
            for (size_t k = 0; k < n * cols; k++) sum[k % cols] += (double)values[k];
        }
        float *mean = source->mean[head] = (float *)checked_calloc(cols, sizeof(float), "the mean of the rows");
        for (size_t c = 0; c < cols; c++) {
            mean[c] = (float)(sum[c] / (double)old);
            if (type == DTYPE_BF16) mean[c] = bf16_to_float(float_to_bf16(mean[c]));
        }
    }
    free(sum);
    const DType type = source->dtype;
    source->grown_from = old, source->config.vocab_size = rows;
    const Model grown = model_build(&source->config, type);
    model_copy_constants(&grown, &source->model);
    model_free(&source->model);
    source->model = grown;
}

// ---- writing --------------------------------------------------------------------------------------------------------
// Ends the program if a model cannot be written as `dtype`.
static void weights_check_output(const WeightSource *source, DType dtype) {
    if (dtype == DTYPE_FP16 && source->dtype != DTYPE_FP16)
        die("%s: weights cannot be converted to fp16; choose fp32 or bf16", source->path);
}

#endif
