#!/bin/sh
# Runs CAT-LM (arXiv 2310.01602) at toy size: trains a small model from scratch on source code, each file with its tests in one document.
#
#     scripts/recipes/cat_lm.sh [FOLDER...]   this program's own sources by default; needs ./train and a Python with tokenizers, jinja2, numpy
#
# Everything goes into build/cat_lm/, which is replaced. Variables: STEPS (20) of training, SIZE (64) of the model, SEQ_LEN (2048) bytes: longer
# documents are trained on in parts; OUT, another folder. A real run takes a model and its tokenizer, and a SEQ_LEN that holds a file with its tests.
set -eu
cd "$(dirname "$0")/../.."
RECIPE=cat_lm
. scripts/recipes/common_recipe.sh
STEPS=${STEPS:-20} SIZE=${SIZE:-64} SEQ_LEN=${SEQ_LEN:-2048}
[ $# -gt 0 ] || set -- llmc test

say "A document of each file, with its tests"
prepare --with-tests --val-fraction 0.05 --out "$OUT/shards" "$@"

say "$STEPS steps on sequences of $SEQ_LEN bytes"
"$TRAIN" --init "$(small_model)" --data "$OUT/shards/train-*.bin" --val-data "$OUT/shards/val-*.bin" --val-every "$STEPS" --val-steps 8 \
    --seq-len "$SEQ_LEN" --shuffle on --steps "$STEPS" --lr 3e-3 --warmup 5 --out "$OUT/run" --quiet
printf 'int add(int a, int b) {\n    return a + b;\n}\n<|codetestpair|>\n' >"$OUT/prompt"
"$TRAIN" sample --model "$OUT/run" --prompt-file "$OUT/prompt" --max-new-tokens 64 --quiet
