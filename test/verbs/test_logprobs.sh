#!/bin/sh
# The verb logprobs as a user runs it: it writes the log-probabilities whose mean is eval's loss; keys and packing are
# in test_reference.c. A file is complete or absent; impossible inputs are refused.
. test/cli.sh
make_documents "$WORK/a.bin" 96 40,64,51,33,200,45,58 4 10
make_documents "$WORK/b.bin" 96 30,2,120 5
data="$WORK/a.bin $WORK/b.bin" # 643 tokens in 10 documents
values() { od -A n -v -t f4 -w4 -j 256 "$1"; }

# ---- the loss of eval, from the file itself ------------------------------------------------------------------------
for options in '--seq-len 200' '--seq-len 64' '--seq-len 64 --long truncate' \
    '--seq-len 64 --batch 3 --chunk 9 --logits-chunk 7'; do
    succeeds eval --init $TINY --data $data $options --json --quiet
    loss=$(json loss) tokens=$(json tokens)
    rm -f "$WORK/x.logprobs"
    succeeds logprobs --init $TINY --data $data $options --out "$WORK/x.logprobs" --json --quiet
    check "the loss is eval's: $options" close "$(json loss)" "$loss" 1e-9
    check "and so are the targets: $options" [ "$(json counted)" = "$tokens" ]
    check "all tokens have a value: $options" \
        [ "$(json tokens) $(json documents) $(values "$WORK/x.logprobs" | wc -l)" = '643 10 643' ]
    mean=$(values "$WORK/x.logprobs" | awk '{ s -= $1; n += $1 != 0 } END { printf "%.9f", s / n }')
    check "the file's values have that mean: $options" close "$mean" "$loss" 1e-6
done
check 'keys are 16 digits' expr "$(json model_key) $(json data_key)" : '[0-9a-f]\{16\} [0-9a-f]\{16\}$' >/dev/null

# ---- temperature ---------------------------------------------------------------------------------------------------
succeeds logprobs --init $TINY --data $data --seq-len 64 --temperature 1000 --out "$WORK/hot.logprobs" --json --quiet
check 'a high temperature makes all tokens alike' close "$(json loss)" 4.564348 1e-3 # ln 96
refuses 2 'temperature 0 leaves only the likeliest token' \
    logprobs --init $TINY --data $data --seq-len 64 --temperature 0 --out "$WORK/cold.logprobs"

# ---- the reference of a run, computed before its first step ----------------------------------------------------------
mkdir "$WORK/pairs"
make_documents "$WORK/pairs/train.bin" 96 40,64,51,33,60,45,58,20 4 10 pairs
make_documents "$WORK/pairs/val.bin" 96 30,20,50,44 5 3 pairs
dpo="--init $TINY --objective dpo --data $WORK/pairs/train.bin --seq-len 63 --lr 1e-2 --schedule constant"
validated="$dpo --val-data $WORK/pairs/val.bin"
references() { ls "$WORK/pairs" | grep -c '^reference-[0-9a-f]*.logprobs$'; }
losses() { grep -o '"step": [0-9]*, "loss": [-0-9.e]*' "$1/log.jsonl"; }
succeeds train $validated --steps 4 --out "$WORK/straight"
check 'of --data and of --val-data each one is kept' [ "$(references)" = 2 ]
check 'both are said to be computed' [ "$(grep -c '^reference  computing ' "$WORK/out")" = 2 ]
first=$(losses "$WORK/straight" | sed -n '1s/.*: //p')
check 'a policy that is the reference begins at ln 2' close "$first" 0.693147 1e-4
succeeds train $validated --steps 2 --out "$WORK/half"
check 'a second run finds them' [ "$(grep -c '^reference  reused ' "$WORK/out")" = 2 ]
succeeds train $validated --steps 4 --out "$WORK/half" --resume
check 'so does a resumed run, whose model is another' [ "$(grep -c '^reference  reused ' "$WORK/out")" = 2 ]
check 'and it goes on as if it had not been interrupted' [ "$(losses "$WORK/half")" = "$(losses "$WORK/straight")" ]
check 'with the same weights' \
    cmp -s "$WORK/half/checkpoint-00000004/model.bin" "$WORK/straight/checkpoint-00000004/model.bin"
