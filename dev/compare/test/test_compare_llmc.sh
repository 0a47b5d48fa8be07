#!/bin/sh
# dev/compare/llmc_bp.sh: what it refuses; with LLMC=<checkout of llm.c>, its loss and gradients against ours, on the CPU.
. test/cli.sh
LLMC_BP=dev/compare/llmc_bp.sh
bp() { # exit status, what the last line of stderr says, arguments...
    wanted=$1 says=$2
    shift 2
    $LLMC_BP "$@" >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of $*" [ $? = "$wanted" ]
    [ -z "$says" ] || check "'$says' is said of $*" sh -c "tail -n 1 '$WORK/err' | grep -qE -- \"\$1\"" - "$says"
}

# ---- refusals: before anything is built -----------------------------------------------------------------------------------------
mkdir "$WORK/checkout"
: >"$WORK/checkout/train_gpt2.c"
folder="--model $GOLDEN/gpt2 --tokens $SHARD --seq-len 8"
bp 2 '--llmc CHECKOUT is missing' $folder
bp 2 'no train_gpt2.c in it, so it is no checkout of llm.c' --llmc "$WORK" $folder
bp 2 'no train_gpt2.cu in it' --llmc "$WORK/checkout" --device cuda $folder
bp 2 '--device tpu: is not cpu or cuda' --llmc "$WORK/checkout" --device tpu $folder
bp 2 '--dtype bf16: llm.c has fp32 on the CPU' --llmc "$WORK/checkout" --dtype bf16 $folder
bp 2 '--seq-len: its value is missing' --llmc "$WORK/checkout" --seq-len
bp 2 '--step: not an option' --llmc "$WORK/checkout" --step 3
bp 2 '--tokens and --seq-len are needed' --llmc "$WORK/checkout" --model $GOLDEN/gpt2
bp 2 'holds no config.json' --llmc "$WORK/checkout" --model "$WORK" --tokens $SHARD --seq-len 8
bp 2 'llm.c has GPT-2 only' --llmc "$WORK/checkout" --model $GOLDEN/llama --tokens $SHARD --seq-len 8
bp 2 '--tokens .*nothing: there is no such file' --llmc "$WORK/checkout" --model $GOLDEN/gpt2 --tokens "$WORK/nothing" --seq-len 8

# ---- against llm.c itself -------------------------------------------------------------------------------------------------------
if [ -f "${LLMC:-}/train_gpt2.c" ]; then
    export TRAIN # sanitized: it converts the model
    model=$WORK/model
    gpt2=gpt2,num_hidden_layers=2,hidden_size=64,num_attention_heads=4,vocab_size=97,max_position_embeddings=128
    succeeds convert --init $gpt2 --seed 3 --out "$model"
    ${CC:-cc} -D_GNU_SOURCE -O1 -I. test/files/compare_tensors.c -lcjson -lm -o "$WORK/compare_tensors"
    same="--model $model --seq-len 96 --batch 3"
    bp 0 '' --llmc "$LLMC" $same --tokens $SHARD --repeat 2 --threads 1 --chunk 7 --grads-out "$WORK/llmc.safetensors"
    check 'two times' grep -qE '"seconds": \[[0-9.e-]+, [0-9.e-]+\]' "$WORK/out"
    check 'no error, some memory, a version' grep -qE '"peak_bytes": [1-9][0-9]+, .*"llm.c": "[0-9a-z]+".*"error": null' "$WORK/out"
    loss=$(json loss) norm=$(json grad_norm)
    succeeds bp $same --data $SHARD --chunk 40 --json --quiet --grads-out "$WORK/ours.safetensors"
    check "the loss $loss is ours" close "$loss" "$(json loss)" 1e-5
    check "the norm $norm is ours" close "$norm" "$(json grad_norm)" 1e-5
    compared=$("$WORK/compare_tensors" "$WORK/llmc.safetensors" "$WORK/ours.safetensors" 1e-5 2>&1)
    check "the gradients are ours: $compared" [ $? = 0 ]
    bp 0 '' --llmc "$LLMC" $same --tokens $SHARD --repeat 1 --grads-out "$WORK/some" --grads-of '*wte*,*.h.1.mlp.c_fc.*'
    check 'gradients of some' [ "$(grep -ao '"transformer[^"]*"' "$WORK/some" | tr -d '\n')" = \
        '"transformer.wte.weight""transformer.h.1.mlp.c_fc.weight""transformer.h.1.mlp.c_fc.bias"' ]
    bp 2 "'lm_head[*]' matches no parameter" --llmc "$LLMC" $same --tokens $SHARD --grads-out "$WORK/none" --grads-of 'lm_head*'
    bp 0 '' --llmc "$LLMC" $same --tokens $SHARD --memory-limit 1000000
    check 'what does not fit is a result' grep -q '"error": "out of memory"' "$WORK/out"
    bp 1 '--seq-len 129: this model has 128 positions' --llmc "$LLMC" --model "$model" --tokens $SHARD --seq-len 129
else
    echo '[  SKIPPED ] llm.c beside ours: NOT TESTED, because LLMC names no checkout of it'
    skipped=$((skipped + 1))
fi
finish
