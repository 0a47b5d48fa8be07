#!/bin/sh
# Training on shards of documents as a user runs it: packed sequences have the gradient of their documents; it learns,
# resumes to the bit, keeps to the plan of its largest sequence, and refuses unsuitable data.
. test/cli.sh
same_loss=1e-5 same_gradient=1e-4
[ $TEST_PRECISION = bf16 ] && same_loss=2e-3 same_gradient=2e-2

lengths() { # seed: lengths of 60 documents, most of them short, few long
    awk -v s="$1" 'BEGIN { srand(s); for (i = 0; i < 60; i++) printf "%d,", 2 + exp(3 + 2.2 * (rand() + rand() + rand() - 1.5)) }'
}
make_documents "$WORK/train-00000.bin" 96 "$(lengths 5)" 1
make_documents "$WORK/train-00001.bin" 96 "$(lengths 6)" 2 1
make_documents "$WORK/val-00000.bin" 96 30,50,20,300,9,60 3 4

# ---- a packed sequence is its documents ---------------------------------------------------------------------------------------------
make_documents "$WORK/seven.bin" 96 40,64,51,33,60,45,58 4 10 # each more than half of 64: alone in a sequence of that length
succeeds bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --grad-accum 7 --json
loss=$(json loss) norm=$(json grad_norm) tokens=$(json tokens) flops=$(json model_flops)
check 'tokens are the positions that there are' [ "$tokens" = $((39 + 63 + 50 + 32 + 59 + 44 + 57)) ]
for options in '' '--method full' '--method checkpoint' '--chunk 9 --logits-chunk 7'; do
    succeeds bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch 7 $options --json
    check "one packed sequence has the loss of its documents $options" close "$loss" "$(json loss)" $same_loss
    check "and their gradient $options" close "$norm" "$(json grad_norm)" $same_gradient
    check "and their tokens $options" [ "$(json tokens)" = "$tokens" ]
    check "and their FLOPs $options" close "$flops" "$(json model_flops)" 1e-9
done
refuses 1 'grad-accum 8: the data has 7 micro-batches, and a pass reads each at most once' \
    bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --grad-accum 8
succeeds bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch 3 --json
planned=$(json plan_bytes)
succeeds plan --for bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch 3 --json
check "bp's plan for this data is plan's" [ "$(json total_bytes)" = "$planned" ]
succeeds plan --init $TINY --data "$WORK/seven.bin" --seq-len 100000 --json
all=$(json total_bytes)
says err '^note: an epoch is 1 step: 7 documents, packed into 100000 tokens a step (--batch x --seq-len); --samples N makes steps of N$'
succeeds plan --init $TINY --seq-len "$tokens" --json
check 'a plan is for no more than the data holds' [ "$all" = "$(json total_bytes)" ]

# ---- a run -----------------------------------------------------------------------------------------------------------------------
common="--init $TINY --data $WORK/train-*.bin --val-data $WORK/val-00000.bin --val-every 5 --seq-len 128 --batch 2 --grad-accum 3
    --steps 14 --lr 1e-2 --warmup 3 --chunk 24 --logits-chunk 20 --save-every 2 --keep-checkpoints 3 --seed 7"
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
succeeds train $common --out "$WORK/straight" --verbose
unset STREAMBP_ALLOCATION_GUARD
sequences=$(sed -n 's/^packing .* in \([0-9]*\) sequences of .*/\1/p' "$WORK/out")
check 'the steps go over the end of an epoch' [ "$sequences" -lt 42 ]
check 'it learns' awk -v l="$(grep '"loss"' "$WORK/straight/log.jsonl" | tail -n 1 | sed 's/.*"loss": \([0-9.]*\).*/\1/')" \
    'BEGIN { exit !(l != "" && l < 4.0) }'
check 'steps have different numbers of tokens' [ "$(grep -o '"tokens": [0-9]*' "$WORK/straight/log.jsonl" | sort -u | wc -l)" -gt 1 ]
check 'waiting for data is in the log' [ "$(grep -c '"data_seconds"' "$WORK/straight/log.jsonl")" = 14 ]
succeeds train $(echo "$common" | sed 's/--steps 14/--steps epoch/; s/--save-every 2//') --json
check 'one epoch is as many steps as it has sequences' [ "$(json steps)" = $((sequences / 3)) ]

