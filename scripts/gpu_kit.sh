#!/bin/sh
# Makes a kit for a machine with a GPU and no network: scripts/gpu_kit.sh FOLDER, then on that machine: sh FOLDER/first.sh OUT
# FOLDER gets the portable program of every type and device, tests of ops, benchmarks, their libraries, and first.sh (dev/gpu_first.sh), which needs a
# driver and CUDA's libraries (PyTorch's wheels have them). 6.3 MB for each CUDA. No GPU is needed to make the kit.
# CUDA [toolkit, made by scripts/cuda_wheels.sh if missing]: a toolkit of CUDA 13 with cuDNN, for drivers from 580 on.
# CUDA12: also a toolkit of CUDA 12, for drivers from 525 on. No wheel has nvcc 12; NVIDIA's packages and Debian's nvidia-cuda-toolkit do.
# CUDNN, CUDNN_FRONTEND: for a toolkit without them. ARCHS [90]: architectures.
set -eu
cd "$(dirname "$0")/.."
[ $# = 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
kit=$1 ARCHS=${ARCHS:-90} CUDA=${CUDA:-toolkit} CUDA12=${CUDA12:-} parts='train bench bench_decode test_ops test_gpu_large'
mkdir -p "$kit"
[ -x "$CUDA/bin/nvcc" ] || scripts/cuda_wheels.sh "$CUDA"
kit=$(cd "$kit" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pack() { # cuda13 or cuda12, toolkit: its programs become $kit/cuda13.tar.xz
    build=build/$1-portable programs=$work/$1
    words="BACKEND=all PORTABLE=1 BUILD=$build ARCHS='$ARCHS' CUDA='$2'"
    eval make -j "$(nproc)" "$words" $build/train $build/bench $build/bench_decode
    eval make "$words" "PARTS='attention/bf16 ops/bf16'" test-gpu-build
    mkdir -p "$programs/lib"
    cp $build/train $build/bench $build/bench_decode build/test-gpu-bf16/test_ops build/test-gpu-bf16/test_gpu_large "$programs"
    (cd "$programs" && strip $parts && ldd $parts) | awk '$2 == "=>" { print $1, $3 }' | sort -u >"$work/needed"
    while read -r name file; do
        case $name in
        libc.so* | libm.so* | libdl.so* | librt.so* | libpthread.so*) ;;
        libstdc++.so* | libgcc_s.so* | libgomp.so* | libcmocka.so*) cp -L "$file" "$programs/lib" ;;
        *) echo "gpu_kit.sh: a program of $build needs $name, which not every machine has" >&2 && exit 1 ;;
        esac
    done <"$work/needed"
    tar -C "$work" -c "$1" | xz -9 >"$kit/$1.tar.xz"
}
pack cuda13 "$CUDA"
[ -z "$CUDA12" ] || pack cuda12 "$CUDA12"

# Data for two passes of first.sh: a short document before a long one; 600 lengths
${CC:-cc} -D_GNU_SOURCE -O1 -I. test/data/make_documents.c -lm -o "$work/make_documents"
"$work/make_documents" "$kit/behind.bin" 32000 101,32669
"$work/make_documents" "$kit/lengths.bin" 32000 "$(seq -s , 101 700)"
cp dev/gpu_first.sh "$kit/first.sh"
cp scripts/common.sh "$kit"
cat >"$kit/kit.txt" <<END
commit $(. scripts/common.sh && commit_here)
sources $(find Makefile train_gpt.cu streambp.h llmc test -type f | LC_ALL=C sort | xargs cat | cksum | cut -d ' ' -f 1)
END
cp dev/gpu_steps.sh scripts/gpu_queue.sh dev/gpu_floors.md "$work/make_documents" "$kit" # of both scripts; of the queue
du -sh "$kit"
