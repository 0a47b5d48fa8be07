/*
The tokenizer: ids and decoded text of several hundred texts equal those of Hugging Face's tokenizers library
(test/golden/tokenizers, by make_tokenizers.py). Styles are those of nine families, and patterns of no model. Very long
words; text in pieces; chat. Damaged files, with and without a right checksum, are refused in one line or used without
harm.
*/
#include "test/base/damage.h"
#include "llmc/tokenizer/chat.h"
#include "llmc/tokenizer/tokenizer_pieces.h"
#include "llmc/base/text.h"

#define FOLDER "test/golden/tokenizers/"
static const char *const styles[] = {"gpt2",  "llama3", "qwen2", "qwen3.5", "gemma",  "llama2",  "mistral", "tekken",
                                     "o200k", "digits", "ruby",  "stages",  "pieces", "harmony", "gemma4",  "removed"};
enum { STYLES = COUNT_OF(styles), WHOLE = STYLES - 1 }; // the last one does not restore texts

static const char *style_path(const char *style, const char *ending) {
    static char path[128];
    snprintf(path, sizeof(path), FOLDER "%s.%s", style, ending);
    return path;
}

static Tokenizer *open_style(const char *style) { return tokenizer_open(style_path(style, "tok")); }

// ---- the texts of make_tokenizers.py --------------------------------------------------------------------------------
typedef struct {
    const char *text;
    size_t bytes;
} Text;

static size_t read_texts(Text *texts, size_t most) {
    size_t size, count = 0;
    const char *all = read_whole(FOLDER "texts.bin", &size);
    for (size_t at = 0; at < size; at += 4 + texts[count++].bytes) {
        uint32_t bytes;
        assert_true(count < most);
        memcpy(&bytes, all + at, 4);
        texts[count].text = all + at + 4, texts[count].bytes = bytes;
    }
    return count;
}

// Decodes ids to their whole text as the library does, with special tokens.
static char *decode_all(const Tokenizer *t, const int32_t *ids, size_t count, size_t *bytes) {
    size_t length, room = 1;
    for (size_t i = 0; i < count; i++) tokenizer_decode(t, ids[i], &length), room += 3 * length;
    char *text = (char *)case_memory(room);
    TextOut out = text_out_to(NULL, text);
    for (size_t i = 0; i < count; i++) {
        const char *part = tokenizer_decode(t, ids[i], &length);
        if (i == 0 && t->flags & TOKENIZER_STRIP_FIRST && length && *part == ' ') part++, length--;
        text_out(&out, part, length);
    }
    text_out_end(&out);
    *bytes = out.bytes;
    return text;
}

TEST(ids_and_texts_of_hugging_face) {
    static Text texts[600];
    for (size_t s = 0; s < STYLES; s++) {
        Tokenizer *t = open_style(styles[s]);
        TokenIds ids = {NULL, 0, 0};
        size_t size, at = 0, changed = 0;
        test_case("%s", styles[s]);
        size_t count = read_texts(texts, 600);
        assert_true(count > 400);
        const char *cases = read_whole(style_path(styles[s], "cases"), &size);
        for (size_t i = 0; i < count; i++) {
            uint16_t n, id;
            uint32_t bytes;
            size_t got;
            memcpy(&n, cases + at, 2), at += 2;
            ids.count = 0;
            tokenizer_encode(t, texts[i].text, texts[i].bytes, 1, &ids);
            for (size_t k = 0; k < min_size(n, ids.count); k++) {
                memcpy(&id, cases + at + 2 * k, 2);
                if (ids.id[k] != id) test_fail("text %zu: id %zu is %d, expected %d", i, k, ids.id[k], id);
            }
            if (ids.count != n) test_fail("text %zu: %zu ids, expected %d", i, ids.count, n);
            at += 2 * (size_t)n;
            memcpy(&bytes, cases + at, 4), at += 4;
            const char *expected = texts[i].text;
            if (bytes == UINT32_MAX)
                bytes = (uint32_t)texts[i].bytes;
            else
                expected = cases + at, at += bytes, changed++;
            const char *text = decode_all(t, ids.id, ids.count, &got);
            if (got != bytes || memcmp(text, expected, got) != 0)
                test_fail("text %zu is decoded to '%.*s', expected '%.*s'", i, (int)got, text, (int)bytes, expected);
        }
        assert_int_equal(at, size);
        assert_true(s >= WHOLE || changed < count / 2);
        free(ids.id);
        tokenizer_close(t);
    }
}

