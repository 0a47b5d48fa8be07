#!/bin/sh
# Names of the hub that are not in Hugging Face's cache: --download, the question on a terminal, `hf download`. A script stands in for
# hf: it makes the cache of the golden model, and writes each command to $WORK/calls.
set -u
. test/cli.sh
TRAIN=$(realpath "$TRAIN")
export WORK TRAIN HF_HOME="$WORK/home"
mkdir "$WORK/bin" "$WORK/none"
cat >"$WORK/bin/hf" <<'EOF2'
#!/bin/sh
echo "$@" >>"$WORK/calls"
case $2 in
*/gated) echo 'Cannot access gated repo' >&2; exit 3 ;;
*/killed) kill -KILL $$ ;;
*/nothing) exit 0 ;;
esac
[ -z "${SLOW:-}" ] || sleep "$SLOW"
model=$HF_HOME/hub/models--${2%/*}--${2#*/}
mkdir -p "$model/refs" "$model/blobs" "$model/snapshots/0123456789abcdef"
rm -f "$model"/blobs/*.incomplete
cp test/golden/llama/config.json test/golden/llama/model.safetensors "$model/snapshots/0123456789abcdef"
printf 0123456789abcdef >"$model/refs/main"
echo "$model/snapshots/0123456789abcdef" # hf prints it on stdout
EOF2
chmod +x "$WORK/bin/hf"
with_hf=$WORK/bin:$PATH without=$WORK/none
calls() { check "hf was called $1 times: $(cat "$WORK/calls" 2>/dev/null)" [ "$(cat "$WORK/calls" 2>/dev/null | wc -l)" = "$1" ]; }
fresh() { rm -rf "$WORK/home" "$WORK/calls"; }
terminal() { # answer, arguments: on a terminal; its text in $WORK/out
    answer=$1
    shift
    echo "$answer" | script -qec "'$TRAIN' $*" /dev/null >"$WORK/out" 2>&1
}

# ---- without a terminal ----------------------------------------------------------------------------------------------------------
PATH=$with_hf
refuses 1 'nor is it in .* cache; type: hf download Owner/tiny --local-dir tiny$' info --model Owner/tiny
refuses 1 'type: hf download Owner/tiny' info --model Owner/tiny --download no
succeeds plan --model Qwen/Qwen3-0.6B --seq-len 64 # by its preset
refuses 1 'type: hf download Owner/tiny' plan --model Owner/tiny
refuses 2 "download is 'maybe'" info --model Owner/tiny --download maybe
calls 0
succeeds info --model Owner/tiny --download yes --json
check 'stdout has the JSON alone' [ "$(wc -l <"$WORK/out") $(json model_type)" = '1 llama' ]
says err '^/.*/snapshots/0123456789abcdef$' 'note: --model Owner/tiny: using .*/snapshots/0123456789abcdef$'
check 'hf download NAME is what is called' [ "$(cat "$WORK/calls")" = 'download Owner/tiny' ]
succeeds info --model Owner/tiny --download yes
says out '^model .*; revision 0123456789abcdef$'
calls 1
touch "$WORK/home/hub/models--Owner--tiny/blobs/x.incomplete" # an interrupted download
succeeds info --model Owner/tiny
calls 1
succeeds plan --model Owner/tiny --seq-len 64 --download yes
calls 2
fresh

# ---- failures --------------------------------------------------------------------------------------------------------------------
refuses 1 'Owner/gated: hf download Owner/gated failed \(exit code 3\), .*: hf auth login' info --model Owner/gated --download yes
says err 'Cannot access gated repo'
refuses 1 'failed \(signal 9\)' sample --model Owner/killed --download yes --prompt x
refuses 1 'nor is it in .* cache' info --model Owner/nothing --download yes
PATH=$without "$TRAIN" info --model Owner/tiny --download yes >"$WORK/out" 2>"$WORK/err"
says err '^train: --download yes: no folder of $PATH has the command hf; type: pip install huggingface_hub$'
PATH=$without "$TRAIN" info --model Owner/tiny >"$WORK/out" 2>"$WORK/err"
says err '^train: --model Owner/tiny: .* type: hf download Owner/tiny --local-dir tiny$'
calls 3
fresh

