/*
Failing GPUs as a user sees them, over pretended calls of CUDA and cuBLASLt (test/emulate): whichever call fails, a run
soon ends with one line that says what to do, and exit code 1.
*/
#define MEMINFO     "build/test-meminfo"
#define PROC_CGROUP "build/test-cgroup/self"
#define CGROUP      "build/test-cgroup"
#define main        train_main
#include "train_gpt.cu"
#undef main
#include "test/base/child.h"

enum { cudaErrorMemoryAllocation = 2, cudaErrorECCUncorrectable = 214, cudaErrorLaunchFailure = 719 };

#define TINY                                                                                                           \
    "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,"       \
    "vocab_size=33"

static char fault[32];

// Runs a command line with CUDA_FAULT.
static void run(const void *context) {
    char words[512], *word[32];
    int n = 0;
    setenv("CUDA_FAULT", fault, 1);
    snprintf(words, sizeof(words), "%s", (const char *)context);
    for (char *w = strtok(words, " "); w; w = strtok(NULL, " ")) word[n++] = w;
    alarm(200);
    exit(train_main(n, word));
}

#define BP "train bp --quiet --json --threads 1 --init " TINY " --seq-len 24 --chunk 8 --keep attention --keep-on host"
#define DISK                                                                                                           \
    "train bp --quiet --json --threads 1 --init " TINY " --seq-len 24 --chunk 8 --inputs disk --disk build --repeat 1"

// Fails one call after the other: the first 60, which open the device, and every `stride`-th of the others.
static void sweep(const char *command, int error, const char *after, int stride) {
    for (int call = 1;; call += call < 60 ? 1 : stride) {
        snprintf(fault, sizeof(fault), "%d %d%s", error, call, after);
        const Child *child = run_child(run, command);
        const size_t length = strlen(child->err);
        test_case("call %d returns %d%s", call, error, after);
        if (child->code == 0 && strstr(child->err, "could not be pinned (")) continue; // the device is well
        if (child->code == 0 && child->out[0] && !length && call > 400) return;        // the call is never reached
        if (child->code != 1) test_fail("exit code %d; stderr: %s", child->code, child->err);
        if (count_lines(child->err) != 1 || length > 200 ||
            (!strstr(child->err, "; ") && !strstr(child->err, "no algo")))
            test_fail("not one line of at most 200 bytes, %zu, that says what to do: %s", length, child->err);
    }
}

TEST(every_call_that_fails_ends_in_one_line) {
    sweep(BP, cudaErrorLaunchFailure, "", all_cases() ? 1 : 17);
    sweep(BP, cudaErrorECCUncorrectable, " on", all_cases() ? 3 : 31);
    setenv("STREAMBP_TRANSFERS", "late", 1); // pretended calls have one thread
    sweep(DISK, cudaErrorLaunchFailure, "", all_cases() ? 1 : 47);
    unsetenv("STREAMBP_TRANSFERS");
}

TEST(memory_that_cannot_be_pinned_is_pageable) {
    static const char *const cases[][2] = {{"1000", "out of memory"}, {"1000 999", "unknown error"}};
    *fault = 0;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s", cases[i][1]);
        setenv("CUDA_PINNED", cases[i][0], 1);
        const Child *child = run_child(run, BP);
        if (child->code || !strstr(child->err, "of host memory could not be pinned (") ||
            !strstr(child->err, cases[i][1]))
            test_fail("exit code %d: %s", child->code, child->err);
    }
    unsetenv("CUDA_PINNED");
}

#define DOCTOR "train doctor --json --threads 1 --init " TINY " --seq-len 16"

// A failure in the middle is a row of doctor's; later rows are not checked.
TEST(doctor_tells_of_a_device_that_fails) {
    static const int calls[] = {0, 1, 3, 9, 60, 300, 2000};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        snprintf(fault, sizeof(fault), "%d %d on", cudaErrorLaunchFailure, calls[i]);
        if (!calls[i]) *fault = 0;
        const Child *child = run_child(run, DOCTOR);
        test_case("call %d", calls[i]);
        if (child->code != (calls[i] > 0)) test_fail("exit code %d: %s", child->code, child->err);
        cJSON *json = json_parse_object(child->out, strlen(child->out), "doctor's JSON");
        const double wrong = json_get(json, "wrong")->valuedouble, rows = json_get(json, "not_checked")->valuedouble;
        if ((wrong > 0) != (calls[i] > 0) || (rows > 0) != (calls[i] > 0)) test_fail("%s", child->err);
        cJSON_Delete(json);
    }
}

