/*
What happens to text before it is tokens: Unicode's NFC, and the cutting into words by the regular expressions of GPT-2,
Llama 3, Qwen, Qwen3.5, Tekken and o200k, each written out as the function it is. Characters are those of well-formed
UTF-8; classes and composition are tables of the tokenizer file, so that they are those of the library the tokenizer was
made with.
*/
#ifndef LLMC_TOKENIZER_WORDS_H
#define LLMC_TOKENIZER_WORDS_H
#include "tokenizer_file.h"

// ---- characters -----------------------------------------------------------------------------------------------------
// The code point at text[i], i < bytes, of well-formed UTF-8, and its length.
static uint32_t character_at(const unsigned char *text, size_t bytes, size_t i, size_t *length) {
    const unsigned char *c = text + i;
    *length = utf8_length(c, bytes - i);
    if (*length == 1) return *c;
    if (*length == 0) return *length = 1, 0xfffd;
    uint32_t point = c[0] & (0x7fu >> *length);
    for (size_t k = 1; k < *length; k++) point = point << 6 | (c[k] & 0x3f);
    return point;
}

// Writes a character; returns its length.
static size_t character_write(unsigned char *out, uint32_t point) {
    static const unsigned char first[] = {0, 0, 0xc0, 0xe0, 0xf0}; // bits of the first byte, by the length
    const size_t length = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; point >>= 6) out[i] = (unsigned char)(0x80 | (point & 0x3f));
    out[0] = (unsigned char)(first[length] | point);
    return length;
}

// ---- NFC: decompose, order the marks, compose (Unicode Standard Annex 15) -------------------------------------------
enum { HANGUL = 0xac00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11a7, HANGUL_VS = 21, HANGUL_TS = 28 };
#define HANGUL_SYLLABLES 11172u

// Entries of tables, which begin with their point; pairs with their two.
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

