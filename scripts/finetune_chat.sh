#!/bin/sh
# Runs README's worked example as one command: fine-tunes a Hugging Face chat model on conversations and writes a folder for
# transformers. It runs three commands and prints each first, so that you can also type them.
#
#     scripts/finetune_chat.sh MODEL CONVERSATIONS.jsonl OUT_DIR [options of ./train ...]
#     scripts/finetune_chat.sh Qwen3-0.6B conversations.jsonl Qwen3-0.6B-tuned --lora-rank 16
#
# MODEL is a folder (pip install huggingface_hub; hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B), or a name of the hub that
# is in its cache. A line of CONVERSATIONS.jsonl:
#     {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
#
# Shards and checkpoints go to OUT_DIR.work, and stay there. The same command continues an interrupted one. Variables:
#     SEQ_LEN         most tokens of a conversation; by default the length of the longest, up to MAX_SEQ_LEN (32768)
#     VAL_FRACTION    share of the conversations used for validation (0.05; 0: none)
#     PYTHON, TRAIN   the Python for data/prepare.py (python3), and the program (./train of this checkout)
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
[ "$root" != "$PWD" ] || root=. # the paths that README's commands use
PYTHON=${PYTHON:-python3} TRAIN=${TRAIN:-$root/train}
MAX_SEQ_LEN=${MAX_SEQ_LEN:-32768} VAL_FRACTION=${VAL_FRACTION:-0.05}

stop() { # status, message
    echo "finetune_chat.sh: $2" >&2
    exit "$1"
}
# Prints the command as typed in a shell: quotes a word that has other characters than the pattern's.
print_command() {
    for word in "$@"; do
        case $word in
        *[!-A-Za-z0-9_./,:=+%@]* | '') printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    echo
}
announce() { # what, command
    printf '\n== %s:' "$1"
    shift
    print_command "$@"
}
failed() { stop 1 "the command above ended with status $1; correct the error above and repeat this command, which continues from there, or remove $work to begin anew"; }

[ $# -ge 3 ] || stop 2 "usage: finetune_chat.sh MODEL CONVERSATIONS.jsonl OUT_DIR [options of ./train ...]; its first lines explain"
model=${1%/} conversations=$2 out=${3%/}
shift 3
case "$model $conversations $out" in -* | *' -'*) stop 2 "MODEL, CONVERSATIONS.jsonl and OUT_DIR come before the options of ./train" ;; esac
[ -f "$model/config.json" ] || [ ! -e "$model" ] ||
    stop 1 "$model: has no config.json; name the folder of a model: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
[ -f "$conversations" ] || stop 1 "$conversations: is not a file; name a JSONL file of conversations"
[ -x "$TRAIN" ] || stop 1 "$TRAIN: is missing; run make, or name the program with TRAIN=..."
[ ! -f "$out" ] && [ -z "$(ls -A "$out" 2>/dev/null)" ] || stop 1 "$out: exists already; remove it or name another OUT_DIR"
"$PYTHON" -c 'import tokenizers, jinja2, numpy' 2>/dev/null ||
    stop 1 "$PYTHON lacks tokenizers, jinja2 or numpy; python3 -m venv venv && \
venv/bin/pip install tokenizers jinja2 numpy, then PYTHON=venv/bin/python"
work=$out.work

# ---- defaults that options replace: each may be on the command line once, or in the file of --config --------------------------------
typed() { # name, options...
    name=$1
    shift
    for option in "$@"; do
        case $option in "--$name" | "--$name="*) return 0 ;; esac
    done
    return 1
}
config=
for option in "$@"; do
    case $option in --config=*) config=${option#*=} ;; esac
    [ "$config" != next ] || config=$option
    [ "$option" != --config ] || config=next
done
[ ! -d "$config" ] || config=$config/log.jsonl
given() { typed "$@" || { [ -n "$config" ] && grep -qE "^[[:space:]]*(--)?$1([[:space:]=]|\$)|\"(--)?$1\":" "$config"; }; }
for name in model data val-data out resume; do
    ! typed $name "$@" || stop 2 "--$name is chosen by this script; type the three commands of README to choose it yourself"
done

# ---- 1: shards ------------------------------------------------------------------------------------------------------------------------
mkdir -p "$work" || stop 1 "$work: cannot be made"
prepare() {
    announce "1 of 3, tokens" "$@"
    "$@" >"$work/prepare.txt"
    status=$?
    grep -v '^next: ' "$work/prepare.txt" # which this script runs itself
    [ $status = 0 ] || failed $status
}
prepare "$PYTHON" "$root/data/prepare.py" --tokenizer "$model" --out "$work/shards" --val-fraction "$VAL_FRACTION" "$conversations"

# ---- 2: training ----------------------------------------------------------------------------------------------------------------------
# prepare.py's last line has the length of the longest conversation, the scaling of positions if the model has too few, and the samples of
# a step.
hinted() { sed -n "s/^next: .* --$1 \([0-9]*\).*/\1/p" "$work/prepare.txt"; }
samples=$(hinted samples)
[ -z "$samples" ] || given samples "$@" || given grad-accum "$@" || set -- --samples "$samples" "$@"
[ -z "${SEQ_LEN:-}" ] || given seq-len "$@" || set -- --seq-len "$SEQ_LEN" "$@"
if ! given seq-len "$@"; then
    needed=$(hinted seq-len)
    [ -n "$needed" ] || stop 1 "$work/prepare.txt: names no --seq-len; set SEQ_LEN"
    [ "$needed" -le "$MAX_SEQ_LEN" ] || echo "the longest conversation needs --seq-len $needed, $MAX_SEQ_LEN is used: longer conversations are split (--long)"
    [ "$needed" -le "$MAX_SEQ_LEN" ] || needed=$MAX_SEQ_LEN
    scaling=$(sed -n 's/^next: .* --rope-scaling \([^ ]*\).*/\1/p' "$work/prepare.txt")
    [ -z "$scaling" ] || given rope-scaling "$@" || [ "$needed" != "$(hinted seq-len)" ] || set -- --rope-scaling "$scaling" "$@"
    set -- --seq-len "$needed" "$@"
fi
if ls "$work"/shards/val-*.bin >/dev/null 2>&1; then
    set -- --val-data "$work/shards/val-*.bin" "$@"
elif given val-every "$@" && ! typed val-every "$@"; then
    set -- --val-every 0 "$@" # there are no validation data
fi
set -- "$TRAIN" --model "$model" --data "$work/shards/train-*.bin" "$@" --out "$work/run" --resume auto
announce "2 of 3, training" "$@"
"$@" || failed $?

# ---- 3: the folder --------------------------------------------------------------------------------------------------------------------
set -- "$TRAIN" convert --model "$work/run" --out "$out"
announce "3 of 3, a folder" "$@"
"$@" || failed $?

printf '\n%s is the folder for transformers. A first answer:\n   ' "$out"
print_command "$TRAIN" sample --model "$out" --chat --prompt 'Hello' --temperature 0