// Small and capital letters, marks and slashes, cut as by the library's regular expressions.
TEST(words_by_case) {
    static const struct {
        const char *style, *cut;
    } rows[] = {
        {"tekken", "camel|Case| HTTPServer| ABC| don|'t| DON|'Tx"},
        {"tekken", "\346\274\242|AB| \346\274\242ab| x\346\274\242|A|1|2|3|4"},
        {"tekken", "!!/\n/|x| /|usr|/| a|/b|!\r\n"},
        {"tekken", "\314\201|AB| !\314\201|a| \314\201\314\201| Z\314\201|B"},
        {"tekken", "\307\205x| \312\260|A| \302\252|B| \304\260I|'s|'LL|'\305\277"},
        {"o200k", "camel|Case| HTTPServer| ABC| don't| DON'T|x"},
        {"o200k", "\307\205x| \312\260|A| \302\252|B| \304\260I's|'LL'\305\277"},
        {"o200k", "A'S| a'Re|1|'ll| |123|45|  \n| x"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        Tokenizer *t = open_style(rows[i].style);
        char text[64], found[64];
        size_t bytes = 0, count = 0;
        test_case("%s, %s", rows[i].style, rows[i].cut);
        for (const char *c = rows[i].cut; *c; c++)
            if (*c != '|') text[bytes++] = *c;
        const size_t words = text_cut(t, (const unsigned char *)text, bytes), *cut = (const size_t *)t->cuts.at;
        for (size_t k = 0; k < words; k++, cut += 2) {
            assert_true(cut[1] > cut[0] && count + cut[1] - cut[0] + 1 < sizeof(found));
            if (k) found[count++] = '|';
            memcpy(found + count, text + cut[0], cut[1] - cut[0]), count += cut[1] - cut[0];
        }
        found[count] = 0;
        assert_string_equal(found, rows[i].cut);
        tokenizer_close(t);
    }
}

static void expect_ids(Tokenizer *t, const TokenIds *ids, const char *text, int prefix) {
    TokenIds expected = {NULL, 0, 0};
    if (prefix >= 0) token_ids_add(&expected, (uint32_t)prefix);
    tokenizer_encode(t, text, strlen(text), 1, &expected);
    assert_int_equal(ids->count, expected.count);
    assert_memory_equal(ids->id, expected.id, expected.count * sizeof(int32_t));
    free(expected.id);
}

// GPT-2 and Qwen prepend nothing, the others their first token. The end ids are eos_token's and those of the lists.
TEST(beginnings_and_ends) {
    static const char *const begin[] = {NULL, "<|im_start|>", NULL, NULL, "<s>", "<s>", "<s>", "<|im_start|>",
                                        NULL, NULL,           NULL, NULL, "<s>", NULL,  "<s>", NULL};
    size_t bytes;
    for (size_t s = 0; s < STYLES; s++) {
        Tokenizer *t = open_style(styles[s]);
        TokenIds ids = {NULL, 0, 0}, end = {NULL, 0, 0};
        test_case("%s", styles[s]);
        tokenizer_prompt(t, "a b", 3, &ids);
        assert_int_equal(t->prefix_count, begin[s] != NULL);
        const char *first = tokenizer_decode(t, ids.id[0], &bytes);
        assert_int_equal(tokenizer_is_special(t, ids.id[0]), begin[s] != NULL);
        if (begin[s]) assert_memory_equal(first, begin[s], strlen(begin[s]));
        expect_ids(t, &ids, "a b", begin[s] ? ids.id[0] : -1);
        const int harmony = !strcmp(styles[s], "harmony"); // there <|end|> ends the reasoning, too
        tokenizer_encode(t, harmony ? "<|call|><|end|>" : "<|end|>", harmony ? 15 : 7, 1, &end);
        assert_int_equal(end.count, 1 + harmony);
        assert_false(harmony && tokenizer_is_end(t, end.id[1]));
        assert_true(tokenizer_is_end(t, end.id[0]) && !tokenizer_is_end(t, ids.id[ids.count - 1]));
        end.count = 0;
        tokenizer_encode(t, "<|end|>", 7, 0, &end); // as plain text
        assert_true(end.count > 1);
        assert_int_equal(tokenizer_decode(t, (int32_t)t->ids, &bytes)[0], 0);
        tokenizer_decode(t, -1, &bytes);
        assert_int_equal(bytes, 0);
        free(ids.id), free(end.id);
        tokenizer_close(t);
    }
}

// ---- long texts -----------------------------------------------------------------------------------------------------
// Megabytes of one word, and of near misses of an added token at every byte, come back unchanged and soon.
TEST(long_texts) {
    enum { LONG = 1 << 20 };
    static const char *const patterns[] = {"a", "the",          " ",        "\n \t",     "<|end|",
                                           "1", "\347\214\253", "\314\201", "e\314\201", "\314\201\314\243"};
    enum { COMPOSED = 8 }; // from here on, NFC changes the text
    size_t bytes;
    for (size_t s = 0; s < WHOLE; s++) {
        Tokenizer *t = open_style(styles[s]);
        for (size_t p = 0; p < COUNT_OF(patterns); p++) {
            size_t piece = strlen(patterns[p]), length = LONG / 8 / piece * piece * (p < 2 ? 8 : 1);
            TokenIds ids = {NULL, 0, 0};
            test_case("%s, '%s'", styles[s], patterns[p]);
            char *text = (char *)case_memory(length);
            for (size_t i = 0; i < length; i += piece) memcpy(text + i, patterns[p], piece);
            tokenizer_encode(t, text, length, 1, &ids);
            char *back = decode_all(t, ids.id, ids.count, &bytes);
            size_t lost =
                t->words == WORDS_METASPACE_FIRST && *text == ' '; // it stands for the space that other styles prepend
            if (t->flags & TOKENIZER_COMPOSE && p >= COMPOSED)
                assert_true(bytes <= length && memcmp(text, back, bytes) != 0);
            else if (bytes != length - lost || memcmp(text + lost, back, bytes) != 0)
                test_fail("it does not come back");
            assert_true(ids.count > 0 && ids.count <= length + 1);
            free(ids.id);
        }
        tokenizer_close(t);
    }
}

// ---- pieces ---------------------------------------------------------------------------------------------------------
TEST(text_in_pieces) {
    static const char text[] =
        "a\303\251\342\202\254\360\237\231\202z\xff\342\202z\360\237\231\303\251\355\240\200\364\220\200\200\342";
    static const char whole[] =
        "a\303\251\342\202\254\360\237\231\202z\357\277\275\357\277\275z\357\277\275\303\251"
        "\357\277\275\357\277\275\357\277\275\357\277\275\357\277\275\357\277\275\357\277\275\357\277\275";
    size_t total = sizeof(text) - 1;
    for (size_t first = 0; first <= total; first++) {
        for (size_t second = first; second <= total; second++) {
            char memory[3 * sizeof(text)];
            TextOut out = text_out_to(NULL, memory);
            text_out(&out, text, first);
            text_out(&out, text + first, second - first);
            text_out(&out, text + second, total - second);
            text_out_end(&out);
            assert_int_equal(out.bytes, sizeof(whole) - 1);
            assert_memory_equal(memory, whole, out.bytes);
        }
    }
}

// Holds back bytes that can still become a character, and no others.
TEST(pieces_are_whole_characters) {
    static const char smile[] = "\360\237\231\202";
    char memory[64];
    TextOut out = text_out_to(NULL, memory);
    for (size_t i = 0; i < 4; i++) {
        text_out(&out, smile + i, 1);
        assert_int_equal(out.bytes, i < 3 ? 0 : 4);
    }
    text_out(&out, "\342\202", 2);
    assert_int_equal(out.bytes, 4);
    text_out(&out, "x", 1);
    assert_int_equal(out.bytes, 8); // U+FFFD and the x
    text_out(&out, "\340\200", 2);  // overlong
    assert_int_equal(out.bytes, 14);
}

// ---- chat -----------------------------------------------------------------------------------------------------------
static void expect_turn(const char *style, const char *system, const char *user, int first, const char *expected) {
    Tokenizer *t = open_style(style);
    TokenIds ids = {NULL, 0, 0};
    chat_turn(t, system, THINKING_AUTO, user, strlen(user), first, &ids);
    expect_ids(t, &ids, expected, -1);
    free(ids.id);
    tokenizer_close(t);
}

TEST(chat_is_the_template) {
    expect_turn("qwen2", NULL, " Hi <x>\n", 1,
                "<|im_start|>system\nBe brief.<|end|>\n<|im_start|>user\n Hi <x>\n<|end|>\n<|im_start|>assistant\n");
    expect_turn("qwen2", " You're it. ", "Hi", 1,
                "<|im_start|>system\n You're it. <|end|>\n<|im_start|>user\nHi<|end|>\n<|im_start|>assistant\n");
    expect_turn("qwen2", "not again", "And?", 0, "<|end|>\n<|im_start|>user\nAnd?<|end|>\n<|im_start|>assistant\n");
    expect_turn("gemma", NULL, " \343\200\200\302\205\tHi there\034 \n", 1, // its template trims
                "<s><|im_start|>user\nHi there<|end|>\n<|im_start|>model\n");
    expect_turn("gemma", NULL, " \n", 0, "<|end|>\n<|im_start|>user\n<|end|>\n<|im_start|>model\n");
}

// Reasoning is asked for or not when an answer begins, and forgotten in later turns.
TEST(chat_with_reasoning) {
#define ASKED(user) "<|im_start|>user\n" user "<|end|>\n<|im_start|>assistant\n"
#define OPENED      "<think>\n"
#define CLOSED      "<think>\n\n</think>\n\n"
    static const struct {
        Thinking thinking;
        const char *answer, *kept;
        const char *opening;
    } rows[] = {
        {THINKING_AUTO, "hm\n</think>\n\n Hello \n", " Hello", OPENED},
        {THINKING_ON, "a </think>\nb</think>\n\n\n", "", OPENED},
        {THINKING_ON, "b</think>c", "c", OPENED},
        {THINKING_ON, " no end\n", "<think>\n no end", OPENED},
        {THINKING_OFF, "Hello\n", "Hello", CLOSED},
        {THINKING_OFF, "", "", CLOSED},
        {THINKING_OFF, "x</think", "x</think", CLOSED},
    };
    Tokenizer *t = open_style("qwen3.5");
    const char *opening;
    assert_true(chat_forgets(t));
    assert_int_equal(chat_shown_opening(t, THINKING_ON, &opening), sizeof(OPENED) - 1);
    assert_int_equal(chat_shown_opening(t, THINKING_OFF, &opening), 0);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char expected[400];
        Scratch text = {NULL, 0, 0};
        TokenIds ids = {NULL, 0, 0};
        test_case("%s", rows[i].answer);
        chat_append_turn(&text, t, NULL, " Hi\n", 4, 1);
        for (size_t pass = 0; pass < 2; pass++) { // the text is unchanged
            ids.count = 0;
            chat_encode(t, &text, rows[i].thinking, &ids);
            snprintf(expected, sizeof(expected), ASKED("Hi") "%s", rows[i].opening);
            expect_ids(t, &ids, expected, -1);
        }
        chat_append_answer(&text, t, rows[i].thinking, rows[i].answer, strlen(rows[i].answer));
        chat_append_turn(&text, t, NULL, "And?", 4, 0);
        ids.count = 0;
        chat_encode(t, &text, rows[i].thinking, &ids);
        snprintf(expected, sizeof(expected), ASKED("Hi") "%s<|end|>\n" ASKED("And?") "%s", rows[i].kept,
                 rows[i].opening);
        expect_ids(t, &ids, expected, -1);
        free(text.at), free(ids.id);
    }
    tokenizer_close(t);
}

