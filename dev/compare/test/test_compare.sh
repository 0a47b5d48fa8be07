#!/bin/sh
# dev/compare/compare.py: its tables, ratios, checks and searches, with a contender that is falsified on purpose (fake_contender.py);
# where a Python with torch and transformers is there (PYTHON=... names it), transformers itself against our program.
. test/cli.sh
. test/find_python.sh
TRAIN=$TRAIN_PLAIN # measured memory is that of a plain build
export TRAIN
FAKE="fake=python3 dev/compare/test/fake_contender.py"
LENGTHS=64,128
compare() { # exit status, arguments...: into $WORK/out, err; files in $WORK/compare
    wanted=$1
    shift
    python3 dev/compare/compare.py --train "$TRAIN" --init $TINY --seq-lens $LENGTHS --repeat 2 --threads 1 --device cpu --no-picture \
        --out "$WORK/compare" --python "$WORK/no-python" "$@" >"$WORK/out" 2>"$WORK/err"
    status=$?
    check "exit $wanted, not $status, of compare.py $*" [ $status = "$wanted" ]
    [ $status = "$wanted" ] || tail -n 3 "$WORK/err"
}
says() { check "$1" grep -qe "$2" "$WORK/$3"; } # what, pattern, out|err
field() { # contender, T, column's name: from the CSV
    awk -F, -v name="$1" -v T="$2" -v column="$3" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) c = i }
        $1 == name && $2 == T { print $c }' "$WORK/compare/compare.csv"
}
fake() { compare "$1" --contenders fake --contender "$FAKE" $2; } # exit status, more options

# ---- tables ------------------------------------------------------------------------------------------------------------------
compare 0 --contenders checkpoint,fake,hf,paper,llmc --contender "$FAKE" --chunks 16,T/2 --rounds 2
for name in stream checkpoint fake stream@16 stream@T/2; do
    for T in 64 128; do
        says "a row of $name, T = $T" "^| .$name. | $T |" out
        check "$name, T = $T: passes of both rounds, the first of each left out" [ "$(field $name $T passes)" = 2 ]
    done
done
check 'chunks of the sweep' [ "$(field stream@16 64 chunk) $(field stream@T/2 64 chunk) $(field stream@T/2 128 chunk)" = '16 32 64' ]
check 'the yardstick over itself' [ "$(field stream 64 time_ratio) $(field stream 64 memory_ratio)" = '1.0 1.0' ]
check 'a ratio of memory is that of the peaks' close "$(field fake 128 memory_ratio)" \
    "$(awk "BEGIN { print $(field fake 128 peak_bytes) / $(field stream 128 peak_bytes) }")" 1e-4
check 'gradients agree' awk "BEGIN { exit !($(field fake 64 gradient_difference) < 1e-5) }"
check 'within rounding' awk "BEGIN { x = $(field stream@16 64 gradient_difference); exit !(0 < x && x < 1e-5) }"
check 'no seconds of a CPU' [ "$(field fake 64 seconds)$(field fake 64 tokens_per_second)" = '' ]
says 'who is missing is named' '^Not taken part: .hf.: its Python: No such file' out
says 'the command, without places' '^Made by .dev/compare/compare.py --train TRAIN --init .*--contenders [a-z,]* --contender COMMAND --chunks' out
says 'and why' '^without paper: no --paper DIR' err
says 'llm.c is for GPT-2' '^without llmc: it has GPT-2 shapes only, not llama' err
check 'JSON' python3 -c "import json, sys; run = json.load(open(sys.argv[1])); assert len(run['records']) == 20 and run['rows'] and run['commit']" \
    "$WORK/compare/compare.json"
