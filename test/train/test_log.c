// Output of a run: JSON, log.jsonl across crashes and resumes, step lines, and the progress bar on a pseudo-terminal.
#include "test/base/child.h"
#include "llmc/train/log.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

// Replaces libc's time: all records have one time.
time_t time(time_t *now) {
    const time_t moment = 1769860800;
    if (now) *now = moment;
    return moment;
}
#define AT_A_TIME ", \"time\": \"2026-01-31T12:00:00Z\"}\n"

// ---- JSON -----------------------------------------------------------------------------------------------------------
TEST(values_in_json) {
    static const double numbers[] = {0.1, 3e-4, 1.0 / 3, 8192, -0.0, NAN, INFINITY, -INFINITY};
    static const char *const strings[] = {"plain",
                                          "a\"b\\c/d",
                                          "\n\t\r\x01\x1f\x7f",
                                          "caf\303\251 \342\202\254 \360\237\230\200",
                                          "\200",  // continues nothing
                                          "a\303", // cut off
                                          "\303(", // not continuation bytes
                                          "\300\257",
                                          "\340\200\257",     // overlong
                                          "\355\240\200",     // surrogate
                                          "\364\220\200\200", // above U+10FFFF
                                          "\377\376"};
    char text[1024];
    JsonOut json = json_open_text(text, sizeof(text), JSON_LINE);
    json_array(&json, "empty"), json_array_end(&json);
    json_numbers(&json, "numbers", numbers, COUNT_OF(numbers));
    json_array(&json, "strings");
    for (size_t i = 0; i < COUNT_OF(strings); i++) json_text(&json, NULL, strings[i]);
    json_bytes(&json, NULL, "a\0b", 3), json_bytes(&json, NULL, "\303\251", 1); // bytes after the end are not read
    json_array_end(&json);
    json_array(&json, "list"), json_size(&json, NULL, SIZE_MAX), json_object(&json, NULL), json_object_end(&json);
    json_bool(&json, NULL, 1), json_null(&json, NULL), json_array_end(&json);
    json_object(&json, "inner"), json_text(&json, "a", "b"), json_text(&json, "none", NULL), json_object_end(&json);
    assert_true(json_text_end(&json) > 0);
    assert_string_equal(
        text, "{\"empty\": [], \"numbers\": [0.1, 0.0003, 0.3333333333333333, 8192, -0, null, null, null], "
              "\"strings\": [\"plain\", \"a\\\"b\\\\c/d\", \"\\n\\t\\u000d\\u0001\\u001f\\u007f\", "
              "\"caf\303\251 \342\202\254 \360\237\230\200\", \"\\ufffd\", \"a\\ufffd\", \"\\ufffd(\", "
              "\"\\ufffd\\ufffd\", \"\\ufffd\\ufffd\\ufffd\", \"\\ufffd\\ufffd\\ufffd\", "
              "\"\\ufffd\\ufffd\\ufffd\\ufffd\", \"\\ufffd\\ufffd\", \"a\\u0000b\", \"\\ufffd\"], "
              "\"list\": [18446744073709551615, {}, true, null], \"inner\": {\"a\": \"b\", \"none\": null}}\n");
}

TEST(numbers_come_back) { // random bits of a finite double
    for (size_t i = 0; i < 20000; i++) {
        const uint64_t bits = test_random();
        double value;
        char text[32];
        memcpy(&value, &bits, 8);
        if (isfinite(value) && strtod(number_text(value, text), NULL) != value)
            test_fail("%.17g came back as %s", value, text);
    }
}

// ---- log.jsonl ------------------------------------------------------------------------------------------------------
static StepReport report_of(size_t step) {
    const StepReport r = {.step = step,
                          .loss = 10.0 / (double)step,
                          .grad_norm = 1.5,
                          .learning_rate = 3e-4,
                          .tokens = 8192,
                          .computed = 2048,
                          .seconds = 0.5,
                          .flops = 1e12,
                          .peak_flops = 4e12,
                          .memory_bytes = 3e9,
                          .ranks = 1,
                          .data_seconds = 0.001};
    return r;
}

