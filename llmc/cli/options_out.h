/*
Options written out: options_echo as the command line that repeats a run, without the defaults (it parses to the same
options), options_json into a log, with them.
*/
#ifndef LLMC_OPTIONS_OUT_H
#define LLMC_OPTIONS_OUT_H
#include "llmc/base/json.h"
#include "options.h"

#define ECHO_MARGIN 12 // room for a word before the command line and the backslash behind it

// A scalar's value as it would be typed; NULL: unset.
static const char *option_text(const OptionRow *row, const Options *options, char *buffer, size_t size) {
    const void *field = (const char *)options + row->offset;
    const char *word = option_word(row);
    char number[32];
    switch (row->kind) {
    case OPTION_SIZE:
    case OPTION_BYTES:
        if (word && *(const size_t *)field == 0) return word;
        snprintf(buffer, size, "%zu", *(const size_t *)field);
        return buffer;
    case OPTION_DOUBLE:
        if (word && isnan(*(const double *)field)) return word;
        snprintf(buffer, size, "%s", number_text(*(const double *)field, number));
        return buffer;
    default: return *(const char *const *)field;
    }
}

// Whether the row says anything about a run of this verb.
static int option_echoed(const OptionRow *row, Verb verb) {
    return option_of(row, verb) && strcmp(row->name, "help") != 0 && strcmp(row->name, "version") != 0;
}

// One word, quoted where a shell would read it differently.
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

// "--name value", or "--name=value" where the value could be taken for an option, on a new line where this one is full.
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

// The command line that repeats this run: what was given, as it was understood.
static void options_echo(FILE *out, const Options *options) {
    size_t column = (size_t)fprintf(out, "train %s", verb_rows[options->verb].name);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)options + row->offset;
        const PathList *paths = (const PathList *)field;
        const IdList *ids = (const IdList *)field;
        char buffer[64];
        if (!option_echoed(row, options->verb) || !options->given[i]) continue;
        if (row->kind == OPTION_FLAG) {
            if (*(const int *)field) echo_option(out, row, NULL, &column);
        } else if (row->kind == OPTION_PATHS) {
            if (paths->count) echo_option(out, row, paths->path[0], &column);
            for (size_t j = 1; j < paths->count; j++) {
                fputc(' ', out);
                echo_quoted(out, paths->path[j]);
                column += 1 + strlen(paths->path[j]);
            }
        } else if (row->kind == OPTION_IDS) {
            if (ids->count) echo_option(out, row, NULL, &column);
            for (size_t j = 0; j < ids->count; j++) column += (size_t)fprintf(out, "%c%d", j ? ',' : ' ', ids->id[j]);
        } else if (option_text(row, options, buffer, sizeof(buffer))) {
            echo_option(out, row, option_text(row, options, buffer, sizeof(buffer)), &column);
        }
    }
    fputc('\n', out);
}

// An object with a member for the verb and for each of its options ("seq_len" for --seq-len); unset ones are null.
static void options_json(JsonOut *json, const char *key, const Options *options) {
    size_t j;
    json_object(json, key);
    json_text(json, "verb", verb_rows[options->verb].name);
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const void *field = (const char *)options + row->offset;
        const char *word = option_word(row);
        char name[64];
        if (!option_echoed(row, options->verb)) continue;
        for (j = 0; row->name[j]; j++) name[j] = row->name[j] == '-' ? '_' : row->name[j];
        name[j] = 0;
        switch (row->kind) {
        case OPTION_FLAG: json_bool(json, name, *(const int *)field); break;
        case OPTION_DOUBLE:
            if (word && isnan(*(const double *)field))
                json_text(json, name, word);
            else
                json_number(json, name, *(const double *)field);
            break;
        case OPTION_SIZE:
        case OPTION_BYTES:
            if (word && *(const size_t *)field == 0)
                json_text(json, name, word);
            else
                json_size(json, name, *(const size_t *)field);
            break;
        case OPTION_PATHS:
            json_array(json, name);
            for (j = 0; j < ((const PathList *)field)->count; j++)
                json_text(json, NULL, ((const PathList *)field)->path[j]);
            json_array_end(json);
            break;
        case OPTION_IDS:
            json_array(json, name);
            for (j = 0; j < ((const IdList *)field)->count; j++)
                json_size(json, NULL, (size_t)((const IdList *)field)->id[j]);
            json_array_end(json);
            break;
        default: json_text(json, name, *(const char *const *)field);
        }
    }
    json_object_end(json);
}

#endif
