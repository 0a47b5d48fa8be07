/*
Where AdamW's moments in 8 bits lie (--moments int8; the arithmetic is the op's). Each moment has two tensors: a byte of
code for every element of the table, sharded like the weights, and floats:

    a parameter of MOMENT_SMALL elements and more    the scale of each of its blocks
    a smaller parameter                              its moments themselves in fp32, as in bitsandbytes (min_8bit_size)

Blocks are cut every MOMENT_BLOCK elements from the beginning of a group of parameters, and where parameters end: so
blocks lie within a rank's shard and within a slice of an update, and are the same for any number of ranks. bitsandbytes
counts from the beginning of a parameter, so its blocks are the same wherever a parameter begins at a multiple of
MOMENT_BLOCK.

A group's floats are in the order of its elements. Each parameter begins at a float of its own, so there is one float
more per parameter. Floats that are never used are 0.
*/
#ifndef LLMC_MOMENTS_H
#define LLMC_MOMENTS_H
#include "llmc/model/model.h"
#include "llmc/ops/ops.h"
#include <assert.h>

#ifndef MOMENT_SMALL
#define MOMENT_SMALL 4096 // elements of the least parameter with codes
#endif
static_assert(SHARD_ALIGNMENT % MOMENT_BLOCK == 0, "a block lies within a rank's shard");

static int moment_is_small(const Parameter *p) { return parameter_elements(p) < MOMENT_SMALL; }

// Returns the index of the first parameter at or after an element of the table.
static size_t parameter_at(const Model *table, size_t element) {
    const Parameter *p = table->parameters;
    const size_t i = last_at_most(&p->offset, sizeof(*p), table->parameter_count, element);
    return i + (p[i].offset < element);
}

// Returns how many of a group's floats precede the floats of element `element`; at the group's end returns the number
// of all floats.
static size_t moment_floats_before(const Model *table, size_t group, size_t element) {
    const size_t begin = group_begin(table, group), all = group_elements(table, group);
    size_t before = 0;
    for (size_t i = parameter_at(table, begin); i < table->parameter_count; i++) {
        const Parameter *p = &table->parameters[i];
        const size_t first = p->offset - begin, count = parameter_elements(p);
        if (first >= all) break;
        if (element < first + count)
            return before + (moment_is_small(p) ? first / MOMENT_BLOCK + element - first : element / MOMENT_BLOCK);
        before += 1 + (moment_is_small(p) ? count : 0);
    }
    return before + (all + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
}

// Returns the floats of elements [elements.begin, elements.begin + elements.count) of a group.
static Range moment_floats(const Model *table, size_t group, Range elements) {
    const size_t begin = moment_floats_before(table, group, elements.begin);
    const Range floats = {begin, moment_floats_before(table, group, elements.begin + elements.count) - begin};
    return floats;
}

// Returns the most floats that `elements` elements of a group can have if they begin at a block.
static size_t moment_floats_most(const Model *table, size_t group, size_t elements) {
    const size_t all = group_elements(table, group), blocks = (all + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    const size_t others = all ? moment_floats_before(table, group, all) - blocks : 0;
    return (elements + MOMENT_BLOCK - 1) / MOMENT_BLOCK + others;
}

// Returns the most floats of a rank's part of a group: the size of its slot.
static size_t moment_floats_room(const Model *table, Sharding s, size_t group) {
    return moment_floats_most(table, group, sharding_room(table, s, group));
}

// Returns the first float of a group's slot in memory with these slots (sharding_begin).
static size_t moment_floats_begin(const Model *table, Sharding s, size_t group) {
    const size_t layers = min_size(group, table->config.num_hidden_layers);
    size_t begin = moment_floats_room(table, s, GROUP_EMBEDDING);
    if (group == GROUP_EMBEDDING) return 0;
    for (size_t l = 0; l < layers; l++) begin += moment_floats_room(table, s, l);
    return begin;
}

// Returns the number of floats in a rank's memory.
static size_t moment_floats_all(const Model *table, Sharding s) {
    return moment_floats_begin(table, s, GROUP_HEAD) + moment_floats_room(table, s, GROUP_HEAD);
}

// Returns the offset, in a rank's memory, of the first float of an element. The element must be in the rank's shard.
static size_t moment_float_offset(const Model *table, Sharding s, size_t element) {
    const size_t group = group_of(table, element), begin = group_begin(table, group);
    return moment_floats_begin(table, s, group) + moment_floats_before(table, group, element - begin) -
           moment_floats_before(table, group, sharded_range(table, s, group).begin);
}

#endif
