// What a run says: JSON, log.jsonl across crashes and resumes, step lines, and the progress bar on a terminal of our
// own.
#include "test/base/child.h"
#include "llmc/train/log.h"
#include <fcntl.h>
#include <poll.h>

__attribute__((weak)) const Ops *const ops_device = NULL; // no tensors here

// ---- JSON -----------------------------------------------------------------------------------------------------------
static char *json_of_number(double value) {
    FILE *file = tmpfile();
    JsonOut json = json_open(file);
    char *text = (char *)case_memory(256);
    json_number(&json, NULL, value);
    child_slurp(file, text, 256);
    return text;
}

static char *json_of_bytes(const char *bytes, size_t count) {
    FILE *file = tmpfile();
    JsonOut json = json_open(file);
    char *text = (char *)case_memory(256);
    json_bytes(&json, NULL, bytes, count);
    child_slurp(file, text, 256);
    return text;
}

TEST(numbers_in_json) {
    assert_string_equal(json_of_number(0.1), "0.1");
    assert_string_equal(json_of_number(3e-4), "0.0003");
    assert_string_equal(json_of_number(1.0 / 3), "0.3333333333333333");
    assert_string_equal(json_of_number(8192), "8192");
    assert_string_equal(json_of_number(-0.0), "-0");
    assert_string_equal(json_of_number(NAN), "null");
    assert_string_equal(json_of_number(INFINITY), "null");
    assert_string_equal(json_of_number(-INFINITY), "null");
    for (size_t i = 0; i < 20000; i++) { // any bits of a finite number come back
        uint64_t bits = test_random();
        double value;
        memcpy(&value, &bits, 8);
        if (!isfinite(value)) continue;
        double back = strtod(json_of_number(value), NULL);
        if (back != value) test_fail("%.17g came back as %.17g", value, back);
        test_case("number %zu", i); // frees what the last one took
    }
}

