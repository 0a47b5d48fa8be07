// The command line: every row of the table round-trips, is in the help, and refuses what it must; verbs, echo and JSON.
#include "option_lines.h"

__attribute__((weak)) const Ops *const ops_device = NULL; // no tensors here

TEST(every_row_round_trips) {
    size_t rounds = 0;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        if (!strcmp(row->name, "help") || !strcmp(row->name, "version")) continue;
        for (int verb = 0; verb < VERBS; verb++) {
            if (!option_of(row, (Verb)verb)) continue;
            for (size_t i = 0; i < 5; i++) {
                if ((i + (size_t)verb) % 3 && row->kind != OPTION_FLAG && !getenv("ALL_CASES")) continue;
                char value[128], joined[256];
                CommandLine together;
                Options defaults;
                test_case("%s --%s, value %zu", verb_rows[verb].name, row->name, i);
                if (row->kind == OPTION_FLAG)
                    *value = 0;
                else if (!example_value(row, i, value, sizeof(value)))
                    break;
                CommandLine apart = together = least_line((Verb)verb, row->name);
                snprintf(joined, sizeof(joined), "--%s", row->name);
                add(&apart, joined);
                if (*value) {
                    add(&apart, value);
                    snprintf(joined, sizeof(joined), "--%s=%s", row->name, value);
                }
                add(&together, joined);
                CommandLine without = apart;
                Options a = options_parse(apart.argc, apart.argv);
                Options b = options_parse(together.argc, together.argv);
                assert_true(option_given(&a, row->name));
                expect_same(&a, &b);
                options_set_defaults(&defaults);
                if (row->kind == OPTION_CHOICE)
                    assert_string_equal(option_chosen(&a, row->name), value);
                else if (!row_differs(row, &a, &defaults))
                    test_fail("'%s' was not stored", value);
                expect_round_trip(&without);
                options_free(&a), options_free(&b);
                rounds++;
                if (row->kind == OPTION_FLAG) break;
            }
        }
    }
    printf("             %zu values\n", rounds);
    assert_true(rounds > 300);
}

TEST(values_arrive) {
    Options o = parse("train --model=m --data a.bin b.bin c.bin --seq-len 8192 --lr 1e-5 --memory-limit 80GiB --json "
                      "--method checkpoint --prompt-ids 5,6,7 --val-data=v1 v2 --chunk auto --top-k off");
    assert_int_equal(o.verb, VERB_TRAIN);
    assert_string_equal(o.model, "m");
    assert_int_equal(o.data.count, 3);
    assert_string_equal(o.data.path[2], "c.bin");
    assert_int_equal(o.val_data.count, 2);
    assert_string_equal(o.val_data.path[0], "v1");
    assert_string_equal(o.val_data.path[1], "v2");
    assert_int_equal(o.seq_len, 8192);
    assert_true(o.lr == 1e-5 && o.memory_limit == (size_t)80 << 30);
    assert_true(o.json && !o.quiet && !o.resume);
    assert_int_equal(o.method, METHOD_CHECKPOINT);
    assert_int_equal(o.prompt_ids.count, 3);
    assert_int_equal(o.prompt_ids.id[2], 7);
    assert_int_equal(o.chunk, 0);
    assert_true(option_given(&o, "chunk") && !option_given(&o, "logits-chunk"));
    options_free(&o);
}

// What is joined to its option by a sign belongs to it, whatever it looks like.
TEST(values_that_look_like_options) {
    Options o = parse("train --model=--quiet --data=--json b.bin --val-data=-- --out o");
    assert_true(!o.json && !o.quiet && o.data.count == 2 && o.val_data.count == 1);
    assert_string_equal(o.model, "--quiet");
    assert_string_equal(o.data.path[0], "--json");
    assert_string_equal(o.val_data.path[0], "--");
    assert_string_equal(o.out, "o");
}

