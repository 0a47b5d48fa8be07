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
refuses 2 '--teacher: plan the teacher by plan --for logprobs --model T' plan --init $TINY --objective distill --teacher T --seq-len 64
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
