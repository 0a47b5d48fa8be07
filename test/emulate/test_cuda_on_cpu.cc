/*
The tests' own tests: every fault that test/emulate/cuda_on_cpu.h claims to catch, shown with kernels that are wrong on
purpose, each in a child process, beside a right one. And the lanes of the matrix instruction against plain loops, from
the tables of the PTX manual. And the search for libraries.
*/
#include "llmc/ops/cuda/library.h"
#include "llmc/ops/cuda/mma.cuh"
#include "llmc/ops/cuda/norm.cuh"
#include "llmc/ops/cuda/wgmma.cuh"
extern "C" {
#include "test/base/testing.h"
#include "test/base/child.h"
}

extern "C" {
extern const Ops *ops_device;
const Ops *ops_device = NULL; // no tensors here
void cuda_on_cpu_turn_order(void) { cuda_on_cpu::turn_order(); }
}

enum { BLOCK_THREADS = 128, VALUES = 1000 };

typedef enum {
    NONE,
    SHARED_OVERRUN,
    GLOBAL_OVERRUN,
    NO_BARRIER,
    DIVERGENT_BARRIER,
    OTHER_BARRIER,
    EARLY_RETURN,
    DIVERGENT_SHUFFLE,
    MISALIGNED
} Fault;

// out[block] = the sum of x[VALUES], in two steps through shared memory
__global__ void sum_kernel(float *out, const float *x, Fault fault) {
    SHARED(float, partial, BLOCK_THREADS / LANES);
    float sum = 0.0f;
    for (unsigned i = threadIdx.x; i < VALUES; i += blockDim.x) sum += x[i];
    if (fault == GLOBAL_OVERRUN && threadIdx.x == 77) sum += x[VALUES];
    if (fault == MISALIGNED && threadIdx.x == 77) sum += pack_read<4>(x + 1).x[0];
    if (fault != DIVERGENT_SHUFFLE || threadIdx.x != 77) sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) partial[threadIdx.x / LANES + (fault == SHARED_OVERRUN)] = sum;
    if (fault == DIVERGENT_BARRIER && threadIdx.x == 77)
        sum = 0.0f;
    else if (fault == OTHER_BARRIER && threadIdx.x == 77)
        __syncthreads();
    else if (fault == EARLY_RETURN && threadIdx.x == 77)
        return;
    else if (fault != NO_BARRIER)
        __syncthreads();
    if (threadIdx.x != BLOCK_THREADS / 2) return; // neither the first nor the last thread: both orders need the barrier
    sum = 0.0f;
    for (unsigned i = 0; i < BLOCK_THREADS / LANES; i++) sum += partial[i];
    out[blockIdx.x] = sum;
}

static float launch_sum(Fault fault) {
    float *x = (float *)malloc(VALUES * sizeof(float)), *out = (float *)malloc(3 * sizeof(float));
    for (int i = 0; i < VALUES; i++) x[i] = (float)(i % 7);
    LAUNCH((sum_kernel), 3, BLOCK_THREADS, 0)(out, x, fault);
    assert_true(out[0] == out[2] || isnan(out[0]));
    float sum = out[0];
    free(x), free(out);
    return sum;
}

static float expected_sum(void) {
    float sum = 0.0f;
    for (int i = 0; i < VALUES; i++) sum += (float)(i % 7);
    return sum;
}

template <typename Check> static void in_both_orders(Check check) {
    for (cuda_on_cpu::reverse = 0; cuda_on_cpu::reverse < 2; cuda_on_cpu::reverse++) check();
    cuda_on_cpu::reverse = 0;
}

// Expects a launch with this fault to end its process with these words.
template <typename F> static void expect_caught(F fault, ChildBody launch, const char *words) {
    in_both_orders([&] {
        const Child *child = run_child(launch, &fault);
        if (child->code == 0) test_fail("fault %d was not caught", (int)fault);
        if (!strstr(child->err, words)) test_fail("'%s' was not said, but: %.300s", words, child->err);
    });
}

static void sum_with(const void *fault) { launch_sum(*(const Fault *)fault); }

TEST(a_right_kernel) {
    in_both_orders([] { assert_true(launch_sum(NONE) == expected_sum()); });
}

TEST(a_missing_barrier) { // the result is NaN, made of missing values
    in_both_orders([] { assert_true(isnan(launch_sum(NO_BARRIER))); });
}

