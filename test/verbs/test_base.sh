#!/bin/sh
# A frozen base in 4 bits as a user handles it: gradients equal those over the decoded weights to the bit, for all
# methods, places and ranks; folders convert to bitsandbytes' and back; adapters know their base; the impossible is
# refused.
. test/cli.sh
ranks() { count=$1; shift; test/ranks/mpirun.sh $count "$TRAIN" "$@" >"$WORK/out" 2>"$WORK/err"; }
ids() { sed 's/.*"ids": \(\[[^]]*\]\).*/\1/' "$WORK/out"; }
lora='--lora-rank 3 --seq-len 30 --batch 6 --quiet --overwrite'
# ---- the same gradients --------------------------------------------------------------------------------------------------------
gpt_oss='hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16,num_experts=4,num_experts_per_tok=2'
succeeds convert --init gpt_oss,$gpt_oss,intermediate_size=32,vocab_size=96,sliding_window=8 --seed 5 --out "$WORK/gpt_oss" --quiet
for model in qwen3 gpt2 qwen3_5_moe gpt_oss granitemoehybrid gemma4-e qwen3_moe-fp8 qwen3-fp8 qwen3_next-fp8 glm4_moe; do
    type=nf4 of=$GOLDEN/$model
    [ $model = gpt2 ] && type=fp4
    case $model in *fp8 | glm4_moe) type=fp8 ;; esac
    [ $model = gpt_oss ] && type=mxfp4 of=$WORK/gpt_oss
    decoded=$WORK/decoded-$model
    succeeds convert --model "$of" --base $type --out "$decoded" --quiet
    succeeds bp --model "$of" --base $type $lora --grads-out "$WORK/a.safetensors"
    succeeds bp --model "$decoded" $lora --grads-out "$WORK/b.safetensors"
    check "$model: 4 bits, decoded" cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
    succeeds bp --model "$of" --base $type $lora --method full --weights host --grads-out "$WORK/a.safetensors"
    succeeds bp --model "$decoded" $lora --method full --grads-out "$WORK/b.safetensors"
    check "$model: 4 bits in host memory, method full" cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
    succeeds bp --model "$of" --base $type $lora --chunk 7 --inputs-every 2 --inputs host --weights disk --disk "$WORK" --grads-out "$WORK/a.safetensors"
    succeeds bp --model "$decoded" $lora --chunk 7 --grads-out "$WORK/b.safetensors"
    check "$model: 4 bits, chunks, inputs of every second layer" cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
    # Tokens one by one: products read the codes, and differ in their last bits.
    sample='--prompt-ids 7,1,2,3 --max-new-tokens 20 --temperature 0 --json'
    succeeds sample --model "$of" --base $type $sample
    ids=$(ids)
    succeeds sample --model "$decoded" $sample
    check "$model: 4 bits write what decoded ones write" [ -n "$ids" -a "$(ids)" = "$ids" ]
done
succeeds convert --model $GOLDEN/qwen3 --base nf4 --quantise-head --out "$WORK/decoded-head" --quiet
succeeds sample --model $GOLDEN/qwen3 --base nf4 --quantise-head $sample
ids=$(ids)
succeeds sample --model "$WORK/decoded-head" $sample
check 'and with the head in 4 bits' [ "$(ids)" = "$ids" ]
command -v mpirun >/dev/null || skip 'ranks that share a base in 4 bits' 'there is no mpirun'
for options in '--zero 3' '--zero 3 --weights host' '--sp 3' '--zero 3 --base mxfp4' '--zero 3 --base fp8' '--sp 3 --base fp8'; do
    command -v mpirun >/dev/null || break
    coded="$GOLDEN/qwen3 --base nf4" decoded=$WORK/decoded-qwen3
    case $options in
        *mxfp4) coded=$WORK/gpt_oss decoded=$WORK/decoded-gpt_oss ;;
        --sp*fp8) coded=$GOLDEN/qwen3_next-fp8 decoded=$WORK/decoded-qwen3_next-fp8 ;;
        *fp8) coded=$GOLDEN/qwen3_moe-fp8 decoded=$WORK/decoded-qwen3_moe-fp8 ;;
    esac
    check "3 ranks $options" ranks 3 bp --model $coded $lora $options --grads-out "$WORK/a.safetensors"
    check "3 ranks $options" ranks 3 bp --model "$decoded" $lora ${options% --base*} --grads-out "$WORK/b.safetensors"
    check "3 ranks, $options: 4 bits, decoded" cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
