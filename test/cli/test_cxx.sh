#!/bin/sh
# Checks that the driver is valid C++20 for every compiler found here, and valid CUDA for nvcc if there is one.
passed=0 failed=0 skipped=0
check() { # name, command...
    name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else echo "FAILED: $name"; failed=$((failed + 1)); fi
}
libevent=$(printf '\043include <event2/http.h>\n' | ${CC:-cc} -E - >/dev/null 2>&1 && echo -DHAVE_LIBEVENT)
for compiler in g++ clang++; do
    if command -v $compiler >/dev/null; then
        check "$compiler" $compiler -std=c++20 -D_GNU_SOURCE $libevent -Wall -Wextra -Werror -Wno-unused-function -Wno-missing-field-initializers -Wno-missing-braces -I. -fsyntax-only -x c++ train_gpt.cu
    else
        echo "[  SKIPPED ] $compiler: NOT TESTED, because it is not installed"
        skipped=$((skipped + 1))
    fi
done
if command -v nvcc >/dev/null; then
    check nvcc nvcc -std=c++20 -D_GNU_SOURCE -I. -c -o /dev/null train_gpt.cu
else
    echo "[  SKIPPED ] nvcc: NOT TESTED, because it is not installed"
    skipped=$((skipped + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
