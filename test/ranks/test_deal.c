// Micro-batches over ranks: every document once, in parts within their bound, with the counts of the whole step;
// resuming with another number of ranks; empty parts add nothing.
#include "test/data/answer_files.h"
#include "llmc/data/prefetch.h"

__attribute__((weak)) const Ops *ops_device = NULL; // no tensors here

#define RANKS        6
#define MOST_BATCHES 40 // in a step of samples

static World world_of(size_t ranks, size_t rank, size_t sp) {
    World w = {ranks, rank, 0, sp};
    return w;
}

// ---- assignments ----------------------------------------------------------------------------------------------------
TEST(every_part_of_every_micro_batch_once) {
    for (size_t D = 1; D <= 12; D++) {
        for (size_t A = 1; A <= 12; A++) {
            const size_t parts = assign_step(world_of(D, 0, 1), A).parts;
            unsigned char taken[12][12] = {{0}};
            test_case("%zu replicas, %zu micro-batches", D, A);
            for (size_t d = 0; d < D; d++) {
                const Assignment assignment = assign_step(world_of(D, d, 1), A);
                assert_int_equal(assigned_batches(assignment) * D, A * parts); // equal work
                for (size_t i = 0; i < assigned_batches(assignment); i++)
                    taken[assigned_number(assignment, i)][assignment.part]++;
                for (size_t sp = 2; sp < 4; sp++) {
                    for (size_t s = 0; s < sp; s++) { // all ranks of a stream take the same
                        const Assignment shared = assign_step(world_of(D * sp, d * sp + s, sp), A);
                        assert_memory_equal(&shared, &assignment, sizeof(assignment));
                    }
                }
            }
            for (size_t i = 0; i < A; i++)
                for (size_t d = 0; d < parts; d++) assert_int_equal(taken[i][d], 1);
        }
    }
}

TEST(rounds_of_any_number_once) {
    for (size_t D = 1; D <= 12; D++) {
        for (size_t A = 1; A <= 12; A++) {
            unsigned char taken[12 + 12][12] = {{0}};
            size_t own = 0, parts = 1;
            for (size_t d = 0; d < D; d++) {
                const Assignment any = assign_rounds(assign_step(world_of(D, d, 1), 1 + A % 5), A);
                own = assigned_batches(any), parts = any.parts;
                for (size_t i = 0; i < own; i++) taken[assigned_number(any, i)][any.part]++;
            }
            assert_int_equal(own, parts > 1 ? 1 : (A + D - 1) / D);
            for (size_t i = 0; i < own * D / parts; i++)
                for (size_t d = 0; d < parts; d++) assert_int_equal(taken[i][d], 1);
        }
    }
}

TEST(evaluations_go_round_by_round) {
    for (size_t D = 1; D <= 12; D++) {
        for (size_t parts = 1; parts <= D; parts++) {
            for (size_t d = 0; d < D && D % parts == 0; d++) {
                const Assignment found = assign_evaluation(world_of(D, d, 1), parts);
                const Assignment expected = {D / parts, D / parts, d / parts, parts, d % parts};
                assert_memory_equal(&found, &expected, sizeof(found));
            }
        }
    }
}

// ---- the tokens of a shared stream ----------------------------------------------------------------------------------
// Checks a range against its definition: ceil(N / 2S) tokens each, then equal shares of the rest, dealt from the other
// end. Collectives take whole shares; the rank's tokens are at the beginning.
static void expect_range(size_t N, size_t S, size_t rank, size_t half) {
    const size_t each = (N + 2 * S - 1) / (2 * S), first = min_size(N, S * each), second = (N - first + S - 1) / S;
    const size_t from = min_size(N, half ? first + (S - 1 - rank) * second : rank * each);
    const size_t to = half ? min_size(N, from + second) : min_size(first, from + each);
    const Range part = sequence_part(N, S, rank, half), rows = sequence_half(N, S, half);
    const Range share = shard_range(rows.count, 1, S, half ? S - 1 - rank : rank);
    assert_int_equal(part.count, to - from);
    assert_int_equal(share.count, rows.count / S);
    assert_true(part.count <= share.count);
    if (!part.count) return;
    assert_int_equal(part.begin, from);
    assert_int_equal(part.begin, rows.begin + share.begin);
}