done

# ---- folders -------------------------------------------------------------------------------------------------------------------
for model in qwen3-nf4 gpt2-fp4 gpt_oss-mxfp4 qwen3_moe-fp8 qwen3-fp8 qwen3_next-fp8; do
    type=${model#*-}
    succeeds convert --model $GOLDEN/$model --to $type --out "$WORK/$model" --quiet
    check "$model is copied to the byte" cmp -s $GOLDEN/$model/model.safetensors "$WORK/$model/model.safetensors"
    case $type in mxfp4 | fp8) check 'its config.json, too' cmp -s $GOLDEN/$model/config.json "$WORK/$model/config.json" ;; esac
    [ $model = qwen3-fp8 ] && continue # its matrices have scales of several forms, which config.json does not tell
    succeeds plan --for bp --model $GOLDEN/$model $(echo $lora | sed s/--overwrite//) --json
    planned=$(json total_bytes)
    succeeds bp --model $GOLDEN/$model $lora --json
    check "a plan of $model needs no weights" [ -n "$planned" -a "$planned" = "$(json plan_bytes)" ]
done
succeeds convert --model $GOLDEN/qwen3-bf16 --to nf4 --quantise-head --max-shard-size 20kB --out "$WORK/head" --quiet
succeeds bp --model "$WORK/head" $lora --grads-out "$WORK/a.safetensors"
succeeds bp --model $GOLDEN/qwen3-bf16 --base nf4 --quantise-head $lora --grads-out "$WORK/b.safetensors"
check 'a folder with its head in 4 bits' cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
succeeds convert --model "$WORK/head" --out "$WORK/head.bin" --dtype fp32 --quiet
succeeds convert --model "$WORK/head" --out "$WORK/plain" --quiet
check 'decoded folders are of no quantiser' [ "$(grep -c quantization_config "$WORK/plain/config.json")" = 0 ]

# bitsandbytes leaves experts alone: a folder in 4 bits has them as they were, until --base names the type
succeeds convert --model $GOLDEN/qwen3_5_moe --to nf4 --out "$WORK/experts" --quiet
succeeds bp --model "$WORK/experts" $lora --json
planned=$(json plan_bytes)
succeeds plan --for bp --model "$WORK/experts" $(echo $lora | sed s/--overwrite//) --json
check 'and so does its plan' [ "$planned" = "$(json total_bytes)" ]
succeeds bp --model "$WORK/experts" --base nf4 $lora --grads-out "$WORK/a.safetensors"
succeeds bp --model "$WORK/decoded-qwen3_5_moe" $lora --grads-out "$WORK/b.safetensors"
check 'experts of a folder in 4 bits, quantised' cmp -s "$WORK/a.safetensors" "$WORK/b.safetensors"
succeeds sample --model "$WORK/experts" $sample
says err 'experts are not: to quantise them, too, give --base nf4'
ids=$(ids)
succeeds convert --model "$WORK/experts" --base none --out "$WORK/experts-decoded" --quiet
succeeds sample --model "$WORK/experts-decoded" $sample
check 'experts that stay in place write the same' [ -n "$ids" -a "$(ids)" = "$ids" ]

# ---- adapters ------------------------------------------------------------------------------------------------------------------
train="--model $GOLDEN/qwen3-bf16 --lora-rank 4 --data $SHARD --any-tokenizer --seq-len 48 --batch 2 --lr 1e-2 --quiet --schedule constant"
in_two_parts straight 4 '' $train --base nf4
refuses 1 'was trained with --base nf4,' train $train --steps 5 --out "$WORK/straight-parts" --resume
adapter="--adapter $WORK/straight/checkpoint-00000004"
eval="--data $SHARD --any-tokenizer --seq-len 48 --val-steps 2 --json"
succeeds eval --model $GOLDEN/qwen3-bf16 --base nf4 $adapter $eval
loss=$(json loss)
refuses 1 'its weights differ; give that model, and --base as in its training' eval --model $GOLDEN/qwen3-bf16 $adapter $eval
succeeds convert --model $GOLDEN/qwen3-bf16 --to nf4 --out "$WORK/nf4" --quiet
succeeds eval --model "$WORK/nf4" $adapter $eval
check 'a folder in 4 bits is the same base' [ "$(json loss)" = "$loss" ]
succeeds convert --model "$WORK/nf4" $adapter --merge --dtype fp32 --out "$WORK/merged.bin" --quiet
succeeds eval --model "$WORK/merged.bin" $eval
check 'merged: decoded weights and adapters' close "$(json loss)" "$loss" 1e-4
succeeds convert --model $GOLDEN/qwen3-bf16 --base nf4 $adapter --merge --dtype fp32 --out "$WORK/merged2.bin" --quiet
check 'from either' cmp -s "$WORK/merged.bin" "$WORK/merged2.bin"
succeeds sample --model "$WORK/nf4" $adapter --prompt-ids 1,2,3 --max-new-tokens 8 --temperature 0 --json
ids=$(ids)
succeeds sample --model "$WORK/merged.bin" --prompt-ids 1,2,3 --max-new-tokens 8 --temperature 0 --json
check 'the merged model writes the same' [ "$(ids)" = "$ids" ]

# from FP8 to 4 bits: the codes of the decoded values
succeeds convert --model $GOLDEN/qwen3_moe-fp8 --to nf4 --out "$WORK/fp8-nf4" --quiet
succeeds convert --model "$WORK/decoded-qwen3_moe-fp8" --to nf4 --out "$WORK/decoded-nf4" --quiet
succeeds eval --model "$WORK/fp8-nf4" $eval
loss=$(json loss)
succeeds eval --model "$WORK/decoded-nf4" $eval
check 'FP8 written in 4 bits' close "$(json loss)" "$loss" 1e-2

# ModelOpt's file belongs to FP8 alone
cp -r $GOLDEN/qwen3_moe-fp8 "$WORK/modelopt"
echo '{"quantization": {"quant_algo": "FP8"}}' >"$WORK/modelopt/hf_quant_config.json"
succeeds convert --model "$WORK/modelopt" --to fp8 --out "$WORK/modelopt-fp8" --quiet
succeeds convert --model "$WORK/modelopt" --out "$WORK/modelopt-bf16" --quiet
check 'ModelOpt: its file' [ -f "$WORK/modelopt-fp8/hf_quant_config.json" -a ! -f "$WORK/modelopt-bf16/hf_quant_config.json" ]

# adapters over FP8: merged, they change blocks of their matrices alone
train="--model $GOLDEN/qwen3-fp8 --lora-rank 2 --lora-targets q_proj --lora-layers 0 --data $SHARD --any-tokenizer --seq-len 48 --batch 2 --quiet --schedule constant"
in_two_parts fp8 4 '' $train --lr 1e-1
succeeds train $train --lr 0 --steps 1 --out "$WORK/fp8-zero"
merge="convert --model $GOLDEN/qwen3-fp8 --merge --quiet"
succeeds $merge --adapter "$WORK/fp8-zero" --to fp8 --out "$WORK/fp8-same"
check 'FP8: adapters of 0 change no byte' cmp -s $GOLDEN/qwen3-fp8/model.safetensors "$WORK/fp8-same/model.safetensors"
succeeds $merge --adapter "$WORK/fp8" --to fp8 --out "$WORK/fp8-merged"
bytes=$(cmp -l $GOLDEN/qwen3-fp8/model.safetensors "$WORK/fp8-merged/model.safetensors" | wc -l)
check 'FP8: adapters of [192, 16] change its codes and two scales' [ "$bytes" -gt 1000 -a "$bytes" -le 3080 ]
succeeds eval --model $GOLDEN/qwen3-fp8 --adapter "$WORK/fp8" $eval
loss=$(json loss)
succeeds eval --model "$WORK/fp8-merged" $eval
check 'and the merged folder has the loss of the adapters' close "$(json loss)" "$loss" 1e-2
succeeds $merge --adapter "$WORK/fp8" --dtype fp32 --out "$WORK/fp8.bin"
succeeds eval --model "$WORK/fp8.bin" $eval
check 'and so have decoded weights' close "$(json loss)" "$loss" 1e-4
succeeds train --model $GOLDEN/qwen3-fp8 --data $SHARD --any-tokenizer --seq-len 48 --steps 1 --out "$WORK/fp8-all" --quiet
succeeds convert --model "$WORK/fp8-all" --out "$WORK/fp8-all-hf" --quiet
check 'all weights of an FP8 folder become bf16' [ "$(grep -c quantization_config "$WORK/fp8-all-hf/config.json")" = 0 ]
succeeds eval --model "$WORK/fp8-all-hf" $eval

# Models written in FP8: the values of --base fp8, blocks in the order of files, routers as they were.
for model in qwen3_moe-fused qwen3_next; do
    succeeds convert --model $GOLDEN/$model --to fp8 --dtype bf16 --out "$WORK/$model-to" --quiet
    succeeds convert --model "$WORK/$model-to" --dtype bf16 --out "$WORK/$model-to.bin" --quiet
    succeeds convert --model $GOLDEN/$model --base fp8 --dtype bf16 --out "$WORK/$model-base.bin" --quiet
    check "$model in FP8" cmp -s "$WORK/$model-to.bin" "$WORK/$model-base.bin"
    succeeds eval --model $GOLDEN/$model $eval
    loss=$(json loss)
    succeeds eval --model "$WORK/$model-to" $eval
    check "$model in FP8: the loss" close "$(json loss)" "$loss" 2e-2
    check "$model: config.json lists routers" grep -q '"model.layers.1.mlp.gate"' "$WORK/$model-to/config.json"
done
train="--model $WORK/$model-to --lora-rank 2 --lora-targets all --data $SHARD --any-tokenizer --seq-len 48 --quiet --schedule constant"
succeeds train $train --lr 0 --steps 1 --out "$WORK/$model-zero"
succeeds convert --model "$WORK/$model-to" --merge --adapter "$WORK/$model-zero" --to fp8 --out "$WORK/$model-same" --quiet
check "$model: adapters of 0 change no byte" cmp -s "$WORK/$model-to/model.safetensors" "$WORK/$model-same/model.safetensors"
succeeds train $train --lr 3e-2 --steps 2 --out "$WORK/$model-adapter"
succeeds convert --model "$WORK/$model-to" --merge --adapter "$WORK/$model-adapter" --to fp8 --out "$WORK/$model-merged" --quiet
succeeds eval --model "$WORK/$model-to" --adapter "$WORK/$model-adapter" $eval
loss=$(json loss)
succeeds eval --model "$WORK/$model-merged" $eval
check "$model: the merged folder has the loss of the adapters" close "$(json loss)" "$loss" 2e-2

# ---- texts side by side ---------------------------------------------------------------------------------------------------------
make_documents "$WORK/prompts.bin" 96 5,9,3,7 3 0 prompts
printf 'while read -r line; do echo "${#line}"; done\n' >"$WORK/reward.sh"
rollout="--data $WORK/prompts.bin --any-tokenizer --rollout --objective grpo --group-size 3 --seq-len 32 --batch 2 --max-new-tokens 9
    --lora-rank 3 --steps 2 --lr 1e-2 --schedule constant --quiet"
succeeds train --model $GOLDEN/qwen3 --base nf4 $rollout --reward-command "sh $WORK/reward.sh" --out "$WORK/rollout"
succeeds train --model "$WORK/decoded-qwen3" $rollout --reward-command "sh $WORK/reward.sh" --out "$WORK/rollout-decoded"
told() { sed -n 's/.*"reward": \([^,]*\),.*/\1/p' "$1/log.jsonl"; }
check 'rollouts over 4 bits, decoded' [ -n "$(told "$WORK/rollout")" -a "$(told "$WORK/rollout")" = "$(told "$WORK/rollout-decoded")" ]

# ---- messages and refusals -----------------------------------------------------------------------------------------------------
succeeds bp --model $GOLDEN/qwen3 --base nf4 --lora-rank 2 --seq-len 20 --verbose
says out '^base     nf4, double quantisation, blocks of 64: 4.373 bits an element of 28.80 k; 8.82 k others fp32; frozen$' \
    'relative error  q_proj 0.09'
refuses 2 'weights in 4 bits are frozen: give --lora-rank to train adapters, or leave --base out' bp --model $GOLDEN/qwen3 --base nf4
refuses 2 'or --base none to train the decoded weights' bp --model $GOLDEN/qwen3-nf4
succeeds bp --model $GOLDEN/qwen3-nf4 --base none --seq-len 20
refuses 2 'weights in 8 bits are frozen' bp --model $GOLDEN/qwen3-fp8 --base fp8
succeeds bp --model $GOLDEN/qwen3-fp8 --seq-len 20
says out '^model .*, decoded from FP8; trained: all$'
says err 'note: 13 matrices are in FP8; .*scales of activations are not used'
succeeds plan --model $GOLDEN/qwen3_moe-fp8 --lora-rank 2 --seq-len 20 --verbose
says out '^base     fp8, blocks of 16 x 16: 8\.379 bits an element of 14.85 k; 7.07 k others fp32; frozen$'
refuses 2 '--base nf4: .* is in fp8 already' bp --model $GOLDEN/qwen3-fp8 --base nf4 --lora-rank 2
refuses 2 '--to fp8 keeps the bytes of an FP8 folder, and takes no --like' convert --model $GOLDEN/qwen3-fp8 --like $GOLDEN/qwen3 --to fp8 --out "$WORK/none"
refuses 2 '--to fp8: FP8 folders hold no matrices as gpt2 does .*--base fp8 quantises them' convert --model $GOLDEN/gpt2 --to fp8 --out "$WORK/none"
refuses 2 '--base fp4: .* is in nf4 already' bp --model $GOLDEN/qwen3-nf4 --base fp4 --lora-rank 2
refuses 2 '--base mxfp4 is for experts, and this qwen3 model has none; give --base nf4' bp --model $GOLDEN/qwen3 --base mxfp4 --lora-rank 2
refuses 2 'down_proj has rows of 24 elements, not a multiple of 32' bp --init gpt_oss,$gpt_oss,intermediate_size=24 --base mxfp4 --lora-rank 2
refuses 2 '--quantise-head has no meaning' bp --model "$WORK/gpt_oss" --base mxfp4 --quantise-head --lora-rank 2
refuses 2 '--to mxfp4 is a format of gpt_oss models' convert --init qwen3_moe,hidden_size=64 --to mxfp4 --out "$WORK/none"
refuses 2 '--quantise-head: the head of this model is its embedding' bp --model $GOLDEN/llama-tied --base nf4 --quantise-head --lora-rank 2
finish
