/*
Reads and writes JSON. Reading is strict, since files are not trusted. cJSON parses; this file adds the checks that
cJSON leaves out (UTF-8, nothing after the text, keys given twice, whole numbers, a limit on the number of values and so
on memory). A text that fails a check ends the program with one line that begins with `where`, the name of the file. The
writer follows below.
*/
#ifndef LLMC_JSON_H
#define LLMC_JSON_H
#include "file.h"
#include <cjson/cJSON.h>

// Bounds the tree's memory, about 80 bytes per value. The header of a file of 100,000 tensors has half as many values.
#define JSON_VALUES_MAX ((size_t)1 << 21)

// Allocates for cJSON. Ends the program if it cannot, where cJSON would leave the value out.
static void *json_allocate(size_t bytes) {
    void *memory = realloc(NULL, bytes); // not guarded, because rewards are JSON
    if (!memory) die("out of host memory: %zu bytes wanted for JSON; free some memory", bytes);
    return memory;
}

__attribute__((constructor)) static void json_prepare(void) {
    cJSON_Hooks hooks = {json_allocate, free};
    cJSON_InitHooks(&hooks);
}

// Returns the offset of the first control character or byte that is not valid UTF-8, or length.
static size_t json_valid_until(const unsigned char *text, size_t length) {
    size_t bytes;
    for (size_t i = 0; i < length; i += bytes) {
        bytes = utf8_length(text + i, length - i);
        if (!bytes || (text[i] < 0x20 && text[i] != '\t' && text[i] != '\n' && text[i] != '\r')) return i;
    }
    return length;
}

// Tells whether text from a file may be printed in a message: it must not move the cursor or break the line.
static int json_printable(const char *text) {
    while ((unsigned char)*text >= 0x20 && *text != 0x7f) text++;
    return !*text;
}

// Checks the keys of every object of a tree. Returns what is wrong, or NULL. The recursion is bounded, because cJSON
// limits the depth of a tree.
static const char *json_keys_fault(const cJSON *value) {
    static char text[256];
    const size_t count = cJSON_IsObject(value) ? (size_t)cJSON_GetArraySize(value) : 0;
    const char **names = (const char **)checked_calloc(count, sizeof(*names), "the keys of a JSON object");
    const char *fault = NULL;
    const cJSON *child;
    size_t i = 0;
    cJSON_ArrayForEach(child, value) {
        if (child->child && !fault) fault = json_keys_fault(child);
        if (!count) continue;
        if (!json_printable(child->string)) fault = "a key has a control character; remove it";
        names[i++] = child->string;
    }
    qsort(names, count, sizeof(*names), compare_names);
    for (i = 1; i < count && !fault; i++) {
        if (strcmp(names[i - 1], names[i]) != 0) continue;
        snprintf(text, sizeof(text), "the key \"%.200s\" is given twice; remove one of the two", names[i]);
        fault = text;
    }
    free(names);
    return fault;
}

// Returns the offset of the first \u that lacks four digits or is \u0000, else length. cJSON accepts both; \u0000 would
// end a text early. A backslash outside a string is refused anyway.
static size_t json_escapes_valid_until(const char *text, size_t length) {
    for (size_t i = 0; i + 1 < length; i++) {
        if (text[i] != '\\' || text[++i] != 'u') continue;
        size_t digits = strspn(text + i + 1, "0123456789abcdefABCDEF"); // stops at the zero that ends the text
        if (digits < 4 || !memcmp(text + i + 1, "0000", 4)) return i - 1;
    }
    return length;
}

// Parses a text that consists of one object. text[length] must be readable and zero. The caller frees the tree with
// cJSON_Delete.
static cJSON *json_parse_object(const char *text, size_t length, const char *where) {
    size_t valid = json_valid_until((const unsigned char *)text, length), values = 0;
    const char *end = text;
    if (valid < length)
        die("%s: is not valid JSON: byte %zu is not UTF-8, or is a control character; correct it", where, valid);
    valid = json_escapes_valid_until(text, length);
    if (valid < length)
        die("%s: is not valid JSON: the \\u escape at byte %zu is not a character; correct it", where, valid);
    for (size_t i = 0; i < length; i++) values += text[i] == ',' || text[i] == '[' || text[i] == '{';
    if (values > JSON_VALUES_MAX)
        die("%s: has more JSON values than the limit of %zu; shorten it", where, JSON_VALUES_MAX);
    cJSON *root = cJSON_ParseWithLengthOpts(text, length + 1, &end, 1);
    if (!root) die("%s: is not valid JSON; correct the error near byte %zu", where, (size_t)(end - text));
    const char *fault = cJSON_IsObject(root) ? json_keys_fault(root) : "must be a JSON object";
    if (fault) cJSON_Delete(root); // the program may go on (die_caught)
    if (fault) die("%s: %s", where, fault);
    return root;
}

