/*
Common parts of the checkpoint tests: a run's tensors in fenced device memory, with bits that depend on the step, so
that checkpoints differ; the state of such a run; a private file system.
*/
#ifndef TEST_CHECKPOINT_RUNS_H
#define TEST_CHECKPOINT_RUNS_H
#include "test/model/small_slices.h"
#include "test/base/testing.h"
#include "test/base/damage.h"
#include "test/ops/fence.h"
#include "llmc/train/checkpoint.h"
#include <sched.h>
#include <sys/mount.h>

// ---- the state of a run ---------------------------------------------------------------------------------------------
enum { USUAL_SETTINGS = 5 };

static const RunSetting usual_settings[USUAL_SETTINGS] = {
    {"the model", "llama,hidden_size=16,num_hidden_layers=2", SETTING_KEPT, NULL},
    {"--seq-len", "8192", SETTING_KEPT, NULL},
    {"--data of fingerprint", "00ff", SETTING_KEPT, NULL},
    {"something", "\"odd\"\t\\ \x01 \xc3\xa9", SETTING_KEPT, NULL},
    {"--chunk", "1024", SETTING_ROUNDS, NULL},
};

static RunState run_state(size_t step) {
    static const Schedule schedule = {3e-4, SCHEDULE_COSINE, 0.1, 0.2, 10, 1000, 0, 0, 0};
    RunState run = {0};
    run.step = step, run.next_batch = 4 * step, run.tokens = 8192 * step, run.seconds = 0.1 * (double)step;
    run.schedule = schedule;
    run.settings = usual_settings, run.setting_count = USUAL_SETTINGS;
    return run;
}

// ---- its tensors ----------------------------------------------------------------------------------------------------
static World test_world; // the shards of trained_open; zeros: whole

static size_t shard_elements(const TrainedTensors *t, Sharding s) {
    return holds_whole(s) ? t->model->elements : sharding_elements(t->model, s);
}

static size_t shard_bytes(const TrainedTensors *t, Section s) {
    const size_t count = s.floats ? moment_floats_all(t->model, s.sharding) : shard_elements(t, s.sharding);
    return s.memory ? count * dtype_size(s.type) : 0;
}

// Opens the tensors of a model, or of adapters of all its linear layers.
static TrainedTensors trained_open_as(int adapters, const char *text, DType dtype, DType moments, int master) {
    const Config config = config_from_text(text, "test", EXIT_USAGE);
    Model *model = (Model *)checked_malloc(sizeof(*model), "a model");
    TrainedTensors t = {0};
    *model = model_build(&config, dtype);
    t.model = model, t.ops = ops_fenced(), t.optimizer.moment_type = moments;
    if (adapters) {
        Lora *lora = (Lora *)checked_calloc(1, sizeof(*lora), "adapters");
        lora->rank = 3, lora->alpha = 6, lora->modules = lora_modules(config.family, "all", "test", EXIT_USAGE);
        lora_build(lora, model);
        t.model = &lora->table, t.lora = lora, t.base_model = model, t.base_path = "the/base";
        t.base.config = 0x1234, t.base.weights = 0x5678;
    }
    t.weights_sharding = sharding_of(test_world, ZERO_WEIGHTS);
    t.optimizer_sharding = sharding_of(test_world, ZERO_OPTIMIZER);
    const size_t n = shard_elements(&t, t.optimizer_sharding);
    t.weights = (char *)t.ops->allocate(shard_elements(&t, t.weights_sharding) * dtype_size(dtype));
    t.optimizer.m = t.ops->allocate(n * dtype_size(moments));
    t.optimizer.v = t.ops->allocate(n * dtype_size(moments));
    if (master) t.optimizer.master = (float *)t.ops->allocate(n * sizeof(float));
    if (moments == DTYPE_INT8) {
        const size_t floats = moment_floats_all(t.model, t.optimizer_sharding);
        t.optimizer.m_scales = (float *)t.ops->allocate(floats * sizeof(float));
        t.optimizer.v_scales = (float *)t.ops->allocate(floats * sizeof(float));
    }
    assert_true(t.weights && t.optimizer.m && t.optimizer.v && (!master || t.optimizer.master));
    return t;
}

