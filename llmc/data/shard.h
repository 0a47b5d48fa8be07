/*
Token shards: the files that a run reads, and the format of data/prepare.py (data/README.md), one file of whole
documents: a header of 256 bytes, a table of documents, their ids, a loss mask of a byte a token (1: a target), and an
advantage for each token where there are any. Little-endian. llm.c's shards are llmc_shard.h's.

A shard is checked when it is opened: every field of the header against the others and against the size of the file, and
the whole table, by its checksum and entry by entry: also that pairs have both answers and groups several. A document's
own checksum is checked when it is read (documents_read.h).
*/
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H
#include "llmc/base/hash.h"
#include "llmc/base/file.h"
#include <glob.h>

#define TOKEN_SHARD_MAGIC   "SBPSHARD"
#define TOKEN_SHARD_VERSION 1
#define TOKEN_SHARD_HEADER  256
#define TOKEN_SHARD_ENTRY   48
#define TOKEN_SHARD_ALIGN   64
#define TABLE_ENTRIES       4096                       // read at a time
#define SHARD_TOKEN_BYTES   (2 * sizeof(uint32_t) + 1) // at most: id, mask and value

// ---- which files ----------------------------------------------------------------------------------------------------
typedef struct {
    char **path; // [count], sorted
    size_t count;
} ShardPaths;

static void shard_paths_add(ShardPaths *list, const char *path) {
    char **grown = (char **)checked_calloc(list->count + 1, sizeof(char *), "the list of shards");
    if (list->count) memcpy(grown, list->path, list->count * sizeof(char *));
    free(list->path);
    list->path = grown;
    list->path[list->count++] = checked_strdup(path);
}

static int shard_paths_compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void shard_paths_free(ShardPaths *list) {
    for (size_t i = 0; i < list->count; i++) free(list->path[i]);
    free(list->path);
    memset(list, 0, sizeof(*list));
}

typedef struct {
    dev_t device;
    ino_t inode;
    const char *path;
} ShardIdentity;

static int shard_identity_compare(const void *a, const void *b) {
    const ShardIdentity *x = (const ShardIdentity *)a, *y = (const ShardIdentity *)b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    return x->inode < y->inode ? -1 : x->inode > y->inode;
}

// One file by two names (a link, "./") would count twice.
static void shard_paths_check_files(const ShardPaths *list) {
    ShardIdentity *file = (ShardIdentity *)checked_calloc(list->count, sizeof(ShardIdentity), "the list of shards");
    struct stat status;
    size_t known = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (stat(list->path[i], &status) != 0) continue; // opening it says why
        file[known].device = status.st_dev, file[known].inode = status.st_ino;
        file[known++].path = list->path[i];
    }
    qsort(file, known, sizeof(ShardIdentity), shard_identity_compare);
    for (size_t i = 1; i < known; i++)
        if (!shard_identity_compare(&file[i - 1], &file[i]))
            die("%s and %s are the same file, which would count twice; name it once", file[i - 1].path, file[i].path);
    free(file);
}

// Each path is a file or, where no such file exists, a glob.
static ShardPaths shard_paths_find(const char *const *paths, size_t count) {
    ShardPaths list = {NULL, 0};
    for (size_t i = 0; i < count; i++) {
        glob_t found;
        if (path_exists(paths[i]) || !strpbrk(paths[i], "*?[")) {
            shard_paths_add(&list, paths[i]);
            continue;
        }
        int failed = glob(paths[i], 0, NULL, &found);
        if (failed == GLOB_NOMATCH) die("no file matches '%s'; check the folder and the pattern", paths[i]);
        if (failed) die("cannot search for '%s': %s", paths[i], strerror(errno));
        for (size_t j = 0; j < found.gl_pathc; j++) shard_paths_add(&list, found.gl_pathv[j]);
        globfree(&found);
    }
    if (!list.count) die("no shards were given; name token files (.bin) or a quoted pattern");
    qsort(list.path, list.count, sizeof(char *), shard_paths_compare);
    for (size_t i = 1; i < list.count; i++)
        if (!strcmp(list.path[i - 1], list.path[i])) die("%s is named twice in the data; name it once", list.path[i]);
    shard_paths_check_files(&list);
    return list;
}

// True where the file begins as a shard of documents; else it may be one of llm.c's.
static int is_token_shard(const char *path) {
    char magic[8] = "";
    if (path_is_directory(path))
        die("%s: is a folder; name its shards, for example '%s/train-*.bin' (quoted)", path, path);
    InputFile file = input_open(path);
    if (file.bytes >= sizeof(magic)) input_read(&file, 0, magic, sizeof(magic));
    input_close(&file);
    return !memcmp(magic, TOKEN_SHARD_MAGIC, sizeof(magic));
}

