/*
A run may end at any moment. A save is killed before every one of its system calls, and in the middle of every write;
and 20 times at a random moment by the clock. Afterwards the newest complete checkpoint holds what was saved at its
step, and no checkpoint that was finished is lost. And what a rename makes visible was synced before, which a kill alone
cannot show.
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "test/ops/fence.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <time.h>

// ---- the system calls that change a folder, counted -----------------------------------------------------------------
enum { CALL_LIMIT = 1000, DESCRIPTORS = 64 };

static struct {
    int count, kill_at; // before call number kill_at; 0: never
    int halve;          // that call, a write, is made by half first
    int is_write[CALL_LIMIT];
    int unsynced[DESCRIPTORS];            // written to since the last fsync
    int files_unsynced, renamed_unsynced; // how many; whether a rename is not synced
} calls;

static int call_is_last(int is_write) {
    if (++calls.count < CALL_LIMIT) calls.is_write[calls.count] = is_write;
    return calls.count == calls.kill_at;
}

static void call_begin(void) {
    if (call_is_last(0)) raise(SIGKILL);
}

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

static int ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

static int counted_rename(const char *from, const char *to) {
    call_begin();
    if (calls.files_unsynced) test_fail("%s is renamed while something written is not synced", from);
    if (ends_with(from, ".partial") && calls.renamed_unsynced) test_fail("%s is renamed before it was synced", from);
    if (!ends_with(to, ".removed")) calls.renamed_unsynced = 1;
    return rename(from, to);
}

static int counted_unlink(const char *path) {
    call_begin();
    return unlink(path);
}

static int counted_rmdir(const char *path) {
    call_begin();
    return rmdir(path);
}

static int counted_mkdir(const char *path, mode_t mode) {
    call_begin();
    return mkdir(path, mode);
}

static int counted_close(int fd) {
    call_begin();
    return close(fd);
}

static int counted_fallocate(int fd, int mode, off_t offset, off_t bytes) {
    call_begin();
    return fallocate(fd, mode, offset, bytes);
}

#define pwrite    counted_pwrite
#define fsync     counted_fsync
#define rename    counted_rename
#define unlink    counted_unlink
#define rmdir     counted_rmdir
#define mkdir     counted_mkdir
#define close     counted_close
#define fallocate counted_fallocate
#include "checkpoint_runs.h"
#undef pwrite
#undef fsync
#undef rename
#undef unlink
#undef rmdir
#undef mkdir
#undef close
#undef fallocate

// About 0.3 MB of each kind: a save takes some time, and no copy is large enough to be shared by threads.
static const char model_text[] =
    "llama,hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=2,vocab_size=256";

// ---- before, the kill, after ----------------------------------------------------------------------------------------
static void save_steps(CheckpointFolder *folder, TrainedTensors *t, size_t first, size_t last, size_t *finished) {
    for (size_t step = first; step <= last; step++) {
        RunState run = run_state(step);
        trained_fill(t, step);
        checkpoint_save(folder, t, &run);
        if (finished) *finished = step;
    }
}

// Loads what is there after a kill; returns its step.
static size_t resumed_step(const char *out, TrainedTensors *t) {
    size_t complete;
    const size_t step = load_last(t, out).step;
    checkpoint_find_first(out, &complete);
    if (complete < 2) test_fail("%zu complete checkpoints are there, two should be kept", complete);
    return step;
}

// Nothing but complete checkpoints and the lock.
static void expect_clean(const char *out) {
    const struct dirent *entry;
    DIR *directory = opendir(out);
    assert_non_null(directory);
    while ((entry = readdir(directory))) {
        char path[PATH_MAX];
        Manifest manifest;
        if (entry->d_name[0] == '.' || !strcmp(entry->d_name, "lock")) continue;
        path_join(path, out, entry->d_name);
        if (checkpoint_step_of(entry->d_name) == CHECKPOINT_NONE || manifest_check(path, &manifest))
            test_fail("%s is no complete checkpoint", entry->d_name);
    }
    closedir(directory);
}

// ---- at every call --------------------------------------------------------------------------------------------------
typedef struct {
    const char *out;
    int kill_at, halve, adapters;
} Attempt;

static TrainedTensors kill_open(int adapters) {
    return (adapters ? trained_open_adapters : trained_open)(model_text, DTYPE_FP32, DTYPE_FP32, 1);
}

// Steps 1 and 2 are there; saves step 3, which removes step 1.
static void attempt_body(const void *context) {
    const Attempt *attempt = (const Attempt *)context;
    TrainedTensors t = kill_open(attempt->adapters);
    CheckpointFolder folder;
    checkpoint_open(&folder, attempt->out, 2, 1);
    memset(&calls, 0, sizeof(calls));
    calls.kill_at = attempt->kill_at, calls.halve = attempt->halve;
    save_steps(&folder, &t, 3, 3, NULL);
    if (calls.renamed_unsynced) test_fail("the folder is not synced in the end");
    if (calls.count >= CALL_LIMIT) test_fail("%d system calls in a save", calls.count);
    for (int i = 1; i <= calls.count; i++) putchar(calls.is_write[i] ? 'w' : '.');
}

static void every_call(int adapters) {
    const char *before = fresh_folder("before"), *out = scratch_path("out");
    TrainedTensors t = kill_open(adapters);
    Attempt attempt = {out, 0, 0, adapters};
    size_t count[2] = {0, 0};
    char kinds[CALL_LIMIT + 1]; // of the calls: 'w' a write, '.' any other
    CheckpointFolder folder;
    checkpoint_open(&folder, before, 2, 0);
    save_steps(&folder, &t, 1, 2, NULL);
    checkpoint_close(&folder);
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
            size_t step = resumed_step(out, &t);
            if (step != 2 && step != 3) test_fail("step %zu was found", step);
            if (step == 2 && count[1]) test_fail("an earlier kill left step 3, this one lost it");
            count[step - 2]++;
            expect_clean(out);
        }
    }
    printf("             %zu kills left the step before, %zu the new one\n", count[0], count[1]);
    if (count[0] < 20 || count[1] < 5) test_fail("too few kills on one side");
    trained_close(&t);
}

TEST(killed_at_every_call) { every_call(0); }
TEST(adapters_killed_at_every_call) { every_call(1); }

// ---- at random moments ----------------------------------------------------------------------------------------------
static void sleep_seconds(double seconds) {
    struct timespec pause;
    pause.tv_sec = (time_t)seconds, pause.tv_nsec = (long)(1e9 * (seconds - (double)pause.tv_sec));
    nanosleep(&pause, NULL);
}

TEST(killed_at_random_moments) {
    enum { KILLS = 20 };
    const char *out = fresh_folder("out");
    TrainedTensors t = trained_open(model_text, DTYPE_FP32, DTYPE_FP32, 1);
    CheckpointFolder folder;
    size_t *shared = (size_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    size_t i, unfinished = 0;
    // seconds that a save takes
    assert_true(shared != MAP_FAILED);
    checkpoint_open(&folder, out, 2, 0);
    double duration = seconds_now();
    save_steps(&folder, &t, 1, 4, shared);
    duration = fmin((seconds_now() - duration) / 4, 1.0);
    checkpoint_close(&folder);
    for (i = 0; i < KILLS; i++) {
        volatile size_t *finished = shared, *running = shared + 1;
        size_t begun = *finished;
        int status;
        *running = 0;
        fflush(NULL);
        pid_t process = fork();
        assert_true(process >= 0);
        if (process == 0) {
            memset(&calls, 0, sizeof(calls));
            checkpoint_open(&folder, out, 2, 1);
            *running = 1;
            save_steps(&folder, &t, folder.last + 1, SIZE_MAX - 1, shared);
        }
        while (!*running && waitpid(process, &status, WNOHANG) == 0) sleep_seconds(1e-4);
        sleep_seconds(2.0 * duration * test_uniform());
        assert_int_equal(kill(process, SIGKILL), 0);
        assert_int_equal(waitpid(process, &status, 0), process);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
            test_fail("the run ended by itself: status %d", status);
        unfinished += *finished == begun;
        size_t step = resumed_step(out, &t);
        if (step < *finished || step > *finished + 1)
            test_fail("step %zu was found, step %zu was finished", step, *finished);
        expect_clean(out);
        *finished = step;
    }
    checkpoint_open(&folder, out, 2,
                    1); // kills between a rename and the removal of old ones leave more: a whole save clears up
    save_steps(&folder, &t, folder.last + 1, folder.last + 1, shared);
    checkpoint_find_first(out, &i);
    assert_int_equal(i, 2);
    checkpoint_close(&folder);
    printf("             %zu steps saved, %zu of %d runs did not finish one, a save took %.0f ms\n", *shared,
           unfinished, (int)KILLS, 1e3 * duration);
    munmap(shared, 4096);
    trained_close(&t);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
