#!/bin/sh
# scripts/paper_max_length.sh: every row of the paper's Table 3 is there and reached; a row that is not would be reported.
# scripts/plan_scale.sh: every number of GPUs is there, the paper's numbers are right, and measured ones are marked.
# scripts/tables.py: the tables of plans in Markdown files are those of ./train, and every length is reached.
# ./train plan --machine: each recommended way is a plan, and its command line replays.
# scripts/recipes/: each fits into its named card.
# scripts/measured.py: plans are what ran on a GPU; test/scripts/test_pages.py: commands of docs/models have the bytes that stand there.
# scripts/docker/: what its files name exists, and the program takes their commands.
# scripts/install_deps.sh: asks on a terminal, with a fake package manager.
# scripts/log_export.py: records that arrive at TensorBoard and Weights & Biases, also from a growing log.
# scripts/plot.py log: a panel for every metric of the objective that is not zero throughout; what is missing is said in one line.
. test/cli.sh
. scripts/common.sh
LENGTHS=scripts/paper_max_length.sh
TRAIN=$TRAIN_PLAIN # plans only
export TRAIN
lengths() { # what, exit status, variables...: runs the script
    what=$1 wanted=$2
    shift 2
    env "$@" $LENGTHS >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted $what" [ $? = "$wanted" ]
}

lengths 'on a card of 80 GB' 0 LIMIT=a100
sed 's/|/ /g' "$WORK/out" >"$WORK/table"
# Compares the table's own numbers with the paper's file, without the script's verdict.
awk -F, '$1 == "table3_max_len" { split($3, run, " "); print $2, run[1], run[2], $8 }' scripts/paper/tables.csv >"$WORK/paper"
while read -r model objective trained paper; do
    row=$(tr 'A-Z' 'a-z' <"$WORK/table" | awk -v m="$model" -v o="$objective" -v t="$trained" '$1 == m && $2 == o && $3 == t')
    check "one row of $model, $objective $trained" [ "$(echo "$row" | grep -c "$model")" = 1 ]
    check "$model, $objective $trained: a pass reaches the paper's $paper, training takes more" awk -v paper="$paper" -v row="$row" 'BEGIN {
        split(row, column, " ")
        exit !(column[8] == paper && column[9] + 0 >= paper && column[10] + 0 >= paper && column[5] <= column[9]) }'
done <"$WORK/paper"
check 'fifteen rows' [ "$(grep -c . "$WORK/paper")" = 15 ]

lengths 'where the weights of 32B hardly fit' 1 LIMIT=64GiB
check 'and the rows below the paper are named' [ "$(grep -c '^BELOW the paper: Qwen3-32B ' "$WORK/out")" = 4 ]
lengths 'without the program' 1 TRAIN="$WORK/nothing"
check 'with a line that says so' grep -q 'paper_max_length.sh: there is no .*nothing yet; run make first' "$WORK/err"

