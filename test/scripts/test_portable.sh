#!/bin/sh
# A PORTABLE=1 build runs where the C library is and nothing else, in namespaces without a network: the CPU's, not optimised, as only
# linking and starting are tested; and the GPU's, where it has been built.
. test/cli.sh
build=build/test-portable
if ! ${MAKE:-make} -s build/cjson/cJSON.c >"$WORK/log" 2>&1; then
    skip 'the portable build' "the source of cJSON cannot be had ($(grep -v '^make' "$WORK/log" | tail -n 1))"
    finish
    exit
fi
${MAKE:-make} -s BACKEND=cpu PRECISION=fp32 PORTABLE=1 BUILD="$build" CFLAGS=-O0 "$build/train" || { fail 'the portable build'; finish; exit 1; }
check 'not for the processor of the build' sh -c "! grep -q -e -march=native '$build/flags'"

# The root folder of the namespace: programs, what of the C library they name, the shard.
root=$WORK/root
mkdir -p "$root/proc" "$root/tmp" "$root/dev"
cp "$SHARD" "$root/shard.bin"
take() { # program, its folder there
    mkdir -p "$root/$2"
    libraries=$(ldd "$1" | grep -o '/[^ ]*')
    for library in $libraries; do
        case ${library##*/} in
        libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | librt.so.1 | ld-linux*) cp -L --parents "$library" "$root" ;;
        *) fail "$1 needs $library" ;;
        esac
    done
    check "$1 has the folders of no machine" sh -c "! readelf -d '$1' | grep -qE 'R(UN)?PATH'"
    cp "$1" "$root/$2/train"
}
cat >"$WORK/inside" <<'END'
#!/bin/sh
exec unshare --user --map-root-user --mount --net sh -c 'mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"' "$ROOT" "$PROGRAM" "$@"
END
chmod +x "$WORK/inside"
TRAIN=$WORK/inside ROOT=$root
export ROOT PROGRAM
take "$build/train" cpu
PROGRAM=/cpu/train
if ! unshare --user --map-root-user --mount --net chroot / true 2>"$WORK/err"; then
    skip 'the portable build in a namespace' "namespaces are not permitted ($(tail -n 1 "$WORK/err"))"
    finish
    exit
fi
succeeds plan --init qwen3-8b --seq-len 32k --json
check 'a plan' test "$(json total_bytes)" -gt 1000000000
succeeds --init $TINY --data shard.bin --seq-len 32 --steps 3 --out run
check 'a trained model' test -s "$root/run/log.jsonl"

gpu=build/cuda-bf16-portable/train
if [ -x "$gpu" ]; then
    take "$gpu" gpu
    PROGRAM=/gpu/train
    succeeds plan --init qwen3-8b --seq-len 32k --json
    refuses 1 'no GPU was found \(no NVIDIA driver\)' bp --init qwen3-8b,num_hidden_layers=1 --seq-len 1024
else
    skip "$gpu" 'it has not been built (make BACKEND=cuda PORTABLE=1)'
fi
finish
