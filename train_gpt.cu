/*
train: fine-tunes and trains GPT/Llama-style models on very long sequences with StreamBP.

C11 that is also C++20: `cc -x c` builds the CPU program from these lines, nvcc will build the GPU program. Everything done to
tensors goes through struct Ops; nothing here looks inside one.
*/
#include "llmc/options.h"    // the command line: one table of options
#include "llmc/config.h"     // configuration, families, presets
#include "llmc/model.h"      // the parameter table
#include "llmc/weights.h"    // reading and writing models and gradients; random initialisation
#include "llmc/batch.h"      // a packed stream of documents
#include "llmc/dataloader.h" // token shards
#include "llmc/ops.h"        // what can be done to tensors
#include "llmc/arena.h"      // the one allocation
#include "streambp.h"        // steps and methods: the algorithm
#include "llmc/plan.h"       // what a run needs, before it is allocated
#include "llmc/run.h"        // model, settings, plan, memory: what every verb begins with
#include "llmc/sampler.h"    // generation with a key/value cache
#include "llmc/prompt.h"     // prompts from the command line, text from the sampler
#include "llmc/adamw.h"      // the optimizer over the parameter table
#include "llmc/schedule.h"   // learning rate by step
#include "llmc/checkpoint.h" // complete or absent; resuming to the bit
#include "llmc/log.h"        // step line, log.jsonl, progress bar
#include "llmc/report.h"     // plans for people and as JSON

// ---- bp: one forward and backward pass ---------------------------------------------------------------------------------
typedef struct {
    double loss, seconds, grad_norm;
} PassResult;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Micro-batch i of the pass: from --data, or random ids.
static void bp_batch(const Run *run, DataLoader *loader, size_t i, Batch *batch) {
    const Options *o = run->options;
    if (o->data.count)
        dataloader_seek(loader, i), dataloader_next(loader, batch);
    else
        batch_random(batch, o->batch, o->seq_len, i * o->batch, run->model.config.vocab_size, o->seed);
}

static PassResult bp_measure(Run *run, DataLoader *loader, Batch *batch) {
    const Options *o = run->options;
    double *seconds = (double *)checked_calloc(o->repeat, sizeof(double), "timings"), Z = 0;
    PassResult result = {0, 0, 0};
    const Parameter *bad = NULL;
    size_t repeat, i;
    for (i = 0; i < o->grad_accum; i++) {
        bp_batch(run, loader, i, batch);
        Z += batch_counted(batch);
    }
    for (repeat = 0; repeat < o->repeat; repeat++) {
        ops_device->zero(run->stream.memory.gradients, gradient_bytes(run));
        result.loss = 0;
        for (i = 0; i < o->grad_accum; i++) {
            double begin;
            if (o->grad_accum > 1) bp_batch(run, loader, i, batch);
            begin = seconds_now();
            result.loss += forward_backward(&run->stream, batch, Z);
            ops_device->finish();
            seconds[repeat] += seconds_now() - begin;
        }
        allocation_guard = getenv("STREAMBP_ALLOCATION_GUARD") != NULL;
    }
    allocation_guard = 0;
    qsort(seconds, o->repeat, sizeof(double), compare_doubles);
    result.seconds = seconds[o->repeat / 2];
    free(seconds);
    if (!isfinite(result.loss)) die("the loss is %f: NaN or Inf in the forward pass", result.loss);
    result.grad_norm =
        gradient_norm(&run->model, ops_device, run->stream.memory.gradients, run->settings.gradient_type, &bad);
    if (bad) die("the gradient of %s is not finite", bad->name);
    return result;
}

