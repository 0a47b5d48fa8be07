/*
Sizes of scratch that the ops of op set "cuda" take, in plain C. The op set uses them. So does a CPU build that plans
for a GPU (ops_dry.h). The functions are declared in op_list.h; all return numbers of fp32 elements.
*/
#ifndef LLMC_GPU_SCRATCH_H
#define LLMC_GPU_SCRATCH_H
#include "attention_calls.h"

enum {
    GPU_NORM_BLOCKS = 528, // 4 per multiprocessor of an H100: a constant, so that a plan needs no device
    GPU_CONV_LINES = 128,
    GPU_SORT_DIGITS = 256,
    GPU_SORT_TILE = 1024,
    GPU_COUNT_TOKENS = 64,
    GPU_MOST_HEAD = 512,
    GPU_MOST_SSD_STATE = 256,
    GPU_SPLIT_BLOCKS = 264,           // blocks that decode a step's texts: two per multiprocessor of an H100
    GPU_SPLIT_KEYS = 128,             // least keys of a part, of a full cache
    GPU_SPLIT_ROWS = 64,              // most queries of a span, times heads of a group, whose keys are split
    GPU_FORWARD_WORKSPACE = 64 << 10, // bytes; cuDNN 9.19 asks for 256
    GPU_ROW_MULTIPLE = 8,
#ifdef CUDA_ON_CPU
    GPU_DELTA_SEGMENT = 2 // blocks of a segment; tests have few tokens
#else
    GPU_DELTA_SEGMENT = 32
#endif
};

static size_t cuda_embedding_backward_scratch(size_t N, size_t rows, size_t C) {
    (void)rows, (void)C;
    return 2 * N + GPU_SORT_DIGITS * ((N + GPU_SORT_TILE - 1) / GPU_SORT_TILE);
}

// Returns the size of [2, lines, C]: one partial sum of dw per thread block (a line), then one of db; unused if dw is
// NULL
static size_t cuda_norm_backward_scratch(size_t n, size_t C) { return 2 * min_size(n, GPU_NORM_BLOCKS) * C; }

// Returns the size of [lines, V], or with gate_first [lines, heads, V]: one partial sum of dw per thread block.
static size_t cuda_gated_norm_backward_scratch(size_t n, size_t heads, size_t V, int gate_first) {
    return gate_first ? min_size(n, GPU_NORM_BLOCKS) * heads * V : min_size(n * heads, GPU_NORM_BLOCKS) * V;
}

static size_t cuda_conv_backward_scratch(const DeltaShape *shape, int biased) {
    return min_size(delta_rows(shape), GPU_CONV_LINES) * delta_channels(shape) * (shape->taps + (size_t)biased);
}

// Returns the size of [lines, NH]: one partial sum of dsinks per block of tokens.
static size_t cuda_sink_backward_scratch(size_t n, size_t NH) { return min_size(n, GPU_NORM_BLOCKS) * NH; }

static size_t cuda_draw_scratch(size_t V) { return (void)V, 0; }

// Sizes the scratch that delta_lay_out in cuda/delta.cuh lays out; each part begins at a multiple of 16 bytes. Each
// block has triangles (10 tiles of 16 x 16), gates and lengths. Backward adds states, their gradients, what tokens add,
// and the gradients of keys that value heads share.
static size_t gpu_four(size_t n) { return (n + 3) / 4 * 4; }
static size_t gpu_delta_scratch(const DeltaShape *shape, int backward) {
    const size_t n = delta_rows(shape), blocks = min_size(GPU_DELTA_SEGMENT, n), B = DELTA_BLOCK;
    const size_t HK = shape->HK, HV = shape->HV, states = delta_state_elements(shape);
    const size_t triangle = blocks * HV * 10 * 256, tokens = gpu_four(blocks * B * HV * shape->V);
    const size_t keys = HK < HV ? blocks * HK * B * ((shape->K + 7) / 8 * 8) : 0;
    const size_t both = 4 + gpu_four(states) + blocks * HV * (7 * B + 4) + blocks * HK * 2 * B + 2 * triangle;
    const size_t borders = gpu_four(n ? (n - 1) / (GPU_DELTA_SEGMENT * B) * states : 0);
    return backward ? both + triangle + borders + 2 * gpu_four(blocks * states) + 2 * tokens + 2 * keys +
                          gpu_four(blocks * 2 * HV)
                    : both;
}
static size_t cuda_delta_forward_scratch(const DeltaShape *shape) { return gpu_delta_scratch(shape, 0); }
static size_t cuda_delta_backward_scratch(const DeltaShape *shape) { return gpu_delta_scratch(shape, 1); }

