# Sourced by test/run.sh: compiles the programs of its table. Recompiles a program after a change of a file it includes,
# the op set or the command. Folders as in the Makefile: build/test-fp32-onednn for gcc, build/test-fp32-onednn-clang.
CC=${CC:-cc}
case $CC in *clang*) CXX=${CXX:-$(echo "$CC" | sed 's/clang/clang++/')} ;; *) CXX=${CXX:-c++} ;; esac
compiler=${CC%% *}
compiler=${compiler##*/}
case $compiler in cc | gcc) compiler= ;; *) compiler=-$compiler ;; esac
mpi_libraries=$(scripts/mpi_flags.sh link)
export WERROR=-Werror # of what make builds

folder_of() { printf '%s' "build/test-$1-$2$compiler"; } # precision, op set
has_onednn() { [ "${ONEDNN:-}" != 0 ] && printf '\043include <dnnl.h>\n' | $CC -E - >/dev/null 2>&1; }
define_precision() { printf -- '-D_GNU_SOURCE -DPRECISION_%s' "$(echo "$1" | tr a-z A-Z)"; }

# fresh TARGET COMMAND: the target was made by this command, and every file in its dependency files is older.
fresh() {
    [ -f "$1" ] && [ "$(cat "$1.command" 2>/dev/null)" = "$2" ] || return 1
    for source in $(cat "$1".d "$1".?*.d 2>/dev/null | sed 's/^[^ ]*://; s/\\$//'); do [ "$source" -ot "$1" ] || return 1; done
}
# make_with TARGET COMMAND: runs the command unless the target is fresh. Removes a target that does not compile.
make_with() {
    fresh "$@" && return
    rm -f "$1" "$1".d "$1".?*.d "$1.command"
    mkdir -p "${1%/*}"
    eval "$2" && printf '%s\n' "$2" >"$1.command"
}

# Flags for MPI and the headers of CUDA and NCCL (2.18 or later), found beside nvcc and in $NCCL; nothing if one is missing.
nccl_flags() {
    toolkit=$(command -v "${NVCC:-nvcc}") && toolkit="-isystem $(dirname "$(dirname "$(readlink -f "$toolkit")")")/include"
    set -- -DHAVE_NCCL ${NCCL:+-isystem "$NCCL/include"} $toolkit
    [ -n "$mpi_libraries" ] &&
        printf '#include <cuda_runtime.h>\n#include <nccl.h>\n#if NCCL_VERSION_CODE < 21801\n#error\n#endif\n' |
        $CXX "$@" -fsyntax-only -x c++ - >/dev/null 2>&1 && echo "$@"
}

# The GPU's kernels have the same lines in every build: UBSan, which takes minutes, checks bf16 alone. Double runs the
# lines of fp32 and bf16, unsanitized. AddressSanitizer finds uses of null pointers and beyond objects.
flags_of() { # precision, op set
    printf '%s -Wall -Wextra -Werror -Wno-unused-function -O1 -g1 -march=native -fno-omit-frame-pointer -fopenmp -I. -DPARALLEL_WORK=1' "$(define_precision "$1")"
    case $1-$2 in
    *-cudnn) ;;
    double-*) printf ' -O2' ;;
    fp32-cuda) printf ' -fsanitize=address' ;;
    *) printf ' -fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow' ;;
    esac
    case $2 in cuda | cudnn) printf ' -DCUDA_ON_CPU' ;; esac
    [ "$2" = cudnn ] && printf ' -DHAVE_CUDNN -DCUDNN_GRID=16 -DCUDNN_BLOCK=64 -DCUDNN_WORKSPACE=100000 -DCUDNN_ELEMENTS=32768 -DCUDNN_BACKWARD_WINDOW=20'
    case $2 in plain | nccl) ;; *) has_onednn && printf ' -DHAVE_ONEDNN' ;; esac
    [ -n "$mpi_libraries" ] && printf ' -DHAVE_MPI %s' "$(scripts/mpi_flags.sh compile)"
}
as_cxx='-std=c++20 -Wno-missing-field-initializers -Wno-missing-braces -Wno-unknown-pragmas -Wno-pass-failed -Wno-unknown-warning-option -Wno-maybe-uninitialized'

# The op set's object, shared by all programs of a configuration. Op set "cuda" takes library functions from op set
# "cpu", which is renamed then. -O2: a kernel's threads take turns on one core.
build_ops() { # precision, op set
    folder=$(folder_of "$1" "$2")
    flags=$(flags_of "$1" "$2") o=$folder/ops.o
    cpu="$CC -std=gnu11 $flags -MMD -MF $o.cpu.d -c llmc/ops/cpu/ops_cpu.c"
    case $2 in
    cuda | cudnn)
        cpu="$cpu -o $folder/ops_cpu.o -Dops_device=ops_cpu_device -O2"
        cuda="$CXX -x c++ $flags $as_cxx -O2 -MMD -MF $o.cuda.d -c llmc/ops/cuda/ops_cuda.cu -o $folder/ops_cuda.o"
        make_with "$o" "$cpu && $cuda && ld -r $folder/ops_cpu.o $folder/ops_cuda.o -o $o"
        ;;
    nccl)
        nccl=$(nccl_flags) || { rm -f "$o"; return 0; }
        cpu="$cpu -o $folder/ops_cpu.o -Dops_device=ops_cpu_device -O2 && objcopy --keep-global-symbol=ops_cpu_device $folder/ops_cpu.o"
        cuda="$CXX $flags $as_cxx $nccl -MMD -MF $o.nccl.d -c test/emulate/ops_nccl.cc -o $folder/ops_nccl.o"
        make_with "$o" "$cpu && $cuda && ld -r $folder/ops_cpu.o $folder/ops_nccl.o -o $o"
        ;;
    *) make_with "$o" "$cpu -o $o" ;;
    esac
}

