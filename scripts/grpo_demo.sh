#!/bin/sh
# Shows online GRPO on a task that can be checked: a small Llama-style model of bytes learns to sort digits. First it learns from data the
# form of an answer ("4192>", then these digits in any order and a line's end). Then it learns to sort from rewards alone: it writes
# answers, and scripts/grpo_demo.py rewards each with its share of correct places; advantages are normalised by group. A second
# reward, of weight 0, logs whether all places are right.
#
#     scripts/grpo_demo.sh            a minute on two cores; needs a Python with numpy (PYTHON=...), and ./train
#
# Everything goes into build/grpo-demo/, which is replaced: two shards, format/ and run/ (checkpoints and log.jsonl), solved.png. Exit
# status 1 unless the mean reward of the last 20 steps is 0.9 or more.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
demo_begin
OUT=build/grpo-demo

T=16 # positions of "4192>1249" and a line's end: 9
FORMAT_STEPS=150
STEPS=${STEPS:-200}
ENOUGH=0.9 # of the reward

# Prints the mean of KEY over lines FIRST to LAST of the lines that have KEY.
mean_of() { # LOG KEY FIRST LAST
    json_number "$2" <"$1" | awk -v first="$3" -v last="$4" 'NR >= first && NR <= last { sum += $1; n++ } END { printf "%.3f", n ? sum / n : 0 }'
}

rm -rf "$OUT"
mkdir -p "$OUT"
"$PYTHON" scripts/grpo_demo.py data "$OUT"

say "The form of an answer, from data"
"$TRAIN" --init $BYTES_MODEL --data "$OUT/format-00000.bin" --seq-len $T --batch 64 --steps $FORMAT_STEPS --lr 3e-3 --out "$OUT/format" --quiet
printf '4192>'
"$TRAIN" sample --model "$OUT/format" --prompt '4192>' --max-new-tokens 4 --json 2>/dev/null | sed -n 's/.*"text": "\([^"]*\)".*/\1/p'

say "What is right, from rewards: $STEPS steps of 16 prompts, 16 answers to each"
"$TRAIN" --model "$OUT/format" --data "$OUT/task-00000.bin" --seq-len $T --objective grpo --rollout \
    --reward-command "'$PYTHON' scripts/grpo_demo.py reward" "'$PYTHON' scripts/grpo_demo.py solved" --reward-names places,solved \
    --reward-weights 1,0 --batch 16 --group-size 16 --max-new-tokens 5 --stop-ids 10 \
    --steps "$STEPS" --lr 1e-3 --warmup 10 --out "$OUT/run"
for digits in 4192 7305 8861; do
    printf '%s>' $digits
    "$TRAIN" sample --model "$OUT/run" --prompt "$digits>" --max-new-tokens 4 --temperature 0 --json 2>/dev/null |
        sed -n 's/.*"text": "\([^"]*\)".*/\1/p'
done

python=$(python_with_matplotlib)
[ -z "$python" ] || "$python" scripts/plot.py log --out "$OUT/solved.png" --mean 20 --only "rewards/solved/mean=answers solved, share" \
    --title "From rewards alone: {first} of answers solved at first, {last} at the end" \
    --caption "Of 256 sampled answers a step, those that sort four digits without a mistake. Thick: means of 20 steps." "$OUT/run"

say "Result: the mean reward, and the share of answers that are solved"
log=$OUT/run/log.jsonl
before=$(mean_of "$log" reward 1 5) after=$(mean_of "$log" reward $((STEPS - 19)) "$STEPS")
printf '%-24s %s  %s\n' "of the first 5 steps" "$before" "$(mean_of "$log" rewards.solved.mean 1 5)" \
    "of the last 20 steps" "$after" "$(mean_of "$log" rewards.solved.mean $((STEPS - 19)) "$STEPS")"
echo
echo "in $OUT: run/log.jsonl, the checkpoint in run/$([ -z "$python" ] || echo ", solved.png")"
[ -n "$python" ] || pictures_skipped "run this again"
awk -v a="$after" -v enough=$ENOUGH 'BEGIN { exit !(a >= enough) }' || {
    echo "grpo_demo.sh: the mean reward did not reach $ENOUGH" >&2
    exit 1
}