TEST(a_barrier_or_shuffle_that_one_thread_skips) {
    expect_caught(DIVERGENT_BARRIER, sum_with, "barrier");
    expect_caught(EARLY_RETURN, sum_with, "waits at a barrier that not all threads reach");
    expect_caught(OTHER_BARRIER, sum_with, "waits at one barrier while others wait at another");
    expect_caught(DIVERGENT_SHUFFLE, sum_with, "waits at");
}

TEST(a_misaligned_pack) { expect_caught(MISALIGNED, sum_with, "a packed access at an address that is not aligned"); }

TEST(out_of_bounds) {
#ifdef CUDA_ON_CPU_ASAN
    expect_caught(SHARED_OVERRUN, sum_with, "heap-buffer-overflow");
    expect_caught(GLOBAL_OVERRUN, sum_with, "heap-buffer-overflow");
#else
    test_skip("this build is without AddressSanitizer, which sees it");
#endif
}

__global__ void set_kernel(int *out, int value) { *out = value; }

TEST(a_graph_runs_when_launched_with_its_arguments) {
    cudaGraph_t graph;
    cudaGraphExec_t made;
    int out = 0, value = 1;
    assert_true(cudaStreamCreateWithFlags(&launch_stream, cudaStreamNonBlocking) == cudaSuccess);
    assert_true(cudaStreamBeginCapture(launch_stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
    LAUNCH((set_kernel), 1, 1, 0)(&out, value);
    assert_true(cudaStreamEndCapture(launch_stream, &graph) == cudaSuccess);
    assert_true(cudaGraphInstantiateWithFlags(&made, graph, 0) == cudaSuccess);
    assert_int_equal(out, 0);
    delete launch_stream;
    launch_stream = NULL, value = 2;
    for (int i = 0; i < 2; i++, out = 0) {
        cudaGraphLaunch(made, NULL);
        assert_int_equal(out, 1);
    }
    cudaGraphDestroy(graph), cudaGraphExecDestroy(made);
}

TEST(an_impossible_launch) {
    const ChildBody no_blocks = [](const void *) {
        LAUNCH((sum_kernel), 0, BLOCK_THREADS, 0)((float *)NULL, (const float *)NULL, NONE);
    };
    expect_caught(NONE, no_blocks, "cannot be launched");
}

// Blocks that add to one sum: their order shows in its bits.
__global__ void add_kernel(float *sum, const float *x) { *sum += x[blockIdx.x]; }

TEST(a_race_between_blocks) {
    const float x[] = {0x1p24f, 1.0f, 1.0f};
    float sums[2] = {};
    in_both_orders([&] { LAUNCH((add_kernel), 3, 1, 0)(&sums[cuda_on_cpu::reverse], x); });
    assert_true(sums[0] != sums[1]);
}

// ---- asynchronous copies --------------------------------------------------------------------------------------------
typedef enum {
    FETCH_RIGHT,
    NO_WAIT,
    NO_COMMIT,
    ONE_GROUP_SHORT,
    NO_FETCH_BARRIER,
    TOO_EARLY,
    MISALIGNED_FETCH
} FetchFault;
enum { FETCH_TILES = 5, FETCH_WIDTH = 4 * BLOCK_THREADS };

// out[i] = the sum of element i of all tiles of x[FETCH_TILES][FETCH_WIDTH], except the last tile's last row, which is
// invalid. Two tiles are in shared memory; each thread adds what another one has fetched.
__global__ void fetch_kernel(float *out, const float *x, FetchFault fault) {
    SHARED(float, tile, 2 * FETCH_WIDTH);
    const unsigned mine = 4 * threadIdx.x, other = 4 * ((threadIdx.x + 1) % BLOCK_THREADS);
    float sum[4] = {};
    const auto bring = [&](unsigned t) {
        fetch<16>(tile + t % 2 * FETCH_WIDTH + mine + (fault == MISALIGNED_FETCH), x + t * FETCH_WIDTH + mine,
                  t + 1 < FETCH_TILES || threadIdx.x + 1 < BLOCK_THREADS);
        if (fault != NO_COMMIT) fetch_commit();
    };
    bring(0);
    for (unsigned t = 0; t < FETCH_TILES; t++) {
        if (fault == TOO_EARLY && t + 1 < FETCH_TILES) bring(t + 1);
        if (fault == ONE_GROUP_SHORT)
            fetch_wait<1>();
        else if (fault == TOO_EARLY && t + 1 < FETCH_TILES)
            fetch_wait<1>(); // right in itself
        else if (fault != NO_WAIT)
            fetch_wait<0>();
        if (fault != NO_FETCH_BARRIER) __syncthreads();
        if (fault != TOO_EARLY && t + 1 < FETCH_TILES)
            bring(t + 1); // overwrites the tile that all threads are done with
        for (int i = 0; i < 4; i++) sum[i] += tile[t % 2 * FETCH_WIDTH + other + i];
    }
    for (int i = 0; i < 4; i++) out[other + i] = sum[i];
}

// Returns the number of right sums.
static int launch_fetch(FetchFault fault) {
    float *x = (float *)aligned_alloc(16, FETCH_TILES * FETCH_WIDTH * sizeof(float)), out[FETCH_WIDTH];
    int right = 0;
    for (int i = 0; i < FETCH_TILES * FETCH_WIDTH; i++) x[i] = (float)(i % 11);
    LAUNCH((fetch_kernel), 1, BLOCK_THREADS, 0)(out, x, fault);
    for (int i = 0; i < FETCH_WIDTH; i++) {
        float sum = 0.0f;
        for (int t = 0; t < FETCH_TILES; t++)
            if (t + 1 < FETCH_TILES || i < FETCH_WIDTH - 4) sum += x[t * FETCH_WIDTH + i];
        right += out[i] == sum;
    }
    free(x);
    return right;
}

TEST(fetches) {
    in_both_orders([] { assert_int_equal(launch_fetch(FETCH_RIGHT), FETCH_WIDTH); });
}

TEST(a_missing_wait) { // shows in the result in either order
    static const FetchFault faults[] = {NO_WAIT, NO_COMMIT, ONE_GROUP_SHORT};
    for (FetchFault fault : faults)
        in_both_orders([&] {
            if (launch_fetch(fault)) test_fail("fault %d was not seen in every sum", (int)fault);
        });
}

TEST(a_fetch_without_a_barrier) { // reading before the data is there; overwriting data still in use
    static const FetchFault faults[] = {NO_FETCH_BARRIER, TOO_EARLY};
    for (FetchFault fault : faults) {
        int wrong = 0;
        in_both_orders([&] { wrong += launch_fetch(fault) != FETCH_WIDTH; });
        if (!wrong) test_fail("fault %d was not seen", (int)fault);
    }
}

TEST(a_misaligned_fetch) {
    const ChildBody launch = [](const void *fault) { launch_fetch(*(const FetchFault *)fault); };
    expect_caught(MISALIGNED_FETCH, launch, "not aligned");
}

// ---- the matrix instruction -----------------------------------------------------------------------------------------
enum { STRIDE = 24 };

// c[16][16] += a[16][16] b; each half of the columns is a product of its own
__global__ void mma_kernel(float *c, const floatX *a, const floatX *b, int b_in_rows) {
    SHARED(floatX, ta, 16 * STRIDE);
    SHARED(floatX, tb, 16 * STRIDE);
    const unsigned row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
    float sum[2][4];
    for (unsigned i = threadIdx.x; i < 16 * STRIDE; i += LANES) ta[i] = a[i], tb[i] = b[i];
    __syncwarp();
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 4; i++) sum[j][i] = c[(row + i / 2 * 8) * 16 + j * 8 + column + i % 2];
    __syncwarp();
    mma_columns<16>(sum, load_a(ta, STRIDE, 0, 0),
                    [&](int n) { return b_in_rows ? load_b_rows(tb, STRIDE, 0, n) : load_b(tb, STRIDE, n, 0); });
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 4; i++) c[(row + i / 2 * 8) * 16 + j * 8 + column + i % 2] = sum[j][i];
}

