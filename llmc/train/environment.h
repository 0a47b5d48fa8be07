/*
Environments: processes of the user that answer the turns of a trajectory. Each is started once as /bin/sh -c COMMAND,
as reward commands are (reward.h). It reads a line of JSON for each turn and answers with one:

    {"trajectory": "3-17", "turn": 2, "last": false, "ended": true, "prompt_number": 7, "row": {...}, "messages": [...]}
    {"messages": [{"role": "tool", "content": "..."}], "reward": 0.5, "done": false, "error": false}

`messages` is the whole conversation. A turn of the assistant has its parsed form and, as `raw`, its text. All turns of
a trajectory go to the same process. After a failure or --resume another process gets them. So an environment that keeps
state must be able to rebuild it from `messages`. `last`: no turn follows. The answer's messages have role tool or user;
data/render.py renders them. `reward` and `error`, a failed call, count for the turn.

Answers are recorded in --out (environment.jsonl) until a checkpoint is complete, so that a run that was killed repeats
them. A process that fails costs its trajectory, or ends the run (--reward-failure).
*/
#ifndef LLMC_ENVIRONMENT_H
#define LLMC_ENVIRONMENT_H
#include "llmc/files/hf_config_keep.h"
#include "rollout_rewards.h"

// ---- text that grows: conversations have any length, so it is not guarded ------------------------------------------
// Appends text[bytes], after a comma unless the text is empty.
static void members_append(char **members, const char *text, size_t bytes) {
    const size_t used = *members ? strlen(*members) : 0;
    char *grown = (char *)realloc(*members, used + bytes + 3);
    if (!grown) die("out of host memory for a conversation of %zu bytes; lower --seq-len", used + bytes);
    memcpy(grown + used, ", ", used ? 2 : 0);
    memcpy(grown + used + (used ? 2 : 0), text, bytes);
    grown[used + (used ? 2 : 0) + bytes] = 0;
    *members = grown;
}

// Returns a copy of the value of a key in a JSON object; NULL: it is absent. The caller frees it.
static char *json_copy(const char *text, const char *key) {
    size_t begin, end;
    char *copy = NULL;
    if (json_value_span(text, strlen(text), key, &begin, &end)) members_append(&copy, text + begin, end - begin);
    return copy;
}

// ---- lines ----------------------------------------------------------------------------------------------------------
static void json_word_list(JsonOut *json, const char *key, const char *members) {
    json_array(json, key);
    if (members) json_word(json, NULL, members);
    json_array_end(json);
}

static void json_drawn(JsonOut *json, const char *key, const int32_t *ids, size_t count) {
    json_array(json, key);
    for (size_t i = 0; i < count; i++) json_size(json, NULL, (size_t)ids[i]);
    json_array_end(json);
}

// Makes the line for which text i waits.
static LineOut environment_line(const Rollout *r, size_t i) {
    const Agents *a = &r->agents;
    const Trajectory *t = &a->text[i];
    const AgentTurn *turn = &t->turn[t->turns - 1];
    LineOut line = {0};
    char name[48];
    line_open(&line);
    JsonOut *json = &line.json;
    if (t->stage == WAITS_FOR_MESSAGE) {
        json_drawn(json, "said", t->ids + turn->begin, turn->tokens);
        json_bool(json, "ended", r->completion[i].ended);
        json_size(json, "turn", t->turns);
    } else if (t->stage == WAITS_FOR_ANSWER) {
        snprintf(name, sizeof(name), "%zu-%zu", a->step, r->settings.first * r->settings.group_size + i);
        json_text(json, "trajectory", name);
        json_size(json, "turn", t->turns);
        json_bool(json, "last", t->truncated || t->turns == r->settings.environment.max_turns);
        json_bool(json, "ended", r->completion[i].ended);
        json_size(json, "prompt_number", r->number[i / r->settings.group_size]);
        json_word(json, "row", t->row);
        json_word_list(json, "messages", t->messages);
    } else {
        json_drawn(json, "ids", t->ids, t->tokens);
        json_word(json, "row", t->row);
        json_word_list(json, "messages", t->messages);
        json_size(json, "most", r->settings.environment.tokens);
    }
    line_close(&line);
    return line;
}

