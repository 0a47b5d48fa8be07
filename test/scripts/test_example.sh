#!/bin/sh
# The commands of README and of the worked examples in scripts/guides, as printed, on a small model that is trained
# first; the results here and in transformers; and scripts/finetune_chat.sh. Needs a Python for data/prepare.py
# (find_python.sh); some checks need transformers.
. test/cli.sh
. test/find_python.sh
find_or_make_python
if [ -z "$python" ]; then
    skip "README's worked example" 'no Python has tokenizers, jinja2 and numpy (pip install tokenizers jinja2 numpy)'
    finish
    exit
fi
absolute() { case $1 in /*) echo "$1" ;; */*) echo "$PWD/$1" ;; *) command -v "$1" ;; esac; }
python=$(absolute "$python")
data_python=$python
root=$PWD
TRAIN=$(absolute "$TRAIN_PLAIN")
OMP_NUM_THREADS=1 # threads would mostly wait for each other on a tiny model
export OMP_NUM_THREADS

# ---- folders that look like a checkout with the files named in a README -------------------------------------------------------------
FILES=$WORK/files
mkdir -p "$WORK/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$data_python" >"$WORK/bin/python"
chmod +x "$WORK/bin/python"
vocabulary=$("$data_python" test/scripts/example_files.py "$FILES") || fail "test/scripts/example_files.py"

