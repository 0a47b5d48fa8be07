/*
Preloaded into the ranks of a CPU run by critical_path.py: processor seconds without those of waits for other ranks, a
line before each exchange of all ranks on the host, to the file BUSY.RANK. Stands before MPI's own functions.

  mpicc -shared -fPIC dev/busy.c -o busy.so
*/
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double idle, begin = -1; // s; begin of the wait, -1: none

static double processor_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

// Polled until all are done (llmc/ranks/dist_watch.h).
int MPI_Testall(int n, MPI_Request request[], int *done, MPI_Status status[]) {
    if (begin < 0) begin = processor_seconds();
    const int error = PMPI_Testall(n, request, done, status);
    if (*done) idle += processor_seconds() - begin, begin = -1;
    return error;
}

int MPI_Iallgather(const void *own, int n, MPI_Datatype type, void *all, int each, MPI_Datatype types, MPI_Comm ranks,
                   MPI_Request *request) {
    static FILE *out;
    char path[4096];
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(path, sizeof(path), "%s.%d", getenv("BUSY"), rank);
    if (!out && !(out = fopen(path, "w"))) MPI_Abort(MPI_COMM_WORLD, 1);
    if (ranks == MPI_COMM_WORLD) fprintf(out, "%.9f\n", processor_seconds() - idle);
    return PMPI_Iallgather(own, n, type, all, each, types, ranks, request);
}
