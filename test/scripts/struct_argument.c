// A struct argument of a const function must reach its second call, though the calls in between wrote where it lay.
// gcc 12.2 at -O1 for AVX-512 loses it without the Makefile's KEEP_ARGUMENTS. Exits 1 if it is lost.
#include <stddef.h>

typedef struct {
    size_t ranks, rank, sp, zero;
} World;

typedef struct {
    size_t ranks, rank;
} Sharding;

__attribute__((noinline)) static size_t elements(const size_t *table, Sharding s) {
    return table[0] / s.ranks + s.rank;
}

__attribute__((noinline)) static Sharding sharding_of(World world, size_t stage) {
    const Sharding ranges = {world.ranks ? world.ranks : 1, world.rank}, whole = {1, 0};
    return world.zero >= stage ? ranges : whole;
}

__attribute__((noinline)) static size_t gradients_of(const size_t *table, const World *world) {
    const World w = *world;
    const size_t weights = elements(table, sharding_of(w, 3)); // whole
    return elements(table, sharding_of(w, 2)) - weights;       // whole - whole
}

int main(int argc, char **argv) {
    (void)argv;
    const World world = {4, 0, 1, (size_t)argc}; // stage 1: the address of a call is a greater stage
    const size_t table = 4000;
    return gradients_of(&table, &world) != 0;
}
