#!/bin/sh
# Several processes of the program, started by mpirun; one fails: the job ends soon, with one message that names it.
set -u
. test/cli.sh
if ! command -v mpirun >/dev/null; then
    skipped=1
    echo "[  SKIPPED ] all of it: NOT TESTED, because there is no mpirun"
    finish
    exit
fi
export WORK TRAIN
LIMIT=300 # s, on a busy machine

# Each process's command. RANK1_*: another folder, program or more options for rank 1 alone.
cat >"$WORK/rank.sh" <<'EOF'
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
echo $$ >"$WORK/pid.$rank"
program=$PROGRAM more=
[ "$rank" = 1 ] && { cd "${RANK1_FOLDER:-.}" && program=${RANK1_PROGRAM:-$PROGRAM} more=${RANK1_OPTIONS:-}; }
exec "$program" "$@" $more
EOF
PROGRAM=$(realpath "$TRAIN")
export PROGRAM
ranks() { # number, arguments
    p=$1
    shift
    ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=${LEAKS:-1} timeout -k 5 $LIMIT test/ranks/mpirun.sh "$p" sh "$WORK/rank.sh" "$@" >"$WORK/out" 2>"$WORK/err" </dev/null
    status=$?
}
# ends CODE PATTERN what: the job ended with this code and one matching message
ends() {
    says="^$(basename "$PROGRAM"): "
    lines=$(grep -c "$says" "$WORK/err")
    if [ $status != "$1" ]; then fail "$3: exit $status, not $1: $(head -c 300 "$WORK/err")"
    elif [ "$lines" != 1 ]; then fail "$3: $lines messages: $(grep "$says" "$WORK/err" | cut -c1-200)"
    elif ! grep "$says" "$WORK/err" | grep -qE -- "$2"; then fail "$3: $(grep "$says" "$WORK/err" | cut -c1-300)"
    elif grep -qE 'Sanitizer|runtime error' "$WORK/err"; then fail "$3: sanitizer report"
    else pass; fi
}
# refused RANKS ARGUMENTS CODE PATTERN WHAT; done_by RANKS ARGUMENTS WHAT
refused() {
    ranks "$1" $2
    ends "$3" "$4" "$5"
}
done_by() {
    ranks "$1" $2
    check "$3: $(cat "$WORK/err")" [ "$status $(cat "$WORK/out")" = "0 done" ]
}

# ---- who prints --------------------------------------------------------------------------------------------------------------
LEAKS=1
ranks 2 bp --init $TINY --seq-len 32 --batch 2 --json
check "two ranks: exit $status" [ $status = 0 ]
check "two ranks: one JSON object" [ "$(grep -c '"loss"' "$WORK/out")" = 1 ]
check "two ranks: one header" [ "$(grep -c '^model ' "$WORK/err")" = 1 ]
LEAKS=0
ranks 3 --help
check "--help of three ranks: exit $status" [ $status = 0 ]
check "--help is shown once" [ "$(grep -c '^usage' "$WORK/out")" = 1 ]
refused 1 "bp --init $TINY --seq-len 32 --nonsense" 2 '^train: unknown option --nonsense' "one process under a launcher is alone"

# ---- errors ------------------------------------------------------------------------------------------------------------------
refused 3 "bp --init $TINY --seq-len 32 --nonsense" 2 'rank 0 on [^ ]*: unknown option --nonsense' "all ranks refuse an option"
refused 3 "bp --model $WORK/nowhere --seq-len 32" 1 'rank 0 on [^ ]*: .*nowhere' "all ranks miss the model"
RANK1_OPTIONS='--seed 3' refused 3 "bp --init $TINY --seq-len 32" 2 "rank 1 on [^ ]* has other arguments.*'--seed'" "other options"
RANK1_OPTIONS='--help' refused 3 "bp --init $TINY --seq-len 32 --timeout 600" 2 "rank 1 on [^ ]* has other arguments.*'--help'" "one rank shows its help"
cp "$TRAIN" "$WORK/other" && echo >>"$WORK/other"
RANK1_PROGRAM=$WORK/other refused 3 "bp --init $TINY --seq-len 32" 1 "rank 1 on [^ ]* has other program file" "another program"
mkdir "$WORK/folder"
RANK1_FOLDER=$WORK/folder refused 3 "train --init $TINY --data $SHARD --seq-len 32 --batch 3 --steps 1000000 --out none --timeout 60" 1 "rank 1 on [^ ]*: .*$SHARD" "a file that one rank misses"

