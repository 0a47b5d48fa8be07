// Shards of answers: pairs and groups stay whole and in order in one stream, and are left out together. Rewards become
// advantages, values of tokens too. Each objective takes its kinds; every fault of pairs, groups, rewards and values is
// refused in one line.
#include "answer_files.h"

// ---- pairs and groups stay whole ------------------------------------------------------------------------------------
typedef struct {
    const MadeDocument *document;
    size_t documents;
    size_t *unit; // [documents] the document's pair or group
    size_t units, scale;
    unsigned char *seen; // [documents]
} Answers;

static void expect_advantages(const Answers *x, const Batch *batch, size_t first, size_t end) {
    double mean = 0, squares = 0;
    for (size_t d = first; d < end; d++) mean += (double)batch->reward[d] / (double)(end - first);
    for (size_t d = first; d < end; d++) squares += pow((double)batch->reward[d] - mean, 2);
    for (size_t d = first; d < end; d++) {
        const MadeDocument *made = &x->document[batch->tokens[batch->document_start[d]] / DOCUMENT_IDS];
        if (batch->reward[d] != made->reward) test_fail("document %zu: reward %g", d, (double)batch->reward[d]);
        double wanted = (double)batch->reward[d] - mean;
        if (x->scale) wanted /= sqrt(squares / (double)(end - first - 1)) + 1e-4;
        for (size_t t = batch->document_start[d]; t < batch->document_start[d + 1]; t++)
            if (fabs((double)batch->advantage[t] - wanted) > 1e-5 * (1 + fabs(wanted)))
                test_fail("position %zu: advantage %g, not %g", t, (double)batch->advantage[t], wanted);
    }
}

// Documents [first, the result) of the batch must be exactly one pair or group, in the order of the data.
static size_t check_unit(Answers *x, const Batch *batch, size_t first, size_t group) {
    size_t number = (size_t)batch->tokens[batch->document_start[first]] / DOCUMENT_IDS, unit = x->unit[number],
           d = first;
    if (number && x->unit[number - 1] == unit) test_fail("group %zu begins with document %zu", group, number);
    for (; number < x->documents && x->unit[number] == unit; number++, d++) {
        size_t begin = batch->document_start[d];
        if (d >= batch->documents || batch->group[d] != group) test_fail("document %zu is not of group %zu", d, group);
        if (batch->document_start[d + 1] - begin != x->document[number].tokens - 1) test_fail("document %zu is cut", d);
        for (size_t t = begin; t < batch->document_start[d + 1]; t++)
            if ((uint32_t)batch->tokens[t] != x->document[number].id[t - begin]) test_fail("token %zu", t);
        if (x->seen[number]++) test_fail("document %zu is there twice", number);
    }
    if (batch->reward) expect_advantages(x, batch, first, d);
    return d;
}

static void check_units(void *answers, const Batch *batch) {
    for (size_t d = 0, group = 0; d < batch->documents; group++) d = check_unit((Answers *)answers, batch, d, group);
}

