#!/bin/sh
# dev/compare/gpu_evidence.sh: what it would run, by our plans; and with a program that only tells, that it goes on after a failure
# and leaves out what would not end in time.
. test/cli.sh
EVIDENCE=dev/compare/gpu_evidence.sh
evidence() { # exit status, variables..., arguments
    wanted=$1
    shift
    env CONTENDERS= LENGTHS= STORE="$WORK/store" TRAIN="$TRAIN_PLAIN" "$@" >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of $*" [ $? = "$wanted" ]
}
says() { check "$1" grep -qE -- "$2" "$WORK/err"; }
planned() { sed -n 's/.*: planned \([0-9]*\) s of.*/\1/p' "$WORK/err"; }

for part in build first speed-32k speed-128k peers-2k-64k longest table1 table2 figure3 chunks; do
    evidence 0 $EVIDENCE --dry $part "$WORK/dry"
    check "$part: planned to end in time" [ "$(planned)" -gt 0 -a "$(planned)" -le $([ $part = first ] && echo 1060 || echo 540) ]
done
check 'nothing was written' [ -z "$(ls "$WORK/dry")" ]
evidence 0 $EVIDENCE --dry speed-128k "$WORK/dry"
says 'a pass of 128k is not short' '^stream at 131072  *not run  *[1-9][0-9][0-9] '
says 'without kept attention first' 'bp --model .*/qwen3-8b --seq-len 131072 --repeat 3 --machine h200 --json --json-lines'
check 'a card 25 % slower ends in time' [ $(($(planned) * 5 / 4)) -le 530 ]
evidence 0 OPTIONS='--deterministic off' $EVIDENCE --dry speed-32k "$WORK/dry"
says 'options of all passes' 'bp --model .*/qwen3-8b --seq-len 32768 --deterministic off --repeat 5 --profile --machine h200'
evidence 0 $EVIDENCE --dry first "$WORK/dry"
says 'what would refute an estimate' '^expected: [0-9.]* s a pass; refuted by attention_backward outside'
evidence 0 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
says 'fewer layers are said' '^NOTE: 9 layers of qwen3-8b'
evidence 0 LENGTHS=32768 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
check 'all layers where they end in time' [ "$(grep -c '^NOTE' "$WORK/err")" = 0 ]
evidence 2 MODEL=gpt2 $EVIDENCE --dry figure3 "$WORK/none"
says 'a model that the paper has not' 'MODEL=gpt2 is not in Figure 3'
evidence 2 $EVIDENCE speed-1k "$WORK/none"
says 'the parts are named' "there is no part 'speed-1k'; parts are build, first, speed-32k"
printf '#!/bin/sh\necho No devices were found\nexit 6\n' >"$WORK/nvidia-smi" && chmod +x "$WORK/nvidia-smi"
evidence 1 PATH="$WORK:$PATH" $EVIDENCE speed-32k "$WORK/none"
says 'no GPU' 'gpu_evidence.sh: no GPU was found'
evidence 2 $EVIDENCE speed-32k