# ---- several processes: started by the scripts, with fake launchers and a fake program ------------------------------------------
mkdir -p "$WORK/bin" "$WORK/build"
cat >"$WORK/bin/mpirun" <<'END'
#!/bin/sh
[ "$1" = --version ] && { echo 'mpirun (Open MPI) 4'; exit; }
while [ "$1" != -n ]; do shift; done
export FAKE_RANKS="$2"
shift 2
exec "$@"
END
cat >"$WORK/bin/srun" <<'END'
#!/bin/sh
echo "srun $*"
case $* in *--waits*) trap 'echo asked; exit 0' USR1; touch "$WORK/waits"; while :; do sleep 0.1; done ;; esac
END
cat >"$WORK/bin/scontrol" <<'END'
#!/bin/sh
echo "scontrol $*"
END
export WORK
cat >"$WORK/build/train" <<'END'
#!/bin/sh
loss=1.5
case "$*" in *"--zero ${WRONG_ZERO:-none}"*) loss=1.6 ;; esac
echo "{\"loss\": $loss, \"tokens\": 800, \"seconds\": 0.5, \"grad_norm\": 2.5, \"peak_bytes\": 1, \"ranks\": ${FAKE_RANKS:-1}, \"sent\": {\"gradients\": 30, \"weights\": 12}}"
END
cat >"$WORK/build/tell" <<'END'
#!/bin/sh
echo "$FAKE_RANKS of $*"
END
cat >"$WORK/build/collectives" <<'END'
#!/bin/sh
printf 'op bytes us GB/s\nreduce_scatter 65536 10.0 5.000\nexchange 65536 20.0 3.000\n'
END
chmod +x "$WORK"/bin/* "$WORK"/build/*
several() { # exit status, command...: with the launchers above
    wanted=$1
    shift
    env PATH="$WORK/bin:$PATH" MAKE=true BUILD="$WORK/build" RESULTS="$WORK/results" "$@" >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of $*" [ $? = "$wanted" ]
}

several 0 RANKS=3 TRAIN="$WORK/build/tell" scripts/run_single_node.sh bp --sp 3
says out '^3 of bp --sp 3$'
several 1 CUDA_VISIBLE_DEVICES= RANKS=0 scripts/run_single_node.sh bp
several 2 SLURM_JOB_ID= TRAIN="$WORK/build/tell" scripts/slurm_train.sbatch --out run
several 0 SLURM_JOB_ID=1 TRAIN="$WORK/build/tell" scripts/slurm_train.sbatch --zero 3 --out "$WORK/run"
says out 'build/tell --zero 3 --out [^ ]*/run --resume auto$'
several 0 SLURM_JOB_ID=1 TRAIN="$WORK/build/tell" scripts/slurm_train.sbatch --out "$WORK/run" --overwrite
says out 'run --overwrite$'
for options in --resume --overwrite; do # shortly before the job's time limit
    rm -f "$WORK/waits"
    PATH="$WORK/bin:$PATH" SLURM_JOB_ID=7 TRAIN="$WORK/build/tell" scripts/slurm_train.sbatch --waits $options >"$WORK/out" 2>"$WORK/err" &
    for _ in $(seq 300); do [ -e "$WORK/waits" ] || sleep 0.2; done
    kill -USR1 $!
    wait $!
    check 'ends well' [ $? = 0 ]
    says out '^asked$'
    check "$options: the job is queued again, or not" [ "$(grep -c '^scontrol requeue 7$' "$WORK/out")" = $([ $options = --resume ] && echo 1 || echo 0) ]
done
several 0 SLURM_JOB_ID=1 TRAIN="$WORK/build/tell" scripts/slurm_train.sbatch bp --out run
says out 'build/tell bp --out run$'

several 0 RANKS=4 scripts/multi_gpu_check.sh --dry-run correctness
check 'one process, then each stage and each way of sharing streams' [ "$(grep -c "$WORK/build/train bp" "$WORK/err")" = 13 ]
check 'and each stage with groups of every size' [ "$(grep -c "$WORK/build/train train .* --sp auto" "$WORK/err")" = 4 ]
check 'nothing is written' [ ! -e "$WORK/results" ]
several 0 RANKS=4 scripts/multi_gpu_check.sh
says out '^more streams *4 .* 0.250 '
says out '^4, zero 3, sp 4 .* 42$'
check 'the file says so' grep -q '"all_right": true' "$WORK"/results/multi-*.json
says out '^exchange .* 3.000 *- *-$'
several 1 RANKS=4 WRONG_ZERO=2 scripts/multi_gpu_check.sh correctness
check 'one stage is wrong, with every sharing' [ "$(grep -c '^WRONG: zero 2, sp [124]:' "$WORK/err")" = 3 ]
check 'and the file says so' grep -q '"all_right": false' "$WORK"/results/multi-*.json
several 2 RANKS=4 scripts/multi_gpu_check.sh speed

