/*
The device of this process: whether it can be used, and advice on CUDA's errors. It is opened at first use, because
plans and conversions need no device.
*/
#ifndef LLMC_CUDA_DEVICE_CUH
#define LLMC_CUDA_DEVICE_CUH
#include "llmc/ops/ops.h"
#include "llmc/base/utils.h"
#include "llmc/ranks/dist.h"
#include <cuda_runtime.h>

// Hooks of a run with several ranks, in which the device may wait forever (collective.cuh): before the host waits for
// the default stream (all: for all streams); instead of waiting for an event of the default stream; after every launch.
static void (*before_waiting)(bool all);
static void (*before_event)(cudaEvent_t event);
static void (*after_launch)(void);

static cudaStream_t launch_stream; // stream of kernels and copies on the device: the default stream, or graph.cuh's

static struct {
    int ready, number, count;   // number: index among the `count` devices that this process sees
    size_t in_use_before, peak; // bytes of the device that all processes use
} device;

// ---- errors ---------------------------------------------------------------------------------------------------------
// Errors and advice; other errors get XID_ADVICE
static const struct {
    cudaError_t error;
    const char *advice;
} cuda_advice[] = {
    {cudaErrorMemoryAllocation, "free what other processes hold (nvidia-smi lists them), or lower --memory-limit"},
    {cudaErrorDevicesUnavailable,
     "another process has exclusive use of the GPU, or its compute mode forbids sharing: see nvidia-smi"},
    {cudaErrorSystemNotReady, "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager"},
    {cudaErrorSystemDriverMismatch, "libcuda.so.1 does not belong to the loaded driver: reboot after an update"},
    {cudaErrorCompatNotSupportedOnDevice, "take cuda-compat out of LD_LIBRARY_PATH, or update the driver"},
    {cudaErrorStubLibrary, "take the toolkit's folder of stubs out of LD_LIBRARY_PATH"},
    {cudaErrorOperatingSystem, "check the permissions of /dev/nvidia*, and try `modprobe nvidia_uvm`"},
    {cudaErrorInitializationError, "check nvidia-smi and the permissions of /dev/nvidia*"},
    {cudaErrorMpsConnectionFailed, "restart MPS, or end it: nvidia-cuda-mps-control"},
    {cudaErrorMpsServerNotReady, "restart MPS, or end it: nvidia-cuda-mps-control"},
    {cudaErrorIllegalAddress, "CUDA_LAUNCH_BLOCKING=1 shows in which op, for a report"},
    {cudaErrorMisalignedAddress, "CUDA_LAUNCH_BLOCKING=1 shows in which op, for a report"},
    {cudaErrorIllegalInstruction, "CUDA_LAUNCH_BLOCKING=1 shows in which op, for a report"},
};
#define XID_ADVICE "see `dmesg | grep Xid`, then start again (training: --resume)"

static const char *advice_on(cudaError_t error) {
    for (const auto &row : cuda_advice)
        if (row.error == error) return row.advice;
    return XID_ADVICE;
}

static const char *file_name(const char *path) { return strrchr(path, '/') ? strrchr(path, '/') + 1 : path; }

// Ends the program if a CUDA call failed. doing: what the call was for
static void cuda_check(cudaError_t error, const char *file, int line, const char *doing) {
    if (error != cudaSuccess)
        die("%s:%d: %s: %s (%s); %s", file_name(file), line, doing, cudaGetErrorString(error), cudaGetErrorName(error),
            advice_on(error));
}
#define CUDA_CHECK(call, doing) cuda_check(call, __FILE__, __LINE__, doing)

// ---- finding the device ---------------------------------------------------------------------------------------------
// Does nothing. It loads only if this GPU can run our kernels, which are all compiled for the same architectures.
// Static, because dev/cuda/bench.cu includes this file together with the op set.
static __global__ void any_kernel(void) {}

static size_t device_in_use(void) {
    size_t left, total;
    CUDA_CHECK(cudaMemGetInfo(&left, &total), "asking how much memory the device has left");
    return total - left;
}

