/*
Gets the rewards of a step's completions (rollout.h): makes lines for commands, reads their answers, and sums rewards.

A command gets a line of valid JSON for each completion:

    {"prompt": "...", "completion": "...", "reference": "..." or null, "answer": the same, "completion_ids": [...],
     "prompt_number": 7, "ended": true, "difficulty": 3, "tests": ["..."]}

The other columns of the prompt's row, kept by data/prepare.py, follow `ended`; so do `messages` of a conversation.
Special tokens are left out. `reference` is the answer that follows the prompt in the data; `answer` repeats it unless
another column has that name. `prompt_number` is the prompt's number in the data, `ended` whether the model ended the
completion. If tokens have no text, prompt_ids, completion_ids and reference_ids replace the texts.
*/
#ifndef LLMC_ROLLOUT_REWARDS_H
#define LLMC_ROLLOUT_REWARDS_H
#include "llmc/base/json.h"
#include "rollout_state.h"

// ---- lines for reward commands: made a piece at a time, so of any length --------------------------------------------
// Tells whether `answer` is a key of the JSON object text[bytes].
static int columns_have_answer(const char *text, size_t bytes) {
    static const char key[] = "\"answer\"";
    for (size_t i = 0, depth = 0, begin = 0, length = 0; i < bytes; i++) { // begin, length: range of the last string
        if (text[i] == '"') {
            for (begin = i++; i < bytes && text[i] != '"'; i++) i += text[i] == '\\';
            length = i + 1 - begin;
        }
        if (text[i] == '{' || text[i] == '[') depth++;
        if (text[i] == '}' || text[i] == ']') depth--;
        if (depth == 1 && text[i] == ':' && length == sizeof(key) - 1 && !memcmp(text + begin, key, length)) return 1;
    }
    return 0;
}

// Writes the last pieces of a line: the members of the columns' object, then the line's end.
static size_t rollout_columns_piece(const Rollout *r, RolloutLine *line, char *out) {
    const size_t end = r->columns_bytes ? r->columns_bytes - 1 : 1; // members are bytes [1, end)
    const size_t bytes = min_size(end - line->column, r->piece - 2), before = bytes && line->column == 1 ? 2 : 0;
    memcpy(out, ", ", before);
    memcpy(out + before, r->columns + line->column, bytes);
    line->column += bytes;
    if (bytes) return before + bytes;
    line->completion++, line->field = 0, line->begun = 0;
    memcpy(out, "}\n", 2);
    return 2;
}

// Writes the next piece of a line, at most r->piece bytes: the beginning of a field, a token of the field, the field's
// end, or the line's end.
static size_t rollout_piece(Rollout *r, RolloutLine *line, char *out) {
    enum { PROMPT, COMPLETION, REFERENCE, ANSWER, COMPLETION_IDS };
    static const char *const names[2][5] = {
        {"{\"prompt\": ", ", \"completion\": ", ", \"reference\": ", ", \"answer\": ", ", \"completion_ids\": "},
        {"{\"prompt_ids\": ", ", \"completion_ids\": ", ", \"reference_ids\": ", "", ""}};
    const Completion *text = &r->completion[line->completion];
    const size_t p = line->completion / r->settings.group_size;
    const int with_text = r->decoder.tokenizer || r->decoder.bytes;
    if (line->field >= ANSWER && r->columns_of != r->number[p]) {
        r->columns_bytes = prompts_columns(r->data, r->number[p], r->columns), r->columns_of = r->number[p];
        r->columns_answer = columns_have_answer(r->columns, r->columns_bytes);
    }
    if (with_text && line->field == ANSWER && r->columns_answer) line->field++;
    const int as_ids = !with_text || line->field == COMPLETION_IDS;
    const size_t fields = with_text ? 5 : 3;
    if (line->field > fields) return rollout_columns_piece(r, line, out);
    if (line->field == fields) {
        line->field++, line->column = 1;
        return (size_t)snprintf(out, ROLLOUT_AROUND, ", \"prompt_number\": %zu, \"ended\": %s", r->number[p],
                                text->ended ? "true" : "false");
    }

    // 1. The field's tokens; without a reference answer it is null.
    const int32_t *ids = text->ids;
    size_t count = text->tokens;
    if (line->field == PROMPT) ids = text->prompt, count = text->prompt_tokens;
    if (line->field == REFERENCE || line->field == ANSWER) {
        count = r->tokens[p] - text->prompt_tokens;
        ids = count ? text->prompt + text->prompt_tokens : NULL;
    }
    if (!line->begun) {
        line->begun = 1, line->token = 0;
        line->text = text_out_to(NULL, line->scratch);
        line->text.bytes = line->field != PROMPT; // only the beginning of a text may lose its first space
        const char *open = !ids ? "null" : as_ids ? "[" : "\"";
        return (size_t)snprintf(out, ROLLOUT_AROUND, "%s%s", names[!with_text][line->field], open);
    }

    // 2. A token as its id.
    const size_t token = line->token++;
    if (token < count && as_ids) return (size_t)snprintf(out, ROLLOUT_AROUND, "%s%d", token ? ", " : "", ids[token]);

    // 3. A token as text, or at the field's end the remaining text. The scratch holds one token; its byte 0 marks that
    // text precedes.
    size_t begin = line->text.bytes, bytes = 0, taken;
    if (token < count)
        prompt_token_out(&r->decoder, &line->text, ids[token], token);
    else
        text_out_end(&line->text);
    for (; begin < line->text.bytes; begin += taken)
        bytes += json_escape(line->text.memory + begin, line->text.bytes - begin, out + bytes, &taken);
    line->text.bytes = line->text.bytes > 0;
    if (token < count) return bytes;
    if (ids) out[bytes++] = as_ids ? ']' : '"';
    line->field++, line->begun = 0;
    return bytes;
}

