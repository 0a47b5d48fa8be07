/*
Command lines for the tests of options: from words, from a row of the table, and from the echo as a shell reads it. A
line that is parsed, echoed and parsed again must be the same. Part of test_options.c.
*/
#ifndef TEST_OPTION_LINES_H
#define TEST_OPTION_LINES_H
#include "test/base/child.h"
#include "llmc/cli/options.h"

enum { ARGUMENTS = 160 };

typedef struct {
    int argc;
    char *argv[ARGUMENTS];
} CommandLine;

static void add(CommandLine *line, const char *argument) {
    char *copy = (char *)case_memory(strlen(argument) + 1);
    strcpy(copy, argument);
    assert_true(line->argc < ARGUMENTS - 1);
    line->argv[line->argc++] = copy;
    line->argv[line->argc] = NULL;
}

// Splits text into words at single spaces.
static CommandLine words(const char *text) {
    CommandLine line = {0, {NULL}};
    add(&line, "train");
    while (*text) {
        char word[512];
        size_t length = strcspn(text, " ");
        snprintf(word, sizeof(word), "%.*s", (int)length, text);
        add(&line, word);
        text += length + (text[length] != 0);
    }
    return line;
}

static void parse_in_child(const void *context) {
    CommandLine line = *(const CommandLine *)context;
    options_parse(line.argc, line.argv);
}

static void refused(const char *text, const char *message) {
    CommandLine line = words(text);
    expect_refused(parse_in_child, &line, EXIT_USAGE, message);
}

static Options parse(const char *text) {
    CommandLine *line = (CommandLine *)case_memory(sizeof(*line)); // options point into it
    *line = words(text);
    return options_parse(line->argc, line->argv);
}

static void echo_lines(FILE *file, const Options *options) { options_echo(file, options, 1); }

// Returns what a function of options prints into a file.
static char *printed(void (*print)(FILE *, const Options *), const Options *options) {
    FILE *file = tmpfile();
    char *text = (char *)case_memory(65536);
    assert_non_null(file);
    print(file, options);
    child_slurp(file, text, 65536);
    return text;
}

// ---- round trips ---------------------------------------------------------------------------------------------------
static int paths_differ(const PathList *a, const PathList *b) {
    int differ = a->count != b->count;
    for (size_t i = 0; !differ && i < a->count; i++) differ = strcmp(a->path[i], b->path[i]) != 0;
    return differ;
}

static int text_differs(const char *a, const char *b) { return a && b ? strcmp(a, b) != 0 : a != b; }

// Compares the raw fields, without options.h. NAN means a word, and equals itself.
static int row_differs(const OptionRow *row, const Options *a, const Options *b) {
    const void *x = (const char *)a + row->offset, *y = (const char *)b + row->offset;
    const IdList *i = (const IdList *)x, *j = (const IdList *)y;
    switch (row->kind) {
    case OPTION_FLAG:
    case OPTION_CHOICE: return memcmp(x, y, sizeof(int)) != 0;
    case OPTION_LAYERS: {
        const LayersChoice *c = (const LayersChoice *)x, *d = (const LayersChoice *)y;
        return c->word != d->word || c->layers != d->layers;
    }
    case OPTION_PATHS: return paths_differ((const PathList *)x, (const PathList *)y);
    case OPTION_IDS: return i->count != j->count || (i->count && memcmp(i->id, j->id, 4 * i->count) != 0);
    case OPTION_TEXT: return text_differs(*(const char *const *)x, *(const char *const *)y);
    case OPTION_INTERVAL: return memcmp(x, y, sizeof(Interval)) != 0;
    default: return memcmp(x, y, sizeof(size_t)) != 0; // a double has the same size
    }
}

static void expect_same(const Options *a, const Options *b) {
    assert_int_equal(a->verb, b->verb);
    for (size_t i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].verbs && row_differs(&option_rows[i], a, b)) test_fail("--%s differs", option_rows[i].name);
}

