#!/bin/sh
# Adapters as a user handles them: trained, resumed to the bit, read by every verb, merged, refused. PEFT is in
# test_peft.py, files in test_adapter.c.
. test/cli.sh
same_loss=2e-5
[ $TEST_PRECISION = bf16 ] && same_loss=5e-3

base=$WORK/base.bin
succeeds convert --init $TINY --seed 3 --out "$base"
data="--data $SHARD --seq-len 64"
common="--model $base $data --lora-rank 4 --lora-dropout 0.1 --lora-targets q_proj,v_proj,down_proj,up_proj --batch 2 --steps 12
    --lr 2e-2 --warmup 3 --save-every 2 --keep-checkpoints 3 --seed 7"

# ---- a run, without any allocation of ours after the first step ---------------------------------------------------------------
STREAMBP_ALLOCATION_GUARD=1
export STREAMBP_ALLOCATION_GUARD
succeeds train $common --out "$WORK/run" --json --quiet
unset STREAMBP_ALLOCATION_GUARD
adapter=$WORK/run/checkpoint-00000012
check 'a checkpoint is an adapter' [ "$(ls "$adapter" | tr '\n' ' ')" = 'DONE adapter_config.json adapter_model.safetensors optimizer.bin state.json ' ]
check 'which names its modules' grep -q '"target_modules": \["down_proj", "q_proj", "up_proj", "v_proj"\]' "$adapter/adapter_config.json"
check 'and its base' grep -q "\"base_model_name_or_path\": \"$base\"" "$adapter/adapter_config.json"

# ---- without master weights, with random rounding: a part of it, then the rest ------------------------------------------------
moments=int8
[ $TEST_PRECISION = bf16 ] && moments=bf16
parts="$(echo $common | sed 's/--steps 12//') --schedule constant --master none --moments $moments --quiet"
in_two_parts straight 12 '' $parts
in_two_parts on-from-adapters 4 '' --model "$base" --adapter "$adapter" $data --schedule constant
says out '^data .*; sft, lr 0.0001 (as it began), 4 steps of '
next_works out
refuses 2 "type: python data/tokenizer_file.py --tokenizer FOLDER --out $WORK/tokenizer.tok" sample --model "$base" --adapter "$adapter" --chat --prompt hello

# ---- layers that differ ---------------------------------------------------------------------------------------------------------
varied="--model $base $data --lora-rank 4 --lora-layers 1 --lora-rank-pattern q_proj=2,.*mlp[.].*=3 --lora-alpha-pattern k_proj=1"
on="--lr 1e-2 --schedule constant --quiet"
in_two_parts varied 4 '' $varied $on
succeeds bp $varied
says out '^model .*; trained: adapters of rank 2 to 4, '
refuses 1 'was trained with LoRA .*layers=' train $(echo $varied | sed 's/q_proj=2/q_proj=5/') $on --steps 5 --out "$WORK/varied" --resume
check 'the adapter says its ranks' grep -q '"rank_pattern": {"down_proj": 3, "gate_proj": 3, "q_proj": 2, "up_proj": 3}' \
    "$WORK/varied/checkpoint-00000004/adapter_config.json"
refuses 2 "lora-rank-pattern: 'layers.9.*' matches no module that has an adapter" bp --model $base $data --lora-rank 4 --lora-rank-pattern 'layers.9.*=2'
refuses 2 'lora-layers: there is no layer 2; give layers from 0 to 1' bp --model $base $data --lora-rank 4 --lora-layers 1-2
refuses 2 "lora-layers: '1-0' is neither a layer nor a range" bp --model $base $data --lora-rank 4 --lora-layers 1-0
refuses 2 "take NAME=NUMBER,..., not 'q_proj'" bp --model $base $data --lora-rank 4 --lora-rank-pattern q_proj
refuses 2 "'layers.7.mlp.up_proj' is not a linear layer that can have an adapter" bp --model $base $data --lora-rank 4 --lora-targets layers.7.mlp.up_proj,q_proj
copies="--model $base $data --lora-rank 2 --lora-targets q_proj --lora-modules-to-save lm_head,embed_tokens"
succeeds train $copies $on --steps 2 --out "$WORK/copies"
succeeds train $copies --lr 0 --weight-decay 0 --steps 1 --quiet --out "$WORK/copies-start"
succeeds convert --model "$base" --adapter "$WORK/copies-start" --merge --out "$WORK/copies.bin"
check 'a copy begins as what it is of' cmp -s "$base" "$WORK/copies.bin"
check 'a copy is named' grep -q '"modules_to_save": \["embed_tokens", "lm_head"\]' "$WORK/copies/checkpoint-00000002/adapter_config.json"
refuses 2 'modules_to_save has norm, which is not supported; name only embed_tokens and lm_head' bp --model "$base" $data --lora-rank 2 \
    --lora-modules-to-save norm