// Writes lines for a command (RewardLines of reward.h).
static size_t rollout_lines(void *context, size_t command, char *out, size_t room) {
    Rollout *r = (Rollout *)context;
    RolloutLine *line = &r->line[command];
    size_t bytes = 0;
    while (line->completion < r->settings.prompts * r->settings.group_size && bytes + r->piece <= room)
        bytes += rollout_piece(r, line, out + bytes);
    return bytes;
}

static void rollout_line_begin(RolloutLine *line, size_t completion) {
    char *scratch = line->scratch;
    memset(line, 0, sizeof(*line));
    line->scratch = scratch, line->completion = completion;
}

// ---- rewards --------------------------------------------------------------------------------------------------------
// Reports, on rank 0, failed commands and missing rewards, and that commands are restarted. Ends a run in which each
// group lacks a reward. left_out: groups of this replica; given: completions with a reward. Collective
static void rollout_count_failures(Rollout *r, size_t step, const Reward *failed, size_t left_out, size_t given) {
    const size_t prompts = r->settings.step_prompts, asks = rollout_asks(&r->settings) ? 1 : 0;
    double sums[3] = {failed ? 1.0 : 0.0, (double)(asks * left_out), (double)(asks * given)};
    char message[sizeof(failed->message)] = "", whose[256] = "", others[64] = "";
    size_t first;
    dist_sum(RANKS_ALL, sums, 3);
    const int rewarded = sums[1] < (double)prompts;
    r->failures = rewarded ? 0 : r->failures + 1;
    if (sums[0] == 0 && sums[1] == 0) return;
    if (failed) memcpy(message, failed->message, sizeof(message));
    dist_smallest(failed ? 0 : 1, &first);
    dist_broadcast(RANKS_ALL, message, sizeof(message), first);
    if (!*message)
        snprintf(message, sizeof(message), "%s",
                 r->settings.environment.command ? "the environment gave no reward" : "reward commands answered null");
    if (dist_ranks() > 1 && sums[0] > 0) snprintf(whose, sizeof(whose), "rank %zu on %s: ", first, dist_host(first));
    if (!rewarded && step == 1 && sums[2] == 0)
        die("step %zu: %s%s; no completion got a reward in the first step; try the command by hand on a line of JSON",
            step, whose, message);
    if (!rewarded && step == 1)
        die("step %zu: %s%s; %.0f of %zu completions got a reward in the first step, but no group got one for all of "
            "its %zu; answer each line with a number",
            step, whose, message, sums[2], prompts * r->settings.group_size, r->settings.group_size);
    if (r->failures == ROLLOUT_FAILURES)
        die("step %zu: %s%s; no group got a reward for each completion in %d steps; try the command by hand on a line "
            "of JSON",
            step, whose, message, ROLLOUT_FAILURES);
    if (sums[0] > 1) snprintf(others, sizeof(others), ", as on %.0f more", sums[0] - 1);
    note("step %zu: %s%s%s;%s %.0f of %zu groups are left out", step, whose, message, others,
         sums[0] > 0 ? " it is restarted;" : "", sums[1], prompts);
}