// Takes the GPU of this local rank. *doing: what failed
static cudaError_t device_take(const char **doing) {
    cudaError_t error;
    cudaFuncAttributes attributes;
    size_t left, total;
    *doing = "counting them";
    if ((error = cudaGetDeviceCount(&device.count)) != cudaSuccess) return error;
    if (!device.count) return cudaErrorNoDevice;
    device.number = (int)(dist_local_rank() % (size_t)device.count);
    *doing = "making a context on one";
    if ((error = cudaSetDevice(device.number)) != cudaSuccess || (error = cudaFree(NULL)) != cudaSuccess) return error;
    *doing = "loading a kernel";
    if ((error = cudaFuncGetAttributes(&attributes, (const void *)any_kernel)) != cudaSuccess) return error;
    *doing = "asking for its memory";
    if ((error = cudaMemGetInfo(&left, &total)) != cudaSuccess) return error;
    device.in_use_before = device.peak = total - left;
    device.ready = 1;
    return cudaSuccess;
}

// Returns NULL if this process has its device, else a sentence that says why not, and what to do.
static const char *cuda_device_problem(void) {
    static char text[320];
    const char *doing, *visible = getenv("CUDA_VISIBLE_DEVICES");
    int driver = 0, major = 0, minor = 0;
    const cudaError_t error = device.ready ? cudaSuccess : device_take(&doing);
    if (error == cudaSuccess) return NULL;
    cudaDriverGetVersion(&driver); // leaves 0 if there is no driver
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.number);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.number);
    if (!driver) return "no GPU was found (no NVIDIA driver); --device cpu computes on the CPU, plan needs no GPU";
    if (error == cudaErrorNoDevice && visible)
        snprintf(text, sizeof(text), "no GPU was found: CUDA_VISIBLE_DEVICES=%.40s shows none; unset it", visible);
    else if (error == cudaErrorNoDevice)
        return "no GPU was found; nvidia-smi should list it, and a container needs --gpus all";
    else if (error == cudaErrorInsufficientDriver)
        snprintf(text, sizeof(text),
                 "the GPU's driver supports CUDA %d.%d, this program was built with %d.%d: update the driver, or build "
                 "with an older toolkit",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    else if (major && major < 8)
        snprintf(text, sizeof(text),
                 "this GPU's architecture is %d.%d; op set cuda needs 8.0 or later (A100, RTX 30 and after)", major,
                 minor);
    else if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
             error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidKernelImage)
        snprintf(text, sizeof(text),
                 "this program was not built for this GPU's architecture, %d.%d: build it with `make BACKEND=cuda "
                 "ARCHS=%d%d`",
                 major, minor, major, minor);
    else
        snprintf(text, sizeof(text), "no GPU, %s: %s (%s); %s", doing, cudaGetErrorString(error),
                 cudaGetErrorName(error), advice_on(error));
    return text;
}

static void device_require(void) {
    const char *problem = cuda_device_problem();
    if (problem) die("%s", problem);
}

// ---- kernels --------------------------------------------------------------------------------------------------------
// All kernels that a LAUNCH names, listed before main
static struct {
    const void *list[1024];
    size_t count;
} kernels;

// Loads all kernels. CUDA would load them at first launch, where they would wait for collectives in flight. Returns the
// bytes of local memory that CUDA takes for the kernel that needs the most.
static size_t kernels_load(void) {
    static size_t most, loaded; // most: bytes per thread
    int threads, multiprocessors;
    for (; loaded < kernels.count; loaded++) {
        cudaFuncAttributes attributes;
        CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernels.list[loaded]), "loading a kernel");
        most = max_size(most, attributes.localSizeBytes);
    }
    CUDA_CHECK(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerMultiProcessor, device.number),
               "asking how many threads it runs");
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.number),
               "asking how many threads it runs");
    return most * (size_t)threads * (size_t)multiprocessors;
}

#endif
