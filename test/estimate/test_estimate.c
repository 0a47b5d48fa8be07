/*
Estimates on paper: the time of a collective and of a step against numbers worked out by hand, on a machine with simple
constants; memory of a rank against the formula of each ZeRO stage; quantities that must grow or shrink; and a plan of
thousands of ranks at once.
*/
#include "test/base/testing.h"
#include "llmc/run/allocate.h"
#include "llmc/estimate/estimate.h"
#include <time.h>

#define FREE 1e30 // a rate that costs nothing

// Nodes of 4, links of 100 and 10 bytes a second, hops of 1 and 3 seconds; arithmetic at one rate.
static Machine round_machine(double flops, double bandwidth, double within, double between) {
    Machine m = {0};
    for (int i = PRODUCT_FLOPS; i <= DELTA_FLOPS; i++) m.value[i] = flops;
    m.value[GPUS_PER_NODE] = 4, m.value[PEAK_FLOPS] = 2 * flops;
    m.value[MEMORY_BANDWIDTH] = bandwidth, m.value[LINK_WITHIN] = within, m.value[LINK_BETWEEN] = between;
    m.value[LINK_HOST] = m.value[DISK_WRITE] = m.value[DISK_READ] = FREE;
    m.value[MEMORY_SHARE] = m.value[LINK_SHARE] = 1;
    m.name = "round", m.gpu = "round numbers";
    return m;
}

static void close_to(const char *what, double found, double wanted, double tolerance) {
    if (!(fabs(found - wanted) <= tolerance * fabs(wanted))) test_fail("%s: %.12g, not %.12g", what, found, wanted);
}

TEST(a_ring_by_hand) {
    Machine m = round_machine(1, 1, 100, 10);
    m.value[HOP_WITHIN] = 1, m.value[HOP_BETWEEN] = 3;
    assert_true(ring_seconds(&m, 4, 1, 200, 0) == 0);
    assert_true(ring_seconds(&m, 4, 4, 200, 3) == 2 + 3);                  // in a node
    assert_true(ring_seconds(&m, 3, 3, 200, 2) == 2 + 2);                  // also if it is not full
    close_to("2 nodes", ring_seconds(&m, 8, 8, 200, 7), 5 + 6 + 3, 1e-12); // 4 links; 6 hops within, one between
    close_to("pairs", ring_seconds(&m, 8, 2, 200, 1), 2 + 1, 1e-12);       // never across nodes
    close_to("sixes", ring_seconds(&m, 12, 6, 200, 5), 10 + 3 + 6, 1e-12); // 2 together, 3 places: 2 hops between
    close_to("fives", ring_seconds(&m, 10, 5, 200, 4), 20 + 12, 1e-12);    // no neighbour is certain
    m.value[LINK_SHARE] = 0.5;
    assert_true(ring_seconds(&m, 4, 4, 200, 3) == 4 + 3);
    m.value[LINK_BETWEEN] = 1000; // never faster than within
    close_to("2 nodes, fast", ring_seconds(&m, 8, 8, 200, 0), 4, 1e-12);
}

TEST(work_by_hand) {
    Machine m = round_machine(10, 100, FREE, FREE);
    OpCounts work = {.flops = 120, .attention_forward = 10, .attention_backward = 4, .delta = 6};
    work.operands = 100, work.moved = 50;
    m.value[ATTENTION_FORWARD_FLOPS] = 5, m.value[ATTENTION_BACKWARD_FLOPS] = 2;
    m.value[DELTA_FLOPS] = 2, m.value[MEMORY_SHARE] = 0.5;
    close_to("by arithmetic", work_seconds(&m, work), 10 + 2 + 2 + 3 + 1, 1e-12);
    work.stalled = 20;
    close_to("products that wait", work_seconds(&m, work), 12 + 2 + 2 + 3 + 1, 1e-12);
    work.operands = 1000;
    close_to("by operands", work_seconds(&m, work), 20 + 2 + 2 + 3 + 1, 1e-12);
    close_to("products", work_time(&m, work).products, 20, 1e-12);
    close_to("attention forward", work_time(&m, work).attention_forward, 2, 1e-12);
    close_to("attention backward", work_time(&m, work).attention_backward, 2, 1e-12);
    close_to("delta rule", work_time(&m, work).delta, 3, 1e-12);
    close_to("memory", work_time(&m, work).memory, 1, 1e-12);
    // a part of attention by our own kernels, a part of backward in any order; gaps between 7 kernels
    m.value[OWN_FORWARD_FLOPS] = 2.5, m.value[OWN_BACKWARD_FLOPS] = 0.5, m.value[ATTENTION_ANY_ORDER_FLOPS] = 4;
    m.value[LAUNCH_GAP] = 3;
    work.own_forward = 5, work.own_backward = 1, work.any_order = 2, work.launches = 7;
    close_to("forward, half of it ours", work_time(&m, work).attention_forward, 1 + 2, 1e-12);
    close_to("backward, three ways", work_time(&m, work).attention_backward, 0.5 + 2 + 0.5, 1e-12);
    close_to("gaps", work_time(&m, work).gaps, 21, 1e-12);
    close_to("all", work_seconds(&m, work), 20 + 3 + 3 + 3 + 1 + 21, 1e-12);
    // of the library's FLOPs 5 forward and 2 in any order, masked 4 and 1
    m.value[MASKED_FORWARD_FLOPS] = 2, m.value[MASKED_ANY_ORDER_FLOPS] = 1;
    work.masked_forward = 4, work.masked_any_order = 1;
    close_to("forward, mostly masked", work_time(&m, work).attention_forward, 0.2 + 2 + 2, 1e-12);
    close_to("backward, half masked", work_time(&m, work).attention_backward, 0.5 + 0.25 + 1 + 2, 1e-12);
}

// ---- a small model with countable numbers --------------------------------------------------------------------------
#define SMALL                                                                                                          \
    "llama,hidden_size=64,intermediate_size=96,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,vocab_" \
    "size=160,head_dim=16"
#define SMALL_N 256

#define MOE                                                                                                            \
    "qwen3_moe,hidden_size=64,intermediate_size=96,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1,"   \
    "head_dim=64,vocab_size=160,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=32"

typedef struct {
    Model model;
    RunSettings settings;
    Batch batch;
    size_t start[2];
} Planned;

static void planned(Planned *c, const char *init, size_t N, size_t ranks, size_t zero, size_t sp) {
    Config config = config_from_text(init, "test", EXIT_USAGE);
    memset(c, 0, sizeof(*c));
    c->model = model_build(&config, DTYPE_BF16);
    c->settings.model = &c->model;
    c->settings.chunk = c->settings.logits_chunk = 4096;
    c->settings.backward = c->settings.optimizer = c->settings.master = 1;
    c->settings.gradient_type = DTYPE_BF16;
    c->settings.world.ranks = ranks, c->settings.world.rank = ranks - 1;
    c->settings.world.zero = zero, c->settings.world.sp = sp;
    c->start[1] = N;
    c->batch.N = N, c->batch.documents = 1, c->batch.document_start = c->start;
}

