/*
Reads the next micro-batch while the current one is trained on: a thread fills one of two batches (reading, checksums,
an epoch's packing) while the run uses the other. Micro-batches come in the order of dataloader_next. Between
prefetch_start and prefetch_stop the loader belongs to the thread. Only starting allocates.

A rank gets the micro-batches of a step, or parts of micro-batches, that are assigned to it (world.h). A step is
normalised by the counts of all micro-batches on all ranks, so each micro-batch carries these counts, from the data's
tables. An error of the thread ends the program when its micro-batch is taken, with the same line and exit code; earlier
steps are finished and saved. A program that ends otherwise stops its threads first.
*/
#ifndef LLMC_PREFETCH_H
#define LLMC_PREFETCH_H
#include "step_deal.h"
#include "llmc/ranks/world.h"
#include <pthread.h>
#include <setjmp.h>

typedef struct {
    Batch whole;              // the micro-batch as read
    Batch batch;              // this rank's part
    size_t number;            // index within the step
    size_t sp;                // ranks that share the micro-batch; 0: as in the whole run
    DealSummary deal;         // summary of the step's deal
    TargetCounts step_counts; // totals over all micro-batches of the step
    size_t step_batches;      // number of this rank's micro-batches in the step
    uint64_t after;           // position after the micro-batch; for a rank's last micro-batch of a step, after the step
} MicroBatch;

typedef struct Prefetch {
    DataLoader *loader;
    Assignment assignment; // this rank's assignment in the step being read, for data packed by steps
    size_t step;           // micro-batches of this step; the last round of the step's assignment may be incomplete
    StepDeal dealt;        // deal of the step, with --sp auto
    size_t rank;           // rank for which the deal is read
    MicroBatch slot[2];
    double waited; // total seconds in prefetch_take
    pthread_t thread;
    pthread_mutex_t lock; // guards the fields below
    pthread_cond_t changed;
    uint64_t filled, taken, freed; // micro-batches so far; the i-th is slot[i % 2]
    int running, stop, failed;     // failed: the exit code
    char message[DIE_MESSAGE];
    struct Prefetch *next; // the next Prefetch with a thread, in the list of all
} Prefetch;

static Prefetch *prefetch_running;
static __thread jmp_buf prefetch_failure;
static __thread Prefetch *prefetch_own; // the Prefetch that this thread serves

static void prefetch_caught(int code, const char *message) {
    Prefetch *p = prefetch_own;
    pthread_mutex_lock(&p->lock);
    p->failed = code;
    snprintf(p->message, sizeof(p->message), "%s", message);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    longjmp(prefetch_failure, 1);
}

// ---- the thread -----------------------------------------------------------------------------------------------------
// Reads the rank's i-th pass of a dealt step. The loader's position stays at the step's beginning until the last pass.
static void prefetch_read_dealt(Prefetch *p, size_t i, MicroBatch *micro) {
    const DealtPass pass = step_deal_pass(&p->dealt, p->rank, i);
    const int counts = pass.sequence < p->dealt.deal.sequences;
    if (counts) step_deal_read(&p->dealt, p->loader, pass.sequence, &micro->whole);
    micro->batch = counts ? batch_part(&micro->whole, 1, 0) : batch_empty(&micro->whole);
    micro->after = dataloader_after(p->loader, p->loader->next, p->step);
    if (i + 1 == p->dealt.passes) p->loader->next = micro->after;
    micro->number = counts ? pass.sequence : pass.sequence + p->rank, micro->step_batches = p->dealt.passes;
    micro->sp = pass.sp, micro->deal = deal_summary(&p->dealt.deal);
}

// Reads the rank's i-th micro-batch of a step. The loader is positioned after the rank's previous micro-batch.
static void prefetch_read(Prefetch *p, size_t i, MicroBatch *micro) {
    const Assignment assignment = p->assignment;
    const size_t own = assigned_batches(assignment), number = assigned_number(assignment, i);
    const size_t before = i ? min_size(assigned_number(assignment, i - 1) + 1, p->step) : 0;
    DataLoader *loader = p->loader;
    loader->next = dataloader_after(loader, loader->next, min_size(number, p->step) - before);
    if (number < p->step) dataloader_next(loader, &micro->whole);
    if (i + 1 == own) loader->next = dataloader_after(loader, loader->next, p->step - min_size(number + 1, p->step));
    micro->after = loader->next;
    micro->batch = number < p->step ? dataloader_part(loader, &micro->whole, assignment.parts, assignment.part)
                                    : batch_empty(&micro->whole);
    micro->number = number, micro->step_batches = own;
}

