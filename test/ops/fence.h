/*
A fence around device memory, for tests on the CPU. ops_fenced() is the linked op set, except that memory from its
allocate is inaccessible (mprotect) unless an op runs. A host dereference of device memory, fatal on a GPU, faults here
on any machine. The reverse ends the program with a line that names the op: a tensor outside device memory, or a copy
whose host side is inside. On a GPU, where device memory is inaccessible anyway, only the latter is checked.

An op that comes too early ends it, too: it writes to the source of a transfer in flight, or touches its destination,
even if the transfer happens to be done.
*/
#ifndef TEST_FENCE_H
#define TEST_FENCE_H
#include <setjmp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>
#include "test/base/testing.h"
#include "llmc/ops/ops.h"
#include "llmc/base/utils.h"

// ---- fenced memory --------------------------------------------------------------------------------------------------
// Closing the fence takes longer than most ops of tests: after the first ops of new memory, only every seventh op
// closes it.
enum { FENCE_BLOCKS = 256, FENCE_FIRST = 100, FENCE_EVERY = 7 };

static struct {
    char *begin[FENCE_BLOCKS];
    size_t bytes[FENCE_BLOCKS]; // whole pages
    size_t blocks;
    int open;       // accessible
    int always;     // closes after every op
    size_t recent;  // ops since an allocation
    const char *op; // running; NULL: none
    size_t count;   // ops so far, except waits for transfers
    size_t reads;   // of these copy_out: the host waits for the device
} fence;

static int fence_on_gpu(void) {
#ifdef CUDA_ON_CPU
    return 0;
#else
    return !strcmp(ops_device->name, "cuda");
#endif
}

static void fence_protect(int protection) {
    const int open = protection != PROT_NONE;
    if (fence_on_gpu() || (open && fence.open)) return;
    fence.open = open;
    for (size_t i = 0; i < fence.blocks; i++)
        if (mprotect(fence.begin[i], fence.bytes[i], protection) != 0)
            die("the fence around device memory: mprotect of %zu bytes: %s", fence.bytes[i], strerror(errno));
}

static const char *fence_open(const char *op) {
    if (fence.op) die("op %s was called from within op %s", op, fence.op);
    fence_protect(PROT_READ | PROT_WRITE);
    fence.count += strcmp(op, "await_transfer") != 0;
    fence.reads += !strcmp(op, "copy_out");
    return fence.op = op;
}

static void fence_close(const char **op) {
    const size_t count = fence.recent++;
    if (fence.always || count < FENCE_FIRST || count % FENCE_EVERY == 0) fence_protect(PROT_NONE);
    fence.op = *op = NULL;
}

// Opens the fence until the end of the enclosing block.
#define FENCE_OPEN(op) const char *opened __attribute__((cleanup(fence_close), unused)) = fence_open(op)

// Returns the block that holds the byte at `pointer`, or FENCE_BLOCKS.
static size_t fence_block(const void *pointer) {
    size_t i;
    for (i = 0; i < fence.blocks; i++)
        if ((uintptr_t)pointer - (uintptr_t)fence.begin[i] < fence.bytes[i]) break;
    return i < fence.blocks ? i : FENCE_BLOCKS;
}

// ---- transfers in flight --------------------------------------------------------------------------------------------
enum { FENCE_TRANSFERS = 1024 };

typedef struct {
    const void *to, *from;
    size_t bytes;
    int64_t ticket;
} FencedTransfer;

static struct {
    FencedTransfer of[FENCE_TRANSFERS];
    size_t count;
    jmp_buf *caught; // where to continue after an op that comes too early; NULL: ends the program
} under_way;

static int fence_overlaps(const void *a, size_t bytes, const void *b, size_t others) {
    return bytes && others && (uintptr_t)a < (uintptr_t)b + others && (uintptr_t)b < (uintptr_t)a + bytes;
}

