/*
Rates between the device and a place that tensors go to, measured through the ops that bring them there: through pinned
memory and direct I/O as a run's transfers.
*/
#ifndef LLMC_LINK_RATES_H
#define LLMC_LINK_RATES_H
#include "ops.h"

typedef struct {
    double out, in, both; // bytes/s from the device, to it, and each way while both ways are busy
} LinkRates;

// Seconds for `out` bytes from the device to the place and `in` bytes from its other half to the device's
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

// disk: a folder; NULL: host memory. Takes less than a tenth of a second where a link has a GB/s, and at most twice
// `most` bytes at each end. Ends the program where there is no memory for it, or as disk_allocate does.
static LinkRates link_rates(const Ops *ops, const char *disk, size_t most) {
    char *device = NULL, *place = NULL;
    double seconds;
    LinkRates rates;
    for (; most >= 1 << 20 && !(device = (char *)ops->allocate(2 * most));) most /= 2;
    if (device) place = (char *)(disk ? ops->disk_allocate(disk, 2 * most) : ops->host_allocate(2 * most));
    if (!place) die("no memory left for %s; end what else uses it", human_bytes(2.0 * (double)most));
    size_t bytes = min_size(most, (size_t)4 << 20);
    ops->zero(device, 2 * most);
    link_seconds(ops, place, device, most, bytes, 0);
    while ((seconds = link_seconds(ops, place, device, most, bytes, 0)) < 0.01 && bytes < most)
        bytes = min_size(2 * bytes, most);
    rates.out = (double)bytes / seconds;
    link_seconds(ops, place + most, device, most, bytes, 0); // a file gives zeros where nothing was written
    rates.in = (double)bytes / link_seconds(ops, place, device, most, 0, bytes);
    rates.both = (double)bytes / link_seconds(ops, place, device, most, bytes, bytes);
    if (disk)
        ops->disk_release(place, 2 * most);
    else
        ops->host_release(place, 2 * most);
    ops->release(device, 2 * most);
    return rates;
}

#endif
