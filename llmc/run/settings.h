/*
Turns options into the settings of a run: dtype, objective, world, what plan.h plans for, and how data is opened.
Decides all that follows from options and model alone; choose_plan.h chooses what is left open (auto).
*/
#ifndef LLMC_SETTINGS_H
#define LLMC_SETTINGS_H
#include "llmc/data/dataloader.h"
#include "llmc/data/teacher.h"
#include "llmc/plan/plan.h"
#include "llmc/ranks/dist.h"
#include "llmc/cli/options.h"

static DType dtype_or(int chosen, DType otherwise) { return chosen == DTYPE_AUTO ? otherwise : (DType)chosen; }

// Returns 1 for a training run or the plan of one.
static int options_train(const Options *o) {
    return o->verb == VERB_TRAIN || (o->verb == VERB_PLAN && o->plan_for == VERB_TRAIN);
}

// Returns 1 for the verb logprobs or its plan.
static int options_logprobs(const Options *o) {
    return o->verb == VERB_LOGPROBS || (o->verb == VERB_PLAN && o->plan_for == VERB_LOGPROBS);
}

static Objective objective_from_options(const Options *o) {
    Objective objective = {0};
    objective.kind = o->objective, objective.dpo_loss = o->dpo_loss, objective.normalisation = o->normalisation;
    objective.kto_loss = o->kto_loss;
    objective.desirable_weight = o->desirable_weight, objective.undesirable_weight = o->undesirable_weight;
    objective.beta = o->beta, objective.gamma = o->gamma, objective.label_smoothing = o->label_smoothing;
    objective.clip_low = o->clip_low, objective.clip_high = o->clip_high;
    objective.kl_correction = objective_is_of_policy(&objective) && o->kl_correction != KL_CORRECTION_OFF;
    objective.completion_tokens = (double)o->max_new_tokens * (double)(o->environment_command ? o->max_turns : 1);
    objective.distill_loss = o->distill_loss, objective.distill_share = o->distill_weight;
    objective.distill_temperature = o->temperature;
    const int by_token = objective_is_of_policy(&objective) || objective_is_reverse(&objective);
    objective.temperature.divisor = by_token || options_logprobs(o) ? o->temperature : 1;
    objective_resolve(&objective);
    return objective;
}

// Returns the documents of a sample: 2 for a pair, the completions for a group. --batch counts samples.
static size_t sample_documents(const Options *o) {
    const unsigned kind = OF(o->objective);
    return kind & OF_PREFERENCES ? 2 : kind & OF_GROUPS ? o->group_size : 1;
}

// Returns the machine whose rates an estimate or a profile uses; NULL: none.
static const Machine *machine_from_options(const Options *o) {
    const int named = option_given(o, "machine");
    static Machine machine;
    char wrong[128], names[128];
    if (!named && (o->verb != VERB_PLAN || o->ranks == 1)) return NULL;
    words_text(MACHINE_NAMES, names, sizeof(names));
    if (!machine_parse(&machine, o->machine, wrong, sizeof(wrong)))
        die_usage("--machine: %s; give %s, then host=, disk= or disk-rate=", wrong, names);
    return &machine;
}

// Returns the processes of this run. In a plan this process is the last rank, whose shares are the largest.
static World world_from_options(const Options *o) {
    World world;
    world.ranks = o->verb == VERB_PLAN ? o->ranks : dist_ranks();
    world.rank = o->verb == VERB_PLAN ? o->ranks - 1 : dist_rank();
    world.zero = o->zero, world.sp = max_size(o->sp, 1); // auto: the least values until levels.h has found what fits
    if (world.ranks % world.sp)
        die_usage("--sp %zu: does not divide the %zu rank%s of the run; %s", world.sp, world.ranks,
                  world.ranks == 1 ? "" : "s",
                  o->verb == VERB_PLAN ? "give --ranks P" : "ranks share sequences in groups of equal size");
    return world;
}

