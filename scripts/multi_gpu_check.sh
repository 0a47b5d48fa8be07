#!/bin/sh
# Checks several GPUs of one machine together: scripts/multi_gpu_check.sh [--dry-run] [PART ...]; without a PART it runs all parts.
#
#   correctness   `bp` on every GPU, for each ZeRO stage and each way of sharing streams, against one GPU: loss, gradient norm;
#                 two steps of `train --sp auto`, whose groups have every size, against one GPU: loss
#   bandwidth     the collectives through our ops (dev/collectives.c), and nccl-tests if installed
#   scaling       tokens/s of `bp` on 1, 2, 4, ... GPUs: with equal tokens for each GPU; then for one sequence that they share (--sp)
#
# Prints tables and writes dev/results/multi-<device>-<date>.json; exit status 1 if something is wrong. --dry-run prints the
# commands. A build for the CPU is checked in the same way: BUILD=build/cpu-fp32 RANKS=2, with a small MODEL.
#
# Variables: RANKS, processes (all GPUs); BUILD (build/cuda-bf16: made if missing); NCCL_TESTS, the folder of nccl-tests'
# programs; RESULTS, another folder. Shapes: MODEL and SEQ_LEN of the scaling, CHECK_MODEL and CHECK_SEQ_LEN of the correctness,
# ZERO, the scaling's stage; MOST_MIB, the largest message; REPEATS of a pass.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/common.sh
BUILD=${BUILD:-build/cuda-bf16}
RANKS=${RANKS:-$(gpus_here)}
RESULTS=${RESULTS:-dev/results}
MODEL=${MODEL:-qwen3-8b} SEQ_LEN=${SEQ_LEN:-32768} ZERO=${ZERO:-3} MOST_MIB=${MOST_MIB:-512} REPEATS=${REPEATS:-3}
CHECK_MODEL=${CHECK_MODEL:-llama,hidden_size=256,intermediate_size=704,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,vocab_size=2048}
CHECK_SEQ_LEN=${CHECK_SEQ_LEN:-1024}

dry= parts=
for part; do
    case $part in
    --dry-run) dry=yes ;;
    correctness | bandwidth | scaling) parts="$parts $part" ;;
    *) echo "multi_gpu_check.sh: $part is not a part; the parts are correctness, bandwidth, scaling" >&2; exit 2 ;;
    esac
done
parts=${parts:- correctness bandwidth scaling}
selected() { case "$parts " in *" $1 "*) return 0 ;; esac; return 1; }
stop() { echo "multi_gpu_check.sh: $1" >&2; exit 1; }

case $RANKS in '' | 0 | *[!0-9]*) stop 'no GPU was found (nvidia-smi lists none); RANKS=<processes> BUILD=build/cpu-fp32 checks a CPU build' ;; esac
[ "$RANKS" -gt 1 ] || stop 'there is one GPU; this is about several'
command -v mpirun >/dev/null || stop 'there is no mpirun; install it (Debian, Ubuntu: openmpi-bin libopenmpi-dev)'
[ -n "$dry" ] || $(launcher "$RANKS") true || stop 'mpirun starts no processes here; it has said why'
case $BUILD in *cuda-*) backend=cuda ;; *) backend=cpu ;; esac
case $BUILD in *bf16*) precision=bf16 loss_bound=2e-3 norm_bound=2e-2 ;; *) precision=fp32 loss_bound=1e-5 norm_bound=1e-4 ;; esac
[ -n "$dry" ] || ${MAKE:-make} --no-print-directory BACKEND=$backend PRECISION=$precision BUILD="$BUILD" "$BUILD/train" "$BUILD/collectives" >&2 ||
    stop "$BUILD does not build"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for part in correctness bandwidth scaling; do : >"$folder/$part"; done
wrong() { # reports a fault, and remembers it in subshells, too
    echo "WRONG: $1" >&2
    : >"$folder/wrong"
}
# ranks_run RANKS COMMAND...: runs the command; with --dry-run prints it on standard error
ranks_run() {
    if [ "$1" -gt 1 ]; then
        OMP_NUM_THREADS=$(threads_each "$1")
        words=$(launcher "$1")
        shift
        set -- $words "$@"
    else
        OMP_NUM_THREADS=$(threads_each 1)
        shift
    fi
    export OMP_NUM_THREADS
    [ -z "$dry" ] || { echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $*" >&2; return 1; }
    "$@" </dev/null
}
# pass RANKS VERB OPTIONS...: runs a pass and sets $json; fails with a line if it does not run or has another number of ranks
pass() {
    pass_ranks=$1
    shift
    json=$(ranks_run "$pass_ranks" "$BUILD/train" "$@" --json --quiet)
    case $?$dry in 0) ;; *yes) return 1 ;; *) wrong "on $pass_ranks ranks: $*"; return 1 ;; esac
    [ "$pass_ranks" = 1 ] || [ "$(number ranks)" = "$pass_ranks" ] ||
        { wrong "$1 on $pass_ranks ranks says that it ran on '$(number ranks)' ranks: $*"; return 1; }
}
number() { echo "$json" | tr '\n' ' ' | json_number "$1"; }
sent() { # prints the bytes that a rank has sent in the pass, of all kinds
    echo "$json" | tr '\n' ' ' | sed -n 's/.*"sent": {\([^}]*\)}.*/\1/p' | tr ',' '\n' | awk -F: '{ sum += $2 } END { printf "%.0f", sum }'
}
table() { [ -n "$dry" ] || printf "$@"; } # format, cells
calculate() { awk "BEGIN { printf \"%.${2:-4}f\", $1 }"; }
apart() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; if (d < 0) d = -d; if (b < 0) b = -b; printf "%.1e", b ? d / b : d }'; } # the relative difference
within() { awk -v a="$1" -v bound="$2" 'BEGIN { exit !(a + 0 <= bound + 0) }'; }
entry() { printf '%s\n' "$2" >>"$folder/$1"; } # part, JSON object
powers() { # 1, 2, 4, ... and the last: $1
    n=1
    while [ $n -lt "$1" ]; do echo $n; n=$((2 * n)); done
    echo "$1"
}

