#!/bin/sh
# Ratios of speed, never absolute times: make bench [LLMC=<llm.c checkout>] [REPEATS=7]
# Each figure is a median over repeats that take turns with the alternative. Close other programs first. As on a machine with AVX2
# and no AVX-512: ONEDNN_MAX_CPU_ISA=AVX2 make bench NATIVE=-march=haswell, in a checkout of its own; llm.c is compiled for it, too.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
CC=${CC:-cc}
REPEATS=${REPEATS:-7}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export OMP_NUM_THREADS

for precision in fp32 bf16; do
    ${MAKE:-make} --no-print-directory BACKEND=cpu PRECISION=$precision build/cpu-$precision/bench build/cpu-$precision/bench_ops >/dev/null
done

echo "== decoder layers of Qwen3-0.6B's widths, fp32, $OMP_NUM_THREADS threads, against the faster 2048^3 product, oneDNN's or ours"
build/cpu-fp32/bench layers "$REPEATS"
build/cpu-fp32/bench methods "$REPEATS"

echo "== attention, fp32, against the same product"
build/cpu-fp32/bench_ops attention "$REPEATS"

echo "== the head and its loss, fp32"
build/cpu-fp32/bench_ops head "$REPEATS"

echo "== linear attention, fp32, against the same product and the rate of reading memory"
build/cpu-fp32/bench_ops delta "$REPEATS"

echo "== matrices in 4 bits, fp32 and bf16, against the rate of a copy"
build/cpu-fp32/bench_ops dequantise "$REPEATS"
build/cpu-bf16/bench_ops dequantise "$REPEATS"

echo "== bf16 build against fp32 build, the same layers, T = 2048"
i=0
while [ $i -lt 5 ]; do
    a=$(build/cpu-fp32/bench seconds 3) b=$(build/cpu-bf16/bench seconds 3)
    echo "$a $b" | awk '{ print $1 / $2 }'
    i=$((i + 1))
done | median | sed 's/^/bf16: /; s/$/ times as fast as fp32/'

if [ -z "${LLMC:-}" ]; then
    echo "== llm.c: skipped; give LLMC=<checkout> to compare with its CPU trainer"
    exit 0
fi
echo "== GPT-2 124M shape, fp32, one training step, against llm.c's train_gpt2.c built with its own flags, ${NATIVE:--march=native}"
folder=build/bench-llmc
mkdir -p $folder/dev/data/tinyshakespeare
# Random weights and tokens in llm.c's formats: values do not matter for time.
$CC -O2 -o $folder/make_llmc_files dev/make_llmc_files.c -lm
[ -f $folder/gpt2_124M.bin ] || (cd $folder && ./make_llmc_files)
for shape in "4 64" "1 1024"; do
    set -- $shape
    # its shape is a constant in main()
    sed "s/int B = 4;/int B = $1;/; s/int T = 64;/int T = $2;/; s/step <= 40/step <= 3/; s/step % 10 == 0/0/; s/step > 0 \&\& step % 20 == 0/0/" \
        "$LLMC/train_gpt2.c" >$folder/train_gpt2_$1_$2.c
    $CC -Ofast ${NATIVE:--march=native} -fopenmp -DOMP -I"$LLMC" -Wno-unused-result $folder/train_gpt2_$1_$2.c -lm -lgomp -o $folder/train_gpt2_$1_$2
    i=0
    while [ $i -lt 3 ]; do
        theirs=$(cd $folder && ./train_gpt2_$1_$2 | sed -n 's/^step [1-9].*took \([0-9.]*\) ms.*/\1/p' | median)
        for method in stream checkpoint full; do
            ours=$(build/cpu-fp32/bench gpt2 $1 $2 $method 5)
            echo "$method $theirs $ours" | awk '{ print $1, $2 / 1000 / $3 }'
        done
        i=$((i + 1))
    done >$folder/ratios
    for method in stream checkpoint full; do
        ratio=$(sed -n "s/^$method //p" $folder/ratios | median)
        echo "llm.c: B = $1, T = $2: $method has $ratio times its tokens/s"
    done
done
