/*
Rollouts: the batches of one step of online GRPO (arXiv 2402.03300). P prompts of the data, G completions of each by the
current model (sampler.h), rewards from the user's commands (reward.h), advantages within each prompt's group, and
packed sequences of whole groups to train on. A completion's reward is the weighted sum of its commands' rewards; a
completion without a reward excludes its group from the step. For distillation completions have no rewards: a teacher
answers each sequence (reference.h).

    rollout_bound      returns the largest sequence, rollout_capacity the longest text, for the plan
    rollout_allocate   allocates all memory and starts the commands
    rollout_step       step number s, from 1: fills `sequence`, target `counts` and `metrics`; 0: nothing to train on
    rollout_ahead      --overlap: writes completions of step s + 1 and asks for their rewards while step s is trained
    rollout_free       ends the commands and frees all memory

With an environment, completions are trajectories of turns (trajectory.h); rollout_open and rollout_close also start and
end its processes.

A step depends only on the seed, its number and the weights. Every epoch has a new order of prompts. Each replica takes
its share of the step's prompts and runs its own reward commands. It trains on the same number of sequences as the other
replicas, padded with empty sequences (batch.h). Ranks that share sequences divide the replica's prompts, write
completions of their part and exchange them; the first of these ranks asks for rewards.

With --overlap, rollout_ahead writes a step's completions before the updates of the previous step. They are off-policy
by one step, which the ratio to their old log-probabilities corrects. A checkpoint between two steps includes them
(rollout.bin): for each completion, in the order of prompts, the number of its tokens, whether it ended, its ids, old
log-probabilities and routes. Rewards are asked for again.
*/
#ifndef LLMC_ROLLOUT_H
#define LLMC_ROLLOUT_H
#include "trajectory.h"

// ---- prompts and completions ----------------------------------------------------------------------------------------
// Reads the step's prompts and prepares a completion for each member of their groups. Prompt number k of the run is
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

// Returns the prompts whose completions rank `rank` writes, among the ranks that share the replica's sequences.
static Range rollout_share(const RolloutSettings *s, size_t rank) {
    const size_t S = world_sp(s->world), begin = s->prompts * rank / S;
    const Range share = {begin, s->prompts * (rank + 1) / S - begin};
    return share;
}

// Writes this rank's completions and gathers the completions of all other ranks.
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
        if (r->route)
            dist_broadcast(RANKS_SEQUENCE, r->route + begin * r->text_routes, count * r->text_routes * sizeof(uint16_t),
                           rank);
    }
    for (size_t i = 0; i < texts; i++)
        r->completion[i].tokens = (size_t)r->lengths[i], r->completion[i].ended = r->lengths[texts + i];
}

// Adds the metrics of group p, under TRL's names.
static void rollout_group_metrics(Rollout *r, size_t p) {
    const size_t texts = r->settings.prompts * r->settings.group_size;
    static const char *const lengths[] = {"completions/mean_terminated_length", "completions/min_terminated_length",
                                          "completions/max_terminated_length"};
    const int agents = r->settings.environment.command != NULL, rewarded = rollout_has_rewards(&r->settings);
    size_t G = r->settings.group_size, spread = 0, ended = 0;
    const float *reward = r->reward + p * G;
    for (size_t g = 0; g < G; g++) {
        spread += reward[g] != reward[0];
        if (rewarded)
            metric_deviation(&r->metrics, "reward_std", (double)reward[g]);
        else // policy_loss has the lengths of completions with rewards
            metric_length(&r->metrics, completion_lengths, (double)r->completion[p * G + g].tokens);
        if (agents) trajectory_metrics(&r->metrics, &r->agents.text[p * G + g]);
        for (size_t k = 0; k < r->settings.rewards; k++) {
            const double of = (double)r->rewards_of[k * texts + p * G + g];
            if (isnan(of)) continue;
            metric_add(&r->metrics, r->metric_names[k][0], of, 1);
            metric_deviation(&r->metrics, r->metric_names[k][1], of);
        }
        if (agents || !r->completion[p * G + g].ended) continue;
        ended++, metric_length(&r->metrics, lengths, (double)r->completion[p * G + g].tokens);
    }
    if (rewarded) metric_add(&r->metrics, "frac_reward_zero_std", !spread, 1);
    if (!agents) metric_add(&r->metrics, "completions/clipped_ratio", (double)(G - ended), (double)G);
}

