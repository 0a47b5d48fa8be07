/*
Text: strict parsing of numbers, readable printing of numbers, UTF-8, and text in parts that may end within a character.
*/
#ifndef LLMC_TEXT_H
#define LLMC_TEXT_H
#include "utils.h"

// Joins three numbers, which may be macros, to a text: "2.18.1"
#define VERSION_TEXT(major, minor, patch) VERSION_WORD(major) "." VERSION_WORD(minor) "." VERSION_WORD(patch)
#define VERSION_WORD(number)              #number

// ---- numbers: the whole text must be one number, or 0 is returned -------------------------------------------------
static int parse_size(const char *text, size_t *value) {
    char *end;
    if (*text < '0' || *text > '9') return 0;
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (errno || *end) return 0;
    *value = (size_t)parsed;
    return 1;
}

static int parse_double(const char *text, double *value) {
    char *end;
    if (!((*text >= '0' && *text <= '9') || *text == '-' || *text == '.')) return 0;
    if (strpbrk(text, "xX")) return 0;
    errno = 0;
    *value = strtod(text, &end);
    return *end == 0 && isfinite(*value);
}

// Parses "32k", "1.5M". k multiplies by `thousand`, M by the square of `thousand`.
static int parse_count(const char *text, size_t thousand, size_t *value) {
    char digits[24];
    double part;
    const size_t length = strcspn(text, "kKM"), unit = !text[length]         ? 1
                                                       : text[length] == 'M' ? thousand * thousand
                                                                             : thousand;
    if (length >= sizeof(digits) || (text[length] && text[length + 1])) return 0;
    snprintf(digits, sizeof(digits), "%.*s", (int)length, text);
    if (unit > 1 && strspn(digits, "0123456789.") == length && parse_double(digits, &part) && part < 1e9)
        return *value = (size_t)(part * (double)unit + 0.5), 1;
    if (!parse_size(digits, value) || *value > SIZE_MAX / unit) return 0;
    *value *= unit;
    return 1;
}

// Parses "90s", "30min", "2h", "1.5d" into seconds, fewer than 1e9.
static int parse_seconds(const char *text, double *seconds) {
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"s", 1}, {"min", 60}, {"m", 60}, {"h", 3600}, {"d", 86400}};
    char number[32];
    const size_t digits = strspn(text, "0123456789.");
    if (!digits || digits >= sizeof(number)) return 0;
    snprintf(number, sizeof(number), "%.*s", (int)digits, text);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(text + digits, units[i].name) != 0 || !parse_double(number, seconds)) continue;
        *seconds *= units[i].seconds;
        return *seconds < 1e9;
    }
    return 0;
}

static int parse_bool(const char *text, int *value) {
    if (!strcmp(text, "true") || !strcmp(text, "True") || !strcmp(text, "1")) return *value = 1, 1;
    if (!strcmp(text, "false") || !strcmp(text, "False") || !strcmp(text, "0")) return *value = 0, 1;
    return 0;
}

// Parses "80GiB", "78.5GB", "900MiB", "1024" into bytes.
static int parse_bytes(const char *text, size_t *bytes) {
    static const char *const units[] = {"", "B", "KiB", "MiB", "GiB", "TiB", "K", "M", "G", "KB", "MB", "GB", "TB"};
    static const double factors[] = {1, 1, 0x1p10, 0x1p20, 0x1p30, 0x1p40, 0x1p10, 0x1p20, 0x1p30, 1e3, 1e6, 1e9, 1e12};
    char *end;
    if (!((*text >= '0' && *text <= '9') || *text == '.') || strpbrk(text, "xX")) return 0;
    double number = strtod(text, &end);
    while (*end == ' ') end++;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcasecmp(end, units[i]) != 0) continue;
        number *= factors[i];
        if (!(number >= 0 && number < 9e18)) return 0;
        *bytes = (size_t)number;
        return 1;
    }
    return 0;
}

// Prints the shortest of %.15g, %.16g and %.17g that reads back as the same number.
static const char *number_text(double value, char text[32]) {
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    return text;
}

