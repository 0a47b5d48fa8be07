/*
The reward command: its answers in order at any speed of either side and any length of lines; every failure reported in
one line, in time, without a zombie or a leftover process; restarting; no allocation after opening. This program is also
the command: `test_reward --answer HOW` reads lines {"n": 12, "text": "..."} and answers them.
*/
#include "test/base/child.h"
#include "llmc/train/reward.h"

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

static char own_path[PATH_MAX]; // of this program

// ---- requests: n lines with texts of `length` bytes, made a piece at a time -----------------------------------------
typedef struct {
    size_t n, length, piece; // piece: most bytes made at once
    size_t line, at;         // the next byte
} Asked;

static size_t asked_lines(void *context, size_t command, char *out, size_t room) {
    (void)command;
    Asked *asked = (Asked *)context;
    size_t bytes = 0, most = asked->piece < room ? asked->piece : room;
    char head[64];
    while (bytes < most && asked->line < asked->n) {
        size_t begin = (size_t)snprintf(head, sizeof(head), "{\"n\": %zu, \"text\": \"", asked->line), at = asked->at++;
        out[bytes++] = at < begin                        ? head[at]
                       : at < begin + asked->length      ? 'x'
                       : at == begin + asked->length     ? '"'
                       : at == begin + asked->length + 1 ? '}'
                                                         : '\n';
        if (out[bytes - 1] == '\n') asked->line++, asked->at = 0;
    }
    return bytes;
}

static size_t asked_lines_of_each(void *context, size_t command, char *out, size_t room) {
    return asked_lines((Asked *)context + command, command, out, room);
}

static Asked asking(size_t n, size_t length) {
    Asked asked = {n, length, SIZE_MAX, 0, 0};
    return asked;
}

// ---- the command ----------------------------------------------------------------------------------------------------
// Reads a line and returns its number; ends the program at the end of the input.
static size_t answer_line(void) {
    size_t n = SIZE_MAX;
    int c;
    if (scanf("{\"n\": %zu", &n) != 1) exit(0);
    while ((c = getchar()) != '\n')
        if (c == EOF) exit(5); // within a line
    return n;
}

__attribute__((noreturn)) static void answer(const char *how) {
    for (;;) {
        size_t n = answer_line();
        if (!strcmp(how, "objects"))
            printf("  {\"why\": [%zu, \"a\\nb\"], \"reward\": %g}\r\n", n, 0.5 * (double)n);
        else if (!strcmp(how, "slowly"))
            usleep(2000), printf("%g\n", 0.5 * (double)n);
        else if (!strcmp(how, "in pieces")) // of an answer
            printf("%g", (double)n), fflush(stdout), usleep(500), printf(".5\n");
        else
            printf("%.17g\n", 0.5 * (double)n);
        fflush(stdout);
    }
}

