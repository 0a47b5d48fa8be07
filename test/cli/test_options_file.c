// --config: what files of lines, JSON and a run's log set, and what is refused of them.
#include "option_lines.h"

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

// Appends " --config" and the path of a file with this text to the line.
static const char *with_file(const char *line, const char *name, const char *text) {
    static char all[1024];
    write_file(scratch_path(name), text, strlen(text));
    snprintf(all, sizeof(all), "%s --config %s", line, scratch_path(name));
    return all;
}

TEST(a_file_gives_what_the_line_does_not) {
    static const char lines[] =
        "\xef\xbb\xbf# of all kinds\n--init gpt2 \t# a preset\r\n\nlearning_rate 3e-5\ndata 'a b.bin' c.bin\n"
        "--like 'it\"s' # of convert\n--rslora\nlora_r=8\nmax_length 4k";
    static const char json[] =
        "\xef\xbb\xbf{\"verb\": \"train\", \"init\": \"gpt2\", \"data\": [\"a b.bin\", \"c.bin\"], \"learning_rate\": "
        "3e-5,\n"
        "\"seq_len\": 4096, \"long\": \"truncate\", \"rslora\": true, \"lora-rank\": 8, \"beta\":"
        " \"auto\", \"stop_ids\": [], \"resume\": false, \"gamma\": null, \"objective\": \"sft\"}";
    static const char log[] =
        "{\"step\": 1, \"options\": {\"init\": \"llama\"}}\n{\"step\": 1, \"loss\": 1}\n"
        "{\"step\": 2, \"version\": \"0.1\", \"options\": {\"verb\": \"train\", \"init\": \"gpt2\", "
        "\"data\": [\"a b.bin\", \"c.bin\"], \"lr\": 3.0000000000000001e-05, \"seq_len\": 4096, "
        "\"long\": \"truncate\", \"lora_rank\": 8, \"rslora\": true, \"dpo_loss\": \"sigmoid\", "
        "\"lora_alpha\": \"auto\", \"draw\": \"independent\", \"clamp\": 0, \"resume\": true, \"out\": \"r\"}}\n"
        "{\"step\": 2, \"sample\": \"\\\"options\\\": {\"}\n";
    static const char *const paths[] = {"a b.bin", "c.bin"};
    for (size_t i = 0; i < 4; i++) {
        static const char *const names[] = {"o.args", "o.json", "o.jsonl", "log.jsonl"};
        const char *line = with_file("train --out o", names[i], i == 0 ? lines : i == 1 ? json : log);
        char folder[1024];
        test_case("%s", names[i]);
        Options wanted = parse("--init gpt2 --data d --seq-len 4096 --long truncate --rslora --lora-rank 8 --lr 3e-5");
        wanted.data.path = paths, wanted.data.count = 2;
        snprintf(folder, sizeof(folder), "train --out o --config %s", scratch_folder()); // a run's folder
        Options o = parse(i == 3 ? folder : line);
        assert_string_equal(o.out, "o");
        assert_true(!option_given(&o, "objective") && !option_given(&o, "dpo-loss"));
        o.out = NULL, o.config = NULL;
        expect_same(&o, &wanted);
        o = parse(with_file("eval --model m --seq-len 64 --data d", names[i], i == 0 ? lines : i == 1 ? json : log));
        assert_true(!o.init && o.seq_len == 64 && o.data.count == 1 && !o.lora_rank && !o.like);
        o = parse(with_file("train --model m --epochs 2", names[i], i == 0 ? lines : i == 1 ? json : log));
        assert_true(!o.init && o.epochs == 2 && o.lora_rank == 8);
    }
}

// A file's options are those typed: a card of --memory-limit, cards of --machine, defaults of an object without a run.
TEST(a_file_is_as_the_line) {
    static const char typed[] = "plan --init gpt2 --memory-limit h200 --keep auto --machine h100x8 --grad-accum 8";
    static const char *const files[] = {
        "memory-limit h200\nkeep auto\nmachine h100x8\ngrad-accum 8",
        "{\"memory_limit\": \"h200\", \"keep\": \"auto\", \"machine\": \"h100x8\", \"grad_accum\": 8}"};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        test_case("%s", files[i]);
        Options wanted = parse(typed), o = parse(with_file("plan --init gpt2", "a.args", files[i]));
        o.config = NULL, o.given[option_find("config")] = 0;
        expect_same(&o, &wanted);
        assert_memory_equal(o.given, wanted.given, sizeof(o.given));
        assert_true(o.card == 1 + MACHINE_H200 && o.card == wanted.card && o.ranks == 8);
    }
}