// ---- numbers for people ---------------------------------------------------------------------------------------------
// Prints `value` in the first of units[count] in which it is below `most`; each unit is `base` times the unit before.
// whole: format for the first unit. Results rotate through static buffers, so that several fit in one printf.
static const char *human(double value, double base, double most, const char *const *units, size_t count,
                         const char *whole, const char *format) {
    static char buffers[16][32];
    static int next;
    char *out = buffers[next++ % 16];
    size_t unit = 0;
    while (value >= most && unit + 1 < count) value /= base, unit++;
    snprintf(out, sizeof(buffers[0]), unit ? format : whole, value, units[unit]);
    return out;
}

// Prints "1.25 GiB".
static const char *human_bytes(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    return human(bytes, 1024, 1024, units, 6, "%.0f %s", "%.2f %s");
}

// Prints "8.19 B" for 8190735360.
static const char *human_count(double count) {
    static const char *const units[] = {"", " k", " M", " B", " T"};
    return human(count, 1000, 1000, units, 5, "%.0f%s", "%.2f%s");
}

static const char *human_flops(double flops) {
    static const char *const units[] = {"", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP", " ZFLOP"};
    return human(flops, 1000, 1000, units, 8, "%.2f%s", "%.2f%s");
}

// Prints a number in 1 + `width` columns, the first for the sign: with as many decimals as fit, or with an exponent if
// it is below 0.001 or too large.
static const char *human_fixed(double value, int width) {
    static char buffers[16][32];
    static int next;
    char *out = buffers[next++ % 16], text[32] = "";
    const double size = fabs(value);
    const int exponent = isfinite(value) && size != 0 && (size < 1e-3 || size >= pow(10, width) - 0.5);
    for (int decimals = exponent ? width - 5 : width - 1; decimals >= 0; decimals--) {
        snprintf(text, sizeof(text), exponent ? "%s%.*e" : "%s%.*f", value < 0 ? "-" : "", decimals, size);
        if ((int)strlen(text) <= width + (value < 0)) break;
    }
    snprintf(out, sizeof(buffers[0]), "%*.31s", width + 1, text);
    return out;
}

// A line that is built before it is printed
typedef struct {
    char text[512];
    size_t used;
} TextLine;

__attribute__((format(printf, 2, 3))) static void line_add(TextLine *line, const char *format, ...) {
    char column[256];
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(column, sizeof(column), format, args);
    va_end(args);
    if (length < 0 || line->used + (size_t)length >= sizeof(line->text)) return;
    memcpy(line->text + line->used, column, (size_t)length + 1);
    line->used += (size_t)length;
}

// Prints "8 s", "3 min 20 s", "2 h 05 min", "3 d 04 h".
static const char *human_seconds(double seconds) {
    static char buffers[4][32];
    static int next;
    char *text = buffers[next++ % 4];
    unsigned long s = seconds > 0 && seconds < 1e9 ? (unsigned long)(seconds + 0.5) : 0;
    if (!(seconds < 1e9))
        snprintf(text, 32, "?");
    else if (s < 60)
        snprintf(text, 32, "%lu s", s);
    else if (s < 3600)
        snprintf(text, 32, "%lu min %02lu s", s / 60, s % 60);
    else if (s < 86400)
        snprintf(text, 32, "%lu h %02lu min", s / 3600, s / 60 % 60);
    else
        snprintf(text, 32, "%lu d %02lu h", s / 86400, s / 3600 % 24);
    return text;
}

// ---- spelling -------------------------------------------------------------------------------------------------------
#define SPELLING_MOST 32

// Counts the insertions, deletions, substitutions and swaps of neighbours that turn a into b. Long words: returns a
// large number
static size_t spelling_distance(const char *a, const char *b) {
    size_t d[SPELLING_MOST + 1][SPELLING_MOST + 1], m = strlen(a), n = strlen(b); // d[i][j]: distance of the first i
                                                                                  // and j letters
    if (m > SPELLING_MOST || n > SPELLING_MOST) return SIZE_MAX;
    for (size_t i = 0; i <= m; i++) d[i][0] = i;
    for (size_t j = 0; j <= n; j++) d[0][j] = j;
    for (size_t i = 1; i <= m; i++) {
        for (size_t j = 1; j <= n; j++) {
            d[i][j] = min_size(min_size(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = min_size(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[m][n];
}

// Replaces *nearest, at distance *best (start with NULL, SIZE_MAX), by `name` if that is nearer to what was typed and
// near enough to suggest. A name that `typed` begins has distance 0.
static void spelling_compare(const char *typed, const char *name, const char **nearest, size_t *best) {
    const size_t length = strlen(typed), begins = length >= 2 && !strncmp(typed, name, length);
    const size_t distance = begins ? 0 : spelling_distance(typed, name);
    if (distance < *best && distance <= max_size(length / 3, 1)) *best = distance, *nearest = name;
}

// Returns "; did you mean BEFORE NEAREST?" to end a message; "" if nearest is NULL.
static const char *did_you_mean(const char *before, const char *nearest) {
    static char text[96];
    *text = 0;
    if (nearest) snprintf(text, sizeof(text), "; did you mean %.2s%.64s?", before, nearest);
    return text;
}

// ---- words ----------------------------------------------------------------------------------------------------------
// Tells whether `text` is one of the words in "a|b|c".
static int text_is_one_of(const char *text, const char *words) {
    for (size_t length = strlen(text);; words++) {
        const size_t word = strcspn(words, "|");
        if (word == length && !memcmp(words, text, length)) return 1;
        words += word;
        if (!*words) return 0;
    }
}

// Returns the index of `text` in "a|b|c", or -1.
static int word_index(const char *words, const char *text) {
    for (int i = 0; *words; i++) {
        const size_t length = strcspn(words, "|");
        if (length == strlen(text) && !strncasecmp(words, text, length)) return i;
        words += length + (words[length] != 0);
    }
    return -1;
}

// Compares for qsort of structs that begin with a char array, or of char arrays.
static int compare_texts(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

// Compares for qsort of structs that begin with a pointer to text, or of pointers to text.
static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int text_ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

// ---- UTF-8 in parts -------------------------------------------------------------------------------------------------
/*
Passes on text that arrives in parts, to a file or into memory, but only whole characters. Invalid bytes become U+FFFD,
one for each stretch that began as a character (Unicode's recommended practice); so does an incomplete character at the
end. The caller provides the memory: three times the input suffices.
*/
typedef struct {
    FILE *file;            // stream to write, or NULL
    char *memory;          // [bytes] memory to write, or NULL
    size_t bytes;          // bytes passed on so far
    unsigned char part[4]; // the beginning of an incomplete character
    size_t count;
} TextOut;

static TextOut text_out_to(FILE *file, char *memory) {
    TextOut out = {0};
    out.file = file, out.memory = memory;
    return out;
}

static void text_out_pass(TextOut *out, const void *text, size_t bytes) {
    if (out->file)
        fwrite(text, 1, bytes, out->file);
    else
        memcpy(out->memory + out->bytes, text, bytes);
    out->bytes += bytes;
}

// Tells whether more bytes can complete part[count] to a character. Tries the lowest and the highest continuation.
static int is_beginning_of_character(const unsigned char *part, size_t count) {
    static const unsigned char ends[] = {0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf};
    unsigned char whole[4] = {0, 0x80, 0x80, 0x80};
    if (count >= 4) return 0;
    memcpy(whole, part, count);
    if (count > 1) return utf8_length(whole, 4) > count;
    for (size_t i = 0; i < sizeof(ends); i++) {
        whole[1] = ends[i];
        if (utf8_length(whole, 4) > 1) return 1;
    }
    return 0;
}

static void text_out(TextOut *out, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        out->part[out->count++] = (unsigned char)text[i];
        if (utf8_length(out->part, out->count)) {
            text_out_pass(out, out->part, out->count);
            out->count = 0;
        } else if (!is_beginning_of_character(out->part, out->count)) {
            text_out_pass(out, "\xef\xbf\xbd", 3);
            if (out->count > 1) i--; // the last byte may be the start of a character
            out->count = 0;
        }
    }
}

static void text_out_end(TextOut *out) {
    if (out->count) text_out_pass(out, "\xef\xbf\xbd", 3);
    out->count = 0;
}

#endif
