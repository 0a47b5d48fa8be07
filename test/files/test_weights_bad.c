/*
Wrong files of weights: each must be refused with exit code 1 and one line that names what is wrong, before anything is
computed with it. Then golden files with random damage: whatever comes of it, never a crash, a hang or a huge allocation.
*/
#include <setjmp.h>
#include <stdlib.h>

// The last test runs thousands of refusals in one process: there, `exit` returns to it.
static jmp_buf *exit_return;

__attribute__((noreturn)) static void returning_exit(int code) {
    if (exit_return) longjmp(*exit_return, 1 + code);
    exit(code);
}
#define exit returning_exit

#include "bad_texts.h"
#include "weight_files.h"
#include <sys/mman.h>
#include <sys/resource.h>

// ---- damage that is a change of text: bad_texts.h ---------------------------------------------------------------------------

TEST(wrong_texts) {
    for (size_t i = 0; i < sizeof(bad_texts) / sizeof(bad_texts[0]); i++) {
        const BadText *bad = &bad_texts[i];
        const char *copy = copy_golden(bad->golden);
        char path[PATH_MAX];
        test_case("%s, %s: \"%.60s\" for \"%.60s\"", bad->golden, bad->file, bad->replace, bad->find);
        path_join(path, copy, bad->file);
        edit_file(path, bad->find, bad->replace);
        expect_bad(copy, bad->words);
    }
}

// ---- damage to the folder ------------------------------------------------------------------------------------------------------
TEST(wrong_folders) {
    const char *copy = copy_golden("llama"), *empty = scratch_path("empty-folder");
    char path[PATH_MAX];
    expect_bad(scratch_path("nothing-here"),
               "nothing-here: No such file or directory; a model is a Hugging Face directory");
    mkdir(empty, 0777);
    expect_bad(empty, "empty-folder: holds no config.json");
    run_command("rm '%s/model.safetensors'", copy, "");
    expect_bad(copy, "model: holds neither model.safetensors nor model.safetensors.index.json");
    run_command("echo > '%s/pytorch_model.bin'", copy, "");
    expect_bad(copy, "save the model as safetensors (pytorch_model.bin is not read)");
    run_command("mkdir '%s/model.safetensors'", copy, "");
    expect_bad(copy, "model.safetensors: is not a regular file");
    run_command("rmdir '%s/model.safetensors' && mkfifo '%s/model.safetensors'", copy, copy);
    expect_bad(copy, "model.safetensors: is not a regular file");
    path_join(path, copy, CONFIG);
    write_file(path, "", 0);
    expect_bad(copy, "config.json: is empty");
    write_file(path, "{}", 2);
    expect_bad(copy, "config.json: has neither architectures nor model_type");
    write_file(path, "[]", 2);
    expect_bad(copy, "config.json: is not a JSON object");
    write_file(path, "{}\0{}", 5);
    expect_bad(copy, "config.json: is not valid JSON");
    assert_int_equal(truncate(path, (off_t)HF_CONFIG_MAX + 1), 0);
    expect_bad(copy, "config.json: has 16777217 bytes, more than the 16777216 such a file may have");
}

// Objects within objects, in the header of a file: neither the stack nor the patience of the reader ends.
TEST(nested_headers) {
    const size_t depth = 500000;
    const char *copy = copy_golden("llama");
    char *text = (char *)case_memory(depth * 5 + 10), path[PATH_MAX];
    size_t length = 0;
    for (size_t i = 0; i < depth; i++) length += (size_t)sprintf(text + length, "{\"a\":");
    path_join(path, copy, MODEL);
    write_safetensors(path, text, length, "", 0);
    expect_bad(copy, "is not valid JSON");
    length = 0;
    for (size_t i = 0; i < 900; i++) length += (size_t)sprintf(text + length, "{\"a\":");
    text[length++] = '1';
    memset(text + length, '}', 900);
    write_safetensors(path, text, length + 900, "", 0);
    expect_bad(copy, "its entry has the key \"a\"");
}