static TrainedTensors trained_open(const char *text, DType dtype, DType moments, int master) {
    return trained_open_as(0, text, dtype, moments, master);
}

static TrainedTensors trained_open_adapters(const char *text, DType dtype, DType moments, int master) {
    return trained_open_as(1, text, dtype, moments, master);
}

enum { MASTER = 2, WEIGHTS, SCALES, TRAINED_SECTIONS = SCALES + 2 }; // after m and v

static void trained_sections(const TrainedTensors *t, Section sections[TRAINED_SECTIONS]) {
    const Section all[TRAINED_SECTIONS] = {{(char *)t->optimizer.m, t->optimizer.moment_type, t->optimizer_sharding, 0},
                                           {(char *)t->optimizer.v, t->optimizer.moment_type, t->optimizer_sharding, 0},
                                           {(char *)t->optimizer.master, DTYPE_FP32, t->optimizer_sharding, 0},
                                           {t->weights, t->model->dtype, t->weights_sharding, 0},
                                           {(char *)t->optimizer.m_scales, DTYPE_FP32, t->optimizer_sharding, 1},
                                           {(char *)t->optimizer.v_scales, DTYPE_FP32, t->optimizer_sharding, 1}};
    memcpy(sections, all, sizeof(all));
}

static void trained_close(TrainedTensors *t) {
    Section sections[TRAINED_SECTIONS];
    trained_sections(t, sections);
    for (size_t i = 0; i < TRAINED_SECTIONS; i++)
        if (sections[i].memory) t->ops->release(sections[i].memory, shard_bytes(t, sections[i]));
    if (t->lora) {
        lora_free((Lora *)t->lora);
        free((Lora *)t->lora);
        t->model = t->base_model;
    }
    model_free((Model *)t->model);
    free((Model *)t->model);
}

// Returns any bits, NaN among them: checkpoints ignore values. Weights are finite: other values are not converted.
static unsigned char *step_bytes(size_t step, size_t section, size_t bytes) {
    unsigned char *data = (unsigned char *)case_memory(bytes + 8);
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t bits = random_bits(step, section, i) & (section == WEIGHTS ? ~0x4000400040004000u : ~(uint64_t)0);
        memcpy(data + i, &bits, 8);
    }
    return data;
}

// Returns a section of the whole table at a step: those bits; adapters' weights are the rounded master copy, if any.
static unsigned char *table_bytes(const TrainedTensors *t, size_t step, size_t i, Section s) {
    const size_t n = section_count(t->model, &s);
    if (i != WEIGHTS || !saves_master(t)) return step_bytes(step, i, n * dtype_size(s.type));
    unsigned char *rounded = (unsigned char *)case_memory(n * dtype_size(s.type));
    elements_convert(rounded, s.type, step_bytes(step, MASTER, n * sizeof(float)), DTYPE_FP32, n);
    return rounded;
}

// Returns the section as in memory; between shards, bytes that nobody writes.
static unsigned char *section_bytes(const TrainedTensors *t, size_t step, size_t i, Section s) {
    unsigned char *whole = table_bytes(t, step, i, s);
    size_t size = dtype_size(s.type);
    if (holds_whole(s.sharding)) return whole;
    unsigned char *shard = (unsigned char *)memset(case_memory(shard_bytes(t, s)), 0xa5, shard_bytes(t, s));
    for (Slabs b = slabs_of(t->model, SLABS_OF_GROUPS, s.sharding, s.sharding, NULL); slabs_next(&b);) {
        const SectionSlab slab = section_slab(t->model, &s, &b);
        memcpy(shard + slab.offset * size, whole + slab.first * size, slab.count * size);
    }
    return shard;
}

