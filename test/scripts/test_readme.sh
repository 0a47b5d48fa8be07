#!/bin/sh
# Every command printed in a Markdown file and every link exists: see test_readme.py.
command -v python3 >/dev/null || { printf '[  SKIPPED ] commands of README files: NOT TESTED, because there is no python3\n0 passed, 0 failed, 1 skipped\n'; exit 0; }
exec python3 test/scripts/test_readme.py "${TRAIN_PLAIN:-./train}"
