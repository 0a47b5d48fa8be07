#!/bin/sh
# Runs stopped by a signal: exit code and message, no finished step lost, the same bits after resuming; what is dropped
# if a step outlasts --grace; and reusing a run's folder. $TRAIN is sanitized; ranks and large runs use $TRAIN_PLAIN.
. test/cli.sh
export OMP_NUM_THREADS=1
bare="--init $TINY --data $SHARD --lr 1e-2 --schedule constant" any="$bare --seq-len 64"
endless="$any --steps 100000 --log-every 1 --grace 60"

begin() { # arguments of train: starts a run in the background. The shell makes it ignore SIGINT; env resets that.
    : >"$WORK/out" >"$WORK/err"
    env --default-signal=INT,TERM,HUP,USR1 "$TRAIN" train "$@" >"$WORK/out" 2>"$WORK/err" &
    process=$!
}
until_true() { # command...: waits until it succeeds, for a minute at least
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 6000 ] && kill -0 $process 2>/dev/null || { fail "never: $*"; [ $process = $$ ] || kill -9 $process; return 1; }
        sleep 0.01
    done
}
until_step() { until_true grep -q "^step  *$1/.*  norm " "$WORK/out"; }
there() { ls -d "$1"/$2; } # folder, pattern
ends() { # exit code, pattern of the last words: the run ends so, and has saved every printed step
    { for _ in $(seq 300); do sleep 1; done; kill -9 $process; } >/dev/null 2>&1 & # an earlier failure must not wait for ever
    guard=$!
    wait $process
    status=$?
    kill $guard
    check "exit $1, not $status" [ $status = "$1" ]
    says err "$2"
    check 'no sanitizer report' [ "$(grep -cE 'Sanitizer|runtime error' "$WORK/err")" = 0 ]
}
last_step() { ls "$1" | sed -n 's/^checkpoint-0*\([0-9]*\)$/\1/p' | sort -n | tail -n 1; }
printed_step() { sed -n 's/^step  *\([0-9]*\)\/.*  norm .*/\1/p' "$WORK/out" | tail -n 1; }
same_as_straight() { # folder, arguments: its last checkpoint equals that of a run without a stop; its log has each step once
    folder=$1 step=$(last_step "$1") printed=$(printed_step)
    shift
    [ -n "$step" ] || { fail "$folder: no step is saved"; return; }
    check "step $printed was printed, $step is saved" [ "$step" -ge "${printed:-1}" ]
    succeeds train "$@" --steps "$step" --out "$WORK/straight" --overwrite --quiet
    name=checkpoint-$(printf %08d "$step")
    for file in model optimizer; do
        check "$file of $folder has the same bits" cmp -s "$folder/$name/$file.bin" "$WORK/straight/$name/$file.bin"
    done
    check 'one record of each step' [ "$(sed -n 's/^{"step": \([0-9]*\), "loss".*/\1/p' "$folder/log.jsonl" | xargs)" = "$(seq "$step" | xargs)" ]
}

# ---- each signal -----------------------------------------------------------------------------------------------------------------
for signal in INT-130 TERM-143 HUP-129 USR1-0; do
    begin $endless --out "$WORK/run-$signal"
    until_step 2 && kill -${signal%-*} $process
    ends "${signal#*-}" "^stopped by SIG${signal%-*} after step [0-9]* of 100000: it is saved in $WORK/run-$signal/checkpoint-[0-9]*$"
    says err '^go on with:'
    sed '1,/^go on with/d' "$WORK/err" >"$WORK/command-$signal"
    same_as_straight "$WORK/run-$signal" $any
done
step=$(($(last_step "$WORK/run-INT-130") + 2))
sed "s/$/ --steps $step/" "$WORK/command-INT-130" >"$WORK/command"
sh "$WORK/command" >"$WORK/out" 2>"$WORK/err" || fail 'the command that it printed does not go on'
check "it goes on to step $step" [ "$(last_step "$WORK/run-INT-130")" = $step ]
same_as_straight "$WORK/run-INT-130" $any

