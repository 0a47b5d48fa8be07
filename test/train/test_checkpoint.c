/*
Checkpoints: every combination of types round-trips to the bit; model.bin equals any flat .bin writer's; resuming gives
the bits of an uninterrupted run; differences on resuming are refused by name; damage is found anywhere; a full disk is
noticed before anything is written. The folder is tested in test_checkpoint_folder.c, kills in test_checkpoint_kill.c.
*/
#include "checkpoint_runs.h"
#include "llmc/optimizer/update.h"

// ---- round trips ----------------------------------------------------------------------------------------------------
static void round_trip_case(const char *model, DType dtype, DType moments, int master) {
    const char *file = scratch_path("out/checkpoint-00000007/model.bin");
    size_t count, flat_count;
    test_case("%.6s, %s, moments %s, %s master", model, dtype_name(dtype), dtype_name(moments),
              master ? "with" : "without");
    TrainedTensors a = trained_open(model, dtype, moments, master), b = trained_open(model, dtype, moments, master);
    save_step(&a, fresh_folder("out"), 7, 0);
    assert_int_equal(load_last(&b, scratch_path("out")).step, 7);

    WeightSource *source = weights_open(file);
    weights_convert(source, scratch_path("flat.bin"), dtype);
    weights_close(source);
    const char *flat = read_whole(scratch_path("flat.bin"), &flat_count), *bytes = read_whole(file, &count);
    void *trained = case_memory(count);
    a.ops->copy_out(trained, a.weights, count - sizeof(FlatHeader));
    assert_int_equal(count, flat_count);
    assert_memory_equal(bytes, flat, count);
    assert_memory_equal(bytes + sizeof(FlatHeader), trained, count - sizeof(FlatHeader));
    trained_close(&a);
    trained_close(&b);
}

TEST(round_trip) {
    static const DType types[] = {DTYPE_FP32, DTYPE_BF16, DTYPE_FP64};
    for (size_t i = 0; i < 18; i++) // weights, moments, master: every pair
        if (all_cases() || i % 2 == (i / 6 + i / 2) % 2)
            round_trip_case(usual_model, types[i / 6], types[i / 2 % 3], i % 2);
    round_trip_case(hybrid_model, DTYPE_FP32, DTYPE_INT8, 1);
    round_trip_case("gpt2,hidden_size=256,num_hidden_layers=2,num_attention_heads=4,vocab_size=3001", DTYPE_FP32,
                    DTYPE_BF16, 1); // sections of several pieces, the last one partial
}

// ---- resuming: six steps, or three, a checkpoint, another process's memory, and three more --------------------------
static Residency trained_residency(const TrainedTensors *t) {
    Residency r = {0};
    Arena *none = (Arena *)case_memory(PLACES * sizeof(Arena));
    arena_plan(none);
    r.model = t->model, r.ops = t->ops, r.arena = none, r.weights = t->weights;
    return r;
}

static void train_steps(TrainedTensors *t, void *gradients, size_t begin, size_t end) {
    size_t n = t->model->elements;
    Residency r = trained_residency(t);
    r.gradients = (char *)gradients, r.gradient_type = DTYPE_FP32;
    float *values = (float *)case_memory(n * sizeof(float));
    for (size_t step = begin; step < end; step++) {
        AdamW s = {0};
        s.learning_rate = 3e-3, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-8, s.weight_decay = 0.1;
        s.gradient_scale = 1.0, s.step = (int64_t)step + 1, s.seed = 11;
        for (size_t i = 0; i < n; i++) values[i] = (float)random_normal(5, step, i);
        t->ops->copy_in(gradients, values, n * sizeof(float));
        optimizer_step(&r, &t->optimizer, &s);
    }
}

static void resume_case(const char *model, int adapters, DType moments, int master) {
    const DType stored = ops_device->stored;
    CheckpointFolder folder;
    RunState run = run_state(3);
    test_case("%.7s, %s, moments %s, %s master", model, adapters ? "adapters" : "a model", dtype_name(moments),
              master ? "with" : "without");
    TrainedTensors first = trained_open_as(adapters, model, stored, moments, master);
    TrainedTensors second = trained_open_as(adapters, model, stored, moments, master);
    size_t n = first.model->elements;
    void *weights = case_memory(n * dtype_size(stored)), *gradients = first.ops->allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) element_write(weights, stored, i, random_normal(1, 2, i));
    first.ops->copy_in(first.weights, weights, n * dtype_size(stored));
    Residency r = trained_residency(&first);
    optimizer_step(&r, &first.optimizer, NULL);
    train_steps(&first, gradients, 0, 3);
    checkpoint_open(&folder, fresh_folder("out"), 1, 0);
    checkpoint_save(&folder, &first, &run);
    train_steps(&first, gradients, 3, 6);
    trained_fill(&second, 9);
    checkpoint_load(&folder, folder.last, &second, &run);
    checkpoint_close(&folder);
    train_steps(&second, gradients, run.step, 6);
    expect_tensors(&second, 0, &first);
    first.ops->release(gradients, n * sizeof(float));
    trained_close(&first);
    trained_close(&second);
}

