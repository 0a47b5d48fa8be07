#!/bin/sh
# Toolkits for BACKEND=cuda: wheels become a toolkit; a folder that is none is refused, naming the missing file. A
# PORTABLE=1 build runs with the C library alone, in namespaces without a network: the CPU's, not optimised, as only
# linking and starting are tested; and the GPU's, if it has been built. The kit of scripts/gpu_kit.sh, by a make that only copies.
. test/cli.sh

# A fake Python: its pip installs wheels with only the files that are checked.
cat >"$WORK/python" <<'END'
#!/bin/sh
case $* in *--version*) exit ;; *"--target $KIT/wheels nvidia-cuda-nvcc=="*) mkdir "$KIT/wheels" && cd "$KIT/wheels" ;; *) exit 1 ;; esac
mkdir -p include nvidia/cu13/bin nvidia/cu13/nvvm/bin nvidia/cu13/lib nvidia/cu13/include/crt nvidia/cu13/include/cccl/nv
for part in cudnn nccl; do mkdir -p nvidia/$part/include nvidia/$part/lib; done
echo 'echo release 13.0, V13.0.88' >nvidia/cu13/bin/nvcc && chmod +x nvidia/cu13/bin/nvcc
(cd nvidia/cu13 && touch nvvm/bin/cicc include/cuda_runtime.h include/crt/host_config.h include/cccl/nv/target lib/libcublasLt.so.13)
touch nvidia/cudnn/lib/libcudnn.so.9 nvidia/nccl/lib/libnccl.so.2 include/cudnn_frontend.h
defines() { printf '#define %s\n' "$@"; }
defines 'CUBLAS_VER_MAJOR 13' 'CUBLAS_VER_MINOR 1' >nvidia/cu13/include/cublasLt.h
defines 'CUDNN_MAJOR 9' 'CUDNN_MINOR 19' >nvidia/cudnn/include/cudnn_version.h
defines 'NCCL_MAJOR 2' 'NCCL_MINOR 28' >nvidia/nccl/include/nccl.h
defines 'CUDNN_FRONTEND_MAJOR_VERSION 1' 'CUDNN_FRONTEND_MINOR_VERSION 32' >include/cudnn_frontend_version.h
END
chmod +x "$WORK/python"
KIT=$WORK/kit
export KIT
libraries() { # expected report of the toolkit, CUBLAS=FOLDER or nothing
    env NVCC="$KIT/bin/nvcc" CXX="${CXX:-c++} -nostdinc" CUBLAS= CUDNN= CUDNN_FRONTEND= NCCL= ${2:+"$2"} scripts/cuda_libraries.sh report >"$WORK/out" 2>&1
    check "with ${2:-the toolkit alone}: $1 ($(tail -n 1 "$WORK/out"))" grep -q -- "$1" "$WORK/out"
    check "one line of ${2:-the toolkit alone}" [ "$(grep -vc '^  ' "$WORK/out")" -le 1 ]
}
libraries "CUDA=$KIT: there is no bin/nvcc in it; .*scripts/cuda_wheels.sh"
wheels() { PYTHON=$WORK/python scripts/cuda_wheels.sh "$KIT" >"$WORK/out" 2>"$WORK/err"; }
check 'wheels become a toolkit' wheels
check 'and none of them is left' [ ! -e "$KIT/wheels" ]
check 'linkers find libraries by name' [ -e "$KIT/lib64/libcublasLt.so" ]
wheels
check 'a folder that holds something is left alone' grep -q 'is not empty' "$WORK/err"
libraries '  cuBLASLt   13.1'
libraries '  cuDNN      9.19, front end 1.32'
libraries '  NCCL       2.28'
libraries 'there is no include/cublasLt.h in it; .*nvidia-cublas' CUBLAS="$WORK"
mkdir -p "$WORK/wheel/include" "$WORK/wheel/lib"
mv "$KIT/include/cublasLt.h" "$WORK/wheel/include"
libraries 'there is no lib/libcublasLt.so in it; ' CUBLAS="$WORK/wheel"
libraries 'needs cuBLASLt.s header: .*CUBLAS=<folder>'
touch "$WORK/wheel/lib/libcublasLt.so.13"
libraries '  cuBLASLt   13.1' CUBLAS="$WORK/wheel"
rm "$KIT/include/cudnn_frontend.h"
[ -e /usr/include/cudnn_frontend.h ] || [ -e /usr/local/include/cudnn_frontend.h ] ||
    libraries '  cuDNN .* not its front end. WARNING: .*pip install --no-deps' CUBLAS="$WORK/wheel"
