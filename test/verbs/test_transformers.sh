#!/bin/sh
# Folders written by `convert`, read by transformers: runs test_transformers.py if a Python has torch.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers' test/verbs/test_transformers.py 'what convert writes, read by transformers'