# ---- a rank that is killed, or stopped ---------------------------------------------------------------------------------------
# in_training SIGNAL TIMEOUT: sends it to rank 1 once rank 0 has shown steps
in_training() {
    rm -f "$WORK"/pid.* "$WORK/out"
    (
        for i in $(seq 1200); do
            sleep 0.1
            [ -s "$WORK/out" ] && grep -q '^step' "$WORK/out" && break
        done
        kill -"$1" "$(cat "$WORK/pid.1")"
    ) &
    ranks 2 train --init $TINY --data $SHARD --seq-len 32 --batch 2 --steps 1000000 --out none --timeout $2
    wait
}
in_training KILL 60
ends 137 'rank 0 on [^ ]*: rank 1 on [^ ]* was killed' "a rank that is killed"
in_training STOP 5
ends 1 'rank 0 on [^ ]*: rank 1 on [^ ]* did not reach .* within [0-9]+ s and does not answer' "a rank that is stopped"

# Of 2 ranks that share a single document, one works longer than --timeout while the other waits.
make_documents "$WORK/long.bin" 96 9000 5
PROGRAM=$(realpath "${TRAIN_PLAIN:-$TRAIN}")
ranks 2 bp --init "$(echo $TINY | sed s/layers=2/layers=12/)" --data "$WORK/long.bin" --seq-len 9000 --chunk 128 --timeout 1 --json
check "a rank with all the work: exit $status: $(grep '^train: ' "$WORK/err")" [ $status = 0 ]
check "it took $(json seconds) s, --timeout is 1 s" awk -v s="$(json seconds)" 'BEGIN { exit !(s > 1.2) }'

# ---- waiting, in a program that does nothing else ----------------------------------------------------------------------------
cat >"$WORK/waits.c" <<'EOF'
#ifdef GPUS
#include "llmc/ops/ops.h"
#include "llmc/ranks/dist.h"
#include <signal.h>
#include <unistd.h>
#else
#include "llmc/ranks/dist.c"
#endif
static int is(const char *what, const char *word) { return !strcmp(what, word); }
// waits WHAT [WHAT of rank 1]
int main(int argc, char **argv) {
    const char *what;
    char mine[8] = "", all[32];
    int i;
    dist_start();
    dist_split(dist_ranks());
    dist_timeout(2);
    what = argv[dist_rank() == 1 && argc > 2 ? 2 : 1];
    if (is(what, "exit")) exit(0);
#ifdef GPUS
    Summed *x = (Summed *)ops_device->allocate(4000); // connects the ranks
    ops_device->zero(x, 4000);
    if (is(what, "stop")) raise(SIGSTOP);
    if (is(what, "fall")) setenv("CUDA_FAULT", "719 1 on", 1), what = "sum";
    if (is(what, "all-gather")) ops_device->await(ops_device->all_gather(RANKS_ALL, x, 1000, 32, 4));
    for (i = 0; i < 400 && is(what, "busy"); i++) usleep(10000), ops_device->copy_out(mine, x, sizeof(mine));
    if (is(what, "sum") || is(what, "busy")) ops_device->await(ops_device->reduce_scatter(RANKS_ALL, x, 1000, 32));
    ops_device->finish();
#else
    for (i = 0; i < 400 && is(what, "busy"); i++) usleep(10000), watch_at_work();
    if (is(what, "late")) sleep(4);
    if (is(what, "late") || is(what, "busy")) dist_barrier();
    if (is(what, "check")) dist_check("data", 1);
    if (is(what, "differ")) dist_check("data", 2);
#endif
    if (is(what, "barrier")) dist_barrier();
    if (is(what, "gather")) dist_gather(RANKS_SEQUENCE, mine, sizeof(mine), all);
    printf("done\n");
    dist_stop();
    return 0;
}
EOF
if ${CC:-cc} -std=gnu11 -D_GNU_SOURCE -DHAVE_MPI $(scripts/mpi_flags.sh compile) -Wall -I. "$WORK/waits.c" $(scripts/mpi_flags.sh link) -lm -o "$WORK/waits" &&
    ${CC:-cc} -std=gnu11 -D_GNU_SOURCE -Wall -Wno-unused-function -I. "$WORK/waits.c" -lm -o "$WORK/waits_alone"; then pass; else fail "waits.c does not compile"; fi
PROGRAM=$WORK/waits
done_by 3 "barrier" "a barrier"
refused 3 "barrier gather" 1 'rank 0 on [^ ]*: deadlock: waiting for a barrier for .* while rank 1 on [^ ]* waits for a gather' "ranks that wait in different places"
done_by 3 "barrier busy" "a rank that is at work for longer than --timeout"
refused 3 "barrier late" 1 'rank 1 on [^ ]* did not reach a barrier' "a rank that computes for too long"
refused 3 "barrier exit" 1 'waiting for a barrier for .* while rank 1 on [^ ]* waits for the end of the program' "a rank that ends early"
refused 3 "check differ" 1 'rank 1 on [^ ]* has other data than rank 0' "other data"
PROGRAM=$WORK/waits_alone
refused 3 "barrier" 1 'built without MPI' "a build without MPI under a launcher"
check "a build without MPI, alone" [ "$("$WORK/waits_alone" barrier)" = "done" ]
PROGRAM=$WORK/waits
OMPI_COMM_WORLD_SIZE='' PMI_SIZE=2 PMI_RANK=0 "$WORK/waits" barrier >"$WORK/out" 2>"$WORK/err"
status=$?
ends 1 'MPI does not connect them' "the launcher of another MPI"

