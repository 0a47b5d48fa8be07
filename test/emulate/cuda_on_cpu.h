/*
Runs the kernels of llmc/cuda on the CPU, for the tests: the host compiler builds them as they are (-DCUDA_ON_CPU makes
llmc/ops/cuda/platform.cuh include this instead of CUDA's own headers). LAUNCH runs a grid block by block; the threads
of a block are fibers of one system thread that switch only at barriers and warp operations.

What a wrong kernel does here:

    out of bounds in shared memory     every SHARED array is a heap allocation of its own: AddressSanitizer sees it
    out of bounds in global memory     likewise; and sentinels around every tensor (test/base/testing.h)
    a missing barrier                  threads run one after the other from barrier to barrier, in either order, and
                                       shared memory begins as NaN: one of the two orders reads NaNs, and tests
                                       compare the bits of both
    a race between blocks              the other order runs the last block first: their common sum has other bits
    a barrier not all threads reach    a message names the kernel, the block, both threads and both source lines
    a misaligned packed load           packed loads check their address
    a global store to shared memory    those that are written as one check their address
    a missing wait for a fetch         fetched data arrives when its thread waits for it; NaNs until then
    a recorded launch of old values    a graph keeps a launch's arguments, as CUDA's do, and runs first when it is
                                       launched: tests compare the results with those of launches
    a copy to the host while recording a message names the op

Blocks of a cluster run together: their threads follow each other, the first block's first.

GRAPH_FAULT=1: no graph can be made of what was recorded.

Hopper's own instructions: wgmma_on_cpu.h. It cannot show: lane layouts of the matrix instructions other than those
written here (from the PTX manual's tables), the rounding of nvcc's own contractions, speed.
*/
#ifndef TEST_CUDA_ON_CPU_H
#define TEST_CUDA_ON_CPU_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <functional>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN
#endif
#endif
#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__ static
#define __device__ static
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned LANES = 32, MOST_THREADS = 1024, MOST_SHARED = 32, MOST_BLOCKS = 4,
                   BROUGHT = 16; // bytes a lane brings to a warp operation
constexpr size_t STACK = (size_t)512 << 10, GUARD = (size_t)64 << 10;

enum State { UNSTARTED, READY, AT_BARRIER, IN_WARP, AT_EVENT, DONE };

struct Fiber {
    char *stack; // the lowest usable byte
    unsigned thread;
#if defined(__x86_64__)
    void *registers; // stack pointer while it is away
#else
    ucontext_t context;
#endif
    void *shadow; // AddressSanitizer's, while it is away
};

struct Fetch {
    void *to;
    const void *from; // NULL: zeros
    unsigned bytes, group;
};

struct Thread {
    State state;
    int line;          // of the barrier or warp operation it waits at
    const void *event; // what a thread AT_EVENT waits for
    Fiber *fiber;
    Fetch *fetches;                           // [fetch_count] in flight
    unsigned fetch_count, fetch_room, groups; // groups: committed so far
};

// Values that lanes bring to a warp operation. Two sets: a fast lane may bring the next value while a slow one still
// reads the last. No lane gets further ahead.
struct Warp {
    unsigned arrived, turn; // turn: which set
    int line;
    alignas(16) unsigned char value[2][LANES][BROUGHT];
};

struct SharedArray {
    const void *site; // address of the declaration in the source
    unsigned rank;    // of its block in the cluster
    void *memory;
    size_t bytes;
};

struct Barrier {
    unsigned arrived; // count of threads that have come
    unsigned thread;  // the first of them
};

// A block, or the blocks of a cluster
struct Block {
    const char *kernel;
    void (*body)(const void *arguments);
    const void *arguments;
    unsigned threads, done, running;             // threads: of all blocks together
    unsigned blocks, size, first;                // blocks; threads of one; number of the first one
    unsigned ended[MOST_BLOCKS];                 // threads of each that have ended
    bool met, written[MOST_BLOCKS];              // the cluster met; since then others wrote to a block
    Barrier barrier[MOST_BLOCKS], whole_cluster; // of each block; of all
    size_t dynamic_bytes;
    Thread thread[MOST_THREADS];
    Warp warp[MOST_THREADS / LANES];
    SharedArray shared[MOST_SHARED];
    unsigned shared_count;
    Fiber home; // the caller of LAUNCH
};

