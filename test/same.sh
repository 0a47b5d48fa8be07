#!/bin/sh
# test/same.sh OLD NEW: two checkouts of streambp.c do the same. For changes that must change nothing: moves, renames, merges.
# Builds the CPU program of each in fp32, bf16 and double, gives both the same command lines, and compares options and their
# defaults, plans, gradients, checkpoints, logs and what resumes from them, converted models, losses and samples: bytes of files,
# text of JSON. Only measured times and measured memory may differ. Descriptions and error messages are free.
# A difference is printed with the command that shows it, to be run in the two folders that are kept then.
set -u
[ $# = 2 ] && [ -f "$1/train_gpt.cu" ] && [ -f "$2/train_gpt.cu" ] || { echo 'usage: test/same.sh OLD NEW, two checkouts' >&2; exit 2; }
OLD=$(cd "$1" && pwd) NEW=$(cd "$2" && pwd)
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive # a sum's order follows the number of threads
WORK=$(mktemp -d)
passed=0 failed=0 skipped=0
trap '[ $failed != 0 ] || rm -rf "$WORK"' EXIT

# ---- both programs, each in a folder of its own with the same names ------------------------------------------------------------
CC=${CC:-cc}
compiler=${CC%% *}
compiler=${compiler##*/}
case $compiler in cc | gcc) compiler= ;; *) compiler=-$compiler ;; esac
mpirun=$NEW/test/ranks/mpirun.sh
[ -f "$mpirun" ] || mpirun=$NEW/test/mpirun.sh
writer=$(ls "$NEW"/test/data/make_documents.c "$NEW"/test/make_documents.c 2>/dev/null | head -n 1)
for precision in fp32 bf16 double; do
    for side in old new; do
        checkout=$OLD
        [ $side = new ] && checkout=$NEW
        mkdir -p "$WORK/$side"
        ${MAKE:-make} -C "$checkout" --no-print-directory BACKEND=cpu PRECISION=$precision ONEDNN= \
            build/cpu-$precision$compiler/train >"$WORK/$side/build-$precision.log" 2>&1 &
        ln -s "$checkout/build/cpu-$precision$compiler/train" "$WORK/$side/train-$precision"
    done
    wait
    for side in old new; do
        [ -x "$WORK/$side/train-$precision" ] && continue
        tail -n 20 "$WORK/$side/build-$precision.log"
        echo "FAILED: the $side checkout does not compile in $precision"
        exit 1
    done
done
$CC -D_GNU_SOURCE -O1 -I"$NEW" "$writer" -lm -o "$WORK/make_documents" || exit 1
make_documents() { # name, vocabulary (no model's is smaller), arguments: a shard for both
    name=$1
    shift
    "$WORK/make_documents" "$WORK/data/$name.bin" "$@" || exit 1
}
mkdir "$WORK/data"
make_documents text 80 "$(awk 'BEGIN { for (i = 0; i < 60; i++) printf "%d,", 2 + (i * 37) % 71 }')" 1 1
make_documents val 80 20,44,31,17 2
make_documents pairs 80 20,30,15,9,33,25,14,40,8,12,31,22,17,19,26,11,20,21,30,31,40,12,9,11 3 4 pairs
make_documents groups 80 20,25,15,9,23,25,14,30,8,12,21,22,17,19,26,11,9,13,20,21,22,10,11,12,30,31,32,33,34,35,9,9,9,8,8,8 3 4 3
make_documents values 80 20,25,15,9,23,25,14,30,8,12,13,14,15 3 4 advantages
make_documents prompts 80 5,9,3,7,12,4,6,8 3 0 prompts
tokens=$NEW/test/golden/tokens_uint16.bin # of llm.c's kind; ids from 80 on become 0 to 15
{ head -c 1024 "$tokens"; tail -c +1025 "$tokens" | tr '\120-\137' '\000-\017'; } >"$WORK/data/shard.bin"
# Worth 1 where the first id of the completion begins with 1 to 4.
cat >"$WORK/data/reward.sh" <<'END'
while read -r line; do
    case $line in *'"completion_ids": ['[1-4]*) echo 1 ;; *) echo 0 ;; esac
done
END
for side in old new; do
    ln -s "$NEW/test/golden" "$WORK/$side/golden"
    ln -s "$WORK/data" "$WORK/$side/data"
    ln -s "$mpirun" "$WORK/$side/mpirun.sh"
