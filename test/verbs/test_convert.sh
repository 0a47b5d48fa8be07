#!/bin/sh
# `convert` as a user runs it: from a Hugging Face folder to a run and back, refusals.
. test/cli.sh

same() { cmp -s "$1" "$2"; }

# ---- converted, trained, and back ---------------------------------------------------------------------------------------------
cp -r $GOLDEN/llama "$WORK/published"
rm "$WORK/published/reference.safetensors"
succeeds convert --model "$WORK/published" --out "$WORK/copy"
check 'a copy is the same, file by file' same "$WORK/copy/model.safetensors" "$WORK/published/model.safetensors"
succeeds convert --model "$WORK/published" --out "$WORK/copy.bin"
succeeds info --model "$WORK/copy.bin" --json
check 'a name that ends in .bin is a flat file' [ -f "$WORK/copy.bin" ]
succeeds convert --model "$WORK/copy.bin" --like "$WORK/published" --out "$WORK/again" --json
check 'JSON says what was written' [ "$(json format) $(json files) $(json dtype)" = 'hf 1 fp32' ]
check 'flat and back is the same' same "$WORK/again/model.safetensors" "$WORK/published/model.safetensors"
succeeds train --model "$WORK/published" --data $SHARD --seq-len 64 --steps 4 --save-every 2 --out "$WORK/run" --quiet
succeeds eval --model "$WORK/run" --data $SHARD --seq-len 64 --val-steps 2 --json
check 'a note says which checkpoint was taken' grep -q "note: --model .*/run: using .*checkpoint-00000004/model.bin" "$WORK/err"
loss=$(json loss)
succeeds convert --model "$WORK/run" --like "$WORK/published" --out "$WORK/tuned"
succeeds convert --model "$WORK/run" --out "$WORK/tuned2"
says out '/tuned2: .* in fp32, 1 file, .*, from .*/checkpoint-00000004/model.bin; no tokenizer$'
check 'the run knows the folder that it began from' cmp -s "$WORK/tuned/config.json" "$WORK/tuned2/config.json"
check 'the card names base and data' [ "$(sed -n '4,6p' "$WORK/tuned2/README.md" | tr '\n' ' ')" = 'base_model: published datasets: - tokens_uint16.bin ' ]
check 'date and commit' grep -qE '^Written on 20[0-9-]* by commit ' "$WORK/tuned2/README.md"
succeeds convert --model "$WORK/published" --dtype bf16 --out "$WORK/half" --quiet
echo '{}' >"$WORK/half/tokenizer_config.json"
succeeds train --model "$WORK/half" --data $SHARD --seq-len 64 --steps 1 --out "$WORK/half-run" --quiet
succeeds train --model "$WORK/half-run" --data $SHARD --seq-len 64 --steps 1 --out "$WORK/half-run2" --quiet
succeeds convert --model "$WORK/half-run2" --out "$WORK/half2" --json
check 'what began in bf16 is written in bf16' [ "$(json dtype)" = bf16 -a -f "$WORK/half2/tokenizer_config.json" ]
mv "$WORK/half" "$WORK/gone"
succeeds convert --model "$WORK/half-run" --out "$WORK/half3"
says err 'no tokenizer is written: its run began from .*/half/config.json, which is not there; give the folder with --like$'
check 'training has changed the weights' [ "$(cmp -s "$WORK/tuned/model.safetensors" "$WORK/published/model.safetensors"; echo $?)" = 1 ]
succeeds eval --model "$WORK/tuned" --data $SHARD --seq-len 64 --val-steps 2 --json
check 'the folder is the model that was trained' [ "$(json loss)" = "$loss" ]
succeeds eval --model "$WORK/run/checkpoint-00000002" --data $SHARD --seq-len 64 --val-steps 2 --quiet --json
check 'an earlier checkpoint is another model' [ "$(json loss)" != "$loss" ]
check 'quiet: no note' [ ! -s "$WORK/err" ]
succeeds plan --model "$WORK/run" --seq-len 64 --quiet
succeeds train --model "$WORK/run" --data $SHARD --seq-len 64 --steps 1 --out "$WORK/run2" --quiet

# ---- damage is refused by every verb ---------------------------------------------------------------------------------------------
cp -r "$WORK/run" "$WORK/damaged"
dd if=/dev/zero of="$WORK/damaged/checkpoint-00000004/model.bin" bs=1000 seek=20 count=40 conv=notrunc 2>/dev/null
damage='checkpoint-00000004/model.bin: is damaged: its checksum is not that of DONE; give an earlier checkpoint, or continue with --resume auto'
for verb in "eval --data $SHARD --seq-len 64" info "convert --out $WORK/x" "train --data $SHARD --seq-len 64 --steps 1"; do
    refuses 1 "$damage" $verb --model "$WORK/damaged"
