/*
A file of log-probabilities (data/README.md) of a model for the targets of some shards: a float32 for every token, with
shards in the order of their paths; 0: not a target. The verb `logprobs` writes it; so does a run whose objective has a
reference, before its first step (reference.h). The data loader copies the values to batches.

A file is complete or absent (output.h). Opening checks every field of the header, the checksum of the body, and that
every value can be a log-probability. Two keys identify model and data (reference.h): a run with another model, other
data, another temperature or other cuts of documents refuses the file and names both sides. Reading allocates nothing.
*/
#ifndef LLMC_LOGPROBS_H
#define LLMC_LOGPROBS_H
#include "llmc/base/dtype.h"
#include "llmc/base/output.h"
#include "shard.h"

#define LOGPROBS_MAGIC    "SBPLOGPS"
#define LOGPROBS_VERSION  2u    // version 1 had other keys
#define LOGPROBS_AT_ONCE  4096  // values read or written at a time
#define LOGPROBS_ROUNDING 1e-3f // how far rounding may put a value above 0

// Treatment of documents longer than T. The cut determines a token's context, and which tokens have values.
typedef enum { DOCUMENTS_WHOLE, DOCUMENTS_SPLIT, DOCUMENTS_TRUNCATED } DocumentsCut;

// The file's first 256 bytes, little-endian
typedef struct {
    FileHeader begin;
    size_t tokens, documents; // tokens and documents of the shards
    size_t targets;           // log-probabilities in the file
    uint64_t model_key, data_key;
    size_t seq_len; // T if a document was longer; 0: all are whole
    uint32_t cut;   // value of enum DocumentsCut
    uint32_t dtype; // DType of the computation
    double temperature;
    uint32_t body_crc, header_crc; // header_crc: over the header with this field 0
    char model[64];                // name of the model for messages, UTF-8, zero-terminated
    // files of a teacher's likeliest tokens (teacher.h), else 0
    uint32_t k, complete;      // tokens of a record; 1: every sequence is done
    uint64_t vocabulary, done; // ids that the teacher's softmax is over; finished sequences
    uint64_t order;            // key of the sequences (dataloader_fingerprint)
    double sum;                // of the targets' log-probabilities so far
    unsigned char zeros[48];
} LogprobHeader;
static_assert(sizeof(LogprobHeader) == 256, "the header of a file of log-probabilities has 256 bytes");

typedef struct LogprobFile {
    InputFile file;
    LogprobHeader header;
    unsigned char *record; // [record bytes] of a teacher: room for a record; else NULL
} LogprobFile;

static uint32_t logprobs_header_crc(const LogprobHeader *header) {
    LogprobHeader copy = *header;
    copy.header_crc = 0;
    return crc32_of(0, &copy, sizeof(copy));
}

// Returns the bytes of a token's values.
static size_t logprobs_record(size_t k) { return k ? 12 + 8 * k : sizeof(float); }

static size_t logprobs_place(const LogprobHeader *h, size_t token) {
    return sizeof(*h) + token * logprobs_record(h->k);
}
static size_t logprobs_offset(size_t token) { return sizeof(LogprobHeader) + token * sizeof(float); }

// Copies the text to `name`; if the text is too long, only the text's end.
static void logprobs_name(char name[64], const char *text) {
    size_t length = strlen(text), begin = length < 64 ? 0 : length - 63;
    while (begin && ((unsigned char)text[begin] & 0xc0) == 0x80) begin++; // move to the next whole character
    snprintf(name, 64, "%s", text + begin);
}

// ---- the body -----------------------------------------------------------------------------------------------------
typedef struct {
    uint32_t crc;
    size_t set;  // number of values that are not 0
    size_t bad;  // first token whose value cannot be a log-probability; `tokens` if there is none
    float value; // value of that token
} LogprobScan;

static LogprobScan logprobs_scan(const InputFile *file, size_t tokens) {
    LogprobScan scan = {0, 0, tokens, 0};
    float value[LOGPROBS_AT_ONCE];
    for (size_t first = 0, n; first < tokens; first += n) {
        n = min_size(tokens - first, LOGPROBS_AT_ONCE);
        input_read(file, logprobs_offset(first), value, n * sizeof(float));
        scan.crc = crc32_of(scan.crc, value, n * sizeof(float));
        for (size_t i = 0; i < n; i++) {
            scan.set += value[i] != 0;
            if (scan.bad == tokens && !(isfinite(value[i]) && value[i] <= LOGPROBS_ROUNDING))
                scan.bad = first + i, scan.value = value[i];
        }
    }
    return scan;
}

