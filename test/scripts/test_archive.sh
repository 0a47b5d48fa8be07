#!/bin/sh
# make dist: the archive of the CPU, unpacked in a root that holds libc and sh alone (a namespace without a network), plans, trains, resumes to
# the bit, samples. Its prepare.py runs outside. Sums, licences of what is linked statically, the oldest C library, the same bytes of two
# packings. Not optimised, as only linking and starting are tested. ALL_CASES=1: two optimised builds in two folders; GLIBC=2.17. A GPU's
# portable program starts there, too, if it has been built.
. test/cli.sh
. test/find_python.sh
build=build/test-portable
if ! ${MAKE:-make} -s BACKEND=cpu build/cjson/cJSON.c >"$WORK/log" 2>&1; then
    skip 'make dist' "the source of cJSON cannot be had ($(grep -v '^make' "$WORK/log" | tail -n 1))"
    finish
    exit
fi
dist() { # folder, variables: its archives, of the CPU
    folder=$1
    shift
    flock build ${MAKE:-make} --no-print-directory -s dist BACKEND=cpu DIST="$folder" "$@" >"$WORK/out" 2>"$WORK/err" || { fail "make dist $*"; tail "$WORK/err"; }
}
dist "$WORK/dist" BUILD=$build CFLAGS=-O0
name=streambp-$(cat VERSION)-linux-x86_64
archive=$WORK/dist/$name.tar.gz
[ -f "$archive" ] || { finish; exit 1; }
check 'an archive, of which the command tells' grep -q "/$name.tar.gz: .*glibc 2\.[0-9]* or newer" "$WORK/out"
check 'SHA256SUMS' sh -c "cd '$WORK/dist' && sha256sum --quiet -c SHA256SUMS && [ \$(wc -l <SHA256SUMS) = 1 ]"

# ---- what is in it ------------------------------------------------------------------------------------------------------------
root=$WORK/root
mkdir -p "$root/proc" "$root/tmp" "$root/dev" "$root/bin"
check 'one folder' [ "$(tar -xzvf "$archive" -C "$root" | cut -d / -f 1 | sort -u)" = "$name" ]
unpacked=$root/$name program=$root/$name/streambp
for file in README.md LICENSE CHANGELOG.md parts.txt data/prepare.py scripts/finetune_chat.sh scripts/guides/lora.md scripts/recipes/cpu-demo.args; do
    check "$file is in the archive" [ -s "$unpacked/$file" ]
done
check 'no source is in it' [ -z "$(find "$unpacked" -name '*.[ch]' -o -name '*.cu' -o -name Makefile)" ]
check 'all of data/ that is Python' [ "$(ls "$unpacked"/data/*.py | wc -l)" = "$(git ls-files 'data/*.py' | wc -l)" ]
strings "$program" >"$WORK/strings"
check 'no folder of this machine' sh -c "! grep -qE '$PWD|/usr/lib/gcc|/home/' '$WORK/strings'"
check 'no build id and no search path' sh -c "! readelf -Wnd '$program' | grep -qE 'Build ID|RPATH|RUNPATH'"
check 'not for the processor of the build' sh -c "! grep -q -e -march=native $build/flags"

# A symbol of each static part, and words of its licence
while read -r symbol licence words; do
    nm "$build/train" | grep -q " [Tt] $symbol\$" || fail "$symbol is not linked statically"
    check "licence of $symbol" grep -q "$words" "$unpacked"/licenses/$licence.txt
    check "$symbol is of a part of parts.txt" grep -q "^$licence  .* licenses/" "$unpacked/parts.txt"
done <<'END'
GOMP_parallel gcc-[0-9]* GCC.RUNTIME.LIBRARY.EXCEPTION
pcre2_match_8 pcre2 University.of.Cambridge
cJSON_Parse cJSON Dave.Gamble
_start glibc GNU.C.Library
END
check 'the text that a licence refers to' grep -q 'GNU GENERAL PUBLIC LICENSE' "$unpacked/licenses/GPL-3"

