#!/bin/sh
# test/same.sh OLD NEW [SECTION...]: two checkouts of streambp.c do the same. For a change that must change nothing.
# Builds the CPU programs of both in fp32, bf16 and double and runs the same commands in both. Compares options and
# defaults, plans, gradients, checkpoints, logs, resumed runs, converted models, losses and samples: files by bytes,
# JSON by text. Measured times and memory, descriptions and error messages may differ.
# Prints a difference with its command; keeps the two folders to run it in.
set -u
[ $# -ge 2 ] || { echo 'usage: test/same.sh OLD NEW [SECTION...]' >&2; exit 2; }
OLD=$(cd "$1" && pwd) && NEW=$(cd "$2" && pwd) || exit 2
shift 2
sections=${*:-options plans gradients ranks training conversions inference}
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive # the order of sums depends on the number of threads
WORK=$(mktemp -d)
passed=0 failed=0 skipped=0
trap '[ $failed != 0 ] || rm -rf "$WORK"' EXIT

# ---- $WORK/old and $WORK/new: the programs and the data, under the same names in both --------------------------------
CC=${CC:-cc}
compiler=${CC%% *}
compiler=${compiler##*/}
case $compiler in cc | gcc) compiler= ;; *) compiler=-$compiler ;; esac
mpirun=$(find "$NEW/test" -name mpirun.sh)
for side in old new; do
    mkdir "$WORK/$side"
    ln -s "$NEW/test/golden" "$WORK/data" "$mpirun" "$WORK/$side"
done
for precision in fp32 bf16 double; do
    program=build/cpu-$precision$compiler/train
    for side in old new; do
        checkout=$OLD
        [ $side = new ] && checkout=$NEW
        ln -s "$checkout/$program" "$WORK/$side/train-$precision"
        (${MAKE:-make} -C "$checkout" BACKEND=cpu PRECISION=$precision ONEDNN= $program >"$WORK/$side/stdout" 2>&1 &&
            : >"$WORK/$side/built-$precision") &
    done
    wait
    for side in old new; do
        [ -f "$WORK/$side/built-$precision" ] && continue
        tail -n 20 "$WORK/$side/stdout"
        echo "FAILED: the $side program does not compile in $precision"
        exit 1
    done
done
mkdir "$WORK/data"
$CC -D_GNU_SOURCE -O1 -I"$NEW" "$(find "$NEW/test" -name make_documents.c)" -lm -o "$WORK/make_documents" || exit 1
made() { # name, lengths, seed, masked, kind: makes a shard; no golden model has a vocabulary below 80
    "$WORK/make_documents" "$WORK/data/$1.bin" 80 "$2" "$3" "$4" "$5" || exit 1
}
made text "$(awk 'BEGIN { for (i = 0; i < 60; i++) printf "%d,", 2 + (i * 37) % 71 }')" 1 1 documents
made val 20,44,31,17 2 0 documents
made pairs 20,30,15,9,33,25,14,40,8,12,31,22,17,19,26,11,20,21,30,31,40,12,9,11 3 4 pairs
made groups 20,25,15,9,23,25,14,30,8,12,21,22,17,19,26,11,9,13,20,21,22,10,11,12,30,31,32,33,34,35,9,9,9,8,8,8 3 4 3
made values 20,25,15,9,23,25,14,30,8,12,13,14,15 3 4 advantages
made prompts 5,9,3,7,12,4,6,8 3 0 prompts
tokens=$NEW/test/golden/tokens_uint16.bin # of llm.c's kind; ids from 80 on become 0 to 15
{ head -c 1024 "$tokens"; tail -c +1025 "$tokens" | tr '\120-\137' '\000-\017'; } >"$WORK/data/shard.bin"
printf '%s\n' 's/.*"completion_ids": .\([0-9]\).*/\1/' >"$WORK/data/reward.sed" # the first digit
tiny='--init llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2'
large=$tiny,vocab_size=800 tiny=$tiny,vocab_size=96
gemma='--init gemma3,hidden_size=24,intermediate_size=32,num_hidden_layers=3,num_attention_heads=4'
gemma=$gemma,num_key_value_heads=2,head_dim=8,sliding_window=9,layer_types=sf,query_pre_attn_scalar=8,vocab_size=96
golden=$(cd "$NEW/test/golden" && ls -d */config.json | sed 's|/.*||')

