#!/bin/sh
# The demo, called by `make demo`: a small Llama-style model learns text that every machine has, one sequence of 8192 bytes at a
# time, by StreamBP; then the memory of the three methods for this model.
#
#     make demo                       the machine's own licences, manuals in Perl modules, C headers, package documentation
#     make demo DEMO_TEXT=FOLDER      any files of yours instead, at least 1 MB
#
# Everything goes into build/demo/, which is replaced: the text as two shards, run/ (checkpoint and log.jsonl), loss.png,
# memory.csv, memory.png, sample.txt. Exit status 1 unless the loss on held-out text ends 0.4 nats per byte below the entropy
# of its single bytes, the best that any model without context can do.
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
T=8192
ENOUGH=1000000 # bytes of text
MARGIN=0.4     # nats per byte
# Threads that wait should sleep: elsewhere, with other programs on the same cores, spinning costs more than waking up.
OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export OMP_WAIT_POLICY

say() { printf '\n== %s\n' "$1"; }

# ---- text: what every machine has ---------------------------------------------------------------------------------------------
# Files of one kind, as lines "checksum bytes name". They are taken in the order of their checksums, which is the same everywhere
# and resembles no other, until `cap` bytes are reached; copies have the same checksum and are taken once.
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
# In the order of checksums all kinds are mixed, so that any part of the text resembles the whole.
sort -n "$OUT/found.txt" | sed 's/^[0-9]* [0-9]* //' >"$OUT/names.txt"
echo "$(wc -l <"$OUT/names.txt" | tr -d ' ') files, $bytes bytes; their names: $OUT/names.txt"
if [ "$bytes" -lt $ENOUGH ]; then
    echo "demo.sh: less than 1 MB of text was found; give a folder with more: make demo DEMO_TEXT=FOLDER" >&2
    exit 1
fi
"$PACK" --out "$OUT/train.bin" --val-out "$OUT/val.bin" --val-fraction 0.05 --list "$OUT/names.txt" | tee "$OUT/packed.txt"
entropy=$(sed -n 's/.*val\.bin: .*unigram entropy \([0-9.]*\).*/\1/p' "$OUT/packed.txt")

# ---- training -----------------------------------------------------------------------------------------------------------------
say "Training from scratch on sequences of $T bytes, by $RECIPE"
"$TRAIN" train --config $RECIPE --data "$OUT/train.bin" --val-data "$OUT/val.bin" --out "$OUT/run"
log=$OUT/run/log.jsonl
before=$(json_number val_loss <"$log" | head -n 1)
after=$(json_number val_loss <"$log" | tail -n 1)
model=$(ls -d "$OUT"/run/checkpoint-*/model.bin | tail -n 1)

say "A sample of what it writes"
"$TRAIN" sample --model "$model" --prompt "This program is " --max-new-tokens 400 --temperature 0.7 --seed 1 --quiet |
    tr -cd '\11\12\40-\176' | tee "$OUT/sample.txt"
echo

# ---- memory -------------------------------------------------------------------------------------------------------------------
say "Memory of one forward and backward pass of this model (plan; growing with T)"
csv=$OUT/memory.csv
echo "series,method,source,seq_len,bytes" >"$csv"
printf '%8s %14s %14s %14s %14s\n' T full checkpoint stream "full/stream"
for length in 1024 2048 4096 8192 16384 32768 65536 131072 262144; do
    row=$length
    for method in full checkpoint stream; do
        planned=$("$TRAIN" plan --config $RECIPE --seq-len $length --method $method --for bp --json --quiet | json_number total_bytes)
        echo "$method,$method,plan,$length,$planned" >>"$csv"
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
    echo ",$method,measured,$T,$peak" >>"$csv"
    echo "$method $peak $planned"
done | awk '{ printf "%11s %10.1f MiB   plan %10.1f MiB\n", $1, $2 / 2^20, $3 / 2^20 }'

# ---- pictures, summary --------------------------------------------------------------------------------------------------------
python=$(python_with_matplotlib)
if [ -n "$python" ]; then
    "$python" scripts/plot_memory.py --in "$csv" --out "$OUT/memory.png" --log \
        --title "Memory of one forward and backward pass of the demo's model" --caption "\
Lines: the plan, which counts what the run itself needs. Points: measured, the process's high-water mark less its value at the start. It has \
about $process beside the plan at any length (measured with 16 tokens): the program, its libraries, stacks of threads."
    "$python" scripts/plot_log.py --out "$OUT/loss.png" --mean 10 --level "$entropy" --level-name "unigram entropy" "$log"
fi

say "Result, in nats per byte of the held-out text"
printf '%-44s %7.3f\n' "entropy of its single bytes (no context)" "$entropy" "validation loss before training" "$before" \
    "validation loss after training" "$after"
awk -v e="$entropy" -v a="$after" 'BEGIN { printf "%-44s %7.3f\n", "below the entropy by", e - a }'
echo
echo "in $OUT: the checkpoint run/$(basename "$(dirname "$model")"), run/log.jsonl, sample.txt, memory.csv$([ -z "$python" ] || echo ", memory.png, loss.png")"
[ -n "$python" ] || pictures_skipped "make demo again"
awk -v e="$entropy" -v a="$after" -v m=$MARGIN 'BEGIN { exit !(e - a >= m) }' || {
    echo "demo.sh: the validation loss did not end $MARGIN nats per byte below the entropy" >&2
    exit 1
}
