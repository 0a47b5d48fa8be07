# Sourced by gpu_first.sh and gpu_queue.sh, after common.sh: steps of a kit of scripts/gpu_kit.sh on a machine with a GPU and no network.
# They set $me, their name, and $kit, and call open_kit. finish writes records for scripts/add_report.py.
# ---- the table: `state|what|expected|found` -----------------------------------------------------------------------------------------
show() { printf '%-7s %-34s %-30s %s\n' "$@"; }
row() { # state (ok, WRONG, - where nothing is expected; FAILED: is tried again), what, expected, found
    printf '%s|%s|%s|%s\n' "$@" >>"$table"
    show "$@"
}
finish() { # what ended it early
    [ -z "$build" ] || records
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

# bp WHAT SECONDS OPTIONS...: a line in passes.jsonl, in $dtype on $computes
computes=cuda dtype=bf16
bp() {
    of="$3" planned=
    [ $computes$dtype = cudabf16 ] || of="--device $computes --dtype $dtype $3"
    step "$1" "$2" "$TRAIN" bp --json --device $computes --dtype $dtype $3 || return
    [ -z "$card" ] || [ "$of" != "$3" ] ||
        planned=$("$TRAIN" plan --for bp --dtype bf16 --machine "$card" --json --quiet $3 2>>"$log" | value estimated_seconds)
    printf '{"pass": "%s", "options": "%s", "environment": "%s", "date": "%s", "planned_seconds": %s, "gpu": %s, "result": %s}\n' "$1" "$of" \
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
    log=$out/log.txt table=$out/table.txt left_out= build=
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
    host=$(awk '$1 == "MemAvailable:" { print int(0.9 * $2 / 1048576) }' /proc/meminfo) where=
    [ -z "$card" ] || where="--memory-limit $card --host-limit ${host}GiB" # what plans and steps of `train` have
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
        step "doctor, $build" 60 "$TRAIN" doctor --device cuda --dtype bf16 --init qwen3-8b --verbose
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
    sed -i "/\"program\": \"$1\", \"precision\": \"$dtype\"/d" "$out/programs" 2>/dev/null
    echo "$2" | sed "s/\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped/    {\"program\": \"$1\", \"precision\": \"$dtype\", \"passed\": \1, \"failed\": \2, \"skipped\": \3${3:+, \"cudnn_calls\": $3}}/" >>"$out/programs"
    {
        printf '{\n  "kind": "test", "op_set": "cuda",\n  "device": "%s", "driver": "%s",\n' "$gpu" "$(ask_gpu driver_version)"
        printf '  "cuda": "%s", "libraries": "cuBLASLt %s, cuDNN %s",\n' "$("$TRAIN" --version | sed -n 's/.*CUDA \([0-9]*\.[0-9]*\).*/\1/p')" "$(version cuBLASLt)" "$(version cuDNN)"
        printf '  "date": "%s", "commit": "%s", "sources": "%s",\n' "$(date -u +%F)" "$(sed -n 's/^commit //p' "$kit/kit.txt")" "$(sed -n 's/^sources //p' "$kit/kit.txt")"
        awk -F'"(passed|failed|skipped)": ' '{ p += $2; f += $3; s += $4 } END { printf "  \"passed\": %d, \"failed\": %d, \"skipped\": %d,\n", p, f, s }' "$out/programs"
        printf '  "complete": false, "attention": "%s",\n  "programs": [\n%s\n  ]\n}\n' "$(grep -q 'cudnn_calls": [1-9]' "$out/programs" && echo cudnn || echo own)" "$(sed '$!s/$/,/' "$out/programs")"
    } >"$out/test-$(slug "$gpu")-$(date -u +%F).json"
}
tests() { # what, seconds, name in the record, program, part
    step "$1" "$2" env TEST_DTYPE=$dtype "$out/$build/$4" $5
    status=$?
    [ $status != 3 ] || return
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out/step.out" | tail -n 1)
    [ -z "$closing" ] || record "$3" "$closing" \
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
    planned=$([ -z "$card" ] || "$TRAIN" plan --for sample --dtype bf16 --init $eight --max-context $1 --machine "$card" --json --quiet 2>>"$log" | value token_seconds)
    found=$(sed -n 's/^token: after [0-9]* tokens \([0-9.]*\) ms .*/\1/p' "$out/step.out") wanted=$(awk "BEGIN { printf \"%.3g\", 1e3 * ${planned:-0} }")
    if [ -n "$planned" ]; then row "$(judge near "$found" "$wanted" 0.15)" "a token after $1" "$wanted ms, 15 %" "$found ms"; else row - "a token after $1" - "$found ms"; fi
}

# ---- plans and records ----------------------------------------------------------------------------------------------------------------
plan_for() { # options: $planned_here, the plan for this card; nothing on a card that plans do not know
    planned_here=$([ -z "$card" ] || "$TRAIN" plan --dtype bf16 --machine "$card,host=${host}GiB" --json --quiet $1 2>>"$log")
}
plan_says() { echo "$planned_here" | grep -o "\"$1\": [-+.a-zE0-9]*" | tail -n 1 | sed 's/.*: //; s/null//'; } # a number or word; "ways" come first
gigabytes() { awk "BEGIN { printf \"%.4g\", ${1:-0} / 1e9 }"; }
skipped() { done_before "$1" || row - "$1" '' "skipped: $2"; }

# measured STATE WHAT EXPECTED FOUND COMMAND MEMBERS: a row, and its line in rows.jsonl
measured() {
    row "$1" "$2" "$3" "$4"
    printf '{"what": "%s", "state": "%s", "expected": "%s", "found": "%s", "environment": "%s", "command": "%s", %s}\n' "$2" "$1" "$3" "$4" "$(environment)" \
        "$(echo "$5" | sed "s|$TRAIN|train|g; s|$out/||g; s|$kit/||g")" "$6" >>"$out/rows.jsonl"
}
records() {
    common="\"device\": \"$gpu\", \"device_name\": \"$gpu\", \"machine\": \"$card\", \"on_gpu\": true, \"driver\": \"$(ask_gpu driver_version)\",
 \"libraries\": \"cuBLASLt $(version cuBLASLt), cuDNN $(version cuDNN)\", \"date\": \"$(date -u +%F)\", \"commit\": \"$(sed -n 's/^commit //p' "$kit/kit.txt")\",
 \"command\": \"$me\""
    to=$(slug "$gpu")-$(date -u +%F).json
    [ ! -s "$out/rows.jsonl" ] || printf '{"kind": "queue", %s, "rows": [\n%s\n]}\n' "$common" "$(sed '$!s/$/,/' "$out/rows.jsonl")" >"$out/queue-$to"
    [ ! -s "$out/bench.json" ] || sed "1s|^{|{\"kind\": \"ops\", $(echo "$common" | tr -d '\n'), \"what\": \"dev/cuda/bench.cu, medians of 11 runs with cold caches\", |; s/\"device\": \"[^\"]*\", \"compute/\"compute/" "$out/bench.json" >"$out/ops-$to"
    entries=$(pass_entries) limit=
    [ -z "$entries" ] || { plan_for "--init gpt2 --memory-limit $card" && limit=$(plan_says usable_bytes); }
    [ -z "$entries" ] || printf '{"kind": "passes", %s, "what": "train bp; seconds: median of those after a warm-up, or of the only pass", "memory_limit": %s, "passes": [\n%s\n]}\n' \
        "$common" "${limit:-null}" "$entries" >"$out/passes-$to"
}
# Prints passes that ran as they are planned, without files and environment. What the run chose is named, so that a plan chooses the same.
pass_entries() {
    [ ! -s "$out/passes.jsonl" ] || awk '
    function get(key, text) {
        if (!match($0, "\"" key "\": (\"[^\"]*\"|[-+.0-9eE]+)")) return ""
        text = substr($0, RSTART, RLENGTH)
        sub(/^[^:]*: /, "", text)
        gsub(/"/, "", text)
        return text
    }
    /"environment": ""/ && !/--data|--device/ {
        options = get("options")
        repeats = match(options, /--repeat [0-9]+/) ? substr(options, RSTART + 9, RLENGTH - 9) : 1
        gsub(/ --repeat [0-9]+| --profile| --memory-limit [^ ]+| --host-limit [^ ]+/, "", options)
        gsub(/  +/, " ", options)
        n = split("keep logits_chunk inputs_every", chosen, " ")
        for (i = 1; i <= n; i++) {
            option = chosen[i]
            sub(/_/, "-", option)
            if (get(chosen[i]) != "" && !index(options, " --" option " ")) options = options " --" option " " get(chosen[i])
        }
        printf "%s{\"options\": \"%s\", \"passes\": %d", found++ ? ",\n" : "", options, (repeats > 1 ? repeats - 1 : 1)
        n = split("seconds warmup_seconds planned_seconds tokens plan_bytes peak_bytes attention_workspace loss grad_norm", keys, " ")
        for (i = 1; i <= n; i++) printf ", \"%s\": %s", keys[i], get(keys[i]) == "" ? "null" : get(keys[i])
        printf "}"
    }' "$out/passes.jsonl"
}
# trained WHAT SECONDS STEPS OPTIONS: steps of `train`; the last one's time, the first one's loss. SECONDS: to start, in addition to the steps
trained() {
    ! done_before "$1" || return 3
    options="$4 $where" save='--out none'
    plan_for "$options"
    each=$(plan_says estimated_seconds) bytes=$(plan_says total_bytes)
    [ "$(plan_says fits)" != false ] || { skipped "$1" 'its plan does not fit this card and host' && return 3; }
    case $4 in *lora*) rm -rf "$out/run" && save="--out $out/run" ;; esac # adapters are small; log.jsonl has more digits
    step "$1" "$(awk "BEGIN { print int($2 + $3 * ${each:-5}) }")" "$TRAIN" train --json --device cuda --dtype bf16 --steps "$3" $options $save || return
    ended=$(cat "$out/step.out") first= last=
    case $4 in *lora*) first=$(grep '"grad_norm"' "$out/run/log.jsonl" | head -n 1) last=$(grep '"grad_norm"' "$out/run/log.jsonl" | tail -n 1) ;; esac
    seconds=$(echo "${last:-$ended}" | value seconds) tokens=$(echo "${last:-$ended}" | value tokens) norm=$(echo "$first" | value grad_norm)
    loss=$(echo "${first:-$ended}" | value loss) plan=$(echo "$ended" | value plan_bytes) peak=$(echo "$ended" | value peak_bytes) writing=$(echo "$last" | value rollout_seconds)
    state=- expected=-
    if [ -n "$bytes" ]; then
        state=$(judge awk "BEGIN { exit !($plan == $bytes && $peak - $plan < 0.02 * $plan + 320 * 1048576) }") expected="$(gigabytes "$bytes") GB"
        [ -z "$each" ] || { expected="$(printf '%.4g' "$each") s, 10 %; $expected" && near "$seconds" "$each" 0.1 || state=WRONG; }
    fi
    measured "$state" "$1" "$expected" "$(printf '%.4g' "$seconds") s${writing:+, $writing of them writing}; $(gigabytes "$plan") GB planned, $(gigabytes "$peak") in use; loss $loss${norm:+, norm $norm}" \
        "train --steps $3 $4" "\"seconds\": $seconds, \"planned_seconds\": ${each:-null}, \"tokens\": $tokens, \"plan_bytes\": $plan, \"peak_bytes\": $peak, \"loss\": $loss, \"grad_norm\": ${norm:-null}, \"rollout_seconds\": ${writing:-null}"
}
