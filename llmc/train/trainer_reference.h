/*
The reference of a training run: the model that it began with, as its log-probabilities. A file of them (reference.h) is
named, or is kept beside the data; under adapters the base model is at hand and needs none.
*/
#ifndef LLMC_TRAINER_REFERENCE_H
#define LLMC_TRAINER_REFERENCE_H
#include "reference.h"
#include "trainer.h"

// Whether the reference is a file of log-probabilities, which then is one of the run's settings by the key of its
// model.
static int trainer_has_reference(const Trainer *t) {
    return objective_needs_reference(&t->run.settings.objective) && !t->run.settings.reference &&
           !t->run.options->rollout;
}

// Of a run that begins: files that were named are of the model at hand, unless any will do. last: the checkpoint of one
// that goes on, whose settings say which they were.
static void trainer_find_reference(Trainer *t, const char *last) {
    const Options *o = t->run.options;
    const int named = o->reference_logprobs || o->old_logprobs, begins = !*last;
    uint64_t base = 0;
    if (begins && ((named && !o->any_reference) || (trainer_has_reference(t) && !o->reference_logprobs)))
        base = run_base_key(&t->run);
    uint64_t policy =
        base && o->adapter && o->old_logprobs ? run_model_key(&t->run) : base; // new adapters change nothing yet
    reference_check(&t->run, &t->data, o->any_reference ? 0 : base, o->any_reference ? 0 : policy);
    if (!trainer_has_reference(t)) return;
    if (o->reference_logprobs)
        t->reference_key = t->run.reference.header.model_key;
    else
        t->reference_key = begins ? base : reference_key_of(last);
}

// What batches are filled from where no file was named: it is kept beside the data.
static void trainer_open_reference(Trainer *t, DataLoader *data, Prefetch *batches, LogprobFile *file) {
    if (!trainer_has_reference(t) || data->documents.settings.reference) return;
    reference_prepare(file, &t->run, data, &batches->slot[0].whole, t->reference_key, t->state.step == 0);
    data->documents.settings.reference = file;
}

// What the reference makes of a batch, where it is the base model under adapters.
static void trainer_reference(Trainer *t, Batch *batch, StepReport *report) {
    if (!t->run.settings.reference) return;
    run_reference(&t->run, batch);
    report->flops += flops_of_reference(&t->run.flop_count, batch);
}

#endif
