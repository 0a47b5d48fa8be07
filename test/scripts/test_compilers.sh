#!/bin/sh
# Checks that every unit, product and tests, compiles with the other one of gcc and clang, with the build's warnings as errors. Reads the
# table of rows; one command checks all programs of a precision and an op set (-fsyntax-only: no optimiser warnings).
case ${CC:-cc} in *clang*) CC=gcc CXX=g++ ;; *) CC=clang CXX=clang++ ;; esac
command -v $CC >/dev/null && command -v $CXX >/dev/null ||
    { printf '[  SKIPPED ] NOT TESTED, because there is no %s\n0 passed, 0 failed, 1 skipped\n' $CC; exit; }
. test/build.sh
find_libevent
passed=0 failed=0
check() { # name, command...
    name=$1
    shift
    if "$@" -fsyntax-only; then passed=$((passed + 1)); else echo "FAILED: $CC: $name"; failed=$((failed + 1)); fi
}
rows=$(sed 's/#.*//; s/ other / onednn /' test/rows.txt | awk '$3 ~ /^(onednn|plain|cuda|cudnn|nccl)$/ { print $2, $3, $1 }' | sort -u)
for row in $(echo "$rows" | cut -d ' ' -f 1,2 | sort -u | tr ' ' /); do
    precision=${row%/*} library=${row#*/} flags=$(flags_of "$precision" "$library")
    case $row in
    */cuda | */cudnn) check "$row, op set" $CXX -x c++ $flags $as_cxx llmc/ops/cuda/ops_cuda.cu ;;
    */nccl) nccl=$(nccl_flags) && check "$row, op set" $CXX $flags $as_cxx $nccl test/emulate/ops_nccl.cc ;;
    */onednn | */plain) check "$row, op set" $CC -std=gnu11 $flags llmc/ops/cpu/ops_cpu.c ;;
    esac
    case $row in */onednn) check "$row, train" $CC -std=c11 $flags $libevent -x c train_gpt.cu ;; esac
done
# Programs, which know no precision, once for each kind of op set; groups as the one file that they are compiled as
joined=$(mktemp -d)
trap 'rm -rf "$joined"' EXIT
for library in onednn cuda cudnn; do
    case $library in
    onednn) programs=$(echo "$rows" | awk '$2 !~ /^cu/ { print $3 }' | sort -u) c="data/*.c dev/*.c test/*/[!t]*.c test/ops/test_gpu_large.c" ;; # and units without a row
    *) programs=$(echo "$rows" | awk -v library=$library '$2 == library { print $3 }' | sort -u) c= ;;
    esac
    cc= groups_here=
    for program in $programs; do
        group=$(group_of "$program")
        source=$(ls test/*/test_"$program".c test/*/test_"$program".cc 2>/dev/null)
        case $group$source in
        *.cc) cc="$cc $source" ;;
        test/*) c="$c $source" ;;
        *) case "$groups_here " in *" $group "*) ;; *) groups_here="$groups_here $group" c="$c $joined/$group.c"; joined_source "$group" >"$joined/$group.c" ;; esac ;;
        esac
    done
    flags=$(flags_of any $library)
    check "programs, $library" $CC -std=gnu11 $flags $c
    [ -z "$cc" ] || check "programs, $library, C++" $CXX $flags $as_cxx $cc
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
