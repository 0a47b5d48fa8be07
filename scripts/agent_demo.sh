#!/bin/sh
# Shows an agent that learns from its environment: a small model of bytes reads files with a tool. First it learns from data the form of a
# conversation: read any file, answer with what it says. Then scripts/calculator.py rewards the answer to the question, and the model
# learns which file to read. A control run with a learning rate of 0 stays where it began.
#
#     scripts/agent_demo.sh           two minutes on two cores; needs a Python with numpy (PYTHON=...), and ./train
#
# Everything goes into build/agent-demo/, which is replaced. SEEDS: seeds, each a run and a control run (1). Exit status 1 unless the share
# of solved tasks of the last 10 steps is at least 0.3 above the control's.
set -eu
LC_ALL=C
export LC_ALL
cd "$(dirname "$0")/.."
. scripts/common.sh
TRAIN=${TRAIN:-./train}
PYTHON=${PYTHON:-python3}
OUT=build/agent-demo
STEPS=${STEPS:-80}
[ -x "$TRAIN" ] || { echo "agent_demo.sh: there is no $TRAIN; make builds it" >&2; exit 1; }
"$PYTHON" -c 'import numpy' 2>/dev/null || { echo "agent_demo.sh: $PYTHON has no numpy: pip install numpy, or name another Python with PYTHON=..." >&2; exit 1; }

MODEL=llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,head_dim=16
MODEL=$MODEL,intermediate_size=192,vocab_size=256,max_position_embeddings=64

rm -rf "$OUT"
mkdir -p "$OUT"
"$PYTHON" scripts/agent_demo.py "$OUT"
"$TRAIN" --init $MODEL --data "$OUT/format-00000.bin" --seq-len 32 --batch 64 --steps 300 --lr 3e-3 --out "$OUT/format" --quiet

# Prints the mean reward of the last 10 steps.
solved() { # LOG
    json_number reward <"$1" | tail -n 10 | awk '{ sum += $1; n++ } END { printf "%.3f", n ? sum / n : 0 }'
}
bad=0
for seed in ${SEEDS:-1}; do
    for rate in 0 1e-3; do
        "$TRAIN" --model "$OUT/format" --data "$OUT/task-00000.bin" --seq-len 48 --objective grpo --rollout \
            --environment-command "'$PYTHON' scripts/calculator.py" --render-command "'$PYTHON' data/render.py . bytes" \
            --environment-workers 2 --max-turns 3 --max-new-tokens 10 --stop-ids 10 --batch 16 --group-size 8 \
            --steps "$STEPS" --lr $rate --warmup 5 --seed "$seed" --out "$OUT/run-$seed-$rate" --quiet
    done
    control=$(solved "$OUT/run-$seed-0/log.jsonl") trained=$(solved "$OUT/run-$seed-1e-3/log.jsonl")
    echo "seed $seed: reward of the last 10 steps $trained, without training $control"
    awk -v a="$trained" -v b="$control" 'BEGIN { exit !(a >= b + 0.3) }' || bad=1
done
exit $bad
