/*
Files that are complete or absent: what may be replaced, two writers to one path, signals during a write, fsyncs that
survive a power failure; memory that runs out; and a full standard output. Reading is tested with each format.
*/
#include <stdint.h>
#include <stdlib.h>

static size_t allocations_left = SIZE_MAX; // this many allocations succeed, then one fails
static void *failing_realloc(void *memory, size_t bytes) { return allocations_left-- ? realloc(memory, bytes) : NULL; }
#define realloc failing_realloc
#include "child.h"
#undef realloc
#include <pthread.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>

// Intercepts every fsync of the code under test: logs the paths, one per line.
static char synced[8192];
static int noting_fsync(int fd) {
    char link[64], path[1024];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length > 0) snprintf(synced + strlen(synced), sizeof(synced) - strlen(synced), "%.*s\n", (int)length, path);
    return fsync(fd);
}
#define fsync   noting_fsync
#define realloc failing_realloc
#include "llmc/base/json.h"
#undef realloc
#include "llmc/files/checkpoint_folder.h"
#undef fsync

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

static void write_output(const char *path, const char *text) {
    OutputFile file;
    output_open(&file, path, strlen(text));
    output_write(&file, 0, text, strlen(text));
    output_commit(&file);
}

static void write_body(const void *path) { write_output((const char *)path, "new"); }

static void expect_files(const char *name, size_t expected) {
    DIR *directory = opendir(scratch_path(name));
    const struct dirent *entry;
    size_t count = 0;
    assert_non_null(directory);
    while ((entry = readdir(directory))) count += entry->d_name[0] != '.';
    closedir(directory);
    assert_int_equal(count, expected);
}

// ---- existing files -------------------------------------------------------------------------------------------------
TEST(only_regular_files_are_replaced) {
    static const struct {
        const char *name, *words;
        mode_t mode; // kind of file; 0: a link to the pipe
    } kinds[] = {{"kinds/folder", "is a directory; give a file name", S_IFDIR},
                 {"kinds/pipe", "is a device, a pipe or a socket", S_IFIFO},
                 {"kinds/link-to-pipe", "is a device, a pipe", 0},
                 {"kinds/socket", "is a device, a pipe", S_IFSOCK},
                 {"kinds/device", "is a device, a pipe", S_IFCHR}}; // like /dev/null; only root may make a device
    fresh_folder("kinds");
    write_file(scratch_path("kinds/old"), "a longer text than the new one", 30);
    write_output(scratch_path("kinds/old"), "new");
    expect_text(scratch_path("kinds/old"), "new");
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        const char *path = scratch_path(kinds[i].name);
        char words[200];
        struct stat status;
        snprintf(words, sizeof(words), "%s: %s", kinds[i].name, kinds[i].words);
        if (kinds[i].mode == S_IFDIR)
            assert_int_equal(mkdir(path, 0777), 0);
        else if (!kinds[i].mode)
            assert_int_equal(symlink(scratch_path("kinds/pipe"), path), 0);
        else if (mknod(path, kinds[i].mode | 0666, makedev(1, 3)) != 0 && kinds[i].mode == S_IFCHR)
            continue;
        expect_refused(write_body, path, 1, words);
        assert_true(lstat(path, &status) == 0 &&
                    (status.st_mode & S_IFMT) == (kinds[i].mode ? kinds[i].mode : S_IFLNK));
    }
}

TEST(links_are_followed) {
    const char *target = scratch_path("links/far/target"), *link = scratch_path("links/link");
    struct stat status;
    fresh_folder("links"), fresh_folder("links/far");
    write_file(target, "old", 3);
    assert_int_equal(symlink("far/target", link), 0);
    assert_int_equal(symlink("link", scratch_path("links/twice")), 0);
    write_output(scratch_path("links/twice"), "new");
    assert_true(lstat(link, &status) == 0 && S_ISLNK(status.st_mode));
    assert_true(lstat(scratch_path("links/twice"), &status) == 0 && S_ISLNK(status.st_mode));
    expect_text(target, "new");
    expect_files("links/far", 1);
    assert_int_equal(unlink(target), 0);
    expect_refused(write_body, link, 1, "links/link: is a symbolic link that leads nowhere: No such file");
    assert_int_equal(symlink("circle", scratch_path("links/circle")), 0);
    expect_refused(write_body, scratch_path("links/circle"), 1,
                   "is a symbolic link that leads nowhere: Too many levels");
}

