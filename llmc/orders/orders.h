/*
The choice of the order. One process runs the loops of streambp.h, or the loops of method mst. Ranks that share a
sequence gather keys; with --kv ring they pass the keys of full-attention layers around. In linear attention they pass
states on. Chunk-major methods have a pass of their own.
*/
#ifndef LLMC_ORDERS_H
#define LLMC_ORDERS_H
#include "chunk_major.h"
#include "mini_sequence.h"
#include "ring.h"

// Tells whether ranks can share a sequence in this layer: it has no state, or the delta rule's state alone.
static int layer_is_shareable(const Layer *layer) {
    return !has_state(layer) || (has_rule(layer) && !has_attention(layer));
}

static const LayerLoops *shared_loops_of(const Visit *v) {
    static const LayerLoops scan = {scan_layer_forward, scan_layer_backward};
    static const LayerLoops ring = {ring_layer_forward, ring_layer_backward};
    static const LayerLoops gather = {gather_layer_forward, gather_layer_backward};
    if (!v->layer->branch[0].parts) return &stream_loops; // no mixer: nothing joins the ranks
    if (has_state(v->layer)) return &scan;
    return layer_rings(v->s, v->l) ? &ring : &gather;
}

static void shared_layer_forward(Visit *v) { shared_loops_of(v)->forward(v); }
static void shared_layer_backward(Visit *v) { shared_loops_of(v)->backward(v); }

static const LayerLoops shared_loops = {shared_layer_forward, shared_layer_backward};

static const LayerLoops *loops_of(Method method, World world) {
    return world_sp(world) > 1 ? &shared_loops : method == METHOD_MST ? &mst_loops : &stream_loops;
}

// Runs a micro-batch forward and backward. Returns the micro-batch's share of the accumulated batch's loss, whose
// denominator is Z. Adds the gradients to the stored gradients and the metrics to `metrics` (or NULL). last: completes
// the step's gradient
static double forward_backward(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    return method_is_chunk_major(s->setup->method) ? chunk_major_pass(s, batch, Z, last, metrics)
                                                   : layer_major_pass(s, batch, Z, last, metrics);
}

#endif
