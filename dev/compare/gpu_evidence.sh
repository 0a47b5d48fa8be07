#!/bin/sh
# Measurements on one GPU, in parts that each end within $LIMIT seconds, for a machine that is there for one command at a time:
#   dev/compare/gpu_evidence.sh [--dry] PART OUT
#     build         the program for this GPU, then tests on it ($TESTS, rows of test/rows.txt, each in $PRECISIONS)
#     speed-32k     8B shape: StreamBP, with kept attention, gradient checkpointing; where the time goes, against the roofline
#     speed-128k    the same at 131072 tokens, without checkpointing and profiles
#     peers-2k-64k  $MODEL beside transformers and the paper's code; fewer layers where all of them would take too long
#     longest       8B shape: the longest sequence of each within $MEMORY
#     table1 table2 figure3   the paper's (MODEL=qwen3-14b: another panel of Figure 3)
#     chunks        8B shape at 32768 tokens, chunk by chunk size
# Every part goes on after a case that fails, leaves a case out that would not end in time, and prints a summary last; exit status 1 where
# a case failed. A part that is run again on the same machine takes up what it has: weights, and results of compare.py.
# Passes are `train bp`, whose first one warms up; clocks, power and temperature are those during the run. A part ends, with exit status
# 1, where attention is our own kernels' and not cuDNN's, unless STREAMBP_CUDNN=0 says that this is meant.
# OUT gets a small file: PART.json (fig3-MODEL.json, of table2 four), speed.jsonl of both speeds (a run that was cut off has its passes
# there), test-*.json of build. --dry: commands and estimates only. A GPU that nobody has tried: scripts/gpu_kit.sh first.
# OPTIONS of all passes of both speeds, such as '--deterministic off'. TRAIN: another program, such as a kit's (with STREAMBP_LIBRARIES).
# CONTENDERS, LENGTHS (of peers-2k-64k): fewer or others, so that all layers fit into the time, or the rest is measured.
# MODEL=gpt2-xl LENGTHS=512,1024 CONTENDERS=stream,checkpoint,hf-chunked,llmc: beside llm.c.
# MODEL, MACHINE (a name of ./train plan), MEMORY, ARCHS, TESTS, PYTHON (with torch and transformers), PAPER and PAPER_PYTHON (the
# paper's code), LLMC, CUDA, CUDNN, CUDNN_FRONTEND: as the programs that are called have them.
set -u
cd "$(dirname "$0")/../.." || exit 1
. scripts/common.sh
TRAIN=${TRAIN:-./train} MODEL=${MODEL:-qwen3-8b} MACHINE=${MACHINE:-} MEMORY=${MEMORY:-h100} LIMIT=${LIMIT:-530} ARCHS=${ARCHS:-90}
TESTS=${TESTS:-attention ops golden bp methods} PRECISIONS=${PRECISIONS:-bf16} OPTIONS=${OPTIONS:-} PYTHON=${PYTHON:-python3}
dry=
[ "${1:-}" = --dry ] && dry=1 && shift
[ $# = 2 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
part=$1 out=$2
parts='build, speed-32k, speed-128k, peers-2k-64k, longest, table1, table2, figure3, chunks'
case ", $parts," in
*", $part,"*) ;;
*) echo "gpu_evidence.sh: there is no part '$part'; parts are $parts" >&2 && exit 2 ;;
esac
case $dry$(ask_gpu name) in
'' | *rror* | *ailed* | No\ devices*)
    echo "gpu_evidence.sh: no GPU was found (nvidia-smi names none); --dry shows what would run on one" >&2
    exit 1
    ;;
esac
[ -n "$MACHINE" ] || case $([ -n "$dry" ] || ask_gpu name) in *H100*) MACHINE=h100 ;; *) MACHINE=h200 ;; esac
store=${STORE:-build/evidence} # weights, and compare.py's folders: kept as long as the machine is
mkdir -p "$out" "$store" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
begin=$(date +%s)
: >"$work/summary"
say() { echo "$*" >&2; }
left() { echo $((LIMIT - $(date +%s) + begin)); }
summary() { printf '%-34s %-11s %9s %9s  %s\n' "$@" >>"$work/summary"; } # case, state, estimated, taken, what it said