TEST(pairs_and_groups_stay_whole) {
    static const struct {
        ObjectiveKind objective;
        size_t groups, most, B, T;
        Shuffle shuffle;
    } cases[] = {{OBJECTIVE_DPO, 200, 2, 1, 60, SHUFFLE_ON},    {OBJECTIVE_SIMPO, 150, 2, 4, 100, SHUFFLE_AUTO},
                 {OBJECTIVE_ORPO, 50, 2, 2, 59, SHUFFLE_OFF},   {OBJECTIVE_GRPO, 120, 8, 1, 60, SHUFFLE_ON},
                 {OBJECTIVE_GSPO, 60, 5, 3, 80, SHUFFLE_OFF},   {OBJECTIVE_GRPO, 2, 2, 1, 60, SHUFFLE_ON},
                 {OBJECTIVE_DPO, 300, 2, 1, 1000, SHUFFLE_AUTO}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        const Objective objective = objective_of(cases[c].objective);
        const size_t units = 2 * cases[c].groups, most = units * cases[c].most;
        const MadeShard made = made_kind(objective_data[objective.kind]);
        DataSettings settings = answer_settings(cases[c].B, cases[c].T, &objective);
        const char *paths[2];
        test_case("case %zu", c);
        MadeDocument *document = (MadeDocument *)case_memory(most * sizeof(MadeDocument));
        size_t *unit = (size_t *)case_memory(most * sizeof(size_t));
        const size_t documents = write_two(&made, document, cases[c].groups, cases[c].most, 60, paths);
        for (size_t i = 1; i < documents; i++) unit[i] = unit[i - 1] + (document[i].group != document[i - 1].group);
        Answers x = {document, documents, unit, units, c % 2, (unsigned char *)case_memory(documents)};
        settings.scale_rewards = c % 2, settings.shuffle = cases[c].shuffle;
        SCOPED_LOADER loader = dataloader_open(paths, 2, &settings);
        assert_int_equal(loader.samples, units);
        assert_int_equal(loader.packing.capacity, cases[c].B * cases[c].T * loader.largest_sample);
        SCOPED_BATCH batch = batch_for(&loader);
        allocation_guard = 1;
        for (size_t epoch = 0; epoch < 3; epoch++) {
            memset(x.seen, 0, documents);
            expect_epoch(&loader, &batch, check_units, &x);
            for (size_t d = 0; d < documents; d++)
                if (!x.seen[d]) test_fail("document %zu did not come", d);
        }
        allocation_guard = 0;
    }
}

// Tokens encode their place: 10 d + position, the last target 10 d + 9.
TEST(mismatched_documents) {
    static const size_t length[] = {4, 3, 6}, prompt[] = {2, 1, 4}; // positions; tokens of the prompts
    static const int32_t tokens[] = {0, 1, 24, 25, 10, 2, 3, 20, 21, 22, 23, 11, 12};
    static const int32_t targets[] = {-1, 24, 25, 29, 2, 3, 9, -1, -1, -1, 11, 12, 19}, cut[] = {-1, 24, 25, 2, 3, 9};
    Batch batch = batch_allocate(13, 3), out = batch_allocate(13, 3);
    for (size_t d = 0; d < 3; d++) {
        const size_t begin = batch.document_start[d], end = batch.document_start[d + 1] = begin + length[d];
        for (size_t t = begin; t < end; t++) {
            const int32_t next = (int32_t)(t + 1 < end ? 10 * d + t + 1 - begin : 10 * d + 9);
            batch.tokens[t] = (int32_t)(10 * d + t - begin), batch.loss_weight[t] = 1;
            batch.targets[t] = t + 1 < begin + prompt[d] ? -1 : next;
        }
    }
    batch_set_positions(&batch);
    batch_mismatch(&batch, 13, &out);
    assert_int_equal(out.N, 13);
    assert_memory_equal(out.tokens, tokens, sizeof(tokens));
    assert_memory_equal(out.targets, targets, sizeof(targets));
    assert_true(out.document_start[1] == 4 && out.document_start[2] == 7 && out.position[6] == 2);
    batch_mismatch(&batch, 3, &out);
    assert_true(out.N == 9 && out.document_start[2] == 6);
    assert_memory_equal(out.targets, cut, sizeof(cut));
    batch_free(&batch), batch_free(&out);
}