inline Block block;
inline Fiber pool[MOST_THREADS];
inline unsigned pool_free[MOST_THREADS], pool_free_count, pool_made;
inline int reverse; // order of threads and of blocks: last to first

// Hooks of wgmma_on_cpu.h. when_stuck: no thread can go on; returns whether one can now. when_block_ends: checks
inline bool (*when_stuck)();
inline void (*when_block_ends)(unsigned rank);
inline size_t group_products; // products of warp groups so far

// ---- switching ------------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
extern "C" void cuda_on_cpu_switch(void **from, void *to);
#ifndef CUDA_ON_CPU_NO_ASM
__asm__(".text\n"
        ".weak cuda_on_cpu_switch\n"
        ".type cuda_on_cpu_switch, @function\n"
        "cuda_on_cpu_switch:\n"
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n"
        ".size cuda_on_cpu_switch, . - cuda_on_cpu_switch\n");
#endif
#endif

// AddressSanitizer wants the bounds of the stack to switch to. Those of LAUNCH's caller are known once it is left.
inline const void *home_stack;
inline size_t home_bytes;
inline bool left_home;

inline void switch_arrived(Fiber *self) {
#ifdef CUDA_ON_CPU_ASAN
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(self->shadow, &stack, &bytes);
    if (left_home) home_stack = stack, home_bytes = bytes;
    left_home = false;
#endif
    (void)self;
}

inline void switch_fiber(Fiber *from, Fiber *to) {
#ifdef CUDA_ON_CPU_ASAN
    if (to == &block.home)
        __sanitizer_start_switch_fiber(&from->shadow, home_stack, home_bytes);
    else
        __sanitizer_start_switch_fiber(&from->shadow, to->stack, STACK);
#endif
#if defined(__x86_64__)
    cuda_on_cpu_switch(&from->registers, to->registers);
#else
    swapcontext(&from->context, &to->context);
#endif
    switch_arrived(from);
}

[[noreturn]] inline void fail(const char *what, unsigned a, int line_a, const char *and_b, unsigned b, int line_b) {
    fprintf(stderr, "cuda_on_cpu: kernel %s, block (%u, %u, %u): %s: thread %u at line %d", block.kernel,
            block.first + a / block.size, blockIdx.y, blockIdx.z, what, a % block.size, line_a);
    if (and_b) fprintf(stderr, ", %s thread %u at line %d", and_b, b % block.size, line_b);
    if (and_b && a / block.size != b / block.size) fputs(" of another block of the cluster", stderr);
    fputc('\n', stderr);
    abort();
}

inline unsigned in_order(unsigned i) { return reverse ? block.threads - 1 - i : i; }

inline void enter(unsigned t) { // t runs from here on
    const unsigned own = t % block.size;
    block.running = t;
    blockIdx.x = block.first + t / block.size;
    threadIdx.x = own % blockDim.x;
    threadIdx.y = own / blockDim.x % blockDim.y;
    threadIdx.z = own / blockDim.x / blockDim.y;
    block.thread[t].state = READY;
}

[[noreturn]] inline void fiber_main();
#if !defined(__x86_64__)
inline void fiber_main_c() { fiber_main(); }
#endif

inline Fiber *fiber_new() {
    Fiber *f;
    if (pool_free_count) {
        f = &pool[pool_free[--pool_free_count]];
#ifdef CUDA_ON_CPU_ASAN
        __asan_unpoison_memory_region(f->stack + STACK - 4096, 4096); // frames that never returned
#endif
        return f;
    }
    f = &pool[pool_made++];
    f->stack =
        (char *)mmap(NULL, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED || mprotect(f->stack, GUARD, PROT_NONE)) abort();
    f->stack += GUARD;
    return f;
}

