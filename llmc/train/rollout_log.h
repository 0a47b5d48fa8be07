/*
Logs completions for users: rollouts.jsonl in --out, and the table of --show.

A line is the line for the reward commands (rollout_rewards.h), preceded by the step, the completion's rewards by name
(null: none), their weighted sum, its advantage (null: its group was left out) and its number of tokens:

    {"step": 3, "rewards": {"length": 0.5}, "reward": 0.5, "advantage": -0.7, "tokens": 12, "prompt": "...", ...}

With an environment a line has `reward`, `advantage`, `tokens` in all, and the members of trajectory_json.

After --keep-rollouts steps the file is renamed to rollouts.1.jsonl, replacing the previous file of that name. A resumed
run first drops later steps. Each replica writes its own file: the second replica writes rollouts-1.jsonl.
*/
#ifndef LLMC_ROLLOUT_LOG_H
#define LLMC_ROLLOUT_LOG_H
#include "log.h"
#include "rollout.h"

enum {
    SHOWN_PROMPT = 32,
    SHOWN_COMPLETION = 64
};                       // tokens that the table shows: the last ones of a prompt, the first
                         // ones of a completion
#define SHOWN_COLUMNS 48 // columns of text in a table's line

typedef struct {
    FILE *file; // NULL: no file
    char path[PATH_MAX], before[PATH_MAX];
    size_t keep, show; // steps per file; completions in the table
    RolloutLine line;
    char *piece, *text; // memory for a piece of a line; for text in the table
} RolloutLog;

// ---- the file -------------------------------------------------------------------------------------------------------
static off_t file_size_or_0(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 ? status.st_size : 0;
}

static void rollout_log_close(RolloutLog *log) {
    if (log->file && fclose(log->file))
        die("cannot write %s: %s; make room, then continue with --resume", log->path, error_text(errno));
    free(log->piece), free(log->text);
    memset(log, 0, sizeof(*log));
}

// Opens the log. folder: --out, or NULL. step: the last finished step; rollouts: how many were written up to it
static RolloutLog rollout_log_open(const Rollout *r, const char *folder, size_t keep, size_t show, size_t step,
                                   size_t rollouts) {
    RolloutLog log = {0};
    const World world = r->settings.world;
    const size_t replica = world_replica(world), token = prompt_token_bytes(&r->decoder) + 8;
    char name[2][64], number[24] = "";
    log.keep = keep, log.show = show;
    log.piece = (char *)checked_malloc(r->piece + token, "the log of rollouts");
    log.text = (char *)checked_malloc((SHOWN_PROMPT + SHOWN_COMPLETION) * token, "the table of rollouts");
    log.line.scratch = log.piece + r->piece;
    if (!folder || !keep || world.rank % world_sp(world)) return log;
    if (replica) snprintf(number, sizeof(number), "-%zu", replica);
    snprintf(name[0], sizeof(name[0]), "rollouts%s.jsonl", number);
    snprintf(name[1], sizeof(name[1]), "rollouts%s.1.jsonl", number);
    path_join(log.path, folder, name[0]);
    path_join(log.before, folder, name[1]);
    records_truncate(log.path, step);
    records_truncate(log.before, step);
    if (rollouts % keep && !file_size_or_0(log.path) && file_size_or_0(log.before) && rename(log.before, log.path))
        die("cannot rename %s: %s; check the permissions of its folder, then continue with --resume", log.before,
            error_text(errno));
    log.file = records_open(log.path);
    return log;
}

static double known_or_nan(const Rollout *r, size_t p, double value) {
    return r->group_sequence[p] == SIZE_MAX ? NAN : value;
}

