#!/bin/sh
# Rollouts with an environment as a user runs them: rewards rise; plan and run agree; runs that are killed at many places and
# resumed have the same bits, even if the environment answers at random, since its answers are recorded; refusals and failures
# are one line; rollouts.jsonl has what was trained. Needs python3, without modules.
. test/cli.sh
command -v python3 >/dev/null || { skip 'rollouts with an environment' 'there is no python3'; finish; }
make_documents "$WORK/prompts.bin" 96 5,9,3,7,12,4,6,8 3 0 prompts

# Answers as the conversation and the seed say, or with seed 0 at random. The reward is 1 if the turn begins with one of half of
# the ids. Kills the run at a line.
cat >"$WORK/environment.py" <<'END'
import json, os, random, sys, time
seed, kill_at = sys.argv[1:3]
draw = random.Random()
for line in sys.stdin:
    asked = json.loads(line)
    with open(os.path.join(sys.argv[3], "asked"), "a+") as file:
        print("x", file=file, flush=True)
        count = file.tell() // 2
    if count == int(kill_at):
        os.kill(int(open(os.path.join(sys.argv[3], "process")).read()), 9)
        time.sleep(30)
    time.sleep(draw.random() / 500)
    if seed != "0":
        draw.seed(seed + json.dumps(asked["messages"]))
    first = asked["messages"][-1]["raw"][:1]
    print(json.dumps({"messages": [{"role": "tool", "content": "".join(draw.choices("0123456789", k=draw.randrange(1, 9)))}],
                      "reward": float(first != "" and ord(first) % 2), "done": draw.random() < 0.3, "error": draw.random() < 0.2}), flush=True)
END
common="--init $TINY --data $WORK/prompts.bin --rollout --objective grpo --seq-len 60 --batch 4 --group-size 6 --max-new-tokens 4 --lr 1e-2
    --schedule constant --seed 5 --max-turns 4 --slots 5 --stop-ids $(seq -s, 0 3 93)"
environment() { echo "exec python3 '$WORK/environment.py' $1 $2 '$WORK/$3'"; } # seed, line to kill at, folder
set -- --render-command 'exec python3 data/render.py . bytes' --environment-workers 2
rewards() { sed -n 's/.*"reward": \([^,}]*\).*/\1/p' "$1/log.jsonl"; }
mkdir "$WORK/calm"

STREAMBP_ALLOCATION_GUARD=1 # nothing of ours but conversations is allocated after the first step
export STREAMBP_ALLOCATION_GUARD
succeeds train $common "$@" --environment-command "$(environment 7 0 calm)" --steps 24 --out "$WORK/straight"
check 'rewards rise' awk 'NR <= 4 { a += $1 } NR > 20 { b += $1 } END { exit !(b > a + 0.8) }' <<END
$(rewards "$WORK/straight")
END
planned=$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")
run plan $common --environment-command true --verbose
check 'plan = run' [ "$(sed -n 's/^memory  *\([0-9.]* [KMG]iB\) planned.*/\1/p' "$WORK/out")" = "$planned" ]

# The estimate of sampling is that of a token of a text of half the length, for each token.
succeeds plan --init qwen3-0.6b --machine h100 --json --data "$WORK/prompts.bin" --any-tokenizer --rollout --objective grpo \
    --environment-command true --max-turns 3 --max-new-tokens 4 --seq-len 4084 --batch 5 --group-size 2 --slots 1
sampling=$(json estimated_sampling_seconds)
succeeds plan --for sample --init qwen3-0.6b --machine h100 --json --max-context 2048
check 'plan estimates sampling' awk -v a="$sampling" -v token="$(json token_seconds)" \
    'BEGIN { r = a / (5 * 2 * 3 * 4 * token); exit !(r > 0.9999 && r < 1.0001) }'

# The longest trajectories fit, with the keys and values of all slots.
grows="plan --init qwen3-0.6b --memory-limit 24GiB --dtype bf16 --json --data $WORK/prompts.bin --any-tokenizer --rollout --objective grpo --slots 8
    --lora-rank 4"
succeeds $grows --environment-command true --seq-len 4096
longest=$(json max_seq_len)
succeeds $grows --environment-command true --seq-len "$longest"
check 'the longest trajectory fits' grep -q '"fits": true' "$WORK/out"

