#!/bin/sh
# Compares the memory of one backpropagation by sequence length, by `plan`, with the StreamBP paper's measurements
# (arXiv 2506.03077): its Figure 3 (Qwen3-8B, 14B, and 32B with LoRA), its longest sequences, and its Table 9 (Llama 3.1 8B,
# Gemma 3 1B). The picture shows what trains: Qwen3-8B with AdamW, all weights and LoRA, by StreamBP and by gradient checkpointing.
#
#     scripts/paper_memory.sh        TRAIN=./train OUT=build/paper CARD=a100
#
# Nothing is trained or allocated. Writes $OUT/memory.csv and $OUT/memory.png, prints the tables. The paper's values come from
# scripts/paper/*.csv and are always called the paper's. README shows scripts/paper/memory.png, a copy of $OUT/memory.png.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
OUT=${OUT:-build/paper}
[ -x "$TRAIN" ] || { echo "paper_memory.sh: there is no $TRAIN yet; run make first" >&2; exit 1; }
mkdir -p "$OUT"

CARD=${CARD:-a100} # the paper's card; ./train knows how much of its memory a program can use
LIMIT=$(usable_bytes "$CARD")
GIB=$(awk -v bytes="$LIMIT" 'BEGIN { printf "%.1f", bytes / 2^30 }')
FIG3=scripts/paper/fig3_bp_memory.csv

FIG3_MODELS="qwen3-8b qwen3-14b qwen3-32b-lora" # -lora: adapters of rank 32 on all linear layers have gradients, nothing else

# plan MODEL METHOD T [more options]: prints JSON
plan() {
    plan_model=$1 plan_method=$2 plan_T=$3
    shift 3
    case $plan_model in *-lora) set -- --lora-rank 32 --lora-alpha 128 "$@" ;; esac
    "$TRAIN" plan --init "${plan_model%-lora},$ANY_LENGTH" --method "$plan_method" --seq-len "$plan_T" --for bp --dtype bf16 --keep none --json --quiet $ON_DEVICE "$@"
}
chunks_of() { [ "$1" != stream ] || echo "$PAPER_CHUNKS"; } # other methods have no chunks
total() { plan "$1" "$2" "$3" $(chunks_of "$2") | json_number total_bytes; }
longest() { # MODEL METHOD [chunk options]
    longest_model=$1 longest_method=$2
    shift 2
    plan "$longest_model" "$longest_method" 1024 --memory-limit "$CARD" "$@" | json_number max_seq_len
}

# ---- the picture's points: training Qwen3-8B ------------------------------------------------------------------------------
csv=$OUT/memory.csv
HERO=qwen3-8b
echo "series,method,source,seq_len,bytes" >"$csv"
# NAME METHOD [options of ./train plan]: writes a line. If nothing fits, a plan has the smallest workspace, as for the longest sequences.
series() {
    series_name=$1 series_method=$2
    shift 2
    for T in 512 1024 $(awk 'BEGIN { for (T = 4096; T <= 229376; T += 4096) print T }'); do
        echo "$series_name,$series_method,plan,$T,$("$TRAIN" plan --init $HERO,$ANY_LENGTH --method "$series_method" --seq-len "$T" \
            --machine a100,host=0 --memory-limit 1MiB --keep none --json --quiet $ON_DEVICE "$@" | json_number total_bytes)"
    done >>"$csv"
}
for method in checkpoint stream; do
    name=$([ $method = stream ] && echo StreamBP || echo checkpoint)
    chunks=$([ $method = checkpoint ] || echo --chunk 512 --logits-chunk 256)
    series "$name|all weights" $method $chunks --moments bf16 --master none
    series "$name|LoRA" $method $chunks --lora-rank 32
done
table9() { awk -F, -v m="$1" '$1 == "table9_bp_gb" && $2 == m { sub("k", "000", $4); print $4, ($5 == "" ? "-" : $5), $6, $8 }' $PAPER_TABLES; }

# ---- tables ----------------------------------------------------------------------------------------------------------------
echo "One forward and backward pass, bf16 weights and gradients (32B: gradients of LoRA adapters), no optimizer. 'ours' is the plan"
echo "of ./train, 'paper' is what the StreamBP paper (arXiv 2506.03077) reports of its own implementation on an A800 of 80 GB."
echo "k = 1000 tokens."
echo "stream: chunks of 500 tokens, logits of 100, as in the paper; 'defaults' are those of ./train."
echo
echo "Figure 3: peak memory in GiB (2^30 bytes), at the paper's shortest and longest sequence"
printf '%-14s %-11s %8s %8s %8s %12s\n' model method T ours paper ours/paper
for model in $FIG3_MODELS; do
    for method in full checkpoint stream; do
        awk -F, -v m=$model -v k=$method '$1 == m && $2 == k { if (!n++) first = $3 " " $4; last = $3 " " $4 }
                                          END { print first; print last }' $FIG3 |
            while read -r T paper; do
                echo "$(title $model) $method $T $(total $model $method "$T") $paper"
            done
    done
