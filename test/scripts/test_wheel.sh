#!/bin/sh
# scripts/wheel.py: a wheel of the portable program, not optimised, in a fresh environment: prepare, train, convert, and transformers
# loads the result. Its tag is no older than the C library's newest symbol in the program. The environment has the packages of a
# Python found here; with ALL_CASES pip installs them from its index.
. test/cli.sh
. test/find_python.sh
root=$PWD
find_auditwheel() { # or make a Python that has it, and set $python
    find_python auditwheel
    [ -z "$python" ] || return 0
    python=build/auditwheel/bin/python
    has_modules "$python" auditwheel && return
    { [ "${DEPS:-}" != skip ] && python3 -m venv build/auditwheel && "$python" -m pip install -q auditwheel; } >"$WORK/log" 2>&1 || python=
}
find_auditwheel
if [ -z "$python" ]; then
    skip 'the wheel' "no Python has auditwheel ($(tail -n 1 "$WORK/log"))"
    finish
    exit
fi
auditwheel=$python
find_or_make_python
if [ -z "$python" ] || ! has_modules "$python" pip; then
    skip 'the wheel' 'no Python has pip, tokenizers, jinja2 and numpy (PYTHON=... names one)'
    finish
    exit
fi
if ! ${MAKE:-make} -s BACKEND=cpu build/cjson/cJSON.c >"$WORK/log" 2>&1; then
    skip 'the wheel' "the source of cJSON cannot be had ($(grep -v '^make' "$WORK/log" | tail -n 1))"
    finish
    exit
fi

# ---- the file ---------------------------------------------------------------------------------------------------------------
make_wheel() { # folder, a Python
    flock build ${MAKE:-make} -s wheel BACKEND=cpu DIST="$1" PYTHON="$2" BUILD=build/test-portable CFLAGS=-O0 >"$WORK/out" 2>"$WORK/err"
}
mkdir "$WORK/none-bin"
printf '#!/bin/sh\nexit 1\n' >"$WORK/none-bin/python"
chmod +x "$WORK/none-bin/python"
make_wheel "$WORK/none" "$WORK/none-bin/python" && fail 'a wheel without auditwheel'
check "a Python without auditwheel ($(head -n 1 "$WORK/err"))" grep -q "^dist.sh: $WORK/none-bin/python has no auditwheel, .*pip install auditwheel" "$WORK/err"
make_wheel "$WORK/dist" "$auditwheel" || { fail "make wheel"; tail "$WORK/err"; }
file=$(cat "$WORK/out")
check 'a wheel, of which the command tells' [ -f "$file" ]
check 'SHA256SUMS' sh -c "cd '$WORK/dist' && sha256sum --quiet -c SHA256SUMS && grep -q ' ${file##*/}\$' SHA256SUMS"
python3 -m zipfile -e "$file" "$WORK/content"
tag=$(echo "$file" | sed -n "s|^$WORK/dist/streambp_c-$(cat VERSION)-py3-none-manylinux_\(2_[0-9]*\)_$(uname -m)\.whl\$|\1|p" | tr _ .)
newest=$(objdump -T "$WORK/content/streambp_c/streambp" | grep -o 'GLIBC_[0-9.]*' | sort -u -V | tail -n 1)
echo "the program's newest symbol: $newest, the wheel's tag: manylinux $tag"
check "the tag, $tag, is that of $newest" [ "GLIBC_$tag" = "$newest" ]
check 'and what auditwheel says' sh -c "'$auditwheel' -m auditwheel show '$file' | tr '\n' ' ' | grep -qF 'platform tag: \"manylinux_$(echo "$tag" | tr . _)_$(uname -m)\"'"
python3 - "$file" VERSION >"$WORK/out" 2>"$WORK/err" <<'END'
import base64, csv, hashlib, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
info = f"streambp_c-{open(sys.argv[2]).read().strip()}.dist-info"
read = lambda name: archive.read(name).decode()
rows = {name: (code, size) for name, code, size in csv.reader(read(f"{info}/RECORD").splitlines())}
assert rows.pop(f"{info}/RECORD") == ("", "")
assert {*rows, f"{info}/RECORD"} == {*archive.namelist()}, {*rows} ^ {*archive.namelist()}
for name, (code, size) in rows.items():
    text = archive.read(name)
    assert code == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=") and int(size) == len(text), name
assert {name.split("/")[0] for name in rows} == {"streambp_c", info}, "a top-level name that is not ours"
runs = {entry.filename for entry in archive.infolist() if entry.external_attr >> 16 & 0o111}
assert runs == {"streambp_c/streambp"}, runs
assert f"Tag: {sys.argv[1][sys.argv[1].index('py3-'):-4]}\n" in read(f"{info}/WHEEL") and "Root-Is-Purelib: false\n" in read(f"{info}/WHEEL")
head, text = read(f"{info}/METADATA").split("\n\n", 1)
assert text == open("README.md", encoding="utf-8").read() and "\nName: streambp-c\n" in head and "Extra" not in head, head
for name in "LICENSE", "parts.txt", "cJSON.txt", "pcre2.txt":
    assert f"\nLicense-File: {name}\n" in head and f"{info}/licenses/{name}" in rows, name
