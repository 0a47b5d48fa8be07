/*
Refuses well-formed options that need or exclude each other, by the tables of option_rows.h and the rules below. Refuses
outputs that would overwrite something. One line on stderr says what to type instead; exit 2.
*/
#ifndef LLMC_OPTIONS_CHECK_H
#define LLMC_OPTIONS_CHECK_H
#include "llmc/files/run_paths.h"
#include "options_out.h"

static char options_where[PATH_MAX + 24]; // "FILE:LINE: " while options are read from a file

// Prints one line that ends with where to read on. Exits with code 2.
__attribute__((noreturn, format(printf, 2, 3))) static void options_refuse(Verb verb, const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    die_usage("%s%s; see %s %s --help", options_where, message, program_called(), verb_rows[verb].name);
}

// ---- options that need or exclude each other -----------------------------------------------------------------------
// Returns 0 if a flag, text or number is off, or if a choice is its first word; else 1.
static int option_in_force(const Options *options, const char *name) {
    const OptionRow *row = &option_rows[option_find(name)];
    const void *field = (const char *)options + row->offset;
    if (row->kind == OPTION_TEXT) return *(const char *const *)field != NULL;
    return row->kind == OPTION_SIZE ? *(const size_t *)field != 0 : *(const int *)field != 0;
}

// Refuses options of another objective, and options that need one which is not given.
static void options_check_tables(const Options *o) {
    for (size_t i = 0; i < OF_OBJECTIVES; i++) {
        char names[64] = "";
        if (!option_given(o, of_objectives[i].option) || of_objectives[i].objectives & OF(o->objective)) continue;
        for (int k = 0; k < OBJECTIVES; k++)
            if (of_objectives[i].objectives & OF(k))
                snprintf(names + strlen(names), sizeof(names) - strlen(names), " %s", objective_names[k]);
        options_refuse(o->verb, "--%s has no meaning with --objective %s; it belongs to%s", of_objectives[i].option,
                       objective_names[o->objective], names);
    }
    for (size_t i = 0; i < OF_OPTIONS; i++)
        if (option_given(o, of_options[i].option) && !option_in_force(o, of_options[i].needs) &&
            option_accepted(&option_rows[option_find(of_options[i].needs)], o->verb))
            options_refuse(o->verb, "--%s has no meaning without --%s; give both or none", of_options[i].option,
                           of_options[i].needs);
}

typedef struct {
    int refused;
    const char *message;
} OptionRule;

// Refuses with the first rule that applies.
static void options_check_rules(const Options *o, const OptionRule *rules, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (rules[i].refused) options_refuse(o->verb, "%s", rules[i].message);
}

