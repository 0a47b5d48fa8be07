/*
Who picks the order. A process alone walks its chunks by streambp.h, or by the order of its method. Ranks that share a
sequence gather keys, or pass them around where a layer sees everything and --kv says so; of linear attention they pass
states on.
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

static const Order order_shared = {shared_layer_forward, shared_layer_backward, layer_major_pass};

static const Order *order_of(Method method, World world) {
    if (world_sp(world) > 1) return &order_shared;
    return method_is_chunk_major(method) ? &order_chunk_major : method == METHOD_MST ? &order_mst : &order_alone;
}

#endif
