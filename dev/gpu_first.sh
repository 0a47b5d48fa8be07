#!/bin/sh
# The first minutes on a GPU, with a kit of scripts/gpu_kit.sh: sh KIT/first.sh OUT. What is wrong ends it before anything is measured.
#   1. the program starts, and `doctor` finds every op right
#   2. streamed gradients are those of gradient checkpointing, by cuDNN and by our own attention
#   3. tests of all ops
#   4. every op's rate; passes of a few layers with a profile, then of all layers of Qwen3-8B and Qwen3.5-9B
# About 4 minutes on an H100. OUT gets log.txt, bench.json and passes.jsonl; a table goes to stdout. LIMIT [500] seconds: what would not end
# in time is left out. PYTHON [python3]: whose wheels have CUDA's libraries, unless STREAMBP_LIBRARIES names them.
set -u
kit=$(cd "$(dirname "$0")" && pwd)
[ $# = 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1 LIMIT=${LIMIT:-500}
mkdir -p "$out" || exit 1
log=$out/log.txt begin=$(date +%s)
[ -n "${STREAMBP_LIBRARIES:-}" ] || STREAMBP_LIBRARIES=$("${PYTHON:-python3}" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
export STREAMBP_LIBRARIES LD_LIBRARY_PATH="$kit/lib:${LD_LIBRARY_PATH:-}"
: >"$log"
failed=0

# step NAME SECONDS COMMAND...: its output in $out/step.out and .err, and all of it in the log
step() {
    name=$1 most=$2 left=$((LIMIT - $(date +%s) + begin))
    shift 2
    [ "$left" -gt "$most" ] || { printf '%-28s left out, %s s are left\n' "$name" "$left"; return 3; }
    started=$(date +%s)
    timeout -k 5 "$most" "$@" >"$out/step.out" 2>"$out/step.err"
    status=$?
    { echo "=== $name: $*"; cat "$out/step.out" "$out/step.err"; echo "--- exit $status"; } >>"$log"
    printf '%-28s %s, %s s\n' "$name" "$([ $status = 0 ] && echo ok || echo "FAILED, exit $status")" $(($(date +%s) - started))
    [ $status = 0 ] || failed=1
    return $status
}
stop() { echo "first.sh: $1; see $log" >&2 && exit 1; }
number() { sed -n "s/.*\"$1\": \([-+.0-9eE]*\).*/\1/p" "$out/step.out" | tail -n 1; }
bp() { # name, seconds, options: a line in passes.jsonl
    name=$1 most=$2
    shift 2
    step "$name" "$most" "$kit/train" bp --json "$@" || { tail -n 2 "$out/step.err"; return 1; }
    tr -d '\n' <"$out/step.out" | sed "s/^{/{\"pass\": \"$name\", /; s/$/\n/" >>"$out/passes.jsonl"
    printf '    loss %s  norm %s  %s s\n' "$(number loss)" "$(number grad_norm)" "$(sed -n 's/.* \([0-9.]* s\)  [0-9.]* tok.*/\1/p' "$out/step.err" | head -n 1)"
}
alike() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d < 0.002 * a) }'; }

# 1. to 3.: right or wrong
nvidia-smi >>"$log" 2>&1 || stop 'nvidia-smi finds no GPU'
step doctor 100 "$kit/train" doctor --init qwen3-8b --verbose || { grep WRONG "$out/step.out" "$out/step.err"; stop 'the doctor finds something wrong'; }
small='--init qwen3-8b,num_hidden_layers=2,vocab_size=32000 --seq-len 16384'
bp checkpoint 40 $small --method checkpoint || stop 'a pass does not run'
norm=$(number grad_norm)
for ways in '' '--chunk 1024' '--chunk 1000' '--inputs host --weights host'; do
    bp "stream $ways" 40 $small $ways || stop 'a pass does not run'
    alike "$norm" "$(number grad_norm)" || stop "streamed gradients have norm $(number grad_norm), checkpointed ones $norm"
done
STREAMBP_CUDNN=0 bp 'stream, our own attention' 40 $small && { alike "$norm" "$(number grad_norm)" || stop 'our own attention differs'; }
step 'tests of ops' 60 "$kit/test_ops"
step 'tests of long attention' 200 "$kit/test_gpu_large" attention

# 4. how fast
step 'rates of ops' 60 "$kit/bench" 11 && cp "$out/step.out" "$out/bench.json" && cat "$out/step.err"
for model in qwen3-8b qwen3.5-9b; do
    bp "4 layers of $model" 40 --init $model,num_hidden_layers=4 --seq-len 32768 --repeat 3 --profile && grep '%' "$out/step.err"
    bp "$model at 32768" 60 --init $model --seq-len 32768 --repeat 3
done
bp 'qwen3-8b at 131072' 120 --init qwen3-8b --seq-len 131072
rm -f "$out/step.out" "$out/step.err"
exit $failed