# ---- many GPUs on paper -------------------------------------------------------------------------------------------------------
env MOST=32 OUT="$WORK/scale" scripts/plan_scale.sh >"$WORK/out" 2>"$WORK/err"
check 'one to 32 GPUs' [ $? = 0 ]
csv=$WORK/scale/scale.csv
for model in 'Qwen3-8B' 'Llama 3.1 8B'; do
    for P in 2 4 8 16 32; do
        check "$model on $P GPUs" [ "$(grep -cE "^length,$model sp = GPUs (gathered|ring),plan,$P,[0-9]+,[0-9.]+,0\.[0-9]+,[0-9.e-]+\$" "$csv")" = 2 ]
    done
    check "$model: 8 GPUs each" [ "$(grep -cE "^length,$model sp 8,plan,[0-9]+,[0-9]+,[0-9.]+,0\.[0-9]+,[0-9.e-]+\$" "$csv")" = 3 ]
done
check 'longer on more GPUs' awk -F, '$1 == "length" && $3 == "plan" { if (($2 in last) && $5 <= last[$2]) bad = 1; last[$2] = $5 }
                                     END { exit bad }' "$csv"
check 'a million tokens on 8 GPUs and more' [ "$(grep -c '^million,.*,plan,' "$csv")" = 6 ]
for row in 'length,Llama 3.1 8B,ALST,32,15500000,,,' 'million,Qwen3-8B,TRL,8,1000000,380,0.34,' 'table4,stream,paper,8,131800,,,' \
    'table5,stream,paper,8,21000,20.7,,'; do
    check "what others measured: $row" grep -qxF "$row" "$csv"
done
check "Table 4's lengths are reached" awk -F, '$1 == "table4" && $2 == "Adam in bf16" { ours[$4] = $5 }
    $1 == "table4" && $2 == "stream" { n++; if (ours[$4] < $5) bad = 1 } END { exit bad || n != 6 }' "$csv"
check 'times are called estimated' [ "$(grep -c 'estimated s' "$WORK/out")" = 7 ]
says out '^Measured by its authors: TRL, Qwen3-8B on 8 GPUs, 380 s'
for basis in 'h100  *measured with this program' "^ *NVIDIA's data sheets" '^ *GPUs of a node' '^ *assumed:' '^ *GPUs of a node 8, products 214'; do
    check "constants are told with where they come from: $basis" grep -q "$basis" "$WORK/out"
done

# ---- ways to train on a machine -------------------------------------------------------------------------------------------------
# Each way in the table is a plan: its command line, with every choice named, gives the same memory and time.
cat >"$WORK/ways.py" <<'END'
import json, os, shlex, subprocess, sys
def plan(*words):
    made = subprocess.run([os.environ["TRAIN"], "plan", *words, "--json", "--quiet"], capture_output=True, text=True)
    assert made.returncode == 0, (words, made.stderr)
    return json.loads(made.stdout)
machine = ["--machine", "rtx4090,host=64GiB,disk=1TB"]
keys = "total_bytes", "host_bytes", "disk_bytes", "estimated_seconds", "estimated_tokens_per_second", "estimated_mfu"
replayed = 0
for options in ["--seq-len 400000"], ["--batch 2 --seq-len 100000 --lora-rank 8 --lora-alpha 3"], []:
    words = ["--init", "qwen3-0.6b", *" ".join(options).split(), *machine]
    made = plan(*words)
    ways = made["ways"]
    best = [way for way in ways if way["recommended"]]
    assert len(best) == 1 and best[0]["fits"], ways
    assert best[0]["trained"] == ("lora" if "--lora-rank" in words else "full"), best
    assert {way["trained"] for way in ways} == {"full", "lora"} and {way["lora_rank"] for way in ways} == {0, 8 if options and "8" in words else 16}
    for trained in "full", "lora":
        lengths = [way["max_seq_len"] for way in ways if way["trained"] == trained]
        assert lengths == sorted(lengths), lengths
    if not options: # the longest is planned
        assert made["max_seq_len"] == max(way["max_seq_len"] for way in ways if way["trained"] == "full")
        assert made["fits"] and f"--seq-len {made['max_seq_len']} " in best[0]["command"] + " "
        text = subprocess.run([os.environ["TRAIN"], "plan", *words], capture_output=True, text=True).stdout
        printed = " ".join(text.split("command", 1)[1].replace("\\", " ").split())
        assert printed == best[0]["command"] and len(text.splitlines()) <= 25, text
        assert max(map(len, text.splitlines())) <= 120, text
    for way in ways:
        if not way["fits"]:
            continue
        command = shlex.split(way["command"])
        named = "inputs", "weights", "gradients", "optimizer", "keep", "update", "chunk", "logits-chunk", "data", "out"
        assert command[1] == "train" and all("--" + name in command for name in named), command
        assert command[command.index("--model") + 1] == "Qwen/Qwen3-0.6B", command
        again = plan(*command[2:], *machine)
        assert [way[key] for key in keys] == [again[key] for key in keys], (way, again)
        assert {kind: again["placed"][kind] for kind in way["placed"]} == way["placed"], (way, again)
        replayed += 1
