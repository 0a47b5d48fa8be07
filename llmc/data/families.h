/*
Families, with --share-prefixes on: plain documents that begin alike, such as the turns of one trajectory. A family is
a sample (documents.h): it lies in one sequence, and its documents share rows (tree.h).

    candidates   documents with equal hashes of their first PREFIX_LEAST rows
    order        candidates are sorted by their tokens, read in blocks, until they differ. So neighbours have most in
                 common, and each token is read once, however many documents there are
    family       neighbours, those with most in common first, that share at least PREFIX_LEAST rows and half of the
                 longest document of one of their families. Half: a system prompt that all documents have must not make
                 one family of them. prefixes.h shares it in a sequence
    a large one  is cut where its next document would not fit into a sequence; each part computes the prefix

A family takes the place of its first document in the order of the files. Data without families keep their samples.
*/
#ifndef LLMC_FAMILIES_H
#define LLMC_FAMILIES_H
#include "documents_read.h"
#include "prefixes.h"

#define FAMILY_TOKENS ((size_t)1 << 24) // tokens in memory while candidates are sorted
#define FAMILY_BLOCK  64                // least tokens of a candidate that are read at a time

// A candidate
typedef struct {
    uint64_t hash;
    size_t at;          // byte of its first id in the shard
    uint32_t segment;   // index
    uint32_t common;    // tokens, later rows, that it shares with the candidate before it
    uint32_t joins;     // 1: it belongs to the family of the candidate before it
    uint32_t end;       // of the first and the last of a family: index of the other one
    uint32_t longest;   // of the first and the last of a family: rows of the family's longest document
    uint32_t documents; // of the first of a family that fits into a sequence: its documents; else 0
    uint32_t forks;     // of the same: its forks
    uint32_t tokens;
    uint32_t *block; // [tokens] its next tokens
} FamilyText;

typedef struct {
    DataLoader *d;
    FamilyText *text; // [texts]
    size_t texts;
    uint32_t *block; // [room]
    size_t room;
    PrefixText *prefix;        // [texts of the largest class]
    PackingItem *item, *spare; // [texts of the largest class]
    size_t capacity;           // rows of a sequence
} Families;

// ---- reading --------------------------------------------------------------------------------------------------------
// Reads tokens [from, from + count) of a candidate, as many as there are. Returns how many.
static size_t family_read(const Families *f, const FamilyText *text, size_t from, size_t count, uint32_t *to) {
    DataLoader *d = f->d;
    const Segment *s = &d->segment[text->segment];
    const size_t shard = last_at_most(&d->shard[0].documents_before, sizeof(d->shard[0]), d->shards, s->document);
    const size_t width = d->shard[shard].header.id_bytes, all = (size_t)s->positions + 1;
    const size_t n = min_size(count, all - min_size(from, all));
    unsigned char *const bytes = (unsigned char *)to;
    input_read(documents_file(d, shard), text->at + from * width, bytes, n * width);
    for (size_t i = n; i-- > 0;) to[i] = shard_id(&d->shard[shard].header, bytes, i);
    return n;
}

// Lists the documents that are long enough, with the hash of their first tokens.
static void families_hash(Families *f) {
    DataLoader *d = f->d;
    uint32_t first[PREFIX_LEAST + 1];
    for (size_t i = 0; i < d->segments; i++) {
        const Segment *s = &d->segment[i];
        if (s->positions < PREFIX_LEAST) continue;
        FamilyText *text = &f->text[f->texts++];
        const DocumentRef at = documents_find(d, s->document);
        const TokenShard *shard = &at.shard->header;
        text->segment = (uint32_t)i;
        text->at = shard->ids + (at.entry.first + s->part * d->settings.T) * shard->id_bytes;
        family_read(f, text, 0, PREFIX_LEAST + 1, first);
        text->hash = fnv1a(0, first, sizeof(first));
    }
}

// ---- order ----------------------------------------------------------------------------------------------------------
static int family_by_hash(const void *a, const void *b) {
    const FamilyText *x = (const FamilyText *)a, *y = (const FamilyText *)b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    return (x->segment > y->segment) - (x->segment < y->segment);
}

static int family_by_segment(const void *a, const void *b) {
    const FamilyText *x = (const FamilyText *)a, *y = (const FamilyText *)b;
    return (x->segment > y->segment) - (x->segment < y->segment);
}

