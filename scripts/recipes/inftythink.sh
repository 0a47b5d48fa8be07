#!/bin/sh
# Runs InftyThink (arXiv 2503.06692) at toy size: a small model learns to reason in rounds of 64 tokens, each with a summary, from conversations
# whose reasoning is up to 240 tokens in one block. Then it answers questions that it has not seen by rounds of `sample --prompts`.
#
#     scripts/recipes/inftythink.sh           some minutes on two cores; needs ./train and a Python with tokenizers, jinja2, numpy (PYTHON=...)
#
# Everything goes into build/inftythink/, which is replaced. Variables: SAMPLES (3000) of data, STEPS (450) of training, QUESTIONS (20) to
# answer, SIZE (128) of the model, SEGMENT (64) tokens, OUT, another folder.
set -eu
cd "$(dirname "$0")/../.."
RECIPE=inftythink
. scripts/recipes/common_recipe.sh
SAMPLES=${SAMPLES:-3000} STEPS=${STEPS:-450} QUESTIONS=${QUESTIONS:-20} SIZE=${SIZE:-128} SEGMENT=${SEGMENT:-64}
task() { "$PYTHON" scripts/recipes/inftythink.py "$@"; }

task data "$OUT/train.jsonl" "$SAMPLES" train
task data "$OUT/test.jsonl" "$QUESTIONS" test

say "Rounds of $SEGMENT tokens, with summaries by a command"
prepare --iterative --segment-tokens "$SEGMENT" --summary-command "'$PYTHON' scripts/recipes/inftythink.py steps" \
    --out "$OUT/shards" "$OUT/train.jsonl"

say "$STEPS steps"
"$TRAIN" --init "$(small_model)" --data "$OUT/shards/train-*.bin" --samples 16 --steps "$STEPS" --lr 2e-3 --warmup 20 --out "$OUT/run" --quiet

say "Questions, answered in rounds"
"$PYTHON" -c 'import json, sys
for line in open(sys.argv[1]): print(json.loads(line)["messages"][0]["content"])' "$OUT/test.jsonl" |
    task rounds - "$TRAIN" sample --model "$OUT/run" --chat --temperature 0 --max-new-tokens $((3 * SEGMENT)) >"$OUT/answers.jsonl"
task right "$OUT/test.jsonl" <"$OUT/answers.jsonl"