inline void fiber_start(Fiber *from, Fiber *f) {
    f->shadow = NULL;
#if defined(__x86_64__)
    void **top = (void **)(f->stack + STACK);
    *--top = NULL; // keeps the stack aligned as at a function's entry
    *--top = (void *)fiber_main;
    for (int i = 0; i < 6; i++) *--top = NULL;
    f->registers = top;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack, f->context.uc_stack.ss_size = STACK;
    makecontext(&f->context, fiber_main_c, 0);
#endif
    switch_fiber(from, f);
}

// ---- the scheduler --------------------------------------------------------------------------------------------------
// Returns the next ready thread in this run's order, starting after place `after`; MOST_THREADS: none.
inline unsigned next_ready(unsigned after) {
    do
        for (unsigned i = 1; i <= block.threads; i++) {
            unsigned t = in_order((after + i) % block.threads);
            if (block.thread[t].state == READY || block.thread[t].state == UNSTARTED) return t;
        }
    while (when_stuck && when_stuck());
    return MOST_THREADS;
}

[[noreturn]] inline void stuck() {
    unsigned a = MOST_THREADS, b = MOST_THREADS;
    for (unsigned t = 0; t < block.threads; t++)
        if (block.thread[t].state >= AT_BARRIER && block.thread[t].state != DONE) {
            a = t;
            if ((block.thread[t].state == AT_EVENT) == (block.whole_cluster.arrived > 0)) break; // they may wait for it
        }
    for (unsigned t = 0; t < block.threads; t++)
        if (block.thread[t].state != block.thread[a].state || block.thread[t].line != block.thread[a].line) b = t;
    if (block.thread[a].state == AT_EVENT)
        fail("waits for a barrier that nobody completes, or for its warp group", a, block.thread[a].line, NULL, 0, 0);
    if (b == MOST_THREADS) fail("waits for lanes that do not come", a, block.thread[a].line, NULL, 0, 0);
    fail(block.thread[a].state == AT_BARRIER ? "waits at a barrier that not all threads reach"
                                             : "waits at a warp operation that not all lanes reach",
         a, block.thread[a].line, block.thread[b].state == DONE ? "has ended:" : "waits elsewhere:", b,
         block.thread[b].line);
}

// Lets other threads run until this one is ready again; its state says what it waits for.
inline void give_way(unsigned from_place) {
    unsigned self = block.running, next = next_ready(from_place);
    Fiber *mine = block.thread[self].fiber, *theirs;
    if (next == MOST_THREADS) stuck();
    if (next == self) {
        enter(self);
        return;
    }
    if (block.thread[next].state == UNSTARTED) {
        theirs = fiber_new();
        block.thread[next].fiber = theirs;
        theirs->thread = next;
        enter(next);
        fiber_start(mine, theirs);
    } else {
        enter(next);
        switch_fiber(mine, block.thread[next].fiber);
    }
    // back: whoever switched here has called enter()
}

inline unsigned shard_offset(unsigned t) { return reverse ? block.threads - 1 - t : t; }

inline unsigned rank() { return block.running / block.size; } // of this thread's block in its cluster

// Returns once the `count` threads from `first` on are at the barrier.
inline void barrier_meet(Barrier *b, unsigned first, unsigned count, int line) {
    const unsigned self = block.running;
    Thread *t = &block.thread[self];
    if (!b->arrived)
        b->thread = self;
    else if (block.thread[b->thread].line != line)
        fail("waits at one barrier while others wait at another", self, line, "such as", b->thread,
             block.thread[b->thread].line);
    t->state = AT_BARRIER, t->line = line;
    if (++b->arrived < count) {
        give_way(shard_offset(self));
        return;
    }
    b->arrived = 0;
    if (b == &block.whole_cluster) {
        block.met = true;
        for (bool &written : block.written) written = false;
    }
    for (unsigned i = 0; i < count; i++) block.thread[first + i].state = READY;
    give_way(block.threads - 1); // the first thread goes on first
}
inline void barrier(int line) { barrier_meet(&block.barrier[rank()], rank() * block.size, block.size, line); }

