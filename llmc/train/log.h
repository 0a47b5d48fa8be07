/*
The log of a run: printed step lines (on a terminal above a bar that is redrawn), log.jsonl in --out for programs, signs
of divergence, and the last lines.

log.jsonl has one JSON object per line, flushed one by one: {"step": 12, "loss": ...} for a step, "val_loss" for a
validation, "sample", and "options" for each part of the run, with its first step, version, commit, notes, and the
revision of a model from Hugging Face's cache. Each object ends with the UTC time of writing: "time":
"2026-01-31T12:00:00Z". "loss" is only the objective's: routers' losses are in "aux_loss" and "z_loss", without their
coefficients. A resumed run first drops records after its step, and an incomplete last line. So the file reads as if
there had been no interruption. Unknown lines are kept.
*/
#ifndef LLMC_LOG_H
#define LLMC_LOG_H
#include "llmc/files/checkpoint_folder.h"
#include "llmc/base/json.h"
#include "llmc/cli/options_out.h"
#include "llmc/base/progress.h"
#include "llmc/run/report.h"
#include "llmc/generate/prompt.h"
#include "evaluate.h"
#include "run_state.h"

// Report of a step: sums over all ranks. seconds: measured by rank 0, which waits for all ranks
typedef struct {
    size_t step;
    double loss, grad_norm, learning_rate;
    double tokens, seconds; // tokens and seconds of this step
    double computed;        // tokens that the model computed: those that documents share count once
    double flops;           // FLOPs executed in this step
    double peak_flops;      // FLOP/s of the machine's matrix product; 0: unknown
    double memory_bytes;    // peak bytes of this rank
    double sent_bytes;      // bytes sent, average per rank
    size_t ranks;
    double data_seconds;                    // part of `seconds`: waiting for data
    double rollout_seconds, reward_seconds; // parts of `seconds`: writing completions; waiting for their rewards
    size_t micro_batches;                   // number of micro-batches on this rank
    DealSummary deal;                       // summary of the deal, with --sp auto
    Metrics metrics;                        // metrics of the objective
} StepReport;

typedef struct {
    FILE *text;    // stream of step lines; NULL: none
    FILE *records; // log.jsonl; NULL: no --out
    char path[PATH_MAX];
    size_t steps, every; // steps of the run; steps from one printed line to the next
    int verbose;         // 1: step lines have all columns
    int by_rewards;      // 1: the loss is 0 by construction, and not shown
    int shares;          // 1: documents share prefixes: step lines say which part of the tokens was computed
    unsigned seen;       // bits of the metrics shown in step lines so far
    StepReport since;    // sums over the steps since the last line
    size_t gathered;     // number of these steps
    size_t first;        // first step of this part of the run; 0: none yet
    double first_at;     // clock at the end of the first step
    double pace;         // mean seconds of a step of this part, without the first step if there are more
    Progress progress;
} RunLog;

// ---- log.jsonl ------------------------------------------------------------------------------------------------------
// Returns the step of a record, or SIZE_MAX for another line.
static size_t record_step(const char *line) {
    char number[21];
    size_t step;
    return sscanf(line, " { \"step\" : %20[0-9]", number) == 1 && parse_size(number, &step) ? step : SIZE_MAX;
}

// Tells whether a record belongs to a validation: reads the record's first key after the step.
static int record_validates(const char *line) {
    const char *next = strchr(line, ',');
    return next && !strncmp(next, ", \"val_", 7);
}

// Drops records of steps after `step` (0: all records) and an incomplete last line; keeps other lines. again: also
// drops the validation of `step`, which is repeated
static void records_shorten(const char *path, size_t step, int again) {
    char part[4097];
    int fd = file_open(path, O_RDWR | O_NOFOLLOW), begins = 1, drop = 0;
    off_t at = 0, kept = 0, whole = 0; // bytes read, bytes kept, bytes kept in complete lines
    ssize_t n = 0;
    if (fd < 0 && errno == ENOENT) return;
    if (fd < 0) die("%s: %s", path, file_fault());
    while ((n = pread(fd, part, sizeof(part) - 1, at)) > 0) {
        const char *end = (const char *)memchr(part, '\n', (size_t)n);
        if (end) n = end + 1 - part;
        part[n] = 0;
        const size_t found = begins ? record_step(part) : SIZE_MAX;
        if (begins)
            drop = found != SIZE_MAX && (found > step || !step || (again && found == step && record_validates(part)));
        if (!drop && kept < at && pwrite(fd, part, (size_t)n, kept) != n) break;
        if (!drop) kept += n;
        at += n, begins = end != NULL;
        if (begins) whole = kept;
    }
    if (n != 0 || ftruncate(fd, whole))
        die("cannot shorten %s to step %zu: %s; check its permissions, then type --resume again", path, step,
            error_text(errno));
    close(fd);
}

