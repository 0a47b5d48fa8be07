/*
Prepares text for merging: applies Unicode's NFC, and cuts text into words by the tokenizer's own patterns, one after
another (tokenizer_split.h). Text is well-formed UTF-8. The symbols of characters and their composition are tables of
the tokenizer file, so they equal the tables of the library with which the tokenizer was made.

    text_compose   applies NFC
    text_cut       cuts words
*/
#ifndef LLMC_TOKENIZER_WORDS_H
#define LLMC_TOKENIZER_WORDS_H
#include "tokenizer_file.h"

#define META_SPACE "\xe2\x96\x81" // U+2581

// ---- characters -----------------------------------------------------------------------------------------------------
// Returns the code point at text[i], i < bytes, of well-formed UTF-8. *length: bytes of the character
static uint32_t character_at(const unsigned char *text, size_t bytes, size_t i, size_t *length) {
    const unsigned char *c = text + i;
    *length = utf8_length(c, bytes - i);
    if (*length == 1) return *c;
    if (*length == 0) return *length = 1, 0xfffd;
    uint32_t point = c[0] & (0x7fu >> *length);
    for (size_t k = 1; k < *length; k++) point = point << 6 | (c[k] & 0x3f);
    return point;
}

// Writes a character; returns the character's length.
static size_t character_write(unsigned char *out, uint32_t point) {
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0}; // first byte's marker bits, by length
    const size_t length = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; point >>= 6) out[i] = (unsigned char)(0x80 | (point & 0x3f));
    out[0] = (unsigned char)(first[length] | point);
    return length;
}

// Tells whether Unicode's White_Space has the character. No later version of Unicode changes this property.
static int is_white_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

// ---- NFC: decompose, order the marks, compose (Unicode Standard Annex 15) -------------------------------------------
enum { HANGUL = 0xac00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11a7, HANGUL_VS = 21, HANGUL_TS = 28 };
#define HANGUL_SYLLABLES 11172u

// Compare entries of tables that begin with a code point, or pairs by their two points.
static int compare_points(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int compare_pairs(const void *a, const void *b) {
    const int first = compare_points(a, b);
    return first ? first : compare_points((const uint32_t *)a + 1, (const uint32_t *)b + 1);
}

static uint32_t combining_class(const Tokenizer *t, uint32_t point) {
    const uint32_t *entry =
        (const uint32_t *)bsearch(&point, t->combining, t->combining_count, 2 * sizeof(point), compare_points);
    return entry ? entry[1] : 0;
}

// Stores a character's canonical decomposition in `out`. Returns its number of characters, at most 4.
static size_t decompose(const Tokenizer *t, uint32_t point, uint32_t out[4]) {
    if (point - HANGUL < HANGUL_SYLLABLES) { // unsigned, so points below HANGUL fail, too
        uint32_t s = point - HANGUL, trail = s % HANGUL_TS;
        out[0] = HANGUL_L + s / (HANGUL_VS * HANGUL_TS), out[1] = HANGUL_V + s / HANGUL_TS % HANGUL_VS;
        out[2] = HANGUL_T + trail;
        return trail ? 3 : 2;
    }
    const Decomposition *entry = (const Decomposition *)bsearch(&point, t->decompositions, t->decomposition_count,
                                                                sizeof(Decomposition), compare_points);
    if (!entry) return out[0] = point, 1;
    memcpy(out, entry->parts, sizeof(entry->parts));
    return entry->count;
}

// Returns the character to which two characters compose, or NO_TOKEN.
static uint32_t compose(const Tokenizer *t, uint32_t first, uint32_t second) {
    if (first - HANGUL_L < 19 && second - HANGUL_V < HANGUL_VS)
        return HANGUL + ((first - HANGUL_L) * HANGUL_VS + (second - HANGUL_V)) * HANGUL_TS;
    if (first - HANGUL < HANGUL_SYLLABLES && (first - HANGUL) % HANGUL_TS == 0 && second - HANGUL_T - 1 < HANGUL_TS - 1)
        return first + (second - HANGUL_T);
    const CompositionPair key = {first, second, 0};
    const CompositionPair *pair =
        (const CompositionPair *)bsearch(&key, t->pairs, t->pair_count, sizeof(key), compare_pairs);
    return pair ? pair->composite : NO_TOKEN;
}

static int compare_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// A key is combining class << 56 | place << 21 | code point. Sorting keys puts a run of marks in canonical order.
#define KEY_POINT(key) ((uint32_t)((key)&0x1fffff))
#define KEY_CLASS(key) ((uint32_t)((key) >> 56))

static void order_marks(uint64_t *key, size_t count) {
    size_t end;
    for (size_t i = 0; i < count; i = end) {
        end = i + 1;
        if (KEY_CLASS(key[i]) == 0) continue;
        while (end < count && KEY_CLASS(key[end])) end++;
        if (end - i > 1) qsort(key + i, end - i, sizeof(*key), compare_keys);
    }
}

// Composes characters in place. Returns how many remain.
static size_t compose_all(const Tokenizer *t, uint64_t *key, size_t count) {
    size_t kept = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        uint32_t class_here = KEY_CLASS(key[i]), composite = NO_TOKEN;
        // a mark is blocked if another starter, or a mark of its class or a higher one, stands between
        if (starter != SIZE_MAX && (kept - 1 == starter || KEY_CLASS(key[kept - 1]) < class_here))
            composite = compose(t, KEY_POINT(key[starter]), KEY_POINT(key[i]));
        if (composite != NO_TOKEN) {
            key[starter] = composite;
            continue;
        }
        if (class_here == 0) starter = kept;
        key[kept++] = key[i];
    }
    return kept;
}

