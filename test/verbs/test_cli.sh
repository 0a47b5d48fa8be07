#!/bin/sh
# The program as a user runs it, with every kind of error: flags, shapes, files, memory, disks. Each refusal is one line
# that names the culprit, with the right exit code: 2 usage, 1 files and run time.
. test/cli.sh

# ---- usage ------------------------------------------------------------------------------------------------------------------
refuses 2 'init: unknown model .nothing.; .* info --help lists all' bp --init nothing
refuses 2 'unknown model .qwen3-9b.; did you mean qwen3-4b' bp --init qwen3-9b
refuses 2 'unknown key .hiddn_size.; did you mean hidden_size.; .* info --init llama shows' bp --init llama,hiddn_size=3
refuses 2 'hidden_size=-8' bp --init llama,hidden_size=-8
refuses 2 'rope_theta=nan' bp --init llama,rope_theta=nan
refuses 2 'key=value' bp --init llama,hidden_size
refuses 2 'num_key_value_heads' bp --init llama,num_attention_heads=6,num_key_value_heads=4,head_dim=8
refuses 2 'tie_word_embeddings=perhaps' bp --init llama,tie_word_embeddings=perhaps
refuses 2 'vocab_size is given twice' bp --init llama,vocab_size=256,hidden_size=64,vocab_size=300
refuses 2 'rope_theta is not a key of gpt2; .* info --init gpt2 shows the keys' bp --init gpt2,rope_theta=7
refuses 2 'mlp_bias is not a key of qwen3' plan --init qwen3-8b,mlp_bias=false
refuses 2 'layer_types=sf, but in mistral either every layer has a sliding_window or none' plan --init mistral,layer_types=sf
refuses 2 'rope_type yarn needs a rope_theta above 1' plan --init llama,rope_type=yarn,factor=2,rope_theta=1
refuses 2 'rope-scaling: rope_type yarn needs factor' plan --init llama --rope-scaling yarn
refuses 2 "rope-scaling: unknown scaling 'dynamic'; give linear, llama3 or yarn" plan --init llama --rope-scaling dynamic,factor=2
refuses 2 'rope-scaling: low_freq_factor is not a key of linear scaling' plan --init llama --rope-scaling linear,factor=2,low_freq_factor=1
refuses 2 'rope-scaling: hidden_size is not a key of yarn scaling' plan --init llama --rope-scaling yarn,factor=2,hidden_size=64
refuses 2 'rope-scaling: factor=0.5 would leave fewer positions' plan --init llama --rope-scaling yarn,factor=0.5
refuses 2 'rope-scaling: gpt2 has a table of positions' plan --init gpt2 --rope-scaling yarn,factor=2
refuses 2 "machine: 'rtx4091' is no machine; give a100, .* or rtx3060, then host=, disk= or disk-rate=" \
    plan --init gpt2 --machine rtx4091,host=128GiB
refuses 2 'machine H100x8: 8 cards, but the run has 4 ranks; leave x8 out' plan --init gpt2 --machine H100x8 --ranks 4
refuses 2 'machine h100x8: 8 cards, but the run has 1 rank; leave x8 out' bp --init $TINY --seq-len 64 --machine h100x8
succeeds plan --init gemma3-4b --rope-scaling linear,factor=16 --seq-len 300000
says err 'note: --rope-scaling replaces the model.s own scaling, linear,factor=8$'
says out '^positions the model has seen 262144; for 300000 add --rope-scaling yarn,factor=19$'
succeeds plan --init granite4-h-tiny --seq-len 200000
says out '^positions the model has seen 131072$'
refuses 1 '^train: --json: ' eval --init $TINY --data=--json
refuses 2 '1025.*1024 positions' bp --init gpt2 --seq-len 1025
refuses 2 'the model has no tokenizer file, .*; data/tokenizer_file.py writes one' sample --init $TINY --prompt hello
refuses 2 'ids must be below the model' sample --init $TINY --prompt-ids 5,96
refuses 2 '--chat needs the model.s tokenizer file' sample --init $TINY --chat --prompt hello
succeeds convert --init $TINY --out "$WORK/a model"
touch "$WORK/a model/tokenizer.json"
refuses 2 "type: python data/tokenizer_file.py --tokenizer '$WORK/a model' --out '$WORK/a model/tokenizer.tok'$" \
    sample --model "$WORK/a model" --prompt hello
cp "$TRAIN" "$WORK/streambp" # messages use the program's name as called
"$WORK/streambp" bp --chnk 1 2>"$WORK/err"
says err '^streambp: unknown option --chnk; did you mean --chunk?; see .*/streambp bp --help$'
refuses 1 'grads-out|No such file|/nowhere' bp --init $TINY --seq-len 8 --grads-out /nowhere/g.safetensors
succeeds doctor --init $TINY --seq-len 16 --json --verbose
check 'doctor finds nothing wrong' [ "$(json wrong) $(json not_checked)" = '0 0' ]
says err '^doctor   all right: [1-9][0-9]* ops, [1-9][0-9]* other rows' '^ok     adamw  '
check 'the verdict comes last' sh -c "tail -n 1 '$WORK/err' | grep -q '^doctor '"
mkfifo "$WORK/fifo"
"$TRAIN" doctor --init $TINY --seq-len 3 >"$WORK/fifo" 2>"$WORK/err" &
{ read -r row && kill -9 $! && cat; } <"$WORK/fifo" >"$WORK/out"
check "a pipe gets rows as they end: $row" [ -n "$row" -a "$(grep -c '^doctor ' "$WORK/out")" = 0 ]
succeeds doctor --init $TINY --seq-len 3 --quiet
check 'a quiet one is the verdict and notes' [ "$(grep -cvE '^(doctor|note) ' "$WORK/out")" = 0 ]
succeeds --version
says out '^streambp.c [0-9a-z.]*, commit ' "^build      \($TEST_DEVICE\|cuda\) $TEST_PRECISION, " '^libraries  .*MPI.*, PCRE2 [0-9.]*, cJSON [0-9.]*$'

# ---- types and devices (one_program: a program of several types) --------------------------------------------------------------
other=fp32
[ $TEST_PRECISION = fp32 ] && other=bf16
refuses 2 "^train: --device auto --dtype $other is not in this program, which has [a-z]* $TEST_PRECISION; make builds it" bp --init $TINY --dtype $other
refuses 2 'not in this program, .*; make PRECISION=double builds it' eval --init $TINY --data $SHARD --dtype double
[ $TEST_DEVICE = gpu ] || refuses 2 '^train: --device cuda --dtype auto is not in this program, .*; make BACKEND=all builds it' bp --init $TINY --device cuda

