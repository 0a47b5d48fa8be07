/*
Trajectories: rollouts whose texts are written in turns by the model and its environment (environment.h). The sampler
writes the turns of many texts (SamplerTurns): a text whose turn has ended gives its slot away until the environment
has answered and the answer is rendered.

    trajectories_write    writes the trajectories of a step
    trajectories_rewards  takes their rewards from the environment's answers
    trajectories_add      appends trajectories to a sequence; rollout_pack has divided them

Which texts are written together must not depend on the environment's speed, because products of other texts round
differently. So a text goes on at a step that is known beforehand: when a slot is free TURN_STEPS steps after its turn
ended or later, or when no text is written. The sampler waits for it there.

A trajectory with old paths is several documents, newest path first, which count as one (Batch.trajectory). A drawn
token is trained once, in the path in which it was drawn. What the environment said is never trained.
*/
#ifndef LLMC_TRAJECTORY_H
#define LLMC_TRAJECTORY_H
#include "environment.h"

// ---- turns ----------------------------------------------------------------------------------------------------------
// Begins the trajectory of text i with the prompt that rollout_prompts has read.
static void trajectory_begin(Rollout *r, size_t i) {
    Trajectory *t = &r->agents.text[i];
    Completion *text = &r->completion[i];
    const size_t p = i / r->settings.group_size, most = r->settings.environment.tokens + 1;
    size_t begin, end;
    free(t->row), free(t->messages);
    t->row = t->messages = NULL;
    if (r->columns_of != r->number[p])
        r->columns_bytes = prompts_columns(r->data, r->number[p], r->columns), r->columns_of = r->number[p];
    members_append(&t->row, r->columns_bytes ? r->columns : "{}", r->columns_bytes ? r->columns_bytes : 2);
    if (json_value_span(t->row, strlen(t->row), "messages", &begin, &end)) {
        members_append(&t->messages, t->row + begin + 1, end - begin - 2);
    } else { // a prompt of plain text
        LineOut line = {0};
        char *bytes = (char *)malloc(text->prompt_tokens * prompt_token_bytes(&r->decoder) + 8);
        if (!bytes) die("out of host memory for a prompt; free some memory");
        line_open(&line);
        json_text(&line.json, "role", "user");
        json_bytes(&line.json, "content", bytes, prompt_text(&r->decoder, text->prompt, text->prompt_tokens, bytes));
        line_close(&line);
        members_append(&t->messages, line.text, line.bytes - 1);
        free(line.text), free(bytes);
    }
    memcpy(t->ids, text->prompt, text->prompt_tokens * sizeof(int32_t));
    t->tokens = t->all = text->prompt_tokens, t->old_tokens = t->turns = t->paths = t->errors = 0;
    t->truncated = t->failed = 0, t->waited = 0, t->stage = TURN_READY;
    text->ids = t->ids + t->tokens, text->room = min_size(r->settings.max_new_tokens, most - t->all);
    text->again = 0, text->kept = 0;
}

// Takes the end of a turn of text i (SamplerTurns).
static void trajectory_turn(void *rollout, size_t i, size_t step) {
    Rollout *r = (Rollout *)rollout;
    Agents *a = &r->agents;
    Trajectory *t = &a->text[i];
    const Completion *text = &r->completion[i];
    const AgentTurn turn = {t->paths, t->tokens, text->tokens, NAN, 0};
    t->turn[t->turns++] = turn;
    t->tokens += text->tokens, t->all += text->tokens;
    t->truncated = !text->ended;
    t->ended_at = step, t->since = seconds_now();
    a->queue[a->queued++] = i;
    stage_set(a, t, WAITS_FOR_MESSAGE);
}

// Moves the texts whose turn ended at or before a step from the queue to the texts that may go on. Waits for them.
static void trajectories_admit(Rollout *r, size_t step) {
    Agents *a = &r->agents;
    size_t left = 0;
    for (size_t k = 0; k < a->queued; k++) {
        const size_t i = a->queue[k];
        Trajectory *t = &a->text[i];
        if (t->ended_at > step) {
            a->queue[left++] = i;
            continue;
        }
        for (const double begin = seconds_now(); t->stage < TURN_READY; a->waited += seconds_now() - begin) {
            environment_serve(r, 1);
            stop_poll(0);
        }
        t->waited += seconds_now() - t->since;
        if (t->stage == TURN_READY) a->ready[a->ready_count++] = i;
        if (t->stage == TURN_DONE) r->completion[i].kept = 0; // nobody wants its slot's keys and values
    }
    a->queued = left;
}

// Serves the environment between two steps (SamplerTurns).
static void trajectories_step(void *rollout) { environment_serve((Rollout *)rollout, 0); }

// Returns the text to write next (SamplerTurns).
static size_t trajectory_next(void *rollout, size_t step, int idle) {
    Rollout *r = (Rollout *)rollout;
    Agents *a = &r->agents;
    size_t next;
    if (step >= TURN_STEPS) trajectories_admit(r, step - TURN_STEPS);
    if (!a->ready_count && a->begun < a->texts) return a->begun++;
    if (!a->ready_count && idle) trajectories_admit(r, SIZE_MAX);
    if (!a->ready_count) return SIZE_MAX;
    next = a->ready[0];
    memmove(a->ready, a->ready + 1, --a->ready_count * sizeof(size_t));
    return next;
}

