/*
A conversation as the tokenizer's chat template writes it: fixed text of the tokenizer file around the user's text. The
whole text is encoded, including special tokens, so its ids equal the ids from transformers' apply_chat_template.

    chat_turn            ids of a user's turn and of the opening of an answer, to follow earlier turns
    chat_append_turn     a user's turn as text, without the opening of the answer
    chat_append_answer   an answer as the template writes it before further turns
    chat_append_kept     the same for an answer that includes its opening
    chat_encode          ids of a text of turns, with the opening of the next answer

The opening is text at the start of an answer that the template drops once further turns follow, for example "<think>\n"
of a model that reasons. Some templates also drop the reasoning from old answers (chat_forgets) and so change text that
was encoded before. The text of all turns is then kept, and encoded anew for each turn. Reasoning ends with "</think>"
or the tokenizer file's own mark.
*/
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H
#include "tokenizer.h"

static void chat_append_section(Scratch *text, const Tokenizer *t, TokenizerSection section) {
    scratch_append(text, t->section[section], t->section_bytes[section]);
}

// Tells whether Python's str.strip removes the character; templates trim with str.strip.
static int is_trimmed_away(uint32_t c) { return is_white_space(c) || (c >= 0x1c && c <= 0x1f); }

static void chat_append_text(Scratch *to, const char *text, size_t bytes, int trim) {
    const unsigned char *at = (const unsigned char *)text;
    size_t begin = 0, end = 0, length, kept = 0;
    for (size_t i = 0; i < bytes; i += length) {
        if (is_trimmed_away(character_at(at, bytes, i, &length))) continue;
        if (!kept++) begin = i;
        end = i + length;
    }
    scratch_append(to, trim ? text + begin : text, trim ? end - begin : bytes);
}

// Request to a model that reasons, in the order of --thinking's words
typedef enum { THINKING_AUTO, THINKING_ON, THINKING_OFF } Thinking;

static int chat_forgets(const Tokenizer *t) { return (t->flags & TOKENIZER_FORGETS) != 0; }

static TokenizerSection chat_opening(Thinking thinking) {
    return thinking == THINKING_ON    ? SECTION_THINKING_ON
           : thinking == THINKING_OFF ? SECTION_THINKING_OFF
                                      : SECTION_OPENING;
}

static const char *chat_thought_end(const Tokenizer *t, size_t *bytes) {
    static const char usual[] = "</think>";
    const size_t own = t->section_bytes[SECTION_THOUGHT_END];
    *bytes = own ? own : sizeof(usual) - 1;
    return own ? (const char *)t->section[SECTION_THOUGHT_END] : usual;
}

// Returns the part of the opening that is shown before the answer: all of it if reasoning continues after it, else
// nothing.
static size_t chat_shown_opening(const Tokenizer *t, Thinking thinking, const char **text) {
    const TokenizerSection section = chat_opening(thinking);
    size_t length;
    const char *end = chat_thought_end(t, &length);
    *text = (const char *)t->section[section];
    return memmem(*text, t->section_bytes[section], end, length) ? 0 : t->section_bytes[section];
}

// Returns which request the template cannot fulfil, as text, and in *option the option to blame. NULL: it can fulfil
// all.
static const char *chat_fault(const Tokenizer *t, int system, Thinking thinking, int turns, const char **option) {
    static char text[PATH_MAX + 640];
    const int encodes = (t->flags & TOKENIZER_ENCODES) != 0, thinks = (t->flags & TOKENIZER_THINKING) != 0;
    const char *reason = tokenizer_message(t, encodes ? SECTION_CHAT_REASON : SECTION_REASON);
    const struct {
        int refused;
        const char *option, *before, *after;
    } rules[] = {
        {!encodes, "--chat", "decodes only, ", ""},
        {!(t->flags & TOKENIZER_CHAT), "--chat", "", "; give a plain prompt"},
        {system && !(t->flags & TOKENIZER_CHAT_SYSTEM), "--system", "", "; leave the system message out"},
        {thinking != THINKING_AUTO && !thinks, "--thinking",
         *reason ? "no enable_thinking in its chat template: " : "no enable_thinking in its chat template",
         "; leave it out, or write an older file again with data/tokenizer_file.py"},
        {turns && !(t->flags & TOKENIZER_CHAT_NEXT), "--chat for several turns", "", "; give one turn as a prompt"},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        if (!rules[i].refused) continue;
        snprintf(text, sizeof(text), "%s: %s%s%s", t->path, rules[i].before, reason, rules[i].after);
        *option = rules[i].option;
        return text;
    }
    return NULL;
}