// Sizes the scratch that ssd_lay_out in cuda/ssd.cuh lays out: a triangle and factors for each block. Backward adds
// gates, states, their gradients, lines of the heads' gradients, and of long states the steps' gradients so far.
static size_t gpu_ssd_scratch(const DeltaShape *shape, int backward) {
    const size_t n = delta_rows(shape), blocks = min_size(GPU_DELTA_SEGMENT, n), B = DELTA_BLOCK;
    const size_t HV = shape->HV, states = delta_state_elements(shape);
    if (shape->K > GPU_MOST_SSD_STATE)
        die("a Mamba-2 state is %zu wide (ssm_state_size, mamba_d_state), but op set cuda supports at most %d",
            shape->K, GPU_MOST_SSD_STATE);
    const size_t both = 4 + gpu_four(states) + blocks * HV * (10 * 256 + 4 * B + 4);
    const size_t borders = gpu_four(n ? (n - 1) / (GPU_DELTA_SEGMENT * B) * states : 0);
    const size_t steps = shape->K > 128 ? blocks * HV * B * 2 : 0;
    return backward ? both + blocks * HV * 3 * B + borders + 2 * gpu_four(blocks * states) + gpu_four(blocks * 3 * HV) +
                          steps
                    : both;
}
static size_t cuda_ssd_forward_scratch(const DeltaShape *shape) { return gpu_ssd_scratch(shape, 0); }
static size_t cuda_ssd_backward_scratch(const DeltaShape *shape) { return gpu_ssd_scratch(shape, 1); }

// Returns into how many parts attention cuts a text's keys in decoding (cuda/attention_split.cuh); 0: this is no
// decoding. It depends on the cache alone.
static size_t gpu_key_parts(TextSlots slots, size_t NKV) {
    const size_t blocks = slots.count * NKV;
    if (!blocks) return 0;
    return max_size(min_size((GPU_SPLIT_BLOCKS + blocks - 1) / blocks, slots.tokens / GPU_SPLIT_KEYS), 1);
}

// Sizes the parts' results: a line of HD + 1 for each part of each of the 16 rows of a tile.
static size_t gpu_split_scratch(size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots) {
    const size_t parts = gpu_key_parts(slots, NKV), tiles = (NH / NKV + 15) / 16;
    const size_t row_tiles = min_size(n * tiles, slots.count * max_size(GPU_SPLIT_ROWS / 16, tiles));
    return parts > 1 ? row_tiles * NKV * 16 * parts * (HD + 1) : 0;
}

// Sizes attention by our own kernels: the dot product dout . out of each query and head, or parts in decoding.
static size_t cuda_attention_scratch(size_t n, size_t NH, size_t NKV, size_t HD, TextSlots slots) {
    if (HD > GPU_MOST_HEAD) die("head_dim is %zu, but op set cuda supports at most %d", HD, GPU_MOST_HEAD);
    return max_size(n * NH, gpu_split_scratch(n, NH, NKV, HD, slots));
}

// Returns the size of [NKV, keys]: the attention that keys receive by the query heads of each key/value head.
static size_t cuda_attention_received_scratch(size_t keys, size_t NKV) { return NKV * keys; }

// Returns the size of two lists of the chosen blocks.
static size_t cuda_blocks_choose_scratch(size_t slots) { return 2 * slots; }

static size_t aligned_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Sizes attention by cuDNN, with our own kernels for the remaining calls: the larger of what forward and backward stage
// (forward_stage, cudnn_stage in cuda/attention_cudnn.cuh). size: bytes of an element; own_backward: 1: our kernels
// compute all of backward
static size_t gpu_attention_scratch(AttentionChoice choice, int own_backward, size_t size, size_t n, size_t NH,
                                    size_t NKV, size_t HD, TextSlots slots) {
    AttentionCut cut = attention_cut(NH, NKV, HD, 0, choice);
    const size_t floats = sizeof(float), own = cuda_attention_scratch(n, NH, NKV, HD, slots) * floats, row = NH * HD;
    const size_t most = min_size(n, cut.block), rows = max_size(cut.grid, most);
    const size_t padded = aligned_256(cut.grid * row * size);
    if (size != 2 || !cudnn_has_head(HD)) return own / floats;
    cut.workspace = own_backward ? 0 : attention_most_bytes(&cut, n);
    const size_t forward = aligned_256(rows * NH * floats) + padded + aligned_256(rows * row * size) +
                           aligned_256(GPU_FORWARD_WORKSPACE) + 256;
    const size_t backward = aligned_256(most * NH * floats) + aligned_256(most * row * floats) + 3 * padded +
                            aligned_256(cut.workspace) + 256;
    return (max_size(forward, own + (cut.workspace ? backward : 0)) + 3) / floats;
}

// Returns the size of partial counts and sums, one set for each block of tokens.
static size_t cuda_router_count_scratch(size_t n, size_t E) {
    return (n + GPU_COUNT_TOKENS - 1) / GPU_COUNT_TOKENS * (2 * E + 1);
}

// Returns the size of [blocks of rows, E]: the number of an expert's rows in each block.
static size_t cuda_route_sort_scratch(size_t n, size_t k, size_t E) {
    return (n * k + GPU_SORT_TILE - 1) / GPU_SORT_TILE * E;
}

#endif
