/*
Sums of all groups' gradients at one time, for orders that visit each group more than once (chunk-major orders). They
replace the sums that residency.h hands out group by group. grads_hold pushes the sums. Call grads_held_begin before the
first accumulation. grads_held returns a group's sums, and grads_release_held releases all groups. Where residency.h
sums in the stored gradient itself, these sums are in it, too: no bit depends on the gradient's place.
*/
#ifndef LLMC_HELD_GRADIENTS_H
#define LLMC_HELD_GRADIENTS_H
#include "residency.h"

// Pushes the sums of all groups. Call it in place of grads_begin.
static void grads_hold(Residency *r, int last) {
    const size_t count = trained_table(r)->elements;
    const int off_device = is_off_device(r, PLACED_GRADIENTS);
    r->holds = 1;
    grads_begin(r, last);
    r->sums_mark = arena_mark(r->arena);
    r->held =
        sums_in_place(r) && !off_device ? sums_at(r->gradients, 0, r) : push_sums(r, "sums of all gradients", count);
}

// Loads all gradients when they are summed in place but stored off-device. Call before the first accumulation, after a
// deferred step.
static void grads_held_begin(Residency *r) {
    const size_t bytes = trained_table(r)->elements * dtype_size(r->gradient_type);
    PageSlot slot = {0};
    if (!sums_in_place(r) || !is_off_device(r, PLACED_GRADIENTS) || r->first) return;
    page_load(layer_pager(r, PLACED_GRADIENTS), &slot, r->held, r->gradients, bytes);
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

// Releases all groups, in the order of backward.
static void grads_release_held(Residency *r) {
    r->embedding_sums = head_is_tied(r->model) && !r->lora ? r->held : NULL; // its dW is among the held sums
    memset(r->summed, 0, sizeof(r->summed));
    r->buffers = 1;
    walk_count(&r->walk, r->ops, 1);
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
