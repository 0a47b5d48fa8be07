#!/bin/sh
# Makes archives for machines without a compiler, in dist/ (make dist): scripts/dist.sh [cpu|all ...]
# cpu: the program for CPUs, every type. all: with CUDA, whose libraries are found at run time. Without a word both; CUDA's is left out
# if there is no nvcc. They hold tracked files of this checkout. From one commit and toolchain the CPU's has the same bytes everywhere,
# CUDA's in a folder of the same name: nvcc makes names of kernels from it. parts.txt in them says which C library is needed.
# scripts/dist.sh wheel [cpu|all ...]: wheels in place of archives (make wheel; scripts/wheel.py by PYTHON [python3]).
# scripts/dist.sh tree FOLDER [cpu|all]: only the program, parts.txt and licences of its static parts, into a new folder.
# GLIBC=2.17: for an older C library (pip install ziglang, which then links; PYTHON has it). NVCC, ARCHS, CJSON, CUDNN_FRONTEND: of make.
# DIST [dist]: another folder for the archives.
set -eu
cd "$(dirname "$0")/.."
LC_ALL=C
export LC_ALL
stop() { echo "dist.sh: $1" >&2; exit "${2:-1}"; }
usage() { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- the program and what is linked statically ------------------------------------------------------------------------------
build() { # cpu or all; sets program
    program=${BUILD:-build/$1-portable}/train
    [ -f "$program.map" ] || rm -f "$program" # the map is written by the linker
    env -u PRECISION -u MPI_FLAGS -u MPI_LIBS ${MAKE:-make} --no-print-directory -s CC=gcc BACKEND="$1" PORTABLE=1 ${BUILD:+"BUILD=$BUILD"} "$program" >&2
}
# Prints the system's files in the program: archives with a member in it, and objects such as crt1.o
static_files() {
    awk '/^Archive member/ { taken = 1; next } /^(As-needed|Discarded|There are)/ { taken = 0 }
         taken && /^[^ ].*\(/ { sub(/\(.*/, ""); print } $1 == "LOAD" && /\.o$/ { print $2 }' "$program.map" | sort -u |
        while read -r file; do [ ! -e "$file" ] || realpath "$file"; done | grep -v "^$(pwd -P)/" | sort -u
}
# Prints one part a line: name, version, file of its licence, the linked file
package_of() { # file; Debian's and Ubuntu's packages
    package=$(dpkg -S "$1" 2>/dev/null | head -n 1 | cut -d : -f 1) && [ -n "$package" ] || return 1
    echo "$(dpkg-query -W -f '${source:Package} ${source:Version}\n' "$package" | sed 1q) /usr/share/doc/$package/copyright $1"
}
wheel_of() { # file, name of a wheel; in a toolkit of wheels, or a folder of pip install --target
    case $1 in */include/*) root=${1%/include/*} ;; *) root=${1%/lib*/*} ;; esac
    root=${root%/targets/*}
    for info in "$root"/dist-info/$2-*.dist-info "$root"/$2-*.dist-info; do
        [ ! -d "$info" ] || { echo "$2 $(echo "$info" | sed 's/.*-\(.*\)\.dist-info/\1/') $info/licenses $1"; return; }
    done
    [ ! -f "$root/EULA.txt" ] || { echo "$2 $(sed -n 's/.*"version" : "\(.*\)".*/\1/p' "$root/version.json" | head -n 1) $root/EULA.txt $1"; return; }
    return 1
}
# Prints headers of cuDNN's front end, whose code is compiled in, if there is one
front_end() {
    for word in $(grep -h -e -DHAVE_CUDNN "${program%/*}"/cuda-bf16/ops_flags build/cuda-bf16-portable/ops_flags 2>/dev/null | head -n 1); do
        [ ! -f "$word/cudnn_frontend.h" ] || { ls "$word/cudnn_frontend.h" "$word"/cudnn_frontend/thirdparty/*/json.hpp && return; }
    done
}
parts_of() { # cpu or all
    cjson=${CJSON:-build/cjson}
    echo "cJSON $(sed -n '1s/.*(\(.*\)).*/\1/p' "$cjson/debian/changelog" 2>/dev/null || sed -n 's/^#define CJSON_VERSION_.* \([0-9]*\)$/\1/p' "$cjson/cJSON.h" | paste -sd .)" \
        "$cjson/LICENSE cJSON.c"
    static_files >"$work/static"
    [ "$1" = cpu ] || front_end >>"$work/static"
    while read -r file; do
        case $file in
        */libcud*_static.a | */libcudadevrt.a | */libculibos.a) wheel_of "$file" nvidia_cuda_runtime || package_of "$file" ;;
        */cudnn_frontend.h) wheel_of "$file" nvidia_cudnn_frontend || package_of "$file" ;;
        */json.hpp) echo "nlohmann_json $(sed -n 's/.*version \([0-9.]*\)$/\1/p' "$file" | head -n 1) ${file%/*}/LICENSE.MIT $file" ;;
        *) package_of "$file" ;;
        esac || stop "$program links $file, of which no package tells the licence; install it by the package manager"
    done <"$work/static"
}
# The newest version of the C library that a symbol of the program needs
glibc_of() { objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d _ -f 2; }
# Links the objects of the program again, against the older C library of ziglang, whose parts replace glibc's and the unwinder
lower() { # cpu or all, program
    zig=$(${PYTHON:-python3} -c 'import ziglang; print(ziglang.__path__[0])' 2>/dev/null) ||
        stop "GLIBC=$GLIBC: ${PYTHON:-python3} has no ziglang, which links against it; pip install ziglang, or name another PYTHON"
    cplusplus=
    if [ "$1" = all ]; then
        echo 'char __libc_single_threaded;' | gcc -x c -c - -o "$work/single.o" # a variable of glibc 2.32; 0: there may be threads
        cplusplus="$work/single.o -lrt -lunwind"
    fi
    "$zig/zig" cc -target "x86_64-linux-gnu.$GLIBC" -Wl,--gc-sections -o "$2" \
        $(awk '$1 == "LOAD" && $2 ~ /^[^\/].*\.o$/ { print $2 }' "$program.map") \
        $(grep '\.a$' "$work/static" | grep -v 'libc_nonshared\|libgcc_eh') -lm -pthread -ldl $cplusplus
    copies=$(readelf -Wr "$2" | sed -n 's/.*R_X86_64_COPY *[^ ]* *\([^@ ]*\).*/\1/p' | grep -vxE 'std(in|out|err)' || true)
    [ -z "$copies" ] || stop "GLIBC=$GLIBC: the program has copies of $copies, which the C library does not see; compile with -fPIC"
    sed -i '/^glibc /d; /libgcc_eh\.a$/d; /crt[a-z]*S\.o$/d' "$work/parts"
    {
        echo "glibc $GLIBC $zig/lib/libc/glibc/LICENSES crt1.o"
        echo "ziglang $("$zig/zig" version) $zig/LICENSE compiler_rt"
        [ "$1" = cpu ] || echo "libunwind $("$zig/zig" version) $zig/lib/libunwind/LICENSE.TXT libunwind"
    } >>"$work/parts"
}

