// Attention of few queries over the keys of a cache. Op set "cuda" cuts the keys into parts (cuda/attention_split.cuh);
// the tests hold for all op sets.
#ifndef TEST_OPS_ATTENTION_SPLIT_H
#define TEST_OPS_ATTENTION_SPLIT_H

// groups of 1 to 66 heads; heads of every kernel, whole and padded
static const Heads split_shapes[] = {{4, 1, 128}, {3, 3, 20},  {20, 1, 16}, {8, 2, 64}, {2, 1, 512},
                                     {66, 1, 16}, {4, 2, 256}, {1, 1, 128}, {6, 2, 80}, {2, 1, 300}};
enum { SPLIT_SHAPES = COUNT_OF(split_shapes) };

// Texts of one query and of few, of one key and of many, some with more queries than the split takes
TEST(attention_split_keys) {
    static const struct {
        size_t count, most, room, window, tokens; // tokens: of a slot; they set the number of parts
    } cases[] = {{1, 1, 300, 0, 4096},  {2, 1, 130, 0, 300},  {1, 1, 1, 0, 4096},    {3, 17, 150, 0, 4096},
                 {2, 1, 90, 1, 4096},   {70, 1, 70, 9, 1024}, {1, 5, 200, 64, 4096}, {2, 20, 66, 20, 100},
                 {64, 1, 65, 0, 65536}, {5, 3, 100, 7, 4096}};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t h = i % 3; h<SPLIT_SHAPES; h += cases[i].count> 20 || CASE_STEP > 1 ? 4 : 1) {
            const TextSlots slots = {cases[i].count, cases[i].tokens};
            case_window = cases[i].window, case_slots = slots;
            attention_gaps_case(cases[i].count, cases[i].most, cases[i].room, split_shapes[h]);
        }
    case_window = 0, case_slots = no_slots;
}

// Ranges of keys one after another: a range may have no key that a query sees.
TEST(attention_split_keys_in_ranges) {
    static const size_t lengths[] = {140, 5, 269}, windows[] = {0, 31, 0, 200};
    const TextSlots slots = {3, 4096};
    for (size_t h = 0; h < SPLIT_SHAPES; h += CASE_STEP == 1 ? 1 : 3) {
        case_window = windows[h % 4], case_slots = slots;
        chunk_in_parts(lengths, 3, 409 + h % 4, 414, split_shapes[h], 1 + h % MOST_PARTS, 1.0, 1.0);
        chunk_in_parts(lengths, 3, 139, 146, split_shapes[h], 2, 8.0, 60.0);
    }
    case_window = 0, case_slots = no_slots;
}

// A text has the same bits alone and with other texts.
TEST(attention_split_keys_bits) {
    enum { TEXTS = 5, ROOM = 300, NH = 4, NKV = 2, HD = 64, Q = NH * HD };
    const size_t rows[TEXTS] = {1, 3, 1, 40, 1}, row = Q * dtype_size(ops->stored), one = NH * dtype_size(ops->summed);
    Span span[TEXTS];
    size_t n = 0;
    for (size_t i = 0; i < TEXTS; i++) {
        const size_t document = i * ROOM, end = document + 41 + test_random_below(ROOM - 41);
        const Span of = {document, end - rows[i], end, n};
        span[i] = of, n += rows[i];
    }
    AttentionShape shape = {{span, TEXTS, 0, 0}, NH, NKV, HD, 0.125, all_keys, 0, 0, {TEXTS, 4096}};
    case_of("", "%d texts", TEXTS);
    Guarded *q = input("q", n * Q), *k = input("k", TEXTS * ROOM * NKV * HD), *v = input("v", TEXTS * ROOM * NKV * HD);
    Guarded *out = output("out", n * Q), *lse = sums_out("lse", n * NH);
    Guarded *scratch = scratch_of(SCRATCH_FOR(attention, n, NH, NKV, HD, shape.slots));
    char *bits = (char *)case_memory(n * row), *lse_bits = (char *)case_memory(n * one);
#define RUN(at)                                                                                                        \
    CALL(ops->attention_forward((char *)out->data + (at)*row, (Summed *)((char *)lse->data + (at)*one),                \
                                (Stored *)((char *)q->data + (at)*row), k->data, v->data, &shape, scratch->data))
    RUN(0);
    ops->copy_out(bits, out->data, n * row), ops->copy_out(lse_bits, lse->data, n * one);
    for (size_t i = 0; i < TEXTS; i++) {
        Span alone = span[i];
        const size_t at = alone.row;
        alone.row = 0, shape.spans.span = &alone, shape.spans.count = 1;
        char *now = (char *)case_memory(rows[i] * row), *now_lse = (char *)case_memory(rows[i] * one);
        RUN(at);
        ops->copy_out(now, (char *)out->data + at * row, rows[i] * row);
        ops->copy_out(now_lse, (char *)lse->data + at * one, rows[i] * one);
        if (memcmp(now, bits + at * row, rows[i] * row) || memcmp(now_lse, lse_bits + at * one, rows[i] * one))
            test_fail("text %zu alone has other bits", i);
    }
#undef RUN
}
#endif
