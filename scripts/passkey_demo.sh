#!/bin/sh
# Shows long texts (sample --context-memory blocks): a small model of bytes learns from texts of at most 1,024 bytes to repeat a key
# that stands somewhere in random words ("the key is <482>"). Then it is asked for keys in much longer texts, with the memory and
# without it, at several depths. scripts/passkey_demo.py makes the texts.
#
#     scripts/passkey_demo.sh         some minutes on two cores; needs a Python with numpy (PYTHON=...), and ./train
#     MODEL=keep LENGTHS=512000 TEXTS=1 scripts/passkey_demo.sh
#
# Everything goes into build/passkey-demo/, which is replaced: shards, short/ and model/ (the runs), recall.csv, recall.png. MODEL=keep
# keeps the model/ of an earlier run. Exit status 1 unless the memory finds 0.9 of the keys at every length.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
demo_begin
OUT=${OUT:-build/passkey-demo}
LENGTHS=${LENGTHS:-1000 4000 16000 64000} # bytes of a text
DEPTHS=${DEPTHS:-0 0.25 0.5 0.75 1}       # depth of the key in the text: 0 beginning, 1 end
TEXTS=${TEXTS:-2}                         # number of texts for each length and depth
PLAIN=${PLAIN:-64000}                     # longest texts that are also asked without the memory: time grows with their square
STEPS=${STEPS:-300}                       # steps on texts of 80 bytes, and again on texts of 1,024
ENOUGH=${ENOUGH:-0.9}                     # share of the keys that must be found

# Layer 1 sees 4 bytes and learns which byte came before. Layer 2 sees all bytes, and learns to look for bytes that follow the last byte.
SHAPE=qwen2,layer_types=sf,sliding_window=4,hidden_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,head_dim=32
SHAPE=$SHAPE,intermediate_size=128,vocab_size=256,max_position_embeddings=1024,rope_theta=10000,tie_word_embeddings=false
SHAPE=$SHAPE,initializer_range=0.12

if [ "${MODEL:-}" != keep ] || [ ! -d "$OUT/model" ]; then
    rm -rf "$OUT"
    mkdir -p "$OUT/texts-80" "$OUT/texts-1024"
    say "A model that repeats a key, from texts of at most 80 and of at most 1,024 bytes"
    "$PYTHON" scripts/passkey_demo.py data "$OUT/texts-80" 80 $((STEPS * 70))
    "$PYTHON" scripts/passkey_demo.py data "$OUT/texts-1024" 1024 $((STEPS * 30))
    "$TRAIN" --init $SHAPE --data "$OUT/texts-80/key-00000.bin" --seq-len 128 --batch 32 --steps "$STEPS" --lr 5e-3 --beta2 0.98 \
        --log-every $((STEPS / 10 + 1)) --out "$OUT/short"
    "$TRAIN" --model "$OUT/short" --data "$OUT/texts-1024/key-00000.bin" --seq-len 1024 --batch 8 --steps "$STEPS" --lr 2e-3 \
        --log-every $((STEPS / 10 + 1)) --out "$OUT/model"
fi

answers() { # prints the answers of `sample`, one a line
    "$TRAIN" sample --model "$OUT/model" --max-new-tokens 3 --temperature 0 --json --quiet "$@" | sed 's/.*"text": "\([^"]*\)".*/\1/'
}

say "Keys found of $TEXTS, by depth: with the memory (without it)"
echo memory,length,depth,found,texts >"$OUT/recall.csv"
for length in $LENGTHS; do
    : >"$OUT/keys" >"$OUT/prompts" >"$OUT/blocks"
    seed=$length
    for depth in $DEPTHS; do
        for _ in $(seq "$TEXTS"); do
            seed=$((seed + 1))
            echo "$depth $("$PYTHON" scripts/passkey_demo.py key "$seed")" >>"$OUT/keys"
            "$PYTHON" scripts/passkey_demo.py text "$length" "$depth" "$seed" >"$OUT/text"
            { cat "$OUT/text" && echo; } >>"$OUT/prompts"
            answers --prompt-file "$OUT/text" --context-memory blocks 2>>"$OUT/log" >>"$OUT/blocks"
        done
    done
    kinds=blocks
    if [ "$length" -le "$PLAIN" ]; then
        kinds="blocks off"
        answers --prompts "$OUT/prompts" 2>>"$OUT/log" >"$OUT/off"
    fi
    for memory in $kinds; do
        [ "$(wc -l <"$OUT/$memory")" = "$(wc -l <"$OUT/keys")" ] || { echo "passkey_demo.sh: sample failed: $OUT/log" >&2; exit 1; }
        paste -d ' ' "$OUT/keys" "$OUT/$memory" | awk -v row="$memory,$length" '!($1 in n) { order[++depths] = $1 }
            { n[$1]++; found[$1] += $2 == $3 }
            END { for (i = 1; i <= depths; i++) print row "," order[i] "," found[order[i]] "," n[order[i]] }' >>"$OUT/recall.csv"
    done
    printf '%8s bytes ' "$length"
    awk -F, -v bytes="$length" '$2 == bytes && $1 == "blocks" { with[++n] = $4; depth[n] = $3 }
        $2 == bytes && $1 == "off" { without[++m] = " (" $4 ")" }
        END { for (i = 1; i <= n; i++) printf "  %s: %s%s", depth[i], with[i], without[i]; print "" }' "$OUT/recall.csv"
done

python=$(python_with_matplotlib)
grep -q '^off' "$OUT/recall.csv" || python= # the picture compares with and without the memory
[ -z "$python" ] || "$python" scripts/plot.py recall --in "$OUT/recall.csv" --out "$OUT/recall.png"

say "Result: the share of keys found, by length, with the memory and without"
awk -F, -v enough="$ENOUGH" 'NR > 1 { if (!($2 in n)) order[++lengths] = $2; found[$1, $2] += $4; if ($1 == "blocks") n[$2] += $5 }
    END { for (i = 1; i <= lengths; i++) { l = order[i]; without = ("off", l) in found ? sprintf("%.2f", found["off", l] / n[l]) : "-"
            printf "%8s bytes  %.2f  %s\n", l, found["blocks", l] / n[l], without
            if (found["blocks", l] < enough * n[l]) missed = 1 }
        exit missed }' "$OUT/recall.csv" || {
    echo "passkey_demo.sh: the memory found less than $ENOUGH of the keys at some length" >&2
    exit 1
}
echo
echo "in $OUT: recall.csv, the checkpoint in model/$([ -z "$python" ] || echo ", recall.png")"
[ -n "$(python_with_matplotlib)" ] || pictures_skipped "run this again"
