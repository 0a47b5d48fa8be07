#!/bin/sh
# The rooms of llmc/: a file includes only its own room and earlier ones in this list; no cycles of files; every file is
# in a room; each room has a README.md. A forward declaration counts as an include of the defining file. A function
# defined in several files is an interface that each op set implements. streambp.h is the paper: at most 340 lines, no
# switch of a family. Only cli, run and verbs include estimate, where numbers are assumed.
rooms='base ranks ops model tokenizer files data stream layer streambp.h orders optimizer plan estimate cli run generate train serve verbs train_gpt.cu'
files=$(find llmc streambp.h train_gpt.cu -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh')
includes=$(grep -H '^#include "' $files |
    awk -F '[:"]' '{ to = $3; if (to !~ /\// && to != "streambp.h") { to = $1; sub(/[^\/]*$/, $3, to) } print $1, to }' |
    grep -v ' test/')
# Static functions begin in the first column. The first ; or { tells declarations from definitions.
declarations=$(awk '
    /^static / { text = "" }
    /^static /, /[;{]/ {
        text = text $0
        if (!match(text, /[;{=]/)) next
        kind = substr(text, RSTART, 1)
        if (kind == "=" || !match(text, /[a-z_0-9]+\(/) || text ~ /^[^(]*\(\*/) next
        name = substr(text, RSTART, RLENGTH - 1)
        if (kind == ";") declared[FILENAME " " name] = name
        else if (!(FILENAME " " name in seen)) { seen[FILENAME " " name]; by[name] = FILENAME; times[name]++ }
    }
    END {
        for (d in declared) {
            split(d, part, " ")
            if (times[part[2]] == 1 && by[part[2]] != part[1]) print part[1], by[part[2]], part[2]
        }
    }' $files)
faults=$(
    { echo "$includes" | sed 's/$/ includes/'; echo "$declarations" | awk 'NF { print $1, $2, "declares " $3 " of" }'; } | awk -v rooms="$rooms" '
        function room(path) { sub(/^llmc\//, "", path); sub(/\/.*/, "", path); return path }
        BEGIN { n = split(rooms, name, " "); for (i = 1; i <= n; i++) rank[name[i]] = i }
        rank[room($2)] == 0 || rank[room($2)] > rank[room($1)] ||
            (room($2) == "estimate" && room($1) !~ /^(estimate|cli|run|verbs)$/) {
            from = $1; to = $2; $1 = $2 = ""; sub(/^ +/, ""); print "FAILED: " from " " $0 " " to
        }'
    { echo "$includes"; echo "$declarations" | awk 'NF { print $1, $2 }'; } | tsort 2>&1 >/dev/null | sed 's/^/FAILED: /'
    find llmc -maxdepth 1 -type f ! -name README.md | sed 's/^/FAILED: in no room: /'
    [ "$(wc -l <streambp.h)" -le 340 ] || echo "FAILED: streambp.h has $(wc -l <streambp.h) lines, 340 are the most"
    grep -nE 'family->|has_(part|state|rule|own_keys)\(|(\.|->)(qk_norm|gated_attention|rotary|borrows|lends|window)\b|layer_kind|LAYER_(FULL|WINDOW|LINEAR)' \
        streambp.h | sed 's/^/FAILED: streambp.h asks what kind of layer it has: /'
    for room in llmc/*; do [ -f "$room" ] || [ -e "$room/README.md" ] || echo "FAILED: no $room/README.md"; done
)
[ -z "$faults" ] || echo "$faults"
echo "$(echo "$includes" | wc -l) passed, $(printf %s "$faults" | grep -c .) failed, 0 skipped"
[ -z "$faults" ]