# The C library: troubleshooting.md tells the number
needs=$(objdump -T "$program" | sed -n 's/.*GLIBC_\([0-9.]*\).*/\1/p' | sort -Vu | tail -n 1)
check "parts.txt has glibc $needs" grep -q "^needs .* glibc $needs or newer" "$unpacked/parts.txt"
case $(getconf GNU_LIBC_VERSION) in
*' 2.3'[4-7]*)
    check "glibc $needs is 2.34" [ "$needs" = 2.34 ]
    check 'as the guide says' grep -q 'glibc 2\.34' scripts/guides/troubleshooting.md
    ;;
*) skip 'glibc 2.34' "this machine builds for $(getconf GNU_LIBC_VERSION)" ;;
esac

# ---- the same bytes -----------------------------------------------------------------------------------------------------------
(umask 077 && export TZ=Asia/Tokyo && dist "$WORK/again" BUILD=$build CFLAGS=-O0)
check 'packed again: the same bytes' cmp "$archive" "$WORK/again/$name.tar.gz"
if [ "${ALL_CASES:-}" = 1 ]; then
    dist "$WORK/here"
    git clone -q . "$WORK/another/folder"
    git ls-files | while read -r file; do [ ! -e "$file" ] || cp -P --parents "$file" "$WORK/another/folder"; done
    CJSON=$PWD/build/cjson CCACHE_DISABLE=1
    (cd "$WORK/another/folder" && export CCACHE_DISABLE && dist dist CJSON="$CJSON")
    check 'built in another folder: the same bytes' cmp "$WORK/here/$name.tar.gz" "$WORK/another/folder/dist/$name.tar.gz"
fi

# ---- refusals -----------------------------------------------------------------------------------------------------------------
refused() { # what, pattern, words of dist.sh
    what=$1 pattern=$2
    shift 2
    scripts/dist.sh "$@" >"$WORK/out" 2>"$WORK/err" && fail "$what: status 0"
    check "$what: $(tail -n 1 "$WORK/err")" grep -qE "$pattern" "$WORK/err"
}
refused 'a folder that holds something' 'root is not empty; name a new folder$' tree "$root"
refused 'another kind' '^Makes archives' cuda
mkdir "$WORK/fake"
cp "$build/train" "$build/train.map" "$WORK/fake"
echo "LOAD $WORK/unknown.o" >>"$WORK/fake/train.map"
: >"$WORK/unknown.o"
MAKE=true BUILD=$WORK/fake DIST=$WORK/none refused 'a static part of no package' 'links .*/unknown.o, of which no package tells the licence' cpu
check 'then there is no archive' [ ! -e "$WORK/none/$name.tar.gz" ]
MAKE=true BUILD=$build DIST=$WORK/none NVCC=$WORK/nvcc scripts/dist.sh >"$WORK/out"
check 'without nvcc only the CPU' sh -c "grep -q '^no archive with CUDA, because there is no nvcc: ' '$WORK/out' && [ \$(ls '$WORK/none'/*.gz) = '$WORK/none/$name.tar.gz' ]"

# A CPU without AVX2
echo 'int main(void) { return 0; }' >"$WORK/main.c"
${CC:-cc} -D_GNU_SOURCE '-D__builtin_cpu_supports(x)=0' llmc/base/portable.c "$WORK/main.c" -o "$WORK/old"
"$WORK/old" 2>"$WORK/err"
check 'one line without AVX2' [ "$?-$(grep -c 'old: this program needs a CPU with AVX2 .*; build ' "$WORK/err")-$(wc -l <"$WORK/err")" = 1-1-1 ]
check 'the program looks for AVX2' sh -c "nm $build/train | grep -q ' t cpu_check$'"
check 'without instructions of AVX' sh -c "! objdump -d --no-show-raw-insn $build/portable.o | grep -qE ':.v[a-z]+ '"

# ---- in a root without a compiler ---------------------------------------------------------------------------------------------
take() { # program: the files of the C library that it needs
    for library in $(ldd "$1" | grep -o '/[^ ]*'); do
        case ${library##*/} in
        libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | librt.so.1 | ld-linux*) cp -L --parents "$library" "$root" ;;
        *) fail "$1 needs $library" ;;
        esac
    done
}
take "$program"
take /bin/sh
cp -L /bin/sh "$root/bin/sh"
cp "$SHARD" "$root/shard.bin"
cat >"$WORK/inside" <<'END'
#!/bin/sh
exec unshare --user --map-root-user --mount --net sh -c \
    'mount --rbind /proc "$0/proc" && exec chroot "$0" /bin/sh -c "exec \"\$0\" \"\$@\"" "$@"' "$ROOT" "$PROGRAM" "$@"