// ---- writing ------------------------------------------------------------------------------------------------------
typedef struct {
    OutputFile output;
    LogprobHeader header;
} LogprobWriter;

// Sets what every header of this many tokens has.
static void logprobs_begin(LogprobHeader *h) {
    memcpy(h->begin.magic, LOGPROBS_MAGIC, sizeof(h->begin.magic));
    h->begin.version = LOGPROBS_VERSION, h->begin.byte_order = FILE_BYTE_ORDER;
    h->begin.header_bytes = sizeof(*h), h->begin.bytes = logprobs_place(h, h->tokens);
    memset(h->zeros, 0, sizeof(h->zeros));
}

// Creates a file with this header. Sizes, checksums and `targets` are set later. Every value is 0 at first.
static void logprobs_create(LogprobWriter *w, const char *path, const LogprobHeader *header) {
    LogprobHeader *h = &w->header;
    crc32_prepare();
    *h = *header;
    logprobs_begin(h);
    output_open(&w->output, path, h->begin.bytes);
    if (ftruncate(w->output.fd, (off_t)h->begin.bytes) != 0) output_fail(&w->output, errno, "setting its size");
}

// Writes values of tokens [token, token + n), counted over all shards. Tokens may come in any order, each at most once.
static void logprobs_write(LogprobWriter *w, size_t token, size_t n, const float *value) {
    if (token > w->header.tokens || n > w->header.tokens - token)
        die("internal: log-probabilities of tokens that are not in the data; please report it");
    output_write(&w->output, logprobs_offset(token), value, n * sizeof(float));
}

// Reads the values back for their checksum and commits the file.
static void logprobs_commit(LogprobWriter *w, size_t targets) {
    InputFile written = input_open(w->output.temporary);
    w->header.body_crc = logprobs_scan(&written, w->header.tokens).crc;
    input_close(&written);
    w->header.targets = targets;
    w->header.header_crc = logprobs_header_crc(&w->header);
    output_write(&w->output, 0, &w->header, sizeof(w->header));
    output_commit(&w->output);
}

// ---- opening ------------------------------------------------------------------------------------------------------
#define LOGPROBS_AGAIN "remove it and compute it again (verb logprobs)"

// Checks every field, although the checksum is right: another program may have written the file.
static void logprobs_check_header(const LogprobHeader *h, const char *path) {
    static const unsigned char zeros[sizeof(h->zeros)] = {0};
    const char *fault =
        h->tokens > h->begin.bytes || h->begin.bytes != logprobs_place(h, h->tokens)    ? "number of tokens"
        : h->documents < 1 || h->documents > h->tokens / 2                              ? "number of documents"
        : h->targets > h->tokens - h->documents                                         ? "number of log-probabilities"
        : h->cut > DOCUMENTS_TRUNCATED                                                  ? "kind of cut of documents"
        : (h->cut == DOCUMENTS_WHOLE) != (h->seq_len == 0)                              ? "length of cut documents"
        : h->dtype > DTYPE_FP64                                                         ? "element type"
        : !(h->temperature > 0) || !isfinite(h->temperature)                            ? "temperature"
        : !memchr(h->model, 0, sizeof(h->model))                                        ? "name of the model"
        : h->k > h->vocabulary || h->vocabulary > INT32_MAX                             ? "vocabulary"
        : h->complete > 1                                                               ? "mark of a finished file"
        : !h->k && (h->complete || h->vocabulary || h->done || h->order || h->sum != 0) ? "rest, which must be zeros,"
        : memcmp(h->zeros, zeros, sizeof(zeros)) != 0                                   ? "rest, which must be zeros,"
                                                                                        : NULL;
    if (fault) die("%s: the %s in its header is invalid; " LOGPROBS_AGAIN, path, fault);
}

