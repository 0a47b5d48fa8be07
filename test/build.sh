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
# Sets $libevent to the flag of `sample --serve` and $libevent_libraries, or to nothing.
find_libevent() {
    libevent= libevent_libraries=
    [ "${LIBEVENT:-}" != 0 ] && printf '\043include <event2/http.h>\n' | $CC -E - >/dev/null 2>&1 || return 0
    libevent=-DHAVE_LIBEVENT libevent_libraries='-levent_extra -levent_core'
}
define_precision() { printf -- '-D_GNU_SOURCE'; [ "$1" = any ] || printf -- ' -DPRECISION_%s' "$(echo "$1" | tr a-z A-Z)"; }

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

# All that a program of a configuration links: its op sets, their list, and the other ranks. Op set "cuda" takes library functions from op
# set "cpu". -O2: a kernel's threads take turns on one core.
build_ops() { # precision, op set
    folder=$(folder_of "$1" "$2")
    flags=$(flags_of "$1" "$2") o=$folder/ops.o
    cpu="$CC -std=gnu11 $flags -MMD -MF $o.cpu.d -include test/ops/one_thread.h -c llmc/ops/cpu/ops_cpu.c -o $folder/ops_cpu.o"
    set -- "$1" "$2" cpu "$folder/ops_cpu.o"
    case $2 in
    cuda | cudnn)
        cpu="$cpu -O2 && $CXX -x c++ $flags $as_cxx -O2 -MMD -MF $o.cuda.d -c llmc/ops/cuda/ops_cuda.cu -o $folder/ops_cuda.o"
        set -- "$1" "$2" cuda "$folder/ops_cpu.o $folder/ops_cuda.o"
        ;;
    nccl)
        nccl=$(nccl_flags) || { rm -f "$o"; return 0; }
        cpu="$cpu -O2 && $CXX $flags $as_cxx $nccl -MMD -MF $o.nccl.d -c test/emulate/ops_nccl.cc -o $folder/ops_nccl.o"
        set -- "$1" "$2" nccl "$folder/ops_cpu.o $folder/ops_nccl.o"
        ;;
    esac
    make_with "$o" "$cpu && $CC -std=gnu11 $flags -MMD -MF $o.dist.d -c llmc/ranks/dist.c -o $folder/dist.o &&
        scripts/op_sets.sh $3_$1 | $CC -x c -c - -o $folder/op_sets.o && ld -r $4 $folder/dist.o $folder/op_sets.o -o $o"
}

# Programs that are compiled as one file (join.awk): a group in each line. Most of a program is the driver, which each would compile
# anew. The others redefine what a header calls, or take headers whose names collide.
groups='
gradients chunk_major context golden lora methods objective_methods profile sampler sampler_batch sampler_ranks sp tree
data answers deal documents logprobs objective prefetch prefixes prompts
files convert hf_hybrid hf_quantised hf_weights initial_weights quantise rope_frequency weights weights_bad
train log reference rollout
cli doctor options options_file
slices adamw adapter checkpoint places zero
'
group_of() { echo "$groups" | awk -v program="$1" '{ for (i = 2; i <= NF; i++) if ($i == program) print $1 }'; }
programs_of() { echo "$groups" | sed -n "s/^$1 //p"; }

