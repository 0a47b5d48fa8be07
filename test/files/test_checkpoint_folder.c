/*
The folder of checkpoints: finds the newest complete one among anything else, keeps the last ones, removes nothing that
this program did not write. Opening makes the folder, clears an interrupted run's leftovers, and refuses a folder that
is taken, in use or not writable. The content of checkpoints is tested in test_checkpoint.c.
*/
#include "test/train/checkpoint_runs.h"

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

// ---- opening --------------------------------------------------------------------------------------------------------
TEST(opening) {
    Saving saving = {scratch_path("out/a/b/../c//"), 2, 3, 0};
    fresh_folder("out");
    const Child *child = run_child(save_body, &saving);
    if (child->code) test_fail("exit code %d: %s", child->code, child->err);
    assert_true(is_there("a/b") && is_there("a/c/checkpoint-00000003/DONE"));
    expect_refused(save_body, &saving, 1,
                   "holds a run at step 3; go on with --resume, replace it with --overwrite, or choose another --out");
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

static void read_once(const void *out) {
    char found[PATH_MAX];
    model_path_find((const char *)out, found, 1, 0);
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
