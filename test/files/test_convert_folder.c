/*
The folder that `convert` writes is complete or absent: an occupied path, full disks, failures and kill -9 on the way,
other writers. Signals are in test_file.c.
*/
#include <sys/statvfs.h>
#include "test/base/testing.h"

// Intercepts every query of free space.
static uint64_t space_left; // bytes; 0: the true space
static int small_disk(const char *path, struct statvfs *status) {
    int result = statvfs(path, status);
    if (space_left) status->f_frsize = 1, status->f_bavail = space_left;
    return result;
}
#define statvfs(path, status) small_disk(path, status)
#include "convert_files.h"
#undef statvfs

// ---- places ---------------------------------------------------------------------------------------------------------
TEST(places) {
    static const struct {
        const char *prepare, *to, *words; // a command, a path in the scratch folder; NULL: the folder is used
    } cases[] = {
        {"echo >place", "place", "place: is a file, not a folder"},
        {"rm place && mkdir place", "place", NULL},
        {"true", "place", "place: the folder is not empty"},
        {"rm -r place && mkdir place && touch place/.hidden", "place", "the folder is not empty"},
        {"rm -r place && ln -s nowhere place", "place", "place: is a symbolic link that leads nowhere"},
        {"mkdir nowhere", "place", NULL}, // the link stays
        {"test -h place && rm -r place nowhere", "place///", NULL},
        {"true", "no/such/folder", "no/such/folder: the folder cannot be created: No such file or directory"},
        {"true", "../../proc/folder", "proc/folder: "},
    };
    Conversion c = {GOLDEN "llama", NULL, NULL, NULL, NO_LIMIT, 0};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        run_command("cd '%s' && { %s; }", scratch_folder(), cases[i].prepare);
        c.to = scratch_path(cases[i].to);
        if (cases[i].words) {
            expect_refused(convert_body, &c, 1, cases[i].words);
            continue;
        }
        convert_body(&c);
        expect_same_file(GOLDEN "llama", c.to, HF_SINGLE_FILE);
    }
    c.from = c.to = copy_golden("llama");
    expect_refused(convert_body, &c, 1, "llama: the folder is not empty");
}

static void convert_into_here(const void *context) {
    Conversion c = *(const Conversion *)context;
    char from[PATH_MAX];
    if (!realpath(c.from, from) || chdir(c.to) != 0) exit(3);
    c.from = from, c.to = ".";
    convert_body(&c);
}

TEST(not_the_folder_one_is_in) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("here"), NULL, NO_LIMIT, 0};
    run_command("mkdir '%s'", c.to, "");
    expect_refused(convert_into_here, &c, 1, ".: is the current folder");
}

// ---- disks and interruptions ----------------------------------------------------------------------------------------
TEST(room_is_looked_for_beforehand) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, NO_LIMIT, 0};
    space_left = 150000; // of 165,600 and headers
    expect_refused(convert_body, &c, 1, "bytes), but only 146.48 KiB are free there; make room or");
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
    HfWrite write = hf_write_prepare(source, NULL, NULL, c->max_shard_size, 0, QUANT_NONE, 0);
    if (truncate(source->files[0].path, 100000) != 0) exit(3);
    hf_write(&write, c->to, 0);
}

static void convert_read_only(const void *context) {
    if (geteuid() == 0 && seteuid(65534) != 0) exit(77);
    convert_body(context);
}

TEST(failures_leave_nothing) {
    static const struct {
        size_t file_limit, max_shard_size; // with shards, many files are complete when one fails
        const char *words;
    } cases[] = {{100000, NO_LIMIT, "model.safetensors: reserving 163.80 KiB failed: File too large"},
                 {21000, 1, "-of-00021.safetensors: reserving "}};
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, 50000, 0};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        file_limit.rlim_cur = file_limit.rlim_max = cases[i].file_limit, c.max_shard_size = cases[i].max_shard_size;
        expect_refused(convert_with_limit, &c, 1, cases[i].words);
        expect_nothing_at(c.to);
    }
    c.from = copy_golden("llama");
    run_command("cd '%s' && mkdir additional_chat_templates && echo >additional_chat_templates/rag.jinja%s", c.from,
                "");
    expect_refused(convert_what_shrinks, &c, 1, "model.safetensors: ends at byte 100000");
    expect_nothing_at(c.to);
    run_command("mkdir -m 555 -p '%s' && chmod 755 '%s'", scratch_path("closed"), scratch_folder());
    c.from = GOLDEN "llama", c.to = scratch_path("closed/folder");
    expect_refused(convert_read_only, &c, 1, "closed/folder: the folder cannot be created: Permission denied");
    expect_nothing_at(c.to);
}

// Kills the process after three files.
static void convert_and_end(const void *context) {
    const Conversion *c = (const Conversion *)context;
    WeightSource *source = weights_open(c->from);
    HfWrite write = hf_write_prepare(source, NULL, NULL, 1, 0, QUANT_NONE, 0);
    OutputFolder folder;
    OutputFile file;
    folder_open(&folder, c->to, 1000, 30, hf_is_written_name, 0);
    hf_write_config(&write, &folder);
    for (size_t i = 0; i < 3; i++) {
        Progress progress = progress_begin(NULL, "", 0, 1);
        double done = 0;
        hf_write_shard(&write, i, i + 1, &folder, &progress, &done);
    }
    folder_write_file(&folder, "additional_chat_templates/rag.jinja", "x", 1);
    folder_open_file(&folder, &file, "additional_chat_templates/tool_use.jinja", 1000);
    output_write(&file, 0, "half", 4);
    raise(SIGKILL);
    exit(5);
}

// The next conversion to a path clears the leftovers of a kill, except files of others.
TEST(leftovers_of_kills) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, 1, 0};
    for (int theirs = 0; theirs < 2; theirs++) {
        run_command("rm -rf '%s' '%s'.*", c.to, c.to);
        for (int kills = 0; kills < 2; kills++) { // the second clears the first's leftovers
            assert_int_equal(run_child(convert_and_end, &c)->code, 1000 + SIGKILL);
            assert_false(path_exists(c.to));
            assert_int_equal(count_temporaries(c.to), 1);
        }
        if (theirs) run_command("echo mine > \"$(echo '%s'.*)/thesis.tex\"", c.to, "");
        const Child *child = run_child(convert_body, &c);
        assert_int_equal(child->code, 0);
        assert_int_equal(count_lines(child->err), 1);
        assert_non_null(strstr(child->err, theirs
                                               ? "was left by an interrupted process and holds other files; remove it"
                                               : ".tmp, left by an interrupted process\n"));
        assert_int_equal(count_paths("%s.*/*", c.to), theirs); // the thesis
        assert_int_equal(count_temporaries(c.to), theirs);
        expect_shards(c.to, GOLDEN "llama", 1, 21);
    }
    run_command("rm -r '%s'.*", c.to, "");
}

// A folder in use is no leftover; two writers to one path do not mix.
TEST(others_at_work_are_left_alone) {
    Conversion c = {GOLDEN "llama", NULL, fresh_place("folder"), NULL, NO_LIMIT, 0};
    OutputFolder folder;
    OutputFile file;
    folder_open(&folder, c.to, 100, 1, hf_is_written_name, 0);
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

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