// Checks inputs and outputs: model, data, adapters, prompts, places.
static void options_check_files(const Options *o) {
    const Verb verb = o->verb;
    const int train = verb == VERB_TRAIN, sample = verb == VERB_SAMPLE;
    // 1: lists models that can be trained on the machine.
    const int models = verb == VERB_PLAN && option_given(o, "machine");
    const int one = (o->prompt != NULL) + (o->prompt_file != NULL) + (o->prompt_ids.count > 0);
    const int prompts = one + (o->prompts != NULL) + (o->serve != NULL);
    const int needs_data = train || verb == VERB_EVAL || verb == VERB_LOGPROBS;
    const int on_disk = o->inputs == PLACE_DISK || o->weights == PLACE_DISK || o->gradients == PLACE_DISK ||
                        o->optimizer == PLACE_DISK || o->teacher_on == PLACE_DISK || o->keep_on.word == PLACE_DISK ||
                        o->reference_on == PLACE_DISK || o->context_on == PLACE_DISK;
    const OptionRule rules[] = {
        {on_disk && !o->disk && verb != VERB_PLAN, "an option places tensors on disk: give --disk FOLDER"},
        {o->disk_limit && !o->disk && verb != VERB_PLAN,
         "--disk-limit has no meaning without --disk; give --disk FOLDER"},
        {o->model && o->init,
         "--model and --init exclude each other: give --model to read a model, or --init to make one"},
        {!o->model && !o->init && verb == VERB_PLAN && !models,
         "no model: give --model PATH or --init NAME; --machine CARD plans for that card, alone it lists what fits"},
        {!o->model && !o->init && !(o->resume && train) && verb != VERB_DOCTOR && verb != VERB_PLAN,
         "no model: give --model PATH or --init NAME"},
        {needs_data && !o->data.count && o->resume && o->out, "no data: --out holds no log.jsonl with the options of a "
                                                              "run; give the run's folder, or --data and all options"},
        {needs_data && !o->data.count && !o->resume, "no data: give --data with one or more token shards"},
        {verb == VERB_CONVERT && !o->out, "no output: give --out with the .bin or the folder to write"},
        {verb == VERB_LOGPROBS && !o->out, "no output: give --out with the file to write"},
        {o->shared_tokens && o->data.count,
         "--shared-tokens is of random documents; leave it out: documents of --data share what they have in common"},
        {o->seq_len && o->shared_tokens > o->seq_len,
         "--shared-tokens above --seq-len: documents have no more tokens than that; give fewer"},
        {o->resume && o->overwrite,
         "--resume and --overwrite exclude each other: continue the run, or begin a new one"},
        {o->kv != KEYS_AUTO && o->sp == 1, "--kv has no meaning without --sp above 1: no ranks share a sequence"},
        {o->context_memory && o->prompts,
         "--context-memory takes one text, and --prompts has many; give --prompt-file, or leave --context-memory out"},
        {o->context_memory && verb == VERB_PLAN && o->plan_for != VERB_SAMPLE,
         "--context-memory only writes text, no gradient passes through it; give --for sample"},
        {o->context_memory && o->serve,
         "--context-memory takes one text, and --serve answers many; leave one of the two out"},
        {o->serve && (o->chat || o->json || o->show_special || o->ignore_eos),
         "--serve answers chats as JSON until their end: leave --chat, --json, --show-special and --ignore-eos out"},
        {prompts > 1, "--prompt, --prompt-file, --prompt-ids, --prompts and --serve exclude each other: give one "
                      "prompt or a file of them"},
        {sample && option_given(o, "slots") && !o->prompts && !o->serve,
         "--slots has no meaning without --prompts or --serve: one text has one slot"},
        {option_given(o, "thinking") && !o->chat && !o->prompts && !o->serve,
         "--thinking has no meaning without --chat; give both or none"},
        {sample && !prompts && !o->chat && !o->system,
         "no prompt: give --prompt TEXT, --prompt-file FILE, --prompt-ids ID,ID,... or --prompts FILE, --chat to type, "
         "or --serve PORT"},
        {sample && !prompts && o->json,
         "--json prints one answer, so --chat with --json needs a prompt: give --prompt"},
        {sample && !prompts && option_given(o, "stop-ids"),
         "--stop-ids: a chat's turns end where the tokenizer says; leave it out, or give a prompt"},
        {(o->chat || o->system) && o->prompt_ids.count,
         "--chat and --prompt-ids exclude each other: ids are used unchanged; give --prompt"},
        {o->adapter && verb == VERB_CONVERT && !o->merge && !o->adapter_only,
         "--adapter: give --merge to have the adapters added to the weights, or --adapter-only to write them alone"},
        {(o->merge || o->adapter_only) && !o->adapter,
         "--merge and --adapter-only: give --adapter with the adapters, or their run with --model"},
        {o->adapter_only && (o->merge || o->like || o->to || option_given(o, "dtype")),
         "--adapter-only writes adapters unchanged: leave --merge, --like, --to and --dtype out"},
        {o->adapter_layout == ADAPTER_PER_EXPERT && !o->adapter_only,
         "--adapter-layout has no meaning without --adapter-only: merged weights hold no adapters"},
        {o->adapter_layout == ADAPTER_PER_EXPERT && !o->model,
         "--adapter-layout per-expert: give --model with the base, whose shapes it needs"},
        {o->quantise_head && (o->base < BASE_NF4 || o->base == BASE_MXFP4) &&
             (o->to < CONVERT_NF4 || o->to == CONVERT_MXFP4),
         "--quantise-head has no meaning without --base (or convert's --to) nf4, fp4 or fp8: the head is not "
         "quantised then"},
        {o->lora_rank && o->adapter,
         "--lora-rank and --adapter exclude each other: give --lora-rank to make adapters, or --adapter to read them"},
    };
    options_check_rules(o, rules, sizeof(rules) / sizeof(rules[0]));
}

