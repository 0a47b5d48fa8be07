/*
cuDNN's fused attention (cudnn_attention.h), by its graphs. The front end is NVIDIA's header library over cuDNN's C
interface. cuDNN (libcudnn.so.9) is loaded at run time, never linked. STREAMBP_CUDNN=0 in the environment turns it off.

A deterministic backward stores dS (heads x queries x keys x 2 bytes on most GPUs) and makes dq from it in a second
product, instead of adding to dq atomically. The cost, in NVIDIA's published figures for an H200, cuDNN 9.19: 560
TFLOP/s without it at 4096 x 4096, 404 with it, at another head size (cudnn-frontend,
benchmark/sdpa_benchmark_training/results, column deterministic_bwd).

Each length is compiled separately. cuDNN 9.19 accepts kernels for any length of causal forward (dynamic shapes and a
kernel cache). They give wrong results for all lengths but the first, seen on an H100 (dev/gpu_log.md). Shapes given
at execution (override shapes) need cuDNN 9.21.
*/
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cuda_runtime_api.h>
#include "cudnn_attention.h"
#include "library.h"

// Opens a library for the front end. Hides CUDA runtimes other than this build's, because the front end up to 1.23
// refuses a machine with two.
static void *front_end_open(const char *file) {
    char why[200];
    const char runtime[] = "libcudart.so.";
    if (!strncmp(file, runtime, strlen(runtime)) && strcmp(file, LIBRARY_CUDART.file)) return NULL;
    return library_file(file, why);
}
#define dlopen(file, flags) front_end_open(file)
#include <cudnn_frontend.h>
#include <map>

namespace fe = cudnn_frontend;
namespace graph = cudnn_frontend::graph;

void *cudnn_frontend::cudnn_dlhandle; // where the front end looks up cuDNN's functions

constexpr size_t OLDEST_CUDNN = 90700;

enum Uid : int64_t { Q = 1, K, V, OUT, LSE, DOUT, DQ, DK, DV };

struct ShapeLess {
    bool operator()(const CudnnAttention &a, const CudnnAttention &b) const { return memcmp(&a, &b, sizeof(a)) < 0; }
};
struct CudnnPlan {
    std::shared_ptr<graph::Graph> graph; // NULL if cuDNN has none
    size_t workspace;
};

static struct {
    int asked;
    cudnnHandle_t handle;                            // NULL without cuDNN
    std::shared_ptr<fe::DeviceProperties> imaginary; // a GPU that this machine lacks, for plans on that GPU
    int imaginary_version;
    std::map<CudnnAttention, CudnnPlan, ShapeLess> plans[2];
    size_t calls[2];
    std::string refusal;
} cudnn;

static bool refuse(const std::string &why) {
    cudnn.refusal = why.substr(0, why.find('\n')); // keeps the first line: the front end reports every engine
    return false;
}

static bool cudnn_load(void) {
    const char *wanted = getenv("STREAMBP_CUDNN");
    if (wanted && !strcmp(wanted, "0")) return refuse("STREAMBP_CUDNN=0 is set");
    char error[500];
    fe::cudnn_dlhandle = library_open(&LIBRARY_CUDNN, error);
    // The front end opens the runtime and cuDNN opens NVRTC, by name: they find the ones opened here.
    if (!fe::cudnn_dlhandle || !library_open(&LIBRARY_CUDART, error)) return refuse(error);
    (void)library_file("libnvrtc.so." CUDA_MAJOR, error);
    unsetenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"); // from cuDNN 9.25 on it makes deterministic backward slower
    return true;
}

int cudnn_attention_start(void) {
    if (cudnn.asked++) return cudnn.handle || cudnn.imaginary;
    if (!cudnn_load()) return 0;
    try { // the front end throws if a library lacks a function
        const size_t version = fe::detail::get_backend_version();
        if (version < OLDEST_CUDNN)
            return refuse("cuDNN " + std::to_string(version) + " is older than " + std::to_string(OLDEST_CUDNN));
        if (cudnn.imaginary || fe::detail::create_handle(&cudnn.handle) == CUDNN_STATUS_SUCCESS) return 1;
        refuse("cuDNN does not start on this device");
    } catch (const std::exception &error) {
        refuse(error.what());
    }
    cudnn.handle = NULL;
    return 0;
}

