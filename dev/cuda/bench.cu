/*
Every op of the linked op set at the shapes of Qwen3-8B, as `stream` calls them for chunks of 4096 tokens of a stream of 32768 (the
last chunk, which sees all keys) and logits chunks of 512. One object of JSON on stdout, the same as a table on stderr: median
milliseconds with cold caches, the rate, and its share of a copy's rate or of cuBLASLt's best square product, measured in the same
run. Bytes are those that an op cannot do without: every input read once, every output written once; a sum that is added to is
read and written. dev/bench_gpu.sh runs it.

    bench [REPEATS]

Built with -DCUDA_ON_CPU all rows run once at small shapes, against any op set: their arguments are tested, nothing is timed.
*/
#include "playground.cuh"
#include "llmc/json_out.h"
#ifndef CUDA_ON_CPU
#include "product.cuh"
#endif

// Chunk, stream, logits chunk; then the model's, in design vocabulary; then the elements of a layer's matrices
#ifdef CUDA_ON_CPU
constexpr size_t n = 32, T = 96, m = 8, C = 64, NH = 4, NKV = 2, HD = 16, FF = 96, V = 320;
#else
constexpr size_t n = 4096, T = 32768, m = 512, C = 4096, NH = 32, NKV = 8, HD = 128, FF = 12288, V = 151936;
#endif
constexpr size_t LAYER = 2 * C * NH * HD + 2 * C * NKV * HD + 3 * C * FF;
constexpr double STORED = sizeof(floatX), SUMMED = sizeof(float);
constexpr double PAIRS = (double)n * (double)(T - n) + 0.5 * (double)n * (double)(n + 1);

struct Tensors {
    Tensor<floatX> x, y, z, weight;     // [n, 2 FF] each, also a logits chunk; a matrix of [V, C], also a layer's
    Tensor<float> sums;                 // [V, C], positive; also what AdamW keeps of a layer
    Tensor<floatX> q, out, dout, dq;    // [n, NH, HD]
    Tensor<floatX> k, v;                // [T, NKV, HD]
    Tensor<float> dk, dv, lse, scratch; // [T, NKV, HD], [n, NH]
    Tensor<int32_t> tokens, position;   // [T], as frequent as words
    Tensor<float> frequency, weights;   // [HD / 2] of RoPE; [n] of the loss
    Span span = {0, T - n, T};
    Spans spans() const { return Spans{&span, 1, PAIRS}; }
    Tensors();
};

constexpr size_t WIDE = n * 2 * FF > m *V ? n * 2 * FF : m *V, MATRIX = V * C > 3 * LAYER ? V *C : 3 * LAYER;
static_assert(T * C <= MATRIX, "embedding_backward takes its dx from there");

static size_t scratch_of_all(void) {
    return std::max({ops_device->embedding_backward_scratch(T, V, C), ops_device->norm_backward_scratch(n, C),
                     ops_device->norm_backward_scratch(n * NH, HD), ops_device->attention_scratch(n, NH, NKV, HD)});
}

Tensors::Tensors()
    : x(WIDE, random_values(1)), y(WIDE, random_values(2)), z(WIDE, random_values(3)),
      weight(MATRIX, random_values(4, 0.02)), sums(MATRIX, [](size_t i) { return random_uniform(5, 0, i); }),
      q(n * NH * HD, random_values(6)), out(n * NH * HD, constant(0)), dout(n * NH * HD, random_values(7)),
      dq(n * NH * HD, constant(0)), k(T * NKV * HD, random_values(8)), v(T * NKV * HD, random_values(9)),
      dk(T * NKV * HD, constant(0)), dv(T * NKV * HD, constant(0)), lse(n * NH, constant(0)),
      scratch(scratch_of_all(), constant(0)),
      tokens(T, [](size_t t) { return exp(random_uniform(10, 0, t) * log((double)V)) - 1; }),
      position(T, [](size_t t) { return (double)t; }),
      frequency(HD / 2, [](size_t i) { return pow(1e6, -2.0 * (double)i / (double)HD); }),
      weights(n, random_values(11)) {}

// ---- the figures -----------------------------------------------------------------------------------------------------------------
struct Figure {
    const char *op, *of;   // of: which of the model's tensors
    size_t rows, in, wide; // shape, as far as an op has it: rows, columns in, columns out
    Work unit;
    double work; // bytes or FLOPs
    void (*run)(const Tensors &, const Figure &);
    void (*before)(const Tensors &); // each timed run; NULL: nothing
};

