/*
Reads the tokenizer file that data/tokenizer_file.py writes; the first comment there is its format. Every count, offset
and id is checked against its bounds, so that no damaged file can make encoding or decoding fail later. The whole file
is kept in memory, and tables point into it. Spellings, merges and classes of characters are looked up by content and
get an index each; patterns are compiled. A file that fails a check ends the program with one line. Little-endian, like
every file here.
*/
#ifndef LLMC_TOKENIZER_FILE_H
#define LLMC_TOKENIZER_FILE_H
#include "llmc/base/hash.h"
#include "llmc/base/file.h"
#include "tokenizer_split.h"

#define TOKENIZER_NAME    "tokenizer.tok"
#define TOKENIZER_MAGIC   "SBPTOKEN"
#define TEMPLATE_NAME     "chat_template.jinja"
#define TOKENIZER_VERSION 5u                  // the newest version; older files lack the last sections and flags
#define TOKENIZER_HEADER  64                  // bytes before the table of sections
#define TOKENIZER_MAX     ((uint64_t)1 << 31) // most bytes: offsets in the file are 32 bits
#define NO_TOKEN          UINT32_MAX
#define CHARACTERS        0x110000u // number of code points

// Bits of the header's flags, in the order of FLAGS
enum {
    TOKENIZER_ENCODES = 1 << 0,
    TOKENIZER_BYTE_LEVEL = 1 << 1,     // words consist of bytes, else of characters
    TOKENIZER_IGNORE_MERGES = 1 << 2,  // a word in the vocabulary becomes its token, without merges
    TOKENIZER_BYTE_FALLBACK = 1 << 3,  // a character that the vocabulary lacks becomes its bytes, "<0x41>"
    TOKENIZER_FUSE_UNKNOWN = 1 << 4,   // consecutive unknown characters are one token
    TOKENIZER_COMPOSE = 1 << 5,        // Unicode's NFC is applied first
    TOKENIZER_REPLACE_SPACES = 1 << 6, // " " becomes U+2581
    TOKENIZER_PREPEND = 1 << 7,        // U+2581 is put before each stretch of text
    TOKENIZER_PREFIX_SPACE = 1 << 8,   // " " is put before each stretch that does not begin with one
    TOKENIZER_SPLIT_WORDS = 1 << 9,    // a word begins at each U+2581
    TOKENIZER_STRIP_FIRST = 1 << 10,   // a decoded text loses its first space
    TOKENIZER_TRIM_USER = 1 << 11,     // the chat template trims the user's text
    TOKENIZER_TRIM_SYSTEM = 1 << 12,
    TOKENIZER_CHAT = 1 << 13,
    TOKENIZER_CHAT_SYSTEM = 1 << 14,
    TOKENIZER_CHAT_NEXT = 1 << 15,
    TOKENIZER_FLAGS_1 = (1 << 16) - 1, // flags of version 1
    TOKENIZER_THINKING = 1 << 16,      // the template can ask for an answer with or without reasoning
    TOKENIZER_FORGETS = 1 << 17,       // and keeps only the text after the reasoning of old answers
    TOKENIZER_FORGETS_LINES = 1 << 18, // without the line breaks that follow the reasoning
    TOKENIZER_FORGETS_SPACE = 1 << 19, // after trimming the answer
    TOKENIZER_FLAGS = (1 << 20) - 1
};

// clang-format off
// Way to cut text into words, in the order of WORDS. Older files name a model's pattern; new files hold their patterns.
typedef enum {
    WORDS_WHOLE, WORDS_GPT2, WORDS_LLAMA3, WORDS_QWEN2, WORDS_QWEN2_MARKS,
    WORDS_METASPACE_ALWAYS, WORDS_METASPACE_FIRST, WORDS_METASPACE_NEVER,
    WORDS_TEKKEN, WORDS_O200K,
    WORDS_KINDS
} WordsKind;