done
TINY=llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=96
GEMMA=gemma3,hidden_size=24,intermediate_size=32,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,head_dim=8,sliding_window=9,layer_types=sf,query_pre_attn_scalar=8,vocab_size=96
GOLDEN=$(cd "$NEW/test/golden" && ls -d */config.json | sed 's|/.*||')

# ---- what is compared ----------------------------------------------------------------------------------------------------------
begin() { section=$1 same=0 all=0; }
end() { echo "$section: $same of $all the same"; }
differs() { failed=$((failed + 1)); echo "DIFFERS: $1: $command"; }
# Measured values are masked. Rows of a profile stand in the order of their times.
times='seconds|seconds_each|data_seconds|profile_seconds|tokens_per_second|flops_per_second|peak_share|peak_bytes|memory_bytes'
masked() { # file: a text of JSON, or the list of a checkpoint's files
    sed -E 's/"('"$times"')": (\[[^]]*\]|[^,}]*)/"\1": 0/g; s/^state.json .*/state.json/' "$1" | tr '{' '\n' |
        case $command in *--profile*) sort ;; *) cat ;; esac
}
each() { # command: in both folders at once; exit status in the file `status`, what it prints in `stdout` and `stderr`
    for side in old new; do
        (cd "$WORK/$side" && eval "$1" >stdout 2>stderr </dev/null; echo $? >"$WORK/$side/status") &
    done
    wait
}
same_text() { # file: the same in both but for what is masked
    masked "$WORK/old/$1" >"$WORK/masked"
    masked "$WORK/new/$1" | cmp -s - "$WORK/masked" && return
    differs "$1"
    masked "$WORK/new/$1" | tr ',' '\n' >"$WORK/lines"
    tr ',' '\n' <"$WORK/masked" | diff - "$WORK/lines" | sed -n 's/^\([<>]\)/    \1/p' | head -n 6
    return 1
}
same_files() { # all below out/, which is there or not
    for side in old new; do (cd "$WORK/$side" && find out -type f 2>/dev/null | sort >files); done
    cmp -s "$WORK/old/files" "$WORK/new/files" || { differs 'names of files'; diff "$WORK/old/files" "$WORK/new/files"; return 1; }
    while read -r file; do
        case ${file##*/} in
        lock) continue ;; # a process and when it began
        log.jsonl | state.json | DONE) same_text "$file" || return 1 ;;
        *) cmp -s "$WORK/old/$file" "$WORK/new/$file" || { differs "$file"; return 1; } ;;
        esac
    done <"$WORK/new/files"
}
compare() { # precision, processes, arguments: exit 0, and the same
    command="./train-$1 $3"
    [ "$2" = 1 ] || command="OMP_NUM_THREADS=1 ./mpirun.sh $2 $command"
    [ "$2" = 1 ] || command -v mpirun >/dev/null || { skipped=$((skipped + 1)); return; }
    all=$((all + 1))
    each "$command --json --quiet"
    for side in old new; do
        [ "$(cat "$WORK/$side/status")" = 0 ] && continue
        differs "exit $(cat "$WORK/$side/status") of $side"
        tail -n 2 "$WORK/$side/stderr" | sed 's/^/    /'
        return
    done
    same_text stdout && same_files && same=$((same + 1)) && passed=$((passed + 1))
}
clear() { rm -rf "$WORK"/old/out "$WORK"/new/out; }
# Rows that hold every pair of levels of two factors. A line of input is a factor, `|` between its levels; a row has one level
# of each. Greedy: of 40 rows drawn at random, the one with most pairs that are new.
pairwise() {
    awk -F ' *[|] *' '
        function draw(n) { seed = (seed * 16807) % 2147483647; return int(seed / 2147483647 * n) + 1 }
        { factors++; levels[factors] = NF; for (i = 1; i <= NF; i++) name[factors, i] = $i }
        END {
            seed = 20240611
            for (a = 1; a < factors; a++) for (b = a + 1; b <= factors; b++) left += levels[a] * levels[b]
            while (left > 0) {
                most = -1
                for (try = 0; try < 40; try++) {
                    for (a = 1; a <= factors; a++) row[a] = draw(levels[a])
                    new = 0
                    for (a = 1; a < factors; a++) for (b = a + 1; b <= factors; b++) new += !((a, row[a], b, row[b]) in seen)
                    if (new > most) { most = new; for (a = 1; a <= factors; a++) best[a] = row[a] }
                }
                if (!most) continue
                text = ""
                for (a = 1; a <= factors; a++) {
                    text = text " " name[a, best[a]]
                    for (b = a + 1; b <= factors; b++) seen[a, best[a], b, best[b]] = 1
                }
                left -= most
                print substr(text, 2)
            }
        }'
}

