#!/bin/sh
# data/prepare.py: runs test/data/test_prepare.py with a Python that has what it needs. $PYTHON, or python3, or else a virtual environment
# below build/, made with pip (DEPS=skip refuses that). Without one all of it is skipped, and that is said.
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$here" || exit 1
. test/find_python.sh
find_or_make_python
if [ -z "$python" ]; then
    echo "[  SKIPPED ] data/prepare.py: NOT TESTED, because no Python has tokenizers, jinja2 and numpy (pip install tokenizers jinja2 numpy)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
exec "$python" test/data/test_prepare.py "$@"