static void expect_names(const char *option, const char *const *names, int count) {
    int value;
    for (int i = 0; i < count; i++) {
        assert_true(choice_parse(&option_rows[option_find(option)], names[i], &value));
        assert_int_equal(value, i);
    }
}

// The words of a choice stand in the order of its enum.
TEST(words_are_those_of_the_enums) {
    static const struct {
        const char *option, *word;
        int value;
    } cases[] = {{"dtype", "build", DTYPE_AUTO},
                 {"dtype", "double", DTYPE_FP64},
                 {"shuffle", "on", SHUFFLE_ON},
                 {"long", "truncate", LONG_TRUNCATE},
                 {"method", "checkpoint", METHOD_CHECKPOINT},
                 {"keep-on", "device", KEEP_ON_DEVICE},
                 {"grad-dtype", "fp32", DTYPE_FP32},
                 {"moments", "bf16", DTYPE_BF16},
                 {"master", "fp32", MASTER_FP32},
                 {"for", "bp", VERB_BP},
                 {"kv", "gather", KEYS_GATHER},
                 {"reward-failure", "skip", REWARD_FAILURE_SKIP},
                 {"scale-rewards", "group", SCALE_GROUP},
                 {"to", "hf", CONVERT_HF},
                 {"to", "flat", CONVERT_FLAT},
                 {"schedule", "linear", SCHEDULE_LINEAR},
                 {"schedule", "constant", SCHEDULE_CONSTANT}};
    int value;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_case("--%s %s", cases[i].option, cases[i].word);
        assert_true(choice_parse(&option_rows[option_find(cases[i].option)], cases[i].word, &value));
        assert_int_equal(value, cases[i].value);
    }
    for (int i = 0; i < MACHINES; i++) {
        assert_true(choice_parse(&option_rows[option_find("machine")], machines[i].name, &value));
        assert_int_equal(value, i);
    }
    expect_names("objective", objective_names, OBJECTIVES);
    expect_names("normalisation", normalisation_names, NORMALISATIONS);
    expect_names("dpo-loss", dpo_loss_names, DPO_LOSSES);
}

TEST(defaults) {
    Options o = parse("bp --init gpt2");
    assert_true(o.method == METHOD_STREAM && o.objective == OBJECTIVE_SFT && o.dtype == DTYPE_AUTO);
    assert_true(o.chunk == 0 && o.logits_chunk == 0 && o.batch == 1 && o.grad_accum == 1 && o.steps == 0);
    assert_true(!o.model && !o.out && !o.data.count && !o.prompt && !o.prompt_ids.count && !o.memory_limit);
    for (size_t i = 0; i < OPTION_ROWS; i++) assert_int_equal(o.given[i], (int)i == option_find("init"));
    assert_true(isnan(o.beta) && isnan(o.gamma) && isnan(o.clip_low) && isnan(o.clip_high) && isnan(o.lora_alpha));
    assert_true(o.label_smoothing == 0 && o.lora_dropout == 0 && o.lora_rank == 0 && o.group_size == 8 && !o.rollout);
}

// Numbers that --help and the READMEs promise
TEST(promised_defaults) {
    static const char *const promised[][2] = {{"lr", "3e-4"},    {"weight-decay", "0.1"}, {"beta1", "0.9"},
                                              {"beta2", "0.95"}, {"epsilon", "1e-8"},     {"grad-clip", "1"}};
    for (size_t i = 0; i < COUNT_OF(promised); i++) {
        test_case("--%s", promised[i][0]);
        assert_string_equal(option_rows[option_find(promised[i][0])].fallback, promised[i][1]);
    }
}

