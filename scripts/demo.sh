#!/bin/sh
# The demo of `make demo`: StreamBP trains a small model of bytes on text that every machine has. It makes many updates on short
# sequences first, then longer ones, up to 8192 bytes. Then it shows a sample, the loss by length of context and the memory of three methods.
#
#     make demo                       the machine's own licences, manuals in Perl modules, C headers, package documentation
#     make demo DEMO_TEXT=FOLDER      any files of yours instead, at least 1 MB
#
# Everything goes into build/demo/, which is replaced: the text as shards, a run for each length (run-256/, ...: checkpoint, log.jsonl;
# run-256.txt, ...: the run's output), sample.txt, curve.csv, memory.csv, and the pictures loss.png, curve.png, memory.png. Exit status 1
# unless the loss on held-out text ends below the bigram entropy of that text, the best loss possible with one byte of context.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
BUILD=${BUILD:-build/cpu}
TRAIN=$BUILD/train
PACK=$BUILD/pack_bytes
OUT=build/demo
for program in "$TRAIN" "$PACK"; do
    [ -x "$program" ] || { echo "demo.sh: there is no $program; run it by make demo" >&2; exit 1; }
done

RECIPE=scripts/recipes/cpu-demo.args # the model and how it is trained
T=8192         # the last length
ENOUGH=1000000 # bytes of text

demo_begun=$(date +%s)
say() { printf '\n== %s\n' "$1"; }

