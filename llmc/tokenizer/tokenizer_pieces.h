/*
Compares the pieces of two tokenizers, each a tokenizer.tok or a Hugging Face tokenizer.json: the bytes that an id
stands for. A teacher reads its student's ids (llmc/train/reference.h), so both must have the same pieces. Chat
templates, merges and flags of special tokens may differ, and one may have more added tokens.
*/
#ifndef LLMC_TOKENIZER_PIECES_H
#define LLMC_TOKENIZER_PIECES_H
#include "llmc/base/json.h"
#include "tokenizer_file.h"

#define TOKENIZER_JSON_MAX ((size_t)1 << 28) // most bytes of a tokenizer.json

typedef struct {
    const char *path;
    size_t ids, own;   // largest id + 1; of the model's own vocabulary, without added tokens
    const char **text; // [ids] NULL: no piece
    size_t *bytes;     // [ids]
    double most;       // ids are below the bytes of tokenizer.json, which has a few bytes for each
    Tokenizer *file;   // of a tokenizer.tok, else NULL
    cJSON *root;       // of a tokenizer.json, else NULL
} Pieces;

// ---- names of pieces in tokenizer.json ------------------------------------------------------------------------------
// Returns the byte of a character of GPT-2's byte alphabet, in which each byte is a visible character; -1: none
static int alphabet_byte(uint32_t point) {
    if ((point > 0x20 && point < 0x7f) || (point > 0xa0 && point < 0x100 && point != 0xad)) return (int)point;
    if (point < 0x100 || point > 0x143) return -1;
    const int hidden = (int)point - 0x100; // the other bytes in order: 0x00 to 0x20, 0x7f to 0xa0, 0xad
    return hidden <= 0x20 ? hidden : hidden - 0x21 <= 0xa0 - 0x7f ? 0x7f + hidden - 0x21 : 0xad;
}

// Decodes a name of the byte alphabet in place. Returns its bytes; 0: it has other characters and stays
static size_t decode_alphabet(char *name, size_t length) {
    size_t bytes = 0;
    for (int writes = 0; writes < 2; writes++) {
        for (size_t i = bytes = 0; i < length; bytes++) {
            const unsigned char *at = (const unsigned char *)name + i;
            const uint32_t point = at[0] < 0x80 ? at[0] : (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu); // at most 2 bytes
            const int byte = at[0] < 0xe0 ? alphabet_byte(point) : -1;
            if (byte < 0) return 0;
            i += at[0] < 0x80 ? 1 : 2;
            if (writes) name[bytes] = (char)byte;
        }
    }
    return bytes;
}

// Decodes a name of a SentencePiece vocabulary in place: U+2581 is a space, "<0x41>" a byte, U+E000 a zero
// (pieces_read_json). Returns its bytes.
static size_t decode_spaces(char *name, size_t length) {
    unsigned byte;
    char end;
    size_t bytes = 0;
    if (length == 6 && *name == '<' && sscanf(name, "<0x%2X%c", &byte, &end) == 2 && end == '>') {
        name[0] = (char)byte;
        return 1;
    }
    for (size_t i = 0; i < length; bytes++) {
        const int space = !strncmp(name + i, "\xe2\x96\x81", 3), zero = !strncmp(name + i, "\xee\x80\x80", 3);
        name[bytes] = space ? ' ' : zero ? 0 : name[i];
        i += space || zero ? 3 : 1;
    }
    return bytes;
}

