/*
The safetensors file format: 8 bytes header length (little-endian), a JSON header that maps each tensor's name to
{"dtype", "shape", "data_offsets": [begin, end]}, and the tensors' bytes, to which the offsets refer. The tensors must
cover these bytes exactly: no overlap, no gap, nothing after the last. Reading checks the whole header before using it.
Offsets need not be aligned, since published files have unaligned ones.
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H
#include "llmc/base/dtype.h"
#include "llmc/base/output.h"
#include "llmc/base/json.h"
#include "llmc/model/model.h"

#define SAFETENSORS_HEADER_MAX 100000000u // most bytes of a header, as in the reference implementation
#define SAFETENSORS_RANK_MAX   8
#define HF_NAME                256 // most bytes of a tensor's name, with its zero
#define HF_PART_NAME           (HF_NAME + 64)

typedef struct {
    char *name;
    char dtype[16]; // dtype in the file: "F32"
    DType type;     // the dtype as a DType; DTYPE_COUNT: unsupported
    size_t rank;
    uint64_t shape[SAFETENSORS_RANK_MAX];
    uint64_t begin, end; // byte range in the file
    size_t file;         // index of the file; set by the caller
    int used;            // 1: taken; set by the caller
} SafeTensor;

typedef struct {
    SafeTensor *tensors;
    size_t count;
} SafeTensors;

// All dtypes; the supported ones first, in the order of DType. Types of less than a byte are left out: their tensors
// may have any size, and no parameter may have these types.
static const struct {
    const char *name;
    size_t size;
} safetensors_dtypes[] = {{"F32", 4}, {"BF16", 2},    {"F64", 8},     {"F16", 2},    {"BOOL", 1}, {"U8", 1},
                          {"I8", 1},  {"I16", 2},     {"U16", 2},     {"I32", 4},    {"U32", 4},  {"I64", 8},
                          {"U64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
#define SAFETENSORS_DTYPES (sizeof(safetensors_dtypes) / sizeof(safetensors_dtypes[0]))

// Prints a shape, "[50257, 768]", for messages. Uses rotating static buffers, so two shapes fit in one message.
static const char *shape_text(const uint64_t *shape, size_t rank) {
    static char buffers[4][200];
    static int next;
    char *text = buffers[next++ % 4];
    size_t used = (size_t)snprintf(text, sizeof(buffers[0]), "[");
    for (size_t i = 0; i < rank; i++)
        used += (size_t)snprintf(text + used, sizeof(buffers[0]) - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)shape[i]);
    snprintf(text + used, sizeof(buffers[0]) - used, "]");
    return text;
}

// Sets a parameter's shape in files; returns the rank.
static size_t parameter_shape(const Parameter *p, uint64_t shape[3]) {
    if (p->experts) {
        shape[0] = p->experts;
        shape[1] = p->transposed ? p->cols : p->rows / p->experts;
        shape[2] = p->transposed ? p->rows / p->experts : p->cols;
        return 3;
    }
    if (p->file_rows) {
        shape[0] = p->file_rows, shape[1] = parameter_elements(p) / p->file_rows;
        return 2;
    }
    shape[0] = p->transposed ? p->cols : p->rows;
    if (p->joined) {
        shape[0] = p->rows * (p->role == ROLE_EMBEDDING ? 1 : p->joined);
        shape[1] = parameter_file_elements(p) / shape[0];
        return 2;
    }
    shape[1] = p->role == ROLE_CONV ? 1 : p->transposed ? p->rows : p->cols;
    shape[2] = p->cols;
    return p->role == ROLE_CONV ? 3 : p->cols ? 2 : 1;
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Reads an entry of the header. The tensor's offsets are still relative to the data.
static void safetensors_read_entry(SafeTensor *tensor, const cJSON *entry, const char *path) {
    const char *name = entry->string;
    const cJSON *dtype = json_get(entry, "dtype"), *shape = json_get(entry, "shape"), *item;
    const cJSON *offsets = json_get(entry, "data_offsets");
    size_t type;
    int overflow = 0;
    if (!cJSON_IsObject(entry))
        die("%s: the entry of tensor %.200s must be an object; download the file again", path, name);
    cJSON_ArrayForEach(item, entry) {
        if (!text_is_one_of(item->string, "dtype|shape|data_offsets"))
            die("%s: tensor %.200s: its entry has the key \"%.100s\", which the format does not know; download the "
                "file again",
                path, name, item->string);
    }
    if (!cJSON_IsString(dtype)) die("%s: tensor %.200s has no dtype; download the file again", path, name);
    if (!cJSON_IsArray(shape)) die("%s: tensor %.200s has no shape; download the file again", path, name);
    if (cJSON_GetArraySize(offsets) != 2 || !cJSON_IsArray(offsets))
        die("%s: tensor %.200s: data_offsets are not two numbers; download it again", path, name);
    memset(tensor, 0, sizeof(*tensor));
    snprintf(tensor->dtype, sizeof(tensor->dtype), "%s", json_printable(dtype->valuestring) ? dtype->valuestring : "?");
    for (type = 0; type < SAFETENSORS_DTYPES && strcmp(safetensors_dtypes[type].name, tensor->dtype) != 0;) type++;
    tensor->type = type < DTYPE_FLOATS ? (DType)type : DTYPE_COUNT;
    const size_t size = type < SAFETENSORS_DTYPES ? safetensors_dtypes[type].size : 0;
    uint64_t bytes = size;
    cJSON_ArrayForEach(item, shape) {
        if (tensor->rank == SAFETENSORS_RANK_MAX)
            die("%s: tensor %.200s has more dimensions than the supported %d", path, name, SAFETENSORS_RANK_MAX);
        if (!json_whole_number(item, &tensor->shape[tensor->rank]))
            die("%s: tensor %.200s: its shape has an entry that is not a whole number; download it again", path, name);
        overflow |= __builtin_mul_overflow(bytes, tensor->shape[tensor->rank++], &bytes);
    }
    if (!json_whole_number(offsets->child, &tensor->begin) || !json_whole_number(offsets->child->next, &tensor->end))
        die("%s: tensor %.200s: data_offsets has an entry that is not a whole number; download it again", path, name);
    if (tensor->begin > tensor->end)
        die("%s: tensor %.200s: data_offsets [%llu, %llu] end before they begin; download it again", path, name,
            (unsigned long long)tensor->begin, (unsigned long long)tensor->end);
    if (overflow || (size && tensor->end - tensor->begin != bytes))
        die("%s: tensor %.200s: data_offsets span %llu bytes, which is not the size of shape %s in %s; download the "
            "file again",
            path, name, (unsigned long long)(tensor->end - tensor->begin), shape_text(tensor->shape, tensor->rank),
            tensor->dtype);
    tensor->name = checked_strdup(name);
}

static int safetensors_compare_offsets(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end; // empty tensors first
}

// Checks that the tensors lie end to end from 0 to data_bytes. Sorts them by offset.
static void safetensors_check_cover(SafeTensor *tensors, size_t count, uint64_t data_bytes, const char *path) {
    uint64_t end = 0;
    qsort(tensors, count, sizeof(*tensors), safetensors_compare_offsets);
    for (size_t i = 0; i < count; i++) {
        const SafeTensor *t = &tensors[i];
        if (t->end > data_bytes)
            die("%s: tensor %.200s ends at byte %llu of the data, but the file has %llu; download it again", path,
                t->name, (unsigned long long)t->end, (unsigned long long)data_bytes);
        if (t->begin < end)
            die("%s: tensor %.200s overlaps tensor %.200s (data_offsets); download it again", path, t->name,
                tensors[i - 1].name);
        if (t->begin > end)
            die("%s: bytes %llu to %llu of the data, before tensor %.200s, belong to no tensor; download it again",
                path, (unsigned long long)end, (unsigned long long)t->begin, t->name);
        end = t->end;
    }
    if (end != data_bytes)
        die("%s: %llu bytes after the last tensor belong to no tensor; download it again", path,
            (unsigned long long)(data_bytes - end));
}

// Parses the header. *header_bytes: size of the header's JSON text, from the file's first 8 bytes
static cJSON *safetensors_parse_header(const InputFile *file, uint64_t *header_bytes) {
    static const char pointer[] = "version https://git-lfs"; // content of a file that git-lfs has not fetched
    unsigned char begin[sizeof(pointer) - 1];
    if (file->bytes < 8) die("%s: is too short for a safetensors file; download it again", file->path);
    input_read(file, 0, begin, min_size((size_t)file->bytes, sizeof(begin)));
    if (file->bytes >= sizeof(begin) && !memcmp(begin, pointer, sizeof(begin)))
        die("%s: is a pointer of git-lfs, not the file itself; fetch it with git lfs pull", file->path);
    *header_bytes = 0;
    for (int i = 7; i >= 0; i--) *header_bytes = *header_bytes << 8 | begin[i];
    if (*header_bytes > SAFETENSORS_HEADER_MAX || *header_bytes > file->bytes - 8)
        die("%s: claims a header of %llu bytes; it has %llu bytes, and a header may have at most %u; download it again",
            file->path, (unsigned long long)*header_bytes, (unsigned long long)file->bytes, SAFETENSORS_HEADER_MAX);
    char *text = (char *)checked_malloc((size_t)*header_bytes + 1, "a safetensors header");
    input_read(file, 8, text, (size_t)*header_bytes);
    text[*header_bytes] = 0;
    cJSON *header = json_parse_object(text, (size_t)*header_bytes, file->path);
    free(text);
    return header;
}

// Checks that __metadata__ holds only strings, as the format requires.
static void safetensors_check_metadata(const cJSON *metadata, const char *path) {
    const cJSON *item;
    if (!cJSON_IsObject(metadata)) die("%s: __metadata__ must be an object; download the file again", path);
    cJSON_ArrayForEach(item, metadata) {
        if (!cJSON_IsString(item))
            die("%s: __metadata__ has a value that is not text: %.100s; download the file again", path, item->string);
    }
}

// Appends the tensors of one file to the list, with offsets from the start of the file.
static void safetensors_read_header(SafeTensors *list, const InputFile *file, size_t file_index) {
    uint64_t header_bytes;
    cJSON *header = safetensors_parse_header(file, &header_bytes);
    const cJSON *entry;
    size_t count = list->count;
    cJSON_ArrayForEach(entry, header) count++;
    list->tensors = (SafeTensor *)checked_realloc(list->tensors, (count + 1) * sizeof(SafeTensor), "a list of tensors");
    count = list->count;
    cJSON_ArrayForEach(entry, header) {
        if (strcmp(entry->string, "__metadata__") != 0)
            safetensors_read_entry(&list->tensors[count++], entry, file->path);
        else
            safetensors_check_metadata(entry, file->path);
    }
    cJSON_Delete(header);
    safetensors_check_cover(list->tensors + list->count, count - list->count, file->bytes - 8 - header_bytes,
                            file->path);
    for (size_t i = list->count; i < count; i++) {
        list->tensors[i].begin += 8 + header_bytes, list->tensors[i].end += 8 + header_bytes;
        list->tensors[i].file = file_index;
    }
    list->count = count;
}

static void safetensors_sort(SafeTensors *list) {
    if (list->count) qsort(list->tensors, list->count, sizeof(SafeTensor), compare_names);
}

// Returns the tensor of this name in a sorted list, or NULL.
static SafeTensor *safetensors_find(const SafeTensors *list, const char *name) {
    SafeTensor key = {0};
    key.name = (char *)name;
    return (SafeTensor *)bsearch(&key, list->tensors, list->count, sizeof(key), compare_names);
}

// Describes the unused tensors: the first names, how many more, the prefix that all share. Returns "" if all are used.
static const char *safetensors_unused(const SafeTensors *list) {
    static TextLine line;
    const char *first = "";
    size_t count = 0, same = 0;
    *line.text = 0, line.used = 0;
    for (const SafeTensor *t = list->tensors; t < list->tensors + list->count; t++) {
        if (t->used) continue;
        if (!count++) first = t->name, same = strlen(first);
        while (strncmp(first, t->name, same) != 0) same--;
        if (count <= 3) line_add(&line, "%s%.120s", count > 1 ? ", " : "", t->name);
    }
    if (count > 3) line_add(&line, " and %zu more", count - 3);
    if (count > 1 && same) line_add(&line, ", all beginning with %.*s", (int)min_size(same, 100), first);
    return line.text;
}

static void safetensors_free(SafeTensors *list) {
    for (size_t i = 0; i < list->count; i++) free(list->tensors[i].name);
    free(list->tensors);
    list->tensors = NULL, list->count = 0;
}

/*
Writing safetensors files: a header, entry by entry, then the tensors' bytes, which the caller writes. For the same
tensors the header equals the reference implementation's. A matrix that files hold transposed (GPT-2's Conv1D) has shape
[cols, rows] in the file, a convolution [rows, 1, cols], as in transformers. The header goes to a file or to memory, or
is only counted, to know a file's size before it is opened. Nothing is allocated.
*/
typedef struct {
    const OutputFile *file; // file to write, or NULL
    char *text;             // [room] memory to write, or NULL; without file and text, the header is only counted
    size_t room;
    uint64_t at;   // header bytes so far
    uint64_t data; // tensor bytes so far
    char entry[1024];
    JsonOut json; // writes to `entry`
} SafetensorsWriter;