END
check "its RECORD, names and METADATA ($(tail -n 1 "$WORK/err"))" [ $? = 0 ]

# ---- the same again; what is no wheel; one with CUDA ----------------------------------------------------------------------------------------
wheel() { "$auditwheel" scripts/wheel.py "$WORK/tree" "$1" >"$WORK/out" 2>"$WORK/err"; } # folder
mkdir "$WORK/tree"
cp -r "$WORK"/content/*.dist-info/licenses "$WORK/tree"
mv "$WORK/tree/licenses/LICENSE" "$WORK/tree/licenses/parts.txt" "$WORK/content/streambp_c/streambp" "$WORK/tree"
wheel "$WORK/again"
check 'the same bytes again' cmp "$file" "$WORK/again/${file##*/}"
refuses_wheel() { # what, pattern
    wheel "$WORK/none" && fail "$1"
    check "$1: '$2' ($(cat "$WORK/err"))" [ "$(grep -c "^wheel.py: .*$2" "$WORK/err")-$(wc -l <"$WORK/err")" = 1-1 ]
}
echo 'int pcre2_config_8(int, void *); int main(void) { return pcre2_config_8(0, 0); }' >"$WORK/needs.c"
${CC:-cc} "$WORK/needs.c" -lpcre2-8 -o "$WORK/tree/streambp"
refuses_wheel 'a program that other machines cannot start' 'build it with PORTABLE=1'
echo 'no program' >"$WORK/tree/streambp"
refuses_wheel 'no program' 'auditwheel names no tag'
check 'nothing is left of them' [ ! -e "$WORK/none" ]
echo '#include <stdio.h>
int main(void) { return puts("libcublasLt.so.13") < 0; }' >"$WORK/cuda.c"
${CC:-cc} "$WORK/cuda.c" -o "$WORK/tree/streambp"
check 'a wheel with CUDA' wheel "$WORK/cuda"
check 'has another name' [ "$(grep -c "/streambp_c-$(cat VERSION)+cuda-py3-none-manylinux" "$WORK/out")" = 1 ]
python3 -m zipfile -e "$(cat "$WORK/out")" "$WORK/cuda"
for name in $(sed -n 's/^Requires-Dist: \(nvidia[^>]*\)>=[0-9.]*,<[0-9]*; extra == "cuda"$/\1/p' "$WORK"/cuda/*.dist-info/METADATA); do
    check "$name has a library that the program opens" grep -rqF "\"$(echo "$name" | sed 's/-cu13$/-cu/; s/.*nvrtc/libnvrtc/')" llmc/ops/cuda
done
check 'four packages of NVIDIA' [ "$(grep -c '^Requires-Dist: nvidia.*; extra == "cuda"$' "$WORK"/cuda/*.dist-info/METADATA)" = 4 ]

# ---- installed --------------------------------------------------------------------------------------------------------------
venv=$WORK/venv
if [ "${ALL_CASES:-0}" = 1 ]; then "$python" -m venv "$venv"; else "$python" -m venv --without-pip "$venv"; fi
site=$(echo "$venv"/lib/python3*/site-packages)
set --
if [ "${ALL_CASES:-0}" != 1 ]; then
    set -- --no-index --no-deps
    "$python" -c 'import os, tokenizers, numpy, jinja2, pip