# ---- a program and a GPU that only tell ------------------------------------------------------------------------------------------
# Programs that are watched wait until the GPU has told once.
cat >"$WORK/sampled" <<'END_OF_SAMPLED'
for i in $(seq 100); do [ -e "$WORK/told_once" ] && break || sleep 0.02; done
rm -f "$WORK/told_once"
END_OF_SAMPLED
cat >"$WORK/train" <<'END_OF_TRAIN'
#!/bin/sh
case "$*" in bp* | convert*) . "$WORK/sampled" ;; esac
case "$*" in
plan*) echo "{\"weights\": 1000000000, \"total_bytes\": 1000000000, \"estimated_seconds\": ${PASS_SECONDS:-0.5}}" ;;
info*) echo '{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}' ;;
convert*) out=${*##*--out } && out=${out%% *} && mkdir -p "$out" && echo '{}' >"$out/config.json" ;;
*--keep*) echo '{"pass": 1, "seconds": 2.5}'; echo 'train: this fails' >&2; exit 1 ;;
bp*) echo "{\"loss\": 1.5, \"seconds\": 2, \"flops\": 4e13, \"model_flops\": 3e13, \"attention\": \"${ATTENTION:-cudnn}\"}" ;;
esac
END_OF_TRAIN
cat >"$WORK/nvidia-smi" <<'END_OF_SMI'
#!/bin/sh
case "$*" in
*-lms*) printf '0, 345, 80.10, 30\n97, 1700, 690.50, 60\n98, 1500, 700.00, 64\n99, 1600, 699.00, 70\n'; : >"$WORK/told_once"; exec sleep 9 ;;
*=name*) echo 'NVIDIA H200' ;;
*=memory.free*) echo 140000 ;;
*=*) echo 1980, 3201 ;;
esac
END_OF_SMI
cat >"$WORK/bench" <<'END_OF_BENCH'
#!/bin/sh
. "$WORK/sampled"
echo '{"product_tflop_per_s": 750.5}'
END_OF_BENCH
chmod +x "$WORK/train" "$WORK/nvidia-smi" "$WORK/bench"
STORE=$WORK/store PATH=$WORK:$PATH
export STORE WORK
RAN_AT='"gpu": {"samples": 3, "sm_mhz": [1500, 1600, 1700], "power_w": [690.50, 699, 700.00], "temperature_c": [60, 64, 70]}'
lines() { grep -c "$1" "$WORK/told/speed.jsonl"; }
evidence 1 TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/told"
says 'the failure and its reason' '^stream --keep attention at 32768 *FAILED .* train: this fails$'
says 'the case after it' '^checkpoint at 32768 *done '
check 'a line for each case' [ "$(lines '"part": "speed-32k"')" = 3 ]
check 'its result, or none' [ "$(lines '"result": {"loss": 1.5, .*}}$') $(lines '"result": null}$')" = '2 1' ]
check 'the passes before a failure' [ "$(lines '"passes": \[{"pass": 1, "seconds": 2.5}\], "result": null')" = 1 ]
check 'clocks and power while it ran' [ "$(grep -cF "$RAN_AT" "$WORK/told/speed.jsonl")" = 3 ]
evidence 1 ATTENTION=own TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/own"
says 'own attention ends a part' "^gpu_evidence.sh: attention is our own kernels', not cuDNN's: "
check 'before anything is measured' [ ! -e "$WORK/own/speed.jsonl" ]
evidence 1 ATTENTION=own STREAMBP_CUDNN=0 TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/own"
says 'but where it is meant' '^checkpoint at 32768 *done '
evidence 0 PASS_SECONDS=200 TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/late"
says 'what would not end is left out' '^checkpoint at 32768 *left out *1[0-9][0-9][0-9] .* s were left$'

check 'compare.py watches each process' [ "$(cd dev/compare && python3 -c 'import machine, subprocess
with machine.gpu_watched(True) as gpu:
    subprocess.run(["sh", "-c", ". $WORK/sampled"])
print(gpu["sm_mhz"], gpu["power_w"])')" = '[1500.0, 1600.0, 1700.0] [690.5, 699.0, 700.0]' ]

# `first` with a build that was brought; what it has been through is not done again
for program in test_gpu_large test_ops; do printf '#!/bin/sh\necho "cuDNN took 7 calls forward, 5 backward"\n' >"$WORK/$program"; done
printf '#!/bin/sh\n: >"$1"\n' >"$WORK/make_documents"
chmod +x "$WORK/test_gpu_large" "$WORK/test_ops" "$WORK/make_documents"
evidence 0 PREBUILT="$WORK" TRAIN="$WORK/train" $EVIDENCE first "$WORK/first"
says 'every length' '^all layers at 131072 *done '
check 'what it has found' [ "$(grep -c '^cuDNN took 7' "$WORK/first/first.txt") $(grep -c '"refuted_by": "[a-z]' "$WORK/first/speed.jsonl")" = '2 6' ]
evidence 0 PREBUILT="$WORK" TRAIN="$WORK/train" $EVIDENCE first "$WORK/first"
check 'all of it once' [ "$(grep -c ' done before ' "$WORK/err") $(grep -c . "$WORK/first/speed.jsonl")" = '9 6' ]

# make bench-gpu
run_bench() { env MODELS=qwen3-8b LENGTHS='4096 131072' BUILD="$WORK" MAKE=true RESULTS="$WORK/bench_results" dev/bench_gpu.sh 2>"$WORK/err"; }
check 'make bench-gpu ends' run_bench
check 'its record is JSON' python3 -m json.tool "$WORK"/bench_results/bench-nvidia-h200-*.json "$WORK/record"
says 'shares of the dense peak' '^qwen3-8b T = 131072 stream: 2 s, 65536.0 tokens/s, 20.00 TFLOP/s executed, MFU 0.0152 \(of all T\^2 pairs 0.0218\)$'
for found in '"repeat": 3' '"repeat": 5' '"peak_tflop_per_s": 989' '"share_of_product": 0.02' '"samples": 3'; do
    check "the record has $found" grep -qF "$found" "$WORK/record"
done

# ---- compare.py fails: no GPU, or no model ---------------------------------------------------------------------------------------
evidence 1 TRAIN="$WORK/train" $EVIDENCE chunks "$WORK/failed"
says 'a comparison that fails' '^chunks *FAILED '
check 'leaves no empty file' [ -z "$(ls "$WORK/failed")" ]
finish