// A JSON text that would become gigabytes of tree.
TEST(json_bombs) {
    const char *copy = copy_golden("llama");
    const size_t length = 12u << 20;
    char path[PATH_MAX], *text = (char *)case_memory(length);
    path_join(path, copy, CONFIG);
    memset(text, ',', length);
    write_file(path, text, length);
    expect_bad(copy, "config.json: holds more than 2097152 JSON values");
    memset(text, '[', 1u << 20);
    write_file(path, text, 1u << 20);
    expect_bad(copy, "config.json: is not valid JSON"); // and no stack overflow
}

// ---- damage to the bytes of a safetensors file ------------------------------------------------------------------------------------
TEST(wrong_safetensors_bytes) {
    const char *copy = copy_golden("llama");
    char path[PATH_MAX];
    size_t bytes;
    path_join(path, copy, MODEL);
    char *file = read_whole(path, &bytes);
    write_file(path, file, 7);
    expect_bad(copy, "is too short for a safetensors file");
    write_file(path, "version https://git-lfs.github.com/spec/v1\noid", 46);
    expect_bad(copy, "model.safetensors: is a pointer of git-lfs, not the file itself");
    write_file(path, file, 1000);
    expect_bad(copy, "model.safetensors: claims a header of 2120 bytes; it has 1000 bytes");
    write_file(path, file, bytes - 1);
    expect_bad(copy, "reaches to byte 165600 of the data, of which there are 165599; is the file truncated?");
    write_file(path, file, bytes + 1); // read_whole leaves a zero behind the text
    expect_bad(copy, "1 bytes behind the last tensor belong to none");
    uint64_t header = 100000001;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    assert_int_equal(truncate(path, 200000000), 0);
    expect_bad(copy, "claims a header of 100000001 bytes");
    header = UINT64_MAX;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    expect_bad(copy, "claims a header of 18446744073709551615 bytes");
    header = 0;
    memcpy(file, &header, 8);
    write_file(path, file, bytes);
    expect_bad(copy, "model.safetensors: is not valid JSON");
    write_file(path, file, 0);
    expect_bad(copy, "model.safetensors: is empty");
}

// ---- flat .bin ------------------------------------------------------------------------------------------------------------------------
// Writes `header` and `bytes` of data; with `sign` the checksum is made right.
static void write_flat(const char *path, FlatHeader header, const char *data, size_t bytes, int sign) {
    char *file = (char *)case_memory(sizeof(header) + bytes);
    if (sign) header.checksum = flat_checksum(&header);
    memcpy(file, &header, sizeof(header));
    memcpy(file + sizeof(header), data, bytes);
    write_file(path, file, sizeof(header) + bytes);
}

