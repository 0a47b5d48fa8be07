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

// Every so many-th of the listed cases is run, all of them with ALL_CASES=1 in the environment. The lists are long
// enough that these meet every size of head and both sides of the tiles of 64 x 64 of the GPU's kernels. The lines of
// bf16 and double are those of fp32: fewer cases there.
static size_t case_step(void) {
    const char *all = getenv("ALL_CASES");
    return all && strcmp(all, "0") != 0 ? 1 : ops_device->stored == DTYPE_FP32 ? 4 : 6;
}
#define CASE_STEP case_step()

#endif
