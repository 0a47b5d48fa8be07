/*
Hopper's instructions of llmc/ops/cuda/wgmma.cuh on the CPU, for the tests: products of a warp group, loads by TMA and
barriers that count bytes. Part of cuda_on_cpu.h's block: threads are its fibers.

Everything in the background happens at the latest moment that the manual allows. A product is computed when its warp
group waits for it; its accumulators are NaN until then. A load lands when its barrier expects it and a thread waits for
the barrier, or nothing else can go on; its panel is NaN until then. A thread whose barrier is completed runs at once.

What a wrong kernel does here:

    a product reads a panel while a load into it is in flight       a message
    a load into a panel, or a store, while a product still reads it a message; for a store, the new values are read
    a barrier that nobody completes                                 a message
    a phase that gets more bytes than it expects                    a message
    a write to another block before the cluster met, or after that  a message
    block ended, or so late that it could have ended
    a product after its registers were written, without a fence     a message
    threads of a warp group with different products                 a message
    a block that ends with products or loads in flight              a message
    a panel that does not begin at a multiple of 1024 bytes         a message
    a load outside the tensor                                       zeros, as on the device
*/
#ifndef TEST_WGMMA_ON_CPU_H
#define TEST_WGMMA_ON_CPU_H
#include <vector>

#define DYNAMIC_PANELS(type, name) DYNAMIC_SHARED(type, name)
#define TENSOR_MAP                 const TensorMap
#define CLUSTER_OF(size)

struct TensorMap {
    const floatX *x;
    TensorDims dims;
    unsigned box_y, box_z;
};

static inline TensorMap tensor_map(const floatX *x, TensorDims dims, unsigned box_y, unsigned box_z) {
    if ((uintptr_t)x % 16 || dims.stride_y % 8 || dims.stride_z % 8 || box_y > 256 || box_z > 256 || !dims.x ||
        !dims.y || !dims.z)
        die("a tensor of %zu x %zu x %zu elements cannot be loaded by TMA", dims.z, dims.y, dims.x);
    return TensorMap{x, dims, box_y, box_z};
}

struct TileBarrier {
    unsigned arrivals, pending, phase, started; // pending: arrivals that are missing in this phase; phase: its parity
    long long bytes;                            // bytes of loads that are missing in this phase
};

struct PanelOperand {
    const floatX *panel; // the first panel that is read
    unsigned row, column, rows;
    bool columns; // the tile's columns are rows of A, or columns of B
};
struct RowsOperand : PanelOperand {};
struct ColumnsOperand : PanelOperand {};