done | awk '{ printf "%-14s %-11s %8d %8.1f %8.1f %12.2f\n", $1, $2, $3, $4 / 2^30, $5, $4 / 2^30 / $5 }'

echo "(At short lengths ours is above the paper's: the head's gradient is summed in fp32, 2.3 GiB for Qwen3-8B; with LoRA it has none.)"
echo
echo "Figure 3: growth in GiB per 1,000 tokens, between the same two lengths"
printf '%-14s %-11s %8s %8s %8s %12s\n' model method "" ours paper ours/paper
for model in $FIG3_MODELS; do
    for method in full checkpoint stream; do
        awk -F, -v m=$model -v k=$method '$1 == m && $2 == k { if (!n++) { T0 = $3; y0 = $4 } T1 = $3; y1 = $4 }
                                          END { print T0, T1, y1 - y0 }' $FIG3 |
            while read -r T0 T1 paper; do
                echo "$(title $model) $method $T0 $T1 $paper $(total $model $method "$T0") $(total $model $method "$T1")"
            done
    done
done | awk '{ k = ($4 - $3) / 1000; ours = ($7 - $6) / 2^30 / k
              printf "%-14s %-11s %8s %8.3f %8.3f %12.2f\n", $1, $2, "", ours, $5 / k, ours / ($5 / k) }'

echo
echo "Longest sequence within $GIB GiB ($CARD), in k tokens"
printf '%-14s %-11s %8s %8s %8s %12s\n' model method defaults ours paper ours/paper
for model in $FIG3_MODELS; do
    for method in full checkpoint stream; do
        column=$(case $method in full) echo 5 ;; checkpoint) echo 6 ;; stream) echo 8 ;; esac)
        paper=$(awk -F, -v m="${model%-lora}" -v c="$column" '$1 == "fig3_max_len" && $2 == m { print $c }' $PAPER_TABLES)
        echo "$(title $model) $method $(longest $model $method) $(longest $model $method $(chunks_of $method)) $paper"
    done
done | awk '{ printf "%-14s %-11s %8.1f %8.1f %8s %12.2f\n", $1, $2, $3 / 1000, $4 / 1000, $5, $4 / 1000 / $5 }'

echo
echo "Table 9: peak memory"
printf '%-14s %-11s %8s %10s %10s %8s %12s\n' model method T "ours, GB" "ours, GiB" paper ours/paper
for model in llama3.1-8b gemma3-1b; do
    table9 $model | while read -r T full checkpoint stream; do
        echo "$(title $model),full,$T,$(total $model full "$T"),$full"
        echo "$(title $model),checkpoint,$T,$(total $model checkpoint "$T"),$checkpoint"
        echo "$(title $model),stream,$T,$(total $model stream "$T"),$stream"
    done
done | awk -F, '{ ratio = $5 == "-" ? "-" : sprintf("%.2f", $4 / 2^30 / $5)
                  printf "%-14s %-11s %8d %10.1f %10.1f %8s %12s\n", $1, $2, $3, $4 / 1e9, $4 / 2^30, $5, ratio }'
weights=$(plan llama3.1-8b stream 1024 | json_number weights)
awk -v w="$weights" 'BEGIN {
    printf "The paper heads Table 9 with GB. Its weights and gradients alone take 2 x %.2f = %.1f GB (10^9 bytes), more than the\n", w / 1e9, 2 * w / 1e9
    printf "31.8 it gives for 3k tokens, and %.1f GiB: we read its GB as 2^30 bytes, here.\n", 2 * w / 2^30 }'

# ---- the picture -----------------------------------------------------------------------------------------------------------
echo
python=$(python_with_matplotlib)
if [ -n "$python" ]; then
    "$python" scripts/plot.py memory --in "$csv" --out "$OUT/memory.png" --limit "80 GB card=$LIMIT" \
        --limit "24 GB card=$(usable_bytes rtx4090)" \
        --title "Qwen3-8B, {what}, {limit}: StreamBP trains {times} times the length of checkpointing" \
        --caption "Planned by ./train, everything on the card: bf16, AdamW (all weights: moments in bf16; LoRA: rank 32)."
    echo "points: $csv   picture: $OUT/memory.png"
else
    echo "points: $csv"
    pictures_skipped "run scripts/paper_memory.sh again"
fi
