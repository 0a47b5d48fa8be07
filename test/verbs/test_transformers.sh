#!/bin/sh
# Folders that `convert` writes, as transformers reads them: test_transformers.py, where a Python with torch is there.
. test/cli.sh
. test/find_python.sh
run_python 'torch, transformers' test/verbs/test_transformers.py 'what convert writes, read by transformers'
