// The command line: every row of the table round-trips, is in the help, and refuses wrong values; verbs, echo and JSON.
#include "option_lines.h"

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

// A value after a space and after "=": stored, echoed, parsed again.
static void check_row(const OptionRow *row, Verb verb, const char *value) {
    char joined[256];
    CommandLine together = least_line(verb, row->name), apart = together;
    Options defaults;
    snprintf(joined, sizeof(joined), "--%s", row->name);
    add(&apart, joined);
    if (*value) {
        add(&apart, value);
        snprintf(joined, sizeof(joined), "--%s=%s", row->name, value);
    }
    add(&together, joined);
    CommandLine without = apart;
    Options a = options_parse(apart.argc, apart.argv), b = options_parse(together.argc, together.argv);
    assert_true(option_given(&a, row->name));
    expect_same(&a, &b);
    options_set_defaults(&defaults);
    if (row->kind == OPTION_CHOICE)
        assert_string_equal(option_chosen(&a, row->name), value);
    else if (row->kind == OPTION_LAYERS)
        assert_string_equal(option_text(row, &a, joined, sizeof(joined)), value);
    else if (!row_differs(row, &a, &defaults))
        test_fail("'%s' was not stored", value);
    expect_round_trip(&without);
    options_free(&a), options_free(&b);
}

TEST(every_row_round_trips) {
    size_t rounds = 0;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        if (text_is_one_of(row->name, "config|help|version")) continue;
        for (size_t verb = 0; verb < VERBS; verb++) {
            for (size_t i = 0; option_of(row, (Verb)verb) && i < (row->kind == OPTION_FLAG ? 1 : 5); i++) {
                char value[128] = "";
                if ((i + verb) % 3 && row->kind != OPTION_FLAG && !all_cases()) continue;
                test_case("%s --%s, value %zu", verb_rows[verb].name, row->name, i);
                if (row->kind != OPTION_FLAG && !example_value(row, i, value, sizeof(value))) break;
                check_row(row, (Verb)verb, value);
                rounds++;
            }
        }
    }
    printf("             %zu values\n", rounds);
    assert_true(rounds > 300);
}

// Text after "=" is the option's value, whatever it looks like; a list ends at the next option.
TEST(values_arrive) {
    Options o =
        parse("train --model=--quiet --data=--json b.bin c.bin --memory-limit 80GiB --resume --method checkpoint "
              "--prompt-ids 5,6,7 --val-data=-- v2 --chunk auto --out o");
    assert_true(!o.quiet && !o.json && o.resume && o.method == METHOD_CHECKPOINT && o.memory_limit == (size_t)80 << 30);
    assert_true(o.data.count == 3 && o.val_data.count == 2 && o.prompt_ids.count == 3 && o.prompt_ids.id[2] == 7);
    assert_string_equal(o.model, "--quiet");
    assert_string_equal(o.data.path[0], "--json");
    assert_string_equal(o.data.path[2], "c.bin");
    assert_string_equal(o.val_data.path[0], "--");
    assert_true(o.chunk == 0 && option_given(&o, "chunk") && !option_given(&o, "logits-chunk"));
    options_free(&o);
}

static void expect_names(const char *option, const char *const *names, int count) {
    int value;
    for (int i = 0; i < count; i++) {
        assert_true(choice_parse(&option_rows[option_find(option)], names[i], &value));
        assert_int_equal(value, i);
    }
}

// The words of a choice are in the order of its enum.
TEST(words_are_those_of_the_enums) {
    static const struct {
        const char *option, *word;
        int value;
    } cases[] = {{"dtype", "auto", DTYPE_AUTO},
                 {"dtype", "double", DTYPE_FP64},
                 {"shuffle", "on", SHUFFLE_ON},
                 {"long", "truncate", LONG_TRUNCATE},
                 {"method", "checkpoint", METHOD_CHECKPOINT},
                 {"keep-on", "device", PLACE_DEVICE},
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
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("--%s %s", cases[i].option, cases[i].word);
        assert_true(choice_parse(&option_rows[option_find(cases[i].option)], cases[i].word, &value));
        assert_int_equal(value, cases[i].value);
    }
    expect_names("schedule", schedule_names, SCHEDULES);
    expect_names("objective", objective_names, OBJECTIVES);
    expect_names("normalisation", normalisation_names, NORMALISATIONS);
    expect_names("dpo-loss", dpo_loss_names, DPO_LOSSES);
    expect_names("kto-loss", kto_loss_names, KTO_LOSSES);
}

