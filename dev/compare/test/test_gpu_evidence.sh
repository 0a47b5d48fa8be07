#!/bin/sh
# dev/compare/gpu_evidence.sh: what it would run, by our plans; and with a program that only tells, that it goes on after a failure
# and leaves out what would not end in time. dev/gpu_first.sh, scripts/gpu_queue.sh: their branches with a kit of programs that only tell.
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

for part in build speed-32k speed-128k peers-2k-64k longest table1 table2 figure3 chunks; do
    evidence 0 $EVIDENCE --dry $part "$WORK/dry"
    check "$part: planned to end in time" [ "$(planned)" -gt 0 -a "$(planned)" -le 540 ]
done
check 'nothing was written' [ -z "$(ls "$WORK/dry")" ]
evidence 0 $EVIDENCE --dry speed-128k "$WORK/dry"
says 'a pass of 128k is not short' '^stream at 131072  *not run  *[1-9][0-9][0-9] '
says 'without kept attention first' 'bp --model .*/qwen3-8b --seq-len 131072 --repeat 3 --machine h200 --json --json-lines'
check 'a card 25 % slower ends in time' [ $(($(planned) * 5 / 4)) -le 530 ]
evidence 0 OPTIONS='--deterministic off' $EVIDENCE --dry speed-32k "$WORK/dry"
says 'options of all passes' 'bp --model .*/qwen3-8b --seq-len 32768 --deterministic off --repeat 5 --profile --machine h200'
evidence 0 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
says 'fewer layers are said' '^NOTE: 9 layers of qwen3-8b'
evidence 0 LENGTHS=32768 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
check 'all layers where they end in time' [ "$(grep -c '^NOTE' "$WORK/err")" = 0 ]
evidence 2 MODEL=gpt2 $EVIDENCE --dry figure3 "$WORK/none"
says 'a model that the paper has not' 'MODEL=gpt2 is not in Figure 3'
evidence 2 $EVIDENCE speed-1k "$WORK/none"
says 'the parts are named' "there is no part 'speed-1k'; parts are build, speed-32k"
printf '#!/bin/sh\necho No devices were found\nexit 6\n' >"$WORK/nvidia-smi" && chmod +x "$WORK/nvidia-smi"
evidence 1 PATH="$WORK:$PATH" $EVIDENCE speed-32k "$WORK/none"
says 'no GPU' 'gpu_evidence.sh: no GPU was found'
evidence 2 $EVIDENCE speed-32k

# ---- a program and a GPU that only tell ------------------------------------------------------------------------------------------
# Programs that are watched wait until the GPU has told once.
cat >"$WORK/sampled" <<'END_OF_SAMPLED'
for i in $(seq 3000); do [ -e "$WORK/told_once" ] && break || sleep 0.02; done
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
*-lms*) printf '0, 345, 80.10, 30\n97, 1700, 690.50, 60\n98, 1500, 700.00, 64\n99, 1600, 699.00, 70\n'; : >"$WORK/told_once"; exec sleep 99 ;;
*=name*) echo "${GPU_NAME:-NVIDIA H200}" ;;
*=driver*) echo 580.65.06 ;;
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

