/*
Regular expressions of pre-tokenizers, which PCRE2 runs. They see one byte a character, its symbol: characters that no
part of the patterns tells apart have the same one. A tokenizer file says which (`classes`), as the library that the
tokenizer was made with sees them. So words are the same to the character with any PCRE2, whatever its Unicode version,
and no match reads UTF-8.

    split_open    compiles a pattern, by JIT where PCRE2 has one
    split_next    the next match, empty ones as Hugging Face's library takes them

Limit: a match of more than 10 million steps, and 64 for each character, ends the program with one line.
*/
#ifndef LLMC_TOKENIZER_SPLIT_H
#define LLMC_TOKENIZER_SPLIT_H
#include "llmc/base/utils.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// What becomes of matches, in the order of BEHAVIOURS in data/split_patterns.py.
typedef enum {
    SPLIT_ISOLATED,
    SPLIT_REMOVED,
    SPLIT_CONTIGUOUS,
    SPLIT_MERGED_WITH_PREVIOUS,
    SPLIT_MERGED_WITH_NEXT,
    SPLIT_BEHAVIOURS
} SplitBehaviour;
enum { SPLIT_INVERTED = 1 << 8 }; // what is between the matches takes their place

typedef struct {
    SplitBehaviour behaviour;
    int inverted;
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    pcre2_jit_stack *stack;
} Split;

// ---- patterns of files that name theirs -----------------------------------------------------------------------------
// Their symbols: ASCII stands for itself, others are 0x80 | CLASS_..., but 0xff is U+017F, an s in another case.
#define SPACE  "\\x09-\\x0d \\x88"
#define NUMBER "0-9\\x84"
#define LETTER "A-Za-z\\x81\\x91\\xa1\\xc1\\xff"
#define UPPER  "A-Z\\x91\\xc1\\x82"      // with titlecase, caseless letters and marks
#define LOWER  "a-z\\xa1\\xff\\xc1\\x82" // with caseless letters and marks
#define SUFFIX "(?i:'[s\\xff]|'t|'re|'ve|'m|'ll|'d)"
#define FIRST  "[^\\r\\n" LETTER NUMBER "]?"
#define BLANKS "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define LINES  "[" SPACE "]*[\\r\\n]+|" BLANKS
#define LLAMA3(letter, digits)                                                                                         \
    SUFFIX "|" FIRST "[" letter "]+|[" NUMBER "]" digits "| ?[^" SPACE NUMBER letter "]+[\\r\\n]*|" LINES
#define CASED(suffix, digits)                                                                                          \
    FIRST "[" UPPER "]*[" LOWER "]+" suffix "|" FIRST "[" UPPER "]+[" LOWER "]*" suffix "|[" NUMBER "]" digits         \
          "| ?[^" SPACE LETTER NUMBER "]+[\\r\\n/]*|" LINES

// In the order of WordsKind; NULL: none
static const char *const named_patterns[] = {
    NULL,
    "'s|'t|'re|'ve|'m|'ll|'d| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER "]+|" BLANKS,
    LLAMA3(LETTER, "{1,3}"),
    LLAMA3(LETTER, ""),
    LLAMA3(LETTER "\\x82", ""),
    NULL,
    NULL,
    NULL,
    CASED("", ""),
    CASED(SUFFIX "?", "{1,3}"),
};

// ---- compile, match -------------------------------------------------------------------------------------------------
// path, number: of the file and of the pattern in it, for errors.
static Split split_open(const char *pattern, size_t bytes, uint32_t behaviour, const char *path, size_t number) {
    Split split = {
        (SplitBehaviour)(behaviour % SPLIT_INVERTED), behaviour / SPLIT_INVERTED == 1, NULL, NULL, NULL, NULL};
    char why[128];
    int error;
    size_t at;
    split.code = pcre2_compile((PCRE2_SPTR)pattern, bytes, PCRE2_NEVER_UTF, &error, &at, NULL);
    if (!split.code) {
        pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof(why));
        die("%s: PCRE2 cannot read pattern %zu of its pre-tokenizer: %s, at byte %zu of %zu", path, number, why, at,
            bytes);
    }
    split.match = pcre2_match_data_create_from_pattern(split.code, NULL);
    split.limits = pcre2_match_context_create(NULL);
    split.stack =
        pcre2_jit_compile(split.code, PCRE2_JIT_COMPLETE) ? NULL : pcre2_jit_stack_create(1 << 15, 1 << 26, NULL);
    if (!split.match || !split.limits) die("%s: no memory for the patterns of its pre-tokenizer", path);
    if (split.stack) pcre2_jit_stack_assign(split.limits, NULL, split.stack);
    return split;
}

static void split_close(Split *split) {
    pcre2_jit_stack_free(split->stack), pcre2_match_context_free(split->limits);
    pcre2_match_data_free(split->match), pcre2_code_free(split->code);
}

// The first match at `from` or behind it. An empty one where the last match ended (SIZE_MAX: none) does not count.
static int split_next(Split *split, const unsigned char *coded, size_t count, size_t from, size_t last, size_t place[2],
                      const char *path) {
    for (; from <= count; from++) {
        const int found = split->stack
                              ? pcre2_jit_match(split->code, coded, count, from, 0, split->match, split->limits)
                              : pcre2_match(split->code, coded, count, from, 0, split->match, split->limits);
        if (found == PCRE2_ERROR_NOMATCH) return 0;
        if (found < 0) {
            char why[128];
            pcre2_get_error_message(found, (PCRE2_UCHAR *)why, sizeof(why));
            die("%s: its pre-tokenizer's pattern gives up on a text of %zu characters, at character %zu: %s; "
                "repetitions "
                "within repetitions take so long",
                path, count, from, why);
        }
        memcpy(place, pcre2_get_ovector_pointer(split->match), 2 * sizeof(*place));
        if (place[0] < from || place[1] < place[0]) die("%s: its pre-tokenizer's pattern matches backwards", path);
        if (place[0] < place[1] || place[1] != last) return 1;
    }
    return 0;
}

#endif