// ---- little-endian --------------------------------------------------------------------------------------------------
static uint32_t shard_uint16(const unsigned char *bytes) { return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8; }

static uint32_t shard_uint32(const unsigned char *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t shard_uint64(const unsigned char *bytes) {
    return (uint64_t)shard_uint32(bytes) | (uint64_t)shard_uint32(bytes + 4) << 32;
}

static float shard_float32(const unsigned char *bytes) {
    uint32_t bits = shard_uint32(bytes);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// ---- the header -----------------------------------------------------------------------------------------------------
// Kinds of documents: texts; chosen and rejected answers, in turn; a prompt's completions with their rewards; prompts
// without targets, some with a reference answer behind.
typedef enum { KIND_DOCUMENTS, KIND_PAIRS, KIND_GROUPS, KIND_PROMPTS } ShardKind;

typedef struct {
    char *path;
    uint64_t bytes; // of the file
    ShardKind kind;
    uint64_t documents, tokens, targets, longest;
    uint64_t groups, largest_group; // pairs or groups, documents of the largest; 0 before the table's check
    size_t id_bytes;
    uint64_t vocabulary;                // of its tokenizer
    uint64_t tokenizer;                 // (bytes of tokenizer.json) << 32 | crc32, 0: bytes
    char tokenizer_name[65];            // printable
    uint64_t table, ids, masks, values; // offsets in the file; 0: there are none
    uint32_t table_crc, header_crc;
    size_t regular; // T of the documents of one of llm.c's shards; 0: documents are as the table says
} TokenShard;

// One entry of the table.
typedef struct {
    uint64_t first, tokens, targets, group, prompt;
    float reward;
    uint32_t crc;
} ShardDocument;

static int kind_has_groups(ShardKind kind) { return kind == KIND_PAIRS || kind == KIND_GROUPS; }

static uint64_t shard_align(uint64_t offset) {
    return (offset + TOKEN_SHARD_ALIGN - 1) / TOKEN_SHARD_ALIGN * TOKEN_SHARD_ALIGN;
}

static void shard_check_kind(const TokenShard *s, uint32_t kind) {
    if (kind > KIND_PROMPTS)
        die("%s: kind %u of a token shard is not known; kinds are 0 to %d", s->path, kind, KIND_PROMPTS);
    if (kind != KIND_DOCUMENTS && s->values)
        die("%s: is of kind %u and holds values for each token, which only documents (kind 0) have; prepare it without",
            s->path, kind);
}

// The i-th of the ids in a buffer.
static uint32_t shard_id(const TokenShard *s, const unsigned char *ids, size_t i) {
    return s->id_bytes == 2 ? shard_uint16(ids + 2 * i) : shard_uint32(ids + 4 * i);
}

// Sections in their order, each at the next multiple of 64, the last one up to the file's end.
static void shard_check_sections(const TokenShard *s) {
    const struct {
        const char *name;
        uint64_t begins, expected;
    } section[] = {{"document table is", s->table, TOKEN_SHARD_HEADER},
                   {"ids are", s->ids, shard_align(s->table + s->documents * TOKEN_SHARD_ENTRY)},
                   {"masks are", s->masks, shard_align(s->ids + s->tokens * s->id_bytes)},
                   {"values are", s->values, s->values ? shard_align(s->masks + s->tokens) : 0},
                   {"end is", s->bytes, s->values ? s->values + s->tokens * sizeof(float) : s->masks + s->tokens}};
    for (size_t i = 0; i < sizeof(section) / sizeof(section[0]); i++)
        if (section[i].begins != section[i].expected)
            die("%s: its %s at byte %llu, with %llu documents and %llu tokens it should be %llu; write it again",
                s->path, section[i].name, (unsigned long long)section[i].begins, (unsigned long long)s->documents,
                (unsigned long long)s->tokens, (unsigned long long)section[i].expected);
}

static void shard_read_name(TokenShard *s, const unsigned char name[64]) {
    if (!memchr(name, 0, 64)) die("%s: the name of its tokenizer has no end; write it again", s->path);
    memcpy(s->tokenizer_name, name, 64);
    for (size_t i = 0; s->tokenizer_name[i]; i++) // it goes into messages of one line
        if ((unsigned char)s->tokenizer_name[i] < 0x20 || s->tokenizer_name[i] == 0x7f) s->tokenizer_name[i] = '?';
    if (!s->tokenizer_name[0]) memcpy(s->tokenizer_name, "unnamed", 8);
}

static void shard_check_header(const char *path, const unsigned char header[TOKEN_SHARD_HEADER], uint64_t bytes) {
    unsigned char copy[TOKEN_SHARD_HEADER];
    if (shard_uint32(header + 12) == 0x04030201u)
        die("%s: was written on a big-endian machine; swap its bytes or write it again", path);
    if (shard_uint32(header + 8) != TOKEN_SHARD_VERSION)
        die("%s: version %u of a token shard is not known, expected %d", path, shard_uint32(header + 8),
            TOKEN_SHARD_VERSION);
    memcpy(copy, header, sizeof(copy));
    memset(copy + 124, 0, 4);
    if (crc32_of(0, copy, sizeof(copy)) != shard_uint32(header + 124))
        die("%s: the checksum of its header is wrong, the file is damaged; copy or write it again", path);
    if (shard_uint32(header + 12) != 0x01020304u)
        die("%s: its byte order mark is %08x, expected 01020304", path, shard_uint32(header + 12));
    if (shard_uint64(header + 16) != TOKEN_SHARD_HEADER)
        die("%s: its header says that it has %llu bytes, expected %d", path,
            (unsigned long long)shard_uint64(header + 16), TOKEN_SHARD_HEADER);
    if (shard_uint64(header + 24) != bytes)
        die("%s: its header says %llu bytes, but the file has %llu; it is %s", path,
            (unsigned long long)shard_uint64(header + 24), (unsigned long long)bytes,
            bytes < shard_uint64(header + 24) ? "truncated" : "not what its header says");
}

// Everything the header says, held against itself and the file.
static TokenShard shard_read_header(const InputFile *file) {
    unsigned char header[TOKEN_SHARD_HEADER];
    const char *path = file->path;
    TokenShard s = {0};
    if (file->bytes < TOKEN_SHARD_HEADER)
        die("%s: its %llu bytes are less than the header of a token shard (%d); it is truncated", path,
            (unsigned long long)file->bytes, TOKEN_SHARD_HEADER);
    input_read(file, 0, header, sizeof(header));
    shard_check_header(path, header, file->bytes);
    s.path = checked_strdup(path);
    s.bytes = file->bytes;
    s.documents = shard_uint64(header + 32), s.tokens = shard_uint64(header + 40);
    s.targets = shard_uint64(header + 48), s.longest = shard_uint64(header + 56);
    s.id_bytes = shard_uint32(header + 64);
    s.vocabulary = shard_uint64(header + 72), s.tokenizer = shard_uint64(header + 80);
    s.table = shard_uint64(header + 88), s.ids = shard_uint64(header + 96), s.masks = shard_uint64(header + 104);
    s.values = shard_uint64(header + 112);
    s.table_crc = shard_uint32(header + 120), s.header_crc = shard_uint32(header + 124);
    shard_check_kind(&s, shard_uint32(header + 68));
    s.kind = (ShardKind)shard_uint32(header + 68);
    if (s.id_bytes != 2 && s.id_bytes != 4) die("%s: has ids of %zu bytes, expected 2 or 4", path, s.id_bytes);
    if (s.vocabulary < 1 || s.vocabulary > (s.id_bytes == 2 ? 65536u : 2147483648u))
        die("%s: a vocabulary of %llu does not go with ids of %zu bytes", path, (unsigned long long)s.vocabulary,
            s.id_bytes);
    if (s.documents > s.bytes / TOKEN_SHARD_ENTRY || s.tokens > s.bytes)
        die("%s: %llu documents and %llu tokens cannot lie in %llu bytes", path, (unsigned long long)s.documents,
            (unsigned long long)s.tokens, (unsigned long long)s.bytes);
    shard_check_sections(&s);
    shard_read_name(&s, header + 128);
    return s;
}

// ---- the table ------------------------------------------------------------------------------------------------------
static ShardDocument shard_document(const unsigned char entry[TOKEN_SHARD_ENTRY]) {
    ShardDocument d;
    d.first = shard_uint64(entry), d.tokens = shard_uint64(entry + 8);
    d.targets = shard_uint64(entry + 16), d.group = shard_uint64(entry + 24), d.prompt = shard_uint64(entry + 32);
    d.reward = shard_float32(entry + 40), d.crc = shard_uint32(entry + 44);
    return d;
}

// Entries [first, first + the result) of the table, into buffer[TABLE_ENTRIES * TOKEN_SHARD_ENTRY].
static size_t shard_read_entries(const TokenShard *s, const InputFile *file, uint64_t first, unsigned char *buffer) {
    size_t count = (size_t)(s->documents - first < TABLE_ENTRIES ? s->documents - first : TABLE_ENTRIES);
    input_read(file, s->table + first * TOKEN_SHARD_ENTRY, buffer, count * TOKEN_SHARD_ENTRY);
    return count;
}

static void shard_check_document(const TokenShard *s, uint64_t number, const ShardDocument *d, uint64_t begin) {
    const int prompts = s->kind == KIND_PROMPTS;
    const char *fault = d->first != begin                              ? "does not begin where the one before it ends"
                        : d->tokens < 1 || (d->tokens < 2 && !prompts) ? "has fewer than 2 tokens"
                        : d->tokens > s->tokens - begin                ? "goes beyond the last token"
                        : d->targets < 1 && !prompts                   ? "has no target"
                        : d->targets > 0 && prompts                    ? "is a prompt and has targets"
                        : d->targets > d->tokens - 1                   ? "has more targets than tokens"
                        : d->prompt > d->tokens                        ? "has a prompt that is longer than itself"
                        : d->prompt < 1 && prompts                     ? "has no prompt"
                        : !isfinite(d->reward)                         ? "has a reward that is not a finite number"
                                                                       : NULL;
    if (fault) die("%s: document %llu %s; write the shard again", s->path, (unsigned long long)number, fault);
}

// A pair or group of `members` documents ends before document `number`.
static void shard_end_group(TokenShard *s, uint64_t number, uint64_t members) {
    if (members == 1)
        die("%s: document %llu %s; write the shard again", s->path, (unsigned long long)number - 1,
            s->kind == KIND_PAIRS ? "is an answer without a partner, of pairs there are two"
                                  : "is the only completion of its group, which compares several");
    s->groups++;
    if (members > s->largest_group) s->largest_group = members;
}

// Groups are numbered from 0 in the order of their documents. *members: documents of group number s->groups so far
static void shard_check_group(TokenShard *s, uint64_t number, const ShardDocument *d, uint64_t *members) {
    if (*members && d->group == s->groups + 1) {
        shard_end_group(s, number, *members);
        *members = 0;
    }
    if (d->group != s->groups || (s->kind == KIND_PAIRS && *members == 2))
        die("%s: document %llu is said to be in group %llu, behind %llu of group %llu; pairs and groups are numbered "
            "from 0 and lie in their order; write the shard again",
            s->path, (unsigned long long)number, (unsigned long long)d->group, (unsigned long long)*members,
            (unsigned long long)s->groups);
    ++*members;
}

// The checksum first: it says what is wrong with all the rest.
static void shard_check_table_crc(const TokenShard *s, const InputFile *file, unsigned char *buffer) {
    uint32_t crc = 0;
    size_t count;
    for (uint64_t first = 0; first < s->documents; first += count) {
        count = shard_read_entries(s, file, first, buffer);
        crc = crc32_of(crc, buffer, count * TOKEN_SHARD_ENTRY);
    }
    if (crc != s->table_crc)
        die("%s: the checksum of its document table is wrong, the file is damaged; copy or write it again", s->path);
}

// The whole table, once. buffer as above.
static void shard_check_table(TokenShard *s, const InputFile *file, unsigned char *buffer) {
    uint64_t tokens = 0, targets = 0, longest = 0, members = 0;
    size_t count;
    shard_check_table_crc(s, file, buffer);
    for (uint64_t first = 0; first < s->documents; first += count) {
        count = shard_read_entries(s, file, first, buffer);
        for (size_t i = 0; i < count; i++) {
            ShardDocument d = shard_document(buffer + i * TOKEN_SHARD_ENTRY);
            shard_check_document(s, first + i, &d, tokens);
            if (kind_has_groups(s->kind)) shard_check_group(s, first + i, &d, &members);
            tokens += d.tokens, targets += d.targets;
            if (d.tokens > longest) longest = d.tokens;
        }
    }
    if (members) shard_end_group(s, s->documents, members);
    if (tokens != s->tokens || targets != s->targets || longest != s->longest)
        die("%s: its documents have %llu tokens, %llu targets and %llu tokens at most, its header says %llu, "
            "%llu and %llu",
            s->path, (unsigned long long)tokens, (unsigned long long)targets, (unsigned long long)longest,
            (unsigned long long)s->tokens, (unsigned long long)s->targets, (unsigned long long)s->longest);
}

#endif
