#!/bin/sh
# data/prepare.py: runs test/test_prepare.py with a Python that has what it needs. $PYTHON, or python3, or else a virtual environment
# below build/, made with pip (DEPS=skip refuses that). Without one all of it is skipped, and that is said.
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here" || exit 1
has() { "$1" -c 'import tokenizers, numpy, jinja2
assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)' 2>/dev/null; }

python=
for candidate in "${PYTHON:-python3}" build/python/bin/python; do
    has "$candidate" && { python=$candidate; break; }
done
if [ -z "$python" ] && [ "${DEPS:-}" != skip ]; then
    echo "making build/python with tokenizers, jinja2, numpy and pyarrow, for the tests of data/" >&2
    { python3 -m venv build/python && build/python/bin/pip install -q tokenizers 'jinja2>=3.1.6' numpy pyarrow; } >&2 2>&1
    has build/python/bin/python && python=build/python/bin/python
fi
if [ -z "$python" ]; then
    echo "[  SKIPPED ] data/prepare.py: NOT TESTED, because no Python has tokenizers, jinja2 and numpy (pip install tokenizers jinja2 numpy)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
exec "$python" test/test_prepare.py "$@"
