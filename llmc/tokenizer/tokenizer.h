/*
Turns text into ids and back as Hugging Face's tokenizers library does, with the file of tokenizer_file.h:

    tokenizer_encode   appends a text's ids: finds added tokens, then normalizes, cuts words (tokenizer_words.h), merges
    tokenizer_prompt   the same for a plain prompt, with the tokens that the tokenizer puts before it
    tokenizer_decode   returns the bytes of an id, which may be only a part of a character

Merging a word of n bytes takes n log n steps, so even many megabytes of text without a space are fast. A text must be
UTF-8, else the program ends with one line. The library would see U+FFFD in place of invalid bytes, which is not what
the user meant.
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H
#include "tokenizer_words.h"

typedef struct {
    int32_t *id; // [count]
    size_t count, capacity;
} TokenIds;

static void token_ids_add(TokenIds *ids, uint32_t id) {
    if (ids->count == ids->capacity) {
        ids->capacity = max_size(2 * ids->capacity, 64);
        ids->id = (int32_t *)checked_realloc(ids->id, ids->capacity * sizeof(int32_t), "the ids of a text");
    }
    ids->id[ids->count++] = (int32_t)id;
}

// ---- merging --------------------------------------------------------------------------------------------------------
typedef struct {
    uint32_t id;
    int32_t before, next; // remaining neighbours; -1: none
    int32_t merged;       // merged into the symbol before it
} Symbol;

// The symbols of a word, and a heap of possible merges: rank << 32 | place, the least on top
typedef struct {
    Tokenizer *t;
    Symbol *symbol;
    size_t count;
    uint64_t *heap;
    size_t waiting;
} Merging;

static void merging_push(Merging *m, size_t place) {
    const Symbol *symbol = &m->symbol[place];
    size_t child = m->waiting, parent;
    if (symbol->next < 0) return;
    uint32_t rank = tokenizer_rank(m->t, symbol->id, m->symbol[symbol->next].id);
    if (rank == NO_TOKEN) return;
    uint64_t key = (uint64_t)rank << 32 | place;
    m->t->heap.count = m->waiting * sizeof(key);
    m->heap = (uint64_t *)tokenizer_scratch(&m->t->heap, (m->waiting + 1) * sizeof(key));
    for (m->waiting++; child; child = parent) {
        parent = (child - 1) / 2;
        if (m->heap[parent] <= key) break;
        m->heap[child] = m->heap[parent];
    }
    m->heap[child] = key;
}

static uint64_t merging_pop(Merging *m) {
    uint64_t top = m->heap[0], last = m->heap[--m->waiting];
    size_t place = 0, child;
    while ((child = 2 * place + 1) < m->waiting) {
        if (child + 1 < m->waiting && m->heap[child + 1] < m->heap[child]) child++;
        if (last <= m->heap[child]) break;
        m->heap[place] = m->heap[child];
        place = child;
    }
    m->heap[place] = last;
    return top;
}

// Merges neighbours by rank, then from left to right, until no pair has a merge. A heap entry is stale, and skipped, if
// the symbols now at its place have another rank.
static void merging_run(Merging *m) {
    for (size_t i = 0; i + 1 < m->count; i++) merging_push(m, i);
    while (m->waiting) {
        uint64_t key = merging_pop(m);
        size_t place = (size_t)(key & 0xffffffffu);
        uint32_t result = m->t->merges[key >> 32].result;
        Symbol *left = &m->symbol[place];
        if (left->merged || left->next < 0) continue;
        Symbol *right = &m->symbol[left->next];
        uint32_t rank = tokenizer_rank(m->t, left->id, right->id);
        if (rank == NO_TOKEN || m->t->merges[rank].result != result) continue;
        left->id = result;
        left->next = right->next, right->merged = 1;
        if (left->next >= 0) m->symbol[left->next].before = (int32_t)place;
        if (left->before >= 0) merging_push(m, (size_t)left->before);
        merging_push(m, place);
    }
}

static void merging_add(Merging *m, uint32_t id) {
    Symbol *symbol = &m->symbol[m->count];
    symbol->id = id;
    symbol->before = (int32_t)m->count - 1, symbol->next = -1, symbol->merged = 0;
    if (m->count) symbol[-1].next = (int32_t)m->count;
    m->count++;
}

// Fills in a word's bytes or characters before any merge. A character that the vocabulary lacks becomes its bytes, the
// unknown token, or nothing.
static void merging_fill(Merging *m, const unsigned char *word, size_t bytes) {
    const Tokenizer *t = m->t;
    int byte_level = (t->flags & TOKENIZER_BYTE_LEVEL) != 0, unknown = 0;
    size_t length;
    for (size_t i = 0; i < bytes; i += length) {
        length = 1;
        if (!byte_level) character_at(word, bytes, i, &length);
        uint32_t id = byte_level ? t->byte_id[word[i]] : tokenizer_find(t, word + i, length);
        if (id != NO_TOKEN) {
            if (unknown) merging_add(m, t->unknown);
            unknown = 0;
            merging_add(m, id);
        } else if (t->flags & TOKENIZER_BYTE_FALLBACK) {
            for (size_t j = 0; j < length; j++) merging_add(m, t->byte_id[word[i + j]]);
        } else if (t->unknown != NO_TOKEN) {
            if (unknown && !(t->flags & TOKENIZER_FUSE_UNKNOWN)) merging_add(m, t->unknown);
            unknown = 1;
        }
    }
    if (unknown) merging_add(m, t->unknown);
}

static void encode_word(Tokenizer *t, const unsigned char *word, size_t bytes, TokenIds *ids) {
    Merging m = {t, NULL, 0, NULL, 0};
    if (t->flags & TOKENIZER_IGNORE_MERGES) {
        uint32_t id = tokenizer_find(t, word, bytes);
        if (id != NO_TOKEN) {
            token_ids_add(ids, id);
            return;
        }
    }
    m.symbol = (Symbol *)tokenizer_scratch(&t->symbols, (bytes + 1) * sizeof(Symbol));
    merging_fill(&m, word, bytes);
    merging_run(&m);
    for (size_t i = 0; i < m.count; i++)
        if (!m.symbol[i].merged) token_ids_add(ids, m.symbol[i].id);
}

// ---- stretches of text between added tokens -------------------------------------------------------------------------
// Copies text[bytes] to `out`, after `before`. With replace, " " becomes U+2581. `out` must not be the text's own
// scratch.
static void text_respace(Scratch *out, const char *before, const unsigned char *text, size_t bytes, int replace) {
    out->count = 0;
    scratch_append(out, before, strlen(before));
    if (!replace) scratch_append(out, text, bytes);
    for (size_t i = 0; i < bytes && replace; i++) {
        const int space = text[i] == ' ';
        scratch_append(out, space ? (const unsigned char *)META_SPACE : text + i, space ? 3 : 1);
    }
}

static int begins_with_meta_space(const unsigned char *text, size_t bytes) {
    return bytes && (text[0] == ' ' || (bytes >= 3 && !memcmp(text, META_SPACE, 3)));
}

// Encodes a stretch without added tokens. first: the text begins with this stretch
static void encode_words(Tokenizer *t, const unsigned char *text, size_t bytes, int first, TokenIds *ids) {
    if (t->words >= WORDS_METASPACE_ALWAYS && t->words <= WORDS_METASPACE_NEVER) {
        int wanted = t->words == WORDS_METASPACE_ALWAYS || (t->words == WORDS_METASPACE_FIRST && first);
        text_respace(&t->words_text, wanted && !begins_with_meta_space(text, bytes) ? META_SPACE : "", text, bytes, 1);
        text = t->words_text.at, bytes = t->words_text.count;
    } else if (t->flags & TOKENIZER_PREFIX_SPACE && text[0] != ' ') {
        text_respace(&t->words_text, " ", text, bytes, 0);
        text = t->words_text.at, bytes = t->words_text.count;
    }
    const size_t words = text_cut(t, text, bytes), *cut = (const size_t *)t->cuts.at;
    for (size_t i = 0; i < words; i++, cut += 2) encode_word(t, text + cut[0], cut[1] - cut[0], ids);
}

// Returns the first of added[first..last) whose byte at `depth` is at least `byte`. All of them agree in the bytes
// before `depth`.
static size_t added_from(const Tokenizer *t, size_t first, size_t last, size_t depth, unsigned byte) {
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        if (t->section[SECTION_ADDED_TEXT][t->added[middle].offset + depth] < byte)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

// Returns the longest of added[first..last) that matches at text[i]; NULL: none. The tokens are sorted by their bytes.
static const AddedToken *added_at(const Tokenizer *t, size_t first, size_t last, const unsigned char *text,
                                  size_t bytes, size_t i) {
    const AddedToken *found = NULL;
    for (size_t depth = 0; first < last; depth++) { // added[first..last) begin with text[i..i + depth)
        if (t->added[first].bytes == depth) found = &t->added[first++];
        if (i + depth >= bytes) break;
        first = added_from(t, first, last, depth, text[i + depth]);
        last = added_from(t, first, last, depth, text[i + depth] + 1u);
    }
    return found && found->bytes ? found : NULL;
}

static size_t spaces_before(const unsigned char *text, size_t least, size_t i) {
    while (i > least) {
        size_t begin = i - 1, length;
        while (begin > least && (text[begin] & 0xc0) == 0x80) begin--;
        if (!is_white_space(character_at(text, i, begin, &length))) break;
        i = begin;
    }
    return i;
}

static size_t spaces_behind(const unsigned char *text, size_t bytes, size_t i) {
    size_t length;
    while (i < bytes && is_white_space(character_at(text, bytes, i, &length))) i += length;
    return i;
}

static void encode_between(Tokenizer *t, const unsigned char *text, size_t bytes, int raw, int first, int allow_special,
                           TokenIds *ids);

// Cuts text at added tokens and encodes the stretches between them. raw: tokens that are sought in raw text, else in
// normalized text
static void encode_added(Tokenizer *t, const unsigned char *text, size_t bytes, int raw, int first, int allow_special,
                         TokenIds *ids) {
    size_t from = raw ? 0 : t->added_raw, to = raw ? t->added_raw : t->added_count, done = 0, i = 0;
    while (i < bytes && from < to) {
        const AddedToken *token = t->begins_added[text[i]] ? added_at(t, from, to, text, bytes, i) : NULL;
        size_t begin = i;
        if (!token) {
            i++;
            continue;
        }
        size_t end = i += token->bytes;
        if (token->flags & ADDED_SPECIAL && !allow_special) continue;
        if (token->flags & ADDED_LEFT) begin = spaces_before(text, done, begin);
        if (token->flags & ADDED_RIGHT) end = spaces_behind(text, bytes, end);
        if (begin > done) encode_between(t, text + done, begin - done, raw, first && !done, allow_special, ids);
        token_ids_add(ids, token->id);
        done = end, i = max_size(i, end);
    }
    if (done < bytes) encode_between(t, text + done, bytes - done, raw, first && !done, allow_special, ids);
}

static void encode_between(Tokenizer *t, const unsigned char *text, size_t bytes, int raw, int first, int allow_special,
                           TokenIds *ids) {
    const int prepend = (t->flags & TOKENIZER_PREPEND) != 0, replace = (t->flags & TOKENIZER_REPLACE_SPACES) != 0;
    if (!raw)
        encode_words(t, text, bytes, first, ids);
    else if (t->flags & TOKENIZER_COMPOSE)
        text_compose(t, text, bytes);
    else
        text_respace(&t->normal, prepend ? META_SPACE : "", text, bytes, replace);
    if (raw) encode_added(t, t->normal.at, t->normal.count, 0, first, allow_special, ids);
}

// ---- the interface --------------------------------------------------------------------------------------------------
// Returns text from the file for a message: one line, without characters that move the cursor.
static const char *tokenizer_message(const Tokenizer *t, TokenizerSection section) {
    static char text[400];
    size_t bytes = min_size(t->section_bytes[section], sizeof(text) - 1);
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = t->section[section][i];
        text[i] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    text[bytes] = 0;
    return text;
}

// Appends the ids of text[bytes]. The spelling of a special token becomes that token if allow_special is 1, else it is
// encoded as text.
static void tokenizer_encode(Tokenizer *t, const char *text, size_t bytes, int allow_special, TokenIds *ids) {
    const unsigned char *bytes_of = (const unsigned char *)text;
    const size_t valid = utf8_valid_until(text, bytes);
    if (!(t->flags & TOKENIZER_ENCODES))
        die_usage("%s decodes only, %s; give the prompt with --prompt-ids ID,ID,...", t->path,
                  tokenizer_message(t, SECTION_REASON));
    if (bytes > INT32_MAX / 4) die("a text of %zu bytes is above the limit of %d; shorten it", bytes, INT32_MAX / 4);
    if (valid < bytes) die("the text is not UTF-8 at byte %zu (0x%02x); convert it to UTF-8", valid, bytes_of[valid]);
    encode_added(t, bytes_of, bytes, 1, 1, allow_special, ids);
}

// Appends the ids of a plain prompt, as data/prepare.py does: with the tokens that begin every text, unless the prompt
// begins with them, and without the tokens that end a text.
static void tokenizer_prompt(Tokenizer *t, const char *text, size_t bytes, TokenIds *ids) {
    const size_t begin = ids->count, prefix = t->prefix_count;
    for (size_t i = 0; i < prefix; i++) token_ids_add(ids, t->prefix_ids[i]);
    tokenizer_encode(t, text, bytes, 1, ids);
    int32_t *own = ids->id + begin;
    if (!prefix || ids->count - begin < 2 * prefix || memcmp(own, own + prefix, prefix * sizeof(*own)) != 0) return;
    ids->count -= prefix;
    memmove(own, own + prefix, (ids->count - begin) * sizeof(*own));
}

// Returns the bytes of an id; none for an id that the tokenizer does not have.
static const char *tokenizer_decode(const Tokenizer *t, int32_t id, size_t *bytes) {
    *bytes = 0;
    if (id < 0 || (uint32_t)id >= t->ids) return "";
    *bytes = t->text_offsets[id + 1] - t->text_offsets[id];
    return (const char *)t->text + t->text_offsets[id];
}

static int tokenizer_is_special(const Tokenizer *t, int32_t id) {
    return id >= 0 && (uint32_t)id < t->ids && (t->id_flags[id] & ID_SPECIAL);
}

// Tells whether this id ends a text.
static int tokenizer_is_end(const Tokenizer *t, int32_t id) {
    for (size_t i = 0; i < t->end_count; i++)
        if (t->end_ids[i] == (uint32_t)id) return 1;
    return 0;
}

#endif
