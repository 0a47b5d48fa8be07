#!/bin/sh
# What prepare.py decides of a chat reaches the run, the rollout, sample and the converted folder.
. test/cli.sh
. test/find_python.sh
TRAIN=$(realpath "$TRAIN_PLAIN")
find_or_make_python
run_python "$DATA_MODULES" test/files/test_chat_travels.py 'the way of a chat template'
