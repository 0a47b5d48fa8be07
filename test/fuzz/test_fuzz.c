/*
A fuzz target for each parser of foreign input: files, command lines, a reward command's answers. A target opens an
input as the program does. It must end in a result or in one line of refusal: no crash, no hang, no memory out of
proportion to the input, no control bytes of a file on a terminal. If a format has a checksum the target renews it, so
that damage gets past it.

    test/run.sh fuzz    the seeds, the inputs that were found (test/fuzz/found/TARGET-*), some changes of each
    make fuzz           libFuzzer, which needs clang: new inputs, guided by the lines that they reach

A refusal (die) jumps out of the target. So every allocation of a target is recorded, and freed after it. A target that
ends without a refusal must have freed all by itself.
*/
#include <glob.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include <cmocka.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define FUZZ_BYTES   ((size_t)1 << 16) // of an input
#define FUZZ_MEMORY  ((size_t)1 << 29) // most memory of a target at once
#define FUZZ_RECORDS 65536             // allocations of a target

// ---- the way out ----------------------------------------------------------------------------------------------------
static struct {
    int active, keeps; // keeps: allocations are not recorded
    void *block[FUZZ_RECORDS];
    size_t blocks;
    jmp_buf back;
    char message[16384];
} fuzz;

__attribute__((noreturn, format(printf, 1, 2))) static void fuzz_found(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    abort();
}

static void *fuzz_record(void *block) {
    if (!fuzz.active || fuzz.keeps || !block) return block;
    if (fuzz.blocks == FUZZ_RECORDS) fuzz_found("more than %d allocations", FUZZ_RECORDS);
    return fuzz.block[fuzz.blocks++] = block;
}

static void *fuzz_allocate(size_t bytes) {
    if (fuzz.active && bytes > FUZZ_MEMORY) fuzz_found("%zu bytes at once", bytes);
    return fuzz_record(malloc(bytes));
}

static void *fuzz_calloc(size_t count, size_t size) {
    if (fuzz.active && count > FUZZ_MEMORY / size) fuzz_found("%zu x %zu bytes at once", count, size);
    return fuzz_record(calloc(count, size));
}

static void fuzz_forget(void *memory) {
    for (size_t i = fuzz.blocks; memory && i-- > 0;)
        if (fuzz.block[i] == memory) {
            fuzz.block[i] = fuzz.block[--fuzz.blocks];
            break;
        }
}

static void *fuzz_realloc(void *memory, size_t bytes) {
    if (fuzz.active && bytes > FUZZ_MEMORY) fuzz_found("%zu bytes at once", bytes);
    fuzz_forget(memory);
    return fuzz_record(realloc(memory, bytes));
}

static void fuzz_free(void *memory) {
    fuzz_forget(memory);
    free(memory);
}

static void fuzz_free_all(void) {
    while (fuzz.blocks) free(fuzz.block[--fuzz.blocks]);
}

static void fuzz_refused(int code, const char *message) {
    (void)code;
    snprintf(fuzz.message, sizeof(fuzz.message), "%s", message);
    longjmp(fuzz.back, 1);
}

__attribute__((noreturn)) static void fuzz_exit(int code) {
    if (!fuzz.active) exit(code);
    longjmp(fuzz.back, 1); // --help and --version
}

#define malloc  fuzz_allocate
#define calloc  fuzz_calloc
#define realloc fuzz_realloc
#define free    fuzz_free
#define exit    fuzz_exit
#include "test/files/weight_files.h"
#include "test/data/shard_writer.h"
#include "llmc/train/trainer_setup.h"
static const Ops no_ops = {.name = "none", .libraries = "", .stored = DTYPE_FP32, .summed = DTYPE_FP32};
__attribute__((weak)) const Ops *ops_device = &no_ops; // no tensors here

typedef struct {
    const char *name, *file; // the name of the input in the target's folder
    void (*open)(const char *path);
    void (*mend)(unsigned char *bytes, size_t count); // renews checksums; NULL: there are none
    const char *seeds[6];                             // patterns of files; or "=" and the input itself
    const char *beside;                               // pattern of files beside the input
} Target;

