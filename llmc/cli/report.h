/*
Prints plans and models for people and as JSON: total, shares, the regions alive at the peak by name, FLOPs;
configuration and tensors. The caller chooses the stream for people, so that stdout can be JSON alone.
*/
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H
#include "llmc/base/json.h"
#include "llmc/estimate/estimate.h"
#include "memory.h"

#define LINE_COLUMNS 79 // of repeated lines

// Metrics for people; the log has all of them.
static const struct {
    const char *metric, *label;
    int is_signed, detail; // detail: of a step only with --verbose
} metrics_shown[] = {{"rewards/accuracies", "acc", 0, 0},
                     {"rewards/margins", "margin", 1, 0},
                     {"reward", "reward", 1, 0},
                     {"reward_std", "std", 0, 0},
                     {"frac_reward_zero_std", "no signal", 0, 0},
                     {"kl", "KL", 0, 0},
                     {"completions/mean_length", "length", 0, 1},
                     {"entropy", "entropy", 0, 1},
                     {"clip_ratio/region_mean", "clipped", 0, 1}};

// Adds a column for each metric. seen: bits of metrics with a column in an earlier line, which they keep
static void metrics_add(TextLine *line, const Metrics *m, unsigned *seen, int details) {
    for (size_t k = 0; k < sizeof(metrics_shown) / sizeof(metrics_shown[0]); k++) {
        const double value = metric_named(m, metrics_shown[k].metric);
        const char *text = isnan(value) ? "      -" : human_fixed(value, 6);
        if (!isnan(value)) *seen |= 1u << k;
        if ((*seen >> k & 1) && metrics_shown[k].detail <= details)
            line_add(line, "  %s %s", metrics_shown[k].label, text + !metrics_shown[k].is_signed);
    }
}

// Prints a line of metrics, if there are any.
static void metrics_print(FILE *out, const Metrics *m) {
    TextLine line = {{0}, 0, sizeof(line.text)};
    unsigned seen = 0;
    metrics_add(&line, m, &seen, 1);
    if (line.used) fprintf(out, "%s\n", line.text + 2);
}

// prefix: before every name
static void metrics_json(JsonOut *json, const Metrics *m, const char *prefix) {
    char name[80];
    for (size_t i = 0; i < m->count; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix, m->metric[i].name);
        json_number(json, name, metric_value(&m->metric[i]));
    }
}

// Prints the model and what is trained.
static void report_model(FILE *out, const Run *run) {
    const Config *c = &run->model.config;
    const Lora *lora = &run->lora;
    const char *of = run->options->adapter;
    size_t least, most;
    fprintf(out, "model    %s, %s parameters, %zu layers of %zu, %s%s%s", c->family->name,
            human_count((double)run->model.elements), c->num_hidden_layers, c->hidden_size,
            dtype_name(run->model.dtype), run->settings.storage ? " with matrices in 4 bits" : "",
            run->settings.backward ? "; trained: " : lora->rank ? "; " : "");
    if (lora->rank) {
        lora_ranks(lora, &least, &most);
        fprintf(out, least < most ? "adapters of rank %zu to %zu" : "adapters of rank %zu", least, most);
        fprintf(out, ", alpha %g%s", lora->alpha, lora->rslora ? " (rsLoRA)" : "");
        if (lora->dropout > 0) fprintf(out, ", dropout %g", lora->dropout);
        fprintf(out, ": %s parameters%s%s", human_count((double)lora->table.elements), of ? " of " : "", of ? of : "");
    } else if (run->settings.backward) {
        fputs("all", out);
    }
    fputc('\n', out);
}

