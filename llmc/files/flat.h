/*
The flat .bin, our own weights file: a header of 4096 bytes, then every element of the model in the order of the
parameter table (model.h), row-major, without padding. Element i lies at byte 4096 + i * size, so the file can be
mapped. Numbers are in the writer's byte order (in practice little-endian); the mark tells which:

    byte    0  char[8]   "STREAMBP"
            8  uint32    version, 1
           12  uint32    byte order mark, 0x01020304
           16  uint64    bytes of this header, 4096
           24  uint32    type of the elements: 0 fp32, 1 bf16, 2 double, 3 fp16 (DType)
           28  uint32    0
           32  uint64    number of elements
           40  uint64    checksum: FNV-1a, 64 bits, over the first 4096 bytes with this field zero
           48  char[]    the model, zero-terminated: "family,key=value,..." with Hugging Face's keys; zeros to the end

If a model has constants (Model.constants), they follow in the header, in fp32.
*/
#ifndef LLMC_FLAT_H
#define LLMC_FLAT_H
#include "llmc/base/hash.h"
#include "weight_source.h"

#define FLAT_MAGIC          "STREAMBP"
#define FLAT_VERSION        1u
#define FLAT_BYTE_ORDER     0x01020304u
#define FLAT_BYTE_ORDER_REV 0x04030201u

typedef struct {
    char magic[8];
    uint32_t version, byte_order;
    uint64_t header_bytes;
    uint32_t dtype, zero;
    uint64_t elements, checksum;
    char config[4048];
} FlatHeader;

// Returns the bytes of a model's header.
static size_t flat_header_bytes(const Model *model) {
    return sizeof(FlatHeader) + model_constants(model) * sizeof(float);
}

static uint64_t flat_checksum(const FlatHeader *header) {
    FlatHeader copy = *header;
    copy.checksum = 0;
    return fnv1a(FNV_BEGIN, &copy, sizeof(copy));
}

// ---- reading --------------------------------------------------------------------------------------------------------
static void flat_check_header(const FlatHeader *header, const char *path) {
    if (memcmp(header->magic, FLAT_MAGIC, sizeof(header->magic)) != 0)
        die("%s: does not begin with " FLAT_MAGIC ", so it is not a flat .bin; give a file that convert wrote", path);
    if (header->byte_order == FLAT_BYTE_ORDER_REV)
        die("%s: was written on a machine of the other byte order; convert the original again here", path);
    if (header->byte_order != FLAT_BYTE_ORDER)
        die("%s: its byte order mark is damaged; copy or convert it again", path);
    if (header->version != FLAT_VERSION)
        die("%s: is a flat .bin of version %u, this program reads version %u; convert the original again", path,
            header->version, FLAT_VERSION);
    if (header->checksum != flat_checksum(header))
        die("%s: its header is damaged (checksum); copy or convert it again", path);
    if (header->dtype >= DTYPE_FLOATS)
        die("%s: element type %u is unknown; copy or convert it again", path, header->dtype);
    if (!memchr(header->config, 0, sizeof(header->config)))
        die("%s: the name of the model in its header has no end; copy or convert it again", path);
}

static void flat_open(WeightSource *source) {
    FlatHeader header;
    const char *path = source->path;
    source_open_header(source, "flat .bin", &header, sizeof(header));
    flat_check_header(&header, path);
    const DType type = (DType)header.dtype;
    source->config = config_from_text(header.config, path, EXIT_RUNTIME);
    source_set_table(source, model_build(&source->config, type));
    const size_t begin = flat_header_bytes(&source->model);
    if (header.header_bytes != begin)
        die("%s: claims a header of %llu bytes, but version %u has %zu for this model; convert the original again",
            path, (unsigned long long)header.header_bytes, FLAT_VERSION, begin);
    if (header.elements != source->model.elements)
        die("%s: claims %llu elements, but its model has %zu; convert the original again", path,
            (unsigned long long)header.elements, source->model.elements);
    source_check_end(source, begin + header.elements * dtype_size(type));
    if (begin > sizeof(header))
        input_read(&source->files[0], sizeof(header), source->model.constants, begin - sizeof(header));
    source_refuse_bad(path, "constants", 0, 0, (begin - sizeof(header)) / sizeof(float), DTYPE_FP32,
                      source->model.constants);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const TensorLocation place = {0, begin + source->model.parameters[i].offset * dtype_size(type), type, 0};
        source->places[i] = place;
    }
}

// ---- writing --------------------------------------------------------------------------------------------------------
// Writes a model's header to `bytes`; returns the header's length.
static size_t flat_header(unsigned char *bytes, const Model *model, DType dtype) {
    FlatHeader *header = (FlatHeader *)(void *)bytes;
    const size_t count = flat_header_bytes(model);
    const FlatHeader fields = {{0}, FLAT_VERSION, FLAT_BYTE_ORDER, count, (uint32_t)dtype, 0, model->elements, 0, {0}};
    *header = fields;
    memcpy(header->magic, FLAT_MAGIC, sizeof(header->magic));
    config_to_text(&model->config, header->config, sizeof(header->config));
    header->checksum = flat_checksum(header);
    if (model->constants) memcpy(bytes + sizeof(*header), model->constants, count - sizeof(*header));
    return count;
}

// Opens a file and writes the header. The caller writes the elements after it.
static void flat_begin(OutputFile *output, const char *path, const Model *model, DType dtype) {
    const size_t count = flat_header(staged.bytes, model, dtype);
    output_open(output, path, count + (uint64_t)model->elements * dtype_size(dtype));
    output_write(output, 0, staged.bytes, count);
}

// Converts any source to a flat .bin of `dtype`, slab by slab. With source->dtype no value changes.
static void weights_convert(const WeightSource *source, const char *path, DType dtype) {
    const size_t size = dtype_size(dtype);
    OutputFile output;
    weights_check_output(source, dtype);
    flat_begin(&output, path, &source->model, dtype);
    for (Slabs s = slabs_of_all(&source->model, "converting"); slabs_next(&s);) {
        source_read_finite(source, s.parameter, s.begin, s.count, dtype, 0, staged.bytes);
        output_write(&output, flat_header_bytes(&source->model) + (uint64_t)s.first * size, staged.bytes,
                     s.count * size);
    }
    output_commit(&output);
}

#endif