check 'and no other files' [ "$(references)" = 2 ]

# ---- eval finds it, by the run's key: beside the data, or in the run's folder ----------------------------------------
last="--objective dpo --data $WORK/pairs/val.bin --seq-len 63 --json --quiet"
succeeds train $validated --val-every 4 --steps 4 --out "$WORK/ends"
validation=$(sed -n 's/.*"val_loss": \([^,]*\),.*/\1/p' "$WORK/ends/log.jsonl" | tail -n 1)
succeeds eval --model "$WORK/ends" $last
check 'the loss is that of the run'"'"'s last validation' close "$(json loss)" "$validation" 1e-9
mv "$WORK"/pairs/reference-*.logprobs "$WORK/ends"
succeeds eval --model "$WORK/ends/checkpoint-00000004/model.bin" $last
check 'and with the reference in the folder of the run' close "$(json loss)" "$validation" 1e-9
refuses 2 '--objective dpo needs --model RUN, whose reference is found, or --reference-logprobs FILE' eval --init $TINY $last
rm "$WORK"/ends/reference-*.logprobs
refuses 1 'reference-[0-9a-f]{16}.logprobs is missing: the reference of this run .* logprobs --init .* --data ... --seq-len 63 --out' \
    eval --model "$WORK/ends" $last
refuses 1 'reference-[0-9a-f]{16}.logprobs is missing: the reference of this run' \
    train $validated --steps 6 --out "$WORK/half" --resume

# ---- answers with a label: the reference stays as weights; mismatched completions come from the sequence itself ------
make_documents "$WORK/labels.bin" 96 40,20,25,31,12,45,33,18,22,27,60,9 4 5 labels
by_label="--init $TINY --objective kto --seq-len 63 --lr 1e-2 --schedule constant"
kto="$by_label --data $WORK/labels.bin --batch 2"
in_two_parts kto 4 '' $kto --val-data "$WORK/labels.bin"
check 'a policy that is the reference begins at a half' [ "$(losses "$WORK/kto" | sed -n '1s/.*: //p')" = 0.5 ]
check 'a later divergence is above 0' grep -q '"kl": 0.[0-9]*[1-9]' "$WORK/kto/log.jsonl"
check 'validation has the loss, too' grep -q '"val_kl": 0.[0-9]*[1-9]' "$WORK/kto/log.jsonl"
check 'nothing is told of sequences of one document' [ "$(grep -c 'only one document' "$WORK/err")" = 0 ]
check 'a resumed run has the same losses' [ "$(losses "$WORK/kto-parts")" = "$(losses "$WORK/kto")" ]
refuses 1 'trained with --kto-loss desirable-weight=1, now it is desirable-weight=2' train $kto --steps 6 --out "$WORK/kto" --resume --desirable-weight 2
make_documents "$WORK/long.bin" 96 60,62,61 4 5 labels
succeeds train $by_label --data "$WORK/long.bin" --batch 1 --steps 2
check 'a sequence of one document is told of, once' [ "$(grep -c 'only one document' "$WORK/err")" = 1 ]
refuses 2 'needs --adapter, whose base model is the reference' \
    eval --init $TINY --objective kto --data "$WORK/labels.bin" --seq-len 63

# ---- completions of another policy ---------------------------------------------------------------------------------
make_documents "$WORK/groups.bin" 96 20,30,25,28 6 4 2
groups="--data $WORK/groups.bin --seq-len 63"
succeeds logprobs --init $TINY $groups --seed 3 --out "$WORK/old.logprobs"
succeeds train --init $TINY $groups --objective grpo --beta 0.1 --steps 1 --out "$WORK/grouped" --old-logprobs "$WORK/old.logprobs" --any-reference
check 'groups of files without spread are counted' grep -q '"frac_reward_zero_std": 0,' "$WORK/grouped/log.jsonl"

