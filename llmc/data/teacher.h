/*
A file of a teacher's likeliest tokens for the targets of some shards, written by the verb logprobs with --top-k: once a
teacher, many times a student. It begins as a file of log-probabilities does (logprobs.h), with k above 0. Then follows
a record for each token of the shards, zeros if the token is not a target:

    uint32 crc32 of the token's number and the rest; 0: the token has no values
    float  probability of all other tokens (the tail), then log-probability of the target
    int32  ids[k], ascending; float log-probabilities[k] of these ids

A file may be too large to read twice (524 bytes a token at k = 64), so a record's checksum is checked when the record
is read. The file is written as NAME.part. The header says how many sequences are done, so a killed process continues:
the same command finds NAME.part, and refuses it if model, data or settings differ. The finished file gets its name.
*/
#ifndef LLMC_TEACHER_H
#define LLMC_TEACHER_H
#include "batch.h"
#include "logprobs.h"

#define TEACHER_SAVE_EVERY 20.0 // s between two notes of what is done

typedef struct {
    OutputFile output;
    LogprobHeader header;
    unsigned char *record; // [record bytes] the record that is written
    double saved;          // s: time of the last note
} TeacherWriter;

// ---- records --------------------------------------------------------------------------------------------------------
static uint32_t teacher_crc(const unsigned char *record, size_t k, uint64_t token) {
    const uint32_t crc = crc32_of(crc32_of(0, &token, sizeof(token)), record + 4, logprobs_record(k) - 4);
    return crc ? crc : 1;
}

// ---- writing --------------------------------------------------------------------------------------------------------
// Writes the header, after everything that it says is on the disk.
static void teacher_note(TeacherWriter *w) {
    if (fdatasync(w->output.fd) != 0) output_fail(&w->output, errno, "syncing");
    w->header.header_crc = logprobs_header_crc(&w->header);
    output_write(&w->output, 0, &w->header, sizeof(w->header));
    w->saved = seconds_now();
}

// Tells whether a file was begun with the same model, data and settings.
static int teacher_continues(const LogprobHeader *begun, const LogprobHeader *wanted) {
    LogprobHeader same = *begun;
    same.done = wanted->done, same.sum = wanted->sum, same.targets = wanted->targets;
    same.complete = wanted->complete, same.header_crc = wanted->header_crc;
    return begun->header_crc == logprobs_header_crc(begun) && !memcmp(&same, wanted, sizeof(same));
}

