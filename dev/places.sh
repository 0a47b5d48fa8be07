#!/bin/sh
# Time and memory of training steps with layer inputs and AdamW's state in host memory and on a disk, against all on the device:
# dev/places.sh [FOLDER]. Runs take turns, each with every place; prints the median of the ratios within a round.
# Environment: TRAIN, INIT, TOKENS, STEPS (of a run), ROUNDS. Close other programs first.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
INIT=${INIT:-qwen3-0.6b,num_hidden_layers=4}
TOKENS=${TOKENS:-8192}
STEPS=${STEPS:-2}
ROUNDS=${ROUNDS:-3}
folder=${1:-.}
work=$(mktemp -d "$folder/streambp-places-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
python3 - "$TOKENS" "$work/tokens.bin" <<'END'
import random, struct, sys
n = int(sys.argv[1]) + 1
random.seed(1)
with open(sys.argv[2], "wb") as file:  # a shard of llm.c
    file.write(struct.pack("<256i", 20240520, 1, n, *[0] * 253))
    file.write(struct.pack("<%dH" % n, *[random.randrange(4096) for i in range(n)]))
END
options() { # place of inputs and optimizer
    echo "--inputs $1 --inputs-every 1 --weights device --gradients device --optimizer $1"
    [ "$1" != disk ] || echo "--disk $work"
}
of() { json_number "$1" <"$work/$2.$3"; }
round=1
while [ "$round" -le "$ROUNDS" ]; do
    for place in $([ $((round % 2)) = 1 ] && echo device host disk || echo disk host device); do
        "$TRAIN" train --init "$INIT" --data "$work/tokens.bin" --seq-len "$TOKENS" --steps "$STEPS" --out none $(options $place) --json --quiet \
            >"$work/$place.$round"
    done
    for place in host disk; do
        echo "round $round: $place $(of seconds $place $round) $(of seconds device $round)" >&2
        echo "$(of seconds $place $round) $(of seconds device $round)" >>"$work/ratios.$place"
    done
    round=$((round + 1))
done
echo "$INIT, $TOKENS tokens, inputs and optimizer off-device: median of $ROUNDS ratios of $STEPS steps; measured beside planned memory"
for place in device host disk; do
    ratio=1
    [ $place = device ] || ratio=$(awk '{ print $1 / $2 }' "$work/ratios.$place" | median)
    awk -v place=$place -v ratio="$ratio" -v peak="$(of peak_bytes $place 1)" -v plan="$(of plan_bytes $place 1)" \
        -v host="$(of host_bytes $place 1)" -v disk="$(of disk_written_bytes $place 1)" 'BEGIN {
            all = plan + host; beside = peak - all
            printf "%-8s %.3f times, %.0f MiB planned on the device and %.0f in host memory, %+.0f MiB measured beside (at most %.0f); %.2f GB a step to disk\n",
                place, ratio, plan / 2 ^ 20, host / 2 ^ 20, beside / 2 ^ 20, 0.02 * all / 2 ^ 20 + 48, disk / 1e9
        }'
done
"$TRAIN" doctor --disk "$work" 2>/dev/null | sed -n "s/^[a-z]* *disk  */the disk: /p"
