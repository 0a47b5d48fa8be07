#!/bin/sh
# Online GRPO as a user runs it: rewards rise; plan and resuming hold, for the model and for adapters, with several
# updates a rollout. A failing reward command ends the run, with the last checkpoint whole, or loses only its groups.
. test/cli.sh
make_documents "$WORK/prompts.bin" 96 5,9,3,7,12,4,6,8 3 0 prompts

# Rewards 1 if the first id of the completion begins with 1 to 4, about half of all ids.
cat >"$WORK/reward.sh" <<'END'
while read -r line; do
    case $line in *'"completion_ids": ['[1-4]*) echo 1 ;; *) echo '{"reward": 0}' ;; esac
done
END
any="--init $TINY --data $WORK/prompts.bin --rollout --seq-len 32 --batch 4 --max-new-tokens 4 --lr 1e-2
    --schedule constant --seed 5"
common="$any --objective grpo --group-size 6"
reward="sh $WORK/reward.sh"
steps_of() { sed -n 's/.*\("step": [0-9]*, "loss": [^,]*\),.*\("reward": [^,]*\),.*/\1 \2/p' "$1/log.jsonl"; }
rewards() { sed -n 's/.*"reward": \([^,}]*\).*/\1/p' "$1/log.jsonl"; }

STREAMBP_ALLOCATION_GUARD=1 # nothing of ours is allocated after the first step
export STREAMBP_ALLOCATION_GUARD
succeeds train $common --reward-command "$reward" --steps 24 --save-every 8 --out "$WORK/straight"
check 'a record of 24 rewards' [ "$(rewards "$WORK/straight" | wc -l)" = 24 ]
check 'rewards rise' awk 'NR <= 4 { a += $1 } NR > 20 { b += $1 } END { exit !(b > a + 0.8) }' <<END
$(rewards "$WORK/straight")
END
planned=$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")
says out '^step  1/24  reward  [0-9.]*  std 0.[0-9]*  no signal [0-9.]*  norm [0-9.]*  lr 1.00e-02  [0-9:]*  [0-9]* s left$'

run plan $common --verbose
check 'plan = run' [ "$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")" = "$planned" ]

# ---- interrupted and resumed -----------------------------------------------------------------------------------------
for options in 'grpo' 'grpo --lora-rank 3 --beta 0.1 --lora-dropout 0.2' 'gspo --updates 2 --slots 5 --beta 0.1'; do
    folder="$WORK/run$(echo "$options" | tr -dc a-z)"
    set -- $any --group-size 6 --reward-command "$reward" --objective $options
    succeeds train "$@" --steps 8 --out "$folder-a"
    succeeds train "$@" --steps 4 --out "$folder-b" --reference-on host
    succeeds train "$@" --steps 8 --out "$folder-b" --resume --reference-on disk --weights host --disk build
    check "resumed to the bit: $options" same_run "$folder-a" "$folder-b" 8
done
check 'the reference is the model at the start' awk 'NR > 2 && !($1 > 0) { bad = 1 } END { exit bad || NR != 8 }' <<END
$(sed -n 's/.*"kl": \([^,}]*\).*/\1/p' "$folder-b/log.jsonl")
END
refuses 1 'the model that it began with as reference; give that model with --model' train --data "$WORK/prompts.bin" --rollout --seq-len 32 --batch 4 \
    --max-new-tokens 4 --objective gspo --beta 0.1 --steps 10 --reward-command "$reward" --out "$folder-b" --resume
# ---- equal rewards after two steps: the run goes on, or ends; the last checkpoint before stays -----------------------------
cat >"$WORK/flat.sh" <<'END'
n=0
while read -r line; do
    n=$((n + 1))
    echo $((n <= 48 && n % 2))
done
END
set -- $common --reward-command "sh $WORK/flat.sh" --steps 6 --save-every 1 --keep-checkpoints 1
succeeds train "$@" --out "$WORK/flat"
check 'equal rewards are told once' [ "$(grep -c '^note: step 5: all groups had equal rewards in 3 steps' "$WORK/err")" = 1 ]
check 'the last checkpoint before stays' [ "$(ls "$WORK/flat" | grep checkpoint | tr '\n' ' ')" = 'checkpoint-00000002 checkpoint-00000006 ' ]
refuses 1 'step 5: all groups had equal rewards.*; the last good checkpoint is step 2 in .*; remove later ones to resume from it' \
    train "$@" --out "$WORK/flat-ended" --stop-on-divergence
check 'it was not replaced' [ -f "$WORK/flat-ended/checkpoint-00000002/DONE" ]
# ---- completions one step ahead: off-policy by one, and killed while the reward command works ----------------------------
cat >"$WORK/kills.sh" <<'END'
n=0
while read -r line; do
    echo "$line" >>"$1/lines"
    n=$((n + 1))
    [ $n != "$2" ] || kill -9 "$(cat "$1/process")"
    case $line in *'"completion_ids": ['[1-4]*) echo 1 ;; *) echo '{"reward": 0}' ;; esac
