#!/bin/sh
# data/render.py: test_render.py, with a Python that has the modules of data/.
. test/cli.sh
. test/find_python.sh
find_or_make_python
run_python "$DATA_MODULES" test/data/test_render.py 'data/render.py'
