/*
The state of a run with rollouts (rollout.h): settings, a step's completions, rewards and sequences, their bounds and
memory.
*/
#ifndef LLMC_ROLLOUT_STATE_H
#define LLMC_ROLLOUT_STATE_H
#include "checkpoint.h"
#include "llmc/data/documents_read.h"
#include "llmc/generate/prompt.h"
#include "llmc/generate/sampler.h"
#include "reward.h"
#include "trajectory_state.h"
#include "all_reduce.h"
#include <pthread.h>

#define RANDOM_STREAM_ROLLOUT 0x726f6c6c6f7574ull // stream of random.h for the order of prompts, by epoch ("rollout")
#define ROLLOUT_AROUND        128                 // most bytes around a field of a line
#define REWARD_NAME           40
#define ROLLOUT_FAILURES      10 // consecutive steps without rewards that end a run; step 1 alone does

typedef struct {
    size_t prompts, group_size; // P: prompts of this replica; G
    size_t most_prompts;        // most prompts of a replica
    size_t step_prompts, first; // prompts of all replicas; index of this replica's first prompt
    World world;
    size_t max_new_tokens;     // most tokens of a completion
    size_t slots;              // completions written in parallel
    size_t sequence_tokens;    // most positions of a sequence; 0: room for one group
    int shares;                // 1: texts of a group, and paths of a trajectory, share their beginning (tree.h)
    SamplingSettings sampling; // settings of sampling, with the run's seed
    int in_order;              // 1: take prompts in the order of the data
    int scale_rewards;         // 1: divide advantages by the standard deviation of their group's rewards
    int mask_truncated;        // 1: completions that did not end have no weight in the loss
    int stop;                  // 1: end the run when a reward command fails; 0: leave out its groups
    int reference, old;        // 1: also allocate these log-probabilities
    size_t rewards;            // number of reward commands; below, their names in metrics and weights in the reward
    const char *reward_command[REWARD_COMMANDS];
    char reward_name[REWARD_COMMANDS][REWARD_NAME];
    double reward_weight[REWARD_COMMANDS];
    int overlap;          // 1: rollout_ahead will be called
    int records, replays; // for a model with experts: keep the routes of completions; train with these routes
    double reward_timeout;
    EnvironmentSettings environment;
    const Prompt *text;      // encodes and decodes text
    const uint32_t *end_ids; // [end_count] ids that end a completion
    size_t end_count;
} RolloutSettings;

// Progress in writing the lines for a reward command
typedef struct {
    size_t completion, field, token; // token: index in the field, once the field has begun
    size_t column;                   // next byte of the columns' text
    int begun;
    char *scratch; // a token as text, before it is escaped
    TextOut text;  // decoder of the field's tokens
} RolloutLine;