static void planned_end(Planned *c) { model_free(&c->model); }

// Returns the FLOPs of the small model for SMALL_N tokens, forward alone or all. A layer's products run once forward,
// once recomputed (but for the last), twice backward. Attention: 4, 4 and 10 per query, key and head element.
static double small_flops(int backward) {
    const double C = 64, FF = 96, V = 160, L = 3, KV = 32, N = SMALL_N, pairs = N * (N + 1) / 2;
    const double down = C * FF, others = 2 * C * C + 2 * C * KV + 2 * C * FF, attention = 4 * C * pairs;
    if (!backward) return 2 * N * (L * (others + down) + V * C) + L * attention;
    return 2 * N * (L * (4 * others + 3 * down) + 3 * V * C) + L * 4.5 * attention;
}

// Elements of its matrices, and of a token's input and output rows of products
static const double small_matrices = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 160 * 64;
static const double small_rows = 3 * (2 * 64 + 2 * (64 + 32) + 2 * 64 + (64 + 2 * 96) + (96 + 64)) + 64 + 160;
static const StepShape one_sequence = {1, SMALL_N, 1000, 3000};

TEST(bytes_of_a_forward_by_hand) {
    const double C = 64, FF = 96, V = 160, L = 3, KV = 32, N = SMALL_N;
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    c.settings.backward = c.settings.optimizer = 0;
    Plan plan = plan_make(&c.settings, &c.batch);
    close_to("operands", plan.counts.operands, 2 * (N * small_rows + small_matrices), 1e-12);
    // embedding, two norms, rotation of queries and keys, the gate; the last norm, and logits once
    close_to("moved", plan.counts.moved, 2 * N * (2 * C + L * (4 * C + 2 * (C + KV) + 3 * FF) + 2 * C + V), 1e-12);
    close_to("FLOPs", plan.counts.flops, small_flops(0), 1e-12);
}

TEST(a_step_by_hand) {
    const double rate = 1e6;
    Machine m = round_machine(rate, FREE, FREE, FREE);
    StepShape step = one_sequence;
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    Estimate e = estimate_step(&m, &c.settings, &c.batch, step);
    close_to("seconds", e.seconds, small_flops(1) / rate, 1e-12);
    close_to("tokens/s", e.tokens_per_second, SMALL_N / e.seconds, 1e-12);
    close_to("MFU", e.mfu, 1000 / (2 * rate * e.seconds), 1e-12);
    close_to("MFU of all pairs", e.mfu_full, 3 * e.mfu, 1e-12);
    close_to("executed", e.executed, rate, 1e-12);
    assert_true(fabs(e.communication) <= 1e-12 * e.seconds);
    step.sequences = 3;
    close_to("attention", e.work.attention_forward + e.work.attention_backward, 3 * 4.5 * 4 * 64 * 256 * 257 / 2 / rate,
             1e-12);
    close_to("all", e.work.products + e.work.attention_forward + e.work.attention_backward + e.work.memory, e.seconds,
             1e-9);
    close_to("three streams", estimate_step(&m, &c.settings, &c.batch, step).seconds, 3 * small_flops(1) / rate, 1e-12);
    // the gradient twice; moments and master weights in and out; weights out
    close_to("the optimizer", update_bytes(&c.settings), (2 * 2 + 4 * 4 + 2 * 4 + 2) * (double)c.model.elements, 1e-12);
    c.settings.moment_type = DTYPE_INT8;
    close_to("the optimizer in 8 bits", update_bytes(&c.settings),
             (2 * 2 + 4 * (1 + 4 / 256.0) + 2 * 4 + 2) * (double)c.model.elements, 1e-12);
}

// With slow memory each product takes as long as its operands: smaller chunks load and store dW more often.
TEST(products_that_wait_for_operands) {
    const double bandwidth = 10, C = 64, FF = 96, V = 160, L = 3, N = SMALL_N;
    const double rows = small_rows, matrices = small_matrices;
    const double down = C * FF, rows_of_down = FF + C, chunks = 4;
    // forward, recomputed but for the last product and K, V twice, and twice backward, in bf16; dW in fp32, in and out
    Machine m = round_machine(FREE, bandwidth, FREE, FREE);
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    c.settings.chunk = c.settings.logits_chunk = (size_t)(N / chunks);
    c.settings.ridge = machine_ridge(&m);
    Plan plan = plan_make(&c.settings, &c.batch);
    close_to("operands", plan.counts.operands,
             2 * N * (3 * rows + (rows - C - V) - L * rows_of_down) +
                 chunks * (2 * (2 * matrices + (matrices - V * C) - L * down) + 8 * matrices),
             1e-12);
    close_to("FLOPs that they could do",
             plan.counts.stalled + plan.counts.flops - plan.counts.attention_forward - plan.counts.attention_backward,
             plan.counts.operands * FREE / bandwidth, 1e-9);
}

// Returns the seconds of a step of the small model on two ranks with a slow link (a byte a second), all else free.
static double sending(int ring, size_t zero, size_t sp, DType gradients, size_t sequences, double rate) {
    const Machine m = round_machine(rate, FREE, 1, 1);
    StepShape step = one_sequence;
    SCOPED(planned_end) Planned c;
    step.sequences = sequences;
    planned(&c, SMALL, SMALL_N, 2, zero, sp);
    c.settings.gradient_type = gradients, c.settings.ring = ring;
    return estimate_step(&m, &c.settings, &c.batch, step).seconds;
}

// With --keep attention its forward runs once; what is kept in host memory is stored and loaded once.
TEST(kept_attention_by_hand) {
    const double rate = 1e6, L = 3, C = 64, NH = 4, N = SMALL_N, again = L * 2 * C * N * (N + 1);
    const double kept = L * N * (C * 2 + NH * 4);
    Machine m = round_machine(rate, FREE, FREE, FREE);
    StepShape step = one_sequence;
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    c.settings.keep.level = LEVEL_ATTENTION;
    close_to("kept", estimate_step(&m, &c.settings, &c.batch, step).seconds, (small_flops(1) - again) / rate, 1e-12);
    c.settings.place[PLACED_KEPT] = PLACE_HOST;
    close_to("hidden", estimate_step(&m, &c.settings, &c.batch, step).seconds, (small_flops(1) - again) / rate, 1e-12);
    m.value[LINK_HOST] = 1e-3;
    close_to("slow", estimate_step(&m, &c.settings, &c.batch, step).seconds, 2 * kept / 1e-3, 1e-6);
    c.settings.chunk = 100;
    close_to("in chunks", estimate_step(&m, &c.settings, &c.batch, step).seconds, 2 * kept / 1e-3, 1e-6);
    // around a ring: keys and values once in either pass
    SCOPED(planned_end) Planned r;
    planned(&r, SMALL, SMALL_N, 2, 1, 2);
    r.settings.gradient_type = DTYPE_FP32, r.settings.ring = 1, r.settings.keep.level = LEVEL_ATTENTION;
    m = round_machine(FREE, FREE, 1, 1);
    close_to("a ring", estimate_step(&m, &r.settings, &r.batch, step).seconds,
             0.5 * ((double)r.model.elements * (4 + 2) + L * N * 2 * 32 * (2 * 2 + 2 * 4)), 1e-9);
}