TEST(wrong_flat_files) {
    const char *path = scratch_path("model.bin");
    WeightSource *source = weights_open(GOLDEN "llama-tied");
    FlatHeader good, bad;
    size_t bytes;
    weights_convert(source, path, DTYPE_BF16);
    weights_close(source);
    char *file = read_whole(path, &bytes);
    size_t data = bytes - sizeof(good);
    memcpy(&good, file, sizeof(good));
    write_flat(path, good, file + sizeof(good), data, 1);
    expect_good(path);
#define EXPECT_BAD_HEADER(change, sign, words)                                                                         \
    do {                                                                                                               \
        bad = good;                                                                                                    \
        change;                                                                                                        \
        write_flat(path, bad, file + sizeof(good), data, sign);                                                        \
        expect_bad(path, words);                                                                                       \
    } while (0)
    EXPECT_BAD_HEADER(bad.magic[0] = 's', 1, "model.bin: is neither a flat .bin nor an llm.c GPT-2 .bin");
    EXPECT_BAD_HEADER(bad.byte_order = FLAT_BYTE_ORDER_REV, 1, "was written on a machine of the other byte order");
    EXPECT_BAD_HEADER(bad.byte_order = 3, 1, "its byte order mark is damaged");
    EXPECT_BAD_HEADER(bad.version = 2, 1, "is a flat .bin of version 2, this program reads version 1");
    EXPECT_BAD_HEADER(bad.header_bytes = 1ull << 62, 1, "claims a header of 4611686018427387904 bytes");
    EXPECT_BAD_HEADER(bad.config[9] ^= 1, 0, "its header is damaged (checksum)");
    EXPECT_BAD_HEADER(bad.dtype = 4, 1, "element type 4 is unknown");
    EXPECT_BAD_HEADER(bad.elements++, 1, "claims 25249 elements, its model has 25248");
    EXPECT_BAD_HEADER(bad.elements = UINT64_MAX, 1, "claims 18446744073709551615 elements");
    EXPECT_BAD_HEADER(bad.dtype = DTYPE_FP32, 1, "so it is truncated; 105088 were expected");
    EXPECT_BAD_HEADER(memset(bad.config, 'a', sizeof(bad.config)), 1, "the model in its header has no end");
    EXPECT_BAD_HEADER(memset(bad.config, 0, sizeof(bad.config)), 1, "unknown model ''");
    EXPECT_BAD_HEADER(strcpy(bad.config, "mamba,hidden_size=4"), 1, "model.bin: unknown model 'mamba'");
    EXPECT_BAD_HEADER(strcpy(bad.config, "llama,hidden_size=-4"), 1, "model.bin: hidden_size=-4 is not a whole number");
    EXPECT_BAD_HEADER(strcpy(bad.config, "llama,layers=4"), 1, "model.bin: unknown key 'layers'");
    write_file(path, file, bytes - 1);
    expect_bad(path, "so it is truncated");
    write_file(path, file, 4095);
    expect_bad(path, "is truncated: 4095 bytes, the header alone has 4096");
    write_file(path, file, bytes + 1);
    expect_bad(path, "so something is behind the weights");
    write_file(path, file, 3);
    expect_bad(path, "is neither a flat .bin nor an llm.c GPT-2 .bin; a Hugging Face model is given as its directory");
    write_file(path, file, 0);
    expect_bad(path, "model.bin: is empty");
    expect_bad("/dev/null", "/dev/null: is not a regular file");
    expect_bad(GOLDEN "llama/model.safetensors", "give the directory it is in");
}

// ---- llm.c ------------------------------------------------------------------------------------------------------------------------------
TEST(wrong_llmc_files) {
    static const struct {
        int field, value;
        const char *words;
    } cases[] = {
        {0, (int)__builtin_bswap32(20240326), "was written on a machine of the other byte order"},
        {0, 20240520, "is a token shard of llm.c; it belongs to --data"},
        {0, 20240803, "is a Llama 3 checkpoint of llm.c, which is not supported"},
        {1, 1, "is an llm.c model of version 1; 3 (fp32) and 5 (bf16) are read"},
        {2, -1, "max_position_embeddings=-1 is not a whole number"},
        {3, 0, "vocab_size=0 is out of range"},
        {4, 2000000000, "num_hidden_layers=2000000000 is out of range"},
        {4, 3, "so it is truncated"},
        {4, 1, "so something is behind the weights"},
        {5, 7, "hidden_size 24 is not a multiple of num_attention_heads 7"},
        {6, 25, "hidden_size 25 is not a multiple of num_attention_heads 3"},
        {7, 100, "padded vocabulary 100 does not fit vocabulary 101"},
        {7, 2147483647, "padded vocabulary 2147483647 does not fit vocabulary 101"},
        {7, 256, "so it is truncated"},
    };
    const char *path = scratch_path("gpt2.bin");
    size_t bytes;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        test_case("field %d is %d", cases[i].field, cases[i].value);
        char *file = read_whole(GOLDEN "gpt2/gpt2_llmc_bf16.bin", &bytes);
        memcpy(file + 4 * cases[i].field, &cases[i].value, 4);
        write_file(path, file, bytes);
        expect_bad(path, cases[i].words);
    }
    test_case("lengths");
    {
        char *file = read_whole(GOLDEN "gpt2/gpt2_llmc_bf16.bin", &bytes);
        write_file(path, file, bytes - 2);
        expect_bad(path, "so it is truncated");
        write_file(path, file, 1000);
        expect_bad(path, "is truncated: 1000 bytes, the header alone has 1024");
        write_file(path, file, bytes + 1);
        expect_bad(path, "so something is behind the weights");
    }
}