compare 0 --contenders fake,stream-keep,stream-any --contender "$FAKE" --peak 0.5
check 'attention that is kept' awk "BEGIN { x = \"$(field stream-keep 64 gradient_difference)\"; exit !(x != \"\" && x + 0 < 1e-5) }"
says 'share of the peak that was named' 'over 0.5 TFLOP/s (--peak)' out
share=$("$TRAIN" plan --init $TINY --seq-len 64 --for bp --json --quiet | sed 's/.*"model_flops": \([0-9]*\).*/\1/')
check 'it is model FLOPs over time and peak' python3 -c "
import json, sys
run = json.load(open(sys.argv[1]))
row = next(r for r in run['rows'] if r['contender'] == 'fake' and r['seq_len'] == 64)
seconds = next(r for r in run['records'] if r['contender'] == 'fake' and r['seq_len'] == 64)['result']['seconds'][1]
assert abs(row['share_of_peak'] * seconds * 0.5e12 / $share - 1) < 1e-6" "$WORK/compare/compare.json"

# ---- what is wrong, all in one run -------------------------------------------------------------------------------------------
names=
set --
falsified() { # name, how: one more of these
    names=$names,$1
    falsified="$1=env $2 python3 dev/compare/test/fake_contender.py"
}
falsified loss FAKE_LOSS=1.001 && set -- "$@" --contender "$falsified"
falsified nan FAKE_LOSS=nan && set -- "$@" --contender "$falsified"
falsified gradient FAKE_GRADIENT=1.01 && set -- "$@" --contender "$falsified"
falsified dies FAKE_BREAK=exit && set -- "$@" --contender "$falsified"
falsified garbage FAKE_BREAK=garbage && set -- "$@" --contender "$falsified"
falsified short FAKE_BREAK=short && set -- "$@" --contender "$falsified"
falsified hangs FAKE_BREAK=sleep && set -- "$@" --contender "$falsified"
falsified large FAKE_LONGEST=100 && set -- "$@" --contender "$falsified"
compare 1 --contenders "${names#,}" --timeout 10 "$@"
says 'another loss' '^FAILED: loss, T = 128: loss differs from stream.s by 0.001' err
check 'is marked' [ "$(grep -c '| .loss. .*1.0e-03 WRONG' "$WORK/out")" = 2 ]
says 'no number for a loss' '^FAILED: nan, T = 64: loss differs from stream.s by nan' err
says 'another gradient' '^FAILED: gradient, T = 64: gradient differs from stream.s by 0.01 (' err
says 'and its norm at every length' '^FAILED: gradient, T = 128: norm differs' err
says 'one that fails' '^FAILED: dies, T = 64: failed: fake: broken on purpose' err
says 'one that writes no JSON' '^FAILED: garbage, T = 64: failed: a line of its output is no JSON object' err
says 'one that leaves passes out' '^FAILED: short, T = 64: failed: its result lacks .* the seconds of 2 passes' err
check 'one that hangs' [ "$(grep -c '| .hangs. | [0-9]* | timed out after 10 s |' "$WORK/out")" = 2 ]
says 'too little memory is a result' '^| .large. | 128 | out of memory |' out
check 'of that length only' [ -n "$(field large 64 time_ratio)" ]
check 'neither is a failure' [ "$(grep -cE '^FAILED: (hangs|large)' "$WORK/err")" = 0 ]
# who is ended ends the contender that runs
: >"$WORK/begun"
FAKE_CALLS=$WORK/begun FAKE_BREAK=sleep python3 dev/compare/compare.py --train "$TRAIN" --init $TINY --seq-lens 32 --device cpu --no-picture \
    --out "$WORK/ended" --contenders fake --contender "$FAKE" >/dev/null 2>&1 &
ended=$!
for _ in $(seq 600); do [ -s "$WORK/begun" ] || sleep 0.1; done
kill -TERM $ended
wait $ended
check 'exit 143 of one that is ended' [ $? = 143 ]
check 'its contender is ended, too' [ "$(for process in /proc/[0-9]*; do tr '\0' ' ' <"$process/cmdline"; echo; done 2>/dev/null |
    grep -c "[f]ake_contender.*$WORK/ended")" = 0 ]
check 'thirteen are' [ "$(grep -c '^FAILED: ' "$WORK/err")" = 13 ]