# ---- the kit's first.sh -----------------------------------------------------------------------------------------------------------
# A kit of two builds whose programs only tell. BROKEN: the build that does not start. NORM, NORM32, BITS: a pass's that differs. FAILS: a test.
mkdir -p "$WORK/made/cuda13/lib" "$WORK/kit" "$WORK/tools" "$WORK/site/nvidia/cu13/lib" "$WORK/toolkit/lib64"
touch "$WORK/site/nvidia/cu13/lib/libcublasLt.so.13" "$WORK/toolkit/lib64/libcublasLt.so.12"
cat >"$WORK/made/cuda13/train" <<'END_OF_KIT_TRAIN'
#!/bin/sh
echo "$*" >>"$WORK/calls"
build=${0%/train} build=${build##*/}
case ,$BROKEN, in *,$build,*) echo "$0: version 'GLIBC_2.99' not found" >&2; exit 1 ;; esac
case $1 in
doctor)
    for folder in $(echo "$STREAMBP_LIBRARIES" | tr : ' '); do
        ls "$folder"/libcublasLt.so.${build#cuda} "$folder"/*/lib/libcublasLt.so.${build#cuda} 2>/dev/null | grep -q "^$WORK/" && found=yes
    done
    [ -n "$found" ] || { printf 'doctor   1 thing is wrong: cuBLASLt\nWRONG  cuBLASLt                 libcublasLt.so.%s: install it\n' ${build#cuda}; exit 1; }
    printf 'doctor   all right: 35 ops, 12 other rows\nok     driver                   580.65.06\nok     cuBLASLt                 13.1.0, a file\nok     cuDNN                    9.19.0, a file\n'
    printf '%-6s attention                by %s\nok     host memory link         54.6 GB/s to it; 54.4 expected of an H100\n' ${OWN:+note} "${OWN:-cuDNN}"
    printf 'ok     disk                     2.1 GB/s written\n'
    ;;
plan) echo '{"total_bytes": 1, "estimated_seconds": 2.0, "token_seconds": 0.006, "fits": true, "usable_bytes": 84000000000}' ;;
bp)
    case "$*" in *'--inputs host'*) norm=${BITS:-2.5} host=4294967296 peak=1110000000 ;; *) norm=2.5 host=0 peak=1100000000 ;; esac
    case "${STREAMBP_CUDNN:-}$*" in *--chunk\ 1024* | 0bp*32768*) norm=${NORM:-2.5} ;; *'--device cuda --dtype fp32'*) norm=${NORM32:-2.5} ;; esac
    echo "{\"loss\": 11.25, \"tokens\": 32768, \"seconds\": ${SECONDS_FOUND:-2.1}, \"seconds_each\": [3.5, 2.1, 2.15], \"grad_norm\": $norm, \"plan_bytes\": 1000000000,
 \"peak_bytes\": $peak, \"host_bytes\": $host, \"keep\": \"products=3\", \"logits_chunk\": 4096, \"inputs_every\": 1, \"attention\": \"cudnn\"}"
    ;;