close() { # the summary, and whether nothing failed
    say ''
    printf '%-34s %-11s %9s %9s  %s\n' "$part" state 'planned s' 'taken s' '' >&2
    cat "$work/summary" >&2
    say "$part: planned $planned s of $LIMIT, taken $(($(date +%s) - begin)) s$([ -z "$dry" ] || echo '; a dry run, nothing was measured')"
    ! grep -qE ' (FAILED|CUT OFF) ' "$work/summary"
}

# try NAME ESTIMATE COMMAND...: runs it in the time that is left, its output in $work/output
planned=0
try() {
    name=$1 estimate=$2
    shift 2
    planned=$((planned + estimate))
    say "== $name: about $estimate s of $(left) s left: $*"
    if [ -n "$dry" ]; then
        summary "$name" 'not run' "$estimate" - "$*"
        return 1
    elif [ "$estimate" -gt "$(left)" ]; then
        summary "$name" 'left out' "$estimate" - "only $(left) s were left"
        return 1
    fi
    started=$(date +%s)
    watched "$work/samples" timeout -k 10 "$(left)" "$@" >"$work/output" 2>"$work/errors"
    status=$?
    tail -n 5 "$work/errors" >&2
    state=done
    [ $status = 0 ] || state=FAILED
    [ $status = 124 ] && state='CUT OFF'
    summary "$name" "$state" "$estimate" $(($(date +%s) - started)) "$([ $status = 0 ] || tail -n 1 "$work/errors" | cut -c1-150)"
    return $status
}
# Ends the part where the last run was not of cuDNN: its figures are not those that are wanted.
needs_cudnn() {
    [ "${STREAMBP_CUDNN:-}" != 0 ] && grep -q '"attention": "own"' "$work/output" 2>/dev/null || return 0
    close
    say "gpu_evidence.sh: attention is our own kernels', not cuDNN's: '$TRAIN doctor' says what is missing; STREAMBP_CUDNN=0 measures it as it is"
    exit 1
}
probe() { # a pass of seconds, before anything long: where it fails, nothing else is tried
    if ! try 'which attention' 15 "$TRAIN" bp --init "$MODEL,num_hidden_layers=1,vocab_size=1024" --seq-len 4096 --json --quiet && [ -z "$dry" ]; then
        timeout -k 10 100 "$TRAIN" doctor --quiet >&2
        close
        say "gpu_evidence.sh: '$TRAIN' does not run here (above)"
        exit 1
    fi
    needs_cudnn
}

# ---- estimates: ./train plan's for this machine, seconds, rounded up -----------------------------------------------------------
plan() { "$TRAIN" plan --dtype bf16 --for bp --machine "$MACHINE" --json --quiet --init "$@" 2>/dev/null; } # shape, options...
seconds_of() { # passes, shape, options...
    passes=$1
    shift
    plan "$@" | json_number estimated_seconds | awk -v n="$passes" '{ s = $1 * n } END { printf "%d", s + 1 }'
}
gigabytes() { plan "$1" --seq-len 16 | json_number weights | awk '{ n = $1 / 1e9 } END { printf "%d", n + 1 }'; }
load() { echo $((5 + $(gigabytes "$1") / 2)); } # a process that begins and reads the weights
# compare_seconds SHAPE REPEAT LENGTHS CONTENDERS: others are taken for 1.6 times as slow as our gradient checkpointing
compare_seconds() {
    total=0
    for name in $(echo "$4" | tr , ' '); do
        case $name in stream* | checkpoint) processes=$(echo "$3" | tr , '\n' | grep -c .) factor=10 ;; *) processes=1 factor=16 ;; esac
        for T in $(echo "$3" | tr , ' '); do
            total=$((total + $(seconds_of "$2" "$1" --method checkpoint --seq-len "$T") * factor / 10))
        done
        total=$((total + processes * $(load "$1")))
    done
    echo $total
}

# Sets $weights to the folder of a shape's random weights, made where it is not there yet.
provide() {
    weights=$store/$(echo "$1" | tr , -)
    [ -f "$weights/config.json" ] && return
    try "weights of $1" $((5 * $(gigabytes "$1") + 5)) "$TRAIN" convert --init "$1" --seed 42 --dtype bf16 --out "$weights" --quiet || [ -n "$dry" ]
}

