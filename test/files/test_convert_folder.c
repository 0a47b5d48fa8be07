/*
The folder that `convert` writes is complete or absent: what is at its place already, disks without room, failures,
signals and kill -9 on the way, others that write there. And the other folders `--model` may name: a run's, and its
checkpoints.
*/
#include <sys/statvfs.h>
#include "test/base/testing.h"

// Every question for free space goes through here.
static uint64_t space_left; // bytes; 0: what there is
static int small_disk(const char *path, struct statvfs *status) {
    int result = statvfs(path, status);
    if (space_left) status->f_frsize = 1, status->f_bavail = space_left;
    return result;
}
#define statvfs(path, status) small_disk(path, status)
#include "convert_files.h"
#undef statvfs
#include "llmc/files/checkpoint_folder.h"

#include <sys/resource.h>

// ---- places ---------------------------------------------------------------------------------------------------------
TEST(places) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("place"), NULL, NO_LIMIT};
    struct stat status;
    write_file(c.to, "a file", 6);
    expect_refused(convert_body, &c, 1, "place: is a file, a folder was to be written there");
    run_command("rm '%s' && mkdir '%s'", c.to, c.to);
    convert_body(&c); // an empty folder is as good as none
    expect_refused(convert_body, &c, 1, "place: the folder is not empty");
    c.from = c.to;
    expect_refused(convert_body, &c, 1, "the folder is not empty");
    const char *copy = copy_golden("llama");
    c.from = c.to = copy;
    expect_refused(convert_body, &c, 1, "model: the folder is not empty");
    expect_same_file(copy, GOLDEN "llama", HF_SINGLE_FILE);
    c.from = GOLDEN "llama", c.to = fresh_place("place");
    run_command("mkdir '%s' && touch '%s/.hidden'", c.to, c.to);
    expect_refused(convert_body, &c, 1, "the folder is not empty");
    c.to = fresh_place("place");
    run_command("ln -s nowhere '%s'", c.to, "");
    expect_refused(convert_body, &c, 1, "place: is a symbolic link that leads nowhere");
    run_command("mkdir '%s'", scratch_path("nowhere"), ""); // and now somewhere: the link stays
    convert_body(&c);
    assert_true(lstat(c.to, &status) == 0 && S_ISLNK(status.st_mode));
    expect_same_file(GOLDEN "llama", scratch_path("nowhere"), HF_SINGLE_FILE);
    fresh_place("place");
    c.to = scratch_path("place///");
    convert_body(&c);
    expect_same_file(GOLDEN "llama", scratch_path("place"), HF_SINGLE_FILE);
    c.to = scratch_path("no/such/folder");
    expect_refused(convert_body, &c, 1, "no/such/folder: the folder cannot be created: No such file or directory");
    c.to = "/proc/folder";
    expect_refused(convert_body, &c, 1, "/proc/folder: ");
}

static void convert_into_here(const void *context) {
    Conversion c = *(const Conversion *)context;
    char from[PATH_MAX];
    if (!realpath(c.from, from) || chdir(c.to) != 0) exit(3);
    c.from = from, c.to = ".";
    convert_body(&c);
}

TEST(not_the_folder_one_is_in) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("here"), NULL, NO_LIMIT};
    run_command("mkdir '%s'", c.to, "");
    expect_refused(convert_into_here, &c, 1, ".: is the folder this program runs in");
}

// ---- disks and interruptions ----------------------------------------------------------------------------------------
TEST(room_is_looked_for_beforehand) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, NO_LIMIT};
    space_left = 150000; // of 165,600 and headers
    expect_refused(convert_body, &c, 1, "bytes) are to be written, but only 146.48 KiB are free there; make room or");
    expect_nothing_at(c.to);
    space_left = 0;
}

static struct rlimit file_limit;

static void convert_with_limit(const void *context) {
    setrlimit(RLIMIT_FSIZE, &file_limit);
    convert_body(context);
}

static void convert_what_shrinks(const void *context) {
    const Conversion *c = (const Conversion *)context;
    WeightSource *source = weights_open(c->from);
    HfWrite write = hf_write_prepare(source, NULL, NULL, c->max_shard_size);
    if (truncate(source->files[0].path, 100000) != 0) exit(3);
    hf_write(&write, c->to);
}

static void convert_read_only(const void *context) {
    if (geteuid() == 0 && seteuid(65534) != 0) exit(77);
    convert_body(context);
}