done
END
killed() { # folder, line, arguments: kills the run at this line
    killed_folder=$1 line=$2
    shift 2
    mkdir -p "$WORK/killed"
    "$TRAIN" train "$@" --reward-command "sh $WORK/kills.sh $WORK/killed $line" --out "$killed_folder" >/dev/null 2>&1 &
    echo $! >"$WORK/killed/process"
    wait $! 2>/dev/null
    [ $? = 137 ]
}
experts=qwen3_moe,hidden_size=32,moe_intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1
experts=$experts,head_dim=16,vocab_size=96,num_experts=8,num_experts_per_tok=2
for options in '--updates 1' '--updates 2 --beta 0.1' '--lora-rank 3' "--router-replay --init $experts"; do
    folder="$WORK/ahead$(echo "$options" | tr -dc a-z)"
    set -- $any --group-size 6 --objective grpo --overlap --save-every 2 --steps 8 $options
    succeeds train "$@" --out "$folder-a" --reward-command "$reward" --verbose
    says out '^overlap .* off-policy by one'
    check "a step's completions wait: $options" grep -q rollout.bin "$folder-a/checkpoint-00000006/DONE"
    check "killed while the next rewards are asked for: $options" killed "$folder-b" 75 "$@"
    succeeds train "$@" --resume --out "$folder-b" --reward-command "$reward"
    check "killed and resumed to the bit: $options" same_run "$folder-a" "$folder-b" 8
done
folder="$WORK/aheadrouterreplay"
check 'routes are replayed, and none compared' [ "$(cat "$folder"*/log.jsonl | grep -c router_differs)" = 0 ]
refuses 1 'was trained with --router-replay on, now it is off' train $any --group-size 6 --objective grpo --overlap --steps 9 \
    --init $experts --reward-command "$reward" --out "$(echo "$folder"*-a)" --resume
succeeds train $common --init $experts --reward-command "$reward" --steps 2 --overlap --out "$WORK/routes"
check 'one step off-policy other experts are taken' grep -q '"router_differs": 0\.[0-9]*[1-9]' "$WORK/routes/log.jsonl"
refuses 2 'router-replay: the model has no experts' train $common --reward-command "$reward" --router-replay
set -- --init "$TINY" --data "$WORK/prompts.bin" --rollout --seq-len 32 --batch 4 --max-new-tokens 4 --schedule constant --seed 5 \
    --objective grpo --group-size 6 --steps 3 --quiet
for options in '1e-2 --overlap' '0 --overlap' 0 1e-2; do
    folder="$WORK/rate$(echo "$options" | tr -dc 0-9a-z)"
    mkdir -p "$folder-lines"
    succeeds train "$@" --lr $options --out "$folder" --reward-command "sh $WORK/kills.sh $folder-lines 0"
done
check 'without a learning rate --overlap changes no bit' same_run "$WORK/rate0overlap" "$WORK/rate0" 3
first_two() { sed 48q "$WORK/rate$1-lines/lines" | cksum; }
check 'the second step was written before the first update' [ "$(first_two 1e2overlap)" = "$(first_two 0)" ]
check 'without --overlap it is not' [ "$(first_two 1e2)" != "$(first_two 0)" ]
refuses 1 'was trained with --rollout overlap' train "$@" --lr 1e-2 --reward-command "$reward" --out "$WORK/rate1e2overlap" --resume
refuses 2 'lora-dropout with --overlap' train "$@" --lora-rank 2 --lora-dropout 0.1 --overlap --reward-command "$reward"

succeeds train $any --objective grpo --group-size 2 --steps 2 --shuffle off --out "$WORK/order" --quiet \
    --reward-command "while read -r line; do echo \"\$line\" >>$WORK/lines; echo 1; done"
check '--shuffle off: prompts come in the order of the data' \
    [ "$(sed 's/.*"prompt_number": \([0-9]*\).*/\1/' "$WORK/lines" | tr '\n' ' ')" = '0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7 ' ]
refuses 1 'was trained with --rollout shuffle=off' train $any --objective grpo --group-size 2 --steps 3 --out "$WORK/order" \
    --reward-command "$reward" --resume
refuses 1 'rollout group-size=6, now it is group-size=5' \
    train $any --objective grpo --group-size 5 --reward-command "$reward" --steps 24 --out "$WORK/straight" --resume

