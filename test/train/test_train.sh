#!/bin/sh
# Training as a user runs it: it learns, resumes to the bit after kill -9 at any moment, keeps to its plan, allocates
# nothing after the first step. It stops at non-finite values with the last good checkpoint intact. $TRAIN is a
# sanitized program, $TRAIN_PLAIN one as `make` builds it (for measured memory).
. test/cli.sh
same_loss=1e-6 same_gradient=1e-5 # relative differences between orders of one sum
[ $TEST_PRECISION = bf16 ] && same_loss=2e-3 same_gradient=2e-2
beside=48 # MiB in use outside the plan
[ $TEST_DEVICE = gpu ] && beside=300

common="--init $TINY --data $SHARD --val-data $SHARD --val-steps 2 --val-every 5 --seq-len 64 --batch 2 --grad-accum 2
    --steps 12 --lr 1e-2 --warmup 3 --chunk 24 --logits-chunk 20 --save-every 2 --keep-checkpoints 3 --seed 7
    --sample-every 5 --prompt-ids 1,2,3 --max-new-tokens 8"

# ---- a run, without any allocation of ours after the first step -----------------------------------------------------------
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
succeeds train $common --out "$WORK/straight" --json
says err "^note: $SHARD of --val-data is also in --data, so " '^note: --lr 0.01 is 33.3 times --lr auto, which is 0.0003 here; '
check 'the end: validations, and what to type next' [ "$(tail -n 5 "$WORK/err" | sed 's/[0-9.]* \(s\|tok\|[KM]iB\)\b/N \1/g; s/[0-9]\.[0-9]*/N/g; s/step [0-9]*)/step N)/')" = \
    "ended    step 12 of 12 after N s, 3072 tokens, N tok/s, memory at most N MiB with libraries
validation  loss N at first, N at best (step N), N at last
saved    $WORK/straight
try it   $TRAIN sample --model $WORK/straight --prompt-ids 1,2,3
export   $TRAIN convert --model $WORK/straight --out $WORK/straight-hf" ]
next_works err
sed -i '/^note/d; /^try it/,$d' "$WORK/err"
check 'a header of three lines' [ "$(head -n 3 "$WORK/err" | sed 's/ .*//' | tr '\n' ' ')" = 'model data memory ' ]
check 'lines of at most 120 columns' [ "$(grep -cE '^.{121}' "$WORK/err")" = 0 ]
check 'step lines below each other' [ "$(grep -oE '^step .*  loss |^step .*  norm ' "$WORK/err" | awk '{ print length }' | sort -u | wc -l)" = 1 ]
check 'it learns' awk -v l="$(json loss)" 'BEGIN { exit !(l != "" && l < 4.2) }'
check 'the last three checkpoints are kept' [ "$(ls "$WORK/straight" | grep -c checkpoint)" = 3 ]
check 'a record for every step' [ "$(grep -c '"loss"' "$WORK/straight/log.jsonl")" = 12 ]
check 'a record of the options' [ "$(grep -c '^{"step": 1, "version": .*"seq_len": 64' "$WORK/straight/log.jsonl")" = 1 ]
refuses 1 'holds (a|an earlier) run' train $common --out "$WORK/straight"
refuses 1 'checkpoint-00000012: is a checkpoint of a run' train $common --out "$WORK/straight/checkpoint-00000012"
unset STREAMBP_ALLOCATION_GUARD

# ---- kill -9 once a checkpoint exists, resumed until the end: the same bits, whatever a part keeps, in any place ------------
kills=0 tries=0 keeping='--keep attention --keep-on host --optimizer disk --disk build --update forward'
while [ $tries -lt 4 ] && ! [ -f "$WORK/killed/checkpoint-00000012/DONE" ]; do
    tries=$((tries + 1))
    "$TRAIN" train $common --out "$WORK/killed" $([ ! -e "$WORK/killed" ] || echo --resume) $([ $((tries % 2)) = 0 ] || echo $keeping) >"$WORK/out" 2>"$WORK/err" &
    process=$!
    while kill -0 $process 2>/dev/null && ! [ -e "$WORK/killed/checkpoint-0000000$((2 * tries))" ]; do sleep 0.01; done
    kill -9 $process 2>/dev/null && kills=$((kills + 1))
    wait $process 2>/dev/null || [ $? = 137 ] || fail "a resumed run ended with an error: $(tail -n 1 "$WORK/err")"
done
succeeds train $common --out "$WORK/killed" --resume $keeping --json
bytes=4
[ $TEST_PRECISION = bf16 ] && bytes=2
check 'what it keeps in host memory is told' [ "$(json host_bytes)" = $((2 * 128 * 4 * (8 * bytes + 4) + (16 << 20))) ] # the last: what passes to a disk
echo "killed $kills times"
check 'it was killed at least once' [ $kills -gt 0 ]
check 'after kill -9 the run ends in the same bits' same_run "$WORK/straight" "$WORK/killed" 12
check 'a record of the options for each part of the run of which steps are left, 7 at most' \
    awk '/"options"/ { n++ } END { exit !(n >= 1 && n <= 7) }' "$WORK/killed/log.jsonl"
check 'no half checkpoint is left' [ -z "$(ls "$WORK/killed" | grep -E 'partial|removed|tmp')" ]
refuses 1 'seq-len' train $(echo $common | sed 's/--seq-len 64/--seq-len 32/') --out "$WORK/killed" --resume
refuses 1 'AdamW|learning rate|--lr' train $(echo $common | sed 's/--lr 1e-2/--lr 2e-2/') --out "$WORK/killed" --resume

# ---- other chunks than those that a run began with: other bits --------------------------------------------------------------------
succeeds train --init $TINY --data $SHARD --seq-len 1040 --steps 1 --out "$WORK/chunks" --quiet
succeeds train --data $SHARD --seq-len 1040 --steps 2 --out "$WORK/chunks" --resume --chunk 512 --quiet
says err '^note: --chunk was [0-9]* until .* with other bits'

# ---- a part of it, then the rest; other data under the same names; ended by a signal -------------------------------------------
cp $SHARD "$WORK/shard.bin"
parts="--init $TINY --data $WORK/shard.bin --seq-len 64 --lr 1e-2 --schedule constant --out $WORK/parts --deterministic off"
succeeds train $parts --steps 4
succeeds train --epochs 0.09375 --out "$WORK/parts" --resume # 6 of 64 sequences
check 'notes of its beginning are not repeated' [ "$(grep '^note: ' "$WORK/err")" = "note: --resume: takes the options of $WORK/parts that are not given here" ]
check 'a share of an epoch as steps' [ -d "$WORK/parts/checkpoint-00000006" ]
check 'a record of the options for each of two parts' \
    [ "$(sed -n 's/^\({"step": [0-9]*\), "version".*"steps": "\{0,1\}\([0-9a-z]*\).*/\1 of \2/p' "$WORK/parts/log.jsonl" | tr '\n' ' ')" = \
    '{"step": 1 of 4 {"step": 5 of epoch ' ]
for steps in 1 2; do # the default learning rate, which a resumed run keeps though it starts from a model
    succeeds train $([ $steps = 2 ] && echo --resume || echo --init $TINY) --data $SHARD --seq-len 64 --schedule constant \
        --steps $steps --out "$WORK/rate"
    says out "^data .*, lr 0.0003 ($([ $steps = 2 ] && echo as it began || echo auto)), $steps step"
done
check 'it is logged as a number' [ "$(grep -c '"options": .*"lr": 0.0003,' "$WORK/rate/log.jsonl")" = 2 ]
printf '\001' | dd of="$WORK/shard.bin" bs=1 seek=1024 conv=notrunc 2>/dev/null # its first token
refuses 1 'was trained on .*/shard.bin, which holds other data now' train $parts --steps 8 --resume
for signal in INT TERM HUP; do
    # env: a shell makes background commands ignore SIGINT, nohup SIGHUP; env resets that
    env --default-signal=INT,TERM,HUP "$TRAIN" train --init $TINY --data $SHARD --seq-len 64 --steps 100000 --save-every 1 \
        --out "$WORK/ended-$signal" >/dev/null 2>"$WORK/err" &
    process=$!
    # any checkpoint: on a fast machine a given one may be pruned between two looks
    while kill -0 $process 2>/dev/null && ! ls -d "$WORK/ended-$signal"/checkpoint-* >/dev/null 2>&1; do sleep 0.05; done
    kill -$signal $process
    wait $process
    status=$?
    check "SIG$signal ends a run as it always does, not with exit $status" [ "$(kill -l $status)" = $signal ]
    check "SIG$signal leaves nothing half written" [ -z "$(find "$WORK/ended-$signal" -name '*partial*' -o -name '*tmp')" ]
done
succeeds train --init $TINY --data $SHARD --seq-len 16 --steps 7 --warmup 8 --out none --logging-steps 3
says err '^note: --warmup 8 is more than the run.s 7 steps, so '
check 'lines of a third of its steps, of the first and the last' [ "$(sed -n 's/^step \([0-9]\).7  loss .*/\1/p' "$WORK/out" | xargs)" = '1 3 6 7' ]
refuses 2 "logging-steps is '0.5', it must be " train --init $TINY --data $SHARD --logging-steps 0.5
for warmup in '--warmup 2' '--warmup-ratio 0.4'; do # of 4 steps, rounded up
    succeeds train --init $TINY --data $SHARD --seq-len 16 --steps 4 --out "$WORK/w" --overwrite $warmup
    check "$warmup: half of the rate at the first step" grep -q '^{"step": 1, .*"lr": 0.00015, ' "$WORK/w/log.jsonl"
done

# ---- chunk-major orders: places are free, draws depend on the run's seed ---------------------------------------------------------
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
orders="--init $TINY --data $SHARD --seq-len 64 --batch 2 --grad-accum 2 --lr 1e-2 --schedule constant --chunk 24 --logits-chunk 20"
sparse="$orders --method spaco --keep-chunks 0.5"
in_two_parts sparse 4 '--weights host --inputs host --update forward' $sparse
for other in "${sparse%0.5}0.25" "$orders --method seco"; do
    refuses 1 'was trained with --keep-chunks 0.5, now it is ' train $other --steps 6 --out "$WORK/sparse-parts" --resume
    check 'and no note says that it goes on' [ -z "$(grep '^note: --method' "$WORK/err")" ]
done
check 'the log says what is kept' grep -q '"method": "spaco", "keep_chunks": 0.5' "$WORK/sparse/log.jsonl"
refuses 2 'unknown option --draw' train $sparse --draw fixed --steps 1 --out none
for method in stream mst seco; do
    succeeds train $orders --steps 4 --out "$WORK/order-$method" --method $method --json
    [ $method = stream ] && loss=$(json loss)
    check "$method trains as stream does" close "$(json loss)" "$loss" $same_loss
done
succeeds train $orders --steps 5 --out "$WORK/order-seco" --method auto --resume --memory-limit 1GiB --json
check 'auto keeps the order that the run began with' [ "$(json method)" = seco ]
says err '^memory .*; seco, chunk '
succeeds train --config "$WORK/order-seco" --steps 1 --out "$WORK/order-again"
unset STREAMBP_ALLOCATION_GUARD
succeeds bp --init $TINY --seq-len 64 --method spaco --keep-chunks 0.5
says out '^data     random tokens; sft, batches of 64 tokens (length 64, batch 1)$' '^memory .*; spaco with 0.5 of the chunks, chunk 64$'
refuses 2 'method spaco needs --keep-chunks Q' train $orders --method spaco
refuses 2 'keep-chunks belongs to --method spaco' train $orders --method seco --keep-chunks 0.5
refuses 2 'method seco keeps no layer inputs' train $orders --method seco --inputs-every 2

# ---- a checkpoint by commit 88e0adb: the rest of its run, within rounding --------------------------------------------------------
if [ $TEST_DEVICE-$TEST_PRECISION = cpu-fp32 ]; then # the type of its weights
    earlier=$GOLDEN/run-88e0adb # README.md there has the command; a checkpoint of step 4, the log of all 8 steps
    cp -r $earlier "$WORK/earlier"
    succeeds train --init $(echo $TINY | sed 's/=32/=16/; s/=48/=24/'),tie_word_embeddings=true --data $SHARD --val-data $SHARD \
        --val-steps 4 --val-every 2 --seq-len 64 --batch 2 --grad-accum 2 --shuffle on --steps 8 --warmup 2 --chunk 24 \
        --logits-chunk 20 --save-every 4 --seed 7 --out "$WORK/earlier" --resume
    check 'it goes on' [ -f "$WORK/earlier/checkpoint-00000008/DONE" ]
    logged() { grep -v '"options"' "$1/log.jsonl" | sed 's/, "\(val_\)\{0,1\}tokens".*//' | tr -s ' {}":,' '\n'; } # a word a line
    logged $earlier >"$WORK/expected"
    logged "$WORK/earlier" >"$WORK/found"
    far=$(paste -d' ' "$WORK/expected" "$WORK/found" | awk -v bound=$same_gradient '
        { d = $1 - $2; if ($1 != $2 && (d == 0 || d * d > (bound * $1) ^ 2)) print }
        END { if (NR < 80) print "only", NR, "words" }')
    check "losses, norms and learning rates are those of 88e0adb: $far" [ -z "$far" ]
fi

# ---- values that are not finite ---------------------------------------------------------------------------------------------------
refuses 1 'step [0-9]+.*(not finite|NaN|Inf|nan|inf).*last good checkpoint is step|tensor' \
    train --init $TINY --data $SHARD --seq-len 64 --steps 30 --lr 100 --any-lr --grad-clip 0 --schedule constant --weight-decay 90 \
    --epsilon 1e-30 --save-every 1 --out "$WORK/diverged"
last=$(ls "$WORK/diverged" | grep checkpoint | tail -n 1)
check 'the last checkpoint before is complete' [ -f "$WORK/diverged/$last/DONE" ]

# ---- a limit on address space is an error line ------------------------------------------------------------------------------------
# oneDNN and the OpenMP runtime die if an allocation of theirs is refused. Below 110,000 kB the loader may end the program.
if [ $TEST_DEVICE = cpu ]; then
    kilobytes=110000 refused=0 ran=0
    while [ $kilobytes -lt 230000 ]; do
        (ulimit -v $kilobytes && exec "$TRAIN_PLAIN" bp --init $TINY --seq-len 64 --threads 2) >"$WORK/out" 2>"$WORK/err"
        case $? in
        0) ran=$((ran + 1)) ;;
        1) refused=$((refused + $(grep -c '^train: ulimit -v or -d leaves .* of address space, .*; raise the limit, or give fewer --threads' "$WORK/err"))) ;;
        esac
        kilobytes=$((kilobytes + 8000))
    done
    check "every limit ends well: $ran passes, $refused refused" [ $((ran + refused)) = 15 -a $ran -gt 0 -a $refused -gt 0 ]
fi

# ---- so is a limit on stacks ------------------------------------------------------------------------------------------------------
if [ $TEST_DEVICE = cpu ]; then
    for kilobytes in 64 4000 4200; do
        (ulimit -s $kilobytes && exec "$TRAIN_PLAIN" plan --init $TINY --seq-len 64 --machine h100) >"$WORK/out" 2>"$WORK/err"
        check "a stack of $kilobytes KiB" [ $? = $((kilobytes < 4200)) ]
        [ $kilobytes = 4200 ] || says err '^train: the stack has .*, but 4.00 MiB are needed; type: ulimit -s 8192'
    done
    for kilobytes in 511 512; do
        OMP_STACKSIZE=$kilobytes "$TRAIN_PLAIN" bp --init $TINY --seq-len 64 --threads 2 >"$WORK/out" 2>"$WORK/err"
        check "a thread's stack of $kilobytes KiB" [ $? = $((kilobytes < 512)) ]
    done
fi

# ---- measured memory matches the plan ----------------------------------------------------------------------------------------------
big=llama,hidden_size=256,intermediate_size=704,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,vocab_size=4096
for options in '--seq-len 4096' '--seq-len 4096 --method checkpoint' '--seq-len 2048 --method full' \
    '--seq-len 8192 --chunk 512 --logits-chunk 128' '--seq-len 512 --batch 8 --chunk 300'; do
    "$TRAIN_PLAIN" plan --for bp --init $big $options --json >"$WORK/out" 2>/dev/null
    planned=$(json total_bytes)
    "$TRAIN_PLAIN" bp --init $big $options --json >"$WORK/out" 2>/dev/null
    peak=$(json peak_bytes)
    check "bp's plan is plan's: $options" [ "$(json plan_bytes)" = "$planned" ]
    check "peak $peak within 2 % + $beside MiB of plan $planned: $options" \
        awk -v p="$planned" -v m="$peak" -v b=$beside \
        'BEGIN { d = m - p; if (d < 0) d = -d; exit !(d <= 0.02 * p + b * 1048576) }'
done
finish