TEST(places_that_cannot_be_written) {
    static const size_t lengths[] = {300, PATH_MAX - 5,
                                     5000}; // the second name is too long with the suffix of the temporary file
    static char path[6000];
    expect_refused(write_body, "/nowhere/file", 1, "/nowhere/file: cannot be created: No such file or directory");
    expect_refused(write_body, "/proc/file", 1, "/proc/file: cannot be created: ");
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        memset(path, 'x', lengths[i]);
        expect_refused(write_body, path, 1,
                       i ? "...: this path is too long; choose a shorter path"
                         : ": cannot be created: File name too long");
    }
}

// ---- two writers to one path ----------------------------------------------------------------------------------------
static void write_in_the_middle(const void *path) { write_output((const char *)path, "the second, longer text"); }

TEST(writers_do_not_mix) {
    const char *path = scratch_path("two/file"), *theirs = scratch_path("two/file.tmp");
    OutputFile file;
    fresh_folder("two");
    write_file(theirs, "the user's own", 14);
    output_open(&file, path, 9);
    output_write(&file, 0, "the ", 4);
    output_pending = NULL; // otherwise the child takes the parent's output for its own
    assert_int_equal(run_child(write_in_the_middle, path)->code, 0);
    output_pending = &file;
    expect_text(path, "the second, longer text");
    output_write(&file, 4, "first", 5);
    output_commit(&file);
    expect_text(path, "the first");
    expect_text(theirs, "the user's own");
    expect_files("two", 2);
}

// A locked file is being written, perhaps on another machine by a process with this id. An unlocked file is left over.
TEST(temporaries_of_others_stay_while_locked) {
    const char *path = scratch_path("taken/file");
    char taken[600];
    fresh_folder("taken");
    snprintf(taken, sizeof(taken), "%s.%ld-0.tmp", path, (long)getpid());
    write_file(taken, "taken", 5);
    const int fd = open(taken, O_RDONLY);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    write_output(path, "new");
    expect_text(path, "new");
    expect_text(taken, "taken");
    expect_files("taken", 2);
    close(fd);
    write_output(path, "newer");
    expect_text(path, "newer");
    expect_files("taken", 1);
}

static void be_killed(const void *path) {
    OutputFile file;
    output_open(&file, (const char *)path, 1000);
    raise(SIGKILL);
}

// The next write to the same path removes what a killed writer left. Files with other names stay.
TEST(leftovers_of_kills_are_removed) {
    static const char *const others[] = {"kill/file.tmp", "kill/files.1-0.tmp", "kill/file.1-0.tmp.x"};
    const char *path = scratch_path("kill/file");
    fresh_folder("kill");
    for (size_t i = 0; i < COUNT_OF(others); i++) write_file(scratch_path(others[i]), "mine", 4);
    assert_int_equal(symlink("files.1-0.tmp", scratch_path("kill/file.2-0.tmp")), 0);
    for (size_t kills = 0; kills < 2; kills++) {
        assert_int_equal(run_child(be_killed, path)->code, 1000 + SIGKILL);
        expect_files("kill", COUNT_OF(others) + 2);
    }
    const Child *child = run_child(write_body, path);
    assert_int_equal(child->code, 0);
    assert_true(count_lines(child->err) == 1 && strstr(child->err, "-0.tmp, left by an interrupted process"));
    expect_text(path, "new");
    expect_files("kill", COUNT_OF(others) + 2);
    for (size_t i = 0; i < COUNT_OF(others); i++) expect_text(scratch_path(others[i]), "mine");
}

TEST(names_of_temporaries) {
    static const char *const others[] = {"file",         "file.tmp",       "file.12.tmp",    "file.12-.tmp",
                                         "file.-3.tmp",  "file.12-3.tmpx", "files.12-3.tmp", "file.12-3",
                                         "file.a-3.tmp", "fil.12-3.tmp"};
    assert_true(is_temporary_of("file.12-345.tmp", "file"));
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (is_temporary_of(others[i], "file")) test_fail("%s is taken for a temporary", others[i]);
}