# ---- models -----------------------------------------------------------------------------------------------------------------
refuses 1 'nothing_here' bp --model $WORK/nothing_here
refuses 1 '/nothing_here: No such file or directory; a model is' info --model /nothing_here
cp -r $GOLDEN/llama "$WORK/model"
sed -i 's/"llama"/"qwen2_moe"/; s/LlamaForCausalLM/Qwen2MoeForCausalLM/' "$WORK/model/config.json"
refuses 1 'qwen2_moe' bp --model "$WORK/model"
succeeds convert --model $GOLDEN/qwen3 --out "$WORK/q.bin"
printf '\377\377\377\377\377\377\377\177' | dd of="$WORK/q.bin" bs=1 seek=20000 conv=notrunc 2>/dev/null
refuses 1 'NaN|infinity' bp --model "$WORK/q.bin" --seq-len 8

# ---- data ---------------------------------------------------------------------------------------------------------------------
refuses 1 'no file matches' train --init $TINY --data "$WORK/*.none" --out none

# ---- tokenizers -----------------------------------------------------------------------------------------------------------------
TOKENIZERS=$GOLDEN/tokenizers
LARGE=${TINY%96}800
refuses 1 'qwen2.tok: this tokenizer has a vocabulary of 440, the model 439' \
    sample --init ${TINY%96}439 --tokenizer $TOKENIZERS/qwen2.tok --prompt x
refuses 2 'vocabulary of 441' sample --init ${TINY%96}441 --tokenizer $TOKENIZERS/qwen2.tok --prompt 'x<|end|>'
refuses 2 '--system: .*gemma.tok: no system text' sample --init $LARGE --tokenizer $TOKENIZERS/gemma.tok --system x --prompt x

# ---- long texts -----------------------------------------------------------------------------------------------------------------
refuses 2 '--context-memory: a gpt2 model cannot have it: its positions are a learned table' \
    sample --init gpt2,vocab_size=256 --prompt x --context-memory blocks
refuses 2 '--context-memory: a gemma4 model cannot have it: its last layers read keys of earlier ones' \
    plan --for sample --init gemma4-e4b --context-memory blocks
refuses 2 '--context-memory only writes text.*give --for sample' plan --init qwen3-8b --seq-len 1024 --context-memory blocks
refuses 2 '--context-window 8192 is above the 1024 positions' \
    sample --init llama,max_position_embeddings=1024 --prompt-ids 1 --context-memory blocks --context-window 8192
refuses 2 '--context-memory takes one text' sample --init $TINY --prompts "$WORK/none" --context-memory blocks
refuses 2 '--context-blocks has no meaning without --context-memory' sample --init $TINY --prompt-ids 1 --context-blocks 4
refuses 2 'places tensors on disk: give --disk' sample --init $TINY --prompt-ids 1 --context-memory blocks --context-on disk
BYTES=llama,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=256
seq 1000 >"$WORK/numbers"
for place in device host disk; do
    succeeds sample --init $BYTES,max_position_embeddings=512 --prompt-file "$WORK/numbers" --max-new-tokens 20 --temperature 0 --json \
        --context-memory blocks --context-on $place --disk "$WORK" --context-blocks 3
    mv "$WORK/out" "$WORK/text-$place"
done
check 'a long text is the same from any place' cmp -s "$WORK/text-device" "$WORK/text-host"
check 'from a disk, too' cmp -s "$WORK/text-device" "$WORK/text-disk"
million="plan --for sample --init qwen3-8b --context-memory blocks --max-context 1M --json"
succeeds $million --machine rtx4090,host=160GiB
check 'a million tokens of Qwen3-8B fit 24 GB and 160 GiB of host memory' grep -q '"fits": true' "$WORK/out"
check 'within which keys and values lie' awk -v host="$(json host_bytes)" 'BEGIN { exit !(host > 143 * 2^30 && host < 144 * 2^30) }'
succeeds $million --machine rtx4090,host=64GiB,disk=200GiB
check 'or 64 GiB and a disk' sh -c "grep -q '\"fits\": true' '$WORK/out' && [ $(json disk_bytes) -gt $(json host_bytes) ]"
succeeds plan --for sample --init qwen3-8b --max-context 1M --json --machine rtx4090,host=160GiB
check 'they do not without it' grep -q '"fits": false' "$WORK/out"
succeeds plan --for sample --init qwen3-8b --max-context 32K --json --machine h200
half=$(json token_seconds)
succeeds plan --for sample --init qwen3-8b --max-context 64K --json --machine h200
whole=$(json token_seconds)
check 'a token of Qwen3-8B after 32k tokens takes 6 to 8 ms' awk -v s="$half" 'BEGIN { exit !(s > 0.006 && s < 0.008) }'
check 'another 32k tokens take the time of their keys and values' awk -v s="$half" -v t="$whole" \
    'BEGIN { bytes = 32768 * 36 * 2 * 8 * 128 * 2; r = (t - s) * 4.8e12 * 0.85 / bytes; exit !(r > 0.98 && r < 1.02) }'

# ---- memory and disks ---------------------------------------------------------------------------------------------------------
refuses 1 'plan needs.*--seq-len [0-9]+ would fit' bp --init $TINY --seq-len 4096 --chunk 1024 --memory-limit 4MiB
says err '^ *[0-9.]* MiB .* %  #* *layer inputs$' # what takes it
refuses 1 'no length fits' bp --init $TINY --seq-len 4096 --memory-limit 100KiB
refuses 1 'no length fits.*one token already needs' bp --init llama3.1-70b --seq-len 100000
refuses 1 'no length fits: --memory-limit is .*weights .*, gradients .*, optimizer ' train --init ${TINY%96}4096 --data $SHARD \
    --seq-len 64 --memory-limit 2400KiB --out none
says err '^  --lora-rank 32 *gives --seq-len [1-9]' '^  mpirun -n [0-9]* ... --zero 3 --sp [0-9]* *gives --seq-len [1-9]'
full() { # arguments: with a full disk as stdout, exit 1 and a line that says so
    "$TRAIN" "$@" >/dev/full 2>"$WORK/err"
    check "exit 1 with a full disk behind stdout: train $*" [ $? = 1 ]
    check "a line about the full disk behind stdout: train $*" grep -q '^train: .*standard output' "$WORK/err"
}
if [ -w /dev/full ]; then
    for options in --help --version "plan --init $TINY --json" "bp --init $TINY --seq-len 8" \
        "sample --init $TINY --prompt-ids 1 --max-new-tokens 2" "train --init $TINY --data $SHARD --seq-len 64 --steps 1 --out none"; do
        full $options
    done