# ---- a step longer than --grace, a validation, a second signal ---------------------------------------------------------------------
long="$bare --grad-accum 400 --seq-len 16"
begin $long --steps 1000 --grace 0 --out "$WORK/given-up" --optimizer host --update forward
until_step 1 && sleep 0.1 && kill $process
ends 143 '^stopped by SIGTERM after step 1 of 1000 (step 2 did not end within --grace 0 s and is dropped): it is saved in '
same_as_straight "$WORK/given-up" $long
begin $bare --steps 1000 --grace 0 --val-data $SHARD --val-every 1 --seq-len 8 --out "$WORK/validation"
until_step 1 && kill $process
ends 143 '^stopped by SIGTERM after step 1 of 1000 (its validation did not end within --grace 0 s and is dropped): it is saved'
for part in 1 2; do succeeds train $bare --steps 1 --val-data $SHARD --val-every 1 --seq-len 8 --out "$WORK/validation" --resume --quiet; done
check 'its validation is made when it goes on, and has one record' [ "$(grep -c '^{"step": 1, "val_loss"' "$WORK/validation/log.jsonl")" = 1 ]
begin $bare --grad-accum 8000 --seq-len 16 --steps 2 --out "$WORK/twice" --verbose
until_true grep -q '^saving' "$WORK/out" && sleep 0.2 && kill -INT $process && until_true grep -q '^SIGINT: finishing this step' "$WORK/err" && sleep 0.15 && kill -INT $process
wait $process
check 'a second signal ends at once' [ $? = 130 -a -z "$(last_step "$WORK/twice")" -a "$(grep -c '^stopped' "$WORK/err")" = 0 ]

# ---- completions and their rewards -------------------------------------------------------------------------------------------------
make_documents "$WORK/prompts.bin" 96 5,9,3,7 3 0 prompts
rollout="--init $TINY --data $WORK/prompts.bin --rollout --objective grpo --group-size 6 --batch 4 --steps 1000 --grace 0"
answers='n=0; while read -r line; do n=$((n + 1)); [ $n -le 24 ] || sleep 47'$$'; echo $((n % 2)); done' # the number is this run's own
begin $rollout --seq-len 32 --max-new-tokens 4 --out "$WORK/asks" --reward-command "$answers"
until_step 1 && sleep 0.2 && kill $process
ends 143 '^stopped by SIGTERM after step 1 of 1000 (step 2 did not end within'
check 'no reward command is left' [ -z "$(ps -eo args | grep "^sleep 47$$\$")" ]
begin $rollout --seq-len 2000 --max-new-tokens 1900 --out "$WORK/draws" --reward-command "$answers"
until_true there "$WORK/draws" log.jsonl && sleep 0.2 && kill -USR1 $process
ends 0 '^stopped by SIGUSR1 after step 0 of 1000 (step 1 did not end within --grace 0 s and is dropped): there is nothing to save$'

# ---- a save, a closing terminal, a closing pipe, nohup -----------------------------------------------------------------------------
sanitized=$TRAIN wide=$(echo $TINY | sed 's/vocab_size=96/vocab_size=40000/')
TRAIN=$TRAIN_PLAIN
begin --init $wide --any-tokenizer --data $SHARD --seq-len 16 --steps 1000 --log-every 1 --save-every 1 --grace 0 --out "$WORK/saves"
until_step 2 && until_true there "$WORK/saves" '*.partial' && kill $process
ends 143 "^stopped by SIGTERM after step [0-9]* of 1000.*: it is saved in "
check 'no half checkpoint is left' [ -z "$(ls "$WORK/saves" | grep -E 'partial|removed|tmp')" -a "$(last_step "$WORK/saves")" -ge "$(printed_step)" ]
rm -rf "$WORK/saves"
TRAIN=$sanitized
if command -v script >/dev/null; then
    echo "exec '$TRAIN' train $endless --out '$WORK/terminal' 2>'$WORK/err'" >"$WORK/command"
    : >"$WORK/out" >"$WORK/err"
    setsid script -qec "sh $WORK/command" "$WORK/out" </dev/null >/dev/null 2>&1 &
    process=$!
    until_true grep -q '^step  *2/.*  loss' "$WORK/out" && kill -9 $process
    wait $process 2>/dev/null
    process=$$ # the run is no child
    until_true grep -q '^stopped by SIGHUP after step' "$WORK/err" && until_true there "$WORK/terminal" 'checkpoint-????????/DONE'
    same_as_straight "$WORK/terminal" $any
else
    skip 'a terminal that closes' 'there is no script (util-linux)'
fi
"$TRAIN" train $any --steps 4 --out "$WORK/pipe" 2>"$WORK/err" | sed '/^step  *1.4/q' >"$WORK/out"
check 'a pipe that closes ends no run' [ "$(last_step "$WORK/pipe")" = 4 ]
: >"$WORK/out" >"$WORK/err"
env --ignore-signal=HUP --default-signal=TERM "$TRAIN" train $endless --out "$WORK/nohup" >"$WORK/out" 2>"$WORK/err" &
process=$!
until_step 1 && kill -HUP $process && until_step $(($(printed_step) + 2)) && kill $process
ends 143 '^stopped by SIGTERM'