// Of a number that is open, the word is its default: it can be given, and 0 is another value.
TEST(numbers_that_are_open) {
    size_t opened = 0;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        char text[64];
        const Verb verb = verb_of(row);
        if (row->kind != OPTION_DOUBLE || !option_word(row)) continue;
        snprintf(text, sizeof(text), "--%s=%s", row->name, row->fallback);
        test_case("%s", text);
        CommandLine line = least_line((Verb)verb, row->name);
        add(&line, text);
        CommandLine again = line; // parsing takes the names off paths
        Options o = options_parse(line.argc, line.argv);
        assert_true(isnan(*(const double *)(const void *)((const char *)&o + row->offset)));
        expect_round_trip(&again);
        opened++;
    }
    assert_int_equal(opened, 5);
    assert_true(parse("bp --init gpt2 --objective grpo --beta 0").beta == 0);
    assert_true(parse("bp --init gpt2 --lora-rank 4 --lora-alpha 0.5").lora_alpha == 0.5);
    refused("bp --init gpt2 --objective dpo --beta off",
            "--beta is 'off', it must be a number from 0 to 1000000, or auto");
}

// ---- verbs ---------------------------------------------------------------------------------------------------------
TEST(verbs) {
    for (int verb = 0; verb < VERBS; verb++) {
        CommandLine line = least_line((Verb)verb, "");
        assert_int_equal(options_parse(line.argc, line.argv).verb, verb);
    }
    assert_int_equal(parse("--model m --data d").verb, VERB_TRAIN);
    assert_int_equal(parse("--resume --out o --data d").verb, VERB_TRAIN);
    refused(
        "bpp --init gpt2",
        "'bpp' is not a verb, it must be train, bp, plan, eval, logprobs, sample, convert or info (did you mean bp?)");
    refused("chat", "'chat' is not a verb, it must be train, bp");
    refused("m.bin", "'m.bin' is not a verb");
    refused("logprob", "(did you mean logprobs?); see train --help");
}

// A run's own command line can be planned, though the plan's help shows only what changes it.
TEST(plan_takes_what_train_and_bp_take) {
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        int expected = option_of(row, VERB_PLAN) || option_of(row, VERB_TRAIN) || option_of(row, VERB_BP);
        if (row->verbs) assert_int_equal(option_accepted(row, VERB_PLAN), expected);
    }
    assert_int_equal(parse("plan --init gpt2 --data d.bin --lr 1e-4 --out o --resume --grads-out g").verb, VERB_PLAN);
    refused("plan --resume --out o", "no model");
    refused("plan --init gpt2 --val-steps 3 --prompt-file", "--prompt-file has no value");
}

// ---- help ----------------------------------------------------------------------------------------------------------
static Verb help_verb;
static void print_help(FILE *file, const Options *options) {
    (void)options;
    options_help(file, help_verb);
}

// Whether a line of the help begins with this option.
static int help_lists(const char *help, const char *name) {
    char wanted[64];
    snprintf(wanted, sizeof(wanted), "\n  --%s", name);
    for (const char *found = strstr(help, wanted); found; found = strstr(found + 1, wanted))
        if (found[strlen(wanted)] == ' ' || found[strlen(wanted)] == '\n') return 1;
    return 0;
}

static void expect_readable(const char *help) {
    const char *line = help, *end;
    for (; *line; line = end + 1) {
        size_t columns = 0;
        end = strchr(line, '\n');
        assert_non_null(end);
        for (size_t i = 0; i < (size_t)(end - line); i++) {
            if ((unsigned char)line[i] < 0x20 || (unsigned char)line[i] > 0x7e)
                test_fail("not plain text: %.60s", line);
            columns++;
        }
        if (columns > 100) test_fail("%zu columns: %.60s", columns, line);
        if (columns && line[columns - 1] == ' ') test_fail("ends with a space: %.60s", line);
    }
}

TEST(help_mentions_every_row) {
    for (int verb = 0; verb <= VERBS; verb++) {
        help_verb = (Verb)verb;
        test_case("%s", verb < VERBS ? verb_rows[verb].name : "the program's");
        char *help = printed(print_help, NULL);
        expect_readable(help);
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            const OptionRow *row = &option_rows[i];
            if (!row->verbs) continue;
            if (help_lists(help, row->name) != (verb == VERBS || option_of(row, (Verb)verb)))
                test_fail("--%s is %s", row->name, help_lists(help, row->name) ? "shown" : "missing");
        }
        for (size_t i = 0; verb == VERBS && i < VERBS; i++) assert_non_null(strstr(help, verb_rows[i].purpose));
    }
}