// ---- recorded answers -----------------------------------------------------------------------------------------------
// Opens the record in --out. Keeps the answers of steps after `step`; an incomplete last line is dropped.
static void record_open(Agents *a, const char *folder, size_t replica, size_t step) {
    char path[PATH_MAX], name[48], number[24] = "";
    size_t length = 0, whole = 0;
    if (replica) snprintf(number, sizeof(number), "-%zu", replica);
    snprintf(name, sizeof(name), "environment%s.jsonl", number);
    path_join(path, folder, name);
    a->record = file_open(path, O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW);
    if (a->record < 0) die("%s: %s; choose another --out", path, file_fault());
    struct stat status;
    const int empty = fstat(a->record, &status) || !status.st_size;
    char *text = empty ? NULL : input_read_text(path, SIZE_MAX / 4, &length), *end;
    for (char *line = text; line && (end = strchr(line, '\n')); line = end + 1, whole = (size_t)(line - text)) {
        Recorded found = {0};
        unsigned long long request;
        *end = 0;
        if (sscanf(line, "{\"step\": %zu, \"trajectory\": %zu, \"turn\": %zu, \"request\": \"%llx\"", &found.step,
                   &found.text, &found.turn, &request) != 4 ||
            found.step <= step || !(found.answer = json_copy(line, "answer")))
            continue;
        found.request = request;
        a->recorded = (Recorded *)checked_realloc(a->recorded, (a->recorded_count + 1) * sizeof(found), "answers");
        a->recorded[a->recorded_count++] = found;
    }
    free(text);
    if (ftruncate(a->record, a->recorded_count ? (off_t)whole : 0))
        die("cannot shorten %s: %s; check its permissions, then type --resume again", path, error_text(errno));
}

// Forgets the answers: a checkpoint of their steps is complete.
static void record_forget(Agents *a) {
    if (a->record >= 0 && ftruncate(a->record, 0))
        die("cannot shorten environment.jsonl in --out: %s; check its permissions, then continue with --resume",
            error_text(errno));
}

// Returns the recorded answer to a line of text i, or NULL.
static char *record_find(const Agents *a, const Trajectory *t, size_t i, const LineOut *line) {
    const uint64_t request = checksum_of(0, line->text, line->bytes);
    for (size_t k = 0; k < a->recorded_count; k++) {
        const Recorded *x = &a->recorded[k];
        if (x->step == a->step && x->text == i && x->turn == t->turns && x->request == request) return x->answer;
    }
    return NULL;
}

// Records an answer, in one write, so that it is whole or the last line.
static void record_write(Agents *a, const Trajectory *t, size_t i, const LineOut *asked, const char *answer) {
    LineOut line = {0};
    char request[24];
    if (a->record < 0) return;
    line_open(&line);
    json_size(&line.json, "step", a->step);
    json_size(&line.json, "trajectory", i);
    json_size(&line.json, "turn", t->turns);
    snprintf(request, sizeof(request), "%016llx", (unsigned long long)checksum_of(0, asked->text, asked->bytes));
    json_text(&line.json, "request", request);
    json_word(&line.json, "answer", answer);
    line_close(&line);
    if (write(a->record, line.text, line.bytes) != (ssize_t)line.bytes)
        die("cannot write environment.jsonl in --out: %s; make room, then continue with --resume", error_text(errno));
    free(line.text);
}

// ---- answers --------------------------------------------------------------------------------------------------------
static void stage_set(Agents *a, Trajectory *t, TurnStage stage) { t->stage = stage, t->ticket = a->tickets++; }

// Checks the messages that an environment adds. Returns what is wrong, or NULL.
static const char *messages_fault(const cJSON *messages) {
    const cJSON *message;
    if (!messages) return NULL;
    if (!cJSON_IsArray(messages)) return "messages that are no list";
    cJSON_ArrayForEach(message, messages) {
        const cJSON *role = cJSON_GetObjectItemCaseSensitive(message, "role");
        if (!cJSON_IsObject(message) || !cJSON_IsString(cJSON_GetObjectItemCaseSensitive(message, "content")))
            return "a message without a text as content";
        if (!json_is(role, "tool") && !json_is(role, "user")) return "a message whose role is neither tool nor user";
    }
    return NULL;
}

// Takes an environment's answer, a line of JSON, as turn number t->turns. Returns what is wrong, or NULL.
static const char *answer_take(Rollout *r, Trajectory *t, const char *text) {
    Agents *a = &r->agents;
    cJSON *object = cJSON_ParseWithOpts(text, NULL, 1);
    const cJSON *messages = json_get(object, "messages"), *reward = json_get(object, "reward");
    const cJSON *done = json_get(object, "done"), *error = json_get(object, "error");
    const size_t added = (size_t)cJSON_GetArraySize(messages);
    const char *fault = !cJSON_IsObject(object) ? "no JSON object" : messages_fault(messages);
    if (!fault && reward && !(cJSON_IsNumber(reward) && fabs(reward->valuedouble) <= 3e38))
        fault = "a reward that is no finite number";
    if (!fault && ((done && !cJSON_IsBool(done)) || (error && !cJSON_IsBool(error))))
        fault = "done or error that is neither true nor false";
    const int ends = cJSON_IsTrue(done) || t->truncated || t->turns == r->settings.environment.max_turns;
    if (!fault && !ends && !added) fault = "neither messages nor \"done\": true";
    if (!fault) {
        t->turn[t->turns - 1].reward = reward ? (float)reward->valuedouble : NAN;
        t->errors += cJSON_IsTrue(error) != 0;
        if (!cJSON_IsTrue(done) && ends) t->truncated = 1;
        if (added) {
            char *members = json_copy(text, "messages");
            members[strlen(members) - 1] = 0; // without the array's brackets
            members_append(&t->messages, members + 1, strlen(members + 1));
            free(members);
        }
        stage_set(a, t, ends ? TURN_DONE : WAITS_FOR_RENDERING);
    }
    cJSON_Delete(object);
    return fault;
}