train)
    result="\"loss\": 11.25, \"seconds\": ${SECONDS_FOUND:-2.1}, \"tokens\": 4096"
    out=${*##*--out } && [ "$out" = none ] || { mkdir "$out" && echo "{$result, \"grad_norm\": 2.5, \"rollout_seconds\": 1.5}" >"$out/log.jsonl"; }
    echo "{$result, \"plan_bytes\": ${TRAIN_BYTES:-1}, \"peak_bytes\": 2}"
    ;;
convert) mkdir "${*##*--out }" ;;
--version) echo 'libraries  CUDA 13.0.88, cuDNN 9' ;;
esac
END_OF_KIT_TRAIN
cat >"$WORK/made/cuda13/test_ops" <<'END_OF_KIT_TEST'
#!/bin/sh
echo "test $TEST_DTYPE $*" >>"$WORK/calls"
echo '  cuDNN took 7 calls forward, 5 backward'
echo "67 passed, ${FAILS:-0} failed, 0 skipped"
exit "${FAILS:-0}"
END_OF_KIT_TEST
cat >"$WORK/made/cuda13/bench" <<'END_OF_KIT_BENCH'
#!/bin/sh
printf '%-24s %-24s %10.3f ms %9.1f %-7s %6.1f %% of %s\n' copy 'layer inputs' 1 2900 GB/s 85 copy attention_forward 'the last chunk' 3 600 TFLOP/s 30 product >&2
echo '{"dtype": "bf16", "device": "NVIDIA H100", "compute_capability": "9.0", "cuda": "13.0", "copy_gb_per_s": 2900, "product_tflop_per_s": 790, "ops": [{"op": "adamw", "of": "a layer, fp32 master", "rows": 1, "ms": 9, "gb_per_s": 600}, {"op": "conv_backward", "of": "query, key, value", "rows": 4096, "ms": 0.08, "gb_per_s": 2500}]}'
END_OF_KIT_BENCH
cat >"$WORK/made/cuda13/bench_decode" <<'END_OF_KIT_DECODE'
#!/bin/sh
echo "decode $*" >>"$WORK/calls"
case "$*" in *" 1 1") echo '0.500000 7' ;; decode*) echo '6.900000 7' ;; *) echo "token: after $3 tokens 6.3 ms a token" ;; esac
END_OF_KIT_DECODE
cp "$WORK/made/cuda13/test_ops" "$WORK/made/cuda13/test_gpu_large"
chmod +x "$WORK"/made/cuda13/*
cp -r "$WORK/made/cuda13" "$WORK/made/cuda12"
for build in cuda13 cuda12; do tar -C "$WORK/made" -c $build | xz -1 >"$WORK/kit/$build.tar.xz"; done
cp dev/gpu_first.sh "$WORK/kit/first.sh"
cp scripts/common.sh scripts/gpu_queue.sh dev/gpu_steps.sh dev/gpu_floors.md "$WORK/kit"
printf '#!/bin/sh\necho "$*" >"$1"\n' >"$WORK/kit/make_documents" && chmod +x "$WORK/kit/make_documents"
printf 'commit 1a2b\nsources 123\n' >"$WORK/kit/kit.txt"
printf '#!/bin/sh\n[ -z "$CUT_OFF" ] || case "$*" in *"$CUT_OFF"*) exit 124 ;; esac\nexec %s "$@"\n' "$(command -v timeout)" >"$WORK/tools/timeout"
printf '#!/bin/sh\ncase "$*" in *nvidia*) [ -z "$NO_WHEELS" ] && echo "$WORK/site/nvidia" ;; *) exec %s "$@" ;; esac\n' "$(command -v python3)" >"$WORK/tools/python3"
printf '#!/bin/sh\nexit 1\n' >"$WORK/tools/python" && cp "$WORK/tools/python" "$WORK/no_xz"
chmod +x "$WORK"/tools/*
of_kit() { # exit status, variables... and command
    wanted=$1
    shift
    : >"$WORK/calls"
    env PATH="$WORK/tools:$PATH" STREAMBP_LIBRARIES= CUDA_HOME= PYTHON= LIMIT=9999 GPU_NAME='NVIDIA H100 80GB HBM3' BROKEN= "$@" >"$WORK/out" 2>"$WORK/err"
    check "exit $wanted of $*: $(tail -n 1 "$WORK/err")" [ $? = "$wanted" ]
}
first_sh() { # exit status, folder, variables...
    to=$WORK/$2
    set -- "$@" sh "$WORK/kit/first.sh" "$to"
    wanted=$1
    shift 2
    of_kit "$wanted" "$@"
}
queue_sh() { # exit status, folder, rows, variables...
    rows=$3 to=$WORK/$2
    set -- "$@" sh "$WORK/kit/gpu_queue.sh" "$WORK/kit" "$to"
    wanted=$1
    shift 3
    of_kit "$wanted" "$@" $rows
}
tells() { check "a kit's script: $1" grep -qE -- "$2" "$WORK/out" "$WORK/err"; }
calls() { grep -cE -- "$1" "$WORK/calls"; }

first_sh 1 first SECONDS_FOUND=2.1
tells 'the build that runs' '^ok +doctor, cuda13 '
tells 'what doctor found' '^ok +host memory link .* 54.6 GB/s'
tells 'a pass as planned' '^ok +4 layers  +2 s, 10 % +2.1 s, loss 11.25, gradient norm 2.5$'
tells 'the same bits' '^ok +inputs on host: loss, norm +11.25 2.5 +11.25 2.5$'
tells 'memory of pinned pages' '^ok +on the device, for 4096 MiB pinned +8 MiB +9 MiB$'
tells 'a rate as on the H100' '^ok +copy, layer inputs +84 % +85.0 %$'
tells 'and one below it' '^WRONG +attention_forward, the last chunk +82 % +30.0 %$'
tells 'a disk' '^ok +doctor, with a disk '
tells "the gradient by Hopper's kernels" '^ok +4 layers, wgmma: gradient +2.5 +2.5$'
tells 'a token after a long prompt' '^ok +a token after 32768 +6 ms, 15 % +6.3 ms$'
check 'passes are lines of JSON' python3 -c 'import json, sys; assert len([json.loads(line)["result"]["loss"] for line in open(sys.argv[1])]) == 26' "$WORK/first/passes.jsonl"
check 'the record has what scripts/tables.py asks for' python3 -c 'import json, sys; sys.path.insert(0, "scripts"); sys.argv[1:2] = []; import tables
r = json.load(open("'"$(ls "$WORK"/first/test-nvidia-h100-*.json)"'")); assert set(tables.KEYS) <= set(r) and (r["passed"], r["attention"], len(r["programs"])) == (268, "cudnn", 4), r' x
check 'every pass, plan and doctor says its type' [ "$(calls '^(bp|plan|doctor)') $(calls '^test (bf16|fp32) ') $(calls '^test fp32 ')" = \
    "$(calls '^(bp --json --device (cpu|cuda) --dtype (bf16|fp32) |plan .*--dtype bf16 |doctor --device cuda --dtype bf16 )') 4 1" ]
check 'the CPU computes one' [ "$(calls '--device cpu --dtype fp32 ')" = 1 ]
first_sh 1 first
check 'nothing is done again' [ "$(calls '^(bp|test|doctor)')" = 0 ]
tells 'but told again' '^WRONG +attention_forward, the last chunk '
first_sh 1 none BROKEN=cuda13,cuda12
tells 'why no build runs' 'no build runs here as it should. cuda13: .* cuda12: '
mv "$WORK/kit/cuda12.tar.xz" "$WORK"
first_sh 1 none NO_WHEELS=1
mv "$WORK/cuda12.tar.xz" "$WORK/kit"
tells 'what is missing' 'cuda13: WRONG  cuBLASLt .*; see '
check 'and measures nothing' [ "$(calls '^bp')" = 0 ]
first_sh 0 older BROKEN=cuda13 CUDA_HOME="$WORK/toolkit" NO_WHEELS=1 GPU_NAME='NVIDIA RTX 9090'
tells 'the other build, with a toolkit' '^ok +doctor, cuda12 '
tells 'a card without estimates' '^- +4 layers  +- +2.1 s'
first_sh 1 own OWN='our own kernels: no cuDNN'
tells 'attention that is not cuDNN' 'cuda13: note   attention  .*our own kernels'
first_sh 1 norm NORM=2.6
tells 'a gradient that differs' '^FAILED +streamed, chunks of 1024 +gradient norm 2.5 +2.6$'
check 'is the end of it' [ "$(calls '^bp') $(calls '--repeat')" = '9 0' ]
first_sh 1 norm32 NORM32=2.501
tells "a gradient in fp32 that is not the CPU's" '^FAILED +fp32 +gradient norm 2.5 +2.501$'
first_sh 1 fails FAILS=2
tells 'tests that fail' '^FAILED +tests of ops +exit 0 +exit 2: 67 passed, 2 failed, 0 skipped$'
check 'so nothing is measured' [ "$(calls '--repeat')" = 0 ]
first_sh 3 fails LIMIT=100
tells 'they are tried again' '^ok +tests of ops +0 failed +67 passed, 0 failed, 0 skipped$'
tells 'what there was no time for' '^left out, of 100 s: tests of long attention; the same command goes on there$'
check 'only they' [ "$(calls '^bp') $(calls '^test') $(calls '--repeat')" = '0 2 0' ]
first_sh 3 fails LIMIT=100 CUT_OFF=test_gpu_large
first_sh 1 fails BITS=2.50001 SECONDS_FOUND=2.3
tells 'a pass that is slower' '^WRONG +4 layers  +2 s, 10 % +2.3 s'
tells 'bits that differ' '^WRONG +inputs on host: loss, norm +11.25 2.5 +11.25 2.50001$'
check 'and goes on to the end' [ "$(calls '--seq-len 131072')" != 0 ]
mv "$WORK/no_xz" "$WORK/tools/xz"
first_sh 3 slow LIMIT=150 CUT_OFF=test_ops
tells 'without xz' '^ok +doctor, cuda13 '
tells 'a step that the limit ends' '^left out, of 150 s: tests of ops'
check 'cards are those of machine.h' [ "$(sed -n 's/^ *\*.*) card=\([a-z0-9-]\{1,\}\) ;;$/\1/p' dev/gpu_steps.sh | sort)" = "$(sed -n 's/.* CARD("\([^"]*\)".*/\1/p' llmc/estimate/machine.h | sort)" ]
rm -f "$WORK/tools/xz"