TEST(help_and_version_end_with_0) {
    static const char *const cases[][2] = {{"--help", "usage: train [VERB]"}, {"-h", "usage: train [VERB]"},
                                           {"bp --help", "usage: train bp"},  {"plan --init x -h", "usage: train plan"},
                                           {"--version", "streambp.c "},      {"info --version", "streambp.c "}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        CommandLine line = words(cases[i][0]);
        const Child *child = run_child(parse_in_child, &line);
        if (child->code != 0 || child->err[0] || !strstr(child->out, cases[i][1]))
            test_fail("%s: exit %d, stderr '%s', stdout begins %.40s", cases[i][0], child->code, child->err,
                      child->out);
    }
}

TEST(examples_of_the_help_parse) {
    for (int verb = 0; verb < VERBS; verb++) {
        char text[256];
        snprintf(text, sizeof(text), "train %s %s", verb_rows[verb].name, verb_rows[verb].example);
        CommandLine line = shell_words(text);
        assert_int_equal(options_parse(line.argc, line.argv).verb, verb);
    }
}

// ---- refusals ------------------------------------------------------------------------------------------------------
TEST(numbers_are_refused) {
    static const char *const bad[] = {"",    "x",     "-1",   "1x",  "0x10", "1e3x", " 1",    "+1",
                                      "nan", "inf",   "-inf", "1,5", "--",   "1 2",  "1_000", "99999999999999999999999",
                                      "\n",  "1e999", "."};
    size_t tried = 0;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        const Verb verb = verb_of(row);
        if (row->kind != OPTION_SIZE && row->kind != OPTION_DOUBLE && row->kind != OPTION_BYTES) continue;
        for (size_t i = getenv("ALL_CASES") ? 0 : r % 4; i < sizeof(bad) / sizeof(bad[0]);
             i += getenv("ALL_CASES") ? 1 : 4) {
            CommandLine line = {0, {NULL}};
            char text[128], expected[128];
            snprintf(text, sizeof(text), "--%s=%s", row->name, bad[i]);
            test_case("%s", text);
            add(&line, "train"), add(&line, verb_rows[verb].name), add(&line, text);
            snprintf(expected, sizeof(expected), *bad[i] ? "--%s is '%s', it must be " : "--%s is empty, it must be ",
                     row->name, *bad[i] == '\n' ? "?" : bad[i]); // a message stays on one line
            expect_refused(parse_in_child, &line, EXIT_USAGE, expected);
            tried++;
        }
    }
    printf("             %zu values\n", tried);
    assert_true(tried > 200);
}

TEST(ranges_are_kept) {
    size_t tried = 0;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        char text[128], message[128];
        const Verb verb = verb_of(row);
        if (row->kind != OPTION_SIZE && row->kind != OPTION_DOUBLE) continue;
        if (row->least > 0) {
            snprintf(text, sizeof(text), "%s --%s 0", verb_rows[verb].name, row->name);
            refused(text, "it must be a");
            tried++;
        }
        if (row->most < 1e15) {
            snprintf(text, sizeof(text), "%s --%s %.10g", verb_rows[verb].name, row->name, row->most + 1);
            snprintf(message, sizeof(message), " to %.10g", row->most);
            refused(text, message);
            tried++;
        }
    }
    assert_true(tried > 20);
}

