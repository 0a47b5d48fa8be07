/*
What only a PORTABLE=1 program has. It ends on a CPU without AVX2 by one line, before main; this file is compiled for any
x86-64 CPU, unlike the rest of the program. And it has arc4random, which Debian's libevent takes from glibc 2.36, so that
the program starts with an older C library.
*/
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((constructor(101))) static void cpu_check(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
    fprintf(stderr,
            "%s: this program needs a CPU with AVX2 (x86-64-v3), and this CPU has none; build from the source here: "
            "make BACKEND=cpu\n",
            program_invocation_short_name);
    _exit(1);
}

// Fills memory with random bytes from the kernel.
void arc4random_buf(void *memory, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const long got = syscall(SYS_getrandom, (char *)memory + done, bytes - done, 0);
        if (got < 0 && errno != EINTR) abort();
        if (got > 0) done += (size_t)got;
    }
}

uint32_t arc4random(void) {
    uint32_t number;
    arc4random_buf(&number, sizeof(number));
    return number;
}