tree() { # folder, cpu or all
    build "$2"
    parts_of "$2" >"$work/parts" || exit 1
    mkdir -p "$1/licenses"
    cp LICENSE "$1"
    if [ -n "${GLIBC:-}" ]; then lower "$2" "$1/streambp"; else cp "$program" "$1/streambp"; fi
    strip --strip-all --remove-section=.note.gnu.build-id --remove-section=.comment "$1/streambp"
    while read -r name version licence file; do
        [ -s "$licence" ] || stop "$name, in $file: its licence is not in ${licence:-any file}"
        if [ -d "$licence" ]; then cat "$licence"/*; else cat "$licence"; fi >"$1/licenses/$name.txt"
        for text in $(grep -o '/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]' "$1/licenses/$name.txt"); do cp -L "$text" "$1/licenses"; done
    done <"$work/parts"
    {
        "$program" --version
        echo "needs      Linux on x86-64-v3 (AVX2), glibc $(glibc_of "$1/streambp") or newer"
        [ "$2" = cpu ] || echo "needs      on GPUs: a driver for CUDA $("${NVCC:-nvcc}" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')," \
            'its cuBLASLt, and cuDNN 9 if it is to be used; STREAMBP_LIBRARIES names their folder'
        printf '\n%-24s %-24s %-36s %s\n' 'linked statically' version licence files
        awk '{ sub(/.*\//, "", $4); key = $1; if (!(key in files)) { order[++n] = key; version[key] = $2 } files[key] = files[key] " " $4 }
             END { for (i = 1; i <= n; i++) printf "%-24s %-24s %-36s%s\n", order[i], version[order[i]], "licenses/" order[i] ".txt", files[order[i]] }' "$work/parts"
    } >"$1/parts.txt"
    chmod -R u=rwX,go=rX "$1"
}

if [ "${1:-}" = tree ]; then
    [ $# -ge 2 ] && [ $# -le 3 ] && [ -n "$2" ] || usage
    case ${3:-cpu} in cpu | all) ;; *) usage ;; esac
    [ ! -e "$2" ] || [ -z "$(ls -A "$2")" ] || stop "$2 is not empty; name a new folder"
    tree "$work/tree" "${3:-cpu}"
    mkdir -p "$2"
    cp -R "$work/tree/." "$2"
    exit
fi

# ---- an archive --------------------------------------------------------------------------------------------------------------
DIST=${DIST:-dist}
[ -d .git ] || [ -f .git ] || stop 'this is no git checkout, whose files and date an archive has; git clone it'
seconds=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
# Prints the files of an archive that are of use without the source
files() {
    git ls-files -- '*.md' VERSION data scripts/recipes scripts/common.sh scripts/finetune_chat.sh scripts/log_export.py scripts/plot.py \
        'scripts/*_demo.*' 'scripts/paper/*.png' ':!test' ':!.github' ':!data/*.c' ':!scripts/demo.sh'
}
sums() { (cd "$DIST" && ls | grep -E '\.(tar\.gz|whl)$' | xargs sha256sum >SHA256SUMS); }
wheel() { # cpu or all
    tree "$work/wheel-$1" "$1"
    ${PYTHON:-python3} scripts/wheel.py "$work/wheel-$1" "$DIST"
    sums
}
pack() { # cpu or all
    archive=streambp-$(cat VERSION)-linux-x86_64
    [ "$1" = cpu ] || archive=$archive-cuda
    mkdir -p "$DIST" "$work/$1"
    tree "$work/$1/$archive" "$1"
    files | xargs -d '\n' cp -P --parents -t "$work/$1/$archive"
    ln -s streambp "$work/$1/$archive/train" # as README and the scripts call it
    chmod -R u=rwX,go=rX "$work/$1/$archive"
    tar -C "$work/$1" --sort=name --mtime="@$seconds" --owner=0 --group=0 --numeric-owner --format=ustar -cf "$work/$archive.tar" "$archive"
    gzip -9nc "$work/$archive.tar" >"$work/$archive.tar.gz"
    mv "$work/$archive.tar.gz" "$DIST"
    sums
    echo "$DIST/$archive.tar.gz: $(du -h "$DIST/$archive.tar.gz" | cut -f 1), $(sed -n 's/^needs *//p' "$work/$1/$archive/parts.txt" | head -n 1)"
}

make=pack what=archive
[ "${1:-}" != wheel ] || { make=wheel what=wheel && shift; }
for kind; do case $kind in cpu | all) ;; *) usage ;; esac; done
[ $make = pack ] || ${PYTHON:-python3} -c 'import auditwheel' 2>/dev/null ||
    stop "${PYTHON:-python3} has no auditwheel, which names a wheel; python3 -m venv venv && venv/bin/pip install auditwheel, then PYTHON=venv/bin/python"
if [ $# = 0 ]; then
    set -- cpu all
    command -v "${NVCC:-nvcc}" >/dev/null || {
        echo "no $what with CUDA, because there is no nvcc: scripts/cuda_wheels.sh toolkit, then the same make with CUDA=toolkit"
        set -- cpu
    }
fi
for kind; do $make "$kind"; done