TEST(choices_are_refused) {
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        static const char *const bad[] = {"x", "Stream", "fp", "fp32|bf16", "|", "stream "};
        const Verb verb = verb_of(row);
        if (row->kind != OPTION_CHOICE) continue;
        for (size_t i = 0; i < 6; i++) {
            CommandLine line = {0, {NULL}};
            char text[128];
            add(&line, "train"), add(&line, verb_rows[verb].name);
            snprintf(text, sizeof(text), "--%s=%s", row->name, bad[i]);
            add(&line, text);
            expect_refused(parse_in_child, &line, EXIT_USAGE, "', it must be ");
        }
    }
    refused("bp --method fast", "--method is 'fast', it must be stream, checkpoint or full; see train bp --help");
    refused("train --moments fp16", "--moments is 'fp16', it must be fp32 or bf16");
}

TEST(what_comes_later_is_refused_by_name) {
    for (size_t i = 0; i < NOT_IN_THIS_VERSION; i++) {
        char text[128], message[128];
        assert_true(option_find(not_in_this_version[i].option) >= 0);
        snprintf(text, sizeof(text), "train --%s %s", not_in_this_version[i].option, not_in_this_version[i].word);
        snprintf(message, sizeof(message), "--%s %s is not in this version", not_in_this_version[i].option,
                 not_in_this_version[i].word);
        refused(text, message);
    }
}

TEST(options_that_come_later_are_refused_by_name) {
    for (size_t i = 0; i < OPTIONS_NOT_IN_THIS_VERSION; i++) {
        const char *name = options_not_in_this_version[i].option;
        char text[128], message[256];
        assert_int_equal(option_find(name), -1);
        snprintf(message, sizeof(message), "--%s is not in this version: %s; see train train --help", name,
                 options_not_in_this_version[i].reason);
        snprintf(text, sizeof(text), "train --model m --data d --%s 0.01", name);
        refused(text, message);
    }
}

TEST(malformed_lines_are_refused) {
    refused("", "no model: give --model PATH or --init NAME; see train train --help");
    refused("bp --seqlen 3", "unknown option --seqlen; did you mean --seq-len?; see train bp --help");
    refused("bp --seq_len 3", "did you mean --seq-len?");
    refused("bp --init gpt2 --kv ring", "--kv ring has no meaning without --sp above 1");
    refused("bp --chnuk 3", "did you mean --chunk?");
    refused("bp --grads g", "did you mean --grads-out?");
    refused("bp --step 3", "did you mean --steps?"); // of another verb, but that is what was meant
    refused("bp --zzzzzzzz", "unknown option --zzzzzzzz; see train bp --help");
    refused("bp --a-name-that-is-longer-than-any-option-could-sensibly-be-and-goes-on 1", "unknown option --a-name");
    refused("bp --", "unknown option --;");
    refused("bp --steps 3", "--steps is not an option of bp but of train; see train bp --help");
    refused("eval --method full", "--method is not an option of eval but of train, bp, plan");
    refused("bp --init gpt2 --chunk", "--chunk has no value; write --chunk N");
    refused("bp --chunk --json", "--chunk has no value; write --chunk N");
    refused("train --data --model m", "--data has no value; write --data PATH...");
    refused("bp --init= --json", "--init is empty");
    refused("train --data=", "--data is empty");
    refused("bp --json=yes", "--json takes no value, 'yes' was given");
    refused("bp --json yes", "'yes' does not belong here: options begin with two dashes, values follow an option");
    refused("bp -json", "'-json' does not belong here: options begin with two dashes");
    refused("bp --seq-len 3 --seq-len=3", "--seq-len is given twice");
    refused("bp --json --json", "--json is given twice");
    refused("sample --model m --prompt-ids 1,,2", "--prompt-ids is '1,,2', it must be token ids separated by commas");
    refused("sample --model m --prompt-ids 1,2147483648", "it must be token ids");
    refused("sample --model m --prompt-ids 1,-2", "it must be token ids");
    refused("sample --model m --prompt-ids ,", "it must be token ids");
}

