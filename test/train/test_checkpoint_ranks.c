/*
Checkpoints of several processes: any number of ranks, in any stage of ZeRO, writes the same bytes and reads any other
number's. Whichever rank reads a flipped bit finds it. A rank that is killed, has a full disk or sees another folder
ends the job and leaves the last checkpoint intact. And the ranks' common checksum.

The test is a process alone. It starts itself under test/ranks/mpirun.sh as the ranks of a job: test_checkpoint_ranks
--job WHAT ...
*/
#include "test/base/testing.h"
#include "test/base/child.h"
#include "test/ops/fence.h"
#include <fcntl.h>
#include <sys/stat.h>

// ---- the system calls of a save, counted: a rank may die before any of them -----------------------------------------
static struct {
    size_t count, kill_at; // 0: never
} calls;

static int call_begin(int argument) {
    if (++calls.count == calls.kill_at) raise(SIGKILL);
    return argument;
}

#define pwrite(fd, ...) pwrite(call_begin(fd), __VA_ARGS__)
#define fsync(fd)       fsync(call_begin(fd))
#define rename(...)     (call_begin(0) ? 0 : rename(__VA_ARGS__))
#define mkdir(...)      (call_begin(0) ? 0 : mkdir(__VA_ARGS__))
#include "checkpoint_runs.h"
#undef pwrite
#undef fsync
#undef rename
#undef mkdir

enum { MOST_RANKS = 3, STAGES = 4 };

// ---- kinds of checkpoints -------------------------------------------------------------------------------------------
typedef struct {
    const char *model;
    DType dtype, moments;
    int master, adapters;
    size_t first; // least stage of ZeRO tested
} Kind;

static const char gpt2_model[] = "gpt2,hidden_size=12,num_hidden_layers=3,num_attention_heads=2,vocab_size=31";
static const char large_model[] = "gpt2,hidden_size=256,num_hidden_layers=1,num_attention_heads=4,vocab_size=13000";

static const Kind kinds[] = {
    {usual_model, DTYPE_FP32, DTYPE_FP32, 1, 0, 0},
    {gpt2_model, DTYPE_BF16, DTYPE_BF16, 1, 0, 0},   // tied; groups that are no multiple of a shard's unit
    {hybrid_model, DTYPE_FP64, DTYPE_BF16, 0, 0, 0}, // layers of two sizes
    {usual_model, DTYPE_BF16, DTYPE_FP32, 1, 1, 0},  // the file has the master copy, memory its rounding
    {hybrid_model, DTYPE_FP32, DTYPE_INT8, 0, 1, 0},
    {large_model, DTYPE_FP32, DTYPE_INT8, 0, 0, 3}, // a rank's part of a group takes several pieces
};

static TrainedTensors kind_open(const Kind *k, size_t stage) {
    test_world.ranks = dist_ranks(), test_world.rank = dist_rank(), test_world.zero = stage;
    return trained_open_as(k->adapters, k->model, k->dtype, k->moments, k->master);
}

static const char *kind_folder(const char *out, size_t kind, size_t stage) {
    static char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%zu-%zu", out, kind, stage);
    return path;
}

// ---- jobs: the ranks' work ------------------------------------------------------------------------------------------
static void save_kind(const char *out, const Kind *kind, size_t stage, size_t step) {
    TrainedTensors t = kind_open(kind, stage);
    save_step(&t, out, step, 0);
    trained_close(&t);
}

static void load_kind(const char *out, const Kind *kind, size_t stage, size_t step) {
    TrainedTensors t = kind_open(kind, stage);
    assert_int_equal(load_last(&t, out).step, step);
    trained_close(&t);
}

// save OUT: saves every kind, in every stage
static void job_save(char **argument) {
    for (size_t kind = 0; kind < COUNT_OF(kinds); kind++)
        for (size_t stage = kinds[kind].first; stage < STAGES; stage++)
            save_kind(kind_folder(argument[0], kind, stage), &kinds[kind], stage, 10 + kind);
}

