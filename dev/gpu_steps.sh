# Sourced by gpu_first.sh and gpu_queue.sh, after common.sh: steps of a kit of scripts/gpu_kit.sh on a machine with a GPU and no network.
# They set $me, their name, and $kit, and call open_kit.
# ---- the table: `state|what|expected|found` -----------------------------------------------------------------------------------------
show() { printf '%-7s %-34s %-30s %s\n' "$@"; }
row() { # state (ok, WRONG, - where nothing is expected; FAILED: is tried again), what, expected, found
    printf '%s|%s|%s|%s\n' "$@" >>"$table"
    show "$@"
}
finish() { # what ended it early
    ${at_end:-:}
    printf '\n%s\n' "$(show state what expected found)"
    while IFS='|' read -r state what expected found; do show "$state" "$what" "$expected" "$found"; done <"$table"
    [ -z "$left_out" ] || echo "left out, of $LIMIT s: ${left_out#, }; the same command goes on there"
    [ -z "${1:-}" ] || { echo "$me: $1; see $log" >&2 && exit 1; }
    ! grep -qE '^(WRONG|FAILED)' "$table" || exit 1
    [ -z "$left_out" ] || exit 3
    exit 0
}
done_before() { grep -v '^FAILED' "$table" | cut -d '|' -f 2 | grep -qxF "$1"; }

# step WHAT SECONDS COMMAND...: its output in step.out and step.err, and in the log. Status 3: done before, or left out
step() {
    what=$1 needs=$2 left=$((LIMIT - $(date +%s) + begin))
    shift 2
    ! done_before "$what" || return 3
    [ "$left" -ge "$needs" ] || { left_out="$left_out, $what" && return 3; }
    most=$((needs * 4 < left ? needs * 4 : left))
    watched "$out/samples" timeout -k 5 $most "$@" >"$out/step.out" 2>"$out/step.err"
    status=$?
    { echo "=== $what: $*"; cat "$out/step.out" "$out/step.err"; echo "--- exit $status"; } >>"$log"
    [ $status != 0 ] || return 0
    case $status-$most in 124-$left | 137-$left) left_out="$left_out, $what" && return 3 ;; esac
    said=$(cat "$out/step.out" "$out/step.err" | grep . | tr '|' ' ')
    row FAILED "$what" 'exit 0' "exit $status: $(echo "$said" | { grep -E '^doctor  |^[0-9]+ passed' || echo "$said" | tail -n 1; } | cut -c1-150)$(
        echo "$said" | sed -n 's/^ERROR: /; /p' | head -n 1 | cut -c1-200)"
    return 1
}
value() { grep -o "\"$1\": [-+.0-9eE]*" | head -n 1 | cut -d ' ' -f 2; } # the first of a JSON
pass_of() { grep -sF "{\"pass\": \"$1\"," "$out/passes.jsonl" | tail -n 1; }
near() { awk -v a="$1" -v b="$2" -v d="$3" 'BEGIN { x = a < b ? b - a : a - b; exit !(a > 0 && x <= d * b) }'; }
judge() { if "$@"; then echo ok; else echo WRONG; fi; }

with() { # NAME=VALUE of the environment, command...
    export "$1"
    name=${1%%=*}
    shift
    "$@"
    result=$?
    unset "$name"
    return $result
}
environment() { env | grep -E '^STREAMBP_(CUDNN|WGMMA|SPLIT_KEYS)=' | sort | paste -sd ' ' -; }

# bp WHAT SECONDS OPTIONS...: a line in passes.jsonl
bp() {
    step "$1" "$2" "$TRAIN" bp --json $3 || return
    planned=$([ -z "$card" ] || "$TRAIN" plan --for bp --machine "$card" --json --quiet $3 2>>"$log" | value estimated_seconds)
    printf '{"pass": "%s", "options": "%s", "environment": "%s", "date": "%s", "planned_seconds": %s, "gpu": %s, "result": %s}\n' "$1" "$3" \
        "$(environment)" "$(date -u +%FT%TZ)" "${planned:-null}" "$(gpu_samples "$out/samples")" "$(tr -d '\n' <"$out/step.out")" >>"$out/passes.jsonl"
}
timed() { # what, seconds, options: seconds as planned
    bp "$@" || return
    seconds=$(pass_of "$1" | value seconds)
    found="$(printf '%.4g' "$seconds") s, loss $(pass_of "$1" | value loss), gradient norm $(pass_of "$1" | value grad_norm)"
    if [ -n "$planned" ]; then row "$(judge near "$seconds" "$planned" 0.1)" "$1" "$(printf '%.4g' "$planned") s, 10 %" "$found"; else row - "$1" - "$found"; fi
}