# ---- comparing -------------------------------------------------------------------------------------------------------
# Masks measured values, the words of notes, the commit, the two sides' folders, and removed options at their defaults.
# Profile rows are ordered by time; earlier versions had a row of waits for nothing. Method full lists its regions in the
# order of llmc/layer/activations.h now.
times='seconds|seconds_each|(data|profile|warmup|rollout|reward)_seconds'
times="$times|time|commit|tokens_per_second|flops_per_second|executed_tflops_per_s|mfu_causal|mfu_full_attention|peak_share|peak_bytes|memory_bytes"
gone='"draw": "independent", "clamp": 0, |, draw=independent, clamp=0|, "biased": false' # spaco's biased variants
masked() { # file: a text of JSON, or the list of a checkpoint's files
    sed -E 's/"('"$times"')": (\[[^]]*\]|[^,}]*)/"\1": 0/g; s/'"$gone"'//g; s/^state.json .*/state.json/
        s/"notes": \[[^]]*\]/"notes": []/g; s#'"$WORK"'/(old|new)/##g; s/^(Written on .* by commit ).*/\1/' "$1" | tr '{' '\n' |
        case $command in *' plan '*'--method full'*) sort ;; *--profile*) grep -v '"op": "await_transfer"' | sort ;; *) cat ;; esac
}
differs() { # what; the next commands begin with the same data
    failed=$((failed + 1))
    echo "DIFFERS: $1: $command"
    rm -rf "$WORK/new/out"
    cp -r "$WORK/old/out" "$WORK/new"
}
same_text() { # file
    masked "$WORK/old/$1" >"$WORK/masked"
    masked "$WORK/new/$1" >"$WORK/masked_new"
    cmp -s "$WORK/masked" "$WORK/masked_new" && return
    differs "$1"
    tr ',' '\n' <"$WORK/masked_new" >"$WORK/lines"
    tr ',' '\n' <"$WORK/masked" | diff - "$WORK/lines" | sed -n 's/^\([<>]\)/    \1/p' | cut -c1-110 | head -n 6
    return 1
}
same_files() { # below out/, if present
    for side in old new; do (cd "$WORK/$side" && find out -type f 2>/dev/null | sort >files); done
    cmp -s "$WORK/old/files" "$WORK/new/files" || { differs 'names of files'; return 1; }
    while read -r file; do
        case ${file##*/} in
        lock) ;; # a process and when it began
        log.jsonl | state.json | DONE | README.md) same_text "$file" || return 1 ;;
        *) cmp -s "$WORK/old/$file" "$WORK/new/$file" || { differs "$file"; return 1; } ;;
        esac
    done <"$WORK/new/files"
}
each() { # command line: in both folders at once
    for side in old new; do
        (cd "$WORK/$side" && eval "$1" >stdout 2>stderr </dev/null; echo $? >"$WORK/$side/status") &
    done
    wait
}
agree() { same=$((same + 1)) passed=$((passed + 1)); }
compare() { # precision, processes, arguments: expects exit 0, equal JSON and equal files
    command="./train-$1 $3 --json --quiet"
    if [ "$2" != 1 ]; then
        command -v mpirun >/dev/null || { skipped=$((skipped + 1)); return; }
        command="OMP_NUM_THREADS=1 ./mpirun.sh $2 $command"
    fi
    all=$((all + 1))
    rm -f "$WORK"/*/out/[gl] # files that several commands write in turn
    each "$command"
    if [ "$(cat "$WORK/old/status")" != 0 ] && cmp -s "$WORK/old/status" "$WORK/new/status"; then
        same_text stdout && agree # both refuse, or say that it does not fit
        return
    fi
    for side in old new; do
        status=$(cat "$WORK/$side/status")
        [ "$status" = 0 ] && continue
        differs "exit $status in $side"
        grep '^train: ' "$WORK/$side/stderr" | sed 's/^/    /' | head -n 2
        return
    done
    same_text stdout && same_files && agree
}
clear() { rm -rf "$WORK"/*/out; mkdir "$WORK/old/out" "$WORK/new/out"; }
# Makes command lines that cover every pair of two factors' levels. A factor is an argument; `|` separates levels.
# Greedy: takes the one of 40 random lines with the most new pairs.
pairwise() {
    for factor; do echo $factor; done | awk -F ' *[|] *' '
        function draw(n) { seed = (seed * 16807) % 2147483647; return int(seed / 2147483647 * n) + 1 }
        { levels[NR] = NF; for (i = 1; i <= NF; i++) text[NR, i] = $i }
        END {
            seed = 20240611
            for (a = 1; a <= NR; a++) for (b = 1; b < a; b++) left += levels[a] * levels[b]
            while (left > 0) {
                most = 0
                for (try = 0; try < 40; try++) {
                    gain = 0
                    for (a = 1; a <= NR; a++) {
                        row[a] = draw(levels[a])
                        for (b = 1; b < a; b++) gain += !((a, row[a], b, row[b]) in seen)
                    }
                    if (gain > most) { most = gain; for (a = 1; a <= NR; a++) best[a] = row[a] }
                }
                if (!most) continue
                for (a = 1; a <= NR; a++) {
                    printf "%s%s", text[a, best[a]], a < NR ? " " : "\n"
                    for (b = 1; b < a; b++) seen[a, best[a], b, best[b]] = 1
                }
                left -= most
            }
        }'
}
compare_pairwise() { # factors; the first two are precision and processes
    pairwise "$@" >"$WORK/rows"
    while read -r precision processes arguments; do
        clear
        compare "$precision" "$processes" "$arguments"
    done <"$WORK/rows"
}
precisions='fp32 | bf16 | double'
models="$tiny | $gemma | $(echo $golden | sed 's|[^ ]*|--model golden/&|g; s| --m| \| --m|g')"

