#!/bin/sh
# Many processes as a user runs them: loss, gradients and trajectories equal one process's with the same command line, for every stage, with
# or without shared streams, on every kind of data; runs resume with another number of processes; only rank 0 prints.
. test/cli.sh
MPIRUN=test/ranks/mpirun.sh
if ! command -v mpirun >/dev/null; then
    echo '[  SKIPPED ] many processes: NOT TESTED, because there is no mpirun'
    skipped=1
    finish
    exit 0
fi
${CC:-cc} -D_GNU_SOURCE -O1 -I. test/files/compare_tensors.c -lcjson -lm -o "$WORK/compare_tensors" ||
    { fail 'compare_tensors.c does not compile'; finish; exit 1; }
SANITIZED=$TRAIN
TRAIN=${TRAIN_PLAIN:-$TRAIN} # mostly arithmetic; the programs of the table check its memory
export OMP_NUM_THREADS=1

ranks() { # P, arguments: runs P processes
    count=$1
    shift
    LAUNCHED="$MPIRUN $count"
    run "$@"
    status=$?
    LAUNCHED=
    return $status
}
ranks_succeed() {
    if ranks "$@"; then pass; else fail "exit $? of $1 ranks: train $*"; grep '^train: ' "$WORK/err" | head -n 3; fi
}
ranks_refuse() { # CODE PATTERN P arguments: expects this exit code and one matching error line
    code=$1 pattern=$2
    shift 2
    ranks "$@"
    status=$?
    lines=$(grep -c '^train: ' "$WORK/err")
    if [ $status != "$code" ]; then fail "exit $status, not $code, of ranks: $*"
    elif [ "$lines" != 1 ]; then fail "$lines error lines of ranks: $*"
    elif ! grep '^train: ' "$WORK/err" | grep -qE -- "$pattern"; then
        fail "the message does not say '$pattern': $(grep '^train: ' "$WORK/err" | cut -c1-200)"
    else pass; fi
}

# ---- doctor -------------------------------------------------------------------------------------------------------------------
ranks_succeed 2 doctor --init $TINY --seq-len 16 --json
check "doctor says what is wrong: $(cat "$WORK/err")" [ "$(json ranks) $(json wrong) $(json not_checked)" = '2 0 0' ]
check "doctor looks at collectives" grep -q '"reduce_scatter", "finding": "ok".*"exchange", "finding": "ok", "text": "2 ranks; ' "$WORK/out"

# ---- one pass ---------------------------------------------------------------------------------------------------------------
alone() { # arguments of bp: the expected values
    common=$*
    run bp $common --json --grads-out "$WORK/alone.safetensors" --overwrite || fail "exit $? of: train bp $common: $(tail -n 1 "$WORK/err")"
    loss=$(json loss) tokens=$(json tokens) norm=$(json grad_norm) flops=$(json model_flops)
}
near() { # found, expected, tolerance: of numbers that may be 0 up to rounding
    close "$1" "$2" "$3" || awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a * a < 1e-20 && b * b < 1e-20) }'
}
together() { # P, options of the world
    world_of="$* of bp $common"
    rm -f "$WORK/ranks.safetensors"
    ranks_succeed "$1" bp $common $(echo "$*" | cut -s -d' ' -f2-) --json --grads-out "$WORK/ranks.safetensors"
    check "one line of JSON: $world_of" [ "$(wc -l <"$WORK/out")" = 1 ]
    check "loss $(json loss) is $loss: $world_of" near "$(json loss)" "$loss" 1e-6
    check "norm $(json grad_norm) is $norm: $world_of" close "$(json grad_norm)" "$norm" 1e-5
    check "tokens: $world_of" [ "$(json tokens)" = "$tokens" ]
    check "FLOPs of the model: $world_of" close "$(json model_flops)" "$flops" 1e-9
    compared=$("$WORK/compare_tensors" "$WORK/ranks.safetensors" "$WORK/alone.safetensors" 1e-5 2>&1)
    check "gradients: $world_of: $compared" [ $? = 0 ]
}
# Families, methods, stages and shared sequences are in test_zero.c, test_sp.c and test_golden.c.
alone --init $TINY --seq-len 37 --batch 4 --grad-accum 3 --chunk 10 --logits-chunk 7
together 3 --zero 1
together 4 --sp 2 --zero 1 --profile
alone --init $TINY --seq-len 64 --batch 2 --grad-accum 2 --data $SHARD
together 4 --zero 2

