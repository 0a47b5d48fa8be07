/*
What op set "cuda" has from libraries, taken from op set "cpu" (linked under the name ops_cpu_device): memory and matrix products.
*/
#ifndef TEST_CUDA_LIBRARY_ON_CPU_H
#define TEST_CUDA_LIBRARY_ON_CPU_H
#include "llmc/ops.h"

extern "C" const Ops *const ops_cpu_device;

// For CALL of testing.h
extern "C" void cuda_on_cpu_turn_order(void);
extern "C" void cuda_on_cpu_turn_order(void) { cuda_on_cpu::turn_order(); }

static void *memory_allocate(size_t bytes) { return ops_cpu_device->allocate(bytes); }
static void memory_release(void *memory, size_t bytes) { ops_cpu_device->release(memory, bytes); }
static size_t memory_peak(void) { return ops_cpu_device->memory_peak(); }
static size_t memory_available(void) { return ops_cpu_device->memory_available(); }
static void copy_in(void *device, const void *host, size_t bytes) { ops_cpu_device->copy_in(device, host, bytes); }
static void copy_out(void *host, const void *device, size_t bytes) { ops_cpu_device->copy_out(host, device, bytes); }
static void copy(void *out, const void *in, size_t bytes) { ops_cpu_device->copy(out, in, bytes); }
static void zero(void *out, size_t bytes) { ops_cpu_device->zero(out, bytes); }
static void finish(void) { ops_cpu_device->finish(); }

static void linear_forward(Stored *out, const Stored *x, const Stored *weight, const Stored *bias,
                           const Stored *residual, size_t n, size_t C, size_t OC) {
    ops_cpu_device->linear_forward(out, x, weight, bias, residual, n, C, OC);
}
static void linear_backward_input(Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C, size_t OC,
                                  int accumulate) {
    ops_cpu_device->linear_backward_input(dx, dout, weight, n, C, OC, accumulate);
}
static void linear_backward_weight(Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n,
                                   size_t C, size_t OC) {
    ops_cpu_device->linear_backward_weight(dweight, dbias, dout, x, n, C, OC);
}
#endif