rm "$KIT/nvvm/bin/cicc"
libraries 'is not complete: there is no nvvm/bin/cicc (pip: nvidia-nvvm)'

# A kit whose programs need what every machine has, and what the kit brings; then one that needs more
mkdir -p "$WORK/tree" "$WORK/made/cuda/bin"
ln -s "$PWD"/[!s]* "$PWD/streambp.h" "$WORK/tree"
cp -r scripts "$WORK/tree/scripts"
rm "$WORK/tree/build"
printf '#!/bin/sh\n' >"$WORK/made/cuda/bin/nvcc"
cat >"$WORK/made/make" <<'END'
#!/bin/sh
echo "$*" >>"$WORK/made/calls"
for word; do case $word in BUILD=*) to=${word#*=} ;; esac; done
mkdir -p "$to" build/test-gpu-bf16
for program in "$to/train" "$to/bench" "$to/bench_decode" build/test-gpu-bf16/test_ops build/test-gpu-bf16/test_gpu_large; do cp "$WORK/made/program" "$program"; done
END
chmod +x "$WORK/made/make" "$WORK/made/cuda/bin/nvcc"
echo 'double cos(double); void _cmocka_run_group_tests(void); int main(int n, char **v) { if (n > 1) _cmocka_run_group_tests(); return (int)cos(n + **v); }' >"$WORK/made/program.c"
kit() { # libraries of the programs
    ${CC:-cc} "$WORK/made/program.c" -Wl,--no-as-needed -lm "$@" -o "$WORK/made/program"
    env PATH="$WORK/made:$PATH" WORK="$WORK" CUDA="$WORK/made/cuda" CUDA12="$WORK/made/cuda" "$WORK/tree/scripts/gpu_kit.sh" "$WORK/packed" >"$WORK/out" 2>"$WORK/err"
}
check 'a kit' kit -lcmocka
check 'of two builds' [ "$(xz -dc "$WORK"/packed/cuda1[23].tar.xz | tar -t -i | grep -cE '^cuda1[23]/(train|bench|bench_decode|test_ops|test_gpu_large|lib/libcmocka\.so\.0)$')" = 12 ]
check 'of their toolkits, portable' [ "$(grep -cE "BACKEND=all PORTABLE=1 BUILD=build/cuda1[23]-portable ARCHS=90 CUDA=$WORK" "$WORK/made/calls")" = 4 ]
check 'with what first.sh needs' [ "$(cd "$WORK/packed" && ls first.sh common.sh kit.txt behind.bin lengths.bin | wc -l)" = 5 ]
kit -lcmocka -lpcre2-8 && fail 'a program that needs another library'
check 'is refused' grep -q '^gpu_kit.sh: a program of build/cuda13-portable needs lib' "$WORK/err"

build=build/test-portable
if ! ${MAKE:-make} -s BACKEND=cpu build/cjson/cJSON.c >"$WORK/log" 2>&1; then
    skip 'the portable build' "the source of cJSON cannot be had ($(grep -v '^make' "$WORK/log" | tail -n 1))"
    finish
    exit
fi
${MAKE:-make} -s BACKEND=cpu PRECISION=fp32 PORTABLE=1 BUILD="$build" CFLAGS=-O0 "$build/train" || { fail 'the portable build'; finish; exit 1; }
check 'not for the processor of the build' sh -c "! grep -q -e -march=native '$build/flags'"

# The root folder of the namespace: programs, the files of the C library that they name, the shard.
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

for gpu in build/all-portable/train build/cuda13-portable/train build/cuda-bf16-portable/train; do [ ! -x "$gpu" ] || break; done
if [ -x "$gpu" ]; then
    take "$gpu" gpu
    PROGRAM=/gpu/train
    succeeds plan --init qwen3-8b --seq-len 32k --json
    refuses 1 'no GPU was found \(no NVIDIA driver\)' bp --device cuda --init qwen3-8b,num_hidden_layers=1 --seq-len 1024
else
    skip "$gpu" 'it has not been built (make BACKEND=all PORTABLE=1)'
fi
finish