# ---- a teacher's likeliest tokens: distillation ----------------------------------------------------------------------
texts="--data $data --seq-len 64" student="--init $TINY --seed 5" written=$WORK/t.teacher
distill="--objective distill --teacher-logprobs $written"
succeeds logprobs --init $TINY $texts --json --quiet --out "$WORK/y.logprobs"
loss=$(json loss)
succeeds logprobs --init $TINY $texts --top-k 8 --out "$written" --json --quiet
check 'the likeliest tokens have the same loss' close "$(json loss)" "$loss" 1e-9
check 'a record has 12 + 8 k bytes' [ "$(wc -c <"$written")" = $((256 + 643 * 76)) ]
check 'nothing else is left' [ "$(ls "$WORK" | grep -c 'teacher.part')" = 0 ]
cp "$written" "$WORK/begun.teacher"
succeeds logprobs --init $TINY $texts --top-k 8 --batch 3 --out "$WORK/b.teacher"
refuses 1 'holds the 8 likeliest tokens of a teacher; it belongs to --teacher-logprobs' \
    train $student $texts --objective ppo --beta 1 --reference-logprobs "$written"
kl() { # options: the divergence of a student from the teacher, by eval
    succeeds eval $texts $distill --json --quiet "$@"
    json kl
}
check 'a student that is the teacher has no divergence' [ "$(kl --init $TINY | awk '{ print ($1 < 1e-8 && $1 > -1e-8) }')" = 1 ]
for place in host "disk --disk $WORK"; do
    succeeds logprobs --init $TINY $texts --top-k 8 --weights $place --out "$WORK/placed.teacher" --overwrite --quiet
    check "weights in place $place give the same bits" cmp -s "$WORK/placed.teacher" "$WORK/t.teacher"
done
small=$(kl $student)
written=$WORK/all.teacher distill="--objective distill --teacher-logprobs $WORK/all.teacher"
succeeds logprobs --init $TINY $texts --top-k 96 --out "$written" --quiet
check 'fewer tokens give at most the whole divergence' [ "$(awk -v a="$small" -v b="$(kl $student)" 'BEGIN { print (a > 0 && a < b) }')" = 1 ]
in_two_parts distilled 4 '' $student $texts $distill --distill-weight 0.5 --temperature 1 --lr 1e-2 --schedule constant
check 'its log has both parts of the loss' grep -q '"kl": [0-9.e-]*, "cross_entropy": [0-9.]*' "$WORK/distilled/log.jsonl"
refuses 1 'trained with --teacher-logprobs .*distill-weight=0.5' \
    train $student $texts $distill --distill-weight 0.25 --steps 6 --out "$WORK/distilled" --resume
succeeds train $student $texts --objective distill --distill-loss reverse --teacher-logprobs "$WORK/y.logprobs" --steps 1
succeeds train $student $texts --objective distill --distill-loss reverse --teacher-logprobs "$written" --steps 1
refuses 1 'at temperature 1, this run has temperature 2' train $student $texts $distill --temperature 2
refuses 1 'was computed from other data' train $student --data "$WORK/a.bin" --seq-len 64 $distill
refuses 2 'has the targets. log-probabilities alone; write it with logprobs --top-k' \
    train $student $texts --objective distill --teacher-logprobs "$WORK/y.logprobs"
refuses 2 'is of 96 ids, the student has 90; write it with logprobs --vocabulary 90' \
    train --init ${TINY%,*},vocab_size=90 --any-tokenizer $texts $distill
refuses 1 'T: No such file or directory' train $student $texts --objective distill --teacher T
refuses 2 'gpt2: its vocabulary has 101 ids, but the texts have up to 200' \
    bp --init ${TINY%,*},vocab_size=200 --seq-len 64 --objective distill --teacher test/golden/gpt2
refuses 2 'needs a teacher.s values: type logprobs --model TEACHER' train $student $texts --objective distill
refuses 2 'top-k 97: above the 96 ids of the model' logprobs --init $TINY $texts --top-k 97 --out "$WORK/no.logprobs"

