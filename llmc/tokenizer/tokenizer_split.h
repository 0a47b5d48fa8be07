/*
Regular expressions of pre-tokenizers, which PCRE2 runs. They see each character as one byte, its symbol. Characters
that the patterns do not distinguish have the same symbol. The tokenizer file lists the symbols (`classes`) as the
library sees them with which the tokenizer was made. So words are equal with any version of PCRE2 and of its Unicode
tables, and no match reads UTF-8.

    split_open    compiles a pattern, by JIT where PCRE2 has one
    split_next    finds the next match, with Hugging Face's rule for empty matches

A match of more than 10 million steps plus 64 per character ends the program with one line.
*/
#ifndef LLMC_TOKENIZER_SPLIT_H
#define LLMC_TOKENIZER_SPLIT_H
#include "llmc/base/utils.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// Treatment of matches, in the order of BEHAVIOURS in data/split_patterns.py
typedef enum {
    SPLIT_ISOLATED,
    SPLIT_REMOVED,
    SPLIT_CONTIGUOUS,
    SPLIT_MERGED_WITH_PREVIOUS,
    SPLIT_MERGED_WITH_NEXT,
    SPLIT_BEHAVIOURS
} SplitBehaviour;
enum { SPLIT_INVERTED = 1 << 8 }; // flag: text between matches counts as a match, and matches as text between

typedef struct {
    SplitBehaviour behaviour;
    int inverted;
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    pcre2_jit_stack *stack;
} Split;

// ---- patterns of files that name theirs -----------------------------------------------------------------------------
// Symbols. An ASCII character is its own symbol. Other characters have 0x80 plus a class: letter 1 (and capital 0x10,
// small 0x20, caseless 0x40), mark 2, number 4, space 8, none 0. U+017F, an s in another case, has 0xff.
#define CUT_SPACE  "\\x09-\\x0d \\x88"
#define CUT_NUMBER "0-9\\x84"
#define CUT_LETTER "A-Za-z\\x81\\x91\\xa1\\xc1\\xff"
#define CUT_UPPER  "A-Z\\x91\\xc1\\x82"      // with titlecase and caseless letters, and marks
#define CUT_LOWER  "a-z\\xa1\\xff\\xc1\\x82" // with caseless letters and marks
#define CUT_SUFFIX "(?i:'[s\\xff]|'t|'re|'ve|'m|'ll|'d)"
#define CUT_FIRST  "[^\\r\\n" CUT_LETTER CUT_NUMBER "]?"
#define CUT_BLANKS "[" CUT_SPACE "]+(?![^" CUT_SPACE "])|[" CUT_SPACE "]+"
#define CUT_LINES  "[" CUT_SPACE "]*[\\r\\n]+|" CUT_BLANKS
#define CUT_LLAMA3(letter, digits)                                                                                     \
    CUT_SUFFIX "|" CUT_FIRST "[" letter "]+|[" CUT_NUMBER "]" digits "| ?[^" CUT_SPACE CUT_NUMBER letter               \
               "]+[\\r\\n]*|" CUT_LINES
#define CUT_CASED(suffix, digits)                                                                                      \
    CUT_FIRST "[" CUT_UPPER "]*[" CUT_LOWER "]+" suffix "|" CUT_FIRST "[" CUT_UPPER "]+[" CUT_LOWER "]*" suffix        \
              "|[" CUT_NUMBER "]" digits "| ?[^" CUT_SPACE CUT_LETTER CUT_NUMBER "]+[\\r\\n/]*|" CUT_LINES

// Patterns in the order of WordsKind; NULL: none
static const char *const named_patterns[] = {
    NULL,
    "'s|'t|'re|'ve|'m|'ll|'d| ?[" CUT_LETTER "]+| ?[" CUT_NUMBER "]+| ?[^" CUT_SPACE CUT_LETTER CUT_NUMBER
    "]+|" CUT_BLANKS,
    CUT_LLAMA3(CUT_LETTER, "{1,3}"),
    CUT_LLAMA3(CUT_LETTER, ""),
    CUT_LLAMA3(CUT_LETTER "\\x82", ""),
    NULL,
    NULL,
    NULL,
    CUT_CASED("", ""),
    CUT_CASED(CUT_SUFFIX "?", "{1,3}"),
};

// ---- compile, match -------------------------------------------------------------------------------------------------
// Compiles a pattern. path: the tokenizer file; number: the pattern's index in it, for errors
static Split split_open(const char *pattern, size_t bytes, uint32_t behaviour, const char *path, size_t number) {
    Split split = {
        (SplitBehaviour)(behaviour % SPLIT_INVERTED), behaviour / SPLIT_INVERTED == 1, NULL, NULL, NULL, NULL};
    char why[128];
    int error;
    size_t at;
    split.code = pcre2_compile((PCRE2_SPTR)pattern, bytes, PCRE2_NEVER_UTF, &error, &at, NULL);
    if (!split.code) {
        pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof(why));
        die("%s: PCRE2 cannot read pattern %zu of its pre-tokenizer: %s, at byte %zu of %zu; write the tokenizer file "
            "again",
            path, number, why, at, bytes);
    }
    split.match = pcre2_match_data_create_from_pattern(split.code, NULL);
    split.limits = pcre2_match_context_create(NULL);
    split.stack =
        pcre2_jit_compile(split.code, PCRE2_JIT_COMPLETE) ? NULL : pcre2_jit_stack_create(1 << 15, 1 << 26, NULL);
    if (!split.match || !split.limits)
        die("%s: no memory for the patterns of its pre-tokenizer; free some memory", path);
    if (split.stack) pcre2_jit_stack_assign(split.limits, NULL, split.stack);
    return split;
}

static void split_close(Split *split) {
    pcre2_jit_stack_free(split->stack), pcre2_match_context_free(split->limits);
    pcre2_match_data_free(split->match), pcre2_code_free(split->code);
}

// Finds the first match from `from` on and stores it in place[2]. An empty match at the end of the last match does not
// count (last SIZE_MAX: there was no match).
static int split_next(Split *split, const unsigned char *coded, size_t count, size_t from, size_t last, size_t place[2],
                      const char *path) {
    pcre2_set_match_limit(split->limits, (uint32_t)min_size(10000000 + 64 * count, UINT32_MAX));
    for (; from <= count; from++) {
        const int found = split->stack
                              ? pcre2_jit_match(split->code, coded, count, from, 0, split->match, split->limits)
                              : pcre2_match(split->code, coded, count, from, 0, split->match, split->limits);
        if (found == PCRE2_ERROR_NOMATCH) return 0;
        if (found < 0) {
            char why[128];
            pcre2_get_error_message(found, (PCRE2_UCHAR *)why, sizeof(why));
            die("%s: its pre-tokenizer's pattern fails at character %zu of %zu: %s; write it without nested "
                "repetitions",
                path, from, count, why);
        }
        memcpy(place, pcre2_get_ovector_pointer(split->match), 2 * sizeof(*place));
        if (place[0] < from || place[1] < place[0])
            die("%s: its pre-tokenizer's pattern matches backwards; write it without \\K", path);
        if (place[0] < place[1] || place[1] != last) return 1;
    }
    return 0;
}

#endif