// ---- sequences ------------------------------------------------------------------------------------------------------
// Packs the groups with known rewards, or their trajectories, into sequences by first-fit decreasing of rows.
static void rollout_pack(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    const int agents = s->environment.command != NULL;
    size_t G = s->group_size, count = 0, groups = 0, *sequence = agents ? r->agents.sequence : r->group_sequence;
    for (size_t i = 0; i < r->agents.texts && agents; i++) sequence[i] = SIZE_MAX;
    for (size_t p = 0; p < s->prompts; p++) {
        size_t tokens = 0;
        r->group_sequence[p] = SIZE_MAX;
        if (!rollout_group_rewarded(r, p)) continue;
        r->group_sequence[p] = 0, groups++; // it is not left out
        group_advantages(r->reward + p * G, G, s->scale_rewards, r->advantage + p * G);
        if (agents) trajectories_advantages(r, p);
        rollout_group_metrics(r, p);
        for (size_t i = p * G; i < (p + 1) * G; i++) {
            tokens += r->completion[i].tokens;
            if (!agents && i + 1 < (p + 1) * G) continue; // a group is packed as a whole
            const size_t rows =
                agents ? trajectory_rows(s, &r->agents.text[i]) : rollout_rows(s, r->prompt_tokens[p], tokens);
            r->packing.item[count].positions = (uint32_t)rows;
            r->packing.item[count++].sample = (uint32_t)(agents ? i : p);
        }
    }
    packing_sort(r->packing.item, r->packing.spare, count);
    r->sequences = count ? packing_first_fit(&r->packing, count) : 0;
    r->sequences = (size_t)max_over_ranks(s->world, (double)r->sequences);
    for (size_t k = 0; k < count; k++) sequence[r->packing.item[k].sample] = r->packing.bin[k];
    metric_add(&r->metrics, "left_out", (double)(s->prompts - groups), (double)s->prompts);
}

// Appends a document to a sequence. The document's inputs are all tokens but the last token; its targets are the
// completion. masked: the completion has no weight
static void rollout_add_document(Batch *b, const Completion *text, size_t group, float reward, double advantage,
                                 int masked) {
    const BatchRoutes *routes = &b->routes;
    size_t n = text->prompt_tokens + text->tokens - 1;
    for (size_t t = 0; t < n; t++, b->N++) {
        int answers = t + 1 >= text->prompt_tokens;
        b->tokens[b->N] = t < text->prompt_tokens ? text->prompt[t] : text->ids[t - text->prompt_tokens];
        b->targets[b->N] = answers ? text->ids[t + 1 - text->prompt_tokens] : -1;
        b->loss_weight[b->N] = masked ? 0 : 1;
        b->position[b->N] = (int32_t)t;
        b->advantage[b->N] = (float)advantage;
        for (size_t l = 0; l < routes->layers; l++)
            memcpy(batch_route(b, l, b->N), text->route + (t * routes->layers + l) * routes->k,
                   routes->k * sizeof(uint16_t));
    }
    b->group[b->documents] = group, b->reward[b->documents] = reward;
    b->document_start[++b->documents] = b->N;
}

// Builds the tree of a sequence of groups, at *memory, which it advances.
static Tree *rollout_tree(Rollout *r, const Batch *b, size_t sequence, char **memory) {
    const RolloutSettings *s = &r->settings;
    size_t rows = 0, d = 0;
    for (size_t p = 0; p < s->prompts; p++) {
        size_t tokens = 0;
        if (r->group_sequence[p] != sequence) continue;
        for (size_t g = 0; g < s->group_size; g++) tokens += r->completion[p * s->group_size + g].tokens;
        rows += rollout_rows(s, r->prompt_tokens[p], tokens);
    }
    Tree *tree = tree_place(*memory, rows, b->documents);
    *memory += tree_bytes(rows, b->documents);
    for (size_t p = 0; p < s->prompts; p++) {
        const size_t shared = r->prompt_tokens[p] - 1;
        if (r->group_sequence[p] != sequence) continue;
        for (size_t g = 0; g < s->group_size; g++, d++)
            tree->order[d] = d, tree->common[d] = g && shared >= PREFIX_LEAST ? shared : 0;
    }
    return tree_build(tree, b, tree->order, tree->common);
}

