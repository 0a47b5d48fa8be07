/*
What the verb `doctor` tells of op set "cuda": driver, devices, libraries with their versions and files, and what to
install where one is missing.
*/
#ifndef LLMC_CUDA_FINDINGS_CUH
#define LLMC_CUDA_FINDINGS_CUH
#include "llmc/ops/findings.h"
#include "device.cuh"

static void find_driver(TellFinding tell) {
    int driver = 0, runtime = 0;
    char loaded[128] = "no kernel module";
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    if (file && fscanf(file, "NVRM version: %127[^\n]", loaded) != 1) *loaded = 0;
    cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
    if (!driver)
        tell("driver", FINDING_WRONG, "%s",
             file ? "libcuda.so.1 was not found, the kernel has the driver: start the container with --gpus all, and "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
                  : "there is none: install NVIDIA's (Ubuntu: ubuntu-drivers install --gpgpu)");
    else if (driver / 1000 < runtime / 1000)
        tell("driver", FINDING_WRONG,
             "%.60s: knows CUDA %d.%d, this program is of %d.%d; update the driver, or build with an older toolkit",
             loaded, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        tell("driver", FINDING_OK, "%.60s, CUDA %d.%d; this program: %d.%d", loaded, driver / 1000, driver % 1000 / 10,
             runtime / 1000, runtime % 1000 / 10);
    if (file) fclose(file);
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
        tell(name, full ? FINDING_NOTE : FINDING_OK, "%s, compute capability %d.%d, ECC %s, %s, of which %s free%s",
             card.name, card.major, card.minor, card.ECCEnabled ? "on" : "off", all, human_bytes((double)left),
             full ? ": nvidia-smi lists who holds the rest" : "");
    }
}

static void cuda_machine_findings(TellFinding tell) {
    find_driver(tell);
    find_devices(tell);
    find_host(tell);
}

#endif
