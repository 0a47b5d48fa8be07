/*
Begins and ends a training run: its folder, data, plan and memory, its reference, the settings that a resumed run must
share, its weights and optimizer (new, or from the last checkpoint), its log. After trainer_begin our code allocates
nothing.
*/
#ifndef LLMC_TRAINER_SETUP_H
#define LLMC_TRAINER_SETUP_H
#include "llmc/run/seq_len.h"
#include "reference.h"
#include "trainer.h"

// ---- the folder -----------------------------------------------------------------------------------------------------
// Finds the model to resume with if the command line names none. A checkpoint of a whole model holds the model; a
// checkpoint of adapters does not.
static void trainer_find_model(const Options *o, const char *last, char path[PATH_MAX]) {
    Manifest manifest;
    const char *fault = manifest_read(last, &manifest);
    if (fault) die("%s: %s; resume another checkpoint", last, fault);
    checkpoint_check_kind(last, &manifest, o->lora_rank || o->adapter);
    if (!manifest.adapters)
        path_join(path, last, manifest_file(&manifest, MANIFEST_MODEL));
    else if (!o->model && !o->init)
        die("%s: holds only adapters; give the model that they were trained on with --model", last);
}

// Opens --out. If it holds a checkpoint to resume from, sets `last` to the checkpoint's path and `model` to the path of
// its model.
static void trainer_open_folder(Trainer *t, const Options *o, char last[PATH_MAX], char model[PATH_MAX]) {
    static const char *const others[3][2] = {
        {"optimizer.bin", "is a checkpoint of a run, whose folder --resume takes"},
        {"config.json", "is the folder of a model, which would hide the run's checkpoints from --model"},
        {"adapter_config.json", "is the folder of an adapter, which the run's checkpoints would hide from --adapter"}};
    for (size_t i = 0; i < 3; i++)
        if (folder_has(o->out, others[i][0])) die("--out %s: %s; choose another --out", o->out, others[i][1]);
    checkpoint_open(&t->folder, o->out, o->keep_checkpoints, o->overwrite ? FOLDER_REPLACE : (FolderUse)(int)o->resume);
    if (t->folder.last != CHECKPOINT_NONE) {
        checkpoint_path(last, t->folder.path, t->folder.last, "");
        trainer_find_model(o, last, model);
    } else if (o->resume && (o->resume == RESUME_ON || (!o->model && !o->init))) {
        if (!o->model && !o->init)
            die("%s holds no checkpoint to resume from; give --model or --init to begin", o->out);
        note("%s holds no checkpoint, so the run begins at step 1", o->out);
    }
}

// ---- data, plan and memory ------------------------------------------------------------------------------------------
// Opens the data, then plans and allocates. Returns the largest planned sequence.
static SequenceBound trainer_allocate(Trainer *t) {
    Options *o = &t->options;
    if (!t->run.has_begun) run_find_data_tokenizer(&t->run);
    if (o->sample_every) {
        t->prompt = prompt_from_options(&t->run);
        t->run.settings.cache_tokens = prompt_cache_tokens(&t->prompt, o);
    }
    run_choose_length(&t->run, o, 0);
    t->data = run_open_data(&t->run, &o->data, shuffle_from_options(o));
    if (!o->sp && t->data.regular)
        die_usage(
            "--sp auto deals documents of different lengths, but llm.c's shards have only one length; give --sp S");
    RolloutSettings rollout = {0};
    if (o->rollout) {
        prompt_choose_tokenizer(&t->rollout_text, &t->run);
        rollout = rollout_from_options(&t->run, &t->rollout_text);
    }
    SequenceBound bound =
        o->rollout ? rollout_plan(&rollout, &t->data, &t->run.settings, o->seq_len) : run_bound(&t->run, &t->data);
    if (o->val_data.count) {
        t->validation = run_open_data(&t->run, &o->val_data, SHUFFLE_OFF);
        dataloader_check_pair(&t->data, &t->validation);
        const char *shared = dataloader_find_shared(&t->data, &t->validation);
        if (shared && !o->quiet)
            note("%.100s of --val-data is also in --data, so the validation loss is not of unseen data; give other "
                 "--val-data",
                 shared);
        if (o->rollout)
            rollout_plan(&rollout, &t->validation, &t->run.settings, o->seq_len);
        else
            bound = larger_bound(bound, run_bound(&t->run, &t->validation));
    }
    live_begin(&t->run, o, &t->data, bound);
    run_allocate(&t->run, bound);
    kl_allocate(&t->run, bound);
    rollout.slots = t->run.settings.rollout_slots; // as many slots as fit
    if (o->rollout)
        rollout_open(&t->rollout, &rollout, &t->run.model, &t->data);
    else
        prefetch_allocate(&t->train_batches, &t->data, t->run.assignment);
    if (t->run.settings.deals) prefetch_deal(&t->train_batches, &t->run.table, t->run.settings.world.rank);
    rollout.in_order = 1, rollout.overlap = rollout.reference = rollout.old = rollout.records = 0; // settings for the
                                                                                                   // rollouts of
                                                                                                   // --val-data
    if (o->val_data.count && o->rollout)
        rollout_open(&t->rollout_validation, &rollout, &t->run.model, &t->validation);
    else if (o->val_data.count)
        prefetch_allocate(&t->validation_batches, &t->validation,
                          assign_evaluation(t->run.settings.world, t->run.assignment.parts));
    if (o->sample_every) {
        sampler_allocate(&t->sampler, &t->run.model, t->run.settings.cache_tokens, t->run.settings.context);
        t->sampled = (int32_t *)checked_calloc(o->max_new_tokens, sizeof(int32_t), "the sampled tokens");
        t->sampled_text = (char *)checked_calloc(o->max_new_tokens, prompt_token_bytes(&t->prompt), "the sampled text");
    }
    return bound;
}