else
    echo '[  SKIPPED ] a full disk behind stdout: NOT TESTED, because there is no /dev/full'
    skipped=$((skipped + 1))
fi

# ---- text for people ---------------------------------------------------------------------------------------------------------
succeeds bp --init $TINY --seq-len 8 --objective simpo
says out '^loss [0-9.]*  norm [0-9.]*  [0-9.]* s  [0-9.]* tok/s$' '^acc [01].0000  margin [ -]0.0[0-9]*$' \
    '^memory   [0-9.]* [KM]iB at peak: plan [0-9.]* KiB, libraries and files [0-9.]* [KM]iB$'

# ---- valid runs -----------------------------------------------------------------------------------------------------------------
succeeds info --init gpt2-xl,n_layer=2 --json
check 'a key of a preset is overridden' [ "$(json num_hidden_layers)" = 2 ]
succeeds plan --init qwen3-32b --seq-len 1000000 --dtype bf16 --memory-limit 1TiB --json
check 'plan solves for the longest' [ "$(json max_seq_len)" -gt 100000 ]
succeeds plan --init qwen3.5-9b --base nf4 --lora-rank 16 --machine h100,host=2GiB --method seco --seq-len 400000 --json
check 'a length that fits is no longer than the longest, which needs few states' [ "$(json max_seq_len)" -ge 400000 ]
# Several processes on paper: plans of the run that mpirun would start.
ranks() { succeeds plan --init qwen3-0.6b --dtype bf16 --seq-len 4096 --json "$@"; }
ranks
check 'a process alone has no ranks and no machine' [ "$(grep -cE 'ranks|machine|sent' "$WORK/out")" = 0 ]
ranks --keep none
alone=$(json total_bytes)
ranks --ranks 4 --grad-accum 4 --zero 3 --machine a100
says out '"ranks": 4, "zero": 3, "sp": 1, "sent": {"gradients": [1-9][0-9]*, "weights": [1-9]' \
    '"keys_values": 0, "key_value_gradients": 0, "states": 0}, "machine": "a100", "estimated_seconds": [0-9.]*, "estimated_tokens_per_second": [1-9]' \
    '"estimated_mfu": 0.[0-9]*, "communication_share": [0-9.]'
check 'a rank of four has less' [ "$(json total_bytes)" -lt "$alone" ]
check 'tokens are those of all ranks' awk -v t="$(json estimated_tokens_per_second)" -v s="$(json estimated_seconds)" \
    'BEGIN { exit !(t * s > 16383.99 && t * s < 16384.01) }'
ranks --ranks 4 --sp 4 --zero 1 --memory-limit 20GiB
check 'ranks of one stream send keys and values' [ "$(json keys_values | cut -d. -f1)" -gt 1000000 ]
check 'the longest is one of four ranks' [ "$(json max_seq_len)" -gt 400000 ]
# Attention's outputs: recomputed to the bit when kept, with fewer operations; on the device, or in host memory if they do not fit.
kept() { succeeds plan --init qwen3-8b --dtype bf16 --for bp --seq-len 20000 --json "$@"; }
kept --keep none
without=$(json total_bytes)
check 'nothing is kept if told so' [ "$(json kept_attention) $(json host_bytes)" = '0 0' ]
bytes=$((36 * 20000 * 32 * (128 * 2 + 4)))
kept --keep attention
check 'kept on the device' [ "$(json kept_attention) $(json host_bytes)" = "$bytes 0" ]
check 'which holds them beside the rest' [ "$(json total_bytes)" = $((without + bytes)) ]
kept --keep attention --memory-limit $((without + bytes - 1))
check 'and in host memory where they do not fit' [ "$(json kept_attention) $(json host_bytes)" = "0 $bytes" ]
kept --keep attention --keep-on device --memory-limit $((without + bytes - 1))
check 'but not against a wish' [ "$(json host_bytes)" = 0 ]
succeeds plan --init qwen3-8b --dtype bf16 --seq-len 20000 --keep attention --keep-on host --verbose
check 'the command that is echoed can be pasted' \
    [ "$(sed -n ':a;/\\$/{N;s/ *\\\n */ /;ba};s/^command  //p' "$WORK/out")" = \
    "${TRAIN_PLAIN:-$TRAIN} plan --init qwen3-8b --dtype bf16 --seq-len 20000 --keep attention --keep-on host --verbose" ]
check 'a plan tells people' grep -q '^placed   in host memory: kept activations 5.58 GiB' "$WORK/out"
# What is free keeps products, or all; a resumable choice, which --keep names.
kept --seq-len 4096 --lora-rank 16 --memory-limit h100
check 'all activations are kept where they fit' [ "$(json keep)" = all ]
kept --seq-len 32768 --lora-rank 16 --memory-limit h100
check 'or products of some layers' sh -c "echo '$(json keep)' | grep -q '^products=[1-9]'"
check 'and the need is told' [ "$(json needed_bytes)" -lt "$(json total_bytes)" ]
succeeds plan --init qwen3-8b --dtype bf16 --seq-len 32768 --lora-rank 16 --machine h100,host=200GiB --verbose
says out '^fits  .* takes [0-9.]* GiB for speed' '^--keep   none  *[0-9.]* GiB  [0-9.]* s$' '^  *products=18  *' '--keep products --keep-on host=[0-9]'
kept --seq-len 4096 --lora-rank 16 --memory-limit h100 --method stream
check 'a method that bp is told to measure keeps nothing' [ "$(json keep)" = none ]
# States within an interval of 1,024 tokens come from forward's product in every place, as its parts may round differently.
hybrid=qwen3_5,hidden_size=12,intermediate_size=20,num_hidden_layers=3,num_attention_heads=2,num_key_value_heads=1,head_dim=8,vocab_size=96,layer_types=llf,linear_num_key_heads=1,linear_num_value_heads=2,linear_key_head_dim=10,linear_value_head_dim=4
for keep in 'products' 'all --keep-on host' 'products=2 --keep-on host=1'; do
    succeeds bp --init $hybrid --seq-len 256 --chunk 64 --keep $keep --grads-out "$WORK/kept.safetensors" --overwrite --json
    [ "$keep" != products ] || cp "$WORK/kept.safetensors" "$WORK/products.safetensors"
    case $keep in all*) check 'no place changes a bit' cmp -s "$WORK/products.safetensors" "$WORK/kept.safetensors" ;; esac
