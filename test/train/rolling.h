/*
A run with rollouts on a tiny model, with exactly its planned memory.
*/
#ifndef TEST_ROLLING_H
#define TEST_ROLLING_H
#include "test/model/tiny.h"
#include "llmc/run/bound.h"
#include "llmc/train/rollout.h"

typedef struct {
    Model model;
    DataLoader data;
    Prompt text;
    RolloutSettings settings; // with commands that are kept here
    TinyRun run;
    Rollout rollout;
    char command[2 * PATH_MAX], render[2 * PATH_MAX];
} Rolling;

// Returns settings of sampling and training; the caller adds sizes, ends and commands.
static RolloutSettings rolling_settings(void) {
    RolloutSettings s = {0};
    s.sampling.temperature = 1, s.sampling.top_p = 1, s.sampling.seed = 12;
    s.scale_rewards = 1, s.stop = 1, s.reward_timeout = 100;
    return s;
}

// Opens a run whose data and settings are set.
static void rolling_begin(Rolling *r, const char *config, Objective objective, Method method) {
    const Config parsed = config_from_text(config, "test", EXIT_USAGE);
    RunSettings run = {0};
    r->model = model_build(&parsed, ops_device->stored);
    r->settings.text = &r->text;
    double *weights = tiny_weights(&r->model, 5);
    run.model = &r->model, run.chunk = 8, run.logits_chunk = 3, run.backward = 1, run.method = method;
    run.gradient_type = r->model.dtype;
    run.objective = objective;
    run.rollout_slots = r->settings.slots, run.rollout_tokens = rollout_capacity(&r->settings, &r->data);
    Batch shape = batch_shape(rollout_bound(&r->settings, &r->data));
    tiny_begin(&r->run, ops_device, run, weights, NULL, &shape);
    batch_free(&shape);
    free(weights);
    rollout_open(&r->rollout, &r->settings, &r->model, &r->data);
}

static void rolling_close(Rolling *r) {
    rollout_close(&r->rollout);
    tiny_end(&r->run);
    dataloader_close(&r->data);
    model_free(&r->model);
    free(r);
}

// Runs a step; checks that nothing allocates, and that the arena is as before.
static size_t step(Rolling *r, size_t number) {
    const size_t used = r->run.arena->used;
    allocation_guard = 1;
    const size_t sequences = rollout_step(&r->rollout, &r->run.s, number);
    allocation_guard = 0;
    assert_true(r->run.arena->used == used);
    return sequences;
}

#endif
