#!/bin/sh
# Toolkits for BACKEND=cuda: wheels become a toolkit; a folder that is none is refused, naming the missing file. The kit of
# scripts/gpu_kit.sh, by a make that only copies.
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
mkdir -p nvidia_cuda_runtime-13.0.96.dist-info/licenses && echo EULA >nvidia_cuda_runtime-13.0.96.dist-info/licenses/License.txt
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
check 'licences stay' [ -s "$KIT"/dist-info/nvidia_cuda_runtime-*/licenses/License.txt ]
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
check 'with what its scripts need' [ "$(cd "$WORK/packed" && ls first.sh gpu_queue.sh common.sh gpu_steps.sh gpu_floors.md kit.txt behind.bin lengths.bin | wc -l)" = 8 -a -x "$WORK/packed/make_documents" ]
kit -lcmocka -lpcre2-8 && fail 'a program that needs another library'
check 'is refused' grep -q '^gpu_kit.sh: a program of build/cuda13-portable needs lib' "$WORK/err"
finish
