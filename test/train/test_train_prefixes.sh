#!/bin/sh
# Documents that share prefixes, as a user trains them: in double, losses, norms and metrics of runs with and without
# sharing agree to 1e-9, for pairs, groups, rollouts and families of documents. A run keeps its --share-prefixes; a run
# begun without it goes on without. What excludes sharing is said.
. test/cli.sh
double_build

# Numbers of the steps, a word each, without tokens, times and what is computed.
values() { grep '"loss"' "$1/log.jsonl" | sed 's/"\(tokens\|computed\|seconds\|data_seconds\|rollout_seconds\|reward_seconds\|[a-z_]*_per_second\|peak_share\|memory_bytes\|sent_bytes\|time\)": [^,}]*[,}]//g' | tr -s ' {}":,' '\n'; }
same_values() { # folder, folder
    values "$1" >"$WORK/values"
    values "$2" | paste -d' ' "$WORK/values" - | awk '
        { d = $1 - $2; if (d < 0) d = -d; s = $1 < 0 ? -$1 : $1; if ($1 != $2 && !(d <= 1e-9 * (s > 1 ? s : 1))) bad = bad " " $0 }
        END { if (bad) print "values differ:" bad > "/dev/stderr"; exit bad != "" || NR < 20 }'
}
computed() { sed -n 's/.*"tokens": \([0-9]*\), "computed": \([0-9]*\),.*/\1 \2/p' "$1/log.jsonl" | awk '{ a += $1; b += $2 } END { printf "%d", 100 * b / a }'; }
setting() { sed -n 's/.*"--share-prefixes": "\([a-z]*\)".*/\1/p' "$1"/checkpoint-*/state.json | sort -u; }
both() { # name, the least and the most percent that is computed, arguments
    name=$1 least=$2 most=$3
    shift 3
    succeeds train "$@" --out "$WORK/$name"
    cp "$WORK/out" "$WORK/said"
    succeeds train "$@" --share-prefixes off --out "$WORK/$name-off"
    check "$name: on as off" same_values "$WORK/$name" "$WORK/$name-off"
    check "$name: $least to $most % is computed, not $(computed "$WORK/$name")" [ "$(computed "$WORK/$name")" -ge "$least" -a "$(computed "$WORK/$name")" -le "$most" ]
    check "$name: all is computed with off" [ "$(computed "$WORK/$name-off")" = 100 ]
}
small="--init $TINY --chunk 64 --logits-chunk 50 --lr 1e-3 --schedule constant --seed 3"

# ---- pairs and groups: prompts of 151 tokens ---------------------------------------------------------------------------
make_documents "$WORK/pairs.bin" 96 200,180,190,240,170,171,200,160,230,220,180,181 5 150 pairs 2
dpo="$small --data $WORK/pairs.bin --objective dpo --samples 3"
both dpo 50 65 $dpo --steps 10
check 'a line says what is shared' grep -q '^prefixes  2 documents of a pair share their prompt: .* of 2.31 k positions are computed (6[0-9] %), 1.[0-9]x fewer pairs, --share-prefixes$' "$WORK/said"
check 'step lines say what is computed' grep -q '^step 10/10 .* tok/s  *[56][0-9] % computed  ' "$WORK/said"
check 'the run keeps what is shared' [ "$(setting "$WORK/dpo")$(setting "$WORK/dpo-off")" = auto ]
make_documents "$WORK/groups.bin" 96 200,180,190,240,170,171,200,160 6 150 4 4
both grpo 40 55 $small --data "$WORK/groups.bin" --objective grpo --beta 0.1 --samples 1 --steps 4 --lora-rank 3

# ---- a run keeps its setting -----------------------------------------------------------------------------------------------
in_two_parts kept 4 '' $dpo
check 'resumed to the bit' same_run "$WORK/kept" "$WORK/kept-parts" 4
refuses 1 'was trained with --share-prefixes auto, now it is off' train $dpo --steps 6 --out "$WORK/kept-parts" --resume --share-prefixes off
succeeds train $dpo --steps 2 --out "$WORK/older" --share-prefixes off
sed -i 's/"share_prefixes": "off", //' "$WORK/older/log.jsonl" # as an older program wrote it
succeeds train $dpo --steps 4 --out "$WORK/older" --resume
says err '^note: this run began without shared prefixes and goes on without'
check 'and stays as it was' [ -z "$(setting "$WORK/older")" -a "$(computed "$WORK/older")" = 100 ]
refuses 1 'was trained with --share-prefixes off, now it is on' train $dpo --steps 6 --out "$WORK/older" --resume --share-prefixes on

