#!/bin/sh
# The demo of `make demo`: StreamBP trains a small Llama-style model on text that every machine has. It makes many updates on short
# sequences first, then longer ones, up to 8192 bytes. Then it shows sample text, loss by position and memory of the three methods.
#
#     make demo                       the machine's own licences, manuals in Perl modules, C headers, package documentation
#     make demo DEMO_TEXT=FOLDER      any files of yours instead, at least 1 MB
#
# Everything goes into build/demo/, which is replaced: the text as shards, a run for each length (run-256, ...: checkpoint and
# log.jsonl), sample.txt, curve.csv, memory.csv, and the pictures loss.png, curve.png, memory.png. Exit status 1 unless the loss on
# held-out text ends below the bigram entropy of that text, the best loss possible with one byte of context.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
BUILD=${BUILD:-build/cpu-fp32}
TRAIN=$BUILD/train
PACK=$BUILD/pack_bytes
OUT=build/demo
for program in "$TRAIN" "$PACK"; do
    [ -x "$program" ] || { echo "demo.sh: there is no $program; run it by make demo" >&2; exit 1; }
done

RECIPE=scripts/recipes/cpu-demo.args # the model and how it is trained
T=8192         # the last length
ENOUGH=1000000 # bytes of text

say() { printf '\n== %s\n' "$1"; }

# ---- text: what every machine has ---------------------------------------------------------------------------------------------
# Lists files of one kind, as lines "checksum bytes name", until `cap` bytes are reached. The order of checksums is the same on every
# machine and looks random. Copies have the same checksum and are taken once.
pick() { # CAP FIND-ARGUMENTS...
    pick_cap=$1
    shift
    find "$@" -type f -size +1 -size -128 -exec cksum {} + 2>/dev/null | sort -n |
        awk -v cap="$pick_cap" '$1 != last { bytes += $2; if (bytes > cap) exit; print } { last = $1 }'
}

gather() {
    if [ -n "${DEMO_TEXT:-}" ]; then
        find "$DEMO_TEXT" -type f -exec cksum {} +
        return
    fi
    pick 400000 /usr/share/common-licenses /usr/share/licenses
    pick 400000 /usr/share/perl /usr/share/perl5 \( -name '*.pod' -o -name '*.pm' \) ! -path '*/unicore/*' ! -path '*/CJK/*'
    pick 200000 /usr/include/*.h /usr/include/linux/*.h
    pick 800000 /usr/share/doc \( -name copyright -o -name 'README*' -o -name '*.txt' -o -name '*.md' \) ! -name '*.gz'
}
gather_own() { # where a machine has little of all this
    pick 1000000 README.md train_gpt.cu streambp.h llmc dev scripts test data \( -name '*.[ch]' -o -name '*.md' -o -name '*.cu' -o -name '*.sh' \)
}

rm -rf "$OUT"
mkdir -p "$OUT"
say "Text"
count_bytes() { awk '{ bytes += $2 } END { printf "%d", bytes }' "$OUT/found.txt"; }
gather >"$OUT/found.txt"
[ "$(count_bytes)" -ge $ENOUGH ] || gather_own >>"$OUT/found.txt"
bytes=$(count_bytes)
# The order of checksums mixes all kinds, so any part of the text resembles the whole.
sort -n "$OUT/found.txt" | sed 's/^[0-9]* [0-9]* //' >"$OUT/names.txt"
echo "$(wc -l <"$OUT/names.txt" | tr -d ' ') files, $bytes bytes; their names: $OUT/names.txt"
if [ "$bytes" -lt $ENOUGH ]; then
    echo "demo.sh: less than 1 MB of text was found; give a folder with more: make demo DEMO_TEXT=FOLDER" >&2
    exit 1
fi
"$PACK" --out "$OUT/train.bin" --val-out "$OUT/val.bin" --val-fraction 0.05 --list "$OUT/names.txt" | tee "$OUT/packed.txt"
figure() { sed -n "s/.*val\.bin: .*$1 \([0-9.]*\).*/\1/p" "$OUT/packed.txt"; }
unigram=$(figure "unigram entropy") bigram=$(figure bigram)
tail -c +1025 "$OUT/val.bin" | tr -d '\0' >"$OUT/val.txt"

# ---- training -----------------------------------------------------------------------------------------------------------------
# Each stage continues the one before; the first starts from the recipe's random weights. Ten step lines are shown, each with the mean
# loss since the last one. A run that fails or is stopped has no checkpoint of its last step.
stages= logs=
stage() {
    say "Training on sequences of $1 bytes, by $RECIPE"
    length=$1 steps=$2
    "$TRAIN" train --config $RECIPE ${stages:+--model "$OUT/run-${stages##* }"} \
        --data "$OUT/train.bin" --val-data "$OUT/val.bin" --out "$OUT/run-$length" --seq-len "$length" --steps "$steps" --keep attention \
        --lr "$3" --final-lr-fraction "$4" --warmup "$5" --seed "$length" --val-steps $((8 * T / length)) --val-every $((steps / 2)) |
        awk -v every=$((steps / 10)) '$1 == "step" && $3 == "loss" {
                 sum += $4; count++; split($2, at, "/")
                 if (at[1] != 1 && at[1] % every) next
                 $4 = sprintf("%.5f", sum / count); sum = count = 0
             }
             { print; fflush() }'
    [ -d "$OUT/run-$length/$(printf 'checkpoint-%08d' "$steps")" ] || exit 1
    stages="$stages $length" logs="$logs $OUT/run-$length/log.jsonl"
}
#     length steps   lr, its last over the first, warm-up
stage 256    4400  4e-3  0.3  20
stage 2048   180   2e-3  0.3  10
stage $T     24  1.5e-3  0.05 4
run=$OUT/run-$T
before=$(json_number val_loss <"$OUT/run-256/log.jsonl" | head -n 1)
after=$(json_number val_loss <"$run/log.jsonl" | tail -n 1)

