#!/bin/sh
# Ten steps beside TRL's own trainers: runs test_trl_steps.py if a Python has TRL. Makes the double build.
. test/cli.sh
. test/find_python.sh
find_python 'torch, transformers, datasets, trl, numpy'
[ -z "$python" ] || double_build
run_python 'torch, transformers, datasets, trl, numpy' test/train/test_trl_steps.py 'steps beside TRL'