// ---- signals --------------------------------------------------------------------------------------------------------
static int signal_to_send;

static void *send_signal(void *unused) { // sends the signal from a thread that is not the writer
    raise(signal_to_send);
    return unused;
}

static void end_while_writing(const void *path) {
    OutputFile file;
    pthread_t thread;
    output_open(&file, (const char *)path, 1000);
    output_write(&file, 0, "half", 4);
    if (pthread_create(&thread, NULL, send_signal, NULL) == 0) pthread_join(thread, NULL);
    output_commit(&file);
}

static void end_while_saving(const void *path) {
    CheckpointFolder folder;
    OutputFile file;
    static OutputFolder checkpoint;
    checkpoint_open(&folder, (const char *)path, 2, 0);
    run_began();
    checkpoint_path(checkpoint.path, folder.path, 7, "");
    checkpoint_path(checkpoint.temporary, folder.path, 7, ".partial");
    checkpoint_begin(&checkpoint);
    folder_write_file(&checkpoint, "model.bin", "whole", 5);
    folder_open_file(&checkpoint, &file, "optimizer.bin", 1000);
    raise(signal_to_send);
}

static void signal_that_is_ignored(const void *path) {
    signal(signal_to_send, SIG_IGN); // as nohup does
    end_while_writing(path);
}

TEST(signals_leave_nothing_half_written) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < 3; i++) {
        const char *path = scratch_path("signals/file");
        test_case("signal %d", ends[i]);
        signal_to_send = ends[i];
        fresh_folder("signals");
        write_file(path, "old", 3);
        assert_int_equal(run_child(end_while_writing, path)->code,
                         1000 + ends[i]); // the signal's default action ends the child
        expect_text(path, "old");
        expect_files("signals", 1);
        assert_int_equal(run_child(signal_that_is_ignored, path)->code, 0);
        assert_memory_equal(read_whole(path, NULL), "half", 4);
        expect_files("signals", 1);
        assert_int_equal(run_child(end_while_saving, scratch_path("signals/out"))->code, 1000 + ends[i]);
        expect_files("signals/out", 1); // only the lock file
    }
}

static void die_while_writing(const void *path) {
    OutputFile file;
    output_open(&file, (const char *)path, 1000);
    die("something else went wrong");
}

TEST(errors_leave_nothing_half_written) {
    fresh_folder("errors");
    expect_refused(die_while_writing, scratch_path("errors/file"), 1, "something else went wrong");
    expect_files("errors", 0);
}

static void write_beyond_the_limit(const void *path) {
    static const struct rlimit limit = {5000, 5000};
    static char text[8001];
    memset(text, 'x', 8000);
    signals_prepare();
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    int fd = open((const char *)path, O_WRONLY | O_CREAT, 0666);
    if (write(fd, text, 8000) != 5000 || write(fd, text, 1) >= 0 || errno != EFBIG) exit(3);
    write_output((const char *)path, text);
}

TEST(limits_on_file_sizes_are_errors) {
    const char *path = scratch_path("limit/file");
    fresh_folder("limit");
    expect_refused(write_beyond_the_limit, path, 1,
                   "limit/file: reserving 7.81 KiB failed: File too large (raise ulimit -f, or change "
                   "the file system); choose another place (");
    expect_files("limit", 1);
}

static void open_too_many(const void *path) {
    static const struct rlimit limit = {3, 3};
    setrlimit(RLIMIT_NOFILE, &limit);
    input_open((const char *)path);
}

TEST(limits_on_open_files_are_errors) {
    expect_refused(open_too_many, "/proc/self/status", 1, "cannot be opened: Too many open files (raise ulimit -n)");
}

// ---- power ----------------------------------------------------------------------------------------------------------
static void expect_synced(const char *format, const char *a, const char *b, const char *c) {
    char expected[4096];
    snprintf(expected, sizeof(expected), format, a, b, c);
    assert_string_equal(synced, expected);
    *synced = 0;
}