static size_t family_block_common(const FamilyText *a, const FamilyText *b) {
    const size_t n = min_size(a->tokens, b->tokens);
    size_t i = 0;
    while (i < n && a->block[i] == b->block[i]) i++;
    return i;
}

static int family_by_block(const void *a, const void *b) { // a prefix first
    const FamilyText *x = (const FamilyText *)a, *y = (const FamilyText *)b;
    const size_t i = family_block_common(x, y);
    if (i < x->tokens && i < y->tokens) return x->block[i] < y->block[i] ? -1 : 1;
    return x->tokens != y->tokens ? x->tokens < y->tokens ? -1 : 1 : family_by_segment(a, b);
}

// Sorts n candidates whose first `depth` tokens are equal, and sets what each has in common with the one before it;
// of the first, this is `depth`.
static void family_sort(Families *f, FamilyText *text, size_t n, size_t depth) {
    const size_t block = min_size(f->room / n, f->d->settings.T + 1);
    size_t end;
    qsort(text, n, sizeof(*text), family_by_segment); // reads a file from its beginning to its end
    for (size_t i = 0; i < n; i++) {
        text[i].block = f->block + i * block;
        text[i].tokens = (uint32_t)family_read(f, &text[i], depth, block, text[i].block);
    }
    qsort(text, n, sizeof(*text), family_by_block);
    for (size_t i = 0; i < n; i++)
        text[i].common = (uint32_t)(depth + (i ? family_block_common(&text[i - 1], &text[i]) : 0));
    for (size_t i = 0; i < n; i = end) {
        const uint32_t common = text[i].common;
        for (end = i + 1; end < n && text[end].common == depth + block;) end++;
        if (end - i > 1) family_sort(f, text + i, end - i, depth + block);
        text[i].common = common;
    }
}

// ---- families -------------------------------------------------------------------------------------------------------
static size_t family_rows(const Families *f, const FamilyText *text) { return f->d->segment[text->segment].positions; }

// Joins neighbours among n candidates to families.
static void family_join(Families *f, FamilyText *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        text[i].common -= text[i].common > 0; // p common tokens give p - 1 common rows
        text[i].joins = 0, text[i].end = (uint32_t)i, text[i].longest = (uint32_t)family_rows(f, &text[i]);
        f->item[i].positions = text[i].common, f->item[i].sample = (uint32_t)i;
    }
    packing_sort(f->item, f->spare, n);
    for (size_t k = 0; k < n && f->item[k].positions >= PREFIX_LEAST; k++) {
        FamilyText *right = &text[f->item[k].sample], *left = right - 1;
        const uint32_t shorter = left->longest < right->longest ? left->longest : right->longest;
        if (right->common < (shorter + 1) / 2) continue;
        FamilyText *first = &text[left->end], *last = &text[right->end];
        right->joins = 1;
        first->longest = last->longest = left->longest > right->longest ? left->longest : right->longest;
        first->end = (uint32_t)(last - text), last->end = (uint32_t)(first - text);
    }
}

// Finds how many of n related candidates, at least one, fit into a sequence as one family. Sets what they share.
static size_t family_fit(Families *f, FamilyText *text, size_t n) {
    size_t positions = 0, rows = 0, fit = 0;
    for (; fit < n; fit++) {
        const size_t length = family_rows(f, &text[fit]);
        positions += length, rows += length - (fit ? text[fit].common : 0);
        if (fit && (rows > f->capacity || positions > INT32_MAX)) break;
    }
    for (;; fit--) { // with fewer forks there are more rows
        PrefixSum sum;
        size_t least = PREFIX_LEAST;
        do {
            for (size_t i = 0; i < fit; i++) {
                const PrefixText one = {(uint32_t)family_rows(f, &text[i]), i ? text[i].common : 0, 0, 0, 0, 0, 0, 0};
                f->prefix[i] = one;
            }
            sum = prefix_snap(f->prefix, fit, least);
            least *= 2;
        } while (sum.forks > prefix_budget(sum.rows));
        if (fit > 1 && sum.rows > f->capacity) continue;
        for (size_t i = 0; i < fit; i++) text[i].common = f->prefix[i].common, text[i].documents = 0;
        text[0].documents = (uint32_t)fit, text[0].forks = (uint32_t)sum.forks;
        return fit;
    }
}

// Makes families of n candidates in order.
static void families_make(Families *f, FamilyText *text, size_t n) {
    size_t end;
    family_join(f, text, n);
    for (size_t i = 0; i < n; i = end) {
        for (end = i + 1; end < n && text[end].joins;) end++;
        while (i += family_fit(f, text + i, end - i), i < end) f->d->families_cut++;
    }
}