// A memory limit is a number of bytes or a card's memory; other byte options take no card.
TEST(cards_are_limits) {
    static const struct {
        const char *card;
        double gib;
    } known[] = {{"a100", 78.1}, {"h100", 78.1},     {"h200", 138.8},
                 {"l40s", 43.4}, {"RTX 4090", 22.5}, {"rtx3060", 10.5}};
    const OptionRow *row = &option_rows[option_find("memory-limit")];
    size_t bytes;
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        test_case("%s", known[i].card);
        assert_true(bytes_parse(row, known[i].card, &bytes) && bytes == (size_t)(known[i].gib * GIBIBYTE));
        assert_false(bytes_parse(&option_rows[option_find("max-shard-size")], known[i].card, &bytes));
    }
    assert_true(bytes_parse(row, "4090", &bytes) && bytes == (size_t)(22.5 * GIBIBYTE)); // not 4090 bytes
    assert_false(bytes_parse(row, "h100x8", &bytes));                                    // --machine's
    for (int i = 0; i < MACHINES; i++) {
        assert_int_equal(word_index(MACHINE_NAMES, machines[i].name), i);
        assert_true(machines[i].board == 2 || machines[i].value[GPUS_PER_NODE] == 8); // "an eighth of a node"
    }
    assert_string_equal(machines[MACHINE_H200].name, "h200");
}

// --machine names a card and describes its node.
TEST(machines_have_hosts_and_disks) {
    static const char *const bad[] = {
        "h300",    "",      "x8",        "h100x",         "h100x0",      "409",
        "rtx4091", "h100,", "h100,host", "h100,hots=1TB", "h100,host=1", "h100,disk-rate=0"};
    Machine m;
    char wrong[128];
    assert_true(machine_parse(&m, "H200,host=128GiB,disk-rate=3GB,disk=2TB", wrong, sizeof(wrong)));
    assert_true(m.host_gib == 128 && m.host_given && m.disk_gib * GIBIBYTE == 2e12 && m.value[DISK_READ] == 3e9);
    assert_true(machine_parse(&m, "rtx4090", wrong, sizeof(wrong)) && !m.host_given && m.disk_gib == 0);
    assert_true(m.cards == 0 && machine_host_gib(&m, 1) == m.host_gib); // a desktop's
    assert_true(machine_parse(&m, "4090X2,host=64GiB", wrong, sizeof(wrong)) && m.cards == 2);
    assert_true(!strcmp(m.name, "rtx4090") && machine_host_gib(&m, 2) == 64);
    assert_true(machine_parse(&m, "RTX 4090", wrong, sizeof(wrong)) && !strcmp(m.name, "rtx4090"));
    assert_true(machine_parse(&m, "H100x8", wrong, sizeof(wrong)) && m.cards == 8 && !strcmp(m.name, "h100"));
    assert_true(machine_host_gib(&m, 1) == 225 && machine_host_gib(&m, 8) == 1800); // shares of a node
    assert_true(machine_parse(&m, "h100,host=0", wrong, sizeof(wrong)) && m.host_gib == 0);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        test_case("%s", bad[i]);
        assert_false(machine_parse(&m, bad[i], wrong, sizeof(wrong)));
    }
    assert_true(machine_of_device("NVIDIA A100-SXM4-80GB") == &machines[MACHINE_A100]);
    assert_true(machine_of_device("NVIDIA H100 PCIe") == NULL && machine_of_device("NVIDIA T4") == NULL);
}

// Numbers that --help and the READMEs promise
TEST(promised_defaults) {
    static const char *const promised[][2] = {{"lr", "auto"},    {"weight-decay", "0.1"}, {"beta1", "0.9"},
                                              {"beta2", "0.95"}, {"epsilon", "1e-8"},     {"grad-clip", "1"}};
    for (size_t i = 0; i < COUNT_OF(promised); i++) {
        test_case("--%s", promised[i][0]);
        assert_string_equal(option_rows[option_find(promised[i][0])].fallback, promised[i][1]);
    }
}

TEST(learning_rates) {
    static const struct {
        const char *line;
        double rate;
    } cases[] = {{"--model m", 1e-5},
                 {"--model m --lora-rank 8", 1e-4},
                 {"--model m --adapter a", 1e-4},
                 {"--model m --objective dpo", 5e-7},
                 {"--model m --objective simpo --lora-rank 8", 5e-6},
                 {"--model m --objective orpo", 5e-7},
                 {"--model m --objective ppo", 1e-6},
                 {"--model m --objective gspo --rollout --reward-command r", 1e-6},
                 {"--model m --objective grpo --lora-rank 8", 1e-5},
                 {"--init gpt2 --objective dpo", 3e-4},
                 {"--resume --out o", 1e-5}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char line[128];
        snprintf(line, sizeof(line), "%s --data d", cases[i].line);
        test_case("%s", line);
        Options o = parse(line);
        assert_true(isnan(o.lr) && options_learning_rate(&o) == cases[i].rate);
    }
}

// ---- verbs ---------------------------------------------------------------------------------------------------------
TEST(verbs) {
    for (int verb = 0; verb < VERBS; verb++) {
        CommandLine line = least_line((Verb)verb, "");
        assert_int_equal(options_parse(line.argc, line.argv).verb, verb);
    }
    assert_int_equal(parse("--model m --data d").verb, VERB_TRAIN);
    assert_int_equal(parse("--resume --out o --data d").verb, VERB_TRAIN);
}