# ---- waiting for GPUs, with pretended CUDA and NCCL (nccl_on_mpi.h) ------------------------------------------------------------
if [ ! -f "${NCCL_OPS:-}" ]; then
    skipped=$((skipped + 1))
    echo "[  SKIPPED ] ranks with GPUs: NOT TESTED, because there are no headers of CUDA and of NCCL, 2.18 or later"
    finish
    exit
fi
if ${CC:-cc} -std=gnu11 -D_GNU_SOURCE -DGPUS -Wall -fsanitize=address,undefined -I. "$WORK/waits.c" "$NCCL_OPS" -fopenmp $(scripts/mpi_flags.sh link) -lstdc++ -lm -o "$WORK/gpus"; then pass; else fail "waits.c does not compile with GPUs"; fi
PROGRAM=$WORK/gpus
done_by 2 "sum" "a sum between GPUs"
done_by 2 "sum busy" "a GPU's rank that is at work for longer than --timeout"
NCCL_ON_MPI_DEVICES=1 refused 2 "sum" 1 'rank 0 on [^ ]*: 1 GPU for the 2 ranks on [^ ]*, ranks 0 and 1 would share one' "fewer GPUs than ranks"
NCCL_ON_MPI_DEVICES=0 refused 2 "sum" 1 'rank 0 on [^ ]*: no GPU was found' "no GPU"
refused 2 "sum stop" 1 'rank 0 on [^ ]*: rank 1 on [^ ]* did not reach a reduce-scatter, no. [0-9]+ within [0-9]+ s and does not answer' "a GPU's rank that is stopped"
refused 2 "sum barrier" 1 'deadlock: waiting for a reduce-scatter, no. [0-9]+ for .* while rank 1 on [^ ]* waits for a barrier' "a GPU's rank that waits elsewhere"
refused 2 "sum all-gather" 1 'asks for another collective' "ranks that ask for different collectives"
NCCL_ON_MPI_FAULT=hang refused 2 "sum" 1 'all ranks have waited in a reduce-scatter, no. [0-9]+ for' "a collective that does not end"
refused 2 "sum fall" 1 'rank 1 on [^ ]*: [^ ]*: .* \(cudaErrorLaunchFailure\); see .dmesg' "a rank whose GPU fails, while another one waits for it"
NCCL_ON_MPI_FAULT=error refused 2 "sum" 1 'NCCL, between the ranks: remote error: a link is down' "an error of NCCL"

# ---- passes over pretended GPUs: which ranks they connect ------------------------------------------------------------------------
PROGRAM=$WORK/train
flags="-std=gnu11 -D_GNU_SOURCE -DPRECISION_FP32 -DHAVE_MPI $(scripts/mpi_flags.sh compile) -I. -fopenmp"
libraries="$(scripts/mpi_flags.sh link) -lcjson -lpcre2-8 -lstdc++ -lm -pthread"
if ${CC:-cc} $flags -x c -c train_gpt.cu -o "$WORK/train.o" && ${CC:-cc} -fsanitize=address,undefined -fopenmp "$WORK/train.o" "$NCCL_OPS" $libraries -o "$PROGRAM"; then pass; else fail "train_gpt.cu does not compile with GPUs"; fi
# loss FAULT FAMILY OPTIONS: of four ranks, with NCCL_ON_MPI_FAULT
model=hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,head_dim=8,vocab_size=33
loss() {
    NCCL_ON_MPI_FAULT=$1 ranks 4 bp --init "$2" --batch 2 --seq-len 64 --json --quiet $3
    sed -n 's/.*"loss": *\([^,]\{6\}\).*/\1/p' "$WORK/out"
}
for family in "llama,$model" "mistral,$model,sliding_window=8"; do
    near=$(loss far "$family" "--sp 4 --kv ring") old=$(loss old "$family" "--sp 2 --zero 3")
    check "$family: ${near:-neighbours are not enough}, with NCCL before 2.18 ${old:-nothing}: $(head -c 300 "$WORK/err")" [ "${near:-none}" = "$old" ]
done
check "a window of more ranks is $(loss far "mistral,$model,sliding_window=20" "--sp 4")" grep -q 'a pair that is not warm' "$WORK/err"
ranks 2 doctor --init "llama,$model" --seq-len 16
check "doctor of two GPUs: $(grep WRONG "$WORK/out")" grep -q '^ok *connections  *2 ranks: .* GiB$' "$WORK/out"

finish