// Brings `bytes` of this lane to its warp; returns once all lanes in mask have done so. The returned set stays valid
// until the next but one operation. last: called by the last lane to arrive, before any goes on.
inline unsigned char (*warp_meet(unsigned mask, const void *value, size_t bytes, int line,
                                 void (*last)(unsigned char (*set)[BROUGHT])))[BROUGHT] {
    unsigned self = block.running, lane = self % LANES, first = self - lane;
    unsigned lanes = block.threads - first < LANES ? block.threads - first : LANES, i;
    Warp *w = &block.warp[self / LANES];
    unsigned full = lanes == LANES ? ~0u : (1u << lanes) - 1;
    Thread *t = &block.thread[self];
    unsigned char(*set)[BROUGHT] = w->value[w->turn & 1];
    if ((mask & full) != full)
        fail("a warp operation for a part of the warp is not supported here", self, line, NULL, 0, 0);
    if (w->arrived && w->line != line)
        for (i = 0; i < lanes; i++)
            if (block.thread[first + i].state == IN_WARP)
                fail("lanes of one warp meet at different warp operations", self, line, "the other", first + i,
                     w->line);
    memcpy(set[lane], value, bytes);
    w->line = line;
    if (++w->arrived < lanes) {
        t->state = IN_WARP, t->line = line;
        // a warp runs as far ahead as it can
        give_way(shard_offset(reverse ? first + lanes - 1 : first) + block.threads - 1);
        return set;
    }
    if (last) last(set);
    w->arrived = 0, w->turn++;
    for (i = 0; i < lanes; i++)
        if (first + i != self) block.thread[first + i].state = READY;
    return set;
}

// A finished thread's fiber carries the next unstarted one: kernels without barriers hardly ever switch.
[[noreturn]] inline void fiber_main() {
    switch_arrived(block.thread[block.running].fiber);
    for (;;) {
        unsigned self = block.running, next;
        Fiber *mine = block.thread[self].fiber;
        block.body(block.arguments);
        self = block.running;
        block.thread[self].state = DONE, block.thread[self].line = 0;
        if (++block.ended[rank()] == block.size && when_block_ends) when_block_ends(rank());
        if (++block.done == block.threads) {
            pool_free[pool_free_count++] = (unsigned)(mine - pool);
            switch_fiber(mine, &block.home);
        }
        next = next_ready(shard_offset(self));
        if (next == MOST_THREADS) stuck();
        if (block.thread[next].state == UNSTARTED) {
            block.thread[next].fiber = mine;
            enter(next);
            continue;
        }
        pool_free[pool_free_count++] = (unsigned)(mine - pool);
        enter(next);
        switch_fiber(mine, block.thread[next].fiber);
    }
}

// ---- shared memory: begins as NaN for every block -------------------------------------------------------------------
inline void *shared_array(const void *site, size_t bytes) {
    for (unsigned i = 0; i < block.shared_count; i++)
        if (block.shared[i].site == site && block.shared[i].rank == rank()) return block.shared[i].memory;
    if (block.shared_count == MOST_SHARED) abort();
    SharedArray *array = &block.shared[block.shared_count++];
    array->site = site, array->rank = rank(), array->bytes = bytes;
    if (posix_memalign(&array->memory, 1024, bytes ? bytes : 1)) abort();
    memset(array->memory, 0xff, bytes);
    return array->memory;
}

// ---- launching ------------------------------------------------------------------------------------------------------
inline void run_blocks() { // of one cluster
    unsigned first;
    for (unsigned t = 0; t < block.threads; t++) {
        block.thread[t].state = UNSTARTED, block.thread[t].fiber = NULL;
        block.thread[t].fetch_count = block.thread[t].groups = 0;
    }
    for (unsigned w = 0; w * LANES < block.threads; w++) block.warp[w].arrived = block.warp[w].turn = 0;
    for (unsigned b = 0; b < MOST_BLOCKS; b++) block.barrier[b].arrived = block.ended[b] = 0, block.written[b] = false;
    block.whole_cluster.arrived = block.done = 0, block.met = false;
    first = in_order(0);
    block.thread[first].fiber = fiber_new();
    enter(first);
    left_home = true;
    fiber_start(&block.home, block.thread[first].fiber);
    for (unsigned i = 0; i < block.shared_count; i++) free(block.shared[i].memory);
    block.shared_count = 0;
}

