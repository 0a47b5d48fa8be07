#!/bin/sh
# Libraries that BACKEND=cuda can use on this machine, tried by compiling and linking: cuda_libraries.sh flags|nccl|report
# flags: the compiler's flags for cuDNN's attention (nothing without cuDNN); fails with one line where cuBLASLt is missing.
# nccl: those for NCCL's collectives (nothing without NCCL, or without MPI, which connects it).
# report: a line for each library, for people.
# NVCC, CXX; CUDNN, NCCL=<folder with include/ and lib/>, CUDNN_FRONTEND=<folder with include/>: where they lie elsewhere, as in pip
# wheels. MPI_FLAGS, MPI_LIBS: as the Makefile found them; MPI=0: without.
set -u
NVCC=${NVCC:-nvcc}
CXX=${CXX:-c++}
nvcc=$(command -v "${NVCC%% *}") || { echo "BACKEND=cuda needs nvcc 12 or 13: install the CUDA toolkit (NVIDIA's packages: cuda-toolkit-13-0), or give NVCC=<path>" >&2; exit 1; }
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
include=" -isystem $toolkit/include"
[ -d "$toolkit/targets/x86_64-linux/include" ] && include="$include -isystem $toolkit/targets/x86_64-linux/include"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# links FLAGS...: whether standard input compiles and links
links() {
    $CXX $include -x c++ - "$@" -L"$toolkit/lib64" -L"$toolkit/lib" -L"$toolkit/targets/x86_64-linux/lib" -L"$toolkit/lib64/stubs" \
        -o "$folder/program" 2>"$folder/errors"
}
# macros FLAGS...: standard input after the preprocessor, its last line
macros() { $CXX $include "$@" -E -P -x c++ - 2>/dev/null | tail -n 1 | tr -d ' '; }

cublas=$(echo '#include <cublasLt.h>
CUBLAS_VER_MAJOR.CUBLAS_VER_MINOR' | macros)
if [ -z "$cublas" ] || ! echo '#include <cublasLt.h>
int main() { return (int)cublasLtGetVersion(); }' | links -lcublasLt; then
    echo "BACKEND=cuda needs cuBLASLt: install libcublas-dev-13-0 (or the one of your toolkit's version)" >&2
    exit 1
fi

# A library that was named must be there.
[ -z "${NCCL:-}" ] || [ -f "$NCCL/include/nccl.h" ] ||
    { echo "NCCL=$NCCL: there is no include/nccl.h in it; name the folder above include/ and lib/" >&2; exit 1; }
[ -z "${CUDNN:-}" ] || [ -f "$CUDNN/include/cudnn_version.h" ] ||
    { echo "CUDNN=$CUDNN: there is no include/cudnn_version.h in it; name the folder above include/ and lib/" >&2; exit 1; }
[ -z "${CUDNN_FRONTEND:-}" ] || [ -f "$CUDNN_FRONTEND/include/cudnn_frontend.h" ] || [ -f "$CUDNN_FRONTEND/cudnn_frontend.h" ] ||
    { echo "CUDNN_FRONTEND=$CUDNN_FRONTEND: there is no include/cudnn_frontend.h in it" >&2; exit 1; }
cudnn_flags=
[ -n "${CUDNN:-}" ] && cudnn_flags="-isystem $CUDNN/include -DCUDNN_FOLDER='\"$CUDNN\"'"
cudnn=$(echo '#include <cudnn_version.h>
CUDNN_MAJOR.CUDNN_MINOR' | macros ${CUDNN:+-isystem "$CUDNN/include"})
front_end=
for place in "${CUDNN_FRONTEND:-}" "${CUDNN_FRONTEND:-}/include" "$toolkit/include" /usr/include /usr/local/include /opt/cudnn-frontend/include; do
    [ -z "$front_end" ] && [ -f "$place/cudnn_frontend.h" ] &&
        front_end=$(echo '#include <cudnn_frontend_version.h>
CUDNN_FRONTEND_MAJOR_VERSION.CUDNN_FRONTEND_MINOR_VERSION' | macros -isystem "$place") && cudnn_flags="$cudnn_flags -isystem $place"
done

# MPI is linked; of NCCL the header is enough: the library is loaded by runs of several ranks (2.13: ncclGetLastError).
mpi=
[ -n "${MPI_LIBS:-}" ] && printf '#include <mpi.h>\nint main() { return MPI_Init(0, 0); }\n' |
    links -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX ${MPI_FLAGS:-} $MPI_LIBS && mpi=yes
nccl_flags="${NCCL:+-isystem $NCCL/include -DNCCL_FOLDER='\"$NCCL\"'}"
nccl=$(echo '#include <nccl.h>
NCCL_MAJOR.NCCL_MINOR' | macros ${NCCL:+-isystem "$NCCL/include"})
old_nccl=
[ -n "$nccl" ] && [ "$(printf '%s\n' 2.13 "$nccl" | sort -V | head -n 1)" != 2.13 ] && old_nccl=$nccl nccl=
if [ "$1" = nccl ]; then
    [ -n "$nccl" ] && [ -n "$mpi" ] && echo "-DHAVE_NCCL $nccl_flags"
    exit 0
fi

# The front end's calls that cudnn_attention.cc needs are all there from 1.15 on.
old=
[ -n "$front_end" ] && [ "$(printf '%s\n' 1.15 "$front_end" | sort -V | head -n 1)" != 1.15 ] && old=$front_end front_end=

if [ "$1" = flags ]; then
    cudart=$(ls "$toolkit"/lib64/libcudart.so.1? "$toolkit"/lib/libcudart.so.1? 2>/dev/null | tail -n 1)
    [ -n "$cudnn" ] && [ -n "$front_end" ] &&
        echo "-DHAVE_CUDNN$include $cudnn_flags ${cudart:+-DCUDART_FILE='\"$cudart\"'}"
    exit 0
fi

line() { printf '  %-10s %s\n' "$1" "$2" >&2; }
line cuBLASLt "$cublas: matrix products"
if [ -n "$cudnn" ] && [ -n "$front_end" ]; then
    line cuDNN "$cudnn, front end $front_end: attention of long documents (bf16)"
elif [ -n "$cudnn" ]; then
    line cuDNN "$cudnn, but not its front end${old:+ ($old is older than 1.15)}: our own attention kernels (pip install --no-deps --target <folder> nvidia-cudnn-frontend, then CUDNN_FRONTEND=<folder>)"
else
    line cuDNN 'not found: our own attention kernels (libcudnn9-dev-cuda-13, or CUDNN=<folder>)'
fi
if [ -z "$nccl" ]; then
    line NCCL "not found${old_nccl:+ ($old_nccl is older than 2.13)}: a run has one GPU (libnccl-dev, or pip install nvidia-nccl-cu13, then NCCL=<folder>)"
elif [ -z "$mpi" ]; then
    line NCCL "$nccl, not used without MPI, which connects its ranks"
else
    line NCCL "$nccl: collectives of several GPUs, loaded where a run has more than one"
fi
if [ -n "$mpi" ]; then
    line MPI "found ($(${MPICC:-mpicc} --showme:version 2>/dev/null | head -n 1))"
else
    line MPI 'not found: a run is one process (libopenmpi-dev and openmpi-bin, or MPI_FLAGS and MPI_LIBS)'
fi
