/*
Files on disk (llmc/ops/disk.h) on a misbehaving system: wrong folders, no disk, a small one; writes and reads that
fail, stop early or are slow; a killed process. System calls go through this file; the device is host memory.
*/
#include "test/base/child.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

// ---- a system that fails -------------------------------------------------------------------------------------------
static struct {
    int writes, reads;   // countdown to a failure
    int error;           // its errno, or 0: the call does nothing
    size_t most;         // most bytes of a call; 0: any
    int no_temporary;    // O_TMPFILE is unknown
    int no_direct, full; // refuses direct writes at first; refuses reservations
    unsigned type;       // of the file system; 0: its own
    size_t left;         // its free bytes; 0: its own
} faulty;

static ssize_t fault(int *until, ssize_t done) {
    if (__atomic_load_n(until, __ATOMIC_SEQ_CST) <= 0 || __atomic_sub_fetch(until, 1, __ATOMIC_SEQ_CST))
        return done; // of several threads
    errno = faulty.error;
    return faulty.error ? -1 : 0;
}
static size_t part(ssize_t done, size_t bytes) {
    if (done != -2) return (size_t)done;
    return faulty.most && bytes > faulty.most ? faulty.most : bytes;
}
static ssize_t test_pwrite(int fd, const void *memory, size_t bytes, off_t offset) {
    if (faulty.no_direct && (fcntl(fd, F_GETFL) & O_DIRECT)) return errno = EINVAL, -1;
    const ssize_t faults = fault(&faulty.writes, -2);
    if (faults == -1) return -1;
    return pwrite(fd, memory, part(faults, bytes), offset);
}
static ssize_t test_pread(int fd, void *memory, size_t bytes, off_t offset) {
    const ssize_t faults = fault(&faulty.reads, -2);
    if (faults == -1) return -1;
    return pread(fd, memory, part(faults, bytes), offset);
}
static int test_open(const char *path, int flags, int mode) {
    if (faulty.no_temporary && (flags & O_TMPFILE) == O_TMPFILE) return errno = EOPNOTSUPP, -1;
    return open(path, flags, mode);
}
static int test_fallocate(int fd, int mode, off_t offset, off_t bytes) {
    if (faulty.full) return errno = ENOSPC, -1;
    return fallocate(fd, mode, offset, bytes);
}
static int test_statfs(const char *path, struct statfs *system) {
    const int result = statfs(path, system);
    if (faulty.type) system->f_type = (__typeof__(system->f_type))faulty.type;
    return result;
}
static int test_statvfs(const char *path, struct statvfs *system) {
    const int result = statvfs(path, system);
    if (faulty.left) system->f_bavail = faulty.left / system->f_frsize;
    return result;
}

#include "llmc/base/file.h"
#include "llmc/ranks/dist.h"
#define pwrite(...)       test_pwrite(__VA_ARGS__)
#define pread(...)        test_pread(__VA_ARGS__)
#define open(...)         test_open(__VA_ARGS__)
#define fallocate(...)    test_fallocate(__VA_ARGS__)
#define statfs(path, to)  test_statfs(path, to)
#define statvfs(path, to) test_statvfs(path, to)
struct statfs;
struct statvfs;
#include "llmc/ops/disk.h"
#undef statfs
#undef statvfs
#undef open

static void *pieces_allocate(size_t bytes) { return aligned_alloc(DISK_BLOCK, bytes); }
static void pieces_release(void *pieces, size_t bytes) { (void)bytes, free(pieces); }
static void at_work(void) {}
static const DiskDevice host = {.allocate = pieces_allocate, .release = pieces_release, .at_work = at_work};

// ---- round trips ---------------------------------------------------------------------------------------------------
enum { BYTES = 2 * DISK_PIECE + 12345 };

// Writes many ranges, many in flight and neighbours in one block, and reads everything back.
static void write_and_read(const void *context) {
    char *const file = (char *)disk_file_allocate(&host, scratch_folder(), BYTES);
    unsigned char *expected = (unsigned char *)malloc(BYTES), *seen = (unsigned char *)malloc(BYTES);
    unsigned char *source = (unsigned char *)malloc(BYTES);
    (void)context;
    for (size_t i = 0; i < BYTES; i++)
        expected[i] = (unsigned char)(i >> 3), source[i] = (unsigned char)(i * 40503 >> 7);
    disk_copy_in(file, expected, BYTES);
    for (size_t i = 0; i < 60; i++) {
        const size_t most = i % 10 ? 3000 : BYTES - 9000, begin = test_random_below(9000 + i % 10 * 100000);
        const size_t bytes = 1 + test_random_below(most);
        disk_ask(DISK_WRITES, disk_file_of(file), file + begin, source + begin, bytes, 0);
        memcpy(expected + begin, source + begin, bytes);
    }
    disk_finish();
    for (int64_t n = 0; n < 3; n++) disk_ask(DISK_READS, disk_file_of(file), file, seen, BYTES, 0);
    disk_await(DISK_READS, disk.queue[DISK_READS].asked);
    if (memcmp(seen, expected, BYTES)) die("other bytes were read");
    disk_file_release(file);
    free(expected), free(seen), free(source);
}

static void expect_right(void) {
    const Child *child = run_child(write_and_read, NULL);
    if (child->code) test_fail("exit code %d: %s", child->code, child->err);
}