done
refuses 1 "$damage" info --model "$WORK/damaged/checkpoint-00000004/model.bin"
succeeds plan --model "$WORK/damaged" --seq-len 64 --quiet # reads no weights
succeeds info --model "$WORK/damaged/checkpoint-00000002"
cp "$WORK/copy.bin" "$WORK/nan.bin"
printf '\377\377\377\377' | dd of="$WORK/nan.bin" bs=1 seek=8000 conv=notrunc 2>/dev/null
for out in x x.bin; do
    refuses 1 'nan.bin: tensor model.embed_tokens.weight holds NaN in fp32 at .[0-9]*, [0-9]*., so it is not' convert --model "$WORK/nan.bin" --out "$WORK/$out"
done
rm "$WORK/run"/checkpoint-*/DONE
refuses 1 'none of its checkpoints is complete' eval --model "$WORK/run" --data $SHARD --seq-len 64 --quiet
refuses 1 'is not a complete checkpoint: it has no DONE' info --model "$WORK/run/checkpoint-00000004"
cp $GOLDEN/llama/config.json "$WORK/run2"
refuses 1 'run2: holds neither model.safetensors' info --model "$WORK/run2" # a model, beside any other files

# ---- scaled positions, from the command line to config.json ----------------------------------------------------------------------
scaling='--rope-scaling yarn,factor=4,original_max_position_embeddings=16'
succeeds eval --model "$WORK/published" --data $SHARD --seq-len 64 --val-steps 2 --json
plain=$(json loss)
succeeds eval --model "$WORK/published" $scaling --data $SHARD --seq-len 64 --val-steps 2 --json
scaled=$(json loss)
check 'scaling is in force' [ "$scaled" != "$plain" ]
succeeds train --model "$WORK/published" $scaling --data $SHARD --seq-len 64 --steps 1 --lr 0 --weight-decay 0 --out "$WORK/yarn" --quiet
succeeds eval --model "$WORK/yarn" --data $SHARD --seq-len 64 --val-steps 2 --json
check 'a checkpoint keeps it' [ "$(json loss)" = "$scaled" ]
succeeds train --model "$WORK/published" $scaling --data $SHARD --seq-len 64 --steps 1 --lr 0 --weight-decay 0 --out "$WORK/yarn" --quiet --resume
succeeds train $scaling --data $SHARD --seq-len 64 --steps 1 --lr 0 --weight-decay 0 --out "$WORK/yarn" --quiet --resume
refuses 1 'yarn/checkpoint-00000001: was trained with model ' train --model "$WORK/published" --data $SHARD --seq-len 64 --steps 1 --lr 0 \
    --weight-decay 0 --out "$WORK/yarn" --quiet --resume
succeeds convert --model "$WORK/published" $scaling --out "$WORK/yarn1" # config.json keeps everything but the scaling
succeeds convert --model "$WORK/yarn" --like "$WORK/published" --out "$WORK/yarn2"
check 'the same from a run' same "$WORK/yarn1/config.json" "$WORK/yarn2/config.json"
check 'as many positions as that makes' grep -q '"max_position_embeddings": 64,' "$WORK/yarn1/config.json"
succeeds eval --model "$WORK/yarn2" --data $SHARD --seq-len 64 --val-steps 2 --json
check 'and convert writes it' [ "$(json loss)" = "$scaled" ]
refuses 1 'another model: its max_position_embeddings is 64, but in ' convert --model "$WORK/published" --like "$WORK/yarn1" --out "$WORK/x"

# ---- names of the hub, found in Hugging Face's cache -----------------------------------------------------------------------------
cache=$WORK/home/hub/models--Owner--Tiny-0.1
mkdir -p "$cache/blobs" "$cache/refs" "$cache/snapshots/0123abc"
printf 0123abc >"$cache/refs/main"
for file in config.json model.safetensors; do
    cp "$WORK/published/$file" "$cache/blobs/$file"
    ln -s "../../blobs/$file" "$cache/snapshots/0123abc/$file"