refuses 2 'but this model.s head is its embedding' bp --init $TINY,tie_word_embeddings=true $data --lora-rank 2 --lora-modules-to-save lm_head
outer="--model $base $data --lora-rank 2 --lora-targets q_proj,embed_tokens,lm_head"
in_two_parts outer 4 '' $outer $on
check 'embedding and head are modules' grep -q '"target_modules": \["embed_tokens", "lm_head", "q_proj"\]' \
    "$WORK/outer/checkpoint-00000004/adapter_config.json"
tied="--init $TINY,tie_word_embeddings=true"
succeeds train $tied $data --lora-rank 2 --lora-targets lm_head $on --steps 2 --out "$WORK/head"
check 'the head is a module' grep -q '"target_modules": \["lm_head"\]' "$WORK/head/checkpoint-00000002/adapter_config.json"
succeeds convert $tied --out "$WORK/tied.bin"
refuses 1 'an adapter of the embedding or the head, which are one matrix here' convert --model "$WORK/tied.bin" --adapter "$WORK/head" --merge \
    --out "$WORK/x.bin"
refuses 2 'lora-layers needs names' bp $varied --lora-targets '.*[.]1[.].*'

# ---- a vocabulary that grows ----------------------------------------------------------------------------------------------------
grown="--model $base --grow-vocabulary 104 $data --lora-rank 2 --lora-targets q_proj"
succeeds eval --model "$base" --grow-vocabulary 104 $data --val-steps 2 --json
loss=$(json loss)
succeeds train $grown --lr 0 --weight-decay 0 --steps 1 --out "$WORK/grown"
says err 'do not train all rows of added tokens; --lora-modules-to-save embed_tokens,lm_head does'
succeeds train $grown --lr 0 --weight-decay 0 --steps 2 --out "$WORK/grown" --quiet --resume --extend
refuses 1 'was trained with model vocab_size=104, now it is vocab_size=.*resume with the same --grow-vocabulary' train \
    $(echo $grown | sed 's/--grow-vocabulary 104//') --lr 0 --weight-decay 0 --steps 3 --out "$WORK/grown" --quiet --resume --extend
succeeds eval --model "$WORK/grown" $data --val-steps 2 --json
check 'a run of adapters grows its base' close "$(json loss)" "$loss" 1e-7
refuses 1 'its settings differ; give that model with its --rope-scaling and --grow-vocabulary' eval --model "$base" \
    --adapter "$WORK/grown" $data
succeeds train $grown --lora-modules-to-save embed_tokens,lm_head --base nf4 --steps 1 --out "$WORK/grown-copies" --quiet
succeeds eval --model "$WORK/grown-copies" $data --val-steps 1 --quiet
refuses 1 'give the base that the adapter was trained on, or the --grow-vocabulary' eval --model "$base" --adapter "$WORK/grown-copies" --base nf4 $data
succeeds convert --model "$WORK/grown" --out "$WORK/grown.bin"
succeeds convert --model "$base" --grow-vocabulary 104 --out "$WORK/grown-base.bin"
check 'merged as it began' cmp -s "$WORK/grown.bin" "$WORK/grown-base.bin"
succeeds train --model "$base" --grow-vocabulary 104 $data --steps 1 --out "$WORK/grown-whole" --quiet
succeeds train --model "$base" --grow-vocabulary 104 $data --steps 2 --out "$WORK/grown-whole" --quiet --resume --extend
succeeds eval --model "$WORK/grown-whole" $data --val-steps 1 --quiet
refuses 2 'grow-vocabulary 90 is below the 96 ids of this model; give 96 or more' plan --model "$base" --grow-vocabulary 90
refuses 2 'has no rows to add to; give vocab_size=60000 among its keys' plan --init gpt2 --grow-vocabulary 60000