// Adds a schedule that follows the schedule of the run at `last` (--extend). If the run was already extended to these
// steps, keeps the schedule of the extension.
static void trainer_extend(Trainer *t, const char *last) {
    const int keeps = isnan(t->given->lr);
    Schedule *schedule = &t->state.schedule;
    size_t step;
    const Schedule saved = run_state_schedule(last, &step);
    const int same = saved.steps == schedule->steps, again = saved.begin && same;
    if (!saved.begin && same && step < saved.steps) return; // --resume auto continues a run that it began
    if (!again && step < saved.steps)
        die("%s: is at step %zu of %zu in its schedule; first resume with %s--steps %zu", last, step, saved.steps,
            saved.begin ? "--extend " : "", saved.steps);
    if (!again && schedule->steps <= saved.steps)
        die("%s: has made %zu steps; with --extend give a larger total by --steps or --epochs", last, saved.steps);
    schedule->begin = again ? saved.begin : saved.steps;
    schedule->from = again ? saved.from : schedule_learning_rate(&saved, saved.steps);
    if (keeps) schedule->kind = SCHEDULE_CONSTANT, schedule->peak = schedule->from, schedule->warmup = 0;
}

// Sets the schedule. last: the checkpoint to resume from, or ""
static void trainer_schedule(Trainer *t, const char *last) {
    const Options *o = t->run.options;
    Schedule *schedule = &t->state.schedule;
    schedule->kind = o->schedule;
    schedule->peak = o->lr;
    schedule->final_fraction = o->final_lr_fraction;
    schedule->decay_fraction = o->decay_fraction;
    const size_t epoch = o->rollout   ? t->data.prompts
                         : o->samples ? t->data.packing.windows
                                      : dataloader_batches(&t->data);
    const size_t taken = o->rollout ? o->batch : o->samples ? 1 : o->grad_accum;
    const double steps = o->epochs * (double)epoch / (double)taken;
    schedule->steps = o->steps ? o->steps : (o->rollout ? o->updates : 1) * (size_t)(steps * (1 + 1e-12));
    if (!schedule->steps)
        die("an epoch is %.3g steps (%zu %s, of which a step takes %zu); give more --epochs, or --steps",
            steps / o->epochs, epoch, o->rollout ? "prompts" : "micro-batches", taken);
    schedule->warmup = isnan(o->warmup_ratio) ? o->warmup : (size_t)ceil((double)schedule->steps * o->warmup_ratio);
    if (o->warmup > schedule->steps && !o->quiet)
        note("--warmup %zu is more than the run's %zu steps, so --lr is never reached; lower --warmup", o->warmup,
             schedule->steps);
    if (o->extend && *last) trainer_extend(t, last);
}

// ---- the reference: the model that the run began with, as its log-probabilities -------------------------------------
// Tells whether the reference is a file of log-probabilities, identified by its model's key. Under new adapters the
// reference is the base model instead, computed in each step.
static int trainer_has_reference(const Trainer *t) {
    return objective_needs_reference(&t->run.settings.objective) && !t->run.settings.reference &&
           !t->run.options->rollout;
}

// Sets reference_key and checks the named files: they must belong to the current weights, unless a file of any weights
// will do. last: the checkpoint of a resumed run, whose settings hold the key; "": a new run
static void trainer_find_reference(Trainer *t, const char *last) {
    const Options *o = t->run.options;
    const int named = o->reference_logprobs || o->old_logprobs, begins = !*last;
    uint64_t start = 0;
    if (begins && ((named && !o->any_reference) || (trainer_has_reference(t) && !o->reference_logprobs)))
        start = run_model_key(&t->run, o->adapter != NULL); // new adapters are zero, so the base model's key serves
    reference_check(&t->run, &t->data, o->any_reference ? 0 : start);
    if (!trainer_has_reference(t)) return;
    if (o->reference_logprobs)
        t->reference_key = t->run.reference.header.model_key;
    else
        t->reference_key = begins ? start : reference_key_of(last);
    if (!t->reference_key && !begins && o->adapter)
        die("%s: was trained against the base model, not against --adapter %s; resume with the --lora-rank that it "
            "began with, or begin a new run with another --out",
            last, o->adapter);
}

