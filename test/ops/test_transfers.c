/*
Transfers between the device and its places, host memory and files on disk, through the linked op set: any range and
length, several in flight, in threads and late.
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "llmc/ops/ops.h"

enum { PLACE_BYTES = 9000001, DEVICE_BYTES = 5000003 }; // a file's piece is 4 MiB

typedef struct {
    int disk;
    char *device, *place;
    unsigned char *on_device, *in_place, *seen; // their contents; seen: room for both
} Places;

static void read_all(Places *p) {
    ops_device->copy_out(p->seen, p->device, DEVICE_BYTES);
    if (memcmp(p->seen, p->on_device, DEVICE_BYTES)) test_fail("the device holds other bytes");
    ops_device->copy_out(p->seen, p->place, PLACE_BYTES);
    if (memcmp(p->seen, p->in_place, PLACE_BYTES)) test_fail("the place holds other bytes");
}

static Places places_open(int disk) {
    Places p = {.disk = disk};
    p.device = (char *)ops_device->allocate(DEVICE_BYTES);
    p.place = (char *)(disk ? ops_device->disk_allocate(scratch_folder(), PLACE_BYTES)
                            : ops_device->host_allocate(PLACE_BYTES));
    assert_true(p.device && p.place);
    assert_true(ops_device->reaches(p.device, DEVICE_BYTES) && ops_device->reaches(p.place, PLACE_BYTES) == !disk);
    p.on_device = (unsigned char *)case_memory(DEVICE_BYTES), p.in_place = (unsigned char *)case_memory(PLACE_BYTES);
    p.seen = (unsigned char *)case_memory(PLACE_BYTES);
    for (size_t i = 0; i < PLACE_BYTES; i++) p.in_place[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < DEVICE_BYTES; i++) p.on_device[i] = (unsigned char)(i * 2246822519u >> 11);
    ops_device->copy_in(p.place, p.in_place, PLACE_BYTES);
    ops_device->copy_in(p.device, p.on_device, DEVICE_BYTES);
    read_all(&p);
    return p;
}

static void places_close(Places *p) {
    ops_device->release(p->device, DEVICE_BYTES);
    (p->disk ? ops_device->disk_release : ops_device->host_release)(p->place, PLACE_BYTES);
}

// Returns a range within [begin, end), mostly a short one.
static size_t range(size_t *begin, size_t end) {
    const size_t all = end - *begin, most = test_random_below(6) ? min_size(all, 20000) : all;
    const size_t bytes = 1 + test_random_below(most);
    *begin += test_random_below(all - bytes + 1);
    return bytes;
}

// Stores from one part of the device to one part of the place, and loads between the others, more than a queue holds.
static void transfers_cross(Places *p) {
    for (size_t round = 0; round < 12; round++) {
        const size_t place = 1 + test_random_below(PLACE_BYTES - 1), device = 1 + test_random_below(DEVICE_BYTES - 1);
        const size_t count = 1 + test_random_below(round % 3 ? 4 : 40);
        int64_t stored = 0, loaded = 0;
        for (size_t i = 0; i < count; i++) {
            size_t to = 0, from = 0, bytes = min_size(range(&to, place), range(&from, device));
            const int64_t store = ops_device->store(p->place + to, p->device + from, bytes);
            memcpy(p->in_place + to, p->on_device + from, bytes);
            to = device, from = place, bytes = min_size(range(&to, DEVICE_BYTES), range(&from, PLACE_BYTES));
            const int64_t load = ops_device->load(p->device + to, p->place + from, bytes);
            memcpy(p->on_device + to, p->in_place + from, bytes);
            assert_int_equal(store % 4, 2 * p->disk), assert_int_equal(load % 4, 2 * p->disk + 1);
            assert_true(store > stored && load > loaded);
            stored = store, loaded = load;
            if (i % 7 == 3) ops_device->await_transfer(stored);
        }
        ops_device->await_transfer(stored), ops_device->await_transfer(loaded);
        ops_device->await_transfer(stored), ops_device->await_transfer(0); // are done
        read_all(p);
    }
}

static void cross(int disk) {
    Places p = places_open(disk);
    transfers_cross(&p);
    places_close(&p);
}

TEST(transfers_to_the_host) { cross(0); }
TEST(transfers_to_disk) { cross(1); }
TEST(transfers_to_disk_when_awaited) {
    setenv("STREAMBP_TRANSFERS", "late", 1);
    cross(1);
    if (strcmp(ops_device->name, "nccl")) unsetenv("STREAMBP_TRANSFERS");
}

// An op that reads or changes memory too early is seen: transfers happen only when awaited.
TEST(transfers_are_late) {
    if (!strcmp(ops_device->name, "cuda")) test_skip("a GPU begins at once");
    setenv("STREAMBP_TRANSFERS", "late", 1);
    for (int disk = 0; disk < 2; disk++) {
        enum { BYTES = 10000 };
        unsigned char before[BYTES], after[BYTES];
        Places p = places_open(disk);
        test_case(disk ? "disk" : "host");
        memset(after, 0xa5, BYTES);
        const int64_t store = ops_device->store(p.place + 3, p.device + 5, BYTES);
        ops_device->copy_in(p.device + 5, after, BYTES);
        ops_device->await_transfer(store);
        ops_device->copy_out(before, p.place + 3, BYTES);
        assert_memory_equal(before, after, BYTES);
        const int64_t load = ops_device->load(p.device + 40001, p.place + 3, BYTES);
        ops_device->copy_out(before, p.device + 40001, BYTES);
        assert_memory_equal(before, p.on_device + 40001, BYTES);
        ops_device->await_transfer(load);
        ops_device->copy_out(before, p.device + 40001, BYTES);
        assert_memory_equal(before, after, BYTES);
        ops_device->load(p.device + 40001, p.place + 3, BYTES); // never awaited, of released memory
        places_close(&p);
        p = places_open(disk);
        ops_device->await_transfer(ops_device->load(p.device, p.place, 1));
        places_close(&p);
    }
    if (strcmp(ops_device->name, "nccl")) unsetenv("STREAMBP_TRANSFERS");
}

int main(int argc, char **argv) {
    if (!strcmp(ops_device->name, "nccl")) setenv("STREAMBP_TRANSFERS", "late", 1); // its calls are of one thread
    RUN_LISTED(argc, argv, scratch_remove);
}
