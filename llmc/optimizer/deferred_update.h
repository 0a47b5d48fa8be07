/*
A step of the optimizer that waits for the next forward pass (--update forward). The pass steps each group before it
uses the group's weights, and a few slices between chunks, so transfers overlap with its computation. Gradients wait
together with the step. The pass knows the deferred step only as a hook (PassHook).
*/
#ifndef LLMC_DEFERRED_UPDATE_H
#define LLMC_DEFERRED_UPDATE_H
#include "update.h"

static void deferred_begin(Residency *r) { update_begin((Update *)r->hook.context, r->visits); }

static void deferred_chunk(Residency *r) {
    Update *u = (Update *)r->hook.context;
    for (size_t i = 0; i < u->each; i++) update_slice(u);
}

static void deferred_group(Residency *r, size_t group) {
    const Model *table = trained_table(r);
    Update *u = (Update *)r->hook.context;
    const UpdateMemory *weights = &u->tensor[UPDATE_WEIGHTS]; // the trained weights, even while the reference runs
    for (; u->groups < group_count(table); u->groups++) {
        const size_t next = group_at(table, u->groups), begin = group_begin(table, next);
        if (begin > group_begin(table, group)) return;
        update_until(u, begin + group_elements(table, next));
        if (weights_gather(r) && group_elements(table, next))
            group_updated(r, table, weights->place, weights->memory, next);
    }
    r->hook.context = NULL;
    grads_zero(r);
}

// Leaves the step to the next pass, or to weights_flush. *u must stay valid until then.
static void update_defer(Update *u, Residency *r, const OptimizerState *state, const AdamW *step) {
    const PassHook hook = {deferred_begin, deferred_group, deferred_chunk, u};
    update_set(u, r, state, step);
    r->hook = hook;
}

// Takes a deferred step now. Call it before anything but a pass reads weights.
static void weights_flush(Residency *r) {
    const size_t mark = arena_mark(r->arena);
    Update *u = (Update *)r->hook.context;
    if (!u) return;
    if (!u->slice) update_begin(u, SIZE_MAX); // slice set: a pass that is abandoned has begun the step
    deferred_group(r, GROUP_HEAD);
    arena_pop(r->arena, mark);
}

#endif
