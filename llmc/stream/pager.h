/*
Pages: tensors in host memory or in a file on a disk (arena.h) pass through slots of device memory, because ops work on
the device alone. A page is a group, a layer, a chunk or a slice: one tensor or several.

    page_ask      gives a slot to a page, once the slot's last store is done
    page_load     starts loading a tensor of the page, in pieces, while ops run
    page_await    waits for the slot's loads
    page_store    starts storing a tensor to its home, while ops run
    page_finish   waits for the slot's stores

Bytes are counted by phase and way. The dry run counts a visit `times` times, so bytes moved are bytes planned.
*/
#ifndef LLMC_PAGER_H
#define LLMC_PAGER_H
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

typedef enum { PHASE_FORWARD, PHASE_BACKWARD, PHASE_UPDATE, PHASES } Phase;
typedef enum { WAY_HOST_OUT, WAY_HOST_IN, WAY_DISK_OUT, WAY_DISK_IN, WAYS } Way; // out: from the device

typedef struct {
    Phase phase; // the current phase
    double bytes[PHASES][WAYS];
} Moved;

#ifndef PAGE_PIECE
#define PAGE_PIECE ((size_t)256 << 20) // most bytes of one transfer: a layer of experts has gigabytes
#endif

// The home of a kind of pages, and how often the dry run counts a visit
typedef struct {
    const Ops *ops;
    Moved *moved;
    Place place;
    double times;
} Pager;

typedef struct {
    size_t page;          // the page in the slot or in flight to it; valid if asked
    int asked;            // from page_ask until its user is done with the page
    int64_t ticket[WAYS]; // of the last transfer each way
    int64_t collective;   // of the page's last collective between ranks
} PageSlot;

static Way page_way(Pager p, int in) { return (Way)((p.place == PLACE_DISK ? WAY_DISK_OUT : WAY_HOST_OUT) + in); }

static void page_move(Pager p, PageSlot *slot, int in, void *device, void *home, size_t bytes) {
    const Way way = page_way(p, in);
    p.moved->bytes[p.moved->phase][way] += p.times * (double)bytes;
    for (size_t done = 0, n; done < bytes; done += n) {  // awaiting the last piece awaits all
        void *there = (void *)((uintptr_t)home + done);  // NOLINT(performance-no-int-to-ptr): in a plan it may be NULL
        void *here = (void *)((uintptr_t)device + done); // NOLINT(performance-no-int-to-ptr)
        n = min_size(bytes - done, PAGE_PIECE);
        slot->ticket[way] = in ? p.ops->load(here, there, n) : p.ops->store(there, here, n);
    }
}

static void page_load(Pager p, PageSlot *slot, void *device, void *home, size_t bytes) {
    page_move(p, slot, 1, device, home, bytes);
}

static void page_store(Pager p, PageSlot *slot, void *home, void *device, size_t bytes) {
    page_move(p, slot, 0, device, home, bytes);
}

static void page_wait(const Ops *ops, const PageSlot *slot, int in) {
    for (int way = in; way < WAYS; way += 2)
        if (slot->ticket[way]) ops->await_transfer(slot->ticket[way]);
}

static void page_finish(const Ops *ops, const PageSlot *slot) { page_wait(ops, slot, 0); }
static void page_await(const Ops *ops, const PageSlot *slot) { page_wait(ops, slot, 1); }

// Gives the slot to a page. Returns 1 if the caller has to load the page, 0 if it was asked for before.
static int page_ask(const Ops *ops, PageSlot *slot, size_t page) {
    if (slot->asked && slot->page == page) return 0;
    page_finish(ops, slot);
    slot->page = page, slot->asked = 1;
    return 1;
}

#endif