// Layer inputs are stored once and loaded once; they cost time only beyond the pass's own.
TEST(transfers_by_hand) {
    const double rate = 1e6, L = 3, C = 64, N = SMALL_N, inputs = L * N * C * 2;
    Machine m = round_machine(rate, FREE, FREE, FREE);
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    c.settings.chunk = 100, c.settings.place[PLACED_INPUTS] = PLACE_HOST;
    Estimate e = estimate_step(&m, &c.settings, &c.batch, one_sequence);
    close_to("hidden", e.seconds, small_flops(1) / rate, 1e-12);
    m.value[LINK_HOST] = inputs / 1e6;
    close_to("a slow link", estimate_step(&m, &c.settings, &c.batch, one_sequence).seconds, 2e6, 1e-6);
    close_to("on the device", e.on_device, small_flops(1) / rate, 1e-12);
    c.settings.place[PLACED_INPUTS] = PLACE_DISK;
    m.value[LINK_HOST] = FREE, m.value[DISK_WRITE] = inputs / 3e6, m.value[DISK_READ] = inputs / 1e6;
    close_to("a slow disk", estimate_step(&m, &c.settings, &c.batch, one_sequence).seconds, 4e6, 1e-6);
    c.settings.world.ranks = 2, c.settings.world.rank = 1; // on one node
    close_to("shared", estimate_step(&m, &c.settings, &c.batch, one_sequence).seconds, 8e6, 1e-6);
    m.value[MEMORY_BANDWIDTH] = inputs / 1e9;
    c.settings.optimizer = 0;
    close_to("work for the device's memory",
             estimate_step(&m, &c.settings, &c.batch, one_sequence).seconds -
                 estimate_step(&m, &c.settings, &c.batch, one_sequence).on_device,
             2e9, 1e-6);
}

TEST(two_ranks_by_hand) {
    const double halves = 0.5, L = 3, KV = 32; // of two ranks, each sends half of the data
    SCOPED(planned_end) Planned c;
    planned(&c, SMALL, SMALL_N, 1, 0, 1);
    double all = (double)c.model.elements, layers = L * (double)elements_of_layer(&c.model, 0);
    double kv = L * SMALL_N * 2 * KV; // keys and values
    close_to("stage 0", sending(0, 0, 1, DTYPE_FP32, 1, FREE), halves * all * (4 + 4), 1e-9);
    close_to("stage 1", sending(0, 1, 1, DTYPE_FP32, 1, FREE), halves * all * (4 + 2), 1e-9);
    close_to("stage 1, once for three streams", sending(0, 1, 1, DTYPE_FP32, 3, FREE), halves * all * (4 + 2), 1e-9);
    close_to("stage 1, each of three streams", sending(0, 1, 1, DTYPE_BF16, 3, FREE), halves * all * (12 + 2), 1e-9);
    close_to("stage 2, each of three streams", sending(0, 2, 1, DTYPE_FP32, 3, FREE), halves * all * (12 + 2), 1e-9);
    close_to("stage 3", sending(0, 3, 1, DTYPE_FP32, 1, FREE), halves * (all * (4 + 2) + layers * 2), 1e-9);
    close_to("sp 2", sending(0, 1, 2, DTYPE_FP32, 1, FREE), halves * (all * (4 + 2) + kv * (2 * 2 + 4)), 1e-9);
    // around a ring: keys and values once forward, twice backward; their gradients once more, home
    close_to("a ring", sending(1, 1, 2, DTYPE_FP32, 1, FREE), halves * (all * (4 + 2) + kv * (3 * 2 + 2 * 4)), 1e-9);
    close_to("a ring, hidden", sending(1, 3, 2, DTYPE_FP32, 1, 1e-6), small_flops(1) / 2 / 1e-6, 1e-6);
    // Longer work hides the transfers that run beside it, and nothing else: 1e-6 FLOP/s
    close_to("hidden", sending(0, 3, 1, DTYPE_FP32, 1, 1e-6), small_flops(1) / 1e-6, 1e-12);
    close_to("not hidden: updated weights", sending(0, 1, 1, DTYPE_FP32, 1, 1) - small_flops(1), halves * all * 2,
             1e-6);
}

// ---- real models ---------------------------------------------------------------------------------------------------
static size_t region_bytes(const Plan *plan, const char *name) {
    for (size_t i = 0; i < plan->arena->regions_at_peak; i++)
        if (!strcmp(plan->arena->at_peak[i].name, name)) return plan->arena->at_peak[i].bytes;
    test_fail("no region is called '%s'", name);
    return 0;
}

TEST(memory_of_the_stages) {
    static const size_t ranks[] = {2, 8, 100, 4096};
    static const struct {
        const char *region;
        size_t bytes, stage; // per element; first stage that shards it
    } held[] = {{"weights", 2, 3},
                {"gradients", 4, 2},
                {"first moments", 4, 1},
                {"second moments", 4, 1},
                {"master weights", 4, 1}};
    for (size_t zero = 0; zero <= 3; zero++) {
        for (size_t p = 0; p < 4; p++) {
            SCOPED(planned_end) Planned c;
            test_case("stage %zu, %zu ranks", zero, ranks[p]);
            planned(&c, "qwen3-8b", 32768, ranks[p], zero, 1);
            c.settings.gradient_type = DTYPE_FP32;
            Plan plan = plan_make(&c.settings, &c.batch);
            for (size_t i = 0; i < 5; i++) {
                // each group is split into whole units; the last rank has the rest
                const size_t dealt = zero >= held[i].stage ? ranks[p] : 1, groups = 2 + 36;
                const double exact = (double)(c.model.elements * held[i].bytes) / (double)dealt;
                const double more = dealt > 1 ? (double)(groups * SHARD_ALIGNMENT * dealt * held[i].bytes) : 0;
                const double found = (double)region_bytes(&plan, held[i].region);
                if (!(found >= exact && found <= exact + more + ARENA_ALIGNMENT))
                    test_fail("%s: %.12g bytes, from %.12g to %.12g more", held[i].region, found, exact, more);
            }
        }
    }
}

