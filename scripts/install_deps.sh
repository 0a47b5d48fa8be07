#!/bin/sh
# Installs missing packages with the system's package manager: scripts/install_deps.sh build|cjson|test|demo|lint ...
# Prints each package with its purpose, and asks first on a terminal. DEPS=yes does not ask, DEPS=skip refuses to install anything.
# Uses sudo unless run as root.
# Exit 0: all needed packages are present. Unavailable optional packages (oneDNN, MPI, matplotlib) are reported, are not an error,
# and are not tried again until `make clean`. cjson: puts the package's source into build/cjson. CJSON=<folder>: uses the source in that folder.
set -u
CC=${CC:-cc}

has_header() { printf '#include <%s>\n' "$1" | $CC -I/usr/include -E - >/dev/null 2>&1; }
has_cmocka() { printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\n' | $CC -E - >/dev/null 2>&1; }

missing=""   # packages, in the names of Debian and Ubuntu
optional=""
need() { missing="$missing $1"; printf 'missing: %s (%s)\n' "$1" "$2" >&2; }
want() { grep -qxs "$1" build/without || { optional="$optional $1"; need "$@"; }; }
want_mpi() {
    [ "${MPI:-}" = 0 ] && return
    command -v "${MPICC:-mpicc}" >/dev/null || want libopenmpi-dev "MPI, for runs of several processes; without it a run is one"
    command -v mpirun >/dev/null || want openmpi-bin "starts several processes, in tests too"
}

for group in "$@"; do
    case $group in
    build)
        [ -n "${CJSON:-}" ] || has_header cjson/cJSON.h || has_header cJSON.h || need libcjson-dev "reads config.json and safetensors headers"
        if [ "${ONEDNN:-}" != 0 ] && ! has_header dnnl.h; then
            want libdnnl-dev "oneDNN, fast matrix products on the CPU; without it a slower product in plain C is used"
        fi
        has_header pcre2posix.h || need libpcre2-dev "PCRE2, runs the regular expressions of tokenizers and adapters"
        if [ "${LIBEVENT:-}" != 0 ] && ! has_header event2/http.h; then
            want libevent-dev "libevent, HTTP for sample --serve; without it that option is refused"
        fi
        want_mpi ;;
    cjson) command -v dpkg-source >/dev/null || ! command -v apt-get >/dev/null || need dpkg-dev "unpacks cJSON's source" ;;
    test)
        want_mpi
        has_cmocka || need libcmocka-dev "the unit test library" ;;
    demo) [ -n "$(. scripts/common.sh && python_with_matplotlib)" ] || want python3-matplotlib "draws the pictures" ;;
    lint)
        command -v clang-format >/dev/null || need clang-format "make format"
        command -v clang-tidy >/dev/null || need clang-tidy "make lint"
        command -v cppcheck >/dev/null || need cppcheck "make lint" ;;
    *) echo "install_deps.sh: unknown group '$group'; groups are build, cjson, test, demo, lint" >&2; exit 2 ;;
    esac
done
patient='-o Acquire::Retries=0 -o Acquire::http::Timeout=15 -o Acquire::https::Timeout=15' # a machine may have no network

# Gets source packages from the configured archives; the system stays unchanged.
get_cjson() {
    lists=$(mktemp -d)
    trap 'rm -rf "$lists"' EXIT
    mkdir -p "$lists/parts" "$lists/lists/partial" build
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list /etc/apt/sources.list.d/*.list >"$lists/sources.list" 2>/dev/null
    for file in /etc/apt/sources.list.d/*.sources; do
        [ ! -f "$file" ] || sed 's/^Types:.*/Types: deb-src/' "$file" >"$lists/parts/${file##*/}"
    done
    apt="apt-get $patient -o Dir::Etc::SourceList=$lists/sources.list -o Dir::Etc::SourceParts=$lists/parts -o Dir::State::Lists=$lists/lists -o Dir::Cache=$lists"
    (cd "$lists" && $apt update && $apt source cjson) >"$lists/log" 2>&1 && rm -rf build/cjson && mv "$lists"/cjson-*/ build/cjson
}
end() {
    case " $* " in *' cjson '*) ;; *) exit 0 ;; esac
    [ "${DEPS:-}" != skip ] && command -v apt-get >/dev/null && echo "getting the source of cJSON (apt-get source cjson)" >&2 && get_cjson && exit 0
    [ ! -f "${lists:-}/log" ] || tail -n 3 "$lists/log" >&2
    echo "a PORTABLE build has cJSON inside, but its source is not available; unpack cJSON (1.7 or later) and give CJSON=<folder with cJSON.c>" >&2
    exit 1
}
[ -n "$missing" ] || end "$@"

