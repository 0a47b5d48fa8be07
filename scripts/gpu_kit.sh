#!/bin/sh
# Makes a kit for a machine with a GPU and no network: scripts/gpu_kit.sh FOLDER, then there: sh FOLDER/first.sh OUT
# FOLDER gets the portable program, the tests of ops, their benchmark, their libraries, and first.sh (dev/gpu_first.sh), which
# needs a driver and CUDA's libraries (those of PyTorch's wheels do). 70 MB, 17 MB as .tar.xz. No GPU is needed to make it.
# ARCHS [90]: architectures; CUDA: a toolkit with cuDNN [toolkit, made by scripts/cuda_wheels.sh if missing]
set -eu
cd "$(dirname "$0")/.."
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
kit=$1 ARCHS=${ARCHS:-90} CUDA=${CUDA:-toolkit}
[ -x "$CUDA/bin/nvcc" ] || scripts/cuda_wheels.sh "$CUDA"
CUDA=$(cd "$CUDA" && pwd)
portable=build/cuda-bf16-portable jobs=$(nproc)
make -j "$jobs" BACKEND=cuda PORTABLE=1 ARCHS="$ARCHS" CUDA="$CUDA"
make -j "$jobs" BACKEND=cuda PORTABLE=1 ARCHS="$ARCHS" CUDA="$CUDA" $portable/bench
make BACKEND=cuda ARCHS="$ARCHS" MPI=0 ONEDNN=0 CJSON=build/cjson NATIVE=-march=x86-64-v3 CUDA="$CUDA" PARTS='attention/bf16 ops/bf16' test-gpu-build
mkdir -p "$kit/lib"
cp $portable/train $portable/bench build/test-gpu-bf16/test_ops build/test-gpu-bf16/test_gpu_large "$kit"
strip "$kit/train" "$kit/bench" "$kit/test_ops" "$kit/test_gpu_large"
for name in libcmocka libgomp; do
    cp -L "$(ldd "$kit/test_ops" | sed -n "s|.*=> \(/.*/$name\.so[^ ]*\) .*|\1|p")" "$kit/lib"
done
cp dev/gpu_first.sh "$kit/first.sh"
du -sh "$kit"