# Parts of packed documents, also with fewer documents than ranks.
make_documents "$WORK/train.bin" 96 "$(awk 'BEGIN { srand(4); for (i = 0; i < 80; i++) printf "%d,", 2 + 70 * rand() }')" 1 1
make_documents "$WORK/long.bin" 96 60,61,62 5
alone --init $TINY --seq-len 60 --batch 3 --grad-accum 2 --data "$WORK/train.bin"
together 4 --sp 2
alone --init $TINY --seq-len 60 --samples 7 --data "$WORK/train.bin"
together 3 --zero 2
alone --init $TINY --seq-len 64 --data "$WORK/long.bin"
together 3 --zero 3

# Objectives: pairs and groups are not cut.
make_documents "$WORK/pairs.bin" 96 20,30,15,9,33,25,14,40,8,12,31,22,17,19,26,11 3 4 pairs
make_documents "$WORK/groups.bin" 96 20,25,15,9,23,25,14,30,8,12,21,22,17,19,26,11,9,13 3 4 3
make_documents "$WORK/labels.bin" 96 20,30,15,9,33,25,14,40,8,12,31,22 3 4 labels
make_documents "$WORK/values.bin" 96 20,25,15,9,23,25,14,30,8,12 3 4 advantages
alone --init $TINY --seq-len 40 --batch 2 --grad-accum 2 --objective dpo --data "$WORK/pairs.bin"
together 2 --sp 2
margin=$(json rewards.margins)
check 'metrics of pairs are those of all ranks' [ "$margin" = 0 ]
alone --init $TINY --seq-len 40 --batch 2 --objective dpo --data "$WORK/pairs.bin" --lora-rank 3 --lora-dropout 0.3 --seed 5
together 2 --zero 3
alone --init $TINY --seq-len 30 --batch 2 --grad-accum 2 --objective grpo --beta 0.1 --data "$WORK/groups.bin"
reward=$(json reward) length=$(json completions/mean_length)
together 2 --sp 2 --zero 3
check 'rewards are those of all ranks' close "$(json reward)" "$reward" 1e-6
check 'lengths are those of all ranks' close "$(json completions/mean_length)" "$length" 1e-6
alone --init $TINY --seq-len 30 --batch 2 --objective ppo --data "$WORK/values.bin"
together 3 --zero 2
alone --init $TINY --seq-len 64 --batch 4 --lora-rank 4 --lora-dropout 0.5
together 4 --zero 3
together 2 --sp 2

# A teacher, from its file or with the student: ranks share its passes and its weights.
succeeds train --init "$(echo $TINY | sed s/layers=2/layers=4/)" --seed 8 --data "$WORK/train.bin" --seq-len 60 --batch 6 --steps 60 --lr 1e-2 --schedule constant --out "$WORK/teacher" --quiet
succeeds logprobs --model "$WORK/teacher" --data "$WORK/train.bin" --seq-len 60 --batch 3 --top-k 8 --out "$WORK/x.teacher" --quiet
for teacher in "--teacher-logprobs $WORK/x.teacher" "--teacher $WORK/teacher"; do
    for way in forward reverse; do
        top=
        [ "$way ${teacher%% *}" = 'forward --teacher' ] && top='--teacher-top-k 8'
        alone --init $TINY --seq-len 60 --batch 3 --grad-accum 2 --data "$WORK/train.bin" --objective distill --distill-loss $way $teacher $top
        kl=$(json kl)
        for world in '2 --sp 2 --zero 3' '2 --zero 2'; do
            together $world
            check "the divergence is that of all ranks: $world" close "$(json kl)" "$kl" 1e-6
        done
    done
done