// Prints bits per element and the relative error of matrices that were quantised here, by kind.
static void report_base(const Run *run) {
    const Storage *storage = run->settings.storage;
    const Model *model = &run->model;
    const StorageErrors *errors = &run->errors;
    QuantFormat format = {QUANT_NONE, 0, 0, DTYPE_FP32};
    double elements = 0, bytes = 0, all = 0;
    for (size_t i = 0; storage && i < model->parameter_count; i++) {
        all += (double)parameter_elements(&model->parameters[i]);
        if (storage->format[i].type == QUANT_NONE) continue;
        format = storage->format[i];
        elements += (double)parameter_elements(&model->parameters[i]);
        bytes += (double)storage->table.parameters[i].rows;
    }
    if (format.type == QUANT_NONE) return;
    fprintf(run->text, "base     %s%s, blocks of %zu: %.3f bits an element of %s; %s others %s; frozen\n",
            quant_type_names[format.type], format.nested ? ", double quantisation" : "", format.block,
            8 * bytes / elements, human_count(elements), human_count(all - elements), dtype_name(model->dtype));
    TextLine line = {{0}, 0, LINE_COLUMNS};
    for (size_t k = 0; k < errors->kinds; k++) {
        char text[96];
        const StorageError *e = &errors->kind[k];
        const char *dot = model->config.family->conv1d ? NULL : strrchr(e->name, '.'); // GPT-2 has c_proj twice
        if (e->squares <= 0) continue;
        snprintf(text, sizeof(text), "  %s %.3g", dot ? dot + 1 : e->name, sqrt(e->error / e->squares));
        if (line.used + strlen(text) > LINE_COLUMNS) fprintf(run->text, "%s\n", line.text), line.used = 0;
        if (!line.used) line_add(&line, "         %-14s", k ? "" : "relative error");
        line_add(&line, "%s", text);
    }
    if (line.used) fprintf(run->text, "%s\n", line.text);
}

// Into an open object
static void report_base_json(JsonOut *json, const Run *run) {
    const StorageErrors *errors = &run->errors;
    if (!run->settings.storage) return;
    json_object(json, "base_error");
    for (size_t k = 0; k < errors->kinds; k++)
        if (errors->kind[k].squares > 0)
            json_number(json, errors->kind[k].name, sqrt(errors->kind[k].error / errors->kind[k].squares));
    json_object_end(json);
}

// Writes ranks, and the bytes that each sent in a step, by kind, into an open object. Nothing for a single process.
static void report_world_json(JsonOut *json, World w, const Traffic *sent) {
    if (world_ranks(w) == 1) return;
    json_size(json, "ranks", world_ranks(w));
    json_size(json, "zero", w.zero);
    json_size(json, "sp", world_sp(w));
    json_object(json, "sent");
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) json_number(json, traffic_names[kind], sent->bytes[kind]);
    json_object_end(json);
}

// Writes "total_bytes", the share of each kind, and the regions, into an open object.
static void report_plan_json(JsonOut *json, const Arena *plan) {
    json_size(json, "total_bytes", plan->peak);
    for (int share = 0; share < SHARES; share++) json_size(json, share_names[share], arena_share(plan, (Share)share));
    json_array(json, "regions");
    for (size_t i = 0; i < plan->regions_at_peak; i++) {
        json_object(json, NULL);
        json_text(json, "name", plan->at_peak[i].name);
        json_text(json, "share", share_names[plan->at_peak[i].share]);
        json_size(json, "bytes", plan->at_peak[i].bytes);
        json_object_end(json);
    }
    json_array_end(json);
}

// Writes configuration and tensors into an open object. dtype: of the weights in the model's files
static void report_model_json(JsonOut *json, const Model *model, DType dtype) {
    const Config *config = &model->config;
    json_text(json, "model_type", config->family->model_type);
    json_text(json, "architecture", config->family->architecture);
    json_size(json, "parameters", model->elements);
    json_text(json, "dtype", dtype_name(dtype));
    json_object(json, "config");
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        char value[LAYER_TYPES_MAX + 1];
        if (!config_uses_key(config, key)) continue;
        config_key_text(config, key, value);
        if (key->kind == KEY_ROPE_TYPE || key->kind == KEY_LAYER_TYPES)
            json_text(json, key->name, value);
        else if (key->kind == KEY_DOUBLE)
            json_number(json, key->name, *(const double *)(const void *)((const char *)config + key->offset));
        else
            json_word(json, key->name, value);
    }
    json_object_end(json);
    json_array(json, "tensors");
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        json_object(json, NULL);
        json_text(json, "name", p->name);
        json_array(json, "shape");
        json_size(json, NULL, p->transposed ? p->cols : p->rows);
        if (p->cols) json_size(json, NULL, p->transposed ? p->rows : p->cols);
        json_array_end(json);
        json_object_end(json);
    }
    json_array_end(json);
}