# ---- what excludes it -------------------------------------------------------------------------------------------------------
for other in '--method seco' '--lora-rank 3 --lora-dropout 0.1'; do
    succeeds train $dpo --steps 1 --out "$WORK/alone" --overwrite $other
    says err "^note: --share-prefixes auto: with --[a-z -]* every document is computed alone$"
    check "$other computes all" [ "$(computed "$WORK/alone")" = 100 ]
    refuses 2 '--share-prefixes on: not with --' train $dpo --steps 1 $other --share-prefixes on
done
succeeds train $dpo --steps 1 --out "$WORK/alone" --overwrite --method auto
says err '^note: --method auto: with --share-prefixes only stream applies, not seco$'

# ---- rollouts -----------------------------------------------------------------------------------------------------------------
make_documents "$WORK/prompts.bin" 96 80,100,90,120 7 0 prompts
printf '#!/bin/sh\nn=0\nwhile read -r line; do n=$((n + 1)); echo $((n %% 3)); done\n' >"$WORK/reward"
both rollout 20 45 $small --data "$WORK/prompts.bin" --objective grpo --rollout --reward-command "sh $WORK/reward" --batch 2 \
    --group-size 4 --max-new-tokens 6 --seq-len 130 --steps 4
check 'a line says so' grep -q '^prefixes  4 completions share their prompt, which is computed once, --share-prefixes$' "$WORK/said"

# A teacher computes the same rows; its values of a row serve all texts that share it.
succeeds train --init "$(echo $TINY | sed s/layers=2/layers=4/)" --seed 8 --data $SHARD --seq-len 64 --batch 6 --steps 20 --lr 1e-2 --out "$WORK/teacher" --quiet
for way in forward reverse; do
    both texts-$way 20 45 $small --data "$WORK/prompts.bin" --objective distill --distill-loss $way --teacher "$WORK/teacher" --any-tokenizer \
        --rollout --batch 2 --group-size 4 --max-new-tokens 6 --seq-len 130 --steps 4
done

# ---- families of documents: an epoch in one step --------------------------------------------------------------------------------
make_documents "$WORK/agent.bin" 96 160,200,180,190,170,235,230,225 8 120 documents 4
both families 40 70 $small --data "$WORK/agent.bin" --share-prefixes on --samples 8 --batch 4 --seq-len 320 --steps 3
both taught 40 70 $small --data "$WORK/agent.bin" --share-prefixes on --samples 8 --batch 4 --seq-len 320 --steps 3 --objective distill \
    --distill-weight 0.5 --teacher "$WORK/teacher" --any-tokenizer
sums() { sed -n "s/.*\"$2\": \([0-9]*\),.*/\1/p" "$1/log.jsonl" | awk '{ a += $1 } END { print a / NR }'; }
succeeds plan --init $TINY --data "$WORK/agent.bin" --share-prefixes on --samples 8 --batch 4 --seq-len 320 --json
check 'the plan knows what an epoch computes' [ "$(json rows) of $(json positions)" = "$(sums "$WORK/families" computed) of $(sums "$WORK/families" tokens)" ]
families="$small --data $WORK/agent.bin --share-prefixes on --samples 2 --seq-len 320"
in_two_parts family 4 '' $families
check 'families resume to the bit' same_run "$WORK/family" "$WORK/family-parts" 4
refuses 1 'was trained with --batch 1, now it is 2' train $families --steps 6 --out "$WORK/family-parts" --resume --batch 2