// Logs steps first..last; a validation every third step, a sample every fourth.
static void run_steps(RunLog *log, size_t first, size_t last) {
    for (size_t step = first; step <= last; step++) {
        StepReport r = report_of(step);
        const Evaluation found = {2.5, {.tokens = 1000}, {{{0}}, 0}};
        runlog_step(log, &r);
        if (step % 3 == 0) runlog_validation(log, step, &found);
        if (step % 4 == 0) runlog_sample(log, step, "tw\xc3\xb6 \"lines\"\n\xff", 14);
    }
}

TEST(records_are_complete_lines) {
#define OF_A_STEP                                                                                                      \
    ", \"grad_norm\": 1.5, \"lr\": 0.0003, \"tokens\": 8192, \"computed\": 2048, \"seconds\": 0.5, \"data_seconds\": " \
    "0.001, "                                                                                                          \
    "\"tokens_per_second\": 16384, \"flops_per_second\": 2000000000000, \"peak_share\": 0.5, "                         \
    "\"memory_bytes\": 3000000000" AT_A_TIME
    RunLog log = runlog_open(NULL, scratch_path("records"), 0, 4);
    allocation_guard = 1;
    run_steps(&log, 3, 4);
    allocation_guard = 0;
    runlog_close(&log);
    assert_string_equal(read_whole(log.path, NULL),
                        "{\"step\": 3, \"loss\": 3.3333333333333335" OF_A_STEP
                        "{\"step\": 3, \"val_loss\": 2.5, \"val_tokens\": 1000" AT_A_TIME
                        "{\"step\": 4, \"loss\": 2.5" OF_A_STEP
                        "{\"step\": 4, \"sample\": \"tw\xc3\xb6 \\\"lines\\\"\\n\\ufffd\"" AT_A_TIME);
}

// Cut the log anywhere and resume from any recorded step: the finished file shows no trace.
TEST(resuming_after_a_crash_at_any_byte) {
    const char *folder = scratch_path("crash");
    RunLog log = runlog_open(NULL, folder, 0, 13);
    size_t bytes, tried = 0;
    run_steps(&log, 1, 13);
    runlog_close(&log);
    char *whole = read_whole(log.path, &bytes);
    for (size_t cut = 0; cut <= bytes; cut += cut + 40 < bytes ? 1 + test_random_below(40) : 1) {
        // the log goes on only after a complete checkpoint, hence runs resume only from steps wholly in the log
        size_t complete = 0, at = 0;
        while (at < cut) {
            const char *end = (const char *)memchr(whole + at, '\n', bytes - at);
            size_t found = record_step(whole + at);
            assert_true(found != SIZE_MAX);
            at = (size_t)(end + 1 - whole);
            if (at <= cut) complete = found - 1;
        }
        if (cut == bytes) complete = 13;
        for (size_t step = 0; step <= complete; step += 1 + test_random_below(4)) {
            size_t length;
            write_file(log.path, whole, cut);
            log = runlog_open(NULL, folder, step, 13);
            run_steps(&log, step + 1, 13);
            runlog_close(&log);
            char *again = read_whole(log.path, &length);
            if (length != bytes || memcmp(again, whole, bytes) != 0)
                test_fail("cut at byte %zu of %zu, resumed from step %zu: another file", cut, bytes, step);
            tried++;
        }
    }
    printf("             %zu resumes\n", tried);
    assert_true(tried > 100);
}