# ---- correctness: one command line, on one GPU and on all GPUs ---------------------------------------------------------------------------
correctness() {
    set -- bp --init "$CHECK_MODEL" --seq-len "$CHECK_SEQ_LEN" --batch "$RANKS" --grad-accum 2 --chunk $((CHECK_SEQ_LEN / 4 + 1))
    pass 1 "$@" || [ -n "$dry" ] || return
    one_loss=$(number loss) one_norm=$(number grad_norm)
    table '\n%-22s %12s %12s %10s %10s %14s\n' 'correctness' loss 'grad norm' 'loss off' 'norm off' 'bytes sent'
    table '%-22s %12s %12s\n' '1 process' "$one_loss" "$one_norm"
    for sp in $(powers "$RANKS"); do
        [ $((RANKS % sp)) = 0 ] || continue
        for zero in 0 1 2 3; do
            pass "$RANKS" "$@" --zero $zero --sp "$sp" || continue
            loss_off=$(apart "$(number loss)" "$one_loss") norm_off=$(apart "$(number grad_norm)" "$one_norm")
            table '%-22s %12s %12s %10s %10s %14s\n' "$RANKS, zero $zero, sp $sp" "$(number loss)" "$(number grad_norm)" "$loss_off" "$norm_off" "$(sent)"
            ok=true
            within "$loss_off" $loss_bound && within "$norm_off" $norm_bound || { ok=false; wrong "zero $zero, sp $sp: not the result of one process"; }
            entry correctness "{\"ranks\": $RANKS, \"zero\": $zero, \"sp\": $sp, \"loss_off\": $loss_off, \"norm_off\": $norm_off, \"sent_bytes\": $(sent), \"ok\": $ok}"
        done
    done
    dealt
}
dealt() { # deals documents of many lengths, the longest as long as a sequence
    [ -n "$dry" ] || ${CC:-cc} -D_GNU_SOURCE -O1 -I. test/data/make_documents.c -lm -o "$folder/make_documents" || { wrong 'make_documents does not build'; return; }
    [ -n "$dry" ] || "$folder/make_documents" "$folder/documents.bin" 32 "$(awk -v n=$((8 * RANKS)) -v T="$CHECK_SEQ_LEN" 'BEGIN { for (i = 0; i < n; i++) printf "%s%d", i ? "," : "", T / (1 + i % 8 * i % 64) + 1 }')"
    set -- train --init "$CHECK_MODEL" --data "$folder/documents.bin" --seq-len "$CHECK_SEQ_LEN" --samples $((4 * RANKS)) --steps 2 --out none
    pass 1 "$@" || [ -n "$dry" ] || return
    one_loss=$(number loss)
    for zero in 0 1 2 3; do
        pass "$RANKS" "$@" --zero $zero --sp auto || continue
        loss_off=$(apart "$(number loss)" "$one_loss") ok=true
        table '%-22s %12s %12s %10s\n' "$RANKS, zero $zero, sp auto" "$(number loss)" - "$loss_off"
        within "$loss_off" $loss_bound || { ok=false; wrong "zero $zero, sp auto: not the result of one process"; }
        entry correctness "{\"ranks\": $RANKS, \"zero\": $zero, \"sp\": \"auto\", \"loss_off\": $loss_off, \"ok\": $ok}"
    done
}

