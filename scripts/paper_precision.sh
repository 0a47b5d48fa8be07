#!/bin/sh
# Repeats the StreamBP paper's precision experiment (arXiv 2506.03077) on small models: gradients of `full` and of `stream`, in bf16 and
# fp32, against float64. Same weights (representable in bf16, so every type reads the same numbers) and same random tokens.
#
#     scripts/paper_precision.sh     OUT=build/precision, SEQ_LEN=1024
#
# Builds the program and one in double with make, writes gradients below $OUT (replaced if they exist), prints a table of relative L2
# errors with the paper's values below, then the conditions. Exit status 1 if a condition does not hold. Needs python3.
set -eu
cd "$(dirname "$0")/.."
OUT=${OUT:-build/precision}
SEQ_LEN=${SEQ_LEN:-1024}
command -v python3 >/dev/null || { echo "paper_precision.sh: compares files with python3, which is not here; install it" >&2; exit 1; }

${MAKE:-make} -s BACKEND=cpu build/cpu/train build/cpu/pack_bytes
${MAKE:-make} -s BACKEND=cpu PRECISION=double build/cpu-double/train

# bp OUTPUT PRECISION METHOD [chunk options]: runs one pass over SEQ_LEN random tokens, the same in every type
bp() {
    bp_out=$1 bp_precision=$2 bp_method=$3
    shift 3
    bp_train=build/cpu/train
    [ "$bp_precision" != double ] || bp_train=build/cpu-double/train
    $bp_train bp --dtype "$bp_precision" --model "$weights" --seq-len "$SEQ_LEN" --seed 7 --method "$bp_method" --quiet \
        --grads-out "$bp_out" "$@" >/dev/null
}

status=0
experiment() { # NAME CONFIG
    dir=$OUT/$1
    rm -rf "$dir"
    mkdir -p "$dir"
    # A training step in bf16 at a learning rate of 0 saves its random initial weights unchanged.
    build/cpu/pack_bytes --out "$dir/text.bin" LICENSE >/dev/null
    build/cpu/train train --dtype bf16 --init "$2" --data "$dir/text.bin" --seq-len 64 --steps 1 --lr 0 --out "$dir/initial" --quiet 2>"$dir/log" ||
        { cat "$dir/log" >&2; exit 1; }
    weights=$dir/initial/checkpoint-00000001/model.bin

    echo "$2, $SEQ_LEN tokens"
    echo "relative L2 error of the gradient against float64 (double, full), in percent; stream: tokens of a chunk/logits chunk"
    bp "$dir/reference" double full
    set -- "double stream 100/64=$dir/double-stream"
    bp "$dir/double-stream" double stream --chunk 100 --logits-chunk 64
    for precision in bf16 fp32; do
        bp "$dir/$precision-full" $precision full
        set -- "$@" "$precision full=$dir/$precision-full"
        for chunk in 512/100 100/64 16/16; do
            file=$dir/$precision-stream-${chunk%/*}
            bp "$file" $precision stream --chunk "${chunk%/*}" --logits-chunk "${chunk#*/}"
            set -- "$@" "$precision stream $chunk=$file"
        done
    done
    python3 scripts/precision_table.py "$dir/reference" "$@" || status=1
    echo
}

experiment qwen3 qwen3,hidden_size=256,intermediate_size=768,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,head_dim=64,vocab_size=2048
experiment llama llama,hidden_size=256,intermediate_size=768,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,vocab_size=2048

echo "The paper's values, of its implementation on its own model against fp32, in percent (its table has no others):"
printf '%-24s %9s %9s\n' "" lm_head layers "bf16 standard" 1.43 6.63 "bf16 stream" 1.47 6.59 "fp32 stream" 0.04 0.04
exit $status