// Returns the reference that is evaluated during the pass. bp: the model itself; eval and new adapters: the base model.
// A run that trains a model, or continues adapters, computes the reference's log-probabilities before the first step
// (reference.h). Rollouts and mismatched completions do not exist before the run, so they keep a second set of weights.
static ReferenceModel computed_reference(const Options *o, const Objective *objective, const Lora *lora) {
    const int single = o->verb == VERB_BP || (o->verb == VERB_PLAN && o->plan_for == VERB_BP);
    if (!objective_needs_reference(objective) || o->reference_logprobs) return REFERENCE_NOT_COMPUTED;
    const int at_hand = o->rollout || (objective_needs_mismatched(objective) && options_train(o));
    if (at_hand && (o->adapter || !lora)) return REFERENCE_START;
    if (single) return o->adapter ? REFERENCE_MODEL : REFERENCE_BASE;
    return lora && !(o->adapter && options_train(o)) ? REFERENCE_BASE : REFERENCE_NOT_COMPUTED;
}

// Adds the optimizer: moments, and master weights if the model is in bf16.
static void settings_add_optimizer(RunSettings *settings, const Options *o) {
    settings->optimizer = 1, settings->defers = o->update == UPDATE_FORWARD;
    settings->master = settings->model->dtype == DTYPE_BF16 && o->master != MASTER_NONE;
}

// Refuses options that belong to another method. Refuses methods that cannot share a sequence or gather weights.
static void options_check_method(const Options *o, const Config *config, World world) {
    const char *name = option_chosen(o, "method");
    if (config->num_kv_shared_layers && method_is_chunk_major(o->method))
        die_usage(
            "--method %s: the last %zu layers of this model read keys of earlier layers, whose gradients it would "
            "not have in time; give --method stream",
            name, config->num_kv_shared_layers);
    if (o->method != METHOD_SPACO && option_given(o, "keep-chunks"))
        die_usage("--keep-chunks belongs to --method spaco; leave it out, or give --method spaco");
    if (o->method == METHOD_SPACO && !option_given(o, "keep-chunks"))
        die_usage("--method spaco needs --keep-chunks Q, the probability of a chunk's backward, such as 0.25");
    if (method_is_chunk_major(o->method) && o->inputs_every > 1)
        die_usage("--method %s keeps no layer inputs; leave --inputs-every out", name);
    const int more = o->keep.word == KEEP_PRODUCTS || o->keep.word == KEEP_ALL;
    const size_t layers = o->keep.layers ? o->keep.layers : config->num_hidden_layers;
    if (layers > config->num_hidden_layers || (o->keep.layers && o->keep.word == KEEP_NONE))
        die_usage(
            "--keep %s=%zu: a number belongs to attention, products or all, and is at most the %zu layers of this "
            "model",
            option_chosen(o, "keep"), o->keep.layers, config->num_hidden_layers);
    if (o->keep_on.layers && (o->keep_on.layers > layers || o->keep_on.word <= PLACE_DEVICE ||
                              o->keep.word == KEEP_NONE || o->keep.word == KEEP_AUTO))
        die_usage("--keep-on %s=%zu: a number belongs to host or disk, and is at most the layers of --keep; give "
                  "--keep products, or leave the number out",
                  option_chosen(o, "keep-on"), o->keep_on.layers);
    if (more && method_is_chunk_major(o->method))
        die_usage("--keep %s: --method %s keeps the activations of one chunk, and no others; leave --keep out",
                  option_chosen(o, "keep"), name);
    if (more && (world_sp(world) > 1 || o->method == METHOD_MST))
        die_usage("--keep %s: %s keeps attention's outputs at most; give --keep attention, or --keep none",
                  option_chosen(o, "keep"), world_sp(world) > 1 ? "a shared sequence (--sp)" : "--method mst");
    if (o->method < METHOD_MST || o->method > METHOD_SPACO) return;
    if (world_sp(world) > 1)
        die_usage("--sp %zu: --method %s cannot share a sequence; give --method stream", world_sp(world), name);
    if (method_is_chunk_major(o->method) && world.zero == ZERO_WEIGHTS && world_ranks(world) > 1)
        die_usage("--zero 3: with --method %s ranks would gather weights for each chunk, but have different numbers of "
                  "chunks; give --zero 2, or --method stream",
                  name);
}

