#!/bin/sh
# make fuzz [TARGET='config shard ...'] [SECONDS=60]: runs libFuzzer on each target of test/fuzz/test_fuzz.c in turn.
# Its corpus stays in build/fuzz/TARGET for the next run. An input that breaks a target is build/fuzz/TARGET.found-*.
# Copied to test/fuzz/found/TARGET-NAME, it is tried by `make test`. CLANG names the compiler.
cd "$(dirname "$0")/../.." || exit 1
clang=${CLANG:-clang}
mkdir -p build/fuzz
printf 'int LLVMFuzzerTestOneInput(const char *a, unsigned long b);\nint LLVMFuzzerTestOneInput(const char *a, unsigned long b) { return a && b > 9; }\n' |
    $clang -fsanitize=fuzzer -x c - -o build/fuzz/try 2>/dev/null ||
    { echo "fuzz: $clang has no libFuzzer; install clang and its compiler-rt, or name another with CLANG="; exit 1; }
scripts/op_sets.sh cpu_fp32 >build/fuzz/op_sets.c
$clang -std=gnu11 -D_GNU_SOURCE -DPRECISION_FP32 -DFUZZING -O1 -g -Wno-unused-function -I. -fno-sanitize-recover=all \
    -fsanitize=fuzzer,address,undefined -fno-sanitize=null,object-size,pointer-overflow,alignment \
    -march=native -Wno-format-zero-length test/fuzz/test_fuzz.c llmc/ops/cpu/ops_cpu.c llmc/ranks/dist.c build/fuzz/op_sets.c -lcmocka -lcjson -lm -pthread -o build/fuzz/fuzz || exit 1
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 FUZZ_SEEDS FUZZ_TARGET
export TMPDIR=$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)
status=0
for FUZZ_TARGET in ${TARGET:-$(build/fuzz/fuzz)}; do
    FUZZ_SEEDS=build/fuzz/$FUZZ_TARGET
    mkdir -p "$FUZZ_SEEDS"
    build/fuzz/fuzz -max_total_time="${FUZZ_SECONDS:-60}" -timeout=10 -rss_limit_mb=4096 -max_len=65536 -print_final_stats=1 \
        -artifact_prefix="$FUZZ_SEEDS.found-" "$FUZZ_SEEDS" >"$FUZZ_SEEDS.log" 2>&1
    code=$?
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$FUZZ_SEEDS.log")
    echo "$FUZZ_TARGET: ${inputs:-0} inputs, $([ $code = 0 ] && echo nothing found || echo "FOUND, see $FUZZ_SEEDS.log")"
    [ $code = 0 ] || status=1
done
exit $status