# ---- bandwidth: GB/s that a rank sends --------------------------------------------------------------------------------------------------
# nccl_test OP: prints "bytes GB/s" of nccl-tests' in-place runs (the bus bandwidth, the last but one column), or nothing without nccl-tests
nccl_test() {
    case $1 in reduce_scatter) program=reduce_scatter_perf ;; all_gather) program=all_gather_perf ;; *) program=sendrecv_perf ;; esac
    program=$(command -v "${NCCL_TESTS:+$NCCL_TESTS/}$program") || return 0
    ranks_run 1 "$program" -b 64K -e "${MOST_MIB}M" -f 8 -g "$RANKS" | awk '$1 ~ /^[0-9]+$/ && NF >= 12 { print $1, $(NF - 1) }'
}
bandwidth() {
    if ! ranks_run "$RANKS" "$BUILD/collectives" "$MOST_MIB" >"$folder/ours"; then
        [ -n "$dry" ] || wrong "$BUILD/collectives $MOST_MIB"
        [ -n "$dry" ] || return
    fi
    table '\n%-16s %12s %12s %10s %12s %8s\n' bandwidth bytes us 'GB/s' nccl-tests share
    for op in reduce_scatter all_gather exchange; do
        : >"$folder/theirs"
        [ $backend = cpu ] || nccl_test $op >"$folder/theirs"
        [ -s "$folder/theirs" ] || : >"$folder/no_nccl_tests"
        awk -v op=$op '$1 == op { print $2, $3, $4 }' "$folder/ours" >"$folder/rows"
        while read -r bytes us rate; do
            theirs=$(awk -v n="$bytes" '$1 == n { print $2 }' "$folder/theirs")
            share=$([ -z "$theirs" ] || calculate "$rate / ($theirs + 1e-9)" 2)
            table '%-16s %12s %12s %10s %12s %8s\n' $op "$bytes" "$us" "$rate" "${theirs:--}" "${share:--}"
            entry bandwidth "{\"op\": \"$op\", \"bytes\": $bytes, \"us\": $us, \"gb_per_s\": $rate, \"nccl_tests_gb_per_s\": ${theirs:-null}}"
        done <"$folder/rows"
    done
    [ ! -e "$folder/no_nccl_tests" ] || [ $backend = cpu ] || [ -n "$dry" ] ||
        echo 'nccl-tests is not here, or lacks programs (github.com/NVIDIA/nccl-tests; NCCL_TESTS=<its build folder>): nothing to compare the table with'
}

# ---- scaling ----------------------------------------------------------------------------------------------------------------------------
# scaling_row KIND RANKS OPTIONS...: efficiency is the rate of each process over the rate of a single process
scaling_row() {
    kind=$1 n=$2
    shift 2
    pass "$n" bp --init "$MODEL" --repeat "$REPEATS" "$@" || return
    rate=$(calculate "$(number tokens) / $(number seconds)" 1)
    [ "$n" != 1 ] || one_rate=$rate
    efficiency=$([ -z "${one_rate:-}" ] || calculate "$rate / $n / $one_rate" 3)
    bytes=$([ "$n" = 1 ] && echo 0 || sent)
    sending=$(calculate "$bytes / $(number seconds) / 1e9" 2)
    table '%-16s %6s %12s %10s %12s %10s %12s\n' "$kind" "$n" "$(number tokens)" "$(number seconds)" "$rate" "${efficiency:--}" "$sending"
    entry scaling "{\"kind\": \"$kind\", \"ranks\": $n, \"tokens\": $(number tokens), \"seconds\": $(number seconds), \"tokens_per_s\": $rate, \"efficiency\": ${efficiency:-null}, \"sent_bytes\": $bytes, \"peak_bytes\": $(number peak_bytes)}"
}
scaling() {
    table '\n%-16s %6s %12s %10s %12s %10s %12s\n' scaling ranks tokens seconds tokens/s efficiency 'sent GB/s'
    one_rate=
    for n in $(powers "$RANKS"); do
        scaling_row 'more streams' "$n" --seq-len "$SEQ_LEN" --batch "$n" --zero "$([ "$n" = 1 ] && echo 0 || echo "$ZERO")"
    done
    one_rate=
    for n in $(powers "$RANKS"); do
        scaling_row 'shared stream' "$n" --seq-len "$SEQ_LEN" --batch 1 --sp "$n" --zero "$([ "$n" = 1 ] && echo 0 || echo "$ZERO")"
    done
}

for part in correctness bandwidth scaling; do selected $part && $part; done
[ -z "$dry" ] || exit 0

# ---- the file ---------------------------------------------------------------------------------------------------------------------------
device=$([ $backend = cpu ] && echo CPU || nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
file=$RESULTS/multi-$(slug "$device")-$(date -u +%Y-%m-%d).json
objects() { sed '$!s/$/,/' "$folder/$1"; }
mkdir -p "$RESULTS"
cat >"$folder/json" <<END
{"kind": "multi-gpu", "device": "$device", "ranks": $RANKS, "precision": "$precision", "date": "$(date -u +%Y-%m-%dT%H:%M:%SZ)", "commit": "$(commit_here)",
 "parts": "$(echo $parts)", "all_right": $([ -e "$folder/wrong" ] && echo false || echo true),
 "model": "$MODEL", "seq_len": $SEQ_LEN, "zero": $ZERO, "check_model": "$CHECK_MODEL", "check_seq_len": $CHECK_SEQ_LEN,
 "correctness": [$(objects correctness)],
 "bandwidth": [$(objects bandwidth)],
 "scaling": [$(objects scaling)]}
END
cp "$folder/json" "$file"
echo
echo "written: $file"
[ ! -e "$folder/wrong" ]
