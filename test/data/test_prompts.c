// Other reads of shards: prompts for rollouts, from each kind with prompts; documents of any kind one by one, with
// their places in the data; log-probabilities of their targets, from a file.
#include "answer_files.h"
#include "llmc/data/documents_read.h"

// ---- log-probabilities from a file ----------------------------------------------------------------------------------
// Writes a file with the log-probability -token / 8 for every token but the first of a document.
static LogprobFile logprobs_of_tokens(const char *name, const MadeDocument *document, size_t documents, size_t tokens) {
    const char *path = scratch_path(name);
    LogprobWriter writer;
    LogprobFile file;
    size_t token = 0;
    LogprobHeader header = {0};
    header.tokens = tokens, header.documents = documents, header.temperature = 1;
    logprobs_create(&writer, path, &header);
    for (size_t d = 0; d < documents; d++) {
        for (size_t i = 0; i < document[d].tokens; i++, token++) {
            float value = -(float)token / 8;
            if (i) logprobs_write(&writer, token, 1, &value);
        }
    }
    logprobs_commit(&writer, tokens - documents);
    logprobs_open(&file, path);
    return file;
}

static void expect_logprobs(const Batch *batch, const MadeDocument *document, const size_t *before, int reads) {
    for (size_t d = 0; d < batch->documents; d++) {
        size_t begin = batch->document_start[d], number = (size_t)batch->tokens[begin] / DOCUMENT_IDS;
        size_t first = before[number] + (size_t)batch->tokens[begin] % DOCUMENT_IDS;
        if (batch->origin[d] != first) test_fail("document %zu: origin %zu", number, batch->origin[d]);
        if (document[number].tokens < batch->document_start[d + 1] - begin) test_fail("document %zu", number);
        for (size_t t = begin; reads && t < batch->document_start[d + 1]; t++) {
            float wanted = -(float)(first + 1 + t - begin) / 8; // of the target
            if (batch->reference[t] != wanted || batch->old[t] != wanted) test_fail("position %zu of %zu", t, number);
        }
    }
}

TEST(log_probabilities_are_those_of_the_targets) {
    static const ObjectiveKind objectives[] = {OBJECTIVE_PPO, OBJECTIVE_DPO, OBJECTIVE_GRPO, OBJECTIVE_SFT};
    for (size_t c = 0; c < 4; c++) {
        Objective objective = objective_of(objectives[c]);
        DataSettings settings = answer_settings(2, c ? 30 : 10, &objective); // only plain documents are split
        const MadeShard made = made_kind(objective_data[objectives[c]]);
        MadeDocument document[2 * 20 * 6];
        size_t before[2 * 20 * 6], tokens = 0;
        const char *paths[2];
        test_case("%s", objective_names[objectives[c]]);
        const size_t count = write_two(&made, document, 20, c == 1 ? 2 : 6, 30, paths);
        for (size_t i = 0; i < count; i++) {
            before[i] = tokens;
            tokens += document[i].tokens;
        }
        objective.beta = 0.1;
        SCOPED(logprobs_close) LogprobFile file = logprobs_of_tokens("all.logprobs", document, count, tokens);
        settings.old = &file;
        SCOPED_LOADER loader = dataloader_open(paths, 2, &settings);
        loader.settings.reference = &file; // set after opening
        for (size_t i = 0; i < count; i++) {
            size_t in = before[i] + test_random_below(document[i].tokens); // any token of document i
            DocumentRef at = documents_find_token(&loader, in);
            assert_int_equal(at.shard->tokens_before + at.entry.first, before[i]);
            assert_int_equal(at.shard->documents_before + at.number, i);
        }
        SCOPED_BATCH batch = batch_for(&loader);
        allocation_guard = 1;
        for (size_t s = 0; s < 2 * dataloader_batches(&loader); s++) {
            dataloader_next(&loader, &batch);
            expect_logprobs(&batch, document, before, c < 3);
        }
        allocation_guard = 0;
    }
}

// Reads every document of any kind by itself, in the order of the files; keys depend on the content alone.
TEST(any_kind_is_read_document_by_document) {
    DataSettings settings = data_settings(1, 25), other = data_settings(3, 500);
    uint64_t key[5];
    settings.use = DATA_READS, settings.shuffle = SHUFFLE_OFF;
    write_kinds();
    for (size_t k = 0; k < 5; k++) {
        const Objective objective = objective_of(k == 1 ? OBJECTIVE_DPO : k == 2 ? OBJECTIVE_GRPO : OBJECTIVE_PPO);
        const char *path = scratch_path(kind_files[k]);
        size_t documents = 0;
        test_case("%s", kind_files[k]);
        refusal_settings = settings;
        if (k == 3) {
            refused(path, "holds prompts alone, without a target; give data with answers");
            continue;
        }
        SCOPED_LOADER loader = open_data(path, &settings);
        SCOPED_BATCH batch = batch_for(&loader);
        for (size_t i = 0; i < dataloader_batches(&loader); i++, documents += batch.documents) {
            dataloader_next(&loader, &batch);
            assert_int_equal(batch.tokens[0] / DOCUMENT_IDS, documents);
            assert_int_equal(documents_find_token(&loader, batch.origin[0]).number, documents);
            assert_null(batch.group);
        }
        assert_int_equal(documents, 4);
        key[k] = dataloader_content_key(&loader);
        if (k) other.objective = &objective;
        SCOPED_LOADER again = open_data(path, &other);
        assert_true(dataloader_content_key(&again) == key[k]);
        for (size_t i = 0; i < k; i++) assert_true(i == 3 || key[i] != key[k]);
    }
    refused("test/golden/tokens_uint16.bin",
            "is one of llm.c's shards, which have no documents; give shards of data/prepare.py");
}

