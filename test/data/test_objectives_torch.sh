#!/bin/sh
# Objectives against PyTorch's autograd: test_objectives_torch.py, where a Python with torch is there.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers, peft, numpy' test/data/test_objectives_torch.py 'objectives against autograd'
