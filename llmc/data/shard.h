/*
Token shards: the files that a run reads, in the format of data/prepare.py (data/README.md). A file holds whole
documents: a header of 256 bytes, a table of documents, their ids, a loss mask of a byte a token (1: a target), and
optionally an advantage for each token or the other columns of each prompt. Little-endian. llmc_shard.h reads llm.c's
shards.

Opening a shard checks every field of the header against the other fields and the file's size, and the whole table, by
its checksum and entry by entry, including that pairs have both answers and groups several. A document's own checksum is
checked when it is read (documents_read.h).
*/
#ifndef LLMC_SHARD_H
#define LLMC_SHARD_H
#include "llmc/base/hash.h"
#include "llmc/base/file.h"
#include <assert.h>
#include <glob.h>
#include <stddef.h>

#define TOKEN_SHARD_MAGIC   "SBPSHARD"
#define TOKEN_SHARD_VERSION 1
#define TOKEN_SHARD_HEADER  256
#define TOKEN_SHARD_ENTRY   48
#define TOKEN_SHARD_ALIGN   64
#define TOKEN_SHARD_COLUMNS 16                         // bytes of an entry in the index of columns
#define LLMC_SHARD_16       20240520                   // llm.c's magic number for ids of 16 bits
#define LLMC_SHARD_32       20240801                   // llm.c's magic number for ids of 32 bits
#define TABLE_ENTRIES       4096                       // entries read at a time
#define SHARD_TOKEN_BYTES   (2 * sizeof(uint32_t) + 1) // most bytes of a token's id, mask and value

// ---- which files ----------------------------------------------------------------------------------------------------
typedef struct {
    char *path;
    dev_t device;
    ino_t inode; // 0: unknown
} ShardPath;

typedef struct {
    ShardPath *at; // [count], sorted by path
    size_t count;
} ShardPaths;

static void shard_paths_add(ShardPaths *list, const char *path) {
    ShardPath added = {checked_strdup(path), 0, 0};
    struct stat status;
    if (stat(path, &status) == 0) // if it fails, opening reports why
        added.device = status.st_dev, added.inode = status.st_ino;
    list->at = (ShardPath *)checked_realloc(list->at, (list->count + 1) * sizeof(ShardPath), "the list of shards");
    list->at[list->count++] = added;
}

static int shard_paths_by_file(const void *a, const void *b) {
    const ShardPath *x = (const ShardPath *)a, *y = (const ShardPath *)b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->inode != y->inode) return x->inode < y->inode ? -1 : 1;
    return compare_names(a, b);
}

// Refuses one file given by two names (a link, "./"), which would count twice.
static void shard_paths_check_files(ShardPaths *list) {
    qsort(list->at, list->count, sizeof(ShardPath), shard_paths_by_file);
    for (size_t i = 1; i < list->count; i++) {
        const ShardPath *a = &list->at[i - 1], *b = &list->at[i];
        if (!strcmp(a->path, b->path)) die("%s is named twice in the data; name it once", a->path);
        if (a->inode && a->inode == b->inode && a->device == b->device)
            die("%s and %s are the same file, which would count twice; name it once", a->path, b->path);
    }
}

// Finds the shards. Each path is a file or, if there is no file of that name, a glob.
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
        if (failed)
            die("cannot search for shards '%s': %s; check the permissions of its folder", paths[i], error_text(errno));
        for (size_t j = 0; j < found.gl_pathc; j++) shard_paths_add(&list, found.gl_pathv[j]);
        globfree(&found);
    }
    if (!list.count) die("no shards were given; name token files (.bin) or a quoted pattern");
    shard_paths_check_files(&list);
    qsort(list.at, list.count, sizeof(ShardPath), compare_names);
    return list;
}

static void shard_paths_free(ShardPaths *list) {
    for (size_t i = 0; i < list->count; i++) free(list->at[i].path);
    free(list->at);
}

