/*
The verbs `convert`, from one format of weights to another, and `info`, what a model is.
*/
#ifndef LLMC_CONVERT_VERB_H
#define LLMC_CONVERT_VERB_H
#include "llmc/cli/report.h"
#include "llmc/files/hf_write.h"
#include "llmc/files/merge.h"

// 1: a Hugging Face folder is written, 0: one file. Refuses names of other formats, and options that have no meaning.
static int convert_to_folder(const Options *options) {
    static const char *const only[] = {"like", "max-shard-size"};
    static const char *const others[] = {".gguf", ".safetensors", ".pt", ".pth", ".ckpt", ".onnx"};
    const char *out = options->out;
    int folder = options->to == CONVERT_AUTO ? !text_ends_with(out, ".bin")
                                             : text_is_one_of(option_chosen(options, "to"), "hf|text|nf4|fp4");
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        if (text_ends_with(out, others[i]))
            die_usage("--out %s: no %s file is written; give the name of a folder%s", out, others[i],
                      i ? ", which is the model" : ", and make it of that with llama.cpp's convert_hf_to_gguf.py");
    if (folder && text_ends_with(out, ".bin"))
        die_usage("--out %s: --to %s writes a folder; give it a name without .bin", out, option_chosen(options, "to"));
    for (size_t i = 0; i < 2; i++)
        if (!folder && option_given(options, only[i]))
            die_usage(
                "--%s is about Hugging Face folders, but --out %s is to be one file; give a folder name, or --to hf",
                only[i], out);
    return folder;
}

static QuantType convert_quantises(const Options *options) {
    return options->to == CONVERT_NF4 ? QUANT_NF4 : options->to == CONVERT_FP4 ? QUANT_FP4 : QUANT_NONE;
}

// dtype: NULL: keep what the source has. *written: what most tensors are in then. Returns the number of files of
// weights.
static size_t convert_write(const Options *options, WeightSource *source, const DType *dtype, DType *written) {
    const DType type = dtype ? *dtype : source->dtype;
    char hub[PATH_MAX];
    *written = type;
    if (options->to == CONVERT_LLMC) {
        llmc_gpt2_write(source, options->out, type);
    } else if (!convert_to_folder(options)) {
        weights_convert(source, options->out, type);
    } else {
        const char *like = hub_path_find("--like", options->like, hub, options->quiet);
        HfWrite write = hf_write_prepare(source, dtype, like, options->max_shard_size, options->to == CONVERT_TEXT,
                                         convert_quantises(options), options->quantise_head);
        hf_write(&write, options->out, options->overwrite);
        *written = write.type;
        hf_write_free(&write);
        return write.shards;
    }
    return 1;
}

static void convert_begin_merge(Run *run, Merge *merge, DType dtype) {
    if (dtype == DTYPE_FP16)
        die("%s: merged weights are not written in fp16; choose --dtype fp32 or bf16", run->source->path);
    if (run->adapter_base.weights) {
        const BaseKey found = base_key_of_source(run->source);
        adapter_check_base(run->adapter->path, &run->adapter_base, &found, run->options->model);
    }
    merge_begin(merge, run->source, run->adapter, &run->lora);
}

static int verb_convert(const Options *options) {
    Run run;
    Merge merge;
    const int folder = convert_to_folder(options), typed = option_given(options, "dtype");
    run_open_model(&run, options, NULL);
    if (!run.source) run.source = weights_random(&run.model.config, run.model.dtype, options->seed);
    const DType dtype = typed ? run.model.dtype : run.source->dtype;
    DType written;
    if (options->merge) convert_begin_merge(&run, &merge, dtype);
    size_t files = convert_write(options, run.source, typed ? &dtype : NULL, &written);
    if (!options->quiet) {
        fprintf(run.text, "%s: %s parameters in %s", options->out, human_count((double)run.model.elements),
                dtype_name(written));
        if (folder) fprintf(run.text, ", %zu file%s", files, files > 1 ? "s" : "");
        fputc('\n', run.text);
    }
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_text(&json, "out", options->out);
        json_text(&json, "format", folder ? "hf" : options->to == CONVERT_LLMC ? "llmc" : "flat");
        json_size(&json, "parameters", run.model.elements);
        json_text(&json, "dtype", dtype_name(written));
        json_size(&json, "files", files);
        json_object_end(&json);
        json_finish(&json);
    }
    if (options->merge) merge_end(&merge);
    run_close(&run);
    return 0;
}

static int verb_info(const Options *options) {
    Run run;
    char text[4096];
    run_open_model(&run, options, NULL);
    config_to_text(&run.model.config, text, sizeof(text));
    report_model(run.text, &run.model);
    if (!options->quiet) {
        fprintf(run.text, "config   %s\n", text);
        for (size_t i = 0; i < run.model.parameter_count; i++) {
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
