/*
A run: what the verbs that touch tensors have in common. They all begin with

    run_open           model, adapters and settings from the options
    run_open_data      shards
    run_allocate       plan, compared with the free memory, and the one allocation (allocate.h)
    run_load_weights   into it
    report_run         header and data (report.h)

After that nothing is allocated. run_close ends it.
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "llmc/data/logprobs.h"
#include "llmc/data/teacher.h"
#include "llmc/data/step_deal.h"
#include "llmc/files/adapter_file.h"
#include "llmc/files/run_paths.h"
#include "llmc/files/run_source.h"
#include "llmc/files/weights.h"
#include "llmc/tokenizer/tokenizer_file.h"
#include "llmc/estimate/choose.h"
#include "lora_options.h"
#include "settings.h"

#define SHORT_EPOCH 10 // steps of a short epoch

typedef struct Run {
    const Options *options;
    FILE *text; // stream for people: stdout, or stderr if stdout is JSON; discards on ranks other than the main one
    size_t memory_at_start;
    WeightSource *source; // open until the weights are read; NULL: random weights
    Model model;
    Storage storage;       // no format: weights are stored in the type in which they are used
    Lora lora;             // rank 0: no adapters
    WeightSource *adapter; // file of --adapter; open until it is read
    size_t grown_from;     // the vocabulary before --grow-vocabulary; 0: unchanged
    BaseKey adapter_base;  // key of the base that --adapter names
    BaseKey base;          // key of the model, if adapters are written
    RunSettings settings;
    Assignment assignment; // micro-batches of a step
    const char *attention; // the library that computes attention, "cuDNN 9.19.0"; NULL: our own kernels
    int has_begun;         // 1: the run is resumed
    Keeping begun;         // what it began to keep, if bits depend on that; LEVEL_NONE: free
    size_t workspace;      // AttentionChoice.workspace with which the resumed run began
    size_t available;      // bytes that the plan may take; 0: unknown
    unsigned barred;       // places that the planner leaves out: bit p for place p
    Plan plan;
    size_t needed;             // bytes of device memory that the run needs; the plan may take more to keep activations
    KeepLevel needs;           // the level of that plan
    size_t needs_logits_chunk; // its logits chunk
    DealTable table;           // levels of --sp auto
    size_t home;               // with --sp auto: ranks that share a sequence outside of steps
    Choice choice;             // if `chosen`, the fastest of several that fit
    int chosen;   // 1: `choice` has the least estimated time; 0: every tensor fits on the device, or no choice fits
    void *memory; // plan.total_bytes bytes
    void *host_memory; // plan.arena[PLACE_HOST].peak bytes
    void *disk_memory; // plan.disk_bytes bytes
    Arena arena[PLACES];
    StreamBP streambp;
    OptimizerState optimizer;
    StorageErrors errors;       // errors of matrices quantised at load
    LogprobFile reference, old; // log-probabilities of --data, if files are named
    LogprobFile teacher;        // of objective distill
    struct Run *live;           // a teacher that runs with the student (reference.h); NULL: none
    Batch mismatched;           // kto: mismatched documents of the micro-batch (batch_mismatch)
    double *document_reference; // [documents] the reference's log-probability of each document of `mismatched`; or NULL
    int kl_told;
    char model_path[PATH_MAX];     // --model, resolved; empty with --init
    char tokenizer_path[PATH_MAX]; // the model's tokenizer.json or tokenizer.tok, or empty
    char data_tokenizer[PATH_MAX]; // tokenizer file of --data, which decides how a turn ends, or empty
} Run;

// ---- model and settings --------------------------------------------------------------------------------------------
// Opens --adapter, or makes the adapters of --lora-rank.
static void run_open_lora(Run *run) {
    const Options *o = run->options;
    Lora *lora = &run->lora;
    char found[PATH_MAX], hub[PATH_MAX];
    const char *adapter = hub_path_find("--adapter", o->adapter, hub, o->quiet);
    if (adapter)
        run->adapter = adapter_open(adapter_path_find(adapter, found, o->quiet), &run->model, lora, &run->adapter_base);
    if (adapter && run->grown_from && *run->adapter->remark)
        die("%s: has rows for added tokens of its own, in %s, which --grow-vocabulary leaves out; give a base that "
            "transformers has grown",
            run->adapter->path, run->adapter->remark);
    if (o->adapter && dist_ranks() > 1) dist_check("adapters", weights_key(run->adapter));
    if (!o->lora_rank) return;
    lora->rank = o->lora_rank;
    lora->alpha = isnan(o->lora_alpha) ? 2 * (double)lora->rank : o->lora_alpha;
    lora->dropout = o->lora_dropout;
    lora->rslora = o->rslora;
    lora_from_options(lora, o, &run->model.config);
    if (lora->saves[LM_HEAD] && o->quantise_head)
        die_usage(
            "--quantise-head: --lora-modules-to-save trains the head, so it cannot be quantised; give one of the two");
    lora_build(lora, &run->model);
    const double many = (double)lora_of_experts(lora);
    if (many > 0.25e9 && !o->quiet)
        note("adapters of experts hold %s parameters: with AdamW in fp32 %s, and %s on disk a checkpoint; a lower "
             "--lora-rank takes less",
             human_count(many), human_bytes(16 * many), human_bytes(12 * many));
}

// Applies --rope-scaling in place of the model's scaling.
static void run_scale(Run *run, Config *config) {
    char old[1024], own[1024];
    const Config scaled = config_scale(config, run->options->rope_scaling, "--rope-scaling", EXIT_USAGE);
    config_scaling_text(config, old, sizeof(old)), config_scaling_text(&scaled, own, sizeof(own));
    if (config->rope.type != ROPE_DEFAULT && strcmp(old, own) != 0)
        note("--rope-scaling replaces the model's own scaling, %s", old);
    *config = scaled;
    if (run->source) run->source->config = run->source->model.config = scaled;
}

// Applies --grow-vocabulary. Leaves a model that has that size already, for example a checkpoint's.
static void run_grow(Run *run, Config *config) {
    const size_t rows = run->options->grow_vocabulary, old = config->vocab_size;
    if (run->options->init)
        die_usage("--grow-vocabulary: a model of --init has no rows to add to; give vocab_size=%zu among its keys",
                  rows);
    if (rows < old)
        die_usage("--grow-vocabulary %zu is below the %zu ids of this model; give %zu or more", rows, old, old);
    if (rows == old) return;
    run->grown_from = old, config->vocab_size = rows;
    if (run->source) source_grow(run->source, rows);
}

// Notes that adapters leave rows of added tokens untrained.
static void run_note_grown(const Run *run) {
    const Lora *lora = &run->lora;
    const int embedding = lora_trains_embedding(lora);
    const int head = lora->saves[LM_HEAD] || lora->outer[LM_HEAD].rank;
    if (!run->grown_from || !lora->rank || (embedding && head)) return;
    if (run->model.config.tie_word_embeddings)
        note("adapters do not train all rows of added tokens, and this model's head is its embedding: leave "
             "--lora-rank out to train them");
    else
        note("adapters do not train all rows of added tokens; --lora-modules-to-save embed_tokens,lm_head does");
}

// Refuses models that mxfp4 cannot hold: it stores experts alone, in blocks along their rows.
static void run_check_mxfp4(const Model *model, const char *option) {
    size_t experts = 0;
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        if (!parameter_quantises(model, p, QUANT_MXFP4, 0)) continue;
        if (p->cols % MXFP4_BLOCK)
            die_usage("%s mxfp4: %s has rows of %zu elements, not a multiple of %d; give %s nf4", option, p->name,
                      p->cols, MXFP4_BLOCK, option);
        experts++;
    }
    if (!experts)
        die_usage("%s mxfp4 is for experts, and this %s model has none; give %s nf4", option,
                  model->config.family->name, option);
}

// Chooses the storage of the model: from --base, or from its files. directory: the model's folder in a plan, which
// opens no weights; else NULL
static void run_choose_base(Run *run, const char *directory) {
    const Options *o = run->options;
    const QuantFormat format = quant_format(quant_type_find(option_chosen(o, "base")), run->model.dtype);
    const int wanted = format.type != QUANT_NONE;
    WeightSource *source = run->source;
    if (o->quantise_head && run->model.config.tie_word_embeddings)
        die_usage("--quantise-head: the head of this model is its embedding, which is not quantised; leave "
                  "--quantise-head out");
    if (format.type == QUANT_MXFP4) run_check_mxfp4(&run->model, "--base");
    if (source && wanted)
        for (size_t i = 0; i < run->model.parameter_count; i++)
            if (source_is_quantised(source, i) && source->quant[i].type != format.type)
                die_usage("--base %s: %s is in %s already, and is not quantised again; leave --base out, or give the "
                          "model that it was made from",
                          option_chosen(o, "base"), source->path, quant_type_names[source->quant[i].type]);
    if (source && wanted &&
        (source->stored != QUANT_FP8 || format.type != QUANT_FP8)) // other matrices of an FP8 folder stay
        source_quantise(source, format, o->quantise_head);
    if (source && source->quant && o->base != BASE_NONE) storage_build(&run->storage, &run->model, source->quant);
    if (source || (!wanted && !directory) || o->base == BASE_NONE) return;
    QuantFormat *formats = directory ? hf_directory_formats(directory, &run->model) : NULL;
    if (wanted && !(formats && format.type == QUANT_FP8))
        storage_choose(&run->storage, &run->model, format, o->quantise_head);
    else if (formats)
        storage_build(&run->storage, &run->model, formats);
    free(formats);
}

// Writes the type and number of quantised matrices, a setting that a resumed run must repeat.
static const char *run_base_text(const Run *run, char text[64]) {
    const Storage *storage = run->settings.storage;
    QuantFormat f = {QUANT_NONE, 0, 0, DTYPE_FP32, {0}};
    size_t count = 0;
    for (size_t i = 0; storage && i < run->model.parameter_count; i++)
        if (storage->format[i].type != QUANT_NONE) f = storage->format[i], count++;
    if (!storage) return "none";
    snprintf(text, 64, "%s,block=%zu,nested=%d,matrices=%zu", quant_type_names[f.type], f.block, f.nested, count);
    return text;
}

// Writes a model's name without owner, capitals and the word for its tuning: "x/Qwen3-8B-Base" gives "qwen3-8b".
static const char *shape_name(const char *hub, char name[64]) {
    size_t used = 0, length;
    for (const char *part = path_last(hub); *part; part += length + (part[length] == '-')) {
        char word[32] = "";
        length = strcspn(part, "-");
        for (size_t i = 0; i < min_size(length, 31); i++) word[i] = (char)tolower((unsigned char)part[i]);
        if (!text_is_one_of(word, "base|instruct|it|pt|chat"))
            used += (size_t)snprintf(name + min_size(used, 63), 64 - min_size(used, 63), "%s%s", used ? "-" : "", word);
    }
    return name;
}

// Returns the preset that stands for a Hugging Face model which is not on disk, whoever owns it; NULL: none.
static const char *preset_to_plan(const Options *o) {
    char found[PATH_MAX], wanted[64] = "", shape[64] = "";
    const char *typed = o->model;
    if (o->verb != VERB_PLAN || !typed || path_exists(typed) || hub_snapshot(typed, found)) return NULL;
    for (size_t i = 0; i < PRESETS; i++) {
        if (strcmp(shape_name(presets[i].hub, shape), shape_name(typed, wanted)) != 0 &&
            strcasecmp(presets[i].name, typed) != 0)
            continue;
        if (!o->quiet)
            note("--model %s: is not here; planned from the preset %s%s", typed, presets[i].name,
                 strcasecmp(path_last(typed), path_last(presets[i].hub)) ? ", whose positions may differ" : "");
        return presets[i].name;
    }
    return NULL;
}

// Opens the model of --model or --init, or `model` if a resumed run names neither.
static void run_open_model(Run *run, const Options *options, const char *model) {
    Config config;
    char remark[256] = "", found[PATH_MAX], hub[PATH_MAX];
    const char *init = options->init ? options->init : model ? NULL : preset_to_plan(options);
    memset(run, 0, sizeof(*run));
    run->memory_at_start = ops_device->memory_peak();
    run->options = options;
    run->text = options->json && is_main_rank() ? stderr : stdout;
    if (!init && !model)
        model = model_path_find(hub_path_find("--model", options->model, hub, options->quiet), found, options->quiet,
                                options->verb != VERB_PLAN);
    if (model) snprintf(run->model_path, sizeof(run->model_path), "%s", model);
    if (init) {
        config = config_from_text(init, "--init", EXIT_USAGE);
    } else if (options->verb == VERB_PLAN && model && path_is_directory(model)) {
        config = hf_directory_config(model, remark, sizeof(remark)); // a plan needs no weights
    } else {
        run->source = weights_open(model);
        if (dist_ranks() > 1) dist_check("model files", weights_key(run->source));
        config = run->source->config;
        memcpy(remark, run->source->remark, sizeof(remark));
    }
    if (options->rope_scaling) run_scale(run, &config);
    if (options->grow_vocabulary) run_grow(run, &config);
    if (*remark && !options->quiet) note("%s", remark);
    run->model = model_build(&config, dtype_or(options->dtype, ops_device->stored));
    if (run->source) model_copy_constants(&run->model, &run->source->model);
    run_choose_base(run, run->source || init ? NULL : model);
    run_open_lora(run);
    if (run->lora.rank && *run->model_path) run->lora.modules_prefix = hf_adapter_prefix(run->model_path);
    checkpoint_release();
}

// Writes --rope-scaling for sequences of T tokens.
static const char *scaling_text(const Config *c, size_t T, char text[32]) {
    snprintf(text, 32, "yarn,factor=%.0f", ceil((double)T / (double)config_unscaled_positions(c)));
    return text;
}

// Checks T against the model's positions. Refuses T beyond a learned table; notes T beyond rotary positions.
static void check_positions(const Run *run, size_t T, const char *what) {
    const Config *c = &run->model.config;
    char scaling[32];
    if (T <= c->max_position_embeddings || (run->options->quiet && !c->family->learned_positions)) return;
    if (c->family->learned_positions)
        die_usage("%s %zu is above the %zu positions of this model's table; use at most %zu", what, T,
                  c->max_position_embeddings, c->max_position_embeddings);
    if (run->options->verb == VERB_PLAN) return; // plan prints the note itself
    const int scales = config_can_scale(c);
    note("%s %zu is above max_position_embeddings %zu: the model has not seen positions beyond it%s%s", what, T,
         c->max_position_embeddings, scales ? "; give --rope-scaling " : "", scales ? scaling_text(c, T, scaling) : "");
}

// Notes that weights take more bytes in a run of a wider type.
static void run_note_growth(const Run *run) {
    const DType type = run->source ? run->source->dtype : run->model.dtype, own = run->model.dtype;
    const char *was = human_bytes((double)run->model.elements * (double)dtype_size(type));
    const char *is = human_bytes((double)run->model.elements * (double)dtype_size(own));
    if (dtype_size(type) >= dtype_size(own) || run->storage.format) return;
    note("the weights are %s, %s; this run has them in %s, %s (--dtype bf16 keeps bf16)", dtype_name(type), was,
         dtype_name(own), is);
}

// Opens the model, with settings for a pass over it. `model`: see run_open_model
static void run_open(Run *run, const Options *o, const char *model) {
    run_open_model(run, o, model);
    if (!o->quiet) run_note_growth(run);
    if (o->verb != VERB_SAMPLE && (!o->data.count || option_given(o, "seq-len")))
        check_positions(run, o->seq_len, "--seq-len");
    run->settings = settings_from_options(o, &run->model, run->lora.rank ? &run->lora : NULL);
    if (run->settings.backward && !o->quiet) run_note_grown(run);
    const int decodes = run->storage.type == QUANT_FP8 && o->base == BASE_AUTO && run->settings.backward;
    if (run->storage.format && (!decodes || run->lora.rank)) run->settings.storage = &run->storage;
    if (run->settings.storage && run->settings.backward && !run->lora.rank)
        die_usage("weights in %d bits are frozen: give --lora-rank to train adapters%s", quant_bits(run->storage.type),
                  o->base >= BASE_NF4 ? ", or leave --base out" : ", or --base none to train the decoded weights");
    const World world = run->settings.world;
    run->assignment = o->verb == VERB_EVAL
                          ? assign_evaluation(world, greatest_common_divisor(o->batch, world_replicas(world)))
                          : assign_step(world, o->grad_accum);
    if (o->samples) run->assignment = assign_rounds(run->assignment, (o->samples + o->batch - 1) / o->batch);
}

// Fills *source with the start of a run. Resumed: keeps it, updates what the command line repeats. From another run:
// copies that run's folder and type.
static void run_source_begin(const Run *run, RunSource *source) {
    static RunSource before;
    const Options *o = run->options;
    char above[PATH_MAX];
    if (!o->model && !o->init) return;
    memset(source, 0, sizeof(*source));
    snprintf(source->text[SOURCE_MODEL], PATH_MAX, "%s", o->model ? o->model : "");
    snprintf(source->text[SOURCE_INIT], PATH_MAX, "%s", o->init ? o->init : "");
    snprintf(source->text[SOURCE_SEED], PATH_MAX, "%zu", o->seed);
    snprintf(source->text[SOURCE_SCALING], PATH_MAX, "%s", o->rope_scaling ? o->rope_scaling : "");
    if (o->grow_vocabulary) snprintf(source->text[SOURCE_GROWN], PATH_MAX, "%zu", o->grow_vocabulary);
    snprintf(source->text[SOURCE_BASE], PATH_MAX, "%s", option_chosen(o, "base"));
    snprintf(source->text[SOURCE_HEAD], PATH_MAX, "%s", o->quantise_head ? "yes" : "");
    if (o->init || !realpath(run->model_path, source->text[SOURCE_PATH])) return;
    snprintf(source->text[SOURCE_DTYPE], PATH_MAX, "%s", dtype_name(run->source->dtype));
    if (path_is_directory(run->model_path)) {
        memcpy(source->text[SOURCE_FOLDER], source->text[SOURCE_PATH], PATH_MAX);
        return;
    }
    folder_above(above, run->model_path);
    run_source_read(above, &before);
    memcpy(source->text[SOURCE_FOLDER], before.text[SOURCE_FOLDER], PATH_MAX);
    if (*before.text[SOURCE_FOLDER]) memcpy(source->text[SOURCE_DTYPE], before.text[SOURCE_DTYPE], PATH_MAX);
}

// ---- data ----------------------------------------------------------------------------------------------------------
// Finds the tokenizer that shards must have been made with: the model's tokenizer.json, or the tokenizer file next to a
// run.
static void run_find_tokenizer(Run *run) {
    *run->tokenizer_path = 0;
    if (!*run->model_path || !run->options->model || run->grown_from) return; // it lacks the added tokens
    if (path_found(run->tokenizer_path, run->model_path, "tokenizer.json")) return;
    if (!tokenizer_beside(run->model_path, run->tokenizer_path)) *run->tokenizer_path = 0;
}

// Finds a tokenizer file next to the shards of --data with the chat template that rendered them, or with ends of
// answers given to prepare.py. It precedes the model's tokenizer in a new run without --tokenizer.
static void run_find_data_tokenizer(Run *run) {
    const Options *o = run->options;
    if (strcmp(o->tokenizer, "auto") != 0) return;
    ShardPaths shards = shard_paths_find(o->data.path, o->data.count);
    const char *alone = NULL; // a shard whose template no tokenizer file has
    char path[PATH_MAX];
    Tokenizer *t = NULL; // tokenizer of the last folder
    crc32_prepare();
    for (size_t i = 0; i < shards.count && !*run->data_tokenizer && is_token_shard(shards.at[i].path); i++) {
        InputFile file = input_open(shards.at[i].path);
        TokenShard shard = shard_read_header(&file);
        const int beside = tokenizer_beside_shard(shard.path, path);
        if (!t || strcmp(path, t->path) != 0) tokenizer_close(t), t = beside ? tokenizer_load(path) : NULL;
        const uint64_t rendered = shard.chat_template;
        const int decides = t && (rendered ? tokenizer_template(t) == rendered : t->section_bytes[SECTION_TURN_ENDS]);
        if (decides && t->fingerprint == shard.tokenizer)
            memcpy(run->data_tokenizer, path, sizeof(path));
        else if (rendered && !alone)
            alone = shards.at[i].path;
        input_close(&file), free(shard.path);
    }
    tokenizer_close(t);
    if (alone && !*run->data_tokenizer && !o->quiet)
        note("%s: no " TOKENIZER_NAME " next to it has its chat template, so the run keeps another template or none; "
             "copy the file there that data/prepare.py wrote, or give --tokenizer FILE",
             alone);
    shard_paths_free(&shards);
}

// Explains the step size if an epoch has fewer than SHORT_EPOCH steps.
static void note_short_epoch(const Options *o, const DataLoader *d) {
    const size_t steps = dataloader_batches(d) / o->grad_accum;
    if (steps >= SHORT_EPOCH || o->quiet || o->samples || d->regular || o->rollout || !options_train(o)) return;
    note("an epoch is %zu step%s: %zu %s, packed into %zu tokens a step (--batch x --seq-len%s); --samples N makes "
         "steps of N",
         steps, steps == 1 ? "" : "s", d->samples, dataloader_samples_name(d), d->packing.capacity * o->grad_accum,
         o->grad_accum > 1 ? " x --grad-accum" : "");
}

// Opens --data or --val-data.
static DataLoader run_open_data(Run *run, const PathList *paths, Shuffle shuffle) {
    const Options *o = run->options;
    DataSettings settings = data_settings_from_options(o, &run->settings, shuffle);
    if (paths == &o->data && o->reference_logprobs) {
        logprobs_open(&run->reference, o->reference_logprobs);
        settings.reference = &run->reference;
    }
    if (paths == &o->data && o->old_logprobs) {
        logprobs_open(&run->old, o->old_logprobs);
        settings.old = &run->old;
    }
    if (o->objective == OBJECTIVE_DISTILL && !o->teacher_logprobs && !o->teacher)
        die_usage("--objective distill needs a teacher's values: type logprobs --model TEACHER --data ... --top-k 64 "
                  "--out FILE, and give --teacher-logprobs FILE; or give --teacher PATH");
    if (o->teacher_logprobs && paths != &o->data)
        die_usage(
            "--val-data: the teacher's file has the tokens of --data; eval --objective distill checkpoints with a "
            "file of their data");
    if (paths == &o->data && o->teacher_logprobs) {
        teacher_open(&run->teacher, o->teacher_logprobs);
        settings.teacher = &run->teacher;
    }
    run_find_tokenizer(run);
    if (*run->tokenizer_path && !o->any_tokenizer) settings.tokenizer_path = run->tokenizer_path;
    if (paths != &o->data) settings.step = 0;
    DataLoader loader = dataloader_open(paths->path, paths->count, &settings);
    if (dist_ranks() > 1) dist_check("data", dataloader_fingerprint(&loader, o->batch));
    if (settings.step) run->assignment = assign_rounds(run->assignment, dataloader_step(&loader, 0));
    if (paths == &o->data) note_short_epoch(o, &loader);
    return loader;
}

// ---- weights -------------------------------------------------------------------------------------------------------
// Closes the weight files. An open file keeps its space on the disk even after its checkpoint is pruned.
static void run_close_source(Run *run) {
    if (run->source) weights_close(run->source);
    if (run->adapter) weights_close(run->adapter);
    run->source = run->adapter = NULL;
}

// Loads weights from a file, or fills them at random (source NULL).
static void run_fill(const Run *run, WeightSource *source, const Model *table, char *weights) {
    const Sharding held = weights_sharding(&run->streambp.memory);
    if (source)
        weights_load(source, table, held, ops_device, weights);
    else
        weights_init_random(table, held, ops_device, weights, run->options->seed);
}

// Loads --adapter, or fills new adapters. Copied modules begin as the tensors of the base.
static void run_fill_adapters(Run *run) {
    const Residency *memory = &run->streambp.memory;
    const Model *table = &run->lora.table;
    const Sharding held = weights_sharding(memory);
    run_fill(run, run->adapter, table, memory->adapters);
    if (run->adapter || !lora_copied(&run->lora)) return;
    WeightSource *base =
        run->source ? run->source : weights_random(&run->model.config, run->model.dtype, run->options->seed);
    for (Slabs s = slabs_of(table, SLABS_OF_PARAMETERS, held, held, NULL); slabs_next(&s);) {
        const Parameter *p = &table->parameters[s.parameter];
        if (p->offset != table->model_offset[EMBEDDING] && p->offset != table->model_offset[LM_HEAD]) continue;
        const size_t of = p->offset == table->model_offset[EMBEDDING] ? 0 : run->model.parameter_count - 1;
        weights_read(base, of, s.begin, s.count, table->dtype, staged.bytes);
        ops_device->copy_in(element_address(memory->adapters, table->dtype, s.offset), staged.bytes,
                            s.count * dtype_size(table->dtype));
    }
    if (!run->source) weights_close(base);
}

static void run_load_storage(Run *run, Sharding held) {
    const Residency *memory = &run->streambp.memory;
    WeightSource *source =
        run->source ? run->source : weights_random(&run->model.config, run->model.dtype, run->options->seed);
    if (!run->source) {
        source->quant = (QuantFormat *)checked_calloc(run->model.parameter_count, sizeof(QuantFormat), "formats");
        memcpy(source->quant, run->storage.format, run->model.parameter_count * sizeof(QuantFormat));
    }
    storage_load(source, &run->model, memory->storage, held, ops_device, memory->weights,
                 run->options->quiet && !run->options->json ? NULL : &run->errors);
    if (!run->source) weights_close(source);
}

// Loads the model's weights. Refuses a --adapter that was trained on another base.
static void run_load_base(Run *run) {
    const Options *o = run->options;
    const Residency *memory = &run->streambp.memory;
    const Sharding held = weights_sharding(memory);
    const int keyed = run->adapter_base.weights || (run->settings.lora && o->verb == VERB_TRAIN && o->out);
    if (memory->storage) {
        run_load_storage(run, held);
        if (keyed)
            run->base =
                base_key_of(&run->model, storage_key(&run->model, memory->storage, held, ops_device, memory->weights));
    } else {
        run_fill(run, run->source, &run->model, memory->weights);
        weights_check_finite(&run->model, held, ops_device, memory->place[PLACED_WEIGHTS], memory->weights);
        if (keyed) run->base = base_key(&run->model, held, ops_device, memory->weights);
    }
    if (run->adapter) adapter_check_base(run->adapter->path, &run->adapter_base, &run->base, o->model);
}

static void run_load_weights(Run *run) {
    const Residency *memory = &run->streambp.memory;
    char when[PATH_MAX + 8];
    run_load_base(run);
    if (run->settings.lora) run_fill_adapters(run);
    if (run->adapter) {
        snprintf(when, sizeof(when), "%s: ", run->adapter->path);
        weights_check_finite_at(&run->lora.table, weights_sharding(memory), ops_device, memory->place[PLACED_WEIGHTS],
                                memory->adapters, when, "take another copy or an earlier checkpoint");
    }
    run_close_source(run);
}

static void run_close(Run *run) {
    if (run->live) run_close(run->live), free(run->live);
    run_end(&run->streambp);
    if (run->memory) ops_device->release(run->memory, run->plan.total_bytes);
    if (run->host_memory) ops_device->host_release(run->host_memory, run->plan.arena[PLACE_HOST].peak);
    if (run->disk_memory) ops_device->disk_release(run->disk_memory, run->plan.disk_bytes);
    run_close_source(run);
    logprobs_close(&run->reference), logprobs_close(&run->old), logprobs_close(&run->teacher);
    batch_free(&run->mismatched), free(run->document_reference);
    storage_free(&run->storage);
    model_free(&run->model);
    lora_free(&run->lora);
}

// Returns the table that is trained: the model's, or its adapters'.
static const Model *run_trained(const Run *run) { return trained_table(&run->streambp.memory); }

// Counts the layer visits of `micro_batches` passes for the progress bar, as residency.h counts them. Includes passes
// for a computed reference and for mismatched documents.
static double layer_passes(const Run *run, size_t micro_batches) {
    const size_t passes = 1 + LAYER_BACKWARD_PARTS + (run->settings.reference != REFERENCE_NOT_COMPUTED) +
                          2 * objective_needs_mismatched(&run->settings.objective);
    const size_t live = run->live ? run->live->model.config.num_hidden_layers : 0;
    return (double)((run->model.config.num_hidden_layers * passes + live) * micro_batches);
}

// ---- the peak rate of this machine's matrix product, measured ------------------------------------------------------
// Fills `count` elements, uniform in [-1, 1). Their period is prime, so rows of a matrix are shifted against each
// other.
static void fill_random(void *device, DType type, size_t count, uint64_t seed) {
    enum { PERIOD = 4093 };
    const size_t size = dtype_size(type);
    float values[PERIOD];
    double elements[PERIOD]; // large enough for any type
    for (size_t i = 0; i < PERIOD; i++) values[i] = (float)(2 * random_uniform(seed, 0, i) - 1);
    elements_from_float(elements, type, values, PERIOD);
    ops_device->copy_in(device, elements, min_size(count, PERIOD) * size);
    for (size_t done = PERIOD; done < count; done *= 2)
        ops_device->copy((char *)device + done * size, device, min_size(done, count - done) * size);
}

// Measures the peak FLOP/s of the op set's matrix product: the best of a few n x n products. n doubles until a product
// takes milliseconds, or half a second has passed. Elements are random: on zeros a GPU takes less power, and its clocks
// are higher. Uses free memory of the arena (between two sequences nearly all is free). Returns 0 if it is too small.
static double run_peak_flops(Run *run) {
    const size_t size = dtype_size(run->model.dtype), mark = arena_mark(run->arena);
    const double start = seconds_now();
    double best = 0;
    for (size_t n = 128; n <= 8192; n *= 2) {
        const double flops = 2.0 * (double)(n * n * n);
        Stored *x[3];
        if (run->arena->capacity - run->arena->used < 3 * (n * n * size + ARENA_ALIGNMENT)) break;
        for (size_t i = 0; i < 3; i++) {
            x[i] = (Stored *)arena_push(run->arena, SHARE_WORKSPACE, "peak measurement", n * n, size);
            fill_random(x[i], run->model.dtype, n * n, i);
        }
        for (size_t i = 0; i < 4; i++) {
            const double begin = seconds_now();
            ops_device->linear_forward(x[0], x[1], x[2], NULL, NULL, n, n, n, n);
            ops_device->finish();
            best = fmax(best, flops / (seconds_now() - begin));
        }
        arena_pop(run->arena, mark);
        // on a busy CPU the product's threads may wait for milliseconds, however small it is
        if ((n >= 512 && flops > 5e-3 * best) || seconds_now() - start > 0.5) break;
    }
    return best;
}

#endif