// Writes a step's completions. rollouts: number of rollouts written before this step's
static void rollout_log_write(RolloutLog *log, Rollout *r, size_t step, size_t rollouts) {
    const size_t G = r->settings.group_size, texts = r->settings.prompts * G;
    const int agents = r->settings.environment.command != NULL;
    int error = 0;
    if (!log->file) return;
    if (rollouts % log->keep == 0 && file_size_or_0(log->path)) {
        if (fclose(log->file) || rename(log->path, log->before))
            die("cannot rename %s: %s; check the permissions of its folder, then continue with --resume", log->path,
                error_text(errno));
        log->file = records_open(log->path);
    }
    for (size_t i = 0; i < texts && !error; i++) {
        JsonOut json = json_open(log->file);
        json_size(&json, "step", step);
        if (!agents) json_object(&json, "rewards");
        for (size_t k = 0; k < r->settings.rewards; k++)
            json_number(&json, r->settings.reward_name[k], (double)r->rewards_of[k * texts + i]);
        if (!agents) json_object_end(&json);
        json_number(&json, "reward", (double)r->reward[i]);
        json_number(&json, "advantage", known_or_nan(r, i / G, r->advantage[i]));
        json_size(&json, "tokens", agents ? r->agents.text[i].all : r->completion[i].tokens);
        if (agents) {
            trajectory_json(r, i, &json);
            error = json_close(&json);
            continue;
        }
        rollout_line_begin(&log->line, i);
        for (int first = 1; log->line.completion == i; first = 0) {
            size_t bytes = rollout_piece(r, &log->line, log->piece);
            if (first) fputs(", ", log->file); // replaces the opening brace
            fwrite(log->piece + first, 1, bytes - (size_t)first, log->file);
        }
        error = ferror(log->file) ? errno : 0;
    }
    if (fflush(log->file) || error)
        die("cannot write %s: %s; make room, then continue with --resume", log->path, error_text(errno));
}

// ---- the table ------------------------------------------------------------------------------------------------------
// Prints text[bytes] in at most `columns` printable columns: its beginning, or its end.
static void show_text(FILE *out, char *text, size_t bytes, size_t columns, int end) {
    size_t begin = 0, count = 0;
    for (size_t i = 0, n; i < bytes; i += n) {
        n = utf8_length((const unsigned char *)text + i, bytes - i);
        if (n < 2 && ((unsigned char)text[i] < 0x20 || (unsigned char)text[i] >= 0x7f)) text[i] = ' ';
        n = n ? n : 1, count++;
    }
    for (size_t left = count; end && left > columns; left--)
        begin += max_size(utf8_length((const unsigned char *)text + begin, bytes - begin), 1);
    for (size_t i = begin, shown = 0, n; i < bytes && shown < columns; i += n, shown++) {
        n = max_size(utf8_length((const unsigned char *)text + i, bytes - i), 1);
        fwrite(text + i, 1, n, out);
    }
}

static void show_number(FILE *out, int columns, double value) {
    if (isnan(value))
        fprintf(out, "%*s", columns, "-");
    else
        fprintf(out, "%*.3g", columns, value);
}

// Prints the first --show completions of this replica.
static void rollout_log_show(RolloutLog *log, Rollout *r, FILE *out) {
    const size_t G = r->settings.group_size, texts = min_size(r->settings.prompts * G, log->show);
    if (!texts || !out) return;
    fprintf(out, "  reward  advantage  tokens  prompt > completion\n");
    for (size_t i = 0; i < texts; i++) {
        const Completion *c = &r->completion[i];
        const size_t skip = c->prompt_tokens - min_size(c->prompt_tokens, SHOWN_PROMPT);
        show_number(out, 8, (double)r->reward[i]);
        show_number(out, 11, known_or_nan(r, i / G, r->advantage[i]));
        fprintf(out, "%8zu  ", c->tokens);
        size_t bytes = prompt_text(&r->decoder, c->prompt + skip, c->prompt_tokens - skip, log->text);
        show_text(out, log->text, bytes, SHOWN_COLUMNS / 3, 1);
        fputs(" > ", out);
        bytes = prompt_text(&r->decoder, c->ids, min_size(c->tokens, SHOWN_COMPLETION), log->text);
        show_text(out, log->text, bytes, SHOWN_COLUMNS - 3 - SHOWN_COLUMNS / 3, 0);
        fputc('\n', out);
    }
}

#endif