# ---- experts ---------------------------------------------------------------------------------------------------------------------
experts=qwen3_moe,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8
experts="--init $experts,vocab_size=96,num_experts=6,num_experts_per_tok=2,moe_intermediate_size=16,mlp_only_layers=1 $data --lora-rank 3"
in_two_parts experts 4 '' $experts --lora-targets experts,gate,q_proj $on
check 'experts and routers are parameters' grep -q '"target_parameters": \["experts.down_proj", "gate.weight", "gate_up_proj"\]' \
    "$WORK/experts/checkpoint-00000004/adapter_config.json"
check 'the log has the aux loss, and its coefficient once' [ "$(grep -c '"aux_loss": [0-9.]*,' "$WORK/experts/log.jsonl") \
$(grep -c '"router_aux_loss_coef": 0.001,.*"options"' "$WORK/experts/log.jsonl")" = '4 1' ]
succeeds bp $experts
says out 'trained: adapters of rank 3, alpha 6: 1.34 k parameters' # of attention alone
refuses 2 'gate_proj alone is half of experts.gate_up_proj' bp $experts --lora-targets gate_proj,q_proj
refuses 2 'adapters of experts and routers have no dropout' bp $experts --lora-targets gate --lora-dropout 0.1
refuses 2 'adapter-layout has no meaning without --adapter-only' convert --model "$WORK/experts" --adapter-layout per-expert --out "$WORK/x"
change_keys() { # old, new: of a copy's adapter_config.json
    sed "s/$1/$2/" "$WORK/experts/checkpoint-00000004/adapter_config.json" >"$WORK/wrong/adapter_config.json"
}
mkdir "$WORK/wrong" && cp "$WORK/experts/checkpoint-00000004/adapter_model.safetensors" "$WORK/wrong"
change_keys '"gate.weight"' '"gate.weight", "foo.weight"'
refuses 1 'target_parameters has foo.weight, but this model can adapt only matrices of routers and experts' eval ${experts% --lora-rank 3} --adapter "$WORK/wrong"
change_keys '"gate.weight", ' ''
refuses 1 'has tensors of .*mlp.gate.weight, which target_parameters does not name' eval ${experts% --lora-rank 3} --adapter "$WORK/wrong"
change_keys 'rank_pattern": {}' 'rank_pattern": {"experts.down_proj": 4}'
refuses 1 'has shape \[18, 16\], but rank 4 and this base ask for \[24, 16\]' eval ${experts% --lora-rank 3} --adapter "$WORK/wrong"
succeeds plan --init qwen3-30b-a3b --lora-rank 16 --lora-targets experts --seq-len 64 --memory-limit 1TiB
says err 'note: adapters of experts hold 629.15 M parameters: with AdamW in fp32 9.38 GiB, and 7.03 GiB on disk'
own=gemma4,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8
own="--init $own,global_head_dim=8,hidden_size_per_layer_input=8,vocab_size=96,vocab_size_per_layer_input=96 --seq-len 20 --lora-rank 2"
succeeds bp $own --lora-targets all-linear
says err 'note: --lora-targets all-linear leaves out per_layer_model_projection, which is one matrix for all layers'
refuses 2 "'per_layer_model_projection' is not a linear layer that can have an adapter" bp $own --lora-targets per_layer_model_projection

# ---- refusals on resuming -------------------------------------------------------------------------------------------------------
succeeds convert --init $TINY --seed 4 --out "$WORK/other.bin"
without_base=$(echo $common | sed "s|--model $base||")
refuses 1 'holds only adapters; give the model that they were trained on with --model' train $without_base --out "$WORK/run" --resume
refuses 1 'was trained on another base than .*other.bin: its weights differ' train $without_base --model "$WORK/other.bin" \
    --out "$WORK/run" --resume
