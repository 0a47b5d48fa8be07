/*
A model small enough to try everything on: random weights, a packed stream of documents of given lengths with given masks,
and one or more passes of a method, which leave the loss and every gradient on the host in double.
*/
#ifndef TEST_TINY_H
#define TEST_TINY_H
#include "llmc/plan/plan.h"

typedef struct {
    double loss;
    double *gradient; // [elements]
    size_t elements;
} TinyResult;

// Weights that leave no gradient degenerate: matrices ~ N(0, 1.5/cols), norms around 1, biases ~ 0.2 N(0, 1).
static double *tiny_weights(const Model *model, uint64_t seed) {
    double *w = (double *)checked_malloc(model->elements * sizeof(double), "weights");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        double deviation = p->role == ROLE_EMBEDDING ? 0.7 : p->cols ? sqrt(1.5 / (double)p->cols) : 0.2;
        for (size_t j = 0; j < parameter_elements(p); j++)
            w[p->offset + j] = p->ones + deviation * random_normal(seed, i, j);
    }
    return w;
}

static void host_write(void *out, DType type, size_t i, double x) {
    if (type == DTYPE_FP64)
        ((double *)out)[i] = x;
    else if (type == DTYPE_FP32)
        ((float *)out)[i] = (float)x;
    else
        ((uint16_t *)out)[i] = float_to_bf16((float)x);
}

static double host_read(const void *in, DType type, size_t i) {
    return type == DTYPE_FP64   ? ((const double *)in)[i]
           : type == DTYPE_FP32 ? (double)((const float *)in)[i]
                                : (double)bf16_to_float(((const uint16_t *)in)[i]);
}

static void device_write(const Ops *ops, void *device, DType type, const double *values, size_t count) {
    void *host = checked_malloc(count * dtype_size(type), "a copy");
    for (size_t i = 0; i < count; i++) host_write(host, type, i, values[i]);
    ops->copy_in(device, host, count * dtype_size(type));
    free(host);
}

static double *device_read(const Ops *ops, const void *device, DType type, size_t count) {
    void *host = checked_malloc(count * dtype_size(type), "a copy");
    double *values = (double *)checked_malloc(count * sizeof(double), "values");
    ops->copy_out(host, device, count * dtype_size(type));
    for (size_t i = 0; i < count; i++) values[i] = host_read(host, type, i);
    free(host);
    return values;
}

// One stream of `documents` documents of length[d] tokens. masked: 0 nothing; 1 about a third of the targets at random;
// 2 also every target of the documents with odd numbers; 3 every target.
static Batch tiny_batch(const size_t *length, size_t documents, size_t V, int masked, uint64_t seed) {
    size_t N = 0, d;
    for (d = 0; d < documents; d++) N += length[d];
    Batch batch = batch_allocate(N, documents);
    for (d = 0, N = 0; d < documents; d++) batch.document_start[d] = N, N += length[d];
    batch_set_positions(&batch);
    for (d = 0; d < documents; d++) {
        for (size_t t = batch.document_start[d]; t < batch.document_start[d + 1]; t++) {
            int mask = masked == 3 || (masked && random_below(seed, 3, t, 3) == 0) || (masked == 2 && d % 2);
            batch.tokens[t] = (int32_t)random_below(seed, 1, t, V);
            batch.targets[t] = mask ? -1 : (int32_t)random_below(seed, 2, t, V);
            batch.loss_weight[t] = 1.0f;
        }
    }
    return batch;
}

// Device memory full of NaN, and host memory of the kind that tensors go to.
static void *poisoned_memory(const Ops *ops, size_t bytes) {
    void *memory = ops->allocate(bytes), *poison = checked_malloc(bytes, "poison");
    memset(poison, 0xff, bytes);
    ops->copy_in(memory, poison, bytes);
    free(poison);
    return memory;
}

static void *poisoned_host_memory(const Ops *ops, size_t bytes) {
    void *memory = bytes ? ops->host_allocate(bytes) : NULL;
    if (memory) memset(memory, 0xff, bytes);
    return memory;
}

// Gradients and loss of `count` micro-batches accumulated, with settings on the given op set. Planned first, so every
// result also says that the run keeps to its plan; the memory is poisoned with NaN. adapters: with LoRA, whose gradients the
// result then has.
static TinyResult tiny_run_trained(const Ops *ops, RunSettings settings, const double *weights, const double *adapters,
                                   const Batch *batches, size_t count) {
    const Model *model = settings.model, *trained = settings.lora ? &settings.lora->table : model;
    Batch largest = batches[0];
    TinyResult result = {0, NULL, trained->elements};
    TargetCounts counts = {0, 0, 0};
    OptimizerState state;
    StreamBP s;
    Arena arena;
    for (size_t i = 0; i < count; i++) {
        counts = target_counts_add(counts, batch_count(&batches[i]));
        if (batches[i].N > largest.N) largest = batches[i];
    }
    double Z = objective_normaliser(&settings.objective, counts);
    settings.backward = 1;
    Plan plan = plan_make(&settings, &largest);
    void *memory = poisoned_memory(ops, plan.total_bytes), *host = poisoned_host_memory(ops, plan.host_bytes);
    arena_init(&arena, memory, plan.total_bytes);
    run_begin(&s, &state, &settings, ops, &arena, &largest);
    arena_init(&s.host, host, plan.host_bytes);
    device_write(ops, s.memory.weights, model->dtype, weights, model->elements);
    if (adapters) device_write(ops, s.memory.adapters, model->dtype, adapters, trained->elements);
    ops->zero(s.memory.gradients, trained->elements * dtype_size(settings.gradient_type));
    for (size_t i = 0; i < count; i++) result.loss += forward_backward(&s, &batches[i], Z, i + 1 == count, NULL);
    result.gradient = device_read(ops, s.memory.gradients, settings.gradient_type, trained->elements);
    run_end(&s);
    ops->release(memory, plan.total_bytes);
    if (host) ops->host_release(host, plan.host_bytes);
    return result;
}

static TinyResult tiny_run_on(const Ops *ops, RunSettings settings, const double *weights, const Batch *batches,
                              size_t count) {
    return tiny_run_trained(ops, settings, weights, NULL, batches, count);
}

static TinyResult tiny_run(const Model *model, const double *weights, Method method, size_t chunk, size_t logits_chunk,
                           const Batch *batch) {
    RunSettings settings = {0};
    settings.model = model, settings.method = method;
    settings.chunk = chunk, settings.logits_chunk = logits_chunk;
    settings.gradient_type = model->dtype;
    return tiny_run_on(ops_device, settings, weights, batch, 1);
}

// Relative L2 difference of one parameter's gradient.
static double tiny_difference(const Parameter *p, const double *found, const double *expected) {
    double difference = 0, size = 0;
    for (size_t i = p->offset; i < p->offset + parameter_elements(p); i++) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    if (difference == 0) return 0;
    return size > 0 ? sqrt(difference / size) : INFINITY;
}

#endif