// Every token has one owner. A plan for the longest stream fits all others: the largest ownership never falls with
// length.
TEST(streams_are_dealt_evenly) {
    enum { LONGEST = 200 };
    for (size_t S = 1; S <= 17; S++) {
        size_t tokens = 0, longest = 0, rows = 0;
        for (size_t N = 1; N <= LONGEST; N++) {
            const size_t largest = sequence_largest_rank(N, S);
            unsigned char owned[LONGEST] = {0};
            test_case("%zu tokens, %zu ranks", N, S);
            assert_int_equal(sequence_tokens(N, S, largest), sequence_share_max(N, S));
            assert_int_equal(sequence_share_max(N, S), N / S + (N % S != 0));
            assert_int_equal(sequence_rows(N, S), sequence_half(N, S, 0).count + sequence_half(N, S, 1).count);
            assert_in_range(sequence_rows(N, S), max_size(N, rows), N + S - 1);
            assert_true(sequence_share_max(N, S) >= tokens);
            tokens = sequence_share_max(N, S), rows = sequence_rows(N, S);
            for (size_t half = 0; half < 2; half++)
                longest = max_size(longest, sequence_part(N, S, largest, half).count);
            for (size_t i = 0; i < 2 * S; i++) {
                const Range part = sequence_part(N, S, i / 2, i % 2);
                for (size_t t = part.begin; t < part.begin + part.count; t++) owned[t]++;
                if (S > 1) expect_range(N, S, i / 2, i % 2);
                assert_true(part.count <= longest && sequence_tokens(N, S, i / 2) <= tokens);
            }
            for (size_t t = 0; t < N; t++) assert_int_equal(owned[t], 1);
        }
    }
}

// ---- even divisions -------------------------------------------------------------------------------------------------
typedef struct {
    size_t ranks, A, B;
    const char *fit; // NULL: it divides evenly
} Even;

static void check_even(const void *context) {
    const Even *u = (const Even *)context;
    const World w = world_of(u->ranks, 0, 1);
    assign_check_regular(assign_step(w, u->A), w, u->B);
}

TEST(what_does_not_come_out_even_is_refused) {
    static const Even cases[] = {{4, 1, 3, "--batch 4 or --grad-accum 4 would fit"},
                                 {4, 2, 1, "--batch 2 or --grad-accum 4 would fit"},
                                 {3, 1, 4, "--batch 6 or --grad-accum 3 would fit"},
                                 {6, 4, 2, "--batch 3 or --grad-accum 6 would fit"},
                                 {4, 1, 4, NULL},
                                 {4, 4, 3, NULL},
                                 {4, 2, 2, NULL},
                                 {6, 4, 3, NULL},
                                 {1, 1, 1, NULL}};
    for (const Even *c = cases; c < cases + COUNT_OF(cases); c++) {
        if (c->fit)
            expect_refused(check_even, c, EXIT_USAGE, c->fit);
        else
            check_even(c);
    }
}

// ---- parts of the loader's micro-batches ----------------------------------------------------------------------------
// Checks that `part` is documents of the whole, from token part->first on, without cutting pairs or groups.
static void expect_part_of(const Batch *part, Batch *whole) {
    const size_t first = part->first, end = first + part->N;
    Batch same = *whole;
    size_t begin = 0;
    while (whole->document_start[begin] < first) begin++;
    assert_int_equal(whole->document_start[begin], first);
    for (size_t d = 0; d <= part->documents; d++)
        assert_int_equal(part->document_start[d] + first, whole->document_start[begin + d]);
    same.N = part->N, same.documents = part->documents, same.document_start = part->document_start;
    same.tokens += first, same.targets += first, same.loss_weight += first, same.position += first;
    if (same.origin) same.origin += begin;
    if (same.group) same.group += begin;
    if (same.document_weight) same.document_weight += begin;
    if (same.reward) same.reward += begin;
    if (same.advantage) same.advantage += first;
    expect_same_batch(part, &same);
    if (!whole->group) return;
    if (begin) assert_int_not_equal(whole->group[begin - 1], whole->group[begin]);
    if (end < whole->N)
        assert_int_not_equal(whole->group[begin + part->documents - 1], whole->group[begin + part->documents]);
}

static void expect_nothing(const Batch *part) {
    assert_int_equal(part->N, 1);
    assert_int_equal(part->documents, 1);
    assert_int_equal(part->targets[0], -1);
    assert_int_equal(part->document_start[1] - part->document_start[0], 1);
    assert_true(batch_tokens(part) == 0);
}

typedef struct {
    DataLoader loader[RANKS];
    Prefetch ahead[RANKS];
} Ranks;

static Ranks *ranks_begin(const char *path, const DataSettings *settings, size_t D, size_t A, uint64_t place) {
    Ranks *ranks = (Ranks *)case_memory(sizeof(Ranks));
    for (size_t d = 0; d < D; d++) {
        ranks->loader[d] = open_data(path, settings);
        prefetch_allocate(&ranks->ahead[d], &ranks->loader[d], assign_step(world_of(D, d, 1), A));
        prefetch_start(&ranks->ahead[d], place);
    }
    return ranks;
}