// Opens a file of log-probabilities for reading. Checks the header, the checksum and every value.
static void logprobs_open(LogprobFile *f, const char *path) {
    LogprobHeader *h = &f->header;
    crc32_prepare();
    f->record = NULL;
    f->file = input_open(path);
    if (f->file.bytes < sizeof(*h))
        die("%s: its %zu bytes are less than the header of a file of log-probabilities (%zu); write it again with the "
            "verb logprobs",
            path, (size_t)f->file.bytes, sizeof(*h));
    input_read(&f->file, 0, h, sizeof(*h));
    if (memcmp(h->begin.magic, LOGPROBS_MAGIC, sizeof(h->begin.magic)) != 0)
        die("%s: does not begin with " LOGPROBS_MAGIC ", so it is not a file of log-probabilities; the verb logprobs "
            "writes one",
            path);
    file_header_check(&h->begin, &f->file, "file of log-probabilities", LOGPROBS_VERSION, LOGPROBS_AGAIN,
                      h->header_crc == logprobs_header_crc(h));
    logprobs_check_header(h, path);
    if (h->k) die("%s: holds the %u likeliest tokens of a teacher; it belongs to --teacher-logprobs", path, h->k);
    make_printable(h->model);
    LogprobScan scan = logprobs_scan(&f->file, h->tokens);
    if (scan.crc != h->body_crc) die("%s: its checksum is wrong, the file is damaged; " LOGPROBS_AGAIN, path);
    if (scan.bad < h->tokens)
        die("%s: the log-probability of token %zu is %g; it must be finite and at most 0; " LOGPROBS_AGAIN, path,
            scan.bad, (double)scan.value);
    if (scan.set > h->targets)
        die("%s: holds %zu log-probabilities, its header says %zu; " LOGPROBS_AGAIN, path, scan.set, h->targets);
}

// Closes the file. Does nothing to a zeroed *f that was never opened.
static void logprobs_close(LogprobFile *f) {
    if (f->file.path) input_close(&f->file);
    free(f->record);
}

// ---- does the file fit the run? -----------------------------------------------------------------------------------
static const char *logprobs_cut_text(const LogprobHeader *h, char text[64]) {
    if (h->cut == DOCUMENTS_WHOLE) return "whole";
    snprintf(text, 64, "%s %zu positions", h->cut == DOCUMENTS_SPLIT ? "split into" : "truncated to", h->seq_len);
    return text;
}

// Tells whether a file with the cut of `have` serves a run with the cut of `wanted`: the file has every token of the
// run, with the same preceding tokens in its document.
static int logprobs_cut_serves(const LogprobHeader *have, const LogprobHeader *wanted) {
    switch (have->cut) {
    case DOCUMENTS_WHOLE: return wanted->cut != DOCUMENTS_SPLIT;
    case DOCUMENTS_SPLIT: return wanted->cut == DOCUMENTS_SPLIT && wanted->seq_len == have->seq_len;
    default: return wanted->cut == DOCUMENTS_TRUNCATED && wanted->seq_len <= have->seq_len;
    }
}

// Ends the program if the file does not fit this run's `wanted` (reference.h). data: name of the run's shards. Model
// key 0 fits any model.
static void logprobs_check(const LogprobFile *f, const LogprobHeader *wanted, const char *data) {
    const LogprobHeader *h = &f->header;
    const char *path = f->file.path;
    char had[64], want[64];
    if (h->data_key != wanted->data_key || h->tokens != wanted->tokens || h->documents != wanted->documents)
        die("%s: was computed from other data or tokens: %zu tokens in %zu documents (%016llx), "
            "%s has %zu in %zu (%016llx); run logprobs on this data",
            path, h->tokens, h->documents, (unsigned long long)h->data_key, data, wanted->tokens, wanted->documents,
            (unsigned long long)wanted->data_key);
    if (wanted->model_key && h->model_key != wanted->model_key)
        die("%s: is by another model, %s (%s, %016llx); the run's reference is %s (%s, %016llx); run logprobs "
            "again",
            path, h->model, dtype_name((DType)h->dtype), (unsigned long long)h->model_key, wanted->model,
            dtype_name((DType)wanted->dtype), (unsigned long long)wanted->model_key);
    if (h->temperature != wanted->temperature)
        die("%s: holds log-probabilities at temperature %g, this run has temperature %g; compute them again with "
            "--temperature %g (verb logprobs)",
            path, h->temperature, wanted->temperature, wanted->temperature);
    if (!logprobs_cut_serves(h, wanted))
        die("%s: holds log-probabilities of documents that are %s, this run has them %s; compute them again with this "
            "run's --seq-len and --long (verb logprobs)",
            path, logprobs_cut_text(h, had), logprobs_cut_text(wanted, want));
}

// ---- reading ------------------------------------------------------------------------------------------------------
// Reads the values of tokens [token, token + n), counted over all shards. Any thread may call it.
static void logprobs_read(const LogprobFile *f, size_t token, size_t n, float *out) {
    if (token > f->header.tokens || n > f->header.tokens - token)
        die("internal: %s: has no log-probabilities of tokens %zu to %zu; please report it", f->file.path, token,
            token + n);
    input_read(&f->file, logprobs_offset(token), out, n * sizeof(float));
}

#endif