static int verb_bp(const Options *options) {
    Run run;
    DataLoader loader;
    Batch batch;
    PassResult result;
    size_t peak;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    memset(&loader, 0, sizeof(loader));
    if (options->data.count)
        loader = dataloader_open(options->data.path, options->data.count, options->batch, options->seq_len,
                                 run.model.config.vocab_size);
    if (options->grads_out) gradients_check_place(options->grads_out, &run.model);
    run_allocate(&run, options->batch, options->seq_len);
    batch = batch_allocate(options->batch * options->seq_len, options->batch);
    run_load_weights(&run);
    report_header(&run);
    result = bp_measure(&run, &loader, &batch);
    peak = ops_device->memory_peak() - run.memory_at_start;
    if (options->grads_out)
        gradients_write(options->grads_out, &run.model, ops_device, run.stream.memory.gradients,
                        run.settings.gradient_type);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   gradient norm %.6g   %.3f s   %.1f tokens/s   measured peak %s\n", result.loss,
                result.grad_norm, result.seconds,
                (double)(options->batch * options->seq_len * options->grad_accum) / result.seconds,
                human_bytes((double)peak));
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", result.loss);
        json_size(&json, "tokens", options->batch * options->seq_len * options->grad_accum);
        json_number(&json, "seconds", result.seconds);
        json_number(&json, "grad_norm", result.grad_norm);
        json_size(&json, "plan_bytes", run.plan.total_bytes);
        json_size(&json, "peak_bytes", peak);
        report_work_json(&json, &run);
        json_object_end(&json);
        json_finish(&json);
    }
    if (options->data.count) dataloader_close(&loader);
    batch_free(&batch);
    run_close(&run);
    return 0;
}

// ---- plan: memory and FLOPs before anything is allocated ------------------------------------------------------------------
static int verb_plan(const Options *options) {
    Run run;
    Batch shape;
    size_t longest = 0;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    if (options->sample_every) {
        Prompt prompt = prompt_from_options(options, &run.model);
        run.settings.cache_tokens = prompt_cache_tokens(&prompt, options);
        free(prompt.id);
    }
    shape = batch_shape(options->batch, options->seq_len);
    run.plan = plan_make(&run.settings, &shape);
    if (options->memory_limit) longest = plan_longest(&run.settings, options->batch, options->memory_limit);
    report_header(&run);
    if (options->memory_limit && !options->quiet)
        fprintf(run.text, "longest  --seq-len %zu fits into %s%s\n", longest,
                human_bytes((double)options->memory_limit),
                run.plan.total_bytes > options->memory_limit ? "; the planned one does not" : "");
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        report_plan_json(&json, &run.plan.arena);
        if (options->memory_limit) json_size(&json, "max_seq_len", longest);
        report_work_json(&json, &run);
        json_object_end(&json);
        json_finish(&json);
    }
    free(shape.document_start);
    run_close(&run);
    return 0;
}

// ---- eval: the loss of a model on data --------------------------------------------------------------------------------------
// Mean nats over the counted targets of `steps` micro-batches from the loader's first one on.
static double evaluate(StreamBP *stream, DataLoader *loader, Batch *batch, size_t steps, double *tokens) {
    Progress progress = progress_begin(stderr, "evaluating", 0, (double)steps);
    double sum = 0;
    size_t i;
    *tokens = 0;
    dataloader_seek(loader, 0);
    for (i = 0; i < steps; i++) {
        dataloader_next(loader, batch);
        sum += forward_only(stream, batch, 1); // Z = 1: the sum of the losses
        *tokens += batch_counted(batch);
        progress_update(&progress, (double)(i + 1));
    }
    progress_end(&progress);
    return sum / *tokens;
}