// Continues text i with new ids after the first `kept` of its path. Ends it if --seq-len leaves no room for a turn.
static void trajectory_continue(Rollout *r, size_t i, size_t kept, const cJSON *ids) {
    const RolloutSettings *s = &r->settings;
    Trajectory *t = &r->agents.text[i];
    Completion *text = &r->completion[i];
    const size_t most = s->environment.tokens + 1, added = (size_t)cJSON_GetArraySize(ids);
    const int forks = kept < t->tokens;
    const int again = forks && (kept <= PREFIX_LEAST || !s->shares); // the old path computes its beginning again
    const size_t all = t->all + added + (again ? kept : 0);
    const cJSON *id;
    if (all >= most || !(kept + added)) {
        t->truncated = 1;
        stage_set(&r->agents, t, TURN_DONE);
        return;
    }
    if (forks) {
        const OldPath old = {kept, t->old_tokens, t->tokens - kept};
        const size_t k = r->text_routes / s->environment.tokens; // routes of a token
        memcpy(t->old + old.begin, t->ids + kept, old.tokens * sizeof(int32_t));
        if (r->route) // the last token ran through no layer
            memcpy(t->old_route + old.begin * k, text->route + kept * k, (old.tokens - 1) * k * sizeof(uint16_t));
        t->old_tokens += old.tokens, t->path[t->paths++] = old;
        text->seed = random_bits(text->seed, RANDOM_STREAM_FORKS, t->paths);
    }
    t->tokens = kept, t->all = all;
    cJSON_ArrayForEach(id, ids) t->ids[t->tokens++] = (int32_t)id->valueint;
    text->prompt = t->ids, text->prompt_tokens = t->tokens, text->ids = t->ids + t->tokens;
    text->room = min_size(s->max_new_tokens, most - all);
    text->again = 1, text->kept = min_size(text->kept, kept);
    stage_set(&r->agents, t, TURN_READY);
}

// Takes the renderer's answer for text i. Returns what is wrong, or NULL; uses text[] for it.
static const char *rendering_take(Rollout *r, size_t i, const char *text) {
    static char fault[320];
    Trajectory *t = &r->agents.text[i];
    cJSON *object = cJSON_ParseWithOpts(text, NULL, 1);
    const cJSON *error = json_get(object, "error"), *ids = json_get(object, "ids"), *id;
    uint64_t kept = 0, number;
    char *message = t->stage == WAITS_FOR_MESSAGE && cJSON_IsObject(json_get(object, "message"))
                        ? json_copy(text, "message")
                        : NULL;
    int good =
        message || (cJSON_IsArray(ids) && json_whole_number(json_get(object, "keep"), &kept) && kept <= t->tokens);
    snprintf(fault, sizeof(fault), "%.300s", cJSON_IsString(error) ? error->valuestring : "no rendering");
    cJSON_ArrayForEach(id, ids) {
        if (json_whole_number(id, &number) && number < r->vocabulary) continue;
        snprintf(fault, sizeof(fault), "an id that is not below the model's %zu", r->vocabulary);
        good = 0;
    }
    if (message) {
        members_append(&t->messages, message, strlen(message));
        free(message);
        stage_set(&r->agents, t, WAITS_FOR_ANSWER);
    } else if (good) {
        trajectory_continue(r, i, kept, ids);
    }
    cJSON_Delete(object);
    return good ? NULL : fault;
}

