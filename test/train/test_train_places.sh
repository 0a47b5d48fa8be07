#!/bin/sh
# Training from a disk: killed at random moments, resumed with other places, two runs in one folder, a folder that
# disappears, and folders that are missing or full. The bits equal an all-device run's, no file stays, and errors come
# before the first step, with the last checkpoint unchanged.
. test/cli.sh
DISK=build/disk-$$ # a folder on a disk: /tmp may be memory
mkdir -p $DISK
trap 'rm -rf "$WORK" $DISK' EXIT
wide=$(echo $TINY | sed 's/=32/=64/; s/=48/=72/') # has matrices of 4096 elements and more
common="--init $wide --moments int8 --data $SHARD --seq-len 64 --batch 2 --grad-accum 2 --steps 10 --lr 1e-2 --chunk 24 --logits-chunk 20
    --save-every 2 --keep-checkpoints 9 --seed 7"
disk="--weights disk --gradients disk --optimizer disk --inputs disk --keep attention --keep-on disk --disk $DISK"
host='--weights host --gradients host --optimizer host --inputs host --inputs-every 2'
nothing_stays() { [ -z "$(ls -A $DISK)" ]; }
begin() { "$TRAIN" train $common "$@" >"$WORK/out" 2>"$WORK/err" & process=$!; }
reaches() { # folder, step: waits for its checkpoint, or for the end of the run
    while kill -0 $process 2>/dev/null && ! [ -e "$1/checkpoint-$(printf %08d "$2")" ]; do sleep 0.01; done
}
succeeds train $common --inputs device --weights device --optimizer device --out "$WORK/straight"

# ---- two runs in one folder, which disappears ------------------------------------------------------------------------------------
begin $disk --out "$WORK/first"
"$TRAIN" train $common $disk --out "$WORK/second" >/dev/null 2>&1 &
second=$!
reaches "$WORK/first" 2
while kill -0 $second 2>/dev/null && ! [ -e "$WORK/second/checkpoint-00000002" ]; do sleep 0.01; done
check 'files have no names' nothing_stays
mv $DISK $DISK-gone
check 'a run whose folder goes away ends well' wait $process
check 'the other one, too' wait $second
mv $DISK-gone $DISK
check 'in the same bits' same_checkpoint "$WORK/straight" "$WORK/first" 10
check 'both of them' same_checkpoint "$WORK/straight" "$WORK/second" 10

# ---- killed at random moments, and resumed with other places -----------------------------------------------------------------------
kills=0
for step in 2 4 6 8; do
    [ $((step % 4)) = 0 ] && places=$host || places=$disk
    begin $places --out "$WORK/killed" $([ $step = 2 ] || echo --resume)
    reaches "$WORK/killed" $step
    sleep 0.0$((step % 3 * 3))
    kill -9 $process 2>/dev/null && kills=$((kills + 1))
    wait $process 2>/dev/null || [ $? = 137 ] || fail "a resumed run ended with an error: $(tail -n 1 "$WORK/err")"
    check "nothing stays of a run that was killed behind step $step" nothing_stays
done
check 'it was killed' [ $kills -gt 0 ]

# ---- a resumed run keeps the planner's choices that results depend on ----------------------------------------------------------------
windows=$(echo $TINY | sed 's/llama/gemma3/'),head_dim=8,sliding_window=9,layer_types=sf
for keep in none auto; do # auto alone would keep attention
    succeeds train --init $windows --data $SHARD --seq-len 50 --lr 1e-3 --keep $keep --out "$WORK/windows" --save-every 1 \
        $([ $keep = none ] && echo --chunk 7 --logits-chunk 9 --steps 1 || echo --steps 2 --resume)
done
check 'attention is not kept' [ -e "$WORK/windows/checkpoint-00000002/state.json" ]
check 'chunks are those that it began with' [ "$(grep -o '"--[a-z]*-*chunk": "[0-9]*"' "$WORK/windows/checkpoint-00000002/state.json" | paste -sd ' ')" = \
    '"--chunk": "7" "--logits-chunk": "9"' ]
check 'as it was not' [ -z "$(grep -- '"--keep": "attention"' "$WORK/windows/checkpoint-00000002/state.json")" ]

# Products of the last layer, whose keys have forward's bits: so after a resume without the option, on a disk too.
for part in whole begin go-on; do
    succeeds train --init $windows --data $SHARD --seq-len 50 --lr 1e-2 --out "$WORK/kept-$([ $part = whole ] && echo whole || echo parts)" \
        --save-every 1 --chunk 7 --logits-chunk 9 $([ $part = begin ] && echo --steps 1 || echo --steps 2) --schedule constant \
        $([ $part = go-on ] && echo --resume --keep-on disk --disk "$DISK" || echo --keep products=1)
done
check 'a resumed run keeps what it kept' cmp -s "$WORK/kept-whole/checkpoint-00000002/model.bin" "$WORK/kept-parts/checkpoint-00000002/model.bin"
check 'as it says' grep -q -- '"--keep": "products=1"' "$WORK/kept-parts/checkpoint-00000002/state.json"

# ---- a full or missing disk: one line before the first step, and the last checkpoint resumes -----------------------------------------
checkpoints() { ls "$WORK/killed" | grep -x 'checkpoint-[0-9]*'; } # without unfinished ones
left=$(checkpoints)
for folder in "$WORK/none:is not a folder" "Makefile:is not a folder" "/proc:disk space, but only 0 B are allowed|cannot be used"; do
    refuses 1 "${folder#*:}" train $common --out "$WORK/killed" --resume --optimizer disk --disk "${folder%%:*}"
done
refuses 1 'in disk space, but only 100.00 KiB are allowed' train $common --out "$WORK/killed" --resume $disk --disk-limit 100KiB
limited=$( (
    ulimit -f 128 # of 512 bytes; a refused run writes no longer file
    failed=0
    refuses 1 'in disk space, but only 64.00 KiB are allowed' train $common --out "$WORK/killed" --resume $disk
    echo "$failed"
) )
check "a limit on the size of files: $limited" [ "$limited" = 0 ]
check 'no half step' [ "$(checkpoints)" = "$left" ]
succeeds train $common --out "$WORK/killed" --resume $disk --inputs-every 2
check 'the run goes on to the same bits' same_checkpoint "$WORK/straight" "$WORK/killed" 10
check 'no half checkpoint is left' [ -z "$(ls "$WORK/killed" | grep -E 'partial|removed|tmp')" ]
check 'nothing stays' nothing_stays

# ---- a model with twice as much state as the allowed memory --------------------------------------------------------------------------
TRAIN=$TRAIN_PLAIN TOKENS=32 MODEL=$(echo $TINY | sed 's/=32/=256/; s/=48/=704/; s/layers=2/layers=24/; s/heads=4/heads=8/') \
    scripts/low_memory.sh $DISK 1 >"$WORK/out" 2>"$WORK/err"
case $? in
0) says out '^memory .*: .*optimizer 1[0-9][0-9].* MiB' '^same  .*model.bin [0-9]*, optimizer.bin [0-9]' ;;
2) skip 'a limit of memory' 'no control group with one can be made here' ;;
*) fail "low_memory.sh: $(tail -n 1 "$WORK/err") $(tail -n 3 "$WORK/out")" ;;
esac
check 'it leaves nothing' nothing_stays
finish