// ---- prompts --------------------------------------------------------------------------------------------------------
static void expect_prompt(DataLoader *d, size_t prompt, const MadeDocument *made, size_t tokens, size_t room) {
    int32_t *ids = (int32_t *)case_memory((room + 1) * sizeof(int32_t));
    size_t prompt_tokens, found;
    ids[room] = -7;
    allocation_guard = 1;
    prompts_read(d, prompt, ids, room, &prompt_tokens, &found);
    allocation_guard = 0;
    assert_int_equal(prompt_tokens, made->prompt);
    assert_int_equal(found, tokens);
    for (size_t i = 0; i < min_size(tokens, room); i++)
        if ((uint32_t)ids[i] != made->id[i]) test_fail("prompt %zu, token %zu: %d", prompt, i, ids[i]);
    assert_int_equal(ids[room], -7);
}

TEST(prompts_of_any_kind_that_has_them) {
    static const ShardKind kinds[] = {KIND_DOCUMENTS, KIND_GROUPS, KIND_PROMPTS};
    for (size_t c = 0; c < 3; c++) {
        DataSettings settings = data_settings(1, 5); // documents may be longer; their length does not matter
        const MadeShard made = made_kind(kinds[c]);
        MadeDocument document[2 * 30 * 4];
        size_t first[2 * 30], prompts = 0, longest = 0, longest_text = 0;
        const char *paths[2];
        settings.use = DATA_PROMPTS;
        test_case("kind %d", kinds[c]);
        const size_t count = write_two(&made, document, c == 1 ? 30 : 8, c == 1 ? 4 : 2, 50, paths);
        for (size_t i = 0; i < count; i++) {
            if (c == 1 && i && document[i].group == document[i - 1].group) continue;
            first[prompts++] = i, longest = max_size(longest, document[i].prompt);
            longest_text = max_size(longest_text, c == 1 ? document[i].prompt : document[i].tokens);
        }
        SCOPED_LOADER loader = dataloader_open(paths, 2, &settings);
        assert_int_equal(loader.prompts, prompts);
        assert_int_equal(loader.longest_prompt, longest);
        assert_int_equal(loader.longest_text, longest_text);
        for (size_t i = 0; i < prompts; i++) {
            const MadeDocument *of = &document[first[i]];
            size_t tokens = c == 1 ? of->prompt : of->tokens;
            expect_prompt(&loader, i, of, tokens, 50);
            expect_prompt(&loader, i, of, tokens, of->prompt);
        }
    }
}

// Columns of prompts from two shards, one of them without.
TEST(columns_of_a_prompt) {
    static const char *const columns[] = {"{}", "{\"level\": 3}", "{\"a\": \"\xc3\xa9\", \"b\": [1, null]}",
                                          "{\"c\": {}}"};
    DataSettings settings = data_settings(1, 5);
    MadeShard made = made_kind(KIND_PROMPTS);
    MadeDocument document[2 * 4];
    const char *paths[2];
    char *text = (char *)case_memory(100);
    settings.use = DATA_PROMPTS;
    const size_t count = made_groups(&made, document, 0, 2, 2, 20);
    for (size_t i = 0; i < count; i++) document[i].columns = columns[i];
    paths[1] = write_shard("without.bin", &made, document, count);
    made.columns = 1;
    paths[0] = write_shard("with.bin", &made, document, count);
    SCOPED_LOADER loader = dataloader_open(paths, 2, &settings);
    assert_int_equal(count, 4);
    assert_int_equal(loader.longest_columns, strlen(columns[2]));
    allocation_guard = 1;
    for (size_t i = 0; i < 2 * count; i++) {
        const size_t bytes = prompts_columns(&loader, i, text);
        assert_int_equal(bytes, i < count ? strlen(columns[i]) : 0);
        assert_memory_equal(text, columns[i % count], bytes);
    }
    allocation_guard = 0;
}