inline void turn_order() { reverse = !reverse; }

// cluster: blocks that run together
inline void run(const char *kernel, unsigned cluster, dim3 grid, dim3 threads, size_t dynamic_bytes,
                void (*body)(const void *), const void *arguments) {
    const size_t count = (size_t)threads.x * threads.y * threads.z, all = cluster * count;
    block.kernel = kernel, block.body = body, block.arguments = arguments, block.dynamic_bytes = dynamic_bytes;
    if (!count || all > MOST_THREADS || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 ||
        grid.x > 2147483647u || cluster > MOST_BLOCKS || grid.x % cluster || (cluster > 1 && count % LANES)) {
        fprintf(stderr, "cuda_on_cpu: kernel %s: a grid of (%u, %u, %u) blocks of %zu threads cannot be launched\n",
                kernel, grid.x, grid.y, grid.z, count);
        abort();
    }
    block.threads = (unsigned)all, block.blocks = cluster, block.size = (unsigned)count;
    blockDim = threads, gridDim = grid;
    const size_t clusters = (size_t)grid.x / cluster * grid.y * grid.z;
    for (size_t i = 0; i < clusters; i++) {
        const size_t b = (reverse ? clusters - 1 - i : i) * cluster;
        block.first = (unsigned)(b % grid.x);
        blockIdx = dim3(block.first, (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y));
        run_blocks();
    }
}

// ---- streams and graphs: work runs at once, or, on a stream that records, when its graph is launched ----------------
struct Graph {
    std::vector<std::function<void()>> work;
};
struct Stream {
    Graph *recorded; // NULL: does not record
};
inline size_t graph_launches;

template <typename Work> inline void submit(Stream *stream, Work work) {
    if (stream && stream->recorded)
        stream->recorded->work.push_back(work);
    else
        work();
}

template <typename Kernel> struct Launch {
    const char *name;
    Kernel kernel;
    unsigned cluster;
    dim3 grid, threads;
    size_t dynamic_bytes;
    Stream *stream;
    template <typename... Arguments> void operator()(Arguments... arguments) const {
        const Launch launch = *this;
        submit(stream, [=] {
            auto body = [&] { launch.kernel(arguments...); };
            run(
                launch.name, launch.cluster, launch.grid, launch.threads, launch.dynamic_bytes,
                [](const void *b) { (*(const decltype(body) *)b)(); }, &body);
        });
    }
};

template <typename Kernel>
inline Launch<Kernel> launch(const char *name, Kernel kernel, unsigned cluster, dim3 grid, dim3 threads,
                             size_t dynamic_bytes, Stream *stream) {
    return Launch<Kernel>{name, kernel, cluster, grid, threads, dynamic_bytes, stream};
}

template <typename T> inline T shuffle(unsigned mask, T value, unsigned from, int line) {
    unsigned char(*set)[BROUGHT] = warp_meet(mask, &value, sizeof(T), line, NULL);
    unsigned first = block.running - block.running % LANES;
    if (first + from < block.threads) memcpy(&value, set[from], sizeof(T));
    return value;
}

template <typename T> inline T *aligned(T *pointer, uintptr_t bytes, int line) {
    if ((uintptr_t)pointer % bytes)
        fail("a packed access at an address that is not aligned", block.running, line, NULL, 0, 0);
    return pointer;
}

// Returns the target of a store to global memory.
template <typename T> inline T *in_global(T *to, int line = __builtin_LINE()) {
    for (unsigned i = 0; i < block.shared_count; i++)
        if ((size_t)((char *)to - (char *)block.shared[i].memory) < block.shared[i].bytes)
            fail("a store to global memory at an address in shared memory", block.running, line, NULL, 0, 0);
    return to;
}

