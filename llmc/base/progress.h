/*
A progress bar with the time left, on stderr, for work of more than a few seconds. It appears only on a terminal and is
redrawn at most ten times a second. Call progress_clear before you print a line; errors and notes call it themselves
(before_message in utils.h). Long units of work have parts, counted by code that does not know the bar: a pass counts
its layers.
*/
#ifndef LLMC_PROGRESS_H
#define LLMC_PROGRESS_H
#include "text.h"
#include <sys/ioctl.h>
#include <unistd.h>

#define PROGRESS_DELAY    1.0 // seconds before a bar appears
#define PROGRESS_INTERVAL 0.1 // seconds between redraws
#define PROGRESS_LINE     256
#define PROGRESS_LABEL    128

typedef struct {
    FILE *file;                  // NULL: stderr is not a terminal
    char label[PROGRESS_LABEL];  // text before the bar; may change
    double total;                // total work, in any unit
    double begun_done, begun_at; // at this process's start: units done (not 0 in a resumed run), and the time
    double unit_seconds;         // seconds per unit, for the time left; 0: unknown; below 0: the mean so far
    double drawn_at;
    int shown;
    double done, unit;      // units done, and units being worked on
    double parts, of_parts; // parts done of these units, and their number of parts
} Progress;

// Writes a line of at most `width` columns: "train  40 % [========>            ] 3 min 20 s left". seconds_left < 0:
// unknown.
static void progress_text(char *line, size_t width, const char *label, double fraction, double seconds_left) {
    char head[PROGRESS_LABEL + 16], tail[64] = "";
    fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    width = min_size(width, PROGRESS_LINE - 1);
    snprintf(head, sizeof(head), "%.127s %3d %% ", label, (int)(100 * fraction));
    if (seconds_left >= 0) snprintf(tail, sizeof(tail), " %s left", human_seconds(seconds_left));
    int bar = (int)width - (int)strlen(head) - (int)strlen(tail) - 2;
    if (bar < 5) { // too narrow for a bar
        snprintf(line, PROGRESS_LINE, "%s%s", head, *tail ? tail + 1 : "");
        line[width] = 0;
        return;
    }
    int filled = (int)(fraction * bar);
    int used = snprintf(line, PROGRESS_LINE, "%s[", head);
    for (int i = 0; i < bar; i++) line[used++] = i < filled ? '=' : i == filled ? '>' : ' ';
    snprintf(line + used, (size_t)(PROGRESS_LINE - used), "]%s", tail);
}

static Progress *progress_shown; // the bar on the screen, or NULL
static Progress *progress_inner; // the bar whose parts progress_part counts, or NULL
static int progress_off;         // 1: --quiet, no bars

static void progress_clear_shown(void) {
    if (!progress_shown || !progress_shown->shown) return;
    fputs("\r\033[K", progress_shown->file);
    fflush(progress_shown->file);
    progress_shown->shown = 0;
}

static void progress_clear(const Progress *progress) {
    if (progress->shown) progress_clear_shown();
}

// Makes a bar for `total` units of work; `done` units are done already. file: stderr; NULL or not a terminal: no bar
static Progress progress_begin(FILE *file, const char *label, double done, double total) {
    const char *terminal = getenv("TERM");
    const double now = seconds_now();
    if (progress_off || !is_main_rank() || (terminal && !strcmp(terminal, "dumb"))) file = NULL;
    if (file && !isatty(fileno(file))) file = NULL;
    Progress progress = {file, "", total, done, now, -1, now + PROGRESS_DELAY - PROGRESS_INTERVAL, 0, done, 0, 0, 1};
    snprintf(progress.label, sizeof(progress.label), "%s", label);
    return progress;
}

// Redraws the bar. `progress` must stay at its address until progress_end.
static void progress_update(Progress *progress, double done) {
    char line[PROGRESS_LINE];
    double advanced = done - progress->begun_done, left = -1, unit = progress->unit_seconds;
    struct winsize size;
    if (!progress->file) return;
    double now = seconds_now();
    if (now - progress->drawn_at < PROGRESS_INTERVAL) return;
    if (unit < 0 && advanced > 0) unit = (now - progress->begun_at) / advanced;
    if (unit > 0) left = unit * (progress->total - done);
    if (ioctl(fileno(progress->file), TIOCGWINSZ, &size) || !size.ws_col) size.ws_col = 80;
    progress_text(line, size.ws_col - 1u, progress->label, progress->total > 0 ? done / progress->total : 0, left);
    if (progress_shown != progress) progress_clear_shown();
    fprintf(progress->file, "\r%s\033[K", line);
    fflush(progress->file);
    progress->drawn_at = now;
    progress->shown = 1;
    progress_shown = progress;
    before_message = progress_clear_shown;
}

// Begins work on the `unit` units after `done`. They have `parts` parts, which progress_part counts.
static void progress_expect(Progress *progress, double done, double unit, double parts) {
    progress->done = done, progress->unit = unit, progress->parts = 0, progress->of_parts = parts;
    progress_inner = progress;
}

static void progress_part(double parts) {
    Progress *progress = progress_inner;
    if (!progress || !progress->file) return;
    progress->parts = fmin(progress->parts + parts, progress->of_parts);
    progress_update(progress, progress->done + progress->unit * progress->parts / progress->of_parts);
}

static void progress_end(Progress *progress) {
    progress_clear(progress);
    if (progress_inner == progress) progress_inner = NULL;
    if (progress_shown == progress) progress_shown = NULL;
    progress->file = NULL;
}

#endif
