/*
The collectives and dist.h between 2 to 4 processes (test/ranks/mpirun.sh P), against results computed locally for all
ranks. Every rank knows every rank's tensor: its elements are random numbers addressed by rank and index. Op set "cpu"
adds in the order of ranks, to the bit; "nccl", which pretends to be NCCL (nccl_on_mpi.h), in an order of its own, the
same in every run. Both run as late as possible: before a collective is awaited, nothing has changed.
*/
#include "llmc/ranks/dist.h"
#include "test/base/testing.h"
#include <unistd.h>

static RankGroup group;
static World world;

static const char *const group_names[RANK_GROUPS] = {"all", "of a stream", "of a stream, reversed"};

// Returns the global rank of this place in the process's group.
static size_t rank_at(size_t place) {
    const size_t first = world.rank / world.sp * world.sp;
    return group == RANKS_ALL ? place : group == RANKS_SEQUENCE ? first + place : first + world.sp - 1 - place;
}

// ---- a guarded tensor of bytes --------------------------------------------------------------------------------------
static Guarded *tensor_new(size_t bytes) { return guarded_poison(CHANGED, "the tensor", DTYPE_INT8, bytes); }
static char *laid_out(const Guarded *t) { return (char *)t->before + t->offset; } // loaded by tensors_load()

// Reads the tensor back and checks its guards.
static const char *tensor_read(const Guarded *t) {
    ops_device->copy_out(t->after, t->allocation, t->bytes);
    if (memcmp(t->after, t->before, t->offset)) test_fail("something wrote before the tensor");
    if (memcmp(t->after + t->offset + t->count, t->before + t->offset + t->count, GUARD_BYTES))
        test_fail("something wrote behind the tensor");
    return (const char *)t->after + t->offset;
}

// Checks that nothing has changed, then awaits the collective.
static void await_late(const Guarded *t, int64_t ticket) {
    if (memcmp(tensor_read(t), laid_out(t), t->count)) test_fail("it ran before it was awaited");
    ops_device->await(ticket);
}

// ---- reduce-scatter -------------------------------------------------------------------------------------------------
static double term(size_t rank, size_t i) { return random_uniform(7, rank, i) - 0.5; }

static void write_sum(char *x, size_t i, size_t ranks) {
    double sum = 0;
    float sum32 = 0;
    for (size_t r = 0; r < ranks; r++) sum += term(rank_at(r), i), sum32 += (float)term(rank_at(r), i);
    element_write(x, ops_device->summed, i, ops_device->summed == DTYPE_FP64 ? sum : (double)sum32);
}

// Compares the rank's shard with the expected sums of terms below 1/2. Another order of additions may differ by the
// rounding of `ranks` sums below ranks / 2. The first run's result becomes the expected one.
static void check_sums(const char *x, char *expected, Range own, size_t ranks, int run) {
    const DType type = ops_device->summed;
    const int in_order = run > 0 || !strcmp(ops_device->name, "cpu");
    const double allowed = in_order ? 0 : 0x1p-24 * (double)(ranks * ranks);
    for (size_t i = own.begin; i < own.begin + own.count; i++)
        if (!(fabs(element_to_double(x, type, i) - element_to_double(expected, type, i)) <= allowed))
            test_fail("run %d: [%zu] is %.17g, not %.17g", run, i, element_to_double(x, type, i),
                      element_to_double(expected, type, i));
    memcpy(expected + own.begin * dtype_size(type), x + own.begin * dtype_size(type), own.count * dtype_size(type));
}

static void check_reduce_scatter(size_t count, size_t unit) {
    const size_t ranks = ranks_in(world, group), size = dtype_size(ops_device->summed);
    const Range own = shard_range(count, unit, ranks, rank_in(world, group));
    const Guarded *t = tensor_new(count * size);
    char *expected = (char *)case_memory(count * size);
    for (size_t i = 0; i < count; i++) element_write(laid_out(t), ops_device->summed, i, term(world.rank, i));
    for (size_t i = own.begin; i < own.begin + own.count; i++) write_sum(expected, i, ranks);
    for (int run = 0; run < 3; run++) {
        tensors_load();
        await_late(t, ops_device->reduce_scatter(group, (Summed *)t->data, count, unit));
        check_sums(tensor_read(t), expected, own, ranks, run);
    }
}