TEST(failures_leave_nothing) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, NO_LIMIT};
    char path[PATH_MAX];
    file_limit.rlim_cur = file_limit.rlim_max = 100000;
    expect_refused(convert_with_limit, &c, 1, "model.safetensors: reserving 163.80 KiB failed: File too large");
    expect_nothing_at(c.to);
    c.max_shard_size = 1; // many files are there already when one fails
    file_limit.rlim_cur = file_limit.rlim_max = 21000;
    expect_refused(convert_with_limit, &c, 1, "-of-00021.safetensors: reserving ");
    expect_nothing_at(c.to);
    c.from = copy_golden("llama"), c.max_shard_size = 50000;
    expect_refused(convert_what_shrinks, &c, 1, "model.safetensors: ends at byte 100000");
    expect_nothing_at(c.to);
    c.from = GOLDEN "llama";
    run_command("mkdir -m 555 -p '%s' && chmod 755 '%s'", scratch_path("closed"), scratch_folder());
    path_join(path, scratch_path("closed"), "folder");
    c.to = path;
    expect_refused(convert_read_only, &c, 1, "closed/folder: the folder cannot be created: Permission denied");
    expect_nothing_at(path);
}

// The process ends by this signal when it has written this many files.
static int end_signal;
static size_t end_after;

static void convert_and_end(const void *context) {
    const Conversion *c = (const Conversion *)context;
    WeightSource *source = weights_open(c->from);
    HfWrite write = hf_write_prepare(source, NULL, NULL, 1);
    OutputFolder folder;
    OutputFile file;
    folder_open(&folder, c->to, 1000, 30, hf_is_written_name);
    hf_write_config(&write, &folder);
    for (size_t i = 0; i < end_after; i++) {
        Progress progress = progress_begin(NULL, "", 0, 1);
        double done = 0;
        hf_write_shard(&write, i, i + 1, &folder, &progress, &done);
    }
    folder_open_file(&folder, &file, "model-00010-of-00021.safetensors", 1000);
    output_write(&file, 0, "half", 4);
    raise(end_signal);
    exit(5);
}

TEST(a_signal_leaves_nothing) { // the other signals are in test_file.c
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, 1};
    end_signal = SIGTERM, end_after = 2;
    assert_int_equal(run_child(convert_and_end, &c)->code, 1000 + SIGTERM);
    expect_nothing_at(c.to);
}

TEST(what_a_kill_leaves_is_cleared_away) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, 1};
    char path[PATH_MAX];
    glob_t found;
    end_signal = SIGKILL, end_after = 3;
    run_command("rm -rf '%s'.*", c.to, "");
    assert_int_equal(run_child(convert_and_end, &c)->code, 1000 + SIGKILL);
    assert_int_equal(run_child(convert_and_end, &c)->code, 1000 + SIGKILL); // which has cleared away the first
    assert_false(path_exists(c.to));
    assert_int_equal(count_temporaries(c.to), 1);
    const Child *child = run_child(convert_body, &c);
    assert_int_equal(child->code, 0);
    assert_non_null(strstr(child->err, ".tmp, which a conversion that was cut off had left, is removed\n"));
    assert_int_equal(count_lines(child->err), 1);
    assert_int_equal(count_temporaries(c.to), 0);
    expect_shards(c.to, GOLDEN "llama", 1, 21);
    // what somebody else put there stays
    fresh_place("folder");
    assert_int_equal(run_child(convert_and_end, &c)->code, 1000 + SIGKILL);
    snprintf(path, sizeof(path), "%s.*", c.to);
    assert_int_equal(glob(path, 0, NULL, &found), 0);
    path_join(path, found.gl_pathv[0], "thesis.tex");
    write_file(path, "mine", 4);
    child = run_child(convert_body, &c);
    assert_int_equal(child->code, 0);
    assert_non_null(strstr(child->err, "was left by a conversion that was cut off; look through it and remove it"));
    assert_string_equal(read_whole(path, NULL), "mine");
    assert_int_equal(count_names(found.gl_pathv[0]), 1);
    run_command("rm -r '%s'", found.gl_pathv[0], "");
    globfree(&found);
}

// One that is being written by somebody is no leftover, and two that write to one place do not mix.
TEST(others_at_work_are_left_alone) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, NO_LIMIT};
    OutputFolder folder;
    OutputFile file;
    folder_open(&folder, c.to, 100, 1, hf_is_written_name);
    folder_open_file(&folder, &file, "config.json", 2);
    output_write(&file, 0, "{}", 2);
    output_commit(&file);
    folder_pending = NULL; // or the child takes it for its own
    assert_string_equal(run_child(convert_body, &c)->err, "");
    assert_int_equal(count_temporaries(c.to), 1);
    assert_int_equal(count_names(folder.temporary), 1);
    folder_pending = &folder;
    expect_same_file(GOLDEN "llama", c.to, HF_SINGLE_FILE);
    output_discard();
    close(folder.fd);
    assert_int_equal(count_temporaries(c.to), 0);
}