#define RUN [](const Tensors &t, const Figure &f)
#define OPS ((void)f, ops_device)

static const AdamW step = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 10, 1};

static void put_logits_back(const Tensors &t) { ops_device->copy(t.x.data, t.y.data, m * V * sizeof(floatX)); }

static const Figure figures[] = {{"copy", "layer inputs", n, C, 0, BYTES, 2.0 * n *C *STORED,
                                  RUN{OPS->copy(t.x.data, t.y.data, f.rows *f.in * sizeof(floatX));
}
, NULL
}
, {"zero", "a layer's sums", 1, LAYER, 0, BYTES, LAYER *SUMMED, RUN{OPS->zero(t.sums.data, f.in * sizeof(float));
}
, NULL
}
, {"embedding_forward", "", n, C, 0, BYTES, 2.0 * n *C *STORED,
   RUN{OPS->embedding_forward(t.x.stored(), t.tokens.data, t.position.data, t.weight.stored(), NULL, f.rows, f.in);
}
, NULL
}
, {"rmsnorm_forward", "hidden", n, C, 0, BYTES, 2.0 * n *C *STORED,
   RUN{OPS->rmsnorm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), f.rows, f.in, 1e-6);
}
, NULL
}
, {"rmsnorm_forward", "query heads", n *NH, HD, 0, BYTES, 2.0 * n *NH *HD *STORED,
   RUN{OPS->rmsnorm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), f.rows, f.in, 1e-6);
}
, NULL
}
, {"rmsnorm_backward", "hidden", n, C, 0, BYTES, 3.0 * n *C *STORED,
   RUN{OPS->rmsnorm_backward(t.x.stored(), t.sums.summed(), t.y.stored(), t.z.stored(), t.weight.stored(), f.rows, f.in,
                             1e-6, 0, t.scratch.summed());
}
, NULL
}
, {"rmsnorm_backward", "hidden, accumulating", n, C, 0, BYTES, 4.0 * n *C *STORED,
   RUN{OPS->rmsnorm_backward(t.x.stored(), t.sums.summed(), t.y.stored(), t.z.stored(), t.weight.stored(), f.rows, f.in,
                             1e-6, 1, t.scratch.summed());
}
, NULL
}
, {"rmsnorm_backward", "query heads", n *NH, HD, 0, BYTES, 3.0 * n *NH *HD *STORED,
   RUN{OPS->rmsnorm_backward(t.x.stored(), t.sums.summed(), t.y.stored(), t.z.stored(), t.weight.stored(), f.rows, f.in,
                             1e-6, 0, t.scratch.summed());
}
, NULL
}
, {"layernorm_forward", "hidden", n, C, 0, BYTES, 2.0 * n *C *STORED,
   RUN{OPS->layernorm_forward(t.x.stored(), t.y.stored(), t.weight.stored(), t.z.stored(), f.rows, f.in, 1e-5);
}
, NULL
}
, {"layernorm_backward", "hidden", n, C, 0, BYTES, 3.0 * n *C *STORED,
   RUN{OPS->layernorm_backward(t.x.stored(), t.sums.summed(), (Summed *)(t.sums.data + f.in), t.y.stored(),
                               t.z.stored(), t.weight.stored(), f.rows, f.in, 1e-5, 0, t.scratch.summed());
}
, NULL
}
, {"rope_forward", "queries", n, NH *HD, 0, BYTES, 2.0 * n *NH *HD *STORED,
   RUN{OPS->rope_forward(t.q.stored(), t.position.data, t.frequency.data, f.rows, NH, HD);
}
, NULL
}
, {"rope_backward", "queries", n, NH *HD, 0, BYTES, 2.0 * n *NH *HD *STORED,
   RUN{OPS->rope_backward(t.q.stored(), t.position.data, t.frequency.data, f.rows, NH, HD);
}
, NULL
}
, {"attention_forward", "the last chunk", n, NH *HD, 0, FLOPS, 4.0 * NH *HD *PAIRS,
   RUN{OPS->attention_forward(t.out.stored(), t.lse.summed(), t.q.stored(), t.k.stored(), t.v.stored(), t.spans(), NH,
                              NKV, HD, 1 / sqrt((double)HD), t.scratch.summed());
}
, NULL
}
, {"attention_backward", "the last chunk", n, NH *HD, 0, FLOPS, 10.0 * NH *HD *PAIRS,
   RUN{OPS->attention_backward(t.dq.stored(), t.dk.summed(), t.dv.summed(), t.dout.stored(), t.out.stored(),
                               t.q.stored(), t.k.stored(), t.v.stored(), t.lse.summed(), t.spans(), NH, NKV, HD,
                               1 / sqrt((double)HD), t.scratch.summed());
}
, NULL
}
, {"swiglu_forward", "", n, FF, 0, BYTES, 3.0 * n *FF *STORED,
   RUN{OPS->swiglu_forward(t.y.stored(), t.x.stored(), f.rows, f.in);
}
, NULL
}
, {"swiglu_backward", "", n, FF, 0, BYTES, 5.0 * n *FF *STORED,
   RUN{OPS->swiglu_backward(t.z.stored(), t.y.stored(), t.x.stored(), f.rows, f.in);
}
, NULL
}
, {"gelu_forward", "", n, FF, 0, BYTES, 2.0 * n *FF *STORED,
   RUN{OPS->gelu_forward(t.y.stored(), t.x.stored(), f.rows *f.in);
}
, NULL
}
, {"gelu_backward", "", n, FF, 0, BYTES, 3.0 * n *FF *STORED,
   RUN{OPS->gelu_backward(t.z.stored(), t.y.stored(), t.x.stored(), f.rows *f.in);
}
, NULL
}
, {"logprob", "with its gradient", m, V, 0, BYTES, 2.0 * m *V *STORED,
   RUN{OPS->logprob(t.lse.summed(), t.x.stored(), t.tokens.data, t.weights.summed(), f.rows, f.in, 1.0);
}
, put_logits_back
}
, {"logprob", "alone", m, V, 0, BYTES, 1.0 * m *V *STORED,
   RUN{OPS->logprob(t.lse.summed(), t.x.stored(), t.tokens.data, NULL, f.rows, f.in, 1.0);
}
, put_logits_back
}
, {"round_sums", "a layer", 1, LAYER, 0, BYTES, LAYER *(SUMMED + STORED),
   RUN{OPS->round_sums(t.weight.stored(), t.sums.summed(), f.in);
}
, NULL
}
, {"gradient_add", "a layer", 1, LAYER, 0, BYTES, LAYER *(SUMMED + 2 * STORED),
   RUN{OPS->gradient_add(t.weight.data, FLOATX_DTYPE, t.sums.summed(), f.in);
}
, NULL
}
, {"sum_of_squares", "a layer; the host waits", 1, LAYER, 0, BYTES, LAYER *STORED,
   RUN{OPS->sum_of_squares(t.weight.data, FLOATX_DTYPE, f.in);
}
, NULL
}
, {"adamw", "a layer, fp32 master", 1, LAYER, 0, BYTES, LAYER *(6 * SUMMED + 2 * STORED),
   RUN{OPS->adamw(t.weight.stored(), t.sums.data, t.weight.data + f.in, FLOATX_DTYPE, t.sums.data + f.in,
                  t.sums.data + 2 * f.in, DTYPE_FP32, f.in, &step);
}
, NULL
}
,
    // the last: what it adds to sums may be negative, which AdamW's second moments never are
    {"embedding_backward", "the stream, into fp32", T, C, 0, BYTES, (double)T *C *STORED,
     RUN{OPS->embedding_backward(t.sums.data, DTYPE_FP32, t.weight.stored(), t.tokens.data, f.rows, V, f.in,
                                 t.scratch.summed());
}
, NULL
}
,
}
;

