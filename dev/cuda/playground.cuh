/*
Common code of the kernel playground. A program includes the real file of llmc/ops/cuda, adds other ways to write its
kernels, and calls compare<Case>() with all of them. It checks every variant against plain loops in double at a small
shape, then times it at a large one, in turns, with cold caches (each run follows a write of a buffer larger than the L2
cache). It prints a table line for each: median time, rate, share of the rate of a copy (or of a square matrix product)
measured in the same run, largest error. A Case owns its tensors and has

    Case(Shape)          makes and fills them                     work()       bytes or FLOPs of one run
    reset()              puts back what a run changes             error()      of the last run, against plain loops
    tolerance            of error()

Built with -DCUDA_ON_CPU the same program checks its variants on the CPU, in both orders of threads, and times nothing.
*/
#ifndef DEV_CUDA_PLAYGROUND_CUH
#define DEV_CUDA_PLAYGROUND_CUH
#include "llmc/ops/cuda/platform.cuh"
#include "llmc/base/random.h"
#include <algorithm>
#include <initializer_list>
#include <vector>

#ifdef CUDA_ON_CPU
static void *memory_allocate(size_t bytes) {
    void *memory;
    return posix_memalign(&memory, 256, bytes ? bytes : 1) ? NULL : memory;
}
static void cuda_release(void *memory, size_t) { free(memory); }
static void cuda_copy_in(void *to, const void *host, size_t bytes) { memcpy(to, host, bytes); }
static void cuda_copy_out(void *host, const void *from, size_t bytes) { memcpy(host, from, bytes); }
static void cuda_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void cuda_zero(void *to, size_t bytes) { memset(to, 0, bytes); }
#else
#ifndef WITH_OP_SET // else dist.c is linked
#include "llmc/ranks/dist.c"
#endif
#include "llmc/ops/cuda/memory.cuh"
#endif

// ---- tensors on the device ------------------------------------------------------------------------------------------
static inline void set_element(float *x, double value) { *x = (float)value; }
static inline void set_element(int32_t *x, double value) { *x = (int32_t)value; }
template <typename T> static inline void set_element(T *x, double value) { x->bits = float_to_bf16((float)value); }
static inline double element(float x) { return x; }
static inline double element(int32_t x) { return x; }
template <typename T> static inline double element(T x) { return bf16_to_float(x.bits); }

constexpr size_t PERIOD = 1048573; // random values repeat after this many: a prime, so that no two rows are alike

template <typename T> struct Tensor {
    T *data;                // device
    size_t count;           // elements
    std::vector<T> pattern; // element i is pattern[i % its length] until a run changes it

    // value(i) of element i; called for the first PERIOD only
    template <typename F> Tensor(size_t count, F value) : count(count), pattern(std::min(count, PERIOD)) {
        data = (T *)memory_allocate(count * sizeof(T));
        if (!data) die("no device memory for a tensor of %s", human_bytes((double)(count * sizeof(T))));
        for (size_t i = 0; i < pattern.size(); i++) set_element(&pattern[i], value(i));
        for (size_t i = 0; i < count; i += pattern.size())
            cuda_copy_in(data + i, pattern.data(), std::min(pattern.size(), count - i) * sizeof(T));
    }
    Tensor(const Tensor &) = delete;
    Tensor &operator=(const Tensor &) = delete;
    ~Tensor() { cuda_release(data, count * sizeof(T)); }

    double at(size_t i) const { return element(pattern[i % pattern.size()]); } // before any run
    void restore(const Tensor &from) { cuda_copy(data, from.data, count * sizeof(T)); }
    Stored *stored() const { return (Stored *)data; }
    Summed *summed() const { return (Summed *)data; }

    // Largest difference from expected(i), over the largest |expected(i)|; infinite where something is not a number
    template <typename F> double error(F expected) const {
        std::vector<T> now(count);
        double difference = 0, largest = 0;
        cuda_copy_out(now.data(), data, count * sizeof(T));
        for (size_t i = 0; i < count; i++) {
            const double value = expected(i), apart = fabs(element(now[i]) - value);
            if (!(apart <= 1e300)) return INFINITY;
            difference = std::max(difference, apart), largest = std::max(largest, fabs(value));
        }
        return largest > 0 ? difference / largest : difference;
    }
};

