/*
The folder of checkpoints: finds the newest complete one among anything else, keeps the last ones, removes nothing that
this program did not write. Opening makes the folder, clears an interrupted run's leftovers, and refuses a folder that
is taken, in use or not writable. The content of checkpoints is tested in test_checkpoint.c.
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "test/ops/fence.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

// ---- system calls that read a folder; one fails ---------------------------------------------------------------------
static struct {
    size_t count, at; // call number `at` fails with `error`; 0: none
    int error;
} reads;

static int read_fails(void) {
    if (++reads.count != reads.at) return 0;
    errno = reads.error;
    return 1;
}

#define open(...)         (read_fails() ? -1 : open(__VA_ARGS__))
#define read(...)         (read_fails() ? -1 : read(__VA_ARGS__))
#define flock(...)        (read_fails() ? -1 : flock(__VA_ARGS__))
#define opendir(path)     (read_fails() ? NULL : opendir(path))
#define readdir(folder)   (read_fails() ? NULL : readdir(folder))
#define stat(path, found) (read_fails() ? -1 : stat(path, found))
#include "test/train/checkpoint_runs.h"
#undef open
#undef read
#undef flock
#undef opendir
#undef readdir
#undef stat

// ---- keeping --------------------------------------------------------------------------------------------------------
TEST(newest_complete_one_is_found) {
    static const char *const foreign[] = {
        "checkpoint-9",        "checkpoint-000000012", "checkpoint-00000013.partial", "checkpoint-00000014.removed",
        "checkpoint-0000001x", "checkpoint-",          "checkpoint--0000015"};
    assert_string_equal(run_child(find_body, scratch_path("absent"))->out, "none\n");
    save_usual();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("whole"));
    for (size_t i = 0; i < COUNT_OF(foreign); i++) copy_folder(scratch_path("whole"), file_in(".", foreign[i]));
    expect_found("7\n", NULL);
    write_file(scratch_path("out/checkpoint-00000016"), "a file", 6);
    expect_found("7\n", "checkpoint-00000016 is skipped: it has no DONE");
    assert_int_equal(symlink("nowhere", scratch_path("out/checkpoint-00000017")), 0);
    expect_found("7\n", "checkpoint-00000017 is skipped: it has no DONE");
    copy_folder(scratch_path("whole"), scratch_path("out/checkpoint-123456789"));
    expect_found("123456789\n", NULL);
    copy_folder(scratch_path("whole"), scratch_path("out/checkpoint-99999999"));
    expect_found("123456789\n", NULL);
}

static void keep_case(size_t keep) {
    CheckpointFolder folder;
    test_case("keep %zu", keep);
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 0);
    checkpoint_open(&folder, fresh_folder("out"), keep, 0);
    for (size_t step = 10; step <= 70; step += 10) {
        RunState run = run_state(step);
        trained_fill(&t, step);
        checkpoint_save(&folder, &t, &run);
        checkpoint_save(&folder, &t, &run); // saves twice, as if the last step were also one to save at
        for (size_t s = 10; s <= step; s += 10) {
            char name[64];
            snprintf(name, sizeof(name), "checkpoint-%08zu", s);
            if (is_there(name) != (s + keep * 10 > step))
                test_fail("after step %zu: is %s there? %d", step, name, is_there(name));
        }
    }
    assert_false(is_there("checkpoint-00000070.partial"));
    checkpoint_close(&folder);
    trained_close(&t);
}

// Keeps one more checkpoint, the last good one, as long as the run may have diverged.
TEST(good_one_is_kept) {
    CheckpointFolder folder;
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 0);
    checkpoint_open(&folder, fresh_folder("out"), 2, 0);
    for (size_t step = 1; step <= 6; step++) {
        RunState run = run_state(step);
        if (step == 3) folder.good = folder.last;
        if (step == 6) folder.good = 0;
        trained_fill(&t, step);
        checkpoint_save(&folder, &t, &run);
        assert_int_equal(is_there("checkpoint-00000002"), step >= 2 && step < 6);
        assert_int_equal(is_there("checkpoint-00000003"), step == 3 || step == 4);
    }
    checkpoint_close(&folder);
    trained_close(&t);
}

TEST(last_ones_are_kept) {
    static const size_t keeps[] = {1, 2, 5, 100};
    for (size_t i = 0; i < COUNT_OF(keeps); i++) keep_case(keeps[i]);
}

// Removes nothing that this program did not write, and counts nothing incomplete as kept. Replaces an incomplete folder
// of the same name.
TEST(other_files_stay) {
    Saving saving = {scratch_path("out"), 1, 8, 1};
    save_usual();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000008"));
    assert_int_equal(unlink(scratch_path("out/checkpoint-00000008/DONE")), 0);
    write_file(scratch_path("out/checkpoint-00000007/notes.txt"), "mine", 4);
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000005"));
    assert_int_equal(unlink(scratch_path("out/checkpoint-00000005/DONE")), 0);
    const Child *child = run_child(save_body, &saving);
    assert_int_equal(child->code, 0);
    expect_said(child, "checkpoint-00000007.removed is no longer needed, but holds other files");
    assert_true(is_there("checkpoint-00000007.removed/notes.txt") &&
                !is_there("checkpoint-00000007.removed/model.bin"));
    assert_true(is_there("checkpoint-00000005/notes.txt") && !is_there("checkpoint-00000008.removed"));
    expect_found("8\n", NULL);
}

// ---- what a resume takes --------------------------------------------------------------------------------------------
// Opens scratch "out" as `use` says, and prints the step to resume from and the calls that read.
static void open_as(const void *use) {
    CheckpointFolder folder;
    reads.count = 0;
    checkpoint_open(&folder, scratch_path("out"), 2, *(const FolderUse *)use);
    printf(folder.last == CHECKPOINT_NONE ? "none" : "%zu", folder.last);
    printf(" %zu\n", reads.count);
}

static const Child *opened_as(FolderUse use) { return run_child(open_as, &use); }

static void expect_resumed(FolderUse use, const char *step, const char *noted) {
    const Child *child = opened_as(use);
    if (child->code || strncmp(child->out, step, strlen(step)) != 0)
        test_fail("exit code %d, %s (expected %s): %s", child->code, child->out, step, child->err);
    expect_said(child, noted);
}

static void expect_not_resumed(FolderUse use, const char *words) { expect_refused(open_as, &use, 1, words); }

// Saves steps 5 and 7; 5 cannot be opened without an error.
static void save_two(void) {
    save_usual();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000005"));
    write_file(scratch_path("out/checkpoint-00000005/DONE"), "model.bin 1 2\n", 14); // of version 1
}

// Fails every call that reads, one at a time: the run goes on from its last step, or ends with a line that names the
// error. It begins no new run and takes no older checkpoint.
TEST(an_error_is_not_taken_for_absence) {
    static const int errors[] = {EIO, EACCES, EMFILE, EINTR};
    size_t calls, refused = 0;
    save_two();
    for (FolderUse use = FOLDER_RESUME; use <= FOLDER_RESUME_AUTO; use++) {
        reads.at = 0;
        calls = strtoull(opened_as(use)->out + 2, NULL, 10);
        if (calls < 20) test_fail("only %zu calls", calls);
        for (reads.at = 1; reads.at <= calls; reads.at++) {
            for (size_t i = use == FOLDER_RESUME ? 0 : reads.at % 4; i < COUNT_OF(errors);
                 i += use == FOLDER_RESUME ? 1 : 4) {
                reads.error = errors[i];
                const Child *child = opened_as(use);
                const int named = child->code == 1 && strstr(child->err, strerror(reads.error)), taken = !child->code;
                refused += (size_t)named;
                if (taken ? strncmp(child->out, "7 ", 2) != 0 : !named || reads.error == EINTR)
                    test_fail("call %zu of %zu, %s: exit code %d, %s%s", reads.at, calls, strerror(reads.error),
                              child->code, child->out, child->err);
            }
        }
    }
    reads.at = 0;
    if (refused < 20) test_fail("only %zu refused", refused);
}

TEST(a_damaged_one_is_refused_or_skipped) {
    static const char model[] = "out/checkpoint-00000007/model.bin", done[] = "out/checkpoint-00000007/DONE";
    size_t bytes;
    save_two();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000005"));
    char *whole = read_whole(scratch_path(model), &bytes);
    whole[bytes / 2] ^= 1;
    write_file(scratch_path(model), whole, bytes);
    expect_resumed(FOLDER_RESUME, "7 ", NULL); // loading compares checksums
    expect_resumed(FOLDER_RESUME_AUTO, "5 ", "00000007 is skipped: it is damaged: model.bin has another checksum");
    write_file(scratch_path(model), whole, bytes - 1);
    expect_not_resumed(FOLDER_RESUME, "checkpoint-00000007: is damaged: model.bin has ");
    expect_resumed(FOLDER_RESUME_AUTO, "5 ", "checkpoint-00000007 is skipped: it is damaged: model.bin has ");
    write_file(scratch_path(done), "", 0);
    expect_resumed(FOLDER_RESUME, "5 ", "checkpoint-00000007 is skipped: its DONE is damaged");
    Saving saving = {scratch_path("out"), 1, 6, FOLDER_RESUME}; // --keep-checkpoints 1 counts none after it
    assert_int_equal(run_child(save_body, &saving)->code, 0);
    assert_true(is_there("checkpoint-00000006/DONE") && !is_there("checkpoint-00000005"));
    unlink(scratch_path("out/checkpoint-00000006/DONE"));
    for (FolderUse use = FOLDER_RESUME; use <= FOLDER_RESUME_AUTO; use++) {
        assert_int_equal(opened_as(use)->code, 1);
        expect_said(opened_as(use), "out: none of its checkpoints is complete; restore one, or remove them to begin");
    }
    expect_not_resumed(FOLDER_NEW, "holds a run at step 7; continue it with --resume");
}

// ---- --overwrite ----------------------------------------------------------------------------------------------------
static const char *const run_files[] = {
    "log.jsonl",        "tokenizer.tok",       "chat_template.jinja",     "rollouts.jsonl",
    "rollouts.1.jsonl", "rollouts-12.1.jsonl", "checkpoint-00000007/DONE"};
static const char *const other_files[] = {"rollouts-.txt", "rollouts", "log.jsonl.gz", "checkpoint-7"};

typedef enum { ENDS_BY_ERROR, ENDS_BY_SIGNAL, ENDS_BY_KILL, ENDS_WELL, ENDS_KILLED_LATE } End;

// Replaces the run in scratch "out" by one that ends before or after its first checkpoint.
static void replace_run(const void *context) {
    const End end = *(const End *)context;
    CheckpointFolder folder;
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    RunState run = run_state(3);
    checkpoint_open(&folder, scratch_path("out"), 1, FOLDER_REPLACE);
    assert_true(folder.old > 1000);
    checkpoint_replace(&folder);
    run_began();
    for (size_t i = 0; i < COUNT_OF(run_files); i++) assert_false(is_there(run_files[i]));
    for (size_t i = 0; i < COUNT_OF(other_files); i++) assert_true(is_there(other_files[i]));
    write_file(scratch_path("out/log.jsonl"), "new", 3);
    write_file(scratch_path("out/rollouts-3.jsonl"), "new", 3);
    if (end == ENDS_BY_ERROR) die("an error");
    if (end == ENDS_BY_SIGNAL) raise(SIGTERM);
    if (end == ENDS_BY_KILL) raise(SIGKILL);
    checkpoint_save(&folder, &t, &run);
    assert_true(folder.old == 0);
    if (end == ENDS_KILLED_LATE) die("an error");
}

static void read_once(const void *out) {
    char found[PATH_MAX];
    model_path_find((const char *)out, found, 1, 0);
}

static void fill_run(void) {
    save_usual();
    for (size_t i = 0; i < COUNT_OF(run_files) - 1; i++) write_file(file_in(".", run_files[i]), "old", 3);
    for (size_t i = 0; i < COUNT_OF(other_files); i++) write_file(file_in(".", other_files[i]), "mine", 4);
}

static void expect_run(int old) {
    for (size_t i = 0; i < COUNT_OF(other_files); i++) expect_text(file_in(".", other_files[i]), "mine");
    for (size_t i = 1; i < COUNT_OF(run_files); i++)
        if (is_there(run_files[i]) != old) test_fail("%s is there: %d", run_files[i], !old);
    expect_text(file_in(".", "log.jsonl"), old ? "old" : "new");
    assert_true(is_there("rollouts-3.jsonl") == !old && is_there("checkpoint-00000003/DONE") == !old);
    assert_false(is_there(REPLACED_NAME) || is_there(REPLACED_MOVES));
}

TEST(a_replaced_run_comes_back_until_the_first_checkpoint) {
    static const int codes[] = {1, 1000 + SIGTERM, 1000 + SIGKILL, 0, 1};
    for (End end = ENDS_BY_ERROR; end <= ENDS_KILLED_LATE; end = (End)(end + 1)) {
        for (int next = 0; next < 3; next++) { // the command that comes next
            const FolderUse use = next ? FOLDER_REPLACE : FOLDER_RESUME;
            char found[PATH_MAX];
            test_case("end %d, then %d", end, next);
            fill_run();
            const Child *child = run_child(replace_run, &end);
            if (child->code != codes[end]) test_fail("exit code %d: %s", child->code, child->err);
            if (end != ENDS_BY_KILL) expect_run(end < ENDS_BY_KILL);
            if (next == 2)
                assert_non_null(
                    strstr(model_path_find(scratch_path("out"), found, 1, 0), end < ENDS_WELL ? "7/" : "3/"));
            else
                assert_int_equal(opened_as(use)->code, 0);
            checkpoint_release();
            expect_run(end < ENDS_WELL);
        }
    }
}

// While a run that replaces another has no checkpoint, a reader is told where the old one is. A reader of the old one
// keeps it from being replaced.
TEST(readers_of_a_replaced_run) {
    const FolderUse use = FOLDER_REPLACE;
    CheckpointFolder folder;
    End end = ENDS_WELL;
    char found[PATH_MAX];
    fill_run();
    checkpoint_open(&folder, scratch_path("out"), 1, use);
    checkpoint_replace(&folder);
    expect_refused(read_once, scratch_path("out"), 1, "out: holds no checkpoint yet of the run that replaces another");
    assert_non_null(model_path_find(scratch_path("out/" REPLACED_NAME), found, 1, 0));
    checkpoint_release();
    assert_true(replaced_restore());
    checkpoint_close(&folder);
    const int fd = open(scratch_path("out/checkpoint-00000007"), O_RDONLY | O_DIRECTORY);
    assert_int_equal(flock(fd, LOCK_SH), 0);
    expect_refused(replace_run, &end, 1,
                   "the run in it cannot be set aside: Device or resource busy; end what reads it");
    close(fd);
    expect_run(1);
}

// ---- opening --------------------------------------------------------------------------------------------------------
TEST(opening) {
    Saving saving = {scratch_path("out/a/b/../c//"), 2, 3, 0};
    fresh_folder("out");
    const Child *child = run_child(save_body, &saving);
    if (child->code) test_fail("exit code %d: %s", child->code, child->err);
    assert_true(is_there("a/b") && is_there("a/c/checkpoint-00000003/DONE"));
    expect_refused(
        save_body, &saving, 1,
        "holds a run at step 3; continue it with --resume, replace it with --overwrite, or choose another --out");
    write_file(scratch_path("out/file"), "x", 1);
    saving.out = scratch_path("out/file/run");
    expect_refused(save_body, &saving, 1, "out/file: the folder cannot be created: File exists; choose another --out");
    saving.out = "/proc/self/nothing";
    expect_refused(save_body, &saving, 1, "/proc/self/nothing: the folder cannot be created");
    saving.out = fresh_folder("locked");
    mkdir(scratch_path("locked/lock"), 0777);
    expect_refused(save_body, &saving, 1, "lock: cannot be opened: Is a directory; choose another --out");
}

// The next run clears leftovers of an interrupted one.
TEST(leftovers_are_cleared) {
    Saving saving = {scratch_path("out"), 2, 8, 1};
    save_usual();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000008.partial"));
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000006.removed"));
    write_file(scratch_path("out/checkpoint-00000008.partial/optimizer.bin.12-0.tmp"), "half", 4);
    write_file(scratch_path("out/checkpoint-00000008.partial/DONE.12-0.tmp"), "half", 4);
    assert_int_equal(run_child(save_body, &saving)->code, 0);
    assert_false(is_there("checkpoint-00000006.removed") || is_there("checkpoint-00000008.partial"));
    assert_true(is_there("checkpoint-00000007") && is_there("checkpoint-00000008"));
}

TEST(one_run_at_a_time) {
    Saving saving = {scratch_path("out"), 2, 8, 1};
    CheckpointFolder folder;
    char expected[64];
    save_usual();
    checkpoint_open(&folder, saving.out, 2, 1);
    snprintf(expected, sizeof(expected), "out: another run (process %ld) is writing there; wait", (long)getpid());
    expect_refused(save_body, &saving, 1, expected);
    checkpoint_close(&folder);
    assert_int_equal(run_child(save_body, &saving)->code, 0);
}

// Another rank, which shares the lock, lives longer than rank 0 and its job.
TEST(a_rank_that_still_writes_is_named) {
    Saving saving = {scratch_path("out"), 2, 8, 1};
    char text[LOCK_TEXT], here[256] = "", expected[96];
    save_usual();
    const pid_t ended = fork();
    if (ended == 0) _exit(0);
    assert_int_equal(waitpid(ended, NULL, 0), ended);
    gethostname(here, sizeof(here) - 1);
    snprintf(text, sizeof(text), "%ld 1.000000000 %s\n", (long)ended, here);
    write_file(scratch_path("out/" LOCK_NAME), text, strlen(text));
    const int share = folder_share_lock(saving.out, text);
    snprintf(expected, sizeof(expected), "out: ranks of process %ld, which has ended, are still writing", (long)ended);
    expect_refused(save_body, &saving, 1, expected);
    close(share);
    assert_int_equal(run_child(save_body, &saving)->code, 0);
}

// A checkpoint that a reader has opened stays until the next save.
TEST(what_a_reader_opens_stays) {
    Saving saving = {scratch_path("out"), 1, 8, 1};
    char found[PATH_MAX];
    save_usual();
    assert_string_equal(model_path_find(saving.out, found, 1, 0), scratch_path("out/checkpoint-00000007/model.bin"));
    assert_int_equal(run_child(save_body, &saving)->code, 0);
    assert_true(is_there("checkpoint-00000007/DONE") && is_there("checkpoint-00000008/DONE"));
    checkpoint_release();
    saving.step = 9;
    assert_int_equal(run_child(save_body, &saving)->code, 0);
    assert_true(!is_there("checkpoint-00000007") && !is_there("checkpoint-00000008") &&
                is_there("checkpoint-00000009"));
}

TEST(a_reader_does_not_wait_for_ever) {
    save_usual();
    const int fd = open(scratch_path("out/checkpoint-00000007"), O_RDONLY | O_DIRECTORY);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    expect_refused(read_once, scratch_path("out"), 1, "checkpoint-00000007: is locked by another process");
    close(fd);
}

static void read_again_and_again(const void *out) {
    char found[PATH_MAX];
    for (size_t last = 0; last < 60;) {
        const char *path = model_path_find((const char *)out, found, 1, 0);
        const size_t step = strtoull(strrchr(path, '-') + 1, NULL, 10);
        usleep(300); // as long as opening takes
        InputFile file = input_open(path);
        input_close(&file);
        checkpoint_release();
        if (step < last) die("step %zu after %zu", step, last);
        last = step;
    }
}

TEST(readers_of_a_run_that_goes_on) {
    const char *out = scratch_path("out");
    CheckpointFolder folder;
    save_usual();
    fflush(NULL);
    const pid_t run = fork();
    if (run == 0) {
        TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
        is_child = 1;
        checkpoint_open(&folder, out, 1, 1);
        for (size_t step = 8; step <= 60; step++) {
            RunState state = run_state(step);
            checkpoint_save(&folder, &t, &state);
        }
        _exit(0);
    }
    const Child *child = run_child(read_again_and_again, out);
    if (child->code || *child->err) test_fail("exit code %d: %s", child->code, child->err);
    assert_int_equal(waitpid(run, NULL, 0), run);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