// Checks a run's steps: what they count, save and validate, and the completions that they write.
static void options_check_steps(const Options *o) {
    const Verb verb = o->verb;
    const int train = verb == VERB_TRAIN, rollout = o->rollout, distill = o->objective == OBJECTIVE_DISTILL;
    const int folder = o->out && strcmp(o->out, "none") != 0;
    const OptionRule rules[] = {
        {train && !folder && o->resume, "--resume needs --out, the folder to continue in"},
        {train && !folder && option_given(o, "save-every"), "--save-every needs --out, the folder to save in"},
        {train && !folder && o->keep_best, "--keep-best needs --out, the folder to save in"},
        {o->keep_best && !o->val_every, "--keep-best needs --val-every, the steps between validations"},
        {train && o->steps && option_given(o, "epochs"), "--steps and --epochs exclude each other: give one of them"},
        {train && option_given(o, "warmup") && option_given(o, "warmup-ratio"),
         "--warmup and --warmup-ratio exclude each other: give one of them"},
        {train && o->lr > 1 && !o->any_lr,
         "--lr above 1: AdamW would move each weight by more than 1 in a step; give a smaller --lr, or --any-lr"},
        {train && o->val_every && !o->val_data.count, "--val-every needs --val-data, the shards to validate on"},
        {rollout && train && !distill && !o->reward_command.count && !o->environment_command,
         "--rollout needs --reward-command, which says what a completion is worth, or --environment-command"},
        {rollout && distill && o->reward_command.count,
         "--objective distill with --rollout: the teacher judges each token; leave --reward-command out"},
        {rollout && distill && o->teacher_logprobs,
         "--teacher-logprobs is of the texts in the data; --rollout writes its own, so give --teacher PATH"},
        {rollout && distill && (o->updates > 1 || o->overlap),
         "--objective distill learns from texts of the current student; leave --updates and --overlap out"},
        {rollout && distill && o->val_data.count,
         "--val-data: not with --rollout and --objective distill; eval --objective distill --teacher measures "
         "checkpoints on answers"},
        {!distill && o->group_size < 2,
         "--group-size 1: an advantage compares completions of one prompt; give 2 or more"},
        {o->environment_command && o->reward_command.count,
         "--environment-command gives the rewards; leave --reward-command out"},
        {o->environment_command && !option_given(o, "seq-len"),
         "--environment-command needs --seq-len, the most tokens of a trajectory in all"},
        {o->environment_command && o->overlap,
         "--environment-command: not with --overlap, as rewards come while texts are written; leave --overlap out"},
        {o->environment_command && o->sp != 1,
         "--environment-command: not with --sp, whose ranks share sequences but not trajectories; leave --sp out"},
        {rollout && verb == VERB_PLAN && !o->data.count,
         "a plan with --rollout needs --data, whose prompts have a length"},
        {rollout && o->grad_accum > 1,
         "--grad-accum has no meaning with --rollout: a step is --batch prompts, in as many sequences as they need"},
        {o->samples && option_given(o, "grad-accum"),
         "--samples and --grad-accum exclude each other: a step counts samples or micro-batches"},
        {o->samples && rollout, "--samples has no meaning with --rollout: a step is --batch prompts"},
        {o->samples && verb == VERB_BP && !o->data.count,
         "--samples needs --data, whose documents it counts; --batch documents of random tokens are a micro-batch"},
        {rollout && (o->old_logprobs || o->reference_logprobs),
         "--old-logprobs and --reference-logprobs are for completions in the data; --rollout writes its own"},
        {rollout && o->updates > 1 && o->lora_dropout > 0, "--lora-dropout with --updates above 1: the old policy has "
                                                           "no dropout, so the ratio to it would not begin at 1; "
                                                           "leave one of them out"},
        {rollout && o->overlap && o->lora_dropout > 0,
         "--lora-dropout with --overlap: the old policy has no dropout, so the ratio to it would not begin at 1; leave "
         "one of them out"},
        {rollout && train && (o->save_every.steps % o->updates || o->steps % o->updates),
         "--save-every and --steps must be multiples of --updates: a rollout that is half used cannot be written "
         "again"},
        {option_given(o, "group-size") && o->data.count && !rollout,
         "--group-size has no meaning here: groups are as large as they are in --data"},
    };
    options_check_rules(o, rules, sizeof(rules) / sizeof(rules[0]));
}

