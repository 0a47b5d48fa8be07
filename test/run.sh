#!/bin/sh
# Builds and runs the rows of test/rows.txt and prints each as it ends: test/run.sh [--quick] [--since REV] [NAME ...]; without a NAME all of them.
#
#   --quick          rows marked `quick`, a few cases of each: whether every gradient still holds (make test-quick)
#   --since REV      rows that read a file changed since this commit, committed or not (make test-since REV=HEAD)
#   --gpu            rows of a GPU, one at a time, recorded in dev/results/ (make test-gpu); --train, --sanitizer: the rows of ./train
#                    and of compute-sanitizer
#   --rows           prints the rows and runs nothing
#   --build          builds the rows and runs nothing; with --gpu nvcc is enough
#
# A row closes with `N passed, N failed, N skipped`; without this line it has failed. The last line has the sums. Environment: CC, JOBS
# (rows at a time), ALL_CASES=1 (full products of cases); with --gpu LIMIT (seconds of a program), RESULTS, COMMIT.
set -u
cd "$(dirname "$0")/.." || exit 1
# Our own leaks are failures; oneDNN and OpenMP keep their pools until the end. 99: exit code of a sanitizer's finding, also in a child.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:exitcode=99:allocator_may_return_null=1:strict_string_checks=1:quarantine_size_mb=32:allocator_release_to_os_interval_ms=-1}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=test/leaks.supp:print_suppressions=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-halt_on_error=1:print_stacktrace=1}
export OMP_WAIT_POLICY=passive
export LC_ALL=C # messages of compilers and tools, orders of names
limit='timeout -k 10 900' # what hangs fails
[ -z "${LIMIT:-}" ] || limit="timeout -k 10 $LIMIT"
. test/build.sh
run=${TEST_RUN:-build/test-run.$$} # the rows of this run, and messages between the driver and its jobs

# ---- one row ----------------------------------------------------------------------------------------------------------------------
# Returns whether the files below a folder are those of the upstream branch, or of the commit before the last.
unchanged() {
    upstream=${since:-${upstream:-$(git merge-base HEAD '@{upstream}' 2>/dev/null)}}
    [ "$upstream" != "$(git rev-parse HEAD 2>/dev/null)" ] || upstream=HEAD~1
    git diff --quiet "${upstream:-HEAD~1}" -- $(echo "$1" | tr , ' ') 2>/dev/null
}
# Parses a line of the table: program, precision, library (its op set), ranks, threads, tests, name, quick, all, words;
# sets its log and label.
read_row() {
    program=$1 precision=$2 library=$3 name=$1 ranks= threads=1 tests= quick= all= words= reads= bare=
    shift 3
    for word; do
        case $word in
        ranks=*) ranks=${word#*=} ;;
        threads=*) threads=${word#*=} ;;
        tests=*) tests=$(echo "${word#*=}" | tr , ' ') ;;
        as=*) name=${word#*=} ;;
        quick) quick=yes ;;
        quick=*) unchanged "${word#*=}" || quick=yes ;;
        all=*) unchanged "${word#*=}" && all=yes ;;
        reads=*) reads=$(echo "${word#*=}" | tr , ' ') ;;
        all) all=yes ;;
        bare) bare=yes ;;
        *) words="$words $word" ;;
        esac
    done
    case $library in
    script) log=build/test-scripts/$program label=$name ;;
    gpu) log=build/test-gpu-$precision/$name label="$name ($precision)" ;;
    gpu-script) log=build/test-gpu-$precision/script-$name label="$name ($precision)" ;;
    sanitizer)
        name="compute-sanitizer $program $(echo $words | cut -d ' ' -f 1)"
        log=build/test-gpu-$precision/sanitizer-$program-$(echo "$words" | cksum | cut -d ' ' -f 1) label="$name ($precision)"
        ;;
    *)
        log=$(folder_of "$precision" "$library")/test_$program${ranks:+-$ranks}
        [ "$name" = "$program" ] || log=$log-$name
        label="$name ($precision$([ "$library" = onednn ] || echo ", $library")${ranks:+, $ranks ranks})"
        ;;
    esac
}
skipped() { printf '[  SKIPPED ] NOT TESTED, because there is no %s\n0 passed, 0 failed, 1 skipped\n' "$1"; } # a row, reason
other_compiler() { case $compiler in *clang*) echo gcc ;; *) echo clang ;; esac; }