# ---- ranks: a signal to mpirun, and to one of them ---------------------------------------------------------------------------------
if command -v mpirun >/dev/null; then
    export OMPI_MCA_odls_base_sigkill_timeout=5 # s until mpirun passes SIGTERM on, and again until it kills
    for to in mpirun rank; do
        : >"$WORK/out" >"$WORK/err"
        env --default-signal=TERM,USR1 test/ranks/mpirun.sh 2 "$TRAIN_PLAIN" train $endless --grad-accum 2 --out "$WORK/ranks-$to" >"$WORK/out" 2>"$WORK/err" &
        process=$! signal=TERM
        until_step 2
        [ $to = mpirun ] && kill $process || { signal=USR1 && kill -USR1 "$(pgrep -P $process | tail -n 1)"; }
        wait $process
        status=$?
        [ $to = mpirun ] || check "SIGUSR1 is a success, not $status" [ $status = 0 ]
        says err "^stopped by SIG$signal after step [0-9]* of 100000: it is saved in " '^go on with, under the same launcher:'
        check 'no printed step is lost' [ "$(last_step "$WORK/ranks-$to")" -ge "$(printed_step)" ]
    done
    step=$(last_step "$WORK/ranks-rank")
    test/ranks/mpirun.sh 2 "$TRAIN_PLAIN" train $any --grad-accum 2 --steps "$step" --out "$WORK/ranks-straight" >"$WORK/out" 2>"$WORK/err"
    name=checkpoint-$(printf %08d "$step")/optimizer.bin
    check 'ranks save the same bits' cmp -s "$WORK/ranks-rank/$name" "$WORK/ranks-straight/$name"
else
    skip 'ranks that a signal stops' 'there is no mpirun'
fi

# ---- a run's folder ------------------------------------------------------------------------------------------------------------------
succeeds train $any --steps 2 --out "$WORK/draws" --quiet # it has no finished step
succeeds train $any --steps 2 --out "$WORK/auto" --resume auto --quiet
succeeds train $any --steps 3 --out "$WORK/auto" --resume auto
says out '^resumed  .*checkpoint-00000002, step 2 of 3'
refuses 1 'holds a run at step 3; continue it with --resume, replace it with --overwrite' train $any --steps 3 --out "$WORK/auto"
succeeds train --steps 5 --out "$WORK/auto" --resume --extend --quiet
cp -r "$WORK/auto" "$WORK/again" && rm -r "$WORK/again/checkpoint-00000005"
succeeds train --resume --out "$WORK/again"
check 'an extension goes on by its log' same_run "$WORK/auto" "$WORK/again" 5
succeeds train $any --steps 1 --out "$WORK/auto" --overwrite --quiet
check '--overwrite leaves nothing of it' [ "$(last_step "$WORK/auto")-$(grep -c '"loss"' "$WORK/auto/log.jsonl")" = 1-1 ]
succeeds train --init $TINY --data $SHARD --seq-len 64 --steps 12 --val-data $SHARD --val-steps 2 --val-every 2 --lr 0.5 --save-every 1 --keep-checkpoints 1 --keep-best --out "$WORK/best"
best=$(sed -n 's/^validation  .* at best (step \([0-9]*\)).*/\1/p' "$WORK/out")
check "--keep-best keeps step $best" [ "$best" -gt 0 -a -f "$WORK/best/checkpoint-$(printf %08d "$best")/DONE" -a -f "$WORK/best/checkpoint-00000012/DONE" ]
first=$(sed -n 's/^\(validation  .* at first\),.*/\1/p' "$WORK/out")
succeeds train --resume --extend --steps 14 --out "$WORK/best"
says out "^${first:?}, "
begin $endless --save-every 1s --out "$WORK/removed"
until_true there "$WORK/removed" 'checkpoint-????????/DONE' && mv "$WORK/removed" "$WORK/moved" && until_true there "$WORK/removed" 'checkpoint-????????/DONE' && kill $process
ends 143 '^stopped by SIGTERM .* it is saved in '
says err '^note: .*/removed: was removed or moved; it is made again'
check 'its log goes on' [ "$(grep -c '"loss"' "$WORK/removed/log.jsonl")" -gt 0 ]
finish
