/*
The verbs `convert`, which writes weights in another format, and `info`, which describes a model.
*/
#ifndef LLMC_CONVERT_VERB_H
#define LLMC_CONVERT_VERB_H
#include "llmc/run/report.h"
#include "llmc/files/adapter_split.h"
#include "llmc/files/hf_write.h"
#include "llmc/files/merge.h"
#include "llmc/files/run_source.h"

// Returns 1 to write a Hugging Face folder, 0 for one file. Refuses every other format, and options that do not apply.
static int convert_to_folder(const Options *options) {
    static const char *const only[] = {"like", "max-shard-size", "tokenizer"};
    static const char *const others[] = {".gguf", ".safetensors", ".pt", ".pth", ".ckpt", ".onnx"};
    const char *out = options->out;
    int folder = options->to == CONVERT_AUTO
                     ? !text_ends_with(out, ".bin")
                     : text_is_one_of(option_chosen(options, "to"), "hf|text|nf4|fp4|mxfp4|fp8");
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        if (text_ends_with(out, others[i]))
            die_usage("--out %s: convert writes no %s files; give a folder name%s", out, others[i],
                      i ? "" : ", then run llama.cpp's convert_hf_to_gguf.py on it");
    if (folder && text_ends_with(out, ".bin"))
        die_usage("--out %s: --to %s writes a folder; give it a name without .bin", out, option_chosen(options, "to"));
    if (!strcmp(options->tokenizer, "bytes"))
        die_usage("--tokenizer bytes: for convert it must be auto, none or a file");
    for (size_t i = 0; i < sizeof(only) / sizeof(only[0]); i++)
        if (!folder && option_given(options, only[i]))
            die_usage("--%s applies to Hugging Face folders, but --out %s is one file; give a folder name, or --to hf",
                      only[i], out);
    return folder;
}

static int convert_is_adapter_name(const char *name) {
    return text_is_one_of(name, ADAPTER_CONFIG_NAME "|" ADAPTER_FILE_NAME "|" TOKENIZER_NAME "|" TEMPLATE_NAME);
}

typedef struct {
    DType dtype; // dtype of most tensors
    size_t files;
    uint64_t bytes;               // bytes of the weights
    char tokenizer[2 * PATH_MAX]; // where the tokenizer was copied from; empty: there is none
} Converted;

// Refuses a model that an FP8 folder cannot hold. Notes short blocks, which transformers reads wrong.
static void convert_check_fp8(const WeightSource *source, const char *like) {
    const Model *model = &source->model;
    const char *name = NULL;
    size_t count = 0;
    if (source->stored == QUANT_FP8 && like)
        die_usage("--to fp8 keeps the bytes of an FP8 folder, and takes no --like; leave --like out");
    for (size_t i = 0; i < model->parameter_count && source->stored != QUANT_FP8; i++) {
        const Parameter *p = &model->parameters[i];
        if (!parameter_quantises(model, p, QUANT_FP8, 0)) continue;
        if (p->transposed || (p->experts && !model->config.family->names.expert[0]))
            die_usage("--to fp8: FP8 folders hold no matrices as %s does (%s); --base fp8 quantises them for a run",
                      model->config.family->name, p->name);
        const size_t rows =
            parameter_file_format(quant_format(QUANT_FP8, DTYPE_BF16), model->config.family, p).grid.rows;
        if ((rows > FP8_BLOCK && rows % FP8_BLOCK) || (p->cols > FP8_BLOCK && p->cols % FP8_BLOCK))
            name = p->name, count++;
    }
    if (count)
        note("%zu matrices, such as %s, end with blocks of fewer than %d rows or columns, which transformers reads "
             "wrong",
             count, name, FP8_BLOCK);
}

