#!/bin/sh
# The first minutes on a GPU, with a kit of scripts/gpu_kit.sh and no network: sh KIT/first.sh OUT
#   1. the build that the driver takes and whose `doctor` finds nothing wrong
#   2. gradients: in fp32 and bf16 as on the CPU; streamed, by our own attention, with host memory, as those of gradient checkpointing; the
#      tests of ops in both types
#   3. passes of a few layers: one document, one after another, 600 lengths, layer inputs in host memory, with STREAMBP_WGMMA=1; the rate
#      of each op
#   4. passes of all layers; a disk
# Anything wrong in 1 or 2 ends it before anything is measured. A table says what was expected (`train plan` for this card, dev/gpu_speed.md)
# and what was found. OUT gets it, log.txt, passes.jsonl, bench.json and a record for dev/results. An H100 should take 11 minutes.
# LIMIT [530] seconds: what would not end in time is left out. The same command then goes on: what is in the table is not done again.
# CUDA's libraries: those of STREAMBP_LIBRARIES, of Pythons' wheels (PYTHON), of toolkits. DISK [OUT]: a folder on a disk.
# Exit status 1: something is wrong; 3: something was left out.
set -u
kit=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
. "$kit/common.sh"
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd) LIMIT=${LIMIT:-530} PYTHON=${PYTHON:-python3} begin=$(date +%s) path=${LD_LIBRARY_PATH:-} # may have the driver
case $LIMIT in '' | *[!0-9]*) echo "first.sh: LIMIT is '$LIMIT'; give seconds" >&2 && exit 2 ;; esac
log=$out/log.txt table=$out/table.txt left_out=

# ---- the table: `state|what|expected|found` -----------------------------------------------------------------------------------------
show() { printf '%-7s %-34s %-30s %s\n' "$@"; }
row() { # state (ok, WRONG, - where nothing is expected; FAILED: is tried again), what, expected, found
    printf '%s|%s|%s|%s\n' "$@" >>"$table"
    show "$@"
}
finish() { # what ended it early
    printf '\n%s\n' "$(show state what expected found)"
    while IFS='|' read -r state what expected found; do show "$state" "$what" "$expected" "$found"; done <"$table"
    [ -z "$left_out" ] || echo "left out, of $LIMIT s: ${left_out#, }; the same command goes on there"
    [ -z "${1:-}" ] || { echo "first.sh: $1; see $log" >&2 && exit 1; }
    ! grep -qE '^(WRONG|FAILED)' "$table" || exit 1
    [ -z "$left_out" ] || exit 3
    exit 0
}
done_before() { grep -v '^FAILED' "$table" | cut -d '|' -f 2 | grep -qxF "$1"; }

# step WHAT SECONDS COMMAND...: its output in step.out and step.err, and in the log. Status 3: done before, or left out
step() {
    what=$1 needs=$2 left=$((LIMIT - $(date +%s) + begin))
    shift 2
    ! done_before "$what" || return 3
    [ "$left" -ge "$needs" ] || { left_out="$left_out, $what" && return 3; }
    most=$((needs * 4 < left ? needs * 4 : left))
    watched "$out/samples" timeout -k 5 $most "$@" >"$out/step.out" 2>"$out/step.err"
    status=$?
    { echo "=== $what: $*"; cat "$out/step.out" "$out/step.err"; echo "--- exit $status"; } >>"$log"
    [ $status != 0 ] || return 0
    case $status-$most in 124-$left | 137-$left) left_out="$left_out, $what" && return 3 ;; esac
    said=$(cat "$out/step.out" "$out/step.err" | grep . | tr '|' ' ')
    row FAILED "$what" 'exit 0' "exit $status: $(echo "$said" | { grep -E '^doctor  |^[0-9]+ passed' || echo "$said" | tail -n 1; } | cut -c1-150)$(
        echo "$said" | sed -n 's/^ERROR: /; /p' | head -n 1 | cut -c1-200)"
    return 1
}
value() { grep -o "\"$1\": [-+.0-9eE]*" | head -n 1 | cut -d ' ' -f 2; } # the first of a JSON
pass_of() { grep -sF "{\"pass\": \"$1\"," "$out/passes.jsonl" | tail -n 1; }
near() { awk -v a="$1" -v b="$2" -v d="$3" 'BEGIN { x = a < b ? b - a : a - b; exit !(a > 0 && x <= d * b) }'; }
judge() { if "$@"; then echo ok; else echo WRONG; fi; }