# ---- the machine ----------------------------------------------------------------------------------------------------------------------
# open_kit OUT: finds the GPU, its name among --machine's and CUDA's libraries. Keeps what the same kit found in OUT before.
open_kit() {
    mkdir -p "$1" || exit 1
    out=$(cd "$1" && pwd) LIMIT=${LIMIT:-530} PYTHON=${PYTHON:-python3} begin=$(date +%s) path=${LD_LIBRARY_PATH:-} # may have the driver
    case $LIMIT in '' | *[!0-9]*) echo "$me: LIMIT is '$LIMIT'; give seconds" >&2 && exit 2 ;; esac
    log=$out/log.txt table=$out/table.txt left_out=
    gpu=$(ask_gpu name)
    case $gpu in '' | *rror* | *ailed* | No\ devices*) echo "$me: no GPU was found (nvidia-smi names none)" >&2 && exit 1 ;; esac
    case $gpu in # --machine's name: llmc/estimate/machine.h
    *PCIe* | *NVL* | *Laptop*) card= ;;
    *A100-SXM4-80GB*) card=a100 ;;
    *A100-SXM4-40GB*) card=a100-40 ;;
    *'H100 80GB'*) card=h100 ;;
    *H200*) card=h200 ;;
    *B200*) card=b200 ;;
    *L40S*) card=l40s ;;
    *'RTX 5090'*) card=rtx5090 ;;
    *'RTX 4090'*) card=rtx4090 ;;
    *'RTX 4080'*) card=rtx4080 ;;
    *'RTX 3060'*) card=rtx3060 ;;
    *) card= ;;
    esac
    of="kit $(cksum <"$kit/kit.txt"), $gpu"
    [ "$(cat "$out/of.txt" 2>/dev/null)" = "$of" ] || { rm -rf "$table" "$out"/*.jsonl "$out"/test-*.json "$out"/cuda1? "$out"/programs "$out"/right && echo "$of" >"$out/of.txt"; }
    touch "$table"
    sed -i '/^FAILED/d' "$table"
    STREAMBP_LIBRARIES=$({
        echo "${STREAMBP_LIBRARIES:-}" | tr : '\n'
        for python in "$PYTHON" python /opt/*/bin/python3; do "$python" -c 'import nvidia; print(*nvidia.__path__, sep="\n")'; done
        ls -d /usr/lib/python3*/*-packages/nvidia /usr/local/lib/python3*/*-packages/nvidia /opt/*/lib/python3*/*-packages/nvidia
        ls -d ${CUDA_HOME:+"$CUDA_HOME"/lib*} /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib
    } 2>/dev/null | awk 'NF && !seen[$0]++' | paste -sd : -)
    export STREAMBP_LIBRARIES LD_LIBRARY_PATH
    echo "$gpu, --machine ${card:-unknown: nothing is estimated}; STREAMBP_LIBRARIES=$STREAMBP_LIBRARIES" | tee -a "$log"
    { cat "$kit/kit.txt" && timeout 60 nvidia-smi && nproc && free -g && df -h "$out"; } >>"$log" 2>&1
}
choose_build() { # unpacks the build that the driver takes and whose `doctor` finds nothing wrong: $TRAIN, $build
    tried= chosen=$(sed -n 's/^ok|doctor, \(cuda1.\)|.*/\1/p' "$table")
    for build in ${chosen:-cuda13 cuda12}; do
        [ -f "$kit/$build.tar.xz" ] || { build= && continue; }
        TRAIN=$out/$build/train LD_LIBRARY_PATH=$out/$build/lib:$path
        [ -z "$chosen" ] || break
        [ -x "$TRAIN" ] || { xz -dc "$kit/$build.tar.xz" | tar -x -C "$out"; } 2>>"$log" || # without xz:
            "$PYTHON" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$kit/$build.tar.xz" "$out" 2>>"$log"
        step "doctor, $build" 60 "$TRAIN" doctor --init qwen3-8b --verbose
        status=$?
        own=$(grep -E '^note +attention  .*own kernels' "$out/step.out")
        if [ $status = 0 ] && { [ -z "$own" ] || [ "${STREAMBP_CUDNN:-}" = 0 ]; }; then
            row ok "doctor, $build" 'nothing wrong' "$(grep '^doctor ' "$out/step.out")"
            sed -n 's/^\([a-zA-Z]*\) *\(driver\|cuBLASLt\|cuDNN\|attention\|copies\|host memory link\|products\|attention forward\|attention backward\)   *\(.*\)/\1|\2|\3/p' \
                "$out/step.out" >"$out/found"
            while IFS='|' read -r state what text; do row "$state" "$what" '' "$text"; done <"$out/found"
            break
        fi
        [ $status = 3 ] || tried="$tried $build: $(grep -hE '^WRONG|own kernels' "$out/step.out" "$out/step.err" | head -n 3 | cut -c1-180 | paste -sd ';' -)"
        build=
    done
    [ -z "$left_out" ] || finish
    [ -n "$build" ] && [ -x "$TRAIN" ] || finish "no build runs here as it should.$tried"
    sed -i '/^FAILED|doctor, /d' "$table" # of the other build
}
version() { sed -n "s/^ok|$1||\([0-9.]*\).*/\1/p" "$table" | tail -n 1; } # of a library, as doctor found it