// Linear layers: [rows, in] x weight[wide, in]^T and its two gradients
static const struct {
    const char *of;
    size_t rows, in, wide;
} linears[] = {{"query", n, C, NH *HD},  {"key, value", n, C, NKV *HD},
               {"output", n, NH *HD, C}, {"gate and up", n, C, 2 * FF},
               {"down", n, FF, C},       {"head", m, C, V}};

static const struct {
    const char *op;
    void (*run)(const Tensors &, const Figure &);
} directions[] = {{"linear_forward", RUN{OPS->linear_forward(t.x.stored(), t.y.stored(), t.weight.stored(), NULL, NULL,
                                                             f.rows, f.in, f.wide);
}
}
, {"linear_backward_input",
   RUN{OPS->linear_backward_input(t.x.stored(), t.y.stored(), t.weight.stored(), f.rows, f.in, f.wide, 0);
}
}
, {"linear_backward_weight",
   RUN{OPS->linear_backward_weight(t.sums.summed(), NULL, t.x.stored(), t.y.stored(), f.rows, f.in, f.wide);
}
}
,
}
;

// ---- timing and output -------------------------------------------------------------------------------------------------------------
static double seconds_of(const Tensors &t, const Figure &f) {
    const auto run = [&] { f.run(t, f); };
#ifdef CUDA_ON_CPU
    if (f.before) f.before(t);
    run();
    return NAN;
#else
    std::vector<double> seconds(playground.repeats);
    for (size_t repeat = 0; repeat <= playground.repeats; repeat++) {
        if (f.before) f.before(t);
        const double s = cold_seconds(run);
        if (repeat) seconds[repeat - 1] = s; // kernels are loaded, products chosen in the first
    }
    return median(seconds);
#endif
}