for more in '--share-prefixes off' '--lora-dropout 0.1' '--method seco'; do
    succeeds train $common "$@" --environment-command "$(environment 7 0 calm)" --steps 1 --lora-rank 2 $more
done
for key in turns errors forks seconds truncated; do
    check "the log has $key" [ "$(grep -c "\"environment/$key\": [0-9]" "$WORK/straight/log.jsonl")" = 24 ]
done
check 'what was trained is in rollouts.jsonl' python3 - "$WORK/straight/rollouts.jsonl" <<'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
for line in lines:
    ids, turns = line["paths"][-1]["ids"], [m for m in line["messages"] if "raw" in m]
    trained = [bytes(ids[begin:end]).decode().replace("\0", "\ufffd") for begin, end in line["paths"][-1]["trained"]]
    assert len(line["paths"]) == 1 and trained == [m["raw"] for m in turns] and line["turns"] == len(turns), line
    assert line["tokens"] == len(ids) <= 61 and abs(sum(r or 0 for r in line["paths"][-1]["rewards"]) - line["reward"]) < 1e-6
assert len({line["turns"] for line in lines}) > 2 and {line["truncated"] for line in lines} == {True, False}
END

# ---- killed and resumed -------------------------------------------------------------------------------------------------------
killed() { # folder, line, seed, arguments: kills the run at this line of its environment
    folder=$1 line=$2 seed=$3
    shift 3
    mkdir "$WORK/$folder"
    "$TRAIN" train "$@" --environment-command "$(environment $seed "$line" "$folder")" --out "$WORK/$folder-run" >/dev/null 2>&1 &
    echo $! >"$WORK/$folder/process"
    wait $! 2>/dev/null
    [ $? = 137 ]
}
four="$common --steps 4 --save-every 2"
succeeds train $four "$@" --environment-command "$(environment 7 0 calm)" --out "$WORK/four"
places='1 70 130 190'
[ -z "${ALL_CASES:-}" ] || places=$(seq 1 2 199)
for place in $places; do
    check "killed at $place" killed "k$place" "$place" 7 $four "$@"
    succeeds train $four "$@" --resume auto --environment-command "$(environment 7 0 calm)" --out "$WORK/k$place-run"
    check "the same bits after $place" same_run "$WORK/four" "$WORK/k$place-run" 4
    rm -r "$WORK/k$place-run"
done
# At random: what was said stays. Two runs that go on from the same record agree, whatever the first one would have heard.
check 'killed at 50' killed random 50 0 $four "$@"
check 'its answers are recorded' [ "$(wc -l <"$WORK/random-run/environment.jsonl")" -ge 30 ]
cp -r "$WORK/random-run" "$WORK/random-again"
for other in run again; do
    succeeds train $four "$@" --resume auto --environment-command "$(environment 3 0 calm)" --out "$WORK/random-$other"
done
check 'random answers are repeated' same_run "$WORK/random-run" "$WORK/random-again" 4
check 'they count' [ "$(head -n 1 "$WORK/random-run/rollouts.jsonl")" != "$(head -n 1 "$WORK/four/rollouts.jsonl")" ]
check 'a checkpoint ends the record' [ ! -s "$WORK/random-run/environment.jsonl" ]

# ---- refusals -----------------------------------------------------------------------------------------------------------------
refuses 2 'reward-command out' train $common "$@" --environment-command true --reward-command true
refuses 2 'needs --seq-len' train --init $TINY --data "$WORK/prompts.bin" --rollout --objective grpo --environment-command true
refuses 2 'not with --overlap' train $common "$@" --environment-command true --overlap
refuses 2 'not with --sp' train $common "$@" --environment-command true --sp 2
refuses 2 'leave no room for a turn' train $common "$@" --environment-command true --seq-len 8
refuses 2 'needs? --environment-command|without --environment-command' train $common --reward-command true --max-turns 3
refuses 1 'step 1: the environment ended after 0 of 1 answers, with exit code 1; --reward-failure skip' train $common "$@" --environment-command false
refuses 1 'step 1: the environment ended after 0 of 1 answers.*no completion got a reward in the first step' train $common "$@" \
    --environment-command false --reward-failure skip
refuses 1 'step 1: the renderer ended after 0 of 1 answers' train $common --environment-command cat --render-command false
refuses 1 'was trained with --max-turns 4, now it is 5' train $common "$@" --max-turns 5 --steps 30 --resume --out "$WORK/straight" \
    --environment-command "$(environment 7 0 calm)"
finish