TEST(resumed_run_has_the_same_bits) {
    for (int i = 0; i < 2; i++) resume_case(i ? usual_model : hybrid_model, i, DTYPE_INT8, i);
    for (int i = 0; i < 8; i++)
        if (all_cases() || __builtin_parity((unsigned)i))
            resume_case(i & 4 ? usual_model : hybrid_model, i & 1, i & 2 ? DTYPE_BF16 : DTYPE_FP32, i & 4 ? 1 : 0);
}

// ---- differences are refused by name --------------------------------------------------------------------------------
static void expect_resumes(const Resumption *r, const char *noted) {
    const Child *child = run_child(resume_body, r);
    if (child->code != 0) test_fail("exit code %d: %s", child->code, child->err);
    expect_said(child, noted);
}

// Returns the usual settings with one changed in name or value.
static Resumption with_setting(size_t i, const char *name, const char *value, SettingChange change) {
    static RunSetting settings[USUAL_SETTINGS];
    const RunSetting now = {name, value, change, NULL};
    Resumption r = usual_resumption(0);
    memcpy(settings, usual_settings, sizeof(settings));
    settings[i] = now, r.run.settings = settings;
    return r;
}

TEST(settings_must_agree) {
    static const struct {
        size_t setting;
        const char *name, *value, *words;
    } cases[] = {
        {1, "--seq-len", "4096", "checkpoint-00000007: was trained with --seq-len 8192, now it is 4096; resume with"},
        {1, "--seq-len", "819", "--seq-len 8192, now it is 819;"},
        {0, "the model", "llama,hidden_size=16,num_hidden_layers=3",
         "was trained with the model num_hidden_layers=2, now it is num_hidden_layers=3;"},
        {2, "--data of fingerprint", "\"quoted\"\t\\", "--data of fingerprint 00ff, now it is \"quoted\""},
        {1, "--batch", "8192", "lacks the setting --batch: the run began without this option, or with another"}};
    Resumption r = usual_resumption(0);
    save_usual();
    expect_resumes(&r, NULL);
    r.run.setting_count = USUAL_SETTINGS - 1;
    expect_refused(resume_body, &r, 1, "began with \"--chunk\", which the current options lack");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        r = with_setting(cases[i].setting, cases[i].name, cases[i].value, SETTING_KEPT);
        expect_refused(resume_body, &r, 1, cases[i].words);
    }
    r = with_setting(4, "--chunk", "512", SETTING_ROUNDS); // this one may change
    expect_resumes(&r, "note: --chunk was 1024 until ");
    r = with_setting(4, "--chunk", "512", SETTING_FREE); // and changes no bits by itself
    expect_resumes(&r, "now it is 512: the run continues\n");
}

typedef struct {
    const char *before, *now, *noted; // values of a setting that is left out when it is "own"
    size_t workspace;
} Attention;

static RunState with_attention(RunSetting settings[2], const char *value) {
    const RunSetting seq_len = {"--seq-len", "8192", SETTING_KEPT, NULL};
    const RunSetting attention = {ATTENTION_SETTING, value, SETTING_ROUNDS, "own"};
    RunState run = run_state(7);
    settings[0] = seq_len, settings[1] = attention;
    run.settings = settings, run.setting_count = 2;
    return run;
}

static void attention_body(const void *context) {
    const Attention *c = (const Attention *)context;
    static char text[RUN_STATE_LIMIT];
    RunSetting settings[2];
    RunState run = with_attention(settings, c->before);
    const size_t length = run_state_text(&run, text, "state.json");
    if (!strstr(text, "\"attention\"") != !strcmp(c->before, "own")) die("%s is written as %s", c->before, text);
    write_file(scratch_path("state.json"), text, length);
    if (run_state_workspace(scratch_path("")) != c->workspace) die("another workspace than that of %s", c->before);
    run = with_attention(settings, c->now);
    run_state_resume(&run, text, length, "checkpoint-00000007", "state.json");
}