typedef struct {
    RolloutSettings settings;
    DataLoader *data; // loader opened with DATA_PROMPTS
    SamplerBatch sampler;
    Reward command[REWARD_COMMANDS];
    Prompt decoder;
    uint32_t *order; // [prompts of the data] order of prompts in epoch `epoch`
    uint64_t epoch;  // UINT64_MAX: no epoch yet
    // the step's prompts with their reference answers, and completions
    size_t room;                    // most tokens of a document of the data
    int32_t *documents;             // [P,room]
    size_t *prompt_tokens, *tokens; // [P] tokens of a prompt; tokens of the prompt and the reference answer
    size_t *number;                 // [P] index of a prompt in the data
    int32_t *ids;                   // [P*G,max_new_tokens]
    uint16_t *route;                // [P*G,text_routes] experts of the completions' tokens; NULL: not recorded
    size_t text_routes;             // routes of the longest text: tokens x layers with experts x k
    Completion *completion;         // [P*G]
    float *reward;                  // [P*G] NAN: no reward
    float *rewards_of;              // [rewards,P*G] rewards of each command
    char *answered;                 // [P*G] 1: every command that did not fail has answered
    int32_t *lengths;               // [2,P*G] number of tokens, and whether the completion ended, for other ranks
    double *advantage;              // [P*G]
    RolloutLine line[REWARD_COMMANDS];
    char *columns;                    // [data->longest_columns] columns of prompt number columns_of, as a JSON object
    size_t columns_bytes, columns_of; // bytes in `columns`; number of their prompt, SIZE_MAX: none read yet
    int columns_answer;               // 1: a column is named `answer`
    size_t piece;                     // most bytes of a line that are made at once
    char *scratch;                    // scratch memory of all lines
    // packed sequences
    Packing packing;                                    // packs groups
    size_t *group_sequence;                             // [P] sequence of each group; SIZE_MAX: left out
    Batch all;                                          // memory of all sequences
    char *trees;                                        // memory of all sequences' trees; NULL: nothing is shared
    Batch *sequence;                                    // [P]
    size_t sequences;                                   // number of sequences on every replica
    TargetCounts counts;                                // totals of the step over all replicas
    Metrics metrics;                                    // metrics of the step, except the objective's
    double sampling_seconds, reward_seconds;            // seconds of the step
    char metric_names[REWARD_COMMANDS][2][METRIC_NAME]; // names of rewards' metrics: mean, standard deviation
    // for rollout_ahead
    size_t waiting;        // step whose completions wait for rewards; 0: none
    float *old;            // [P*G,max_new_tokens] old log-probabilities of these completions
    Batch ahead;           // memory of the sequences with which they are computed
    char *ahead_trees;     // memory of their trees
    Batch *ahead_sequence; // [P]
    pthread_t asking;      // thread that asks for rewards, if `asks`
    int asks;
    WaitingPart part;
    size_t failures; // consecutive steps without rewards
    // with an environment
    Agents agents;
    size_t vocabulary;
} Rollout;

// Tells whether completions have rewards, by commands or an environment; else a teacher judges their tokens (distill).
static int rollout_has_rewards(const RolloutSettings *s) { return s->rewards || s->environment.command; }

// ---- sizes ----------------------------------------------------------------------------------------------------------
// Returns the positions of the longest text, in the key/value cache and in a sequence. The text's last token is only a
// target.
static size_t rollout_capacity(const RolloutSettings *settings, const DataLoader *data) {
    if (settings->environment.command) return settings->environment.tokens;
    return data->longest_prompt + settings->max_new_tokens - 1;
}

// Returns the rows of a group, whose completions have `tokens` tokens together. A last token is only a target.
static size_t rollout_rows(const RolloutSettings *settings, size_t prompt, size_t tokens) {
    const int shares = settings->shares && prompt - 1 >= PREFIX_LEAST;
    return (prompt - 1) * (shares ? 1 : settings->group_size) + tokens;
}

// Returns the rows of the largest group. A prompt that is too short to be shared may give more rows than the longest.
static size_t rollout_most_rows(const RolloutSettings *settings, const DataLoader *data) {
    const size_t tokens = settings->group_size * settings->max_new_tokens, longest = data->longest_prompt;
    const size_t rows = rollout_rows(settings, longest, tokens);
    return data->longest_alone ? max_size(rows, rollout_rows(settings, data->longest_alone, tokens)) : rows;
}

// Returns the bound with an environment: a sequence has S rows, of one or more trajectories (trajectories_pack). A
// trajectory of R rows in T turns is at most T documents of R positions each.
static SequenceBound trajectory_bound(const RolloutSettings *settings) {
    const size_t S = settings->environment.tokens, T = settings->environment.max_turns;
    const size_t texts = settings->most_prompts * settings->group_size;
    SequenceBound bound = {0};
    bound.longest = bound.N = S, bound.documents = min_size(texts * T, S);
    if (settings->shares) bound.rows = S, bound.N = S * T, bound.forks = T + settings->most_prompts;
    return bound;
}

