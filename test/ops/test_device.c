/*
What a user sees of a GPU that fails, over pretended calls of CUDA and cuBLASLt (test/emulate): whatever call it is in,
a run ends with one line that says what to do, exit code 1, and soon.
*/
#define main train_main
#include "train_gpt.cu"
#undef main
#include "test/base/child.h"

enum { cudaErrorMemoryAllocation = 2, cudaErrorECCUncorrectable = 214, cudaErrorLaunchFailure = 719 };

#define TINY                                                                                                           \
    "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,"       \
    "vocab_size=33"

static char fault[32];

// Runs a command line, with CUDA_FAULT.
static void run(const void *context) {
    char words[512], *word[32];
    int n = 0;
    setenv("CUDA_FAULT", fault, 1);
    snprintf(words, sizeof(words), "%s", (const char *)context);
    for (char *w = strtok(words, " "); w; w = strtok(NULL, " ")) word[n++] = w;
    alarm(20);
    exit(train_main(n, word));
}

#define BP "train bp --quiet --json --threads 1 --init " TINY " --seq-len 24 --chunk 8 --keep attention --keep-on host"

// Calls fail one after the other: the first 60, where a device is taken, and one of `stride` of the others.
static void sweep(const char *command, int error, const char *after, int stride) {
    for (int call = 1;; call += call < 60 ? 1 : stride) {
        snprintf(fault, sizeof(fault), "%d %d%s", error, call, after);
        const Child *child = run_child(run, command);
        const size_t length = strlen(child->err);
        test_case("call %d returns %d%s", call, error, after);
        if (child->code == 0 && child->out[0] && !length && call > 400) return; // it is not reached
        if (child->code != 1) test_fail("exit code %d; stderr: %s", child->code, child->err);
        if (count_lines(child->err) != 1 || length > 200 ||
            (!strstr(child->err, "; ") && !strstr(child->err, "no algo")))
            test_fail("not one line of at most 200 bytes, %zu, that says what to do: %s", length, child->err);
    }
}

TEST(every_call_that_fails_ends_in_one_line) {
    sweep(BP, cudaErrorLaunchFailure, "", 7);
    sweep(BP, cudaErrorECCUncorrectable, " on", 13);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