TEST(attention_may_be_another) {
#define CUDNN "cuDNN 9.19.0,deterministic=on,workspace="
    static const Attention cases[] = {{"own", "own", NULL, 0},
                                      {"own", CUDNN "5", "note: attention was own until checkpoint-00000007, now", 0},
                                      {CUDNN "5", CUDNN "5", NULL, 5},
                                      {CUDNN "5", "own", "now it is own: the run continues, with other bits", 5},
                                      {CUDNN "5", CUDNN "3", "note: attention was workspace=5 until ", 5}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const Child *child = run_child(attention_body, &cases[i]);
        if (child->code != 0) test_fail("exit code %d: %s", child->code, child->err);
        expect_said(child, cases[i].noted);
    }
}

static void keep_chunks_body(const void *saved) {
    static char text[RUN_STATE_LIMIT];
    RunSetting keep = {"--keep-chunks", (const char *)saved, SETTING_KEPT, "off"};
    RunState run = run_state(7);
    run.settings = &keep, run.setting_count = 1;
    const size_t length = run_state_text(&run, text, "state.json");
    keep.value = "0.25";
    run_state_resume(&run, text, length, "checkpoint-00000007", "state.json");
}

// Earlier versions wrote two options after the share of chunks.
TEST(biased_gradients_are_refused) {
    static const char *const cases[][2] = {
        {"0.25", NULL},
        {"0.25, draw=independent, clamp=0", NULL},
        {"0.5, draw=independent, clamp=0", "was trained with --keep-chunks 0.5, now it is 0.25; resume with the same"},
        {"0.25, draw=fixed, clamp=0", "its run had --keep-chunks 0.25, draw=fixed, clamp=0, which this version does"},
        {"0.25, draw=independent, clamp=2",
         "draw=independent, clamp=2, which this version does not have; resume with"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s", cases[i][0]);
        const Child *child = run_child(keep_chunks_body, cases[i][0]);
        if (child->code != (cases[i][1] ? EXIT_RUNTIME : 0)) test_fail("exit code %d: %s", child->code, child->err);
        expect_said(child, cases[i][1]);
    }
}

TEST(types_must_agree) {
    Resumption r = usual_resumption(0);
    save_usual();
    r.moments = DTYPE_BF16;
    expect_refused(resume_body, &r, 1,
                   "optimizer.bin: holds moments in fp32, this run has bf16; resume with the same --moments");
    r.moments = DTYPE_INT8;
    expect_refused(resume_body, &r, 1, "holds moments in fp32, this run has int8; resume with the same --moments");
    r = usual_resumption(0), r.master = 0;
    expect_refused(resume_body, &r, 1, "was saved with master weights; resume with --master fp32");
    r = usual_resumption(0), r.dtype = DTYPE_BF16;
    expect_refused(resume_body, &r, 1,
                   "model.bin: holds fp32 weights, this run trains in bf16; resume with --dtype fp32");
    r = usual_resumption(0);
    r.model = "llama,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,vocab_size=33";
    expect_refused(resume_body, &r, 1, "holds another model: intermediate_size=20, not intermediate_size=24");
}

// Seven steps ran with the saved schedule; the new one must give these the same rates.
TEST(schedule_must_agree_so_far) {
    static const struct {
        Schedule saved, now;
        const char *refusal; // NULL: may go on
    } cases[] = {
        {{1e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 100, 0, 0, 0}, {1e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 100, 0, 0, 0}, NULL},
        {{1e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 100, 0, 0, 0},
         {1e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 200, 0, 0, 0},
         "made step 4 at lr "},
        {{1e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 100, 0, 0, 0},
         {2e-3, SCHEDULE_COSINE, 0.1, 0.2, 2, 100, 0, 0, 0},
         "give --steps 100 --lr 0.001 --schedule cosine --warmup 2 --final-lr-fraction 0.1"},
        // still warming up
        {{1e-3, SCHEDULE_COSINE, 0.1, 0.2, 50, 100, 0, 0, 0},
         {1e-3, SCHEDULE_LINEAR, 0.5, 0.2, 50, 999, 0, 0, 0},
         NULL},
        {{1e-3, SCHEDULE_CONSTANT, 0.1, 0.2, 2, 7, 0, 0, 0},
         {1e-3, SCHEDULE_CONSTANT, 0.3, 0.2, 2, 100, 0, 0, 0},
         NULL},
        {{1e-3, SCHEDULE_CONSTANT, 0.1, 0.2, 2, 100, 0, 0, 0},
         {1e-3, SCHEDULE_CONSTANT, 0.1, 0.2, 3, 100, 0, 0, 0},
         "made step 1 at"},
        {{1e-3, SCHEDULE_CONSTANT, 0.1, 0.2, 2, 100, 0, 0, 0},
         {1e-3, SCHEDULE_CONSTANT, 0.1, 0.2, 2, 6, 0, 0, 0},
         "is already at step 7, --"},
        {{1e-3, SCHEDULE_WSD, 0.0, 0.2, 2, 10, 0, 0, 0},
         {1e-3, SCHEDULE_WSD, 0.0, 0.5, 2, 100, 0, 0, 0},
         NULL}, // decays from step 10 on
        {{1e-3, SCHEDULE_WSD, 0.0, 0.5, 2, 10, 0, 0, 0},
         {1e-3, SCHEDULE_WSD, 0.0, 0.5, 2, 100, 0, 0, 0},
         "made step 7 at"},
        {{1e-3, SCHEDULE_WSD, 0.0, 0.5, 2, 10, 1, 0, 0},
         {1e-3, SCHEDULE_WSD, 0.0, 0.5, 2, 100, 0, 0, 0},
         "made step 6 at"},
    };
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    trained_fill(&t, 7);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Resumption r = usual_resumption(0);
        RunState run = run_state(7);
        CheckpointFolder folder;
        test_case("case %zu", i);
        run.schedule = cases[i].saved, r.run.schedule = cases[i].now;
        checkpoint_open(&folder, fresh_folder("out"), 2, 0);
        checkpoint_save(&folder, &t, &run);
        checkpoint_close(&folder);
        if (cases[i].refusal)
            expect_refused(resume_body, &r, 1, cases[i].refusal);
        else
            expect_resumes(&r, NULL);
    }
    trained_close(&t);
}

