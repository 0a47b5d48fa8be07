/*
Objectives as weights per token. For every objective here dL/dlogits[t] = w[t]/tau * (onehot(target) - softmax(logits/tau))
with w[t] = dL/dlogp[t]: an objective turns a batch into w before the head runs, and log-probabilities into the loss after.

    sft   L = -sum_t loss_weight[t] logp[t] / Z,  w[t] = -loss_weight[t] / Z
          Z = sum of loss_weight over the counted targets of the whole accumulated batch (for masks of 0 and 1: their number)
*/
#ifndef LLMC_OBJECTIVE_H
#define LLMC_OBJECTIVE_H
#include "batch.h"
#include "dtype.h"

// weight[N] = dL/dlogp, fp32 or double. Z = 0 (every target masked) gives no gradient.
static inline void objective_sft_weights(const Batch *batch, double Z, void *weight, DType type) {
    size_t t;
    for (t = 0; t < batch->N; t++) {
        double w = batch->targets[t] >= 0 && Z > 0 ? -(double)batch->loss_weight[t] / Z : 0.0;
        if (type == DTYPE_FP64)
            ((double *)weight)[t] = w;
        else
            ((float *)weight)[t] = (float)w;
    }
}

// This batch's part of the loss from logp[N], of the same type.
static inline double objective_sft_loss(const Batch *batch, double Z, const void *logp, DType type) {
    double sum = 0;
    size_t t;
    for (t = 0; t < batch->N; t++) {
        double value = type == DTYPE_FP64 ? ((const double *)logp)[t] : (double)((const float *)logp)[t];
        if (batch->targets[t] >= 0 && batch->loss_weight[t] != 0) sum += (double)batch->loss_weight[t] * value;
    }
    return Z > 0 ? -sum / Z : 0.0;
}

#endif