done
refuses 2 '--keep is .most., it must be none, attention, products, all or auto' plan --init qwen3-8b --keep most
refuses 2 '--keep is .products=0., it must be' plan --init qwen3-8b --keep products=0
for wrong in products=37 none=2 'products --keep-on device=2' 'products=3 --keep-on host=4' 'auto --keep-on host=1'; do
    refuses 2 'a number belongs to' plan --init qwen3-8b --keep $wrong
done
refuses 2 'a shared sequence .--sp. keeps attention' plan --init qwen3-8b --keep products --ranks 2 --sp 2
refuses 2 'method seco keeps the activations of one chunk' plan --init qwen3-8b --keep products --method seco
refuses 2 'method mst keeps attention' plan --init qwen3-8b --keep all --method mst
# Documents that share prefixes: rows and pairs in the plan, and what excludes sharing.
shared='plan --init qwen3-8b --dtype bf16 --batch 8 --seq-len 36864 --shared-tokens 32768'
succeeds $shared --json
shares=$(json total_bytes)
check 'rows of eight answers to a prompt' [ "$(json positions) $(json rows) $(json forks)" = '294912 65543 1' ]
check 'and their pairs' [ "$(json pairs) $(json pairs_alone)" = '1677983744 5435965440' ]
succeeds $shared
says out '^shared   8 documents share 32768 tokens: 65543 rows instead of 294912, 1 fork; 3.2x fewer pairs$'
succeeds $shared --share-prefixes off --json
check 'documents alone need more' [ "$(json total_bytes)" -gt "$shares" -a -z "$(json rows)" ]
alone=$(json total_bytes)
succeeds $shared --method mst --for bp --json
check 'other orders share, too' [ "$(json rows)" = 65543 ]
if [ "$(uname -m)" = x86_64 ]; then
    succeeds bp --init $TINY,initializer_range=1e-40 --seq-len 32 --json # every gradient is a denormal number
    check 'denormal numbers are computed as 0' [ "$(json grad_norm)" = 0 ]
fi
for model in $TINY $hybrid; do
    pass="--init $model --batch 3 --seq-len 400 --shared-tokens 333 --chunk 64 --logits-chunk 64 --json"
    succeeds bp $pass
    ran="$(json plan_bytes) $(json flops)"
    check 'what a pass computes' [ "$(json tokens) $(json computed)" = '1200 536' ]
    succeeds plan --for bp $pass
    check 'the plan of a pass over shared tokens' [ "$(json total_bytes) $(json flops)" = "$ran" ]
done
for other in '--method seco' '--method spaco --keep-chunks 0.5' '--lora-rank 4 --lora-dropout 0.1' '--ranks 2 --sp 2'; do
    refuses 2 '--share-prefixes on: not with --' $shared $other --share-prefixes on
    succeeds $shared $other --json
    says err '^note: --share-prefixes auto: with --.* every document is computed alone$'
    check "nothing is shared with $other" [ -z "$(json rows)" ]
done
refuses 2 'shared-tokens is of random documents' $shared --data $SHARD
refuses 2 'shared-tokens above --seq-len' plan --init qwen3-8b --seq-len 10 --shared-tokens 11
# Places: as named, or chosen by the planner; the plan equals the pass's to the byte in each place.
placed() { # expected: places, inputs_every; arguments
    expected=$1 && shift
    succeeds bp --init $TINY --seq-len 2048 --chunk 64 --logits-chunk 64 --keep none --json "$@"
    ran=$(sed 's/.*"placed": {\([^}]*\)}.*\("inputs_every": [0-9]*, "host_bytes": [0-9]*, "disk_bytes": [0-9]*, "host_moved_bytes": [0-9]*, "disk_written_bytes": [0-9]*\).*/\1 \2/' \
        "$WORK/out") bytes=$(json plan_bytes)
    check "places of bp $*" sh -c "echo '$ran' | grep -q '$expected'"
    succeeds plan --for bp --init $TINY --seq-len 2048 --chunk 64 --logits-chunk 64 --keep none --json "$@"
    check "the plan of bp $*" [ "$(json total_bytes) $(sed 's/.*"placed": {\([^}]*\)}.*\("inputs_every": .*, "disk_written_bytes": [0-9]*\).*/\1 \2/' \
        "$WORK/out")" = "$bytes $ran" ]
}
placed '"inputs": "host", "weights": "device".*"inputs_every": 2, "host_bytes": [1-9][0-9]*, "disk_bytes": 0, ' --inputs host --inputs-every 2
whole=$(succeeds plan --for bp --init $TINY --seq-len 2048 --chunk 64 --logits-chunk 64 --keep none --json && json total_bytes)
placed '"inputs": "device", .*"host_bytes": 0, ' --memory-limit "$whole" --host-limit 3MiB
placed '"inputs": "disk", .*"host_bytes": 16777216, "disk_bytes": [1-9][0-9]*, .*"disk_written_bytes": [1-9]' --inputs disk --disk build
# Memory of a pass outside its plan is no more with a disk than with host memory: the plan holds the transfers' pieces.
beyond() {
    succeeds bp --init gpt2,vocab_size=64,hidden_size=1024,num_hidden_layers=2,num_attention_heads=16,intermediate_size=64 \
        --seq-len 1024 --batch 3 --method checkpoint --keep none --json --weights host "$@"
    echo $(($(json peak_bytes) - $(json plan_bytes) - $(json host_bytes)))
}
check 'the peak with a disk is planned' [ $(($(beyond --inputs disk --disk build) - $(beyond --inputs host))) -lt 4000000 ]
placed '"gradients": "host", .*"host_bytes": [1-9]' --memory-limit $((whole - 1)) --host-limit 3MiB --verbose
says err '^placed   in host memory: gradients ' '^  *the fastest that fits, estimated [0-9.]* % slower than all on the device'
refuses 1 'the plan has inputs .* in host memory, but only 1.00 MiB are allowed; --seq-len [0-9]* would fit' \
    bp --init $TINY --seq-len 65536 --inputs host --host-limit 1MiB
refuses 1 'with these options --seq-len [0-9]* would fit, and this one with --host-limit 1GiB' \
    bp --init $TINY --seq-len 2048 --chunk 64 --logits-chunk 64 --keep none --memory-limit $((whole - 1))
