#!/bin/sh
# --sp auto: in double, losses, norms and weights of 2, 4 and 8 processes are those of one, with --memory-limit so low that
# a step uses groups of several sizes; runs resume to the bit; a killed rank ends the run; refusals. Makes the double build.
. test/cli.sh
if ! command -v mpirun >/dev/null; then
    skip 'all of it' 'there is no mpirun'
    finish
    exit
fi
SANITIZED=$TRAIN
double_build
model=qwen3,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,vocab_size=96
lengths() { # seed: 90 documents, most of them short, some of them longer than most groups take
    awk -v s="$1" 'BEGIN { srand(s); for (i = 0; i < 90; i++) printf "%d,", i % 15 == 4 ? 330 + i % 51 : i % 15 == 9 ? 140 + i % 17 : 2 + exp(0.5 + 2.8 * rand()) }'
}
make_documents "$WORK/texts.bin" 96 "$(lengths 7)" 3
make_documents "$WORK/pairs.bin" 96 "$(lengths 8)" 4 1 pairs

# ---- exact ------------------------------------------------------------------------------------------------------------------
ranks() { # processes, arguments: trains
    LAUNCHED="test/ranks/mpirun.sh $1"
    shift
    succeeds train "$@"
    LAUNCHED=
}
steps() { # numbers of each step alone, without times, but with metrics
    grep '"grad_norm"' "$WORK/$1/log.jsonl" | sed 's/, "seconds".*"memory_bytes": [0-9]*//; s/, "sent_bytes.*"deal_bound": [0-9.e-]*//
        s/, "time".*//; s/"[a-z_/]*"//g; s/[{}:,]//g'
}
weights() { od -An -v -w8 -t f8 -j "$(($(wc -c <"$1") % 8))" "$1"; } # and what precedes them, as numbers
near() { # numbers of one process and of several differ by 1e-12 at most
    paste -d ' ' "$1" "$2" | awk '{ for (i = 1; i <= NF / 2; i++) { d = $i - $(i + NF / 2); s = $i < 0 ? -$i : $i
        if (!(d * d <= 1e-24 * (1 + s * s))) bad++ } } END { exit bad || NR < 3 }'
}
same() { # two runs, the first of one process
    steps "$1" >"$WORK/a" && steps "$2" >"$WORK/b"
    check "$2: losses, norms and tokens" near "$WORK/a" "$WORK/b"
    [ -f "$WORK/$1/checkpoint-00000010/model.bin" ] || return
    weights "$WORK/$1/checkpoint-00000010/model.bin" >"$WORK/a" && weights "$WORK/$2/checkpoint-00000010/model.bin" >"$WORK/b"
    check "$2: weights" near "$WORK/a" "$WORK/b"
}
groups() { sed -n 's/.*"groups": {\([^}]*\)}.*/\1/p' "$WORK/$1/log.jsonl"; }
common="--init $model --seq-len 384 --lr 0.01 --epsilon 1e-3 --chunk 32 --logits-chunk 32 --keep none --seed 7"
texts="$common --steps 10 --data $WORK/texts.bin --samples 16"
succeeds train $texts --out "$WORK/alone"
ranks 4 $texts --sp auto --memory-limit 1200KiB --save-every 5 --out "$WORK/four"
same alone four
check "groups of 1 and 4 ranks in one step: $(groups four | xargs)" [ "$(groups four | grep '"1".*"4"' | wc -l)" -gt 2 ]
ranks 8 $texts --sp auto --zero 3 --memory-limit 1110KiB --out "$WORK/eight"
same alone eight
ranks 2 $texts --sp auto --zero 3 --optimizer host --update forward --memory-limit 1300KiB --out "$WORK/two"
same alone two
check "groups of 1 and 2 ranks in one step: $(groups two | xargs)" [ "$(groups two | grep '"1".*"2"' | wc -l)" -gt 2 ]
for how in "lora --lora-rank 2 --data $WORK/texts.bin --grad-accum 4" "dpo --objective simpo --data $WORK/pairs.bin --samples 5"; do
    succeeds train $common --steps 10 ${how#* } --out "$WORK/${how%% *}-alone"
    ranks 3 $common --steps 10 ${how#* } --sp auto --out "$WORK/${how%% *}"
    same "${how%% *}-alone" "${how%% *}"
done
# All share the long one, and the first has the short one: the others wait for it with their gradients, not within the pass.
make_documents "$WORK/six.bin" 96 380,20,375,30,370,25 3
six="$common --data $WORK/six.bin --shuffle off --steps 3"
succeeds train $six --samples 2 --out "$WORK/six-alone"
ranks 3 $six --samples 2 --sp auto --memory-limit 1300KiB --timeout 60 --out "$WORK/six"
same six-alone six
check "one short one: $(groups six | xargs)" [ "$(groups six | xargs)" = '1: 1, 3: 1 1: 1, 3: 1 1: 1, 3: 1' ]
succeeds train $six --grad-accum 8 --out "$WORK/over-alone" # the end of an epoch: short ones twice in a sequence
ranks 2 $six --grad-accum 8 --sp auto --out "$WORK/over"
same over-alone over
make_documents "$WORK/single.bin" 96 64,40,50,60,35,62,58 3 # one in a sequence, the unit of routers' losses
experts="--init $(echo "$model" | sed 's/qwen3/qwen3_moe/'),num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16 --data $WORK/single.bin
    --seq-len 64 --samples 3 --steps 4 --epsilon 1e-3 --router-aux-loss 0.1 --router-z-loss 0.01"
succeeds train $experts --out "$WORK/experts-alone"
ranks 3 $experts --sp auto --zero 2 --batch 2 --out "$WORK/experts"
same experts-alone experts
make_documents "$WORK/long.bin" 96 1500,60,40 3
ranks 2 --init $model --chunk 64 --logits-chunk 64 --keep none --data "$WORK/long.bin" --samples 3 --sp auto --memory-limit 2500KiB
says err '^note: --seq-len 2048 is what the data needs' # which one rank alone has no memory for
says out '^groups   [0-9]* tokens fit 1 rank, 1597 fit 2$'

# ---- resumed ------------------------------------------------------------------------------------------------------------------
mkdir "$WORK/again"
cp -r "$WORK/four/log.jsonl" "$WORK/four/checkpoint-00000005" "$WORK/again"
cp -r "$WORK/again" "$WORK/on-two"
ranks 4 $texts --sp auto --memory-limit 1200KiB --resume --out "$WORK/again"
check 'over the same ranks it ends in the same bits' same_checkpoint "$WORK/four" "$WORK/again" 10
check 'of the same deals' [ "$(groups four)" = "$(groups again)" ]
ranks 2 $texts --sp auto --zero 1 --resume --out "$WORK/on-two"
same alone on-two

# ---- failures -----------------------------------------------------------------------------------------------------------------
printf 'echo $$ >"%s/pid.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"\nexec "$@"\n' "$WORK" >"$WORK/rank.sh"
rm "$WORK/out"
(
    for i in $(seq 2400); do
        sleep 0.1
        grep -q '^step' "$WORK/out" 2>/dev/null && break
    done
    kill -KILL "$(cat "$WORK/pid.3")"
) &
LAUNCHED="timeout 300 test/ranks/mpirun.sh 4 sh $WORK/rank.sh"
run train $(echo "$texts" | sed 's/steps 10/steps 1000000/') --sp auto --memory-limit 1200KiB --log-every 1 --timeout 60
check "a rank that is killed: exit $?: $(cut -c1-150 "$WORK/err")" grep -q '^train: rank 0 on [^ ]*: rank 3 on [^ ]* was killed' "$WORK/err"
wait
LAUNCHED="test/ranks/mpirun.sh 2"
run train $texts --sp auto --memory-limit 1MiB
check "what fits no group is told before the first step: $(cat "$WORK/err")" \
    [ "$(grep -c '^step' "$WORK/out")$(grep -c 'the plan needs .*; with these options --seq-len [0-9]* would fit' "$WORK/err")" = 01 ]
LAUNCHED=
TRAIN=$SANITIZED
refuses 2 '--sp auto deals documents of different lengths' train --init $TINY --data $SHARD --seq-len 64 --sp auto
refuses 2 '--sp auto deals the steps of training' bp --init $TINY --seq-len 64 --sp auto
refuses 2 '--sp auto deals the steps of training' eval --init $TINY --data $SHARD --seq-len 64 --sp auto
refuses 2 '--sp auto: --method seco cannot' train --init $TINY --data $SHARD --seq-len 64 --sp auto --method seco
refuses 2 '--sp auto: the KL term of kto' train --init $TINY --data $SHARD --seq-len 64 --sp auto --objective kto
refuses 2 '--router-bias-update needs sequence groups of equal size' train --init glm4_moe --data $SHARD --seq-len 64 --sp auto --router-bias-update 0.1
refuses 2 '--sp auto: with --rollout' train --init $TINY --data $SHARD --seq-len 64 --sp auto --rollout --objective grpo --reward-command true
finish
