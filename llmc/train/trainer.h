/*
A training run: what it is made of, and the settings that it must keep to go on as the same run (run_state.h). Its loop is
train_gpt.cu.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H
#include "checkpoint.h"
#include "log.h"
#include "llmc/data/prefetch.h"
#include "rollout.h"
#include "llmc/cli/device.h"
#include "llmc/cli/memory.h"

#define TRAINER_SETTINGS 40

typedef struct {
    Run run;
    DataLoader data, validation;
    Prefetch train_batches, validation_batches;
    RunState state; // where the run stands
    RunSetting settings[TRAINER_SETTINGS];
    char setting_text[TRAINER_SETTINGS][1024];
    int has_folder;
    CheckpointFolder folder;
    Rollout rollout; // with --rollout: where batches come from
    Prompt rollout_text;
    uint32_t *end_ids;
    LogprobFile reference[2]; // of --data and --val-data, where they are kept beside them
    uint64_t reference_key;   // of the model that is the reference; 0: there is none, or it is the base under adapters
    RunLog log;
    Sampler sampler;
    Prompt prompt;
    int32_t *sampled;                   // [max_new_tokens]
    char *sampled_text;                 // [prompt_token_bytes * max_new_tokens]
    double validation_loss, peak_flops; // NAN, 0: not known; of all ranks
    Traffic sent;                       // in the last step, by each rank
} Trainer;

// ---- settings -------------------------------------------------------------------------------------------------------
static void add_setting(Trainer *t, const char *name, int may_change, const char *format, ...) {
    size_t i = t->state.setting_count++;
    va_list args;
    if (i == TRAINER_SETTINGS) die("internal: more than %d settings of a run", TRAINER_SETTINGS);
    va_start(args, format);
    vsnprintf(t->setting_text[i], sizeof(t->setting_text[i]), format, args);
    va_end(args);
    t->settings[i].name = name, t->settings[i].value = t->setting_text[i];
    t->settings[i].may_change = may_change;
}

// What the objective and the adapters are.
static void trainer_objective_settings(Trainer *t) {
    const Objective *objective = &t->run.settings.objective;
    const Lora *lora = &t->run.lora;
    const Options *o = t->run.options;
    if (objective->kind != OBJECTIVE_SFT)
        add_setting(t, "--objective", 0,
                    "%s,dpo-loss=%s,normalisation=%s,beta=%.17g,gamma=%.17g,label-smoothing=%.17g,clip-low=%.17g,"
                    "clip-high=%.17g,temperature=%.17g,scale-rewards=%s",
                    objective_names[o->objective], dpo_loss_names[o->dpo_loss], normalisation_names[o->normalisation],
                    objective->beta, objective->gamma, objective->label_smoothing, objective->clip_low,
                    objective->clip_high, objective->temperature, option_chosen(o, "scale-rewards"));
    if (objective_is_of_policy(objective)) add_setting(t, "--max-new-tokens", 0, "%zu", o->max_new_tokens);
    if (o->rollout) {
        const RolloutSettings *rollout = &t->rollout.settings;
        add_setting(t, "--rollout", 0,
                    "group-size=%zu,top-k=%zu,top-p=%.17g,updates=%zu,ends=%016llx,reward-failure=%s", o->group_size,
                    o->top_k, o->top_p, o->updates,
                    (unsigned long long)checksum_piece(0, rollout->end_ids, rollout->end_count * sizeof(uint32_t)),
                    option_chosen(o, "reward-failure"));
    }
    if (t->reference_key) add_setting(t, "reference", 0, "%016llx", (unsigned long long)t->reference_key);
    if (o->old_logprobs)
        add_setting(t, "--old-logprobs", 0, "%016llx", (unsigned long long)t->run.old.header.model_key);
    if (lora->rank)
        add_setting(t, "LoRA", 0, "rank=%zu,alpha=%.17g,dropout=%.17g,rslora=%d,modules=%x,dtype=%s", lora->rank,
                    lora->alpha, lora->dropout, lora->rslora, lora->modules, dtype_name(lora->table.dtype));
}

// What has to be the same for a resumed run to give the same bits.
static void trainer_settings(Trainer *t) {
    const Options *o = t->run.options;
    char config[4096];
    t->state.settings = t->settings;
    config_to_text(&t->run.model.config, config, sizeof(config));
    add_setting(t, "model", 0, "%s", config);
    add_setting(t, "--seq-len", 0, "%zu", o->seq_len);
    add_setting(t, "--batch", 0, "%zu", o->batch);
    if (!t->data.regular || dataloader_shuffled(&t->data)) { // else what llm.c's shards say is the whole of it
        add_setting(t, "--shuffle", 0, "%s", dataloader_shuffled(&t->data) ? "on" : "off");
        add_setting(t, "--long", 0, "%s", option_chosen(o, "long"));
    }
    add_setting(t, "data", 0, "%016llx", (unsigned long long)dataloader_fingerprint(&t->data));
    trainer_objective_settings(t);
    add_setting(t, "--grad-accum", 0, "%zu", o->grad_accum);
    add_setting(t, "--seed", 0, "%zu", o->seed);
    add_setting(t, "AdamW", 0, "beta1=%.17g,beta2=%.17g,epsilon=%.17g,weight-decay=%.17g,grad-clip=%.17g", o->beta1,
                o->beta2, o->epsilon, o->weight_decay, o->grad_clip);
    add_setting(t, "--method", 1, "%s", option_chosen(o, "method"));
    add_setting(t, "--chunk", 1, "%zu", t->run.plan.chunk);
    add_setting(t, "--logits-chunk", 1, "%zu", t->run.plan.logits_chunk);
    add_setting(t, "--grad-dtype", 1, "%s", dtype_name(t->run.settings.gradient_type));
    if (o->rollout) add_setting(t, "--slots", 1, "%zu", t->rollout.settings.slots);
    if (o->rollout) add_setting(t, "--reward-command", 1, "%s", o->reward_command);
    add_setting(t, "threads", 1, "%d", cpu_threads());
    add_setting(t, "ranks", 1, "%zu", world_ranks(t->run.settings.world));
    add_setting(t, "--zero", 2, "%zu", t->run.settings.world.zero);
    add_setting(t, "--sp", 1, "%zu%s", world_sp(t->run.settings.world), t->run.settings.ring ? ", ring" : "");
}

static void trainer_schedule(Trainer *t) {
    const Options *o = t->run.options;
    Schedule *schedule = &t->state.schedule;
    schedule->kind = o->schedule;
    schedule->peak = o->lr;
    schedule->final_fraction = o->final_lr_fraction;
    schedule->decay_fraction = o->decay_fraction;
    schedule->warmup = o->warmup;
    schedule->steps = o->steps ? o->steps : dataloader_batches(&t->data) / o->grad_accum;
    if (o->rollout && !o->steps) schedule->steps = o->updates * (t->data.prompts / o->batch);
    if (!schedule->steps && o->rollout)
        die("the data has %zu prompts, a step takes --batch %zu; give --steps to go through them again",
            t->data.prompts, o->batch);
    if (!schedule->steps)
        die("one epoch has %zu micro-batches, a step takes --grad-accum %zu; give --steps to go through the data again",
            dataloader_batches(&t->data), o->grad_accum);
}

#endif
