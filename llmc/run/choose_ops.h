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

// Returns the first linked op set of this device and type, or NULL.
static const Ops *ops_first(Device device, int dtype) {
    for (size_t i = 0; op_sets[i]; i++)
        if (ops_are(op_sets[i], device, dtype)) return op_sets[i];
    return NULL;
}

// Returns the first op set of this device and type; --device auto: that of the CPU if the GPU does not answer.
static const Ops *ops_find(const Options *o, int dtype) {
    const Ops *first = ops_first(o->device, dtype), *on_cpu = ops_first(DEVICE_CPU, dtype);
    const int computes = o->verb != VERB_CONVERT && o->verb != VERB_INFO;
    if (!first || !on_cpu || o->device != DEVICE_AUTO) return first;
    const char *problem = computes ? first->device_problem() : "";
    if (!problem) return first;
    if (*problem && !o->quiet && strncmp(problem, "no GPU was found", 16) != 0)
        note("--device auto takes the CPU: %s", problem);
    return on_cpu;
}

// Chooses ops_device. All ranks must choose alike.
static void choose_ops(Options *o) {
    const Ops *ops = ops_find(o, o->verb == VERB_CONVERT ? DTYPE_AUTO : o->dtype); // convert: the type that it writes
    if (!ops && o->verb == VERB_PLAN) ops = ops_find(o, DTYPE_AUTO);
    if (!ops)
        options_refuse(o->verb, "--device %s --dtype %s is not in this program, which has %s; %s builds it",
                       option_chosen(o, "device"), option_chosen(o, "dtype"), op_sets_text(),
                       o->dtype == DTYPE_FP64     ? "make PRECISION=double"
                       : o->device == DEVICE_CUDA ? "make BACKEND=all"
                                                  : "make");
    ops_device = ops;
    dist_check("--device and --dtype", checksum_of(ops->stored, ops->name, strlen(ops->name)));
    if (o->verb != VERB_TRAIN) return;
    // the log has what was taken, so that --resume takes it, too
    o->dtype = (int)ops->stored, o->device = ops_are(ops, DEVICE_CPU, DTYPE_AUTO) ? DEVICE_CPU : DEVICE_CUDA;
}

#endif