# ---- tests, tokens --------------------------------------------------------------------------------------------------------------------
# The record: the form of dev/results/test-*.json
record() { # name, `N passed, N failed, N skipped`, calls of cuDNN
    sed -i "/\"program\": \"$1\"/d" "$out/programs" 2>/dev/null
    echo "$2" | sed "s/\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped/    {\"program\": \"$1\", \"precision\": \"bf16\", \"passed\": \1, \"failed\": \2, \"skipped\": \3${3:+, \"cudnn_calls\": $3}}/" >>"$out/programs"
    {
        printf '{\n  "kind": "test", "op_set": "cuda",\n  "device": "%s", "driver": "%s",\n' "$gpu" "$(ask_gpu driver_version)"
        printf '  "cuda": "%s", "libraries": "cuBLASLt %s, cuDNN %s",\n' "$("$TRAIN" --version | sed -n 's/.*CUDA \([0-9]*\.[0-9]*\).*/\1/p')" "$(version cuBLASLt)" "$(version cuDNN)"
        printf '  "date": "%s", "commit": "%s", "sources": "%s",\n' "$(date -u +%F)" "$(sed -n 's/^commit //p' "$kit/kit.txt")" "$(sed -n 's/^sources //p' "$kit/kit.txt")"
        awk -F'"(passed|failed|skipped)": ' '{ p += $2; f += $3; s += $4 } END { printf "  \"passed\": %d, \"failed\": %d, \"skipped\": %d,\n", p, f, s }' "$out/programs"
        printf '  "complete": false, "attention": "%s",\n  "programs": [\n%s\n  ]\n}\n' "$(grep -q 'cudnn_calls": [1-9]' "$out/programs" && echo cudnn || echo own)" "$(sed '$!s/$/,/' "$out/programs")"
    } >"$out/test-$(slug "$gpu")-$(date -u +%F).json"
}
tests() { # what, seconds, name in the record, program, part
    step "$1" "$2" "$out/$build/$4" $5
    status=$?
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out/step.out" | tail -n 1)
    [ $status = 3 ] || [ -z "$closing" ] || record "$3" "$closing" \
        "$(sed -n 's/^ *cuDNN took \([0-9]*\) calls forward, \([0-9]*\) backward.*/\1 \2/p' "$out/step.out" | awk '{ n = $1 + $2 } END { if (NR) print n }')"
    [ $status != 0 ] || row "$(judge [ "$closing" != "${closing#* 0 failed}" ])" "$1" '0 failed' "${closing:-no closing line}"
}
rates() { # what, file for the JSON: every op alone
    step "$1" 40 "$out/$build/bench" 11 || return
    cp "$out/step.out" "$out/$2"
    row - "$1" '' "$(grep -c ' % of ' "$out/step.err") rows in $2"
}
token_after() { # a prompt's tokens: a token of one text, beside its estimate
    eight=qwen3-8b,num_hidden_layers=8
    step "a token after $1" 30 "$out/$build/bench_decode" token $eight $1 64 || return
    planned=$([ -z "$card" ] || "$TRAIN" plan --for sample --init $eight --max-context $1 --machine "$card" --json --quiet 2>>"$log" | value token_seconds)
    found=$(sed -n 's/^token: after [0-9]* tokens \([0-9.]*\) ms .*/\1/p' "$out/step.out") wanted=$(awk "BEGIN { printf \"%.3g\", 1e3 * ${planned:-0} }")
    if [ -n "$planned" ]; then row "$(judge near "$found" "$wanted" 0.15)" "a token after $1" "$wanted ms, 15 %" "$found ms"; else row - "a token after $1" - "$found ms"; fi
}
