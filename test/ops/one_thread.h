/*
Included before op set "cpu" (test/build.sh). libgomp wakes the threads of a parallel region at the region's end, even
if there is one thread: two system calls a region, a quarter of the time of tests with small models. Here a region of
one thread is a plain call.
*/
#if defined(__GNUC__) && !defined(__clang__)
#include <dlfcn.h>
#include <omp.h>

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    static void (*libgomp)(void (*)(void *), void *, unsigned, unsigned);
    if (threads == 1 || (!threads && omp_get_max_threads() == 1)) {
        body(data);
        return;
    }
    if (!libgomp) *(void **)&libgomp = dlsym(RTLD_NEXT, "GOMP_parallel");
    libgomp(body, data, threads, flags);
}
#endif