// ---- a run ---------------------------------------------------------------------------------------------------------
// Prints the reference that an objective compares with.
static void report_reference(const Run *run) {
    const Options *o = run->options;
    FILE *out = run->text;
    if (!objective_needs_reference(&run->settings.objective)) {
        if (objective_is_of_policy(&run->settings.objective)) fputs("reference  none (--beta 0)\n", out);
    } else if (o->reference_logprobs) {
        fprintf(out, "reference  %s, of %s\n", o->reference_logprobs, run->reference.header.model);
    } else if (run->settings.reference == REFERENCE_BASE && run->lora.rank) {
        fputs("reference  the base model, without adapters\n", out);
    } else if (o->adapter) {
        fprintf(out, "reference  the model with the adapters of %s, at the start\n", o->adapter);
    } else {
        fputs("reference  the model at the start\n", out);
    }
}

// Prints a run's peak beside its plan. On the CPU, host memory is the device's.
static void report_memory(const Run *run, double peak) {
    const double host = strcmp(ops_device->name, "cpu") ? 0 : (double)run->plan.host_bytes;
    const double planned = (double)run->plan.total_bytes + host;
    fprintf(run->text, "memory   %s at peak: plan %s, ", human_bytes(peak), human_bytes(planned));
    if (peak >= planned)
        fprintf(run->text, "libraries and files %s\n", human_bytes(peak - planned));
    else
        fprintf(run->text, "of which %s were never touched\n", human_bytes(planned - peak));
}

// ---- attention -----------------------------------------------------------------------------------------------------
// Returns the time of this pass with our own kernels over that with the library, by the rates of a machine.
static double own_attention_factor(const Run *run, SequenceBound bound) {
    const Machine *machine = machine_from_options(run->options);
    RunSettings settings = run->settings;
    Batch shape = batch_shape(bound);
    double seconds[2];
    if (!machine) machine = &machines[MACHINE_H100];
    settings.ridge = machine_ridge(machine);
    for (settings.library = 0; settings.library < 2; settings.library++)
        seconds[settings.library] = work_seconds(machine, plan_make(&settings, &shape).counts);
    free(shape.document_start);
    return seconds[0] / seconds[1];
}

// Prints which library computes attention, with `details`, or that none does where one could.
static void report_attention(const Run *run, SequenceBound bound, int details) {
    const AttentionChoice choice = run->settings.attention;
    if (run->attention && !details) return;
    if (run->attention && run->settings.backward)
        fprintf(run->text, "attention  %s, %s, workspace of %s\n", run->attention,
                choice.any_order ? "not deterministic" : "deterministic",
                choice.workspace ? human_bytes((double)choice.workspace) : "the smallest size");
    else if (run->attention)
        fprintf(run->text, "attention  %s\n", run->attention);
    else if (bound.N && strcmp(ops_device->name, "cpu") != 0 && run->options->verb != VERB_PLAN &&
             machine_attends(&machines[MACHINE_H100], &run->model))
        fprintf(run->text,
                "attention  our own kernels, not cuDNN: a pass takes %.2g times as long (estimated from "
                "assumed rates)\n",
                own_attention_factor(run, bound));
}

// Into an open object.
static void report_attention_json(JsonOut *json, const Run *run) {
    json_text(json, "attention", run->attention ? "cudnn" : "own");
    if (run->attention) json_text(json, "attention_library", run->attention);
    json_bool(json, "deterministic", !run->attention || !run->settings.attention.any_order);
    json_size(json, "attention_workspace", run->settings.attention.workspace);
}

// ---- places --------------------------------------------------------------------------------------------------------
static const char *slower(double ratio, char text[160]) {
    const int often = ratio >= 2;
    snprintf(text, 160, often ? "%.3g times slower" : "%.2f %% slower", often ? ratio : 100 * (ratio - 1));
    return text;
}