static SequenceBound rollout_bound(const RolloutSettings *settings, const DataLoader *data) {
    size_t P = settings->most_prompts, G = settings->group_size, longest = rollout_capacity(settings, data);
    SequenceBound bound = {0};
    if (settings->environment.command) return trajectory_bound(settings);
    if (longest > POSITIONS_MAX / (P * G))
        die("a step of %zu x %zu completions of up to %zu tokens is too large to count; lower --batch, --group-size or "
            "--max-new-tokens",
            P, G, longest);
    bound.longest = longest;
    bound.N = settings->sequence_tokens ? settings->sequence_tokens : G * longest;
    if (bound.N < G * longest)
        die("a group of %zu completions may have %zu positions (prompts of up to %zu tokens, --max-new-tokens %zu), "
            "but one sequence has %zu; lower --max-new-tokens or --group-size",
            G, G * longest, data->longest_prompt, settings->max_new_tokens, bound.N);
    bound.N = min_size(bound.N, P * G * longest);
    bound.documents = min_size(P, bound.N / G) * G; // a document has at least one position
    if (!settings->shares || data->longest_prompt <= PREFIX_LEAST) return bound;
    bound.rows = bound.N / (G * longest) * rollout_most_rows(settings, data); // as many groups, with fewer rows
    bound.N = min_size(G * bound.rows, P * G * longest);
    bound.documents = min_size(P, bound.rows / G) * G;
    bound.forks = min_size(P, bound.rows / (PREFIX_LEAST + G));
    return bound;
}

// Returns the bytes of the trees of a step's sequences.
static size_t rollout_tree_bytes(const RolloutSettings *settings, const DataLoader *data) {
    const size_t P = settings->prompts, texts = P * settings->group_size, T = settings->environment.max_turns;
    if (settings->environment.command)
        return tree_bytes(texts * settings->environment.tokens, texts * T) + texts * tree_bytes(0, 0);
    return tree_bytes(P * rollout_most_rows(settings, data), P * settings->group_size) + P * tree_bytes(0, 0);
}

// Tells whether this rank asks for rewards: it is the first of the ranks that share sequences.
static int rollout_asks(const RolloutSettings *s) { return s->world.rank % world_sp(s->world) == 0; }

static void rollout_allocate_text(Rollout *r, const Prompt *text) {
    r->decoder = *text;
    r->decoder.text = NULL; // every prompt begins a new text
    size_t token = prompt_token_bytes(&r->decoder) + 8;
    r->scratch = (char *)checked_calloc(REWARD_COMMANDS, token, "the text of a token");
    for (size_t k = 0; k < REWARD_COMMANDS; k++) r->line[k].scratch = r->scratch + k * token;
    r->piece = 6 * token + ROLLOUT_AROUND; // room if every byte is escaped
}

// Returns the number of routes of a text's positions, over all layers.
static size_t rollout_routes(const Rollout *r, const Completion *text) {
    return (text->prompt_tokens + text->tokens - 1) * r->all.routes.layers * r->all.routes.k;
}

// Returns the bytes of a completion in rollout.bin.
static size_t rollout_record(const Rollout *r) {
    const size_t ids = r->settings.max_new_tokens * (sizeof(int32_t) + sizeof(float));
    return 2 * sizeof(uint32_t) + ids + r->text_routes * sizeof(uint16_t);
}