# Compiles the current row's program; its log goes to build.log. Status 77: it cannot be built here.
build_row() {
    case $library in
    gpu) build_gpu_program "$program" "$precision" >"$log.build.log" 2>&1 ;;
    script | gpu-script | sanitizer) ;;
    other)
        command -v "$(other_compiler)" >/dev/null || return 77
        mkdir -p "${log%/*}"
        CC=$(other_compiler) CXX= test/run.sh --compile "$program" "$precision" onednn >"$log.build.log" 2>&1
        ;;
    nccl)
        nccl_flags >/dev/null || return 77
        build_program "$program" "$precision" nccl >"$log.build.log" 2>&1
        ;;
    *) build_program "$program" "$precision" "$library" >"$log.build.log" 2>&1 ;;
    esac
}
run_program() { # the current row's program
    file=$(folder_of "$precision" "$library")/test_$program
    case $library in
    gpu) file=build/test-gpu-$precision/test_$program ;;
    other) file=$(CC=$(other_compiler) CXX= test/run.sh --folder "$precision" onednn)/test_$program ;;
    esac
    for part in ${tests:-all}; do
        [ "$part" = all ] && part=
        if [ -z "$ranks" ]; then
            $limit "$file" ${part:+"$part"} </dev/null
        elif [ -n "$mpi_libraries" ] && command -v mpirun >/dev/null; then
            $limit test/ranks/mpirun.sh "$ranks" "$file" </dev/null
        else
            skipped 'MPI with mpirun'
        fi || status=$?
    done
}
run_sanitizer() { # one test, passed unless something is reported
    case $words in *train\ *) folder=build/cuda-$precision ;; *) folder=build/test-gpu-$precision ;; esac
    TINY=llama,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,vocab_size=96
    command -v compute-sanitizer >/dev/null || { skipped 'compute-sanitizer (Debian, Ubuntu: cuda-sanitizer-13-0 from NVIDIA)'; return; }
    timeout -k 10 65 compute-sanitizer --tool "$program" --error-exitcode 9 "$folder/"$(eval echo "$words") >"$log.report" 2>&1
    status=$?
    grep -E '^=========|FAILED|train: ' "$log.report" | grep -vE 'COMPUTE-SANITIZER|ERROR SUMMARY: 0' | head -n 20
    case $status in
    0) echo '1 passed, 0 failed, 0 skipped' ;;
    124 | 137) # keeps the counts so far
        status=0
        if grep -E '^=========' "$log.report" | grep -qvE 'COMPUTE-SANITIZER|ERROR SUMMARY: 0'; then echo '0 passed, 1 failed, 0 skipped'
        else skipped 'time: it was not through after 65 s'; fi
        ;;
    *) echo '0 passed, 1 failed, 0 skipped' ;;
    esac
}
run_row() { # the current row: its log, with status and CPU time beside it
    mkdir -p "${log%/*}"
    rm -f "$log.status"
    (
        build_row
        case $? in
        0) status=0 ;;
        77)
            status=77
            skipped "$([ "$library" = other ] && other_compiler || echo 'MPI with the headers of CUDA and of NCCL, 2.18 or later')"
            ;;
        *) status='does not compile' ;;
        esac
        times >"$log.build_times"
        if [ "$status" = 0 ]; then
            case $library in gpu | gpu-script | sanitizer) ;; *) export OMP_NUM_THREADS="$threads" ;; esac
            case $library in
            script) $limit sh $(ls test/*/test_"$program".sh dev/*/test/test_"$program".sh 2>/dev/null) </dev/null || status=$? ;;
            gpu-script)
                TRAIN=build/cuda-$precision/train
                export TRAIN TRAIN_PLAIN="$TRAIN" TEST_DEVICE=gpu TEST_PRECISION="$precision"
                $limit sh test/*/test_"$program".sh </dev/null || status=$?
                ;;
            sanitizer) run_sanitizer ;;
            *) run_program ;;
            esac
        fi
        [ "$status" = 77 ] && status=0
        echo "$status" >"$log.status"
        times >"$log.times"
    ) >"$log.log" 2>&1
}

# ---- commands that the driver below runs through this file --------------------------------------------------------------------------
case ${1:-} in
--folder) folder_of "$2" "$3"; exit ;;
--compile) build_ops "$3" "$4" && build_program "$2" "$3" "$4"; exit ;;
--program) # plain|sanitized|python|joined|gpu_ops and arguments: shared by many rows
    what=$2
    shift 2
    log=build/test-scripts/$what${1:+-$1}${2:+-$2}${3:+-$3}
    rm -f "$log.built"
    (build_"$what" "$@" >"$log.log" 2>&1 && : >"$log.built"; times >"$log.times")
    echo "program $log $what $*"
    exit 0
    ;;
--job) # numbers of rows that share a program
    shift
    for number; do
        read_row $(sed -n "${number}p" "$run/rows")
        run_row
        echo "row $number"
    done
    exit
    ;;
--build-job)
    shift
    for number; do
        read_row $(sed -n "${number}p" "$run/rows")
        mkdir -p "${log%/*}"
        build_row || [ $? = 77 ] || echo "unbuilt $number"
    done
    exit 0
    ;;
esac

# ---- arguments ----------------------------------------------------------------------------------------------------------------------
gpu= build_only= quick_only= rows_only= names= since=
for word; do
    case $since-$word in
    next-*) since=$word; continue ;;
    esac
    case $word in
    --since) since=next ;;
    --gpu) gpu=yes ;;
    --quick) quick_only=yes ;;
    --build) build_only=yes ;;
    --rows) rows_only=yes ;;
    --train) names="$names bp train train_documents cli multi" ;;
    --sanitizer) names="$names sanitizer" ;;
    -*) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    *) names="$names $word" ;;
    esac
done
[ -n "${JOBS:-}" ] || JOBS=$([ -n "$gpu" ] && nproc || echo 2)
export JOBS TEST_RUN="$run"
trap 'rm -rf "$run"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$run" build/test-scripts
[ -z "$quick_only" ] || export QUICK=1
# Which rows read a file that changed since a commit: by the includes of their programs and op sets (the compiler's -MM), by the paths
# in their text, and by `reads` in the table. Scripts read all that ./train includes; a bare one without `reads` reads everything.
if [ -n "$since" ]; then
    git diff --name-only "$since" >"$run/changed" && git ls-files --others --exclude-standard >>"$run/changed" ||
        { echo "run.sh: --since $since: no commit of this name" >&2; exit 2; }
fi
touched() { # lines: files and folders
    awk -v list="$run/changed" 'BEGIN { while ((getline name <list) > 0) changed[name] }
        { sub(/\/$/, ""); for (name in changed) if (name == $0 || index(name, $0 "/") == 1) { found = 1; exit } } END { exit !found }'
}
includes_of() { # compiler, options and a file
    kept=$run/includes-$(echo "$@" | cksum | cut -d ' ' -f 1)
    [ -e "$kept" ] || "$@" -I. -MM 2>/dev/null | sed 's/^[^ ]*://; s/\\$//' | tr ' ' '\n' | grep -v '^/' >"$kept"
    cat "$kept"
}
paths_in() { grep -ohE '(test|dev|data|scripts|llmc|streambp.h|train_gpt.cu)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' "$@"; }
reads_of_row() {
    echo test/run.sh
    echo test/build.sh
    case $library in
    script | gpu-script | sanitizer)
        script=$(ls test/*/test_"$program".sh dev/*/test/test_"$program".sh 2>/dev/null)
        echo "$script"
        if [ -n "$reads" ]; then echo "$reads" | tr ' ' '\n'; return; fi
        if [ -n "$bare" ]; then cat "$run/changed"; return; fi
        paths_in $script test/cli.sh "${script%.sh}.py" 2>/dev/null
        cat $script "${script%.sh}.py" 2>/dev/null | grep -q 'README\|\.md' && grep '\.md$' "$run/changed"
        printf 'Makefile\ndata\nscripts\ntest/cli.sh\ntest/golden\n'
        includes_of "$CC" $(flags_of fp32 onednn) -x c train_gpt.cu
        includes_of "$CC" $(flags_of fp32 onednn) llmc/ops/cpu/ops_cpu.c
        ;;
    *)
        kind=$library
        [ "$kind" = gpu ] && kind=cuda
        source=$(ls test/*/test_"$program".c 2>/dev/null)
        if [ -n "$source" ]; then includes_of "$CC" $(flags_of "$precision" "$kind") "$source"
        else includes_of "$CXX" $(flags_of "$precision" "$kind") $as_cxx test/*/test_"$program".cc; fi >"$run/source"
        cat "$run/source"
        paths_in $(grep '^test/' "$run/source")
        includes_of "$CC" $(flags_of fp32 onednn) llmc/ops/cpu/ops_cpu.c
        case $kind in cuda | cudnn | nccl) printf 'llmc/ops/cuda\ntest/emulate\n' ;; esac
        ;;
    esac
}
sed 's/#.*//' test/rows.txt | while read -r program precisions rest; do
    [ -n "$program" ] || continue
    for precision in $(echo "$precisions" | tr , ' '); do
        line="$program $precision $rest"
        read_row $line
        case $library in gpu | gpu-script | sanitizer) on_gpu=yes ;; *) on_gpu= ;; esac
        [ "$on_gpu" = "$gpu" ] || continue
        [ -n "$quick_only" ] && [ -z "$quick" ] && continue
        case $names${ALL_CASES:-} in
        '' | 0) [ -z "$all" ] || { echo "$label" >>"$run/left"; continue; } ;;
        esac
        case "$names " in ' ' | *" $name "* | *" $program "* | *" $library "* | *" $name/$precision "* | *" $program/$precision/$library "*)
            [ -z "$since" ] || reads_of_row </dev/null | touched || continue
            echo "$line"
            ;;
        esac
    done
