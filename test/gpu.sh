#!/bin/sh
# The tests on a GPU: test/gpu.sh [--build] [PART ...], all of them without a PART; make test-gpu does the same.
#
#   ops, methods, ...   the programs of the first table below, with op set "cuda" as nvcc built it for ./train, in bf16 and fp32
#   --train             the program as a user runs it: a pass with cuDNN's attention and with ours, test_train.sh,
#                       test_train_documents.sh, test_cli.sh
#   multi               where there are several GPUs: a pass on all of them, for every ZeRO stage, against one (scripts/multi_gpu_check.sh)
#   --sanitizer         a few of them under compute-sanitizer
#   --build             compiles and links them and runs nothing, for which nvcc is enough
#
# What came out goes into dev/results/test-<device>-<date>.json after each program. Parts run one after another add up in one file, as
# long as sources and libraries are the same; it is complete when it has all of them. scripts/results_table.py makes README's table of
# these files. JOBS: programs built at a time. LIMIT: seconds that one may run. RESULTS: another folder. COMMIT: its name where
# there is no git.
set -u
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc} NVCC=${NVCC:-nvcc} MAKE=${MAKE:-make} JOBS=${JOBS:-$(nproc)} LIMIT=${LIMIT:-540} RESULTS=${RESULTS:-dev/results}
SANITIZER_LIMIT=65 # of each of the eight
ALL_CASES=${ALL_CASES:-1} # of lists that `make test` thins, for a CPU's sake
export CC NVCC MAKE ALL_CASES

#   name        program       precisions   parts of the tests' names, a process each; all: every test. The rest of `checkpoint` is about
#                                          files, or in forked processes, which have no GPU.
rows="
    ops         ops           bf16,fp32    all
    methods     methods       bf16,fp32    all
    golden      golden        bf16,fp32    all
    lora        lora          bf16,fp32    all
    objective_methods objective_methods bf16,fp32 all
    sampler_batch sampler_batch bf16,fp32  all
    adamw       adamw         bf16,fp32    all
    sampler     sampler       bf16,fp32    all
    checkpoint  checkpoint    bf16,fp32    resumed_run
    plan        plan          bf16         all
    attention   gpu_large     bf16,fp32    attention
    gpu_large   gpu_large     bf16,fp32    linear,norms,rope,embedding,activations,optimizer,logprob,beyond
"
user_rows="
    bp          bf16
    train       fp32
    train       bf16
    train_documents fp32
    train_documents bf16
    train_rollout fp32
    train_rollout bf16
    logprobs    fp32
    adapter_cli bf16
    cli         fp32
    multi       bf16
    multi       fp32
" # cli: refusals of an fp32 build
tiny=llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=96
sanitizer_rows="
    memcheck    bf16   test_ops attention_tiles
    memcheck    fp32   test_ops attention_tiles
    memcheck    bf16   train bp --init $tiny --seq-len 64 --batch 2 --chunk 24 --logits-chunk 20
    racecheck   bf16   test_ops attention_tiles
    racecheck   fp32   test_ops attention_tiles
    racecheck   bf16   test_ops rmsnorm
    synccheck   bf16   test_ops attention_tiles
    initcheck   bf16   train bp --init $tiny --seq-len 64 --batch 2 --chunk 24 --logits-chunk 20
"
each_line() { # text, command and its first arguments: it is called with every line that is not empty
    text=$1
    shift
    printf '%s\n' "$text" | sed 's/^ *//; /^$/d' >"$work/lines.$1"
    while read -r line; do "$@" $line </dev/null; done <"$work/lines.$1"
}