# A toy: a teacher of four layers, students of two. With the teacher's distribution they come nearer to it on texts that
# none of them has seen than with the texts' tokens alone.
sanitized_train=$TRAIN TRAIN=${TRAIN_PLAIN:-$TRAIN} # mostly arithmetic
make_documents "$WORK/many.bin" 96 60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60,60 11
make_documents "$WORK/few.bin" 96 60,60,60,60,60,60 12
make_documents "$WORK/unseen.bin" 96 60,60,60,60,60,60 13
steps='--seq-len 64 --lr 1e-2 --schedule constant --batch 6 --quiet'
succeeds train --init "$(echo $TINY | sed s/layers=2/layers=4/)" --data "$WORK/many.bin" $steps --steps 60 --out "$WORK/teacher"
for text in few unseen; do
    succeeds logprobs --model "$WORK/teacher" --data "$WORK/$text.bin" --seq-len 64 --top-k 16 --out "$WORK/$text.teacher" --quiet
done
for seed in 1 2 3; do
    for way in sft distill; do
        options="--objective $way"
        [ $way = distill ] && options="$options --teacher-logprobs $WORK/few.teacher"
        succeeds train --init $TINY --seed $seed --data "$WORK/few.bin" $steps --steps 40 $options --out "$WORK/$way-$seed"
        succeeds eval --model "$WORK/$way-$seed" --data "$WORK/unseen.bin" --seq-len 64 --objective distill \
            --teacher-logprobs "$WORK/unseen.teacher" --json --quiet
        json kl >"$WORK/$way.kl"
    done
    check "seed $seed: nearer than by cross-entropy: $(cat "$WORK/distill.kl" "$WORK/sft.kl")" \
        [ "$(cat "$WORK/distill.kl" "$WORK/sft.kl" | awk 'NR == 1 { a = $1 } END { print (a > 0 && a < 0.5 * $1) }')" = 1 ]
done

# A teacher that runs with its student gives the bits of its file, wherever its weights lie.
TRAIN=$sanitized_train
few="--init $TINY --seed 4 --data $WORK/few.bin $steps --shuffle off --objective distill" live="--teacher $WORK/teacher"
succeeds logprobs --model "$WORK/teacher" --data "$WORK/few.bin" --seq-len 64 --batch 6 --top-k 16 --out "$WORK/few6.teacher" --quiet
for way in forward reverse; do
    options="$few --distill-loss $way --steps 2"
    succeeds train $options --teacher-logprobs "$WORK/few6.teacher" --out "$WORK/$way-file"
    for place in device host "disk --disk $WORK"; do
        succeeds train $options $live --teacher-top-k 16 --teacher-on $place --out "$WORK/$way-live" --overwrite
        check "$way: a teacher in place $place is its file, to the bit" same_checkpoint "$WORK/$way-file" "$WORK/$way-live" 2
    done
done
in_two_parts live 4 '' $few $live --grad-accum 1
refuses 1 'trained with --teacher-logprobs' train $few --teacher "$WORK/sft-1" --steps 6 --out "$WORK/live" --resume
succeeds eval --model "$WORK/sft-1" --data "$WORK/unseen.bin" --seq-len 64 --objective distill --teacher-logprobs "$WORK/unseen.teacher" --json --quiet
loss=$(json kl)
succeeds eval --model "$WORK/sft-1" --data "$WORK/unseen.bin" --seq-len 64 --objective distill $live --teacher-top-k 16 --json --quiet
check 'eval with the teacher finds the same divergence' close "$(json kl)" "$loss" 1e-6
succeeds train $few $live --val-data "$WORK/unseen.bin" --steps 1

# The plan of both is the run's. An estimate adds the teacher's passes; other places of its weights are compared.
first() { grep -o "\"$1\": [0-9.e+-]*" "$WORK/out" | sed -n '1s/.* //p'; }
of_teacher() { sed -n 's/.*"teacher": {\(.*\)/\1/p' "$WORK/out" | grep -o "\"$1\": [0-9.e+-]*" | sed -n '1s/.* //p'; }
loud=$(echo "$few" | sed 's/--quiet//')
succeeds train $loud $live --steps 1 --json --verbose
planned=$(json plan_bytes)
held=$(sed -n 's/^teacher  .*: \([0-9.]* [KM]iB\) on the device.*/\1/p' "$WORK/err")
succeeds plan $loud $live --json
check 'the student has the bytes of the run' [ "$(first total_bytes)" = "$planned" ]
check 'and the teacher' grep -q "^teacher   llama, .*: $held\$" "$WORK/err"
card="plan --init qwen3-0.6b --objective distill --seq-len 8192 --grad-accum 3 --machine h100,host=64GiB,disk=1TiB --json --quiet"
succeeds $card
alone=$(first estimated_seconds)
succeeds $card --teacher Qwen/Qwen3-8B --teacher-base nf4 --teacher-on host
passes=$(of_teacher estimated_seconds) bytes=$(of_teacher host_bytes)
check 'a step has both' close "$(sed 's/"teacher": {[^}]*}//' "$WORK/out" | grep -o '"estimated_seconds": [0-9.e+-]*' | sed 's/.* //')" \
    "$(awk -v a="$alone" -v b="$passes" 'BEGIN { print a + b }')" 1e-5