// Refuses settings that --sp auto cannot deal.
static void options_check_deals(const Options *o, const RunSettings *settings) {
    if (o->sp) return;
    if (!options_train(o))
        die_usage("--sp auto deals the steps of training; give --sp S, the ranks that share a sequence");
    if (o->rollout) die_usage("--sp auto: with --rollout a rank trains on the completions that it wrote; give --sp S");
    if (settings->method == METHOD_MST || method_is_chunk_major(settings->method))
        die_usage("--sp auto: --method %s cannot share a sequence; give --method stream", option_chosen(o, "method"));
    if (objective_needs_mismatched(&settings->objective))
        die_usage("--sp auto: the KL term of kto pairs answers of a micro-batch, so it would depend on the ranks; "
                  "give --sp S");
    if (settings->router_bias_update > 0)
        die_usage(
            "--router-bias-update needs sequence groups of equal size, but --sp auto varies their size; give --sp S");
}

// Returns the option that excludes shared prefixes; NULL: none does. lora: may be NULL
static const char *prefixes_excluded(const Options *o, const Lora *lora) {
    if (o->sp != 1) return "--sp";
    // a file has a teacher's tokens for each text, not for rows that texts share
    if (o->objective == OBJECTIVE_DISTILL && o->distill_loss == DISTILL_FORWARD && !o->teacher)
        return "--objective distill without --teacher";
    if (method_is_chunk_major(o->method)) return o->method == METHOD_SECO ? "--method seco" : "--method spaco";
    return lora && lora->dropout > 0 ? "--lora-dropout" : NULL;
}

// Tells whether --share-prefixes auto shares something if no option excludes it: prompts of pairs, groups and rollouts,
// or --shared-tokens.
static int prefixes_auto(const Options *o) {
    return o->shared_tokens || o->rollout || (o->data.count && OF(o->objective) & (OF_PREFERENCES | OF_GROUPS));
}

// Returns which documents share prefixes in this run.
static Prefixes prefixes_from_options(const Options *o, const Lora *lora) {
    if (o->share_prefixes == SHARE_PREFIXES_OFF || prefixes_excluded(o, lora)) return PREFIXES_NONE;
    if (o->share_prefixes == SHARE_PREFIXES_ON) return PREFIXES_OF_ALL;
    return prefixes_auto(o) ? PREFIXES_OF_PROMPTS : PREFIXES_NONE;
}

// Returns how many tokens all random documents share, as rows that are computed once.
static size_t shared_tokens(const Options *o, const Lora *lora) {
    return prefixes_from_options(o, lora) ? o->shared_tokens : 0;
}

// Refuses --share-prefixes on with an option that excludes it. With auto says why nothing is shared.
static void options_check_prefixes(const Options *o, const Lora *lora) {
    const char *const why = prefixes_excluded(o, lora);
    if (!why || o->share_prefixes == SHARE_PREFIXES_OFF) return;
    if (o->share_prefixes == SHARE_PREFIXES_ON)
        die_usage("--share-prefixes on: not with %s; leave one of them out", why);
    if (prefixes_auto(o) && (o->sp == 1 || option_given(o, "sp")))
        note("--share-prefixes auto: with %s every document is computed alone", why);
}

// Notes options that have no effect.
static void settings_note(const Options *o, World world, const Lora *lora) {
    const int gathers = world.zero == ZERO_WEIGHTS && world_ranks(world) > 1;
    const int shares = prefixes_from_options(o, lora) != PREFIXES_NONE;
    if (o->share_prefixes == SHARE_PREFIXES_ON && !o->data.count && !o->shared_tokens)
        note("--share-prefixes on: random documents share no tokens; give --data, or --shared-tokens P");
    if (o->method == METHOD_AUTO && (world_sp(world) > 1 || gathers || shares))
        note("--method auto: with --%s only stream applies, not seco", gathers  ? "zero 3"
                                                                       : shares ? "share-prefixes"
                                                                                : "sp");
    if (!method_has_chunks(o->method) && (o->chunk || o->logits_chunk))
        note("--method %s works on the whole sequence at once: --chunk and --logits-chunk are ignored",
             option_chosen(o, "method"));
    if (!method_recomputes(o->method) && o->keep.word != KEEP_NONE && o->keep.word != KEEP_AUTO)
        note("--method %s keeps every activation%s: --keep %s is ignored", option_chosen(o, "method"),
             o->method == METHOD_FULL ? "" : " of a chunk", option_chosen(o, "keep"));
    if (world.zero && world_ranks(world) == 1)
        note("--zero %zu has no effect in a single process: start N with mpirun -n N, plan them with --ranks N",
             world.zero);
}