static Estimate estimate_of(const char *init, size_t N, size_t ranks, size_t zero, size_t sp, MachineName machine,
                            size_t *bytes) {
    StepShape step = {1, (double)(N * (ranks / sp)), 0, 0};
    SCOPED(planned_end) Planned c;
    planned(&c, init, N, ranks, zero, sp);
    c.settings.logits_chunk = 2048;
    step.model_flops = (double)(ranks / sp) * model_flops(&c.model, NULL, &c.batch, 1);
    Estimate e = estimate_step(&machines[machine], &c.settings, &c.batch, step);
    if (bytes) *bytes = plan_make(&c.settings, &c.batch).total_bytes;
    return e;
}

// A sequence over all ranks: each has less of it, and sends more.
TEST(what_grows_and_what_shrinks) {
    size_t most = SIZE_MAX;
    double length = INFINITY, sent = -1, own = 0;
    for (size_t P = 1; P <= 4096; P *= 2) {
        size_t bytes;
        const Estimate e = estimate_of("qwen3-8b", 1 << 20, P, 3, P, MACHINE_H100, &bytes);
        const double computing = e.seconds - e.communication, gradients = e.sent.bytes[TRAFFIC_GRADIENTS];
        test_case("%zu ranks", P);
        if (own_share(&e.counts) > own) own = 1, length = INFINITY; // below 512 tokens our own kernels run
        if (!(bytes < most)) test_fail("%zu bytes, not below %zu", bytes, most);
        if (!(computing < length)) test_fail("computes for %g s, not less than %g", computing, length);
        if (!(gradients > sent)) test_fail("sends %g bytes, not more than %g", gradients, sent);
        if (!(e.mfu > 0 && e.mfu < 780.0 / 989 && e.communication >= 0)) test_fail("MFU %g", e.mfu);
        most = bytes, length = computing, sent = gradients;
    }
}

// From a separate calculation, for one H200 that recomputes attention's forward: products at 680 TFLOP/s, attention at
// 593 (its diagonal 523) and 422, other tensors and staged sums at 4.08 TB/s, kernels 6 us apart.
TEST(as_the_roofline) {
    static const size_t tokens[] = {32768, 131072, 500000};
    static const double percent[] = {39.8, 34.1, 31.2};
    for (size_t i = 0; i < 3; i++) {
        const double mfu = 100 * estimate_of("llama3.1-8b", tokens[i], 1, 0, 1, MACHINE_H200, NULL).mfu;
        printf("             %zu tokens: %.1f %% MFU\n", tokens[i], mfu);
        if (!(fabs(mfu - percent[i]) < 1)) test_fail("%zu tokens: %.1f %% MFU, not %g", tokens[i], mfu, percent[i]);
    }
}

// A pass of Qwen3-8B on an H200, estimated from counted calls and bytes: least MFU in %
TEST(figures_of_a_pass) {
    static const struct {
        size_t tokens;
        double mfu[4]; // deterministic, in any order; both again with attention kept
    } figures[] = {{32768, {40.5, 42.5, 44.5, 46.5}}, {131072, {35.4, 38, 41.4, 45}}};
    for (size_t i = 0; i < COUNT_OF(figures); i++) {
        for (int k = 0; k < 4; k++) {
            const size_t N = figures[i].tokens;
            SCOPED(planned_end) Planned c;
            planned(&c, "qwen3-8b", N, 1, 0, 1);
            c.settings.optimizer = c.settings.master = 0;
            c.settings.chunk = CUDA_CHUNK, c.settings.logits_chunk = CUDA_LOGITS_CHUNK,
            c.settings.keep.level = (KeepLevel)(k / 2);
            c.settings.attention.any_order = k % 2, c.settings.attention.workspace = (size_t)5 << 30;
            const StepShape step = {1, (double)N, model_flops(&c.model, NULL, &c.batch, 1), 0};
            const Estimate e = estimate_step(&machines[MACHINE_H200], &c.settings, &c.batch, step);
            printf("             %zu tokens, keep %d, any order %d: %.3g s, %.1f %% MFU, %.0f calls, %.3g GB staged\n",
                   N, k / 2, k % 2, e.seconds, 100 * e.mfu, e.counts.library_calls, 1e-9 * e.counts.staged);
            if (!(100 * e.mfu >= figures[i].mfu[k])) test_fail("%.1f %% MFU, not %g", 100 * e.mfu, figures[i].mfu[k]);
            if (e.counts.own_forward + e.counts.own_backward > 0) test_fail("pairs are left to our own kernels");
        }
    }
}

// STREAMBP_WGMMA gives an H100 the rates of simulated kernels, and takes backward with heads of 64 from cuDNN.
TEST(simulated_kernels_are_asked_for) {
    Config config = config_from_text("gpt-oss-20b", "test", EXIT_USAGE); // heads of 64, half of them with windows
    Model model = model_build(&config, DTYPE_BF16);
    config.sliding_window = 0, model.config = config;
    for (int on = 0; on < 2; on++) {
        Machine h100, a100;
        char wrong[64];
        if (on) setenv("STREAMBP_WGMMA", "1", 1);
        assert_true(machine_parse(&h100, "h100", wrong, sizeof(wrong)));
        assert_true(machine_parse(&a100, "a100", wrong, sizeof(wrong)));
        const Machine *found = machine_of_device("NVIDIA H100 80GB HBM3");
        assert_true(machine_simulated(&h100) == on && machine_simulated(found) == on && !machine_simulated(&a100));
        assert_int_equal(machine_attends(&h100, &model), LIBRARY_FORWARD + (on ? 0 : LIBRARY_BACKWARD));
        assert_int_equal(machine_attends(&a100, &model), LIBRARY_FORWARD + LIBRARY_BACKWARD);
        assert_string_equal(machine_basis(&h100, &config), on ? " by simulated kernels" : "");
    }
    unsetenv("STREAMBP_WGMMA");
    model_free(&model);
}

