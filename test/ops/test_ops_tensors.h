/*
Guarded tensors in the roles that tests of ops give them. Part of test_ops.c.
*/
#ifndef TEST_OPS_TENSORS_H
#define TEST_OPS_TENSORS_H
#include "test/base/testing.h"

static const Ops *ops; // == ops_device

static Guarded *input(const char *name, size_t count) {
    return guarded_normal(INPUT, name, ops->stored, count, 0.0, 1.0);
}
static Guarded *output(const char *name, size_t count) { return guarded_poison(CHANGED, name, ops->stored, count); }
static Guarded *in_place(const char *name, size_t count) {
    return guarded_normal(CHANGED, name, ops->stored, count, 0.0, 1.0);
}
static Guarded *accumulated(const char *name, size_t count) {
    return guarded_normal(CHANGED, name, ops->summed, count, 0.0, 1.0);
}
static Guarded *scratch_of(size_t count) { return guarded_poison(SCRATCH, "scratch", ops->summed, count); }

#endif
