/*
Decoding steps of op set "cuda" as CUDA graphs. A step of a small model launches about 500 kernels that take a few
microseconds each. If they are launched one by one, the device waits for the host. The first time a part of a step
(GraphKey) is launched as usual, which also loads kernels and chooses products. The second time its launches are
recorded. From then on they are launched as one graph. Kernels read the spans of a recorded part from device memory, so
their arguments do not change from step to step.

Recording needs a stream other than the default stream; graphs are launched on the default stream. If recording fails,
the kernels are launched as usual. STREAMBP_GRAPHS=0 records nothing.
*/
#ifndef LLMC_CUDA_GRAPH_CUH
#define LLMC_CUDA_GRAPH_CUH
#include "platform.cuh"

constexpr size_t KEPT_GRAPHS = 32; // if there are more, the oldest is dropped

struct KeptGraph {
    GraphKey key;
    cudaGraphExec_t graph; // NULL: not yet recorded
    bool refused;          // it cannot be recorded
};

static struct {
    KeptGraph kept[KEPT_GRAPHS];
    size_t used, oldest;
    cudaStream_t stream;  // stream that records
    KeptGraph *recording; // NULL: kernels are launched as usual
} graphs;

static void graph_drop(KeptGraph *kept) {
    if (kept->graph) cudaGraphExecDestroy(kept->graph);
    memset(kept, 0, sizeof(*kept));
}

static void cuda_graphs_forget(void) {
    while (graphs.used) graph_drop(&graphs.kept[--graphs.used]);
}

// Returns the kept part with this key. *known: the part has been launched before
static KeptGraph *graph_of(const GraphKey *key, bool *known) {
    *known = true;
    for (size_t i = 0; i < graphs.used; i++)
        if (!memcmp(&graphs.kept[i].key, key, sizeof(*key))) return &graphs.kept[i];
    KeptGraph *kept = &graphs.kept[graphs.used < KEPT_GRAPHS ? graphs.used++ : graphs.oldest++ % KEPT_GRAPHS];
    graph_drop(kept);
    kept->key = *key;
    *known = false;
    return kept;
}

static void graph_refuse(KeptGraph *kept) {
    static bool told;
    const cudaError_t error = cudaGetLastError(); // hides the handled error from the next check
    kept->refused = true;
    if (error != cudaSuccess && !told)
        note("decoding launches its kernels one by one: they could not be recorded as a CUDA graph (%s)",
             cudaGetErrorString(error));
    told |= error != cudaSuccess;
}

static int cuda_graph_begin(const GraphKey *key) {
    const char *wanted = getenv("STREAMBP_GRAPHS");
    bool known;
    if (wanted && !strcmp(wanted, "0")) return 1;
    KeptGraph *const kept = graph_of(key, &known);
    if (!known || kept->refused) return 1;
    if (kept->graph && cudaGraphLaunch(kept->graph, NULL) == cudaSuccess) return 0;
    if (kept->graph ||
        (!graphs.stream && cudaStreamCreateWithFlags(&graphs.stream, cudaStreamNonBlocking) != cudaSuccess) ||
        cudaStreamBeginCapture(graphs.stream, cudaStreamCaptureModeRelaxed) != cudaSuccess)
        graph_refuse(kept);
    else
        graphs.recording = kept, launch_stream = graphs.stream;
    return 1;
}

static int cuda_graph_end(void) {
    KeptGraph *const kept = graphs.recording;
    cudaGraph_t recorded = NULL;
    if (!kept) return 0;
    graphs.recording = NULL, launch_stream = NULL;
    if (cudaStreamEndCapture(graphs.stream, &recorded) == cudaSuccess && !kept->refused &&
        cudaGraphInstantiateWithFlags(&kept->graph, recorded, 0) != cudaSuccess)
        kept->graph = NULL;
    if (recorded) cudaGraphDestroy(recorded);
    if (!kept->graph || cudaGraphLaunch(kept->graph, NULL) != cudaSuccess) graph_refuse(kept);
    return kept->refused;
}

// Returns the copies in device memory of spans from `from` on if a part is being recorded, else NULL. Refuses to record
// spans that are not the part's, or are longer, because they would become arguments.
static const Span *graph_spans(Spans spans, size_t from) {
    KeptGraph *const kept = graphs.recording;
    if (!kept) return NULL;
    bool same = spans.span == kept->key.span && spans.count == kept->key.n;
    for (size_t i = 0; same && i < spans.count; i++) same = spans.span[i].end - spans.span[i].begin == 1;
    kept->refused |= !same;
    return same ? kept->key.copied + from : NULL;
}

#endif