namespace cuda_on_cpu {
constexpr unsigned BARRIER_STARTED = 0x5ba1;

struct PanelLoad {
    floatX *to;
    TensorMap map;
    TileBarrier *barrier;
    long long x, y, z;
    unsigned rank; // of the block that it writes to
    int line;
    size_t elements() const { return (size_t)map.box_y * map.box_z * PANEL; }
    long long bytes() const { return (long long)(elements() * sizeof(floatX)); }
};
// A product as one thread issues it
struct Product {
    int line;
    unsigned n, batch; // batch: how many commits came before
    bool add, a_in_registers;
    PanelOperand a, b;
    float registers[8];
    float *c; // [n / 8][4]
};
// Values of an accumulator while products add to it
struct Sums {
    float *c;
    std::vector<float> value;
};
struct GroupThread {
    std::vector<Product> products;
    std::vector<Sums> sums;
    unsigned batches;
    bool fenced, fenced_registers; // a fence came after the last wait; after the last commit
};
struct WarpGroup {
    unsigned arrived;
    int line;
};
inline GroupThread group_thread[MOST_THREADS];
inline WarpGroup warp_group[MOST_THREADS / GROUP_THREADS];
inline std::vector<PanelLoad> loads; // in flight

[[noreturn]] inline void fail_here(const char *what, int line) { fail(what, block.running, line, NULL, 0, 0); }

// ---- panels ---------------------------------------------------------------------------------------------------------
inline size_t panel_place(size_t row, size_t column) {
    return row * PANEL + ((column / 8) ^ (row % 8)) * 8 + column % 8;
}

// Returns element (k, i) of an operand: k of the summed dimension, i of the other.
inline float operand_value(const PanelOperand &o, unsigned k, unsigned i) {
    if (!o.columns) return load(o.panel[panel_place(o.row + i, o.column + k)]);
    return load(o.panel[i / PANEL * o.rows * PANEL + panel_place(o.row + k, i % PANEL)]);
}

// Tells whether an operand of `width` rows or columns lies in elements [from, from + count).
inline bool operand_meets(const PanelOperand &o, unsigned width, const floatX *from, size_t count) {
    for (unsigned i = 0; i < (o.columns ? width : 1); i += PANEL) {
        const floatX *const begin = o.panel + (i / PANEL * o.rows + o.row) * PANEL;
        if (begin < from + count && from < begin + (o.columns ? 16 : width) * PANEL) return true;
    }
    return false;
}

inline PanelOperand panel_operand(const floatX *tile, unsigned rows, unsigned row, unsigned column, bool columns,
                                  int line) {
    if ((uintptr_t)tile % 1024 || row % 8 || column % (columns ? PANEL : 16))
        fail_here("an operand that no descriptor can name", line);
    return PanelOperand{tile + column / PANEL * rows * PANEL, row, column % PANEL, rows, columns};
}

// ---- loads ----------------------------------------------------------------------------------------------------------
// Wakes the threads that wait for an event. Returns one of them; MOST_THREADS: there is none.
inline unsigned wake(const void *event) {
    unsigned woken = MOST_THREADS;
    for (unsigned t = 0; t < block.threads; t++)
        if (block.thread[t].state == AT_EVENT && block.thread[t].event == event) {
            block.thread[t].state = READY;
            if (woken == MOST_THREADS) woken = t;
        }
    return woken;
}

// Ends the barrier's phase if nothing is missing. Returns what wake() does.
inline unsigned barrier_progress(TileBarrier *b) {
    if (b->pending || b->bytes) return MOST_THREADS;
    b->phase ^= 1, b->pending = b->arrivals;
    return wake(b);
}

inline void load_land(const PanelLoad &l) {
    const TensorDims &d = l.map.dims;
    const auto within = [](long long at, size_t size) { return at >= 0 && (size_t)at < size; };
    for (size_t row = 0; row < (size_t)l.map.box_y * l.map.box_z; row++)
        for (size_t c = 0; c < (size_t)PANEL; c++) {
            const long long x = l.x + (long long)c, y = l.y + (long long)(row % l.map.box_y),
                            z = l.z + (long long)(row / l.map.box_y);
            floatX *const to = l.to + panel_place(row, c);
            if (within(x, d.x) && within(y, d.y) && within(z, d.z))
                *to = l.map.x[(size_t)z * d.stride_z + (size_t)y * d.stride_y + (size_t)x];
            else
                *to = store(0.0f);
        }
    l.barrier->bytes -= l.bytes();
}

// Lands the loads that barrier b expects; NULL: all barriers. Returns whether there were any.
inline bool loads_land(TileBarrier *b) {
    std::vector<PanelLoad> flying;
    flying.swap(loads);
    for (const PanelLoad &l : flying) {
        if ((b && l.barrier != b) || l.barrier->bytes < l.bytes()) {
            loads.push_back(l);
            continue;
        }
        load_land(l);
        barrier_progress(l.barrier);
    }
    return loads.size() < flying.size();
}

// ---- products -------------------------------------------------------------------------------------------------------
inline bool same_operand(const PanelOperand &x, const PanelOperand &y) {
    return x.panel == y.panel && x.row == y.row && x.column == y.column && x.columns == y.columns;
}

inline void product_issue(Product p, int line) {
    GroupThread &t = group_thread[block.running];
    if (!t.fenced || (p.a_in_registers && !t.fenced_registers))
        fail_here("a product without wgmma_fence() before it", line);
    for (const PanelLoad &l : loads)
        if (operand_meets(p.b, p.n, l.to, l.elements()) ||
            (!p.a_in_registers && operand_meets(p.a, 64, l.to, l.elements())))
            fail_here("a product reads a panel while a load into it is in flight", line);
    p.line = line, p.batch = t.batches;
    t.products.push_back(p);
    for (const Sums &s : t.sums)
        if (s.c == p.c) return;
    t.sums.push_back(Sums{p.c, std::vector<float>(p.c, p.c + p.n / 2)});
    for (unsigned i = 0; i < p.n / 2; i++) p.c[i] = NAN;
}

inline std::vector<float> &sums_of(unsigned thread, const float *c) {
    for (Sums &s : group_thread[thread].sums)
        if (s.c == c) return s.value;
    abort();
}

// Computes product `index` of the warp group whose first thread is `first`.
__attribute__((no_sanitize("undefined"))) inline void product_compute(unsigned first, size_t index) {
    const Product &p = group_thread[first].products[index];
    static float a[16][64], b[16][256], sums[256];
    for (unsigned k = 0; k < 16; k++)
        for (unsigned i = 0; i < p.n; i++) b[k][i] = operand_value(p.b, k, i);
    for (unsigned i = 0; !p.a_in_registers && i < 64; i++)
        for (unsigned k = 0; k < 16; k++) a[k][i] = operand_value(p.a, k, i);
    for (unsigned l = 0; p.a_in_registers && l < GROUP_THREADS; l++)
        for (unsigned i = 0; i < 8; i++)
            a[l % 4 * 2 + i % 2 + i / 4 * 8][l / 32 * 16 + l % 32 / 4 + i / 2 % 2 * 8] =
                group_thread[first + l].products[index].registers[i];
    for (unsigned row = 0; row < 64; row++) {
        const unsigned quad = first + row / 16 * 32 + row % 8 * 4, upper = row % 16 / 8 * 2;
        std::vector<float> *held[4];
        for (unsigned q = 0; q < 4; q++) held[q] = &sums_of(quad + q, group_thread[quad + q].products[index].c);
        for (unsigned i = 0; i < p.n; i++) sums[i] = p.add ? (*held[i % 8 / 2])[i / 8 * 4 + upper + i % 2] : 0.0f;
        for (unsigned k = 0; k < 16; k++)
            for (unsigned i = 0; i < p.n; i++) sums[i] += a[k][row] * b[k][i];
        for (unsigned i = 0; i < p.n; i++) (*held[i % 8 / 2])[i / 8 * 4 + upper + i % 2] = sums[i];
    }
}

// Computes a warp group's products up to batch `batch`, and fills the accumulators that no product adds to any more.
inline void products_finish(unsigned first, unsigned batch) {
    const std::vector<Product> queue = group_thread[first].products;
    size_t count = 0;
    while (count < queue.size() && queue[count].batch < batch) count++;
    for (unsigned l = 0; l < GROUP_THREADS; l++) {
        const std::vector<Product> &other = group_thread[first + l].products;
        for (size_t i = 0; i < queue.size() || i < other.size(); i++)
            if (i >= queue.size() || i >= other.size() || queue[i].line != other[i].line || queue[i].n != other[i].n ||
                queue[i].batch != other[i].batch || queue[i].add != other[i].add ||
                !same_operand(queue[i].b, other[i].b) ||
                (!queue[i].a_in_registers && !same_operand(queue[i].a, other[i].a)))
                fail("threads of a warp group have different products", first,
                     i < queue.size() ? queue[i].line : other[i].line, "such as", first + l,
                     i < other.size() ? other[i].line : queue[i].line);
    }
    for (size_t i = 0; i < count; i++) product_compute(first, i);
    group_products += count;
    for (unsigned l = 0; l < GROUP_THREADS; l++) {
        GroupThread &t = group_thread[first + l];
        t.products.erase(t.products.begin(), t.products.begin() + (long)count);
        std::vector<Sums> left;
        for (const Sums &s : t.sums) {
            bool pending = false;
            for (const Product &p : t.products) pending = pending || p.c == s.c;
            if (pending)
                left.push_back(s);
            else
                memcpy(s.c, s.value.data(), s.value.size() * sizeof(float));
        }
        t.sums = left;
    }
}

// Returns once all threads of the warp group are here. last: what the last one does before any goes on
template <typename Last> inline void group_meet(int line, Last last) {
    const unsigned self = block.running, first = self - self % GROUP_THREADS;
    WarpGroup *g = &warp_group[self / GROUP_THREADS];
    Thread *t = &block.thread[self];
    if (block.threads - first < GROUP_THREADS) fail_here("a warp group of fewer than 128 threads", line);
    if (g->arrived && g->line != line)
        fail("threads of a warp group wait at different lines", self, line, "the others", first, g->line);
    g->line = line;
    if (++g->arrived < GROUP_THREADS) {
        t->state = AT_EVENT, t->line = line, t->event = g;
        give_way(shard_offset(self));
        return;
    }
    last(first);
    g->arrived = 0;
    wake(g);
}

// ---- a block begins and ends ----------------------------------------------------------------------------------------
inline void hopper_block_ends(unsigned rank) {
    for (const PanelLoad &l : loads)
        if (l.rank == rank) fail_here("a block ends with loads in flight", 0);
    if (block.written[rank]) fail_here("a block may end before another one's last write to it", 0);
    for (unsigned t = rank * block.size; t < (rank + 1) * block.size; t++) {
        if (!group_thread[t].products.empty())
            fail("a block ends with products in flight", t, group_thread[t].products[0].line, NULL, 0, 0);
        group_thread[t].batches = 0, group_thread[t].fenced = group_thread[t].fenced_registers = false;
    }
}
inline bool hopper_stuck() {
    const bool landed = loads_land(NULL);
    if (!landed && !loads.empty()) fail_here("a phase gets more bytes than it expects, by the load", loads[0].line);
    return landed;
}
inline const bool hopper_hooks = (when_stuck = hopper_stuck, when_block_ends = hopper_block_ends, true);

// ---- clusters -------------------------------------------------------------------------------------------------------
// Returns the place in block `to` of the cluster that p is in this block, for a write to it.
template <typename T> inline T *in_block(T *p, unsigned to, int line) {
    const unsigned self = block.running / block.size;
    if (to == self) return p;
    if (to >= block.blocks) fail_here("a write to a block that the cluster does not have", line);
    if (!block.met) fail_here("a write to another block before the cluster met", line);
    if (block.ended[to] == block.size) fail_here("a write to a block that has ended", line);
    for (unsigned i = 0; i < block.shared_count; i++) {
        const SharedArray &own = block.shared[i];
        const size_t offset = (size_t)((char *)p - (char *)own.memory);
        if (own.rank != self || offset >= own.bytes) continue;
        block.written[to] = true;
        for (unsigned j = 0; j < block.shared_count; j++)
            if (block.shared[j].rank == to && block.shared[j].site == own.site)
                return (T *)((char *)block.shared[j].memory + offset);
    }
    fail_here("a write to another block at an address that is not shared memory of both", line);
}
} // namespace cuda_on_cpu

