/*
--seq-len auto: the length that the data needs, the model has positions for and memory takes.
*/
#ifndef LLMC_SEQ_LEN_H
#define LLMC_SEQ_LEN_H
#include "keep_plan.h"

// Returns T, or the largest length below it whose micro-batch fits `limit` bytes on every rank. tokens: of all data.
// Plans full documents; reserves a 64th of `limit` for micro-batches of more, shorter documents.
static size_t run_fitting_length(const Run *run, size_t tokens, size_t T, size_t limit) {
    const Options *o = run->options;
    const int deals = run->settings.deals;
    const size_t B = o->batch * sample_documents(o), parts = o->samples || deals ? 1 : run->assignment.parts;
    SequenceBound bound = {min_size(B * T, tokens), B, T, 0, 0};
    Run trial = *run;
    if (deals) trial.settings.world.sp = world_ranks(run->settings.world);
    const Search search = run_search(&trial, limit - limit / 64);
    size_t longest = T, whose;
    if (parts > 1) bound.N = min_size(bound.N, bound.N / parts + T);
    Batch shape = batch_shape(bound);
    run_plan(&trial, &shape, limit - limit / 64);
    batch_free(&shape);
    if (plan_pressure(&trial.plan, &search.limits) > 1)
        longest = search_longest(&search, bound_documents(run, bound, T));
    return dist_smallest(longest ? min_size(T, longest) : T, &whose); // 0: check_memory refuses the run
}

// Sets --seq-len. With shards of documents: the longest document in steps of SEQ_LEN_STEP, as data/prepare.py prints
// it, at most the model's positions and what fits. With other shards: the default. limit: bytes of a plan, 0: unknown
static void run_choose_length(Run *run, Options *o, size_t limit) {
    const Config *c = &run->model.config;
    size_t longest = 0, tokens = 0;
    char more[80] = "", scaling[32];
    if (!o->data.count || option_given(o, "seq-len")) return;
    documents_measure(o->data.path, o->data.count, &longest, &tokens);
    if (longest && o->val_data.count) documents_measure(o->val_data.path, o->val_data.count, &longest, &tokens);
    o->given[option_find("seq-len")] = 1; // so that the printed command line has --seq-len
    if (!longest) check_positions(run, o->seq_len, "--seq-len");
    if (!longest) return;
    const size_t needed = max_size(longest + (o->rollout ? o->max_new_tokens : 0), 2) - 1;
    const size_t most = min_size((needed + SEQ_LEN_STEP - 1) / SEQ_LEN_STEP * SEQ_LEN_STEP, c->max_position_embeddings);
    if (o->verb != VERB_PLAN) limit = memory_limit(o, ops_device->memory_available());
    o->seq_len = o->rollout ? most : run_fitting_length(run, tokens, most, limit); // prompts are never cut
    const int few = o->seq_len < min_size(needed, most), cut = most < needed;
    if (o->quiet || (!few && !cut && o->seq_len <= SEQ_LEN_STEP)) return;
    if (few)
        snprintf(more, sizeof(more), "; --seq-len %zu would not fit", most);
    else if (cut && config_can_scale(c))
        snprintf(more, sizeof(more), "; --rope-scaling %s makes more", scaling_text(c, needed, scaling));
    note("--seq-len %zu is what %s: the longest document has %zu positions%s", o->seq_len,
         few   ? "memory takes"
         : cut ? "the model has positions for"
               : "the data needs",
         needed, more);
}

#endif
