/*
Prints plans and models for people and as JSON: total, shares, the regions alive at the peak by name, FLOPs;
configuration and tensors. The caller chooses the stream for people, so that stdout can be JSON alone.
*/
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H
#include "llmc/base/json.h"
#include "llmc/estimate/estimate.h"
#include "allocate.h"

// Metrics that are printed; the log has all of them.
static const struct {
    const char *metric, *label;
    int is_signed, detail; // detail: printed for a step only with --verbose
} metrics_shown[] = {{"rewards/accuracies", "acc", 0, 0},
                     {"rewards/margins", "margin", 1, 0},
                     {"reward", "reward", 1, 0},
                     {"reward_std", "std", 0, 0},
                     {"frac_reward_zero_std", "no signal", 0, 0},
                     {"kl", "KL", 0, 0},
                     {"router_differs", "other experts", 0, 0},
                     {"completions/mean_length", "length", 0, 1},
                     {"entropy", "entropy", 0, 1},
                     {"clip_ratio/region_mean", "clipped", 0, 1}};

// Adds a column for each metric. seen: bits of metrics with a column in an earlier line; they keep it
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
    TextLine line = {{0}, 0};
    unsigned seen = 0;
    metrics_add(&line, m, &seen, 1);
    if (line.used) fprintf(out, "%s\n", line.text + 2);
}

// Writes metrics into an open object. prefix: put before every name
static void metrics_json(JsonOut *json, const Metrics *m, const char *prefix) {
    char name[80];
    for (size_t i = 0; i < m->count; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix, m->metric[i].name);
        json_number(json, name, metric_value(&m->metric[i]));
    }
}

// Returns " on the CPU" or " on" with the GPU's name if this program could have taken either, else "".
static const char *taken_device_text(const Run *run) {
    static char text[80];
    int several = 0;
    for (size_t i = 0; op_sets[i]; i++) several |= strcmp(op_sets[i]->name, ops_device->name) != 0;
    const Verb verb = run->options->verb;
    if (!several || verb == VERB_PLAN || verb == VERB_CONVERT || verb == VERB_INFO) return "";
    snprintf(text, sizeof(text), " on %s", *ops_device->device_name() ? ops_device->device_name() : "the CPU");
    return text;
}

// Prints the model and what is trained.
static void report_model(FILE *out, const Run *run) {
    const Config *c = &run->model.config;
    const Lora *lora = &run->lora;
    const char *of = run->options->adapter;
    size_t least, most;
    fprintf(out, "model    %s, %s parameters", c->family->name, human_count((double)run->model.elements));
    if (model_active(&run->model) < (double)run->model.elements)
        fprintf(out, ", %s active", human_count(model_active(&run->model)));
    fprintf(out, ", %zu layers of %zu", c->num_hidden_layers, c->hidden_size);
    if (!run->settings.backward) fprintf(out, ", vocabulary %zu", c->vocab_size);
    fprintf(out, ", %s%s%s", dtype_name(run->model.dtype), taken_device_text(run),
            !run->storage.format                           ? ""
            : !run->settings.storage                       ? (run->settings.backward ? ", decoded from FP8" : "")
            : quant_bits(run->settings.storage->type) == 8 ? " with matrices in FP8"
                                                           : " with matrices in 4 bits");
    if (run->settings.backward) fputs(lora->rank ? "; trained:" : "; trained: all", out);
    if (lora->rank) {
        lora_ranks(lora, &least, &most);
        fprintf(out, "%s adapters of rank %zu", run->settings.backward ? "" : ";", least);
        if (least < most) fprintf(out, " to %zu", most);
        fprintf(out, ", alpha %g%s", lora->alpha, lora->rslora ? " (rsLoRA)" : "");
        if (lora->dropout > 0) fprintf(out, ", dropout %g", lora->dropout);
        fprintf(out, ": %s parameters%s%s", human_count((double)lora->table.elements), of ? " of " : "", of ? of : "");
    }
    if (hub_revision(run->model_path)) fprintf(out, "; revision %s", hub_revision(run->model_path));
    fputc('\n', out);
}