static void fuzz_one(const Target *t, const void *bytes, size_t count) {
    static unsigned char copy[FUZZ_BYTES];
    const char *path = scratch_path(t->file);
    const int first = dup(STDIN_FILENO);
    volatile int ended = 0;
    close(first);
    count = min_size(count, FUZZ_BYTES);
    memcpy(copy, bytes, count);
    if (t->mend) t->mend(copy, count);
    write_file(path, copy, count);
    fuzz.message[0] = 0, fuzz.active = 1, die_caught = fuzz_refused;
    if (!setjmp(fuzz.back)) t->open(path), ended = 1;
    fuzz.active = 0, die_caught = NULL;
    if (ended && fuzz.blocks) fuzz_found("%zu allocations were not freed", fuzz.blocks);
    fuzz_free_all();
    for (int fd = first; !ended && fd < first + 16; fd++) close(fd);
    for (const char *c = fuzz.message; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) fuzz_found("a control character in: %s", fuzz.message);
    if (strlen(fuzz.message) > 1000) fuzz_found("a refusal of %zu bytes: %.300s", strlen(fuzz.message), fuzz.message);
}

// ---- checksums ------------------------------------------------------------------------------------------------------
static void mend_flat(unsigned char *bytes, size_t count) {
    FlatHeader header;
    if (count < sizeof(header)) return;
    memcpy(&header, bytes, sizeof(header));
    header.checksum = flat_checksum(&header);
    memcpy(bytes, &header, sizeof(header));
}

static void mend_shard(unsigned char *bytes, size_t count) {
    ShardImage image = {bytes, count, TOKEN_SHARD_HEADER, 0, 0, 0, 0};
    uint64_t documents, ids, masks, values, columns, first, tokens;
    uint32_t id_bytes;
    if (count < TOKEN_SHARD_HEADER) return;
    put(bytes + 24, count, 8);
    memcpy(&documents, bytes + 32, 8), memcpy(&id_bytes, bytes + 64, 4);
    memcpy(&ids, bytes + 96, 8), memcpy(&masks, bytes + 104, 8), memcpy(&columns, bytes + 192, 8);
    memcpy(&values, bytes + 112, 8);
    if (documents > (count - TOKEN_SHARD_HEADER) / TOKEN_SHARD_ENTRY) return;
    crc32_prepare();
    for (size_t d = 0; d < documents; d++) {
        unsigned char *entry = bytes + TOKEN_SHARD_HEADER + d * TOKEN_SHARD_ENTRY;
        memcpy(&first, entry, 8), memcpy(&tokens, entry + 8, 8);
        if (id_bytes > 4 || first > count || tokens > count || ids > count || masks > count) break;
        if (ids + (first + tokens) * id_bytes > count || masks + first + tokens > count) break;
        uint32_t crc = crc32_of(0, bytes + ids + first * id_bytes, tokens * id_bytes);
        crc = crc32_of(crc, bytes + masks + first, tokens);
        if (values && values < count && 4 * (first + tokens) <= count - values)
            crc = crc32_of(crc, bytes + values + 4 * first, 4 * tokens);
        put(entry + 44, crc, 4);
    }
    if (columns && columns < count && documents * TOKEN_SHARD_COLUMNS <= count - columns) image.columns = columns;
    for (size_t d = 0; image.columns && d < documents; d++) {
        unsigned char *entry = bytes + columns + d * TOKEN_SHARD_COLUMNS;
        const size_t text = columns + documents * TOKEN_SHARD_COLUMNS;
        uint32_t length;
        memcpy(&first, entry, 8), memcpy(&length, entry + 8, 4);
        if (first > count - text || length > count - text - first) break;
        put(entry + 12, crc32_of(0, bytes + text + first, length), 4);
    }
    shard_image_seal(&image, documents);
}

static void mend_tokenizer(unsigned char *bytes, size_t count) {
    crc32_prepare();
    if (count < TOKENIZER_HEADER) return;
    put(bytes + 16, count, 8);
    put(bytes + 12, crc32_of(0, bytes + 16, count - 16), 4);
}

