# Sourced by the tests that need Python: find_python sets $python to one that has the modules, or to nothing. $PYTHON goes first.

# Modules of prepare.py, for data/. It refuses a jinja2 before 3.1.6.
DATA_MODULES='tokenizers, numpy, jinja2'

has_modules() { # python, modules
    "$1" -c "import $2
import sys
jinja2 = sys.modules.get('jinja2')
assert not jinja2 or tuple(map(int, jinja2.__version__.split('.')[:3])) >= (3, 1, 6)" 2>/dev/null
}
find_python() { # modules
    for python in "${PYTHON:-python3}" build/python/bin/python; do
        has_modules "$python" "$1" && return
    done
    python=
}
# Runs a test in a Python with the modules, if there is one; PYTHON=... names it. Ends the script.
run_python() { # modules, script, what it tests
    find_python "$1"
    if [ -n "$python" ]; then
        PYTHONPATH=test/data "$python" "$2" "$TRAIN" "$WORK"
        exit
    fi
    echo "[  SKIPPED ] $3: NOT TESTED, because no Python has $1 (PYTHON=... names one)"
    skipped=1
    finish
}
# Finds a Python for data/; if there is none, makes a virtual environment below build/ with pip (DEPS=skip refuses).
find_or_make_python() {
    find_python "$DATA_MODULES"
    [ -n "$python" ] || [ "${DEPS:-}" = skip ] && return
    echo "making build/python with tokenizers, jinja2, numpy and pyarrow, for the tests of data/" >&2
    { python3 -m venv build/python && build/python/bin/pip install -q --no-compile tokenizers 'jinja2>=3.1.6' numpy pyarrow; } >&2 2>&1
    find_python "$DATA_MODULES"
}
