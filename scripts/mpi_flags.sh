#!/bin/sh
# scripts/mpi_flags.sh compile|link: prints MPI's compiler or linker flags, from MPICC (mpicc); nothing if there is none, or with
# MPI=0. Open MPI prints them by --showme, MPICH and its relatives by -show.
set -u
mpicc=${MPICC:-mpicc}
[ "${MPI:-}" = 0 ] && exit 0
command -v "${mpicc%% *}" >/dev/null || exit 0
case $1 in compile) kind='^-[ID]' ;; link) kind='^-[lL]|^-Wl,' ;; *) echo "mpi_flags.sh: compile or link, not '$1'" >&2; exit 2 ;; esac
flags=$($mpicc --showme:$1 2>/dev/null) || flags=$($mpicc -show 2>/dev/null | tr ' ' '\n' | grep -E -- "$kind")
echo $flags
