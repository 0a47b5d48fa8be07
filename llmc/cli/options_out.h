/*
Writes options by the table in option_rows.h: options_help explains them. options_echo prints the command line that
repeats a run, without defaults; it parses to the same options. options_json writes them into a log, with defaults.
*/
#ifndef LLMC_OPTIONS_OUT_H
#define LLMC_OPTIONS_OUT_H
#include "llmc/base/json.h"
#include "llmc/base/utils.h"
#include "option_rows.h"

#define HELP_WIDTH  100
#define HELP_COLUMN 30
#define ECHO_MARGIN 12 // columns for a word before the command line and for the backslash after it

// ---- looking things up ---------------------------------------------------------------------------------------------
// Returns an option's name in the form of the rows: "seq-len" for seq_len=8.
static const char *option_name(const char *typed, char name[64]) {
    snprintf(name, 64, "%.*s", (int)min_size(strcspn(typed, "="), 63), typed);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
    return name;
}

// Returns the index of a row; -1: no row has this name
static int option_find(const char *name) {
    for (size_t i = 0; i < OPTION_ROWS; i++)
        if (option_rows[i].verbs && !strcmp(option_rows[i].name, name)) return (int)i;
    return -1;
}

static int option_given(const Options *options, const char *name) {
    int index = option_find(name);
    if (index < 0) die("internal: no option is called '%s'; please report it", name);
    return options->given[index];
}

static int option_of(const OptionRow *row, Verb verb) { return (int)((row->verbs >> verb) & 1u); }

// Returns 1 if the verb takes the option. A plan takes all options of the run that it plans, so that a run's command
// line can be planned.
static int option_accepted(const OptionRow *row, Verb verb) {
    return option_of(row, verb) || (verb == VERB_PLAN && (option_of(row, VERB_TRAIN) || option_of(row, VERB_BP)));
}

// Returns the word that stands for 0 of a number, or NULL.
static const char *option_word(const OptionRow *row) {
    int number = row->kind == OPTION_SIZE || row->kind == OPTION_REAL || row->kind == OPTION_BYTES;
    if (row->kind == OPTION_SIZE && row->value && text_ends_with(row->value, "|auto")) return "auto"; // of "S|auto"
    return number && row->fallback && row->fallback[0] >= 'a' && row->fallback[0] <= 'z' ? row->fallback : NULL;
}

// Returns the enum value of a choice as an int.
static int option_value(const OptionRow *row, const Options *options) {
    int value;
    memcpy(&value, (const char *)options + row->offset, sizeof(value));
    return value;
}

// Returns the word of a choice, as a user would type it.
static const char *option_chosen(const Options *options, const char *name) {
    static char buffers[8][16];
    static int next;
    const OptionRow *row = &option_rows[option_find(name)];
    const char *words = row->value;
    char *word = buffers[next++ % 8];
    for (int i = (int)row->least; i < option_value(row, options); i++) words += strcspn(words, "|") + 1;
    snprintf(word, sizeof(buffers[0]), "%.*s", (int)strcspn(words, "|"), words);
    return word;
}

// Writes the verbs of a row: "bp, plan".
static const char *option_verbs_text(const OptionRow *row, char *text, size_t size) {
    *text = 0;
    for (int verb = 0; verb < VERBS; verb++)
        if (option_of(row, (Verb)verb))
            snprintf(text + strlen(text), size - strlen(text), "%s%s", *text ? ", " : "", verb_rows[verb].name);
    return text;
}

// ---- help ----------------------------------------------------------------------------------------------------------
// Prints text from `column` on, and continues full lines at column `indent`. Returns the column at the end of the text.
static size_t help_wrap(FILE *out, const char *text, size_t column, size_t indent) {
    while (*text) {
        size_t length = strcspn(text, " ");
        if (column > indent && column + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", (int)indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', out);
            column++;
        }
        fwrite(text, 1, length, out);
        column += length;
        text += length;
        while (*text == ' ') text++;
    }
    return column;
}

// Prints the help of an option. HELP_SHORT: only the first part, on one line. verbs: also names the verbs that have it
static void help_option(FILE *out, const OptionRow *row, Help help, int verbs) {
    char extra[128], names[96], text[1024];
    const char *end = help == HELP_SHORT ? strstr(row->help, "; ") : NULL;
    size_t column = (size_t)fprintf(out, "  --%s%s%s", row->name, row->value ? " " : "", row->value ? row->value : "");
    snprintf(text, sizeof(text), "%.*s", end ? (int)(end - row->help) : 1023, row->help);
    if (column + 2 > HELP_COLUMN && help == HELP_ALL)
        fprintf(out, "\n%*s", HELP_COLUMN, ""), column = HELP_COLUMN;
    else if (column < HELP_COLUMN)
        fprintf(out, "%*s", (int)(HELP_COLUMN - column), ""), column = HELP_COLUMN;
    column = help_wrap(out, text, column, HELP_COLUMN);
    if (row->fallback) {
        snprintf(extra, sizeof(extra), "[%s]", row->fallback);
        column = help_wrap(out, extra, column, HELP_COLUMN);
    }
    if (verbs && (row->verbs & EVERYWHERE) != EVERYWHERE) {
        snprintf(extra, sizeof(extra), "(%s)", option_verbs_text(row, names, sizeof(names)));
        help_wrap(out, extra, column, HELP_COLUMN);
    }
    fputc('\n', out);
}

