// Packing of pieces into streams: first-fit decreasing against a plain one, the fill of streams, every piece exactly
// once, orders from seed and epoch alone; and crc32 against its definition.
#include "test/base/child.h"
#include "llmc/base/hash.h"
#include "llmc/data/packing.h"

// ---- pieces ---------------------------------------------------------------------------------------------------------
static uint32_t *uniform_lengths(size_t count, size_t least, size_t most) {
    uint32_t *length = (uint32_t *)case_memory(count * sizeof(uint32_t));
    for (size_t i = 0; i < count; i++) length[i] = (uint32_t)(least + test_random_below(most - least + 1));
    return length;
}

// Returns lengths of a long-tailed distribution, those above T split as in the loader.
static uint32_t *lognormal_lengths(size_t count, double median, double sigma, size_t T) {
    uint32_t *length = (uint32_t *)case_memory(count * sizeof(uint32_t));
    for (size_t i = 0; i < count;) {
        double size = median * exp(sigma * test_normal());
        size_t left = size < 1 ? 1 : size > 1e7 ? 10000000 : (size_t)size;
        for (; left && i < count; i++) left -= length[i] = (uint32_t)min_size(left, T);
    }
    return length;
}

// Declares the packing p of these lengths and room e for its epochs.
#define PACKING(p, e, length, count, capacity, shuffle, seed)                                                          \
    SCOPED(packing_free)                                                                                               \
    Packing p = packing_allocate(length, sizeof(uint32_t), count, capacity, 0, shuffle, seed);                         \
    SCOPED(epoch_sequences_free) EpochSequences e = epoch_sequences_allocate(&p)

// ---- invariants of any epoch ----------------------------------------------------------------------------------------
static void check_epoch(const Packing *p, const EpochSequences *e) {
    unsigned char *seen = (unsigned char *)calloc(p->samples, 1), *stream = (unsigned char *)calloc(e->sequences, 1);
    size_t pieces = 0;
    assert_true(e->sequences >= 1 && e->sequences <= p->max_sequences);
    assert_int_equal(e->begin[0], 0);
    assert_int_equal(e->begin[e->sequences], p->samples);
    for (size_t s = 0; s < e->sequences; s++) {
        size_t positions = 0;
        if (e->permutation[s] >= e->sequences || stream[e->permutation[s]]++)
            test_fail("stream %u is not there once", e->permutation[s]);
        if (e->begin[s] >= e->begin[s + 1]) test_fail("stream %zu is empty", s);
        for (size_t i = e->begin[s]; i < e->begin[s + 1]; i++, pieces++) {
            if (e->order[i] >= p->samples || seen[e->order[i]]++) test_fail("piece %u is there twice", e->order[i]);
            positions += packing_length(p, e->order[i]);
        }
        if (positions > p->capacity) test_fail("stream %zu has %zu positions of %zu", s, positions, p->capacity);
    }
    assert_int_equal(pieces, p->samples);
    free(seen), free(stream);
}

TEST(every_piece_exactly_once) {
    static const size_t counts[] = {1, 2, 3, 7, 100, 4095, 4096, 4097, 9000, 30000};
    for (size_t c = 0; c < COUNT_OF(counts); c++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            size_t most = 1 + test_random_below(1000), capacity = most + test_random_below(3000);
            test_case("%zu pieces of %zu at most into %zu, %s", counts[c], most, capacity,
                      shuffle ? "shuffled" : "in order");
            PACKING(p, e, uniform_lengths(counts[c], 1, most), counts[c], capacity, shuffle, c);
            allocation_guard = 1;
            for (size_t epoch = 0; epoch < 4; epoch++) {
                packing_epoch(&p, &e, epoch);
                assert_int_equal(e.epoch, epoch);
                check_epoch(&p, &e);
            }
            allocation_guard = 0;
        }
    }
}

TEST(the_worst_case_of_streams_is_planned_for) {
    static const size_t lengths[] = {51, 50, 100, 1}; // of 100: one to a stream, two, one, a hundred
    for (size_t k = 0; k < 4; k++) {
        size_t count = 20000;
        const uint32_t *length = uniform_lengths(count, lengths[k], lengths[k]);
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            PACKING(p, e, length, count, 100, shuffle, 1);
            packing_epoch(&p, &e, 0);
            check_epoch(&p, &e);
            if (p.windows == 1) assert_int_equal(e.sequences, (count + 100 / lengths[k] - 1) / (100 / lengths[k]));
        }
    }
}