static int is_of_environment(const char *tested) {
    for (size_t i = 0; i < OF_OPTIONS; i++)
        if (!strcmp(of_options[i].option, tested) && !strcmp(of_options[i].needs, "environment-command")) return 1;
    return !strcmp(tested, "environment-command");
}

static int is_of_rollout(const char *tested) {
    if (is_of_environment(tested)) return 1;
    for (size_t i = 0; i < OF_OPTIONS; i++)
        if (!strcmp(of_options[i].option, tested) && !strcmp(of_options[i].needs, "rollout")) return 1;
    return !strcmp(tested, "rollout");
}

// Adds the options that give the tested one a meaning: the objective that it belongs to, or an option that it needs.
static void add_company(CommandLine *line, Verb verb, const char *tested) {
    char text[64];
    for (size_t i = 0; i < OF_OBJECTIVES; i++) {
        int kind = 0;
        if (strcmp(of_objectives[i].option, tested) != 0) continue;
        while (!(of_objectives[i].objectives >> kind & 1u)) kind++;
        snprintf(text, sizeof(text), "--objective=%s", objective_names[kind]);
        add(line, text);
    }
    for (size_t i = 0; i < OF_OPTIONS; i++) {
        if (strcmp(of_options[i].option, tested) != 0) continue;
        if (!option_accepted(&option_rows[option_find(of_options[i].needs)], verb)) continue;
        add_company(line, verb, of_options[i].needs);
        const OptionKind kind = option_rows[option_find(of_options[i].needs)].kind;
        snprintf(text, sizeof(text), "--%s%s", of_options[i].needs,
                 kind == OPTION_FLAG || option_bare(&option_rows[option_find(of_options[i].needs)]) ? ""
                 : kind == OPTION_CHOICE                                                            ? "=blocks"
                                                                                                    : "=4");
        add(line, text);
    }
    if (!strcmp(tested, "keep-best")) add(line, "--val-every=2");
    if (!strcmp(tested, "kv")) add(line, "--sp=4");
    if (!strcmp(tested, "thinking")) add(line, "--chat");
    if (!strcmp(tested, "slots") && verb == VERB_SAMPLE) add(line, "--prompts=f");
    if (!strcmp(tested, "merge") || !strcmp(tested, "adapter-only")) add(line, "--adapter=a");
    if (!strcmp(tested, "quantise-head")) add(line, "--base=nf4");
    if (!strcmp(tested, "any-reference")) add(line, "--objective=dpo"), add(line, "--reference-logprobs=r");
}

// Returns the first verb that takes the option; verb 0 for a heading.
static Verb verb_of(const OptionRow *row) {
    int verb = 0;
    while (row->verbs && !option_of(row, (Verb)verb)) verb++;
    return (Verb)verb;
}

// Returns a line with the options that the verb needs, without those that exclude the tested one.
static CommandLine least_line(Verb verb, const char *tested) {
    const int group = !strcmp(tested, "group-size"), rollout = is_of_rollout(tested), train = verb == VERB_TRAIN;
    const int shared = !strcmp(tested, "shared-tokens");
    const struct {
        const char *option, *value;
        int excluded;
    } needed[] = {{"model", "m", !strcmp(tested, "init")},
                  {"data", "d.bin", (group && !train) || shared},
                  {"val-data", "v.bin", group || shared || rollout || !strcmp(tested, "any-reference")},
                  {"out", "o", 0},
                  {"disk", "d", 0},
                  {"prompt", "p",
                   !strncmp(tested, "prompt", 6) || text_is_one_of(tested, "serve|serve-token") ||
                       (verb == VERB_SAMPLE && text_is_one_of(tested, "slots|render-command"))}};
    CommandLine line = {0, {NULL}};
    char text[64];
    add(&line, "train");
    add(&line, verb_rows[verb].name);
    for (size_t i = 0; i < COUNT_OF(needed); i++) {
        if (!option_of(&option_rows[option_find(needed[i].option)], verb)) continue;
        if (needed[i].excluded || !strcmp(tested, needed[i].option)) continue;
        snprintf(text, sizeof(text), "--%s=%s", needed[i].option, needed[i].value);
        add(&line, text);
    }
    add_company(&line, verb, tested);
    if (!strcmp(tested, "machine") && verb == VERB_BP) add(&line, "--profile");
    if (!strcmp(tested, "adapter") && verb == VERB_CONVERT) add(&line, "--merge");
    if (!strncmp(tested, "context", 7) && verb == VERB_PLAN) add(&line, "--for=sample");
    if (group && train) add(&line, "--rollout");
    const int environment = is_of_environment(tested) && verb != VERB_SAMPLE;
    if (environment) add(&line, "--seq-len=64");
    if ((group || rollout) && train && !environment && strcmp(tested, "reward-command") != 0)
        add(&line, "--reward-command=r");
    return line;
}