static inline unsigned cluster_rank() { return cuda_on_cpu::rank(); }
static inline void cluster_sync(int line = __builtin_LINE()) {
    cuda_on_cpu::barrier_meet(&cuda_on_cpu::block.whole_cluster, 0, cuda_on_cpu::block.threads, line);
}

template <int ROWS>
static inline RowsOperand operand_rows(const floatX *tile, unsigned row, unsigned column, int line = __builtin_LINE()) {
    return RowsOperand{cuda_on_cpu::panel_operand(tile, ROWS, row, column, false, line)};
}
template <int ROWS>
static inline ColumnsOperand operand_columns(const floatX *tile, unsigned row, unsigned column,
                                             int line = __builtin_LINE()) {
    return ColumnsOperand{cuda_on_cpu::panel_operand(tile, ROWS, row, column, true, line)};
}

template <int N>
static inline void wgmma(float (*c)[4], PanelOperand a, PanelOperand b, bool add, int line = __builtin_LINE()) {
    cuda_on_cpu::product_issue({0, N, 0, add, false, a, b, {}, &c[0][0]}, line);
}
template <int N>
static inline void wgmma(float (*c)[4], const OperandA &a, PanelOperand b, bool add, int line = __builtin_LINE()) {
    cuda_on_cpu::Product p = {0, N, 0, add, true, {}, b, {}, &c[0][0]};
    for (int i = 0; i < 8; i++) p.registers[i] = load(a.x[i]);
    cuda_on_cpu::product_issue(p, line);
}
static inline void wgmma_fence() {
    cuda_on_cpu::GroupThread &t = cuda_on_cpu::group_thread[cuda_on_cpu::block.running];
    t.fenced = t.fenced_registers = true;
}
static inline void wgmma_commit() {
    cuda_on_cpu::GroupThread &t = cuda_on_cpu::group_thread[cuda_on_cpu::block.running];
    t.batches++, t.fenced_registers = false;
}
template <int LEFT, typename... Sums> static inline void wgmma_wait(Sums &...) {
    using namespace cuda_on_cpu;
    GroupThread &self = group_thread[block.running];
    const int line = self.products.empty() ? 0 : self.products.back().line; // a variadic function cannot learn its own
    group_meet(line, [](unsigned first) {
        const unsigned batches = group_thread[first].batches;
        products_finish(first, batches > LEFT ? batches - LEFT : 0);
    });
    self.fenced = self.fenced_registers = false;
}

