#!/bin/sh
# Finds the libraries that BACKEND=cuda can use on this machine, by compiling and linking: cuda_libraries.sh gpu|make|flags|report
# gpu: the first GPU's architecture (90); nothing without one.
# make: the Makefile's variables, each ended by `;;`: ARCHS, TOOLKIT, CUDA_LIBRARIES (flags for cuDNN's attention; empty without
#   cuDNN), NCCL_FLAGS (empty without NCCL, or without MPI, which connects it); $(error ...) if nvcc or cuBLASLt is missing.
# flags: only CUDA_LIBRARIES. report: a line for each library, for people.
# NVCC, CXX; CUBLAS, CUDNN, NCCL=<folder with include/ and lib/>, CUDNN_FRONTEND=<folder with include/>: for libraries outside the
# toolkit and the system. MPI_FLAGS, MPI_LIBS: as the Makefile found them. ARCHS; GPU and PORTABLE choose its default.
set -u
NVCC=${NVCC:-nvcc}
CXX=${CXX:-c++}
if [ "$1" = gpu ]; then
    timeout 60 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | grep -xE '[0-9]+' | head -n 1
    exit 0
fi
if [ "$1" = make ]; then
    give_up() { echo "\$(error $*)"; exit 1; }
else
    give_up() { echo "$*" >&2; exit 1; }
fi
wheels='a toolkit of wheels: scripts/cuda_wheels.sh toolkit, then CUDA=toolkit'
nvcc=$(command -v "${NVCC%% *}") || case $NVCC in
*/bin/nvcc) give_up "CUDA=${NVCC%/bin/nvcc}: there is no bin/nvcc in it; name the folder of a toolkit, or make $wheels" ;;
*) give_up "BACKEND=cuda needs nvcc 12 or 13: install the CUDA toolkit (NVIDIA's packages: cuda-toolkit-13-0), make $wheels, or give NVCC=<path>" ;;
esac
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
for part in nvvm/bin/cicc:nvidia-nvvm cuda_runtime.h:nvidia-cuda-runtime crt/host_config.h:nvidia-cuda-crt nv/target:nvidia-cuda-cccl; do
    [ "$toolkit" = /usr ] || # Debian's packages, whose parts lie in different folders
        ls "$toolkit/${part%:*}" "$toolkit/include/${part%:*}" "$toolkit/include/cccl/${part%:*}" "$toolkit"/targets/*/include/"${part%:*}" \
            "$toolkit"/targets/*/include/cccl/"${part%:*}" 2>/dev/null | grep -q . ||
        give_up "$toolkit, of $nvcc, is not complete: there is no ${part%:*} (pip: ${part#*:}); make $wheels"
done
include=" -isystem $toolkit/include"
[ -d "$toolkit/targets/x86_64-linux/include" ] && include="$include -isystem $toolkit/targets/x86_64-linux/include"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# macros FLAGS...: preprocesses standard input and prints its last line
macros() { $CXX "$@" $include -E -P -x c++ - 2>/dev/null | tail -n 1 | tr -d ' '; }

# A named library must exist: variable, folder, header, library, wheel.
named() {
    [ -z "$2" ] && return
    for file in "include/$3" "lib/$4"; do
        ls "$2/$file" "$2/$file".* "$2/lib64/$4".* "$2"/lib/*/"$4".* 2>/dev/null | grep -q "${file##*/}" ||
            give_up "$1=$2: there is no $file in it; name the folder above include/ and lib/ (in site-packages/nvidia: $5)"
    done
}
named CUBLAS "${CUBLAS:-}" cublasLt.h libcublasLt.so 'cu13, of nvidia-cublas'
named NCCL "${NCCL:-}" nccl.h libnccl.so 'nccl, of nvidia-nccl-cu13'
named CUDNN "${CUDNN:-}" cudnn_version.h libcudnn.so 'cudnn, of nvidia-cudnn-cu13'
[ -z "${CUDNN_FRONTEND:-}" ] || [ -f "$CUDNN_FRONTEND/include/cudnn_frontend.h" ] || [ -f "$CUDNN_FRONTEND/cudnn_frontend.h" ] ||
    give_up "CUDNN_FRONTEND=$CUDNN_FRONTEND: there is no include/cudnn_frontend.h in it (pip install --no-deps --target <folder> nvidia-cudnn-frontend)"

