/*
Chooses the op set of a run among the linked ones (op_sets), by --dtype and --device. main calls it once, before
anything asks for ops_device.
*/
#ifndef LLMC_CHOOSE_OPS_H
#define LLMC_CHOOSE_OPS_H
#include "llmc/cli/options.h"

// Tells whether an op set computes on this device in this type.
static int ops_are(const Ops *ops, Device device, int dtype) {
    const int on_cpu = !strcmp(ops->name, "cpu");
    return (device == DEVICE_AUTO || (device == DEVICE_CPU) == on_cpu) &&
           (dtype == DTYPE_AUTO || dtype == (int)ops->stored);
}

// Returns the first op set of this device and type whose device answers, else the first of them; NULL: none is linked.
// *problem: why the first device does not answer, or NULL
static const Ops *ops_find(Device device, int dtype, const char **problem) {
    const Ops *first = NULL;
    *problem = NULL;
    for (size_t i = 0; op_sets[i]; i++) {
        if (!ops_are(op_sets[i], device, dtype)) continue;
        const char *why = op_sets[i]->device_problem();
        if (!why) return op_sets[i];
        if (!first) first = op_sets[i], *problem = why;
    }
    return first;
}

// Notes that --device auto takes the CPU on a machine whose GPU does not answer.
static void note_device(const Options *o, const Ops *taken) {
    const char *problem;
    ops_find(DEVICE_AUTO, o->dtype, &problem);
    if (problem && !ops_are(taken, DEVICE_CUDA, DTYPE_AUTO) && strncmp(problem, "no GPU was found", 16) != 0)
        note("--device auto takes the CPU: %s", problem);
}

// Chooses ops_device. All ranks must choose alike.
static void choose_ops(Options *o) {
    const int writes = o->verb == VERB_CONVERT || o->verb == VERB_INFO; // compute nothing, so need no GPU
    const int type = o->verb == VERB_CONVERT ? DTYPE_AUTO : o->dtype;   // convert: --dtype is of what it writes
    const char *problem, *none;
    const Ops *ops = writes ? ops_find(DEVICE_CPU, type, &problem) : NULL;
    if (!ops) ops = ops_find(o->device, type, &problem);
    if (!ops && o->verb == VERB_PLAN) ops = ops_find(o->device, DTYPE_AUTO, &none);
    if (!ops)
        options_refuse(o->verb, "--device %s --dtype %s is not in this program, which has %s; %s builds it",
                       option_chosen(o, "device"), option_chosen(o, "dtype"), op_sets_text(),
                       o->dtype == DTYPE_FP64     ? "make PRECISION=double"
                       : o->device == DEVICE_CUDA ? "make BACKEND=all"
                                                  : "make");
    if (problem && o->device == DEVICE_CUDA && o->verb != VERB_PLAN && o->verb != VERB_DOCTOR)
        die("--device cuda: %s", problem);
    if (o->device == DEVICE_AUTO && !o->quiet && !writes) note_device(o, ops);
    ops_device = ops;
    dist_check("--device and --dtype", checksum_of(ops->stored, ops->name, strlen(ops->name)));
    if (o->verb != VERB_TRAIN) return;
    // the log has what was taken, so that --resume takes it, too
    o->dtype = (int)ops->stored, o->device = ops_are(ops, DEVICE_CPU, DTYPE_AUTO) ? DEVICE_CPU : DEVICE_CUDA;
}

#endif
