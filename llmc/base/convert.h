/*
Conversion between element types, on the host and for files: every pair of types but into fp16, which is read only. Each
value is rounded to nearest, ties to even. What ops do to tensors in device memory is not here (ops.h).
*/
#ifndef LLMC_CONVERT_H
#define LLMC_CONVERT_H
#include "dtype.h"
#include "utils.h"

static void elements_to_float(float *out, const void *in, DType type, size_t count) {
    switch (type) {
    case DTYPE_FP32: memcpy(out, in, count * sizeof(float)); break;
    case DTYPE_BF16:
        for (size_t i = 0; i < count; i++) out[i] = bf16_to_float(((const uint16_t *)in)[i]);
        break;
    case DTYPE_FP16:
        for (size_t i = 0; i < count; i++) out[i] = fp16_to_float(((const uint16_t *)in)[i]);
        break;
    default:
        for (size_t i = 0; i < count; i++) out[i] = (float)((const double *)in)[i];
    }
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
    default: die("weights cannot be converted to %s", dtype_name(type)); // fp16 is read, never made
    }
}

// Every conversion passes through fp32, which holds all of fp16 and bf16.
static void elements_convert(void *out, DType as, const void *in, DType type, size_t count) {
    float block[1024];
    size_t n;
    if (as == type) {
        memcpy(out, in, count * dtype_size(type));
        return;
    }
    for (size_t done = 0; done < count; done += n) {
        n = min_size(count - done, sizeof(block) / sizeof(block[0]));
        elements_to_float(block, (const char *)in + done * dtype_size(type), type, n);
        elements_from_float((char *)out + done * dtype_size(as), as, block, n);
    }
}

#endif
