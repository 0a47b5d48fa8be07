/*
A conversation as the tokenizer's chat template writes it: fixed text of the tokenizer file around what a user writes.
The ids are those of the whole text, special tokens and all, as transformers' apply_chat_template has them.
*/
#ifndef LLMC_CHAT_H
#define LLMC_CHAT_H
#include "tokenizer.h"

static void chat_append_section(Scratch *text, const Tokenizer *t, TokenizerSection section) {
    scratch_append(text, t->section[section], t->section_bytes[section]);
}

// True for the characters that Python's str.strip removes; templates trim with it.
static int is_trimmed_away(uint32_t c) {
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

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

// Refuses what the template cannot do.
static void chat_check(const Tokenizer *t, const char *system, int turns) {
    const char *reason = tokenizer_message(t, SECTION_CHAT_REASON);
    if (!(t->flags & TOKENIZER_ENCODES))
        die_usage("--chat: %s decodes only, %s", t->path, tokenizer_message(t, SECTION_REASON));
    if (!(t->flags & TOKENIZER_CHAT)) die_usage("--chat: %s: %s; give a plain --prompt", t->path, reason);
    if (system && !(t->flags & TOKENIZER_CHAT_SYSTEM)) die_usage("--system: %s: %s; leave it out", t->path, reason);
    if (turns && !(t->flags & TOKENIZER_CHAT_NEXT))
        die_usage("--chat for several turns: %s: %s; give one turn with --prompt", t->path, reason);
}

// Appends the ids of a user's turn, with all that comes before the first one, or what ends the answer before.
static void chat_turn(Tokenizer *t, const char *system, const char *user, size_t bytes, int first, TokenIds *ids) {
    int trim_user = (t->flags & TOKENIZER_TRIM_USER) != 0, trim_system = (t->flags & TOKENIZER_TRIM_SYSTEM) != 0;
    Scratch text = {NULL, 0, 0};
    chat_append_section(&text, t, !first ? SECTION_NEXT_BEFORE : system ? SECTION_SYSTEM_BEFORE : SECTION_FIRST_BEFORE);
    if (first && system) {
        chat_append_text(&text, system, strlen(system), trim_system);
        chat_append_section(&text, t, SECTION_SYSTEM_BETWEEN);
    }
    chat_append_text(&text, user, bytes, trim_user);
    chat_append_section(&text, t, !first ? SECTION_NEXT_AFTER : system ? SECTION_SYSTEM_AFTER : SECTION_FIRST_AFTER);
    tokenizer_encode(t, (const char *)text.at, text.count, 1, ids);
    free(text.at);
}

#endif
