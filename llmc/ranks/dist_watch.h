/*
How a rank waits for other ranks, and which of several failing ranks reports. Part of dist.c.

Waiting means polling MPI requests, so a waiting rank still listens, on a communicator of its own. A working rank
listens between pieces of work (watch_at_work). A rank that waits long asks the other ranks, WATCH_ASKS times within
--timeout. A rank that has not answered by then hangs, was stopped, or is busy with one thing (a file, a reward command)
for too long; the message names it. If all ranks answer but none has moved, they wait for each other, or for a network
that is down. There is no limit on waiting for a rank that answers and makes progress. To poll something other than MPI
(GPUs), call watch_moved, then watch_wait between polls.
*/
#ifndef LLMC_DIST_WATCH_H
#define LLMC_DIST_WATCH_H
#include "dist.h"
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX // leaves out MPI's C++ bindings
#define MPICH_SKIP_MPICXX
#endif
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#define WATCH_LISTEN  0.02 // s between two polls of a working rank
#define WATCH_ASKS    4    // questions to the other ranks within --timeout
#define WATCH_SILENCE 5.0  // s in which another rank's error should end this rank
#define WATCH_HOST    128  // bytes of a host's name
#define WATCH_NAMED   4    // most ranks that a message names

typedef enum { RANK_ASKS, RANK_ANSWERS, RANK_REPORTS, RANK_STOPS, WORD_KINDS } WordKind;

// A message between ranks
typedef struct {
    int64_t kind;
    int64_t moves;  // how often this rank began to wait or was seen at work
    int64_t point;  // for RANK_STOPS: the point at which this rank waits for the others
    char where[32]; // what the rank waits for, or waited for last
} Word;

static struct {
    MPI_Comm words; // communicator for questions and answers
    size_t ranks, rank;
    double timeout;           // s
    char (*host)[WATCH_HOST]; // [ranks]
    int64_t *process;         // [ranks] process ids of ranks that this rank can see, or 0
    Word own;                 // this rank's state
    Word *heard, *before;     // [ranks] answers to the last question, and to the question before it; RANK_ASKS: none
    Word *said;               // [WORD_KINDS,ranks] messages in flight
    MPI_Request *saying;      // [WORD_KINDS,ranks]
    double listened;          // s: time of the last poll while at work
    int64_t point;            // points of watch_stop_point passed so far
    int64_t *stops;           // [ranks] point at which each rank waits for the others; 0: unknown
    volatile sig_atomic_t other_reports; // 1: another rank has said that it prints an error
} watch;

// Sends a small message without waiting: a stopped rank may never receive it. At most one message of each kind is in
// flight to a rank; a second message would say the same.
static void watch_say(size_t to, WordKind kind) {
    const size_t place = (size_t)kind * watch.ranks + to;
    int sent;
    MPI_Test(&watch.saying[place], &sent, MPI_STATUS_IGNORE);
    if (!sent) return;
    watch.said[place] = watch.own;
    watch.said[place].kind = kind;
    MPI_Isend(&watch.said[place], (int)sizeof(Word), MPI_BYTE, (int)to, 0, watch.words, &watch.saying[place]);
}

static void watch_say_all(WordKind kind) {
    for (size_t r = 0; r < watch.ranks; r++)
        if (r != watch.rank) watch_say(r, kind);
}

// Tells the other ranks, once, that this rank waits for them at `point`.
static void watch_stop_at(int64_t point) {
    if (watch.stops[watch.rank]) return;
    watch.stops[watch.rank] = watch.own.point = point;
    watch_say_all(RANK_STOPS);
}

static void watch_listen(void) {
    MPI_Status status;
    Word word;
    int there;
    for (;;) {
        MPI_Iprobe(MPI_ANY_SOURCE, 0, watch.words, &there, &status);
        if (!there) return;
        MPI_Recv(&word, (int)sizeof(word), MPI_BYTE, status.MPI_SOURCE, 0, watch.words, MPI_STATUS_IGNORE);
        if (word.kind == RANK_ASKS) watch_say((size_t)status.MPI_SOURCE, RANK_ANSWERS);
        if (word.kind == RANK_ANSWERS) watch.heard[status.MPI_SOURCE] = word;
        if (word.kind == RANK_REPORTS) watch.other_reports = 1;
        if (word.kind != RANK_STOPS) continue;
        watch.stops[status.MPI_SOURCE] = word.point;
        watch_stop_at(watch.point + 1);
    }
}

// Answers the ranks that ask. Call it between two pieces of this rank's work.
void watch_at_work(void) {
    const double now = seconds_now();
    if (!watch.ranks || now - watch.listened < WATCH_LISTEN) return;
    watch.listened = now;
    watch.own.moves++;
    watch_listen();
}

