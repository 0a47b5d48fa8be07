/*
The verb `doctor` on op sets that are wrong on purpose: finds any op that leaves one element off. An op that ends the
program, hangs or finds no memory becomes a row, and the others are still checked.
*/
#include "test/base/child.h"
#include "llmc/verbs/doctor.h"

// Few rows and columns, so that the sample holds all of them
#define TINY                                                                                                           \
    "hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=4,"  \
    "vocab_size=30"
#define TINY_GPT2                                                                                                      \
    "gpt2,hidden_size=16,num_attention_heads=2,n_inner=40,vocab_size=30,max_position_embeddings=64,num_hidden_layers=" \
    "2"

static const char *planted; // the op that is wrong

// Makes a random element of a random tensor larger by at least half the tensor's root mean square, where the running op
// may change the tensor.
static void plant(const char *op) {
    Tensor *t, *chosen = NULL;
    size_t seen = 0;
    if (!planted || strcmp(planted, op) != 0) return;
    for (t = check.tensors; t; t = t->next)
        if (t->use == TENSOR_CHANGED || t->use == TENSOR_WRITTEN)
            if (test_random_below(++seen) == 0) chosen = t;
    const size_t i = test_random_below(tensor_count(chosen));
    const size_t count = tensor_count(chosen);
    char *elements = (char *)checked_malloc(count * dtype_size(chosen->type), "elements");
    double squares = 0;
    ops_device->finish();
    ops_device->copy_out(elements, chosen->memory + GUARD, count * dtype_size(chosen->type));
    for (size_t k = 0; k < count; k++) squares += pow(element_to_double(elements, chosen->type, k), 2);
    const double right = element_to_double(elements, chosen->type, i), size = sqrt(squares / (double)count);
    element_write(elements, chosen->type, i, right * 1.1 + copysign(0.5 * fmax(1, size), right));
    ops_device->copy_in(chosen->memory + GUARD, elements, count * dtype_size(chosen->type));
    free(elements);
}