// Keeps a copy of the trained weights as loaded from --model and --adapter. It is the reference of rollouts.
static void trainer_keep_reference(Trainer *t) {
    const TrainedTensors *x = &t->tensors;
    Residency *memory = &t->run.streambp.memory;
    const DType type = x->model->dtype;
    for (Slabs s = slabs_of(x->model, SLABS_OF_GROUPS, x->weights_sharding, x->weights_sharding, NULL); slabs_next(&s);)
        x->ops->copy_in(element_address(memory->reference, type, s.offset),
                        slab_from_device(&s, x->ops, x->weights, type, type), s.count * dtype_size(type));
    t->reference_key = run_model_key(&t->run, t->run.options->adapter != NULL);
}

// Opens the reference file of the data, unless a file was named. Batches are filled from it.
static void trainer_open_reference(Trainer *t, DataLoader *data, Prefetch *batches, LogprobFile *file) {
    if (!trainer_has_reference(t) || data->settings.reference) return;
    reference_prepare(file, &t->run, data, &batches->slot[0].whole, t->reference_key,
                      t->state.step ? &t->source : NULL);
    data->settings.reference = file;
}

// ---- settings that a resumed run must share -------------------------------------------------------------------------
static RunSetting *add_setting(Trainer *t, const char *name, SettingChange change, const char *format, ...) {
    size_t i = t->state.setting_count++;
    va_list args;
    if (i == TRAINER_SETTINGS) die("internal: more than %d settings of a run; please report it", TRAINER_SETTINGS);
    va_start(args, format);
    vsnprintf(t->setting_text[i], sizeof(t->setting_text[i]), format, args);
    va_end(args);
    t->settings[i].name = name;
    t->settings[i].value = t->setting_text[i];
    t->settings[i].change = change;
    return &t->settings[i];
}

static void trainer_objective_settings(Trainer *t) {
    const Objective *objective = &t->run.settings.objective;
    const Lora *lora = &t->run.lora;
    const Options *o = t->run.options;
    if (objective->kind != OBJECTIVE_SFT)
        add_setting(t, "--objective", SETTING_KEPT,
                    "%s,dpo-loss=%s,normalisation=%s,beta=%.17g,gamma=%.17g,label-smoothing=%.17g,clip-low=%.17g,"
                    "clip-high=%.17g,temperature=%.17g,scale-rewards=%s",
                    objective_names[o->objective], dpo_loss_names[o->dpo_loss], normalisation_names[o->normalisation],
                    objective->beta, objective->gamma, objective->label_smoothing, objective->clip_low,
                    objective->clip_high, objective->temperature.divisor, option_chosen(o, "scale-rewards"));
    if (objective->kind == OBJECTIVE_KTO)
        add_setting(t, "--kto-loss", SETTING_KEPT, "%s,desirable-weight=%.17g,undesirable-weight=%.17g",
                    kto_loss_names[objective->kto_loss], objective->desirable_weight, objective->undesirable_weight);
    if (objective->kind == OBJECTIVE_DISTILL)
        add_setting(t, "--teacher-logprobs", SETTING_KEPT,
                    "%016llx,distill-loss=%s,distill-weight=%.17g,top-k=%zu,T=%.17g",
                    (unsigned long long)t->run.teacher.header.model_key, distill_loss_names[objective->distill_loss],
                    objective->distill_share, t->run.settings.teacher_k, objective->distill_temperature);
    if (objective_is_of_policy(objective) && objective->beta != 0)
        add_setting(t, "--kl-correction", SETTING_KEPT, "%s", objective->kl_correction ? "on" : "off")->absent = "off";
    if (objective_is_of_policy(objective) || o->rollout)
        add_setting(t, "--max-new-tokens", SETTING_KEPT, "%zu", o->max_new_tokens);
    if (o->rollout) {
        const RolloutSettings *rollout = &t->rollout.settings;
        add_setting(t, "--rollout", SETTING_KEPT,
                    "%s%s%sgroup-size=%zu,top-k=%zu,top-p=%.17g,updates=%zu,ends=%016llx,reward-failure=%s",
                    rollout->in_order ? "shuffle=off," : "", rollout->mask_truncated ? "mask-truncated," : "",
                    rollout->overlap ? "overlap," : "", o->group_size, o->top_k, o->top_p, o->updates,
                    (unsigned long long)checksum_of(0, rollout->end_ids, rollout->end_count * sizeof(uint32_t)),
                    option_chosen(o, "reward-failure"));
        if (rollout->records)
            add_setting(t, "--router-replay", SETTING_KEPT, rollout->replays ? "on" : "off")->absent = "off";
    }
    // parts: into how many a micro-batch is divided.
    if (t->run.settings.router_aux_loss > 0 || t->run.settings.router_z_loss > 0)
        add_setting(t, "--router-aux-loss", SETTING_KEPT, "%.17g,z-loss=%.17g,parts=%zu",
                    t->run.settings.router_aux_loss, t->run.settings.router_z_loss, t->run.assignment.parts);
    // Older runs lack this setting.
    if (expert_layers_before(&t->run.model.config, t->run.model.config.num_hidden_layers))
        add_setting(t, "--router-bias-update", SETTING_KEPT, "%.17g", o->router_bias_update)->absent = "0";
    if (t->reference_key) add_setting(t, "reference", SETTING_KEPT, "%016llx", (unsigned long long)t->reference_key);
    if (o->old_logprobs)
        add_setting(t, "--old-logprobs", SETTING_KEPT, "%016llx", (unsigned long long)t->run.old.header.model_key);
    if (lora->rank && lora_copied(lora))
        add_setting(t, "--lora-modules-to-save", SETTING_KEPT, "%s%s", lora->saves[EMBEDDING] ? "embedding" : "",
                    lora->saves[LM_HEAD] ? " head" : "");
    if (lora->rank)
        add_setting(t, "LoRA", SETTING_KEPT, "rank=%zu,alpha=%.17g,dropout=%.17g,rslora=%d,%s=%llx,dtype=%s",
                    lora->rank, lora->alpha, lora->dropout, lora->rslora,
                    lora->each || lora_has_outer(lora) ? "layers" : "modules",
                    lora->each || lora_has_outer(lora) ? (unsigned long long)lora_key(lora) : lora->modules,
                    dtype_name(lora->table.dtype));
}

