#!/bin/sh
# data/prepare.py: runs test/data/test_prepare.py with a Python that has its modules: $PYTHON, python3, or a virtual
# environment below build/, made with pip (DEPS=skip refuses that). Without one, skips all of it and says so.
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