static void records_truncate(const char *path, size_t step) { records_shorten(path, step, 0); }

// ---- opening --------------------------------------------------------------------------------------------------------
// Opens a file of records in --out, to append to it.
static FILE *records_open(const char *path) {
    const int fd = file_open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "a");
    if (!file) die("%s: %s; choose another --out", path, file_fault());
    return file;
}

// Opens the log. text: stdout, stderr with --json, or NULL with --quiet. folder: --out, or NULL. step: the last
// finished step: 0, or the step to resume from
static RunLog runlog_open(FILE *text, const char *folder, size_t step, size_t steps) {
    RunLog log = {0};
    log.text = text;
    log.steps = steps, log.every = 1;
    if (folder) {
        make_folder(folder);
        path_join(log.path, folder, RECORDS_NAME);
        records_truncate(log.path, step);
        log.records = records_open(log.path);
        run_began();
    }
    log.progress = progress_begin(text ? stderr : NULL, "", (double)step, (double)steps);
    log.progress.unit_seconds = 0;
    snprintf(log.progress.label, PROGRESS_LABEL, "step %zu/%zu ", step, steps);
    return log;
}

static void runlog_close(RunLog *log) {
    progress_end(&log->progress);
    if (log->records && fclose(log->records))
        die("cannot write %s: %s; make room, then continue with --resume", log->path, error_text(errno));
    log->records = NULL;
}

// Begins a record; runlog_record_end ends it. log->records must be open.
static JsonOut runlog_record(RunLog *log, size_t step) {
    JsonOut json = json_open(log->records);
    json_size(&json, "step", step);
    return json;
}

static void runlog_record_end(RunLog *log, JsonOut *json) {
    const time_t now = time(NULL);
    struct tm utc;
    char text[32] = "";
    if (gmtime_r(&now, &utc)) strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
    json_text(json, "time", text);
    int error = json_close(json);
    if (error) die("cannot write %s: %s; make room, then continue with --resume", log->path, error_text(error));
}

// Records the options of this part of a run. step: the last finished step. The record belongs to the step after it: if
// that step is never saved, the next part replaces the record.
static void runlog_options(RunLog *log, size_t step, const Run *run, const RunSource *source) {
    const char *revision = hub_revision(source->text[SOURCE_FOLDER]);
    if (!log->records || step >= log->steps) return; // this part of the run has no steps
    JsonOut json = runlog_record(log, step + 1);
    json_text(&json, "version", program_version());
    json_text(&json, "commit", program_commit());
    if (revision) json_text(&json, "revision", revision);
    report_method_json(&json, run);
    report_attention_json(&json, run);
    report_places_json(&json, run);
    if (run->settings.router_aux_loss > 0) json_number(&json, "router_aux_loss_coef", run->settings.router_aux_loss);
    json_array(&json, "notes");
    for (size_t i = 0; i < notes_kept; i++) json_text(&json, NULL, note_texts[i]);
    json_array_end(&json);
    options_json(&json, "options", run->options);
    runlog_record_end(log, &json);
}

// ---- lines ----------------------------------------------------------------------------------------------------------
static int digits_of(size_t number) { return snprintf(NULL, 0, "%zu", number); }

// Returns the seconds of a step, except for writing completions and waiting for rewards.
static double training_seconds(const StepReport *r) { return r->seconds - r->rollout_seconds - r->reward_seconds; }

// Returns the steps from one printed line to the next. given: value of --log-every; 0: about 200 lines per run, or 20
// where lines scroll a terminal
static size_t lines_every(const RunLog *log, size_t given) {
    const size_t lines = log->progress.file && log->text && isatty(fileno(log->text)) ? 20 : 200;
    return given ? given : (log->steps + lines - 1) / lines;
}

