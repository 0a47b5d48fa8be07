/*
Files that tensors are stored to and loaded from. An open file has no name, so its space is freed however the process
ends, kill -9 included. Each byte has an address in a reserved, inaccessible range of the process: callers need not know
that an address is on disk, and reading through it faults.

One thread writes and one reads, each in the order of requests, through two aligned pieces of memory. With three
helpers, each thread keeps four requests of a piece in flight. Direct I/O, where the file system has it, keeps the page
cache out of memory. If several transfers share a block, the writing thread alone reads, changes and writes it, so none
is lost.

An error ends the program when its transfer is awaited. With STREAMBP_TRANSFERS=late in the environment there are no
threads: a transfer happens when it is awaited, or when its queue is full. That is how tests find missing waits.

Part of an op set's translation unit, which passes its functions (DiskDevice).
*/
#ifndef LLMC_DISK_H
#define LLMC_DISK_H
#include "arena.h"
#include "llmc/base/file.h"
#include "llmc/ranks/dist.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

enum { DISK_WRITES, DISK_READS, DISK_WAYS };
enum { DISK_FILES = 16, DISK_QUEUE = 16, DISK_BLOCK = 4096, DISK_PIECE = DISK_PIECES / (2 * DISK_WAYS) };
// Number of helper threads of a direction; fewest bytes of a request for which a helper is used.
enum { DISK_HELPERS = 3, DISK_LEAST = 65536 };

typedef struct {
    char *base; // NULL: no file
    size_t bytes, align;
    int fd;
    char folder[256]; // folder as error messages name it
} DiskFile;

typedef struct {
    const DiskFile *file;
    size_t begin, bytes; // range of the file
    char *memory;
    int of_host; // 1: memory is the host's, not the device's
} DiskTransfer;

// What the op set does for transfers. mark, wait, begin, copy, copied are NULL if the device is host memory.
typedef struct {
    void *(*allocate)(size_t bytes); // host memory, whole pages; NULL: not enough
    void (*release)(void *pieces, size_t bytes);
    void (*at_work)(void);               // tells the other ranks that this rank is working
    void (*mark)(int way, size_t slot);  // when asking: orders the transfer after the kernels so far
    void (*wait)(int way, size_t slot);  // when awaiting: waits for the marked kernels, watching other ranks
    void (*begin)(int way, size_t slot); // in the thread: orders copies after the marked kernels
    void (*copy)(int way, void *to, const void *from, size_t bytes); // begins to copy between device and host
    void (*copied)(int way);                                         // waits for the copies begun
} DiskDevice;

typedef struct {
    const DiskFile *file;
    int way;
    char *memory;
    size_t bytes, offset; // bytes 0: the request is done
    pthread_t thread;     // the helper's thread
} DiskRequest;

typedef struct {
    DiskRequest request[DISK_HELPERS];
    DiskTransfer waiting[DISK_QUEUE]; // transfer n, counted from 1, is waiting[(n - 1) % DISK_QUEUE]
    int64_t asked, done;
    char *piece[2];
    pthread_t thread;
} DiskQueue;

static struct {
    DiskFile file[DISK_FILES];
    size_t files;
    DiskQueue queue[DISK_WAYS];
    pthread_mutex_t lock; // guards the queues, requests and the fields below
    pthread_cond_t changed, requested;
    int running, helping, late, failed; // running: 1: threads run; failed: the exit code
    const DiskDevice *device;
    char *pieces;
    char message[DIE_MESSAGE];
} disk = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .requested = PTHREAD_COND_INITIALIZER};

static const DiskFile *disk_file_of(const void *address) {
    for (size_t i = 0; i < DISK_FILES && disk.files; i++)
        if (disk.file[i].base && (uintptr_t)address - (uintptr_t)disk.file[i].base < disk.file[i].bytes)
            return &disk.file[i];
    return NULL;
}

