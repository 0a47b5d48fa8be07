/*
Progress of a training run and the settings that a resumed run must share: state.json of every checkpoint. A resumed run
reads it. It refuses options that would have given other bits, in one line that names the difference. Steps, batches and
tokens count the work of all ranks, so any number of ranks may continue the run.

Settings are compared as text, schedules by the learning rates of the finished steps. So a constant rate, or a rate that
has not begun to decay (wsd), may get more steps; a cosine may not.
*/
#ifndef LLMC_RUN_STATE_H
#define LLMC_RUN_STATE_H
#include "llmc/base/json.h"
#include "llmc/files/run_source.h"
#include "llmc/optimizer/schedule.h"

#define RUN_STATE_FORMAT  "streambp.c run state"
#define RUN_STATE_VERSION 1
#define SCHEDULE_VERSION  2     // a schedule without a version is of version 1 (Schedule.version_1)
#define RUN_STATE_LIMIT   65536 // most bytes of state.json

typedef enum {
    SETTING_KEPT,   // a resumed run must have the value of the original run
    SETTING_ROUNDS, // may change, with a note: the run continues, but sums are in another order, so bits differ
    SETTING_FREE    // may change, with a note: no bit depends on it
} SettingChange;

typedef struct {
    const char *name;  // name for messages: "--seq-len"
    const char *value; // value in effect
    SettingChange change;
    const char *absent; // default value, which is not written; NULL: none
} RunSetting;

typedef struct {
    size_t step;       // number of finished optimizer steps
    size_t next_batch; // position in the data after the last batch that any rank has taken
    size_t tokens;     // tokens trained on
    size_t validated;  // step of the last validation
    size_t best_step;  // step of the best validation so far; 0: none
    double best;       // loss, or reward, of the best validation
    double first;      // loss, or reward, of the run's first validation; NAN: none
    double seconds;    // seconds of training
    Schedule schedule;
    const RunSetting *settings;
    size_t setting_count;
    const RunSource *source; // start of the run, or NULL
    const char *data;        // names of the data files; the setting "data" is a key of their content
} RunState;

// ---- state.json -----------------------------------------------------------------------------------------------------
static const cJSON *state_get(const cJSON *object, const char *key, const char *path) {
    const cJSON *item = json_get(object, key);
    if (!item) die("%s: has no \"%s\", so it is incomplete; resume an earlier checkpoint", path, key);
    return item;
}

static const char *state_string(const cJSON *object, const char *key, const char *path) {
    const cJSON *item = state_get(object, key, path);
    if (!cJSON_IsString(item)) die("%s: \"%s\" must be text; resume an earlier checkpoint", path, key);
    return item->valuestring;
}

static size_t state_size(const cJSON *object, const char *key, const char *path) {
    uint64_t value;
    if (!json_whole_number(state_get(object, key, path), &value))
        die("%s: \"%s\" must be a whole number; resume an earlier checkpoint", path, key);
    return (size_t)value;
}

static double state_number(const cJSON *object, const char *key, const char *path) {
    const cJSON *item = state_get(object, key, path);
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble))
        die("%s: \"%s\" must be a number; resume an earlier checkpoint", path, key);
    return item->valuedouble;
}

static Schedule state_schedule(const cJSON *root, const char *path) {
    const cJSON *object = state_get(root, "schedule", path);
    const char *name = state_string(object, "kind", path);
    int kind = 0;
    while (kind < SCHEDULES && strcmp(schedule_names[kind], name) != 0) kind++;
    if (kind == SCHEDULES)
        die("%s: the schedule \"%.64s\" is unknown; resume with the program that wrote it", path, name);
    Schedule schedule = {0};
    schedule.kind = (ScheduleKind)kind;
    schedule.peak = state_number(object, "peak", path);
    schedule.final_fraction = state_number(object, "final_fraction", path);
    schedule.decay_fraction = state_number(object, "decay_fraction", path);
    schedule.warmup = state_size(object, "warmup", path);
    schedule.steps = state_size(object, "steps", path);
    if (json_get(object, "begin"))
        schedule.begin = state_size(object, "begin", path), schedule.from = state_number(object, "from", path);
    schedule.version_1 = !json_get(object, "version");
    if (!schedule.version_1 && state_size(object, "version", path) != SCHEDULE_VERSION)
        die("%s: the schedule has version %zu, but this program reads versions 1 and %d; resume with the program that "
            "wrote it",
            path, state_size(object, "version", path), SCHEDULE_VERSION);
    return schedule;
}