void watch_pause(void) {
    const struct timespec pause = {0, 50000};
    nanosleep(&pause, NULL);
}

// Lets only the lowest of several ranks report that fail at about the same time (voice.before_error).
static void watch_before_error(int code) {
    const double begin = seconds_now(), patience = watch.rank ? 0.3 + fmin(0.02 * (double)watch.rank, 1.0) : 0.0;
    for (watch_listen(); !watch.other_reports && seconds_now() - begin < patience; watch_listen()) watch_pause();
    if (!watch.other_reports) {
        watch_say_all(RANK_REPORTS);
        for (size_t r = 0; r < watch.ranks; r++) // the launcher may end the other ranks before they listen
            if (r != watch.rank && watch.process[r]) kill((pid_t)watch.process[r], SIGURG);
        return;
    }
    while (seconds_now() - begin < patience + WATCH_SILENCE) watch_pause();
    MPI_Abort(MPI_COMM_WORLD, code);
}

static void watch_report(int number) { watch.other_reports = number; }

// Returns the first dead rank of this host, or watch.ranks. *living: the first living rank
static size_t watch_dead(size_t *living) {
    size_t dead = *living = watch.ranks;
    for (size_t r = watch.ranks; r-- > 0;)
        if (watch.process[r] && kill((pid_t)watch.process[r], 0) != 0 && errno == ESRCH)
            dead = r;
        else if (watch.process[r])
            *living = r;
    return dead;
}

// Tells whether another rank was killed (voice.others_died).
static int watch_others_died(void) {
    size_t living;
    return watch_dead(&living) < watch.ranks;
}

// Names a killed rank (voice.before_end). The launcher ends the other ranks; the lowest living rank on the killed
// rank's host names it.
static void watch_before_end(void) {
    const struct timespec pause = {0, 300000000};
    size_t living;
    const size_t dead = watch_dead(&living);
    char text[512];
    if (dead < watch.ranks && living == watch.rank && !watch.other_reports) {
        const int n = snprintf(text, sizeof(text),
                               "%s: %srank %zu on %s was killed, perhaps out of memory; the job ends; continue a "
                               "training run with --resume\n",
                               program_invocation_short_name, voice.name, dead, watch.host[dead]);
        if (write(STDERR_FILENO, text, min_size((size_t)n, sizeof(text) - 1)) < 0) return;
    }
    nanosleep(&pause, NULL);
}

// ---- waiting --------------------------------------------------------------------------------------------------------
// Lists the ranks that have not answered: "rank 1 on A, rank 2 on B and 5 more". Returns how many.
static size_t watch_missing(char *names, size_t size) {
    size_t missing = 0;
    int used = 0;
    names[0] = 0;
    for (size_t r = 0; r < watch.ranks; r++) {
        if (r == watch.rank || watch.heard[r].kind == RANK_ANSWERS) continue;
        if (missing++ < WATCH_NAMED)
            used += snprintf(names + used, size - (size_t)used, "%srank %zu on %s", used ? ", " : "", r, watch.host[r]);
    }
    if (missing > WATCH_NAMED) snprintf(names + used, size - (size_t)used, " and %zu more", missing - WATCH_NAMED);
    return missing;
}

// Ends the job when all ranks wait and none has moved between two questions.
__attribute__((noreturn)) static void watch_stuck(double waited) {
    for (size_t r = 0; r < watch.ranks; r++)
        if (r != watch.rank && strcmp(watch.heard[r].where, watch.own.where) != 0)
            die("deadlock: waiting for %s for %.0f s while rank %zu on %s waits for %s; please report it",
                watch.own.where, waited, r, watch.host[r], watch.heard[r].where);
    die("all ranks have waited in %s for %.0f s; check the network between the hosts", watch.own.where, waited);
}

// Evaluates the answers to the last question.
static void watch_judge(Wait *w, double now) {
    char names[WATCH_NAMED * (WATCH_HOST + 40)];
    const size_t missing = watch_missing(names, sizeof(names));
    Word *heard = watch.heard;
    if (missing && now - w->asked < watch.timeout) return;
    if (missing)
        die("%s did not reach %s within %.0f s and %s not answer. Hung or stopped, or slow: raise --timeout", names,
            watch.own.where, now - w->begin, missing > 1 ? "do" : "does");
    w->unanswered = 0;
    if (w->still > 0 && !memcmp(watch.heard, watch.before, watch.ranks * sizeof(Word))) {
        if (w->asked - w->still >= watch.timeout) watch_stuck(now - w->begin);
        return;
    }
    watch.heard = watch.before, watch.before = heard;
    w->still = w->asked;
}