# A rank's memory, FLOPs and traffic match the plan, including a reference computed in the pass.
sent() { grep -o '"sent": {[^}]*}' "$WORK/out"; }
for world in '4 --sp 2 --zero 1 --keep attention --keep-on host' '2 --sp 2 --kv ring --keep attention' \
    '2 --zero 3 --sp 2 --objective dpo --lora-rank 3' '2 --zero 3 --objective kto --lora-rank 3' '2 --zero 3 --sp 2 --memory-limit 470KiB --host-limit 1MiB'; do
    set -- $world
    count=$1
    shift
    ranks_succeed $count bp --init $TINY --seq-len 64 --batch 4 --json --threads 1 "$@"
    planned="$(json plan_bytes) $(json host_bytes)" flops=$(json flops) traffic=$(sent)
    succeeds plan --for bp --ranks $count --init $TINY --seq-len 64 --batch 4 --json --threads 1 "$@"
    check "the plan of $world" [ "$(json total_bytes) $(json host_bytes)" = "$planned" ]
    check "and its FLOPs" close "$(json flops)" "$flops" 1e-9
    check "and what is sent" [ "$(sent)" = "$traffic" ]
done
ranks_succeed 2 bp --init $TINY --seq-len 64 --batch 4
check 'rank 0 alone speaks' [ "$(grep -c '^loss ' "$WORK/out")" = 1 ]
check 'the header says how many' grep -q '^memory .*, on each of 2 ranks (2 replicas x sp 1, ZeRO 0); ' "$WORK/out"

# ---- evaluation -------------------------------------------------------------------------------------------------------------
curve() { sed 's/.*"curve": //; s/"loss": [^,]*//g' "$WORK/out" | grep -o '^\[.*'; }
evaluated() { # world, arguments of eval
    world=$1
    shift
    run eval "$@" --json || fail "exit $? of: train eval $*"
    loss=$(json loss) tokens=$(json tokens) curve=$(curve)
    ranks_succeed ${world%% *} eval "$@" --json $(echo "$world" | cut -s -d' ' -f2-)
    check "loss of eval $* with $world" close "$(json loss)" "$loss" 1e-6
    check "tokens of eval $* with $world" [ "$(json tokens)" = "$tokens" ]
    check "curve of eval $* with $world" [ "$(curve)" = "$curve" ]
}
evaluated '3 --zero 3' --init $TINY --seq-len 64 --batch 4 --data $SHARD --curve
evaluated '4 --sp 2' --init $TINY --seq-len 64 --data "$WORK/train.bin" --curve
evaluated '2 --zero 3' --init $TINY --seq-len 64 --batch 2 --objective orpo --data "$WORK/pairs.bin"

# ---- training ---------------------------------------------------------------------------------------------------------------
losses() { sed -n 's/.*"step": \([0-9]*\), "\(val_\)\{0,1\}loss": \([^,]*\),.*/\1 \2 \3/p' "$1/log.jsonl"; }
same_losses() { # folder, folder, steps: as many lines, all within 1e-5, or 1e-9 if terms of order 1 cancel (grpo)
    [ "$(losses "$1" | wc -l)" = "$3" ] || return 1
    losses "$1" >"$WORK/a"
    losses "$2" >"$WORK/b"
    paste -d' ' "$WORK/a" "$WORK/b" | awk '{ n = NF / 2; d = $n - $NF; if (d < 0) d = -d; if ($1 != $(n + 1) || d > 1e-5 * $NF + 1e-9) bad = 1 }
        END { exit bad }'
}
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
trained() { # name, arguments: 10 steps alone, then by ranks
    name=$1
    shift
    common=$*
    run train $common --steps 10 --out "$WORK/$name" --save-every 6 --keep-checkpoints 9 || fail "exit $? of: train $common: $(tail -n 1 "$WORK/err")"
    lines=$(losses "$WORK/$name" | wc -l)
    check "10 steps: $name" [ "$lines" -ge 10 ]
}
trained_together() { # P, options of the world
    folder="$WORK/$name-$(echo "$*" | tr -dc 0-9a-z)"
    ranks_succeed $1 train $common --steps 10 --out "$folder" --save-every 6 $(echo "$*" | cut -s -d' ' -f2-)
    check "the trajectory of $* ranks: $name" same_losses "$folder" "$WORK/$name" $lines
}
trained documents --init $TINY --data "$WORK/train.bin" --val-data "$WORK/long.bin" --val-every 4 --seq-len 60 --batch 3 --grad-accum 2 \
    --lr 1e-3 --warmup 2 --seed 3