# ---- the same run again ------------------------------------------------------------------------------------------------------
FAKE_CALLS=$WORK/calls
export FAKE_CALLS
fake 0
check 'one process for each length' [ "$(grep -c . "$FAKE_CALLS")" = 2 ]
check 'gradients of the first' [ "$(grep -c gradients "$FAKE_CALLS")" = 1 ]
fake 0 '--resume'
check 'nothing is run again' [ "$(grep -c . "$FAKE_CALLS")" = 2 ]
check 'and the rows are there' [ -n "$(field fake 64 gradient_difference)" ]
fake 0 '--resume --repeat 3'
check 'other passes are' [ "$(grep -c . "$FAKE_CALLS")" = 4 ]
FAKE_BREAK=exit fake 1 '--resume --seq-lens 32,64,128 --repeat 3'
check 'so is a new length' [ "$(grep -c . "$FAKE_CALLS")" = 5 ]
fake 0 '--resume --seq-lens 32,64,128 --repeat 3'
check 'and what failed' [ "$(grep -c . "$FAKE_CALLS")" = 6 ]

# ---- the longest length ------------------------------------------------------------------------------------------------------
longest() { sed -n "s/^$1,\([0-9]*\),.*/\1/p" "$WORK/compare/longest.csv"; }
rm "$FAKE_CALLS"
LENGTHS=64
compare 1 --longest --memory-limit 2MiB --contenders fake --contender "fake=env FAKE_PEAK=1024 FAKE_LONGEST=1000 python3 dev/compare/test/fake_contender.py" \
    --contender "large=env FAKE_CALLS= FAKE_PEAK=4096 python3 dev/compare/test/fake_contender.py" \
    --contender "little=env FAKE_CALLS= FAKE_PEAK=1024 FAKE_LONGEST=20 python3 dev/compare/test/fake_contender.py" \
    --contender "nothing=env FAKE_CALLS= FAKE_LONGEST=0 python3 dev/compare/test/fake_contender.py"
check 'within 5 %' awk "BEGIN { exit !(1000 / 1.05 <= $(longest fake) && $(longest fake) <= 1000) }"
check 'in few passes' [ "$(grep -c 'limit 2097152' "$FAKE_CALLS")" -le 11 ]
check 'ours is what the plan says' [ "$(longest stream)" = "$("$TRAIN" plan --init $TINY --seq-len 64 --for bp --threads 1 --memory-limit 2MiB --json \
    --quiet | sed 's/.*"max_seq_len": \([0-9]*\).*/\1/')" ]
says 'and how many times as long' "^| .fake. | $(longest fake) | [01].[0-9] MiB | [0-9.]* |" out
check 'a process that takes more than the limit does not hold it' awk "BEGIN { exit !(512 / 1.05 <= $(longest large) && $(longest large) <= 512) }"
check 'shorter than where it begins' [ "$(longest little)" = 20 ]
says 'nothing at all' '^FAILED: nothing, longest: not even one token fits' err
check 'is the only failure' [ "$(grep -c '^FAILED: ' "$WORK/err")" = 1 ]
unset FAKE_CALLS
LENGTHS=64,128

# ---- bad input ---------------------------------------------------------------------------------------------------------------
bad() { # pattern, arguments
    pattern=$1
    shift
    compare 1 "$@"
    says "one line of $*" "^compare.py: .*$pattern" err
    check "and no traceback of $*" [ "$(grep -vc '^without ' "$WORK/err")" = 1 ]
}
bad "'4x' is not a length" --seq-lens 1k,4x
bad "'0' is not a length" --seq-lens 0
bad "there is no 'nobody'; there are stream" --contenders nobody
bad "'T/0' is not a number of tokens" --chunk T/0
bad "'much' is not an amount of memory" --memory-limit much
bad '0 is less than 1' --repeat 0
bad '--longest is of a --memory-limit' --longest
bad '--longest needs chunks in tokens' --longest --memory-limit 1GiB --chunk T/3
bad "'fake' is not NAME=COMMAND" --contender fake
bad 'unknown' --init nonsense --seed 1
bad 'there is no .*nothing' --train "$WORK/nothing"
bad 'stream, T = 64: out of memory' --memory-limit 1MiB --init llama,hidden_size=64,vocab_size=8000,num_hidden_layers=1
bad "'rtx0' is not an amount of memory" --memory-limit rtx0
command -v nvidia-smi >/dev/null || bad 'names no GPU' --device cuda
compare 0 --list --contender "$FAKE"
check 'the list' [ "$(grep -c ': can take part' "$WORK/out")" -ge 4 ]