static void mend_logprobs(unsigned char *bytes, size_t count) {
    LogprobHeader header;
    if (count < sizeof(header)) return;
    memcpy(&header, bytes, sizeof(header));
    crc32_prepare();
    header.begin.bytes = count;
    header.body_crc = crc32_of(0, bytes + sizeof(header), count - sizeof(header));
    header.header_crc = logprobs_header_crc(&header);
    memcpy(bytes, &header, sizeof(header));
}

// Sets the header's length so that `data` bytes follow, as in the golden file.
static void mend_header_before(unsigned char *bytes, size_t count, size_t data) {
    if (count > 8 + data) put(bytes, count - 8 - data, 8);
}

static void mend_header(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 55680); }
static void mend_quantised(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 56320); }
static void mend_fp8(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 29224); }
static void mend_forms(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 39286); }
static void mend_fused(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 24256); }
static void mend_mxfp4(unsigned char *bytes, size_t count) { mend_header_before(bytes, count, 42588); }

#define SAFETENSOR HF_SINGLE_FILE

// ---- targets --------------------------------------------------------------------------------------------------------
// Returns the input as text, zero-terminated; the caller frees it.
static char *text_of(const char *path) {
    size_t length;
    return input_read_text(path, FUZZ_BYTES, &length);
}

static void build(const Config *config) {
    char text[4096];
    config_to_text(config, text, sizeof(text));
    Model model = model_build(config, DTYPE_BF16);
    model_free(&model);
}

static void open_config(const char *path) {
    char remark[256];
    (void)path;
    const Config config = hf_directory_config(scratch_folder(), remark, sizeof(remark));
    build(&config);
}

static void open_init(const char *path) {
    char *text = text_of(path);
    const Config config = config_from_text(text, "--init", EXIT_USAGE);
    free(text);
    build(&config);
}

static void open_scaling(const char *path) {
    char *text = text_of(path);
    Config config = config_from_text("qwen3-0.6b", "--init", EXIT_USAGE);
    config = config_scale(&config, text, "--rope-scaling", EXIT_USAGE);
    lora_modules(config.family, text, "--lora-targets", EXIT_USAGE);
    free(text);
    build(&config);
}

static void open_folder(const char *path) {
    (void)path;
    weights_close(weights_open(scratch_folder()));
}

static void open_weights(const char *path) { weights_close(weights_open(path)); }

static void open_quantised(const char *path) {
    (void)path;
    open_and_read(scratch_folder());
}

static void open_data_as(const char *path, DataUse use, size_t B) {
    DataSettings settings = {0};
    Objective objective = {0};
    settings.B = B, settings.T = 16, settings.vocab_size = 96, settings.use = use, settings.objective = &objective;
    DataLoader d = dataloader_open(&path, 1, &settings);
    if (use == DATA_PROMPTS) {
        int32_t ids[4096];
        size_t prompt, tokens;
        char *columns = (char *)checked_malloc(d.longest_columns + 1, "columns");
        for (size_t i = 0; i < d.prompts && d.longest_text <= 4096; i++)
            prompts_read(&d, i, ids, 4096, &prompt, &tokens), prompts_columns(&d, i, columns);
        free(columns);
    } else {
        Batch batch = dataloader_batch(&d);
        for (size_t i = 0; i < min_size(dataloader_batches(&d), 8); i++) dataloader_next(&d, &batch);
        batch_free(&batch);
    }
    dataloader_close(&d);
}

static void open_shard(const char *path) {
    char kind[TOKEN_SHARD_HEADER] = {0};
    InputFile file = input_open(path);
    input_read(&file, 0, kind, min_size(file.bytes, sizeof(kind)));
    input_close(&file);
    const int reads = kind[68] || kind[112] || kind[113]; // values begin at a multiple of 64
    open_data_as(path, kind[68] == KIND_PROMPTS ? DATA_PROMPTS : reads ? DATA_READS : DATA_TRAINS, 2);
}

static void open_llmc_shard(const char *path) { open_data_as(path, DATA_TRAINS, 3); }