static void trained_fill(const TrainedTensors *t, size_t step) {
    Section sections[TRAINED_SECTIONS];
    trained_sections(t, sections);
    for (size_t i = 0; i < TRAINED_SECTIONS; i++)
        if (sections[i].memory)
            t->ops->copy_in(sections[i].memory, section_bytes(t, step, i, sections[i]), shard_bytes(t, sections[i]));
}

static unsigned char *section_copy(const TrainedTensors *t, Section section) {
    unsigned char *data = (unsigned char *)case_memory(shard_bytes(t, section));
    t->ops->copy_out(data, section.memory, shard_bytes(t, section));
    return data;
}

// Compares the tensors with those of the step, or with `other` unless NULL.
static void expect_tensors(const TrainedTensors *t, size_t step, const TrainedTensors *other) {
    Section sections[TRAINED_SECTIONS], others[TRAINED_SECTIONS];
    trained_sections(t, sections);
    if (other) trained_sections(other, others);
    for (size_t i = 0; i < TRAINED_SECTIONS; i++) {
        if (!sections[i].memory) continue;
        const void *expected = other ? section_copy(other, others[i]) : section_bytes(t, step, i, sections[i]);
        if (memcmp(section_copy(t, sections[i]), expected, shard_bytes(t, sections[i])) != 0)
            test_fail("section %zu differs", i);
    }
}

static void expect_trained(const TrainedTensors *t, size_t step) { expect_tensors(t, step, NULL); }

// ---- folders --------------------------------------------------------------------------------------------------------
static void copy_folder(const char *from, const char *to) {
    char command[1200];
    snprintf(command, sizeof(command), "rm -rf '%s' && cp -a '%s' '%s'", to, from, to);
    assert_int_equal(system(command), 0);
}

// Mounts an empty file system of a MiB on a folder, for this process alone. Returns 0 if the machine forbids it.
static int private_tmpfs(const char *folder, int read_only) {
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return 0;
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return 0;
    return mount("tmpfs", folder, "tmpfs", read_only ? MS_RDONLY : 0, "size=1m") == 0;
}

// ---- the usual run: a small model in fp32 with master weights, in scratch "out" -------------------------------------
static const char usual_model[] =
    "llama,hidden_size=16,intermediate_size=20,num_hidden_layers=2,num_attention_heads=2,vocab_size=33";
static const char hybrid_model[] =
    "qwen3_5,hidden_size=12,intermediate_size=20,num_hidden_layers=5,num_attention_heads=2,num_key_value_heads=1,"
    "head_dim=8,vocab_size=31,linear_num_key_heads=1,linear_num_value_heads=3,linear_key_head_dim=4,"
    "linear_value_head_dim=2";

// Fills the tensors as at `step`, and saves them in the folder, which it opens and closes.
static void save_step_of(TrainedTensors *t, const char *out, size_t keep, size_t step, int resume) {
    RunState run = run_state(step);
    CheckpointFolder folder;
    trained_fill(t, step);
    checkpoint_open(&folder, out, keep, resume);
    run_began();
    checkpoint_check_space(&folder, t, out, 1);
    allocation_guard = 1;
    checkpoint_save(&folder, t, &run);
    allocation_guard = 0;
    checkpoint_close(&folder);
}

static void save_step(TrainedTensors *t, const char *out, size_t step, int resume) {
    save_step_of(t, out, 2, step, resume);
}

// Opens the folder as a resumed run, loads its last checkpoint over other values and compares it with its step.
static RunState load_last(TrainedTensors *t, const char *out) {
    RunState run = run_state(0);
    CheckpointFolder folder;
    checkpoint_open(&folder, out, 2, 1);
    if (folder.last == CHECKPOINT_NONE) test_fail("no complete checkpoint is left");
    trained_fill(t, 1);
    checkpoint_load(&folder, folder.last, t, &run);
    expect_trained(t, folder.last);
    assert_int_equal(run.step, folder.last);
    assert_int_equal(run.next_batch, 4 * run.step);
    assert_int_equal(run.tokens, 8192 * run.step);
    assert_true(run.seconds == 0.1 * (double)run.step);
    checkpoint_close(&folder);
    return run;
}