refuses 2 'places tensors on disk: give --disk' bp --init $TINY --weights disk
refuses 2 '--disk-limit has no meaning without --disk' bp --init $TINY --disk-limit 1GiB
refuses 1 'what would fit|no length fits: .* take one of the above' plan --init qwen3-8b --dtype bf16 --seq-len 32768 --memory-limit 24GiB
says err '^  --host-limit 1[0-9][0-9]GiB *gives --seq-len [0-9]' '^  --disk-limit [0-9]*GiB *gives --seq-len [0-9]'
# A length said to fit leaves room for the host's own memory: here the largest part, and on the CPU in the same memory.
wide=llama,hidden_size=2,intermediate_size=2,num_hidden_layers=64,num_attention_heads=1,head_dim=1024,vocab_size=9
refuses 1 'the memory available is .* --seq-len [0-9]* would fit' bp --init $wide --seq-len 1000000000 --keep attention --keep-on host
fits=$(sed -n 's/^train: .*--seq-len \([0-9]*\) would fit.*/\1/p' "$WORK/err")
refuses 1 'has kept activations .* in host memory, .* are available; --seq-len [0-9]* would fit, or --keep-on device or --keep none' \
    bp --init $wide --seq-len $((3 * fits)) --keep attention --keep-on host
succeeds plan --for bp --init $wide --seq-len "$fits" --keep attention --keep-on host --json
check 'a length that fits is one with host memory' awk -v n=$(($(json total_bytes) + $(json host_bytes))) \
    '$1 == "MemAvailable:" { exit !(n <= 1.2 * 1024 * $2) }' /proc/meminfo
succeeds bp --init $TINY --seq-len 64 --method full --keep attention
check 'full keeps everything anyway' grep -q 'keep attention is ignored' "$WORK/err"

# Keys and values of whole streams, or of blocks passed around a ring: chosen by memory, or as asked for.
long() { succeeds plan --init qwen3-8b --dtype bf16 --seq-len 1000000 --ranks 16 --sp 16 --zero 3 --keep none --chunk 1024 --logits-chunk 512 --json "$@"; }
long --kv gather
gathered=$(json total_bytes)
long --kv ring
around=$(json total_bytes)
check 'what passes around needs less memory' [ "$around" -lt "$gathered" ]
long --memory-limit $gathered
check 'keys and values are gathered where they fit' [ "$(json total_bytes)" = "$gathered" ]
long --memory-limit $((gathered - 1))
check 'they pass around where they do not' [ "$(json total_bytes)" = "$around" ]
check 'the longest is that of the ring' [ "$(json max_seq_len)" -ge 1000000 ]
ranks --machine h200,host=0
check 'whose memory is the limit' [ "$(json usable_bytes) $(($(json max_seq_len) > 4096))" = '149035365171 1' ]
with_machine=$(json max_seq_len)
ranks --memory-limit h200
check 'a card is a limit by name' [ "$(json max_seq_len) $(json usable_bytes)" = "$with_machine 149035365171" ]
ranks --machine H100x8 --grad-accum 8
check 'a machine of eight cards' grep -q '"usable_host_bytes": 241591910400,.* "ranks": 8, .*"machine": "h100"' "$WORK/out"
ranks --machine h200
check 'one process on a machine' grep -q '"machine": "h200", "estimated_seconds": [0-9]' "$WORK/out"
succeeds plan --init qwen3-0.6b --dtype fp32 --seq-len 4096 --json --ranks 2 --grad-accum 2
check 'no estimate but in bf16' grep -q '"estimated_seconds": null, .*"communication_share": null' "$WORK/out"
succeeds plan --init qwen3-0.6b --dtype bf16 --seq-len 4096 --ranks 16 --sp 16
says out '^sent .* keys_values [1-9]' '^step      [0-9.]* s for 4096 tokens, estimated: [0-9]* tokens/s, [0-9]* % MFU$' '^chosen    bf16, stream, chunk ' '^memory    [0-9.]* [MG]iB of the CPU (--machine CARD plans for a GPU)$'
succeeds plan --init qwen3-0.6b --dtype bf16 --seq-len 4096 --machine h100 --verbose
says out '^machine  measured with this program on one H100' '^ *products 680 TFLOP/s, attention forward 593 ' "^ *NVIDIA's data sheets" '^ *assumed:$' \
    ' gap between kernels 6 us$' ' link between nodes ' '^work      estimated: products ' '^rates .*TFLOP/s executed by each GPU; .*counting T^2 pairs' '^calls     of cuDNN '
# A pass without an update is not training; if nothing fits, every recommendation is a valid plan.
for_bp="plan --init qwen3-8b --dtype bf16 --memory-limit h100 --for bp"
succeeds $for_bp --seq-len 200000
says out '^fits      no: 9[0-9.]* GiB of 78.10 GiB (H100 SXM), for a pass without an optimizer update$' '^longest   --seq-len 1[0-9]*$' \
    '^train     the same options with an optimizer need 18.*; no length fits' '^helps$' '^  --host-limit [0-9]*GiB  *gives --seq-len [0-9]'
succeeds $for_bp --lora-rank 32 --json
says out '"fits": true, "optimizer_update": false, '
run plan --init qwen3-0.6b --seq-len 100000
says out '^positions the model has seen 40960; for 100000 add --rope-scaling yarn,factor=3$'
run plan --init qwen3-0.6b --seq-len 100000 --json --quiet
check 'a quiet plan has no notes' [ ! -s "$WORK/err" ]
run plan --init qwen3-0.6b --seq-len 100000 --quiet
check 'but the result' [ "$(sed 's/[0-9].*//' "$WORK/out")" = 'memory    ' ]
succeeds $for_bp --lora-rank 32 --seq-len 1024 --json
fitting=$(json train_max_seq_len) bytes=$(json train_total_bytes)
succeeds plan --init qwen3-8b --dtype bf16 --memory-limit h100 --lora-rank 32 --seq-len 1024 --json
says out '"optimizer_update": true, '
check 'what trains is what its own plan says' [ "$(json max_seq_len) $(json total_bytes)" = "$fitting $bytes" ]
refuses 1 'no length fits: what the card leaves is 78.10 GiB.*weights 15.26 GiB, gradients .*, optimizer 91' \
    plan --init qwen3-8b --dtype bf16 --machine h100,host=0 --json
check 'no length is 0 in JSON' [ "$(json max_seq_len) $(json fits)" = '0 false' ]
cp "$WORK/err" "$WORK/ways"
run plan --init qwen3-8b --dtype bf16 --machine h100,host=0 --json --quiet
check 'the object and the status alone' [ "$? $(json max_seq_len) $(cat "$WORK/err")" = '1 0 ' ]
check 'ways out' [ "$(grep -c 'gives --seq-len' "$WORK/ways")" = 6 ]
sed -n 's/^  \(--.*\) gives --seq-len \([0-9]*\).*/\2 \1/p' "$WORK/ways" >"$WORK/each"
while read -r length options; do
    succeeds plan --init qwen3-8b --seq-len 4096 --machine h100,host=0 --json $options
    check "$options gives $length" [ "$(json max_seq_len)" = "$length" ]