// Marks of reasoning that a file has of its own: gone from old answers, whatever the model wrote.
TEST(chat_with_channels) {
#define FINAL   "<|channel|>final<|message|>"
#define THOUGHT "<|channel|>analysis<|message|>hm <|end|><|start|>assistant"
    static const struct {
        const char *style, *answer, *kept;
    } rows[] = {
        {"harmony", THOUGHT FINAL " Hello \n", FINAL " Hello \n"},
        {"harmony", THOUGHT THOUGHT FINAL, FINAL},
        {"harmony", FINAL "Hello", FINAL "Hello"},
        {"harmony", "<|channel|>analysis<|message|>no end", "<|channel|>analysis<|message|>no end"},
        {"harmony", "", ""},
        {"gemma4", "<|channel>thought\nhm\n<channel|>Hello \n", "Hello"},
        {"gemma4", "a <|channel>b<|channel>c<channel|> d<channel|>e <|channel>no end", "a  de"},
        {"gemma4", " <channel|>", ""},
        {"gemma4", "", ""},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        char expected[400];
        Tokenizer *t = open_style(rows[i].style);
        Scratch text = {NULL, 0, 0};
        TokenIds ids = {NULL, 0, 0};
        test_case("%s", rows[i].answer);
        assert_true(chat_forgets(t));
        chat_append_turn(&text, t, NULL, "Hi", 2, 1);
        chat_append_answer(&text, t, THINKING_AUTO, rows[i].answer, strlen(rows[i].answer));
        chat_append_turn(&text, t, NULL, "And?", 4, 0);
        chat_encode(t, &text, THINKING_AUTO, &ids);
        snprintf(expected, sizeof(expected),
                 *rows[i].style == 'h'
                     ? "<|start|>user<|message|>Hi<|end|><|start|>assistant%s<|end|><|start|>user"
                       "<|message|>And?<|end|><|start|>assistant"
                     : "<s><|turn>user\nHi<turn|>\n<|turn>model\n%s<turn|>\n<|turn>user\nAnd?<turn|>\n"
                       "<|turn>model\n",
                 rows[i].kept);
        expect_ids(t, &ids, expected, -1);
        free(text.at), free(ids.id);
        tokenizer_close(t);
    }
}

