/*
Rollouts: the batches of one step of online GRPO (arXiv 2402.03300). P prompts of the data, G completions of each by the
model as it is (sampler.h), their rewards from the user's commands (reward.h), advantages within each prompt's group,
and packed sequences of whole groups to train on. A completion's reward is the weighted sum of those that commands gave
it; one that has none leaves its group out of the step.

    rollout_bound      the largest sequence, and rollout_capacity the longest text: for the plan, before
    rollout_allocate   all memory; the commands start
    rollout_step       step number s, from 1: fills `sequence`, target `counts` and `metrics`; 0: nothing to train on
    rollout_ahead      --overlap: writes those of step s + 1, whose rewards are asked for while step s is trained
    rollout_free

A step follows from the seed, its number and the weights alone. Every epoch has a new order of prompts. Each of several
replicas takes its share of the step's prompts, asks reward commands of its own, and trains on as many sequences as any
other has: where there are no more groups a sequence is empty (batch.h). Of ranks that share sequences each writes
completions of some of the replica's prompts, which all then have, and the first one asks for rewards.

With --overlap the completions of a step are those that rollout_ahead has written before the updates of the step before:
off-policy by one, which the ratio to their old log-probabilities corrects. Between two steps they are all that a run
has beside its checkpoint, so they are part of it (rollout.bin): for each completion, by the prompts' order in the step,
the number of its tokens, whether it ended, its ids and old log-probabilities. Rewards are asked for again.

A command is given a line for each completion, which is valid JSON whatever the texts are:

    {"prompt": "...", "completion": "...", "reference": "..." or null, "completion_ids": [...], "prompt_number": 7,
     "ended": true, "difficulty": 3, "tests": ["..."]}

Behind `ended` stand the other columns of the prompt's row, as data/prepare.py has kept them. Special tokens are not
shown; `reference` is the answer that the data has after the prompt, `prompt_number` the prompt's number in the data,
`ended` whether the model ended the completion. Where tokens have no text there are prompt_ids, completion_ids and
reference_ids instead.
*/
#ifndef LLMC_ROLLOUT_H
#define LLMC_ROLLOUT_H
#include "llmc/base/json.h"
#include "llmc/generate/prompt.h"
#include "llmc/data/documents_read.h"
#include "checkpoint.h"
#include "reward.h"
#include "llmc/generate/sampler.h"
#include "all_reduce.h"
#include <pthread.h>

#define RANDOM_STREAM_ROLLOUT 0x726f6c6c6f7574ull // of random.h: the order of prompts, by epoch ("rollout")
#define RANDOM_STREAM_TEXTS   0x7465787473ull     // the seeds of completions ("texts")
#define ROLLOUT_AROUND        128                 // bytes, at most, that stand around a field of a line
#define REWARD_NAME           40
#define ROLLOUT_FAILURES      10 // steps in a row without any reward that end a run; the first one does

typedef struct {
    size_t prompts, group_size; // P, G: of this replica
    size_t most_prompts;        // of the replica with the most
    size_t step_prompts, first; // of all replicas; the number of the first of this replica
    World world;
    size_t max_new_tokens;     // of a completion
    size_t slots;              // completions written side by side
    size_t sequence_tokens;    // positions of a sequence, at most; 0: room for one group
    SamplingSettings sampling; // its seed is the run's
    int in_order;              // prompts come as they stand in the data
    int scale_rewards;         // divide advantages by the standard deviation of their group's rewards
    int mask_truncated;        // completions that did not end have no weight in the loss
    int stop;                  // a reward command that fails ends the run; else its groups are left out
    int reference, old;        // allocate these log-probabilities, too
    size_t rewards;            // commands, each with its name in metrics and its weight in a completion's reward
    const char *reward_command[REWARD_COMMANDS];
    char reward_name[REWARD_COMMANDS][REWARD_NAME];
    double reward_weight[REWARD_COMMANDS];
    int overlap; // rollout_ahead will be called
    double reward_timeout;
    const Prompt *text;      // tokens to text
    const uint32_t *end_ids; // [end_count] the ids that end a completion
    size_t end_count;
} RolloutSettings;

// How far the lines for a reward command are written.
typedef struct {
    size_t completion, field, token; // token: of the field, once it has begun
    size_t column;                   // byte of the columns' text
    int begun;
    char *scratch; // a token as text, before it is escaped
    TextOut text;  // of the field
} RolloutLine;