// Begins a step; the loader is positioned at the step's first micro-batch. Returns the counts over all micro-batches of
// the step. *own: number of this rank's micro-batches
static TargetCounts prefetch_begin_step(Prefetch *p, size_t *own) {
    TargetCounts counts;
    p->step = p->assignment.batches;
    if (p->loader->packing.step) {
        p->step = dataloader_step(p->loader, p->loader->next);
        p->assignment = assign_rounds(p->assignment, p->step);
    }
    counts = dataloader_targets(p->loader, p->loader->next, p->step);
    *own = assigned_batches(p->assignment);
    if (!p->dealt.table) return counts;
    *own = step_deal_make(&p->dealt, p->loader, p->loader->next, p->step, p->rank);
    counts.batches = (double)p->dealt.deal.sequences;
    return counts;
}

static void prefetch_fill(Prefetch *p) {
    TargetCounts counts = {0};
    size_t own = 1;
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0;; i = (i + 1) % own) {
        MicroBatch *micro = &p->slot[p->filled % 2];
        while (!p->stop && p->filled - p->freed == 2) pthread_cond_wait(&p->changed, &p->lock);
        if (p->stop) break;
        pthread_mutex_unlock(&p->lock);
        if (i == 0) counts = prefetch_begin_step(p, &own);
        (p->dealt.table ? prefetch_read_dealt : prefetch_read)(p, i, micro);
        micro->step_counts = counts;
        pthread_mutex_lock(&p->lock);
        p->filled++;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
}

static void *prefetch_run(void *context) {
    prefetch_own = (Prefetch *)context;
    die_caught = prefetch_caught;
    if (!setjmp(prefetch_failure)) prefetch_fill(prefetch_own);
    return NULL;
}

// ---- starting and stopping ------------------------------------------------------------------------------------------
static void prefetch_stop(Prefetch *p) {
    Prefetch **link = &prefetch_running;
    if (!p->running) return;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    p->running = 0;
    while (*link != p) link = &(*link)->next;
    *link = p->next;
}

static void prefetch_stop_all(void) {
    while (prefetch_running) prefetch_stop(prefetch_running);
}

// Starts the thread, which first reads the micro-batch at `position`. A step must begin there.
static void prefetch_start(Prefetch *p, uint64_t position) {
    static int prepared;
    sigset_t all, before;
    if (!prepared) atexit(prefetch_stop_all);
    prepared = 1;
    p->loader->next = position;
    p->filled = p->taken = p->freed = 0;
    p->stop = p->failed = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // only the main thread handles signals
    int error = pthread_create(&p->thread, NULL, prefetch_run, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) die("cannot start the thread that reads the data: %s; raise the limit with ulimit -u", strerror(error));
    p->running = 1;
    p->next = prefetch_running, prefetch_running = p;
}

static void prefetch_allocate(Prefetch *p, DataLoader *loader, Assignment assignment) {
    memset(p, 0, sizeof(*p));
    p->loader = loader, p->assignment = assignment;
    for (int i = 0; i < 2; i++) p->slot[i].whole = dataloader_batch(loader);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
}

// Makes the prefetcher deal the steps by `table` (--sp auto). rank: whose sequences it prefetches
static void prefetch_deal(Prefetch *p, const DealTable *table, size_t rank) {
    const Packing *packing = &p->loader->packing;
    const size_t largest = packing->step ? packing->step : p->assignment.batches * p->loader->bound.documents;
    step_deal_allocate(&p->dealt, table, min_size(largest, p->loader->samples * p->assignment.batches));
    p->rank = rank;
}

static void prefetch_free(Prefetch *p) {
    prefetch_stop(p);
    if (!p->loader) return;
    batch_free(&p->slot[0].whole), batch_free(&p->slot[1].whole);
    step_deal_free(&p->dealt);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    memset(p, 0, sizeof(*p));
}

// ---- taking ---------------------------------------------------------------------------------------------------------
// Frees the micro-batch taken before, and waits for the next micro-batch.
static MicroBatch *prefetch_wait(Prefetch *p) {
    double begin = seconds_now();
    pthread_mutex_lock(&p->lock);
    p->freed = p->taken;
    pthread_cond_broadcast(&p->changed);
    while (p->filled == p->taken && !p->failed) pthread_cond_wait(&p->changed, &p->lock);
    int failed = p->filled == p->taken ? p->failed : 0;
    pthread_mutex_unlock(&p->lock);
    if (failed) die_with(failed, "%s", p->message);
    p->waited += seconds_now() - begin;
    return &p->slot[p->taken % 2];
}

// Takes the next micro-batch, valid until the next call.
static MicroBatch *prefetch_take(Prefetch *p) {
    MicroBatch *next = prefetch_wait(p);
    p->taken++;
    return next;
}

#endif
