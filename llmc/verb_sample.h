/*
The verb `sample`: text from a model, with a key/value cache (sampler.h).
*/
#ifndef LLMC_VERB_SAMPLE_H
#define LLMC_VERB_SAMPLE_H
#include "json_out.h"
#include "prompt.h"
#include "run.h"

static inline int verb_sample(const Options *options) {
    Run run;
    Prompt prompt;
    Sampler sampler;
    SamplingSettings sampling = sampling_from_options(options);
    int32_t *ids;
    size_t i;
    run_open_model(&run, options, NULL);
    prompt = prompt_from_options(options, &run.model);
    run.settings = settings_from_options(&run);
    run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
    check_positions(&run, run.settings.cache_tokens, "the prompt and --max-new-tokens together,");
    run_allocate(&run, regular_bound(0, 0));
    sampler_allocate(&sampler, &run.model, run.settings.cache_tokens);
    run_load_weights(&run);
    ids = (int32_t *)checked_calloc(options->max_new_tokens, sizeof(int32_t), "the sampled tokens");
    generate(&sampler, &run.stream, &prompt, &sampling, ids, options->max_new_tokens, options->json ? NULL : stdout);
    if (options->json) {
        JsonOut json = json_open(stdout);
        char *text = (char *)checked_calloc(options->max_new_tokens, TEXT_BYTES_PER_TOKEN, "the sampled text");
        json_object(&json, NULL);
        json_array(&json, "prompt_ids");
        for (i = 0; i < prompt.count; i++) json_size(&json, NULL, (size_t)prompt.id[i]);
        json_array_end(&json);
        json_array(&json, "ids");
        for (i = 0; i < options->max_new_tokens; i++) json_size(&json, NULL, (size_t)ids[i]);
        json_array_end(&json);
        if (prompt.bytes) json_bytes(&json, "text", text, prompt_text(&prompt, ids, options->max_new_tokens, text));
        json_object_end(&json);
        json_finish(&json);
        free(text);
    }
    sampler_free(&sampler);
    free(ids);
    free(prompt.id);
    run_close(&run);
    return 0;
}

#endif