TEST(what_is_written_is_read) {
    test_case("direct I/O");
    expect_right();
    test_case("through the page cache");
    faulty.no_direct = 1;
    expect_right();
    test_case("a system without O_TMPFILE");
    faulty.no_direct = 0, faulty.no_temporary = 1;
    expect_right();
    faulty.no_temporary = 0;
    test_case("calls that do a part");
    faulty.most = (300 << 10) + 512;
    expect_right();
    for (int at = 3; at < 40; at += 9) {
        test_case("call %d is interrupted", at);
        faulty.writes = at, faulty.reads = at % 4 + 1, faulty.error = EINTR;
        expect_right();
    }
    memset(&faulty, 0, sizeof(faulty));
}

// ---- one line ------------------------------------------------------------------------------------------------------
static void failing(const char *words) {
    for (int late = 0; late < 2; late++) {
        if (late) setenv("STREAMBP_TRANSFERS", "late", 1);
        expect_refused(write_and_read, NULL, 1, words);
        unsetenv("STREAMBP_TRANSFERS");
    }
    memset(&faulty, 0, sizeof(faulty));
}

TEST(a_disk_that_fails_ends_the_run) {
    static const char whole[] = "; the last checkpoint is whole, continue with --resume";
    char words[200];
    for (int at = 2; at < 50; at = at * 3 / 2) { // call 1 probes direct I/O
        test_case("write %d", at);
        faulty.writes = at, faulty.error = EIO;
        snprintf(words, sizeof(words), "failed: %s%s", strerror(EIO), whole);
        failing(words);
        faulty.writes = at, faulty.error = ENOSPC;
        snprintf(words, sizeof(words), "failed: %s%s", strerror(ENOSPC), whole);
        failing(words);
    }
    test_case("a write of nothing, a read behind the end");
    faulty.writes = 5;
    failing("it ends early");
    faulty.reads = 1;
    failing("it ends early");
    faulty.reads = 2, faulty.error = EIO;
    failing("reading");
}

static void allocate(const void *context) { disk_file_allocate(&host, (const char *)context, (size_t)1 << 20); }
static void allocate_limited(const void *context) {
    const struct rlimit limit = {1 << 18, 1 << 18};
    setrlimit(*(const int *)context, &limit);
    disk_file_allocate(&host, scratch_folder(), (size_t)1 << 20);
}
static void refused(const char *folder, const char *words) {
    expect_refused(allocate, folder, 1, words);
    memset(&faulty, 0, sizeof(faulty));
}

TEST(folders_that_are_refused) {
    static const struct {
        unsigned type;
        const char *words;
    } types[] = {{0x6969, "lies on NFS, a network file system; give a folder on a disk of this machine"},
                 {0xff534d42, "lies on CIFS, a network"},
                 {0x01021997, "lies on 9p, a network"},
                 {0x65735546, "lies on FUSE, a network"},
                 {0x01021994, "is host memory (tmpfs), not a disk"}};
    const int files = RLIMIT_FSIZE;
    write_file(scratch_path("file"), "x", 1);
    refused(scratch_path("nothing"), "nothing: is not a folder");
    refused(scratch_path("file"), "file: is not a folder");
    remove(scratch_path("file"));
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        faulty.type = types[i].type;
        refused(scratch_folder(), types[i].words);
    }
    faulty.left = 4 << 10;
    refused(scratch_folder(), ": 1.00 MiB are needed there, 4.00 KiB are available; give another folder");
    faulty.full = 1;
    refused(scratch_folder(), ": 1.00 MiB cannot be reserved there: No space left on device");
    expect_refused(allocate_limited, &files, 1, ": 1.00 MiB are needed there, 256.00 KiB are available");
    if (geteuid()) {
        mkdir(scratch_path("locked"), 0500);
        refused(scratch_path("locked"), "locked: cannot be used: Permission denied");
    }
}

// ---- no leftovers --------------------------------------------------------------------------------------------------
static size_t names_in(const char *folder) {
    size_t names = 0;
    DIR *open_folder = opendir(folder);
    assert_non_null(open_folder);
    for (const struct dirent *entry; (entry = readdir(open_folder)) != NULL;) names += *entry->d_name != '.';
    closedir(open_folder);
    return names;
}
static void killed(const void *context) {
    static char bytes[100000];
    char *const file = (char *)disk_file_allocate(&host, (const char *)context, (size_t)40 << 20);
    for (size_t i = 0; i < 16; i++)
        disk_ask(DISK_WRITES, disk_file_of(file), file + i * sizeof(bytes), bytes, sizeof(bytes), 0);
    if (!names_in((const char *)context)) kill(getpid(), SIGKILL);
}

TEST(a_killed_process_leaves_no_file) {
    const char *folder = scratch_path("killed");
    mkdir(folder, 0700);
    for (int named = 0; named < 2; named++) {
        faulty.no_temporary = named;
        if (run_child(killed, folder)->code != 1000 + SIGKILL) test_fail("the file had a name while it was open");
        assert_int_equal(names_in(folder), 0);
    }
    memset(&faulty, 0, sizeof(faulty));
}

// A byte on disk is not memory.
static void dereference(const void *context) {
    const volatile char *file = (const volatile char *)disk_file_allocate(&host, (const char *)context, 10000);
    exit(file[5000]);
}
TEST(an_address_cannot_be_read_through) {
    assert_int_equal(run_child(dereference, scratch_folder())->code, 1000 + SIGSEGV);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