TEST(options_that_need_or_exclude_each_other) {
    refused("bp --model m --init gpt2", "--model and --init exclude each other");
    refused("info", "no model");
    refused("eval --model m", "no data: give --data");
    refused("train --model m", "no data: give --data");
    refused("convert --model m", "no output: give --out");
    refused("train --model m --data d --resume", "--resume needs --out");
    refused("train --model m --data d --save-every 3", "--save-every needs --out");
    refused("train --model m --data d --val-every 3", "--val-every needs --val-data");
    refused("sample --model m", "no prompt");
    refused("sample --model m --prompt a --prompt-ids 1", "exclude each other");
    refused("sample --model m --chat --prompt-ids 1", "--chat and --prompt-ids exclude each other");
    refused("sample --model m --system s --prompt-ids 1", "--chat and --prompt-ids exclude each other");
    refused("sample --model m --chat --json", "--json gives one answer");
}

// Whether the option, on its line with this objective, is let pass; else what must be said is.
static void expect_with_objective(const char *option, const char *objective, int allowed) {
    char text[128];
    test_case("--%s with --objective %s", option, objective);
    CommandLine line = words(strcmp(option, "rollout") ? "plan --init gpt2" : "plan --init gpt2 --data d");
    snprintf(text, sizeof(text), "--objective=%s", objective);
    add(&line, text);
    add_example(&line, &option_rows[option_find(option)]);
    snprintf(text, sizeof(text), "--%s has no meaning with --objective %s; it belongs to ", option, objective);
    if (allowed)
        options_parse(line.argc, line.argv);
    else
        expect_refused(parse_in_child, &line, EXIT_USAGE, text);
}

TEST(options_of_objectives) {
    for (size_t i = 0; i < OF_OBJECTIVES; i++)
        for (int kind = 0; kind < OBJECTIVES; kind++)
            expect_with_objective(of_objectives[i].option, objective_names[kind],
                                  (int)(of_objectives[i].objectives >> kind & 1u));
    refused("bp --init gpt2 --gamma 1", "--gamma has no meaning with --objective sft; it belongs to simpo;");
    refused("bp --init gpt2 --label-smoothing 0.1", "--label-smoothing has no meaning with --objective sft");
    refused("train --model m --data d --objective kto", "--objective kto is not in this version");
}

TEST(values_without_meaning_for_an_objective) {
    refused("bp --init gpt2 --objective dpo --dpo-loss ipo --label-smoothing 0.1",
            "--label-smoothing has no meaning with --dpo-loss ipo");
    refused("bp --init gpt2 --objective dpo --dpo-loss hinge --label-smoothing 0.1",
            "has no meaning with --dpo-loss hinge");
    refused("bp --init gpt2 --objective dpo --label-smoothing 0.5", "it must be a number from 0 to 0.499999");
    refused("bp --init gpt2 --objective dpo --beta 0", "--beta 0 leaves nothing of --objective dpo");
    refused("bp --init gpt2 --objective simpo --beta 0", "--beta 0 leaves nothing of --objective simpo");
    refused("bp --init gpt2 --objective orpo --beta 0", "--beta 0 leaves nothing of --objective orpo");
    refused("bp --init gpt2 --objective grpo --temperature 0",
            "--temperature 0 has no gradient; --objective grpo takes");
    refused("bp --init gpt2 --objective grpo --clip-low 1.5", "--clip-low is '1.5', it must be a number from 0 to 1");
    refused("bp --init gpt2 --objective grpo --group-size 1", "--group-size is '1', it must be a whole number from 2");
    refused("bp --init gpt2 --objective dpo --any-reference",
            "--any-reference has no meaning without --reference-logprobs");
    assert_true(parse("bp --init gpt2 --objective grpo --old-logprobs f --any-reference").any_reference);
    refused("train --init gpt2 --data d --val-data v --objective dpo --reference-logprobs f --any-reference",
            "--any-reference leaves nobody to compute the reference of --val-data");
    assert_true(parse("sample --init gpt2 --prompt x --temperature 0").temperature == 0);
}