trained_together 4 --sp 2 --zero 3
trained samples --init $TINY --data "$WORK/train.bin" --seq-len 60 --samples 12 --lr 1e-3 --seed 3
trained_together 3 --zero 2
trained text --init $TINY --data $SHARD --seq-len 32 --batch 4 --lr 1e-3 --sample-every 5 --prompt-ids 3,4 --max-new-tokens 5
trained_together 4 --zero 3
# Resumes in the plain build, after the middle of a cosine.
rm -rf "$WORK/text/checkpoint-00000010"
succeeds train $common --steps 10 --out "$WORK/text" --resume
rm -rf "$WORK/text/checkpoint-00000010"
ranks_succeed 2 train $common --steps 10 --out "$WORK/text" --resume
# All ranks together compute the reference's log-probabilities once, and find them again.
mkdir "$WORK/own" # for one process's own
cp "$WORK/pairs.bin" "$WORK/own"
trained pairs --init $TINY --data "$WORK/own/pairs.bin" --objective dpo --seq-len 40 --batch 2 --lr 1e-3
common=$(echo "$common" | sed 's|/own/pairs.bin|/pairs.bin|')
ranks_succeed 3 train $common --steps 10 --out "$WORK/pairs-3" --zero 1
check 'the trajectory of pairs by 3 ranks' same_losses "$WORK/pairs-3" "$WORK/pairs" 10
check 'the reference was computed' grep -q '^reference  computing' "$WORK/out"
check 'and is one file' [ "$(ls "$WORK" | grep -c '^reference-.*logprobs$')" = 1 ]
ranks_succeed 2 train $common --steps 10 --out "$WORK/pairs-2"
check 'and is found again' grep -q '^reference  reused' "$WORK/out"
check 'the trajectory of pairs by 2 ranks' same_losses "$WORK/pairs-2" "$WORK/pairs" 10
trained labels --init $TINY --data "$WORK/labels.bin" --objective kto --seq-len 40 --batch 2 --grad-accum 2 --lr 1e-2
trained_together 2 --sp 2 --zero 3
check 'and its divergence' grep -q '"kl": 0.[0-9]*[1-9]' "$WORK/labels/log.jsonl"
trained adapters --init $TINY --data "$WORK/groups.bin" --objective grpo --beta 0.1 --seq-len 30 --batch 2 --grad-accum 2 --lr 1e-3 \
    --lora-rank 3 --lora-dropout 0.1
trained_together 4 --sp 2 --zero 1

ranks_succeed 2 train $common --steps 2 --json --sp 2
check 'one line of JSON' [ "$(wc -l <"$WORK/out")" = 1 ]
check 'which says who did it' [ "$(json ranks) $(json zero) $(json sp)" = '2 0 2' ]
check 'and what was sent' grep -q '"sent": {"gradients": [1-9][0-9.]*, "weights": 0, "keys_values": [1-9]' "$WORK/out"

# ---- resumed by another number of ranks, in another stage -------------------------------------------------------------------
name=documents
common="--init $TINY --data $WORK/train.bin --val-data $WORK/long.bin --val-every 4 --seq-len 60 --batch 3 --grad-accum 2
    --lr 1e-3 --warmup 2 --seed 3 --save-every 6"
lines=$(losses "$WORK/$name" | wc -l)
go_on() { # from, P, options: resumes a copy of a run's first 6 steps
    folder="$WORK/resumed"
    rm -rf "$folder"
    mkdir "$folder"
    cp -r "$1/checkpoint-00000006" "$1/log.jsonl" "$folder"
    shift
    if [ "$1" = 1 ]; then
        succeeds train $common --steps 10 --out "$folder" --resume
    else
        ranks_succeed "$1" train $common --steps 10 --out "$folder" --resume $(echo "$*" | cut -s -d' ' -f2-)
    fi
    check "resumed by $* ranks" same_losses "$folder" "$WORK/$name" $lines
}
go_on "$WORK/documents" 3 --zero 2 --optimizer disk --disk build
check 'the number of ranks is noted' grep -q 'note: ranks was 1 until' "$WORK/err"
go_on "$WORK/documents" 4 --zero 3 --sp 2
rm -rf "$WORK/six"
ranks_succeed 4 train $common --steps 10 --out "$WORK/six" --zero 2 --keep-checkpoints 9
go_on "$WORK/six" 1
go_on "$WORK/six" 2 --zero 1 --optimizer host