TEST(folders_are_synced) {
    const char *base = fresh_folder("power");
    char here[PATH_MAX], temporary[600];
    assert_non_null(getcwd(here, sizeof(here)));
    *synced = 0;
    make_folder(scratch_path("power/a/b/c"));
    expect_synced("%s\n%s\n%s\n", base, scratch_path("power/a"), scratch_path("power/a/b"));
    make_folder(scratch_path("power/a/b/c")); // the folder exists already
    expect_synced("", "", "", "");
    snprintf(temporary, sizeof(temporary), "%s.%ld-0.tmp", scratch_path("power/a/file"), (long)getpid());
    write_output(scratch_path("power/a/file"), "new");
    expect_synced("%s\n%s\n", temporary, scratch_path("power/a"), "");
    sync_folder_of("name");
    expect_synced("%s\n", here, "", "");
    sync_folder_of("/name");
    expect_synced("/\n", "", "", "");
}

// ---- the folder of a run --------------------------------------------------------------------------------------------
static void open_new_run(const void *path) {
    CheckpointFolder folder;
    checkpoint_open(&folder, (const char *)path, 2, 0);
    checkpoint_close(&folder);
}

TEST(an_earlier_run_is_seen_before_anything_else) {
    static const char begun[] = "{\"step\": 1, \"options\": {\"dpo_loss\": 1}}\n",
                      finished[] = "{\"step\": 1, \"loss\": 2}\n";
    const char *out = fresh_folder("earlier"), *log = scratch_path("earlier/log.jsonl");
    CheckpointFolder folder;
    write_file(log, "", 0);
    assert_int_equal(run_child(open_new_run, out)->code, 0);
    write_file(log, begun, strlen(begun));
    assert_int_equal(run_child(open_new_run, out)->code, 0); // the child finished no step
    write_file(log, finished, strlen(finished));
    expect_refused(open_new_run, out, 1,
                   "earlier/log.jsonl: holds an earlier run without a checkpoint; replace it with");
    for (FolderUse use = FOLDER_RESUME; use <= FOLDER_REPLACE; use++) {
        checkpoint_open(&folder, out, 2, use);
        assert_true(folder.last == CHECKPOINT_NONE && folder.replaces == (use == FOLDER_REPLACE));
        checkpoint_close(&folder);
        expect_text(log, finished);
    }
}

static void resume_run(const void *path) {
    CheckpointFolder folder;
    checkpoint_open(&folder, (const char *)path, 2, 1);
    if (folder.last == CHECKPOINT_NONE) die("no checkpoint");
}

static void refuse_run(const void *path) {
    open_new_run(path);
    die("refused");
}

static void end_before_the_run(const void *path) {
    open_new_run(path);
    raise(SIGTERM);
}

// A refused run removes its lock and the folders that it made, and nothing else.
TEST(refused_runs_leave_nothing) {
    fresh_folder("refused");
    expect_refused(refuse_run, scratch_path("refused/a/b//c/"), 1, "refused");
    expect_files("refused", 0);
    assert_int_equal(run_child(end_before_the_run, scratch_path("refused/a/b"))->code, 1000 + SIGTERM);
    expect_files("refused", 0);
    fresh_folder("refused/empty");
    expect_refused(refuse_run, scratch_path("refused/empty"), 1, "refused");
    expect_files("refused/empty", 0);
    write_file(scratch_path("refused/empty/lock"), "1\n", 2);
    write_file(scratch_path("refused/empty/note"), "mine", 4);
    expect_refused(refuse_run, scratch_path("refused/empty"), 1, "refused");
    expect_files("refused/empty", 2);
}

// --resume with a mistyped or wrong folder begins no run. A run that was ended early continues.
TEST(only_runs_are_resumed) {
    fresh_folder("resume"), fresh_folder("resume/other");
    expect_refused(resume_run, scratch_path("resume/no"), 1,
                   "resume/no does not exist; check --out, or leave --resume out to begin a run there");
    expect_refused(resume_run, scratch_path("resume/other"), 1, "resume/other is not the folder of a run; check --out");
    expect_files("resume/other", 0);
    expect_files("resume", 1);
    write_file(scratch_path("resume/other/lock"), "1\n", 2);
    expect_refused(resume_run, scratch_path("resume/other"), 1, "no checkpoint");
}