// Refuses a folder given instead of shards.
static void shard_refuse_folder(const char *path) {
    char part[PATH_MAX];
    glob_t found;
    if (folder_has(path, "config.json")) die("%s: is the folder of a model; it belongs to --model", path);
    path_join(part, path, "*.bin");
    if (glob(part, 0, NULL, &found) == GLOB_NOMATCH)
        die("%s: is a folder without shards (*.bin); " MAKE_SHARDS "/*", path, prepare_command(), path);
    die("%s: is a folder; name its shards, for example '%s/train-*.bin' (quoted)", path, path);
}

// Tells whether the file begins like a shard of documents. Otherwise it may be one of llm.c's shards.
static int is_token_shard(const char *path) {
    char begin[sizeof(TOKEN_SHARD_MAGIC)] = "";
    uint32_t magic;
    if (path_is_directory(path)) shard_refuse_folder(path);
    input_begin(path, begin, sizeof(begin) - 1);
    if (!strcmp(begin, TOKEN_SHARD_MAGIC)) return 1;
    memcpy(&magic, begin, sizeof(magic));
    if (magic != LLMC_SHARD_16 && magic != LLMC_SHARD_32) file_refuse_kind(path, "a token shard");
    return 0;
}

// ---- the header -----------------------------------------------------------------------------------------------------
#define FILE_BYTE_ORDER 0x01020304u

// Beginning of the headers of shards and of files of log-probabilities
typedef struct {
    char magic[8];
    uint32_t version, byte_order;
    size_t header_bytes, bytes; // bytes: size of the file
} FileHeader;

// Checks the common header. what: kind of file; again: advice if it is damaged; intact: 1 if the header's checksum is
// right
static void file_header_check(const FileHeader *h, const InputFile *file, const char *what, uint32_t version,
                              const char *again, int intact) {
    if (h->byte_order == 0x04030201u) die("%s: was written on a big-endian machine; %s", file->path, again);
    if (h->version != version)
        die("%s: version %u of a %s is unknown, expected %u; %s", file->path, h->version, what, version, again);
    if (!intact) die("%s: the checksum of its header is wrong, the file is damaged; %s", file->path, again);
    if (h->byte_order != FILE_BYTE_ORDER)
        die("%s: its byte order mark is %08x, expected 01020304; %s", file->path, h->byte_order, again);
    if (h->header_bytes != TOKEN_SHARD_HEADER)
        die("%s: its header says that it has %zu bytes, expected 256; %s", file->path, h->header_bytes, again);
    if (h->bytes != file->bytes)
        die("%s: its header says %zu bytes, but the file has %zu; it is %s; %s", file->path, h->bytes,
            (size_t)file->bytes, file->bytes < h->bytes ? "truncated" : "not what its header says", again);
}

// Kinds of documents: texts; alternating chosen and rejected answers; a prompt's completions with rewards; prompts
// without targets, some followed by a reference answer; documents with values (in memory only); answers with a label,
// desirable (1) or not (0), instead of a reward
typedef enum { KIND_DOCUMENTS, KIND_PAIRS, KIND_GROUPS, KIND_PROMPTS, KIND_VALUES, KIND_LABELS } ShardKind;

// A shard's header, then fields derived from the shard's path and table
typedef struct {
    FileHeader begin;
    size_t documents, tokens, targets, longest;
    uint32_t id_bytes, kind;
    size_t vocabulary;                // vocabulary size of the tokenizer
    uint64_t tokenizer;               // (bytes of tokenizer.json) << 32 | crc32, 0: bytes
    size_t table, ids, masks, values; // offsets in the file; 0: the section is absent
    uint32_t table_crc, header_crc;   // header_crc: over the header with this field 0
    char tokenizer_name[64];          // name of the tokenizer, printable
    size_t columns;                   // offset of the index of the prompts' columns; 0: no columns
    size_t longest_columns;           // most bytes of one prompt's columns
    uint32_t columns_crc;             // checksum of the index
    uint32_t zero;
    uint64_t chat_template; // template that rendered its conversations, in the form of `tokenizer`; 0: no template, or
                            // an older shard
    unsigned char zeros[32];
    char *path;
    size_t groups, largest_group; // number of pairs or groups; most documents of a group; 0 until the table is checked
    size_t regular;               // T of the documents of an llm.c shard; 0: the table describes the documents
} TokenShard;
static_assert(offsetof(TokenShard, path) == TOKEN_SHARD_HEADER, "the header of a shard has 256 bytes");