# ---- rollouts ---------------------------------------------------------------------------------------------------------------
make_documents "$WORK/prompts.bin" 96 5,9,3,7,12,4,6,8 3 0 prompts
cat >"$WORK/reward.sh" <<'END'
while read -r line; do
    case $line in *'"completion_ids": ['[1-4]*) echo 1 ;; *) echo 0 ;; esac
done
END
common="--init $TINY --data $WORK/prompts.bin --rollout --seq-len 32 --batch 5 --max-new-tokens 4 --lr 1e-3 --schedule constant
    --objective grpo --group-size 4 --seed 5 --steps 6"
set -- --reward-command "sh $WORK/reward.sh"
succeeds train $common "$@" --out "$WORK/rollout"
rewards() { sed -n 's/.*"step": \([0-9]*\),.*"reward": \([^,}]*\).*/\1 \2/p' "$1/log.jsonl"; }
ranks_succeed 4 train $common "$@" --out "$WORK/rollout-4" --zero 2
check "rewards do not depend on the number of ranks" [ "$(rewards "$WORK/rollout-4")" = "$(rewards "$WORK/rollout")" ]
check "6 rewards" [ "$(rewards "$WORK/rollout-4" | wc -l)" = 6 ]
ranks_succeed 3 train $(echo "$common" | sed 's/grpo/gspo --updates 2/') "$@" --zero 1 --beta 0.1 --weights host --update forward \
    --reference-on device # empty streams, used twice; weights are updated in a pass of the reference
# Ranks gather weights for each other's texts, or share a sequence and the writing: the completions are the same.
completions() { cat "$1"/rollouts*.jsonl | sort; }
for world in '3 --zero 3 --weights host' '4 --sp 2 --zero 3 --slots 3' '2 --sp 2 --lora-rank 2'; do
    out="$WORK/rollout-$(echo "$world" | tr -dc a-z0-9)"
    ranks_succeed ${world%% *} train $common "$@" ${world#* } --out "$out"
    check "rewards of $world" [ "$(rewards "$out" | head -n 2)" = "$(rewards "$WORK/rollout" | head -n 2)" ]
    case $world in *lora*) ;; *) check "rollouts of $world" [ "$(completions "$out")" = "$(completions "$WORK/rollout")" ] ;; esac
done
# A teacher judges what ranks wrote.
for way in forward reverse; do
    trained texts-$way --init $TINY --data "$WORK/prompts.bin" --rollout --seq-len 32 --batch 5 --max-new-tokens 4 --lr 1e-3 --seed 5 \
        --objective distill --distill-loss $way --group-size 2 --teacher "$WORK/teacher"
    trained_together 2 --sp 2
    trained_together 2 --zero 3 --teacher-on host
done
# They count together whose experts differ from those that wrote the texts.
trained texts-experts --init "$(echo $TINY | sed s/llama/qwen3_moe/),num_experts=6,num_experts_per_tok=2,moe_intermediate_size=16" \
    $(echo "$common" | sed 's/.*\(--data\)/\1/')
trained_together 2 --sp 2
common="--init $TINY --data $WORK/prompts.bin --rollout --seq-len 32 --batch 5 --max-new-tokens 4 --lr 1e-3 --schedule constant
    --objective grpo --group-size 4 --seed 5 --steps 6"
one=$(echo "$common" | sed 's/--batch 5/--batch 2/; s/--seq-len 32/--seq-len 64/')
ranks_succeed 2 train $one "$@" --zero 0 --out "$WORK/rollout-stage0"
ranks_succeed 2 train ${one% 6} 3 "$@" --zero 3 --out "$WORK/rollout-stage3"
ranks_succeed 2 train $one "$@" --zero 3 --out "$WORK/rollout-stage3" --resume
check 'a stage changes no bit of a run, stopped or not' cmp "$WORK/rollout-stage0/checkpoint-00000006/model.bin" \
    "$WORK/rollout-stage3/checkpoint-00000006/model.bin"
unset STREAMBP_ALLOCATION_GUARD
# Rank 1's command has 12 lines to answer, rank 0's has 8.
ranks_succeed 2 train ${common% 6} 1 --reward-failure skip \
    --reward-command 'for i in 1 2 3 4 5 6 7 8; do read -r x; echo $((i % 3)); done'
check "a command of another rank that fails is told of: $(grep 'left out' "$WORK/err")" grep -q \
    'step 1: rank 1 on [^ ]*: the reward command ended after 8 of 12 .*; 1 of 5 groups are left out' "$WORK/err"