// Writes the trajectories of a step.
static void trajectories_write(Rollout *r, StreamBP *streambp, size_t step) {
    const RolloutSettings *s = &r->settings;
    const SamplerTurns turns = {r, trajectory_turn, trajectories_step, trajectory_next};
    Agents *a = &r->agents;
    a->step = step, a->queued = a->ready_count = a->begun = a->tickets = 0;
    a->has_failed = 0, a->waited = 0;
    for (size_t i = 0; i < a->texts; i++) trajectory_begin(r, i);
    r->sampler.turns = &turns;
    sampler_batch(&r->sampler, streambp, r->completion, a->texts, &s->sampling, s->end_ids, s->end_count);
    r->sampler.turns = NULL;
    for (size_t i = 0; i < a->texts; i++) { // the text as a whole, for --show
        Completion *text = &r->completion[i];
        const Trajectory *t = &a->text[i];
        text->prompt = t->ids, text->prompt_tokens = min_size(r->prompt_tokens[i / s->group_size], t->tokens - 1);
        text->ids = t->ids + text->prompt_tokens, text->tokens = t->tokens - text->prompt_tokens;
        text->ended = !t->truncated;
    }
}

// ---- rewards --------------------------------------------------------------------------------------------------------
static double turn_reward(const AgentTurn *turn) { return isnan(turn->reward) ? 0 : (double)turn->reward; }

// Sets the rewards: the sum over a trajectory's turns; none if the environment failed or gave none. Collective.
static void trajectories_rewards(Rollout *r, size_t step) {
    const RolloutSettings *s = &r->settings;
    Agents *a = &r->agents;
    size_t left_out = 0, given = 0;
    for (size_t i = 0; i < a->texts; i++) {
        const Trajectory *t = &a->text[i];
        double sum = 0;
        int known = 0;
        for (size_t k = 0; k < t->turns; k++) sum += turn_reward(&t->turn[k]), known |= !isnan(t->turn[k].reward);
        r->reward[i] = known && !t->failed ? (float)sum : NAN;
        r->answered[i] = 1, given += known && !t->failed;
    }
    for (size_t p = 0; p < s->prompts; p++) left_out += !rollout_group_rewarded(r, p);
    rollout_count_failures(r, step, a->has_failed ? &a->failed : NULL, left_out, given);
}

// Sets the advantages of group p's turns. own: a turn's reward among those of all turns of the group (arXiv 2402.03300,
// 4.1.3, without sums over later turns); else the trajectory's advantage.
static void trajectories_advantages(Rollout *r, size_t p) {
    const size_t G = r->settings.group_size;
    const int own = r->settings.environment.own;
    double count = 0, mean = 0, squares = 0;
    for (size_t i = p * G; i < (p + 1) * G && own; i++)
        for (size_t k = 0; k < r->agents.text[i].turns; k++) count++, mean += turn_reward(&r->agents.text[i].turn[k]);
    mean /= fmax(count, 1);
    for (size_t i = p * G; i < (p + 1) * G && own; i++)
        for (size_t k = 0; k < r->agents.text[i].turns; k++)
            squares += pow(turn_reward(&r->agents.text[i].turn[k]) - mean, 2);
    const double scale = r->settings.scale_rewards ? 1 / (sqrt(squares / fmax(count - 1, 1)) + 1e-4) : 1;
    for (size_t i = p * G; i < (p + 1) * G; i++)
        for (size_t k = 0; k < r->agents.text[i].turns; k++) {
            AgentTurn *turn = &r->agents.text[i].turn[k];
            turn->advantage = own ? (turn_reward(turn) - mean) * scale : r->advantage[i];
        }
}

// Adds the metrics of a trajectory.
static void trajectory_metrics(Metrics *metrics, const Trajectory *t) {
    metric_add(metrics, "environment/turns", (double)t->turns, 1);
    metric_add(metrics, "environment/errors", (double)t->errors, (double)t->turns);
    metric_add(metrics, "environment/forks", (double)t->paths, 1);
    metric_add(metrics, "environment/seconds", t->waited, 1);
    metric_add(metrics, "environment/truncated", t->truncated, 1);
}

// ---- sequences ------------------------------------------------------------------------------------------------------
// Returns the rows of a trajectory, and at least as much as its share of a sequence's forks.
static size_t trajectory_rows(const RolloutSettings *s, const Trajectory *t) {
    const size_t S = s->environment.tokens, T = s->environment.max_turns;
    return max_size(t->all - 1, (t->paths * S + T - 1) / T);
}

