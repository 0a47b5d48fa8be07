/*
make dev-cudnn-plans: asks cuDNN for the plans that llmc/ops/cuda/attention_cudnn.cuh will want, for GPUs that are not
here, and holds their workspace against what is planned for. It shows that the graphs are ones that this cuDNN takes,
and what a new length costs; it runs none of them. cuDNN >= 9.11 makes plans from a description of a device, and
libcuda_stand_in.c is enough of a driver.
*/
#include "llmc/ops/cuda/cudnn_attention.cc"

typedef struct {
    int version;
    const char *name;
    int shared, processors;
} Device;

static void imagine(const Device *device) {
    char json[1000];
    snprintf(
        json, sizeof(json),
        "{\"version\":1,\"cudaDeviceId\":0,\"deviceVer\":%d,\"driverVer\":13000,\"maxGridSize\":[2147483647,65535,"
        "65535],"
        "\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"multiProcessorCount\":%d,\"warpSize\":32,"
        "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":1024,"
        "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,"
        "\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"smClockRateKHz\":1500000,"
        "\"memClockRateKHz\":2000000,\"l2CacheSize\":41943040,\"totalGlobalMem\":85899345920,\"deviceName\":\"%s\"}",
        device->version * 10, device->processors, device->shared, device->name);
    const std::vector<uint8_t> data(json, json + strlen(json) + 1);
    cudnn.imaginary = std::make_shared<fe::DeviceProperties>();
    cudnn.imaginary_version = device->version;
    cudnn.plans[0].clear(), cudnn.plans[1].clear(), cudnn.kernels.clear();
    fe::error_t error = cudnn.imaginary->deserialize(data);
    if (error.is_bad()) die("cuDNN does not take the description of a device: %s", error.get_message().c_str());
}

static int failures;

// Prints what is asked for of what is planned, or - where there is no plan; returns seconds.
static double ask(const CudnnAttention &shape, int backward, size_t planned) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    const int has = cudnn_attention_has(&shape, backward, planned);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const CudnnPlan &plan = plan_of(shape, backward);
    if (!plan.graph)
        printf("  %10s", "-");
    else if (has)
        printf("  %9.2f%%", 100.0 * (double)plan.workspace / (double)planned);
    else
        printf("  %6.2f%% !!!", 100.0 * (double)plan.workspace / (double)planned), failures++;
    fflush(stdout);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}

int main(void) {
    static const Device devices[] = {{80, "NVIDIA A100-SXM4-80GB", 166912, 108},
                                     {86, "NVIDIA GeForce RTX 3090", 101376, 82},
                                     {89, "NVIDIA GeForce RTX 4090", 101376, 128},
                                     {90, "NVIDIA H100 80GB HBM3", 232448, 132},
                                     {100, "NVIDIA B200", 232448, 148},
                                     {120, "NVIDIA GeForce RTX 5090", 101376, 170}};
    static const size_t sizes[] = {64, 80, 96, 128, 256};
    cudnn.imaginary = std::make_shared<fe::DeviceProperties>();
    if (!cudnn_attention_start()) die("%s", cudnn_attention_refusal());
    printf("cuDNN %zu: workspace of its plans, of what is planned for; - where it has none. Nothing was run.\n",
           fe::detail::get_backend_version());
    printf("  sm  head_dim  fwd 4096x8192  fwd 1000x8191  bwd square 4096  bwd square 512  bwd 4096x2048  s: first "
           "fwd, next fwd, bwd\n");
    for (const Device &device : devices)
        for (size_t HD : sizes) {
            const float scale = 0.1f;
            imagine(&device);
            printf("%4d  %8zu", device.version, HD);
            const double first = ask({4096, 8192, 32, 8, 32, 8, HD, scale, 1}, 0, 64 << 10);
            const double next = ask({1000, 8191, 32, 8, 32, 8, HD, scale, 1}, 0, 64 << 10);
            const double back =
                ask({4096, 4096, 8, 2, 32, 8, HD, scale, 1}, 1, cudnn_attention_workspace(4096, 4096, 8, HD));
            ask({512, 512, 8, 2, 32, 8, HD, scale, 1}, 1, cudnn_attention_workspace(512, 512, 8, HD));
            ask({4096, 2048, 8, 2, 32, 8, HD, scale, 0}, 1, cudnn_attention_workspace(4096, 2048, 8, HD));
            printf("  %.2f %.2f %.2f%s%s\n", first, next, back, cudnn.refusal.empty() ? "" : "  ",
                   cudnn.refusal.substr(0, 90).c_str());
            cudnn.refusal.clear();
        }
    if (failures) die("%d plans want more than what is planned for", failures);
    return 0;
}