// Adds a step to the steps of the next line: sums and metrics. Rates are the step's own.
static void report_gather(StepReport *sum, const StepReport *r) {
    const StepReport before = *sum;
    *sum = *r;
    sum->loss += before.loss, sum->tokens += before.tokens, sum->flops += before.flops;
    sum->computed += before.computed;
    sum->seconds += before.seconds, sum->data_seconds += before.data_seconds, sum->sent_bytes += before.sent_bytes;
    sum->rollout_seconds += before.rollout_seconds, sum->reward_seconds += before.reward_seconds;
    sum->metrics = before.metrics;
    for (size_t i = 0; i < r->metrics.count; i++) metric_merge(&sum->metrics, &r->metrics.metric[i]);
}

// Writes how many sequences groups of each size had. Writes the mean load of ranks and the deal's bound as shares of
// the step's load.
static void deal_json(JsonOut *json, const DealSummary *deal, size_t ranks) {
    const DealLevels levels = deal_levels(ranks);
    char name[24];
    json_object(json, "groups");
    for (size_t k = 0; k < levels.levels; k++) {
        snprintf(name, sizeof(name), "%zu", levels.level[k].ranks);
        if (deal->groups[k]) json_size(json, name, deal->groups[k]);
    }
    json_object_end(json);
    json_number(json, "deal_balance", deal->mean / deal->load);
    json_number(json, "deal_bound", deal->bound / deal->load);
}

// Prints the line of the gathered steps.
static void step_line(RunLog *log) {
    const StepReport *r = &log->since;
    const double steps = (double)log->gathered, seconds = training_seconds(r);
    const double per_second = seconds > 0 ? 1 / seconds : 0;
    TextLine line = {{0}, 0};
    const time_t now = time(NULL);
    struct tm local;
    char clock[16] = "";
    line_add(&line, "step %*zu/%zu", digits_of(log->steps), r->step, log->steps);
    if (!log->by_rewards) line_add(&line, "  loss %s", human_fixed(r->loss / steps, 7));
    metrics_add(&line, &r->metrics, &log->seen, log->verbose);
    line_add(&line, "  norm %s", human_fixed(r->grad_norm, 6) + 1);
    line_add(&line, "  lr %.2e", r->learning_rate);
    const int rates = !log->by_rewards || log->verbose;
    if (rates) line_add(&line, "  %7.0f tok/s", r->tokens * per_second);
    if (rates && log->shares) line_add(&line, "  %3.0f %% computed", r->tokens > 0 ? 100 * r->computed / r->tokens : 0);
    if (log->verbose) {
        line_add(&line, "  %s TFLOP/s", human_fixed(1e-12 * r->flops * per_second, 6) + 1);
        if (r->peak_flops > 0) line_add(&line, " %3.0f %% of peak", 100 * r->flops * per_second / r->peak_flops);
        line_add(&line, "  memory %s GiB", human_fixed(0x1p-30 * r->memory_bytes, 6) + 1);
        if (r->ranks > 1) line_add(&line, "  %s MB sent", human_fixed(1e-6 * r->sent_bytes / steps, 6) + 1);
        if (r->deal.load > 0) line_add(&line, "  ranks %3.0f %% loaded", 100 * r->deal.mean / r->deal.load);
        line_add(&line, "  %3.0f %% waiting for data", r->seconds > 0 ? 100 * r->data_seconds / r->seconds : 0);
        if (r->seconds > 0 && r->rollout_seconds > 0)
            line_add(&line, "  %3.0f %% writing, %3.0f %% rewards", 100 * r->rollout_seconds / r->seconds,
                     100 * r->reward_seconds / r->seconds);
    }
    if (localtime_r(&now, &local)) strftime(clock, sizeof(clock), "%H:%M:%S", &local);
    line_add(&line, "  %s", clock);
    if (r->step < log->steps) line_add(&line, "  %s left", human_seconds(log->pace * (double)(log->steps - r->step)));
    fprintf(log->text, "%s\n", line.text);
}

// Writes the bar's text for the step: number of the step, loss or reward, seconds per step.
static void step_label(const RunLog *log, const StepReport *r, char label[PROGRESS_LABEL]) {
    const double value = log->by_rewards ? metric_named(&r->metrics, "reward") : r->loss;
    char seconds[32];
    snprintf(seconds, sizeof(seconds), "%#.3g s", log->pace);
    snprintf(label, PROGRESS_LABEL, "step %zu/%zu  %s %#.4g  %s a step ", r->step, log->steps,
             log->by_rewards ? "reward" : "loss", value, log->pace < 100 ? seconds : human_seconds(log->pace));
}