TEST(matrix_instruction) {
    floatX a[16 * STRIDE], b[16 * STRIDE];
    for (int in_rows = 0; in_rows < 2; in_rows++) {
        float c[16 * 16], expected[16 * 16];
        for (int i = 0; i < 16 * STRIDE; i++) a[i] = store((float)test_normal()), b[i] = store((float)test_normal());
        for (int i = 0; i < 16 * 16; i++) c[i] = expected[i] = (float)test_normal();
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 16; column++)
                for (int k = 0; k < 16; k++)
                    expected[row * 16 + column] +=
                        load(a[row * STRIDE + k]) * load(in_rows ? b[k * STRIDE + column] : b[column * STRIDE + k]);
        LAUNCH((mma_kernel), 1, LANES, 0)(c, a, b, in_rows);
        for (int i = 0; i < 16 * 16; i++)
            if (!(fabsf(c[i] - expected[i]) < 1e-4f)) test_fail("element %d is %g, expected %g", i, c[i], expected[i]);
    }
}

// ---- Hopper's instructions ------------------------------------------------------------------------------------------
#ifdef PRECISION_BF16
enum { A_ROWS, A_COLUMNS, A_REGISTERS };
enum { DEPTH = 64 }; // of a product's sums

static std::vector<floatX> normal_values(size_t count) {
    std::vector<floatX> values(count);
    for (floatX &x : values) x = store((float)test_normal());
    return values;
}