# ---- the queue --------------------------------------------------------------------------------------------------------------------
queue_sh 1 queue ''
tells 'row 1' '^ok +tests of long attention '
tells 'row 2' '^ok +2 layers of qwen3-8b at 32768, our own attention +norm 2.5, 0.01 % +2.5$'
tells 'row 3' '^ok +qwen3-8b, LoRA 16 at 8192 --method full +2 s, 10 %; 1e-09 GB +2.1 s, 1.5 of them writing; 1e-09 GB planned, 2e-09 in use; loss 11.25, norm 2.5$'
tells 'the same norm' '^ok +qwen3-8b, LoRA 16 at 4096 --keep none: norm +2.5 +2.5$'
tells 'row 4, whose weights fit' '^ok +qwen3-30b-a3b, LoRA 16 at 32768 '
tells 'row 5' '^- +a token of 16 texts after 4096 +- +100 ms; their prompts 0.500000 s$'
tells 'row 6' '^ok +tests of ops, wgmma '
tells 'what is not here' '^- +racecheck +skipped: compute-sanitizer is not here$'
tells 'row 7' '^ok +GRPO of qwen3-8b, prefixes off: norm '
tells 'row 8' '^ok +qwen3-8b at 32768 for a minute +at its end 2.1 s, 5 % +2.15 s; '
tells 'row 9' '^ok +qwen3-8b, all weights, 262144 tokens '
tells 'row 10, above the floor' '^WRONG +floor of adamw, a layer, fp32 master +at most 1935.6 us +9000 us$'
tells 'and below' '^ok +floor of conv_backward, query, key, value +at most 85.2 us +80 us$'
check 'the only thing that is wrong' [ "$(grep -c '^WRONG' "$WORK/queue/table.txt")" = 1 ]
check 'nothing large stays' [ ! -e "$WORK/queue/model" -a ! -e "$WORK/queue/run" ]
mkdir "$WORK/results"
for record in "$WORK"/queue/*-2*.json; do check "add_report.py takes ${record##*/}" env RESULTS="$WORK/results" python3 scripts/add_report.py "$record"; done
check 'four kinds' [ "$(cd "$WORK/results" && ls | sed 's/-.*//' | paste -sd ' ' -)" = 'ops passes queue test' ]
queue_sh 1 queue ''
check 'nothing is done again' [ "$(calls '^(bp|test|train|decode|convert)')" = 0 ]
queue_sh 1 norm '2 9' NORM=2.51 TRAIN_BYTES=2
tells 'a norm that differs' '^WRONG +2 layers of gpt-oss-20b at 32768, our own attention +norm 2.5, 0.01 % +2.51$'
tells 'bytes that differ' '^WRONG +qwen3-8b, all weights, 262144 tokens +2 s, 10 %; 1e-09 GB +2.1 s; 2e-09 GB planned'
queue_sh 3 late '9 4' LIMIT=120
tells 'what there is no time for' '^left out, of 120 s: qwen3-30b-a3b, LoRA 16 at 4096, gpt-oss-20b mxfp4, LoRA 16 at 4096, '
check 'what fits is done' [ "$(calls '^train')" = 1 ]
queue_sh 0 late '9 4'
check 'the same command goes on there' [ "$(calls '^train') $(calls '^train .*all weights')" = '4 0' ]
printf '#!/bin/sh\necho RACECHECK SUMMARY: 0 hazards\n' >"$WORK/tools/compute-sanitizer" && chmod +x "$WORK/tools/compute-sanitizer"
queue_sh 0 late 6
tells 'races are looked for' '^ok +racecheck of experts_wgmma +no race +RACECHECK SUMMARY: 0 hazards$'
queue_sh 0 other '6 9 10' GPU_NAME='NVIDIA RTX 9090'
tells 'an unknown card: measured' '^- +qwen3-8b, all weights, 262144 tokens +- +2.1 s'
tells 'or skipped by name' "^- +Hopper's kernels +skipped: they need an H100 or H200$"
queue_sh 1 ends 1 FAILS=2
tells 'row 1 ends it' '^gpu_queue.sh: first.sh found something wrong'
queue_sh 2 none 11
tells 'an unknown row' "there is no row '11'; rows are 1 to 10"
of_kit 2 sh scripts/gpu_queue.sh "$WORK/tools" "$WORK/none"
tells 'a folder that is no kit' 'is no kit; make one: scripts/gpu_kit.sh'
rm -rf "$WORK/tools"

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