# Resumes in the middle, after more than one epoch.
cp -r "$WORK/straight" "$WORK/again"
rm -r "$WORK/again/checkpoint-00000012" "$WORK/again/checkpoint-00000014"
succeeds train $common --out "$WORK/again" --resume
check 'a resumed run ends in the same bits' same_run "$WORK/straight" "$WORK/again" 14
refuses 1 'was trained with --shuffle on, now it is off' train $common --out "$WORK/again" --resume --shuffle off
refuses 1 'was trained with --long split, now it is truncate' train $common --out "$WORK/again" --resume --long truncate
refuses 1 'was trained with --seed 7, now it is 8' train $(echo "$common" | sed 's/--seed 7/--seed 8/') --out "$WORK/again" --resume
refuses 1 'was trained on .*/train-00000.bin to .*/train-00001.bin \(2 files\), --data is .*/train-00000.bin now; resume with the same' \
    train $(echo "$common" | sed 's/train-\*/train-00000/') --out "$WORK/again" --resume
mv "$WORK/train-00001.bin" "$WORK/other"
make_documents "$WORK/train-00001.bin" 96 "$(lengths 6)" 3 1
refuses 1 'was trained on .*/train-00001.bin \(2 files\), which holds other data now' train $common --out "$WORK/again" --resume
mv "$WORK/other" "$WORK/train-00001.bin"

# ---- an error in the data ends the run at that point; saved checkpoints remain --------------------------------------------------------
cp "$WORK/seven.bin" "$WORK/faulty.bin"
size=$(wc -c <"$WORK/faulty.bin")
printf '\007' | dd of="$WORK/faulty.bin" bs=1 seek=$((size - 5)) conv=notrunc 2>/dev/null # a count of the last document
refuses 1 'faulty.bin: the checksum of document 6 is wrong' train --init $TINY --data "$WORK/faulty.bin" --seq-len 64 --steps 20 \
    --shuffle off --save-every 1 --out "$WORK/faulty"
check 'steps before it are saved' [ -f "$WORK/faulty/checkpoint-00000006/DONE" ]

# ---- a fixed number of documents a step -----------------------------------------------------------------------------------------------
for batch in 1 2 9; do # in as many sequences as they need
    succeeds bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch $batch --samples 7 --json
    check "7 samples in sequences of $batch x 64 have their loss" close "$loss" "$(json loss)" $same_loss
    check 'and their gradient' close "$norm" "$(json grad_norm)" $same_gradient
done
sampled="--init $TINY --data $WORK/train-*.bin --seq-len 128 --batch 2 --samples 13 --lr 1e-3 --schedule constant --seed 7"
succeeds train $sampled --out "$WORK/sampled" --save-every 4 --keep-checkpoints 9 --verbose
samples=$(sed -n 's/^packing  \([0-9]*\) segments in .*/\1/p' "$WORK/out")
check 'an epoch is as many steps as its samples make' [ "$(grep -c '"loss"' "$WORK/sampled/log.jsonl")" = $(((samples + 12) / 13)) ]
check 'the header says how long its last step is' \
    grep -q "^steps    $(((samples + 12) / 13)) an epoch, of 13 segments, the last of $((samples % 13))\$" "$WORK/out"
steps=$(((samples + 12) / 13 + 5))
succeeds train $sampled --steps $steps --out "$WORK/sampled-on"
rm -r "$WORK/sampled/checkpoint-"*[!48] # from a step within the epoch, over its end
succeeds train $sampled --steps $steps --out "$WORK/sampled" --resume
check 'steps of samples resume to the bit' same_checkpoint "$WORK/sampled" "$WORK/sampled-on" $steps
refuses 1 'was trained with --samples 13, now it is 12' train $(echo "$sampled" | sed 's/--samples 13/--samples 12/') --steps $steps --out "$WORK/sampled" --resume
refuses 2 'samples 3: .*whole micro-batches of --batch 2' train --init $TINY --data $SHARD --seq-len 64 --batch 2 --samples 3 --out none
succeeds bp --init $TINY --data $SHARD --seq-len 64 --batch 2 --samples 4 --json
norm=$(json grad_norm)
succeeds bp --init $TINY --data $SHARD --seq-len 64 --batch 2 --grad-accum 2 --json
check 'a sample of running text is T tokens' [ "$norm" = "$(json grad_norm)" ]
for options in '--samples 1' '--samples 3' '--samples 100'; do # a plan is for the longest step
    succeeds bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch 9 $options --json
    planned=$(json plan_bytes)
    succeeds plan --for bp --init $TINY --data "$WORK/seven.bin" --seq-len 64 --batch 9 $options --json
    check "bp's plan with $options is plan's" [ "$(json total_bytes)" = "$planned" ]