// c[64, N] += A[64, DEPTH] B[DEPTH, N]; a: [64, DEPTH], or its transpose if A_COLUMNS; b: [N, DEPTH] or [DEPTH, N]
template <int N, int A, bool B_COLUMNS>
__global__ void product_kernel(float *c, TENSOR_MAP a, TENSOR_MAP b, const floatX *plain_a) {
    DYNAMIC_PANELS(floatX, ta);
    SHARED(TileBarrier, loaded, 1);
    floatX *const tb = ta + 64 * DEPTH;
    constexpr int B_ROWS = B_COLUMNS ? DEPTH : N, B_PANELS = B_COLUMNS ? (N + PANEL - 1) / PANEL : 1;
    const unsigned lane = threadIdx.x % LANES, row = threadIdx.x / LANES * 16 + lane / 4;
    float sum[N / 8][4];
    if (threadIdx.x == 0) {
        barrier_start(loaded, 1), barriers_started();
        barrier_expect(loaded, (64 + B_PANELS * B_ROWS) * PANEL * sizeof(floatX));
        panel_load(ta, &a, loaded, 0, 0, 0);
        for (int p = 0; p < B_PANELS; p++) panel_load(tb + p * B_ROWS * PANEL, &b, loaded, p * PANEL, 0, 0);
    }
    __syncthreads();
    for (int i = 0; i < N / 2; i++) sum[i / 4][i % 4] = c[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2];
    barrier_wait(loaded, 0);
    wgmma_fence();
    for (unsigned k = 0; k < DEPTH; k += 16) {
        OperandA held;
        for (unsigned i = 0; A == A_REGISTERS && i < 8; i++)
            held.x[i] = plain_a[(row + i / 2 % 2 * 8) * DEPTH + k + lane % 4 * 2 + i % 2 + i / 4 * 8];
        const auto multiply = [&](auto from_a) {
            if constexpr (B_COLUMNS)
                wgmma<N>(sum, from_a, operand_columns<DEPTH>(tb, k, 0), true);
            else
                wgmma<N>(sum, from_a, operand_rows<N>(tb, 0, k), true);
        };
        if constexpr (A == A_ROWS) multiply(operand_rows<64>(ta, 0, k));
        if constexpr (A == A_COLUMNS) multiply(operand_columns<DEPTH>(ta, k, 0));
        if constexpr (A == A_REGISTERS) multiply(held);
    }
    wgmma_commit();
    wgmma_wait<0>(sum);
    for (int i = 0; i < N / 2; i++) c[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i / 4][i % 4];
}

template <int N, int A, bool B_COLUMNS> static void check_product(void) {
    const std::vector<floatX> a = normal_values(64 * DEPTH), b = normal_values(N * DEPTH);
    std::vector<float> c(64 * N);
    std::vector<double> expected(64 * N);
    for (int i = 0; i < 64 * N; i++) expected[(size_t)i] = c[(size_t)i] = (float)test_normal();
    for (size_t i = 0; i < 64 * N; i++)
        for (size_t k = 0; k < DEPTH; k++)
            expected[i] += (double)load(a[A == A_COLUMNS ? k * 64 + i / N : i / N * DEPTH + k]) *
                           (double)load(b[B_COLUMNS ? k * N + i % N : i % N * DEPTH + k]);
    const TensorDims of_b = B_COLUMNS ? TensorDims{N, DEPTH, 1, N, 0} : TensorDims{DEPTH, N, 1, DEPTH, 0};
    LAUNCH((product_kernel<N, A, B_COLUMNS>), 1, GROUP_THREADS, (64 + (N + PANEL - 1) / PANEL * PANEL) * DEPTH * 2)
    (c.data(), tensor_map(a.data(), TensorDims{64, 64, 1, 64, 0}, 64, 1),
     tensor_map(b.data(), of_b, B_COLUMNS ? DEPTH : N, 1), a.data());
    for (size_t i = 0; i < 64 * N; i++)
        if (!(fabs(c[i] - expected[i]) < 1e-4))
            test_fail("N %d, A %d, B %d: element %zu is %g, expected %g", N, A, B_COLUMNS, i, c[i], expected[i]);
}

