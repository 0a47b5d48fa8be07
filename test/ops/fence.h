/*
A fence around device memory, for tests on the CPU: ops_fenced() is the linked op set, except that everything obtained
through its allocate is inaccessible (mprotect) but for the time an op runs. A host dereference of device memory, which
a GPU build would not survive, faults here on any machine. The reverse is caught too: a tensor that lies outside device
memory, and a copy whose host side lies inside, end the program with a line that names the op. A GPU needs no help to
make its memory inaccessible; there only the latter is checked.
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

static void fence_tensor(const char *name, const void *tensor) {
    if (tensor && fence_block(tensor) == FENCE_BLOCKS) die("%s: %s is not in device memory", fence.op, name);
}

static void fence_host(const char *op, const char *name, const void *memory) {
    if (fence_block(memory) != FENCE_BLOCKS) die("%s: %s is device memory, not host memory", op, name);
}

// ---- the ops --------------------------------------------------------------------------------------------------------
#define TENSOR(tensor, elements, size) fence_tensor(#tensor, tensor);
#define PLACE(tensor, bytes)
#define KEYS(tensor, size)             fence_tensor(#tensor, shape->partial ? NULL : tensor);
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

static void *allocate_fenced(size_t bytes) {
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

static void release_fenced(void *memory, size_t bytes) {
    size_t block = fence_block(memory);
    if (memory && (block == FENCE_BLOCKS || fence.begin[block] != memory)) die("release: this was never allocated");
    if (memory) {
        fence.blocks--;
        fence.begin[block] = fence.begin[fence.blocks], fence.bytes[block] = fence.bytes[fence.blocks];
    }
    ops_device->release(memory, bytes);
}

// Copies and transfers: the other side is host memory, or on disk.
#define WITH_HOST(type, op, parameters, arguments, side, other)                                                        \
    static type op##_checked parameters {                                                                              \
        fence_host(#op, side, other);                                                                                  \
        return fenced_##op arguments;                                                                                  \
    }
WITH_HOST(void, copy_in, (void *place, const void *host, size_t bytes), (place, host, bytes), "the source", host)
WITH_HOST(void, copy_out, (void *host, const void *place, size_t bytes), (host, place, bytes), "the destination", host)
WITH_HOST(int64_t, store, (void *place, const void *device, size_t bytes), (place, device, bytes), "the destination",
          place)
WITH_HOST(int64_t, load, (void *device, const void *place, size_t bytes), (device, place, bytes), "the source", place)

// ---- the op set -----------------------------------------------------------------------------------------------------
#define FENCE_SLOTS ((sizeof(Ops) - offsetof(Ops, allocate)) / sizeof(void (*)(void)))

static const Ops *ops_fenced(void) {
    static Ops ops;
    setenv("STREAMBP_TRANSFERS", "late", 1); // a thread would meet the fence
    ops = *ops_device;
#define OP(type, name, ...) ops.name = fenced_##name;
#include "llmc/ops/op_list.h"
    ops.allocate = allocate_fenced, ops.release = release_fenced;
    ops.copy_in = copy_in_checked, ops.copy_out = copy_out_checked;
    ops.store = store_checked, ops.load = load_checked;
    return &ops;
}

#endif