// Appends path p of a trajectory to a sequence, after path p + 1. masked: the tokens have no weight
static void trajectory_add_path(const Rollout *r, Batch *b, size_t p, size_t text, int masked) {
    const Trajectory *t = &r->agents.text[text];
    const OldPath *old = p < t->paths ? &t->path[p] : NULL;
    const BatchRoutes *routes = &b->routes;
    const size_t tokens = old ? old->kept + old->tokens : t->tokens, start = b->N, each = routes->layers * routes->k;
    const size_t next = b->documents ? b->document_start[b->documents - 1] : 0, own = old ? old->kept : 0;
    const int32_t *ids = old ? t->old + old->begin : t->ids; // from position `own` on
    const uint16_t *route = old ? t->old_route + old->begin * each : r->completion[text].route;
    for (size_t i = 0; i + 1 < tokens; i++, b->N++) {
        b->tokens[b->N] = i < own ? b->tokens[next + i] : ids[i - own];
        b->targets[b->N] = -1, b->loss_weight[b->N] = 1, b->position[b->N] = (int32_t)i, b->advantage[b->N] = 0;
        for (size_t l = 0; l < routes->layers; l++)
            memcpy(batch_route(b, l, b->N),
                   i < own ? batch_route(b, l, next + i) : route + (i - own) * each + l * routes->k,
                   routes->k * sizeof(uint16_t));
    }
    for (size_t k = 0; k < t->turns; k++) {
        const AgentTurn *turn = &t->turn[k];
        for (size_t i = turn->begin; turn->path == p && i < turn->begin + turn->tokens; i++) {
            const size_t at = start + i - 1;
            b->targets[at] = i < own ? b->tokens[next + i] : ids[i - own];
            b->loss_weight[at] = masked ? 0 : 1;
            b->advantage[at] = (float)turn->advantage;
        }
    }
    b->trajectory[b->documents] = text, b->reward[b->documents] = r->reward[text];
    b->document_start[++b->documents] = b->N;
}

// Builds the tree of a sequence: paths of a trajectory share their beginning, trajectories of a group their prompt.
static Tree *trajectories_tree(const Rollout *r, const Batch *b, char **memory) {
    const size_t G = r->settings.group_size;
    size_t rows = 0;
    for (size_t d = 0; d < b->documents; d++)
        if (!d || b->trajectory[d] != b->trajectory[d - 1]) rows += r->agents.text[b->trajectory[d]].all - 1;
    Tree *tree = tree_place(*memory, rows, b->documents);
    for (size_t d = 0; d < b->documents; d++) {
        const size_t text = b->trajectory[d], before = d ? b->trajectory[d - 1] : SIZE_MAX;
        const size_t prompt = r->prompt_tokens[text / G] - 1;
        size_t common = 0;
        if (before == text)
            common = batch_common(b, d - 1, d, SIZE_MAX);
        else if (d && before / G == text / G && batch_common(b, d - 1, d, prompt) == prompt)
            common = prompt;
        tree->order[d] = d, tree->common[d] = common >= PREFIX_LEAST ? common : 0;
    }
    *memory += tree_bytes(rows, b->documents);
    return tree_build(tree, b, tree->order, tree->common);
}

// Appends the trajectories of a sequence.
static void trajectories_add(const Rollout *r, Batch *b, size_t sequence) {
    for (size_t i = 0; i < r->agents.texts; i++) {
        const Trajectory *t = &r->agents.text[i];
        for (size_t p = t->paths + 1; p-- > 0 && r->agents.sequence[i] == sequence;)
            trajectory_add_path(r, b, p, i, r->settings.mask_truncated && t->truncated);
    }
}

// ---- the log --------------------------------------------------------------------------------------------------------
// Writes the members of a trajectory's line: the conversation and its paths, oldest first. The last path has all its
// ids. An earlier path begins with the first `kept` ids of the next one; its ids follow them. `trained`: ranges
// [begin, end) of a path that were drawn.
static void trajectory_json(const Rollout *r, size_t i, JsonOut *json) {
    const Trajectory *t = &r->agents.text[i];
    json_size(json, "turns", t->turns);
    json_size(json, "tool_errors", t->errors);
    json_bool(json, "truncated", t->truncated);
    json_number(json, "seconds_waited", t->waited);
    json_size(json, "prompt_number", r->number[i / r->settings.group_size]);
    json_word_list(json, "messages", t->messages);
    json_array(json, "paths");
    for (size_t p = 0; p <= t->paths; p++) {
        json_object(json, NULL);
        if (p < t->paths) json_size(json, "kept", t->path[p].kept);
        json_drawn(json, "ids", p < t->paths ? t->old + t->path[p].begin : t->ids,
                   p < t->paths ? t->path[p].tokens : t->tokens);
        json_array(json, "trained");
        for (size_t k = 0; k < t->turns; k++) {
            const AgentTurn *turn = &t->turn[k];
            if (turn->path != p) continue;
            json_array(json, NULL);
            json_size(json, NULL, turn->begin), json_size(json, NULL, turn->begin + turn->tokens);
            json_array_end(json);
        }
        json_array_end(json);
        json_array(json, "rewards");
        for (size_t k = 0; k < t->turns; k++)
            if (t->turn[k].path == p) json_number(json, NULL, (double)t->turn[k].reward);
        json_array_end(json);
        json_object_end(json);
    }
    json_array_end(json);
}

#endif