# ---- a run -----------------------------------------------------------------------------------------------------------------------
succeeds train --model Owner/tiny --download yes --data $SHARD --seq-len 32 --steps 1 --out "$WORK/run"
says out '^model .*; revision 0123456789abcdef$'
check 'the log has the revision' grep -q '"revision": "0123456789abcdef"' "$WORK/run/log.jsonl"
fresh
succeeds train --resume --extend --steps 2 --out "$WORK/run" # with the options of its log
check 'and the log of its second part, too' [ "$(grep -c '"revision": "0123456789abcdef"' "$WORK/run/log.jsonl")" = 2 ]
calls 1
fresh
if command -v mpirun >/dev/null; then
    SLOW=2 ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0 test/ranks/mpirun.sh 2 "$TRAIN" bp --model Owner/tiny --download yes --seq-len 32 \
        --batch 2 --json >"$WORK/out" 2>"$WORK/err" </dev/null
    check "two ranks: exit $?, $(tail -n 1 "$WORK/err")" [ "$(grep -c '"loss"' "$WORK/out")" = 1 ]
    calls 1
    fresh
else
    skip 'two ranks' 'there is no mpirun'
fi

# ---- --like, and the base of adapters --------------------------------------------------------------------------------------------
to='convert --model test/golden/llama --overwrite --out'
refuses 1 '^train: --like Owner/tiny: .* type: hf download Owner/tiny --local-dir tiny$' $to "$WORK/copy" --like Owner/tiny
succeeds $to "$WORK/copy" --like Owner/tiny --download yes
says err 'note: --like Owner/tiny: using .*/snapshots/0123456789abcdef$'
calls 1
fresh
adapters="train --data $SHARD --seq-len 32 --lora-rank 2 --quiet"
succeeds $adapters --model Owner/tiny --download yes --steps 1 --out "$WORK/adapters"
rm -f "$WORK/calls"
succeeds eval --model "$WORK/adapters" --data $SHARD --seq-len 32 --download yes # the base is there
mkdir "$WORK/published"
cp "$WORK"/adapters/checkpoint-*/adapter_* "$WORK/published" # as on the hub: the base's name alone
HF_HOME=$WORK/other
succeeds eval --model "$WORK/adapters" --data $SHARD --seq-len 32 --download yes # it is in another cache
calls 0
HF_HOME=$WORK/home
fresh
refuses 1 "adapters, whose base Owner/tiny .*is not there; type: hf download Owner/tiny, or give --model BASE --adapter $WORK/adapters\$" \
    info --model "$WORK/adapters"
refuses 1 'whose base Owner/tiny is not there; type: hf download Owner/tiny, or give' info --model "$WORK/published" --download no
for verb in "eval --data $SHARD --seq-len 32" 'sample --prompt-ids 1,2,3 --max-new-tokens 2' "convert --out $WORK/merged"; do
    succeeds $verb --model "$WORK/published" --download yes
    says err "^note: --model Owner/tiny: using .*/snapshots/0123456789abcdef\$"
    check "$verb: hf was called" [ "$(cat "$WORK/calls")" = 'download Owner/tiny' ]
    fresh
done
sed -i 's|Owner/tiny|Owner/gated|' "$WORK/published/adapter_config.json"
refuses 1 "^train: --model $WORK/published, base Owner/gated: hf download Owner/gated failed" info --model "$WORK/published" --download yes
fresh

# ---- on a terminal ---------------------------------------------------------------------------------------------------------------
if script -qec true /dev/null </dev/null >/dev/null 2>&1; then
    terminal n info --model Owner/tiny
    says out 'Owner/tiny: is not here, nor in .* cache. Download it with hf? \[Y/n\]' 'type: hf download Owner/tiny'
    terminal n info --model Owner/tiny --download no
    check '--download no does not ask' sh -c '! grep -q "\[Y/n\]" "$WORK/out"'
    calls 0
    terminal y info --model Owner/tiny
    says out '; revision 0123456789abcdef'
    calls 1
    fresh
    terminal '' info --model Owner/tiny
    calls 1
    touch "$WORK/home/hub/models--Owner--tiny/blobs/x.incomplete"
    terminal n info --model Owner/tiny
    says out 'is not here, nor whole in .* cache' '; revision 0123456789abcdef'
    calls 1
else
    skip 'the question' 'there is no script(1)'
fi
finish