// Sets the choices that options name; the rest stays open for the planner (choose_plan.h).
static void settings_name_places(RunSettings *settings, const Options *o) {
    const Place inputs = o->context_memory ? o->context_on : o->inputs;
    const Place named[PLACED] = {inputs,         o->weights, o->gradients, o->optimizer, (Place)o->keep_on.word,
                                 o->reference_on};
    memcpy(settings->place, named, sizeof(named));
    settings->ring = o->kv == KEYS_RING;
    if (settings->ring && settings->model->config.kv_lora_rank)
        die_usage("--kv ring: %s has latents in place of keys and values, which ranks gather; give --kv gather",
                  settings->model->config.family->name);
    settings->latent_ranges = o->latents == LATENTS_RANGES;
    if (o->latents != LATENTS_AUTO && !settings->model->config.kv_lora_rank)
        die_usage("--latents: %s has keys and values, no latents; leave it out", settings->model->config.family->name);
    if (o->latents == LATENTS_LAYER && method_is_chunk_major(o->method))
        die_usage("--latents layer: --method %s has the latents of all layers at a time; give --latents ranges",
                  method_names[o->method]);
    const size_t L = settings->model->config.num_hidden_layers, layers = o->keep.layers < L ? o->keep.layers : 0;
    const size_t off = o->keep_on.layers < (layers ? layers : L) ? o->keep_on.layers : 0; // 0: all
    const Keeping nothing = {LEVEL_NONE, 0, 0}, keep = {(KeepLevel)o->keep.word, layers, off};
    settings->keep = o->keep.word == KEEP_AUTO || !method_recomputes(o->method) ? nothing : keep;
    settings->inputs_every = method_recomputes(o->method) ? o->inputs_every : 1;
    settings->defers = settings->optimizer && o->update == UPDATE_FORWARD;
}

// Sets the losses of routers. Refuses options that have no effect on this model.
static void settings_add_routers(RunSettings *settings, const Options *o) {
    const Config *c = &settings->model->config;
    const int experts = expert_layers_before(c, c->num_hidden_layers) > 0,
              softmax = c->family->router == ROUTER_SOFTMAX;
    if (!experts && (o->router_aux_loss > 0 || o->router_z_loss > 0 || o->router_bias_update > 0))
        die_usage("--router-%s: no layer of this model has experts; leave the option out",
                  o->router_aux_loss > 0 ? "aux-loss"
                  : o->router_z_loss > 0 ? "z-loss"
                                         : "bias-update");
    if (experts && !softmax && (o->router_aux_loss > 0 || o->router_z_loss > 0))
        die_usage("--router-%s: routers of %s have no distribution over the experts to balance; --router-bias-update "
                  "0.001 moves their biases",
                  o->router_aux_loss > 0 ? "aux-loss" : "z-loss", c->family->name);
    if (o->router_bias_update > 0 && softmax)
        die_usage("--router-bias-update: routers of %s have no bias; --router-aux-loss balances them", c->family->name);
    if (o->router_bias_update > 0 && settings->lora)
        die_usage("--router-bias-update: a folder of adapters has no place for biases; leave it out, or train without "
                  "--lora-rank");
    const int balances =
        experts && softmax && o->objective != OBJECTIVE_SIMPO && o->objective != OBJECTIVE_ORPO; // as TRL does
    settings->router_aux_loss = !isnan(o->router_aux_loss) ? o->router_aux_loss
                                : balances                 ? c->router_aux_loss_coef
                                                           : 0;
    settings->router_z_loss = o->router_z_loss, settings->router_bias_update = o->router_bias_update;
}