static void ranks_end(Ranks *ranks, size_t D) {
    for (size_t d = 0; d < D; d++) prefetch_free(&ranks->ahead[d]), dataloader_close(&ranks->loader[d]);
}

// Compares one step of D ranks with the loader alone; returns the place after it, and counts empty parts.
static uint64_t expect_step(Ranks *ranks, size_t D, DataLoader *alone, Batch *whole, size_t A, size_t *empty) {
    const size_t own_batches = prefetch_wait(&ranks->ahead[0])->step_batches;
    const int samples = alone->packing.step > 0;
    const SequenceBound bound = dataloader_part_bound(alone, samples ? 1 : ranks->ahead[0].assignment.parts);
    if (samples) A = dataloader_step(alone, alone->next);
    size_t covered[MOST_BATCHES] = {0};
    TargetCounts counts = {0}, own = {0};
    uint64_t after = 0;
    for (size_t i = 0; i < A; i++)
        dataloader_next(alone, &whole[i]), counts = target_counts_add(counts, batch_count(&whole[i]));
    for (size_t i = 0; i < own_batches; i++) {
        for (size_t d = 0; d < D; d++) {
            const MicroBatch *micro = prefetch_take(&ranks->ahead[d]);
            const Batch *part = &micro->batch;
            const Assignment assignment = assign_step(world_of(D, d, 1), A);
            assert_int_equal(micro->step_batches, own_batches);
            if (!samples) assert_int_equal(micro->number, assigned_number(assignment, i));
            assert_true(micro->step_counts.tokens == counts.tokens && micro->step_counts.documents == counts.documents);
            assert_true(micro->step_counts.groups == counts.groups);
            assert_true(part->N <= bound.N && part->documents <= bound.documents);
            own = target_counts_add(own, batch_count(part));
            after = micro->after;
            *empty += part->empty != 0;
            if (part->empty) {
                expect_nothing(part);
                continue;
            }
            expect_part_of(part, &whole[micro->number]);
            assert_int_equal(part->first, covered[micro->number]); // ranks follow the order of parts
            covered[micro->number] += part->N;
        }
    }
    for (size_t i = 0; i < A; i++) assert_int_equal(covered[i], whole[i].N);
    assert_true(own.tokens == counts.tokens && own.documents == counts.documents && own.groups == counts.groups);
    assert_int_equal(after, alone->next);
    return after;
}

// Runs steps with changing numbers of ranks, each resuming from the previous place.
static void expect_dealt(const char *path, const DataSettings *settings, size_t A, int regular) {
    DataLoader alone = open_data(path, settings);
    Batch whole[MOST_BATCHES];
    size_t empty = 0;
    uint64_t place = 0;
    if (settings->step) A = MOST_BATCHES;
    for (size_t i = 0; i < A; i++) whole[i] = batch_for(&alone);
    for (size_t D = 1; D <= RANKS; D++) {
        const size_t parts = settings->step ? 1 : assign_step(world_of(D, 0, 1), A).parts;
        if (regular && settings->B % parts) continue;
        test_case("B %zu, T %zu, %zu micro-batches, %zu ranks", settings->B, settings->T, A, D);
        Ranks *ranks = ranks_begin(path, settings, D, A, place);
        for (size_t step = 0; step < 8; step++) place = expect_step(ranks, D, &alone, whole, A, &empty);
        ranks_end(ranks, D);
    }
    if (!regular && !settings->step && settings->B == 1)
        assert_true(empty > 0); // a stream of one document has no second part
    if (regular && !settings->step) assert_int_equal(empty, 0);
    for (size_t i = 0; i < A; i++) batch_free(&whole[i]);
    dataloader_close(&alone);
}

// Writes a shard to a file, which outlives the test case's memory.
static const char *kept_shard(const MadeShard *made, const MadeDocument *document, size_t count) {
    static char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s", write_shard("dealt.bin", made, document, count));
    return path;
}

TEST(packed_documents) {
    MadeShard made = made_shard(4);
    const char *path = kept_shard(&made, made_documents(0, 300, 100, 3), 300);
    for (size_t A = 1; A <= 6; A += A < 3 ? 1 : 3) {
        for (size_t B = A % 2 ? 1 : 5; B <= 9; B += 8) {
            DataSettings settings = data_settings(B, 100);
            expect_dealt(path, &settings, A, 0);
        }
    }
}

TEST(pairs_groups_and_values) {
    for (size_t c = 0; c < 3; c++) {
        const Objective objective = objective_of(c == 0 ? OBJECTIVE_DPO : c == 1 ? OBJECTIVE_GRPO : OBJECTIVE_PPO);
        MadeShard made = made_kind(objective_data[objective.kind]);
        MadeDocument document[300];
        const char *path = kept_shard(&made, document, made_groups(&made, document, 0, 60, c == 0 ? 2 : 5, 40));
        for (size_t B = 1; B <= 5; B += 2) {
            DataSettings settings = answer_settings(B, 40, &objective);
            expect_dealt(path, &settings, (B + c) % 4 < 2 ? 1 : 4, 0);
        }
    }
}