// A run that an earlier version began has no version in its schedule, and keeps that version's rates.
static void earlier_body(const void *context) {
    static char text[RUN_STATE_LIMIT];
    RunState run = run_state(70);
    (void)context;
    run.schedule.version_1 = 1;
    const double then = schedule_learning_rate(&run.schedule, 71);
    const size_t length = run_state_text(&run, text, "state.json");
    run.schedule.version_1 = 0;
    if (schedule_learning_rate(&run.schedule, 71) == then) die("both versions are alike");
    run_state_resume(&run, text, length, "checkpoint-00000070", "state.json");
    if (schedule_learning_rate(&run.schedule, 71) != then) die("the schedule changed");
    if (run_state_text(&run, text, "state.json") != length) die("the version changed");
    run.schedule.version_1 = 0;
    if (run_state_text(&run, text, "state.json") <= length) die("no version is written");
}

TEST(earlier_schedule_stays) {
    const Child *child = run_child(earlier_body, NULL);
    if (child->code != 0) test_fail("exit code %d: %s", child->code, child->err);
    expect_said(child, "checkpoint-00000070: an earlier version began this run, which keeps its schedule");
}

// ---- damage ---------------------------------------------------------------------------------------------------------
TEST(damage_is_found) {
    static const char *const files[] = {"model.bin", "optimizer.bin", "state.json", MANIFEST_NAME};
    Resumption r = usual_resumption(0);
    save_usual();
    expect_checkpoint_damage_found(resume_body, &r, files, COUNT_OF(files));
}

// Files that are intact, but of different checkpoints or under a wrong name.
TEST(mixed_up_files_are_refused) {
    Resumption r = usual_resumption(0);
    Saving saving = {scratch_path("out"), 2, 9, 1};
    size_t count;
    save_usual();
    assert_int_equal(run_child(save_body, &saving)->code, 0);
    char *bytes = read_whole(file_in("checkpoint-00000007", "optimizer.bin"), &count);
    write_file(file_in("checkpoint-00000009", "optimizer.bin"), bytes, count);
    expect_refused(resume_body, &r, 1, "checkpoint-00000009/optimizer.bin: is of step 7, but state.json is of step 9");
    bytes = read_whole(file_in("checkpoint-00000007", "model.bin"), &count);
    write_file(file_in("checkpoint-00000009", "model.bin"), bytes, count);
    expect_refused(resume_body, &r, 1, "checkpoint-00000009/model.bin: is damaged: its checksum is");
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000011"));
    expect_refused(resume_body, &r, 1, "state.json: is of step 7, but its folder's name says 11");
}