refuses 1 'holds adapters, but without --lora-rank or --adapter' train --model "$base" $data --steps 12 --out "$WORK/run" --resume
refuses 1 'was trained with LoRA alpha=8, now it is alpha=5' train $common --lora-alpha 5 --out "$WORK/run" --resume
succeeds train --model "$base" $data --steps 1 --out "$WORK/whole" --quiet
refuses 1 'holds a whole model, but --lora-rank or --adapter' train --model "$base" $data --lora-rank 4 --steps 2 --out "$WORK/whole" --resume
refuses 1 'holds adapters; a plan takes their base' plan --model "$WORK/run" --seq-len 8
refuses 1 'holds adapters; to train or read others give their base' train --model "$WORK/run" $data --lora-rank 4 --out "$WORK/x"

# ---- read by every verb ---------------------------------------------------------------------------------------------------------
succeeds eval --model "$base" $data --val-steps 4 --json
plain=$(json loss)
succeeds eval --model "$base" --adapter "$WORK/run" $data --val-steps 4 --json
check 'a note says which checkpoint was taken' grep -q "note: --adapter .*/run: using .*checkpoint-00000012" "$WORK/err"
loss=$(json loss)
succeeds eval --model "$WORK/run" $data --val-steps 4 --json
says err 'note: --model .*/run: holds adapters; their base .*/base.bin is taken'
check 'a run of adapters finds its base' [ "$(json loss)" = "$loss" ]
sed 's|"source": {[^}]*}, ||' "$adapter/state.json" >"$WORK/state.json"
cp -r "$adapter" "$WORK/older" && rm "$WORK/older/DONE" && cp "$WORK/state.json" "$WORK/older"
check 'an older one has no source' [ "$(grep -c '"source"' "$adapter/state.json") $(grep -c '"source"' "$WORK/older/state.json")" = '1 0' ]
succeeds eval --model "$WORK/older" $data --val-steps 4 --json
check 'and finds it, too' [ "$(json loss)" = "$loss" ]
mv "$base" "$WORK/moved.bin"
refuses 1 'holds adapters, whose base .*/base.bin .*is not there; give --model BASE --adapter .*/run$' eval --model "$WORK/run" $data
mv "$WORK/moved.bin" "$base"
succeeds train --init $TINY --seed 3 $data --lora-rank 4 --steps 1 --out "$WORK/random" --quiet
succeeds eval --model "$WORK/random" $data --val-steps 1 --quiet
refuses 1 'holds adapters for the --init of --seed 3; leave --seed out' eval --model "$WORK/random" $data --seed 7
succeeds train --model "$base" $data --lora-rank 4 --base nf4 --steps 1 --out "$WORK/qlora" --quiet
succeeds eval --model "$WORK/qlora" $data --val-steps 1 --json
quantised=$(json loss)
succeeds eval --model "$base" --adapter "$WORK/qlora" --base nf4 $data --val-steps 1 --json
check 'over a base in 4 bits' [ "$(json loss)" = "$quantised" ]
check 'it has learned' awk -v a="$loss" -v b="$plain" 'BEGIN { exit !(a != "" && a < b - 0.05) }'
succeeds bp --model "$base" --adapter "$adapter" $data --json
succeeds sample --model "$base" --adapter "$adapter" --prompt-ids 1,2,3 --max-new-tokens 12 --temperature 0 --json
ids=$(sed 's/.*"ids": \(\[[^]]*\]\).*/\1/' "$WORK/out")
succeeds eval --init $TINY --seed 3 --adapter "$adapter" $data --val-steps 4 --json
check 'the base may be made anew' [ "$(json loss)" = "$loss" ]
succeeds train --model "$base" --adapter "$adapter" $data --steps 2 --lr 1e-3 --out "$WORK/on" --quiet
check 'training goes on with what the adapter says' grep -q 'rank=4,alpha=8,dropout=0.1' "$WORK/on/checkpoint-00000002/state.json"
make_documents "$WORK/documents.bin" 96 40,64,51,33 4 10
succeeds logprobs --model "$base" --data "$WORK/documents.bin" --seq-len 64 --out "$WORK/base.logprobs" --json
key=$(json model_key)
succeeds logprobs --model "$base" --adapter "$adapter" --data "$WORK/documents.bin" --seq-len 64 --out "$WORK/adapter.logprobs" --json
check 'with adapters it is another model' [ -n "$key" -a "$(json model_key)" != "$key" ]
refuses 1 'trained on another base than .*other.bin' eval --model "$WORK/other.bin" --adapter "$adapter" $data
refuses 1 'has shape \[4, 32\], but rank 4 and this base ask for \[4, 16\]' eval \
    --init $(echo $TINY | sed s/hidden_size=32/hidden_size=16/) --adapter "$adapter" $data