ranks_refuse 1 'step 1: rank 0 on .* with exit code 3; no completion got a reward' 2 train ${common% 6} 1 --reward-failure skip --reward-command 'exit 3'
ranks_refuse 2 'batch 5 prompts are fewer than the 6 replicas; give --batch 6' 6 train $common "$@"
ranks_refuse 2 'reward-timeout 20 s: .* --timeout 20 s' 2 train $common "$@" --reward-timeout 20 --timeout 20
ranks_refuse 1 'the reward command ended after 0 of' 2 train $common --reward-command 'exit 3'

# ---- refused ----------------------------------------------------------------------------------------------------------------
ranks_refuse 2 'batch 6 or --grad-accum 3 would fit' 3 bp --init $TINY --seq-len 8 --batch 4
ranks_refuse 2 'batch 2 or --grad-accum 4 would fit' 4 train --init $TINY --data $SHARD --seq-len 8 --batch 1 --grad-accum 2 --out none
ranks_refuse 2 'sp 2: does not divide the 3 ranks' 3 bp --init $TINY --seq-len 8 --sp 2
ranks_refuse 2 'batch 4 or --grad-accum 4 would fit' 1 plan --ranks 4 --init $TINY --seq-len 8 --batch 3
for verb in "info --init $TINY" "sample --init $TINY --prompt-ids 1" "convert --model $GOLDEN/qwen3 --out $WORK/none.bin" \
    "logprobs --init $TINY --data $WORK/train.bin --seq-len 8 --out $WORK/none.logprobs"; do
    ranks_refuse 2 'runs in one process, but 2 were started' 2 $verb
done
ranks_refuse 1 'no_shard' 2 train --init $TINY --data "$WORK/no_shard.bin" --out none
# Different data on one rank, under the same arguments.
cat >"$WORK/elsewhere.sh" <<END
cd "$WORK/host\${OMPI_COMM_WORLD_RANK:-\$PMI_RANK}" && exec "$PWD/$TRAIN" "\$@"
END
mkdir "$WORK/host0" "$WORK/host1"
cp $SHARD "$WORK/host0/shard.bin"
cp $SHARD "$WORK/host1/shard.bin"
printf '\001' | dd of="$WORK/host1/shard.bin" bs=1 seek=1024 conv=notrunc 2>/dev/null
$MPIRUN 2 sh "$WORK/elsewhere.sh" bp --init $TINY --data shard.bin --seq-len 16 --batch 2 >"$WORK/out" 2>"$WORK/err"
check 'other data on one rank: exit 1' [ $? = 1 ]
check 'and one line that names it' [ "$(grep -c '^train: .*rank 1 on .* has other data than rank 0' "$WORK/err")" = 1 ]
# Another model on one rank: one byte differs in the middle of its weights.
succeeds convert --init $TINY --out "$WORK/host0/model.bin"
cp "$WORK/host0/model.bin" "$WORK/host1/model.bin"
$MPIRUN 2 sh "$WORK/elsewhere.sh" bp --model model.bin --seq-len 16 --batch 2 >"$WORK/out" 2>"$WORK/err"
check 'the same model on all ranks' [ $? = 0 ]
printf '\001' | dd of="$WORK/host1/model.bin" bs=1 seek=40000 conv=notrunc 2>/dev/null
$MPIRUN 2 sh "$WORK/elsewhere.sh" bp --model model.bin --seq-len 16 --batch 2 >"$WORK/out" 2>"$WORK/err"
check 'another model on one rank: exit 1' [ $? = 1 ]
check 'and one line that names it' [ "$(grep -c '^train: .*rank 1 on .* has other model files than rank 0' "$WORK/err")" = 1 ]

# ---- the sanitized program: once through each verb ----------------------------------------------------------------------------
TRAIN=$SANITIZED
ranks_succeed 2 bp --init $TINY --seq-len 30 --batch 2 --json --zero 2
ranks_succeed 2 eval --init $TINY --seq-len 30 --data "$WORK/train.bin" --json --sp 2
ranks_succeed 3 train --init $TINY --data "$WORK/train.bin" --seq-len 60 --batch 2 --steps 3 --out "$WORK/sanitized" --zero 1
ranks_succeed 2 train $common "$@"
finish
