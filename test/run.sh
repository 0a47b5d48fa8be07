#!/bin/sh
# Builds and runs every test: test/run.sh [NAME ...]. A row of the table below is one program in one configuration, in one
# process or in several.
# Each program closes with `N passed, N failed, N skipped`; these are added up in the last line. Skips are listed again.
set -u
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}
case $CC in *clang*) CXX=${CXX:-$(echo "$CC" | sed 's/clang/clang++/')} ;; *) CXX=${CXX:-c++} ;; esac
JOBS=${JOBS:-2}
export JOBS
# Our own leaks are failures; oneDNN and OpenMP keep their pools until the end. 99: what a sanitizer found, in a child too.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:exitcode=99:allocator_may_return_null=1:strict_string_checks=1}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=test/leaks.supp:print_suppressions=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-halt_on_error=1:print_stacktrace=1}
export OMP_WAIT_POLICY=passive
limit='timeout -k 10 900' # what hangs fails
mpi_libraries=$(scripts/mpi_flags.sh link)

# A folder for every configuration, as in the Makefile: build/test-fp32-onednn for gcc, build/test-fp32-onednn-clang.
compiler=${CC%% *}
compiler=${compiler##*/}
case $compiler in cc | gcc) compiler= ;; *) compiler=-$compiler ;; esac
folder_of() { printf '%s' "build/test-$1-$2$compiler"; } # precision, op set

#   program       precision   op set   ranks     op set: onednn, plain: "cpu" with and without oneDNN; cuda: the GPU's kernels,
#                                      run on the CPU; cudnn: these with cuDNN's attention, plain loops here; of plain and
#                                      cudnn only the tests of what is different there; nccl: memory and collectives of
#                                      "cuda" between processes, over pretended calls of CUDA and NCCL, whose headers it needs
#                                      ranks: so many processes, under mpirun, of which rank 0 closes; none: one, without it
rows="
    cuda_on_cpu   bf16        cuda
    cuda_on_cpu   fp32        cuda
    ops           bf16        cuda
    ops           fp32        cuda
    ops           bf16        cudnn
    methods       bf16        cuda
    methods       fp32        cuda
    lora          fp32        cuda
    golden        bf16        cuda
    golden        fp32        cuda
    ops           fp32        onednn
    ops           fp32        plain
    ops           bf16        onednn
    ops           bf16        plain
    ops           double      onednn
    methods       double      onednn
    methods       fp32        onednn
    methods       bf16        onednn
    objective_methods double  onednn
    objective_methods fp32    onednn
    objective_methods bf16    onednn
    lora          double      onednn
    lora          fp32        onednn
    lora          bf16        onednn
    golden        fp32        onednn
    golden        bf16        onednn
    golden        double      onednn
    plan          fp32        onednn
    plan          bf16        onednn
    estimate      fp32        onednn
    profile       fp32        onednn
    fence         fp32        onednn
    options       fp32        onednn
    objective     fp32        onednn
    objective     double      onednn
    schedule      fp32        onednn
    dataloader    fp32        onednn
    documents     fp32        onednn
    answers       fp32        onednn
    prompts       fp32        onednn
    packing       fp32        onednn
    deal          fp32        onednn
    prefetch      fp32        onednn
    log           fp32        onednn
    logprobs      fp32        onednn
    reference     fp32        onednn
    file          fp32        onednn
    weights       fp32        onednn
    weights       bf16        onednn
    weights_bad   fp32        onednn
    hf_weights    fp32        onednn
    convert       fp32        onednn
    convert_folder fp32       onednn
    initial_weights fp32      onednn
    initial_weights bf16      onednn
    adamw         fp32        onednn
    adamw         bf16        onednn
    adamw         double      onednn
    checkpoint    fp32        onednn
    checkpoint    bf16        onednn
    checkpoint_folder fp32    onednn
    checkpoint_folder bf16    onednn
    checkpoint_kill fp32      onednn
    checkpoint_ranks fp32     onednn
    adapter       fp32        onednn
    adapter       bf16        onednn
    sampler       fp32        onednn
    sampler       bf16        onednn
    sampler_batch fp32        onednn
    sampler_batch double      onednn
    sampler_batch bf16        onednn
    tokenizer     fp32        onednn
    reward        fp32        onednn
    rollout       fp32        onednn
    rollout       double      onednn
    dist          fp32        onednn   2
    dist          fp32        onednn   3
    dist          fp32        onednn   4
    dist          double      onednn   3
    dist          fp32        nccl     2
    dist          fp32        nccl     3
    sp            double      onednn   3
    sp            double      onednn   4
    sp            fp32        onednn   2
    sp            bf16        onednn   2
    golden        fp32        onednn   3
    golden        bf16        onednn   2
    zero          double      onednn   2
    zero          fp32        onednn   4
    zero          bf16        onednn   3
    sampler_ranks fp32        onednn   2
