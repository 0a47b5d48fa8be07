#!/bin/sh
# Runs ./train on the GPUs of this machine, a process for each GPU: give the verb and options of ./train.
#
#     scripts/run_single_node.sh --model Qwen3-8B --data 'data/train-*.bin' --seq-len 131072 --zero 3 --out run
#     RANKS=4 scripts/run_single_node.sh bp --init qwen3-8b --seq-len 1048576 --sp 4
#
# Variables: RANKS, processes (the GPUs that nvidia-smi lists, or CUDA_VISIBLE_DEVICES names; set it for a CPU build);
# TRAIN, the program (./train of this checkout); OMP_NUM_THREADS (the cores divided by the processes). Several machines:
# scripts/slurm_train.sbatch. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop a training run after its step and save it; a second signal ends it.
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
[ -x "$TRAIN" ] || stop 1 "$TRAIN: is missing; run make, or name the program with TRAIN=..."
command -v mpirun >/dev/null || stop 1 'there is no mpirun; install it (Debian, Ubuntu: openmpi-bin libopenmpi-dev) and run make again'
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_each "$RANKS")}
export OMP_NUM_THREADS
set -- $(launcher "$RANKS") "$TRAIN" "$@"
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $*" >&2
# Open MPI kills its processes two seconds after a SIGINT or SIGTERM, but forwards SIGUSR1. A session of its own keeps
# Ctrl-C from it.
setsid "$@" &
job=$! code=
for signal in INT:130 TERM:143 HUP:129 USR1:0; do trap "code=${signal#*:}; kill -USR1 $job" "${signal%:*}"; done
wait $job
status=$?
while kill -0 $job 2>/dev/null; do # a signal ended the wait, not the run
    wait $job
    status=$?
done
[ $status = 0 ] && [ -n "$code" ] && status=$code
exit $status