// Prints places other than the device, why they were chosen, and the cost of the next best choice.
static void report_places(FILE *out, const Run *run) {
    char text[160];
    const char *glue = "placed  ";
    if (!run->plan.host_bytes && !run->plan.disk_bytes && run->settings.inputs_every <= 1) return;
    for (int place = PLACE_HOST; place < PLACES; place++) {
        if (!*placed_text(run, place, text, sizeof(text))) continue;
        fprintf(out, "%s %s: %s", glue, place == PLACE_HOST ? "in host memory" : "on disk", text);
        glue = ";";
    }
    if (run->settings.inputs_every > 1) fprintf(out, "%s inputs of one layer in %zu", glue, run->settings.inputs_every);
    if (run->plan.disk_bytes) fprintf(out, "; a step writes %s to disk", human_bytes(moved_in_step(run, WAY_DISK_OUT)));
    fputc('\n', out);
    if (!run->choices || !run->options->verbose) return;
    const Choice *taken = &run->choice[0], *next = &run->choice[1];
    fprintf(out, "         the fastest that fits, estimated %s than all on the device",
            slower(taken->seconds / taken->on_device, text));
    if (run->choices > 1) {
        fprintf(out, "; next, %s than this", slower(next->seconds / taken->seconds, text));
        for (int kind = 0; kind < PLACED; kind++)
            if (next->settings.place[kind] != taken->settings.place[kind])
                fprintf(out, ", %s on %s", placed_word(&next->settings, kind), place_names[next->settings.place[kind]]);
        if (max_size(next->settings.inputs_every, 1) != max_size(taken->settings.inputs_every, 1))
            fprintf(out, ", --inputs-every %zu", max_size(next->settings.inputs_every, 1));
        if (next->settings.method != taken->settings.method)
            fprintf(out, ", --method %s", method_names[next->settings.method]);
        if (next->settings.keep != taken->settings.keep)
            fprintf(out, ", --keep %s", next->settings.keep ? "attention" : "none");
        if (next->settings.ring != taken->settings.ring)
            fprintf(out, ", --kv %s", next->settings.ring ? "ring" : "gather");
    }
        if (next->settings.defers != taken->settings.defers)
            fprintf(out, ", --update %s", next->settings.defers ? "forward" : "now");
    fputc('\n', out);
}

// Into an open object. Names of shares follow as numbers, so those of places are in an object of their own.
static void report_places_json(JsonOut *json, const Run *run) {
    json_object(json, "placed");
    for (int kind = 0; kind < PLACED; kind++)
        json_text(json, placed_names[kind], place_names[run->settings.place[kind] > 0 ? run->settings.place[kind] : 0]);
    json_object_end(json);
    json_size(json, "inputs_every", max_size(run->settings.inputs_every, 1));
    json_size(json, "host_bytes", run->plan.host_bytes);
    json_size(json, "disk_bytes", run->plan.disk_bytes);
    json_number(json, "host_moved_bytes", moved_in_step(run, WAY_HOST_OUT) + moved_in_step(run, WAY_HOST_IN));
    json_number(json, "disk_written_bytes", moved_in_step(run, WAY_DISK_OUT));
}

// Returns the method's name; of spaco also the share of chunks that it keeps.
static const char *method_text(const Run *run) {
    static char text[64];
    const char *name = method_names[run->settings.method];
    if (run->settings.method != METHOD_SPACO) return name;
    snprintf(text, sizeof(text), "%s with %g of the chunks", name, run->settings.sparse.keep);
    return text;
}

// Prints the data and what a step takes of it. data: NULL: none. schedule: of a training run, or empty
static void report_data(const Run *run, const DataLoader *data, const char *schedule) {
    const Options *o = run->options;
    const int packed = data && data->shards && !data->regular && data->settings.use != DATA_PROMPTS;
    const size_t sequence = packed ? data->packing.capacity : o->batch * o->seq_len * sample_documents(o);
    FILE *out = run->text;
    if (packed)
        fprintf(out, "data     %zu documents in %zu shard%s, packed %.1f %% full", data->documents, data->shards,
                data->shards > 1 ? "s" : "", 100 * packing_fill(&data->packing, data->first_epoch_sequences));
    else if (data && data->shards && !data->regular)
        fprintf(out, "data     %zu prompts of at most %zu tokens", data->prompts, data->longest_prompt);
    else if (data && data->shards)
        fprintf(out, "data     %zu shard%s of llm.c", data->shards, data->shards > 1 ? "s" : "");
    else
        fputs("data     random tokens", out);
    fprintf(out, "; %s, %s", objective_names[o->objective], *schedule ? schedule : "batches of ");
    if (o->rollout)
        fprintf(out, "%zu prompts x %zu completions", o->batch, o->group_size);
    else if (o->samples)
        fprintf(out, "%zu %s", o->samples, packed ? dataloader_samples_name(data) : "documents");
    else
        fprintf(out, "%zu tokens", sequence * o->grad_accum);
    fprintf(out, " (length %zu, batch %zu", o->seq_len, o->batch);
    if (o->grad_accum > 1) fprintf(out, " x %zu", o->grad_accum);
    fputs(")\n", out);
}

