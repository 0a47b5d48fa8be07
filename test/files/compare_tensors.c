// Compares two files of fp32 tensors: compare_tensors A.safetensors B.safetensors TOLERANCE. Of each tensor ||a - b|| /
// max(||b||, ||all b|| / 1000). Prints the worst; exits with 1 if it exceeds the tolerance or the tensors differ.
#include "llmc/files/safetensors.h"

static double squares(const float *a, const float *b, size_t count) { // of a - b, or of a
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        double x = b ? (double)a[i] - (double)b[i] : (double)a[i];
        sum += x * x;
    }
    return sum;
}

static float *values_of(const InputFile *file, const SafeTensor *tensor) {
    const size_t bytes = (size_t)(tensor->end - tensor->begin);
    float *values = (float *)checked_malloc(bytes, "a tensor");
    input_read(file, tensor->begin, values, bytes);
    return values;
}

int main(int argc, char **argv) {
    SafeTensors list[2] = {{NULL, 0}, {NULL, 0}};
    const char *worst = "none";
    double tolerance, all = 0, largest = 0;
    if (argc != 4 || !parse_double(argv[3], &tolerance)) die_usage("compare_tensors A B TOLERANCE");
    const InputFile file[2] = {input_open(argv[1]), input_open(argv[2])};
    for (size_t i = 0; i < 2; i++) {
        safetensors_read_header(&list[i], &file[i], i);
        safetensors_sort(&list[i]);
    }
    for (const SafeTensor *b = list[1].tensors; b < list[1].tensors + list[1].count; b++)
        all += squares(values_of(&file[1], b), NULL, (size_t)(b->end - b->begin) / sizeof(float));
    for (const SafeTensor *b = list[1].tensors; b < list[1].tensors + list[1].count; b++) {
        const SafeTensor *a = safetensors_find(&list[0], b->name);
        if (!a || a->end - a->begin != b->end - b->begin) die("%s: has no %s as in %s", argv[1], b->name, argv[2]);
        const size_t count = (size_t)(b->end - b->begin) / sizeof(float);
        const float *value = values_of(&file[1], b), *other = values_of(&file[0], a);
        double error = sqrt(squares(other, value, count)) / fmax(sqrt(squares(value, NULL, count)), 1e-3 * sqrt(all));
        if (!(error <= largest)) largest = error, worst = b->name;
    }
    printf("%zu tensors, the worst is %s: %.3g\n", list[1].count, worst, largest);
    return !(list[1].count > 0 && all > 0 && largest <= tolerance);
}
