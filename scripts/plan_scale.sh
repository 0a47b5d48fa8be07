#!/bin/sh
# Plans one to 4096 GPUs: the longest sequence and the time of a step, by `plan --ranks`, next to measurements of
# others: Tables 4 and 5 of the StreamBP paper (arXiv 2506.03077) and the runs of scripts/paper/long_runs.csv.
#
#     scripts/plan_scale.sh        TRAIN=./train OUT=build/paper MOST=4096 (GPUs)
#
# Nothing is run: lengths are plans, times are estimates (llmc/estimate/machine.h). The constants of estimates are printed at the end,
# with the source of each. Writes $OUT/scale.csv and $OUT/scale.png, prints the tables. README shows
# scripts/paper/scale.png, a copy of $OUT/scale.png.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
OUT=${OUT:-build/paper}
MOST=${MOST:-4096}
[ -x "$TRAIN" ] || { echo "plan_scale.sh: there is no $TRAIN yet; run make first" >&2; exit 1; }
mkdir -p "$OUT"

GIB=$(awk -v bytes="$(usable_bytes h100)" 'BEGIN { printf "%.1f", bytes / 2^30 }') # memory that a GPU leaves to a program
GPU_CHUNKS="--chunk 4096 --logits-chunk 2048" # the chunks of op set "cuda", for any build
PAPER_ADAM="--grad-dtype bf16 --moments bf16 --master none"

long_runs() { grep -E '^(ALST|TRL),(qwen3|llama3.1)-8b,[0-9]*,h100,' scripts/paper/long_runs.csv; } # runs of these two models

# plan MODEL RANKS SP ZERO T [more options]: prints JSON
plan() {
    plan_model=$1 plan_ranks=$2 plan_sp=$3 plan_zero=$4 plan_T=$5
    shift 5
    [ "$plan_ranks" -gt 1 ] || plan_zero=0 # one process shards nothing
    "$TRAIN" plan --init "$plan_model,$ANY_LENGTH" --ranks "$plan_ranks" --sp "$plan_sp" --zero "$plan_zero" --seq-len "$plan_T" \
        --dtype bf16 --threads 1 --json --quiet $ON_DEVICE "$@"
}
longest() { # the arguments of plan without T
    longest_model=$1 longest_ranks=$2 longest_sp=$3 longest_zero=$4
    shift 4
    plan "$longest_model" "$longest_ranks" "$longest_sp" "$longest_zero" 1024 "$@" | json_number max_seq_len
}
# Prints the four columns after a length, from the JSON on standard input.
estimated() { sed 's/.*"estimated_seconds": \([^,]*\), .*"estimated_mfu": \([^,]*\), "communication_share": \([^,}]*\).*/\1,\2,\3/'; }

csv=$OUT/scale.csv
echo "panel,series,source,gpus,tokens,seconds,mfu,communication_share" >"$csv"
ranks=$(awk -v most="$MOST" 'BEGIN { for (n = 1; n <= most; n *= 2) print n }')

# ---- the longest sequence: all GPUs share it, or eight share it and the others take other sequences ----------------------
for model in qwen3-8b llama3.1-8b; do
    for series in "sp = GPUs, gathered" "sp = GPUs, ring" "sp 8"; do
        for P in $ranks; do
            sp=$P
            set -- --grad-dtype bf16 --machine h100 $GPU_CHUNKS --memory-limit h100
            case $series in
            *gathered) [ "$sp" = 1 ] || set -- "$@" --kv gather ;;
            *ring) [ "$sp" = 1 ] || set -- "$@" --kv ring ;;
            *8) [ "$P" -ge 8 ] || continue && sp=8 ;;
            esac
            set -- --grad-accum $((P / sp)) "$@"
            T=$(longest $model "$P" "$sp" 3 "$@")
            T=$((T / (2 * sp) * (2 * sp))) # ranks share it evenly
            [ "$T" -gt 0 ] || continue
            echo "length;$(title $model) $series;plan;$P;$T;$(plan $model "$P" "$sp" 3 "$T" "$@" | estimated)"
        done
    done
