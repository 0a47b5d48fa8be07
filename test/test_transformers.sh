#!/bin/sh
# Folders that `convert` writes, as transformers reads them: test_transformers.py, where a Python with torch and transformers is
# there. PYTHON=... names it.
. test/cli.sh
PYTHON=${PYTHON:-python3}
if "$PYTHON" -c 'import torch, transformers' 2>/dev/null; then
    "$PYTHON" test/test_transformers.py "$TRAIN" "$WORK"
    exit
fi
echo "[  SKIPPED ] what convert writes, read by transformers: NOT TESTED, because $PYTHON has no torch and transformers (PYTHON=... names another)"
skipped=$((skipped + 1))
finish