// Returns the settings of a text's long memory. Refuses models that cannot have it.
static ContextSettings context_from_options(const Options *o, const Config *c) {
    const size_t seen = c->max_position_embeddings, half = max_size(seen / 2, 2 * CONTEXT_BLOCK);
    const char *problem = context_problem(c);
    ContextSettings set = {0, CONTEXT_BLOCK, o->context_blocks};
    if (!o->context_memory) return set;
    if (problem) die_usage("--context-memory: a %s model cannot have it: %s; leave it out", c->family->name, problem);
    set.window = o->context_window ? o->context_window : min_size(CONTEXT_WINDOW, half);
    if (set.window > seen)
        die_usage("--context-window %zu is above the %zu positions that this model has seen; give a smaller window",
                  set.window, seen);
    const size_t room = (seen - set.window) / CONTEXT_BLOCK; // one block holds the first tokens
    if (!set.loaded) set.loaded = max_size(min_size(room, CONTEXT_LOADED + 1), 2) - 1;
    return set;
}

// Limits --slots auto. A step of decoding reads the weights once for all texts. Up to about 300 texts this read bounds
// a GPU's step (FLOP/s of an H100 in bf16 over its byte/s). On a CPU products bound the step from some 32 texts on;
// more slots only save steps of short texts.
#define SLOTS_MOST   ((size_t)256)
#define SLOTS_OF_CPU ((size_t)64)

// Returns --slots, at most the number of texts; auto: the most that SLOTS_MOST and SLOTS_OF_CPU allow.
static size_t slots_from_options(const Options *o, const RunSettings *settings, size_t texts) {
    const int gpu = settings->gpu || strcmp(ops_device->name, "cpu") != 0;
    const size_t of_cpu = max_size(SLOTS_OF_CPU, SLOTS_MOST * SLOTS_OF_CPU / o->max_new_tokens);
    return min_size(o->slots ? o->slots : min_size(SLOTS_MOST, gpu ? SLOTS_MOST : of_cpu), texts);
}

// Sets the likeliest tokens of a teacher: those that a student reads (distill), or those that logprobs finds.
static void settings_add_teacher(RunSettings *settings, const Options *o) {
    const size_t ids = settings->model->config.vocab_size;
    const int top = objective_needs_top(&settings->objective);
    if (o->teacher && !o->sp) die_usage("--teacher: not with --sp auto; give --sp S, or --teacher-logprobs FILE");
    if (top) settings->teacher_k = min_size(o->teacher_top_k, ids);
    if (top && o->teacher_logprobs) {
        LogprobFile file;
        teacher_open(&file, o->teacher_logprobs);
        settings->teacher_k = file.header.k;
        if (!settings->teacher_k)
            die_usage("--teacher-logprobs %s: has the targets' log-probabilities alone; write it with logprobs --top-k "
                      "K, or give --distill-loss reverse",
                      o->teacher_logprobs);
        if (file.header.vocabulary > ids)
            die_usage("--teacher-logprobs %s: is of %llu ids, the student has %zu; write it with logprobs "
                      "--vocabulary %zu",
                      o->teacher_logprobs, (unsigned long long)file.header.vocabulary, ids, ids);
        logprobs_close(&file);
    }
    if (!options_logprobs(o) || !(o->top_k || o->vocabulary)) return;
    settings->vocabulary = o->vocabulary ? min_size(o->vocabulary, ids) : ids, settings->top_k = o->top_k;
    if (o->top_k > settings->vocabulary)
        die_usage("--top-k %zu: above the %zu ids of the %s", o->top_k, settings->vocabulary,
                  o->vocabulary ? "--vocabulary" : "model");
}