# ---- log-probabilities, losses and metrics of plain documents and of groups ------------------------------------------------------
make_documents "$WORK/advantages.bin" 96 200,180,190,240,170,171,200,160 6 150 advantages 4
make_documents "$WORK/labels.bin" 96 200,180,190,240,170,171,200,160 6 150 labels 4
written() { od -A n -v -t f4 -w4 -j 256 "$1"; } # the values of a file of log-probabilities
same_numbers() { awk '{ d = $1 - $2; n += $1 != 0; if (d < -1e-6 || d > 1e-6) bad = 1 } END { exit bad || n < 300 }'; }
for kind in advantages labels pairs groups agent; do
    for share in on off; do
        succeeds logprobs --init $TINY --seed 3 --data "$WORK/$kind.bin" --seq-len 500 --batch 4 --share-prefixes $share --out "$WORK/$kind-$share.logprobs"
        written "$WORK/$kind-$share.logprobs" >"$WORK/values-$share"
    done
    check "$kind: log-probabilities on as off" same_numbers <<END
$(paste -d' ' "$WORK/values-on" "$WORK/values-off")
END
done
measured() { sed 's/"seconds": .*//' "$WORK/out" | tr -s ' {}":,' '\n'; } # numbers of eval, a word each
evaluated() { # objective, data, --share-prefixes, options
    objective=$1 kind=$2 share=$3
    shift 3
    succeeds eval --init $TINY --seed 3 --objective $objective --data "$WORK/$kind.bin" --seq-len 500 --batch 4 --json --quiet "$@" --share-prefixes $share
    measured >"$WORK/values"
    succeeds eval --init $TINY --seed 3 --objective $objective --data "$WORK/$kind.bin" --seq-len 500 --batch 4 --json --quiet "$@" --share-prefixes off
    check "eval of $objective: on as off" awk '{ d = $1 - $2; if (d < -1e-9 || d > 1e-9 || ($1 != $2 && $1 + 0 == 0)) bad = 1 } END { exit bad || NR < 6 }' <<END
$(measured | paste -d' ' "$WORK/values" -)
END
}
evaluated sft agent on
evaluated orpo pairs auto
evaluated dpo pairs auto --reference-logprobs "$WORK/pairs-on.logprobs"
evaluated ppo advantages on --beta 0.1 --reference-logprobs "$WORK/advantages-on.logprobs"
for objective in grpo gspo cispo; do evaluated $objective groups auto; done
alike="--share-prefixes on --samples 8 --batch 4 --seq-len 320 --steps 3"
both ppo 35 45 $small $alike --data "$WORK/advantages.bin" --objective ppo --beta 0.1 --old-logprobs "$WORK/advantages-on.logprobs"
check 'ratios to the policy before the run' grep -q '"ratio": 0\.998' "$WORK/ppo/log.jsonl"
both kto 45 55 $small $alike --data "$WORK/labels.bin" --objective kto --val-data "$WORK/labels.bin" --val-every 2
check 'with validations' grep -q '"val_loss"' "$WORK/kto/log.jsonl"

# ---- the longest documents that fit -----------------------------------------------------------------------------------------------
for share in auto on; do
    succeeds plan --init $TINY --objective dpo --data "$WORK/pairs.bin" --seq-len auto --share-prefixes $share
    succeeds train $small --data "$WORK/agent.bin" --seq-len auto --share-prefixes $share --batch 2 --steps 1 --out "$WORK/auto-$share"
done
check 'plain documents share with on' [ "$(computed "$WORK/auto-on")" -lt 80 -a "$(computed "$WORK/auto-auto")" = 100 ]
succeeds plan --init $TINY --seq-len auto --shared-tokens 100 --batch 2
says out '^shared   2 documents share 100 tokens: '
succeeds plan --init $TINY --seq-len auto --share-prefixes on
says err '^note: --share-prefixes on: random documents share no tokens; give --data, or --shared-tokens P$'

# ---- parts of sequences, and other micro-batches ------------------------------------------------------------------------------
if command -v mpirun >/dev/null; then
    LAUNCHED="test/ranks/mpirun.sh 2"
    succeeds train $dpo --steps 10 --out "$WORK/two"
    LAUNCHED=
    check 'two processes' same_values "$WORK/dpo" "$WORK/two"
else skip 'two processes' 'there is no mpirun'; fi
succeeds train $dpo --steps 5 --out "$WORK/batch"
succeeds train $dpo --steps 10 --out "$WORK/batch" --resume --batch 2
check 'a step has the same pairs with another --batch' same_values "$WORK/dpo" "$WORK/batch"
finish