// Prints the experts, and the losses of their routers.
static void report_experts(FILE *out, const Run *run) {
    const Config *c = &run->model.config;
    const RunSettings *s = &run->settings;
    const size_t layers = expert_layers_before(c, c->num_hidden_layers);
    if (!layers) return;
    fprintf(out, "experts  %zu of %zu a token in %zu layers", c->num_experts_per_tok, c->num_experts, layers);
    if (s->backward && s->router_aux_loss > 0)
        fprintf(out, "; aux loss %g%s, a micro-batch at a time, not in the loss shown", s->router_aux_loss,
                isnan(run->options->router_aux_loss) ? " (the model's)" : "");
    else if (s->backward && isnan(run->options->router_aux_loss) && c->router_aux_loss_coef > 0)
        fprintf(out, "; no aux loss with %s, as in TRL; --router-aux-loss %g adds the model's",
                objective_names[run->options->objective], c->router_aux_loss_coef);
    else if (s->backward)
        fputs("; no aux loss", out);
    if (s->backward && s->router_z_loss > 0) fprintf(out, "; z-loss %g", s->router_z_loss);
    if (s->backward && s->router_bias_update > 0) fprintf(out, "; biases move by %g a step", s->router_bias_update);
    fputc('\n', out);
}

// Prints bits per element and the relative error of matrices that were quantised here, by kind.
static void report_base(const Run *run) {
    const Storage *storage = run->settings.storage;
    const Model *model = &run->model;
    const StorageErrors *errors = &run->errors;
    QuantFormat format = {QUANT_NONE, 0, 0, DTYPE_FP32, {0}};
    double elements = 0, bytes = 0, all = 0;
    for (size_t i = 0; storage && i < model->parameter_count; i++) {
        all += (double)parameter_elements(&model->parameters[i]);
        if (storage->format[i].type == QUANT_NONE) continue;
        format = storage->format[i];
        elements += (double)parameter_elements(&model->parameters[i]);
        bytes += (double)storage->table.parameters[i].rows;
    }
    if (format.type == QUANT_NONE) return;
    char blocks[64];
    const QuantGrid *grid = &format.grid;
    if (format.type == QUANT_FP8 && format.block == grid->cols &&
        (grid->file_rows == 1 || grid->file_rows == grid->rows))
        snprintf(blocks, sizeof(blocks), "a scale a %s", grid->file_rows == 1 ? "row" : "matrix");
    else
        snprintf(blocks, sizeof(blocks), "blocks of %.0zu%s%zu", grid->file_rows, grid->file_rows ? " x " : "",
                 format.block);
    fprintf(run->text, "base     %s%s, %s: %.3f bits an element of %s; %s others %s; frozen\n",
            quant_type_names[format.type], format.nested ? ", double quantisation" : "", blocks, 8 * bytes / elements,
            human_count(elements), human_count(all - elements), dtype_name(model->dtype));
    for (size_t k = 0; k < errors->kinds; k++) {
        const StorageError *e = &errors->kind[k];
        const Family *family = model->config.family; // GPT-2 has c_proj twice, experts have down_proj
        const char *dot = family->conv1d || family->router ? NULL : strrchr(e->name, '.');
        fprintf(run->text, "%s %s %.3g", k ? " " : "         relative error ", dot ? dot + 1 : e->name,
                e->squares > 0 ? sqrt(e->error / e->squares) : 0);
    }
    if (errors->kinds) fputc('\n', run->text);
}

// Writes the quantised types and their errors into an open object.
static void report_base_json(JsonOut *json, const Run *run) {
    const StorageErrors *errors = &run->errors;
    if (!run->settings.storage) return;
    json_object(json, "base_error");
    for (size_t k = 0; k < errors->kinds; k++)
        if (errors->kind[k].squares > 0)
            json_number(json, errors->kind[k].name, sqrt(errors->kind[k].error / errors->kind[k].squares));
    json_object_end(json);
}

