#!/bin/sh
# llm.c as a contender of compare.py: builds a driver around the user's own checkout of it (in build/compare/, again when something
# changed), converts the model to its format, and prints what its forward and backward passes took as one line of JSON.
#   dev/compare/llmc_bp.sh --llmc CHECKOUT --model DIR --tokens FILE --seq-len T [--batch B] [--repeat R] [--device cpu|cuda]
#       [--dtype fp32|bf16] [--threads N] [--memory-limit BYTES] [--recompute 0|1|2] [--train PROGRAM]
#       [--grads-out FILE] [--grads-of 'GLOB,GLOB']
# --recompute (cuda): what llm.c's -r recomputes: 1 GELU (the default there and here), 2 norms, too. --chunk and --logits-chunk mean
# nothing here. --train, or TRAIN: our program [./train, or the one of this device and dtype below build/]. CC, NVCC, ARCHS, CUDNN,
# CUDNN_FRONTEND: as for make. BUILD_ONLY=1: builds, and runs nothing.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
TRAIN=${TRAIN:-$root/train}
CC=${CC:-cc}
NVCC=${NVCC:-nvcc}
build=$root/build/compare
here=$root/dev/compare
fail() { # exit status, message
    echo "llmc_bp.sh: $2" >&2
    exit "$1"
}

# ---- arguments --------------------------------------------------------------------------------------------------------------
llmc='' model='' device=cpu dtype='' threads=''
tokens='' seq_len='' grads_of='' # checked here, passed on
passed=
keep() { passed="$passed $1 '$(printf '%s' "$2" | sed "s/'/'\\\\''/g")'"; } # quoted for eval
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || fail 2 "$1: its value is missing"
    case $1 in
    --llmc) llmc=$2 ;;
    --model) model=$2 ;;
    --train) TRAIN=$2 ;;
    --device) device=$2 ;;
    --dtype) dtype=$2 ;;
    --threads) threads=$2 ;;
    --chunk | --logits-chunk) ;;
    --tokens) tokens=$2 && keep "$1" "$2" ;;
    --seq-len) seq_len=$2 && keep "$1" "$2" ;;
    --batch | --repeat | --memory-limit | --recompute | --grads-out) keep "$1" "$2" ;;
    --grads-of) grads_of=$2 && keep "$1" "$2" ;;
    *) fail 2 "$1: not an option of this script; the head of the script lists them" ;;
    esac
    shift 2
done
case $device in cpu) main=train_gpt2.c ;; cuda) main=train_gpt2.cu ;; *) fail 2 "--device $device: is not cpu or cuda" ;; esac
dtype=${dtype:-$([ $device = cuda ] && echo bf16 || echo fp32)}
case $device-$dtype in
cpu-fp32 | cuda-fp32 | cuda-bf16) ;;
*) fail 2 "--dtype $dtype: llm.c has fp32 on the CPU, bf16 and fp32 on the GPU" ;;
esac
[ -n "$llmc" ] || fail 2 '--llmc CHECKOUT is missing: git clone https://github.com/karpathy/llm.c, and name that folder'
[ -f "$llmc/$main" ] || fail 2 "--llmc $llmc: there is no $main in it, so it is no checkout of llm.c"
[ -n "$model" ] && [ -n "$tokens" ] && [ -n "$seq_len" ] || fail 2 '--model, --tokens and --seq-len are needed'
[ -f "$model/config.json" ] || fail 2 "--model $model: holds no config.json"
grep -q '"model_type": *"gpt2"' "$model/config.json" || fail 2 "--model $model: llm.c has GPT-2 only, this is another family"
[ -f "$tokens" ] || fail 2 "--tokens $tokens: there is no such file"
[ -x "$TRAIN" ] || TRAIN=$root/build/$device-$dtype/train
[ -x "$TRAIN" ] || fail 1 "there is no ./train yet; run make first, or name the program with TRAIN="
llmc=$(cd "$llmc" && pwd)

