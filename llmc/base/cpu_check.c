/*
Ends a PORTABLE=1 program on a CPU without AVX2 by one line, before main. Compiled for any x86-64 CPU, unlike the rest
of the program.
*/
#include <errno.h>
#include <stdio.h>
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
