/*
Shares of the work of linear layers' products (llmc/ops/cpu/product_plain.h; oneDNN's own cut cannot be seen) for up to
64 threads. Each item of product_grid, in order, is taken by the first free thread. An item takes as long as its
multiply-adds of whole tiles, without packing. Cases: the widths of every preset, chunks of 1024 tokens, 512 rows of
logits. All products of a pass take at most 1.1 times the mean of the threads' work (1.12 below a width of 768), counted
without the rounding to tiles. The threads of a product meet once; no two write to one cache line: items end at whole
panels of columns, which are whole lines.
*/
#include "test/base/testing.h"
#include "llmc/model/config_text.h"
#include "llmc/ops/cpu/product_plain.h"

enum { THREADS_MOST = 64 };

// Adds a product's time to *time, and its threads' mean work to *mean.
static void share_product(size_t m, size_t n, size_t k, size_t threads, double *time, double *mean) {
    Product p = product_of("shares", m, n, k, NULL, NULL, NULL);
    const ProductGrid grid = product_grid(&p, threads);
    double free_at[THREADS_MOST] = {0}, end = 0;
    if (grid.columns * sizeof(floatX) % 64) test_fail("items of %zu columns share cache lines", grid.columns);
    for (size_t i = 0; i < grid.items; i++) {
        const size_t row = i % grid.row_items * grid.rows, column = i / grid.row_items * grid.columns;
        const size_t rows = round_up(min_size(grid.rows, m - row), 2); // an odd last panel computes one row too many
        const size_t columns = round_up(min_size(grid.columns, n - column), PANEL_COLUMNS);
        size_t first = 0;
        for (size_t t = 1; t < threads; t++)
            if (free_at[t] < free_at[first]) first = t;
        end = fmax(end, free_at[first] += (double)rows * (double)columns * (double)k);
    }
    *time += end, *mean += (double)m * (double)n * (double)k / (double)threads;
}

TEST(product_shares) {
    static const size_t threads[] = {1, 2, 3, 6, 8, 16, 24, 48, 64};
    for (size_t i = 0; i < PRESETS; i++) {
        const Config c = config_from_text(presets[i].name, "test", EXIT_RUNTIME);
        const size_t FF = c.intermediate_size ? c.intermediate_size : c.moe_intermediate_size; // all are experts
        const size_t C = c.hidden_size, L = c.num_hidden_layers;
        const size_t Q = c.num_attention_heads * c.head_dim, KV = c.num_key_value_heads * c.head_dim;
        const struct {
            size_t rows, in, out, number;
        } linear[] = {{1024, C, Q, 2 * L}, {1024, C, KV, 2 * L}, {1024, C, FF, 3 * L}, {512, C, c.vocab_size, 2}};
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            double time = 0, mean = 0;
            for (size_t l = 0; l < COUNT_OF(linear); l++) {
                const size_t n = linear[l].rows, in = linear[l].in, out = linear[l].out;
                double one = 0, one_mean = 0;
                share_product(n, out, in, threads[t], &one, &one_mean);
                share_product(n, in, out, threads[t], &one, &one_mean);
                share_product(out, in, n, threads[t], &one, &one_mean);
                time += (double)linear[l].number * one, mean += (double)linear[l].number * one_mean;
            }
            if (time > (C < 768 ? 1.12 : 1.1) * mean)
                test_fail("%s, %zu threads: %.3f of the mean share", presets[i].name, threads[t], time / mean);
        }
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