static int verb_eval(const Options *options) {
    Run run;
    DataLoader loader;
    Batch batch;
    double tokens, loss, begin;
    size_t steps;
    run_open_model(&run, options, NULL);
    check_positions(&run, options->seq_len, "--seq-len");
    run.settings = settings_from_options(&run);
    loader = dataloader_open(options->data.path, options->data.count, options->batch, options->seq_len,
                             run.model.config.vocab_size);
    steps = dataloader_batches(&loader);
    if (options->val_steps) steps = min_size(steps, options->val_steps);
    run_allocate(&run, options->batch, options->seq_len);
    batch = batch_allocate(options->batch * options->seq_len, options->batch);
    run_load_weights(&run);
    report_header(&run);
    begin = seconds_now();
    loss = evaluate(&run.stream, &loader, &batch, steps, &tokens);
    if (!isfinite(loss)) die("the loss is %f: NaN or Inf in the forward pass", loss);
    if (!options->quiet || !options->json)
        fprintf(run.text, "loss %.6f   perplexity %.4f   %.0f tokens\n", loss, exp(loss), tokens);
    if (options->json) {
        JsonOut json = json_open(stdout);
        json_object(&json, NULL);
        json_number(&json, "loss", loss);
        json_number(&json, "perplexity", exp(loss));
        json_number(&json, "tokens", tokens);
        json_number(&json, "seconds", seconds_now() - begin);
        json_object_end(&json);
        json_finish(&json);
    }
    batch_free(&batch);
    dataloader_close(&loader);
    run_close(&run);
    return 0;
}

