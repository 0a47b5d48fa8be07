/*
Included in front of op set "cpu" (test/build.sh). libgomp wakes the threads of a parallel region at its end even if there is
one: two system calls a region, a quarter of the time of tests with small models. A region of one thread is a plain call here.
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