// For Tensor's values: uniform, mean 0, standard deviation `spread`
static inline auto random_values(uint64_t seed, double spread = 1) {
    return [=](size_t i) { return spread * sqrt(12.0) * (random_uniform(seed, 0, i) - 0.5); };
}
static inline auto constant(double value) {
    return [=](size_t) { return value; };
}

// One rounding to floatX (half a unit of bf16 is up to 1/256); or the error of fp32 sums of a few thousand terms
constexpr double ROUNDING = sizeof(floatX) == 2 ? 1.0 / 250 : 2e-6;

// ---- what a variant is ----------------------------------------------------------------------------------------------
typedef enum { BYTES, FLOPS } Work;

template <typename Case> struct Variant {
    const char *name;
    void (*run)(Case &);
    bool (*possible)(const Case &) = NULL; // on this device; NULL: on any
};

static struct {
    size_t repeats;
    double copy_rate;    // bytes/s, read and written bytes counted both
    double product_rate; // FLOP/s; measured by product.cuh where a program needs it
    int wrong;           // variants beyond their tolerance
#ifndef CUDA_ON_CPU
    void *flush;
    size_t flush_bytes;
    cudaEvent_t begin, end;
#endif
} playground;

// ---- timing ---------------------------------------------------------------------------------------------------------
static inline double median(std::vector<double> values) { return median(values.data(), values.size()); }

#ifndef CUDA_ON_CPU
// Seconds of one run. The flush before it also keeps the device busy while the host queues the run, so that no launch
// is timed.
template <typename Run> static double cold_seconds(Run run) {
    float ms;
    CUDA_CHECK(cudaMemsetAsync(playground.flush, 0, playground.flush_bytes), "flushing the L2 cache");
    CUDA_CHECK(cudaEventRecord(playground.begin), "starting the clock");
    run();
    CUDA_CHECK(cudaEventRecord(playground.end), "stopping the clock");
    CUDA_CHECK(cudaEventSynchronize(playground.end), "waiting for a timed run");
    CUDA_CHECK(cudaEventElapsedTime(&ms, playground.begin, playground.end), "reading the clock");
    return ms * 1e-3;
}

template <typename Run> static double median_seconds(Run run, size_t repeats) {
    std::vector<double> seconds(repeats);
    run(); // kernels are loaded when they first run
    for (double &s : seconds) s = cold_seconds(run);
    return median(seconds);
}

__global__ void playground_copy_kernel(uint4 *out, const uint4 *in, size_t packs) {
    FOR_EACH_PACK(i, packs) out[i] = in[i];
}

// The faster of the driver's copy and a kernel that does nothing else.
static double measure_copy_rate(void) {
    const size_t bytes = (size_t)512 << 20;
    void *from = memory_allocate(bytes), *to = memory_allocate(bytes);
    if (!from || !to) die("no device memory for two buffers of %s to measure a copy", human_bytes((double)bytes));
    cuda_zero(from, bytes);
    const double driver = median_seconds([&] { cuda_copy(to, from, bytes); }, playground.repeats);
    const double kernel = median_seconds(
        [&] {
            LAUNCH((playground_copy_kernel), loop_grid(bytes / 16), LOOP_THREADS, 0)
            ((uint4 *)to, (const uint4 *)from, bytes / 16);
        },
        playground.repeats);
    cuda_release(from, bytes), cuda_release(to, bytes);
    return 2 * (double)bytes / std::min(driver, kernel);
}

static cudaDeviceProp device_properties(void) {
    cudaDeviceProp properties;
    device_require();
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0), "asking what the device is");
    return properties;
}

static void playground_clock(size_t repeats) {
    const cudaDeviceProp properties = device_properties();
    playground.repeats = repeats;
    playground.flush_bytes = std::max((size_t)4 * (size_t)properties.l2CacheSize, (size_t)128 << 20);
    playground.flush = memory_allocate(playground.flush_bytes);
    if (!playground.flush) die("no device memory to flush the L2 cache with");
    CUDA_CHECK(cudaEventCreate(&playground.begin), "making a clock");
    CUDA_CHECK(cudaEventCreate(&playground.end), "making a clock");
    playground.copy_rate = measure_copy_rate();
}
#endif

