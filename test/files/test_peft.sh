#!/bin/sh
# Adapters between this program and PEFT: test_peft.py, where a Python with torch is there.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers, peft' test/files/test_peft.py 'adapters, to and from PEFT'