typedef struct {
    RolloutSettings settings;
    DataLoader *data; // opened with DATA_PROMPTS
    SamplerBatch sampler;
    Reward command[REWARD_COMMANDS];
    Prompt decoder;
    uint32_t *order; // [prompts of the data] of epoch `epoch`
    uint64_t epoch;  // UINT64_MAX: none
    // prompts of the step, with their reference answers, and completions
    size_t room;                    // tokens of a document of the data
    int32_t *documents;             // [P,room]
    size_t *prompt_tokens, *tokens; // [P] of a prompt; of it and its reference answer
    size_t *number;                 // [P] of a prompt in the data
    int32_t *ids;                   // [P*G,max_new_tokens]
    Completion *completion;         // [P*G]
    float *reward;                  // [P*G] NAN: none
    float *rewards_of;              // [rewards,P*G] by each command
    char *answered;                 // [P*G] by every command that did not fail
    int32_t *lengths;               // [2,P*G] tokens, and whether ended, on their way to other ranks
    double *advantage;              // [P*G]
    RolloutLine line[REWARD_COMMANDS];
    char *columns;                    // [data->longest_columns] of prompt number columns_of, a JSON object
    size_t columns_bytes, columns_of; // columns_of: SIZE_MAX: none yet
    size_t piece;                     // bytes of a line that are made at once, at most
    char *scratch;                    // those of lines
    // packed sequences
    Packing packing;                                    // of groups
    size_t *group_sequence;                             // [P] SIZE_MAX: left out
    Batch all;                                          // the memory of all sequences
    Batch *sequence;                                    // [P]
    size_t sequences;                                   // of every replica
    TargetCounts counts;                                // of the step, of all replicas
    Metrics metrics;                                    // of the step, beside those of the objective
    double sampling_seconds, reward_seconds;            // of the step
    char metric_names[REWARD_COMMANDS][2][METRIC_NAME]; // of rewards by name: mean, standard deviation
    // of rollout_ahead
    size_t waiting;        // the step whose completions wait for rewards; 0: none
    float *old;            // [P*G,max_new_tokens] their log-probabilities
    Batch ahead;           // the memory of sequences by which these are computed
    Batch *ahead_sequence; // [P]
    pthread_t asking;      // asks for rewards where `asks`
    int asks;
    WaitingPart part;
    size_t failures; // steps in a row
    int rewarded;    // some step of this process has had a reward
} Rollout;

// ---- sizes ----------------------------------------------------------------------------------------------------------
// Positions of the longest text, in the key/value cache and in a sequence: its last token is only a target.
static size_t rollout_capacity(const RolloutSettings *settings, const DataLoader *data) {
    return data->longest_prompt + settings->max_new_tokens - 1;
}

static SequenceBound rollout_bound(const RolloutSettings *settings, const DataLoader *data) {
    size_t P = settings->most_prompts, G = settings->group_size, longest = rollout_capacity(settings, data);
    SequenceBound bound;
    if (longest > POSITIONS_MAX / (P * G))
        die("a step of %zu x %zu completions of up to %zu tokens is more than can be counted; take fewer", P, G,
            longest);
    bound.longest = longest;
    bound.N = settings->sequence_tokens ? settings->sequence_tokens : G * longest;
    if (bound.N < G * longest)
        die("a group of %zu completions may have %zu positions (prompts of up to %zu tokens, --max-new-tokens %zu), "
            "one sequence has %zu; shorten either, or take a smaller --group-size",
            G, G * longest, data->longest_prompt, settings->max_new_tokens, bound.N);
    bound.N = min_size(bound.N, P * G * longest);
    bound.documents = min_size(P, bound.N / G) * G; // a document has a position at least
    return bound;
}

// The first of the ranks that share sequences asks for rewards.
static int rollout_asks(const RolloutSettings *s) { return s->world.rank % world_sp(s->world) == 0; }

static void rollout_allocate_text(Rollout *r, const Prompt *text) {
    r->decoder = *text;
    r->decoder.text = NULL; // a prompt's text is begun anew
    size_t token = prompt_token_bytes(&r->decoder) + 8;
    r->scratch = (char *)checked_calloc(REWARD_COMMANDS, token, "the text of a token");
    for (size_t k = 0; k < REWARD_COMMANDS; k++) r->line[k].scratch = r->scratch + k * token;
    r->piece = 6 * token + ROLLOUT_AROUND; // with escapes
}

// What rollout.bin has of a completion
static size_t rollout_record(const RolloutSettings *s) {
    return 2 * sizeof(uint32_t) + s->max_new_tokens * (sizeof(int32_t) + sizeof(float));
}

static WaitingPart rollout_part(const RolloutSettings *s) {
    const uint64_t prompt = s->group_size * rollout_record(s);
    WaitingPart part = {.begin = s->first * prompt, .count = s->prompts * prompt, .whole = s->step_prompts * prompt};
    part.writes = s->world.rank % world_sp(s->world) == 0;
    return part;
}