// Adds the reward commands as settings in the given order, with weights if there are several.
static void trainer_reward_settings(Trainer *t) {
    const RolloutSettings *s = &t->rollout.settings;
    char text[sizeof(t->setting_text[0])] = "";
    for (size_t k = 0, used = 0; k < s->rewards && used < sizeof(text); k++) {
        const char *weight = t->run.options->reward_weights ? ", weight " : "";
        used +=
            (size_t)snprintf(text + used, sizeof(text) - used, "%s%s%s", k ? "; " : "", s->reward_command[k], weight);
        if (*weight && used < sizeof(text))
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%.17g", s->reward_weight[k]);
    }
    add_setting(t, "--reward-command", SETTING_ROUNDS, "%s", text);
}

#define PREFIXES_SETTING "--share-prefixes" // as in force: off, if another option excludes auto
static void trainer_settings(Trainer *t) {
    static const char *const prefixes[] = {"off", "auto", "on"}; // of Prefixes
    const Options *o = t->run.options;
    const World world = t->run.settings.world;
    char config[4096], base[64];
    const DocumentShard *shard = t->data.shard, *last = &shard[t->data.shards - 1];
    t->state.settings = t->settings, t->state.data = t->data_files;
    snprintf(t->data_files, sizeof(t->data_files), last > shard ? "%.400s to %.400s (%zu files)" : "%.800s",
             shard->header.path, last->header.path, t->data.shards);
    config_to_text(&t->run.model.config, config, sizeof(config));
    add_setting(t, "model", SETTING_KEPT, "%s", config);
    add_setting(t, "--base", SETTING_KEPT, "%s", run_base_text(&t->run, base))->absent = "none";
    add_setting(t, "--seq-len", SETTING_KEPT, "%zu", o->seq_len);
    add_setting(t, "--batch", SETTING_KEPT, "%zu", o->batch);
    if (!t->data.regular || t->data.packing.shuffle) { // irrelevant for llm.c's shards in order
        add_setting(t, "--shuffle", SETTING_KEPT, "%s", t->data.packing.shuffle ? "on" : "off");
        add_setting(t, "--long", SETTING_KEPT, "%s", option_chosen(o, "long"));
    }
    add_setting(t, "data", SETTING_KEPT, "%016llx", (unsigned long long)dataloader_fingerprint(&t->data, o->batch));
    add_setting(t, PREFIXES_SETTING, SETTING_KEPT, "%s", prefixes[prefixes_from_options(o, t->run.settings.lora)])
        ->absent = prefixes[PREFIXES_NONE];
    trainer_objective_settings(t);
    add_setting(t, "--grad-accum", SETTING_KEPT, "%zu", o->grad_accum);
    if (o->samples) add_setting(t, "--samples", SETTING_KEPT, "%zu", o->samples);
    add_setting(t, "--seed", SETTING_KEPT, "%zu", o->seed);
    add_setting(t, "AdamW", SETTING_KEPT, "beta1=%.17g,beta2=%.17g,epsilon=%.17g,weight-decay=%.17g,grad-clip=%.17g",
                o->beta1, o->beta2, o->epsilon, o->weight_decay, o->grad_clip);
    if (t->run.settings.method == METHOD_SPACO)
        add_setting(t, "--keep-chunks", SETTING_KEPT, "%.17g", o->keep_chunks)->absent = "off";
    else
        add_setting(t, "--keep-chunks", SETTING_KEPT, "off")->absent = "off";
    add_setting(t, "--method", SETTING_ROUNDS, "%s", method_names[t->run.settings.method]);
    add_setting(t, "--chunk", SETTING_ROUNDS, "%zu", t->run.plan.chunk);
    const int even = t->run.plan.chunk < t->run.streambp.now.host_tokens; // 0: there is only one chunk
    add_setting(t, "the last chunk", SETTING_ROUNDS, "%s", even ? "at least an eighth" : "what is left")->absent =
        "what is left";
    add_setting(t, "--logits-chunk", SETTING_ROUNDS, "%zu", t->run.plan.logits_chunk);
    if (t->run.model.config.kv_lora_rank)
        add_setting(t, "--latents", SETTING_ROUNDS, "%s", latents_text(&t->run.settings))->absent = "ranges";
    if (t->run.attention)
        add_setting(t, ATTENTION_SETTING, SETTING_ROUNDS, "%s,deterministic=%s," WORKSPACE_SETTING "%zu",
                    t->run.attention, option_chosen(o, "deterministic"), t->run.settings.attention.workspace)
            ->absent = "own";
    else
        add_setting(t, ATTENTION_SETTING, SETTING_ROUNDS, "own")->absent = "own";
    add_setting(t, "--grad-dtype", SETTING_ROUNDS, "%s", dtype_name(t->run.settings.gradient_type));
    if (o->rollout) add_setting(t, "--slots", SETTING_ROUNDS, "%zu", t->rollout.settings.slots);
    if (o->rollout) trainer_reward_settings(t);
    if (o->environment_command) {
        add_setting(t, "--environment-command", SETTING_ROUNDS, "%s", o->environment_command);
        add_setting(t, "--max-turns", SETTING_KEPT, "%zu", o->max_turns);
        add_setting(t, "--turn-rewards", SETTING_KEPT, "%s", option_chosen(o, "turn-rewards"));
    }
    add_setting(t, "threads", SETTING_ROUNDS, "%d", cpu_threads());
    add_setting(t, "ranks", SETTING_ROUNDS, "%zu", world_ranks(world));
    add_setting(t, "--zero", SETTING_FREE, "%zu", world.zero);
    const char *const ring = t->run.settings.ring ? ", ring" : "";
    if (t->run.settings.deals) // with less memory other sequences fit
        add_setting(t, "--sp", SETTING_ROUNDS, "auto, table %016llx%s",
                    (unsigned long long)checksum_of(0, &t->run.table, sizeof(t->run.table)), ring);
    else
        add_setting(t, "--sp", SETTING_ROUNDS, "%zu%s", world_sp(world), ring);
    RunSettings kept = t->run.settings; // all activations have the bits of products
    if (kept.keep.level == LEVEL_ALL) kept.keep.level = LEVEL_PRODUCTS;
    if (level_changes_bits(&t->run.model.config))
        add_setting(t, "--keep", SETTING_ROUNDS, "%s", keep_text(&kept))->absent = "none";
}

