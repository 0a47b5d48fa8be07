/*
Text that comes in pieces which may end within a character, to a file or into memory: only whole characters are passed on. What can
no longer become one is U+FFFD, once for each stretch that began as one (Unicode's recommended practice), and so is what is left at
the end. Memory is the caller's: three times as many bytes as come in suffice.
*/
#ifndef LLMC_TEXT_OUT_H
#define LLMC_TEXT_OUT_H
#include "utils.h"

typedef struct {
    FILE *file;            // or NULL:
    char *memory;          // [bytes] so far
    size_t bytes;          // passed on
    unsigned char part[4]; // the beginning of a character
    size_t count;
} TextOut;

static TextOut text_out_to(FILE *file, char *memory) {
    TextOut out = {0};
    out.file = file, out.memory = memory;
    return out;
}

static void text_out_pass(TextOut *out, const void *text, size_t bytes) {
    if (out->file)
        fwrite(text, 1, bytes, out->file);
    else
        memcpy(out->memory + out->bytes, text, bytes);
    out->bytes += bytes;
}

// Whether bytes can be put behind part[count] so that it is a character: the lowest and the highest continuations are tried.
static int is_beginning_of_character(const unsigned char *part, size_t count) {
    static const unsigned char ends[] = {0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf};
    unsigned char whole[4] = {0, 0x80, 0x80, 0x80};
    if (count >= 4) return 0;
    memcpy(whole, part, count);
    if (count > 1) return utf8_length(whole, 4) > count;
    for (size_t i = 0; i < sizeof(ends); i++) {
        whole[1] = ends[i];
        if (utf8_length(whole, 4) > 1) return 1;
    }
    return 0;
}

static void text_out(TextOut *out, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        out->part[out->count++] = (unsigned char)text[i];
        if (utf8_length(out->part, out->count)) {
            text_out_pass(out, out->part, out->count);
            out->count = 0;
        } else if (!is_beginning_of_character(out->part, out->count)) {
            text_out_pass(out, "\xef\xbf\xbd", 3);
            if (out->count > 1) i--; // the last byte may begin a character of its own
            out->count = 0;
        }
    }
}

static void text_out_end(TextOut *out) {
    if (out->count) text_out_pass(out, "\xef\xbf\xbd", 3);
    out->count = 0;
}

#endif
