/*
A fence around device memory, for tests on the CPU: ops_fenced() is the linked op set, except that everything obtained
through its allocate is inaccessible (mprotect) but for the time an op runs. A host dereference of device memory, which a
GPU build would not survive, faults here on any machine. The reverse is caught too: a tensor that lies outside device
memory, and a copy whose host side lies inside, end the program with a line that names the op. A GPU needs no help to make its
memory inaccessible; there only the latter is checked.

FENCED_OPS has one row for every op of struct Ops; without its row an op does not compile.
*/
#ifndef TEST_FENCE_H
#define TEST_FENCE_H
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>
#include "llmc/ops/ops.h"
#include "llmc/base/utils.h"

// ---- what is fenced -------------------------------------------------------------------------------------------------
enum { FENCE_BLOCKS = 256 };

static struct {
    char *begin[FENCE_BLOCKS];
    size_t bytes[FENCE_BLOCKS]; // whole pages
    size_t blocks;
    const char *op; // that is running; NULL: the fence is closed
} fence;

static int fence_on_gpu(void) {
#ifdef CUDA_ON_CPU
    return 0;
#else
    return !strcmp(ops_device->name, "cuda");
#endif
}

static void fence_protect(int protection) {
    if (fence_on_gpu()) return;
    for (size_t i = 0; i < fence.blocks; i++)
        if (mprotect(fence.begin[i], fence.bytes[i], protection) != 0)
            die("the fence around device memory: mprotect of %zu bytes: %s", fence.bytes[i], strerror(errno));
}

static const char *fence_open(const char *op) {
    if (fence.op) die("op %s was called from within op %s", op, fence.op);
    fence_protect(PROT_READ | PROT_WRITE);
    return fence.op = op;
}

static void fence_close(const char **op) {
    fence_protect(PROT_NONE);
    fence.op = *op = NULL;
}

// Opens the fence until the end of the enclosing block.
#define FENCE_OPEN(op) const char *opened __attribute__((cleanup(fence_close), unused)) = fence_open(op)

// The block that holds the byte at `pointer`, or FENCE_BLOCKS.
static size_t fence_block(const void *pointer) {
    size_t i;
    for (i = 0; i < fence.blocks; i++)
        if ((uintptr_t)pointer - (uintptr_t)fence.begin[i] < fence.bytes[i]) break;
    return i < fence.blocks ? i : FENCE_BLOCKS;
}

// tensor[count], of which `names` is "(out, x, w)"
static void fence_tensors(const char *op, const char *names, const void *const *tensor, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (tensor[i] && fence_block(tensor[i]) == FENCE_BLOCKS)
            die("%s: tensor %zu of %s is not in device memory", op, i + 1, names);
}

static void fence_host(const char *op, const char *name, const void *memory) {
    if (fence_block(memory) != FENCE_BLOCKS) die("%s: %s is device memory, not host memory", op, name);
}