# Sequences shorter than a chunk; ranks that share them in the fastest way; --out may exist, --data need not.
for words in ["gpt2-xl", "--machine", "rtx4080,host=64GiB"], ["qwen3-0.6b", "--seq-len", "50000", "--machine", "h100", "--ranks", "4"]:
    made = plan("--init", *words, "--out", "scripts")
    for way in made["ways"]:
        again = plan(*shlex.split(way["command"])[2 + 3 * ("--ranks" in words) :], *words[words.index("--machine") :])
        assert way["fits"] and [way[key] for key in keys] == [again[key] for key in keys], (way, again)
        assert ("--rope-scaling yarn,factor=2 " in way["command"]) == ("--ranks" in words), way
        replayed += 1
    assert made["ways"]
for stage in "1", "3":
    assert made["estimated_seconds"] <= plan("--init", *words, "--sp", "4", "--zero", stage)["estimated_seconds"] <= 2 * made["estimated_seconds"]
told = subprocess.run([os.environ["TRAIN"], "plan", "--init", "qwen3-8b", "--seq-len", "4096", "--machine", "rtx4090,host=64GiB"], capture_output=True, text=True).stdout
assert [line.split()[0] for line in told.splitlines()[:2]] == ["fits", "instead"] and " s for " not in told and "not 4096" not in told, told
one_model = "--rope-scaling", "yarn,factor=4", "--lora-rank", "8", "--samples", "16" # such as a recipe has: the table is of all models
presets = {preset["name"]: preset for preset in plan(*one_model, *machine)["presets"]}
for name, trained in ("qwen3-1.7b", []), ("qwen3-0.6b", ["--lora-rank", "16"]):
    made = plan("--init", name, "--seq-len", "32768", *trained, *machine)
    shown = [presets[name][("lora_" if trained else "") + key] for key in ("max_seq_len", "estimated_seconds")]
    assert shown == [made["max_seq_len"], made["estimated_seconds"]], (presets[name], made)
for other in (["--init", "Qwen3-1.7B"], ["--model", "unsloth/Qwen3-1.7B"], ["--model", "x/Qwen3-1.7B-Base"]): # spellings, copies, tuned siblings
    again = plan(*other, "--seq-len", "32768", "--machine", "RTX 4090,host=64GiB,disk=1TB")
    wanted = plan("--init", "qwen3-1.7b", "--seq-len", "32768", *machine)
    assert [wanted[key] for key in keys] == [again[key] for key in keys], (other, wanted, again)
assert subprocess.run([os.environ["TRAIN"], "plan", "--model", "Qwen/Qwen3-4B-Instruct-2507"], capture_output=True).returncode == 1 # other positions
print(replayed, "ways,", len(presets), "presets")
END
check 'ways are plans, and their command lines replay' python3 "$WORK/ways.py"
check 'images build from what is there' python3 test/scripts/test_docker.py "$TRAIN" "$WORK"
check "points of every method" scripts/plan_methods.py --points "$WORK/methods.csv" qwen3-8b
check "the paper's memory beside ours" [ "$(grep -c '^qwen3-8b,[a-z]*,paper,[0-9]*,[0-9.e+]*,$' "$WORK/methods.csv")" = 3 ]
for bad in rtx4091 rtx4090,host=abc rtx4090, rtx4090,disk rtx4090,ram=1GiB; do
    refuses 2 '^train: --machine: .* give a100, ' plan --machine $bad