// Replaces Infinity, which Python's json writes and reads, by a number that overflows to it. Strings keep the word.
static void json_replace_infinity(char *text) {
    for (; *text; text++) {
        if (!strncmp(text, "Infinity", 8)) memcpy(text, "1e999999", 8);
        if (*text != '"') continue;
        for (text++; *text && *text != '"'; text++) text += *text == '\\' && text[1];
        if (!*text) return;
    }
}

// Parses a file of at most `limit` bytes that holds one object.
static cJSON *json_read_object(const char *path, size_t limit) {
    size_t length;
    char *text = input_read_text(path, limit, &length);
    json_replace_infinity(text);
    cJSON *root = json_parse_object(text, length, path);
    free(text);
    return root;
}

// Returns the value of a key; NULL if it is absent or null.
static const cJSON *json_get(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return item && !cJSON_IsNull(item) ? item : NULL;
}

// Tells whether a value is this text.
static int json_is(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && !strcmp(item->valuestring, text);
}

// Walks the values of a list, or one value that is none; NULL: nothing
#define JSON_EACH(value, list)                                                                                         \
    for (const cJSON *value = cJSON_IsArray(list) ? (list)->child : (list); value;                                     \
         value = value == (list) ? NULL : value->next)

static int json_whole_number(const cJSON *item, uint64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 9007199254740992.0)) return 0;
    *value = (uint64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

// Returns a scalar as text, for a message or a parser of text.
static const char *json_scalar_text(const cJSON *item, char *text, size_t size) {
    uint64_t whole;
    if (cJSON_IsString(item))
        snprintf(text, size, "%s", json_printable(item->valuestring) ? item->valuestring : "?");
    else if (cJSON_IsBool(item))
        snprintf(text, size, "%s", cJSON_IsTrue(item) ? "true" : "false");
    else if (json_whole_number(item, &whole))
        snprintf(text, size, "%llu", (unsigned long long)whole);
    else if (cJSON_IsNumber(item))
        snprintf(text, size, "%.17g", item->valuedouble);
    else
        snprintf(text, size, "%s", cJSON_IsArray(item) ? "a list" : cJSON_IsNull(item) ? "null" : "an object");
    return text;
}

/*
Writing JSON, one object or array at a time, to a FILE or into the caller's memory; nothing is allocated. The outermost
object begins with json_open or json_open_text, and ends with json_close, json_finish or json_text_end. Keys are written
as given. Text is escaped and made valid UTF-8 (invalid bytes become U+FFFD). Numbers have as many digits as are needed
to read the same value back; NaN and infinities become null. A key is NULL inside arrays and for the outermost value.
*/
typedef enum {
    JSON_LINE,    // {"a": 1, "b": 2}
    JSON_COMPACT, // {"a":1,"b":2}
    JSON_INDENTED // a line for each value, indented by two spaces a level
} JsonStyle;

typedef struct {
    FILE *file; // stream to write, or NULL
    char *text; // [room] memory to write, or NULL
    size_t room, used;
    JsonStyle style;
    size_t level;
    int comma; // a value precedes on this level
} JsonOut;

static void json_put(JsonOut *json, const char *text, size_t bytes) {
    if (json->file)
        fwrite(text, 1, bytes, json->file);
    else if (json->used + bytes <= json->room)
        memcpy(json->text + json->used, text, bytes);
    json->used += bytes;
}

// Writes a word unquoted: a number, true, null.
static void json_put_word(JsonOut *json, const char *word) { json_put(json, word, strlen(word)); }

// Escapes the first character of text[left] for a JSON string. Returns the length, at most 6. *taken: bytes of text
// used
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

static void json_line(JsonOut *json) {
    if (json->style != JSON_INDENTED) return;
    json_put(json, "\n", 1);
    for (size_t i = 0; i < json->level; i++) json_put(json, "  ", 2);
}

static void json_key(JsonOut *json, const char *key) {
    if (json->comma) json_put_word(json, json->style == JSON_LINE ? ", " : ",");
    if (json->level) json_line(json);
    json->comma = 1;
    if (!key) return;
    json_put(json, "\"", 1);
    json_put_word(json, key);
    json_put_word(json, json->style == JSON_COMPACT ? "\":" : "\": ");
}

static void json_open_level(JsonOut *json, const char *key, const char *bracket) {
    json_key(json, key);
    json_put(json, bracket, 1);
    json->level++;
    json->comma = 0;
}

static void json_close_level(JsonOut *json, const char *bracket) {
    json->level--;
    if (json->comma) json_line(json);
    json_put(json, bracket, 1);
    json->comma = 1;
}

static void json_object(JsonOut *json, const char *key) { json_open_level(json, key, "{"); }
static void json_object_end(JsonOut *json) { json_close_level(json, "}"); }
static void json_array(JsonOut *json, const char *key) { json_open_level(json, key, "["); }
static void json_array_end(JsonOut *json) { json_close_level(json, "]"); }

static void json_word(JsonOut *json, const char *key, const char *word) {
    json_key(json, key);
    json_put_word(json, word);
}

static void json_null(JsonOut *json, const char *key) { json_word(json, key, "null"); }
static void json_bool(JsonOut *json, const char *key, int value) { json_word(json, key, value ? "true" : "false"); }

static void json_number(JsonOut *json, const char *key, double value) {
    char text[32];
    json_word(json, key, isfinite(value) ? number_text(value, text) : "null");
}

static void json_numbers(JsonOut *json, const char *key, const double *values, size_t count) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) json_number(json, NULL, values[i]);
    json_array_end(json);
}