// ---- refusals and damage --------------------------------------------------------------------------------------------
typedef struct {
    const char *path, *text, *system;
} Use;

static void encode_text(const void *context) {
    const Use *use = (const Use *)context;
    TokenIds ids = {NULL, 0, 0};
    tokenizer_encode(tokenizer_open(use->path), use->text, strlen(use->text), 1, &ids);
}

static void ask_for_chat(const void *context) {
    const Use *use = (const Use *)context;
    chat_check(tokenizer_open(use->path), use->system, THINKING_AUTO, 0);
}

static void ask_to_think(const void *context) {
    chat_check(tokenizer_open(((const Use *)context)->path), NULL, THINKING_OFF, 0);
}

// Makes every use of a file.
static void use_all(const void *context) {
    static const char *const texts[] = {
        "Hello, w\303\266rld's 1234 <|end|> e\314\201\314\243 \352\260\200\341\206\250 \n\n x",
        "  <extra>  <mask> <s> <tool>", "\342\226\201 \360\237\231\202", "DON'T", ""};
    Tokenizer *t = tokenizer_open((const char *)context);
    TokenIds ids = {NULL, 0, 0};
    size_t bytes, sum = 0;
    for (int32_t id = 0; id < (int32_t)min_size(t->ids, 5000); id++) {
        const char *text = tokenizer_decode(t, id, &bytes);
        for (size_t i = 0; i < bytes; i++) sum += (unsigned char)text[i];
        sum += (size_t)tokenizer_is_end(t, id);
    }
    for (size_t i = 0; t->flags & TOKENIZER_ENCODES && i < COUNT_OF(texts); i++) {
        tokenizer_prompt(t, texts[i], strlen(texts[i]), &ids);
        chat_turn(t, "s", (Thinking)(i % 3), texts[i], strlen(texts[i]), (int)i % 2, &ids);
    }
    for (size_t i = 0; i < ids.count; i++)
        if ((uint32_t)ids.id[i] >= t->ids) exit(3);
    if (sum == SIZE_MAX) exit(4);
    free(ids.id);
    tokenizer_close(t);
}