// Tiny and odd counts, empty shards for some, and shards of more than one piece (1100001)
static void each_group(void (*check)(size_t count, size_t unit)) {
    static const size_t counts[] = {1, 3, 31, 64, 1025, 12345, 1100001}, units[] = {1, 2, 32};
    for (group = RANKS_ALL; group < RANK_GROUPS; group = (RankGroup)(group + 1)) {
        if (ranks_in(world, group) == 1) continue;
        for (size_t c = 0; c < COUNT_OF(counts); c++)
            for (size_t u = counts[c] > 1000000 ? 2 : 0; u < COUNT_OF(units); u++) {
                test_case("ranks %s, count %zu, unit %zu", group_names[group], counts[c], units[u]);
                check(counts[c], units[u]);
            }
    }
}

TEST(reduce_scatter_adds_up_all_ranks) { each_group(check_reduce_scatter); }

// ---- all-gather -----------------------------------------------------------------------------------------------------
static char gathered(size_t rank, size_t byte) { return (char)random_bits(8, rank, byte); }

// Lays out this rank's portion. Returns all of them, as they are gathered.
static const char *portions(const Guarded *t, size_t count, size_t unit, size_t size) {
    const size_t ranks = ranks_in(world, group);
    char *expected = (char *)case_memory(count * size);
    for (size_t r = 0; r < ranks; r++) {
        const Range p = shard_range(count, unit, ranks, r);
        for (size_t i = p.begin * size; i < (p.begin + p.count) * size; i++) {
            expected[i] = gathered(rank_at(r), i);
            if (rank_at(r) == world.rank) laid_out(t)[i] = expected[i];
        }
    }
    return expected;
}

static void check_all_gather_of(size_t count, size_t unit, size_t size) {
    test_case("ranks %s, count %zu, unit %zu, elements of %zu bytes", group_names[group], count, unit, size);
    const Guarded *t = tensor_new(count * size);
    const char *expected = portions(t, count, unit, size);
    for (int run = 0; run < 3; run++) {
        tensors_load();
        await_late(t, ops_device->all_gather(group, t->data, count, unit, size));
        if (memcmp(tensor_read(t), expected, t->count)) test_fail("run %d: not what the ranks hold", run);
    }
}

static void check_all_gather(size_t count, size_t unit) {
    static const size_t sizes[] = {2, 4, 8};
    for (size_t s = count > 1000000 ? 2 : 0; s < COUNT_OF(sizes); s++) check_all_gather_of(count, unit, sizes[s]);
}

TEST(all_gather_brings_every_portion_to_all) { each_group(check_all_gather); }

// Gathers elements larger than a piece.
TEST(all_gather_takes_large_elements) {
    group = RANKS_ALL;
    check_all_gather_of(5, 1, 5 << 20);
}

// ---- exchange -------------------------------------------------------------------------------------------------------
// Returns the bytes of parcel k from one rank to another, some 0.
static size_t parcel_bytes(size_t from, size_t to, size_t k) {
    return k == 2 ? (5 << 20) + from : (from + 2 * to + 3 * k) % 4 * 1001;
}

static char parcel_byte(size_t from, size_t to, size_t k, size_t i) {
    return (char)random_bits(9, (from * 8 + to) * 8 + k, i);
}