# ---- kept and shown completions, by two commands -------------------------------------------------------------------------
length='while read -r line; do case $line in *"\"ended\": true"*) echo null ;; *) echo 2 ;; esac; done'
set -- $any --group-size 6 --objective cispo --keep-rollouts 3 --reward-names first,whole --reward-weights 1,-0.5 --stop-ids 7,9 --mask-truncated
succeeds train "$@" --steps 8 --out "$WORK/kept-a" --reward-command "$reward" "$length" --show 2
check 'a table of two completions a step' [ "$(grep -c ' > ' "$WORK/out")" = 24 ]
check 'rewards by name' grep -q '"rewards/first/mean": .*"rewards/whole/std": ' "$WORK/kept-a/log.jsonl"
succeeds train "$@" --steps 4 --out "$WORK/kept-c" --reward-command "$reward" "$length"
succeeds train "$@" --steps 8 --out "$WORK/kept-c" --reward-command "$reward" "$length" --resume
check 'resumed to the bit, by two commands' same_run "$WORK/kept-a" "$WORK/kept-c" 8
for file in rollouts.jsonl rollouts.1.jsonl; do
    check "$file is that of a run that was never stopped" cmp "$WORK/kept-a/$file" "$WORK/kept-c/$file"
done
check 'a line for each completion of three steps' [ "$(wc -l <"$WORK/kept-a/rollouts.1.jsonl")" = 72 ]
check 'each is JSON, and a sum of its rewards' awk '
    { first = $0; sub(/.*"first": /, "", first); whole = $0; sub(/.*"whole": /, "", whole); sum = $0; sub(/.*"reward": /, "", sum)
      wanted = first + (whole ~ /^null/ ? 0 : -0.5 * whole); if (wanted != sum + 0) bad = 1 } END { exit bad || !NR }' "$WORK/kept-a/rollouts.jsonl"
make_documents "$WORK/asked.bin" 96 4,10,16,2,5 3 0 prompts # longer than the run's
set -- $common --val-data "$WORK/asked.bin" --val-every 2 --reward-command "$reward" --stop-ids 7,9
succeeds train "$@" --steps 4 --out "$WORK/asked-a"
planned=$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")
check 'three validations of 5 prompts' [ "$(grep -c 'validation of 5 prompts  reward ' "$WORK/out")" = 3 ]
run plan $common --steps 4 --val-data "$WORK/asked.bin" --verbose
check 'plan = run, with validation' [ "$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")" = "$planned" ]
succeeds train "$@" --overlap --steps 4 --out "$WORK/asked-ahead"
succeeds train $common --overlap --steps 4 --reward-command "$reward" --stop-ids 7,9 --out "$WORK/asked-none"
check 'validation changes no bit' same_checkpoint "$WORK/asked-ahead" "$WORK/asked-none" 4
succeeds train "$@" --steps 2 --out "$WORK/asked-b"
succeeds train "$@" --resume --steps 4 --out "$WORK/asked-b"
validations() { sed -n 's/.*"val_prompts": 5, \("val_reward": .*\), "time".*/\1/p' "$1/log.jsonl"; }
check 'resumed: the same validations' [ "$(validations "$WORK/asked-a")" = "$(validations "$WORK/asked-b")" ]
refuses 2 'reward-weights has 3 entries for 2 --reward-command' train $common --reward-command a b --reward-weights 1,1,1
refuses 2 'reward-weights are all 0' train $common --reward-command a b --reward-weights 0,0
refuses 2 'two reward commands are named reward; give each' train $common --reward-command 'python3 x/reward.py' 'sh reward.sh'

unset STREAMBP_ALLOCATION_GUARD

# ---- failing commands: the last good step stays --------------------------------------------------------------------------
kept=$(cat "$WORK/straight/checkpoint-00000024/optimizer.bin" | cksum)
more="$common --steps 30 --out $WORK/straight --resume --reward-timeout 60"
refuses 1 'step 25: the reward command ended after 0 of 24 answers, with exit code 3' train $more --reward-command 'exit 3'
refuses 1 'step 25: .*7 of 24' train $more --reward-command 'for i in 1 2 3 4 5 6 7; do read -r x; echo 1; done'
check 'no wrong step was taken' [ "$(ls "$WORK/straight" | grep -c checkpoint-00000024)" = 1 ]
check 'the last checkpoint is what it was' [ "$(cat "$WORK/straight/checkpoint-00000024/optimizer.bin" | cksum)" = "$kept" ]
succeeds train $common --steps 2 --reward-failure skip --reward-timeout 60 \
    --reward-command 'for i in 1 2 3 4 5 6 7 8 9; do read -r x; echo $((i % 3)); done'
check 'groups without rewards are left out' grep -q '3 of 4 groups are left out' "$WORK/err"
refuses 1 'step 1: .* with exit code 3; no completion got a reward in the first step' \
    train $common --steps 2 --reward-failure skip --reward-command 'exit 3'
check 'no reward command is left' [ -z "$(ps -eo args | grep "$WORK/reward.sh" | grep -v grep)" ]
finish
