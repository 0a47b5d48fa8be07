/*
The verb `logprobs`: the log-probabilities of data under a model, into a file for objectives that have a reference or
old log-probabilities (logprobs.h). Shards of any kind: to the walk they are documents.
*/
#ifndef LLMC_VERB_LOGPROBS_H
#define LLMC_VERB_LOGPROBS_H
#include "llmc/base/json_out.h"
#include "llmc/train/reference.h"

static void logprobs_report_json(const char *path, const LogprobHeader *h, LogprobSum sum, double seconds) {
    JsonOut json = json_open(stdout);
    char key[2][24];
    snprintf(key[0], sizeof(key[0]), "%016llx", (unsigned long long)h->model_key); // JSON's numbers have 53 bits
    snprintf(key[1], sizeof(key[1]), "%016llx", (unsigned long long)h->data_key);
    json_object(&json, NULL);
    json_text(&json, "path", path);
    json_size(&json, "tokens", (size_t)h->tokens);
    json_size(&json, "documents", (size_t)h->documents);
    json_number(&json, "counted", sum.counted);
    json_number(&json, "loss", -sum.sum / sum.counted);
    json_text(&json, "model_key", key[0]);
    json_text(&json, "data_key", key[1]);
    json_number(&json, "seconds", seconds);
    json_object_end(&json);
    json_finish(&json);
}

static int verb_logprobs(const Options *options) {
    Run run;
    LogprobWriter writer;
    if (options->temperature == 0)
        options_refuse(options->verb, "--temperature 0 leaves the likeliest token alone; give a number above 0");
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    run.settings.objective.temperature = options->temperature;
    DataLoader loader = run_open_data(&run, &options->data, SHUFFLE_OFF);
    SequenceBound bound = dataloader_bound(&loader);
    run_allocate(&run, bound);
    Batch batch = dataloader_batch(&loader);
    LogprobHeader header = logprobs_header(&run, &loader, 0);
    logprobs_create(&writer, options->out, &header); // what it has to refuse it refuses before the work
    run_load_weights(&run);
    report_header(&run);
    report_data(&run, &loader, bound);
    double begin = seconds_now();
    writer.header.model_key = run_model_key(&run);
    LogprobSum sum = logprobs_compute(&writer, &run.streambp, &loader, &batch, assign_alone(1));
    if (!options->quiet || !options->json)
        fprintf(run.text, "%s: %.0f log-probabilities of %llu documents, on average %.6f\n", options->out, sum.counted,
                (unsigned long long)writer.header.documents, sum.sum / sum.counted);
    if (options->json) logprobs_report_json(options->out, &writer.header, sum, seconds_now() - begin);
    batch_free(&batch);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

#endif
