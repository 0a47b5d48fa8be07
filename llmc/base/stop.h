/*
A request to end a run early. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks for it; a second one ends the process at
once. Work continues until its step is finished. If that takes longer than the grace, the next poll abandons the step.

    stop_listen   makes signals requests from now on
    stop_asked    returns the signal that asked, or 0
    stop_poll     called between pieces of work: chunks, layers, drawn tokens, polls of a reward command
*/
#ifndef LLMC_STOP_H
#define LLMC_STOP_H
#include "utils.h"
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#define STOP_ECHO 0.1 // seconds in which a second signal repeats the first: launchers signal process and group

static struct {
    volatile sig_atomic_t signal; // the first request; 0: none
    volatile sig_atomic_t listens;
    volatile double asked_at; // s: time of the first request
    double grace;             // s: grace, how long a step may still take
    const char *doing;        // what goes on after the request; NULL: a step, which is then saved
    void (*give_up)(void);    // saves the last finished step and ends the program; NULL: there is nothing to abandon
    // with several ranks: decides whether all ranks abandon the step at this point; NULL: one process
    int (*agree)(int asks);
} stop;

static const char *stop_name(int number) {
    return number == SIGINT ? "SIGINT" : number == SIGHUP ? "SIGHUP" : number == SIGUSR1 ? "SIGUSR1" : "SIGTERM";
}

// Returns the exit code of a run stopped by signal `number`. SIGUSR1, a scheduler's request, exits with 0.
static int stop_exit_code(int number) { return number == SIGUSR1 ? 0 : 128 + number; }

static void stop_listen(double grace, void (*give_up)(void), int (*agree)(int asks)) {
    stop.grace = grace, stop.give_up = give_up, stop.agree = agree;
    signal(SIGPIPE, SIG_IGN); // Ctrl-C also ends tee and similar readers: writing to a closed pipe must not end the run
    stop.listens = 1;
}

// Records a request; called from a signal handler. Returns 1 if the request is taken; 0: the signal ends the process
static int stop_ask(int number) {
    static const char end[] = "; a second signal ends at once\n";
    const char *text = stop.doing ? stop.doing : ": finishing this step and saving it";
    struct timespec now;
    if (!stop.listens) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now); // seconds_now, repeated because a handler may call clock_gettime
    const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (stop.signal) return seconds - stop.asked_at < STOP_ECHO;
    stop.asked_at = seconds;
    stop.signal = number;
    // an mpirun that ends its job no longer reads: a blocked write must not keep this rank from saving
    if (stop.agree) fcntl(STDOUT_FILENO, F_SETFL, fcntl(STDOUT_FILENO, F_GETFL) | O_NONBLOCK);
    if (is_main_rank() &&
        (write(STDERR_FILENO, "\n", 1) < 0 || write(STDERR_FILENO, stop_name(number), strlen(stop_name(number))) < 0 ||
         write(STDERR_FILENO, text, strlen(text)) < 0 || write(STDERR_FILENO, end, sizeof(end) - 1) < 0))
        return 1; // the terminal is closed
    return 1;
}

static int stop_asked(void) { return stop.signal; }

// Abandons the step, and does not return, if a request has outlived the grace. alike: all ranks pass this point equally
// often
static void stop_poll(int alike) {
    if (!stop.give_up) return;
    const int late = stop.signal && seconds_now() - stop.asked_at > stop.grace;
    if (stop.agree ? alike && stop.agree(late) : late) stop.give_up();
}

#endif