done
refuses 2 '^train: no model: .* --machine CARD plans for that card, ' plan --seq-len 64
refuses 1 '^train: --model unsloth/Qwen3-1.7B: .* type: hf download unsloth/Qwen3-1.7B ' train --model unsloth/Qwen3-1.7B --data no.bin

# ---- tables, recipes ----------------------------------------------------------------------------------------------------------
for command in 'plan_methods.py --points' 'precision_table.py /nowhere/x'; do # a file that cannot be read or written: one line
    python3 scripts/$command /nowhere/x >"$WORK/out" 2>&1
    check "$command" [ $? = 1 -a "$(cat "$WORK/out")" = "${command%% *}: /nowhere/x: No such file or directory" ]
done
case ${ALL_CASES:-0} in 0) quick=--quick some=2 ;; *) quick= some= ;; esac
scripts/tables.py --check $quick >"$WORK/out" 2>&1
check 'tables are those of the plans, lengths are reached, recipes fit, plans are what ran on a GPU' [ $? = 0 ]
cat "$WORK/out"
check 'commands of docs/models have the bytes that stand there' python3 test/scripts/test_pages.py $some
check 'each recipe has its plan' [ "$(grep -c '^| `[a-z0-9.-]*` | [0-9.]* of [0-9.]* GiB\( and [0-9]* GiB of host memory\)\{0,1\} | [0-9.]*k |$' scripts/RESULTS.md)" = "$(ls scripts/recipes/*.args | wc -l)" ]
for recipe in scripts/recipes/*.args; do
    check "$recipe says how it is used" grep -q "^#     .*\./train --config $recipe .*--out run\$" "$recipe"
done

# ---- installing packages ------------------------------------------------------------------------------------------------------
printf '#!/bin/sh\n[ "$1" != -n ] || shift\nexec "$@"\n' >"$WORK/bin/sudo"
printf '#!/bin/sh\ntouch "$WORK/installed"\n' >"$WORK/bin/apt-get"
chmod +x "$WORK/bin/sudo" "$WORK/bin/apt-get"
installing() { # exit status, whether it installs, what it says, a command that runs it
    rm -f "$WORK/installed"
    PATH="$WORK/bin:$PATH" CC=false MPI=0 sh -c "$4" >"$WORK/out" 2>&1
    check "exit $1 of: $4" [ $? = "$1" ]
    check "it installs: $2" [ "$2" = "$([ -e "$WORK/installed" ] && echo yes || echo no)" ]
    says out "$3"
}
installing 1 no 'DEPS=skip forbids' 'DEPS=skip scripts/install_deps.sh test'
installing 0 yes '^installing: libcmocka-dev' 'DEPS= scripts/install_deps.sh test </dev/null'
if command -v script >/dev/null; then # a terminal
    installing 1 no 'Install libcmocka-dev with apt-get? \[Y/n\]' "echo n | script -qec 'DEPS= scripts/install_deps.sh test' /dev/null"
    installing 0 yes '^installing: libcmocka-dev' "script -qec 'DEPS=yes scripts/install_deps.sh test' /dev/null </dev/null"
fi

# ---- logs at others ------------------------------------------------------------------------------------------------------------
mkdir -p "$WORK/stub/tensorboardX" "$WORK/followed"
cat >"$WORK/stub/wandb.py" <<'END'
import json, os
def tell(*words): print(json.dumps(words), file=open(os.environ["CALLS"], "a"))
class Run:
    config = type("Config", (), {"update": lambda self, values, allow_val_change: tell("config", values)})()
    def log(self, values, step): tell(step, values)
    def finish(self): tell("finish")
def init(**words): return tell("init", words) or Run()
END
cat >"$WORK/stub/tensorboardX/__init__.py" <<'END'
import json, os
class SummaryWriter:
    def __init__(self, folder): pass
    def __getattr__(self, name): return lambda *words: print(json.dumps([name, *words]), file=open(os.environ["CALLS"], "a"))
END
log=$WORK/followed/log.jsonl
export CALLS="$WORK/calls"
exporting() { PYTHONPATH=$WORK/stub python3 scripts/log_export.py "$@" 2>"$WORK/err"; }
arrives() { # what, pattern: within a minute
    for _ in $(seq 600); do grep -qF -- "$2" "$CALLS" 2>/dev/null && break; sleep 0.1; done
    check "log_export.py: $1" grep -qF -- "$2" "$CALLS"
}
printf '{"step": 1, "version": "0.1", "options": {"lr": 0.1, "objective": "grpo"}}\n{"step": 0, "val_loss": 5.5}\n{"step": 1, "loss": 2.5, "lr": ' >"$log"
PYTHONPATH=$WORK/stub python3 scripts/log_export.py --wandb project --follow "$WORK/followed" 2>"$WORK/err" &
follower=$!
arrives 'a run begins' '["init", {"project": "project", "name": "followed"}]'
arrives 'its options' '["config", {"lr": 0.1, "objective": "grpo"}]'
arrives 'a validation' '[0, {"eval/loss": 5.5}]'
check 'half a line is waited for' [ "$(grep -c 2.5 "$CALLS")" = 0 ]
printf '0.05, "tokens": 64, "peak_share": null, "ended": 0.75, "clip_fraction": 0.5}\n{"step": 2, "loss": 1.5, "tokens": 64}\n' >>"$log"
arrives 'the names of others' '[1, {"train/loss": 2.5, "train/learning_rate": 0.05, "train/num_tokens": 64, "train/completions/clipped_ratio": 0.25, "train/clip_ratio/region_mean": 0.5}]'
arrives 'tokens of all steps' '[2, {"train/loss": 1.5, "train/num_tokens": 128}]'
sed -i '$d' "$log" # as --resume does
sleep 3 # it looks twice a second
printf '{"step": 2, "loss": 1.25, "tokens": 32}\n' >>"$log"
arrives 'a step that is done again' '[2, {"train/loss": 1.25, "train/num_tokens": 96}]'
kill -TERM $follower
wait $follower
check 'interrupted: exit 0' [ $? = 0 ]
check 'and the run is finished' [ "$(tail -n 1 "$CALLS")" = '["finish"]' ]
exporting --tensorboard "$WORK/tb" "$log"
check 'TensorBoard has it' grep -qF '["add_scalar", "train/loss", 1.25, 2]' "$CALLS"
exporting --tensorboard "$WORK/tb" "$WORK/none"
check 'no such run: one line' grep -q 'there is no .*/none/log.jsonl; name the folder' "$WORK/err"
echo '{"loss": 1}' >>"$log"
exporting --tensorboard "$WORK/tb" "$log"
check 'no record: one line' grep -q 'log.jsonl: line 5 is no record of a run' "$WORK/err"
echo 'raise ImportError' >"$WORK/stub/wandb.py"
exporting --wandb project "$log"
check 'a missing package: what to install' grep -q 'pip install wandb' "$WORK/err"

