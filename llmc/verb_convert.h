/*
The verbs `convert`, from one format of weights to another, and `info`, what a model is.
*/
#ifndef LLMC_VERB_CONVERT_H
#define LLMC_VERB_CONVERT_H
#include "hf_write.h"
#include "json_out.h"
#include "run.h"
#include "weights.h"

// Whether to write a Hugging Face folder, and not a flat .bin. What has no meaning then is refused.
static inline int convert_to_folder(const Options *options) {
    static const char *const only[] = {"like", "max-shard-size"};
    int folder = strcmp(options->to, "auto") != 0 ? !strcmp(options->to, "hf") : !text_ends_with(options->out, ".bin");
    size_t i;
    for (i = 0; i < 2; i++)
        if (!folder && option_given(options, only[i]))
            die_usage(
                "--%s is about Hugging Face folders, but --out %s is to be a flat .bin; give a folder name, or --to hf",
                only[i], options->out);
    if (folder && !strcmp(options->to, "auto") && text_ends_with(options->out, ".safetensors"))
        die_usage("--out %s: a .safetensors file alone is no model; give a name for its folder", options->out);
    return folder;
}

// dtype: NULL: keep what the source has. Returns the number of files of weights.
static inline size_t convert_write(const Run *run, const WeightSource *source, const DType *dtype) {
    const Options *options = run->options;
    HfWrite write;
    if (!convert_to_folder(options)) {
        weights_convert(source, options->out, dtype ? *dtype : source->dtype);
        return 1;
    }
    write = hf_write_prepare(source, dtype, options->like, options->max_shard_size);
    hf_write(&write, options->out);
    hf_write_free(&write);
    return write.shards;
}

static inline int verb_convert(const Options *options) {
    Run run;
    DType dtype;
    size_t files;
    int folder = convert_to_folder(options);
    run_open_model(&run, options, NULL);
    if (!run.source) run.source = weights_random(&run.model.config, run.model.dtype, options->seed);
    dtype = option_given(options, "dtype") ? run.model.dtype : run.source->dtype;
    files = convert_write(&run, run.source, option_given(options, "dtype") ? &dtype : NULL);
    if (!options->quiet) {
        fprintf(run.text, "%s: %s parameters in %s", options->out, human_count((double)run.model.elements),
                dtype_name(dtype));
        if (folder) fprintf(run.text, ", %zu file%s", files, files > 1 ? "s" : "");
        fputc('\n', run.text);
    }
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_text(&json, "out", options->out);
        json_text(&json, "format", folder ? "hf" : "flat");
        json_size(&json, "parameters", run.model.elements);
        json_text(&json, "dtype", dtype_name(dtype));
        json_size(&json, "files", files);
        json_object_end(&json);
        json_finish(&json);
    }
    run_close(&run);
    return 0;
}

static inline int verb_info(const Options *options) {
    Run run;
    char text[4096];
    size_t i;
    run_open_model(&run, options, NULL);
    config_to_text(&run.model.config, text, sizeof(text));
    report_model(run.text, &run.model);
    if (!options->quiet) {
        fprintf(run.text, "config   %s\n", text);
        for (i = 0; i < run.model.parameter_count; i++) {
            const Parameter *p = &run.model.parameters[i];
            char shape[48];
            snprintf(shape, sizeof(shape), p->cols ? "[%zu, %zu]" : "[%zu]", p->rows, p->cols);
            fprintf(run.text, "  %-18s %s\n", shape, p->name);
        }
    }
    if (options->json) {
        JsonOut json = json_open(stdout);
        report_model_json(&json, &run.model, run.source ? run.source->dtype : run.model.dtype);
        json_finish(&json);
    }
    run_close(&run);
    return 0;
}

#endif