// Tells whether a decoder of tokenizer.json, alone or in a sequence, is ByteLevel.
static int decodes_alphabet(const cJSON *decoder) {
    JSON_EACH(part, json_get(decoder, "decoders"))
    if (json_is(json_get(part, "type"), "ByteLevel")) return 1;
    return json_is(json_get(decoder, "type"), "ByteLevel");
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Sets a piece. An added token loses a first space, which its normal form may have.
static void pieces_set_text(Pieces *p, size_t id, const char *text, size_t bytes, int added) {
    const int drops = added && bytes > 1 && *text == ' ';
    p->text[id] = text + drops, p->bytes[id] = bytes - (size_t)drops;
}

static void pieces_set(Pieces *p, const cJSON *id, char *name, int alphabet, int added) {
    const double number = id && cJSON_IsNumber(id) ? id->valuedouble : -1;
    if (!name || !(number >= 0 && number < p->most) || number != floor(number))
        die("%s: is not a tokenizer: a piece has no name or no id; copy the file again", p->path);
    const size_t at = (size_t)number, length = strlen(name);
    if (at >= p->ids) {
        p->text = (const char **)checked_realloc(p->text, (at + 1) * sizeof(*p->text), "pieces of a tokenizer");
        p->bytes = (size_t *)checked_realloc(p->bytes, (at + 1) * sizeof(*p->bytes), "pieces of a tokenizer");
        while (p->ids <= at) p->text[p->ids] = NULL, p->bytes[p->ids++] = 0;
    }
    const size_t decoded = alphabet ? decode_alphabet(name, length) : decode_spaces(name, length);
    pieces_set_text(p, at, name, decoded ? decoded : length, added);
}

static void pieces_read_json(Pieces *p) {
    size_t length;
    char *text = input_read_text(p->path, TOKENIZER_JSON_MAX, &length);
    p->most = (double)length;
    for (char *at = text; (at = strchr(at, '\\')) && at[1]; at += 2) // cJSON would end a name at \u0000
        if (!strncmp(at + 1, "u0000", 5)) memcpy(at + 1, "ue000", 5);
    p->root = cJSON_ParseWithLength(text, length); // keys may have control characters
    free(text);
    if (!p->root) die("%s: is not valid JSON; copy the file again", p->path);
    const int alphabet = decodes_alphabet(json_get(p->root, "decoder"));
    const cJSON *vocabulary = json_get(json_get(p->root, "model"), "vocab");
    cJSON number = {0};
    number.type = cJSON_Number;
    if (!vocabulary) die("%s: is not a tokenizer.json: it has no model with a vocab; copy the file again", p->path);
    for (cJSON *item = vocabulary->child; item; item = item->next, number.valuedouble++) {
        if (cJSON_IsArray(vocabulary)) // [name, score] of each id
            pieces_set(p, &number, cJSON_IsArray(item) && item->child ? item->child->valuestring : NULL, alphabet, 0);
        else
            pieces_set(p, item, item->string, alphabet, 0);
    }
    p->own = p->ids;
    JSON_EACH(token, json_get(p->root, "added_tokens")) {
        const cJSON *content = json_get(token, "content");
        pieces_set(p, json_get(token, "id"), content ? content->valuestring : NULL, alphabet, 1);
    }
}

static void pieces_read_file(Pieces *p) {
    const Tokenizer *t = p->file = tokenizer_open(p->path);
    p->ids = t->ids, p->own = t->vocabulary_ids;
    p->text = (const char **)checked_calloc(p->ids, sizeof(*p->text), "pieces of a tokenizer");
    p->bytes = (size_t *)checked_calloc(p->ids, sizeof(*p->bytes), "pieces of a tokenizer");
    for (size_t id = 0; id < p->ids; id++) {
        const int own = t->id_flags[id] & ID_IN_VOCABULARY || !(t->flags & TOKENIZER_ENCODES);
        const int spelled = own && t->spelling != t->text; // the text of an own id may be an added token's normal form
        const uint32_t *offset = (spelled ? t->spelling_offsets : t->text_offsets) + id;
        char *text = (char *)(uintptr_t)(spelled ? t->spelling : t->text) + offset[0];
        const size_t length = offset[1] - offset[0];
        if (t->id_flags[id] & ID_EXISTS)
            pieces_set_text(p, id, text, spelled ? decode_spaces(text, length) : length, !own);
    }
}

static Pieces pieces_open(const char *path) {
    Pieces p = {0};
    p.path = path;
    if (text_ends_with(path, ".tok"))
        pieces_read_file(&p);
    else
        pieces_read_json(&p);
    return p;
}

static void pieces_close(Pieces *p) {
    tokenizer_close(p->file), cJSON_Delete(p->root);
    free(p->text), free(p->bytes);
}

// ---- comparing ------------------------------------------------------------------------------------------------------
// Tells whether two tokenizers have the same own vocabulary, and the same piece wherever both have an id.
static int pieces_same(const char *path, const char *other) {
    Pieces a = pieces_open(path), b = pieces_open(other);
    int same = a.own == b.own;
    for (size_t id = 0; id < min_size(a.ids, b.ids) && same; id++) {
        if (a.text[id] && b.text[id])
            same = a.bytes[id] == b.bytes[id] && !memcmp(a.text[id], b.text[id], a.bytes[id]);
        else
            same = id >= a.own || a.text[id] == b.text[id]; // both NULL
    }
    pieces_close(&a), pieces_close(&b);
    return same;
}

#endif