// kind: of a new transfer, which is ordered after those of its kind; -1: none
static void fence_early(const char *name, const void *memory, size_t bytes, int written, int kind) {
    for (size_t i = 0; i < under_way.count; i++) {
        const FencedTransfer *t = &under_way.of[i];
        const int changed = fence_overlaps(memory, bytes, t->to, t->bytes);
        if (t->ticket % 4 == kind || (!changed && (!written || !fence_overlaps(memory, bytes, t->from, t->bytes))))
            continue;
        if (under_way.caught) {
            fence_close(&fence.op);
            longjmp(*under_way.caught, 1);
        }
        die("%s: %s is what a %s under way %s; it was not awaited", fence.op, name, t->ticket % 2 ? "load" : "store",
            changed ? "changes" : "reads");
    }
}

// Returns whether a transfer covered by this ticket is in flight.
static int fence_pending(int64_t ticket) {
    for (size_t i = 0; i < under_way.count; i++)
        if (under_way.of[i].ticket <= ticket && under_way.of[i].ticket % 4 == ticket % 4) return 1;
    return 0;
}

// Removes transfers that are done, or whose memory is released.
static void fence_settle(int64_t ticket, const void *memory, size_t bytes) {
    size_t left = 0;
    for (size_t i = 0; i < under_way.count; i++) {
        const FencedTransfer t = under_way.of[i];
        const int done = t.ticket <= ticket && t.ticket % 4 == ticket % 4;
        if (!done && !fence_overlaps(memory, bytes, t.to, t.bytes) && !fence_overlaps(memory, bytes, t.from, t.bytes))
            under_way.of[left++] = t;
    }
    under_way.count = left;
}

// ---- memory touched by an op ----------------------------------------------------------------------------------------
static void fence_tensor(const char *name, const void *tensor, size_t bytes, int written) {
    const size_t i = tensor ? fence_block(tensor) : 0;
    if (!tensor) return;
    if (i == FENCE_BLOCKS) die("%s: %s is not in device memory", fence.op, name);
    if (bytes > fence.bytes[i] - (size_t)((const char *)tensor - fence.begin[i]))
        die("%s: %s ends behind device memory", fence.op, name);
    fence_early(name, tensor, bytes, written, -1);
}

// Checks the rows of k, v, dk or dv that each span sees.
static void fence_keys(const char *name, const void *base, const AttentionShape *shape, size_t size, int written) {
    const size_t row = shape->NKV * shape->HD * size;
    for (size_t i = 0; i < shape->spans.count; i++) {
        const Span *span = &shape->spans.span[i];
        const size_t begin = max_size(first_key(span->document, span->begin, shape->spans.window), shape->keys.begin);
        const size_t end = min_size(span->end, shape->keys.end);
        if (begin < end) fence_tensor(name, (const char *)base + begin * row, (end - begin) * row, written);
    }
}

static void fence_host(const char *op, const char *name, const void *memory) {
    if (fence_block(memory) != FENCE_BLOCKS) die("%s: %s is device memory, not host memory", op, name);
}

// ---- the ops --------------------------------------------------------------------------------------------------------
#define WRITTEN(tensor)                                                                                                \
    _Generic(tensor, const void * : 0, const Stored * : 0, const Summed * : 0, const int32_t * : 0, const float * : 0, \
             const double * : 0, default : 1)
#define STORED                         dtype_size(ops_device->stored)
#define SUMMED                         dtype_size(ops_device->summed)
#define TENSOR(tensor, elements, size) fence_tensor(#tensor, tensor, (elements) * (size), WRITTEN(tensor));
#define PLACE(tensor, bytes)           fence_early(#tensor, tensor, bytes, WRITTEN(tensor), -1);
#define KEYS(tensor, size)             fence_keys(#tensor, tensor, shape, size, WRITTEN(tensor));
#define COUNT(...)
#define OP(type, op, parameters, arguments, touches)                                                                   \
    static type fenced_##op parameters {                                                                               \
        FENCE_OPEN(#op);                                                                                               \
        touches return ops_device->op arguments;                                                                       \
    }
#define OP_HOST(type, op, parameters, arguments) /* the fence stays closed */                                          \
    static type fenced_##op parameters { return ops_device->op arguments; }
#define OP_SCRATCH(op, parameters, arguments) OP_HOST(size_t, op, parameters, arguments)
#include "llmc/ops/op_list.h"
#undef STORED
#undef SUMMED

