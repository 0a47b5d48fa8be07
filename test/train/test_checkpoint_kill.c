/*
A run may end at any moment. A save is killed before every one of its system calls, and in the middle of every write.
Afterwards the newest complete checkpoint holds its step's tensors, no finished checkpoint is lost, and the run goes on
from there. Whatever a rename makes visible must be synced before, which a kill alone cannot show.
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "test/ops/fence.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

// ---- the system calls that change a folder, counted -----------------------------------------------------------------
enum { CALL_LIMIT = 1000, DESCRIPTORS = 64 };

static struct {
    int count, kill_at; // before call number kill_at; 0: never
    int halve;          // that call, a write, first writes half
    int is_write[CALL_LIMIT];
    int unsynced[DESCRIPTORS];            // written to since the last fsync
    int files_unsynced, renamed_unsynced; // their number; whether a rename is not synced
} calls;

static int call_is_last(int is_write) {
    if (++calls.count < CALL_LIMIT) calls.is_write[calls.count] = is_write;
    return calls.count == calls.kill_at;
}

static int call_begin(void) { return call_is_last(0) ? raise(SIGKILL) : 0; }

static ssize_t counted_pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    if (call_is_last(1)) {
        if (calls.halve) (void)!pwrite(fd, data, bytes / 2, offset);
        raise(SIGKILL);
    }
    if (fd < DESCRIPTORS && !calls.unsynced[fd]) calls.unsynced[fd] = 1, calls.files_unsynced++;
    return pwrite(fd, data, bytes, offset);
}

static int counted_fsync(int fd) {
    struct stat status;
    call_begin();
    if (fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) calls.renamed_unsynced = 0;
    if (fd < DESCRIPTORS && calls.unsynced[fd]) calls.unsynced[fd] = 0, calls.files_unsynced--;
    return fsync(fd);
}

static int counted_rename(const char *from, const char *to) {
    call_begin();
    if (calls.files_unsynced) test_fail("%s is renamed while something written is not synced", from);
    if (strstr(from, ".partial") && !strchr(strstr(from, ".partial"), '/') && calls.renamed_unsynced)
        test_fail("%s is renamed before it was synced", from);
    if (!strstr(to, ".removed")) calls.renamed_unsynced = 1;
    return rename(from, to);
}

#define pwrite         counted_pwrite
#define fsync          counted_fsync
#define rename         counted_rename
#define renameat(...)  (call_begin(), renameat(__VA_ARGS__))
#define unlinkat(...)  (call_begin(), unlinkat(__VA_ARGS__))
#define unlink(...)    (call_begin(), unlink(__VA_ARGS__))
#define rmdir(...)     (call_begin(), rmdir(__VA_ARGS__))
#define mkdir(...)     (call_begin(), mkdir(__VA_ARGS__))
#define close(...)     (call_begin(), close(__VA_ARGS__))
#define fallocate(...) (call_begin(), fallocate(__VA_ARGS__))
#include "checkpoint_runs.h"
#undef pwrite
#undef fsync
#undef rename
#undef renameat
#undef unlinkat
#undef unlink
#undef rmdir
#undef mkdir
#undef close
#undef fallocate

// ---- the save, and the state after the kill -------------------------------------------------------------------------
typedef struct {
    const char *out;
    int kill_at, halve, adapters;
} Attempt;

static DType moments_of(int adapters) { return adapters ? DTYPE_INT8 : DTYPE_FP32; }

// Saves step 3 after steps 1 and 2, and removes step 1.
static void attempt_body(const void *context) {
    const Attempt *attempt = (const Attempt *)context;
    TrainedTensors t = trained_open_as(attempt->adapters, usual_model, DTYPE_FP32, moments_of(attempt->adapters), 1);
    CheckpointFolder folder;
    RunState run = run_state(3);
    checkpoint_open(&folder, attempt->out, 2, 1);
    memset(&calls, 0, sizeof(calls));
    calls.kill_at = attempt->kill_at, calls.halve = attempt->halve;
    trained_fill(&t, 3);
    checkpoint_save(&folder, &t, &run);
    if (calls.renamed_unsynced) test_fail("the folder is not synced in the end");
    if (calls.count >= CALL_LIMIT) test_fail("%d system calls in a save", calls.count);
    for (int i = 1; i <= calls.count; i++) putchar(calls.is_write[i] ? 'w' : '.');
}

// Checks that the folder holds only complete checkpoints, their number, and the lock.
static void expect_clean(const char *out, size_t least, size_t most) {
    const struct dirent *entry;
    DIR *directory = opendir(out);
    size_t complete = 0;
    assert_non_null(directory);
    while ((entry = readdir(directory))) {
        char path[PATH_MAX];
        Manifest manifest;
        if (entry->d_name[0] == '.' || !strcmp(entry->d_name, "lock")) continue;
        path_join(path, out, entry->d_name);
        if (checkpoint_step_of(entry->d_name) == CHECKPOINT_NONE || manifest_check(path, &manifest))
            test_fail("%s is no complete checkpoint", entry->d_name);
        complete++;
    }
    closedir(directory);
    if (complete < least || complete > most) test_fail("%zu complete checkpoints are there", complete);
}

// Loads the checkpoint left by a kill, and saves the next step. Returns the step found.
static size_t resumed_step(const char *out, TrainedTensors *t) {
    const size_t step = load_last(t, out).step;
    if (step != 2 && step != 3) test_fail("step %zu was found", step);
    expect_clean(out, 2, 3); // a kill between a rename and the removal of old ones leaves one more
    save_step(t, out, step + 1, 1);
    expect_clean(out, 2, 2);
    return step;
}

static void every_call(int adapters) {
    const char *before = fresh_folder("before"), *out = scratch_path("out");
    TrainedTensors t = trained_open_as(adapters, usual_model, DTYPE_FP32, moments_of(adapters), 1);
    Attempt attempt = {out, 0, 0, adapters};
    size_t count[2] = {0, 0};
    char kinds[CALL_LIMIT + 1]; // of the calls: 'w' a write, '.' any other
    save_step(&t, before, 1, 0), save_step(&t, before, 2, 1);
    copy_folder(before, out);
    const Child *child = run_child(attempt_body, &attempt); // never killed
    if (child->code) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
    snprintf(kinds, sizeof(kinds), "%.*s", CALL_LIMIT, child->out);
    for (attempt.kill_at = 1; kinds[attempt.kill_at - 1]; attempt.kill_at++) {
        for (attempt.halve = 0; attempt.halve < (kinds[attempt.kill_at - 1] == 'w' ? 2 : 1); attempt.halve++) {
            test_case("call %d%s of %s", attempt.kill_at, attempt.halve ? ", by half" : "", kinds);
            copy_folder(before, out);
            child = run_child(attempt_body, &attempt);
            if (child->code != 1000 + SIGKILL) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
            const size_t step = resumed_step(out, &t);
            if (step == 2 && count[1]) test_fail("an earlier kill left step 3, this one lost it");
            count[step - 2]++;
        }
    }
    printf("             %zu kills left the step before, %zu the new one\n", count[0], count[1]);
    if (count[0] < 20 || count[1] < 5) test_fail("too few kills on one side");
    trained_close(&t);
}

// Replaces a run of steps 1 and 2 by one that saves step 3; `out` is its folder.
static void replace_body(const void *context) {
    const Attempt *attempt = (const Attempt *)context;
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    CheckpointFolder folder;
    RunState run = run_state(3);
    memset(&calls, 0, sizeof(calls));
    calls.kill_at = attempt->kill_at;
    checkpoint_open(&folder, attempt->out, 1, FOLDER_REPLACE);
    checkpoint_replace(&folder);
    write_file(scratch_path("out/log.jsonl"), "new", 3);
    trained_fill(&t, 3);
    checkpoint_save(&folder, &t, &run);
    printf("%d\n", calls.count);
}

// Either the old run is whole afterwards, or the new one is.
TEST(a_replacement_killed_at_every_call) {
    static char before[PATH_MAX], out[PATH_MAX]; // test_case forgets scratch_path's
    strcpy(before, fresh_folder("before")), strcpy(out, scratch_path("out"));
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    Attempt attempt = {out, 0, 0, 0};
    size_t count[2] = {0, 0};
    save_step(&t, before, 1, 0), save_step(&t, before, 2, 1);
    write_file(scratch_path("before/log.jsonl"), "old", 3);
    copy_folder(before, out);
    const int last = atoi(run_child(replace_body, &attempt)->out);
    if (last < 20) test_fail("%d system calls", last);
    for (attempt.kill_at = 1; attempt.kill_at <= last; attempt.kill_at++) {
        test_case("call %d of %d", attempt.kill_at, last);
        copy_folder(before, out);
        const Child *child = run_child(replace_body, &attempt);
        if (child->code != 1000 + SIGKILL) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
        const int new = load_last(&t, out).step == 3;
        expect_text(scratch_path("out/log.jsonl"), new ? "new" : "old");
        unlink(scratch_path("out/log.jsonl"));
        expect_clean(out, new ? 1 : 2, new ? 1 : 2);
        if (!new &&count[1]) test_fail("an earlier kill left the new run, this one lost it");
        count[new]++;
    }
    if (count[0] < 10 || count[1] < 5) test_fail("%zu kills left the old run, %zu the new one", count[0], count[1]);
    trained_close(&t);
}

TEST(killed_at_every_call) { every_call(0); }
TEST(adapters_killed_at_every_call) { every_call(1); }

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