// An entry of the table of documents
typedef struct {
    size_t first, tokens, targets, group, prompt;
    float reward;
    uint32_t crc;
} ShardDocument;
static_assert(sizeof(ShardDocument) == TOKEN_SHARD_ENTRY, "an entry of a shard's table has 48 bytes");

// An entry of the index of columns: where a prompt's columns lie in the text after the index
typedef struct {
    size_t first;
    uint32_t bytes, crc;
} ShardColumns;
static_assert(sizeof(ShardColumns) == TOKEN_SHARD_COLUMNS, "an entry of a shard's index of columns has 16 bytes");

static int kind_has_groups(uint32_t kind) { return kind == KIND_PAIRS || kind == KIND_GROUPS; }

// Tells whether answers are compared as a whole.
static int kind_is_whole(uint32_t kind) { return kind_has_groups(kind) || kind == KIND_LABELS; }

static size_t shard_align(size_t offset) {
    return (offset + TOKEN_SHARD_ALIGN - 1) / TOKEN_SHARD_ALIGN * TOKEN_SHARD_ALIGN;
}

// Returns the i-th id in a buffer.
static uint32_t shard_id(const TokenShard *s, const unsigned char *ids, size_t i) {
    uint32_t id = 0;
    memcpy(&id, ids + i * s->id_bytes, s->id_bytes);
    return id;
}

// Returns the offset of the columns' text, after their index.
static size_t shard_columns_text(const TokenShard *s) { return s->columns + s->documents * TOKEN_SHARD_COLUMNS; }

// Checks that sections follow in order, each at the next multiple of 64, and that the last ends with the file. Only the
// index of columns gives the length of their text.
static void shard_check_sections(const TokenShard *s) {
    const struct {
        const char *name;
        size_t begins, expected;
    } section[] = {{"document table is", s->table, TOKEN_SHARD_HEADER},
                   {"ids are", s->ids, shard_align(s->table + s->documents * TOKEN_SHARD_ENTRY)},
                   {"masks are", s->masks, shard_align(s->ids + s->tokens * s->id_bytes)},
                   {"values are", s->values, s->values ? shard_align(s->masks + s->tokens) : 0},
                   {"columns are", s->columns, s->columns ? shard_align(s->masks + s->tokens) : 0},
                   {"end is", s->begin.bytes,
                    s->columns  ? max_size(s->begin.bytes, shard_columns_text(s))
                    : s->values ? s->values + s->tokens * sizeof(float)
                                : s->masks + s->tokens}};
    for (size_t i = 0; i < sizeof(section) / sizeof(section[0]); i++)
        if (section[i].begins != section[i].expected)
            die("%s: its %s at byte %zu, with %zu documents and %zu tokens it should be %zu; write it again", s->path,
                section[i].name, section[i].begins, s->documents, s->tokens, section[i].expected);
}

// Checks that all fields of the header agree.
static void shard_check_header(const TokenShard *s) {
    if (s->kind > KIND_PROMPTS && s->kind != KIND_LABELS)
        die("%s: kind %u of a token shard is unknown; kinds are 0 to %d, and %d; write it again", s->path, s->kind,
            KIND_PROMPTS, KIND_LABELS);
    if (s->kind != KIND_DOCUMENTS && s->values)
        die("%s: is of kind %u and holds values for each token, which only documents (kind 0) have; prepare it without "
            "columns",
            s->path, s->kind);
    if (s->kind != KIND_PROMPTS && s->columns)
        die("%s: is of kind %u and holds columns, which only prompts alone (kind 3) have; prepare it without columns",
            s->path, s->kind);
    if (s->id_bytes != 2 && s->id_bytes != 4)
        die("%s: has ids of %u bytes, expected 2 or 4; write it again", s->path, s->id_bytes);
    if (s->vocabulary < 1 || s->vocabulary > (s->id_bytes == 2 ? 65536u : 2147483648u))
        die("%s: a vocabulary of %zu does not fit ids of %u bytes; write it again", s->path, s->vocabulary,
            s->id_bytes);
    if (s->documents > s->begin.bytes / TOKEN_SHARD_ENTRY || s->tokens > s->begin.bytes)
        die("%s: %zu documents and %zu tokens do not fit %zu bytes; write it again", s->path, s->documents, s->tokens,
            s->begin.bytes);
    shard_check_sections(s);
    if (s->longest_columns > (s->columns ? s->begin.bytes - s->columns : 0))
        die("%s: columns of %zu bytes do not fit the file; write it again", s->path, s->longest_columns);
    if (!memchr(s->tokenizer_name, 0, sizeof(s->tokenizer_name)))
        die("%s: the name of its tokenizer has no end; write it again", s->path);
}