done | sed 's/, gathered/ gathered/; s/, ring/ ring/; s/;/,/g' >>"$csv"
# ---- a step of a million tokens, rounded up so that ranks share it evenly ---------------------------------------------------
for model in qwen3-8b llama3.1-8b; do
    for P in $ranks; do
        T=$(((1000000 + 2 * P - 1) / (2 * P) * (2 * P)))
        json=$(plan $model "$P" "$P" 3 "$T" --machine h100 $GPU_CHUNKS --memory-limit h100) || continue # no length fits
        [ "$(echo "$json" | json_number total_bytes)" -le "$(echo "$json" | json_number usable_bytes)" ] || continue
        echo "million,$(title $model) sp = GPUs,plan,$P,$T,$(echo "$json" | estimated)"
    done
done >>"$csv"
# ---- what others report -----------------------------------------------------------------------------------------------------
long_runs | awk -F, -v qwen="$(title qwen3-8b)" -v llama="$(title llama3.1-8b)" '{
    series = ($2 == "qwen3-8b" ? qwen : llama)
    printf "length,%s,%s,%s,%s,%s,%s,\n", series, $1, $3, $5, $6, $7
    if ($5 == 1000000) printf "million,%s,%s,%s,%s,%s,%s,\n", series, $1, $3, $5, $6, $7 }' >>"$csv"
# ---- the paper's Tables 4 and 5: ZeRO-2, a sequence for each GPU ------------------------------------------------------------
zero2() { # RANKS T [more options]: A800, pure bf16
    zero2_ranks=$1 zero2_T=$2
    shift 2
    plan qwen3-8b "$zero2_ranks" 1 2 "$zero2_T" --grad-accum "$zero2_ranks" --machine a100 $PAPER_ADAM "$@"
}
table4=$(awk -F, '$1 == "table4_zero2_max_len" { split($3, run, " "); print run[2], $6, $8 }' $PAPER_TABLES |
    while read -r P checkpoint stream; do
        adam=$(zero2 "$P" 1024 $PAPER_CHUNKS --memory-limit a100 | json_number max_seq_len)
        bp=$(longest qwen3-8b "$P" 1 2 --grad-accum "$P" --grad-dtype bf16 --for bp $PAPER_CHUNKS --memory-limit a100)
        echo "$P $checkpoint $stream $adam $bp"
    done)
echo "$table4" | awk '{ printf "table4,Adam in bf16,plan,%d,%d,,,\ntable4,no optimizer,plan,%d,%d,,,\n", $1, $4, $1, $5
                        printf "table4,checkpoint,paper,%d,%d,,,\ntable4,stream,paper,%d,%d,,,\n", $1, $2 * 1000, $1, $3 * 1000 }' >>"$csv"
table5=$(awk -F, '$1 == "table5_zero2_seconds" { sub("k", "000", $4); print $4, $6, $8 }' $PAPER_TABLES |
    while read -r T checkpoint stream; do
        ours=$(zero2 8 "$T" --chunk $((T / 3)) --logits-chunk 100 | estimated)
        echo "$T $checkpoint $stream $ours"
    done)
echo "$table5" | awk '{ printf "table5,stream,plan,8,%d,%s\n", $1, $4
                        printf "table5,checkpoint,paper,8,%d,%s,,\ntable5,stream,paper,8,%d,%s,,\n", $1, $2, $1, $3 }' >>"$csv"

# ---- tables -----------------------------------------------------------------------------------------------------------------
lengths() { # series: a line for each number of GPUs
    awk -F, -v s="$1" '$1 == "length" && $2 == s && $3 == "plan" {
        printf "%6d %14s %14.0f %9.1f %14.1f\n", $4, sprintf("%.3f M", $5 / 1e6), $6, 100 * $7, 100 * $8 }' "$csv"
}
cat <<END
Everything of ours below is a plan, and every time an estimate; nothing was run. One to $MOST H100 in nodes of eight,
bf16, AdamW with fp32 moments and master weights, ZeRO-3, everything on the devices, within $GIB GiB of each.

