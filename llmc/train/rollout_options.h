/*
Makes the settings of rollouts from the command line, and sizes for their plan.
*/
#ifndef LLMC_ROLLOUT_OPTIONS_H
#define LLMC_ROLLOUT_OPTIONS_H
#include "rollout_state.h"

// Divides the step's prompts over the replicas; shares differ by at most one.
static void rollout_assignment(RolloutSettings *s, World w, size_t prompts) {
    const size_t D = world_replicas(w), d = world_replica(w);
    if (prompts < D)
        die_usage("--batch %zu prompts are fewer than the %zu replicas; give --batch %zu or more", prompts, D, D);
    s->world = w;
    s->step_prompts = prompts, s->most_prompts = (prompts + D - 1) / D;
    s->first = prompts * d / D, s->prompts = prompts * (d + 1) / D - s->first;
}

// Derives the name of a reward command: its first word that is a file with an extension, without folder and extension
// (python3 checks/reward.py: reward). Without a file it is the first word.
static void reward_name_of(const char *command, char name[REWARD_NAME]) {
    char words[256], *rest = words;
    const char *found = NULL;
    snprintf(words, sizeof(words), "%s", command);
    for (char *word; (word = strsep(&rest, " \t\n;|&\"'()<>")) != NULL;) {
        char *base = strrchr(word, '/') ? strrchr(word, '/') + 1 : word, *end = strrchr(base, '.');
        if (!*base) continue;
        if (!found) found = base;
        if (!end || end == base || !end[1] || strchr(base, '=')) continue;
        *end = 0, found = base;
        break;
    }
    snprintf(name, REWARD_NAME, "%.39s", found ? found : "reward");
}

// Splits a list "a,b", copied to text[size]. Refuses a list whose number of entries differs from `count`, the number of
// reward commands.
static void reward_list(const char *option, const char *list, size_t count, char *text, size_t size,
                        const char *entry[REWARD_COMMANDS]) {
    size_t found = 0;
    char *rest = text;
    if (strlen(list) >= size) die_usage("--%s: the list is longer than %zu bytes; shorten it", option, size - 1);
    snprintf(text, size, "%s", list);
    for (char *word; (word = strsep(&rest, ",")) != NULL;)
        if (found++ < REWARD_COMMANDS) entry[found - 1] = word;
    if (found != count)
        die_usage("--%s has %zu entries for %zu --reward-command; give one for each", option, found, count);
}

// Reads --reward-command, --reward-names, --reward-weights.
static void rewards_from_options(RolloutSettings *s, const Options *o) {
    const char *entry[REWARD_COMMANDS];
    char text[1024];
    double size = 0;
    s->rewards = o->reward_command.count;
    if (s->rewards > REWARD_COMMANDS)
        die_usage("--reward-command: %zu commands were given; give at most %d", s->rewards, REWARD_COMMANDS);
    for (size_t k = 0; k < s->rewards; k++) {
        s->reward_command[k] = o->reward_command.path[k], s->reward_weight[k] = 1;
        reward_name_of(s->reward_command[k], s->reward_name[k]);
    }
    if (o->reward_names) {
        reward_list("reward-names", o->reward_names, s->rewards, text, sizeof(text), entry);
        for (size_t k = 0; k < s->rewards; k++) {
            if (!*entry[k] || strlen(entry[k]) >= REWARD_NAME || strpbrk(entry[k], "\"\\/ \t\n"))
                die_usage("--reward-names: '%.60s' must be a name of at most %d characters without quotes, slashes and "
                          "blanks",
                          entry[k], REWARD_NAME - 1);
            snprintf(s->reward_name[k], REWARD_NAME, "%s", entry[k]);
        }
    }
    for (size_t k = 0; k < s->rewards; k++)
        for (size_t i = 0; i < k; i++)
            if (!strcmp(s->reward_name[k], s->reward_name[i]))
                die_usage("two reward commands are named %s; give each a name with --reward-names", s->reward_name[k]);
    if (!o->reward_weights) return;
    reward_list("reward-weights", o->reward_weights, s->rewards, text, sizeof(text), entry);
    for (size_t k = 0; k < s->rewards; k++) {
        char *end;
        s->reward_weight[k] = strtod(entry[k], &end);
        if (!*entry[k] || *end || !(fabs(s->reward_weight[k]) <= 1e6))
            die_usage("--reward-weights: '%.60s' must be a number from -1e6 to 1e6", entry[k]);
        size += fabs(s->reward_weight[k]);
    }
    if (size == 0) die_usage("--reward-weights are all 0; give at least one weight that is not 0");
}