double watch_timeout(void) { return watch.timeout; }

void watch_moved(const char *where) {
    snprintf(watch.own.where, sizeof(watch.own.where), "%s", where);
    watch.own.moves++;
}

static Wait watch_begin(const char *what) {
    watch_moved(what);
    return wait_from(seconds_now());
}

// Asks other ranks and answers them, between two polls of a request.
void watch_wait(Wait *w) {
    const double now = seconds_now();
    if (now - w->begin < WATCH_YIELD) {
        sched_yield();
        return;
    }
    watch_pause();
    watch_listen();
    if (w->unanswered) {
        watch_judge(w, now);
    } else if (now - w->asked >= watch.timeout / WATCH_ASKS) {
        memset(watch.heard, 0, watch.ranks * sizeof(Word));
        watch_say_all(RANK_ASKS);
        w->asked = now, w->unanswered = 1;
    }
}

// Waits until all of request[n] are complete.
static void wait_all(MPI_Request *request, int n, const char *what) {
    Wait wait = watch_begin(what);
    int done = 0;
    for (MPI_Testall(n, request, &done, MPI_STATUSES_IGNORE); !done;
         MPI_Testall(n, request, &done, MPI_STATUSES_IGNORE))
        watch_wait(&wait);
}

// Returns 1 if all ranks abandon their work at this point because one asks for it. All ranks pass points equally often.
// Ranks tell each other where they wait, and all stop at the farthest of these points.
static int watch_stop_point(int asks) {
    int64_t last = 0;
    watch.point++;
    watch_at_work();
    if (asks) watch_stop_at(watch.point);
    if (!watch.stops[watch.rank]) return 0;
    Wait wait = watch_begin("the end of the step");
    for (size_t r = 0; r < watch.ranks; r++) {
        while (!watch.stops[r]) watch_listen(), watch_wait(&wait);
        if (watch.stops[r] > last) last = watch.stops[r];
    }
    return watch.point == last;
}

static void watch_start(size_t ranks, size_t rank) {
    char own[WATCH_HOST] = "";
    struct sigaction report = {0};
    watch.ranks = ranks, watch.rank = rank, watch.timeout = 600;
    watch.host = (char(*)[WATCH_HOST])checked_calloc(ranks, WATCH_HOST, "the hosts of ranks");
    watch.heard = (Word *)checked_calloc(ranks, sizeof(Word), "words of ranks");
    watch.before = (Word *)checked_calloc(ranks, sizeof(Word), "words of ranks");
    watch.said = (Word *)checked_calloc(WORD_KINDS * ranks, sizeof(Word), "words of ranks");
    watch.saying = (MPI_Request *)checked_calloc(WORD_KINDS * ranks, sizeof(MPI_Request), "words of ranks");
    watch.stops = (int64_t *)checked_calloc(ranks, sizeof(int64_t), "words of ranks");
    for (size_t i = 0; i < WORD_KINDS * ranks; i++) watch.saying[i] = MPI_REQUEST_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &watch.words);
    gethostname(own, sizeof(own) - 1);
    MPI_Allgather(own, WATCH_HOST, MPI_BYTE, watch.host, WATCH_HOST, MPI_BYTE, watch.words);
    const int64_t process = getpid();
    watch.process = (int64_t *)checked_calloc(ranks, sizeof(process), "the processes of ranks");
    MPI_Allgather(&process, 1, MPI_INT64_T, watch.process, 1, MPI_INT64_T, watch.words);
    for (size_t r = 0; r < ranks; r++) // 0 on another host, or in another pid namespace of this host
        if (strcmp(watch.host[r], own) != 0 || kill((pid_t)watch.process[r], 0) != 0) watch.process[r] = 0;
    report.sa_handler = watch_report;
    report.sa_flags = SA_RESTART | SA_ONSTACK; // on a stack of its own, as in signals_prepare
    sigaction(SIGURG, &report, NULL);
    MPI_Barrier(watch.words); // wait until all ranks have started
    snprintf(voice.name, sizeof(voice.name), "rank %zu on %s: ", rank, own);
    voice.before_error = watch_before_error, voice.before_end = watch_before_end;
    voice.others_died = watch_others_died;
}

static void watch_stop(void) {
    for (size_t i = 0; i < WORD_KINDS * watch.ranks; i++)
        if (watch.saying[i] != MPI_REQUEST_NULL) MPI_Request_free(&watch.saying[i]);
    MPI_Comm_free(&watch.words);
    free(watch.host), free(watch.process), free(watch.heard), free(watch.before), free(watch.said), free(watch.saying);
    free(watch.stops);
    memset(&watch, 0, sizeof(watch)), memset(&voice, 0, sizeof(voice));
}

#endif
