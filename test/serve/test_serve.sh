#!/bin/sh
# sample --serve: test_serve.py, with a Python that has the modules of data/.
. test/cli.sh
. test/find_python.sh
. test/build.sh
find_libevent
[ -n "$libevent" ] || { skip 'sample --serve' 'there is no libevent'; finish; }
find_or_make_python
run_python "$DATA_MODULES" test/serve/test_serve.py 'sample --serve'