// The first call counts devices, the third makes a context.
TEST(a_device_that_cannot_be_used_says_why) {
    static const struct {
        const char *fault, *words;
    } cases[] = {
        {"100 1", "no GPU was found; nvidia-smi should list it"},
        {"35 1", "the GPU's driver supports CUDA "},
        {"802 1", "no GPU, counting them: system not yet initialized (cudaErrorSystemNotReady); start NVIDIA's"},
        {"803 1", "(cudaErrorSystemDriverMismatch); libcuda.so.1 does not belong to the loaded driver"},
        {"46 3", "no GPU, making a context on one: CUDA-capable device(s) is/are busy or unavailable"},
        {"2 3", "(cudaErrorMemoryAllocation); free what other processes hold (nvidia-smi lists them)"},
        {"209 4", "this program was not built for this GPU's architecture, 9.9: build it with"},
        {"999 5", "no GPU, asking for its memory: unknown error (cudaErrorUnknown); see `dmesg"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        snprintf(fault, sizeof(fault), "%s", cases[i].fault);
        expect_refused(run, BP, 1, cases[i].words);
    }
    *fault = 0;
    setenv("NCCL_ON_MPI_DEVICES", "0", 1), setenv("CUDA_VISIBLE_DEVICES", "7", 1);
    expect_refused(run, BP, 1, "no GPU was found: CUDA_VISIBLE_DEVICES=7 shows none; unset it");
    unsetenv("NCCL_ON_MPI_DEVICES"), unsetenv("CUDA_VISIBLE_DEVICES");
}

static const char *whole_device = "train bp --quiet --json --init " TINY " --seq-len 24 --chunk 8";

static void taken(const char *how, const char *words) {
    *fault = 0;
    setenv("CUDA_TAKEN", how, 1);
    expect_refused(run, whole_device, 1, words);
    unsetenv("CUDA_TAKEN");
}

TEST(a_full_device_says_who_holds_it) {
    taken("8300000000", "what is free of this GPU's 8.00 GiB (others hold 7.73 GiB: see nvidia-smi) is");
    taken("8589934592", "no device memory for cuBLASLt's workspace of 64.00 MiB");
    taken("8589934592 3", "KiB: 7.43 GiB were free before, 1 B are now; check what else takes memory (nvidia-smi)");
}

TEST(kernels_are_loaded_before_memory_is_counted) {
    const size_t libraries = (size_t)(64 + 256) << 20, local = (size_t)1024 * 2048 * 132;
    assert_int_equal(ops_device->memory_available() + libraries + local, (size_t)8 << 30);
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

// Limits of control groups and their parents, their use without file contents, and memory held by a balloon.
TEST(host_memory_that_is_left) {
    if (system("mkdir -p " CGROUP "/a/b " CGROUP "/memory/c " CGROUP "/cpu/c")) test_fail("no folders below " CGROUP);
    write_text(MEMINFO, "MemTotal: 3000 kB\nMemAvailable:  1000 kB\nBalloon:  500 kB\n");
    write_text(PROC_CGROUP, "1:cpu,memory:/none\n0::/a/b\n");
    assert_int_equal(host_memory_available(), 1500 * 1024 + 1);
    write_text(CGROUP "/a/memory.max", "900000\n"), write_text(CGROUP "/a/memory.current", "500000\n");
    write_text(CGROUP "/a/memory.stat", "anon 300000\ninactive_file 100000\n");
    assert_int_equal(host_memory_available(), 500000 + 1);
    write_text(CGROUP "/a/b/memory.max", "300000\n"), write_text(CGROUP "/a/b/memory.current", "400000\n");
    assert_int_equal(host_memory_available(), 1 + 1);
    write_text(CGROUP "/a/b/memory.max", "max\n");
    assert_int_equal(host_memory_available(), 500000 + 1);
    write_text(PROC_CGROUP, "4:memory:/c\n0::/\n");
    write_text(CGROUP "/memory/memory.limit_in_bytes", "70000\n");
    assert_int_equal(host_memory_available(), 70000 + 1);
    write_text(CGROUP "/memory/c/memory.limit_in_bytes", "60000\n");
    write_text(CGROUP "/memory/c/memory.usage_in_bytes", "30000\n");
    write_text(CGROUP "/memory/c/memory.stat", "inactive_file 1\ntotal_inactive_file 20000\n");
    assert_int_equal(host_memory_available(), 50000 + 1);
    // Processors: the least limit of a group and its parents
    assert_true(isinf(cgroup_processors()));
    write_text(PROC_CGROUP, "3:cpuacct,cpu:/c\n0::/a/b\n");
    write_text(CGROUP "/a/cpu.max", "350000 100000\n"), write_text(CGROUP "/a/b/cpu.max", "max 100000\n");
    assert_true(cgroup_processors() == 3.5);
    write_text(CGROUP "/cpu/c/cpu.cfs_quota_us", "-1\n"), write_text(CGROUP "/cpu/c/cpu.cfs_period_us", "50000\n");
    assert_true(cgroup_processors() == 3.5);
    write_text(CGROUP "/cpu/c/cpu.cfs_quota_us", "100000\n");
    assert_true(cgroup_processors() == 2);
    if (system("rm -rf " CGROUP)) test_fail("cannot remove " CGROUP);
    remove(MEMINFO);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
