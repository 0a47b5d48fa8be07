#!/bin/sh
# Every program in dev/ compiles and links; those for nvcc only if there is one.
. test/cli.sh
CC=${CC:-cc} CXX=${CXX:-c++}
builds() { # name, command...
    name=$1
    shift
    if "$@" >"$WORK/output" 2>&1; then pass; else fail "$name does not build"; tail -n 20 "$WORK/output"; fi
}
with_make() { ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=fp32 CC="$CC" ONEDNN= "$@"; }
on_cpu() { # source: the kernels' playground on the CPU; make dev-cuda-check runs its checks, sanitized
    $CXX -std=c++20 -x c++ -DCUDA_ON_CPU -D_GNU_SOURCE -DPRECISION_BF16 -Wall -Wextra -Werror -Wno-unused-function \
        -Wno-missing-field-initializers -Wno-missing-braces -Wno-unknown-pragmas -O0 -I. "$1" -lm -o "$WORK/program"
}

builds 'what is installed' with_make install PREFIX=/usr DESTDIR="$WORK/root"
check 'it is called streambp' grep -q "^usage: .*/streambp \[VERB\]" <<END
$("$WORK/root/usr/bin/streambp" --help)
END
check 'and knows its version and commit' grep -q "streambp.c $(cat VERSION), commit $(git describe --always --dirty --abbrev=12)" <<END
$("$WORK/root/usr/bin/streambp" --version)
END
for words in 'BACKEND=cpu PRECISION=double:the CPU as asked, in double. Next: make demo' 'GPU=:the CPU (nvidia-smi lists no GPU), in fp32' \
    'GPU=90 NVCC=/none:no nvcc'; do
    check "make says what it built: $words" grep -qF "${words#*:}" <<END
$(env -u BACKEND -u MAKEFLAGS ${MAKE:-make} --no-print-directory -n CC="$CC" ${words%%:*} | tail -n 1)
END
done
check 'make -s says nothing' test -z "$(env -u MAKEFLAGS ${MAKE:-make} --no-print-directory -sn CC="$CC" BACKEND=cpu | grep Next:)"
dev=build/test-dev # only compiling and linking are tested
builds "make's programs" with_make BUILD=$dev CFLAGS=-O0 $dev/bench $dev/bench_ops $dev/collectives $dev/pack_bytes
builds dev/make_llmc_files.c $CC -Wall -Wextra -Werror dev/make_llmc_files.c -lm -o "$WORK/program"
builds dev/cuda/libcuda_stand_in.c $CC -Wall -Wextra -Werror -shared -fPIC dev/cuda/libcuda_stand_in.c -o "$WORK/program"
if command -v mpicc >/dev/null; then
    builds dev/busy.c mpicc -Wall -Wextra -Werror -shared -fPIC dev/busy.c -o "$WORK/program"
else
    skip dev/busy.c 'mpicc is not installed'
fi
for source in dev/cuda/*.cu; do
    case $source in
    */linear.cu | */bench.cu) # cuBLASLt's and the driver's own
        if command -v "${NVCC:-nvcc}" >/dev/null; then
            builds "$source" "${NVCC:-nvcc}" -std=c++20 -x cu -O0 -Xptxas -O0 -D_GNU_SOURCE -DPRECISION_BF16 -DHAVE_CUDNN -diag-suppress 177 \
                -I. -c "$source" -o "$WORK/program.o"
        else
            skip "$source" 'nvcc is not installed'
        fi
        ;;
    *) builds "$source" on_cpu "$source" ;;
    esac
done
cudnn=$(scripts/cuda_libraries.sh flags 2>/dev/null | grep -o -e '-DHAVE_CUDNN.*')
if [ -n "$cudnn" ]; then
    builds dev/cuda/cudnn_plans.cc $CXX -std=c++20 -fsyntax-only -D_GNU_SOURCE $(scripts/cuda_libraries.sh flags) -I. dev/cuda/cudnn_plans.cc
else
    skip dev/cuda/cudnn_plans.cc 'there is no cuDNN with its front end'
fi
for script in dev/*.sh dev/*/*.sh; do builds "$script" sh -n "$script"; done
finish