// Experts' products at twice the rate of others, but those for dW; attention backward with heads of 64 at four times.
TEST(simulated_kernels_by_hand) {
    const double rate = 1e6, N = SMALL_N, C = 64, I = 32, E = 4, k = 2, L = 3, NH = 2, HD = 64;
    Machine m = round_machine(rate, FREE, FREE, FREE);
    SCOPED(planned_end) Planned c;
    planned(&c, MOE, SMALL_N, 1, 0, 1);
    const Estimate before = estimate_step(&m, &c.settings, &c.batch, one_sequence);
    m.value[WGMMA_EXPERTS_FLOPS] = 2 * rate, m.value[WGMMA_BACKWARD_FLOPS] = 4 * rate;
    const Estimate e = estimate_step(&m, &c.settings, &c.batch, one_sequence);
    // forward 6 C I a row, gate and up again 4 C I, input 6 C I; half a tile of each expert is empty
    const double tiles = N * k + E * EXPERTS_TILE / 2;
    close_to("experts", before.work.products - e.work.products, L * 16 * C * I * tiles / (2 * rate), 1e-9);
    // one kernel writes activated rows: no pass over gates and ups, and forward none for the weights of routes
    const double stored = (double)dtype_size(c.model.dtype);
    close_to("moved", before.counts.moved - e.counts.moved, L * (5 + 3) * I * N * k * stored, 1e-12);
    close_to("launches", before.counts.launches - e.counts.launches, L * (2 + 1), 1e-12);
    const double pairs = N * (N + 1) / 2;
    close_to("backward", e.work.attention_backward, L * 10 * NH * HD * pairs / (4 * rate), 1e-12);
    close_to("forward", e.work.attention_forward, before.work.attention_forward, 1e-12);
}

// Attention of every preset on every machine is planned by what `make dev-cudnn-plans` printed (cuDNN 9.19): 1: cuDNN
// has plans forward, 3: and backward
TEST(attention_as_cudnn_has_plans) {
    static const size_t widths[] = {64, 80, 96, 128, 256};
    static const struct {
        int architecture, found[COUNT_OF(widths)];
    } rows[] = {{80, {3, 3, 3, 3, 1}}, {86, {3, 3, 3, 3, 1}},  {89, {3, 3, 3, 3, 1}},
                {90, {3, 3, 3, 3, 3}}, {100, {3, 3, 3, 3, 1}}, {120, {3, 3, 3, 3, 1}}};
    size_t compared = 0, unasked = 0; // cuDNN has not been asked for plans of heads of 192 (deepseek-v3)
    for (size_t i = 0; i < PRESETS; i++) {
        Config config = config_from_text(presets[i].name, "test", EXIT_USAGE);
        Model model = model_build(&config, DTYPE_BF16);
        unasked += config.head_dim == 192;
        for (int m = 0; m < MACHINES; m++)
            for (size_t k = 0; k < COUNT_OF(rows) * COUNT_OF(widths); k++) {
                const size_t row = k / COUNT_OF(widths), width = k % COUNT_OF(widths);
                if (rows[row].architecture != machines[m].architecture || widths[width] != config.head_dim) continue;
                const int found = machine_attends(&machines[m], &model);
                const int takes = library_takes_window(config.head_dim, window_of_heads(&config), 1) ? 3 : 1;
                if (found != (rows[row].found[width] & takes))
                    test_fail("%s on %s: %d", presets[i].name, machines[m].name, found);
                compared++;
            }
        model.dtype = DTYPE_FP32;
        if (machine_attends(&machines[MACHINE_H100], &model)) test_fail("%s in fp32", presets[i].name);
        model_free(&model);
    }
    assert_int_equal(compared, (PRESETS - unasked) * MACHINES); // every other head size is in the table
}

// ---- the workspace of attention's library --------------------------------------------------------------------------
#define WORKSPACE_MODEL                                                                                                \
    "llama,hidden_size=64,intermediate_size=64,num_hidden_layers=1,num_attention_heads=8,head_dim=64,vocab_size=32"

// Returns the workspace of `run` planned within `limit`, as a new run or as one begun with `workspace`.
static size_t planned_workspace(Run *run, size_t limit, int begun, size_t workspace) {
    Batch shape = batch_shape(regular_bound(1, run->options->seq_len));
    run->settings = settings_from_options(run->options, &run->model, NULL);
    run->has_begun = begun, run->workspace = workspace;
    run_plan(run, &shape, limit);
    batch_free(&shape);
    return run->settings.attention.workspace;
}

// Chooses the largest useful workspace that fits. A resumed run takes its old one, or less. A build without the library
// plans one for a machine.
TEST(workspaces) {
    const int library = ops_device->attention_library(8, 8, 64, 0, 0) != NULL;
    char *argv[] = {(char *)"train",
                    (char *)"plan",
                    (char *)"--for=bp",
                    (char *)"--machine=h200",
                    (char *)"--init=" WORKSPACE_MODEL,
                    (char *)"--seq-len=40000",
                    (char *)"--chunk=4096",
                    (char *)"--logits-chunk=2048",
                    (char *)"--keep=none",
                    (char *)"--dtype=bf16"};
    Run run;
    for (int any_order = 0; any_order < 2; any_order++) {
        Options o = options_parse(COUNT_OF(argv), argv);
        if (library) o.verb = VERB_BP;
        o.deterministic = any_order ? DETERMINISTIC_OFF : DETERMINISTIC_ON;
        run_open(&run, &o, NULL);
        const size_t largest = planned_workspace(&run, 0, 0, 0), bytes = run.plan.total_bytes;
        test_case("%s, any order %d, at most %zu of %zu bytes", run.attention, any_order, largest, bytes);
        if (!largest && !any_order) test_fail("no workspace is open");
        assert_int_equal(planned_workspace(&run, bytes, 0, 0), largest);
        const size_t next = planned_workspace(&run, bytes - 1, 0, 0);
        if (largest && (next >= largest || run.plan.total_bytes >= bytes))
            test_fail("then %zu of %zu bytes", next, run.plan.total_bytes);
        assert_int_equal(planned_workspace(&run, 0, 1, next), next);
        assert_int_equal(planned_workspace(&run, 0, 1, 12345), 12345);
        assert_int_equal(planned_workspace(&run, 0, 1, 0), 0);
        if (next && planned_workspace(&run, run.plan.total_bytes - 1, 1, next) >= next)
            test_fail("a run goes on with what does not fit");
        assert_int_equal(planned_workspace(&run, 1, 0, 0), 0); // the smallest plan, refused later
        if (run.plan.total_bytes > bytes) test_fail("%zu bytes with the least", run.plan.total_bytes);
        model_free(&run.model);
    }
}

