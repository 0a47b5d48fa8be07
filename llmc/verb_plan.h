/*
The verb `plan`: memory and FLOPs of a run, before anything is allocated; and the longest sequence within a limit.
*/
#ifndef LLMC_VERB_PLAN_H
#define LLMC_VERB_PLAN_H
#include "json_out.h"
#include "prompt.h"
#include "rollout.h"
#include "run.h"

static inline StreamBound plan_rollout(Run *run, const DataLoader *data) {
    RolloutSettings settings;
    Prompt text;
    memset(&text, 0, sizeof(text));
    settings = rollout_from_options(run, &text, NULL);
    return rollout_plan(&settings, &data->documents, &run->settings, run->options->seq_len);
}

static inline int verb_plan(const Options *options) {
    Run run;
    StreamBound bound;
    Batch shape;
    DataLoader data;
    double streams; // of a step, one for each replica at a time
    size_t longest = 0;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run_settle(&run);
    if (options->sample_every) {
        Prompt prompt = prompt_from_options(&run);
        run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
        prompt_free(&prompt);
    }
    memset(&data, 0, sizeof(data));
    if (options->data.count) data = run_open_data(&run, &options->data, run_shuffle(options));
    bound = options->rollout ? plan_rollout(&run, &data) : run_bound(&run, options->data.count ? &data : NULL);
    if (options->val_data.count && strcmp(options->plan_for, "bp") != 0) {
        DataLoader validation = run_open_data(&run, &options->val_data, SHUFFLE_OFF);
        if (options->data.count) dataloader_check_pair(&data, &validation);
        bound = larger_bound(bound, run_bound(&run, &validation));
        dataloader_close(&validation);
    }
    shape = batch_shape(bound);
    run.plan = plan_make(&run.settings, &shape);
    if (options->memory_limit)
        longest = plan_longest(&run.settings, bound_documents(bound, options->seq_len), options->memory_limit);
    report_header(&run);
    report_data(&run, &data, bound);
    if (options->memory_limit && !options->quiet)
        fprintf(run.text, "longest  --seq-len %zu fits into %s%s\n", longest,
                human_bytes((double)options->memory_limit),
                run.plan.total_bytes > options->memory_limit ? "; the planned one does not" : "");
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        report_plan_json(&json, &run.plan.arena);
        if (options->memory_limit) json_size(&json, "max_seq_len", longest);
        streams = (double)(deal_own(run.deal) * world_replicas(run.settings.world));
        report_work_json(&json, &run, streams * (double)world_sp(run.settings.world) * run.plan.flops,
                         streams * run.plan.model_flops);
        json_object_end(&json);
        json_finish(&json);
    }
    free(shape.document_start);
    if (options->data.count) dataloader_close(&data);
    run_close(&run);
    return 0;
}

#endif