static int rollout_group_rewarded(const Rollout *r, size_t p) {
    const size_t G = r->settings.group_size;
    for (size_t i = p * G; i < (p + 1) * G && rollout_has_rewards(&r->settings); i++)
        if (!r->answered[i] || isnan(r->reward[i])) return 0;
    return 1;
}

// Asks each reward command for the rewards of all completions. polls: 1 on the main thread
static void rollout_ask(Rollout *r, int polls) {
    const size_t texts = r->settings.prompts * r->settings.group_size;
    float *of[REWARD_COMMANDS];
    for (size_t k = 0; k < r->settings.rewards; k++)
        rollout_line_begin(&r->line[k], 0), of[k] = r->rewards_of + k * texts;
    rewards_ask(r->command, r->settings.rewards, rollout_lines, r, texts, of, polls);
}

static void *rollout_asking(void *rollout) {
    rollout_ask((Rollout *)rollout, 0);
    return NULL;
}

// Asks on another thread. If no thread can be started, the rewards are asked for when they are needed.
static void rollout_ask_ahead(Rollout *r) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // only the main thread handles signals
    r->asks = pthread_create(&r->asking, NULL, rollout_asking, r) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Waits for the answers, or asks now. Sets each command's rewards, and `answered` for completions that all commands
// answered, failed commands aside. Returns a failed command, or NULL.
static const Reward *rollout_answers(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    const size_t texts = s->prompts * s->group_size;
    const Reward *failed = NULL;
    for (struct timespec until; r->asks; stop_poll(0)) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        if (pthread_timedjoin_np(r->asking, NULL, &until) != ETIMEDOUT) break;
    }
    if (!r->asks) rollout_ask(r, 1);
    r->asks = 0;
    memset(r->answered, 1, texts);
    for (size_t k = s->rewards; k-- > 0;) {
        if (!r->command[k].failed) continue;
        failed = &r->command[k];
        for (size_t i = failed->answered; i < texts; i++) r->answered[i] = 0, r->rewards_of[k * texts + i] = NAN;
    }
    return failed;
}

// Gets the rewards, from the commands or from the rank that asks them. Computes the weighted sums; NAN without
// commands.
static void rollout_rewards(Rollout *r, size_t step) {
    const RolloutSettings *s = &r->settings;
    const size_t texts = s->prompts * s->group_size;
    const Reward *failed = s->rewards && rollout_asks(s) ? rollout_answers(r) : NULL;
    size_t left_out = 0, completions = 0;
    if (failed && s->stop) die("step %zu: %s; --reward-failure skip leaves these groups out", step, failed->message);
    if (world_sp(s->world) > 1) {
        dist_broadcast(RANKS_SEQUENCE, r->rewards_of, s->rewards * texts * sizeof(float), 0);
        dist_broadcast(RANKS_SEQUENCE, r->answered, texts, 0);
    }
    for (size_t i = 0; i < texts; i++) {
        double sum = 0;
        size_t given = 0;
        for (size_t k = 0; k < s->rewards; k++) {
            const double reward = (double)r->rewards_of[k * texts + i];
            if (!isnan(reward)) sum += s->reward_weight[k] * reward, given++;
        }
        r->reward[i] = given ? (float)sum : NAN;
        completions += r->answered[i] && given;
    }
    for (size_t p = 0; p < s->prompts; p++) left_out += !rollout_group_rewarded(r, p);
    rollout_count_failures(r, step, failed, left_out, completions);
    for (size_t k = 0; failed && k < s->rewards; k++)
        if (r->command[k].failed) reward_restart(&r->command[k]);
}

#endif
