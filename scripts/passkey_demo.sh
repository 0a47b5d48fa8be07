#!/bin/sh
# Long texts (sample --context-memory blocks): a small Llama-style model of bytes learns from texts of at most 1,024 bytes to repeat a key
# that stands somewhere in words without sense ("the key is <48213>"). Then it is asked for keys in much longer texts, with the memory and
# without, at several depths. scripts/passkey_demo.py makes the texts.
#
#     scripts/passkey_demo.sh         some minutes on two cores; needs a Python with numpy (PYTHON=...), and ./train
#     LENGTHS='64000 512000' scripts/passkey_demo.sh
#
# Everything goes into build/passkey-demo/, which is replaced: shards, short/ and model/ (the runs), recall.csv, recall.png. A model/ of
# before stays with MODEL=keep. Exit status 1 unless the memory finds 0.9 of the keys at every length.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/passkey-demo}
LENGTHS=${LENGTHS:-1000 4000 16000 64000} # bytes of a text
DEPTHS=${DEPTHS:-0 0.25 0.5 0.75 1}       # of the key
TEXTS=${TEXTS:-4}                         # for each length and depth
STEPS=${STEPS:-3000}                      # of texts of 128 bytes; then a fifth as many of 1,024
ENOUGH=${ENOUGH:-0.9}                     # of the keys
[ -x "$TRAIN" ] || { echo "passkey_demo.sh: there is no $TRAIN; make builds it" >&2; exit 1; }
"$PYTHON" -c 'import numpy' 2>/dev/null || { echo "passkey_demo.sh: $PYTHON has no numpy: pip install numpy, or name another with PYTHON=..." >&2; exit 1; }

SHAPE=llama,hidden_size=64,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=4,head_dim=32
SHAPE=$SHAPE,intermediate_size=128,vocab_size=256,max_position_embeddings=1024

say() { printf '\n== %s\n' "$1"; }

if [ "${MODEL:-}" != keep ] || [ ! -d "$OUT/model" ]; then
    rm -rf "$OUT"
    mkdir -p "$OUT/texts-128" "$OUT/texts-1024"
    say "A model that repeats a key, from texts of 128 and of 1,024 bytes"
    "$PYTHON" scripts/passkey_demo.py data "$OUT/texts-128" 128 $((STEPS * 7))
    "$PYTHON" scripts/passkey_demo.py data "$OUT/texts-1024" 1024 $((STEPS * 2))
    "$TRAIN" --init $SHAPE --data "$OUT/texts-128/key-00000.bin" --seq-len 128 --batch 32 --steps "$STEPS" --lr 3e-3 --beta2 0.98 \
        --log-every $((STEPS / 10 + 1)) --out "$OUT/short"
    "$TRAIN" --model "$OUT/short" --data "$OUT/texts-1024/key-00000.bin" --seq-len 1024 --batch 8 --steps $((STEPS / 5)) --lr 1e-3 \
        --log-every $((STEPS / 50 + 1)) --out "$OUT/model"
fi

# Prints 1 if an answer to $OUT/text is $key; the rest: options of sample.
found() {
    answer=$("$TRAIN" sample --model "$OUT/model" --prompt-file "$OUT/text" --max-new-tokens 5 --temperature 0 --json --quiet "$@" \
        2>/dev/null | sed -n 's/.*"text": "\([^"]*\)".*/\1/p')
    [ "$answer" = "$key" ] && echo 1 || echo 0
}

say "Keys found of $TEXTS, by depth: with the memory (without it)"
echo memory,length,depth,found,texts >"$OUT/recall.csv"
for length in $LENGTHS; do
    printf '%8s bytes ' "$length"
    for depth in $DEPTHS; do
        with=0 without=0
        for text in $(seq "$TEXTS"); do
            seed=$length$text
            "$PYTHON" scripts/passkey_demo.py text "$length" "$depth" "$seed" >"$OUT/text"
            key=$("$PYTHON" scripts/passkey_demo.py key "$seed")
            with=$((with + $(found --context-memory blocks))) without=$((without + $(found)))
        done
        printf '  %s: %s (%s)' "$depth" $with $without
        printf 'blocks,%s,%s,%s,%s\noff,%s,%s,%s,%s\n' "$length" "$depth" $with "$TEXTS" "$length" "$depth" $without "$TEXTS" >>"$OUT/recall.csv"
    done
    echo
done

python=$(python_with_matplotlib)
[ -z "$python" ] || "$python" scripts/plot.py recall --in "$OUT/recall.csv" --out "$OUT/recall.png"

say "Result: the share of keys found, by length, with the memory and without"
awk -F, -v enough="$ENOUGH" 'NR > 1 { if (!($2 in n)) order[++lengths] = $2; n[$2] += $5 / 2; found[$1, $2] += $4 }
    END { for (i = 1; i <= lengths; i++) { l = order[i]; printf "%8s bytes  %.2f  %.2f\n", l, found["blocks", l] / n[l], found["off", l] / n[l]
            if (found["blocks", l] < enough * n[l]) missed = 1 }
        exit missed }' "$OUT/recall.csv" || {
    echo "passkey_demo.sh: the memory found less than $ENOUGH of the keys at some length" >&2
    exit 1
}
echo
echo "in $OUT: recall.csv, the checkpoint in model/$([ -z "$python" ] || echo ", recall.png")"
[ -n "$python" ] || pictures_skipped "run this again"
