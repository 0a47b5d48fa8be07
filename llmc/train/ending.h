/*
The last lines of a run: its duration, validations, folder, and what to type next. After --resume they describe only the
resumed part.
*/
#ifndef LLMC_ENDING_H
#define LLMC_ENDING_H
#include "llmc/generate/prompt.h"
#include "run_state.h"

typedef struct {
    double begin, seconds; // clock and total seconds of training before the first step
    size_t tokens;         // tokens trained on before
    double first, last;    // validation losses, with --rollout rewards
    size_t validations;
} Ending;

static Ending ending_begin(const RunState *state) {
    Ending ending = {0};
    ending.begin = seconds_now(), ending.seconds = state->seconds, ending.tokens = state->tokens;
    return ending;
}

// Records a validation.
static void ending_validation(Ending *e, double value) {
    if (!e->validations++) e->first = value;
    e->last = value;
}

// Prints the lines. stopped: a signal ended the run and has printed how to go on
static void ending_print(FILE *out, const Ending *e, const Run *run, const RunState *state, int stopped) {
    const Options *o = run->options;
    const double tokens = (double)(state->tokens - e->tokens), seconds = state->seconds - e->seconds;
    char path[PATH_MAX];
    fprintf(out, "ended    step %zu of %zu after %s, %.0f tokens, %.0f tok/s\n", state->step, state->schedule.steps,
            human_seconds(seconds_now() - e->begin), tokens, seconds > 0 ? tokens / seconds : 0);
    if (e->validations && state->best_step)
        fprintf(out, "validation  %s %.6g at first, %.6g at best (step %zu), %.6g at last\n",
                o->rollout ? "reward" : "loss", e->first, state->best, state->best_step, e->last);
    if (!o->out || stopped) return;
    const int writes = tokenizer_of_run(run, path) || run->model.config.vocab_size == 256;
    const size_t name = strlen(o->out) - text_ends_with(o->out, "/");
    fprintf(out, "saved    %s\nnext     ", o->out);
    echo_quoted(out, program_called());
    fputs(" sample --model ", out);
    echo_quoted(out, o->out);
    fprintf(out, " %s\n         ", writes ? "--prompt TEXT" : "--prompt-ids 1,2,3");
    echo_quoted(out, program_called());
    fputs(" convert --model ", out);
    echo_quoted(out, o->out);
    const int apart = lora_has_outer(&run->lora) && run->model.config.tie_word_embeddings; // not mergeable (merge.h)
    fputs(apart ? " --adapter-only --out " : " --out ", out);
    snprintf(path, sizeof(path), "%.*s-hf", (int)name, o->out);
    echo_quoted(out, path);
    fputc('\n', out);
}

#endif