// The sections, in the file's order: ids, added tokens, special ids, Unicode, chat
typedef enum {
    SECTION_TEXT_OFFSETS, SECTION_TEXT, SECTION_SPELLING_OFFSETS, SECTION_SPELLING, SECTION_ID_FLAGS, SECTION_MERGES,
    SECTION_ADDED, SECTION_ADDED_TEXT,
    SECTION_END_IDS, SECTION_PREFIX_IDS, SECTION_SUFFIX_IDS,
    SECTION_CLASSES, SECTION_DECOMPOSITIONS, SECTION_COMBINING, SECTION_PAIRS,
    SECTION_REASON, SECTION_CHAT_REASON, SECTION_FIRST_BEFORE, SECTION_FIRST_AFTER,
    SECTION_SYSTEM_BEFORE, SECTION_SYSTEM_BETWEEN, SECTION_SYSTEM_AFTER, SECTION_NEXT_BEFORE, SECTION_NEXT_AFTER,
    SECTION_NAME,
    TOKENIZER_SECTIONS_1, // number of sections of version 1
    SECTION_OPENING = TOKENIZER_SECTIONS_1, SECTION_THINKING_ON, SECTION_THINKING_OFF,
    TOKENIZER_SECTIONS_2,
    SECTION_SPLITS = TOKENIZER_SECTIONS_2, SECTION_PATTERNS,
    TOKENIZER_SECTIONS_3,
    SECTION_THOUGHT_BEGIN = TOKENIZER_SECTIONS_3, SECTION_THOUGHT_END,
    TOKENIZER_SECTIONS_4,
    SECTION_TEMPLATE = TOKENIZER_SECTIONS_4, SECTION_TURN_ENDS,
    TOKENIZER_SECTIONS
} TokenizerSection;
// clang-format on

enum { ID_EXISTS = 1, ID_SPECIAL = 2, ID_IN_VOCABULARY = 4 };
enum { ADDED_LEFT = 1, ADDED_RIGHT = 2, ADDED_NORMALIZED = 4, ADDED_SPECIAL = 8 };
enum { OTHER_S = 0x17f }; // U+017F, which matches s in (?i:...)

typedef struct {
    uint32_t left, right, result;
} MergeRule;

typedef struct {
    uint32_t id, flags, offset, bytes; // the token's spelling is added_text[offset...]
} AddedToken;

typedef struct {
    uint32_t point, count, parts[4];
} Decomposition;

typedef struct {
    uint32_t first, second, composite;
} CompositionPair;

// Memory that grows as encoding needs it, and is kept
typedef struct {
    unsigned char *at;
    size_t count, capacity; // in bytes
} Scratch;

typedef struct {
    char *path;
    unsigned char *file; // [bytes] the whole file; const pointers below point into it
    uint64_t bytes, fingerprint;
    uint32_t flags, ids, vocabulary_ids, unknown;
    WordsKind words;
    size_t sections; // number of sections in the file
    const unsigned char *section[TOKENIZER_SECTIONS];
    size_t section_bytes[TOKENIZER_SECTIONS];
    const uint32_t *text_offsets, *spelling_offsets; // [ids + 1]
    const unsigned char *text, *spelling, *id_flags; // id_flags[ids]
    const MergeRule *merges;                         // [merge_count], by rank
    const AddedToken *added;                         // [added_count]; the first added_raw tokens are sought in raw text
    const Decomposition *decompositions;             // sorted by code point
    const uint32_t *combining;                       // (code point, class), sorted by code point
    const CompositionPair *pairs;                    // sorted by first, then by second
    const uint32_t *end_ids, *prefix_ids;            // [..._count]; end_ids: ends of texts
    const uint32_t *turn_ends;                       // [turn_end_count] the end_ids that end an assistant's turn
    size_t merge_count, added_count, added_raw, decomposition_count, combining_count, pair_count;
    size_t end_count, prefix_count, turn_end_count;
    uint32_t *spelling_slots, *merge_slots; // hash slots: index + 1 of the entry; 0: empty
    size_t spelling_mask, merge_mask;
    unsigned char *symbol_of; // [CHARACTERS] the byte by which patterns see a character; NULL without patterns
    Split *splits;            // [split_count] patterns, applied one after another
    size_t split_count;
    uint32_t byte_id[256];           // ids of a byte-level word's bytes, or of "<0x41>"; NO_TOKEN: none
    unsigned char begins_added[256]; // 1: an added token begins with this byte
    Scratch normal, words_text;      // a normalized stretch of text; the stretch as its words are cut
    Scratch coded, cuts;             // the symbols of a stretch; begin and end of its words, in bytes
    Scratch points, symbols, heap;   // scratch of composition and of merging
} Tokenizer;