// ---- what stays of a layer ------------------------------------------------------------------------------------------
// With more memory a step is not slower, and keeps products or all of more layers, within what is left free: 5 % and
// 1 GiB of a GPU. With host memory it is faster still. A refused allocation halves the layers, down to the need.
TEST(keeps_what_fits) {
    char *argv[] = {(char *)"train",
                    (char *)"plan",
                    (char *)"--for=bp",
                    (char *)"--machine=h100",
                    (char *)"--init=qwen3-8b,num_hidden_layers=12",
                    (char *)"--seq-len=16384",
                    (char *)"--dtype=bf16",
                    (char *)"--lora-rank=8"};
    Run run;
    Options o = options_parse(COUNT_OF(argv), argv);
    run_open(&run, &o, NULL);
    Batch shape = batch_shape(regular_bound(1, o.seq_len));
    const Machine *m = &machines[MACHINE_H100];
    double before = INFINITY;
    size_t layers = 0, levels = 0;
    for (size_t gib = 18; gib <= 66; gib += 6) {
        const size_t limit = gib * GIBIBYTE;
        run.settings = settings_from_options(&o, &run.model, NULL);
        run_plan(&run, &shape, limit);
        const RunSettings *s = &run.settings;
        const Plan plan = plan_make(s, &shape);
        const PassWork work = pass_work(m, s, &shape);
        const double seconds = step_seconds(m, s, &work, &plan.moved, 1);
        const size_t kept = s->keep.layers || s->keep.level <= LEVEL_ATTENTION ? s->keep.layers : 12;
        test_case("%zu GiB: %zu of %zu bytes, %s, %.4g s", gib, plan.total_bytes, limit, keep_text(s), seconds);
        assert_int_equal(plan.total_bytes, run.plan.total_bytes);
        if (s->keep.level > LEVEL_ATTENTION && (double)plan.total_bytes > 0.95 * (double)limit - GIBIBYTE)
            test_fail("too little is left");
        if (run.needed > plan.total_bytes || plan.total_bytes > limit) test_fail("needs %zu", run.needed);
        if (seconds > 1.011 * before || (s->keep.level == LEVEL_PRODUCTS && kept < layers)) test_fail("keeps less");
        before = seconds, layers = kept, levels |= (size_t)1 << s->keep.level;
    }
    if (!(levels >> LEVEL_PRODUCTS & 1) || !(levels >> LEVEL_ALL & 1)) test_fail("levels %zx", levels);
    for (size_t steps = 0; run_keep_less(&run, &shape); steps++)
        if (steps > 4 || run.plan.total_bytes < run.needed) test_fail("%zu bytes", run.plan.total_bytes);
    assert_int_equal(run.plan.total_bytes, run.needed);
    batch_free(&shape), lora_free(&run.lora), model_free(&run.model);
}

// Latents are expanded once a pass over a layer where keys and values of all tokens fit, else by ranges in large
// chunks. Expanding and folding take at most 12 % of attention's FLOPs; folding is a quarter of that.
TEST(expanded_latents_are_cheap) {
    static const struct {
        const char *machine, *tokens;
        int ranges;
    } cases[] = {{"--machine=h100", "--seq-len=65536", 0},
                 {"--machine=h100", "--seq-len=307200", 0},
                 {"--machine=rtx4090,host=96GiB", "--seq-len=614400", 1},
                 {"--machine=rtx4090,host=96GiB", "--seq-len=1228800", 1}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char *argv[] = {(char *)"train",
                        (char *)"plan",
                        (char *)cases[i].machine,
                        (char *)cases[i].tokens,
                        (char *)"--init=glm4.7-flash",
                        (char *)"--dtype=bf16",
                        (char *)"--base=nf4",
                        (char *)"--lora-rank=16"};
        Run run;
        Options o = options_parse(COUNT_OF(argv), argv);
        run_open(&run, &o, NULL);
        Batch shape = batch_shape(regular_bound(1, o.seq_len));
        run_plan(&run, &shape, machine_usable_bytes(machine_from_options(&o)));
        const OpCounts *counts = &run.plan.counts;
        const double share =
            flops_expansion(&run.settings, &shape) / (counts->attention_forward + counts->attention_backward);
        test_case("%s, %s: chunk %zu, %.3g of attention", cases[i].machine, cases[i].tokens, run.plan.chunk, share);
        assert_int_equal(run.settings.latent_ranges, cases[i].ranges);
        if (!(share <= 0.12)) test_fail("more than 0.12");
        batch_free(&shape), storage_free(&run.storage), lora_free(&run.lora), model_free(&run.model);
    }
}

// Returns the logits chunk that a pass of one document of 16,384 tokens takes with a limit. Checks its plan.
static size_t logits_chunk_chosen(const char *option, size_t limit) {
    char *argv[] = {(char *)"train",
                    (char *)"plan",
                    (char *)"--for=bp",
                    (char *)"--machine=h100",
                    (char *)option,
                    (char *)"--dtype=bf16",
                    (char *)"--init=qwen3-0.6b,num_hidden_layers=4",
                    (char *)"--seq-len=16384"};
    Run run;
    Options o = options_parse(COUNT_OF(argv), argv);
    run_open(&run, &o, NULL);
    Batch shape = batch_shape(regular_bound(1, o.seq_len));
    run_plan(&run, &shape, limit);
    const size_t chosen = run.plan.logits_chunk;
    test_case("%s, %zu bytes: chunk %zu of logits, %zu bytes", option, limit, chosen, run.plan.total_bytes);
    if (chosen > CUDA_LOGITS_CHUNK && (double)run.plan.total_bytes > 0.95 * (double)limit - GIBIBYTE)
        test_fail("too little is left");
    while (run_keep_less(&run, &shape)) assert_int_equal(run.plan.logits_chunk, min_size(chosen, CUDA_LOGITS_CHUNK));
    if (run.plan.total_bytes > run.needed) test_fail("%zu bytes are needed", run.needed);
    free(shape.document_start), lora_free(&run.lora), model_free(&run.model);
    return chosen;
}

// A trained head gets large logits chunks from memory that is free. --keep that is named takes no free memory.
TEST(logits_chunks_by_memory) {
    const size_t large = logits_chunk_chosen("--seed=1", 60 * GIBIBYTE);
    size_t before = 0;
    assert_int_equal(large, LARGEST_LOGITS_CHUNK);
    for (size_t gib = 4; gib <= 12; gib++) {
        const size_t chosen = logits_chunk_chosen("--seed=1", gib * GIBIBYTE);
        if (chosen < before) test_fail("chunks of %zu before", before);
        before = chosen;
    }
    assert_int_equal(logits_chunk_chosen("--lora-rank=8", 60 * GIBIBYTE), CUDA_LOGITS_CHUNK);
    assert_int_equal(logits_chunk_chosen("--keep=none", 60 * GIBIBYTE), CUDA_LOGITS_CHUNK);
    assert_int_equal(logits_chunk_chosen("--logits-chunk=1024", 60 * GIBIBYTE), 1024);
}