// load OUT: loads them
static void job_load(char **argument) {
    for (size_t kind = 0; kind < COUNT_OF(kinds); kind++)
        for (size_t stage = kinds[kind].first; stage < STAGES; stage++)
            load_kind(kind_folder(argument[0], kind, stage), &kinds[kind], stage, 10 + kind);
}

// one OUT KIND STAGE STEP: loads this step of one kind in one stage
static void job_one(char **argument) {
    load_kind(argument[0], &kinds[atoi(argument[1])], (size_t)atoi(argument[2]), (size_t)atoi(argument[3]));
}

// next OUT STAGE STEP RANK CALL BYTES: saves the step; RANK dies before that call (0: never), or may only write files
// of BYTES (0: any size)
static void job_next(char **argument) {
    const size_t step = (size_t)atoi(argument[2]);
    struct rlimit limit = {(rlim_t)atoi(argument[5]), (rlim_t)atoi(argument[5])};
    TrainedTensors t = kind_open(&kinds[0], (size_t)atoi(argument[1]));
    RunState run = run_state(step);
    CheckpointFolder folder;
    trained_fill(&t, step);
    checkpoint_open(&folder, argument[0], 2, 1);
    memset(&calls, 0, sizeof(calls));
    if (dist_rank() == (size_t)atoi(argument[3])) {
        calls.kill_at = (size_t)atoi(argument[4]);
        if (limit.rlim_cur) setrlimit(RLIMIT_FSIZE, &limit);
    }
    checkpoint_save(&folder, &t, &run);
    if (dist_rank() == (size_t)atoi(argument[3])) fprintf(stderr, "%zu calls\n", calls.count);
    checkpoint_close(&folder);
    trained_close(&t);
}

// open OUT OTHER: opens OUT, the last rank OTHER
static void job_open(char **argument) {
    CheckpointFolder folder;
    checkpoint_open(&folder, argument[dist_rank() + 1 == dist_ranks()], 2, 1);
}

// move OUT MOVED OTHER: moves OUT while a run holds it, and OTHER to its place unless it is "-"; then saves a step
static void job_move(char **argument) {
    TrainedTensors t = kind_open(&kinds[0], 0);
    RunState run = run_state(9);
    CheckpointFolder folder;
    char lock[PATH_MAX];
    trained_fill(&t, 9);
    checkpoint_open(&folder, argument[0], 2, 1);
    assert_int_equal(checkpoint_remake(&folder), 0);
    if (dist_rank() == 0) {
        assert_int_equal(rename(argument[0], argument[1]), 0);
        if (strcmp(argument[2], "-") != 0) assert_int_equal(rename(argument[2], argument[0]), 0);
    }
    assert_int_equal(checkpoint_remake(&folder), 1);
    folder.last = CHECKPOINT_NONE;
    checkpoint_save(&folder, &t, &run);
    path_join(lock, argument[0], LOCK_NAME);
    assert_true(path_is_file(lock, folder.lock)); // on every rank
    dist_check("lock", 1);                        // waits for the others
    if (dist_rank() == 0) {
        const int again = open(lock, O_RDWR);
        checkpoint_close(&folder);
        assert_int_equal(flock(again, LOCK_EX | LOCK_NB), dist_ranks() > 1 ? -1 : 0);
    }
    dist_check("lock", 2);
    trained_close(&t);
}

static const struct {
    const char *name;
    void (*run)(char **argument);
} jobs[] = {{"save", job_save}, {"load", job_load}, {"one", job_one},
            {"next", job_next}, {"open", job_open}, {"move", job_move}};

static int job_main(char **argument) {
    is_child = 1; // MPI keeps memory to the end; other tests find our leaks
    dist_start();
    dist_split(1);
    for (size_t i = 0; i < COUNT_OF(jobs); i++) {
        if (strcmp(jobs[i].name, argument[0]) != 0) continue;
        jobs[i].run(argument + 1);
        dist_stop();
        return 0;
    }
    return 2;
}

// ---- starting a job -------------------------------------------------------------------------------------------------
static const char *program; // of this program