static inline void barrier_start(TileBarrier *b, unsigned arrivals) {
    *b = TileBarrier{arrivals, arrivals, 0, cuda_on_cpu::BARRIER_STARTED, 0};
}
static inline void barriers_started() {}
static inline void barrier_expect(TileBarrier *b, unsigned bytes, int line = __builtin_LINE()) {
    using namespace cuda_on_cpu;
    if (b->started != BARRIER_STARTED) fail_here("a barrier that was not started", line);
    if (!b->pending) fail_here("a barrier has more arrivals than it was started with", line);
    b->bytes += bytes, b->pending--;
    const unsigned woken = barrier_progress(b); // runs at once, before this thread's products are done
    if (woken != MOST_THREADS) give_way(shard_offset(woken) + block.threads - 1);
}
static inline void barrier_arrive(TileBarrier *b, int line = __builtin_LINE()) { barrier_expect(b, 0, line); }
static inline void barrier_arrive_at(TileBarrier *b, unsigned rank, int line = __builtin_LINE()) {
    barrier_expect(cuda_on_cpu::in_block(b, rank, line), 0, line);
}
static inline void barrier_wait(TileBarrier *b, unsigned phase, int line = __builtin_LINE()) {
    using namespace cuda_on_cpu;
    if (b->started != BARRIER_STARTED || phase > 1) fail_here("a barrier that was not started, or no phase", line);
    while (b->phase == phase) {
        if (loads_land(b)) continue;
        block.thread[block.running].state = AT_EVENT, block.thread[block.running].line = line;
        block.thread[block.running].event = b;
        give_way(shard_offset(block.running));
    }
}

