// Holds two files of fp32 tensors against each other: compare_tensors A.safetensors B.safetensors TOLERANCE Of each
// tensor ||a - b|| / ||b||, of one whose norm is below a thousandth of that of all of them by the thousandth; prints
// the worst and exits with 1 where it is above the tolerance, or where the files have other tensors.
#define PROGRAM_NAME "compare_tensors"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

typedef struct {
    char *bytes; // of the file
    cJSON *header;
    const char *data;
} Tensors;

static Tensors tensors_read(const char *path) {
    InputFile file = input_open(path);
    Tensors t;
    uint64_t header;
    t.bytes = (char *)checked_malloc((size_t)file.bytes, "a file");
    input_read(&file, 0, t.bytes, (size_t)file.bytes);
    memcpy(&header, t.bytes, sizeof(header));
    char *text = (char *)checked_calloc((size_t)header + 1, 1, "a header");
    memcpy(text, t.bytes + 8, (size_t)header);
    t.header = json_parse_object(text, (size_t)header, path);
    t.data = t.bytes + 8 + header;
    input_close(&file);
    return t;
}

static double squares(const float *a, const float *b, size_t count) { // of a - b, or of a
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        double x = b ? (double)a[i] - (double)b[i] : (double)a[i];
        sum += x * x;
    }
    return sum;
}

static size_t offset_of(const cJSON *tensor, int which) {
    return (size_t)cJSON_GetArrayItem(json_get(tensor, "data_offsets"), which)->valuedouble;
}

static const float *values_of(const Tensors *t, const cJSON *tensor, size_t *count) {
    *count = (offset_of(tensor, 1) - offset_of(tensor, 0)) / sizeof(float);
    return (const float *)(const void *)(t->data + offset_of(tensor, 0));
}

int main(int argc, char **argv) {
    const cJSON *of_b;
    const char *worst = "none";
    double tolerance, all = 0, largest = 0;
    size_t count, others, tensors = 0;
    if (argc != 4 || !parse_double(argv[3], &tolerance)) die_usage("compare_tensors A B TOLERANCE");
    Tensors a = tensors_read(argv[1]), b = tensors_read(argv[2]);
    cJSON_ArrayForEach(of_b, b.header) {
        if (!strcmp(of_b->string, "__metadata__")) continue;
        const float *value = values_of(&b, of_b, &count);
        all += squares(value, NULL, count), tensors++;
    }
    cJSON_ArrayForEach(of_b, b.header) {
        const cJSON *of_a = json_get(a.header, of_b->string);
        if (!strcmp(of_b->string, "__metadata__")) continue;
        if (!of_a) die("%s: has no %s", argv[1], of_b->string);
        const float *value = values_of(&b, of_b, &count), *other = values_of(&a, of_a, &others);
        if (count != others) die("%s: has %zu elements of %s, %s %zu", argv[1], others, of_b->string, argv[2], count);
        double error = sqrt(squares(other, value, count)) / fmax(sqrt(squares(value, NULL, count)), 1e-3 * sqrt(all));
        if (!(error <= largest)) largest = error, worst = of_b->string;
    }
    printf("%zu tensors, the worst is %s: %.3g\n", tensors, worst, largest);
    return !(tensors > 0 && all > 0 && largest <= tolerance);
}