# ---- text: what every machine has ---------------------------------------------------------------------------------------------
# Lists files of one kind, long enough for long contexts (12 to 64 KiB), as lines "checksum bytes name", until `cap` bytes are
# reached. The order of checksums is the same on every machine and looks random. Copies have the same checksum and are taken once.
pick() { # CAP FIND-ARGUMENTS...
    pick_cap=$1
    shift
    find "$@" -type f -size +24 -size -128 -exec cksum {} + 2>/dev/null | sort -n |
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
gather_own() { # if a machine has few of these files
    pick 1000000 README.md train_gpt.cu streambp.h llmc dev scripts test data \( -name '*.[ch]' -o -name '*.md' -o -name '*.cu' -o -name '*.sh' \)
}

rm -rf "$OUT"
mkdir -p "$OUT"
count_bytes() { awk '{ bytes += $2 } END { printf "%d", bytes }' "$OUT/found.txt"; }
gather >"$OUT/found.txt"
[ "$(count_bytes)" -ge $ENOUGH ] || gather_own >>"$OUT/found.txt"
bytes=$(count_bytes)
# The order of checksums mixes all kinds, so any part of the text resembles the whole.
sort -n "$OUT/found.txt" | sed 's/^[0-9]* [0-9]* //' >"$OUT/names.txt"
files=$(wc -l <"$OUT/names.txt" | tr -d ' ')
say "Text: $(awk -v b="$bytes" 'BEGIN { printf "%.1f MB", b / 1e6 }') in $files files of this machine; a part is held out for validation"
if [ "$bytes" -lt $ENOUGH ]; then
    echo "demo.sh: less than 1 MB of text was found; give a folder with more: make demo DEMO_TEXT=FOLDER" >&2
    exit 1
fi
"$PACK" --out "$OUT/train.bin" --val-out "$OUT/val.bin" --val-fraction 0.07 --seq-len $T --list "$OUT/names.txt" >"$OUT/packed.txt"
figure() { sed -n "s/.*val\.bin: .*$1 \([0-9.]*\).*/\1/p" "$OUT/packed.txt"; }
unigram=$(figure "unigram entropy") bigram=$(figure bigram)
tail -c +1025 "$OUT/val.bin" | tr -d '\0' >"$OUT/val.txt"

# ---- training -----------------------------------------------------------------------------------------------------------------
# Each stage continues the previous stage; the first starts from the recipe's random weights. On a terminal each shows a progress bar.
say "Training: a model learns to predict the next byte, at three lengths in turn"
weights=$("$TRAIN" info --config $RECIPE | sed -n 's/^model .*, \([^,]* parameters\),.*/\1/p')
echo "Qwen3, $weights: two layers see the 128 bytes before, the third sees all bytes"
stages= logs= model= at_end= # at_end: for each stage, the loss with the most bytes before
stage() {
    length=$1 steps=$2 run=$OUT/run-$1 begun=$(date +%s)
    "$TRAIN" train --config $RECIPE ${model:+--model "$model"} \
        --data "$OUT/train.bin" --val-data "$OUT/val.bin" --out "$run" --seq-len "$length" --steps "$steps" --keep attention \
        --lr "$3" --final-lr-fraction "$4" --warmup "$5" --seed "$length" --val-steps $((8 * T / length)) --val-every $((steps / 2)) \
        >"$run.txt"
    model=$run/$(printf 'checkpoint-%08d' "$steps")/model.bin
    printf '%6d steps of %4d bytes: %d s\n' "$steps" "$length" $(($(date +%s) - begun))
    stages="$stages $length" logs="$logs $run/log.jsonl"
}
#     length steps   lr, last rate over the first, warm-up
stage 256    4400  4e-3  0.3  20
stage 2048   180   2e-3  0.3  10
stage $T     24  1.5e-3  0.05 4
after=$(json_number val_loss <"$run/log.jsonl" | tail -n 1)

# ---- a sample -----------------------------------------------------------------------------------------------------------------
prompt="This program is "
[ -z "${DEMO_TEXT:-}" ] || prompt="The "
say "A sample: how the model goes on after '$prompt'"
"$TRAIN" sample --model "$model" --prompt "$prompt" --max-new-tokens 120 --temperature 0.8 --seed 3 --quiet |
    tr -cd '\11\12\40-\176' >"$OUT/sample.txt"
fold -s -w 76 "$OUT/sample.txt"
echo

# ---- loss by position ---------------------------------------------------------------------------------------------------------
# The second half of each held-out stretch at several lengths, each byte predicted from at least half a sequence before it: sequences
# that begin half a length before these bytes, and sequences that begin with them, count by their second halves.
say "What context is worth: loss of the same held-out bytes, in nats per byte"
lengths="32 128 512 2048 $T"
csv=$OUT/curve.csv
echo "series,begin,end,loss" >"$csv"
part() { tail -c +$(($1 + 1)) "$OUT/val.txt" | head -c "$2"; } # of the held-out text: begin, bytes
printf '%14s' "bytes before:"
for length in $lengths; do
    for end in $(seq $T $T $(($(wc -c <"$OUT/val.txt") - 1))); do
        part $((end - T / 2 - length / 2)) $((length == T ? T : T / 2))
        [ $length = $T ] || part $((end - T / 2)) $((T / 2))
    done >"$OUT/curve.txt"
    part 0 1 >>"$OUT/curve.txt" # a last target
    "$PACK" --out "$OUT/curve-$length.bin" "$OUT/curve.txt" >/dev/null
    printf '%11s' "$((length / 2))-$((length - 1))"
done
echo
for stage in $stages; do
    printf '%14s' "after $stage"
    for length in $lengths; do
        loss=$("$TRAIN" eval --model "$OUT/run-$stage" --data "$OUT/curve-$length.bin" --seq-len $length --curve --json --quiet |
            json_number loss) # the last number, which is the last bucket's
        echo "$stage,$((length / 2)),$length,$loss" >>"$csv"
        printf '%11.3f' "$loss"
    done
    echo
    at_end="$at_end $loss"
done
printf 'At best %.2f without context, %.2f with one byte of context.\n' "$unigram" "$bigram"

# ---- memory -------------------------------------------------------------------------------------------------------------------
methods="full checkpoint stream"
memory=$OUT/memory.csv
say "Memory of one forward and backward pass, in MiB, by --method"
echo "series,method,source,seq_len,bytes" >"$memory"
pass_json() { "$TRAIN" bp --config $RECIPE --seq-len $1 --method $2 --json --quiet; }
for length in 1024 2048 4096 8192 16384 32768 65536 131072 262144; do
    for method in $methods; do
        planned=$("$TRAIN" plan --config $RECIPE --seq-len $length --method $method --for bp --json --quiet | json_number total_bytes)
        echo "$method,$method,plan,$length,$planned" >>"$memory"
    done
done
for method in $methods; do
    echo ",$method,measured,$T,$(pass_json $T $method | json_number peak_bytes)" >>"$memory"
done
process=$(pass_json 16 stream | sed 's/.*"plan_bytes": \([0-9]*\).*"peak_bytes": \([0-9]*\).*/\1 \2/' |
    awk '{ printf "%.1f MiB", ($2 - $1) / 2^20 }')
printf '%33s %10s %10s\n' $methods
memory_row() { # name, source, length
    awk -F, -v name="$1" -v source="$2" -v T="$3" '$3 == source && $4 == T { row = row sprintf(" %10.1f", $5 / 2^20) }
        END { printf "%22s%s\n", name, row }' "$memory"
}
memory_row "$T bytes, measured" measured $T
memory_row "262144 bytes, planned" plan 262144
echo "full keeps all activations, checkpoint keeps each layer's input, stream works by chunks."

# ---- pictures, summary --------------------------------------------------------------------------------------------------------
python=$(python_with_matplotlib)
if [ -n "$python" ]; then
    "$python" scripts/plot.py memory --in "$memory" --out "$OUT/memory.png" --log \
        --title "Memory of one forward and backward pass of the demo's model" --caption "\
Lines: the plan, which counts what the run itself needs. Points: measured, the process's high-water mark less its value at the start. It has \
about $process in addition to the plan at any length (measured with 16 tokens): the program, its libraries, stacks of threads."
    "$python" scripts/plot.py log --out "$OUT/loss.png" --stages --mean 32768 --level "$bigram" --level-name "bigram entropy" $logs
    "$python" scripts/plot.py curve --in "$OUT/curve.csv" --out "$OUT/curve.png" --title "Loss by position in the sequence, after each stage" --caption "\
All points are of the same held-out bytes, with more or less of the text before them. Names: the longest sequences trained on so far."
fi

say "Result"
echo $at_end | awk '{ printf "A byte with 4096 to 8191 bytes before it costs %.2f nats after training on 256 bytes, %.2f on 2048, %.2f on 8192.\n", $1, $2, $3 }'
echo "The model: $OUT/run-$T$([ -z "$python" ] || echo "; pictures: loss.png, curve.png, memory.png in $OUT")"
[ -n "$python" ] || pictures_skipped "make demo again"
echo "The demo took $((($(date +%s) - demo_begun) / 60)) min $((($(date +%s) - demo_begun) % 60)) s."
echo "Next: fine-tune a chat model, scripts/finetune_chat.sh (README.md says how)"
awk -v e="$bigram" -v a="$after" 'BEGIN { exit !(a < e) }' || {
    echo "demo.sh: the validation loss, $after, did not end below the bigram entropy, $bigram" >&2
    exit 1
}
