/*
Shares of attention's work for up to 64 threads: the tasks of llmc/ops/cpu/attention_tasks.h in order, each taken by the
first free thread and begun after its dependencies. A task takes as long as it has query-key pairs. Cases: the heads and
windows of every preset, 4096 tokens in chunks of 1024. A pass takes at most 1.1 times the mean of the threads' work
(1.5 in windows below 256).
*/
#include "test/base/testing.h"
#include "llmc/model/config_text.h"
#include "llmc/ops/cpu/attention_tasks.h"

enum { THREADS_MOST = 64, TASKS_MOST = 4096 };

// Times a task that may begin at `earliest`: the first free thread takes it.
static double run_task(double *free_at, size_t threads, double earliest, double work) {
    size_t first = 0;
    for (size_t t = 1; t < threads; t++)
        if (free_at[t] < free_at[first]) first = t;
    return free_at[first] = fmax(free_at[first], earliest) + work;
}

static double end_of(const double *free_at, size_t threads) {
    double end = 0;
    for (size_t t = 0; t < threads; t++) end = fmax(end, free_at[t]);
    return end;
}

static double block_pairs(const Attention *a, QueryBlock b, KeyRange keys) {
    const Span span = {b.document, b.begin, b.end, 0};
    return span_pairs(span, keys, a->window);
}

static double forward_time(const Attention *a, Spans spans) {
    const size_t most = forward_tokens(a, spans), tasks = span_blocks(spans, most) * a->NKV;
    double free_at[THREADS_MOST] = {0};
    size_t span = spans.count - 1, before = 0;
    for (size_t task = 0; task < tasks; task++)
        run_task(free_at, a->threads, 0, block_pairs(a, forward_task(a, spans, most, task, &span, &before), a->keys));
    return end_of(free_at, a->threads);
}

static double backward_time(const Attention *a, Spans spans) {
    static double done[2][TASKS_MOST];
    double free_at[THREADS_MOST] = {0}, closed[2] = {0, 0}, pairs = 0;
    for (size_t i = 0; i < spans.count; i++) pairs += span_pairs(spans.span[i], a->keys, a->window);
    for (Phases p = phases_begin(a, spans, pairs); !p.ended || p.number; phase_next(&p, a, spans, pairs)) {
        const size_t parity = p.number % 2;
        if (segment_tasks(a, &p) > TASKS_MOST) test_fail("%zu tasks in a phase", segment_tasks(a, &p));
        for (size_t segment = 0; segment < p.now.segments && !p.ended; segment++) {
            const KeyRange keys = segment_keys(a, p.now.block, segment, p.now.segments);
            const double work = block_pairs(a, p.now.block, keys);
            const size_t first = p.number ? segment_behind(a, p.last.block, keys.begin, p.last.segments) : 0;
            for (size_t head = 0; head < a->NKV; head++) {
                double earliest = closed[parity];
                for (size_t i = first; p.number && i < p.last.segments; i++) {
                    if (segment_keys(a, p.last.block, i, p.last.segments).begin >= keys.end) break;
                    earliest = fmax(earliest, done[!parity][i * a->NKV + head]);
                }
                done[parity][segment * a->NKV + head] = run_task(free_at, a->threads, earliest, work);
            }
        }
        for (size_t i = 0; p.number && i < p.last.segments * a->NKV; i++)
            closed[!parity] = fmax(closed[!parity], done[!parity][i]);
        if (p.ended) break;
    }
    for (size_t i = spans.count; i-- > 0;)
        for (size_t head = 0; head < a->NKV && document_segments(a, spans.span[i], pairs) == 1; head++)
            run_task(free_at, a->threads, 0, span_pairs(spans.span[i], a->keys, a->window));
    return end_of(free_at, a->threads);
}

static void shares_of(const char *name, AttentionShape shape, size_t threads, size_t chunk) {
    double forward = 0, backward = 0, mean = 0;
    for (size_t begin = 0; begin < 4096; begin += chunk) {
        const Span span = {0, begin, begin + chunk, 0};
        const Spans spans = {.span = &span, .count = 1, .window = shape.spans.window};
        shape.spans = spans;
        const Attention a = attention_of(&shape, threads);
        forward += forward_time(&a, spans), backward += backward_time(&a, spans);
        mean += span_pairs(span, a.keys, a.window) * (double)a.NKV / (double)threads;
    }
    const double most = shape.spans.window && shape.spans.window < 256 ? 1.5 : 1.1; // a window of few blocks
    if (fmax(forward, backward) > most * mean)
        test_fail("%s, %zu threads: forward %.3f, backward %.3f of the mean share", name, threads, forward / mean,
                  backward / mean);
}

// More than 8 threads get no even shares of one key/value head within a short window, nor of few heads (LFM3), nor more
// than 32 of two.
TEST(attention_shares) {
    static const size_t threads[] = {1, 2, 3, 6, 8, 16, 24, 48, 64};
    for (size_t i = 0; i < PRESETS; i++) {
        const Config c = config_from_text(presets[i].name, "test", EXIT_RUNTIME);
        AttentionShape shape = {.NH = c.num_attention_heads, .NKV = c.num_key_value_heads, .HD = c.head_dim};
        shape.keys = all_keys;
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            shape.spans.window = c.sliding_window;
            const int few = shape.NKV == 1 || (c.sliding_window && shape.NH * c.sliding_window <= 4096);
            if (threads[t] <= (few ? 8 : 16 * shape.NKV)) shares_of(presets[i].name, shape, threads[t], 1024);
            shape.spans.window = 0;
            if (c.sliding_window && (shape.NKV > 1 || threads[t] <= 8))
                shares_of(presets[i].name, shape, threads[t], 1024);
        }
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, NULL); }