static void *allocate_fenced(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = bytes / page + (bytes % page != 0 || bytes == 0);
    char *memory = (char *)ops_device->allocate(bytes);
    if (!memory) return NULL;
    if (!fence_on_gpu() && (uintptr_t)memory % page)
        die("the fence around device memory: an allocation does not begin with a page");
    if (fence.blocks == FENCE_BLOCKS) die("the fence around device memory: more than %d allocations", FENCE_BLOCKS);
    fence.begin[fence.blocks] = memory, fence.bytes[fence.blocks++] = fence_on_gpu() ? bytes + !bytes : pages * page;
    fence_protect(PROT_NONE), fence.recent = 0, fence.always = all_cases();
    return memory;
}

static void release_fenced(void *memory, size_t bytes) {
    size_t block = fence_block(memory);
    if (memory && (block == FENCE_BLOCKS || fence.begin[block] != memory)) die("release: this was never allocated");
    if (memory) {
        fence.blocks--;
        fence.begin[block] = fence.begin[fence.blocks], fence.bytes[block] = fence.bytes[fence.blocks];
    }
    fence_settle(0, memory, bytes);
    ops_device->release(memory, bytes);
}
static void host_release_checked(void *memory, size_t bytes) {
    fence_settle(0, memory, bytes);
    ops_device->host_release(memory, bytes);
}
static void disk_release_checked(void *memory, size_t bytes) {
    fence_settle(0, memory, bytes);
    ops_device->disk_release(memory, bytes);
}

// Copies and transfers: the other side is in host memory or on disk.
#define WITH_HOST(type, op, parameters, arguments, side, other)                                                        \
    static type op##_checked parameters {                                                                              \
        fence_host(#op, side, other);                                                                                  \
        return fenced_##op arguments;                                                                                  \
    }
WITH_HOST(void, copy_in, (void *place, const void *host, size_t bytes), (place, host, bytes), "the source", host)
WITH_HOST(void, copy_out, (void *host, const void *place, size_t bytes), (host, place, bytes), "the destination", host)

static int64_t fence_ask(const char *op, int in, void *to, const void *from, size_t bytes) {
    FENCE_OPEN(op);
    fence_host(op, in ? "the source" : "the destination", in ? from : to);
    const int64_t ticket = in ? ops_device->load(to, from, bytes) : ops_device->store(to, from, bytes);
    const FencedTransfer t = {to, from, bytes, ticket};
    fence_tensor("device", in ? to : from, 0, 0);
    fence_early(in ? "device" : "place", to, bytes, 1, (int)(ticket % 4));
    fence_early(in ? "place" : "device", from, bytes, 0, (int)(ticket % 4));
    if (under_way.count == FENCE_TRANSFERS) die("the fence: more than %d transfers under way", FENCE_TRANSFERS);
    under_way.of[under_way.count++] = t;
    return ticket;
}
static int64_t store_checked(void *place, const void *device, size_t bytes) {
    return fence_ask("store", 0, place, device, bytes);
}
static int64_t load_checked(void *device, const void *place, size_t bytes) {
    return fence_ask("load", 1, device, place, bytes);
}
static void await_transfer_checked(int64_t ticket) {
    fence_settle(ticket, NULL, 0);
    fenced_await_transfer(ticket);
}

// ---- the op set -----------------------------------------------------------------------------------------------------
#define FENCE_SLOTS ((sizeof(Ops) - offsetof(Ops, allocate)) / sizeof(void (*)(void)))

static const Ops *ops_fenced(void) {
    static Ops ops;
    setenv("STREAMBP_TRANSFERS", "late", 1); // a thread would fault at the fence
    ops = *ops_device;
#define OP(type, name, ...) ops.name = fenced_##name;
#include "llmc/ops/op_list.h"
    ops.allocate = allocate_fenced, ops.release = release_fenced;
    ops.copy_in = copy_in_checked, ops.copy_out = copy_out_checked;
    ops.host_release = host_release_checked, ops.disk_release = disk_release_checked;
    ops.store = store_checked, ops.load = load_checked, ops.await_transfer = await_transfer_checked;
    return &ops;
}

#endif