refuses 1 'holds a whole model, not adapters' eval --model "$base" --adapter "$WORK/whole" $data
refuses 2 'lora-rank and --adapter exclude each other' train $common --adapter "$adapter" --out "$WORK/x"

# ---- the reference of a run that continues from adapters is the model with them -------------------------------------------------
make_documents "$WORK/pairs.bin" 96 40,64,51,33,60,45,58,20 4 10 pairs
cp -r "$adapter" "$WORK/plain" && rm "$WORK/plain/DONE" && sed -i 's/"lora_dropout": 0.1/"lora_dropout": 0/' "$WORK/plain/adapter_config.json"
pairs="--objective dpo --data $WORK/pairs.bin --seq-len 63"
plain="--model $base --adapter $WORK/plain $pairs --lr 1e-3 --schedule constant"
losses() { sed -n 's/^{"step": \([0-9]*\), "loss": \([-0-9.e]*\),.*/\1 \2/p' "$1/log.jsonl"; }
succeeds bp --model "$base" --adapter "$WORK/plain" $pairs --json
check 'a pass is its own reference' close "$(json loss)" 0.693147 1e-5
in_two_parts dpo 4 --verbose $plain
says out '^reference  the model with the adapters of .*/plain, at the start$'
check 'the first loss is ln 2' close "$(losses "$WORK/dpo" | sed -n 's/^1 //p')" 0.693147 1e-5
check 'and later ones are not' [ "$(losses "$WORK/dpo" | sort -u -k2 | wc -l)" = 4 ]
succeeds train $plain --lr 0 --steps 1 --out "$WORK/still"
succeeds eval --model "$WORK/still" $pairs --json
check 'eval takes the reference of the run, not the base model' close "$(json loss)" 0.693147 1e-5
refuses 1 'the run began with "reference", which the current options lack' train --model "$base" --lora-rank 4 $pairs --lr 1e-3 \
    --lora-targets q_proj,v_proj,down_proj,up_proj --schedule constant --steps 5 --out "$WORK/dpo-parts" --resume