done <"$WORK/each"
run plan --init qwen3-8b --seq-len 1000000 --machine h100,host=0 --lora-rank 16
says out '^  --base nf4  *gives --seq-len [0-9]*, not 1000000$' '^  --ranks [0-9]* --zero 3 --sp [0-9]*  *gives --seq-len [1-9][0-9]\{6\}, with'
refuses 1 'no length fits' plan --init qwen3-8b --dtype bf16 --machine h100,host=0 --method seco
says err '--zero 3 --sp [0-9]* --method stream  *gives --seq-len [0-9]*, with as much memory for each'
succeeds plan --init qwen3-8b --seq-len 100000 --method seco --machine h100,host=512GiB --json --quiet
check 'seco has no layer inputs to leave out' [ "$(json inputs_every)" = 1 ]
# --sp auto: steps of given lengths, beside the best groups of one size.
printf '100\n3000\n20000\n' >"$WORK/lengths"
dealt="plan --init qwen3-0.6b --machine h100 --ranks 8 --sp auto --samples 16"
succeeds $dealt --lengths "$WORK/lengths" --json
check 'single ranks are the best fixed groups' [ "$(json fixed_sp)" = 1 ]
says out '"level_max_tokens": \[20000, 20000, 20000, 20000\]' '"deal_bound": 0\.[89]' '"rank_seconds": \[\[[0-9.]*, '
succeeds $dealt --zero 3 --lengths lognormal,median=800,sigma=1.5,max=30000 --seq-len 40000
says out '^groups    of 1 rank: 40000 tokens fit; a step has ' '^fixed     --sp [124], the best: '
succeeds $dealt --lengths lognormal,median=1000,sigma=9,max=90000000
says out '^fits      no: ' '^longest   --seq-len [0-9]*$'
echo 2O >>"$WORK/lengths"
refuses 1 "lengths:4: '2O' is not a length" $dealt --lengths "$WORK/lengths"
refuses 2 "lengths: 'lognormal,mean=3' must be lognormal,median=M" $dealt --lengths lognormal,mean=3
refuses 2 'lengths needs --sp auto' plan --init qwen3-0.6b --lengths lognormal,median=9,sigma=1,max=90
succeeds plan --init qwen3-0.6b --zero 3
says err 'zero 3 has no effect in a single process'
refuses 2 '--batch 1 with --grad-accum 1: over 4 replicas .*; --sp 4, --batch 4 or --grad-accum 4 would fit' plan --init qwen3-0.6b --ranks 4
# Random pairs and groups: the policy is its own reference and its own past.
succeeds bp --init $TINY --seq-len 50 --objective dpo --json
check 'dpo begins at ln 2' close "$(json loss)" 0.693147180559945 1e-9
check 'where no pair has a margin' [ "$(json rewards.margins)" = 0 ]
# TRL's DPOTrainer has the aux loss of experts, its CPO and ORPO trainers have not.
for told in 'dpo: aux loss 0.001 .the model.s., a micro-batch at a time, not in the loss shown$' \
    'orpo: no aux loss with orpo, as in TRL; --router-aux-loss 0.001 adds the model.s$' 'simpo: no aux loss with simpo' \
    'simpo --router-aux-loss 0.5: aux loss 0.5, a micro-batch' 'simpo --router-aux-loss 0: no aux loss$'; do
    succeeds bp --init $(echo $TINY | sed s/llama/qwen3_moe/),num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16 --seq-len 50 --objective ${told%%:*}
    says out "^experts .*;${told#*:}"
done
succeeds bp --init $TINY --seq-len 50 --objective grpo --group-size 4 --beta 0.1 --json
check 'grpo begins with ratio 1' [ "$(json ratio)" = 1 -a "$(json clip_ratio/region_mean)" = 0 -a "$(json tokens)" = 200 ]
check 'and next to its reference' [ "$(json kl)" = 0 ]
for options in '--lora-rank 4' '--lora-rank 4 --objective dpo' '--objective grpo --group-size 3 --beta 0.1'; do
    succeeds bp --init $TINY --seq-len 50 $options --json
    planned=$(json plan_bytes)
    succeeds plan --init $TINY --seq-len 50 $options --for bp --json
    check "the plan of bp $options is what it does" [ "$(json total_bytes)" = "$planned" -a "$planned" -gt 0 ]
done
succeeds bp --init $TINY --seq-len 50 --lora-rank 4 --grads-out "$WORK/some" --grads-of '*.1.*lora_B*' --repeat 3 \
    --json --json-lines
check 'gradients of some adapters' [ "$(tr ',' '\n' <"$WORK/some" | grep -ac 'layers.1.*lora_B')" = 7 ]
check 'and no others' [ "$(tr ',' '\n' <"$WORK/some" | grep -ac 'dtype')" = 7 ]
sed -n 's/^{"pass": [1-3], "seconds": \(.*\)}$/\1/p' "$WORK/out" >"$WORK/seconds"
check 'a line for each pass' [ "$(wc -l <"$WORK/seconds")" = 3 ]
sed -i 1,3d "$WORK/out"
check 'the result is behind them' [ "$(grep -c '^{"loss": .*}$' "$WORK/out")" = 1 ]
check 'seconds of each pass' [ "$(sed -n 's/.*"seconds_each": \[\([^]]*\)\].*/\1/p' "$WORK/out")" = "$(paste -sd , "$WORK/seconds" | sed 's/,/, /g')" ]
check 'the first warms up' [ "$(json warmup_seconds)" = "$(sed -n 1p "$WORK/seconds")" ]
check 'the median is of the others' close "$(json seconds)" "$(awk 'NR > 1 { s += $1 / 2 } END { print s }' CONVFMT=%.17g OFMT=%.17g "$WORK/seconds")" 1e-9
# The attention in use, and rates: MFU if a machine is named.
succeeds bp --init $TINY --seq-len 64 --json --deterministic off
check 'our own attention has one order' grep -q '"attention": "own", "deterministic": true, "attention_workspace": 0, "executed_tflops_per_s": [0-9.e-]*, "mfu_causal": null' "$WORK/out"
says err '^note: --deterministic off changes nothing: attention uses our own kernels' '^rate     [0-9.e-]* TFLOP/s executed$'
succeeds bp --init $TINY --seq-len 64 --json --machine h200
check 'MFU of all pairs is more' awk -v a="$(json mfu_causal)" -v b="$(json mfu_full_attention)" 'BEGIN { exit !(a > 0 && b > a) }'
succeeds plan --init qwen3-8b --dtype bf16 --for bp --seq-len 32768 --machine h200 --deterministic off --json
says out '"attention": "cudnn", "attention_library": "cuDNN", "deterministic": false, "attention_workspace": [1-9]' \
    '"attention_calls": [1-9].*"attention_staged_bytes": [1-9].*"attention_own_share": 0[,}]'