# ---- pictures of logs ---------------------------------------------------------------------------------------------------------
python=$(python_with_matplotlib)
plot() { # what, columns of panels, arguments: the picture is that much wider than tall
    what=$1 columns=$2
    shift 2
    rm -f "$WORK/plot.png"
    "$python" scripts/plot.py log --out "$WORK/plot.png" "$@" >"$WORK/out" 2>"$WORK/err" || tail -n 3 "$WORK/err"
    check "$what: a picture" [ "$(head -c 4 "$WORK/plot.png" | tail -c 3)" = PNG ]
    set -- $(od -An -j 16 -N 8 -t u1 "$WORK/plot.png") 0 0 0 0 0 0 0 0 # width and height, 4 bytes each
    ratio=$(((100 * ($3 * 256 + $4)) / ($7 * 256 + $8 + 1)))
    echo "$what: $(($3 * 256 + $4)) x $(($7 * 256 + $8))"
    check "$what: as wide as a README at two dots a pixel" [ $(($3 * 256 + $4)) -gt 1350 -a $(($3 * 256 + $4)) -lt 1850 ]
    check "$what: $columns columns" [ $ratio -gt $((columns * 90)) -a $ratio -lt $((columns * 90 + 110)) ]
}
if [ -n "$python" ]; then
    for name in sft dpo grpo none first later empty broken; do mkdir -p "$WORK/runs/$name"; done
    cd "$WORK/runs" || exit 1
    for step in 1 2 3; do
        echo "{\"step\": $step, \"loss\": $step.5}" >>sft/log.jsonl
        echo "{\"step\": $step, \"loss\": 0.$step, \"rewards/margins\": $step, \"rewards/accuracies\": 0.$step}" >>dpo/log.jsonl
        echo "{\"step\": $step, \"loss\": 1, \"reward\": 0.$step, \"reward_std\": 0.1, \"kl\": null, \"zero_spread\": 0, \"entropy\": 4, \"completion_length\": 9}" >>grpo/log.jsonl
    done
    for step in 1 2 3; do echo "{\"step\": $step, \"loss\": $step.5, \"tokens\": 8}"; done >first/log.jsonl
    printf '{"step": 1, "options": {"seq_len": 64}}\n{"step": 1, "loss": 1.5, "tokens": 64}\n{"step": 2, "loss": 2.5, "tokens": 64}\n{"step": 2, "val_loss": 0.5}\n' >later/log.jsonl
    echo '{"step": 3, "val_loss": 0.5, "val_rewards/margins": 2, "val_rewards/accuracies": 1}' >>dpo/log.jsonl
    echo '{"step": 1, "sample": "text"}' >none/log.jsonl
    printf '{"step": 1, "loss": 1}\n{"step": 2, "los\n' >broken/log.jsonl
    : >empty/log.jsonl
    printf 'series,begin,end,loss\n256,64,128,1.5\n256,4096,8192,1.25\n' >curve.csv
    printf 'series,begin,loss\n256,64,1.5\n' >column.csv
    printf 'series,begin,end,loss\n256,64,128,high\n' >word.csv
    cd - >/dev/null || exit 1
    plot 'a loss' 1 "$WORK/runs/sft"
    plot 'dpo' 3 --mean 2 "$WORK/runs/dpo/log.jsonl"
    plot 'grpo: reward, entropy, length' 3 --mean 2 "$WORK/runs/grpo/"
    plot 'one metric' 1 --only reward=share --title '{first} to {last}' "$WORK/runs/grpo"
    plot 'two rows of all' 1 "$WORK/runs/dpo" "$WORK/runs/grpo" "$WORK/runs/sft"
    plot 'stages' 1 --stages --mean 16 "$WORK/runs/first" "$WORK/runs/later"
    scripts/plan_lengths_mixed.py --points "$WORK/mixed.csv" && "$python" scripts/plot.py mixed --in "$WORK/mixed.csv" --out "$WORK/mixed.png"
    check 'a picture of mixed lengths' [ "$(head -c 4 "$WORK/mixed.png" | tail -c 3)" = PNG ]
    check 'a picture of many GPUs' [ "$(head -c 4 "$WORK/scale/scale.png" | tail -c 3)" = PNG ]
    cat >"$WORK/plots.py" <<'END'