TEST(options_that_need_another) {
    for (size_t i = 0; i < OF_OPTIONS; i++) {
        const OptionRow *row = &option_rows[option_find(of_options[i].option)];
        CommandLine line = words("plan --init gpt2");
        char text[128];
        add_example(&line, row);
        snprintf(text, sizeof(text), "--%s has no meaning without --%s", row->name, of_options[i].needs);
        expect_refused(parse_in_child, &line, EXIT_USAGE, text);
    }
    refused("bp --init gpt2 --lora-rank off --rslora",
            "--rslora has no meaning without --lora-rank; give both or none");
    refused("train --model m --data d --lora-rank 4 --adapter a", "--lora-rank and --adapter exclude each other");
    refused("train --model m --data d --objective dpo --rollout", "--rollout has no meaning with --objective dpo");
    refused("train --model m --data d --objective grpo --rollout", "--rollout needs --reward-command");
    refused("train --model m --data d --objective grpo --rollout --reward-command r --beta 0.1",
            "--beta above 0 with --rollout needs a reference");
    refused("train --model m --data d --objective grpo --rollout --reward-command r --updates 3 --steps 10",
            "must be multiples of --updates 3");
    refused("plan --init gpt2 --objective grpo --rollout", "a plan with --rollout needs --data");
}

static void check_dtype(const void *context) {
    Options options = parse((const char *)context);
    options_check_dtype(&options, DTYPE_FP32);
}

TEST(dtype_is_the_builds_own) {
    static const char *const allowed[] = {"bp --init gpt2", "bp --init gpt2 --dtype fp32",
                                          "plan --init gpt2 --dtype bf16", "convert --model m --out o --dtype bf16"};
    for (size_t i = 0; i < 4; i++) assert_int_equal(run_child(check_dtype, allowed[i])->code, 0);
    expect_refused(check_dtype, "bp --init gpt2 --dtype bf16", EXIT_USAGE,
                   "--dtype is bf16 but this program was built for fp32; build with make PRECISION=bf16");
    expect_refused(check_dtype, "info --init gpt2 --dtype bf16", EXIT_USAGE, "--dtype is bf16 but this program");
}

typedef struct {
    int code;
    DType dtype;
    const char *line;
} Storage;

static void check_storage(const void *context) {
    const Storage *storage = (const Storage *)context;
    Options options = parse(storage->line);
    options_check_storage(&options, storage->dtype);
}