say "A sample: some lines of held-out text, and how it goes on"
head -c 20000 "$OUT/val.txt" | tail -c 300 | sed 1d >"$OUT/prompt.txt"
"$TRAIN" sample --model "$run" --prompt-file "$OUT/prompt.txt" --max-new-tokens 400 --temperature 0.6 --top-p 0.9 --seed 1 --quiet |
    tr -cd '\11\12\40-\176' | tee "$OUT/sample.txt"
echo

# ---- loss by position ---------------------------------------------------------------------------------------------------------
# The same held-out bytes at several lengths, each predicted from at least half a sequence before it: the second halves of sequences
# that begin half a length earlier, and of those that begin with these bytes.
say "How far back it looks: loss of the same held-out bytes by the number of bytes before them, after each stage"
compared=$(($(wc -c <"$OUT/val.txt") / T / 2 * T)) # bytes
csv=$OUT/curve.csv
echo "series,begin,end,loss" >"$csv"
for length in 32 128 512 2048 $T; do
    tail -c +$(((T - length) / 2 + 1)) "$OUT/val.txt" | head -c $compared >"$OUT/val-1.txt"
    tail -c +$((T / 2 + 1)) "$OUT/val.txt" | head -c $compared >"$OUT/val-2.txt"
    "$PACK" --out "$OUT/curve.bin" "$OUT/val-1.txt" "$OUT/val-2.txt" >/dev/null
    row="$((length / 2)) to $((length - 1))"
    for stage in $stages; do
        loss=$("$TRAIN" eval --model "$OUT/run-$stage" --data "$OUT/curve.bin" --seq-len $length --curve --json --quiet 2>/dev/null | json_number loss)
        echo "$stage,$((length / 2)),$length,$loss" >>"$csv" # the last number is the last bucket's
        row="$row $loss"
    done
    echo "$row"