// ---- first-fit decreasing -------------------------------------------------------------------------------------------
// The definition: longest first, each into the first stream with room, found by linear search.
static size_t plain_first_fit(const PackingItem *item, size_t count, size_t capacity, uint32_t *bin) {
    size_t *used = (size_t *)calloc(count, sizeof(size_t)), streams = 0, b;
    for (size_t i = 0; i < count; i++) {
        for (b = 0; used[b] + item[i].positions > capacity;) b++;
        used[b] += item[i].positions;
        bin[i] = (uint32_t)b;
        streams = max_size(streams, b + 1);
    }
    free(used);
    return streams;
}

TEST(first_fit_decreasing_is_what_it_says) {
    for (size_t round = 0; round < 60; round++) {
        size_t count = 1 + test_random_below(600), most = 1 + test_random_below(200);
        size_t capacity = most + test_random_below(400);
        test_case("%zu pieces of %zu at most into %zu", count, most, capacity);
        uint32_t *length = uniform_lengths(count, 1, most), *bin = (uint32_t *)case_memory(count * sizeof(uint32_t));
        SCOPED(packing_free) Packing p = packing_allocate(length, sizeof(uint32_t), count, capacity, 0, 1, round);
        for (size_t i = 0; i < count; i++) p.item[i].sample = (uint32_t)i, p.item[i].positions = length[i];
        packing_sort(p.item, p.spare, count);
        for (size_t i = 1; i < count; i++) {
            const PackingItem *a = &p.item[i - 1], *b = &p.item[i];
            if (a->positions < b->positions || (a->positions == b->positions && a->sample >= b->sample))
                test_fail("item %zu is out of order", i);
        }
        assert_int_equal(packing_first_fit(&p, count), plain_first_fit(p.item, count, capacity, bin));
        assert_memory_equal(p.bin, bin, count * sizeof(uint32_t));
    }
}

TEST(lengths_of_four_bytes_are_sorted) {
    PackingItem item[1000], spare[1000];
    for (size_t i = 0; i < 1000; i++) item[i].positions = (uint32_t)test_random(), item[i].sample = (uint32_t)i;
    packing_sort(item, spare, 1000);
    for (size_t i = 1; i < 1000; i++) assert_true(item[i - 1].positions >= item[i].positions);
}

// ---- fill -----------------------------------------------------------------------------------------------------------
TEST(long_tails_fill_streams) { // within seconds: a quadratic search would take hours
    static const struct {
        size_t pieces, T, B;
        double median, sigma;
    } cases[] = {{1000000, 8192, 1, 300, 1.3}, {100000, 4096, 4, 600, 1.5}, {50000, 32768, 1, 1500, 1.4},
                 {50000, 131072, 1, 300, 1.0}, {60000, 2048, 8, 100, 2.0},  {20000, 16384, 2, 3000, 1.3}};
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        test_case("case %zu", c);
        uint32_t *length = lognormal_lengths(cases[c].pieces, cases[c].median, cases[c].sigma, cases[c].T);
        PACKING(p, e, length, cases[c].pieces, cases[c].B * cases[c].T, 1, c);
        packing_epoch(&p, &e, c % 2);
        check_epoch(&p, &e);
        const double fill = packing_fill(&p, e.sequences);
        if (fill < 0.98) test_fail("%zu streams in %zu windows, %.2f %% full", e.sequences, p.windows, 100 * fill);
        assert_true(c || p.windows > 10);
    }
}

// ---- orders ---------------------------------------------------------------------------------------------------------
// Returns the pieces of an epoch, stream after stream.
static uint32_t *walk(const Packing *p, const EpochSequences *e) {
    uint32_t *out = (uint32_t *)case_memory(p->samples * sizeof(uint32_t));
    size_t n = 0;
    for (size_t s = 0; s < e->sequences; s++)
        for (size_t i = e->begin[e->permutation[s]]; i < e->begin[e->permutation[s] + 1]; i++) out[n++] = e->order[i];
    return out;
}

// Counts pairs of pieces with the same successor in both.
static size_t same_neighbours(const uint32_t *a, const uint32_t *b, size_t count) {
    uint32_t *next = (uint32_t *)case_memory(count * sizeof(uint32_t));
    size_t same = 0;
    for (size_t i = 0; i + 1 < count; i++) next[a[i]] = a[i + 1];
    for (size_t i = 0; i + 1 < count; i++) same += next[b[i]] == b[i + 1];
    return same;
}