"

total_passed=0 total_failed=0 total_skipped=0
skips=$(mktemp) output=$(mktemp)
trap 'rm -f "$skips" "$output"' EXIT

# count NAME STATUS: reads the closing line of $output; a program without one has failed. $used: processor time, for people
used=
count() {
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$output" | tail -n 1)
    if [ -z "$line" ]; then
        echo "FAILED: $1 ended with status $2 and no closing line"
        total_failed=$((total_failed + 1))
        return
    fi
    set -- "$1" "$2" $(echo "$line" | tr -dc '0-9 ')
    [ "$2" != 0 ] && [ "$4" = 0 ] && { echo "FAILED: $1 ended with status $2"; set -- "$1" "$2" "$3" 1 "$5"; }
    total_passed=$((total_passed + $3)) total_failed=$((total_failed + $4)) total_skipped=$((total_skipped + $5))
    grep 'SKIPPED.*NOT TESTED' "$output" | sed "s|^|$1: |" >>"$skips"
    printf '%-28s %s   %s\n' "$1" "$line" "$used"
}

# Flags for MPI and the headers of CUDA and NCCL (2.13 or later), which may lie beside nvcc and in $NCCL; nothing where one is missing.
nccl_flags() {
    toolkit=$(command -v "${NVCC:-nvcc}") && toolkit="-isystem $(dirname "$(dirname "$(readlink -f "$toolkit")")")/include"
    set -- -DHAVE_NCCL ${NCCL:+-isystem "$NCCL/include"} $toolkit
    [ -n "$mpi_libraries" ] &&
        printf '#include <cuda_runtime.h>\n#include <nccl.h>\n#if NCCL_VERSION_CODE < 21300\n#error\n#endif\n' |
        $CXX "$@" -fsyntax-only -x c++ - >/dev/null 2>&1 && echo "$@"
}

# Compiles a row's program, sanitized. Objects of the op set are shared by programs of one configuration.
flags_of() { # precision, op set
    printf '%s' "-D_GNU_SOURCE -DPRECISION_$(echo "$1" | tr a-z A-Z) -Wall -Wextra -Werror -Wno-unused-function -O1 -g1 -march=native \
-fno-omit-frame-pointer -fopenmp -I."
    case $1-$2 in # the GPU's kernels are the same lines: both sanitizers in bf16 alone, where they take minutes; what is
        *-cudnn) ;; # run in double is run in fp32 or bf16, too
        fp32-cuda | double-*) printf ' -fsanitize=address' ;;
        *) printf ' -fsanitize=address,undefined' ;;
    esac
    case $2 in cuda | cudnn) printf ' -DCUDA_ON_CPU' ;; esac
    [ "$2" = cudnn ] && printf ' -DHAVE_CUDNN -DCUDNN_GRID=16 -DCUDNN_BLOCK=64 -DCUDNN_WORKSPACE=100000'
    [ "$2" != plain ] && printf '\043include <dnnl.h>\n' | $CC -E - >/dev/null 2>&1 && printf ' -DHAVE_ONEDNN'
    [ -n "$mpi_libraries" ] && printf ' -DHAVE_MPI %s' "$(scripts/mpi_flags.sh compile)"
}
# Op set "cuda" takes what libraries do for it from op set "cpu", which goes by another name then.
build_ops() { # precision, op set; again when a source or the command changed (a library was installed)
    folder=$(folder_of "$1" "$2")
    compile="$CC -std=gnu11 $(flags_of "$1" "$2") -c llmc/ops/cpu/ops_cpu.c -o $folder/ops_cpu.o"
    case $2 in
    cuda | cudnn) compile="$compile -Dops_device=ops_cpu_device" ;;
    nccl)
        nccl=$(nccl_flags) || { rm -f "$folder/ops.o"; return 0; }
        compile="$CXX -std=c++20 -Wno-missing-field-initializers $(flags_of "$1" "$2") $nccl -c test/emulate/ops_nccl.cc -o $folder/ops.o"
        ;;
    esac
    mkdir -p "$folder"
    [ -f "$folder/ops.o" ] && [ "$(cat "$folder/ops.command" 2>/dev/null)" = "$compile" ] &&
        [ -z "$(find llmc test -newer "$folder/ops.o" \( -path 'llmc/*' -o -name 'cuda_*.h' -o -name '*nccl*' \) -type f | head -n 1)" ] && return 0
    rm -f "$folder/ops.o" # if it does not compile, nothing shall be tested with the old one
    if [ "$2" = cuda ] || [ "$2" = cudnn ]; then # -O2: a kernel's threads take turns on one core
        $compile -O2 && $CXX -std=c++20 -Wno-missing-field-initializers -x c++ $(flags_of "$1" "$2") -O2 -Wno-unknown-pragmas -Wno-pass-failed -c llmc/ops/cuda/ops_cuda.cu -o "$folder/ops_cuda.o" &&
            ld -r "$folder/ops_cpu.o" "$folder/ops_cuda.o" -o "$folder/ops.o"
    elif [ "$2" = nccl ]; then
        $compile
    else
        $compile && mv "$folder/ops_cpu.o" "$folder/ops.o"
    fi && echo "$compile" >"$folder/ops.command"
}
build() { # name, precision, op set
    flags=$(flags_of "$2" "$3")
    libraries="-lcmocka -lcjson -lm -pthread $mpi_libraries"
    case $3 in cuda | cudnn | nccl) libraries="$libraries -lstdc++" ;; esac
    case $3$compiler in cu*-clang* | nccl-clang*) libraries="$libraries -fsanitize-link-c++-runtime" ;; esac
    case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
    # Most programs spend their time in the op set, and would take longer to optimise than they run.
    case $1 in ops | cuda_on_cpu | plan | estimate | tokenizer | packing | dist) ;; *) flags="$flags -O0" ;; esac
    folder=$(folder_of "$2" "$3")
    source=$(ls test/*/test_"$1".c test/*/test_"$1".cc 2>/dev/null)
    if [ "${source%.cc}" != "$source" ]; then
        $CXX -std=c++20 -Wno-missing-field-initializers $flags -Wno-unknown-pragmas -Wno-pass-failed "$source" $libraries -o "$folder/test_$1"
    else
        $CC -std=gnu11 $flags "$source" "$folder/ops.o" $libraries -o "$folder/test_$1"
    fi
}
if [ "${1:-}" = --ops ]; then
    trap - EXIT
    rm -f "$skips" "$output"
    build_ops "$2" "$3"
    exit
