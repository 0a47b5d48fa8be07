#!/bin/sh
# One program for every type: --dtype chooses an op set, to the bit the program of that type alone; a run keeps its type and device; the
# objects of op sets export their tables and share nothing.
. test/cli.sh
CC=${CC:-cc}
suffix=${CC%% *}
suffix=-${suffix##*/} # of the Makefile's folders
case $suffix in -cc | -gcc) suffix= ;; esac
made() { # variables, target
    flock build env -u BACKEND -u PRECISION ${MAKE:-make} -s CC="$CC" ONEDNN= $1 "$2" >"$WORK/log" 2>&1 || { fail "make $1 $2"; cat "$WORK/log"; }
}
TRAIN=build/cpu$suffix/train
made BACKEND=cpu "$TRAIN"
for dtype in fp32 bf16; do made "BACKEND=cpu PRECISION=$dtype" build/cpu-$dtype$suffix/train; done

succeeds --version
says out '^build      cpu fp32, cpu bf16, '
succeeds bp --init $TINY --seq-len 16
says out '^model .*, fp32; trained'
succeeds bp --init $TINY --seq-len 16 --device cpu --bf16
says out '^model .*, bf16; trained'
refuses 2 '^train: --device cuda --dtype auto is not in this program, which has cpu fp32, cpu bf16; make BACKEND=all' bp --init $TINY --device cuda

# ---- the same bits as the program of a type alone ---------------------------------------------------------------------------
# Every model of the rows "golden"; a tenth of them unless ALL_CASES=1
models=$(sed -n 's|.*FOLDER("\([^"]*\)").*|\1|p; s|.*GOLDEN "\([^"]*\.bin\)".*|\1|p' test/streambp/test_golden.c)
case ${ALL_CASES:-0} in 0) models=$(echo "$models" | awk 'NR % 10 == 2') ;; esac
check 'there are golden models' [ "$(echo "$models" | wc -w)" -ge 3 ]
for model in $models; do
    for dtype in fp32 bf16; do
        for program in one alone; do
            set -- build/cpu-$dtype$suffix/train
            [ $program = alone ] || set -- "$TRAIN" --dtype $dtype
            "$1" bp --model $GOLDEN/$model --seq-len 32 --batch 2 --json --quiet --overwrite --grads-out "$WORK/gradients.$program" $2 $3 |
                grep -o '"loss": [^,]*\|"grad_norm": [^,]*\|"plan_bytes": [^,]*' >"$WORK/numbers.$program"
        done
        check "$model in $dtype has a loss" [ "$(wc -l <"$WORK/numbers.one")" = 3 ]
        check "$model in $dtype: the numbers of its own program" cmp "$WORK/numbers.one" "$WORK/numbers.alone"
        check "$model in $dtype: the gradients of its own program" cmp "$WORK/gradients.one" "$WORK/gradients.alone"
        mv "$WORK/gradients.one" "$WORK/$dtype"
    done
    check "$model: types differ" sh -c "! cmp -s '$WORK/fp32' '$WORK/bf16'"
done

# ---- the compiler's flags ---------------------------------------------------------------------------------------------------
check 'a struct argument compiles' $CC $(cat build/driver$suffix/driver_flags) -O1 test/scripts/struct_argument.c -o "$WORK/argument"
check 'a struct argument of a const function reaches it' "$WORK/argument"

# ---- a run keeps its type and device ----------------------------------------------------------------------------------------
succeeds train --init $TINY --data $SHARD --seq-len 32 --samples 2 --steps 2 --save-every 1 --dtype bf16 --out "$WORK/run"
check 'the log says what was taken' grep -q '"dtype": "bf16", "device": "cpu"' "$WORK/run/log.jsonl"
succeeds train --resume --extend --steps 4 --out "$WORK/run"
says out '^model .*, bf16; trained'
refuses 1 'holds bf16 weights, this run trains in fp32; resume with --dtype bf16$' train --resume --extend --steps 5 --dtype fp32 --out "$WORK/run"
sed -i 's/"device": "cpu"/"device": "cuda"/' "$WORK/run/log.jsonl"
refuses 2 '^train: --device cuda --dtype bf16 is not in this program' train --resume --extend --steps 6 --out "$WORK/run"
succeeds train --config "$WORK/run" --steps 1 --quiet --out "$WORK/other" # a new run takes the type, not the device

# ---- what objects export ----------------------------------------------------------------------------------------------------
is_table() { expr "$1" : 'ops_[a-z]*_[a-z0-9]*$' >/dev/null; }
exported() { nm -g --defined-only "$1" | awk 'NF == 3 { print $3 }'; }
for object in build/cpu-fp32$suffix/ops_cpu.o build/cpu-bf16$suffix/ops_cpu.o build/cuda-*/ops_cuda.o build/cuda*-portable/cuda-*/ops_cuda.o; do
    case $object in build/cuda*) [ "$object" -nt llmc/ops/ops.h ] || continue ;; esac # not built, or of another version
    case $object in *cuda-bf16*) table=$(exported "$object" | grep -v '^cudnn_attention_') ;; *) table=$(exported "$object") ;; esac
    check "$object exports a table alone: $(echo $table | cut -c1-200)" is_table "$table"
done
check 'the driver exports nothing of an op set' [ -z "$(exported build/driver$suffix/train_gpt.o | grep '^ops_\|^cpu_\|^dist_')" ]
finish
