#!/bin/sh
# test/ranks/mpirun.sh P program [argument...]: P processes of one thread each on this machine, for any number of cores,
# also as root of a container. Exit status: the first failing process's; 77: there is no mpirun. A failed assertion on
# one rank of a test program ends all, as the others would wait for it.
command -v mpirun >/dev/null || { echo "there is no mpirun" >&2; exit 77; }
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export CMOCKA_TEST_ABORT=1
# Open MPI's own leaks (leaks.supp) are recognised by their whole call stacks.
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:fast_unwind_on_malloc=0"
ranks=$1
shift
case $(mpirun --version 2>/dev/null) in
*'Open MPI'*) exec mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n "$ranks" "$@" ;;
*) exec mpirun -n "$ranks" "$@" ;;
esac