done

# ---- --seq-len auto -------------------------------------------------------------------------------------------------------------------
length() { sed -n 's/^data .* (length \([0-9]*\)[,)].*/\1/p' "$WORK/out"; }
made_for() { # length, expected line, arguments
    want=$1 what=$2
    shift 2
    succeeds "$@" --verbose
    check "$what is --seq-len $want, not $(length)" [ "$(length)" = "$want" ]
}
make_documents "$WORK/1500.bin" 96 1500,30,40
make_documents "$WORK/3000.bin" 96 3000,30
make_documents "$WORK/pairs.bin" 96 30,1300 4 10 pairs
once="plan --init $TINY" large="--init $TINY,max_position_embeddings=8192"
made_for 1024 'what is shorter' $once --data "$WORK/seven.bin"
check 'of which nothing is said' [ "$(grep -c 'seq-len [0-9]' "$WORK/err")" = 0 ]
made_for 1024 'running text' $once --data $SHARD
made_for 2048 'the longest document' train --init $TINY --steps 1 --data "$WORK/seven.bin" "$WORK/1500.bin"
says err '^note: --seq-len 2048 is what the data needs: the longest document has 1499 positions$'
made_for 2048 'what is as long as the model has positions for' $once --data "$WORK/seven.bin" --val-data "$WORK/3000.bin"
says err '^note: --seq-len 2048 is what the model has positions for: .* has 2999 positions; --rope-scaling yarn,factor=2 makes more$' \
    '3000.bin: 1 of 2 documents are longer than --seq-len 2048 and are split'
made_for 3072 'the longest of --val-data' $once --data "$WORK/seven.bin" --val-data "$WORK/3000.bin" --rope-scaling yarn,factor=2
made_for 2048 'the longer answer of pairs' $once --data "$WORK/pairs.bin" --objective dpo
for verb in eval bp 'plan --for bp'; do made_for 2048 "that of $verb" $verb $large --data "$WORK/1500.bin"; done
chunks='--chunk 1024 --logits-chunk 512 --keep none' # shorter ones would take less
succeeds plan $large $chunks --data "$WORK/3000.bin" --json
full=$(json total_bytes)
made_for 3072 'what fits' plan $large $chunks --data "$WORK/3000.bin" --memory-limit $((full * 33 / 32))
succeeds train $large $chunks --steps 1 --data "$WORK/3000.bin" --memory-limit $((full * 9 / 10))
check "memory takes less than the document, $(length)" [ "$(length)" -gt 1024 -a "$(length)" -lt 2999 ]
says err "^note: --seq-len $(length) is what memory takes: the longest document has 2999 positions; --seq-len 3072 would not fit\$"
succeeds train $large --steps 1 --data "$WORK/1500.bin" --out "$WORK/auto" --schedule constant
succeeds train $large --steps 2 --data "$WORK/1500.bin" --val-data "$WORK/3000.bin" --out "$WORK/auto" --schedule constant --resume
check 'a resumed run keeps its length' [ "$(length)" = 2048 ]
succeeds train $large --config "$WORK/auto" --data "$WORK/seven.bin" --out none
check 'so does one of its options' [ "$(length)" = 2048 ]

# ---- llm.c's shards, shuffled ------------------------------------------------------------------------------------------------------------
in_two_parts llmc 6 '' --init $TINY --data $SHARD --seq-len 64 --shuffle on --schedule constant
refuses 1 'the run began with "--shuffle"' train --init $TINY --data $SHARD --seq-len 64 --steps 8 --out "$WORK/llmc" --schedule constant --resume

# ---- the loss by position ------------------------------------------------------------------------------------------------------------------
model=$WORK/straight/checkpoint-00000014/model.bin
whole() { sed 's/, "curve".*//' "$WORK/out" | sed -n 's/.*"'"$1"'": \([^",}]*\).*/\1/p'; } # of the data, not of a bucket
succeeds eval --model "$model" --data "$WORK/val-00000.bin" --seq-len 128 --batch 2 --curve --json
check 'eval gives the last validation loss' \
    close "$(whole loss)" "$(grep val_loss "$WORK/straight/log.jsonl" | tail -n 1 | sed 's/.*"val_loss": \([0-9.]*\).*/\1/')" $same_loss