static void open_tokenizer(const char *path) {
    static const char text[] = "<s>It's 12345  x\r\n\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 e\xcc\x81</s>";
    Tokenizer *t = tokenizer_open(path);
    TokenIds ids = {0};
    size_t bytes;
    if (t->flags & TOKENIZER_ENCODES) tokenizer_encode(t, text, sizeof(text) - 1, 1, &ids);
    if (t->flags & TOKENIZER_ENCODES && t->flags & TOKENIZER_CHAT) {
        Scratch turns = {NULL, 0, 0};
        chat_append_turn(&turns, t, NULL, text, sizeof(text) - 1, 1);
        chat_append_answer(&turns, t, THINKING_ON, text, sizeof(text) - 1);
        chat_encode(t, &turns, THINKING_OFF, &ids);
        free(turns.at);
    }
    for (size_t i = 0; i < ids.count; i++) tokenizer_decode(t, ids.id[i], &bytes);
    for (int32_t i = 0; i < 300; i++)
        tokenizer_decode(t, i, &bytes), tokenizer_is_special(t, i), tokenizer_is_end(t, i);
    free(ids.id);
    tokenizer_close(t);
}

static void open_pieces(const char *path) {
    Pieces pieces = pieces_open(path);
    pieces_close(&pieces);
}

static void open_adapter_config(const char *path) {
    Config config = config_from_text("llama", "test", EXIT_USAGE);
    Lora lora = {0};
    cJSON *root = adapter_config_read(path, &lora);
    const AdapterTargets targets = {root, path, EXIT_RUNTIME, config.family->names.layer_prefix};
    config.num_hidden_layers = 2;
    if (adapter_targets_known(&targets)) adapter_choose(&targets, &lora, &config, NULL);
    free(lora.each);
    cJSON_Delete(root);
}

static void open_state(const char *path) {
    static const RunSetting settings[] = {{"--seq-len", "64", SETTING_KEPT, NULL},
                                          {"--chunk", "8", SETTING_ROUNDS, NULL},
                                          {"data", "00ff", SETTING_KEPT, NULL}};
    RunState run = {0};
    size_t length;
    run.settings = settings, run.setting_count = 3, run.data = "a.bin";
    run.schedule.peak = 1, run.schedule.steps = 100;
    char *text = input_read_text(path, RUN_STATE_LIMIT, &length);
    run_state_resume(&run, text, length, "checkpoint", path);
    free(text);
}

static void open_manifest(const char *path) {
    char found[PATH_MAX];
    Manifest manifest;
    (void)path;
    manifest_check(scratch_folder(), &manifest);
    checkpoint_at_path(scratch_folder(), found, &manifest);
}

static void open_log(const char *path) { records_truncate(path, 3); }

static void open_logprobs(const char *path) {
    LogprobFile file;
    float value[64];
    logprobs_open(&file, path);
    for (size_t i = 0; i + 64 <= file.header.tokens && i < 4096; i += 64) logprobs_read(&file, i, 64, value);
    logprobs_close(&file);
}

// Parses options, one word a line.
static void open_options(const char *path) {
    char *text = text_of(path), *argv[64] = {(char *)"train"}, *rest = NULL;
    int argc = 1;
    for (char *word = strtok_r(text, "\n", &rest); word && argc < 63; word = strtok_r(NULL, "\n", &rest))
        argv[argc++] = word;
    Options options = options_parse(argc, argv);
    options_free(&options);
    free(text);
}

// Parses a --config file; the words stay until the next call frees them.
static void open_option_file(const char *path) {
    char *argv[] = {(char *)"train", (char *)"plan", (char *)"--config", (char *)(uintptr_t)path, NULL};
    Options options = options_parse(4, argv);
    options_free(&options);
}

static void open_reward(const char *path) {
    float reward[16];
    Reward r = {0};
    InputFile file = input_open(path);
    r.from = file.fd, r.lines = r.sent = 16;
    while ((uint64_t)lseek(file.fd, 0, SEEK_CUR) < file.bytes && reward_read(&r, reward)) continue;
    input_close(&file);
}