// Returns the setting with that name, which must exist.
static RunSetting *trainer_setting(Trainer *t, const char *name) {
    RunSetting *s = t->settings;
    while (strcmp(s->name, name) != 0) s++;
    return s;
}

// Lets a resumed run divide steps into micro-batches of a new size. Returns the old --batch if the new --batch may
// replace it, else 0. The settings are then compared as if unchanged.
static size_t trainer_resplit(Trainer *t, const char *last) {
    const Options *o = t->run.options;
    char text[32];
    uint64_t position = 0;
    const size_t B = strtoull(run_state_setting(last, "--batch"), NULL, 10);
    const size_t count = strtoull(run_state_setting(last, "--grad-accum"), NULL, 10);
    if (!B || B == o->batch || o->rollout || (!o->samples && B * count != o->batch * o->grad_accum)) return 0;
    // kto pairs prompts with other completions of the micro-batch, so the loss depends on --batch
    if (objective_needs_mismatched(&t->run.settings.objective)) return 0;
    if (!dataloader_resplit(&t->data, B, 0, &position)) return 0;
    trainer_setting(t, "--batch")->change = trainer_setting(t, "--grad-accum")->change = SETTING_ROUNDS;
    snprintf(text, sizeof(text), "%016llx", (unsigned long long)dataloader_fingerprint(&t->data, B));
    strcpy(t->setting_text[trainer_setting(t, "data") - t->settings], text);
    return B;
}