const char *cudnn_attention_library(void) {
    static char name[32];
    if (!cudnn_attention_start()) return NULL;
    const size_t version = fe::detail::get_backend_version(); // 91900
    snprintf(name, sizeof(name), "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return name;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------
typedef std::shared_ptr<graph::Tensor_attributes> TensorPointer;

// Sets [heads][rows][HD], rows `stride` elements apart.
static void set_rows(TensorPointer tensor, int64_t uid, size_t heads, size_t rows, size_t HD, size_t stride) {
    const int64_t h = (int64_t)heads, r = (int64_t)rows, d = (int64_t)HD, s = (int64_t)stride;
    tensor->set_uid(uid).set_dim({1, h, r, d}).set_stride({r * s, d, s, 1});
}

// Describes slices of larger tensors, of queries or of keys.
static void set_queries(TensorPointer tensor, int64_t uid, const CudnnAttention &s) {
    set_rows(tensor, uid, s.heads, s.queries, s.HD, s.NH * s.HD);
}
static TensorPointer tensor_of(graph::Graph &g, const char *name, int64_t uid, const CudnnAttention &s, bool keys) {
    TensorPointer tensor = g.tensor(graph::Tensor_attributes().set_name(name));
    if (keys)
        set_rows(tensor, uid, s.key_heads, s.keys, s.HD, s.NKV * s.HD);
    else
        set_queries(tensor, uid, s);
    return tensor;
}

static void set_lse(TensorPointer tensor, const CudnnAttention &s) {
    const int64_t h = (int64_t)s.heads, r = (int64_t)s.queries;
    tensor->set_uid(LSE).set_dim({1, h, r, 1}).set_stride({h * r, r, 1, 1}).set_data_type(fe::DataType_t::FLOAT);
}

// Sets the mask: causal, bottom-right aligned. With as many keys as queries top-left is the same mask, and more GPUs
// support it.
template <typename Options> static void set_mask(Options &options, const CudnnAttention &s) {
    options.set_attn_scale((float)s.scale);
    if (s.causal)
        options
            .set_diagonal_alignment(s.queries == s.keys ? fe::DiagonalAlignment_t::TOP_LEFT
                                                        : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
            .set_diagonal_band_right_bound(0);
    if (s.window) options.set_diagonal_band_left_bound((int)s.window); // the bound counts the query's own key
}

static void describe_forward(graph::Graph &g, const CudnnAttention &s, TensorPointer q, TensorPointer k,
                             TensorPointer v) {
    auto options = graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    set_mask(options, s);
    auto [out, lse] = g.sdpa(q, k, v, options);
    out->set_output(true);
    set_queries(out, OUT, s);
    lse->set_output(true);
    set_lse(lse, s);
}

static void describe_backward(graph::Graph &g, const CudnnAttention &s, TensorPointer q, TensorPointer k,
                              TensorPointer v) {
    auto options = graph::SDPA_backward_attributes().set_name("attention").set_deterministic_algorithm(!s.any_order);
    TensorPointer out = tensor_of(g, "out", OUT, s, false), dout = tensor_of(g, "dout", DOUT, s, false),
                  lse = g.tensor(graph::Tensor_attributes().set_name("lse"));
    set_lse(lse, s);
    set_mask(options, s);
    auto [dq, dk, dv] = g.sdpa_backward(q, k, v, out, dout, lse, options);
    dq->set_output(true), dk->set_output(true), dv->set_output(true);
    set_rows(dq, DQ, s.heads, s.queries, s.HD, s.heads * s.HD);
    set_rows(dk, DK, s.key_heads, s.keys, s.HD, s.key_heads * s.HD);
    set_rows(dv, DV, s.key_heads, s.keys, s.HD, s.key_heads * s.HD);
}

static CudnnPlan make_plan(const CudnnAttention &s, int backward) {
    CudnnPlan plan = {std::make_shared<graph::Graph>(), 0};
    graph::Graph &g = *plan.graph;
    int64_t workspace = 0;
    try {
        g.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        if (cudnn.imaginary) g.set_device_properties(cudnn.imaginary).set_sm_version(cudnn.imaginary_version);
        TensorPointer q = tensor_of(g, "q", Q, s, false), k = tensor_of(g, "k", K, s, true),
                      v = tensor_of(g, "v", V, s, true);
        if (backward)
            describe_backward(g, s, q, k, v);
        else
            describe_forward(g, s, q, k, v);
        fe::error_t error = cudnn.imaginary ? g.build({fe::HeurMode_t::A}) : g.build(cudnn.handle, {fe::HeurMode_t::A});
        if (error.is_good()) error = g.get_workspace_size(workspace);
        if (error.is_good()) return plan.workspace = (size_t)workspace, plan;
        refuse(error.get_message());
    } catch (const std::exception &error) { // for example a library that could not be loaded
        refuse(error.what());
    }
    plan.graph = NULL;
    return plan;
}

// Plans are never dropped: kernels may still run, and attention_calls.h asks for few lengths.
static CudnnPlan &plan_of(const CudnnAttention &shape, int backward) {
    auto &plans = cudnn.plans[backward];
    auto found = plans.find(shape);
    if (found == plans.end()) found = plans.emplace(shape, make_plan(shape, backward)).first;
    return found->second;
}

// ---- what op set "cuda" calls ---------------------------------------------------------------------------------------
int cudnn_attention_has(const CudnnAttention *shape, int backward, size_t workspace) {
    if (!cudnn_attention_start()) return 0;
    const CudnnPlan &plan = plan_of(*shape, backward);
    if (!plan.graph) return 0;
    return plan.workspace <= workspace || refuse("cuDNN wants " + std::to_string(plan.workspace) +
                                                 " bytes of workspace, " + std::to_string(workspace) + " are planned");
}

const char *cudnn_attention_refusal(void) { return cudnn.refusal.c_str(); }

size_t cudnn_attention_calls(int backward) { return cudnn.calls[backward]; }

static void execute(const CudnnAttention *shape, int backward, std::unordered_map<int64_t, void *> tensors,
                    void *workspace) {
    std::string failure;
    try {
        fe::error_t error = plan_of(*shape, backward).graph->execute(cudnn.handle, tensors, workspace);
        if (error.is_bad()) failure = error.get_message();
    } catch (const std::exception &error) {
        failure = error.what();
    }
    if (!failure.empty())
        die("%s:%d: attention %s of %zu queries and %zu keys: cuDNN: %s; STREAMBP_CUDNN=0 does without it", __FILE__,
            __LINE__, backward ? "backward" : "forward", shape->queries, shape->keys, failure.c_str());
    cudnn.calls[backward]++;
}

void cudnn_attention_forward(const CudnnAttention *shape, void *out, float *lse, const void *q, const void *k,
                             const void *v, void *workspace) {
    execute(shape, 0, {{Q, (void *)q}, {K, (void *)k}, {V, (void *)v}, {OUT, out}, {LSE, lse}}, workspace);
}

void cudnn_attention_backward(const CudnnAttention *shape, void *dq, void *dk, void *dv, const void *dout,
                              const void *out, const void *q, const void *k, const void *v, const float *lse,
                              void *workspace) {
    if (shape->queries % 128 || shape->keys % 128)
        die("%s:%d: attention backward of %zu queries and %zu keys: not multiples of 128; please report it", __FILE__,
            __LINE__, shape->queries, shape->keys);
    execute(shape, 1,
            {{Q, (void *)q},
             {K, (void *)k},
             {V, (void *)v},
             {OUT, (void *)out},
             {LSE, (void *)lse},
             {DOUT, (void *)dout},
             {DQ, dq},
             {DK, dk},
             {DV, dv}},
            workspace);
}