// Allocates the trajectories of a step. Memory of old paths is touched only where a path is written.
static void trajectories_allocate(Rollout *r) {
    const EnvironmentSettings *e = &r->settings.environment;
    const size_t texts = r->settings.prompts * r->settings.group_size;
    static const char of_step[] = "a step's trajectories";
    Agents *a = &r->agents;
    a->record = -1, a->texts = texts;
    if (!e->command) return;
    a->text = (Trajectory *)checked_calloc(texts, sizeof(Trajectory), of_step);
    a->exchange = (Exchange *)checked_calloc(e->workers + 1, sizeof(Exchange), "processes of the environment");
    a->queue = (size_t *)checked_calloc(texts, sizeof(size_t), of_step);
    a->ready = (size_t *)checked_calloc(texts, sizeof(size_t), of_step);
    a->sequence = (size_t *)checked_calloc(texts, sizeof(size_t), of_step);
    for (size_t i = 0; i < texts; i++) {
        Trajectory *t = &a->text[i];
        t->ids = (int32_t *)checked_calloc(2 * (e->tokens + 1), sizeof(int32_t), of_step);
        t->old = t->ids + e->tokens + 1;
        t->turn = (AgentTurn *)checked_calloc(e->max_turns, sizeof(AgentTurn), of_step);
        t->path = (OldPath *)checked_calloc(e->max_turns, sizeof(OldPath), of_step);
        if (r->route) t->old_route = (uint16_t *)checked_calloc(r->text_routes, sizeof(uint16_t), of_step);
    }
}

static void trajectories_free(Agents *a) {
    for (size_t i = 0; a->text && i < a->texts; i++) {
        Trajectory *t = &a->text[i];
        free(t->ids), free(t->turn), free(t->path), free(t->row), free(t->messages), free(t->old_route);
    }
    for (size_t k = 0; k < a->recorded_count; k++) free(a->recorded[k].answer);
    if (a->record >= 0) close(a->record);
    free(a->text), free(a->exchange), free(a->queue), free(a->ready), free(a->sequence), free(a->recorded);
}

