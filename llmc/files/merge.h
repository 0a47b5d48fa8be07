/*
Merging adapters (lora.h): a source of weights that returns W + scale B A, or the trained full copy. `convert` writes
the merged model in any format, range by range, with one module's adapter in memory at a time. Each element is summed in
double and rounded once, to the type written, so the result does not depend on the order or size of reads.
*/
#ifndef LLMC_MERGE_H
#define LLMC_MERGE_H
#include "llmc/model/lora.h"
#include "weight_source.h"

struct Merge {
    const WeightSource *adapter; // adapters; their table is lora->table
    const Lora *lora;
    size_t *first;    // [parameters of the model] index in the adapter's table of A (B follows) or a copy; or ABSENT
    size_t parameter; // parameter whose A and B are in a and b
    float *a, *b;     // A [rank, cols], B transposed [rank, rows]; for experts one pair (A, B) each
};

static Slab staged_merge; // W in double, then the sum

// ---- the adapters of one parameter ----------------------------------------------------------------------------------
static void merge_read(const WeightSource *adapter, size_t parameter, float *out) {
    const Parameter *p = &adapter->model.parameters[parameter];
    char at[PLACE_TEXT];
    weights_read(adapter, parameter, 0, parameter_elements(p), DTYPE_FP32, out);
    const char *bad = elements_bad_text(out, DTYPE_FP32, p->cols, 0, parameter_elements(p), at);
    if (bad)
        die("%s: tensor %s holds %s at %s; take another copy or an earlier checkpoint", adapter->path, p->name, bad,
            at);
}

// Transposes a matrix: out[cols,rows] = in[rows,cols]
static void merge_transpose(float *out, const float *in, size_t rows, size_t cols) {
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < cols; k++) out[k * rows + i] = in[i * cols + k];
}

static void merge_load_pair(Merge *merge, const WeightSource *source, size_t parameter) {
    const Parameter *p = &source->model.parameters[parameter];
    const size_t first = merge->first[parameter];
    const LoraPart *part = lora_part_of(merge->lora, &merge->lora->table.parameters[first]);
    const size_t rank = part->rank, E = max_size(p->experts, 1), rows = p->rows / E;
    if (merge->parameter == parameter) return;
    merge->parameter = parameter;
    free(merge->a), free(merge->b);
    merge->a = (float *)checked_calloc(E * rank * p->cols, sizeof(float), "A of an adapter");
    merge->b = (float *)checked_calloc(rank * p->rows, sizeof(float), "B of an adapter");
    float *b = (float *)checked_calloc(rank * max_size(p->rows, p->cols), sizeof(float), "B of an adapter");
    const int embedding = part == &merge->lora->outer_part[EMBEDDING]; // the embedding's A [rank,rows] and B
                                                                       // [cols,rank] are swapped
    merge_read(merge->adapter, first, embedding ? b : merge->a);
    if (embedding) merge_transpose(merge->b, b, p->rows, rank);
    merge_read(merge->adapter, first + 1, b);
    for (size_t e = 0; e < E && !embedding; e++)
        merge_transpose(merge->b + e * rows * rank, b + e * rows * rank, rows, rank);
    if (embedding) merge_transpose(merge->a, b, p->cols, rank);
    free(b);
}

// ---- the sum --------------------------------------------------------------------------------------------------------
// A factor of B A: A, or B transposed; x [rank, size]
typedef struct {
    const float *x;
    size_t size;
} Factor;

// Adds scale sum_k u[k, row] v[k, column] to values = elements [begin, begin + count) of a matrix [u.size, v.size].
// Products of two floats are exact in double, so either factor may be u.
static void merge_add(double *values, size_t begin, size_t count, Factor u, Factor v, const LoraPart *part) {
    const size_t inner = v.size, rank = part->rank;
    const double scale = part->scale;
    const size_t first = begin / inner, last = (begin + count - 1) / inner;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (size_t row = first; row <= last; row++) {
        const size_t from = row == first ? begin - first * inner : 0;
        const size_t to = row == last ? begin + count - last * inner : inner;
        double sum[256];
        size_t n;
        for (size_t c = from; c < to; c += n) {
            n = min_size(to - c, sizeof(sum) / sizeof(sum[0]));
            memset(sum, 0, n * sizeof(sum[0]));
            for (size_t k = 0; k < rank; k++) {
                const double factor = u.x[k * u.size + row];
                for (size_t i = 0; i < n; i++) sum[i] += factor * v.x[k * inner + c + i];
            }
            for (size_t i = 0; i < n; i++) values[row * inner + c + i - begin] += scale * sum[i];
        }
    }
}