// ---- reading and writing -------------------------------------------------------------------------------------------
static void disk_io(const DiskFile *file, int way, char *memory, size_t bytes, size_t offset) {
    while (bytes) {
        errno = 0;
        const ssize_t done = way == DISK_WRITES ? pwrite(file->fd, memory, bytes, (off_t)offset)
                                                : pread(file->fd, memory, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        const size_t whole = done > 0 ? (size_t)done / file->align * file->align : 0;
        if (!whole)
            die("--disk %s: %s %s failed: %s; the last checkpoint is whole, continue with --resume", file->folder,
                way == DISK_WRITES ? "writing" : "reading", human_bytes((double)bytes),
                errno ? error_text(errno) : "it ends early");
        memory += whole, offset += whole, bytes -= whole;
    }
}

static __thread jmp_buf disk_failure; // where a failed thread ends

// Reads or writes a piece. This thread and each helper thread of its direction move one part of the piece.
static void disk_piece(const DiskFile *file, int way, char *memory, size_t bytes, size_t offset) {
    DiskRequest *request = disk.queue[way].request;
    const size_t each = bytes / (DISK_HELPERS + 1) / DISK_BLOCK * DISK_BLOCK;
    const int helpers = disk.late || each < DISK_LEAST ? 0 : DISK_HELPERS;
    pthread_mutex_lock(&disk.lock);
    for (int i = 0; i < helpers; i++, memory += each, offset += each, bytes -= each)
        request[i].file = file, request[i].memory = memory, request[i].bytes = each, request[i].offset = offset;
    if (helpers) pthread_cond_broadcast(&disk.requested);
    pthread_mutex_unlock(&disk.lock);
    disk_io(file, way, memory, bytes, offset);
    pthread_mutex_lock(&disk.lock);
    for (int i = 0; i < helpers && !disk.failed; i += !request[i].bytes)
        if (request[i].bytes) pthread_cond_wait(&disk.changed, &disk.lock);
    const int failed = helpers && disk.failed;
    pthread_mutex_unlock(&disk.lock);
    if (failed) longjmp(disk_failure, 1);
}

// Contents of one piece of memory: `whole` bytes of disk blocks from `offset` on; the transfer moves `bytes` of them
// bytes from `skip` on
typedef struct {
    size_t offset, skip, bytes, whole;
} DiskPart;

static DiskPart disk_part(const DiskFile *file, size_t begin, size_t end) {
    DiskPart part;
    part.skip = begin % file->align, part.offset = begin - part.skip;
    part.bytes = min_size(end - begin, DISK_PIECE - part.skip);
    part.whole = (part.skip + part.bytes + file->align - 1) / file->align * file->align;
    return part;
}

static void disk_copy(int way, const DiskTransfer *t, void *to, const void *from, size_t bytes) {
    if (disk.device->copy && !t->of_host)
        disk.device->copy(way, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static void disk_copied(int way) {
    if (disk.device->copied) disk.device->copied(way);
}

// Completes a piece to whole disk blocks: reads the rest of the first and last block from the file. Then starts copying
// the bytes to write.
static void disk_fill(const DiskTransfer *t, char *piece, DiskPart part, const char *memory) {
    const size_t last = part.whole - t->file->align;
    if (part.skip) disk_io(t->file, DISK_READS, piece, t->file->align, part.offset);
    if (part.skip + part.bytes < part.whole && (last || !part.skip))
        disk_io(t->file, DISK_READS, piece + last, t->file->align, part.offset + last);
    disk_copy(DISK_WRITES, t, piece + part.skip, memory, part.bytes);
}

static void disk_write(const DiskTransfer *t, char *const piece[2]) {
    size_t begin = t->begin, i = 0;
    const size_t end = begin + t->bytes;
    DiskPart next = disk_part(t->file, begin, end);
    disk_fill(t, piece[0], next, t->memory);
    while (begin < end) {
        const DiskPart part = next;
        begin += part.bytes;
        disk_copied(DISK_WRITES);
        if (begin < end) {
            next = disk_part(t->file, begin, end);
            disk_fill(t, piece[!i], next, t->memory + (begin - t->begin));
        }
        disk_piece(t->file, DISK_WRITES, piece[i], part.whole, part.offset);
        i = !i;
    }
}

static void disk_read(const DiskTransfer *t, char *const piece[2]) {
    const size_t end = t->begin + t->bytes;
    for (size_t begin = t->begin, i = 0; begin < end; i = !i) {
        const DiskPart part = disk_part(t->file, begin, end);
        disk_piece(t->file, DISK_READS, piece[i], part.whole, part.offset);
        disk_copied(DISK_READS);
        disk_copy(DISK_READS, t, t->memory + (begin - t->begin), piece[i] + part.skip, part.bytes);
        begin += part.bytes;
    }
    disk_copied(DISK_READS);
}

static void disk_do(int way, int64_t n) {
    DiskQueue *queue = &disk.queue[way];
    const size_t slot = (size_t)(n - 1) % DISK_QUEUE;
    const DiskTransfer t = queue->waiting[slot];
    if (!t.bytes) return;
    if (disk.device->begin) disk.device->begin(way, slot);
    if (way == DISK_WRITES)
        disk_write(&t, queue->piece);
    else
        disk_read(&t, queue->piece);
}

// ---- threads -------------------------------------------------------------------------------------------------------
static void disk_caught(int code, const char *message) {
    pthread_mutex_lock(&disk.lock);
    disk.failed = code;
    snprintf(disk.message, sizeof(disk.message), "%s", message);
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
    longjmp(disk_failure, 1);
}

static void *disk_help(void *context) {
    DiskRequest *request = (DiskRequest *)context;
    die_caught = disk_caught;
    if (setjmp(disk_failure)) return NULL;
    pthread_mutex_lock(&disk.lock);
    for (;;) {
        while (disk.helping && !request->bytes) pthread_cond_wait(&disk.requested, &disk.lock);
        if (!request->bytes) break;
        pthread_mutex_unlock(&disk.lock);
        disk_io(request->file, request->way, request->memory, request->bytes, request->offset);
        pthread_mutex_lock(&disk.lock);
        request->bytes = 0;
        pthread_cond_broadcast(&disk.changed);
    }
    pthread_mutex_unlock(&disk.lock);
    return NULL;
}

static void *disk_run(void *context) {
    DiskQueue *queue = (DiskQueue *)context;
    die_caught = disk_caught;
    if (setjmp(disk_failure)) return NULL;
    pthread_mutex_lock(&disk.lock);
    for (;;) {
        while (disk.running && queue->done == queue->asked) pthread_cond_wait(&disk.changed, &disk.lock);
        if (queue->done == queue->asked) break;
        pthread_mutex_unlock(&disk.lock);
        disk_do((int)(queue - disk.queue), queue->done + 1);
        pthread_mutex_lock(&disk.lock);
        queue->done++;
        pthread_cond_broadcast(&disk.changed);
    }
    pthread_mutex_unlock(&disk.lock);
    return NULL;
}

static void disk_thread(pthread_t *thread, void *(*run)(void *), void *context) {
    const int error = pthread_create(thread, NULL, run, context);
    if (error) die("a thread for --disk cannot be started: %s; raise the limit with ulimit -u", strerror(error));
}

static void disk_start(const DiskDevice *device) {
    const char *transfers = getenv("STREAMBP_TRANSFERS");
    sigset_t all, before;
    disk.late = transfers && !strcmp(transfers, "late"), disk.running = disk.helping = 1, disk.failed = 0;
    disk.device = device, disk.pieces = (char *)device->allocate(DISK_PIECES);
    if (!disk.pieces)
        die("no memory for the %s that transfers to --disk pass through; free some memory",
            human_bytes((double)DISK_PIECES));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // only the main thread handles signals
    for (int way = 0; way < DISK_WAYS; way++) {
        DiskQueue *queue = &disk.queue[way];
        for (int i = 0; i < 2; i++) queue->piece[i] = disk.pieces + (2 * way + i) * DISK_PIECE;
        for (int i = 0; i < DISK_HELPERS && !disk.late; i++) {
            queue->request[i].way = way, queue->request[i].bytes = 0;
            disk_thread(&queue->request[i].thread, disk_help, &queue->request[i]);
        }
        if (!disk.late) disk_thread(&queue->thread, disk_run, queue);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void disk_stop(void) {
    pthread_mutex_lock(&disk.lock);
    disk.running = 0;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
    for (int way = 0; way < DISK_WAYS && !disk.late; way++) pthread_join(disk.queue[way].thread, NULL);
    pthread_mutex_lock(&disk.lock);
    disk.helping = 0;
    pthread_cond_broadcast(&disk.requested);
    pthread_mutex_unlock(&disk.lock);
    for (int way = 0; way < DISK_WAYS; way++) {
        disk.queue[way].done = disk.queue[way].asked;
        for (int i = 0; i < DISK_HELPERS && !disk.late; i++) pthread_join(disk.queue[way].request[i].thread, NULL);
    }
    disk.device->release(disk.pieces, DISK_PIECES);
}

// ---- transfers -----------------------------------------------------------------------------------------------------
// Returns when transfer n and all earlier transfers of its direction are done. Meanwhile tells other ranks that this
// rank is working.
static void disk_await(int way, int64_t n) {
    DiskQueue *queue = &disk.queue[way];
    if (!n) return;
    for (; disk.late && queue->done < n; queue->done++) disk_do(way, queue->done + 1);
    if (!disk.late && disk.device->wait) disk.device->wait(way, (size_t)(n - 1) % DISK_QUEUE);
    pthread_mutex_lock(&disk.lock);
    while (queue->done < n && !disk.failed) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        if (pthread_cond_timedwait(&disk.changed, &disk.lock, &until) == ETIMEDOUT) disk.device->at_work();
    }
    const int failed = queue->done < n ? disk.failed : 0;
    pthread_mutex_unlock(&disk.lock);
    if (failed) die_with(failed, "%s", disk.message);
}

// Queues a transfer. Returns its number among the transfers of its direction.
static int64_t disk_ask(int way, const DiskFile *file, const void *address, void *memory, size_t bytes, int of_host) {
    DiskQueue *queue = &disk.queue[way];
    const int64_t n = queue->asked + 1;
    const size_t slot = (size_t)(n - 1) % DISK_QUEUE, begin = (size_t)((const char *)address - file->base);
    if (bytes > file->bytes - begin) die("a transfer of %zu bytes passes the end of its file; please report it", bytes);
    if (n > DISK_QUEUE) disk_await(way, n - DISK_QUEUE);
    if (disk.device->mark) disk.device->mark(way, slot);
    pthread_mutex_lock(&disk.lock);
    DiskTransfer *t = &queue->waiting[slot];
    t->file = file, t->begin = begin, t->bytes = bytes, t->memory = (char *)memory, t->of_host = of_host;
    queue->asked = n;
    pthread_cond_broadcast(&disk.changed);
    pthread_mutex_unlock(&disk.lock);
    return n;
}

// Copies host memory to a place. Returns 0 and does nothing if `address` is not on disk.
static int disk_copy_in(void *address, const void *host, size_t bytes) {
    const DiskFile *file = disk_file_of(address);
    if (file) disk_await(DISK_WRITES, disk_ask(DISK_WRITES, file, address, (void *)(uintptr_t)host, bytes, 1));
    return file != NULL;
}
static int disk_copy_out(void *host, const void *address, size_t bytes) {
    const DiskFile *file = disk_file_of(address);
    if (file) disk_await(DISK_READS, disk_ask(DISK_READS, file, address, host, bytes, 1));
    return file != NULL;
}

// Returns when the threads have done all transfers.
static void disk_finish(void) {
    for (int way = 0; way < DISK_WAYS && disk.files && !disk.late; way++) disk_await(way, disk.queue[way].asked);
}

// Finishes pending transfers of memory or a file that is about to be released; with STREAMBP_TRANSFERS=late cancels
// these transfers.
static void disk_forget(const void *memory, size_t bytes, const DiskFile *file) {
    disk_finish();
    for (int way = 0; way < DISK_WAYS; way++) {
        DiskQueue *queue = &disk.queue[way];
        for (int64_t n = queue->done; n < queue->asked; n++) {
            DiskTransfer *t = &queue->waiting[n % DISK_QUEUE];
            if (t->file == file || (uintptr_t)t->memory - (uintptr_t)memory < bytes) t->bytes = 0;
        }
    }
}

// ---- the file ------------------------------------------------------------------------------------------------------
// File systems that are no disk of this machine
static const struct {
    unsigned type;
    const char *name;
} disk_refused[] = {
    {0x6969, "NFS"},    {0xff534d42, "CIFS"}, {0xfe534d42, "SMB"}, {0x517b, "SMB"},
    {0x01021997, "9p"}, {0x65735546, "FUSE"}, {0x5346414f, "AFS"}, {0x00c36400, "Ceph"},
    {0x01021994, NULL}, {0x858458f6, NULL}, // tmpfs, ramfs
};

static void disk_folder_require(const char *folder) {
    struct statfs system;
    if (!path_is_directory(folder)) die("--disk %s: is not a folder; make it, or give another folder", folder);
    if (access(folder, W_OK | X_OK) || statfs(folder, &system))
        die("--disk %s: cannot be used: %s; give a folder that you may write to", folder, error_text(errno));
    for (size_t i = 0; i < sizeof(disk_refused) / sizeof(disk_refused[0]); i++) {
        if ((unsigned)system.f_type != disk_refused[i].type) continue;
        if (!disk_refused[i].name)
            die("--disk %s: is host memory (tmpfs), not a disk; give a folder on a disk, or place tensors on host",
                folder);
        die("--disk %s: lies on %s, a network file system; give a folder on a disk of this machine", folder,
            disk_refused[i].name);
    }
}

// Returns the bytes that each of `ranks` ranks may take in the folder. Ends the program if the folder is unsuitable.
static size_t disk_bytes_left(const char *folder, size_t ranks) {
    struct statvfs system;
    struct rlimit limit;
    disk_folder_require(folder);
    if (statvfs(folder, &system)) die("--disk %s: cannot be examined: %s", folder, error_text(errno));
    const size_t left = (size_t)system.f_bavail * (size_t)system.f_frsize / ranks;
    const int limited = !getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY;
    return limited ? min_size(left, (size_t)limit.rlim_cur) : left;
}

// Opens a nameless file, or opens a named file and unlinks it at once.
static int disk_open(const char *folder) {
    char path[PATH_MAX];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL)) return fd;
    path_join(path, folder, "streambp-XXXXXX");
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) unlink(path);
    return fd;
}

static void *disk_file_allocate(const DiskDevice *device, const char *folder, size_t bytes) {
    size_t i = 0;
    const size_t left = disk_bytes_left(folder, 1); // other ranks may have taken their share already
    while (i < DISK_FILES && disk.file[i].base) i++;
    if (i == DISK_FILES) die("more than %d files on disk; please report it", DISK_FILES);
    DiskFile *file = &disk.file[i];
    snprintf(file->folder, sizeof(file->folder), "%s", folder);
    file->bytes = (max_size(bytes, 1) + DISK_BLOCK - 1) / DISK_BLOCK * DISK_BLOCK;
    if (file->bytes > left)
        die("--disk %s: %s are needed there, %s are available; give another folder or lower --disk-limit", folder,
            human_bytes((double)bytes), human_bytes((double)left));
    signal(SIGXFSZ, SIG_IGN); // then writing beyond a file size limit is an error of write(), not a signal
    file->fd = disk_open(folder);
    if (file->fd < 0) die("--disk %s: no file can be made there: %s; give another folder", folder, error_text(errno));
    if (fallocate(file->fd, 0, 0, (off_t)file->bytes) &&
        ((errno != EOPNOTSUPP && errno != ENOSYS) || ftruncate(file->fd, (off_t)file->bytes)))
        die("--disk %s: %s cannot be reserved there: %s; %s were free; give another folder or lower --disk-limit",
            folder, human_bytes((double)bytes), error_text(errno), human_bytes((double)left));
    if (!disk.files) disk_start(device);
    // uses direct I/O if it can write the first block
    const int flags = fcntl(file->fd, F_GETFL);
    char *const piece = disk.queue[DISK_WRITES].piece[0];
    disk_await(DISK_WRITES, disk.queue[DISK_WRITES].asked); // waits until the piece is free
    file->align = DISK_BLOCK;
    if (fcntl(file->fd, F_SETFL, flags | O_DIRECT) || pwrite(file->fd, piece, DISK_BLOCK, 0) != DISK_BLOCK)
        fcntl(file->fd, F_SETFL, flags), file->align = 1;
    file->base = (char *)mmap(NULL, file->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file->base == (char *)MAP_FAILED)
        die("cannot reserve %s of address space for tensors on disk: %s; raise ulimit -v", human_bytes((double)bytes),
            strerror(errno));
    disk.files++;
    return file->base;
}

static void disk_file_release(void *base) {
    DiskFile *file = (DiskFile *)(uintptr_t)disk_file_of(base);
    if (!file) return;
    disk_forget(NULL, 0, file);
    munmap(file->base, file->bytes);
    close(file->fd);
    file->base = NULL;
    if (!--disk.files) disk_stop();
}

#endif