// Saves a checkpoint at step 7 in scratch "out".
static void save_usual_as(int adapters) {
    TrainedTensors t = trained_open_as(adapters, usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    save_step(&t, fresh_folder("out"), 7, 0);
    trained_close(&t);
}

static void save_usual(void) { save_usual_as(0); }
static void save_usual_adapters(void) { save_usual_as(1); }

// A save of one step by a run of its own
typedef struct {
    const char *out;
    size_t keep, step;
    int resume;
} Saving;

static void save_body(const void *context) {
    const Saving *saving = (const Saving *)context;
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    save_step_of(&t, saving->out, saving->keep, saving->step, saving->resume);
}

// A resumption of scratch "out" at its last step
typedef struct {
    const char *model;
    DType dtype, moments;
    int master, adapters;
    RunState run;
} Resumption;

static Resumption usual_resumption(int adapters) {
    const Resumption r = {usual_model, DTYPE_FP32, DTYPE_FP32, 1, adapters, run_state(0)};
    return r;
}

static void resume_body(const void *context) {
    const Resumption *r = (const Resumption *)context;
    TrainedTensors t = trained_open_as(r->adapters, r->model, r->dtype, r->moments, r->master);
    RunState run = r->run;
    CheckpointFolder folder;
    checkpoint_open(&folder, scratch_path("out"), 2, 1);
    if (folder.last == CHECKPOINT_NONE) die("nothing to resume from");
    checkpoint_load(&folder, folder.last, &t, &run);
}

// Damages each file of scratch "out"'s checkpoint: a flipped bit, a byte shorter, a byte longer, empty, missing.
// `resume`, which dies without a complete checkpoint, must name the file; only for DONE it may say something else.
static void expect_checkpoint_damage_found(ChildBody resume, const void *context, const char *const *files,
                                           size_t count) {
    const DamageSuite suite = {scratch_path("out/checkpoint-00000007"), resume, context, NULL, 1};
    for (size_t i = 0; i < count; i++) {
        const char *words = !strcmp(files[i], MANIFEST_NAME) ? "is damaged|is skipped" : files[i];
        const Damage sizes[] = {CUT_TO(files[i], -1, words), EXTENDED_BY(files[i], 1, words),
                                CUT_TO(files[i], 0, words), REMOVED(files[i], words)};
        test_case("%s", files[i]);
        expect_damage_found(&suite, sizes, COUNT_OF(sizes));
        expect_flips_found(&suite, files[i], 12, words);
    }
    assert_int_equal(run_child(resume, context)->code, 0);
}

static const char *file_in(const char *checkpoint, const char *file) {
    char name[128];
    snprintf(name, sizeof(name), "out/%s/%s", checkpoint, file);
    return scratch_path(name);
}

static int is_there(const char *name) { return path_exists(file_in(".", name)); }

// noted: expected on stderr; NULL: nothing.
static void expect_said(const Child *child, const char *noted) {
    int right = noted ? strstr(child->err, noted) != NULL : !*child->err;
    if (!right) test_fail("stderr is: '%s', expected: '%s'", child->err, noted ? noted : "");
}

static void find_body(const void *context) {
    size_t last = checkpoint_find((const char *)context, CHECKPOINT_NONE, 0);
    if (last == CHECKPOINT_NONE)
        puts("none");
    else
        printf("%zu\n", last);
}

static void expect_found(const char *expected, const char *noted) {
    const Child *child = run_child(find_body, scratch_path("out"));
    if (child->code != 0 || strcmp(child->out, expected) != 0)
        test_fail("exit code %d, found %s(expected %s); stderr: %s", child->code, child->out, expected, child->err);
    expect_said(child, noted);
}

#endif
