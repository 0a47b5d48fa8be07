/*
The user's reward commands. Each runs as /bin/sh -c COMMAND and is started once; a step asks all commands at the same
time. Each line on standard input is a JSON object. The command answers each with a line on standard output, in order: a
JSON number, or an object with a number "reward"; null is no reward, as in TRL. The command shares our standard error.

    reward_open      starts a command
    rewards_ask      sends a batch of lines, reads the answers; 0: a command failed, see its `message`
    reward_restart   after a failure: ends what is left of the command and starts it again
    reward_close     ends a command

The process behind a command is general: environments and the renderer of agents run as such, too (environment.h). They
set `who`, `option`, `take` and the room of an answer, and exchange one line for one line:

    exchange_begin   sends a line
    exchange_ends    reads and writes what is ready; 1: the answer was taken, or the process has failed

Lines may have any length. They are made one buffer at a time while answers are read, so neither side blocks the other,
and nothing waits longer than the timeout. A command has a process group of its own. A guard (a shell that waits until
our end of a pipe closes) kills this group, however our program ends. Nothing is allocated after reward_open.
*/
#ifndef LLMC_REWARD_H
#define LLMC_REWARD_H
#include "llmc/base/stop.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#define REWARD_ANSWER 4096 // most bytes of an answer, including its newline
#define REWARD_BUFFER ((size_t)1 << 16)
#define REWARD_GRACE  1.0  // seconds that a command has for its last answers and exit code after its input is closed
#define REWARD_LOOK   0.5  // seconds between two polls for a request to stop
#define REWARD_LINGER 0.01 // seconds to wait for a surplus answer; a later one fails at the next batch

#define REWARD_COMMANDS 16

// Writes the next bytes of a command's lines, including newlines, at most `room` bytes (at least reward.room). Returns
// 0 if there are no more
typedef size_t (*RewardLines)(void *context, size_t command, char *out, size_t room);

typedef struct Reward Reward;

struct Reward {
    const char *command, *name; // name: NULL if there is only one command
    const char *who, *option;   // for messages: "the reward command"; option of the time limit
    // Takes an answer text[bytes] without its newline; may overwrite text[bytes]. Returns 0 after reward_fail
    int (*take)(Reward *r, char *text, size_t bytes, void *to);
    double timeout;        // seconds for the answers to a batch
    pid_t process, guard;  // 0: none; `process` leads its process group
    int to, from, guarded; // descriptors: the command's input, its output, the pipe that the guard watches; -1: none
    char **environment;    // environment of the command, ends with NULL
    char *out;             // [room] lines to send
    size_t room, out_begin, out_end;
    char *answer; // [answer_room] beginning of an incomplete answer
    size_t answer_room, answer_bytes;
    // the last batch
    size_t lines, sent, answered; // lines of the batch; newlines written; answers read
    int more;                     // 1: some lines have not been made yet
    int closed, ended;            // closed: the command closed its input; ended: it has ended or closed its output
    int failed;
    double deadline;
    char message[512]; // what went wrong
};

// ---- the command and its guard --------------------------------------------------------------------------------------
// Returns our environment without the variables with which a launcher (Open MPI, MPICH, Slurm) names a rank. An MPI
// program that the command starts would otherwise act as that rank. The job's nodes, and settings for nested launches,
// stay. Strings are shared.
static char **reward_environment(void) {
    static const char *const launcher[] = {
        "OMPI_",     "ORTE_",      "PRTE_",        "PMIX_",         "PMI_",          "MPI_LOCAL",   "HYDI_",
        "MV2_COMM_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID=", "SLURM_GTIDS", "SLURM_TASK_PID"};
    static const char kept[] = "OMPI_ALLOW_RUN_AS_ROOT";
    size_t count = 0, used = 0;
    while (environ[count]) count++;
    char **environment = (char **)checked_calloc(count + 1, sizeof(char *), "the environment of the reward command");
    for (size_t i = 0; i < count; i++) {
        int left_out = 0;
        for (size_t k = 0; k < sizeof(launcher) / sizeof(launcher[0]); k++)
            left_out |= !strncmp(environ[i], launcher[k], strlen(launcher[k]));
        if (!left_out || !strncmp(environ[i], kept, strlen(kept))) environment[used++] = environ[i];
    }
    return environment;
}