// Allocates all memory. `data`, and everything that settings point to, must outlive *r.
static void rollout_allocate(Rollout *r, const RolloutSettings *settings, const Model *model, DataLoader *data) {
    const int agents = settings->environment.command != NULL;
    const size_t P = settings->prompts, texts = P * settings->group_size;
    const size_t sequences = settings->most_prompts * (agents ? settings->group_size : 1);
    const size_t paths = agents ? settings->environment.max_turns : 1; // most documents of a text
    const size_t capacity = rollout_capacity(settings, data), k = model->config.num_experts_per_tok;
    const size_t experts =
        settings->records ? expert_layers_before(&model->config, model->config.num_hidden_layers) : 0;
    static const char of_step[] = "a step's prompts and completions";
    memset(r, 0, sizeof(*r));
    r->settings = *settings, r->data = data, r->vocabulary = model->config.vocab_size;
    const SequenceBound bound = rollout_bound(settings, data);
    r->settings.sequence_tokens = bound.forks ? bound.rows : bound.N;
    sampler_batch_allocate(&r->sampler, model, settings->slots, capacity);

    rollout_allocate_text(r, settings->text);

    // 1. Prompts, completions and rewards of a step.
    r->order = (uint32_t *)checked_calloc(data->prompts, sizeof(uint32_t), "the order of the prompts");
    r->epoch = UINT64_MAX;
    r->room = data->longest_text;
    r->documents = (int32_t *)checked_calloc(P * r->room, sizeof(int32_t), of_step);
    r->prompt_tokens = (size_t *)checked_calloc(P, sizeof(size_t), of_step);
    r->tokens = (size_t *)checked_calloc(P, sizeof(size_t), of_step);
    r->number = (size_t *)checked_calloc(P, sizeof(size_t), of_step);
    r->ids = (int32_t *)checked_calloc(texts * settings->max_new_tokens, sizeof(int32_t), of_step);
    r->completion = (Completion *)checked_calloc(texts, sizeof(Completion), of_step);
    r->reward = (float *)checked_calloc(texts, sizeof(float), of_step);
    r->rewards_of = (float *)checked_calloc(settings->rewards * texts, sizeof(float), of_step);
    r->answered = (char *)checked_calloc(texts, 1, of_step);
    r->lengths = (int32_t *)checked_calloc(2 * texts, sizeof(int32_t), of_step);
    r->advantage = (double *)checked_calloc(texts, sizeof(double), of_step);
    for (size_t i = 0; i < texts; i++) r->completion[i].ids = r->ids + i * settings->max_new_tokens;
    r->text_routes = capacity * experts * k;
    if (experts) r->route = (uint16_t *)checked_calloc(texts * r->text_routes, sizeof(uint16_t), of_step);
    for (size_t i = 0; i < texts && experts; i++) r->completion[i].route = r->route + i * r->text_routes;
    r->columns = (char *)checked_malloc(max_size(data->longest_columns, 1), "the columns of a prompt's row");
    r->columns_of = SIZE_MAX;

    for (size_t k = 0; k < settings->rewards; k++) {
        snprintf(r->metric_names[k][0], METRIC_NAME, "rewards/%s/mean", settings->reward_name[k]);
        snprintf(r->metric_names[k][1], METRIC_NAME, "rewards/%s/std", settings->reward_name[k]);
    }

    // 2. Packed sequences of groups.
    r->packing.capacity = r->settings.sequence_tokens;
    packing_allocate_window(&r->packing, agents ? texts : P);
    r->group_sequence = (size_t *)checked_calloc(P, sizeof(size_t), of_step);
    r->sequence = (Batch *)checked_calloc(sequences, sizeof(Batch), of_step);
    r->all = batch_allocate(paths * texts * capacity + sequences, paths * texts + 2 * sequences);
    batch_allocate_answers(&r->all, settings->reference, settings->old);
    if (agents) { // trajectories of a group may lie in different sequences
        r->all.trajectory = r->all.group;
        r->all.group = NULL;
    }
    trajectories_allocate(r);
    if (experts) batch_allocate_routes(&r->all, experts, k, settings->replays);
    const size_t trees = bound.forks ? rollout_tree_bytes(settings, data) : 0;
    if (trees) r->trees = (char *)checked_calloc(1, trees, of_step);
    if (settings->overlap) {
        if (trees) r->ahead_trees = (char *)checked_calloc(1, trees, of_step);
        r->old = (float *)checked_calloc(texts * settings->max_new_tokens, sizeof(float), of_step);
        r->ahead_sequence = (Batch *)checked_calloc(sequences, sizeof(Batch), of_step);
        r->ahead = batch_allocate(texts * capacity + sequences, texts + 2 * sequences);
        batch_allocate_answers(&r->ahead, settings->reference, settings->old);
        if (experts) batch_allocate_routes(&r->ahead, experts, k, settings->replays);
        const uint64_t prompt = settings->group_size * rollout_record(r);
        r->part.begin = settings->first * prompt, r->part.count = P * prompt;
        r->part.whole = settings->step_prompts * prompt, r->part.writes = rollout_asks(settings);
        r->part.bytes = (char *)checked_malloc(r->part.count, of_step);
    }
    for (size_t k = 0; k < settings->rewards && rollout_asks(settings); k++)
        reward_open(&r->command[k], settings->reward_command[k],
                    settings->rewards > 1 ? settings->reward_name[k] : NULL, settings->reward_timeout, r->piece);
}

static void rollout_free(Rollout *r) {
    if (r->asks) pthread_join(r->asking, NULL);
    free(r->old), free(r->ahead_sequence), free(r->part.bytes);
    batch_free(&r->ahead);
    for (size_t k = 0; k < r->settings.rewards && rollout_asks(&r->settings); k++) reward_close(&r->command[k]);
    sampler_batch_free(&r->sampler);
    free(r->order), free(r->documents), free(r->prompt_tokens), free(r->tokens), free(r->number);
    free(r->ids), free(r->completion), free(r->reward), free(r->advantage), free(r->scratch), free(r->columns);
    free(r->rewards_of), free(r->answered), free(r->lengths), free(r->route);
    packing_free(&r->packing);
    free(r->group_sequence), free(r->sequence), free(r->trees), free(r->ahead_trees);
    batch_free(&r->all);
    trajectories_free(&r->agents);
    memset(r, 0, sizeof(*r));
}

#endif
