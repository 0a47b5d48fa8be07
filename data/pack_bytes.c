/*
Text files -> a token shard whose ids are the bytes (vocabulary 256), in llm.c's format, that `train --data` reads.

    pack_bytes --out train.bin [--val-out val.bin] [--val-fraction 0.05] [--seq-len T] [--list NAMES] [FILE...]

NAMES is a file with one path per line, or - for standard input. Files are joined in the order given; one whose bytes
have been seen before is left out, so that nothing is trained on twice or both trained on and validated with. The
validation shard is made of VAL_PIECES stretches, the ends of as many equal parts of the text: each is long enough for
long contexts, and together they resemble the whole. --seq-len T: whole sequences of T bytes in each stretch and shard,
and one byte more at the shard's end, the last target. Shards are complete or absent.
*/
#include "llmc/base/output.h"
#include "llmc/base/hash.h"

#define VAL_PIECES   8
#define SHARD_MAGIC  20240520 // llm.c: uint16 ids
#define HEADER_BYTES 1024     // 256 int32: magic, version, number of tokens, zeros
#define MOST_BYTES   ((size_t)INT32_MAX)

typedef struct {
    const char *out, *val_out, *list;
    double val_fraction;
    size_t seq_len; // 0: shards of any length
    char **path;    // [paths]
    size_t paths;
} Arguments;

typedef struct {
    unsigned char *bytes; // [length]
    size_t length, capacity;
    uint64_t *hash; // [files] of those that were taken
    size_t files, duplicates;
} Text;

static const char usage[] = "pack_bytes --out FILE [--val-out FILE] [--val-fraction F] [--seq-len T] [--list NAMES|-] "
                            "[FILE...]";

// ---- the command line -----------------------------------------------------------------------------------------------
static void add_path(Arguments *a, const char *path) {
    if (a->paths % 1024 == 0) {
        char **grown = (char **)checked_malloc((a->paths + 1024) * sizeof(char *), "the list of files");
        if (a->paths) memcpy(grown, a->path, a->paths * sizeof(char *));
        free(a->path);
        a->path = grown;
    }
    a->path[a->paths++] = checked_strdup(path);
}

static Arguments read_arguments(int argc, char **argv) {
    Arguments a = {NULL, NULL, NULL, 0.05, 0, NULL, 0};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strncmp(name, "--", 2) != 0) {
            add_path(&a, name);
            continue;
        }
        if (!strcmp(name, "--help")) {
            printf("usage: %s\n", usage);
            exit(0);
        }
        if (i + 1 == argc) die_usage("%s has no value; usage: %s", name, usage);
        i++;
        if (!strcmp(name, "--out"))
            a.out = argv[i];
        else if (!strcmp(name, "--val-out"))
            a.val_out = argv[i];
        else if (!strcmp(name, "--list"))
            a.list = argv[i];
        else if (!strcmp(name, "--val-fraction")) {
            if (!parse_double(argv[i], &a.val_fraction) || a.val_fraction <= 0 || a.val_fraction >= 1)
                die_usage("--val-fraction is '%s', it must be a number between 0 and 1", argv[i]);
        } else if (!strcmp(name, "--seq-len")) {
            if (!parse_size(argv[i], &a.seq_len)) die_usage("--seq-len is '%s', it must be a number of bytes", argv[i]);
        } else
            die_usage("unknown option %s; usage: %s", name, usage);
    }
    if (!a.out) die_usage("no --out; usage: %s", usage);
    if (a.val_out && !strcmp(a.out, a.val_out)) die_usage("--out and --val-out are the same file");
    if (!a.paths && !a.list) die_usage("no text: name files or give --list; usage: %s", usage);
    return a;
}

static void read_list(Arguments *a) {
    FILE *file = !strcmp(a->list, "-") ? stdin : fopen(a->list, "r");
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    if (!file) die("%s: cannot be opened: %s", a->list, strerror(errno));
    while ((length = getline(&line, &capacity, file)) > 0) {
        if (line[length - 1] == '\n') line[--length] = 0;
        if (length) add_path(a, line);
    }
    if (ferror(file)) die("%s: cannot be read: %s", a->list, strerror(errno));
    free(line);
    if (file != stdin) fclose(file);
}

// ---- reading --------------------------------------------------------------------------------------------------------
static void reserve(Text *text, size_t more) {
    if (more <= text->capacity - text->length) return;
    text->capacity = max_size(2 * text->capacity, text->length + more);
    unsigned char *grown = (unsigned char *)checked_malloc(text->capacity, "the text");
    if (text->length) memcpy(grown, text->bytes, text->length);
    free(text->bytes);
    text->bytes = grown;
}

static void add_file(Text *text, const char *path) {
    struct stat status;
    size_t i;
    if (stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0) return;
    InputFile file = input_open(path);
    if (file.bytes > MOST_BYTES - text->length)
        die("%s: with it the text has more than the %zu bytes of one shard; pack fewer files", path, MOST_BYTES);
    reserve(text, (size_t)file.bytes);
    input_read(&file, 0, text->bytes + text->length, (size_t)file.bytes);
    uint64_t hash = random_mix(fnv1a(random_mix((size_t)file.bytes), text->bytes + text->length, (size_t)file.bytes));
    for (i = 0; i < text->files; i++)
        if (text->hash[i] == hash) break;
    if (i < text->files)
        text->duplicates++;
    else {
        text->hash[text->files++] = hash;
        text->length += (size_t)file.bytes;
    }
    input_close(&file);
}