// Writes the model in the chosen format. dtype NULL: the source's dtype
static Converted convert_write(const Options *options, WeightSource *source, const DType *dtype) {
    Converted result = {dtype ? *dtype : source->dtype, 1, 0, ""};
    char hub[PATH_MAX];
    struct stat status;
    if (options->to == CONVERT_LLMC) {
        llmc_gpt2_write(source, options->out, result.dtype);
    } else if (!convert_to_folder(options)) {
        weights_convert(source, options->out, result.dtype);
    } else {
        const char *like = hub_path_find("--like", options->like, hub, options->quiet);
        const QuantType quantised = quant_type_find(option_chosen(options, "to"));
        if (quantised == QUANT_MXFP4) run_check_mxfp4(&source->model, "--to");
        if (quantised == QUANT_MXFP4 && !source->config.family->expert_biases)
            die_usage("--to mxfp4 is a format of gpt_oss models, and this is %s; give --to nf4, which does not "
                      "quantise experts",
                      source->config.family->name);
        if (quantised == QUANT_FP8) convert_check_fp8(source, like);
        HfWrite write = hf_write_prepare(source, dtype, like, options->max_shard_size, options->to == CONVERT_TEXT,
                                         quantised, options->quantise_head);
        hf_find_tokenizer(&write, options->tokenizer);
        hf_write(&write, options->out, options->overwrite);
        result.dtype = write.type, result.files = write.shards, result.bytes = write.bytes;
        snprintf(result.tokenizer, sizeof(result.tokenizer), "%.*s%s%.*s", PATH_MAX - 1, hf_tokenizer_from(&write),
                 write.chat.replaces ? ", chat template from " : "", write.chat.replaces ? PATH_MAX - 1 : 0,
                 write.tokenizer);
        hf_write_free(&write);
    }
    if (!result.bytes && stat(options->out, &status) == 0) result.bytes = (uint64_t)status.st_size;
    return result;
}

// Returns the key of the base, to compare with the adapters' key. Adapters of a 4-bit base are merged into the weights
// of the base's files, but the adapters' key is the key of the 4-bit base. So the base is quantised here, only for the
// key.
static BaseKey convert_base_key(const Run *run, const RunSource *began) {
    WeightSource *source = run->source;
    const QuantFormat format = quant_format(quant_type_find(began->text[SOURCE_BASE]), DTYPE_FP32);
    if (source->quant || run->options->base != BASE_AUTO || !format.type) return base_key_of_source(source);
    source_quantise(source, format, *began->text[SOURCE_HEAD] != 0);
    const BaseKey key = base_key_of_source(source);
    free(source->quant), free(source->held->record);
    source->quant = NULL, source->held->record = NULL;
    if (!run->options->quiet)
        note("the adapters were trained on %s in %s; they are merged into its weights in %s", source->path,
             quant_type_names[format.type], dtype_name(source->dtype));
    return key;
}

// Copies adapter_model.safetensors, with the names of `list`. Returns the bytes written.
static uint64_t convert_adapter_file(const SafeTensors *list, const InputFile *file, OutputFolder *out) {
    const BaseKey base = adapter_recorded_base(file);
    const SafeTensor *first = list->tensors, *end = first + list->count;
    SafetensorsWriter writer;
    OutputFile output;
    qsort(list->tensors, list->count, sizeof(SafeTensor), safetensors_compare_offsets); // the data stay in order
    folder_open_file(out, &output, ADAPTER_FILE_NAME, file->bytes);
    adapter_write_begin(&writer, &output, NULL, 0, &base);
    for (const SafeTensor *t = first; t < end; t++)
        safetensors_write_tensor(&writer, t->name, t->dtype, t->shape, t->rank, t->end - t->begin);
    const uint64_t begin = safetensors_write_end(&writer), bytes = begin + writer.data;
    for (const SafeTensor *t = first; t < end; t++) hf_copy_tensor(file, t, &output, begin + t->begin - first->begin);
    if (ftruncate(output.fd, (off_t)bytes) != 0) output_fail(&output, errno, "shortening");
    output_commit(&output);
    return bytes;
}

// Writes only the adapters: PEFT's files, and the run's tokenizer with its chat template, or the tokenizer of
// --tokenizer.
static int convert_adapter(const Options *options) {
    char found[PATH_MAX], hub[PATH_MAX], path[PATH_MAX], beside[PATH_MAX];
    const char *names[] = {ADAPTER_CONFIG_NAME, ADAPTER_FILE_NAME, TOKENIZER_NAME};
    const char *tokenizer = options->tokenizer;
    const char *folder = hub_path_find("--adapter", options->adapter, hub, options->quiet);
    Lora lora = {0};
    Run run;
    SafeTensors list = {NULL, 0};
    OutputFolder out;
    folder = adapter_path_find(folder, found, options->quiet);
    path_join(path, folder, ADAPTER_CONFIG_NAME);
    cJSON_Delete(adapter_config_read(path, &lora));
    path_join(path, folder, ADAPTER_FILE_NAME);
    InputFile file = input_open(path);
    adapter_read_header(&list, &file);
    uint64_t bytes = file.bytes;
    const int split = options->adapter_layout == ADAPTER_PER_EXPERT;
    if (split) {
        lora_free(&lora);
        run_open_model(&run, options, NULL);
        adapter_split_header(run.adapter, &run.lora, &run.adapter_base, NULL, &bytes);
        lora = run.lora;
    }
    folder_open(&out, options->out, bytes + ADAPTER_CONFIG_MAX, 4, convert_is_adapter_name, options->overwrite);
    if (!strcmp(tokenizer, "auto")) tokenizer = tokenizer_beside(path, beside) ? beside : "none";
    const int has_tokenizer = strcmp(tokenizer, "none") != 0;
    Tokenizer *t = has_tokenizer ? tokenizer_load(tokenizer) : NULL;
    if (split) adapter_split_write(run.adapter, &run.lora, &run.adapter_base, options->model, &out, bytes);
    for (size_t i = split ? 2 : 0; i < 2 + (size_t)has_tokenizer; i++) {
        path_join(path, folder, names[i]);
        if (i == 1)
            bytes = convert_adapter_file(&list, &file, &out);
        else
            hf_copy_file(&out, i ? tokenizer : path, names[i]);
    }
    if (t && t->section_bytes[SECTION_TEMPLATE])
        folder_write_file(&out, TEMPLATE_NAME, t->section[SECTION_TEMPLATE], t->section_bytes[SECTION_TEMPLATE]);
    tokenizer_close(t);
    folder_commit(&out);
    input_close(&file), safetensors_free(&list);
    if (!options->quiet)
        fprintf(options->json ? stderr : stdout, "%s: adapters of rank %zu, %s, from %s; %s%s\n", options->out,
                lora.rank, human_bytes((double)bytes), folder, has_tokenizer ? "tokenizer from " : "no tokenizer",
                has_tokenizer ? tokenizer : "");
    if (split) run_close(&run);
    return 0;
}