TEST(documents_of_equal_length) {
    static const size_t batches[] = {1, 2, 3, 4, 8, 12};
    for (size_t A = 1; A <= 6; A++) {
        for (size_t i = A % 2; i < COUNT_OF(batches); i += 2) {
            DataSettings settings = data_settings(batches[i], 17);
            settings.shuffle = A < 4 ? SHUFFLE_ON : SHUFFLE_AUTO;
            expect_dealt("test/golden/tokens_uint16.bin", &settings, A, 1);
        }
    }
}

// Steps of a fixed number of samples, with varying numbers of micro-batches, over the ends of epochs.
TEST(steps_of_samples) {
    const Objective dpo = objective_of(OBJECTIVE_DPO);
    MadeShard made = made_shard(4), pairs = made_kind(KIND_PAIRS);
    MadeDocument document[120];
    for (size_t step = 1; step <= 34; step += 11) { // of 60 pairs, 40 documents, 240 documents of 17 positions
        DataSettings settings = answer_settings(1 + step % 3, 40, &dpo);
        settings.step = step;
        made_groups(&pairs, document, 0, 60, 2, 40);
        expect_dealt(kept_shard(&pairs, document, 120), &settings, 0, 0);
        settings.objective = NULL, settings.T = 100, settings.shuffle = step % 2 ? SHUFFLE_ON : SHUFFLE_OFF;
        expect_dealt(kept_shard(&made, made_documents(0, 40, 150, 3), 40), &settings, 0, 0);
        settings.T = 17, settings.B = step % 2 + 1, settings.step = step + step % 2;
        expect_dealt("test/golden/tokens_uint16.bin", &settings, 0, 1);
    }
}

// ---- nothing --------------------------------------------------------------------------------------------------------
TEST(an_empty_part_adds_nothing) {
    for (size_t kind = 0; kind < OBJECTIVES; kind++) {
        Objective o = objective_of((ObjectiveKind)kind);
        Batch whole = batch_allocate(6, 2);
        double logp = -1.5, entropy = 0.5, weight = 7;
        o.beta = 0.1, o.gamma = 1, o.clip_low = o.clip_high = 0.2, o.temperature.divisor = 1;
        batch_allocate_answers(&whole, 1, 1);
        if (kind == OBJECTIVE_DISTILL) whole.teacher = teacher_allocate(6, 2);
        for (size_t i = 0; i < 6; i++) whole.loss_weight[i] = whole.advantage[i] = 1, whole.targets[i] = 3;
        whole.document_start[1] = 3, whole.reward[0] = 1;
        if (!objective_is_of_pairs(&o)) whole.group[1] = 1;
        batch_set_positions(&whole);
        Batch part = batch_part(&whole, 5, 0);
        assert_true(part.empty);
        expect_nothing(&part);
        TargetCounts counts = batch_count(&part);
        assert_true(counts.tokens == 0 && counts.documents == 0 && counts.groups == 0);
        Metrics metrics = {0};
        objective_weights(&o, &part, 2, 0, 1, &logp, &weight, DTYPE_FP64);
        assert_true(weight == 0);
        assert_true(objective_loss(&o, &part, 2, &logp, &entropy, DTYPE_FP64, &metrics) == 0);
        assert_int_equal(metrics.count, 0);
        batch_free(&whole);
    }
}

// Documents go to the part that holds their middle.
TEST(parts_are_about_equal) {
    static const struct {
        size_t lengths[4], first[2]; // of the documents; of the two parts
    } cases[] = {{{1, 1, 9, 0}, {2, 9}}, {{9, 1, 1, 0}, {9, 2}}, {{4, 4, 4, 4}, {8, 8}}, {{5, 1, 5, 1}, {6, 6}}};
    for (size_t i = 0; i < 2 * COUNT_OF(cases); i++) {
        const size_t *lengths = cases[i / 2].lengths, N = cases[i / 2].first[0] + cases[i / 2].first[1];
        Batch whole = batch_allocate(N, lengths[3] ? 4 : 3);
        for (size_t d = 0; d < whole.documents; d++) whole.document_start[d + 1] = whole.document_start[d] + lengths[d];
        batch_set_positions(&whole);
        const Batch taken = batch_part(&whole, 2, i % 2);
        assert_int_equal(taken.N, cases[i / 2].first[i % 2]);
        batch_free(&whole);
    }
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