// `dev_X [REPEATS]`: what a program does first
static void playground_begin(int argc, char **argv) {
    size_t repeats = 21;
    if (argc > 2 || (argc > 1 && (!parse_size(argv[1], &repeats) || !repeats || repeats > 1000)))
        die_usage("usage: %s [REPEATS], 1 to 1000 [21]", argv[0]);
#ifndef CUDA_ON_CPU
    playground_clock(repeats);
    printf("%s, floatX %s; copy %.0f GB/s; medians of %zu runs with cold caches\n", device_properties().name,
           dtype_name(FLOATX_DTYPE), playground.copy_rate * 1e-9, repeats);
#else
    printf("on the CPU: variants are checked at small shapes, not timed; floatX %s\n", dtype_name(FLOATX_DTYPE));
#endif
}

// The exit status
static int playground_end(void) {
    if (playground.wrong) printf("%d variants are WRONG\n", playground.wrong);
    return playground.wrong ? EXIT_RUNTIME : EXIT_SUCCESS;
}

// ---- the table ------------------------------------------------------------------------------------------------------
template <typename Case> static double check_variant(Case &c, const Variant<Case> &variant) {
    double error = 0;
#ifdef CUDA_ON_CPU
    for (int order = 0; order < 2; order++, cuda_on_cpu::turn_order()) {
        c.reset();
        variant.run(c);
        error = std::max(error, c.error());
    }
#else
    c.reset();
    variant.run(c);
    error = c.error();
#endif
    if (!(error <= c.tolerance)) playground.wrong++;
    return error;
}

static void print_variant(const char *name, double seconds, double work, Work unit, double error, double tolerance) {
    printf("  %-46s", name);
    if (seconds > 0) {
        const double rate = work / seconds, best = unit == BYTES ? playground.copy_rate : playground.product_rate;
        printf(" %10.1f us %8.1f %-7s %5.1f %% of %s", seconds * 1e6, rate * (unit == BYTES ? 1e-9 : 1e-12),
               unit == BYTES ? "GB/s" : "TFLOP/s", 100 * rate / best, unit == BYTES ? "copy   " : "product");
    }
    printf("  error %.1e%s\n", error, error <= tolerance ? "" : "  WRONG");
}

// title: what is compared, at which shape
template <typename Case>
static void compare(const char *title, Work unit, typename Case::Shape check, typename Case::Shape timed,
                    std::initializer_list<Variant<Case>> variants) {
    std::vector<double> errors;
    double tolerance;
    printf("%s\n", title);
    {
        Case c(check);
        tolerance = c.tolerance;
        for (const Variant<Case> &variant : variants)
            errors.push_back(variant.possible && !variant.possible(c) ? 0 : check_variant(c, variant));
    }
#ifdef CUDA_ON_CPU
    (void)timed;
    for (size_t i = 0; i < variants.size(); i++)
        print_variant(variants.begin()[i].name, 0, 0, unit, errors[i], tolerance);
#else
    Case c(timed);
    std::vector<std::vector<double>> seconds(variants.size());
    for (size_t repeat = 0; repeat <= playground.repeats; repeat++)
        for (size_t i = 0; i < variants.size(); i++) {
            const Variant<Case> &variant = variants.begin()[i];
            if (variant.possible && !variant.possible(c)) continue;
            c.reset();
            const double s = cold_seconds([&] { variant.run(c); });
            if (repeat) seconds[i].push_back(s); // the first run loads the kernel
        }
    for (size_t i = 0; i < variants.size(); i++) {
        const Variant<Case> &variant = variants.begin()[i];
        if (seconds[i].empty())
            printf("  %-46s not possible on this device\n", variant.name);
        else
            print_variant(variant.name, median(seconds[i]), c.work(), unit, errors[i], tolerance);
    }
#endif
}

#endif