static void runlog_step(RunLog *log, const StepReport *r) {
    const double now = seconds_now(), seconds = training_seconds(r), per_second = seconds > 0 ? 1 / seconds : NAN;
    const int begins = !log->first;
    if (begins) log->first = r->step, log->first_at = now;
    log->pace = begins ? r->seconds : (now - log->first_at) / (double)(r->step - log->first);
    report_gather(&log->since, r), log->gathered++;
    if (log->text && (begins || r->step % log->every == 0 || r->step == log->steps)) {
        progress_clear(&log->progress);
        step_line(log);
        fflush(log->text);
        memset(&log->since, 0, sizeof(log->since)), log->gathered = 0;
    }
    if (log->records) {
        JsonOut json = runlog_record(log, r->step);
        json_number(&json, "loss", r->loss);
        json_number(&json, "grad_norm", r->grad_norm);
        json_number(&json, "lr", r->learning_rate);
        json_number(&json, "tokens", r->tokens);
        json_number(&json, "computed", r->computed);
        json_number(&json, "seconds", r->seconds);
        json_number(&json, "data_seconds", r->data_seconds);
        if (r->rollout_seconds > 0) {
            json_number(&json, "rollout_seconds", r->rollout_seconds);
            json_number(&json, "reward_seconds", r->reward_seconds);
        }
        json_number(&json, "tokens_per_second", r->tokens * per_second);
        json_number(&json, "flops_per_second", r->flops * per_second);
        json_number(&json, "peak_share", r->peak_flops > 0 ? r->flops * per_second / r->peak_flops : NAN);
        json_number(&json, "memory_bytes", r->memory_bytes);
        if (r->ranks > 1) json_number(&json, "sent_bytes", r->sent_bytes);
        if (r->deal.load > 0) deal_json(&json, &r->deal, r->ranks);
        metrics_json(&json, &r->metrics, "");
        runlog_record_end(log, &json);
    }
    step_label(log, r, log->progress.label);
    log->progress.unit_seconds = log->pace;
    progress_update(&log->progress, (double)r->step);
}

// Reports a validation: the loss or, if the loss is NAN, the rewards of groups of completions.
static void runlog_validation(RunLog *log, size_t step, const Evaluation *found) {
    const int by_rewards = isnan(found->loss);
    if (log->text) {
        progress_clear(&log->progress);
        TextLine line = {{0}, 0};
        unsigned seen = 0;
        line_add(&line, "step %*zu/%zu  validation", digits_of(log->steps), step, log->steps);
        if (by_rewards)
            line_add(&line, " of %.0f prompts", found->counts.groups);
        else
            line_add(&line, " loss %s  %.0f tokens", human_fixed(found->loss, 7), found->counts.tokens);
        metrics_add(&line, &found->metrics, &seen, log->verbose);
        fprintf(log->text, "%s\n", line.text);
        fflush(log->text);
    }
    if (log->records) {
        JsonOut json = runlog_record(log, step);
        if (!by_rewards) json_number(&json, "val_loss", found->loss);
        json_number(&json, by_rewards ? "val_prompts" : "val_tokens",
                    by_rewards ? found->counts.groups : found->counts.tokens);
        metrics_json(&json, &found->metrics, "val_");
        runlog_record_end(log, &json);
    }
}

static void runlog_sample(RunLog *log, size_t step, const char *sample, size_t bytes) {
    if (log->text) {
        progress_clear(&log->progress);
        fprintf(log->text, "step %*zu/%zu  sample:\n", digits_of(log->steps), step, log->steps);
        fwrite(sample, 1, bytes, log->text);
        fputc('\n', log->text);
        fflush(log->text);
    }
    if (log->records) {
        JsonOut json = runlog_record(log, step);
        json_bytes(&json, "sample", sample, bytes);
        runlog_record_end(log, &json);
    }
}

// ---- signs that a run has diverged though every number is finite ----------------------------------------------------
// Signs of divergence. Each is reported once: trainer_watch (trainer.h) prints a note or ends the run.

#define DIVERGENCE_STEPS 3     // consecutive steps without a gradient, or with equal rewards
#define DIVERGENCE_LOSS  100.0 // a loss this many times the best loss is a sign
#define DIVERGENCE_FLOOR 0.1   // nats: the best loss counts as at least this much, so that one odd document is no sign

typedef enum { SIGN_NONE, SIGN_REWARDS, SIGN_GRADIENT, SIGN_LOSS, SIGNS } DivergenceSign;