// ---- random damage ------------------------------------------------------------------------------------------------------------------------
enum { BATCH = 100 };

typedef struct {
    const char *golden,
        *file;    // what is damaged; a copy of the folder is opened, or the file itself where golden is NULL
    size_t bytes; // of the file's beginning, where damage may lie
} Victim;

typedef struct {
    const Victim *victim;
    const char *original, *path, *model;
    size_t bytes, batch;
    size_t *running, *opened; // shared with the parent
} Damage;

// One or two changes: a bit, a byte, a piece taken out, doubled or cut off, a number put in its place.
static size_t damage(char *file, size_t bytes, size_t limit) {
    static const char *const numbers[] = {
        "-1",         "0",   "1e999", "18446744073709551616", "9007199254740993", "null", "[]", "{}", "\"\"",
        "4294967295", "0.5", "true"};
    size_t changes = 1 + test_random_below(2), length;
    while (changes-- && bytes > 16) {
        limit = min_size(limit, bytes);
        size_t at = test_random_below(limit);
        size_t n = min_size(1 + test_random_below(40), bytes - at);
        switch (test_random_below(8)) {
        case 0: file[at] ^= (char)(1 << test_random_below(8)); break;
        case 1: file[at] = (char)test_random(); break;
        case 2: file[at] = "{}[],:\"\\0-e. "[test_random_below(13)]; break;
        case 3: memmove(file + at, file + at + n, bytes - at - n), bytes -= n; break;
        case 4: memmove(file + at + n, file + at, bytes - at), bytes += n; break; // there is room for 4 x 40 bytes
        case 5: bytes = 1 + at; break;
        case 6: // a number in the text
            while (at < limit && !(file[at] >= '0' && file[at] <= '9')) at++;
            length = strlen(numbers[n % 12]);
            memmove(file + at + length, file + at, bytes - at);
            memcpy(file + at, numbers[n % 12], length), bytes += length;
            break;
        default: memset(file + at, (int)test_random_below(256), n);
        }
    }
    return bytes;
}

// The length before a safetensors header, or the checksum of a flat header, made right: or the damage stops at the first check.
static void repair(char *file, size_t bytes, const char *name, size_t longer_by) {
    FlatHeader *header = (FlatHeader *)(void *)file;
    uint64_t length;
    if (text_ends_with(name, ".safetensors") && bytes > 8) {
        memcpy(&length, file, 8);
        length += longer_by;
        memcpy(file, &length, 8);
    } else if (text_ends_with(name, "flat.bin") && bytes >= sizeof(*header)) {
        header->checksum = flat_checksum(header);
    }
}

static void open_and_read(const char *path) {
    WeightSource *source = weights_open(path);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        size_t count = min_size(parameter_elements(&source->model.parameters[i]), 4096);
        char values[4096 * 4];
        weights_read(source, i, parameter_elements(&source->model.parameters[i]) - count, count, DTYPE_FP32, values);
    }
    weights_close(source);
}

static void close_above(int first) {
    for (int fd = first; fd < first + 8; fd++) close(fd);
}