// ---- weights and optimizer ------------------------------------------------------------------------------------------
static void trainer_find_tensors(Trainer *t) {
    const Run *run = &t->run;
    TrainedTensors *tensors = &t->tensors;
    tensors->model = run_trained(run);
    tensors->ops = ops_device;
    tensors->weights = trained_weights(&run->streambp.memory);
    tensors->weights_sharding = weights_sharding(&run->streambp.memory);
    tensors->optimizer = run->optimizer;
    tensors->optimizer_sharding = sharding_of(run->settings.world, ZERO_OPTIMIZER);
    tensors->lora = run->settings.lora;
    tensors->base = run->base;
    tensors->base_path = run->options->model;
    tensors->base_model = &run->model;
    tensors->waiting = run->options->overlap ? &t->rollout.part : NULL;
}

// Loads weights, optimizer and state: new, or from the checkpoint at `last`.
static void trainer_load(Trainer *t, const char *last) {
    const int resumes = *last != 0, keeps = t->run.settings.reference == REFERENCE_START;
    char best[PATH_MAX];
    Manifest manifest;
    if (resumes && keeps && !t->run.options->model && !t->run.options->init)
        die("%s: its run needs the model that it began with as reference; give that model with --model", last);
    if (!resumes || keeps)
        run_load_weights(&t->run);
    else if (t->run.lora.rank)
        run_load_base(&t->run);
    trainer_find_tensors(t);
    const TrainedTensors *tensors = &t->tensors;
    if (!resumes) optimizer_step(&t->run.streambp.memory, &t->run.optimizer, NULL);
    if (keeps) trainer_keep_reference(t);
    trainer_find_reference(t, last);
    trainer_settings(t);
    if (!resumes) return;
    const size_t batch = trainer_resplit(t, last);
    checkpoint_load(&t->folder, t->folder.last, tensors, &t->state);
    if (t->run.model.router_bias)
        ops_device->copy_in(t->run.streambp.setup->router_bias, t->run.model.router_bias,
                            model_router_biases(&t->run.model) * sizeof(float));
    checkpoint_path(best, t->folder.path, t->state.best_step, "");
    if (t->run.options->keep_best && t->state.best_step && manifest_read(best, &manifest))
        t->state.best_step = 0; // the best checkpoint was not kept
    if (batch) {
        uint64_t position = t->state.next_batch;
        if (!dataloader_resplit(&t->data, batch, t->state.step, &position))
            die("%s: ends within a micro-batch of --batch %zu; resume with --batch %zu", last, t->run.options->batch,
                batch);
        t->state.next_batch = (size_t)position;
        snprintf(t->setting_text[trainer_setting(t, "data") - t->settings], sizeof(t->setting_text[0]), "%016llx",
                 (unsigned long long)dataloader_fingerprint(&t->data, t->run.options->batch));
    }
    if (tensors->waiting && tensors->waiting->is_there)
        rollout_load(&t->rollout, t->state.step / t->run.options->updates + 1, &t->run.model.config, last);
    if (!t->run.options->quiet)
        fprintf(t->run.text, "resumed  %s, step %zu of %zu\n", last, t->state.step, t->state.schedule.steps);
    if (t->state.step == t->state.schedule.steps)
        note("%s: all %zu steps of its schedule are done; --extend --steps N trains on to step N, and "
             "--model %s with another --out begins a new run",
             last, t->state.step, t->run.options->out);
    weights_check_finite(tensors->model, tensors->weights_sharding, ops_device,
                         t->run.streambp.memory.place[PLACED_WEIGHTS], tensors->weights);
    run_close_source(&t->run);
}