// Prints the options of one verb, or of all verbs (VERBS), under their headings.
static void help_options(FILE *out, Verb verb, Help help) {
    const OptionRow *heading = NULL;
    for (const OptionRow *row = option_rows; row < option_rows + OPTION_ROWS; row++) {
        if (!row->verbs) heading = row;
        if (verb < VERBS ? !(row->verbs >> (help == HELP_ALL ? verb : verb + 16) & 1) : !row->verbs) continue;
        if (heading) fprintf(out, "\n%s\n", heading->name);
        heading = NULL;
        help_option(out, row, help, verb == VERBS);
    }
}

// Prints families and presets.
static void help_models(FILE *out) {
    fprintf(out, "\nModels of --init\n  ");
    size_t column = help_wrap(out, families[0].name, 2, 2);
    for (size_t i = 1; i < FAMILIES; i++) column = help_wrap(out, families[i].name, column, 2);
    for (size_t i = 0; i < PRESETS; i++)
        if (!family_find(presets[i].name)) column = help_wrap(out, presets[i].name, column, 2);
    fputc('\n', out);
}

// Prints the help of a verb, or of the program (VERBS).
static void options_help(FILE *out, Verb verb, Help help) {
    const char *program = program_called();
    size_t options = 0;
    if (verb == VERBS) {
        fputs("streambp.c: exact streamed backpropagation for long sequences\n\n", out);
        fprintf(out, "usage: %s [VERB] --option value ...\n", program);
        for (int i = 0; i < VERBS; i++)
            fprintf(out, "\n%s: %s\n  %s %s %s\n", verb_rows[i].name, verb_rows[i].purpose, program, verb_rows[i].name,
                    verb_rows[i].example);
    } else {
        fprintf(out, "%s: %s\n\n", verb_rows[verb].name, verb_rows[verb].purpose);
        fprintf(out, "usage: %s %s --option value ...\n", program, verb_rows[verb].name);
        fprintf(out, "example: %s %s %s\n", program, verb_rows[verb].name, verb_rows[verb].example);
        if (verb == VERB_PLAN)
            fputs("Other options of train and bp are accepted, so that their command lines can be planned.\n", out);
    }
    if (verb < VERBS || help == HELP_ALL) {
        fputs("Defaults are in brackets. Of tokens 32k is 32768, as printed, else 32000; --seq_len is --seq-len.\n"
              "Names of transformers, TRL and PEFT are known where they mean the same (--learning-rate).\n",
              out);
        help_options(out, verb, help);
    }
    if ((verb == VERBS && help == HELP_ALL) || verb == VERB_INFO) help_models(out);
    if (help == HELP_ALL) return;
    if (verb == VERBS) fprintf(out, "\n%s VERB --help shows the options that one needs.", program);
    for (size_t i = 0; i < OPTION_ROWS; i++)
        options += verb == VERBS ? option_rows[i].verbs != 0 : option_of(&option_rows[i], verb) != 0;
    fprintf(out, "\n--help all lists all %zu options\n", options);
}

// Returns the word that an option means if it is typed without a value, or NULL.
static const char *option_bare(const OptionRow *row) {
    if (row->kind != OPTION_CHOICE) return NULL;
    return !strncmp(row->value, "off|on", 6) ? "on" : !strncmp(row->value, "short|", 6) ? "short" : NULL;
}

// ---- command line and JSON -----------------------------------------------------------------------------------------
static const char *interval_text(const Interval *interval, char *buffer, size_t size) {
    char number[32];
    if (interval->seconds > 0)
        snprintf(buffer, size, "%ss", number_text(interval->seconds, number));
    else if (interval->steps)
        snprintf(buffer, size, "%zu", interval->steps);
    else
        snprintf(buffer, size, "off");
    return buffer;
}

// Writes a choice for `layers` layers (0: all) as a user would type it. Valid until the eighth next call
static const char *layers_text(const char *word, size_t layers) {
    static char buffers[8][40];
    static int next;
    char *text = buffers[next++ % 8];
    snprintf(text, sizeof(buffers[0]), layers ? "%s=%zu" : "%s", word, layers);
    return text;
}

// Returns a scalar's value as a user would type it; a number is written to `buffer`. NULL: the option is unset, a flag,
// or a list
static const char *option_text(const OptionRow *row, const Options *options, char *buffer, size_t size) {
    const void *field = (const char *)options + row->offset;
    const char *word = option_word(row);
    char number[32];
    switch (row->kind) {
    case OPTION_SIZE:
    case OPTION_BYTES:
        snprintf(buffer, size, "%zu", *(const size_t *)field);
        return word && *(const size_t *)field == 0 ? word : buffer;
    case OPTION_REAL:
        snprintf(buffer, size, "%s", number_text(*(const double *)field, number));
        return word && isnan(*(const double *)field) ? word : buffer;
    case OPTION_CHOICE: return option_chosen(options, row->name);
    case OPTION_LAYERS: return layers_text(option_chosen(options, row->name), ((const LayersChoice *)field)->layers);
    case OPTION_INTERVAL: return interval_text((const Interval *)field, buffer, size);
    case OPTION_TEXT: return *(const char *const *)field;
    default: return NULL;
    }
}

