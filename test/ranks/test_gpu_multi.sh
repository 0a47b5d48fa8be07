#!/bin/sh
# With several GPUs: a pass on all of them, for every ZeRO stage, against one (scripts/multi_gpu_check.sh).
. test/cli.sh
. scripts/common.sh
if [ "$(gpus_here)" -lt 2 ]; then
    echo '[  SKIPPED ] several GPUs: NOT TESTED, because there is one'
    skipped=1
elif ! command -v mpirun >/dev/null; then
    echo '[  SKIPPED ] several GPUs: NOT TESTED, because there is no mpirun (Debian, Ubuntu: openmpi-bin)'
    skipped=1
else
    build=${TRAIN%/train}
    check 'one result on all GPUs, for every stage' env BUILD="$build" RESULTS="$WORK" scripts/multi_gpu_check.sh correctness
    check 'collectives are right' env BUILD="$build" RESULTS="$WORK" MOST_MIB=8 scripts/multi_gpu_check.sh bandwidth
fi
finish