// Creates a file with this header, or continues PATH.part, whose number of finished sequences is header.done.
static void teacher_create(TeacherWriter *w, const char *path, const LogprobHeader *header) {
    OutputFile *file = &w->output;
    LogprobHeader begun;
    crc32_prepare();
    w->header = *header;
    logprobs_begin(&w->header);
    output_resolve(file, path);
    file->stays = 1;
    if (snprintf(file->temporary, PATH_MAX, "%s.part", file->path) >= PATH_MAX)
        die("%.200s...: this path is too long; choose a shorter path", path);
    file->fd = open(file->temporary, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file->fd < 0) die("%s: cannot be created: %s; choose another place", file->temporary, error_text(errno));
    if (flock(file->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die("%s: is being written by another process; choose another --out", file->temporary);
    const ssize_t there = pread(file->fd, &begun, sizeof(begun), 0);
    if (there < 0) output_fail(file, errno, "reading its header");
    if (there == (ssize_t)sizeof(begun) && begun.header_crc) {
        if (!teacher_continues(&begun, &w->header))
            die("%s: was begun with another model, other data or other options; give these, or remove it",
                file->temporary);
        w->header = begun;
    } else {
        if (fallocate(file->fd, 0, 0, (off_t)w->header.begin.bytes) != 0 &&
            (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
            output_fail(file, errno, "reserving %s", human_bytes((double)w->header.begin.bytes));
        if (ftruncate(file->fd, (off_t)w->header.begin.bytes) != 0) output_fail(file, errno, "setting its size");
        teacher_note(w);
    }
    w->record = (unsigned char *)checked_malloc(logprobs_record(w->header.k), "a record of a teacher");
    w->saved = seconds_now();
}

// Writes the values of a target, whose number counts over all shards. id, logp: [k]
static void teacher_write(TeacherWriter *w, size_t token, float target, float tail, const int32_t *id,
                          const float *logp) {
    const size_t k = w->header.k;
    if (token >= w->header.tokens) die("internal: a teacher's token that is not in the data; please report it");
    memcpy(w->record + 4, &tail, 4), memcpy(w->record + 8, &target, 4);
    memcpy(w->record + 12, id, 4 * k), memcpy(w->record + 12 + 4 * k, logp, 4 * k);
    const uint32_t crc = teacher_crc(w->record, k, token);
    memcpy(w->record, &crc, 4);
    output_write(&w->output, logprobs_place(&w->header, token), w->record, logprobs_record(k));
}

// Counts a finished sequence. Notes it in the file at intervals.
static void teacher_advance(TeacherWriter *w, double sum, double targets) {
    w->header.done++, w->header.sum += sum, w->header.targets += (uint64_t)targets;
    if (seconds_now() - w->saved > TEACHER_SAVE_EVERY) teacher_note(w);
}

// Gives the finished file its name.
static void teacher_commit(TeacherWriter *w) {
    OutputFile *file = &w->output;
    w->header.complete = 1;
    teacher_note(w);
    if (fsync(file->fd) != 0) output_fail(file, errno, "syncing");
    if (rename(file->temporary, file->path) != 0) output_fail(file, errno, "renaming the finished file");
    close(file->fd); // unlocks it
    sync_folder_of(file->path);
    free(w->record);
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Opens a file for reading and checks its header; of a file without likeliest tokens (k 0) also its values.
static void teacher_open(LogprobFile *f, const char *path) {
    LogprobHeader h = {0};
    InputFile file = input_open(path);
    if (file.bytes >= sizeof(h)) input_read(&file, 0, &h, sizeof(h));
    input_close(&file);
    if (memcmp(h.begin.magic, LOGPROBS_MAGIC, sizeof(h.begin.magic)) != 0 || !h.k) {
        logprobs_open(f, path);
        return;
    }
    crc32_prepare();
    f->file = input_open(path), f->header = h;
    file_header_check(&h.begin, &f->file, "file of log-probabilities", LOGPROBS_VERSION, LOGPROBS_AGAIN,
                      h.header_crc == logprobs_header_crc(&h));
    logprobs_check_header(&h, path);
    if (!h.complete)
        die("%s: is not finished: %llu sequences are done; repeat its command (verb logprobs)", path,
            (unsigned long long)h.done);
    make_printable(f->header.model);
    f->record = (unsigned char *)checked_malloc(logprobs_record(h.k), "a record of a teacher");
}

// Reads the record of a target and checks it.
static void teacher_record(const LogprobFile *f, size_t token) {
    const LogprobHeader *h = &f->header;
    uint32_t crc;
    if (token >= h->tokens) die("internal: %s: has no token %zu; please report it", f->file.path, token);
    input_read(&f->file, logprobs_place(h, token), f->record, logprobs_record(h->k));
    memcpy(&crc, f->record, 4);
    if (!crc)
        die("%s: token %zu is a target here, but not there: the data's masks differ; run logprobs on this data",
            f->file.path, token);
    if (crc != teacher_crc(f->record, h->k, token))
        die("%s: the checksum of token %zu is wrong, the file is damaged; " LOGPROBS_AGAIN, f->file.path, token);
}

// Reads the likeliest tokens of targets token, token + 1, ... of positions [begin, begin + n) of a batch, and their
// log-probabilities if the batch has room for them. One thread at a time may read a file.
static void teacher_read(const LogprobFile *f, size_t token, Batch *batch, size_t begin, size_t n) {
    const size_t k = f->header.k;
    const BatchTeacher *to = &batch->teacher;
    if (!k) {
        logprobs_read(f, token, n, batch->reference + begin);
        return;
    }
    for (size_t t = begin; t < begin + n; t++) {
        if (batch->targets[t] < 0) continue;
        teacher_record(f, token + t - begin);
        if (batch->reference) memcpy(batch->reference + t, f->record + 8, 4);
        if (!to->id) continue;
        int32_t *id = to->id + t * k;
        float *logp = to->logp + t * k;
        memcpy(to->tail + t, f->record + 4, 4);
        memcpy(id, f->record + 12, 4 * k), memcpy(logp, f->record + 12 + 4 * k, 4 * k);
        int good = to->tail[t] >= 0 && to->tail[t] <= 1 + LOGPROBS_ROUNDING;
        for (size_t j = 0; j < k; j++)
            good &=
                id[j] > (j ? id[j - 1] : -1) && (uint64_t)id[j] < f->header.vocabulary && logp[j] <= LOGPROBS_ROUNDING;
        if (!good)
            die("%s: the values of token %zu are not probabilities of ascending ids; " LOGPROBS_AGAIN, f->file.path,
                token + t - begin);
    }
}

#endif
