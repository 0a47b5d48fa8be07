/*
A table of parameters in device memory, gone through by all ranks together, each its part: for checksums, keys and
checkpoints, whose results depend neither on the number of ranks nor on who holds what. A part is a rank's portion of a
group (sharding.h), whether memory holds the whole table or that portion alone.
*/
#ifndef LLMC_TABLE_PARTS_H
#define LLMC_TABLE_PARTS_H
#include "llmc/ranks/dist.h"
#include "llmc/model/model.h"
#include "weights.h"

static int holds_whole(Sharding s) { return s.ranks == 1; }

static Sharding parts_of_ranks(void) {
    Sharding parts = {dist_ranks(), dist_rank()};
    return parts;
}

// Groups in the order of the table: i < group_count.
static size_t group_count(const Model *table) { return table->config.num_hidden_layers + 2; }

static size_t group_at(const Model *table, size_t i) {
    return i == 0 ? GROUP_EMBEDDING : i + 1 == group_count(table) ? GROUP_HEAD : i - 1;
}

// Elements [first, first + count) of the table, which lie in memory from element `place` on.
typedef struct {
    size_t first, count, place;
} TablePart;

// parts: over whom the group is dealt; memory: how it is held, whole or in these very parts.
static TablePart table_part(const Model *table, Sharding parts, Sharding memory, size_t group) {
    const Range own = shard_range(group_elements(table, group), SHARD_ALIGNMENT, parts.ranks, parts.rank);
    TablePart part;
    part.first = group_begin(table, group) + own.begin, part.count = own.count;
    part.place = holds_whole(memory) ? part.first : sharding_begin(table, memory, group);
    return part;
}

// Of all elements of a table, of model->dtype in device memory, as their values are in `as`. Collective.
static uint64_t table_checksum(uint64_t before, const Model *table, Sharding memory, const Ops *ops, const void *device,
                               DType as, const char *what) {
    Progress progress = progress_begin(stderr, what, 0, (double)table->elements);
    Checksum sum = {{0, 0}};
    size_t n;
    for (size_t i = 0; i < group_count(table); i++) {
        const TablePart part = table_part(table, parts_of_ranks(), memory, group_at(table, i));
        for (size_t begin = 0; begin < part.count; begin += n) {
            n = min_size(part.count - begin, SLAB_ELEMENTS);
            ops->copy_out(staged.bytes, element_address_const(device, table->dtype, part.place + begin),
                          n * dtype_size(table->dtype));
            if (as != table->dtype) elements_convert(staged_reformed.bytes, as, staged.bytes, table->dtype, n);
            checksum_add(&sum, (uint64_t)(part.first + begin) * dtype_size(as),
                         as != table->dtype ? staged_reformed.bytes : staged.bytes, n * dtype_size(as));
            progress_update(&progress, (double)(part.first + begin + n));
        }
    }
    progress_end(&progress);
    checksum_join(&sum);
    return checksum_value(before, &sum, (uint64_t)table->elements * dtype_size(as));
}

#endif
