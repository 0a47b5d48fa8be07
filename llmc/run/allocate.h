/*
Makes the one allocation of a run: plans its largest sequence, refuses what does not fit, allocates.
*/
#ifndef LLMC_ALLOCATE_H
#define LLMC_ALLOCATE_H
#include "llmc/ops/link_rates.h"
#include "advice.h"

// Returns the bytes that a step moves in one direction, to or from one kind of place.
static double moved_in_step(const Run *run, Way way) {
    const Moved *moved = &run->plan.moved;
    const double passes = (double)max_size(1, assigned_batches(run->assignment));
    return passes * (moved->bytes[PHASE_FORWARD][way] + moved->bytes[PHASE_BACKWARD][way]) +
           moved->bytes[PHASE_UPDATE][way];
}

// Measures the disk and warns if a step would mostly wait for it. Call before tensors are placed on the disk.
static void note_slow_disk(const Run *run) {
    const size_t half = min_size(min_size(run->plan.disk_bytes, run->plan.total_bytes) / 2, (size_t)8 << 20);
    if (half < (size_t)8 << 20) return; // too few bytes to measure
    const LinkRates r = link_rates(ops_device, (char *)run->disk_memory, (char *)run->memory, half);
    const double out = moved_in_step(run, WAY_DISK_OUT), in = moved_in_step(run, WAY_DISK_IN);
    if (fmin(r.out, r.in) < SLOW_DISK)
        note("--disk %s writes %.3g MB/s and reads %.3g MB/s: a step moves %s in %.0f s; give a folder on an SSD",
             run->options->disk, r.out * 1e-6, r.in * 1e-6, human_bytes(out + in), out / r.out + in / r.in);
}

// Returns the run's device memory; NULL: refused. If a rank's memory is refused, all ranks keep fewer activations.
static void *allocate_kept(Run *run, const Batch *shape) {
    const double planned = (double)run->plan.total_bytes;
    for (int less = 0;; less = 1) {
        const size_t bytes = run->plan.total_bytes;
        void *memory = ops_device->allocate(bytes);
        double refused = !memory;
        dist_sum(RANKS_ALL, &refused, 1);
        if (refused == 0 && less)
            note("one allocation of %s was refused: keeps %s of the layers, in %s", human_bytes(planned),
                 keep_text(&run->settings), human_bytes((double)run->plan.total_bytes));
        if (refused == 0 || !run_keep_less(run, shape)) return memory;
        if (memory) ops_device->release(memory, bytes);
    }
}

// Plans and allocates the run. Nothing is allocated after it; the weights are still to be loaded.
static void run_allocate(Run *run, SequenceBound bound) {
    const size_t available = ops_device->memory_available(), limit = memory_limit(run->options, available);
    Batch shape = batch_shape(bound);
    if (shape.N > INT32_MAX)
        die_usage("--batch x --seq-len: %zu tokens in one sequence, but at most %d can be indexed; lower --batch and "
                  "raise --grad-accum",
                  shape.N, INT32_MAX);
    run->available = limit;
    if (run->settings.deals)
        run_plan_levels(run, &shape, bound, limit);
    else
        run_plan(run, &shape, limit);
    note_attention(run);
    check_memory(run, bound.N ? bound_documents(run, bound, run->options->seq_len) : 0, limit,
                 limit == run->options->memory_limit ? "--memory-limit" : ops_device->memory_name());
    dist_barrier(); // a rank that went on would take memory before the host's other ranks have measured it
    run->memory = allocate_kept(run, &shape);
    if (!run->memory)
        die("the device refused one allocation of %s: %s were free before, %s are now; check what else takes memory%s, "
            "and `%s plan`",
            human_bytes((double)run->plan.total_bytes), human_bytes((double)available),
            human_bytes((double)ops_device->memory_available()), strcmp(ops_device->name, "cpu") ? " (nvidia-smi)" : "",
            program_called());
    const size_t host = run->plan.arena[PLACE_HOST].peak;
    if (host) run->host_memory = ops_device->host_allocate(host);
    if (host && !run->host_memory)
        die("the system refused %s of host memory; give a shorter --seq-len, a lower --host-limit, or other places "
            "(--inputs, --weights, --optimizer)",
            human_bytes((double)host));
    if (run->plan.disk_bytes) run->disk_memory = ops_device->disk_allocate(run->options->disk, run->plan.disk_bytes);
    if (run->disk_memory) note_slow_disk(run);
    arena_init(&run->arena[PLACE_DEVICE], run->memory, run->plan.total_bytes);
    arena_init(&run->arena[PLACE_HOST], run->host_memory, host);
    arena_init(&run->arena[PLACE_DISK], run->disk_memory, run->plan.disk_bytes);
    arena_watch(run->arena, ops_device->copy_in, ops_device->copy_out);
    run_begin(&run->streambp, &run->optimizer, &run->settings, ops_device, run->arena, &shape);
    batch_free(&shape);
}

#endif
