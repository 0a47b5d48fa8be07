/*
Regular expressions of adapter_config.json, matched against whole names of modules. PEFT uses Python's regular
expressions, which PCRE2 can read. A pattern of text and dots (a dot matches any character) is compared without PCRE2.
*/
#ifndef LLMC_PATTERN_H
#define LLMC_PATTERN_H
#include "utils.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// Tells whether a pattern consists only of text and dots.
static int pattern_is_plain(const char *pattern) { return !pattern[strcspn(pattern, "\\^$*+?{}[]()|")]; }

// Tells whether PCRE2 matches the whole text. tail: it may also match what follows a dot ("b.c" or "c" of "a.b.c").
// PCRE2's match limit ends a runaway pattern.
static int pattern_search(const char *pattern, const char *text, int tail, const char *what, int code) {
    const size_t room = strlen(pattern) + 64;
    char *whole = (char *)checked_malloc(room, "a regular expression"), said[128];
    int error;
    size_t at;
    snprintf(whole, room, tail ? "(*LIMIT_MATCH=1000000)(?:.*\\.)?(?:%s)" : "(*LIMIT_MATCH=1000000)(?:%s)", pattern);
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)whole, PCRE2_ZERO_TERMINATED,
                      PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &at, NULL);
    free(whole);
    if (!compiled) {
        pcre2_get_error_message(error, (PCRE2_UCHAR *)said, sizeof(said));
        die_with(code, "%s: '%.200s' is not a regular expression: %s", what, pattern, said);
    }
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    const int found = pcre2_match(compiled, (PCRE2_SPTR)text, strlen(text), 0, 0, match, NULL);
    pcre2_match_data_free(match), pcre2_code_free(compiled);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH)
        die_with(code, "%s: '%.200s' takes too long to match; write it without nested repetitions", what, pattern);
    return found >= 0;
}

// Tells whether a pattern matches the whole text, like Python's re.fullmatch. tail: it may also match what follows a
// dot ("b.c" or "c" of "a.b.c"). Error messages begin with `what`; the exit code is `code`.
static int pattern_matches(const char *pattern, const char *text, int tail, const char *what, int code) {
    const size_t length = strlen(pattern), all = strlen(text);
    if (!pattern_is_plain(pattern)) return pattern_search(pattern, text, tail, what, code);
    if (length > all || (length < all && (!tail || text[all - length - 1] != '.'))) return 0;
    for (size_t i = 0; i < length; i++)
        if (pattern[i] != '.' && pattern[i] != text[all - length + i]) return 0;
    return 1;
}

#endif