// ---- the index ------------------------------------------------------------------------------------------------------
// Returns for each segment: 0 if it is in no family, 1 + the index of its family's first candidate if it is the first
// segment of its family, else UINT32_MAX.
static uint32_t *families_places(const Families *f) {
    uint32_t *place = (uint32_t *)checked_calloc(f->d->segments, sizeof(uint32_t), "the families of documents");
    for (size_t t = 0; t < f->texts; t++) {
        const FamilyText *text = &f->text[t];
        uint32_t first = text->segment;
        if (text->documents < 2) continue;
        for (size_t i = 0; i < text->documents; i++) {
            place[text[i].segment] = UINT32_MAX;
            if (text[i].segment < first) first = text[i].segment;
        }
        place[first] = (uint32_t)t + 1;
        f->d->families++;
    }
    return place;
}

// Makes samples of families and of documents alone, and sorts the segments by samples.
static void families_index(Families *f) {
    DataLoader *d = f->d;
    uint32_t *place = families_places(f);
    if (!d->families) {
        free(place);
        return;
    }
    Segment *const old = d->segment;
    size_t count = 0;
    d->segment = (Segment *)checked_calloc(d->segments, sizeof(Segment), "the index of the documents");
    d->common = (uint32_t *)checked_calloc(d->segments, sizeof(uint32_t), "the families of documents");
    d->sample = (Sample *)checked_calloc(d->segments + 1, sizeof(Sample), "the families of documents");
    d->samples = 0;
    for (size_t i = 0; i < d->segments; i++) {
        const FamilyText *text = place[i] ? &f->text[place[i] - 1] : NULL;
        Sample *sample = &d->sample[d->samples];
        if (place[i] == UINT32_MAX) continue;
        sample->first = (uint32_t)count, sample->forks = text ? text->forks : 0;
        for (size_t k = 0; k < (text ? text->documents : 1); k++, count++) {
            d->segment[count] = old[text ? text[k].segment : i];
            d->common[count] = text ? text[k].common : 0;
            sample->positions += d->segment[count].positions;
            sample->rows += d->segment[count].positions - d->common[count];
        }
        d->largest_sample = max_size(d->largest_sample, count - sample->first);
        d->sample[++d->samples].first = (uint32_t)count;
    }
    free(old), free(place);
}

// Finds families, if they are asked for: of documents that are trained on alone, or of all documents as such.
static void families_find(DataLoader *d) {
    Families f = {0};
    size_t largest = 0, end;
    if (d->regular || d->sample || d->settings.prefixes != PREFIXES_OF_ALL || d->settings.use == DATA_PROMPTS) return;
    if (d->settings.use == DATA_TRAINS && kind_is_whole(d->shard[0].header.kind)) return; // kto's answers stay alone
    f.d = d, f.capacity = d->settings.B * d->settings.T;
    f.text = (FamilyText *)checked_calloc(d->segments, sizeof(FamilyText), "the beginnings of documents");
    families_hash(&f);
    qsort(f.text, f.texts, sizeof(FamilyText), family_by_hash);
    for (size_t i = 0; i < f.texts; i = end) {
        for (end = i + 1; end < f.texts && f.text[end].hash == f.text[i].hash;) end++;
        largest = max_size(largest, end - i);
    }
    f.room = min_size(f.texts * (d->settings.T + 1), max_size(FAMILY_TOKENS, largest * FAMILY_BLOCK));
    f.block = (uint32_t *)checked_calloc(max_size(f.room, 1), sizeof(uint32_t), "the tokens of documents");
    f.item = (PackingItem *)checked_calloc(2 * max_size(largest, 1), sizeof(PackingItem), "the families of documents");
    f.spare = f.item + max_size(largest, 1);
    f.prefix = (PrefixText *)checked_calloc(max_size(largest, 1), sizeof(PrefixText), "the families of documents");
    for (size_t i = 0; i < f.texts; i = end) {
        for (end = i + 1; end < f.texts && f.text[end].hash == f.text[i].hash;) end++;
        if (end - i > 1) family_sort(&f, f.text + i, end - i, 0);
        if (end - i > 1) families_make(&f, f.text + i, end - i);
    }
    families_index(&f);
    free(f.item), free(f.text), free(f.block), free(f.prefix);
}

#endif