TEST(a_batch_has_what_its_objective_needs) {
    static const struct {
        ObjectiveKind objective;
        double beta;
        int answers, group, reward, advantage, reference;
    } rows[] = {{OBJECTIVE_SFT, 0, 0, 0, 0, 0, 0},   {OBJECTIVE_DPO, 0, 1, 1, 0, 0, 1},
                {OBJECTIVE_SIMPO, 0, 1, 1, 0, 0, 0}, {OBJECTIVE_GRPO, 0.1, 1, 1, 1, 1, 1},
                {OBJECTIVE_GRPO, 0, 1, 1, 1, 1, 0},  {OBJECTIVE_PPO, 0, 1, 0, 0, 1, 0},
                {OBJECTIVE_KTO, 0.1, 1, 0, 1, 0, 0}};
    write_kinds();
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        Objective objective = objective_of(rows[i].objective);
        const DataSettings settings = answer_settings(1, 30, &objective);
        objective.beta = rows[i].beta;
        SCOPED_LOADER loader = open_data(scratch_path(kind_files[objective_data[objective.kind]]), &settings);
        SCOPED_BATCH batch = dataloader_batch(&loader);
        test_case("%s, beta %g", objective_names[objective.kind], objective.beta);
        assert_int_equal(batch.document_weight != NULL, rows[i].answers);
        assert_int_equal(batch.group != NULL, rows[i].group);
        assert_int_equal(batch.reward != NULL, rows[i].reward);
        assert_int_equal(batch.advantage != NULL, rows[i].advantage);
        assert_int_equal(batch.reference != NULL, rows[i].reference);
        assert_true(!batch.old && (!batch.reference || isnan(batch.reference[0]))); // not known yet
    }
}

// ---- refusals -------------------------------------------------------------------------------------------------------
TEST(each_objective_takes_its_kind) {
    static const int takes[OBJECTIVES] = {0, 1, 1, 1, 2, 2, 4, 2, 5};
    static const char *const holds[] = {
        "documents.bin: holds documents (text; messages; prompt, completion), but --objective ",
        "pairs.bin: holds preference pairs (chosen, rejected, maybe prompt), ",
        "groups.bin: holds groups of completions with rewards (prompt, ",
        "prompts.bin: holds prompts alone (prompt, maybe answer), ",
        "values.bin: holds documents with an advantage for each token (ids, ",
        "labels.bin: holds labelled answers (prompt, completion, label; "};
    write_kinds();
    for (int o = 0; o < OBJECTIVES; o++) {
        const Objective objective = objective_of((ObjectiveKind)o);
        refusal_settings = answer_settings(1, 20, &objective);
        for (int k = 0; k < 6; k++) {
            test_case("%s on %s", objective_names[o], kind_files[k]);
            if (k == takes[o])
                assert_int_equal(run_child(read_all, scratch_path(kind_files[k]))->code, 0);
            else
                refused(scratch_path(kind_files[k]), holds[k]);
        }
        if (o) refused("test/golden/tokens_uint16.bin", "is one of llm.c's shards, which hold text; --objective ");
    }
    refusal_settings = data_settings(1, 20);
    refused(scratch_path("pairs.bin"), "--objective sft trains on documents (text; messages; prompt, completion); give "
                                       "--objective dpo, simpo or orpo");
    refused_together(scratch_path("groups.bin"), scratch_path("documents.bin"), "give shards of only one kind");
}

TEST(long_answers_are_not_split) {
    const Objective dpo = objective_of(OBJECTIVE_DPO);
    MadeShard made = made_kind(KIND_PAIRS);
    MadeDocument document[6];
    for (size_t i = 0; i < 6; i++) document[i] = made_document(i, i == 3 ? 31 : 20, 0);
    memset((unsigned char *)(uintptr_t)document[3].counts, 0, 25); // its answer begins after 24 positions
    const char *path = write_shard("long.bin", &made, document, 6);
    refusal_settings = answer_settings(1, 24, &dpo);
    refused(path, "long.bin: document 3 has 31 tokens, --seq-len 24 takes 25, and answers are not split; give a "
                  "longer --seq-len or --long truncate");
    refusal_settings.long_documents = LONG_REFUSE;
    refused(path, "give a longer --seq-len or --long truncate");
    refusal_settings.long_documents = LONG_TRUNCATE;
    const Child *child = run_child(read_all, path);
    assert_int_equal(child->code, 0);
    if (!strstr(child->err, "1 of 3 pairs are left out: one of their documents has no target within --seq-len 24"))
        test_fail("%s", child->err);
    SCOPED_LOADER loader = open_data(path, &refusal_settings);
    assert_int_equal(loader.samples, 2);
    assert_int_equal(loader.segments, 4); // the chosen answer is left out with the rejected one
    assert_int_equal(loader.packing.positions, 4 * 19);
    refusal_settings.T = 25; // leaves one target of the long one
    SCOPED_LOADER longer = open_data(path, &refusal_settings);
    assert_int_equal(longer.samples, 3);
    assert_true(dataloader_targets(&longer, 0, dataloader_batches(&longer)).tokens == 5 * 19 + 1);
    refusal_settings.B = 1u << 20, refusal_settings.T = 1u << 10;
    expect_refused(read_all, path, EXIT_USAGE, "--batch 1048576 x --seq-len 1024 x 2 (documents of a sample): at most");
}

