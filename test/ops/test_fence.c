/*
Checks the fence: a child that dereferences device memory outside an op dies, one that uses ops does not; host memory
passed as a tensor is named. Training runs inside it in test_places.c, generation in test_sampler.c. Then the arena's
red zones.
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "fence.h"
#include "llmc/ops/arena.h"

enum { FLOATS = 5000 }; // more than a page, not a whole number of pages

// ---- the fence itself -----------------------------------------------------------------------------------------------
TEST(every_op_is_wrapped) {
    const Ops *ops = ops_fenced();
    for (size_t slot = 0; slot < FENCE_SLOTS; slot++) {
        const size_t offset = offsetof(Ops, allocate) + slot * sizeof(void (*)(void));
        void (*original)(void), (*wrapped)(void);
        memcpy(&original, (const char *)ops_device + offset, sizeof(original));
        memcpy(&wrapped, (const char *)ops + offset, sizeof(wrapped));
        if (!original) test_fail("op %zu of the linked op set is missing", slot);
        if (wrapped == original) test_fail("op %zu is not wrapped", slot);
    }
    assert_int_equal(ops->stored, ops_device->stored);
    assert_int_equal(ops->summed, ops_device->summed);
}

typedef struct {
    const Ops *ops;
    volatile float *device;
    size_t index;
    float *host;
} Access;

static void read_device(const void *context) {
    const Access *access = (const Access *)context;
    exit(access->device[access->index] == 7.0f ? 0 : 3);
}

static void write_device(const void *context) {
    const Access *access = (const Access *)context;
    access->device[access->index] = 8.0f;
}

static void read_by_op(const void *context) {
    const Access *access = (const Access *)context;
    access->ops->copy_out(access->host, (const void *)(uintptr_t)access->device, FLOATS * sizeof(float));
    exit(access->host[access->index] == 7.0f ? 0 : 3);
}

static void host_as_tensor(const void *context) {
    const Access *access = (const Access *)context;
    access->ops->gradient_add(access->host, DTYPE_FP32, NULL, 0);
}

static void device_as_source(const void *context) {
    const Access *access = (const Access *)context;
    access->ops->copy_in((void *)(uintptr_t)access->device, (const char *)(uintptr_t)access->device + 64, 16);
}

static void expect_code(ChildBody body, const Access *access, int code) {
    const Child *child = run_child(body, access);
    if (child->code != code) test_fail("the child ended with %d, expected %d: %s", child->code, code, child->err);
}

static void fill(const Ops *ops, void *device, float value) {
    float host[FLOATS];
    for (size_t i = 0; i < FLOATS; i++) host[i] = value;
    ops->copy_in(device, host, sizeof(host));
}

TEST(outside_an_op_nothing_is_readable) {
    static const size_t indices[] = {0, 1, 1023, 1024, FLOATS - 1};
    static float host[FLOATS];
    const Ops *ops = ops_fenced();
    void *fenced = ops->allocate(FLOATS * sizeof(float)), *other = ops->allocate(1);
    void *plain = ops_device->allocate(FLOATS * sizeof(float));
    Access access = {ops, (volatile float *)fenced, 0, host};
    expect_code(write_device, &access, 1000 + SIGSEGV); // before any op
    fill(ops, fenced, 7.0f);
    fill(ops_device, plain, 7.0f);
    for (size_t i = 0; i < COUNT_OF(indices); i++) {
        access.index = indices[i];
        access.device = (volatile float *)fenced;
        test_case("element %zu", indices[i]);
        expect_code(read_device, &access, 1000 + SIGSEGV);
        expect_code(write_device, &access, 1000 + SIGSEGV);
        expect_code(read_by_op, &access, 0);
        access.device = (volatile float *)plain; // the fence kills, not the child
        expect_code(read_device, &access, 0);
        expect_code(write_device, &access, 0);
    }
    access.device = (volatile float *)other, access.index = 0;
    expect_code(read_device, &access, 1000 + SIGSEGV);
    ops->release(fenced, FLOATS * sizeof(float));
    expect_code(read_device, &access, 1000 + SIGSEGV); // its neighbour is released, its fence stays
    ops->release(other, 1);
    ops_device->release(plain, FLOATS * sizeof(float));
    assert_int_equal(fence.blocks, 0);
}

TEST(host_and_device_are_not_confused) {
    static float host[FLOATS];
    const Ops *ops = ops_fenced();
    void *device = ops->allocate(FLOATS * sizeof(float));
    Access access = {ops, (volatile float *)device, 0, host};
    expect_refused(host_as_tensor, &access, EXIT_RUNTIME, "gradient_add: gradient is not in device");
    expect_refused(device_as_source, &access, EXIT_RUNTIME, "copy_in: the source is device memory");
    ops->release(device, FLOATS * sizeof(float));
}

// Runs an op with one transfer in flight, or already awaited.
enum { EARLY = FLOATS / 2 * sizeof(float) };
typedef struct {
    const char *what, *words; // words NULL: no error
    int load, awaited;
    size_t from; // first byte that the op touches; the tensor's first half is in transfer
    int writes;
} Early;

static void early_op(const void *context) {
    const Early *e = (const Early *)context;
    const Ops *ops = ops_fenced();
    char *device = (char *)ops->allocate(3 * EARLY), *place = (char *)ops->host_allocate(EARLY);
    const int64_t ticket = e->load ? ops->load(device, place, EARLY) : ops->store(place, device, EARLY);
    if (e->awaited) ops->await_transfer(ticket);
    if (e->writes)
        ops->zero(device + e->from, EARLY);
    else
        ops->copy(device + 2 * EARLY, device + e->from, EARLY);
    ops->release(device, 3 * EARLY), ops->host_release(place, EARLY);
}

TEST(ops_that_come_too_early_are_named) {
    static const Early cases[] = {
        {"what is loaded is read", "copy: in is what a load under way changes; it was not awaited", 1, 0, EARLY - 1, 0},
        {"and written", "zero: out is what a load under way changes", 1, 0, 0, 1},
        {"what is stored is written", "zero: out is what a store under way reads", 0, 0, EARLY - 1, 1},
        {"and read", NULL, 0, 0, 0, 0},
        {"behind what is loaded", NULL, 1, 0, EARLY, 0},
        {"behind what is stored", NULL, 0, 0, EARLY, 1},
        {"after the load", NULL, 1, 1, 0, 1},
        {"after the store", NULL, 0, 1, 0, 1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s", cases[i].what);
        if (cases[i].words)
            expect_refused(early_op, &cases[i], EXIT_RUNTIME, cases[i].words);
        else
            early_op(&cases[i]);
    }
    assert_int_equal(under_way.count, 0);
}

// Places hold no tensors.
typedef struct {
    const char *words;
    int disk, store;
} Mistaken;

static void mistaken_op(const void *context) {
    const Mistaken *m = (const Mistaken *)context;
    const Ops *ops = ops_fenced();
    char *device = (char *)ops->allocate(64);
    char *place = (char *)(m->disk ? ops->disk_allocate(scratch_folder(), 64) : ops->host_allocate(64));
    if (m->store)
        ops->store(place, place, 32);
    else
        ops->copy(device, place, 64);
}

static void deref_disk(const void *context) {
    exit(((volatile char *)ops_fenced()->disk_allocate((const char *)context, 64))[7]);
}

TEST(places_are_not_taken_for_the_device) {
    static const Mistaken cases[] = {{"copy: in is not in device memory", 0, 0},
                                     {"copy: in is not in device memory", 1, 0},
                                     {"store: device is not in device memory", 0, 1}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_refused(mistaken_op, &cases[i], EXIT_RUNTIME, cases[i].words);
    assert_int_equal(run_child(deref_disk, scratch_folder())->code, 1000 + SIGSEGV);
}

// ---- red zones of the arena -----------------------------------------------------------------------------------------
// Pushes two regions and writes the first up to *bytes; then pushes and pops a third.
static void write_region(const void *bytes) {
    Arena arena;
    char *memory = (char *)ops_device->allocate(8 * ARENA_ALIGNMENT);
    setenv("STREAMBP_RED_ZONES", "1", 1);
    arena_init(&arena, memory, 8 * ARENA_ALIGNMENT);
    arena_watch(&arena, ops_device->copy_in, ops_device->copy_out);
    char *first = (char *)arena_push(&arena, SHARE_WORKSPACE, "first", ARENA_ALIGNMENT, 1);
    char *second = (char *)arena_push(&arena, SHARE_WORKSPACE, "second", ARENA_ALIGNMENT, 1);
    const size_t mark = arena_mark(&arena);
    ops_device->zero(first, *(const size_t *)bytes);
    ops_device->zero(second, ARENA_ALIGNMENT);
    arena_push(&arena, SHARE_WORKSPACE, "third", 1, 1);
    arena_pop(&arena, mark);
    unsetenv("STREAMBP_RED_ZONES");
    ops_device->release(memory, 8 * ARENA_ALIGNMENT);
}

TEST(red_zones_see_an_overrun) {
    const size_t within = ARENA_ALIGNMENT, beyond = within + 1;
    write_region(&within);
    expect_refused(write_region, &beyond, EXIT_FAILURE, "first: byte 0 after its 256 bytes was overwritten");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