static void reward_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC)) die("no pipe to a command: %s; raise the limit with ulimit -n", strerror(errno));
}

// Starts sh -c script argument as leader of a new process group. in, out: the shell's standard input and output; -1:
// ours. Spawns the shell, because a fork would keep a copy of every page that training then changes.
static pid_t reward_spawn(const Reward *r, const char *script, const char *argument, int in, int out, int deaf) {
    char *argv[5] = {(char *)"sh", (char *)"-c", (char *)script, (char *)argument, NULL};
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t defaults, blocked;
    pid_t process;
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    sigaddset(&defaults, SIGXFSZ);
    if (deaf)
        sigfillset(&blocked);
    else
        sigemptyset(&blocked);
    posix_spawn_file_actions_init(&files);
    if (in >= 0) posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    if (out >= 0) posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setsigmask(&attributes, &blocked);
    int error = posix_spawn(&process, "/bin/sh", &files, &attributes, argv, r->environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error) die("%s cannot be started: /bin/sh: %s", r->who, strerror(error));
    return process;
}

static void reward_start(Reward *r) {
    int input[2], output[2], guarded[2];
    char group[32];
    reward_pipe(input), reward_pipe(output), reward_pipe(guarded);
    r->process = reward_spawn(r, r->command, NULL, input[0], output[1], 0);
    snprintf(group, sizeof(group), "-%ld", (long)r->process);
    r->guard = reward_spawn(r, "read line; kill -9 \"$0\" 2>/dev/null", group, guarded[0], -1, 1);
    close(input[0]), close(output[1]), close(guarded[0]);
    r->to = input[1], r->from = output[0], r->guarded = guarded[1];
    fcntl(r->to, F_SETFL, O_NONBLOCK), fcntl(r->from, F_SETFL, O_NONBLOCK);
    r->answer_bytes = 0;
}

static void reward_reap(pid_t process) {
    while (waitpid(process, NULL, 0) < 0 && errno == EINTR) continue;
}

// Kills the command's process group, then reaps the command. Until then the command's process id cannot be reused.
static void reward_stop(Reward *r) {
    if (!r->process) return;
    kill(-r->process, SIGKILL);
    reward_reap(r->process);
    kill(r->guard, SIGKILL);
    reward_reap(r->guard);
    if (r->to >= 0) close(r->to);
    close(r->from), close(r->guarded);
    r->process = r->guard = 0;
    r->to = r->from = r->guarded = -1;
}

static int reward_take(Reward *r, char *text, size_t bytes, void *to);

// Starts a command that was described by `of`: its who, option, take and answer_room. room: most bytes that are made at
// once, or 0
static void reward_open_as(Reward *r, Reward of, const char *command, const char *name, double timeout, size_t room) {
    *r = of;
    r->command = command, r->name = name, r->timeout = timeout;
    r->room = max_size(room, REWARD_BUFFER);
    r->out = (char *)checked_malloc(r->room, "lines for a command");
    r->answer = (char *)checked_malloc(r->answer_room, "the answer of a command");
    r->environment = reward_environment();
    reward_start(r);
}

// Starts a reward command. room: most bytes that `lines` of rewards_ask makes at once, or 0
static void reward_open(Reward *r, const char *command, const char *name, double timeout, size_t room) {
    Reward of = {0};
    of.who = "the reward command", of.option = "--reward-timeout", of.take = reward_take;
    of.answer_room = REWARD_ANSWER;
    reward_open_as(r, of, command, name, timeout, room);
}

static void reward_restart(Reward *r) {
    reward_stop(r);
    reward_start(r);
}

// Waits at most `seconds` for the command to end. Returns 1 if it has ended; it is not reaped yet.
static int reward_ended(const Reward *r, double seconds, siginfo_t *how) {
    const struct timespec pause = {0, 1000000};
    double until = seconds_now() + seconds;
    do {
        how->si_pid = 0;
        if (waitid(P_PID, (id_t)r->process, how, WEXITED | WNOHANG | WNOWAIT) == 0 && how->si_pid) return 1;
        nanosleep(&pause, NULL);
    } while (seconds_now() < until);
    return 0;
}

