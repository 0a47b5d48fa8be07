/*
The command line, parsed by the table of option_rows.h.

    train [VERB] --name value --name=value --flag ...      VERB is train unless argv[1] names another

options_parse reads and checks it (options_check.h); options_out.h explains it and writes it back. A malformed command
line ends with one line on stderr that says what is wrong and what is allowed, and with exit 2.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H
#include "llmc/files/gradients.h"
#include "llmc/tokenizer/tokenizer_split.h"
#include "options_check.h"
#include "options_file.h"

// Returns the option with the most similar spelling, preferring options of the verb; NULL: none is similar
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

// ---- the values that an option accepts -----------------------------------------------------------------------------
// Writes "a|b|c" as "a, b or c".
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

// Returns 1 for an option of bytes that also takes a card's name, which stands for the memory that the card leaves to a
// program.
static int option_takes_card(const OptionRow *row) { return row->value && !strcmp(row->value, "BYTES|CARD"); }

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
    case OPTION_CHOICE:
    case OPTION_LAYERS: words_text(row->value, text, size); break;
    case OPTION_IDS: snprintf(text, size, "token ids separated by commas, such as 1,2,3"); break;
    case OPTION_INTERVAL: snprintf(text, size, "a number of steps, a time such as 90s, 30min or 2h, or off"); break;
    default: snprintf(text, size, "%s", row->value); break;
    }
    if (word) snprintf(text + strlen(text), size - strlen(text), ", or %s", word);
    return text;
}

// ---- values --------------------------------------------------------------------------------------------------------
// Stores the enum value of a word; a row's words follow the enum's order.
static int choice_parse(const OptionRow *row, const char *text, void *field) {
    for (size_t i = 0; i < WORD_ALIASES; i++)
        if (!strcmp(word_aliases[i].option, row->name) && word_index(word_aliases[i].typed, text) >= 0)
            text = word_aliases[i].word;
    const int value = (int)row->least + word_index(row->value, text);
    if (value < (int)row->least) return 0;
    memcpy(field, &value, sizeof(value));
    return 1;
}

// Parses a choice's word, and after "=" a number of layers.
static int layers_parse(const OptionRow *row, const char *text, LayersChoice *field) {
    char word[16];
    const size_t length = strcspn(text, "=");
    if (length >= sizeof(word)) return 0;
    memcpy(word, text, length), word[length] = 0;
    field->layers = 0;
    if (text[length] && (!parse_size(text + length + 1, &field->layers) || !field->layers)) return 0;
    return choice_parse(row, word, &field->word) && (!field->layers || strcmp(word, "auto") != 0);
}

static const Machine *option_card(const OptionRow *row, const char *text) {
    size_t cards;
    const Machine *card = option_takes_card(row) ? machine_find(text, strlen(text), &cards) : NULL;
    return card && !cards ? card : NULL;
}

static int bytes_parse(const OptionRow *row, const char *text, size_t *bytes) {
    const Machine *card = option_card(row, text);
    if (card) *bytes = machine_usable_bytes(card);
    return card || parse_bytes(text, bytes);
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

// Returns 1 for a bare number below 1 MiB, which probably means GiB.
static int bytes_lack_unit(const char *text, size_t bytes) {
    return bytes < (size_t)1 << 20 && !text[strspn(text, "0123456789.")];
}

// Parses steps (100, 1k), a time (90s, 30min), or off.
static int interval_parse(const char *text, Interval *interval) {
    memset(interval, 0, sizeof(*interval));
    if (!strcmp(text, "off") || (parse_seconds(text, &interval->seconds) && interval->seconds > 0)) return 1;
    return parse_count(text, 1000, &interval->steps) && (double)interval->steps <= OPTION_UNBOUNDED;
}

// Stores a row's value. Returns 0 if the text is not a valid value.
static int option_set(const OptionRow *row, Options *options, const char *text) {
    void *field = (char *)options + row->offset;
    const char *word = option_word(row);
    int zero = word && !strcmp(word, text);
    switch (row->kind) {
    case OPTION_FLAG: *(int *)field = 1; return 1;
    case OPTION_TEXT: *(const char **)field = text; return *text != 0;
    case OPTION_CHOICE: return choice_parse(row, text, field);
    case OPTION_LAYERS: return layers_parse(row, text, (LayersChoice *)field);
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
        const Machine *card = option_card(row, text);
        if (option_takes_card(row)) options->card = card ? 1 + (int)(card - machines) : 0;
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
            die("internal: the default of --%s, '%s', is not allowed; please report it", row->name, row->fallback);
    }
}

// ---- parsing -------------------------------------------------------------------------------------------------------
// Returns the verb. *first: index of the first option
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

// Returns the row of an argument "--name" or "--name=value"; *value: the text after "=". -1: an option of another
// program that changes nothing here. *alias: index in option_aliases, or OPTION_ALIASES
static int options_row_of(const char *argument, const Options *options, const char **value, size_t *alias) {
    const Verb verb = options->verb;
    char name[64], verbs[96];
    if (!looks_like_option(argument))
        options_refuse(verb, "'%.64s' does not belong here: options begin with two dashes%s", argument,
                       *argument == '-' ? "" : ", values follow an option");
    size_t length = strcspn(argument + 2, "=");
    *value = argument[2 + length] ? argument + 2 + length + 1 : NULL;
    option_name(argument + 2, name);
    for (*alias = 0; *alias < OPTION_ALIASES && strcmp(option_aliases[*alias].typed, name) != 0;) ++*alias;
    int index = option_find(*alias < OPTION_ALIASES ? option_aliases[*alias].option : name);
    for (size_t i = 0; i < OPTIONS_OF_OTHERS && index < 0; i++) {
        if (!globs_match(options_of_others[i].options, name)) continue;
        if (!text_ends_with(options_of_others[i].reason, "; leave it out"))
            options_refuse(verb, "--%s: %s", name, options_of_others[i].reason);
        if (!options->quiet) note("%s--%s: %s", options_where, name, options_of_others[i].reason);
        return -1;
    }
    if (index < 0) {
        const char *nearest = option_nearest(name, verb);
        options_refuse(verb, "unknown option --%.64s%s", name, did_you_mean("--", nearest));
    }
    if (!option_accepted(&option_rows[index], verb) && !*options_where)
        options_refuse(verb, "--%s is not an option of %s but of %s", option_rows[index].name, verb_rows[verb].name,
                       option_verbs_text(&option_rows[index], verbs, sizeof(verbs)));
    return index;
}

// Refuses a value. name: of the option, as typed
static void options_refuse_value(const OptionRow *row, const char *name, Verb verb, const char *value) {
    char allowed[256];
    option_allowed(row, allowed, sizeof(allowed));
    size_t bytes;
    if (row->kind == OPTION_BYTES && parse_bytes(value, &bytes) && bytes_lack_unit(value, bytes))
        options_refuse(verb, "--%s %s would be %zu bytes; write --%s %sGiB", name, value, bytes, name, value);
    if (!*value) options_refuse(verb, "--%s is empty, it must be %s", name, allowed);
    options_refuse(verb, "--%s is '%.64s', it must be %s", name, value, allowed);
}

// Takes argv[i], whatever it looks like, and all arguments up to the next option, in place.
static int options_take_paths(int argc, char **argv, int i, PathList *list, const OptionRow *row, Verb verb) {
    list->path = (const char *const *)(argv + i);
    list->count = 0;
    do {
        if (!*argv[i]) options_refuse_value(row, row->name, verb, argv[i]);
        i++, list->count++;
    } while (i < argc && !looks_like_option(argv[i]));
    return i;
}

// Joins the names that follow *value (in argv[i]) with commas. Returns the index of the last name.
static int options_take_names(int argc, char **argv, int i, const char **value) {
    static char joined[2][1024]; // for the command line, and for --config
    char *names = joined[*options_where != 0];
    if (i + 1 >= argc || looks_like_option(argv[i + 1]) || !**value) return i;
    snprintf(names, sizeof(joined[0]), "%s", *value);
    for (*value = names; i + 1 < argc && !looks_like_option(argv[i + 1]); i++)
        snprintf(names + strlen(names), sizeof(joined[0]) - strlen(names), ",%s", argv[i + 1]);
    return i;
}

#define FLAG_WORDS     "true|false" // Hugging Face's programs give flags a value
#define GIVEN_AS_ALIAS 2            // values of Options.given from here on tell which alias was typed
static_assert(OPTION_ALIASES < 256 - GIVEN_AS_ALIAS, "Options.given says which alias was typed");

// Writes an option and its value as typed.
static const char *options_typed(int argc, char **argv, int i, char text[96]) {
    const int valued = i + 1 < argc && !strchr(argv[i], '=') && !looks_like_option(argv[i + 1]);
    snprintf(text, 96, "%.40s%s%.40s", argv[i], valued ? " " : "", valued ? argv[i + 1] : "");
    return text;
}

// Reads the option at argv[i]. Returns the index of the next option.
static int options_parse_one(Options *options, int argc, char **argv, int i) {
    Verb verb = options->verb;
    const char *value = NULL;
    size_t alias;
    int index = options_row_of(argv[i], options, &value, &alias), joined = value != NULL;
    if (index < 0) { // an option that changes nothing
        while (++i < argc && !looks_like_option(argv[i])) {
        }
        return i;
    }
    const OptionRow *row = &option_rows[index];
    char earlier[96], later[96];
    if (options->given[index] && !options->quiet)
        note("%s%s ... %s: the last value counts", options_where,
             options_typed(argc, argv, options->argument[index], earlier), options_typed(argc, argv, i, later));
    if (options->given[index] && row->kind == OPTION_IDS) free(((IdList *)(void *)((char *)options + row->offset))->id);
    options->argument[index] = (short)i;
    options->given[index] = alias < OPTION_ALIASES ? (unsigned char)(GIVEN_AS_ALIAS + alias) : 1;
    if (row->kind == OPTION_FLAG) {
        if (!joined && i + 1 < argc && word_index(FLAG_WORDS, argv[i + 1]) >= 0) value = argv[++i];
        const int word = value ? word_index(FLAG_WORDS, value) : 0;
        if (word < 0) options_refuse(verb, "--%s takes no value, '%.64s' was given", row->name, value);
        *(int *)(void *)((char *)options + row->offset) = options->given[index] = word == 0;
        return i + 1;
    }
    if (!joined) {
        const int bare = i + 1 >= argc || looks_like_option(argv[i + 1]);
        const int word = alias < OPTION_ALIASES && !option_aliases[alias].also && option_aliases[alias].value;
        if (bare && (word || option_bare(row))) {
            option_set(row, options, word ? option_aliases[alias].value : option_bare(row));
            return i + 1;
        }
        if (bare) options_refuse(verb, "--%s has no value; write --%s %s", row->name, row->name, row->value);
        value = argv[++i];
    }
    if (row->kind == OPTION_PATHS) {
        argv[i] += value - argv[i]; // in "--data=a.bin" the path follows the sign
        return options_take_paths(argc, argv, i, (PathList *)(void *)((char *)options + row->offset), row, verb);
    }
    if (row->kind == OPTION_TEXT && text_ends_with(row->value, "NAME,..."))
        i = options_take_names(argc, argv, i, &value);
    if (!option_set(row, options, value))
        options_refuse_value(row, alias < OPTION_ALIASES ? option_aliases[alias].typed : row->name, verb, value);
    return i + 1;
}

// Returns the learning rate that --lr auto means in a new run.
static double options_learning_rate(const Options *o) {
    static const double rates[3][2] = {{1e-5, 1e-4}, {5e-7, 5e-6}, {1e-6, 1e-5}}; // rates for a model, for adapters
    const unsigned kind = OF(o->objective);
    if (o->init) return 3e-4;
    return rates[kind & (OF_PREFERENCES | OF(OBJECTIVE_KTO)) ? 1
                 : kind & OF_POLICY                          ? 2
                                                             : 0][o->lora_rank || o->adapter];
}

// ---- the whole command line ----------------------------------------------------------------------------------------
static void options_free(Options *options) { free(options->prompt_ids.id), free(options->stop_ids.id); }

// Adds the options of --config that the command line leaves out. A default among a run's options does not count as
// given. Notes each command that the file brings, as the run will execute it. resumes: the file is the log of the run
// itself
static void options_add_config(Options *options, int resumes) {
    const OptionWords *words = option_words_read(options->config, resumes);
    const int quiet = options->quiet, commands = option_find("reward-command");
    const int theirs = !options->given[commands];
    static const char *const alone[] = {"environment-command", "render-command"}; // commands that a run has once
    const int own[2] = {options->given[option_find(alone[0])] != 0, options->given[option_find(alone[1])] != 0};
    Options file, defaults;
    char a[64], b[64];
    options_set_defaults(&file), options_set_defaults(&defaults);
    file.verb = options->verb, file.quiet = options->quiet;
    for (int i = 0; i < (int)words->count;) {
        snprintf(options_where, sizeof(options_where), "%s:%zu: ", options->config, words->line[i]);
        i = options_parse_one(&file, (int)words->count, words->word, i);
    }
    *options_where = 0;
    if (words->logged && !resumes) file.given[option_find("extend")] = file.given[option_find("device")] = 0;
    if (resumes && options->extend) file.given[option_find("lr")] = 0; // an extended run continues at the final rate
    for (size_t i = 0; i < OPTION_RIVALS; i++)
        for (size_t k = 0; k < 2; k++)
            if (option_given(options, option_rivals[i][k])) file.given[option_find(option_rivals[i][1 - k])] = 0;
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *text = option_text(row, &file, a, sizeof(a)), *usual = option_text(row, &defaults, b, sizeof(b));
        const int is_default = words->of_run && text && usual && !strcmp(text, usual);
        if (!file.given[i] || options->given[i] || is_default || !option_accepted(row, options->verb)) {
            if (row->kind == OPTION_IDS) free(((IdList *)(void *)((char *)&file + row->offset))->id);
            continue;
        }
        memcpy((char *)options + row->offset, (char *)&file + row->offset, row->bytes);
        options->given[i] = file.given[i];
        if (option_takes_card(row)) options->card = file.card;
    }
    for (size_t i = 0; theirs && !quiet && i < options->reward_command.count; i++)
        note("%s: this run will execute its --reward-command: %.8000s%s", options->config,
             options->reward_command.path[i], strlen(options->reward_command.path[i]) > 8000 ? "..." : "");
    for (size_t i = 0; i < 2 && !quiet; i++) {
        const char *command = *(const char **)(void *)((char *)options + option_rows[option_find(alone[i])].offset);
        if (!own[i] && options->given[option_find(alone[i])])
            note("%s: this run will execute its --%s: %.8000s%s", options->config, alone[i], command,
                 strlen(command) > 8000 ? "..." : "");
    }
    if (resumes && !quiet)
        note("--resume: takes the options of %s that are not given here", options->config);
    else if (words->logged && !quiet)
        note("%s: --out, --resume, --extend and --overwrite of that run are left out", options->config);
    if (resumes) notes_known = notes_kept; // from here on a command is noted again
}

// Tells whether --resume takes the options of the run in --out: --data is not given, and --out has a log that does not
// belong to an interrupted --overwrite.
static int options_resume_alone(const Options *o) {
    const char *name;
    if (!o->resume || !o->out || o->config || o->data.count || replaced_is_there(o->out, &name)) return 0;
    return folder_has(o->out, RECORDS_NAME);
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

// Returns 1 if an option was given by this alias.
static int given_as(const Options *o, const char *option, const char *typed) {
    const unsigned char given = o->given[option_find(option)];
    return given >= GIVEN_AS_ALIAS && !strcmp(option_aliases[given - GIVEN_AS_ALIAS].typed, typed);
}

// Takes the number of cards of --machine h100x8 as --ranks.
static void options_add_cards(Options *o) {
    Machine machine;
    char wrong[128];
    if (!option_given(o, "machine") || !machine_parse(&machine, o->machine, wrong, sizeof(wrong))) return;
    const size_t ranks = o->verb != VERB_PLAN ? dist_ranks() : option_given(o, "ranks") ? o->ranks : machine.cards;
    if (machine.cards && ranks != machine.cards)
        options_refuse(o->verb, "--machine %.64s: %zu cards, but the run has %zu rank%s; leave x%zu out", o->machine,
                       machine.cards, ranks, ranks == 1 ? "" : "s", machine.cards);
    if (machine.cards && o->verb == VERB_PLAN) o->ranks = ranks, o->given[option_find("ranks")] = 1;
}

// Converts counts per replica, as other programs use them, to counts of a whole step.
static void options_add_replicas(Options *o) {
    const size_t replicas = max_size(1, (o->verb == VERB_PLAN ? o->ranks : dist_ranks()) / max_size(o->sp, 1));
    const int device = given_as(o, "samples", PER_DEVICE), several = given_as(o, "grad-accum", ACCUMULATION);
    const size_t samples = o->samples, sequences = several ? o->grad_accum : 1;
    if (!device && !several) return;
    if (several) o->grad_accum = device ? 1 : o->grad_accum * replicas;
    if (device) o->samples *= sequences * replicas;
    if (device && several) o->given[option_find("grad-accum")] = 0;
    if (device && o->samples > samples && !o->quiet)
        note("--samples %zu = %zu per device x %zu accumulated x %zu replica%s", o->samples, samples, sequences,
             replicas, replicas == 1 ? "" : "s");
}

// Names the libraries that an op set and the processes of a run use: "oneDNN 3.1.0, Open MPI 4.1.4".
static const char *libraries_text(const Ops *ops) {
    static char text[200];
    snprintf(text, sizeof(text), "%s, %s", ops->libraries, dist_library() ? dist_library() : "without MPI");
    return text;
}

// Lists the linked op sets: "cpu fp32, cpu bf16".
static const char *op_sets_text(void) {
    static char text[160];
    for (size_t i = 0, used = 0; op_sets[i] && used < sizeof(text); i++)
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s %s", i ? ", " : "", op_sets[i]->name,
                                 dtype_name(op_sets[i]->stored));
    return text;
}

static void options_print_version(FILE *out) {
    fprintf(out, "streambp.c %s, commit %s\n", program_version(), program_commit());
    const char *gcc = strstr(__VERSION__, "lang") ? "" : "gcc ";
    fprintf(out, "build      %s, %s%s\n", op_sets_text(), gcc, __VERSION__);
    fprintf(out, "libraries  %s, PCRE2 %d.%d, cJSON %s\n", libraries_text(ops_device), PCRE2_MAJOR, PCRE2_MINOR,
            cJSON_Version());
}

// Parses argv, which must stay in use because text values point into it. --help and --version end the program.
static Options options_parse(int argc, char **argv) {
    Options options;
    int i = 1;
    options_set_defaults(&options);
    options.verb = options_verb(argc, argv, &i);
    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        options_help(stdout, VERBS, argc > 2 && !strcmp(argv[2], "all") ? HELP_ALL : HELP_SHORT);
        stdout_finish();
        exit(0);
    }
    for (int k = i; k < argc; k++) options.quiet |= !strcmp(argv[k], "--quiet"); // --quiet counts wherever it stands
    while (i < argc) {
        static char help[] = "--help";
        if (!strcmp(argv[i], "-h")) argv[i] = help;
        i = options_parse_one(&options, argc, argv, i);
        if (options.help) options_help(stdout, options.verb, options.help);
        if (options.version) options_print_version(stdout);
        if (!options.help && !options.version) continue;
        stdout_finish();
        exit(0);
    }
    const int resumes = options_resume_alone(&options);
    if (resumes) options.config = options.out;
    if (options.config) options_add_config(&options, resumes);
    options_add_meaning(&options);
    options_add_cards(&options);
    options_add_replicas(&options);
    options_download(&options);
    options_follow_run(&options);
    options_check_tables(&options);
    options_check_files(&options);
    options_check_steps(&options);
    options_check_objective(&options);
    if (!options.seq_len) options.seq_len = SEQ_LEN_STEP, options.given[option_find("seq-len")] = 0;
    return options;
}

#endif