TEST(only_later_steps_and_half_lines_go) {
    static const char *const others[] = {
        "\n", "{}\n", "{\"step\": }\n", "{\"loss\": 1, \"step\": 9}\n", "{\"step\": -9}\n", "# a note\n", "\r\n"};
    const char *folder = scratch_path("others"), *path = scratch_path("others/log.jsonl");
    char text[9000], expected[9000];
    mkdir(folder, 0777);
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        snprintf(text, sizeof(text),
                 "{\"step\": 1}\n%s { \"step\" :3, \"a\": 1}\n{\"step\": 4}\n%s{\"step\":5}\n{\"step\": 2}\n"
                 "{\"step\": 3, \"lo",
                 others[i], others[i]);
        snprintf(expected, sizeof(expected), "{\"step\": 1}\n%s { \"step\" :3, \"a\": 1}\n%s{\"step\": 2}\n", others[i],
                 others[i]);
        write_file(path, text, strlen(text));
        RunLog log = runlog_open(NULL, folder, 3, 9);
        runlog_close(&log);
        assert_string_equal(read_whole(path, NULL), expected);
    }
    snprintf(text, sizeof(text), "{\"step\": 4, \"a\": \"%07000d\"}\n{\"step\": 3, \"a\": %0900d}\n", 0, 0);
    write_file(path, text, strlen(text)); // longer than the read size
    records_truncate(path, 3);
    assert_string_equal(read_whole(path, NULL), strchr(text, '\n') + 1);
    write_file(path, "{\"step\": 1}\n\0\0\0\0", 16); // as after a power failure
    records_truncate(path, 3);
    assert_string_equal(read_whole(path, NULL), "{\"step\": 1}\n");
}

static void open_log(const void *folder) { runlog_open(NULL, (const char *)folder, 3, 9); }

TEST(pipes_and_links_are_not_written_to) {
    const char *folder = scratch_path("trap"), *path = scratch_path("trap/log.jsonl"), *mine = scratch_path("mine");
    mkdir(folder, 0777);
    write_file(mine, "{\"step\": 9}\n", 12);
    alarm(20); // a pipe must not be waited for
    assert_int_equal(symlink(mine, path), 0);
    expect_refused(open_log, folder, 1, "log.jsonl: is a symbolic link that is not followed");
    assert_true(unlink(path) == 0 && mkfifo(path, 0666) == 0);
    expect_refused(open_log, folder, 1, "log.jsonl: is not a regular file");
    assert_int_equal(unlink(path), 0);
    alarm(0);
    assert_string_equal(read_whole(mine, NULL), "{\"step\": 9}\n");
}

static size_t count_records(const char *text, const char *words) {
    size_t count = 0;
    while ((text = strstr(text, words))) count++, text++;
    return count;
}

// Runs one part, resumed from `step`, up to `last`. Returns the log's content.
static const char *run_part(const char *folder, const Run *run, size_t step, size_t last) {
    RunLog log = runlog_open(NULL, folder, step, 9);
    RunSource source = {{""}};
    strcpy(source.text[SOURCE_FOLDER], "/cache/models--a--b/snapshots/0123abc");
    runlog_options(&log, step, run, &source);
    run_steps(&log, step + 1, last);
    runlog_close(&log);
    return read_whole(log.path, NULL);
}

// Keeps an options record for every part with a remaining step.
TEST(options_are_in_the_log) {
    static const struct {
        size_t step, last, records;
    } parts[] = {{0, 3, 1}, {0, 2, 1},  // nothing was saved
                 {2, 5, 2}, {2, 6, 2},  // the earlier part has no remaining step
                 {6, 9, 3}, {9, 9, 3}}; // the last part has no steps
    char *argv[] = {(char *)"train", (char *)"--init=gpt2", (char *)"--data=d.bin"};
    const Options options = options_parse(3, argv);
    Run run = {0};
    run.assignment = assign_step(world_alone(), 1);
    const char *text = NULL;
    RunLog none = runlog_open(NULL, NULL, 0, 9);
    run.options = &options;
    const RunSource source = {{""}};
    runlog_options(&none, 0, &run, &source); // without --out there is no log
    runlog_close(&none);
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        text = run_part(scratch_path("options"), &run, parts[i].step, parts[i].last);
        if (count_records(text, "\"options\"") != parts[i].records) test_fail("part %zu: %s", i, text);
    }
    assert_memory_equal(text, "{\"step\": 1, \"version\": \"", 24);
    assert_non_null(
        strstr(text, "\", \"commit\": \"unknown\", \"revision\": \"0123abc\", ")); // make builds the commit in
    assert_non_null(
        strstr(text, "\"options\": {\"verb\": \"train\", \"model\": null, \"download\": \"ask\", \"init\": \"gpt2\""));
    assert_non_null(strstr(text, "}\n{\"step\": 3, \"version\""));
    assert_int_equal(count_records(text, "\"loss\""), 9);
}