static void rollout_fill(Rollout *r) {
    const RolloutSettings *s = &r->settings;
    const size_t G = s->group_size;
    const int agents = s->environment.command != NULL;
    char *trees = r->trees;
    Batch rest = r->all;
    memset(&r->counts, 0, sizeof(r->counts));
    for (size_t i = 0; i < r->sequences; i++) {
        Batch *b = &r->sequence[i];
        size_t groups = 0;
        *b = rest;
        b->N = b->documents = b->document_start[0] = 0;
        if (agents) trajectories_add(r, b, i);
        for (size_t p = 0; p < s->prompts && !agents; p++) {
            if (r->group_sequence[p] != i) continue;
            for (size_t k = p * G; k < (p + 1) * G; k++)
                rollout_add_document(b, &r->completion[k], groups, r->reward[k], r->advantage[k],
                                     s->mask_truncated && !r->completion[k].ended);
            groups++;
        }
        if (!b->documents) {                // only other replicas have sequences now
            b->tokens[0] = r->documents[0]; // this token is not trained on
            *b = batch_empty(b);
            memset(&b->routes, 0, sizeof(b->routes));
        } else if (trees) {
            b->tree = agents ? trajectories_tree(r, b, &trees) : rollout_tree(r, b, i, &trees);
        }
        rest = batch_behind(rest, b->N, b->documents);
        rest.document_start++; // document_start has one entry more per sequence: the end
        r->counts = target_counts_add(r->counts, batch_count(b));
    }
    r->counts = target_counts_over_sequences(s->world, r->counts);
}

// ---- a step ---------------------------------------------------------------------------------------------------------
static void rollout_begin(Rollout *r, StreamBP *streambp, size_t step) {
    const double begin = seconds_now();
    const int agents = r->settings.environment.command != NULL;
    rollout_prompts(r, step);
    if (agents)
        trajectories_write(r, streambp, step);
    else
        rollout_write(r, streambp);
    const double waited = agents ? r->agents.waited : 0;
    r->sampling_seconds += seconds_now() - begin - waited, r->reward_seconds += waited;
}

// Takes the rewards of a step's texts.
static void rollout_take_rewards(Rollout *r, size_t step) {
    const double begin = seconds_now();
    if (r->settings.environment.command)
        trajectories_rewards(r, step);
    else
        rollout_rewards(r, step);
    r->reward_seconds += seconds_now() - begin;
}

// Copies old log-probabilities from the sequences to `old`; with `back` from `old` to the sequences.
static void rollout_move_old(Rollout *r, int back) {
    const size_t G = r->settings.group_size, room = r->settings.max_new_tokens;
    for (size_t i = 0; i < r->sequences; i++) {
        const Batch *b = &r->sequence[i];
        size_t d = 0;
        for (size_t k = 0; k < r->settings.prompts * G; k++) { // in rollout_fill's order
            if (r->group_sequence[k / G] != i) continue;
            const Completion *text = &r->completion[k];
            float *in_sequence = b->old + b->document_start[d++] + text->prompt_tokens - 1, *kept = r->old + k * room;
            memcpy(back ? in_sequence : kept, back ? kept : in_sequence, text->tokens * sizeof(float));
        }
    }
}

// Makes the batches of a step. Returns the number of sequences to train on. Do not call it during a pass, whose arena
// it uses.
static size_t rollout_step(Rollout *r, StreamBP *streambp, size_t step) {
    const int waited = r->waiting == step;
    memset(&r->metrics, 0, sizeof(r->metrics));
    r->sampling_seconds = r->reward_seconds = 0;
    if (!waited) rollout_begin(r, streambp, step);
    rollout_take_rewards(r, step);
    rollout_pack(r);
    rollout_fill(r);
    if (waited) rollout_move_old(r, 1);
    r->waiting = 0;
    return r->sequences;
}

