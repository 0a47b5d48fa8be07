#!/bin/sh
# Trains a model with a state (weights, gradients, moments) of twice the memory limit, then once more without a limit:
# scripts/low_memory.sh [FOLDER [STEPS]]. A control group sets the limit, so the page cache counts. All that exceeds it lies in files in
# FOLDER, which must be on a local disk; both runs must end in the same bits.
#
# Needs a control group with a memory limit: systemd-run (as root, or a user with a systemd session), else a group below the
# shell's own. That needs root and control groups of version 1, or version 2 with the memory controller delegated.
# Environment: TRAIN, MODEL (--init), TOKENS (of a sequence), DATA, PLACES (options that override the planner).
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
MODEL=${MODEL:-qwen3,hidden_size=512,intermediate_size=1408,num_hidden_layers=20,num_attention_heads=8,num_key_value_heads=4,head_dim=64,vocab_size=4096}
TOKENS=${TOKENS:-512}
DATA=${DATA:-test/golden/tokens_uint16.bin}
folder=${1:-.} steps=${2:-3}
work=$(mktemp -d "$folder/streambp-low-memory-XXXXXX")
group=
finish() {
    [ -z "$group" ] || rmdir "$group" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---- a control group ------------------------------------------------------------------------------------------------------------
# Creates a group of version 1 or 2 with this limit and sets `group` to its folder; fails if it cannot.
make_group() {
    name=streambp-low-memory-$$
    below() { mkdir "$1/$name" 2>/dev/null && group=$1/$name; }
    first=$(awk '$(NF - 2) == "cgroup" && $NF ~ /(^|,)memory(,|$)/ { print $5; exit }' /proc/self/mountinfo)
    second=$(awk '$(NF - 2) == "cgroup2" { print $5; exit }' /proc/self/mountinfo)
    own=$(sed -n 's/^[0-9]*:\([^:]*,\)*memory\(,[^:]*\)*:\(.*\)/\3/p' /proc/self/cgroup)
    if [ -n "$first" ] && { below "$first$own" || below "$first"; }; then
        # if the kernel counts swap, the limit covers memory and swap together
        echo "$1" >"$group/memory.limit_in_bytes" && { echo "$1" >"$group/memory.memsw.limit_in_bytes"; } 2>/dev/null || true
        return 0
    fi
    own=$(sed -n 's/^0:://p' /proc/self/cgroup)
    for at in "$second$own" "$second${own%/*}"; do # a group with processes has no controllers for groups below it
        [ -n "$second" ] && below "$at" || continue
        if [ -e "$group/memory.max" ] && echo "$1" >"$group/memory.max"; then
            echo 0 >"$group/memory.swap.max" 2>/dev/null || true
            return 0
        fi
        rmdir "$group" && group=
    done
    return 1
}
# limited BYTES command...: runs the command in a new group; sets peak to the group's maximum memory, including the page cache
limited() {
    bytes=$1
    shift
    user=$([ "$(id -u)" = 0 ] || echo --user)
    if timeout 10 systemd-run $user --scope --quiet true >/dev/null 2>&1; then
        systemd-run $user --scope --quiet -p MemoryMax="$bytes" -p MemorySwapMax=0 \
            sh -c '"$@"; status=$?; cat /sys/fs/cgroup$(sed -n "s/^0:://p" /proc/self/cgroup)/memory.peak >'"$work/peak"' 2>/dev/null; exit $status' - "$@"
        return
    fi
    [ -n "$group" ] || make_group "$bytes" || {
        echo "No control group with a limit of memory can be made here: run this as root, or where systemd-run --user --scope works." >&2
        exit 2
    }
    status=0
    sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' - "$group" "$@" || status=$?
    cat "$group/memory.peak" "$group/memory.max_usage_in_bytes" 2>/dev/null >"$work/peak" || true
    return $status
}
mib() { echo "$1" | awk '{ printf "%.0f MiB", $1 / 1048576 }'; }
sums() { (cd "$1" && cksum checkpoint-*/model.bin checkpoint-*/optimizer.bin); }

# ---- the runs -------------------------------------------------------------------------------------------------------------------
run="train --init $MODEL --data $DATA --seq-len $TOKENS --steps $steps --schedule constant --chunk 256 --logits-chunk 256"
plan=$("$TRAIN" plan ${run#train} $ON_DEVICE --json --quiet)
number() { echo "$plan" | json_number "$1"; }
state=$(($(number weights) + $(number gradients) + $(number optimizer)))
limit=$((state / 2))
echo "state    $(mib $state) of weights, gradients and moments; $(mib "$(number total_bytes)") are needed if all tensors are in memory"
echo "limit    $(mib $limit), including the page cache"

echo "refused  with all tensors in memory:"
limited $limit "$TRAIN" $run $ON_DEVICE --out "$work/refused" >"$work/out" 2>&1 && { echo "         but it was not refused" && exit 1; }
grep '^train: ' "$work/out" | sed 's/^/         /'

places=${PLACES:-}
echo "run      --disk $folder${places:+ $places}"
begin=$(date +%s)
limited $limit "$TRAIN" $run $places --disk "$work" --out "$work/limited" >"$work/out" 2>&1 || { echo "failed   with exit status $?" && tail -n 3 "$work/out" && exit 1; }
taken=$(($(date +%s) - begin))
grep -E '^(memory|step)' "$work/out"
[ ! -s "$work/peak" ] || echo "peak     $(mib "$(head -n 1 "$work/peak")") in memory, $taken s"
begin=$(date +%s)
"$TRAIN" $run $ON_DEVICE --out "$work/unlimited" >"$work/out" 2>&1 || { echo "failed   with exit status $?" && tail -n 3 "$work/out" && exit 1; }
echo "compare  all in memory, without a limit: $(($(date +%s) - begin)) s"
sums "$work/limited" >"$work/a"
sums "$work/unlimited" >"$work/b"
cmp -s "$work/a" "$work/b" || { echo "the runs ended in OTHER BITS" && diff "$work/a" "$work/b" && exit 1; }
echo "same     weights and moments of both runs, bit by bit: $(awk '{ sub(".*/", "", $3); printf "%s%s %s", (NR > 1 ? ", " : ""), $3, $1 }' "$work/a")"
