/*
Rates of the link between the device and a place, measured by the ops store and load. They use pinned memory and direct
I/O, like a run's transfers.
*/
#ifndef LLMC_LINK_RATES_H
#define LLMC_LINK_RATES_H
#include "ops.h"

typedef struct {
    double out, in, both; // bytes/s from the device, to the device, and in each direction while both are busy
} LinkRates;

// Times a store of `out` bytes from the first half of `device` and, at the same time, a load of `in` bytes into its
// second half. Returns seconds.
static double link_seconds(const Ops *ops, char *place, char *device, size_t most, size_t out, size_t in) {
    int64_t store = 0, load = 0;
    ops->finish();
    const double begin = seconds_now();
    if (out) store = ops->store(place, device, out);
    if (in) load = ops->load(device + most, place + most, in);
    ops->await_transfer(store), ops->await_transfer(load);
    ops->finish();
    return seconds_now() - begin;
}

// Measures the rates. Overwrites place[2 most] and device[2 most]. Takes less than a tenth of a second at 1 GB/s.
static LinkRates link_rates(const Ops *ops, char *place, char *device, size_t most) {
    size_t bytes = min_size(most, (size_t)4 << 20);
    double seconds;
    LinkRates rates;
    ops->zero(device, 2 * most);
    link_seconds(ops, place, device, most, bytes, 0);
    while ((seconds = link_seconds(ops, place, device, most, bytes, 0)) < 0.01 && bytes < most)
        bytes = min_size(2 * bytes, most);
    rates.out = (double)bytes / seconds;
    link_seconds(ops, place + most, device, most, bytes, 0); // written first, because unwritten parts of a file are not
                                                             // read from the disk
    rates.in = (double)bytes / link_seconds(ops, place, device, most, 0, bytes);
    rates.both = (double)bytes / link_seconds(ops, place, device, most, bytes, bytes);
    return rates;
}

#define SLOW_DISK 2e8 // bytes/s of a hard disk or a throttled volume; any PCIe SSD is 5 times as fast

#endif