done >"$run/rows"
for word in $names; do
    [ -z "$gpu" ] || cut -d ' ' -f 1,3- "$run/rows" | grep -qwe "${word%%/*}" || { echo "test-gpu: $word is no part of it; see test/rows.txt" >&2; exit 2; }
done
rows=$(wc -l <"$run/rows")
[ "$rows" -gt 0 ] || [ -z "$since" ] || { echo "run.sh: no row reads what changed since $since"; exit 0; }
[ "$rows" -gt 0 ] || { echo "run.sh: no row of test/rows.txt is called$names" >&2; exit 2; }
[ -z "$rows_only" ] || { cat "$run/rows"; exit 0; }
needs_train() { grep ' script' "$run/rows" | grep -qvw bare; } # make builds the op set of a GPU's rows

if [ -n "$gpu" ]; then . test/gpu.sh; else
    TRAIN=$(folder_of fp32 onednn)/train TRAIN_PLAIN=build/cpu-fp32$compiler/train NCCL_OPS=$(folder_of fp32 nccl)/ops.o
    export TRAIN TRAIN_PLAIN NCCL_OPS
fi
# Builds shared objects first, the slowest first: op sets, and programs of scripts.
foundations() {
    if [ -n "$gpu" ]; then
        cut -d ' ' -f 2 "$run/rows" | sort -u | sed 's/^/--program gpu_ops /'
        return
    fi
    cut -d ' ' -f 1,3 "$run/rows" | grep -qxE '(prepare|example|recipes|wheel) script' && echo '--program python'
    { awk '$3 != "script" && $3 != "other" { print $2, $3 }' "$run/rows"; grep -q '^dist - script' "$run/rows" && echo 'fp32 nccl'; } |
        sort -u | awk '{ print ($2 ~ /^cu/ ? 0 : 1), $0 }' | sort -s -n -k 1,1 | sed 's/^[01]/--program ops/'
    { needs_train || grep -qE '^(dev|one_program) ' "$run/rows"; } && echo '--program plain' # their makes share its objects
}
# Programs of many rows: ./train, sanitized, and each group of test programs of which the rows have three or more.
shared_programs() {
    [ -z "$gpu" ] || return 0
    ! needs_train || echo '--program sanitized'
    cut -d ' ' -f 1-3 "$run/rows" | grep -vE ' (script|other)$' | sort -u |
        while read -r program precision library; do echo "$(group_of "$program") $precision $library"; done |
        sort | uniq -c | awk 'NF == 4 && $1 > 2 { print "--program joined", $2, $3, $4 }'
}
# Rows that share a program form one job; so do those of the other compiler that share an op set, which they build.
jobs() { awk '{ key = ($3 == "other" ? "" : $1 " ") $2 " " $3; if ($3 !~ /^(script|gpu-script|sanitizer)$/ && key in of) { line[of[key]] = line[of[key]] " " NR } else { of[key] = ++n; line[n] = NR } }
    END { for (i = 1; i <= n; i++) print "'"$1"'", line[i] }' "$run/rows"; }

# ---- reporting ----------------------------------------------------------------------------------------------------------------------
begin=$(date +%s)
minutes() { printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); }
stamp() { printf '[%3d/%d %6s] ' "$ended" "$rows" "$(minutes $(($(date +%s) - begin)))"; }
# CPU seconds of all finished children, from the builtin `times`
cpu_in() { awk 'NR == 2 { split($0, t, /[ms ]+/); printf "%.1f", 60 * (t[1] + t[3]) + t[2] + t[4] }' "$1" 2>/dev/null; }
passed=0 failed=0 skipped=0 ended=0
tell_program() { # log, what
    if [ -e "$1.built" ]; then
        [ "$(cpu_in "$1.times" | cut -d . -f 1)" -lt 1 ] || { stamp; echo "built $2   $(cpu_in "$1.times") s"; }
    else
        cat "$1.log"
        echo "FAILED: $2 does not compile"
        failed=$((failed + 1))
    fi
}
tell_row() { # prints the current row's line, and below it its failures
    status=$(cat "$log.status" 2>/dev/null || echo 'no status')
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log.log" |
        awk '{ p += $1; f += $3; s += $5 } END { if (NR) print p + 0, f + 0, s + 0 }')
    closings=$(grep -cE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log.log")
    fault=
    set -- ${line:-0 1 0}
    if [ "$status" = 'does not compile' ]; then fault="$label does not compile"
    elif [ -z "$line" ] || [ "$closings" -lt "$(echo "${tests:-all}" | wc -w)" ]; then
        fault="$label ended with status $status and no closing line"
        [ "$2" != 0 ] || set -- "$1" 1 "$3"
    elif [ "$status" != 0 ] && [ "$2" = 0 ]; then
        fault="$label ended with status $status"
        set -- "$1" 1 "$3"
    fi
    row_passed=$1 row_failed=$2 row_skipped=$3
    ended=$((ended + 1))
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    stamp
    printf '%-30s %s passed, %s failed, %s skipped   %s s' "$label" "$1" "$2" "$3" "$(cpu_in "$log.times")"
    built=$(cpu_in "$log.build_times")
    case $built in '' | 0.*) echo ;; *) echo " ($built s to build)" ;; esac
    if [ "$2" != 0 ]; then
        [ "$status" != 'does not compile' ] || cat "$log.build.log"
        grep -E 'FAILED|ERROR|runtime error|error:|Error:' "$log.log" | grep -v 'largest error' | head -n 40
        case $status in 0 | 1 | 'does not compile') ;; *) tail -n 30 "$log.log" ;; esac
        [ -z "$fault" ] || echo "FAILED: $fault"
    fi
    grep 'SKIPPED.*NOT TESTED' "$log.log" | sed "s|^|$label: |" >>"$run/skips"
    [ -z "$gpu" ] || record_row
}
tell() {
    while read -r what rest; do
        case $what in
        program) set -- $rest; log=$1; shift; tell_program "$log" "$*" ;;
        row) read_row $(sed -n "${rest}p" "$run/rows"); tell_row ;;
        unbuilt)
            [ -n "$build_only" ] || continue # is reported with its row
            read_row $(sed -n "${rest}p" "$run/rows")
            cat "$log.build.log"
            echo "FAILED: $label does not compile"
            failed=$((failed + 1))
            ;;
        esac
    done
    echo "$passed $failed $skipped" >"$run/sums"
}
: >"$run/skips"
parallel() { xargs -r -L 1 -P "$1" test/run.sh; }
{
    foundations | parallel "$JOBS"
    shared_programs | parallel "$JOBS"
    grep ' sanitizer test_ops' "$run/rows" | cut -d ' ' -f 2 | sort -u | sed 's/^/--program gpu_program ops /' | parallel 1
    [ -z "$gpu$build_only" ] || jobs --build-job | parallel "$JOBS"
    [ -n "$build_only" ] || jobs --job | parallel "$([ -n "$gpu" ] && echo 1 || echo "$JOBS")"
} | tell
times >"$run/times"

# ---- the last lines -----------------------------------------------------------------------------------------------------------------
read -r passed failed skipped <"$run/sums"
if [ -n "$build_only" ]; then
    [ "$failed" = 0 ] && echo "all of it compiles and links; nothing was run"
    exit
fi
if [ -s "$run/skips" ]; then
    echo
    echo "Skipped, so NOT TESTED here:"
    cat "$run/skips"
fi
[ ! -s "$run/left" ] || [ -n "$quick_only$since" ] || echo "
$(wc -l <"$run/left") rows were left out, of the same lines in another configuration or of kernels that did not change: ALL_CASES=1 runs them"
[ -z "$gpu" ] || record_end
echo
awk -v clock="$(minutes $(($(date +%s) - begin)))" 'NR == 2 { split($0, t, /[ms ]+/); user = 60 * t[1] + t[2]; system_ = 60 * t[3] + t[4]
    printf "%dm%02ds of CPU time (user %dm%02ds, system %dm%02ds), %s by the clock\n", (user + system_) / 60, (user + system_) % 60, user / 60, user % 60, system_ / 60, system_ % 60, clock }' "$run/times"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
