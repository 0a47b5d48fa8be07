// Attention's backward by Hopper's own instructions (cuda/attention_wgmma.cuh). Other op sets and cards run their usual
// kernels here. Forward stays as it is, so the cases have few queries and many keys, or the reverse.
#ifndef TEST_OPS_ATTENTION_WGMMA_H
#define TEST_OPS_ATTENTION_WGMMA_H

static const Heads wgmma_shapes[] = {{2, 1, 64}, {2, 2, 128}, {2, 1, 256}, {4, 2, 64}, {4, 1, 128}, {1, 1, 256}};
enum { WGMMA_SHAPES = COUNT_OF(wgmma_shapes) };

static void wgmma_set(int on) {
    if (on)
        setenv("STREAMBP_WGMMA", "1", 1);
    else
        unsetenv("STREAMBP_WGMMA");
    testing.all_aligned = on, case_window = 0;
}

// Squares, rectangles and documents off every grid, windows from a query's own key on
TEST(attention_wgmma) {
    static const size_t lengths[] = {3, 70, 1, 141, 26, 9};
    static const struct {
        size_t from, end, window;
    } cases[] = {{0, 1, 0},   {0, 250, 0},   {74, 75, 0},  {140, 216, 0},
                 {5, 215, 1}, {70, 240, 65}, {72, 216, 7}, {214, 249, 64}};
    wgmma_set(1);
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t h = i % 3; h < WGMMA_SHAPES; h += CASE_STEP == 1 ? 1 : 3) {
            case_window = cases[i].window;
            attention_chunk_case(lengths, 6, cases[i].from, cases[i].end, wgmma_shapes[h], 1.0, 1.0);
        }
    wgmma_set(0);
}
#endif