done | awk -v stages="$stages" 'BEGIN { n = split(stages, s); printf "%16s", "bytes before"; for (i = 1; i <= n; i++) printf " %12s", "up to " s[i]; print "" }
    { printf "%16s", $1 " " $2 " " $3; for (i = 4; i <= NF; i++) printf " %12.3f", $i; print ""; fflush() }'

# ---- memory -------------------------------------------------------------------------------------------------------------------
say "Memory of one forward and backward pass of this model (plan; growing with T)"
memory=$OUT/memory.csv
echo "series,method,source,seq_len,bytes" >"$memory"
printf '%8s %14s %14s %14s %14s\n' T full checkpoint stream "full/stream"
for length in 1024 2048 4096 8192 16384 32768 65536 131072 262144; do
    row=$length
    for method in full checkpoint stream; do
        planned=$("$TRAIN" plan --config $RECIPE --seq-len $length --method $method --for bp --json --quiet | json_number total_bytes)
        echo "$method,$method,plan,$length,$planned" >>"$memory"
        row="$row $planned"
    done
    echo "$row"
done | awk '{ printf "%8d %10.1f MiB %10.1f MiB %10.1f MiB %14.1f\n", $1, $2 / 2^20, $3 / 2^20, $4 / 2^20, $2 / $4 }'
echo
pass_json() { "$TRAIN" bp --config $RECIPE --seq-len $1 --method $2 --json --quiet; }
short=$(pass_json 16 stream)
process=$(awk -v peak="$(echo "$short" | json_number peak_bytes)" -v plan="$(echo "$short" | json_number plan_bytes)" \
    'BEGIN { printf "%.1f MiB", (peak - plan) / 2^20 }')
echo "Measured at T = $T, from outside the program's own accounts (the process's high-water mark less its value at the start). A pass of 16"
echo "tokens lies $process above its plan: the process itself takes about that at any length (program, libraries, stacks of threads)."
for method in full checkpoint stream; do
    json=$(pass_json $T $method)
    planned=$(echo "$json" | json_number plan_bytes)
    peak=$(echo "$json" | json_number peak_bytes)
    echo ",$method,measured,$T,$peak" >>"$memory"
    echo "$method $peak $planned"
done | awk '{ printf "%11s %10.1f MiB   plan %10.1f MiB\n", $1, $2 / 2^20, $3 / 2^20 }'

# ---- pictures, summary --------------------------------------------------------------------------------------------------------
python=$(python_with_matplotlib)
if [ -n "$python" ]; then
    "$python" scripts/plot.py memory --in "$memory" --out "$OUT/memory.png" --log \
        --title "Memory of one forward and backward pass of the demo's model" --caption "\
Lines: the plan, which counts what the run itself needs. Points: measured, the process's high-water mark less its value at the start. It has \
about $process beside the plan at any length (measured with 16 tokens): the program, its libraries, stacks of threads."
    "$python" scripts/plot.py log --out "$OUT/loss.png" --stages --mean 32768 --level "$bigram" --level-name "bigram entropy" $logs
    "$python" scripts/plot.py curve --in "$OUT/curve.csv" --out "$OUT/curve.png" --title "Loss by position in the sequence, after each stage" --caption "\
All points are of the same held-out bytes, with more or less of the text before them. Names: the longest sequences trained on so far."
fi

say "Result, in nats per byte of the held-out text"
printf '%-44s %7.3f\n' "entropy of its single bytes (no context)" "$unigram" "bigram entropy (one byte of context)" "$bigram" \
    "validation loss before training" "$before" "validation loss after training" "$after"
echo
echo "in $OUT: the checkpoint in run-$T/, log.jsonl in run-*/, sample.txt, curve.csv, memory.csv$([ -z "$python" ] || echo ", loss.png, curve.png, memory.png")"
[ -n "$python" ] || pictures_skipped "make demo again"
awk -v e="$bigram" -v a="$after" 'BEGIN { exit !(a < e) }' || {
    echo "demo.sh: the validation loss did not end below the bigram entropy" >&2
    exit 1
}