// ---- the whole setup ------------------------------------------------------------------------------------------------
// Keeps the planner's choices that affect results, as the run of this checkpoint began with them.
static void trainer_keep_choices(Trainer *t, const char *last) {
    Options *o = &t->options;
    const char *shared = run_state_setting(last, "--sp"), *method = run_state_setting(last, "--method");
    t->run.has_begun = 1, t->run.workspace = run_state_workspace(last);
    if (!o->chunk && method_has_chunks(o->method) && o->method != METHOD_MST) {
        o->chunk = strtoull(run_state_setting(last, "--chunk"), NULL, 10);
        if (!o->logits_chunk) o->logits_chunk = strtoull(run_state_setting(last, "--logits-chunk"), NULL, 10);
    }
    if (o->latents == LATENTS_AUTO && t->run.model.config.kv_lora_rank && !method_is_chunk_major(o->method))
        o->latents = !strcmp(run_state_setting(last, "--latents"), "layer") ? LATENTS_LAYER : LATENTS_RANGES;
    if (o->kv == KEYS_AUTO && o->sp != 1 && strtoull(shared, NULL, 10) == o->sp) // with --sp auto, o->sp is 0
        o->kv = strstr(shared, "ring") ? KEYS_RING : KEYS_GATHER;
    if (o->keep.word == KEEP_AUTO && level_changes_bits(&t->run.model.config)) {
        const char *kept = run_state_setting(last, "--keep");
        option_set(&option_rows[option_find("keep")], o, *kept ? kept : "none");
        const Keeping begun = {(KeepLevel)o->keep.word, o->keep.layers, 0};
        if (begun.level > LEVEL_ATTENTION) t->run.begun = begun, o->keep.word = KEEP_AUTO, o->keep.layers = 0;
    }
    if (o->method == METHOD_AUTO && !strcmp(method, method_names[METHOD_STREAM])) o->method = METHOD_STREAM;
    if (run_search(&t->run, 0).method && !strcmp(method, method_names[METHOD_SECO]) && o->inputs_every <= 1 &&
        (o->keep.word == KEEP_NONE || o->keep.word == KEEP_AUTO))
        o->method = METHOD_SECO;
    if (o->method != METHOD_AUTO) t->run.settings.method = o->method;
}

// Refuses a disk without room for the kept checkpoints and one that is being written. With --verbose prints when
// checkpoints are saved.
static void trainer_check_space(const Trainer *t) {
    const Options *o = t->run.options;
    const Interval *every = &o->save_every;
    const OptionRow *row = &option_rows[option_find("save-every")];
    char text[64];
    const size_t left = t->state.schedule.steps - t->state.step, kept = o->keep_checkpoints + (o->keep_best != 0);
    const size_t saves = every->seconds > 0 ? SIZE_MAX : every->steps ? (left + every->steps - 1) / every->steps : 1;
    if (dist_rank() != 0 || !left) return;
    const size_t there = t->folder.replaces ? 0 : checkpoint_count(&t->folder);
    const size_t more = min_size(o->keep_best ? SIZE_MAX : saves, kept + 1 - min_size(kept, there));
    const uint64_t available = checkpoint_check_space(&t->folder, &t->tensors, o->out, more);
    if (o->quiet || !o->verbose) return;
    fprintf(t->run.text, "saving   --save-every %s: %s each, %zu kept", option_text(row, o, text, sizeof(text)),
            human_bytes((double)checkpoint_bytes(&t->tensors)), kept);
    fprintf(t->run.text, available ? ", %s free\n" : "\n", human_bytes((double)available));
    fflush(t->run.text); // flushed, since the first step may be long
}

// Tells whether the data were conversations that the run's tokenizer can continue.
static int trainer_chats(const Trainer *t) {
    char path[PATH_MAX];
    const char *file = tokenizer_of_run(&t->run, path), *option;
    if (!file || !t->data.shard->header.chat_template) return 0;
    Tokenizer *tokenizer = tokenizer_load(file);
    const int chats = !chat_fault(tokenizer, 0, THINKING_AUTO, 0, &option);
    tokenizer_close(tokenizer);
    return chats;
}

// Sets options that the command line does not give: the learning rate by default, the correction of the KL divergence
// and --seq-len from the run at `last`.
static void trainer_set_defaults(Options *o, const char *last) {
    const double usual = options_learning_rate(o);
    if (isnan(o->lr)) {
        size_t step;
        o->lr = *last ? run_state_schedule(last, &step).peak : usual;
        o->given[option_find("lr")] = 1; // so that the printed command line has --lr
    } else if (!*last && !o->quiet && o->lr / usual > 10.001) {
        note("--lr %g is %.3g times --lr auto, which is %g here; if the loss rises, give a smaller --lr", o->lr,
             o->lr / usual, usual);
    }
    const int policy = o->objective >= OBJECTIVE_GRPO && o->objective <= OBJECTIVE_CISPO;
    if (*last && policy && o->kl_correction == KL_CORRECTION_AUTO)
        o->kl_correction =
            strcmp(run_state_setting(last, "--kl-correction"), "on") ? KL_CORRECTION_OFF : KL_CORRECTION_ON;
    if (*last && o->share_prefixes == SHARE_PREFIXES_AUTO) {
        const char *kept = run_state_setting(last, PREFIXES_SETTING);
        if (!*kept && prefixes_from_options(o, NULL))
            note("this run began without shared prefixes and goes on without: a new run computes prompts once");
        option_set(&option_rows[option_find("share-prefixes")], o, *kept ? kept : "off");
    }
    if (*last && !option_given(o, "seq-len") && parse_size(run_state_setting(last, "--seq-len"), &o->seq_len))
        o->given[option_find("seq-len")] = 1;
}

