/*
What plans and models look like to people and as JSON: total, shares, the regions alive at the peak by name, FLOPs;
configuration and tensors. Text goes to a stream of the caller's choice, so that stdout can be JSON alone.
*/
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H
#include "llmc/base/json.h"
#include "memory.h"

// Metrics in step lines; the log has all of them.
static const struct {
    const char *metric, *label;
} metrics_shown[] = {
    {"rewards/accuracies", "accuracy"}, {"rewards/margins", "margin"}, {"reward", "reward"},           {"kl", "KL"},
    {"clip_fraction", "clipped"},       {"entropy", "entropy"},        {"completion_length", "length"}};

static void metrics_print(FILE *out, const Metrics *m, const char *separator) {
    for (size_t k = 0; k < sizeof(metrics_shown) / sizeof(metrics_shown[0]); k++)
        for (size_t i = 0; i < m->count; i++)
            if (!strcmp(m->metric[i].name, metrics_shown[k].metric) && m->metric[i].count > 0)
                fprintf(out, "%s%s %.4g", separator, metrics_shown[k].label, m->metric[i].sum / m->metric[i].count);
}

// prefix: before every name
static void metrics_json(JsonOut *json, const Metrics *m, const char *prefix) {
    char name[64];
    for (size_t i = 0; i < m->count; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix, m->metric[i].name);
        json_number(json, name, m->metric[i].count > 0 ? m->metric[i].sum / m->metric[i].count : NAN);
    }
}

static void report_model(FILE *out, const Model *model) {
    const Config *c = &model->config;
    fprintf(out,
            "model    %s, %s parameters, %zu layers, hidden %zu, heads %zu/%zu x %zu, MLP %zu, vocabulary %zu, %s\n",
            c->family->name, human_count((double)model->elements), c->num_hidden_layers, c->hidden_size,
            c->num_attention_heads, c->num_key_value_heads, c->head_dim, c->intermediate_size, c->vocab_size,
            dtype_name(model->dtype));
}

// Ranks, and the bytes that each of them sent in a step, by kind; into an open object. Nothing for a process alone.
static void report_world_json(JsonOut *json, World w, const Traffic *sent) {
    if (world_ranks(w) == 1) return;
    json_size(json, "ranks", world_ranks(w));
    json_size(json, "zero", w.zero);
    json_size(json, "sp", world_sp(w));
    json_object(json, "sent");
    for (int kind = 0; kind < TRAFFIC_KINDS; kind++) json_number(json, traffic_names[kind], sent->bytes[kind]);
    json_object_end(json);
}

// One line per region alive at the peak: its bytes, a bar of its share of the total, its name.
static void report_regions(FILE *out, const Arena *plan) {
    size_t smaller = 0; // bytes of regions below 1 %
    for (size_t i = 0; i < plan->regions_at_peak; i++) {
        const Region *region = &plan->at_peak[i];
        const double part = (double)region->bytes / (double)max_size(plan->peak, 1);
        const int width = (int)(part * 32 + 0.5);
        if (part < 0.01)
            smaller += region->bytes;
        else
            fprintf(out, "  %11s  %5.1f %%  %-*.*s%*s  %s\n", human_bytes((double)region->bytes), 100 * part, width,
                    width, "################################", 32 - width, "", region->name);
    }
    if (smaller)
        fprintf(out, "  %11s  %5.1f %%  %32s  smaller ones together\n", human_bytes((double)smaller),
                100 * (double)smaller / (double)plan->peak, "");
}

// "total_bytes", the share of each kind, and the regions, into an open object.
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

// Configuration and tensors, as one object. dtype: of the weights as they are stored in the model's files
static void report_model_json(JsonOut *json, const Model *model, DType dtype) {
    const Config *config = &model->config;
    json_object(json, NULL);
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
    json_object_end(json);
}

// ---- a run ---------------------------------------------------------------------------------------------------------
// data: NULL: none. Of shards of documents: what was made of them, and the sequence that was planned for.
static void report_run(const Run *run, const DataLoader *data, SequenceBound bound) {
    const World w = run->settings.world;
    if (run->options->quiet) return;
    fputs("command  ", run->text);
    options_echo(run->text, run->options);
    report_model(run->text, &run->model);
    if (world_ranks(w) > 1)
        fprintf(run->text, "ranks    %zu = %zu replicas x sp %zu, ZeRO %zu%s\n", world_ranks(w), world_replicas(w),
                world_sp(w), w.zero, run->settings.ring && world_sp(w) > 1 ? ", keys and values passed around" : "");
    if (run->lora.rank)
        fprintf(run->text, "adapters rank %zu, alpha %g%s, dropout %g: %s parameters%s%s\n", run->lora.rank,
                run->lora.alpha, run->lora.rslora ? " (rsLoRA)" : "", run->lora.dropout,
                human_count((double)run->lora.table.elements), run->options->adapter ? " of " : "",
                run->options->adapter ? run->options->adapter : "");
    fprintf(run->text, "plan     %s%s, %s, chunk %zu, logits chunk %zu, %s per pass; at the peak:\n",
            human_bytes((double)run->plan.total_bytes),
            run->settings.backward && !run->settings.optimizer ? " for a pass without an optimizer update" : "",
            option_chosen(run->options, "method"), run->plan.chunk, run->plan.logits_chunk,
            human_flops(run->plan.counts.flops));
    report_regions(run->text, &run->plan.arena);
    if (run->plan.host_bytes)
        fprintf(run->text, "  %11s  in host memory: attention's outputs\n", human_bytes((double)run->plan.host_bytes));
    if (data && data->shards && !data->regular) {
        if (data->settings.use == DATA_PROMPTS)
            fprintf(run->text, "data     %zu prompts of at most %zu tokens, tokenizer %s\n", data->prompts,
                    data->longest_prompt, data->shard[0].header.tokenizer_name);
        else
            dataloader_report(run->text, data);
        fprintf(run->text, "longest  the plan is for a sequence of %zu positions, of at most %zu documents\n", bound.N,
                bound.documents);
    }
    fflush(run->text);
}

// Method, chunks and FLOPs of a step, into an open object.
static void report_work_json(JsonOut *json, const Run *run, double flops, double model_flops) {
    json_text(json, "method", option_chosen(run->options, "method"));
    json_size(json, "chunk", run->plan.chunk);
    json_size(json, "logits_chunk", run->plan.logits_chunk);
    json_number(json, "flops", flops);
    json_number(json, "model_flops", model_flops);
    json_text(json, "dtype", dtype_name(run->model.dtype));
}

#endif
