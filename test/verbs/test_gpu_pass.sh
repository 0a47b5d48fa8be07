#!/bin/sh
# On a GPU: a forward and backward pass long enough for cuDNN, with tensors in other places, and again without cuDNN;
# the rates of the links to these places; and two models at 32,768 tokens.
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
norm_of_length() { succeeds bp --init "$1,num_hidden_layers=2,vocab_size=4096" --seq-len 32768 --chunk 4096 --json; }
for model in qwen3-8b gpt-oss-20b; do # calls of backward with the most elements of dS
    norm_of_length $model
    long=$(json grad_norm)
    STREAMBP_CUDNN=0
    export STREAMBP_CUDNN
    norm_of_length $model
    unset STREAMBP_CUDNN
    echo "$model, 2 layers, 32768 tokens: gradient norm $long; without cuDNN $(json grad_norm)"
    check "the same gradient norm of 32768 tokens of $model with our own attention" close "$long" "$(json grad_norm)" 2e-2
done
STREAMBP_WGMMA=1 # other GPUs than Hopper compute the same pass again
export STREAMBP_WGMMA
for model in qwen3-8b gpt-oss-20b qwen3-30b-a3b; do
    norm_of_length $model
    long=$(json grad_norm)
    STREAMBP_WGMMA=0
    norm_of_length $model
    STREAMBP_WGMMA=1
    echo "$model, 2 layers, 32768 tokens: gradient norm with STREAMBP_WGMMA=1 $long; without $(json grad_norm)"
    check "the same gradient norm of 32768 tokens of $model with STREAMBP_WGMMA=1" close "$long" "$(json grad_norm)" 2e-2
done
unset STREAMBP_WGMMA
for places in '--inputs host --weights host --keep attention --keep-on host' \
    '--inputs disk --weights disk --disk build'; do
    succeeds bp "$@" $places
    check "the same loss and norm with $places" [ "$(json loss) $(json grad_norm)" = "$loss $norm" ]
done
succeeds doctor --disk build
grep -E '^[a-zA-Z]+ +(host memory link|disk) ' "$WORK/out"
STREAMBP_CUDNN=0
export STREAMBP_CUDNN
succeeds bp "$@"
echo "with cuDNN, if it is there: loss $loss, gradient norm $norm; without: $(json loss), $(json grad_norm)"
check 'the same loss with our own attention' close "$loss" "$(json loss)" 2e-3
check 'the same gradient norm with our own attention' close "$norm" "$(json grad_norm)" 2e-2
finish