// Returns the settings of a run. lora: may be NULL
static RunSettings settings_from_options(const Options *o, const Model *model, const Lora *lora) {
    const DType stored = model->dtype;
    const int trains = options_train(o), several = o->rollout ? o->batch > 1 : o->grad_accum > 1;
    // dealt: several passes a step.
    const int sums = several || o->samples > o->batch || (!o->sp && o->verb == VERB_TRAIN);
    RunSettings settings = {0};
    options_check_storage(o, stored);
    settings.model = model, settings.lora = lora;
    settings.world = world_from_options(o);
    settings.deals = !o->sp && world_ranks(settings.world) > 1 && trains && !o->rollout;
    settings.objective = objective_from_options(o);
    settings.reference = computed_reference(o, &settings.objective, lora);
    settings_add_teacher(&settings, o);
    options_check_method(o, &model->config, settings.world);
    settings_add_routers(&settings, o);
    settings.method = o->method == METHOD_AUTO ? METHOD_STREAM : o->method;
    settings.sparse.keep = o->keep_chunks, settings.sparse.seed = o->seed;
    settings.chunk = o->chunk, settings.logits_chunk = o->logits_chunk;
    settings.attention.any_order = o->deterministic == DETERMINISTIC_OFF;
    settings.gpu = o->verb == VERB_PLAN && option_given(o, "machine");
    settings.context = context_from_options(o, &model->config);
    settings_name_places(&settings, o);
    options_check_prefixes(o, lora);
    settings_note(o, settings.world, lora);
    options_check_deals(o, &settings);
    settings.backward = trains || o->verb == VERB_BP || (o->verb == VERB_PLAN && o->plan_for == VERB_BP);
    settings.accumulates = sums;
    settings.gradient_type = dtype_or(o->grad_dtype, sums ? dtype_of_sums(stored) : stored);
    static const DType moments[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_INT8}; // in the order of Moments
    settings.moment_type = moments[o->moments];
    if (trains) settings_add_optimizer(&settings, o);
    if (stored == DTYPE_FP64) settings.gradient_type = DTYPE_FP64;
    if (stored == DTYPE_FP64 && o->moments != MOMENTS_INT8) settings.moment_type = DTYPE_FP64;
    return settings;
}

// Returns how latents are expanded, as --latents takes it.
static const char *latents_text(const RunSettings *s) { return expands_ranges_of(s) ? "ranges" : "layer"; }

// Returns what a run keeps, as --keep takes it, and where, as --keep-on takes it.
static const char *keep_text(const RunSettings *s) {
    static const char *const words[] = {"none", "attention", "products", "all"};
    return layers_text(words[s->keep.level], s->keep.layers);
}

static const char *keep_on_text(const RunSettings *s) {
    const Place place = s->place[PLACED_KEPT] > PLACE_DEVICE ? s->place[PLACED_KEPT] : PLACE_DEVICE;
    return layers_text(place_names[place], place > PLACE_DEVICE ? s->keep.off : 0);
}

// Returns --shuffle for training; bp and eval read the files in order.
static Shuffle shuffle_from_options(const Options *o) { return options_train(o) ? o->shuffle : SHUFFLE_OFF; }

// Returns 1 if advantages are divided by the standard deviation of their group's rewards.
static int scales_rewards(const Options *o) {
    return o->scale_rewards == SCALE_AUTO ? o->normalisation != NORMALISE_DR_GRPO : o->scale_rewards == SCALE_GROUP;
}

// Returns the settings that open the data; the run adds log-probabilities and the tokenizer's path.
static DataSettings data_settings_from_options(const Options *o, const RunSettings *run, Shuffle shuffle) {
    DataSettings settings = {0};
    settings.step = o->samples, settings.deals = run->deals;
    settings.B = o->batch, settings.T = o->seq_len, settings.vocab_size = run->model->config.vocab_size;
    settings.shuffle = shuffle, settings.seed = o->seed;
    settings.use = o->verb == VERB_LOGPROBS ? DATA_READS : o->rollout ? DATA_PROMPTS : DATA_TRAINS;
    settings.objective = &run->objective;
    settings.scale_rewards = scales_rewards(o);
    settings.long_documents = o->long_documents, settings.prefixes = prefixes_from_options(o, run->lora);
    settings.any_template = o->any_tokenizer;
    return settings;
}

#endif