// Checks that padding between sections is zero.
static void shard_check_padding(const TokenShard *s, const InputFile *file) {
    static const unsigned char zeros[TOKEN_SHARD_ALIGN] = {0};
    const size_t end[3] = {s->table + s->documents * TOKEN_SHARD_ENTRY, s->ids + s->tokens * s->id_bytes,
                           s->masks + s->tokens};
    const size_t next[3] = {s->ids, s->masks, s->values ? s->values : s->columns ? s->columns : end[2]};
    unsigned char found[TOKEN_SHARD_ALIGN];
    for (int i = 0; i < 3; i++) {
        input_read(file, end[i], found, next[i] - end[i]);
        if (memcmp(found, zeros, next[i] - end[i]) != 0)
            die("%s: bytes %zu to %zu are not zero, the file is damaged; copy or write it again", s->path, end[i],
                next[i] - 1);
    }
}

static TokenShard shard_read_header(const InputFile *file) {
    TokenShard s = {0}, copy;
    if (file->bytes < TOKEN_SHARD_HEADER)
        die("%s: its %zu bytes are less than the header of a token shard (%d); it is truncated, copy or write it again",
            file->path, (size_t)file->bytes, TOKEN_SHARD_HEADER);
    input_read(file, 0, &s, TOKEN_SHARD_HEADER);
    copy = s;
    copy.header_crc = 0;
    file_header_check(&s.begin, file, "token shard", TOKEN_SHARD_VERSION, "copy or write it again",
                      crc32_of(0, &copy, TOKEN_SHARD_HEADER) == s.header_crc);
    s.path = checked_strdup(file->path);
    shard_check_header(&s);
    shard_check_padding(&s, file);
    make_printable(s.tokenizer_name);
    if (s.values) s.kind = KIND_VALUES;
    if (!s.tokenizer_name[0]) snprintf(s.tokenizer_name, sizeof(s.tokenizer_name), "unnamed");
    return s;
}

// ---- the table ------------------------------------------------------------------------------------------------------
// Reads entries from `first` on into entry[TABLE_ENTRIES]. Returns how many.
static size_t shard_read_entries(const TokenShard *s, const InputFile *file, size_t first, ShardDocument *entry) {
    const size_t count = min_size(s->documents - first, TABLE_ENTRIES);
    input_read(file, s->table + first * TOKEN_SHARD_ENTRY, entry, count * TOKEN_SHARD_ENTRY);
    return count;
}

static void shard_check_document(const TokenShard *s, size_t number, const ShardDocument *d, size_t begin) {
    const int prompts = s->kind == KIND_PROMPTS;
    const char *fault = d->first != begin                              ? "does not begin where the one before it ends"
                        : d->tokens < 1 || (d->tokens < 2 && !prompts) ? "has fewer than 2 tokens"
                        : d->tokens > s->tokens - begin                ? "goes beyond the last token"
                        : d->targets < 1 && !prompts                   ? "has no target"
                        : d->targets > 0 && prompts                    ? "is a prompt and has targets"
                        : d->targets > d->tokens - 1                   ? "has more targets than tokens"
                        : d->prompt > d->tokens                        ? "has a prompt longer than the document"
                        : d->prompt < 1 && prompts                     ? "has no prompt"
                        : !isfinite(d->reward)                         ? "has a reward that is not a finite number"
                        : s->kind == KIND_LABELS && d->reward != 0 && d->reward != 1
                            ? "has a label that is neither 0 nor 1"
                            : NULL;
    if (fault) die("%s: document %zu %s; write the shard again", s->path, number, fault);
}

