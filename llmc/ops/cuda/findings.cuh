/*
Finds what the verb `doctor` reports on op set "cuda": driver, devices, libraries with their versions and files, and
what to install if one is missing.
*/
#ifndef LLMC_CUDA_FINDINGS_CUH
#define LLMC_CUDA_FINDINGS_CUH
#include "llmc/ops/findings.h"
#include "device.cuh"
#include "library.h"
#ifdef HAVE_CUDNN
#include "cudnn_attention.h"
#endif

// Returns whether there is a driver that fits; without one there is no device.
static bool find_driver(TellFinding tell) {
    const int runtime = CUDART_VERSION;
    int driver = 0;
    char loaded[128] = "no kernel module";
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    if (file && fscanf(file, "NVRM version: %127[^\n]", loaded) != 1) *loaded = 0;
    cudaDriverGetVersion(&driver);
    if (!driver)
        tell("driver", FINDING_WRONG, "%s",
             file ? "libcuda.so.1 was not found, the kernel has the driver: start the container with --gpus all, and "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                  : "not installed: install NVIDIA's (Ubuntu: ubuntu-drivers install --gpgpu)");
    else if (driver / 1000 < runtime / 1000)
        tell("driver", FINDING_WRONG,
             "%.60s: supports CUDA %d.%d, this program needs %d.%d; update the driver, or build with an older toolkit",
             loaded, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        tell("driver", FINDING_OK, "%.60s, CUDA %d.%d; this program: %d.%d", loaded, driver / 1000, driver % 1000 / 10,
             runtime / 1000, runtime % 1000 / 10);
    if (file) fclose(file);
    return driver / 1000 >= runtime / 1000;
}

static void find_devices(TellFinding tell) {
    const char *problem = cuda_device_problem();
    if (problem) {
        tell("device", FINDING_WRONG, "%s", problem);
        return;
    }
    for (int i = 0; i < device.count; i++) {
        cudaDeviceProp card;
        char name[32], all[32];
        size_t left = 0, total = 0;
        if (cudaGetDeviceProperties(&card, i) != cudaSuccess) continue;
        snprintf(name, sizeof(name), "device %d%s", i, i == device.number ? ", used" : "");
        snprintf(all, sizeof(all), "%s", human_bytes((double)card.totalGlobalMem));
        if (i != device.number) {
            tell(name, FINDING_OK, "%s, %d.%d, %s", card.name, card.major, card.minor, all);
            continue;
        }
        cudaMemGetInfo(&left, &total);
        const bool full = left < total / 10 * 9;
        tell(name, full ? FINDING_NOTE : FINDING_OK, "%s, compute capability %d.%d, ECC %s, %s, %s free%s", card.name,
             card.major, card.minor, card.ECCEnabled ? "on" : "off", all, human_bytes((double)left),
             full ? ": nvidia-smi lists who holds the rest" : "");
    }
}

// Opens a library as a run does. version: name of its function that returns major * 10000 + minor * 100 + patch
static void find_library(TellFinding tell, const Library *which, const char *version, Finding missing) {
    char error[500];
    Dl_info file = {};
    void *library = library_open(which, error), *function = library ? dlsym(library, version) : NULL;
    size_t number = 0;
    if (!library) {
        tell(which->name, missing, "%s", error);
        return;
    }
    if (function && which == &LIBRARY_NCCL) {
        int of_nccl = 0;
        ((int (*)(int *))function)(&of_nccl), number = (size_t)of_nccl;
    } else if (function) {
        number = ((size_t(*)(void))function)();
    }
    if (number && dladdr(function, &file) && file.dli_fname)
        tell(which->name, FINDING_OK, "%zu.%zu.%zu, %s", number / 10000, number / 100 % 100, number % 100,
             file.dli_fname);
    else
        tell(which->name, missing, "%s has no %s, so it is another library: install %s (pip: %s)", which->file, version,
             which->package, which->wheel);
}

// Checks that the process has loaded each of CUDA's libraries once: two runtimes do not know each other's memory.
static void find_doubles(TellFinding tell) {
    static const char *const names[] = {"libcudart.so", "libcublasLt.so", "libcudnn.so", "libnccl.so"};
    char first[4][PATH_MAX] = {}, line[PATH_MAX + 128];
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof(line), file)) {
        const char *path = strchr(line, '/'), *name = path ? strrchr(path, '/') + 1 : NULL;
        for (size_t i = 0; i < 4 && name; i++) {
            if (strncmp(name, names[i], strlen(names[i])) != 0) continue;
            line[strcspn(line, "\n")] = 0;
            if (!*first[i]) {
                snprintf(first[i], sizeof(first[i]), "%s", path);
            } else if (strcmp(first[i], path) != 0) {
                tell("libraries", FINDING_WRONG,
                     "two are loaded, %s and %s: leave one in LD_LIBRARY_PATH and "
                     "STREAMBP_LIBRARIES",
                     first[i], path);
                fclose(file);
                return;
            }
        }
    }
    if (file) fclose(file);
}

static void find_attention(TellFinding tell) {
#ifdef HAVE_CUDNN
    const char *library = cudnn_attention_library();
    if (library)
        tell("attention", FINDING_OK, "by %s", library);
    else
        tell("attention", FINDING_NOTE, "by our own kernels, expected to take 3 to 4 times as long: %s",
             cudnn_attention_refusal());
#else
    tell("attention", FINDING_NOTE,
         "by our own kernels, expected to take 3 to 4 times as long: built without cuDNN's "
         "front end; give make CUDNN_FRONTEND=DIR (pip: nvidia-cudnn-frontend)");
#endif
}

static void find_wgmma(TellFinding tell) {
#ifdef PRECISION_BF16
    if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return;
    tell("kernels for Hopper", FINDING_OK, "%s",
         wgmma_on() ? "on, by STREAMBP_WGMMA" : "off; STREAMBP_WGMMA=1 turns them on");
#else
    (void)tell;
#endif
}

static void cuda_machine_findings(TellFinding tell) {
    if (find_driver(tell)) find_devices(tell);
    find_library(tell, &LIBRARY_CUBLASLT, "cublasLtGetVersion", FINDING_WRONG);
    find_library(tell, &LIBRARY_CUDNN, "cudnnGetVersion", FINDING_NOTE);
#ifdef HAVE_NCCL
    find_library(tell, &LIBRARY_NCCL, "ncclGetVersion", dist_ranks() > 1 ? FINDING_WRONG : FINDING_NOTE);
#endif
    if (device.ready) find_attention(tell), find_wgmma(tell);
    find_doubles(tell);
    find_host(tell);
}

#endif