// Refuses requests that the template cannot fulfil.
static void chat_check(const Tokenizer *t, const char *system, Thinking thinking, int turns) {
    const char *option, *fault = chat_fault(t, system != NULL, thinking, turns, &option);
    if (fault) die_usage("%s: %s", option, fault);
}

// Appends a user's turn. Before the first turn it appends the beginning of the chat, before each later turn the end of
// the previous answer.
static void chat_append_turn(Scratch *text, const Tokenizer *t, const char *system, const char *user, size_t bytes,
                             int first) {
    int trim_user = (t->flags & TOKENIZER_TRIM_USER) != 0, trim_system = (t->flags & TOKENIZER_TRIM_SYSTEM) != 0;
    chat_append_section(text, t, !first ? SECTION_NEXT_BEFORE : system ? SECTION_SYSTEM_BEFORE : SECTION_FIRST_BEFORE);
    if (first && system) {
        chat_append_text(text, system, strlen(system), trim_system);
        chat_append_section(text, t, SECTION_SYSTEM_BETWEEN);
    }
    chat_append_text(text, user, bytes, trim_user);
    chat_append_section(text, t, !first ? SECTION_NEXT_AFTER : system ? SECTION_SYSTEM_AFTER : SECTION_FIRST_AFTER);
}

// Appends answer[bytes], trimmed, without stretches from a mark where reasoning begins to the mark where it ends.
static void chat_append_between_thoughts(Scratch *text, const Tokenizer *t, const unsigned char *answer, size_t bytes) {
    const size_t begins = t->section_bytes[SECTION_THOUGHT_BEGIN];
    size_t length;
    const char *end = chat_thought_end(t, &length);
    Scratch whole = {NULL, 0, 0};
    while (bytes) {
        const unsigned char *stop = (const unsigned char *)memmem(answer, bytes, end, length);
        const size_t part = stop ? (size_t)(stop - answer) : bytes;
        const void *begin = memmem(answer, part, t->section[SECTION_THOUGHT_BEGIN], begins);
        scratch_append(&whole, answer, begin ? (size_t)((const unsigned char *)begin - answer) : part);
        answer += part + (stop ? length : 0), bytes -= part + (stop ? length : 0);
    }
    chat_append_text(text, (const char *)whole.at, whole.count, 1);
    free(whole.at);
}

// Appends what a template that forgets reasoning keeps of a whole answer: the text after the reasoning.
static void chat_append_kept(Scratch *text, const Tokenizer *t, const char *answer, size_t bytes) {
    const int trim = (t->flags & TOKENIZER_FORGETS_SPACE) != 0, lines = (t->flags & TOKENIZER_FORGETS_LINES) != 0;
    size_t length, begin = 0;
    const char *end = chat_thought_end(t, &length);
    Scratch whole = {NULL, 0, 0};
    if (t->section_bytes[SECTION_THOUGHT_BEGIN]) {
        chat_append_between_thoughts(text, t, (const unsigned char *)answer, bytes);
        return;
    }
    chat_append_text(&whole, answer, bytes, trim);
    for (size_t i = whole.count; i >= length && !begin; i--)
        if (!memcmp(whole.at + i - length, end, length)) begin = i;
    while (begin && lines && begin < whole.count && whole.at[begin] == '\n') begin++;
    scratch_append(text, whole.at + begin, whole.count - begin);
    free(whole.at);
}

// Appends a generated answer, its opening followed by answer[bytes], like chat_append_kept.
static void chat_append_answer(Scratch *text, const Tokenizer *t, Thinking thinking, const char *answer, size_t bytes) {
    Scratch opened = {NULL, 0, 0};
    chat_append_section(&opened, t, chat_opening(thinking));
    scratch_append(&opened, answer, bytes);
    chat_append_kept(text, t, (const char *)opened.at, opened.count);
    free(opened.at);
}

// Appends the ids of a text followed by the opening of an answer. Does not change the text.
static void chat_encode(Tokenizer *t, Scratch *text, Thinking thinking, TokenIds *ids) {
    const size_t count = text->count;
    chat_append_section(text, t, chat_opening(thinking));
    tokenizer_encode(t, (const char *)text->at, text->count, 1, ids);
    text->count = count;
}

static void chat_turn(Tokenizer *t, const char *system, Thinking thinking, const char *user, size_t bytes, int first,
                      TokenIds *ids) {
    Scratch text = {NULL, 0, 0};
    chat_append_turn(&text, t, system, user, bytes, first);
    chat_encode(t, &text, thinking, ids);
    free(text.at);
}

#endif