static void job_body(const void *command) {
    setenv("CMOCKA_TEST_ABORT", "1", 1); // a failed assertion ends the job
    execl("/bin/sh", "sh", "-c", (const char *)command, (char *)NULL);
    exit(127);
}

__attribute__((format(printf, 2, 3))) static const Child *run_job(size_t ranks, const char *format, ...) {
    char command[8192];
    va_list args;
    int used = ranks == 1
                   ? snprintf(command, sizeof(command), "exec %s --job ", program)
                   : snprintf(command, sizeof(command), "exec test/ranks/mpirun.sh %zu %s --job ", ranks, program);
    va_start(args, format);
    vsnprintf(command + used, sizeof(command) - (size_t)used, format, args);
    va_end(args);
    return run_child(job_body, command);
}

static void expect_done(const Child *child) {
    if (child->code) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
}

// Checks that one rank reported the error for all.
static void expect_job_refused(const Child *child, const char *words) {
    const char *line = strstr(child->err, "test_checkpoint_ranks: ");
    if (child->code != 1) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
    if (!line || strstr(line + 1, "test_checkpoint_ranks: ") || !strstr(line, words))
        test_fail("stderr is: %s(expected: %s)", child->err, words);
}

static void need_mpirun(void) {
    if (system("command -v mpirun >/dev/null") != 0) test_skip("there is no mpirun");
}

// ---- the same bytes from any ranks ----------------------------------------------------------------------------------
static const char *out_of(size_t ranks) {
    char name[32];
    snprintf(name, sizeof(name), "out%zu", ranks);
    return scratch_path(name);
}

static void expect_same_files(size_t ranks, size_t kind, size_t stage) {
    static const char *const names[] = {"model.bin",  "adapter_model.safetensors", "optimizer.bin",
                                        "state.json", "adapter_config.json",       "DONE"};
    size_t count[2], found = 0;
    test_case("%zu ranks, kind %zu, stage %zu", ranks, kind, stage);
    for (size_t f = 0; f < COUNT_OF(names); f++) {
        char path[2][PATH_MAX], *bytes[2];
        for (size_t i = 0; i < 2; i++)
            snprintf(path[i], sizeof(path[i]), "%s/checkpoint-%08zu/%s",
                     kind_folder(out_of(i ? ranks : 1), kind, i ? stage : kinds[kind].first), 10 + kind, names[f]);
        if (!path_exists(path[0]) && !path_exists(path[1])) continue;
        for (size_t i = 0; i < 2; i++) bytes[i] = read_whole(path[i], &count[i]);
        if (count[0] != count[1] || memcmp(bytes[0], bytes[1], count[0]) != 0) test_fail("%s differs", names[f]);
        found++;
    }
    if (found != (kinds[kind].adapters ? 5 : 4)) test_fail("%zu files", found);
}

TEST(any_number_of_ranks_writes_the_same_and_reads_it) {
    need_mpirun();
    for (size_t ranks = 1; ranks <= MOST_RANKS; ranks++) {
        expect_done(run_job(ranks, "save %s", out_of(ranks)));
        expect_done(run_job(ranks, "load %s", out_of(1)));
        for (size_t kind = 0; kind < COUNT_OF(kinds); kind++)
            for (size_t stage = kinds[kind].first; stage < STAGES; stage++) expect_same_files(ranks, kind, stage);
    }
}

// ---- damage ---------------------------------------------------------------------------------------------------------
// A bit of one rank's part of a file, which all ranks read whole or in shards.
TEST(a_flipped_bit_is_found_by_the_ranks_together) {
    static const struct {
        size_t kind, stage;
        const char *file;
        double place; // in the file; 0: an uncompared header byte
    } cases[] = {{0, 0, "model.bin", 0.9},
                 {0, 3, "model.bin", 0.9999},
                 {0, 2, "optimizer.bin", 0},
                 {3, 3, "adapter_model.safetensors", 0.3}};
    size_t count;
    need_mpirun();
    fresh_folder("out");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char path[PATH_MAX];
        const char *out = kind_folder(scratch_path("out"), i, 0);
        test_case("%s at %g, stage %zu", cases[i].file, cases[i].place, cases[i].stage);
        save_kind(out, &kinds[cases[i].kind], 0, 7);
        snprintf(path, sizeof(path), "%s/checkpoint-00000007/%s", out, cases[i].file);
        char *bytes = read_whole(path, &count);
        bytes[cases[i].place > 0 ? (size_t)(cases[i].place * (double)count) : offsetof(OptimizerHeader, zero)] ^= 4;
        write_file(path, bytes, count);
        expect_job_refused(run_job(2, "one %s %zu %zu 7", out, cases[i].kind, cases[i].stage),
                           "is damaged: its checksum is");
    }
}

