#!/bin/sh
# One run over the GPUs of this machine, a process for each: the verb and options of ./train follow.
#
#     scripts/run_single_node.sh --model Qwen3-8B --data 'data/train-*.bin' --seq-len 131072 --zero 3 --out run
#     RANKS=4 scripts/run_single_node.sh bp --init qwen3-8b --seq-len 1048576 --sp 4
#
# Variables: RANKS, processes (the GPUs that nvidia-smi lists, or CUDA_VISIBLE_DEVICES names; a CPU build needs it said);
# TRAIN, the program (./train of this checkout); OMP_NUM_THREADS (the cores, dealt over the processes). Several machines:
# scripts/slurm_train.sbatch.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/common.sh"
TRAIN=${TRAIN:-$root/train} RANKS=${RANKS:-$(gpus_here)}
stop() { # status, message
    echo "run_single_node.sh: $2" >&2
    exit "$1"
}
[ $# -gt 0 ] || stop 2 'name the options of ./train, as in: scripts/run_single_node.sh --model DIR --data SHARDS --zero 2 --out run'
case $RANKS in '' | 0 | *[!0-9]*) stop 1 'no GPU was found (nvidia-smi lists none); RANKS=<processes> runs a CPU build' ;; esac
[ -x "$TRAIN" ] || stop 1 "$TRAIN: is not there; run make, or TRAIN=... names it"
command -v mpirun >/dev/null || stop 1 'there is no mpirun; install it (Debian, Ubuntu: openmpi-bin libopenmpi-dev) and run make again'
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_each "$RANKS")}
export OMP_NUM_THREADS
set -- $(launcher "$RANKS") "$TRAIN" "$@"
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $*" >&2
exec "$@"