typedef struct {
    size_t equal, still; // consecutive steps in which all groups had equal rewards; with a gradient of exactly 0
    double best;         // least loss since the run began or was resumed; 0: none yet
    int high;            // 1: the last loss is far above `best`
    unsigned reported;   // one bit per sign
} Divergence;

static const char *const divergence_texts[SIGNS] = {
    "", "all groups had equal rewards in 3 steps in a row; use other prompts, or a finer reward command",
    "the gradient was exactly 0 in 3 steps in a row; use a smaller --lr, or check --data",
    "the loss is 100 times its best; use a smaller --lr or a longer --warmup"};

// Adds a step to *d; returns a sign that the step shows for the first time, or SIGN_NONE. cross_entropy: the loss is at
// least 0 and comparable between steps.
static DivergenceSign divergence_find(Divergence *d, const StepReport *r, int cross_entropy) {
    DivergenceSign sign = SIGN_NONE;
    int equal = 0;
    for (size_t i = 0; i < r->metrics.count; i++)
        equal |= !strcmp(r->metrics.metric[i].name, "frac_reward_zero_std") && metric_value(&r->metrics.metric[i]) == 1;
    d->equal = equal ? d->equal + 1 : 0;
    d->still = !equal && r->grad_norm == 0 ? d->still + 1 : 0;
    if (cross_entropy) {
        const double loss = fmax(r->loss, DIVERGENCE_FLOOR);
        if (d->best == 0 || loss < d->best) d->best = loss;
        d->high = loss > DIVERGENCE_LOSS * d->best;
        if (d->high) sign = SIGN_LOSS;
    }
    if (d->still >= DIVERGENCE_STEPS) sign = SIGN_GRADIENT;
    if (d->equal >= DIVERGENCE_STEPS) sign = SIGN_REWARDS;
    if (!sign || d->reported >> sign & 1) return SIGN_NONE;
    d->reported |= 1u << sign;
    return sign;
}

// Returns 1 if checkpoints saved from now on may be worse than the earlier ones.
static int divergence_doubts(const Divergence *d) { return d->equal || d->still || d->high; }

// ---- the last lines of a run ----------------------------------------------------------------------------------------
// Facts for the last lines: duration, validations, folder, and the next command. After --resume the duration counts
// only the resumed part

typedef struct {
    double begin, seconds; // clock, and total seconds of training, before the first step
    size_t tokens;         // tokens that were trained on before
    double last;           // last validation loss, with --rollout reward; NAN: none
    int chats;             // 1: the data were conversations, and the tokenizer can chat
} Ending;

// Prints the last lines. peak: bytes; stopped: a signal ended the run and has printed how to continue
static void ending_print(FILE *out, const Ending *e, const Run *run, const RunState *state, double peak, int stopped) {
    const Options *o = run->options;
    const double tokens = (double)(state->tokens - e->tokens), seconds = state->seconds - e->seconds;
    char path[PATH_MAX];
    fprintf(out, "ended    step %zu of %zu after %s, %.0f tokens, %.0f tok/s, memory at most %s with libraries\n",
            state->step, state->schedule.steps, human_seconds(seconds_now() - e->begin), tokens,
            seconds > 0 ? tokens / seconds : 0, human_bytes(peak));
    if (!isnan(e->last) && state->best_step)
        fprintf(out, "validation  %s %.6g at first, %.6g at best (step %zu), %.6g at last\n",
                o->rollout ? "reward" : "loss", state->first, state->best, state->best_step, e->last);
    if (!o->out || stopped) return;
    const int writes = tokenizer_of_run(run, path) || run->model.config.vocab_size == 256;
    const size_t name = strlen(o->out) - text_ends_with(o->out, "/");
    fprintf(out, "saved    %s\ntry it   ", o->out);
    echo_quoted(out, program_called());
    fputs(" sample --model ", out);
    echo_quoted(out, o->out);
    fprintf(out, " %s%s\nexport   ", e->chats ? "--chat " : "", writes ? "--prompt TEXT" : "--prompt-ids 1,2,3");
    echo_quoted(out, program_called());
    fputs(" convert --model ", out);
    echo_quoted(out, o->out);
    const int apart = lora_has_outer(&run->lora) && run->model.config.tie_word_embeddings; // 1: adapters that cannot be
                                                                                           // merged (merge.h)
    fputs(apart ? " --adapter-only --out " : " --out ", out);
    snprintf(path, sizeof(path), "%.*s-hf", (int)name, o->out);
    echo_quoted(out, path);
    fputc('\n', out);
}

#endif
