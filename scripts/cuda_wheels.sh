#!/bin/sh
# Makes a CUDA toolkit from PyPI's wheels: scripts/cuda_wheels.sh FOLDER, then make BACKEND=all CUDA=FOLDER
# FOLDER, 1.8 GiB, may be moved. It holds nvcc, cuBLASLt, cuDNN with its front end, NCCL. The system is unchanged.
# Without a network: on another machine scripts/cuda_wheels.sh --download WHEELS (1.2 GB), then on this one PIP_NO_INDEX=1
# PIP_FIND_LINKS=WHEELS scripts/cuda_wheels.sh FOLDER. PYTHON [python3] has pip.
set -eu

# Versions that fit each other: one CUDA for compiler, headers and NVRTC (drivers from 580 on accept it); cuDNN and a front end whose
# plans were tried together.
CUDA='nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3'
REST='nvidia-cudnn-cu13==9.19.0.56 nvidia-nccl-cu13==2.28.9 nvidia-cudnn-frontend==1.32.0'

pip="${PYTHON:-python3} -m pip"
options='--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312'
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
[ $# = 2 ] && [ "$1" = --download ] && exec $pip download $options -d "$2" $CUDA $REST
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
folder=$1
[ ! -e "$folder" ] || [ -z "$(ls -A "$folder")" ] || { echo "cuda_wheels.sh: $folder is not empty; name a new folder" >&2; exit 1; }
$pip --version >/dev/null || { echo "cuda_wheels.sh: ${PYTHON:-python3} has no pip; install python3-pip, or give PYTHON=<a Python with pip>" >&2; exit 1; }
mkdir -p "$folder"
wheels=$folder/wheels
trap 'rm -rf "$wheels"' EXIT
$pip install --quiet $options --target "$wheels" $CUDA $REST || {
    rmdir "$folder" 2>/dev/null || true
    echo "cuda_wheels.sh: pip did not get the wheels (above); without a network see the first lines of $0" >&2
    exit 1
}

# Merges the wheels into one tree, as in a toolkit
mv "$wheels"/nvidia/cu13/* "$folder"
for part in "$wheels/nvidia/cudnn" "$wheels/nvidia/nccl" "$wheels"; do cp -rl "$part/include" "$folder"; done
mv "$wheels"/nvidia/cudnn/lib/* "$wheels"/nvidia/nccl/lib/* "$folder/lib"
mkdir "$folder/dist-info" && mv "$wheels"/*.dist-info "$folder/dist-info" # licences and versions, for make dist
ln -s lib "$folder/lib64"
for file in "$folder"/lib/*.so.*; do
    name=${file##*/}
    [ -e "${file%%.so.*}.so" ] || ln -s "$name" "${file%%.so.*}.so"
done
printf '%s\n' $CUDA $REST >"$folder/wheels.txt"
echo "$folder: $("$folder/bin/nvcc" --version | sed -n 's/.*release/nvcc/p'), $(du -sh "$folder" | cut -f 1); now: make BACKEND=all CUDA=$folder"
