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

for part in build speed-32k speed-128k peers-2k-64k longest table1 table2 figure3 chunks; do
    evidence 0 $EVIDENCE --dry $part "$WORK/dry"
    check "$part: planned to end in time" [ "$(planned)" -gt 0 -a "$(planned)" -le 540 ]
done
check 'nothing was written' [ -z "$(ls "$WORK/dry")" ]
evidence 0 $EVIDENCE --dry speed-128k "$WORK/dry"
says 'a pass of 128k is not short' '^stream at 131072  *not run  *[1-9][0-9][0-9] '
says 'profiled against this machine' 'bp --model .*/qwen3-8b --seq-len 131072 --repeat 2 --profile --machine h200'
evidence 0 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
says 'fewer layers are said' '^NOTE: 9 layers of qwen3-8b'
evidence 0 LENGTHS=32768 $EVIDENCE --dry peers-2k-64k "$WORK/dry"
check 'all layers where they end in time' [ "$(grep -c '^NOTE' "$WORK/err")" = 0 ]
evidence 2 MODEL=gpt2 $EVIDENCE --dry figure3 "$WORK/none"
says 'a model that the paper has not' 'MODEL=gpt2 is not in Figure 3'
evidence 2 $EVIDENCE speed-1k "$WORK/none"
says 'the parts are named' "there is no part 'speed-1k'; parts are build, speed-32k"
evidence 2 $EVIDENCE speed-32k

# ---- a program that only tells -------------------------------------------------------------------------------------------------
cat >"$WORK/train" <<'END_OF_TRAIN'
#!/bin/sh
case "$*" in
plan*) echo "{\"weights\": 1000000000, \"estimated_seconds\": ${PASS_SECONDS:-0.5}}" ;;
convert*) mkdir -p "$WORK/store/qwen3-8b" && echo '{}' >"$WORK/store/qwen3-8b/config.json" ;;
*--keep*) echo 'train: this fails' >&2; exit 1 ;;
bp*) echo '{"loss": 1.5}' ;;
esac
END_OF_TRAIN
chmod +x "$WORK/train"
export WORK
evidence 1 TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/told"
says 'the failure and its reason' '^stream --keep attention at 32768 *FAILED .* train: this fails$'
says 'the case after it' '^checkpoint at 32768 *done '
check 'a line for each case' [ "$(grep -c '"part": "speed-32k"' "$WORK/told/speed.jsonl")" = 3 ]
check 'its result, or none' [ "$(grep -c '"result": {"loss": 1.5}}$' "$WORK/told/speed.jsonl") $(grep -c '"result": null}$' "$WORK/told/speed.jsonl")" = '2 1' ]
evidence 0 PASS_SECONDS=200 TRAIN="$WORK/train" $EVIDENCE speed-32k "$WORK/late"
says 'what would not end is left out' '^checkpoint at 32768 *left out *1[0-9][0-9][0-9] .* s were left$'

# ---- compare.py fails: no GPU, or no model ---------------------------------------------------------------------------------------
evidence 1 TRAIN="$WORK/train" $EVIDENCE chunks "$WORK/failed"
says 'a comparison that fails' '^chunks *FAILED '
check 'leaves no empty file' [ -z "$(ls "$WORK/failed")" ]
finish
