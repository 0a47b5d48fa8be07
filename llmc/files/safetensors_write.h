/*
Writing safetensors files: a header, entry by entry, then the tensors' bytes, which the caller writes. The header is the text
that the reference implementation writes for the same tensors. A matrix that files hold transposed (GPT-2's Conv1D) is
[cols, rows] there, as in transformers. The header goes to a file, or into memory, or is only counted: the size of a file is
known before it is opened. Nothing is allocated.
*/
#ifndef LLMC_SAFETENSORS_WRITE_H
#define LLMC_SAFETENSORS_WRITE_H
#include "llmc/base/file.h"
#include "llmc/model/model.h"

typedef struct {
    const OutputFile *file; // or NULL
    char *text;             // [room], or NULL; both NULL: only count
    size_t room;
    uint64_t at;   // byte of the file where the header goes on
    uint64_t data; // bytes of the tensors so far
} SafetensorsWriter;

static const char *safetensors_dtype_name(DType type) {
    return type == DTYPE_FP32 ? "F32" : type == DTYPE_BF16 ? "BF16" : type == DTYPE_FP16 ? "F16" : "F64";
}

static void safetensors_put(SafetensorsWriter *writer, const char *text, size_t length) {
    if (writer->file) output_write(writer->file, writer->at, text, length);
    if (writer->text && writer->at + length > writer->room)
        die("internal: a safetensors header of more than %zu bytes", writer->room);
    if (writer->text) memcpy(writer->text + writer->at, text, length);
    writer->at += length;
}

// more: further metadata, from its comma on
static void safetensors_put_begin(SafetensorsWriter *writer, const char *more) {
    static const char begin[] = "{\"__metadata__\":{\"format\":\"pt\"";
    safetensors_put(writer, begin, sizeof(begin) - 1);
    safetensors_put(writer, more, strlen(more));
    safetensors_put(writer, "}", 1);
}

static SafetensorsWriter safetensors_write_begin(const OutputFile *file) {
    SafetensorsWriter writer = {file, NULL, 0, 8, 0};
    safetensors_put_begin(&writer, "");
    return writer;
}

static SafetensorsWriter safetensors_write_text(char *text, size_t room, const char *more) {
    SafetensorsWriter writer = {NULL, text, room, 8, 0};
    safetensors_put_begin(&writer, more);
    return writer;
}

// The next tensor; its bytes follow those of the tensor before it.
static void safetensors_write_entry(SafetensorsWriter *writer, const Parameter *p, DType type) {
    size_t first = p->transposed ? p->cols : p->rows, second = p->transposed ? p->rows : p->cols;
    uint64_t end = writer->data + (uint64_t)parameter_elements(p) * dtype_size(type);
    char entry[512], shape[64];
    if (p->cols)
        snprintf(shape, sizeof(shape), "%zu,%zu", first, second);
    else
        snprintf(shape, sizeof(shape), "%zu", p->rows);
    safetensors_put(writer, entry,
                    (size_t)snprintf(entry, sizeof(entry),
                                     ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}", p->name,
                                     safetensors_dtype_name(type), shape, (unsigned long long)writer->data,
                                     (unsigned long long)end));
    writer->data = end;
}

// Closes the header, so that the data begin at a multiple of 8; returns at which byte of the file they do.
static uint64_t safetensors_write_end(SafetensorsWriter *writer) {
    static const char spaces[] = "       ";
    unsigned char prefix[8];
    safetensors_put(writer, "}", 1);
    safetensors_put(writer, spaces, (size_t)((8 - writer->at % 8) % 8));
    uint64_t header_bytes = writer->at - 8;
    for (size_t i = 0; i < 8; i++) prefix[i] = (unsigned char)(header_bytes >> (8 * i) & 0xff);
    if (writer->file) output_write(writer->file, 0, prefix, 8);
    if (writer->text) memcpy(writer->text, prefix, 8);
    return writer->at;
}

#endif