TEST(faults_of_pairs_and_groups) {
    static const struct {
        ShardKind kind;
        size_t documents, document, at;
        uint64_t value;
        const char *words;
    } faults[] = {{KIND_PAIRS, 5, 0, 32, 0, "bad.bin: document 4 is an answer without a partner"},
                  {KIND_PAIRS, 6, 1, 24, 1, "bad.bin: document 0 is an answer without a partner"},
                  {KIND_PAIRS, 6, 2, 24, 0, "bad.bin: document 2 is in group 0, after 2 of group 0"},
                  {KIND_PAIRS, 6, 4, 24, 7, "bad.bin: document 4 is in group 7, after 2 of group 1"},
                  {KIND_PAIRS, 6, 0, 24, 1, "bad.bin: document 0 is in group 1, after 0 of group 0"},
                  {KIND_PAIRS, 6, 3, 16, 0, "document 3 has no target"},
                  {KIND_GROUPS, 7, 0, 32, 0, "bad.bin: document 6 is the only completion of its group"},
                  {KIND_GROUPS, 6, 3, 24, 2, "bad.bin: document 2 is the only completion of its group"},
                  {KIND_GROUPS, 6, 4, 24, 0, "bad.bin: document 4 is in group 0, after 2 of group 1"},
                  {KIND_GROUPS, 6, 5, 24, 4, "bad.bin: document 5 is in group 4"},
                  {KIND_GROUPS, 6, 2, 40, 0x7fc00000, "bad.bin: document 2 has a reward that is not a finite number"},
                  {KIND_GROUPS, 6, 5, 40, 0xff800000, "bad.bin: document 5 has a reward that is not a finite number"}};
    const Objective dpo = objective_of(OBJECTIVE_DPO), grpo = objective_of(OBJECTIVE_GRPO);
    for (size_t f = 0; f < COUNT_OF(faults); f++) {
        MadeShard made = made_kind(faults[f].kind);
        MadeDocument document[7];
        test_case("%s", faults[f].words);
        for (size_t i = 0; i < 7; i++) document[i] = made_document(i, 9, 0), document[i].group = i / 2;
        ShardImage image = shard_image(&made, document, faults[f].documents);
        put(image.bytes + image.table + 48 * faults[f].document + faults[f].at, faults[f].value,
            faults[f].at == 40 ? 4 : 8);
        shard_image_seal(&image, faults[f].documents);
        refusal_settings = answer_settings(1, 20, faults[f].kind == KIND_PAIRS ? &dpo : &grpo);
        refused(write_image("bad.bin", image), faults[f].words);
    }
}

// ---- advantages of tokens -------------------------------------------------------------------------------------------
static ShardImage image_of_values(MadeDocument *document, size_t count, size_t longest) {
    const MadeShard made = made_kind(KIND_VALUES);
    return shard_image(&made, document, made_groups(&made, document, 0, count / 2, 2, longest));
}