TEST(epochs_and_seeds_differ_and_repeat) {
    static const struct {
        size_t count, least, most, capacity;
    } cases[] = {{40000, 1, 700, 4096}, {64, 25, 25, 100}}; // and four to a stream: only the order can differ
    for (size_t c = 0; c < 2; c++) {
        const size_t count = cases[c].count, most = c ? 10 : count / 100;
        uint32_t *length = uniform_lengths(count, cases[c].least, cases[c].most);
        PACKING(p, e, length, count, cases[c].capacity, 1, 7);
        PACKING(q, f, length, count, cases[c].capacity, 1, 8);
        packing_epoch(&p, &e, 0), packing_epoch(&q, &f, 0);
        const uint32_t *first = walk(&p, &e), *other = walk(&q, &f);
        packing_epoch(&p, &e, 1);
        const uint32_t *second = walk(&p, &e);
        packing_epoch(&p, &e, 0);
        assert_memory_equal(first, walk(&p, &e), count * sizeof(uint32_t));
        assert_true(same_neighbours(first, second, count) < most); // neighbours change, too
        assert_true(same_neighbours(first, other, count) < most);
    }
}

TEST(not_shuffled_is_the_order_of_the_file) {
    static const uint32_t lengths[] = {40, 50, 20, 100, 1, 99, 1}, begins[] = {0, 2, 3, 4, 6, 7};
    PACKING(p, e, lengths, 7, 100, 0, 0);
    packing_epoch(&p, &e, 0);
    assert_int_equal(e.sequences, 5);
    for (size_t i = 0; i < 7; i++) assert_int_equal(e.order[i], i);
    for (size_t i = 0; i <= 5; i++) assert_int_equal(e.begin[i], begins[i]);
}

// Every step takes `step` samples of the epoch's order, in its own sequences; the last step takes the rest.
TEST(steps_hold_so_many_pieces) {
    for (size_t round = 0; round < 40; round++) {
        const size_t count = 1 + test_random_below(60), step = 1 + test_random_below(70), most = min_size(step, count);
        const int shuffle = round % 2;
        test_case("%zu pieces in steps of %zu, %s", count, step, shuffle ? "shuffled" : "in order");
        SCOPED(packing_free)
        Packing p = packing_allocate(uniform_lengths(count, 1, 90), sizeof(uint32_t), count, 100, step, shuffle, 5);
        SCOPED(epoch_sequences_free) EpochSequences e = epoch_sequences_allocate(&p);
        assert_int_equal(p.windows, (count + most - 1) / most);
        for (size_t epoch = 0; epoch < 2; epoch++) {
            packing_epoch(&p, &e, epoch);
            check_epoch(&p, &e);
            size_t ends = 0; // steps that end with a sequence
            for (size_t s = 0; s < e.sequences; s++) {
                assert_int_equal(e.permutation[s], s);
                assert_int_equal((e.begin[s + 1] - 1) / most, e.begin[s] / most);
                ends += e.begin[s + 1] % most == 0 || e.begin[s + 1] == count;
                for (size_t i = e.begin[s]; i < e.begin[s + 1] && !shuffle; i++)
                    assert_int_equal(e.order[i] / most, e.begin[s] / most);
            }
            assert_int_equal(ends, p.windows);
        }
    }
}

TEST(permutations_are_uniform) {
    size_t seen[4][4] = {{0}};
    for (size_t round = 0; round < 4000; round++) {
        uint32_t order[4];
        random_permutation(order, 4, round, 9, 0);
        for (size_t i = 0; i < 4; i++) seen[i][order[i]]++;
    }
    for (size_t i = 0; i < 16; i++) assert_in_range(seen[i / 4][i % 4], 850, 1150); // 1000 expected, deviation 27
}

// ---- crc32 ----------------------------------------------------------------------------------------------------------
static uint32_t plain_crc32(const unsigned char *data, size_t bytes) {
    uint32_t crc = 0xffffffffu;
    size_t bit;
    for (size_t i = 0; i < bytes; i++)
        for (crc ^= data[i], bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    return ~crc;
}

TEST(crc32_is_zlibs) {
    unsigned char data[300];
    crc32_prepare();
    assert_int_equal(crc32_of(0, "123456789", 9), 0xcbf43926u);
    for (size_t i = 0; i < sizeof(data); i++) data[i] = (unsigned char)test_random();
    for (size_t round = 0; round < 200; round++) {
        size_t begin = test_random_below(20), bytes = test_random_below(280), part = test_random_below(bytes + 1);
        uint32_t crc = crc32_of(0, data + begin, part);
        assert_int_equal(crc32_of(crc, data + begin + part, bytes - part), plain_crc32(data + begin, bytes));
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
