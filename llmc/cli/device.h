/*
The peak rate of this machine's matrix product, measured.
*/
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H
#include "run.h"
#include "threads.h"

// Fills `count` elements, uniform in [-1, 1). Their period is prime, so rows of a matrix are shifted against each
// other.
static void fill_random(void *device, DType type, size_t count, uint64_t seed) {
    enum { PERIOD = 4093 };
    const size_t size = dtype_size(type);
    float values[PERIOD];
    double elements[PERIOD]; // as wide as any type
    for (size_t i = 0; i < PERIOD; i++) values[i] = (float)(2 * random_uniform(seed, 0, i) - 1);
    elements_from_float(elements, type, values, PERIOD);
    ops_device->copy_in(device, elements, min_size(count, PERIOD) * size);
    for (size_t done = PERIOD; done < count; done *= 2)
        ops_device->copy((char *)device + done * size, device, min_size(done, count - done) * size);
}

// Measures the peak FLOP/s of the op set's matrix product: the best of a few n x n products, n doubled until one takes
// milliseconds, or all of them half a second. Elements are random: on zeros a GPU takes less power, and its clocks are
// higher. Uses free memory of the arena (between two sequences: nearly all); 0 if that is too small.
static double run_peak_flops(Run *run) {
    const size_t size = dtype_size(run->model.dtype), mark = arena_mark(run->arena);
    const double start = seconds_now();
    double best = 0;
    for (size_t n = 128; n <= 8192; n *= 2) {
        const double flops = 2.0 * (double)(n * n * n);
        Stored *x[3];
        if (run->arena->capacity - run->arena->used < 3 * (n * n * size + ARENA_ALIGNMENT)) break;
        for (size_t i = 0; i < 3; i++) {
            x[i] = (Stored *)arena_push(run->arena, SHARE_WORKSPACE, "peak measurement", n * n, size);
            fill_random(x[i], run->model.dtype, n * n, i);
        }
        for (size_t i = 0; i < 4; i++) {
            const double begin = seconds_now();
            ops_device->linear_forward(x[0], x[1], x[2], NULL, NULL, n, n, n, n);
            ops_device->finish();
            best = fmax(best, flops / (seconds_now() - begin));
        }
        arena_pop(run->arena, mark);
        // on a busy CPU its threads may wait for milliseconds, however small the product
        if ((n >= 512 && flops > 5e-3 * best) || seconds_now() - start > 0.5) break;
    }
    return best;
}

#endif