// Closes the command's input, which tells it to end. Kills it after a second.
static void reward_close(Reward *r) {
    siginfo_t how;
    if (r->process && r->to >= 0) {
        close(r->to);
        r->to = -1;
        reward_ended(r, 1, &how);
    }
    reward_stop(r);
    free(r->out), free(r->answer), free(r->environment);
    memset(r, 0, sizeof(*r));
}

// ---- verdicts -------------------------------------------------------------------------------------------------------
// Sets the message of a failure. Returns 0.
__attribute__((format(printf, 2, 3))) static int reward_fail(Reward *r, const char *format, ...) {
    size_t used =
        (size_t)snprintf(r->message, sizeof(r->message), "%s %s%s", r->who, r->name ? r->name : "", r->name ? " " : "");
    va_list args;
    r->failed = 1;
    va_start(args, format);
    vsnprintf(r->message + used, sizeof(r->message) - used, format, args);
    va_end(args);
    return 0;
}

// Returns an answer for a message, shortened and on one line. It is valid until the next call.
static const char *reward_quote(const char *text, size_t bytes) {
    static char quote[80];
    const size_t most = min_size(bytes, 60);
    for (size_t i = 0; i < most; i++) {
        const unsigned char c = (unsigned char)text[i];
        quote[i] = c < 0x20 || c >= 0x7f ? '?' : (char)c;
    }
    strcpy(quote + most, bytes > most ? "..." : "");
    return quote;
}

static int reward_died(Reward *r) {
    siginfo_t how;
    r->ended = 1;
    if (!reward_ended(r, fmin(1, r->deadline - seconds_now()), &how))
        return reward_fail(r, "closed its output after %zu of %zu answers", r->answered, r->lines);
    if (how.si_code == CLD_EXITED)
        return reward_fail(r, "ended after %zu of %zu answers, with exit code %d%s", r->answered, r->lines,
                           how.si_status, how.si_status == 127 ? " (there is no such command)" : "");
    return reward_fail(r, "was ended by signal %d (%s) after %zu of %zu answers", how.si_status,
                       strsignal(how.si_status), r->answered, r->lines);
}

// ---- answers --------------------------------------------------------------------------------------------------------
// Parses a zero-terminated number. Returns 0 if it is not one. Accepts NaN and infinities, which the caller refuses;
// null becomes NAN.
static int reward_number(const char *text, double *value, int *missing) {
    char *end;
    *missing = !strcmp(text, "null");
    if (*missing) return 1;
    if (!*text || strchr("+ \t\f\v\r", *text) || strpbrk(text, "xX(")) return 0; // strtod accepts more than JSON
    *value = strtod(text, &end);
    return *end == 0;
}

// Parses the number of an object's key "reward", which must occur once.
static int reward_of_object(const char *text, double *value, int *missing) {
    cJSON *object = cJSON_ParseWithOpts(text, NULL, 1);
    const cJSON *item, *found = NULL;
    size_t count = 0;
    int good;
    cJSON_ArrayForEach(item, object) {
        if (item->string && !strcmp(item->string, "reward")) found = item, count++;
    }
    *missing = count == 1 && cJSON_IsNull(found);
    good = count == 1 && (cJSON_IsNumber(found) || *missing);
    if (good) *value = found->valuedouble;
    cJSON_Delete(object);
    return good;
}

