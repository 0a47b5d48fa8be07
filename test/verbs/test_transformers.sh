#!/bin/sh
# Folders that `convert` writes, as transformers reads them: test_transformers.py, where a Python with torch and transformers is
# there. PYTHON=... names it.
. test/cli.sh
. test/find_python.sh
find_python 'torch, transformers'
if [ -n "$python" ]; then
    "$python" test/verbs/test_transformers.py "$TRAIN" "$WORK"
    exit
fi
echo "[  SKIPPED ] what convert writes, read by transformers: NOT TESTED, because no Python has torch and transformers (PYTHON=... names one)"
skipped=$((skipped + 1))
finish
