/*
Rates of the link between the device and a place, measured by the ops store and load: pinned memory and direct I/O, as a
run's transfers use.
*/
#ifndef LLMC_LINK_RATES_H
#define LLMC_LINK_RATES_H
#include "ops.h"

typedef struct {
    double out, in, both; // bytes/s from the device, to it, and each way while both ways are busy
} LinkRates;

// Times a store of `out` bytes beside a load of `in` bytes between the second halves; returns seconds.
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

// Measures the rates; overwrites place[2 most] and device[2 most]. Takes less than a tenth of a second at 1 GB/s.
static LinkRates link_rates(const Ops *ops, char *place, char *device, size_t most) {
    size_t bytes = min_size(most, (size_t)4 << 20);
    double seconds;
    LinkRates rates;
    ops->zero(device, 2 * most);
    link_seconds(ops, place, device, most, bytes, 0);
    while ((seconds = link_seconds(ops, place, device, most, bytes, 0)) < 0.01 && bytes < most)
        bytes = min_size(2 * bytes, most);
    rates.out = (double)bytes / seconds;
    link_seconds(ops, place + most, device, most, bytes, 0); // unwritten parts of a file are not read from the disk
    rates.in = (double)bytes / link_seconds(ops, place, device, most, 0, bytes);
    rates.both = (double)bytes / link_seconds(ops, place, device, most, bytes, bytes);
    return rates;
}

#define SLOW_DISK 2e8 // bytes/s: a hard disk, a throttled volume; any PCIe SSD is 5 times as fast

#endif
