/*
The walk of a pass over layers and chunks. A run visits every layer and chunk. The dry run visits one layer of each kind
and one chunk of each length, and counts the visit for all layers and chunks like it: op set "dry" multiplies FLOPs,
pagers and collectives multiply bytes. sequence.h has the loops.
*/
#ifndef LLMC_WALK_H
#define LLMC_WALK_H
#include "llmc/ops/ops.h"

typedef struct {
    int dry;         // 1: the dry run
    int every_chunk; // 1: the dry run visits every chunk, as an estimate needs the attention calls of each chunk
    int step;        // direction over the layers: 1 first to last, -1 last to first
    double layers;   // layers that the visited layer counts for; 1 in a run
    double chunks;   // chunks that the visited chunk counts for, times layers; 1 in a run
} Walk;

// Tells whether one chunk of each length counts for all.
static int walk_skips_chunks(const Walk *w) { return w->dry && !w->every_chunk; }

// Tells whether visits come in order, so that a visit may load the next visit's tensors. In the dry run visits have no
// order: each visit loads the tensors that it needs.
static int walk_is_in_order(const Walk *w) { return !w->dry; }

// Makes the following ops count `times` times for each layer that the visited layer counts for.
static void walk_count(Walk *w, const Ops *ops, double times) {
    w->chunks = w->layers * times;
    ops->repeat(w->chunks);
}

#endif