static void open_fresh(const void *folder) {
    RunLog log = runlog_open(stdout, (const char *)folder, 0, 4);
    StepReport r = report_of(1);
    log.text = NULL;
    runlog_step(&log, &r);
    runlog_close(&log);
}

static void open_fresh_within_a_limit(const void *folder) {
    static const struct rlimit limit = {200, 200}; // room for an error line, not for a record
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0) open_fresh(folder);
}

TEST(what_cannot_be_written_is_said) {
    expect_refused(open_fresh, "/proc/nowhere", EXIT_RUNTIME, "/proc/nowhere: the folder cannot be created");
    expect_refused(open_fresh, "/dev/null", EXIT_RUNTIME, "/dev/null: the folder cannot be created: File exists");
    mkdir(scratch_path("taken"), 0777), mkdir(scratch_path("taken/log.jsonl"), 0777);
    expect_refused(open_fresh, scratch_path("taken"), EXIT_RUNTIME,
                   "taken/log.jsonl: cannot be opened: Is a directory");
    mkdir(scratch_path("full"), 0777);
    expect_refused(open_fresh_within_a_limit, scratch_path("full"), EXIT_RUNTIME,
                   "full/log.jsonl: File too large (raise ulimit -f, or change the file system); make room, then "
                   "continue with --resume");
}

// ---- step lines -----------------------------------------------------------------------------------------------------
static char *line_of(const StepReport *r, size_t steps, int verbose) {
    RunLog log = {0};
    char *text = (char *)case_memory(512);
    log.text = tmpfile(), log.steps = steps, log.verbose = verbose, log.pace = 100;
    report_gather(&log.since, r), log.gathered = 1;
    step_line(&log);
    child_slurp(log.text, text, 512);
    return text;
}

TEST(numbers_of_one_width) {
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0, " 0.0000"},        {1.5, " 1.5000"},  {-0.25, "-0.2500"},    {9.99996, " 10.000"},
                 {-123456, "-123456"},  {1e6, "  1e+06"},  {999999.6, "  1e+06"}, {-4e-4, " -4e-04"},
                 {0.00099, "  1e-03"},  {1e-8, "  1e-08"}, {1e-300, " 1e-300"},   {NAN, "    nan"},
                 {-INFINITY, "   -inf"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) assert_string_equal(human_fixed(cases[i].value, 6), cases[i].text);
}

// Loss, norm, speed and sizes of any magnitude leave labels and units in place.
TEST(step_lines_are_aligned) {
    static const double losses[] = {1e-4, 99999, -0.25, 1, 9.999999, 0.00123456, 1e-9, 12.5};
    static const double norms[] = {1e-8, 1e8, 1.5, 0, 99999.9, 0.0009999, 123456, 9.99996};
    static const double speeds[] = {0.001, 1, 16384, 9999999};
    static const char *const labels[] = {
        "/", "  loss ", "  norm ", "  lr ", " tok/s", " TFLOP/s", " memory ", " GiB", "% waiting for data  12:"};
    for (size_t i = 0; i < 3 * 8 * 8 * 2; i++) {
        const size_t steps = i % 3 == 0 ? 1 : i % 3 == 1 ? 100 : 1000000;
        const int verbose = i >= 3 * 8 * 8;
        StepReport r = report_of(i % 2 ? steps : 1);
        const char *first = line_of(&r, steps, verbose);
        r.loss = losses[i / 3 % 8], r.grad_norm = norms[i / 24 % 8], r.learning_rate = 1e-9, r.seconds = 1;
        r.tokens = speeds[i % 4], r.memory_bytes = i % 5 ? 1e6 : 9e13, r.flops = i % 7 ? 1e6 : 4e12, r.data_seconds = 1;
        const char *line = line_of(&r, steps, verbose);
        if (!verbose && strlen(line) > 120) test_fail("%zu columns: %s", strlen(line) - 1, line);
        for (size_t k = 0; k < (verbose ? COUNT_OF(labels) : 5); k++) {
            const char *was = strstr(first, labels[k]), *is = strstr(line, labels[k]);
            if (!was || !is || was - first != is - line)
                test_fail("'%s' is not aligned:\n%s%s", labels[k], first, line);
        }
    }
    StepReport r = report_of(7);
    assert_string_equal(
        line_of(&r, 10000, 0),
        "step     7/10000  loss  1.42857  norm 1.5000  lr 3.00e-04    16384 tok/s  12:00:00  11 d 13 h left\n");
    r.peak_flops = r.seconds = 0; // unknown
    assert_null(strstr(line_of(&r, 10000, 1), "peak"));
    assert_null(strstr(line_of(&r, 10000, 1), "inf"));
}