template <int N> static void check_products(void) {
    check_product<N, A_ROWS, false>(), check_product<N, A_ROWS, true>();
    check_product<N, A_COLUMNS, false>(), check_product<N, A_COLUMNS, true>();
    check_product<N, A_REGISTERS, false>(), check_product<N, A_REGISTERS, true>();
}

TEST(products_of_a_warp_group) {
    in_both_orders([] { check_products<16>(), check_products<80>(), check_products<256>(); });
}

typedef enum {
    PIPELINE_RIGHT,
    FREED_TOO_EARLY, // a stage is given back before its products are done
    NOT_AWAITED,     // a stage is read before it is loaded
    WRONG_PHASE,     // the producer waits for the wrong parity
    TOO_FEW_BYTES,   // a phase expects less than it gets
    NEVER_FREED,     // a stage is not given back
    NO_FENCE,
    NO_LAST_WAIT,
    ONE_THREAD_APART // one thread multiplies with other rows
} PipelineFault;
enum { PIPELINE_TILES = 5, PIPELINE_STAGES = 2, PIPELINE_STAGE = (128 + 64) * PANEL };

// c[128, 64] = x[128, 64 PIPELINE_TILES] y[64, 64 PIPELINE_TILES]^T: a producer, two consumers of 64 rows, two stages
__global__ void pipeline_kernel(float *c, TENSOR_MAP x, TENSOR_MAP y, PipelineFault fault) {
    DYNAMIC_PANELS(floatX, stages);
    SHARED(TileBarrier, full, PIPELINE_STAGES);
    SHARED(TileBarrier, empty, PIPELINE_STAGES);
    Turn turn = {};
    if (threadIdx.x < PIPELINE_STAGES) {
        barrier_start(full + threadIdx.x, 1), barrier_start(empty + threadIdx.x, 2);
        barriers_started();
    }
    __syncthreads();
    if (group_number() == 0) {
        registers_give<24>();
        for (unsigned t = 0; threadIdx.x == 0 && t < PIPELINE_TILES; t++, turn_next<PIPELINE_STAGES>(turn)) {
            floatX *const to = stages + turn.stage * PIPELINE_STAGE;
            barrier_wait(empty + turn.stage, turn.phase ^ (fault != WRONG_PHASE));
            barrier_expect(full + turn.stage, PIPELINE_STAGE * sizeof(floatX) - 128 * (fault == TOO_FEW_BYTES));
            panel_load(to, &x, full + turn.stage, t * PANEL, 0, 0);
            panel_load(to + 128 * PANEL, &y, full + turn.stage, t * PANEL, 0, 0);
        }
        return;
    }
    registers_take<240>();
    const unsigned first = (group_number() - 1) * 64, lane = threadIdx.x % LANES;
    const bool frees = threadIdx.x % GROUP_THREADS == 0;
    float sum[8][4] = {};
    for (unsigned t = 0; t < PIPELINE_TILES; t++, turn_next<PIPELINE_STAGES>(turn)) {
        const floatX *const tile = stages + turn.stage * PIPELINE_STAGE;
        if (fault != NOT_AWAITED) barrier_wait(full + turn.stage, turn.phase);
        if (fault != NO_FENCE) wgmma_fence();
        for (unsigned k = 0; k < PANEL; k += 16)
            wgmma<64>(sum, operand_rows<128>(tile, fault == ONE_THREAD_APART && threadIdx.x == 300 ? 0 : first, k),
                      operand_rows<64>(tile + 128 * PANEL, 0, k), true);
        wgmma_commit();
        if (fault == FREED_TOO_EARLY && frees) barrier_arrive(empty + turn.stage);
        if (fault != NO_LAST_WAIT || t + 1 < PIPELINE_TILES) wgmma_wait<0>(sum);
        if (fault != FREED_TOO_EARLY && fault != NEVER_FREED && frees) barrier_arrive(empty + turn.stage);
    }
    for (unsigned i = 0; i < 32; i++)
        c[(first + threadIdx.x % GROUP_THREADS / LANES * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 +
          lane % 4 * 2 + i % 2] = sum[i / 4][i % 4];
}

static void launch_pipeline(const void *fault) {
    constexpr size_t C = PIPELINE_TILES * PANEL - 8,
                     ROWS = 50; // the last panel's last columns, and rows 50 to 63 of y,
                                // are outside their tensors
    const std::vector<floatX> x = normal_values(128 * C), y = normal_values(ROWS * C);
    std::vector<float> c(128 * 64, NAN);
    LAUNCH((pipeline_kernel), 1, 3 * GROUP_THREADS, PIPELINE_STAGES * PIPELINE_STAGE * sizeof(floatX))
    (c.data(), tensor_map(x.data(), TensorDims{C, 2, 64, C, 2 * C}, 2, 64),
     tensor_map(y.data(), TensorDims{C, ROWS, 1, C, 0}, 64, 1), *(const PipelineFault *)fault);
    for (size_t i = 0; i < 128 * 64; i++) {
        double expected = 0.0;
        for (size_t k = 0; i % 64 < ROWS && k < C; k++)
            expected += (double)load(x[i / 64 * C + k]) * (double)load(y[i % 64 * C + k]);
        if (!(fabs(c[i] - expected) < 1e-3)) test_fail("element %zu is %g, expected %g", i, c[i], expected);
    }
}

TEST(a_pipeline_of_loads_and_products) {
    in_both_orders([] {
        const PipelineFault right = PIPELINE_RIGHT;
        launch_pipeline(&right);
    });
}

TEST(faults_of_a_pipeline) {
    expect_caught(FREED_TOO_EARLY, launch_pipeline, "a load into a panel that a product in flight reads");
    expect_caught(NOT_AWAITED, launch_pipeline, "a load"); // in one order the product is first, in the other the load
    expect_caught(WRONG_PHASE, launch_pipeline, "a barrier that nobody completes");
    expect_caught(TOO_FEW_BYTES, launch_pipeline, "a phase gets more bytes than it expects");
    expect_caught(NEVER_FREED, launch_pipeline, "a barrier that nobody completes");
    expect_caught(NO_FENCE, launch_pipeline, "a product without wgmma_fence() before it");
    expect_caught(NO_LAST_WAIT, launch_pipeline, "a block ends with products in flight");
    expect_caught(ONE_THREAD_APART, launch_pipeline, "threads of a warp group have different products");
}

// ---- clusters -------------------------------------------------------------------------------------------------------
typedef enum {
    CLUSTER_RIGHT,
    NO_FIRST_MEETING,      // a block writes to the other one before that has started its barriers
    NO_LAST_MEETING,       // a block may end before the other one's last arrival
    LEAVES_EARLY,          // a block ends in the middle
    FREED_BY_ONE,          // a stage is loaded once this block's warps are done with it
    NOT_FREED_THERE,       // the other block never learns that a stage is free
    FREED_THERE_TOO_EARLY, // it learns so before the products are done
    SAME_SHARE,            // both blocks load the same rows
    ONE_SHARE,             // a block loads its own rows for itself alone
    OWN_BYTES,             // a phase expects the own rows alone
    BEYOND_THE_CLUSTER
} ClusterFault;
enum { SHARED_ROWS = 64 / 2, CLUSTER_STAGE = 2 * 64 * PANEL };

// c[block][64, 64] = x[64, 64 PIPELINE_TILES] y[block][64, 64 PIPELINE_TILES]^T: two blocks share x
__global__ void CLUSTER_OF(2) cluster_kernel(float *c, TENSOR_MAP x, TENSOR_MAP y, ClusterFault fault) {
    DYNAMIC_PANELS(floatX, stages);
    SHARED(TileBarrier, full, PIPELINE_STAGES);
    SHARED(TileBarrier, empty, PIPELINE_STAGES);
    const unsigned rank = cluster_rank(), lane = threadIdx.x % LANES, row = threadIdx.x / LANES % 4 * 16 + lane / 4;
    Turn turn = {};
    if (threadIdx.x < PIPELINE_STAGES) {
        barrier_start(full + threadIdx.x, 1), barrier_start(empty + threadIdx.x, fault == FREED_BY_ONE ? 1 : 2);
        barriers_started();
    }
    __syncthreads();
    if (fault != NO_FIRST_MEETING) cluster_sync();
    float sum[8][4] = {};
    for (unsigned t = 0; group_number() == 0 && threadIdx.x == 0 && t < PIPELINE_TILES;
         t++, turn_next<PIPELINE_STAGES>(turn)) {
        floatX *const to = stages + turn.stage * CLUSTER_STAGE;
        const unsigned share = fault == SAME_SHARE ? 0 : rank * SHARED_ROWS, set = fault == ONE_SHARE ? 1 << rank
                                                                                   : fault == BEYOND_THE_CLUSTER ? 7
                                                                                                                 : 3;
        barrier_wait(empty + turn.stage, turn.phase ^ 1);
        barrier_expect(full + turn.stage, ((fault == OWN_BYTES ? SHARED_ROWS : 64) + 64) * PANEL * sizeof(floatX));
        panel_load(to + 64 * PANEL, &y, full + turn.stage, t * PANEL, 0, rank);
        panel_multicast(to + share * PANEL, &x, full + turn.stage, t * PANEL, share, 0, set);
    }
    for (unsigned t = 0; group_number() == 1 && t < PIPELINE_TILES; t++, turn_next<PIPELINE_STAGES>(turn)) {
        const floatX *const tile = stages + turn.stage * CLUSTER_STAGE;
        const unsigned frees = threadIdx.x % GROUP_THREADS; // a block that this thread tells of the stage
        barrier_wait(full + turn.stage, turn.phase);
        if (fault == LEAVES_EARLY && rank && t == 2) return;
        wgmma_fence();
        for (unsigned k = 0; k < PANEL; k += 16)
            wgmma<64>(sum, operand_rows<64>(tile, 0, k), operand_rows<64>(tile + 64 * PANEL, 0, k), true);
        wgmma_commit();
        if (fault == FREED_THERE_TOO_EARLY && frees < 2) barrier_arrive_at(empty + turn.stage, frees);
        wgmma_wait<0>(sum);
        if (frees < 2 && fault != FREED_THERE_TOO_EARLY &&
            (frees == rank || (fault != NOT_FREED_THERE && fault != FREED_BY_ONE)))
            barrier_arrive_at(empty + turn.stage, frees);
    }
    if (fault == LEAVES_EARLY && rank) return;
    if (fault != NO_LAST_MEETING) cluster_sync();
    for (unsigned i = 0; group_number() == 1 && i < 32; i++)
        c[(blockIdx.x * 64 + row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i / 4][i % 4];
}

static void launch_cluster(const void *fault) {
    constexpr size_t C = PIPELINE_TILES * PANEL - 8, ROWS = 50; // columns and rows of the last panels are outside
    const std::vector<floatX> x = normal_values(ROWS * C), y = normal_values(2 * 64 * C);
    std::vector<float> c(4 * 64 * 64, NAN);
    LAUNCH_CLUSTERS((cluster_kernel), 2, 4, 2 * GROUP_THREADS, sizeof(floatX) * PIPELINE_STAGES * CLUSTER_STAGE)
    (c.data(), tensor_map(x.data(), TensorDims{C, ROWS, 1, C, 0}, SHARED_ROWS, 1),
     tensor_map(y.data(), TensorDims{C, 64, 2, C, 64 * C}, 64, 1), *(const ClusterFault *)fault);
    for (size_t i = 0; i < c.size(); i++) {
        double expected = 0.0;
        for (size_t k = 0; i / 64 % 64 < ROWS && k < C; k++)
            expected += (double)load(x[i / 64 % 64 * C + k]) * (double)load(y[(i / 4096 % 2 * 64 + i % 64) * C + k]);
        if (!(fabs(c[i] - expected) < 1e-3)) test_fail("element %zu is %g, expected %g", i, c[i], expected);
    }
}

TEST(a_cluster_that_shares_loads) {
    in_both_orders([] {
        const ClusterFault right = CLUSTER_RIGHT;
        launch_cluster(&right);
    });
}

TEST(faults_of_a_cluster) {
    expect_caught(NO_FIRST_MEETING, launch_cluster, "a write to another block before the cluster met");
    expect_caught(NO_LAST_MEETING, launch_cluster, "a block may end before another one's last write to it");
    expect_caught(LEAVES_EARLY, launch_cluster, "block");
    expect_caught(FREED_BY_ONE, launch_cluster, "in flight"); // a load, a product or another load
    expect_caught(NOT_FREED_THERE, launch_cluster, "a barrier that nobody completes");
    expect_caught(FREED_THERE_TOO_EARLY, launch_cluster, "a load into a panel that a product in flight reads");
    expect_caught(SAME_SHARE, launch_cluster, "two loads into one panel are in flight");
    expect_caught(ONE_SHARE, launch_cluster, "a barrier that nobody completes");
    expect_caught(OWN_BYTES, launch_cluster, "in flight"); // the phase is over before the other rows land
    expect_caught(BEYOND_THE_CLUSTER, launch_cluster, "a write to a block that the cluster does not have");
}

TEST(a_cluster_that_cannot_be_launched) {
    const ChildBody odd = [](const void *) { LAUNCH_CLUSTERS((set_kernel), 2, 3, 32, 0)((int *)NULL, 0); };
    expect_caught(CLUSTER_RIGHT, odd, "cannot be launched");
}
#endif

// ---- libraries ------------------------------------------------------------------------------------------------------
static void make_folder(const char *name) {
    if (mkdir(scratch_path(name), 0777)) test_fail("cannot make %s", name);
}

TEST(library_of_a_named_folder) {
    const Library wanted = {"Test", "libstreambp_test.so.1", "some-package", "some-wheel"};
    char error[500], folders[1000], *libm = NULL;
    Dl_info info;
    unsetenv("STREAMBP_LIBRARIES");
    assert_null(library_open(&wanted, error));
    assert_non_null(strstr(error, "some-package"));
    assert_non_null(strstr(error, "some-wheel"));
    // in wheels' layout, after a missing folder and an empty name
    make_folder("site"), make_folder("site/part"), make_folder("site/part/lib"), make_folder("bad");
    assert_true(dladdr(dlsym(RTLD_DEFAULT, "cosf"), &info) && (libm = realpath(info.dli_fname, NULL)));
    assert_int_equal(symlink(libm, scratch_path("site/part/lib/libstreambp_test.so.1")), 0);
    snprintf(folders, sizeof(folders), "/nowhere::%s", scratch_path("site"));
    setenv("STREAMBP_LIBRARIES", folders, 1);
    void *library = library_open(&wanted, error);
    assert_non_null(library);
    assert_null(dlerror());
    assert_true(((float (*)(float))library_function(library, &wanted, "cosf"))(0.0f) == 1.0f);
    // the message names a file that is no library
    snprintf(folders, sizeof(folders), "%s", scratch_path("bad"));
    setenv("STREAMBP_LIBRARIES", folders, 1);
    write_file(scratch_path("bad/libstreambp_test.so.1"), "no library", 10);
    assert_null(library_open(&wanted, error));
    assert_non_null(strstr(error, "bad/libstreambp_test.so.1"));
    unsetenv("STREAMBP_LIBRARIES");
    free(libm);
}

// ---- launches -------------------------------------------------------------------------------------------------------
// Qwen3-8B's QK-norm keeps 132 processors busy: at least two warps for each of their four schedulers. Every launch fits
// the planned scratch, which does not shrink when rows are added.
TEST(norm_launches) {
    const NormShape heads = norm_shape(128 / full_pack<floatX>, NORM_PACKS[0]);
    const size_t blocks = norm_blocks(131072, heads.threads.y);
    assert_int_equal(heads.threads.x, 128 / full_pack<floatX>);
    assert_true(blocks * heads.threads.x * heads.threads.y / LANES >= 2 * 4 * 132);
    for (size_t C = 1; C < 20000; C += 1 + C / 3)
        for (size_t n = 1, before = 0; n < 200000; n += 1 + n / 2) {
            const size_t scratch = cuda_norm_backward_scratch(n, C);
            assert_true(scratch >= before);
            before = scratch;
            for (int most : NORM_PACKS) {
                const NormShape s = norm_shape(C, most);
                assert_true(s.threads.x * s.threads.y <= (s.threads.y > 1 ? NORM_THREADS : NORM_MOST_THREADS));
                assert_true(!s.P || s.threads.x * (size_t)s.P >= C);
                assert_true(2 * norm_blocks(n, s.threads.y) * C <= scratch);
            }
        }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