static void rollout_exchange(Rollout *r) {
    const Batch all = r->all;
    Batch *const sequence = r->sequence;
    char *const trees = r->trees;
    r->all = r->ahead, r->sequence = r->ahead_sequence, r->trees = r->ahead_trees;
    r->ahead = all, r->ahead_sequence = sequence, r->ahead_trees = trees;
}

// Writes the completions of `step`, the step after rollout_step's, and asks for their rewards without waiting. Returns
// the number of sequences whose log-probabilities were computed.
static size_t rollout_ahead(Rollout *r, StreamBP *streambp, size_t step) {
    const size_t texts = r->settings.prompts * r->settings.group_size, sequences = r->sequences;
    const TargetCounts counts = r->counts;
    const Metrics metrics = r->metrics;
    rollout_begin(r, streambp, step);
    for (size_t i = 0; i < texts; i++) r->reward[i] = 0, r->answered[i] = 1; // no reward is known: packs all groups
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
        memset(to, 0, rollout_record(r)); // zeros after the last token
        memcpy(to, numbers, sizeof(numbers)), to += sizeof(numbers);
        memcpy(to, text->ids, text->tokens * sizeof(int32_t)), to += room * sizeof(int32_t);
        memcpy(to, r->old + k * room, text->tokens * sizeof(float)), to += room * sizeof(float);
        if (r->route) memcpy(to, text->route, rollout_routes(r, text) * sizeof(uint16_t));
        to += r->text_routes * sizeof(uint16_t);
    }
}

// Restores the completions of `step` from the checkpoint's bytes.
static void rollout_load(Rollout *r, size_t step, const Config *config, const char *checkpoint) {
    const size_t V = config->vocab_size, E = config->num_experts;
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
        if (r->route) memcpy(text->route, from, r->text_routes * sizeof(uint16_t));
        from += r->text_routes * sizeof(uint16_t);
        for (size_t i = 0; good && i < rollout_routes(r, text); i++) good = text->route[i] < E;
        if (!good)
            die("%s: rollout.bin: completion %zu does not fit this model; remove the folder; --resume then takes the "
                "checkpoint before it",
                checkpoint, k);
    }
    r->waiting = step;
}

// ---- with an environment --------------------------------------------------------------------------------------------
// Allocates all memory and starts all commands, the environment's too.
static void rollout_open(Rollout *r, const RolloutSettings *settings, const Model *model, DataLoader *data) {
    rollout_allocate(r, settings, model, data);
    if (settings->environment.command) environment_open(r);
}

static void rollout_close(Rollout *r) {
    if (r->settings.environment.command) environment_close(r);
    rollout_free(r);
}

// ---- evaluation -----------------------------------------------------------------------------------------------------
// Evaluates up to `steps` x P prompts of the data once each, in order, with fixed random numbers. Computes metrics,
// over all ranks, of the groups with rewards; returns the number of these groups. step: step of the training run, for
// messages. Do not call it during a pass. Collective.
static double rollout_evaluate(Rollout *r, StreamBP *streambp, size_t steps, size_t step) {
    const RolloutSettings *s = &r->settings;
    const size_t G = s->group_size, count = r->data->prompts, all = (count + s->step_prompts - 1) / s->step_prompts;
    double groups = 0;
    memset(&r->metrics, 0, sizeof(r->metrics));
    for (size_t i = 0; i < min_size(steps, all); i++) {
        rollout_begin(r, streambp, i + 1);
        rollout_take_rewards(r, step);
        for (size_t p = 0; p < s->prompts; p++) {
            double sum = 0;
            if (i * s->step_prompts + s->first + p >= count || !rollout_group_rewarded(r, p))
                continue; // counts a prompt once
            for (size_t g = 0; g < G; g++) {
                sum += (double)r->reward[p * G + g];
                metric_length(&r->metrics, completion_lengths, (double)r->completion[p * G + g].tokens);
            }
            metric_add(&r->metrics, "reward", sum, (double)G);
            rollout_group_metrics(r, p);
            groups++;
        }
    }
    metrics_over_sequences(s->world, &r->metrics);
    sum_over_sequences(s->world, &groups, 1);
    return groups;
}

#endif
