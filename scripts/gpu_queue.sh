#!/bin/sh
# Measures on a GPU what its owner can add to dev/results, most important first, with a kit of scripts/gpu_kit.sh and no network:
#     sh KIT/gpu_queue.sh KIT OUT [ROW...]      all rows, by default; the kit holds this script
# Row, minutes, what runs, what it decides:
#    1  4  doctor, gradients, tests of ops (first.sh): whether anything else counts
#    2  5  two layers at 32,768 tokens, attention by cuDNN and by our own kernels: dq of calls with many elements of dS
#    3  6  Qwen3-8B at 4096 and 8192 tokens: passes; LoRA steps that keep what fits, nothing, everything
#    4  8  LoRA steps of Qwen3-30B-A3B and gpt-oss-20b at 4096 and 32,768 tokens: the first whole mixtures of experts
#    5  6  decoding after 32, 4096, 32,768 tokens, 1 to 64 texts: what split keys gain
#    6  8  STREAMBP_WGMMA=1: tests, rates of ops, races: whether Hopper's kernels become the default
#    7  5  GRPO of Qwen3-0.6B and 8B with a reward command, prefixes shared and not: writing and training apart
#    8  3  passes of a minute, clocks and power: whether heat slows long runs
#    9  6  a step of all weights of Qwen3-8B at 262,144 tokens (on 130 GB: 524,288): the longest lengths
#   10  2  ops whose floor is known from machine code (dev/gpu_floors.md), times 1.2
# Expected is what `train plan` says for this card: the same bytes, seconds within 10 %. WRONG is a finding: the plan or the kernel changes.
# OUT gets what first.sh writes, and records for scripts/add_report.py: queue-*.json, passes-*.json, ops-*.json, test-*.json.
# LIMIT [530] seconds: what would not end in time is left out. The same command then goes on there. Libraries, DISK: as first.sh.
# Exit status 1: something is wrong; 3: something was left out.
set -u
usage() { sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] && [ "${1#-}" = "$1" ] || usage
[ -f "$1/gpu_steps.sh" ] || { echo "gpu_queue.sh: $1 is no kit; make one: scripts/gpu_kit.sh $1" >&2 && exit 2; }
me=gpu_queue.sh kit=$(cd "$1" && pwd)
. "$kit/common.sh"
. "$kit/gpu_steps.sh"
to=$2
shift 2
[ $# != 0 ] || set -- 1 2 3 4 5 6 7 8 9 10
for number; do case $number in [1-9] | 10) ;; *) echo "gpu_queue.sh: there is no row '$number'; rows are 1 to 10" >&2 && exit 2 ;; esac done