// `plan` takes a run's command line, though its help shows only the options that change the plan.
TEST(plan_takes_what_train_and_bp_take) {
    for (size_t i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        int expected = option_of(row, VERB_PLAN) || option_of(row, VERB_TRAIN) || option_of(row, VERB_BP);
        if (row->verbs) assert_int_equal(option_accepted(row, VERB_PLAN), expected);
    }
    assert_int_equal(parse("plan --init gpt2 --data d.bin --lr 1e-4 --out o --resume --grads-out g").verb, VERB_PLAN);
}

// ---- help ----------------------------------------------------------------------------------------------------------
static Verb help_verb;
static void print_help(FILE *file, const Options *options) { options_help(file, help_verb, options->help); }

// Returns true if a line of the help begins with this option.
static int help_lists(const char *help, const char *name) {
    char wanted[64];
    snprintf(wanted, sizeof(wanted), "\n  --%s", name);
    for (const char *found = strstr(help, wanted); found; found = strstr(found + 1, wanted))
        if (found[strlen(wanted)] == ' ' || found[strlen(wanted)] == '\n') return 1;
    return 0;
}

static size_t expect_readable(const char *help) {
    size_t lines = 0;
    for (const char *line = help, *end; *line; line = end + 1, lines++) {
        end = strchr(line, '\n');
        assert_non_null(end);
        if (end - line > 100 || (end > line && end[-1] == ' ')) test_fail("its width, its end: %.60s", line);
        for (const char *c = line; c < end; c++)
            if (*c < 0x20 || *c > 0x7e) test_fail("not plain text: %.60s", line);
    }
    return lines;
}

