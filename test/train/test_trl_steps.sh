#!/bin/sh
# Ten steps beside TRL's own trainers: test_trl_steps.py, where a Python with TRL is there. With the double build, which is made here.
. test/cli.sh
. test/find_python.sh
find_python 'torch, transformers, datasets, trl, numpy'
[ -z "$python" ] || make -s PRECISION=double SUFFIX= build/cpu-double/train >/dev/null || fail 'the double build cannot be made'
TRAIN=build/cpu-double/train
run_python 'torch, transformers, datasets, trl, numpy' test/train/test_trl_steps.py 'steps beside TRL'
