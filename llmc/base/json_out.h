/*
Writing JSON to a FILE, one object or array at a time. Keys are written as given, text is escaped and made valid UTF-8
(bytes that are not become U+FFFD), numbers have as many digits as are needed to read the same value back, and what JSON
has no number for (NaN, infinities) becomes null. A key is NULL inside arrays and for the outermost value.
*/
#ifndef LLMC_JSON_OUT_H
#define LLMC_JSON_OUT_H
#include "utils.h"

typedef struct {
    FILE *file;
    int comma; // a value came before on this level
} JsonOut;

static JsonOut json_open(FILE *file) {
    JsonOut json;
    json.file = file;
    json.comma = 0;
    return json;
}

// The character at the beginning of text[left] as it stands in a JSON string: its bytes, at most 6. *taken: of the text
static size_t json_escape(const char *text, size_t left, char out[8], size_t *taken) {
    const unsigned char c = (unsigned char)*text;
    size_t length = utf8_length((const unsigned char *)text, left);
    *taken = length ? length : 1;
    if (length == 0) return (size_t)snprintf(out, 8, "\\ufffd");
    if (c == '"' || c == '\\') return (size_t)snprintf(out, 8, "\\%c", c);
    if (c == '\n') return (size_t)snprintf(out, 8, "\\n");
    if (c == '\t') return (size_t)snprintf(out, 8, "\\t");
    if (c < 0x20 || c == 0x7f) return (size_t)snprintf(out, 8, "\\u%04x", c);
    memcpy(out, text, length);
    return length;
}

static void json_quote(FILE *file, const char *text, size_t bytes) {
    size_t taken;
    char out[8];
    fputc('"', file);
    for (size_t i = 0; i < bytes; i += taken) fwrite(out, 1, json_escape(text + i, bytes - i, out, &taken), file);
    fputc('"', file);
}

static void json_key(JsonOut *json, const char *key) {
    if (json->comma) fputs(", ", json->file);
    json->comma = 1;
    if (key) fprintf(json->file, "\"%s\": ", key);
}

static void json_open_level(JsonOut *json, const char *key, char bracket) {
    json_key(json, key);
    fputc(bracket, json->file);
    json->comma = 0;
}

static void json_close_level(JsonOut *json, char bracket) {
    fputc(bracket, json->file);
    json->comma = 1;
}

static void json_object(JsonOut *json, const char *key) { json_open_level(json, key, '{'); }
static void json_object_end(JsonOut *json) { json_close_level(json, '}'); }
static void json_array(JsonOut *json, const char *key) { json_open_level(json, key, '['); }
static void json_array_end(JsonOut *json) { json_close_level(json, ']'); }

static void json_null(JsonOut *json, const char *key) {
    json_key(json, key);
    fputs("null", json->file);
}

// The shortest of %.15g, %.16g and %.17g that reads back as the same number.
static const char *number_text(double value, char text[32]) {
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    return text;
}

static void json_number(JsonOut *json, const char *key, double value) {
    char text[32];
    if (!isfinite(value)) {
        json_null(json, key);
        return;
    }
    json_key(json, key);
    fputs(number_text(value, text), json->file);
}

static void json_numbers(JsonOut *json, const char *key, const double *values, size_t count) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) json_number(json, NULL, values[i]);
    json_array_end(json);
}

static void json_size(JsonOut *json, const char *key, size_t value) {
    json_key(json, key);
    fprintf(json->file, "%zu", value);
}

static void json_bool(JsonOut *json, const char *key, int value) {
    json_key(json, key);
    fputs(value ? "true" : "false", json->file);
}

static void json_bytes(JsonOut *json, const char *key, const char *text, size_t bytes) {
    json_key(json, key);
    json_quote(json->file, text, bytes);
}

// NULL becomes null.
static void json_text(JsonOut *json, const char *key, const char *text) {
    if (!text)
        json_null(json, key);
    else
        json_bytes(json, key, text, strlen(text));
}

// Ends the outermost value's line. Returns 0 when the file took everything, otherwise the error number.
static int json_close(JsonOut *json) {
    errno = 0;
    if (fputc('\n', json->file) != EOF && fflush(json->file) == 0 && !ferror(json->file)) return 0;
    return errno ? errno : EIO;
}

// The same for standard output, where a failure ends the program.
static void json_finish(JsonOut *json) {
    int error = json_close(json);
    if (error) die("cannot write the JSON to standard output: %s", strerror(error));
}

#endif
