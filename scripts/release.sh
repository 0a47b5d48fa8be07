#!/bin/sh
# Makes the parts of a release; .github/workflows/release.yml runs each and uploads what it made: scripts/release.sh WORD
#   check TAG       whether TAG is v and VERSION, and CHANGELOG.md has a section of that version as its first
#   notes           prints this section for GitHub: a line for each paragraph, whole links
#   assets          checks dist/ against SHA256SUMS and prints the files to upload
#   image cpu|gpu   builds an image of scripts/docker and prints its name
# GITHUB_REPOSITORY: OWNER/NAME, for links and names of images. DOCKER [docker].
set -eu
cd "$(dirname "$0")/.."
stop() { echo "release.sh: $1" >&2 && exit "${2:-1}"; }
version=$(cat VERSION)
repository_name() {
    case ${GITHUB_REPOSITORY:-} in ?*/?*) echo "$GITHUB_REPOSITORY" ;; *) stop 'GITHUB_REPOSITORY is not OWNER/NAME; set it' 2 ;; esac
}
section() { awk -v title="## $version" '/^## / { inside = $0 == title; next } inside' CHANGELOG.md; }

case ${1:-} in
check)
    [ "${2:-}" = "v$version" ] || stop "tag '${2:-}' is not v$version; write the version into VERSION and tag that commit v$version"
    first=$(sed -n 's/^## //p' CHANGELOG.md | head -n 1)
    [ "$first" = "$version" ] || stop "CHANGELOG.md begins with '$first'; rename that section to $version"
    section | grep -q '[^ ]' || stop "CHANGELOG.md says nothing of $version; write what a user notices"
    ;;
notes)
    section | grep -q '[^ ]' || stop "CHANGELOG.md has no section '## $version' with text; write what a user notices"
    repository=$(repository_name)
    where=https://github.com/$repository/blob/v$version
    section | awk 'function put() { if (line != "") print gap line; if (line != "") gap = ""; line = "" }
        /^$/ { put(); gap = begun ? "\n" : ""; next }
        /^- / || /^\*\*/ { put() }
        { sub(/^ +/, ""); line = line (line == "" ? "" : " ") $0; begun = 1 }
        END { put() }' | sed "s|](\([^):]*\))|]($where/\1)|g"
    ;;
assets)
    [ -f dist/SHA256SUMS ] || stop 'dist/SHA256SUMS is missing; make dist wheel'
    (cd dist && sha256sum --check --quiet SHA256SUMS >&2) || stop 'dist/SHA256SUMS names other files than there are (above); empty dist/ and make dist wheel'
    for name in "streambp-$version-linux-x86_64.tar.gz" "streambp_c-$version-py3-none-manylinux"; do
        grep -q " $name" dist/SHA256SUMS || stop "dist/SHA256SUMS has no $name; make dist wheel"
    done
    for file in dist/*; do
        [ "$file" = dist/SHA256SUMS ] || grep -qF "  ${file#dist/}" dist/SHA256SUMS || stop "$file is not in dist/SHA256SUMS; remove it"
    done
    ls dist/*
    ;;
image)
    case ${2:-} in cpu) suffix= ;; gpu) suffix=-cuda ;; *) stop "image is cpu or gpu, not '${2:-}'" 2 ;; esac
    repository=$(repository_name)
    name=ghcr.io/$(echo "$repository" | tr A-Z a-z):$version$suffix
    ${DOCKER:-docker} build -f "scripts/docker/Dockerfile.$2" -t "$name" . >&2
    echo "$name"
    ;;
*) sed -n '2,7s/^# //p' "$0" >&2 && exit 2 ;;
esac
