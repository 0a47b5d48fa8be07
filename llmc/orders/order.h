/*
Who picks the order of a layer's steps: a process alone walks its chunks by streambp.h; ranks that share a sequence
gather the keys they see (gather.h), or pass blocks of keys around a ring where a layer sees everything and --kv says so
(ring.h).
*/
#ifndef LLMC_ORDER_H
#define LLMC_ORDER_H
#include "ring.h"

static void shared_layer_forward(StreamBP *s, size_t l, GroupWeights w) {
    if (layer_rings(s, l))
        ring_layer_forward(s, l, w);
    else
        gather_layer_forward(s, l, w);
}

static void shared_layer_backward(StreamBP *s, size_t l, GroupWeights w, GroupSums dw) {
    if (layer_rings(s, l))
        ring_layer_backward(s, l, w, dw);
    else
        gather_layer_backward(s, l, w, dw);
}

static const Order order_shared = {shared_layer_forward, shared_layer_backward};

static const Order *order_of(World world) { return world_sp(world) > 1 ? &order_shared : &order_alone; }

#endif