// Ends a pair or group of `members` documents, which precedes document `number`.
static void shard_end_group(TokenShard *s, size_t number, size_t members) {
    if (members == 1)
        die("%s: document %zu %s; write the shard again", s->path, number - 1,
            s->kind == KIND_PAIRS ? "is an answer without a partner; a pair has two"
                                  : "is the only completion of its group, which needs several");
    s->groups++;
    s->largest_group = max_size(s->largest_group, members);
}

// Checks that groups are numbered from 0 in order. *members: documents of group s->groups so far
static void shard_check_group(TokenShard *s, size_t number, const ShardDocument *d, size_t *members) {
    if (*members && d->group == s->groups + 1) {
        shard_end_group(s, number, *members);
        *members = 0;
    }
    if (d->group != s->groups || (s->kind == KIND_PAIRS && *members == 2))
        die("%s: document %zu is in group %zu, after %zu of group %zu; pairs and groups must be numbered in order from "
            "0; write the shard again",
            s->path, number, d->group, *members, s->groups);
    ++*members;
}

// Verifies the table's checksum, before the table's entries are checked.
static void shard_check_table_crc(const TokenShard *s, const InputFile *file, ShardDocument *entry) {
    uint32_t crc = 0;
    for (size_t first = 0, count; first < s->documents; first += count) {
        count = shard_read_entries(s, file, first, entry);
        crc = crc32_of(crc, entry, count * TOKEN_SHARD_ENTRY);
    }
    if (crc != s->table_crc)
        die("%s: the checksum of its document table is wrong, the file is damaged; copy or write it again", s->path);
}

// Checks the index of columns: its checksum, and that its entries are contiguous up to the file's end. entry:
// [TABLE_ENTRIES]
static void shard_check_columns(const TokenShard *s, const InputFile *file, ShardColumns *entry) {
    const size_t text = s->begin.bytes - shard_columns_text(s);
    size_t end = 0, longest = 0;
    uint32_t crc = 0;
    int in_order = 1;
    for (size_t first = 0, count; first < s->documents; first += count) {
        count = min_size(s->documents - first, TABLE_ENTRIES);
        input_read(file, s->columns + first * TOKEN_SHARD_COLUMNS, entry, count * TOKEN_SHARD_COLUMNS);
        crc = crc32_of(crc, entry, count * TOKEN_SHARD_COLUMNS);
        for (size_t i = 0; i < count && in_order; i++) {
            in_order = entry[i].first == end && entry[i].bytes <= text - end;
            end += entry[i].bytes, longest = max_size(longest, entry[i].bytes);
        }
    }
    if (crc != s->columns_crc)
        die("%s: the checksum of its index of columns is wrong, the file is damaged; copy or write it again", s->path);
    if (!in_order || end != text || longest != s->longest_columns)
        die("%s: its columns are not contiguous up to its end, or longer than its header says; write "
            "it again",
            s->path);
}

// Checks the whole table once, reading through entry[TABLE_ENTRIES].
static void shard_check_table(TokenShard *s, const InputFile *file, ShardDocument *entry) {
    size_t tokens = 0, targets = 0, longest = 0, members = 0;
    shard_check_table_crc(s, file, entry);
    for (size_t first = 0, count; first < s->documents; first += count) {
        count = shard_read_entries(s, file, first, entry);
        for (size_t i = 0; i < count; i++) {
            shard_check_document(s, first + i, &entry[i], tokens);
            if (kind_has_groups(s->kind)) shard_check_group(s, first + i, &entry[i], &members);
            tokens += entry[i].tokens, targets += entry[i].targets;
            longest = max_size(longest, entry[i].tokens);
        }
    }
    if (members) shard_end_group(s, s->documents, members);
    if (s->columns) shard_check_columns(s, file, (ShardColumns *)entry);
    if (tokens != s->tokens || targets != s->targets || longest != s->longest)
        die("%s: its documents have %zu tokens, %zu targets and %zu tokens at most, but the header says %zu, %zu and "
            "%zu; write it again",
            s->path, tokens, targets, longest, s->tokens, s->targets, s->longest);
}

#endif