// Takes a process's answer (Reward.take).
static int exchange_take(Reward *p, char *text, size_t bytes, void *to) {
    Rollout *r = (Rollout *)((Exchange *)to)->rollout;
    const size_t i = ((Exchange *)to)->text;
    Trajectory *t = &r->agents.text[i];
    const TurnStage stage = t->stage;
    text[bytes] = 0;
    const int is_text = strlen(text) == bytes && json_valid_until((const unsigned char *)text, bytes) == bytes &&
                        json_escapes_valid_until(text, bytes) == bytes;
    const char *fault = !is_text                    ? "no JSON"
                        : stage == WAITS_FOR_ANSWER ? answer_take(r, t, text)
                                                    : rendering_take(r, i, text);
    if (fault && stage == WAITS_FOR_ANSWER)
        return reward_fail(p, "answered '%s' to turn %zu: %s", reward_quote(text, bytes), t->turns, fault);
    if (fault) return reward_fail(p, "failed on turn %zu: %s", t->turns, fault);
    if (stage == WAITS_FOR_ANSWER) {
        const LineOut asked = {NULL, p->out, p->out_end, {0}};
        record_write(&r->agents, t, i, &asked, text);
    }
    p->answered++;
    return 1;
}

// ---- processes ------------------------------------------------------------------------------------------------------
static void environment_open(Rollout *r) {
    const EnvironmentSettings *e = &r->settings.environment;
    Reward of = {0};
    of.take = exchange_take, of.option = "--reward-timeout";
    for (size_t k = 0; k <= e->workers; k++) {
        const int renders = k == e->workers;
        of.who = renders ? "the renderer" : "the environment";
        of.answer_room = renders ? RENDER_ANSWER + 12 * e->tokens : ENVIRONMENT_ANSWER;
        reward_open_as(&r->agents.exchange[k].process, of, renders ? e->render : e->command, NULL, e->timeout, 0);
        r->agents.exchange[k].text = SIZE_MAX, r->agents.exchange[k].rollout = r;
    }
}

static void environment_close(Rollout *r) {
    for (size_t k = 0; k <= r->settings.environment.workers; k++) reward_close(&r->agents.exchange[k].process);
}

// Gives process k the text that has waited for it longest; a recorded answer is taken at once.
static void exchange_next(Rollout *r, size_t k) {
    Agents *a = &r->agents;
    const size_t workers = r->settings.environment.workers;
    Exchange *x = &a->exchange[k];
    for (;;) {
        x->text = SIZE_MAX;
        for (size_t i = 0; i < a->texts; i++) {
            const TurnStage stage = a->text[i].stage;
            const int waits = k == workers ? stage == WAITS_FOR_MESSAGE || stage == WAITS_FOR_RENDERING
                                           : stage == WAITS_FOR_ANSWER && i % workers == k;
            if (waits && (x->text == SIZE_MAX || a->text[i].ticket < a->text[x->text].ticket)) x->text = i;
        }
        if (x->text == SIZE_MAX) return;
        LineOut line = environment_line(r, x->text);
        const char *known = k < workers ? record_find(a, &a->text[x->text], x->text, &line) : NULL;
        if (!known || answer_take(r, &a->text[x->text], known)) {
            exchange_begin(&x->process, line.text, line.bytes);
            return;
        }
        free(line.text);
    }
}

// Ends the exchange of a process: the answer was taken, or the process failed, which costs its trajectory.
static void exchange_end(Rollout *r, Exchange *x) {
    Trajectory *t = &r->agents.text[x->text];
    x->text = SIZE_MAX;
    if (!x->process.failed) return;
    if (r->settings.stop)
        die("step %zu: %s; --reward-failure skip leaves its group out", r->agents.step, x->process.message);
    memcpy(r->agents.failed.message, x->process.message, sizeof(x->process.message));
    r->agents.has_failed = t->failed = 1;
    stage_set(&r->agents, t, TURN_DONE);
    reward_restart(&x->process);
}

// Reads and writes as long as something is ready; begins what can begin. waits: first until something is ready, at most
// REWARD_LOOK
static void environment_serve(Rollout *r, int waits) {
    const size_t count = r->settings.environment.workers + 1;
    struct pollfd ends[2 * (ENVIRONMENT_WORKERS + 1)];
    for (int again = 1; again; waits = 0) {
        int busy = 0;
        for (size_t k = 0; k < count; k++) {
            Exchange *x = &r->agents.exchange[k];
            if (x->text == SIZE_MAX) exchange_next(r, k);
            reward_ends(&x->process, ends + 2 * k);
            if (x->text == SIZE_MAX) ends[2 * k].fd = ends[2 * k + 1].fd = -1;
            busy |= x->text != SIZE_MAX; // recorded answers may have left nothing to wait for
        }
        reward_wait(ends, 2 * count, waits && busy ? REWARD_LOOK : 0);
        again = 0;
        for (size_t k = 0; k < count; k++) {
            Exchange *x = &r->agents.exchange[k];
            if (x->text == SIZE_MAX) continue;
            again |= ends[2 * k].revents || ends[2 * k + 1].revents;
            if (exchange_ends(&x->process, ends + 2 * k, x)) exchange_end(r, x);
        }
    }
}

#endif