// Returns the i-th example value: a word of a choice; for other kinds a value other than the default.
static const char *example_value(const OptionRow *row, size_t i, char *text, size_t size) {
    static const char *const strings[] = {"x", "it's \"a\" $PATH `b` \\ *", "two words", "-dash",
                                          "caf\303\251\nline two"};
    const char *choice = row->value;
    switch (row->kind) {
    case OPTION_SIZE: // not for stages of ZeRO, which are few
        snprintf(text, size, "%.0f", fmin(row->most, i == 0 ? 1e15 : row->least + 6 + (double)i));
        break;
    case OPTION_REAL: snprintf(text, size, "%.17g", fmax(row->least, fmin(row->most, 1) * (double)(i + 1) / 17)); break;
    case OPTION_BYTES: snprintf(text, size, i == 0 ? "80GiB" : "%zu", 1234567 * i); break;
    case OPTION_TEXT: snprintf(text, size, "%s", strings[i]); break;
    case OPTION_IDS: snprintf(text, size, i == 0 ? "7" : "0,2147483647,%zu", i); break;
    case OPTION_PATHS: snprintf(text, size, "%zu *.bin", i); break;
    case OPTION_INTERVAL: snprintf(text, size, i % 2 ? "%zus" : "%zu", i + 7); break;
    default:
        while (i--) choice += strcspn(choice, "|") + (choice[strcspn(choice, "|")] != 0);
        if (!*choice) return NULL;
        snprintf(text, size, "%.*s", (int)strcspn(choice, "|"), choice);
        if (row->kind == OPTION_LAYERS && strcmp(text, "auto") != 0) strcat(text, "=12");
    }
    return text;
}

// Returns the option with its first example value.
static void add_example(CommandLine *line, const OptionRow *row) {
    char value[64], text[128];
    if (row->kind == OPTION_FLAG)
        snprintf(text, sizeof(text), "--%s", row->name);
    else
        snprintf(text, sizeof(text), "--%s=%s", row->name, example_value(row, 0, value, sizeof(value)));
    add(line, text);
}

// Returns the echo as the shell reads it.
static CommandLine shell_words(const char *echo) {
    char *command = (char *)case_memory(strlen(echo) + 64), *all = (char *)case_memory(16384);
    CommandLine line = {0, {NULL}};
    sprintf(command, "printf '%%s\\0' %s", echo);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t length = fread(all, 1, 16383, pipe);
    assert_int_equal(pclose(pipe), 0);
    for (char *word = all; word < all + length; word += strlen(word) + 1) add(&line, word);
    return line;
}

static void expect_round_trip(CommandLine *line) {
    Options options = options_parse(line->argc, line->argv);
    CommandLine second = shell_words(printed(echo_lines, &options));
    Options again = options_parse(second.argc, second.argv);
    expect_same(&options, &again);
    options_free(&options);
    options_free(&again);
}

#endif