# ---- merged ---------------------------------------------------------------------------------------------------------------------
succeeds convert --model "$base" --adapter "$adapter" --merge --out "$WORK/merged.bin"
succeeds convert --model "$base" --adapter "$WORK/run" --merge --out "$WORK/merged"
succeeds convert --model "$WORK/run" --out "$WORK/merged2"
says out '/merged2: .* in fp32, 1 file, .*, from .*/base.bin with .*checkpoint-00000012/adapter_model.safetensors; no tokenizer$'
check '--model RUN merges' cmp -s "$WORK/merged/model.safetensors" "$WORK/merged2/model.safetensors"
succeeds convert --model "$WORK/qlora" --out "$WORK/merged3"
says err 'note: the adapters were trained on .*/base.bin in nf4; they are merged into its weights in fp32$'
succeeds convert --model "$WORK/run" --adapter-only --out "$WORK/alone"
check '--adapter-only writes what PEFT reads' cmp -s "$WORK/alone/adapter_model.safetensors" "$adapter/adapter_model.safetensors"
cp -r "$WORK/alone" "$WORK/named" # lora_A.policy.weight, as in the state dict of a PEFT model
length=$(od -An -tu4 -N4 "$adapter/adapter_model.safetensors")
tail -c +9 "$adapter/adapter_model.safetensors" | head -c $length | sed 's/\.weight"/.policy.weight"/g' >"$WORK/header"
{
    named=$(wc -c <"$WORK/header")
    printf "$(printf '\\%03o' $((named % 256)) $((named / 256)) 0 0 0 0 0 0)"
    cat "$WORK/header"
    tail -c +$((9 + length)) "$adapter/adapter_model.safetensors"
} >"$WORK/named/adapter_model.safetensors"
succeeds convert --model "$WORK/named" --adapter-only --out "$WORK/usual"
check 'and under the usual names' cmp -s "$WORK/usual/adapter_model.safetensors" "$adapter/adapter_model.safetensors"
succeeds eval --model "$WORK/alone" $data --val-steps 4 --json
check 'and is a model by its base' [ "$(json loss)" = "$loss" ]
refuses 2 'writes adapters unchanged: leave --merge' convert --model "$WORK/run" --adapter-only --to hf --out "$WORK/x"
check 'the card says how it was trained' grep -q '^| steps | 12 |$' "$WORK/merged/README.md"
check 'and on what' grep -q '^| data | tokens_uint16.bin |$' "$WORK/merged/README.md"
check 'with what' grep -q '^base.bin trained by streambp.c; weights in float32.$' "$WORK/merged/README.md"
succeeds eval --model "$WORK/merged" $data --val-steps 4 --json
check 'merged is the adapter within rounding' close "$(json loss)" "$loss" $same_loss
succeeds sample --model "$WORK/merged.bin" --prompt-ids 1,2,3 --max-new-tokens 12 --temperature 0 --json
[ $TEST_PRECISION = bf16 ] || check 'and writes the same text' [ "$(sed 's/.*"ids": \(\[[^]]*\]\).*/\1/' "$WORK/out")" = "$ids" ]
refuses 2 'give --merge to have the adapters added' convert --model "$base" --adapter "$adapter" --out "$WORK/x"
refuses 2 'adapter-only: give --adapter with the adapters, or their run' convert --model "$base" --merge --out "$WORK/x"
refuses 1 'trained on another base than .*other.bin' convert --model "$WORK/other.bin" --adapter "$adapter" --merge --out "$WORK/x.bin"
check 'nothing is left of what was refused' [ ! -e "$WORK/x.bin" ]

cp -r "$WORK/run" "$WORK/damaged"
printf x | dd of="$WORK/damaged/checkpoint-00000012/adapter_model.safetensors" bs=1 seek=9000 conv=notrunc 2>/dev/null
refuses 1 '12/adapter_model.safetensors: is damaged: its checksum is' eval --model "$base" --adapter "$WORK/damaged" $data
refuses 1 'is a checkpoint of a run' train --model "$base" --adapter "$adapter" $data --steps 1 --out "$adapter"
cp -r "$adapter" "$WORK/nan" && rm "$WORK/nan/DONE" "$WORK/nan/optimizer.bin"
refuses 1 'is the folder of an adapter, which the run.s checkpoints would hide' train --model "$base" --adapter "$adapter" $data \
    --steps 1 --out "$WORK/nan"
printf '\000\000\300\177' | dd of="$WORK/nan/adapter_model.safetensors" bs=1 conv=notrunc \
    seek=$(($(wc -c <"$WORK/nan/adapter_model.safetensors") - 4)) 2>/dev/null
refuses 1 'nan/adapter_model.safetensors: .*NaN.*lora_B.weight' eval --model "$base" --adapter "$WORK/nan" $data
refuses 1 'layers.1.mlp.down_proj.lora_B.weight holds NaN at .31, 3.' convert --model "$base" --adapter "$WORK/nan" --merge --out "$WORK/x.bin"
check 'no merged model of it' [ ! -e "$WORK/x.bin" ]

# ---- other paths ----------------------------------------------------------------------------------------------------------------
refuses 1 'lora_B.weight holds NaN in ' convert --model "$WORK/nan" --adapter-only --out "$WORK/x"
succeeds info --model "$WORK/nan"
says out '^model .*; adapters of rank 4, alpha 8, dropout 0.1: '
refuses 1 'DONE: is a file; give the folder' eval --model "$base" --adapter "$adapter/DONE" $data
refuses 1 'nowhere: No such file' eval --model "$base" --adapter "$WORK/nowhere" $data
finish
