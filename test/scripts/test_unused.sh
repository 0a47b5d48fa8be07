#!/bin/sh
# No dead code: functions that train_gpt.cu includes without calling them are in this list, with their callers.
cat >"${TMPDIR:-/tmp}/unused.$$" <<'END'
dropout_keeps op sets
dropout_threshold op sets
host_memory_available op sets, dev
host_memory_peak op set "cpu", dev
host_memory_touch op sets
END
trap 'rm -f "${TMPDIR:-/tmp}/unused.$$"' EXIT
libevent=$(printf '\043include <event2/http.h>\n' | ${CC:-cc} -E - >/dev/null 2>&1 && echo -DHAVE_LIBEVENT)
${CC:-cc} -std=c11 -D_GNU_SOURCE -DPRECISION_FP32 $libevent -Wunused-function -I. -O0 -c -o /dev/null -x c train_gpt.cu 2>&1 |
    grep Wunused-function | tr "‘’'" '   ' | sed 's/.*warning: //' |
    awk -v list="${TMPDIR:-/tmp}/unused.$$" '
        BEGIN { while ((getline line <list) > 0) { split(line, word, " "); listed[word[1]] = 1 } }
        { for (i = 1; i <= NF; i++) if ($i ~ /_|^[a-z0-9]+$/ && $i !~ /^(unused|function|defined|but|not|used)$/ && $i !~ /\[/) { found[$i] = 1; break } }
        END {
            for (name in found) if (name in listed) passed++; else { failed++; print "FAILED: nobody calls " name "(): dead code, or list it in test_unused.sh" }
            for (name in listed) if (!(name in found)) { failed++; print "FAILED: " name "() is listed in test_unused.sh, but is called or gone" }
            printf "%d passed, %d failed, 0 skipped\n", passed, failed
            exit failed > 0
        }'