joined_source() { # group
    awk -f test/join.awk $(find llmc test -name '*.h') streambp.h $(for member in $(programs_of "$1"); do ls test/*/test_"$member".c; done)
}

# Neither tests nor the driver know a precision: an object serves all op sets of a kind.
kind_of() { # precision, op set
    case $1-$2 in
    *-cuda | *-cudnn) echo "any $2" ;;
    double-*) echo 'double onednn' ;;
    *) echo 'any onednn' ;;
    esac
}
# Compiles the object of a program or of a group, and sets $object. Most programs spend their time in the op set: optimising them costs more
# than it saves. The op sets and the sanitized ./train check alignment of every pointer.
build_object() { # name, precision, op set
    set -- "$1" $(kind_of "$2" "$3")
    object=$(folder_of "$2" "$3")/objects/test_$1.o
    compile="$CC -std=gnu11 $(flags_of "$2" "$3") -fno-sanitize=alignment"
    case $1 in
    ops) compile="$(echo "$compile" | sed 's/ -f[a-z-]*sanitize=[^ ]*//g') -O2" ;; # its time goes into references and comparisons
    plan | estimate | tokenizer | packing | step_deal | dist) ;;
    *) compile="$compile -O0" ;;
    esac
    compile="$compile -MMD -MF $object.d -c -o $object"
    mkdir -p "${object%/*}"
    exec 9>"$object.lock" # rows of other op sets wait here for the same object
    flock 9
    if [ -z "$(programs_of "$1")" ]; then make_with "$object" "$compile $(ls test/*/test_"$1".c)"
    else
        make_with "$object" ": $(programs_of "$1"); joined_source $1 >$object.c && $compile $object.c && echo '$object: test/join.awk' >$object.join.d"
    fi
    set -- $?
    exec 9>&-
    return "$1"
}
link_program() { # target, precision, op set; of $object
    folder=$(folder_of "$2" "$3") flags=$(flags_of "$2" "$3") libraries="-lcmocka -lcjson -lm -pthread -lpcre2-8 $mpi_libraries"
    case $3 in cuda | cudnn | nccl) libraries="$libraries -lstdc++" ;; esac
    case $3$compiler in cu*-clang* | nccl-clang*) libraries="$libraries -fsanitize-link-c++-runtime" ;; esac
    case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
    case $2-$3 in double-*) ;; *) flags="$flags -fsanitize=address,undefined" ;; esac # the object's
    [ "$object" -nt "$1" ] || [ "$folder/ops.o" -nt "$1" ] && rm -f "$1"
    make_with "$1" "$CC $flags $object $folder/ops.o $libraries -o $1"
}
# Builds the programs of a group as one, of which each is a name.
build_joined() { # group, precision, op set
    build_object "$@" || return
    folder=$(folder_of "$2" "$3")
    link_program "$folder/test_$1" "$2" "$3" || return
    for member in $(programs_of "$1"); do
        rm -f "$folder/test_$member.command"
        ln -f "$folder/test_$1" "$folder/test_$member"
    done
}
joined_is_fresh() { # group, precision, op set
    object=$(folder_of $(kind_of "$2" "$3"))/objects/test_$1.o
    [ -f "$object" ] && fresh "$object" "$(cat "$object.command")"
}
build_program() { # name, precision, op set
    folder=$(folder_of "$2" "$3")
    target=$folder/test_$1 group=$(group_of "$1")
    source=$(ls test/*/test_"$1".cc 2>/dev/null)
    if [ -n "$source" ]; then
        make_with "$target" "$CXX $(flags_of "$2" "$3") -fno-sanitize=alignment $as_cxx -MMD -MF $target.d $source -lcmocka -lm -pthread $mpi_libraries -o $target"
        return
    fi
    if [ -n "$group" ] && joined_is_fresh "$group" "$2" "$3"; then build_joined "$group" "$2" "$3"
    else
        build_object "$@" && link_program "$target" "$2" "$3"
    fi
}

# On a GPU: C by $CC, op set "cuda" as make builds it for ./train, linked by nvcc. gpu_large also has op set "cpu".
# GPU_BUILD: of make BACKEND=all PORTABLE=1, whose op sets a program gets all
build_gpu_ops() { # precision
    [ -n "${GPU_BUILD:-}" ] || set -- "$1" BACKEND=cuda PRECISION="$1"
    folder=${GPU_BUILD:-build/cuda-$1}
    shift
    $MAKE --no-print-directory "$@" ${ARCHS:+"ARCHS=$ARCHS"} "$folder/train"
}
build_gpu_program() { # name, precision
    folder=build/test-gpu-$2 target=build/test-gpu-$2/test_$1 libraries="-lcmocka ${NVCC_LIBS:-}" ops=${GPU_BUILD:-build/cuda-$2}/ops.o
    compile="$CC -std=gnu11 $(define_precision "$2") -Wall -Wextra -Werror -Wno-unused-function -O2 -g -fopenmp -I."
    objects="$target.o $ops" before=
    if [ "$1" = gpu_large ] && [ -z "${GPU_BUILD:-}" ]; then
        cpu=$folder/ops_cpu.o
        has_onednn && compile="$compile -DHAVE_ONEDNN" libraries="$libraries -ldnnl"
        before="$compile -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math \
            -MMD -MF $target.cpu.d -c llmc/ops/cpu/ops_cpu.c -o $cpu &&"
        objects="$objects $cpu"
    fi
    [ "$ops" -nt "$target" ] && rm -f "$target"
    make_with "$target" "$before $compile -MMD -MF $target.d -c $(ls test/*/test_"$1".c) -o $target.o && $NVCC_LINK $objects $libraries -o $target"
}

# Programs for scripts: ./train as a user builds it, the same sanitized, a Python.
build_plain() { ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=fp32 ONEDNN= "$TRAIN_PLAIN"; }
build_sanitized() {
    build_ops fp32 onednn || return 1
    find_libevent
    flags="$(flags_of fp32 onednn) $libevent" libraries="-lcjson -lm -pthread -lpcre2-8 $libevent_libraries $mpi_libraries"
    case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
    [ "${TRAIN%/*}/ops.o" -nt "$TRAIN" ] && rm -f "$TRAIN"
    make_with "$TRAIN" "$CC -std=c11 $flags -MMD -MF $TRAIN.d -x c train_gpt.cu -x none ${TRAIN%/*}/ops.o $libraries -o $TRAIN"
}
build_python() { . test/find_python.sh && { find_or_make_python || true; }; } # without one its tests are skipped
