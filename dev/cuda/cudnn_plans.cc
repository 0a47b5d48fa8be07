/*
make dev-cudnn-plans: asks cuDNN for the plans that llmc/ops/attention_calls.h will want, for GPUs that are not here,
and holds their workspace against what is planned for. It shows that the graphs are ones that this cuDNN takes, and what
a new length costs; it runs none of them. cuDNN >= 9.11 makes plans from a description of a device, and
libcuda_stand_in.c is enough of a driver.
*/
#include "llmc/ops/attention_calls.h"
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
    cudnn.plans[0].clear(), cudnn.plans[1].clear();
    fe::error_t error = cudnn.imaginary->deserialize(data);
    if (error.is_bad()) die("cuDNN does not take the description of a device: %s", error.get_message().c_str());
}

enum { FORWARD_WORKSPACE = 64 << 10 };
static size_t failures, most_used; // of a plan's workspace, in thousandths of what is planned

static size_t planned_for(const CudnnAttention &s, int backward) {
    return backward ? attention_workspace(s.queries, s.keys, s.heads, s.HD, s.any_order) : (size_t)FORWARD_WORKSPACE;
}

// Thousandths that the plan uses of what is planned; SIZE_MAX where there is no plan. Adds to *seconds.
static size_t ask(const CudnnAttention &shape, int backward, double *seconds) {
    const double begin = seconds_now();
    (void)cudnn_attention_has(&shape, backward, SIZE_MAX);
    *seconds += seconds_now() - begin;
    const CudnnPlan &plan = plan_of(shape, backward);
    if (!plan.graph) return SIZE_MAX;
    const size_t used = 1000 * plan.workspace / planned_for(shape, backward);
    failures += used > 1000, most_used = max_size(most_used, used);
    return used;
}

// Returns the seconds of the plan; below 0: there is none.
static double column(const CudnnAttention &shape, int backward) {
    double seconds = 0;
    const size_t used = ask(shape, backward, &seconds);
    if (used == SIZE_MAX)
        printf("  %8s", "-");
    else
        printf("  %6.1f%%%s", (double)used / 10, used > 1000 ? "!" : " ");
    fflush(stdout);
    return used == SIZE_MAX ? -1 : seconds;
}

// Checks that plans know which heads cuDNN takes. found: of a causal call, forward and backward
static void compare_heads(int architecture, size_t HD, const double found[2]) {
    const int planned = cudnn_directions(architecture, HD);
    for (int backward = 0; backward < 2; backward++) {
        const int has = found[backward] >= 0, plans = (planned & (backward ? LIBRARY_BACKWARD : LIBRARY_FORWARD)) != 0;
        if (has == plans) continue;
        printf("  sm %d, head_dim %zu, %s: cuDNN has %s plan; cudnn_heads of attention_calls.h says otherwise\n",
               architecture, HD, backward ? "backward" : "forward", has ? "a" : "no");
        failures++;
    }
}

// Totals over the calls of a chunk's attention
typedef struct {
    const AttentionCut *cut;
    int backward;
    size_t plans, without;
    double seconds;
} Asked;

static void ask_call(void *to, const AttentionCall *call) {
    Asked *a = (Asked *)to;
    const AttentionCut *c = a->cut;
    const size_t plans = cudnn.plans[a->backward].size();
    const CudnnAttention shape = {call->rows,
                                  call->keys.end - call->keys.begin,
                                  call->heads * (c->NH / c->NKV),
                                  call->heads,
                                  c->NH,
                                  c->NKV,
                                  c->HD,
                                  call->causal ? call->window : 0,
                                  0.1,
                                  call->causal,
                                  a->backward && c->any_order};
    if (!call->rows) return;
    a->without += ask(shape, a->backward, &a->seconds) == SIZE_MAX, a->plans += cudnn.plans[a->backward].size() - plans;
}

