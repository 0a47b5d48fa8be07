#!/bin/sh
# scripts/release.sh on copies of VERSION and CHANGELOG.md, and the workflows: their commands exist, their rights are few.
. test/cli.sh
tree=$WORK/tree
mkdir -p "$tree/dist" "$WORK/bin"
cp -r scripts CHANGELOG.md "$tree"
GITHUB_REPOSITORY=Owner/Name PATH=$WORK/bin:$PATH
export GITHUB_REPOSITORY PATH
release() { "$tree/scripts/release.sh" "$@" >"$WORK/out" 2>"$WORK/err"; }
refused() { # exit code, pattern, words
    code=$1 pattern=$2
    shift 2
    release "$@"
    check "exit $code of: release.sh $*" [ $? = "$code" ]
    check "release.sh $* says '$pattern' alone ($(cat "$WORK/err"))" [ "$(grep -c "^release.sh: .*$pattern" "$WORK/err")-$(wc -l <"$WORK/err")-$(wc -c <"$WORK/out")" = 1-1-0 ]
}

# ---- check, notes -----------------------------------------------------------------------------------------------------------
changes() { printf "# Changes\n\nWhat a user notices.\n\n$1" >"$tree/CHANGELOG.md"; }
echo 7.5 >"$tree/VERSION"
changes '## 7.5\n\n**Models**\n- One line\n  goes on ([a](b/c.md#d), [e](https://f.g)).\n- Two.\n\n**Last**\n- Three.\n\n## 7.4\n\n- Old.\n'
check 'a tag of this version' release check v7.5
refused 1 "tag '7.5' is not v7.5; " check 7.5
refused 1 "tag 'v7.4' is not v7.5; " check v7.4
release notes
printf '**Models**\n- One line goes on ([a](https://github.com/Owner/Name/blob/v7.5/b/c.md#d), [e](https://f.g)).\n- Two.\n\n**Last**\n- Three.\n' >"$WORK/notes"
check 'notes: this section alone, whole links, one line a paragraph' diff "$WORK/notes" "$WORK/out"
GITHUB_REPOSITORY= refused 2 'GITHUB_REPOSITORY is not OWNER/NAME' notes
changes '## Unreleased\n\n- New.\n\n## 7.5\n\n- Two.\n'
refused 1 "begins with 'Unreleased'" check v7.5
changes '## 7.5\n\n## 7.4\n\n- Old.\n'
refused 1 'says nothing of 7.5' check v7.5
refused 1 "no section '## 7.5' with text" notes
cp CHANGELOG.md VERSION "$tree"
check 'this checkout has notes' release notes
check 'whose links are whole' sh -c "! grep -q ']([^h]' '$WORK/out'"

# ---- assets -----------------------------------------------------------------------------------------------------------------
echo 7.5 >"$tree/VERSION"
refused 1 'SHA256SUMS is missing' assets
files='streambp-7.5-linux-x86_64.tar.gz streambp_c-7.5-py3-none-manylinux_2_34_x86_64.whl'
sums() { (cd "$tree/dist" && sha256sum streambp* >SHA256SUMS); }
for file in $files; do echo "$file" >"$tree/dist/$file"; done
sums
check 'assets' release assets
check 'are all files' [ "$(sort "$WORK/out" | tr '\n' ' ')" = "dist/SHA256SUMS $(printf 'dist/%s ' $files)" ]
echo more >>"$tree/dist/streambp-7.5-linux-x86_64.tar.gz"
release assets && fail 'a changed archive'
check 'a changed archive is refused by name' grep -q '^release.sh: dist/SHA256SUMS names other files' "$WORK/err"
echo >"$tree/dist/old.whl"
sums
refused 1 'dist/old.whl is not in dist/SHA256SUMS' assets
rm "$tree"/dist/*.whl
sums
refused 1 'has no streambp_c-7.5-py3-none-manylinux' assets

# ---- images -----------------------------------------------------------------------------------------------------------------
printf '#!/bin/sh\necho "$*" >"%s/calls"\n' "$WORK" >"$WORK/bin/docker"
chmod +x "$WORK/bin/docker"
for image in cpu: gpu:-cuda; do
    check "an image for ${image%:*}" release image "${image%:*}"
    check 'by the name of its registry' [ "$(cat "$WORK/out")" = "ghcr.io/owner/name:7.5${image#*:}" ]
    check 'of its file' [ "$(cat "$WORK/calls")" = "build -f scripts/docker/Dockerfile.${image%:*} -t ghcr.io/owner/name:7.5${image#*:} ." ]
done
printf '#!/bin/sh\nexit 3\n' >"$WORK/bin/docker"
release image cpu && fail 'docker failed, and nobody noticed'
check 'no image, no name' [ ! -s "$WORK/out" ]
refused 2 "image is cpu or gpu, not 'tpu'" image tpu

# ---- workflows --------------------------------------------------------------------------------------------------------------
for file in .github/workflows/*.yml; do
    check "$file pins major versions" sh -c "! grep 'uses:' $file | grep -qvE 'uses: actions/[a-z-]+@v[0-9]+$'"
    check "$file names its rights" grep -q '^permissions:' "$file"
    sed -n 's/^ *- run: //p' "$file" | sed 's/ *[<>].*//; s/ *&& /\n/g' >"$WORK/steps"
    check "$file has steps" [ -s "$WORK/steps" ]
    while read -r program words; do
        case $program in
        make) check "$file: make $words" sh -c "MAKEFLAGS= DEPS=skip make -n $(echo "$words" | sed 's/\${{[^}]*}}/cc/; s/BACKEND=all CUDA=.*//') >'$WORK/out' 2>&1" ;;
        scripts/*) check "$file: $program" sh -c "[ -x $program ] && { [ $program != scripts/release.sh ] || grep -q '^${words%% *})' $program; }" ;;
        python3 | build/python/bin/pip | xargs | echo | docker) pass ;;
        *) fail "$file: a step that no test runs: $program $words" ;;
        esac
    done <"$WORK/steps"
done
finish