static int looks_like_option(const char *text) { return text[0] == '-' && text[1] == '-'; }

// Returns 1 for an option to echo. The options in --config are echoed instead of --config itself.
static int option_echoed(const OptionRow *row, Verb verb) {
    return option_of(row, verb) && !text_is_one_of(row->name, "config|help|version");
}

// Prints one word, quoted if a shell would read it differently.
static void echo_quoted(FILE *out, const char *text) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+.,:/@%";
    size_t length = strlen(text);
    if (length && strspn(text, plain) == length) {
        fputs(text, out);
        return;
    }
    fputc('\'', out);
    for (const char *c = text; *c; c++) {
        if (*c == '\'')
            fputs("'\\''", out);
        else
            fputc(*c, out);
    }
    fputc('\'', out);
}

// Prints "--name value", or "--name=value" if the value looks like an option. Begins a new line if the current one is
// full.
static void echo_option(FILE *out, const OptionRow *row, const char *value, size_t *column) {
    size_t length = strlen(row->name) + 4 + (value ? strlen(value) : 0);
    if (*column + length > HELP_WIDTH - ECHO_MARGIN) {
        fputs(" \\\n   ", out);
        *column = 3;
    }
    fprintf(out, " --%s", row->name);
    *column += length;
    if (!value) return;
    fputc(looks_like_option(value) ? '=' : ' ', out);
    echo_quoted(out, value);
}

// Prints the command line that repeats this run, with the given options as they were understood. wrap: over several
// lines
static void options_echo(FILE *out, const Options *options, int wrap) {
    echo_quoted(out, program_called());
    size_t column = strlen(program_called()) + (size_t)fprintf(out, " %s", verb_rows[options->verb].name);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)options + row->offset;
        const PathList *paths = row->kind == OPTION_PATHS ? (const PathList *)field : NULL;
        const IdList *ids = row->kind == OPTION_IDS ? (const IdList *)field : NULL;
        char buffer[64];
        if (!option_echoed(row, options->verb) || !options->given[i]) continue;
        const char *text = paths ? paths->path[0] : option_text(row, options, buffer, sizeof(buffer));
        const size_t bytes = row->kind == OPTION_BYTES ? *(const size_t *)field : 0;
        if (bytes && bytes % ((size_t)1 << 30) == 0) snprintf(buffer, sizeof(buffer), "%zuGiB", bytes >> 30);
        if (!text && row->kind == OPTION_TEXT) text = "none"; // only --out has "none"
        if (option_bare(row) && !strcmp(text, option_bare(row))) text = NULL;
        if (!wrap) column = 0;
        echo_option(out, row, text, &column);
        for (size_t j = 1; paths && j < paths->count; j++) {
            fputc(' ', out);
            echo_quoted(out, paths->path[j]);
            column += 1 + strlen(paths->path[j]);
        }
        for (size_t j = 0; ids && j < ids->count; j++)
            column += (size_t)fprintf(out, "%c%d", j ? ',' : ' ', ids->id[j]);
    }
    fputc('\n', out);
}

static void json_ids(JsonOut *json, const char *key, const int32_t *ids, size_t count) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) json_size(json, NULL, (size_t)ids[i]);
    json_array_end(json);
}

// Writes an object with a member for the verb and for each of its options ("seq_len" for --seq-len). Unset options are
// null.
static void options_json(JsonOut *json, const char *key, const Options *options) {
    json_object(json, key);
    json_text(json, "verb", verb_rows[options->verb].name);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)options + row->offset;
        char name[64], buffer[64];
        if (!option_echoed(row, options->verb)) continue;
        const char *text = option_text(row, options, buffer, sizeof(buffer));
        snprintf(name, sizeof(name), "%s", row->name);
        for (char *c = name; *c; c++)
            if (*c == '-') *c = '_';
        if (row->kind == OPTION_FLAG) {
            json_bool(json, name, *(const int *)field);
        } else if (row->kind == OPTION_PATHS) {
            const PathList *paths = (const PathList *)field;
            json_array(json, name);
            for (size_t j = 0; j < paths->count; j++) json_text(json, NULL, paths->path[j]);
            json_array_end(json);
        } else if (row->kind == OPTION_IDS) {
            json_ids(json, name, ((const IdList *)field)->id, ((const IdList *)field)->count);
        } else if (text == buffer && row->kind != OPTION_INTERVAL) {
            json_word(json, name, text); // the text is a number
        } else {
            json_text(json, name, text);
        }
    }
    json_object_end(json);
}

#endif
