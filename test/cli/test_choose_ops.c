// Which op set --dtype and --device choose, among pretended ones whose GPU answers or does not.
#include "option_lines.h"

static const Ops *const *sets; // the linked ones
static const Ops *taken;
#define op_sets    sets
#define ops_device taken
#include "llmc/run/choose_ops.h"
#undef op_sets
#undef ops_device

static const char *problem; // of the GPU
static size_t asked;        // how often it was asked
static const char *gpu_problem(void) { return asked++, problem; }
static const char *no_problem(void) { return NULL; }

static const Ops cuda_bf16 = {.name = "cuda", .stored = DTYPE_BF16, .device_problem = gpu_problem},
                 cuda_fp32 = {.name = "cuda", .stored = DTYPE_FP32, .device_problem = gpu_problem},
                 cpu_fp32 = {.name = "cpu", .stored = DTYPE_FP32, .device_problem = no_problem},
                 cpu_bf16 = {.name = "cpu", .stored = DTYPE_BF16, .device_problem = no_problem};
static const Ops *const all[] = {&cuda_bf16, &cuda_fp32, &cpu_fp32, &cpu_bf16, NULL};
static const Ops *const cpu[] = {&cpu_fp32, &cpu_bf16, NULL}, *const cuda[] = {&cuda_bf16, NULL};

static void choose(const void *line) {
    Options o = parse((const char *)line);
    choose_ops(&o);
    if (o.verb != VERB_TRAIN) return;
    assert_int_equal(o.dtype, (int)taken->stored);
    assert_int_equal(o.device, strcmp(taken->name, "cpu") ? DEVICE_CUDA : DEVICE_CPU);
}

static void choose_and_print(const void *line) {
    choose(line);
    printf("%s %s", taken->name, dtype_name(taken->stored));
}

#define BP    "bp --init gpt2 "
#define TRAIN "train --init gpt2 --data d "

TEST(the_gpu_is_taken_if_it_answers) {
    static const char none[] = "no GPU was found; use another", old[] = "the GPU's driver is old; update it";
    static const struct {
        const char *line;
        const Ops *const *sets;
        const char *problem;
        const Ops *wanted;
    } cases[] = {
        {BP, all, NULL, &cuda_bf16},
        {BP, all, none, &cpu_fp32},
        {BP "--quiet", all, old, &cpu_fp32},
        {BP "--dtype fp32", all, NULL, &cuda_fp32},
        {BP "--dtype fp32", all, none, &cpu_fp32},
        {BP "--dtype bf16", all, none, &cpu_bf16},
        {TRAIN, all, none, &cpu_fp32},
        {TRAIN "--device cpu", all, NULL, &cpu_fp32},
        {TRAIN "--device cpu --bf16", all, NULL, &cpu_bf16},
        {TRAIN "--device cuda", all, none, &cuda_bf16}, // its first allocation ends the run
        {BP, cuda, none, &cuda_bf16},                   // there is nothing else
        {BP, cpu, NULL, &cpu_fp32},
        {"plan --init gpt2 --dtype double", all, NULL, &cuda_bf16},
        {"plan --init gpt2 --dtype bf16", cpu, NULL, &cpu_bf16},
        {"convert --model m --out o --dtype bf16", all, NULL, &cpu_fp32},
        {"info --init gpt2", all, NULL, &cpu_fp32},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s, %s", cases[i].line, cases[i].problem ? cases[i].problem : "a GPU");
        sets = cases[i].sets, problem = cases[i].problem, taken = NULL, asked = 0;
        choose(cases[i].line);
        if (taken != cases[i].wanted) test_fail("it is %s %s", taken->name, dtype_name(taken->stored));
        if (asked > 1 || (asked && (cases[i].sets != all || strstr(cases[i].line, "--device"))))
            test_fail("the GPU was asked %zu times", asked); // asking makes a context
    }
    sets = all, problem = old;
    const Child *child = run_child(choose_and_print, BP);
    if (strcmp(child->out, "cpu fp32") != 0 ||
        !strstr(child->err, "note: --device auto takes the CPU: the GPU's driver is old; update it\n"))
        test_fail("%s; %s", child->out, child->err);
}

TEST(what_is_not_linked_is_refused) {
    static const char of_all[] = "; make BACKEND=all builds it", of_one[] = "; make builds it";
    sets = cpu;
    expect_refused(choose, BP "--device cuda", EXIT_USAGE, "--device cuda --dtype auto is not in this program, which");
    expect_refused(choose, BP "--device cuda", EXIT_USAGE, of_all);
    sets = cuda;
    expect_refused(choose, BP "--dtype fp32", EXIT_USAGE, of_one);
    expect_refused(choose, TRAIN "--dtype double", EXIT_USAGE, "; make PRECISION=double builds it");
}

int main(int argc, char **argv) {
    static char name[] = "train"; // the name in messages
    program_invocation_name = program_invocation_short_name = name;
    RUN_LISTED(argc, argv, scratch_remove);
}