// Rounds to fp32, to the odd neighbour if inexact, so that rounding the result to bf16 rounds only once.
static float round_to_odd(double x) {
    float nearest = (float)x;
    uint32_t bits;
    if ((double)nearest == x || !isfinite(nearest)) return nearest;
    memcpy(&bits, &nearest, sizeof(bits));
    if (!(bits & 1)) bits = fabs((double)nearest) > fabs(x) ? bits - 1 : bits + 1;
    memcpy(&nearest, &bits, sizeof(nearest));
    return nearest;
}

static void merge_round(void *out, DType as, const double *values, size_t count) {
    if (as != DTYPE_BF16) {
        elements_convert(out, as, values, DTYPE_FP64, count);
        return;
    }
    for (size_t i = 0; i < count; i++) ((uint16_t *)out)[i] = float_to_bf16(round_to_odd(values[i]));
}

// Reads a range of at most SLAB_ELEMENTS like source_read_order, with the adapter added. Returns 0 if the parameter has
// no adapter
static int merge_range(const WeightSource *source, size_t parameter, size_t begin, size_t count, DType as,
                       int transposed, void *out) {
    const Parameter *p = &source->model.parameters[parameter];
    Merge *merge = source->merge;
    double *values = (double *)(void *)staged_merge.bytes;
    if (merge->first[parameter] == ABSENT) return 0;
    const LoraPart *part = lora_part_of(merge->lora, &merge->lora->table.parameters[merge->first[parameter]]);
    if (!part) { // a trained full copy
        source_read_slab(merge->adapter, merge->first[parameter], begin, count, as, transposed, out);
        return 1;
    }
    merge_load_pair(merge, source, parameter);
    source_read_slab(source, parameter, begin, count, DTYPE_FP64, transposed, values);
    const size_t rows = p->rows / max_size(p->experts, 1), size = rows * p->cols; // rows of one expert's matrix
    for (size_t done = 0, n; done < count; done += n) {
        const ElementRun whole = {begin + done, count - done};
        const ElementRun run = transposed ? fused_run(p, begin + done, 0) : whole;
        const size_t e = run.at / size, from = run.at - e * size;
        const Factor a = {merge->a + e * part->rank * p->cols, p->cols}, b = {merge->b + e * part->rank * rows, rows};
        n = min_size(min_size(count - done, run.count), size - from);
        if (p->transposed && transposed)
            merge_add(values + done, from, n, a, b, part);
        else
            merge_add(values + done, from, n, b, a, part);
    }
    merge_round(out, as, values, count);
    return 1;
}

// ---- beginning and end ----------------------------------------------------------------------------------------------
// Makes the source return merged weights from now on. The adapters must belong to its model.
static void merge_begin(Merge *merge, WeightSource *source, const WeightSource *adapter, const Lora *lora) {
    const Model *table = &adapter->model;
    memset(merge, 0, sizeof(*merge));
    merge->adapter = adapter, merge->lora = lora, merge->parameter = ABSENT;
    if (lora_has_outer(lora) && source->model.config.tie_word_embeddings)
        die("%s: has an adapter of the embedding or the head, which are one matrix here, so it cannot be merged; use "
            "--adapter",
            adapter->path);
    merge->first =
        (size_t *)checked_calloc(source->model.parameter_count, sizeof(size_t), "which weights have adapters");
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        merge->first[i] = ABSENT;
        for (size_t k = 0; k < table->parameter_count && merge->first[i] == ABSENT; k++)
            if (lora_offset_in_model(lora, &source->model, &table->parameters[k]) == source->model.parameters[i].offset)
                merge->first[i] = k;
    }
    source->merge = merge, source->read_merged = merge_range;
}

static void merge_end(Merge *merge) {
    free(merge->first), free(merge->a), free(merge->b);
    memset(merge, 0, sizeof(*merge));
}

#endif