// Writes the ranks, and the bytes that each rank sent in a step, by kind, into an open object. Writes nothing for a
// single process.
static void report_world_json(JsonOut *json, World w, const Traffic *sent) {
    if (world_ranks(w) == 1) return;
    json_size(json, "ranks", world_ranks(w));
    json_size(json, "zero", w.zero);
    json_size(json, "sp", world_sp(w));
    if (!sent) return; // deals send different bytes for each length
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

// Writes configuration and tensors into an open object. dtype: type of the weights in the model's files
static void report_model_json(JsonOut *json, const Model *model, DType dtype) {
    const Config *config = &model->config;
    json_text(json, "model_type", config->family->model_type);
    json_text(json, "architecture", config->family->architecture);
    json_size(json, "parameters", model->elements);
    json_number(json, "active_parameters", model_active(model));
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
        uint64_t shape[3];
        const size_t rank = parameter_shape(p, shape);
        if (p->part) continue; // the first part stands for all parts
        json_object(json, NULL);
        json_text(json, "name", p->name);
        json_array(json, "shape");
        for (size_t k = 0; k < rank; k++) json_size(json, NULL, (size_t)shape[k]);
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
    if (run->settings.objective.kind == OBJECTIVE_DISTILL) {
        if (o->teacher_logprobs) fprintf(out, "teacher  %s, of %s\n", o->teacher_logprobs, run->teacher.header.model);
        const Plan *plan = run->live ? &run->live->plan : NULL;
        if (plan)
            fprintf(out, "teacher  %s: %s on the device, %s in host memory, %s on disk; read once a micro-batch\n",
                    o->teacher, human_bytes((double)plan->total_bytes), human_bytes((double)plan->host_bytes),
                    human_bytes((double)plan->disk_bytes));
    } else if (!objective_needs_reference(&run->settings.objective)) {
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

// Prints a run's measured peak next to the planned peak. On the CPU, host memory is device memory.
static void report_memory(const Run *run, double peak) {
    const double host = strcmp(ops_device->name, "cpu") ? 0 : (double)run->plan.host_bytes;
    const double planned = (double)run->plan.total_bytes + host;
    fprintf(run->text, "memory   %s at peak: plan %s, ", human_bytes(peak), human_bytes(planned));
    if (peak >= planned)
        fprintf(run->text, "libraries and files %s\n", human_bytes(peak - planned));
    else
        fprintf(run->text, "of which %s were never touched\n", human_bytes(planned - peak));
}

// ---- attention and places ------------------------------------------------------------------------------------------
// Writes attention's library into an open object.
static void report_attention_json(JsonOut *json, const Run *run) {
    json_text(json, "attention", run->attention ? "cudnn" : "own");
    if (run->attention) json_text(json, "attention_library", run->attention);
    json_bool(json, "deterministic", !(run->settings.library & LIBRARY_BACKWARD) || !run->settings.attention.any_order);
    json_size(json, "attention_workspace", run->settings.attention.workspace);
}

// Prints places other than the device; with --verbose also why they were chosen.
static void report_places(FILE *out, const Run *run) {
    const double slower = run->chosen ? run->choice.seconds / run->choice.on_device : 0;
    const char *glue = "placed  ";
    char text[160];
    if (!run->plan.host_bytes && !run->plan.disk_bytes) return;
    for (int place = PLACE_HOST; place < PLACES; place++) {
        if (!*placed_text(run, place, text, sizeof(text))) continue;
        fprintf(out, "%s %s: %s", glue, place == PLACE_HOST ? "in host memory" : "on disk", text);
        glue = "\n        ";
    }
    if (run->plan.disk_bytes) fprintf(out, "; a step writes %s", human_bytes(moved_in_step(run, WAY_DISK_OUT)));
    fputc('\n', out);
    if (!run->chosen || !run->options->verbose) return;
    fputs("         the fastest that fits, estimated ", out);
    fprintf(out, slower < 2 ? "%.2f %% slower" : "%.3g times slower", slower < 2 ? 100 * (slower - 1) : slower);
    fputs(" than all on the device\n", out);
}

// Writes places into an open object. Shares of the same names are numbers, so places have an object of their own.
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
    json_text(json, "keep", keep_text(&run->settings));
    json_text(json, "keep_on", keep_on_text(&run->settings));
    json_size(json, "needed_bytes", min_size(run->needed, run->plan.total_bytes));
    json_text(json, "update", run->settings.defers ? "forward" : "now");
    if (run->settings.rollout_slots) json_size(json, "slots", run->settings.rollout_slots);
}

// Returns the method's name; for spaco also the share of chunks that it keeps.
static const char *method_text(const Run *run) {
    static char text[64];
    const char *name = method_names[run->settings.method];
    if (run->settings.method != METHOD_SPACO) return name;
    snprintf(text, sizeof(text), "%s with %g of the chunks", name, run->settings.sparse.keep);
    return text;
}

// Prints the data and how much of it a step takes. data: may be NULL. schedule: of a training run, or empty
static void report_data(const Run *run, const DataLoader *data, const char *schedule) {
    const Options *o = run->options;
    const int packed = data && data->segment && !data->prompts;
    const size_t sequence = packed ? data->packing.capacity : o->batch * o->seq_len * sample_documents(o);
    FILE *out = run->text;
    if (packed)
        fprintf(out, "data     %zu documents in %zu shard%s, packed %.1f %% full", data->documents, data->shards,
                data->shards > 1 ? "s" : "", 100 * packing_fill(&data->packing, data->first_epoch_sequences));
    else if (data && data->prompts)
        fprintf(out, "data     %zu prompts of at most %zu tokens", data->prompts, data->longest_prompt);
    else
        fputs(data && data->shards ? "data     running text" : "data     random tokens", out);
    fprintf(out, "; %s, %s", objective_names[o->objective], *schedule ? schedule : "batches of ");
    if (o->rollout)
        fprintf(out, "%zu prompts x %zu completions", o->batch, o->group_size);
    else if (o->samples)
        fprintf(out, "%zu %s", o->samples, packed ? dataloader_samples_name(data) : "documents");
    else
        fprintf(out, "%zu tokens", sequence * o->grad_accum);
    fprintf(out, " (length %zu", o->seq_len);
    if (!o->rollout) fprintf(out, ", batch %zu", o->batch);
    if (o->grad_accum > 1) fprintf(out, " x %zu", o->grad_accum);
    fputs(")\n", out);
}

// Rows and query-key pairs of documents that share prefixes, and of the same documents alone
typedef struct {
    double rows, pairs, positions, pairs_alone;
} SharedWork;

// Counts all documents of the data. Prompts of pairs and groups: the rows that they share at least
static SharedWork data_shared_work(const DataLoader *d) {
    SharedWork work = {(double)d->rows, 0, (double)d->positions, 0};
    for (size_t i = 0, sample = 0; d->sample && !d->regular && i < d->segments; i++) {
        const size_t n = d->segment[i].positions;
        while (d->sample[sample + 1].first <= i) sample++;
        const Sample *s = &d->sample[sample];
        const size_t shared = d->common ? d->common[i] : i > s->first ? sample_shared(s) : 0;
        work.pairs += query_key_pairs(shared, n, 0), work.pairs_alone += query_key_pairs(0, n, 0);
    }
    return work;
}

static SharedWork shape_shared_work(const Batch *shape) {
    const Range texts = {0, shape->N}, rows = {0, batch_rows(shape)->N};
    const SharedWork work = {(double)rows.count, range_pairs(batch_rows(shape), rows, 0), (double)texts.count,
                             range_pairs(shape, texts, 0)};
    return work;
}

// Prints which documents of the data share prefixes, and which part of their positions is computed.
static void report_prefixes(FILE *out, const Run *run, const DataLoader *data) {
    const Options *o = run->options;
    char who[96] = "documents of a sequence that begin alike are computed once";
    const int alone = o->rollout && o->group_size == 1; // one completion a prompt
    if (!data || data->regular || alone || !prefixes_from_options(o, run->settings.lora)) return;
    const int families = data->common != NULL, pairs = data->shard->header.kind == KIND_PAIRS;
    const int known = !o->rollout && data->rows < data->positions;
    if (o->rollout)
        snprintf(who, sizeof(who), "%zu completions share their prompt, which is computed once", o->group_size);
    else if (known)
        snprintf(who, sizeof(who),
                 families ? "up to %zu documents begin alike" : "%zu documents of a %s share their prompt",
                 data->largest_sample, pairs ? "pair" : "group");
    else if (o->share_prefixes != SHARE_PREFIXES_ON)
        return;
    fprintf(out, "prefixes  %s", who);
    if (known) {
        const SharedWork work = data_shared_work(data);
        fprintf(out, ": %s of", human_count(work.rows));
        fprintf(out, " %s positions are computed (%.0f %%), %.1fx fewer pairs", human_count(work.positions),
                100 * work.rows / work.positions, work.pairs_alone / work.pairs);
    }
    fputs(", --share-prefixes\n", out);
}

// Prints the rows and forks of random documents that share tokens.
static void report_shared(FILE *out, const Run *run, const Batch *shape) {
    const size_t shared = shared_tokens(run->options, run->settings.lora), forks = shape->tree ? shape->tree->forks : 0;
    if (!shape->tree || !shared) return;
    const SharedWork work = shape_shared_work(shape);
    fprintf(out, "shared   %zu documents share %zu tokens: %.0f rows instead of %.0f, %zu fork%s; %.1fx fewer pairs\n",
            shape->documents, min_size(shared, run->options->seq_len), work.rows, work.positions, forks,
            forks == 1 ? "" : "s", work.pairs_alone / work.pairs);
}

// Prints the chunk, and how many of its rows an expert gets if experts share them evenly.
static void report_chunk(FILE *out, const Run *run) {
    const Config *c = &run->model.config;
    if (!method_has_chunks(run->settings.method)) return;
    fprintf(out, ", chunk %zu", run->plan.chunk);
    if (expert_layers_before(c, c->num_hidden_layers))
        fprintf(out, " (%zu rows an expert)", run->plan.chunk * c->num_experts_per_tok / c->num_experts);
}

// Prints the plan in a line: memory, the planner's choices, attention.
static void report_planned(const Run *run) {
    const Options *o = run->options;
    const RunSettings *s = &run->settings;
    const World w = s->world;
    const int own = !run->attention && strcmp(ops_device->name, "cpu") != 0 &&
                    machine_attends(&machines[MACHINE_H100], &run->model);
    const int own_backward = s->backward && !(s->library & LIBRARY_BACKWARD);
    FILE *out = run->text;
    char text[160];
    fprintf(out, "memory   %s planned%s", human_bytes((double)run->plan.total_bytes),
            s->backward && !s->optimizer ? " for a pass without an optimizer update" : "");
    if (run->available) fprintf(out, ", %s available", human_bytes((double)run->available));
    if (s->deals)
        fprintf(out, ", on each of %zu ranks (ZeRO %zu%s)", world_ranks(w), w.zero,
                s->ring ? ", keys and values passed around" : "");
    else if (world_ranks(w) > 1)
        fprintf(out, ", on each of %zu ranks (%zu replicas x sp %zu, ZeRO %zu%s)", world_ranks(w), world_replicas(w),
                world_sp(w), w.zero, s->ring && world_sp(w) > 1 ? ", keys and values passed around" : "");
    fprintf(out, "; %s", method_text(run));
    report_chunk(out, run);
    if (run->model.config.kv_lora_rank) fprintf(out, ", latents by %s", latents_text(s));
    if (s->keep.level) fprintf(out, ", %s kept", keep_text(s));
    if (s->defers) fputs(", update in forward", out);
    if (s->rollout_slots) fprintf(out, ", %zu texts at a time", s->rollout_slots);
    for (int place = PLACE_HOST; place < PLACES && !o->verbose; place++) // else report_places prints it
        if (*placed_text(run, place, text, sizeof(text)))
            fprintf(out, "; %s: %s", place == PLACE_HOST ? "in host memory" : "on disk", text);
    if (run->attention || own)
        fprintf(out, "; attention by %s%s", own ? "our own kernels, slower than cuDNN" : run->attention,
                own                      ? ""
                : own_backward           ? ", backward by our own kernels"
                : s->attention.any_order ? " in any order"
                                         : "");
    if (run->attention && run->model.config.global_head_dim && s->library < LIBRARY_GLOBAL)
        fprintf(out, ", heads of %zu by our own kernels", run->model.config.global_head_dim);
    if (run->attention && s->backward && !own_backward &&
        !library_takes_window(run->model.config.head_dim, window_of_model(&run->model.config), 1))
        fputs(", backward of windows by our own kernels", out);
    if (run->chosen && option_given(o, "machine") && o->verb != VERB_PLAN)
        fprintf(out, "; a step of %.3g s, estimated%s", run->choice.seconds,
                machine_basis(machine_from_options(o), &run->model.config));
    fputc('\n', out);
    if (!s->deals) return;
    for (size_t k = 0; k < run->table.levels.levels; k++) // how many tokens fit the groups that --sp auto deals to
        fprintf(out, k ? ", %zu fit %zu" : "groups   %zu tokens fit %zu rank", run->table.levels.level[k].capacity,
                run->table.levels.level[k].ranks);
    fputc('\n', out);
}

// Prints the header: three lines, one more with experts or --sp auto, further lines with --verbose. data, schedule: see
// report_data. bound: the planned sequence
static void report_run(const Run *run, const DataLoader *data, SequenceBound bound, const char *schedule) {
    const Options *o = run->options;
    FILE *out = run->text;
    if (o->quiet) return;
    if (o->verbose) fputs("command  ", out), options_echo(out, o, 1);
    report_model(out, run);
    report_experts(out, run);
    report_data(run, data, schedule);
    report_prefixes(out, run, data);
    if (shared_tokens(o, run->settings.lora)) {
        Batch shape = batch_shape(bound);
        report_shared(out, run, &shape);
        batch_free(&shape);
    }
    report_planned(run);
    fflush(out);
    if (!o->verbose) return;
    report_base(run);
    report_reference(run);
    if (data && data->segment && !data->prompts) dataloader_report(out, data);
    if (o->overlap)
        fputs("overlap  completions are written before the updates of the previous step: off-policy by one step\n",
              out);
    fprintf(out, "plan     a sequence of %zu %s, chunk %zu, logits chunk %zu, %s per pass; at the peak:\n",
            bound_rows(bound), bound.rows ? "rows" : "positions", run->plan.chunk, run->plan.logits_chunk,
            human_flops(run->plan.counts.flops));
    report_regions(out, run->plan.arena);
    report_places(out, run);
}

// Writes the method (with auto the planner's choice) into an open object.
static void report_method_json(JsonOut *json, const Run *run) {
    json_text(json, "method", method_names[run->settings.method]);
    if (run->settings.method == METHOD_SPACO) json_number(json, "keep_chunks", run->settings.sparse.keep);
    json_size(json, "chunk", run->plan.chunk);
    json_size(json, "logits_chunk", run->plan.logits_chunk);
    if (run->model.config.kv_lora_rank) json_text(json, "latents", latents_text(&run->settings));
}

// Writes rows and query-key pairs of documents that share prefixes into an open object: of all data, or of the shape of
// random documents; and the rows and forks of the largest sequence.
static void report_shared_json(JsonOut *json, const DataLoader *data, const Batch *shape) {
    const SharedWork work = data ? data_shared_work(data) : shape_shared_work(shape);
    json_number(json, "positions", work.positions);
    json_number(json, "rows", work.rows);
    json_number(json, "pairs", work.pairs);
    json_number(json, "pairs_alone", work.pairs_alone);
    json_size(json, "largest_rows", batch_rows(shape)->N);
    json_size(json, "forks", shape->tree->forks);
}

// Writes method, chunks and FLOPs of a step into an open object.
static void report_work_json(JsonOut *json, const Run *run, double flops, double model_flops) {
    report_method_json(json, run);
    json_number(json, "flops", flops);
    json_number(json, "model_flops", model_flops);
    json_text(json, "dtype", dtype_name(run->model.dtype));
    report_base_json(json, run);
    report_attention_json(json, run);
}

#endif