namespace cuda_on_cpu {
inline void load_issue(const PanelLoad &l) {
    aligned((char *)l.to, 1024, l.line);
    for (unsigned t = 0; t < block.threads; t++)
        for (const Product &p : group_thread[t].products)
            if (operand_meets(p.b, p.n, l.to, l.elements()) ||
                (!p.a_in_registers && operand_meets(p.a, 64, l.to, l.elements())))
                fail("a load into a panel that a product in flight reads", block.running, l.line, "of", t, p.line);
    for (const PanelLoad &other : loads)
        if (l.to < other.to + other.elements() && other.to < l.to + l.elements())
            fail_here("two loads into one panel are in flight", l.line);
    memset((void *)l.to, 0xff, l.elements() * sizeof(floatX));
    loads.push_back(l);
}
} // namespace cuda_on_cpu

static inline void panel_load(floatX *to, const TensorMap *map, TileBarrier *b, size_t x, size_t y, size_t z,
                              int line = __builtin_LINE()) {
    cuda_on_cpu::load_issue({to, *map, b, (int)x, (int)y, (int)z, cuda_on_cpu::rank(), line});
}
static inline void panel_multicast(floatX *to, const TensorMap *map, TileBarrier *b, size_t x, size_t y, size_t z,
                                   unsigned blocks, int line = __builtin_LINE()) {
    using namespace cuda_on_cpu;
    for (unsigned r = 0; blocks >> r; r++)
        if (blocks >> r & 1)
            load_issue({in_block(to, r, line), *map, in_block(b, r, line), (int)x, (int)y, (int)z, r, line});
}

static inline unsigned group_number() { return threadIdx.x / GROUP_THREADS; }
static inline bool one_lane() { return threadIdx.x % cuda_on_cpu::LANES == 0; }
static inline void group_sync(unsigned, int line = __builtin_LINE()) {
    cuda_on_cpu::group_meet(line, [](unsigned) {});
}
template <int N> static inline void registers_give() { static_assert(N % 8 == 0); }
template <int N> static inline void registers_take() { static_assert(N % 8 == 0); }

#endif