// ---- the ops ----------------------------------------------------------------------------------------------------------
// OP(type, name, parameters, arguments, tensors): opens the fence; the tensors must be device memory or NULL
// HOST(type, name, parameters, arguments): touches no tensor, the fence stays closed
// OWN(name): has a wrapper of its own, below
// clang-format off
#define FENCED_OPS(OP, HOST, OWN) \
    OWN(allocate) \
    OWN(release) \
    HOST(size_t, memory_peak, (void), ()) \
    HOST(size_t, memory_available, (void), ()) \
    OWN(copy_in) \
    OWN(copy_out) \
    OP(void, copy, (void *out, const void *in, size_t bytes), (out, in, bytes), (out, in)) \
    OP(void, zero, (void *out, size_t bytes), (out, bytes), (out)) \
    HOST(void, finish, (void), ()) \
    HOST(void *, host_allocate, (size_t bytes), (bytes)) \
    HOST(void, host_release, (void *memory, size_t bytes), (memory, bytes)) \
    HOST(size_t, host_available, (size_t planned), (planned)) \
    OWN(store) \
    OWN(load) \
    OP(void, await_transfer, (int64_t ticket), (ticket), (NULL)) \
    HOST(void, repeat, (double factor), (factor)) \
    OP(void, embedding_forward, (Stored *out, const int32_t *tokens, const int32_t *position, const Stored *wte, \
        const Stored *wpe, size_t n, size_t C, double scale), \
        (out, tokens, position, wte, wpe, n, C, scale), (out, tokens, position, wte, wpe)) \
    OP(void, embedding_backward, (void *dw, DType dw_type, const Stored *dx, const int32_t *index, size_t N, \
        size_t rows, size_t C, double scale, Summed *scratch), \
        (dw, dw_type, dx, index, N, rows, C, scale, scratch), (dw, dx, index, scratch)) \
    HOST(size_t, embedding_backward_scratch, (size_t N, size_t rows, size_t C), (N, rows, C)) \
    OP(void, scatter_rows, (Stored *out, const Stored *in, const int32_t *row, size_t n, size_t width), \
        (out, in, row, n, width), (out, in, row)) \
    OP(void, norm_forward, (Stored *out, const Stored *x, const Stored *w, const Stored *b, const Stored *residual, \
        size_t n, size_t C, Norm norm), \
        (out, x, w, b, residual, n, C, norm), (out, x, w, b, residual)) \
    OP(void, norm_backward, (Stored *dx, Summed *dw, Summed *db, const Stored *dout, const Stored *x, \
        const Stored *w, size_t n, size_t C, Norm norm, int accumulate, Summed *scratch), \
        (dx, dw, db, dout, x, w, n, C, norm, accumulate, scratch), (dx, dw, db, dout, x, w, scratch)) \
    HOST(size_t, norm_backward_scratch, (size_t n, size_t C), (n, C)) \
    OP(void, linear_forward, (Stored *out, const Stored *x, const Stored *weight, const Stored *bias, \
        const Stored *residual, size_t n, size_t C, size_t OC), \
        (out, x, weight, bias, residual, n, C, OC), (out, x, weight, bias, residual)) \
    OP(void, linear_backward_input, (Stored *dx, const Stored *dout, const Stored *weight, size_t n, size_t C, \
        size_t OC, int accumulate), \
        (dx, dout, weight, n, C, OC, accumulate), (dx, dout, weight)) \
    OP(void, linear_backward_weight, (Summed *dweight, Summed *dbias, const Stored *dout, const Stored *x, size_t n, \
        size_t C, size_t OC), \
        (dweight, dbias, dout, x, n, C, OC), (dweight, dbias, dout, x)) \
    OP(void, adapter_forward, (Stored *out, size_t width, size_t column, const Stored *h, const Stored *b, size_t n, \
        size_t r, size_t OC), \
        (out, width, column, h, b, n, r, OC), (out, h, b)) \
    OP(void, adapter_backward, (Stored *dh, Summed *db, const Stored *dout, size_t width, size_t column, \
        const Stored *h, const Stored *b, size_t n, size_t r, size_t OC), \
        (dh, db, dout, width, column, h, b, n, r, OC), (dh, db, dout, h, b)) \
    OP(void, scale, (Stored *x, double factor, size_t count), (x, factor, count), (x)) \
    OP(void, dropout, (Stored *out, const Stored *in, size_t n, size_t width, size_t first_row, double rate, \
        uint64_t seed, int accumulate), \
        (out, in, n, width, first_row, rate, seed, accumulate), (out, in)) \
    OP(void, rope_forward, (Stored *x, const int32_t *position, const float *inverse_frequency, size_t n, size_t heads, \
        size_t HD), \
        (x, position, inverse_frequency, n, heads, HD), (x, position, inverse_frequency)) \
    OP(void, rope_backward, (Stored *dx, const int32_t *position, const float *inverse_frequency, size_t n, \
        size_t heads, size_t HD), \
        (dx, position, inverse_frequency, n, heads, HD), (dx, position, inverse_frequency)) \
    OP(void, attention_forward, (void *out, Summed *lse, const Stored *q, const Stored *k, const Stored *v, \
        const AttentionShape *shape, Summed *scratch), \
        (out, lse, q, k, v, shape, scratch), \
        (out, lse, q, scratch, shape->partial ? NULL : k, shape->partial ? NULL : v)) \
    OP(void, attention_backward, (void *dq, Summed *dk, Summed *dv, const Stored *dout, const Stored *out, \
        const Stored *q, const Stored *k, const Stored *v, const Summed *lse, const AttentionShape *shape, \
        Summed *scratch), \
        (dq, dk, dv, dout, out, q, k, v, lse, shape, scratch), \
        (dq, dout, out, q, lse, scratch, shape->partial ? NULL : dk, shape->partial ? NULL : dv, \
         shape->partial ? NULL : k, shape->partial ? NULL : v)) \
    HOST(size_t, attention_scratch, (size_t n, size_t NH, size_t NKV, size_t HD), (n, NH, NKV, HD)) \
    OP(void, activation_forward, (Stored *out, const Stored *in, ActivationKind kind, size_t n, size_t FF), \
        (out, in, kind, n, FF), (out, in)) \
    OP(void, activation_backward, (Stored *din, const Stored *dout, const Stored *in, ActivationKind kind, size_t n, \
        size_t FF), (din, dout, in, kind, n, FF), (din, dout, in)) \
    OP(void, logprob, (Summed *logp, Summed *entropy, Stored *logits, const int32_t *targets, const Summed *weight, \
        size_t n, size_t V, double temperature), \
        (logp, entropy, logits, targets, weight, n, V, temperature), (logp, entropy, logits, targets, weight)) \
    OP(void, round_sums, (Stored *out, const Summed *in, size_t count), (out, in, count), (out, in)) \
    OP(void, gradient_add, (void *gradient, DType type, const Summed *in, size_t count), \
        (gradient, type, in, count), (gradient, in)) \
    OP(double, sum_of_squares, (const void *x, DType type, size_t count), (x, type, count), (x)) \
    OP(void, adamw, (Stored *w, float *master, const void *gradient, DType gradient_type, void *m, void *v, \
        DType moment_type, size_t count, const AdamW *step), \
        (w, master, gradient, gradient_type, m, v, moment_type, count, step), (w, master, gradient, m, v)) \
    OP(int64_t, reduce_scatter, (RankGroup group, Summed *x, size_t count, size_t unit), (group, x, count, unit), (x)) \
    OP(int64_t, all_gather, (RankGroup group, void *x, size_t count, size_t unit, size_t size), \
        (group, x, count, unit, size), (x)) \
    OP(int64_t, exchange, (RankGroup group, const Message *messages, size_t n), (group, messages, n), (NULL)) \
    OP(void, await, (int64_t ticket), (ticket), (NULL))