# ---- building: C by $CC, op set "cuda" as make built it, linked by nvcc; --job: one of several at a time -----------------------------
flags_of() { # precision
    printf '%s' "-std=gnu11 -D_GNU_SOURCE -DPRECISION_$(echo "$1" | tr a-z A-Z) -Wall -Wextra -Werror -Wno-unused-function -O2 -g -I."
}
build_program() { # name, precision
    folder=build/test-gpu-$2 openmp= onednn=
    libraries="-lcmocka ${NVCC_LIBS:-}"
    objects="$folder/test_$1.o build/cuda-$2/ops_cuda.o"
    if [ "$1" = gpu_large ]; then # and op set "cpu" under another name
        openmp=-fopenmp
        printf '\043include <dnnl.h>\n' | $CC -E - >/dev/null 2>&1 && onednn=yes
        $CC $(flags_of "$2") -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp ${onednn:+-DHAVE_ONEDNN} \
            -Dops_device=ops_cpu_device -c llmc/ops/cpu/ops_cpu.c -o "$folder/ops_cpu.o" || return 1
        objcopy --keep-global-symbol=ops_cpu_device "$folder/ops_cpu.o" || return 1 # dist.h is that of op set "cuda"
        objects="$objects $folder/ops_cpu.o" libraries="$libraries -Xcompiler -fopenmp ${onednn:+-ldnnl}"
    fi
    $CC $(flags_of "$2") $openmp -c test/*/test_"$1".c -o "$folder/test_$1.o" && $NVCC_LINK $objects $libraries -o "$folder/test_$1"
}
if [ "${1:-}" = --job ]; then
    mkdir -p "build/test-gpu-$3"
    log=build/test-gpu-$3/build_$2.log
    rm -f "$log.failed"
    if [ "$2" = op_set ]; then
        $MAKE --no-print-directory BACKEND=cuda PRECISION="$3" ${ARCHS:+"ARCHS=$ARCHS"} "build/cuda-$3/train"
    else
        rm -f "build/test-gpu-$3/test_$2"
        build_program "$2" "$3"
    fi >"$log" 2>&1 || { : >"$log.failed"; echo "FAILED: building $2 ($3)"; cat "$log"; }
    exit 0
fi

# ---- what was asked for ------------------------------------------------------------------------------------------------------------------
build_only= parts=' '
for part; do
    case $part in
    --build) build_only=yes ;;
    --train) parts="${parts}bp train train_documents cli multi " ;;
    --sanitizer) parts="${parts}sanitizer " ;;
    *)
        printf '%s\n' "$rows" "$user_rows" | awk '{ print $1 }' | grep -qx -- "$part" ||
            { echo "test-gpu: $part is no part of it; see the top of test/gpu.sh" >&2; exit 2; }
        parts="$parts$part "
        ;;
    esac
done
selected() { # name
    [ "$parts" = ' ' ] && return 0
    case $parts in *" $1 "*) return 0 ;; esac
    return 1
}
if [ -z "$build_only" ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU 0'; then
    echo "test-gpu: no GPU was found (nvidia-smi lists none), so nothing was tested; 'make test' runs the kernels on the CPU" >&2
    exit 1
fi
command -v "$NVCC" >/dev/null || { echo "test-gpu: $NVCC was not found: install the CUDA toolkit, or give NVCC=path" >&2; exit 1; }

export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
gpu=${CUDA_VISIBLE_DEVICES:-0}
gpu=${gpu%%,*}
ask() { nvidia-smi -i "$gpu" --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$work/skips"
: >"$work/programs" # the JSON's lines, those of earlier parts first
passed_now=0 failed_now=0 skipped_now=0

if [ -z "${NVCC_LINK:-}" ]; then # how make links ./train
    $MAKE --no-print-directory -s BACKEND=cuda ${ARCHS:+"ARCHS=$ARCHS"} --eval \
        'test-gpu-link: ; @echo "NVCC_LINK $(NVCC) -ccbin $(CXX) $(GENCODE)"; echo "NVCC_LIBS $(NVCC_LIBS)"' test-gpu-link >"$work/link" ||
        { cat "$work/link"; exit 1; }
    NVCC_LINK=$(sed -n 's/^NVCC_LINK //p' "$work/link")
    NVCC_LIBS=$(sed -n 's/^NVCC_LIBS //p' "$work/link")
fi
export NVCC_LINK NVCC_LIBS

job_of() { # name, program, precisions: its programs to be built
    selected "$1" || return 0
    for precision in $(echo "$3" | tr , ' '); do echo "$2 $precision"; done
}
{ each_line "$rows" job_of; selected sanitizer && printf 'ops bf16\nops fp32\n'; } | sort -u >"$work/jobs"
echo "building op set cuda in bf16 and fp32, then $(wc -l <"$work/jobs") programs"
printf 'op_set bf16\nop_set fp32\n' | xargs -L 1 -P "$JOBS" test/gpu.sh --job
[ -f build/test-gpu-bf16/build_op_set.log.failed ] || [ -f build/test-gpu-fp32/build_op_set.log.failed ] &&
    { echo "test-gpu: op set cuda does not build" >&2; exit 1; }
xargs -r -L 1 -P "$JOBS" test/gpu.sh --job <"$work/jobs"
if [ -n "$build_only" ]; then
    while read -r program precision; do
        [ -f "build/test-gpu-$precision/build_$program.log.failed" ] && exit 1
    done <"$work/jobs"
    echo "all of it compiles and links; nothing was run"
    exit 0
fi

# ---- the record ----------------------------------------------------------------------------------------------------------------------
device=$(ask name)
date=$(date -u +%Y-%m-%d)
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit, edited"
result=$RESULTS/test-$(echo "$device" | tr 'A-Z ' 'a-z-' | tr -dc 'a-z0-9-')-$date.json
sources=$(find Makefile train_gpt.cu streambp.h llmc test -type f | LC_ALL=C sort | xargs cat | cksum | cut -d ' ' -f 1)
libraries=$(scripts/cuda_libraries.sh report 2>&1 | # those of the build
    sed -n 's/^ *cuBLASLt *\([0-9.]*\):.*/cuBLASLt \1/p; s/^ *cuDNN *\([0-9.]*\), front end.*/cuDNN \1/p' | paste -sd , | sed 's/,/, /')
{
    printf '{\n  "kind": "test", "op_set": "cuda",\n'
    printf '  "device": "%s", "driver": "%s",\n' "$device" "$(ask driver_version)"
    printf '  "cuda": "%s", "libraries": "%s",\n' "$($NVCC --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" "$libraries"
    printf '  "date": "%s", "commit": "%s", "sources": "%s",\n' "$date" "$commit" "$sources"
} >"$work/head"
key() { printf '    {"program": "%s", "precision": "%s",' "$1" "$2"; }
sanitizer_name() { # tool, precision, command
    tool=$1
    shift 2
    echo "compute-sanitizer $tool $1 $2"
}
# every NAME/PRECISION that a complete record has, or with `selected` those of this run
keys_of() { # selected|all, name, program, precisions
    [ "$1" = all ] || selected "$2" || return 0
    for precision in $(echo "$4" | tr , ' '); do key "$2" "$precision"; echo; done
}
keys_of_user() { [ "$1" = all ] || selected "$2" && { key "$2" "$3"; echo; }; }
keys_of_sanitizer() { # selected|all, tool, precision, command
    [ "$1" = all ] || selected sanitizer || return 0
    shift
    key "$(sanitizer_name "$@")" "$2"
    echo
}
all_keys() { # selected|all
    each_line "$rows" keys_of "$1"
    each_line "$user_rows" keys_of_user "$1"
    each_line "$sanitizer_rows" keys_of_sanitizer "$1"
}
all_keys all >"$work/all"
all_keys selected >"$work/selected"
if [ -f "$result" ] && [ "$(head -n "$(wc -l <"$work/head")" "$result")" = "$(cat "$work/head")" ]; then
    grep '^    {"program"' "$result" | sed 's/,$//' | grep -vF -f "$work/selected" >"$work/programs"
fi
write_result() {
    complete=true
    while read -r line; do grep -qF "$line" "$work/programs" || complete=false; done <"$work/all"
    # how the bf16 op set did attention, from the calls that cuDNN took
    attention=$(sed -n 's/.*"attention", "precision": "bf16".*"cudnn_calls": \([0-9]*\).*/\1/p' "$work/programs")
    case $attention in '') attention=unknown ;; 0) attention=own ;; *) attention=cudnn ;; esac
    mkdir -p "$RESULTS"
    {
        cat "$work/head"
        awk -F'"(passed|failed|skipped)": ' '{ p += $2; f += $3; s += $4 }
            END { printf "  \"passed\": %d, \"failed\": %d, \"skipped\": %d,\n", p, f, s }' "$work/programs"
        printf '  "complete": %s, "attention": "%s",\n  "programs": [\n' $complete $attention
        sed '$!s/$/,/' "$work/programs"
        printf '  ]\n}\n'
    } >"$result.new" && mv "$result.new" "$result"
}
# record PROGRAM PRECISION PASSED FAILED SKIPPED [MORE]
record() {
    passed_now=$((passed_now + $3)) failed_now=$((failed_now + $4)) skipped_now=$((skipped_now + $5))
    printf '%-28s %s passed, %s failed, %s skipped\n' "$1 ($2)" "$3" "$4" "$5"
    { key "$1" "$2"; printf ' "passed": %s, "failed": %s, "skipped": %s%s}\n' "$3" "$4" "$5" "${6:-}"; } >>"$work/programs"
    write_result
}
# count PROGRAM PRECISION STATUS: adds the closing line of $work/output to passed, failed, skipped; without one it has failed.
count() {
    grep -E 'FAILED|ERROR|train: |cuDNN' "$work/output" | grep -v 'largest error' | head -n 60
    grep 'SKIPPED.*NOT TESTED' "$work/output" | sed "s|^|$1 ($2): |" >>"$work/skips"
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$work/output" | tail -n 1 | tr -dc '0-9 ')
    if [ -z "$line" ]; then
        tail -n 20 "$work/output"
        line='0 1 0'
        echo "FAILED: $1 ($2) ended with status $3 and no closing line"
    fi
    status=$3
    set -- "$1" "$2" $line
    [ "$status" != 0 ] && [ "$4" = 0 ] && { echo "FAILED: $1 ($2) ended with status $status"; set -- "$1" "$2" "$3" 1 "$5"; }
    passed=$((passed + $3)) failed=$((failed + $4)) skipped=$((skipped + $5))
}