END
chmod +x "$WORK/inside"
TRAIN=$WORK/inside ROOT=$root PROGRAM=/$name/train
export ROOT PROGRAM
if ! unshare --user --map-root-user --mount --net chroot / true 2>"$WORK/err"; then
    skip 'the archive in a namespace' "namespaces are not permitted ($(tail -n 1 "$WORK/err"))"
    finish
    exit
fi
succeeds --version
says out "^streambp.c $(cat VERSION), commit" '^build      cpu fp32, cpu bf16, gcc' '^libraries  without oneDNN, without MPI, PCRE2 [0-9.]*, cJSON [0-9.]*$'
succeeds plan --init qwen3-8b --seq-len 32k --json
check 'a plan' test "$(json total_bytes)" -gt 1000000000
succeeds train --init $TINY --data shard.bin --seq-len 32 --schedule constant --steps 4 --out run
succeeds train --init $TINY --data shard.bin --seq-len 32 --schedule constant --steps 2 --out parts
succeeds train --out parts --resume --extend --steps 4
check 'resumed to the bit' same_run "$root/run" "$root/parts" 4
succeeds sample --model run --prompt-ids 1,2,3 --max-new-tokens 4 --temperature 0
check 'sampled ids' grep -qE '[0-9]+( [0-9]+){3}' "$WORK/out"

# prepare.py, outside
find_or_make_python
if [ -n "$python" ]; then
    "$python" "$unpacked/scripts/recipes/toy_tokenizer.py" "$WORK/tokenizer" >"$WORK/log" 2>&1 &&
        "$python" "$unpacked/data/prepare.py" --tokenizer "$WORK/tokenizer" --out "$root/shards" "$unpacked/llmc" >"$WORK/log" 2>&1 || { fail prepare.py; tail -n 3 "$WORK/log"; }
    succeeds bp --init ${TINY%,*},vocab_size=272 --data 'shards/train-*.bin' --seq-len 64 --dtype bf16 --json
    check 'a loss of its shards, in bf16' grep -q '"loss": 5\..*"dtype": "bf16"' "$WORK/out"
else
    skip prepare.py "no Python has $DATA_MODULES"
fi

for gpu in build/all-portable/train build/cuda13-portable/train; do [ ! -x "$gpu" ] || break; done
if [ -x "$gpu" ]; then
    take "$gpu"
    mkdir "$root/gpu" && cp "$gpu" "$root/gpu/train"
    PROGRAM=/gpu/train
    succeeds plan --init qwen3-8b --seq-len 32k --json
    refuses 1 'no GPU was found \(no NVIDIA driver\)' bp --init qwen3-8b,num_hidden_layers=1 --seq-len 1024 --device cuda
else
    skip "$gpu" 'it has not been built (make BACKEND=all PORTABLE=1)'
fi

# ---- an older C library -------------------------------------------------------------------------------------------------------
if [ "${ALL_CASES:-}" = 1 ] && ${PYTHON:-python3} -c 'import ziglang' 2>/dev/null; then
    GLIBC=2.17 dist "$WORK/old-libc" BUILD=$build CFLAGS=-O0
    check 'an archive for glibc 2.17' grep -q 'glibc 2.17 or newer' "$WORK/out"
    rm -rf "$unpacked"
    tar -xzf "$WORK/old-libc/$name.tar.gz" -C "$root"
    take "$program"
    PROGRAM=/$name/train
    succeeds train --init $TINY --data shard.bin --seq-len 32 --schedule constant --steps 4 --out older
    refuses 1 'absent' info --model absent
    check 'the same weights' same_run "$root/run" "$root/older" 4
elif [ "${ALL_CASES:-}" = 1 ]; then
    skip 'GLIBC=2.17' "${PYTHON:-python3} has no ziglang"
fi
finish