check "weights are read three times" [ "$(of_teacher weight_reads)" = 3 ]
check "in each micro-batch of a step" close "$(of_teacher moved_bytes)" $((3 * bytes)) 1e-6
check 'a token of a file has 12 + 8 k bytes' [ "$(of_teacher file_bytes_per_token)" = 524 ]
succeeds $card --teacher qwen3-4b
check 'two other places' [ "$(grep -o '"step_seconds": [0-9]' "$WORK/out" | wc -l)" = 2 ]
refuses 1 'qwen3-32b: does not fit: needs [0-9.]* GiB; the device has [0-9.]* GiB; give --teacher-base nf4' $card --teacher qwen3-32b --teacher-base none --grad-accum 1 --machine 4090,host=0
succeeds plan --init glm4.7-flash --latents layer --teacher gemma4-e4b --objective distill --machine h200 --seq-len 1000 --lora-rank 16
refuses 1 'does not fit: needs [0-9.]* GiB, host [0-9.]* GiB; the device has [0-9.]* GiB, host 8.00 GiB; give' $card --teacher qwen3-32b --teacher-on host --machine 4090,host=8GiB
refuses 2 '--teacher: plans a student.s training' plan --teacher qwen3-4b --objective distill --machine h100

# Texts that the student writes: it comes nearer by both losses, also one text a prompt; a run in two parts is one run.
make_documents "$WORK/prompts.bin" 96 5,9,3,7,12,4,6,8 3 0 prompts
texts="--init $TINY --seed 5 --data $WORK/prompts.bin --rollout --seq-len 32 --batch 4 --max-new-tokens 4 --schedule constant --objective distill"
of_log() { sed -n "s/.*\"kl\": \([^,]*\),.*/\1/p" "$1/log.jsonl" | awk -v n="$2" '{ k[NR] = $1 } END { for (i = 1; i <= n; i++) { a += k[i]; b += k[NR + 1 - i] } print (b < 0.8 * a && b > 0) }'; }
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
for way in 'forward --group-size 1 --lr 1e-2' 'reverse --group-size 24 --lr 3e-3'; do
    learns=150
    [ "${way%% *}" = forward ] && learns=60
    name=texts-${way%% *}
    TRAIN=${TRAIN_PLAIN:-$sanitized_train}
    succeeds train $texts $live --distill-loss $way --steps $learns --out "$WORK/$name-long" --quiet
    check "nearer on its own texts: $way" [ "$(of_log "$WORK/$name-long" 10)" = 1 ]
    TRAIN=$sanitized_train
    in_two_parts $name 6 '' $texts $live --distill-loss $way --temperature 0.8
    check "with the same log: $way" same_run "$WORK/$name" "$WORK/$name-parts" 6
done
unset STREAMBP_ALLOCATION_GUARD
check 'completions have no reward' grep -q '"rewards": {}, "reward": null, "advantage": null' "$WORK/texts-forward/rollouts.jsonl"
succeeds train $texts $live --steps 1 --out "$WORK/texts-plan"
planned=$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")
run plan $texts $live --verbose
check 'plan = run' [ "$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")" = "$planned" ]
succeeds plan --init phi4 --teacher gemma3-4b --machine 3060,host=512GiB --data "$WORK/prompts.bin" --any-tokenizer --objective distill --rollout \
    --seq-len 4k --max-new-tokens 64