# bp WHAT SECONDS OPTIONS...: a line in passes.jsonl
computes=cuda dtype=bf16
bp() {
    step "$1" "$2" "$TRAIN" bp --json --device $computes --dtype $dtype $3 || return
    planned=$([ -z "$card" ] || [ $computes$dtype != cudabf16 ] ||
        "$TRAIN" plan --for bp --machine "$card" --json --quiet --dtype bf16 $3 2>>"$log" | value estimated_seconds)
    printf '{"pass": "%s", "options": "%s", "date": "%s", "planned_seconds": %s, "gpu": %s, "result": %s}\n' "$1" "$3" "$(date -u +%FT%TZ)" \
        "${planned:-null}" "$(gpu_samples "$out/samples")" "$(tr -d '\n' <"$out/step.out")" >>"$out/passes.jsonl"
}
gradient() { # what, options, the first pass [`checkpointing`], which has its gradient, relative difference [0.002]
    bp "$1" 15 "$small $2"
    [ $? = 0 ] || return
    norm=$(pass_of "$1" | value grad_norm) wanted=$(pass_of "${3:-checkpointing}" | value grad_norm)
    [ -n "$wanted" ] || wanted=$norm
    if near "$norm" "$wanted" "${4:-0.002}"; then row ok "$1" "gradient norm $wanted" "$norm"; else row FAILED "$1" "gradient norm $wanted" "$norm"; fi
}
timed() { # what, seconds, options: seconds as planned
    bp "$@" || return
    seconds=$(pass_of "$1" | value seconds)
    found="$(printf '%.4g' "$seconds") s, loss $(pass_of "$1" | value loss), gradient norm $(pass_of "$1" | value grad_norm)"
    if [ -n "$planned" ]; then row "$(judge near "$seconds" "$planned" 0.1)" "$1" "$(printf '%.4g' "$planned") s, 10 %" "$found"; else row - "$1" - "$found"; fi
}