// Adds up the metrics of two micro-batches. A mean over nothing is null in JSON, and left out of step lines.
TEST(metrics) {
    static const struct {
        const char *name;
        double sum, count;
    } metrics[] = {{"rewards/chosen", 2, 8},
                   {"rewards/chosen", 6, 8},
                   {"rewards/margins", 12, 16},
                   {"logps/chosen", -200, 16},
                   {"rewards/accuracies", 10, 16},
                   {"reward", 2, 8},
                   {"kl", 0, 0},
                   {"clip_ratio/region_mean", 0, 1024},
                   {"completions/mean_length", 1024, 8},
                   {"entropy", 1536, 1024}};
#define SHOWN "acc 0.6250  margin  0.7500  reward  0.2500  length 128.00  entropy 1.5000  clipped 0.0000"
    static const char step[] =
        "\"memory_bytes\": 3000000000, \"rewards/chosen\": 0.5, \"rewards/margins\": 0.75, "
        "\"logps/chosen\": -12.5, \"rewards/accuracies\": 0.625, \"reward\": 0.25, \"kl\": null, "
        "\"clip_ratio/region_mean\": 0, \"completions/mean_length\": 128, \"entropy\": 1.5" AT_A_TIME;
    static const char validation[] =
        "{\"step\": 2, \"val_loss\": 0.5, \"val_tokens\": 100, \"val_rewards/chosen\": 0.5, "
        "\"val_rewards/margins\": 0.75, \"val_logps/chosen\": -12.5, \"val_rewards/accuracies\": 0.625, "
        "\"val_reward\": 0.25, \"val_kl\": null, \"val_clip_ratio/region_mean\": 0, \"val_completions/mean_length\": "
        "128, "
        "\"val_entropy\": 1.5" AT_A_TIME;
    FILE *people = tmpfile();
    RunLog log = runlog_open(people, scratch_path("metrics"), 0, 9);
    StepReport r = report_of(2);
    Evaluation found = {0.5, {.tokens = 100}, {{{0}}, 0}};
    char text[4096];
    for (size_t i = 0; i < COUNT_OF(metrics); i++)
        metric_add(&found.metrics, metrics[i].name, metrics[i].sum, metrics[i].count);
    r.metrics = found.metrics;
    log.verbose = log.shares = 1;
    allocation_guard = 1;
    runlog_step(&log, &r);
    runlog_validation(&log, 2, &found);
    r = report_of(3);
    runlog_step(&log, &r);
    allocation_guard = 0;
    runlog_close(&log);
    const char *records = read_whole(log.path, NULL);
    if (!strstr(records, step) || !strstr(records, validation)) test_fail("log.jsonl: %s", records);
    child_slurp(people, text, sizeof(text));
    if (!strstr(text, "step 2/9  loss  5.00000  " SHOWN "  norm 1.5000  ") ||
        !strstr(text, "  16384 tok/s   25 % computed  ") ||
        !strstr(text, "step 2/9  validation loss  0.50000  100 tokens  " SHOWN "\n") ||
        !strstr(text, "step 3/9  loss  3.33333  acc      -  margin       -  "))
        test_fail("%s", text);
}

// Returns how many lines a run of `steps` steps prints, by --log-every `given`. Those of the first and the last are
// there.
static size_t lines_of_run(size_t steps, size_t given) {
    RunLog log = {0};
    char line[512];
    size_t count = 0, step = 0, of;
    log.text = tmpfile(), log.steps = steps, log.every = lines_every(&log, given);
    for (StepReport r = report_of(1); r.step <= steps; r.step++) runlog_step(&log, &r);
    rewind(log.text);
    while (fgets(line, sizeof(line), log.text)) {
        assert_int_equal(sscanf(line, "step %zu/%zu", &step, &of), 2);
        if (!count++) assert_int_equal(step, 1);
    }
    fclose(log.text);
    assert_int_equal(step, steps);
    assert_null(strstr(line, "left")); // nothing is
    return count;
}

