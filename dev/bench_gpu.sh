#!/bin/sh
# Rates that the GPU reaches: make bench-gpu [PRECISION=bf16|fp32] [REPEATS=21] [LENGTHS="4096 32768 131072"]
# Every op at the shapes of Qwen3-8B (dev/cuda/bench.cu), then one forward and backward pass of 8B models at several lengths, where
# the plan says that they fit. One file, dev/results/bench-<device>-<date>.json; a second run on the same day replaces it. What fails is
# recorded as such, and the exit status is 1 then.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
PRECISION=${PRECISION:-bf16}
REPEATS=${REPEATS:-21}
LENGTHS=${LENGTHS:-4096 32768 131072}
MODELS=${MODELS:-llama3.1-8b qwen3-8b}
BUILD=${BUILD:-build/cuda-$PRECISION}
RESULTS=${RESULTS:-dev/results}
export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi

device=$(ask_gpu name || true)
case $device in
'' | *rror* | *ailed* | No\ devices*)
    echo "bench-gpu: no GPU was found (nvidia-smi names none); make bench measures the CPU" >&2
    exit 1
    ;;
esac
${MAKE:-make} --no-print-directory BACKEND=cuda PRECISION="$PRECISION" "$BUILD/train" "$BUILD/bench" >&2

# An unlisted device gets no share of its peak, only of the measured product.
peak=$(awk -v device="$device" -v column="$([ "$PRECISION" = bf16 ] && echo 1 || echo 0)" '
    NF && $1 != "#" { name = $1; for (i = 2; i <= NF - 2; i++) name = name " " $i
         if (index(device, name)) { print $(NF - column); exit } }' scripts/gpu_peaks.txt)
echo "$device: peak ${peak:-unknown} TFLOP/s ($PRECISION)" >&2

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { # what: says so, and remembers it in subshells, too
    echo "FAILED: $1" >&2
    : >"$folder/failed"
}
watched "$folder/samples" "$BUILD/bench" "$REPEATS" >"$folder/ops" || { fail "$BUILD/bench $REPEATS"; echo null >"$folder/ops"; }
ops_gpu=$(gpu_samples "$folder/samples")
product=$(json_number product_tflop_per_s <"$folder/ops")

# ---- bp ------------------------------------------------------------------------------------------------------------------------------
# Memory that may be planned: measured use is to stay within 2 % + 300 MiB of the plan, and the context takes about 500 MiB.
room=$(ask_gpu memory.free | awk '$1 + 0 > 0 { printf "%.0f", ($1 - 800) / 1.02 * 1048576 }')
room=${room:-none} # memory that is the host's, too: "[N/A]"
share_of() { # rate, reference rate: a number, or null if the reference is unknown
    if [ -n "$2" ]; then awk "BEGIN { printf \"%.4f\", $1 / $2 }"; else printf null; fi
}
per_second() { awk "BEGIN { printf \"%.2f\", $1 / $seconds / 1e12 }"; } # FLOPs: TFLOP/s
# model, length, causal model FLOPs: those of others, who count all T^2 pairs of a query and a key
all_pairs_flops() {
    shape=$("$BUILD/train" info --init "$1" --json --quiet)
    awk -v L="$(echo "$shape" | json_number num_hidden_layers)" -v NH="$(echo "$shape" | json_number num_attention_heads)" \
        -v HD="$(echo "$shape" | json_number head_dim)" -v T="$2" -v causal="$3" 'BEGIN { printf "%.0f", causal + 6 * L * NH * HD * T * (T - 1) }'
}
passes() {
    first=1
    for model in $MODELS; do
        for T in $LENGTHS; do
            for method in stream checkpoint; do
                options="--init $model --method $method --seq-len $T --memory-limit $room"
                plan=$("$BUILD/train" plan $options --for bp --json --quiet | json_number total_bytes)
                [ $first = 1 ] || printf ', '
                first=0
                printf '{"model": "%s", "seq_len": %s, "method": "%s", "plan_bytes_before": %s' "$model" "$T" "$method" "${plan:-null}"
                if [ -z "$plan" ]; then # it has said why
                    printf ', "failed": true}'
                    fail "the plan of $model T = $T $method"
                    continue
                fi
                if [ "$room" != none ] && ! awk "BEGIN { exit !($plan <= $room) }"; then
                    printf ', "fits": false}'
                    echo "$model T = $T $method: $plan bytes do not fit into $room" >&2
                    continue
                fi
                # The first pass warms up and does not count.
                repeat=$([ "$T" -gt 65536 ] && echo 3 || echo 5)
                if ! watched "$folder/samples" "$BUILD/train" bp $options --repeat "$repeat" --json --quiet >"$folder/result"; then
                    printf ', "fits": true, "failed": true}'
                    fail "$model T = $T $method"
                    continue
                fi
                result=$(cat "$folder/result")
                seconds=$(echo "$result" | json_number seconds)
                rate=$(per_second "$(echo "$result" | json_number model_flops)")
                executed=$(per_second "$(echo "$result" | json_number flops)")
                full=$(per_second "$(all_pairs_flops "$model" "$T" "$(echo "$result" | json_number model_flops)")")
                tokens=$(awk "BEGIN { printf \"%.1f\", $T / $seconds }")
                share=$(share_of "$rate" "$peak")
                printf ', "fits": true, "repeat": %s, "tokens_per_s": %s, "executed_tflop_per_s": %s, "model_tflop_per_s": %s, "share_of_peak": %s, "share_of_peak_of_all_pairs": %s, "share_of_product": %s, "gpu": %s, "bp": %s}' \
                    "$repeat" "$tokens" "$executed" "$rate" "$share" "$(share_of "$full" "$peak")" "$(share_of "$rate" "$product")" \
                    "$(gpu_samples "$folder/samples")" "$result"
                echo "$model T = $T $method: $seconds s, $tokens tokens/s, $executed TFLOP/s executed, MFU $share (of all T^2 pairs $(share_of "$full" "$peak"))" >&2
            done
        done
    done
}
passes >"$folder/bp"

# ---- the file ------------------------------------------------------------------------------------------------------------------------
libraries=$(scripts/cuda_libraries.sh report 2>&1 | # those of the build
    sed -n 's/^ *cuBLASLt *\([0-9.]*\):.*/cuBLASLt \1/p; s/^ *cuDNN *\([0-9.]*\), front end.*/cuDNN \1/p' | paste -sd , | sed 's/,/, /')
mkdir -p "$RESULTS"
file=$RESULTS/bench-$(slug "$device")-$(date -u +%Y-%m-%d).json
cat >"$folder/json" <<END
{"kind": "bench-gpu", "device": "$device", "date": "$(date -u +%Y-%m-%dT%H:%M:%SZ)", "commit": "$(commit_here)", "driver": "$(ask_gpu driver_version)",
 "libraries": "$libraries",
 "clocks_mhz_most": "$(ask_gpu clocks.max.sm,clocks.max.mem)", "gpu_during_ops": $ops_gpu,
 "power_limit_w": "$(ask_gpu power.limit)", "peak_tflop_per_s": ${peak:-null},
 "convention": "causal model FLOPs: 6 x parameters in products x T + 6 x L x T^2 x NH x HD; recomputation not counted; share_of_peak_of_all_pairs: with T^2 query-key pairs, as others print it; gpu: least, median and most while it was busy",
 "bench": $(cat "$folder/ops"),
 "passes": [$(cat "$folder/bp")]}
END
cp "$folder/json" "$file"
echo "$file" >&2
[ ! -e "$folder/failed" ]