# Most programs spend their time in the op set: optimising them costs more than it saves. The op sets and the sanitized
# ./train check alignment of every pointer.
build_program() { # name, precision, op set
    folder=$(folder_of "$2" "$3")
    target=$folder/test_$1 flags="$(flags_of "$2" "$3") -fno-sanitize=alignment" libraries="-lcmocka -lcjson -lm -pthread -lpcre2-8 $mpi_libraries"
    case $3 in cuda | cudnn | nccl) libraries="$libraries -lstdc++" ;; esac
    case $3$compiler in cu*-clang* | nccl-clang*) libraries="$libraries -fsanitize-link-c++-runtime" ;; esac
    case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
    case $1 in ops | cuda_on_cpu | plan | estimate | tokenizer | packing | step_deal | dist) ;; *) flags="$flags -O0" ;; esac
    source=$(ls test/*/test_"$1".c test/*/test_"$1".cc 2>/dev/null)
    case $source in
    *.cc) make_with "$target" "$CXX $flags $as_cxx -MMD -MF $target.d $source $libraries -o $target" ;;
    *)
        [ "$folder/ops.o" -nt "$target" ] && rm -f "$target"
        compile="$CC -std=gnu11 $flags -MMD -MF $target.d $source"
        if [ "$1" = ops ]; then # tests the op set; most of its own time goes into references and comparisons
            compile="$(echo "$compile" | sed 's/ -f[a-z-]*sanitize=[^ ]*//g') -O2 -c -o $target.o && $CC $flags $target.o"
        fi
        make_with "$target" "$compile $folder/ops.o $libraries -o $target"
        ;;
    esac
}

# On a GPU: C by $CC, op set "cuda" as make builds it for ./train, linked by nvcc. gpu_large also has op set "cpu", renamed.
# GPU_BUILD, NATIVE: of make PORTABLE=1
gpu_build() { echo "${GPU_BUILD:-build/cuda-$1}"; } # precision
build_gpu_ops() { # precision
    $MAKE --no-print-directory BACKEND=cuda PRECISION="$1" ${ARCHS:+"ARCHS=$ARCHS"} "$(gpu_build "$1")/train"
}
build_gpu_program() { # name, precision
    folder=build/test-gpu-$2 target=build/test-gpu-$2/test_$1 libraries="-lcmocka ${NVCC_LIBS:-}" ops=$(gpu_build "$2")/ops_cuda.o
    compile="$CC -std=gnu11 $(define_precision "$2") -Wall -Wextra -Werror -Wno-unused-function -O2 -g -fopenmp -I."
    objects="$target.o $ops" before=
    if [ "$1" = gpu_large ]; then
        cpu=$folder/ops_cpu.o
        has_onednn && compile="$compile -DHAVE_ONEDNN" libraries="$libraries -ldnnl"
        before="$compile -O3 ${NATIVE:--march=native} -ffp-contract=fast -fno-math-errno -fno-trapping-math -Dops_device=ops_cpu_device \
            -MMD -MF $target.cpu.d -c llmc/ops/cpu/ops_cpu.c -o $cpu && objcopy --keep-global-symbol=ops_cpu_device $cpu &&"
        objects="$objects $cpu"
    fi
    [ "$ops" -nt "$target" ] && rm -f "$target"
    make_with "$target" "$before $compile -MMD -MF $target.d -c $(ls test/*/test_"$1".c) -o $target.o && $NVCC_LINK $objects $libraries -o $target"
}

# Programs for scripts: ./train as a user builds it, the same sanitized, a Python.
build_plain() { ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=fp32 ONEDNN= "$TRAIN_PLAIN"; }
build_sanitized() {
    build_ops fp32 onednn || return 1
    flags=$(flags_of fp32 onednn) libraries="-lcjson -lm -pthread -lpcre2-8 $mpi_libraries"
    case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
    [ "${TRAIN%/*}/ops.o" -nt "$TRAIN" ] && rm -f "$TRAIN"
    make_with "$TRAIN" "$CC -std=c11 $flags -MMD -MF $TRAIN.d -x c train_gpt.cu -x none ${TRAIN%/*}/ops.o $libraries -o $TRAIN"
}
build_python() { . test/find_python.sh && { find_or_make_python || true; }; } # without one its tests are skipped