curve_agrees() { # the buckets' mean, weighted by their tokens, is the loss; they follow each other
    sed 's/.*"curve": \[//; s/\].*//; s/}, {/\n/g; s/[{}]//g' "$WORK/out" |
        awk -F '[:,]' -v l="$(whole loss)" -v n="$(whole tokens)" '{ if ($2 < end) bad = 1; end = $4; s += $6 * $8; t += $8; b++ }
            END { d = s / t - l; exit !(!bad && b > 3 && t == n && d < 1e-6 && d > -1e-6) }'
}
check 'the curve adds up to the loss' curve_agrees
check 'buckets are powers of two' grep -q '"begin": 16, "end": 32' "$WORK/out"
succeeds eval --model "$model" --data "$WORK/val-00000.bin" --seq-len 128 --curve-tokens 10 --json
check 'the curve adds up with buckets of 10' curve_agrees
check 'buckets are of 10 positions' grep -q '"begin": 20, "end": 30' "$WORK/out"
succeeds eval --model "$model" --data $SHARD --seq-len 64 --curve
says out '^loss [0-9.]*  perplexity [0-9.]*  [0-9]* tokens$'
check 'a table for people, of llm.c shards too' [ "$(grep -cE '^ +(0|1|2-3|4-7|8-15|16-31|32-63)  ' "$WORK/out")" = 7 ]

# ---- ends of a rollout's completions ---------------------------------------------------------------------------------------------------
make_documents "$WORK/prompts.bin" 96 6,4,7 3 2 prompts
printf '#!/bin/sh\nexec sed -u "s/.*/0/"\n' >"$WORK/nothing"
chmod +x "$WORK/nothing"
rollout="--init ${TINY%96}60000 --data $WORK/prompts.bin --seq-len 16 --objective grpo --rollout --group-size 2 --max-new-tokens 4 --steps 1
    --tokenizer $GOLDEN/tokenizers/gpt2.tok --reward-command $WORK/nothing"
ends() { # folder
    sed -n 's/.*ends=\([0-9a-f]*\).*/\1/p' "$1/checkpoint-00000001/state.json"
}
succeeds train $rollout --out "$WORK/eos"
succeeds train $rollout --ignore-eos --out "$WORK/no-eos"
succeeds train $rollout --ignore-eos --stop-ids 7 --out "$WORK/stop"
check '--ignore-eos and --stop-ids are in force' [ "$(for run in eos no-eos stop; do ends "$WORK/$run"; done | sort -u | wc -l)" = 3 ]
refuses 2 'stop-ids: 60000 is outside the vocabulary of 60000' train $rollout --stop-ids 5,60000
refuses 2 'stop-ids: 60000 is outside the vocabulary' plan --init ${TINY%96}60000 --data "$WORK/prompts.bin" --objective grpo --rollout --stop-ids 60000

# ---- unsuitable data -----------------------------------------------------------------------------------------------------------------------
refuses 1 'document 0 has 40 tokens, --seq-len 30 takes 31' train --init $TINY --data "$WORK/seven.bin" --seq-len 30 --long refuse --out none
refuses 1 'prepare both with data/prepare.py' train --init $TINY --data "$WORK/seven.bin" --val-data $SHARD --seq-len 30 --out none
ln -s seven.bin "$WORK/link.bin"
refuses 1 'link.bin and .*seven.bin are the same file' train --init $TINY --data "$WORK/seven.bin" "$WORK/link.bin" --seq-len 30 --out none
cp -r $GOLDEN/llama "$WORK/model"
refuses 1 "model: is the folder of a model" train --model "$WORK/model" --data "$WORK/seven.bin" --seq-len 30 --steps 1 --out "$WORK/model"
check 'nothing is put into that' [ ! -e "$WORK/model/lock" ]
make_documents "$WORK/small.bin" 40 40,50,60
printf '{"not": "the one"}' >"$WORK/model/tokenizer.json"
refuses 1 'small.bin was made with tokenizer made for tests .*model/tokenizer.json .*--any-tokenizer' \
    eval --model "$WORK/model" --data "$WORK/small.bin" --seq-len 30
succeeds eval --model "$WORK/model" --data "$WORK/small.bin" --seq-len 30 --any-tokenizer
rm "$WORK/model/tokenizer.json"
cp $GOLDEN/tokenizers/gpt2.tok "$WORK/model/tokenizer.tok" # like a run without tokenizer.json
refuses 1 'small.bin was made with tokenizer made for tests .*model/tokenizer.tok .*--any-tokenizer' \
    eval --model "$WORK/model" --data "$WORK/small.bin" --seq-len 30
finish