#define RUN_void(call, op)                                                                                             \
    call;                                                                                                              \
    plant(#op)
#define OP(type, op, parameters, arguments, ...)                                                                       \
    static type planted_##op parameters { RUN_##type(ops_device->op arguments, op); }
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_MEMORY(...)
#include "llmc/ops/op_list.h"

static void *allocate_little(size_t bytes) { return bytes > (size_t)24 << 20 ? NULL : ops_device->allocate(bytes); }

static Ops ops_planted(void) {
    Ops ops = *ops_device;
#define OP(type, op, ...) ops.op = planted_##op;
#define OP_HOST(...)
#define OP_SCRATCH(...)
#define OP_MEMORY(...)
#include "llmc/ops/op_list.h"
    ops.allocate = allocate_little;
    return ops;
}

static void expect_rows(const char *model) {
    static Ops ops;
    static Options options;
    ops = ops_planted(), options.seq_len = 16;
    doctor.ops = &ops, doctor.options = &options, doctor.config = config_from_text(model, "a test", EXIT_USAGE);
    for (size_t i = 0; i < OP_CASES; i++)
        for (size_t trial = 0; trial < 4; trial++) {
            DoctorRow row = {0};
            test_case("%s of %.5s, %s", op_cases[i].name, model, trial ? "one element off" : "right");
            planted = trial ? op_cases[i].name : NULL;
            look_at_op(&row, i);
            if (row.finding != (trial ? FINDING_WRONG : FINDING_OK)) test_fail("its row says: %s", row.text);
        }
    planted = NULL;
    memset(&doctor, 0, sizeof(doctor));
}

TEST(every_op_is_found_wrong) {
    expect_rows("qwen3," TINY);
    expect_rows(TINY_GPT2);
    expect_rows("gemma3," TINY ",sliding_window=5");
    expect_rows("gpt_oss," TINY ",sliding_window=5,num_experts=4,num_experts_per_tok=2");
    expect_rows("gemma4," TINY ",global_head_dim=8,sliding_window=5,final_logit_softcapping=3");
    expect_rows("qwen3_5," TINY
                ",partial_rotary_factor=0.5,linear_num_key_heads=1,linear_num_value_heads=3,linear_key_head_dim=5,"
                "linear_value_head_dim=7,linear_conv_kernel_dim=8");
}

// ---- the verb ------------------------------------------------------------------------------------------------------
static void scale_that_dies(void *x, DType type, double factor, size_t count) {
    (void)x, (void)type, (void)factor, (void)count;
    die("an unspecified launch failure");
}
static void scale_that_hangs(void *x, DType type, double factor, size_t count) {
    (void)x, (void)type, (void)factor, (void)count;
    sleep(100);
}
static int gone; // the device no longer answers
static void *allocate_where_gone(size_t bytes) {
    if (gone) die("the device is gone");
    return allocate_little(bytes);
}
static void scale_that_loses(void *x, DType type, double factor, size_t count) {
    gone = 1;
    scale_that_dies(x, type, factor, count);
}
static void *allocate_nothing(size_t bytes) {
    (void)bytes;
    return NULL;
}
static const char *no_device(void) { return "no GPU was found"; }

static void finds_hopper(TellFinding tell) {
    tell("device 0, used", FINDING_OK, "%s", "NVIDIA H100 PCIe, compute capability 9.0, ECC on");
}
// Is wrong if the kernels for Hopper are on.
static void experts_forward_of_hopper(Stored *out, const Stored *x, const Stored *weight, const int32_t *first,
                                      size_t rows, size_t E, size_t C, size_t OC, int accumulate) {
    ops_device->experts_forward(out, x, weight, first, rows, E, C, OC, accumulate);
    planted = wgmma_wanted() ? "experts_forward" : NULL;
    plant("experts_forward");
    planted = NULL;
}

static void await_slowly(int64_t ticket) {
    const struct timespec pause = {0, 50000000};
    if (ticket % 4 == 2) nanosleep(&pause, NULL); // stores to disk
    ops_device->await_transfer(ticket);
}

static void run_doctor(const void *context) {
    static Options options;
    options_set_defaults(&options);
    options.verb = VERB_DOCTOR, options.seq_len = 16, options.json = 1, options.init = "qwen3," TINY;
    if (((const Ops *)context)->await_transfer == await_slowly) options.disk = ".";
    doctor.ops = (const Ops *)context, doctor.patience = ((const Ops *)context)->scale == scale_that_hangs ? 5 : 100;
    is_child = 1;
    exit(verb_doctor(&options));
}

// Runs doctor on an op set; the row `name` must contain `line`.
static const char *expect_doctor(const Ops *ops, int code, const char *name, const char *line, size_t wrong,
                                 size_t rows) {
    const Child *child = run_child(run_doctor, ops);
    size_t found = 0;
    const char *bad = strstr(child->err, "WRONG");
    char verdict[64] = "doctor   all right: ";
    if (wrong) snprintf(verdict, sizeof(verdict), "doctor   %zu thing%s wrong: ", wrong, wrong == 1 ? " is" : "s are");
    const char *last = strstr(child->err, "\ndoctor "); // after all rows
    if (!last || strncmp(last + 1, verdict, strlen(verdict)) != 0 || strchr(last + 1, '\n')[1])
        test_fail("the verdict is %.80s", last ? last : child->err);
    if (strstr(child->err, "ok     rope")) test_fail("a row of an op that is right: %s", child->err);
    if (child->code != code) test_fail("exit code %d, expected %d: %s", child->code, code, bad ? bad : child->err);
    cJSON *json = json_parse_object(child->out, strlen(child->out), "doctor's JSON");
    const cJSON *row, *all = json_get(json, "rows");
    cJSON_ArrayForEach(row, all) {
        const char *text = json_get(row, "text")->valuestring, *finding = json_get(row, "finding")->valuestring;
        if (strcmp(json_get(row, "name")->valuestring, name) != 0) continue;
        found = 1;
        if (!strstr(text, line)) test_fail("the row %s says: %s", name, text);
        if (!strcmp(finding, "wrong") != !!code) test_fail("the row %s is %s", name, finding);
    }
    if (!found) test_fail("no row %s: %s", name, child->err);
    const double counted = json_get(json, "wrong")->valuedouble;
    if (counted != (double)wrong) test_fail("%.0f wrong rows, expected %zu", counted, wrong);
    if ((size_t)cJSON_GetArraySize(all) < rows) test_fail("%d rows: %s", cJSON_GetArraySize(all), child->err);
    cJSON_Delete(json);
    return child->err;
}

TEST(rows_stand_for_themselves) {
    Ops ops = ops_planted();
    test_case("all is well");
    expect_doctor(&ops, 0, "scale", "16 x 16", 0, OP_CASES + 10);
    test_case("a slow disk");
    ops.await_transfer = await_slowly;
    const char *slow = strstr(expect_doctor(&ops, 0, "disk", "295 GB, take ", 0, OP_CASES + 11), "note   disk");
    if (!slow || !strstr(slow, "GB/s written")) test_fail("a slow disk is no note");
    ops.await_transfer = ops_device->await_transfer;
    test_case("both kernels on a Hopper GPU");
    ops.machine_findings = finds_hopper;
    expect_doctor(&ops, 0, "experts_forward wgmma on", "", 0, OP_CASES + 8 + 3);
    ops.experts_forward = experts_forward_of_hopper;
    expect_doctor(&ops, 1, "experts_forward wgmma on", "report this line", 1, OP_CASES + 8 + 3);
    setenv("STREAMBP_WGMMA", "1", 1);
    expect_doctor(&ops, 1, "experts_forward", "report this line", 1, OP_CASES + 8 + 3); // and not "wgmma off"
    unsetenv("STREAMBP_WGMMA");
    ops = ops_planted();
    test_case("an op ends the program");
    ops.scale = scale_that_dies;
    expect_doctor(&ops, 1, "scale", "an unspecified launch failure", 1, OP_CASES + 10);
    test_case("an op hangs");
    ops.scale = scale_that_hangs;
    expect_doctor(&ops, 1, "scale", "hangs", 1, 9);
    test_case("the device is lost");
    ops.scale = scale_that_loses, ops.allocate = allocate_where_gone;
    expect_doctor(&ops, 1, "scale", "an unspecified launch failure", 1, 9);
    test_case("the device is full");
    ops = ops_planted(), ops.allocate = allocate_nothing;
    expect_doctor(&ops, 1, "copies", "end other programs that use it", 1, 7);
    test_case("no device");
    ops = ops_planted(), ops.device_problem = no_device;
    expect_doctor(&ops, 1, "machine", "no GPU was found", 1, 1);
}

int main(int argc, char **argv) {
    dist_start();
    progress_off = 1;
    RUN_LISTED(argc, argv, NULL);
}