# ---- the rows -------------------------------------------------------------------------------------------------------------------------
documents() { [ -s "$out/$1.bin" ] || "$kit/make_documents" "$out/$1.bin" 32000 "$2" 1 0 "${3:-documents}"; } # name, lengths, kind
norm_of() { sed -n "s/^{\"what\": \"$1\".*\"grad_norm\": \([0-9.e+-]*\).*/\1/p" "$out/rows.jsonl" 2>/dev/null | tail -n 1; }
same_norm() { # what, the row that it is compared with, relative difference
    wanted=$(norm_of "$2") norm=$(norm_of "$1")
    [ -z "$wanted" ] || [ -z "$norm" ] || done_before "$1: norm" || row "$(judge near "$norm" "$wanted" "$3")" "$1: norm" "$wanted" "$norm"
}
row_1() {
    RIGHT=only LIMIT=$((LIMIT - $(date +%s) + begin)) sh "$kit/first.sh" "$out"
    [ $? != 3 ] || { left_out='the rest of row 1' && finish; }
    [ -e "$out/right" ] || finish 'first.sh found something wrong, so nothing else counts'
}
row_2() {
    [ -z "${STREAMBP_CUDNN:-}" ] || { skipped 'norms by cuDNN and by our own attention' 'STREAMBP_CUDNN is set' && return; }
    for model in gpt-oss-20b qwen3-8b; do
        title="2 layers of $model at 32768" options="--init $model,num_hidden_layers=2 --seq-len 32768 --repeat 2"
        timed "$title" 30 "$options"
        wanted=$(pass_of "$title" | value grad_norm)
        [ -n "$wanted" ] && with STREAMBP_CUDNN=0 bp "$title, our own attention" 60 "$options" || continue
        norm=$(pass_of "$title, our own attention" | value grad_norm)
        row "$(judge near "$norm" "$wanted" 0.0001)" "$title, our own attention" "norm $wanted, 0.01 %" "$norm"
    done
}
row_3() {
    for T in 4096 8192; do
        documents $T $T,$T,$T
        timed "qwen3-8b at $T" 60 "--init qwen3-8b --seq-len $T --repeat 3 $where"
        for how in '' ' --keep none' ' --method full'; do
            trained "qwen3-8b, LoRA 16 at $T$how" 40 3 "--init qwen3-8b --lora-rank 16 --seq-len $T --data $out/$T.bin$how"
            [ -z "$how" ] || same_norm "qwen3-8b, LoRA 16 at $T$how" "qwen3-8b, LoRA 16 at $T" 0.002
        done
    done
}
row_4() {
    for T in 4096 32768; do
        documents $T $T,$T,$T
        given="--lora-rank 16 --seq-len $T --data $out/$T.bin" base=' --base nf4'
        plan_for "--init qwen3-30b-a3b $given --weights device $where"
        [ "$(plan_says fits)" != true ] || base=
        trained "qwen3-30b-a3b${base#* --base}, LoRA 16 at $T" 150 3 "--init qwen3-30b-a3b$base $given"
        trained "gpt-oss-20b mxfp4, LoRA 16 at $T" 120 3 "--init gpt-oss-20b --base mxfp4 $given"
    done
}
row_5() {
    for T in 32 4096 32768; do token_after $T; done
    for each in 2,32 16,32 64,32 2,4096 16,4096 64,4096 2,32768 16,32768; do # texts side by side: 64 tokens less 1, by processes that write 65 and 1
        texts=${each%,*} T=${each#*,} title="a token of ${each%,*} texts after ${each#*,}"
        done_before "$title" && continue
        [ -d "$out/model" ] || step 'weights of 8 layers' 40 "$TRAIN" convert --init qwen3-8b,num_hidden_layers=8 --dtype bf16 --out "$out/model" || return
        for new in 1 65; do
            step "$title" 30 sh -c 'printf "\n\n" | "$0" decode "$@"' "$out/$build/bench_decode" "$out/model" "$texts" "$T" $new 1 || continue 2
            [ $new != 1 ] || alone=$(tail -n 1 "$out/step.out" | cut -d ' ' -f 1)
        done
        seconds=$(awk "BEGIN { print ($(tail -n 1 "$out/step.out" | cut -d ' ' -f 1) - $alone) / 64 }")
        measured - "$title" - "$(awk "BEGIN { printf \"%.4g\", 1000 * $seconds }") ms; their prompts $alone s" "bench_decode decode model $texts $T 65 1" \
            "\"seconds\": $seconds, \"planned_seconds\": null, \"tokens\": $texts"
    done
    rm -rf "$out/model"
}
rate_of() { # pass, op: TFLOP/s of --profile
    pass_of "$1" | grep -o "{\"op\": \"$2\"[^}]*}" | awk -F '"(seconds|flops)": ' '{ s += $2; f += $3 } END { if (s > 0) printf "%.0f", f / s / 1e12 }'
}
row_6() {
    case $card in h100 | h200) ;; *) skipped "Hopper's kernels" "they need an H100 or H200" && return ;; esac
    with STREAMBP_WGMMA=1 tests 'tests of ops, wgmma' 40 'ops, wgmma' test_ops ''
    for model in qwen3-30b-a3b gpt-oss-20b qwen3-8b qwen3.5-9b; do
        title="4 layers of $model, --profile" options="--init $model,num_hidden_layers=4 --seq-len 32768 --repeat 3 --profile"
        timed "$title" 40 "$options"
        with STREAMBP_WGMMA=1 timed "$title, wgmma" 40 "$options"
        for op in attention_backward experts_forward experts_backward_input experts_backward_weight; do
            old=$(rate_of "$title" $op) new=$(rate_of "$title, wgmma" $op)
            [ -z "$old" ] || [ -z "$new" ] || done_before "$model: $op, wgmma" || row - "$model: $op, wgmma" "$old TFLOP/s without" "$new TFLOP/s"
        done
    done
    command -v compute-sanitizer >/dev/null || { skipped racecheck 'compute-sanitizer is not here' && return; }
    for test in attention_wgmma experts_wgmma; do
        step "racecheck of $test" 120 compute-sanitizer --tool racecheck --error-exitcode 9 "$out/$build/test_ops" $test && row ok "racecheck of $test" 'no race' "$(tail -n 1 "$out/step.out")"
    done
}
row_7() {
    documents prompts 2048,2048,2048,2048,2048 prompts
    printf '#!/bin/sh\nwhile IFS= read -r line; do letters=$(printf %%s "$line" | tr -cd 1 | wc -c) && echo $((letters)); done\n' >"$out/reward.sh" && chmod +x "$out/reward.sh"
    for model in qwen3-0.6b qwen3-8b; do
        given="--init $model --lora-rank 16 --objective grpo --rollout --batch 1 --group-size 8 --max-new-tokens 512 --ignore-eos --seq-len 2560 --data $out/prompts.bin --reward-command $out/reward.sh"
        for shared in on off; do trained "GRPO of $model, prefixes $shared" 60 5 "$given --share-prefixes $shared"; done
        same_norm "GRPO of $model, prefixes off" "GRPO of $model, prefixes on" 0.02
    done
}
row_8() {
    plan_for '--for bp --init qwen3-8b --seq-len 32768'
    title='qwen3-8b at 32768 for a minute' each=$(plan_says estimated_seconds)
    bp "$title" 90 "--init qwen3-8b --seq-len 32768 --repeat $(awk "BEGIN { print int(60 / ${each:-5}) + 4 }")" || return
    ends=$(pass_of "$title" | sed 's/.*"seconds_each": \[\([^]]*\)\].*/\1/' | awk -F ', ' '{ print $2, $NF }')
    row "$(judge near "${ends#* }" "${ends% *}" 0.05)" "$title" "at its end ${ends% *} s, 5 %" "${ends#* } s; $(pass_of "$title" | sed 's/.*"gpu": \({[^}]*}\|null\).*/\1/; s/[{"}]//g')"
}
row_9() {
    plan_for "--init gpt2 --memory-limit $card"
    T=262144 usable=$(plan_says usable_bytes)
    [ "${usable:-0}" -lt 130000000000 ] || T=524288
    documents $T $T
    trained "qwen3-8b, all weights, $T tokens" 60 1 "--init qwen3-8b --seq-len $T --data $out/$T.bin"
}
row_10() {
    case $card in h100 | h200) ;; *) skipped 'floors of ops' "they are an H100's" && return ;; esac
    rates 'rates of ops' bench.json
    [ -s "$out/bench.json" ] || return
    grep -E '^\| (delta_|rope_|conv_|adamw)' "$kit/gpu_floors.md" | while IFS='|' read -r _ op _ _ _ floor _; do
        op=$(echo "$op" | sed 's/^ *//; s/ *$//') most=$(echo "$floor" | tr -cd 0-9 | awk '{ print 1.2 * $1 }')
        found=$(grep -o "{\"op\": \"${op%%, *}\", \"of\": \"${op#*, }\"[^}]*}" "$out/bench.json" | value ms | awk '{ print 1000 * $1 }')
        [ -z "$found" ] || done_before "floor of $op" || row "$(judge awk "BEGIN { exit !($found <= $most) }")" "floor of $op" "at most $most us" "$found us"
    done
}

open_kit "$to"
for number; do
    [ "$number" = 1 ] || [ -n "$build" ] || choose_build
    "row_$number"
done
rm -rf "$out/step.out" "$out/step.err" "$out/samples"* "$out/found" "$out/run"
finish