TEST(values_are_advantages_of_their_targets) {
    const Objective ppo = objective_of(OBJECTIVE_PPO);
    for (size_t k = 0; k < 2; k++) { // whole, then in pieces
        DataSettings settings = answer_settings(2, k ? 10 : 40, &ppo);
        MadeDocument document[16];
        size_t seen = 0;
        TargetCounts counts = {0};
        SCOPED_LOADER loader = open_data(write_image("values.bin", image_of_values(document, 16, 41)), &settings);
        SCOPED_BATCH batch = batch_for(&loader);
        size_t streams = dataloader_batches(&loader);
        allocation_guard = 1;
        for (size_t s = 0; s < streams; s++) {
            dataloader_next(&loader, &batch);
            counts = target_counts_add(counts, batch_count(&batch));
            for (size_t t = 0; t < batch.N; t++, seen++) {
                size_t number = (size_t)batch.tokens[t] / DOCUMENT_IDS, token = (size_t)batch.tokens[t] % DOCUMENT_IDS;
                if (batch.advantage[t] != document[number].value[token + 1])
                    test_fail("token %zu of %zu: %g", token, number, (double)batch.advantage[t]);
            }
        }
        allocation_guard = 0;
        assert_int_equal(seen, loader.packing.positions);
        assert_true(counts.groups == 0 && counts.documents == (double)loader.segments);
    }
}

TEST(faults_of_values) {
    const Objective ppo = objective_of(OBJECTIVE_PPO);
    MadeDocument document[6];
    MadeShard made = made_kind(KIND_VALUES);
    for (size_t k = 0; k < 2; k++) { // whole, then in pieces
        refusal_settings = answer_settings(1, k ? 10 : 40, &ppo);
        ShardImage image = image_of_values(document, 6, 30);
        image.bytes[image.size - 3] ^= 1;
        refused(write_image("bad.bin", image), "the checksum of document 5 is wrong");
    }
    ShardImage image = image_of_values(document, 6, 30);
    image.size -= 4;
    refused(write_image("bad.bin", image), "truncated");
    ((float *)(uintptr_t)document[2].value)[1] = -INFINITY;
    refused(write_shard("bad.bin", &made, document, 6), "bad.bin: document 2, token 1 has the advantage -inf");
    made.kind = KIND_PAIRS;
    refused(write_shard("bad.bin", &made, document, 6),
            "holds values for each token, which only documents (kind 0) have");
}

static void open_alone(const void *path) {
    SCOPED_LOADER loader = open_data((const char *)path, &refusal_settings);
    (void)loader;
}

// Data that teaches nothing is counted on opening. Of each kind 3 pairs, groups or answers.
TEST(what_prefers_nothing_is_told) {
    static const struct {
        ObjectiveKind objective;
        const char *same, *single;
    } rows[] = {{OBJECTIVE_DPO, "2 of 3 pairs have two equal answers, so they give no gradient", "2 of 6 documents"},
                {OBJECTIVE_GRPO, "1 of 3 groups have equal rewards, so they give no gradient", "1 of 9 documents"},
                {OBJECTIVE_KTO, NULL, "1 of 6 documents have an answer of one token"}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const Objective objective = objective_of(rows[i].objective);
        const MadeShard made = made_kind(objective_data[objective.kind]);
        const size_t members = made.kind == KIND_GROUPS ? 3 : 2;
        MadeDocument document[9];
        test_case("%s", objective_names[objective.kind]);
        for (size_t d = 0; d < 3 * members; d++) {
            document[d] = made_document(d, 6, 0);
            document[d].prompt = 1, document[d].group = d / members, document[d].reward = (float)(d % 2);
        }
        for (size_t k = 0; k < 3 && members == 3; k++) document[3 + k].reward = 7;
        if (made.kind == KIND_PAIRS) document[1].id = document[0].id;
        document[4] = made_document(4, 2, 0), document[4].prompt = 1;
        document[4].group = 4 / members, document[4].reward = members == 3 ? 7 : 0;
        if (made.kind == KIND_PAIRS) document[5] = document[4];
        refusal_settings = answer_settings(1, 16, &objective);
        const Child *child = run_child(open_alone, write_shard("same.bin", &made, document, 3 * members));
        assert_int_equal(child->code, 0);
        assert_int_equal(count_lines(child->err), 1 + (rows[i].same != NULL));
        if (rows[i].same && !strstr(child->err, rows[i].same)) test_fail("%s", child->err);
        if (!strstr(child->err, rows[i].single)) test_fail("%s", child->err);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