# ---- 1. what is there -----------------------------------------------------------------------------------------------------------------
gpu=$(ask_gpu name)
case $gpu in '' | *rror* | *ailed* | No\ devices*) echo 'first.sh: no GPU was found (nvidia-smi names none)' >&2 && exit 1 ;; esac
case $gpu in # --machine's name: llmc/estimate/machine.h
*PCIe* | *NVL* | *Laptop*) card= ;;
*A100-SXM4-80GB*) card=a100 ;;
*A100-SXM4-40GB*) card=a100-40 ;;
*'H100 80GB'*) card=h100 ;;
*H200*) card=h200 ;;
*B200*) card=b200 ;;
*L40S*) card=l40s ;;
*'RTX 5090'*) card=rtx5090 ;;
*'RTX 4090'*) card=rtx4090 ;;
*'RTX 4080'*) card=rtx4080 ;;
*'RTX 3060'*) card=rtx3060 ;;
*) card= ;;
esac
of="kit $(cksum <"$kit/kit.txt"), $gpu"
[ "$(cat "$out/of.txt" 2>/dev/null)" = "$of" ] || { rm -rf "$table" "$out"/passes.jsonl "$out"/test-*.json "$out"/cuda1? "$out"/programs "$out"/right && echo "$of" >"$out/of.txt"; }
touch "$table"
sed -i '/^FAILED/d' "$table"
STREAMBP_LIBRARIES=$({
    echo "${STREAMBP_LIBRARIES:-}" | tr : '\n'
    for python in "$PYTHON" python /opt/*/bin/python3; do "$python" -c 'import nvidia; print(*nvidia.__path__, sep="\n")'; done
    ls -d /usr/lib/python3*/*-packages/nvidia /usr/local/lib/python3*/*-packages/nvidia /opt/*/lib/python3*/*-packages/nvidia
    ls -d ${CUDA_HOME:+"$CUDA_HOME"/lib*} /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib
} 2>/dev/null | awk 'NF && !seen[$0]++' | paste -sd : -)
export STREAMBP_LIBRARIES LD_LIBRARY_PATH
echo "$gpu, --machine ${card:-unknown: nothing is estimated}; STREAMBP_LIBRARIES=$STREAMBP_LIBRARIES" | tee -a "$log"
{ cat "$kit/kit.txt" && timeout 60 nvidia-smi && nproc && free -g && df -h "$out"; } >>"$log" 2>&1

tried= chosen=$(sed -n 's/^ok|doctor, \(cuda1.\)|.*/\1/p' "$table")
for build in ${chosen:-cuda13 cuda12}; do
    [ -f "$kit/$build.tar.xz" ] || { build= && continue; }
    TRAIN=$out/$build/train LD_LIBRARY_PATH=$out/$build/lib:$path
    [ -z "$chosen" ] || break
    [ -x "$TRAIN" ] || { xz -dc "$kit/$build.tar.xz" | tar -x -C "$out"; } 2>>"$log" || # without xz:
        "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$kit/$build.tar.xz" "$out" 2>>"$log"
    step "doctor, $build" 60 "$TRAIN" doctor --device cuda --dtype bf16 --init qwen3-8b --verbose
    status=$?
    own=$(grep -E '^note +attention  .*own kernels' "$out/step.out")
    if [ $status = 0 ] && { [ -z "$own" ] || [ "${STREAMBP_CUDNN:-}" = 0 ]; }; then
        row ok "doctor, $build" 'nothing wrong' "$(grep '^doctor ' "$out/step.out")"
        sed -n 's/^\([a-zA-Z]*\) *\(driver\|cuBLASLt\|cuDNN\|attention\|copies\|host memory link\|products\|attention forward\|attention backward\)   *\(.*\)/\1|\2|\3/p' \
            "$out/step.out" >"$out/found"
        while IFS='|' read -r state what text; do row "$state" "$what" '' "$text"; done <"$out/found"
        break
    fi
    [ $status = 3 ] || tried="$tried $build: $(grep -hE '^WRONG|own kernels' "$out/step.out" "$out/step.err" | head -n 3 | cut -c1-180 | paste -sd ';' -)"
    build=
done
[ -z "$left_out" ] || finish
[ -n "$build" ] && [ -x "$TRAIN" ] || finish "no build runs here as it should.$tried"
sed -i '/^FAILED|doctor, /d' "$table" # of the other build

# The record: the form of dev/results/test-*.json
record() { # name, `N passed, N failed, N skipped`, calls of cuDNN
    sed -i "/\"program\": \"$1\", \"precision\": \"$dtype\"/d" "$out/programs" 2>/dev/null
    echo "$2" | sed "s/\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped/    {\"program\": \"$1\", \"precision\": \"$dtype\", \"passed\": \1, \"failed\": \2, \"skipped\": \3${3:+, \"cudnn_calls\": $3}}/" >>"$out/programs"
    version() { sed -n "s/^ok|$1||\([0-9.]*\).*/\1/p" "$table" | tail -n 1; }
    {
        printf '{\n  "kind": "test", "op_set": "cuda",\n  "device": "%s", "driver": "%s",\n' "$gpu" "$(ask_gpu driver_version)"
        printf '  "cuda": "%s", "libraries": "cuBLASLt %s, cuDNN %s",\n' "$("$TRAIN" --version | sed -n 's/.*CUDA \([0-9]*\.[0-9]*\).*/\1/p')" "$(version cuBLASLt)" "$(version cuDNN)"
        printf '  "date": "%s", "commit": "%s", "sources": "%s",\n' "$(date -u +%F)" "$(sed -n 's/^commit //p' "$kit/kit.txt")" "$(sed -n 's/^sources //p' "$kit/kit.txt")"
        awk -F'"(passed|failed|skipped)": ' '{ p += $2; f += $3; s += $4 } END { printf "  \"passed\": %d, \"failed\": %d, \"skipped\": %d,\n", p, f, s }' "$out/programs"
        printf '  "complete": false, "attention": "%s",\n  "programs": [\n%s\n  ]\n}\n' "$(grep -q 'cudnn_calls": [1-9]' "$out/programs" && echo cudnn || echo own)" "$(sed '$!s/$/,/' "$out/programs")"
    } >"$out/test-$(slug "$gpu")-$(date -u +%F).json"
}
tests() { # what, seconds, name in the record, program, part
    step "$1" "$2" env TEST_DTYPE=$dtype "$out/$build/$4" $5
    status=$?
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out/step.out" | tail -n 1)
    [ $status = 3 ] || [ -z "$closing" ] || record "$3" "$closing" \
        "$(sed -n 's/^ *cuDNN took \([0-9]*\) calls forward, \([0-9]*\) backward.*/\1 \2/p' "$out/step.out" | awk '{ n = $1 + $2 } END { if (NR) print n }')"
    [ $status != 0 ] || row "$(judge [ "$closing" != "${closing#* 0 failed}" ])" "$1" '0 failed' "${closing:-no closing line}"
}

# ---- 2. right or wrong ----------------------------------------------------------------------------------------------------------------
small='--init qwen3-8b,num_hidden_layers=2,vocab_size=4000,hidden_size=512,intermediate_size=1024 --seq-len 512'
computes=cpu dtype=fp32
gradient 'fp32 on the CPU' '' 'fp32 on the CPU'
computes=cuda
gradient fp32 '' 'fp32 on the CPU' 0.0001
dtype=bf16
gradient bf16 '' 'fp32 on the CPU' 0.005
small='--init qwen3-8b,num_hidden_layers=2,vocab_size=32000 --seq-len 16384'
gradient checkpointing '--method checkpoint'
gradient streamed ''
gradient 'streamed, chunks of 1024' '--chunk 1024'
gradient 'streamed, chunks of 1000' '--chunk 1000'
gradient 'inputs and weights in host memory' '--inputs host --weights host'
cudnn=${STREAMBP_CUDNN:-} STREAMBP_CUDNN=0
export STREAMBP_CUDNN
gradient 'our own attention' ''
[ -n "$cudnn" ] || unset STREAMBP_CUDNN
tests 'tests of ops' 40 ops test_ops ''
dtype=fp32
tests 'tests of ops, fp32' 40 ops test_ops ''
dtype=bf16
tests 'tests of long attention' 120 attention test_gpu_large attention
[ -e "$out/right" ] || ! grep -qE '^(WRONG|FAILED)' "$table" ||
    finish "nothing is measured, for something is wrong: $(sed -nE 's/^(WRONG|FAILED)[|]([^|]*)[|].*[|]/\2: /p' "$table" | paste -sd ';' - | cut -c1-300)"
[ -z "$left_out" ] || finish
: >"$out/right"

# ---- 3. a few layers ------------------------------------------------------------------------------------------------------------------
four=num_hidden_layers=4
timed '4 layers' 30 "--init qwen3-8b,$four --seq-len 32768 --repeat 3 --profile"
timed '4 layers, sums in any order' 30 "--init qwen3-8b,$four --seq-len 32768 --repeat 3 --deterministic off"
timed '4 layers after 100 tokens' 30 "--init qwen3-8b,$four --seq-len 32768 --repeat 3 --data $kit/behind.bin"
timed '2 layers, 600 lengths' 40 "--init qwen3-8b,num_hidden_layers=2,vocab_size=32000 --seq-len 239700 --repeat 3 --data $kit/lengths.bin"
timed '4 layers of llama3.1-8b' 30 "--init llama3.1-8b,$four --seq-len 32768 --repeat 3"
timed '4 layers of qwen3.5-9b' 30 "--init qwen3.5-9b,$four --seq-len 32768 --repeat 3 --profile"
# Kernels that STREAMBP_WGMMA=1 turns on
with_hopper() { # what, seconds, options: the same pass with them, and its gradient
    timed "$1" "$2" "$3"
    STREAMBP_WGMMA=1
    export STREAMBP_WGMMA
    timed "$1, wgmma" "$2" "$3"
    unset STREAMBP_WGMMA
    old=$(pass_of "$1" | value grad_norm) new=$(pass_of "$1, wgmma" | value grad_norm)
    [ -z "$old" ] || [ -z "$new" ] || done_before "$1, wgmma: gradient" ||
        row "$(judge near "$new" "$old" 0.002)" "$1, wgmma: gradient" "$old" "$new"
}
case $card in
h100 | h200)
    STREAMBP_WGMMA=1
    export STREAMBP_WGMMA
    tests 'tests of ops, wgmma' 40 'ops, wgmma' test_ops ''
    unset STREAMBP_WGMMA
    with_hopper '2 layers of qwen3-30b-a3b' 30 '--init qwen3-30b-a3b,num_hidden_layers=2 --seq-len 32768 --repeat 3'
    with_hopper '2 layers of gpt-oss-20b' 30 '--init gpt-oss-20b,num_hidden_layers=2 --seq-len 32768 --repeat 3'
    with_hopper '4 layers of qwen3.5-9b' 30 "--init qwen3.5-9b,$four --seq-len 32768 --repeat 3 --profile"
    with_hopper '4 layers' 30 "--init qwen3-8b,$four --seq-len 32768 --repeat 3 --profile"
    ;;
esac
for place in device host; do
    timed "8 layers, inputs on $place" 45 "--init qwen3-8b,num_hidden_layers=8 --seq-len 65536 --inputs $place --inputs-every 1 --keep none --repeat 3"
done
device=$(pass_of '8 layers, inputs on device') host=$(pass_of '8 layers, inputs on host')
if [ -n "$device" ] && [ -n "$host" ] && ! done_before 'inputs on host: loss, norm'; then
    bits() { echo "$1" | grep -oE '"(loss|grad_norm)": [^,]*' | cut -d ' ' -f 2 | paste -sd ' ' -; }
    above() { echo $(($(echo "$1" | value peak_bytes) - $(echo "$1" | value plan_bytes))); }
    row "$(judge [ "$(bits "$device")" = "$(bits "$host")" ])" 'inputs on host: loss, norm' "$(bits "$device")" "$(bits "$host")"
    row "$(judge near "$(echo "$host" | value seconds)" "$(echo "$device" | value seconds)" 0.03)" 'inputs on host: seconds' "$(echo "$device" | value seconds), 3 %" "$(echo "$host" | value seconds)"
    row "$(judge [ "$(above "$device")" -lt 335544320 ])" 'peak above the plan' 'below 320 MiB' "$(($(above "$device") >> 20)) MiB"
    pinned=$(($(echo "$host" | value host_bytes) >> 20)) taken=$((($(above "$host") - $(above "$device")) >> 20))
    row "$(judge [ $taken -le $((pinned / 256 + 16)) ])" "on the device, for $pinned MiB pinned" "$((pinned / 512)) MiB" "$taken MiB"
fi
# Shares of a copy or of the best product, percent, of the H100 of dev/results
if step 'rates of ops' 40 "$out/$build/bench" 11; then
    cp "$out/step.out" "$out/bench.json"
    row - 'rates of ops' '' "$(grep -c ' % of ' "$out/step.err") rows in bench.json"
    while IFS='|' read -r op of share; do
        found=$(awk -v row="$(printf '%-24s %-24s ' "$op" "$of")" 'index($0, row) == 1 && match($0, /[0-9.]+ % of/) { print substr($0, RSTART, RLENGTH - 5) }' "$out/step.err")
        case $card in h100 | h200) row "$(judge awk "BEGIN { exit !(${found:-0} >= 0.9 * $share) }")" "$op${of:+, $of}" "$share %" "${found:-none} %" ;; esac
    done <<'END'
copy|layer inputs|84
linear_forward|gate and up|96
linear_backward_weight|gate and up|87
attention_forward|the last chunk|82
attention_backward|the last chunk, large workspace|52
attention_backward|the last chunk, large workspace, any order|61
rmsnorm_backward|query heads|71
swiglu_backward||99
logprob|with its gradient|60
adamw|a layer, fp32 master|95
END
fi

# A token of one text, beside its estimate
eight=qwen3-8b,num_hidden_layers=8
for T in 32 4096 32768; do
    step "a token after $T" 30 "$out/$build/bench_decode" token $eight $T 64 || continue
    planned=$([ -z "$card" ] || "$TRAIN" plan --for sample --dtype bf16 --init $eight --max-context $T --machine "$card" --json --quiet 2>>"$log" | value token_seconds)
    found=$(sed -n 's/^token: after [0-9]* tokens \([0-9.]*\) ms .*/\1/p' "$out/step.out") wanted=$(awk "BEGIN { printf \"%.3g\", 1e3 * ${planned:-0} }")
    if [ -n "$planned" ]; then row "$(judge near "$found" "$wanted" 0.15)" "a token after $T" "$wanted ms, 15 %" "$found ms"; else row - "a token after $T" - "$found ms"; fi
done

# ---- 4. all layers, a disk ------------------------------------------------------------------------------------------------------------
for model in qwen3-8b qwen3.5-9b; do timed "$model at 32768" 60 "--init $model --seq-len 32768 --repeat 3"; done
timed 'qwen3-8b at 131072' 90 '--init qwen3-8b --seq-len 131072'
if step 'doctor, with a disk' 60 "$TRAIN" doctor --device cuda --dtype bf16 --disk "${DISK:-$out}"; then
    row "$(sed -n 's/^\([a-zA-Z]*\) *disk   .*/\1/p' "$out/step.out")" 'doctor, with a disk' '' "$(sed -n 's/^[a-zA-Z]* *disk   *//p' "$out/step.out")"
fi
rm -f "$out/step.out" "$out/step.err" "$out/samples"* "$out/found"
finish
