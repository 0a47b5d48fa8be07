/*
The best blocks of a long text (orders/context_memory.h): chosen by their scores, and given to slots.
*/
#ifndef LLMC_CPU_BLOCKS_H
#define LLMC_CPU_BLOCKS_H
#include "llmc/ops/ops.h"
#include "precision.h"

// Returns the score of block b = 1, 2, ...
static floatS block_score(const floatS *score, size_t b) {
    return score && score[b - 1] == score[b - 1] ? score[b - 1] : -(floatS)INFINITY;
}

// Returns the best of the blocks that are worse than block `than`; 0: the best of all.
static size_t best_block(const floatS *score, size_t blocks, size_t than) {
    size_t best = 0;
    for (size_t b = 1; b <= blocks; b++) {
        const floatS own = block_score(score, b), least = than ? block_score(score, than) : own;
        const int worse = !than || own < least || (own == least && b > than);
        if (worse && (!best || own > block_score(score, best))) best = b;
    }
    return best;
}

static int is_listed(const int32_t *list, size_t n, int32_t block) {
    size_t i = 0;
    while (i < n && list[i] != block) i++;
    return i < n;
}

static int compare_blocks(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static size_t cpu_blocks_choose_scratch(size_t slots) { return slots; }

static void cpu_blocks_choose(int32_t *slot, int32_t *taken, const Summed *score, size_t blocks, size_t slots,
                              Summed *scratch) {
    int32_t *chosen = (int32_t *)scratch;
    size_t next = 0;
    for (size_t i = 0; i < slots; i++)
        chosen[i] = (int32_t)best_block((const floatS *)score, blocks, i ? (size_t)chosen[i - 1] : 0);
    for (size_t i = 0; i < slots; i++) taken[i] = !is_listed(chosen, slots, slot[i]);
    for (size_t i = 0; i < slots; i++)
        if (is_listed(slot, slots, chosen[i])) chosen[i] = 0; // it stays in its slot
    qsort(chosen, slots, sizeof(int32_t), compare_blocks);
    while (next < slots && !chosen[next]) next++;
    for (size_t i = 0; i < slots; i++)
        if (taken[i]) slot[i] = taken[i] = chosen[next++];
}

#endif