import os, sys
sys.path.insert(0, "scripts")
sys.argv[0] = "plot.py"
import plot
runs, out = sys.argv[1], ["--out", os.path.join(sys.argv[1], "out.png")]
at = lambda name: os.path.join(runs, name)
# a mean stands where its window is full, weighted by tokens; stages follow each other in tokens
points = [(step, 3 * step) for step in range(9)]
assert plot.means(points, 4, {}) == points[2:7] and plot.means(points[:4], 4, {}) == []
assert plot.means([(1, 6), (2, 0), (3, 0)], 2, {1: 1, 2: 1, 3: 4}) == [(2, 1)]
staged, begins = plot.follow([("", *plot.read(at(f"{name}/log.jsonl"))) for name in ("first", "later")])
assert begins == [(0, None), (24, 64)] and staged[1][1]["loss"] == ([(88, 1.5), (152, 2.5)], [(152, 0.5)])
def says(status, text, *arguments):
    try:
        sys.argv[1:] = [*arguments, *out]
        found = plot.main()
    except SystemExit as error:
        found = error.code
    assert found == status if isinstance(status, int) or not status else text in found and "\n" not in found, (arguments, found)
says(None, "", "curve", "--in", at("curve.csv"))
for text, run in (("there is no", "absent"), ("holds no step", "none"), ("holds no step", "empty"), ("line 2 is no record", "broken")):
    says("one line", text, "log", at(run))