// Never follows, waits for or writes through files that others may have put into a run's folder.
TEST(pipes_and_links_in_the_folder_of_a_run) {
    const char *mine = scratch_path("trap/mine"), *run = scratch_path("trap/run");
    const char *lock = scratch_path("trap/run/lock"), *done = scratch_path("trap/run/checkpoint-00000001/DONE");
    fresh_folder("trap"), fresh_folder("trap/run"), fresh_folder("trap/run/checkpoint-00000001");
    write_file(mine, "mine\n", 5);
    write_file(scratch_path("trap/model.bin"), "mine\n", 5);
    assert_int_equal(symlink(scratch_path("trap"), scratch_path("trap/run/checkpoint-00000002.removed")), 0);
    alarm(20); // ends the test if it waits for a pipe
    assert_int_equal(mkfifo(done, 0666), 0);
    assert_true(strstr(run_child(resume_run, run)->err, "is skipped: it has no DONE") != NULL);
    assert_int_equal(symlink(mine, lock), 0);
    expect_refused(resume_run, run, 1, "lock: is a symbolic link that is not followed");
    assert_true(unlink(lock) == 0 && mkfifo(lock, 0666) == 0);
    expect_refused(resume_run, run, 1, "lock: is not a regular file");
    alarm(0);
    expect_text(mine, "mine\n");
    expect_text(scratch_path("trap/model.bin"), "mine\n");
}

// ---- messages with text from files ----------------------------------------------------------------------------------
static void note_and_die(const void *text) {
    note("%s", (const char *)text);
    die("%s", (const char *)text);
}

TEST(messages_hold_nothing_that_a_terminal_obeys) {
    static const char *const texts[][2] = {{"a\033]0;owned\007b\n", "a?]0;owned?b?"},
                                           {"caf\303\251 \342\202\254 \360\237\230\200", NULL},
                                           {"c1 \302\233 31m \233 \302\240", "c1 ?? 31m ? \302\240"},
                                           {"\177\377\342\202", "????"}};
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        const char *shown = texts[i][1] ? texts[i][1] : texts[i][0];
        char expected[256];
        snprintf(expected, sizeof(expected), "note: %s\n%s: %s\n", shown, program_invocation_short_name, shown);
        assert_string_equal(run_child(note_and_die, texts[i][0])->err, expected);
    }
}

// ---- memory that runs out -------------------------------------------------------------------------------------------
static void make_json(const void *left) {
    cJSON *root = cJSON_CreateObject(), *names = cJSON_AddArrayToObject(root, "names");
    allocations_left = *(const size_t *)left;
    cJSON_AddItemToArray(names, cJSON_CreateString("a"));
    cJSON_AddNumberToObject(root, "number", 1);
    cJSON_Delete(json_parse_object("{\"key\": [1]}", 12, "text"));
}

// cJSON itself would leave the value out.
TEST(no_value_is_left_out_of_json) {
    size_t left = 0;
    for (; run_child(make_json, &left)->code; left++)
        expect_refused(make_json, &left, 1, "bytes wanted for JSON; free");
    assert_true(left > 6); // everything that cJSON made was allocated
}

// ---- standard output ------------------------------------------------------------------------------------------------
static int flushed; // the error, and its errno, came earlier

static void print_body(const void *path) {
    if (!freopen((const char *)path, "w", stdout)) exit(3);
    puts("results");
    if (flushed) fflush(stdout);
    stdout_finish();
}

TEST(full_standard_output) {
    assert_int_equal(run_child(print_body, "/dev/null")->code, 0);
    if (access("/dev/full", W_OK) != 0) test_skip("this machine has no /dev/full");
    expect_refused(print_body, "/dev/full", 1, "standard output is not complete: No space left on device");
    flushed = 1;
    expect_refused(print_body, "/dev/full", 1, "standard output is not complete: an earlier write to it failed");
}

int main(int argc, char **argv) {
    // A shell makes background commands ignore SIGINT, nohup SIGHUP; the program keeps them ignored.
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, SIG_DFL);
    RUN_LISTED(argc, argv, scratch_remove);
}