static void convert_begin_merge(Run *run, Merge *merge, DType dtype, const RunSource *began) {
    if (dtype == DTYPE_FP16)
        die("%s: merged weights cannot be written in fp16; choose --dtype fp32 or bf16", run->source->path);
    if (run->adapter_base.weights) {
        const BaseKey found = convert_base_key(run, began);
        adapter_check_base(run->adapter->path, &run->adapter_base, &found, run->options->model);
    }
    merge_begin(merge, run->source, run->adapter, &run->lora);
}

static int verb_convert(const Options *options) {
    static RunSource began;
    Run run;
    Merge merge;
    char above[PATH_MAX];
    if (options->adapter_only) return convert_adapter(options);
    const int folder = convert_to_folder(options);
    run_open_model(&run, options, NULL);
    if (!run.source) run.source = weights_random(&run.model.config, run.model.dtype, options->seed);
    const char *read = run.adapter ? run.adapter->path : run.source->path;
    folder_above(above, read);
    if (!path_is_directory(read) && (run.adapter || !run.source->random)) run_source_read(above, &began);
    // fp32 weights of a run that began from a bf16 folder become bf16 again
    const int again =
        folder && run.source->dtype == DTYPE_FP32 && !strcmp(began.text[SOURCE_DTYPE], dtype_name(DTYPE_BF16));
    const int typed = option_given(options, "dtype"), chosen = typed || again;
    const DType dtype = typed ? run.model.dtype : again ? DTYPE_BF16 : run.source->dtype;
    if (options->merge) convert_begin_merge(&run, &merge, dtype, &began);
    const Converted written = convert_write(options, run.source, chosen ? &dtype : NULL);
    if (!options->quiet) {
        fprintf(run.text, "%s: %s parameters in %s, %zu file%s, %s, from %s", options->out,
                human_count((double)run.model.elements), dtype_name(written.dtype), written.files,
                written.files > 1 ? "s" : "", human_bytes((double)written.bytes), run.source->path);
        if (run.adapter) fprintf(run.text, " with %s", run.adapter->path);
        if (folder)
            fprintf(run.text, "; %s%s", *written.tokenizer ? "tokenizer from " : "no tokenizer", written.tokenizer);
        fputc('\n', run.text);
    }
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_text(&json, "out", options->out);
        json_text(&json, "format", folder ? "hf" : options->to == CONVERT_LLMC ? "llmc" : "flat");
        json_size(&json, "parameters", run.model.elements);
        json_text(&json, "dtype", dtype_name(written.dtype));
        json_size(&json, "files", written.files);
        json_size(&json, "bytes", (size_t)written.bytes);
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
    report_model(run.text, &run);
    if (!options->quiet) {
        fprintf(run.text, "config   %s\n", text);
        for (size_t i = 0; i < run.model.parameter_count; i++) {
            const Parameter *p = &run.model.parameters[i];
            uint64_t file[3] = {p->rows, p->cols, 0};
            char shape[48];
            if (p->joined) parameter_shape(p, file);
            if (p->part) continue; // the first part stands for all parts
            snprintf(shape, sizeof(shape), p->cols ? "[%zu, %zu]" : "[%zu]", (size_t)file[0], (size_t)file[1]);
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
