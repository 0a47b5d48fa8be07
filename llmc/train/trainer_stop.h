/*
When a run saves, and how it ends before its last step (stop.h). All ranks decide the same: a signal to one rank stops
all, and the clock of rank 0 decides when to save.

A step that takes longer than the grace is abandoned within its pass. No weight has changed by then; a deferred step
(--update forward) is finished first. So the last finished step is saved.
*/
#ifndef LLMC_TRAINER_STOP_H
#define LLMC_TRAINER_STOP_H
#include "trainer.h"

static Trainer *trainer_listening; // the run that a signal stops

// Decides for all ranks after a finished step. Sets t->asked to a signal that one of them got. Returns whether it is
// time to save. Collective.
static int trainer_decide(Trainer *t) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    const double every = t->run.options->save_every.seconds;
    double said[5] = {0};
    for (size_t i = 0; i < 4; i++) said[i] = stop_asked() == signals[i];
    said[4] = dist_rank() == 0 && every > 0 && seconds_now() - t->saved_at >= every;
    dist_sum(RANKS_ALL, said, 5);
    for (size_t i = 4; i-- > 0 && !t->asked;)
        if (said[i] > 0) t->asked = signals[i];
    return said[4] > 0;
}

// Tells whether the run is between rollouts. Within a rollout it cannot stop, because the completions could not be
// written again.
static int trainer_is_between(const Trainer *t) { return t->state.step % t->run.options->updates == 0; }

// Tells whether the run stops now. Collective.
static int trainer_stops(Trainer *t) {
    trainer_decide(t);
    return t->asked && trainer_is_between(t);
}

// Tells whether the last finished step must be saved. Collective.
static int trainer_saves(Trainer *t) {
    const Options *o = t->run.options;
    const size_t step = t->state.step, interval = o->save_every.steps;
    const int due = trainer_decide(t);
    if (!t->has_folder || !trainer_is_between(t)) return 0;
    return due || (interval && step % interval == 0) || step == t->state.schedule.steps ||
           (o->keep_best && t->state.best_step == step);
}

// Saves the last finished step, and prints where it is and how to continue. Returns the exit code. Collective.
static int trainer_stop(Trainer *t, int signal, const char *given_up) {
    const size_t step = t->state.step;
    const int savable = t->has_folder && step;
    char where[PATH_MAX + 256] = "", path[PATH_MAX];
    if (savable) trainer_save(t);
    progress_clear(&t->log.progress);
    if (savable)
        checkpoint_path(path, t->folder.path, step, ""), snprintf(where, sizeof(where), "it is saved in %s", path);
    else if (!t->has_folder)
        snprintf(where, sizeof(where), "nothing is kept with --out none");
    else
        snprintf(where, sizeof(where), "there is nothing to save");
    if (!is_main_rank()) return stop_exit_code(signal);
    fprintf(stderr, "stopped by %s after step %zu of %zu%s: %s\n", stop_name(signal), step, t->state.schedule.steps,
            given_up, where);
    const int more = step < t->state.schedule.steps || trainer_validates(t);
    if (t->has_folder && t->folder.last != CHECKPOINT_NONE && more) {
        fprintf(stderr, "go on with%s:\n    ", dist_ranks() > 1 ? ", under the same launcher" : "");
        echo_quoted(stderr, program_called());
        fprintf(stderr, " train --resume%s --out ", t->given->resume == RESUME_AUTO ? " auto" : "");
        echo_quoted(stderr, t->folder.path);
        fputc('\n', stderr);
    }
    return stop_exit_code(signal);
}

// Abandons a step that takes too long, but not within a rollout. A half-used rollout cannot be saved: abandoning its
// next update would lose all steps since the last checkpoint.
static void trainer_give_up(void) {
    Trainer *t = trainer_listening;
    const size_t step = t->state.step;
    char what[40], given_up[128];
    if (!trainer_is_between(t)) return;
    stop.give_up = NULL; // saving polls again
    snprintf(what, sizeof(what), "step %zu", step + 1);
    if (trainer_validates(t))
        strcpy(what, "its validation");
    else if (step == t->state.schedule.steps)
        strcpy(what, "its sample");
    snprintf(given_up, sizeof(given_up), " (%s did not end within --grace %g s and is dropped)", what,
             t->run.options->grace);
    trainer_decide(t);
    const int code = trainer_stop(t, t->asked, given_up);
    runlog_close(&t->log);
    if (t->run.options->json) trainer_json(t);
    exit(code);
}

static void trainer_listen(Trainer *t) {
    trainer_listening = t;
    t->saved_at = seconds_now();
    stop_listen(t->run.options->grace, trainer_give_up, dist_ranks() > 1 ? dist_stop_point : NULL);
}

#endif
