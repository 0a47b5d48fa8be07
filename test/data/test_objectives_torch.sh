#!/bin/sh
# Objectives against PyTorch's autograd: test_objectives_torch.py, where a Python with torch, transformers and peft is there.
# PYTHON=... names it.
. test/cli.sh
. test/find_python.sh
find_python 'torch, transformers, peft, numpy'
if [ -n "$python" ]; then
    "$python" test/data/test_objectives_torch.py "$TRAIN" "$WORK"
    exit
fi
echo "[  SKIPPED ] objectives against autograd: NOT TESTED, because no Python has torch, transformers and peft (PYTHON=... names one)"
skipped=$((skipped + 1))
finish