// Prints the plan in a line: memory, method, and in short what report_details says in full.
static void report_planned(const Run *run, int details) {
    const Options *o = run->options;
    const size_t ranks = world_ranks(run->settings.world);
    FILE *out = run->text;
    char text[160];
    fprintf(out, "memory   %s planned%s", human_bytes((double)run->plan.total_bytes),
            run->settings.backward && !run->settings.optimizer ? " for a pass without an optimizer update" : "");
    if (run->available) fprintf(out, ", %s available", human_bytes((double)run->available));
    if (ranks > 1) fprintf(out, ", on each of %zu ranks", ranks);
    fprintf(out, "; %s, chunk %zu", method_text(run), run->plan.chunk);
    for (int place = PLACE_HOST; place < PLACES && !details; place++)
        if (*placed_text(run, place, text, sizeof(text)))
            fprintf(out, "; %s: %s", place == PLACE_HOST ? "in host memory" : "on disk", text);
    if (run->attention && !details) fprintf(out, "; attention by %s", run->attention);
    if (run->choices && option_given(o, "machine") && o->verb != VERB_PLAN)
        fprintf(out, "; a step of %.3g s, estimated", run->choice[0].seconds);
    fputc('\n', out);
}

// Prints what three lines have no room for.
static void report_details(const Run *run, const DataLoader *data, SequenceBound bound) {
    const World w = run->settings.world;
    FILE *out = run->text;
    report_base(run);
    if (world_ranks(w) > 1)
        fprintf(out, "ranks    %zu = %zu replicas x sp %zu, ZeRO %zu%s\n", world_ranks(w), world_replicas(w),
                world_sp(w), w.zero, run->settings.ring && world_sp(w) > 1 ? ", keys and values passed around" : "");
    report_reference(run);
    if (data && data->shards && !data->regular) dataloader_report(out, data);
    if (run->options->overlap)
        fputs("overlap  completions are written before the updates of the step in front of theirs: off-policy by one\n",
              out);
    fprintf(out, "plan     a sequence of %zu positions, chunk %zu, logits chunk %zu, %s per pass; at the peak:\n",
            bound.N, run->plan.chunk, run->plan.logits_chunk, human_flops(run->plan.counts.flops));
    report_regions(out, run->plan.arena);
    report_places(out, run);
}

// Prints the header: three lines, with --verbose more. data, schedule: see report_data. bound: the sequence that was
// planned for
static void report_run(const Run *run, const DataLoader *data, SequenceBound bound, const char *schedule) {
    const Options *o = run->options;
    const int details = o->verbose || o->verb == VERB_PLAN;
    if (o->quiet) return;
    if (o->verbose) fputs("command  ", run->text), options_echo(run->text, o);
    report_model(run->text, run);
    report_data(run, data, schedule);
    report_planned(run, details);
    report_attention(run, bound, details);
    if (details) report_details(run, data, bound);
    fflush(run->text);
}

// Writes the method (with auto the planner's choice) into an open object.
static void report_method_json(JsonOut *json, const Run *run) {
    json_text(json, "method", method_names[run->settings.method]);
    if (run->settings.method == METHOD_SPACO) json_number(json, "keep_chunks", run->settings.sparse.keep);
}

// Writes method, chunks and FLOPs of a step into an open object.
static void report_work_json(JsonOut *json, const Run *run, double flops, double model_flops) {
    report_method_json(json, run);
    json_size(json, "chunk", run->plan.chunk);
    json_size(json, "logits_chunk", run->plan.logits_chunk);
    json_number(json, "flops", flops);
    json_number(json, "model_flops", model_flops);
    json_text(json, "dtype", dtype_name(run->model.dtype));
    report_base_json(json, run);
    report_attention_json(json, run);
}

#endif