// Takes an answer, text[bytes] without its newline; text[bytes] may be overwritten. Returns 0 if it is invalid. A
// missing reward is NAN.
static int reward_take(Reward *r, char *text, size_t bytes, void *to) {
    const char *quote = reward_quote(text, bytes);
    float *reward = (float *)to;
    double value;
    int missing;
    while (bytes && strchr(" \t\r", text[bytes - 1])) bytes--;
    while (bytes && strchr(" \t", *text)) text++, bytes--;
    text[bytes] = 0;
    if (strlen(text) != bytes ||
        !(*text == '{' ? reward_of_object(text, &value, &missing) : reward_number(text, &value, &missing)))
        return reward_fail(r, "answered '%s' to line %zu of %zu; expected a number or {\"reward\": number}", quote,
                           r->answered + 1, r->lines);
    if (missing) value = NAN;
    if (!missing && (!isfinite(value) || fabs(value) > 3e38))
        return reward_fail(r, "answered '%s' to line %zu of %zu; expected a finite number", quote, r->answered + 1,
                           r->lines);
    reward[r->answered++] = (float)value;
    return 1;
}

// Reads available answers, also surplus ones.
static int reward_read(Reward *r, void *to) {
    ssize_t got = read(r->from, r->answer + r->answer_bytes, r->answer_room - r->answer_bytes);
    char *begin = r->answer, *newline;
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (got <= 0) return reward_died(r);
    r->answer_bytes += (size_t)got;
    const char *end = r->answer + r->answer_bytes;
    while ((newline = (char *)memchr(begin, '\n', (size_t)(end - begin)))) {
        const size_t bytes = (size_t)(newline - begin);
        if (r->answered == r->sent) {
            r->answered = 0; // answers can no longer be matched to lines
            return reward_fail(r, "gave more answers than lines: after %zu also '%s'", r->sent,
                               reward_quote(begin, bytes));
        }
        if (!r->take(r, begin, bytes, to)) return 0;
        begin = newline + 1;
    }
    r->answer_bytes = (size_t)(end - begin);
    memmove(r->answer, begin, r->answer_bytes);
    if (r->answer_bytes < r->answer_room) return 1;
    return reward_fail(r, "answered line %zu of %zu with more than %zu bytes: '%s'", r->answered + 1, r->lines,
                       r->answer_room, reward_quote(r->answer, r->answer_bytes));
}

// ---- asking ---------------------------------------------------------------------------------------------------------
// Writes without SIGPIPE: blocks the signal, and consumes it unless it was pending before.
static ssize_t reward_write_quietly(int fd, const char *text, size_t bytes) {
    const struct timespec at_once = {0, 0};
    sigset_t pipe_signal, before, pending;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
    ssize_t put = write(fd, text, bytes);
    int error = errno;
    if (put < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE))
        while (sigtimedwait(&pipe_signal, NULL, &at_once) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return put;
}

// Handles a closed input: the command cannot answer lines that were never sent.
static void reward_input_closed(Reward *r) {
    r->closed = 1;
    if (r->sent < r->lines) r->deadline = fmin(r->deadline, seconds_now() + REWARD_GRACE);
}

static void reward_write(Reward *r) {
    ssize_t put = reward_write_quietly(r->to, r->out + r->out_begin, r->out_end - r->out_begin);
    if (put < 0 && errno != EAGAIN && errno != EINTR) reward_input_closed(r);
    for (size_t i = 0; put > 0 && i < (size_t)put; i++) r->sent += r->out[r->out_begin + i] == '\n';
    if (put > 0) r->out_begin += (size_t)put;
}

// Tells whether there is something to write to the command.
static int reward_writes(const Reward *r) { return r->out_begin < r->out_end && !r->closed; }

static void reward_ends(const Reward *r, struct pollfd ends[2]) {
    ends[0].fd = r->from, ends[0].events = POLLIN;
    ends[1].fd = r->closed ? -1 : r->to, ends[1].events = (short)(reward_writes(r) ? POLLOUT : 0);
    ends[0].revents = ends[1].revents = 0;
}

// Reads and writes the descriptors that are ready. Returns 0 if the command has failed.
static int reward_serve(Reward *r, const struct pollfd ends[2], void *to) {
    const int writing = reward_writes(r);
    if (ends[0].revents && !reward_read(r, to))
        return 0; // read first: these answers cannot belong to lines that
                  // are sent next
    if (writing && ends[1].revents)
        reward_write(r);
    else if (ends[1].revents & POLLERR)
        reward_input_closed(r);
    return 1;
}