# ---- the driver -------------------------------------------------------------------------------------------------------------
# make_object OUTPUT COMMAND...: runs the command where it, our sources or the checkout's changed since the output was made
make_object() {
    output=$1
    shift
    [ -f "$output" ] && [ "$(cat "$output.command" 2>/dev/null)" = "$*" ] &&
        [ -z "$(find "$here"/llmc* "$root/llmc" "$llmc/$main" "$llmc/llmc" -type f -newer "$output" | head -n 1)" ] && return
    rm -f "$output"
    "$@" >&2 || fail 1 "$output was not built; the compiler says why above"
    echo "$*" >"$output.command"
}
# cuDNN's attention, in bf16, where the Makefile finds cuDNN and its front end. Their places may be quoted macros: eval reads them.
cudnn_flags() { [ "$dtype" = bf16 ] && NVCC="$NVCC" "$root/scripts/cuda_libraries.sh" flags; }
build_driver() {
    mkdir -p "$build"
    driver=$build/llmc_bp-$device-$dtype
    make_object "$build/llmc_bp.o" $CC -std=gnu11 -D_GNU_SOURCE -DPRECISION_FP32 -O2 -I"$root" -c "$here/llmc_bp.c" -o "$build/llmc_bp.o"
    if [ "$device" = cpu ]; then # flags as in llm.c's Makefile
        make_object "$driver.o" $CC -std=gnu11 -D_GNU_SOURCE -Ofast -march=native -fopenmp -DOMP -w -I"$llmc" -c "$here/llmc_bp_cpu.c" -o "$driver.o"
        make_object "$driver" $CC -fopenmp "$build/llmc_bp.o" "$driver.o" -lcjson -lm -o "$driver"
        return
    fi
    command -v "$NVCC" >/dev/null || fail 1 "--device cuda needs nvcc: install the CUDA toolkit, or give NVCC=<path>"
    flags="-O3 --use_fast_math -std=c++17 -w -DENABLE_$(echo "$dtype" | tr a-z A-Z)"
    for arch in ${ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | head -n 1)}; do
        flags="$flags -gencode arch=compute_$arch,code=sm_$arch"
    done
    cudnn=$(cudnn_flags)
    attention=
    if [ -n "$cudnn" ]; then
        flags="$flags -DENABLE_CUDNN $(echo "$cudnn" | tr ' ' '\n' | grep -A 1 -e '^-isystem' | grep -v '^--' | paste -sd ' ')"
        attention=$driver-attention.o
        make_object "$attention" "$NVCC" $flags -I"$llmc" -c "$llmc/llmc/cudnn_att.cpp" -o "$attention"
    fi
    make_object "$driver.o" "$NVCC" $flags -I"$llmc" -c "$here/llmc_bp_cuda.cu" -o "$driver.o"
    toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v "$NVCC")")")")
    rpath="-Xlinker -rpath,$toolkit/lib64"
    [ -n "$cudnn" ] && libraries="${CUDNN:+-L$CUDNN/lib -Xlinker -rpath,$CUDNN/lib} -lcudnn" || libraries=
    [ -e "$toolkit/include/nvml.h" ] && libraries="$libraries -lnvidia-ml"
    make_object "$driver" "$NVCC" "$build/llmc_bp.o" "$driver.o" $attention $rpath -lcublas -lcublasLt $libraries -lcjson -lm -o "$driver"
}

# ---- one run ----------------------------------------------------------------------------------------------------------------
build_driver
[ "${BUILD_ONLY:-}" = 1 ] && exit 0
work=$(mktemp -d "$build/run.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
"$TRAIN" convert --model "$model" --to llmc --dtype "$dtype" --out "$work/model.bin" --quiet >&2 || exit 1
commit=$(git -C "$llmc" rev-parse --short HEAD 2>/dev/null || echo unknown)
[ -n "$threads" ] && export OMP_NUM_THREADS="$threads"
eval "\"\$driver\" --checkpoint \"\$work/model.bin\" --version \"\$commit\" $passed" >"$work/out" 2>"$work/err"
status=$?
cat "$work/err" >&2
# A run that does not fit is a result. llm.c ends where an allocation fails; the driver asks before, but cannot know of every library's.
if [ $status != 0 ] && grep -qiE 'out of (host )?memory|memory allocation' "$work/err"; then
    echo '{"contender": "llmc", "error": "out of memory"}'
    exit 0
fi
cat "$work/out"
exit $status
