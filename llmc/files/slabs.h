/*
Walks all elements of a parameter table, a slab at a time. Between files and device memory everything passes through
fixed host buffers of a few MiB. One loop serves loading, initialising, converting, checkpoints and keys:

    for (Slabs s = slabs_of(model, SLABS_OF_PARAMETERS, parts, memory, "loading"); slabs_next(&s);) ...

Each rank walks its part of the table. Results depend neither on the number of ranks nor on the sharding.
*/
#ifndef LLMC_SLABS_H
#define LLMC_SLABS_H
#include "llmc/base/dtype.h"
#include "llmc/base/output.h"
#include "llmc/base/progress.h"
#include "llmc/model/model.h"
#include "llmc/ops/ops.h"
#include "llmc/ranks/dist.h"

// ---- staging --------------------------------------------------------------------------------------------------------
#define SLAB_ELEMENTS ((size_t)1 << 20)

typedef union {
    unsigned char bytes[SLAB_ELEMENTS * 8];
    double align;
} Slab;

static Slab staged_reformed; // converted values, not yet in their final order
static Slab staged;          // bytes to or from the device, in the device's type

// Returns the address of element `index` in an array of `type` at `base`.
static char *element_address(void *base, DType type, size_t index) { return (char *)base + index * dtype_size(type); }

static const char *element_address_const(const void *base, DType type, size_t index) {
    return (const char *)base + index * dtype_size(type);
}

// ---- the loop -------------------------------------------------------------------------------------------------------
static int holds_whole(Sharding s) { return s.ranks == 1; }

static Sharding parts_of_ranks(void) {
    Sharding parts = {dist_ranks(), dist_rank()};
    return parts;
}

// Returns the number of groups of a table.
static size_t group_count(const Model *table) { return table->config.num_hidden_layers + 2; }

static size_t group_at(const Model *table, size_t i) {
    return i == 0 ? GROUP_EMBEDDING : i + 1 == group_count(table) ? GROUP_HEAD : i - 1;
}

// Unit of a loop: a parameter, or this rank's part of a group
typedef enum { SLABS_OF_PARAMETERS, SLABS_OF_GROUPS } SlabUnit;

typedef struct {
    size_t first, count; // elements [first, first + count) of the table
    size_t offset;       // offset of element `first` in memory, in elements
    size_t parameter;    // SLABS_OF_PARAMETERS: index of the parameter, and element `first` counted from its start
    size_t begin;
    size_t most; // most elements of a slab
    // state of the loop itself
    const Model *table;
    SlabUnit unit;
    Sharding parts, memory;
    size_t next, left; // next unit; elements left in the current unit
    double done;
    Progress progress;
} Slabs;

// Begins a loop. parts: division of the table over ranks; memory: layout in memory, whole or divided like parts. label:
// text of the progress bar, or NULL
static Slabs slabs_of(const Model *table, SlabUnit unit, Sharding parts, Sharding memory, const char *label) {
    Slabs s = {0};
    s.table = table, s.unit = unit, s.parts = parts, s.memory = memory, s.most = SLAB_ELEMENTS;
    s.progress = progress_begin(label ? stderr : NULL, label ? label : "", 0, (double)sharding_elements(table, parts));
    return s;
}

// Begins a loop over a whole table on this process alone.
static Slabs slabs_of_all(const Model *table, const char *label) {
    return slabs_of(table, SLABS_OF_PARAMETERS, sharding_whole(), sharding_whole(), label);
}

// Goes to the next parameter or group; 0 after the last.
static int slabs_next_unit(Slabs *s) {
    const Model *table = s->table;
    if (s->next == (s->unit == SLABS_OF_GROUPS ? group_count(table) : table->parameter_count)) return 0;
    if (s->unit == SLABS_OF_GROUPS) {
        const size_t group = group_at(table, s->next);
        const Range own = sharded_range(table, s->parts, group);
        s->first = group_begin(table, group) + own.begin, s->left = own.count;
    } else {
        const Parameter *p = &table->parameters[s->next];
        const ParameterShard own = parameter_shard(table, s->parts, p);
        s->parameter = s->next, s->begin = own.first, s->first = p->offset + own.first, s->left = own.count;
    }
    s->offset = s->left ? element_offset(table, s->memory, s->first) : 0;
    s->next++;
    return 1;
}

static int slabs_next(Slabs *s) {
    s->done += (double)s->count;
    progress_update(&s->progress, s->done);
    s->first += s->count, s->offset += s->count, s->begin += s->count;
    s->count = 0;
    while (!s->left) {
        if (slabs_next_unit(s)) continue;
        progress_end(&s->progress);
        return 0;
    }
    s->count = min_size(s->left, s->most);
    s->left -= s->count;
    return 1;
}

// Copies the slab's elements, stored as `type` at `device`, to staging memory, converted to `as`.
static const void *slab_from_device(const Slabs *s, const Ops *ops, const void *device, DType type, DType as) {
    ops->copy_out(staged.bytes, element_address_const(device, type, s->offset), s->count * dtype_size(type));
    if (as == type) return staged.bytes;
    elements_convert(staged_reformed.bytes, as, staged.bytes, type, s->count);
    return staged_reformed.bytes;
}

// ---- a checksum of a table ------------------------------------------------------------------------------------------
// Computes the checksum of all elements of a table, stored in device memory as table->dtype, converted to `as`.
// Collective.
static uint64_t table_checksum(uint64_t before, const Model *table, Sharding memory, const Ops *ops, const void *device,
                               DType as, const char *what) {
    Checksum sum = {{0, 0}};
    for (Slabs s = slabs_of(table, SLABS_OF_GROUPS, parts_of_ranks(), memory, what); slabs_next(&s);) {
        const void *elements = slab_from_device(&s, ops, device, table->dtype, as);
        checksum_add(&sum, (uint64_t)s.first * dtype_size(as), elements, s.count * dtype_size(as));
    }
    checksum_join(&sum);
    return checksum_value(before, &sum, (uint64_t)table->elements * dtype_size(as));
}

#endif