static void reward_wait(struct pollfd *ends, size_t count, double seconds) {
    if (poll(ends, (nfds_t)count, (int)ceil(1e3 * fmin(fmax(seconds, 0), 1e6))) < 0) // interrupted, or out of memory
        for (size_t i = 0; i < count; i++) ends[i].revents = 0;
}

static void reward_begin(Reward *r, size_t lines) {
    r->deadline = seconds_now() + r->timeout;
    r->lines = lines, r->sent = r->answered = 0, r->more = 1;
    r->closed = r->ended = r->failed = 0;
    r->out_begin = r->out_end = 0;
}

static int reward_is_done(const Reward *r) {
    return r->failed || (r->answered >= r->lines && !r->more && r->out_begin == r->out_end);
}

// Fails a command that is not done in time.
static void reward_check_time(Reward *r, double now) {
    const int late = !reward_is_done(r) && now >= r->deadline;
    if (late && r->closed)
        reward_fail(r, "closed its input after %zu of %zu answers", r->answered, r->lines);
    else if (late)
        reward_fail(r, "gave %zu of %zu answers within %g seconds; %s allows more", r->answered, r->lines, r->timeout,
                    r->option);
}

// Gets the rewards of n lines from each of `count` commands: reward[k][n] from command k. Returns 0 if some have failed
// and need a restart; their first `answered` rewards are valid. polls: the run may end meanwhile (stop.h)
static int rewards_ask(Reward *r, size_t count, RewardLines lines, void *context, size_t n, float *const *reward,
                       int polls) {
    struct pollfd ends[2 * REWARD_COMMANDS];
    int good = 1;
    for (size_t k = 0; k < count; k++) reward_begin(&r[k], n);
    for (size_t busy = 1; busy;) {
        const double now = seconds_now();
        double least = HUGE_VAL;
        busy = 0;
        for (size_t k = 0; k < count; k++) {
            if (!r[k].failed && r[k].more && r[k].out_begin == r[k].out_end) {
                r[k].out_begin = 0, r[k].out_end = lines(context, k, r[k].out, r[k].room);
                r[k].more = r[k].out_end > 0;
            }
            reward_check_time(&r[k], now);
            reward_ends(&r[k], ends + 2 * k);
            if (reward_is_done(&r[k]))
                ends[2 * k].fd = ends[2 * k + 1].fd = -1;
            else
                busy++, least = fmin(least, r[k].deadline - now);
        }
        if (!busy) break;
        reward_wait(ends, 2 * count, fmin(least, REWARD_LOOK));
        if (polls) stop_poll(0);
        for (size_t k = 0; k < count; k++)
            if (ends[2 * k].fd >= 0) reward_serve(&r[k], ends + 2 * k, reward[k]);
    }
    // surplus answers are a failure; a command that ended after all answers fails only at the next batch
    for (double until = seconds_now() + REWARD_LINGER, now; (now = seconds_now()) < until;) {
        for (size_t k = 0; k < count; k++) {
            reward_ends(&r[k], ends + 2 * k);
            if (r[k].failed || r[k].ended) ends[2 * k].fd = ends[2 * k + 1].fd = -1;
        }
        reward_wait(ends, 2 * count, until - now);
        for (size_t k = 0; k < count; k++)
            if (ends[2 * k].fd >= 0 && !reward_serve(&r[k], ends + 2 * k, reward[k]) && r[k].ended) r[k].failed = 0;
    }
    for (size_t k = 0; k < count; k++) good &= !r[k].failed;
    return good;
}

// ---- exchanges: one line for one line -------------------------------------------------------------------------------
// Sends a line, with its newline. Takes ownership of `line`.
static void exchange_begin(Reward *r, char *line, size_t bytes) {
    free(r->out);
    reward_begin(r, 1);
    r->out = line, r->room = r->out_end = bytes, r->more = 0;
}

// Reads and writes what is ready (ends: polled since reward_ends). Returns 1 if the answer was taken to *to or the
// process has failed.
static int exchange_ends(Reward *r, const struct pollfd ends[2], void *to) {
    if (ends[0].revents || ends[1].revents) reward_serve(r, ends, to);
    reward_check_time(r, seconds_now());
    return reward_is_done(r);
}

#endif