static const Target targets[] = {
    {"config",
     "config.json",
     open_config,
     NULL,
     {GOLDEN "*/config.json",
      "={\"model_type\":\"qwen3_5\",\"tie_word_embeddings\":true,\"text_config\":{\"vocab_size\":9,\"hidden_size\":8,"
      "\"num_hidden_layers\":5,\"num_attention_heads\":2,\"intermediate_size\":6,\"full_attention_interval\":3,"
      "\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}}}"},
     NULL},
    {"init",
     "init",
     open_init,
     NULL,
     {"=qwen3-0.6b,num_hidden_layers=2,layer_types=s", "=gemma3,sliding_window=9,layer_types=sfs,num_hidden_layers=3",
      "=llama,rope_type=llama3,factor=8.0,low_freq_factor=1,high_freq_factor=4,original_max_position_embeddings=64",
      "=qwen3_5,num_hidden_layers=3,layer_types=lf,linear_num_key_heads=3,linear_num_value_heads=6,linear_key_head_dim="
      "4",
      "=gpt2,n_embd=32,n_layer=2,n_head=4,n_positions=64,vocab_size=96,tie_word_embeddings=false"},
     NULL},
    {"scaling",
     "scaling",
     open_scaling,
     NULL,
     {"=yarn,factor=4", "=linear,factor=2.5", "=q_proj,v_proj", "=all"},
     NULL},
    {"safetensors",
     SAFETENSOR,
     open_folder,
     NULL,
     {GOLDEN "mistral-full/" SAFETENSOR},
     GOLDEN "mistral-full/config.json"},
    {"quantised",
     SAFETENSOR,
     open_quantised,
     mend_quantised,
     {GOLDEN "qwen3-nf4/" SAFETENSOR},
     GOLDEN "qwen3-nf4/config.json"},
    {"mxfp4",
     SAFETENSOR,
     open_quantised,
     mend_mxfp4,
     {GOLDEN "gpt_oss-mxfp4/" SAFETENSOR},
     GOLDEN "gpt_oss-mxfp4/config.json"},
    {"fp8",
     SAFETENSOR,
     open_quantised,
     mend_fp8,
     {GOLDEN "qwen3_moe-fp8/" SAFETENSOR},
     GOLDEN "qwen3_moe-fp8/config.json"},
    {"fp8_forms",
     SAFETENSOR,
     open_quantised,
     mend_forms,
     {GOLDEN "qwen3-fp8/" SAFETENSOR},
     GOLDEN "qwen3-fp8/config.json"},
    {"fp8_fused",
     SAFETENSOR,
     open_quantised,
     mend_fused,
     {GOLDEN "qwen3_next-fp8/" SAFETENSOR},
     GOLDEN "qwen3_next-fp8/config.json"},
    {"header",
     SAFETENSOR,
     open_folder,
     mend_header,
     {GOLDEN "mistral-full/" SAFETENSOR},
     GOLDEN "mistral-full/config.json"},
    {"index",
     "model.safetensors.index.json",
     open_folder,
     NULL,
     {GOLDEN "llama-sharded/model.safetensors.index.json"},
     GOLDEN "llama-sharded/*[0-9g].[sj]*s*n"},
    {"flat", "model.bin", open_weights, mend_flat, {GOLDEN "run-88e0adb/*/model.bin"}, NULL},
    {"llmc", "model.bin", open_weights, NULL, {GOLDEN "gpt2/gpt2_llmc_bf16.bin"}, NULL},
    {"shard", "shard.bin", open_shard, mend_shard, {NULL}, NULL},
    {"llmc_shard", "shard.bin", open_llmc_shard, NULL, {GOLDEN "tokens_uint16.bin", GOLDEN "tokens_uint32.bin"}, NULL},
    {"tokenizer", "tokenizer.tok", open_tokenizer, mend_tokenizer, {GOLDEN "tokenizers/*.tok"}, NULL},
    {"pieces",
     "tokenizer.json",
     open_pieces,
     NULL,
     {"={\"model\": {\"vocab\": {\"a\": 0, \"\\u0120b\": 1, \"\u010a\": 3}}, \"added_tokens\": [{\"id\": 4, "
      "\"content\": "
      "\"<s>\"}], \"decoder\": {\"type\": \"ByteLevel\"}}",
      "={\"model\": {\"vocab\": [[\"<0x41>\", 0], [\"\\u2581a\\u0000\", -1.5]]}, \"added_tokens\": []}"},
     NULL},
    {"adapter",
     "adapter_config.json",
     open_adapter_config,
     NULL,
     {"={\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"r\": 4, \"lora_alpha\": 8, \"lora_dropout\": 0.1, "
      "\"use_rslora\": false, \"bias\": \"none\", \"target_modules\": [\"q_proj\", \"k_proj\"], \"rank_pattern\": {}, "
      "\"modules_to_save\": null, \"init_lora_weights\": true, \"layers_to_transform\": null}",
      "={\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 16, \"target_modules\": \"all-linear\"}"},
     NULL},
    {"state", "state.json", open_state, NULL, {GOLDEN "run-88e0adb/*/state.json"}, NULL},
    {"manifest", "DONE", open_manifest, NULL, {GOLDEN "run-88e0adb/*/DONE"}, GOLDEN "run-88e0adb/*/[mos]*"},
    {"log", "log.jsonl", open_log, NULL, {GOLDEN "run-88e0adb/log.jsonl"}, NULL},
    {"logprobs", "reference", open_logprobs, mend_logprobs, {NULL}, NULL},
    {"options",
     "options",
     open_options,
     NULL,
     {"=plan\n--init\nqwen3-8b\n--seq-len\n32k\n--memory-limit=80GiB\n--lora-rank\n8\n--objective\ndpo\n--beta\n.1",
      "=--model\nm\n--data\na.bin\nb*.bin\n--steps\n9\n--rollout\n--objective=grpo\n--reward-command\nx\n--stop-ids\n1,"
      "2",
      "=sample\n--model\nm\n--prompt-ids\n1,2,3\n--top-p\n0.9\n--quiet",
      "=train\n--learning_rate\n1e-5\n--per-device-train-batch-size\n4\n--output-dir\no\n--epochs\n2"},
     NULL},
    {"option_file",
     "options.json",
     open_option_file,
     NULL,
     {"=# a comment\ninit qwen3-0.6b\n--seq-len '8192' \"--lora-rank\" 8\nquiet\n",
      "={\"init\": \"gpt2\", \"seq-len\": 64, \"quiet\": true, \"chunk\": null, \"data\": [\"a\", \"b\"]}",
      GOLDEN "run-88e0adb/log.jsonl"},
     NULL},
    {"reward",
     "answers",
     open_reward,
     NULL,
     {"=1\n 0.5 \r\n{\"reward\": -1e3, \"x\": [1]}\n{\"reward\": 1}\nnan\n-.5\n"},
     NULL},
};
#define TARGETS COUNT_OF(targets)