// ---- levels of --sp auto -------------------------------------------------------------------------------------------
// Two joined plans have the larger of each place, in either order.
TEST(joined_plans_are_the_larger) {
    static Plan plan[2], joined[2];
    for (size_t i = 0; i < 2; i++) {
        plan[i].total_bytes = plan[i].arena[PLACE_DEVICE].peak = 20 + i;
        plan[i].host_bytes = plan[i].arena[PLACE_HOST].peak = 10 - i;
        plan[i].disk_bytes = plan[i].arena[PLACE_DISK].peak = 5 + 3 * i;
    }
    for (size_t i = 0; i < 2; i++) {
        size_t bytes[PLACES];
        joined[i] = plan[i];
        plan_join(&joined[i], &plan[!i]);
        plan_bytes(&joined[i], bytes);
        assert_true(bytes[PLACE_DEVICE] == 21 && bytes[PLACE_HOST] == 10 && bytes[PLACE_DISK] == 8);
        for (int place = 0; place < PLACES; place++) assert_int_equal(joined[i].arena[place].peak, bytes[place]);
    }
}

// ---- choices -------------------------------------------------------------------------------------------------------
// Returns a search with everything open, on a machine whose rates make each choice matter.
static Search open_search(const Planned *c, const Machine *m) {
    Search search = {0};
    search.open = c->settings, search.machine = m, search.sequences = 1;
    for (int kind = 0; kind < PLACED; kind++) search.open.place[kind] = PLACE_AUTO, search.places[kind] = 7;
    return search;
}

typedef struct {
    double seconds; // from estimate_step
    size_t bytes[PLACES];
} KnownChoice;

// For any limits, the choice is the best of all; if none fits, the search says so.
TEST(choices_are_the_best_of_all) {
    Machine m = round_machine(3e9, 1e9, 1e5, 1e4);
    m.value[LINK_HOST] = 3e5, m.value[DISK_WRITE] = 5e4, m.value[DISK_READ] = 1e5;
    size_t fitted = 0, placed[PLACES] = {0}, kept = 0, sparse = 0;
    SCOPED(planned_end) Planned c;
    planned(&c,
            "llama,hidden_size=512,intermediate_size=768,num_hidden_layers=6,num_attention_heads=4,"
            "num_key_value_heads=2,vocab_size=1280,head_dim=128",
            8192, 1, 0, 1);
    c.settings.chunk = c.settings.logits_chunk = 256;
    Search search = open_search(&c, &m);
    search.keep = search.every = 1;
    const Candidates all = candidates_make(&search);
    KnownChoice *known = (KnownChoice *)checked_calloc(all.count, sizeof(KnownChoice), "choices");
    for (size_t i = 0; i < all.count; i++) {
        const RunSettings settings = candidate_settings(&search, &all.candidate[i]);
        const Plan plan = plan_make(&settings, &c.batch);
        plan_bytes(&plan, known[i].bytes);
        known[i].seconds = estimate_step(&m, &settings, &c.batch, one_sequence).seconds;
    }
    for (size_t draw = 0; draw < 60; draw++) {
        const double device = (double)known[0].bytes[0];
        const size_t part = draw < 2 ? 100 : 20 + test_random_below(85);
        search.limits = device_limit((size_t)(device * (double)part / 100));
        search.limits.bytes[PLACE_HOST] = (size_t)device * test_random_below(100) / 100 + (draw % 4 ? DISK_PIECES : 0);
        search.limits.bytes[PLACE_DISK] = draw % 3 ? (size_t)device : 1 + (size_t)device / 20;
        size_t least, best = all.count;
        double lowest = INFINITY;
        Choice *choices;
        test_case("limits %zu, %zu, %zu", search.limits.bytes[0], search.limits.bytes[1], search.limits.bytes[2]);
        const size_t count = search_choices(&search, &all, &c.batch, &choices, &least);
        for (size_t i = 0; i < all.count; i++) {
            const double pressure = places_pressure(known[i].bytes, &search.limits);
            lowest = fmin(lowest, pressure);
            if (pressure <= 1 && (best == all.count || known[i].seconds < known[best].seconds)) best = i;
        }
        if ((count > 0) != (best < all.count)) test_fail("%zu choices are found", count);
        if (count == 0) close_to("the nearest", places_pressure(known[least].bytes, &search.limits), lowest, 0);
        if (count) {
            const RunSettings *chosen = &choices[0].settings;
            const double seconds = known[choices[0].candidate].seconds;
            if (places_pressure(known[choices[0].candidate].bytes, &search.limits) > 1) test_fail("it does not fit");
            if (seconds > 1.02 * known[best].seconds)
                test_fail("%g s by choice %zu, %g s by %zu", seconds, choices[0].candidate, known[best].seconds, best);
            for (int kind = 0; kind < PLACED; kind++) placed[chosen->place[kind]]++;
            fitted++, kept += chosen->keep.level > LEVEL_NONE, sparse += chosen->inputs_every > 1;
            const size_t thin = choices_thin(choices, count);
            for (size_t i = 1; i < thin; i++)
                assert_true(choices[i].seconds >= choices[i - 1].seconds &&
                            (choices[i].bytes[0] < choices[0].bytes[0] || choices[i].bytes[1] < choices[0].bytes[1] ||
                             choices[i].bytes[2] < choices[0].bytes[2]));
        }
        free(choices);
    }
    free(known), free(all.candidate);
    printf("             %zu of 60 fit; %zu, %zu and %zu things on device, host and disk, %zu kept, %zu sparse\n",
           fitted, placed[0], placed[1], placed[2], kept, sparse);
    assert_true(fitted > 30 && fitted < 60 && placed[1] > 10 && placed[2] > 10 && kept && sparse);
}

// Lengths of whole models with off-device memory, and the time beyond an all-on-device run
// Attention's outputs leave a share of the limits free, what is kept anyway does not.
TEST(kept_attention_leaves_memory_free) {
    SCOPED(planned_end) Planned c;
    planned(&c, "qwen3-0.6b", 8192, 1, 0, 1);
    c.settings.keep.level = LEVEL_ATTENTION;
    const size_t bytes = plan_make(&c.settings, &c.batch).total_bytes;
    c.settings.keep.level = LEVEL_NONE;
    Search search = {0};
    search.open = c.settings, search.machine = &machines[MACHINE_H100], search.sequences = 1, search.keep = 1;
    for (int k = 0; k < 3; k++) { // it fits with nothing to spare; does not with a quarter; does again
        search.limits = device_limit(k < 2 ? bytes : bytes / 3 * 4 + 4);
        search.spare = k ? 0.25 : 0;
        size_t least;
        Choice *choices;
        const Candidates all = candidates_make(&search);
        const size_t count = search_choices(&search, &all, &c.batch, &choices, &least);
        if (!count || (choices[0].settings.keep.level > LEVEL_NONE) != (k != 1))
            test_fail("case %d: %zu choices", k, count);
        free(choices), free(all.candidate);
    }
}