TEST(lines_of_a_run) {
    static const struct {
        size_t steps, given, lines;
    } cases[] = {{1, 0, 1},        {7, 0, 7},     {200, 0, 200}, {201, 0, 102}, {1000, 0, 201},
                 {100000, 0, 201}, {300, 1, 300}, {7, 3, 4},     {6, 3, 3},     {5, 100, 2}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%zu steps, every %zu", cases[i].steps, cases[i].given);
        assert_int_equal(lines_of_run(cases[i].steps, cases[i].given), cases[i].lines);
    }
}

// Four steps of a rollout, a line for the last three: no loss, which is about 0; means, and deviations of all rewards.
TEST(lines_with_rewards_are_means) {
    RunLog log = {0};
    char text[1024];
    log.text = tmpfile(), log.steps = 4, log.every = 4, log.by_rewards = 1;
    for (StepReport r = report_of(1); r.step <= 4; r.step++) {
        memset(&r.metrics, 0, sizeof(r.metrics));
        metric_add(&r.metrics, "reward", (double)r.step, 2);
        for (int i = 0; i < 2; i++) metric_deviation(&r.metrics, "reward_std", i ? (double)r.step : 0);
        metric_add(&r.metrics, "frac_reward_zero_std", r.step == 3, 1);
        metric_add(&r.metrics, "entropy", 1, 1); // with --verbose
        r.grad_norm = (double)r.step, r.loss = 1e-9;
        runlog_step(&log, &r);
    }
    child_slurp(log.text, text, sizeof(text));
    if (!strstr(text, "\nstep 4/4  reward  1.5000  std 1.7607  no signal 0.3333  norm 4.0000  lr 3.00e-04  12:00:00\n"))
        test_fail("%s", text);
}

// ---- divergence -----------------------------------------------------------------------------------------------------
// Steps of one run: loss, gradient norm, share of groups with equal rewards, and the expected sign.
TEST(signs_of_divergence_show_once) {
    static const struct {
        double loss, norm, equal;
        DivergenceSign sign;
        int doubts;
    } steps[] = {{2, 1, 0, SIGN_NONE, 0},      {1e-3, 0, 0, SIGN_NONE, 1},  {2, 0, 0, SIGN_NONE, 1},
                 {2, 1, 0, SIGN_NONE, 0},      {9.9, 0, 0, SIGN_NONE, 1},   {2, 0, 1, SIGN_NONE, 1},
                 {2, 0, 1, SIGN_NONE, 1},      {2, 0, 1, SIGN_REWARDS, 1},  {2, 0, 0, SIGN_NONE, 1},
                 {2, 0, 0, SIGN_NONE, 1},      {2, 0, 0, SIGN_GRADIENT, 1}, {2, 0, 0, SIGN_NONE, 1},
                 {10.1, 1, 0.5, SIGN_LOSS, 1}, {10.1, 1, 0.5, SIGN_NONE, 1}};
    Divergence d = {0}, other = {0};
    for (size_t i = 0; i < COUNT_OF(steps); i++) {
        StepReport r = report_of(i + 1);
        r.loss = steps[i].loss, r.grad_norm = steps[i].norm;
        metric_add(&r.metrics, "frac_reward_zero_std", steps[i].equal, 1);
        test_case("step %zu", i + 1);
        assert_int_equal(divergence_find(&d, &r, 1), steps[i].sign);
        assert_int_equal(divergence_doubts(&d), steps[i].doubts);
        assert_true(divergence_find(&other, &r, 0) != SIGN_LOSS); // losses of other objectives may be near 0, or below
    }
}

