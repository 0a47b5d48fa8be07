/*
The command line: what is generated from the table of option_rows.h.

    train [VERB] --name value --name=value --flag ...      VERB is train where argv[1] names none

options_parse reads and checks it; options_out.h explains it and writes it back. A malformed command line ends with one
line on stderr that says what is wrong and what is allowed, and with exit 2.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H
#include "llmc/files/checkpoint_folder.h"
#include "options_file.h"
#include "options_run.h"

#ifndef STREAMBP_VERSION
#define STREAMBP_VERSION "0.1"
#endif

// The nearest option, first among those of the verb; NULL: none is near.
static const char *option_nearest(const char *typed, Verb verb) {
    const char *nearest = NULL;
    size_t best = SIZE_MAX;
    for (int pass = 0; pass < 2 && !nearest; pass++) {
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            if (!option_rows[i].verbs || (pass == 0 && !option_of(&option_rows[i], verb))) continue;
            spelling_compare(typed, option_rows[i].name, &nearest, &best);
        }
    }
    for (size_t i = 0; i < OPTION_ALIASES && !nearest; i++)
        spelling_compare(typed, option_aliases[i].typed, &nearest, &best);
    return nearest;
}

// ---- refusals ------------------------------------------------------------------------------------------------------
static char options_where[PATH_MAX + 24]; // "FILE:LINE: " of options that are read from a file

// One line, ending with where to read on; exit 2.
__attribute__((noreturn, format(printf, 2, 3))) static void options_refuse(Verb verb, const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    die_usage("%s%s; see %s %s --help", options_where, message, program_called(), verb_rows[verb].name);
}

// "a, b or c" of "a|b|c"
static void words_text(const char *choices, char *text, size_t size) {
    size_t used = 0;
    *text = 0;
    while (*choices) {
        size_t length = strcspn(choices, "|");
        const char *rest = choices[length] ? choices + length + 1 : choices + length;
        const char *glue = !used ? "" : *rest ? ", " : " or ";
        used += (size_t)snprintf(text + used, size - used, "%s%.*s", glue, (int)length, choices);
        choices = rest;
    }
}

// An option of bytes that also takes a card's name, for what that card leaves to a plan.
static int option_takes_card(const OptionRow *row) { return !strcmp(row->value, "BYTES|CARD"); }

// Describes the values that an option accepts.
static const char *option_allowed(const OptionRow *row, char *text, size_t size) {
    const char *kind = row->kind == OPTION_REAL ? "a number" : "a whole number", *word = option_word(row);
    switch (row->kind) {
    case OPTION_SIZE:
    case OPTION_REAL:
        if (row->most >= OPTION_UNBOUNDED)
            snprintf(text, size, "%s of at least %.10g", kind, row->least);
        else
            snprintf(text, size, "%s from %.10g to %.10g", kind, row->least, row->most);
        break;
    case OPTION_BYTES:
        snprintf(text, size,
                 option_takes_card(row) ? "bytes such as 80GiB, or a card's: "
                                        : "bytes with a unit, such as 80GiB or 900MB");
        if (option_takes_card(row)) words_text(MACHINE_NAMES, text + strlen(text), size - strlen(text));
        break;
    case OPTION_CHOICE: words_text(row->value, text, size); break;
    case OPTION_IDS: snprintf(text, size, "token ids separated by commas, such as 1,2,3"); break;
    case OPTION_INTERVAL: snprintf(text, size, "a number of steps, a time such as 90s, 30min or 2h, or off"); break;
    default: snprintf(text, size, "%s", row->value); break;
    }
    if (word) snprintf(text + strlen(text), size - strlen(text), ", or %s", word);
    return text;
}

// ---- values --------------------------------------------------------------------------------------------------------
// The enum value of one of the row's words; its words are in the order of the enum.
static int choice_parse(const OptionRow *row, const char *text, void *field) {
    for (size_t i = 0; i < WORD_ALIASES; i++)
        if (!strcmp(word_aliases[i].option, row->name) && !strcmp(word_aliases[i].typed, text))
            text = word_aliases[i].word;
    const int value = (int)row->least + word_index(row->value, text);
    if (value < (int)row->least) return 0;
    memcpy(field, &value, sizeof(value));
    return 1;
}

static int bytes_parse(const OptionRow *row, const char *text, size_t *bytes) {
    const int card = option_takes_card(row) ? word_index(MACHINE_NAMES, text) : -1;
    if (card >= 0) *bytes = machine_usable_bytes(&machines[card]);
    return card >= 0 || parse_bytes(text, bytes);
}

static int ids_parse(const OptionRow *row, const char *text, IdList *list) {
    size_t most = 1, value;
    char number[24];
    for (size_t i = 0; text[i]; i++) most += text[i] == ',';
    list->id = (int32_t *)checked_calloc(most, sizeof(int32_t), "the ids of a prompt");
    list->count = 0;
    for (;;) {
        size_t length = strcspn(text, ",");
        if (length >= sizeof(number)) return 0;
        memcpy(number, text, length);
        number[length] = 0;
        if (!parse_size(number, &value) || (double)value > row->most) return 0;
        list->id[list->count++] = (int32_t)value;
        if (!text[length]) return 1;
        text += length + 1;
    }
}

// A bare number below 1 MiB: meant are rather GiB.
static int bytes_lack_unit(const char *text, size_t bytes) {
    return bytes < (size_t)1 << 20 && !text[strspn(text, "0123456789.")];
}

// Steps (100, 1k), time (90s, 30min), or off.
static int interval_parse(const char *text, Interval *interval) {
    memset(interval, 0, sizeof(*interval));
    if (!strcmp(text, "off") || (parse_seconds(text, &interval->seconds) && interval->seconds > 0)) return 1;
    return parse_count(text, 1000, &interval->steps) && (double)interval->steps <= OPTION_UNBOUNDED;
}

// Stores the value of one row; returns 0 where the text is not one.
static int option_set(const OptionRow *row, Options *options, const char *text) {
    void *field = (char *)options + row->offset;
    const char *word = option_word(row);
    int zero = word && !strcmp(word, text);
    switch (row->kind) {
    case OPTION_FLAG: *(int *)field = 1; return 1;
    case OPTION_TEXT: *(const char **)field = text; return *text != 0;
    case OPTION_CHOICE: return choice_parse(row, text, field);
    case OPTION_IDS: return ids_parse(row, text, (IdList *)field);
    case OPTION_INTERVAL: return interval_parse(text, (Interval *)field);
    case OPTION_REAL: {
        double value = 0;
        if (!zero && (!parse_double(text, &value) || value < row->least || value > row->most)) return 0;
        *(double *)field = zero ? NAN : value;
        return 1;
    }
    default: {
        size_t value = 0;
        int parsed = row->kind == OPTION_BYTES ? bytes_parse(row, text, &value) && !bytes_lack_unit(text, value)
                                               : parse_count(text, row->most == MOST_TOKENS ? 1024 : 1000, &value);
        if (!zero && (!parsed || (double)value < row->least || (double)value > row->most)) return 0;
        *(size_t *)field = value;
        return 1;
    }
    }
}

static void options_set_defaults(Options *options) {
    memset(options, 0, sizeof(*options));
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (row->fallback && !option_set(row, options, row->fallback))
            die("internal: the default of --%s, '%s', is not allowed", row->name, row->fallback);
    }
}

// ---- parsing -------------------------------------------------------------------------------------------------------
// The verb, and in *first the index of the first option.
static Verb options_verb(int argc, char **argv, int *first) {
    char all[128] = "", text[128];
    const char *nearest = NULL;
    size_t best = SIZE_MAX;
    *first = 1;
    if (argc < 2 || argv[1][0] == '-') return VERB_TRAIN;
    *first = 2;
    for (int verb = 0; verb < VERBS; verb++) {
        if (!strcmp(argv[1], verb_rows[verb].name)) return (Verb)verb;
        spelling_compare(argv[1], verb_rows[verb].name, &nearest, &best);
    }
    for (int verb = 0; verb < VERBS; verb++)
        snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%s", verb ? "|" : "", verb_rows[verb].name);
    words_text(all, text, sizeof(text));
    die_usage("'%.64s' is not a verb, it must be %s%s; see %s --help", argv[1], text, did_you_mean("", nearest),
              program_called());
}

// The row of an argument "--name" or "--name=value" (then *value is set). *alias: of option_aliases, or OPTION_ALIASES
static int options_row_of(const char *argument, Verb verb, const char **value, size_t *alias) {
    char typed[64], name[64], verbs[96];
    if (!looks_like_option(argument))
        options_refuse(verb, "'%.64s' does not belong here: options begin with two dashes%s", argument,
                       *argument == '-' ? "" : ", values follow an option");
    size_t length = strcspn(argument + 2, "=");
    *value = argument[2 + length] ? argument + 2 + length + 1 : NULL;
    snprintf(typed, sizeof(typed), "%.*s", (int)min_size(length, 63), argument + 2);
    option_name(typed, name);
    for (size_t i = 0; i < OPTIONS_OF_OTHERS; i++)
        if (!strcmp(options_of_others[i].option, name))
            options_refuse(verb, "--%s: %s", name, options_of_others[i].reason);
    for (*alias = 0; *alias < OPTION_ALIASES && strcmp(option_aliases[*alias].typed, name) != 0;) ++*alias;
    int index = option_find(*alias < OPTION_ALIASES ? option_aliases[*alias].option : name);
    if (index < 0) {
        const char *nearest = option_nearest(name, verb);
        options_refuse(verb, "unknown option --%.64s%s", name, did_you_mean("--", nearest));
    }
    if (!option_accepted(&option_rows[index], verb) && !*options_where)
        options_refuse(verb, "--%s is not an option of %s but of %s", option_rows[index].name, verb_rows[verb].name,
                       option_verbs_text(&option_rows[index], verbs, sizeof(verbs)));
    return index;
}

static void options_refuse_value(const OptionRow *row, Verb verb, const char *value) {
    char allowed[256];
    option_allowed(row, allowed, sizeof(allowed));
    for (size_t i = 0; i < NOT_IN_THIS_VERSION; i++)
        if (!strcmp(not_in_this_version[i].option, row->name) && !strcmp(not_in_this_version[i].word, value))
            options_refuse(verb, "--%s %s is not in this version, it must be %s", row->name, value, allowed);
    size_t bytes;
    if (row->kind == OPTION_BYTES && parse_bytes(value, &bytes) && bytes_lack_unit(value, bytes))
        options_refuse(verb, "--%s %s would be %zu bytes; write --%s %sGiB", row->name, value, bytes, row->name, value);
    if (!*value) options_refuse(verb, "--%s is empty, it must be %s", row->name, allowed);
    options_refuse(verb, "--%s is '%.64s', it must be %s", row->name, value, allowed);
}

// argv[i], whatever it looks like, and all arguments up to the next option, in place.
static int options_take_paths(int argc, char **argv, int i, PathList *list, const OptionRow *row, Verb verb) {
    list->path = (const char *const *)(argv + i);
    list->count = 0;
    do {
        if (!*argv[i]) options_refuse_value(row, verb, argv[i]);
        i++, list->count++;
    } while (i < argc && !looks_like_option(argv[i]));
    return i;
}

// Joins further names behind *value, which is in argv[i], by commas; returns the index of the last.
static int options_take_names(int argc, char **argv, int i, const char **value) {
    static char joined[2][1024]; // of the command line, and of --config
    char *names = joined[*options_where != 0];
    if (i + 1 >= argc || looks_like_option(argv[i + 1]) || !**value) return i;
    snprintf(names, sizeof(joined[0]), "%s", *value);
    for (*value = names; i + 1 < argc && !looks_like_option(argv[i + 1]); i++)
        snprintf(names + strlen(names), sizeof(joined[0]) - strlen(names), ",%s", argv[i + 1]);
    return i;
}

#define FLAG_WORDS     "true|false" // HF's programs give flags a value
#define GIVEN_AS_ALIAS 2            // in Options.given, and from there on: by that alias
static_assert(OPTION_ALIASES < 256 - GIVEN_AS_ALIAS, "Options.given says which alias was typed");

// Reads the option at argv[i]; returns the index of the next.
static int options_parse_one(Options *options, int argc, char **argv, int i) {
    Verb verb = options->verb;
    const char *value = NULL;
    size_t alias;
    int index = options_row_of(argv[i], verb, &value, &alias), joined = value != NULL;
    const OptionRow *row = &option_rows[index];
    if (options->given[index]) options_refuse(verb, "--%s is given twice", row->name);
    options->given[index] = alias < OPTION_ALIASES ? (unsigned char)(GIVEN_AS_ALIAS + alias) : 1;
    if (row->kind == OPTION_FLAG) {
        if (!joined && i + 1 < argc && word_index(FLAG_WORDS, argv[i + 1]) >= 0) value = argv[++i];
        const int word = value ? word_index(FLAG_WORDS, value) : 0;
        if (word < 0) options_refuse(verb, "--%s takes no value, '%.64s' was given", row->name, value);
        if (word == 0) option_set(row, options, "");
        options->given[index] = word == 0;
        return i + 1;
    }
    if (!joined) {
        const int bare = i + 1 >= argc || looks_like_option(argv[i + 1]);
        if (bare && option_bare(row)) {
            option_set(row, options, option_bare(row));
            return i + 1;
        }
        if (bare) options_refuse(verb, "--%s has no value; write --%s %s", row->name, row->name, row->value);
        value = argv[++i];
    }
    if (row->kind == OPTION_PATHS) {
        argv[i] += value - argv[i]; // of "--data=a.bin" what follows the sign
        return options_take_paths(argc, argv, i, (PathList *)(void *)((char *)options + row->offset), row, verb);
    }
    if (row->kind == OPTION_TEXT && text_ends_with(row->value, "NAME,..."))
        i = options_take_names(argc, argv, i, &value);
    if (!option_set(row, options, value)) options_refuse_value(row, verb, value);
    return i + 1;
}

// ---- options that need or exclude each other -----------------------------------------------------------------------
// A flag, a text, a choice or a number that can be off: neither off nor the first word.
static int option_in_force(const Options *options, const char *name) {
    const OptionRow *row = &option_rows[option_find(name)];
    const void *field = (const char *)options + row->offset;
    if (row->kind == OPTION_TEXT) return *(const char *const *)field != NULL;
    return row->kind == OPTION_SIZE ? *(const size_t *)field != 0 : *(const int *)field != 0;
}

// Refuses options of another objective, and those that another option would give a meaning.
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
        if (option_given(o, of_options[i].option) && !option_in_force(o, of_options[i].needs))
            options_refuse(o->verb, "--%s has no meaning without --%s; give both or none", of_options[i].option,
                           of_options[i].needs);
}

// Refuses what no table of option_rows.h says: the first of these conditions that holds.
static void options_check(const Options *o) {
    const Verb verb = o->verb;
    const int train = verb == VERB_TRAIN, sample = verb == VERB_SAMPLE, rollout = o->rollout;
    const int folder = o->out && strcmp(o->out, "none") != 0;
    const int models = verb == VERB_PLAN && option_given(o, "machine"); // those that can be trained there
    const int prompts = (o->prompt != NULL) + (o->prompt_file != NULL) + (o->prompt_ids.count > 0);
    const int needs_data = train || verb == VERB_EVAL || verb == VERB_LOGPROBS;
    const unsigned kind = OF(o->objective);
    const int on_disk = o->inputs == PLACE_DISK || o->weights == PLACE_DISK || o->gradients == PLACE_DISK ||
                        o->optimizer == PLACE_DISK || o->keep_on == PLACE_DISK || o->reference_on == PLACE_DISK;
    const struct {
        int refused;
        const char *message;
    } rules[] = {
        {on_disk && !o->disk && verb != VERB_PLAN, "a place is disk: give --disk with a folder on it"},
        {o->disk_limit && !o->disk && verb != VERB_PLAN, "--disk-limit has no meaning without --disk, a folder on it"},
        {o->model && o->init, "--model and --init exclude each other: one model is read or made"},
        {!o->model && !o->init && !(o->resume && train) && verb != VERB_DOCTOR && !models,
         "no model: give --model PATH or --init NAME"},
        {needs_data && !o->data.count, "no data: give --data with one or more token shards"},
        {verb == VERB_CONVERT && !o->out, "no output: give --out with the .bin or the folder to write"},
        {verb == VERB_LOGPROBS && !o->out, "no output: give --out with the file to write"},
        {train && !folder && o->resume, "--resume needs --out, the folder to continue in"},
        {train && !folder && option_given(o, "save-every"), "--save-every needs --out, the folder to save in"},
        {train && !folder && o->keep_best, "--keep-best needs --out, the folder to save in"},
        {o->resume && o->overwrite, "--resume and --overwrite exclude each other: go on, or begin anew"},
        {o->keep_best && !o->val_every, "--keep-best needs --val-every, the steps from validation to validation"},
        {train && o->steps && option_given(o, "epochs"), "--steps and --epochs exclude each other: give one of them"},
        {train && o->lr > 1 && !o->any_lr,
         "--lr above 1: AdamW would move each weight by more than 1 in a step; give a smaller one, or --any-lr"},
        {train && o->val_every && !o->val_data.count, "--val-every needs --val-data, the shards to validate on"},
        {o->kv != KEYS_AUTO && o->sp == 1, "--kv has no meaning without --sp above 1: no ranks share a sequence"},
        {prompts > 1, "--prompt, --prompt-file and --prompt-ids exclude each other"},
        {sample && !prompts && !o->chat && !o->system,
         "no prompt: give --prompt TEXT, --prompt-file FILE or --prompt-ids ID,ID,..."},
        {sample && !prompts && o->json, "--json gives one answer, so --chat needs a prompt with it"},
        {(o->chat || o->system) && o->prompt_ids.count,
         "--chat and --prompt-ids exclude each other: ids are given as they are"},
        {o->adapter && verb == VERB_CONVERT && !o->merge && !o->adapter_only,
         "--adapter: give --merge to have the adapters added to the weights, or --adapter-only to write them alone"},
        {(o->merge || o->adapter_only) && !o->adapter,
         "--merge and --adapter-only: give --adapter with the adapters, or their run with --model"},
        {o->adapter_only && (o->merge || o->like || o->to || option_given(o, "dtype")),
         "--adapter-only writes adapters as they are: leave --merge, --like, --to and --dtype out"},
        {rollout && train && !o->reward_command.count,
         "--rollout needs --reward-command, which says what a completion is worth"},
        {rollout && verb == VERB_PLAN && !o->data.count,
         "a plan with --rollout needs --data, whose prompts have a length"},
        {rollout && o->grad_accum > 1,
         "--grad-accum has no meaning with --rollout: a step is --batch prompts, in as many sequences as they take"},
        {o->samples && option_given(o, "grad-accum"),
         "--samples and --grad-accum exclude each other: a step is so many samples, or so many micro-batches"},
        {o->samples && rollout, "--samples has no meaning with --rollout: a step is --batch prompts"},
        {o->samples && verb == VERB_BP && !o->data.count,
         "--samples needs --data, whose documents it counts; --batch documents of random tokens are a micro-batch"},
        {rollout && (o->old_logprobs || o->reference_logprobs),
         "--old-logprobs and --reference-logprobs are of completions in the data; --rollout writes its own"},
        {rollout && o->updates > 1 && o->lora_dropout > 0,
         "--lora-dropout with --updates above 1: the ratio to the old policy, which has none, would not begin at 1; "
         "leave one of them out"},
        {rollout && o->overlap && o->lora_dropout > 0,
         "--lora-dropout with --overlap: the ratio to the old policy, which has none, would not begin at 1; leave one "
         "of the two out"},
        {rollout && train && (o->save_every.steps % o->updates || o->steps % o->updates),
         "--save-every and --steps must be multiples of --updates: a rollout that is half used cannot be written "
         "again"},
        {option_given(o, "group-size") && o->data.count && !rollout,
         "--group-size has no meaning here: groups are as large as they are in --data"},
        {o->quantise_head && o->base < BASE_NF4 && o->to < CONVERT_NF4,
         "--quantise-head has no meaning without --base (or convert's --to) nf4 or fp4: the other weights are not in 4 "
         "bits"},
        {o->lora_rank && o->adapter, "--lora-rank and --adapter exclude each other: adapters are made or read"},
        {o->any_reference && !o->reference_logprobs && !o->old_logprobs,
         "--any-reference has no meaning without --reference-logprobs or --old-logprobs"},
        {o->any_reference && o->reference_logprobs && o->val_data.count,
         "--any-reference leaves nobody to compute the reference of --val-data, which is not the model at hand; eval "
         "the checkpoints on it"},
        {o->label_smoothing > 0 && o->dpo_loss != DPO_SIGMOID && o->dpo_loss != DPO_ROBUST,
         "--label-smoothing has no meaning but with --dpo-loss sigmoid or robust"},
        {o->objective == OBJECTIVE_KTO && o->kto_loss == KTO_KTO && o->reference_logprobs,
         "--reference-logprobs knows nothing of the mismatched completions that kto's KL divergence is estimated from; "
         "leave it out, or give --kto-loss apo_zero"},
        {o->objective == OBJECTIVE_KTO && o->desirable_weight == 0 && o->undesirable_weight == 0,
         "--desirable-weight and --undesirable-weight 0 leave nothing of the objective; give one above 0"},
        {o->beta == 0 && kind & (OF_PREFERENCES | OF(OBJECTIVE_KTO)),
         "--beta 0 leaves nothing of the objective; give a number above 0"},
        {o->temperature == 0 && kind & OF_POLICY,
         "--temperature 0 has no gradient; the objective takes a number above 0"},
        {option_given(o, "epsilon") && o->epsilon > 1e-3 && kind & OF_POLICY,
         "--epsilon is AdamW's; the objective's clipping is --clip-low and --clip-high"},
        {o->temperature == 0 && verb == VERB_LOGPROBS,
         "--temperature 0 leaves the likeliest token alone; give a number above 0"},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++)
        if (rules[i].refused) options_refuse(verb, "%s", rules[i].message);
}

// The learning rate of --lr auto in a new run.
static double options_learning_rate(const Options *o) {
    static const double rates[3][2] = {{1e-5, 1e-4}, {5e-7, 5e-6}, {1e-6, 1e-5}}; // of a model, of adapters
    const unsigned kind = OF(o->objective);
    if (o->init) return 3e-4;
    return rates[kind & (OF_PREFERENCES | OF(OBJECTIVE_KTO)) ? 1
                 : kind & OF_POLICY                          ? 2
                                                             : 0][o->lora_rank || o->adapter];
}

// ---- the whole line ------------------------------------------------------------------------------------------------
static void options_free(Options *options) { free(options->prompt_ids.id), free(options->stop_ids.id); }

// Bytes of a row's field.
static size_t option_bytes(const OptionRow *row) {
    switch (row->kind) {
    case OPTION_FLAG:
    case OPTION_CHOICE: return sizeof(int);
    case OPTION_PATHS: return sizeof(PathList);
    case OPTION_IDS: return sizeof(IdList);
    case OPTION_INTERVAL: return sizeof(Interval);
    default: return sizeof(size_t); // a double and a pointer are as long
    }
}

// Adds the options of --config that the command line has not given. Of JSON, and so of a log, defaults are not given.
static void options_add_config(Options *options) {
    const OptionWords *words = option_words_read(options->config);
    Options file, defaults;
    char a[64], b[64];
    options_set_defaults(&file), options_set_defaults(&defaults);
    file.verb = options->verb;
    for (int i = 0; i < (int)words->count;) {
        snprintf(options_where, sizeof(options_where), "%s:%zu: ", options->config, words->line[i]);
        i = options_parse_one(&file, (int)words->count, words->word, i);
    }
    *options_where = 0;
    for (size_t i = 0; i < OPTION_RIVALS; i++)
        for (size_t k = 0; k < 2; k++)
            if (option_given(options, option_rivals[i][k])) file.given[option_find(option_rivals[i][1 - k])] = 0;
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *text = option_text(row, &file, a, sizeof(a)), *usual = option_text(row, &defaults, b, sizeof(b));
        const int is_default = words->json && text && usual && !strcmp(text, usual);
        if (!file.given[i] || options->given[i] || is_default || !option_accepted(row, options->verb)) {
            if (row->kind == OPTION_IDS) free(((IdList *)(void *)((char *)&file + row->offset))->id);
            continue;
        }
        memcpy((char *)options + row->offset, (char *)&file + row->offset, option_bytes(row));
        options->given[i] = file.given[i];
    }
    if (words->logged && !options->quiet)
        note("%s: --out, --resume, --extend and --overwrite of that run are left out", options->config);
}

// Adds the second option that an alias of another program implies.
static void options_add_meaning(Options *options) {
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        if (options->given[i] < GIVEN_AS_ALIAS || !option_aliases[options->given[i] - GIVEN_AS_ALIAS].also) continue;
        const size_t alias = (size_t)options->given[i] - GIVEN_AS_ALIAS;
        const int also = option_find(option_aliases[alias].also);
        if (options->given[also]) continue;
        option_set(&option_rows[also], options, option_aliases[alias].value);
        options->given[also] = 1;
    }
}

// 1 if an option was given by this alias.
static int given_as(const Options *o, const char *option, const char *typed) {
    const unsigned char given = o->given[option_find(option)];
    return given >= GIVEN_AS_ALIAS && !strcmp(option_aliases[given - GIVEN_AS_ALIAS].typed, typed);
}

// Other programs count samples and micro-batches of a replica, ours of the whole step.
static void options_add_replicas(Options *o) {
    const size_t replicas = max_size(1, (o->verb == VERB_PLAN ? o->ranks : dist_ranks()) / o->sp);
    const int device = given_as(o, "samples", PER_DEVICE), several = given_as(o, "grad-accum", ACCUMULATION);
    const size_t samples = o->samples, sequences = several ? o->grad_accum : 1;
    if (!device && !several) return;
    if (several) o->grad_accum = device ? 1 : o->grad_accum * replicas;
    if (device) o->samples *= sequences * replicas;
    if (device && several) o->given[option_find("grad-accum")] = 0;
    if (device && o->samples > samples && !o->quiet)
        note("--samples %zu: %zu of a device x %zu accumulated x %zu replica%s", o->samples, samples, sequences,
             replicas, replicas == 1 ? "" : "s");
}

static void options_print_version(FILE *out) {
    fprintf(out, "streambp.c %s, commit %s\n", STREAMBP_VERSION, program_commit());
#ifdef __clang__
    fprintf(out, "build      %s, %s, %s\n", ops_device->name, dtype_name(ops_device->stored), __VERSION__);
#else
    fprintf(out, "build      %s, %s, gcc %s\n", ops_device->name, dtype_name(ops_device->stored), __VERSION__);
#endif
    fprintf(out, "libraries  %s, cJSON %s\n", ops_device->libraries, cJSON_Version());
}

// argv stays in use (text values point into it). --help and --version are answered here and end the program.
static Options options_parse(int argc, char **argv) {
    Options options;
    int i = 1;
    options_set_defaults(&options);
    options.verb = options_verb(argc, argv, &i);
    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        options_help(stdout, VERBS);
        stdout_finish();
        exit(0);
    }
    while (i < argc) {
        if (!strcmp(argv[i], "-h"))
            options.help = 1;
        else
            i = options_parse_one(&options, argc, argv, i);
        if (options.help) options_help(stdout, options.verb);
        if (options.version) options_print_version(stdout);
        if (!options.help && !options.version) continue;
        stdout_finish();
        exit(0);
    }
    if (options.config) options_add_config(&options);
    options_add_meaning(&options);
    options_add_replicas(&options);
    options_follow_run(&options);
    options_check_tables(&options);
    options_check(&options);
    if (!options.seq_len) options.seq_len = SEQ_LEN_STEP, options.given[option_find("seq-len")] = 0;
    return options;
}

// The file or folder that a verb writes and a user names; NULL: none. Of train it is what --overwrite replaces.
static const char *options_output(const Options *o) {
    return o->verb == VERB_BP ? o->grads_out : o->verb == VERB_TRAIN && !o->overwrite ? NULL : o->out;
}

// Refuses an output that is there, unless --overwrite, or that any other option may name as an input.
static void options_check_output(const Options *o) {
    const char *out = options_output(o);
    if (o->verb == VERB_TRAIN && !o->out)
        options_refuse(o->verb, "no output: give --out with the folder of this run, or --out none to keep nothing");
    for (size_t i = 0; out && i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)o + row->offset;
        const char *text = row->kind == OPTION_TEXT ? *(const char *const *)field : NULL;
        const PathList *list = (const PathList *)field;
        char hub[PATH_MAX], name[32];
        if (text && text == o->disk) continue; // nothing is read there
        snprintf(name, sizeof(name), "--%s", row->name);
        if (text && (!strcmp(row->name, "model") || !strcmp(row->value, "DIR")))
            text = hub_path_find(name, text, hub, 1);
        if (text && text != out) output_refuse_input(out, row->name, text);
        if (row->kind != OPTION_PATHS || !list->count || !path_exists(out)) continue;
        ShardPaths found = shard_paths_find(list->path, list->count);
        for (size_t k = 0; k < found.count; k++) output_refuse_input(out, row->name, found.at[k].path);
        shard_paths_free(&found);
    }
    if (out && !o->overwrite && path_exists(out) && !path_is_directory(out)) // of a folder folder_open decides
        die("%s: is there already; choose another name, or say --overwrite", out);
}

// `build`: the dtype of the op set. Another can be planned and converted to.
static void options_check_dtype(const Options *o, DType build) {
    if (o->verb == VERB_PLAN || o->verb == VERB_CONVERT || o->dtype == DTYPE_AUTO || o->dtype == (int)build) return;
    options_refuse(o->verb, "--dtype is %s but this program was built for %s; build with make PRECISION=%s",
                   dtype_name((DType)o->dtype), dtype_name(build), dtype_name((DType)o->dtype));
}

// Refuses what was given but cannot be in force for a model of this dtype (without_meaning).
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
