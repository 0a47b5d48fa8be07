#!/bin/sh
# The rooms of llmc/: a file includes only its own room and those before it in this list; files form no circle; no file lies
# outside of a room; each room has a README.md. streambp.h is the paper: below 400 lines, without a switch of a family.
rooms='base ranks ops model tokenizer files data stream layer streambp.h orders optimizer plan cli generate train verbs train_gpt.cu'
includes=$(find llmc streambp.h train_gpt.cu -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' | xargs grep -H '^#include "' |
    awk -F '[:"]' '{ to = $3; if (to !~ /\// && to != "streambp.h") { to = $1; sub(/[^\/]*$/, $3, to) } print $1, to }' |
    grep -v ' test/')
faults=$(
    echo "$includes" | awk -v rooms="$rooms" '
        function room(path) { sub(/^llmc\//, "", path); sub(/\/.*/, "", path); return path }
        BEGIN { n = split(rooms, name, " "); for (i = 1; i <= n; i++) rank[name[i]] = i }
        rank[room($2)] == 0 || rank[room($2)] > rank[room($1)] { print "FAILED: " $1 " includes " $2 }'
    echo "$includes" | tsort 2>&1 >/dev/null | sed 's/^/FAILED: /'
    find llmc -maxdepth 1 -type f ! -name README.md | sed 's/^/FAILED: in no room: /'
    [ "$(wc -l <streambp.h)" -lt 400 ] || echo "FAILED: streambp.h has $(wc -l <streambp.h) lines, 399 are the most"
    grep -nE 'family->|\.(pre_norms|post_norms|qk_norm|gated|gated_attention|rotary)\b|is_linear|layer_kind|LAYER_(FULL|WINDOW|LINEAR)' \
        streambp.h | sed 's/^/FAILED: streambp.h asks what kind of layer it has: /'
    for room in llmc/*; do [ -f "$room" ] || [ -e "$room/README.md" ] || echo "FAILED: no $room/README.md"; done
)
[ -z "$faults" ] || echo "$faults"
echo "$(echo "$includes" | wc -l) passed, $(printf %s "$faults" | grep -c .) failed, 0 skipped"
[ -z "$faults" ]