// ---- small things ---------------------------------------------------------------------------------------------------
static void *tokenizer_scratch(Scratch *scratch, size_t bytes) {
    if (bytes > scratch->capacity) {
        scratch->capacity = max_size(bytes + bytes / 2, 4096);
        scratch->at = (unsigned char *)checked_realloc(scratch->at, scratch->capacity, "text to be encoded");
    }
    return scratch->at;
}

static void scratch_append(Scratch *scratch, const void *bytes, size_t count) {
    if (!count) return;
    tokenizer_scratch(scratch, scratch->count + count);
    memcpy(scratch->at + scratch->count, bytes, count);
    scratch->count += count;
}

static const unsigned char *tokenizer_spelling(const Tokenizer *t, uint32_t id, size_t *bytes) {
    *bytes = t->spelling_offsets[id + 1] - t->spelling_offsets[id];
    return t->spelling + t->spelling_offsets[id];
}

// Returns the slot of a word in the index, or the empty slot where the word belongs.
static uint32_t *spelling_slot(const Tokenizer *t, const unsigned char *word, size_t bytes) {
    const uint64_t hash = fnv1a(FNV_BEGIN, word, bytes);
    size_t slot = (size_t)(hash ^ (hash >> 29)) & t->spelling_mask, length;
    for (; t->spelling_slots[slot]; slot = (slot + 1) & t->spelling_mask) {
        const unsigned char *spelling = tokenizer_spelling(t, t->spelling_slots[slot] - 1, &length);
        if (length == bytes && !memcmp(spelling, word, bytes)) break;
    }
    return &t->spelling_slots[slot];
}

static uint32_t *merge_slot(const Tokenizer *t, uint32_t left, uint32_t right) {
    const uint64_t hash = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    size_t slot = (size_t)(hash ^ (hash >> 32)) & t->merge_mask;
    for (; t->merge_slots[slot]; slot = (slot + 1) & t->merge_mask) {
        const MergeRule *merge = &t->merges[t->merge_slots[slot] - 1];
        if (merge->left == left && merge->right == right) break;
    }
    return &t->merge_slots[slot];
}

// tokenizer_find returns the vocabulary's id of a word, tokenizer_rank the rank of a merge. NO_TOKEN (equal to 0 - 1):
// none
static uint32_t tokenizer_find(const Tokenizer *t, const unsigned char *word, size_t bytes) {
    return *spelling_slot(t, word, bytes) - 1;
}