static void json_size(JsonOut *json, const char *key, size_t value) {
    char text[32];
    snprintf(text, sizeof(text), "%zu", value);
    json_word(json, key, text);
}

static void json_bytes(JsonOut *json, const char *key, const char *text, size_t bytes) {
    size_t taken;
    char out[8];
    json_key(json, key);
    json_put(json, "\"", 1);
    for (size_t i = 0; i < bytes; i += taken) {
        const size_t length = json_escape(text + i, bytes - i, out, &taken);
        json_put(json, out, length);
    }
    json_put(json, "\"", 1);
}

// Writes a text; NULL becomes null.
static void json_text(JsonOut *json, const char *key, const char *text) {
    if (text)
        json_bytes(json, key, text, strlen(text));
    else
        json_null(json, key);
}

// Begins the object of a file.
static JsonOut json_open(FILE *file) {
    JsonOut json = {.file = file};
    json_object(&json, NULL);
    return json;
}

// Begins an object in memory.
static JsonOut json_open_text(char *text, size_t room, JsonStyle style) {
    JsonOut json = {.text = text, .room = room, .style = style};
    json_object(&json, NULL);
    return json;
}

// Ends the object in memory with a newline and a zero. Returns the length; 0: it did not fit.
static size_t json_text_end(JsonOut *json) {
    json_object_end(json);
    json_put(json, "\n", 2);
    json->used--;
    return json->used < json->room ? json->used : 0;
}

// Ends the object of a file. Returns 0 if everything was written, else the error number.
static int json_close(JsonOut *json) {
    errno = 0;
    json_object_end(json);
    if (fputc('\n', json->file) != EOF && fflush(json->file) == 0 && !ferror(json->file)) return 0;
    return errno ? errno : EIO;
}

// A line of JSON that grows in memory: begun by line_open, ended by line_close. The caller frees the text.
typedef struct {
    FILE *file;
    char *text;
    size_t bytes;
    JsonOut json;
} LineOut;

static void line_open(LineOut *line) {
    memset(line, 0, sizeof(*line));
    line->file = open_memstream(&line->text, &line->bytes);
    if (!line->file) die("out of host memory for a line of JSON; free some memory");
    line->json = json_open(line->file);
}

static void line_close(LineOut *line) {
    if (json_close(&line->json) || fclose(line->file)) die("out of host memory for a line of JSON; free some memory");
}

// Ends the object on standard output. A failure ends the program.
static void json_finish(JsonOut *json) {
    int error = json_close(json);
    if (error) die("cannot write the JSON to standard output: %s", error_text(error));
}

#endif
