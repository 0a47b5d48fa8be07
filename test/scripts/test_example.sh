#!/bin/sh
# README's worked example as it is printed there, on a small random model: from directory to directory, then the result here and in
# transformers; and scripts/finetune_chat.sh. Needs a Python as data/prepare.py does (find_python.sh), and for some checks transformers.
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
OMP_NUM_THREADS=1 # of so small a model threads would mostly wait for each other
export OMP_NUM_THREADS

# ---- a place that looks like a checkout with the files README speaks of -------------------------------------------------------------
HERE=$WORK/here MODEL=$WORK/here/Qwen3-0.6B
mkdir -p "$HERE" "$WORK/bin"
ln -s "$TRAIN" "$HERE/train"
ln -s "$root/data" "$HERE/data"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$data_python" >"$WORK/bin/python"
chmod +x "$WORK/bin/python"
vocabulary=$("$data_python" test/scripts/example_files.py "$WORK/tokenizer" "$HERE/conversations.jsonl" "$WORK/other.jsonl") || fail "test/scripts/example_files.py"
succeeds convert --seed 1 --out "$MODEL" \
    --init qwen2,hidden_size=64,intermediate_size=128,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size="$vocabulary",max_position_embeddings=4096,tie_word_embeddings=true
cp "$WORK/tokenizer"/* "$MODEL"

here() { # a command line as a user types it in that place
    (cd "$HERE" && PATH=$WORK/bin:$PATH sh -c "$1") >"$WORK/out" 2>"$WORK/err" && pass && return
    fail "exit $? of: $1"
    tail -n 5 "$WORK/err" | sed 's/^/    /'
}
sed -n '/^### Fine-tune a chat model/,/^### Other/p' README.md >"$WORK/section"
# A line of the section that begins so, for a model that has everything to learn.
readme() {
    grep "^    $1" "$WORK/section" | sed 's/^ *//; s/--seq-len 32768/--seq-len 512/; s/--lr 1e-5/--lr 1e-2 --warmup 10 --steps 80/'
}
check 'README has four commands' [ "$(grep -c '^    [^ ]' "$WORK/section")" = 4 ]

# ---- the three commands ---------------------------------------------------------------------------------------------------------------
here "$(readme 'python data/prepare.py')"
next=$(readme './train --model' | sed 's/--lr 1e-2 --warmup 10 --steps 80/--lr 1e-5/; s/--seq-len 512/--seq-len 1024/; s/ --samples [0-9]*//')
check 'prepare.py prints the command that comes next' [ "$(sed -n 's/^next: //; s/ --samples 3 --lr/ --lr/p' "$WORK/out")" = "$next" ]
check 'and how many steps it makes' grep -qx 'an epoch is 1[0-9] optimizer steps of 3 documents' "$WORK/out"
mkdir "$HERE/short"
cp "$MODEL"/*.json "$HERE/short"
sed 's/"max_position_embeddings": 4096/"max_position_embeddings": 300/' "$MODEL/config.json" >"$HERE/short/config.json"
here 'python data/prepare.py --tokenizer short --out short/shards conversations.jsonl'
check 'with no more tokens than the model has positions' grep -q -- '--seq-len 300 ' "$WORK/out"
check 'shards of both kinds' [ -f "$HERE/shards/train-00000.bin" -a -f "$HERE/shards/val-00000.bin" ]
here "$(readme './train --model')"
loss_of() { grep '"loss"' "$HERE/run/log.jsonl" | sed -n "$1s/.*\"loss\": \([0-9.eE+-]*\).*/\1/p"; }
echo "loss: $(loss_of 1) at the first step, $(loss_of '$') at the last"
check 'the loss falls' awk -v a="$(loss_of 1)" -v b="$(loss_of '$')" 'BEGIN { exit !(a > 4 && b != "" && b < 0.1) }'
check 'the tokenizer file comes from the shards' cmp -s "$HERE/shards/tokenizer.tok" "$HERE/run/tokenizer.tok"
here "$(readme './train convert')"
TUNED=$HERE/Qwen3-0.6B-tuned
check 'the folder has what it needs' [ "$(ls "$TUNED" | tr '\n' ' ')" = \
    'config.json generation_config.json model.safetensors tokenizer.json tokenizer.tok tokenizer_config.json ' ]
