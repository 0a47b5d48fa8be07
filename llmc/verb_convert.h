/*
The verbs `convert`, from one format of weights to another, and `info`, what a model is.
*/
#ifndef LLMC_VERB_CONVERT_H
#define LLMC_VERB_CONVERT_H
#include "json_out.h"
#include "run.h"
#include "weights.h"

static inline int verb_convert(const Options *options) {
    Run run;
    DType dtype;
    run_open_model(&run, options, NULL);
    if (!run.source) die_usage("convert reads a model from files; give --model PATH instead of --init");
    dtype = option_given(options, "dtype") ? run.model.dtype : run.source->dtype;
    weights_convert(run.source, options->out, dtype);
    if (!options->quiet)
        fprintf(run.text, "%s: %s parameters in %s\n", options->out, human_count((double)run.model.elements),
                dtype_name(dtype));
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_text(&json, "out", options->out);
        json_size(&json, "parameters", run.model.elements);
        json_text(&json, "dtype", dtype_name(dtype));
        json_object_end(&json);
        json_finish(&json);
    }
    run_close(&run);
    return 0;
}

static inline int verb_info(const Options *options) {
    Run run;
    char text[1024];
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