says("one line", "there is no such metric", "log", "--only", "nothing", at("sft"))
says("one line", "--stages needs the tokens", "log", "--stages", at("sft"))
says("one line", "a row has no end", "curve", "--in", at("column.csv"))
says("one line", "holds no rows", "curve", "--in", at("empty/log.jsonl"))
says("one line", "word.csv: could not convert", "curve", "--in", at("word.csv"))
says("one line", "no.csv: No such file", "curve", "--in", at("no.csv"))
says("one line", "--title: what is drawn has no", "curve", "--in", at("curve.csv"), "--title", "{first}")
says(2, "", "memory", "--in", at("curve.csv"), "--limit", "80 GB")
says(2, "", "curve")
END
    check 'means, stages, and what is missing in one line' "$python" "$WORK/plots.py" "$WORK/runs"
    mkdir -p "$WORK/without/matplotlib"
    echo 'raise ImportError' >"$WORK/without/matplotlib/__init__.py"
    PYTHONPATH=$WORK/without "$python" scripts/plot.py log --out none.png "$WORK/runs/sft" 2>"$WORK/err"
    check 'no matplotlib: exit 1, what to install' [ $? = 1 -a "$(grep -c 'pip install matplotlib' "$WORK/err")" = "$(wc -l <"$WORK/err")" ]
else
    skip 'pictures of logs' 'no Python has matplotlib (Debian, Ubuntu: python3-matplotlib)'
fi

# ---- keys in long texts, at the smallest size: a model that finds none --------------------------------------------------------
if python3 -c 'import numpy' 2>/dev/null; then
    PYTHON=python3 STEPS=10 LENGTHS='300 2000' DEPTHS='0 1' TEXTS=1 ENOUGH=0 OUT=$WORK/passkey scripts/passkey_demo.sh >"$WORK/out" 2>"$WORK/err"
    check 'passkey_demo.sh: a row for each length, depth and memory' [ $? = 0 -a "$(grep -cE '^(blocks|off),(300|2000),[01],[01],1$' "$WORK/passkey/recall.csv")" = 8 ]
    python3 scripts/passkey_demo.py text 2000 0.5 7 >"$WORK/text"
    check 'a text has its key, and the question for it' grep -q "the key is <$(python3 scripts/passkey_demo.py key 7)> .*what is the key? <$" "$WORK/text"
    PYTHON=python3 STEPS=10 LENGTHS=300 DEPTHS=0 TEXTS=1 MODEL=keep OUT=$WORK/passkey scripts/passkey_demo.sh >"$WORK/out" 2>"$WORK/err"
    check 'keys that are not found are an error' [ $? = 1 -a "$(grep -c 'found less than' "$WORK/err")" = 1 ]
else
    skip 'keys in long texts' 'python3 has no numpy'
fi

# ---- test/run.sh --since: rows that read a changed file, by includes, by the table, by their text ---------------------------------
if git clone -q --shared . "$WORK/clone" 2>/dev/null; then
    since() { # file, rows that are chosen of some
        (cd "$WORK/clone" && echo >>"$1" && test/run.sh --rows --since HEAD sampler/fp32 schedule prepare cuda_on_cpu/fp32 rope_frequency/fp32 &&
            git checkout -q .) >"$WORK/out"
        check "$1 changed, so $2 run" [ "$(awk '{ printf "%s ", $1 }' "$WORK/out")" = "$2 " ]
    }
    since llmc/generate/sampler.h sampler
    since llmc/optimizer/schedule.h schedule
    since data/prepare.py prepare
    since test/golden/rotary.txt 'prepare sampler rope_frequency rope_frequency'
    since LICENSE run.sh:
    (cd "$WORK/clone" && test/run.sh --rows --since nothing) >"$WORK/out" 2>"$WORK/err"
    check 'an unknown commit is refused' [ $? = 2 ]
else
    skip 'test/run.sh --since' 'this is no checkout of git'
fi

finish