// clang-format on

// ---- their wrappers -----------------------------------------------------------------------------------------------------
static void *fenced_allocate(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = bytes / page + (bytes % page != 0 || bytes == 0);
    char *memory = (char *)ops_device->allocate(bytes);
    if (!memory) return NULL;
    if (!fence_on_gpu() && (uintptr_t)memory % page)
        die("the fence around device memory: an allocation does not begin with a page");
    if (fence.blocks == FENCE_BLOCKS) die("the fence around device memory: more than %d allocations", FENCE_BLOCKS);
    fence.begin[fence.blocks] = memory, fence.bytes[fence.blocks++] = fence_on_gpu() ? bytes + !bytes : pages * page;
    fence_protect(PROT_NONE);
    return memory;
}

static void fenced_release(void *memory, size_t bytes) {
    size_t block = fence_block(memory);
    if (memory && (block == FENCE_BLOCKS || fence.begin[block] != memory)) die("release: this was never allocated");
    if (memory) {
        fence.blocks--;
        fence.begin[block] = fence.begin[fence.blocks], fence.bytes[block] = fence.bytes[fence.blocks];
    }
    ops_device->release(memory, bytes);
}

static void fenced_copy_in(void *device, const void *host, size_t bytes) {
    const void *tensor = device;
    FENCE_OPEN("copy_in");
    fence_tensors("copy_in", "(device)", &tensor, 1);
    fence_host("copy_in", "the source", host);
    ops_device->copy_in(device, host, bytes);
}

static void fenced_copy_out(void *host, const void *device, size_t bytes) {
    FENCE_OPEN("copy_out");
    fence_tensors("copy_out", "(device)", &device, 1);
    fence_host("copy_out", "the destination", host);
    ops_device->copy_out(host, device, bytes);
}

static int64_t fenced_store(void *host, const void *device, size_t bytes) {
    FENCE_OPEN("store");
    fence_tensors("store", "(device)", &device, 1);
    fence_host("store", "the destination", host);
    return ops_device->store(host, device, bytes);
}

static int64_t fenced_load(void *device, const void *host, size_t bytes) {
    const void *tensor = device;
    FENCE_OPEN("load");
    fence_tensors("load", "(device)", &tensor, 1);
    fence_host("load", "the source", host);
    return ops_device->load(device, host, bytes);
}

#define FENCE_LIST(...)                                                                                                \
    { __VA_ARGS__ }
#define FENCED_OP(type, name, parameters, arguments, tensors)                                                          \
    static type fenced_##name parameters {                                                                             \
        const void *const tensor[] = FENCE_LIST tensors;                                                               \
        FENCE_OPEN(#name);                                                                                             \
        fence_tensors(#name, #tensors, tensor, sizeof(tensor) / sizeof(tensor[0]));                                    \
        return ops_device->name arguments;                                                                             \
    }
#define FENCED_HOST(type, name, parameters, arguments)                                                                 \
    static type fenced_##name parameters { return ops_device->name arguments; }
#define FENCED_OWN(name)
FENCED_OPS(FENCED_OP, FENCED_HOST, FENCED_OWN)

// ---- the op set -----------------------------------------------------------------------------------------------------------
#define FENCE_OP_ROW(type, name, ...) FENCE_ROW_##name,
#define FENCE_OWN_ROW(name)           FENCE_ROW_##name,
enum { FENCED_OPS(FENCE_OP_ROW, FENCE_OP_ROW, FENCE_OWN_ROW) FENCE_ROWS };
#define FENCE_SLOTS ((sizeof(Ops) - offsetof(Ops, allocate)) / sizeof(void (*)(void)))
_Static_assert(FENCE_ROWS == FENCE_SLOTS, "FENCED_OPS has one row for every op of struct Ops");

static const Ops *ops_fenced(void) {
    static Ops ops;
#define FENCE_OP_SET(type, name, ...) ops.name = fenced_##name;
#define FENCE_OWN_SET(name)           ops.name = fenced_##name;
    ops = *ops_device;
    FENCED_OPS(FENCE_OP_SET, FENCE_OP_SET, FENCE_OWN_SET)
    return &ops;
}

#endif