TEST(storage_without_meaning_is_refused) {
    static const Storage cases[] = {
        {2, DTYPE_FP64, "bp --init gpt2 --grad-dtype fp32"},
        {2, DTYPE_FP64, "plan --init gpt2 --grad-dtype bf16"},
        {2, DTYPE_FP64, "plan --init gpt2 --moments bf16"},
        {2, DTYPE_FP64, "train --init gpt2 --data d --moments fp32"},
        {2, DTYPE_FP64, "train --init gpt2 --data d --master fp32"},
        {2, DTYPE_FP32, "train --init gpt2 --data d --master fp32"},
        {0, DTYPE_FP32, "train --init gpt2 --data d --grad-dtype bf16 --moments bf16 --master none"},
        {0, DTYPE_BF16, "train --init gpt2 --data d --grad-dtype fp32 --moments fp32 --master fp32"},
        {0, DTYPE_FP64, "train --init gpt2 --data d --grad-dtype auto --master none"},
        {0, DTYPE_FP64, "bp --init gpt2"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_case("%s, %s", dtype_name(cases[i].dtype), cases[i].line);
        if (cases[i].code) expect_refused(check_storage, &cases[i], EXIT_USAGE, " has no meaning for a model in ");
        assert_int_equal(run_child(check_storage, &cases[i])->code, cases[i].code);
    }
    expect_refused(check_storage, &cases[0], EXIT_USAGE,
                   "--grad-dtype fp32 has no meaning for a model in double; leave it out; see train bp --help");
}

// ---- the table and its texts ---------------------------------------------------------------------------------------
TEST(the_table_is_sound) {
    size_t last = 0;
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (!row->verbs) continue;
        test_case("--%s", row->name);
        if (strspn(row->name, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(row->name)) test_fail("its name");
        assert_true(row->help && *row->help && row->help[strlen(row->help) - 1] != '.');
        assert_true((row->kind == OPTION_FLAG) == (row->value == NULL));
        assert_true(row->offset > 0 && row->offset < sizeof(Options));
        if (row->kind == OPTION_CHOICE) { // as many words as enum values
            double words = 1;
            for (const char *c = row->value; *c; c++) words += *c == '|';
            assert_true(row->most - row->least + 1 == words);
        }
        for (size_t j = 0; j < i; j++) {
            if (!option_rows[j].verbs) continue;
            if (!strcmp(option_rows[j].name, row->name)) test_fail("is there twice");
            if (option_rows[j].offset == row->offset) test_fail("shares a field with --%s", option_rows[j].name);
        }
        last = i;
    }
    assert_int_equal(last, OPTION_ROWS - 1);
}

static void print_json(FILE *file, const Options *options) {
    JsonOut json = json_open(file);
    options_json(&json, NULL, options);
    assert_int_equal(json_close(&json), 0);
}

TEST(echo_and_json) {
    Options info = parse("info --model m"), dashes = parse("info --seed 42 --model=--help");
    Options sample = parse("sample --init gpt2 --prompt-ids 1,2 --temperature 0.70 --top-k off");
    Options plan = parse("plan --init gpt2 --data d.bin --batch 2 --lr 1"); // what plays no part in a plan is left out
    assert_string_equal(printed(options_echo, &info), "train info --model m\n");
    assert_string_equal(printed(options_echo, &dashes), "train info --model=--help --seed 42\n");
    assert_string_equal(printed(options_echo, &plan), "train plan --init gpt2 --data d.bin --batch 2\n");
    assert_string_equal(printed(print_json, &info), "{\"verb\": \"info\", \"model\": \"m\", \"init\": null, \"dtype\": "
                                                    "\"build\", \"seed\": 42, \"json\": false, \"quiet\": false}\n");
    assert_string_equal(printed(options_echo, &sample),
                        "train sample --init gpt2 --prompt-ids 1,2 --temperature 0.7 --top-k off\n");
    assert_non_null(strstr(printed(print_json, &sample), "\"prompt_ids\": [1, 2], \"max_new_tokens\": 256, "
                                                         "\"temperature\": 0.7, \"top_k\": \"off\""));
    Options many =
        parse("--init gpt2 --data s/*.bin b.bin --val-data v.bin --seq-len 8192 --lr 1e-5 --out r --grad-accum 4");
    assert_string_equal(printed(options_echo, &many),
                        "train train --init gpt2 --data 's/*.bin' b.bin --val-data v.bin --seq-len 8192 \\\n"
                        "    --grad-accum 4 --lr 1e-05 --out r\n");
    Options adapters =
        parse("train --model m --data d --objective dpo --beta auto --lora-rank 8 --lora-alpha 16 --rslora");
    assert_string_equal(printed(options_echo, &adapters),
                        "train train --model m --data d --objective dpo --beta auto --lora-rank 8 --lora-alpha 16 \\\n"
                        "    --rslora\n");
    assert_non_null(strstr(printed(print_json, &adapters),
                           "\"objective\": \"dpo\", \"dpo_loss\": \"sigmoid\", \"label_smoothing\": 0, "
                           "\"beta\": \"auto\", \"gamma\": \"auto\", \"normalisation\": \"grpo\""));
    assert_non_null(strstr(printed(print_json, &adapters),
                           "\"lora_rank\": 8, \"lora_alpha\": 16, \"lora_targets\": \"all\", "
                           "\"lora_dropout\": 0, \"rslora\": true"));
    assert_non_null(strstr(printed(print_json, &many), "\"lora_rank\": \"off\", \"lora_alpha\": \"auto\""));
    options_free(&sample);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