// Stores the NFC of text[bytes] in t->normal.
static void text_compose(Tokenizer *t, const unsigned char *text, size_t bytes) {
    size_t length, count = 0, characters = 0, plain = 0;
    uint32_t parts[4];
    t->normal.count = t->points.count = 0;
    while (plain < bytes && text[plain] < 0xcc) plain++; // characters below U+0300 never end a composition
    if (plain == bytes) {
        scratch_append(&t->normal, text, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i += length) characters += decompose(t, character_at(text, bytes, i, &length), parts);
    uint64_t *key = (uint64_t *)tokenizer_scratch(&t->points, characters * sizeof(*key));
    for (size_t i = 0; i < bytes; i += length) {
        size_t n = decompose(t, character_at(text, bytes, i, &length), parts);
        for (size_t j = 0; j < n; j++, count++)
            key[count] = (uint64_t)combining_class(t, parts[j]) << 56 | (uint64_t)count << 21 | parts[j];
    }
    order_marks(key, count);
    count = compose_all(t, key, count);
    tokenizer_scratch(&t->normal, 4 * count);
    for (size_t i = 0; i < count; i++)
        t->normal.count += character_write(t->normal.at + t->normal.count, KEY_POINT(key[i]));
}

// ---- words ----------------------------------------------------------------------------------------------------------
// A stretch of text to cut into words, which become pairs of offsets in t->cuts
typedef struct {
    Tokenizer *t;
    const unsigned char *text;
    size_t character, byte; // where the last word ended
} Stretch;

// A part of a piece, in characters of the stretch
typedef struct {
    size_t begin, end;
    int match;
} Part;

static void cut_piece(Stretch *s, size_t stage, size_t begin, size_t end);

// Returns the byte at which a character begins. Characters must not go backwards from call to call.
static size_t byte_of(Stretch *s, size_t character) {
    for (; s->character < character; s->character++) {
        const unsigned char first = s->text[s->byte];
        s->byte += 1 + (first >= 0xc0) + (first >= 0xe0) + (first >= 0xf0);
    }
    return s->byte;
}

// Joins the next part of a piece to the part before it, or passes that earlier part on to the next pattern.
static void cut_part(Stretch *s, size_t stage, Part *before, size_t begin, size_t end, int match) {
    const SplitBehaviour behaviour = s->t->splits[stage].behaviour;
    if ((behaviour == SPLIT_CONTIGUOUS && before->match == match) ||
        (behaviour == SPLIT_MERGED_WITH_PREVIOUS && !before->match && match) ||
        (behaviour == SPLIT_MERGED_WITH_NEXT && before->match && !match))
        begin = before->begin;
    else if (behaviour != SPLIT_REMOVED || !before->match)
        cut_piece(s, stage + 1, before->begin, before->end);
    before->begin = begin, before->end = end, before->match = match;
}

// Cuts characters [begin, end) with the patterns from number `stage` on.
static void cut_piece(Stretch *s, size_t stage, size_t begin, size_t end) {
    Tokenizer *t = s->t;
    if (begin == end) return;
    if (stage == t->split_count) {
        const size_t from = byte_of(s, begin), word[2] = {from, byte_of(s, end)};
        scratch_append(&t->cuts, word, sizeof(word));
        return;
    }
    Split *split = &t->splits[stage];
    Part part = {begin, begin, -1}; // there is no part yet
    size_t place[2], done = 0, last = SIZE_MAX;
    while (split_next(split, t->coded.at + begin, end - begin, done, last, place, t->path)) {
        if (place[0] > done) cut_part(s, stage, &part, begin + done, begin + place[0], split->inverted);
        cut_part(s, stage, &part, begin + place[0], begin + place[1], !split->inverted);
        done = last = place[1];
    }
    if (begin + done < end) cut_part(s, stage, &part, begin + done, end, split->inverted);
    if (split->behaviour != SPLIT_REMOVED || !part.match) cut_piece(s, stage + 1, part.begin, part.end);
}

// Cuts text[bytes] into words: pairs of offsets (begin, end). Returns how many.
static size_t text_cut(Tokenizer *t, const unsigned char *text, size_t bytes) {
    Stretch s = {t, text, 0, 0};
    size_t length, count = 0, word[2] = {0, 0};
    t->cuts.count = 0;
    if (t->split_count) {
        unsigned char *coded = (unsigned char *)tokenizer_scratch(&t->coded, bytes);
        for (size_t i = 0; i < bytes; i += length) {
            length = 1;
            coded[count++] = t->symbol_of[text[i] < 0x80 ? text[i] : character_at(text, bytes, i, &length)];
        }
        cut_piece(&s, 0, 0, count);
    }
    for (; !t->split_count && word[0] < bytes; word[0] = word[1]) {
        const unsigned char *from = text + word[0], *found = NULL;
        if (t->flags & TOKENIZER_SPLIT_WORDS && bytes - word[0] > 3)
            found = (const unsigned char *)memmem(from + 1, bytes - word[0] - 1, META_SPACE, 3);
        word[1] = found ? (size_t)(found - text) : bytes;
        scratch_append(&t->cuts, word, sizeof(word));
    }
    return t->cuts.count / sizeof(word);
}

#endif
