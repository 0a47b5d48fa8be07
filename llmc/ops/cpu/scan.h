/*
States of linear attention between ranks: computes the state after a range of tokens from the state before it. A
range's transfer is a matrix [K,K] for each head; of Mamba-2 it is a number.
*/
#ifndef LLMC_CPU_SCAN_H
#define LLMC_CPU_SCAN_H
#include "llmc/ops/ops.h"
#include "precision.h"

static void cpu_transfer_begin(Summed *transfer, const DeltaShape *shape) {
    const size_t K = shape->K;
    memset(transfer, 0, delta_transfer_elements(shape) * sizeof(floatS));
    for (size_t i = 0; i < shape->HV * K && !shape->ssd; i++) ((floatS *)transfer)[i * K + i % K] = 1;
    for (size_t i = 0; i < shape->HV && shape->ssd; i++) ((floatS *)transfer)[i] = 1;
}

static void cpu_state_combine(Summed *state, const Summed *transfer, const Summed *before, int back,
                              const DeltaShape *shape) {
    const size_t K = shape->K, V = shape->V;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < shape->HV * K; row++) {
        const size_t head = row / K, i = row % K;
        const floatS *T = (const floatS *)transfer + (shape->ssd ? head : head * K * K + (back ? i : i * K));
        const floatS *in = (const floatS *)before + head * K * V;
        floatS *out = (floatS *)state + row * V;
        for (size_t j = 0; j < V && shape->ssd; j++) out[j] += *T * in[i * V + j];
        for (size_t k = 0; k < K && !shape->ssd; k++)
            for (size_t j = 0; j < V; j++) out[j] += T[back ? k * K : k] * in[k * V + j];
    }
}

#endif