// Updates the manifest's length and checksum of state.json.
static void mend_manifest(const char *path, char *bytes, size_t count, size_t before) {
    static Manifest manifest;
    char text[MANIFEST_TEXT];
    (void)path, (void)before;
    if (!manifest.bytes[MANIFEST_STATE])
        assert_null(manifest_check(scratch_path("out/checkpoint-00000007"), &manifest));
    manifest.bytes[MANIFEST_STATE] = count, manifest.checksum[MANIFEST_STATE] = checksum_of(0, bytes, count);
    write_file(file_in("checkpoint-00000007", MANIFEST_NAME), text, manifest_text(&manifest, text));
}

// An intact file by its manifest, but not in this program's format.
TEST(other_states_are_refused) {
#define STATE "\"format\": \"streambp.c run state\", \"version\": "
#define BEGUN STATE "1, \"step\": 7, \"next_batch\": 1, \"tokens\": 1, "
    static const Damage rows[] = {
        WHOLE_TEXT("state.json", "[1]", "state.json: must be a JSON object"),
        WHOLE_TEXT("state.json", "{\"format\": \"other\"}", "state.json: is not the state of a run"),
        WHOLE_TEXT("state.json", "{\"version\": 1}", "state.json: has no \"format\""),
        WHOLE_TEXT("state.json", "{" STATE "2}", "state.json: is of version 2, but this program reads version 1"),
        WHOLE_TEXT("state.json", "{" STATE "1, \"step\": -1}", "state.json: \"step\" must be a whole number"),
        WHOLE_TEXT("state.json", "{" BEGUN "\"seconds\": \"1\"}", "state.json: \"seconds\" must be a number"),
        WHOLE_TEXT("state.json", "{" BEGUN "\"seconds\": 1, \"settings\": {\"the model\": 3}}",
                   "state.json: \"the model\" must be text"),
    };
    Resumption r = usual_resumption(0);
    const DamageSuite suite = {scratch_path("out/checkpoint-00000007"), resume_body, &r, mend_manifest, 0};
    save_usual();
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

// Neither skipped for an earlier one, nor begun anew beside it.
TEST(checkpoints_of_version_1_are_refused) {
    static const char *const seals[] = {"model.bin 5208 0123456789abcdef\noptimizer.bin 9 0123456789abcdef\n",
                                        "adapter_model.safetensors 5208 0123456789abcdef\n"};
    Resumption r = usual_resumption(0);
    save_usual();
    copy_folder(scratch_path("out/checkpoint-00000007"), scratch_path("out/checkpoint-00000009"));
    for (size_t i = 0; i < 2; i++) {
        write_file(file_in("checkpoint-00000009", "DONE"), seals[i], strlen(seals[i]));
        expect_refused(
            resume_body, &r, 1,
            "checkpoint-00000009: has version 1, but this program reads version 2; continue with the version");
    }
}

// ---- a full disk ----------------------------------------------------------------------------------------------------
// Saves step 7 on a private file system of one MiB, fills that, and saves step 8.
static void full_disk_body(const void *context) {
    const char *out = (const char *)context;
    TrainedTensors t = trained_open(usual_model, DTYPE_FP32, DTYPE_FP32, 1);
    const RunState run = run_state(8);
    char ballast[PATH_MAX];
    CheckpointFolder folder;
    if (!private_tmpfs(out, 0)) exit(77);
    save_step(&t, out, 7, 0);
    path_join(ballast, out, "ballast");
    int fd = open(ballast, O_WRONLY | O_CREAT, 0666);
    while (write(fd, ballast, sizeof(ballast)) > 0) continue;
    checkpoint_open(&folder, out, 2, 1);
    checkpoint_save(&folder, &t, &run);
}

TEST(full_disk) {
    const char *out = fresh_folder("mount");
    const Child *child = run_child(full_disk_body, out);
    if (child->code == 77) test_skip("this machine does not let us mount a small file system");
    expect_refused(full_disk_body, out, 1, "checkpoint-00000008: a checkpoint takes");
    expect_said(child, "are free; free some space, then --resume from step 7, which is safe");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