// Renews the checksum.
static void seal(const char *path, char *bytes, size_t count, size_t before) {
    (void)path, (void)before;
    if (count < 16) return;
    crc32_prepare();
    const uint32_t crc = crc32_of(0, bytes + 16, count - 16);
    memcpy(bytes + 12, &crc, 4);
}

// Copies a style's file to the scratch folder, for damage.
static DamageSuite damaged_style(const char *style) {
    const DamageSuite suite = {scratch_folder(), use_all, scratch_path("damaged.tok"), seal, 0};
    size_t size;
    test_case("%s", style);
    const char *file = read_whole(style_path(style, "tok"), &size);
    write_file(suite.context, file, size);
    return suite;
}

TEST(refusals) {
    static const struct {
        const char *path;
        ChildBody body;
        const char *text, *system;
        int code;
        const char *words;
    } cases[] = {
        {FOLDER "qwen2.tok", encode_text, "ab\xff", NULL, EXIT_RUNTIME, "not UTF-8 at byte 2 (0xff)"},
        {FOLDER "qwen2.tok", encode_text, "a\355\240\200", NULL, EXIT_RUNTIME, // half of a surrogate pair
         "not UTF-8 at byte 1 (0xed)"},
        {FOLDER "texts.bin", encode_text, "", NULL, EXIT_RUNTIME, "is not a tokenizer file"},
        {FOLDER "nothing.tok", encode_text, "", NULL, EXIT_RUNTIME, "nothing.tok: cannot be opened"},
        {FOLDER, encode_text, "", NULL, EXIT_RUNTIME, "is a folder; give the tokenizer.tok in it"},
        {FOLDER "gpt2.tok", ask_for_chat, "", NULL, EXIT_USAGE, "there is no chat template"},
        {FOLDER "gemma.tok", ask_for_chat, "", "x", EXIT_USAGE, "no system role; leave the system message out"},
        {FOLDER "qwen2.tok", ask_to_think, "", NULL, EXIT_USAGE, "--thinking: "},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const Use use = {cases[i].path, cases[i].text, cases[i].system};
        expect_refused(cases[i].body, &use, cases[i].code, cases[i].words);
    }
    const DamageSuite suite = damaged_style("qwen2");
    const Use decodes_only = {(const char *)suite.context, "", NULL};
    size_t size;
    char *file = read_whole(decodes_only.path, &size);
    memset(file + 32, 0, 4);
    seal(NULL, file, size, size);
    write_file(decodes_only.path, file, size);
    expect_refused(encode_text, &decodes_only, EXIT_USAGE, "; give the prompt with --prompt-ids");
    expect_refused(ask_for_chat, &decodes_only, EXIT_USAGE, "decodes only");
}

