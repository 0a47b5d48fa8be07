/*
Chooses the order. One process runs the loops of streambp.h, or those of its method. Ranks that share a sequence gather
keys; with --kv ring they pass the keys of full-attention layers around. In linear attention they pass states on.
Chunk-major methods have a pass of their own.
*/
#ifndef LLMC_ORDERS_H
#define LLMC_ORDERS_H
#include "chunk_major.h"
#include "mini_sequence.h"
#include "ring.h"

static void shared_layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    if (layer_is_linear(&s->model->config, l))
        scan_layer_forward(s, l, w);
    else if (layer_rings(s, l))
        ring_layer_forward(s, l, w);
    else
        gather_layer_forward(s, l, w);
}

static void shared_layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    if (layer_is_linear(&s->model->config, l))
        scan_layer_backward(s, l, w, dw);
    else if (layer_rings(s, l))
        ring_layer_backward(s, l, w, dw);
    else
        gather_layer_backward(s, l, w, dw);
}

static const LayerLoops shared_loops = {shared_layer_forward, shared_layer_backward};

static const LayerLoops *loops_of(Method method, World world) {
    return world_sp(world) > 1 ? &shared_loops : method == METHOD_MST ? &mst_loops : &stream_loops;
}

// Runs a micro-batch forward and backward. Returns its share of the accumulated batch's loss, whose denominator is Z.
// Adds its gradients to the stored ones and its metrics to `metrics` (or NULL). last: it completes the step's gradient
static double forward_backward(StreamBP *s, const Batch *batch, double Z, int last, Metrics *metrics) {
    return method_is_chunk_major(s->setup->method) ? chunk_major_pass(s, batch, Z, last, metrics)
                                                   : layer_major_pass(s, batch, Z, last, metrics);
}

#endif