// ---- writing --------------------------------------------------------------------------------------------------------
// The begin of the validation stretch of piece i, and the end of the piece.
static void piece_bounds(size_t length, size_t i, const Arguments *a, size_t *begin, size_t *val, size_t *end) {
    *begin = length / VAL_PIECES * i;
    *end = i + 1 == VAL_PIECES ? length : length / VAL_PIECES * (i + 1);
    size_t stretch = (size_t)((double)(*end - *begin) * a->val_fraction);
    if (a->seq_len) stretch = stretch / a->seq_len * a->seq_len + (i + 1 == VAL_PIECES); // the last target
    *val = *end - stretch;
}

static void write_shard(const char *path, const unsigned char *bytes, size_t length) {
    static unsigned char ids[2 << 16];
    static OutputFile file;
    unsigned char header[HEADER_BYTES] = {0};
    const uint32_t fields[3] = {SHARD_MAGIC, 1, (uint32_t)length};
    size_t count;
    for (size_t i = 0; i < 12; i++) header[i] = (unsigned char)(fields[i / 4] >> (8 * (i % 4))); // little-endian
    output_open(&file, path, HEADER_BYTES + 2 * length);
    output_write(&file, 0, header, sizeof(header));
    for (size_t done = 0; done < length; done += count) {
        count = min_size(length - done, sizeof(ids) / 2);
        for (size_t i = 0; i < count; i++) ids[2 * i] = bytes[done + i], ids[2 * i + 1] = 0;
        output_write(&file, HEADER_BYTES + 2 * done, ids, 2 * count);
    }
    output_commit(&file);
}

// -sum p log p over the bytes, and over bytes given the one before: the losses, in nats per byte, of the best models
// that see no context and one byte of it.
static void entropies(const unsigned char *bytes, size_t length, double *unigram, double *bigram) {
    static size_t pairs[256][256];
    double sum[2] = {0, 0}; // n log n of bytes that have a successor, and of pairs
    size_t counts[256] = {0};
    memset(pairs, 0, sizeof(pairs));
    *unigram = 0;
    for (size_t i = 0; i < length; i++) counts[bytes[i]]++;
    for (size_t i = 1; i < length; i++) pairs[bytes[i - 1]][bytes[i]]++;
    for (size_t a = 0; a < 256; a++) {
        const double p = (double)counts[a] / (double)length;
        double followed = 0;
        for (size_t b = 0; b < 256; b++) {
            const double n = (double)pairs[a][b];
            if (n > 0) sum[1] += n * log(n);
            followed += n;
        }
        if (followed > 0) sum[0] += followed * log(followed);
        if (p > 0) *unigram -= p * log(p);
    }
    *bigram = length > 1 ? (sum[0] - sum[1]) / (double)(length - 1) : 0;
}

static void write_and_report(const char *path, const unsigned char *bytes, size_t length, size_t seq_len) {
    double unigram, bigram;
    if (seq_len && length > seq_len) length = (length - 1) / seq_len * seq_len + 1; // the last byte is a target only
    write_shard(path, bytes, length);
    entropies(bytes, length, &unigram, &bigram);
    printf("%s: %zu bytes, unigram entropy %.4f nats per byte, bigram %.4f\n", path, length, unigram, bigram);
}

// Moves the validation stretches out of the text, which closes up; returns their bytes.
static size_t split_validation(Text *text, const Arguments *a, unsigned char *validation) {
    size_t length = text->length, train = 0, val = 0;
    for (size_t i = 0; i < VAL_PIECES; i++) {
        size_t begin, cut, end;
        piece_bounds(length, i, a, &begin, &cut, &end);
        memcpy(validation + val, text->bytes + cut, end - cut);
        memmove(text->bytes + train, text->bytes + begin, cut - begin);
        val += end - cut, train += cut - begin;
    }
    if (!val || !train) die("%zu bytes are too few to split a validation part of %g off", length, a->val_fraction);
    text->length = train;
    return val;
}

int main(int argc, char **argv) {
    Text text = {NULL, 0, 0, NULL, 0, 0};
    size_t val = 0;
    signals_prepare();
    Arguments a = read_arguments(argc, argv);
    if (a.list) read_list(&a);
    text.hash = (uint64_t *)checked_malloc(a.paths * sizeof(uint64_t), "the hashes of files");
    for (size_t i = 0; i < a.paths; i++) add_file(&text, a.path[i]);
    if (!text.length) die("the files given hold no text");
    unsigned char *validation = (unsigned char *)checked_malloc(text.length, "the validation text");
    if (a.val_out) val = split_validation(&text, &a, validation);
    write_and_report(a.out, text.bytes, text.length, a.seq_len);
    if (a.val_out) write_and_report(a.val_out, validation, val, a.seq_len);
    printf("files: %zu, copies left out: %zu\n", text.files, text.duplicates);
    for (size_t i = 0; i < a.paths; i++) free(a.path[i]);
    free(a.path);
    free(text.bytes);
    free(text.hash);
    free(validation);
    stdout_finish();
    return 0;
}