// data, and all that settings point to, must outlive it.
static void rollout_allocate(Rollout *r, const RolloutSettings *settings, const Model *model, DataLoader *data) {
    const size_t P = settings->prompts, texts = P * settings->group_size, sequences = settings->most_prompts;
    const size_t capacity = rollout_capacity(settings, data);
    static const char of_step[] = "a step's prompts and completions";
    memset(r, 0, sizeof(*r));
    r->settings = *settings, r->data = data;
    r->settings.sequence_tokens = rollout_bound(settings, data).N;
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
    r->columns = (char *)checked_malloc(max_size(data->longest_columns, 1), "the columns of a prompt's row");
    r->columns_of = SIZE_MAX;

    for (size_t k = 0; k < settings->rewards; k++) {
        snprintf(r->metric_names[k][0], METRIC_NAME, "rewards/%s/mean", settings->reward_name[k]);
        snprintf(r->metric_names[k][1], METRIC_NAME, "rewards/%s/std", settings->reward_name[k]);
    }

    // 2. Packed sequences of groups.
    r->packing.capacity = r->settings.sequence_tokens;
    packing_allocate_window(&r->packing, P);
    r->group_sequence = (size_t *)checked_calloc(P, sizeof(size_t), of_step);
    r->sequence = (Batch *)checked_calloc(sequences, sizeof(Batch), of_step);
    r->all = batch_allocate(texts * capacity + sequences, texts + 2 * sequences);
    batch_allocate_answers(&r->all, settings->reference, settings->old);
    if (settings->overlap) {
        r->old = (float *)checked_calloc(texts * settings->max_new_tokens, sizeof(float), of_step);
        r->ahead_sequence = (Batch *)checked_calloc(sequences, sizeof(Batch), of_step);
        r->ahead = batch_allocate(texts * capacity + sequences, texts + 2 * sequences);
        batch_allocate_answers(&r->ahead, settings->reference, settings->old);
        r->part = rollout_part(settings);
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
    free(r->rewards_of), free(r->answered), free(r->lengths);
    packing_free(&r->packing);
    free(r->group_sequence), free(r->sequence);
    batch_free(&r->all);
    memset(r, 0, sizeof(*r));
}

// ---- prompts and completions ----------------------------------------------------------------------------------------
// Reads the step's prompts, and prepares a completion for each member of their groups. Prompt number k of the run is
// number k % count in the order of epoch k / count.
static void rollout_prompts(Rollout *r, size_t step) {
    const RolloutSettings *s = &r->settings;
    size_t count = r->data->prompts;
    for (size_t p = 0; p < s->prompts; p++) {
        uint64_t k = (uint64_t)(step - 1) * s->step_prompts + s->first + p, epoch = k / count;
        int32_t *document = r->documents + p * r->room;
        if (epoch != r->epoch)
            random_permutation(r->order, count, s->sampling.seed, RANDOM_STREAM_ROLLOUT, r->epoch = epoch);
        r->number[p] = s->in_order ? k % count : r->order[k % count];
        prompts_read(r->data, r->number[p], document, r->room, &r->prompt_tokens[p], &r->tokens[p]);
        for (size_t g = 0; g < s->group_size; g++) {
            Completion *text = &r->completion[p * s->group_size + g];
            text->prompt = document, text->prompt_tokens = r->prompt_tokens[p];
            text->room = s->max_new_tokens;
            text->seed = random_bits(s->sampling.seed, RANDOM_STREAM_TEXTS, k * s->group_size + g);
        }
    }
}

// The prompts that rank number `rank` of those that share the replica's sequences writes completions of
static Range rollout_share(const RolloutSettings *s, size_t rank) {
    const size_t S = world_sp(s->world), begin = s->prompts * rank / S;
    const Range share = {begin, s->prompts * (rank + 1) / S - begin};
    return share;
}

// Writes them, and gets those of the other ranks.
static void rollout_write(Rollout *r, StreamBP *streambp) {
    const RolloutSettings *s = &r->settings;
    const size_t S = world_sp(s->world), G = s->group_size, texts = s->prompts * G;
    const Range own = rollout_share(s, s->world.rank % S);
    sampler_batch(&r->sampler, streambp, r->completion + own.begin * G, own.count * G, &s->sampling, s->end_ids,
                  s->end_count);
    for (size_t i = 0; i < texts; i++)
        r->lengths[i] = (int32_t)r->completion[i].tokens, r->lengths[texts + i] = r->completion[i].ended;
    for (size_t rank = 0; rank < S && S > 1; rank++) {
        const Range share = rollout_share(s, rank);
        const size_t begin = share.begin * G, count = share.count * G;
        dist_broadcast(RANKS_SEQUENCE, r->lengths + begin, count * sizeof(int32_t), rank);
        dist_broadcast(RANKS_SEQUENCE, r->lengths + texts + begin, count * sizeof(int32_t), rank);
        dist_broadcast(RANKS_SEQUENCE, r->ids + begin * s->max_new_tokens, count * s->max_new_tokens * sizeof(int32_t),
                       rank);
    }
    for (size_t i = 0; i < texts; i++)
        r->completion[i].tokens = (size_t)r->lengths[i], r->completion[i].ended = r->lengths[texts + i];
}

// ---- lines for reward commands: made a piece at a time, so of any length --------------------------------------------
// What follows the line's other fields: the members of the object of columns, and the end of the line.
static size_t rollout_columns_piece(Rollout *r, RolloutLine *line, size_t number, char *out) {
    if (r->columns_of != number)
        r->columns_bytes = prompts_columns(r->data, number, r->columns), r->columns_of = number;
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

// The next piece of a line, at most r->piece bytes: the beginning of a field, one of its tokens, its end,
// or the end of the line.
static size_t rollout_piece(Rollout *r, RolloutLine *line, char *out) {
    static const char *const names[2][4] = {
        {"{\"prompt\": ", ", \"completion\": ", ", \"reference\": ", ", \"completion_ids\": "},
        {"{\"prompt_ids\": ", ", \"completion_ids\": ", ", \"reference_ids\": ", ""}};
    const Completion *text = &r->completion[line->completion];
    const size_t p = line->completion / r->settings.group_size;
    const int with_text = r->decoder.tokenizer || r->decoder.bytes, as_ids = !with_text || line->field == 3;
    const size_t fields = with_text ? 4 : 3;
    if (line->field > fields) return rollout_columns_piece(r, line, r->number[p], out);
    if (line->field == fields) {
        line->field++, line->column = 1;
        return (size_t)snprintf(out, ROLLOUT_AROUND, ", \"prompt_number\": %zu, \"ended\": %s", r->number[p],
                                text->ended ? "true" : "false");
    }

    // 1. The field's tokens; without a reference answer it is null.
    const int32_t *ids = text->ids;
    size_t count = text->tokens;
    if (line->field == 0) ids = text->prompt, count = text->prompt_tokens;
    if (line->field == 2) {
        count = r->tokens[p] - text->prompt_tokens;
        ids = count ? text->prompt + text->prompt_tokens : NULL;
    }
    if (!line->begun) {
        line->begun = 1, line->token = 0;
        line->text = text_out_to(NULL, line->scratch);
        line->text.bytes = line->field != 0; // only the beginning of a text may lose its first space
        const char *open = !ids ? "null" : as_ids ? "[" : "\"";
        return (size_t)snprintf(out, ROLLOUT_AROUND, "%s%s", names[as_ids && line->field != 3][line->field], open);
    }

    // 2. A token as its id.
    const size_t token = line->token++;
    if (token < count && as_ids) return (size_t)snprintf(out, ROLLOUT_AROUND, "%s%d", token ? ", " : "", ids[token]);

    // 3. A token as text, or what is left of the text at its end. The scratch holds one token; byte 0 stands for all
    // before.
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

// RewardLines of reward.h
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
// A replica's command has failed, or completions have no reward: rank 0 reports it, and that the command is started
// again; a run that gets no rewards ends. left_out: groups of this replica. Collective.
static void rollout_count_failures(Rollout *r, size_t step, const Reward *failed, size_t left_out) {
    const size_t prompts = r->settings.step_prompts;
    double sums[2] = {failed ? 1.0 : 0.0, rollout_asks(&r->settings) ? (double)left_out : 0};
    char message[sizeof(failed->message)] = "", whose[256] = "", others[64] = "";
    size_t first;
    dist_sum(RANKS_ALL, sums, 2);
    const int rewarded = sums[1] < (double)prompts;
    r->rewarded |= rewarded, r->failures = rewarded ? 0 : r->failures + 1;
    if (sums[0] == 0 && sums[1] == 0) return;
    if (failed) memcpy(message, failed->message, sizeof(message));
    dist_smallest(failed ? 0 : 1, &first);
    dist_broadcast(RANKS_ALL, message, sizeof(message), first);
    if (!*message) snprintf(message, sizeof(message), "reward commands answered null");
    if (dist_ranks() > 1 && sums[0] > 0) snprintf(whose, sizeof(whose), "rank %zu on %s: ", first, dist_host(first));
    if (!rewarded && !r->rewarded)
        die("step %zu: %s%s; no completion was rewarded in the first step; try the command by hand on a line of JSON",
            step, whose, message);
    if (r->failures == ROLLOUT_FAILURES)
        die("step %zu: %s%s; there was no reward in %d steps", step, whose, message, ROLLOUT_FAILURES);
    if (sums[0] > 1) snprintf(others, sizeof(others), ", as on %.0f more", sums[0] - 1);
    note("step %zu: %s%s%s;%s %.0f of %zu groups are left out", step, whose, message, others,
         sums[0] > 0 ? " it is started again, and" : "", sums[1], prompts);
}

static int rollout_group_rewarded(const Rollout *r, size_t p) {
    const size_t G = r->settings.group_size;
    for (size_t i = p * G; i < (p + 1) * G; i++)
        if (!r->answered[i] || isnan(r->reward[i])) return 0;
    return 1;
}

// Asks for the rewards of each command, maybe on another thread.
static void *rollout_ask(void *rollout) {
    Rollout *r = (Rollout *)rollout;
    const size_t texts = r->settings.prompts * r->settings.group_size;
    float *of[REWARD_COMMANDS];
    for (size_t k = 0; k < r->settings.rewards; k++)
        rollout_line_begin(&r->line[k], 0), of[k] = r->rewards_of + k * texts;
    rewards_ask(r->command, r->settings.rewards, rollout_lines, r, texts, of);
    return NULL;
}

// Where no thread can be had the rewards are asked for when they are needed.
static void rollout_ask_ahead(Rollout *r) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
    r->asks = pthread_create(&r->asking, NULL, rollout_ask, r) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Waits for the answers, or asks: the rewards of each command, and of which completions all that did not fail are
// known. Returns a command that failed, or NULL.
static const Reward *rollout_answers(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    const size_t texts = s->prompts * s->group_size;
    const Reward *failed = NULL;
    if (r->asks)
        pthread_join(r->asking, NULL);
    else
        rollout_ask(r);
    r->asks = 0;
    memset(r->answered, 1, texts);
    for (size_t k = s->rewards; k-- > 0;) {
        if (!r->command[k].failed) continue;
        failed = &r->command[k];
        for (size_t i = failed->answered; i < texts; i++) r->answered[i] = 0, r->rewards_of[k * texts + i] = NAN;
    }
    return failed;
}

// Asks for the rewards, or gets them from the rank that asks, and adds them up.
static void rollout_rewards(Rollout *r, size_t step) {
    const RolloutSettings *s = &r->settings;
    const size_t texts = s->prompts * s->group_size;
    const Reward *failed = rollout_asks(s) ? rollout_answers(r) : NULL;
    size_t left_out = 0;
    if (failed && s->stop) die("step %zu: %s; --reward-failure skip leaves such groups out", step, failed->message);
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
    }
    for (size_t p = 0; p < s->prompts; p++) left_out += !rollout_group_rewarded(r, p);
    rollout_count_failures(r, step, failed, left_out);
    for (size_t k = 0; failed && k < s->rewards; k++)
        if (r->command[k].failed) reward_restart(&r->command[k]);
}

// Metrics by TRL's names
static void rollout_group_metrics(Rollout *r, size_t p) {
    const size_t texts = r->settings.prompts * r->settings.group_size;
    static const char *const lengths[] = {"completions/mean_terminated_length", "completions/min_terminated_length",
                                          "completions/max_terminated_length"};
    size_t G = r->settings.group_size, spread = 0, ended = 0;
    const float *reward = r->reward + p * G;
    for (size_t g = 0; g < G; g++) {
        spread += reward[g] != reward[0];
        metric_deviation(&r->metrics, "reward_std", (double)reward[g]);
        for (size_t k = 0; k < r->settings.rewards; k++) {
            const double of = (double)r->rewards_of[k * texts + p * G + g];
            if (isnan(of)) continue;
            metric_add(&r->metrics, r->metric_names[k][0], of, 1);
            metric_deviation(&r->metrics, r->metric_names[k][1], of);
        }
        if (!r->completion[p * G + g].ended) continue;
        ended++, metric_length(&r->metrics, lengths, (double)r->completion[p * G + g].tokens);
    }
    metric_add(&r->metrics, "frac_reward_zero_std", !spread, 1);
    metric_add(&r->metrics, "completions/clipped_ratio", (double)(G - ended), (double)G);
}

// ---- sequences ------------------------------------------------------------------------------------------------------
// Packs the groups whose rewards are known into as few sequences as first-fit decreasing finds.
static void rollout_pack(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    size_t G = s->group_size, count = 0;
    for (size_t p = 0; p < s->prompts; p++) {
        size_t positions = 0;
        r->group_sequence[p] = SIZE_MAX;
        if (!rollout_group_rewarded(r, p)) continue;
        for (size_t g = 0; g < G; g++)
            positions += r->completion[p * G + g].prompt_tokens + r->completion[p * G + g].tokens - 1;
        group_advantages(r->reward + p * G, G, s->scale_rewards, r->advantage + p * G);
        rollout_group_metrics(r, p);
        r->packing.item[count].positions = (uint32_t)positions, r->packing.item[count++].sample = (uint32_t)p;
    }
    packing_sort(r->packing.item, r->packing.spare, count);
    r->sequences = count ? packing_first_fit(&r->packing, count) : 0;
    r->sequences = (size_t)max_over_ranks(s->world, (double)r->sequences);
    for (size_t p = 0; p < count; p++) r->group_sequence[r->packing.item[p].sample] = r->packing.bin[p];
    metric_add(&r->metrics, "left_out", (double)(s->prompts - count), (double)s->prompts);
}

// Appends a document to a sequence: it reads all but its last token, and predicts its completion. masked: of no weight
static void rollout_add_document(Batch *b, const Completion *text, size_t group, float reward, double advantage,
                                 int masked) {
    size_t n = text->prompt_tokens + text->tokens - 1;
    for (size_t t = 0; t < n; t++, b->N++) {
        int answers = t + 1 >= text->prompt_tokens;
        b->tokens[b->N] = t < text->prompt_tokens ? text->prompt[t] : text->ids[t - text->prompt_tokens];
        b->targets[b->N] = answers ? text->ids[t + 1 - text->prompt_tokens] : -1;
        b->loss_weight[b->N] = masked ? 0 : 1;
        b->position[b->N] = (int32_t)t;
        b->advantage[b->N] = (float)advantage;
    }
    b->group[b->documents] = group, b->reward[b->documents] = reward;
    b->document_start[++b->documents] = b->N;
}

static void rollout_fill(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    const size_t G = s->group_size;
    Batch rest = r->all;
    memset(&r->counts, 0, sizeof(r->counts));
    for (size_t i = 0; i < r->sequences; i++) {
        Batch *b = &r->sequence[i];
        size_t groups = 0;
        *b = rest;
        b->N = b->documents = b->document_start[0] = 0;
        for (size_t p = 0; p < s->prompts; p++) {
            if (r->group_sequence[p] != i) continue;
            for (size_t k = p * G; k < (p + 1) * G; k++)
                rollout_add_document(b, &r->completion[k], groups, r->reward[k], r->advantage[k],
                                     s->mask_truncated && !r->completion[k].ended);
            groups++;
        }
        if (!groups) {                      // other replicas have more sequences
            b->tokens[0] = r->documents[0]; // any token
            *b = batch_empty(b);
        }
        rest = batch_behind(rest, b->N, b->documents);
        rest.document_start++; // each sequence has an end of its own
        r->counts = target_counts_add(r->counts, batch_count(b));
    }
    r->counts = target_counts_over_sequences(s->world, r->counts);
}

// ---- a step ---------------------------------------------------------------------------------------------------------
static void rollout_begin(Rollout *r, StreamBP *streambp, size_t step) {
    const double begin = seconds_now();
    rollout_prompts(r, step);
    rollout_write(r, streambp);
    r->sampling_seconds += seconds_now() - begin;
}

// Old log-probabilities go from the sequences to `old`, or with `back` the other way.
static void rollout_move_old(Rollout *r, int back) {
    const size_t G = r->settings.group_size, room = r->settings.max_new_tokens;
    for (size_t i = 0; i < r->sequences; i++) {
        const Batch *b = &r->sequence[i];
        size_t d = 0;
        for (size_t k = 0; k < r->settings.prompts * G; k++) { // as rollout_fill has put them there
            if (r->group_sequence[k / G] != i) continue;
            const Completion *text = &r->completion[k];
            float *in_sequence = b->old + b->document_start[d++] + text->prompt_tokens - 1, *kept = r->old + k * room;
            memcpy(back ? in_sequence : kept, back ? kept : in_sequence, text->tokens * sizeof(float));
        }
    }
}

// Returns the number of sequences to train on. Not during a pass, whose arena it uses.
static size_t rollout_step(Rollout *r, StreamBP *streambp, size_t step) {
    const int waited = r->waiting == step;
    memset(&r->metrics, 0, sizeof(r->metrics));
    r->sampling_seconds = 0;
    if (!waited) rollout_begin(r, streambp, step);
    const double written = seconds_now();
    rollout_rewards(r, step);
    r->reward_seconds = seconds_now() - written;
    rollout_pack(r);
    rollout_fill(r);
    if (waited) rollout_move_old(r, 1);
    r->waiting = 0;
    return r->sequences;
}

static void rollout_exchange(Rollout *r) {
    const Batch all = r->all;
    Batch *const sequence = r->sequence;
    r->all = r->ahead, r->sequence = r->ahead_sequence;
    r->ahead = all, r->ahead_sequence = sequence;
}

// Writes the completions of `step`, the one behind that of rollout_step, and asks for their rewards without waiting.
// Returns the number of sequences whose log-probabilities were computed.
static size_t rollout_ahead(Rollout *r, StreamBP *streambp, size_t step) {
    const size_t texts = r->settings.prompts * r->settings.group_size, sequences = r->sequences;
    const TargetCounts counts = r->counts;
    const Metrics metrics = r->metrics;
    rollout_begin(r, streambp, step);
    for (size_t i = 0; i < texts; i++) r->reward[i] = 0, r->answered[i] = 1; // all, until they are known
    rollout_exchange(r);
    rollout_pack(r);
    rollout_fill(r);
    const size_t computed = r->sequences;
    for (size_t i = 0; i < computed; i++) forward_policy(streambp, &r->sequence[i], 0, r->sequence[i].old);
    rollout_move_old(r, 0);
    rollout_exchange(r);
    r->sequences = sequences, r->counts = counts, r->metrics = metrics;
    r->waiting = step;
    if (rollout_asks(&r->settings)) rollout_ask_ahead(r);
    return computed;
}

// ---- in a checkpoint ------------------------------------------------------------------------------------------------
static void rollout_save(Rollout *r) {
    const size_t room = r->settings.max_new_tokens;
    char *to = r->part.bytes;
    r->part.is_there = r->waiting != 0;
    for (size_t k = 0; k < r->settings.prompts * r->settings.group_size; k++) {
        const Completion *text = &r->completion[k];
        const uint32_t numbers[2] = {(uint32_t)text->tokens, (uint32_t)text->ended};
        memset(to, 0, rollout_record(&r->settings)); // behind the last token is nothing
        memcpy(to, numbers, sizeof(numbers)), to += sizeof(numbers);
        memcpy(to, text->ids, text->tokens * sizeof(int32_t)), to += room * sizeof(int32_t);
        memcpy(to, r->old + k * room, text->tokens * sizeof(float)), to += room * sizeof(float);
    }
}

// What was read becomes the completions of `step`. V: words
static void rollout_load(Rollout *r, size_t step, size_t V, const char *checkpoint) {
    const size_t room = r->settings.max_new_tokens;
    const char *from = r->part.bytes;
    rollout_prompts(r, step);
    for (size_t k = 0; k < r->settings.prompts * r->settings.group_size; k++) {
        Completion *text = &r->completion[k];
        uint32_t numbers[2];
        memcpy(numbers, from, sizeof(numbers)), from += sizeof(numbers);
        int good = numbers[0] > 0 && numbers[0] <= room;
        text->tokens = numbers[0], text->ended = numbers[1] != 0;
        memcpy(text->ids, from, room * sizeof(int32_t)), from += room * sizeof(int32_t);
        memcpy(r->old + k * room, from, room * sizeof(float)), from += room * sizeof(float);
        for (size_t t = 0; good && t < text->tokens; t++) good = text->ids[t] >= 0 && (size_t)text->ids[t] < V;
        if (!good)
            die("%s: rollout.bin: completion %zu is none of this model; remove the folder, and --resume takes the one "
                "before",
                checkpoint, k);
    }
    r->waiting = step;
}

// ---- evaluation -----------------------------------------------------------------------------------------------------
// The prompts of the data once, in their order, `steps` times P at most, and their completions by the same random
// numbers every time: metrics over all ranks, of the groups that have their rewards. Returns the number of these.
// `step`, of the training run, is for messages. Not during a pass. Collective.
static double rollout_evaluate(Rollout *r, StreamBP *streambp, size_t steps, size_t step) {
    const RolloutSettings *s = &r->settings;
    const size_t G = s->group_size, count = r->data->prompts, all = (count + s->step_prompts - 1) / s->step_prompts;
    double groups = 0;
    memset(&r->metrics, 0, sizeof(r->metrics));
    for (size_t i = 0; i < min_size(steps, all); i++) {
        rollout_begin(r, streambp, i + 1);
        rollout_rewards(r, step);
        for (size_t p = 0; p < s->prompts; p++) {
            double sum = 0;
            if (i * s->step_prompts + s->first + p >= count || !rollout_group_rewarded(r, p)) continue; // once each
            for (size_t g = 0; g < G; g++) sum += (double)r->reward[p * G + g];
            metric_add(&r->metrics, "reward", sum, (double)G);
            rollout_group_metrics(r, p);
            groups++;
        }
    }
    metrics_over_sequences(s->world, &r->metrics);
    sum_over_sequences(s->world, &groups, 1);
    return groups;
}

// ---- from the command line ------------------------------------------------------------------------------------------
#define ROLLOUT_SLOTS 64 // completions written side by side by default

// Divides the step's prompts over the replicas, one more or less for each.
static void rollout_assignment(RolloutSettings *s, World w, size_t prompts) {
    const size_t D = world_replicas(w), d = world_replica(w);
    if (prompts < D)
        die_usage("--batch %zu prompts cannot be dealt over %zu replicas; take --batch %zu or more", prompts, D, D);
    s->world = w;
    s->step_prompts = prompts, s->most_prompts = (prompts + D - 1) / D;
    s->first = prompts * d / D, s->prompts = prompts * (d + 1) / D - s->first;
}

// The name of a reward command that was given none: of its first word that names a file with an ending, without folder
// and ending (python3 checks/reward.py: reward), or else of its first word.
static void reward_name_of(const char *command, char name[REWARD_NAME]) {
    char words[256], *rest = words;
    const char *found = NULL;
    snprintf(words, sizeof(words), "%s", command);
    for (char *word; (word = strsep(&rest, " \t\n;|&\"'()<>"));) {
        char *base = strrchr(word, '/') ? strrchr(word, '/') + 1 : word, *end = strrchr(base, '.');
        if (!*base) continue;
        if (!found) found = base;
        if (!end || end == base || !end[1] || strchr(base, '=')) continue;
        *end = 0, found = base;
        break;
    }
    snprintf(name, REWARD_NAME, "%.39s", found ? found : "reward");
}

// The entries of a list "a,b" in text[size], a copy; refused where they are not as many as the reward commands.
static void reward_list(const char *option, const char *list, size_t count, char *text, size_t size,
                        const char *entry[REWARD_COMMANDS]) {
    size_t found = 0;
    char *rest = text;
    if (strlen(list) >= size) die_usage("--%s: the list is longer than %zu bytes; shorten it", option, size - 1);
    snprintf(text, size, "%s", list);
    for (char *word; (word = strsep(&rest, ","));)
        if (found++ < REWARD_COMMANDS) entry[found - 1] = word;
    if (found != count)
        die_usage("--%s has %zu entries for %zu --reward-command; give one for each", option, found, count);
}

// --reward-command, --reward-names, --reward-weights
static void rewards_from_options(RolloutSettings *s, const Options *o) {
    const char *entry[REWARD_COMMANDS];
    char text[1024];
    double size = 0;
    s->rewards = o->reward_command.count;
    if (s->rewards > REWARD_COMMANDS)
        die_usage("--reward-command: %zu commands were given, %d are the most", s->rewards, REWARD_COMMANDS);
    for (size_t k = 0; k < s->rewards; k++) {
        s->reward_command[k] = o->reward_command.path[k], s->reward_weight[k] = 1;
        reward_name_of(s->reward_command[k], s->reward_name[k]);
    }
    if (o->reward_names) {
        reward_list("reward-names", o->reward_names, s->rewards, text, sizeof(text), entry);
        for (size_t k = 0; k < s->rewards; k++) {
            if (!*entry[k] || strlen(entry[k]) >= REWARD_NAME || strpbrk(entry[k], "\"\\/ \t\n"))
                die_usage(
                    "--reward-names: '%.60s' is no name of at most %d characters without quotes, slashes and blanks",
                    entry[k], REWARD_NAME - 1);
            snprintf(s->reward_name[k], REWARD_NAME, "%s", entry[k]);
        }
    }
    for (size_t k = 0; k < s->rewards; k++)
        for (size_t i = 0; i < k; i++)
            if (!strcmp(s->reward_name[k], s->reward_name[i]))
                die_usage("two reward commands are called %s; --reward-names tells them apart", s->reward_name[k]);
    if (!o->reward_weights) return;
    reward_list("reward-weights", o->reward_weights, s->rewards, text, sizeof(text), entry);
    for (size_t k = 0; k < s->rewards; k++) {
        char *end;
        s->reward_weight[k] = strtod(entry[k], &end);
        if (!*entry[k] || *end || !(fabs(s->reward_weight[k]) <= 1e6))
            die_usage("--reward-weights: '%.60s' is no weight from -1e6 to 1e6", entry[k]);
        size += fabs(s->reward_weight[k]);
    }
    if (size == 0) die_usage("--reward-weights are all 0, which leaves no reward; give one that is not");
}

// The settings keep `text`; their end_ids are to be freed: the tokenizer's end tokens and those of --stop-ids.
static RolloutSettings rollout_from_options(const Run *run, const Prompt *text) {
    const Options *o = run->options;
    const size_t V = run->model.config.vocab_size,
                 own = text->tokenizer && !o->ignore_eos ? text->tokenizer->end_count : 0;
    const size_t ends = own + o->stop_ids.count;
    uint32_t *end_ids = (uint32_t *)checked_calloc(ends + 1, sizeof(uint32_t), "the ids that end a completion");
    RolloutSettings s = {0};
    for (size_t i = 0; i < own; i++) end_ids[i] = text->tokenizer->end_ids[i];
    for (size_t i = 0; i < o->stop_ids.count; i++) {
        if ((size_t)o->stop_ids.id[i] >= V)
            die_usage("--stop-ids: %d is outside the vocabulary of %zu", o->stop_ids.id[i], V);
        end_ids[own + i] = (uint32_t)o->stop_ids.id[i];
    }
    rollout_assignment(&s, run->settings.world, o->batch);
    s.group_size = o->group_size;
    s.max_new_tokens = o->max_new_tokens;
    s.slots = min_size(o->slots ? o->slots : ROLLOUT_SLOTS, s.most_prompts * s.group_size);
    s.sequence_tokens = s.group_size * o->seq_len;
    s.sampling = sampling_from_options(o);
    s.scale_rewards = scales_rewards(o);
    s.mask_truncated = o->mask_truncated;
    s.in_order = o->shuffle == SHUFFLE_OFF;
    s.stop = o->reward_failure == REWARD_FAILURE_STOP;
    s.reference = objective_needs_reference(&run->settings.objective), s.old = o->updates > 1 || o->overlap;
    s.overlap = o->overlap;
    s.reward_timeout = o->reward_timeout;
    rewards_from_options(&s, o);
    s.text = text, s.end_ids = end_ids, s.end_count = ends;
    return s;
}

// Returns the largest sequence, and sets the size of the key/value cache in *settings: what a run with rollouts plans
// for.
static SequenceBound rollout_plan(const RolloutSettings *rollout, const DataLoader *data, RunSettings *settings,
                                  size_t seq_len) {
    const size_t capacity = rollout_capacity(rollout, data);
    settings->rollout_slots = rollout->slots, settings->rollout_tokens = max_size(settings->rollout_tokens, capacity);
    if (capacity > seq_len)
        die_usage("prompts of up to %zu tokens with --max-new-tokens %zu are documents of %zu positions, --seq-len is "
                  "%zu; raise it, or shorten them",
                  data->longest_prompt, rollout->max_new_tokens, capacity, seq_len);
    return rollout_bound(rollout, data);
}

#endif
