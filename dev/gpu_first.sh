#!/bin/sh
# The first minutes on a GPU, with a kit of scripts/gpu_kit.sh and no network: sh KIT/first.sh OUT
#   1. the build that the driver takes and whose `doctor` finds nothing wrong
#   2. gradients: in fp32 and bf16 as on the CPU; streamed, by our own attention, with host memory, as those of gradient checkpointing; the
#      tests of ops in both types
#   3. passes of a few layers: one document, one after another, 600 lengths, layer inputs in host memory, with STREAMBP_WGMMA=1; the rate
#      of each op
#   4. passes of all layers; a disk
# Anything wrong in 1 or 2 ends it before anything is measured. A table says what was expected (`train plan` for this card, dev/gpu_speed.md)
# and what was found. OUT gets it, log.txt, passes.jsonl, bench.json and records for scripts/add_report.py. An H100 should take 11 minutes.
# LIMIT [530] seconds: what would not end in time is left out. The same command then goes on: what is in the table is not done again.
# CUDA's libraries: those of STREAMBP_LIBRARIES, of Pythons' wheels (PYTHON), of toolkits. DISK [OUT]: a folder on a disk.
# RIGHT=only: ends after 2. Exit status 1: something is wrong; 3: something was left out.
set -u
me=first.sh kit=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
. "$kit/common.sh"
. "$kit/gpu_steps.sh"
gradient() { # what, options, the first pass [`checkpointing`], which has its gradient, relative difference [0.002]
    bp "$1" 15 "$small $2"
    [ $? = 0 ] || return
    norm=$(pass_of "$1" | value grad_norm) wanted=$(pass_of "${3:-checkpointing}" | value grad_norm)
    [ -n "$wanted" ] || wanted=$norm
    if near "$norm" "$wanted" "${4:-0.002}"; then row ok "$1" "gradient norm $wanted" "$norm"; else row FAILED "$1" "gradient norm $wanted" "$norm"; fi
}

# ---- 1. what is there -----------------------------------------------------------------------------------------------------------------
open_kit "$1"
choose_build

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
cudnn=${STREAMBP_CUDNN:-}
with STREAMBP_CUDNN=0 gradient 'our own attention' ''
[ -z "$cudnn" ] || export STREAMBP_CUDNN="$cudnn"
tests 'tests of ops' 40 ops test_ops ''
dtype=fp32
tests 'tests of ops, fp32' 40 ops test_ops ''
dtype=bf16
tests 'tests of long attention' 120 attention test_gpu_large attention
[ -e "$out/right" ] || ! grep -qE '^(WRONG|FAILED)' "$table" ||
    finish "nothing is measured, for something is wrong: $(sed -nE 's/^(WRONG|FAILED)[|]([^|]*)[|].*[|]/\2: /p' "$table" | paste -sd ';' - | cut -c1-300)"
[ -z "$left_out" ] || finish
: >"$out/right"
[ -z "${RIGHT:-}" ] || finish

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
    with STREAMBP_WGMMA=1 timed "$1, wgmma" "$2" "$3"
    old=$(pass_of "$1" | value grad_norm) new=$(pass_of "$1, wgmma" | value grad_norm)
    [ -z "$old" ] || [ -z "$new" ] || done_before "$1, wgmma: gradient" ||
        row "$(judge near "$new" "$old" 0.002)" "$1, wgmma: gradient" "$old" "$new"
}
case $card in
h100 | h200)
    with STREAMBP_WGMMA=1 tests 'tests of ops, wgmma' 40 'ops, wgmma' test_ops ''
    with_hopper '2 layers of qwen3-30b-a3b' 30 '--init qwen3-30b-a3b,num_hidden_layers=2 --seq-len 32768 --repeat 3'
    with_hopper '2 layers of gpt-oss-20b' 30 '--init gpt-oss-20b,num_hidden_layers=2 --seq-len 32768 --repeat 3'
    with_hopper '4 layers of qwen3.5-9b' 30 "--init qwen3.5-9b,$four --seq-len 32768 --repeat 3 --profile"
    with_hopper '4 layers' 30 "--init qwen3-8b,$four --seq-len 32768 --repeat 3 --profile"
    ;;
esac
for place in device host; do
    timed "8 layers, inputs on $place" 45 "--init qwen3-8b,num_hidden_layers=8 --seq-len 65536 --inputs $place --inputs-every 1 --keep none --repeat 3"
done
card_pass=$(pass_of '8 layers, inputs on device') host=$(pass_of '8 layers, inputs on host')
if [ -n "$card_pass" ] && [ -n "$host" ] && ! done_before 'inputs on host: loss, norm'; then
    bits() { echo "$1" | grep -oE '"(loss|grad_norm)": [^,]*' | cut -d ' ' -f 2 | paste -sd ' ' -; }
    above() { echo $(($(echo "$1" | value peak_bytes) - $(echo "$1" | value plan_bytes))); }
    row "$(judge [ "$(bits "$card_pass")" = "$(bits "$host")" ])" 'inputs on host: loss, norm' "$(bits "$card_pass")" "$(bits "$host")"
    row "$(judge near "$(echo "$host" | value seconds)" "$(echo "$card_pass" | value seconds)" 0.03)" 'inputs on host: seconds' "$(echo "$card_pass" | value seconds), 3 %" "$(echo "$host" | value seconds)"
    row "$(judge [ "$(above "$card_pass")" -lt 335544320 ])" 'peak above the plan' 'below 320 MiB' "$(($(above "$card_pass") >> 20)) MiB"
    pinned=$(($(echo "$host" | value host_bytes) >> 20)) taken=$((($(above "$host") - $(above "$card_pass")) >> 20))
    row "$(judge [ $taken -le $((pinned / 256 + 16)) ])" "on the device, for $pinned MiB pinned" "$((pinned / 512)) MiB" "$taken MiB"
fi
# Shares of a copy or of the best product, percent, of the H100 of dev/results
if rates 'rates of ops' bench.json; then
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

for T in 32 4096 32768; do token_after $T; done

# ---- 4. all layers, a disk ------------------------------------------------------------------------------------------------------------
for model in qwen3-8b qwen3.5-9b; do timed "$model at 32768" 60 "--init $model --seq-len 32768 --repeat 3"; done
timed 'qwen3-8b at 131072' 90 '--init qwen3-8b --seq-len 131072'
if step 'doctor, with a disk' 60 "$TRAIN" doctor --device cuda --dtype bf16 --disk "${DISK:-$out}"; then
    row "$(sed -n 's/^\([a-zA-Z]*\) *disk   .*/\1/p' "$out/step.out")" 'doctor, with a disk' '' "$(sed -n 's/^[a-zA-Z]* *disk   *//p' "$out/step.out")"
fi
rm -f "$out/step.out" "$out/step.err" "$out/samples"* "$out/found"
finish