# ---- options --------------------------------------------------------------------------------------------------------------------
begin options
options() { # verb: its options, each with its choices and default
    "./train-fp32" $1 --help | awk '
        function put() { if (option != "") { sub(/.*\[/, "[", text); print option, text ~ /^\[/ ? text : "" } }
        /^  --/ { put(); split(substr($0, 3), part, /  +/); option = part[1]; text = part[2]; next }
        /^   / { sub(/^ +/, ""); text = text " " $0; next }
        { put(); option = "" }
        END { put() }'
}
for verb in train bp plan eval logprobs sample convert info; do
    command="./train-fp32 $verb --help"
    all=$((all + 1))
    for side in old new; do (cd "$WORK/$side" && options $verb >stdout); done
    [ -s "$WORK/old/stdout" ] && same_text stdout && same=$((same + 1)) && passed=$((passed + 1))
done
end

# ---- plans ----------------------------------------------------------------------------------------------------------------------
begin plans
# The message about an unknown name holds all names; what is no name is refused.
for side in old new; do (cd "$WORK/$side" && ./train-fp32 plan --init nothing 2>&1); done | tr -cs 'a-z0-9.\n-' '\n' | sort -u >"$WORK/words"
presets=
while read -r word; do
    for side in old new; do (cd "$WORK/$side" && ./train-fp32 plan --quiet --init "$word" </dev/null) && break; done >"$WORK/plan" 2>&1 && presets="$presets $word"
done <"$WORK/words"
[ "$(echo "$presets" | wc -w)" -gt 20 ] || { command='./train-fp32 plan --init nothing'; differs "presets are only$presets"; }
for preset in $presets; do
    length=20000
    case $preset in gpt2*) length=1000 ;; esac
    while read -r options; do
        compare fp32 1 "plan --init $preset --seq-len $length $options"
    done <<'END'
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
end

# ---- gradients ------------------------------------------------------------------------------------------------------------------
begin gradients
models="--init $TINY | --init $GEMMA | $(echo $GOLDEN | sed 's|[^ ]*|--model golden/&|g; s| --m| \| --m|g')"
kinds='--seq-len 40 --batch 2 | --seq-len 20 --batch 6 --grad-accum 2 | --seq-len 31 --batch 2 --grad-accum 3 --data data/shard.bin |
    --seq-len 60 --batch 2 --grad-accum 2 --data data/text.bin --seed 7 | --seq-len 40 --batch 2 --objective dpo --data data/pairs.bin |
    --seq-len 40 --batch 3 --objective simpo --data data/pairs.bin | --seq-len 30 --batch 2 --objective orpo |
    --seq-len 34 --batch 2 --grad-accum 2 --objective grpo --beta 0.1 --data data/groups.bin |
    --seq-len 20 --batch 2 --objective gspo --group-size 3 | --seq-len 30 --objective ppo --data data/values.bin'
methods='--method full | --method checkpoint | --method stream | --chunk 9 --logits-chunk 7 | --chunk 24 --logits-chunk 64 |
    --chunk 16 --keep attention --keep-on host | --chunk 11 --keep attention | --method checkpoint --keep attention'
adapters=' | --lora-rank 4 | --lora-rank 3 --lora-dropout 0.2 --lora-targets q_proj,v_proj,down_proj,c_attn'
precisions='fp32 1 bp | bf16 1 bp | double 1 bp'
factors() { for factor; do echo $factor; done; }
factors "$precisions" "$models" "$kinds" "$methods" | pairwise >"$WORK/rows"
while read -r precision processes arguments; do
    compare "$precision" "$processes" "$arguments --grads-out out"
done <"$WORK/rows"
end
clear

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] || echo "the commands above run in $WORK/old and $WORK/new"
[ $failed = 0 ]
