#!/bin/sh
# Adapters between this program and PEFT: test_peft.py, where a Python with torch, transformers and peft is there. PYTHON=... names it.
. test/cli.sh
. test/find_python.sh
find_python 'torch, transformers, peft'
if [ -n "$python" ]; then
    "$python" test/files/test_peft.py "$TRAIN" "$WORK"
    exit
fi
echo "[  SKIPPED ] adapters, to and from PEFT: NOT TESTED, because no Python has torch, transformers and peft (PYTHON=... names one)"
skipped=$((skipped + 1))
finish