# The headers are enough: the libraries are opened at run time.
cublas=$(echo '#include <cublasLt.h>
CUBLAS_VER_MAJOR.CUBLAS_VER_MINOR' | macros ${CUBLAS:+-isystem "$CUBLAS/include"})
[ -n "$cublas" ] || give_up "BACKEND=cuda needs cuBLASLt's header: install libcublas-dev-13-0 (or your toolkit's version), or give CUBLAS=<folder> (pip: nvidia-cublas)"
cudnn_flags=
[ -n "${CUDNN:-}" ] && cudnn_flags="-isystem $CUDNN/include"
cudnn=$(echo '#include <cudnn_version.h>
CUDNN_MAJOR.CUDNN_MINOR' | macros ${CUDNN:+-isystem "$CUDNN/include"})
front_end=
for place in "${CUDNN_FRONTEND:-}" "${CUDNN_FRONTEND:-}/include" "$toolkit/include" /usr/include /usr/local/include /opt/cudnn-frontend/include; do
    [ -z "$front_end" ] && [ -f "$place/cudnn_frontend.h" ] &&
        front_end=$(echo '#include <cudnn_frontend_version.h>
CUDNN_FRONTEND_MAJOR_VERSION.CUDNN_FRONTEND_MINOR_VERSION' | macros -isystem "$place") && [ "$place" != /usr/include ] && cudnn_flags="$cudnn_flags -isystem $place"
done

# MPI is linked; NCCL needs only the header: runs of several ranks load the library (2.13: ncclGetLastError).
mpi=
[ -n "${MPI_LIBS:-}" ] && printf '#include <mpi.h>\nint main() { return MPI_Init(0, 0); }\n' |
    $CXX -x c++ - -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX ${MPI_FLAGS:-} $MPI_LIBS -o "$folder/program" 2>/dev/null && mpi=yes
nccl_flags="${NCCL:+-isystem $NCCL/include}"
nccl=$(echo '#include <nccl.h>
NCCL_MAJOR.NCCL_MINOR' | macros ${NCCL:+-isystem "$NCCL/include"})
old_nccl=
[ -n "$nccl" ] && [ "$(printf '%s\n' 2.13 "$nccl" | sort -V | head -n 1)" != 2.13 ] && old_nccl=$nccl nccl=

# The front end has the calls of cudnn_attention.cc from 1.15 on. Forward without a plan for each length needs 1.18 and
# cuDNN 9.18; plans were made with 1.32 and cuDNN 9.19, and it compiles with 1.15, 1.18 and 1.23.
old=
[ -n "$front_end" ] && [ "$(printf '%s\n' 1.15 "$front_end" | sort -V | head -n 1)" != 1.15 ] && old=$front_end front_end=

flags=
[ -n "$cudnn" ] && [ -n "$front_end" ] && flags="-DHAVE_CUDNN $cudnn_flags$include"
if [ "$1" = flags ]; then
    [ -z "$flags" ] || echo "$flags"
    exit 0
fi
if [ "$1" = make ]; then
    known=$($NVCC --list-gpu-arch 2>/dev/null | sed -n 's/^compute_//p' | paste -sd ' ' -)
    [ -n "$known" ] || give_up "$NVCC lists no architecture (nvcc --list-gpu-arch): BACKEND=cuda needs nvcc 12 or 13"
    archs=${ARCHS:-}
    [ -n "$archs" ] || [ -n "${PORTABLE:-}" ] || archs=${GPU:-}
    [ -n "$archs" ] || archs=$(echo "$known" | tr ' ' '\n' | grep -xE '80|86|89|90|100|120' | paste -sd ' ' -)
    for arch in $archs; do
        case " $known " in *" $arch "*) continue ;; esac
        give_up "ARCHS=$archs: this nvcc knows the numbers $known; a newer GPU runs what ARCHS=${known##* } builds"
    done
    echo "ARCHS := $archs;; TOOLKIT := $toolkit;; CUDA_LIBRARIES := $flags;;"
    [ -z "$nccl" ] || [ -z "$mpi" ] || echo "NCCL_FLAGS := -DHAVE_NCCL $nccl_flags;;"
    exit 0
fi

line() { printf '  %-10s %s\n' "$1" "$2" >&2; }
own='WARNING: attention by our own kernels, expected to make a bf16 pass of 32k tokens 1.7 times, of 128k 2.4 times as long'
line cuBLASLt "$cublas: matrix products"
if [ -n "$cudnn" ] && [ -n "$front_end" ]; then
    line cuDNN "$cudnn, front end $front_end: attention of long documents (bf16)"
elif [ -n "$cudnn" ]; then
    line cuDNN "$cudnn, but not its front end${old:+ ($old is older than 1.15)}. $own (pip install --no-deps --target <folder> nvidia-cudnn-frontend, then CUDNN_FRONTEND=<folder>)"
else
    line cuDNN "not found. $own (libcudnn9-dev-cuda-13, CUDNN=<folder>, or $wheels)"
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
