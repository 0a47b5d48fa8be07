// The prefetching thread: the same micro-batches at any speed of either side, each with its step's counts, the same
// errors, and no thread left at the end.
#include "document_files.h"
#include "llmc/data/prefetch.h"

static const char *write_documents(size_t documents, size_t most) {
    MadeShard made = made_shard(4);
    return write_shard("ahead.bin", &made, made_documents(0, documents, most, 3), documents);
}

static void wait_microseconds(size_t most) {
    struct timespec time = {0, (long)(1000 * test_random_below(most + 1))};
    nanosleep(&time, NULL);
}

// Takes `steps` steps from the current place: the same batches as the loader alone, and right counts.
static void expect_steps(Prefetch *ahead, DataLoader *alone, Batch *batch, size_t steps, size_t pause) {
    for (size_t step = 0; step < steps; step++) {
        TargetCounts sum = {0}, told = {0};
        for (size_t i = 0; i < ahead->assignment.batches; i++) {
            if (pause) wait_microseconds(pause);
            dataloader_next(alone, batch);
            const MicroBatch *micro = prefetch_take(ahead);
            if (pause) wait_microseconds(pause); // remains ours for that long
            expect_same_batch(&micro->batch, batch);
            assert_int_equal(micro->after, alone->next);
            sum = target_counts_add(sum, batch_count(batch));
            told = micro->step_counts;
        }
        assert_true(sum.tokens == told.tokens && sum.documents == told.documents && sum.groups == told.groups);
    }
}

// Compares a loader with prefetching to one without, for some steps, over the end of an epoch.
static void expect_read_ahead(const char *path, DataSettings settings, size_t accumulated, size_t steps, size_t pause) {
    SCOPED_LOADER one = open_data(path, &settings), other = open_data(path, &settings);
    SCOPED_BATCH batch = batch_for(&other);
    Prefetch ahead;
    prefetch_allocate(&ahead, &one, assign_step(world_alone(), accumulated));
    prefetch_start(&ahead, 0);
    allocation_guard = 1;
    expect_steps(&ahead, &other, &batch, steps, pause);
    allocation_guard = 0;
    assert_true(other.next > dataloader_batches(&one)); // over the end of epochs
    assert_true(ahead.waited > 0);
    prefetch_free(&ahead);
}

TEST(the_same_at_any_speed) {
    static const size_t pauses[] = {0, 1, 30, 300}, accumulated[] = {1, 4, 7};
    for (size_t p = 0; p < 4; p++) {
        for (size_t l = 0; l < 2; l++) { // short documents: reading is slower than taking
            const size_t a = accumulated[(p + l) % 3];
            test_case("pause %zu, %s documents, %zu accumulated", pauses[p], l ? "long" : "short", a);
            const char *path = l ? write_documents(30, 4000) : write_documents(900, 20);
            expect_read_ahead(path, data_settings(4, 100 << l), a, 150 / a, pauses[p]);
        }
    }
}

TEST(stopped_and_started_anywhere) {
    DataSettings settings = data_settings(2, 100);
    const char *path = write_documents(200, 300);
    SCOPED_LOADER one = open_data(path, &settings), other = open_data(path, &settings);
    SCOPED_BATCH batch = batch_for(&other);
    Prefetch ahead;
    prefetch_allocate(&ahead, &one, assign_step(world_alone(), 2));
    for (size_t round = 0; round < 60; round++) {
        uint64_t place = test_random_below(5) * one.segments + test_random_below(20);
        other.next = place;
        prefetch_start(&ahead, place);
        expect_steps(&ahead, &other, &batch, test_random_below(4), 0);
        if (test_random_below(2)) wait_microseconds(50);
        prefetch_stop(&ahead);
    }
    assert_null(prefetch_running);
    prefetch_free(&ahead);
}

// ---- errors ---------------------------------------------------------------------------------------------------------
typedef struct {
    const char *path;
    size_t steps; // taken before the one that fails
} Failing;

// Reads in the order of the file, one document to a stream.
static void take_until_it_fails(const void *context) {
    const Failing *f = (const Failing *)context;
    DataSettings settings = data_settings(1, 100);
    Prefetch ahead;
    settings.shuffle = SHUFFLE_OFF;
    DataLoader loader = open_data(f->path, &settings);
    prefetch_allocate(&ahead, &loader, assign_step(world_alone(), 1));
    prefetch_start(&ahead, 0);
    for (size_t i = 0; i < f->steps; i++) {
        usleep(5000); // lets the thread run ahead into its failure
        prefetch_take(&ahead);
    }
    prefetch_take(&ahead);
    printf("the faulty micro-batch was taken\n");
}

TEST(errors_come_where_they_would_have) {
    MadeDocument document[5];
    MadeShard made = made_shard(4);
    for (size_t i = 0; i < 5; i++) document[i] = made_document(i, 81, 0);
    for (size_t k = 0; k < 5; k++) {
        ShardImage image = shard_image(&made, document, 5);
        char words[64];
        image.bytes[image.ids + (k * 81 + 7) * 4] ^= 1;
        const Failing f = {write_image("faulty.bin", image), k};
        snprintf(words, sizeof(words), "faulty.bin: the checksum of document %zu is wrong", k);
        expect_refused(take_until_it_fails, &f, EXIT_RUNTIME, words);
    }
}

static void end_in_the_middle(const void *context) {
    static Prefetch ahead[3];
    static DataLoader loader[3];
    DataSettings settings = data_settings(2, 100);
    for (size_t i = 0; i < 3; i++) {
        loader[i] = open_data((const char *)context, &settings);
        prefetch_allocate(&ahead[i], &loader[i], assign_step(world_alone(), 1));
        prefetch_start(&ahead[i], 0);
        prefetch_take(&ahead[i]);
    }
    prefetch_stop(&ahead[1]);
    die("something else");
}

TEST(another_error_stops_the_threads) {
    const char *path = write_documents(200, 90);
    for (size_t i = 0; i < 4; i++) expect_refused(end_in_the_middle, path, EXIT_RUNTIME, "something else");
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