Longest sequence, and the step that trains on it. 'alone': the share of a step in which ranks communicate and compute nothing.
On fewer GPUs than the first line has, weights, gradients and optimizer leave no room for a token.
END
for model in qwen3-8b llama3.1-8b; do
    for series in "sp = GPUs gathered" "sp = GPUs ring" "sp 8"; do
        echo
        case $series in
        *gathered) echo "$(title $model), all GPUs share one sequence, and each gathers a layer's keys and values (--kv gather)" ;;
        *ring) echo "$(title $model), all GPUs share one sequence, keys and values pass around (--kv ring)" ;;
        *8) echo "$(title $model), a sequence for every eight GPUs (--sp 8), the longer of the two ways" ;;
        esac
        printf '%6s %14s %14s %9s %14s\n' GPUs tokens "estimated s" "MFU, %" "alone, %"
        lengths "$(title $model) $series"
    done
done
echo
echo "A sequence of a million tokens on all GPUs"
printf '%-14s %6s %14s %9s %14s\n' model GPUs "estimated s" "MFU, %" "alone, %"
awk -F, '$1 == "million" && $3 == "plan" { sub(/ sp.*/, "", $2)
    printf "%-14s %6d %14.4g %9.1f %14.1f\n", $2, $4, $6, 100 * $7, 100 * $8 }
    $1 == "million" && $3 != "plan" {
    others = others sprintf("Measured by its authors: %s, %s on %d GPUs, %s s, MFU %.0f %%.\n", $3, $2, $4, $6, 100 * $7) }
    END { printf "%s", others }' "$csv"
echo
echo "Longest sequences of others, measured, and of ours, planned, on as many H100; the others keep activations and more in host memory"
printf '%-8s %-14s %6s %12s %12s\n' system model GPUs "measured" "ours, plan"
long_runs | while IFS=, read -r system model gpus _ tokens _; do
    awk -F, -v s="$(title "$model") sp = GPUs" -v P="$gpus" -v theirs="$tokens" -v who="$system" -v title="$(title "$model")" '
        $1 == "length" && index($2, s) == 1 && $3 == "plan" && $4 == P && $5 > most { most = $5; ours = sprintf("%.2f M", $5 / 1e6) }
        END { printf "%-8s %-14s %6d %12s %12s\n", who, title, P, sprintf("%.2f M", theirs / 1e6), ours == "" ? "does not fit" : ours }' "$csv"
done
cat <<END

The paper's Table 4: longest sequence of Qwen3-8B in k = 1000 tokens, ZeRO-2, a sequence for each GPU of 80 GB
(ours within $GIB GiB, its chunks; the paper does not say whether Adam's moments are there)
                 paper (measured)               ours (planned)
  GPUs   checkpoint       stream   Adam in bf16   no optimizer
END
echo "$table4" | awk '{ printf "%6d %12s %12s %14.1f %14.1f\n", $1, $2, $3, $4 / 1000, $5 / 1000 }'
cat <<END

The paper's Table 5: seconds of a step of Qwen3-8B, ZeRO-2, a sequence for each of 8 GPUs. Its A800 are A100 whose NVLink is slower
(400 GB/s, not 600); ours are estimates for A100, chunks of a third of the sequence as the paper's
                 paper (measured)   ours (estimated)
tokens   checkpoint       stream             stream
END
echo "$table5" | awk '{ split($4, ours, ","); printf "%6d %12s %12s %18.2f\n", $1, $2, $3, ours[1] }'
echo
echo "Constants of the estimates (llmc/estimate/machine.h), with the source of each"
for machine in h100 a100; do
    "$TRAIN" plan --init "qwen3-0.6b,$ANY_LENGTH" --verbose --machine $machine |
        awk -v name="$machine" '/^machine / { on = 1; sub("machine ", name "    ") } /^(work|fits) / { on = 0 } on'
done

# ---- the picture ------------------------------------------------------------------------------------------------------------
echo
python=$(python_with_matplotlib)
if [ -n "$python" ]; then
    "$python" scripts/plot.py scale --in "$csv" --out "$OUT/scale.png" \
        --caption "Planned, nothing was run: Qwen3-8B, bf16, AdamW with fp32 state, ZeRO-3, everything on H100 in nodes of eight."
    echo "points: $csv   picture: $OUT/scale.png"
else
    echo "points: $csv"
    pictures_skipped "run scripts/plan_scale.sh again"
fi
