#!/bin/sh
# On a GPU: a forward and backward pass as long as cuDNN likes them, once more without it.
. test/cli.sh
set -- --init llama,hidden_size=512,intermediate_size=1408,num_hidden_layers=2,num_attention_heads=8,num_key_value_heads=4,vocab_size=4096 \
    --seq-len 8192 --chunk 1024 --json
succeeds bp "$@"
loss=$(json loss) norm=$(json grad_norm)
grep 'our own kernels' "$WORK/err"
STREAMBP_RED_ZONES=1
export STREAMBP_RED_ZONES
succeeds bp "$@"
check 'nothing is written behind a region, and the loss is the same' [ "$(json loss)" = "$loss" ]
unset STREAMBP_RED_ZONES
STREAMBP_CUDNN=0
export STREAMBP_CUDNN
succeeds bp "$@"
echo "with cuDNN, if it is there: loss $loss, gradient norm $norm; without: $(json loss), $(json grad_norm)"
check 'the same loss with our own attention' close "$loss" "$(json loss)" 2e-3
check 'the same gradient norm with our own attention' close "$norm" "$(json grad_norm)" 2e-2
finish