// ---- sample: text from a model ------------------------------------------------------------------------------------------------
static int verb_sample(const Options *options) {
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
    run_allocate(&run, 0, 0);
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

// ---- convert, info -------------------------------------------------------------------------------------------------------------
static int verb_convert(const Options *options) {
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

static int verb_info(const Options *options) {
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

// ---- train ------------------------------------------------------------------------------------------------------------------------
typedef struct {
    Run run;
    DataLoader data, validation;
    Batch micro;    // the micro-batch at hand
    RunState state; // where the run stands
    RunSetting settings[16];
    char setting_text[16][1024];
    int has_folder;
    CheckpointFolder folder;
    RunLog log;
    Sampler sampler;
    Prompt prompt;
    int32_t *sampled;                   // [max_new_tokens]
    char *sampled_text;                 // [TEXT_BYTES_PER_TOKEN * max_new_tokens]
    double validation_loss, peak_flops; // NAN, 0: not known
} Trainer;

static void add_setting(Trainer *t, const char *name, int may_change, const char *format, ...) {
    size_t i = t->state.setting_count++;
    va_list args;
    va_start(args, format);
    vsnprintf(t->setting_text[i], sizeof(t->setting_text[i]), format, args);
    va_end(args);
    t->settings[i].name = name, t->settings[i].value = t->setting_text[i];
    t->settings[i].may_change = may_change;
}

// What has to be the same for a resumed run to give the same bits.
static void trainer_settings(Trainer *t) {
    const Options *o = t->run.options;
    char config[1024];
    t->state.settings = t->settings;
    config_to_text(&t->run.model.config, config, sizeof(config));
    add_setting(t, "model", 0, "%s", config);
    add_setting(t, "--seq-len", 0, "%zu", o->seq_len);
    add_setting(t, "--batch", 0, "%zu", o->batch);
    add_setting(t, "data", 0, "%016llx", (unsigned long long)dataloader_fingerprint(&t->data));
    add_setting(t, "--grad-accum", 0, "%zu", o->grad_accum);
    add_setting(t, "--seed", 0, "%zu", o->seed);
    add_setting(t, "AdamW", 0, "beta1=%.17g,beta2=%.17g,epsilon=%.17g,weight-decay=%.17g,grad-clip=%.17g", o->beta1,
                o->beta2, o->epsilon, o->weight_decay, o->grad_clip);
    add_setting(t, "--method", 1, "%s", o->method);
    add_setting(t, "--chunk", 1, "%zu", t->run.plan.chunk);
    add_setting(t, "--logits-chunk", 1, "%zu", t->run.plan.logits_chunk);
    add_setting(t, "--grad-dtype", 1, "%s", dtype_name(t->run.settings.gradient_type));
    add_setting(t, "threads", 1, "%d", cpu_threads());
}

static void trainer_schedule(Trainer *t) {
    const Options *o = t->run.options;
    Schedule *schedule = &t->state.schedule;
    schedule->kind = schedule_find(o->schedule);
    schedule->peak = o->lr;
    schedule->final_fraction = o->final_lr_fraction;
    schedule->decay_fraction = o->decay_fraction;
    schedule->warmup = o->warmup;
    schedule->steps = o->steps ? o->steps : dataloader_batches(&t->data) / o->grad_accum;
    if (!schedule->steps)
        die("one epoch has %zu micro-batches, a step takes --grad-accum %zu; give --steps to go through the data again",
            dataloader_batches(&t->data), o->grad_accum);
}

static Trained trainer_trained(Trainer *t) {
    Trained trained;
    trained.model = &t->run.model, trained.ops = ops_device;
    trained.weights = t->run.stream.memory.weights;
    trained.optimizer = t->run.optimizer;
    trained.moment_type = t->run.settings.moment_type;
    return trained;
}

// How to go on after a step that must not be taken.
static const char *last_good(const Trainer *t) {
    static char text[PATH_MAX + 64];
    if (!t->has_folder || t->folder.last == CHECKPOINT_NONE) return "no checkpoint was saved";
    snprintf(text, sizeof(text), "the last good checkpoint is step %zu in %s", t->folder.last, t->folder.path);
    return text;
}

// Ends the run where `step` left NaN or infinite weights.
static void trainer_check_weights(const Trainer *t, size_t step) {
    char when[48];
    snprintf(when, sizeof(when), "after step %zu ", step);
    weights_check_finite_at(&t->run.model, ops_device, t->run.stream.memory.weights, when, last_good(t));
}

static void trainer_save(Trainer *t) {
    Trained trained = trainer_trained(t);
    trainer_check_weights(t, t->state.step); // before an older, good checkpoint is pruned
    checkpoint_save(&t->folder, &trained, &t->state);
}

// Data, plan, memory, weights (or the last checkpoint): everything before the first step.
static void trainer_begin(Trainer *t, const Options *o) {
    char last[PATH_MAX] = "", path[PATH_MAX] = "";
    size_t V;
    memset(t, 0, sizeof(*t));
    t->validation_loss = NAN;
    t->has_folder = o->out != NULL;
    if (t->has_folder) {
        checkpoint_open(&t->folder, o->out, o->keep, o->resume);
        if (t->folder.last != CHECKPOINT_NONE) {
            checkpoint_path(last, t->folder.path, t->folder.last, "");
            path_join(path, last, "model.bin");
        } else if (o->resume) {
            if (!o->model && !o->init)
                die("%s holds no complete checkpoint to resume from; give --model or --init to begin", o->out);
            note("%s holds no complete checkpoint: beginning at step 1", o->out);
        }
    }
    run_open_model(&t->run, o, o->model ? NULL : path);
    V = t->run.model.config.vocab_size;
    check_positions(&t->run, o->seq_len, "--seq-len");
    t->data = dataloader_open(o->data.path, o->data.count, o->batch, o->seq_len, V);
    if (o->val_data.count)
        t->validation = dataloader_open(o->val_data.path, o->val_data.count, o->batch, o->seq_len, V);
    t->run.settings = settings_from_options(&t->run);
    if (o->sample_every) {
        t->prompt = prompt_from_options(o, &t->run.model);
        t->run.settings.cache_tokens = prompt_cache_tokens(&t->prompt, o);
    }
    run_allocate(&t->run, o->batch, o->seq_len);
    t->micro = batch_allocate(o->batch * o->seq_len, o->batch);
    if (o->sample_every) {
        sampler_allocate(&t->sampler, &t->run.model, t->run.settings.cache_tokens);
        t->sampled = (int32_t *)checked_calloc(o->max_new_tokens, sizeof(int32_t), "the sampled tokens");
        t->sampled_text = (char *)checked_calloc(o->max_new_tokens, TEXT_BYTES_PER_TOKEN, "the sampled text");
    }
    trainer_schedule(t);
    trainer_settings(t);
    report_header(&t->run);
    if (!o->quiet) t->peak_flops = run_peak_flops(&t->run);
    if (*last) {
        Trained trained = trainer_trained(t);
        checkpoint_load(&t->folder, t->folder.last, &trained, &t->state);
        if (!o->quiet)
            fprintf(t->run.text, "resumed  %s, step %zu of %zu\n", last, t->state.step, t->state.schedule.steps);
        weights_check_finite(&t->run.model, ops_device, t->run.stream.memory.weights);
        run_close_source(&t->run);
    } else {
        run_load_weights(&t->run);
        optimizer_init(&t->run.model, ops_device, t->run.stream.memory.weights, &t->run.optimizer,
                       t->run.settings.moment_type);
    }
    if (t->has_folder) {
        Trained trained = trainer_trained(t);
        checkpoint_check_space(&t->folder, &trained, o->out);
    }
    t->log = runlog_open(o->quiet ? NULL : t->run.text, o->out, o->resume, t->state.step, t->state.schedule.steps);
    runlog_options(&t->log, t->state.step, o);
}

static void trainer_validate(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    size_t steps = dataloader_batches(&t->validation);
    double tokens;
    if (o->val_steps) steps = min_size(steps, o->val_steps);
    progress_clear(&t->log.progress);
    t->validation_loss = evaluate(&t->run.stream, &t->validation, &t->micro, steps, &tokens);
    if (!isfinite(t->validation_loss))
        die("step %zu: the validation loss is %f; %s", step, t->validation_loss, last_good(t));
    runlog_validation(&t->log, step, t->validation_loss, tokens);
}

static void trainer_sample(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    SamplingSettings settings = sampling_from_options(o);
    generate(&t->sampler, &t->run.stream, &t->prompt, &settings, t->sampled, o->max_new_tokens, NULL);
    runlog_sample(&t->log, step, t->sampled_text,
                  prompt_text(&t->prompt, t->sampled, o->max_new_tokens, t->sampled_text));
}

// Forward, backward and optimizer over the micro-batches of one step.
static StepReport trainer_step(Trainer *t, size_t step) {
    const Options *o = t->run.options;
    StreamBP *stream = &t->run.stream;
    DType gradient_type = t->run.settings.gradient_type;
    const Parameter *bad = NULL;
    double begin = seconds_now(), Z = 0;
    StepReport report;
    AdamW adamw;
    size_t i;
    memset(&report, 0, sizeof(report));
    report.step = step;
    dataloader_seek(&t->data, t->state.next_batch);
    for (i = 0; i < o->grad_accum; i++) {
        dataloader_next(&t->data, &t->micro);
        Z += batch_counted(&t->micro);
    }
    ops_device->zero(stream->memory.gradients, gradient_bytes(&t->run));
    if (o->grad_accum > 1) dataloader_seek(&t->data, t->state.next_batch); // Z is of all: they are read twice
    for (i = 0; i < o->grad_accum; i++) {
        if (o->grad_accum > 1) dataloader_next(&t->data, &t->micro);
        report.loss += forward_backward(stream, &t->micro, Z);
    }
    if (!isfinite(report.loss)) {
        trainer_check_weights(t, step - 1);
        die("step %zu: the loss is %f, but all weights are finite; %s", step, report.loss, last_good(t));
    }
    report.grad_norm = gradient_norm(&t->run.model, ops_device, stream->memory.gradients, gradient_type, &bad);
    if (bad) die("step %zu: the gradient of %s holds NaN or Inf; %s", step, bad->name, last_good(t));
    report.learning_rate = schedule_learning_rate(&t->state.schedule, step);
    memset(&adamw, 0, sizeof(adamw));
    adamw.learning_rate = report.learning_rate;
    adamw.beta1 = o->beta1, adamw.beta2 = o->beta2, adamw.epsilon = o->epsilon;
    adamw.weight_decay = o->weight_decay;
    adamw.gradient_scale = gradient_clip(report.grad_norm, o->grad_clip);
    adamw.step = (int64_t)step, adamw.seed = o->seed;
    optimizer_step(&t->run.model, ops_device, stream->memory.weights, stream->memory.gradients, gradient_type,
                   &t->run.optimizer, t->run.settings.moment_type, &adamw);
    ops_device->finish();
    report.tokens = (double)(o->grad_accum * o->batch * o->seq_len);
    report.seconds = seconds_now() - begin;
    report.flops = (double)o->grad_accum * t->run.plan.flops;
    if (t->peak_flops > 0 && report.flops > t->peak_flops * report.seconds) // other programs were in the way before
        t->peak_flops = fmax(run_peak_flops(&t->run), report.flops / report.seconds);
    report.peak_flops = t->peak_flops;
    report.memory_bytes = (double)(ops_device->memory_peak() - t->run.memory_at_start);
    t->state.step = step;
    t->state.next_batch = dataloader_place(&t->data);
    t->state.tokens += o->grad_accum * o->batch * o->seq_len;
    t->state.seconds += report.seconds;
    return report;
}

static void train_json(const Trainer *t, const StepReport *last) {
    JsonOut json = json_open(stdout);
    json_object(&json, NULL);
    json_size(&json, "steps", t->state.step);
    json_number(&json, "loss", last->loss);
    json_number(&json, "val_loss", t->validation_loss);
    json_size(&json, "tokens", t->state.tokens);
    json_number(&json, "seconds", t->state.seconds);
    json_size(&json, "plan_bytes", t->run.plan.total_bytes);
    json_size(&json, "peak_bytes", ops_device->memory_peak() - t->run.memory_at_start);
    json_object_end(&json);
    json_finish(&json);
}

static int every(size_t step, size_t interval) { return interval && step % interval == 0; }

static int verb_train(const Options *options) {
    static Trainer trainer;
    Trainer *t = &trainer;
    size_t step, steps;
    StepReport report;
    memset(&report, 0, sizeof(report));
    report.loss = NAN;
    trainer_begin(t, options);
    steps = t->state.schedule.steps;
    if (options->val_data.count && t->state.step == 0) trainer_validate(t, 0);
    for (step = t->state.step + 1; step <= steps; step++) {
        report = trainer_step(t, step);
        runlog_step(&t->log, &report);
        allocation_guard = getenv("STREAMBP_ALLOCATION_GUARD") != NULL; // tests: from now on allocating is fatal
        if (options->val_data.count && (every(step, options->val_every) || step == steps)) trainer_validate(t, step);
        if (every(step, options->sample_every)) trainer_sample(t, step);
        if (t->has_folder && (every(step, options->save_every) || step == steps)) trainer_save(t);
    }
    allocation_guard = 0;
    runlog_close(&t->log);
    if (options->json) train_json(t, &report);
    if (t->has_folder) checkpoint_close(&t->folder);
    batch_free(&t->micro);
    dataloader_close(&t->data);
    if (options->val_data.count) dataloader_close(&t->validation);
    if (options->sample_every) sampler_free(&t->sampler), free(t->prompt.id);
    free(t->sampled), free(t->sampled_text);
    run_close(&t->run);
    return 0;
}

// ---- main ---------------------------------------------------------------------------------------------------------------------------
int main(int argc, char **argv) {
    static int (*const verbs[VERBS])(const Options *) = {verb_train,  verb_bp,      verb_plan, verb_eval,
                                                         verb_sample, verb_convert, verb_info};
    Options options;
    int status;
    signals_prepare();
    options = options_parse(argc, argv);
    progress_off = options.quiet;
    settle_threads(options.threads);
    status = verbs[options.verb](&options);
    free(options.prompt_ids.id);
    stdout_finish();
    return status;
}