TEST(help_mentions_every_row) {
    Options o;
    memset(&o, 0, sizeof(o)), o.help = HELP_ALL;
    for (int verb = 0; verb <= VERBS; verb++) {
        help_verb = (Verb)verb;
        test_case("%s", verb < VERBS ? verb_rows[verb].name : "the program's");
        char *help = printed(print_help, &o);
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

// About twenty options of a verb, a line of 90 columns each; of the program its verbs.
TEST(short_help_is_short) {
    Options o;
    memset(&o, 0, sizeof(o)), o.help = HELP_SHORT;
    for (int verb = 0; verb <= VERBS; verb++) {
        size_t of_verb = 0, shown = 0, lines = 0;
        char last[64];
        help_verb = (Verb)verb;
        test_case("%s", verb < VERBS ? verb_rows[verb].name : "the program's");
        char *help = printed(print_help, &o);
        assert_in_range(expect_readable(help), 10, verb == VERBS ? 40 : 55);
        for (size_t i = 0; i < OPTION_ROWS; i++) {
            const int has = verb == VERBS ? option_rows[i].verbs != 0 : option_of(&option_rows[i], (Verb)verb);
            const int shows = option_rows[i].verbs && help_lists(help, option_rows[i].name);
            of_verb += has != 0, shown += shows;
            if (shows && (!has || verb == VERBS)) test_fail("--%s is shown", option_rows[i].name);
        }
        for (const char *line = strstr(help, "\n  --"); line; line = strstr(line + 1, "\n  --"), lines++)
            if (strcspn(line + 1, "\n") > 90) test_fail("too wide: %.100s", line);
        assert_int_equal(shown, lines);
        assert_in_range(shown, verb < VERBS ? 4 : 0, 25);
        for (size_t i = 0; verb == VERBS && i < VERBS; i++) assert_non_null(strstr(help, verb_rows[i].example));
        snprintf(last, sizeof(last), "\n--help all lists all %zu options\n", of_verb);
        assert_true(text_ends_with(help, last));
    }
}

TEST(help_and_version_end_with_0) {
    static const char *const cases[][2] = {{"--help", "usage: train [VERB]"}, {"-h", "usage: train [VERB]"},
                                           {"bp --help", "usage: train bp"},  {"plan --init x -h", "usage: train plan"},
                                           {"-h all", "\n  --beta1 X"},       {"train -h all", "\n  --beta1 X"},
                                           {"--version", "streambp.c "},      {"info --version", "streambp.c "}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
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
// Returns the option with this value, on the shortest valid line of its verb.
static void value_refused(const OptionRow *row, const char *value, const char *message) {
    char text[160];
    CommandLine line = {0, {NULL}};
    snprintf(text, sizeof(text), "--%s=%s", row->name, value);
    test_case("%s", text);
    add(&line, "train"), add(&line, verb_rows[verb_of(row)].name), add(&line, text);
    expect_refused(parse_in_child, &line, EXIT_USAGE, message);
}

TEST(values_are_refused) {
    static const char *const numbers[] = {
        "",    "x",     "-1",   "1x",  "0x10", "1e3x", " 1",    "+1",
        "nan", "inf",   "-inf", "1,5", "--",   "1 2",  "1_000", "99999999999999999999999",
        "\n",  "1e999", "."};
    static const char *const choices[] = {"x", "Streams", "fp", "fp32|bf16", "|", "stream "};
    const size_t step = all_cases() ? 1 : 4;
    for (size_t r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        const int number = row->kind == OPTION_SIZE || row->kind == OPTION_REAL || row->kind == OPTION_BYTES;
        char text[64], message[128];
        for (size_t i = step == 1 ? 0 : r % step; number && i < COUNT_OF(numbers); i += step) {
            snprintf(message, sizeof(message), *numbers[i] ? "--%s is '%s', it must be " : "--%s is empty, it must be ",
                     row->name, *numbers[i] == '\n' ? "?" : numbers[i]); // a message stays on one line
            value_refused(row, numbers[i], message);
        }
        for (size_t i = step == 1 ? 0 : r % step; row->kind == OPTION_CHOICE && i < COUNT_OF(choices); i += step)
            value_refused(row, choices[i], "', it must be ");
        if (number && row->kind != OPTION_BYTES && row->least > 0) value_refused(row, "0", "it must be a");
        if (!number || row->kind == OPTION_BYTES || row->most >= OPTION_UNBOUNDED) continue;
        snprintf(text, sizeof(text), "%.10g", row->most + 1);
        snprintf(message, sizeof(message), " to %.10g", row->most);
        value_refused(row, text, message);
    }
}

static void parse_and_print(const void *context) {
    CommandLine line = *(const CommandLine *)context;
    Options options = options_parse(line.argc, line.argv);
    options_echo(stdout, &options, 1);
    options_free(&options);
}

static void expect_taken(const char *text, const char *notes, const char *echo) {
    CommandLine line = words(text);
    const Child *child = run_child(parse_and_print, &line);
    if (child->code) test_fail("exit code %d: %s", child->code, child->err);
    assert_string_equal(child->err, notes);
    assert_string_equal(child->out, echo);
}

// The first name of each row, a glob's star as nothing: refused, or left out with a note.
TEST(options_of_others_have_answers) {
    for (size_t i = 0; i < OPTIONS_OF_OTHERS; i++) {
        char name[256], text[128], message[256];
        const char *globs = options_of_others[i].options, *reason = options_of_others[i].reason;
        const int passed_over = text_ends_with(reason, "; leave it out");
        for (size_t k = 0; k < OPTION_ROWS; k++) // a typing error of ours is unknown
            if (globs_match(globs, option_rows[k].name)) test_fail("%s match --%s", globs, option_rows[k].name);
        assert_true(next_glob(&globs, name));
        if (strchr(name, '*')) memmove(strchr(name, '*'), strchr(name, '*') + 1, strlen(strchr(name, '*')));
        test_case("--%s", name);
        snprintf(text, sizeof(text), "bp --init m --%.40s 0.01 x --seed 3", name);
        snprintf(message, sizeof(message), passed_over ? "note: --%.40s: %s\n" : "--%.40s: %s; see train bp --help",
                 name, reason);
        assert_true(strlen(message) <= 200 - strlen("train: "));
        if (passed_over)
            expect_taken(text, message, "train bp --init m --seed 3\n");
        else
            refused(text, message);
    }
}

TEST(the_last_of_two_counts) {
    static const char *const cases[][3] = {
        {"info --init x --seed 3 --init=y", "note: --init x ... --init=y: the last value counts\n",
         "train info --init y --seed 3\n"},
        {"train --init x --data a --out o --lr 1e-5 --learning-rate 1e-4",
         "note: --lr 1e-5 ... --learning-rate 1e-4: the last value counts\n",
         "train train --init x --data a --lr 0.0001 --out o\n"},
        {"bp --init x --json --json=false --data a b --data=c --quiet --json --packing", "",
         "train bp --init x --data c --json --quiet\n"},
        {"bp --init x --data a b --data c d", "note: --data a ... --data c: the last value counts\n",
         "train bp --init x --data c d\n"},
        {"sample --init x --prompt-ids 1,2 --prompt-ids 3",
         "note: --prompt-ids 1,2 ... --prompt-ids 3: the last value counts\n",
         "train sample --init x --prompt-ids 3\n"}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s", cases[i][0]);
        expect_taken(cases[i][0], cases[i][1], cases[i][2]);
    }
}

// ---- names of other programs ----------------------------------------------------------------------------------------
TEST(aliases_are_the_options) {
    for (size_t i = 0; i < OPTION_ALIASES; i++) {
        const char *name = option_aliases[i].option;
        test_case("--%s", option_aliases[i].typed);
        assert_int_equal(option_find(option_aliases[i].typed), -1);
        const OptionRow *row = &option_rows[option_find(name)];
        const Verb verb = verb_of(row);
        char value[128], typed[192], own[192];
        CommandLine line = least_line(verb, name), ours = line;
        if (row->kind != OPTION_FLAG) example_value(row, row->kind == OPTION_CHOICE ? 1 : 0, value, sizeof(value));
        snprintf(typed, sizeof(typed), "--%s%s%s", option_aliases[i].typed, row->kind == OPTION_FLAG ? "" : "=",
                 row->kind == OPTION_FLAG ? "" : value);
        snprintf(own, sizeof(own), "--%s%s", name, typed + 2 + strlen(option_aliases[i].typed));
        for (char *c = typed + 2; *c && *c != '='; c++)
            if (*c == '-') *c = '_';
        add(&line, typed), add(&ours, own);
        if (option_aliases[i].also) {
            snprintf(own, sizeof(own), "--%s=%s", option_aliases[i].also, option_aliases[i].value);
            add(&ours, own);
        }
        Options a = options_parse(line.argc, line.argv), b = options_parse(ours.argc, ours.argv);
        expect_same(&a, &b);
        assert_string_equal(printed(echo_lines, &a), printed(echo_lines, &b)); // under our names
    }
    Options o = parse("bp --init gpt2 --max_length 64 --long split"); // explicit values stay
    assert_true(o.seq_len == 64 && o.long_documents == LONG_SPLIT);
    o = parse("plan --init gpt2 --per-device-train-batch-size 4 --gradient-accumulation-steps 2 --ranks 6 --sp 2");
    assert_true(o.samples == 24 && o.grad_accum == 1 && !option_given(&o, "grad-accum"));
    o = parse("plan --init gpt2 --per-device-train-batch-size 1 --gradient_accumulation_steps 3 --ranks 4");
    assert_int_equal(o.samples, 12);
    o = parse("plan --init gpt2 --gradient-accumulation-steps 3 --ranks 4");
    assert_true(o.grad_accum == 12 && !o.samples);
    o = parse("plan --init gpt2 --lora-r 2 --lora-target-modules q_proj v_proj --use-rslora True --json false");
    assert_string_equal(o.lora_targets, "q_proj,v_proj");
    assert_true(o.rslora && !o.json && !option_given(&o, "json"));
    o = parse("train --init gpt2 --data d --lr-scheduler-type constant_with_warmup --objective DPO");
    assert_true(o.schedule == SCHEDULE_CONSTANT && o.objective == OBJECTIVE_DPO);
    assert_true(parse("plan --init gpt2 --dtype bfloat16 --memory-limit H100").memory_limit ==
                machine_usable_bytes(&machines[MACHINE_H100]));
    assert_true(parse("plan --init gpt2 --memory-limit 24gb").memory_limit == 24000000000);
    assert_int_equal(parse("plan --init gpt2 --bf16 --seed 1").dtype, DTYPE_BF16);
    assert_int_equal(parse("plan --init gpt2 --bf16 False").dtype, DTYPE_FP32);
    assert_int_equal(parse("plan --init gpt2 --optim paged_adamw_8bit").moments, MOMENTS_INT8);
}

TEST(counts_take_k_and_M) {
    Options o =
        parse("--init gpt2 --data d --seq-len 32k --chunk 2K --logits-chunk 1M --steps 10k --warmup 1M --seed 3k");
    assert_true(parse("--init gpt2 --data d --seq-len 1.18M").seq_len == 1237320); // as `plan` prints it
    refused("bp --init gpt2 --seq-len 1.1.8M", "--seq-len is '1.1.8M', it must be a whole number");
    assert_true(o.seq_len == 32768 && o.chunk == 2048 && o.logits_chunk == 1048576);
    assert_true(o.steps == 10000 && o.warmup == 1000000 && o.seed == 3000);
    assert_string_equal(printed(echo_lines, &o), "train train --init gpt2 --data d --seq-len 32768 --chunk 2048 "
                                                 "--logits-chunk 1048576 \\\n    --steps 10000 --warmup 1000000 --seed "
                                                 "3000\n");
    refused("bp --init gpt2 --seq-len 2M1", "--seq-len is '2M1', it must be a whole number");
    refused("bp --init gpt2 --seq-len k", "--seq-len is 'k', it must be a whole number");
    refused("bp --init gpt2 --seq-len 99999999999999999999k", "it must be a whole number");
    refused("bp --init gpt2 --seq-len 18446744073709551615k", "it must be a whole number");
    refused("bp --init gpt2 --memory-limit 24", "--memory-limit 24 would be 24 bytes; write --memory-limit 24GiB;");
    assert_true(parse("bp --init gpt2 --memory-limit 1048576").memory_limit == 1 << 20);
    assert_true(parse("bp --init gpt2 --memory-limit 24KiB").memory_limit == 24 << 10);
}

// ---- contradictions ------------------------------------------------------------------------------------------------
TEST(lines_are_refused) {
    static const char *const cases[][2] = {
        // malformed
        {"", "no model: give --model PATH or --init NAME; see train train --help"},
        {"bp --seqlen 3", "unknown option --seqlen; did you mean --seq-len?; see train bp --help"},
        {"bp --chnuk 3", "did you mean --chunk?"},
        {"train --learning-rat 3", "did you mean --learning-rate?"},
        {"bp --grads g", "did you mean --grads-out?"},
        {"bp --step 3", "did you mean --steps?"}, // of another verb, but likely meant
        {"bp --zzzzzzzz", "unknown option --zzzzzzzz; see train bp --help"},
        {"bp --a-name-that-is-longer-than-any-option-could-sensibly-be-and-goes-on 1", "unknown option --a-name"},
        {"bp --", "unknown option --;"},
        {"bp --steps 3", "--steps is not an option of bp but of train; see train bp --help"},
        {"eval --method full", "--method is not an option of eval but of train, bp, plan"},
        {"bp --init gpt2 --chunk", "--chunk has no value; write --chunk N"},
        {"train --data --model m", "--data has no value; write --data PATH..."},
        {"bp --init= --json", "--init is empty"},
        {"train --data=", "--data is empty"},
        {"bp --json=yes", "--json takes no value, 'yes' was given"},
        {"bp --json yes", "'yes' does not belong here: options begin with two dashes, values follow an option"},
        {"bp -json", "'-json' does not belong here: options begin with two dashes"},
        {"train --optim adafactor", "--optim is 'adafactor', it must be fp32, bf16 or int8"},
        {"train --model m --data d --warmup 2 --warmup-ratio 0.1", "--warmup and --warmup-ratio exclude each other"},
        {"bp --method fast", "--method is 'fast', it must be stream, checkpoint, full, mst, seco, spaco or auto; see "
                             "train bp --help"},
        {"bp --torch-dtype float16", "--torch-dtype is 'float16', it must be auto, fp32, bf16 or double"},
        {"train --moments fp16", "--moments is 'fp16', it must be fp32, bf16 or int8"},
        {"bp --objective dpo --beta off", "--beta is 'off', it must be a number from 0 to 1000000, or auto"},
        {"bp --objective dpo --label-smoothing 0.5", "it must be a number from 0 to 0.499999"},
        {"bp --group-size 0", "--group-size is '0', it must be a whole number from 1"},
        {"sample --prompt-ids 1,,2", "--prompt-ids is '1,,2', it must be token ids separated by commas"},
        {"sample --prompt-ids 1,2147483648", "it must be token ids"},
        {"sample --prompt-ids ,", "it must be token ids"},
        // verbs
        {"bpp",
         "'bpp' is not a verb, it must be train, bp, sample, logprobs, plan, eval, convert, info or doctor; did you "
         "mean bp?; see train --help"},
        {"m.bin", "'m.bin' is not a verb, it must be train, bp"},
        {"logprob", "; did you mean logprobs?; see train --help"},
        {"plan --init gpt2 --val-steps 3 --prompt-file", "--prompt-file has no value"},
        // needs and exclusions
        {"bp --model m --init gpt2", "--model and --init exclude each other"},
        {"info", "no model"},
        {"plan --resume --out o", "no model"},
        {"eval --model m", "no data: give --data"},
        {"train --model m", "no data: give --data"},
        {"convert --model m", "no output: give --out"},
        {"bp --init qwen3-0.6b --keep attention --keep-on disk",
         "an option places tensors on disk: give --disk FOLDER"},
        {"train --model m --data d --resume", "--resume needs --out"},
        {"train --model m --data d --save-every 3", "--save-every needs --out"},
        {"train --model m --data d --val-every 3", "--val-every needs --val-data"},
        {"train --model m --data d --lr 1.5", "--lr above 1: AdamW would move each weight by more than 1"},
        {"train --model m --data d --steps 3 --epochs 2", "--steps and --epochs exclude each other"},
        {"bp --init gpt2 --objective grpo --epsilon 0.2", "--epsilon is not an option of bp"},
        {"train --model m --data d --objective grpo --epsilon 0.2",
         "--epsilon is AdamW's; the objective's clipping is"},
        {"bp --init gpt2 --kv ring", "--kv has no meaning without --sp above 1"},
        {"sample --model m", "no prompt"},
        {"sample --model m --prompt a --prompt-ids 1", "exclude each other"},
        {"sample --model m --chat --prompt-ids 1", "--chat and --prompt-ids exclude each other"},
        {"sample --model m --system s --prompt-ids 1", "--chat and --prompt-ids exclude each other"},
        {"sample --model m --prompt a --thinking off", "--thinking has no meaning without --chat"},
        {"sample --model m --chat --json", "--json prints one answer"},
        {"sample --model m --prompts f --prompt a", "--prompts and --serve exclude each other"},
        {"sample --model m --prompts f --prompt-ids 1", "--prompts and --serve exclude each other"},
        {"sample --model m --prompts f --prompt-file g", "--prompts and --serve exclude each other"},
        {"train --model m --data d --out o --prompts f", "--prompts is not an option of train but of sample"},
        {"sample --model m --prompt a --slots 3", "--slots has no meaning without --prompts"},
        {"sample --model m --prompts f --slots 0", "--slots is '0', it must be a whole number from 1"},
        {"sample --model m --chat --stop-ids 3", "--stop-ids: a chat's turns end where the tokenizer says"},
        {"sample --model m --prompts f --weights disk", "an option places tensors on disk: give --disk"},
        {"train --model m --data d --slots 3", "--slots has no meaning without --rollout; give both or none"},
        {"plan --model m --stop-ids 3", "--stop-ids has no meaning without --rollout; give both or none"},
        {"sample --model m --chat --prompt a --iterative", "--iterative: type: python3 scripts/recipes/inftythink.py"},
        {"bp --init gpt2 --gamma 1", "--gamma has no meaning with --objective sft; it belongs to simpo;"},
        {"bp --init gpt2 --lora-rank off --rslora", "--rslora has no meaning without --lora-rank; give both or none"},
        {"train --model m --data d --lora-rank 4 --adapter a", "--lora-rank and --adapter exclude each other"},
        {"bp --init gpt2 --objective dpo --dpo-loss ipo --label-smoothing 0.1", "has no meaning without --dpo-loss"},
        {"bp --init gpt2 --objective kto --beta 0", "leaves nothing of the objective"},
        {"bp --init gpt2 --objective kto --desirable-weight 0 --undesirable-weight 0", "give one above 0"},
        {"bp --init gpt2 --data d --objective kto --reference-logprobs r", "lacks the mismatched completions"},
        {"bp --init gpt2 --objective orpo --beta 0", "--beta 0 leaves nothing of the objective"},
        {"bp --init gpt2 --objective grpo --temperature 0", "--temperature 0 has no gradient"},
        {"bp --init gpt2 --objective dpo --any-reference",
         "--any-reference has no meaning without --reference-logprobs"},
        {"train --init gpt2 --data d --val-data v --objective dpo --reference-logprobs f --any-reference",
         "--any-reference: the reference of --val-data is another model"},
        {"train --model m --data d --objective grpo --rollout", "--rollout needs --reward-command"},
        {"train --model m --data d --objective grpo --rollout --reward-command r --updates 3 --steps 10",
         "must be multiples of --updates"},
        {"plan --init gpt2 --objective grpo --rollout", "a plan with --rollout needs --data"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) refused(cases[i][0], cases[i][1]);
    assert_true(parse("bp --init gpt2 --objective grpo --old-logprobs f --any-reference").any_reference);
    assert_true(parse("sample --init gpt2 --prompt x --temperature 0").temperature == 0);
    assert_true(parse("sample --init gpt2 --prompts - --chat --thinking off --json").slots == 0);
    assert_int_equal(parse("sample --init gpt2 --prompts f --slots 7").slots, 7);
}

// An option of some objectives is refused with the others.
TEST(options_of_objectives) {
    for (size_t i = 0; i < OF_OBJECTIVES; i++) {
        const char *option = of_objectives[i].option;
        for (int kind = 0; kind < OBJECTIVES; kind++) {
            char text[128];
            test_case("--%s with --objective %s", option, objective_names[kind]);
            CommandLine line = words(strcmp(option, "rollout") ? "plan --init gpt2" : "plan --init gpt2 --data d");
            snprintf(text, sizeof(text), "--objective=%s", objective_names[kind]);
            add(&line, text);
            add_example(&line, &option_rows[option_find(option)]);
            if (kind == OBJECTIVE_KTO && !strcmp(option, "reference-logprobs")) add(&line, "--kto-loss=apo_zero");
            snprintf(text, sizeof(text), "--%s has no meaning with --objective %s; it belongs to ", option,
                     objective_names[kind]);
            if (of_objectives[i].objectives & OF(kind))
                options_parse(line.argc, line.argv);
            else
                expect_refused(parse_in_child, &line, EXIT_USAGE, text);
        }
    }
}

TEST(options_that_need_another) {
    for (size_t i = 0; i < OF_OPTIONS; i++) {
        const OptionRow *row = &option_rows[option_find(of_options[i].option)];
        const int plans = option_accepted(row, VERB_PLAN) && strcmp(of_options[i].needs, "serve") != 0;
        CommandLine line = words(plans ? "plan --init gpt2" : "sample --init gpt2 --prompt p");
        char text[128];
        add_example(&line, row);
        snprintf(text, sizeof(text), "--%s has no meaning without --%s", of_options[i].option, of_options[i].needs);
        expect_refused(parse_in_child, &line, EXIT_USAGE, text);
    }
}

// A line for a model of this dtype. NULL: not refused
typedef struct {
    DType dtype;
    const char *line, *message;
} StorageCase;

static void check_dtype(const void *context) {
    const StorageCase *storage = (const StorageCase *)context;
    Options options = parse(storage->line);
    options_check_storage(&options, storage->dtype);
}

TEST(storage_without_meaning_is_refused) {
    static const char model[] = " has no meaning for a model in ";
    static const StorageCase cases[] = {
        {DTYPE_BF16, "bp --init gpt2 --bf16", NULL},
        {DTYPE_FP32, "bp --init gpt2 --dtype fp32", NULL},
        {DTYPE_FP32, "plan --init gpt2 --dtype bf16", NULL},
        {DTYPE_FP32, "convert --model m --out o --dtype bf16", NULL},
        {DTYPE_FP64, "bp --init gpt2 --grad-dtype fp32",
         "--grad-dtype fp32 has no meaning for a model in double; leave it out; see train bp --help"},
        {DTYPE_FP64, "plan --init gpt2 --grad-dtype bf16", model},
        {DTYPE_FP64, "plan --init gpt2 --moments bf16", model},
        {DTYPE_FP64, "train --init gpt2 --data d --moments fp32", model},
        {DTYPE_FP64, "train --init gpt2 --data d --master fp32", model},
        {DTYPE_FP32, "train --init gpt2 --data d --master fp32", model},
        {DTYPE_FP32, "train --init gpt2 --data d --grad-dtype bf16 --moments bf16 --master none", NULL},
        {DTYPE_BF16, "train --init gpt2 --data d --grad-dtype fp32 --moments fp32 --master fp32", NULL},
        {DTYPE_FP64, "train --init gpt2 --data d --grad-dtype auto --master none", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        test_case("%s, %s", dtype_name(cases[i].dtype), cases[i].line);
        if (cases[i].message)
            expect_refused(check_dtype, &cases[i], EXIT_USAGE, cases[i].message);
        else
            check_dtype(&cases[i]);
    }
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
    options_json(&json, "options", options);
    assert_int_equal(json_close(&json), 0);
}

TEST(echo_and_json) {
    static const struct {
        const char *line, *echo, *json; // a part of it
    } cases[] = {
        {"info --model m", "train info --model m\n",
         "{\"verb\": \"info\", \"model\": \"m\", \"download\": \"ask\", \"init\": null, \"rope_scaling\": null, "
         "\"grow_vocabulary\": \"off\", \"dtype\": \"auto\", "
         "\"seed\": 42, \"json\": false, \"quiet\": false}}\n"},
        {"info --seed 42 --model=--help", "train info --model=--help --seed 42\n", "\"model\": \"--help\""},
        // leaves out options without effect on a plan
        {"plan --init gpt2 --data d.bin --batch 2 --lr 1", "train plan --init gpt2 --data d.bin --batch 2\n", ""},
        {"sample --init gpt2 --prompt-ids 1,2 --temperature 0.70 --top-k off",
         "train sample --init gpt2 --prompt-ids 1,2 --temperature 0.7 --top-k off\n",
         "\"prompt_ids\": [1, 2], \"max_new_tokens\": 256, \"temperature\": 0.7, \"top_k\": \"off\""},
        {"--init gpt2 --data s/*.bin b.bin --val-data v.bin --seq-len 8192 --lr 1e-5 --out r --grad-accum 4",
         "train train --init gpt2 --data 's/*.bin' b.bin --val-data v.bin --seq-len 8192 \\\n"
         "    --grad-accum 4 --lr 1e-05 --out r\n",
         "\"lora_rank\": \"off\", \"lora_alpha\": \"auto\""},
        {"train --model m --data d --objective dpo --beta auto --lora-rank 8 --lora-alpha 16 --rslora",
         "train train --model m --data d --objective dpo --beta auto --lora-rank 8 --lora-alpha 16 \\\n    --rslora\n",
         "\"objective\": \"dpo\", \"dpo_loss\": \"sigmoid\", \"label_smoothing\": 0, \"beta\": \"auto\", "
         "\"kl_correction\": \"auto\", \"gamma\": \"auto\", \"normalisation\": \"grpo\""},
        {"bp --init gpt2 --lora-rank 8 --lora-alpha 0.5 --objective grpo --beta 0",
         "train bp --init gpt2 --objective grpo --beta 0 --lora-rank 8 --lora-alpha 0.5\n",
         "\"lora_rank\": 8, \"lora_alpha\": 0.5, \"lora_targets\": \"auto\", \"lora_dropout\": 0, \"rslora\": false"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Options o = parse(cases[i].line);
        assert_string_equal(printed(echo_lines, &o), cases[i].echo);
        assert_non_null(strstr(printed(print_json, &o), cases[i].json));
        options_free(&o);
    }
}

int main(int argc, char **argv) {
    static char name[] = "train"; // the name in messages
    program_invocation_name = program_invocation_short_name = name;
    RUN_LISTED(argc, argv, scratch_remove);
}