for module in tokenizers, numpy, jinja2, pip: print(os.path.dirname(os.path.dirname(module.__file__)))' | sort -u >"$site/found.pth"
fi
mkdir "$site/streambp" # the package of the paper's authors
echo 'theirs = 1' >"$site/streambp/__init__.py"
(cd "$venv" && find . | sort) >"$WORK/before"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >"$WORK/log" 2>&1; }
check 'the wheel is installed' pip install "$@" "$file"
streambp=$venv/bin/streambp program=$site/streambp_c/streambp
check 'the command' [ -x "$streambp" ]
check 'what it needs is there' pip show streambp-c
check 'by its names' [ "$(sed -n 's/^Requires: //p' "$WORK/log")" = 'jinja2, numpy, pyarrow, tokenizers' ]
check 'beside the module of the paper' "$venv/bin/python" -B -c 'import streambp, streambp_c; assert streambp.theirs'
vocabulary=$("$python" test/scripts/example_files.py "$WORK/files") || fail test/scripts/example_files.py
cd "$WORK" || exit 1
PATH=$venv/bin:$PATH OMP_NUM_THREADS=1
export PATH OMP_NUM_THREADS
says_of() { # exit code, pattern, words of streambp
    code=$1 pattern=$2
    shift 2
    streambp "$@" >out 2>err
    check "exit $code of: streambp $*" [ $? = "$code" ]
    check "streambp $* says '$pattern' ($(tail -n 1 err))" grep -q -- "$pattern" out err
}
says_of 0 "^streambp.c $(cat "$root/VERSION"), commit" --version
says_of 0 '^usage: streambp prepare' prepare --help
says_of 2 "^streambp: 'nothing' is not a verb, .*; see streambp --help" nothing
says_of 1 '^streambp: ' info --model nowhere
says_of 2 '^streambp prepare: .*see streambp prepare --help' prepare --nothing
says_of 1 '^streambp prepare: ' prepare --tokenizer nowhere --out shards files/known.jsonl
says_of 0 '^next: streambp --model' prepare --tokenizer files/tokenizer --out shards --workers 1 files/known.jsonl
says_of 1 'make shards for --data of it: streambp prepare --tokenizer MODEL --out shards files/known.jsonl' --init gpt2 --data files/known.jsonl --out run
tiny=qwen3,hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8,vocab_size=$vocabulary
says_of 0 '^try it   streambp sample --model run' --init "$tiny" --data 'shards/train-*.bin' --seq-len 512 --steps 3 --out run
says_of 0 hub convert --model run --out hub
cp files/tokenizer/*.json hub
echo "by python -m: $(python -m streambp_c --version | head -n 1)"
check 'python -m streambp_c' [ "$(python -m streambp_c --version)" = "$("$program" --version)" ]

# The commands that scripts/README.md prints, on a small model in the place of the hub's
mkdir five bin
cat >bin/hf <<'END'
#!/bin/sh
[ "$#-$1-$3" = 4-download---local-dir ] && cp -r ../hub "$4"
END
chmod +x bin/hf
PATH=$WORK/bin:$PATH
awk '/^#/ { inside = $0 == "## Wheels" } inside && /^    (hf|echo|streambp) / { sub(/^ +/, ""); print }' "$root/scripts/README.md" >commands
check 'six commands' [ "$(wc -l <commands)" = 6 ]
cd five || exit 1
while IFS= read -r line; do sh -c "$line" >out 2>err </dev/null || fail "exit $? of: $line ($(tail -n 1 err))"; cat out >>said; done <../commands
check 'prepare.py prints the command that comes next' grep -q "^next: streambp --model toy --data 'shards/train-\*.bin' --seq-len 1024 " said
set -- $(sed -n 's/.*"loss": \([0-9.]*\).*/\1/p' run/log.jsonl | sed -n '1p;$p')
check "the loss falls, from $1 to $2" awk "BEGIN { exit !($2 < $1) }"
cd ..
says_of 0 . prepare --tokenizer hub --out other --workers 1 files/other.jsonl
says_of 0 . eval --model five/toy-tuned --data other/train-00000.bin --seq-len 1024 --json
loss=$(json loss)
says_of 0 . sample --model five/toy-tuned --chat --prompt 'What is two and two?' --temperature 0 --max-new-tokens 256 --json
cp out sample

# Signals, the environment, the process: those of the program itself.
mkdir "$site/nvidia"
: >out
STREAMBP_LIBRARIES=/mine env --default-signal=INT,PIPE "$streambp" --init "$tiny" --data 'shards/train-*.bin' --seq-len 512 --steps 100000 --out stopped >out 2>err &
for _ in $(seq 1200); do ! grep -q '^step  *[1-9]' out || break; sleep 0.05; done
check 'the process is the program' [ "$(readlink /proc/$!/exe)" = "$program" ]
check "NVIDIA's libraries are searched after the user's folders" sh -c "tr '\0' '\n' </proc/$!/environ | grep -qE '^STREAMBP_LIBRARIES=/mine:(.*:)?$site/nvidia'"
kill -INT $!
wait $!
check 'Ctrl-C: exit 130' [ $? = 130 ]
says err 'stopped by SIGINT after step .* of 100000: it is saved in stopped/checkpoint-'
check 'and prints the command to type' grep -q '^    streambp train --resume --out stopped$' err
rmdir "$site/nvidia"
(sleep 0.3; env --default-signal=PIPE "$streambp" --help all; echo $? >status) 2>/dev/null | true
check 'a closed pipe ends it: 141' [ "$(cat status)" = 141 ]
chmod -x "$program"
says_of 1 '^streambp: .*reinstall the wheel: pip install' --version
chmod +x "$program"
cd "$root" || exit 1
find_python 'torch, transformers, numpy'
if [ -n "$python" ]; then
    PYTHONPATH=test/data "$python" test/scripts/example_check.py "$WORK/five/toy-tuned" "$WORK/other/train-00000.bin" "$WORK/sample" "$loss" >"$WORK/checks" 2>"$WORK/err" ||
        cat "$WORK/checks" "$WORK/err"
    check 'transformers loads the folder, with the same loss and answer' grep -qE '^[0-9]+ passed, 0 failed, 0 skipped$' "$WORK/checks"
else
    skip "the wheel's result in transformers" 'no Python has torch and transformers (PYTHON=... names one)'
fi
check 'it is uninstalled' pip uninstall -y streambp-c
(cd "$venv" && find . | sort) >"$WORK/after"
[ "${ALL_CASES:-0}" = 0 ] || sed -i '/streambp/!d' "$WORK/before" "$WORK/after" # what it needs stays
check "and leaves nothing ($(diff "$WORK/before" "$WORK/after" | head -n 3 | tr '\n' ' '))" cmp -s "$WORK/before" "$WORK/after"
finish