# Continues without optional packages.
give_up() {
    if [ "$(echo $missing)" = "$(echo $optional)" ]; then
        echo "continuing without$missing: $1" >&2
        mkdir -p build && printf '%s\n' $missing >>build/without
        exit 0
    fi
    echo "install_deps.sh: $1; please install:$missing" >&2
    exit 1
}

[ "${DEPS:-}" = skip ] && give_up "DEPS=skip forbids installing"
sudo=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || give_up "not root, and there is no sudo"
    sudo=sudo
    [ -t 0 ] || sudo="sudo -n"
fi

for manager in apt-get dnf pacman brew none; do ! command -v $manager >/dev/null || break; done
case $manager in
apt-get)
    names=$missing
    install="$sudo env DEBIAN_FRONTEND=noninteractive apt-get $patient install -y --no-install-recommends"
    refresh="$sudo apt-get $patient update" ;;
dnf)
    names=$(echo "$missing" | sed 's/libcjson-dev/cjson-devel/; s/libdnnl-dev/onednn-devel/; s/libpcre2-dev/pcre2-devel/; s/libcmocka-dev/libcmocka-devel/; s/libopenmpi-dev/openmpi-devel/; s/openmpi-bin/openmpi/; s/clang-format\|clang-tidy/clang-tools-extra/g')
    install="$sudo dnf install -y"
    refresh=true ;;
pacman)
    names=$(echo "$missing" | sed 's/libcjson-dev/cjson/; s/libdnnl-dev/onednn/; s/libpcre2-dev/pcre2/; s/libcmocka-dev/cmocka/; s/python3-matplotlib/python-matplotlib/; s/libopenmpi-dev\|openmpi-bin/openmpi/g; s/clang-format\|clang-tidy/clang/g')
    install="$sudo pacman -S --noconfirm --needed"
    refresh=true ;;
brew)
    names=$(echo "$missing" | sed 's/libcjson-dev/cjson/; s/libdnnl-dev/onednn/; s/libpcre2-dev/pcre2/; s/libcmocka-dev/cmocka/; s/python3-matplotlib/python-matplotlib/; s/libopenmpi-dev\|openmpi-bin/open-mpi/g; s/clang-tidy/llvm/g')
    install="brew install"
    refresh=true ;;
*) give_up "no package manager that I know (apt-get, dnf, pacman, brew)" ;;
esac

if [ -t 0 ] && [ -t 2 ] && [ "${DEPS:-}" != yes ]; then
    printf 'Install%s with %s? [Y/n] ' "$names" "$manager" >&2
    read -r answer || answer=n
    case $answer in [Nn]*) give_up "not installed" ;; esac
fi
echo "installing:$names   ($install)" >&2
log=$(mktemp)
# Debian's lists may be old or absent: refresh them once if the first try fails.
if ! $install $names >"$log" 2>&1 && ! { $refresh >"$log" 2>&1 && $install $names >>"$log" 2>&1; }; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    # an optional package may be the obstacle: try the rest without it
    if [ -n "$optional" ] && [ "$(echo $missing)" != "$(echo $optional)" ]; then
        DEPS=yes ONEDNN=0 MPI=0 exec "$0" "$@"
    fi
    give_up "the package manager failed"
fi
rm -f "$log"
end "$@"
