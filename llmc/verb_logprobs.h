/*
The verb `logprobs`: log-probabilities of data under a model, written for objectives that have a reference.
*/
#ifndef LLMC_VERB_LOGPROBS_H
#define LLMC_VERB_LOGPROBS_H
#include "run.h"

static inline int verb_logprobs(const Options *options) {
    options_refuse(options->verb, "is not in this version");
    return 0;
}

#endif