TEST(exchange_keeps_the_order_of_parcels) {
    enum { EACH = 3 };
    const size_t rank = world.rank, count = EACH * world.ranks; // parcel i: number i / ranks of peer i % ranks
    Guarded *out[4 * EACH], *in[4 * EACH];
    Message messages[4 * EACH] = {0};
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t peer = i % world.ranks, k = i / world.ranks;
        out[i] = tensor_new(parcel_bytes(rank, peer, k)), in[i] = tensor_new(parcel_bytes(peer, rank, k));
        for (size_t j = 0; j < out[i]->count; j++) laid_out(out[i])[j] = parcel_byte(rank, peer, k, j);
        const Message message = {peer, out[i]->data, in[i]->data, out[i]->count, in[i]->count};
        if (peer != rank) messages[n++] = message;
    }
    tensors_load();
    int64_t ticket = ops_device->exchange(RANKS_ALL, messages, n);
    for (size_t i = 0; i < count; i++)
        if (memcmp(tensor_read(in[i]), laid_out(in[i]), in[i]->count)) test_fail("it ran before it was awaited");
    ops_device->await(ticket);
    for (size_t i = 0; i < count; i++) {
        const size_t peer = i % world.ranks, k = i / world.ranks;
        const char *x = tensor_read(in[i]);
        for (size_t j = 0; peer != rank && j < in[i]->count; j++)
            if (x[j] != parcel_byte(peer, rank, k, j))
                test_fail("parcel %zu from rank %zu: byte %zu of %zu is wrong", k, peer, j, in[i]->count);
        assert_memory_equal(tensor_read(out[i]), laid_out(out[i]), out[i]->count);
    }
}

// ---- tickets --------------------------------------------------------------------------------------------------------
// More than the queue holds; the last ticket awaits all. Each round adds up the previous round's results.
TEST(tickets_are_done_in_order) {
    enum { ROUNDS = 12 };
    const size_t count = 100, size = dtype_size(ops_device->summed);
    const Guarded *t = tensor_new(count * size);
    int64_t ticket = 0;
    for (size_t i = 0; i < count; i++) element_write(laid_out(t), ops_device->summed, i, (double)(i % 10 + 1));
    tensors_load();
    for (size_t round = 0; round < ROUNDS; round++) {
        int64_t before = ticket;
        ticket = ops_device->reduce_scatter(RANKS_ALL, (Summed *)t->data, count, 1);
        assert_true(ticket > before);
        ticket = ops_device->all_gather(RANKS_ALL, t->data, count, 1, size);
    }
    ops_device->await(ticket);
    const char *x = tensor_read(t);
    for (size_t i = 0; i < count; i++) // exact in fp32
        if (element_to_double(x, ops_device->summed, i) != (double)(i % 10 + 1) * pow((double)world.ranks, ROUNDS))
            test_fail("[%zu] is %.17g", i, element_to_double(x, ops_device->summed, i));
}

// Asks in groups of one size after the other, and awaits all after the last switch.
TEST(groups_of_every_size_take_turns) {
    enum { COUNT = 1025, SIZE = 4, MOST = 3 * RANK_GROUPS };
    const World usual = world;
    const Guarded *t[MOST];
    const char *expected[MOST];
    int64_t ticket = 0;
    for (int asks = 0; asks < 2; asks++) {
        size_t n = 0;
        for (world.sp = 1; world.sp <= usual.ranks; world.sp++) {
            if (usual.ranks % world.sp) continue;
            dist_split(world.sp);
            for (group = RANKS_ALL; group < RANK_GROUPS; group = (RankGroup)(group + 1), n++) {
                if (!asks) t[n] = tensor_new(COUNT * SIZE), expected[n] = portions(t[n], COUNT, 1, SIZE);
                if (asks && ranks_in(world, group) > 1)
                    ticket = ops_device->all_gather(group, t[n]->data, COUNT, 1, SIZE);
            }
        }
        if (!asks) tensors_load();
        world = usual;
        dist_split(world.sp);
        for (size_t i = asks ? 0 : n; i < n; i++) {
            if (!i) ops_device->await(ticket);
            if (memcmp(tensor_read(t[i]), expected[i], t[i]->count)) test_fail("turn %zu: not what the ranks hold", i);
        }
    }
}

// MPI's memory beside tensors does not grow with them.
TEST(large_collectives_need_no_memory_of_their_size) {
    const size_t count = (size_t)48 << 20, size = dtype_size(ops_device->summed);
    void *x = ops_device->allocate(count / size * size);
    assert_non_null(x);
    ops_device->zero(x, count);
    size_t before = ops_device->memory_peak();
    ops_device->await(ops_device->reduce_scatter(RANKS_ALL, (Summed *)x, count / size, 32));
    ops_device->await(ops_device->all_gather(RANKS_ALL, x, count / size, 32, size));
    if (ops_device->memory_peak() > before + ((size_t)12 << 20))
        test_fail("%.1f MiB more than the tensor", (double)(ops_device->memory_peak() - before) / 1048576);
    ops_device->release(x, count / size * size);
}

