/*
Sums of the gradients of all groups at one time, for orders that come to each group more than once (chunk-major ones),
in place of what residency.h hands out group by group: grads_hold pushes them, grads_held_begin is called before the
first of them is added to, grads_held gives a group's, and grads_release_held does for all groups what grads_release
does for one. Where a group's sums would be the stored gradient itself these are, too, so that no bit depends on where
that lies.
*/
#ifndef LLMC_HELD_GRADIENTS_H
#define LLMC_HELD_GRADIENTS_H
#include "residency.h"

// In place of grads_begin.
static void grads_hold(Residency *r, int last) {
    const size_t count = trained_table(r)->elements;
    const int elsewhere = is_off_device(r, PLACED_GRADIENTS);
    r->holds = 1;
    grads_begin(r, last);
    r->sums_mark = arena_mark(r->arena);
    r->held =
        sums_in_place(r) && !elsewhere ? sums_at(r->gradients, 0, r) : push_sums(r, "sums of all gradients", count);
}

// Loads all gradients when they are summed in place but stored off-device. Call before the first accumulation, after a
// deferred step.
static void grads_held_begin(Residency *r) {
    const size_t bytes = trained_table(r)->elements * dtype_size(r->gradient_type);
    PageSlot slot = {0};
    if (!sums_in_place(r) || !is_off_device(r, PLACED_GRADIENTS) || r->first) return;
    page_load(pager_of(r, PLACED_GRADIENTS, 1), &slot, r->held, r->gradients, bytes);
    page_await(r->ops, &slot);
}

static GroupSums grads_held(const Residency *r, size_t group) {
    const Model *table = trained_table(r);
    GroupSums sums = {0};
    Summed *own = sums_at(r->held, group_begin(table, group), r);
    if (is_layer(group)) {
        sums.layer = own, sums.offset = layer_offsets(r->model, group);
    } else if (r->lora && group == GROUP_HEAD) {
        sums.layer = own, sums.head = r->lora->saves[LM_HEAD] ? own : NULL;
    } else if (group == GROUP_HEAD) {
        sums.norm = own;
        sums.head = head_is_tied(r->model) ? r->held : sums_at(own, head_norm_elements(r->model), r);
    } else if (r->lora) {
        sums.layer = own, sums.tables = r->lora->saves[EMBEDDING] ? own : NULL;
        sums.tables_type = dtype_of_sums(r->model->dtype);
    } else {
        sums.tables = own, sums.tables_type = dtype_of_sums(r->model->dtype);
    }
    return sums;
}

static void release_held_table(Residency *r, size_t group) {
    GroupSums sums = grads_held(r, group);
    if (!group_is_trained(r, group)) return;
    if (sums_in_place(r)) stored_ask(r, &sums.stored[0], group);
    release_table(r, group, &sums);
}

// They are complete: what grads_release is for a group, for all, in the order of backward.
static void grads_release_held(Residency *r) {
    r->embedding_sums = head_is_tied(r->model) && !r->lora ? r->held : NULL; // the head's is among these
    memset(r->summed, 0, sizeof(r->summed));
    r->buffers = 1;
    r->ops->repeat(1);
    if (is_off_device(r, PLACED_GRADIENTS) && !sums_in_place(r))
        r->summed[0].stored.memory = push_stored_gradient(r, "one layer's gradient", 0);
    release_held_table(r, GROUP_HEAD);
    for (size_t l = r->model->config.num_hidden_layers; l-- > 0;) {
        r->summed[0].sums = grads_held(r, l).layer;
        release_layer(r, l, r->summed[0].sums);
    }
    page_finish(r->ops, &r->summed[0].stored.page);
    r->embedding_sums = NULL;
    release_held_table(r, GROUP_EMBEDDING);
    r->holds = 0, r->held = NULL;
    arena_pop(r->arena, r->sums_mark);
}

#endif
