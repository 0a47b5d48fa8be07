/*
Which elements of a table of parameters a rank holds where they are dealt over ranks (ZeRO). Tables come in groups that
are computed with, gathered and reduced as one: the embeddings, each layer, the head. Every rank has its portion of every
group (shard_range), and its memory holds these one behind the other, each in the room of the largest.
*/
#ifndef LLMC_SHARDING_H
#define LLMC_SHARDING_H
#include "llmc/ranks/dist.h"
#include "model.h"
#include "llmc/ranks/world.h"

// Groups 0..L-1 are the layers. The head's group is the final norm, followed by lm_head where it is not tied.
#define GROUP_EMBEDDING (SIZE_MAX - 1)
#define GROUP_HEAD      (SIZE_MAX)

// Of a table of adapters the layers are all there is.
static size_t group_begin(const Model *table, size_t group) {
    if (group == GROUP_EMBEDDING) return 0;
    if (group == GROUP_HEAD) return table->layer_begin + table->config.num_hidden_layers * table->layer_elements;
    return table->layer_begin + group * table->layer_elements;
}

static size_t group_elements(const Model *table, size_t group) {
    if (group == GROUP_EMBEDDING) return table->layer_begin;
    if (group == GROUP_HEAD) return table->elements - group_begin(table, GROUP_HEAD);
    return table->layer_elements;
}

// The group of an element, given by its offset in the table.
static size_t group_of(const Model *table, size_t offset) {
    if (offset < table->layer_begin) return GROUP_EMBEDDING;
    if (offset >= group_begin(table, GROUP_HEAD)) return GROUP_HEAD;
    return (offset - table->layer_begin) / table->layer_elements;
}

// How memory holds a table: ranks 1, all of it, in its own order; else this rank's portions.
typedef struct {
    size_t ranks, rank;
} Sharding;

static Sharding sharding_whole(void) {
    Sharding whole = {1, 0};
    return whole;
}

// What a stage of ZeRO deals over the ranks, and all below it.
enum { ZERO_NONE, ZERO_OPTIMIZER, ZERO_GRADIENTS, ZERO_WEIGHTS };

static Sharding sharding_of(World world, size_t dealt) {
    Sharding ranges = {world_ranks(world), world.rank};
    return world.zero >= dealt ? ranges : sharding_whole();
}

static size_t sharding_room(const Model *table, Sharding s, size_t group) {
    return shard_range_max(group_elements(table, group), SHARD_ALIGNMENT, s.ranks);
}

// Elements of memory that holds the table so.
static size_t sharding_elements(const Model *table, Sharding s) {
    return sharding_room(table, s, GROUP_EMBEDDING) + sharding_room(table, s, GROUP_HEAD) +
           table->config.num_hidden_layers * sharding_room(table, s, 0);
}

// The place in such memory where a group's portion begins.
static size_t sharding_begin(const Model *table, Sharding s, size_t group) {
    const size_t layers = sharding_room(table, s, GROUP_EMBEDDING);
    if (group == GROUP_EMBEDDING) return 0;
    if (group == GROUP_HEAD) return layers + table->config.num_hidden_layers * sharding_room(table, s, 0);
    return layers + group * sharding_room(table, s, 0);
}

// The part of a parameter that is held: its elements [first, first + count), from element `place` of the memory on.
typedef struct {
    size_t first, count, place;
} ParameterShard;

static ParameterShard parameter_shard(const Model *table, Sharding s, const Parameter *p) {
    const size_t group = group_of(table, p->offset), begin = group_begin(table, group);
    const Range own = shard_range(group_elements(table, group), SHARD_ALIGNMENT, s.ranks, s.rank);
    const size_t own_begin = begin + own.begin, own_end = own_begin + own.count;
    const size_t from = max_size(own_begin, p->offset), to = min_size(own_end, p->offset + parameter_elements(p));
    ParameterShard held = {0, 0, 0};
    if (from >= to) return held;
    held.first = from - p->offset, held.count = to - from;
    held.place = sharding_begin(table, s, group) + from - own_begin;
    return held;
}

// Where such memory has element `first` of a parameter, one that is held.
static size_t shard_offset(const Model *table, Sharding s, const Parameter *p, size_t first) {
    const ParameterShard held = parameter_shard(table, s, p);
    return held.place + first - held.first;
}

#endif