// PCRE2 patterns that do not compile, and one of 2^60 steps, are refused in one line.
TEST(bad_patterns) {
    static const char endless[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    static const struct {
        const char *pattern, *words;
    } rows[] = {
        {"x(?:y",
         "damaged.tok: PCRE2 cannot read pattern 1 of its pre-tokenizer: missing closing parenthesis, at byte "},
        {"(?<=x+)", "lookbehind assertion is not fixed length"},
        {"[z-a]", "range out of order in character class, at byte "},
        {"(?=x\\K)", "damaged.tok: "},
        {"(?:.+)+(?!)",
         "damaged.tok: its pre-tokenizer's pattern fails at character 0 of 60: match limit exceeded; write "},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const DamageSuite suite = damaged_style("removed");
        const Use use = {(const char *)suite.context, endless, NULL};
        Tokenizer *t = tokenizer_open(use.path);
        char *pattern = (char *)t->section[SECTION_PATTERNS];
        const size_t bytes = t->section_bytes[SECTION_PATTERNS];
        memset(pattern, ' ', bytes);
        memcpy(pattern, "(?x)", 4), memcpy(pattern + 4, rows[i].pattern, strlen(rows[i].pattern));
        seal(NULL, (char *)t->file, (size_t)t->bytes, 0);
        write_file(use.path, (const char *)t->file, (size_t)t->bytes);
        expect_refused(encode_text, &use, EXIT_RUNTIME, rows[i].words);
        tokenizer_close(t);
    }
}

// Sets random words of every section out of bounds, if they have any, with a right checksum.
static void change_numbers(const void *path) {
    static const uint32_t values[] = {0, 1, 0x7fffffff, 0x80000000u, 0xffffffffu, 0x10ffff, 0xd800};
    Tokenizer *t = tokenizer_open((const char *)path);
    const size_t bytes = (size_t)t->bytes;
    char *copy = (char *)case_memory(bytes);
    for (size_t i = 0; i < 3 * t->sections; i++) {
        const size_t words = t->section_bytes[i / 3] / 4;
        if (!words) continue;
        memcpy(copy, t->file, bytes);
        memcpy(copy + (t->section[i / 3] - t->file) + 4 * test_random_below(words), &values[test_random_below(7)], 4);
        seal(NULL, copy, bytes, bytes);
        write_file((const char *)path, copy, bytes);
        const int code = run_caught(use_all, path);
        if (code && (code != EXIT_RUNTIME || strchr(caught.message, '\n')))
            die("exit code %d: %s", code, caught.message);
    }
    tokenizer_close(t);
}

// Damage is noticed. A changed file with a right checksum is refused in one line or harmless.
TEST(damaged_files) {
#define TOK     "damaged.tok"
#define DAMAGED "damaged.tok: this tokenizer file is damaged: |is truncated|is not a tokenizer file"
    static const Damage rows[] = {
        CUT_TO(TOK, 0, "is empty"),
        CUT_TO(TOK, 45, DAMAGED),
        CUT_TO(TOK, 463, DAMAGED),
        CUT_TO(TOK, -1, DAMAGED),
        EXTENDED_BY(TOK, 8, DAMAGED),
        OTHER_NUMBER(TOK, 8, 4, 7, "of version 7, this program reads versions 1 to 5"),
        OTHER_NUMBER(TOK, 32, 4, 0, NULL), // decodes only
        OTHER_NUMBER(TOK, 8, 4, 0, "of version 0"),
        OTHER_NUMBER(TOK, 32, 4, 1 << 20, "unknown flags"),
        OTHER_NUMBER(TOK, 36, 4, 0, "its number of ids"),
        OTHER_NUMBER(TOK, 44, 4, WORDS_KINDS, "an unknown way to cut words"),
        OTHER_NUMBER(TOK, 48, 4, 1 << 30, "the id of unknown characters"),
        OTHER_NUMBER(TOK, 52, 4, TOKENIZER_SECTIONS + 1, "its number of sections"),
        OTHER_NUMBER(TOK, TOKENIZER_HEADER, 8, 1ull << 40, "a section lies outside of the file"),
    };
    for (size_t s = 0; s < STYLES; s++) {
        const DamageSuite suite = damaged_style(styles[s]);
        expect_damage_found(&suite, rows, COUNT_OF(rows));
        expect_flips_found(&suite, TOK, 30, DAMAGED "|is a tokenizer file of version");
        const Child *child = run_child(change_numbers, suite.context);
        if (child->code) test_fail("exit code %d: %s%s", child->code, child->out, child->err);
    }
}

// ---- the pieces of two tokenizers -----------------------------------------------------------------------------------
static void put_escaped(FILE *out, uint32_t point) {
    if (point == '"' || point == '\\' || (point < 0x800 && point >= 0x80) || point < 0x20)
        fprintf(out, "\\u%04x", point);
    else
        fputc((int)point, out);
}

// Writes a name of tokenizer.json: of a byte-level vocabulary in GPT-2's alphabet, else the spelling.
static void put_name(FILE *out, const Tokenizer *t, uint32_t id) {
    const int alphabet = (t->flags & TOKENIZER_BYTE_LEVEL) != 0;
    const int spelled = !alphabet && t->id_flags[id] & ID_IN_VOCABULARY;
    const uint32_t *offsets = spelled ? t->spelling_offsets : t->text_offsets;
    const unsigned char *text = spelled ? t->spelling : t->text;
    fputc('"', out);
    for (size_t i = offsets[id]; i < offsets[id + 1]; i++) {
        uint32_t point = text[i];
        for (uint32_t p = 0; alphabet && p < 0x144; p++)
            if (alphabet_byte(p) == (int)text[i]) point = p;
        if (alphabet || point < 0x80)
            put_escaped(out, point);
        else
            fputc((int)point, out); // part of a character in UTF-8
    }
    fputc('"', out);
}

// Writes the pieces of a tokenizer.tok as a tokenizer.json. id `other` has the name "other"; `more` added tokens follow
static const char *write_json(const Tokenizer *t, uint32_t other, uint32_t more) {
    const char *path = scratch_path("tokenizer.json"), *before = "";
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    for (int added = 0; added < 2; added++, before = "") {
        fputs(added ? "}}, \"added_tokens\": [" : "{\"model\": {\"vocab\": {", out);
        for (uint32_t id = 0; id < t->ids; id++) {
            if (!(t->id_flags[id] & ID_EXISTS) || added == ((t->id_flags[id] & ID_IN_VOCABULARY) != 0)) continue;
            fprintf(out, added ? "%s{\"id\": %u, \"content\": " : "%s", before, id);
            if (id == other)
                fputs("\"other\"", out);
            else
                put_name(out, t, id);
            fprintf(out, added ? "}" : ": %u", id);
            before = ", ";
        }
        for (uint32_t i = 0; added && i < more; i++)
            fprintf(out, "%s{\"id\": %u, \"content\": \"<more%u>\"}", before, t->ids + i, i), before = ", ";
    }
    fprintf(out, "], \"decoder\": {\"type\": \"Sequence\", \"decoders\": [{\"type\": \"%s\"}]}}",
            t->flags & TOKENIZER_BYTE_LEVEL ? "ByteLevel" : "Replace");
    assert_true(fclose(out) == 0);
    return path;
}

TEST(pieces_of_two_tokenizers) {
    static const char *const tried[] = {"qwen2", "llama2", "gpt2"};
    char path[128];
    assert_true(alphabet_byte(0x120) == ' ' && alphabet_byte(0x10a) == '\n' && alphabet_byte(0xe9) == 0xe9);
    assert_true(alphabet_byte(0x121) == 0x7f && alphabet_byte(0x142) == 0xa0 && alphabet_byte(0x143) == 0xad);
    for (size_t s = 0; s < COUNT_OF(tried); s++) {
        Tokenizer *t = open_style(tried[s]);
        test_case("%s", tried[s]);
        snprintf(path, sizeof(path), "%s", style_path(tried[s], "tok"));
        assert_true(pieces_same(path, write_json(t, NO_TOKEN, 0)));
        assert_true(pieces_same(write_json(t, NO_TOKEN, 2), path)); // further added tokens
        assert_false(pieces_same(path, write_json(t, 300, 0)));
        assert_false(pieces_same(path, write_json(t, t->ids - 1, 0))); // an added token
        assert_false(pieces_same(path, style_path("tekken", "tok")));
        tokenizer_close(t);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
