#!/bin/sh
# The tests on a GPU: make test-gpu. test/gpu.sh --build only compiles and links all of it, for which nvcc is enough.
#
# The programs of test/run.sh with op set "cuda" as nvcc built it for ./train, in bf16 and fp32; large sizes against op set "cpu"; a few
# of them under compute-sanitizer; the program itself as a user runs it. What came out goes into
# dev/results/test-<device>-<date>.json; scripts/results_table.py makes README's table of these. From the Makefile: NVCC_LINK and
# NVCC_LIBS (how ./train is linked), ARCHS.
set -u
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}
NVCC=${NVCC:-nvcc}
MAKE=${MAKE:-make}
build_only=
[ "${1:-}" = --build ] && build_only=yes

if [ -z "$build_only" ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU 0'; then
    echo "test-gpu: no GPU was found (nvidia-smi lists none), so nothing was tested; 'make test' runs the kernels on the CPU" >&2
    exit 1
fi
command -v "$NVCC" >/dev/null || { echo "test-gpu: $NVCC was not found: install the CUDA toolkit, or give NVCC=path" >&2; exit 1; }
[ -n "${NVCC_LINK:-}" ] || { echo "test-gpu: start it by 'make BACKEND=cuda test-gpu', which knows how ./train is linked" >&2; exit 1; }

export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
gpu=${CUDA_VISIBLE_DEVICES:-0}
gpu=${gpu%%,*}
ask() { nvidia-smi -i "$gpu" --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

total_passed=0 total_failed=0 total_skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/programs" # the JSON's lines
: >"$work/skips"

# record PROGRAM PRECISION PASSED FAILED SKIPPED
record() {
    total_passed=$((total_passed + $3)) total_failed=$((total_failed + $4)) total_skipped=$((total_skipped + $5))
    printf '%-28s %s passed, %s failed, %s skipped\n' "$1 ($2)" "$3" "$4" "$5"
    printf '    {"program": "%s", "precision": "%s", "passed": %s, "failed": %s, "skipped": %s}\n' "$@" >>"$work/programs"
}
# count PROGRAM PRECISION STATUS: reads the closing line of $work/output; a program without one has failed.
count() {
    grep -E 'FAILED|ERROR|train: ' "$work/output" | grep -v 'largest error' | head -n 40
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$work/output" | tail -n 1 | tr -dc '0-9 ')
    grep 'SKIPPED.*NOT TESTED' "$work/output" | sed "s|^|$1 ($2): |" >>"$work/skips"
    if [ -z "$line" ]; then
        tail -n 20 "$work/output"
        echo "FAILED: $1 ($2) ended with status $3 and no closing line"
        record "$1" "$2" 0 1 0
        return
    fi
    set -- "$1" "$2" "$3" $line
    [ "$3" != 0 ] && [ "$5" = 0 ] && { echo "FAILED: $1 ($2) ended with status $3"; set -- "$1" "$2" "$3" "$4" 1 "$6"; }
    record "$1" "$2" "$4" "$5" "$6"
}

# ---- building: C by $CC, op set "cuda" as make built it, linked by nvcc ---------------------------------------------------------
#   program   precisions   part of the tests' names: where the rest is about files, or in forked processes, which have no GPU
rows="
    ops             bf16,fp32
    methods         bf16,fp32
    golden          bf16,fp32
    adamw           bf16,fp32
    sampler         bf16,fp32
    checkpoint      bf16,fp32    resumed_run
    plan            bf16
    gpu_large       bf16,fp32
"
onednn=
printf '\043include <dnnl.h>\n' | $CC -E - >/dev/null 2>&1 && onednn=yes

flags_of() { # precision
    printf '%s' "-std=gnu11 -D_GNU_SOURCE -DPRECISION_$(echo "$1" | tr a-z A-Z) -Wall -Wextra -Werror -O2 -g -I."
}
build_program() { # name, precision
    folder=build/test-gpu-$2
    libraries="-lcmocka ${NVCC_LIBS:-}"
    objects="$folder/test_$1.o build/cuda-$2/ops_cuda.o"
    $CC $(flags_of "$2") -c "test/test_$1.c" -o "$folder/test_$1.o" || return 1
    if [ "$1" = gpu_large ]; then
        $CC $(flags_of "$2") -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp ${onednn:+-DHAVE_ONEDNN} \
            -Dops_device=ops_cpu_device -c llmc/cpu/ops_cpu.c -o "$folder/ops_cpu.o" || return 1
        objects="$objects $folder/ops_cpu.o" libraries="$libraries -Xcompiler -fopenmp ${onednn:+-ldnnl}"
    fi
    $NVCC_LINK $objects $libraries -o "$folder/test_$1"
}
each_row() { # command: is called with program, precision, part
    while read -r program precisions part; do
        [ -n "$program" ] || continue
        for precision in $(echo "$precisions" | tr , ' '); do "$1" "$program" "$precision" "$part" </dev/null; done
    done <<END
$rows
END
}
build_row() {
    echo "building $1 ($2)"
    build_program "$1" "$2" >"$work/output" 2>&1 && return 0
    cat "$work/output"
    echo "FAILED: $1 ($2) does not compile"
    record "$1" "$2" 0 1 0
    rm -f "build/test-gpu-$2/test_$1"
}
for precision in bf16 fp32; do
    mkdir -p build/test-gpu-$precision
    $MAKE --no-print-directory BACKEND=cuda PRECISION=$precision ${ARCHS:+"ARCHS=$ARCHS"} build/cuda-$precision/train >"$work/output" 2>&1 ||
        { cat "$work/output"; echo "test-gpu: op set cuda does not build" >&2; exit 1; }
done
each_row build_row
if [ -n "$build_only" ]; then
    [ $total_failed = 0 ] || exit 1
    echo "all of it compiles and links; nothing was run"
    exit 0
fi

# ---- running -----------------------------------------------------------------------------------------------------------------------
run_row() {
    [ -x "build/test-gpu-$2/test_$1" ] || return 0
    timeout 3000 "build/test-gpu-$2/test_$1" ${3:+"$3"} >"$work/output" 2>&1
    count "$1" "$2" $?
}
each_row run_row

# The program as a user runs it; a context on the device, cuBLASLt's workspace and what CUDA loads are beside the plan.
for precision in fp32 bf16; do
    for script in train cli; do
        [ "$precision-$script" = bf16-cli ] && continue # refusals of an fp32 build
        TRAIN=build/cuda-$precision/train TRAIN_PLAIN=build/cuda-$precision/train TEST_DEVICE=gpu TEST_PRECISION=$precision \
            timeout 3000 sh test/test_$script.sh >"$work/output" 2>&1 </dev/null
        count $script $precision $?
    done
done

# compute-sanitizer: each of these tests is one test of it, passed where it reports nothing.
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
        for precision in bf16 fp32; do
            passed=0 failed=0
            for part in embedding rmsnorm layernorm rope attention_documents attention_sharp swiglu gelu logprob_of_extreme round_sums \
                gradient_add adamw_every_pairing; do
                if timeout 1200 compute-sanitizer --tool $tool --error-exitcode 9 "build/test-gpu-$precision/test_ops" $part \
                    >"$work/output" 2>&1; then
                    passed=$((passed + 1))
                else
                    failed=$((failed + 1))
                    echo "FAILED: compute-sanitizer --tool $tool build/test-gpu-$precision/test_ops $part"
                    grep -E '^=========' "$work/output" | head -n 12
                fi
            done
            record "compute-sanitizer $tool" $precision $passed $failed 0
        done
    done
else
    echo "[  SKIPPED ] compute-sanitizer: NOT TESTED, because it is not installed (Debian, Ubuntu: cuda-sanitizer-13-0 from NVIDIA)" >>"$work/skips"
    record compute-sanitizer any 0 0 1
fi

# ---- the record ----------------------------------------------------------------------------------------------------------------------
device=$(ask name)
libraries=$(scripts/cuda_libraries.sh report 2>&1 | # those of the build
    sed -n 's/^ *cuBLASLt *\([0-9.]*\):.*/cuBLASLt \1/p; s/^ *cuDNN *\([0-9.]*\), front end.*/cuDNN \1/p' | paste -sd , | sed 's/,/, /')
date=$(date -u +%Y-%m-%d)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit, edited"
mkdir -p dev/results
result=dev/results/test-$(echo "$device" | tr 'A-Z ' 'a-z-' | tr -dc 'a-z0-9-')-$date.json
{
    printf '{\n  "kind": "test", "op_set": "cuda",\n'
    printf '  "device": "%s", "driver": "%s",\n' "$device" "$(ask driver_version)"
    printf '  "cuda": "%s", "libraries": "%s",\n' "$($NVCC --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$libraries"
    printf '  "date": "%s", "commit": "%s",\n' "$date" "$commit"
    printf '  "passed": %s, "failed": %s, "skipped": %s,\n' $total_passed $total_failed $total_skipped
    printf '  "programs": [\n'
    sed '$!s/$/,/' "$work/programs"
    printf '  ]\n}\n'
} >"$result"
echo "written: $result"

if [ -s "$work/skips" ]; then
    echo
    echo "Skipped, so NOT TESTED here:"
    cat "$work/skips"
fi
echo
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
[ "$total_failed" = 0 ] && [ "$total_passed" -gt 0 ]
