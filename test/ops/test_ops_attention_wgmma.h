// Attention's backward by Hopper's own instructions (cuda/attention_wgmma.cuh): the cases of test_ops_attention.h with
// STREAMBP_WGMMA=1. Other op sets and cards run their usual kernels.
#ifndef TEST_OPS_ATTENTION_WGMMA_H
#define TEST_OPS_ATTENTION_WGMMA_H

static const Heads wgmma_shapes[] = {{2, 1, 64}, {2, 2, 128}, {1, 1, 256}, {4, 2, 64}, {2, 1, 128}, {2, 1, 256}};
enum { WGMMA_SHAPES = COUNT_OF(wgmma_shapes) };

#ifdef CUDA_ON_CPU
size_t cuda_on_cpu_group_products(void);
#else
static size_t cuda_on_cpu_group_products(void) { return 0; }
#endif

static void wgmma_set(int on) {
    if (on)
        setenv("STREAMBP_WGMMA", "1", 1);
    else
        unsetenv("STREAMBP_WGMMA");
    testing.all_aligned = on, case_window = 0;
}

// Squares, rectangles and documents off every grid, with windows from a query's own key on
TEST(attention_wgmma) {
    static const size_t lengths[] = {3, 70, 1, 141, 26, 9};
    static const struct {
        size_t from, end, window;
    } cases[] = {{0, 1, 0},  {0, 150, 0},   {74, 75, 0},  {140, 216, 0},
                 {5, 90, 1}, {70, 220, 65}, {72, 216, 7}, {200, 249, 64}};
    static const Heads many = {32, 2, 64};
    const size_t products = cuda_on_cpu_group_products();
    wgmma_set(1);
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (size_t h = i % 6; h < WGMMA_SHAPES; h += CASE_STEP) {
            case_window = cases[i].window;
            attention_chunk_case(lengths, 6, cases[i].from, cases[i].end, wgmma_shapes[h], 1.0, 1.0);
        }
    case_window = 0;
    attention_chunk_case(lengths, 6, 60, 76, many, 1.0, 1.0);
    attention_chunk_case(lengths, 4, 150, 215, wgmma_shapes[1], 4.0, 20.0);
    wgmma_set(0);
    if (EMULATED && ops->stored == DTYPE_BF16 && cuda_on_cpu_group_products() == products)
        test_fail("no product of a warp group");
}

// Keys a range at a time, spans with gaps between them, many short documents
TEST(attention_wgmma_parts) {
    static const size_t lengths[] = {140, 5, 269, 1}, windows[] = {0, 31, 200};
    size_t many[70];
    wgmma_set(1);
    for (size_t h = 0; h < WGMMA_SHAPES; h += CASE_STEP == 1 ? 1 : 2) {
        case_window = windows[h / 2];
        chunk_in_parts(lengths, 4, 130 + 60 * h, 190 + 40 * h, wgmma_shapes[h], 1 + h % MOST_PARTS, 1.0, 1.0);
        attention_gaps_case(3, 1 + 30 * (h / 2), 70, wgmma_shapes[WGMMA_SHAPES - 1 - h]);
    }
    for (size_t d = 0; d < COUNT_OF(many); d++) many[d] = 1 + d % 3;
    case_window = 2;
    attention_chunk_case(many, COUNT_OF(many), 4, 138, wgmma_shapes[0], 1.0, 1.0);
    wgmma_set(0);
}
#endif
