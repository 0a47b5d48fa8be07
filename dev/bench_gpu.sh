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
gpu=${CUDA_VISIBLE_DEVICES:-0}
gpu=${gpu%%,*}
ask() { nvidia-smi -i "$gpu" --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1; }

device=$(ask name || true)
case $device in
'' | *rror* | *ailed* | No\ devices*)
    echo "bench-gpu: no GPU was found (nvidia-smi names none); make bench measures the CPU" >&2
    exit 1
    ;;
esac
${MAKE:-make} --no-print-directory BACKEND=cuda PRECISION="$PRECISION" "$BUILD/train" "$BUILD/bench" >&2

# A device that is not in the list gets no share of its peak, only that of the product that was measured.
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
clocks_before=$(ask clocks.sm,clocks.mem)
"$BUILD/bench" "$REPEATS" >"$folder/ops" || { fail "$BUILD/bench $REPEATS"; echo null >"$folder/ops"; }
clocks_after=$(ask clocks.sm,clocks.mem)
product=$(json_number product_tflop_per_s <"$folder/ops")

# ---- bp ------------------------------------------------------------------------------------------------------------------------------
# Memory that may be planned: measured use is to stay within 2 % + 300 MiB of the plan, and the context takes about 500 MiB.
room=$(ask memory.free | awk '{ printf "%.0f", ($1 - 800) / 1.02 * 1048576 }')
share_of() { # rate, of which rate: a number, or null where that is not known
    if [ -n "$2" ]; then awk "BEGIN { printf \"%.4f\", $1 / $2 }"; else printf null; fi
}
passes() {
    first=1
    for model in $MODELS; do
        for T in $LENGTHS; do
            for method in stream checkpoint; do
                options="--init $model --method $method --seq-len $T"
                plan=$("$BUILD/train" plan $options --for bp --json --quiet | json_number total_bytes)
                [ $first = 1 ] || printf ', '
                first=0
                printf '{"model": "%s", "seq_len": %s, "method": "%s", "plan_bytes_before": %s' "$model" "$T" "$method" "${plan:-null}"
                if [ -z "$plan" ]; then # it has said why
                    printf ', "failed": true}'
                    fail "the plan of $model T = $T $method"
                    continue
                fi
                if ! awk "BEGIN { exit !($plan <= $room) }"; then
                    printf ', "fits": false}'
                    echo "$model T = $T $method: $plan bytes do not fit into $room" >&2
                    continue
                fi
                # The first pass also loads kernels and chooses products: it matters where a pass is short.
                repeat=$([ "$T" -gt 65536 ] && echo 1 || echo 3)
                if ! result=$("$BUILD/train" bp $options --repeat "$repeat" --json --quiet); then
                    printf ', "fits": true, "failed": true}'
                    fail "$model T = $T $method"
                    continue
                fi
                rate=$(echo "$result" | json_number model_flops | awk -v s="$(echo "$result" | json_number seconds)" '{ printf "%.2f", $1 / s / 1e12 }')
                share=$(share_of "$rate" "$peak")
                printf ', "fits": true, "repeat": %s, "model_tflop_per_s": %s, "share_of_peak": %s, "share_of_product": %s, "bp": %s}' \
                    "$repeat" "$rate" "$share" "$(share_of "$rate" "$product")" "$result"
                echo "$model T = $T $method: $(echo "$result" | json_number seconds) s, $rate TFLOP/s, $share of the peak" >&2
            done
        done
    done
}
passes >"$folder/bp"

# ---- the file ------------------------------------------------------------------------------------------------------------------------
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit=$commit-modified
libraries=$(scripts/cuda_libraries.sh report 2>&1 | # those of the build
    sed -n 's/^ *cuBLASLt *\([0-9.]*\):.*/cuBLASLt \1/p; s/^ *cuDNN *\([0-9.]*\), front end.*/cuDNN \1/p' | paste -sd , | sed 's/,/, /')
slug=$(echo "$device" | tr 'A-Z' 'a-z' | sed 's/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//')
mkdir -p "$RESULTS"
file=$RESULTS/bench-$slug-$(date -u +%Y-%m-%d).json
cat >"$folder/json" <<END
{"kind": "bench-gpu", "device": "$device", "date": "$(date -u +%Y-%m-%dT%H:%M:%SZ)", "commit": "$commit", "driver": "$(ask driver_version)",
 "libraries": "$libraries",
 "clocks_mhz": {"sm_mem_before": "$clocks_before", "sm_mem_after": "$clocks_after", "sm_mem_most": "$(ask clocks.max.sm,clocks.max.mem)"},
 "power_limit_w": "$(ask power.limit)", "peak_tflop_per_s": ${peak:-null},
 "convention": "causal model FLOPs: 6 x parameters in products x T + 6 x L x T^2 x NH x HD; recomputation not counted",
 "bench": $(cat "$folder/ops"),
 "passes": [$(cat "$folder/bp")]}
END
cp "$folder/json" "$file"
echo "$file" >&2
[ ! -e "$folder/failed" ]