here() { # runs a command line as a user types it in that folder
    (cd "$HERE" && PATH=$WORK/bin:$PATH sh -c "$1") >"$WORK/out" 2>"$WORK/err" && pass && cat "$WORK/out" >>"$HERE/said" && return
    fail "exit $? of: $1"
    tail -n 5 "$WORK/err" | sed 's/^/    /'
}
place() { # its name, the model's name in it
    HERE=$WORK/$1 MODEL=$WORK/$1/$2
    mkdir "$HERE"
    ln -s "$TRAIN" "$HERE/train"
    ln -s "$root/data" "$FILES"/*.jsonl "$HERE"
    [ ! -d "$WORK/model" ] || cp -r "$WORK/model" "$MODEL"
}
# Prints the commands of a file, or of its section up to the next heading: indented lines, continued ones joined,
# without those that build and test.
commands() { # file, heading
    awk -v heading="${2:-}" '/^#/ { inside = index($0, heading) } inside && /^    / { sub(/^ +/, "")
        if (sub(/\\$/, "")) { line = line $0; next } print line $0; line = "" }' "$1" | grep -E '^(python|\./train|mpirun|scripts/) '
}
run_commands() { # file, heading, number of commands
    commands "$1" "$2" >"$WORK/commands"
    check "$1 has $3 commands" [ "$(wc -l <"$WORK/commands")" -eq "$3" ]
    while IFS= read -r line <&3; do here "$line"; done 3<"$WORK/commands"
}
loss_of() { sed -n 's/.*"val_loss": \([0-9.eE+-]*\).*/\1/p' "$HERE/run/log.jsonl" | sed -n "$1p"; }

# ---- a model that knows some answers --------------------------------------------------------------------------------------------------
place first none
here "python data/prepare.py --tokenizer '$FILES/tokenizer' --out shards known.jsonl"
here "./train --data shards/train-*.bin --seq-len 512 --steps 60 --lr 1e-2 --warmup 10 --out run --init \
    qwen3,hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16,vocab_size=$vocabulary,tie_word_embeddings=true"
here "./train convert --model run --out '$WORK/model'"
cp "$FILES/tokenizer"/* "$WORK/model"
rm -f "$WORK/model/README.md" "$WORK/model/tokenizer.tok"

# ---- README's commands ----------------------------------------------------------------------------------------------------------------
place here Qwen3-0.6B
commands README.md '## Fine-tune' >"$WORK/section"
run_commands README.md '' 8
run_commands llmc/orders/README.md '## Methods' 1
echo "validation loss: $(loss_of 1) before, $(loss_of '$') after $(grep -c '"loss"' "$HERE/run/log.jsonl") steps"
check 'the validation loss falls by a fifth' awk -v a="$(loss_of 1)" -v b="$(loss_of '$')" 'BEGIN { exit !(b != "" && b < 0.8 * a) }'
check 'the tokenizer file comes from the shards' cmp -s "$HERE/shards/tokenizer.tok" "$HERE/run/tokenizer.tok"
TUNED=$HERE/Qwen3-0.6B-tuned
for file in config generation_config tokenizer tokenizer_config; do check "$file.json is copied" cmp -s "$MODEL/$file.json" "$TUNED/$file.json"; done

check 'what to try is a chat' grep -qxF 'try it   ./train sample --model run --chat --prompt TEXT' "$HERE/said"
answer='Two and two is four: 2 + 2 = 4.'
check 'it answers what it knew' grep -qxF "$answer" "$HERE/said"
sample=$(grep 'train sample' "$WORK/section")
here "$sample --json"
check 'and ends its turn' [ "$(json stop)" = eos ]
cp "$WORK/out" "$WORK/sample"
here "$(echo "$sample" | sed 's/Qwen3-0.6B-tuned/run/') --json"
check 'as the run does' cmp -s "$WORK/out" "$WORK/sample"
check 'prepare.py prints the command that comes next' grep -qF "$(grep 'train --model' "$WORK/section" | sed 's/--seq-len [0-9]*/--seq-len 1024/')" "$HERE/said"
check 'and how many steps it makes' grep -qx 'an epoch is 238 optimizer steps of 16 documents' "$HERE/said"
mkdir "$HERE/short"
cp "$MODEL"/*.json "$HERE/short"
sed 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 100/' "$MODEL/config.json" >"$HERE/short/config.json"
here 'python data/prepare.py --tokenizer short --out short/shards other.jsonl'
check 'with as many positions as the longest document needs' grep -q -- '--seq-len [2-9]00 --rope-scaling yarn,factor=[2-9] ' "$WORK/out"
here 'python data/prepare.py --tokenizer Qwen3-0.6B-tuned --out other other.jsonl'
succeeds eval --model "$TUNED" --data "$HERE/other/train-00000.bin" --seq-len 1024 --json
loss=$(json loss)
find_python 'torch, transformers, numpy'
if [ -n "$python" ]; then
    PYTHONPATH=test/data "$python" test/scripts/example_check.py "$TUNED" "$HERE/other/train-00000.bin" "$WORK/sample" "$loss" >"$WORK/checks" 2>"$WORK/err" ||
        tail -n 5 "$WORK/err"
    grep -v ' skipped$' "$WORK/checks"
    set -- $(tail -n 1 "$WORK/checks" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, .*/\1 \2/p') none none
    if [ "$2" = none ]; then fail 'test/scripts/example_check.py has no closing line'; else passed=$((passed + $1)) failed=$((failed + $2)); fi
    sed -n '/^```python/,/^```$/p' scripts/guides/elsewhere.md | grep -v '^```' >"$HERE/load.py"
    here "HF_HUB_OFFLINE=1 '$(absolute "$python")' load.py"
    check "the guide's lines of Python answer the same" [ "$(cat "$WORK/out")" = "$answer" ]
else
    skip "the example's result in transformers" 'no Python has torch and transformers (PYTHON=... names one)'
fi

# ---- a run of adapters over 4 bits, stopped by Ctrl-C and resumed; more in test_stop.sh -----------------------------------------------
train=$(grep 'train --model' "$WORK/section" | sed 's/--seq-len [0-9]*/--seq-len 512/; s/--samples [0-9]*/--samples 4/; s/--out run//')
way='--lora-rank 4 --base nf4' out=stopped
shows_a_step() { for _ in $(seq 6000); do ! grep -q '^step  *[1-9]' "$WORK/out" || break; sleep 0.05; done; }
here "$(echo "$train" | sed 's/train /train plan /') $way"
: >"$WORK/out"
(cd "$HERE" && eval "exec env --default-signal=INT $train $way --steps 300 --out $out" >"$WORK/out" 2>"$WORK/err") &
shows_a_step
kill -INT $!
wait $!
check "Ctrl-C: exit 130 $way" [ $? = 130 ]
says err "stopped by SIGINT after step .* of 300: it is saved in $out/checkpoint-"
sed -n '/^go on with:$/,$ { s/\\$//; p }' "$WORK/err" | tail -n +2 | tr -d '\n' >"$WORK/go_on"
check 'it prints a command' grep -q -- '--resume' "$WORK/go_on"
: >"$WORK/out"
(cd "$HERE" && eval "exec env --default-signal=TERM $(cat "$WORK/go_on")" >"$WORK/out" 2>"$WORK/err") &
shows_a_step
kill -TERM $!
wait $!
check "which goes on $way" [ $? = 143 ]
here "./train eval --model $out --data 'shards/val-*.bin' --seq-len 512"
here "./train sample --model $out --chat --prompt 'What is two and two?' --temperature 0"
here "./train convert --model $out --out $out-hf"
check 'with its tokenizer' cmp -s "$MODEL/tokenizer.json" "$HERE/$out-hf/tokenizer.json"

# ---- adapters, pairs, rewards ---------------------------------------------------------------------------------------------------------
place adapters Qwen3-8B
cp -r "$WORK/here/shards" "$HERE"
run_commands scripts/guides/lora.md '## Train, ask, merge' 3
sed -i 's/ .*convert.*//' "$WORK/commands"
here "./train sample --model Qwen3-8B-tuned --chat --prompt 'What is two and two?' --temperature 0"
check 'adapters added to the weights answer' [ "$(cat "$WORK/out")" = "$answer" ]
place pairs Qwen3-0.6B
run_commands scripts/guides/preferences.md '## Pairs' 2
check "DPO's first loss is ln 2" close "$(sed -n 's/.*"step": 1,.*"loss": \([0-9.]*\).*/\1/p' "$HERE/run/log.jsonl")" 0.693147 1e-4
place rewards Qwen3-0.6B
sed -n '/^```python/,/^```$/p' scripts/guides/rewards.md | grep -v '^```' >"$HERE/reward.py"
run_commands scripts/guides/rewards.md '## A command' 2

# ---- the script -----------------------------------------------------------------------------------------------------------------------
script() { # exit status, a python, expected on stdout or stderr, arguments
    wanted=$1 with=$2 pattern=$3
    shift 3
    (cd "$HERE" && PYTHON=$with TRAIN=./train "$root/scripts/finetune_chat.sh" "$@") >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of: finetune_chat.sh $*" [ $? = "$wanted" ]
    check "it says '$pattern'" grep -q -e "$pattern" "$WORK/out" "$WORK/err"
    [ "$wanted" = 0 ] || check 'in one line' [ "$(grep -c '^finetune_chat.sh: ' "$WORK/err")" = 1 ]
}
HERE=$WORK/here
few='--steps 3 --lr 1e-3'
script 2 "$data_python" 'usage: ' Qwen3-0.6B known.jsonl
script 2 "$data_python" 'is chosen by this script' Qwen3-0.6B known.jsonl by-script --out x
script 1 "$data_python" 'has no config.json' shards known.jsonl by-script
script 1 "$data_python" 'is not a file' Qwen3-0.6B nothing.jsonl by-script
script 1 false 'pip install' Qwen3-0.6B known.jsonl by-script
script 1 "$data_python" 'type: hf download Owner/Other' Owner/Other known.jsonl by-script
check 'a failure leaves no folder' [ ! -e "$HERE/by-script" ]
script 1 "$data_python" 'ended with status 1' Qwen3-0.6B known.jsonl by-script $few --memory-limit 1MiB
script 0 "$data_python" 'is complete for these inputs' Qwen3-0.6B known.jsonl by-script $few
check 'it prints the three commands' [ "$(grep -cE '^== .*(data/prepare.py --tokenizer|train --model|train convert --model)' "$WORK/out")" = 3 ]
printf -- '--lora-rank 4\n--base nf4\n--seq-len 512\nsamples 4\n--val-every 2\n--save-every 50\n' >"$HERE/recipe.args"
script 0 "$data_python" 'they are merged into its weights in' Qwen3-0.6B known.jsonl by-recipe $few --config recipe.args
check 'with the options of a recipe' [ "$(grep -cE '^== .*--(seq-len|samples|save-every) ' "$WORK/out")" = 0 -a -f "$HERE/by-recipe/tokenizer.json" ]
mv "$HERE/by-script" "$HERE/first"
script 0 "$data_python" 'resumed .*step 3 of 3' Qwen3-0.6B known.jsonl by-script $few
check 'given again it goes on, to the same' cmp -s "$HERE/first/model.safetensors" "$HERE/by-script/model.safetensors"
script 1 "$data_python" 'exists already' Qwen3-0.6B known.jsonl by-script $few
finish