TEST(json_strings) {
    static const struct {
        const char *bytes, *expected;
    } cases[] = {
        {"plain", "\"plain\""},
        {"a\"b\\c/d", "\"a\\\"b\\\\c/d\""},
        {"\n\t\r\x01\x1f\x7f", "\"\\n\\t\\u000d\\u0001\\u001f\\u007f\""},
        {"caf\303\251 \342\202\254 \360\237\230\200",
         "\"caf\303\251 \342\202\254 \360\237\230\200\""},        // é € and an emoji
        {"\200", "\"\\ufffd\""},                                  // continues nothing
        {"a\303", "\"a\\ufffd\""},                                // cut off
        {"\303(", "\"\\ufffd(\""},                                // not continued
        {"\300\257", "\"\\ufffd\\ufffd\""},                       // overlong
        {"\340\200\257", "\"\\ufffd\\ufffd\\ufffd\""},            // overlong
        {"\355\240\200", "\"\\ufffd\\ufffd\\ufffd\""},            // surrogate
        {"\364\220\200\200", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""}, // above U+10FFFF
        {"\377\376", "\"\\ufffd\\ufffd\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(json_of_bytes(cases[i].bytes, strlen(cases[i].bytes)), cases[i].expected);
    assert_string_equal(json_of_bytes("a\0b", 3), "\"a\\u0000b\"");
    assert_string_equal(json_of_bytes("\303\251", 1), "\"\\ufffd\""); // what lies behind the end is not read
}

TEST(json_nesting) {
    FILE *file = tmpfile();
    JsonOut json = json_open(file);
    char text[256];
    json_object(&json, NULL);
    json_array(&json, "empty"), json_array_end(&json);
    json_array(&json, "list"), json_size(&json, NULL, 1), json_object(&json, NULL), json_object_end(&json);
    json_bool(&json, NULL, 1), json_null(&json, NULL), json_array_end(&json);
    json_object(&json, "inner"), json_text(&json, "a", "b"), json_text(&json, "none", NULL), json_object_end(&json);
    json_size(&json, "last", SIZE_MAX);
    json_object_end(&json);
    assert_int_equal(json_close(&json), 0);
    child_slurp(file, text, sizeof(text));
    assert_string_equal(text,
                        "{\"empty\": [], \"list\": [1, {}, true, null], \"inner\": {\"a\": \"b\", \"none\": null}, "
                        "\"last\": 18446744073709551615}\n");
}

// ---- log.jsonl ------------------------------------------------------------------------------------------------------
static StepReport report_with(size_t step, double loss, double grad_norm, double learning_rate, double tokens,
                              double seconds, double flops, double peak_flops, double memory_bytes,
                              double data_seconds) {
    StepReport r = {0};
    r.step = step, r.loss = loss, r.grad_norm = grad_norm, r.learning_rate = learning_rate;
    r.tokens = tokens, r.seconds = seconds, r.flops = flops, r.peak_flops = peak_flops;
    r.memory_bytes = memory_bytes, r.data_seconds = data_seconds;
    return r;
}

static StepReport report_of(size_t step) {
    return report_with(step, 10.0 / (double)step, 1.5, 3e-4, 8192, 0.5, 1e12, 4e12, 3e9, 0.001);
}

static Evaluation evaluation_of(double loss, double tokens) {
    Evaluation found = {0};
    found.loss = loss, found.counts.tokens = tokens;
    return found;
}

// Steps first..last as a run writes them; every third step is followed by a validation, every fourth by a sample.
static void run_steps(RunLog *log, size_t first, size_t last) {
    for (size_t step = first; step <= last; step++) {
        StepReport r = report_of(step);
        Evaluation found = evaluation_of(2.5, 1000);
        runlog_step(log, &r);
        if (step % 3 == 0) runlog_validation(log, step, &found);
        if (step % 4 == 0) runlog_sample(log, step, "tw\xc3\xb6 \"lines\"\n\xff", 14);
    }
}

TEST(records_are_complete_lines) {
    const char *folder = scratch_path("records");
    RunLog log = runlog_open(NULL, folder, 0, 0, 4);
    allocation_guard = 1;
    run_steps(&log, 3, 4);
    allocation_guard = 0;
    runlog_close(&log);
    char *text = read_whole(log.path, NULL);
    assert_string_equal(
        text, "{\"step\": 3, \"loss\": 3.3333333333333335, \"grad_norm\": 1.5, \"lr\": 0.0003, \"tokens\": 8192, "
              "\"seconds\": 0.5, \"data_seconds\": 0.001, \"tokens_per_second\": 16384, \"flops_per_second\": "
              "2000000000000, \"peak_share\": 0.5, "
              "\"memory_bytes\": 3000000000}\n"
              "{\"step\": 3, \"val_loss\": 2.5, \"val_tokens\": 1000}\n"
              "{\"step\": 4, \"loss\": 2.5, \"grad_norm\": 1.5, \"lr\": 0.0003, \"tokens\": 8192, "
              "\"seconds\": 0.5, \"data_seconds\": 0.001, \"tokens_per_second\": 16384, \"flops_per_second\": "
              "2000000000000, \"peak_share\": 0.5, "
              "\"memory_bytes\": 3000000000}\n"
              "{\"step\": 4, \"sample\": \"tw\xc3\xb6 \\\"lines\\\"\\n\\ufffd\"}\n");
}

// Cut the log anywhere, resume from any step whose record is there: the finished file is as if nothing had happened.
TEST(resuming_after_a_crash_at_any_byte) {
    const char *folder = scratch_path("crash");
    RunLog log = runlog_open(NULL, folder, 0, 0, 13);
    size_t bytes, tried = 0;
    run_steps(&log, 1, 13);
    runlog_close(&log);
    char *whole = read_whole(log.path, &bytes);
    for (size_t cut = 0; cut <= bytes; cut += cut + 40 < bytes ? 1 + test_random_below(40) : 1) {
        // checkpoints are complete before the log goes on, so only steps wholly in the log are resumed from
        size_t complete = 0, at = 0;
        while (at < cut) {
            const char *end = (const char *)memchr(whole + at, '\n', bytes - at);
            size_t found = record_step(whole + at, (size_t)(end + 1 - (whole + at)));
            assert_true(found != SIZE_MAX);
            at = (size_t)(end + 1 - whole);
            if (at <= cut) complete = found - 1;
        }
        if (cut == bytes) complete = 13;
        for (size_t step = 0; step <= complete; step += 1 + test_random_below(4)) {
            size_t length;
            write_file(log.path, whole, cut);
            log = runlog_open(NULL, folder, 1, step, 13);
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

TEST(garbage_ends_the_log) {
    static const char *const garbage[] = {"\n",
                                          "{}\n",
                                          "{\"step\": }\n",
                                          "{\"step\": 2, \"loss\": 1\n",
                                          "{\"loss\": 1, \"step\": 2}\n",

                                          "{\"step\": -2}\n",
                                          "x"};
    const char *folder = scratch_path("garbage"), *path = scratch_path("garbage/log.jsonl");
    for (size_t i = 0; i < sizeof(garbage) / sizeof(garbage[0]); i++) {
        char text[256];
        snprintf(text, sizeof(text), "{\"step\": 1, \"loss\": 1}\n%s{\"step\": 1, \"loss\": 2}\n", garbage[i]);
        mkdir(folder, 0777);
        write_file(path, text, strlen(text));
        RunLog log = runlog_open(NULL, folder, 1, 3, 9);
        runlog_close(&log);
        assert_string_equal(read_whole(path, NULL), "{\"step\": 1, \"loss\": 1}\n");
    }
    write_file(path, "{\"step\": 1}\n\0\0\0\0", 16); // what a power failure leaves
    records_truncate(path, 3);
    assert_string_equal(read_whole(path, NULL), "{\"step\": 1}\n");
}

static size_t count_records(const char *text, const char *words) {
    size_t count = 0;
    while ((text = strstr(text, words))) count++, text++;
    return count;
}

// One part of a run: resumed from `step`, it gets as far as `last`. Returns what the log holds then.
static const char *run_part(const char *folder, const Options *options, size_t step, size_t last) {
    RunLog log = runlog_open(NULL, folder, 1, step, 9);
    runlog_options(&log, step, options);
    run_steps(&log, step + 1, last);
    runlog_close(&log);
    return read_whole(log.path, NULL);
}

// A record for every part of which a step remains.
TEST(options_are_in_the_log) {
    char *argv[] = {(char *)"train", (char *)"--init=gpt2", (char *)"--data=d.bin"};
    Options options = options_parse(3, argv);
    RunLog none = runlog_open(NULL, NULL, 0, 0, 9);
    const char *folder = scratch_path("options");
    runlog_options(&none, 0, &options); // without --out there is no log
    runlog_close(&none);
    const char *text = run_part(folder, &options, 0, 3);
    assert_memory_equal(text, "{\"step\": 1, \"version\": \"", 24);
    assert_non_null(strstr(text, "\"options\": {\"verb\": \"train\", \"model\": null, \"init\": \"gpt2\""));
    assert_int_equal(count_records(text, "\"options\""), 1);
    assert_int_equal(count_records(run_part(folder, &options, 0, 2), "\"options\""), 1); // nothing had been saved
    text = run_part(folder, &options, 2, 5);
    assert_int_equal(count_records(text, "\"options\""), 2);
    assert_non_null(strstr(text, "}\n{\"step\": 3, \"version\""));
    text = run_part(folder, &options, 2, 6); // of the part before no step remains
    assert_int_equal(count_records(text, "\"options\""), 2);
    text = run_part(folder, &options, 6, 9);
    assert_int_equal(count_records(text, "\"options\""), 3);
    assert_int_equal(count_records(run_part(folder, &options, 9, 9), "\"options\""), 3); // a part without steps
    assert_int_equal(count_records(text, "\"loss\""), 9);
}

static void open_fresh(const void *folder) {
    RunLog log = runlog_open(stdout, (const char *)folder, 0, 0, 4);
    StepReport r = report_of(1);
    log.text = NULL;
    runlog_step(&log, &r);
    runlog_close(&log);
}

TEST(what_cannot_be_written_is_said) {
    expect_refused(open_fresh, "/proc/nowhere", EXIT_RUNTIME, "/proc/nowhere: the folder cannot be created");
    expect_refused(open_fresh, "/dev/null", EXIT_RUNTIME, "/dev/null: the folder cannot be created: File exists");
    mkdir(scratch_path("taken"), 0777), mkdir(scratch_path("taken/log.jsonl"), 0777);
    expect_refused(open_fresh, scratch_path("taken"), EXIT_RUNTIME, "taken/log.jsonl: Is a directory");
    mkdir(scratch_path("full"), 0777);
    assert_int_equal(symlink("/dev/full", scratch_path("full/log.jsonl")), 0);
    expect_refused(open_fresh, scratch_path("full"), EXIT_RUNTIME,
                   "full/log.jsonl: No space left on device; make room, then continue with --resume");
}

// ---- step lines -----------------------------------------------------------------------------------------------------
static char *line_of(const StepReport *r, size_t steps) {
    FILE *file = tmpfile();
    char *text = (char *)case_memory(512);
    step_line(file, r, steps);
    child_slurp(file, text, 512);
    return text;
}

TEST(step_lines_are_aligned) {
    StepReport a = report_of(7), b = report_with(1234, 0.0123456, 1234.5678, 0, 1e7, 1, 3.2e15, 4e15, 123, 0.01),
               c = report_with(10000, 12.75, 1e-5, 0.25, 1, 100, 1e9, 4e12, 5e11, 0);
    size_t bars = 0;
    assert_string_equal(
        line_of(&a, 10000),
        "step     7/10000 | loss  1.42857 | norm      1.5 | lr 3.000e-04 |    16384 tok/s | 2000.0 GFLOP/s"
        "  50 % of peak | 2.79 GiB\n");
    char *first = line_of(&a, 10000), *second = line_of(&b, 10000), *third = line_of(&c, 10000);
    for (size_t i = 0; first[i]; i++) {
        if (first[i] != '|') continue;
        if (second[i] != '|' || third[i] != '|') test_fail("not aligned:\n%s%s%s", first, second, third);
        bars++;
    }
    assert_int_equal(bars, 6);
    a.data_seconds = 0.1; // of 0.5
    assert_non_null(strstr(line_of(&a, 10), " | 2.79 GiB | 20 % waiting for data\n"));
    a.peak_flops = 0;
    assert_null(strstr(line_of(&a, 10), "peak")); // not known
    a.seconds = 0;
    assert_null(strstr(line_of(&a, 10), "inf"));
}

// ---- metrics --------------------------------------------------------------------------------------------------------
// What a log of one step and one validation holds after the fields of every objective, and what it says to people.
typedef struct {
    const char *step, *validation; // members of log.jsonl, in their order
    const char *line, *said;
} MetricTexts;

static void expect_metrics(const Metrics *metrics, const MetricTexts *expected) {
    const char *folder = scratch_path("metrics");
    FILE *people = tmpfile();
    RunLog log = runlog_open(people, folder, 1, 0, 9);
    StepReport r = report_of(2);
    Evaluation found = evaluation_of(0.5, 100);
    char text[4096];
    r.metrics = found.metrics = *metrics;
    allocation_guard = 1;
    runlog_step(&log, &r);
    runlog_validation(&log, 2, &found);
    allocation_guard = 0;
    runlog_close(&log);
    char *records = read_whole(log.path, NULL);
    if (!strstr(records, expected->step)) test_fail("log.jsonl: %s", records);
    if (!strstr(records, expected->validation)) test_fail("log.jsonl: %s", records);
    child_slurp(people, text, sizeof(text));
    if (!strstr(text, expected->line) || !strstr(text, expected->said)) test_fail("%s", text);
}

TEST(metrics_of_pairs) {
    static const MetricTexts expected = {
        "\"memory_bytes\": 3000000000, \"rewards/chosen\": 0.5, \"rewards/margins\": 0.75, "
        "\"rewards/accuracies\": 0.625, \"logps/chosen\": -12.5}\n",
        "{\"step\": 2, \"val_loss\": 0.5, \"val_tokens\": 100, \"val_rewards/chosen\": 0.5, "
        "\"val_rewards/margins\": 0.75, \"val_rewards/accuracies\": 0.625, \"val_logps/chosen\": -12.5}\n",
        " | 2.79 GiB | accuracy 0.625 | margin 0.75\n",
        "step 2/9 | validation loss  0.50000 | accuracy 0.625 | margin 0.75 over 100 tokens\n"};
    Metrics metrics = {0};
    metric_add(&metrics, "rewards/chosen", 2, 8), metric_add(&metrics, "rewards/chosen", 6, 8); // of two micro-batches
    metric_add(&metrics, "rewards/margins", 12, 16);
    metric_add(&metrics, "rewards/accuracies", 10, 16);
    metric_add(&metrics, "logps/chosen", -200, 16);
    expect_metrics(&metrics, &expected);
}

// A mean over nothing is null, and is not shown.
TEST(metrics_of_groups) {
    static const MetricTexts expected = {
        "\"reward\": 0.25, \"kl\": null, \"clip_fraction\": 0, \"completion_length\": 128, \"entropy\": 1.5}\n",
        "\"val_tokens\": 100, \"val_reward\": 0.25, \"val_kl\": null, \"val_clip_fraction\": 0, "
        "\"val_completion_length\": 128, \"val_entropy\": 1.5}\n",
        " GiB | reward 0.25 | clipped 0 | entropy 1.5 | length 128\n",
        "validation loss  0.50000 | reward 0.25 | clipped 0 | entropy 1.5 | length 128 over 100 tokens\n"};
    Metrics metrics = {0};
    metric_add(&metrics, "reward", 2, 8);
    metric_add(&metrics, "kl", 0, 0);
    metric_add(&metrics, "clip_fraction", 0, 1024);
    metric_add(&metrics, "completion_length", 1024, 8);
    metric_add(&metrics, "entropy", 1536, 1024);
    expect_metrics(&metrics, &expected);
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

// A terminal of our own: what is written to *screen arrives at the descriptor that is returned.
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

// All that has arrived; the system hands it on when it has time, so what is not there after a tenth of a second is not
// to come.
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

TEST(the_bar_on_a_terminal) {
    FILE *screen;
    int master = make_terminal(&screen, 50), draws = 0;
    Progress progress = progress_begin(screen, "training", 0, 100);
    progress_update(&progress, 1);
    assert_string_equal(screen_text(master), ""); // what is over in a moment needs no bar
    progress.drawn_at = -1e9;
    progress.begun_at = seconds_now() - 10; // 10 seconds for a tenth: 90 are left
    progress_update(&progress, 10);
    const char *seen = screen_text(master);
    if (strncmp(seen, "\rtraining  10 % [=>", 19) != 0 || !strstr(seen, "] 1 min 30 s left\033[K"))
        test_fail("%s", seen);
    assert_int_equal(strlen(seen), 1 + 49 + 3); // one column less than the terminal has, so that no line wraps
    for (int i = 0; i < 1000; i++) {            // at most ten times a second
        double before = progress.drawn_at;
        progress_update(&progress, 11);
        draws += progress.drawn_at != before;
    }
    assert_in_range(draws, 0, 1);
    screen_text(master);
    note("this note makes the bar give way"); // as errors do
    assert_string_equal(screen_text(master), "\r\033[K");
    progress_clear(&progress);
    assert_string_equal(screen_text(master), ""); // there is none any more
    progress.drawn_at = -1e9;
    progress_update(&progress, 12);
    assert_non_null(strstr(screen_text(master), "training  12 %"));
    progress_end(&progress);
    assert_string_equal(screen_text(master), "\r\033[K");
    progress_update(&progress, 13);
    assert_string_equal(screen_text(master), "");
    fclose(screen);
    close(master);
}

TEST(step_lines_make_the_bar_give_way) {
    FILE *screen;
    int master = make_terminal(&screen, 200);
    RunLog log = runlog_open(screen, NULL, 0, 0, 100);
    StepReport r = report_of(50);
    log.progress = progress_begin(screen, "training", 0, 100);
    log.progress.drawn_at = -1e9;
    runlog_step(&log, &r);
    const char *seen = screen_text(master);
    if (strncmp(seen, "step  50/100 | ", 15) != 0 || !strstr(seen, "\n\rtraining  50 % [")) test_fail("%s", seen);
    r.step = 51;
    runlog_step(&log, &r);
    assert_memory_equal(screen_text(master), "\r\033[Kstep  51/100", 16);
    runlog_close(&log);
    fclose(screen);
    close(master);
}

TEST(no_bar_where_there_is_no_terminal) {
    FILE *file = tmpfile(), *screen;
    int master = make_terminal(&screen, 80);
    Progress progress = progress_begin(file, "training", 0, 100);
    progress.drawn_at = -1e9;
    progress_update(&progress, 50);
    progress_end(&progress);
    assert_int_equal(ftell(file), 0);
    setenv("TERM", "dumb", 1);
    progress = progress_begin(screen, "training", 0, 100);
    progress.drawn_at = -1e9;
    progress_update(&progress, 50);
    assert_string_equal(screen_text(master), "");
    progress = progress_begin(NULL, "training", 0, 100);
    progress_update(&progress, 50);
    setenv("TERM", "xterm", 1);
    progress_off = 1; // --quiet
    progress = progress_begin(screen, "training", 0, 100);
    progress_off = 0;
    progress.drawn_at = -1e9;
    progress_update(&progress, 50);
    assert_string_equal(screen_text(master), "");
    progress = progress_begin(screen, "training", 0, 100);
    progress.drawn_at = -1e9;
    progress_update(&progress, 50);
    assert_string_not_equal(screen_text(master), ""); // so it would have been seen
    progress_end(&progress);
    fclose(file), fclose(screen);
    close(master);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