// An option that the line gives, too, is not twice there; in a file it may be.
TEST(the_last_of_a_file_counts) {
    char note[256];
    CommandLine line =
        words(with_file("train --init gpt2 --data d --out o --lr 0.5", "t.args", "steps 8\nlr 1\nmax_steps 9"));
    const Child *child = run_child(parse_in_child, &line);
    snprintf(note, sizeof(note), "note: %s:3: --steps 8 ... --max_steps 9: the last value counts\n",
             scratch_path("t.args"));
    assert_string_equal(child->err, note);
    Options o = parse(with_file("train --init gpt2 --data d --out o --lr 0.5", "t.args", "steps 8\nlr 1\nmax_steps 9"));
    assert_true(o.steps == 9 && o.lr == 0.5);
}

// Of a file's commands each is noted, also if the file asks for silence; of the line's none is.
TEST(commands_of_a_file_are_told) {
    static const char log[] =
        "{\"step\": 1, \"options\": {\"verb\": \"train\", \"rollout\": true, \"objective\": \"grpo\", \"quiet\": true,"
        " \"reward_command\": [\"python3 a.py\", \"rm -r x\\necho 1\"]}}\n";
    static const char line[] = "train --init gpt2 --data d --out o", own[] = "--reward-command true --any-lr";
    char wanted[512], mine[256];
    CommandLine typed = words(with_file(line, "w.jsonl", log));
    const char *path = scratch_path("w.jsonl"),
               *rest = "--out, --resume, --extend and --overwrite of that run are left out";
    snprintf(wanted, sizeof(wanted),
             "note: %s: this run will execute its --reward-command: python3 a.py\n"
             "note: %s: this run will execute its --reward-command: rm -r x?echo 1\nnote: %s: %s\n",
             path, path, path, rest);
    assert_string_equal(run_child(parse_in_child, &typed)->err, wanted);
    snprintf(mine, sizeof(mine), "%s %s", line, own);
    typed = words(with_file(mine, "w.jsonl", log));
    snprintf(wanted, sizeof(wanted), "note: %s: %s\n", path, rest);
    assert_string_equal(run_child(parse_in_child, &typed)->err, wanted);
    typed = words(with_file("eval --model m --data d", "w.jsonl", log));
    assert_string_equal(run_child(parse_in_child, &typed)->err, wanted);
    typed =
        words(with_file(line, "w.jsonl",
                        "{\"step\": 1, \"options\": {\"verb\": \"train\", \"rollout\": true, \"objective\": \"grpo\", "
                        "\"seq_len\": 64, \"environment_command\": \"a.py\", \"render_command\": \"b.py\"}}\n"));
    snprintf(wanted, sizeof(wanted),
             "note: %s: this run will execute its --environment-command: a.py\n"
             "note: %s: this run will execute its --render-command: b.py\nnote: %s: %s\n",
             path, path, path, rest);
    assert_string_equal(run_child(parse_in_child, &typed)->err, wanted);
}