static uint32_t tokenizer_rank(const Tokenizer *t, uint32_t left, uint32_t right) {
    return *merge_slot(t, left, right) - 1;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
__attribute__((noreturn)) static void tokenizer_damaged(const Tokenizer *t, const char *what) {
    die("%s: this tokenizer file is damaged: %s; write it again with data/tokenizer_file.py", t->path, what);
}

static void tokenizer_check_header(Tokenizer *t) {
    uint32_t word[16];
    uint64_t bytes;
    if (t->bytes < TOKENIZER_HEADER + 16 * TOKENIZER_SECTIONS_1 || memcmp(t->file, TOKENIZER_MAGIC, 8) != 0)
        die("%s: is not a tokenizer file; data/tokenizer_file.py writes one from a Hugging Face tokenizer", t->path);
    memcpy(word, t->file, sizeof(word));
    memcpy(&bytes, t->file + 16, 8);
    memcpy(&t->fingerprint, t->file + 24, 8);
    if (word[2] < 1 || word[2] > TOKENIZER_VERSION)
        die("%s: is a tokenizer file of version %u, this program reads versions 1 to %u; write it again with this "
            "version's data/tokenizer_file.py",
            t->path, word[2], TOKENIZER_VERSION);
    if (bytes > t->bytes)
        die("%s: is truncated: %llu of %llu bytes are there; copy it again", t->path, (unsigned long long)t->bytes,
            (unsigned long long)bytes);
    if (bytes != t->bytes) tokenizer_damaged(t, "bytes follow its end");
    crc32_prepare();
    if (crc32_of(0, t->file + 16, t->bytes - 16) != word[3]) tokenizer_damaged(t, "its checksum is wrong");
    t->flags = word[8], t->ids = word[9], t->vocabulary_ids = word[10], t->unknown = word[12];
    static const size_t sections[] = {TOKENIZER_SECTIONS_1, TOKENIZER_SECTIONS_2, TOKENIZER_SECTIONS_3,
                                      TOKENIZER_SECTIONS_4, TOKENIZER_SECTIONS};
    t->sections = sections[word[2] - 1];
    if (t->flags & ~(uint32_t)(word[2] == 1 ? TOKENIZER_FLAGS_1 : TOKENIZER_FLAGS))
        tokenizer_damaged(t, "unknown flags");
    if (!t->ids || t->ids > INT32_MAX || t->vocabulary_ids > t->ids) tokenizer_damaged(t, "its number of ids");
    if (word[11] >= WORDS_KINDS) tokenizer_damaged(t, "an unknown way to cut words");
    t->words = (WordsKind)word[11];
    if (t->unknown != NO_TOKEN && t->unknown >= t->ids) tokenizer_damaged(t, "the id of unknown characters");
    if (word[13] != t->sections || t->bytes < TOKENIZER_HEADER + 16 * t->sections)
        tokenizer_damaged(t, "its number of sections");
}

static void tokenizer_check_sections(Tokenizer *t) {
    uint64_t place[2];
    for (size_t i = 0; i < TOKENIZER_SECTIONS; i++) {
        t->section[i] = t->file;
        if (i >= t->sections) continue; // sections of a later version are empty
        memcpy(place, t->file + TOKENIZER_HEADER + 16 * i, sizeof(place));
        if (place[0] > t->bytes || place[1] > t->bytes - place[0] || place[0] % 8)
            tokenizer_damaged(t, "a section lies outside of the file");
        t->section[i] = t->file + place[0], t->section_bytes[i] = (size_t)place[1];
    }
    if (t->section_bytes[SECTION_THOUGHT_BEGIN] && !t->section_bytes[SECTION_THOUGHT_END])
        tokenizer_damaged(t, "reasoning begins and does not end");
}

// Returns a section with entries of `size` bytes. *count: number of entries
static const void *tokenizer_entries(const Tokenizer *t, TokenizerSection section, size_t size, size_t *count) {
    if (t->section_bytes[section] % size) tokenizer_damaged(t, "a section has a part of an entry");
    *count = t->section_bytes[section] / size;
    return t->section[section];
}

// Checks and returns a table of offsets[ids + 1] into a section of bytes.
static const uint32_t *tokenizer_check_table(const Tokenizer *t, TokenizerSection offsets_section,
                                             TokenizerSection bytes_section) {
    size_t count;
    const uint32_t *offsets = (const uint32_t *)tokenizer_entries(t, offsets_section, sizeof(uint32_t), &count);
    if (count != (size_t)t->ids + 1 || offsets[0] != 0 || offsets[t->ids] != t->section_bytes[bytes_section])
        tokenizer_damaged(t, "a table of texts has the wrong size");
    for (size_t i = 0; i < t->ids; i++)
        if (offsets[i] > offsets[i + 1]) tokenizer_damaged(t, "a table of texts goes backwards");
    return offsets;
}

static const uint32_t *tokenizer_check_ids(const Tokenizer *t, TokenizerSection section, size_t *count) {
    const uint32_t *ids = (const uint32_t *)tokenizer_entries(t, section, sizeof(uint32_t), count);
    for (size_t i = 0; i < *count; i++)
        if (ids[i] >= t->ids) tokenizer_damaged(t, "a list of ids goes beyond them");
    return ids;
}

static void tokenizer_check_added(Tokenizer *t) {
    t->added = (const AddedToken *)tokenizer_entries(t, SECTION_ADDED, sizeof(AddedToken), &t->added_count);
    for (size_t i = 0; i < t->added_count; i++) {
        const AddedToken *token = &t->added[i], *before = i ? token - 1 : NULL;
        const unsigned char *text = t->section[SECTION_ADDED_TEXT];
        int normalized = (token->flags & ADDED_NORMALIZED) != 0;
        if (token->id >= t->ids || !token->bytes || token->offset > t->section_bytes[SECTION_ADDED_TEXT] ||
            token->bytes > t->section_bytes[SECTION_ADDED_TEXT] - token->offset)
            tokenizer_damaged(t, "an added token lies outside of the file");
        t->begins_added[text[token->offset]] = 1;
        if (!normalized) t->added_raw = i + 1;
        if (!before || normalized != ((before->flags & ADDED_NORMALIZED) != 0)) {
            if (before && !normalized) tokenizer_damaged(t, "its added tokens are out of order");
            continue;
        }
        int order = memcmp(text + before->offset, text + token->offset, min_size(before->bytes, token->bytes));
        if (order > 0 || (order == 0 && before->bytes >= token->bytes))
            tokenizer_damaged(t, "its added tokens are out of order");
    }
}

static int is_character(uint32_t point) { return point < CHARACTERS && (point < 0xd800 || point > 0xdfff); }

static void tokenizer_check_composition(Tokenizer *t) {
    t->decompositions = (const Decomposition *)tokenizer_entries(t, SECTION_DECOMPOSITIONS, sizeof(Decomposition),
                                                                 &t->decomposition_count);
    t->combining = (const uint32_t *)tokenizer_entries(t, SECTION_COMBINING, 8, &t->combining_count);
    t->pairs = (const CompositionPair *)tokenizer_entries(t, SECTION_PAIRS, sizeof(CompositionPair), &t->pair_count);
    for (size_t i = 0; i < t->decomposition_count; i++) {
        const Decomposition *d = &t->decompositions[i];
        if (d->count < 1 || d->count > 4 || (i && d[-1].point >= d->point)) tokenizer_damaged(t, "a decomposition");
        for (size_t j = 0; j < d->count; j++)
            if (!is_character(d->parts[j])) tokenizer_damaged(t, "a decomposition");
    }
    for (size_t i = 0; i < t->combining_count; i++)
        if (t->combining[2 * i + 1] > 255 || (i && t->combining[2 * i - 2] >= t->combining[2 * i]))
            tokenizer_damaged(t, "a combining class");
    for (size_t i = 0; i < t->pair_count; i++) {
        const CompositionPair *p = &t->pairs[i];
        if (!is_character(p->composite)) tokenizer_damaged(t, "a composed character");
        if (i && (p[-1].first > p->first || (p[-1].first == p->first && p[-1].second >= p->second)))
            tokenizer_damaged(t, "its composed characters are out of order");
    }
}

// ---- indices --------------------------------------------------------------------------------------------------------
static uint32_t *tokenizer_slots(size_t entries, size_t *mask) {
    size_t slots = 16;
    while (slots < 2 * entries) slots *= 2;
    *mask = slots - 1;
    return (uint32_t *)checked_calloc(slots, sizeof(uint32_t), "the index of a tokenizer");
}

static void tokenizer_index_merges(Tokenizer *t) {
    t->merges = (const MergeRule *)tokenizer_entries(t, SECTION_MERGES, sizeof(MergeRule), &t->merge_count);
    if (t->merge_count > INT32_MAX) tokenizer_damaged(t, "its number of merges");
    t->merge_slots = tokenizer_slots(t->merge_count, &t->merge_mask);
    for (size_t i = 0; i < t->merge_count; i++) {
        const MergeRule *merge = &t->merges[i];
        if (merge->left >= t->ids || merge->right >= t->ids || merge->result >= t->ids)
            tokenizer_damaged(t, "a merge of ids it does not have");
        uint32_t *slot = merge_slot(t, merge->left, merge->right);
        if (*slot) tokenizer_damaged(t, "a merge stands there twice");
        *slot = (uint32_t)i + 1;
    }
}

static void tokenizer_index_spellings(Tokenizer *t) {
    size_t bytes;
    char name[8];
    t->spelling_slots = tokenizer_slots(t->ids, &t->spelling_mask);
    for (uint32_t id = 0; id < t->ids; id++) {
        const unsigned char *spelling = tokenizer_spelling(t, id, &bytes);
        if (!(t->id_flags[id] & ID_IN_VOCABULARY)) continue;
        uint32_t *slot = spelling_slot(t, spelling, bytes);
        if (*slot) tokenizer_damaged(t, "two ids are spelled the same");
        *slot = id + 1;
    }
    for (size_t byte = 0; byte < 256; byte++) {
        unsigned char one = (unsigned char)byte;
        snprintf(name, sizeof(name), "<0x%02X>", (unsigned)byte);
        t->byte_id[byte] = t->flags & TOKENIZER_BYTE_LEVEL ? tokenizer_find(t, &one, 1)
                                                           : tokenizer_find(t, (const unsigned char *)name, 6);
        if (t->flags & TOKENIZER_BYTE_FALLBACK && t->byte_id[byte] == NO_TOKEN)
            tokenizer_damaged(t, "a byte's token is missing");
    }
}

// Fills symbol_of, the symbols by which patterns see characters: the symbols of the file, or of the named patterns in
// tokenizer_split.h.
static void tokenizer_index_symbols(Tokenizer *t, int named) {
    size_t count;
    const uint32_t *ranges = (const uint32_t *)tokenizer_entries(t, SECTION_CLASSES, 12, &count);
    const uint32_t high = named ? 0x80 : 0, most = named ? 0x7f : 0xff;
    if (!count) tokenizer_damaged(t, "its classes of characters are missing");
    t->symbol_of = (unsigned char *)checked_malloc(CHARACTERS, "the classes of characters");
    memset(t->symbol_of, (int)high, CHARACTERS);
    for (size_t i = 0; i < count; i++) {
        const uint32_t *range = ranges + 3 * i;
        if (range[0] > range[1] || range[1] >= CHARACTERS || range[2] > most)
            tokenizer_damaged(t, "a class of characters");
        memset(t->symbol_of + range[0], (int)(high | range[2]), range[1] - range[0] + 1);
    }
    for (uint32_t c = 0; named && c < 0x80; c++) t->symbol_of[c] = (unsigned char)c;
    if (named) t->symbol_of[OTHER_S] = 0xff;
}

static void tokenizer_open_splits(Tokenizer *t) {
    const char *named = named_patterns[t->words], *patterns = (const char *)t->section[SECTION_PATTERNS];
    const uint32_t *split = (const uint32_t *)tokenizer_entries(t, SECTION_SPLITS, 12, &t->split_count);
    if (named && t->split_count) tokenizer_damaged(t, "two ways to cut words");
    if (!named && !t->split_count) return;
    tokenizer_index_symbols(t, named != NULL);
    t->splits = (Split *)checked_calloc(t->split_count + 1, sizeof(Split), "the patterns of a tokenizer");
    for (size_t i = 0; i < t->split_count; i++, split += 3) { // behaviour, offset, bytes of each pattern
        if (split[0] % SPLIT_INVERTED >= SPLIT_BEHAVIOURS || split[0] / SPLIT_INVERTED > 1)
            tokenizer_damaged(t, "what becomes of a pattern's matches");
        if (split[1] > t->section_bytes[SECTION_PATTERNS] || split[2] > t->section_bytes[SECTION_PATTERNS] - split[1])
            tokenizer_damaged(t, "a pattern lies outside of the file");
        t->splits[i] = split_open(patterns + split[1], split[2], split[0], t->path, i + 1);
    }
    if (named) t->splits[t->split_count++] = split_open(named, strlen(named), SPLIT_ISOLATED, t->path, 1);
}

// ---- open, close ----------------------------------------------------------------------------------------------------
// Reads the file, and checks its header and the bounds of its sections, for callers that need no more.
static Tokenizer *tokenizer_load(const char *path) {
    if (path_is_directory(path))
        die("%s: is a folder; give the " TOKENIZER_NAME " in it, which data/tokenizer_file.py writes", path);
    Tokenizer *t = (Tokenizer *)checked_calloc(1, sizeof(*t), "a tokenizer");
    InputFile file = input_open(path);
    if (file.bytes > TOKENIZER_MAX)
        die("%s: has %llu bytes, more than a tokenizer file may have; write it again with data/tokenizer_file.py", path,
            (unsigned long long)file.bytes);
    t->path = checked_strdup(path);
    t->bytes = file.bytes;
    t->file = (unsigned char *)checked_malloc((size_t)file.bytes, "a tokenizer file");
    input_read(&file, 0, t->file, (size_t)file.bytes);
    input_close(&file);
    tokenizer_check_header(t);
    tokenizer_check_sections(t);
    return t;
}

static Tokenizer *tokenizer_open(const char *path) {
    Tokenizer *t = tokenizer_load(path);
    size_t count;
    t->text_offsets = tokenizer_check_table(t, SECTION_TEXT_OFFSETS, SECTION_TEXT);
    t->text = t->section[SECTION_TEXT];
    t->spelling_offsets = t->text_offsets, t->spelling = t->text;
    if (t->section_bytes[SECTION_SPELLING_OFFSETS]) {
        t->spelling_offsets = tokenizer_check_table(t, SECTION_SPELLING_OFFSETS, SECTION_SPELLING);
        t->spelling = t->section[SECTION_SPELLING];
    }
    t->id_flags = (const unsigned char *)tokenizer_entries(t, SECTION_ID_FLAGS, 1, &count);
    if (count != t->ids) tokenizer_damaged(t, "flags of ids it does not have");
    t->end_ids = tokenizer_check_ids(t, SECTION_END_IDS, &t->end_count);
    t->prefix_ids = tokenizer_check_ids(t, SECTION_PREFIX_IDS, &t->prefix_count);
    tokenizer_check_ids(t, SECTION_SUFFIX_IDS, &count); // ids that end a whole text, but not a prompt
    t->turn_ends = tokenizer_check_ids(t, SECTION_TURN_ENDS, &t->turn_end_count);
    tokenizer_check_added(t);
    tokenizer_check_composition(t);
    tokenizer_index_merges(t);
    tokenizer_index_spellings(t);
    tokenizer_open_splits(t);
    return t;
}

static void tokenizer_close(Tokenizer *t) {
    if (!t) return;
    for (size_t i = 0; i < t->split_count; i++) split_close(&t->splits[i]);
    free(t->splits), free(t->coded.at), free(t->cuts.at);
    free(t->normal.at), free(t->words_text.at);
    free(t->points.at), free(t->symbols.at), free(t->heap.at);
    free(t->spelling_slots), free(t->merge_slots), free(t->symbol_of);
    free(t->file), free(t->path);
    free(t);
}

// ---- where the file lies --------------------------------------------------------------------------------------------
// Where a tokenizer file lies: in the model's folder, in a run's folder next to its checkpoints, or next to shards made
// for the model. Training and `convert` copy it to where `sample` looks.

// Finds tokenizer.tok in the model's folder, or in the folder above (for checkpoint-00000100/model.bin the run's
// folder). Returns 0 if there is none.
static int tokenizer_beside(const char *model, char path[PATH_MAX]) {
    char folder[PATH_MAX], above[PATH_MAX];
    const int is_folder = path_is_directory(model);
    folder_above(folder, model);
    const int found = path_found(path, is_folder ? model : folder, TOKENIZER_NAME);
    if (is_folder || found) return found;
    folder_above(above, folder);
    if (text_ends_with(folder, ".")) return path_found(path, folder, "../" TOKENIZER_NAME);
    return path_found(path, above, TOKENIZER_NAME);
}

// Finds tokenizer.tok in the folder of `shard`, a name or a pattern. Returns 0 if there is none.
static int tokenizer_beside_shard(const char *shard, char path[PATH_MAX]) {
    char folder[PATH_MAX];
    folder_above(folder, shard);
    return path_found(path, folder, TOKENIZER_NAME);
}

// ---- the tokenizer's fingerprint ------------------------------------------------------------------------------------
// Returns a tokenizer's fingerprint, as shards and tokenizer files record it: (bytes of tokenizer.json) << 32 | their
// CRC-32.
static uint64_t tokenizer_fingerprint(const char *path) {
    unsigned char buffer[16384];
    InputFile file = input_open(path);
    uint64_t fingerprint;
    uint32_t crc = 0;
    size_t bytes;
    crc32_prepare();
    if (text_ends_with(path, ".tok") && file.bytes >= 32) {
        input_read(&file, 24, &fingerprint, sizeof(fingerprint));
    } else {
        for (uint64_t offset = 0; offset < file.bytes; offset += bytes) {
            bytes = min_size((size_t)(file.bytes - offset), sizeof(buffer));
            input_read(&file, offset, buffer, bytes);
            crc = crc32_of(crc, buffer, bytes);
        }
        fingerprint = file.bytes << 32 | crc;
    }
    input_close(&file);
    return fingerprint;
}

// Returns the fingerprint of the chat template in the file, as shards record it; 0: no template
static uint64_t tokenizer_template(const Tokenizer *t) {
    const uint64_t bytes = t->section_bytes[SECTION_TEMPLATE];
    return bytes ? bytes << 32 | crc32_of(0, t->section[SECTION_TEMPLATE], (size_t)bytes) : 0;
}

#endif