static void safetensors_put(SafetensorsWriter *writer, const char *text, size_t length) {
    if (writer->file) output_write(writer->file, writer->at, text, length);
    if (writer->text && writer->at + length > writer->room)
        die("internal: a safetensors header of more than %zu bytes; please report it", writer->room);
    if (writer->text) memcpy(writer->text + writer->at, text, length);
    writer->at += length;
}

// Writes what the JSON has added to the entry.
static void safetensors_put_entry(SafetensorsWriter *writer) {
    if (writer->json.used > writer->json.room)
        die("internal: a safetensors entry of %zu bytes; please report it", writer->json.used);
    safetensors_put(writer, writer->entry, writer->json.used);
    writer->json.used = 0;
}

// Begins a header. key, value: metadata in addition to "format"; NULL: none
static void safetensors_write_begin(SafetensorsWriter *writer, const OutputFile *file, char *text, size_t room,
                                    const char *key, const char *value) {
    memset(writer, 0, sizeof(*writer));
    writer->file = file, writer->text = text, writer->room = room, writer->at = 8;
    writer->json = json_open_text(writer->entry, sizeof(writer->entry), JSON_COMPACT);
    json_object(&writer->json, "__metadata__");
    json_text(&writer->json, "format", "pt");
    if (key) json_text(&writer->json, key, value);
    json_object_end(&writer->json);
    safetensors_put_entry(writer);
}