static const char *answering(const char *how) {
    static char command[PATH_MAX + 64];
    snprintf(command, sizeof(command), "exec '%s' --answer '%s'", own_path, how);
    return command;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
static int ask(Reward *r, Asked asked, float *reward) {
    allocation_guard = 1;
    const int answered = rewards_ask(r, 1, asked_lines, &asked, asked.n, &reward, 1);
    allocation_guard = 0;
    return answered;
}

static void expect_rewards(Reward *r, Asked asked, double factor, double offset) {
    float *reward = (float *)case_memory((asked.n + 1) * sizeof(float));
    reward[asked.n] = -7;
    if (!ask(r, asked, reward)) test_fail("%s", r->message);
    for (size_t i = 0; i < asked.n; i++)
        if (reward[i] != (float)(factor * (double)i + offset)) test_fail("reward %zu is %g", i, (double)reward[i]);
    assert_true(reward[asked.n] == -7);
}

// Checks that every process of the group is gone, and none waits to be reaped.
static void expect_gone(pid_t group) {
    int tries = 0, status;
    assert_true(waitpid(-1, &status, WNOHANG) < 0 && errno == ECHILD);
    while (kill(-group, 0) == 0) { // reaped by init
        if (++tries == 30000) test_fail("group %ld is still there", (long)group);
        usleep(1000);
    }
}

static void close_and_expect_gone(Reward *r) {
    pid_t group = r->process;
    reward_close(r);
    expect_gone(group);
}

// A command asked for n rewards, in lines of `length` bytes
typedef struct {
    const char *command;
    size_t n, length;
    const char *words; // in the message
    size_t answered;   // rewards before the failure
} Verdict;

// Expects one line about each failure, in time; then a new command answers. timeout: seconds; less for those that hang
static void expect_verdicts(const Verdict *verdict, size_t count, double timeout) {
    float reward[40];
    for (size_t i = 0; i < count; i++) {
        const Verdict *v = &verdict[i];
        const double begin = seconds_now();
        Reward r;
        test_case("%.120s", v->command);
        reward_open(&r, v->command, NULL, timeout, 0);
        if (ask(&r, asking(v->n, v->length), reward)) test_fail("all were answered");
        if (!strstr(r.message, v->words)) test_fail("%s; expected: %s", r.message, v->words);
        if (strchr(r.message, '\n')) test_fail("not one line: %s", r.message);
        if (r.answered != v->answered) test_fail("%zu rewards are good, expected %zu", r.answered, v->answered);
        if (seconds_now() - begin > timeout + 20) test_fail("it took %.1f seconds", seconds_now() - begin);
        pid_t group = r.process;
        r.command = answering("plainly"), r.timeout = 60;
        reward_restart(&r);
        while (kill(-group, 0) == 0) usleep(1000);
        expect_rewards(&r, asking(3, 10), 0.5, 0);
        close_and_expect_gone(&r);
    }
}

// ---- the tests ------------------------------------------------------------------------------------------------------
static void expect_answers(const char *command, const Asked *asked, size_t count, double factor, double offset) {
    Reward r;
    test_case("%.100s", command);
    reward_open(&r, command, NULL, 300, 0);
    for (size_t i = 0; i < count; i++) expect_rewards(&r, asked[i], factor, offset);
    close_and_expect_gone(&r);
}

TEST(answers_in_order) {
    const Asked asked[] = {{1, 30, 1, 0, 0},    {41, 30, 1, 0, 0},    {21, 30, 7, 0, 0},
                           {1, 30, 4096, 0, 0}, {41, 30, 4096, 0, 0}, asking(21, 30)};
    expect_answers(answering("plainly"), asked, COUNT_OF(asked), 0.5, 0);
    expect_answers(answering("objects"), asked, COUNT_OF(asked), 0.5, 0);
    expect_answers(answering("slowly"), asked, COUNT_OF(asked), 0.5, 0);
    expect_answers(answering("in pieces"), asked, COUNT_OF(asked), 1, 0.5);
    // the shell's own commands: pipes, quotes, variables
    expect_answers("x='0.25'; while read -r line; do echo \"$x\" | cat; done", asked, 1, 0, 0.25);
}

// More than pipes hold in both directions: 10 MB in one line, in many, and 100,000 answers.
TEST(large_batches) {
    const Asked asked[] = {asking(1, 10000000), asking(1000, 10000), asking(100000, 1), asking(2, 1)};
    expect_answers(answering("plainly"), asked, COUNT_OF(asked), 0.5, 0);
}

// Hides a launcher's variables from the command; keeps the rest of the environment.
TEST(a_command_outside_the_ranks) {
    char names[] = "OMPI_COMM_WORLD_SIZE PMIX_RANK PMI_SIZE SLURM_STEP_NUM_TASKS SLURM_PROCID "
                   "OMPI_ALLOW_RUN_AS_ROOT SLURM_JOB_ID SLURM_NODELIST TEST_REWARD"; // the last four stay
    const Asked asked = asking(2, 1);
    for (char *name = strtok(names, " "); name; name = strtok(NULL, " ")) setenv(name, "2", 1);
    expect_answers("read line; env | grep -c -E '^(OMPI_COMM|PMIX_|PMI_|SLURM_STEP|SLURM_PROCID)'; read line; "
                   "env | grep -c -E '^(OMPI_ALLOW_RUN_AS_ROOT|SLURM_JOB_ID|SLURM_NODELIST|TEST_REWARD)='",
                   &asked, 1, 4, 0); // first none, then four
    for (const char *name = names; name < names + sizeof(names); name += strlen(name) + 1) unsetenv(name);
}

TEST(numbers) {
    static const char *const words[] = {"", "; expected a finite number",
                                        "; expected a number or {\"reward\": number}"};
    static const char *const answers[] = {
        "1|-2.5e-3|  7 |0|{\"reward\": 1}|{\"a\": {\"reward\": 2}, \"reward\": -3e2}",
        "NaN|nan|-inf|Infinity|1e999|{\"reward\": 1e999}|1e39",
        ("|one|1 2|1,|+1|0x10|true|Null|[1]|{}|1.0.0|e|-|{\"reward\": \"1\"}|{\"reward\": 1} 2|{\"reward\": 1|"
         "{\"rewards\": 1}|{\"reward\": 1, \"reward\": 2}|{\"reward\": nul}|{\"reward\": NaN}")};
    static const float values[] = {1, -2.5e-3f, 7, 0, 1, -300};
    char text[64];
    float reward;
    Reward r = {0};
    r.lines = r.sent = 1;
    for (size_t k = 0; k < COUNT_OF(answers); k++) {
        const char *answer = answers[k];
        for (size_t i = 0, length; *answer; i++, answer += length + (answer[length] != 0)) {
            length = strcspn(answer, "|");
            test_case("%.*s", (int)length, answer);
            r.answered = 0;
            assert_int_equal(reward_take(&r, memcpy(text, answer, length + 1), length, &reward), k == 0);
            assert_true(k ? strstr(r.message, words[k]) != NULL : reward == values[i]);
        }
    }
    r.answered = 0;
    assert_false(reward_take(&r, memcpy(text, "1\0002", 4), 3, &reward));
}

// A null is no failure.
TEST(nulls) {
    static const char *const answers[] = {"null", " null\r", "{\"reward\": null}", "{\"reward\": null, \"why\": 1}"};
    for (size_t i = 0; i < COUNT_OF(answers); i++) {
        char text[64];
        float reward = 7;
        Reward r = {0};
        r.lines = r.sent = 1;
        snprintf(text, sizeof(text), "%s", answers[i]);
        assert_true(reward_take(&r, text, strlen(text), &reward) && r.answered == 1 && isnan(reward));
    }
}

// Asks several commands at a time; each gets all lines. One that dies and one that hangs do not affect the others.
TEST(several_commands) {
    static const char *const commands[] = {"while read a; do sleep 0.05; echo 2; done", "read a; echo 5; exit 4",
                                           "read a; echo null; sleep 1000", "while read a; do echo ${#a}; done"};
    static const char *const names[] = {"slow", "dying", "hanging", "length"};
    float found[4][6], *reward[4];
    Asked asked[4];
    Reward r[4];
    pid_t group[4];
    for (size_t k = 0; k < 4; k++) {
        reward_open(&r[k], commands[k], names[k], 5.5, 0);
        asked[k] = asking(6, 100), reward[k] = found[k], group[k] = r[k].process;
    }
    allocation_guard = 1;
    assert_false(rewards_ask(r, 4, asked_lines_of_each, asked, 6, reward, 1));
    allocation_guard = 0;
    assert_true(!r[0].failed && r[1].failed && r[2].failed && !r[3].failed);
    assert_true(r[0].answered == 6 && r[1].answered == 1 && r[2].answered == 1 && r[3].answered == 6);
    assert_true(found[1][0] == 5 && isnan(found[2][0]));
    for (size_t i = 0; i < 6; i++) assert_true(found[0][i] == 2 && found[3][i] == found[3][0] && found[3][i] > 90);
    assert_non_null(strstr(r[1].message, "the reward command dying ended after 1 of 6 answers, with exit code 4"));
    assert_non_null(strstr(r[2].message, "the reward command hanging gave 1 of 6 answers within 5.5 seconds"));
    for (size_t k = 0; k < 4; k++) reward_close(&r[k]);
    for (size_t k = 0; k < 4; k++) expect_gone(group[k]);
}

TEST(commands_that_die) {
    static const Verdict verdicts[] = {
        {"exit 3", 4, 10, "ended after 0 of 4 answers, with exit code 3", 0},
        {"/nowhere/reward 2>/dev/null", 4, 10, "exit code 127 (there is no such command)", 0},
        {"read a; echo 1; read a; echo 2; exit 0", 4, 10, "ended after 2 of 4 answers, with exit code 0", 2},
        {"read a; echo 1; kill -9 $$", 4, 10, "was ended by signal 9 (Killed) after 1 of 4", 1},
        {"read a; printf 1; exit 0", 1, 10, "after 0 of 1 answers", 0},      // not a line
        {"head -c 100000 >/dev/null; exit 9", 40, 100000, "exit code 9", 0}, // while it is sent
        {"exec >&-; exec sleep 1000", 4, 10, "closed its output after 0 of 4 answers", 0}};
    expect_verdicts(verdicts, COUNT_OF(verdicts), 60);
}

TEST(commands_that_hang) {
    static const Verdict verdicts[] = {
        {"sleep 1000", 4, 10, "gave 0 of 4 answers within 2.5 seconds", 0},
        {"sleep 1000 | sleep 1001", 40, 100000, "gave 0 of 40", 0}, // and reads nothing
        {"read a; echo 1; read a; echo 2; cat >/dev/null", 4, 10, "gave 2 of 4", 2},
        {"trap '' TERM INT HUP; while :; do sleep 1000; done", 4, 10, "gave 0 of 4", 0},
        {"while read a; do printf 1; done; sleep 1000", 4, 10, "gave 0 of 4", 0},
        {"exec <&-; while :; do sleep 1000; done", 4, 10, "closed its input after 0 of 4", 0}};
    expect_verdicts(verdicts, COUNT_OF(verdicts), 2.5);
}

TEST(commands_that_print_garbage) {
    static const Verdict verdicts[] = {
        {"read a; echo 1; read a; echo 'Traceback (most'; cat >/dev/null", 4, 10,
         "answered 'Traceback (most' to line 2 of 4", 1},
        {"read a; printf '\\001\\377%0200d\\n' 7 | tr 0 x; cat >/dev/null", 4, 10, "answered '??xxxxxxxxxx", 0},
        {"read a; echo; cat >/dev/null", 4, 10, "answered '' to line 1", 0},
        {"read a; head -c 100000 /dev/zero | tr '\\0' 1; cat >/dev/null", 4, 10,
         "answered line 1 of 4 with more than 4096 bytes: '1111", 0},
        {"read a; echo 0; read a; echo nan; cat >/dev/null", 4, 10,
         "answered 'nan' to line 2 of 4; expected a finite number", 1},
        {"yes 1", 4, 10, "gave more answers than lines", 0},
        {"while read a; do echo 1; echo 2; done", 5, 10, "after 5 also '", 0},
        {"read a; echo 1; echo 2; cat >/dev/null", 1, 10, "after 1 also '2'", 0}};
    expect_verdicts(verdicts, COUNT_OF(verdicts), 60);
}

// A fault between two batches is reported at the next.
TEST(between_two_batches) {
    float reward;
    Reward r;
    reward_open(&r, "read a; echo 1; sleep 0.2; echo 2; cat >/dev/null", NULL, 60, 0);
    assert_true(ask(&r, asking(1, 10), &reward));
    struct pollfd answer_2 = {.fd = r.from, .events = POLLIN};
    assert_int_equal(poll(&answer_2, 1, 60000), 1);
    assert_false(ask(&r, asking(1, 10), &reward));
    assert_non_null(strstr(r.message, "gave more answers than lines: after 0 also '2'"));
    r.command = "read a; echo 1; exit 6";
    reward_restart(&r);
    assert_true(ask(&r, asking(1, 10), &reward));
    assert_false(ask(&r, asking(1, 10), &reward));
    assert_non_null(strstr(r.message, "ended after 0 of 1 answers, with exit code 6"));
    close_and_expect_gone(&r);
}

// The program's signal handlers, and its default SIGPIPE, are unchanged.
TEST(signals_stay_as_they_are) {
    static const Verdict deaf = {"exec <&-; exit 2", 40, 100000, "exit code 2", 0};
    struct sigaction after;
    sigset_t mask;
    expect_verdicts(&deaf, 1, 60);
    sigaction(SIGPIPE, NULL, &after);
    assert_true(after.sa_handler == SIG_DFL);
    sigpending(&mask);
    assert_false(sigismember(&mask, SIGPIPE));
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    assert_false(sigismember(&mask, SIGPIPE));
}

// ---- the command and its children end with the program, however that ends -------------------------------------------
static void start_and_end(const void *context) {
    const char *how = (const char *)context;
    Reward r;
    reward_open(&r, "trap '' TERM INT HUP; sh -c 'sleep 1000 & sleep 1001' & wait", NULL, 60, 0);
    fprintf(stderr, "%ld", (long)r.process);
    fflush(stderr);
    usleep(50000);
    if (!strcmp(how, "die")) exit(1);
    if (!strcmp(how, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(how, "interrupt")) kill(getpid(), SIGINT);
    if (!strcmp(how, "abort")) abort();
}

TEST(nothing_survives_the_program) {
    static const char *const ways[] = {"return", "die", "kill", "interrupt", "abort"};
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        test_case("%s", ways[i]);
        const Child *child = run_child(start_and_end, ways[i]);
        long group = strtol(child->err, NULL, 10);
        assert_true(group > 1);
        expect_gone((pid_t)group);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--answer")) answer(argv[2]);
    if (!realpath(argv[0], own_path)) return 1;
    RUN_LISTED(argc, argv, NULL);
}