check 'without an estimate it takes a place where both fit' grep -q '^teacher .* --teacher-on host: ' "$WORK/out"
refuses 1 'trained with --max-new-tokens 4, now it is' train $texts $live --steps 2 --out "$WORK/texts-plan" --resume --max-new-tokens 5
refuses 2 'its vocabulary has 96 ids, but the texts have up to 99' train $texts $live --init ${TINY%,*},vocab_size=99
refuses 2 'learns from texts of the current student' train $texts $live --updates 2
refuses 2 'the teacher judges each token' train $texts $live --reward-command true
refuses 2 'writes its own, so give --teacher' train $texts --teacher-logprobs "$WORK/few6.teacher"
refuses 2 '--val-data: not with --rollout' train $texts $live --val-data "$WORK/prompts.bin"
refuses 2 'group-size 1: an advantage compares' train $texts --objective grpo --group-size 1 --reward-command true
if command -v python3 >/dev/null; then # turns with an environment, too
    in_two_parts turns 4 '' $texts $live --group-size 3 --lr 1e-2 --seq-len 60 --max-turns 3 --stop-ids "$(seq -s, 0 3 93)" \
        --render-command 'exec python3 data/render.py . bytes' --environment-command \
        'while read -r x; do echo "{\"messages\": [{\"role\": \"tool\", \"content\": \"12\"}], \"reward\": 0.5, \"done\": false}"; done'
    check 'its turns are learned' grep -q '"environment/turns": [2-9].*"kl": [1-9]' "$WORK/turns/log.jsonl"
fi
cp $GOLDEN/tokenizers/gpt2.tok "$WORK/teacher/tokenizer.tok"
refuses 2 'tokenizer.tok is not that of the data, whose own tokenizer.tok is not next to them' train $texts $live
succeeds train $texts $live --any-tokenizer --steps 1
rm "$WORK/teacher/tokenizer.tok"

# A teacher with more ids than its student: their softmax is over the student's, for the targets, too.
succeeds convert --init "${TINY%,*},vocab_size=200" --seed 8 --out "$WORK/wide.bin"
succeeds logprobs --model "$WORK/wide.bin" --data "$WORK/few.bin" --seq-len 64 --batch 6 --top-k 96 --vocabulary 96 --out "$WORK/wide.teacher" --quiet
check 'a target has its value among all' [ "$(od -A n -v -t f4 -w780 -j 256 "$WORK/wide.teacher" | awk '$3 != 0 {
    near = 0; for (i = 100; i <= 195; i++) near += $i - $3 < 1e-5 && $3 - $i < 1e-5; n++; bad += !near } END { print (n > 300 && !bad) }')" = 1 ]
options="$few --distill-loss reverse --steps 1"
succeeds train $options --teacher-logprobs "$WORK/wide.teacher" --out "$WORK/wide-file"
succeeds train $options --teacher "$WORK/wide.bin" --out "$WORK/wide-live"
check 'the same with a live teacher' same_checkpoint "$WORK/wide-file" "$WORK/wide-live" 1
refuses 2 '--val-data: the teacher.s file has the tokens of --data' train $few --teacher-logprobs "$WORK/few6.teacher" --val-data "$WORK/unseen.bin"
refuses 2 '--teacher and --teacher-logprobs exclude each other' train $few $live --teacher-logprobs "$WORK/few6.teacher"

# ---- text for people -----------------------------------------------------------------------------------------------
succeeds logprobs --init $TINY --data $data --seq-len 200 --out "$WORK/x.logprobs" --overwrite
check 'it says what it wrote' \
    grep -q 'x.logprobs: [0-9]* log-probabilities of 10 documents, on average -[0-9.]*$' "$WORK/out"
check 'it says what it reads' grep -q '^data     10 documents in 2 shards' "$WORK/out"

# ---- refusals leave nothing ----------------------------------------------------------------------------------------
refuses 1 'is one of llm.c.s shards, which have no documents' \
    logprobs --init $TINY --data $SHARD --seq-len 64 --out "$WORK/no.logprobs"
check 'nothing is left of what failed' [ "$(find "$WORK" -name 'no.logprobs*' | wc -l)" = 0 ]
finish