// Prints state.json. Returns the length of the text.
static size_t run_state_text(const RunState *run, char text[RUN_STATE_LIMIT], const char *path) {
    const Schedule *s = &run->schedule;
    JsonOut json = json_open_text(text, RUN_STATE_LIMIT, JSON_LINE);
    json_text(&json, "format", RUN_STATE_FORMAT);
    json_size(&json, "version", RUN_STATE_VERSION);
    json_size(&json, "step", run->step);
    json_size(&json, "next_batch", run->next_batch);
    json_size(&json, "tokens", run->tokens);
    json_number(&json, "seconds", run->seconds);
    json_size(&json, "validated", run->validated);
    if (!isnan(run->first)) json_number(&json, "first_validation", run->first);
    if (run->best_step) {
        json_object(&json, "best");
        json_size(&json, "step", run->best_step);
        json_number(&json, "value", run->best);
        json_object_end(&json);
    }
    json_object(&json, "schedule");
    json_text(&json, "kind", schedule_names[s->kind]);
    json_number(&json, "peak", s->peak);
    json_number(&json, "final_fraction", s->final_fraction);
    json_number(&json, "decay_fraction", s->decay_fraction);
    json_size(&json, "warmup", s->warmup);
    json_size(&json, "steps", s->steps);
    if (s->begin) json_size(&json, "begin", s->begin), json_number(&json, "from", s->from);
    if (!s->version_1) json_size(&json, "version", SCHEDULE_VERSION);
    json_object_end(&json);
    if (run->data) json_text(&json, "data_files", run->data);
    if (run->source) run_source_write(&json, run->source);
    json_object(&json, "settings");
    for (const RunSetting *s = run->settings; s < run->settings + run->setting_count; s++)
        if (!s->absent || strcmp(s->value, s->absent) != 0) json_text(&json, s->name, s->value);
    json_object_end(&json);
    const size_t length = json_text_end(&json);
    if (!length) die("%s: the state of this run does not fit %d bytes; please report it", path, RUN_STATE_LIMIT);
    return length;
}

// Reads the schedule and the step of a checkpoint, named by its folder.
static Schedule run_state_schedule(const char *checkpoint, size_t *step) {
    char path[PATH_MAX];
    path_join(path, checkpoint, "state.json");
    cJSON *root = json_read_object(path, RUN_STATE_LIMIT);
    const Schedule schedule = state_schedule(root, path);
    *step = state_size(root, "step", path);
    cJSON_Delete(root);
    return schedule;
}

// Returns the text of a setting that trainer_settings wrote; "": absent. The text is valid until the eighth call after
// this one
static const char *run_state_setting(const char *checkpoint, const char *name) {
    static char texts[8][128];
    static int next;
    char path[PATH_MAX], *text = texts[next++ % 8];
    path_join(path, checkpoint, "state.json");
    cJSON *root = json_read_object(path, RUN_STATE_LIMIT);
    const char *said = cJSON_GetStringValue(json_get(json_get(root, "settings"), name));
    snprintf(text, sizeof(texts[0]), "%s", said ? said : "");
    cJSON_Delete(root);
    return text;
}

// Setting with the attention workspace with which a run began
#define ATTENTION_SETTING "attention"
#define WORKSPACE_SETTING "workspace="
static size_t run_state_workspace(const char *checkpoint) {
    const char *found = strstr(run_state_setting(checkpoint, ATTENTION_SETTING), WORKSPACE_SETTING);
    return found ? strtoull(found + strlen(WORKSPACE_SETTING), NULL, 10) : 0;
}

// ---- comparing ------------------------------------------------------------------------------------------------------
// Returns the start of the first entry that differs between two lists "a=1,b=2"; 0 if one list continues the other.
static size_t first_difference(const char *a, const char *b) {
    size_t i, begin = 0;
    for (i = 0; a[i] && a[i] == b[i]; i++)
        if (a[i] == ',') begin = i + 1;
    return a[i] && b[i] ? begin : 0;
}

// Returns --keep-chunks without two options that earlier versions appended. Refuses these options if they were not at
// their defaults, because the gradient was then biased.
static const char *keep_chunks_saved(const char *saved, char *text, size_t size, const char *checkpoint) {
    const char *rest = strchr(saved, ',');
    if (rest && strcmp(rest, ", draw=independent, clamp=0") != 0)
        die("%s: its run had --keep-chunks %s, which this version does not have; resume with the version that began "
            "it, or begin a new run with another --out",
            checkpoint, saved);
    snprintf(text, size, "%.*s", (int)strcspn(saved, ","), saved);
    return text;
}

static void run_state_compare_setting(const RunSetting *setting, const cJSON *settings, const char *checkpoint,
                                      const char *path) {
    const char *now = setting->value, *saved = setting->absent;
    char keep[64];
    if (json_get(settings, setting->name)) saved = state_string(settings, setting->name, path);
    if (!saved)
        die("%s: lacks the setting %s: the run began without this option, or with another version; resume with the "
            "run's first options",
            path, setting->name);
    if (!strcmp(setting->name, "--keep-chunks")) saved = keep_chunks_saved(saved, keep, sizeof(keep), checkpoint);
    if (!strcmp(saved, now) || !strcmp(setting->name, "data"))
        return;                                        // data is compared after the settings that may
                                                       // explain a difference
    const size_t begin = first_difference(saved, now); // shows only one entry of a list
    saved += begin + strspn(saved + begin, " "), now += begin + strspn(now + begin, " ");
    const int saved_length = (int)min_size(strcspn(saved, ","), 200), now_length = (int)strcspn(now, ",");
    if (setting->change == SETTING_KEPT)
        die("%s: was trained with %s %.*s, now it is %.*s; resume with the same%s, or begin a new run with another "
            "--out",
            checkpoint, setting->name, saved_length, saved, now_length, now,
            !strncmp(now, "vocab_size", 10)                                          ? " --grow-vocabulary"
            : strncmp(now, "max_position", 12) != 0 && strncmp(now, "rope_", 5) != 0 ? " value"
                                                                                     : " --rope-scaling");
    note("%s was %.*s until %s, now it is %.*s: the run continues%s", setting->name, saved_length, saved, checkpoint,
         now_length, now, setting->change == SETTING_ROUNDS ? ", with other bits" : "");
}