# ---- running -----------------------------------------------------------------------------------------------------------------------
run_row() { # name, program, precisions, parts
    selected "$1" || return 0
    for precision in $(echo "$3" | tr , ' '); do
        program=build/test-gpu-$precision/test_$2 passed=0 failed=0 skipped=0 calls=
        [ -x "$program" ] || failed=1
        for part in $(echo "$4" | tr , ' '); do
            [ -x "$program" ] || continue
            [ "$part" = all ] && part=
            timeout -k 10 "$LIMIT" "$program" ${part:+"$part"} >"$work/output" 2>&1
            count "$1" "$precision" $?
            calls=$(sed -n 's/^ *cuDNN took \([0-9]*\) calls forward, \([0-9]*\) backward.*/\1 \2/p' "$work/output")
        done
        [ -z "$calls" ] || calls=", \"cudnn_calls\": $((${calls% *} + ${calls#* }))"
        record "$1" "$precision" $passed $failed $skipped "$calls"
    done
}
each_line "$rows" run_row

# One forward and backward pass as long as cuDNN likes them, once more without it
same_pass() {
    . test/cli.sh
    set -- --init llama,hidden_size=512,intermediate_size=1408,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=4,vocab_size=4096 \
        --seq-len 8192 --chunk 1024 --json
    succeeds bp "$@"
    loss=$(json loss) norm=$(json grad_norm)
    grep 'our own kernels' "$WORK/err" | sed 's/^/bp: /'
    STREAMBP_CUDNN=0
    export STREAMBP_CUDNN
    succeeds bp "$@"
    echo "with cuDNN, if it is there: loss $loss, gradient norm $norm; without: $(json loss), $(json grad_norm)"
    check 'the same loss with our own attention' close "$loss" "$(json loss)" 2e-3
    check 'the same gradient norm with our own attention' close "$norm" "$(json grad_norm)" 2e-2
    finish
}
# A pass on every GPU of this machine against one
multi_pass() { # precision
    . test/cli.sh
    . scripts/common.sh
    if [ "$(gpus_here)" -lt 2 ]; then
        echo '[  SKIPPED ] several GPUs: NOT TESTED, because there is one'
        skipped=$((skipped + 1))
    elif ! command -v mpirun >/dev/null; then
        echo '[  SKIPPED ] several GPUs: NOT TESTED, because there is no mpirun (Debian, Ubuntu: openmpi-bin)'
        skipped=$((skipped + 1))
    else
        check 'one result on all GPUs, for every stage' env MAKE="$MAKE" BUILD="build/cuda-$1" RESULTS="$WORK" scripts/multi_gpu_check.sh correctness
        check 'collectives are right' env MAKE="$MAKE" BUILD="build/cuda-$1" RESULTS="$WORK" MOST_MIB=8 scripts/multi_gpu_check.sh bandwidth
    fi
    finish
}
# The program as a user runs it; a context on the device, cuBLASLt's workspace and what CUDA loads are beside the plan.
run_user() { # name, precision
    selected "$1" || return 0
    passed=0 failed=0 skipped=0
    TRAIN=build/cuda-$2/train TRAIN_PLAIN=build/cuda-$2/train TEST_DEVICE=gpu TEST_PRECISION=$2
    export TRAIN TRAIN_PLAIN TEST_DEVICE TEST_PRECISION
    if [ "$1" = bp ]; then
        (same_pass) >"$work/output" 2>&1
    elif [ "$1" = multi ]; then
        (multi_pass "$2") >"$work/output" 2>&1
    else
        timeout -k 10 "$LIMIT" sh test/*/test_"$1".sh >"$work/output" 2>&1
    fi
    count "$1" "$2" $?
    record "$1" "$2" $passed $failed $skipped
}
each_line "$user_rows" run_user

run_sanitizer() { # tool, precision, command: one test, passed where nothing is reported
    selected sanitizer || return 0
    name=$(sanitizer_name "$@") tool=$1 precision=$2
    shift 2
    case $1 in train) folder=build/cuda-$precision ;; *) folder=build/test-gpu-$precision ;; esac
    skipped=
    if ! command -v compute-sanitizer >/dev/null; then
        skipped='it is not installed (Debian, Ubuntu: cuda-sanitizer-13-0 from NVIDIA)'
    else
        timeout -k 10 $SANITIZER_LIMIT compute-sanitizer --tool "$tool" --error-exitcode 9 "$folder/$@" >"$work/output" 2>&1
        case $? in
        0) record "$name" "$precision" 1 0 0 ;;
        124 | 137) skipped="it was not through after $SANITIZER_LIMIT s" ;;
        *)
            echo "FAILED: compute-sanitizer --tool $tool $folder/$*"
            grep -E '^=========|FAILED|train: ' "$work/output" | head -n 20
            record "$name" "$precision" 0 1 0
            ;;
        esac
        if [ -n "$skipped" ] && grep -E '^=========' "$work/output" | grep -vE 'COMPUTE-SANITIZER|ERROR SUMMARY: 0' >"$work/report"; then
            head -n 20 "$work/report"
            record "$name" "$precision" 0 1 0
            skipped=
        fi
    fi
    [ -z "$skipped" ] && return 0
    echo "[  SKIPPED ] $name ($precision): NOT TESTED, because $skipped" >>"$work/skips"
    record "$name" "$precision" 0 0 1
}
each_line "$sanitizer_rows" run_sanitizer
write_result
echo "written: $result$([ $complete = true ] || echo ', not complete: the other parts have not run')"

if [ -s "$work/skips" ]; then
    echo
    echo "Skipped, so NOT TESTED here:"
    cat "$work/skips"
fi
echo
echo "$passed_now passed, $failed_now failed, $skipped_now skipped"
[ "$failed_now" = 0 ] && [ "$passed_now" -gt 0 ]