// Appends a character's canonical decomposition; returns how many characters that is, 4 at most.
static size_t decompose(const Tokenizer *t, uint32_t point, uint32_t out[4]) {
    if (point - HANGUL < HANGUL_SYLLABLES) { // unsigned: also not below it
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

// The character that two compose to, or NO_TOKEN.
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

// A key is combining class << 56 | place << 21 | code point: sorted, a run of marks is in canonical order.
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

// In place; returns the number of characters left.
static size_t compose_all(const Tokenizer *t, uint64_t *key, size_t count) {
    size_t kept = 0, starter = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        uint32_t class_here = KEY_CLASS(key[i]), composite = NO_TOKEN;
        // blocked: another starter, or a mark of this class or a higher one, stands between
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

// The NFC of text[bytes] into t->normal.
static void text_compose(Tokenizer *t, const unsigned char *text, size_t bytes) {
    size_t length, count = 0, characters = 0, plain = 0;
    uint32_t parts[4];
    t->normal.count = t->points.count = 0;
    while (plain < bytes && text[plain] < 0xcc) plain++; // below U+0300 nothing is the second one of a composition
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
// A stretch of text in which words are found. Classes beyond the end are 0, characters 0.
typedef struct {
    const Tokenizer *t;
    const unsigned char *text;
    size_t bytes;
} Stretch;

static unsigned class_at(const Stretch *s, size_t i, size_t *length) {
    return s->t->class_of[character_at(s->text, s->bytes, i, length)];
}

// The end of the run from i on of characters whose class is one of `classes` (or none of them: inverted), `most` at
// most.
static size_t class_run(const Stretch *s, size_t i, unsigned classes, int inverted, size_t most) {
    size_t length;
    for (; i < s->bytes && most--; i += length)
        if (((class_at(s, i, &length) & classes) != 0) == inverted) break;
    return i;
}

static int is_line_end(const Stretch *s, size_t i) {
    return i < s->bytes && (s->text[i] == '\n' || s->text[i] == '\r');
}

// 's, 't, 're, 've, 'm, 'll, 'd at i, in either case where `fold`: where it ends, or i. U+017F is an s in another case.
static size_t contraction_end(const Stretch *s, size_t i, int fold) {
    const unsigned char *c = s->text + i;
    size_t left = s->bytes - i;
    if (left < 2 || c[0] != '\'') return i;
    if (fold && left > 2 && c[1] == 0xc5 && c[2] == 0xbf) return i + 3;
    unsigned char first = c[1], second = left > 2 ? c[2] : 0;
    if (fold && first >= 'A' && first <= 'Z') first = (unsigned char)(first + 32);
    if (fold && second >= 'A' && second <= 'Z') second = (unsigned char)(second + 32);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return i + 2;
    if (((first == 'r' || first == 'v') && second == 'e') || (first == 'l' && second == 'l')) return i + 3;
    return i;
}

// White space from i on: \s*[\r\n]+ (where `lines`), else \s+(?!\S), else \s+.
static size_t space_end(const Stretch *s, size_t i, int lines) {
    size_t begin = i, last = i, line = 0, length;
    for (; i < s->bytes && class_at(s, i, &length) & CLASS_SPACE; i += length) {
        last = i;
        if (is_line_end(s, i)) line = i + 1;
    }
    if (lines && line) return line;
    return i == s->bytes || last == begin ? i : last; // the last one goes with the word behind it
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static size_t word_end_gpt2(const Stretch *s, size_t i) {
    size_t end = contraction_end(s, i, 0), length, start = s->text[i] == ' ' ? i + 1 : i;
    if (end > i) return end;
    if (start == s->bytes) return start;
    unsigned kind = class_at(s, start, &length);
    if (kind & CLASS_SPACE) return space_end(s, i, 0);
    if (kind & (CLASS_LETTER | CLASS_NUMBER)) return class_run(s, start, kind, 0, SIZE_MAX);
    return class_run(s, start, CLASS_SPACE | CLASS_LETTER | CLASS_NUMBER, 1, SIZE_MAX);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}|
// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ `letters`: what stands for \p{L} where it is repeated, or left out
// of the others; Qwen3.5 has the marks there, too.
static size_t word_end_llama3(const Stretch *s, size_t i, size_t digits, unsigned letters) {
    size_t end = contraction_end(s, i, 1), length;
    if (end > i) return end;
    unsigned kind = class_at(s, i, &length);
    size_t next = i + length;
    if (!(kind & (CLASS_LETTER | CLASS_NUMBER)) && !is_line_end(s, i) && next < s->bytes) {
        size_t ignored;
        if (class_at(s, next, &ignored) & letters) return class_run(s, next, letters, 0, SIZE_MAX);
    }
    if (kind & letters) return class_run(s, i, letters, 0, SIZE_MAX);
    if (kind & CLASS_NUMBER) return class_run(s, i, CLASS_NUMBER, 0, digits);
    next = s->text[i] == ' ' ? i + 1 : i;
    end = class_run(s, next, CLASS_SPACE | CLASS_NUMBER | letters, 1, SIZE_MAX);
    if (end == next) return space_end(s, i, 1);
    while (is_line_end(s, end)) end++;
    return end;
}

// SMALL = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ from i on, or i. Where no small letter follows the
// first run, that gives back what is behind its last character that both have.
static size_t small_end(const Stretch *s, size_t i) {
    size_t last = i, length;
    for (; i < s->bytes; i += length) {
        const unsigned kind = class_at(s, i, &length);
        if (!(kind & (CLASS_UPPER | CLASS_CASELESS | CLASS_MARK))) break;
        if (!(kind & CLASS_UPPER)) last = i + length;
    }
    const size_t end = class_run(s, i, CLASS_LOWER | CLASS_CASELESS | CLASS_MARK, 0, SIZE_MAX);
    return end > i ? end : last;
}

// [^\r\n\p{L}\p{N}]?SMALL, else [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*, whose
// last part has nothing where there is no SMALL; each with a contraction behind it where `contractions`;
// else \p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
static size_t word_end_cased(const Stretch *s, size_t i, size_t digits, int contractions) {
    size_t length;
    const unsigned kind = class_at(s, i, &length);
    const int other = !(kind & (CLASS_LETTER | CLASS_NUMBER)) && !is_line_end(s, i);
    const size_t begin[] = {other ? i + length : i, i}; // a mark may be the character before, or a letter
    for (size_t k = 0; k < 4; k++) {
        const size_t from = begin[k % 2];
        const size_t end =
            k < 2 ? small_end(s, from) : class_run(s, from, CLASS_UPPER | CLASS_CASELESS | CLASS_MARK, 0, SIZE_MAX);
        if (end > from) return contractions ? contraction_end(s, end, 1) : end;
    }
    if (kind & CLASS_NUMBER) return class_run(s, i, CLASS_NUMBER, 0, digits);
    const size_t next = s->text[i] == ' ' ? i + 1 : i;
    size_t end = class_run(s, next, CLASS_SPACE | CLASS_NUMBER | CLASS_LETTER, 1, SIZE_MAX);
    if (end == next) return space_end(s, i, 1);
    while (is_line_end(s, end) || (end < s->bytes && s->text[end] == '/')) end++;
    return end;
}

// The end of the word that begins at i < bytes.
static size_t word_end(const Stretch *s, size_t i) {
    switch (s->t->words) {
    case WORDS_GPT2: return word_end_gpt2(s, i);
    case WORDS_LLAMA3: return word_end_llama3(s, i, 3, CLASS_LETTER);
    case WORDS_QWEN2: return word_end_llama3(s, i, 1, CLASS_LETTER);
    case WORDS_QWEN2_MARKS: return word_end_llama3(s, i, 1, CLASS_LETTER | CLASS_MARK);
    case WORDS_TEKKEN: return word_end_cased(s, i, 1, 0);
    case WORDS_O200K: return word_end_cased(s, i, 3, 1);
    default: break;
    }
    if (!(s->t->flags & TOKENIZER_SPLIT_WORDS)) return s->bytes;
    const unsigned char *found =
        s->bytes - i > 3 ? (const unsigned char *)memmem(s->text + i + 1, s->bytes - i - 1, "\xe2\x96\x81", 3) : NULL;
    return found ? (size_t)(found - s->text) : s->bytes;
}

#endif