// ---- on the host ----------------------------------------------------------------------------------------------------
TEST(host_exchanges_match_in_every_group) {
    static const size_t sizes[] = {1, 13, 4096, 1500001};
    for (group = RANKS_ALL; group < RANK_GROUPS; group = (RankGroup)(group + 1))
        for (size_t s = 0; s < COUNT_OF(sizes); s++) {
            const size_t bytes = sizes[s], ranks = ranks_in(world, group), root = ranks - 1;
            test_case("ranks %s, %zu bytes", group_names[group], bytes);
            char *own = (char *)case_memory(bytes), *all = (char *)case_memory(ranks * bytes);
            for (size_t i = 0; i < bytes; i++) own[i] = gathered(world.rank, i);
            dist_gather(group, own, bytes, all);
            for (size_t r = 0; r < ranks; r++)
                for (size_t i = 0; i < bytes; i++)
                    if (all[r * bytes + i] != gathered(rank_at(r), i)) test_fail("gather: byte %zu of rank %zu", i, r);
            dist_broadcast(group, own, bytes, root);
            for (size_t i = 0; i < bytes; i++)
                if (own[i] != gathered(rank_at(root), i)) test_fail("broadcast: byte %zu", i);
        }
    dist_barrier();
}

TEST(host_sums_are_added_in_the_order_of_ranks) {
    enum { MANY = 300000 };
    double *sums = (double *)case_memory(MANY * sizeof(double));
    for (size_t i = 0; i < MANY; i++) sums[i] = term(world.rank, i);
    dist_sum(RANKS_ALL, sums, MANY);
    for (size_t i = 0; i < MANY; i++) {
        double sum = term(0, i);
        for (size_t r = 1; r < world.ranks; r++) sum += term(r, i);
        if (sum != sums[i]) test_fail("sum %zu is %.17g, not %.17g", i, sums[i], sum);
    }
}

TEST(the_smallest_number_has_a_first_rank) {
    const size_t rank = dist_rank(), last = dist_ranks() - 1;
    size_t whose = SIZE_MAX;
    assert_int_equal(dist_smallest(10 - rank, &whose), 10 - last);
    assert_int_equal(whose, last);
    assert_int_equal(dist_smallest(rank ? 4 : 5, &whose), 4);
    assert_int_equal(whose, 1);
    assert_int_equal(dist_smallest(SIZE_MAX, &whose), SIZE_MAX);
    assert_int_equal(whose, 0);
}

TEST(ranks_are_numbered_on_their_host) {
    assert_int_equal(dist_local_ranks(), dist_ranks()); // one machine
    assert_int_equal(dist_local_rank(), dist_rank());
    assert_true(*dist_host(dist_ranks() - 1) != 0);
    assert_int_equal(is_main_rank(), dist_rank() == 0);
}

TEST(ranks_of_a_host_share_its_memory) {
    const double bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (strcmp(ops_device->name, "cpu") != 0) return; // a GPU's is its own
    assert_true((double)ops_device->memory_available() <= bytes / (double)dist_local_ranks() + 1);
}

int main(int argc, char **argv) {
    testing.all_aligned = 1;
    dist_start();
    if (dist_ranks() < 2 || dist_ranks() > 4) die_usage("takes 2 to 4 processes: test/ranks/mpirun.sh 3 %s", argv[0]);
    for (size_t sp = 1; sp <= dist_ranks(); sp++)
        if (dist_ranks() % sp == 0) dist_split(sp);
    dist_split(dist_ranks() % 2 ? dist_ranks() : 2);
    world.ranks = dist_ranks(), world.rank = dist_rank(), world.sp = dist_ranks() % 2 ? dist_ranks() : 2;
    RUN_LISTED(argc, argv, NULL);
}
