# Sourced by the other scripts: reads numbers from our own JSON, prints sizes for people, finds a Python that can draw.

# Prints the number under KEY in one line of our JSON: echo "$json" | json_number total_bytes
json_number() { sed -n "s/.*\"$1\": \([-+.0-9eE]*\).*/\1/p"; }

# Prints the bytes that a card (a word of --memory-limit) leaves to a program, from ./train's table
usable_bytes() { "$TRAIN" plan --init gpt2 --memory-limit "$1" --json --quiet | json_number usable_bytes; }

median() { sort -g | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; } # of standard input, one number a line

# Prints the commit of this checkout, or a device's name, for files in dev/results
commit_here() { echo "$(git rev-parse HEAD 2>/dev/null || echo unknown)$([ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || echo -modified)"; }
slug() { echo "$1" | tr 'A-Z' 'a-z' | sed 's/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//'; }

ON_DEVICE="--inputs device --inputs-every 1 --weights device --gradients device --optimizer device" # every tensor on the device
ANY_LENGTH=max_position_embeddings=1000000000 # with --init, for plans: lifts the model's limit

# Prints the Python that draws, or nothing: the first on PATH may lack matplotlib while the system's has it.
python_with_matplotlib() {
    for python in ${PYTHON:-} python3 /usr/bin/python3; do
        if "$python" -c 'import matplotlib' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

# Says that pictures are left out, and how to get them. $1: the command to repeat afterwards
pictures_skipped() {
    echo "No pictures: no Python with matplotlib here. Install it (Debian, Ubuntu: apt-get install python3-matplotlib), then $1."
}

# ---- demos, whose models are of bytes -------------------------------------------------------------------------------------------
BYTES_MODEL=llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,head_dim=16
BYTES_MODEL=$BYTES_MODEL,intermediate_size=192,vocab_size=256,max_position_embeddings=64

# Sets TRAIN and PYTHON. Ends the demo if there is no program, or no Python with numpy.
demo_begin() {
    TRAIN=${TRAIN:-./train} PYTHON=${PYTHON:-python3}
    [ -x "$TRAIN" ] || { echo "${0##*/}: there is no $TRAIN; make builds it" >&2; exit 1; }
    "$PYTHON" -c 'import numpy' 2>/dev/null ||
        { echo "${0##*/}: $PYTHON has no numpy: pip install numpy, or name another Python with PYTHON=..." >&2; exit 1; }
}
say() { printf '\n== %s\n' "$1"; }

# ---- the first GPU that programs see ------------------------------------------------------------------------------------------
first_gpu() { gpu=${CUDA_VISIBLE_DEVICES:-0} && echo "${gpu%%,*}"; }
ask_nvidia() { timeout 60 nvidia-smi "$@" 2>/dev/null; } # with a hanging driver nvidia-smi does not return
ask_gpu() { ask_nvidia -i "$(first_gpu)" --query-gpu="$1" --format=csv,noheader,nounits | head -n 1; } # $1: fields of nvidia-smi

# watched FILE COMMAND...: runs the command and samples the GPU into FILE, five times a second
watched() {
    samples=$1
    shift
    $(command -v stdbuf >/dev/null && echo stdbuf -oL) nvidia-smi -i "$(first_gpu)" --format=csv,noheader,nounits -lms 200 \
        --query-gpu=utilization.gpu,clocks.sm,power.draw,temperature.gpu >"$samples" 2>/dev/null &
    watcher=$!
    "$@"
    watched_status=$?
    kill $watcher 2>/dev/null
    wait $watcher 2>/dev/null
    return $watched_status
}
# Prints FILE's samples of a busy GPU as JSON: minimum, median and maximum; null if the GPU was never busy or is unknown
gpu_samples() {
    grep -v '\[' "$1" 2>/dev/null | awk -F ', *' 'NF == 4 && $1 >= 90' >"$1.busy"
    [ -s "$1.busy" ] || { echo null && return; }
    extremes() { cut -d , -f "$1" "$2" | sort -n | awk '{ v[NR] = $1 } END { printf "[%s, %s, %s]", v[1], (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2, v[NR] }'; }
    echo "{\"samples\": $(grep -c . "$1.busy"), \"sm_mhz\": $(extremes 2 "$1.busy"), \"power_w\": $(extremes 3 "$1.busy"), \"temperature_c\": $(extremes 4 "$1.busy")}"
}

# ---- the StreamBP paper (arXiv 2506.03077) ---------------------------------------------------------------------------------
PAPER_TABLES=scripts/paper/tables.csv
PAPER_CHUNKS="--chunk 500 --logits-chunk 100" # the paper's, for its longest sequences (Figure 3, Table 3)

# Prints the paper's name of a preset.
title() {
    case $1 in
    qwen3-4b) echo "Qwen3-4B" ;;
    qwen3-8b) echo "Qwen3-8B" ;;
    qwen3-14b) echo "Qwen3-14B" ;;
    qwen3-32b) echo "Qwen3-32B" ;;
    qwen3-32b-lora) echo "Qwen3-32B-LoRA" ;;
    llama3.1-8b) echo "Llama 3.1 8B" ;;
    gemma3-1b) echo "Gemma 3 1B" ;;
    *) echo "$1" ;;
    esac
}

# ---- several processes on this machine ---------------------------------------------------------------------------------------
# Counts the GPUs of this machine, or the GPUs that CUDA_VISIBLE_DEVICES names
gpus_here() {
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        echo "$CUDA_VISIBLE_DEVICES" | tr , '\n' | grep -c .
    else
        ask_nvidia -L | grep -c '^GPU '
    fi
}

# Prints the command that starts $1 processes here; append the program and its arguments. Threads of a process may run on any core.
launcher() {
    case $(mpirun --version 2>/dev/null) in
    *'Open MPI'*) echo "mpirun --oversubscribe --bind-to none -n $1" ;;
    *) echo "mpirun -n $1" ;;
    esac
}
threads_each() { # processes
    cores=$(env -u OMP_NUM_THREADS nproc) # without OMP_NUM_THREADS, which nproc would obey
    echo $((cores > $1 ? cores / $1 : 1))
}