# ---- sections --------------------------------------------------------------------------------------------------------
options() {
    for verb in train bp plan eval logprobs sample convert info; do
        command="./train-fp32 $verb --help all"
        all=$((all + 1))
        each "$command"
        for side in old new; do # an option's choices and the last thing in brackets, its default
            awk 'function put() { if (option) { sub(/.*\[/, "[", text); print option, text ~ /^\[/ ? text : "" } }
                /^  --/ { put(); split(substr($0, 3), part, /  +/); option = part[1]; text = part[2]; next }
                /^   / { text = text " " $0; next }
                { put(); option = "" }
                END { put() }' "$WORK/$side/stdout" | grep -vE '^--(draw|clamp) ' >"$WORK/$side/options"
        done
        [ -s "$WORK/old/options" ] && same_text options && agree
    done
}
plans() {
    # This help lists all names and refuses others.
    each './train-fp32 info --help'
    presets=$(for word in $(sed -n '/^Models of/,$p' "$WORK"/old/stdout "$WORK"/new/stdout | tr -cs 'a-z0-9.\n-' '\n' | sort -u); do
        each "./train-fp32 plan --init $word"
        case $(cat "$WORK"/*/status) in *0*) echo "$word" ;; esac
    done)
    command='./train-fp32 plan --init nothing'
    [ "$(echo "$presets" | wc -l)" -gt 20 ] || differs "only presets $presets"
    for preset in $presets; do
        length=20000
        case $preset in gpt2*) length=1000 ;; esac
        while read -r arguments; do compare fp32 1 "plan --init $preset --seq-len $length $arguments"; done <<'END'
--for bp --dtype bf16
--for bp --dtype fp32 --method checkpoint
--dtype bf16 --grad-accum 2 --moments bf16 --memory-limit 80GiB
--dtype fp32 --method full --batch 2
--dtype bf16 --lora-rank 16 --keep attention
--dtype bf16 --for bp --lora-rank 8 --chunk 300 --keep attention --keep-on host
--dtype bf16 --ranks 4 --batch 4 --zero 3 --machine a100
--dtype bf16 --ranks 8 --sp 4 --batch 2 --zero 2 --kv ring --machine h200 --memory-limit 40GiB
--dtype bf16 --ranks 16 --sp 16 --zero 1 --keep attention --memory-limit 141GiB
--dtype bf16 --objective dpo --batch 2 --master none
--dtype double --for bp --objective grpo --beta 0.1 --group-size 4 --logits-chunk 100
END
    done
    compare bf16 1 "plan $tiny --data data/text.bin --val-data data/val.bin --seq-len 100000 --batch 2"
    compare fp32 1 "plan $tiny --data data/prompts.bin --seq-len 32 --max-new-tokens 4 --objective gspo --rollout"
}
loaded='--seq-len 31 --batch 4 --grad-accum 3 --data data/shard.bin |
    --seq-len 60 --batch 2 --grad-accum 2 --data data/text.bin |
    --seq-len 40 --batch 2 --grad-accum 2 --objective dpo --data data/pairs.bin |
    --seq-len 40 --batch 12 --objective simpo --data data/pairs.bin |
    --seq-len 36 --batch 2 --grad-accum 2 --objective grpo --beta 0.1 --data data/groups.bin |
    --seq-len 30 --batch 3 --objective ppo --data data/values.bin'
methods='--method full | --method checkpoint | --chunk 9 --logits-chunk 7 | --chunk 24 --logits-chunk 64 |
    --chunk 16 --keep attention --keep-on host | --chunk 11 --keep attention | --method checkpoint --keep attention'
adapters='| --lora-rank 4 | --lora-rank 3 --lora-dropout 0.2 --rslora'
gradients() {
    compare_pairwise "$precisions" 1 'bp --grads-out out/g' "$models" "--seq-len 41 --batch 2 |
        --seq-len 23 --batch 3 --grad-accum 2 --seed 5 | --seq-len 30 --batch 2 --objective orpo |
        --seq-len 20 --batch 2 --objective gspo --group-size 3 | $loaded" "$methods" "$adapters"
    compare bf16 1 "bp $tiny --seq-len 40 --grad-dtype fp32 --grads-out out/g"
    compare bf16 1 "bp $tiny --seq-len 40 --grad-accum 3 --grad-dtype bf16 --grads-out out/g"
    compare fp32 1 "bp $tiny --seq-len 40 --chunk 16 --profile --machine h200 --grads-out out/g --grads-of '*.1.*proj*'"
}
ranks() {
    compare_pairwise "$precisions" \
        '2 bp | 3 bp | 4 bp --sp 2 | 2 bp --sp 2 --kv gather | 2 bp --sp 2 --kv ring | 3 bp --sp 3 --kv gather |
        3 bp --sp 3 --kv ring' '--zero 0 | --zero 1 | --zero 2 | --zero 3' '--grads-out out/g' \
        "$tiny | $gemma | --model golden/gpt2 | --model golden/qwen3 | --model golden/mistral" \
        "--seq-len 23 --batch 12 | --seq-len 20 --batch 3 --grad-accum 4 --objective gspo --group-size 3 | $loaded" \
        "$methods" "$adapters"
}
training() { # resumes from the middle of the other's run; precision, processes of each
    while read -r precision processes arguments; do
        clear
        each 'cp data/pairs.bin out' # beside it the reference's log-probabilities are kept
        compare "$precision" "${processes%,*}" "train $arguments --steps 6 --save-every 3 --out out/run"
        mv "$WORK/old/out" "$WORK/out"
        mv "$WORK/new/out" "$WORK/old/out"
        mv "$WORK/out" "$WORK/new/out"
        rm -rf "$WORK"/*/out/run/checkpoint-00000006
        compare "$precision" "${processes#*,}" "train $arguments --steps 6 --save-every 3 --out out/run --resume"
    done <<END
fp32 1,1 $tiny --data data/shard.bin --seq-len 64 --batch 2 --grad-accum 2 --val-data data/shard.bin --val-every 2 \
    --val-steps 2
double 1,1 $tiny --data data/shard.bin --seq-len 64 --shuffle on --schedule wsd --sample-every 2 --prompt-ids 1
bf16 1,1 $tiny --data data/text.bin --seq-len 60 --batch 2 --grad-accum 3 --warmup 1 \
    --val-data data/val.bin --val-every 3
bf16 1,1 $gemma --data data/text.bin --seq-len 60 --master none --moments bf16 --schedule linear --chunk 17
fp32 1,1 --model golden/gpt2 --data data/text.bin --seq-len 48 --long truncate --shuffle off --method full
fp32 1,1 $tiny --data data/text.bin --seq-len 60 --batch 2 --grad-accum 2 --lora-rank 4 --lora-dropout 0.1
bf16 1,2 --model golden/qwen3-bf16 --data data/text.bin --seq-len 60 --batch 2 --lora-rank 3 --zero 1
fp32 1,1 $tiny --data out/pairs.bin --seq-len 40 --batch 2 --objective dpo
fp32 2,2 $tiny --data out/pairs.bin --seq-len 40 --batch 2 --objective dpo --zero 1
fp32 1,1 $tiny --data data/groups.bin --seq-len 40 --batch 2 --objective grpo --beta 0.1 --lora-rank 3
fp32 1,1 $tiny --data data/prompts.bin --seq-len 32 --batch 4 --objective grpo --rollout --group-size 3 \
    --max-new-tokens 4 --reward-command 'sed -u -f data/reward.sed'
fp32 2,2 $tiny --data data/prompts.bin --seq-len 32 --batch 4 --objective gspo --rollout --updates 3 \
    --max-new-tokens 4 --reward-command 'sed -u -f data/reward.sed'
fp32 2,1 $tiny --data data/shard.bin --seq-len 48 --batch 2 --grad-accum 2 --zero 2
fp32 2,3 $tiny --data data/text.bin --val-data data/val.bin --val-every 2 --seq-len 60 --batch 3 --grad-accum 2 --zero 2
bf16 3,2 $tiny --data data/text.bin --seq-len 60 --batch 3 --grad-accum 2 --zero 3
double 2,2 $gemma --data data/text.bin --seq-len 60 --batch 3 --sp 2 --kv ring --zero 1
END
}
conversions() {
    for model in $golden; do
        clear
        compare fp32 1 "convert --model golden/$model --out out/hf"
        compare fp32 1 "convert --model golden/$model --out out/small --dtype bf16 --max-shard-size 50KB"
        compare bf16 1 "convert --model golden/$model --out out/flat.bin"
        compare double 1 "convert --model out/flat.bin --out out/wide.bin --dtype double"
        compare fp32 1 "convert --model out/flat.bin --out out/again --like golden/$model"
        compare fp32 1 "info --model out/flat.bin"
    done
    clear
    compare fp32 1 'convert --model golden/gpt2 --to llmc --out out/llmc'
    compare fp32 1 'convert --model golden/gpt2 --to llmc --dtype bf16 --out out/llmc-bf16'
    compare fp32 1 'convert --model golden/gpt2/gpt2_llmc_bf16.bin --to hf --out out/hf'
    compare fp32 1 "convert $gemma --seed 3 --out out/random"
    compare bf16 1 "convert $tiny --seed 3 --out out/base.bin"
    compare bf16 1 'train --model out/base.bin --data data/shard.bin --seq-len 64 --steps 2 --lora-rank 4 --out out/run'
    compare fp32 1 'convert --model out/base.bin --adapter out/run --merge --out out/merged'
    compare bf16 1 'convert --model out/base.bin --adapter out/run --merge --out out/merged.bin'
    compare bf16 1 'eval --model out/base.bin --adapter out/run --data data/shard.bin --seq-len 64'
}
inference() {
    compare_pairwise "$precisions" 1 'eval --data data/shard.bin --seq-len 64 --val-steps 3 --curve |
        eval --data data/text.bin --seq-len 60 --batch 3 --chunk 9 |
        eval --data data/pairs.bin --seq-len 40 --objective orpo |
        eval --data data/groups.bin --seq-len 40 --objective grpo --curve |
        logprobs --data data/text.bin --seq-len 40 --out out/l |
        logprobs --data data/pairs.bin --seq-len 40 --temperature 0.7 --out out/l |
        sample --prompt-ids 1,2,3 --max-new-tokens 12 --temperature 0 |
        sample --prompt-ids 5 --max-new-tokens 12 --seed 3 |
        sample --prompt-ids 4,5 --max-new-tokens 12 --temperature 0.8 --top-k 20 --top-p 0.9' "$models"
    for world in 2 '3 --zero 3' '2 --sp 2'; do
        compare fp32 "${world%% *}" "eval $tiny --data data/text.bin --seq-len 60 --curve ${world#[23]}"
    done
    for tokenizer in gpt2.tok llama2.tok llama3.tok mistral.tok 'qwen2.tok --chat' 'gemma.tok --chat'; do
        compare fp32 1 "sample $large --tokenizer golden/tokenizers/$tokenizer --prompt 'Hello: 12' --max-new-tokens 9"
    done
}

for section in $sections; do
    same=0 all=0
    clear
    $section
    echo "$section: $same of $all the same"
done
[ $skipped = 0 ] || echo '[  SKIPPED ] what several processes do: NOT TESTED, because there is no mpirun'
[ $failed = 0 ] || echo "the commands above are for the folders $WORK/old and $WORK/new"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