// Adds the next tensor's entry. The tensor's bytes follow the bytes of the previous tensor.
static void safetensors_write_tensor(SafetensorsWriter *writer, const char *name, const char *dtype,
                                     const uint64_t *shape, size_t rank, uint64_t bytes) {
    const uint64_t end = writer->data + bytes;
    JsonOut *json = &writer->json;
    json_object(json, name);
    json_text(json, "dtype", dtype);
    json_array(json, "shape");
    for (size_t i = 0; i < rank; i++) json_size(json, NULL, (size_t)shape[i]);
    json_array_end(json);
    json_array(json, "data_offsets");
    json_size(json, NULL, (size_t)writer->data);
    json_size(json, NULL, (size_t)end);
    json_array_end(json);
    json_object_end(json);
    safetensors_put_entry(writer);
    writer->data = end;
}

// Adds a parameter's entry under a name.
static void safetensors_write_named(SafetensorsWriter *writer, const char *name, const Parameter *p, DType type) {
    uint64_t shape[3];
    const size_t rank = parameter_shape(p, shape);
    safetensors_write_tensor(writer, name, safetensors_dtypes[type].name, shape, rank,
                             (uint64_t)parameter_file_elements(p) * dtype_size(type));
}

// Closes the header and pads it so that the data begin at a multiple of 8. Returns that offset.
static uint64_t safetensors_write_end(SafetensorsWriter *writer) {
    static const char spaces[] = "       ";
    unsigned char prefix[8];
    json_object_end(&writer->json);
    safetensors_put_entry(writer);
    safetensors_put(writer, spaces, (size_t)((8 - writer->at % 8) % 8));
    uint64_t header_bytes = writer->at - 8;
    for (size_t i = 0; i < 8; i++) prefix[i] = (unsigned char)(header_bytes >> (8 * i) & 0xff);
    if (writer->file) output_write(writer->file, 0, prefix, 8);
    if (writer->text) memcpy(writer->text, prefix, 8);
    return writer->at;
}

#endif