// --resume without --data takes the options of its run, whose commands are noted; a typed one wins.
TEST(a_resumed_run_repeats_its_options) {
    static const char log[] =
        "{\"step\": 1, \"notes\": [\"%s: this run will execute its --reward-command: rm -r x\"],"
        " \"options\": {\"verb\": \"train\", \"init\": \"gpt2\", \"data\": [\"a b.bin\"], \"lr\": 0.5,"
        " \"epochs\": 2, \"rollout\": true, \"objective\": \"grpo\", \"reward_command\": [\"rm -r x\"], \"out\": \"r\","
        " \"extend\": true, \"overwrite\": true, \"quiet\": true}}\n";
    char line[512], wanted[512], text[1024];
    const char *run = scratch_folder();
    snprintf(text, sizeof(text), log, run);
    write_file(scratch_path("log.jsonl"), text, strlen(text));
    snprintf(line, sizeof(line), "train --resume --out %s", run);
    CommandLine typed = words(line);
    snprintf(wanted, sizeof(wanted),
             "note: %s: this run will execute its --reward-command: rm -r x\n"
             "note: --resume: takes the options of %s that are not given here\n",
             run, run);
    assert_string_equal(run_child(parse_in_child, &typed)->err, wanted);
    Options o = parse(line);
    assert_true(o.data.count == 1 && o.epochs == 2 && o.lr == 0.5 && o.rollout && o.extend && !o.overwrite);
    assert_string_equal(o.out, run);
    snprintf(line, sizeof(line), "train --resume auto --out %s --steps 9 --batch 4 --extend", run);
    o = parse(line);
    assert_true(o.resume == RESUME_AUTO && o.steps == 9 && !option_given(&o, "epochs") && o.batch == 4 && isnan(o.lr));
    snprintf(line, sizeof(line), "train --resume --out %s --data d --init gpt2", run);
    assert_true(!parse(line).rollout);
    fresh_folder(REPLACED_NAME); // the log may be another run's
    snprintf(line, sizeof(line), "train --resume --out %s", run);
    refused(line, "no data: --out holds no log.jsonl with the options of a run");
}

TEST(files_are_refused) {
    static const char *const cases[][3] = {
        {"a.args", "# x\n\nlr 1\nlearning-speed 1\n",
         "a.args:4: unknown option --learning-speed; did you mean --learning-rate?; see train plan"},
        {"c.args", "lr x", "c.args:1: --lr is 'x', it must be a number"},
        {"d.args", "lr 1 2", "d.args:1: '2' does not belong here"},
        {"e.args", "init gpt2\ntrain_batch_size 8", "e.args:2: --train-batch-size: give --samples"},
        {"g.json", "{\"lr\": 1,\n\"colour\": 2}", "g.json:2: unknown option --colour; see"},
        {"o.json", "{\"lr\": 1,\n\"init\": \"gpt2\",\n\n\"train_batch_size\": 2}", "o.json:4: --train-batch-size:"},
        {"g.json", "{\"draw\": \"independent\"}", "g.json:1: unknown option --draw"}, // only in a log
        {"h.jsonl", "{\"step\": 1, \"options\": {\"colour\": 2}}\n", "h.jsonl:1: unknown option --colour"}};
    static const char *const broken[][3] = {
        {"i.args", "prompt 'it\nlr 1", "i.args:1: a quote is not closed on its line"},
        {"j.json", "{\"lr\": 1", "j.json: is not valid JSON"},
        {"k.json", "{\"lr\": {}}", "k.json: \"lr\" is an object, but every option takes text"},
        {"l.json", "{\"data\": [\"a\", true]}", "l.json: \"data\" is true, but every option takes text"},
        {"m.jsonl", "{\"step\": 1}\n", "m.jsonl: holds no record of a run's options"},
        {"n.args", "", "n.args: is empty"},
        {"o.args", "lr 1\ndata '\033[31m'", "o.args:2: holds control characters"},
        {"p.json", "{\"data\": \"a\\n\", \"out\": \"\\u009b\"}", "p.json:1: holds control characters"},
        {"q.jsonl", "{\"options\": {\"draw\": \"fixed\"}}",
         "q.jsonl: its run had --draw fixed, which this version does"},
        {"r.jsonl", "{\"options\": {\"draw\": \"independent\", \"clamp\": 2}}",
         "r.jsonl: its run had --clamp 2, which"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s", cases[i][0]);
        refused(with_file("plan", cases[i][0], cases[i][1]), cases[i][2]);
    }
    for (size_t i = 0; i < COUNT_OF(broken); i++) {
        test_case("%s", broken[i][0]);
        CommandLine line = words(with_file("plan", broken[i][0], broken[i][1]));
        expect_refused(parse_in_child, &line, EXIT_RUNTIME, broken[i][2]);
    }
}

int main(int argc, char **argv) {
    static char name[] = "train"; // the name in messages
    program_invocation_name = program_invocation_short_name = name;
    RUN_LISTED(argc, argv, scratch_remove);
}