static void run_state_compare_data(const RunState *run, const cJSON *root, const char *checkpoint) {
    const char *saved = cJSON_GetStringValue(json_get(json_get(root, "settings"), "data")), *now = NULL;
    const char *files = cJSON_GetStringValue(json_get(root, "data_files"));
    for (size_t i = 0; i < run->setting_count; i++)
        if (!strcmp(run->settings[i].name, "data")) now = run->settings[i].value;
    if (!saved || !now || !strcmp(saved, now)) return;
    if (files && run->data && !strcmp(files, run->data))
        die("%s: was trained on %s, which holds other data now; restore that data, or begin a new run with "
            "another --out",
            checkpoint, files);
    die("%s: was trained on %.820s, --data is %s now; resume with the same data, or begin a new run with another --out",
        checkpoint, files ? files : "other data", run->data ? run->data : "another");
}

static void run_state_compare_schedule(const RunState *run, const Schedule *saved, const char *checkpoint) {
    char wsd[48] = "";
    if (run->step > run->schedule.steps)
        die("%s: is already at step %zu, --steps is %zu; give a larger --steps", checkpoint, run->step,
            run->schedule.steps);
    if (saved->begin && saved->begin != run->schedule.begin && run->step > run->schedule.begin)
        die("%s: was extended beyond step %zu; give --extend --steps %zu again", checkpoint, saved->begin,
            saved->steps);
    for (size_t step = run->schedule.begin + 1; step <= run->step; step++) {
        double then = schedule_learning_rate(saved, step), now = schedule_learning_rate(&run->schedule, step);
        if (fabs(then - now) <= 1e-12 * then) continue; // a compiler may round two equal calls differently
        if (saved->kind == SCHEDULE_WSD) snprintf(wsd, sizeof(wsd), " --decay-fraction %.10g", saved->decay_fraction);
        die("%s: made step %zu at lr %.6g, not %.6g; give --steps %zu --lr %.10g --schedule %s --warmup %zu "
            "--final-lr-fraction %.10g%s; then --extend",
            checkpoint, step, then, now, saved->steps, saved->peak, schedule_names[saved->kind], saved->warmup,
            saved->final_fraction, wsd);
    }
}

// Reads the progress in `text` (zero-terminated) into *run. The text's schedule and settings must agree with the ones
// in *run.
static void run_state_resume(RunState *run, const char *text, size_t length, const char *checkpoint, const char *path) {
    cJSON *root = json_parse_object(text, length, path);
    const cJSON *item;
    size_t i;
    if (strcmp(state_string(root, "format", path), RUN_STATE_FORMAT) != 0)
        die("%s: is not the state of a run; resume an earlier checkpoint", path);
    if (state_size(root, "version", path) != RUN_STATE_VERSION)
        die("%s: is of version %zu, but this program reads version %d; resume with the program that wrote it", path,
            state_size(root, "version", path), RUN_STATE_VERSION);
    run->step = state_size(root, "step", path);
    run->next_batch = state_size(root, "next_batch", path);
    run->tokens = state_size(root, "tokens", path);
    run->seconds = state_number(root, "seconds", path);
    run->validated = json_get(root, "validated") ? state_size(root, "validated", path) : run->step;
    run->first = json_get(root, "first_validation") ? state_number(root, "first_validation", path) : NAN;
    const cJSON *best = json_get(root, "best");
    run->best_step = best ? state_size(best, "step", path) : 0;
    run->best = best ? state_number(best, "value", path) : 0;
    const cJSON *settings = state_get(root, "settings", path);
    for (i = 0; i < run->setting_count; i++) run_state_compare_setting(&run->settings[i], settings, checkpoint, path);
    cJSON_ArrayForEach(item, settings) {
        for (i = 0; i < run->setting_count && strcmp(run->settings[i].name, item->string) != 0; i++) continue;
        if (i == run->setting_count)
            die("%s: the run began with \"%.64s\", which the current options lack; resume with the options and the "
                "version that it began with",
                path, item->string);
    }
    run_state_compare_data(run, root, checkpoint);
    Schedule saved = state_schedule(root, path);
    run->schedule.version_1 = saved.version_1;
    run_state_compare_schedule(run, &saved, checkpoint);
    if (saved.version_1 && run->schedule.kind != SCHEDULE_CONSTANT)
        note(
            "%s: an earlier version began this run, which keeps its schedule: the decay ends at the last step, not one "
            "step after it",
            checkpoint);
    cJSON_Delete(root);
}

#endif