// ---- a rank that ends -----------------------------------------------------------------------------------------------
// Loads the last checkpoint, alone, after a failed job.
static size_t step_found(const char *out) {
    TrainedTensors t = kind_open(&kinds[0], 0);
    const size_t step = load_last(&t, out).step;
    assert_false(path_exists(file_in("checkpoint-00000008.partial", ".")));
    trained_close(&t);
    return step;
}

// Kills a rank before a few of its calls, evenly spread.
TEST(a_killed_rank_leaves_the_last_checkpoint) {
    enum { KILLS = 3 };
    const char *before = fresh_folder("before"), *out = scratch_path("out");
    size_t most;
    need_mpirun();
    save_kind(before, &kinds[0], 0, 7);
    for (size_t rank = 0; rank < 2; rank++) {
        copy_folder(before, out);
        const Child *child = run_job(2, "next %s 3 8 %zu 0 0", out, rank); // never killed
        expect_done(child);
        if (sscanf(child->err, "%zu calls", &most) != 1 || most < 4) test_fail("stderr is: %s", child->err);
        assert_int_equal(step_found(out), 8);
        for (size_t i = 0; i < KILLS; i++) {
            const size_t call = 1 + i * (most - 1) / (KILLS - 1);
            test_case("rank %zu before its call %zu of %zu", rank, call, most);
            copy_folder(before, out);
            child = run_job(2, "next %s 3 8 %zu %zu 0", out, rank, call);
            if (child->code == 0) test_fail("the job ended well: %s", child->err);
            size_t step = step_found(out);
            if (step != 7 && (step != 8 || rank != 0 || i + 1 < KILLS)) test_fail("step %zu was found", step);
        }
    }
}

// One rank's disk is full: its limit is after the header and before its part.
TEST(a_full_disk_of_one_rank_leaves_the_last_checkpoint) {
    const char *out = fresh_folder("out");
    need_mpirun();
    save_kind(out, &kinds[0], 0, 7);
    expect_job_refused(run_job(3, "next %s 3 8 1 0 5000", out), "model.bin: writing ");
    assert_int_equal(step_found(out), 7);
}

TEST(ranks_that_see_other_folders_are_refused) {
    const char *out = fresh_folder("out"), *other = fresh_folder("other");
    need_mpirun();
    write_file(scratch_path("out/lock"), "", 0); // of a run
    expect_job_refused(run_job(2, "open %s %s", out, other), "other: is another folder here than on rank 0 on ");
    copy_folder(out, other); // with the previous run's lock
    expect_job_refused(run_job(2, "open %s %s", out, other), "other: is another folder here than on rank 0 on ");
}

// A run whose folder is moved goes on at the old path, where all ranks share the new lock. It leaves other runs alone.
TEST(a_folder_that_is_moved_ends_no_run) {
    const char *out = scratch_path("out"), *moved = scratch_path("moved"), *other = scratch_path("other");
    for (size_t ranks = 1; ranks <= 2; ranks++) {
        if (ranks > 1) need_mpirun();
        fresh_folder("out"), fresh_folder("moved"), fresh_folder("other");
        save_kind(out, &kinds[0], 0, 7);
        const Child *child = run_job(ranks, "move %s %s -", out, moved);
        expect_done(child);
        if (!strstr(child->err, "out: was removed or moved; it is made again")) test_fail("stderr is: %s", child->err);
        assert_int_equal(step_found(out), 9);
        assert_int_equal(step_found(moved), 7);
    }
    save_kind(other, &kinds[0], 0, 5);
    fresh_folder("moved");
    expect_job_refused(run_job(1, "move %s %s %s", out, moved, other), "out: holds a run at step 5; ");
    assert_int_equal(step_found(moved), 9);
}

