#!/bin/sh
# Every command printed in a Markdown file and every link exists: see test_readme.py. Every figure says what it is: see test_figures.py.
command -v python3 >/dev/null || { printf '[  SKIPPED ] commands of README files: NOT TESTED, because there is no python3\n0 passed, 0 failed, 1 skipped\n'; exit 0; }
python3 test/scripts/test_figures.py
figures=$?
python3 test/scripts/test_readme.py "${TRAIN_PLAIN:-./train}" && exit $figures
