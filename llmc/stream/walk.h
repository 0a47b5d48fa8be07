/*
The walk of a pass over layers and chunks. A run visits each. The dry run visits one layer of each kind and one chunk of
each length, and counts a visit for all like it: op set "dry" multiplies what ops count, pagers and collectives the
bytes that they move. sequence.h has the loops.
*/
#ifndef LLMC_WALK_H
#define LLMC_WALK_H
#include "llmc/ops/ops.h"

typedef struct {
    int dry;         // the dry run
    int every_chunk; // which visits every chunk, if an estimate needs the attention calls of each
    int step;        // direction over the layers: 1 first to last, -1 last to first
    double layers;   // layers that the visited one counts for; 1 in a run
    double chunks;   // layers times chunks that the visited chunk counts for; 1 in a run
} Walk;

// Tells whether one chunk of each length counts for all.
static int walk_skips_chunks(const Walk *w) { return w->dry && !w->every_chunk; }

// Tells whether the next visit is of the next layer or chunk, so that it may be prepared for. In the dry run it may be of
// any: there each loads its own.
static int walk_is_in_order(const Walk *w) { return !w->dry; }

// The ops that follow count `times` times for each layer that the visited one counts for.
static void walk_count(Walk *w, const Ops *ops, double times) {
    w->chunks = w->layers * times;
    ops->repeat(w->chunks);
}

#endif