static void ask_chunk(int backward, size_t HD, size_t window, AttentionChoice choice) {
    const Span span = {100, 126976, 126976 + 4000, 0}; // every kind of piece and block
    const AttentionShape shape = {{&span, 1, window, 0}, 32, 8, HD, 0.1, all_keys, 0, 0, {0, 0}};
    const AttentionCut cut = attention_cut_of(&shape, choice);
    Asked asked = {&cut, backward, 0, 0, 0};
    most_used = 0;
    if (backward)
        attention_backward_calls(&cut, &shape, 0, 4096, ask_call, &asked);
    else
        attention_forward_calls(&cut, &shape, ask_call, &asked);
    printf(
        "  %s, head_dim %3zu, window %4zu, %s, %5.0f MiB: %2zu plans, %zu refused, workspace up to %.1f%% of what is "
        "planned, %.2f s each\n",
        backward ? "backward" : "forward", HD, window, choice.any_order ? "any order" : "one order",
        (double)cut.workspace / 1048576, asked.plans, asked.without, (double)most_used / 10,
        asked.seconds / (double)max_size(asked.plans, 1));
    fflush(stdout);
}

int main(void) {
    static const Device devices[] = {{80, "NVIDIA A100-SXM4-80GB", 166912, 108},
                                     {86, "NVIDIA GeForce RTX 3090", 101376, 82},
                                     {89, "NVIDIA GeForce RTX 4090", 101376, 128},
                                     {90, "NVIDIA H200", 232448, 132},
                                     {100, "NVIDIA B200", 232448, 148},
                                     {120, "NVIDIA GeForce RTX 5090", 101376, 170}};
    static const size_t sizes[] = {64, 80, 96, 128, 192, 256, 512};
    cudnn.imaginary = std::make_shared<fe::DeviceProperties>();
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "0", 1);
    if (!cudnn_attention_start()) die("%s", cudnn_attention_refusal());
    if (getenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT")) die("the front end's limit of workspace is still set");
    printf(
        "cuDNN %zu: workspace of its plans, of what is planned for; - where it has none. Nothing was run.\n"
        "forward: causal 4096x8192, then 512x768; window 4096; full 4096x8192. backward: causal 4096, window "
        "4096, 512x256, and 4096x32768 in any order\n  sm  head_dim    causal      next    window      full    causal  "
        "  window   512x256    any  s: causal forward, next, full forward, backward\n",
        fe::detail::get_backend_version());
    for (const Device &device : devices)
        for (size_t HD : sizes) {
            imagine(&device);
            printf("%4d  %8zu", device.version, HD);
            const double first = column({4096, 8192, 32, 8, 32, 8, HD, 0, 0.1, 1, 0}, 0);
            const double next = column({512, 768, 32, 8, 32, 8, HD, 0, 0.1, 1, 0}, 0);
            column({4096, 8192, 32, 8, 32, 8, HD, 4096, 0.1, 1, 0}, 0);
            const double full = column({4096, 8192, 32, 8, 32, 8, HD, 0, 0.1, 0, 0}, 0);
            const double back = column({4096, 4096, 8, 2, 32, 8, HD, 0, 0.1, 1, 0}, 1);
            column({4096, 8064, 4, 1, 32, 8, HD, 4096, 0.1, 1, 0}, 1);
            column({512, 256, 32, 8, 32, 8, HD, 0, 0.1, 0, 0}, 1);
            column({4096, 32768, 32, 8, 32, 8, HD, 0, 0.1, 0, 1}, 1);
            printf("  %.2f %.2f %.2f %.2f%s%s\n", first, next, full, fmax(back, 0), cudnn.refusal.empty() ? "" : "  ",
                   cudnn.refusal.substr(0, 90).c_str());
            cudnn.refusal.clear();
            const double found[2] = {first, back};
            compare_heads(device.version, HD, found);
        }
    printf("every call of a chunk, sm 90:\n");
    imagine(&devices[3]);
    const AttentionChoice choices[] = {{0, 0}, {0, (size_t)5 << 30}, {1, (size_t)3 << 30}};
    for (size_t HD : {64, 128, 256}) ask_chunk(0, HD, 0, choices[0]), ask_chunk(0, HD, 1024, choices[0]);
    for (const AttentionChoice &choice : choices) ask_chunk(1, 128, 0, choice), ask_chunk(1, 128, 1024, choice);
    ask_chunk(1, 64, 0, choices[0]);
    if (failures) die("%zu plans differ from what is planned for", failures);
    return 0;
}