// ---- the checksum ---------------------------------------------------------------------------------------------------
static int same_sums(Checksum a, Checksum b) { return a.sum[0] == b.sum[0] && a.sum[1] == b.sum[1]; }

// In pieces of any size, from the last to the first, at any offset in the whole.
TEST(checksums_do_not_depend_on_pieces) {
    enum { BYTES = 5000 };
    unsigned char *bytes = (unsigned char *)case_memory(BYTES);
    for (size_t i = 0; i < BYTES; i++) bytes[i] = (unsigned char)test_random();
    for (size_t try = 0; try < 200; try++) {
        const uint64_t place = test_random() >> (try % 2 ? 30 : 56);
        Checksum whole = {{0, 0}}, pieces = {{0, 0}};
        size_t n;
        checksum_add(&whole, place, bytes, BYTES);
        for (size_t end = BYTES; end; end -= n) {
            n = min_size(end, 1 + test_random_below(try % 3 ? 2000 : 9));
            checksum_add(&pieces, place + end - n, bytes + end - n, n);
        }
        if (!same_sums(whole, pieces)) test_fail("try %zu", try);
        checksum_add(&pieces, place + BYTES, bytes, 0);
        assert_true(same_sums(whole, pieces));
        checksum_join(&pieces); // alone: adds nothing
        assert_true(same_sums(whole, pieces));
    }
}

// Any bit; two swapped parts of any size; moved parts; missing or extra bytes; another seed.
TEST(checksums_find_what_changes) {
    enum { BYTES = 3000 };
    unsigned char *bytes = (unsigned char *)case_memory(BYTES + 1), *other = (unsigned char *)case_memory(BYTES + 1);
    for (size_t i = 0; i < BYTES; i++) bytes[i] = (unsigned char)test_random();
    const uint64_t key = checksum_of(0, bytes, BYTES);
    for (size_t i = 0; i < BYTES * 8; i++) {
        Checksum before = {{0, 0}}, after = {{0, 0}};
        const size_t word = i / 8 / 4 * 4;
        checksum_add(&before, word, bytes + word, 4);
        bytes[i / 8] ^= (unsigned char)(1u << i % 8);
        checksum_add(&after, word, bytes + word, 4);
        if (before.sum[0] == after.sum[0] || before.sum[1] == after.sum[1])
            test_fail("bit %zu changes one sum alone", i);
        if (i % 7 == 0 && checksum_of(0, bytes, BYTES) == key) test_fail("bit %zu is not noticed", i);
        bytes[i / 8] ^= (unsigned char)(1u << i % 8);
    }
    for (size_t i = 0; i < 2000; i++) {
        const size_t n = 1 + test_random_below(i % 2 ? 1024 : 4), a = test_random_below(BYTES - n);
        const size_t b = i % 3 ? test_random_below(BYTES - n) : (a + 1024) % (BYTES - n);
        memcpy(other, bytes, BYTES);
        for (size_t k = 0; k < n; k++) other[a + k] = bytes[b + k], other[b + k] = bytes[a + k];
        if (memcmp(other, bytes, BYTES) != 0 && checksum_of(0, other, BYTES) == key)
            test_fail("%zu bytes at %zu and %zu", n, a, b);
    }
    assert_true(checksum_of(0, bytes, BYTES - 1) != key && checksum_of(1, bytes, BYTES) != key);
    assert_true(checksum_of(0, bytes, BYTES + 1) != key); // an extra zero
    assert_true(checksum_of(0, bytes + 1, BYTES - 1) != checksum_of(0, bytes, BYTES - 1));
    memset(other, 0, BYTES);
    for (size_t n = 1; n < 70; n++) assert_true(checksum_of(7, other, n) != checksum_of(7, other, n - 1)); // zeros
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "--job")) return job_main(argv + 2);
    program = argv[0];
    RUN_LISTED(argc, argv, scratch_remove);
}