done
printf -- '---\nlicense: apache-2.0\n---\n# Tiny\n' >"$cache/snapshots/0123abc/README.md"
export HF_HOME="$WORK/home"
succeeds convert --model Owner/Tiny-0.1 --like Owner/Tiny-0.1 --out "$WORK/from_hub"
says err 'note: --model Owner/Tiny-0.1: using .*/snapshots/0123abc'
check 'a card names its base' [ "$(sed -n '4,6p' "$WORK/from_hub/README.md" | tr '\n' ' ')" = 'base_model: Owner/Tiny-0.1 license: apache-2.0 tags: ' ]
check 'a name of the hub is its snapshot' same "$WORK/from_hub/model.safetensors" "$WORK/published/model.safetensors"
HF_HUB_CACHE=$WORK/home/hub succeeds plan --model Owner/Tiny-0.1 --seq-len 64
refuses 1 'train: Owner/model.bin: No such file or directory; a model is ' info --model Owner/model.bin
for option in '--model Owner/Other' '--init llama --like Owner/Other' "--model $WORK/published --merge --adapter Owner/Other"; do
    refuses 1 'Owner/Other: No such file or directory, nor is it in .* cache; type: hf download Owner/Other --local-dir Other$' \
        convert $option --out "$WORK/x"
done

# ---- choices ------------------------------------------------------------------------------------------------------------------------
succeeds convert --model $GOLDEN/llama --out "$WORK/shards" --max-shard-size 50KB --dtype bf16
check 'shards of at most 50 KB' [ "$(ls "$WORK/shards" | grep -c 'model-0000[12]-of-00002.safetensors')" = 2 ]
check 'config.json has the type that was chosen' grep -q '"dtype": "bfloat16"' "$WORK/shards/config.json"
succeeds convert --model "$WORK/shards" --to flat --out "$WORK/flat"
succeeds eval --model "$WORK/flat" --data $SHARD --seq-len 64 --val-steps 1
says err 'note: the weights are bf16, .*B; this run has them in fp32, .*B (--dtype bf16 keeps bf16)$'
check '--to flat: a file, whatever its name' [ -f "$WORK/flat" ]
succeeds convert --model $GOLDEN/gpt2 --to llmc --out "$WORK/llmc" --json
check 'a file as llm.c reads it' [ "$(json format) $(json files)" = 'llmc 1' ]
check 'byte by byte the one that the golden model has' same "$WORK/llmc" $GOLDEN/gpt2/gpt2_llmc_fp32.bin
succeeds convert --model "$WORK/llmc" --to hf --like $GOLDEN/gpt2 --out "$WORK/from_llmc"
check 'to llm.c and back is the same' same "$WORK/from_llmc/model.safetensors" $GOLDEN/gpt2/model.safetensors
succeeds convert --model $GOLDEN/gpt2 --to llmc --dtype bf16 --out "$WORK/llmc_bf16"
check 'and in bf16' same "$WORK/llmc_bf16" $GOLDEN/gpt2/gpt2_llmc_bf16.bin
succeeds convert --init $TINY --seed 3 --out "$WORK/random"
succeeds convert --init $TINY --seed 3 --out "$WORK/random.bin"
succeeds convert --model "$WORK/random.bin" --out "$WORK/random2"
check '--init is written as well' same "$WORK/random/model.safetensors" "$WORK/random2/model.safetensors"
check 'with the same config.json' same "$WORK/random/config.json" "$WORK/random2/config.json"

# ---- existing files, and files that are read ---------------------------------------------------------------------------------------------
tree() { (cd "$WORK" && find published run2 random.bin data.bin -type f -exec cksum {} + | sort); }
cp $SHARD "$WORK/data.bin"
mkdir "$WORK/cache" "$WORK/cache/blobs" "$WORK/cache/snapshot"
cp $GOLDEN/llama/config.json "$WORK/cache/snapshot"
mv "$WORK/copy/model.safetensors" "$WORK/cache/blobs/x"
ln -s ../blobs/x "$WORK/cache/snapshot/model.safetensors"
ln -s "$WORK/random.bin" "$WORK/link"
ln "$WORK/data.bin" "$WORK/hard"
ln -s "$WORK/published" "$WORK/way"
rm "$WORK/run2/config.json"
before=$(tree)
there='exists already; choose another name, or give --overwrite'
bp="bp --model $WORK/random.bin --data $WORK/data.bin --seq-len 32"
refuses 1 "$there" $bp --grads-out "$WORK/flat"
refuses 1 "$there" convert --init $TINY --out "$WORK/copy.bin"
refuses 1 "$there" logprobs --init $TINY --data $SHARD --seq-len 8 --out "$WORK/flat"
refuses 1 'is not empty; choose a new --out, or add --overwrite' convert --init $TINY --out "$WORK/again"
reads="is the input --"
for out in random.bin link data.bin hard; do refuses 1 "$reads(model|data)" $bp --grads-out "$WORK/$out" --overwrite; done
cached="convert --model $WORK/cache/snapshot --to flat --overwrite"
refuses 1 "${reads}model" $cached --out "$WORK/cache/blobs/x"
refuses 1 "${reads}model" convert --model "$WORK/run2" --to flat --out "$WORK/run2/checkpoint-00000001/model.bin" --overwrite
refuses 1 "${reads}like" convert --model "$WORK/random.bin" --like "$WORK/published" --out "$WORK/way" --overwrite
for out in published published/inner way/inner/deeper .; do
    refuses 1 "${reads}model" convert --model "$WORK/published" --to hf --out "$WORK/$out" --overwrite