// Reads --environment-command and its relatives. The renderer is data/render.py next to the program, with the folder of
// the data and the model's tokenizer, unless --render-command names another.
static void environment_from_options(EnvironmentSettings *e, const Run *run, const Prompt *text) {
    static char render[3 * PATH_MAX + 64];
    const Options *o = run->options;
    char program[PATH_MAX] = "", home[PATH_MAX] = "", data[PATH_MAX] = "";
    e->command = o->environment_command, e->render = o->render_command;
    if (!e->command) return;
    e->workers = o->environment_workers, e->max_turns = o->max_turns, e->tokens = o->seq_len;
    e->timeout = o->reward_timeout, e->own = o->turn_rewards == TURN_REWARDS_OWN;
    if (strcmp(e->render, "auto") != 0 || o->verb != VERB_TRAIN) return;
    const ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    folder_above(data, o->data.path[0]);
    folder_above(home, program);
    if (length <= 0 || (!*run->tokenizer_path && !text->bytes) || strchr(home, '\'') || strchr(data, '\'') ||
        strchr(run->tokenizer_path, '\''))
        die_usage("--environment-command: no tokenizer is known to render turns with; give --render-command "
                  "'python3 data/render.py DATA TOKENIZER'");
    snprintf(render, sizeof(render), "exec \"${STREAMBP_PYTHON:-python3}\" '%s/data/render.py' '%s' '%s'", home, data,
             text->bytes ? "bytes" : run->tokenizer_path);
    e->render = render;
}

// Returns the settings, which keep `text`. The caller frees their end_ids: the tokenizer's end tokens and the ids of
// --stop-ids.
static RolloutSettings rollout_from_options(const Run *run, const Prompt *text) {
    const Options *o = run->options;
    RolloutSettings s = {0};
    rollout_assignment(&s, run->settings.world, o->batch);
    s.group_size = o->group_size;
    s.max_new_tokens = o->max_new_tokens;
    s.slots = slots_from_options(o, &run->settings, s.most_prompts * s.group_size);
    s.sequence_tokens = s.group_size * o->seq_len;
    s.shares =
        (s.group_size > 1 || o->environment_command) && prefixes_from_options(o, run->settings.lora) != PREFIXES_NONE;
    s.sampling = sampling_from_options(o);
    s.scale_rewards = scales_rewards(o);
    s.mask_truncated = o->mask_truncated;
    s.in_order = o->shuffle == SHUFFLE_OFF;
    s.stop = o->reward_failure == REWARD_FAILURE_STOP;
    s.reference = objective_reads_reference(&run->settings.objective), s.old = o->updates > 1 || o->overlap;
    s.overlap = o->overlap;
    s.records = run->model.config.num_experts > 0, s.replays = o->router_replay;
    if (s.replays && !s.records)
        die_usage("--router-replay: the model has no experts, so its texts have no routes; leave --router-replay out");
    s.reward_timeout = o->reward_timeout;
    rewards_from_options(&s, o);
    environment_from_options(&s.environment, run, text);
    s.text = text;
    s.end_ids = end_ids_from_options(o, text->tokenizer, run->model.config.vocab_size, &s.end_count);
    return s;
}

// Sets the key/value cache in *settings, for the plan of a run with rollouts. Returns the largest sequence.
static SequenceBound rollout_plan(const RolloutSettings *rollout, const DataLoader *data, RunSettings *settings,
                                  size_t seq_len) {
    const size_t capacity = rollout_capacity(rollout, data);
    settings->rollout_slots = rollout->slots, settings->rollout_tokens = max_size(settings->rollout_tokens, capacity);
    settings->rollout_grows = rollout->environment.command != NULL;
    settings->rollout_mean = (data->longest_prompt + settings->rollout_tokens + 1) / 2;
    if (rollout->environment.command && data->longest_prompt > seq_len)
        die_usage("prompts of up to %zu tokens leave no room for a turn in --seq-len %zu; raise --seq-len, or shorten "
                  "the prompts",
                  data->longest_prompt, seq_len);
    if (capacity > seq_len)
        die_usage("prompts of up to %zu tokens with --max-new-tokens %zu make documents of %zu positions, but "
                  "--seq-len is %zu; raise --seq-len, or shorten the prompts",
                  data->longest_prompt, rollout->max_new_tokens, capacity, seq_len);
    return rollout_bound(rollout, data);
}

#endif
