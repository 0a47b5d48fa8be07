#!/bin/sh
# Objectives against PyTorch's autograd: runs test_objectives_torch.py if a Python has torch.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers, peft, numpy' test/data/test_objectives_torch.py 'objectives against autograd'