# ---- the paper's tables --------------------------------------------------------------------------------------------------------
SMALL=hidden_size=32,intermediate_size=48,num_attention_heads=4,num_key_value_heads=2,head_dim=16,vocab_size=96
paper() { # exit status, arguments
    wanted=$1
    shift
    OUT=$WORK/paper dev/compare/paper_tables.sh --divide 500 --keys $SMALL "$@" --train "$TRAIN" --device cpu \
        --repeat 2 --threads 1 --no-picture >"$WORK/out" 2>"$WORK/err"
    status=$?
    check "exit $wanted, not $status, of paper_tables.sh $*" [ $status = "$wanted" ]
}
paper 0 --tables 1,3 --layers 1 --limit 1MiB --contenders checkpoint
says 'Table 1: the published seconds beside ours' '^| 54 |   |   | 31.8 | 25.8 | 1 | [0-9.]* |$' out
says 'it says that models are cut down' 'cut down: num_hidden_layers=1 hidden_size=32' out
says 'and lengths' 'lengths are 500 times shorter' out
says 'Figure 3: published curves between their points' '^| 39 | 76.9 | 39.2 | [0-9.e-]* | [0-9.e-]* |$' out
check 'longest sequences of both models' [ "$(grep -c '^| here: stream | [0-9][0-9]* |$' "$WORK/out")" = 2 ]
FAKE_LOSS=1.1 paper 1 --tables 1 --contenders fake --contender "$FAKE"
paper 2 --layers x

# ---- tables ------------------------------------------------------------------------------------------------------------------------
mkdir -p "$WORK/checkout/scripts" "$WORK/checkout/docs" "$WORK/checkout/dev/results"
cp -r dev/compare "$WORK/checkout/dev"
cp scripts/tables.py scripts/measured.py scripts/log_export.py scripts/plan_[lm]*.py "$WORK/checkout/scripts"
cp docs/measured.md "$WORK/checkout/docs"
shown=docs/measured.md
LENGTHS=64 FAKE_PEAK=1024 FAKE_LONGEST=100 fake 0 '--longest --memory-limit 2MiB'
cp "$WORK/compare/compare.json" "$WORK/checkout/dev/results/compare-fake.json"
check 'a new file is missed' [ "$(python3 "$WORK/checkout/scripts/tables.py" --check compare 2>&1)" = \
    "$shown: table compare is out of date; scripts/tables.py --write" ]
check 'is written' python3 "$WORK/checkout/scripts/tables.py" --write compare
check 'and found' python3 "$WORK/checkout/scripts/tables.py" --check compare
check 'as compare.py printed it' [ "$(grep -cxFf "$WORK/compare/compare.md" "$WORK/checkout/$shown")" -ge "$(grep -c . "$WORK/compare/compare.md")" ]
check 'a CPU is no GPU' grep -q '^Nothing has been measured beside others on a GPU yet' "$WORK/checkout/$shown"

# ---- transformers ------------------------------------------------------------------------------------------------------------
find_python 'torch, transformers, safetensors'
if [ -n "$python" ]; then
    LENGTHS=64
    agrees() { # shape, contender...: one process for each
        shape=$1
        shift
        compare 0 --init $shape --contenders "$(echo "$*" | tr ' ' ,)" --python "$python" --logits-chunk 40 --batch 2
        for name in "$@"; do
            check "$name, ${shape%%,*}: gradients" awk "BEGIN { exit !($(field $name 64 gradient_difference) < 1e-5) }"
            check "$name, ${shape%%,*}: loss" awk "BEGIN { exit !($(field $name 64 loss_difference) < 1e-6) }"
        done
    }
    agrees qwen3,hidden_size=64,intermediate_size=96,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16,vocab_size=500 hf hf-chunked
    agrees gpt2,n_embd=48,n_layer=2,n_head=4,vocab_size=500 hf
else
    echo '[  SKIPPED ] transformers against our program: NOT TESTED, because no Python has torch, transformers and safetensors (PYTHON=... names one)'
    skipped=$((skipped + 1))
fi
finish