static void report(JsonOut *json, const Tensors &t, const Figure &f) {
    const double seconds = seconds_of(t, f), rate = f.work / seconds,
                 share = rate / (f.unit == BYTES ? playground.copy_rate : playground.product_rate);
    fprintf(stderr, "%-24s %-24s %10.3f ms %9.1f %-7s %6.1f %% of %s\n", f.op, f.of, seconds * 1e3,
            rate * (f.unit == BYTES ? 1e-9 : 1e-12), f.unit == BYTES ? "GB/s" : "TFLOP/s", 100 * share,
            f.unit == BYTES ? "copy" : "product");
    json_object(json, NULL);
    json_text(json, "op", f.op);
    json_text(json, "of", f.of);
    json_size(json, "rows", f.rows);
    json_size(json, "in", f.in);
    if (f.wide) json_size(json, "out", f.wide);
    json_number(json, "ms", seconds * 1e3);
    json_number(json, f.unit == BYTES ? "gb_per_s" : "tflop_per_s", rate * (f.unit == BYTES ? 1e-9 : 1e-12));
    json_number(json, f.unit == BYTES ? "share_of_copy" : "share_of_product", share);
    json_object_end(json);
}

static void report_machine(JsonOut *json) {
    json_text(json, "dtype", dtype_name(FLOATX_DTYPE));
    json_size(json, "repeats", playground.repeats);
#ifndef CUDA_ON_CPU
    const cudaDeviceProp properties = device_properties();
    int runtime, driver;
    char text[32];
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime), "asking for CUDA's version");
    CUDA_CHECK(cudaDriverGetVersion(&driver), "asking for the driver's version");
    json_text(json, "device", properties.name);
    snprintf(text, sizeof(text), "%d.%d", properties.major, properties.minor);
    json_text(json, "compute_capability", text);
    snprintf(text, sizeof(text), "%d.%d", runtime / 1000, runtime % 1000 / 10);
    json_text(json, "cuda", text);
    snprintf(text, sizeof(text), "%d.%d", driver / 1000, driver % 1000 / 10);
    json_text(json, "cuda_of_driver", text);
    json_size(json, "cublaslt", cublasLtGetVersion());
    json_size(json, "memory_bytes", properties.totalGlobalMem);
#endif
    json_number(json, "copy_gb_per_s", playground.copy_rate * 1e-9);
    json_number(json, "product_tflop_per_s", playground.product_rate * 1e-12);
}

int main(int argc, char **argv) {
    size_t repeats = 21;
    JsonOut json = json_open(stdout);
    if (argc > 2 || (argc > 1 && (!parse_size(argv[1], &repeats) || !repeats || repeats > 1000)))
        die_usage("usage: %s [REPEATS], 1 to 1000 [21]", argv[0]);
#ifndef CUDA_ON_CPU
    playground_clock(repeats);
    cublas_require();
    playground.product_rate = best_square_product();
#endif
    json_object(&json, NULL);
    report_machine(&json);
    fprintf(stderr, "copy %.1f GB/s, best square product %.1f TFLOP/s, medians of %zu runs with cold caches\n",
            playground.copy_rate * 1e-9, playground.product_rate * 1e-12, repeats);
    {
        const Tensors t;
        json_array(&json, "ops");
        for (const Figure &f : figures) report(&json, t, f);
        for (const auto &l : linears)
            for (const auto &d : directions) {
                const double flops = 2.0 * (double)l.rows * (double)l.in * (double)l.wide;
                report(&json, t, Figure{d.op, l.of, l.rows, l.in, l.wide, FLOPS, flops, d.run, NULL});
            }
        json_array_end(&json);
    }
    json_object_end(&json);
    json_finish(&json);
    return 0;
}