done
refuses 1 'holds lock, which convert does not write' convert --init $TINY --out "$WORK/run" --overwrite
check 'what was read or there is as it was' [ "$(tree)" = "$before" ]
succeeds $cached --out "$WORK/flat"
check '--overwrite replaces a file' same "$WORK/flat" "$WORK/copy.bin"
succeeds convert --model "$WORK/copy.bin" --out "$WORK/shards" --overwrite
check 'and a folder, of which nothing stays' [ "$(ls "$WORK/shards" | tr '\n' ' ')$(ls "$WORK" | grep -c 'shards\.')" = 'README.md config.json model.safetensors 0' ]

# ---- refusals -----------------------------------------------------------------------------------------------------------------------
refuses 2 'like applies to Hugging Face folders' convert --model $GOLDEN/llama --like $GOLDEN/llama --out "$WORK/x.bin"
refuses 2 'max-shard-size applies to Hugging Face folders' convert --model $GOLDEN/llama --max-shard-size 1GB --to flat --out "$WORK/x"
refuses 2 'max-shard-size' convert --model $GOLDEN/llama --max-shard-size 0 --out "$WORK/x"
refuses 2 'x.gguf: convert writes no .gguf files; give a folder name, then run' convert --model $GOLDEN/llama --out "$WORK/x.gguf"
refuses 2 'convert writes no .safetensors files' convert --model $GOLDEN/llama --to flat --out "$WORK/x.safetensors"
refuses 2 'writes a folder; give it a name without .bin' convert --model $GOLDEN/llama --to hf --out "$WORK/x.bin"
ln -s "$WORK/data.bin" "$WORK/cache/snapshot/LICENSE"
refuses 1 'snapshot/LICENSE: is a link that leads out of' convert --model "$WORK/cache/snapshot" --out "$WORK/x"
rm "$WORK/cache/snapshot/LICENSE"
mkfifo "$WORK/cache/snapshot/LICENSE"
refuses 1 "snapshot/LICENSE: is not a regular file" convert --model "$WORK/cache/snapshot" --out "$WORK/x"
rm "$WORK/cache/snapshot/LICENSE"
mkdir "$WORK/cache/snapshots"
mv "$WORK/cache/snapshot" "$WORK/cache/snapshots/revision"
mv "$WORK/cache/snapshots/revision/config.json" "$WORK/cache/blobs/y"
ln -s ../../blobs/y "$WORK/cache/snapshots/revision/config.json"
ln -sf ../../blobs/x "$WORK/cache/snapshots/revision/model.safetensors"
succeeds convert --model "$WORK/cache/snapshots/revision" --out "$WORK/cached"
mkdir "$WORK/hub" "$WORK/cache/refs"
ln -s ../cache "$WORK/hub/models--owner--name"
printf revision >"$WORK/cache/refs/main"
export HF_HUB_CACHE="$WORK/hub"
refuses 1 "${reads}model" convert --model owner/name --to flat --out "$WORK/cache/blobs/x" --overwrite
unset HF_HUB_CACHE
refuses 2 "unknown model '[?]]0;owned[?]x" info --init "$(printf '\033]0;owned\007x')"
refuses 1 'is not of the family gpt2, so llm.c cannot hold it' convert --model $GOLDEN/llama --to llmc --out "$WORK/x"
refuses 1 'layer_norm_epsilon, so llm.c' convert --init gpt2,layer_norm_epsilon=1e-6,num_hidden_layers=1,hidden_size=8,num_attention_heads=2 --to llmc --out "$WORK/x"
refuses 1 'another model: its vocab_size is 131, but in --init it is 96' convert --init $TINY --like $GOLDEN/llama --out "$WORK/x"
check 'nothing is left of what was refused' [ -z "$(ls "$WORK" | grep -E '^x|tmp$')" ]
finish