// Checks the options that belong to objectives.
static void options_check_objective(const Options *o) {
    const unsigned kind = OF(o->objective);
    const OptionRule rules[] = {
        {o->any_reference && !o->reference_logprobs && !o->old_logprobs,
         "--any-reference has no meaning without --reference-logprobs or --old-logprobs"},
        {o->any_reference && o->reference_logprobs && o->val_data.count,
         "--any-reference: the reference of --val-data is another model, which is not loaded; eval the checkpoints on "
         "--val-data instead"},
        {o->label_smoothing > 0 && o->dpo_loss != DPO_SIGMOID && o->dpo_loss != DPO_ROBUST,
         "--label-smoothing has no meaning without --dpo-loss sigmoid or robust"},
        {o->objective == OBJECTIVE_KTO && o->kto_loss == KTO_KTO && o->reference_logprobs,
         "--reference-logprobs lacks the mismatched completions from which kto estimates its KL divergence; leave it "
         "out, or give --kto-loss apo_zero"},
        {o->objective == OBJECTIVE_KTO && o->desirable_weight == 0 && o->undesirable_weight == 0,
         "--desirable-weight and --undesirable-weight 0 leave nothing of the objective; give one above 0"},
        {o->beta == 0 && kind & (OF_PREFERENCES | OF(OBJECTIVE_KTO)),
         "--beta 0 leaves nothing of the objective; give a number above 0"},
        {option_given(o, "distill-weight") && o->distill_loss == DISTILL_REVERSE,
         "--distill-weight has no meaning with --distill-loss reverse: it has no cross-entropy"},
        {o->teacher && o->teacher_logprobs,
         "--teacher and --teacher-logprobs exclude each other: a teacher runs with the student, or has written a file"},
        {option_given(o, "teacher-top-k") && o->teacher_logprobs,
         "--teacher-top-k has no meaning with --teacher-logprobs, whose file has a number of tokens; leave it out"},
        {o->temperature == 0 && kind & (OF_POLICY | OF(OBJECTIVE_DISTILL)),
         "--temperature 0 has no gradient; give a number above 0"},
        {option_given(o, "epsilon") && o->epsilon > 1e-3 && kind & OF_POLICY,
         "--epsilon is AdamW's; the objective's clipping is --clip-low and --clip-high"},
        {o->temperature == 0 && o->verb == VERB_LOGPROBS,
         "--temperature 0 leaves only the likeliest token; give a number above 0"},
    };
    options_check_rules(o, rules, sizeof(rules) / sizeof(rules[0]));
}

// ---- outputs and types ---------------------------------------------------------------------------------------------
// Refuses an output that exists, unless --overwrite is given, or that another option names as an input.
static void options_check_output(const Options *o) {
    const int only_begins = o->verb == VERB_PLAN || (o->verb == VERB_TRAIN && !o->overwrite); // 1: replaces nothing
    const char *out = o->verb == VERB_BP ? o->grads_out : only_begins ? NULL : o->out;
    if (o->verb == VERB_TRAIN && !o->out)
        options_refuse(o->verb, "no output: give --out with the folder of this run, or --out none to keep nothing");
    for (size_t i = 0; out && i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)o + row->offset;
        const char *text = row->kind == OPTION_TEXT ? *(const char *const *)field : NULL;
        const PathList *list = (const PathList *)field;
        char hub[PATH_MAX], name[32];
        if (text && text == o->disk) continue; // a --disk folder is not read
        snprintf(name, sizeof(name), "--%s", row->name);
        if (text && (!strcmp(row->name, "model") || !strcmp(row->value, "DIR")))
            text = hub_path_find(name, text, hub, 1);
        if (text && text != out) output_refuse_input(out, row->name, text);
        if (row->kind != OPTION_PATHS || !list->count || !path_exists(out)) continue;
        ShardPaths found = shard_paths_find(list->path, list->count);
        for (size_t k = 0; k < found.count; k++) output_refuse_input(out, row->name, found.at[k].path);
        shard_paths_free(&found);
    }
    if (out && !o->overwrite && path_exists(out) && !path_is_directory(out)) // folder_open decides on folders
        die("%s: exists already; choose another name, or give --overwrite", out);
}

// Refuses values without effect for a model of this dtype (table without_meaning).
static void options_check_storage(const Options *o, DType dtype) {
    for (size_t i = 0; i < WITHOUT_MEANING; i++) {
        const OptionRow *row = &option_rows[option_find(without_meaning[i].option)];
        if (without_meaning[i].dtype != dtype || without_meaning[i].value != option_value(row, o)) continue;
        if (!option_given(o, row->name) || !option_accepted(row, o->verb)) continue;
        options_refuse(o->verb, "--%s %s has no meaning for a model in %s; leave it out", row->name,
                       option_chosen(o, row->name), dtype_name(dtype));
    }
}

#endif