for file in "$MODEL"/*.json; do check "$file is copied" cmp -s "$file" "$TUNED/${file##*/}"; done

# ---- the result -----------------------------------------------------------------------------------------------------------------------
answer='Two and two is four: 2 + 2 = 4.'
here "$(readme './train sample')"
check 'it answers what it was taught' [ "$(cat "$WORK/out")" = "$answer" ]
here "$(readme './train sample') --json"
check 'and ends its turn' [ "$(json stop)" = eos ]
cp "$WORK/out" "$WORK/sample"
here "$(readme './train sample' | sed 's/Qwen3-0.6B-tuned/run/') --json"
check 'as the run does' cmp -s "$WORK/out" "$WORK/sample"
here "python data/prepare.py --tokenizer Qwen3-0.6B-tuned --out other $WORK/other.jsonl"
succeeds eval --model "$TUNED" --data "$HERE/other/train-00000.bin" --seq-len 1024 --json
loss=$(json loss)
find_python 'torch, transformers, numpy'
if [ -n "$python" ]; then
    PYTHONPATH=test/data "$python" test/scripts/example_check.py "$TUNED" "$HERE/other/train-00000.bin" "$WORK/sample" "$loss" >"$WORK/checks" 2>"$WORK/err" ||
        tail -n 5 "$WORK/err"
    grep -v ' skipped$' "$WORK/checks"
    set -- $(tail -n 1 "$WORK/checks" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, .*/\1 \2/p') none none
    if [ "$2" = none ]; then fail 'test/scripts/example_check.py has no closing line'; else passed=$((passed + $1)) failed=$((failed + $2)); fi
    sed -n '/^```python/,/^```$/p' "$WORK/section" | grep -v '^```' >"$HERE/load.py"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$(absolute "$python")" >"$WORK/bin/python"
    here 'HF_HUB_OFFLINE=1 python load.py'
    check "README's lines of Python answer the same" [ "$(cat "$WORK/out")" = "$answer" ]
else
    skip "the example's result in transformers" 'no Python has torch and transformers (PYTHON=... names one)'
fi

# ---- the script -----------------------------------------------------------------------------------------------------------------------
script() { # exit status, a python, what it must say on stdout or stderr, arguments
    wanted=$1 with=$2 pattern=$3
    shift 3
    (cd "$HERE" && PYTHON=$with TRAIN=./train "$root/scripts/finetune_chat.sh" "$@") >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of: finetune_chat.sh $*" [ $? = "$wanted" ]
    check "it says '$pattern'" grep -q -e "$pattern" "$WORK/out" "$WORK/err"
    [ "$wanted" = 0 ] || check 'in one line' [ "$(grep -c '^finetune_chat.sh: ' "$WORK/err")" = 1 ]
}
few='--steps 3 --lr 1e-3'
script 2 "$data_python" 'usage: ' Qwen3-0.6B conversations.jsonl
script 2 "$data_python" 'is what this script chooses' Qwen3-0.6B conversations.jsonl by-script --out x
script 1 "$data_python" 'has no config.json' shards conversations.jsonl by-script
script 1 "$data_python" 'is no file' Qwen3-0.6B nothing.jsonl by-script
script 1 false 'ended with status 1' Qwen3-0.6B conversations.jsonl by-script $few
check 'a failure leaves no folder' [ ! -e "$HERE/by-script" ]
script 1 "$data_python" 'ended with status 1' Qwen3-0.6B conversations.jsonl by-script $few --memory-limit 1MiB
script 0 "$data_python" 'is complete for these inputs' Qwen3-0.6B conversations.jsonl by-script $few
check 'it prints the three commands' [ "$(grep -cE '^== .*(data/prepare.py --tokenizer|train --model|train convert --model)' "$WORK/out")" = 3 ]
mv "$HERE/by-script" "$HERE/first"
script 0 "$data_python" 'resumed .*step 3 of 3' Qwen3-0.6B conversations.jsonl by-script $few
check 'given again it goes on, to the same' cmp -s "$HERE/first/model.safetensors" "$HERE/by-script/model.safetensors"
script 1 "$data_python" 'is there already' Qwen3-0.6B conversations.jsonl by-script $few
finish
