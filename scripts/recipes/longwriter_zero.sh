#!/bin/sh
# Runs LongWriter-Zero (arXiv 2506.18841) at toy size: GRPO with four reward commands. A small model first learns from data the form of an answer,
# <think>...</think><answer>1 2 3 ...</answer> with any number of words. From rewards it learns to write as many words as the prompt asks.
#
#     scripts/recipes/longwriter_zero.sh      a minute on two cores; needs ./train and a Python with tokenizers, jinja2, numpy (PYTHON=...)
#
# Everything goes into build/longwriter_zero/, which is replaced. Variables: FORM_STEPS (200) on data, STEPS (100) of GRPO, SIZE (64) of the
# model, JUDGE, your own reward command (by default it checks that the numbers follow each other), OUT, another folder.
set -eu
cd "$(dirname "$0")/../.."
RECIPE=longwriter_zero
. scripts/recipes/common_recipe.sh
FORM_STEPS=${FORM_STEPS:-200} STEPS=${STEPS:-100} SIZE=${SIZE:-64}
reward() { echo "'$PYTHON' scripts/recipes/longwriter_zero.py $1"; }
JUDGE=${JUDGE:-$(reward counts)}

"$PYTHON" scripts/recipes/longwriter_zero.py data "$OUT"
prepare --out "$OUT/form" "$OUT/form.jsonl"
prepare --format prompts --out "$OUT/task" "$OUT/task.jsonl"

say "The form of an answer, from data: $FORM_STEPS steps"
"$TRAIN" --init "$(small_model)" --data "$OUT/form/train-*.bin" --samples 64 --steps "$FORM_STEPS" --lr 3e-3 --warmup 20 --out "$OUT/form/run" --quiet

say "The length, from rewards: $STEPS steps of 16 prompts, 16 texts to each"
"$TRAIN" --model "$OUT/form/run" --data "$OUT/task/train-*.bin" --objective grpo --rollout --batch 16 --group-size 16 \
    --reward-command "$(reward length)" "$(reward format)" "$(reward repetition)" "$JUDGE" --reward-names length,format,repetition,judge \
    --reward-weights 1,0.5,0.5,0.5 --max-new-tokens 64 --steps "$STEPS" --lr 1e-3 --warmup 10 --out "$OUT/run" --quiet

say "Mean rewards of the first and of the last 5 steps"
for key in length format repetition judge; do
    json_key=rewards/$key/mean
    sed -n "s|.*\"$json_key\": \([-+.0-9e]*\).*|\1|p" "$OUT/run/log.jsonl" >"$OUT/$key"
    printf '%-11s %s  %s\n' $key "$(head -n 5 "$OUT/$key" | awk '{ s += $1 } END { printf "%.3f", s / NR }')" \
        "$(tail -n 5 "$OUT/$key" | awk '{ s += $1 } END { printf "%.3f", s / NR }')"
done
"$TRAIN" sample --model "$OUT/run" --prompt '7 words:' --temperature 0 --max-new-tokens 64 --quiet
