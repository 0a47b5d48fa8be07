/*
Element types. A tensor in memory is a run of elements of one DType; the DType of weights and activations ("floatX")
depends on the linked op set, in a plan on the model. Files may hold fp16, which is converted while reading. int8 marks
bytes of codes.
*/
#ifndef LLMC_DTYPE_H
#define LLMC_DTYPE_H
#include "text.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum { DTYPE_FP32, DTYPE_BF16, DTYPE_FP64, DTYPE_FP16, DTYPE_INT8, DTYPE_COUNT } DType;
enum { DTYPE_FLOATS = DTYPE_INT8 }; // types before it are numbers

static size_t dtype_size(DType type) {
    return type == DTYPE_FP64 ? 8 : type == DTYPE_FP32 ? 4 : type == DTYPE_INT8 ? 1 : 2;
}

static const char *dtype_name(DType type) {
    static const char *const names[DTYPE_COUNT] = {"fp32", "bf16", "double", "fp16", "int8"};
    return type < DTYPE_COUNT ? names[type] : "unknown";
}

// Returns the type for sums over tokens of tensors of `type`: fp32, or double in the double build.
static DType dtype_of_sums(DType type) { return type == DTYPE_FP64 ? DTYPE_FP64 : DTYPE_FP32; }

static float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
static uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded); // without a branch, so that
                                                                                            // it vectorises
}

// Rounds a constant to the model's type, as transformers does.
static double rounded_to(DType type, double value) {
    if (type == DTYPE_FP64) return value;
    return type == DTYPE_BF16 ? (double)bf16_to_float(float_to_bf16((float)value)) : (double)(float)value;
}

static float fp16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    float value;
    if (exponent == 0) { // zero or subnormal: the value is mantissa * 2^-24
        value = (float)mantissa * (1.0f / 16777216.0f);
        return sign ? -value : value;
    }
    uint32_t wide =
        sign | (exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13));
    memcpy(&value, &wide, sizeof(value));
    return value;
}

// Returns element i of a run in host memory.
static double element_to_double(const void *elements, DType type, size_t i) {
    switch (type) {
    case DTYPE_FP64: return ((const double *)elements)[i];
    case DTYPE_FP32: return (double)((const float *)elements)[i];
    case DTYPE_FP16: return (double)fp16_to_float(((const uint16_t *)elements)[i]);
    default: return (double)bf16_to_float(((const uint16_t *)elements)[i]);
    }
}

// Returns the index of the first NaN or infinity, or count. A NaN or infinity has only 1 bits in the exponent; in every
// type the exponent lies in the upper two bytes.
static size_t elements_find_bad(const void *elements, DType type, size_t count) {
    const uint16_t ones = type == DTYPE_FP64 ? 0x7ff0 : type == DTYPE_FP16 ? 0x7c00 : 0x7f80;
    const size_t stride = dtype_size(type) / 2;
    const uint16_t *upper = (const uint16_t *)elements + stride - 1;
    size_t i = 0;
    while (i < count && (upper[i * stride] & ones) != ones) i++;
    return i;
}

#define PLACE_TEXT 48 // bytes of "[row, column]"

// Describes the first value that is not finite among elements [begin, begin + count) of a matrix [., cols] (cols 0: a
// vector). Returns "NaN" or "an infinity", and writes the value's place to `at`; NULL: all values are finite
static const char *elements_bad_text(const void *elements, DType type, size_t cols, size_t begin, size_t count,
                                     char at[PLACE_TEXT]) {
    const size_t bad = elements_find_bad(elements, type, count), width = cols ? cols : 1;
    if (bad == count) return NULL;
    snprintf(at, PLACE_TEXT, "[%zu, %zu]", (begin + bad) / width, (begin + bad) % width);
    return isnan(element_to_double(elements, type, bad)) ? "NaN" : "an infinity";
}

/*
Conversion between element types, on the host and for files: every pair of types, except into fp16. Values are rounded
to nearest, ties to even. Conversion in device memory is an op (ops.h).
*/
static void elements_to_float(float *out, const void *in, DType type, size_t count) {
    if (type == DTYPE_FP32)
        memcpy(out, in, count * sizeof(float));
    else if (type == DTYPE_BF16)
        for (size_t i = 0; i < count; i++) out[i] = bf16_to_float(((const uint16_t *)in)[i]);
    else
        for (size_t i = 0; i < count; i++) out[i] = (float)element_to_double(in, type, i);
}

static void elements_from_float(void *out, DType type, const float *in, size_t count) {
    switch (type) {
    case DTYPE_FP32: memcpy(out, in, count * sizeof(float)); break;
    case DTYPE_BF16:
        for (size_t i = 0; i < count; i++) ((uint16_t *)out)[i] = float_to_bf16(in[i]);
        break;
    case DTYPE_FP64:
        for (size_t i = 0; i < count; i++) ((double *)out)[i] = (double)in[i];
        break;
    default: die("weights cannot be converted to %s; choose fp32 or bf16", dtype_name(type)); // fp16 is only read
    }
}

// Converts through fp32, which holds all of fp16 and bf16.
static void elements_convert(void *out, DType as, const void *in, DType type, size_t count) {
    float block[1024];
    if (as == type)
        memcpy(out, in, count * dtype_size(type));
    else if (as == DTYPE_FP32)
        elements_to_float((float *)out, in, type, count);
    else if (type == DTYPE_FP32)
        elements_from_float(out, as, (const float *)in, count);
    else
        for (size_t done = 0, n; done < count; done += n) {
            n = min_size(count - done, sizeof(block) / sizeof(block[0]));
            elements_to_float(block, (const char *)in + done * dtype_size(type), type, n);
            elements_from_float((char *)out + done * dtype_size(as), as, block, n);
        }
}

#endif