static void damage_batch(const void *context) {
    const Damage *d = (const Damage *)context;
    struct rlimit limit = {60, 60}; // seconds of processor time: a hang ends here
    struct rusage usage;
    jmp_buf back;
    int first = dup(STDIN_FILENO);
    close(first);
    setrlimit(RLIMIT_CPU, &limit);
    if (!freopen("/dev/null", "w", stderr)) exit(1);
    testing.random = d->batch * 1000003;
    for (volatile size_t i = 0; i < BATCH; i++) {
        char *file = (char *)case_memory(d->bytes + 1024);
        *d->running = d->batch * BATCH + i;
        memcpy(file, d->original, d->bytes);
        size_t bytes = damage(file, d->bytes, d->victim->bytes);
        if (test_random_below(4)) repair(file, bytes, d->victim->file, bytes - d->bytes);
        write_file(d->path, file, bytes);
        exit_return = &back;
        if (!setjmp(back)) {
            open_and_read(d->model);
            ++*d->opened;
        }
        exit_return = NULL;
        close_above(first);
    }
    getrusage(RUSAGE_SELF, &usage);
    if (usage.ru_maxrss > 1 << 20) printf("took %ld KiB of memory\n", usage.ru_maxrss), fflush(stdout), _Exit(1);
    _Exit(0); // refusals end the program and so free nothing; here that is no leak
}

// As many batches as asked for: STREAMBP_DAMAGE=50 for a long run.
TEST(random_damage) {
    static const Victim victims[] = {
        {"llama", CONFIG, 1u << 20},
        {"gpt2", CONFIG, 1u << 20},
        {"qwen2", CONFIG, 1u << 20},
        {"llama-tied", MODEL, 2024},
        {"gpt2-hub", MODEL, 2416},
        {"llama-sharded", INDEX, 1u << 20},
        {"llama-sharded", "model-00002-of-00004.safetensors", 640},
        {NULL, "flat.bin", 400},
        {NULL, "gpt2_llmc.bin", 40},
    };
    const char *wanted = getenv("STREAMBP_DAMAGE");
    size_t batches = wanted ? (size_t)atol(wanted) : 3, v;
    size_t *shared = (size_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    WeightSource *source = weights_open(GOLDEN "qwen3");
    assert_true(shared != MAP_FAILED);
    weights_convert(source, scratch_path("flat.bin"), DTYPE_FP32);
    weights_close(source);
    run_command("cp '" GOLDEN "gpt2/gpt2_llmc_fp32.bin' '%s'", scratch_path("gpt2_llmc.bin"), "");
    for (v = 0; v < sizeof(victims) / sizeof(victims[0]); v++) {
        for (size_t b = 0; b < batches; b++) {
            char path[PATH_MAX];
            const char *folder = victims[v].golden ? copy_golden(victims[v].golden) : scratch_folder();
            Damage d = {&victims[v], NULL, path, NULL, 0, b, &shared[0], &shared[1]};
            test_case("%s %s, batch %zu", victims[v].golden ? victims[v].golden : "", victims[v].file, b);
            path_join(path, folder, victims[v].file);
            d.model = victims[v].golden ? folder : path;
            d.original = read_whole(path, &d.bytes);
            const Child *child = run_child(damage_batch, &d);
            write_file(path, d.original, d.bytes);
            if (child->code != 0)
                test_fail("damage %zu ended the program with %d: %s", shared[0], child->code, child->out);
        }
    }
    test_case("all");
    printf("             %zu files damaged, %zu of them still could be read\n", v * batches * BATCH, shared[1]);
    if (shared[1] == 0 || shared[1] * 2 > v * batches * BATCH) test_fail("%zu could be read", shared[1]);
    munmap(shared, 4096);
}

static const struct CMUnitTest tests[] = {
    LISTED(wrong_texts),      LISTED(wrong_folders),           LISTED(nested_headers),
    LISTED(json_bombs),       LISTED(wrong_safetensors_bytes), LISTED(wrong_flat_files),
    LISTED(wrong_llmc_files), LISTED(random_damage),
};

int main(int argc, char **argv) { RUN_TESTS(argc, argv, tests, NULL, scratch_remove); }