// ---- the progress bar -----------------------------------------------------------------------------------------------
TEST(time_for_people) {
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0 s"},          {59.4, "59 s"},       {59.6, "1 min 00 s"},
                 {200, "3 min 20 s"}, {7500, "2 h 05 min"}, {86400 * 3 + 3600 * 4, "3 d 04 h"},
                 {1e300, "?"},        {NAN, "?"},           {-3, "0 s"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(human_seconds(cases[i].seconds), cases[i].text);
}

TEST(the_bar_fits_any_width) {
    char line[PROGRESS_LINE];
    progress_text(line, 60, "training", 0.5, 200);
    assert_string_equal(line, "training  50 % [=============>             ] 3 min 20 s left");
    progress_text(line, 40, "training", 1, -1);
    assert_string_equal(line, "training 100 % [=======================]");
    for (size_t width = 1; width < 1000; width++) {
        for (int percent = -10; percent <= 110; percent += 10) {
            memset(line, 'x', sizeof(line));
            progress_text(line, width, "validating the model", percent / 100.0, 1e5);
            if (!memchr(line, 0, sizeof(line)) || strlen(line) > width) test_fail("width %zu: %.300s", width, line);
            if (width >= 60 && width < PROGRESS_LINE && strlen(line) != width) test_fail("width %zu: %s", width, line);
        }
    }
}

// Opens a pseudo-terminal: whatever is written to *screen arrives at the returned descriptor.
static int make_terminal(FILE **screen, unsigned short columns) {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    struct winsize size = {24, columns, 0, 0};
    if (master < 0 || grantpt(master) || unlockpt(master)) test_fail("no pseudo-terminal to be had");
    *screen = fopen(ptsname(master), "r+");
    assert_non_null(*screen);
    assert_int_equal(ioctl(master, TIOCSWINSZ, &size), 0);
    fcntl(master, F_SETFL, O_NONBLOCK);
    setenv("TERM", "xterm", 1);
    return master;
}

// Returns all that arrives; the kernel may delay it, up to a tenth of a second.
static const char *screen_text(int master) {
    static char text[4096];
    struct pollfd arrival = {master, POLLIN, 0};
    size_t length = 0;
    while (length < sizeof(text) - 1 && poll(&arrival, 1, 100) > 0) {
        ssize_t got = read(master, text + length, sizeof(text) - 1 - length);
        if (got <= 0) break;
        length += (size_t)got;
    }
    text[length] = 0;
    return text;
}

// Updates as if the last drawing were long ago.
static void update_late(Progress *progress, double done) {
    progress->drawn_at = -1e9;
    progress_update(progress, done);
}

TEST(the_bar_on_a_terminal) {
    FILE *screen;
    int master = make_terminal(&screen, 50), draws = 0;
    Progress progress = progress_begin(screen, "training", 0, 100);
    progress_update(&progress, 1);
    assert_string_equal(screen_text(master), ""); // short work needs no bar
    const char *seen;
    do { // again if this process had to wait: 10 seconds for a tenth, so 90 are left
        progress.begun_at = seconds_now() - 10;
        update_late(&progress, 10);
        seen = screen_text(master);
    } while (progress.drawn_at - progress.begun_at > 10.05);
    if (strncmp(seen, "\rtraining  10 % [=>", 19) != 0 || !strstr(seen, "] 1 min 30 s left\033[K"))
        test_fail("%s", seen);
    assert_int_equal(strlen(seen), 1 + 49 + 3); // one column less than the terminal, so that no line wraps
    const double begin = seconds_now();
    for (int i = 0; i < 1000; i++) { // at most ten times a second
        double before = progress.drawn_at;
        progress_update(&progress, 11);
        draws += progress.drawn_at != before;
    }
    assert_true(draws <= 1 + 10 * (seconds_now() - begin));
    screen_text(master);
    note("this note makes the bar give way"); // as errors do
    assert_string_equal(screen_text(master), "\r\033[K");
    progress_clear(&progress);
    assert_string_equal(screen_text(master), ""); // it is gone already
    update_late(&progress, 12);
    assert_non_null(strstr(screen_text(master), "training  12 %"));
    progress_end(&progress);
    assert_string_equal(screen_text(master), "\r\033[K");
    update_late(&progress, 13);
    assert_string_equal(screen_text(master), "");
    fclose(screen);
    close(master);
}

// The layers of a pass move the bar within a step, without knowing it; an inner bar leaves no trace.
TEST(the_bar_moves_within_a_step) {
    FILE *screen;
    int master = make_terminal(&screen, 80);
    Progress progress = progress_begin(screen, "training", 0, 4), inner = progress_begin(screen, "evaluating", 0, 1);
    const char *percent[] = {"training  30 % [", "training  40 % [", "training  50 % [", "training  50 % ["};
    progress_part(1); // of no bar
    progress_expect(&progress, 1, 1, 10);
    for (size_t i = 0; i < COUNT_OF(percent); i++) {
        progress.drawn_at = -1e9;
        progress_part(i ? 4 : 2);
        const char *seen = screen_text(master);
        if (!strstr(seen, percent[i])) test_fail("%zu: %s", i, seen);
    }
    progress_expect(&inner, 0, 1, 2);
    inner.drawn_at = -1e9;
    progress_part(1);
    assert_non_null(strstr(screen_text(master), "evaluating  50 % ["));
    progress_end(&inner);
    progress_part(1); // again of no bar
    assert_string_equal(screen_text(master), "\r\033[K");
    progress_end(&progress);
    fclose(screen);
    close(master);
}

// The bar of a run: no time left before a step is done, which may be slow; then of the mean of the later ones.
TEST(the_bar_of_a_run) {
    FILE *screen;
    const int master = make_terminal(&screen, 100);
    StepReport r = report_of(50);
    RunLog log = runlog_open(screen, NULL, 49, 100);
    log.progress.file = screen;                // in place of stderr
    assert_int_equal(lines_every(&log, 0), 5); // about 20 lines, which do not scroll all else away
    log.every = 10;
    update_late(&log.progress, 49.5);
    const char *seen = screen_text(master);
    if (strncmp(seen, "\rstep 49/100   49 % [=", 21) != 0 || strstr(seen, "left")) test_fail("%s", seen);
    log.progress.drawn_at = -1e9;
    runlog_step(&log, &r);
    seen = screen_text(master);
    if (strncmp(seen, "\r\033[Kstep  50/100  loss", 22) != 0 || !strstr(seen, " 25 s left") ||
        !strstr(seen, "\n\rstep 50/100  loss 0.2000  0.500 s a step   50 % ["))
        test_fail("%s", seen);
    r.step = 52, log.first_at = seconds_now() - 400; // two steps since the first
    log.progress.drawn_at = -1e9;
    runlog_step(&log, &r);
    seen = screen_text(master);
    if (strncmp(seen, "\rstep 52/100  loss 0.2000  3 min 20 s a step   52 % [", 51) != 0 ||
        !strstr(seen, "2 h 40 min left"))
        test_fail("%s", seen);
    runlog_sample(&log, 52, "text", 4);
    assert_memory_equal(screen_text(master), "\r\033[Kstep  52/100  sample:", 25);
    runlog_close(&log);
    fclose(screen);
    close(master);
}

TEST(no_bar_where_there_is_no_terminal) {
    enum { NOWHERE, FILE_ON_DISK, SCREEN };
    static const struct {
        size_t where;
        const char *term;
        int quiet, seen;
    } cases[] = {{NOWHERE, "xterm", 0, 0},
                 {FILE_ON_DISK, "xterm", 0, 0},
                 {SCREEN, "dumb", 0, 0},
                 {SCREEN, "xterm", 1, 0},
                 {SCREEN, "xterm", 0, 1}};
    FILE *files[] = {NULL, tmpfile(), NULL};
    int master = make_terminal(&files[SCREEN], 80);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        setenv("TERM", cases[i].term, 1);
        progress_off = cases[i].quiet;
        Progress progress = progress_begin(files[cases[i].where], "training", 0, 100);
        progress_off = 0;
        update_late(&progress, 50);
        if ((*screen_text(master) != 0) != cases[i].seen) test_fail("case %zu", i);
        progress_end(&progress);
    }
    assert_int_equal(ftell(files[FILE_ON_DISK]), 0);
    fclose(files[FILE_ON_DISK]), fclose(files[SCREEN]);
    close(master);
}

int main(int argc, char **argv) {
    setenv("TZ", "UTC", 1);
    RUN_LISTED(argc, argv, scratch_remove);
}
