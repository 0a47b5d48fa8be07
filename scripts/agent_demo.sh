#!/bin/sh
# Shows an agent that learns from its environment: a small model of bytes reads files with a tool. First it learns from data the form of a
# conversation: read any file, answer with what it says. Then scripts/calculator.py rewards the answer to the question, and the model
# learns which file to read. Tasks that no run is trained on then tell how many the model solves, before and after.
#
#     scripts/agent_demo.sh           a minute on two cores for a seed; needs a Python with numpy (PYTHON=...), and ./train
#     SEEDS='1 2 3' scripts/agent_demo.sh
#
# Everything goes into build/agent-demo/, which is replaced. SEEDS: a run each (1). Exit status 1 unless each run solves 0.3 of the tasks
# more than the control, a run with learning rate 0.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
demo_begin
OUT=build/agent-demo
STEPS=${STEPS:-80}

rm -rf "$OUT"
mkdir -p "$OUT"
"$PYTHON" scripts/agent_demo.py "$OUT"
"$TRAIN" --init $BYTES_MODEL --data "$OUT/format-00000.bin" --seq-len 32 --batch 64 --steps 300 --lr 3e-3 --out "$OUT/format" --quiet

run() { # MODEL DATA OUT, further options: steps with the environment
    model=$1 data=$2 out=$3
    shift 3
    "$TRAIN" --model "$model" --data "$OUT/$data-00000.bin" --seq-len 48 --objective grpo --rollout \
        --environment-command "'$PYTHON' scripts/calculator.py" --render-command "'$PYTHON' data/render.py . bytes" \
        --environment-workers 2 --max-turns 3 --max-new-tokens 10 --stop-ids 10 --seed "$seed" --out "$out" --quiet "$@"
}
# Prints the share of new tasks whose last answer is right: 2 trajectories each of 200 tasks.
solved() { # MODEL NAME
    run "$1" test "$OUT/test-$2" --batch 200 --group-size 2 --shuffle off --steps 1 --lr 0
    awk '{ n++ } /^{"step": 1, "reward": (1|0\.[5-9])/ { good++ } END { printf "%.3f", n ? good / n : 0 }' "$OUT/test-$2/rollouts.jsonl"
}
bad=0
for seed in ${SEEDS:-1}; do
    for rate in 0 1e-3; do
        run "$OUT/format" task "$OUT/run-$seed-$rate" --batch 16 --group-size 8 --steps "$STEPS" --lr $rate --warmup 5
    done
    control=$(solved "$OUT/run-$seed-0" $seed-0) trained=$(solved "$OUT/run-$seed-1e-3" $seed-1e-3)
    echo "seed $seed: solves $trained of 200 new tasks, without training $control"
    awk -v a="$trained" -v b="$control" 'BEGIN { exit !(a >= b + 0.3) }' || bad=1
done
exit $bad