static void read_prompts(const void *context) {
    SCOPED_LOADER loader = open_data((const char *)context, &refusal_settings);
    size_t prompt_tokens, tokens;
    int32_t ids[64];
    char *columns = (char *)checked_malloc(loader.longest_columns + 1, "columns");
    for (size_t i = 0; i < loader.prompts; i++) {
        prompts_read(&loader, i, ids, 64, &prompt_tokens, &tokens);
        prompts_columns(&loader, i, columns);
    }
    free(columns);
}

static void prompts_refused(const char *path, const char *words) {
    expect_refused(read_prompts, path, EXIT_RUNTIME, words);
}

TEST(prompts_that_are_none) {
    MadeShard made = made_shard(4);
    MadeDocument document[4];
    refusal_settings = data_settings(1, 100);
    refusal_settings.use = DATA_PROMPTS;
    for (size_t i = 0; i < 4; i++) document[i] = made_document(i, 9, 0), document[i].prompt = i == 2 ? 0 : 4;
    const char *path = write_shard("bad.bin", &made, document, 4);
    prompts_refused(path, "bad.bin: document 2 does not mark the end of its prompt, which --rollout");
    document[2].prompt = 1;
    ShardImage image = shard_image(&made, document, 4);
    image.bytes[image.size - 1] ^= 1; // of the last document
    prompts_refused(write_image("bad.bin", image), "the checksum of document 3 is wrong");
    image = shard_image(&made, document, 4);
    put(image.bytes + 72, DOCUMENT_IDS + 2, 8); // the vocabulary
    shard_image_seal(&image, 4);
    prompts_refused(write_image("bad.bin", image), "document 1, token 2 is 4098, outside the vocab");
    made.kind = KIND_PROMPTS;
    prompts_refused(write_shard("bad.bin", &made, document, 4), "document 0 is a prompt and has targets");
    made.kind = KIND_PAIRS;
    prompts_refused(write_shard("bad.bin", &made, document, 4), "holds preference pairs, but --rollout needs prompts");
    prompts_refused(write_shard("bad.bin", &made, document, 0), "--rollout needs prompts");
    made.kind = KIND_DOCUMENTS;
    prompts_refused(write_shard("bad.bin", &made, document, 0), "bad.bin: holds no prompts");
    prompts_refused("test/golden/tokens_uint16.bin", "llm.c's shards, which have no prompts");
}

TEST(columns_that_are_none) {
    static const struct {
        int from; // 0: the header; 1: the index; 2: the text
        size_t at, bytes;
        uint64_t value;
        int seal; // renews the checksums of header and index
        const char *words;
    } damage[] = {{0, 68, 4, 0, 1, "is of kind 0 and holds columns, which only prompts alone"},
                  {0, 192, 8, 64, 1, "its columns are at byte 64,"},
                  {0, 192, 8, 0, 1, "its end is at byte"},
                  {0, 200, 8, 1000, 1, "columns of 1000 bytes do not fit the file"},
                  {0, 200, 8, 14, 1, "its columns are not contiguous up to its end, or longer than"},
                  {1, 8, 1, 3, 0, "the checksum of its index of columns is wrong"},
                  {1, 8, 4, 3, 1, "its columns are not contiguous"},
                  {1, 16, 8, UINT64_MAX, 1, "its columns are not contiguous"},
                  {1, 16 + 8, 4, UINT32_MAX, 1, "its columns are not contiguous"},
                  {1, 16 + 12, 4, 0, 1, "the checksum of the columns of document 1 is wrong"},
                  {2, 4, 1, 'x', 1, "the checksum of the columns of document 1 is wrong"}};
    static const char *const wrong[] = {"[1]", "{\"a\":\n1}", "", "{"};
    MadeShard made = made_kind(KIND_PROMPTS);
    MadeDocument document[4];
    refusal_settings = data_settings(1, 100);
    refusal_settings.use = DATA_PROMPTS;
    made_groups(&made, document, 0, 2, 2, 20);
    made.columns = 1;
    for (size_t i = 0; i < 4; i++) document[i].columns = i ? "{\"level\": 3}" : "{}";
    for (size_t c = 0; c < COUNT_OF(damage); c++) {
        ShardImage image = shard_image(&made, document, 4);
        const size_t from[] = {0, image.columns, image.columns + 4 * TOKEN_SHARD_COLUMNS};
        put(image.bytes + from[damage[c].from] + damage[c].at, damage[c].value, damage[c].bytes);
        if (damage[c].seal) shard_image_seal(&image, 4);
        prompts_refused(write_image("bad.bin", image), damage[c].words);
    }
    ShardImage image = shard_image(&made, document, 4);
    image.bytes[image.columns - 1] = 1; // before the section
    prompts_refused(write_image("bad.bin", image), "are not zero, the file is damaged");
    for (size_t c = 0; c < COUNT_OF(wrong); c++) {
        document[2].columns = wrong[c];
        prompts_refused(write_shard("bad.bin", &made, document, 4),
                        "the columns of document 2 are not a JSON object on one line; write it again");
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
