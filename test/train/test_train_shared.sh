#!/bin/sh
# --share-prefixes: in double, losses, norms, metrics and weights of pairs, groups, rollouts and families that share prefixes
# are those of documents alone, on one process and on two; runs resume to the bit, an older one without sharing. Makes the
# double build.
. test/cli.sh
double_build
model=hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,vocab_size=96
hybrid=qwen3_5,$model,layer_types=lf,linear_num_key_heads=1,linear_num_value_heads=2,linear_key_head_dim=12,linear_value_head_dim=8
lengths() { awk -v s="$1" 'BEGIN { srand(s); for (i = 0; i < 40; i++) printf "%d,", 110 + 70 * rand() }'; }
make_documents "$WORK/pairs.bin" 96 "$(lengths 7)" 4 90 pairs
make_documents "$WORK/groups.bin" 96 "$(lengths 8)" 5 90 4
make_documents "$WORK/families.bin" 96 "$(lengths 9)" 6 0 families
make_documents "$WORK/prompts.bin" 96 90,70,110,20,85,100 7 0 prompts
printf 'while read -r line; do i=$(echo "$line" | cksum | cut -c1-2); echo "$i"; done\n' >"$WORK/reward.sh"

steps() { # numbers of each step alone, without times
    grep '"grad_norm"' "$WORK/$1/log.jsonl" | sed 's/, "computed".*"memory_bytes": [0-9]*//; s/, "sent_bytes[^,]*//; s/, "time".*//
        s/, "wait[^,]*//g; s/"[a-z_/0-9]*"//g; s/[{}:,]//g'
}
weights() { od -An -v -w8 -t f8 -j "$(($(wc -c <"$1") % 8))" "$1"; } # and what precedes them, as numbers
near() { # numbers of the two files differ by 1e-9 at most
    paste -d ' ' "$1" "$2" | awk '{ for (i = 1; i <= NF / 2; i++) { d = $i - $(i + NF / 2); s = $i < 0 ? -$i : $i
        if (!(d * d <= 1e-18 * (1 + s * s))) bad++ } } END { exit bad || NR < 10 }'
}
same() { # two runs of ten steps
    steps "$1" >"$WORK/a" && steps "$2" >"$WORK/b"
    check "$2: losses, norms and metrics" near "$WORK/a" "$WORK/b"
    weights "$WORK/$1/checkpoint-00000010/model.bin" >"$WORK/a" && weights "$WORK/$2/checkpoint-00000010/model.bin" >"$WORK/b"
    check "$2: weights" near "$WORK/a" "$WORK/b"
    computed=$(sed -n 's/.*"tokens": \([0-9]*\), "computed": \([0-9]*\),.*/\1 \2/p' "$WORK/$2/log.jsonl" | awk '{ a += $1; b += $2 } END { print b / a }')
    check "$2: shares: $computed" [ "${computed%.*}" = 0 ]
}

common="--seq-len 256 --steps 10 --lr 0.01 --epsilon 1e-3 --chunk 32 --logits-chunk 32 --seed 7"
dpo="--init qwen3,$model --data $WORK/pairs.bin --objective dpo --samples 6"
grpo="--init $hybrid --data $WORK/groups.bin --objective grpo --grad-accum 2"
sft="--init $hybrid --data $WORK/families.bin --samples 100"
rollout="--init qwen3,$model --data $WORK/prompts.bin --objective grpo --rollout --batch 4 --group-size 4 --max-new-tokens 12 --beta 0.05"
for how in "dpo $dpo" "grpo $grpo" "sft $sft" "rollout $rollout --reward-command sh\ $WORK/reward.sh"; do
    name=${how%% *}
    eval "set -- $common ${how#* }"
    succeeds train "$@" --share-prefixes off --out "$WORK/$name-off"
    [ $name != sft ] || set -- "$@" --share-prefixes on
    succeeds train "$@" --save-every 5 --out "$WORK/$name"
    same "$name-off" "$name"
    says out '^prefixes  '
    mkdir "$WORK/$name-again"
    cp -r "$WORK/$name/log.jsonl" "$WORK/$name/checkpoint-00000005" "$WORK/$name-again"
    succeeds train --resume --out "$WORK/$name-again"
    check "$name: resumed to the bit" same_checkpoint "$WORK/$name" "$WORK/$name-again" 10
    command -v mpirun >/dev/null || continue
    LAUNCHED="test/ranks/mpirun.sh 2"
    succeeds train "$@" --out "$WORK/$name-two"
    LAUNCHED=
    same "$name-off" "$name-two"
done
command -v mpirun >/dev/null || skip 'two processes' 'there is no mpirun'

# A run without the setting is one of an older program; --batch may change where the samples are the same.
mkdir "$WORK/older" "$WORK/batch"
cp -r "$WORK/dpo-off/checkpoint-00000010" "$WORK/older"
sed 's/"share_prefixes": "off", //' "$WORK/dpo-off/log.jsonl" >"$WORK/older/log.jsonl"
succeeds train --resume --extend --steps 12 --out "$WORK/older"
says err '^note: this run began without shared prefixes'
check 'it goes on without' [ "$(grep -c '"tokens": \([0-9]*\), "computed": \1,' "$WORK/older/log.jsonl")" = 12 ]
cp -r "$WORK/dpo/log.jsonl" "$WORK/dpo/checkpoint-00000005" "$WORK/batch"
succeeds train --resume --batch 2 --out "$WORK/batch"
same dpo-off batch
LAUNCHED=
refuses 1 'was trained with --share-prefixes auto, now it is off' train --resume --share-prefixes off --out "$WORK/batch"
finish