TEST(names_of_temporaries) {
    static const char *const names[][2] = {
        {"config.json.12-3.tmp", "config.json"},
        {"config.json", "config.json"},
        {"model-00001-of-00021.safetensors.1-0.tmp", "model-00001-of-00021.safetensors"},
        {"a.1-2.tmp.3-4.tmp", "a.1-2.tmp"},
        {".1-2.tmp", ""},
        {"x.tmp", "x.tmp"}};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char name[256];
        snprintf(name, sizeof(name), "%s", names[i][0]);
        strip_temporary(name);
        assert_string_equal(name, names[i][1]);
    }
}

// ---- what --model may name ------------------------------------------------------------------------------------------
static void write_checkpoint(const char *run, const char *name, const char *flat) {
    static const char *const files[] = {"model.bin", "optimizer.bin", "state.json", MANIFEST_NAME};
    char checkpoint[PATH_MAX], path[PATH_MAX], text[MANIFEST_TEXT];
    Manifest manifest = {0};
    size_t bytes[4] = {0, 5, 5, 0};
    const char *contents[4] = {read_whole(flat, &bytes[0]), "other", "other", text};
    manifest.bytes[MANIFEST_MODEL] = bytes[0];
    manifest.bytes[MANIFEST_OPTIMIZER] = manifest.bytes[MANIFEST_STATE] = 5;
    bytes[3] = manifest_text(&manifest, text);
    path_join(checkpoint, run, name);
    mkdir(run, 0777), mkdir(checkpoint, 0777);
    for (size_t i = 0; i < 4; i++) {
        path_join(path, checkpoint, files[i]);
        write_file(path, contents[i], bytes[i]);
    }
}

static void find_body(const void *path) {
    char found[PATH_MAX];
    printf("%s\n", model_path_find((const char *)path, found, 0));
}

static void expect_model(const char *path, const char *found) {
    const Child *child = run_child(find_body, path);
    assert_int_equal(child->code, 0);
    if (strncmp(child->out, found, strlen(found)) != 0) test_fail("%s is found, not %s", child->out, found);
    if (strcmp(path, found) != 0 && !strstr(child->err, "note: --model ")) test_fail("no note: %s", child->err);
}

TEST(model_paths) {
    const char *run = fresh_place("run"), *flat = scratch_path("flat.bin");
    char path[PATH_MAX], other[PATH_MAX];
    convert_flat(GOLDEN "llama", flat);
    expect_model(GOLDEN "llama", GOLDEN "llama");
    expect_model(flat, flat);
    expect_model(scratch_path("nothing-here"), scratch_path("nothing-here"));
    expect_model(scratch_folder(), scratch_folder()); // neither a model nor a run: whoever opens it says so
    write_checkpoint(run, "checkpoint-00000005", flat);
    write_checkpoint(run, "checkpoint-00000010", flat);
    write_checkpoint(run, "checkpoint-00000020", flat);
    path_join(path, run, "checkpoint-00000020/" MANIFEST_NAME);
    assert_int_equal(unlink(path), 0);
    path_join(path, run, "checkpoint-00000010/model.bin");
    expect_model(run, path); // the last complete one
    assert_non_null(strstr(run_child(find_body, run)->err, "checkpoint-00000020 is passed over: it has no DONE"));
    path_join(other, run, "checkpoint-00000005");
    path_join(path, run, "checkpoint-00000005/model.bin");
    expect_model(other, path);
    path_join(other, run, "checkpoint-00000020");
    expect_refused(find_body, other, 1, "checkpoint-00000020: is no complete checkpoint: it has no DONE; give another");
    path_join(other, run, "checkpoint-00000005");
    assert_int_equal(truncate(path, 4096), 0);
    expect_refused(find_body, other, 1, "is no complete checkpoint: model.bin has 4096 bytes, not 169696");
    run_command("rm -r '%s/checkpoint-00000010' '%s/checkpoint-00000005'", run, run);
    assert_non_null(
        strstr(run_child(find_body, run)->err, "is the folder of a run, but none of its checkpoints is complete"));
    run_command("cp " GOLDEN "llama/config.json '%s'", run, ""); // a model, whatever else is there
    expect_model(run, run);
}

int main(int argc, char **argv) {
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, SIG_DFL);
    RUN_LISTED(argc, argv, scratch_remove);
}