TEST(figures_of_places) {
    static const struct {
        const char *init;
        size_t lora, ranks, tokens, micro_batches, limit[PLACES]; // in GiB
        double slower;                                            // at most
    } figures[] = {{"qwen3-8b", 0, 1, 1048576, 1, {80, 460, 0}, 0.03},
                   {"qwen3-8b", 0, 1, 1048576, 1, {80, 128, 2000}, 0.03},
                   {"qwen3-8b", 0, 1, 262144, 1, {80, 460, 0}, 0.03},
                   {"qwen3-8b", 0, 1, 32768, 12, {80, 460, 0}, 0.03},
                   {"qwen3-8b", 0, 1, 32768, 1, {24, 116, 0}, INFINITY},
                   {"qwen3-8b", 16, 1, 250000, 1, {24, 96, 0}, 0.03},
                   {"qwen3-8b", 16, 1, 131072, 1, {12, 64, 0}, INFINITY},
                   {"qwen3-32b", 16, 1, 500000, 1, {80, 320, 0}, INFINITY},
                   {"qwen3-8b", 0, 1, 32768, 2, {24, 116, 1000}, INFINITY},
                   {"qwen3-32b", 0, 1, 1000000, 1, {80, 1200, 4000}, INFINITY},
                   {"llama3.1-8b", 0, 8, 5000001, 1, {78, 1843, 0}, 0.03},
                   {"llama3.1-8b", 0, 32, 15500001, 1, {78, 1843, 0}, 0.03}};
    for (size_t i = 0; i < COUNT_OF(figures); i++) {
        const Machine *m = &machines[MACHINE_H100];
        Lora lora = {0};
        SCOPED(planned_end) Planned c;
        test_case("%s, %zu tokens in %zu GiB", figures[i].init, figures[i].tokens, figures[i].limit[0]);
        planned(&c, figures[i].init, figures[i].tokens, figures[i].ranks, 3, figures[i].ranks);
        c.settings.chunk = CUDA_CHUNK, c.settings.logits_chunk = CUDA_LOGITS_CHUNK;
        if (figures[i].micro_batches > 1) c.settings.gradient_type = DTYPE_FP32;
        if (figures[i].lora) {
            lora.rank = figures[i].lora, lora.alpha = 32;
            lora.modules = lora_modules(c.model.config.family, "all", "test", EXIT_USAGE);
            lora_build(&lora, &c.model), c.settings.lora = &lora;
        }
        Search search = open_search(&c, m);
        for (int place = 0; place < PLACES; place++) {
            const size_t sharing = place ? min_size(figures[i].ranks, 8) : 1;
            search.limits.bytes[place] = (figures[i].limit[place] << 30) / sharing;
            for (int kind = 0; !figures[i].limit[place] && kind < PLACED; kind++) search.places[kind] &= ~(1u << place);
        }
        search.ring = figures[i].ranks > 1, search.sequences = figures[i].micro_batches;
        search.defers = figures[i].micro_batches > 1;
        size_t least;
        Choice *choices, none = {0};
        const clock_t begin = clock();
        const Candidates all = candidates_make(&search);
        const size_t count = search_choices(&search, &all, &c.batch, &choices, &least);
        const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        const Choice chosen = count ? choices[0] : none;
        free(choices), free(all.candidate);
        if (!count) test_fail("nothing fits");
        printf("             %s, %zu tokens: %.1f, %.1f and %.1f GiB, %.3g s, %.2f %% beyond; chosen in %.0f ms\n",
               figures[i].init, figures[i].tokens, (double)chosen.bytes[0] / GIBIBYTE,
               (double)chosen.bytes[1] / GIBIBYTE, (double)chosen.bytes[2] / GIBIBYTE, chosen.seconds,
               100 * (chosen.seconds / chosen.on_device - 1), 1e3 * seconds);
        if (chosen.seconds > (1 + figures[i].slower) * chosen.on_device)
            test_fail("slower by more than %g", figures[i].slower);
        if (seconds > 1) test_fail("chosen in %g s", seconds);
        if (search.defers && !chosen.settings.defers) test_fail("no update beside the next forward pass");
        lora_free(&lora);
    }
}

TEST(a_card_holds_more_than_its_plan) {
    static const struct {
        World world;
        int deals;
        double gib; // of NCCL
    } cases[] = {{{0, 0, 0, 0}, 0, 0},   {{8, 0, 3, 1}, 0, 1.5},  {{8, 0, 3, 2}, 0, 1.95}, {{8, 0, 3, 8}, 0, 2.4},
                 {{1, 0, 0, 1}, 1, 0},   {{2, 0, 0, 1}, 1, 1.95}, {{3, 0, 0, 1}, 1, 2.4},  {{4, 0, 0, 2}, 1, 2.4},
                 {{8, 0, 3, 8}, 1, 3.1}, {{64, 0, 3, 1}, 1, 5.2}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        close_to("NCCL", (double)collectives_bytes(cases[i].world, cases[i].deals) / GIBIBYTE, cases[i].gib, 1e-6);
    SCOPED(planned_end) Planned c;
    planned(&c, "qwen3-0.6b,num_hidden_layers=4", 4096, 1, 0, 1);
    c.settings.place[PLACED_INPUTS] = PLACE_HOST;
    const Plan plan = plan_make(&c.settings, &c.batch);
    Limits limits = device_limit(plan.total_bytes);
    close_to("a plan alone", plan_pressure(&plan, &limits), 1, 0);
    limits.tables = 1;
    if (plan_pressure(&plan, &limits) <= 1) test_fail("page tables of %zu bytes take nothing", plan.host_bytes);
    limits.bytes[PLACE_DEVICE] += plan.host_bytes / 512;
    close_to("with page tables", plan_pressure(&plan, &limits), 1, 0);
}

TEST(thousands_of_ranks_at_once) {
    static const struct {
        size_t sp;
        int ring;
        size_t expected; // least tokens
    } cases[] = {{1, 0, 200000}, {8, 0, 1500000}, {4096, 0, 6000000}, {4096, 1, 500000000}};
    const Limits limits = device_limit((size_t)78 << 30);
    for (size_t i = 0; i < 4; i++) {
        const clock_t begin = clock(); // CPU time of this process: others may run
        const StepShape step = {1, 1, 1, 1};
        SCOPED(planned_end) Planned c;
        planned(&c, "qwen3-8b", 1000000, 4096, 3, cases[i].sp);
        c.settings.ring = cases[i].ring;
        size_t longest = plan_longest(&c.settings, 1, 0, 0, &limits);
        c.batch.N = c.start[1] = longest;
        estimate_step(&machines[MACHINE_H100], &c.settings, &c.batch, step);
        double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        printf("             4096 ranks, sp %zu%s: %zu tokens, planned in %.2f s\n", cases[i].sp,
               cases[i].ring ? ", a ring" : "", longest, seconds);
        if (seconds > 6) test_fail("sp %zu takes %g seconds", cases[i].sp, seconds);
        if (longest < cases[i].expected) test_fail("sp %zu: only %zu tokens", cases[i].sp, longest);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