succeeds plan --init qwen3.5-9b,num_hidden_layers=4 --dtype bf16 --for bp --seq-len 4096 --machine rtx4090 --deterministic off --json
says err '^note: --deterministic off changes nothing: attention uses our own kernels backward, which add in one order$'
says out '"attention": "cudnn", "attention_library": "cuDNN", "deterministic": true, "attention_workspace": 0'
# A profile: one more pass, and no other change.
succeeds bp --init $TINY --seq-len 64 --chunk 16 --grads-out "$WORK/plain.safetensors" --json
export STREAMBP_ALLOCATION_GUARD=1
succeeds bp --init $TINY --seq-len 64 --chunk 16 --keep none --grads-out "$WORK/profiled.safetensors" --json --profile --machine h200
unset STREAMBP_ALLOCATION_GUARD
check '--profile changes no gradient' cmp -s "$WORK/plain.safetensors" "$WORK/profiled.safetensors"
tr '{' '\n' <"$WORK/out" >"$WORK/rows" # the object, then its rows
check 'a row for each op' [ "$(grep -c '"op": "[a-z_]*".*"calls": .*"floor_seconds": ' "$WORK/rows")" -gt 20 ]
counted=$(sed -n 's/.*"flops": \([0-9]*\), "bytes".*/\1/p' "$WORK/rows" | awk '{ sum += $1 } END { printf "%.0f", sum }')
check 'which have all FLOPs' [ "$counted" = "$(sed -n 's/.*"flops": \([0-9]*\), "model_flops".*/\1/p' "$WORK/rows")" ]
says err '^profile  of one more pass' '^floor    at the rates of an H200 SXM in bf16' 'floor %$' \
    '^  attention_backward  *8 ' '^  linear_forward \[96,32\] MLP+head  *17 ' '^  not in ops (host)'
succeeds bp --init $TINY --seq-len 64 --profile --quiet
check 'no floor without a machine' [ "$(grep -c floor "$WORK/out")" = 0 -a "$(grep -c '^  linear_backward_weight' "$WORK/out")" = 4 ]
succeeds bp --init $TINY --seq-len 100 --method full --chunk 10 --json
check 'full notes that it ignores --chunk' grep -q 'note: .*ignored' "$WORK/err"
check 'JSON is one line' [ "$(wc -l <"$WORK/out")" = 1 ]
succeeds bp --init ${TINY},max_position_embeddings=50 --seq-len 100
check 'RoPE beyond its length is a note' grep -q 'note: .*max_position_embeddings' "$WORK/err"
# oneDNN computes only a part of every product if it is promised more threads than there are.
if [ $TEST_DEVICE = cpu ]; then
    succeeds bp --init $TINY --seq-len 100 --threads 1 --json
    loss=$(json loss)
    for fewer in OMP_THREAD_LIMIT=1 OMP_MAX_ACTIVE_LEVELS=0 OMP_DYNAMIC=true; do
        export $fewer
        succeeds bp --init $TINY --seq-len 100 --threads 2 --json
        unset ${fewer%=*}
        check "$fewer: the loss of one thread" close "$(json loss)" "$loss" 1e-6
        [ $fewer = OMP_DYNAMIC=true ] || check "$fewer: noted" grep -q 'note: --threads 2: .* grants .* 1;' "$WORK/err"
    done
fi
# Waiting threads sleep soon, unless the user sets otherwise: the program restarts itself as the same process. Two runs at once, whose
# threads meet after every token, take at most ten times as long as one; with OpenMP's default, a hundred times.
if [ $TEST_DEVICE = cpu ] && OMP_DISPLAY_ENV=verbose "$TRAIN" --version 2>&1 | grep -q GOMP_SPINCOUNT; then
    spins() { env -u OMP_WAIT_POLICY "$@" OMP_DISPLAY_ENV=verbose "$TRAIN" --version 2>&1 | sed -n "s/.*GOMP_SPINCOUNT = '\(.*\)'/\1/p" | tail -n 1; }
    check 'threads wait briefly' [ "$(spins) $(spins -i OMP_NUM_THREADS=2)" = '2000 2000' ]
    check 'threads wait as the user says' [ "$(spins GOMP_SPINCOUNT=77) $(spins OMP_WAIT_POLICY=passive)" = '77 0' ]
    check 'a thread alone waits for nobody' [ "$(spins OMP_NUM_THREADS=1)" != 2000 ]
    runs() { # milliseconds of $1 runs at once
        before=$(date +%s%N) pids=
        for run in $(seq "$1"); do
            env -u OMP_WAIT_POLICY "$TRAIN" bp --init $TINY --seq-len 100 --chunk 1 --threads 2 --quiet >/dev/null &
            pids="$pids $!"
        done
        wait $pids
        echo $((($(date +%s%N) - before) / 1000000))
    }
    for _ in 1 2 3; do # other work of this machine may have slowed one of them
        one=$(runs 1) two=$(runs 2)
        [ "$two" -ge $((10 * one + 500)) ] || break
    done
    check "two runs at once: $two ms, one: $one ms" [ "$two" -lt $((10 * one + 500)) ]
    env -u OMP_WAIT_POLICY "$TRAIN" bp --init $TINY --seq-len 30000 --chunk 1 --quiet >/dev/null 2>&1 &
    for _ in $(seq 600); do ! tr '\0' '\n' <"/proc/$!/environ" | grep -q '^GOMP_SPINCOUNT=' || break; sleep 0.1; done # it has restarted
    name=$(cat /proc/$!/comm)
    kill -9 $!
    wait $! 2>/dev/null
    check "the process keeps its number and its name: $name" [ "$? $name" = "137 $(basename "$TRAIN")" ]
fi
# Text in and out: a run's folder gets its model's tokenizer, and every way to a prompt gives the same tokens.
greedy() { # arguments: the same model and length for all
    succeeds sample --max-new-tokens 24 --temperature 0 --json "$@"
}
succeeds train --init $LARGE --data $SHARD --seq-len 64 --steps 1 --out "$WORK/base"
cp $TOKENIZERS/qwen2.tok "$WORK/base/tokenizer.tok"
model=$WORK/base/checkpoint-00000001/model.bin
export STREAMBP_ALLOCATION_GUARD=1
succeeds train --model "$model" --data $SHARD --seq-len 64 --steps 2 --out "$WORK/tuned" --sample-every 1 --max-new-tokens 8 \
    --prompt 'Hello' --chat