// ---- seeds ----------------------------------------------------------------------------------------------------------
typedef void (*TakeInput)(const Target *t, const void *bytes, size_t count);

static void each_file(const Target *t, const char *pattern, TakeInput take) {
    glob_t found;
    size_t count;
    if (glob(pattern, 0, NULL, &found)) return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *bytes = input_read_text(found.gl_pathv[i], SIZE_MAX, &count);
        take(t, bytes, count);
        free(bytes);
    }
    globfree(&found);
}

// A shard of each kind, of few documents.
static void each_kind(const Target *t, TakeInput take) {
    static const uint32_t id[] = {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24};
    static const unsigned char counts[22] = {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const unsigned char none[22] = {0};
    static const float value[22] = {0, 0.5f, -1};
    enum { WITH_COLUMNS = KIND_LABELS + 1 };
    for (uint32_t k = KIND_DOCUMENTS; k <= WITH_COLUMNS; k++) {
        const uint32_t kind = k == WITH_COLUMNS ? KIND_PROMPTS : k == KIND_VALUES ? KIND_DOCUMENTS : k;
        const MadeShard made = {kind % 2 ? 2 : 4, 96, 0, kind, "some tokenizer", k == KIND_VALUES, k == WITH_COLUMNS};
        MadeDocument document[4];
        for (size_t d = 0; d < 4; d++) {
            const MadeDocument one = {d ? 3 + d : 22, id, kind == KIND_PROMPTS ? none : counts, value, 2,
                                      d / 2,          1,  d ? "{\"level\": 3}" : "{}"};
            document[d] = one;
        }
        ShardImage image = shard_image(&made, document, 4);
        take(t, image.bytes, image.size);
        free(image.bytes);
    }
}

static void each_logprobs(const Target *t, TakeInput take) {
    struct {
        LogprobHeader header;
        float value[100];
    } file = {0};
    LogprobHeader *h = &file.header;
    memcpy(h->begin.magic, LOGPROBS_MAGIC, 8);
    h->begin.version = LOGPROBS_VERSION, h->begin.byte_order = FILE_BYTE_ORDER, h->begin.header_bytes = 256;
    h->tokens = 100, h->documents = 4, h->targets = 50, h->temperature = 1;
    for (size_t i = 0; i < 100; i++) file.value[i] = i % 2 ? -(float)i : NAN;
    mend_logprobs((unsigned char *)&file, sizeof(file));
    take(t, &file, sizeof(file));
}

static void each_seed(const Target *t, TakeInput take) {
    char pattern[256];
    if (t->open == open_shard) each_kind(t, take);
    if (t->open == open_logprobs) each_logprobs(t, take);
    for (size_t i = 0; i < COUNT_OF(t->seeds) && t->seeds[i]; i++)
        if (*t->seeds[i] == '=')
            take(t, t->seeds[i] + 1, strlen(t->seeds[i]) - 1);
        else
            each_file(t, t->seeds[i], take);
    snprintf(pattern, sizeof(pattern), "test/fuzz/found/%s-*", t->name);
    each_file(t, pattern, take);
}

static void target_begin(const Target *t) {
    static cJSON_Hooks hooks = {fuzz_allocate, fuzz_free};
    char command[1000];
    cJSON_InitHooks(&hooks);
    voice.silent = 1; // notes are no findings
    fuzz.keeps = t->open == open_option_file;
    snprintf(command, sizeof(command), "rm -rf '%s'/*; cp %s '%s'", scratch_folder(), t->beside, scratch_folder());
    if (t->beside && system(command)) fuzz_found("cannot copy %s", t->beside);
}

#ifdef FUZZING
// ---- libFuzzer ------------------------------------------------------------------------------------------------------
static const Target *fuzzed;
static size_t seeds;

static void write_seed(const Target *t, const void *bytes, size_t count) {
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s-seed-%zu", getenv("FUZZ_SEEDS"), t->name, seeds++);
    if (count <= FUZZ_BYTES) write_file(path, bytes, count);
}

static void remove_scratch(void) { scratch_remove(NULL); }

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *name = getenv("FUZZ_TARGET");
    (void)argc, (void)argv;
    for (size_t i = 0; i < TARGETS; i++) {
        if (!name) puts(targets[i].name);
        if (name && !strcmp(name, targets[i].name)) fuzzed = &targets[i];
    }
    if (!fuzzed) exit(name != NULL);
    each_seed(fuzzed, write_seed);
    atexit(remove_scratch);
    target_begin(fuzzed);
    return freopen("/dev/null", "w", stdout) == NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    fuzz_one(fuzzed, bytes, count);
    return 0;
}
#else
// ---- without libFuzzer: seeds, and some changes of each -------------------------------------------------------------
#define FUZZ_CHANGES 100