// ---- asynchronous copies: done by the wait, the latest moment allowed -----------------------------------------------
inline void fetch_begin(void *to, const void *from, unsigned bytes, int line) {
    Thread *t = &block.thread[block.running];
    aligned((char *)to, bytes, line), aligned((const char *)from, bytes, line);
    if (t->fetch_count == t->fetch_room) {
        t->fetch_room = 2 * t->fetch_room + 64;
        t->fetches = (Fetch *)realloc(t->fetches, t->fetch_room * sizeof(Fetch));
        if (!t->fetches) abort();
    }
    t->fetches[t->fetch_count++] = Fetch{to, from, bytes, t->groups};
    memset(to, 0xff, bytes);
}

inline void fetch_end(unsigned groups_left) {
    Thread *t = &block.thread[block.running];
    unsigned kept = 0;
    for (unsigned i = 0; i < t->fetch_count; i++) {
        const Fetch f = t->fetches[i];
        if (f.group + groups_left >= t->groups)
            t->fetches[kept++] = f;
        else if (f.from)
            memcpy(f.to, f.from, f.bytes);
        else
            memset(f.to, 0, f.bytes);
    }
    t->fetch_count = kept;
}

} // namespace cuda_on_cpu

#define ALIGNED(pointer, bytes) cuda_on_cpu::aligned(pointer, bytes, __LINE__)

// ---- the calls of llmc/ops/cuda/graph.cuh ---------------------------------------------------------------------------
typedef cuda_on_cpu::Stream *cudaStream_t;
typedef cuda_on_cpu::Graph *cudaGraph_t, *cudaGraphExec_t;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum { cudaStreamNonBlocking = 1, cudaStreamCaptureModeRelaxed = 2 };
inline cudaStream_t launch_stream;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, int) {
    *stream = new cuda_on_cpu::Stream{};
    return cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
    if (!stream || stream->recorded) return cudaErrorInvalidValue;
    stream->recorded = new cuda_on_cpu::Graph;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->recorded, stream->recorded = NULL;
    return *graph ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, int) {
    if (getenv("GRAPH_FAULT")) return cudaErrorInvalidValue;
    *made = new cuda_on_cpu::Graph(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    cuda_on_cpu::graph_launches++;
    for (const auto &work : graph->work) work();
    return cudaSuccess;
}

// ---- functions for kernels ------------------------------------------------------------------------------------------
#define LAUNCH(kernel, grid, threads, bytes) LAUNCH_CLUSTERS(kernel, 1, grid, threads, bytes)
#define LAUNCH_CLUSTERS(kernel, size, grid, threads, bytes)                                                            \
    cuda_on_cpu::launch(#kernel, kernel, size, grid, threads, bytes, launch_stream)
#define SHARED(T, name, count)                                                                                         \
    static const char name##_site = 0;                                                                                 \
    T *const name = (T *)cuda_on_cpu::shared_array(&name##_site, (count) * sizeof(T))
#define DYNAMIC_SHARED(T, name)                                                                                        \
    static const char name##_site = 0;                                                                                 \
    T *const name = (T *)cuda_on_cpu::shared_array(&name##_site, cuda_on_cpu::block.dynamic_bytes)

inline void __syncthreads(int line = __builtin_LINE()) { cuda_on_cpu::barrier(line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    cuda_on_cpu::warp_meet(mask, "", 0, line, NULL);
}

// width: a power of two; `from` counts lanes of this lane's segment, which has as many
template <typename T>
inline T __shfl_sync(unsigned mask, T value, unsigned from, unsigned width = 32, int line = __builtin_LINE()) {
    const unsigned lane = cuda_on_cpu::block.running % 32;
    return cuda_on_cpu::shuffle(mask, value, lane / width * width + from % width, line);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, unsigned bits, int line = __builtin_LINE()) {
    return cuda_on_cpu::shuffle(mask, value, (cuda_on_cpu::block.running % 32) ^ bits, line);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float fast_exp2(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

template <int BYTES> inline void fetch(void *to, const void *from, bool valid, int line = __builtin_LINE()) {
    cuda_on_cpu::fetch_begin(to, valid ? from : NULL, BYTES, line);
}
inline void fetch_commit() { cuda_on_cpu::block.thread[cuda_on_cpu::block.running].groups++; }
template <int LEFT> inline void fetch_wait() { cuda_on_cpu::fetch_end(LEFT); }

#endif