unset STREAMBP_ALLOCATION_GUARD
check 'the tokenizer goes with the run' cmp -s $TOKENIZERS/qwen2.tok "$WORK/tuned/tokenizer.tok"
check 'a run samples text' grep -q '"sample": ' "$WORK/tuned/log.jsonl"
model=$WORK/tuned/checkpoint-00000002/model.bin
printf 'Hello w\303\266rld' >"$WORK/prompt"
greedy --model "$model" --prompt "$(cat "$WORK/prompt")"
ids=$(sed 's/.*"prompt_ids": \[\([0-9, ]*\)\].*/\1/; s/ //g' "$WORK/out")
cp "$WORK/out" "$WORK/first"
check 'a prompt is several tokens' [ "$(echo "$ids" | tr ',' '\n' | wc -l)" -gt 3 ]
for prompt in "--prompt-file $WORK/prompt" "--prompt-ids $ids" "--tokenizer $TOKENIZERS/qwen2.tok --prompt-ids $ids"; do
    greedy --model "$model" $prompt
    check "the same from $prompt" cmp -s "$WORK/first" "$WORK/out"
done
"$TRAIN" sample --max-new-tokens 24 --temperature 0 --json --model "$model" --prompt-file - <"$WORK/prompt" >"$WORK/out" 2>"$WORK/err"
check 'the same from standard input' cmp -s "$WORK/first" "$WORK/out"
greedy --model "$model" --prompt-ids "$ids" --tokenizer none
check 'without a tokenizer there are ids and no text' grep -q '"ids": .*, "stop": "length"' "$WORK/out"
check 'and that is all' [ "$(grep -c '"text"' "$WORK/out")" = 0 ]
greedy --model "$model" --prompt 'Hello' --chat
check "a chat's prompt is the template's" grep -q '"prompt_ids": \[440, 82, 88, ' "$WORK/out"
printf 'Hello\n\nAnd then?\n' | "$TRAIN" sample --max-new-tokens 4 --temperature 0 --tokenizer auto --model "$model" --chat --show-special \
    >"$WORK/out" 2>"$WORK/err"
check 'two turns, two answers' [ $? = 0 -a "$(grep -c '' "$WORK/out")" -ge 2 ]
printf 'Hello\nAnd then?\n' | "$TRAIN" sample --max-new-tokens 4 --model "$model" --chat --max-context 45 >"$WORK/out" 2>"$WORK/err"
check 'a chat ends where its tokens do' grep -q 'note: the chat has reached its 45 tokens' "$WORK/err"
printf 'Hello\nAnd then?\n' >"$WORK/turns"
"$TRAIN" sample --max-new-tokens 100 --ignore-eos --model "$model" --chat --max-context 45 <"$WORK/turns" >"$WORK/out" 2>"$WORK/err"
check 'and so does one that an answer has filled' [ $? = 0 ]
check 'which is said' grep -q 'note: the chat has reached its 45 tokens' "$WORK/err"
# A template that forgets reasoning: the second answer is to the conversation as the template then writes it.
init=qwen3,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=448,initializer_range=0.5
user='<|im_start|>user
%s<|end|>
<|im_start|>assistant
'
for thinking in on off; do
    greedily="sample --init $init --tokenizer $TOKENIZERS/qwen3.5.tok --temperature 0 --max-new-tokens 6"
    printf 'Hello\n' | "$TRAIN" $greedily --chat --thinking $thinking >"$WORK/one" 2>"$WORK/err"
    printf 'Hello\n And then? \n' | "$TRAIN" $greedily --chat --thinking $thinking >"$WORK/two" 2>"$WORK/err"
    opening='<think>
' closing= && [ $thinking = on ] || closing='
</think>

'
    {
        printf "$user" Hello
        tr -d '\n' <"$WORK/one" | sed 's/^<think>/&\n/' | LC_ALL=C sed 's/[\x01-\x20]*$//'
        printf "<|end|>\n$user$opening$closing" 'And then?'
    } >"$WORK/prompt"
    "$TRAIN" $greedily --prompt-file "$WORK/prompt" >"$WORK/out" 2>"$WORK/err"
    [ $thinking = on ] && printf '%s' "$opening" >>"$WORK/one"
    tail -c +$(($(wc -c <"$WORK/prompt") + 1)) "$WORK/out" >>"$WORK/one"
    check "thinking $thinking, two turns are the template's" cmp -s "$WORK/one" "$WORK/two"
done
# A run of adapters has the tokenizer that its base, a flat file, lacks.
mkdir "$WORK/flat"
cp "$WORK/base/checkpoint-00000001/model.bin" "$WORK/flat"
succeeds train --model "$WORK/flat/model.bin" --data $SHARD --seq-len 64 --steps 1 --lora-rank 2 --out "$WORK/lora"
cp $TOKENIZERS/qwen2.tok "$WORK/lora/tokenizer.tok" # as beside shards
succeeds sample --model "$WORK/flat/model.bin" --adapter "$WORK/lora" --chat --prompt 'Hello' --max-new-tokens 4
succeeds convert --model "$WORK/flat/model.bin" --adapter "$WORK/lora" --merge --out "$WORK/merged"
check 'merged, the tokenizer goes with the model' cmp -s $TOKENIZERS/qwen2.tok "$WORK/merged/tokenizer.tok"
# Generation ends at an end id: one of 442 likely tokens comes soon.
small=${TINY%96}442
succeeds sample --init $small --tokenizer $TOKENIZERS/qwen2.tok --prompt x --max-new-tokens 2000 --json --seed 3
check 'an end id ends the text' [ "$(json stop)" = eos ]
check 'it is the last id' grep -q ', 441\], "text"' "$WORK/out"
check 'its text is not shown' [ "$(grep -c '<|end|>' "$WORK/out")" = 0 ]
succeeds sample --init $small --tokenizer $TOKENIZERS/qwen2.tok --prompt x --max-new-tokens 2000 --json --seed 3 --show-special
check 'but where special tokens are' grep -q '<|end|>", "stop": "eos"' "$WORK/out"
succeeds sample --init $small --tokenizer $TOKENIZERS/qwen2.tok --prompt x --max-new-tokens 2000 --json --seed 3 --ignore-eos
check '--ignore-eos goes on' [ "$(json stop)" = length ]
finish
