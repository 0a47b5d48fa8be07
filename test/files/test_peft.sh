#!/bin/sh
# Adapters between this program and PEFT: runs test_peft.py if a Python has torch.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers, peft' test/files/test_peft.py 'adapters, to and from PEFT'