static size_t *inputs; // of all targets, shared with the child that tries them

static void try_changes(const Target *t, const void *bytes, size_t count) {
    static char copy[FUZZ_BYTES + 1024];
    const size_t kept = min_size(count, FUZZ_BYTES);
    fuzz_one(t, bytes, kept);
    ++*inputs;
    for (size_t i = 0; i < (count > 4096 ? FUZZ_CHANGES / 2 : FUZZ_CHANGES); i++, ++*inputs) {
        memcpy(copy, bytes, kept);
        fuzz_one(t, copy, damage_at_random(copy, kept, i % 4 ? min_size(kept, 2048) : kept));
    }
}

static void try_target(const void *target) {
    const struct rlimit limit = {30, 30}; // seconds of CPU time: a hang ends here
    const Target *t = (const Target *)target;
    setrlimit(RLIMIT_CPU, &limit);
    target_begin(t);
    each_seed(t, try_changes);
}

TEST(every_parser) {
    inputs = (size_t *)mmap(NULL, sizeof(size_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < TARGETS; i++) {
        const Child *child = run_child(try_target, &targets[i]);
        if (child->code)
            test_fail("%s: exit code %d at input %zu: %.2000s", targets[i].name, child->code, *inputs, child->err);
    }
    printf("             %zu inputs of %zu parsers\n", *inputs, TARGETS);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
#endif
