#!/bin/sh
# Every program in dev/ compiles and links; what needs nvcc only where there is one.
CC=${CC:-cc} CXX=${CXX:-c++} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
check() { # name, command...
    name=$1
    shift
    if "$@" >"$work/output" 2>&1; then
        passed=$((passed + 1))
    else
        echo "FAILED: $name does not build"
        tail -n 20 "$work/output"
        failed=$((failed + 1))
    fi
}
skip() { echo "[  SKIPPED ] $1: NOT TESTED, because $2"; skipped=$((skipped + 1)); }
folder=build/cpu-fp32$(case ${CC%% *} in cc | gcc | */cc | */gcc) ;; *) echo "-$(basename "${CC%% *}")" ;; esac)
make_target() { ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=fp32 CC="$CC" ONEDNN= "$folder/$1"; }
on_cpu() { # source: the kernels' playground on the CPU; make dev-cuda-check runs its checks, sanitized
    $CXX -std=c++20 -x c++ -DCUDA_ON_CPU -DPROGRAM_NAME='"check"' -D_GNU_SOURCE -DPRECISION_BF16 -Wall -Wextra -Werror -Wno-unused-function \
        -Wno-missing-field-initializers -Wno-missing-braces -Wno-unknown-pragmas -O0 -I. "$1" -lm -o "$work/program"
}

check dev/bench.c make_target bench
check dev/collectives.c make_target collectives
check data/pack_bytes.c make_target pack_bytes
check dev/make_llmc_files.c $CC -Wall -Wextra -Werror dev/make_llmc_files.c -lm -o "$work/program"
check dev/cuda/libcuda_stand_in.c $CC -Wall -Wextra -Werror -shared -fPIC dev/cuda/libcuda_stand_in.c -o "$work/program"
for source in dev/cuda/*.cu; do
    case $source in
    */linear.cu | */bench.cu) # cuBLASLt's and the driver's own
        if command -v "${NVCC:-nvcc}" >/dev/null; then
            check "$source" "${NVCC:-nvcc}" -std=c++20 -x cu -O0 -Xptxas -O0 -DPROGRAM_NAME='"check"' -D_GNU_SOURCE -DPRECISION_BF16 -diag-suppress 177 \
                -I. -c "$source" -o "$work/program.o"
        else
            skip "$source" 'nvcc is not installed'
        fi
        ;;
    *) check "$source" on_cpu "$source" ;;
    esac
done
cudnn=$(scripts/cuda_libraries.sh flags 2>/dev/null | grep -o -e '-DHAVE_CUDNN.*')
if [ -n "$cudnn" ]; then
    check dev/cuda/cudnn_plans.cc $CXX -std=c++20 -fsyntax-only -D_GNU_SOURCE -DPROGRAM_NAME='"check"' $(scripts/cuda_libraries.sh flags) -I. dev/cuda/cudnn_plans.cc
else
    skip dev/cuda/cudnn_plans.cc 'there is no cuDNN with its front end'
fi
for script in dev/*.sh dev/*/*.sh; do check "$script" sh -n "$script"; done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