// Does everything before the first step.
static void trainer_begin(Trainer *t, const Options *given) {
    Options *o = &t->options;
    char last[PATH_MAX] = "", model[PATH_MAX] = "";
    memset(t, 0, sizeof(*t));
    *o = *given;
    t->given = given;
    t->validation_loss = t->state.first = t->ending.last = NAN;
    if (o->out && !strcmp(o->out, "none")) o->out = NULL;
    t->has_folder = o->out != NULL;
    if (t->has_folder) trainer_open_folder(t, o, last, model);
    trainer_set_defaults(o, last);
    run_open(&t->run, o, o->model ? NULL : model);
    if (*last) run_source_read(last, &t->source);
    run_source_begin(&t->run, &t->source), t->state.source = &t->source;
    if (*last) trainer_keep_choices(t, last);
    SequenceBound bound = trainer_allocate(t);
    trainer_schedule(t, last);
    const char *source = !isnan(given->lr) ? "" : *last ? " (as it began)" : " (auto)";
    char schedule[96];
    snprintf(schedule, sizeof(schedule), "lr %g%s, %zu step%s of ", o->lr, source, t->state.schedule.steps,
             t->state.schedule.steps == 1 ? "" : "s");
    report_run(&t->run, &t->data, bound, schedule);
    if (o->extend && *last && isnan(given->lr))
        // Logged as auto, so that --resume alone extends in the same way.
        o->lr = NAN;
    if (!o->quiet && is_main_rank()) t->peak_flops = (double)dist_ranks() * run_peak_flops(&t->run);
    trainer_load(t, last);
    trainer_open_reference(t, &t->data, &t->train_batches, &t->reference[0]);
    if (o->val_data.count) trainer_open_reference(t, &t->validation, &t->validation_batches, &t->reference[1]);
    t->next_batch = t->state.next_batch;
    if (t->has_folder) trainer_check_space(t);
    if (t->folder.replaces) checkpoint_replace(&t->folder);
    dist_barrier(); // all other ranks have opened their logs
    // A part that was not saved may have validated the step, too.
    if (*last && dist_rank() == 0 && trainer_validates(t)) {
        char records[PATH_MAX];
        path_join(records, o->out, RECORDS_NAME);
        records_shorten(records, t->state.step, 1);
    }
    t->log = runlog_open(o->quiet || !is_main_rank() ? NULL : t->run.text, is_main_rank() ? o->out : NULL,
                         t->state.step, t->state.schedule.steps);
    if (o->rollout)
        t->rollout_log =
            rollout_log_open(&t->rollout, o->out, o->keep_rollouts, o->show, t->state.step, t->state.step / o->updates);
    if (o->environment_command && t->has_folder)
        record_open(&t->rollout.agents, o->out, world_replica(t->run.settings.world), t->state.step / o->updates);
    if (t->has_folder && dist_rank() == 0) tokenizer_keep(&t->run, o->out, !*last);
    t->log.verbose = o->verbose, t->log.every = lines_every(&t->log, o->log_every);
    t->log.by_rewards = (OF_GROUPS & OF(o->objective)) != 0;
    t->log.shares = prefixes_from_options(o, t->run.settings.lora) != PREFIXES_NONE;
    runlog_options(&t->log, t->state.step, &t->run, &t->source);
    if (t->state.step < t->state.schedule.steps && !o->rollout) prefetch_start(&t->train_batches, t->state.next_batch);
    t->ending.chats = trainer_chats(t);
    t->ending.begin = seconds_now(), t->ending.seconds = t->state.seconds, t->ending.tokens = t->state.tokens;
}

static void trainer_end(Trainer *t) {
    const Options *o = t->run.options;
    if (!o->quiet && is_main_rank())
        ending_print(t->run.text, &t->ending, &t->run, &t->state, trainer_peak_bytes(t), t->asked);
    if (t->has_folder) checkpoint_close(&t->folder);
    if (o->rollout) {
        free((uint32_t *)t->rollout.settings.end_ids);
        rollout_log_close(&t->rollout_log);
        if (o->val_data.count) rollout_close(&t->rollout_validation);
        rollout_close(&t->rollout);
        prompt_free(&t->rollout_text);
    }
    prefetch_free(&t->train_batches);
    prefetch_free(&t->validation_batches);
    logprobs_close(&t->reference[0]);
    logprobs_close(&t->reference[1]);
    dataloader_close(&t->data);
    if (o->val_data.count) dataloader_close(&t->validation);
    if (o->sample_every) {
        sampler_free(&t->sampler);
        prompt_free(&t->prompt);
    }
    free(t->sampled);
    free(t->sampled_text);
    run_close(&t->run);
}

#endif