# pass NAME PASSES SHAPE 'OPTIONS' MORE...: one bp; a line in speed.jsonl. OPTIONS are those that its plan has, too
pass() {
    name=$1 shape=$3 options="$4 $OPTIONS"
    each=$(plan "$shape" $options | json_number estimated_seconds | awk '{ printf "%.4g", $1 }')
    seconds=$(($(seconds_of "$2" "$shape" $options) + $(load "$shape")))
    shift 4
    result=null
    try "$name" $seconds "$TRAIN" bp --model "$weights" $options "$@" --machine "$MACHINE" --json --json-lines --quiet &&
        result=$(tail -n 1 "$work/output")
    [ -n "$dry" ] || printf '{"part": "%s", "case": "%s", "shape": "%s", "options": "%s", "date": "%s", "planned_seconds": %s, "gpu": %s, "passes": [%s], "result": %s}\n' \
        "$part" "$name" "$shape" "$options $*" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "${each:-null}" "$(gpu_samples "$work/samples")" \
        "$(grep '^{"pass": .*}$' "$work/output" 2>/dev/null | paste -sd ,)" "$result" >>"$out/speed.jsonl"
    [ "$result" = null ] || needs_cudnn
}

# compare NAME ESTIMATE OPTIONS...: compare.py; its record becomes OUT/NAME.json, its table goes to stdout
compare() {
    name=$1 estimate=$2
    shift 2
    rm -f "$store/$name/compare.json"
    try "$name" "$estimate" dev/compare/compare.py --train "$TRAIN" --dtype bf16 --device cuda --python "$PYTHON" ${PAPER:+--paper "$PAPER"} \
        ${PAPER_PYTHON:+--paper-python "$PAPER_PYTHON"} ${LLMC:+--llmc "$LLMC"} --resume --timeout "$(left)" --out "$store/$name" "$@"
    [ -n "$dry" ] && return
    cat "$work/output"
    cp "$store/$name/compare.json" "$out/$name.json" 2>/dev/null && return
    cat "$store/$name"/cases/*.json >"$out/$name-cases.json" 2>/dev/null || rm -f "$out/$name-cases.json" # cut off: what it has
}

# ---- the parts -----------------------------------------------------------------------------------------------------------------
speed() { # length, passes, of them with kept attention, --profile or nothing, a method beside stream or nothing
    probe
    provide "$MODEL" || return
    profiled=${4:+1}
    pass "stream at $1" $(($2 + profiled)) "$MODEL" "--seq-len $1" --repeat "$2" $4
    pass "stream --keep attention at $1" $(($3 + profiled)) "$MODEL" "--seq-len $1 --keep attention" --repeat "$3" $4
    [ -z "$5" ] || pass "$5 at $1" "$2" "$MODEL" "--seq-len $1 --method $5" --repeat "$2"
}

everyone=stream,stream-any,stream-keep,checkpoint,hf,hf-chunked,paper
peers() { # lengths, contenders: as many layers as end in time, half of them again and again
    layers=$("$TRAIN" info --init "$MODEL" --json --quiet 2>/dev/null | json_number num_hidden_layers)
    shape=$MODEL
    while :; do
        seconds=$(compare_seconds "$shape" 3 "$1" "$2")
        [ "$seconds" -lt $((LIMIT - 5 * $(gigabytes "$shape") - 20)) ] || [ "$layers" -lt 2 ] && break
        layers=$((layers / 2)) shape=$MODEL,num_hidden_layers=$((layers))
    done
    [ "$shape" = "$MODEL" ] || say "NOTE: $layers layers of $MODEL, so that all contenders end in time"
    provide "$shape" && compare "$part" "$seconds" --model "$weights" --seq-lens "$1" --contenders "$2"
}

# Others find theirs by about 6 passes of a process each, ours are planned and confirmed by one.
longest() { # contenders
    others=$(echo "$1" | tr , '\n' | grep -cvE '^(stream|checkpoint)') ours=$(echo "$1" | tr , '\n' | grep -cE '^(stream|checkpoint)')
    seconds=$((others * 6 * ($(seconds_of 2 "$MODEL" --seq-len 20000) + $(load "$MODEL"))))
    seconds=$((seconds + ours * ($(seconds_of 1 "$MODEL" --seq-len 150000) + $(load "$MODEL")) + $(compare_seconds "$MODEL" 2 16384 "stream,$1")))
    provide "$MODEL" && compare longest $seconds --model "$weights" --seq-lens 16384 --repeat 2 --contenders "$1" --longest --memory-limit "$MEMORY"
}

# The paper's, at its lengths and chunks, in folders named as paper_tables.sh names its own; k = 1000 tokens.
table1() { # contenders
    lengths=$(awk -F, '$1 == "table1_bp_seconds" { sub("k", "000", $4); print $4 }' $PAPER_TABLES | paste -sd ,)
    provide qwen3-4b && compare table1 "$(compare_seconds qwen3-4b 3 "$lengths" "$1")" --model "$weights" --seq-lens "$lengths" --chunk T/3 \
        --logits-chunk 100 --contenders "$1"
}
table2() { # contenders; the paper's times at batch 1 are those of its Table 1 at 12k
    provide qwen3-4b || return
    for batch in $(awk -F, '$1 == "table2_seconds_per_sample" { sub("batch ", "", $3); print $3 }' $PAPER_TABLES); do
        compare "table2-$batch" "$(compare_seconds qwen3-4b $((2 * batch)) 12000 "$1")" --model "$weights" --seq-lens 12000 --batch "$batch" \
            --repeat 2 --chunk T/3 --logits-chunk 100 --contenders "$1"
    done
}
figure3() { # contenders; some points of the paper's curve, whose end is for `longest`
    lengths=$(awk -F, -v m="$MODEL" '$1 == m && $2 == "stream" && $3 < 66000 && n++ % 3 == 0 { print $3 }' scripts/paper/fig3_bp_memory.csv | paste -sd ,)
    [ -n "$lengths" ] || { say "gpu_evidence.sh: MODEL=$MODEL is not in Figure 3; qwen3-8b and qwen3-14b are" && exit 2; }
    provide "$MODEL" && compare "fig3-$MODEL" "$(compare_seconds "$MODEL" 2 "$lengths" "$1")" --model "$weights" --seq-lens "$lengths" --repeat 2 \
        $PAPER_CHUNKS --memory-limit "$MEMORY" --contenders "$1"
}

case $part in
build | speed-*) ;;
*) probe ;;
esac
case $part in
build)
    for precision in $PRECISIONS; do
        try "program, $precision" 150 make -j "$(nproc)" BACKEND=cuda PRECISION="$precision" ARCHS="$ARCHS"
    done
    for name in $TESTS; do # they add up in one file
        cp "$store"/test-*.json "$out" 2>/dev/null
        try "tests: $name" 60 make BACKEND=cuda ARCHS="$ARCHS" PARTS="$(for precision in $PRECISIONS; do echo "$name/$precision"; done | paste -sd ' ')" \
            LIMIT="$(left)" RESULTS="$(cd "$out" && pwd)" test-gpu
        cp "$out"/test-*.json "$store" 2>/dev/null
    done
    ;;
speed-32k) speed 32768 5 5 --profile checkpoint ;;
speed-128k) speed 131072 3 2 '' '' ;;
peers-2k-64k) peers "${LENGTHS:-2048,4096,8192,16384,32768,65536}" "${CONTENDERS:-$everyone}" ;;
longest) longest "${CONTENDERS:-stream,hf-chunked,paper}" ;;
chunks)
    chunks=512,1024,2048,4096,8192
    provide "$MODEL" && compare chunks "$(compare_seconds "$MODEL" 3 32768 stream,stream,stream,stream,stream,stream)" --model "$weights" \
        --seq-lens 32768 --contenders stream --chunks $chunks
    ;;
table1) table1 "${CONTENDERS:-stream,checkpoint,paper}" ;;
table2) table2 "${CONTENDERS:-stream,checkpoint,paper}" ;;
figure3) figure3 "${CONTENDERS:-stream,checkpoint,paper}" ;;
esac

close