fi

selected() { # name: no names given, or among them
    [ -z "$names" ] && return 0
    for name in $names; do [ "$name" = "$1" ] && return 0; done
    return 1
}
names="$*"

# Processor seconds of all that this shell has waited for, as the builtin tells them, in a file for `seconds_in`.
seconds_in() { awk 'NR == 2 { split($0, t, /[ms ]+/); printf "%.1f s", 60 * (t[1] + t[3]) + t[2] + t[4] }' "$1" 2>/dev/null; }

skipped() { printf '[  SKIPPED ] NOT TESTED, because there is no %s\n0 passed, 0 failed, 1 skipped\n' "$1"; } # a row, for want of
# Every program is compiled, then run; JOBS rows at a time, each into files of its own.
row() { # build|run, name, precision, op set, ranks
    program=$(folder_of "$3" "$4")/test_$2
    log=$program${5:+-$5}
    mkdir -p "${program%/*}"
    if [ "$1" = build ]; then
        rm -f "$program" "$program.status"
        if [ "$4" = nccl ] && ! nccl_flags >/dev/null; then
            skipped 'MPI with the headers of CUDA and of NCCL, 2.13 or later' >"$program.log"
            echo 0 >"$program.status"
        else
            build "$2" "$3" "$4" >"$program.log" 2>&1 || echo 'does not compile' >"$program.status"
        fi
        times >"$program.build_times"
    elif [ -x "$program" ]; then
        only=
        case $4 in cudnn) only=attention ;; plain) only=linear ;; esac # what is different there
        if [ -z "${5:-}" ]; then
            $limit "$program" $only >"$log.log" 2>&1 </dev/null
        elif [ -n "$mpi_libraries" ] && command -v mpirun >/dev/null; then
            $limit test/ranks/mpirun.sh "$5" "$program" >"$log.log" 2>&1 </dev/null
        else
            skipped 'MPI with mpirun' >"$log.log"
        fi
        echo $? >"$log.status"
        times >"$log.times"
    fi
}
script() { # name
    log=build/test-scripts/$1
    $limit sh test/*/test_"$1".sh >"$log.log" 2>&1 </dev/null
    echo $? >"$log.status"
    times >"$log.times"
}
# What scripts need: the plain program, the sanitized one, a Python. The file *.built tells that it is there.
program() { # plain|sanitized|python
    case $1 in
    plain) ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=fp32 ONEDNN= "$TRAIN_PLAIN" ;;
    sanitized)
        flags=$(flags_of fp32 onednn)
        libraries="-lcjson -lm -pthread $mpi_libraries"
        case $flags in *HAVE_ONEDNN*) libraries="$libraries -ldnnl" ;; esac
        build_ops fp32 onednn && $CC -std=c11 $flags -x c train_gpt.cu -x none "${TRAIN%/*}/ops.o" $libraries -o "$TRAIN"
        ;;
    python) . test/find_python.sh && { find_or_make_python 2>&3 || true; } ;; # without one its tests are skipped
    esac 3>&2 >"build/test-scripts/$1.log" 2>&1 && : >"build/test-scripts/$1.built"
}
case ${1:-} in --row | --script | --program)
    what=${1#--}
    shift
    trap - EXIT
    rm -f "$skips" "$output"
    $what "$@"
    exit 0
    ;;
esac

echo "$rows" | while read -r name precision library ranks; do
    [ -n "$name" ] && selected "$name" && echo "$name $precision $library${ranks:+ $ranks}"
done >"$output.rows"
trap 'rm -f "$skips" "$output" "$output.rows"' EXIT
# The op sets' objects first: the programs of one configuration share one.
awk '{ print $2, $3 }' "$output.rows" | sort -u | xargs -r -L 1 -P "$JOBS" test/run.sh --ops
# The program itself: as C++20, and as a user runs it, sanitized; measured memory is that of a plain build. Long ones first.
scripts=$(for script in prepare ranks example train compare cxx rooms cli dist scripts train_documents train_rollout logprobs convert \
    compare_llmc gpu_evidence adapter_cli \
    transformers peft objectives_torch; do selected $script && echo $script; done)
builds=
if [ -n "$(echo "$scripts" | grep -vE '^(prepare|cxx|rooms)?$')" ]; then
    TRAIN=$(folder_of fp32 onednn)/train TRAIN_PLAIN=build/cpu-fp32$compiler/train
    NCCL_OPS=$(folder_of fp32 nccl)/ops.o
    export TRAIN TRAIN_PLAIN NCCL_OPS
    selected dist && build_ops fp32 nccl
    builds='plain sanitized'
fi
# The Python that some need is made once.
case $scripts in *prepare* | *example*) builds="python $builds" ;; esac
rm -rf build/test-scripts
mkdir -p build/test-scripts
{
    for build in $builds; do echo "--program $build"; done
    awk '{ print "--row build", $1, $2, $3 }' "$output.rows" | sort -u
} | xargs -r -L 1 -P "$JOBS" test/run.sh
for build in $builds; do
    [ -e build/test-scripts/$build.built ] && continue
    cat build/test-scripts/$build.log
    echo "FAILED: the program does not compile ($build)"
    total_failed=$((total_failed + 1))
done
# One queue of both, the longest script first, so that no core waits for it at the end.
{
    for script in $scripts; do [ $script = prepare ] && echo "--script $script"; done
    sed 's/^/--row run /' "$output.rows"
    for script in $scripts; do [ $script = prepare ] || echo "--script $script"; done
} | xargs -r -L 1 -P "$JOBS" test/run.sh
while read -r name precision library ranks; do
    label="$name ($precision$([ "$library" = onednn ] || echo ", $library")${ranks:+, $ranks ranks})"
    program=$(folder_of "$precision" "$library")/test_$name
    log=$program${ranks:+-$ranks}
    [ -x "$program" ] || log=$program
    status=$(cat "$log.status" 2>/dev/null)
    cp "$log.log" "$output"
    used="$(seconds_in "$log.times"), built in $(seconds_in "$program.build_times")"
    if [ "$status" = 'does not compile' ]; then
        cat "$output"
        echo "FAILED: $label does not compile"
        total_failed=$((total_failed + 1))
        continue
    fi
    grep -E 'FAILED|ERROR|runtime error|error:|Error:' "$output" | grep -vE 'largest error' | head -n 40
    [ "$status" = 0 ] || [ "$status" = 1 ] || tail -n 30 "$output"
    count "$label" "$status"
done <"$output.rows"

for script in $scripts; do
    cp build/test-scripts/$script.log "$output"
    used=$(seconds_in build/test-scripts/$script.times)
    grep -E 'FAILED|NOT TESTED|error' "$output" | head -n 40
    count "$script" "$(cat build/test-scripts/$script.status 2>/dev/null || echo 1)"
done

if [ -s "$skips" ]; then
    echo
    echo "Skipped, so NOT TESTED here:"
    cat "$skips"
fi
echo
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
[ "$total_failed" = 0 ] && [ "$total_passed" -gt 0 ]
